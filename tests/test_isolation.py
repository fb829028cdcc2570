"""The folder that one stands in runs no code: it holds a file of every name that Python may import,
and none runs.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from conftest import PATIENCE_S, REPOSITORY
from fake_world import World, open_world
from real_training import needs_open_instruct, needs_trl

from launcher.machine import isolation
from launcher.machine.python import ask_trainer, find_trainer
from launcher.upstream import locate

OWN_NAMES = (
    "launcher",
    "inside",
    "watching",
    "open_instruct",
    "sitecustomize",
    "usercustomize",
    "launch_probe",
)
TOOLS = (
    "git",
    "nvidia-smi",
    "tmux",
    "squeue",
    "sbatch",
    "uv",
    "python",
    "python3",
    "sh",
    "tail",
    "ninja",
    "gcc",
)
LAUNCH = (sys.executable, "-P", str(REPOSITORY / "launcher" / "__main__.py"))
START = REPOSITORY / "launcher" / "probe" / "start.py"


class Trap:
    """A working folder with a Python file of every importable name and a program of every tool."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = folder.parent / "marker"
        folder.mkdir(parents=True, exist_ok=True)
        for name in self.names():
            (folder / f"{name}.py").write_text(self.code(name))
        for name in TOOLS:
            program = folder / name
            program.write_text(f"#!/bin/bash\necho {name} >> '{self.marker}'\nexit 1\n")
            program.chmod(0o755)

    @staticmethod
    def names() -> set[str]:
        installed = importlib.metadata.packages_distributions()
        listed = {*sys.stdlib_module_names, *installed, *sys.modules, *OWN_NAMES}
        return {name for name in listed if name.isidentifier() and name != "__main__"}

    def code(self, name: str) -> str:
        return (
            f"open({str(self.marker)!r}, 'a').write({name + os.linesep!r})\n"
            f"raise SystemExit({f'ran {name}'!r})\n"
        )

    def sprung(self) -> str:
        return self.marker.read_text() if self.marker.exists() else ""


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path / "here")


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """A whole environment, whose PATH has the current folder in it, twice."""
    return {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "LAUNCH_OPEN_INSTRUCT": str(locate.locate("open_instruct").root or ""),
        "PATH": f".:{os.environ['PATH']}:",
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "") + ":",
        "LAUNCH_RUNS": str(tmp_path / "runs"),
        "LAUNCH_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TMUX": "",
        **more,
    }


def run(
    words: Sequence[str], trap: Trap, environ: Mapping[str, str], codes: Sequence[int] = (0,)
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*LAUNCH, *words],
        cwd=trap.folder,
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert not trap.sprung(), f"launch {' '.join(words)} ran {trap.sprung()}"
    assert done.returncode in codes, done.stdout + done.stderr
    return done


STAGE = """\
stage: sft
backend: {backend}
deepspeed: none
batch: {{global: 16, per_device: 16}}
args:
  model_name_or_path: model
  dataset_name: data/sft
  output_dir: out
  max_steps: 2
  save_strategy: "no"
"""

COMMANDS = (
    ("-h",),
    ("runs",),
    ("cache", "list"),
    ("configs",),
    ("validate-config", "stage.yaml"),
    ("validate-config", "stage.yaml", "--fix"),
    ("schema", "sft", "--format", "json"),
    ("explain", "learning_rate", "--config", "stage.yaml"),
    ("explain", "learning_rate", "--history"),
    ("plan", "stage.yaml", "--gpus", "0"),
    ("sft", "stage.yaml", "--gpus", "0", "--dry-run"),
    ("sft", "stage.yaml", "--gpus", "0", "--dry-run", "--slurm"),
    ("pin", "status"),
    ("check", "some.log"),
    ("report", "some.log", "-o", "page.html"),
)


@needs_trl
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_runs_nothing_of_the_folder(
    trap: Trap, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (trap.folder / "stage.yaml").write_text(STAGE.format(backend="trl"))
    (trap.folder / "some.log").write_text("{'loss': 1.0}\n")
    # what they answer is not the point here: data and model are missing
    run(words, trap, environment(tmp_path), codes=range(6))


@needs_trl
def test_a_whole_run_and_its_keeper_run_nothing_of_the_folder(tmp_path: Path) -> None:
    with open_world(tmp_path / "world") as world:
        trap = Trap(world.root)
        python = python_of(world)
        config = world.config()
        notified = tmp_path / "notified"
        environ = {
            **world.environ,
            **environment(tmp_path),
            "LAUNCH_RUNS": world.environ["LAUNCH_RUNS"],
        }
        words = [
            "sft",
            config.name,
            "--gpus",
            "0",
            "--python",
            python,
            "--on-finish",
            f"/usr/bin/touch {notified}",
        ]
        environ["FAKE_STEPS"] = "[]"
        run(words, trap, environ, codes=(0, 1))
        run([*words, "output_dir=other", "--detach"], trap, environ)
        world.close_sessions()
        world.quiet()
        for follow_up in (
            ["attach", "last"],
            ["check", "last"],
            ["logs", "last"],
            ["report", "last"],
        ):
            run(follow_up, trap, environ, codes=(0, 1, 4))
        run(["stop", "last"], trap, environ, codes=(2,))
        assert notified.exists()


@needs_trl
def test_a_command_in_the_background_runs_nothing_of_the_folder(tmp_path: Path) -> None:
    with open_world(tmp_path / "world") as world:
        trap = Trap(world.root)
        python = python_of(world)
        world.config("one.yaml")
        (world.root / "two.yaml").write_text("stages:\n  - {name: one, config: one.yaml}\n")
        environ = {
            **world.environ,
            **environment(tmp_path),
            "LAUNCH_RUNS": world.environ["LAUNCH_RUNS"],
        }
        run(["pipeline", "two.yaml", "--gpus", "0", "--python", python, "--detach"], trap, environ)
        world.close_sessions()
        world.quiet()
        (log,) = (world.runs / "commands").rglob("console.log")
        assert "one" in log.read_text()
        assert not trap.sprung()


def python_of(world: World) -> str:
    """The fake interpreter of a world, beside the trap instead of in it."""
    place = world.root / "trainer" / "python"
    place.parent.mkdir()
    world.python().rename(place)
    return str(place)


def test_the_trainers_python_is_asked_without_the_folder(
    trap: Trap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trap.folder)
    for path in (":", f"{tmp_path}::", f":{tmp_path}"):
        monkeypatch.setenv("PYTHONPATH", path)
        trainer = ask_trainer(Path(sys.executable), "a test")
        assert trap.folder not in trainer.path
        assert (tmp_path in trainer.path) == (str(tmp_path) in path)
    assert not trap.sprung()


def test_an_old_python_is_asked_without_the_folder(
    trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = python_3_10()
    monkeypatch.chdir(trap.folder)
    assert ask_trainer(old, "a test").version[:2] == (3, 10)
    assert not trap.sprung()


def test_an_old_python_starts_training_without_the_folder(trap: Trap, tmp_path: Path) -> None:
    module = tmp_path / "site" / "accelerator" / "commands.py"
    module.parent.mkdir(parents=True)
    module.write_text("import json, sys, tempfile, argparse\nprint(json.dumps(sys.argv[1:]))\n")
    environ = {**os.environ, **isolation.list_changes({"PYTHONPATH": f"{tmp_path / 'site'}:"})}
    words = [str(python_3_10()), str(START), "accelerator.commands", "--x", "1"]
    done = subprocess.run(words, cwd=trap.folder, env=environ, capture_output=True, text=True)
    assert done.stdout == '["--x", "1"]\n', done.stderr
    assert not trap.sprung()


def python_3_10() -> Path:
    for versions in (Path.home() / ".pyenv" / "versions", Path("/root/.pyenv/versions")):
        for path in versions.glob("3.10.*/bin/python3.10"):
            return path
    named = shutil.which("python3.10")
    if named is not None and subprocess.run([named, "-c", ""], capture_output=True).returncode == 0:
        return Path(named)
    pytest.skip("no Python 3.10")


def test_a_python_named_by_a_variable_is_not_looked_for_in_the_folder(
    trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trap.folder)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    (trap.folder / "python-of-mine").symlink_to(trap.folder / "python")
    for name in ("python3", "python-of-mine"):
        try:
            find_trainer(None, None, {"LAUNCH_PYTHON": name})
        except Exception as error:
            assert "not in PATH" in str(error)
    assert not trap.sprung()


@pytest.mark.parametrize(("name", "value", "clean"), [
    ("PYTHONPATH", ":", ""),
    ("PYTHONPATH", "/a::/b:", "/a:/b"),
    # what a user wrote stays
    ("PYTHONPATH", "src:/a", None),
    ("PATH", ":/bin:.", "/bin"),
    ("PATH", "bin:/usr/bin", "/usr/bin"),
    ("PATH", ".", os.defpath),
    ("LD_LIBRARY_PATH", ":/x/lib", "/x/lib"),
    ("LD_LIBRARY_PATH", "/x/lib", None),
])  # fmt: skip
def test_an_empty_entry_of_a_search_path_is_left_out(
    name: str, value: str, clean: str | None
) -> None:
    assert isolation.list_changes({name: value}).get(name) == clean


DEEPSPEED = """\
import json, os, sys
seen = {"path": os.environ.get("PYTHONPATH"), "cwd": os.getcwd(), "safe": sys.flags.safe_path}
json.dump(seen, open(sys.argv[1], "w"))
"""


@needs_trl
@pytest.mark.slow
def test_deepspeeds_workers_do_not_get_the_folder_from_accelerate(
    trap: Trap, tmp_path: Path
) -> None:
    (tmp_path / "worker.py").write_text(DEEPSPEED)
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    options = "--num_processes 1 --num_machines 1 --main_process_port 0"
    words = [sys.executable, str(START), "accelerate.commands.launch", *options.split()]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    words += ["--use_deepspeed", "--deepspeed_config_file", str(tmp_path / "ds.json")]
    words += [str(tmp_path / "worker.py"), str(tmp_path / "seen")]
    environ = environment(tmp_path)
    environ |= {**isolation.list_changes(environ), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        words, cwd=trap.folder, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert not trap.sprung(), done.stderr
    seen = (tmp_path / "seen").read_text()
    assert f'"path": "{tmp_path}", "cwd": "{trap.folder}", "safe": true' in seen, done.stderr


TRL = """\
stage: sft
backend: trl
deepspeed: none
batch: {global: 16, per_device: 16}
expect: {loss: finite, liger: off}
args:
  model_name_or_path: ASSETS/model
  dataset_name: ASSETS/data/sft
  dataset_num_proc: 2
  dataloader_num_workers: 1
  output_dir: OUT
  max_steps: 3
  bf16: false
  gradient_checkpointing: false
  logging_steps: 1
  save_steps: 2
"""
OPEN_INSTRUCT = """\
stage: sft
backend: open_instruct
deepspeed: none
batch: {global: 8, per_device: 8}
expect: {loss: finite, liger: off}
args:
  model_name_or_path: ASSETS/model
  chat_template_name: tulu
  dataset_mixer_list: [ASSETS/data/sft/train.jsonl, "40"]
  dataset_local_cache_dir: OUT-cache
  max_seq_length: 256
  output_dir: OUT
  do_not_randomize_output_dir: true
  max_train_steps: 2
  checkpointing_steps: "1"
  logging_steps: 1
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
"""


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["trl", pytest.param("open_instruct", marks=needs_open_instruct)]
)
def test_a_real_training_and_what_comes_before_it_run_nothing_of_the_folder(
    trap: Trap, tmp_path: Path, demo_assets: Path, backend: str
) -> None:
    text = TRL if backend == "trl" else OPEN_INSTRUCT
    text = text.replace("ASSETS", str(demo_assets)).replace("OUT", str(tmp_path / "out"))
    (trap.folder / "stage.yaml").write_text(text)
    environ = environment(tmp_path)
    if backend == "open_instruct":
        # these start the same processes for every trainer
        run(["rehearse", "stage.yaml"], trap, environ)
        run(["doctor", "stage.yaml", "--gpus", "0"], trap, environ)
        run(["prepare", "stage.yaml", "--gpus", "0"], trap, environ)
    words = ["sft", "stage.yaml", "--gpus", "0", "--allow-unproven"]
    process = run(words, trap, environ, codes=(0, 1))
    assert (tmp_path / "out" / "config.json").exists(), process.stderr
