"""Evidence -> what came of a run: losses, gradients, memory, its end, weights, model, inputs, resumes. Functions are
like those of `points`."""

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from launcher.stage.options import TREND_LOSSES
from launcher.verdict.ending import HELP, ending, fatal, phase
from launcher.verdict.evidence import Evidence
from launcher.verdict.metrics import earlier, losses, memory_phases, moved_share, peak_allocated_gib, whole_losses
from launcher.verdict.points import UNKNOWN, Citable, Observation, probe_lines, reason_of

TREND_BINS = 64
TREND_CHANGE = 0.01  # of the loss, from the first step to the last
TREND_Z = 2.33  # one-sided 1 %
NORMS = 4  # gradient norms at least, to tell what is usual
WILD_NORM = 1e4  # beside a loss that does not fall
JUMP = 10.0
MOVED = 0.05  # the share of the weights that must have moved. Pure bfloat16 at 1e-6 moves about 2 %
STILL = 0.001
_LOSSES_BEFORE, _LOSSES_AFTER, _LEAST = 16, 4, 4  # losses compared around a resume
_SPREADS = 5.0
_NARROWEST = 0.02  # of the loss
_COMPARED = ("engine", "checks", "last_step", "parameters", "elements", "largest_error", "allowed")
_DIFFERENCE = ("parameter", "true_norm", "used_norm", "error", "broken", "corrupt_checks")
# What the probe says of a broken contract, in a log that came without its records.
_NOT_FINITE = re.compile(r"(?:loss|gradient) is -?(?:nan|inf)\w* \((?:step (?P<step>\d+)|[^,]*), rank (?P<rank>\d+)\)")

_MOVED_HELP = (
    "raise the learning rate, or train fp32 weights: bfloat16 rounds away what is below 0.4 % of a weight; see also "
    "what is frozen; `expect: {weights: any}` accepts it"
)
_NOT_FINITE_HELP = (
    "lower the learning rate or lengthen the warm-up; check the rows of that step; resume from a checkpoint before it"
)
_OOM_HELP = (
    "lower the micro-batch and keep the global batch (`batch: {per_device: N}`), switch activation checkpointing on "
    "(SFT `gradient_checkpointing: true`, DPO `activation_memory_budget` < 1), or lower `max_seq_length`; with "
    "packing a micro-batch holds every token of its rows at once, so fewer rows (or `packing: false`) shrink it"
)
# by what training was busy with: the size of its micro-batch has no part in these
_OOM_HELPS: Mapping[str, str] = {
    "evaluation": "it was the evaluation that ran out, not training: lower `per_device_eval_batch_size`, set "
    "`prediction_loss_only: true` or `eval_accumulation_steps` so that logits are not gathered on the GPU, or "
    "evaluate fewer or shorter rows",
    "saving": "it was a save that ran out, where the whole weights are gathered: save sharded, or gather on the host "
    "(`stage3_gather_16bit_weights_on_model_save: false`), and keep some GiB free for it",
    "reference": "it was the reference pass that ran out: lower `precompute_ref_batch_size`, or the rows' length",
    "loading": "the model ran out of memory while it was loaded, before any batch: use more GPUs with ZeRO-3 or FSDP, "
    "load it in bf16 or quantized, and see with `nvidia-smi` what else is on the GPU",
}
_NEVER_FINITE_HELP = (
    "from the first step on: batches without any label (a chat template without an assistant mask, answers that are "
    "cut off), broken weights, or float16 where the model needs bfloat16"
)
_CORRUPT = Observation(
    "corrupt",
    unwanted=True,
    help="the optimizer did not use the gradients of the batch: nothing trained since then can be used. DeepSpeed "
    "0.18.5 to 0.18.9 does this under ZeRO 1 and 2 with `overlap_comm: true`: install a later release or set "
    "`overlap_comm: false`; docs/gradients.md has other causes",
)


def observe_loss(evidence: Evidence, _expected: str | None) -> Observation:
    log, lines = evidence.log, evidence.lines
    steps = list(evidence.rank_steps)
    detail: dict[str, Any] = {"logged": len(lines), "counted": len(steps)}
    bad = _bad_steps(evidence)
    before = [int(row["step"]) for row in evidence.earlier if row.get("finite") is False]
    if before and not bad:
        reason = (
            f"step {before[0]} was not finite in an earlier attempt, and this one continued from the weights after it"
        )
        detail = {"first_step": before[0], "nonfinite": len(before), "rank": None}
        return Observation("nonfinite", detail=detail, reason=reason, help=_NOT_FINITE_HELP)
    # as the probe printed them, in a log that came without its records
    for line in () if evidence.records else probe_lines(evidence):
        if found := _NOT_FINITE.match(line.fields["message"]):
            bad.append(_BadStep(int(found["step"] or 0), int(found["rank"]), line))
    if bad:
        # a rank that is known tells more than a logged mean of the same step
        first = min(bad, key=lambda one: (one.step, one.rank is None, one.rank or 0))
        numbered = steps or not log or log.numbered
        detail |= {"first_step": first.step if numbered else None, "rank": first.rank, "nonfinite": len(bad)}
        reason = _describe(evidence, first, detail)
        # before training is announced, such a line may be a word of the data that upstream shows
        begun = evidence.records or not log or not log.blocks or evidence.signals("total_steps", "progress")
        return Observation(
            "nonfinite",
            proved=bool(begun),
            cites=[one.cite for one in bad],
            detail=detail,
            reason=reason,
            help=_NEVER_FINITE_HELP if _never_finite(evidence) else _NOT_FINITE_HELP,
        )
    unproved = Observation("finite", proved=False, detail=detail)
    # in a log of open-instruct's it is a word of the training data
    means = log.all("mean_nonfinite") if log is not None and not log.blocks else ()
    if means := tuple({s.fields["what"]: s for s in reversed(means)}.values())[::-1]:  # the first word for each
        # a sum over all steps: one of them made it so, and nothing tells which
        named = ", ".join(f"{s.fields['what']} is {s.fields['value']}" for s in means)
        unproved = replace(unproved, cites=means, reason=f"the log says that {named}")
        if any(s.fields["what"] == "train_loss" for s in means):
            detail |= {"first_step": None, "rank": None}
            help = (
                "`train_loss` is the mean over all steps, so the loss of a step was not finite: `logging_steps: 1` "
                "shows which, `logging_nan_inf_filter: false` shows it as it was"
            )
            return replace(unproved, state="nonfinite", proved=True, help=help)
        if losses(evidence):
            return replace(
                unproved, help="a row of the evaluation without any label makes its mean nan, as do broken weights"
            )
    if not losses(evidence):
        reason = "no loss was recorded" + (": training never reached step 1" if evidence.last_step is None else "")
        help = "`logging_steps: 1` logs every step"
        return Observation("none_logged", proved=False, detail=detail, reason=reason, help=help)
    if (doubt := _loss_doubt(evidence)) is not None:
        return replace(unproved, reason=doubt[0], cites=doubt[1])
    cites = _first_and_last(evidence)
    every = [step.loss for step in steps]
    # HF Trainer rounds a loss, and prints no 0 for the gradient of a small one
    every = every or [line.loss or ("epoch" in line.extra and line.extra.get("grad_norm", 0.0)) for line in lines]
    if not every or any(loss is None or loss for loss in every):
        return Observation("finite", cites=cites, detail=detail)
    reason = "the loss was exactly 0 in every step"
    help = "no token has a label then: check the chat template, and the maximal length, which may cut off every answer"
    return Observation("zero", cites=cites, detail=detail, reason=reason, help=help)


def _first_and_last(evidence: Evidence) -> Sequence[Citable]:
    """Of the log, or where nothing is logged of a record."""
    recorded = (record.steps for record in evidence.records)
    shown: Sequence[Citable] = evidence.lines or next(filter(None, recorded), ())
    return (shown[0], shown[-1]) if shown else ()


class _BadStep(NamedTuple):
    step: int
    rank: int | None
    cite: Citable


def _bad_steps(evidence: Evidence) -> list[_BadStep]:
    """The steps that were not finite: as logged, and as each rank saw them."""
    bad = []
    for line in evidence.lines:
        # HF Trainer prints 0 for a loss that is NaN; what stands beside it tells
        hidden = line.loss == 0 and not all(map(math.isfinite, line.extra.values()))
        if hidden or not math.isfinite(line.loss):
            bad.append(_BadStep(line.step, None, line))
    return bad + [_BadStep(one.step, one.rank, one) for one in evidence.rank_steps if not one.finite]


def _never_finite(evidence: Evidence) -> bool:
    """Whether every step is bad, from the first one on, and there are several."""
    lines = evidence.lines
    logged = {bad.step for bad in _bad_steps(evidence)}
    steps = {step.step for step in evidence.rank_steps} | {line.step for line in lines}
    return len(steps) > 1 and min(steps) <= 1 and steps == logged


def _describe(evidence: Evidence, bad: _BadStep, detail: dict[str, Any]) -> str:
    """What it was that was not finite, and the last values before, as that rank saw them; also into the detail."""
    step, rank, found = detail["first_step"], bad.rank, dict[str, Any]()
    for event in evidence.events("nonfinite"):
        if event.rank == rank and event.number("step") == bad.step:
            found = {"what": event.text("what"), "value": event.text("value")}
    for one in evidence.rank_steps:
        if one.rank == rank and one.step < bad.step and one.finite:
            found["last_finite"] = {"step": one.step, "loss": one.loss, "grad_norm": one.grad_norm}
    detail |= found
    what = found.get("what") or ("loss" if rank is None else "loss or gradient")
    reason = f"{what} is {found.get('value') or 'not finite'}"
    if step is not None:
        reason += f" at step {step}" + ("" if rank is None else f", rank {rank}")
    if detail["nonfinite"] != 1:
        reason += f", the first of {detail['nonfinite']}"
    if (last := found.get("last_finite")) and last["loss"] is not None:
        reason += f"; last finite: {last['loss']:.4g} at step {last['step']}"
    return reason


def _loss_doubt(evidence: Evidence) -> tuple[str, Sequence[Citable]] | None:
    """Why losses that all are finite are no proof, and the lines that say so."""
    lines = evidence.lines
    if lines and (not evidence.records or _unseen(evidence)):
        for line in lines:
            if line.loss == 0 and "epoch" in line.extra and "grad_norm" not in line.extra:
                return "a loss of 0 may have been NaN, and no gradient norm is logged", (line,)
        norm = lines[-1].extra.get("grad_norm", 0.0)
        if not math.isfinite(norm):
            # what such a step left shows in the loss after it, and there is none
            return f"the last gradient norm is {norm}", lines[-1:]
    if unseen := _unseen(evidence, lines[-1].step if lines else 0):
        named = ", ".join(map(str, unseen[:3])) + (", …" if unseen[3:] else "")
        return f"no loss of step {named} was seen on every rank, and none is logged", _first_and_last(evidence)
    return None


def _unseen(evidence: Evidence, after: int = 0) -> list[int]:
    """The first steps of a run that came to its end which some rank's record does not tell of. Of any other run the
    last ones may still have been on their way."""
    probe, last = evidence.probe, evidence.last_step
    if probe is None or last is None or ending(evidence).state != "completed":
        return []
    begun = max((event.number("step") or 0 for event in evidence.events("resumed")), default=0)
    first = min((r.steps[0].step for r in evidence.records if r.steps), default=last + 1)
    recorded = [{step.step for step in record.steps} for record in evidence.records]
    whole = set() if probe.missing else set.intersection(*recorded)
    steps = range(max(min(first, int(begun) + 1), after + 1), last + 1)
    return list(itertools.islice((step for step in steps if step not in whole), 4))


def observe_gradients(evidence: Evidence, _expected: str | None) -> Observation:
    reports = evidence.last_events("gradients")
    if corrupt := [event for event in reports if event.text("state") == "corrupt"]:
        event = min(corrupt, key=lambda event: event.number("first_corrupt") or 0)
        detail = {"first_step": event.fields.get("first_corrupt"), "rank": event.rank}
        detail |= {key: event.fields.get(key) for key in (*_COMPARED, *_DIFFERENCE)}
        reason = (
            f"step {detail['first_step']}, rank {event.rank}: for {detail['parameter']} the optimizer used a gradient "
            f"of norm {detail['used_norm']}, that of the batch is {detail['true_norm']}; {detail['broken']} of "
            f"{detail['parameters']} parameters compared there were wrong"
        )
        return replace(_CORRUPT, cites=corrupt, detail=detail, reason=reason)
    if lines := probe_lines(evidence, "gradients are corrupt"):
        return replace(_CORRUPT, cites=lines)
    true = [event for event in reports if event.text("state") == "true"]
    noise = _noise(evidence)
    detail = {} if noise is None else {"norms": noise[0]}
    if true:
        # the comparison that is off most
        worst = max(true, key=lambda event: event.number("largest_error") or 0.0)
        missing = evidence.missing_ranks({event.rank for event in true})
        detail |= {key: worst.fields.get(key) for key in _COMPARED} | missing
        return Observation("true", proved=not missing, cites=true, detail=detail)
    if noise is None:
        return replace(UNKNOWN, cites=reports, reason=reason_of(reports))
    help = (
        "train a few steps with the probe, which compares the optimizer's gradients with those of autograd; "
        "`expect: {gradients: any}` accepts them as they are"
    )
    cites = (*reports, noise[1])
    return replace(UNKNOWN, unwanted=True, cites=cites, detail=detail, reason=noise[0], help=help)


def _noise(evidence: Evidence) -> tuple[str, Citable] | None:
    """Gradient norms that no batch gives, in words, with the place of the largest."""
    norms: list[tuple[float, int, Citable]] = []
    for record in evidence.records:
        norms = norms or [(step.grad_norm, step.step, step) for step in record.steps if step.grad_norm is not None]
    logged = ((line.extra.get("grad_norm", math.nan), line.step, line) for line in evidence.lines)
    norms = norms or [one for one in logged if math.isfinite(one[0])]
    if len(norms) < NORMS:
        return None
    largest, step, cite = max(norms, key=lambda one: one[0])
    usual = statistics.median(norm for norm, *_ in norms)
    series = [loss for loss in whole_losses(evidence) if math.isfinite(loss)]
    if len(series) < TREND_LOSSES:
        falls = len(series) > 1 and series[-1] < series[0] * (1 - TREND_CHANGE)
    else:
        change, z = trend(series)
        falls = change <= -TREND_CHANGE and z <= -TREND_Z
    if largest >= WILD_NORM and not falls:
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


def observe_trend(evidence: Evidence, expected: str | None) -> Observation:
    # as every rank saw it in every one of two steps or more, or the log
    steps = [(one.step, one.grad_norm, one.learning_rate) for one in evidence.rank_steps]
    lines = evidence.lines
    # at the end of a schedule the learning rate may well be 0: the first line has to be there
    if not steps and len(lines) > 1 and lines[0].step <= max(1, lines[1].step - lines[0].step):
        steps = [(line.step, line.extra.get("grad_norm"), line.learning_rate) for line in lines]
    several = len({step for step, *_ in steps}) > 1
    still = [
        words for place, words in ((1, "gradient norm"), (2, "learning rate")) if all(x[place] == 0 for x in steps)
    ]
    if several and still:
        cites = _first_and_last(replace(evidence, log=None)) or _first_and_last(evidence)
        reason = f"the {still[0]} was 0 in every step: nothing was learned"
        help = "check the learning rate, its schedule, and what is frozen; `expect: {trend: any}` accepts it"
        return Observation("still", unwanted=True, cites=cites, reason=reason, help=help)
    # a run that was resumed is one run
    finite = [loss for loss in whole_losses(evidence) if math.isfinite(loss)]
    detail: dict[str, object] = {"losses": len(finite)}
    if len(finite) < TREND_LOSSES:
        reason = f"{len(finite)} losses were recorded, {TREND_LOSSES} are needed"
        return Observation("too_short", proved=False, detail=detail, reason=reason)
    change, z = trend(finite)
    detail |= {"change": round(change, 4), "z": round(z, 2)}
    sure = abs(z) >= TREND_Z and abs(change) >= TREND_CHANGE
    reason = f"from the first step to the last the loss changes by {round(change, 4):+.1%} (z {z:.1f})"
    state = "flat" if not sure else "falling" if change < 0 else "rising"
    advice = "a longer run, or another learning rate; `expect: {trend: any}` asks for none"
    observed = Observation(state, cites=_first_and_last(evidence), detail=detail, reason=reason)
    return replace(observed, help=advice) if expected == "falling" else observed


def trend(series: Sequence[float]) -> tuple[float, float]:
    """Relative change from first to last by the Theil-Sen slope, and Mann-Kendall's z. Both go by pairs of losses, so
    that a few spikes move neither. Needs two losses or more."""
    size = math.ceil(len(series) / TREND_BINS)
    bins = [statistics.median(series[i : i + size]) for i in range(0, len(series), size)]
    n = len(bins)
    pairs = [(j - i, bins[j] - bins[i]) for i in range(n) for j in range(i + 1, n)]
    slope = statistics.median(rise / run for run, rise in pairs)
    score = sum((rise > 0) - (rise < 0) for _, rise in pairs)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    level = statistics.median(map(abs, bins)) or 1.0
    return slope * (n - 1) / level, (score - math.copysign(min(1, abs(score)), score)) / deviation


def observe_memory(evidence: Evidence, _expected: str | None) -> Observation:
    end = ending(evidence)
    detail: dict[str, object] = {"peak_allocated_gib": peak_allocated_gib(evidence)}
    if phases := memory_phases(evidence):
        detail["phases"] = phases
    gpu, host = fatal(evidence, "oom"), fatal(evidence, "oom_host")
    if end.state == "completed":  # what is only printed behind a good end is something else's
        raised = {s.line for s in evidence.signals("exception")}
        gpu, host = (tuple(s for s in lines if s.line in raised) for lines in (gpu, host))
    if host and not gpu:
        return Observation("oom", cites=host, detail=detail, help=HELP["oom_host"])
    error = " ".join((end.error or {}).values())
    if not gpu and not re.search(r"OutOfMemory|out of memory", error):
        return Observation("ok", proved=bool(evidence.log or evidence.probe), detail=detail)
    keys = ("per_device_train_batch_size", "gradient_checkpointing", "packing", "max_seq_length")
    arguments = {key: evidence.arguments[key] for key in keys if key in evidence.arguments}
    detail |= {"asked": arguments, **(gpu[0].fields if gpu else {})}
    during = phase(evidence)
    if during is not None:
        detail["during"] = during
    return Observation("oom", cites=gpu, detail=detail, help=_OOM_HELPS.get(during or "", _OOM_HELP))


def observe_finish(evidence: Evidence, _expected: str | None) -> Observation:
    end, saved, ended = ending(evidence), evidence.final_save, evidence.exit
    detail: dict[str, object] = {"last_step": evidence.last_step, "total_steps": evidence.total_steps}
    detail["saved"] = saved is not None
    if evidence.left_out_save:
        detail["left_out"] = "the final save: of a trial nobody wants the model"
    causes = {"reason": end.reason, "signal": end.signal, "error": end.error}
    detail |= {key: cause for key, cause in causes.items() if cause is not None}
    if end.state in ("crashed", "killed", "stopped") and (during := phase(evidence)) is not None:
        detail["during"] = during
    help = None if end.reason is None else HELP[end.reason]
    if ended is not None:
        detail["returncode"] = ended.returncode
        if ended.returncode and not any(causes.values()):
            help = f"exit code {ended.returncode}, and no error is known: the last lines of the console log may tell"
    if end.saved is not None:
        detail["checkpoint"] = end.saved.text("path")
    if ended is not None and ended.grace_s is not None:
        detail["grace_s"] = ended.grace_s
    if (hang := evidence.last_hang) is not None and end.state != "completed":
        detail["hang"] = hang.text("message")
    cites = [end.saved, evidence.stopped, *end.lines, *evidence.lines[-1:], saved, ended]
    shown = [cite for cite in cites if cite is not None]
    return Observation(end.state, proved=end.proved, cites=shown, detail=detail, help=help)


def observe_weights(evidence: Evidence, _expected: str | None) -> Observation:
    last, share = evidence.last_events("weights"), moved_share(evidence)
    if share is None:
        return replace(UNKNOWN, cites=last, reason=reason_of(last))
    share = max(share, evidence.moved_before)
    missing = evidence.missing_ranks({event.rank for event in last})
    keys = ("sampled", "tensors", "steps", "largest")
    detail: dict[str, object] = {key: last[0].fields.get(key) for key in keys}
    detail |= {"share": float(f"{share:.4g}"), **missing}
    if share >= MOVED:
        return Observation("moved", proved=not missing, cites=last, detail=detail)
    if max(event.number("steps") or 0 for event in last) < 2:
        # the first step of a warm-up may have a learning rate of 0
        return replace(UNKNOWN, cites=last, detail=detail)
    still = share < STILL
    reason = f"{f'{share:.2%}' if share else 'none'} of a sample of the trained weights moved"
    few = Observation("few", proved=False, unwanted=True, cites=last, detail=detail, reason=reason, help=_MOVED_HELP)
    return replace(few, state="still", proved=True) if still else few


def observe_model(evidence: Evidence, _expected: str | None) -> Observation:
    if evidence.model is None:
        return UNKNOWN
    detail = dict(evidence.model)
    state, cites = str(detail.pop("state", "saved")), evidence.events("saved_model")[-1:]
    for event in evidence.events("export")[-1:]:
        # what was written for transformers, compared with the checkpoint
        detail["export"] = {name: event.fields.get(name) for name in ("state", "error", "checkpoint")}
        cites = (*cites, event)
    if state not in ("missing", "changed"):
        return Observation(state, proved=state != "unknown", cites=cites, detail=detail)
    help = "its files cannot be trusted: save it again from a checkpoint, or train again"
    return Observation(state, unwanted=True, cites=cites, detail=detail, help=help)


def observe_inputs(evidence: Evidence, _expected: str | None) -> Observation:
    if evidence.inputs is None:
        return UNKNOWN
    if not evidence.inputs:
        return Observation("same")
    # an input that was deleted may well have been read as it was
    change = min(evidence.inputs, key=lambda one: one.get("after") is None)
    gone = change.get("after") is None
    before, after = (str(change.get(key) or "none")[:12] for key in ("before", "after"))
    differs = f"was not what it was at the start: sha256 {before}, then {after}"
    return Observation(
        "gone" if gone else "changed",
        proved=not gone,
        unwanted=True,
        detail={key: change.get(key) for key in ("role", "name", "file", "before", "after")},
        reason=f"{change.get('file')} {'was gone at the end' if gone else differs}",
        help="train again on files that nothing writes to meanwhile",
    )


def observe_resume(evidence: Evidence, _expected: str | None) -> Observation:
    """Whether the first losses after a resume go on where those before it were."""
    before = earlier(evidence, "loss")[-_LOSSES_BEFORE:]
    after = [loss for loss in losses(evidence) if math.isfinite(loss)][:_LOSSES_AFTER]
    if len(before) < _LEAST or not after:
        return UNKNOWN
    level, now = statistics.median(before), statistics.median(after)
    spread = 1.4826 * statistics.median(abs(loss - level) for loss in before)
    limit = max(level + _SPREADS * max(spread, _NARROWEST * abs(level)), *before)
    return Observation(
        "jump" if now > limit else "continuous",
        proved=now <= limit,
        unwanted=now > limit,
        cites=evidence.events("resumed"),
        detail={"before": round(level, 4), "after": round(now, 4), "limit": round(limit, 4)},
        reason=f"the loss was {level:.4g} before the resume and is {now:.4g} after it, more than {limit:.4g}",
        help="the checkpoint may not hold what was trained: take an older one, or start over with --fresh",
    )
