"""What must hold of a comparison: figures and their limits, as the command line asserts them."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.comparison import LOSS, SPEED, Row
from launcher.errors import brief, usage

RELATIVE = {
    "loss": LOSS, "tokens_per_second": SPEED, "seconds_per_step": "seconds_per_step",
    "peak_memory": "peak_allocated_gib",
}  # fmt: skip
"""Held to the first variant: `1.2` is a ratio, `20%` a change; of the loss either way."""
ABSOLUTE = {"mfu": "mfu", "wasted": "wasted_share", "gpu_utilisation": "gpu_utilisation_p50"}
"""Shares by themselves, of every variant: `48%` is 0.48."""

_EXPRESSION = re.compile(r"\s*([a-z_]+)\s*(<=|>=|<|>)\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*(%?)\s*")
_HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assertion:
    """`loss<=1%`, `tokens_per_second>=1.2`, `mfu>=48%`: one figure, one limit."""

    text: str
    name: str
    operator: str
    number: float
    percent: bool

    @property
    def relative(self) -> bool:
        """Whether the figure is held to the first variant's, which then is not judged itself."""
        return self.name in RELATIVE

    @property
    def tolerance(self) -> float | None:
        """How far the loss may go by this; None where it speaks of something else."""
        if self.name != "loss" or self.operator not in ("<", "<="):
            return None
        return self.number / 100 if self.percent else max(0.0, self.number - 1)

    def holds(self, row: Row, first: Row) -> bool | None:
        """Whether it is so; None where a figure that it needs is not known."""
        value = row.median((RELATIVE | ABSOLUTE)[self.name])
        if self.relative:
            base = first.median(RELATIVE[self.name])
            value = value / base if value is not None and base else None
        if value is None:
            return None
        if self.percent:
            value = 100 * (value - 1) if self.relative else 100 * value
            # 1.01 / 1 is a little more than 1 %
            value = round(abs(value) if self.name == "loss" else value, 9)
        return bool(_HOLDS[self.operator](value, self.number))


def assertion(text: str) -> Assertion:
    """Read one. Raises UsageError for what is none."""
    found = _EXPRESSION.fullmatch(text)
    if found is None or found[1] not in RELATIVE | ABSOLUTE:
        raise usage(
            "bad-assert", f"`{brief(text)}` cannot be asserted",
            f"such as loss<=1%, tokens_per_second>=1.2; of {', '.join(RELATIVE | ABSOLUTE)}",
        )  # fmt: skip
    name, comparison, number, percent = found.groups()
    return Assertion(
        text=text.strip(), name=name, operator=comparison, number=float(number), percent=bool(percent)
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Broken:
    """An assertion that does not hold of a variant, or (`unknown`) whose figure was not measured."""

    text: str
    variant: str
    unknown: bool

    def as_json(self) -> dict[str, Any]:
        """For the envelope."""
        return {"assert": self.text, "variant": self.variant, "unknown": self.unknown}


def broken(assertions: Sequence[Assertion], rows: Sequence[Row]) -> list[Broken]:
    """Every assertion with every variant that it does not hold of."""
    return [
        Broken(one.text, row.variant, holds is None)
        for one in assertions
        for row in (rows[1:] if one.relative else rows)
        if (holds := one.holds(row, rows[0])) is not True
    ]
