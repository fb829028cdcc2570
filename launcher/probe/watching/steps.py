"""The numbers of each optimizer step, from the device into the record, without waiting for them."""

import collections
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from .contract import Caches, Contract
from .data import Data
from .model import find_torch
from .packing import Packing, TokenBatch
from .process import FiniteStep, ProbePiece, Process, Tensor, keep_finite, say

Facts = TypeVar("Facts")


class Tally:
    """The open optimizer step. `scalars` stay on the device and are read once a step.

    `positions` counts those of the batches. `interrupted`: something else happened during the step,
    so that its time says nothing about speed.
    """

    def __init__(self) -> None:
        self.scalars: collections.defaultdict[str, list[Tensor]] = collections.defaultdict(list)
        self.micro_batches = 0
        self.positions = 0
        self.interrupted = False

    def add_loss(self, loss: Tensor) -> None:
        self.scalars["loss"].append(loss.detach())
        self.micro_batches += 1

    def set_norm(self, norm: Tensor) -> None:
        self.scalars["norm"] = [norm]

    def add_rewards(self, chosen: Tensor, rejected: Tensor) -> None:
        """The rewards of a micro-batch of pairs, as the loss has computed them."""
        chosen = chosen.detach()
        rejected = rejected.detach()
        self.scalars["margin"].append((chosen - rejected).mean())
        self.scalars["accuracy"].append((chosen > rejected).float().mean())

    def add_batch(self, batch: TokenBatch) -> None:
        samples, tokens = batch.count()
        self.add_counts(int(batch.ids.numel()), samples, tokens)

    def add_counts(self, positions: int, samples: Tensor | int, tokens: Tensor | int) -> None:
        self.positions += positions
        self.scalars["rows"].append(samples)
        self.scalars["tokens"].append(tokens)


class Pairs(ProbePiece):
    """The pairs of each micro-batch of OLMo-core's DPO.

    `hidden` is the chosen half of the running micro-batch, whose model is not given all that is
    known of it; None outside of one. `alike` ranks share each batch.
    """

    def __init__(self, process: Process, packing: Packing) -> None:
        super().__init__(process)
        self.packing = packing
        self.hidden: TokenBatch | None = None
        self.most = 0
        self.alike = 1

    def begin(self, chosen: TokenBatch, rejected: TokenBatch, tally: Tally) -> None:
        chosen_samples, chosen_tokens = chosen.count()
        rejected_samples, rejected_tokens = rejected.count()
        samples = chosen_samples + rejected_samples
        self.most = max(self.most, samples // 2)
        self.hidden = chosen
        if chosen.ends is not None:
            # both sides become one row
            self.hidden = replace(chosen, samples=samples)
            tally.scalars["longer"].append(chosen_tokens.maximum(rejected_tokens))
        # of ranks with the same batch only the first counts it
        if self.process.rank % self.alike == 0:
            positions = int(chosen.ids.numel()) + int(rejected.ids.numel())
            tally.add_counts(positions, samples, chosen_tokens + rejected_tokens)

    def complete(self, batch: TokenBatch) -> TokenBatch:
        """What the model is given, with what is known of the first half of its row."""
        hidden = self.hidden
        if hidden is None:
            return batch
        if hidden.ends is not None:
            return replace(batch, ends=hidden.ends, samples=hidden.samples)
        return replace(batch, mask=batch.mask if hidden.mask is None else hidden.mask)

    def tell_waste(self, tokens: int, positions: int, pairs: int, longer: float) -> None:
        """Warn about rows that are computed whole and stay empty for more than half.

        Chosen and rejected answers fill half a row each: the half with more tokens, `longer`,
        limits how many pairs fit.
        """
        if not self.most or not self.packing.on or not positions or tokens * 2 >= positions:
            return
        filled = tokens / positions
        fits = pairs
        # a row with fewer pairs than another had no room for its next pair
        if longer > 0 and pairs >= self.most:
            fits = max(pairs, int(pairs * positions / 2 / longer))
        better = 1 << max(0, fits.bit_length() - 1)
        message = f"batch {pairs} uses {filled:.0%} of each step"
        if better > pairs:
            message += f"; {better} fills {min(1.0, filled * better / max(1, pairs)):.0%}"
        share = round(filled, 4)
        self.record.write("half_wasted", pairs=pairs, filled=share, better=better, message=message)
        if self.process.rank == 0:
            say(f"warning: {message}: rows are computed whole, however many pairs they hold")


class Reading(Generic[Facts]):
    """Numbers on their way from the device; `facts` say what they are about."""

    def __init__(self, scalars: dict[str, list[Tensor]], facts: Facts) -> None:
        self.facts = facts
        self.values: dict[str, list[float]] = {}
        self.places: list[tuple[str, int]] = []
        self.event: Any = None
        waiting = []
        for name, items in scalars.items():
            self.values[name] = []
            for index, item in enumerate(items):
                value = math.nan
                if getattr(item, "is_cuda", False):
                    self.places.append((name, index))
                    waiting.append(item.detach().double().reshape(()))
                else:
                    value = float(item)
                self.values[name].append(value)
        if waiting:
            self._start_copy(waiting)

    def _start_copy(self, scalars: list[Tensor]) -> None:
        """One copy into pinned memory, queued behind the work of the step."""
        torch = sys.modules["torch"]
        self.host = torch.empty(len(scalars), dtype=torch.float64, pin_memory=True)
        self.host.copy_(torch.stack(scalars), non_blocking=True)
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def is_ready(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> dict[str, list[float]]:
        if self.event is None:
            return self.values
        self.event.synchronize()
        arrived = self.host.tolist()
        for (name, index), value in zip(self.places, arrived, strict=True):
            self.values[name][index] = value
        return self.values


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """What the host knows of a step whose numbers are on their way.

    `parts` divides the sum of the losses. `scaled`: a loss scaler may skip the step. `event` is a
    part of its record.
    """

    seconds: float
    scaled: bool
    parts: int
    event: dict[str, Any]


class Steps(ProbePiece):
    """The steps whose numbers have not arrived yet, and the records of those that have."""

    def __init__(
        self, process: Process, contract: Contract, caches: Caches, pairs: Pairs, data: Data
    ) -> None:
        super().__init__(process)
        self.contract = contract
        self.caches = caches
        self.pairs = pairs
        self.data = data
        self.readings: collections.deque[Reading[ClosedStep]] = collections.deque()
        self.clock: Any = None

    def start_clock(self) -> None:
        """The first step begins: steps are timed by the device's clock if there is a device."""
        torch = find_torch(self.settings.cpu)
        if torch is not None:
            self.clock = torch.cuda.Event(enable_timing=True)
            self.clock.record()

    def add(self, tally: Tally, step: ClosedStep) -> None:
        # one step at most is on its way: the device is never idle, and NaN is seen a step later
        self.settle(wait=True)
        self.readings.append(Reading(tally.scalars, step))

    def settle(self, *, wait: bool = False) -> None:
        while self.readings and (wait or self.readings[0].is_ready()):
            with self.record.quietly("step"):
                self.finish(self.readings.popleft())

    def finish(self, reading: Reading[ClosedStep]) -> None:
        values = reading.wait()
        closed = reading.facts
        event = closed.event
        step = event["step"]
        self.data.add_sums(values)
        losses = values.get("loss", [])
        norm = _get_first(values.get("norm", ()))
        gradient = norm
        if gradient is None:
            gradient = _get_first(values.get("sampled", ()))
        valid = all(math.isfinite(loss) for loss in losses)
        # a loss scaler expects overflows, and skips such a step
        stable = closed.scaled or gradient is None or math.isfinite(gradient)
        mean = sum(losses) / closed.parts if losses and valid else None
        rows = int(sum(values.get("rows", ())))
        tokens = int(sum(values.get("tokens", ())))
        positions = event["positions"]
        if step == self.process.base + self.settings.within:
            longer = max(values.get("longer", [0]))
            self.pairs.tell_waste(tokens, positions, rows // 2, longer)
        self.record.write(
            "step",
            loss=mean,
            finite=valid and stable,
            grad_norm=keep_finite(norm),
            rows=rows,
            tokens=tokens,
            wasted=positions - tokens,
            seconds=round(self._measure_device_seconds(reading, closed.seconds), 4),
            **event,
            **_average_preferences(values),
        )
        if not valid:
            value = next(loss for loss in losses if not math.isfinite(loss))
            self.contract.tell_nonfinite("loss", value, step)
        elif not stable:
            self.contract.tell_nonfinite("gradient", gradient, step)
        elif mean is not None:
            self.process.last = FiniteStep(step, mean, keep_finite(norm))
            if step == 1:
                self.caches.check_first_loss(mean)

    def _measure_device_seconds(self, reading: Reading[ClosedStep], seconds: float) -> float:
        """By the device's clock, since the step before; `seconds`, the host's, without a device."""
        if reading.event is None:
            return seconds
        if self.clock is not None:
            seconds = self.clock.elapsed_time(reading.event) / 1000
        self.clock = reading.event
        return seconds


def _get_first(values: Sequence[float]) -> float | None:
    return values[0] if values else None


def _average_preferences(values: dict[str, list[float]]) -> dict[str, float]:
    """The means of a DPO loss's margin and accuracy over the micro-batches."""
    means = {}
    for name in ("margin", "accuracy"):
        items = values.get(name)
        if items and math.isfinite(sum(items)):
            means[name] = sum(items) / len(items)
    return means
