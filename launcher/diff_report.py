"""A `Difference` as text: the given stage files first, then what else changed, counted or in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.difference import (
    BACKEND,
    ConstraintChange,
    FieldChange,
    Revision,
    StageDifference,
)
from launcher.errors import brief
from launcher.impact import Concern, ConfigDifference, Difference
from launcher.noops import shown

_KINDS = {
    "removed": "removed", "renamed": "renamed", "added": "added", "required": "now required",
    "type": "other type", "default": "other default", "unread": "not read any more",
    "read": "newly read", "conditions": "read under other conditions",
}  # fmt: skip
# changes of which a finding about the same key speaks too
_NAMES = {"removed", "renamed", "added", "unread"}
_WIDE = 160
_FOREIGN = "for another backend than open-instruct"


def lines(difference: Difference, *, everything: bool = False) -> list[str]:
    """The answer for people. Without stage files, or with `everything`, each change has its line."""
    told = list(_head(difference))
    for config in difference.configs:
        if config.stage is not None or config.reason != _FOREIGN:
            told += ["", *_config(config)]
    foreign = [str(c.path) for c in difference.configs if c.reason == _FOREIGN]
    if foreign:
        told += ["", f"{_FOREIGN}: {', '.join(foreign)}"]
    for stage in difference.stages.values():
        told += ["", *_stage(stage, everything=everything or not difference.configs)]
    if cache := _cache(difference):
        told += ["", cache]
    return [*told, "", _result(difference)]


def _head(difference: Difference) -> Iterator[str]:
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
    return f"{side.title}{', the pin' if side.commit == BACKEND.PIN else ''}"


# --- one stage file -------------------------------------------------------------------------------


def _config(config: ConfigDifference) -> Iterator[str]:
    words = {True: "valid", False: "INVALID", None: "cannot be judged"}
    before, after = (words[state] for state in config.valid)
    state = before if before == after else f"{before} -> {after}"
    stage = f" ({config.stage})" if config.stage else ""
    told = [*_findings(config), *_concerns(config)]
    same = ", nothing changes" if not told and config.reason is None else ""
    yield f"{config.path}{stage}: {state}{same}"
    if config.reason is not None:
        yield f"  {config.reason}"
    yield from (f"  {line}" for line in told)


def _concerns(config: ConfigDifference) -> Iterator[str]:
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


def _findings(config: ConfigDifference) -> Iterator[str]:
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


# --- one stage ------------------------------------------------------------------------------------


def _stage(told: StageDifference, *, everything: bool) -> Iterator[str]:
    same = ": no change" if told.empty else ""
    yield f"{told.stage}  {told.script}{same}"
    for word, reason in told.unreadable.items():
        yield f"  {word}: {reason}"
    if not told.reads and not told.unreadable:
        yield "  what the script reads could not be followed at one of the commits"
    if everything:
        yield from _all_fields(told.fields)
        yield from _all_constraints(told.constraints)
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


def _all_fields(fields: Sequence[FieldChange]) -> Iterator[str]:
    for what, words in _KINDS.items():
        found = [change for change in fields if change.what == what]
        if not found:
            continue
        yield f"  {words}:"
        for change in found:
            name = f"{change.name} -> {change.to}" if change.to else change.name
            after = f" {brief(change.after, _WIDE)}" if what == "added" else ""
            yield f"    {name}:{after} {_change(change)}  ({change.new or change.old})"


def _all_constraints(found: Sequence[ConstraintChange]) -> Iterator[str]:
    if found:
        yield "  refusals:"
    for change in found:
        yield f"    {'-' if change.what == 'removed' else '+'} {_refusal(change)}"


def _refusal(change: ConstraintChange) -> str:
    known = change.refusal
    layer = "the parser" if known.parsing else "the script"
    return f"{layer} raises {known.error} where {shown(known.when)}  ({known.where})"


# --- everything -----------------------------------------------------------------------------------


def _cache(difference: Difference) -> str | None:
    old, new = difference.old.cache, difference.new.cache
    if difference.cache_moved is None:
        return "dataset cache: its version is not known at one of the commits"
    if not difference.cache_moved:
        return None
    return (
        f"dataset cache: version {old or 'none'} -> {new or 'none'}: "
        "every dataset is tokenised again"
    )


def _result(difference: Difference) -> str:
    worse = [str(config.path) for config in difference.configs if config.worse]
    if worse:
        return f"worse for {len(worse)} of {len(difference.configs)} file(s): {', '.join(worse)}"
    if difference.worse:
        return "worse: a stage that could be read at the old commit cannot be read at the new one"
    about = "for these files" if difference.configs else "that can be told without stage files (-c)"
    return f"nothing gets worse {about}"
