"""`launch cache why RUN`: what made a run's caches hit or miss, by what differed from before.

Two keys are looked at, from the outside in: launch's, which names the folder (contents, versions), and
upstream's own, which names the entry in it (arguments; its `config.json` where nothing else differs).
"""

import collections
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from launcher import files
from launcher.cache import folders
from launcher.errors import brief
from launcher.machine import codec
from launcher.runs import events, rundir
from launcher.runs.record import as_mapping
from launcher.runs.rundir import RunFolder

# events of the probe, by the kind of cache that they speak of
_EVENTS = {"dataset": "dataset_cache", "reference": "reference_cache"}
_DIGITS = 12
_MOST = 12

Use = Mapping[str, Any]
"""What a cache folder records of one run that used it."""


@dataclass(frozen=True, slots=True)
class KeyDifference:
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
    differences: tuple[KeyDifference, ...]
    text: str

    def lines(self) -> list[str]:
        return [f"{self.kind} cache: {self.text}", *(f"  {one.text}" for one in self.differences)]


def why(run: RunFolder) -> list[Reason]:
    """The reasons for every cache of a run's newest attempt; empty where it had none of launch's."""
    uses = [use for folder in folders.known() for use in folder.uses() if _cache(use)]
    seen = _events(run)
    return [_reason(use, uses, seen.get(str(_cache(use)["kind"]), {})) for use in _of_run(run, uses)]


def _cache(use: Use) -> Mapping[str, Any]:
    cache = use.get("cache")
    kind = cache.get("kind") if isinstance(cache, Mapping) else None
    return cache if isinstance(cache, Mapping) and isinstance(kind, str) and kind in _EVENTS else {}


def _of_run(run: RunFolder, uses: Sequence[Use]) -> list[Use]:
    """The run's own uses in its newest attempt; from its manifest where the folders were cleared."""
    own = [use for use in uses if use.get("run") == str(run.path.absolute())]
    attempt = max((int(use.get("attempt") or 1) for use in own), default=0)
    newest = [use for use in own if int(use.get("attempt") or 1) == attempt]
    kinds = {_cache(use)["kind"] for use in newest}
    manifest = rundir.read_manifest(run)
    cleared = {"run": str(run.path), "time": folders.seconds(manifest.created), "cleared": True}
    recorded = filter(None, (_cache({"cache": cache}) for cache in manifest.caches))
    missing = [cache for cache in recorded if cache["kind"] not in kinds]
    return [*newest, *({**cleared, "cache": cache} for cache in missing)]


def _events(run: RunFolder) -> dict[str, Mapping[str, Any]]:
    """What rank 0's probe recorded of each kind in the newest attempt."""
    found: dict[str, Mapping[str, Any]] = {}
    kinds = {event: kind for kind, event in _EVENTS.items()}
    for event in events.read_events(run.probe / "rank-0.jsonl"):
        if event.get("event") == "start":
            found = {}
        # the first look is the one that decides; a later one finds what was just made
        elif (kind := kinds.get(event["event"])) is not None:
            found.setdefault(kind, event)
    return found


def _reason(use: Use, uses: Sequence[Use], event: Mapping[str, Any]) -> Reason:
    cache, state = _cache(use), str(event.get("state") or "unknown")
    facts = _facts(cache)
    # earlier uses of the same kind of cache by the same kind of stage
    place = [cache.get(name) for name in ("kind", "stage", "backend")]
    alike = (one for one in uses if [_cache(one).get(name) for name in ("kind", "stage", "backend")] == place)
    before = (one for one in alike if float(one["time"]) < float(use["time"]))
    compared = [(one, list(_differences(_facts(_cache(one)), facts))) for one in before]
    nearest, differences = min(compared, key=lambda pair: (len(pair[1]), -float(pair[0]["time"])), default=(None, []))
    if nearest is not None and not differences and state == "miss":
        differences = _neighbour(event, cache)
    return Reason(
        kind=str(cache["kind"]),
        state=state,
        folder=str(cache.get("path")),
        compared=None if nearest is None else str(nearest.get("run")),
        differences=tuple(differences[:_MOST]),
        text=_sentence(state, use, nearest, differences),
    )


def _sentence(state: str, use: Use, nearest: Use | None, differences: Sequence[KeyDifference]) -> str:
    if nearest is None and state == "hit":
        return "hit: made before launch kept records"
    if nearest is None:
        return f"{state}: no earlier run of this stage is known to have used one"
    run = f"{Path(str(nearest.get('run'))).name} ({_moment(nearest['time'])})"
    if state == "hit" and differences:
        return f"hit: made by a run that is no longer known; {run} had another"
    if differences:
        more = f", the first {_MOST} of {len(differences)}" if len(differences) > _MOST else ""
        return f"{state}: not as it was for {run}{more}:"
    same = f"{state}: the same content and the same key as {run}"
    if state != "hit" and use.get("cleared"):
        return f"{same}; the folder has been cleared since"
    return same + ": the entry was not finished, was cleared, or `skip_cache` is set" * (state == "miss")


class KeyFact(NamedTuple):
    name: str
    content: Any
    shown: Any


Facts = Mapping[tuple[object, ...], KeyFact]


def _facts(cache: Mapping[str, Any]) -> Facts:
    """By what they are: files by the place of their data set or model in the list, others by name."""
    key = as_mapping(cache.get("key"))
    facts: dict[tuple[object, ...], KeyFact] = {
        ("key", name): KeyFact(f"`{name}`", value, value) for name, value in key.items()
    }
    counts: collections.Counter[str] = collections.Counter()
    for one in _mappings(cache.get("inputs")):
        role, name, digest = (str(one.get(field)) for field in ("role", "name", "digest"))
        if role in {"code", "package"}:
            facts[role, name] = KeyFact(name, digest, digest[:_DIGITS])
        elif role == "value":
            facts[role, name] = KeyFact(f"`{name}`", digest, one.get("shown"))
        else:
            counts[role] += 1
            place = role, counts[role]
            shown = as_mapping(one.get("shown"))
            listed = _mappings(shown.get("files"))
            for file in listed:
                # one file each, whatever they are called
                below = "" if shown.get("kind") == "file" else f"/{file.get('name')}"
                facts[(*place, below)] = KeyFact(f"{name}{below}", file.get("digest"), file)
            if not listed or len(listed) != shown.get("count", len(listed)):
                version = str(shown.get("revision") or digest)
                facts[place] = KeyFact(f"{role} {name}", digest, version[:_DIGITS])
    return facts


def _differences(before: Facts, now: Facts) -> Iterator[KeyDifference]:
    for place in dict.fromkeys([*now, *before]):
        # a value that only now counts, or no longer does, need not have changed: the keys hold it too
        key = ("key", *place[1:])
        if place[0] == "value" and key in before and key in now:
            continue
        was, is_ = before.get(place), now.get(place)
        if was is None or is_ is None or was.content != is_.content:
            name = (is_ or was or KeyFact("", 0, 0)).name
            values = was and was.shown, is_ and is_.shown
            yield KeyDifference(name, *values, f"{name} {_change(*values)}")


def _change(before: Any, now: Any) -> str:
    listed = [one for one in (before, now) if isinstance(one, Mapping) and "digest" in one]
    if not listed:
        was, is_ = (brief(one if isinstance(one, str) else json.dumps(one, default=str)) for one in (before, now))
        return f"{was} -> {is_}"
    size = " -> ".join(dict.fromkeys(f"{codec.fit_value(file.get('size'), int, 0):,} bytes" for file in listed))
    if before is None or now is None:
        return f"{'is new' if before is None else 'is gone'} ({size})"
    times = f"{_moment(before.get('mtime'))} -> {_moment(now.get('mtime'))}"
    if before.get("mtime") == now.get("mtime"):
        times = f"{_moment(now.get('mtime'))}, the same time"
    digests = " -> ".join(str(one.get("digest"))[:_DIGITS] for one in listed)
    return f"changed: {size}, written {times}, content {digests}"


def _neighbour(event: Mapping[str, Any], cache: Mapping[str, Any]) -> list[KeyDifference]:
    """What upstream wrote down about the entry of this run, against its neighbours in the folder."""
    place = Path(str(event.get("path")))
    if place.parent != Path(str(cache.get("path"))):
        return []
    now = _upstreams(place)
    names = (name for name in files.names(place.parent) if name != place.name and not name.startswith("."))
    beside = [place.parent / name for name in names]
    known = filter(None, map(_upstreams, beside if now else []))
    return min((list(_differences(before, now)) for before in known), key=len, default=[])


def _upstreams(entry: Path) -> Facts:
    values = _flat(rundir.read_json(entry / "config.json"))
    values.pop("config_hash", None)
    return {("", name): KeyFact(f"upstream's `{name}`", one, one) for name, one in values.items()}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """`{"a": [{"b": 1}]}` -> `{"a[0].b": 1}`."""
    if isinstance(value, Mapping):
        pairs = ((f"{name}.{key}" if name else str(key), one) for key, one in value.items())
    elif isinstance(value, list):
        pairs = ((f"{name}[{number}]", one) for number, one in enumerate(value))
    else:
        return {name: value}
    return {inner: one for key, part in pairs for inner, one in _flat(part, key).items()}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _moment(seconds: Any) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (TypeError, OverflowError, OSError, ValueError):
        return "at an unknown time"
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")
