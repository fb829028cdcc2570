"""Every row of a data set -> `Survey`: columns, types, roles, and rows that cannot train what was
meant.

One pass in bounded memory. A survey is remembered by the state of its files, so that a second look
at the same rows costs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.artifacts.fingerprint import cache_home
from launcher.dataset import reading
from launcher.dataset.reading import BadRow, CannotRead, NeedsPyarrow, UnsupportedFile
from launcher.lazy_dataclass import dataclass

_VERSION = 4  # of what a survey holds: another one reads no older survey from the cache
_SETTLED_S = 2.0  # a file that was written to just now may be written to again without another time
_MOST_HASHES = 1_000_000  # rows that are compared with all earlier ones
_MOST_FAULTS = 20  # rows that cannot be read, told one by one
_MOST_FACTS = 400  # different facts: names of columns and roles are the data's own
_MOST_DIALOGUES = 4096  # different sequences of roles
_TRAINED = frozenset("text prompt completion chosen rejected messages conversations".split())
# what templates write of a message; ids and scores beside it are not among them
_WRITTEN = tuple(
    "role content from value text tool_calls function_call name reasoning_content thinking".split()
)
_KINDS: Mapping[type, str] = {
    type(None): "null",
    str: "text",
    int: "number",
    float: "number",
    bool: "bool",
    list: "list",
    dict: "object",
}
ASSISTANTS = (
    "assistant",
    "gpt",
    "model",
    "bot",
)  # roles of answers, in templates and in ShareGPT's rows


@dataclass(frozen=True, slots=True)
class RowPlace:
    """One row: its file and its number there, a line where the file has lines; `index` counts the
    rows before it.
    """

    file: str
    number: int
    index: int = -1

    def __str__(self) -> str:
        if reading.has_lines(Path(self.file)):
            return f"{self.file}:{self.number}"
        return f"row {self.number} of {self.file}"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """In how many rows something is so, and the first of them."""

    count: int
    first: RowPlace


@dataclass(frozen=True, slots=True)
class Fault:
    """A row, or a whole file, that cannot be read."""

    file: str
    reason: str
    number: int | None = None

    def __str__(self) -> str:
        if self.number is None:
            return f"{self.file} {self.reason}"
        return f"{RowPlace(self.file, self.number)} {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What all rows of a data set are like.

    `kinds` has a tally for each column and kind of value (text, number, bool, list, object, null,
    and absent: rows without the column). `facts` has one for each column and fact; the facts of
    whole rows are under the column "". `unread` says what was not looked at, `pyarrow` is whether
    that was for want of it.
    """

    rows: int = 0
    kinds: Mapping[tuple[str, str], Occurrence] = field(default_factory=dict)
    facts: Mapping[tuple[str, str], Occurrence] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    fault_count: int = 0
    unread: tuple[str, ...] = ()
    lacks_pyarrow: bool = False

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.kinds)

    def kinds_of(self, column: str) -> dict[str, Occurrence]:
        return {kind: tally for (name, kind), tally in self.kinds.items() if name == column}

    def kind(self, column: str) -> str | None:
        """The kind that most values of a column have, nulls left out; None where it has none."""
        counts: dict[str, int] = {}
        for kind, tally in self.kinds_of(column).items():
            if kind not in ("null", "absent"):
                counts[kind] = tally.count
        return max(counts, key=counts.__getitem__, default=None)

    def of_columns(self, names: Sequence[str]) -> Survey:
        """The same rows with these columns alone.

        Facts of whole rows stay where every column that is trained on does.
        """
        kept = set(names)
        if (self.columns & _TRAINED) <= kept:
            kept.add("")
        kinds = {key: tally for key, tally in self.kinds.items() if key[0] in kept}
        facts = {key: tally for key, tally in self.facts.items() if key[0] in kept}
        return replace(self, kinds=kinds, facts=facts)

    def fact(self, column: str, name: str) -> Occurrence | None:
        return self.facts.get((column, name))

    def count(self, column: str, name: str) -> int:
        """In how many rows a column has a fact."""
        tally = self.facts.get((column, name))
        return 0 if tally is None else tally.count

    def count_kind(self, column: str, kind: str) -> int:
        tally = self.kinds.get((column, kind))
        return 0 if tally is None else tally.count

    def named(self, column: str, prefix: str) -> dict[str, Occurrence]:
        """The facts of a column that begin with `prefix`, such as `role:`, without it."""
        named: dict[str, Occurrence] = {}
        for (owner, name), tally in self.facts.items():
            if owner == column and name.startswith(prefix):
                named[name.removeprefix(prefix)] = tally
        return named


def look(paths: Sequence[Path], rows: range | None = None) -> Survey:
    """Look at every row of these files, or remember what was seen of them. Never raises for what
    they hold.

    With `rows` only at these, counted over all files; rows that cannot be read are found in front
    of their end.
    """
    bounds = None if rows is None else (rows.start, rows.stop)
    return _look(tuple(_read_state(path) for path in paths), bounds)


State = tuple[str, int, int, int, int]


def _read_state(path: Path) -> State:
    """The path, inode, size and times of a file; zeros for one that is not there."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return str(path), 0, 0, 0, 0
    return str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@functools.lru_cache(maxsize=256)
def _look(states: tuple[State, ...], bounds: tuple[int, int] | None) -> Survey:
    names = [state[0] for state in states]
    absolute = [
        (os.path.abspath(name), *state[1:]) for name, state in zip(names, states, strict=True)
    ]
    content = json.dumps([_VERSION, absolute, *(bounds or ())])
    digest = hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()
    memory = cache_home() / "surveys" / f"{digest}.json"
    remembered = _from_json(files.read_json(memory), names)
    if remembered is not None:
        return remembered
    surveyor = _Surveyor(bounds)
    for name in names:
        surveyor.read(Path(name))
    survey = surveyor.survey()
    newest = max((max(state[3:]) for state in states), default=0)
    if time.time() - newest / 1e9 > _SETTLED_S and not survey.lacks_pyarrow:
        with contextlib.suppress(OSError, ValueError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(memory, _as_json(survey, names))
    return survey


class _Surveyor:
    """Counts what rows are like. Everything here runs once a row, or once a message."""

    def __init__(self, bounds: tuple[int, int] | None = None) -> None:
        self._bounds = bounds
        self._before = 0
        self._rows = 0
        self._counts: dict[tuple[str, Any], list[Any]] = {}
        self._facts: dict[tuple[str, str], list[Any]] = {}
        self._faults: list[Fault] = []
        self._fault_count = 0
        self._unread: list[str] = []
        self._lacks_pyarrow = False
        self._dialogues: dict[tuple[str, tuple[str, ...]], list[Any]] = {}
        self._marked: dict[tuple[str, str], int] = {}
        self._hashes: set[int] = set()
        self._digest = 0
        self._file = ""
        self._number = 0
        self._index = 0

    def read(self, path: Path) -> None:
        self._file = str(path)
        try:
            for index, (number, row) in enumerate(reading.read_rows(path)):
                self._number = number
                self._index = index
                if self._bounds is not None:
                    self._before += 1
                    if self._before > self._bounds[1]:
                        return
                    if self._before <= self._bounds[0]:
                        continue
                if type(row) is dict:
                    self._see_row(row)
                elif isinstance(row, BadRow):
                    self._add_fault(row.reason, number)
                else:
                    self._add_fault("is not a JSON object", number)
        except NeedsPyarrow:
            self._lacks_pyarrow = True
            self._unread.append(f"{path} needs pyarrow")
        except UnsupportedFile as error:
            self._unread.append(f"{path} {error}")
        except CannotRead as error:
            self._add_fault(str(error), None)
        except OSError as error:
            self._add_fault(f"cannot be read: {error.strerror or error}", None)

    def _add_fault(self, reason: str, number: int | None) -> None:
        self._fault_count += 1
        if len(self._faults) < _MOST_FAULTS:
            self._faults.append(Fault(self._file, reason, number))

    def _see_row(self, row: dict[str, Any]) -> None:
        self._rows += 1
        self._digest = 0
        counts = self._counts
        for name, value in row.items():
            kind = type(value)
            seen = counts.get((name, kind))
            if seen is None:
                self._count(counts, (name, kind), _MOST_FACTS)
            else:
                seen[0] += 1
            if kind is str:
                if name in _TRAINED:
                    self._digest = hash((self._digest, value))
                elif name == "tools":
                    self._see_tools(value)
                if not value or value.isspace():
                    self._mark(name, "empty")
                elif value[0] in "[{<\n":
                    self._see_marked_text(name, value)
            elif kind is list:
                self._see_list(name, value)
            elif kind is bool and not value and name == "label":
                self._mark(name, "false")
        if "chosen" in row and "rejected" in row:
            self._see_pair(row)
        elif "prompt" in row and _begins_with(row.get("completion"), row["prompt"]):
            self._mark("", "prompt-twice")
        if "input_ids" in row:
            self._see_tokens(row)
        self._compare_with_earlier()

    def _count(self, table: dict[Any, list[Any]], key: object, most: int, count: int = 1) -> bool:
        """Count a key, and remember the row where it is new; False if the table has too many."""
        seen = table.get(key)
        if seen is not None:
            seen[0] += count
        elif len(table) < most:
            table[key] = [count, self._file, self._number, self._index]
        else:
            return False
        return True

    def _mark(self, column: str, fact: str, count: int = 1) -> None:
        self._count(self._facts, (column, fact), _MOST_FACTS, count)

    def _see_marked_text(self, name: str, value: str) -> None:
        """Text that may be something else: messages as JSON, or a special token in front."""
        if value.startswith("\n\nHuman:"):
            self._mark(name, "human-assistant")
        elif value[0] == "<":
            end = value.find(">", 1, 32)
            if end > 0:
                self._mark(name, f"starts:{value[: end + 1]}")
            return
        key = value[:40].lstrip("[{ \n")
        if key.startswith(('"role"', '"content"', '"from"', '"value"')):
            self._mark(name, "json-messages")
        elif key.startswith(("'role'", "'content'", "'from'", "'value'")):
            self._mark(name, "python-messages")

    def _see_tools(self, text: str) -> None:
        """Tools as text are JSON, a list of objects or nothing
        (trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset.tokenize_fn[tools = json.loads]).

        What is not JSON because there is no text is `empty`, as in any column.
        """
        if not text:
            return
        try:
            tools = json.loads(text)
        except (ValueError, RecursionError):
            self._mark("tools", "not-json")
            return
        if not tools:
            self._mark("tools", "none")
        elif type(tools) is not list or type(tools[0]) is not dict:
            self._mark("tools", "no-list")
        schemas = tools if type(tools) is list else [tools]
        if not all(type(schema) is dict for schema in schemas) and tools not in (None, ""):
            self._mark("tools", "no-schemas")

    def _see_tokens(self, row: dict[str, Any]) -> None:
        """Rows that are tokenised: which of the tokens count
        (trl/trainer/sft_trainer.py::SFTTrainer._prepare_dataset[Build a]).
        """
        tokens = row["input_ids"]
        if type(tokens) is not list:
            return
        for name in ("labels", "completion_mask", "assistant_masks"):
            beside = row.get(name)
            if type(beside) is list and len(beside) != len(tokens):
                self._mark(name, "other-length")
        labels = row.get("labels")
        if type(labels) is list and labels and all(label == -100 for label in labels):
            self._mark("labels", "masked")

    def _see_list(self, name: str, messages: list[Any]) -> None:
        if not messages:
            self._mark(name, "empty-list")
            return
        if type(messages[0]) is not dict:
            self._mark(name, f"items:{_KINDS.get(type(messages[0]), 'value')}")
            return
        dialogue = (name, tuple([self._see_message(name, message) for message in messages]))
        if self._marked.get((name, "null-content")) == self._rows and _lack_content(messages):
            self._mark(name, "no-content")
        if not self._count(self._dialogues, dialogue, _MOST_DIALOGUES):
            self._mark_dialogue(dialogue, 1)

    def _mark_dialogue(self, dialogue: tuple[str, tuple[str, ...]], count: int) -> None:
        """The facts that a sequence of roles shows, for `count` rows that have it."""
        name, roles = dialogue
        for role in set(roles):
            self._mark(name, f"role:{role}", count)
        self._mark(name, f"starts-with:{roles[0]}", count)
        self._mark(name, f"ends-with:{roles[-1]}", count)
        if set(roles).isdisjoint(ASSISTANTS):
            self._mark(name, "no-answer", count)
        if "system" in roles[1:]:
            self._mark(name, "late-system", count)
        for role, after in itertools.pairwise(roles):
            if role == after and role != "tool":
                self._mark(name, "same-role-twice", count)
                break

    def _see_message(self, name: str, message: Any) -> str:
        """The role of a message; what is odd about it is marked."""
        if type(message) is not dict:
            self._mark_row(name, f"items:{_KINDS.get(type(message), 'value')}")
            return "?"
        role = message.get("role")
        content = message.get("content")
        if role is None and content is None and ("from" in message or "value" in message):
            self._mark_row(name, "from-value")
            role = message.get("from")
            content = message.get("value")
        if type(role) is not str:
            self._mark_row(name, "no-role")
        calls = message.get("tool_calls")
        if calls:
            self._mark_row(name, "tool-calls")
            self._digest = hash((self._digest, str(calls)))
        if message.get("weight", 1) == 0:
            self._mark_row(name, "no-weight")
        kind = type(content)
        if kind is str:
            self._digest = hash((self._digest, content))
            if (not content or content.isspace()) and not calls:
                self._see_empty(name, role)
        elif content is not None:
            self._digest = hash((self._digest, str(content)))
            self._mark_row(name, f"content:{_KINDS.get(kind, 'value')}")
        elif not calls:
            self._mark_row(name, "null-content")
        return role if type(role) is str else "?"

    def _see_empty(self, name: str, role: Any) -> None:
        if role in ASSISTANTS:
            self._mark_row(name, "empty-answer")
        elif role == "user":
            self._mark_row(name, "empty-question")

    def _mark_row(self, column: str, fact: str) -> None:
        """A fact of a message: a row that has several such messages counts once."""
        if self._marked.get((column, fact)) != self._rows:
            self._marked[column, fact] = self._rows
            self._mark(column, fact)

    def _see_pair(self, row: dict[str, Any]) -> None:
        chosen = row["chosen"]
        rejected = row["rejected"]
        if chosen == rejected or _are_written_alike(chosen, rejected):
            self._mark("", "equal-pair")
        if type(chosen) is not type(rejected):
            self._mark("", "unlike-pair")
            return
        prompt = row.get("prompt")
        if prompt is not None:
            if _begins_with(chosen, prompt) and _begins_with(rejected, prompt):
                self._mark("", "prompt-twice")
        elif type(chosen) is str and chosen[:1] != rejected[:1]:
            # TRL takes what both have in common as the prompt (trl/data_utils.py::extract_prompt)
            self._mark("", "no-common-prompt")
        elif type(chosen) is list and (
            min(len(chosen), len(rejected)) < 2 or chosen[0] != rejected[0]
        ):
            # a conversation of one message leaves nothing for the prompt
            self._mark("", "no-common-prompt")

    def _compare_with_earlier(self) -> None:
        """Whether an earlier row had the same text in its trained columns."""
        if not self._digest or len(self._hashes) >= _MOST_HASHES:
            return
        if self._digest in self._hashes:
            self._mark("", "copy")
        else:
            self._hashes.add(self._digest)

    def survey(self) -> Survey:
        for dialogue, seen in self._dialogues.items():
            count, self._file, self._number, self._index = seen
            self._mark_dialogue(dialogue, count)
        kinds = _merge_kinds(self._counts)
        for column in {name for name, _ in kinds}:
            present = sum(tally.count for (name, _), tally in kinds.items() if name == column)
            if present < self._rows:
                kinds[column, "absent"] = Occurrence(self._rows - present, RowPlace(self._file, 0))
        return Survey(
            rows=self._rows,
            kinds=kinds,
            facts={key: _to_occurrence(seen) for key, seen in self._facts.items()},
            faults=tuple(self._faults),
            fault_count=self._fault_count,
            unread=tuple(self._unread),
            lacks_pyarrow=self._lacks_pyarrow,
        )


def _lack_content(messages: list[Any]) -> bool:
    return all(type(message) is dict and message.get("content") is None for message in messages)


def _begins_with(answer: Any, prompt: Any) -> bool:
    """Whether an answer repeats its prompt; a word or two may begin both by chance."""
    if type(answer) is list and type(prompt) is list:
        return bool(prompt) and len(answer) > len(prompt) and answer[: len(prompt)] == prompt
    if type(answer) is str and type(prompt) is str:
        return len(prompt) >= 12 and answer.startswith(prompt)
    return False


def _are_written_alike(chosen: Any, rejected: Any) -> bool:
    """Whether two answers differ in nothing that a chat template writes."""
    if type(chosen) is not list or type(rejected) is not list or len(chosen) != len(rejected):
        return False
    for message, other in zip(chosen, rejected, strict=True):
        if type(message) is not dict or type(other) is not dict:
            return False
        if any(message.get(key) != other.get(key) for key in _WRITTEN):
            return False
    return bool(chosen)


def _to_occurrence(seen: list[Any]) -> Occurrence:
    count, file, number, index = seen
    return Occurrence(count, RowPlace(file, number, index))


def _merge_kinds(counts: Mapping[tuple[str, Any], list[Any]]) -> dict[tuple[str, str], Occurrence]:
    """Python's types as kinds. In CSV a column with any text is all text, as pandas reads it."""
    merged: dict[tuple[str, str], Occurrence] = {}
    texts = {name for name, kind in counts if kind is str}
    for (name, kind), seen in counts.items():
        word = _KINDS.get(kind, "value")
        tally = _to_occurrence(seen)
        suffix = reading.data_suffix(Path(tally.first.file))
        is_csv = suffix in reading.TEXT_FORMATS
        if is_csv and word != "null" and name in texts:
            word = "text"
        earlier = merged.get((name, word))
        if earlier is not None:
            tally = Occurrence(earlier.count + tally.count, earlier.first)
        merged[name, word] = tally
    return merged


def _as_json(survey: Survey, names: Sequence[str]) -> dict[str, Any]:
    """A survey without the names of files, which are the numbers of those that were asked for."""
    number = {name: index for index, name in enumerate(names)}

    def tallies(table: Mapping[tuple[str, str], Occurrence]) -> list[list[Any]]:
        listed = []
        for key, tally in table.items():
            first = tally.first
            listed.append([*key, tally.count, number.get(first.file, 0), first.number, first.index])
        return listed

    return {
        "rows": survey.rows,
        "kinds": tallies(survey.kinds),
        "facts": tallies(survey.facts),
        "faults": [{**asdict(fault), "file": number[fault.file]} for fault in survey.faults],
        "fault_count": survey.fault_count,
        "unread": list(survey.unread),
    }


def _from_json(content: Mapping[str, Any], names: Sequence[str]) -> Survey | None:
    """A survey that was remembered; None where it is of another version, or damaged."""

    def tallies(key: str) -> dict[tuple[str, str], Occurrence]:
        table = {}
        for column, name, count, file, number, index in content[key]:
            place = RowPlace(names[file], int(number), int(index))
            table[str(column), str(name)] = Occurrence(int(count), place)
        return table

    try:
        faults = []
        for fault in content["faults"]:
            number = fault["number"]
            if number is not None:
                number = int(number)
            faults.append(Fault(names[fault["file"]], str(fault["reason"]), number))
        return Survey(
            rows=int(content["rows"]),
            kinds=tallies("kinds"),
            facts=tallies("facts"),
            faults=tuple(faults),
            fault_count=int(content["fault_count"]),
            unread=tuple(map(str, content["unread"])),
        )
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError):
        return None
