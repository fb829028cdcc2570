"""Files of every format -> rows and their numbers; a broken row is reported and never raises."""

import bz2
import json
import lzma
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from hypothesis import given, settings
from hypothesis import strategies as st
from row_files import Row, array, arrow, chat, lines, packed, parquet, table

from launcher.dataset import reading, survey
from launcher.dataset.reading import BadRow, CannotRead

ROWS: list[Row] = [{"text": "a", "x": "1 b"}, {"text": 'é"\n,', "x": "c"}]
BOM = b"\xef\xbb\xbf"


def read(path: Path) -> list[tuple[int, Any]]:
    return list(reading.read_rows(path))


def rows_of(path: Path) -> list[Any]:
    return [row for _, row in read(path)]


def numbers_of(path: Path) -> list[int]:
    return [number for number, _ in read(path)]


@pytest.mark.parametrize(
    ("name", "content", "numbers"),
    [
        pytest.param("a.jsonl", lines(ROWS), [1, 2], id="lines"),
        pytest.param("a.ndjson", lines(ROWS), [1, 2], id="another suffix"),
        pytest.param("a.jsonl.bak", lines(ROWS), [1, 2], id="a suffix behind the suffix"),
        pytest.param("a.jsonl", BOM + lines(ROWS), [1, 2], id="byte order mark"),
        pytest.param("a.jsonl", lines(ROWS, "\n\n"), [1, 3], id="blank lines"),
        pytest.param("a.jsonl", lines(ROWS, " "), [1, 1], id="two objects in a line"),
        pytest.param("a.json", array(ROWS), [1, 1], id="array"),
        pytest.param("a.json", array(ROWS, 2), [2, 6], id="indented array"),
        pytest.param("a.jsonl", BOM + b"\n " + array(ROWS), [2, 2], id="blanks before an array"),
        pytest.param(
            "a.json", array(ROWS, 1)[2:-2].replace(b"},", b"}"), [1, 5], id="indented rows"
        ),
        pytest.param("a.jsonl.gz", packed(lines(ROWS)), [1, 2], id="gzip"),
        pytest.param("a.jsonl", packed(lines(ROWS)), [1, 2], id="gzip without its suffix"),
        pytest.param("a.jsonl.bz2", bz2.compress(lines(ROWS)), [1, 2], id="bzip2"),
        pytest.param("a.jsonl.xz", lzma.compress(lines(ROWS)), [1, 2], id="xz"),
        pytest.param("a.csv", table(ROWS), [2, 3], id="csv"),
        pytest.param("a.tsv", table(ROWS, "\t"), [2, 3], id="tsv"),
    ],
)
def test_every_format_gives_the_same_rows(
    name: str, content: bytes, numbers: list[int], write: Write
) -> None:
    path = write(name, content)
    assert rows_of(path) == ROWS
    assert numbers_of(path) == numbers


@pytest.mark.parametrize(
    ("name", "content_of"), [("a.parquet", parquet), ("a.arrow", arrow)], ids=["Parquet", "Arrow"]
)
def test_formats_of_columns_give_the_same_rows(
    name: str, content_of: Callable[[list[Row]], bytes], write: Write
) -> None:
    pytest.importorskip("pyarrow")
    assert rows_of(write(name, content_of(ROWS))) == ROWS


def test_an_arrow_file_with_a_footer_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    content = pyarrow.Table.from_pylist(ROWS)
    path = tmp_path / "a.arrow"
    with pyarrow.ipc.new_file(str(path), content.schema) as writer:
        writer.write_table(content)
    assert rows_of(path) == ROWS


def test_parquet_files_that_datasets_refuses_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet_files = pytest.importorskip("pyarrow.parquet")
    text = pyarrow.string()
    map_column = pyarrow.array([[("a", 1)]], pyarrow.map_(text, pyarrow.int64()))
    empty_column = pyarrow.array([], text)
    path = tmp_path / "a.parquet"

    for column, reason in ((map_column, "type map"), (empty_column, "empty row group")):
        parquet_files.write_table(pyarrow.table({"text": column}), path)
        with pytest.raises(CannotRead, match=reason):
            read(path)


@pytest.mark.parametrize(
    ("content", "good_rows", "number", "reason"),
    [
        (b'{"a": 1}\n{"a": \n{"a": 2}\n', 2, 2, "is not JSON"),
        (b'{"a": 1}\n{"a": "\xe9"}\n', 1, 2, "is not UTF-8"),
        (b'{"a": 1}\n{"a": "\\ud83d"}\n', 1, 2, "surrogate"),
        (b'{"a": 1}, {"a": 2}\n', 1, 1, "is not JSON"),
        (b'[{"a": 1}, {"a": ', 1, 1, "is not JSON"),
        (b'[{"a": 1}, {"a": 2}', 2, 1, "`]` is missing"),
        (b'[{"a": 1},\n {"a": 2},]', 2, 2, "is not JSON"),
        (b'[{"a": 1} {"a": 2}]', 1, 1, "neither"),
        (b'[{"a": 1}] x', 1, 1, "goes on"),
        (b'{\n"a": 1\n}\n{\n"a": ?\n}\n', 1, 4, "is not JSON"),
        (b'{"a": 1}\n{"a": 1, "a": 2}\n', 1, 2, "'a' stands there twice"),
        (b'{"a": 1}\n{"a": {"b": 1, "b": 2}}\n', 1, 2, "'b' stands there twice"),
        (b'{"a": ' + b"[" * 10_000 + b"\n", 0, 1, ""),
        (b"[" * 10_000, 0, 1, ""),
    ],
)
def test_a_broken_row_of_json_is_reported_with_its_number(
    content: bytes, good_rows: int, number: int, reason: str, write: Write
) -> None:
    numbered_rows = read(write("a.json", content))

    bad = [(place, row) for place, row in numbered_rows if isinstance(row, BadRow)]
    assert len(numbered_rows) - len(bad) == good_rows
    first_number, first_row = bad[0]
    assert first_number == number
    assert reason in first_row.reason


def test_every_broken_row_is_counted_and_twenty_are_listed(write: Write) -> None:
    surveyed = survey.look([write("a.jsonl", b'{"a": 1}\n{"a": \n' * 50)])

    assert surveyed.rows == 50
    assert surveyed.fault_count == 50
    assert len(surveyed.faults) == 20


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("NA", None), ("None", None), ("", None), ("null", None), ("nan", None), ("none", "none"),
        ("5", 5.0), ("-1.5e3", -1500.0), (" 7", 7.0), ("1_000", "1_000"), ("7 up", "7 up"),
        ("True", True), ("yes", "yes"), ("-", "-"),
    ],
)  # fmt: skip
def test_a_cell_has_the_type_that_pandas_gives_it(cell: str, value: Any, write: Write) -> None:
    path = write("a.csv", f"text,x\na,{cell}\n")
    assert rows_of(path) == [{"text": "a", "x": value}]


def test_a_row_of_csv_with_too_many_cells_is_bad(write: Write) -> None:
    path = write("a.csv", 'a,b\n1,2\n1,2,3\n"x\ny",2\nz\n')
    assert read(path) == [
        (2, {"a": 1.0, "b": 2.0}),
        (3, BadRow("has 3 cells, the header has 2")),
        (4, {"a": "x\ny", "b": 2.0}),
        (6, {"a": "z", "b": None}),
    ]


@pytest.mark.parametrize("text", ['a,b\n1,"2\n3,4\n', 'a,b\n1,2\n3,"4'])
def test_a_quote_that_is_never_closed_is_bad(text: str, write: Write) -> None:
    last = rows_of(write("a.csv", text))[-1]
    assert isinstance(last, BadRow)


def test_cells_in_front_of_the_header_are_an_index(write: Write) -> None:
    (row,) = rows_of(write("a.csv", "a,b\nr1,1,2\n"))
    assert row == {reading.INDEX: "r1", "a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ('"say "x" y"', 'say x" y"'),
        ('"say \\"z\\""', 'say \\z\\""'),
        ('he said "w"', 'he said "w"'),
    ],
)
def test_quotes_inside_a_cell_are_read_as_pandas_reads_them(
    cell: str, value: str, write: Write
) -> None:
    assert rows_of(write("a.csv", f"a,b\n{cell},1\n")) == [{"a": value, "b": 1.0}]


BROKEN_GZIP = b"\x1f\x8b\x08\x00" + bytes(6) + b"\xff" * 40
OFFSETS = struct.pack("<3i", 0, 1, 6)
"""Where the texts of ROWS begin and end in an Arrow file."""
FAR_OFFSETS = struct.pack("<3i", 0, 1, 2**30)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("a.jsonl.gz", packed(lines(ROWS * 900))[:-20], id="cut gzip of lines"),
        pytest.param("a.jsonl.gz", BROKEN_GZIP, id="broken gzip of lines"),
        pytest.param("a.jsonl.gz", lines(ROWS), id="gzip by its name alone"),
        pytest.param("a.jsonl.xz", lzma.compress(lines(ROWS))[:-9], id="cut xz"),
        pytest.param("a.parquet", b"PAR1" + bytes(99) + b"PAR1", id="broken Parquet"),
        pytest.param("a.arrow", bytes(99), id="broken Arrow"),
        pytest.param("a.arrow", arrow(ROWS).replace(OFFSETS, FAR_OFFSETS), id="damaged Arrow"),
        pytest.param("a.jsonl", POINTER, id="git-lfs pointer"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_fault(name: str, content: bytes, write: Write) -> None:
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    path = write(name, content)

    with pytest.raises((CannotRead, OSError)):
        read(path)

    surveyed = survey.look([path])
    assert surveyed.fault_count
    assert not surveyed.unread


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.jsonl.zst", b"\x28\xb5\x2f\xfd"), ("a.jsonl", b"PK\x03\x04"), ("a.xml", b"<a>")],
)
def test_a_file_of_a_kind_that_launch_does_not_read_is_no_fault(
    name: str, start: bytes, write: Write
) -> None:
    surveyed = survey.look([write(name, start + bytes(9))])
    assert not surveyed.faults
    assert surveyed.unread


KEYS = st.sampled_from("messages prompt chosen rejected text tools role content tool_calls".split())
SCALARS = st.none() | st.booleans() | st.floats() | st.integers() | st.text()


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(KEYS | st.text(), inner, max_size=4)
    return objects | st.lists(inner, max_size=3)


@settings(max_examples=150)
@given(st.lists(st.recursive(SCALARS, containers, max_leaves=12), max_size=6))
def test_any_json_is_surveyed(tmp_path_factory: pytest.TempPathFactory, items: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("any")
    for name, content in (("a.jsonl", lines(items)), ("a.json", array(items))):
        path = folder / name
        path.write_bytes(content)
        surveyed = survey.look([path])
        assert surveyed.rows + surveyed.fault_count <= len(items) + 2


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content with some other bytes, in one of three cases without its beginning."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 9)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    if chance.random() < 1 / 3:
        del changed[: chance.randrange(len(changed) // 2)]
    return bytes(changed)


def test_any_bytes_are_surveyed(write: Write) -> None:
    pytest.importorskip("pyarrow")
    chance = random.Random(7)
    rows = ROWS * 9
    contents = {
        "jsonl": lines(rows),
        "json": array(rows),
        "csv": table(rows),
        "txt": b"a\n" * 9,
        "parquet": parquet(ROWS),
        "arrow": arrow(ROWS),
        "jsonl.gz": packed(lines(rows)),
        "csv.xz": lzma.compress(table(rows)),
    }
    for number in range(200):
        suffix = chance.choice(list(contents))
        survey.look([write(f"{number}.{suffix}", damaged(contents[suffix], chance))])
        survey.look([write(f"random{number}.{suffix}", chance.randbytes(200))])


@dataclass(frozen=True)
class Cost:
    """What a look at a file takes, in a process of its own."""

    rows: int
    memory_mib: int
    """By which the process grew."""
    cpu_s: float


MEASURE = """
import resource, sys
from pathlib import Path
from launcher.dataset import survey
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
surveyed = survey.look([Path(sys.argv[1])])
after = resource.getrusage(resource.RUSAGE_SELF)
print(surveyed.rows, (after.ru_maxrss - before) // 1024, after.ru_utime)
"""


def cost_of_look(path: Path) -> Cost:
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows, memory, cpu = done.stdout.split()
    return Cost(int(rows), int(memory), float(cpu))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "start", "separator"), [("a.jsonl", "", "\n"), ("a.json", "[", ",\n")]
)
def test_memory_does_not_grow_with_a_file(
    name: str, start: str, separator: str, tmp_path: Path
) -> None:
    row = json.dumps({"messages": chat(), "padding": "x" * 2000})
    path = tmp_path / name
    path.write_text(start + f"{row}{separator}" * 40_000)

    cost = cost_of_look(path)

    assert cost.rows == 40_000
    assert cost.memory_mib < 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "start", "filler"),
    [
        pytest.param("a.json", '[{"a": "', "x", id="value"),
        pytest.param("a.csv", 'a,b\n1,"', "x\n", id="quote"),
        pytest.param("a.json", "", " ", id="blanks"),
    ],
)
def test_what_does_not_end_is_not_read_whole(
    name: str, start: str, filler: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(start + filler * (2**28 // len(filler)))

    cost = cost_of_look(path)

    assert cost.rows == 0
    assert cost.memory_mib < 450


@pytest.mark.slow
def test_a_long_row_takes_linear_time(tmp_path: Path) -> None:
    for name, start, end in (("a.jsonl", "", "\n"), ("a.json", "[", "]")):
        seconds = []
        for size in (2**22, 2**25):
            text = "x" * size
            path = tmp_path / name
            path.write_text(f'{start}{{"text": "{text}"}}{end}')
            cost = cost_of_look(path)
            assert cost.rows == 1
            seconds.append(cost.cpu_s)
        assert seconds[1] < seconds[0] + 2


TWELVE_MIB = [{"text": "x" * 2**20}] * 12


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        pytest.param("a.jsonl", lines(ROWS), sys.maxsize, id="small"),
        pytest.param("a.jsonl", lines(TWELVE_MIB), 10, id="large"),
        pytest.param("a.json", array(TWELVE_MIB), sys.maxsize, id="array"),
    ],
)
def test_datasets_types_the_rows_of_ten_megabytes_first(
    name: str, content: bytes, rows: int, write: Write
) -> None:
    assert reading.count_rows_typed_first(write(name, content)) == rows
