"""What an optimizer step adds up to, and its numbers' way from the device into the record: nobody waits for them."""

import collections
import math
import sys
from typing import Any

from .contract import Caches, Contract
from .data import Data
from .model import torch_in_use
from .packing import Packing
from .process import ProbePiece, Process, finite, say

BRANCHES = ("chosen", "rejected")


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
        self.scalars["loss"].append(loss.detach())
        self.micro_batches += 1

    def rewards(self, chosen: Any, rejected: Any) -> None:
        """Of the pairs of a micro-batch; the loss has computed them."""
        chosen, rejected = chosen.detach(), rejected.detach()
        self.scalars.setdefault("margin", []).append((chosen - rejected).mean())
        self.scalars.setdefault("accuracy", []).append((chosen > rejected).float().mean())

    def add(self, rows: Any, positions: int, tokens: Any) -> None:
        self.positions += positions
        self.scalars["tokens"].append(tokens)
        self.scalars["rows"].append(rows)

    def count(self, ids: Any, kwargs: dict[str, Any]) -> None:
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


class Pairs(ProbePiece):
    """The pairs of each micro-batch, and what is known of the one that runs.

    `hidden` is that of the model's batch which the model is not told, under transformers' names; None
    where no micro-batch was seen. `alike` ranks share each batch.
    """

    def __init__(self, process: Process, packing: Packing) -> None:
        super().__init__(process)
        self.packing = packing
        self.hidden: dict[str, Any] | None = None
        self.counts: list[int] = []
        self.alike = 1

    def begins(self, batch: dict[str, Any], tally: Tally) -> None:
        ids = [batch[f"{branch}_input_ids"] for branch in BRANCHES]
        ends: list[Any] = [batch.get(f"{branch}_cu_seq_lens_k") for branch in BRANCHES]
        masks: list[Any] = [batch.get(f"{branch}_attention_mask") for branch in BRANCHES]
        positions = sum(int(one.numel()) for one in ids)
        real: Any = positions
        rows = sum(int(one.shape[0]) for one in ids)
        hidden: dict[str, Any] = {}
        if all(one is not None for one in ends):
            real = ends[0][-1] + ends[1][-1]
            rows = int(ends[0].numel()) + int(ends[1].numel()) - 2
            # of the row that both become, the first half
            hidden = {"cu_seq_lens_q": ends[0], "samples": rows}
            tally.scalars.setdefault("longer", []).append(ends[0][-1].maximum(ends[1][-1]))
        elif all(one is not None for one in masks):
            real = masks[0].sum() + masks[1].sum()
            hidden = {"attention_mask": masks[0]}
        self.hidden = hidden
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
        self.record.write("half_wasted", pairs=pairs, filled=round(filled, 4), better=better, message=message)
        if self.process.rank == 0:
            say(f"warning: {message}: rows are computed whole, however many pairs they hold")


class Reading:
    """The numbers of one step: `scalars` that may lie on a device, and what is `known` on the host."""

    def __init__(self, scalars: dict[str, list[Any]], known: dict[str, Any], *, at_once: bool = False) -> None:
        self.known = known
        self.values: dict[str, list[float]] = {}
        self.places: list[tuple[str, int]] = []
        self.event: Any = None
        self.host: Any = None
        waiting = []
        for name, items in scalars.items():
            self.values[name] = [0.0] * len(items)
            for index, item in enumerate(items):
                if getattr(item, "is_cuda", False) and not at_once:
                    self.places.append((name, index))
                    waiting.append(item.detach())
                else:
                    self.values[name][index] = float(item)
        if waiting:
            torch = sys.modules["torch"]
            stacked = torch.stack([item.double().reshape(()) for item in waiting])
            # one copy into pinned memory, behind everything that the step has queued
            self.host = torch.empty(len(waiting), dtype=torch.float64, pin_memory=True)
            self.host.copy_(stacked, non_blocking=True)
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())

    def take(self) -> dict[str, list[float]]:
        if self.event is not None and self.host is not None:
            self.event.synchronize()
            for (name, index), value in zip(self.places, self.host.tolist(), strict=True):
                self.values[name][index] = value
            self.host = None
        return self.values


def _preferences(values: dict[str, list[float]]) -> dict[str, float]:
    """The means over the micro-batches of what DPO's loss says of its pairs; nothing of another loss."""
    means = {name: sum(values[name]) / len(values[name]) for name in ("margin", "accuracy") if values.get(name)}
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}


class Steps(ProbePiece):
    """The steps whose numbers have not arrived yet, and what is made of those that have."""

    def __init__(self, process: Process, contract: Contract, caches: Caches, pairs: Pairs, data: Data) -> None:
        super().__init__(process)
        self.contract, self.caches, self.pairs = contract, caches, pairs
        self.data = data
        self.readings: collections.deque[Reading] = collections.deque()
        self.timing: Any = None

    def start_clock(self) -> None:
        """The first step begins; the device's own clock is read where there is one."""
        with self.record.quietly("timing"):
            if (torch := torch_in_use(self.settings.cpu)) is not None:
                self.timing = torch.cuda.Event(enable_timing=True)
                self.timing.record()

    def add(self, scalars: dict[str, list[Any]], known: dict[str, Any]) -> None:
        # at most the step before this one is still on its way: no bubble, and no more than one step late
        self.settle(wait=True)
        try:
            reading = Reading(scalars, known)
        except Exception as error:
            self.record.trouble("reading without waiting", error)
            reading = Reading(scalars, known, at_once=True)
        self.readings.append(reading)

    def settle(self, *, wait: bool = False) -> None:
        while self.readings and (wait or self.readings[0].ready()):
            with self.record.quietly("step"):
                self.finish(self.readings.popleft())

    def finish(self, reading: Reading) -> None:
        values, known, process = reading.take(), reading.known, self.process
        event, seconds = known["event"], known["seconds"]
        step = event["step"]
        if reading.event is not None:
            if self.timing is not None:
                seconds = self.timing.elapsed_time(reading.event) / 1000
            self.timing = reading.event
        self.data.counted(values)
        losses = values["loss"]
        valid = all(math.isfinite(loss) for loss in losses)
        mean = sum(losses) / known["parts"] if losses and valid else None
        norm = values["norm"][0] if values["norm"] else None
        gradient = next((v for v in (norm, *values.get("sampled", ())) if v is not None), 0.0)
        # a loss scaler meets overflows and skips the step: that is its business
        whole = valid and (known["scaled"] or math.isfinite(gradient))
        tokens, rows = int(sum(values["tokens"])), int(sum(values["rows"]))
        wasted = event["positions"] - tokens
        if step == process.base + self.settings.within:
            self.pairs.tell_waste(tokens, event["positions"], rows // 2, max(values.get("longer", [0])))
        event |= _preferences(values)
        about = {"rows": rows, "tokens": tokens, "wasted": wasted, "seconds": round(seconds, 4), **event}
        self.record.write("step", loss=mean, finite=whole, grad_norm=finite(norm), **about)
        if not valid:
            value = next(str(loss) for loss in losses if not math.isfinite(loss))
            self.contract.nonfinite("loss", value, step)
        elif not whole:
            self.contract.nonfinite("gradient", str(gradient), step)
        elif mean is not None:
            process.last = {"step": step, "loss": mean, "grad_norm": finite(norm)}
            if step == 1:
                self.caches.check_first_loss(mean)
