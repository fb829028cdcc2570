"""TRL's `datasets:` from the command line: what is wrong with an entry, which rows are planned, what can be pasted."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from row_files import chats, pairs, texts

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


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 200 chats, 100 chats in two files, 50 pairs and 40 texts."""
    write_rows(tmp_path / "chats" / "train.jsonl", chats(200))
    write_rows(tmp_path / "chats" / "test.jsonl", chats(30))
    write_rows(tmp_path / "more" / "a.jsonl", chats(60))
    write_rows(tmp_path / "more" / "b.jsonl", chats(40))
    write_rows(tmp_path / "nest" / "inner" / "a.jsonl", chats(12))
    write_rows(tmp_path / "nest" / "b.jsonl", chats(7))
    write_rows(tmp_path / "pairs" / "train.jsonl", pairs(50))
    write_rows(tmp_path / "texts" / "train.jsonl", texts(40))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def stage_file(place: Path, arguments: str, stage: str = "sft") -> str:
    path = place / "stage.yaml"
    indented = "".join(f"  {line}\n" for line in arguments.splitlines())
    path.write_text(STAGE.format(stage=stage) + indented)
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main.main([*words, "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


FIRST = 8  # the line of the stage file with the first line of a case

BAD: list[tuple[str, str, int, str]] = [
    # the arguments, code, line below them, words of message or help
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
    ("datasets:\n- path: chats\n  fraction: 1\n- path: more\n  fraction: 1\nstreaming: true\nmax_steps: 9",
     "bad-fraction", 5, "stream"),
    ("datasets:\n- path: chats\n  split: train[10", "no-such-split", 2, "train[:1000]"),
    ("datasets:\n- path: chats\n  split: train[:9]\nstreaming: true\nmax_steps: 9", "no-such-split", 2, "sliced"),
    ("datasets:\n- path: chats\n  split: valid", "bad-data", 1, "no split valid"),
    ("datasets:\n- path: chats\neval_strategy: epoch", "no-such-split", 2, "`test_split_size: 0.05`"),
    ("datasets:\n- path: chats\ntest_split_size: 1.5", "bad-test-split", 2, "share"),
    ("datasets:\n- path: chats\ntest_split_size: 200", "bad-test-split", 2, "200 rows"),
    ("datasets:\n- path: chats\ntest_split_size: 9\nstreaming: true\nmax_steps: 9", "bad-test-split", 2, "stream"),
    ("datasets:\n- path: chats\ndataset_train_split: train_sft", "no-such-split", 2, "`split:`"),
    ("datasets:\n- path: chats\n- path: ./gone", "missing-data", 2, "./gone"),
    ("datasets:\n- path: json\n  data_files: gone.jsonl", "missing-data", 2, "gone.jsonl"),
    ("datasets:\n- path: chats/train.jsonl", "data-file", 1, "`path: json`"),
    ("datasets:\n- path: json", "data-file", 1, "reader"),
    ("datasets:\n- path: chats\n  columns: [message]", "data-columns", 2, "messages"),
    ("datasets:\n- path: chats\n- path: texts", "data-columns", 2, "same columns"),
    ("datasets:\n- path: chats\n- path: pairs", "data-columns", 2, "stage: dpo"),
    ("dataset_name: chats\ntest_split_size: 9", "conditional-key", 1, "`datasets:`"),
    ("report_to: [tensorboard, 5]\ndataset_name: chats", "bad-value", 0, "not text"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "line", "words"), BAD)
def test_a_mistake_is_told_at_its_line(
    arguments: str,
    code: str,
    line: int,
    words: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, said = answer(capsys, "validate-config", stage_file(place, arguments))
    found = [one for one in said["findings"] if one["code"] == code and one["line"] == FIRST + line]
    assert found, said["findings"]
    assert words in f"{found[0]['message']} {found[0]['help']}"


GOOD: list[tuple[str, int]] = [
    # the arguments, and how many rows are trained on
    ("datasets:\n- path: chats", 200),
    ("datasets:\n- path: chats\n- path: more", 300),
    ("datasets: [chats, more]", 300),
    ("datasets:\n- path: chats\n  split: train[:25%]\n- path: more\n  split: train[-10:]", 60),
    ("datasets:\n- path: chats\n  split: train+test", 230),
    ("datasets:\n- path: chats\n  split: train[:15]+test[50%:]", 30),
    ("datasets:\n- path: json\n  data_files: more/*.jsonl", 100),
    ("datasets:\n- path: json\n  data_files: [more/a.jsonl, chats/test.jsonl]", 90),
    (
        "datasets:\n- path: json\n  data_files: {train: more/a.jsonl, test: more/b.jsonl}\n  split: test",
        40,
    ),
    ("datasets:\n- path: more\n  data_files: b.jsonl", 40),
    ("datasets:\n- path: nest\n  data_dir: inner", 12),
    ("datasets:\n- path: chats\n  fraction: 1\n- path: more\n  fraction: 1", 200),
    ("datasets:\n- path: chats\n  fraction: 0.9\n- path: more\n  fraction: 0.1", 222),
    (
        "datasets:\n- path: chats\n  split: train[:50%]\n  fraction: 3\n- path: more\n  fraction: 1",
        133,
    ),
    ("datasets:\n- path: chats\ntest_split_size: 20", 180),
    ("datasets:\n- path: chats\n- path: more\ntest_split_size: 0.05", 285),
    ("datasets:\n- path: chats\n  split: train[:33]\ntest_split_size: 0.1", 29),
]


@pytest.mark.parametrize(("arguments", "rows"), GOOD)
def test_the_rows_of_a_mixture_are_planned(
    arguments: str, rows: int, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = answer(capsys, "sft", stage_file(place, arguments), "--gpus", "0", "--dry-run")
    assert code == 0, said["findings"]
    (plan,) = said["data"]["plan"]["gpus"]
    assert (plan["rows"], plan["steps"]) == (rows, -(-rows // 4))


@pytest.mark.parametrize(("arguments", "rows"), GOOD)
def test_trl_reads_as_many_rows_as_are_planned(arguments: str, rows: int, place: Path) -> None:
    utils = pytest.importorskip("trl.scripts.utils")
    args = load(stage_file(place, arguments)).args
    listed = [{"path": item} if isinstance(item, str) else dict(item) for item in args["datasets"]]
    config = utils.DatasetMixtureConfig(
        datasets=listed, test_split_size=args.get("test_split_size")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", place / "hf")
        assert len(utils.get_dataset(config)["train"]) == rows


def test_every_set_is_looked_at_and_only_the_rows_that_are_read(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = chats(50)
    odd[40] = {
        "messages": [{"role": "human", "content": "q"}, {"role": "assistant", "content": "a"}]
    }
    write_rows(place / "odd" / "train.jsonl", odd)

    def roles(split: str) -> list[str]:
        path = stage_file(place, f"datasets:\n- path: chats\n- path: odd\n  split: {split}")
        _, said = answer(capsys, "validate-config", path)
        return [
            f"{one['key']} {one['message']}"
            for one in said["findings"]
            if one["code"] == "odd-roles"
        ]

    (found,) = roles("train")
    assert found.startswith("args.datasets[1] ") and "odd/train.jsonl:41" in found
    assert roles("train[:40]") == roles("train[41:]") == []
    assert len(roles("train[40:41]")) == 1


def pasted(place: Path, text: str) -> tuple[list[str], dict[str, Any]]:
    """What the command of a dry run gets when it is pasted into bash: its words, and its config file."""
    stub = place / "stub"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    stub.chmod(0o755)
    lines = text.splitlines()
    assert sys.executable in lines[-1]
    lines[-1] = lines[-1].replace(shlex.quote(sys.executable), str(stub))
    done = subprocess.run(
        ["bash"], input="\n".join(lines) + "\n", text=True, capture_output=True, check=True
    )
    words = done.stdout.splitlines()
    config = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
    return words, config


def test_a_dry_run_can_be_pasted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = """\
datasets:
- path: chats
  split: train[:50%]
- path: more
  name: "$HOME `date` 'x' \\\\ END_OF_FILE"
test_split_size: 20
report_to: [tensorboard, mlflow]"""
    assert main.main(["sft", stage_file(place, arguments), "--gpus", "0", "--dry-run"]) == 0
    words, config = pasted(place, capsys.readouterr().out)
    assert config == {
        "datasets": [
            {"path": "chats", "split": "train[:50%]"},
            {"path": "more", "name": "$HOME `date` 'x' \\ END_OF_FILE"},
        ],
        "test_split_size": 20,
        "report_to": ["tensorboard", "mlflow"],
    }
    # what a flag can carry stays one
    assert words[words.index("--per_device_train_batch_size") + 1] == "4"
    assert not {"--datasets", "--test_split_size", "--report_to"} & {*words}


def test_the_json_of_a_dry_run_has_the_file(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stage_file(place, "datasets:\n- path: chats")
    _, said = answer(capsys, "sft", path, "--gpus", "0", "--dry-run")
    ((name, text),) = said["data"]["files"].items()
    assert name in said["data"]["argv"] and yaml.safe_load(text) == {
        "datasets": [{"path": "chats"}]
    }
    # nothing is written by a dry run
    assert not Path(name).exists()


def test_names_alone_stay_flags(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = answer(
        capsys, "sft", stage_file(place, "datasets: [chats, more]"), "--gpus", "0", "--dry-run"
    )
    argv = said["data"]["argv"]
    assert argv[argv.index("--datasets") :][1:3] == ["chats", "more"] and "--config" not in argv


def test_a_secret_is_not_written_into_the_file(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz0123")
    arguments = "datasets:\n- path: json\n  data_files: 'https://x/${oc.env:DATA_TOKEN}/a.jsonl'"
    code, said = answer(capsys, "sft", stage_file(place, arguments), "--gpus", "0", "--dry-run")
    assert code == 3 and "exposed-secret" in {one["code"] for one in said["findings"]}
    assert "hf_abc" not in json.dumps(said)


def test_each_process_draws_its_own_test_split(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stage_file(place, "datasets:\n- path: chats\ntest_split_size: 20")
    for gpus, severity in (("1", "note"), ("2", "warning")):
        _, said = answer(capsys, "sft", path, "--gpus", gpus, "--dry-run")
        assert [one["severity"] for one in said["findings"] if one["code"] == "unseeded-split"] == [
            severity
        ]


def test_a_file_of_trls_own_is_taken_over_as_it_is(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = {
        "model_name_or_path": "org/model",
        "datasets": [
            {
                "path": "org/thoughts",
                "name": "math",
                "split": "train[:90%]",
                "columns": ["messages"],
                "fraction": 2,
            },
            {"path": "json", "data_files": {"train": ["a.jsonl", "b.jsonl"]}, "fraction": 0.5},
        ],
        "test_split_size": 128,
        "report_to": ["wandb", "tensorboard"],
    }
    (place / "trl.yaml").write_text(yaml.safe_dump(theirs))
    code, said = answer(capsys, "init", "sft", "--from", "trl.yaml", "-o", "ours.yaml")
    assert code == 0 and said["data"]["lost"] == []
    assert theirs.items() <= load("ours.yaml").args.items()


def test_pairs_that_teach_nothing_are_found_in_selected_columns(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = [
        {**row, "rejected": row["chosen"], "id": number} for number, row in enumerate(pairs(20))
    ]
    write_rows(place / "equal" / "train.jsonl", equal)
    path = stage_file(
        place, "datasets:\n- path: pairs\n- path: equal\n  columns: [chosen, rejected]", "dpo"
    )
    _, said = answer(capsys, "validate-config", path)
    assert [one["key"] for one in said["findings"] if one["code"] == "equal-pairs"] == [
        "args.datasets[1]"
    ]
