"""What is mechanically wrong with a stage file, and the edits that mend each fault.

Every edit is tried before it is believed: the new text is loaded and judged, its own fault must have
gone, no error may come, and no value but those meant may differ. An edit that fails this is left out.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from launcher import history, upstream
from launcher.backends import Entry
from launcher.builder import LOADER, Builder
from launcher.config import Config
from launcher.errors import Finding, InvalidConfig, brief
from launcher.schema import Schema
from launcher.stage import Judged, entry_of
from launcher.surgery import BREAK, Edit, Leave, Node, Place, Text

Judge = Callable[[str], Judged]
"""Judges a text as if it stood in the file; raises InvalidConfig where it cannot be loaded."""


_GONE = object()
_MISSING = "\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """The edits that answer one finding; `effects` are the arguments that differ afterwards."""

    finding: Finding
    edits: tuple[Edit, ...]
    effects: tuple[tuple[str, object], ...]
    row: int
    what: str


class State:
    """A text with everything found about it; `lines` are the numbers of its lines in the original."""

    def __init__(self, text: str, judged: Judged, again: Judge, lines: tuple[int, ...]) -> None:
        self.text = text
        self.judged = judged
        self.lines = lines
        self.source = Text(text)
        self.tree = _tree(judged.config.path, text)
        self.args = _args_of(self.tree, judged.config.shape)
        self._again = again

    @property
    def config(self) -> Config:
        """The file with its parents merged in."""
        return self.judged.config

    @property
    def entry(self) -> Entry:
        """The entry script; only where the stage is known."""
        return entry_of(self.schema)

    @property
    def schema(self) -> Schema:
        """The fields of the entry script; only where the stage is known."""
        assert self.judged.schema is not None
        return self.judged.schema

    def best(self, declined: dict[Finding, str]) -> list[Mend]:
        """Mends that together leave the file better than it was; why not, of those that do not."""
        waiting = list(self._mends(declined))
        while waiting:
            chosen = _apart(waiting)
            groups = self._good(chosen, declined)
            if groups:
                together = [mend for group in groups for mend in group]
                # what is fine by itself need not be together: the rest gets its turn afterwards
                return groups[0] if len(groups) > 1 and self._fault(together) else together
            tried = {id(mend) for mend in chosen}
            waiting = [mend for mend in waiting if id(mend) not in tried]
        return []

    def _mends(self, declined: dict[Finding, str]) -> Iterator[Mend]:
        """One mend for each finding that has one; the others that might are declined, with a reason."""
        for finding in self.judged.findings:
            mender = _mender(finding)
            if mender is None or (self.judged.schema is None and mender is not _duplicate):
                continue
            try:
                if finding.file != str(self.config.path):
                    raise Leave(f"it is written in {finding.file}")
                mend = mender(self, finding)
            except Leave as reason:
                declined[finding] = str(reason)
            else:
                if mend is not None:
                    yield mend

    def _good(self, mends: list[Mend], declined: dict[Finding, str]) -> list[list[Mend]]:
        """Groups of mends, each of which leaves the file better; found by halving."""
        fault = self._fault(mends)
        if fault is None:
            return [mends]
        if len(mends) == 1:
            declined[mends[0].finding] = fault
            return []
        half = len(mends) // 2
        return [*self._good(mends[:half], declined), *self._good(mends[half:], declined)]

    def then(self, mends: Sequence[Mend]) -> State:
        """The state after mends that are good together."""
        edits = _edits(mends)
        text = self.source.edited(edits)
        return State(text, self._again(text), self._again, self.source.lines(self.lines, edits))

    def _fault(self, mends: Sequence[Mend]) -> str | None:
        """Why these mends would not leave the file better; None where they do."""
        text = self.source.edited(_edits(mends))
        try:
            tree = _tree(self.config.path, text)
            judged = self._again(text)
        except InvalidConfig as error:
            return f"then {error.findings[0].message}"
        except yaml.YAMLError:
            return "the file would be no YAML"
        if judged.stage != self.judged.stage:
            return f"the file would be taken for a {judged.stage} stage"
        wanted = dict(self.args)
        for key, value in (effect for mend in mends for effect in mend.effects):
            if value is _GONE:
                wanted.pop(key, None)
            else:
                wanted[key] = value
        shape = self.config.shape
        if _plain(_args_of(tree, shape)) != _plain(wanted):
            return "another argument would change"
        if _plain(_without_args(tree, shape)) != _plain(_without_args(self.tree, shape)):
            return "something beside the arguments would change"
        meant = {key for mend in mends for key, _ in mend.effects}
        for one, other in ((self.config, judged.config), (judged.config, self.config)):
            for key in sorted(one.args.keys() - meant):
                if _plain(one.args[key]) != _plain(other.args.get(key, _MISSING)):
                    return f"`{key}` would change"
        return self._worse(judged, mends)

    def _worse(self, judged: Judged, mends: Sequence[Mend]) -> str | None:
        """The first error that is new, or fault that is still there."""
        new = _errors(judged) - _errors(self.judged)
        for finding in judged.findings:
            if _error(finding) in new:
                return f"then {finding.message}"
        before, after = (self._own(j) for j in (self.judged, judged))
        for code, count in Counter((m.finding.code, m.finding.key) for m in mends).items():
            if after[code] > before[code] - count:
                return "the fault would still be there"
        return None

    def _own(self, judged: Judged) -> Counter[tuple[str, str | None]]:
        path = str(self.config.path)
        return Counter((f.code, f.key) for f in judged.findings if f.file == path)

    def original(self, finding: Finding) -> int:
        """The line of a finding in the original text."""
        return self.lines[min(finding.line or 1, len(self.lines)) - 1]

    # --- for the menders ---

    def find(self, key: str) -> Place:
        """Where an argument is written in this file; raises Leave where it is not."""
        node = self.source.root
        for step in _ARGS[self.config.shape]:
            place = None if node is None else _find(node, step)
            node = None if place is None else place.value.resolved()
        found = None if node is None else _find(node, key)
        if found is None:
            raise Leave("it is not written in this file")
        return found

    def mend(
        self, finding: Finding, place: Place, edits: Iterable[Edit], what: str,
        effects: Mapping[str, object],
    ) -> Mend:  # fmt: skip
        """A mend whose arguments afterwards are `effects`."""
        return Mend(
            finding=finding, edits=tuple(edits), effects=tuple(effects.items()),
            row=self.source.row(place.key.start), what=what,
        )  # fmt: skip

    def delete(self, finding: Finding, key: str, why: str) -> Mend:
        """Take one argument out of the file."""
        place = self.find(key)
        raw = self.source.raw(place.value)
        shown = key if not raw or BREAK.search(raw) else f"{key}: {brief(raw, 40)}"
        edits = (self.source.deleted(place),)
        return self.mend(finding, place, edits, f"`{shown}` deleted: {why}", {key: _GONE})

    def move(
        self, finding: Finding, key: str, to: str, value: object = _GONE, raw: str | None = None
    ) -> Mend:
        """Write an argument under its other name, with another value where one is given."""
        place, old = self.find(key), self.args[key]
        value = old if value is _GONE else value
        if _names(self.config.args.get(key)) != _names(old):
            raise Leave("a part of it is written in another file")
        if to in self.args:
            if _plain(self.args[to]) != _plain(value):
                raise Leave(f"`{to}` is there too, with another value")
            return self.delete(finding, key, f"`{to}` says the same")
        edits = [self.source.renamed(place.key, to)]
        what = f"`{key}` -> `{to}`"
        if raw is not None:
            what = f"`{key}: {self.source.plain(place.value)}` -> `{to}: {raw}`"
            edits.append(self.source.replaced(place.value, raw))
        return self.mend(finding, place, edits, what, {key: _GONE, to: value})


def _edits(mends: Iterable[Mend]) -> list[Edit]:
    return [edit for mend in mends for edit in mend.edits]


def _apart(mends: Iterable[Mend]) -> list[Mend]:
    """Mends whose edits do not touch those of an earlier one: the others get their turn later."""
    chosen: list[Mend] = []
    taken: list[Edit] = []
    for mend in mends:
        if not any(_touches(edit, taken) for edit in mend.edits):
            chosen.append(mend)
            for edit in mend.edits:
                bisect.insort(taken, edit, key=lambda e: e.start)
    return chosen


def _touches(edit: Edit, taken: Sequence[Edit]) -> bool:
    at = bisect.bisect_left(taken, edit.start, key=lambda e: e.start)
    follows = at < len(taken) and taken[at].start < max(edit.end, edit.start + 1)
    return follows or (at > 0 and taken[at - 1].end > edit.start)


def _error(finding: Finding) -> tuple[str, str, str | None] | None:
    return (finding.layer, finding.code, finding.key) if finding.severity == "error" else None


def _errors(judged: Judged) -> Counter[tuple[str, str, str | None]]:
    return Counter(e for e in map(_error, judged.findings) if e is not None)


def _names(value: Any) -> Any:
    """The names in a mapping, which may have come from several files."""
    return {k: _names(v) for k, v in value.items()} if isinstance(value, dict) else None


def _plain(value: Any) -> str:
    """A value as a text that tells 1, 1.0, true and "1" apart."""
    return json.dumps(value, sort_keys=True)


_ARGS: Mapping[str, tuple[str, ...]] = {
    "stage": ("args",),
    "wrapped": ("open_instruct", "args"),
    "flat": (),
}


def _tree(path: Path, text: str) -> dict[str, Any]:
    """The values in the text itself, without parents."""
    value = Builder(str(path)).build(yaml.parse(text, Loader=LOADER))
    return value if isinstance(value, dict) else {}


def _args_of(tree: dict[str, Any], shape: str) -> dict[str, Any]:
    for step in _ARGS[shape]:
        below = tree.get(step)
        tree = below if isinstance(below, dict) else {}
    return tree


def _without_args(tree: dict[str, Any], shape: str) -> dict[str, Any]:
    steps = _ARGS[shape]
    if not steps:
        return {}
    rest = {key: value for key, value in tree.items() if key != steps[0]}
    inner = tree.get(steps[0])
    if len(steps) > 1 and isinstance(inner, dict):
        rest[steps[0]] = {key: value for key, value in inner.items() if key != steps[1]}
    return rest


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


Mender = Callable[[State, Finding], Mend | None]


def _mender(finding: Finding) -> Mender | None:
    """What answers a finding; None for those whose answer only the author knows."""
    return _MENDERS.get(finding.code) or _DATA.get((finding.code, finding.key))


def _name_of(finding: Finding) -> str:
    return (finding.key or "").removeprefix("args.")


def _duplicate(state: State, finding: Finding) -> Mend:
    """The last value of a key that stands twice is the one that counts: the one before it goes."""
    place = _earlier(state.source.root, finding)
    if place is None:
        raise Leave("it comes from an anchor")
    if place.value.resolved().entries:
        raise Leave("its values have parts: only their author can join them")
    edits = (state.source.deleted(place),)
    raw = brief(state.source.raw(place.value), 40)
    what = f"`{place.key.value}: {raw}` deleted: line {state.original(finding)} sets it again"
    return state.mend(finding, place, edits, what, {})


def _earlier(root: Node | None, finding: Finding) -> Place | None:
    """The last entry before the one that a `duplicate-key` is about, under the same name."""
    waiting = [root] if root is not None else []
    while waiting:
        node = waiting.pop()
        before: dict[str, tuple[Node, Node]] = {}
        for key, value in node.entries:
            if key.kind is not yaml.ScalarEvent:
                continue
            known = before.get(key.value)
            if known and key.line == finding.line and (finding.key or "").endswith(key.value):
                return Place(node, *known)
            before[key.value] = key, value
        waiting += node.items
    return None


def _renamed(state: State, finding: Finding) -> Mend:
    key = _name_of(finding)
    to = _new_name(state, key)
    if to is None:
        raise Leave("what it is called now is not known")
    if (why := _UNLIKE.get(to)) is not None:
        raise Leave(why)
    value = state.args.get(key)
    convert = _VALUES.get((key, to))
    if convert is None or value is None:
        return state.move(finding, key, to)
    new = convert(value)
    if new is None:
        if state.config.args.get(to) is not None:
            raise Leave(f"`{to}` is there too, with another value")
        return state.delete(finding, key, f"it is what happens without `{to}`")
    return state.move(finding, key, to, *new)


def _new_name(state: State, key: str) -> str | None:
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


def _truth(value: object) -> bool:
    """A value as upstream's parser reads bools; raises Leave for what is none."""
    text = str(value).lower()
    if text not in {"true", "false", "yes", "no", "1", "0"}:
        raise Leave("its value is neither true nor false")
    return text in {"true", "yes", "1"}


def _budget(value: object) -> tuple[object, str]:
    """Below 1 switches checkpointing on (dpo_tune_cache.py:376), the default does not."""
    budget = 0.5 if _truth(value) else 1.0
    return budget, str(budget)


def _checkpointing(value: object) -> tuple[object, str]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Leave("its value is no number")
    return value < 1, str(value < 1).lower()


def _flash(value: object) -> tuple[object, str] | None:
    return ("flash_attention_2", "flash_attention_2") if _truth(value) else None


def _warmup(value: object) -> tuple[object, str]:
    """`warmup_steps` takes a share below 1 as one, and a 1 for one step."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise Leave("only a share below 1 means the same there")
    return value, str(value)


def _limit(value: object) -> tuple[object, str]:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Leave("TRL has values here that mean no limit, open-instruct has none")
    return value, str(value)


# Renames whose value has to be said otherwise: (old, new) -> value and its text, None to delete.
_VALUES: Mapping[tuple[str, str], Callable[[object], tuple[object, str] | None]] = {
    ("gradient_checkpointing", "activation_memory_budget"): _budget,
    ("activation_memory_budget", "gradient_checkpointing"): _checkpointing,
    ("use_flash_attn", "attn_implementation"): _flash,
    ("max_steps", "max_train_steps"): _limit,
    ("warmup_ratio", "warmup_steps"): _warmup,
}
# Names for the same idea under which the same value means nothing, or something else.
_UNLIKE: Mapping[str, str] = {
    "dataset_name": "it takes one set, and no amount",
    "chat_template_path": "it takes a file or a model, no name of a template",
}


def _removed(state: State, finding: Finding) -> Mend:
    key = _name_of(finding)
    moved = state.entry.moved.get(key)
    return state.delete(finding, key, "nothing takes it" if moved is None else moved.why)


def _unread(state: State, finding: Finding) -> Mend:
    key = _name_of(finding)
    for partner in _NEEDED_BY.get(key, ()):
        if state.config.args.get(partner) is not None:
            raise Leave(f"it says something about `{partner}`")
    # a note is about a value that asks for nothing
    if key in state.entry.instead and finding.severity != "note":
        raise Leave("what it asks for has to be said otherwise")
    return state.delete(finding, key, "nothing reads it")


def _shadowed(state: State, finding: Finding) -> Mend:
    """What another key comes before goes if that says the same: else its author wanted something."""
    key = _name_of(finding)
    values, shadow = state.judged.values, state.schema.path.shadows.get(key)
    if values is None or shadow is None:
        raise Leave("what comes before it is not known")
    for by in shadow.by:
        read = by if values.get(by) is not None else _FALLBACK.get(by, by)
        if values.get(read) == values.get(key):
            return state.delete(finding, key, f"`{read}` says the same, and is what is read")
    raise Leave(f"`{shadow.by[0]}` would be another value")


# What stands in for a key that is not given (finetune.py:411, dpo_tune_cache.py:152).
_FALLBACK: Mapping[str, str] = {"tokenizer_name_or_path": "model_name_or_path"}
# What is not read, and is still needed to understand another key.
_NEEDED_BY: Mapping[str, tuple[str, ...]] = {
    "dataset_config_name": ("dataset_name", "dataset_mixer"),
}


def _abbreviated(state: State, finding: Finding) -> Mend | None:
    key = _name_of(finding)
    flag = state.schema.taken_as(key)
    return None if flag is None or flag.negated else state.move(finding, key, flag.name)


def _negated(state: State, finding: Finding) -> Mend | None:
    """`no_x: true` is `x: false`."""
    key = _name_of(finding)
    flag = state.schema.taken_as(key)
    name = key[3:].replace("-", "_") if flag is None else flag.name
    place, value = state.find(key), state.args[key]
    new = False if value == [] else not _truth(value)
    upper = state.source.raw(place.value)[:1].isupper()
    word = str(new) if upper else str(new).lower()
    mend = state.move(finding, key, name, new, word)
    if name != "push_to_hub" or new or name in state.args or not _beaker_on(state):
        return mend
    # alone it would be refused: both at once
    line = f"{_BEAKER}: {word}"
    return replace(
        mend, edits=(*mend.edits, state.source.added(place, line)),
        effects=(*mend.effects, (_BEAKER, False)), what=f"{mend.what}, `{line}` added",
    )  # fmt: skip


def _unknown(state: State, finding: Finding) -> Mend | None:
    """Only what is no guess: another case or other separators, or `no_` before a bool."""
    key, fields = _name_of(finding), state.schema.fields
    same = [name for name in fields if _folded(name) == _folded(key)]
    if len(same) == 1:
        return state.move(finding, key, same[0])
    positive = fields.get(key[3:].replace("-", "_"))
    if key[:3] in {"no_", "no-"} and positive is not None and positive.kind == "bool":
        return _negated(state, finding)
    return None


def _folded(name: str) -> str:
    return re.sub(r"[-_.]", "", name).lower()


_BEAKER = "try_launch_beaker_eval_jobs"


def _beaker_on(state: State) -> bool:
    """Whether the evaluation jobs are on by default only."""
    given = any(_folded(key).endswith(_folded(_BEAKER)) for key in state.config.args)
    return _BEAKER in state.schema.fields and not given


def _beaker(state: State, finding: Finding) -> Mend | None:
    """`push_to_hub: false` is refused unless the evaluation jobs are switched off too."""
    if not _beaker_on(state):
        raise Leave(f"`{_BEAKER}` is there too")
    place = state.find("push_to_hub")
    line = f"{_BEAKER}: {state.source.plain(place.value)}"
    edits = (state.source.added(place, line),)
    effects = {_BEAKER: state.args["push_to_hub"]}
    return state.mend(finding, place, edits, f"`{line}` added", effects)


def _entity(state: State, finding: Finding) -> Mend:
    """`hf_repo_id: entity/name` is `hf_entity: entity` and `hf_repo_id: name`."""
    place = state.find("hf_repo_id")
    entity, _, name = str(state.args["hf_repo_id"]).partition("/")
    raw = state.source.plain(place.value)
    if not entity or not name or "/" in name or raw.strip("\"'") != f"{entity}/{name}":
        raise Leave("it is not of the form entity/name")
    known = state.config.args.get("hf_entity")
    if known not in {None, entity} or (known is None and "hf_entity" in state.args):
        raise Leave("`hf_entity` is there too, with another value")
    edits = [state.source.replaced(place.value, raw.replace(f"{entity}/", "", 1))]
    effects = {"hf_repo_id": name}
    what = f"`hf_repo_id: {entity}/{name}` -> `hf_repo_id: {name}`"
    if known is None:
        quoted = raw.replace(f"/{name}", "", 1)
        edits.append(state.source.added(place, f"hf_entity: {quoted}"))
        effects["hf_entity"] = entity
        what += f" and `hf_entity: {entity}`"
    return state.mend(finding, place, edits, what, effects)


def _dataset_name(state: State, finding: Finding) -> Mend:
    """One set, all of it."""
    listed = _no_other_data(state, "dataset_name")
    place, value = state.find("dataset_name"), state.args["dataset_name"]
    raw = state.source.plain(place.value)
    if not isinstance(value, str) or not value:
        raise Leave("its value is no name")
    if not re.fullmatch(r"[\w./~@+-]+|'[^']*'|\"[^\"\\]*\"", raw):
        raw = json.dumps(value, ensure_ascii=False)
    edits = (
        state.source.renamed(place.key, listed), state.source.replaced(place.value, f"[{raw}, 1.0]"),
    )  # fmt: skip
    what = f"`dataset_name: {brief(value)}` -> `{listed}: [{brief(value)}, 1.0]`"
    effects = {"dataset_name": _GONE, listed: [value, 1.0]}
    return state.mend(finding, place, edits, what, effects)


def _dataset_mixer(state: State, finding: Finding) -> Mend:
    """`{name: amount}` as `[name, amount]`: what finetune.py:498 would do, could it be reached."""
    mixer = state.config.args.get("dataset_mixer")
    if mixer == {}:
        return state.delete(finding, "dataset_mixer", "it is empty")
    listed = _no_other_data(state, "dataset_mixer")
    place, own = state.find("dataset_mixer"), state.args["dataset_mixer"]
    if not isinstance(own, dict) or _names(own) != _names(mixer):
        raise Leave("a part of it is written in another file")
    if [key.value for key, _ in place.value.entries] != list(own):
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


def _no_other_data(state: State, key: str) -> str:
    """The name of the list to write; raises Leave where more than `key` says which data to take."""
    listed = state.entry.names.data
    for other in ("dataset_name", "dataset_mixer", "dataset_config_name"):
        if other != key and state.config.args.get(other) is not None:
            raise Leave(f"`{other}` is there too, and has no place in `{listed}`")
    if state.config.args.get(listed) is not None or listed in state.args:
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


_MENDERS: Mapping[str, Mender] = {
    "duplicate-key": _duplicate,
    "renamed-key": _renamed,
    "removed-key": _removed,
    "unread-key": _unread,
    "shadowed-key": _shadowed,
    "abbreviated-key": _abbreviated,
    "negated-key": _negated,
    "unknown-key": _unknown,
    "beaker-without-push": _beaker,
    "entity-twice": _entity,
}
_DATA: Mapping[tuple[str, str | None], Mender] = {
    ("bad-value", "args.dataset_mixer"): _dataset_mixer,
    ("two-data-sources", "args.dataset_mixer"): _dataset_mixer,
    ("two-data-sources", "args.dataset_name"): _dataset_name,
}
