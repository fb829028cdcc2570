"""Keys that are gone and changed the training: what is said of them, and what `--fix` leaves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Write

from launcher.cli.main import main
from launcher.errors import Exit

OPEN_INSTRUCT = """\
stage: sft
deepspeed: zero3
args:
  model_name_or_path: org/model
  dataset_mixer_list: [org/data, 1.0]
  max_seq_length: 64
  output_dir: output
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
"""
DPO = OPEN_INSTRUCT.replace("stage: sft", "stage: dpo").replace("dataset_mixer_list", "mixer_list")
NO_DATA = OPEN_INSTRUCT.replace("  dataset_mixer_list: [org/data, 1.0]\n", "")
DPO_NO_DATA = DPO.replace("  mixer_list: [org/data, 1.0]\n", "")
TRL = """\
stage: sft
backend: trl
deepspeed: none
args:
  model_name_or_path: org/model
  dataset_name: org/data
  output_dir: output
"""
TRL_DPO = TRL.replace("stage: sft", "stage: dpo")
Command = Callable[..., tuple[Exit, dict[str, Any]]]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command; its exit code, and its findings by their key."""

    def run_command(*words: str) -> tuple[Exit, dict[str, Any]]:
        code = Exit(main([*words, "--format", "json"]))
        findings = json.loads(capsys.readouterr().out)["findings"]
        return code, {finding["key"]: finding for finding in findings}

    return run_command


@pytest.fixture
def validate(run: Command) -> Command:
    return lambda path, *words: run("validate-config", str(path), *words)


def lost(head: str, line: str, *words: str) -> Any:
    """A case: the file, the line that is added, and words of what is said of it."""
    return pytest.param(head, line, words, id=line)


@pytest.mark.parametrize(
    "head, line, words",
    [
        lost(OPEN_INSTRUCT, "reduce_loss: sum", "far too low", "of rows", "learning rate anew"),
        lost(TRL, "split_batches: true", "did not grow", "accelerator_config"),
        lost(TRL, "adafactor: true", "Adafactor", "`optim: adafactor`"),
        lost(TRL, "group_by_length: true", "like length", "train_sampling_strategy"),
        lost(TRL, "per_gpu_train_batch_size: 2", "of a GPU", "per_device_train_batch_size"),
        lost(TRL_DPO, "rpo_alpha: 1.0", "log-likelihood of the chosen", "loss_weights"),
        lost(TRL_DPO, "reference_free: true", "left the reference model out", "choose"),
        lost(TRL_DPO, "max_prompt_length: 64", "beginning of longer prompts", "max_length"),
        lost(TRL_DPO, "max_completion_length: 64", "end of longer answers", "max_length"),
        lost(TRL_DPO, "ref_adapter_name: old", "adapter that is the reference", "merge"),
        lost(TRL_DPO, "model_adapter_name: mine", "adapter that is trained", "folder"),
        lost(TRL_DPO, "force_use_ref_model: true", "reference model of its own", "merge"),
        lost(TRL_DPO, "ref_model_init_kwargs: '{\"a\": 1}'", "settings of its own", "check type"),
        lost(TRL_DPO, 'tools: \'[{"name": "f"}]\'', "into every prompt", "column `tools`"),
    ],
)
def test_a_lost_meaning_is_told_before_and_after_the_fix(
    validate: Command, write: Write, head: str, line: str, words: tuple[str, ...]
) -> None:
    key = f"args.{line.partition(':')[0]}"
    path = write("a.yaml", f"{head}  {line}  # mine\n  seed: 1\n")

    code, findings = validate(path)
    before = findings[key]
    assert code == Exit.CONFIG
    assert before["code"] == "removed-key"
    assert "delete the line" in before["help"]

    code, findings = validate(path, "--fix")
    after = findings[key]
    assert code == Exit.OK
    assert path.read_text() == f"{head}  # lost: {line}  # mine\n  seed: 1\n"
    assert after["code"] == "lost-meaning"
    assert after["severity"] == "warning"
    assert after["line"] == head.count("\n") + 1

    for finding in (before, after):
        text = f"{finding['message']} {finding['help']}"
        for part in words:
            assert part in text


def test_a_comment_about_a_lost_meaning_counts_until_it_is_deleted(
    run: Command, validate: Command, write: Write
) -> None:
    text = f"{OPEN_INSTRUCT}  # lost: reduce_loss: sum\n"
    path = write("a.yaml", text)
    key = "args.reduce_loss"
    # it is fixed already
    _, findings = validate(path, "--fix")
    assert findings[key]["code"] == "lost-meaning"
    assert path.read_text() == text
    # a plan and a start say it too
    _, findings = run("sft", str(path), "--gpus", "1", "--dry-run")
    assert findings[key]["code"] == "lost-meaning"
    code, _ = validate(path, "--strict")
    assert code == Exit.CONFIG
    # whoever has decided deletes the comment
    path.write_text(OPEN_INSTRUCT)
    _, findings = validate(path)
    assert key not in findings


@pytest.mark.parametrize(
    "head, line",
    [
        (OPEN_INSTRUCT, "reduce_loss: mean"),
        # of DPO nothing read it
        (DPO, "reduce_loss: sum"),
        (TRL, "split_batches: false"),
        (TRL, "adafactor: false"),
        (TRL_DPO, "reference_free: false"),
        (TRL_DPO, "rpo_alpha: 0.0"),
        (TRL_DPO, "label_pad_token_id: -100"),
    ],
)
def test_a_value_that_did_nothing_is_deleted(
    validate: Command, write: Write, head: str, line: str
) -> None:
    path = write("a.yaml", f"{head}  {line}\n")
    code, findings = validate(path, "--fix")
    assert code == Exit.OK
    assert path.read_text() == head
    assert f"args.{line.partition(':')[0]}" not in findings


def test_a_comment_of_the_parent_is_a_finding_of_the_child(validate: Command, write: Write) -> None:
    parent = write("parent.yaml", f"{OPEN_INSTRUCT}  # lost: reduce_loss: sum\n")
    child = write("child.yaml", "extends: parent.yaml\nargs: {seed: 2}\n")
    _, findings = validate(child)
    finding = findings["args.reduce_loss"]
    assert finding["code"] == "lost-meaning"
    assert finding["file"] == str(parent)


@pytest.mark.parametrize(
    "text, fixed",
    [
        (
            f"{TRL_DPO}  tools:\n    - a\n    - b\n  seed: 1\n",
            f'{TRL_DPO}  # lost: tools: ["a", "b"]\n  seed: 1\n',
        ),
        (f"{OPEN_INSTRUCT}  reduce_loss: sum", f"{OPEN_INSTRUCT}  # lost: reduce_loss: sum"),
    ],
    ids=["several lines", "last line"],
)
def test_the_comment_stands_where_the_value_stood(
    validate: Command, write: Write, text: str, fixed: str
) -> None:
    path = write("a.yaml", text)
    code, _ = validate(path, "--fix")
    assert code == Exit.OK
    assert path.read_text() == fixed


def test_explain_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "reduce_loss", "--stage", "sft"]) == Exit.OK
    assert "far too low" in capsys.readouterr().out


@pytest.mark.parametrize(
    "head, mixer", [(NO_DATA, "dataset_mixer_list"), (DPO_NO_DATA, "mixer_list")]
)
def test_a_train_file_becomes_a_mixer_list(
    validate: Command, write: Write, head: str, mixer: str
) -> None:
    path = write("a.yaml", f"{head}  train_file: data/mine.jsonl  # mine\n")
    code, findings = validate(path)
    finding = findings["args.train_file"]
    assert code == Exit.CONFIG
    assert finding["code"] == "removed-key"
    assert f"`{mixer}: [FILE, 1.0]`" in finding["help"]
    validate(path, "--fix")
    assert path.read_text() == f"{head}  {mixer}: [data/mine.jsonl, 1.0]  # mine\n"


@pytest.mark.parametrize(
    "head, file, why",
    [
        (NO_DATA, "data/mine.json", "`launch data convert` writes one"),
        (OPEN_INSTRUCT, "data/mine.jsonl", "`dataset_mixer_list` is there too"),
    ],
    ids=["json", "data twice"],
)
def test_a_train_file_is_never_deleted(
    validate: Command, write: Write, head: str, file: str, why: str
) -> None:
    text = f"{head}  train_file: {file}\n"
    path = write("a.yaml", text)
    code, findings = validate(path, "--fix")
    assert code == Exit.CONFIG
    assert path.read_text() == text
    assert why in findings["args.train_file"]["help"]
