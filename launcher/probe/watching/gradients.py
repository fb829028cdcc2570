"""Whether the optimizer gets what the batch gave: gradients of autograd against those that are used.

An engine between backward and optimizer adds up micro-batches, averages over processes, clips, and may
lose or mix up data on the way (DeepSpeed 0.18.5 to 0.18.9 with `overlap_comm`: DeepSpeed's PRs 7805, 7965
and 8080). So a hook on every trained parameter copies a sample of the gradient that autograd made of each
micro-batch, before any engine reads it; the samples are summed in fp32, averaged over the processes by
an all-reduce of their own, and compared with the same elements of what the optimizer is about to use.
docs/gradients.md gives the tolerance and the cost.
"""

import contextlib
import datetime
import functools
import hashlib
import math
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from .contract import Contract
from .engines import DeepSpeed, Unsupported, engine_of
from .model import numel_of
from .process import ProbePiece, Process
from .steps import Reading

ELEMENTS = 2**21  # of all parameters together, at most: three fp32 buffers and one temporary, 32 MiB
ROW = 4096  # of one parameter, at most; one with fewer elements is compared whole
DENSE = 32  # steps that are all compared; after them every `EVERY`th
EVERY = 8
AGREEMENT = 60.0  # seconds to wait, once, until every process has its hooks
STRICTNESS = 4.0  # standard deviations of the rounding error that are still taken for rounding


def tolerance(unit: float, additions: int) -> float:
    """The relative error, in L2 norm, that rounding alone explains.

    Each of `additions` roundings is off by up to `unit` of a partial sum, uniformly, so by unit / sqrt(3)
    in the mean, and independent errors add up by their squares.
    """
    return max(1e-4, STRICTNESS * unit * math.sqrt(additions / 3))


class ElementSample:
    """One step's elements of each parameter: `count` of them, `stride` apart, from `offset`."""

    def __init__(self, sizes: list[int], width: int) -> None:
        self.counts = [min(size, width) for size in sizes]
        self.strides = []
        for size, count in zip(sizes, self.counts, strict=True):
            stride = max(1, (size - 1) // max(1, count - 1)) if size > count else 1
            # an even stride would meet the same columns of every row of a matrix
            self.strides.append(stride - 1 if stride > 1 and stride % 2 == 0 else stride)
        self.sizes = sizes
        self.offsets = [0] * len(sizes)

    def draw(self, seed: int) -> None:
        dice = random.Random(seed)
        for row, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            slack = size - 1 - (count - 1) * self.strides[row]
            self.offsets[row] = dice.randint(0, slack) if slack > 0 else 0

    def place(self, row: int) -> tuple[int, int, int]:
        """What `elements` takes."""
        return self.offsets[row], self.strides[row], self.counts[row]

    def within(self, row: int, start: int, end: int) -> tuple[int, int]:
        """Which of the row's samples lie in elements `start` to `end` of its parameter."""
        offset, stride = self.offsets[row], self.strides[row]
        first = max(0, -((offset - start) // stride))
        last = min(self.counts[row], -((offset - end) // stride))
        return first, max(first, last)


class Gradients(ProbePiece):
    """The comparison, from the first training pass on; `reason` says why there is none.

    `index` is that of the optimizer step in the making. `filled`: the hooks have added something that is not
    folded yet; `finished`: this step has been compared.
    """

    def __init__(self, process: Process, contract: Contract) -> None:
        super().__init__(process)
        self.contract = contract
        self.models: list[Any] = []
        self.engine: Any = None
        self.reason: str | None = None
        self.ready = self.filled = self.finished = False
        self.failed: BaseException | None = None
        self.readings: list[Reading] = []
        self.index = self.micro_batches = self.checks = self.skipped = self.corrupt_checks = 0
        self.corrupt: dict[str, Any] | None = None
        self.largest = 0.0
        self.steps: list[int] = []
        self.reported: tuple[int, int] | None = None

    def prepared(self, model: Any) -> None:
        """A model as it will be trained: an engine, a wrapper, or itself."""
        if any(p.requires_grad for p in model.parameters()):
            self.models.append(model)

    def begin(self) -> None:
        """Set up the hooks before the first backward pass; on every process, or on none."""
        if self.ready or self.reason is not None:
            return
        compares = self.settings.gradients
        try:
            if not compares:
                raise Unsupported("`expect: {gradients: any}` switches the comparison off")
            if not self.models:
                raise Unsupported("no model was seen on its way to the trainer")
            self._set_up(self.models[-1])
            digest = hashlib.sha256(repr((self.names, self.sample.sizes)).encode()).hexdigest()
        except Exception as error:
            digest = ""
            self.reason = str(error) if isinstance(error, Unsupported) else repr(error)
        agreed = not compares or self.process.world == 1 or _agreed(digest, self.process.rank, self.process.world)
        if self.reason is None and not agreed:
            self.reason = "not every process could set up its hooks"
        if self.reason is not None:
            self.contract.seen("gradients", "unknown", final=False)
            self.record.write("gradients", state="unknown", reason=self.reason)
            return
        self._hook_all()
        if isinstance(self.engine, DeepSpeed):
            for optimizer in self.engine.steppers:
                optimizer.register_step_pre_hook(self._before_inner_step)
        self.ready = True
        self._arm()

    def _set_up(self, model: Any) -> None:
        torch = sys.modules["torch"]
        module = getattr(model, "module", model)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad and numel_of(p)}
        if not trained:
            raise Unsupported("no parameter is trained")
        self.engine = engine_of(model, trained, self.process.world)
        self.names = list(trained)
        sizes = [numel_of(p) for p in trained.values()]
        width = max(16, min(ROW, ELEMENTS // len(sizes), max(sizes)))
        self.sample = ElementSample(sizes, width)
        self.rows, self.width = len(sizes), width
        self.device = next(iter(trained.values())).device
        if self.device.type == "cpu" and torch.cuda.is_available() and not self.settings.cpu:
            # offloaded parameters come to the device for their gradients
            self.device = torch.device("cuda", torch.cuda.current_device())
        formats = {f for f in self.engine.formats if f.is_floating_point}
        self.unit = max(torch.finfo(f).eps for f in formats) / 2
        self.smallest = max(torch.finfo(f).smallest_normal * torch.finfo(f).eps for f in formats)
        # the sums of all rows and, behind them, the squares of what was added to each
        self.total = torch.zeros(self.rows * (width + 1), dtype=torch.float32, device=self.device)
        self.sums = self.total[: self.rows * width].view(self.rows, width)
        self.squares = self.total[self.rows * width :]
        self.added, self.used = torch.zeros_like(self.sums), torch.zeros_like(self.sums)
        self.spans = [(0, 0)] * self.rows
        self.handles: set[int] = set()
        self.scale: Any = 1.0

    def _hook_all(self) -> None:
        for row, parameter in enumerate(self.engine.hooked()):
            if parameter is not None and row not in self.handles:
                self.handles.add(row)
                parameter.register_hook(functools.partial(self._add, row))

    def _add(self, row: int, gradient: Any) -> None:
        if self.active and not self.process.testing:
            with self._trying():
                self.added[row, : self.sample.counts[row]].add_(elements(gradient, *self.sample.place(row)))
                self.filled = True

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """What fails in here ends the comparison of this step, and not the training."""
        try:
            yield
        except Exception as error:
            self.failed = error

    def _arm(self) -> None:
        """Decide whether the next step is compared, by its number alone: the same on every process."""
        self.index += 1
        self.micro_batches = 0
        self.filled = self.finished = False
        self.failed = None
        self.active = self.index <= DENSE or self.index % EVERY == 0
        if self.active:
            self.sample.draw(self.index)
            for tensor in (self.total, self.added, self.used):
                tensor.zero_()
            self.spans = [(0, 0)] * self.rows

    def micro_batch(self) -> None:
        """A backward pass begins: what the last one left is added up."""
        if self.process.testing:
            return
        with self.record.quietly("gradients"):
            self.begin()
        if not self.ready:
            return
        if self.finished:
            self._arm()
        with self._trying():
            self._fold()
            if len(self.handles) < self.rows:
                self._hook_all()

    def _fold(self) -> None:
        if not self.filled:
            return
        self.filled = False
        self.micro_batches += 1
        self.sums.add_(self.added)
        self.squares.add_(self.added.square().sum(dim=1))
        self.added.zero_()

    def _before_inner_step(self, optimizer: Any, *_: Any) -> None:
        """DeepSpeed's inner optimizer is about to use flat gradients, of some parameters in each call."""
        if self.active and not self.finished:
            with self._trying():
                self.scale = self.engine.scale()
                self._take(optimizer)

    def before_step(self) -> None:
        """Gradients are whole and not clipped yet, where no engine steps by itself."""
        if not self.ready or self.finished or isinstance(self.engine, DeepSpeed):
            return
        if self.active:
            with self._trying():
                self._take()
        self.step_over()

    def _take(self, optimizer: Any = None) -> None:
        for row, start, gradient in self.engine.pieces(optimizer):
            first, last = self.sample.within(row, start, start + int(gradient.numel()))
            if first < last:
                offset, stride, _ = self.sample.place(row)
                part = elements(gradient, offset + first * stride - start, stride, last - first)
                self.used[row, first:last].copy_(part)
                self.spans[row] = (first, last)

    def step_over(self) -> None:
        """The optimizer has what it uses: compare. Every process calls this once a step."""
        if not self.ready or self.finished:
            return
        self.finished = True
        if not self.active:
            return
        with self._trying():
            self._fold()
        with self.record.quietly("gradients"):
            # a process that failed takes part too, and shows it: the others are waiting
            if self.failed is not None:
                self.total.fill_(math.nan)
            if self.process.world > 1:
                sys.modules["torch"].distributed.all_reduce(self.total)
            if self.failed is not None:
                self.skipped += 1
                self.record.trouble("gradients", self.failed)
            elif not any(last for _, last in self.spans):
                # this process updates none of the elements, or the engine skipped the step
                self.skipped += 1
            else:
                self._compare()

    def _compare(self) -> None:
        torch = sys.modules["torch"]
        spans = torch.tensor(self.spans, device=self.device)
        place = torch.arange(self.width, device=self.device)
        inside = (place >= spans[:, :1]) & (place < spans[:, 1:])
        scale: Any = self.scale if isinstance(self.engine, DeepSpeed) else 1.0
        if hasattr(scale, "to"):
            scale = scale.to(self.device)
        factor = scale / self.engine.divisor
        self.sums.mul_(factor).mul_(inside)
        self.used.mul_(inside)
        true, used = self.sums.square().sum(dim=1).sqrt(), self.used.square().sum(dim=1).sqrt()
        error = self.used.sub_(self.sums).square().sum(dim=1).sqrt()
        counts = torch.tensor(self.sample.counts, device=self.device)
        share = (spans[:, 1] - spans[:, 0]) / counts
        # what was added up sets the size of the roundings, also where it cancels out
        parts = (self.squares * share).sqrt() * factor
        additions = self.process.world + max(1, self.micro_batches) + 2
        allowed = tolerance(self.unit, additions)
        floor = additions * self.smallest * math.sqrt(self.width)
        limit = allowed * torch.maximum(true, parts) + floor * factor
        # where autograd itself gave no number or nothing at all, there is nothing to hold it against
        known = torch.isfinite(self.squares) & torch.isfinite(true) & (self.squares > 0)
        ratio = torch.where(known, (error / limit).nan_to_num(nan=math.inf, posinf=math.inf), 0.0)
        worst = ratio.argmax()
        scalars = {
            "ratio": [ratio[worst]],
            "row": [worst],
            "error": [error[worst]],
            "true": [true[worst]],
            "used": [used[worst]],
            "known": [(known & (share > 0)).sum()],
            "broken": [(ratio > 1).sum()],
        }
        compared = sum(last - first for first, last in self.spans)
        facts = {"step": self.process.base + self.index, "elements": compared, "allowed": allowed}
        self.readings.append(Reading(scalars, facts))

    def settle(self, *, wait: bool = False) -> None:
        while self.readings and (wait or len(self.readings) > 1 or self.readings[0].ready()):
            with self.record.quietly("gradients"):
                self._judge(self.readings.pop(0))

    def _judge(self, reading: Reading) -> None:
        values = {name: numbers[0] for name, numbers in reading.take().items()}
        facts = reading.known
        if not values["known"]:
            self.skipped += 1
            return
        self.checks += 1
        self.steps = [*self.steps[:1], facts["step"]]
        self.last = {**facts, "parameters": int(values["known"])}
        self.largest = max(self.largest, min(values["ratio"], 1e30) * facts["allowed"])
        if values["ratio"] <= 1:
            if self.corrupt is None:
                self.contract.seen("gradients", "true")
            if self.checks & (self.checks - 1) == 0:
                self.report()
            return
        self.corrupt_checks += 1
        if self.corrupt is not None:
            return
        name, broken = self.names[int(values["row"])], int(values["broken"])
        self.corrupt = {
            "first_corrupt": facts["step"],
            "parameter": name,
            "broken": broken,
            "true_norm": _number(values["true"]),
            "used_norm": _number(values["used"]),
            "error": _number(values["error"]),
        }
        self.report()
        message = (
            f"gradients are corrupt: {name}: the optimizer uses a gradient of norm {values['used']:.4g}, "
            f"that of the batch is {values['true']:.4g}, their difference {values['error']:.3g}; "
            f"{broken} of {int(values['known'])} parameters here are wrong"
        )
        self.contract.seen("gradients", "corrupt", step=facts["step"], message=message)

    def report(self) -> None:
        if not self.ready or self.reported == (self.checks, self.skipped):
            return
        self.reported = (self.checks, self.skipped)
        state = "corrupt" if self.corrupt else "true" if self.checks else "unknown"
        fields: dict[str, Any] = {
            "state": state,
            "engine": type(self.engine).__name__,
            "checks": self.checks,
            "skipped": self.skipped,
            "corrupt_checks": self.corrupt_checks,
        }
        if self.checks:
            fields |= {
                "first_step": self.steps[0],
                "last_step": self.steps[-1],
                "parameters": self.last["parameters"],
                "elements": self.last["elements"],
                "largest_error": _number(self.largest),
                "allowed": round(self.last["allowed"], 6),
            }
        else:
            fields["reason"] = "no optimizer step was compared"
        self.record.write("gradients", **fields, **(self.corrupt or {}))

    def ends(self) -> None:
        with self.record.quietly("gradients"):
            self.settle(wait=True)
            self.report()


def elements(tensor: Any, offset: int, stride: int, count: int) -> Any:
    """`count` elements of the flattened tensor, `stride` apart; without copying it where that can be."""
    if tensor.is_contiguous():
        return tensor.view(-1)[offset : offset + (count - 1) * stride + 1 : stride]
    torch = sys.modules["torch"]
    places = torch.arange(count, device=tensor.device) * stride + offset
    return tensor[torch.unravel_index(places, tensor.shape)]


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _agreed(digest: str, rank: int, world: int) -> bool:
    """Whether every process is here with hooks on the same parameters.

    Asked once, through the store that the processes met at: a process that has no probe never answers, and
    a collective would wait for it. Rank 0 decides, so that all do the same.
    """
    distributed = sys.modules["torch"].distributed
    if not distributed.is_initialized() or distributed.get_world_size() != world:
        return False
    try:
        store = distributed.distributed_c10d._get_default_store()
        here, lacking, decision = (f"launch/gradients/{name}" for name in (digest or "none", "none", "decision"))
        count, end = store.add(here, 1), time.monotonic() + AGREEMENT
        if rank:
            store.wait([decision], datetime.timedelta(seconds=AGREEMENT + 30))
            return bool(store.get(decision) == b"yes")
        while count < world and not store.add(lacking, 0) and time.monotonic() <= end:
            time.sleep(0.01)
            count = store.add(here, 0)
        agreed = bool(digest) and bool(count == world)
        store.set(decision, "yes" if agreed else "no")
        return agreed
    except Exception:
        return False
