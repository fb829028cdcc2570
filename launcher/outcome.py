"""Evidence -> what came of a run: losses, gradients, memory, its end, weights, model, inputs, resumes.

Functions are like those of `points`. An `OPTIONAL` point of which nothing is known and nothing is expected
is left out of a verdict: records of older versions hold none of this.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from launcher.ending import HELP, ending, fatal
from launcher.evidence import Evidence
from launcher.logs import Log, Signal, StepLine
from launcher.measures import (
    losses,
    memory_phases,
    moved_share,
    peak_allocated_gib,
    whole_losses,
)
from launcher.options import TREND_LOSSES
from launcher.points import (
    Cite,
    Seen,
    Why,
    of_event,
    of_line,
    of_losses,
    of_signals,
    of_step,
    probe_lines,
)

OPTIONAL = ("weights", "model", "inputs", "resume")

TREND_BINS = 64
TREND_CHANGE = 0.01  # of the loss, from the first step to the last
TREND_Z = 2.33  # one-sided 1 %
NORMS = 4  # gradient norms at least, to tell what is usual
WILD_NORM = 1e4  # beside a loss that does not fall
JUMP = 10.0
_COMPARED = ("engine", "checks", "last_step", "parameters", "elements", "largest_error", "allowed")
_DIFFERENCE = ("parameter", "true_norm", "used_norm", "error", "broken", "corrupt_checks")
CORRUPT_HELP = (
    "the optimizer did not get the gradients of the batch: what was trained since is worthless. "
    "DeepSpeed 0.18.5 to 0.18.9 does this under ZeRO 1 and 2 with `overlap_comm: true`: install a later "
    "release or set `overlap_comm: false`; docs/gradients.md has other causes"
)
_NOISE_HELP = (
    "train a few steps with the probe, which compares the optimizer's gradients with those of autograd; "
    "`expect: {gradients: any}` accepts them as they are"
)
_OOM_HELP = (
    "lower the micro-batch and keep the global batch (`batch: {per_device: N}`), switch activation "
    "checkpointing on (SFT `gradient_checkpointing: true`, DPO `activation_memory_budget` < 1), "
    "or lower `max_seq_length`; with packing a micro-batch holds every token of its rows at once, "
    "so fewer rows (or `packing: false`) shrink it"
)
_MEAN_HELP = (
    "`train_loss` is the mean over all steps, so the loss of a step was not finite: `logging_steps: 1` "
    "shows which, `logging_nan_inf_filter: false` shows it as it was"
)
_BEFORE = "was not finite in an earlier attempt, and this one went on from weights that had been through it"
_EVALUATED_HELP = (
    "a row of the evaluation without any label (all of it cut off or masked) makes its mean nan, and "
    "so do weights that are broken: evaluate the saved model on its own"
)
# What the probe says of a broken contract, in a log that came without its records.
_NOT_FINITE = re.compile(
    r"(?:loss|gradient) is -?(?:nan|inf)\w* \((?:step (?P<step>\d+)|[^,]*), rank (?P<rank>\d+)\)"
)
_NOT_FINITE_HELP = (
    "a lower learning rate or a longer warm-up; look at the rows of that step, and where a checkpoint from "
    "before it lies"
)
_ZERO_HELP = (
    "no token has a label then: look at the chat template and at the maximal length, which may cut off every "
    "answer"
)
_STILL_HELP = (
    "check the learning rate, its schedule, and what is frozen; `expect: {trend: any}` accepts it"
)
MOVED = 0.05
"""The share of the weights that must have moved. Pure bfloat16 at 1e-6 moves about 2 %."""
STILL = 0.001
_LOSSES_BEFORE, _LOSSES_AFTER, _LEAST = 16, 4, 4  # losses compared around a resume
_SPREADS = 5.0
_NARROWEST = 0.02  # of the loss
_MOVED_HELP = (
    "raise the learning rate, or train fp32 weights: bfloat16 rounds away what is below 0.4 % of a "
    "weight; see also what is frozen; `expect: {weights: any}` accepts it"
)
_AGAIN = "train again on files that nobody writes to meanwhile"
_UNKNOWN = Seen(state="unknown", proved=False)


def _loss(evidence: Evidence, _want: str | None) -> Seen:
    log, ranks = evidence.log, evidence.probe.ranks.values() if evidence.probe else ()
    bad: list[tuple[int, int | None, Cite]] = []
    detail: dict[str, object] = {}
    for line in log.steps if log else ():
        if _nonfinite(line):
            bad.append((line.step, None, of_line(log, line)))
    for record in ranks:
        bad += [
            (step.step, record.rank, of_step(record, step))
            for step in record.steps
            if not step.finite
        ]
    if not bad and evidence.bad_before:
        # in weights that this attempt went on from
        before = evidence.bad_before
        detail = {
            "first_step": before[0],
            "nonfinite": len(before),
            "rank": None,
            "reason": f"step {before[0]} {_BEFORE}",
        }
        return Seen(state="nonfinite", detail=detail)
    for said in probe_lines(evidence) if log and not ranks else ():
        if found := _NOT_FINITE.match(said.fields["message"]):
            rank = int(found["rank"])
            bad.append((int(found["step"] or 0), rank, of_signals(log, (said,))[0]))
    logged = len(log.steps) if log else 0
    counted = sum(len(record.steps) for record in ranks)
    detail |= {"logged": logged, "counted": counted}
    if bad:
        # a rank that is known tells more than a logged mean of the same step
        first = min(bad, key=lambda b: (b[0], b[1] is None, b[1] or 0))
        told = first[0] if counted or not log or log.numbered else None
        detail |= {"first_step": told, "rank": first[1], "nonfinite": len(bad)}
        detail |= _last_finite(evidence, first[0], first[1])
        # before training is announced, such a line may be a word of the data that upstream shows
        begun = not log or not log.blocks or log.first("total_steps", "progress") or ranks
        cites = tuple(b[2] for b in bad)
        return Seen(state="nonfinite", proved=bool(begun), cites=cites, detail=detail)
    means = _nonfinite_means(log)
    if means:
        named = ", ".join(f"{s.fields['what']} is {s.fields['value']}" for s in means)
        cites, detail["reason"] = of_signals(log, means), f"the log says that {named}"
        if any(s.fields["what"] == "train_loss" for s in means):
            # a sum over all steps: one of them made it so, and nothing tells which
            detail |= {"first_step": None, "rank": None, "help": _MEAN_HELP}
            return Seen(state="nonfinite", cites=cites, detail=detail)
        detail["help"] = _EVALUATED_HELP
    if not losses(evidence):
        return Seen(state="none_logged", proved=False, detail=detail)
    if means:
        # an evaluation proves nothing of the training, and is no good news of it
        return Seen(state="finite", proved=False, cites=cites, detail=detail)
    unseen = _unseen(evidence)
    if log and log.steps and (unseen or not ranks) and (doubt := _doubt(log.steps)) is not None:
        detail["reason"] = doubt[1]
        return Seen(state="finite", proved=False, cites=(of_line(log, doubt[0]),), detail=detail)
    shown = log.steps[-1].step if log and log.steps else 0
    if alone := _unseen(evidence, shown):
        named = ", ".join(map(str, alone[:3])) + (", …" if alone[3:] else "")
        detail["reason"] = f"no loss of step {named} was seen on every rank, and none is logged"
        return Seen(state="finite", proved=False, cites=of_losses(evidence), detail=detail)
    every = [step.loss for record in ranks for step in record.steps]
    if not every and log is not None:
        every = [_exact(line) for line in log.steps]
    state = "zero" if every and not any(loss is None or loss for loss in every) else "finite"
    return Seen(state=state, cites=of_losses(evidence), detail=detail)


def _unseen(evidence: Evidence, after: int = 0) -> list[int]:
    """The first steps of a run that came to its end which some rank's record does not tell of.

    Of any other run the last ones may still have been on their way.
    """
    probe, last = evidence.probe, evidence.last_step
    if probe is None or last is None or ending(evidence).state != "completed":
        return []
    begun = max((e.number("step") or 0 for _, e in probe.events("resumed")), default=0)
    first = min((r.steps[0].step for r in probe.ranks.values() if r.steps), default=last + 1)
    seen = [{step.step for step in record.steps} for record in probe.ranks.values()]
    seen += [set()] * len(probe.missing)
    whole = set.intersection(*seen)
    steps = range(max(min(first, int(begun) + 1), after + 1), last + 1)
    return list(itertools.islice((step for step in steps if step not in whole), 4))


def _nonfinite_means(log: Log | None) -> tuple[Signal, ...]:
    """The first word for each mean of losses that HF Trainer says is not finite."""
    # in a log of open-instruct's it is a word of the training data
    said = log.all("mean_nonfinite") if log is not None and not log.blocks else ()
    return tuple({s.fields["what"]: s for s in reversed(said)}.values())[::-1]


def _last_finite(evidence: Evidence, step: int, rank: int | None) -> dict[str, object]:
    """What it was that was not finite, and the last values before, as that rank saw them."""
    told: dict[str, object] = {}
    for record, event in evidence.probe.events("nonfinite") if evidence.probe else ():
        if record.rank == rank and event.number("step") == step:
            told = {"what": event.text("what"), "value": event.text("value")}
    records = evidence.probe.ranks.values() if evidence.probe else ()
    before = [s for r in records if r.rank == rank for s in r.steps if s.step < step and s.finite]
    if before:
        last = before[-1]
        told["last_finite"] = {"step": last.step, "loss": last.loss, "grad_norm": last.grad_norm}
    return told


def _nonfinite(line: StepLine) -> bool:
    """HF Trainer prints 0 for a loss that is NaN; what stands beside it tells."""
    hidden = line.loss == 0 and not all(map(math.isfinite, line.extra.values()))
    return hidden or not math.isfinite(line.loss)


def _exact(line: StepLine) -> float:
    """HF Trainer rounds a loss, and prints no 0 for the gradient of a small one."""
    return line.loss or (line.extra.get("grad_norm", 0.0) if "epoch" in line.extra else 0.0)


def _doubt(steps: Sequence[StepLine]) -> tuple[StepLine, str] | None:
    """The line of HF Trainer's that leaves open whether the loss was finite, and why."""
    for line in steps:
        if line.loss == 0 and "epoch" in line.extra and "grad_norm" not in line.extra:
            return line, "a loss of 0 may have been NaN, and no gradient norm is logged"
    norm = steps[-1].extra.get("grad_norm", 0.0)
    if not math.isfinite(norm):
        # what such a step left shows in the loss after it, and there is none
        return steps[-1], f"the last gradient norm is {norm}"
    return None


def _why_loss(_want: str | None, seen: Seen, evidence: Evidence) -> Why:
    detail = seen.detail
    if seen.state == "none_logged":
        told = "nothing tells of a loss: the probe saw no step, and the log has none"
        return {"reason": told, "help": "`logging_steps: 1` logs every step"}
    if seen.state == "zero":
        return {"reason": "the loss was exactly 0 in every step", "help": _ZERO_HELP}
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
    return {"reason": told, "help": _NOT_FINITE_HELP}


def _gradients(evidence: Evidence, _want: str | None) -> Seen:
    """What each rank's comparison came to; without one, whether the norms look like noise."""
    probe = evidence.probe
    reports = [(r, e) for r in probe.ranks.values() if (e := r.last("gradients"))] if probe else []
    corrupt = [one for one in reports if one[1].text("state") == "corrupt"]
    if corrupt:
        first = min(corrupt, key=lambda one: one[1].number("first_corrupt") or 0)
        record, event = first
        detail: dict[str, object] = {
            "first_step": event.fields.get("first_corrupt"), "rank": record.rank,
            **{key: event.fields.get(key) for key in (*_COMPARED, *_DIFFERENCE)},
            "help": CORRUPT_HELP,
        }  # fmt: skip
        return Seen(state="corrupt", cites=tuple(of_event(*one) for one in corrupt), detail=detail)
    said = [
        s for s in probe_lines(evidence) if s.fields["message"].startswith("gradients are corrupt")
    ]
    if said:
        cites = of_signals(evidence.log, said)
        return Seen(state="corrupt", cites=cites, detail={"help": CORRUPT_HELP})
    true = [one for one in reports if one[1].text("state") == "true"]
    absent = probe.without({record.rank for record, _ in true}) if probe else ()
    noise = _noise(evidence)
    detail = {} if noise is None else {"norms": noise[0]}
    if true:
        # the comparison that is off most
        event = max(true, key=lambda one: one[1].number("largest_error") or 0.0)[1]
        detail |= {key: event.fields.get(key) for key in _COMPARED}
        detail |= {"missing_ranks": list(absent)} if absent else {}
        cites = tuple(of_event(*one) for one in true)
        return Seen(state="true", proved=not absent, cites=cites, detail=detail)
    told = next((e.text("reason") for _, e in reports if e.text("reason")), None)
    if told is not None:
        detail["reason"] = told
    if noise is not None:
        detail |= {"reason": noise[0], "help": _NOISE_HELP}
    cites = (*(of_event(*one) for one in reports), *((noise[1],) if noise else ()))
    return Seen(state="unknown", proved=False, doubt=noise is not None, cites=cites, detail=detail)


def _noise(evidence: Evidence) -> tuple[str, Cite] | None:
    """Gradient norms that no batch gives, in words, with the place of the largest."""
    norms: list[tuple[float, int, Cite]] = []
    log = evidence.log
    for record in evidence.probe.ranks.values() if evidence.probe else ():
        norms = norms or [
            (s.grad_norm, s.step, of_step(record, s))
            for s in record.steps
            if s.grad_norm is not None
        ]
    if not norms and log is not None:
        norms = [
            (norm, line.step, of_line(log, line))
            for line in log.steps
            if math.isfinite(norm := line.extra.get("grad_norm", math.nan))
        ]
    if len(norms) < NORMS:
        return None
    largest, step, cite = max(norms, key=lambda one: one[0])
    usual = statistics.median(norm for norm, *_ in norms)
    if largest >= WILD_NORM and not _falls([x for x in whole_losses(evidence) if math.isfinite(x)]):
        return f"gradient norms up to {largest:.3g} (step {step}), and the loss does not fall", cite
    # the first steps of a run may well be far from the others
    jumps = [
        one
        for before, one, after in zip(norms[1:], norms[2:], norms[3:], strict=False)
        if one[0] > JUMP * max(before[0], after[0], usual) > 0
    ]
    if jumps:
        largest, step, cite = max(jumps, key=lambda one: one[0])
        return (
            f"the gradient norm jumps to {largest:.3g} at step {step}; {usual:.3g} is usual",
            cite,
        )
    return None


def _falls(series: Sequence[float]) -> bool:
    if len(series) < 2:
        return False
    if len(series) < TREND_LOSSES:
        return series[-1] < series[0] * (1 - TREND_CHANGE)
    change, z = trend(series)
    return change <= -TREND_CHANGE and z <= -TREND_Z


def _why_gradients(_want: str | None, seen: Seen, _evidence: Evidence) -> Why:
    detail = seen.detail
    if seen.state != "corrupt" or "parameter" not in detail:
        return {}
    used, true = detail["used_norm"], detail["true_norm"]
    return {
        "reason": f"step {detail['first_step']}, rank {detail['rank']}: for {detail['parameter']} the "
        f"optimizer used a gradient of norm {used}, that of the batch is {true}; {detail['broken']} of "
        f"{detail['parameters']} parameters compared there were wrong"
    }


def _trend(evidence: Evidence, _want: str | None) -> Seen:
    if (still := _still(evidence)) is not None:
        seen = of_losses(replace(evidence, log=None)) or of_losses(evidence)
        return Seen(state="still", cites=seen, detail={"reason": still})
    # a run that was resumed is one run
    whole = whole_losses(evidence)
    finite = [loss for loss in whole if math.isfinite(loss)]
    detail: dict[str, object] = {"losses": len(finite)}
    if len(finite) < TREND_LOSSES:
        return Seen(state="too_short", proved=False, detail=detail)
    change, z = trend(finite)
    detail |= {"change": round(change, 4), "z": round(z, 2)}
    sure = abs(z) >= TREND_Z and abs(change) >= TREND_CHANGE
    state = "flat" if not sure else "falling" if change < 0 else "rising"
    return Seen(state=state, cites=of_losses(evidence), detail=detail)


def _still(evidence: Evidence) -> str | None:
    """Why no weight can have moved, as every rank saw it in every one of two steps or more, or the log."""
    log = evidence.log
    steps: list[tuple[int, float | None, float | None]] = [
        (one.step, one.grad_norm, one.learning_rate)
        for record in (evidence.probe.ranks.values() if evidence.probe else ())
        for one in record.steps
    ]
    if not steps and log is not None and _from_the_first(log.steps):
        steps = [(one.step, one.extra.get("grad_norm"), one.learning_rate) for one in log.steps]
    if len({step for step, *_ in steps}) < 2:
        return None
    for place, words in ((1, "gradient norm"), (2, "learning rate")):
        if all(one[place] == 0 for one in steps):
            return f"the {words} was 0 in every step: nothing was learned"
    return None


def _from_the_first(steps: Sequence[StepLine]) -> bool:
    """Whether the first line is there: at the end of a schedule the learning rate may well be 0."""
    return len(steps) > 1 and steps[0].step <= max(1, steps[1].step - steps[0].step)


def trend(series: Sequence[float]) -> tuple[float, float]:
    """Relative change from first to last by the Theil-Sen slope, and Mann-Kendall's z.

    Both go by pairs of losses, so that a few spikes move neither. Needs two losses or more.
    """
    size = math.ceil(len(series) / TREND_BINS)
    bins = [statistics.median(series[i : i + size]) for i in range(0, len(series), size)]
    n = len(bins)
    pairs = [(j - i, bins[j] - bins[i]) for i in range(n) for j in range(i + 1, n)]
    slope = statistics.median(rise / run for run, rise in pairs)
    score = sum((rise > 0) - (rise < 0) for _, rise in pairs)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    level = statistics.median(map(abs, bins)) or 1.0
    return slope * (n - 1) / level, (score - math.copysign(min(1, abs(score)), score)) / deviation


def _why_trend(want: str | None, seen: Seen, _evidence: Evidence) -> Why:
    losses, change, z = (seen.detail.get(key) for key in ("losses", "change", "z"))
    if seen.state == "too_short":
        return {"reason": f"{losses} losses were seen, {TREND_LOSSES} are needed"}
    if seen.state == "still":
        return {"help": _STILL_HELP}
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


def _memory(evidence: Evidence, _want: str | None) -> Seen:
    log, peak = evidence.log, peak_allocated_gib(evidence)
    detail: dict[str, object] = {"peak_allocated_gib": peak}
    if phases := memory_phases(evidence):
        detail["phases"] = phases
    end = ending(evidence)
    error = end.error or {}
    told, host = fatal(evidence, "oom"), fatal(evidence, "oom_host")
    if log and end.state == "completed":  # what is only said behind a good end is something else's
        raised = {s.line for s in log.all("exception")}
        told = tuple(s for s in told if s.line in raised)
        host = tuple(s for s in host if s.line in raised)
    if log and not told and host:
        detail["help"] = HELP["oom_host"]
        return Seen(state="oom", cites=of_signals(log, host), detail=detail)
    if not told and not re.search(r"OutOfMemory|out of memory", " ".join(error.values())):
        return Seen(state="ok", proved=bool(log or evidence.probe), detail=detail)
    asked = log.asked if log else {}
    keys = ("per_device_train_batch_size", "gradient_checkpointing", "packing", "max_seq_length")
    detail |= {"help": _OOM_HELP, "asked": {k: asked[k] for k in keys if k in asked}}
    if told and told[0].fields:
        detail |= told[0].fields
    return Seen(state="oom", cites=of_signals(log, told), detail=detail)


def _finish(evidence: Evidence, _want: str | None) -> Seen:
    end, log, saved = ending(evidence), evidence.log, evidence.final_save
    detail: dict[str, object] = {
        "last_step": evidence.last_step,
        "total_steps": evidence.total_steps,
        "saved": saved is not None,
    }
    if evidence.left_out_save:
        detail["left_out"] = "the final save: of a trial nobody wants the model"
    told = {"reason": end.reason, "signal": end.signal, "error": end.error}
    detail |= {k: v for k, v in told.items() if v is not None}
    if end.reason is not None:
        detail["help"] = HELP[end.reason]
    cites = [of_event(*evidence.stopped)] if evidence.stopped else []
    cites += of_signals(log, end.lines)
    if log and log.steps:
        cites.append(of_line(log, log.steps[-1]))
    if saved is not None:
        cites.append(of_event(*saved) if isinstance(saved, tuple) else of_signals(log, (saved,))[0])
    if evidence.exit is not None:
        detail["returncode"] = evidence.exit.returncode
        text = f"returncode {evidence.exit.returncode}, signal {evidence.exit.signal}"
        cites.append(Cite(source="exit", file=str(evidence.exit.path), line=1, text=text))
    return Seen(state=end.state, proved=end.proved, cites=tuple(cites), detail=detail)


def _why_finish(_want: str | None, seen: Seen, _evidence: Evidence) -> Why:
    code = seen.detail.get("returncode")
    if not code or seen.detail.keys() & {"reason", "error", "signal"}:
        return {}
    return {
        "help": f"exit code {code}, and no error is known: the last lines of the console log may tell"
    }


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


def _differs(one: Mapping[str, object], when: str) -> str:
    before, after = (str(one.get(key) or "none")[:12] for key in ("before", "after"))
    return (
        f"{one.get('file')} was not what it was at the start {when}: sha256 {before}, then {after}"
    )


def _resume(evidence: Evidence, _want: str | None) -> Seen:
    """Whether the first losses after a resume go on where those before it were."""
    before = [loss for loss in evidence.before if math.isfinite(loss)][-_LOSSES_BEFORE:]
    after = [loss for loss in losses(evidence) if math.isfinite(loss)][:_LOSSES_AFTER]
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
WHY: Mapping[str, Callable[[str | None, Seen, Evidence], Why]] = {
    "loss": _why_loss,
    "gradients": _why_gradients,
    "trend": _why_trend,
    "finish": _why_finish,
}
