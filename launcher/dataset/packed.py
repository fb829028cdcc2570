"""Tokens that lie as OLMo-core reads them -> the rows that it packs them into, and how many
documents it sees.

It finds a document by the token that ends it (olmo_core/data/utils.py::iter_document_indices), not
by the samples that were tokenised, and packs documents by best fit, the longest first, each file by
itself (olmo_core/data/numpy_dataset.py::NumpyPackedFSLDataset).
"""

import array
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launcher.lazy_dataclass import dataclass

_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
# olmo_core_utils.py::to_oc_tokenizer_config[dolma2_markers =]
_DOLMA2 = ("dolma2", "OLMo-2-1124", "OLMo-2-0325", "OLMo-2-0425")
_DOLMA2_END = 100257


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """What a folder of tokens holds: samples that were tokenised, documents that are found, rows
    that they fill.
    """

    samples: int
    documents: int
    rows: int


def read_packed_rows(folder: Path, *, limit: int, tokenizer: str) -> PackedRows | None:
    """Count them, for rows of `limit` tokens; None where the tokenizer in the folder does not say
    how texts end.

    `tokenizer` is the name by which upstream knows it. Raises OSError.
    """
    marks = _find_marks(folder / "tokenizer", tokenizer)
    if marks is None:
        return None
    samples = 0
    documents = 0
    rows = 0
    for tokens in sorted(folder.glob("token_ids_part_*.npy")):
        with gzip.open(tokens.with_suffix("").with_suffix(".csv.gz"), "rt") as lines:
            samples += sum(1 for _ in lines)
        mask = tokens.with_name(tokens.name.replace("token_ids", "labels_mask"))
        lengths: Counter[int] = Counter()
        for length in _measure_documents(tokens, mask, marks):
            lengths[min(length, limit)] += 1
        documents += lengths.total()
        rows += count_packed_rows(lengths, limit)
    return PackedRows(samples=samples, documents=documents, rows=rows)


def count_packed_rows(lengths: Mapping[int, int], limit: int) -> int:
    """How many rows of `limit` tokens best fit makes of so many documents of each length."""
    rows = 0
    # how many rows have so much room left, and the same as bits, to find the smallest that is
    # enough
    room: Counter[int] = Counter()
    spaces = 0
    for length in sorted(lengths, reverse=True):
        left = lengths[length]
        while left:
            larger = spaces >> length
            space = limit
            if larger:
                space = length + (larger & -larger).bit_length() - 1
            # the row that was taken last has the least room that is enough, until it has not enough
            each = space // length
            taken = max(1, left // each)
            if larger:
                taken = min(taken, room[space])
                room[space] -= taken
                if not room[space]:
                    spaces &= ~(1 << space)
            else:
                rows += taken
            put = min(each, left)
            rest = space - put * length
            left -= put * taken
            room[rest] += taken
            spaces |= 1 << rest
    return rows


class _Marks(NamedTuple):
    """The token that ends a text, and the one that begins it where both have to stand."""

    end: int
    begin: int | None = None


def _measure_documents(tokens: Path, mask: Path, marks: _Marks) -> Iterator[int]:
    """The lengths of the documents of a file; what stands behind the last end is none."""
    count = mask.stat().st_size
    if not count:
        return
    content = array.array(_CODES[tokens.stat().st_size // count])
    with tokens.open("rb") as stream:
        content.fromfile(stream, count)
    start = place = 0
    while place < count:
        try:
            place = content.index(marks.end, place) + 1
        except ValueError:
            return
        if marks.begin is None or place == count or content[place] == marks.begin:
            yield place - start
            start = place


def _find_marks(folder: Path, name: str) -> _Marks | None:
    """The marks of a tokenizer; None where they are not known."""
    if any(marker in name for marker in _DOLMA2):
        return _Marks(_DOLMA2_END)
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    end = _find_token_id(config.get("eos_token"), whole)
    begin = _find_token_id(config.get("bos_token"), whole)
    if end is None:
        return None
    if begin == end:
        return _Marks(end)
    return _Marks(end, begin)


def _find_token_id(token: Any, tokenizer: Mapping[str, Any]) -> int | None:
    text = token
    if isinstance(token, dict):
        text = token.get("content")
    for added in tokenizer.get("added_tokens", ()):
        if added.get("content") == text:
            return int(added["id"])
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict):
        return None
    token_id = vocabulary.get(text)
    if isinstance(token_id, int):
        return token_id
    return None
