"""Settings side by side: short real runs in turn, each measured, written down, and compared."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import assertions, campaign, comparison, measurement, rundir, trial
from launcher.assertions import Assertion, Broken
from launcher.campaign import Campaign
from launcher.comparison import Cause, Row, Sample, Variant, compare
from launcher.errors import (
    Exit,
    Finding,
    brief,
    usage,
)
from launcher.preparation import Request

BENCH_VERSION = 1
FILE, PAGE = "bench.json", "bench.html"

AGAIN: tuple[Cause, ...] = ("refused", "interrupted")
"""What is tried again when the same comparison goes on: it says nothing of the setting."""
_LONGEST_S = 366 * 24 * 3600.0


@dataclass(slots=True, kw_only=True)
class Bench:
    """One comparison: what is compared, and what is known so far.

    `key` names settings, contents and machine: what was measured under another key is another
    comparison. `batch` is the rows of a step, of the largest variant. `proposed` is what a search has
    chosen, which need not be the fastest.
    """

    request: Request
    variants: tuple[Variant, ...]
    steps: int
    repeats: int
    timeout_s: float | None = None
    tolerance: float = comparison.TOLERANCE
    assertions: tuple[Assertion, ...] = ()
    key: str = ""
    batch: int | None = None
    findings: tuple[Finding, ...] = ()
    folder: Path = Path()
    samples: list[Sample] = field(default_factory=list)
    proposed: str | None = None

    @property
    def rows(self) -> list[Row]:
        """One a variant, in the order in which they were named; those without a sample are left out."""
        order = {variant.name: nth for nth, variant in enumerate(self.variants)}
        known = sorted(self.samples, key=lambda one: (order.get(one.variant, 0), one.repeat))
        rows = compare(known, self.tolerance)
        if self.proposed is None:
            return rows
        return [
            replace(row, recommended=row.standing == "faster" and row.variant == self.proposed)
            for row in rows
        ]

    @property
    def broken(self) -> list[Broken]:
        """Assertions that do not hold, judged once everything is measured."""
        rows = self.rows
        first = rows[:1] and rows[0].variant == self.variants[0].name
        return assertions.broken(self.assertions, rows) if first else []

    def order(self) -> list[tuple[int, Variant]]:
        """Every trial: round by round, every second round backwards, so that drift hits all alike."""
        return [
            (repeat, variant)
            for repeat in range(self.repeats)
            for variant in (self.variants[::-1] if repeat % 2 else self.variants)
        ]

    def due(self) -> list[tuple[int, Variant]]:
        """Trials that are still to be run: what failed for a reason of its own would fail again."""
        done = {(s.repeat, s.variant) for s in self.samples}
        failed = {s.variant for s in self.samples if not s.measured}
        return [(n, v) for n, v in self.order() if (n, v.name) not in done and v.name not in failed]

    def as_json(self) -> dict[str, Any]:
        """The record, and the data of `--format json`."""
        return {
            "bench_version": BENCH_VERSION, "key": self.key, "config": str(self.request.config),
            "overrides": list(self.request.overrides), "gpus": self.request.gpus,
            "steps": self.steps, "repeats": self.repeats, "batch": self.batch,
            "variants": [variant.as_json() for variant in self.variants],
            "compared": {
                "loss": f"mean of the probe's loss a step, weighted by {self.weights()}",
                "tokens": comparison.common_tokens(self.samples), "tolerance": self.tolerance,
                "asserted": [one.text for one in self.assertions],
            },
            "complete": not self.due(), "rows": [row.as_json() for row in self.rows],
            "broken": [one.as_json() for one in self.broken],
            "samples": [one.as_json() for one in self.samples], "folder": str(self.folder),
        }  # fmt: skip

    def weights(self) -> str:
        """What each step's loss is weighted by."""
        return "rows" if self.request.stage == "dpo" else "tokens"

    def write(self) -> None:
        """The record, whole or not at all. Raises NotReady where it cannot be written."""
        campaign.write(self.folder / FILE, self.as_json())


# --- going through with it ------------------------------------------------------------------------


@contextlib.contextmanager
def opened(bench: Bench, *, fresh: bool = False, resume: bool = False) -> Iterator[Bench]:
    """The bench in its folder, with what an earlier start of the same measured.

    Raises what `Campaign.opened` raises.
    """
    root = bench.request.runs or rundir.runs_root()
    found = Campaign(kind="bench", key=bench.key, name=bench.request.config.stem, root=root)
    with found.opened(fresh=fresh, resume=resume) as bench.folder:
        told = rundir.read_json(bench.folder / FILE)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            bench.samples = [
                sample for one in told.get("samples") or ()
                if not _again(sample := Sample.from_json(one), bench.timeout_s)
            ]  # fmt: skip
        yield bench


def _again(sample: Sample, timeout_s: float | None) -> bool:
    """Whether a trial is to be run again: nothing of it was measured, or it gets more time now."""
    longer = timeout_s is None or timeout_s > sample.seconds
    return sample.cause in AGAIN or (sample.cause == "timeout" and longer)


def run(bench: Bench, *, told: Callable[[str], None] = lambda _: None) -> Exit:
    """Run every trial that is due; the record is up to date after each. Returns the exit code.

    Needs `opened`. What the user stops ends the comparison, whatever else happens only its trial.
    """
    bench.write()
    try:
        with trial.unwatched():
            while due := bench.due():
                repeat, variant = due[0]
                told(f"{variant.name}, run {repeat + 1} of {bench.repeats} ({len(due)} to go)")
                sample = measurement.measure(
                    bench.request, variant, steps=bench.steps, root=bench.folder, repeat=repeat,
                    timeout_s=bench.timeout_s, batch=bench.batch,
                )  # fmt: skip
                if sample.cause == "interrupted":
                    return Exit.INTERRUPTED
                bench.samples.append(sample)
                bench.write()
                told(f"  {_said(sample)}")
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    return conclusion(bench)


def conclusion(bench: Bench) -> Exit:
    """0 where something was measured and every assertion holds."""
    if not any(sample.measured for sample in bench.samples):
        refused = all(sample.cause == "refused" for sample in bench.samples)
        return Exit.NOT_READY if refused else Exit.TRAINING
    unproven = bench.assertions and not any(s.measured for s in _of_first(bench))
    return Exit.VERDICT if bench.broken or unproven else Exit.OK


def interrupted(bench: Bench) -> list[str]:
    """What is left to do where the user has stopped it."""
    done = len(bench.samples)
    return [
        f"interrupted: the same command goes on here, {done} of {done + len(bench.due())} runs are done",
        f"runs: {bench.folder / FILE}",
    ]


def _of_first(bench: Bench) -> list[Sample]:
    return [sample for sample in bench.samples if sample.variant == bench.variants[0].name]


def _said(sample: Sample) -> str:
    if not sample.measured:
        return f"{sample.cause}: {sample.reason}"
    speed, loss = (sample.metrics.get(k) for k in ("tokens_per_second_per_gpu", "loss_per_token"))
    shown = "no speed" if speed is None else f"{speed:,.0f} tokens/s per GPU"
    return f"{shown}, loss {'unknown' if loss is None else format(loss, '.4f')}, {sample.seconds:.0f} s"


def seconds(text: str) -> float:
    """`90`, `90s`, `10m`, `1h30m` in seconds. Raises UsageError for what is no time."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    total = 0.0
    if found is not None:
        total = sum(float(n or 0) * u for n, u in zip(found.groups(), (3600, 60, 1), strict=True))
    # timers take no more than the platform's
    if not 0 < total <= _LONGEST_S:
        raise usage("bad-time", f"`{brief(text)}` is no time", "such as 90s, 10m or 1h30m")
    return total
