"""`launch validate-config --fix`: the text of a stage file with only the faulty spans edited.

Keys are renamed and deleted, and a data set or a mixer is written as a mixer list. PyYAML's marks
say where they stand: comments, quotes, order, line ends and blank lines stay byte for byte. Every
edit is tried first: the new text is loaded and judged, its own fault must have gone, no error may
be new, and no other value may differ. A finding that is not fixed says why.
"""

import contextlib
import errno
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from launcher import files
from launcher.config import load
from launcher.config.document import KEPT, LOADER, bad
from launcher.errors import Finding, InvalidConfig, NotReady, shorten
from launcher.lazy_dataclass import dataclass
from launcher.stage import stage
from launcher.stage.stage import Judged
from launcher.upstream.entry import DATA_FILE
from launcher.upstream.locate import Locator
from launcher.upstream.trainers import find_entry

BOM = b"\xef\xbb\xbf"
_GONE = object()
_ARGS: Mapping[str, tuple[str, ...]] = {
    "stage": ("args",),
    "wrapped": ("open_instruct", "args"),
    "flat": (),
}
# renames whose value would have to change too
_OTHER_VALUE = {
    ("activation_memory_budget", "gradient_checkpointing"),
    ("use_flash_attn", "attn_implementation"),
    ("max_steps", "max_train_steps"),
    ("warmup_ratio", "warmup_steps"),
}
# a budget below 1 switches checkpointing on
# (dpo_tune_cache.py::main[elif args.activation_memory_budget])
_BUDGET = {True: 0.5, False: 1.0}
# new names under which the same value means nothing, or something else
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
    """A file's text before and after; `left` are the findings about it afterwards.

    The help of a finding that could have been fixed and was not says why.
    """

    path: Path
    before: str
    after: str
    changes: tuple[Change, ...]
    left: tuple[Finding, ...]

    @property
    def changed(self) -> bool:
        return self.after != self.before

    def with_reasons(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """Findings of the file as it is now, with the reasons why some were not fixed."""
        helps = {_identify(finding): finding.help for finding in self.left}
        explained = []
        for finding in findings:
            help = helps.get(_identify(finding), finding.help)
            explained.append(replace(finding, help=help))
        return tuple(explained)

    def as_json(self) -> dict[str, object]:
        changes = [change._asdict() for change in self.changes]
        return {"path": str(self.path), "changed": self.changed, "changes": changes}


def _identify(finding: Finding) -> tuple[str, str | None, str]:
    return finding.code, finding.key, finding.message


Judge = Callable[[str], Judged]
"""Judges a text as that of the file."""


def fix_file(path: Path, *, stage_name: str | None = None, locator: Locator | None = None) -> Fix:
    """The fixed text of a file, judged as `stage.judge_stage_file` does it; writes nothing.

    Raises InvalidConfig if the file cannot be read at all.
    """
    locator = locator or Locator()

    def judge(text: str | None) -> Judged:
        return stage.judge_stage_file(load.load(path, text=text), stage=stage_name, locator=locator)

    first = judge(None)
    before = _read_file(path).decode("utf-8-sig")
    file = _File(before, first)
    changes: list[Change] = []
    is_changed = True
    while is_changed:
        is_changed = False
        reasons: dict[Finding, str] = {}
        for finding in file.judged.findings:
            try:
                edit = _find_edit(file, finding)
                if edit is None:
                    continue
                file = _try_edit(file, finding, edit, judge)
            except Declined as reason:
                reasons[finding] = str(reason)
                continue
            line = first.config.origin(finding.key or "").line or 1
            changes.append(Change(line, finding.key or "", edit.what))
            is_changed = True
    changes.sort(key=lambda change: change.line)
    left = [_add_reason(finding, reasons.get(finding)) for finding in file.judged.findings]
    return Fix(path=path, before=before, after=file.text, changes=tuple(changes), left=tuple(left))


def _add_reason(finding: Finding, reason: str | None) -> Finding:
    if reason is None:
        return finding
    help = f"--fix leaves it: {reason}"
    if finding.help:
        help = f"{finding.help}; {help}"
    return replace(finding, help=help)


def apply(fix: Fix) -> None:
    """Write the new text in place of the old one, in one step; an unchanged file is not touched.

    Permissions, a byte order mark and the target of a link stay what they are. Raises NotReady if
    the file cannot be written, or was changed since it was judged.
    """
    if not fix.changed:
        return
    target = Path(os.path.realpath(fix.path))
    old = _read_file(target)
    if old.removeprefix(BOM).decode("utf-8", "replace") != fix.before:
        message = "was changed in the meantime, and not written"
        raise NotReady(bad(fix.path, "file-changed", message, None, "run it again"))
    new = fix.after.encode("utf-8")
    if old.startswith(BOM):
        new = BOM + new
    try:
        mode = target.stat().st_mode
        # replacing a file needs the folder's permission only: the file's own is tested here
        if not mode & 0o222 or not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
        files.write_bytes(target, new, mode=0o600)
        target.chmod(mode & 0o7777)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        help = f"chmod u+w {fix.path}"
        raise NotReady(bad(fix.path, "unwritable-file", message, None, help)) from None


def _read_file(path: Path) -> bytes:
    try:
        return files.read_bytes(path)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise NotReady(bad(path, "unreadable-file", message)) from None


class Declined(Exception):
    """A finding is not fixed; the text says why."""


class _Span(NamedTuple):
    """Characters `start` to `end` become `text`."""

    start: int
    end: int
    text: str = ""


class _Argument(NamedTuple):
    """Where an argument is written."""

    mapping: yaml.MappingNode
    key: yaml.ScalarNode
    value: yaml.Node


class _Edit(NamedTuple):
    """What fixes one finding; `effects` are the arguments that differ afterwards."""

    spans: tuple[_Span, ...]
    what: str
    effects: Mapping[str, object]


class _File:
    """A text that loads, and its findings.

    An edit need not know every way to write YAML: `_try_edit` refuses what it gets wrong. Only
    comments have to be kept here.
    """

    def __init__(self, text: str, judged: Judged) -> None:
        self.text = text
        self.judged = judged
        self.args = judged.config.args
        if judged.schema is not None:
            self.schema = judged.schema
            self.entry = find_entry(judged.schema)
        self.root: yaml.Node | None = None
        # the composer refuses an anchor that is given twice, the loader does not
        with contextlib.suppress(yaml.YAMLError):
            self.root = yaml.compose(text, Loader=LOADER)

    def written(self, key: str) -> _Argument | None:
        """Where an argument is written in this file; the last place of several."""
        argument: _Argument | None = None
        node = self.root
        for name in (*_ARGS[self.judged.config.shape], key):
            if not isinstance(node, yaml.MappingNode):
                return None
            argument = None
            for key_node, value_node in node.value:
                if key_node.value == name:
                    argument = _Argument(node, key_node, value_node)
            if argument is None:
                return None
            node = argument.value
        return argument

    def find(self, key: str) -> _Argument:
        """The same; raises Declined if it is not written here."""
        argument = self.written(key)
        if argument is None:
            raise Declined("it is not written in this file, or in an unusual way")
        return argument

    def end(self, node: yaml.Node) -> int:
        """Where a node ends: the mark of a block says where the next token begins."""
        start = node.start_mark.index
        end = int(node.end_mark.index)
        if isinstance(node, yaml.CollectionNode) and not node.flow_style:
            last = node.value[-1]
            if isinstance(node, yaml.MappingNode):
                last = last[1]
            if last.start_mark.index < start:
                raise Declined("it holds an alias")
            return self.end(last)
        if start == end or getattr(node, "style", None) in {"|", ">"}:
            return len(self.text[:end].rstrip())
        return end

    def line_start(self, position: int) -> int:
        return self.text.rfind("\n", 0, position) + 1

    def raw(self, node: yaml.Node) -> str:
        return self.text[node.start_mark.index : self.end(node)]

    def rename(self, key: yaml.ScalarNode, name: str) -> _Span:
        raw = self.raw(key)
        start = key.start_mark.index
        return _Span(start, start + len(raw), raw.replace(key.value, name))

    def set(self, value: yaml.Node, raw: str) -> _Span:
        if not isinstance(value, yaml.ScalarNode) or "\n" in self.raw(value):
            raise Declined("its value is not on one line")
        return _Span(value.start_mark.index, self.end(value), raw)

    def delete(self, key: str, why: str) -> _Edit:
        """Delete one argument with its trailing comment; a comment above it stays."""
        argument = self.find(key)
        name = argument.key
        value = argument.value
        start = name.start_mark.index
        if value.start_mark.index < start:
            raise Declined("its value is an alias")
        begin = self.line_start(start)
        before = self.text[begin:start].strip(" \t")
        end = max(self.end(name), self.end(value))
        rest = _REST_OF_LINE.match(self.text, end)
        if argument.mapping.flow_style or rest is None or before:
            raise Declined("it shares its line with something else")
        if not rest[0].endswith("\n"):
            # a last line without a line end: the file goes on having none
            begin = len(self.text[:begin].rstrip("\r\n"))
        raw = " ".join(self.raw(value).split())
        what = f"`{key}: {shorten(raw, 40)}` deleted: {why}"
        line = _Span(begin, rest.end())
        return _Edit((line,), what, {key: _GONE})

    def comment_out(self, key: str) -> _Edit:
        """Make an argument that changed the training a comment; `arguments.find_lost` warns."""
        (line,) = self.delete(key, "").spans
        start = self.find(key).key.start_mark.index
        raw = self.text[start : line.end].rstrip("\r\n")
        end = start + len(raw)
        if "\n" in raw:
            value = json.dumps(self.args.get(key), ensure_ascii=False, default=str)
            raw = f"{key}: {value}"
        why = "it changed what is trained, and nothing takes it"
        what = f"`{shorten(raw, 40)}` made a comment: {why}"
        return _Edit((_Span(start, end, f"{KEPT} {raw}"),), what, {key: _GONE})

    def move(self, key: str, to: str, value: object = _GONE) -> _Edit:
        """Rename one argument, and change its value if one is given."""
        argument = self.find(key)
        spans = [self.rename(argument.key, to)]
        what = f"`{key}` -> `{to}`"
        if value is _GONE:
            value = self.args.get(key)
        else:
            what = f"`{key}: {self.raw(argument.value)}` -> `{to}: {value}`"
            spans.append(self.set(argument.value, str(value)))
        if self.written(to) is None:
            return _Edit(tuple(spans), what, {key: _GONE, to: value})
        if repr(self.args.get(to)) != repr(value):
            raise Declined(f"`{to}` is there too, with another value")
        return self.delete(key, f"`{to}` says the same")

    def as_list(self, mapping: yaml.MappingNode, amounts: Sequence[str]) -> Iterator[_Span]:
        """A mapping of names to amounts as a list of both in turn."""
        if mapping.flow_style:
            start = mapping.start_mark.index
            end = mapping.end_mark.index
            yield _Span(start, start + 1, "[")
            yield _Span(end - 1, end, "]")
        line_end = "\r\n" if "\r\n" in self.text else "\n"
        for (key, value), amount in zip(mapping.value, amounts, strict=True):
            begin = key.start_mark.index
            after = self.end(key)
            between = ", "
            if not mapping.flow_style:
                yield _Span(begin, begin, "- ")
                indent = self.text[self.line_start(begin) : begin]
                between = f"{line_end}{indent}- "
            if "#" in self.text[after : value.start_mark.index]:
                raise Declined("a comment is between a name and its amount")
            yield _Span(after, value.start_mark.index, between)
            yield self.set(value, amount)

    def edited(self, spans: Sequence[_Span]) -> str:
        text = self.text
        for span in sorted(spans, reverse=True):
            text = text[: span.start] + span.text + text[span.end :]
        return text


def _try_edit(file: _File, finding: Finding, edit: _Edit, judge: Judge) -> _File:
    """The file after an edit; raises Declined if it is not better."""
    text = file.edited(edit.spans)
    try:
        new = judge(text)
    except InvalidConfig as error:
        raise Declined(f"then {error.findings[0].message}") from None
    old = file.judged
    if new.stage != old.stage:
        raise Declined(f"the file would be taken for a {new.stage} stage")
    if repr(old.config.options) != repr(new.config.options):
        raise Declined("something beside the arguments would change")
    expected = {**old.config.args, **edit.effects}
    for key in {**expected, **new.config.args}:
        # a value of a parent may appear in place of a deleted one
        if expected.get(key) is _GONE:
            continue
        if repr(expected.get(key, _GONE)) != repr(new.config.args.get(key, _GONE)):
            raise Declined(f"another argument would change: `{key}`")
    appeared = Counter(map(_classify, new.findings)) - Counter(map(_classify, old.findings))
    for other in new.findings:
        if other.severity == "error" and _classify(other) in appeared:
            raise Declined(f"then {other.message}")
    if _count_faults(finding, new) >= _count_faults(finding, old):
        raise Declined("the fault would still be there")
    return _File(text, new)


def _classify(finding: Finding) -> tuple[str, str, str, str | None]:
    return finding.severity, finding.layer, finding.code, finding.key


def _count_faults(finding: Finding, judged: Judged) -> int:
    faults = [(other.code, other.key, other.file) for other in judged.findings]
    return faults.count((finding.code, finding.key, finding.file))


_FIXABLE = {"renamed-key", "removed-key", "unread-key", "abbreviated-key", "unknown-key"}
_FIXABLE_DATA = {
    ("bad-value", "args.dataset_mixer"),
    ("two-data-sources", "args.dataset_mixer"),
    ("two-data-sources", "args.dataset_name"),
}


def _find_edit(file: _File, finding: Finding) -> _Edit | None:
    """What fixes a finding; None if nothing mechanical does. Raises Declined."""
    code = finding.code
    is_fixable = code in _FIXABLE or (code, finding.key) in _FIXABLE_DATA
    # an earlier edit may have fixed it
    if not is_fixable or file.judged.schema is None or not _count_faults(finding, file.judged):
        return None
    if finding.file != str(file.judged.config.path):
        raise Declined(f"it is written in {finding.file}")
    key = (finding.key or "").removeprefix("args.")
    match code:
        case "renamed-key" | "abbreviated-key":
            return _edit_renamed_key(file, finding, key)
        case "removed-key":
            return _edit_removed_key(file, key)
        case "unread-key":
            if key == "dataset_config_name":
                _require_alone(file, key, _DATA)
            # a note is about a value that asks for nothing
            if key in file.entry.instead and finding.severity != "note":
                raise Declined("not fixed automatically: replace it by hand")
            return file.delete(key, "nothing reads it")
        case "unknown-key":
            # another case or other separators is no guess, everything else is
            same = [name for name in file.schema.fields if _fold_name(name) == _fold_name(key)]
            if len(same) != 1:
                return None
            return file.move(key, same[0])
    if not file.entry.mixes:
        raise Declined("which of the two is meant the file does not say")
    if key == "dataset_mixer":
        return _list_dataset_mixer(file, key)
    return _list_dataset_name(file, key)


def _edit_renamed_key(file: _File, finding: Finding, key: str) -> _Edit:
    advice = re.match(r"write `([^`]+)`", finding.help or "")
    if advice is None or advice[1] not in file.schema.fields:
        raise Declined("what it is called now is not known")
    to = advice[1]
    value = file.args.get(key)
    if finding.code == "renamed-key" and to in _UNLIKE:
        raise Declined(_UNLIKE[to])
    if (key, to) in _OTHER_VALUE:
        raise Declined(f"`{to}` takes another value")
    if to == "activation_memory_budget" and isinstance(value, bool):
        return file.move(key, to, _BUDGET[value])
    return file.move(key, to)


def _edit_removed_key(file: _File, key: str) -> _Edit:
    if key == DATA_FILE:
        return _list_train_file(file, key)
    lost = file.entry.lost.get(key)
    if lost is not None and lost.mattered(file.args.get(key)):
        return file.comment_out(key)
    moved = file.entry.moved.get(key)
    if moved is None:
        return file.delete(key, "nothing takes it")
    return file.delete(key, moved.why)


def _fold_name(name: str) -> str:
    return re.sub(r"[-_.]", "", name).lower()


def _list_train_file(file: _File, key: str) -> _Edit:
    """The only data as a mixer list, which reads two kinds of files.

    dataset_transformation.py::DatasetConfig.__post_init__[.jsonl],
    dataset_transformation.py::DatasetConfig.__post_init__[elif os.path.exists]
    """
    value = file.args.get(key)
    if not file.entry.mixes:
        raise Declined("this trainer takes no list of sets")
    if not isinstance(value, str) or not value.endswith((".jsonl", ".parquet")):
        reads = "open-instruct reads .jsonl and .parquet files alone"
        raise Declined(f"{reads}: `launch data convert` writes one")
    return _list_dataset_name(file, key)


def _list_dataset_name(file: _File, key: str) -> _Edit:
    to = file.entry.names.data
    _require_alone(file, key, (*_DATA, to))
    argument = file.find(key)
    value = file.args[key]
    raw = file.raw(argument.value)
    if not isinstance(value, str) or not value or "${" in raw:
        raise Declined("its value is not a name")
    if not re.fullmatch(r"[\w./~@+-]+|'[^']*'|\"[^\"\\]*\"", raw):
        raw = json.dumps(value, ensure_ascii=False)
    new_key = file.rename(argument.key, to)
    new_value = file.set(argument.value, f"[{raw}, 1.0]")
    name = shorten(value)
    what = f"`{key}: {name}` -> `{to}: [{name}, 1.0]`"
    return _Edit((new_key, new_value), what, {key: _GONE, to: [value, 1.0]})


def _list_dataset_mixer(file: _File, key: str) -> _Edit:
    """`{name: amount}` as `[name, amount]`.

    That is what finetune.py::main[if args.dataset_mixer] would do, could it be reached.
    """
    mixer = file.args.get(key)
    to = file.entry.names.data
    if mixer == {}:
        return file.delete(key, "it is empty")
    _require_alone(file, key, (*_DATA, to))
    argument = file.find(key)
    node = argument.value
    if (
        not isinstance(mixer, dict)
        or not isinstance(node, yaml.MappingNode)
        or [name.value for name, _ in node.value] != list(mixer)
    ):
        raise Declined("not every entry is there exactly once")
    amounts = _convert_amounts(mixer)
    raw: list[str] = []
    listed: list[object] = []
    for (_, value), name, amount in zip(node.value, mixer, amounts, strict=True):
        listed += [name, amount]
        written = str(amount)
        # 1 is a count in a list, 1.0 a share
        if repr(mixer[name]) == repr(amount):
            written = file.raw(value)
        raw.append(written)
    spans = (file.rename(argument.key, to), *file.as_list(node, raw))
    what = f"`{key}` -> `{to}`, names and amounts in turn"
    return _Edit(spans, what, {key: _GONE, to: listed})


def _require_alone(file: _File, key: str, others: Sequence[str]) -> None:
    """Raise Declined if more than `key` says which data to take."""
    for other in others:
        if other != key and file.args.get(other) is not None:
            raise Declined(f"`{other}` is there too, and says which data to take")


def _convert_amounts(mixer: Mapping[str, Any]) -> list[float | int]:
    """Each amount as it is in a list, where a count is a whole number and a share has a point.

    In a mapping 1 is a share, all of a set, unless a number above 1 shows that they are counts
    (utils.py::get_datasets[if any(frac_or_samples > 1]). Raises Declined if an amount is neither,
    or 1 may be both.
    """
    amounts = list(mixer.values())
    are_counts = any(isinstance(value, int) and value > 1 for value in amounts)
    are_shares = any(isinstance(value, float) for value in amounts)
    are_mixed = are_counts and are_shares
    for name, value in mixer.items():
        if not _is_count(value) and not _is_share(value):
            raise Declined(f"`{shorten(value)}` of {shorten(name)} is neither a share nor a count")
        if are_mixed and _is_count(value) and value == 1:
            raise Declined(f"the amount 1 of {shorten(name)} may be a share or a count")
    if are_counts:
        return amounts
    return [float(value) for value in amounts]


def _is_count(amount: Any) -> bool:
    return isinstance(amount, int) and not isinstance(amount, bool) and amount > 0


def _is_share(amount: Any) -> bool:
    return isinstance(amount, float) and 0 < amount <= 1 and "e" not in str(amount)
