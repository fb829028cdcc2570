"""What a rehearsal has found and seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from launcher.errors import Finding
from launcher.lazy_dataclass import dataclass
from launcher.workflows.rehearse.inside.records import PreparedRows

FAILED = "rehearsal-failed"
"""The code of a failure of launch's own code, which says nothing about the stage."""


def describe_rows(rows: PreparedRows) -> str:
    """How many rows were rehearsed: `64 of 200 rows and 1 further row of another kind`."""
    text = f"{rows.read} rows"
    if rows.total not in (None, rows.read):
        text = f"{rows.read:,} of {rows.total:,} rows"
    if rows.further == 1:
        text += " and 1 further row of another kind"
    elif rows.further:
        text += f" and {rows.further} further rows of other kinds"
    if rows.rows != rows.read + rows.further:
        text += f", {rows.rows:,} once prepared"
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """`rows` is None where made-up rows stood in for the run's own, or nothing was trained."""

    findings: tuple[Finding, ...]
    seconds: float
    rows: PreparedRows | None = None
    losses: tuple[float, ...] = ()
    left_out: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    remembered: bool = False

    @property
    def failed(self) -> bool:
        """Whether launch's own code failed: nothing is known of the stage then."""
        return any(finding.code == FAILED for finding in self.findings)

    @property
    def row_tokens(self) -> str | None:
        """Tokens a row in the words of `--row-tokens`; None if anything had a stand-in."""
        if self.rows is None or self.stand_ins:
            return None
        mean = round(self.rows.tokens / self.rows.rows)
        return f"{max(1, mean)}:{self.rows.longest}"

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 1),
            "rows": {} if self.rows is None else asdict(self.rows),
            "losses": self.losses,
            "left_out": self.left_out,
            "stand_ins": self.stand_ins,
            "remembered": self.remembered,
            "row_tokens": self.row_tokens,
        }

    def lines(self) -> Iterator[str]:
        rows = self.rows
        if rows is not None:
            share = rows.trained / max(1, rows.tokens)
            text = f"{describe_rows(rows)}: {rows.tokens / rows.rows:.0f} tokens on average, "
            yield f"{text}{rows.longest} at most, {share:.0%} of them trained on"
        if self.losses:
            shown = ", ".join(f"{loss:.3f}" for loss in self.losses[:4])
            yield f"loss of the first steps: {shown}"
        if self.row_tokens:
            yield f"for launch plan: --row-tokens {self.row_tokens}"
        text = f"rehearsed in {self.seconds:.0f} s"
        yield f"{text}, earlier" if self.remembered else text
