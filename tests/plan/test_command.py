"""Plan -> argv, environment: golden for the configs people run, and safe in any shell."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import DATA, PATIENCE_S
from plans import CONFIGS, SFT, build_command, from_text, load_stage, make_plan, trainer

from launcher.paths import PACKAGE
from launcher.plan import command, plan
from launcher.runs.attempt import Command

GOLDEN = DATA / "argv"
STUB = """#!{python}
import json, os, sys
with open({out!r}, "w") as stream:
    json.dump([sys.argv[1:], dict(os.environ)], stream)
"""


def command_text(command: Command) -> str:
    """One word a line, the environment first, without what differs between machines."""
    lines = [f"{name}={value}" for name, value in command.env.items()]
    lines += command.argv
    text = "\n".join(lines) + "\n"
    return text.replace(str(PACKAGE), "<launcher>").replace(str(PACKAGE.parent), "<project>")


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
@pytest.mark.parametrize(
    "name",
    [
        "tulu/sft_qwen7b",
        "tulu/sft_qwen7b_25pct",
        "tulu/dpo_qwen7b",
        "llama/llama31_8b_sft_10pct",
        "llama/llama31_8b_dpo_10pct",
        "smoke/sft_qwen7b",
        "smoke/dpo_qwen7b",
        "lora/sft_qwen7b",
        "lora/dpo_qwen7b",
    ],
)
def test_golden_argv(name: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # no folder of this machine is taken for a model of the config
    monkeypatch.chdir(tmp_path)
    plan = make_plan(load_stage(CONFIGS / f"{name}.yaml"), gpus)
    text = command_text(build_command(plan))
    golden = GOLDEN / f"{name.replace('/', '-')}-{gpus}gpu.txt"
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def option(command: Command, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


TULU = CONFIGS / "tulu" / "sft_qwen7b.yaml"
DEMO = CONFIGS / "demo" / "sft.yaml"


def test_the_deepspeed_file_that_is_named_exists() -> None:
    command = build_command(make_plan(load_stage(TULU), 8))
    assert Path(option(command, "--deepspeed_config_file")).is_file()


@pytest.mark.parametrize(
    ("overrides", "precision"), [([], "no"), (["mixed_precision=fp16"], "fp16")]
)
def test_trl_decides_on_precision_unless_the_file_does(
    overrides: list[str], precision: str
) -> None:
    command = build_command(make_plan(load_stage(DEMO, overrides), 1))
    assert option(command, "--mixed_precision") == precision


@pytest.mark.parametrize(
    ("gpus", "outer", "inner"),
    [(0, "1", ""), (1, None, "0"), (1, "3,4", "3"), (1, "GPU-a,GPU-b", "GPU-a"), (2, "3,4", None)],
)
def test_one_process_sees_one_gpu(gpus: int, outer: str | None, inner: str | None) -> None:
    environ = {} if outer is None else {"CUDA_VISIBLE_DEVICES": outer}
    command = build_command(make_plan(load_stage(TULU), gpus), environ)
    assert command.env.get("CUDA_VISIBLE_DEVICES") == inner


@pytest.mark.parametrize("deepspeed", ["none", "zero2"])
def test_several_nodes_leave_the_place_of_each_open(deepspeed: str) -> None:
    stage = load_stage(TULU, [f"deepspeed={deepspeed}", "batch.per_device=8"])
    command = build_command(make_plan(stage, 8, nodes=2))
    assert option(command, "--num_processes") == "16"
    assert option(command, "--machine_rank") == "NODE_RANK"
    assert option(command, "--main_process_ip") == "HEAD_ADDRESS"
    assert option(command, "--main_process_port") != "0"
    uses_its_launcher = "--deepspeed_multinode_launcher" in command.argv
    assert uses_its_launcher is (deepspeed != "none")


def test_the_environment_has_what_is_needed_beside_the_users_own() -> None:
    environ = {"HOME": "/root", "PYTHONPATH": "/mine"}
    command = build_command(make_plan(load_stage(TULU), 8), environ)
    assert command.env["PYTHONPATH"] == "/source:/mine"
    assert "HOME" not in command.env
    assert "PYTHONPATH" not in build_command(make_plan(load_stage(DEMO), 0)).env


NASTY = (
    "two words",
    'it\'s "x"',
    "line\nbreak",
    "$(touch pwned) `touch pwned`; touch pwned && touch pwned #",
    "$HOME ~ * !x {a,b} %s",
    "a\\b\tc",
    "ümlaut \U0001f600",
    "",
)


@pytest.mark.parametrize("value", NASTY)
def test_the_pasted_line_is_the_command(
    tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"a {value.replace('/', '-')[:40]} folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    output = tmp_path / "out.json"
    python = folder / "my python"
    python.write_text(STUB.format(python=sys.executable, out=str(output)))
    python.chmod(0o755)
    text = SFT.format(more=f"exp_name: {json.dumps(value, ensure_ascii=False)}")
    command = build_command(
        make_plan(from_text(folder, text), 2),
        {"PYTHONPATH": f"/x/{value}"},
        python=python,
        folder=folder / "run",
    )

    environ = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "OUTER": "kept"}
    line = ["bash", "-c", command.shell()]
    subprocess.run(line, env=environ, check=True, timeout=PATIENCE_S)

    argv, seen = json.loads(output.read_text())
    assert argv == list(command.argv[1:])
    assert value in argv
    expected = {**command.env, "OUTER": "kept", "HOME": "/nowhere"}
    assert seen.items() >= expected.items()
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    ("file", "script"),
    [
        (TULU, "external/open-instruct/open_instruct/finetune.py"),
        (DEMO, "/env/lib/site-packages/trl/scripts/sft.py"),
    ],
)
def test_without_a_source_a_dry_run_names_its_place(file: Path, script: str) -> None:
    stage = load_stage(file)
    stage = replace(stage, upstream=replace(stage.upstream, root=None))
    python = replace(trainer(), path=(Path("/env/lib"), Path("/env/lib/site-packages")))
    plan_of_stage = plan.make(stage, gpus=0, output=Path("/run/model"))

    settings = command.build(plan_of_stage, python, Path("/run"), environ={}).env["LAUNCH_PROBE"]

    assert json.loads(settings)["target"].endswith(script)


@pytest.mark.parametrize("name", ["zero3", "zero3_offload"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_zero3_has_plain_linears_only_where_layers_are_computed_again(
    name: str, checkpointing: bool, tmp_path: Path
) -> None:
    text = SFT.format(more=f"gradient_checkpointing: {str(checkpointing).lower()}")
    stage = from_text(tmp_path, text, f"deepspeed={name}")

    file = Path(option(build_command(make_plan(stage, 2)), "--deepspeed_config_file"))

    zero = json.loads(file.read_text(encoding="utf-8"))["zero_optimization"]
    assert zero["stage"] == 3
    assert zero.get("memory_efficient_linear", True) is not checkpointing
