"""What lies between two commits of open-instruct, and what that does to given stage files.

Commits are read from git objects, without a checkout, and compared by what things mean, not by how
they are spelt. Each stage file is judged at both as `launch validate-config` would judge it there.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from launcher.config import load, pipeline
from launcher.config.load import Config
from launcher.errors import Exit, Finding, InvalidConfig, select_errors, shorten
from launcher.lazy_dataclass import dataclass
from launcher.machine.git import Repository
from launcher.paths import resolve_path
from launcher.pin import functions, pin
from launcher.pin.functions import BehaviourDifference, FunctionDifference
from launcher.pin.pin import PACKAGE, Commits, describe
from launcher.stage import unused
from launcher.stage.stage import Judged, find_backend, judge_stage_file
from launcher.upstream import history, locate
from launcher.upstream.locate import Locator
from launcher.upstream.schema import Field, Schema
from launcher.upstream.trainers import BACKENDS, find_entry

BACKEND = BACKENDS["open_instruct"]
# goes into the keys of cached data sets
_CACHE_VERSION = re.compile(rb"^DATASET_CACHE_VERSION *= *['\"](.+)['\"]", re.M)
# findings about every commit that is not the pin
_EVERYWHERE = {"unpinned-checkout", "other-version"}
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
}


@dataclass(frozen=True, slots=True)
class Revision:
    """One commit: what its entry scripts take and do, by stage.

    `unreadable` holds the reason of every stage that is not in `schemas`. `cache` is the version
    that goes into the keys of cached data sets, None if the source has none.
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
        title = self.commit[:12]
        if about:
            title += f" ({about})"
        if self.commit == pin.PIN:
            title += ", the pin"
        return title

    def past(self, script: str) -> _Past:
        return functools.partial(
            history.find_changes, script=script, repository=self.repository, head=self.commit
        )

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
    """One thing that changed about one argument.

    `what` is a key of `_HEADINGS`. `before` and `after` are what it is about, as text; `old` and
    `new` the `file:line` of the definitions or reads. `to` is the new name of a renamed argument,
    `why` what history says.
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
        before = shorten(self.before, _WIDE)
        after = shorten(self.after, _WIDE)
        match self.what:
            case "renamed" | "removed":
                text = self.why or self.what
            case "added":
                text = f"{after}; {self.why}" if self.why else after
            case "type" | "default":
                text = f"{self.what} {before} -> {after}"
            case _:
                return f"{self.new or self.old}"
        return f"{text}  ({self.new or self.old})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDifference:
    """What changed about one entry script; `reads_compared`: whether its reads could be compared.

    `functions` are those on its path whose bodies differ, `behaviours` those that launch's rules
    depend on.
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
        return lost or bool(select_errors(self.appeared))

    def as_json(self) -> dict[str, object]:
        return {
            "path": str(self.path),
            "stage": self.stage,
            "reason": self.reason,
            "valid": {"old": self.valid[0], "new": self.valid[1]},
            "worse": self.worse,
            "findings": {
                "appeared": [finding.as_json() for finding in self.appeared],
                "vanished": [finding.as_json() for finding in self.vanished],
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


def compare_commits(
    commits: Commits, paths: Sequence[Path] = (), *, stage: str | None = None
) -> CommitDifference:
    """Compare two commits, and what they mean for the stage files `paths`.

    `stage` is for flat files that do not say theirs. Raises NotReady if git lacks the commits'
    files, InvalidConfig with all findings if a stage file cannot even be read.
    """
    configs = _load_configs(paths)
    repository = commits.repository
    old = _read_revision(repository, commits.old, commits.names[0])
    new = _read_revision(repository, commits.new, commits.names[1])
    stages: dict[str, StageDifference] = {}
    for key, entry in BACKEND.STAGES.items():
        # a further script of a stage that only the newer commit has is no loss of anything
        if not entry.stage or key in old.schemas:
            stages[key] = _compare_stage(key, old, new)
    ahead, behind = pin.count_commits_between(repository, commits.old, commits.new)
    return CommitDifference(
        repository=repository.root,
        shallow=repository.is_shallow(),
        old=old,
        new=new,
        ahead=ahead,
        behind=behind,
        stages=stages,
        configs=tuple(_judge_both(config, old, new, stages, stage) for config in configs),
    )


def _load_configs(paths: Sequence[Path]) -> list[Config]:
    # a stage file beside the pipeline that names it counts once
    configs: dict[tuple[Path, tuple[str, ...]], Config] = {}
    faults: list[Finding] = []
    for path in paths:
        try:
            configs[resolve_path(path), ()] = load.load(path)
        except InvalidConfig as error:
            if {finding.code for finding in error.findings} != {load.PIPELINE}:
                faults += error.findings
                continue
            for link in pipeline.load(path).links:
                overrides = link.texts()
                key = (resolve_path(link.config), tuple(overrides))
                configs[key] = load.load(link.config, overrides)
    if faults:
        raise InvalidConfig(faults)
    return list(configs.values())


def _read_revision(repository: Repository, commit: str, name: str) -> Revision:
    source = locate.read_commit(repository, commit)
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
    version = _CACHE_VERSION.search(raw)
    return Revision(
        name=name,
        commit=commit,
        date=date,
        subject=subject,
        repository=repository,
        locator=locator,
        schemas=schemas,
        unreadable=unreadable,
        cache=None if version is None else version[1].decode(),
    )


def _compare_stage(stage: str, old: Revision, new: Revision) -> StageDifference:
    entry = BACKEND.STAGES[stage]
    unreadable: dict[str, str] = {}
    for side, revision in (("old", old), ("new", new)):
        if stage in revision.unreadable:
            unreadable[side] = revision.unreadable[stage]
    difference = StageDifference(
        stage=stage, script=entry.script, unreadable=unreadable, reads_compared=False
    )
    if unreadable:
        return difference
    first = old.schemas[stage]
    second = new.schemas[stage]
    past_of_old = old.past(entry.script)
    past_of_new = new.past(entry.script)
    changes = _ArgumentPairs(first, second, past_of_old, past_of_new).compare()
    old_functions = functions.find_reached_functions(old.locator.find(BACKEND.NAME), entry, first)
    new_functions = functions.find_reached_functions(new.locator.find(BACKEND.NAME), entry, second)
    return replace(
        difference,
        reads_compared=bool(first.path.reads and second.path.reads),
        changes=tuple(changes),
        functions=functions.compare(old_functions, new_functions),
        behaviours=functions.compare_behaviours(first, second),
    )


@dataclass(frozen=True, slots=True)
class _ArgumentPairs:
    """The arguments of one script at two commits, with what history says of each up to them."""

    old: Schema
    new: Schema
    past_of_old: _Past
    past_of_new: _Past

    def compare(self) -> Iterator[ArgumentDifference]:
        old = self.old.fields
        new = self.new.fields
        renames = self._find_renames()
        for name, field in old.items():
            if name in new:
                continue
            change = ArgumentDifference(
                name=name,
                what="removed",
                old=field.where,
                before=field.type,
                why=_explain_change(self.past_of_new(name), gone=True),
            )
            if name in renames:
                to = new[renames[name]]
                change = replace(change, what="renamed", to=to.name, after=to.type, new=to.where)
            yield change
        for name, field in new.items():
            if name not in old and name not in renames.values():
                yield ArgumentDifference(
                    name=name,
                    what="added",
                    after=f"{field.type} = {describe_default(field)}",
                    new=field.where,
                    why=_explain_change(self.past_of_new(name), gone=False),
                )
        pairs = []
        for name, field in old.items():
            to_name = name if name in new else renames.get(name)
            if to_name is not None:
                pairs.append((field, new[to_name]))
        for before, after in pairs:
            yield from _compare_fields(before, after)
        for before, after in pairs:
            yield from self._compare_reads(before, after)

    def _find_renames(self) -> Mapping[str, str]:
        """The new names by the old ones; if NEW is the older commit, as they were renamed later."""
        gone = [name for name in self.old.fields if name not in self.new.fields]
        added = [name for name in self.new.fields if name not in self.old.fields]
        renames = dict(_follow_renames(gone, self.past_of_new, added))
        for name, earlier in _follow_renames(added, self.past_of_old, gone):
            renames.setdefault(earlier, name)
        return renames

    def _compare_reads(self, before: Field, after: Field) -> Iterator[ArgumentDifference]:
        """A read that came or went; one under other conditions shows in the functions."""
        first = self.old.path.reads.get(before.name)
        second = self.new.path.reads.get(after.name)
        if first is None or second is None or bool(first) == bool(second):
            return
        yield ArgumentDifference(
            name=before.name,
            what="read" if second else "unread",
            old=first[0].where if first else before.where,
            new=second[0].where if second else after.where,
            to=_find_new_name(before, after),
        )


def _follow_renames(
    names: Iterable[str], past: _Past, others: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Each name that lives on under another one of `others`, with that one."""
    for name in names:
        events = past(name)
        to = history.find_present_name(events[0], past, others) if events else None
        if to is not None:
            yield name, to


def _explain_change(events: Sequence[history.ArgumentChange], *, gone: bool) -> str | None:
    """How a name went away or came, for people; None if NEW is the older commit."""
    return history.describe_event(events[0]) if events and events[0].gone == gone else None


def _find_new_name(old: Field, new: Field) -> str | None:
    return None if new.name == old.name else new.name


def _compare_fields(old: Field, new: Field) -> Iterator[ArgumentDifference]:
    change = ArgumentDifference(
        name=old.name, what="type", old=old.where, new=new.where, to=_find_new_name(old, new)
    )
    if _describe_accepted(old) != _describe_accepted(new):
        yield replace(change, before=_render_type(old), after=_render_type(new))
    before = describe_default(old)
    after = describe_default(new)
    if before != after:
        yield replace(change, what="default", before=before, after=after)


def _describe_accepted(field: Field) -> tuple[object, ...]:
    """What of a type decides which words a flag takes."""
    kind = field.type if field.kind == "opaque" else field.kind
    return kind, sorted(map(str, field.choices)), field.many, field.bare


def _render_type(field: Field) -> str:
    if not field.choices:
        return field.type
    return f"{field.type} ({', '.join(map(str, field.choices))})"


def describe_default(field: Field) -> str:
    if field.required:
        return "required"
    if field.default_text is not None:
        return field.default_text
    if field.default is None or isinstance(field.default, bool):
        return str(field.default).lower()
    if isinstance(field.default, float) and field.default.is_integer():
        return str(int(field.default))
    return str(field.default)


def _judge_both(
    config: Config,
    old: Revision,
    new: Revision,
    stages: Mapping[str, StageDifference],
    stage: str | None,
) -> ConfigDifference:
    difference = ConfigDifference(path=config.path, stage=None)
    if find_backend(config) != BACKEND.NAME:
        return replace(difference, reason="for another backend than open-instruct")
    judged: list[Judged] = []
    reasons: list[str] = []
    valid: list[bool | None] = []
    for revision in (old, new):
        side = _judge_config(config, revision, stage)
        if isinstance(side, str):
            reasons.append(side)
            valid.append(None)
        else:
            judged.append(side)
            valid.append(not select_errors(side.findings))
    if judged:
        difference = replace(difference, stage=judged[0].stage)
    difference = replace(difference, valid=tuple(valid))
    if reasons:
        return replace(difference, reason="; ".join(reasons))
    first, second = judged
    if first.schema is None or second.schema is None:
        return replace(difference, reason="names no stage that launch starts")
    changes = stages[first.schema.key].changes
    return replace(
        difference,
        appeared=_subtract_findings(second, first),
        vanished=_subtract_findings(first, second),
        defaults=tuple(change for change in changes if _relies_on(change, first, second)),
    )


def _judge_config(config: Config, side: Revision, stage: str | None) -> Judged | str:
    """A file against a commit; the reason if its stage cannot be read there."""
    try:
        judged = judge_stage_file(config, stage=stage, locator=side.locator)
    except InvalidConfig as error:
        return error.findings[0].message
    kept = [finding for finding in judged.findings if finding.code not in _EVERYWHERE]
    return replace(judged, findings=tuple(kept))


def _subtract_findings(judged: Judged, other: Judged) -> tuple[Finding, ...]:
    """Findings that the other side does not have; the same code about the same key is the same."""
    others = {_identify_finding(finding) for finding in other.findings}
    left: list[Finding] = []
    for finding in judged.findings:
        if _identify_finding(finding) not in others:
            left.append(finding)
    return tuple(left)


def _identify_finding(finding: Finding) -> tuple[str | None, ...]:
    about = None
    if finding.code == "refused-by-source":
        # of several refusals of one argument its conditions tell them apart, wherever they stand
        about = finding.message.partition(" raises ")[2]
    return finding.severity, finding.code, finding.key, about


def _relies_on(change: ArgumentDifference, old: Judged, new: Judged) -> bool:
    """Whether a file leaves an argument to a default that changes, and something reads it."""
    assert old.schema and new.schema and old.values is not None and new.values is not None
    if change.what != "default":
        return False
    to = change.to or change.name
    args = new.config.args
    if args.get(change.name) is not None or args.get(to) is not None:
        return False
    entry = find_entry(new.schema)
    derived = {*entry.derived, entry.names.output, "do_not_randomize_output_dir"}
    if new.options is not None and new.options.batch is not None:
        derived |= {entry.names.per_device, entry.names.accumulation}
    if to in derived:
        return False
    if unused.may_be_read(old.values, find_entry(old.schema), change.name):
        return True
    return unused.may_be_read(new.values, entry, to)


def render_difference(difference: CommitDifference, *, everything: bool = False) -> list[str]:
    """The answer for people; each change has its line without stage files, or with `everything`."""
    everything = everything or not difference.configs
    lines = list(_render_head(difference))
    for config in difference.configs:
        lines += ["", *_render_config(config)]
    changed: dict[str, tuple[FunctionDifference, ...]] = {}
    behaviours: dict[str, tuple[BehaviourDifference, ...]] = {}
    for key, stage in difference.stages.items():
        lines += ["", *_render_stage(stage, everything=everything)]
        if not stage.unreadable:
            changed[key] = stage.functions
            behaviours[key] = stage.behaviours
    if changed:
        lines += ["", *functions.render_functions(changed, everything=everything)]
    if any(behaviours.values()):
        lines += ["", *functions.render_behaviours(behaviours)]
    if difference.cache_moved:
        versions = f"{difference.old.cache or 'none'} -> {difference.new.cache or 'none'}"
        lines += ["", f"dataset cache: version {versions}: every dataset is tokenised again"]
    return [*lines, "", _render_result(difference)]


def _render_head(difference: CommitDifference) -> Iterator[str]:
    yield f"old  {difference.old.title}"
    yield f"new  {difference.new.title}"
    steps = pin.describe_distance(difference.ahead, difference.behind)
    if steps is not None:
        yield f"     {steps}"
    if difference.shallow:
        yield "     the clone has no whole history: counts and renames go as far as it does"


def _render_config(config: ConfigDifference) -> Iterator[str]:
    words = {True: "valid", False: "INVALID", None: "cannot be judged"}
    states = dict.fromkeys(words[state] for state in config.valid)
    stage = f" ({config.stage})" if config.stage else ""
    yield f"{config.path}{stage}: {' -> '.join(states)}"
    if config.reason is not None:
        yield f"  {config.reason}"
    for finding in config.appeared:
        yield _render_finding("+", finding)
        if finding.help is not None:
            yield f"        help: {finding.help}"
    for finding in config.vanished:
        yield _render_finding("-", finding)
    for change in config.defaults:
        yield f"  relies on `{change.to or change.name}`: {change}"


def _render_finding(sign: str, finding: Finding) -> str:
    line = f"  {sign} {finding.severity}[{finding.code}]: {finding.message}"
    return f"{line}  ({finding.place})" if finding.place else line


def _render_stage(stage: StageDifference, *, everything: bool) -> Iterator[str]:
    same = "" if stage.changes or stage.unreadable else ": no change"
    yield f"{stage.stage}  {stage.script}{same}"
    for side, reason in stage.unreadable.items():
        yield f"  {side}: {reason}"
    if not stage.reads_compared and not stage.unreadable:
        yield "  what the script reads could not be followed at one of the commits"
    by_heading: dict[str, list[ArgumentDifference]] = {}
    for what, heading in _HEADINGS.items():
        changes = [change for change in stage.changes if change.what == what]
        if changes:
            by_heading[heading] = changes
    if not everything and by_heading:
        counts = [f"{len(changes)} {heading}" for heading, changes in by_heading.items()]
        yield f"  in all: {', '.join(counts)} (--all shows them)"
        return
    for heading, changes in by_heading.items():
        yield f"  {heading}:"
        for change in changes:
            name = f"{change.name} -> {change.to}" if change.to else change.name
            yield f"    {name}: {change}"


def _render_result(difference: CommitDifference) -> str:
    """The last line. It never says that nothing got worse."""
    configs = difference.configs
    worse = [str(config.path) for config in configs if config.worse]
    if worse:
        return f"worse for {len(worse)} of {len(configs)} file(s): {', '.join(worse)}"
    if difference.worse:
        return "worse: a stage that could be read at the old commit cannot be read at the new one"
    judged = "every stage can be read"
    if configs:
        judged = f"no new error in {len(configs)} file(s)"
    symbols: set[str] = set()
    for stage in difference.stages.values():
        symbols.update(function.symbol for function in stage.functions)
    if not symbols:
        return f"{judged}, and every function on the path is the same"
    does = "does" if len(symbols) == 1 else "do"
    return f"{judged}; what {len(symbols)} function(s) {does} otherwise is for you to read"
