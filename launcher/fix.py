"""`launch validate-config --fix`: the text of a stage file with only the faulty spans edited.

Keys are renamed and deleted, and a data set or a mixer is written as a mixer list; comments, quotes, order,
line ends and blank lines stay byte for byte. Every edit is tried before it is believed: the new text is
loaded and judged, its own fault must have gone, no error may come, and no value but those meant may
differ. What is not mended is left with the reason.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import json
import math
import os
import re
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from launcher import config, history, stage, upstream
from launcher.backends import Entry
from launcher.builder import bad
from launcher.config import Config
from launcher.errors import Finding, InvalidConfig, NotReady, brief
from launcher.files import read_bytes
from launcher.schema import Schema
from launcher.stage import Judged, entry_of
from launcher.surgery import BREAK, Edit, Leave, Node, Place, Text
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
_OTHERWISE = frozenset(
    {
        ("activation_memory_budget", "gradient_checkpointing"),
        ("use_flash_attn", "attn_implementation"), ("max_steps", "max_train_steps"),
        ("warmup_ratio", "warmup_steps"),
    }
)  # fmt: skip
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
        told = difflib.unified_diff(_lines(self.before), _lines(self.after), name, name)
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in told
        )


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def of_file(path: Path, *, stage_name: str | None = None, locator: Locator | None = None) -> Fix:
    """The mended text of a file, judged as `stage.judge` does it; writes nothing.

    Raises InvalidConfig where the file cannot be read at all: then there is nothing to mend.
    """
    locator = locator or Locator()

    def judge(loaded: Config) -> Judged:
        return stage.judge(loaded, stage=stage_name, locator=locator)

    judged = judge(config.load(path))
    text = _read(path).decode("utf-8-sig")
    return propose(text, judged, lambda new: judge(config.load(path, text=new)))


def propose(text: str, judged: Judged, again: Judge) -> Fix:
    """Mend what can be mended mechanically in the text of `judged.config.path`.

    `again` judges another text in place of the file's, and raises InvalidConfig where it cannot be
    loaded. Pure but for what `again` does.
    """
    before, changes = text, list[Change]()
    lines = tuple(range(1, len(BREAK.findall(text)) + 2))
    while True:
        state, declined = _State(text, judged, again), dict[Finding, str]()
        for finding in judged.findings:
            try:
                state.answer(finding)
            except Leave as reason:
                declined[finding] = str(reason)
        if not state.mends:
            break
        changes += [
            Change(lines[mend.row], mend.finding.key or "", mend.what) for mend in state.mends
        ]
        # edits that touch each other get their turn in the text that the others leave
        lines, text, judged = state.source.lines(lines, state.edits), state.text, state.judged
    left = tuple(_explained(f, declined.get(f)) for f in judged.findings)
    ordered = tuple(sorted(changes, key=lambda change: change.line))
    return Fix(path=judged.config.path, before=before, after=text, changes=ordered, left=left)


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
    new = fix.after.encode("utf-8")
    try:
        told = target.stat()
        # replacing needs the folder's permission only: the file's own is asked here
        if not told.st_mode & 0o222 or not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
        _replace(target, BOM + new if old.startswith(BOM) else new, told)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        help = f"chmod u+w {fix.path}, or write what --diff shows by hand"
        raise NotReady(bad(fix.path, "unwritable-file", message, None, help)) from None


def _replace(target: Path, content: bytes, told: os.stat_result) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            with contextlib.suppress(OSError):
                os.fchown(stream.fileno(), told.st_uid, told.st_gid)
            # after the owner: a change of owner takes bits away
            os.fchmod(stream.fileno(), stat.S_IMODE(told.st_mode))
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise NotReady(bad(path, "unreadable-file", message, None)) from None


# --- what is mechanical, and how it is mended -----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mend:
    """The edits that answer one finding; `effects` are the arguments that differ afterwards."""

    finding: Finding
    edits: tuple[Edit, ...]
    effects: Mapping[str, object]
    row: int
    what: str


class _State:
    """A text, the edits that are good so far, and what is found about the text with them."""

    def __init__(self, text: str, judged: Judged, again: Judge) -> None:
        self.source, self.text = Text(text), text
        self.judged, self._again = judged, again
        self.mends: list[_Mend] = []

    @property
    def edits(self) -> list[Edit]:
        return [edit for mend in self.mends for edit in mend.edits]

    @property
    def schema(self) -> Schema:
        assert self.judged.schema is not None
        return self.judged.schema

    @property
    def entry(self) -> Entry:
        return entry_of(self.schema)

    @property
    def args(self) -> Mapping[str, Any]:
        return self.judged.config.args

    def answer(self, finding: Finding) -> None:
        """Mend a finding that has a mechanical answer; raises Leave where that would not be better."""
        mender = _MENDERS.get(finding.code) or _DATA.get((finding.code, finding.key))
        if mender is None or self.judged.schema is None:
            return
        if finding.file != str(self.judged.config.path):
            raise Leave(f"it is written in {finding.file}")
        mend = mender(self, finding, (finding.key or "").removeprefix("args."))
        if mend is None or any(
            edit.start <= other.end and other.start <= edit.end
            for edit in mend.edits
            for other in self.edits
        ):
            return
        text = self.source.edited([*self.edits, *mend.edits])
        try:
            judged = self._again(text)
        except InvalidConfig as error:
            raise Leave(f"then {error.findings[0].message}") from None
        self._check(mend, judged)
        self.mends.append(mend)
        self.text, self.judged = text, judged

    def _check(self, mend: _Mend, judged: Judged) -> None:
        """Raises Leave where the file would not be better."""
        old, new = self.judged, judged
        if new.stage != old.stage:
            raise Leave(f"the file would be taken for a {new.stage} stage")
        if repr(old.config.options) != repr(new.config.options):
            raise Leave("something beside the arguments would change")
        was, now = {**old.config.args, **mend.effects}, new.config.args
        for key in {**was, **now}:
            # a parent's value may come to light: what is found about it says so below
            if was.get(key) is not _GONE and repr(was.get(key, _GONE)) != repr(now.get(key, _GONE)):
                raise Leave(f"another argument would change: `{key}`")
        came = _errors(new) - _errors(old)
        for finding in new.findings:
            if _error(finding) in came:
                raise Leave(f"then {finding.message}")
        faults = [
            sum(
                (f.code, f.key, f.file) == (mend.finding.code, mend.finding.key, mend.finding.file)
                for f in one.findings
            )
            for one in (old, new)
        ]
        if faults[1] >= faults[0]:
            raise Leave("the fault would still be there")

    def written(self, key: str) -> Place | None:
        """Where an argument is written in this file."""
        node, place = self.source.root, None
        for step in (*_ARGS[self.judged.config.shape], key):
            place = None if node is None else _find(node, step)
            node = None if place is None else place.value.resolved()
        return place

    def find(self, key: str) -> Place:
        """The same; raises Leave where it is not."""
        place = self.written(key)
        if place is None:
            raise Leave("it is not written in this file")
        return place

    def mend(
        self,
        finding: Finding,
        place: Place,
        edits: Sequence[Edit],
        what: str,
        effects: Mapping[str, object],
    ) -> _Mend:
        row = self.source.row(place.key.start)
        return _Mend(finding=finding, edits=tuple(edits), effects=effects, row=row, what=what)

    def delete(self, finding: Finding, key: str, why: str) -> _Mend:
        """Take one argument out of the file."""
        place = self.find(key)
        raw = brief(" ".join(self.source.raw(place.value).split()), 40)
        what = f"`{key}: {raw}` deleted: {why}"
        return self.mend(finding, place, [self.source.deleted(place)], what, {key: _GONE})

    def move(self, finding: Finding, key: str, to: str, value: object = _GONE) -> _Mend:
        """Another name for one argument, with another value where one is given."""
        place, old = self.find(key), self.args.get(key)
        new = old if value is _GONE else value
        if self.written(to) is not None:
            if repr(self.args.get(to)) == repr(new):
                return self.delete(finding, key, f"`{to}` says the same")
            raise Leave(f"`{to}` is there too, with another value")
        edits, what = [self.source.renamed(place.key, to)], f"`{key}` -> `{to}`"
        if value is not _GONE:
            what = f"`{key}: {self.source.plain(place.value)}` -> `{to}: {value}`"
            edits.append(self.source.replaced(place.value, str(value)))
        return self.mend(finding, place, edits, what, {key: _GONE, to: new})


def _error(finding: Finding) -> tuple[str, str, str | None] | None:
    return (finding.layer, finding.code, finding.key) if finding.severity == "error" else None


def _errors(judged: Judged) -> Counter[tuple[str, str, str | None]]:
    return Counter(e for e in map(_error, judged.findings) if e is not None)


def _find(mapping: Node, name: str) -> Place | None:
    """The entry that a key's value comes from: the last of that name, else one that is merged in."""
    own = [(k, v) for k, v in mapping.entries if k.kind is yaml.ScalarEvent and k.value == name]
    if own:
        return Place(mapping, *own[-1])
    for key, value in mapping.entries:
        if key.value == "<<":
            source = value.resolved()
            for merged in source.items if source.kind is yaml.SequenceStartEvent else [source]:
                if (found := _find(merged.resolved(), name)) is not None:
                    return found
    return None


def _renamed(state: _State, finding: Finding, key: str) -> _Mend:
    to = _new_name(state, key)
    if to is None:
        raise Leave("what it is called now is not known")
    if (why := _UNLIKE.get(to)) is not None:
        raise Leave(why)
    if (key, to) in _OTHERWISE:
        raise Leave(f"`{to}` takes another value")
    value = state.args.get(key)
    if to == "activation_memory_budget" and isinstance(value, bool):
        return state.move(finding, key, to, _BUDGET[value])
    return state.move(finding, key, to)


def _new_name(state: _State, key: str) -> str | None:
    """What to write for a key: the entry script's own table decides, as it does for the finding."""
    moved = state.entry.moved.get(key)
    if moved is not None and moved.to in state.schema.fields:
        return moved.to
    source, script = state.judged.upstream, state.schema.script
    assert source is not None
    past = functools.partial(upstream.past, source, script)
    events = past(key)
    if events and events[0].gone:
        return history.called_now(events[0], past, state.schema.fields)
    made = history.formerly(key, script, state.schema.fields)
    return None if made is None else made.key


def _removed(state: _State, finding: Finding, key: str) -> _Mend:
    moved = state.entry.moved.get(key)
    return state.delete(finding, key, "nothing takes it" if moved is None else moved.why)


def _unread(state: _State, finding: Finding, key: str) -> _Mend:
    for partner in _NEEDED_BY.get(key, ()):
        if state.args.get(partner) is not None:
            raise Leave(f"it says something about `{partner}`")
    # a note is about a value that asks for nothing
    if key in state.entry.instead and finding.severity != "note":
        raise Leave("what it asks for has to be said otherwise")
    return state.delete(finding, key, "nothing reads it")


def _abbreviated(state: _State, finding: Finding, key: str) -> _Mend | None:
    flag = state.schema.taken_as(key)
    return None if flag is None or flag.negated else state.move(finding, key, flag.name)


def _unknown(state: _State, finding: Finding, key: str) -> _Mend | None:
    """Only what is no guess: another case or other separators."""
    same = [name for name in state.schema.fields if _folded(name) == _folded(key)]
    return state.move(finding, key, same[0]) if len(same) == 1 else None


def _folded(name: str) -> str:
    return re.sub(r"[-_.]", "", name).lower()


def _dataset_name(state: _State, finding: Finding, key: str) -> _Mend:
    """One set, all of it."""
    listed = _no_other_data(state, "dataset_name")
    place, value = state.find("dataset_name"), state.args["dataset_name"]
    raw = state.source.plain(place.value)
    if not isinstance(value, str) or not value or "${" in raw:
        raise Leave("its value is no name")
    if not re.fullmatch(r"[\w./~@+-]+|'[^']*'|\"[^\"\\]*\"", raw):
        raw = json.dumps(value, ensure_ascii=False)
    edits = (
        state.source.renamed(place.key, listed), state.source.replaced(place.value, f"[{raw}, 1.0]"),
    )  # fmt: skip
    what = f"`dataset_name: {brief(value)}` -> `{listed}: [{brief(value)}, 1.0]`"
    effects = {"dataset_name": _GONE, listed: [value, 1.0]}
    return state.mend(finding, place, edits, what, effects)


def _dataset_mixer(state: _State, finding: Finding, key: str) -> _Mend:
    """`{name: amount}` as `[name, amount]`: what finetune.py:498 would do, could it be reached."""
    mixer = state.args.get("dataset_mixer")
    if mixer == {}:
        return state.delete(finding, "dataset_mixer", "it is empty")
    listed = _no_other_data(state, "dataset_mixer")
    place, own = state.find("dataset_mixer"), state.args["dataset_mixer"]
    if not isinstance(own, dict) or [k.value for k, _ in place.value.entries] != list(own):
        raise Leave("its entries do not all stand there, once each")
    amounts = _amounts(own)
    edits = [
        state.source.renamed(place.key, listed),
        *state.source.listed(place.value, [raw for _, raw in amounts]),
    ]
    words = [word for name, (value, _) in zip(own, amounts, strict=True) for word in (name, value)]
    said = [f"{name}: {raw}" for name, (_, raw) in zip(own, amounts, strict=True) if raw]
    what = f"`dataset_mixer` -> `{listed}`, names and amounts in turn"
    what += (
        f"; written with a point, which makes it a share: {brief(', '.join(said))}" if said else ""
    )
    return state.mend(finding, place, edits, what, {"dataset_mixer": _GONE, listed: words})


def _no_other_data(state: _State, key: str) -> str:
    """The name of the list to write; raises Leave where more than `key` says which data to take."""
    listed = state.entry.names.data
    for other in ("dataset_name", "dataset_mixer", "dataset_config_name"):
        if other != key and state.args.get(other) is not None:
            raise Leave(f"`{other}` is there too, and has no place in `{listed}`")
    if state.args.get(listed) is not None or listed in state.args:
        raise Leave(f"`{listed}` is there too")
    return listed


def _amounts(mixer: Mapping[str, Any]) -> list[tuple[Any, str | None]]:
    """Each amount as it is in the list, with its new text where it cannot stand as it is written.

    With a number above 1 among them they were counts, else shares (utils.py:527); in a list each
    speaks for itself, by its point. Raises Leave where that leaves two readings.
    """
    numbers = [_number(name, value) for name, value in mixer.items()]
    counts = any(number > 1 for number in numbers)
    mixed = counts and any(isinstance(number, float) for number in numbers)
    amounts: list[tuple[Any, str | None]] = []
    for (name, value), number in zip(mixer.items(), numbers, strict=True):
        if isinstance(number, int) and number == 1 and mixed:
            raise Leave(f"the amount 1 of {brief(name)} may be a share or a count")
        if isinstance(number, int) and number == 1 and not counts:
            amounts.append((1.0, "1.0"))
        elif isinstance(number, float) and "." not in str(value):
            plain = format(Decimal(str(value)), "f")
            amounts.append((plain, f'"{plain}"'))
        else:
            amounts.append((value, None))
    return amounts


def _number(name: str, value: Any) -> int | float:
    number: int | float | None = None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = float(value) if "." in value else int(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if number is None or not math.isfinite(number) or number <= 0:
        raise Leave(f"`{brief(value)}` is no amount of {brief(name)}")
    if isinstance(number, float) and number > 1:
        raise Leave(f"the amount {number} of {brief(name)} is neither a share nor a count")
    return number


_MENDERS: Mapping[str, Callable[[_State, Finding, str], _Mend | None]] = {
    "renamed-key": _renamed,
    "removed-key": _removed,
    "unread-key": _unread,
    "abbreviated-key": _abbreviated,
    "unknown-key": _unknown,
}
_DATA: Mapping[tuple[str, str | None], Callable[[_State, Finding, str], _Mend | None]] = {
    ("bad-value", "args.dataset_mixer"): _dataset_mixer,
    ("two-data-sources", "args.dataset_mixer"): _dataset_mixer,
    ("two-data-sources", "args.dataset_name"): _dataset_name,
}
