"""`--python` and LAUNCH_PYTHON name the Python whose TRL and transformers judge stage files."""

from pathlib import Path

import pytest
from answers import Ask
from answers import ask as ask  # a fixture
from conftest import Write
from support import other_trl

from launcher.errors import Exit

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
"""For TRL 0.24: it takes `torch_dtype` and `warmup_ratio`, and knows no `shuffle_dataset`."""


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LAUNCH_PYTHON", raising=False)


@pytest.fixture
def stage_file(write: Write) -> str:
    return str(write("a.yaml", STAGE))


@pytest.fixture
def other(tmp_path: Path) -> str:
    """A Python with TRL 0.24."""
    site = other_trl.write_trl(tmp_path / "site", "warmup_ratio: float = 0.0")
    return str(other_trl.write_python(tmp_path / "other", [site]))


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A Python without TRL."""
    return str(other_trl.write_python(tmp_path / "bare", []))


def test_the_named_python_decides(write: Write, stage_file: str, other: str, ask: Ask) -> None:
    answer = ask("validate-config", stage_file, "--python", other)
    assert (answer.code, answer.errors) == (Exit.OK, [])
    (entry,) = answer.data["files"]
    assert entry["upstream"]["version"] == "trl 0.24.0, transformers 4.57.1"

    newer = str(write("b.yaml", f"{STAGE}  shuffle_dataset: true\n"))
    answer = ask("validate-config", newer, "--python", other)
    assert answer.errors == [("unknown-key", "args.shuffle_dataset")]


def test_the_variable_decides_too(
    stage_file: str, other: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCH_PYTHON", other)
    assert ask("validate-config", stage_file).errors == []


def test_the_option_comes_before_the_variable(
    stage_file: str, other: str, bare: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCH_PYTHON", bare)
    assert ask("validate-config", stage_file, "--python", other).errors == []


def test_fix_is_made_for_that_release(write: Write, other: str, ask: Ask) -> None:
    path = write("a.yaml", STAGE.replace("max_length", "max_seq_length"))
    answer = ask("validate-config", "--fix", str(path), "--python", other)
    assert answer.code == Exit.OK
    assert path.read_text() == STAGE


def test_every_command_that_judges_asks_that_python(
    write: Write, stage_file: str, other: str, ask: Ask
) -> None:
    python = ("--python", other)
    answer = ask("explain", "torch_dtype", "--backend", "trl", "--stage", "sft", *python)
    (explained,) = answer.data["explained"]
    assert explained["upstream"]["version"].startswith("trl 0.24.0")

    assert ask("explain", "warmup_ratio", stage_file, *python).code == Exit.OK

    answer = ask("schema", "--backend", "trl", "--stage", "sft", *python)
    (schema,) = answer.data["schemas"]
    assert "warmup_ratio" in {field["name"] for field in schema["fields"]}

    # of the model here nothing is known
    answer = ask("plan", stage_file, "--gpus", "1", "--row-tokens", "10:20", *python)
    assert answer.errors == [("unknown-shape", "args.model_name_or_path")]

    # a new file is held against it: this small TRL has no `packing`
    new = str(Path(stage_file).with_name("new.yaml"))
    answer = ask("init", "sft", "--model", "m", "--data", "some/set", "--output", new, *python)
    assert ("unknown-key", "args.packing") in answer.errors

    pipeline = write("p.yaml", "stages:\n  - {name: one, config: a.yaml}\n")
    assert ask("validate-config", str(pipeline), *python).errors == []


def test_an_option_that_names_no_python(stage_file: str, ask: Ask) -> None:
    answer = ask("validate-config", stage_file, "--python", "/no/such/python")
    (finding,) = answer.findings
    assert (answer.code, finding["code"]) == (Exit.NOT_READY, "no-python")
    assert "--python" in finding["message"]


def test_a_variable_that_names_no_python(
    stage_file: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCH_PYTHON", "/no/such/python")
    answer = ask("validate-config", stage_file)
    (finding,) = answer.findings
    assert (answer.code, finding["code"]) == (Exit.NOT_READY, "no-python")
    assert "LAUNCH_PYTHON" in finding["message"]


def test_a_python_without_trl_cannot_judge(stage_file: str, bare: str, ask: Ask) -> None:
    answer = ask("validate-config", stage_file, "--python", bare)
    (finding,) = answer.findings
    assert answer.code == Exit.NOT_READY
    assert (finding["code"], finding["severity"]) == ("no-trainer", "error")
    assert f"--python names a Python without trl and transformers: {bare}" in finding["message"]


def test_a_plan_needs_no_packages(stage_file: str, bare: str, ask: Ask) -> None:
    words = ("--gpus", "1", "--row-tokens", "10:20", "--python", bare)
    (finding,) = ask("plan", stage_file, *words).with_code("no-trainer")
    assert finding["severity"] == "warning"
    assert "judged by trl 1.16.0" in finding["message"]


def test_stage_files_of_open_instruct_need_no_trl(write: Write, bare: str, ask: Ask) -> None:
    text = STAGE.replace("backend: trl\n", "")
    text = text.replace("dataset_name: d", "dataset_mixer_list: [d, 1.0]")
    answer = ask("validate-config", str(write("b.yaml", text)), "--python", bare)
    assert "no-trainer" not in answer.codes
