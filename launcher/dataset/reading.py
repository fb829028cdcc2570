"""Data files -> rows, one at a time: JSON lines, JSON arrays, CSV, text, Parquet and Arrow.

Memory is bounded by the longest row, not by the file. What `datasets` refuses in a file is a
`BadRow` in the stream of rows, so that every one of them can be told. Parquet and Arrow need
pyarrow.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from launcher.files import open_regular
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_pointer

MAX_ROW = 64 * 2**20  # characters of one row
_CHUNK = 2**20
_TYPED_FIRST = 10 * 2**20
_BOM = b"\xef\xbb\xbf"
_LINE_ENDS = ("\n", "\r\n", "")
# datasets/utils/extract.py: what a file begins with, or its name, says whether it is packed
_PACKED: Mapping[bytes, tuple[str, Callable[[Any], Any]]] = {
    b"\x1f\x8b": (".gz", gzip.open),
    b"BZh": (".bz2", bz2.open),
    b"\xfd7zXZ\x00": (".xz", lzma.open),
}
_PACKED_OTHERWISE = (
    b"\x28\xb5\x2f\xfd",
    b"\x04\x22\x4d\x18",
    b"PK\x03\x04",
    b"7z\xbc\xaf",
    b"Rar!\x1a\x07",
)

# What pandas reads as a missing value unless told otherwise (pandas/_libs/parsers.pyx:
# STR_NA_VALUES).
CSV_MISSING = frozenset(
    (
        "|#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|"
        "n/a|nan|null"
    ).split("|")
)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that the trainer's reader refuses, and why."""

    reason: str


class CannotRead(Exception):
    """A whole file that cannot be read here; the message says why."""


class UnsupportedFile(CannotRead):
    """A file of a kind that the trainer may read, and launch does not."""


class NeedsPyarrow(CannotRead):
    """A Parquet or Arrow file, and no pyarrow in this Python."""


Numbered = tuple[int, Any]
"""The number of a row, as an editor counts lines where the file has lines, and the row or a
`BadRow`.
"""


def read_rows(path: Path) -> Iterator[Numbered]:
    """The rows of a data file. Raises CannotRead, OSError where the file is gone."""
    reader = _READERS.get(find_data_suffix(path))
    if reader is None:
        raise UnsupportedFile(
            f"is a {path.suffix or 'file without a suffix'}, which launch does not read"
        )
    if is_pointer(path):
        raise CannotRead("is a git-lfs pointer, not the file: `git lfs pull`")
    try:
        yield from reader(path)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise CannotRead(f"cannot be decompressed: {error}") from None


def find_data_suffix(path: Path) -> str:
    """The suffix that says the format: `.jsonl` of `train.jsonl.gz`, and of `train.jsonl.bak`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    for suffix in reversed(suffixes):
        if suffix in _READERS:
            return suffix
    if not suffixes:
        return ""
    return suffixes[-1]


def has_lines(path: Path) -> bool:
    """Whether the numbers of rows are lines of the file."""
    return find_data_suffix(path) not in (".parquet", ".arrow")


def count_rows_typed_first(path: Path) -> int:
    """How many rows of a file `datasets` reads before it fixes the types of columns: those of ten
    megabytes of lines (datasets/packaged_modules/json/json.py::JsonConfig[chunksize: int]), all
    rows of other files.
    """
    if _READERS.get(find_data_suffix(path)) is not _read_json:
        return sys.maxsize
    with _open(path) as stream:
        head = stream.read(_TYPED_FIRST)
        if len(head) < _TYPED_FIRST or head.removeprefix(_BOM).lstrip()[:1] == b"[":
            return sys.maxsize
        # the line that is cut there is read to its end
        return head.count(b"\n") + 1


def _open(path: Path) -> IO[bytes]:
    stream = open_regular(path, _CHUNK)
    head = stream.read(8)
    stream.seek(0)
    for start, (suffix, decompress) in _PACKED.items():
        if head.startswith(start) or path.suffix.lower() == suffix:
            opened: IO[bytes] = decompress(stream)
            return opened
    if head.startswith(_PACKED_OTHERWISE):
        stream.close()
        raise UnsupportedFile("is an archive, which launch does not read")
    return stream


def _read_json(path: Path) -> Iterator[Numbered]:
    """JSON lines or one array, whatever the suffix, as datasets/packaged_modules/json/json.py reads
    them.
    """
    with _open(path) as stream:
        head = stream.read(_CHUNK)
        stream.seek(0)
        start = head.removeprefix(_BOM).lstrip()
        if start[:1] == b"[":
            yield from _read_array(stream)
        elif start[:1] == b"{" and _is_indented(start):
            yield from _read_values(stream)
        else:
            yield from _read_json_lines(stream)


def _is_indented(start: bytes) -> bool:
    """Whether the first object goes on after its first line, as in indented JSON."""
    line, newline, _ = start.partition(b"\n")
    if not newline:
        return False
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        # the fault is where the line ends, and not before
        return error.pos >= len(line.decode(errors="replace").rstrip())
    except (ValueError, RecursionError):
        return False
    return False


def _read_json_lines(stream: IO[bytes]) -> Iterator[Numbered]:
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
            text = line.decode()
            row = _decode_line(text)
            if number <= _CHECKED_FOR_TWINS:
                _TWIN_DECODER.decode(text)
            # the search alone is faster than to ask for a backslash and a `u` before it
            if _SURROGATE.search(line) is not None:
                _refuse_surrogates(row)
            yield number, row
        except UnicodeError as error:
            yield number, BadRow(_explain_unicode_error(error))
        except RecursionError:
            yield number, BadRow("is nested too deep")
        except ValueError as error:
            if not line.strip():
                continue
            if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
                for _, row in _read_values(io.BytesIO(line)):
                    yield number, row
                continue
            bad += 1
            yield number, BadRow(f"is not JSON ({_explain_json_error(error)})")
            if bad == number > 100:
                # not one line is JSON: the file is of another kind, and the rest says nothing new
                return


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for an object that has a key twice: json takes the last, pyarrow refuses
    the file.
    """
    keys = dict(pairs)
    if len(keys) < len(pairs):
        names = [key for key, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twin!r} stands there twice")
    return keys


_TWIN_DECODER = json.JSONDecoder(object_pairs_hook=_refuse_twins)
# a program that writes a key twice does so from the first row; each row is decoded twice for it
_CHECKED_FOR_TWINS = 1000


def _decode_line(text: str) -> Any:
    """One JSON value; raises ValueError. Rows without blanks cost no search for them."""
    try:
        row, end = _DECODER.raw_decode(text)
    except json.JSONDecodeError:
        return _DECODER.decode(text)
    if text[end:] in _LINE_ENDS:
        return row
    return _DECODER.decode(text)


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _refuse_surrogates(row: Any) -> None:
    """Raises UnicodeEncodeError for half of a surrogate pair: no text holds it, and pyarrow refuses
    it.
    """
    json.dumps(row, ensure_ascii=False).encode()


def _explain_unicode_error(error: UnicodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 (byte {error.start + 1})"
    return "holds half of a surrogate pair"


def _explain_json_error(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.lower()}, column {error.colno}"
    return str(error)


def _read_array(stream: IO[bytes]) -> Iterator[Numbered]:
    """The items of a JSON array, decoded one by one out of a window that slides over the file."""
    window = _Window(io.TextIOWrapper(stream, encoding="utf-8-sig", errors="strict"))
    try:
        window.skip("[")
        if window.next_character() == "]":
            window.skip("]")
        else:
            yield from _read_items_up_to_end(window)
        if window.next_character():
            yield window.line, BadRow("goes on after the end of the array")
    except UnicodeDecodeError:
        yield window.line, BadRow("is not UTF-8")
    except _Undecodable:
        return


class _Undecodable(Exception):
    """What follows cannot be decoded."""


def _read_items_up_to_end(window: _Window) -> Iterator[Numbered]:
    while True:
        yield from _read_item(window)
        character = window.next_character()
        if not character:
            yield window.line, BadRow("ends inside the array: `]` is missing")
            raise _Undecodable
        if character not in (",", "]"):
            yield window.line, BadRow("is followed by neither `,` nor `]`")
            raise _Undecodable
        window.skip(character)
        if character == "]":
            return


def _read_values(stream: IO[bytes]) -> Iterator[Numbered]:
    """JSON values one after the other, wherever their lines end."""
    window = _Window(io.TextIOWrapper(stream, encoding="utf-8-sig", errors="strict"))
    try:
        while window.next_character():
            yield from _read_item(window)
    except UnicodeDecodeError:
        yield window.line, BadRow("is not UTF-8")
    except _Undecodable:
        return


def _read_item(window: _Window) -> Iterator[Numbered]:
    """The value where the window stands. Raises _Undecodable after one that cannot be decoded."""
    window.next_character()
    number = window.line
    try:
        item = window.decode(_DECODER)
    except RecursionError:
        yield number, BadRow("is nested too deep")
        raise _Undecodable from None
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        yield number, BadRow(f"is not JSON ({str(error).partition(':')[0].lower()})")
        raise _Undecodable from None
    if isinstance(item, str):
        item = {"text": item}
    yield number, item


_DECODER = json.JSONDecoder()


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
            if not self._read_more():
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
                if len(self._text) - self._place > MAX_ROW or not self._read_more():
                    raise
                continue
            if end == len(self._text) and self._read_more():
                # a number at the edge may go on
                continue
            self.line += self._text.count("\n", self._place, end)
            self._place = end
            return value

    def _read_more(self) -> bool:
        left = len(self._text) - self._place
        # as much again as is waiting: a long value is not decoded from its start for every chunk
        more = self._stream.read(max(_CHUNK, left))
        self._text = self._text[self._place :] + more
        self._place = 0
        return bool(more)


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[Numbered]:
    """Cells as pandas types them: missing words are null, numbers are numbers (`read_csv`).

    What stands in front of the named cells is an index
    (pandas/io/parsers/c_parser_wrapper.py::CParserWrapper._set_noconvert_columns[self.names #2]).
    """
    # a quote that is never closed makes one cell of the rest of the file
    csv.field_size_limit(MAX_ROW)
    with _open(path) as stream:
        lines = _Lines(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""))
        cells = csv.reader(lines, delimiter=delimiter)
        number = 1
        try:
            names = next(cells, [])
            is_first = True
            while True:
                number = cells.line_num + 1
                values = next(cells, None)
                if values is None:
                    return
                if lines.ended:
                    yield number, BadRow("has a quote that is never closed")
                    return
                if not values:
                    continue
                if is_first and len(values) > len(names):
                    names = [INDEX] * (len(values) - len(names)) + names
                is_first = False
                if len(values) > len(names):
                    yield number, BadRow(f"has {len(values)} cells, the header has {len(names)}")
                    continue
                padded = values + [""] * (len(names) - len(values))
                row = {}
                for name, value in zip(names, padded, strict=True):
                    row[name] = _parse_cell(value)
                yield number, row
        except UnicodeDecodeError:
            yield number, BadRow("is not UTF-8")
        except csv.Error as error:
            yield number, BadRow(f"is not CSV ({error})")


# the column that `datasets` makes of pandas' index
INDEX = "__index_level_0__"


class _Lines:
    """Lines of a text. `ended` is whether a reader went on after the last, as it does inside a
    quoted cell.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.ended = False

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._stream.readline()
        self.ended = not line
        if not line:
            raise StopIteration
        return line


def _parse_cell(value: str) -> Any:
    if value in CSV_MISSING:
        return None
    if value in ("True", "False", "TRUE", "FALSE", "true", "false"):
        return value.lower() == "true"
    if value[0] not in "+-.0123456789 " or "_" in value:
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


def _import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise NeedsPyarrow("Parquet and Arrow files need pyarrow") from None
    return pyarrow


def _read_parquet(path: Path) -> Iterator[Numbered]:
    arrow = _import_pyarrow()
    try:
        with arrow.parquet.ParquetFile(path) as file:
            if file.num_row_groups and not file.metadata.row_group(0).num_rows:
                # datasets/packaged_modules/parquet/parquet.py::Parquet._generate_tables[) #3]: its
                # size is how many rows are read at once
                raise CannotRead(
                    "begins with an empty row group, which `datasets` refuses: leave the file out"
                )
            for field in file.schema_arrow:
                if arrow.types.is_map(field.type):
                    raise CannotRead(
                        f"has a column of the type map, `{field.name}`, which `datasets` refuses"
                    )
            yield from _read_batches(file.iter_batches(batch_size=1024))
    except (arrow.ArrowException, ValueError, OverflowError) as error:
        raise CannotRead(f"is not a readable Parquet file: {_take_first_line(error)}") from None


def _read_arrow(path: Path) -> Iterator[Numbered]:
    arrow = _import_pyarrow()
    try:
        with arrow.memory_map(str(path)) as source:
            yield from _read_batches(_read_arrow_batches(arrow, source))
    except (arrow.ArrowException, ValueError, OverflowError) as error:
        raise CannotRead(f"is not a readable Arrow file: {_take_first_line(error)}") from None


def _read_arrow_batches(arrow: Any, source: Any) -> Iterator[Any]:
    """datasets/packaged_modules/arrow/arrow.py::Arrow._generate_tables[reader = pa.ipc.open_file]:
    a stream, or else a file with a footer.
    """
    try:
        stream = arrow.ipc.open_stream(source)
    except (arrow.ArrowException, OSError):
        source.seek(0)
        file = arrow.ipc.open_file(source)
        for index in range(file.num_record_batches):
            yield file.get_batch(index)
        return
    yield from stream


def _read_batches(batches: Any) -> Iterator[Numbered]:
    number = 0
    for batch in batches:
        # pyarrow follows an offset of a damaged file to wherever it points, which ends the process
        batch.validate(full=True)
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _take_first_line(error: Exception) -> str:
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
"""The reader of each format by its suffix;
datasets/packaged_modules/__init__.py::[_EXTENSION_TO_MODULE: dict] reads more of them.
"""

READABLE = frozenset(_READERS)
TEXT_FORMATS = frozenset({".csv", ".tsv"})
