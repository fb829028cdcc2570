"""What came of a run: losses, gradients, memory, its end, weights, inputs, resumes.

The functions are like those of `points`.
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import combinations, islice
from typing import NamedTuple

from launcher.lazy_dataclass import dataclass
from launcher.stage.options import TREND_LOSSES
from launcher.verdict.ending import HELP, Ending, find_ending, find_final_signals, find_phase
from launcher.verdict.evidence import Evidence, ProbeStep, list_ranks, select_state
from launcher.verdict.logs.scan import Signal, StepLine
from launcher.verdict.metrics import (
    compute_moved_share,
    find_memory_phases,
    find_peak_allocated_gib,
    list_earlier_values,
    list_losses,
    list_losses_of_run,
)
from launcher.verdict.points import (
    UNKNOWN,
    Citable,
    Observation,
    find_first_reason,
    find_probe_messages,
)

TREND_BINS = 64
TREND_CHANGE = 0.01
"""Of the loss, from the first step to the last."""
TREND_Z = 2.33
"""One-sided 1 %."""
NORMS = 4
"""Gradient norms that are needed to tell what is usual."""
WILD_NORM = 1e4
"""A norm that is no batch's if the loss does not fall."""
JUMP = 10.0
MOVED = 0.5
"""The share of the weights that must have moved. With copies in float32, 94 % and more moved in
each run of docs/evidence/h200x4.md; in bfloat16 alone at most 18 % at 5e-6, about 2 % at 1e-6.
"""
STILL = 0.001
_LOSSES_BEFORE = 16
_LOSSES_AFTER = 4
_LEAST_BEFORE = 4
"""Losses that are compared around a resume."""
_SPREADS = 5.0
_LEAST_SPREAD = 0.02
"""Of the loss."""
_NAMED_STEPS = 3
_COMPARED = ("engine", "checks", "last_step", "parameters", "elements", "largest_error", "allowed")
_DIFFERENCE = ("parameter", "true_norm", "used_norm", "error", "broken", "corrupt_checks")
_MEMORY_ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_checkpointing",
    "packing",
    "max_seq_length",
)
# What the probe says of a broken contract, in a log that came without its records.
_NOT_FINITE = re.compile(
    r"(?:loss|gradient) is -?(?:nan|inf)\w* "
    r"\((?:step (?P<step>\d+)|[^,]*), rank (?P<rank>\d+)\)"
)
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory")

_MOVED_HELP = (
    "raise the learning rate, or train fp32 weights, of which `deepspeed: zero2` keeps copies: "
    "bfloat16 rounds away what is below 0.2 to 0.4 % of a weight; see also what is frozen; "
    "`expect: {weights: any}` accepts it"
)
_NOT_FINITE_HELP = (
    "lower the learning rate or lengthen the warm-up; check the rows of that step; resume from a "
    "checkpoint before it"
)
_NEVER_FINITE_HELP = (
    "from the first step on: batches without any label (a chat template without an assistant mask, "
    "answers that are cut off), broken weights, or float16 where the model needs bfloat16"
)
_TRAIN_LOSS_HELP = (
    "`train_loss` is the mean over all steps, so the loss of a step was not finite: "
    "`logging_steps: 1` shows which, `logging_nan_inf_filter: false` shows it as it was"
)
_OOM_HELP = (
    "lower the micro-batch and keep the global batch (`batch: {per_device: N}`), switch activation "
    "checkpointing on (SFT `gradient_checkpointing: true`, DPO `activation_memory_budget` < 1), or "
    "lower `max_seq_length`; with packing a micro-batch holds every token of its rows at once, so "
    "fewer rows (or `packing: false`) shrink it"
)
_OOM_HELPS: Mapping[str, str] = {
    "evaluation": "it was the evaluation that ran out, not training: lower "
    "`per_device_eval_batch_size`, set `prediction_loss_only: true` or `eval_accumulation_steps` "
    "so that logits are not gathered on the GPU, or evaluate fewer or shorter rows",
    "saving": "it was a save that ran out, where the whole weights are gathered: save sharded, or "
    "gather on the host (`stage3_gather_16bit_weights_on_model_save: false`), and keep some GiB "
    "free for it",
    "reference": "it was the reference pass that ran out: lower `precompute_ref_batch_size`, or "
    "the rows' length",
    "loading": "the model ran out of memory while it was loaded, before any batch: use more GPUs "
    "with ZeRO-3 or FSDP, load it quantized or, under DeepSpeed, in bf16, and see with "
    "`nvidia-smi` what else is on the GPU",
}
"""By phase: the size of the micro-batch has no part in these."""
_UNCHECKED_HELP = (
    "train a few steps with the probe, which compares the optimizer's gradients with those of "
    "autograd; `expect: {gradients: any}` accepts them as they are"
)
_CORRUPT = Observation(
    "corrupt",
    unwanted=True,
    help="the optimizer did not use the gradients of the batch: nothing trained since then can be "
    "used. DeepSpeed 0.18.5 to 0.18.9 does this under ZeRO 1 and 2 with `overlap_comm: true`: "
    "install a later release or set `overlap_comm: false`; docs/gradients.md has other causes",
)


def observe_loss(evidence: Evidence, _expected: str | None) -> Observation:
    """The gravest that is known of the losses; `finite` is proved only without a doubt."""
    detail: dict[str, object] = {
        "logged": len(evidence.lines),
        "counted": len(list(evidence.rank_steps)),
    }
    return (
        _observe_nonfinite_loss(evidence, detail)
        or _observe_nonfinite_mean(evidence, detail)
        or _observe_no_loss(evidence, detail)
        or _observe_doubtful_loss(evidence, detail)
        or _observe_finite_loss(evidence, detail)
    )


def _observe_nonfinite_loss(evidence: Evidence, detail: Mapping[str, object]) -> Observation | None:
    bad = _find_bad_steps(evidence)
    if not bad:
        observation = _observe_nonfinite_before(evidence)
        if observation is not None:
            return observation
    if not evidence.records:
        bad += _find_bad_steps_in_messages(evidence)
    if not bad:
        return None
    # a step of a rank says more than a logged mean of the same step
    first = min(bad, key=lambda step: (step.number, step.rank is None, step.rank or 0))
    number: int | None = first.number
    if evidence.log is not None and not evidence.log.numbered and not any(evidence.rank_steps):
        number = None
    help = _NOT_FINITE_HELP
    if _is_never_finite(evidence):
        help = _NEVER_FINITE_HELP
    description = _describe_bad_step(evidence, first)
    reason = description.sentence(number, first.rank, count=len(bad))
    return Observation(
        "nonfinite",
        proved=_has_begun(evidence),
        cites=[step.cite for step in bad],
        detail={
            **detail,
            "first_step": number,
            "rank": first.rank,
            "nonfinite": len(bad),
            **description.fields,
        },
        reason=reason,
        help=help,
    )


def _observe_nonfinite_before(evidence: Evidence) -> Observation | None:
    """That a step of an earlier attempt was not finite."""
    bad = [row for row in evidence.earlier if row.get("finite") is False]
    if not bad:
        return None
    first = int(bad[0]["step"])
    return Observation(
        "nonfinite",
        detail={"first_step": first, "nonfinite": len(bad), "rank": None},
        reason=f"step {first} was not finite in an earlier attempt, and this one continued "
        "from the weights after it",
        help=_NOT_FINITE_HELP,
    )


def _has_begun(evidence: Evidence) -> bool:
    """Whether training had begun: before that, such a line may be a row of the data."""
    log = evidence.log
    if evidence.records or log is None or not log.blocks:
        return True
    return bool(log.all("total_steps", "progress"))


def _observe_nonfinite_mean(evidence: Evidence, detail: Mapping[str, object]) -> Observation | None:
    """What a mean that HF Trainer logs says of the losses: one of all steps made it so."""
    log = evidence.log
    # in a log of open-instruct it is a word of the training data
    if log is None or log.blocks:
        return None
    means: dict[str, Signal] = {}
    for signal in log.all("mean_nonfinite"):
        name = signal.fields["what"]
        # the first word of each, in the order of the last ones
        means[name] = means.pop(name, signal)
    if not means:
        return None
    words = []
    for name, signal in means.items():
        words.append(f"{name} is {signal.fields['value']}")
    observation = Observation(
        "finite",
        proved=False,
        cites=tuple(means.values()),
        detail=detail,
        reason=f"the log says that {', '.join(words)}",
    )
    if "train_loss" in means:
        return replace(
            observation,
            state="nonfinite",
            proved=True,
            detail={**detail, "first_step": None, "rank": None},
            help=_TRAIN_LOSS_HELP,
        )
    if not list_losses(evidence):
        return None
    help = "a row of the evaluation without any label makes its mean nan, as do broken weights"
    return replace(observation, help=help)


def _observe_no_loss(evidence: Evidence, detail: Mapping[str, object]) -> Observation | None:
    if list_losses(evidence):
        return None
    reason = "no loss was recorded"
    if evidence.last_step is None:
        reason += ": training never reached step 1"
    help = "`logging_steps: 1` logs every step"
    return Observation("none_logged", proved=False, detail=detail, reason=reason, help=help)


def _observe_doubtful_loss(evidence: Evidence, detail: Mapping[str, object]) -> Observation | None:
    """Why losses that all are finite are no proof, with the lines that say so."""
    lines = evidence.lines
    finite = Observation("finite", proved=False, detail=detail)
    last_logged = 0
    if lines:
        last_logged = lines[-1].step
        if not evidence.records or _find_unseen_steps(evidence):
            doubt = _find_doubt_in_lines(lines)
            if doubt is not None:
                return replace(finite, reason=doubt.text, cites=(doubt.cite,))
    unseen = _find_unseen_steps(evidence, last_logged)
    if not unseen:
        return None
    steps = ", ".join(map(str, unseen[:_NAMED_STEPS]))
    if len(unseen) > _NAMED_STEPS:
        steps += ", …"
    reason = f"no loss of step {steps} was seen on every rank, and none is logged"
    return replace(finite, reason=reason, cites=_cite_first_and_last(evidence))


class _Doubt(NamedTuple):
    """Why numbers are no proof, in words, with the place that shows it best."""

    text: str
    cite: Citable


def _find_doubt_in_lines(lines: Sequence[StepLine]) -> _Doubt | None:
    """What logged losses may hide, though all of them are finite."""
    for line in lines:
        if line.loss == 0 and "epoch" in line.extra and "grad_norm" not in line.extra:
            return _Doubt("a loss of 0 may have been NaN, and no gradient norm is logged", line)
    norm = lines[-1].extra.get("grad_norm", 0.0)
    if math.isfinite(norm):
        return None
    # the loss after that step would show what it did, and there is none
    return _Doubt(f"the last gradient norm is {norm}", lines[-1])


def _observe_finite_loss(evidence: Evidence, detail: Mapping[str, object]) -> Observation:
    cites = _cite_first_and_last(evidence)
    finite = Observation("finite", cites=cites, detail=detail)
    if not _is_zero(evidence):
        return finite
    return replace(
        finite,
        state="zero",
        reason="the loss was exactly 0 in every step",
        help="no token has a label then: check the chat template, and the maximal length, which "
        "may cut off every answer",
    )


def _is_zero(evidence: Evidence) -> bool:
    """Whether the loss was 0 in every step, as the probe saw it, else as logged."""
    losses_seen = {step.loss for step in evidence.rank_steps}
    if losses_seen:
        return losses_seen == {0}
    # HF Trainer rounds a loss, and prints no 0 for the gradient of a small one
    for line in evidence.lines:
        is_rounded = "epoch" in line.extra and line.extra.get("grad_norm", 0.0) != 0
        if line.loss or is_rounded:
            return False
    return bool(evidence.lines)


def _cite_first_and_last(evidence: Evidence) -> Sequence[Citable]:
    """The first and the last step of the log, or without a log of a record."""
    shown: Sequence[Citable] = evidence.lines
    for record in evidence.records:
        if not shown:
            shown = record.steps
    if not shown:
        return ()
    return (shown[0], shown[-1])


class _BadStep(NamedTuple):
    """A step that was not finite; `rank` is None for a logged mean."""

    number: int
    rank: int | None
    cite: Citable


def _find_bad_steps(evidence: Evidence) -> list[_BadStep]:
    """The steps that were not finite: as logged, and as each rank saw them."""
    bad = []
    for line in evidence.lines:
        # HF Trainer prints 0 for a loss that is NaN; what stands beside it tells
        is_hidden = line.loss == 0 and not all(map(math.isfinite, line.extra.values()))
        if is_hidden or not math.isfinite(line.loss):
            bad.append(_BadStep(line.step, None, line))
    for step in evidence.rank_steps:
        if not step.finite:
            bad.append(_BadStep(step.step, step.rank, step))
    return bad


def _find_bad_steps_in_messages(evidence: Evidence) -> list[_BadStep]:
    """The same as the probe printed them, in a log that came without its records."""
    bad = []
    for line in find_probe_messages(evidence):
        match = _NOT_FINITE.match(line.fields["message"])
        if match is not None:
            bad.append(_BadStep(int(match["step"] or 0), int(match["rank"]), line))
    return bad


def _is_never_finite(evidence: Evidence) -> bool:
    """Whether every step is bad, from the first one on, and there are several."""
    bad = {step.number for step in _find_bad_steps(evidence)}
    steps = {step.step for step in evidence.rank_steps}
    steps |= {line.step for line in evidence.lines}
    return len(steps) > 1 and min(steps) <= 1 and steps == bad


@dataclass(frozen=True, slots=True)
class _Description:
    """What was not finite, and the last step before that was; `fields` are details of the point."""

    what: str
    value: str
    last: ProbeStep | None
    fields: dict[str, object] = field(default_factory=dict)

    def sentence(self, step: int | None, rank: int | None, *, count: int) -> str:
        text = f"{self.what} is {self.value}"
        if step is not None:
            text += f" at step {step}"
            if rank is not None:
                text += f", rank {rank}"
        if count != 1:
            text += f", the first of {count}"
        if self.last is not None and self.last.loss is not None:
            text += f"; last finite: {self.last.loss:.4g} at step {self.last.step}"
        return text


def _describe_bad_step(evidence: Evidence, bad: _BadStep) -> _Description:
    fields: dict[str, object] = {}
    what = None
    value = None
    for event in evidence.events("nonfinite"):
        if event.rank == bad.rank and event.number("step") == bad.number:
            what = event.text("what")
            value = event.text("value")
            fields = {"what": what, "value": value}
    last = None
    for step in evidence.rank_steps:
        if step.rank == bad.rank and step.step < bad.number and step.finite:
            last = step
    if last is not None:
        fields["last_finite"] = {"step": last.step, "loss": last.loss, "grad_norm": last.grad_norm}
    if not what:
        what = "loss"
        if bad.rank is not None:
            what = "loss or gradient"
    return _Description(what, value or "not finite", last, fields)


def _find_unseen_steps(evidence: Evidence, after: int = 0) -> list[int]:
    """The first steps of a completed run that some rank's record does not have.

    The last steps of any other run may still have been on their way.
    """
    probe = evidence.probe
    last = evidence.last_step
    if probe is None or last is None or find_ending(evidence).state != "completed":
        return []
    start = last + 1
    recorded = []
    for record in evidence.records:
        recorded.append({step.step for step in record.steps})
        if record.steps:
            start = min(start, record.steps[0].step)
    complete = set.intersection(*recorded)
    if probe.missing:
        complete = set()
    resumed = 0
    for event in evidence.events("resumed"):
        resumed = max(resumed, int(event.number("step") or 0))
    start = min(start, resumed + 1)
    start = max(start, after + 1)
    unseen = (step for step in range(start, last + 1) if step not in complete)
    return list(islice(unseen, _NAMED_STEPS + 1))


def observe_gradients(evidence: Evidence, _expected: str | None) -> Observation:
    """Whether the optimizer used the gradients of the batch, as compared by the probe."""
    corrupt = _observe_corrupt_gradients(evidence)
    if corrupt is not None:
        return corrupt
    reports = evidence.last_events("gradients")
    compared = select_state(reports, "true")
    noise = _find_noise(evidence)
    detail: dict[str, object] = {}
    if noise is not None:
        detail["norms"] = noise.text
    if compared:
        worst = max(compared, key=lambda event: event.number("largest_error") or 0.0)
        missing = evidence.missing_ranks(list_ranks(compared))
        detail |= {key: worst.fields.get(key) for key in _COMPARED}
        detail |= missing
        return Observation("true", proved=not missing, cites=compared, detail=detail)
    if noise is None:
        return replace(UNKNOWN, cites=reports, reason=find_first_reason(reports))
    return replace(
        UNKNOWN,
        unwanted=True,
        cites=(*reports, noise.cite),
        detail=detail,
        reason=noise.text,
        help=_UNCHECKED_HELP,
    )


def _observe_corrupt_gradients(evidence: Evidence) -> Observation | None:
    reports = evidence.last_events("gradients")
    corrupt = select_state(reports, "corrupt")
    if not corrupt:
        messages = find_probe_messages(evidence, "gradients are corrupt")
        if not messages:
            return None
        return replace(_CORRUPT, cites=messages)
    first = min(corrupt, key=lambda event: event.number("first_corrupt") or 0)
    fields = first.fields
    detail = {"first_step": fields.get("first_corrupt"), "rank": first.rank}
    detail |= {key: fields.get(key) for key in (*_COMPARED, *_DIFFERENCE)}
    reason = (
        f"step {detail['first_step']}, rank {first.rank}: for {detail['parameter']} the optimizer "
        f"used a gradient of norm {detail['used_norm']}, that of the batch is "
        f"{detail['true_norm']}; {detail['broken']} of {detail['parameters']} parameters compared "
        "there were wrong"
    )
    return replace(_CORRUPT, cites=corrupt, detail=detail, reason=reason)


class _Norm(NamedTuple):
    value: float
    step: int
    cite: Citable


def _find_noise(evidence: Evidence) -> _Doubt | None:
    """Gradient norms that no batch gives, with the place of the largest."""
    norms = _collect_grad_norms(evidence)
    if len(norms) < NORMS:
        return None
    largest = max(norms, key=lambda norm: norm.value)
    if largest.value >= WILD_NORM and not _is_loss_falling(evidence):
        text = f"gradient norms up to {largest.value:.3g} (step {largest.step}), and the loss "
        return _Doubt(f"{text}does not fall", largest.cite)
    usual = statistics.median(norm.value for norm in norms)
    jumps = []
    # the first steps of a run may well be far from the others
    for number in range(2, len(norms) - 1):
        highest = max(norms[number - 1].value, norms[number + 1].value, usual)
        if norms[number].value > JUMP * highest > 0:
            jumps.append(norms[number])
    if not jumps:
        return None
    jump = max(jumps, key=lambda norm: norm.value)
    text = f"the gradient norm jumps to {jump.value:.3g} at step {jump.step}; {usual:.3g} is usual"
    return _Doubt(text, jump.cite)


def _collect_grad_norms(evidence: Evidence) -> list[_Norm]:
    """The norms that the first rank with any recorded, else those in the log."""
    norms: list[_Norm] = []
    for record in evidence.records:
        for step in record.steps:
            if step.grad_norm is not None:
                norms.append(_Norm(step.grad_norm, step.step, step))
        if norms:
            return norms
    for line in evidence.lines:
        value = line.extra.get("grad_norm", math.nan)
        if math.isfinite(value):
            norms.append(_Norm(value, line.step, line))
    return norms


def _collect_finite_losses(evidence: Evidence) -> list[float]:
    """The finite losses of all attempts: a run that was resumed is one run."""
    return list(filter(math.isfinite, list_losses_of_run(evidence)))


def _is_loss_falling(evidence: Evidence) -> bool:
    values = _collect_finite_losses(evidence)
    if len(values) < TREND_LOSSES:
        return len(values) > 1 and values[-1] < values[0] * (1 - TREND_CHANGE)
    trend = compute_trend(values)
    return trend.change <= -TREND_CHANGE and trend.z <= -TREND_Z


def observe_trend(evidence: Evidence, expected: str | None) -> Observation:
    """Whether the loss falls, rises or neither, over all attempts."""
    still = _observe_still_trend(evidence)
    if still is not None:
        return still
    values = _collect_finite_losses(evidence)
    detail: dict[str, object] = {"losses": len(values)}
    if len(values) < TREND_LOSSES:
        reason = f"{len(values)} losses were recorded, {TREND_LOSSES} are needed"
        return Observation("too_short", proved=False, detail=detail, reason=reason)
    trend = compute_trend(values)
    change = round(trend.change, 4)
    detail |= {"change": change, "z": round(trend.z, 2)}
    state = "flat"
    if abs(trend.z) >= TREND_Z and abs(trend.change) >= TREND_CHANGE:
        state = "rising"
        if trend.change < 0:
            state = "falling"
    help = None
    if expected == "falling":
        help = "a longer run, or another learning rate; `expect: {trend: any}` asks for none"
    reason = f"from the first step to the last the loss changes by {change:+.1%} (z {trend.z:.1f})"
    cites = _cite_first_and_last(evidence)
    return Observation(state, cites=cites, detail=detail, reason=reason, help=help)


def _observe_still_trend(evidence: Evidence) -> Observation | None:
    """That nothing was learned: a norm or rate of 0 in every one of two steps or more."""
    numbers = set()
    norms = set()
    rates = set()
    for step in evidence.rank_steps:
        numbers.add(step.step)
        norms.add(step.grad_norm)
        rates.add(step.learning_rate)
    if not numbers and _has_first_line(evidence.lines):
        for line in evidence.lines:
            numbers.add(line.step)
            norms.add(line.extra.get("grad_norm"))
            rates.add(line.learning_rate)
    if len(numbers) < 2:
        return None
    if norms == {0}:
        quantity = "gradient norm"
    elif rates == {0}:
        quantity = "learning rate"
    else:
        return None
    # the record of the probe says it better than the log
    cites = _cite_first_and_last(replace(evidence, log=None)) or _cite_first_and_last(evidence)
    return Observation(
        "still",
        unwanted=True,
        cites=cites,
        reason=f"the {quantity} was 0 in every step: nothing was learned",
        help="check the learning rate, its schedule, and what is frozen; `expect: {trend: any}` "
        "accepts it",
    )


def _has_first_line(lines: Sequence[StepLine]) -> bool:
    """Whether the log has the first step: the learning rate may well be 0 at the end."""
    if len(lines) < 2:
        return False
    return lines[0].step <= max(1, lines[1].step - lines[0].step)


class Trend(NamedTuple):
    """`change` is relative, from first to last; `z` is Mann-Kendall's."""

    change: float
    z: float


def compute_trend(values: Sequence[float]) -> Trend:
    """The change by the Theil-Sen slope, and Mann-Kendall's z, of two losses or more.

    Both go by pairs of losses, so that a few spikes move neither.
    """
    size = math.ceil(len(values) / TREND_BINS)
    bins = []
    for start in range(0, len(values), size):
        group = values[start : start + size]
        bins.append(statistics.median(group))
    count = len(bins)
    slopes = []
    score = 0
    for first, second in combinations(range(count), 2):
        rise = bins[second] - bins[first]
        slopes.append(rise / (second - first))
        if rise > 0:
            score += 1
        elif rise < 0:
            score -= 1
    slope = statistics.median(slopes)
    variance = count * (count - 1) * (2 * count + 5) / 18
    level = statistics.median(map(abs, bins)) or 1.0
    # the usual correction for continuity
    corrected = score - math.copysign(min(1, abs(score)), score)
    return Trend(slope * (count - 1) / level, corrected / math.sqrt(variance))


def observe_memory(evidence: Evidence, _expected: str | None) -> Observation:
    """The peak of GPU memory, and whether GPU or host memory ran out, and in which phase."""
    detail: dict[str, object] = {"peak_allocated_gib": find_peak_allocated_gib(evidence)}
    phases = find_memory_phases(evidence)
    if phases:
        detail["phases"] = phases
    end = find_ending(evidence)
    gpu = find_final_signals(evidence, "oom")
    host = find_final_signals(evidence, "oom_host")
    if end.state == "completed":
        # after a good end, only what was raised is of this run
        raised = {signal.line for signal in evidence.signals("exception")}
        gpu = _select_on_lines(gpu, raised)
        host = _select_on_lines(host, raised)
    if host and not gpu:
        return Observation("oom", cites=host, detail=detail, help=HELP["oom_host"])
    error = " ".join((end.error or {}).values())
    if not gpu and not _OUT_OF_MEMORY.search(error):
        return Observation("ok", proved=bool(evidence.log or evidence.probe), detail=detail)
    arguments = evidence.arguments
    detail["asked"] = {key: arguments[key] for key in _MEMORY_ARGUMENTS if key in arguments}
    if gpu:
        detail |= gpu[0].fields
    help = _OOM_HELP
    phase = find_phase(evidence)
    if phase is not None:
        detail["during"] = phase
        help = _OOM_HELPS.get(phase, _OOM_HELP)
    return Observation("oom", cites=gpu, detail=detail, help=help)


def _select_on_lines(signals: Iterable[Signal], lines: set[int]) -> tuple[Signal, ...]:
    return tuple(signal for signal in signals if signal.line in lines)


def observe_finish(evidence: Evidence, _expected: str | None) -> Observation:
    """How the run ended and why, and whether its model was saved."""
    end = find_ending(evidence)
    saved = evidence.final_save
    exit = evidence.exit
    help = None
    if end.reason is not None:
        help = HELP[end.reason]
    elif exit is not None and exit.returncode and not end.signal and not end.error:
        help = (
            f"exit code {exit.returncode}, and no error is known: the last lines of the "
            "console log may tell"
        )
    cites = [end.saved, evidence.stopped, *end.lines, *evidence.lines[-1:], saved, exit]
    return Observation(
        end.state,
        proved=end.proved,
        cites=[cite for cite in cites if cite is not None],
        detail=_describe_end(evidence, end),
        help=help,
    )


def _describe_end(evidence: Evidence, end: Ending) -> dict[str, object]:
    detail: dict[str, object] = {
        "last_step": evidence.last_step,
        "total_steps": evidence.total_steps,
        "saved": evidence.final_save is not None,
    }
    if evidence.left_out_save:
        detail["left_out"] = "the final save: of a trial nobody wants the model"
    for name in ("reason", "signal", "error"):
        value = getattr(end, name)
        if value is not None:
            detail[name] = value
    if end.state in ("crashed", "killed", "stopped"):
        phase = find_phase(evidence)
        if phase is not None:
            detail["during"] = phase
    exit = evidence.exit
    if exit is not None:
        detail["returncode"] = exit.returncode
    if end.saved is not None:
        detail["checkpoint"] = end.saved.text("path")
    if exit is not None and exit.grace_s is not None:
        detail["grace_s"] = exit.grace_s
    hang = evidence.last_hang
    if hang is not None and end.state != "completed":
        detail["hang"] = hang.text("message")
    return detail


def observe_weights(evidence: Evidence, _expected: str | None) -> Observation:
    """Which share of the trained weights differs from what it was before the training.

    Those that never had a gradient do not count.
    """
    events = evidence.last_events("weights")
    share = compute_moved_share(evidence)
    if share is None:
        return replace(UNKNOWN, cites=events, reason=find_first_reason(events))
    share = max(share, evidence.moved_before)
    missing = evidence.missing_ranks(list_ranks(events))
    detail: dict[str, object] = {}
    for key in ("sampled", "tensors", "steps", "largest"):
        detail[key] = events[0].fields.get(key)
    detail["share"] = float(f"{share:.4g}")
    detail |= missing
    if share >= MOVED:
        return Observation("moved", proved=not missing, cites=events, detail=detail)
    if max(event.number("steps") or 0 for event in events) < 2:
        # the first step of a warm-up may have a learning rate of 0
        return replace(UNKNOWN, cites=events, detail=detail)
    moved = "none"
    if share:
        moved = f"{share:.2%}"
    state = "few"
    if share < STILL:
        state = "still"
    return Observation(
        state,
        proved=state == "still",
        unwanted=True,
        cites=events,
        detail=detail,
        reason=f"{moved} of a sample of the trained weights moved",
        help=_MOVED_HELP,
    )


def observe_model(evidence: Evidence, _expected: str | None) -> Observation:
    """Whether the files of the saved model are still as they were saved."""
    if evidence.model is None:
        return UNKNOWN
    detail = dict(evidence.model)
    state = str(detail.pop("state", "saved"))
    cites = evidence.events("saved_model")[-1:]
    for event in evidence.events("export")[-1:]:
        # what was written for transformers, compared with the checkpoint
        detail["export"] = {key: event.fields.get(key) for key in ("state", "error", "checkpoint")}
        cites = (*cites, event)
    observation = Observation(state, proved=state != "unknown", cites=cites, detail=detail)
    if state not in ("missing", "changed"):
        return observation
    help = "its files cannot be trusted: save it again from a checkpoint, or train again"
    return replace(observation, unwanted=True, help=help)


def observe_inputs(evidence: Evidence, _expected: str | None) -> Observation:
    """Whether data and model were at the end what they were at the start."""
    if evidence.inputs is None:
        return UNKNOWN
    if not evidence.inputs:
        return Observation("same")
    # an input that was deleted may well have been read as it was
    change = min(evidence.inputs, key=lambda change: change.get("after") is None)
    if change.get("after") is None:
        state = "gone"
        difference = "was gone at the end"
    else:
        state = "changed"
        before = str(change.get("before") or "none")[:12]
        after = str(change.get("after") or "none")[:12]
        difference = f"was not what it was at the start: sha256 {before}, then {after}"
    keys = ("role", "name", "file", "before", "after")
    return Observation(
        state,
        proved=state == "changed",
        unwanted=True,
        detail={key: change.get(key) for key in keys},
        reason=f"{change.get('file')} {difference}",
        help="train again on files that nothing writes to meanwhile",
    )


def observe_resume(evidence: Evidence, _expected: str | None) -> Observation:
    """Whether the first losses after a resume go on where those before it were."""
    before = list_earlier_values(evidence, "loss")[-_LOSSES_BEFORE:]
    after = list(filter(math.isfinite, list_losses(evidence)))[:_LOSSES_AFTER]
    if len(before) < _LEAST_BEFORE or not after:
        return UNKNOWN
    level = statistics.median(before)
    level_after = statistics.median(after)
    # the usual factor from a median deviation to a standard deviation
    spread = 1.4826 * statistics.median(abs(loss - level) for loss in before)
    spread = max(spread, _LEAST_SPREAD * abs(level))
    limit = max(level + _SPREADS * spread, *before)
    state = "continuous"
    if level_after > limit:
        state = "jump"
    return Observation(
        state,
        proved=state == "continuous",
        unwanted=state == "jump",
        cites=evidence.events("resumed"),
        detail={
            "before": round(level, 4),
            "after": round(level_after, 4),
            "limit": round(limit, 4),
        },
        reason=f"the loss was {level:.4g} before the resume and is {level_after:.4g} after it, "
        f"more than {limit:.4g}",
        help="the checkpoint may not hold what was trained: take an older one, or start over with "
        "--fresh",
    )
