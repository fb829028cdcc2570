"""Which rows show what the first rows of a data set do not."""

import json
from pathlib import Path

import pytest
from conftest import Write
from row_files import Row, lines, parquet

from launcher.dataset import exemplars, survey

SEEN_FIRST = 4


def chat(*roles: str) -> Row:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


PLAIN = chat("user", "assistant")
SYSTEM = chat("system", "user", "assistant")
EMPTY: Row = {"messages": []}
ROWS = [PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, SYSTEM, SYSTEM, EMPTY, PLAIN, EMPTY]


def rows_beyond(*paths: Path) -> list[Row]:
    """The rows of new kinds that stand behind the first four."""
    return [
        exemplar.row for exemplar in exemplars.list_further_rows(survey.look(paths), SEEN_FIRST)
    ]


def test_the_first_row_of_each_kind_is_shown_with_its_line(write: Write) -> None:
    path = write("a.jsonl", lines(ROWS))
    first, second = exemplars.list_further_rows(survey.look([path]), SEEN_FIRST)
    assert (first.place.number, first.row) == (6, SYSTEM)
    assert (second.place.number, second.row) == (8, EMPTY)


@pytest.mark.parametrize("indent", [None, 1], ids=["one line", "several lines a row"])
def test_rows_are_counted_whatever_their_lines(indent: int | None, write: Write) -> None:
    path = write("a.json", json.dumps(ROWS, indent=indent))
    assert rows_beyond(path) == [SYSTEM, EMPTY]


def test_rows_of_parquet_are_shown(write: Write) -> None:
    pytest.importorskip("pyarrow")
    assert rows_beyond(write("a.parquet", parquet(ROWS))) == [SYSTEM, EMPTY]


def test_rows_of_a_second_file_are_shown_from_its_first_one_on(write: Write) -> None:
    first = write("a.jsonl", lines([PLAIN] * 3))
    second = write("b.jsonl", lines([PLAIN, SYSTEM]))
    assert rows_beyond(first, second) == [SYSTEM]


def test_kinds_that_the_first_rows_show_are_left_out(write: Write) -> None:
    assert rows_beyond(write("a.jsonl", lines([SYSTEM, EMPTY, *ROWS]))) == []


def test_rows_of_csv_are_left_out(write: Write) -> None:
    assert rows_beyond(write("a.csv", "text\n" + "a\n" * 5 + "1\n")) == []


def test_a_file_that_has_gone_shows_no_rows(write: Write) -> None:
    path = write("a.jsonl", lines(ROWS))
    surveyed = survey.look([path])
    path.unlink()
    assert exemplars.list_further_rows(surveyed, SEEN_FIRST) == []
