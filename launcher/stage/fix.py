"""`launch validate-config --fix`: the text of a stage file with only the faulty spans edited.

Keys are renamed and deleted, and a data set or a mixer is written as a mixer list. PyYAML's marks say where
they stand: comments, quotes, order, line ends and blank lines stay byte for byte. Every edit is tried before
it is believed: the new text is loaded and judged, its own fault must have gone, no error may come, and no
value but those meant may differ. What is not mended is left with the reason.
"""

import contextlib
import errno
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from launcher import files
from launcher.config import load
from launcher.config.document import KEPT, LOADER, bad
from launcher.errors import Finding, InvalidConfig, NotReady, brief
from launcher.stage import stage
from launcher.stage.stage import Judged
from launcher.upstream.entry import DATA_FILE
from launcher.upstream.locate import Locator
from launcher.upstream.trainers import entry_of

BOM = b"\xef\xbb\xbf"
_GONE = object()
_ARGS: Mapping[str, tuple[str, ...]] = {"stage": ("args",), "wrapped": ("open_instruct", "args"), "flat": ()}
# renames whose value would have to be another one too
_OTHER_VALUE = {
    ("activation_memory_budget", "gradient_checkpointing"),
    ("use_flash_attn", "attn_implementation"),
    ("max_steps", "max_train_steps"),
    ("warmup_ratio", "warmup_steps"),
}
# Below 1 switches checkpointing on (dpo_tune_cache.py::main[elif args.activation_memory_budget]), the default does
# not.
_BUDGET = {True: 0.5, False: 1.0}
# Names for the same idea under which the same value means nothing, or something else.
_UNLIKE: Mapping[str, str] = {
    "dataset_name": "it takes one set, and no amount",
    "chat_template_path": "it takes a file or a model, no name of a template",
}
_DATA = ("dataset_name", "dataset_mixer", "dataset_config_name", DATA_FILE)
_REST_OF_LINE = re.compile(r"[ \t]*(?:#[^\r\n]*)?(?:\r?\n|\Z)")


class Change(NamedTuple):
    """One edit, in words for people; `line` is 1-based, of the text as it was."""

    line: int
    key: str
    what: str


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
        return self.after != self.before

    def with_reasons(self, found: Sequence[Finding]) -> tuple[Finding, ...]:
        """Findings of the file as it stands now, with why those that could be mended were not."""
        helps = {(f.code, f.key, f.message): f.help for f in self.left}
        return tuple(replace(f, help=helps.get((f.code, f.key, f.message), f.help)) for f in found)

    def as_json(self) -> dict[str, object]:
        changes = [change._asdict() for change in self.changes]
        return {"path": str(self.path), "changed": self.changed, "changes": changes}


def of_file(path: Path, *, stage_name: str | None = None, locator: Locator | None = None) -> Fix:
    """The mended text of a file, judged as `stage.judge` does it; writes nothing.

    Raises InvalidConfig where the file cannot be read at all: then there is nothing to mend.
    """
    locator = locator or Locator()

    def judged(text: str | None = None) -> Judged:
        return stage.judge(load.load(path, text=text), stage=stage_name, locator=locator)

    first = judged()
    before = _read(path).decode("utf-8-sig")
    file, changes = _File(before, first), list[Change]()
    while True:
        declined, known = dict[Finding, str](), len(changes)
        for finding in file.judged.findings:
            try:
                # an edit before may have answered it
                mend = _mend(file, finding) if _count(finding, file.judged) else None
                if mend is None:
                    continue
                text = file.edited(mend.edits)
                new = _File(text, judged(text))
                _require_better(finding, mend, file.judged, new.judged)
            except Leave as reason:
                declined[finding] = str(reason)
            except InvalidConfig as error:
                declined[finding] = f"then {error.findings[0].message}"
            else:
                line = first.config.origin(finding.key or "").line or 1
                changes.append(Change(line, finding.key or "", mend.what))
                file = new
        if len(changes) == known:
            break
    changes.sort(key=lambda change: change.line)
    left = tuple(
        replace(f, help=f"{f'{f.help}; ' if f.help else ''}--fix leaves it: {declined[f]}") if f in declined else f
        for f in file.judged.findings
    )
    return Fix(path=path, before=before, after=file.text, changes=tuple(changes), left=left)


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
    try:
        mode = target.stat().st_mode
        # replacing needs the folder's permission only: the file's own is asked here
        if not mode & 0o222 or not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
        files.write_bytes(target, mark + fix.after.encode("utf-8"), mode=0o600)
        target.chmod(mode & 0o7777)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise NotReady(bad(fix.path, "unwritable-file", message, None, f"chmod u+w {fix.path}")) from None


def _read(path: Path) -> bytes:
    try:
        return files.read_bytes(path)
    except OSError as error:
        raise NotReady(bad(path, "unreadable-file", f"cannot be read: {error.strerror or error}")) from None


class Leave(Exception):
    """Something is not mended; the text says why."""


class _Edit(NamedTuple):
    # characters `start` to `end` become `text`

    start: int
    end: int
    text: str = ""


class _Entry(NamedTuple):
    mapping: yaml.MappingNode
    key: yaml.ScalarNode
    value: yaml.Node


class _Mend(NamedTuple):
    """The edits that answer one finding; `effects` are the arguments that differ afterwards."""

    edits: tuple[_Edit, ...]
    what: str
    effects: Mapping[str, object]


class _File:
    """A text that is known to load, and what is found about it.

    An edit need not see every way to write YAML: what it gets wrong, `_require_better` refuses. Comments
    are all that it has to keep by itself.
    """

    def __init__(self, text: str, judged: Judged) -> None:
        self.text, self.judged, self.args = text, judged, judged.config.args
        if judged.schema is not None:
            self.schema, self.entry = judged.schema, entry_of(judged.schema)
        self.root = None
        # an anchor that is given twice: the composer alone objects
        with contextlib.suppress(yaml.YAMLError):
            self.root = yaml.compose(text, Loader=LOADER)

    def written(self, key: str) -> _Entry | None:
        """Where an argument is written in this file; of one that is given twice the last."""
        found: _Entry | None = None
        node: Any = self.root
        for name in (*_ARGS[self.judged.config.shape], key):
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            found = next((_Entry(node, *pair) for pair in reversed(pairs) if pair[0].value == name), None)
            if found is None:
                return None
            node = found.value
        return found

    def find(self, key: str) -> _Entry:
        """The same; raises Leave where it is not."""
        if (found := self.written(key)) is None:
            raise Leave("it is not written in this file, or in an unusual way")
        return found

    def end(self, node: yaml.Node) -> int:
        """Where a node ends: the mark of a block says where the next token begins."""
        start, end = node.start_mark.index, int(node.end_mark.index)
        if isinstance(node, yaml.CollectionNode) and not node.flow_style:
            last = node.value[-1] if isinstance(node, yaml.SequenceNode) else node.value[-1][1]
            if last.start_mark.index < start:
                raise Leave("it holds an alias")
            return self.end(last)
        if start == end or getattr(node, "style", None) in {"|", ">"}:
            return len(self.text[:end].rstrip())
        return end

    def raw(self, node: yaml.Node) -> str:
        return self.text[node.start_mark.index : self.end(node)]

    def rename(self, key: yaml.ScalarNode, name: str) -> _Edit:
        raw, start = self.raw(key), key.start_mark.index
        return _Edit(start, start + len(raw), raw.replace(key.value, name))

    def set(self, value: yaml.Node, raw: str) -> _Edit:
        if not isinstance(value, yaml.ScalarNode) or "\n" in self.raw(value):
            raise Leave("its value is not on one line")
        return _Edit(value.start_mark.index, self.end(value), raw)

    def delete(self, key: str, why: str) -> _Mend:
        """Take one argument out of the file with its trailing comment; a comment above it stays."""
        found = self.find(key)
        start = found.key.start_mark.index
        if found.value.start_mark.index < start:
            raise Leave("its value is an alias")
        begin = self.text.rfind("\n", 0, start) + 1
        rest = _REST_OF_LINE.match(self.text, max(self.end(found.key), self.end(found.value)))
        if found.mapping.flow_style or rest is None or self.text[begin:start].strip(" \t"):
            raise Leave("it shares its line with something else")
        if not rest[0].endswith("\n"):
            # the last line, without a line end: then the file goes on having none
            begin = len(self.text[:begin].rstrip("\r\n"))
        raw = brief(" ".join(self.raw(found.value).split()), 40)
        return _Mend((_Edit(begin, rest.end()),), f"`{key}: {raw}` deleted: {why}", {key: _GONE})

    def comment_out(self, key: str) -> _Mend:
        """Make a comment of an argument that changed what was trained: `stage.arguments.lost` warns of it."""
        (whole,) = self.delete(key, "").edits
        found = self.find(key)
        start = found.key.start_mark.index
        raw = self.text[start : whole.end].rstrip("\r\n")
        if "\n" in raw:
            raw = f"{key}: {json.dumps(self.args.get(key), ensure_ascii=False, default=str)}"
        indent = self.text[self.text.rfind("\n", 0, start) + 1 : start]
        line_end = "\r\n" if "\r\n" in self.text else "\n"
        # of a last line without an end, the line end before it is deleted too
        is_unended = not self.text[: whole.end].endswith("\n")
        before = line_end if is_unended else ""
        after = "" if is_unended else line_end
        text = f"{before}{indent}{KEPT} {raw}{after}"
        what = f"`{brief(raw, 40)}` made a comment: it changed what is trained, and nothing takes it"
        return _Mend((_Edit(whole.start, whole.end, text),), what, {key: _GONE})

    def move(self, key: str, to: str, value: object = _GONE) -> _Mend:
        """Another name for one argument, with another value where one is given."""
        found, old = self.find(key), self.args.get(key)
        new = old if value is _GONE else value
        if self.written(to) is not None:
            if repr(self.args.get(to)) == repr(new):
                return self.delete(key, f"`{to}` says the same")
            raise Leave(f"`{to}` is there too, with another value")
        edits, what = [self.rename(found.key, to)], f"`{key}` -> `{to}`"
        if value is not _GONE:
            what = f"`{key}: {self.raw(found.value)}` -> `{to}: {value}`"
            edits.append(self.set(found.value, str(value)))
        return _Mend(tuple(edits), what, {key: _GONE, to: new})

    def as_list(self, mapping: yaml.MappingNode, amounts: Sequence[str]) -> Iterator[_Edit]:
        start, end = mapping.start_mark.index, mapping.end_mark.index
        newline = "\r\n" if "\r\n" in self.text else "\n"
        if mapping.flow_style:
            yield from (_Edit(start, start + 1, "["), _Edit(end - 1, end, "]"))
        for (key, value), amount in zip(mapping.value, amounts, strict=True):
            begin, after = key.start_mark.index, self.end(key)
            indent = self.text[self.text.rfind("\n", 0, begin) + 1 : begin]
            if not mapping.flow_style:
                yield _Edit(begin, begin, "- ")
            between = ", " if mapping.flow_style else f"{newline}{indent}- "
            if "#" in self.text[after : value.start_mark.index]:
                raise Leave("a comment is between a name and its amount")
            yield _Edit(after, value.start_mark.index, between)
            yield self.set(value, amount)

    def edited(self, edits: Sequence[_Edit]) -> str:
        text = self.text
        for edit in sorted(edits, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text


def _require_better(finding: Finding, mend: _Mend, old: Judged, new: Judged) -> None:
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
    if _count(finding, new) >= _count(finding, old):
        raise Leave("the fault would still be there")


def _error(finding: Finding) -> tuple[str, str, str, str | None]:
    return finding.severity, finding.layer, finding.code, finding.key


def _count(finding: Finding, judged: Judged) -> int:
    fault = finding.code, finding.key, finding.file
    return sum((f.code, f.key, f.file) == fault for f in judged.findings)


_MECHANICAL = {"renamed-key", "removed-key", "unread-key", "abbreviated-key", "unknown-key"}
_OF_KEY = {"bad-value": {"args.dataset_mixer"}, "two-data-sources": {"args.dataset_mixer", "args.dataset_name"}}


def _mend(file: _File, finding: Finding) -> _Mend | None:
    """What answers a finding; None where nothing mechanical does."""
    code, key = finding.code, (finding.key or "").removeprefix("args.")
    is_mechanical = code in _MECHANICAL or finding.key in _OF_KEY.get(code, ())
    if not is_mechanical or file.judged.schema is None:
        return None
    if finding.file != str(file.judged.config.path):
        raise Leave(f"it is written in {finding.file}")
    match code:
        case "renamed-key" | "abbreviated-key":
            return _renamed(file, finding, key)
        case "removed-key" if key == DATA_FILE:
            return _train_file(file, key)
        case "removed-key" if key in file.entry.lost and file.entry.lost[key].mattered(file.args.get(key)):
            return file.comment_out(key)
        case "removed-key":
            moved = file.entry.moved.get(key)
            return file.delete(key, "nothing takes it" if moved is None else moved.why)
        case "unread-key":
            if key == "dataset_config_name":
                _require_alone(file, key, _DATA)
            # a note is about a value that asks for nothing
            if key in file.entry.instead and finding.severity != "note":
                raise Leave("not fixed automatically: replace it by hand")
            return file.delete(key, "nothing reads it")
        case "unknown-key":
            # only what is no guess: another case or other separators
            same = [name for name in file.schema.fields if _folded(name) == _folded(key)]
            return file.move(key, same[0]) if len(same) == 1 else None
    if not file.entry.mixes:
        raise Leave("which of the two is meant the file does not say")
    return _dataset_mixer(file, key) if key == "dataset_mixer" else _dataset_name(file, key)


def _renamed(file: _File, finding: Finding, key: str) -> _Mend:
    named = re.match(r"write `([^`]+)`", finding.help or "")
    if named is None or named[1] not in file.schema.fields:
        raise Leave("what it is called now is not known")
    to, value = named[1], file.args.get(key)
    if finding.code == "renamed-key" and to in _UNLIKE:
        raise Leave(_UNLIKE[to])
    if (key, to) in _OTHER_VALUE:
        raise Leave(f"`{to}` takes another value")
    if to == "activation_memory_budget" and isinstance(value, bool):
        return file.move(key, to, _BUDGET[value])
    return file.move(key, to)


def _folded(name: str) -> str:
    return re.sub(r"[-_.]", "", name).lower()


def _train_file(file: _File, key: str) -> _Mend:
    """dataset_transformation.py::DatasetConfig.__post_init__[.jsonl],
    dataset_transformation.py::DatasetConfig.__post_init__[elif os.path.exists]: the only data as a mixer list, which
    reads two kinds of files.
    """
    value = file.args.get(key)
    if not file.entry.mixes:
        raise Leave("this trainer takes no list of sets")
    if not isinstance(value, str) or not value.endswith((".jsonl", ".parquet")):
        raise Leave("open-instruct reads .jsonl and .parquet files alone: `launch data convert` writes one")
    return _dataset_name(file, key)


def _dataset_name(file: _File, key: str) -> _Mend:
    listed = file.entry.names.data
    _require_alone(file, key, (*_DATA, listed))
    found, value = file.find(key), file.args[key]
    raw = file.raw(found.value)
    if not isinstance(value, str) or not value or "${" in raw:
        raise Leave("its value is not a name")
    if not re.fullmatch(r"[\w./~@+-]+|'[^']*'|\"[^\"\\]*\"", raw):
        raw = json.dumps(value, ensure_ascii=False)
    edits = file.rename(found.key, listed), file.set(found.value, f"[{raw}, 1.0]")
    what = f"`{key}: {brief(value)}` -> `{listed}: [{brief(value)}, 1.0]`"
    return _Mend(edits, what, {key: _GONE, listed: [value, 1.0]})


def _dataset_mixer(file: _File, key: str) -> _Mend:
    """`{name: amount}` as `[name, amount]`: what finetune.py::main[if args.dataset_mixer] would do, could it be
    reached.
    """
    mixer, listed = file.args.get(key), file.entry.names.data
    if mixer == {}:
        return file.delete(key, "it is empty")
    _require_alone(file, key, (*_DATA, listed))
    found = file.find(key)
    node: Any = found.value
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    if not isinstance(mixer, dict) or [name.value for name, _ in pairs] != list(mixer):
        raise Leave("not every entry is there exactly once")
    amounts = _amounts(mixer)
    # as written, unless it becomes another number: 1 is none to YAML where 1.0 is meant
    raw = [
        file.raw(value) if repr(old) == repr(new) else str(new)
        for (_, value), old, new in zip(pairs, mixer.values(), amounts, strict=True)
    ]
    words = [word for pair in zip(mixer, amounts, strict=True) for word in pair]
    edits = file.rename(found.key, listed), *file.as_list(node, raw)
    return _Mend(edits, f"`{key}` -> `{listed}`, names and amounts in turn", {key: _GONE, listed: words})


def _require_alone(file: _File, key: str, others: Sequence[str]) -> None:
    """Raise Leave where more than `key` says which data to take."""
    for other in others:
        if other != key and file.args.get(other) is not None:
            raise Leave(f"`{other}` is there too, and says which data to take")


def _amounts(mixer: Mapping[str, Any]) -> list[float | int]:
    """Each amount as it is in a list, where a count is a whole number and a share has a point.

    In a mapping 1 is a share, all of a set, unless a number above 1 shows that they are counts
    (utils.py::get_datasets[if any(frac_or_samples > 1]). Raises Leave where an amount is neither, or 1 may be both.
    """
    counts = any(isinstance(value, int) and value > 1 for value in mixer.values())
    shares = any(isinstance(value, float) for value in mixer.values())
    for name, value in mixer.items():
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        is_share = isinstance(value, float) and 0 < value <= 1 and "e" not in str(value)
        if not is_count and not is_share:
            raise Leave(f"`{brief(value)}` of {brief(name)} is neither a share nor a count")
        if is_count and value == 1 and counts and shares:
            raise Leave(f"the amount 1 of {brief(name)} may be a share or a count")
    return list(mixer.values()) if counts else [float(value) for value in mixer.values()]
