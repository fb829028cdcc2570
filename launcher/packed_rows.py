"""How full packed rows of pairs are, by the way in which open-instruct's dpo.py puts them together.

It goes through the shuffled pairs in order (data_loader.py:321): a row holds as many pairs as fit, chosen
and rejected each within the limit, and never more than the rank's batch. What is left of the row is
padding, and the model computes it all the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from launcher.lengths import Lengths

_PAIRS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One row of a rank on average: pairs in it, real tokens of both branches, and all its positions."""

    pairs: float
    real: float
    positions: int

    @property
    def filled(self) -> float:
        """Share of the positions that hold a token."""
        return self.real / self.positions


@cache
def pack(rows: Lengths, *, pairs: int, limit: int) -> Packed:
    """Rows of at most `pairs` pairs and `limit` tokens a branch, from pairs as long as `rows` says.

    The same pairs are drawn each time, so that plans of different batches compare.
    """
    drawn = random.Random(20260101)
    made, current, chosen, rejected, whole = 0, 0, 0, 0, 0
    for _ in range(_PAIRS):
        one, other = (min(limit, max(1, round(rows.quantile(drawn.random())))) for _ in range(2))
        full = current and (chosen + one > limit or rejected + other > limit)
        if full or current >= pairs:
            made, whole = made + 1, whole + chosen + rejected
            current = chosen = rejected = 0
        current, chosen, rejected = current + 1, chosen + one, rejected + other
    # the last row may not be full
    placed = _PAIRS - current
    if not made:
        made, placed, whole = 1, current, chosen + rejected
    return Packed(pairs=placed / made, real=whole / made, positions=2 * limit)


def fuller(rows: Lengths, *, pairs: int, limit: int) -> tuple[int, Packed]:
    """The least doubling of a batch whose rows are filled to 80 %, or that fills them no further."""
    found = pack(rows, pairs=pairs, limit=limit)
    while found.filled < 0.8 and pairs < 4096:
        more = pack(rows, pairs=2 * pairs, limit=limit)
        if more.filled < 1.02 * found.filled:
            break
        pairs, found = 2 * pairs, more
    return pairs, found
