"""Which files of a folder are a split: launch against the library's own choice."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import NO_PACKAGES, PATIENCE_S

from launcher.dataset import sources

SPLITS = ("train", "validation", "test", "gen")

# the library's answer for each folder: the files of each split, or null where it refuses the folder
ASK = """
import json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import datasets
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
for folder in sys.stdin.read().splitlines():
    base = os.path.realpath(folder)
    try:
        files = datasets.load_dataset_builder(folder).config.data_files
        answer = {}
        for split, paths in files.items():
            answer[str(split)] = sorted(os.path.relpath(path, base) for path in paths)
    except Exception as error:
        answer = None
        print(folder, type(error).__name__, str(error)[:200], file=sys.stderr)
    print(json.dumps(answer))
"""


@dataclass(frozen=True)
class Folder:
    """Names of empty files, with spaces between them, and a file that describes the data set."""

    files: str
    card: str = ""
    card_name: str = "README.md"

    def create(self, root: Path) -> None:
        for name in self.files.split():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        if self.card:
            (root / self.card_name).write_text(self.card)


BY_NAMES = [
    # words in the names of files
    "train.jsonl",
    "rows.jsonl",
    "rows.jsonl more.jsonl",
    "train.jsonl test.jsonl",
    "train.jsonl rows.jsonl",
    "Train.jsonl Test.jsonl",
    "TRAIN.JSONL",
    "test.jsonl",
    "training-1.jsonl dev.jsonl",
    "my_train_1.jsonl my_val.jsonl",
    "trainer.jsonl rows.jsonl",
    "train1.jsonl test2.jsonl",
    "a-train-b.csv eval.csv",
    "contest.jsonl retrain.jsonl",
    # words in the names of folders
    "train/a.jsonl test/b.jsonl",
    "train/a.jsonl rows.jsonl",
    "train/a.jsonl train_more.jsonl",
    "data/train/a.jsonl data/dev/b.jsonl",
    "data/train-set/a.jsonl",
    "eval/notes.txt a.jsonl",
    "train/a.jsonl test.jsonl",
    "a/test/b.jsonl a/train.jsonl",
    # shards
    "data/train-00000-of-00001.parquet data/test-00000-of-00001.parquet",
    "data/train-00000-of-00001.parquet train.jsonl",
    "data/gen-00000-of-00002.jsonl train.jsonl",
    "train-00000-of-00001.parquet rows.jsonl",
    "data/train-00000-of-00002-abc.parquet",
    # several formats
    "a.csv a.jsonl b.jsonl",
    "a.csv b.jsonl",
    "a.json b.jsonl",
    "a.parquet b.jsonl c.jsonl",
    "train.csv test.jsonl",
    "train.jsonl.gz",
    "train.jsonl.gz rows.csv",
    "a.b.jsonl c.csv",
    "valid.tsv train.tsv",
    "a.tsv b.csv",
    "train.jsonl train.txt",
    "rows.ndjson",
    "rows.JSON",
    "rows.jsonl.bak",
    "train.txt",
    "train.bin",
    # files that are no data
    "train.jsonl load.py",
    "train.jsonl README.md",
    "train.jsonl config.json",
    "train.jsonl dataset_info.json",
    "rows.jsonl dataset_infos.json",
    "train.jsonl .hidden.jsonl",
    ".hidden/train.jsonl rows.jsonl",
    "__pycache__/train.jsonl rows.jsonl",
    "a/__x/train.jsonl rows.jsonl",
    "__rows.jsonl",
    "rows.txt notes.md",
    "rows.jsonl notes.md more.md",
    "a.jsonl picture.png",
    "a.jsonl b.png c.png",
    "train.jsonl run.eval",
    "task.toml rows.jsonl",
]


def configs(text: str) -> str:
    """The front matter of a card that lists these configs."""
    return f"---\nconfigs:\n{text}\n---\n# data\n"


def two_splits(train: str) -> str:
    """A card that names the files of the split `train`, and b.jsonl for `test`."""
    return configs(f"""\
- config_name: default
  data_files:
  - split: train
    path: {train}
  - split: test
    path: b.jsonl""")


def one_config(line: str, name: str = "default") -> str:
    return configs(f"- config_name: {name}\n  {line}")


TWO_CONFIGS = """\
- config_name: x
  data_files: a.csv
- config_name: y
  data_files: b.csv"""
HUGGINGFACE = "configs:\n- config_name: default\n  data_files: b.jsonl\n"

BY_CARD = [
    Folder("a.jsonl b.jsonl c.jsonl", two_splits("a.jsonl")),
    Folder("a.jsonl b.jsonl c.jsonl", two_splits("[a.jsonl, c.jsonl]")),
    Folder("a.jsonl b.jsonl c.jsonl", two_splits("'[ab].jsonl'")),
    Folder("a.jsonl b.jsonl", two_splits("missing.jsonl")),
    Folder("data/a.jsonl data/x/c.jsonl b.jsonl", two_splits("data/*.jsonl")),
    Folder("data/a.jsonl data/x/c.jsonl b.jsonl", two_splits("data/**")),
    Folder("a.csv b.jsonl", one_config("data_files: '*.csv'")),
    Folder("a.csv b.csv", one_config("data_files: [a.csv]")),
    Folder("a.csv b.csv", one_config("data_files: a.csv", name="other")),
    Folder("sub/a.csv b.csv", one_config("data_dir: sub")),
    Folder("a.csv b.csv", configs(TWO_CONFIGS)),
    Folder("a.csv b.csv", configs(f"{TWO_CONFIGS}\n  default: true")),
    Folder("a.csv", "---\nlicense: mit\n---\n"),
    Folder("a.csv", "---\nlicense: [\n---\n"),
    Folder("a.csv", "no front matter\n---\nconfigs: x\n---\n"),
    Folder("a.jsonl b.jsonl", HUGGINGFACE, card_name=".huggingface.yaml"),
]
FOLDERS = [*map(Folder, BY_NAMES), *BY_CARD]


def agrees(folder: str, split: str, expected: list[str]) -> bool:
    """Whether launch reads these files, or says that it does not know the split's files."""
    source = sources.find_named_source(folder, split, None, {})
    files = sorted(str(path.relative_to(folder)) for path in source.files)
    says_nothing = not source.files and source.unseen is not None
    return files == expected or says_nothing


@pytest.mark.slow
def test_the_files_of_a_split_are_those_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = []
    for number, folder in enumerate(FOLDERS):
        names.append(f"d{number}")
        folder.create(tmp_path / names[-1])

    command = [sys.executable, "-c", ASK]
    done = subprocess.run(
        command, input="\n".join(names), capture_output=True, text=True, timeout=PATIENCE_S
    )

    if done.returncode == 3:
        pytest.skip(f"{NO_PACKAGES}: {done.stderr}")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = []
    for name, folder, answer in zip(names, FOLDERS, answers, strict=True):
        for split in SPLITS:
            expected = (answer or {}).get(split, [])
            if not agrees(name, split, expected):
                wrong.append(f"{folder}, {split}: the library reads {expected}")
    assert not wrong, "\n".join(wrong) + done.stderr
