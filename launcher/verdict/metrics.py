"""Evidence -> the run in numbers: losses, one row a step, speed and memory."""

import math
from collections.abc import Sequence

from launcher.machine.datasheets import flops_a_token, peak_flops
from launcher.verdict.evidence import Evidence, ProbeStep, RankRecord

REWARDS = {
    "rewards_accuracy": ("rewards/accuracies", "rewards/accuracy"),
    "rewards_margin": ("rewards/margins", "rewards/margin"),
}
"""DPO's rewards, by what the logs of the scripts call them."""


def losses(evidence: Evidence) -> tuple[float, ...]:
    """One loss a step as the probe saw them, else as logged; NaN where it was not finite."""
    if evidence.lines and not any(record.steps for record in evidence.records):
        return tuple(line.loss for line in evidence.lines)
    rows = (row for row in evidence.rows if "loss" in row or row.get("finite") is False)
    return tuple(row.get("loss", math.nan) for row in rows)


def whole_losses(evidence: Evidence) -> tuple[float, ...]:
    """The same with those of the attempts that it continues from."""
    return (*earlier(evidence, "loss"), *losses(evidence))


def earlier(evidence: Evidence, name: str) -> list[float]:
    """A quantity in the attempts that this one continues from."""
    return [row[name] for row in evidence.earlier if name in row]


def moved_share(evidence: Evidence) -> float | None:
    """The share of a sample of the trained weights, over all ranks, that differs from the start."""
    events = evidence.last_events("weights")
    sampled, moved = (math.fsum(event.number(key) or 0 for event in events) for key in ("sampled", "moved"))
    return moved / sampled if sampled else None


def peak_allocated_gib(evidence: Evidence) -> float | None:
    """The peak of torch's allocated memory on the fullest rank."""
    return max(_values(evidence, "allocated_gib"), default=None)


def memory_phases(evidence: Evidence) -> dict[str, dict[str, float]]:
    """Memory at the end of each phase in GiB, each number that of the rank where it is largest. The peaks are
    cumulative, because upstream reads the same counters and nobody resets them: a phase whose peak is above that of
    the one before made it, any other stayed below."""
    phases: dict[str, dict[str, float]] = {}
    for event in evidence.events("memory"):
        phase = phases.setdefault(event.text("phase") or "?", {})
        for name in event.fields:
            if name.endswith("_gib") and (value := event.number(name)) is not None:
                phase[name] = max(value, phase.get(name, value))
    return phases


def steady(record: RankRecord) -> Sequence[ProbeStep]:
    """The steps that tell the speed: without those that followed a save, and without the warm-up, a fifth of all, at
    least 1, at most 20: the first step compiles, and the next few still fill caches."""
    warm_up = min(20, max(1, len(record.steps) // 5))
    return [step for step in record.steps[warm_up:] if not step.interrupted]


def tokens_per_second(evidence: Evidence) -> float | None:
    """Steady tokens a second of all ranks, counted from the batches, padding left out."""
    rates = []
    for kept in map(steady, evidence.records):
        seconds, tokens = math.fsum(s.seconds or 0.0 for s in kept), math.fsum(s.tokens or 0.0 for s in kept)
        rates.append(tokens / seconds if seconds > 0 else 0.0)
    return math.fsum(rates) if rates and all(rates) else None


def _values(evidence: Evidence, name: str) -> list[float]:
    return [value for step in evidence.rank_steps if (value := getattr(step, name)) is not None]


def _ratio(evidence: Evidence, part: str, whole: str) -> float | None:
    """Of two quantities, each summed over all steps of all ranks."""
    parts, total = _values(evidence, part), math.fsum(_values(evidence, whole))
    return math.fsum(parts) / total if parts and total else None


def mfu(evidence: Evidence) -> float | None:
    """The share of the GPUs' peak that training needs at its steady speed; of DPO the policy's, of experts None."""
    speed, ranks = tokens_per_second(evidence), evidence.records
    # of several models that were seen, such as DPO's reference, the first is the one that trains
    model = next(iter(ranks[0].all("model")), None) if ranks else None
    device = ranks[0].last("device") if ranks else None
    peak = peak_flops(device.text("name") if device else None)
    if speed is None or model is None or peak is None or model.number("experts"):
        return None
    size, trained = model.number("parameters"), model.number("trainable")
    if size is None or trained is None:
        return None
    # a table that is only looked up multiplies nothing
    looked_up = 0.0 if model.fields.get("tied") is True else model.number("embedding") or 0.0
    frozen = size - trained
    if frozen:
        frozen -= looked_up
    else:
        trained -= looked_up
    heads, head_width = model.number("heads"), model.number("head_dim")
    query = heads * head_width if heads and head_width else model.number("hidden") or 0.0
    width, layers = _ratio(evidence, "tokens", "rows") or 0.0, model.number("layers") or 0.0
    needed = flops_a_token(trained=trained, frozen=frozen, layers=layers, query=query, width=width)
    return needed * speed / (peak * len(ranks))


def metrics(evidence: Evidence) -> dict[str, float | None]:
    """The whole run in numbers, None where unknown or not finite. `logged_tokens_per_second` is open-instruct's own,
    warm-up included. The gradient norms are those of all attempts that came to this; DPO's rewards are there only
    where the log prints them."""
    losses = whole_losses(evidence)
    last = evidence.lines[-1] if evidence.lines else None
    rewards = {
        name: value
        for name, keys in REWARDS.items()
        for key in keys
        if last and math.isfinite(value := last.extra.get(key, math.nan))
    }
    own = [s.grad_norm for r in evidence.records[:1] for s in r.steps if s.grad_norm is not None]
    # without the probe no norm is known of every step
    norms = [*earlier(evidence, "grad_norm"), *own] if own else []
    return {
        "first_loss": losses[0] if losses and math.isfinite(losses[0]) else None,
        "last_loss": losses[-1] if losses and math.isfinite(losses[-1]) else None,
        "min_loss": min(filter(math.isfinite, losses), default=None),
        "tokens_per_second": tokens_per_second(evidence),
        "logged_tokens_per_second": last.tokens_per_second if last else None,
        "mfu": mfu(evidence),
        "tokens_per_row": _ratio(evidence, "tokens", "rows"),
        "wasted_share": _ratio(evidence, "wasted", "positions"),
        "last_grad_norm": norms[-1] if norms else None,
        "max_grad_norm": max(norms, default=None),
        "peak_allocated_gib": peak_allocated_gib(evidence),
        "peak_reserved_gib": max(_values(evidence, "reserved_gib"), default=None),
        **rewards,
    }
