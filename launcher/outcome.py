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
from dataclasses import dataclass, replace
from typing import Any

from launcher.ending import HELP, ending, fatal
from launcher.evidence import Event, Evidence, RankRecord
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
    UNKNOWN,
    Cite,
    Seen,
    missing_ranks,
    of_events,
    of_line,
    of_log,
    of_losses,
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


def _loss(evidence: Evidence, _want: str | None) -> Seen:
    log, ranks = evidence.log, evidence.records
    counted = sum(len(record.steps) for record in ranks)
    detail: dict[str, object] = {"logged": len(evidence.lines), "counted": counted}
    bad = _bad_steps(evidence)
    if (before := evidence.bad_before) and not any(one.seen for one in bad):
        # in weights that this attempt went on from
        reason = f"step {before[0]} {_BEFORE}"
        detail = {"first_step": before[0], "nonfinite": len(before), "rank": None, "reason": reason}
        return Seen(state="nonfinite", detail=detail, why={"help": _NOT_FINITE_HELP})
    if bad:
        # a rank that is known tells more than a logged mean of the same step
        first = min(bad, key=lambda one: (one.step, one.rank is None, one.rank or 0))
        numbered = counted or not log or log.numbered
        detail |= {"first_step": first.step if numbered else None, "rank": first.rank}
        detail |= {"nonfinite": len(bad), **_around(evidence, first)}
        # before training is announced, such a line may be a word of the data that upstream shows
        begun = ranks or not log or not log.blocks or log.first("total_steps", "progress")
        cites = tuple(one.cite for one in bad)
        why = {"reason": _nonfinite_reason(detail), "help": _NOT_FINITE_HELP}
        return Seen(state="nonfinite", proved=bool(begun), cites=cites, detail=detail, why=why)
    if means := _nonfinite_means(log):
        # a sum over all steps: one of them made it so, and nothing tells which
        trained = any(s.fields["what"] == "train_loss" for s in means)
        named = ", ".join(f"{s.fields['what']} is {s.fields['value']}" for s in means)
        detail["reason"] = f"the log says that {named}"
        detail["help"] = _MEAN_HELP if trained else _EVALUATED_HELP
        cites = of_log(log, means)
        if trained:
            detail |= {"first_step": None, "rank": None}
            return Seen(state="nonfinite", cites=cites, detail=detail)
        if losses(evidence):
            # an evaluation proves nothing of the training, and is no good news of it
            return Seen(state="finite", proved=False, cites=cites, detail=detail)
    if not losses(evidence):
        why = {
            "reason": "nothing tells of a loss: the probe saw no step, and the log has none",
            "help": "`logging_steps: 1` logs every step",
        }
        return Seen(state="none_logged", proved=False, detail=detail, why=why)
    if (doubt := _loss_doubt(evidence)) is not None:
        detail["reason"], cites = doubt
        return Seen(state="finite", proved=False, cites=cites, detail=detail)
    every = [step.loss for _, step in evidence.rank_steps] or [_exact(x) for x in evidence.lines]
    zero = bool(every) and not any(loss is None or loss for loss in every)
    return Seen(
        state="zero" if zero else "finite",
        cites=of_losses(evidence),
        detail=detail,
        why={"reason": "the loss was exactly 0 in every step", "help": _ZERO_HELP} if zero else {},
    )


@dataclass(frozen=True, slots=True)
class _BadStep:
    """A step that was not finite; `seen` is False of what the probe only said on the console."""

    step: int
    rank: int | None
    cite: Cite
    seen: bool = True


def _bad_steps(evidence: Evidence) -> list[_BadStep]:
    """The steps that were not finite: as logged, as each rank saw them, else as the probe said."""
    log = evidence.log
    bad = [_BadStep(x.step, None, of_line(log, x)) for x in evidence.lines if _nonfinite(x)]
    bad += [
        _BadStep(step.step, record.rank, of_step(record, step))
        for record, step in evidence.rank_steps
        if not step.finite
    ]
    for said in () if evidence.records else probe_lines(evidence):
        if found := _NOT_FINITE.match(said.fields["message"]):
            step, rank = int(found["step"] or 0), int(found["rank"])
            bad.append(_BadStep(step, rank, of_line(log, said), seen=False))
    return bad


def _around(evidence: Evidence, bad: _BadStep) -> dict[str, object]:
    """What it was that was not finite, and the last values before, as that rank saw them."""
    found: dict[str, object] = {}
    for record, event in evidence.events("nonfinite"):
        if record.rank == bad.rank and event.number("step") == bad.step:
            found = {"what": event.text("what"), "value": event.text("value")}
    for record, step in evidence.rank_steps:
        if record.rank == bad.rank and step.step < bad.step and step.finite:
            last = {"step": step.step, "loss": step.loss, "grad_norm": step.grad_norm}
            found["last_finite"] = last
    return found


def _nonfinite_reason(detail: Mapping[str, Any]) -> str:
    step, rank, last = (detail.get(key) for key in ("first_step", "rank", "last_finite"))
    what = detail.get("what") or ("loss" if rank is None else "loss or gradient")
    reason = f"{what} is {detail.get('value') or 'not finite'}"
    if step is not None:
        reason += f" at step {step}" + ("" if rank is None else f", rank {rank}")
    if detail["nonfinite"] != 1:
        reason += f", the first of {detail['nonfinite']}"
    if last and last["loss"] is not None:
        reason += f"; last finite: {last['loss']:.4g} at step {last['step']}"
    return reason


def _nonfinite_means(log: Log | None) -> tuple[Signal, ...]:
    """The first word for each mean of losses that HF Trainer says is not finite."""
    # in a log of open-instruct's it is a word of the training data
    said = log.all("mean_nonfinite") if log is not None and not log.blocks else ()
    return tuple({s.fields["what"]: s for s in reversed(said)}.values())[::-1]


def _loss_doubt(evidence: Evidence) -> tuple[str, tuple[Cite, ...]] | None:
    """Why losses that all are finite are no proof, and the lines that say so."""
    lines = evidence.lines
    if lines and (not evidence.records or _unseen(evidence)):
        for line in lines:
            if line.loss == 0 and "epoch" in line.extra and "grad_norm" not in line.extra:
                reason = "a loss of 0 may have been NaN, and no gradient norm is logged"
                return reason, of_log(evidence.log, (line,))
        norm = lines[-1].extra.get("grad_norm", 0.0)
        if not math.isfinite(norm):
            # what such a step left shows in the loss after it, and there is none
            return f"the last gradient norm is {norm}", of_log(evidence.log, lines[-1:])
    if unseen := _unseen(evidence, lines[-1].step if lines else 0):
        named = ", ".join(map(str, unseen[:3])) + (", …" if unseen[3:] else "")
        reason = f"no loss of step {named} was seen on every rank, and none is logged"
        return reason, of_losses(evidence)
    return None


def _unseen(evidence: Evidence, after: int = 0) -> list[int]:
    """The first steps of a run that came to its end which some rank's record does not tell of.

    Of any other run the last ones may still have been on their way.
    """
    probe, last = evidence.probe, evidence.last_step
    if probe is None or last is None or ending(evidence).state != "completed":
        return []
    begun = max((e.number("step") or 0 for _, e in evidence.events("resumed")), default=0)
    first = min((r.steps[0].step for r in evidence.records if r.steps), default=last + 1)
    seen = [{step.step for step in record.steps} for record in evidence.records]
    whole = set() if probe.missing else set.intersection(*seen)
    steps = range(max(min(first, int(begun) + 1), after + 1), last + 1)
    return list(itertools.islice((step for step in steps if step not in whole), 4))


def _nonfinite(line: StepLine) -> bool:
    """HF Trainer prints 0 for a loss that is NaN; what stands beside it tells."""
    hidden = line.loss == 0 and not all(map(math.isfinite, line.extra.values()))
    return hidden or not math.isfinite(line.loss)


def _exact(line: StepLine) -> float:
    """HF Trainer rounds a loss, and prints no 0 for the gradient of a small one."""
    return line.loss or (line.extra.get("grad_norm", 0.0) if "epoch" in line.extra else 0.0)


def _gradients(evidence: Evidence, _want: str | None) -> Seen:
    """What each rank's comparison came to; without one, whether the norms look like noise."""
    reports = evidence.last_events("gradients")
    corrupt = [one for one in reports if one[1].text("state") == "corrupt"]
    if corrupt:
        record, event = min(corrupt, key=lambda one: one[1].number("first_corrupt") or 0)
        detail: dict[str, Any] = {
            "first_step": event.fields.get("first_corrupt"), "rank": record.rank,
            **{key: event.fields.get(key) for key in (*_COMPARED, *_DIFFERENCE)},
            "help": CORRUPT_HELP,
        }  # fmt: skip
        reason = (
            f"step {detail['first_step']}, rank {record.rank}: for {detail['parameter']} the optimizer "
            f"used a gradient of norm {detail['used_norm']}, that of the batch is {detail['true_norm']}; "
            f"{detail['broken']} of {detail['parameters']} parameters compared there were wrong"
        )
        return Seen(
            state="corrupt", cites=of_events(corrupt), detail=detail, why={"reason": reason}
        )
    if said := probe_lines(evidence, "gradients are corrupt"):
        cites = of_log(evidence.log, said)
        return Seen(state="corrupt", cites=cites, detail={"help": CORRUPT_HELP})
    true = [one for one in reports if one[1].text("state") == "true"]
    noise = _noise(evidence)
    detail = {} if noise is None else {"norms": noise[0]}
    if true:
        # the comparison that is off most
        event = max(true, key=lambda one: one[1].number("largest_error") or 0.0)[1]
        missing = missing_ranks(evidence, {record.rank for record, _ in true})
        detail |= {key: event.fields.get(key) for key in _COMPARED} | missing
        return Seen(state="true", proved=not missing, cites=of_events(true), detail=detail)
    detail |= _reason_of(reports)
    cites = of_events(reports)
    if noise is not None:
        detail |= {"reason": noise[0], "help": _NOISE_HELP}
        cites = (*cites, noise[1])
    return Seen(state="unknown", proved=False, doubt=noise is not None, cites=cites, detail=detail)


def _reason_of(events: Sequence[tuple[RankRecord, Event]]) -> dict[str, object]:
    """The first reason that events give."""
    reason = next((text for _, event in events if (text := event.text("reason"))), None)
    return {"reason": reason} if reason else {}


def _noise(evidence: Evidence) -> tuple[str, Cite] | None:
    """Gradient norms that no batch gives, in words, with the place of the largest."""
    norms: list[tuple[float, int, Cite]] = []
    for record in evidence.records:
        norms = norms or [
            (s.grad_norm, s.step, of_step(record, s))
            for s in record.steps
            if s.grad_norm is not None
        ]
    norms = norms or [
        (norm, line.step, of_line(evidence.log, line))
        for line in evidence.lines
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
    if not jumps:
        return None
    largest, step, cite = max(jumps, key=lambda one: one[0])
    return f"the gradient norm jumps to {largest:.3g} at step {step}; {usual:.3g} is usual", cite


def _falls(series: Sequence[float]) -> bool:
    if len(series) < 2:
        return False
    if len(series) < TREND_LOSSES:
        return series[-1] < series[0] * (1 - TREND_CHANGE)
    change, z = trend(series)
    return change <= -TREND_CHANGE and z <= -TREND_Z


def _trend(evidence: Evidence, want: str | None) -> Seen:
    if (still := _still(evidence)) is not None:
        seen = of_losses(replace(evidence, log=None)) or of_losses(evidence)
        return Seen(state="still", cites=seen, detail={"reason": still}, why={"help": _STILL_HELP})
    # a run that was resumed is one run
    whole = whole_losses(evidence)
    finite = [loss for loss in whole if math.isfinite(loss)]
    detail: dict[str, object] = {"losses": len(finite)}
    if len(finite) < TREND_LOSSES:
        why = {"reason": f"{len(finite)} losses were seen, {TREND_LOSSES} are needed"}
        return Seen(state="too_short", proved=False, detail=detail, why=why)
    change, z = trend(finite)
    detail |= {"change": round(change, 4), "z": round(z, 2)}
    sure = abs(z) >= TREND_Z and abs(change) >= TREND_CHANGE
    state = "flat" if not sure else "falling" if change < 0 else "rising"
    why = {"reason": f"from the first step to the last the loss changes by {round(change, 4):+.1%}"}
    if not sure:
        small = abs(round(change, 4)) < TREND_CHANGE
        why["reason"] += (
            f", less than {TREND_CHANGE:.0%}" if small else f", within its noise (z {z:.1f})"
        )
    if want == "falling":
        why["help"] = "a longer run, or another learning rate; `expect: {trend: any}` asks for none"
    return Seen(state=state, cites=of_losses(evidence), detail=detail, why=why)


def _still(evidence: Evidence) -> str | None:
    """Why no weight can have moved, as every rank saw it in every one of two steps or more, or the log."""
    steps: list[tuple[int, float | None, float | None]] = [
        (one.step, one.grad_norm, one.learning_rate) for _, one in evidence.rank_steps
    ]
    if not steps and _from_the_first(evidence.lines):
        steps = [(x.step, x.extra.get("grad_norm"), x.learning_rate) for x in evidence.lines]
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


def _memory(evidence: Evidence, _want: str | None) -> Seen:
    log, end = evidence.log, ending(evidence)
    detail: dict[str, object] = {"peak_allocated_gib": peak_allocated_gib(evidence)}
    if phases := memory_phases(evidence):
        detail["phases"] = phases
    gpu, host = fatal(evidence, "oom"), fatal(evidence, "oom_host")
    if end.state == "completed":  # what is only said behind a good end is something else's
        raised = {s.line for s in evidence.signals("exception")}
        gpu, host = (tuple(s for s in told if s.line in raised) for told in (gpu, host))
    if host and not gpu:
        detail["help"] = HELP["oom_host"]
        return Seen(state="oom", cites=of_log(log, host), detail=detail)
    error = " ".join((end.error or {}).values())
    if not gpu and not re.search(r"OutOfMemory|out of memory", error):
        return Seen(state="ok", proved=bool(log or evidence.probe), detail=detail)
    keys = ("per_device_train_batch_size", "gradient_checkpointing", "packing", "max_seq_length")
    asked = {key: evidence.asked[key] for key in keys if key in evidence.asked}
    detail |= {"help": _OOM_HELP, "asked": asked, **(gpu[0].fields if gpu else {})}
    return Seen(state="oom", cites=of_log(log, gpu), detail=detail)


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
    told = {key: value for key, value in told.items() if value is not None}
    detail |= told
    if end.reason is not None:
        detail["help"] = HELP[end.reason]
    cites = of_events((evidence.stopped,) if evidence.stopped else ())
    cites += of_log(log, (*end.lines, *evidence.lines[-1:]))
    if saved is not None:
        cites += of_events((saved,)) if isinstance(saved, tuple) else of_log(log, (saved,))
    why = {}
    if (ended := evidence.exit) is not None:
        detail["returncode"] = ended.returncode
        text = f"returncode {ended.returncode}, signal {ended.signal}"
        cites = (*cites, Cite(source="exit", file=str(ended.path), line=1, text=text))
        if ended.returncode and not told:
            why["help"] = (
                f"exit code {ended.returncode}, and no error is known: the last lines of the console log "
                "may tell"
            )
    return Seen(state=end.state, proved=end.proved, cites=cites, detail=detail, why=why)


def _weights(evidence: Evidence, _want: str | None) -> Seen:
    """Whether the weights that the optimizer updates are others than before its first step."""
    last = evidence.last_events("weights")
    cites, share = of_events(last), moved_share(evidence)
    if share is None:
        return replace(UNKNOWN, cites=cites, detail=_reason_of(last))
    share = max(share, evidence.moved_before)
    keys = ("sampled", "tensors", "steps", "largest")
    detail: dict[str, object] = {key: last[0][1].fields.get(key) for key in keys}
    missing = missing_ranks(evidence, {record.rank for record, _ in last})
    detail |= {"share": float(f"{share:.4g}"), **missing}
    if share >= MOVED:
        return Seen(state="moved", proved=not missing, cites=cites, detail=detail)
    if max(event.number("steps") or 0 for _, event in last) < 2:
        # the first step of a warm-up may have a learning rate of 0
        return replace(UNKNOWN, cites=cites, detail=detail)
    told = "none" if not share else f"{share:.2%}"
    detail |= {"reason": f"{told} of a sample of the trained weights moved", "help": _MOVED_HELP}
    if share < STILL:
        return Seen(state="still", cites=cites, detail=detail)
    return Seen(state="few", proved=False, doubt=True, cites=cites, detail=detail)


def _model(evidence: Evidence, _want: str | None) -> Seen:
    """Whether the model on the disk is the one that was saved."""
    if evidence.model is None:
        return UNKNOWN
    detail = dict(evidence.model)
    state = str(detail.pop("state", "saved"))
    if state in ("missing", "changed"):
        detail["help"] = (
            "no file of it can be trusted: save it again from a checkpoint, or train again"
        )
    cites = of_events(evidence.events("saved_model")[-1:])
    return Seen(state=state, proved=state != "unknown", cites=cites, detail=detail)


def _inputs(evidence: Evidence, _want: str | None) -> Seen:
    """Whether data and model were the same at the start and at the end."""
    if evidence.inputs is None:
        return UNKNOWN
    if not evidence.inputs:
        return Seen(state="same")
    # an input that was deleted may well have been read as it was
    change = min(evidence.inputs, key=lambda one: one.get("after") is None)
    detail = {key: change.get(key) for key in ("role", "name", "file", "before", "after")}
    gone = change.get("after") is None
    reason = f"{detail['file']} was gone at the end" if gone else _differs(change)
    detail |= {"reason": reason, "help": _AGAIN}
    return Seen(state="gone" if gone else "changed", proved=not gone, doubt=gone, detail=detail)


def _differs(one: Mapping[str, object]) -> str:
    before, after = (str(one.get(key) or "none")[:12] for key in ("before", "after"))
    return f"{one.get('file')} was not what it was at the start: sha256 {before}, then {after}"


def _resume(evidence: Evidence, _want: str | None) -> Seen:
    """Whether the first losses after a resume go on where those before it were."""
    before = [loss for loss in evidence.before if math.isfinite(loss)][-_LOSSES_BEFORE:]
    after = [loss for loss in losses(evidence) if math.isfinite(loss)][:_LOSSES_AFTER]
    if len(before) < _LEAST or not after:
        return UNKNOWN
    level, now = statistics.median(before), statistics.median(after)
    spread = 1.4826 * statistics.median(abs(loss - level) for loss in before)
    limit = max(level + _SPREADS * max(spread, _NARROWEST * abs(level)), *before)
    detail: dict[str, object] = {
        "before": round(level, 4), "after": round(now, 4), "limit": round(limit, 4),
    }  # fmt: skip
    cites = of_events(evidence.events("resumed"))
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
