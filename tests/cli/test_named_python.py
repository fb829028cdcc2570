"""`--python` and LAUNCH_PYTHON name the Python whose TRL and transformers stage files are judged by."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from support import other_trl

from launcher.cli.main import main
from launcher.errors import Exit

# of TRL 0.24: it takes `torch_dtype` and `warmup_ratio`, and knows no `shuffle_dataset`
STAGE = """\
stage: sft
backend: trl
deepspeed: none
args:
  model_name_or_path: m
  dataset_name: d
  output_dir: out
  max_length: 512
  torch_dtype: float32
  warmup_ratio: 0.1
"""
UNKNOWN_TO_IT = f"{STAGE}  shuffle_dataset: true\n"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LAUNCH_PYTHON", raising=False)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    site = other_trl.write_trl(tmp_path / "site", "warmup_ratio: float = 0.0")
    return other_trl.write_python(tmp_path / "other", [site])


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return other_trl.write_python(tmp_path / "bare", [])


@pytest.fixture
def answered(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(*words: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main([*words, "--format", "json"])
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return code, answer

    return run


Answered = Callable[..., tuple[int, dict[str, Any]]]


def errors_of(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["code"], one["key"]) for one in answer["findings"] if one["severity"] == "error"]


def test_the_named_python_decides(write: Write, other: Path, answered: Answered) -> None:
    path = str(write("a.yaml", STAGE))
    code, answer = answered("validate-config", path, "--python", str(other))
    assert (code, errors_of(answer)) == (Exit.OK, [])
    (entry,) = answer["data"]["files"]
    assert entry["upstream"]["version"] == "trl 0.24.0, transformers 4.57.1"
    code, answer = answered(
        "validate-config", str(write("b.yaml", UNKNOWN_TO_IT)), "--python", str(other)
    )
    assert (code, errors_of(answer)) == (Exit.CONFIG, [("unknown-key", "args.shuffle_dataset")])


def test_the_variable_decides_too(
    write: Write, other: Path, bare: Path, answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write("a.yaml", STAGE))
    monkeypatch.setenv("LAUNCH_PYTHON", str(other))
    code, answer = answered("validate-config", path)
    assert (code, errors_of(answer)) == (Exit.OK, [])
    # the option comes before the variable
    monkeypatch.setenv("LAUNCH_PYTHON", str(bare))
    code, answer = answered("validate-config", path, "--python", str(other))
    assert (code, errors_of(answer)) == (Exit.OK, [])


def test_fix_is_made_for_that_release(write: Write, other: Path, answered: Answered) -> None:
    path = write("a.yaml", STAGE.replace("max_length", "max_seq_length"))
    code, _ = answered("validate-config", "--fix", str(path), "--python", str(other))
    assert (code, path.read_text()) == (Exit.OK, STAGE)


def test_every_command_that_judges(
    write: Write, other: Path, answered: Answered, tmp_path: Path
) -> None:
    path = write("a.yaml", STAGE)
    python = ("--python", str(other))
    _, answer = answered("explain", "torch_dtype", "--backend", "trl", "--stage", "sft", *python)
    (explained,) = answer["data"]["explained"]
    assert explained["upstream"]["version"].startswith("trl 0.24.0")
    code, answer = answered("explain", "warmup_ratio", str(path), *python)
    assert code == Exit.OK
    _, answer = answered("schema", "--backend", "trl", "--stage", "sft", *python)
    (schema,) = answer["data"]["schemas"]
    assert "warmup_ratio" in {field["name"] for field in schema["fields"]}
    _, answer = answered("plan", str(path), "--gpus", "1", "--row-tokens", "10:20", *python)
    # of the model here nothing is known
    assert errors_of(answer) == [("unknown-shape", "args.model_name_or_path")]
    # a new file is held against it: this small TRL has no `packing`
    words = ("--model", "m", "--data", "some/set", "--output", str(tmp_path / "new.yaml"))
    code, answer = answered("init", "sft", *words, *python)
    assert ("unknown-key", "args.packing") in errors_of(answer)
    pipeline = write("p.yaml", "stages:\n  - {name: one, config: a.yaml}\n")
    code, answer = answered("validate-config", str(pipeline), *python)
    assert errors_of(answer) == []


@pytest.mark.parametrize("named_by", ["--python", "LAUNCH_PYTHON"])
def test_a_python_that_is_not_there(
    write: Write, answered: Answered, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    words = ["validate-config", str(write("a.yaml", STAGE))]
    if named_by == "--python":
        words += ["--python", "/no/such/python"]
    else:
        monkeypatch.setenv("LAUNCH_PYTHON", "/no/such/python")
    code, answer = answered(*words)
    (finding,) = answer["findings"]
    assert (code, finding["code"]) == (Exit.NOT_READY, "no-python")
    assert named_by in finding["message"]


def test_a_python_without_trl(write: Write, bare: Path, answered: Answered) -> None:
    path = str(write("a.yaml", STAGE))
    code, answer = answered("validate-config", path, "--python", str(bare))
    (finding,) = answer["findings"]
    assert (code, finding["code"], finding["severity"]) == (Exit.NOT_READY, "no-trainer", "error")
    assert f"--python names a Python without trl and transformers: {bare}" in finding["message"]
    # a plan needs no packages: it says by what it was made
    code, answer = answered(
        "plan", path, "--gpus", "1", "--row-tokens", "10:20", "--python", str(bare)
    )
    (finding,) = [one for one in answer["findings"] if one["code"] == "no-trainer"]
    assert finding["severity"] == "warning"
    assert "judged by trl 1.16.0" in finding["message"]
    # stage files of open-instruct do not ask for TRL
    mine = STAGE.replace("backend: trl\n", "").replace(
        "dataset_name: d", "dataset_mixer_list: [d, 1.0]"
    )
    code, answer = answered("validate-config", str(write("b.yaml", mine)), "--python", str(bare))
    assert "no-trainer" not in {one["code"] for one in answer["findings"]}
