"""Plan -> argv, environment: golden for the configs people run, and safe in any shell."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import DATA, PATIENCE_S
from plans import CONFIGS, SFT, built, from_text, planned, staged, trainer

from launcher.paths import PACKAGE
from launcher.plan import command, plan
from launcher.runs.attempt import Command

GOLDEN = DATA / "argv"
STUB = """#!{python}
import json, os, sys
with open({out!r}, "w") as stream:
    json.dump([sys.argv[1:], dict(os.environ)], stream)
"""


def shown(made: Command) -> str:
    """One word a line, the environment first, without what differs between machines."""
    lines = [f"{name}={value}" for name, value in made.env.items()] + list(made.argv)
    text = "\n".join(lines).replace(str(PACKAGE), "<launcher>")
    return text.replace(str(PACKAGE.parent), "<project>") + "\n"


@pytest.mark.parametrize(
    "name",
    ["tulu/sft_qwen7b", "tulu/sft_qwen7b_25pct", "tulu/dpo_qwen7b", "llama/llama31_8b_sft_10pct",
     "llama/llama31_8b_dpo_10pct", "smoke/sft_qwen7b", "smoke/dpo_qwen7b", "lora/sft_qwen7b",
     "lora/dpo_qwen7b"],
)  # fmt: skip
def test_golden_argv(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # nothing that lies about here is taken for a model of the config
    monkeypatch.chdir(tmp_path)
    for gpus in (0, 1, 2, 8):
        made = shown(built(planned(staged(CONFIGS / f"{name}.yaml"), gpus)))
        golden = GOLDEN / f"{name.replace('/', '-')}-{gpus}gpu.txt"
        if os.environ.get("LAUNCH_GOLDEN") == "write":
            golden.parent.mkdir(exist_ok=True)
            golden.write_text(made)
        assert made == golden.read_text()


def option(made: Command, name: str) -> str:
    return made.argv[made.argv.index(name) + 1]


TULU = CONFIGS / "tulu" / "sft_qwen7b.yaml"


def test_precision_and_devices() -> None:
    assert Path(option(built(planned(staged(TULU), 8)), "--deepspeed_config_file")).is_file()
    # trl decides on precision itself
    demo = CONFIGS / "demo" / "sft.yaml"
    assert option(built(planned(staged(demo), 1)), "--mixed_precision") == "no"
    made = built(planned(staged(demo, ["mixed_precision=fp16"]), 1))
    assert option(made, "--mixed_precision") == "fp16"
    # one process sees one gpu
    for gpus, outer, expected in (
        (0, "1", ""), (1, None, "0"), (1, "3,4", "3"), (1, "GPU-a,GPU-b", "GPU-a"), (2, "3,4", None),
    ):  # fmt: skip
        environ = {} if outer is None else {"CUDA_VISIBLE_DEVICES": outer}
        made = built(planned(staged(TULU), gpus), environ)
        assert made.env.get("CUDA_VISIBLE_DEVICES") == expected


@pytest.mark.parametrize("deepspeed", ["none", "zero2"])
def test_several_nodes_leave_the_place_of_each_open(deepspeed: str) -> None:
    stage = staged(TULU, [f"deepspeed={deepspeed}", "batch.per_device=8"])
    made = built(planned(stage, 8, nodes=2))
    names = ("--num_processes", "--machine_rank", "--main_process_ip")
    assert [option(made, name) for name in names] == ["16", "NODE_RANK", "HEAD_ADDRESS"]
    assert option(made, "--main_process_port") != "0"
    assert ("--deepspeed_multinode_launcher" in made.argv) is (deepspeed != "none")


def test_the_environment_is_the_users_own_beside_what_is_needed() -> None:
    made = built(planned(staged(TULU), 8), {"HOME": "/root", "PYTHONPATH": "/mine"})
    assert made.env["PYTHONPATH"] == "/source:/mine"
    assert "HOME" not in made.env
    assert "PYTHONPATH" not in built(planned(staged(CONFIGS / "demo" / "sft.yaml"), 0)).env


NASTY = (
    "two words", "it's \"x\"", "line\nbreak", "$(touch pwned) `touch pwned`; touch pwned && touch pwned #",
    "$HOME ~ * !x {a,b} %s", "a\\b\tc", "ümlaut \U0001f600", "",
)  # fmt: skip


@pytest.mark.parametrize("value", NASTY)
def test_the_pasted_line_is_the_command(
    tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / f"a {value.replace('/', '-')[:40]} folder"
    here.mkdir()
    monkeypatch.chdir(here)
    out = tmp_path / "out.json"
    python = here / "my python"
    python.write_text(STUB.format(python=sys.executable, out=str(out)))
    python.chmod(0o755)
    text = SFT.format(more=f"exp_name: {json.dumps(value, ensure_ascii=False)}")
    made = planned(from_text(here, text), 2)
    path = {"PYTHONPATH": f"/x/{value}"}
    shell = built(made, path, python=python, folder=here / "run")
    environ = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "OUTER": "kept"}
    subprocess.run(["bash", "-c", shell.shell()], env=environ, check=True, timeout=PATIENCE_S)
    argv, seen = json.loads(out.read_text())
    assert argv == list(shell.argv[1:])
    assert {name: seen[name] for name in shell.env} == dict(shell.env)
    assert (seen["OUTER"], seen["HOME"]) == ("kept", "/nowhere")
    assert not list(tmp_path.rglob("pwned"))
    assert value in argv


def test_without_a_source_a_dry_run_says_where_it_would_be() -> None:
    def bare(path: Path) -> Command:
        stage = staged(path)
        stage = replace(stage, upstream=replace(stage.upstream, root=None))
        made = plan.make(stage, gpus=0, output=Path("/run/model"))
        python = replace(trainer(), path=(Path("/env/lib"), Path("/env/lib/site-packages")))
        return command.build(made, python, Path("/run"), environ={})

    target = json.loads(bare(TULU).env["LAUNCH_PROBE"])["target"]
    assert target.endswith("external/open-instruct/open_instruct/finetune.py")
    target = json.loads(bare(CONFIGS / "demo" / "sft.yaml").env["LAUNCH_PROBE"])["target"]
    assert target == "/env/lib/site-packages/trl/scripts/sft.py"


@pytest.mark.parametrize("name", ["zero3", "zero3_offload"])
def test_zero3_has_plain_linears_only_where_layers_are_computed_again(
    name: str, tmp_path: Path
) -> None:
    for checkpointing, efficient in (("true", False), ("false", True)):
        stage = from_text(
            tmp_path,
            SFT.format(more=f"gradient_checkpointing: {checkpointing}"),
            f"deepspeed={name}",
        )
        file = Path(option(built(planned(stage, 2)), "--deepspeed_config_file"))
        zero = json.loads(file.read_text(encoding="utf-8"))["zero_optimization"]
        assert zero["stage"] == 3
        assert zero.get("memory_efficient_linear", True) is efficient
