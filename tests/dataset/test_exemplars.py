"""Which rows show what the first rows of a data set do not."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from row_files import lines

from launcher.dataset import exemplars, survey


def chat(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


PLAIN = chat("user", "assistant")
SYSTEM = chat("system", "user", "assistant")
EMPTY: dict[str, Any] = {"messages": []}
# the system role comes in row 6, and again; an empty list in row 8
ROWS = [*[PLAIN] * 5, SYSTEM, SYSTEM, EMPTY, *[PLAIN] * 5, EMPTY]


def beyond(*paths: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(entry.place.number, entry.row) for entry in exemplars.beyond(survey.look(paths), 4)]


@pytest.mark.parametrize(
    ("name", "text", "numbers"),
    [
        ("lines.jsonl", lines(ROWS), [6, 8]),
        # many rows a line, or many lines a row: rows are counted all the same
        ("array.json", json.dumps(ROWS), [1, 1]),
        ("indented.json", json.dumps(ROWS, indent=1), None),
    ],
)
def test_the_first_row_of_each_kind_is_found(
    write: Write, name: str, text: str, numbers: list[int] | None
) -> None:
    found = beyond(write(name, text))
    assert [row for _, row in found] == [SYSTEM, EMPTY]
    assert numbers is None or [number for number, _ in found] == numbers


def test_a_parquet_file_and_a_second_file_count_too(tmp_path: Path, write: Write) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    assert [row for _, row in beyond(path)] == [SYSTEM, EMPTY]
    first = write("a.jsonl", lines([PLAIN] * 3))
    assert [row for _, row in beyond(first, write("b.jsonl", lines([PLAIN, SYSTEM])))] == [SYSTEM]


def test_what_the_first_rows_show_and_cells_of_csv_are_left_out(write: Write) -> None:
    assert beyond(write("a.jsonl", lines([SYSTEM, EMPTY, *ROWS]))) == []
    assert beyond(write("a.csv", "text\n" + "a\n" * 5 + "1\n")) == []


def test_a_file_that_has_changed_gives_no_rows(write: Write) -> None:
    path = write("a.jsonl", lines(ROWS))
    surveyed = survey.look([path])
    path.unlink()
    assert exemplars.beyond(surveyed, 4) == []
