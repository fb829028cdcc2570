"""Which files of a folder are a split: launch against the library's own resolution of the same folder."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES, PATIENCE_S

from launcher.dataset import sources

SPLITS = ("train", "validation", "test", "gen")

# the library's answer for each folder: files of each split, or null where it refuses the folder
ASK = """
import json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import datasets
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
for folder in sys.stdin.read().splitlines():
    try:
        files = datasets.load_dataset_builder(folder).config.data_files
        base = os.path.realpath(folder)
        answer = {str(split): sorted(os.path.relpath(one, base) for one in paths) for split, paths in files.items()}
    except Exception as error:
        answer = None
        print(folder, type(error).__name__, str(error)[:200], file=sys.stderr)
    print(json.dumps(answer))
"""

CARD = "---\nconfigs:\n{}\n---\n# data\n"
LISTED = "- config_name: default\n  data_files:\n  - split: train\n    path: {}\n  - split: test\n    path: b.jsonl"

FOLDERS: list[Mapping[str, str] | list[str]] = [
    ["train.jsonl"], ["rows.jsonl"], ["rows.jsonl", "more.jsonl"], ["train.jsonl", "test.jsonl"],
    ["train.jsonl", "rows.jsonl"], ["Train.jsonl", "Test.jsonl"], ["TRAIN.JSONL"], ["test.jsonl"],
    ["training-1.jsonl", "dev.jsonl"], ["my_train_1.jsonl", "my_val.jsonl"], ["trainer.jsonl", "rows.jsonl"],
    ["train1.jsonl", "test2.jsonl"], ["a-train-b.csv", "eval.csv"], ["contest.jsonl", "retrain.jsonl"],
    ["train/a.jsonl", "test/b.jsonl"], ["train/a.jsonl", "rows.jsonl"], ["train/a.jsonl", "train_more.jsonl"],
    ["data/train/a.jsonl", "data/dev/b.jsonl"], ["data/train-set/a.jsonl"], ["eval/notes.txt", "a.jsonl"],
    ["train/a.jsonl", "test.jsonl"], ["a/test/b.jsonl", "a/train.jsonl"],
    ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
    ["data/train-00000-of-00001.parquet", "train.jsonl"], ["data/gen-00000-of-00002.jsonl", "train.jsonl"],
    ["train-00000-of-00001.parquet", "rows.jsonl"], ["data/train-00000-of-00002-abc.parquet"],
    ["a.csv", "a.jsonl", "b.jsonl"], ["a.csv", "b.jsonl"], ["a.json", "b.jsonl"], ["a.parquet", "b.jsonl", "c.jsonl"],
    ["train.csv", "test.jsonl"], ["train.jsonl.gz"], ["train.jsonl.gz", "rows.csv"], ["a.b.jsonl", "c.csv"],
    ["train.jsonl", "load.py"], ["train.jsonl", "README.md"], ["train.jsonl", "config.json"],
    ["train.jsonl", "dataset_info.json"], ["rows.jsonl", "dataset_infos.json"], ["train.jsonl", ".hidden.jsonl"],
    [".hidden/train.jsonl", "rows.jsonl"], ["__pycache__/train.jsonl", "rows.jsonl"],
    ["a/__x/train.jsonl", "rows.jsonl"], ["__rows.jsonl"], ["train.txt"], ["rows.txt", "notes.md"],
    ["rows.jsonl", "notes.md", "more.md"], ["a.jsonl", "picture.png"], ["a.jsonl", "b.png", "c.png"],
    ["train.jsonl", "run.eval"], ["task.toml", "rows.jsonl"], ["valid.tsv", "train.tsv"], ["train.bin"],
    ["rows.jsonl.bak"], ["rows.JSON"], ["a.tsv", "b.csv"], ["train.jsonl", "train.txt"], ["rows.ndjson"],
    {"README.md": CARD.format(LISTED.format("a.jsonl")), "a.jsonl": "", "b.jsonl": "", "c.jsonl": ""},
    {"README.md": CARD.format(LISTED.format("data/*.jsonl")), "data/a.jsonl": "", "b.jsonl": "", "data/x/c.jsonl": ""},
    {"README.md": CARD.format(LISTED.format("data/**")), "data/a.jsonl": "", "b.jsonl": "", "data/x/c.jsonl": ""},
    {"README.md": CARD.format(LISTED.format("[a.jsonl, c.jsonl]")), "a.jsonl": "", "b.jsonl": "", "c.jsonl": ""},
    {"README.md": CARD.format("- config_name: default\n  data_files: '*.csv'"), "a.csv": "", "b.jsonl": ""},
    {"README.md": CARD.format("- config_name: default\n  data_files: [a.csv]"), "a.csv": "", "b.csv": ""},
    {"README.md": CARD.format("- config_name: other\n  data_files: a.csv"), "a.csv": "", "b.csv": ""},
    {"README.md": CARD.format("- config_name: x\n  data_files: a.csv\n- config_name: y\n  data_files: b.csv"),
     "a.csv": "", "b.csv": ""},
    {"README.md": CARD.format("- config_name: x\n  data_files: a.csv\n- config_name: y\n  default: true\n"
                              "  data_files: b.csv"), "a.csv": "", "b.csv": ""},
    {"README.md": CARD.format("- config_name: default\n  data_dir: sub"), "sub/a.csv": "", "b.csv": ""},
    {"README.md": "---\nlicense: mit\n---\n", "a.csv": ""},
    {"README.md": "---\nlicense: [\n---\n", "a.csv": ""},
    {"README.md": "no front matter\n---\nconfigs: x\n---\n", "a.csv": ""},
    {"README.md": CARD.format(LISTED.format("missing.jsonl")), "a.jsonl": "", "b.jsonl": ""},
    {"README.md": CARD.format(LISTED.format("'[ab].jsonl'")), "a.jsonl": "", "b.jsonl": "", "c.jsonl": ""},
    {".huggingface.yaml": "configs:\n- config_name: default\n  data_files: b.jsonl\n", "a.jsonl": "", "b.jsonl": ""},
]  # fmt: skip


@pytest.mark.slow
def test_files_of_splits_are_those_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, files in enumerate(FOLDERS):
        contents = files if isinstance(files, Mapping) else dict.fromkeys(files, "")
        for name, text in contents.items():
            path = tmp_path / f"d{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    asked = "\n".join(f"d{number}" for number in range(len(FOLDERS)))
    words = [sys.executable, "-c", ASK]
    done = subprocess.run(words, input=asked, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode == 3:
        pytest.skip(f"{NO_PACKAGES}: {done.stderr}")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(FOLDERS), done.stderr
    wrong = [
        (files, split, answer, ours)
        for number, (files, answer) in enumerate(zip(FOLDERS, answers, strict=True))
        for split in SPLITS
        if not (ours := agreement(f"d{number}", split, answer))[0]
    ]
    assert not wrong, "\n".join(map(str, wrong)) + done.stderr


def agreement(
    folder: str, split: str, answer: dict[str, Any] | None
) -> tuple[bool, sources.Source]:
    """Whether launch reads the library's files; where it says that it does not know, it may not."""
    source = sources.of_name(folder, split, None, {})
    ours = sorted(str(path.relative_to(folder)) for path in source.files)
    theirs = [] if answer is None else answer.get(split, [])
    is_silent = not source.files and source.unseen is not None
    return ours == theirs or is_silent, source
