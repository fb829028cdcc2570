"""A verdict in its JSON form, in plain words: its outcome, its cause, what each point rests on."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.config.points import BY_NAME, DURING
from launcher.lazy_dataclass import dataclass
from launcher.runs.record import Json, as_list, as_mapping

Point = Mapping[str, Any]

_READ_TRACEBACK = (
    "read the traceback above that line of the log, fix its cause, start the same command again"
)
_START_AGAIN = (
    "start the same command again: it continues from the last checkpoint, if there is one"
)
_ENDS = {
    "crashed": "crashed",
    "killed": "was killed",
    "stopped": "was stopped",
    "preempted": "saved a checkpoint and ended, as requested,",
    "unknown": "ended in an unknown way",
    "running": "has no recorded end",
}
MESSENGERS = ("ChildFailedError", "CalledProcessError", "SignalException")
"""Exceptions that only report another process's failure."""
_ODD_STATES = ("suspect", "fewer", "more")
_UNREACHED_STATES = ("unknown", "none_logged", "too_short")
_LINE_CHARS = 160
_MESSAGE_CHARS = 40
_MESSAGE_KINDS = ("violation", "hang", "arguments", "not_started", "not_found")
"""Errors that are no exceptions: their message says it all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a run did not pass.

    `line` is the evidence that shows it (file, line, text), empty if none does. `repeated` are
    texts of the verdict that say no more than it.
    """

    text: str
    help: str | None = None
    line: Point
    repeated: tuple[str, ...] = ()


def list_points(verdict: Json) -> list[Point]:
    return [point for point in as_list(verdict.get("points")) if isinstance(point, Mapping)]


def sort_failed_first(verdict: Json) -> list[Point]:
    """The points that failed, then those that nothing proves, then the others."""
    failed = _select_by_ok(list_points(verdict), False)
    unproved = _select_by_ok(list_points(verdict), None)
    others = [point for point in list_points(verdict) if point not in failed + unproved]
    return failed + unproved + others


def _select_by_ok(points: Iterable[Point], ok: bool | None) -> list[Point]:
    return [point for point in points if point.get("ok") is ok]


def is_wanted(point: Point) -> bool:
    """Whether something was expected of a point. Of others nothing is `ok`, in no state."""
    return point.get("expected") not in (None, "any")


def describe_outcome(verdict: Json) -> str:
    """The status for people: `stopped` if a signal ended the run and nothing else failed."""
    failed = _select_by_ok(list_points(verdict), False)
    if len(failed) == 1 and failed[0].get("name") == "finish":
        finish = failed[0]
        detail = as_mapping(finish.get("detail"))
        is_signalled = detail.get("signal") in ("SIGINT", "SIGTERM")
        is_requested = is_signalled and detail.get("reason") in (None, "save_late")
        state = finish.get("state")
        if state == "preempted" or (state == "stopped" and is_requested):
            return "stopped"
    return str(verdict.get("status"))


def find_cause(verdict: Json) -> Cause | None:
    """The first thing to know about a run that did not pass; None if it passed."""
    if verdict.get("status") == "pass":
        return None
    by_name = {str(point.get("name")): point for point in list_points(verdict)}
    finish = by_name.get("finish", {})
    memory = by_name.get("memory", {})
    if memory.get("state") == "oom":
        return _explain_out_of_memory(memory, finish)
    if finish.get("ok") is False:
        return _explain_bad_end(verdict, finish)
    gravest = _choose_gravest(list_points(verdict))
    if gravest is None:
        return None
    return _build_cause(_describe_shortfall(gravest), gravest)


def _explain_out_of_memory(memory: Point, finish: Point) -> Cause:
    detail = as_mapping(memory.get("detail"))
    phase = str(detail.get("during"))
    text = "out of memory" + DURING.get(phase, "")
    message = _read_error(finish).get("message")
    if message:
        text += f": {message}"
    return _build_cause(text, memory, finish)


def _explain_bad_end(verdict: Json, finish: Point) -> Cause:
    is_stopped = describe_outcome(verdict) == "stopped"
    error = _read_error(finish)
    witnesses = [finish]
    if error.get("type") == "violation":
        # the point that broke `expect:` knows more about it than the end that followed
        broken = [
            point for point in _select_by_ok(list_points(verdict), False) if point is not finish
        ]
        witnesses = [*broken, finish]
    cause = _build_cause(_describe_end(finish, is_stopped=is_stopped), *witnesses)
    if is_stopped:
        return replace(cause, help=_START_AGAIN, line={})
    if cause.help is None and error:
        return replace(cause, help=_READ_TRACEBACK)
    return cause


def _choose_gravest(points: Sequence[Point]) -> Point | None:
    """The first point that failed; else one that shows something odd, else one without proof."""
    unproved = _select_by_ok(points, None)
    odd = [point for point in unproved if point.get("state") in _ODD_STATES]
    for point in (*_select_by_ok(points, False), *odd, *unproved):
        return point
    return None


def _build_cause(text: str, *witnesses: Point) -> Cause:
    """A cause with the first help and the first line of evidence of its points."""
    help = None
    line: Point = {}
    repeated: list[str] = []
    for point in witnesses:
        detail = as_mapping(point.get("detail"))
        if help is None and detail.get("help"):
            help = str(detail["help"])
        line = line or _choose_line(point)
        repeated += list_reasons(detail)
    return Cause(text=text, help=help, line=line, repeated=tuple(repeated))


def list_unreached(verdict: Json) -> list[str]:
    """The points that could not be shown because training never reached its first step."""
    if verdict.get("steps") or describe_outcome(verdict) == "pass":
        return []
    unproved = _select_by_ok(list_points(verdict), None)
    return [str(point.get("name")) for point in unproved if point.get("state") in _UNREACHED_STATES]


def _describe_shortfall(point: Point) -> str:
    name = point.get("name")
    state = point.get("state")
    expected = point.get("expected")
    if name == "finish":
        return _describe_end(point, is_stopped=False)
    text = str(name)
    reason = as_mapping(point.get("detail")).get("reason")
    differs = expected not in (None, "any", "unknown", state)
    if differs or not reason:
        text += f" is {state}"
    if differs:
        text += f", expected {expected}"
    if reason:
        text += f": {reason}"
    return text


def _read_error(finish: Point) -> Point:
    detail = as_mapping(finish.get("detail"))
    return as_mapping(detail.get("error"))


def _describe_error(detail: Json) -> str | None:
    error = as_mapping(detail.get("error"))
    if not error:
        return None
    kind = str(error.get("type"))
    if detail.get("signal") and kind.endswith((*MESSENGERS, "KeyboardInterrupt")):
        return None
    text = str(error.get("message"))
    if kind not in _MESSAGE_KINDS:
        text = f"{kind}: {text}"
    if error.get("at"):
        text += f"  ({error['at']})"
    return text


def _describe_end(finish: Point, *, is_stopped: bool) -> str:
    detail = as_mapping(finish.get("detail"))
    state = str(finish.get("state"))
    raised = _describe_error(detail)
    if raised is not None and not is_stopped:
        return raised
    # if a signal was requested, what it raised in Python says nothing
    text = f"the run {_ENDS.get(state, state)}"
    if detail.get("signal"):
        preposition = "with" if state == "crashed" else "by"
        text += f" {preposition} {detail['signal']}"
    elif detail.get("returncode"):
        text += f" with exit code {detail['returncode']}"
    if detail.get("last_step") is not None and state in ("stopped", "killed", "preempted"):
        text += f" after step {detail['last_step']}"
        if detail.get("total_steps"):
            text += f" of {detail['total_steps']}"
    if detail.get("hang"):
        hang = str(detail["hang"]).partition("; stacks in")[0]
        text += f"; before that {hang}"
    if detail.get("grace_s") is not None:
        text += f"; no checkpoint was saved within {detail['grace_s']:g} s of the notice"
    return text


def _choose_line(point: Point) -> Point:
    """The evidence that shows what went wrong: what names the error, else what the log has."""
    citations = [as_mapping(citation) for citation in as_list(point.get("evidence"))]
    error = _read_error(point)
    message = str(error.get("message") or "").strip()[:_MESSAGE_CHARS]
    if message:
        naming = [citation for citation in citations if message in str(citation.get("text"))]
        citations = naming or citations
    if not citations:
        return {}
    for citation in citations:
        if citation.get("source") == "log":
            # what a launcher reports is no cause: the place is enough
            text = str(citation.get("text") or "")
            if any(name in text for name in MESSENGERS):
                text = ""
            return {**citation, "text": text[:_LINE_CHARS]}
    # what the probe recorded is in the text of the cause already
    return {**citations[0], "text": ""}


def describe_point(point: Point) -> str | None:
    """What is known about a point, by its details; None if the state says it all."""
    kind = BY_NAME.get(str(point.get("name")))
    if kind is None:
        return None
    try:
        return kind.sentence(str(point.get("state")), as_mapping(point.get("detail")))
    except (KeyError, TypeError, ValueError):
        # of a damaged verdict
        return None


def list_reasons(detail: Point) -> Iterator[str]:
    """Why a point is not as expected, and what to do about it."""
    raised = _describe_error(detail)
    if raised is not None:
        yield raised
    if detail.get("signal"):
        yield f"ended by {detail['signal']}"
    for key in ("reason", "detail", "help"):
        text = detail.get(key)
        if not text:
            continue
        # the reason of an end is a key of `ending.HELP`
        is_key = key == "reason" and detail.get("help") and " " not in text
        if not is_key:
            yield str(text)
