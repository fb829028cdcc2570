"""`launch rehearse`: what the real scripts refuse is named by key and line, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from fake_world import bearing, until
from real_training import needs_open_instruct, needs_trl
from typer.testing import CliRunner

from launcher.cli.commands import app
from launcher.errors import Finding, InvalidConfig, NotReady, launch_finding, not_ready
from launcher.lifecycle.prepare import Request, judge, resolve
from launcher.machine.python import Trainer, find_trainer
from launcher.stage.stage import Judged
from launcher.workflows.rehearse import ask, memory, rehearsal, scratch
from launcher.workflows.rehearse.ask import Server
from launcher.workflows.rehearse.rehearsal import Rehearsal

SFT = """\
stage: sft
backend: trl
deepspeed: none
batch: {global: 16, per_device: 16}
args:
  model_name_or_path: ASSETS/model
  dataset_name: ASSETS/data/sft
  max_length: 512
  warmup_steps: 2
"""


@pytest.fixture
def stage_file(tmp_path: Path, demo_assets: Path) -> Path:
    """A stage of the demo's model and data, for TRL."""
    path = tmp_path / "sft.yaml"
    path.write_text(SFT.replace("ASSETS", str(demo_assets)))
    return path


def rehearsed(path: Path, *overrides: str, rules: bool = True) -> Rehearsal:
    """The rehearsal of a stage file; without `rules` nothing that they refuse is left out of it."""
    judged, trainer = judge(Request(stage=None, config=path, overrides=overrides))
    judged = judged if rules else replace(judged, findings=())
    return rehearsal.rehearse(judged, trainer)


def faults(done: Rehearsal) -> dict[str | None, Finding]:
    return {one.key: one for one in done.findings if one.severity == "error"}


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert not [name for name in os.listdir(folder) if name.startswith("launch-rehearsal")]


@needs_trl
@pytest.mark.slow
def test_three_mistakes_are_three_findings_with_their_lines_and_nothing_is_left(
    tmp_path: Path, demo_assets: Path
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"quest": "a", "ans": "b"}\n' * 20)
    path = tmp_path / "wrong.yaml"
    text = SFT.replace("ASSETS/data/sft", str(tmp_path / "rows"))
    text = text.replace("ASSETS", str(demo_assets))
    path.write_text(text + "  lr_scheduler_type: cosin\n  use_peft: true\n  lora_target_modules: [q_prj]\n")
    words = [sys.executable, "-m", "launcher", "rehearse", str(path), "--format", "json"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    told = json.loads(done.stdout)
    wrong = {one["key"]: one["line"] for one in told["findings"] if one["severity"] == "error"}
    lines = {"dataset_name": 7, "lr_scheduler_type": 10, "lora_target_modules": 12}
    assert wrong == {f"args.{key}": line for key, line in lines.items()}


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "key", "words"), [
    (["dataset_kwargs={skip_prepare_dataset: true}"], "dataset_kwargs", "No columns in the dataset"),
    (["lr_scheduler_kwargs={min_lr: 1.0e-6}", "lr_scheduler_type=cosine"], "lr_scheduler_kwargs",
     "unexpected keyword argument 'min_lr'"),
    (["learning_rate=1e-30"], "learning_rate", "change no weight"),
    (["learning_rate=1e30"], "learning_rate", "make weights"),
    (["report_to=wandbb"], "report_to", "wandbb"),
    (["use_peft=true", "lora_target_modules=[q_prj]"], "lora_target_modules", "q_prj not found in the base model"),
    (["model_init_kwargs={foo: 1}"], "model_init_kwargs", "unexpected keyword argument 'foo'"),
])  # fmt: skip
def test_what_only_shows_in_the_real_script(stage_file: Path, overrides: list[str], key: str, words: str) -> None:
    stage_file.write_text(stage_file.read_text() + "".join(f"  {one.replace('=', ': ')}\n" for one in overrides[:1]))
    found = faults(rehearsed(stage_file, *overrides[1:], rules=False))
    assert list(found) == [f"args.{key}"]
    (one,) = found.values()
    assert words in one.message and (one.layer, one.code) == ("trainer", "trainer-refuses")


@needs_trl
@pytest.mark.slow
def test_a_sound_stage_is_clean_tells_its_rows_and_is_remembered(stage_file: Path) -> None:
    first = rehearsed(stage_file)
    assert not faults(first)
    assert first.rows["rows"] == 64 and first.row_tokens is not None
    assert len(first.losses) == 2 and not first.stand_ins and not first.remembered
    again = rehearsed(stage_file)
    assert again.remembered and again.rows == first.rows
    data = Path(SFT and str(stage_file))
    data.write_text(data.read_text().replace("max_length: 512", "max_length: 60"))
    other = rehearsed(stage_file)
    assert not other.remembered
    assert "cut-rows" in {one.code for one in other.findings}


@needs_trl
@pytest.mark.slow
def test_what_is_not_here_has_a_stand_in_and_what_a_cpu_lacks_is_said(tmp_path: Path) -> None:
    path = tmp_path / "dpo.yaml"
    path.write_text(
        "stage: dpo\nbackend: trl\ndeepspeed: zero2\nargs:\n"
        "  model_name_or_path: Qwen/Qwen2.5-7B\n  dataset_name: org/pairs\n"
        "  use_liger_kernel: true\n  fsdp: full_shardd\n  attn_implementation: flash_attention_2\n"
    )
    done = rehearsed(path, rules=False)
    assert set(faults(done)) == {"args.fsdp"}
    assert {"DeepSpeed", "FSDP", "Liger's kernels", "the attention kernels of GPUs"} == set(done.left_out)
    assert len(done.stand_ins) == 3 and done.row_tokens is None
    said = [one for one in done.findings if one.code in {"not-rehearsed", "stand-in"}]
    assert len(said) == 7 and {one.severity for one in said} == {"note"}


@needs_open_instruct
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_open_instructs_own_scripts(stage: str, tmp_path: Path, demo_assets: Path) -> None:
    data, cache = ("dataset_mixer_list", "dataset_") if stage == "sft" else ("mixer_list", "")
    path = tmp_path / f"{stage}.yaml"
    path.write_text(
        f"stage: {stage}\nbackend: open_instruct\nargs:\n"
        f"  model_name_or_path: {demo_assets}/model\n  chat_template_name: tulu\n"
        f"  {data}: [{demo_assets}/data/{stage}/train.jsonl, '200']\n"
        f"  max_seq_length: 256\n  {cache}transform_fn: [nothing_such]\n"
        "  push_to_hub: false\n  try_launch_beaker_eval_jobs: false\n"
    )
    done = rehearsed(path, rules=False)
    assert {*faults(done)} == {f"args.{cache}transform_fn"}
    assert done.rows["rows"] == 64 and len(done.losses) == 2
    assert not (tmp_path / "output").exists()


ENDINGS = {
    "hangs": "import time; time.sleep(900)",
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "exits": "import os; os._exit(7)",
    "fills": "import errno; raise OSError(errno.ENOSPC, 'No space left on device')",
}


@pytest.fixture
def ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A server whose stage ends as the request says."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "__init__.py").touch()
    body = "def load(setup):\n    pass\ndef answer(request, seen):\n    exec(request['code'])\n"
    (tmp_path / "inside" / "made_stage.py").write_text(body)
    (tmp_path / "server.py").write_bytes(ask.SERVER.read_bytes())
    monkeypatch.setattr(ask, "SERVER", tmp_path / "server.py")
    return find_trainer(Path(sys.executable), None)


def test_however_the_script_ends_there_is_one_answer_and_no_folder(ending: Trainer) -> None:
    with Server(ending, "made", "sft", None) as server:
        asked = [{"code": code} for code in ENDINGS.values()]
        hung, died, left, full = server.ask(*asked, limit_s=2)
        (fine,) = server.ask({"code": "seen['phase'] = 'train'"})
        said = [ask.crash(one, server.log(one)) for one in (hung, died, left)]
    assert hung["hung"] and "ending" not in hung and "made_stage" in hung["stack"]
    assert [one.code for one in said] == ["rehearsal-hangs", "rehearsal-crash", "rehearsal-crash"]
    assert "SIGSEGV" in said[1].message and "7" in said[2].message
    assert full["refusal"]["errno"] == 28
    assert fine["phase"] == "train"


def test_a_launch_that_was_killed_leaves_no_folder(ending: Trainer) -> None:
    server = Server(ending, "made", "sft", None).__enter__()
    assert server._process.stdin is not None
    server._process.stdin.close()
    server._process.wait(timeout=20)
    assert not server.scratch.exists()


REHEARSES = """
import sys, tempfile
from pathlib import Path
from launcher.machine.python import find_trainer
from launcher.workflows.rehearse import ask
ask.SERVER = Path(sys.argv[1])
with ask.Servers() as servers:
    server = servers.of(find_trainer(Path(sys.executable), None), "made", "sft", None)
    print("ready", flush=True)
    server.ask({"code": sys.argv[2]})
"""
STAGES_OF_A_REHEARSAL = {
    "loading": ("import time\nprint('loading', flush=True)\ntime.sleep(900)\n", ""),
    "working": ("", "import subprocess; subprocess.run(['sleep', '900'])"),
}


@pytest.mark.parametrize("stage", STAGES_OF_A_REHEARSAL)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_whatever_ends_a_rehearsal_nothing_of_it_is_left(
    ending: Trainer, tmp_path: Path, number: signal.Signals, stage: str
) -> None:
    load, code = STAGES_OF_A_REHEARSAL[stage]
    module = tmp_path / "inside" / "made_stage.py"
    module.write_text(module.read_text() + load)
    environ = {**os.environ, "REHEARSAL_TEST": str(tmp_path)}
    words = [sys.executable, "-c", REHEARSES, str(ask.SERVER), code]
    running = subprocess.Popen(words, env=environ, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    temporary = tmp_path / "temporary"
    until(lambda: list(temporary.glob("launch-rehearsal-*/*.log")))
    until(lambda: len(bearing("REHEARSAL_TEST", tmp_path)) >= (2 if stage == "loading" else 4))
    time.sleep(0.3)
    running.send_signal(number)
    running.communicate(timeout=60)
    until(lambda: not list(temporary.iterdir()))
    until(lambda: not bearing("REHEARSAL_TEST", tmp_path))


def test_a_rehearsal_removes_what_a_killed_one_left_and_nothing_else(ending: Trainer, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    left = temporary / "launch-rehearsal-left"
    left.mkdir()
    (left / scratch.LOCK).touch()
    fresh, elsewhere = temporary / "launch-rehearsal-fresh", tmp_path / "elsewhere"
    fresh.mkdir()
    elsewhere.mkdir()
    (elsewhere / scratch.LOCK).touch()
    link = temporary / "launch-rehearsal-link"
    link.symlink_to(elsewhere)
    with Server(ending, "made", "sft", None) as first, Server(ending, "made", "sft", None) as second:
        assert not left.exists()
        assert first.scratch.exists() and second.scratch.exists() and fresh.exists() and elsewhere.exists()
    fresh.rmdir()
    link.unlink()


def test_a_python_without_the_packages_is_not_ready(
    ending: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inside" / "made_stage.py").write_text("import no_such_package\n")
    with pytest.raises(Exception, match="No module named 'no_such_package'") as caught:
        Server(ending, "made", "sft", None).__enter__()
    assert type(caught.value).__name__ == "NotReady"


FAMILIES = (
    "llama", "mistral", "smollm3", "granite", "qwen2", "qwen3", "olmo", "olmo2", "olmo3", "phi3",
    "gemma", "gemma2", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss",
    "qwen3_next", "falcon_h1", "deepseek_v3", "glm4", "glm4_moe", "gpt2", "opt", "bloom", "gpt_neox",
    "phi", "cohere2", "stablelm", "starcoder2", "mamba2", "bamba", "jamba", "ernie4_5",
    "seed_oss", "exaone4", "falcon", "granitemoe", "lfm2",
)  # fmt: skip


@needs_trl
@pytest.mark.slow
def test_most_families_of_transformers_shrink() -> None:
    code = (
        "import sys, json, warnings; warnings.simplefilter('ignore'); sys.path.insert(0, sys.argv[1])\n"
        "import torch, transformers; torch.set_num_threads(1); transformers.logging.set_verbosity_error()\n"
        "from inside import shrink\n"
        "failed = {}\n"
        "for kind in sys.argv[2:]:\n"
        "    try:\n"
        "        shrink.shrink(transformers.AutoConfig.for_model(kind))\n"
        "    except Exception as error:\n"
        "        failed[kind] = f'{type(error).__name__}: {error}'[:200]\n"
        "print(json.dumps(failed))\n"
    )
    folder = str(ask.SERVER.parent)
    done = subprocess.run(
        [sys.executable, "-c", code, folder, *FAMILIES], capture_output=True, text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    failed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(failed) <= 2, failed


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which stage files were rehearsed; the trainer refuses a learning rate of 7."""
    seen: list[str] = []

    def rehearse(judged: Judged, *_: object, **__: object) -> Rehearsal:
        seen.append(judged.config.path.name)
        refused = launch_finding("error", "trainer-refuses", "no", None)
        warned = launch_finding("warning", "cut-rows", "half of the rows are cut", None)
        wrong = judged.config.args.get("learning_rate") == 7
        return Rehearsal(findings=(refused,) if wrong else (warned,), seconds=1)

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    monkeypatch.delenv(rehearsal.VARIABLE)
    return seen


def begun(path: Path, *overrides: str, by_itself: bool, rehearse: bool | None = None) -> list[str]:
    request = Request(stage=None, config=path, overrides=overrides, gpus=0, rehearse=rehearse)
    stages = {"": resolve(request, running=False)}
    return [one.code for one in rehearsal.require(stages, print, by_itself=by_itself)]


@needs_trl
def test_who_asks_for_a_rehearsal(stage_file: Path, rehearsals: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = stage_file.read_text()
    for in_file, by_itself, option, expected in (
        ("", True, None, 1), ("", False, None, 0), ("", False, True, 1), ("", True, False, 0),
        ("rehearse: true\n", False, None, 1), ("rehearse: off\n", True, None, 0),
        ("rehearse: off\n", True, True, 1),
    ):  # fmt: skip
        rehearsals.clear()
        stage_file.write_text(in_file + text)
        codes = begun(stage_file, by_itself=by_itself, rehearse=option)
        assert (len(rehearsals), len(codes)) == (expected, expected), (in_file, by_itself, option)
    # a variable switches off what nobody asked for
    stage_file.write_text(text)
    monkeypatch.setenv(rehearsal.VARIABLE, "0")
    assert begun(stage_file, by_itself=True) == []
    assert begun(stage_file, by_itself=True, rehearse=True) == ["cut-rows"]


@needs_trl
def test_what_the_trainer_refuses_does_not_start(stage_file: Path, rehearsals: list[str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        begun(stage_file, "learning_rate=7", by_itself=True)
    assert [one.code for one in caught.value.findings] == ["trainer-refuses"]
    # what rules refuse is not rehearsed
    with pytest.raises(InvalidConfig, match="lr_scheduler_type"):
        begun(stage_file, "lr_scheduler_type=none", by_itself=True)
    assert rehearsals == [stage_file.name]


@needs_trl
def test_only_who_asked_is_refused_for_a_python_that_cannot_rehearse(
    stage_file: Path, rehearsals: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rehearse(*_: object, **__: object) -> Rehearsal:
        raise not_ready("rehearsal-imports", "no trl")

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    assert begun(stage_file, by_itself=True) == ["not-rehearsed"]
    with pytest.raises(NotReady):
        begun(stage_file, by_itself=True, rehearse=True)


@needs_trl
@pytest.mark.parametrize("command", [
    ("sft", "FILE", "--gpus", "0", "--rehearse"),
    ("ladder", "FILE", "--gpus", "0", "--steps", "5"),
    ("bench", "FILE", "--cpu", "--vary", "learning_rate=7,1e-3", "--steps", "2"),
    ("tune", "FILE", "--cpu", "--row-tokens", "80:200", "--budget", "60s"),
])  # fmt: skip
def test_commands_that_start_something_long_rehearse_first(
    command: tuple[str, ...], stage_file: Path, rehearsals: list[str], tmp_path: Path
) -> None:
    rate = "7" if command[0] != "bench" else "1e-4"
    stage_file.write_text(stage_file.read_text() + f"  learning_rate: {rate}\n  output_dir: {tmp_path}/out\n")
    words = [str(stage_file) if word == "FILE" else word for word in command]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, InvalidConfig), done.output
    codes = [one.code for one in done.exception.findings if one.severity == "error"]
    assert codes == ["trainer-refuses"]
    assert not (tmp_path / "out").exists()


@needs_trl
@pytest.mark.slow
def test_several_files_at_once(stage_file: Path) -> None:
    other = stage_file.with_name("other.yaml")
    other.write_text(stage_file.read_text() + "  dataset_kwargs: {skip_prepare_dataset: true}\n")
    words = ["validate-config", "--deep", str(stage_file), str(other), "--format", "json"]
    told = json.loads(CliRunner().invoke(app, words).stdout)
    assert [one["valid"] for one in told["data"]["files"]] == [True, False]
    errors = [one["code"] for one in told["findings"] if one["severity"] == "error"]
    assert errors == ["trainer-refuses"]


@needs_trl
def test_a_plan_takes_the_length_of_rows_from_an_earlier_rehearsal(
    stage_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["plan", str(stage_file), "--gpus", "1", "--gpu", "H100"]
    seen = "rows: the first rows, as a rehearsal saw them"
    assert seen not in CliRunner().invoke(app, words).stdout
    monkeypatch.setattr(memory, "recall", lambda *_: {"row_tokens": "79:159"})
    assert seen in CliRunner().invoke(app, words).stdout


@needs_trl
def test_what_is_only_parsed_is_remembered_by_its_value_too(stage_file: Path) -> None:
    def recalled(*overrides: str) -> object:
        judged, trainer = judge(Request(stage=None, config=stage_file, overrides=overrides))
        return memory.recall(judged, trainer)

    judged, trainer = judge(Request(stage=None, config=stage_file, overrides=("fsdp=full_shard",)))
    memory.keep(judged, trainer, {"findings": []})
    assert recalled("fsdp=full_shard") is not None
    assert recalled("fsdp=nonsense") is None
