"""What a run came to beside its losses: weights that moved, the model on the disk, inputs, resumes.

Each function takes the evidence and what is wanted, like those of `points`. A point of which nothing is
known and nothing is expected is left out of a verdict: records of older versions hold none of this.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

from launcher.evidence import Evidence
from launcher.measures import losses, moved_share
from launcher.points import Seen, of_event

MOVED = 0.05
"""The share of the weights that must have moved. Pure bfloat16 at 1e-6 moves about 2 %."""
STILL = 0.001
_BEFORE, _AFTER, _LEAST = 16, 4, 4  # losses compared around a resume
_SPREADS = 5.0
_NARROWEST = 0.02  # of the loss

_MOVED_HELP = (
    "raise the learning rate, or train fp32 weights: bfloat16 rounds away what is below 0.4 % of a "
    "weight; see also what is frozen; `expect: {weights: any}` accepts it"
)
_UNKNOWN = Seen(state="unknown", proved=False)


def _weights(evidence: Evidence, _want: str | None) -> Seen:
    """Whether the weights that the optimizer updates are others than before its first step."""
    probe = evidence.probe
    last = [(r, e) for r in probe.ranks.values() if (e := r.last("weights"))] if probe else []
    cites = tuple(of_event(*one) for one in last)
    share = moved_share(evidence)
    if probe is None or share is None:
        reason = next((e.text("reason") for _, e in last if e.text("reason")), None)
        return Seen(
            state="unknown", proved=False, cites=cites, detail={"reason": reason} if reason else {}
        )
    share = max(share, evidence.moved_before)
    detail: dict[str, object] = {"share": float(f"{share:.4g}")}
    detail |= {
        key: last[0][1].fields.get(key) for key in ("sampled", "tensors", "steps", "largest")
    }
    if absent := probe.without({record.rank for record, _ in last}):
        detail["missing_ranks"] = list(absent)
    if share >= MOVED:
        return Seen(state="moved", proved=not absent, cites=cites, detail=detail)
    if max(event.number("steps") or 0 for _, event in last) < 2:
        # the first step of a warm-up may have a learning rate of 0
        return Seen(state="unknown", proved=False, cites=cites, detail=detail)
    told = "none" if not share else f"{share:.2%}"
    detail |= {"reason": f"{told} of a sample of the trained weights moved", "help": _MOVED_HELP}
    if share < STILL:
        return Seen(state="still", cites=cites, detail=detail)
    return Seen(state="few", proved=False, doubt=True, cites=cites, detail=detail)


def _model(evidence: Evidence, _want: str | None) -> Seen:
    """Whether the model on the disk is the one that was saved."""
    told = evidence.model
    if told is None:
        return _UNKNOWN
    state = str(told.get("state", "saved"))
    probe = evidence.probe
    events = probe.events("saved_model") if probe else ()
    detail = {key: value for key, value in told.items() if key != "state"}
    if state in ("missing", "changed"):
        detail["help"] = (
            "no file of it can be trusted: save it again from a checkpoint, or train again"
        )
    cites = tuple(of_event(*one) for one in events)[-1:]
    return Seen(state=state, proved=state != "unknown", cites=cites, detail=detail)


def _inputs(evidence: Evidence, _want: str | None) -> Seen:
    """Whether data and model were the same at the start, when they were read, and at the end."""
    listed = evidence.inputs
    read = list(evidence.probe.events("data")) if evidence.probe else []
    other = [one for one in read if one[1].fields.get("state") == "changed"]
    if other:
        event = other[0][1]
        detail = {key: event.fields.get(key) for key in ("file", "before", "after")}
        reason = _differs(detail, "when training read it")
        cites = tuple(of_event(*one) for one in other)
        return Seen(
            state="changed", cites=cites, detail={**detail, "reason": reason, "help": _AGAIN}
        )
    if listed is None:
        return _UNKNOWN
    # an input that was deleted may well have been read as it was
    for change in sorted(listed, key=lambda one: one.get("after") is None):
        detail = {key: change.get(key) for key in ("role", "name", "file", "before", "after")}
        gone = change.get("after") is None
        detail["reason"] = (
            f"{change.get('file')} was gone at the end" if gone else _differs(change, "at the end")
        )
        detail["help"] = _AGAIN
        return Seen(state="gone" if gone else "changed", proved=not gone, doubt=gone, detail=detail)
    return Seen(state="same")


_AGAIN = "train again on files that nobody writes to meanwhile"


def _differs(one: Mapping[str, object], when: str) -> str:
    before, after = (str(one.get(key) or "none")[:12] for key in ("before", "after"))
    return (
        f"{one.get('file')} was not what it was at the start {when}: sha256 {before}, then {after}"
    )


def _resume(evidence: Evidence, _want: str | None) -> Seen:
    """Whether the first losses after a resume go on where those before it were."""
    before = [loss for loss in evidence.before if math.isfinite(loss)][-_BEFORE:]
    after = [loss for loss in losses(evidence) if math.isfinite(loss)][:_AFTER]
    if len(before) < _LEAST or not after:
        return _UNKNOWN
    level, now = statistics.median(before), statistics.median(after)
    spread = 1.4826 * statistics.median(abs(loss - level) for loss in before)
    limit = max(level + _SPREADS * max(spread, _NARROWEST * abs(level)), *before)
    detail: dict[str, object] = {
        "before": round(level, 4), "after": round(now, 4), "limit": round(limit, 4),
    }  # fmt: skip
    resumed = [one for one in (evidence.probe.events("resumed") if evidence.probe else ())]
    cites = tuple(of_event(*one) for one in resumed)
    if now <= limit:
        return Seen(state="continuous", cites=cites, detail=detail)
    reason = f"the loss was {level:.4g} before the resume and is {now:.4g} after it, more than {limit:.4g}"
    help = "the checkpoint may not hold what was trained: go back to an older one, or start over with --fresh"
    detail |= {"reason": reason, "help": help}
    return Seen(state="jump", proved=False, doubt=True, cites=cites, detail=detail)


POINTS: Mapping[str, Callable[[Evidence, str | None], Seen]] = {
    "weights": _weights, "model": _model, "inputs": _inputs, "resume": _resume,
}  # fmt: skip
