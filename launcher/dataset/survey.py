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
from typing import Any, NamedTuple

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
# roles of answers, in templates and in ShareGPT's rows
ASSISTANTS = ("assistant", "gpt", "model", "bot")


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
        if tally is None:
            return 0
        return tally.count

    def count_kind(self, column: str, kind: str) -> int:
        tally = self.kinds.get((column, kind))
        if tally is None:
            return 0
        return tally.count

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
    bounds = None
    if rows is not None:
        bounds = (rows.start, rows.stop)
    return _look(tuple(_read_state(path) for path in paths), bounds)


class SurveyedFile(NamedTuple):
    """A file as it was when it was looked at; zeros for one that is not there."""

    path: str
    inode: int = 0
    size: int = 0
    written: int = 0
    changed: int = 0


def _read_state(path: Path) -> SurveyedFile:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return SurveyedFile(str(path))
    return SurveyedFile(
        path=str(path),
        inode=status.st_ino,
        size=status.st_size,
        written=status.st_mtime_ns,
        changed=status.st_ctime_ns,
    )


@functools.lru_cache(maxsize=256)
def _look(states: tuple[SurveyedFile, ...], bounds: tuple[int, int] | None) -> Survey:
    names = [state.path for state in states]
    memory = _find_memory(states, bounds)
    remembered = _from_json(files.read_json(memory), names)
    if remembered is not None:
        return remembered
    surveyor = _Surveyor(bounds)
    for name in names:
        surveyor.read(Path(name))
    survey = surveyor.survey()
    newest = max((max(state.written, state.changed) for state in states), default=0)
    if time.time() - newest / 1e9 > _SETTLED_S and not survey.lacks_pyarrow:
        with contextlib.suppress(OSError, ValueError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(memory, _as_json(survey, names))
    return survey


def _find_memory(states: Sequence[SurveyedFile], bounds: tuple[int, int] | None) -> Path:
    """Where the survey of files in these states is remembered."""
    absolute = [state._replace(path=os.path.abspath(state.path)) for state in states]
    content = json.dumps([_VERSION, absolute, *(bounds or ())])
    digest = hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()
    return cache_home() / "surveys" / f"{digest}.json"


@dataclass(slots=True)
class _Tally:
    """An `Occurrence` that is still counted."""

    count: int
    first: RowPlace


class _Surveyor:
    """Counts what rows are like. Everything here runs once a row, or once a message."""

    def __init__(self, bounds: tuple[int, int] | None = None) -> None:
        self._bounds = bounds
        self._before = 0
        self._rows = 0
        self._counts: dict[tuple[str, Any], _Tally] = {}
        self._facts: dict[tuple[str, str], _Tally] = {}
        self._faults: list[Fault] = []
        self._fault_count = 0
        self._unread: list[str] = []
        self._lacks_pyarrow = False
        self._dialogues: dict[tuple[str, tuple[str, ...]], _Tally] = {}
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
                    start, stop = self._bounds
                    self._before += 1
                    if self._before > stop:
                        return
                    if self._before <= start:
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
                seen.count += 1
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

    def _count(self, table: dict[Any, _Tally], key: object, most: int, count: int = 1) -> bool:
        """Count a key, and remember the row where it is new; False if the table has too many."""
        seen = table.get(key)
        if seen is not None:
            seen.count += count
        elif len(table) < most:
            table[key] = _Tally(count, RowPlace(self._file, self._number, self._index))
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
        schemas = [tools]
        if type(tools) is list:
            schemas = tools
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
            marks = row.get(name)
            if type(marks) is list and len(marks) != len(tokens):
                self._mark(name, "other-length")
        labels = row.get("labels")
        if type(labels) is list and labels and all(label == -100 for label in labels):
            self._mark("labels", "masked")

    def _see_list(self, name: str, messages: list[Any]) -> None:
        if not messages:
            self._mark(name, "empty-list")
            return
        first = type(messages[0])
        if first is not dict:
            self._mark(name, f"items:{_KINDS.get(first, 'value')}")
            return
        roles = tuple([self._see_message(name, message) for message in messages])
        if self._marked.get((name, "null-content")) == self._rows and _lack_content(messages):
            self._mark(name, "no-content")
        if not self._count(self._dialogues, (name, roles), _MOST_DIALOGUES):
            self._mark_dialogue(name, roles, 1)

    def _mark_dialogue(self, name: str, roles: tuple[str, ...], count: int) -> None:
        """The facts that a sequence of roles shows, for `count` rows that have it."""
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
        if type(role) is str:
            return role
        return "?"

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
        elif type(chosen) is list:
            # a conversation of one message leaves nothing for the prompt
            is_short = min(len(chosen), len(rejected)) < 2
            if is_short or chosen[0] != rejected[0]:
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
        for (name, roles), seen in self._dialogues.items():
            self._file = seen.first.file
            self._number = seen.first.number
            self._index = seen.first.index
            self._mark_dialogue(name, roles, seen.count)
        kinds = _merge_kinds(self._counts)
        present: dict[str, int] = {}
        for (column, _), tally in kinds.items():
            present[column] = present.get(column, 0) + tally.count
        for column, rows in present.items():
            if rows < self._rows:
                kinds[column, "absent"] = Occurrence(self._rows - rows, RowPlace(self._file, 0))
        return Survey(
            rows=self._rows,
            kinds=kinds,
            facts={key: Occurrence(seen.count, seen.first) for key, seen in self._facts.items()},
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
        for key in _WRITTEN:
            if message.get(key) != other.get(key):
                return False
    return bool(chosen)


Occurrences = dict[tuple[str, str], Occurrence]
"""By column and kind, or by column and fact."""


def _merge_kinds(counts: Mapping[tuple[str, Any], _Tally]) -> Occurrences:
    """Python's types as kinds. In CSV a column with any text is all text, as pandas reads it."""
    merged: Occurrences = {}
    texts = {name for name, kind in counts if kind is str}
    for (name, kind), seen in counts.items():
        word = _KINDS.get(kind, "value")
        suffix = reading.find_data_suffix(Path(seen.first.file))
        is_csv = suffix in reading.TEXT_FORMATS
        if is_csv and word != "null" and name in texts:
            word = "text"
        earlier = merged.get((name, word))
        if earlier is None:
            merged[name, word] = Occurrence(seen.count, seen.first)
        else:
            merged[name, word] = Occurrence(earlier.count + seen.count, earlier.first)
    return merged


def _as_json(survey: Survey, names: Sequence[str]) -> dict[str, Any]:
    """A survey without the names of files, which are the numbers of those that were asked for."""
    numbers = {name: index for index, name in enumerate(names)}
    return {
        "rows": survey.rows,
        "kinds": _encode_occurrences(survey.kinds, numbers),
        "facts": _encode_occurrences(survey.facts, numbers),
        "faults": [{**asdict(fault), "file": numbers[fault.file]} for fault in survey.faults],
        "fault_count": survey.fault_count,
        "unread": list(survey.unread),
    }


def _encode_occurrences(
    table: Mapping[tuple[str, str], Occurrence], numbers: Mapping[str, int]
) -> list[list[object]]:
    encoded: list[list[object]] = []
    for key, tally in table.items():
        first = tally.first
        file = numbers.get(first.file, 0)
        encoded.append([*key, tally.count, file, first.number, first.index])
    return encoded


def _decode_occurrences(encoded: Any, names: Sequence[str]) -> Occurrences:
    table = {}
    for column, name, count, file, number, index in encoded:
        place = RowPlace(names[file], int(number), int(index))
        table[str(column), str(name)] = Occurrence(int(count), place)
    return table


def _decode_fault(encoded: Any, names: Sequence[str]) -> Fault:
    number = encoded["number"]
    if number is not None:
        number = int(number)
    return Fault(names[encoded["file"]], str(encoded["reason"]), number)


def _from_json(content: Mapping[str, Any], names: Sequence[str]) -> Survey | None:
    """A survey that was remembered; None where it is of another version, or damaged."""
    try:
        return Survey(
            rows=int(content["rows"]),
            kinds=_decode_occurrences(content["kinds"], names),
            facts=_decode_occurrences(content["facts"], names),
            faults=tuple(_decode_fault(fault, names) for fault in content["faults"]),
            fault_count=int(content["fault_count"]),
            unread=tuple(map(str, content["unread"])),
        )
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError):
        return None
