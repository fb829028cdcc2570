"""Data files -> rows, one at a time: JSON lines, JSON arrays, CSV, text, Parquet and Arrow.

Memory is bounded by the longest row, not by the file. What `datasets` refuses in a file is a `BadRow`
in the stream of rows, so that every one of them can be told. Parquet and Arrow need pyarrow.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launcher.files import open_regular
from launcher.paths import is_pointer

MAX_ROW = 64 * 2**20  # characters of one row
_CHUNK = 2**20
_BOM = b"\xef\xbb\xbf"
_COMPRESSED: Mapping[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

# What pandas reads as a missing value unless told otherwise (pandas/_libs/parsers.pyx: STR_NA_VALUES).
CSV_MISSING = frozenset(
    "|#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null".split("|")
)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that the trainer's reader refuses, and why."""

    reason: str


class CannotRead(Exception):
    """A whole file that cannot be read here; the message says why."""


class NeedsPyarrow(CannotRead):
    """A Parquet or Arrow file, and no pyarrow in this Python."""


Numbered = tuple[int, Any]
"""The number of a row, as an editor counts lines where the file has lines, and the row or a `BadRow`."""


def read_rows(path: Path) -> Iterator[Numbered]:
    """The rows of a data file. Raises CannotRead, OSError where the file is gone."""
    reader = _READERS.get(data_suffix(path))
    if reader is None:
        raise CannotRead(f"launch reads no {path.suffix or 'such'} files")
    if is_pointer(path):
        raise CannotRead("is a git-lfs pointer, not the file: `git lfs pull`")
    yield from reader(path)


def data_suffix(path: Path) -> str:
    """The suffix that says the format: `.jsonl` of `train.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def has_lines(path: Path) -> bool:
    """Whether the numbers of rows are lines of the file."""
    return data_suffix(path) not in (".parquet", ".arrow")


def _open(path: Path) -> IO[bytes]:
    stream = open_regular(path)
    decompress = _COMPRESSED.get(path.suffix.lower())
    return stream if decompress is None else decompress(stream)


def _read_json(path: Path) -> Iterator[Numbered]:
    """JSON lines or one array, whatever the suffix, as datasets/packaged_modules/json/json.py reads them."""
    try:
        with _open(path) as stream:
            start = _first_character(stream)
            if start == b"[":
                yield from _array_items(stream)
            else:
                yield from _json_lines(stream)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise CannotRead(f"cannot be decompressed: {error}") from None


def _first_character(stream: IO[bytes]) -> bytes:
    head = stream.read(_CHUNK).removeprefix(_BOM)
    stream.seek(0)
    return head.lstrip()[:1]


def _json_lines(stream: IO[bytes]) -> Iterator[Numbered]:
    decode = json.JSONDecoder().decode
    number = 0
    bad = 0
    while line := stream.readline(MAX_ROW):
        number += 1
        if number == 1:
            line = line.removeprefix(_BOM)
        if len(line) == MAX_ROW and not line.endswith(b"\n"):
            yield number, BadRow(f"is longer than {MAX_ROW // 2**20} MiB")
            return
        try:
            yield number, decode(line.decode())
        except UnicodeDecodeError as error:
            yield number, BadRow(f"is not UTF-8 (byte {error.start + 1})")
        except RecursionError:
            yield number, BadRow("is nested too deep")
        except ValueError as error:
            if not line.strip():
                continue
            bad += 1
            yield number, BadRow(f"is not JSON ({_json_reason(error)})")
            if bad == number > 100:
                # not one line is JSON: the file is of another kind, and the rest says nothing new
                return


def _json_reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.lower()}, column {error.colno}"
    return str(error)


def _array_items(stream: IO[bytes]) -> Iterator[Numbered]:
    """The items of a JSON array, decoded one by one out of a window that slides over the file."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="strict")
    window = _Window(text)
    decoder = json.JSONDecoder()
    try:
        window.skip("[")
        while (character := window.next_character()) not in ("]", ""):
            if character == ",":
                window.skip(",")
                continue
            number = window.line
            try:
                item = window.decode(decoder)
            except RecursionError:
                yield number, BadRow("is nested too deep")
                return
            except ValueError as error:
                yield number, BadRow(f"is not JSON ({str(error).partition(':')[0].lower()})")
                return
            yield number, {"text": item} if isinstance(item, str) else item
        if not character:
            yield window.line, BadRow("ends inside the array: `]` is missing")
    except UnicodeDecodeError:
        yield window.line, BadRow("is not UTF-8")


class _Window:
    """What is read of a text and not yet decoded."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._text = ""
        self._place = 0
        self.line = 1

    def next_character(self) -> str:
        """The next character that is no blank, without taking it; empty at the end."""
        while True:
            while self._place < len(self._text):
                character = self._text[self._place]
                if not character.isspace():
                    return character
                self.line += character == "\n"
                self._place += 1
            if not self._read():
                return ""

    def skip(self, character: str) -> None:
        if self.next_character() == character:
            self._place += 1

    def decode(self, decoder: json.JSONDecoder) -> Any:
        """One JSON value; raises ValueError."""
        while True:
            try:
                value, end = decoder.raw_decode(self._text, self._place)
            except ValueError:
                # half a value, or a fault: only the rest of the text can tell
                if len(self._text) - self._place > MAX_ROW or not self._read():
                    raise
                continue
            if end == len(self._text) and self._read():
                # a number at the edge may go on
                continue
            self.line += self._text.count("\n", self._place, end)
            self._place = end
            return value

    def _read(self) -> bool:
        left = len(self._text) - self._place
        # as much again as is waiting: a long value is not decoded from its start for every chunk
        more = self._stream.read(max(_CHUNK, left))
        self._text = self._text[self._place :] + more
        self._place = 0
        return bool(more)


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[Numbered]:
    """Cells as pandas types them: missing words are null, numbers are numbers (`read_csv`)."""
    csv.field_size_limit(sys.maxsize)
    with _open(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        cells = csv.reader(text, delimiter=delimiter)
        try:
            names = next(cells, [])
            for values in cells:
                if not values:
                    continue
                if len(values) > len(names):
                    yield cells.line_num, BadRow(f"has {len(values)} cells, the header has {len(names)}")
                    continue
                padded = values + [""] * (len(names) - len(values))
                yield cells.line_num, {name: _cell(value) for name, value in zip(names, padded, strict=True)}
        except UnicodeDecodeError:
            yield cells.line_num + 1, BadRow("is not UTF-8")
        except csv.Error as error:
            yield cells.line_num, BadRow(f"is not CSV ({error})")


def _cell(value: str) -> Any:
    if value in CSV_MISSING:
        return None
    if value in ("True", "False", "TRUE", "FALSE", "true", "false"):
        return value.lower() == "true"
    if value[0] not in "+-.0123456789 ":
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _read_tsv(path: Path) -> Iterator[Numbered]:
    return _read_csv(path, "\t")


def _read_text(path: Path) -> Iterator[Numbered]:
    with _open(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield number, {"text": line.decode().rstrip("\n")}
            except UnicodeDecodeError:
                yield number, BadRow("is not UTF-8")


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise NeedsPyarrow("Parquet and Arrow files need pyarrow") from None
    return pyarrow


def _read_parquet(path: Path) -> Iterator[Numbered]:
    arrow = _pyarrow()
    try:
        with arrow.parquet.ParquetFile(path) as file:
            yield from _batch_rows(file.iter_batches(batch_size=1024))
    except arrow.ArrowException as error:
        raise CannotRead(f"is not a readable Parquet file: {_first_line(error)}") from None


def _read_arrow(path: Path) -> Iterator[Numbered]:
    arrow = _pyarrow()
    try:
        with arrow.memory_map(str(path)) as source:
            yield from _batch_rows(arrow.ipc.open_stream(source))
    except arrow.ArrowException as error:
        raise CannotRead(f"is not a readable Arrow stream: {_first_line(error)}") from None


def _batch_rows(batches: Any) -> Iterator[Numbered]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


_READERS: Mapping[str, Callable[[Path], Iterator[Numbered]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".ndjson": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".txt": _read_text,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""The reader of each format by its suffix; datasets/packaged_modules/__init__.py:95 reads more of them."""

READABLE = frozenset(_READERS)
TEXT_FORMATS = frozenset({".csv", ".tsv"})
