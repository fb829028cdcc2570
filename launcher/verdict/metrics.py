"""A run in numbers: losses, one row a step, speed and memory."""

import math
from collections.abc import Iterable, Sequence

from launcher.machine.datasheets import compute_flops_a_token, find_peak_flops
from launcher.verdict.evidence import Event, Evidence, ProbeStep, RankRecord, keep_finite
from launcher.verdict.logs.scan import StepLine

REWARDS = {
    "rewards_accuracy": ("rewards/accuracies", "rewards/accuracy"),
    "rewards_margin": ("rewards/margins", "rewards/margin"),
}
"""DPO's rewards, under their names in the logs of the scripts."""
_WARM_UP_STEPS = 20
_WARM_UP_SHARE = 5


def list_losses(evidence: Evidence) -> tuple[float, ...]:
    """One loss a step as the probe saw them, else as logged; NaN for a loss that was not finite."""
    recorded = any(record.steps for record in evidence.records)
    if evidence.lines and not recorded:
        return tuple(line.loss for line in evidence.lines)
    values = []
    for row in evidence.rows:
        if "loss" in row or row.get("finite") is False:
            values.append(row.get("loss", math.nan))
    return tuple(values)


def list_losses_of_run(evidence: Evidence) -> tuple[float, ...]:
    """The losses of this attempt and of those that it continues."""
    return (*list_earlier_values(evidence, "loss"), *list_losses(evidence))


def list_earlier_values(evidence: Evidence, name: str) -> list[float]:
    """A quantity in the attempts that this one continues."""
    return [row[name] for row in evidence.earlier if name in row]


def compute_moved_share(evidence: Evidence) -> float | None:
    """The share of the trained weights that differs from the start, by a sample of all ranks.

    Records from before launch counted each element of the sample for a part of its tensor have only
    `sampled` and `moved`.
    """
    elements = 0.0
    moved = 0.0
    for event in evidence.last_events("weights"):
        share = event.number("share")
        if share is None:
            elements += event.number("sampled") or 0
            moved += event.number("moved") or 0
        else:
            elements += event.number("elements") or 0
            moved += share * (event.number("elements") or 0)
    if not elements:
        return None
    return moved / elements


def find_peak_allocated_gib(evidence: Evidence) -> float | None:
    """The peak of torch's allocated memory on the fullest rank."""
    return _find_peak(evidence, "allocated_gib")


def _find_peak(evidence: Evidence, name: str) -> float | None:
    return max(_collect_values(evidence.rank_steps, name), default=None)


def find_memory_phases(evidence: Evidence) -> dict[str, dict[str, float]]:
    """Memory at the end of each phase in GiB, each number that of the rank where it is largest.

    The peaks are cumulative: upstream reads the same counters, and nothing resets them. A phase
    whose peak is above that of the phase before made it; any other stayed below.
    """
    phases: dict[str, dict[str, float]] = {}
    for event in evidence.events("memory"):
        phase = event.text("phase") or "?"
        largest = phases.setdefault(phase, {})
        for name in event.fields:
            value = event.number(name)
            if name.endswith("_gib") and value is not None:
                largest[name] = max(value, largest.get(name, value))
    return phases


def select_steady_steps(record: RankRecord) -> Sequence[ProbeStep]:
    """The steps that tell the speed: without the warm-up, and without those that followed a save.

    The warm-up is a fifth of all steps, at least 1, at most 20: the first step compiles, and the
    next few still fill caches.
    """
    warm_up = max(1, len(record.steps) // _WARM_UP_SHARE)
    warm_up = min(_WARM_UP_STEPS, warm_up)
    return [step for step in record.steps[warm_up:] if not step.interrupted]


def compute_tokens_per_second(evidence: Evidence) -> float | None:
    """Steady tokens a second of all ranks, counted in the batches, without padding."""
    rates = []
    for record in evidence.records:
        steps = select_steady_steps(record)
        seconds = _sum_values(steps, "seconds")
        tokens = _sum_values(steps, "tokens")
        if seconds <= 0 or not tokens:
            return None
        rates.append(tokens / seconds)
    if not rates:
        return None
    return math.fsum(rates)


def _collect_values(steps: Iterable[ProbeStep], name: str) -> list[float]:
    values = []
    for step in steps:
        value = getattr(step, name)
        if value is not None:
            values.append(value)
    return values


def _sum_values(steps: Iterable[ProbeStep], name: str) -> float:
    return math.fsum(_collect_values(steps, name))


def _compute_ratio(evidence: Evidence, numerator: str, denominator: str) -> float | None:
    """The ratio of two quantities, each summed over all steps of all ranks."""
    values = _collect_values(evidence.rank_steps, numerator)
    total = _sum_values(evidence.rank_steps, denominator)
    if not values or not total:
        return None
    return math.fsum(values) / total


def compute_mfu(evidence: Evidence) -> float | None:
    """The share of the GPUs' peak that training needs at its steady speed.

    Of DPO the policy's; None of a mixture of experts.
    """
    ranks = evidence.records
    speed = compute_tokens_per_second(evidence)
    if not ranks or speed is None:
        return None
    # of several models, such as DPO's reference, the first is the one that trains
    models = ranks[0].all("model")
    device = ranks[0].last("device")
    if not models or device is None:
        return None
    peak = find_peak_flops(device.text("name"))
    if peak is None:
        return None
    row_tokens = _compute_ratio(evidence, "tokens", "rows") or 0.0
    flops = _compute_flops_per_token(models[0], row_tokens)
    if flops is None:
        return None
    return flops * speed / (peak * len(ranks))


def _compute_flops_per_token(model: Event, row_tokens: float) -> float | None:
    parameters = model.number("parameters")
    trained = model.number("trainable")
    if parameters is None or trained is None or model.number("experts"):
        return None
    frozen = parameters - trained
    # a lookup in an embedding multiplies nothing; a tied one is also the output layer
    lookup = 0.0
    if model.fields.get("tied") is not True:
        lookup = model.number("embedding") or 0.0
    if frozen:
        frozen -= lookup
    else:
        trained -= lookup
    heads = model.number("heads")
    head_width = model.number("head_dim")
    query = model.number("hidden") or 0.0
    if heads and head_width:
        query = heads * head_width
    return compute_flops_a_token(
        trained=trained,
        frozen=frozen,
        layers=model.number("layers") or 0.0,
        query=query,
        width=row_tokens,
    )


def compute_metrics(evidence: Evidence) -> dict[str, float | None]:
    """The whole run in numbers, None if unknown or not finite.

    `logged_tokens_per_second` is open-instruct's own figure, warm-up included. The gradient norms
    are those of all attempts. DPO's rewards are there only if the log prints them.
    """
    values = list_losses_of_run(evidence)
    first_loss = None
    last_loss = None
    if values:
        first_loss = keep_finite(values[0])
        last_loss = keep_finite(values[-1])
    norms = _collect_grad_norms(evidence)
    last_norm = None
    if norms:
        last_norm = norms[-1]
    metrics = {
        "first_loss": first_loss,
        "last_loss": last_loss,
        "min_loss": min(filter(math.isfinite, values), default=None),
        "tokens_per_second": compute_tokens_per_second(evidence),
        "logged_tokens_per_second": None,
        "mfu": compute_mfu(evidence),
        "tokens_per_row": _compute_ratio(evidence, "tokens", "rows"),
        "wasted_share": _compute_ratio(evidence, "wasted", "positions"),
        "last_grad_norm": last_norm,
        "max_grad_norm": max(norms, default=None),
        "peak_allocated_gib": find_peak_allocated_gib(evidence),
        "peak_reserved_gib": _find_peak(evidence, "reserved_gib"),
    }
    if evidence.lines:
        last = evidence.lines[-1]
        metrics["logged_tokens_per_second"] = last.tokens_per_second
        for name in REWARDS:
            reward = read_reward(last, name)
            if keep_finite(reward) is not None:
                metrics[name] = reward
    return metrics


def read_reward(line: StepLine, name: str) -> float | None:
    """A reward of DPO that a line logs, by its name in `REWARDS`."""
    for key in REWARDS[name]:
        if key in line.extra:
            return line.extra[key]
    return None


def _collect_grad_norms(evidence: Evidence) -> list[float]:
    """The gradient norms that the probe of the first rank saw, in all attempts."""
    for record in evidence.records[:1]:
        norms = _collect_values(record.steps, "grad_norm")
        if norms:
            return list_earlier_values(evidence, "grad_norm") + norms
    # without the probe, the log does not have the norm of every step
    return []
