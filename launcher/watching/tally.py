"""What the micro-batches of one optimizer step add up to."""

from __future__ import annotations

from typing import Any


class Tally:
    """The optimizer step in the making; its numbers stay on the device and are read once a step.

    `positions` of the batches, `norm` of the gradients where somebody computes it; `interrupted` where
    something else happened meanwhile, so that the step tells no speed.
    """

    def __init__(self) -> None:
        self.scalars: dict[str, list[Any]] = {"loss": [], "tokens": [], "rows": []}
        self.norm: list[Any] = []
        self.micro_batches = 0
        self.positions = 0
        self.interrupted = False

    def loss(self, loss: Any) -> None:
        """That of a micro-batch, as it is given to `backward`."""
        self.scalars["loss"].append(loss.detach())
        self.micro_batches += 1

    def add(self, rows: Any, positions: int, tokens: Any) -> None:
        """Rows, positions, and the positions that hold a token."""
        self.positions += positions
        self.scalars["tokens"].append(tokens)
        self.scalars["rows"].append(rows)

    def count(self, ids: Any, kwargs: dict[str, Any]) -> None:
        """The same of a batch that the model is given."""
        mask, places = kwargs.get("attention_mask"), kwargs.get("position_ids")
        ends = kwargs.get("cu_seq_lens_q")
        rows: Any = int(ids.shape[0]) if ids.dim() == 2 else 1
        real: Any = ids.numel()
        if mask is not None and mask.dim() == 2:
            real = mask.sum()
        elif places is not None and places.dim() == 2 and places.shape[-1] == ids.shape[-1]:
            # behind the last sample every position is said to be the first
            start = places == 0
            waste = (start[:, 1:] & start[:, :-1]).sum()
            real, rows = places.numel() - waste, start.sum() - waste
        elif ends is not None:
            real, rows = ends[-1], int(ends.numel()) - 1
        self.add(rows, int(ids.numel()), real)
