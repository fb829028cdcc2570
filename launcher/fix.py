"""`launch validate-config --fix`: the text of a stage file with only the faulty spans edited.

Keys are renamed and deleted, and a data set or a mixer is written as a mixer list. PyYAML's marks say where
they stand: comments, quotes, order, line ends and blank lines stay byte for byte. Every edit is tried before
it is believed: the new text is loaded and judged, its own fault must have gone, no error may come, and no
value but those meant may differ. What is not mended is left with the reason.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from launcher import config, stage
from launcher.document import LOADER, bad
from launcher.errors import Finding, InvalidConfig, NotReady, brief
from launcher.files import read_bytes
from launcher.stage import Judged, entry_of
from launcher.upstream import Locator

BOM = b"\xef\xbb\xbf"
Judge = Callable[[str], Judged]
"""Judges a text as if it stood in the file; raises InvalidConfig where it cannot be loaded."""

_GONE = object()
_ARGS: Mapping[str, tuple[str, ...]] = {
    "stage": ("args",),
    "wrapped": ("open_instruct", "args"),
    "flat": (),
}
# Renames whose value would have to be another one too: old and new name.
_OTHER_VALUE = {
    ("activation_memory_budget", "gradient_checkpointing"),
    ("use_flash_attn", "attn_implementation"),
    ("max_steps", "max_train_steps"),
    ("warmup_ratio", "warmup_steps"),
}
# Below 1 switches checkpointing on (dpo_tune_cache.py:376), the default does not.
_BUDGET = {True: 0.5, False: 1.0}
# Names for the same idea under which the same value means nothing, or something else.
_UNLIKE: Mapping[str, str] = {
    "dataset_name": "it takes one set, and no amount",
    "chat_template_path": "it takes a file or a model, no name of a template",
}
# What is not read, and is still needed to understand another key.
_NEEDED_BY: Mapping[str, tuple[str, ...]] = {
    "dataset_config_name": ("dataset_name", "dataset_mixer"),
}


@dataclass(frozen=True, slots=True)
class Change:
    """One edit, in words for people; `line` is 1-based, of the text as it was."""

    line: int
    key: str
    what: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}"

    def as_json(self) -> dict[str, object]:
        """For envelopes."""
        return {"line": self.line, "key": self.key, "what": self.what}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A file's text before and after; `left` is everything still found about it afterwards.

    Of a finding that could have been mended and was not, the help says why.
    """

    path: Path
    before: str
    after: str
    changes: tuple[Change, ...]
    left: tuple[Finding, ...]

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return self.after != self.before

    def with_reasons(self, found: Sequence[Finding]) -> tuple[Finding, ...]:
        """Findings of the file as it stands now, with why those that could be mended were not."""
        helps = {(f.code, f.key, f.message): f.help for f in self.left}
        return tuple(replace(f, help=helps.get((f.code, f.key, f.message), f.help)) for f in found)

    def as_json(self) -> dict[str, object]:
        """For envelopes."""
        changes = [change.as_json() for change in self.changes]
        return {"path": str(self.path), "changed": self.changed, "changes": changes}

    def diff(self) -> str:
        """The edits as a unified diff, as `git apply` and `patch` take it; empty where there are none."""
        name = str(self.path)
        before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (self.before, self.after))
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(before, after, name, name)
        )


def of_file(path: Path, *, stage_name: str | None = None, locator: Locator | None = None) -> Fix:
    """The mended text of a file, judged as `stage.judge` does it; writes nothing.

    Raises InvalidConfig where the file cannot be read at all: then there is nothing to mend.
    """
    locator = locator or Locator()

    def judge(loaded: config.Config) -> Judged:
        return stage.judge(loaded, stage=stage_name, locator=locator)

    judged = judge(config.load(path))
    text = _read(path).decode("utf-8-sig")
    return propose(text, judged, lambda new: judge(config.load(path, text=new)))


def propose(text: str, judged: Judged, again: Judge) -> Fix:
    """Mend what can be mended mechanically in the text of `judged.config.path`.

    `again` judges another text in place of the file's, and raises InvalidConfig where it cannot be
    loaded. Pure but for what `again` does.
    """
    original, file, changes = judged.config, _File(text, judged), list[Change]()
    while True:
        declined, before = dict[Finding, str](), len(changes)
        for finding in file.judged.findings:
            try:
                # an edit before may have answered it
                mend = _mend(file, finding) if _same(finding, file.judged) else None
                if mend is None:
                    continue
                edited = file.text.edited(mend.edits)
                new = _File(edited, again(edited))
                _check(finding, mend, file.judged, new.judged)
            except Leave as reason:
                declined[finding] = str(reason)
            except InvalidConfig as error:
                declined[finding] = f"then {error.findings[0].message}"
            else:
                line = original.origin(finding.key or "").line or 1
                changes.append(Change(line, finding.key or "", mend.what))
                file = new
        if len(changes) == before:
            break
    return Fix(
        path=original.path, before=text, after=file.text.text,
        changes=tuple(sorted(changes, key=lambda change: change.line)),
        left=tuple(_explained(f, declined.get(f)) for f in file.judged.findings),
    )  # fmt: skip


def _explained(finding: Finding, why: str | None) -> Finding:
    if why is None:
        return finding
    help = f"{finding.help}; " if finding.help else ""
    return replace(finding, help=f"{help}--fix leaves it: {why}")


def apply(fix: Fix) -> None:
    """Write the new text in place of the old one, in one step; a file with no change is not touched.

    Permissions, a byte order mark and the file that a link points at stay what they are. Raises
    NotReady where the file cannot be written, or is no longer the one that was judged.
    """
    if not fix.changed:
        return
    target = Path(os.path.realpath(fix.path))
    old = _read(target)
    if old.removeprefix(BOM).decode("utf-8", "replace") != fix.before:
        message = "was changed in the meantime, and not written"
        raise NotReady(bad(fix.path, "file-changed", message, None, "run it again"))
    mark = BOM if old.startswith(BOM) else b""
    half = target.with_name(f".{target.name[:100]}.{os.getpid()}")
    try:
        owner = target.stat()
        # replacing needs the folder's permission only: the file's own is asked here
        if not owner.st_mode & 0o222 or not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
        try:
            half.write_bytes(mark + fix.after.encode("utf-8"))
            with contextlib.suppress(OSError):
                os.chown(half, owner.st_uid, owner.st_gid)
            shutil.copymode(target, half)
            half.replace(target)
        finally:
            half.unlink(missing_ok=True)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        help = f"chmod u+w {fix.path}, or write what --diff shows by hand"
        raise NotReady(bad(fix.path, "unwritable-file", message, None, help)) from None


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise NotReady(bad(path, "unreadable-file", message, None)) from None


# --- edits of a text ------------------------------------------------------------------------------


class Leave(Exception):
    """Something is not mended; the text says why, to its author."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Characters `start` to `end` become `text`."""

    start: int
    end: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """One entry of a mapping."""

    mapping: yaml.MappingNode
    key: yaml.ScalarNode
    value: yaml.Node


_REST_OF_LINE = re.compile(r"[ \t]*(?:#[^\r\n]*)?(?:\r?\n|\Z)")
_COLON = re.compile(r"[ \t]*:\s*\Z")


class Text:
    """A YAML text that is known to load, and the edits that can be made to it.

    Its methods raise Leave where something is written in a way that they do not edit.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self.root = yaml.compose(text, Loader=LOADER)
        except yaml.YAMLError:
            # an anchor that stands twice: the composer alone objects
            self.root = None

    def find(self, keys: Sequence[str]) -> Place | None:
        """The entry of a nested key; of a key that stands twice the last."""
        place, node = None, self.root
        for name in keys:
            if not isinstance(node, yaml.MappingNode):
                return None
            found = [entry for entry in node.value if entry[0].value == name]
            if not found:
                return None
            place = Place(node, *found[-1])
            node = place.value
        return place

    def raw(self, node: yaml.Node) -> str:
        """A node as its author wrote it."""
        return self.text[node.start_mark.index : self._end(node)]

    def _end(self, node: yaml.Node) -> int:
        """Where a node ends: the mark of a block says where the next token begins."""
        start, end = node.start_mark.index, node.end_mark.index
        if isinstance(node, yaml.CollectionNode) and not node.flow_style:
            last = node.value[-1] if isinstance(node, yaml.SequenceNode) else node.value[-1][1]
            if last.start_mark.index < start:
                raise Leave("it holds an alias")
            return self._end(last)
        if start == end or getattr(node, "style", None) in {"|", ">"}:
            return len(self.text[:end].rstrip())
        return int(end)

    def plain(self, value: yaml.Node) -> str:
        """The raw text of a scalar in one line."""
        raw = self.raw(value)
        if not isinstance(value, yaml.ScalarNode) or raw[:1] in {"&", "!", "*", "|", ">"}:
            raise Leave("its value has an anchor, an alias or a tag, or is a block")
        if not raw or "\n" in raw:
            raise Leave("its value does not stand in one line")
        return raw

    def renamed(self, key: yaml.Node, name: str) -> Edit:
        """Another key in the same quotes."""
        raw, start = self.raw(key), key.start_mark.index
        if raw == key.value:
            return Edit(start, start + len(raw), name)
        if raw[:1] in {"'", '"'} and raw[1:-1] == key.value:
            return Edit(start + 1, start + len(raw) - 1, name)
        raise Leave("the key is written in an unusual way")

    def replaced(self, value: yaml.Node, raw: str) -> Edit:
        """Another value in place of one that stands in one line."""
        self.plain(value)
        return Edit(value.start_mark.index, value.end_mark.index, raw)

    def deleted(self, place: Place) -> Edit:
        """An entry with its trailing comment; a comment above it stays."""
        start = place.key.start_mark.index
        if place.value.start_mark.index < start:
            raise Leave("its value is an alias")
        begin = self.text.rfind("\n", 0, start) + 1
        rest = _REST_OF_LINE.match(self.text, max(self._end(place.key), self._end(place.value)))
        if place.mapping.flow_style or rest is None or self.text[begin:start].strip(" \t"):
            raise Leave("it shares its line with something else")
        if not rest[0].endswith("\n"):
            # the last line, without a line end: then the file goes on having none
            begin = len(self.text[:begin].rstrip("\r\n"))
        return Edit(begin, rest.end())

    def listed(self, mapping: yaml.MappingNode, amounts: Sequence[str | None]) -> Iterable[Edit]:
        """A mapping of names to amounts as a list of both in turn; None keeps an amount's text."""
        start, flow = mapping.start_mark.index, mapping.flow_style
        if self.text[start] in "&!*":
            raise Leave("it has an anchor, an alias or a tag")
        if flow:
            yield Edit(start, start + 1, "[")
            yield Edit(mapping.end_mark.index - 1, mapping.end_mark.index, "]")
        for (key, value), amount in zip(mapping.value, amounts, strict=True):
            self.plain(value)
            begin, end, after = key.start_mark.index, self._end(key), value.start_mark.index
            indent = self.text[self.text.rfind("\n", 0, begin) + 1 : begin]
            between = self.text[end:after]
            usual = _COLON.match(between) and (flow or not indent.strip(" \t"))
            if not usual or self.text[begin] in "&!*?":
                raise Leave("an entry is written in an unusual way")
            if not flow:
                yield Edit(begin, begin, "- ")
            newline = "\r\n" if "\r\n" in self.text else "\n"
            yield Edit(end, after, ", " if flow else f"{newline}{indent}- ")
            if amount is not None:
                yield Edit(after, value.end_mark.index, amount)

    def edited(self, edits: Iterable[Edit]) -> str:
        """The text after edits that do not overlap."""
        text = self.text
        for edit in sorted(edits, key=lambda e: (e.start, e.end), reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text


# --- what is mechanical, and how it is mended -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mend:
    """The edits that answer one finding; `effects` are the arguments that differ afterwards."""

    edits: tuple[Edit, ...]
    what: str
    effects: Mapping[str, object]


def _mend(file: _File, finding: Finding) -> _Mend | None:
    """What answers a finding; None where nothing mechanical does."""
    mender = _MENDERS.get(finding.code) or _DATA.get((finding.code, finding.key))
    if mender is None or file.judged.schema is None:
        return None
    if finding.file != str(file.judged.config.path):
        raise Leave(f"it is written in {finding.file}")
    return mender(file, finding, (finding.key or "").removeprefix("args."))


def _check(finding: Finding, mend: _Mend, old: Judged, new: Judged) -> None:
    """Raises Leave where the file would not be better."""
    if new.stage != old.stage:
        raise Leave(f"the file would be taken for a {new.stage} stage")
    if repr(old.config.options) != repr(new.config.options):
        raise Leave("something beside the arguments would change")
    was, now = {**old.config.args, **mend.effects}, new.config.args
    for key in {**was, **now}:
        # a parent's value may come to light: what is found about it says so below
        if was.get(key) is not _GONE and repr(was.get(key, _GONE)) != repr(now.get(key, _GONE)):
            raise Leave(f"another argument would change: `{key}`")
    came = Counter(map(_error, new.findings)) - Counter(map(_error, old.findings))
    for other in new.findings:
        if other.severity == "error" and _error(other) in came:
            raise Leave(f"then {other.message}")
    if _same(finding, new) >= _same(finding, old):
        raise Leave("the fault would still be there")


def _error(finding: Finding) -> tuple[str, str, str, str | None]:
    return finding.severity, finding.layer, finding.code, finding.key


def _same(finding: Finding, judged: Judged) -> int:
    """How often a fault is there."""
    fault = finding.code, finding.key, finding.file
    return sum((f.code, f.key, f.file) == fault for f in judged.findings)


class _File:
    """A text and what is found about it."""

    def __init__(self, text: str, judged: Judged) -> None:
        self.text, self.judged = Text(text), judged
        self.args = judged.config.args
        if judged.schema is not None:
            self.schema, self.entry = judged.schema, entry_of(judged.schema)

    def written(self, key: str) -> Place | None:
        """Where an argument is written in this file."""
        return self.text.find([*_ARGS[self.judged.config.shape], key])

    def find(self, key: str) -> Place:
        """The same; raises Leave where it is not."""
        place = self.written(key)
        if place is None:
            raise Leave("it is not written in this file, or in an unusual way")
        return place

    def delete(self, key: str, why: str) -> _Mend:
        """Take one argument out of the file."""
        place = self.find(key)
        edit = self.text.deleted(place)
        raw = brief(" ".join(self.text.raw(place.value).split()), 40)
        return _Mend((edit,), f"`{key}: {raw}` deleted: {why}", {key: _GONE})

    def move(self, key: str, to: str, value: object = _GONE) -> _Mend:
        """Another name for one argument, with another value where one is given."""
        place, old = self.find(key), self.args.get(key)
        new = old if value is _GONE else value
        if self.written(to) is not None:
            if repr(self.args.get(to)) == repr(new):
                return self.delete(key, f"`{to}` says the same")
            raise Leave(f"`{to}` is there too, with another value")
        edits, what = [self.text.renamed(place.key, to)], f"`{key}` -> `{to}`"
        if value is not _GONE:
            what = f"`{key}: {self.text.plain(place.value)}` -> `{to}: {value}`"
            edits.append(self.text.replaced(place.value, str(value)))
        return _Mend(tuple(edits), what, {key: _GONE, to: new})


def _renamed(file: _File, finding: Finding, key: str) -> _Mend:
    named = re.match(r"write `([^`]+)`", finding.help or "")
    if named is None or named[1] not in file.schema.fields:
        raise Leave("what it is called now is not known")
    to = named[1]
    if finding.code == "renamed-key" and (why := _UNLIKE.get(to)) is not None:
        raise Leave(why)
    if (key, to) in _OTHER_VALUE:
        raise Leave(f"`{to}` takes another value")
    value = file.args.get(key)
    if to == "activation_memory_budget" and isinstance(value, bool):
        return file.move(key, to, _BUDGET[value])
    return file.move(key, to)


def _removed(file: _File, finding: Finding, key: str) -> _Mend:
    moved = file.entry.moved.get(key)
    return file.delete(key, "nothing takes it" if moved is None else moved.why)


def _unread(file: _File, finding: Finding, key: str) -> _Mend:
    for partner in _NEEDED_BY.get(key, ()):
        if file.args.get(partner) is not None:
            raise Leave(f"it says something about `{partner}`")
    # a note is about a value that asks for nothing
    if key in file.entry.instead and finding.severity != "note":
        raise Leave("what it asks for has to be said otherwise")
    return file.delete(key, "nothing reads it")


def _unknown(file: _File, finding: Finding, key: str) -> _Mend | None:
    """Only what is no guess: another case or other separators."""
    same = [name for name in file.schema.fields if _folded(name) == _folded(key)]
    return file.move(key, same[0]) if len(same) == 1 else None


def _folded(name: str) -> str:
    return re.sub(r"[-_.]", "", name).lower()


def _dataset_name(file: _File, finding: Finding, key: str) -> _Mend:
    """One set, all of it."""
    listed = _no_other_data(file, "dataset_name")
    place, value = file.find("dataset_name"), file.args["dataset_name"]
    raw = file.text.plain(place.value)
    if not isinstance(value, str) or not value or "${" in raw:
        raise Leave("its value is no name")
    if not re.fullmatch(r"[\w./~@+-]+|'[^']*'|\"[^\"\\]*\"", raw):
        raw = json.dumps(value, ensure_ascii=False)
    edits = (
        file.text.renamed(place.key, listed),
        file.text.replaced(place.value, f"[{raw}, 1.0]"),
    )
    what = f"`dataset_name: {brief(value)}` -> `{listed}: [{brief(value)}, 1.0]`"
    return _Mend(edits, what, {"dataset_name": _GONE, listed: [value, 1.0]})


def _dataset_mixer(file: _File, finding: Finding, key: str) -> _Mend:
    """`{name: amount}` as `[name, amount]`: what finetune.py:498 would do, could it be reached."""
    mixer = file.args.get("dataset_mixer")
    if mixer == {}:
        return file.delete("dataset_mixer", "it is empty")
    listed = _no_other_data(file, "dataset_mixer")
    place, node = file.find("dataset_mixer"), file.find("dataset_mixer").value
    if (
        not isinstance(mixer, dict)
        or not isinstance(node, yaml.MappingNode)
        or [key.value for key, _ in node.value] != list(mixer)
    ):
        raise Leave("its entries do not all stand there, once each")
    amounts = _amounts(mixer)
    # 1 and 1.0 are the same number
    pairs = [(repr(old), repr(new)) for old, new in zip(mixer.values(), amounts, strict=True)]
    edits = (
        file.text.renamed(place.key, listed),
        *file.text.listed(node, [str(new) if new != old else None for old, new in pairs]),
    )
    words = [word for pair in zip(mixer, amounts, strict=True) for word in pair]
    what = f"`dataset_mixer` -> `{listed}`, names and amounts in turn"
    return _Mend(edits, what, {"dataset_mixer": _GONE, listed: words})


def _no_other_data(file: _File, key: str) -> str:
    """The name of the list to write; raises Leave where more than `key` says which data to take."""
    listed = file.entry.names.data
    for other in ("dataset_name", "dataset_mixer", "dataset_config_name"):
        if other != key and file.args.get(other) is not None:
            raise Leave(f"`{other}` is there too, and has no place in `{listed}`")
    if listed in file.args:
        raise Leave(f"`{listed}` is there too")
    return listed


def _amounts(mixer: Mapping[str, Any]) -> list[float | int]:
    """Each amount as it is in a list, where a count is a whole number and a share has a point.

    In a mapping 1 is a share, all of a set, unless a number above 1 shows that they are counts
    (utils.py:527). Raises Leave where an amount is neither, or 1 may be both.
    """
    counts = any(isinstance(value, int) and value > 1 for value in mixer.values())
    shares = any(isinstance(value, float) for value in mixer.values())
    amounts: list[float | int] = []
    for name, value in mixer.items():
        count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        share = isinstance(value, float) and 0 < value <= 1 and "e" not in str(value)
        if not count and not share:
            raise Leave(f"`{brief(value)}` of {brief(name)} is neither a share nor a count")
        if count and value == 1 and counts and shares:
            raise Leave(f"the amount 1 of {brief(name)} may be a share or a count")
        amounts.append(1.0 if count and not counts else value)
    return amounts


_MENDERS: Mapping[str, Callable[[_File, Finding, str], _Mend | None]] = {
    "renamed-key": _renamed,
    "removed-key": _removed,
    "unread-key": _unread,
    "abbreviated-key": _renamed,
    "unknown-key": _unknown,
}
_DATA: Mapping[tuple[str, str | None], Callable[[_File, Finding, str], _Mend | None]] = {
    ("bad-value", "args.dataset_mixer"): _dataset_mixer,
    ("two-data-sources", "args.dataset_mixer"): _dataset_mixer,
    ("two-data-sources", "args.dataset_name"): _dataset_name,
}
