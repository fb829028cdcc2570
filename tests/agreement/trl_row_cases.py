"""Data sets, right and wrong ones, that launch and TRL's trainers judge.

Rows are about `zebra` (the question), `walrus` (the answer) and `weasel` (the worse answer).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Case:
    """A folder of files, and the stage that trains on it.

    `warns`: what happens depends on the template or on the version of `datasets`, so that launch
    warns of what is refused, or of what happens to train well. `refused`: launch refuses rows that
    train on something else than what was meant.
    """

    name: str
    stage: str
    files: Mapping[str, bytes]
    args: Row = field(default_factory=dict)
    warns: bool = False
    refused: bool = False


def sft_file(name: str, file: str, content: bytes, **options: Any) -> Case:
    return Case(name, "sft", {file: content}, **options)


def sft_files(name: str, files: Mapping[str, bytes], **options: Any) -> Case:
    return Case(name, "sft", files, **options)


def sft_rows(name: str, rows: list[Any], **options: Any) -> Case:
    return sft_file(name, "train.jsonl", lines(rows), **options)


def sft(name: str, row: Any, **options: Any) -> Case:
    """Eight rows like this one."""
    return sft_rows(name, [row] * 8, **options)


def messages(name: str, *conversation: Any, **options: Any) -> Case:
    return sft(name, {"messages": [*conversation]}, **options)


def beside_chats(name: str, column: str, value: Any, **options: Any) -> Case:
    """Conversations with a further column."""
    return sft_rows(name, [{column: value, **row} for row in chats()], **options)


def with_row(rows: list[Row], row: Any, at: int = -1) -> list[Any]:
    changed: list[Any] = list(rows)
    changed[at] = row
    return changed


def odd_chat(name: str, row: Any, at: int = -1, count: int = 8, **options: Any) -> Case:
    """Conversations, but for one row."""
    return sft_rows(name, with_row(chats(count), row, at), **options)


def odd_message(name: str, message: Any, **options: Any) -> Case:
    """Conversations, one of which has this answer."""
    return odd_chat(name, {"messages": [user(), message]}, **options)


def odd_text(name: str, value: Any, at: int = -1, count: int = 8) -> Case:
    """Texts, but for one row."""
    return sft_rows(name, with_row(texts(count), {"text": value}, at))


def answer(content: Any) -> Row:
    return {"role": "assistant", "content": content}


def sharegpt(word: str = GOOD) -> list[Row]:
    return [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": word}]


def cells(number: int) -> Row:
    return {"prompt": f"{QUESTION} {number}?", "completion": f" {GOOD} {number}"}


def odd_cell(name: str, completion: str) -> Case:
    """A CSV file, one cell of which is this one."""
    rows = with_row(rows_of(cells), {**cells(7), "completion": completion})
    return sft_file(name, "train.csv", table(rows))


def filled(count: int) -> list[Row]:
    """Rows of a megabyte each: `datasets` types ten megabytes at once."""
    return [{"pad": "x" * 2**20, **row} for row in chats(count)]


CHATS = lines(chats())
TEXTS = lines(texts())
CHATS_AND_X = lines([{"x": "a", **row} for row in chats()])
ARRAY = array(chats())
CELLS = table(rows_of(cells))
CELLS_AND_X = table([{"x": 1, **cells(0)}])
PARQUET_AND_X = parquet([{"x": 1, **chats()[0]}])
ASKED_AND_ANSWERED = f"{QUESTION} {GOOD}"
LINE = f"{ASKED_AND_ANSWERED}\n".encode()
MORE = {"role": "user", "content": "and then?"}
SYSTEM = {"role": "system", "content": "be brief"}
BROKEN_LINE = b'{"messages": [{"role": \n'
README = b"---\nconfigs:\n- config_name: default\n  data_files: good/*.jsonl\n---\n# data\n"
NOT_A_NUMBER = {"text": ASKED_AND_ANSWERED, "score": float("nan")}
QUESTION_AND_ANSWER = {"question": QUESTION, "answer": GOOD}
QUOTES = f'text\n"{QUESTION} "is" {GOOD}"\n{QUESTION} said "{GOOD}"\n'

JSON_FILES = [
    sft_rows("lines", chats()),
    sft_file("lines in .json", "train.json", CHATS),
    sft_file("array", "train.json", ARRAY),
    sft_file("array in .jsonl", "train.jsonl", ARRAY),
    sft_file("indented array", "train.json", array(chats(), indent=2)),
    sft_file("array of texts", "train.json", array([ASKED_AND_ANSWERED] * 8)),
    sft_file("array in an array", "train.json", array([chats()])),
    sft_file("array that ends", "train.json", ARRAY[:-9]),
    sft_file("array with a comma at its end", "train.json", ARRAY[:-1] + b",]"),
    sft_file("array without a comma", "train.json", ARRAY.replace(b'}, {"mes', b'} {"mes', 1)),
    sft_file("array and more", "train.json", ARRAY + b"x"),
    sft_file("blanks before an array", "train.json", b"\n " + ARRAY),
    sft_file("empty array", "train.json", b"[]"),
    sft_file("one indented object", "train.json", json.dumps(chats()[0], indent=2).encode()),
    sft_file("rows below data", "train.json", json.dumps({"data": chats()}).encode()),
    sft_file("indented rows", "train.json", json.dumps({"data": chats()}, indent=1).encode()),
    sft_file("byte order mark", "train.jsonl", BOM + CHATS),
    sft_file("byte order mark before an array", "train.json", BOM + ARRAY),
    sft_file("CRLF", "train.jsonl", lines(chats(), "\r\n")),
    sft_file("CR", "train.jsonl", lines(chats(), "\r")),
    sft_file("blank lines", "train.jsonl", lines(chats(), "\n\n") + b"\n \n"),
    sft_file("broken line in the middle", "train.jsonl", CHATS + BROKEN_LINE + CHATS),
    sft_file("no newline at the end", "train.jsonl", CHATS.rstrip()),
    sft_file("two objects in a line", "train.jsonl", lines(chats(), " ")),
    sft_file("UTF-16", "train.jsonl", CHATS.decode().encode("utf-16")),
    sft_file("latin-1", "train.jsonl", CHATS.replace(b"zebra", b"zebra \xe9")),
    sft("NaN", NOT_A_NUMBER),
    sft_file("a comment line", "train.jsonl", b"# rows\n" + CHATS),
    sft_file("empty file", "train.jsonl", b""),
    sft_files("empty file beside rows", {"train-1.jsonl": b"", "train-2.jsonl": CHATS}),
    sft_file("gzip", "train.jsonl.gz", packed(CHATS)),
    sft_file("gzip of an array", "train.json.gz", packed(ARRAY)),
    sft_file("cut gzip", "train.jsonl.gz", packed(lines(chats(400)))[:-40]),
    sft_file("gzip that is none", "train.jsonl.gz", CHATS),
    sft_file("gzip under another name", "train.jsonl", packed(CHATS)),
    sft_file("a key that stands there twice", "train.jsonl", b'{"text": "a", "text": "b"}\n' * 8),
    sft_file(
        "a key of a message twice",
        "train.jsonl",
        CHATS.replace(b'"role": "user"', b'"role": "x", "role": "user"'),
    ),
    sft_files("backup beside the file", {"train.jsonl": CHATS, "train.jsonl.bak": b"x\n"}),
    sft_file("half of a surrogate pair", "train.jsonl", TEXTS + b'{"text": "zebra \\ud83d"}\n'),
    sft_file("surrogate pair", "train.jsonl", TEXTS + b'{"text": "zebra walrus \\ud83d\\ude00"}\n'),
    sft_file("tab in a text", "train.jsonl", TEXTS + b'{"text": "zebra\twalrus"}\n'),
    sft_file("one line of Python", "train.jsonl", TEXTS + b"{'text': 'zebra walrus'}\n"),
    sft_file("commas at the ends of lines", "train.jsonl", lines(texts(), ",\n")),
    sft_file("a name in capitals", "rows.JSONL", CHATS),
]

OTHER_FILES = [
    sft_file("csv", "train.csv", CELLS),
    sft_file(
        "csv with quotes and newlines",
        "train.csv",
        table([{"text": f'{QUESTION} "0",\n{GOOD}'}] * 8),
    ),
    odd_cell("csv with an empty cell", ""),
    odd_cell("csv with NA", "NA"),
    odd_cell("csv with None", "None"),
    sft_file("csv with numbers", "train.csv", table([{"prompt": QUESTION, "completion": 5}] * 8)),
    odd_cell("csv with one number", f"7 {GOOD}"),
    sft_file("csv of questions and answers", "train.csv", table([QUESTION_AND_ANSWER] * 8)),
    sft_file("csv with a cell too many", "train.csv", CELLS + b"a,b,c\n"),
    sft_file("csv with a cell too few", "train.csv", CELLS + LINE),
    sft_file("csv with an open quote", "train.csv", CELLS + b'zebra,"walrus\n'),
    sft_file("csv in latin-1", "train.csv", CELLS.replace(b"zebra", b"zebra \xe9")),
    sft_file("csv with a byte order mark", "train.csv", BOM + CELLS),
    sft_file("csv with semicolons", "train.csv", table(rows_of(cells), ";")),
    sft_file("csv with quotes inside cells", "train.csv", QUOTES.encode()),
    sft_file("csv with backslashes before quotes", "train.csv", b'text\n"zebra \\"walrus\\""\n'),
    sft_file(
        "csv with an index without a name",
        "train.csv",
        b"prompt,completion\n" + b"r1,zebra,walrus\n" * 8,
    ),
    sft_file(
        "csv with a comma at the ends of lines",
        "train.csv",
        b"prompt,completion\n" + b"zebra,walrus,\n" * 8,
    ),
    sft_file("csv with a header alone", "train.csv", b"prompt,completion\n"),
    sft_file("csv gzip", "train.csv.gz", packed(CELLS)),
    sft_file(
        "csv with a word under numbers",
        "train.csv",
        CELLS_AND_X + b"2,zebra,walrus\n" * 6 + b"a,zebra,walrus\n",
    ),
    sft_file("tsv", "train.tsv", table(rows_of(cells), "\t")),
    sft_file("txt", "train.txt", LINE * 8),
    sft_file("txt with CRLF", "train.txt", LINE.replace(b"\n", b"\r\n") * 8),
    sft_file("txt in latin-1", "train.txt", LINE.rstrip() + b" \xe9\n"),
    sft_file("parquet", "train.parquet", parquet(chats())),
    sft_file(
        "parquet with a null", "train.parquet", parquet(with_row(chats(), {"messages": None}))
    ),
    sft_file("broken parquet", "train.parquet", b"PAR1" + bytes(100) + b"PAR1"),
    sft_files(
        "empty parquet beside rows", {"a.parquet": parquet([]), "b.parquet": parquet(chats())}
    ),
    sft_file("arrow stream", "train.arrow", arrow(chats())),
    sft_file("broken arrow", "train.arrow", bytes(100)),
]

NUMBERED = [{"id": 1, **row} for row in chats()]
LISTED = [{"id": [1], **row} for row in chats()]
FILLED_NULLS = [{"late": None, **row} for row in filled(12)]

COLUMNS = [
    sft_rows("other order of columns", [{"a": 1, **chats()[0]}, {**chats()[1], "a": 2}] * 4),
    sft_rows("column in row 71 alone", with_row(texts(100), {**texts()[0], "extra": "x"}, 70)),
    odd_chat("column in row 150 alone", {**chats()[0], "extra": [1]}, at=149, count=200),
    odd_chat("text after row 150", {"messages": "zebra"}, at=160, count=200),
    odd_chat("system after row 150", {"messages": [SYSTEM, *chat()]}, at=160, count=200),
    odd_text("number after row 150", 5, at=160, count=200),
    odd_text("number in the first row", 5, at=0),
    odd_text("object in the last row", {"a": 1}),
    odd_text("list in the last row", ["a"]),
    odd_text("bool in the last row", True),
    sft_rows(
        "unread column of two kinds", with_row(NUMBERED, {"id": "x", **chats()[0]}), warns=True
    ),
    sft_rows(
        "unread column of lists and texts", with_row(LISTED, {"id": "x", **chats()[0]}), warns=True
    ),
    sft_rows(
        "unread column of integers and fractions", with_row(NUMBERED, {"id": 1.5, **chats()[0]})
    ),
    beside_chats("unread column of null", "id", None),
    odd_chat("no object", [1]),
    odd_chat("text of a line", "zebra"),
    odd_chat("null of a line", None),
    sft_files(
        "files with different columns",
        {"train-1.jsonl": CHATS, "train-2.jsonl": CHATS_AND_X},
        warns=True,
    ),
    sft_files("later file lacks a column", {"train-1.jsonl": CHATS_AND_X, "train-2.jsonl": CHATS}),
    sft_files(
        "csv files with different columns", {"train-1.csv": CELLS, "train-2.csv": CELLS_AND_X}
    ),
    sft_files("later csv file lacks a column", {"train-1.csv": CELLS_AND_X, "train-2.csv": CELLS}),
    sft_files(
        "parquet files with different columns",
        {"train-1.parquet": parquet(chats()), "train-2.parquet": PARQUET_AND_X},
    ),
    sft_files(
        "later parquet file lacks a column",
        {"train-1.parquet": PARQUET_AND_X, "train-2.parquet": parquet(chats())},
    ),
    sft_files(
        "later file has another type",
        {"train-1.jsonl": TEXTS, "train-2.jsonl": lines([{"text": 5}])},
        refused=True,
    ),
    sft_files(
        "later file fills a column of nulls",
        {"train-1.jsonl": CHATS_AND_X.replace(b'"a"', b"null"), "train-2.jsonl": CHATS_AND_X},
    ),
    sft_rows("column after ten megabytes", [*filled(12), {"late": "x", **chats()[0]}]),
    sft_rows("column of nulls for ten megabytes", [*FILLED_NULLS, {"late": "x", **chats()[0]}]),
    sft_rows("same columns after ten megabytes", filled(13)),
]

SPLITS = [
    sft_files("test split lacks a column", {"train.jsonl": CHATS_AND_X, "test.jsonl": CHATS}),
    sft_files("test split has a further column", {"train.jsonl": CHATS, "test.jsonl": CHATS_AND_X}),
    sft_files("broken test split", {"train.jsonl": CHATS, "test.jsonl": b'{"messages": \n{}\n'}),
    sft_file("no split train", "test.jsonl", CHATS),
    sft_files("splits of two formats", {"train.csv": CELLS, "test.jsonl": lines(rows_of(cells))}),
    sft_files(
        "split by folders", {"train/a.jsonl": CHATS, "test/b.jsonl": b'{"x": 1}\n'}, warns=True
    ),
    sft_files("split by shards", {"data/train-00000-of-00001.jsonl": CHATS, "rows.jsonl": b"x"}),
    sft_files(
        "configs in README", {"README.md": README, "good/a.jsonl": CHATS, "bad/a.jsonl": b"x\n"}
    ),
    sft_files(
        "save_to_disk",
        {"state.json": b"{}", "dataset_info.json": b"{}", "data-00000.arrow": arrow(chats())},
    ),
    sft_files(
        "saved splits",
        {
            "dataset_dict.json": b'{"splits": ["train"]}',
            "train/state.json": b"{}",
            "train/dataset_info.json": b"{}",
            "train/data-00000-of-00001.arrow": arrow(chats()),
        },
    ),
    sft_files("most common format", {"a.jsonl": CHATS, "b.jsonl": CHATS, "c.csv": b"x\n1\n"}),
]

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
TOOLS = json.dumps([TOOL])
WITH_TOOLS = [{"tools": TOOLS, **row} for row in chats()]
PARTS = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
REPEATED = {"prompt": f"{QUESTION} is one?", "completion": f"{QUESTION} is one? {GOOD}"}
AUTHORS = [{"author": "user", "content": QUESTION}, {"author": "assistant", "content": GOOD}]
TEXT_KEYS = [{"role": "user", "text": QUESTION}, {"role": "assistant", "text": GOOD}]
TOKENS = [{"input_ids": [5, 6]}] * 8

ANSWERS = [
    beside_chats("messages beside a prompt", "prompt", QUESTION),
    sft("question and answer", QUESTION_AND_ANSWER),
    sft("alpaca", {"instruction": QUESTION, "input": "", "output": GOOD}),
    sft_rows("prompt and completion", rows_of(cells)),
    sft("conversational prompt", {"prompt": [user()], "completion": [assistant()]}),
    sft("text prompt and completion list", {"prompt": QUESTION, "completion": [assistant()]}),
    sft("prompt repeated in the completion", REPEATED),
    sft("prompt repeated in the completion list", {"prompt": [user()], "completion": chat()}),
    sft("sharegpt", {"conversations": sharegpt()}),
    messages("messages with from and value", *sharegpt()),
    sft("conversations with role and content", {"conversations": chat()}),
    sft("messages as JSON text", {"messages": json.dumps(chat())}),
    sft("messages as one object", {"messages": user()}),
    messages("messages as texts", QUESTION, GOOD),
    messages("nested messages", chat()),
    odd_text("null text", None),
    odd_text("null text first", None, at=0),
    odd_text("empty text", ""),
    odd_chat("null messages", {"messages": None}),
    odd_message("null content", answer(None), warns=True),
    odd_message("number content", answer(5), warns=True),
    odd_message("missing content", {"role": "assistant"}, warns=True),
    odd_message("missing role", {"content": GOOD}, warns=True),
    odd_message("null message", None, warns=True),
    odd_message("empty answer", answer("")),
    odd_message("odd role", {"role": "bot", "content": GOOD}, warns=True),
    messages("content of parts", PARTS, assistant(), warns=True),
    odd_chat("empty messages", {"messages": []}),
    odd_chat("empty messages first", {"messages": []}, at=0),
    odd_chat("question alone", {"messages": [user()]}),
    sft_rows("empty completion", with_row(rows_of(cells), {"prompt": QUESTION, "completion": ""})),
    sft_rows(
        "prompt with null completion",
        with_row(rows_of(cells), {"prompt": QUESTION, "completion": None}),
    ),
    beside_chats("tools as JSON text", "tools", TOOLS, warns=True),
    sft_rows("tools that are no JSON", with_row(WITH_TOOLS, {"tools": "none", **chats()[0]})),
    beside_chats("tools as a list", "tools", [TOOL], warns=True),
    beside_chats("tools as an object", "tools", '{"name": "x"}'),
    beside_chats("tools as null text", "tools", "null"),
    beside_chats("no tools", "tools", []),
    messages(
        "tool calls", user(), CALLING, {"role": "tool", "content": "1"}, assistant(), warns=True
    ),
    beside_chats("template arguments", "chat_template_kwargs", {"a": True}),
    odd_chat("template arguments in one row", {"chat_template_kwargs": {"a": True}, **chats()[0]}),
    sft("another text column", {"body": ASKED_AND_ANSWERED}, args={"dataset_text_field": "body"}),
    sft("text and messages", {**chats()[0], **texts()[0]}),
    sft_rows("pairs for sft", pairs()),
    sft("prompt alone", {"prompt": QUESTION}),
    sft("prompt and text", {"prompt": QUESTION, "text": ASKED_AND_ANSWERED}),
    messages("author instead of role", *AUTHORS),
    messages("text instead of content", *TEXT_KEYS),
    beside_chats("empty pictures", "images", []),
    beside_chats("pictures of null", "image", None),
    sft("tokens that all are masked", {"input_ids": [5, 6], "labels": [-100, -100]}),
    sft("tokens as text", {"input_ids": "5 6"}),
    sft_rows("tokens of null", with_row(TOKENS, {"input_ids": None})),
    sft("no tokens", {"input_ids": []}),
    beside_chats("labels of null beside chats", "labels", None),
    sft("spaces around a column", {" text": ASKED_AND_ANSWERED}),
    sft_rows("object of columns", [{"text": {"0": QUESTION, "1": GOOD}}]),
    sft("text beside messages of null", {"messages": None, "text": ASKED_AND_ANSWERED}),
    messages("half of messages weighed", user(), {"weight": 0, **assistant()}, warns=True),
    sft_rows("kto", [{**cells(n), "label": n % 2 == 0} for n in range(8)], warns=True),
]


def dpo_rows(name: str, rows: list[Any], **options: Any) -> Case:
    return Case(name, "dpo", {"train.jsonl": lines(rows)}, **options)


def dpo(name: str, chosen: Any, rejected: Any, **options: Any) -> Case:
    """Eight pairs like this one."""
    return dpo_rows(name, [{"chosen": chosen, "rejected": rejected}] * 8, **options)


def prompted(name: str, prompt: Any, chosen: Any, rejected: Any) -> Case:
    """Eight pairs like this one, with their prompt."""
    return dpo_rows(name, [{"prompt": prompt, "chosen": chosen, "rejected": rejected}] * 8)


def beside_pairs(name: str, column: str, value: Any) -> Case:
    return dpo_rows(name, [{column: value, **row} for row in pairs()])


def odd_pair(name: str, chosen: Any, rejected: Any) -> Case:
    """Conversations, but for one pair."""
    return dpo_rows(name, with_row(pairs(), {"chosen": chosen, "rejected": rejected}))


def odd_text_pair(name: str, row: Row) -> Case:
    """Texts, but for one row."""
    return dpo_rows(name, with_row(text_pairs(), row))


TEXT_PAIR = text_pairs()[0]
ANSWER = [assistant()]
WORSE = [assistant(BAD)]
BETTER = {"chosen": ANSWER, "rejected": WORSE}
NONE_CELL = with_row(text_pairs(), {**TEXT_PAIR, "rejected": "None"})
SHAREGPT_PAIR = {
    "conversations": sharegpt()[:1],
    "chosen": sharegpt()[1],
    "rejected": sharegpt(BAD)[1],
}
OPENAI_PAIR = {
    "input": {"messages": [user()]},
    "preferred_output": ANSWER,
    "non_preferred_output": WORSE,
}

PAIRS = [
    dpo_rows("conversations", pairs()),
    dpo_rows("texts", text_pairs()),
    prompted("lists with a prompt", [user()], ANSWER, WORSE),
    dpo_rows(
        "alpaca pairs",
        [{"instruction": QUESTION, "input": "", "chosen": GOOD, "rejected": BAD}] * 8,
    ),
    beside_pairs("ultrafeedback", "prompt", QUESTION),
    dpo_rows("prompt twice", [{"prompt": row["chosen"][:1], **row} for row in pairs()]),
    prompted(
        "prompt twice in texts",
        f"{QUESTION} is one?",
        f"{QUESTION} is one? {GOOD}",
        f"{QUESTION} is one? {BAD}",
    ),
    prompted("text prompt and lists", QUESTION, ANSWER, WORSE),
    prompted("list prompt and texts", [user()], GOOD, BAD),
    dpo_rows("sharegpt pairs", [SHAREGPT_PAIR] * 8),
    dpo("from and value", sharegpt(), sharegpt(BAD)),
    dpo("answers alone", ANSWER, WORSE),
    dpo_rows("messages as the prompt", [{"messages": [user()], **BETTER}] * 8),
    dpo("nothing in common", [user(1), *ANSWER], [user(2), *WORSE]),
    prompted("unlike answers", [user()], ANSWER, BAD),
    odd_text_pair("null rejected", {**TEXT_PAIR, "rejected": None}),
    odd_text_pair("null prompt", {**TEXT_PAIR, "prompt": None}),
    odd_text_pair("missing rejected", {"prompt": QUESTION, "chosen": GOOD}),
    odd_text_pair("missing prompt in one row", {"chosen": GOOD, "rejected": BAD}),
    odd_text_pair("empty rejected", {**TEXT_PAIR, "rejected": ""}),
    prompted("equal texts", QUESTION, GOOD, GOOD),
    dpo("equal conversations", chat(), chat()),
    odd_pair("one equal pair", chat(7), chat(7)),
    odd_pair("empty chosen list", [], chat()),
    odd_pair("one message that is the prompt", [user()], [user(), *WORSE]),
    prompted("empty prompt", "", GOOD, BAD),
    prompted("empty prompt list", [], ANSWER, WORSE),
    dpo("pairs as JSON text", json.dumps(chat()), json.dumps(chat(0, BAD))),
    dpo_rows("chats for dpo", chats()),
    dpo_rows(
        "text in a later row",
        with_row(pairs(200), {"chosen": "a", "rejected": "b"}, 160),
        refused=True,
    ),
    prompted("numbers", QUESTION, 1, 2),
    dpo("conversations of several turns", [*chat(), MORE, *ANSWER], [*chat(), MORE, *WORSE]),
    dpo("texts with a common start", f"Q: {QUESTION} 0? A: {GOOD}", f"Q: {QUESTION} 0? A: {BAD}"),
    dpo(
        "equal but for an id",
        [user(), {"id": 1, **assistant()}],
        [user(), {"id": 2, **assistant()}],
    ),
    prompted("single messages", [user()], assistant(), assistant(BAD)),
    beside_pairs("a prompt of null", "prompt", None),
    beside_pairs("empty pictures", "images", []),
    dpo("turns of the user at the end", [*chat(), MORE], [*chat(0, BAD), MORE], warns=True),
    dpo_rows("preferences as OpenAI has them", [OPENAI_PAIR] * 8),
    Case("csv pairs", "dpo", {"train.csv": table(text_pairs())}),
    Case("parquet pairs", "dpo", {"train.parquet": parquet(pairs())}),
    Case("csv pairs with None", "dpo", {"train.csv": table(NONE_CELL)}),
]

CASES = [*JSON_FILES, *OTHER_FILES, *COLUMNS, *SPLITS, *ANSWERS, *PAIRS]
