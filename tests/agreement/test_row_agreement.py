"""What launch says of rows against what TRL's trainers make of the same files.

The real trainer refuses the rows exactly where launch has an error; it trains on something else than what was
meant (the question is missing or stands twice, an answer is missing, both answers are equal) exactly where launch
warns.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES, PATIENCE_S, SUPPORT
from row_files import (
    BAD,
    GOOD,
    QUESTION,
    Row,
    array,
    arrow,
    assistant,
    chat,
    chats,
    lines,
    packed,
    pairs,
    parquet,
    rows_of,
    table,
    text_pairs,
    texts,
    user,
)

from launcher.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.training]

BOM = b"\xef\xbb\xbf"
# what is said of rows that train as they are meant
HARMLESS = frozenset({"repeated-rows", "no-chat-format", "unseen-data"})


@dataclass(frozen=True)
class Case:
    """A folder of files, and the stage that trains on it.

    `unlike` says why launch and the trainer may differ: `warns` where what happens depends on the template or the
    version of `datasets`, so that launch warns of what is refused, or of what happens to train well; `refused` where
    launch refuses rows that train on something else than what was meant.
    """

    name: str
    stage: str
    files: Mapping[str, bytes]
    args: Mapping[str, Any] = field(default_factory=dict)
    warns: bool = False
    refused: bool = False


def sft(name: str, rows: list[Any], file: str = "train.jsonl", **options: Any) -> Case:
    return Case(name, "sft", {file: lines(rows)}, **options)


def dpo(name: str, rows: list[Any], **options: Any) -> Case:
    return Case(name, "dpo", {"train.jsonl": lines(rows)}, **options)


def sft_files(name: str, files: Mapping[str, bytes], **options: Any) -> Case:
    return Case(name, "sft", files, **options)


def with_row(rows: list[Row], row: Any, at: int = -1) -> list[Any]:
    changed: list[Any] = list(rows)
    changed[at] = row
    return changed


def sharegpt(number: int, word: str = GOOD) -> list[Row]:
    return [
        {"from": "human", "value": f"{QUESTION} {number}?"},
        {"from": "gpt", "value": f"{word} {number}"},
    ]


def alpaca(number: int) -> Row:
    return {"instruction": f"{QUESTION} {number}?", "input": "", "output": f"{GOOD} {number}"}


def answers(number: int) -> Row:
    return {"chosen": [assistant(GOOD, number)], "rejected": [assistant(BAD, number)]}


def cells(number: int) -> Row:
    return {"prompt": f"{QUESTION} {number}?", "completion": f" {GOOD} {number}"}


def question_and_answer(number: int) -> Row:
    return {"question": f"{QUESTION} {number}", "answer": f"{GOOD} {number}"}


def filled(count: int) -> list[Row]:
    """Rows of a megabyte each: `datasets` types ten megabytes at once."""
    return [{"pad": "x" * 2**20, **row} for row in chats(count)]


MORE = {"role": "user", "content": "and then?"}
SYSTEM = {"role": "system", "content": "be brief"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
PART = [{"type": "text", "text": f"{QUESTION}"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
README = b"---\nconfigs:\n- config_name: default\n  data_files: good/*.jsonl\n---\n# data\n"
MIDDLE = lines(chats(4)) + b'{"messages": [{"role": \n' + lines(chats(4))

FORMATS = [
    sft("lines", chats()),
    sft_files("lines in .json", {"train.json": lines(chats())}),
    sft_files("array", {"train.json": array(chats())}),
    sft_files("array in .jsonl", {"train.jsonl": array(chats())}),
    sft_files("indented array", {"train.json": array(chats(), indent=2)}),
    sft_files("array of texts", {"train.json": array([f"{QUESTION} {GOOD} {n}" for n in range(8)])}),
    sft_files("array in an array", {"train.json": array([chats()])}),
    sft_files("array that ends", {"train.json": array(chats())[:-9]}),
    sft_files("array with a comma at its end", {"train.json": array(chats())[:-1] + b",]"}),
    sft_files("array without a comma", {"train.json": array(chats()).replace(b"}, {\"messages", b"} {\"messages", 1)}),
    sft_files("array and more", {"train.json": array(chats()) + b"x"}),
    sft_files("blanks before an array", {"train.json": b"\n " + array(chats())}),
    sft_files("empty array", {"train.json": b"[]"}),
    sft_files("one indented object", {"train.json": json.dumps(chats()[0], indent=2).encode()}),
    sft_files("rows below data", {"train.json": json.dumps({"data": chats()}).encode()}),
    sft_files("rows below data, indented", {"train.json": json.dumps({"data": chats()}, indent=1).encode()}),
    sft_files("byte order mark", {"train.jsonl": BOM + lines(chats())}),
    sft_files("byte order mark before an array", {"train.json": BOM + array(chats())}),
    sft_files("CRLF", {"train.jsonl": lines(chats(), "\r\n")}),
    sft_files("CR", {"train.jsonl": lines(chats(), "\r")}),
    sft_files("blank lines", {"train.jsonl": lines(chats(), "\n\n") + b"\n \n"}),
    sft_files("broken line in the middle", {"train.jsonl": MIDDLE}),
    sft_files("no newline at the end", {"train.jsonl": lines(chats()).rstrip()}),
    sft_files("two objects in a line", {"train.jsonl": lines(chats(), " ")}),
    sft_files("UTF-16", {"train.jsonl": lines(chats()).decode().encode("utf-16")}),
    sft_files("latin-1", {"train.jsonl": lines(chats()).replace(b"zebra", b"zebra \xe9")}),
    sft_files("NaN", {"train.jsonl": lines([{"text": QUESTION + GOOD, "score": float("nan")}] * 4)}),
    sft_files("a comment line", {"train.jsonl": b"# rows\n" + lines(chats())}),
    sft_files("empty file", {"train.jsonl": b""}),
    sft_files("empty file beside rows", {"train-1.jsonl": b"", "train-2.jsonl": lines(chats())}),
    sft_files("gzip", {"train.jsonl.gz": packed(lines(chats()))}),
    sft_files("gzip of an array", {"train.json.gz": packed(array(chats()))}),
    sft_files("cut gzip", {"train.jsonl.gz": packed(lines(chats(400)))[:-40]}),
    sft_files("gzip that is none", {"train.jsonl.gz": lines(chats())}),
    sft_files("csv", {"train.csv": table(rows_of(cells))}),
    sft_files("csv with quotes and newlines", {"train.csv": table([
        {"text": f'{QUESTION} "{number}",\n{GOOD}'} for number in range(8)])}),
    sft_files("csv with an empty cell", {
        "train.csv": table(with_row(rows_of(cells), {**cells(7), "completion": ""}))}),
    sft_files("csv with NA", {"train.csv": table(with_row(rows_of(cells), {**cells(7), "completion": "NA"}))}),
    sft_files("csv with None", {"train.csv": table(with_row(rows_of(cells), {**cells(7), "completion": "None"}))}),
    sft_files("csv with numbers", {"train.csv": table([{"prompt": QUESTION, "completion": n} for n in range(8)])}),
    sft_files("csv with one number", {"train.csv": table(with_row(
        rows_of(cells), {**cells(7), "completion": f"{GOOD}"}, 0)).replace(b" walrus 7", b"7 walrus")}),
    sft_files("csv of questions and answers", {"train.csv": table(rows_of(question_and_answer))}),
    sft_files("csv with a cell too many", {"train.csv": table(rows_of(cells)) + b"a,b,c\n"}),
    sft_files("csv with a cell too few", {"train.csv": table(rows_of(cells)) + b"zebra walrus\n"}),
    sft_files("csv with an open quote", {"train.csv": table(rows_of(cells)) + b'zebra,"walrus\n'}),
    sft_files("csv in latin-1", {"train.csv": table(rows_of(cells)).replace(b"zebra", b"zebra \xe9")}),
    sft_files("csv with a byte order mark", {"train.csv": BOM + table(rows_of(cells))}),
    sft_files("csv with semicolons", {"train.csv": table(rows_of(cells), ";")}),
    sft_files("csv with quotes inside cells", {
        "train.csv": f'text\n"{QUESTION} "is" {GOOD}"\n{QUESTION} said "{GOOD}"\n'.encode()}),
    sft_files("csv with backslashes before quotes", {"train.csv": f'text\n"{QUESTION} \\"{GOOD}\\""\n'.encode()}),
    sft_files("csv with an index without a name", {
        "train.csv": b"prompt,completion\n" + b"".join(f"r{n},{QUESTION},{GOOD}\n".encode() for n in range(8))}),
    sft_files("csv with a comma at the ends of lines", {
        "train.csv": b"prompt,completion\n" + b"".join(f"{QUESTION},{GOOD} {n},\n".encode() for n in range(8))}),
    sft_files("a key that stands there twice", {"train.jsonl": b'{"text": "a", "text": "zebra walrus"}\n' * 8}),
    sft_files("a key of a message twice", {
        "train.jsonl": lines(chats()).replace(b'"role": "user"', b'"role": "x", "role": "user"')}),
    sft_files("backup beside the file", {"train.jsonl": lines(chats()), "train.jsonl.bak": b"x\n"}),
    sft_files("empty parquet beside rows", {"a.parquet": parquet(chats(0)), "b.parquet": parquet(chats())}),
    sft_files("csv with a header alone", {"train.csv": b"prompt,completion\n"}),
    sft_files("csv gzip", {"train.csv.gz": packed(table(rows_of(cells)))}),
    sft_files("tsv", {"train.tsv": table(rows_of(cells), "\t")}),
    sft_files("txt", {"train.txt": f"{QUESTION} {GOOD}\n".encode() * 8}),
    sft_files("txt with CRLF", {"train.txt": f"{QUESTION} {GOOD}\r\n".encode() * 8}),
    sft_files("txt in latin-1", {"train.txt": f"{QUESTION} {GOOD} ".encode() + b"\xe9\n"}),
    sft_files("parquet", {"train.parquet": parquet(chats())}),
    sft_files("parquet with a null", {"train.parquet": parquet(with_row(chats(), {"messages": None}))}),
    sft_files("broken parquet", {"train.parquet": b"PAR1" + bytes(100) + b"PAR1"}),
    sft_files("arrow stream", {"train.arrow": arrow(chats())}),
    sft_files("broken arrow", {"train.arrow": bytes(100)}),
]  # fmt: skip

COLUMNS = [
    sft("other order of columns", [{"a": 1, **chats()[0]}, {**chats()[1], "a": 2}] * 4),
    sft("column in row 71 alone", with_row(texts(100), {**texts()[0], "extra": "x"}, 70)),
    sft("column in row 150 alone", with_row(chats(200), {**chats()[0], "extra": [1]}, 149)),
    sft("text after row 150", with_row(chats(200), {"messages": "zebra"}, 160)),
    sft("number after row 150", with_row(texts(200), {"text": 5}, 160)),
    sft("number in the first row", with_row(texts(), {"text": 5}, 0)),
    sft("object in the last row", with_row(texts(), {"text": {"a": 1}})),
    sft("list in the last row", with_row(texts(), {"text": ["a"]})),
    sft("bool in the last row", with_row(texts(), {"text": True})),
    sft("system after row 150", with_row(chats(200), {"messages": [SYSTEM, *chat()]}, 160)),
    sft("unread column of two kinds", with_row(
        [{"id": 1, **row} for row in chats()], {"id": "x", **chats()[0]}), warns=True),
    sft("unread column of lists and texts", with_row(
        [{"id": [1], **row} for row in chats()], {"id": "x", **chats()[0]}), warns=True),
    sft("unread column of integers and fractions", with_row(
        [{"id": 1, **row} for row in chats()], {"id": 1.5, **chats()[0]})),
    sft("unread column of null", [{"id": None, **row} for row in chats()]),
    sft("no object", with_row(chats(), [1])),
    sft("text of a line", with_row(chats(), "zebra")),
    sft("null of a line", with_row(chats(), None)),
    sft_files("files with different columns", {
        "train-1.jsonl": lines(chats()), "train-2.jsonl": lines([{"extra": "x", **row} for row in chats()])},
        warns=True),
    sft_files("later file lacks a column", {
        "train-1.jsonl": lines([{"extra": "x", **row} for row in chats()]), "train-2.jsonl": lines(chats())}),
    sft_files("csv files with different columns", {
        "train-1.csv": table(rows_of(cells)), "train-2.csv": table([{"x": 1, **cells(0)}])}),
    sft_files("later file has another type", {
        "train-1.jsonl": lines(texts()), "train-2.jsonl": lines([{"text": 5}])}, refused=True),
    sft_files("later file fills a column of nulls", {
        "train-1.jsonl": lines([{"x": None, **row} for row in chats()]),
        "train-2.jsonl": lines([{"x": "a", **row} for row in chats()])}),
    sft("column after ten megabytes", [*filled(12), {"late": "x", **chats()[0]}]),
    sft("column of nulls for ten megabytes", [
        *({"late": None, **row} for row in filled(12)), {"late": "x", **chats()[0]}]),
    sft("same columns after ten megabytes", filled(13)),
    sft_files("later csv file lacks a column", {
        "train-1.csv": table([{"x": 1, **cells(0)}]), "train-2.csv": table(rows_of(cells))}),
    sft_files("parquet files with different columns", {
        "train-1.parquet": parquet(chats()), "train-2.parquet": parquet([{"x": 1, **chats()[0]}])}),
    sft_files("later parquet file lacks a column", {
        "train-1.parquet": parquet([{"x": 1, **chats()[0]}]), "train-2.parquet": parquet(chats())}),
    sft_files("test split lacks a column", {
        "train.jsonl": lines([{"x": 1, **row} for row in chats()]), "test.jsonl": lines(chats())}),
    sft_files("test split has a further column", {
        "train.jsonl": lines(chats()), "test.jsonl": lines([{"x": 1, **row} for row in chats()])}),
    sft_files("broken test split", {"train.jsonl": lines(chats()), "test.jsonl": b'{"messages": \n{}\n'}),
    sft_files("no split train", {"test.jsonl": lines(chats())}),
    sft_files("splits of two formats", {"train.csv": table(rows_of(cells)), "test.jsonl": lines(rows_of(cells))}),
    sft_files("gzip under another name", {"train.jsonl": packed(lines(chats()))}),
    sft_files("a name in capitals", {"rows.JSONL": lines(chats())}),
    sft_files("half of a surrogate pair", {"train.jsonl": lines(texts()) + b'{"text": "zebra walrus \\ud83d"}\n'}),
    sft_files("surrogate pair", {"train.jsonl": lines(texts()) + b'{"text": "zebra walrus \\ud83d\\ude00"}\n'}),
    sft_files("tab in a text", {"train.jsonl": lines(texts()) + b'{"text": "zebra\twalrus"}\n'}),
    sft_files("one line of Python", {"train.jsonl": lines(texts()) + b"{'text': 'zebra walrus'}\n"}),
    sft_files("commas at the ends of lines", {"train.jsonl": lines(texts(), ",\n")}),
    sft_files("csv with a word under numbers", {"train.csv": table(with_row(
        [{"x": n, **cells(n)} for n in range(8)], {"x": "a", **cells(7)}))}),
    sft_files("split by folders", {"train/a.jsonl": lines(chats()), "test/b.jsonl": lines([{"x": 1}])}, warns=True),
    sft_files("split by shards", {"data/train-00000-of-00001.jsonl": lines(chats()), "rows.jsonl": b"x"}),
    sft_files("configs in README", {"README.md": README, "good/a.jsonl": lines(chats()), "bad/a.jsonl": b"x\n"}),
    sft_files("save_to_disk", {"state.json": b"{}", "dataset_info.json": b"{}", "data-00000.arrow": arrow(chats())}),
    sft_files("saved splits", {
        "dataset_dict.json": b'{"splits": ["train"]}', "train/state.json": b"{}", "train/dataset_info.json": b"{}",
        "train/data-00000-of-00001.arrow": arrow(chats())}),
    sft_files("most common format", {"a.jsonl": lines(chats()), "b.jsonl": lines(chats()), "c.csv": b"x\n1\n"}),
]  # fmt: skip

ANSWERS = [
    sft("messages beside a prompt", [{"prompt": QUESTION, **row} for row in chats()]),
    sft("question and answer", rows_of(question_and_answer)),
    sft("alpaca", rows_of(alpaca)),
    sft("prompt and completion", rows_of(cells)),
    sft("conversational prompt and completion", [
        {"prompt": [user(n)], "completion": [assistant(GOOD, n)]} for n in range(8)]),
    sft("text prompt and completion list", [{"prompt": QUESTION, "completion": [assistant()]}] * 8),
    sft("prompt repeated in the completion", [
        {"prompt": f"{QUESTION} is one?", "completion": f"{QUESTION} is one? {GOOD}"}] * 8),
    sft("prompt repeated in the completion list", [{"prompt": [user(n)], "completion": chat(n)} for n in range(8)]),
    sft("sharegpt", [{"conversations": sharegpt(n)} for n in range(8)]),
    sft("messages with from and value", [{"messages": sharegpt(n)} for n in range(8)]),
    sft("conversations with role and content", [{"conversations": chat(n)} for n in range(8)]),
    sft("messages as JSON text", [{"messages": json.dumps(chat(n))} for n in range(8)]),
    sft("messages as one object", [{"messages": chat(n)[0]} for n in range(8)]),
    sft("messages as texts", [{"messages": [QUESTION, GOOD]}] * 8),
    sft("nested messages", [{"messages": [chat(n)]} for n in range(8)]),
    sft("null text", with_row(texts(), {"text": None})),
    sft("null text first", with_row(texts(), {"text": None}, 0)),
    sft("null messages", with_row(chats(), {"messages": None})),
    sft("null content", with_row(chats(), {"messages": [user(), {"role": "assistant", "content": None}]}), warns=True),
    sft("number content", with_row(chats(), {"messages": [user(), {"role": "assistant", "content": 5}]}), warns=True),
    sft("missing content", with_row(chats(), {"messages": [user(), {"role": "assistant"}]}), warns=True),
    sft("missing role", with_row(chats(), {"messages": [user(), {"content": GOOD}]}), warns=True),
    sft("null message", with_row(chats(), {"messages": [user(), None]}), warns=True),
    sft("content of parts", [{"messages": [{"role": "user", "content": PART}, assistant()]}] * 8, warns=True),
    sft("empty messages", with_row(chats(), {"messages": []})),
    sft("empty messages first", with_row(chats(), {"messages": []}, 0)),
    sft("empty answer", with_row(chats(), {"messages": [user(), {"role": "assistant", "content": ""}]})),
    sft("question alone", with_row(chats(), {"messages": [user()]})),
    sft("empty text", with_row(texts(), {"text": ""})),
    sft("empty completion", with_row(rows_of(cells), {"prompt": QUESTION, "completion": ""})),
    sft("odd role", with_row(chats(), {"messages": [user(), {"role": "bot", "content": GOOD}]}), warns=True),
    sft("tools as JSON text", [{"tools": json.dumps([TOOL]), **row} for row in chats()], warns=True),
    sft("tools that are no JSON", with_row(
        [{"tools": json.dumps([TOOL]), **row} for row in chats()], {"tools": "none", **chats()[0]})),
    sft("tools as a list", [{"tools": [TOOL], **row} for row in chats()], warns=True),
    sft("tool calls", [{"messages": [
        user(), {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "1"},
        assistant()]}] * 8, warns=True),
    sft("template arguments", [{"chat_template_kwargs": {"a": True}, **row} for row in chats()]),
    sft("template arguments in one row", with_row(chats(), {"chat_template_kwargs": {"a": True}, **chats()[0]})),
    sft("another text column", [{"body": f"{QUESTION} {GOOD}"}] * 8, args={"dataset_text_field": "body"}),
    sft("text and messages", [{**chats()[0], **texts()[0]}] * 8),
    sft("prompt with null completion", with_row(rows_of(cells), {"prompt": QUESTION, "completion": None})),
    sft("pairs for sft", pairs()),
    sft("prompt alone", [{"prompt": QUESTION}] * 8),
    sft("prompt and text", [{"prompt": QUESTION, **row} for row in texts()]),
    sft("author instead of role", [{"messages": [
        {"author": "user", "content": QUESTION}, {"author": "assistant", "content": GOOD}]}] * 8),
    sft("text instead of content", [{"messages": [
        {"role": "user", "text": QUESTION}, {"role": "assistant", "text": GOOD}]}] * 8),
    sft("tools as an object", [{"tools": json.dumps({"name": "x"}), **row} for row in chats()]),
    sft("tools as null text", [{"tools": "null", **row} for row in chats()]),
    sft("no tools", [{"tools": [], **row} for row in chats()]),
    sft("empty pictures", [{"images": [], **row} for row in chats()]),
    sft("pictures of null", [{"image": None, **row} for row in chats()]),
    sft("tokens that all are masked", [{"input_ids": [5, 6], "labels": [-100, -100]}] * 8),
    sft("tokens as text", [{"input_ids": "5 6"}] * 8),
    sft("tokens of null", with_row([{"input_ids": [5, 6]}] * 8, {"input_ids": None})),
    sft("no tokens", [{"input_ids": []}] * 8),
    sft("labels of null beside chats", [{"labels": None, **row} for row in chats()]),
    sft("spaces around a column", [{" text": f"{QUESTION} {GOOD}"}] * 8),
    sft("object of columns", [{"text": {"0": QUESTION, "1": GOOD}}]),
    sft("text beside messages of null", [{"messages": None, **row} for row in texts()]),
    sft("half of messages weighed", [{"messages": [user(n), {"weight": 0, **assistant(GOOD, n)}]} for n in range(8)],
        warns=True),
    sft("kto", [{**cells(n), "label": n % 2 == 0} for n in range(8)], warns=True),
]  # fmt: skip

PAIRS = [
    dpo("conversations", pairs()),
    dpo("texts", text_pairs()),
    dpo("lists with a prompt", [{"prompt": [user(n)], **answers(n)} for n in range(8)]),
    dpo("alpaca pairs", [{"instruction": QUESTION, "input": "", "chosen": f"{GOOD}", "rejected": f"a {BAD}"}] * 8),
    dpo("ultrafeedback", [{"prompt": QUESTION, **row} for row in pairs()]),
    dpo("prompt twice", [{"prompt": [user(n)], **row} for n, row in enumerate(pairs())]),
    dpo("prompt twice in texts", [
        {"prompt": f"{QUESTION} is one?", "chosen": f"{QUESTION} is one? {GOOD}",
         "rejected": f"{QUESTION} is one? {BAD}"}] * 8),
    dpo("text prompt and lists", [{"prompt": QUESTION, **answers(n)} for n in range(8)]),
    dpo("list prompt and texts", [{"prompt": [user()], "chosen": GOOD, "rejected": BAD}] * 8),
    dpo("sharegpt pairs", [{"conversations": sharegpt(n)[:1], "chosen": sharegpt(n)[1],
                            "rejected": sharegpt(n, BAD)[1]} for n in range(8)]),
    dpo("from and value", [{"chosen": sharegpt(n), "rejected": sharegpt(n, BAD)} for n in range(8)]),
    dpo("answers alone", rows_of(answers)),
    dpo("messages as the prompt", [{"messages": [user(n)], **answers(n)} for n in range(8)]),
    dpo("nothing in common", [{"chosen": [user(1), assistant()], "rejected": [user(2), assistant(BAD)]}] * 8),
    dpo("unlike answers", [{"prompt": [user()], "chosen": [assistant()], "rejected": BAD}] * 8),
    dpo("null rejected", with_row(text_pairs(), {**text_pairs()[0], "rejected": None})),
    dpo("null prompt", with_row(text_pairs(), {**text_pairs()[0], "prompt": None})),
    dpo("missing rejected", with_row(text_pairs(), {"prompt": QUESTION, "chosen": GOOD})),
    dpo("missing prompt in one row", with_row(text_pairs(), {"chosen": GOOD, "rejected": BAD})),
    dpo("empty rejected", with_row(text_pairs(), {**text_pairs()[0], "rejected": ""})),
    dpo("equal texts", [{**row, "rejected": row["chosen"]} for row in text_pairs()]),
    dpo("equal conversations", [{**row, "rejected": row["chosen"]} for row in pairs()]),
    dpo("one equal pair", with_row(pairs(), {"chosen": chat(7), "rejected": chat(7)})),
    dpo("empty chosen list", with_row(pairs(), {"chosen": [], "rejected": chat()})),
    dpo("empty prompt", [{"prompt": "", "chosen": GOOD, "rejected": BAD}] * 8),
    dpo("empty prompt list", [{"prompt": [], **answers(n)} for n in range(8)]),
    dpo("pairs as JSON text", [{"chosen": json.dumps(chat(n)), "rejected": json.dumps(chat(n, BAD))}
                               for n in range(8)]),
    dpo("chats for dpo", chats()),
    dpo("text in a later row", with_row(pairs(200), {"chosen": "a", "rejected": "b"}, 160), refused=True),
    dpo("numbers", [{"prompt": QUESTION, "chosen": 1, "rejected": 2}] * 8),
    dpo("conversations of several turns", [
        {"chosen": [*chat(n), MORE, assistant(GOOD, n)], "rejected": [*chat(n), MORE, assistant(BAD, n)]}
        for n in range(8)]),
    dpo("texts with a common start", [
        {"chosen": f"Q: {QUESTION} {n}? A: {GOOD}", "rejected": f"Q: {QUESTION} {n}? A: {BAD}"} for n in range(8)]),
    dpo("one message that is the prompt", with_row(
        pairs(), {"chosen": [user()], "rejected": [user(), assistant(BAD)]})),
    dpo("equal but for an id", [{
        "chosen": [user(n), {"id": 1, **assistant()}], "rejected": [user(n), {"id": 2, **assistant()}]}
        for n in range(8)]),
    dpo("single messages", [{"prompt": [user(n)], "chosen": assistant(), "rejected": assistant(BAD)}
                            for n in range(8)]),
    dpo("a prompt of null", [{"prompt": None, **row} for row in pairs()]),
    dpo("empty pictures", [{"images": [], **row} for row in pairs()]),
    dpo("turns of the user at the end", [
        {"chosen": [*chat(n), MORE], "rejected": [*chat(n, BAD), MORE]} for n in range(8)], warns=True),
    dpo("preferences as OpenAI has them", [{
        "input": {"messages": [user(n)]}, "preferred_output": [assistant()], "non_preferred_output": [assistant(BAD)]}
        for n in range(8)]),
    Case("csv pairs", "dpo", {"train.csv": table(text_pairs())}),
    Case("parquet pairs", "dpo", {"train.parquet": parquet(pairs())}),
    Case("csv pairs with None", "dpo", {"train.csv": table(with_row(
        text_pairs(), {**text_pairs()[0], "rejected": "None"}))}),
]  # fmt: skip

CASES = FORMATS + COLUMNS + ANSWERS + PAIRS


def folder_of(case: Case) -> str:
    return f"data/{CASES.index(case)}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for case in CASES:
        for name, content in case.files.items():
            path = folder / folder_of(case) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def truth(place: Path, demo_assets: Path) -> dict[str, dict[str, Any]]:
    """What the real trainers make of each case, by its name."""
    requests = [
        json.dumps({"stage": case.stage, "data": folder_of(case), "args": case.args})
        for case in CASES
    ]
    words = [sys.executable, str(SUPPORT / "real_rows.py"), str(demo_assets / "model")]
    done = subprocess.run(
        words,
        cwd=place,
        input="\n".join(requests),
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
    )
    if done.returncode == 3:
        pytest.skip(f"{NO_PACKAGES}: {done.stderr}")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(CASES), done.stderr
    return dict(zip([case.name for case in CASES], answers, strict=True))


def unmeant(stage: str, row: list[str]) -> str | None:
    """What a row would train on that was not meant."""
    if "<|im_start|>human" in row[0]:
        return "roles that the template writes as they are"
    if stage == "dpo" and row[0].startswith('[{"'):
        return "messages as text"
    asked = row[0].count(QUESTION)
    if not asked:
        return "no question"
    if "".join(row[:2]).count(QUESTION) > 1:
        return "the question twice"
    if GOOD not in "".join(row[:2]):
        return "no answer"
    if stage == "dpo" and row[1] == row[2]:
        return "equal answers"
    if stage == "dpo" and BAD not in row[0] + row[2]:
        return "no rejected answer"
    return None


def findings_of(
    case: Case,
    place: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> list[dict[str, Any]]:
    monkeypatch.chdir(place)
    stage = {"stage": case.stage, "backend": "trl", "deepspeed": "none"}
    fixed = {
        "model_name_or_path": str(model), "dataset_name": folder_of(case), "output_dir": "output", "bf16": False,
        "report_to": "none", "save_strategy": "no",
    }  # fmt: skip
    Path("stage.yaml").write_text(json.dumps({**stage, "args": {**fixed, **case.args}}))
    main(["validate-config", "stage.yaml", "--format", "json"])
    told = json.loads(capsys.readouterr().out)
    findings: list[dict[str, Any]] = told["findings"]
    return [finding for finding in findings if finding["code"] not in HARMLESS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.stage}-{case.name}")
def test_rows_are_judged_as_the_trainer_takes_them(
    case: Case, place: Path, truth: Mapping[str, dict[str, Any]], demo_assets: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    answer = truth[case.name]
    findings = findings_of(case, place, demo_assets / "model", capsys, monkeypatch)
    severities = {finding["severity"] for finding in findings}
    # the trainer that has dropped every row ends at its first step
    if answer["error"] is not None or not answer["rows"]:
        right = {"error"} <= severities or (case.warns and {"warning"} <= severities)
        assert right, (answer["error"], findings)
        return
    wrongs = {unmeant(case.stage, row) for row in answer["rows"]} - {None}
    if wrongs and case.refused:
        assert "error" in severities, (wrongs, findings)
        return
    assert "error" not in severities, (answer["rows"][-1], findings)
    if wrongs:
        assert "warning" in severities, (wrongs, answer["rows"][-1], findings)
    elif not case.warns:
        assert "warning" not in severities, (answer["rows"][-1], findings)
