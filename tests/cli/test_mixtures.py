"""TRL's `datasets:` from the command line: mistakes, planned rows, commands that can be pasted."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from answers import Ask
from answers import ask as ask  # a fixture
from row_files import assistant, chats, pairs, texts

from launcher.cli import main
from launcher.config.load import load

STAGE = """\
stage: {stage}
backend: trl
args:
  model_name_or_path: org/model
  output_dir: out
  per_device_train_batch_size: 4
  num_train_epochs: 1
"""
ARGS_LINE = 8
"""Where the arguments of a case begin in `STAGE`."""


def write_rows(path: str, rows: Sequence[object]) -> None:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_rows("chats/train.jsonl", chats(200))
    write_rows("chats/test.jsonl", chats(30))
    write_rows("more/a.jsonl", chats(60))
    write_rows("more/b.jsonl", chats(40))
    write_rows("nest/inner/a.jsonl", chats(12))
    write_rows("nest/b.jsonl", chats(7))
    write_rows("pairs/train.jsonl", pairs(50))
    write_rows("texts/train.jsonl", texts(40))


def stage_file(arguments: str, stage: str = "sft") -> str:
    text = STAGE.format(stage=stage)
    for line in arguments.splitlines():
        text += f"  {line}\n"
    Path("stage.yaml").write_text(text)
    return "stage.yaml"


@pytest.mark.parametrize(
    ("arguments", "code", "line", "words"),
    [
        ("datasets:\n- path: chats\n  splitt: train", "unknown-key", 2, "`split`"),
        ("datasets:\n- path: chats\n- pth: more", "unknown-key", 2, "`path`"),
        ("datasets:\n- name: chats", "bad-dataset", 1, "no `path`"),
        ("datasets: {path: chats}", "bad-value", 0, "- path"),
        ("datasets:\n- path: json\n  data_files: chats", "missing-data", 2, "data_dir: chats"),
        ("datasets:\n- path: chats\n  split: 5", "bad-dataset", 2, "not text"),
        ("datasets:\n- path: chats\n  columns: messages", "bad-dataset", 2, "list of names"),
        ("datasets:\n- path: chats\n  fraction: half", "bad-dataset", 2, "not a number"),
        ("datasets:\n- path: chats\n  data_files: 7", "bad-dataset", 2, "neither a path"),
        ("datasets:\n- path: chats\n- more", "bad-dataset", 2, "- path: more"),
        ("dataset_name: chats\ndatasets:\n- path: more", "two-data-sources", 0, "keep one"),
        ("datasets:\n- path: chats\n  fraction: 0.5\n- path: more", "bad-fraction", 3, "each set"),
        ("datasets:\n- path: chats\n  fraction: -1", "bad-fraction", 2, "above 0"),
        ("datasets:\n- path: chats\n  fraction: 0.1", "conditional-key", 2, "train[:10%]"),
        (
            "datasets:\n- path: chats\n  fraction: 1\n- path: more\n  fraction: 1\n"
            "streaming: true\nmax_steps: 9",
            "bad-fraction",
            5,
            "stream",
        ),
        ("datasets:\n- path: chats\n  split: train[10", "no-such-split", 2, "train[:1000]"),
        (
            "datasets:\n- path: chats\n  split: train[:9]\nstreaming: true\nmax_steps: 9",
            "no-such-split",
            2,
            "sliced",
        ),
        ("datasets:\n- path: chats\n  split: valid", "bad-data", 1, "no split valid"),
        (
            "datasets:\n- path: chats\neval_strategy: epoch",
            "no-such-split",
            2,
            "`test_split_size: 0.05`",
        ),
        ("datasets:\n- path: chats\ntest_split_size: 1.5", "bad-test-split", 2, "share"),
        ("datasets:\n- path: chats\ntest_split_size: 200", "bad-test-split", 2, "200 rows"),
        (
            "datasets:\n- path: chats\ntest_split_size: 9\nstreaming: true\nmax_steps: 9",
            "bad-test-split",
            2,
            "stream",
        ),
        (
            "datasets:\n- path: chats\ndataset_train_split: train_sft",
            "no-such-split",
            2,
            "`split:`",
        ),
        ("datasets:\n- path: chats\n- path: ./gone", "missing-data", 2, "./gone"),
        ("datasets:\n- path: json\n  data_files: gone.jsonl", "missing-data", 2, "gone.jsonl"),
        ("datasets:\n- path: chats/train.jsonl", "data-file", 1, "`path: json`"),
        ("datasets:\n- path: json", "data-file", 1, "reader"),
        ("datasets:\n- path: chats\n  columns: [message]", "data-columns", 2, "messages"),
        ("datasets:\n- path: chats\n- path: texts", "data-columns", 2, "same columns"),
        ("datasets:\n- path: chats\n- path: pairs", "data-columns", 2, "stage: dpo"),
        ("dataset_name: chats\ntest_split_size: 9", "conditional-key", 1, "`datasets:`"),
        ("report_to: [tensorboard, 5]\ndataset_name: chats", "bad-value", 0, "not text"),
    ],
)
def test_a_mistake_names_its_line(
    ask: Ask, arguments: str, code: str, line: int, words: str
) -> None:
    answer = ask("validate-config", stage_file(arguments))
    messages = []
    for finding in answer.with_code(code):
        if finding["line"] == ARGS_LINE + line:
            messages.append(f"{finding['message']} {finding['help']}")
    assert words in "\n".join(messages)


MIXTURES = [
    ("datasets:\n- path: chats", 200),
    ("datasets: [chats, more]", 300),
    ("datasets:\n- path: chats\n  split: train[:25%]\n- path: more\n  split: train[-10:]", 60),
    ("datasets:\n- path: chats\n  split: train+test", 230),
    ("datasets:\n- path: chats\n  split: train[:15]+test[50%:]", 30),
    ("datasets:\n- path: json\n  data_files: more/*.jsonl", 100),
    ("datasets:\n- path: json\n  data_files: [more/a.jsonl, chats/test.jsonl]", 90),
    (
        "datasets:\n- path: json\n  data_files: {train: more/a.jsonl, test: more/b.jsonl}\n"
        "  split: test",
        40,
    ),
    ("datasets:\n- path: more\n  data_files: b.jsonl", 40),
    ("datasets:\n- path: nest\n  data_dir: inner", 12),
    ("datasets:\n- path: chats\n  fraction: 0.9\n- path: more\n  fraction: 0.1", 222),
    (
        "datasets:\n- path: chats\n  split: train[:50%]\n  fraction: 3\n"
        "- path: more\n  fraction: 1",
        133,
    ),
    ("datasets:\n- path: chats\ntest_split_size: 20", 180),
    ("datasets:\n- path: chats\n- path: more\ntest_split_size: 0.05", 285),
    ("datasets:\n- path: chats\n  split: train[:33]\ntest_split_size: 0.1", 29),
]
"""Arguments, and how many rows are trained on."""


@pytest.mark.parametrize(("arguments", "rows"), MIXTURES)
def test_the_rows_of_a_mixture_are_planned(ask: Ask, arguments: str, rows: int) -> None:
    answer = ask("sft", stage_file(arguments), "--gpus", "0", "--dry-run")
    assert answer.code == 0, answer.findings
    (plan,) = answer.data["plan"]["gpus"]
    assert plan["rows"] == rows
    assert plan["steps"] == -(-rows // 4)


@pytest.mark.parametrize(("arguments", "rows"), MIXTURES)
def test_trl_reads_as_many_rows_as_are_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str, rows: int
) -> None:
    utils = pytest.importorskip("trl.scripts.utils")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    args = load(stage_file(arguments)).args
    entries = []
    for entry in args["datasets"]:
        entries.append({"path": entry} if isinstance(entry, str) else dict(entry))
    config = utils.DatasetMixtureConfig(
        datasets=entries, test_split_size=args.get("test_split_size")
    )
    assert len(utils.get_dataset(config)["train"]) == rows


@pytest.mark.parametrize(
    ("split", "is_read"),
    [("train", True), ("train[:40]", False), ("train[40:41]", True), ("train[41:]", False)],
)
def test_of_every_set_the_rows_that_are_read_are_checked(
    ask: Ask, split: str, is_read: bool
) -> None:
    rows = chats(50)
    rows[40] = {"messages": [{"role": "human", "content": "q"}, assistant()]}
    write_rows("odd/train.jsonl", rows)
    path = stage_file(f"datasets:\n- path: chats\n- path: odd\n  split: {split}")
    findings = ask("validate-config", path).with_code("odd-roles")
    assert len(findings) == is_read
    for finding in findings:
        assert finding["key"] == "args.datasets[1]"
        assert "odd/train.jsonl:41" in finding["message"]


def paste(command: str) -> list[str]:
    """The words that a program gets when a dry run's command is pasted into bash."""
    stub = Path("stub").resolve()
    stub.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    stub.chmod(0o755)
    *lines, last = command.splitlines()
    assert sys.executable in last
    last = last.replace(shlex.quote(sys.executable), str(stub))
    script = "\n".join([*lines, last, ""])
    process = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=True)
    return process.stdout.splitlines()


def test_a_dry_run_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = """\
datasets:
- path: chats
  split: train[:50%]
- path: more
  name: "$HOME `date` 'x' \\\\ END_OF_FILE"
test_split_size: 20
report_to: [tensorboard, mlflow]"""
    assert main.main(["sft", stage_file(arguments), "--gpus", "0", "--dry-run"]) == 0
    words = paste(capsys.readouterr().out)
    config_file = words[words.index("--config") + 1]
    assert yaml.safe_load(Path(config_file).read_text()) == {
        "datasets": [
            {"path": "chats", "split": "train[:50%]"},
            {"path": "more", "name": "$HOME `date` 'x' \\ END_OF_FILE"},
        ],
        "test_split_size": 20,
        "report_to": ["tensorboard", "mlflow"],
    }
    # what a flag can carry stays one
    assert words[words.index("--per_device_train_batch_size") + 1] == "4"
    assert {"--datasets", "--test_split_size", "--report_to"}.isdisjoint(words)


def test_the_json_of_a_dry_run_has_the_config_file_and_writes_none(ask: Ask) -> None:
    data = ask("sft", stage_file("datasets:\n- path: chats"), "--gpus", "0", "--dry-run").data
    ((name, text),) = data["files"].items()
    assert name in data["argv"]
    assert yaml.safe_load(text) == {"datasets": [{"path": "chats"}]}
    assert not Path(name).exists()


def test_names_alone_stay_flags(ask: Ask) -> None:
    path = stage_file("datasets: [chats, more]")
    argv = ask("sft", path, "--gpus", "0", "--dry-run").data["argv"]
    flag = argv.index("--datasets")
    assert argv[flag + 1 : flag + 3] == ["chats", "more"]
    assert "--config" not in argv


def test_a_secret_is_not_written_into_the_config_file(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz0123")
    url = "https://x/${oc.env:DATA_TOKEN}/a.jsonl"
    path = stage_file(f"datasets:\n- path: json\n  data_files: '{url}'")
    answer = ask("sft", path, "--gpus", "0", "--dry-run")
    assert answer.code == 3
    assert "exposed-secret" in answer.codes
    assert "hf_abc" not in f"{answer}"


@pytest.mark.parametrize(("gpus", "severity"), [("1", "note"), ("2", "warning")])
def test_each_process_draws_its_own_test_split(ask: Ask, gpus: str, severity: str) -> None:
    path = stage_file("datasets:\n- path: chats\ntest_split_size: 20")
    (finding,) = ask("sft", path, "--gpus", gpus, "--dry-run").with_code("unseeded-split")
    assert finding["severity"] == severity


def test_a_file_of_trl_is_converted_as_it_is(ask: Ask) -> None:
    thoughts: Any = {"path": "org/thoughts", "name": "math", "split": "train[:90%]"}
    thoughts |= {"columns": ["messages"], "fraction": 2}
    files = {"path": "json", "data_files": {"train": ["a.jsonl", "b.jsonl"]}, "fraction": 0.5}
    args = {
        "model_name_or_path": "org/model",
        "datasets": [thoughts, files],
        "test_split_size": 128,
        "report_to": ["wandb", "tensorboard"],
    }
    Path("trl.yaml").write_text(yaml.safe_dump(args))
    answer = ask("init", "sft", "--from", "trl.yaml", "-o", "new.yaml")
    assert (answer.code, answer.data["lost"]) == (0, [])
    assert args.items() <= load("new.yaml").args.items()


def test_pairs_that_teach_nothing_are_found_in_selected_columns(ask: Ask) -> None:
    rows = []
    for number, row in enumerate(pairs(20)):
        rows.append({**row, "rejected": row["chosen"], "id": number})
    write_rows("equal/train.jsonl", rows)
    selected = "- path: equal\n  columns: [chosen, rejected]"
    path = stage_file(f"datasets:\n- path: pairs\n{selected}", "dpo")
    (finding,) = ask("validate-config", path).with_code("equal-pairs")
    assert finding["key"] == "args.datasets[1]"
