"""`launch cache why RUN`: what made a run's caches hit or miss, told by what differed from before.

Two keys are looked at, from the outside in: launch's, which names the folder (contents, versions), and
upstream's own, which names the entry in it (arguments; its `config.json` where nothing else differs).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import cache_folders, files, rundir
from launcher.errors import brief
from launcher.rundir import RunFolder

# events of the probe, by the kind of cache that they speak of
_EVENTS = {"dataset": "dataset_cache", "reference": "reference_cache"}
_ABSENT = object()
_DIGITS = 12
_MOST = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as it was: what, before and now, and the sentence for people."""

    what: str
    before: Any
    now: Any
    text: str

    def as_json(self) -> dict[str, Any]:
        """For the envelope."""
        return {"what": self.what, "before": self.before, "now": self.now, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one cache of a run was hit or missed.

    `state` is what the probe saw (`hit`, `miss`, `unknown`), `compared` the run that `differences` are
    against, None where there was none before.
    """

    kind: str
    state: str
    folder: str
    compared: str | None
    differences: tuple[Difference, ...]
    text: str

    def as_json(self) -> dict[str, Any]:
        """For the envelope."""
        return {
            "kind": self.kind, "state": self.state, "folder": self.folder,
            "compared": self.compared, "text": self.text,
            "differences": [one.as_json() for one in self.differences],
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For people: the verdict, then one difference a line."""
        return [f"{self.kind} cache: {self.text}", *(f"  {one.text}" for one in self.differences)]


def why(run: RunFolder) -> list[Reason]:
    """The reasons for every cache of a run's newest attempt; empty where it had none of launch's."""
    uses = [use for folder in cache_folders.known() for use in folder.uses() if _cache(use)]
    mine = _of_run(run, uses)
    seen = _seen(run)
    return [_reason(use, uses, seen.get(str(_cache(use)["kind"]), {})) for use in mine]


def _cache(use: Mapping[str, Any]) -> Mapping[str, Any]:
    told = use.get("cache")
    return told if isinstance(told, Mapping) and told.get("kind") in _EVENTS else {}


def _of_run(run: RunFolder, uses: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The run's own uses in its newest attempt; from its manifest where the folders were cleared."""
    own = [use for use in uses if use.get("run") == str(run.path.absolute())]
    attempt = max((int(use.get("attempt") or 1) for use in own), default=0)
    newest = [use for use in own if int(use.get("attempt") or 1) == attempt]
    kinds = {_cache(use)["kind"] for use in newest}
    manifest = rundir.read_manifest(run)
    kept = manifest.get("caches")
    time = cache_folders.seconds(manifest.get("created"))
    for told in kept if isinstance(kept, list) else ():
        if isinstance(told, Mapping) and told.get("kind") in set(_EVENTS) - kinds:
            newest.append({"run": str(run.path), "time": time, "cache": told, "cleared": True})
    return newest


def _seen(run: RunFolder) -> dict[str, Mapping[str, Any]]:
    """What rank 0's probe recorded of each kind in the newest attempt."""
    found: dict[str, Mapping[str, Any]] = {}
    kinds = {event: kind for kind, event in _EVENTS.items()}
    for event in files.read_lines(run.probe / "rank-0.jsonl"):
        if event.get("event") == "start":
            found = {}
        kind = kinds.get(str(event.get("event")))
        # the first look is the one that decides; a later one finds what was just made
        if kind is not None:
            found.setdefault(kind, event)
    return found


# --- one cache ------------------------------------------------------------------------------------


def _reason(
    use: Mapping[str, Any], uses: Sequence[Mapping[str, Any]], seen: Mapping[str, Any]
) -> Reason:
    cache = _cache(use)
    state = str(seen.get("state") or "unknown")
    before = [one for one in uses if _comparable(one, use)]
    nearest = min(before, key=lambda one: (_distance(one, use), -float(one["time"])), default=None)
    differences: tuple[Difference, ...] = ()
    if nearest is not None:
        differences = tuple(_differences(_cache(nearest), cache))
        if not differences and state == "miss":
            differences = tuple(_upstreams(seen, cache))
    return Reason(
        kind=str(cache["kind"]), state=state, folder=str(cache.get("path")),
        compared=None if nearest is None else str(nearest.get("run")),
        differences=differences[:_MOST],
        text=_sentence(state, use, nearest, differences),
    )  # fmt: skip


def _comparable(one: Mapping[str, Any], use: Mapping[str, Any]) -> bool:
    ours, theirs = _cache(use), _cache(one)
    same = all(ours.get(name) == theirs.get(name) for name in ("kind", "stage", "backend"))
    return same and float(one["time"]) < float(use["time"])


def _distance(one: Mapping[str, Any], use: Mapping[str, Any]) -> int:
    return sum(1 for _ in _differences(_cache(one), _cache(use)))


def _sentence(
    state: str, use: Mapping[str, Any], nearest: Mapping[str, Any] | None,
    differences: Sequence[Difference],
) -> str:  # fmt: skip
    if nearest is None:
        first = "no earlier run of this stage is known to have used one"
        return f"{state}: {first}" if state != "hit" else "hit: made before launch kept records"
    name, when = Path(str(nearest.get("run"))).name, _moment(float(nearest["time"]))
    if state == "hit":
        if not differences:
            return f"hit: the same content and the same key as {name} ({when})"
        return f"hit: made by a run that is no longer known; {name} ({when}) had another"
    if differences:
        more = len(differences) - _MOST
        rest = f", the first {_MOST} of {len(differences)}" if more > 0 else ""
        return f"{state}: not as it was for {name} ({when}){rest}:"
    if use.get("cleared"):
        return f"{state}: as it was for {name} ({when}); the folder has been cleared since"
    return (
        f"{state}: the same content and the same key as {name} ({when}): the entry was not finished, "
        "was cleared, or `skip_cache` is set"
        if state == "miss"
        else f"{state}: the same content and the same key as {name} ({when})"
    )


# --- what differs ---------------------------------------------------------------------------------


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    then, here = _inputs(before), _inputs(now)
    old, new = _mapping(before.get("key")), _mapping(now.get("key"))
    for place in dict.fromkeys([*here, *then]):
        one, other = then.get(place), here.get(place)
        # a value that only now counts, or no longer does, need not have changed: the keys hold it too
        if place[0] == "value" and place[1] in old and place[1] in new:
            continue
        if one is None or other is None or one.get("digest") != other.get("digest"):
            yield from _input(one, other)
    for name in dict.fromkeys([*new, *old]):
        if old.get(name) != new.get(name):
            yield _value(f"`{name}`", old.get(name), new.get(name))


def _inputs(cache: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Inputs by what they are: data by their place in the list, others by role or name."""
    listed = cache.get("inputs")
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    counts: dict[str, int] = {}
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, Mapping):
            role = str(one.get("role"))
            counts[role] = counts.get(role, 0) + 1
            named = role in {"code", "package", "value"}
            found[role, str(one.get("name")) if named else str(counts[role])] = one
    return found


def _input(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> Iterator[Difference]:
    if one is None or other is None:
        told = other if one is None else one
        assert told is not None
        what, change = _what(told), "is new" if one is None else "is no longer there"
        digests = (one or {}).get("digest"), (other or {}).get("digest")
        yield Difference(what=what, before=digests[0], now=digests[1], text=f"{what} {change}")
        return
    then, here = one.get("shown"), other.get("shown")
    if other.get("role") in {"package", "value"}:
        yield _value(_what(other), then, here)
        return
    files = list(_files(other, _mapping(then), _mapping(here)))
    yield from files
    if not files:
        yield _whole(one, other)


def _what(one: Mapping[str, Any]) -> str:
    role, name = str(one.get("role")), str(one.get("name"))
    if role == "value":
        return f"`{name}`"
    return name if role in {"data", "code", "package"} else f"{role} {name}"


def _whole(one: Mapping[str, Any], other: Mapping[str, Any]) -> Difference:
    then, here = _mapping(one.get("shown")), _mapping(other.get("shown"))
    what = _what(other)
    before = then.get("revision") or one.get("digest")
    now = here.get("revision") or other.get("digest")
    named = "" if one.get("name") == other.get("name") else f" (was {one.get('name')})"
    text = f"{what}{named}: {_short(before)} -> {_short(now)}"
    return Difference(what=what, before=before, now=now, text=text)


def _files(
    one: Mapping[str, Any], then: Mapping[str, Any], here: Mapping[str, Any]
) -> Iterator[Difference]:
    """Which files of a data set or a model are not as they were."""
    old, new = _by_name(then), _by_name(here)
    if len(old) == len(new) == 1 and "file" == here.get("kind") == then.get("kind"):
        # one file each, whatever they are called
        old, new = {"": next(iter(old.values()))}, {"": next(iter(new.values()))}
    for name in dict.fromkeys([*new, *old]):
        before, now = old.get(name), new.get(name)
        if before is not None and now is not None and before.get("digest") == now.get("digest"):
            continue
        path = f"{one.get('name')}/{name}" if name else str(one.get("name"))
        yield Difference(
            what=path, before=before, now=now, text=f"{path} {_change(before, now)}"
        )  # fmt: skip


def _by_name(shown: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    files = shown.get("files")
    listed = files if isinstance(files, list) else []
    return {str(one.get("name")): one for one in listed if isinstance(one, Mapping)}


def _change(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    if before is None or now is None:
        told = now if before is None else before
        assert told is not None
        return f"{'is new' if before is None else 'is gone'} ({_bytes(told)})"
    sizes = _bytes(now)
    if before.get("size") != now.get("size"):
        sizes = f"{_bytes(before)} -> {_bytes(now)}"
    times = f"{_moment(before.get('mtime'))} -> {_moment(now.get('mtime'))}"
    if before.get("mtime") == now.get("mtime"):
        times = f"{_moment(now.get('mtime'))}, the same time"
    digests = f"{_short(before.get('digest'))} -> {_short(now.get('digest'))}"
    return f"changed: {sizes}, written {times}, content {digests}"


def _value(what: str, before: Any, now: Any) -> Difference:
    text = f"{what} was {brief(_told(before))}, is {brief(_told(now))}"
    return Difference(what=what, before=before, now=now, text=text)


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _upstreams(seen: Mapping[str, Any], cache: Mapping[str, Any]) -> Iterator[Difference]:
    """What upstream wrote down about the entry of this run, against its neighbours in the folder."""
    place = Path(str(seen.get("path")))
    if not str(seen.get("path") or "") or place.parent != Path(str(cache.get("path"))):
        return
    mine = _flat(rundir.read_json(place / "config.json"))
    if not mine:
        return
    others = [
        _flat(rundir.read_json(path / "config.json"))
        for path in sorted(place.parent.iterdir())
        if path != place and not path.name.startswith(".")
    ]
    found = [list(_flat_differences(other, mine)) for other in others if other]
    yield from min(found, key=len, default=[])


def _flat_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys([*now, *before]):
        one, other = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if one != other and name != "config_hash":
            one, other = (None if value is _ABSENT else value for value in (one, other))
            yield _value(f"upstream's `{name}`", one, other)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """`{"a": [{"b": 1}]}` -> `{"a[0].b": 1}`."""
    if isinstance(value, Mapping):
        pairs = ((f"{name}.{key}" if name else str(key), one) for key, one in value.items())
    elif isinstance(value, list):
        pairs = ((f"{name}[{number}]", one) for number, one in enumerate(value))
    else:
        return {name: value}
    return {inner: one for key, part in pairs for inner, one in _flat(part, key).items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _short(digest: Any) -> str:
    return str(digest)[:_DIGITS]


def _bytes(told: Mapping[str, Any]) -> str:
    size = told.get("size")
    return f"{size:,} bytes" if isinstance(size, int) else "of unknown size"


def _moment(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return "at an unknown time"
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return "at an unknown time"
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")
