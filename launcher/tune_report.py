"""A search -> words: what is known before it, what came of it, and what its stage file says of itself."""

from __future__ import annotations

import shlex
from pathlib import Path

from launcher import levers
from launcher.candidates import Trial
from launcher.tuning import FILE, Entry, Tuning, loss_change, spoken


def beginning(tuning: Tuning) -> list[str]:
    """What is known before the first trial, one fact a line."""
    counted, space = tuning.search.summary(), tuning.space
    turned = "; ".join(f"{one.name} ({', '.join(map(_value, one.values))})" for one in space.levers)
    room = "" if tuning.card.gib is None else f" of {tuning.card.gib:.0f} GiB"
    lines = [
        f"levers: {turned}",
        f"{counted['settings']} settings on {tuning.card.name or 'this GPU'}{room}; the plan leaves out "
        f"{counted['too_large']} that do not fit",
        f"rows: {tuning.rows.source}",
    ]
    lines += [f"{name} stays: {why}" for name, why in space.fixed.items()]
    if tuning.entries:
        lines.append(
            f"{len(tuning.entries)} trials of an earlier start, {tuning.used:.0f} s: {tuning.folder}"
        )
    return lines


def said(entry: Entry) -> str:
    """Of a trial that is over."""
    measured = entry.trial.measured
    speed = f"{measured.speed:,.0f} tokens/s per GPU, " if entry.trial.ok and measured.speed else ""
    return f"{speed}{entry.trial.learned} ({entry.seconds:.0f} s)"


def ending(tuning: Tuning) -> list[str]:
    """What came of it: the changes with what each gains, and what to run."""
    best = tuning.chosen
    if tuning.state == "interrupted":
        return ["interrupted: the same command goes on here", f"trials: {tuning.folder / FILE}"]
    if best is None:
        return [f"nothing to propose: {tuning.search.stopped}", f"{tuning.folder / FILE}"]
    lines = [
        f"{levers.described(gain.lever, gain.after)}: {gain.text()}" for gain in tuning.gains()
    ]
    ways = "--gpus 0" if not tuning.plan.gpus else f"--gpus {tuning.plan.gpus}"
    others = len(tuning.entries) > 1
    none = "nothing that was tried is faster than" if others else "nothing was tried but"
    lines = lines or [f"{none} the file as it is written"]
    lines += [*filter(None, [tuning.withheld()]), f"trials: {tuning.folder / FILE}"]
    if tuning.place is None:
        return [*lines, "tuned: not written; the same command with another -o does no trial twice"]
    told = f"launch {tuning.plan.stage.options.stage} {shlex.quote(str(tuning.place))} {ways}"
    return [*lines, f"tuned: {told}"]


def head(tuning: Tuning, best: Trial, place: Path) -> list[str]:
    """What the stage file says of itself."""
    stage, where = tuning.plan.stage, tuning.card.name or "GPU"
    on = "the CPU" if not tuning.plan.gpus else f"{tuning.plan.gpus} x {where}"
    ways = "--gpus 0" if not tuning.plan.gpus else f"--gpus {tuning.plan.gpus}"
    lines = [
        f"{stage.config.path.name} on {on}, {len(tuning.entries)} trials of {tuning.terms.steps} steps.",
        f"  launch {stage.options.stage} {shlex.quote(str(place))} {ways}",
    ]
    first, row = tuning.search.results.first, tuning.row(best)
    told = f"{spoken(tuning.search.results.speeds(best))} tokens/s per GPU"
    if row is not None and first is not None and row.standing != "baseline":
        told = f"{spoken(tuning.search.results.speeds(first))} -> {told}, {row.speed_ratio:.2f}x"
    if (loss := loss_change(best, row)) is not None:
        change = round(loss, 4) + 0.0  # no minus before a zero
        told += f", loss per token {change:+.2%} after the same tokens"
    if best.measured.peak is not None and tuning.card.gib:
        told += f", peak {best.measured.peak:.0f} of {tuning.card.gib:.0f} GiB"
    lines.append(told + ".")
    if not tuning.search.results.differing(best.candidate):
        lines.append("Nothing that was tried is faster: what follows changes nothing.")
    if (not_this := tuning.withheld()) is not None:
        lines.append(f"{not_this}.")
    lines.append(f"Every trial: {tuning.folder / FILE}")
    return lines


def _value(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
