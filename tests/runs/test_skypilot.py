"""A run as a SkyPilot task: golden, taken by SkyPilot itself where it is installed, no tokens, no shell."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import DATA, PATIENCE_S

from launcher.errors import Finding, UsageError
from launcher.runs import skypilot

GOLDEN = DATA / "skypilot"
HERE = {"cwd": Path("/work/project"), "project": Path("/work/project"), "checkout": None}
BESIDE = {
    "cwd": Path("/work/mine"), "project": Path("/opt/launch"), "checkout": Path("/src/open-instruct"),
}  # fmt: skip
WORDS = ["sft", "configs/tulu/sft.yaml", "--gpus", "8", "--nodes", "2"]
TOKEN = "hf_abcdefghijklmnopqrst"
NASTY = ['it\'s "x"\n- x: y #', "$(touch pwned)`touch pwned`; touch pwned", "a\\b ü\U0001f600", ""]


def complain(code: str, key: str, message: str, help: str | None) -> Finding:
    return Finding(severity="error", layer="launch", code=code, key=key, message=message, help=help)


def made(**changed: Any) -> dict[str, Any]:
    given = {
        "name": "sft demo", "words": WORDS, "gpus": 8, "nodes": 2, "backend": "open_instruct", **BESIDE,
        "settings": {"accelerator": "H100"}, "environ": {}, **changed,
    }  # fmt: skip
    return skypilot.task(**given)


CASES: dict[str, dict[str, Any]] = {
    "gpu": {
        "settings": {
            "accelerator": "A100-80GB",
            "resources": {"infra": "aws", "use_spot": True, "disk_size": 512},
            "envs": {"WANDB_PROJECT": "tulu", "N": 1, "ON": True, "LATER": None},
            "file_mounts": {"/outputs": {"name": "my-bucket", "mode": "MOUNT"}},
        },
        "environ": {"HF_TOKEN": TOKEN, "PATH": "/bin"},
    },
    "cpu": {
        "gpus": 0, "nodes": 1, "backend": "trl", **HERE, "settings": {"setup": "true\n"},
        "words": ["sft", "configs/demo/sft.yaml", "--gpus", "0"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    text = skypilot.text(made(**CASES[name]), Path("task.yaml"))
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("value", NASTY)
def test_no_value_is_shell(value: str, tmp_path: Path) -> None:
    """What the task runs is run, with a `launch` that writes down its arguments."""
    words = ["sft", value, f"exp_name={value}", "--gpus", "0"]
    task = yaml.safe_load(skypilot.text(made(words=words, **HERE), Path("task.yaml")))
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "launch").write_text('#!/bin/sh\nprintf "%s\\0" "$@" >out\n')
    (bin / "launch").chmod(0o755)
    subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, check=True, timeout=PATIENCE_S)
    assert (tmp_path / "out").read_bytes().decode().split("\0")[:-1] == words
    assert {path.name for path in tmp_path.iterdir()} == {".venv", "out"}


@pytest.mark.parametrize("value", NASTY)
def test_values_survive_the_file(value: str) -> None:
    task = made(settings={"accelerator": "H100", "envs": {"A": value}, "setup": value or "x"})
    assert yaml.safe_load(skypilot.text(task, Path("task.yaml"))) == task
    odd = Path(f"{value.replace('/', '-')}.yaml")
    assert yaml.safe_load(skypilot.text(task, odd)) == task


def test_names_settings_and_gpus() -> None:
    names = {name: made(name=name)["name"] for name in ["SFT Demo!", "7b", "ü", "a--b.c", "x"]}
    assert names == {
        "SFT Demo!": "sft-demo", "7b": "launch-7b", "ü": "launch", "a--b.c": "a-b-c", "x": "x",
    }  # fmt: skip
    # settings
    given = {"accelerator": "H100", "setup": None, "secrets": ["A"], "resources": {"infra": "aws"}}
    settings, findings = skypilot.read(given, complain)
    assert findings == []
    assert settings == {"accelerator": "H100", "secrets": ["A"], "resources": {"infra": "aws"}}
    assert skypilot.read(None, complain) == ({}, [])
    # gpus without a name are asked for
    with pytest.raises(UsageError) as error:
        made(settings={})
    assert error.value.findings[0].code == "no-accelerator"
    task = made(settings={"resources": {"instance_type": "p5.48xlarge"}})
    assert task["resources"] == {"instance_type": "p5.48xlarge"}
    assert "resources" not in made(gpus=0)


def test_tokens_are_named_and_never_written() -> None:
    task = made(environ={"HF_TOKEN": TOKEN, "WANDB_API_KEY": "0123456789abcdef"})
    text = skypilot.text(task, Path("task.yaml"))
    assert task["secrets"] == {"HF_TOKEN": None, "WANDB_API_KEY": None}
    assert text.startswith("# sky launch --secret HF_TOKEN --secret WANDB_API_KEY task.yaml\n")
    assert TOKEN not in text
    for named in (["MINE"], {"MINE": "a value"}):
        task = made(settings={"accelerator": "H100", "secrets": named})
        assert task["secrets"] == {"MINE": None}
    inside = {"accelerator": "H100", "envs": {"HF_TOKEN": "x"}}
    for changed in (
        {"words": [*WORDS, f"hub_token={TOKEN}"]},
        {"words": [*WORDS, "hub_token=whatever"]},
        {"settings": inside},
    ):
        with pytest.raises(UsageError) as error:
            made(**changed)
        assert error.value.findings[0].code == "token-in-task"


@pytest.mark.parametrize(
    ("given", "key", "help"),
    [
        ("aws", "", "skypilot: {"),
        ({"resource": {}}, "resource", "did you mean `resources`?"),
        ({"run": "x"}, "run", "command of this stage"),
        ({"accelerator": "H100:8"}, "accelerator", "--gpus"),
    ],
)
def test_settings_that_cannot_be(given: Any, key: str, help: str | None) -> None:
    _, findings = skypilot.read(given, complain)
    assert [(finding.code, finding.key) for finding in findings] == [("bad-skypilot", key)]
    assert help is None or help in (findings[0].help or "")
