"""`launch cache why RUN`: what made a run's caches hit or miss, told by what differed from before.

Two keys are looked at, from the outside in: launch's, which names the folder (contents, versions), and
upstream's own, which names the entry in it (arguments; its `config.json` where nothing else differs).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from launcher import cache_folders, files, rundir
from launcher.errors import brief
from launcher.rundir import RunFolder

# events of the probe, by the kind of cache that they speak of
_EVENTS = {"dataset": "dataset_cache", "reference": "reference_cache"}
_DIGITS = 12
_MOST = 12


class Difference(NamedTuple):
    """One thing that is not as it was: what, before and now, and the sentence for people."""

    what: str
    before: Any
    now: Any
    text: str


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
        return {**asdict(self), "differences": [one._asdict() for one in self.differences]}

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
    compared = [(one, list(_differences(_cache(one), cache))) for one in _before(use, uses)]
    nearest, differences = min(
        compared, key=lambda pair: (len(pair[1]), -float(pair[0]["time"])), default=(None, [])
    )
    if nearest is not None and not differences and state == "miss":
        differences = list(_upstreams(seen, cache))
    return Reason(
        kind=str(cache["kind"]), state=state, folder=str(cache.get("path")),
        compared=None if nearest is None else str(nearest.get("run")),
        differences=tuple(differences[:_MOST]), text=_sentence(state, use, nearest, differences),
    )  # fmt: skip


def _before(
    use: Mapping[str, Any], uses: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Earlier uses of the same kind of cache by the same kind of stage."""
    ours = _cache(use)
    for one in uses:
        same = all(ours.get(n) == _cache(one).get(n) for n in ("kind", "stage", "backend"))
        if same and float(one["time"]) < float(use["time"]):
            yield one


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
    same = f"{state}: the same content and the same key as {name} ({when})"
    if use.get("cleared"):
        return f"{same}; the folder has been cleared since"
    if state == "miss":
        return f"{same}: the entry was not finished, was cleared, or `skip_cache` is set"
    return same


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
    told = other or one or {}
    role, name = str(told.get("role")), str(told.get("name"))
    what = name if role in {"data", "code", "package"} else f"{role} {name}"
    digests = (one or {}).get("digest"), (other or {}).get("digest")
    if one is None or other is None:
        change = "is new" if one is None else "is no longer there"
        yield Difference(what, *digests, f"{what} {change}")
        return
    if role in {"package", "value"}:
        yield _value(
            name if role == "package" else f"`{name}`", one.get("shown"), other.get("shown")
        )
        return
    then, here = _mapping(one.get("shown")), _mapping(other.get("shown"))
    files = list(_files(name, then, here))
    yield from files
    if not files:
        before, now = then.get("revision") or digests[0], here.get("revision") or digests[1]
        named = "" if one.get("name") == name else f" (was {one.get('name')})"
        text = f"{what}{named}: {_short(before)} -> {_short(now)}"
        yield Difference(what, before, now, text)


def _files(of: str, then: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Difference]:
    """Which files of a data set or a model are not as they were."""
    old, new = _by_name(then), _by_name(here)
    if len(old) == len(new) == 1 and "file" == here.get("kind") == then.get("kind"):
        # one file each, whatever they are called
        old, new = {"": next(iter(old.values()))}, {"": next(iter(new.values()))}
    for name in dict.fromkeys([*new, *old]):
        before, now = old.get(name), new.get(name)
        if before is None or now is None or before.get("digest") != now.get("digest"):
            path = f"{of}/{name}" if name else of
            yield Difference(path, before, now, f"{path} {_change(before, now)}")


def _by_name(shown: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    files = shown.get("files")
    listed = files if isinstance(files, list) else []
    return {str(one.get("name")): one for one in listed if isinstance(one, Mapping)}


def _change(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    if before is None or now is None:
        return f"{'is new' if before is None else 'is gone'} ({_bytes(before or now or {})})"
    sizes, size = _bytes(now), _bytes(before)
    times = f"{_moment(before.get('mtime'))} -> {_moment(now.get('mtime'))}"
    if before.get("mtime") == now.get("mtime"):
        times = f"{_moment(now.get('mtime'))}, the same time"
    digests = f"{_short(before.get('digest'))} -> {_short(now.get('digest'))}"
    sizes = sizes if size == sizes else f"{size} -> {sizes}"
    return f"changed: {sizes}, written {times}, content {digests}"


def _value(what: str, before: Any, now: Any) -> Difference:
    was, is_ = (
        brief(one if isinstance(one, str) else json.dumps(one, default=str))
        for one in (before, now)
    )
    return Difference(what, before, now, f"{what} was {was}, is {is_}")


def _upstreams(seen: Mapping[str, Any], cache: Mapping[str, Any]) -> Iterator[Difference]:
    """What upstream wrote down about the entry of this run, against its neighbours in the folder."""
    place = Path(str(seen.get("path")))
    if place.parent != Path(str(cache.get("path"))):
        return
    now = _flat(rundir.read_json(place / "config.json"))
    found = []
    for path in sorted(place.parent.iterdir()):
        before = _flat(rundir.read_json(path / "config.json"))
        if now and before and path != place and not path.name.startswith("."):
            found.append([
                _value(f"upstream's `{name}`", before.get(name), now.get(name))
                for name in dict.fromkeys([*now, *before])
                if before.get(name) != now.get(name) and name != "config_hash"
            ])  # fmt: skip
    yield from min(found, key=len, default=[])


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
