"""What lies between two commits of open-instruct, as far as launch depends on it.

Arguments, their reads, refusals, dataclasses and log lines are compared by what they mean, not by how
they are spelt.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Literal

from launcher import conditions, history, revision
from launcher.backends import Entry
from launcher.git import Repository
from launcher.noops import condition_of
from launcher.revision import BACKEND, Revision
from launcher.schema import Field, Path, Read, Refusal, Schema

POINTS: Mapping[str, tuple[str, ...]] = {
    "liger_attempted": ("liger",),
    "packing": ("packing",),
    "attention": ("attention",),
    "dataset_missed": ("dataset_cache",),
    "dataset_saved": ("dataset_cache",),
    "dataset_found": ("dataset_cache",),
    "reference_hit": ("reference_cache",),
    "reference_missed": ("reference_cache",),
    "step": ("loss", "trend"),
    "total_steps": ("finish",),
    "remaining": ("finish",),
    "resumed": (),
    "output_dir": (),
}
"""Which points of a verdict a log line of upstream's own serves; without it they rest on the probe."""

# how alike a name must be to be offered where history names none
_NEAR = 0.8

What = Literal[
    "added", "removed", "renamed", "type", "default", "required", "unread", "read", "conditions"
]
Conditions = frozenset[frozenset[str]]
_Condition = tuple[frozenset[str], bool]


# --- what differs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One thing that changed about one argument.

    `before` and `after` are what it is about, as text; `old` and `new` the `file:line` of the
    definitions (of the first reads where reads changed). `to` is the new name of a renamed argument,
    `near` names to look at instead of one that is gone. `why` is what history says. A `mild` change
    of a type is one that makes no difference to the words that the flag takes.
    """

    name: str
    what: What
    before: str | None = None
    after: str | None = None
    old: str = ""
    new: str = ""
    to: str | None = None
    near: tuple[str, ...] = ()
    why: str | None = None
    mild: bool = False

    def as_json(self) -> dict[str, object]:
        """Every fact of it."""
        return {
            "name": self.name, "what": self.what, "before": self.before, "after": self.after,
            "old": self.old or None, "new": self.new or None, "to": self.to,
            "near": list(self.near), "why": self.why, "mild": self.mild,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintChange:
    """A `raise` that arguments alone lead to: new, gone, or under other conditions."""

    before: Refusal | None
    after: Refusal | None

    @property
    def what(self) -> Literal["added", "removed", "changed"]:
        """Which of the three."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    def as_json(self) -> dict[str, object]:
        """Both refusals."""
        return {"what": self.what, "before": _refusal(self.before), "after": _refusal(self.after)}


def _refusal(known: Refusal | None) -> dict[str, object] | None:
    if known is None:
        return None
    when = list(known.when)
    return {"when": when, "error": known.error, "where": known.where, "parsing": known.parsing}


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a verdict looks for (`signatures.key`), and the points that it serves."""

    key: str

    @property
    def points(self) -> tuple[str, ...]:
        """The points of a verdict that rest on the line where there is no probe."""
        return POINTS.get(self.key.partition(": ")[0], ())

    def as_json(self) -> dict[str, object]:
        """For the envelope."""
        name, _, text = self.key.partition(": ")
        return {"signal": name, "text": text, "points": list(self.points)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDifference:
    """What changed about one entry script. `rough` says that only names, types and defaults could be
    compared, `reads` whether what the script reads could be."""

    stage: str
    script: str
    fields: tuple[FieldChange, ...] = ()
    constraints: tuple[ConstraintChange, ...] = ()
    gone_lines: tuple[LogLine, ...] = ()
    new_lines: tuple[LogLine, ...] = ()
    classes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    unreadable: Mapping[str, str] = field(default_factory=dict)
    rough: bool = False
    reads: bool = True

    @property
    def renames(self) -> dict[str, str]:
        """Old name -> new name, as history tells them."""
        return {c.name: c.to for c in self.fields if c.what == "renamed" and c.to is not None}

    @property
    def empty(self) -> bool:
        """Whether nothing at all changed."""
        lists = (self.fields, self.constraints, self.gone_lines, self.new_lines, self.unreadable)
        return not any(lists) and self.classes[0] == self.classes[1]

    def as_json(self) -> dict[str, object]:
        """Everything."""
        return {
            "stage": self.stage, "script": self.script, "unreadable": dict(self.unreadable),
            "rough": self.rough, "reads_compared": self.reads,
            "classes": {"old": list(self.classes[0]), "new": list(self.classes[1])},
            "fields": [change.as_json() for change in self.fields],
            "constraints": [change.as_json() for change in self.constraints],
            "log_lines": {
                "gone": [line.as_json() for line in self.gone_lines],
                "new": [line.as_json() for line in self.new_lines],
            },
        }  # fmt: skip


def compare(old: Revision, new: Revision, stage: str, repository: Repository) -> StageDifference:
    """What changed about the entry script of a stage."""
    script = BACKEND.STAGES[stage].script
    first, second = old.schemas.get(stage), new.schemas.get(stage)
    unreadable = {
        side: known.unreadable[stage]
        for side, known in (("old", old), ("new", new))
        if stage in known.unreadable
    }
    past = _Past(repository, script, old.commit, new.commit)
    if first is None or second is None:
        one, other = (_rough_fields(side, stage, repository) for side in (old, new))
        found = tuple(_fields(one, other, past)) if one and other else ()
        return StageDifference(
            stage=stage, script=script, unreadable=unreadable, fields=found, rough=bool(found),
            reads=False,
        )  # fmt: skip
    found = tuple(_fields(first.fields, second.fields, past))
    renames = {c.name: c.to for c in found if c.what == "renamed" and c.to}
    entries = old.entry(stage), new.entry(stage)
    followed = bool(first.path.reads) and bool(second.path.reads)
    if followed:
        found += tuple(_reads(first, second, entries, renames))
    return StageDifference(
        stage=stage, script=script, fields=found, reads=followed,
        constraints=tuple(_constraints(first.path, second.path, renames)) if followed else (),
        gone_lines=tuple(LogLine(key) for key in sorted(first.said - second.said)),
        new_lines=tuple(LogLine(key) for key in sorted(second.said - first.said)),
        classes=(old.classes[stage], new.classes[stage]),
    )  # fmt: skip


def _rough_fields(side: Revision, stage: str, repository: Repository) -> Mapping[str, Field]:
    if stage not in side.unreadable:
        return revision.rough(repository, BACKEND.STAGES[stage].script, side.commit)
    return side.rough.get(stage, {})


@dataclass(frozen=True, slots=True)
class _Past:
    """What history says of a script's arguments between two commits, whichever of them is older."""

    repository: Repository
    script: str
    old: str
    new: str

    def renamed(self, key: str, fields: Mapping[str, Field]) -> str | None:
        """What an argument of OLD is called at NEW."""
        to = history.successor(key, self.script, self.repository, head=self.new)
        if to is not None and to in fields:
            return to
        # NEW may be the older one: then the name was another one's successor
        for event in history.events(self.script, self.repository, head=self.old):
            if event.what == "renamed" and event.to == key and event.key in fields:
                return event.key
        return None

    def gone(self, key: str) -> tuple[str | None, tuple[str, ...]]:
        """How a name went away, for people, and what history says to look at instead."""
        found = history.of(key, self.script, self.repository, head=self.new)
        if found and found[0].gone:
            return history.sentence(found[0]), found[0].see
        # NEW may be the older one: there the name was not known yet
        later = history.of(key, self.script, self.repository, head=self.old)
        if later and not later[0].gone:
            return f"comes later: {history.sentence(later[0])}", ()
        return None, ()

    def came(self, key: str) -> str | None:
        """How a name came, for people."""
        found = history.of(key, self.script, self.repository, head=self.new)
        if found and not found[0].gone:
            return history.sentence(found[0])
        earlier = history.of(key, self.script, self.repository, head=self.old)
        return (
            f"goes later: {history.sentence(earlier[0])}" if earlier and earlier[0].gone else None
        )


def _fields(
    old: Mapping[str, Field], new: Mapping[str, Field], past: _Past
) -> Iterator[FieldChange]:
    gone = [name for name in old if name not in new]
    renames = {name: to for name in gone if (to := past.renamed(name, new)) is not None}
    added = [name for name in new if name not in old and name not in renames.values()]
    for name in gone:
        (why, see), to = past.gone(name), renames.get(name)
        likely = dict.fromkeys([*_near(old[name], new, added), *(n for n in see if n in new)])
        yield FieldChange(
            name=name, what="renamed" if to else "removed", to=to, old=old[name].where,
            before=old[name].type, after=None if to is None else new[to].type,
            new=new[to].where if to else "", why=why,
            near=() if to else tuple(likely),
        )  # fmt: skip
    for name in added:
        known = new[name]
        yield FieldChange(
            name=name, what="added", after=f"{known.type} = {shown_default(known)}",
            new=known.where, why=past.came(name),
        )  # fmt: skip
    for name, known in old.items():
        to = name if name in new else renames.get(name)
        # what had been there under both names was no rename of the values
        if to is not None and (to == name or to not in old):
            yield from _altered(known, new[to])


def _altered(old: Field, new: Field) -> Iterator[FieldChange]:
    to = new.name if new.name != old.name else None
    change = FieldChange(name=old.name, what="type", old=old.where, new=new.where, to=to)
    first, second = _takes(old), _takes(new)
    if first != second:
        mild = first[:-1] == second[:-1]
        before, after = old.type, new.type
        if mild is False and first[1] != second[1] and old.choices != new.choices:
            before, after = (f"{f.type} {_choices(f)}".strip() for f in (old, new))
        yield replace(change, before=before, after=after, mild=mild)
    if new.required and not old.required:
        yield replace(change, what="required", before=shown_default(old), after="required")
    elif not _same_default(old, new):
        before, after = shown_default(old), shown_default(new)
        yield replace(change, what="default", before=before, after=after)


def _takes(known: Field) -> tuple[object, ...]:
    """What of a type decides which words a flag takes; at last what makes no difference to them."""
    parts = _members(known.type)
    kind = sorted(parts - {"None"}) if known.kind == "opaque" else known.kind
    return kind, sorted(map(str, known.choices)), known.many, known.bare, frozenset(parts)


def _members(text: str) -> set[str]:
    """The alternatives of an annotation: `Optional[List[int]]` and `list[int] | None` are the same."""
    try:
        return _parts(ast.parse(text, mode="eval").body)
    except SyntaxError:
        return {text}


def _parts(node: ast.expr) -> set[str]:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _parts(left) | _parts(right)
        case ast.Subscript(value=owner, slice=inner):
            name = ast.unparse(owner).rpartition(".")[2]
            if name == "Optional":
                return _parts(inner) | {"None"}
            if name == "Union":
                items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                return {part for item in items for part in _parts(item)}
            name = name.lower() if name in {"List", "Dict", "Tuple", "Set"} else name
            return {f"{name}[{ast.unparse(inner)}]"}
    return {ast.unparse(node)}


def _choices(known: Field) -> str:
    return f"({', '.join(map(str, known.choices))})" if known.choices else ""


def _same_default(old: Field, new: Field) -> bool:
    if old.default_text is not None or new.default_text is not None:
        return old.default_text == new.default_text
    same_kind = isinstance(old.default, bool) == isinstance(new.default, bool)
    return old.required == new.required and same_kind and bool(old.default == new.default)


def shown_default(known: Field) -> str:
    """A default for people: as YAML would have it, or as the source spells it."""
    if known.required:
        return "required"
    if known.default_text is not None:
        return known.default_text
    if known.default is None or isinstance(known.default, bool):
        return {None: "none", True: "true", False: "false"}[known.default]
    return str(known.default)


def _near(gone: Field, new: Mapping[str, Field], added: Sequence[str]) -> Iterator[str]:
    """The likeliest new name of an argument that is gone, by name, kind and default."""
    scores = {name: _likeness(gone, new[name]) for name in added}
    best = max(scores, key=scores.__getitem__, default=None)
    if best is not None and scores[best] >= _NEAR:
        yield best


def _likeness(gone: Field, other: Field) -> float:
    """How much speaks for two arguments being the same: names, kind of value, default."""
    words, others = set(gone.name.split("_")), set(other.name.split("_"))
    alike = difflib.SequenceMatcher(None, gone.name, other.name, autojunk=False).ratio()
    within = 0.25 if words <= others or others <= words else 0.0
    same_kind = gone.kind == other.kind and gone.many == other.many
    same_default = gone.default is not None and _same_default(gone, other)
    return alike + within + 0.1 * same_default if same_kind else 0.0


# --- reads and refusals ---------------------------------------------------------------------------


def _reads(
    old: Schema, new: Schema, entries: tuple[Entry, Entry], renames: Mapping[str, str]
) -> Iterator[FieldChange]:
    for name, known in old.fields.items():
        to = name if name in new.fields else renames.get(name)
        if to is None or (to != name and to in old.fields):
            continue
        first = _meaning(old.path.reads.get(name), entries[0], renames, acts=name)
        second = _meaning(new.path.reads.get(to), entries[1], {}, acts=to)
        if first is None or second is None or first == second:
            continue
        what: What = "conditions" if first and second else "read" if second else "unread"
        yield FieldChange(
            name=name, what=what, to=to if to != name else None, before=shown_reads(first),
            after=shown_reads(second), old=_first_read(old, name) or known.where,
            new=_first_read(new, to) or new.fields[to].where,
        )  # fmt: skip


def _meaning(
    reads: Sequence[Read] | None, entry: Entry, renames: Mapping[str, str], *, acts: str
) -> Conditions | None:
    """The alternatives under which an argument is read: none at all, or `{{}}` for always."""
    if reads is None or acts in entry.acts:
        return None
    return _simplest(
        {frozenset(_renamed(c, renames) for c in condition_of(r, entry)) for r in reads}
    )


def _simplest(alternatives: Iterable[frozenset[str]]) -> Conditions:
    """The same alternatives in fewer: `a and b or a and not b` is `a`."""
    known = frozenset(alternatives)
    while pair := next(
        (p for p in permutations(sorted(known, key=sorted), 2) if _opposed(*p)), None
    ):
        known = known - {*pair} | {pair[0] & pair[1]}
    return frozenset(a for a in known if not any(b < a for b in known))


def _opposed(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether two alternatives differ in one condition alone, which is false in the other."""
    rest = one - other
    return len(rest) == 1 and _all_of(conditions.negated(next(iter(rest)))) == other - one


def _all_of(text: str) -> frozenset[str]:
    """The parts of an `and`; any other condition by itself."""
    node = ast.parse(text, mode="eval").body
    parts = node.values if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) else [node]
    return frozenset(ast.unparse(part) for part in parts)


def _renamed(text: str, renames: Mapping[str, str]) -> str:
    """A condition in the new names."""
    for name in conditions.names(text) & renames.keys():
        text = re.sub(rf"(?<![\w.'\"]){re.escape(name)}(?!\w)", renames[name], text)
    return text


def shown_reads(alternatives: Conditions) -> str:
    """The conditions of reads, for people."""
    if not alternatives:
        return "nowhere"
    if frozenset() in alternatives:
        return "always"
    return " or ".join(sorted(" and ".join(sorted(a)) for a in alternatives))


def _first_read(schema: Schema, name: str) -> str:
    reads = schema.path.reads.get(name) or ()
    return reads[0].where if reads else ""


def _constraints(old: Path, new: Path, renames: Mapping[str, str]) -> Iterator[ConstraintChange]:
    first = {_condition(r, renames): r for r in old.refusals}
    second = {_condition(r, {}): r for r in new.refusals}
    gone = [key for key in first if key not in second]
    came = [key for key in second if key not in first]
    scores = {(one, other): _alike(one, other) for one in gone for other in came}
    paired: dict[_Condition, _Condition] = {}
    for (one, other), score in sorted(scores.items(), key=lambda item: -item[1]):
        if score >= 1.0 and one not in paired and other not in paired.values():
            paired[one] = other
    for one in gone:
        after = second[paired[one]] if one in paired else None
        yield ConstraintChange(before=first[one], after=after)
    for other in came:
        if other not in paired.values():
            yield ConstraintChange(before=None, after=second[other])


def _condition(refusal: Refusal, renames: Mapping[str, str]) -> _Condition:
    return frozenset(_renamed(c, renames) for c in refusal.when), refusal.parsing


def _alike(one: _Condition, other: _Condition) -> float:
    """How much speaks for the same refusal under other conditions: the share of the arguments that
    both speak of, and of equal letters; 1 is enough."""
    names = [{name for c in when for name in conditions.names(c)} for when, _ in (one, other)]
    text, text_of_other = (" and ".join(sorted(when)) for when, _ in (one, other))
    shared = len(names[0] & names[1]) / max(1, len(names[0] | names[1]))
    letters = difflib.SequenceMatcher(None, text, text_of_other, autojunk=False).ratio()
    return shared + letters if shared >= 0.5 else 0.0
