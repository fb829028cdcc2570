"""Local data files and mixer lists: how many rows, which columns, and what cannot be read."""

import functools
import json
import math
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from launcher.files import open_regular, read_bytes
from launcher.paths import expanded, is_file, is_pointer

# bytes read for the first row; one that is longer is not judged
_HEAD = 2**20

_MOST = 2000  # entries of a folder to look at; a larger one is not judged
# datasets/data_files.py:43: words in the names of files
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
# with these a folder describes its splits itself, or is read in another way; files such as
# data/NAME-00000-of-00002.parquet bring splits of any name
_DESCRIBED = re.compile(
    r"(^|/)(readme\.md|dataset_dict\.json|dataset_infos?\.json|state\.json|task\.toml|instruction\.md"
    r"|[^/]*\.py|[^/]*-\d{5}-of-\d{5}[^/]*)\Z"
)
_WORDS = re.compile(r"[-._ 0-9/\\]+")

# Rows of the `train` split, `num_examples` on each set's card at huggingface.co/datasets.
HUB_ROWS = {
    "allenai/tulu-3-sft-mixture": 939_343,
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": 271_409,
    "allenai/llama-3.1-tulu-3-70b-preference-mixture": 334_367,
    "allenai/llama-3.1-tulu-3-405b-preference-mixture": 360_924,
}


def columns(path: Path) -> tuple[dict[str, Any], frozenset[str]] | None:
    """The first row of a .jsonl, and the names in the rows of its head; None where that is unknown."""
    if path.suffix != ".jsonl" or fault(path) is not None:
        return None
    try:
        with open_regular(path) as file:
            read = file.read(_HEAD)
        lines = [line for line in read.split(b"\n") if line.strip()]
        # the last one may be cut off
        found = [json.loads(line) for line in (lines if len(read) < _HEAD else lines[:-1])]
    except (OSError, RecursionError, ValueError):
        return None
    if not found or not all(isinstance(row, dict) for row in found):
        return None
    return found[0], frozenset().union(*found)


def files_of_split(name: str | None, split: str) -> list[Path]:
    """The files of a local folder that are a split, by their names, as datasets/data_files.py:43 finds them.

    None of them where it is not a folder, describes itself, or holds too much to tell.
    """
    folder = Path(name or "/nonexistent")
    try:
        below = list(islice(folder.rglob("*"), _MOST + 1))
        files = [str(path.relative_to(folder)) for path in below if path.is_file()]
    except (OSError, ValueError):
        return []
    shown = sorted(file for file in files if not file.startswith(".") and "/." not in file)
    if len(below) > _MOST or any(_DESCRIBED.search(file.lower()) for file in shown):
        return []
    words = {file: {*_WORDS.split(file.lower())} for file in shown}
    named = [file for file in shown if words[file] & _SPLITS.get(split, set())]
    # where no name says anything, all of it is for training
    nameless = split == "train" and set().union(*words.values()).isdisjoint(set().union(*_SPLITS.values()))
    return [folder / file for file in (shown if nameless else named)]


def lines_of(paths: Sequence[Path]) -> int | None:
    """Lines of local .jsonl files in all; None where there are none or they are too large to count."""
    try:
        sizes = [(path, path.stat()) for path in paths]
        if not sizes or sum(status.st_size for _, status in sizes) > 64 * 2**20:
            return None
        return sum(_lines(path, status.st_mtime_ns, status.st_size) for path, status in sizes)
    except (OSError, ValueError):
        return None


def entry_rows(name: str, amount: str) -> int | None:
    """Rows that one entry of a mixer list gives before filtering; None where that is not known.

    A count stands for itself, rows are repeated (dataset_transformation.py:2074 rounds a share down).
    """
    try:
        if "." not in amount:
            return int(amount)
        share = float(amount)
    except ValueError:
        return None
    rows = HUB_ROWS.get(name)
    if rows is None and name.endswith(".jsonl"):
        rows = lines_of([expanded(name)])
    return None if rows is None or not math.isfinite(share) else int(rows * share)


@functools.lru_cache(maxsize=64)
def _lines(path: Path, _changed: int, _size: int) -> int:
    # a search plans the same file hundreds of times
    return len(read_bytes(path).splitlines())


def fault(path: Path) -> str | None:
    """What is wrong with a data file; None where nothing is, or where that is unknown."""
    if is_file(path) and is_pointer(path):
        return "is a git-lfs pointer, not the file: `git lfs pull`"
    if path.suffix != ".jsonl":
        return None
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD)
    except (OSError, ValueError):
        return None
    before, _, _ = head.partition(head.strip()[:1] or b"\n")
    if not head.strip():
        return "holds no rows" if len(head) < _HEAD else None
    number = before.count(b"\n") + 1
    line, end, _ = head[len(before) :].partition(b"\n")
    if not end and len(head) == _HEAD:
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return f"line {number} is not JSON: one object a line is read"
    except RecursionError:
        return None
    return None if isinstance(row, dict) else f"line {number} is not a JSON object"
