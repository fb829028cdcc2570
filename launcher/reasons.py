"""A point that is not as expected -> what was seen in its place, and what to do next.

Whatever `points` says of it already stands; how a run ended is told by `ending` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from launcher.evidence import Evidence
from launcher.options import TREND_LOSSES
from launcher.points import TREND_CHANGE, Seen

_NO_RECORD = "a record that is cut off or missing is no proof: look at `probe/`, and at the disk"
_NOT_PACKED = (
    "open-instruct's SFT packs the rows of one micro-batch, so that one row has none beside it; in rows made "
    "beforehand one that is as long as the limit leaves no room: look at the batch, and at the row lengths; "
    "`launch explain packing CONFIG` says who reads it"
)
_PACKED = "write `packing: false`, or `expect: {packing: isolated}`"
_OTHER_BATCH = (
    "see what started the processes (an accelerate config, a scheduler's task count, the GPUs that could be "
    "seen) and what set the batch anew (a DeepSpeed file, `auto_find_batch_size`); `expect: {batch: any}` "
    "takes it so"
)
_NOT_FINITE = (
    "a lower learning rate or a longer warm-up; look at the rows of that step, and where a checkpoint from "
    "before it lies"
)
_ZERO = (
    "no token has a label then: look at the chat template and at the maximal length, which may cut off every "
    "answer"
)
_STILL = "look at the learning rate, its schedule, and what is frozen; `expect: {trend: any}` takes it so"


def why(name: str, want: str | None, seen: Seen, evidence: Evidence) -> Mapping[str, str]:
    """`reason` and, where there is something to do, `help` of a point that is not as expected."""
    if seen.state == "unknown" and "reason" not in seen.detail:
        return {"reason": "neither the probe's records nor the log show it"}
    told = dict(_WHY[name](want, seen, evidence)) if name in _WHY else {}
    absent = seen.detail.get("missing_ranks")
    if "reason" not in told and isinstance(absent, list):
        ranks = ", ".join(map(str, absent[:8])) + (", …" if absent[8:] else "")
        told = {"reason": f"nothing is known of rank {ranks}", "help": _NO_RECORD}
    return told


def _liger(want: str | None, seen: Seen, evidence: Evidence) -> Mapping[str, str]:
    steps = evidence.last_step or 0
    calls = {op: n for op, n in seen.detail.items() if isinstance(n, Mapping) and any(n.values())}
    if isinstance(lacking := seen.detail.get("uncalled"), Mapping):
        named = ", ".join(map(str, lacking))
        return {
            "reason": f"`{named}` was patched in and never called in {steps} steps: the logits are whole",
            "help": "the model does not take its loss from Liger's forward: see whether Liger knows the "
            "model type, and who computes the loss; `expect: {liger: any}` takes it so",
        }
    if want == "off" and seen.state == "engaged":
        return {"reason": f"Liger's kernels were called: {', '.join(calls)}"}
    if seen.state == "not_engaged" and "reason" not in seen.detail and steps:
        ranks = seen.detail.get("idle_ranks")
        where = f" on rank {', '.join(map(str, ranks))}" if isinstance(ranks, list) else ""
        patched = any(evidence.probe.events("liger_patch")) if evidence.probe else False
        return {
            "reason": f"no kernel of Liger's was called{where} in {steps} steps, "
            + ("though its patches were applied" if patched else "and no patch was applied"),
            "help": "the class that trains is another than the patched one" if patched
            else "see whether liger-kernel is installed (`launch doctor`) and knows the model type",
        }  # fmt: skip
    if seen.state in ("applied", "attempted"):
        told = (
            "says that patches were applied"
            if seen.state == "applied"
            else "says only that it tries"
        )
        return {"reason": f"the log {told}: that its kernels run, only the probe can count"}
    return {}


def _packing(want: str | None, seen: Seen, evidence: Evidence) -> Mapping[str, str]:
    if want in ("isolated", "on") and seen.state == "off":
        ranks = seen.detail.get("ranks")
        idle = [r for r, s in ranks.items() if s == "off"] if isinstance(ranks, Mapping) else []
        where = f" of rank {', '.join(idle)}" if idle else ""
        return {"reason": f"no batch{where} held two samples in one row", "help": _NOT_PACKED}
    if want == "off" and seen.state in ("on", "isolated"):
        return {"reason": "several samples stand in one row", "help": _PACKED}
    if want == "isolated" and seen.state == "on" and "missing_ranks" not in seen.detail:
        told = "was not tested" if evidence.probe else "cannot be shown by a log alone"
        return {"reason": f"whether packed samples see each other {told}"}
    return {}


def _attention(want: str | None, seen: Seen, _evidence: Evidence) -> Mapping[str, str]:
    if want == seen.state or ("missing_ranks" in seen.detail and not seen.proved):
        return {}
    if "announced" in seen.detail:
        return {
            "reason": f"the log announces {seen.detail['announced']}, and a log alone proves no more"
        }
    ranks = seen.detail.get("ranks")
    where = (
        f" ({', '.join(f'rank {r} {s}' for r, s in ranks.items())})"
        if isinstance(ranks, Mapping)
        else ""
    )
    return {
        "reason": f"the loaded model has {seen.state}{where}",
        "help": f"see whether `{want}` can be had there (`launch doctor`), and what asks for it",
    }


def _batch(_want: str | None, seen: Seen, _evidence: Evidence) -> Mapping[str, str]:
    return {"help": _OTHER_BATCH} if seen.state == "different" else {}


def _cache(want: str | None, seen: Seen, _evidence: Evidence) -> Mapping[str, str]:
    path = f": {seen.detail['path']}" if seen.detail.get("path") else ""
    if want == "hit" and seen.state == "miss":
        help = "`launch cache why RUN` says what differs from what is there"
        return {"reason": f"it was not there, and was made anew{path}", "help": help}
    if want == "miss" and seen.state == "hit":
        return {"reason": f"it was there already{path}"}
    return {}


def _loss(_want: str | None, seen: Seen, evidence: Evidence) -> Mapping[str, str]:
    detail = seen.detail
    if seen.state == "none_logged":
        told = "nothing tells of a loss: the probe saw no step, and the log has none"
        return {"reason": told, "help": "`logging_steps: 1` logs every step"}
    if seen.state == "zero":
        return {"reason": "the loss was exactly 0 in every step", "help": _ZERO}
    if seen.state != "nonfinite":
        return {}
    step, rank, last = detail.get("first_step"), detail.get("rank"), detail.get("last_finite")
    unknown = "loss" if rank is None else "loss or gradient"
    what, value = detail.get("what") or unknown, detail.get("value") or "not finite"
    when = "" if step is None else f" at step {step}" + ("" if rank is None else f", rank {rank}")
    told = f"{what} is {value}{when}"
    if isinstance(detail.get("nonfinite"), int) and detail["nonfinite"] != 1:
        told += f", the first of {detail['nonfinite']}"
    if isinstance(last, Mapping) and last.get("loss") is not None:
        told += f"; last finite: {last['loss']:.4g} at step {last['step']}"
    return {"reason": told, "help": _NOT_FINITE}


def _trend(want: str | None, seen: Seen, _evidence: Evidence) -> Mapping[str, str]:
    losses, change, z = (seen.detail.get(key) for key in ("losses", "change", "z"))
    if seen.state == "too_short":
        return {"reason": f"{losses} losses were seen, {TREND_LOSSES} are needed"}
    if seen.state == "still":
        return {"help": _STILL}
    if not isinstance(change, float) or not isinstance(z, float):
        return {}
    told = f"from the first step to the last the loss changes by {change:+.1%}"
    if seen.state == "flat":
        weak = (
            f"less than {TREND_CHANGE:.0%}"
            if abs(change) < TREND_CHANGE
            else f"within its noise (z {z:.1f})"
        )
        told += f", {weak}"
    help = "a longer run, or another learning rate; `expect: {trend: any}` asks for none"
    return {"reason": told, **({"help": help} if want == "falling" else {})}


def _gradients(_want: str | None, seen: Seen, _evidence: Evidence) -> Mapping[str, str]:
    detail = seen.detail
    if seen.state != "corrupt" or "parameter" not in detail:
        return {}
    used, true = detail["used_norm"], detail["true_norm"]
    return {
        "reason": f"step {detail['first_step']}, rank {detail['rank']}: for {detail['parameter']} the "
        f"optimizer used a gradient of norm {used}, that of the batch is {true}; {detail['broken']} of "
        f"{detail['parameters']} parameters compared there were wrong"
    }


def _finish(_want: str | None, seen: Seen, _evidence: Evidence) -> Mapping[str, str]:
    code = seen.detail.get("returncode")
    if not code or seen.detail.keys() & {"reason", "error", "signal"}:
        return {}
    return {
        "help": f"exit code {code}, and no error is known: the last lines of the console log may tell"
    }


_WHY: Mapping[str, Callable[[str | None, Seen, Evidence], Mapping[str, str]]] = {
    "liger": _liger, "packing": _packing, "attention": _attention, "batch": _batch, "dataset_cache": _cache,
    "reference_cache": _cache, "loss": _loss, "gradients": _gradients, "trend": _trend, "finish": _finish,
}  # fmt: skip
