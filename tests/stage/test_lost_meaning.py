"""Keys that are gone and changed what was trained: what is said of them, and what `--fix` leaves of it."""

import json
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
OI_DPO = OPEN_INSTRUCT.replace("stage: sft", "stage: dpo").replace(
    "dataset_mixer_list", "mixer_list"
)
NO_DATA = OPEN_INSTRUCT.replace("  dataset_mixer_list: [org/data, 1.0]\n", "")
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

# the file, the line that is added, and words of what is said
LOST = (
    (OPEN_INSTRUCT, "reduce_loss: sum", ("far too low", "weights of rows", "learning rate anew")),
    (TRL, "split_batches: true", ("did not grow", "accelerator_config")),
    (TRL, "adafactor: true", ("Adafactor", "`optim: adafactor`")),
    (TRL, "group_by_length: true", ("like length", "train_sampling_strategy")),
    (TRL, "per_gpu_train_batch_size: 2", ("rows of a GPU", "per_device_train_batch_size")),
    (TRL_DPO, "rpo_alpha: 1.0", ("log-likelihood of the chosen", "loss_weights")),
    (TRL_DPO, "reference_free: true", ("left the reference model out", "choose")),
    (TRL_DPO, "max_prompt_length: 64", ("beginning of longer prompts", "max_length")),
    (TRL_DPO, "max_completion_length: 64", ("end of longer answers", "max_length")),
    (TRL_DPO, "ref_adapter_name: old", ("adapter that is the reference", "merge")),
    (TRL_DPO, "model_adapter_name: mine", ("adapter that is trained", "folder")),
    (TRL_DPO, "force_use_ref_model: true", ("reference model of its own", "merge")),
    (
        TRL_DPO,
        'ref_model_init_kwargs: \'{"dtype": "float32"}\'',
        ("settings of its own", "check type"),
    ),
    (TRL_DPO, 'tools: \'[{"name": "f"}]\'', ("into every prompt", "column `tools`")),
)
HARMLESS = (
    (OPEN_INSTRUCT, "reduce_loss: mean"),
    # of DPO nothing read it
    (OI_DPO, "reduce_loss: sum"),
    (TRL, "split_batches: false"),
    (TRL, "adafactor: false"),
    (TRL_DPO, "reference_free: false"),
    (TRL_DPO, "rpo_alpha: 0.0"),
    (TRL_DPO, "label_pad_token_id: -100"),
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    capsys.readouterr()
    code = main([*words, "--format", "json"])
    findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return code, findings


def about(findings: list[dict[str, Any]], key: str) -> dict[str, Any]:
    (finding,) = [one for one in findings if one["key"] == f"args.{key}"]
    return finding


@pytest.mark.parametrize(("head", "line", "words"), LOST, ids=[line for _, line, _ in LOST])
def test_it_is_said_before_and_after_the_fix(
    capsys: pytest.CaptureFixture[str], write: Write, head: str, line: str, words: tuple[str, str]
) -> None:
    key = line.partition(":")[0]
    path = write("a.yaml", f"{head}  {line}  # mine\n  seed: 1\n")
    code, findings = answered(capsys, "validate-config", str(path))
    finding = about(findings, key)
    assert (code, finding["code"], finding["severity"]) == (Exit.CONFIG, "removed-key", "error")
    said = f"{finding['message']} {finding['help']}"
    assert all(word in said for word in words), said
    assert "delete the line" in finding["help"]

    for _ in range(2):
        code, findings = answered(capsys, "validate-config", "--fix", str(path))
        assert path.read_text() == f"{head}  # lost: {line}  # mine\n  seed: 1\n"
        finding = about(findings, key)
        assert (code, finding["code"], finding["severity"]) == (Exit.OK, "lost-meaning", "warning")
        assert finding["line"] == head.count("\n") + 1
        said = f"{finding['message']} {finding['help']}"
        assert all(word in said for word in words), said
    # a plan and a start say it too
    words_of_dry_run = (
        path.read_text().partition("\n")[0].removeprefix("stage: "),
        str(path),
        "--gpus",
        "1",
    )
    _, findings = answered(capsys, *words_of_dry_run, "--dry-run")
    assert about(findings, key)["code"] == "lost-meaning"
    code, _ = answered(capsys, "validate-config", "--strict", str(path))
    assert code == Exit.CONFIG
    # whoever has decided deletes the comment
    path.write_text(f"{head}  seed: 1\n")
    code, findings = answered(capsys, "validate-config", str(path))
    assert "lost-meaning" not in {one["code"] for one in findings}


@pytest.mark.parametrize(("head", "line"), HARMLESS, ids=[line for _, line in HARMLESS])
def test_a_value_that_did_nothing_is_deleted(
    capsys: pytest.CaptureFixture[str], write: Write, head: str, line: str
) -> None:
    path = write("a.yaml", f"{head}  {line}\n")
    code, findings = answered(capsys, "validate-config", "--fix", str(path))
    assert (code, path.read_text()) == (Exit.OK, head)
    assert "lost-meaning" not in {one["code"] for one in findings}


def test_what_a_parent_keeps_is_said_of_the_child(
    capsys: pytest.CaptureFixture[str], write: Write
) -> None:
    parent = write("parent.yaml", f"{OPEN_INSTRUCT}  # lost: reduce_loss: sum\n")
    child = write("child.yaml", "extends: parent.yaml\nargs: {seed: 2}\n")
    _, findings = answered(capsys, "validate-config", str(child))
    finding = about(findings, "reduce_loss")
    assert (finding["code"], finding["file"]) == ("lost-meaning", str(parent))


def test_a_value_of_several_lines_and_the_last_line(
    capsys: pytest.CaptureFixture[str], write: Write
) -> None:
    path = write("a.yaml", f"{TRL_DPO}  tools:\n    - a\n    - b\n  seed: 1\n")
    code, _ = answered(capsys, "validate-config", "--fix", str(path))
    assert (code, path.read_text()) == (
        Exit.OK,
        f'{TRL_DPO}  # lost: tools: ["a", "b"]\n  seed: 1\n',
    )
    path = write("a.yaml", f"{OPEN_INSTRUCT}  reduce_loss: sum")
    code, _ = answered(capsys, "validate-config", "--fix", str(path))
    assert (code, path.read_text()) == (Exit.OK, f"{OPEN_INSTRUCT}  # lost: reduce_loss: sum")


def test_explain_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "reduce_loss", "--stage", "sft"]) == Exit.OK
    assert "far too low" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("head", "listed"), [(NO_DATA, "dataset_mixer_list"), (OI_DPO, "mixer_list")]
)
def test_a_train_file_becomes_a_mixer_list(
    capsys: pytest.CaptureFixture[str], write: Write, head: str, listed: str
) -> None:
    head = head.replace("  mixer_list: [org/data, 1.0]\n", "")
    path = write("a.yaml", f"{head}  train_file: data/mine.jsonl  # mine\n")
    code, findings = answered(capsys, "validate-config", str(path))
    finding = about(findings, "train_file")
    assert (code, finding["code"]) == (Exit.CONFIG, "removed-key")
    assert f"`{listed}: [FILE, 1.0]`" in finding["help"]
    answered(capsys, "validate-config", "--fix", str(path))
    assert path.read_text() == f"{head}  {listed}: [data/mine.jsonl, 1.0]  # mine\n"


def test_a_train_file_is_never_deleted(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    for head, file, why in (
        (NO_DATA, "data/mine.json", "`launch data convert` writes one"),
        (OPEN_INSTRUCT, "data/mine.jsonl", "`dataset_mixer_list` is there too"),
    ):
        text = f"{head}  train_file: {file}\n"
        path = write("a.yaml", text)
        code, findings = answered(capsys, "validate-config", "--fix", str(path))
        assert (code, path.read_text()) == (Exit.CONFIG, text)
        assert why in about(findings, "train_file")["help"]
