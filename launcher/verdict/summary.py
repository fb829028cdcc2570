"""A verdict in its JSON form -> plain words: what came of the run, why, and what each point rests on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.config.points import BY_NAME, DURING
from launcher.runs.record import as_list, as_mapping

Point = Mapping[str, Any]

_READ_TRACEBACK = "read the traceback above that line of the log, fix its cause, start the same command again"
_START_AGAIN = "start the same command again: it continues from the last checkpoint, if there is one"
_ENDS = {
    "crashed": "crashed",
    "killed": "was killed",
    "stopped": "was stopped",
    "preempted": "saved a checkpoint and ended, as requested,",
    "unknown": "ended in an unknown way",
    "running": "has no recorded end",
}
MESSENGERS = ("ChildFailedError", "CalledProcessError", "SignalException")  # they only report another's failure
_ODD = ("suspect", "fewer", "more")
_LINE_CHARS = 160
# errors that are not exceptions: what their message says is enough
_MESSAGES = ("violation", "hang", "arguments", "not_started", "not_found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a run did not pass: `line` is the evidence that shows it (file, line, text), empty if none does. `repeated`
    are texts of the verdict that say no more than it."""

    text: str
    help: str | None = None
    line: Mapping[str, Any]
    repeated: tuple[str, ...] = ()


def points(verdict: Mapping[str, Any]) -> list[Point]:
    return [point for point in as_list(verdict.get("points")) if isinstance(point, Mapping)]


def failed_first(verdict: Mapping[str, Any]) -> list[Point]:
    """The points by what needs a look: those that failed, those that nothing proves, the others."""
    return sorted(points(verdict), key=lambda p: (p.get("ok") is not False, p.get("ok") is not None))


def outcome(verdict: Mapping[str, Any]) -> str:
    """The status for people: `stopped` where a signal ended the run and nothing else failed."""
    failed = [point for point in points(verdict) if point.get("ok") is False]
    if [point.get("name") for point in failed] == ["finish"]:
        detail = as_mapping(failed[0].get("detail"))
        requested = detail.get("signal") in ("SIGINT", "SIGTERM") and detail.get("reason") in (None, "save_late")
        state = failed[0].get("state")
        if state == "preempted" or (state == "stopped" and requested):
            return "stopped"
    return str(verdict.get("status"))


def cause(verdict: Mapping[str, Any]) -> Cause | None:
    """The first thing to know about a run that did not pass; None where it passed."""
    if verdict.get("status") == "pass":
        return None
    found = points(verdict)
    by_name = {str(point.get("name")): point for point in found}
    finish, memory = by_name.get("finish", {}), by_name.get("memory", {})
    error = _error(finish)
    if memory.get("state") == "oom":
        message = error.get("message")
        text = "out of memory" + DURING.get(str(as_mapping(memory.get("detail")).get("during")), "")
        return _caused(f"{text}: {message}" if message else text, memory, finish)
    if finish.get("ok") is not False:
        first = _gravest(found)
        return None if first is None else _caused(_shortfall(first), first)
    stopped = outcome(verdict) == "stopped"
    # what broke `expect:` knows more about it than the end that followed
    broken = [point for point in found if point.get("ok") is False and point is not finish]
    caused = _caused(_ending(finish, stopped=stopped), *(broken if error.get("type") == "violation" else []), finish)
    if stopped:
        return replace(caused, help=_START_AGAIN, line={})
    return replace(caused, help=_READ_TRACEBACK) if caused.help is None and error else caused


def _gravest(found: Sequence[Point]) -> Point | None:
    """The first point that failed; else one that shows something odd, before those that show nothing."""
    failed = [point for point in found if point.get("ok") is False]
    unproved = [point for point in found if point.get("ok") is None]
    odd = [point for point in unproved if point.get("state") in _ODD]
    return next(iter((*failed, *odd, *unproved)), None)


def _caused(text: str, *points: Point) -> Cause:
    details = [as_mapping(point.get("detail")) for point in points]
    help = next((str(detail["help"]) for detail in details if detail.get("help")), None)
    return Cause(
        text=text,
        help=help,
        line=next(filter(None, map(_line, points)), {}),
        repeated=tuple(line for detail in details for line in reasons(detail)),
    )


def unreached(verdict: Mapping[str, Any]) -> list[str]:
    """The points that could not be shown because training never reached its first step."""
    if verdict.get("steps") or outcome(verdict) == "pass":
        return []
    states = ("unknown", "none_logged", "too_short")
    missing = (p for p in points(verdict) if p.get("ok") is None and p.get("state") in states)
    return [str(point.get("name")) for point in missing]


def _shortfall(point: Point) -> str:
    name, state, expected = (point.get(key) for key in ("name", "state", "expected"))
    if name == "finish":
        return _ending(point, stopped=False)
    reason = as_mapping(point.get("detail")).get("reason")
    differs = expected not in (None, "any", "unknown", state)
    text = f"{name} is {state}" + (f", expected {expected}" if differs else "")
    return f"{text if differs else name}: {reason}" if reason else text


def _error(finish: Point) -> Mapping[str, Any]:
    return as_mapping(as_mapping(finish.get("detail")).get("error"))


def _raised(detail: Mapping[str, Any]) -> str | None:
    error = as_mapping(detail.get("error"))
    kind = str(error.get("type"))
    if not error or (detail.get("signal") and kind.endswith((*MESSENGERS, "KeyboardInterrupt"))):
        return None
    where = f"  ({error['at']})" if error.get("at") else ""
    return f"{'' if kind in _MESSAGES else f'{kind}: '}{error.get('message')}{where}"


def _ending(finish: Point, *, stopped: bool) -> str:
    detail, state = as_mapping(finish.get("detail")), str(finish.get("state"))
    # where a signal was requested, what it raised in Python says nothing
    if not stopped and (raised := _raised(detail)) is not None:
        return raised
    text = f"the run {_ENDS.get(state, state)}"
    if detail.get("signal"):
        text += f" {'with' if state == 'crashed' else 'by'} {detail['signal']}"
    elif detail.get("returncode"):
        text += f" with exit code {detail['returncode']}"
    last, total = detail.get("last_step"), detail.get("total_steps")
    if last is not None and state in ("stopped", "killed", "preempted"):
        text += f" after step {last}" + (f" of {total}" if total else "")
    if detail.get("hang"):
        text += f"; before that {str(detail['hang']).partition('; stacks in')[0]}"
    if detail.get("grace_s") is not None:
        text += f"; no checkpoint was saved within {detail['grace_s']:g} s of the notice"
    return text


def _line(point: Point) -> Mapping[str, Any]:
    """The evidence that shows what went wrong: what names the error, else what the log has."""
    cites = [as_mapping(cite) for cite in as_list(point.get("evidence"))]
    if message := str(_error(point).get("message") or "").strip()[:40]:
        cites = [cite for cite in cites if message in str(cite.get("text"))] or cites
    logged = (cite for cite in cites if cite.get("source") == "log")
    cite = next(logged, cites[0] if cites else {})
    # what the probe recorded is in the text already, what a launcher reports is no cause: the place is enough
    text = str(cite.get("text") or "") if cite.get("source") == "log" else ""
    text = "" if any(name in text for name in MESSENGERS) else text
    return {**cite, "text": text[:_LINE_CHARS]} if cite else {}


def sentence(point: Point) -> str | None:
    """What is known about a point, from its details; None where the state says it all."""
    kind = BY_NAME.get(str(point.get("name")))
    if kind is None:
        return None
    try:
        return kind.sentence(str(point.get("state")), as_mapping(point.get("detail")))
    except (KeyError, TypeError, ValueError):  # of a damaged verdict
        return None


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
