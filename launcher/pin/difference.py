"""What lies between two commits of open-instruct, and what that does to given stage files.

Commits are read from git objects, without a checkout, and compared by what things mean, not by how
they are spelt. Each stage file is judged at both as `launch validate-config` would judge it there.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.config import load, pipeline
from launcher.config.load import Config
from launcher.errors import Exit, Finding, InvalidConfig, brief, errors
from launcher.machine.git import Repository
from launcher.paths import canonical
from launcher.pin import functions, pin
from launcher.pin.functions import BehaviourDifference, FunctionDifference
from launcher.pin.pin import PACKAGE, Commits, describe
from launcher.stage import unused
from launcher.stage.stage import Judged, backend_of, judge
from launcher.upstream import history, locate
from launcher.upstream.locate import Locator
from launcher.upstream.schema import Field, Read, Refusal, Schema
from launcher.upstream.source import conditions
from launcher.upstream.source.reached import Reached
from launcher.upstream.trainers import BACKENDS, Entry, entry_of

BACKEND = BACKENDS["open_instruct"]
# goes into the keys of cached data sets
_CACHE_VERSION = re.compile(rb"^DATASET_CACHE_VERSION *= *['\"](.+)['\"]", re.M)
_EVERYWHERE = {"unpinned-checkout", "other-version"}  # findings about every commit that is not the pin
_WIDE = 160
_Past = Callable[[str], Sequence[history.ArgumentChange]]
"""What happened to an argument of a script, up to a commit."""

_HEADINGS = {
    "removed": "removed",
    "renamed": "renamed",
    "added": "added",
    "type": "other type",
    "default": "other default",
    "unread": "not read any more",
    "read": "newly read",
    "conditions": "read under other conditions",
    "refused": "newly refused",
    "accepted": "refused no more",
}


@dataclass(frozen=True, slots=True)
class Revision:
    """One commit: what its entry scripts take and do, by stage.

    `unreadable` holds the reason of every stage that is not in `schemas`. `cache` is the version that
    goes into the keys of cached datasets, None where the source has none.
    """

    name: str
    commit: str
    date: str | None
    subject: str | None
    repository: Repository
    locator: Locator
    schemas: Mapping[str, Schema]
    unreadable: Mapping[str, str]
    cache: str | None

    @property
    def title(self) -> str:
        about = ", ".join(part for part in (self.date, self.subject) if part)
        named = f"{self.commit[:12]} ({about})" if about else self.commit[:12]
        return f"{named}, the pin" if self.commit == pin.PIN else named

    def past(self, script: str) -> _Past:
        return functools.partial(history.of, script=script, repository=self.repository, head=self.commit)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "commit": self.commit,
            "date": self.date,
            "subject": self.subject,
            "pin": self.commit == BACKEND.PIN,
            "unreadable": dict(self.unreadable),
            "dataset_cache_version": self.cache,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentDifference:
    """One thing that changed about one argument, or one `raise` that arguments alone lead to.

    `name` is the argument, or the error that is raised; `what` a key of `_HEADINGS`. `before` and `after`
    are what it is about, as text; `old` and `new` the `file:line` of the definitions, reads or raises. `to`
    is the new name of a renamed argument, `why` what history says.
    """

    name: str
    what: str
    before: str | None = None
    after: str | None = None
    old: str | None = None
    new: str | None = None
    to: str | None = None
    why: str | None = None

    def __str__(self) -> str:
        before, after = brief(self.before, _WIDE), brief(self.after, _WIDE)
        match self.what:
            case "renamed" | "removed":
                text = self.why or self.what
            case "added":
                text = f"{after}; {self.why}" if self.why else after
            case "refused" | "accepted":
                text = f"where {brief(self.after or self.before, _WIDE)}"
            case _:
                text = f"{self.what if self.what in {'type', 'default'} else 'read'} {before} -> {after}"
        return f"{text}  ({self.new or self.old})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDifference:
    """What changed about one entry script; `reads_compared` is whether what it reads could be compared.

    `functions` are those on its path whose bodies differ, `behaviours` those that launch's rules depend on.
    """

    stage: str
    script: str
    unreadable: Mapping[str, str]
    reads_compared: bool
    changes: tuple[ArgumentDifference, ...] = ()
    functions: tuple[FunctionDifference, ...] = ()
    behaviours: tuple[BehaviourDifference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDifference:
    """One stage file at both commits.

    `valid` is None where the commit's source could not be read for this stage, or the file is for
    another backend (`reason`). `defaults` are the changed defaults that the file relies on.
    """

    path: Path
    stage: str | None
    reason: str | None = None
    valid: tuple[bool | None, ...] = (None, None)
    appeared: tuple[Finding, ...] = ()
    vanished: tuple[Finding, ...] = ()
    defaults: tuple[ArgumentDifference, ...] = ()

    @property
    def worse(self) -> bool:
        """Whether an error appeared, or the file cannot be judged at NEW any more."""
        lost = self.valid[0] is not None and self.valid[1] is None
        return lost or bool(errors(self.appeared))

    def as_json(self) -> dict[str, object]:
        return {
            "path": str(self.path),
            "stage": self.stage,
            "reason": self.reason,
            "valid": {"old": self.valid[0], "new": self.valid[1]},
            "worse": self.worse,
            "findings": {
                name: [finding.as_json() for finding in found]
                for name, found in (("appeared", self.appeared), ("vanished", self.vanished))
            },
            "defaults": [asdict(change) for change in self.defaults],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDifference:
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
    def cache_moved(self) -> bool:
        """Whether cached datasets of OLD are found at NEW no more."""
        return self.old.cache != self.new.cache

    @property
    def worse(self) -> bool:
        """Whether NEW refuses a file that OLD took or finds another error in it; without files,
        whether a stage that could be read at OLD cannot be read at NEW."""
        if self.configs:
            return any(config.worse for config in self.configs)
        return any({*stage.unreadable} == {"new"} for stage in self.stages.values())

    @property
    def exit_code(self) -> Exit:
        return Exit.CONFIG if self.worse else Exit.OK

    def as_json(self) -> dict[str, object]:
        return {
            "repository": str(self.repository),
            "shallow": self.shallow,
            "old": self.old.as_json(),
            "new": self.new.as_json(),
            "ahead": self.ahead,
            "behind": self.behind,
            "worse": self.worse,
            "dataset_cache_moved": self.cache_moved,
            "stages": {name: asdict(stage) for name, stage in self.stages.items()},
            "configs": [config.as_json() for config in self.configs],
        }


def between(commits: Commits, paths: Sequence[Path] = (), *, stage: str | None = None) -> CommitDifference:
    """Compare two commits, and what they mean for the stage files `paths`.

    `stage` is for flat files that do not say theirs. Raises NotReady where git lacks the commits' files,
    InvalidConfig with all findings where a stage file cannot even be read.
    """
    loaded = _load(paths)
    repository = commits.repository
    old = _read(repository, commits.old, commits.names[0])
    new = _read(repository, commits.new, commits.names[1])
    compared = {
        name: _compare(name, old, new)
        for name, entry in BACKEND.STAGES.items()
        # a further script of a stage that neither or only the newer commit has is no loss of anything
        if not entry.stage or name in old.schemas
    }
    ahead, behind = pin.distance(repository, commits.old, commits.new)
    return CommitDifference(
        repository=repository.root,
        shallow=repository.is_shallow(),
        old=old,
        new=new,
        ahead=ahead,
        behind=behind,
        stages=compared,
        configs=tuple(_judge_both(one, old, new, compared, stage) for one in loaded),
    )


def _load(paths: Sequence[Path]) -> list[Config]:
    # a stage file beside the pipeline that names it counts once
    loaded: dict[tuple[Path, tuple[str, ...]], Config] = {}
    faults: list[Finding] = []
    for path in paths:
        try:
            loaded[canonical(path), ()] = load.load(path)
        except InvalidConfig as error:
            if {finding.code for finding in error.findings} == {load.PIPELINE}:
                for link in pipeline.load(path).links:
                    texts = link.texts()
                    loaded[canonical(link.config), tuple(texts)] = load.load(link.config, texts)
            else:
                faults += error.findings
    if faults:
        raise InvalidConfig(faults)
    return [*loaded.values()]


def _read(repository: Repository, commit: str, name: str) -> Revision:
    source = locate.at_commit(repository, commit)
    locator = Locator.of(source)
    schemas: dict[str, Schema] = {}
    unreadable: dict[str, str] = {}
    for stage, entry in BACKEND.STAGES.items():
        try:
            schemas[stage] = locator.schema(BACKEND.NAME, stage)
        except InvalidConfig as error:
            unreadable[stage] = f"{entry.script}: {error.findings[0].message}"
    date, subject = describe(repository, commit)
    raw = source.packages[PACKAGE].read("dataset_transformation.py") or b""
    cache = found[1].decode() if (found := _CACHE_VERSION.search(raw)) else None
    return Revision(name, commit, date, subject, repository, locator, schemas, unreadable, cache)


def _compare(stage: str, old: Revision, new: Revision) -> StageDifference:
    script = BACKEND.STAGES[stage].script
    unreadable = {side: r.unreadable[stage] for side, r in (("old", old), ("new", new)) if stage in r.unreadable}
    if unreadable:
        return StageDifference(stage=stage, script=script, unreadable=unreadable, reads_compared=False)
    first, second = old.schemas[stage], new.schemas[stage]
    changes = list(_fields(first.fields, second.fields, old.past(script), new.past(script)))
    renames = {c.name: c.to for c in changes if c.what == "renamed" and c.to}
    followed = bool(first.path.reads) and bool(second.path.reads)
    if followed:
        changes += _reads(first, second, renames)
        changes += _refusals(first.path.refusals, second.path.refusals, renames)
    return StageDifference(
        stage=stage,
        script=script,
        unreadable={},
        reads_compared=followed,
        changes=tuple(changes),
        functions=functions.compare(_on_path(stage, old), _on_path(stage, new)),
        behaviours=functions.behaviours(first, second),
    )


def _on_path(stage: str, revision: Revision) -> Mapping[str, Reached]:
    source = revision.locator.find(BACKEND.NAME)
    return functions.on_path(source, BACKEND.STAGES[stage], revision.schemas[stage])


def _fields(
    old: Mapping[str, Field], new: Mapping[str, Field], before: _Past, after: _Past
) -> Iterator[ArgumentDifference]:
    gone = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    # old name -> new name; where NEW is the older commit, as it was renamed later
    renames = dict(_renames(gone, after, added))
    renames |= {to: name for name, to in _renames(added, before, gone) if to not in renames}
    for name in gone:
        change = ArgumentDifference(
            name=name, what="removed", old=old[name].where, before=old[name].type, why=_why(after(name), gone=True)
        )
        if to := renames.get(name):
            change = replace(change, what="renamed", to=to, after=new[to].type, new=new[to].where)
        yield change
    for name in (name for name in added if name not in renames.values()):
        about = f"{new[name].type} = {shown_default(new[name])}"
        why = _why(after(name), gone=False)
        yield ArgumentDifference(name=name, what="added", after=about, new=new[name].where, why=why)
    for name, known in old.items():
        if (to := name if name in new else renames.get(name)) is not None:
            yield from _altered(known, new[to])


def _renames(names: Iterable[str], past: _Past, others: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        events = past(name)
        if events and (to := history.called_now(events[0], past, others)) is not None:
            yield name, to


def _why(events: Sequence[history.ArgumentChange], *, gone: bool) -> str | None:
    """How a name went away or came, for people; None where NEW is the older commit."""
    return history.sentence(events[0]) if events and events[0].gone == gone else None


def _altered(old: Field, new: Field) -> Iterator[ArgumentDifference]:
    to = new.name if new.name != old.name else None
    change = ArgumentDifference(name=old.name, what="type", old=old.where, new=new.where, to=to)
    if _takes(old) != _takes(new):
        yield replace(change, before=_shown_type(old), after=_shown_type(new))
    before, after = shown_default(old), shown_default(new)
    if before != after:
        yield replace(change, what="default", before=before, after=after)


def _takes(known: Field) -> tuple[object, ...]:
    """What of a type decides which words a flag takes."""
    kind = known.type if known.kind == "opaque" else known.kind
    return kind, sorted(map(str, known.choices)), known.many, known.bare


def _shown_type(known: Field) -> str:
    return f"{known.type} ({', '.join(map(str, known.choices))})" if known.choices else known.type


def shown_default(known: Field) -> str:
    if known.required:
        return "required"
    if known.default_text is not None:
        return known.default_text
    if known.default is None or isinstance(known.default, bool):
        return str(known.default).lower()
    whole = isinstance(known.default, float) and known.default.is_integer()
    return str(int(known.default) if whole else known.default)


def _reads(old: Schema, new: Schema, renames: Mapping[str, str]) -> Iterator[ArgumentDifference]:
    entries = entry_of(old), entry_of(new)
    for name, known in old.fields.items():
        to = name if name in new.fields else renames.get(name, "")
        first, second = old.path.reads.get(name), new.path.reads.get(to)
        if first is None or second is None:
            continue
        before = _shown_reads(first, entries[0], renames)
        after = _shown_reads(second, entries[1], {})
        if before != after:
            yield ArgumentDifference(
                name=name,
                what="conditions" if first and second else "read" if second else "unread",
                to=to if to != name else None,
                before=before,
                after=after,
                old=first[0].where if first else known.where,
                new=second[0].where if second else new.fields[to].where,
            )


def _shown_reads(reads: Sequence[Read], entry: Entry, renames: Mapping[str, str]) -> str:
    known = {frozenset(_renamed(c, renames) for c in unused.condition_of(r, entry)) for r in reads}
    if frozenset() in known:
        return "always"
    weakest = [one for one in known if not any(other < one for other in known)]
    return " or ".join(sorted(" and ".join(sorted(one)) for one in weakest)) or "nowhere"


def _renamed(text: str, renames: Mapping[str, str]) -> str:
    for name in conditions.names(text) & renames.keys():
        text = re.sub(rf"(?<![\w.'\"]){re.escape(name)}(?!\w)", renames[name], text)
    return text


def _refusals(
    old: Iterable[Refusal], new: Iterable[Refusal], renames: Mapping[str, str]
) -> Iterator[ArgumentDifference]:
    def by_conditions(refusals: Iterable[Refusal], renames: Mapping[str, str]) -> Mapping[object, Refusal]:
        return {(frozenset(_renamed(c, renames) for c in r.when), r.parsing): r for r in refusals}

    def raiser(refusal: Refusal) -> str:
        return f"{refusal.error} of {'the parser' if refusal.parsing else 'the script'}"

    first, second = by_conditions(old, renames), by_conditions(new, {})
    for one in (refusal for key, refusal in first.items() if key not in second):
        yield ArgumentDifference(name=raiser(one), what="accepted", before=unused.shown(one.when), old=one.where)
    for one in (refusal for key, refusal in second.items() if key not in first):
        yield ArgumentDifference(name=raiser(one), what="refused", after=unused.shown(one.when), new=one.where)


def _judge_both(
    config: Config, old: Revision, new: Revision, compared: Mapping[str, StageDifference], stage: str | None
) -> ConfigDifference:
    if backend_of(config) != BACKEND.NAME:
        return ConfigDifference(path=config.path, stage=None, reason="for another backend than open-instruct")
    first, second = sides = [_judge(config, side, stage) for side in (old, new)]
    difference = ConfigDifference(
        path=config.path,
        stage=next((judged.stage for judged in sides if isinstance(judged, Judged)), None),
        valid=tuple(None if isinstance(side, str) else not errors(side.findings) for side in sides),
    )
    if not isinstance(first, Judged) or not isinstance(second, Judged):
        return replace(difference, reason="; ".join(side for side in sides if isinstance(side, str)))
    if first.schema is None or second.schema is None:
        return replace(difference, reason="names no stage that launch starts")
    changes = compared[first.schema.key].changes
    return replace(
        difference,
        appeared=_only_in(second, first),
        vanished=_only_in(first, second),
        defaults=tuple(c for c in changes if _relies_on(c, first, second)),
    )


def _judge(config: Config, side: Revision, stage: str | None) -> Judged | str:
    """A file against a commit; the reason where its stage cannot be read there."""
    try:
        judged = judge(config, stage=stage, locator=side.locator)
    except InvalidConfig as error:
        return error.findings[0].message
    kept = tuple(f for f in judged.findings if f.code not in _EVERYWHERE)
    return replace(judged, findings=kept)


def _only_in(judged: Judged, other: Judged) -> tuple[Finding, ...]:
    """Findings that the other side does not have; the same code about the same key is the same."""
    known = {_identity(finding) for finding in other.findings}
    return tuple(finding for finding in judged.findings if _identity(finding) not in known)


def _identity(finding: Finding) -> tuple[str | None, ...]:
    # of several refusals of one argument its conditions tell them apart, wherever they stand
    of_source = finding.code == "refused-by-source"
    about = finding.message.partition(" raises ")[2] if of_source else None
    return finding.severity, finding.code, finding.key, about


def _relies_on(change: ArgumentDifference, old: Judged, new: Judged) -> bool:
    """Whether a file leaves an argument to a default that changes, and something reads it."""
    assert old.schema and new.schema and old.values is not None and new.values is not None
    args, to = new.config.args, change.to or change.name
    if change.what != "default" or args.get(change.name) is not None or args.get(to) is not None:
        return False
    entries = entry_of(old.schema), entry_of(new.schema)
    derived = {*entries[1].derived, entries[1].names.output, "do_not_randomize_output_dir"}
    if new.options is not None and new.options.batch is not None:
        derived |= {entries[1].names.per_device, entries[1].names.accumulation}
    acts = unused.acts(old.values, entries[0], change.name) or unused.acts(new.values, entries[1], to)
    return to not in derived and acts


def lines(difference: CommitDifference, *, everything: bool = False) -> list[str]:
    """The answer for people. Without stage files, or with `everything`, each change has its line."""
    lines = list(_head_lines(difference))
    for config in difference.configs:
        lines += ["", *_config_lines(config)]
    for stage in difference.stages.values():
        lines += ["", *_stage_lines(stage, everything=everything or not difference.configs)]
    compared = {name: stage for name, stage in difference.stages.items() if not stage.unreadable}
    by_stage = {name: stage.functions for name, stage in compared.items()}
    if compared:
        lines += ["", *functions.lines(by_stage, everything=everything or not difference.configs)]
    known = [*functions.behaviour_lines({name: stage.behaviours for name, stage in compared.items()})]
    if known:
        lines += ["", *known]
    old, new = difference.old.cache, difference.new.cache
    if difference.cache_moved:
        moved = f"dataset cache: version {old or 'none'} -> {new or 'none'}"
        lines += ["", f"{moved}: every dataset is tokenised again"]
    return [*lines, "", _result_line(difference)]


def _head_lines(difference: CommitDifference) -> Iterator[str]:
    yield f"old  {difference.old.title}"
    yield f"new  {difference.new.title}"
    if steps := pin.counts(difference.ahead, difference.behind):
        yield f"     {steps}"
    if difference.shallow:
        yield "     the history was cut off when it was cloned: counts and renames go as far as it does"


def _config_lines(config: ConfigDifference) -> Iterator[str]:
    words = {True: "valid", False: "INVALID", None: "cannot be judged"}
    states = dict.fromkeys(words[state] for state in config.valid)
    stage = f" ({config.stage})" if config.stage else ""
    yield f"{config.path}{stage}: {' -> '.join(states)}"
    if config.reason is not None:
        yield f"  {config.reason}"
    for sign, found in (("+", config.appeared), ("-", config.vanished)):
        for finding in found:
            place = f"  ({finding.place})" if finding.place else ""
            yield f"  {sign} {finding.severity}[{finding.code}]: {finding.message}{place}"
            if sign == "+" and finding.help is not None:
                yield f"        help: {finding.help}"
    for change in config.defaults:
        yield f"  relies on `{change.to or change.name}`: {change}"


def _stage_lines(stage: StageDifference, *, everything: bool) -> Iterator[str]:
    same = ": no change" if not (stage.changes or stage.unreadable) else ""
    yield f"{stage.stage}  {stage.script}{same}"
    for side, reason in stage.unreadable.items():
        yield f"  {side}: {reason}"
    if not stage.reads_compared and not stage.unreadable:
        yield "  what the script reads could not be followed at one of the commits"
    numbers = []
    for what, heading in _HEADINGS.items():
        found = [change for change in stage.changes if change.what == what]
        if found and everything:
            yield f"  {heading}:"
            for change in found:
                name = f"{change.name} -> {change.to}" if change.to else change.name
                yield f"    {name}: {change}"
        elif found:
            numbers.append(f"{len(found)} {heading}")
    if numbers:
        yield f"  in all: {', '.join(numbers)} (--all shows them)"


def _result_line(difference: CommitDifference) -> str:
    worse = [str(config.path) for config in difference.configs if config.worse]
    if worse:
        return f"worse for {len(worse)} of {len(difference.configs)} file(s): {', '.join(worse)}"
    if difference.worse:
        return "worse: a stage that could be read at the old commit cannot be read at the new one"
    return _without_errors(difference)


def _without_errors(difference: CommitDifference) -> str:
    """The last line where no file has a new error: never that nothing got worse."""
    symbols = {one.symbol for stage in difference.stages.values() for one in stage.functions}
    judged = f"no new error in {len(difference.configs)} file(s)" if difference.configs else "every stage can be read"
    if not symbols:
        return f"{judged}, and every function on the path is the same"
    does = "does" if len(symbols) == 1 else "do"
    return f"{judged}; what {len(symbols)} function(s) {does} otherwise is for you to read"
