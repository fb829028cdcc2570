"""Whether the optimizer uses the gradients that autograd computed.

An engine between backward and optimizer adds up micro-batches, averages over processes, clips, and
may lose or mix up data on the way (DeepSpeed 0.18.5 to 0.18.9 with `overlap_comm`: DeepSpeed's PRs
7805, 7965 and 8080). So a hook on every trained parameter copies a sample of its gradient in each
micro-batch, before any engine reads it. The samples are summed in fp32, averaged over the processes
by an all-reduce of their own, and compared with the same elements of what the optimizer is about to
use. docs/gradients.md gives the tolerance and the cost.
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
from dataclasses import dataclass
from typing import Any

from .contract import Contract
from .engines import DeepSpeed, Plain, Unsupported, find_engine
from .model import count_elements
from .process import Module, ProbePiece, Process, Tensor
from .steps import Reading

ELEMENTS = 2**21  # of all parameters, at most: three fp32 buffers and one temporary, 32 MiB
ROW = 4096  # of one parameter, at most; one with fewer elements is compared whole
DENSE = 8  # the first steps, which are all compared; after them every `EVERY`th
EVERY = 8
AGREEMENT = 60.0  # seconds to wait, once, until every process has its hooks
STRICTNESS = 4.0  # standard deviations of the rounding error that still pass for rounding
LARGEST_RATIO = 1e30


def compute_tolerance(unit: float, additions: int) -> float:
    """The relative error, in L2 norm, that rounding alone explains.

    Each of `additions` roundings is off by up to `unit` of a partial sum, uniformly, so by
    unit / sqrt(3) in the mean, and independent errors add up by their squares.
    """
    return max(1e-4, STRICTNESS * unit * math.sqrt(additions / 3))


class ElementSample:
    """Some elements of each parameter: `counts` of them, `strides` apart, from `offsets` on."""

    def __init__(self, sizes: list[int], width: int) -> None:
        self.sizes = sizes
        self.counts = [min(size, width) for size in sizes]
        self.strides = []
        self.offsets = [0] * len(sizes)
        for size, count in zip(sizes, self.counts, strict=True):
            stride = max(1, (size - 1) // max(1, count - 1))
            if stride % 2 == 0:
                # an even stride would meet the same columns in every row of a matrix
                stride -= 1
            self.strides.append(stride)

    def draw(self, seed: int) -> None:
        """Choose other offsets."""
        dice = random.Random(seed)
        for row, size in enumerate(self.sizes):
            slack = size - 1 - (self.counts[row] - 1) * self.strides[row]
            self.offsets[row] = int(dice.random() * (slack + 1))

    def pick(self, row: int, tensor: Tensor) -> Tensor:
        """The sample of a whole parameter, or of a tensor of its size."""
        offset = self.offsets[row]
        return pick_elements(tensor, offset, self.strides[row], self.counts[row])

    def pick_from_part(self, row: int, tensor: Tensor, start: int, first: int, last: int) -> Tensor:
        """Samples `first` to `last` of a tensor that holds a parameter from element `start` on."""
        stride = self.strides[row]
        offset = self.offsets[row] + first * stride - start
        return pick_elements(tensor, offset, stride, last - first)

    def within(self, row: int, start: int, end: int) -> tuple[int, int]:
        """The range of samples that lie in the elements `start` to `end` of a parameter."""
        offset = self.offsets[row]
        stride = self.strides[row]
        first = max(0, -((offset - start) // stride))
        last = min(self.counts[row], -((offset - end) // stride))
        return first, max(first, last)


def pick_elements(tensor: Tensor, offset: int, stride: int, count: int) -> Tensor:
    """`count` elements of the flattened tensor, `stride` apart; a view if the tensor allows one."""
    if tensor.is_contiguous():
        start = tensor.storage_offset() + offset
        return tensor.as_strided((count,), (stride,), start)
    torch = sys.modules["torch"]
    places = torch.arange(count, device=tensor.device) * stride + offset
    return tensor[torch.unravel_index(places, tensor.shape)]


class SampleSums:
    """Sampled gradients on the device: a row for each parameter, with up to `width` elements.

    `added` are those of the micro-batch that is computed, `sums` those of the whole step, `used`
    those that the optimizer uses. `squares` adds up, by row, the squares of what each micro-batch
    added. `total` is the memory of `sums` and `squares`, so that one all-reduce does for both.
    """

    def __init__(self, counts: list[int], width: int, device: Any) -> None:
        torch = sys.modules["torch"]
        rows = len(counts)
        end = rows * width
        self.total = torch.zeros(end + rows, dtype=torch.float32, device=device)
        self.sums = self.total[:end].view(rows, width)
        self.squares = self.total[end:]
        self.added = torch.zeros_like(self.sums)
        self.used = torch.zeros_like(self.sums)
        # views that would otherwise be created in every step
        self.targets = [row[:count] for row, count in zip(self.added, counts, strict=True)]
        self.used_rows = list(self.used)
        self.counts = torch.tensor(counts, device=device)
        self.columns = torch.arange(width, device=device)

    def clear(self) -> None:
        self.total.zero_()
        self.added.zero_()
        self.used.zero_()

    def end_micro_batch(self) -> None:
        self.sums.add_(self.added)
        self.squares.add_(self.added.square().sum(dim=1))
        self.added.zero_()

    def keep(self, spans: Tensor, factor: Tensor | float) -> None:
        """Scale the sums as the engine does, and set to 0 what lies outside of the spans."""
        inside = (self.columns >= spans[:, :1]) & (self.columns < spans[:, 1:])
        self.sums.mul_(factor).mul_(inside)
        self.used.mul_(inside)


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """A step whose comparison is on its way from the device.

    `elements` were compared; their relative error may be `allowed`.
    """

    step: int
    elements: int
    allowed: float


class Gradients(ProbePiece):
    """The comparison, from the first training pass on; `reason` says why there is none.

    `index` is the number of the open optimizer step, `active` whether it is compared. `filled`: the
    hooks have added samples that are not folded into the sums yet. `finished`: the step was
    compared.
    """

    def __init__(self, process: Process, contract: Contract) -> None:
        super().__init__(process)
        self.contract = contract
        self.model: Module = None
        self.engine: Plain | None = None
        self.reason: str | None = None
        self.ready = False
        self.active = False
        self.filled = False
        self.finished = False
        self.failed: BaseException | None = None
        self.handles: dict[int, Any] = {}
        self.readings: list[Reading[ComparedStep]] = []
        self.index = 0
        self.micro_batches = 0
        self.checks = 0
        self.skipped = 0
        self.corrupt_checks = 0
        self.corrupt: dict[str, float | str | None] = {}
        self.largest = 0.0
        self.first_step = 0
        self.last: dict[str, float | None] = {}
        self.reported: tuple[int, int] | None = None

    def prepared(self, model: Module) -> None:
        """A model in the form in which it will be trained: an engine, a wrapper, or itself."""
        if any(parameter.requires_grad for parameter in model.parameters()):
            self.model = model

    def begin(self) -> None:
        """Set up the hooks before the first backward pass; on every process, or on none."""
        if self.ready or self.reason is not None:
            return
        digest = ""
        try:
            self._prepare_sample()
            layout = repr((self.names, self.sample.sizes))
            digest = hashlib.sha256(layout.encode()).hexdigest()
        except Unsupported as unsupported:
            self.reason = str(unsupported)
        except Exception as error:
            self.reason = repr(error)
        world = self.process.world
        if self.settings.checks("gradients") and world > 1:
            agreed = _all_agree(digest, self.process.rank, world)
            if self.reason is None and not agreed:
                self.reason = "not every process could set up its hooks"
        if self.reason is not None:
            self.contract.note("gradients", "unknown")
            self.record.write("gradients", state="unknown", reason=self.reason)
            return
        if isinstance(self.engine, DeepSpeed):
            for optimizer in self.engine.steppers:
                optimizer.register_step_pre_hook(self._take_before_inner_step)
        self.ready = True
        self._begin_next_step()

    def _prepare_sample(self) -> None:
        """Choose what is compared, and where its sums are kept. Raises Unsupported."""
        if not self.settings.checks("gradients"):
            raise Unsupported("`expect: {gradients: any}` switches the comparison off")
        if self.model is None:
            raise Unsupported("no model was seen on its way to the trainer")
        torch = sys.modules["torch"]
        trained = _find_trained_parameters(self.model)
        if not trained:
            raise Unsupported("no parameter is trained")
        engine = find_engine(self.model, trained, self.process.world)
        self.engine = engine
        self.names = list(trained)
        sizes = [count_elements(parameter) for parameter in trained.values()]
        fitting = ELEMENTS // len(sizes)
        width = max(16, min(ROW, fitting, max(sizes)))
        self.sample = ElementSample(sizes, width)
        device = next(iter(trained.values())).device
        if device.type == "cpu" and torch.cuda.is_available() and not self.settings.cpu:
            # offloaded parameters come to the device for their gradients
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        limits = [torch.finfo(dtype) for dtype in engine.formats if dtype.is_floating_point]
        self.unit = max(limit.eps for limit in limits) / 2
        self.smallest = max(limit.smallest_normal * limit.eps for limit in limits)
        self.sums = SampleSums(self.sample.counts, width, device)
        self.spans = [(0, 0)] * len(sizes)
        self.scale: Tensor | float = 1.0

    def _hook_all(self, engine: Plain) -> None:
        """Hook the rows that have a tensor by now and no hook yet."""
        if len(self.handles) == len(self.names):
            return
        for row, tensor in enumerate(engine.list_hooked()):
            if tensor is not None and row not in self.handles:
                target = self.sums.targets[row]
                hook = functools.partial(self._add_gradient, row, target)
                self.handles[row] = tensor.register_hook(hook)

    def unhook(self) -> None:
        """Take the hooks off, until a step that is compared begins."""
        for handle in self.handles.values():
            handle.remove()
        self.handles.clear()

    def _add_gradient(self, row: int, target: Tensor, gradient: Tensor) -> None:
        """Runs for each parameter in each backward pass, so it must be cheap."""
        if self.process.testing or not self.active:
            return
        try:
            target.add_(self.sample.pick(row, gradient))
            self.filled = True
        except Exception as error:
            self.failed = error

    @contextlib.contextmanager
    def _catch_errors(self) -> Iterator[None]:
        """An exception ends the comparison of this step, and not the training."""
        try:
            yield
        except Exception as error:
            self.failed = error

    def _begin_next_step(self) -> None:
        """Decide whether the next step is compared, by its number: the same on every process."""
        self.index += 1
        self.micro_batches = 0
        self.filled = False
        self.finished = False
        self.failed = None
        self.active = self.index <= DENSE or self.index % EVERY == 0
        if not self.active:
            self.unhook()
            return
        self.sample.draw(self.index)
        self.sums.clear()
        self.spans = [(0, 0)] * len(self.spans)

    def begin_micro_batch(self) -> None:
        """A backward pass begins: add up what the last one left."""
        if self.process.testing:
            return
        with self.record.quietly("gradients"):
            self.begin()
        if not self.ready or self.engine is None:
            return
        if self.finished:
            self._begin_next_step()
        if self.active:
            with self._catch_errors():
                self._end_micro_batch()
                self._hook_all(self.engine)

    def _end_micro_batch(self) -> None:
        if not self.filled:
            return
        self.filled = False
        self.micro_batches += 1
        self.sums.end_micro_batch()

    def _take_before_inner_step(self, optimizer: Any, *_: Any) -> None:
        """DeepSpeed's inner optimizer is about to use some of the flat gradients."""
        if self.active and not self.finished and isinstance(self.engine, DeepSpeed):
            with self._catch_errors():
                self.scale = self.engine.scale()
                self._take_used_gradients(self.engine, optimizer)

    def before_step(self) -> None:
        """Gradients are complete and not clipped yet, in a loop that calls its optimizer itself."""
        if self.finished or self.engine is None or isinstance(self.engine, DeepSpeed):
            return
        if self.active:
            with self._catch_errors():
                self._take_used_gradients(self.engine)
        self.end_step()

    def _take_used_gradients(self, engine: Plain, optimizer: Any = None) -> None:
        for row, start, gradient in engine.iterate_pieces(optimizer):
            end = start + int(gradient.numel())
            first, last = self.sample.within(row, start, end)
            if first < last:
                part = self.sample.pick_from_part(row, gradient, start, first, last)
                self.sums.used_rows[row][first:last].copy_(part)
                self.spans[row] = (first, last)

    def end_step(self) -> None:
        """The optimizer has its gradients: compare. Every process calls this once a step."""
        if not self.ready or self.finished:
            return
        self.finished = True
        if not self.active:
            return
        with self._catch_errors():
            self._end_micro_batch()
        with self.record.quietly("gradients"):
            # a process that failed takes part, as the others wait for it, and spoils the sums
            if self.failed is not None:
                self.sums.total.fill_(math.nan)
            if self.process.world > 1:
                sys.modules["torch"].distributed.all_reduce(self.sums.total)
            if self.failed is not None:
                self.skipped += 1
                self.record.trouble("gradients", self.failed)
            elif any(last for _, last in self.spans):
                self._queue_comparison()
            else:
                # this process updates none of the elements, or the engine skipped the step
                self.skipped += 1

    def _queue_comparison(self) -> None:
        """Queue the comparison on the device. `_judge_comparison` gets its result."""
        torch = sys.modules["torch"]
        engine: Any = self.engine
        sums = self.sums
        spans = torch.tensor(self.spans, device=self.device)
        scale = self.scale
        if hasattr(scale, "to"):
            scale = scale.to(self.device)
        factor = scale / engine.divisor
        sums.keep(spans, factor)
        true = _compute_norms(sums.sums)
        used = _compute_norms(sums.used)
        error = _compute_norms(sums.used.sub_(sums.sums))
        share = (spans[:, 1] - spans[:, 0]) / sums.counts
        # the summands set the size of the roundings, also where they cancel out
        summands = (sums.squares * share).sqrt() * factor
        additions = self.process.world + max(1, self.micro_batches) + 2
        allowed = compute_tolerance(self.unit, additions)
        floor = additions * self.smallest * math.sqrt(len(sums.columns))
        limit = allowed * torch.maximum(true, summands) + floor * factor
        # where autograd itself gave no number or nothing, there is nothing to compare with
        valid = torch.isfinite(sums.squares) & torch.isfinite(true) & (sums.squares > 0)
        ratio = (error / limit).nan_to_num(nan=math.inf, posinf=math.inf)
        ratio = torch.where(valid, ratio, 0.0)
        worst = ratio.argmax()
        scalars = {
            "ratio": [ratio[worst]],
            "row": [worst],
            "error": [error[worst]],
            "true": [true[worst]],
            "used": [used[worst]],
            "valid": [(valid & (share > 0)).sum()],
            "broken": [(ratio > 1).sum()],
        }
        compared = sum(last - first for first, last in self.spans)
        step = self.process.base + self.index
        self.readings.append(Reading(scalars, ComparedStep(step, compared, allowed)))

    def settle(self, *, wait: bool = False) -> None:
        while self.readings and (wait or len(self.readings) > 1 or self.readings[0].is_ready()):
            with self.record.quietly("gradients"):
                self._judge_comparison(self.readings.pop(0))

    def _judge_comparison(self, reading: Reading[ComparedStep]) -> None:
        values = {name: numbers[0] for name, numbers in reading.wait().items()}
        compared = reading.facts
        if not values["valid"]:
            self.skipped += 1
            return
        self.checks += 1
        self.first_step = self.first_step or compared.step
        ratio = min(values["ratio"], LARGEST_RATIO)
        self.largest = max(self.largest, ratio * compared.allowed)
        self.last = {
            "last_step": compared.step,
            "parameters": int(values["valid"]),
            "elements": compared.elements,
            "largest_error": _round_finite(self.largest),
            "allowed": round(compared.allowed, 6),
        }
        if values["ratio"] > 1:
            self.corrupt_checks += 1
            if not self.corrupt:
                self._tell_corrupt(compared.step, values)
            return
        if not self.corrupt:
            self.contract.saw("gradients", "true")
        if self.checks & (self.checks - 1) == 0:
            self.report()

    def _tell_corrupt(self, step: int, values: dict[str, float]) -> None:
        name = self.names[int(values["row"])]
        broken = int(values["broken"])
        self.corrupt = {
            "first_corrupt": step,
            "parameter": name,
            "broken": broken,
            "true_norm": _round_finite(values["true"]),
            "used_norm": _round_finite(values["used"]),
            "error": _round_finite(values["error"]),
        }
        self.report()
        message = (
            f"gradients are corrupt: {name}: the optimizer uses a gradient of norm "
            f"{values['used']:.4g}, that of the batch is {values['true']:.4g}, their difference "
            f"{values['error']:.3g}; {broken} of {int(values['valid'])} parameters here are wrong"
        )
        self.contract.saw("gradients", "corrupt", step=step, message=message)

    def report(self) -> None:
        if not self.ready or self.reported == (self.checks, self.skipped):
            return
        self.reported = (self.checks, self.skipped)
        if self.corrupt:
            state = "corrupt"
        elif self.checks:
            state = "true"
        else:
            state = "unknown"
        fields: dict[str, float | str | None] = {"reason": "no optimizer step was compared"}
        if self.checks:
            fields = {"first_step": self.first_step, **self.last, **self.corrupt}
        self.record.write(
            "gradients",
            state=state,
            engine=type(self.engine).__name__,
            checks=self.checks,
            skipped=self.skipped,
            corrupt_checks=self.corrupt_checks,
            **fields,
        )

    def end(self) -> None:
        self.settle(wait=True)
        self.report()


def _find_trained_parameters(model: Module) -> dict[str, Tensor]:
    """By name, without the wrapper that an engine puts around the model."""
    module: Module = getattr(model, "module", model)
    trained = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and count_elements(parameter):
            trained[name] = parameter
    return trained


def _compute_norms(rows: Tensor) -> Tensor:
    return rows.square().sum(dim=1).sqrt()


def _round_finite(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _all_agree(digest: str, rank: int, world: int) -> bool:
    """Whether every process is here with hooks on the same parameters; False if it cannot be told.

    Asked once, through the store that the processes met at: a process without a probe never
    answers, and a collective would wait for it. Rank 0 decides, so that all do the same.
    """
    distributed = sys.modules["torch"].distributed
    if not distributed.is_initialized() or distributed.get_world_size() != world:
        return False
    same = f"launch/gradients/{digest or 'none'}"
    unable = "launch/gradients/none"
    decision = "launch/gradients/decision"
    try:
        store = distributed.distributed_c10d._get_default_store()
        count = store.add(same, 1)
        if rank:
            # longer than rank 0 waits
            store.wait([decision], datetime.timedelta(seconds=AGREEMENT + 30))
            return bool(store.get(decision) == b"yes")
        end = time.monotonic() + AGREEMENT
        while count < world and not store.add(unable, 0) and time.monotonic() <= end:
            time.sleep(0.01)
            count = store.add(same, 0)
        agreed = bool(digest) and bool(count == world)
        store.set(decision, "yes" if agreed else "no")
        return agreed
    except Exception:
        return False
