"""DPO by OLMo-core: what a micro-batch holds, where its model sees tokens and labels alone."""

from __future__ import annotations

from typing import Any

from .packing import Packing
from .process import Process
from .record import say
from .tally import Tally

BRANCHES = ("chosen", "rejected")


class Pairs:
    """The pairs of each micro-batch, and what is known of the one that runs.

    `told` is that of the model's batch which the model is not told, under transformers' names; None
    where no micro-batch was seen. `alike` ranks share each batch.
    """

    def __init__(self, process: Process, packing: Packing) -> None:
        self.process = process
        self.packing = packing
        self.told: dict[str, Any] | None = None
        self.counts: list[int] = []
        self.alike = 1

    def begins(self, batch: dict[str, Any], tally: Tally) -> None:
        ids = [batch[f"{branch}_input_ids"] for branch in BRANCHES]
        ends: list[Any] = [batch.get(f"{branch}_cu_seq_lens_k") for branch in BRANCHES]
        masks: list[Any] = [batch.get(f"{branch}_attention_mask") for branch in BRANCHES]
        positions = sum(int(one.numel()) for one in ids)
        real: Any = positions
        rows = sum(int(one.shape[0]) for one in ids)
        told: dict[str, Any] = {}
        if ends[0] is not None and ends[1] is not None:
            real = ends[0][-1] + ends[1][-1]
            rows = int(ends[0].numel()) + int(ends[1].numel()) - 2
            # of the row that both become, the first half
            told = {"cu_seq_lens_q": ends[0], "samples": rows}
            tally.scalars.setdefault("longer", []).append(ends[0][-1].maximum(ends[1][-1]))
        elif masks[0] is not None and masks[1] is not None:
            real = masks[0].sum() + masks[1].sum()
            told = {"attention_mask": masks[0]}
        self.told = told
        self.counts.append(rows // 2)
        # the same batch as another rank's, which counts it
        if self.process.rank % self.alike == 0:
            tally.add(rows, positions, real)

    def tell_waste(self, tokens: int, positions: int, pairs: int, longer: float) -> None:
        """Rows that are computed whole, and stay empty for more than half.

        Chosen and rejected fill a half each: the one with more tokens, `longer`, decides how many pairs fit.
        """
        if not self.counts or not self.packing.on or not positions or tokens * 2 >= positions:
            return
        filled = tokens / positions
        # by this step's own lengths; a row with fewer pairs than another had no room for the next one
        known = longer > 0 and pairs >= max(self.counts)
        fits = max(pairs, int(pairs * positions / 2 / longer)) if known else pairs
        better = 1 << max(0, fits.bit_length() - 1)
        message = f"batch {pairs} uses {filled:.0%} of each step"
        if better > pairs:
            message += f"; {better} fills {min(1.0, filled * better / max(1, pairs)):.0%}"
        self.process.record.write(
            "half_wasted", pairs=pairs, filled=round(filled, 4), better=better, message=message
        )
        if self.process.rank == 0:
            say(f"warning: {message}: rows are computed whole, however many pairs stand in them")
