"""A verdict in its JSON form -> plain words: what came of the run, why, and what each point rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.runs.record import listed, mapping

Point = Mapping[str, Any]

_READ_TRACEBACK = "read the traceback above that line of the log, mend its cause, start the same command again"
_START_AGAIN = "start the same command again: it continues from the last checkpoint, if there is one"
_ENDS = {
    "crashed": "crashed",
    "killed": "was killed",
    "stopped": "was stopped",
    "unknown": "ended in an unknown way",
    "running": "has no recorded end",
}
MESSENGERS = ("ChildFailedError", "CalledProcessError", "SignalException")
"""Exceptions that only report that another process failed."""
_LINE_CHARS = 160
# errors that are not exceptions: what their message says is enough
_MESSAGES = ("violation", "hang", "arguments", "not_started", "not_found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a run did not pass: `line` is the evidence that shows it (file, line, text), empty if none does.

    `repeated` are texts of the verdict that say no more than it.
    """

    text: str
    help: str | None = None
    line: Mapping[str, Any]
    repeated: tuple[str, ...] = ()


def points(verdict: Mapping[str, Any]) -> list[Point]:
    """The points of a verdict, whatever else stands among them left out."""
    return [point for point in listed(verdict.get("points")) if isinstance(point, Mapping)]


def failed_first(verdict: Mapping[str, Any]) -> list[Point]:
    """The points by what needs a look: those that failed, those that nothing proves, the others."""
    return sorted(points(verdict), key=lambda p: (p.get("ok") is not False, p.get("ok") is not None))


def outcome(verdict: Mapping[str, Any]) -> str:
    """The status for people: `stopped` where a signal ended the run and nothing else failed."""
    failed = [point for point in points(verdict) if point.get("ok") is False]
    if [point.get("name") for point in failed] == ["finish"]:
        detail = mapping(failed[0].get("detail"))
        requested = detail.get("signal") in ("SIGINT", "SIGTERM") and not detail.get("reason")
        if failed[0].get("state") == "stopped" and requested:
            return "stopped"
    return str(verdict.get("status"))


def cause(verdict: Mapping[str, Any]) -> Cause | None:
    """The first thing to know about a run that did not pass; None where it passed."""
    if verdict.get("status") == "pass":
        return None
    found = points(verdict)
    by_name = {str(point.get("name")): point for point in found}
    finish, memory = by_name.get("finish", {}), by_name.get("memory", {})
    if memory.get("state") == "oom":
        message = _error(finish).get("message")
        text = f"out of memory: {message}" if message else "out of memory"
        return _caused(text, memory, finish)
    if finish.get("ok") is not False:
        ranked = [point for state in (False, None) for point in found if point.get("ok") is state]
        if not ranked:
            return None
        return _caused(_shortfall(ranked[0]), ranked[0])
    stopped = outcome(verdict) == "stopped"
    broken = [point for point in found if point.get("ok") is False and point is not finish]
    # what broke `expect:` knows more about it than the end that followed
    first = broken if _error(finish).get("type") == "violation" else []
    caused = _caused(_ending(finish, stopped=stopped), *first, finish)
    if stopped:
        return replace(caused, help=_START_AGAIN, line={})
    raised = caused.help is None and _error(finish)
    return replace(caused, help=_READ_TRACEBACK) if raised else caused


def _caused(text: str, *points: Point) -> Cause:
    """The help and the evidence are those of the first point that has any."""
    return Cause(
        text=text,
        help=next(filter(None, map(_help, points)), None),
        line=next(filter(None, map(_line, points)), {}),
        repeated=tuple(line for point in points for line in reasons(mapping(point.get("detail")))),
    )


def unreached(verdict: Mapping[str, Any]) -> list[str]:
    """The points that could not be shown because training never reached its first step."""
    if verdict.get("steps") or outcome(verdict) == "pass":
        return []
    states = ("unknown", "none_logged", "too_short")
    missing = (p for p in points(verdict) if p.get("ok") is None and p.get("state") in states)
    return [str(point.get("name")) for point in missing]


def _help(point: Point) -> str | None:
    help = mapping(point.get("detail")).get("help")
    return None if help is None else str(help)


def _shortfall(point: Point) -> str:
    """What was expected of a point and is not so."""
    name, state, expected = (point.get(key) for key in ("name", "state", "expected"))
    if name == "finish":
        return _ending(point, stopped=False)
    reason = mapping(point.get("detail")).get("reason")
    differs = expected not in (None, "any", "unknown", state)
    text = f"{name} is {state}" + (f", expected {expected}" if differs else "")
    return f"{text if differs else name}: {reason}" if reason else text


def _error(finish: Point) -> Mapping[str, Any]:
    return mapping(mapping(finish.get("detail")).get("error"))


def _raised(detail: Mapping[str, Any]) -> str | None:
    """The error that ended the run; None for what only reports a signal."""
    error = mapping(detail.get("error"))
    reported = (*MESSENGERS, "KeyboardInterrupt")
    if not error or (detail.get("signal") and str(error.get("type")).endswith(reported)):
        return None
    where = f"  ({error['at']})" if error.get("at") else ""
    kind = "" if error.get("type") in _MESSAGES else f"{error.get('type')}: "
    return f"{kind}{error.get('message')}{where}"


def _ending(finish: Point, *, stopped: bool) -> str:
    detail, state = mapping(finish.get("detail")), str(finish.get("state"))
    # where a signal was requested, what it raised in Python says nothing
    if not stopped and (raised := _raised(detail)) is not None:
        return raised
    text = f"the run {_ENDS.get(state, state)}"
    if detail.get("signal"):
        text += f" {'with' if state == 'crashed' else 'by'} {detail['signal']}"
    elif detail.get("returncode"):
        text += f" with exit code {detail['returncode']}"
    last, total = detail.get("last_step"), detail.get("total_steps")
    if last is not None and state in ("stopped", "killed"):
        text += f" after step {last}" + (f" of {total}" if total else "")
    return text


def _line(point: Point) -> Mapping[str, Any]:
    """The evidence that shows what went wrong: what names the error, else what the log has."""
    cites = [mapping(cite) for cite in listed(point.get("evidence"))]
    message = str(_error(point).get("message") or "").strip()[:40]
    if message:
        cites = [cite for cite in cites if message in str(cite.get("text"))] or cites
    cite = next((cite for cite in cites if cite.get("source") == "log"), cites[0] if cites else {})
    # what the probe recorded is in the text already, what a launcher reports is no cause: the place is enough
    text = str(cite.get("text") or "") if cite.get("source") == "log" else ""
    text = "" if any(name in text for name in MESSENGERS) else text
    return {**cite, "text": text[:_LINE_CHARS]} if cite else {}


# -- what a point rests on, in a sentence


def sentence(point: Point) -> str | None:
    """What is known about a point, from its details; None where the state says it all."""
    say = _SENTENCES.get(str(point.get("name")))
    try:
        return None if say is None else say(str(point.get("state")), mapping(point.get("detail")))
    except (KeyError, TypeError, ValueError):  # a verdict of an older version, or a damaged one
        return None


def _liger(state: str, detail: Mapping[str, Any]) -> str | None:
    calls = {
        name: sum(counts.values())
        for name, counts in detail.items()
        if isinstance(counts, Mapping) and name not in ("uncalled", "kwargs") and counts
    }
    called = [f"{name} {count:,}" for name, count in calls.items() if count]
    if called:
        return f"calls of its kernels: {', '.join(called)}"
    return "no kernel of Liger was called" if calls else None


def _packing(state: str, detail: Mapping[str, Any]) -> str | None:
    tested = {"isolated": "packed samples do not see each other", "leaking": "packed samples see each other"}
    return tested.get(state, str(detail["detail"]) if detail.get("detail") else None)


def _batch(state: str, detail: Mapping[str, Any]) -> str | None:
    if state != "planned":
        return None
    return f"{detail['world']} of {detail['planned_world']} process(es) trained, each step as planned"


def _cache(state: str, detail: Mapping[str, Any]) -> str | None:
    words = {"hit": "found", "miss": "not there, so it was made"}.get(state)
    where = f": {detail['path']}" if detail.get("path") else ""
    return None if words is None else f"{words}{where}"


def _loss(state: str, detail: Mapping[str, Any]) -> str | None:
    if state not in ("finite", "zero"):
        return None
    counted, logged = detail["counted"], detail["logged"]
    parts = [f"{counted:,} recorded by the probe"] if counted else []
    parts += [f"{logged:,} logged"] if logged else []
    return f"losses: {', '.join(parts)}; all finite" if parts else None


def _gradients(state: str, detail: Mapping[str, Any]) -> str | None:
    if state != "true":
        return None
    return (
        f"{detail['checks']:,} comparisons with autograd over {detail['parameters']:,} parameters: largest "
        f"error {detail['largest_error']:.2g}, {detail['allowed']:.2g} is allowed"
    )


def _trend(state: str, detail: Mapping[str, Any]) -> str | None:
    if "change" not in detail:
        return None
    # by a robust slope over all losses, and relative to their median: it may be more than all of it
    return f"over {detail['losses']:,} losses the trend is {detail['change']:+.1%} (z {detail['z']:.1f})"


def _memory(state: str, detail: Mapping[str, Any]) -> str | None:
    peak, planned = detail.get("peak_allocated_gib"), mapping(detail.get("planned_gib")).get("peak")
    if not peak:
        return "no error, and no GPU memory was measured" if state == "ok" else None
    return f"peak {peak:.2f} GiB on a GPU" + (f", planned {planned:.2f} GiB" if planned else "")


def _finish(state: str, detail: Mapping[str, Any]) -> str | None:
    last, total = detail.get("last_step"), detail.get("total_steps")
    parts = []
    if last is not None:
        parts.append(f"step {last:,}" + (f" of {total:,}" if total else "") + " was the last")
    parts.append("the model was saved" if detail.get("saved") else "no final save was seen")
    if detail.get("returncode") is not None:
        parts.append(f"exit code {detail['returncode']}")
    return "; ".join(parts)


def _weights(state: str, detail: Mapping[str, Any]) -> str | None:
    if "share" not in detail:
        return None
    return f"{detail['share']:.1%} of {detail['sampled']:,} sampled weights differ from the start"


def _model(state: str, detail: Mapping[str, Any]) -> str | None:
    return f"its files are as they were saved: {detail['path']}" if state == "saved" else None


def _inputs(state: str, detail: Mapping[str, Any]) -> str | None:
    return "data and model did not change during the run" if state == "same" else None


def _resume(state: str, detail: Mapping[str, Any]) -> str | None:
    return f"loss {detail['before']} before the resume, {detail['after']} after it"


def _attention(state: str, detail: Mapping[str, Any]) -> str | None:
    if "announced" in detail:
        return f"the log announces {detail['announced']}"
    return None if state == "unknown" else f"the loaded model uses {state}"


_SENTENCES: Mapping[str, Callable[[str, Mapping[str, Any]], str | None]] = {
    "liger": _liger,
    "packing": _packing,
    "attention": _attention,
    "batch": _batch,
    "dataset_cache": _cache,
    "reference_cache": _cache,
    "loss": _loss,
    "gradients": _gradients,
    "trend": _trend,
    "memory": _memory,
    "finish": _finish,
    "weights": _weights,
    "model": _model,
    "inputs": _inputs,
    "resume": _resume,
}


def reasons(detail: Mapping[str, Any]) -> Iterator[str]:
    """Why a point is not as expected, and what to do about it."""
    if (raised := _raised(detail)) is not None:
        yield raised
    if detail.get("signal"):
        yield f"ended by {detail['signal']}"
    for key in ("reason", "detail", "help"):
        # of an end the reason is a key of `ending.HELP`
        if detail.get(key) and not (key == "reason" and detail.get("help") and " " not in detail[key]):
            yield str(detail[key])
