"""`launch cache why RUN`: what made a run's caches hit or miss, by what differed from before.

Two keys are compared, from the outside in: launch's, which names the folder (contents, versions),
and upstream's own, which names the entry in it (arguments; its `config.json` if nothing else
differs).
"""

import collections
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launcher import files
from launcher.cache import folders
from launcher.cache.folders import CacheRecord, CacheUse
from launcher.cache.keys import Input
from launcher.errors import shorten
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.runs import events, rundir
from launcher.runs.record import as_mapping
from launcher.runs.rundir import RunFolder

_DIGITS = 12
_MOST = 12


@dataclass(frozen=True, slots=True)
class _CacheEvent:
    """What the probe saw of a cache: `hit`, `miss` or `unknown`, and upstream's entry in it."""

    state: str = "unknown"
    path: str = ""


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """One thing that changed: what, before and now, and the sentence for people."""

    what: str
    before: Any
    now: Any
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one cache of a run was hit or missed.

    `state` is what the probe saw (`hit`, `miss`, `unknown`), `compared` the run that `differences`
    are against, None if there was none before.
    """

    kind: str
    state: str
    folder: str
    compared: str | None
    differences: tuple[KeyDifference, ...]
    text: str

    def lines(self) -> list[str]:
        differences = [f"  {difference.text}" for difference in self.differences]
        return [f"{self.kind} cache: {self.text}", *differences]


def explain_caches(run: RunFolder) -> list[Reason]:
    """The reasons for every cache of a run's newest attempt; empty if no folder of it is here."""
    uses: list[CacheUse] = []
    for folder in folders.list_folders():
        uses += folder.uses()
    uses.sort(key=lambda use: use.time)
    path = str(run.path.absolute())
    own = [use for use in uses if use.run == path]
    newest = max((use.attempt for use in own), default=0)
    first = _find_first_events(run)
    reasons = []
    for use in own:
        if use.attempt == newest:
            event = first.get(f"{use.cache.kind}_cache", _CacheEvent())
            reasons.append(_explain_use(use, uses, event))
    return reasons


def _find_first_events(run: RunFolder) -> dict[str, _CacheEvent]:
    """What rank 0's probe recorded first of each kind in the newest attempt.

    The first look at a cache decides; a later one finds what was just made.
    """
    first: dict[str, _CacheEvent] = {}
    for event in events.read_events(run.probe / "rank-0.jsonl"):
        name = event["event"]
        if name == "start":
            first = {}
        elif name not in first:
            first[name] = codec.read_record(_CacheEvent, event)
    return first


def _explain_use(use: CacheUse, uses: Sequence[CacheUse], event: _CacheEvent) -> Reason:
    state = event.state
    facts = _read_facts(use.cache)
    earlier = [other for other in uses if other.time < use.time and other.owner == use.owner]
    nearest: CacheUse | None = None
    differences: list[KeyDifference] = []
    for other in earlier:
        changed = list(_list_differences(_read_facts(other.cache), facts))
        if nearest is None or len(changed) <= len(differences):
            nearest = other
            differences = changed
    if nearest is not None and not differences and state == "miss":
        differences = _compare_neighbours(event, use)
    return Reason(
        kind=use.cache.kind,
        state=state,
        folder=use.cache.path,
        compared=None if nearest is None else nearest.run,
        differences=tuple(differences[:_MOST]),
        text=_write_sentence(state, nearest, len(differences)),
    )


def _write_sentence(state: str, nearest: CacheUse | None, differences: int) -> str:
    if nearest is None and state == "hit":
        return "hit: made before launch kept records"
    if nearest is None:
        return f"{state}: no earlier run of this stage is known to have used one"
    run = f"{Path(nearest.run).name} ({_render_moment(nearest.time)})"
    if differences and state == "hit":
        return f"hit: made by a run that is no longer known; {run} had another"
    if differences > _MOST:
        return f"{state}: not as it was for {run}, the first {_MOST} of {differences}:"
    if differences:
        return f"{state}: not as it was for {run}:"
    text = f"{state}: the same content and the same key as {run}"
    if state == "miss":
        text += ": the entry was not finished, was cleared, or `skip_cache` is set"
    return text


class KeyFact(NamedTuple):
    name: str
    content: Any
    shown: Any


Facts = Mapping[tuple[object, ...], KeyFact]
"""By place: `key` or a role, then a name, or a number and a file."""


def _read_facts(cache: CacheRecord) -> Facts:
    """What a cache was named by: files by their place in the list of their role, others by name."""
    facts: dict[tuple[object, ...], KeyFact] = {}
    for name, value in cache.key.items():
        facts["key", name] = KeyFact(f"`{name}`", value, value)
    counts: collections.Counter[str] = collections.Counter()
    for source in cache.inputs:
        name = source.name
        digest = source.digest
        if source.role in ("code", "package"):
            facts[source.role, name] = KeyFact(name, digest, digest[:_DIGITS])
        elif source.role == "value":
            facts[source.role, name] = KeyFact(f"`{name}`", digest, source.shown)
        else:
            counts[source.role] += 1
            facts |= _read_content_facts(source, counts[source.role])
    return facts


def _read_content_facts(source: Input, number: int) -> Facts:
    """The files of the input that is the `number`th of its role; else its commit or digest."""
    facts: dict[tuple[object, ...], KeyFact] = {}
    shown = as_mapping(source.shown)
    files = _keep_mappings(shown.get("files"))
    for file in files:
        # a single file is the same whatever it is called
        below = ""
        if shown.get("kind") != "file":
            below = f"/{file.get('name')}"
        name = f"{source.name}{below}"
        facts[source.role, number, below] = KeyFact(name, file.get("digest"), file)
    if not files or len(files) != shown.get("count", len(files)):
        version = str(shown.get("revision") or source.digest)[:_DIGITS]
        name = f"{source.role} {source.name}"
        facts[source.role, number] = KeyFact(name, source.digest, version)
    return facts


def _list_differences(before: Facts, now: Facts) -> Iterator[KeyDifference]:
    for place in dict.fromkeys([*now, *before]):
        # a value that only now counts, or no longer does, need not have changed: the keys tell
        key = ("key", *place[1:])
        if place[0] == "value" and key in before and key in now:
            continue
        old = before.get(place)
        new = now.get(place)
        if old and new and old.content == new.content:
            continue
        fact = new or old
        assert fact is not None
        shown_before = old and old.shown
        shown_now = new and new.shown
        text = f"{fact.name} {_describe_change(shown_before, shown_now)}"
        yield KeyDifference(fact.name, shown_before, shown_now, text)


def _describe_change(before: Any, now: Any) -> str:
    listed = [file for file in (before, now) if isinstance(file, Mapping) and "digest" in file]
    if not listed:
        return f"{_shorten(before)} -> {_shorten(now)}"
    sizes = [f"{codec.fit_value(file.get('size'), int, 0):,} bytes" for file in listed]
    size = " -> ".join(dict.fromkeys(sizes))
    if before is None:
        return f"is new ({size})"
    if now is None:
        return f"is gone ({size})"
    written = _render_moment(now.get("mtime"))
    if before.get("mtime") == now.get("mtime"):
        written += ", the same time"
    else:
        written = f"{_render_moment(before.get('mtime'))} -> {written}"
    digests = " -> ".join(str(file.get("digest"))[:_DIGITS] for file in listed)
    return f"changed: {size}, written {written}, content {digests}"


def _shorten(value: Any) -> str:
    if isinstance(value, str):
        return shorten(value)
    return shorten(json.dumps(value, default=str))


def _compare_neighbours(event: _CacheEvent, use: CacheUse) -> list[KeyDifference]:
    """What upstream recorded of this run's entry, against the most similar one in the folder."""
    entry = Path(event.path)
    folder = entry.parent
    now = _read_upstream_facts(entry)
    if folder != Path(use.cache.path) or not now:
        return []
    compared = []
    for name in files.list_names(folder):
        if name == entry.name:
            continue
        before = _read_upstream_facts(folder / name)
        if before:
            differences = _list_differences(before, now)
            compared.append(list(differences))
    return min(compared, key=len, default=[])


def _read_upstream_facts(entry: Path) -> Facts:
    values = _flatten(rundir.read_json(entry / "config.json"))
    values.pop("config_hash", None)
    facts: dict[tuple[object, ...], KeyFact] = {}
    for name, value in values.items():
        facts["", name] = KeyFact(f"upstream's `{name}`", value, value)
    return facts


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    """`{"a": [{"b": 1}]}` -> `{"a[0].b": 1}`."""
    flat: dict[str, Any] = {}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            flat |= _flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            flat |= _flatten(inner, f"{name}[{number}]")
    else:
        flat[name] = value
    return flat


def _keep_mappings(value: Any) -> list[Mapping[str, Any]]:
    mappings: list[Mapping[str, Any]] = codec.fit_value(value, list[Mapping[str, Any]], [])
    return mappings


def _render_moment(seconds: Any) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (TypeError, OverflowError, OSError, ValueError):
        return "at an unknown time"
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")
