"""Rows and data files for tests: questions hold `zebra`, good answers `walrus`, bad answers
`weasel`.
"""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]
QUESTION = "zebra"
GOOD = "walrus"
BAD = "weasel"


def user(number: int = 0) -> Row:
    return {"role": "user", "content": f"{QUESTION} {number}?"}


def assistant(word: str = GOOD, number: int = 0) -> Row:
    return {"role": "assistant", "content": f"{word} {number}"}


def chat(number: int = 0, word: str = GOOD) -> list[Row]:
    return [user(number), assistant(word, number)]


def chats(count: int = 8) -> list[Row]:
    return [{"messages": chat(number)} for number in range(count)]


def pairs(count: int = 8) -> list[Row]:
    return [{"chosen": chat(number), "rejected": chat(number, BAD)} for number in range(count)]


def texts(count: int = 8) -> list[Row]:
    return [{"text": f"{QUESTION} {number}? {GOOD}"} for number in range(count)]


def text_pairs(count: int = 8) -> list[Row]:
    return [
        {
            "prompt": f"{QUESTION} {number}?",
            "chosen": f" {GOOD} {number}",
            "rejected": f" {BAD} {number}",
        }
        for number in range(count)
    ]


def rows_of(make: Callable[[int], Row], count: int = 8) -> list[Row]:
    return [make(number) for number in range(count)]


def lines(rows: Iterable[Any], end: str = "\n") -> bytes:
    return "".join(json.dumps(row) + end for row in rows).encode()


def array(rows: Iterable[Any], indent: int | None = None) -> bytes:
    return json.dumps(list(rows), indent=indent).encode()


def table(rows: list[Row], delimiter: str = ",") -> bytes:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def parquet(rows: list[Row]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue()


def arrow(rows: list[Row]) -> bytes:
    import pyarrow

    stream = io.BytesIO()
    content = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(stream, content.schema) as writer:
        writer.write_table(content)
    return stream.getvalue()


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)
