"""Files of every format -> rows, with the number of each; broken ones are said and never raise."""

import bz2
import json
import lzma
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from hypothesis import given, settings
from hypothesis import strategies as st
from row_files import array, arrow, lines, packed, parquet, table

from launcher.dataset import reading, survey
from launcher.dataset.reading import BadRow, CannotRead

ROWS: list[dict[str, Any]] = [{"text": "a", "x": "1 b"}, {"text": 'é"\n,', "x": "c"}]
JOINED = b'{"text": "a"} {"text": "b"}\n{"text": "c"}\n'


def read(path: Path) -> list[tuple[int, Any]]:
    return list(reading.read_rows(path))


def rows(path: Path) -> list[Any]:
    return [row for _, row in read(path)]


# name, content, numbers of the rows
FORMATS: list[tuple[str, bytes, list[int]]] = [
    ("a.jsonl", lines(ROWS), [1, 2]), ("a.json", lines(ROWS), [1, 2]), ("a.ndjson", lines(ROWS), [1, 2]),
    ("a.jsonl", b"\xef\xbb\xbf" + lines(ROWS), [1, 2]), ("a.jsonl", lines(ROWS, "\r\n"), [1, 2]),
    ("a.jsonl", lines(ROWS, "\n\n"), [1, 3]), ("a.jsonl", lines(ROWS).rstrip(), [1, 2]),
    ("a.jsonl", lines(ROWS, " "), [1, 1]), ("a.json", array(ROWS), [1, 1]), ("a.json", array(ROWS, 2), [2, 6]),
    ("a.jsonl", b"\xef\xbb\xbf\n " + array(ROWS), [2, 2]),
    ("a.json", b"\n".join(json.dumps(row, indent=1).encode() for row in ROWS), [1, 5]),
    ("a.jsonl.gz", packed(lines(ROWS)), [1, 2]), ("a.jsonl", packed(lines(ROWS)), [1, 2]),
    ("a.jsonl.bz2", bz2.compress(lines(ROWS)), [1, 2]), ("a.jsonl.xz", lzma.compress(lines(ROWS)), [1, 2]),
    ("a.jsonl.bak", lines(ROWS), [1, 2]),
    ("a.csv", table(ROWS), [2, 3]), ("a.tsv", table(ROWS, "\t"), [2, 3]), ("a.csv.gz", packed(table(ROWS)), [2, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "numbers"), FORMATS)
def test_the_same_rows_of_every_format(
    write: Write, name: str, content: bytes, numbers: list[int]
) -> None:
    path = write(name, content)
    assert rows(path) == ROWS
    assert [number for number, _ in read(path)] == numbers


@pytest.mark.parametrize("write_rows", [parquet, arrow])
def test_rows_of_columns(write: Write, write_rows: Any) -> None:
    pytest.importorskip("pyarrow")
    suffix = "parquet" if write_rows is parquet else "arrow"
    assert rows(write(f"a.{suffix}", write_rows(ROWS))) == ROWS


def test_parquet_files_that_the_library_refuses(write: Write) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    maps = pyarrow.table(
        {"m": pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))}
    )
    empty = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    for content, reason in ((maps, "type map"), (empty, "empty row group")):
        path = write("a.parquet", b"")
        pyarrow.parquet.write_table(content, path)
        with pytest.raises(CannotRead, match=reason):
            read(path)


def test_arrow_files_with_a_footer(write: Write) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    content = pyarrow.Table.from_pylist(ROWS)
    path = write("a.arrow", b"")
    with pyarrow.ipc.new_file(str(path), content.schema) as writer:
        writer.write_table(content)
    assert rows(path) == ROWS


# content of a .json file, the rows that are read, the number and the reason of what is not
BROKEN: list[tuple[bytes, int, int, str]] = [
    (b'{"a": 1}\n{"a": \n{"a": 2}\n', 2, 2, "is not JSON"), (b'{"a": 1}\n{"a": "\xe9"}\n', 1, 2, "is not UTF-8"),
    (b'{"a": 1}\n{"a": "\\ud83d"}\n', 1, 2, "surrogate"), (b"{'a': 1}\n", 0, 1, "is not JSON"),
    (b'[{"a": 1}, {"a": ', 1, 1, "is not JSON"), (b'[{"a": 1}, {"a": 2}', 2, 1, "`]` is missing"),
    (b'[{"a": 1},\n {"a": 2},]', 2, 2, "is not JSON"), (b'[{"a": 1} {"a": 2}]', 1, 1, "neither"),
    (b'[{"a": 1}] x', 1, 1, "goes on"), (b'{\n"a": 1\n}\n{\n"a": ?\n}\n', 1, 4, "is not JSON"),
    (b'{"a": 1}\n{"a": 1, "a": 2}\n', 1, 2, "'a' stands there twice"),
    (b'{"a": 1}\n{"a": {"b": 1, "b": 2}}\n', 1, 2, "'b' stands there twice"),
    (b'{"a": 1}, {"a": 2}\n', 1, 1, "is not JSON"), (b'{"a": ' + b"[" * 10_000 + b"\n", 0, 1, ""),
    (b"[" * 10_000, 0, 1, ""), ('{"a": 1}\n'.encode("utf-16"), 0, 1, "is not UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "count", "number", "reason"), BROKEN)
def test_broken_json_is_told_with_its_row(
    write: Write, content: bytes, count: int, number: int, reason: str
) -> None:
    found = read(write("a.json", content))
    assert sum(not isinstance(row, BadRow) for _, row in found) == count
    bad = [(where, row.reason) for where, row in found if isinstance(row, BadRow)]
    assert bad[0][0] == number
    assert reason in bad[0][1]


def test_every_broken_row_is_told(write: Write) -> None:
    content = b"".join(b'{"a": 1}\n{"a": \n' for _ in range(50))
    surveyed = survey.look([write("a.jsonl", content)])
    assert (surveyed.rows, surveyed.fault_count, len(surveyed.faults)) == (50, 50, 20)


CELLS: list[tuple[str, Any]] = [
    ("NA", None), ("None", None), ("", None), ("null", None), ("none", "none"), ("5", 5.0), ("-1.5e3", -1500.0),
    ("1_000", "1_000"), ("True", True), ("yes", "yes"), ("-", "-"), (" 7", 7.0), ("7 up", "7 up"), ("nan", None),
]  # fmt: skip


@pytest.mark.parametrize(("cell", "value"), CELLS)
def test_cells_are_typed_as_pandas_does(write: Write, cell: str, value: Any) -> None:
    path = write("a.csv", f"text,x\na,{cell}\n")
    assert rows(path) == [{"text": "a", "x": value}]


def test_cells_that_do_not_fit(write: Write) -> None:
    found = read(write("a.csv", 'a,b\n1,2\n1,2,3\n"x\ny",2\nz\n'))
    assert found[0] == (2, {"a": 1.0, "b": 2.0})
    assert found[1] == (3, BadRow("has 3 cells, the header has 2"))
    assert found[2:] == [(4, {"a": "x\ny", "b": 2.0}), (6, {"a": "z", "b": None})]


def test_a_quote_that_is_never_closed(write: Write) -> None:
    assert isinstance(rows(write("open.csv", 'a,b\n1,"2\n3,4\n'))[-1], BadRow)
    assert isinstance(rows(write("end.csv", 'a,b\n1,2\n3,"4'))[-1], BadRow)


def test_cells_in_front_of_the_header_are_an_index(write: Write) -> None:
    assert rows(write("a.csv", "a,b\nr1,1,2\nr2,3,4\n")) == [
        {reading.INDEX: "r1", "a": 1.0, "b": 2.0},
        {reading.INDEX: "r2", "a": 3.0, "b": 4.0},
    ]


def test_quotes_inside_cells_are_read_as_pandas_does(write: Write) -> None:
    assert rows(write("a.csv", 'a,b\n"say "x" y",1\n"say \\"z\\"",2\nhe said "w",3\n')) == [
        {"a": 'say x" y"', "b": 1.0},
        {"a": 'say \\z\\""', "b": 2.0},
        {"a": 'he said "w"', "b": 3.0},
    ]


# where the texts of ROWS begin and end in an Arrow file
OFFSETS = struct.pack("<3i", 0, 1, 6)
FAR_OFFSETS = struct.pack("<3i", 0, 1, 2**30)
UNREADABLE: list[tuple[str, bytes]] = [
    ("a.arrow", arrow(ROWS).replace(OFFSETS, FAR_OFFSETS)),
    ("a.jsonl.gz", packed(lines(ROWS * 900))[:-20]), ("a.csv.gz", packed(table(ROWS * 900))[:-20]),
    ("a.txt.gz", packed(b"a\n" * 9)[:12]), ("a.jsonl.gz", b"\x1f\x8b\x08\x00" + bytes(6) + b"\xff" * 40),
    ("a.csv.gz", b"\x1f\x8b\x08\x00" + bytes(6) + b"\xff" * 40), ("a.jsonl.gz", lines(ROWS)),
    ("a.jsonl.xz", lzma.compress(lines(ROWS))[:-9]), ("a.parquet", b"PAR1" + bytes(99) + b"PAR1"),
    ("a.arrow", bytes(99)), ("a.parquet", b""), ("a.arrow", b""),
    ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content"), UNREADABLE)
def test_files_that_cannot_be_read(write: Write, name: str, content: bytes) -> None:
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    path = write(name, content)
    with pytest.raises((CannotRead, OSError)):
        read(path)
    surveyed = survey.look([path])
    assert surveyed.fault_count
    assert not surveyed.unread


def test_files_that_launch_does_not_read_are_no_faults(write: Write) -> None:
    for name, start in (
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd"),
        ("a.jsonl", b"PK\x03\x04"),
        ("a.xml", b"<a>"),
    ):
        surveyed = survey.look([write(name, start + bytes(9))])
        assert not surveyed.faults, name
        assert surveyed.unread, name


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "messages prompt chosen rejected text tools role content tool_calls".split()
            )
            | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(st.lists(values, max_size=6))
def test_any_json_is_surveyed(tmp_path_factory: pytest.TempPathFactory, items: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("any")
    for name, content in (("a.jsonl", lines(items)), ("a.json", array(items))):
        path = folder / name
        path.write_bytes(content)
        surveyed = survey.look([path])
        assert surveyed.rows + surveyed.fault_count <= len(items) + 2


def test_any_bytes_are_surveyed(write: Write) -> None:
    source = random.Random(7)
    good = {
        "jsonl": lines(ROWS * 9),
        "json": array(ROWS * 9),
        "csv": table(ROWS * 9),
        "txt": b"a\n" * 9,
    }
    if reading_columns():
        good |= {"parquet": parquet(ROWS), "arrow": arrow(ROWS)}
    good |= {"jsonl.gz": packed(good["jsonl"]), "csv.xz": lzma.compress(good["csv"])}
    for number in range(400):
        suffix, content = source.choice(sorted(good.items()))
        damaged = bytearray(content)
        for _ in range(source.randint(1, 9)):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        start = source.randrange(len(damaged) // 2) if number % 3 == 0 else 0
        path = write(f"{number}.{suffix}", bytes(damaged[start:]))
        survey.look([path])
        survey.look([write(f"r{number}.{suffix}", source.randbytes(200))])


def reading_columns() -> bool:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return False
    return True


MEASURE = """
import resource, sys
from pathlib import Path
from launcher.dataset import survey
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
surveyed = survey.look([Path(sys.argv[1])])
after = resource.getrusage(resource.RUSAGE_SELF)
print(surveyed.rows, surveyed.fault_count, (after.ru_maxrss - before) // 1024, after.ru_utime)
"""


def measured(path: Path) -> tuple[int, int, int, float]:
    """Rows, faults, MiB that memory grew by, and seconds of CPU, of a look in its own process."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
    )
    count, faults, grown, seconds = done.stdout.split()
    return int(count), int(faults), int(grown), float(seconds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "broken.json", "open.csv", "blank.json"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    row = json.dumps(
        {
            "messages": [
                {"role": "user", "content": "x" * 2000},
                {"role": "assistant", "content": "y"},
            ]
        }
    )
    path = tmp_path / name
    start = {
        "a.json": "[",
        "broken.json": '[{"a": ',
        "open.csv": 'a,b\n1,"',
        "blank.json": " " * 2**27 + "[",
    }
    end = "\n" if name == "a.jsonl" else ",\n"
    with path.open("w") as stream:
        stream.write(start.get(name, ""))
        for number in range(100_000):
            text = row.replace("x", f"{number} x", 1)
            # no quote ends the one that is open
            stream.write((text.replace('"', "'") if name == "open.csv" else text) + end)
        if name == "a.json":
            stream.write("{}]")
    count, faults, grown, _ = measured(path)
    assert count == {"a.json": 100_001, "a.jsonl": 100_000}.get(name, 0)
    assert bool(faults) == (name not in ("a.json", "a.jsonl"))
    # a value that does not end is held up to the longest row that is allowed, as text of up to four bytes
    assert grown < (150 if name in ("a.json", "a.jsonl") else 450)


@pytest.mark.slow
def test_a_long_row_takes_linear_time(tmp_path: Path) -> None:
    for name, start, end in (("a.jsonl", "", "\n"), ("a.json", "[", "]")):
        seconds = []
        for size in (2**22, 2**25):
            path = tmp_path / name
            path.write_text(f'{start}{{"text": "{"x" * size}"}}{end}')
            count, faults, _, spent = measured(path)
            assert (count, faults) == (1, 0)
            seconds.append(spent)
        assert seconds[1] < seconds[0] + 2


def test_rows_that_are_typed_first(write: Write) -> None:
    small = write("a.jsonl", lines(ROWS))
    assert reading.rows_typed_first(small) == sys.maxsize
    large = write("b.jsonl", lines([{"text": "x" * 2**20}] * 12))
    assert reading.rows_typed_first(large) == 10
    assert (
        reading.rows_typed_first(write("c.json", array([{"text": "x" * 2**20}] * 12)))
        == sys.maxsize
    )
