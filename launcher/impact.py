"""What moving from one commit of open-instruct to another does to given stage files.

Each file is judged against both commits as `launch validate-config` would judge it there: nothing is
checked out, nothing is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from launcher import chain, conditions, difference, pin
from launcher import config as configs
from launcher import stage as stages
from launcher.backends import Entry
from launcher.config import Config
from launcher.difference import ConstraintChange, FieldChange, Revision, StageDifference
from launcher.errors import Exit, Finding, InvalidConfig, brief, errors
from launcher.noops import condition_of, effective, shown
from launcher.pin import Commits
from launcher.redaction import redact
from launcher.schema import Refusal, Schema
from launcher.stage import Judged
from launcher.upstream import Locator, Upstream

# said of every commit that is not the pin, and told better here
_SAID_ELSEWHERE = {"unpinned-checkout", "log-lines-changed"}
_UNKNOWN = object()
_FOREIGN = "for another backend than open-instruct"
_KINDS = {
    "removed": "removed", "renamed": "renamed", "added": "added", "required": "now required",
    "type": "other type", "default": "other default", "unread": "not read any more",
    "read": "newly read", "conditions": "read under other conditions",
}  # fmt: skip
# changes of which a finding about the same key speaks too
_NAMES = {"removed", "renamed", "added", "unread"}
_WIDE = 160

Relation = Literal["set", "default", "constraint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Concern:
    """A change that touches one stage file: a key that it sets, a default that it relies on, or a
    refusal that its values meet now or met before. `key` is the name that the file uses, or the one to
    write; `value` is what the file holds or would get."""

    relation: Relation
    key: str | None = None
    change: FieldChange | ConstraintChange
    value: Any = None

    def as_json(self) -> dict[str, object]:
        """The change and how it touches the file."""
        about = {"relation": self.relation, "key": self.key, "value": self.value}
        return {**about, **self.change.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDifference:
    """One stage file at both commits.

    `valid` is None where the commit's source could not be read for this stage, or the file is for
    another backend (`reason`).
    """

    path: Path
    stage: str | None
    reason: str | None = None
    valid: tuple[bool | None, bool | None] = (None, None)
    appeared: tuple[Finding, ...] = ()
    vanished: tuple[Finding, ...] = ()
    concerns: tuple[Concern, ...] = ()

    @property
    def worse(self) -> bool:
        """Whether an error appeared, a `raise` is met, or the file cannot be judged at NEW any more."""
        lost = self.valid[0] is not None and self.valid[1] is None
        met = any(c.relation == "constraint" and c.value for c in self.concerns)
        return lost or met or bool(errors(self.appeared))

    def as_json(self) -> dict[str, object]:
        """Everything."""
        return {
            "path": str(self.path), "stage": self.stage, "reason": self.reason,
            "valid": {"old": self.valid[0], "new": self.valid[1]}, "worse": self.worse,
            "findings": {
                "appeared": [finding.as_json() for finding in self.appeared],
                "vanished": [finding.as_json() for finding in self.vanished],
            },
            "concerns": [concern.as_json() for concern in self.concerns],
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Everything between two commits; `ahead` and `behind` count commits of NEW against OLD."""

    repository: Path
    shallow: bool
    old: Revision
    new: Revision
    ahead: int | None
    behind: int | None
    stages: Mapping[str, StageDifference]
    configs: tuple[ConfigDifference, ...]

    @property
    def cache_moved(self) -> bool | None:
        """Whether cached datasets of OLD are found at NEW no more; None where that is not known."""
        versions = (self.old.cache, self.new.cache)
        known = all(v is None or isinstance(v, str | int | float) for v in versions)
        return versions[0] != versions[1] if known else None

    @property
    def worse(self) -> bool:
        """Whether NEW refuses a file that OLD took or finds another error in it; without files,
        whether a stage that could be read at OLD cannot be read at NEW."""
        if self.configs:
            return any(one.worse for one in self.configs)
        return any({*told.unreadable} == {"new"} for told in self.stages.values())

    @property
    def exit_code(self) -> Exit:
        """0, or 3 where something got worse."""
        return Exit.CONFIG if self.worse else Exit.OK

    def as_json(self) -> dict[str, object]:
        """Everything."""
        return {
            "repository": str(self.repository), "shallow": self.shallow,
            "old": self.old.as_json(), "new": self.new.as_json(),
            "ahead": self.ahead, "behind": self.behind, "worse": self.worse,
            "dataset_cache_moved": self.cache_moved,
            "stages": {name: told.as_json() for name, told in self.stages.items()},
            "configs": [one.as_json() for one in self.configs],
        }  # fmt: skip


def between(
    commits: Commits, paths: Sequence[Path] = (), *, stage: str | None = None
) -> Difference:
    """Compare two commits, and what they mean for the stage files `paths`.

    `stage` is for flat files that do not say theirs. Raises NotReady where git lacks the commits' files,
    InvalidConfig with all findings where a stage file cannot even be read.
    """
    loaded = _load(paths)
    old, new = difference.read_revisions(commits)
    compared = {
        name: difference.compare(old, new, name, commits.repository)
        for name, entry in difference.BACKEND.STAGES.items()
        # a further script of a stage that neither or only the newer commit has is no loss of anything
        if not entry.stage or name in old.schemas
    }
    ahead, behind = pin.distance(commits.repository, commits.old, commits.new)
    return Difference(
        repository=commits.repository.root, shallow=commits.repository.is_shallow(),
        old=old, new=new, ahead=ahead, behind=behind, stages=compared,
        configs=tuple(_config(one, old, new, compared, stage) for one in loaded),
    )  # fmt: skip


def _load(paths: Sequence[Path]) -> list[Config]:
    loaded: list[Config] = []
    faults: list[Finding] = []
    for path in paths:
        try:
            loaded.append(configs.load(path))
        except InvalidConfig as error:
            if {finding.code for finding in error.findings} == {configs.PIPELINE}:
                links = chain.load(path).links
                loaded += [configs.load(link.config, link.texts()) for link in links]
            else:
                faults += error.findings
    if faults:
        raise InvalidConfig(faults)
    return loaded


# --- one file -------------------------------------------------------------------------------------


class _Unread(Exception):
    """The stage that a file is for cannot be read at a commit."""


@dataclass(slots=True)
class _At(Locator):
    """Answers with one commit's source and schemas, whatever lies on this machine."""

    revision: Revision | None = None

    def find(self, backend: str) -> Upstream:
        assert self.revision is not None
        return self.revision.source

    def schema(self, backend: str, stage: str) -> Schema:
        assert self.revision is not None
        if stage not in self.revision.schemas:
            raise _Unread(stage)
        return self.revision.schemas[stage]


def _config(
    config: Config,
    old: Revision,
    new: Revision,
    compared: Mapping[str, StageDifference],
    stage: str | None,
) -> ConfigDifference:
    if stages.backend_of(config) != "open_instruct":
        return ConfigDifference(path=config.path, stage=None, reason=_FOREIGN)
    first, second = _judged(config, old, stage), _judged(config, new, stage)
    kind = first if isinstance(first, str) else first.stage
    key = first.schema.key if isinstance(first, Judged) and first.schema else kind
    if kind is None or key is None:
        return ConfigDifference(
            path=config.path, stage=None, reason="names no stage that launch starts",
            valid=(False, False),
        )  # fmt: skip
    told = ConfigDifference(path=config.path, stage=kind, valid=(_valid(first), _valid(second)))
    if key not in compared:
        return replace(told, reason=f"{key}: {old.unreadable.get(key, 'not there')}")
    change = compared[key]
    if isinstance(first, str) or isinstance(second, str):
        return replace(told, reason="; ".join(change.unreadable.values()))
    return replace(
        told, appeared=_only_in(second, first), vanished=_only_in(first, second),
        concerns=tuple(_concerns(first, second, change, old, new)),
    )  # fmt: skip


def _judged(config: Config, side: Revision, stage: str | None) -> Judged | str:
    """A file against a commit; the stage's name where that cannot be read there."""
    try:
        told = stages.judge(config, stage=stage, locator=_At(allow_unpinned=True, revision=side))
    except _Unread as unread:
        return str(unread)
    kept = tuple(f for f in told.findings if f.code not in _SAID_ELSEWHERE)
    return replace(told, findings=kept)


def _valid(judged: Judged | str) -> bool | None:
    return not errors(judged.findings) if isinstance(judged, Judged) else None


def _only_in(judged: Judged, other: Judged) -> tuple[Finding, ...]:
    """Findings that the other side does not have; the same code about the same key is the same."""
    known = {(f.severity, f.code, f.key) for f in other.findings}
    return tuple(f for f in judged.findings if (f.severity, f.code, f.key) not in known)


# --- what touches it ------------------------------------------------------------------------------


def _concern(relation: Relation, change: FieldChange, key: str, value: Any) -> Concern:
    # a token must not get from the file into an answer
    shown = redact({key: value})[key]
    return Concern(relation=relation, key=key, change=change, value=shown)


def _concerns(
    old: Judged, new: Judged, compared: StageDifference, first: Revision, second: Revision
) -> Iterator[Concern]:
    assert old.schema and new.schema and old.values is not None and new.values is not None
    entries = first.entry(compared.stage), second.entry(compared.stage)
    known = effective(old.values, entries[0]), effective(new.values, entries[1])
    derived = _derived(new, entries[1])
    args = new.config.args
    for change in compared.fields:
        to = change.to or change.name
        given = next((n for n in (change.name, to) if args.get(n) is not None), None)
        acts = (
            _acts(old.schema, change.name, known[0], entries[0]),
            _acts(new.schema, to, known[1], entries[1]),
        )
        if given is not None and _touches(change, acts):
            yield _concern("set", change, given, args[given])
        elif given is None and to not in derived and _moves(change, acts):
            yield _concern("default", change, to, change.after)
    met = [(_holds(one.refusal, known[one.what == "added"]), one) for one in compared.constraints]
    if len({one.what for holds, one in met if holds}) == 1:
        # one that is met on both sides is the same under another condition
        for holds, one in met:
            if holds:
                yield Concern(relation="constraint", change=one, value=one.what == "added")


def _touches(change: FieldChange, acts: tuple[bool | None, bool | None]) -> bool:
    """Whether a change of an argument matters to a file that sets it."""
    if change.what == "conditions":
        return acts[0] != acts[1]
    return change.what not in {"default", "required"}


def _moves(change: FieldChange, acts: tuple[bool | None, bool | None]) -> bool:
    """Whether a change of a default matters to a file that leaves it be: something must read it."""
    return change.what == "required" or (change.what == "default" and acts != (False, False))


def _derived(judged: Judged, entry: Entry) -> set[str]:
    """Arguments that launch itself sets where the file is silent."""
    names = entry.names
    listed = {*entry.derived, names.output, "do_not_randomize_output_dir"}
    if judged.options is not None and judged.options.batch is not None:
        listed |= {names.per_device, names.accumulation}
    return listed


def _acts(schema: Schema, name: str, known: Mapping[str, Any], entry: Entry) -> bool | None:
    """Whether an argument is read for these values; None where that is not known."""
    if name not in schema.path.reads:
        return None
    told = []
    for read in schema.path.reads[name]:
        held = [conditions.holds(c, known, _UNKNOWN) for c in condition_of(read, entry)]
        told.append(False if False in held else None if None in held else True)
    return True if True in told or name in entry.acts else None if None in told else False


def _holds(refusal: Refusal, known: Mapping[str, Any]) -> bool:
    return all(conditions.holds(c, known, _UNKNOWN) for c in refusal.when)


# --- as text --------------------------------------------------------------------------------------


def lines(difference: Difference, *, everything: bool = False) -> list[str]:
    """The answer for people. Without stage files, or with `everything`, each change has its line."""
    told = list(_head_lines(difference))
    for config in difference.configs:
        if config.stage is not None or config.reason != _FOREIGN:
            told += ["", *_config_lines(config)]
    foreign = [str(c.path) for c in difference.configs if c.reason == _FOREIGN]
    if foreign:
        told += ["", f"{_FOREIGN}: {', '.join(foreign)}"]
    for stage in difference.stages.values():
        told += ["", *_stage_lines(stage, everything=everything or not difference.configs)]
    if cache := _cache_line(difference):
        told += ["", cache]
    return [*told, "", _result_line(difference)]


def _head_lines(difference: Difference) -> Iterator[str]:
    old, new = difference.old, difference.new
    yield f"old  {_title(old)}"
    yield f"new  {_title(new)}"
    counts = [(difference.ahead, "ahead"), (difference.behind, "behind")]
    steps = " and ".join(f"{n} commit(s) {word}" for n, word in counts if n)
    if old.commit == new.commit:
        yield "     the same commit"
    elif steps:
        yield f"     {steps}"
    if difference.shallow:
        yield "     the history was cut off when it was cloned: counts and renames go as far as it does"


def _title(side: Revision) -> str:
    return f"{side.title}{', the pin' if side.commit == pin.PIN else ''}"


def _config_lines(config: ConfigDifference) -> Iterator[str]:
    words = {True: "valid", False: "INVALID", None: "cannot be judged"}
    before, after = (words[state] for state in config.valid)
    state = before if before == after else f"{before} -> {after}"
    stage = f" ({config.stage})" if config.stage else ""
    told = [*_finding_lines(config), *_concern_lines(config)]
    same = ", nothing changes" if not told and config.reason is None else ""
    yield f"{config.path}{stage}: {state}{same}"
    if config.reason is not None:
        yield f"  {config.reason}"
    yield from (f"  {line}" for line in told)


def _concern_lines(config: ConfigDifference) -> Iterator[str]:
    said = {f.key for f in (*config.appeared, *config.vanished)}
    places = " ".join(f.message for f in (*config.appeared, *config.vanished))
    for concern in config.concerns:
        if isinstance(concern.change, ConstraintChange):
            if concern.change.refusal.where not in places:
                word = "meets a new refusal" if concern.value else "met a refusal that is gone"
                yield f"{word}: {_refusal(concern.change)}"
        elif concern.relation == "default":
            change = concern.change
            yield f"relies on `{concern.key}`: {_change(change)}  ({change.new})"
        elif concern.change.what not in _NAMES or f"args.{concern.key}" not in said:
            yield _set(concern, concern.change)


def _set(concern: Concern, change: FieldChange) -> str:
    value = (
        "true" if concern.value is True else "false" if concern.value is False else concern.value
    )
    where = f"  ({change.new or change.old})"
    return f"sets `{concern.key}: {brief(value, 60)}`: {_told(concern, change)}{where}"


def _told(concern: Concern, change: FieldChange) -> str:
    """What happened to an argument, for a file that may use its new name."""
    before = f"`{change.name}` before; " if concern.key == change.to else ""
    return before + _change(change)


def _change(change: FieldChange) -> str:
    """What happened to an argument, without its name."""
    match change.what:
        case "renamed" | "removed":
            told = change.why or change.what
            if change.to is not None and f"`{change.to}`" not in told:
                return f"`{change.to}` there; {told}"
            # history names by itself what to see
            near = change.near if "see `" not in told else ()
            return f"{told}; perhaps `{'`, `'.join(near)}`" if near else told
        case "added":
            return change.why or "added"
        case "unread":
            return f"nothing reads it any more, before: {brief(change.before, _WIDE)}"
        case "read":
            return f"read now: {brief(change.after, _WIDE)}, before: nowhere"
        case "conditions":
            return f"read {brief(change.before, _WIDE)} -> {brief(change.after, _WIDE)}"
        case "type":
            return f"type {brief(change.before, _WIDE)} -> {brief(change.after, _WIDE)}"
    return f"default {brief(change.before)} -> {brief(change.after)}"


def _finding_lines(config: ConfigDifference) -> Iterator[str]:
    past = {
        f"args.{concern.key}": _told(concern, concern.change)
        for concern in config.concerns
        if isinstance(concern.change, FieldChange) and concern.change.what in _NAMES
    }
    for sign, found in (("+", config.appeared), ("-", config.vanished)):
        for one in found:
            place = f"  ({one.place})" if one.place else ""
            yield f"{sign} {one.severity}[{one.code}]: {one.message}{place}"
            about = past.get(one.key or "")
            if about is not None and about not in one.message:
                yield f"      {about}"
            elif sign == "+" and about is None and one.help is not None:
                yield f"      help: {one.help}"


def _stage_lines(told: StageDifference, *, everything: bool) -> Iterator[str]:
    same = ": no change" if told.empty else ""
    yield f"{told.stage}  {told.script}{same}"
    for word, reason in told.unreadable.items():
        yield f"  {word}: {reason}"
    if not told.reads and not told.unreadable:
        yield "  what the script reads could not be followed at one of the commits"
    if everything:
        yield from _field_lines(told.fields)
        yield from _refusal_lines(told.constraints)
    elif counts := _counts(told):
        yield f"  in all: {counts} (--all shows them)"


def _counts(told: StageDifference) -> str:
    parts = []
    for what, words in _KINDS.items():
        if number := len({c.name for c in told.fields if c.what == what}):
            parts.append(f"{number} {words}")
    if told.constraints:
        parts.append(f"{len(told.constraints)} refusal(s) changed")
    return ", ".join(parts)


def _field_lines(fields: Sequence[FieldChange]) -> Iterator[str]:
    for what, words in _KINDS.items():
        found = [change for change in fields if change.what == what]
        if not found:
            continue
        yield f"  {words}:"
        for change in found:
            name = f"{change.name} -> {change.to}" if change.to else change.name
            after = f" {brief(change.after, _WIDE)}" if what == "added" else ""
            yield f"    {name}:{after} {_change(change)}  ({change.new or change.old})"


def _refusal_lines(found: Sequence[ConstraintChange]) -> Iterator[str]:
    if found:
        yield "  refusals:"
    for change in found:
        yield f"    {'-' if change.what == 'removed' else '+'} {_refusal(change)}"


def _refusal(change: ConstraintChange) -> str:
    known = change.refusal
    layer = "the parser" if known.parsing else "the script"
    return f"{layer} raises {known.error} where {shown(known.when)}  ({known.where})"


def _cache_line(difference: Difference) -> str | None:
    old, new = difference.old.cache, difference.new.cache
    if difference.cache_moved is None:
        return "dataset cache: its version is not known at one of the commits"
    if not difference.cache_moved:
        return None
    return (
        f"dataset cache: version {old or 'none'} -> {new or 'none'}: "
        "every dataset is tokenised again"
    )


def _result_line(difference: Difference) -> str:
    worse = [str(config.path) for config in difference.configs if config.worse]
    if worse:
        return f"worse for {len(worse)} of {len(difference.configs)} file(s): {', '.join(worse)}"
    if difference.worse:
        return "worse: a stage that could be read at the old commit cannot be read at the new one"
    about = "for these files" if difference.configs else "that can be told without stage files (-c)"
    return f"nothing gets worse {about}"
