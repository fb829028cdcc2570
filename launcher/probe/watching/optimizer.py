"""The optimizer, DeepSpeed's engine around it, and whether weights move.

A learning rate below what a weight's format can add, a frozen model, or an optimizer that holds
other parameters leave losses that look well. So a sample of the weights that the optimizer updates
is compared with their values before the first step. Where an engine keeps fp32 copies they are
sampled, as they move before their bfloat16 copies do.
"""

import os
import re
import sys
from typing import Any

from .gradients import ElementSample
from .model import PeakMemory
from .process import ProbePiece, Process, Tensor, keep_finite

SAMPLED = 64  # gradients, each this small, that stand for a norm nobody computes
SMALL = 2**16
ELEMENTS = 2**18  # of all tensors together, about: 1 MiB in fp32
FLOOR = 2.0**-40  # smaller movements do not count: from exactly 0, every learning rate leads away
CHECKPOINT = re.compile(r"(?:step_|checkpoint-)(\d+)")
# deepspeed/runtime/zero/stage3.py, stage_1_and_2.py, runtime/bf16_optimizer.py
_MASTERS = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
)


class Optimizer(ProbePiece):
    """The optimizer of this run; `scaled`: a loss scaler expects overflows."""

    def __init__(self, process: Process, memory: PeakMemory) -> None:
        super().__init__(process)
        self.memory = memory
        self.inner: Any = None
        self.engine: Any = None
        self.scaled = False
        self.small: list[Tensor] | None = None

    def saw(self, optimizer: Any, plugin: Any = None) -> None:
        """The optimizer, and accelerate's DeepSpeed plugin: what was asked for."""
        self.inner = optimizer
        stage = getattr(plugin, "zero_stage", None)
        self.record.write("optimizer", **_describe_class(optimizer), zero_stage=stage)

    def saw_engine(self, engine: Any) -> None:
        """DeepSpeed's engine: what is in force."""
        self.engine = engine
        self.scaled = bool(engine.fp16_enabled())
        outer = type(engine.optimizer).__name__
        stage = engine.zero_optimization_stage()
        self.record.write("engine", **_describe_class(engine), optimizer=outer, zero_stage=stage)
        step = engine.step

        def first_step(*args: Any, **kwargs: Any) -> Any:
            self.memory.mark("gradients")
            vars(engine).pop("step", None)
            return step(*args, **kwargs)

        vars(engine)["step"] = first_step

    def sample_norm(self, optimizer: Any) -> Tensor:
        """A norm of a few small gradients, on the device: not finite if any gradient is not."""
        if self.small is None:
            trained = [each for each in _collect_parameters(optimizer) if each.grad is not None]
            trained.sort(key=lambda parameter: parameter.numel())
            small = [parameter for parameter in trained if parameter.numel() <= SMALL]
            if not small:
                small = trained
            self.small = small[:SAMPLED]
        gradients = [_get_local_part(each.grad) for each in self.small if each.grad is not None]
        if not gradients:
            return None
        torch = sys.modules["torch"]
        norms = torch._foreach_norm(gradients)
        return torch.stack([norm.float() for norm in norms]).sum()

    def learning_rate(self) -> float | None:
        """The highest of all groups; None if a device holds it."""
        rates = []
        for group in getattr(self.inner, "param_groups", ()):
            rate = group.get("lr")
            if getattr(rate, "is_cuda", False):
                return None
            if rate is not None:
                rates.append(float(rate))
        return max(rates, default=None)

    def steps_done(self, checkpoint: str) -> int:
        """The steps before a checkpoint: by its name, by the engine, by AdamW's own count."""
        name = os.path.basename(checkpoint.rstrip("/"))
        numbered = CHECKPOINT.fullmatch(name)
        if numbered is not None:
            return int(numbered[1])
        steps = getattr(self.engine, "global_steps", None)
        if isinstance(steps, int) and steps:
            return steps
        states = getattr(self.inner, "state", None) or {}
        counts = [0]
        for state in states.values():
            if isinstance(state, dict) and state.get("step") is not None:
                counts.append(int(state["step"]))
        return max(counts)


def _collect_parameters(optimizer: Any) -> list[Tensor]:
    parameters = []
    for group in getattr(optimizer, "param_groups", ()):
        parameters.extend(group["params"])
    return parameters


def _get_local_part(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this process has."""
    return getattr(tensor, "_local_tensor", tensor)


def _describe_class(value: Any) -> dict[str, str]:
    return {"class": f"{type(value).__module__}.{type(value).__name__}"}


class Movement(ProbePiece):
    """A sample of the weights from before the first step, and how far they have moved."""

    def __init__(self, process: Process, optimizer: Optimizer) -> None:
        super().__init__(process)
        self.optimizer = optimizer
        self.begun = False
        self.before: Any = None
        self.stepping: Any = None
        self.reported = 0

    def begin(self, stepping: Any = None) -> None:
        """An optimizer, or else that of the engine, is about to take its first step."""
        if self.begun:
            return
        self.begun = True
        # `prepare` may have replaced the optimizer that it was given
        self.stepping = stepping or self.optimizer.inner
        with self.record.quietly("weights"):
            tensors = self._collect_tensors()
            if not tensors:
                self.record.write("weights", reason="the optimizer's weights were not found")
                return
            sizes = [int(tensor.numel()) for tensor in tensors]
            self.sample = ElementSample(sizes, max(16, ELEMENTS // len(sizes)))
            self.sample.draw(0)
            self.before = self._pick_all(tensors)

    def _collect_tensors(self) -> list[Tensor]:
        """This process's part of what its optimizer updates."""
        return [_get_local_part(key) for key in self._collect_keys()]

    def _collect_keys(self) -> list[Tensor]:
        """What this process's optimizer updates, without tensors that have no element here."""
        outer = getattr(self.optimizer.engine, "optimizer", None)
        masters = None
        for name in _MASTERS:
            masters = masters or getattr(outer, name, None)
        if not masters:
            parameters = _collect_parameters(outer or self.stepping)
            masters = [parameter for parameter in parameters if parameter.requires_grad]
        return [tensor for tensor in masters if _get_local_part(tensor).numel()]

    def _pick_all(self, tensors: list[Tensor]) -> Tensor:
        if [int(tensor.numel()) for tensor in tensors] != self.sample.sizes:
            raise RuntimeError("the optimizer has other tensors than before its first step")
        torch = sys.modules["torch"]
        with torch.no_grad():
            parts = []
            for row, tensor in enumerate(tensors):
                part = self.sample.pick(row, tensor).float()
                # offloaded tensors may lie on several devices
                parts.append(part.to(tensors[0].device))
            return torch.cat(parts)

    def report(self) -> None:
        step = self.process.step
        if self.before is None or step == self.reported:
            return
        self.reported = step
        with self.record.quietly("weights"):
            keys = self._collect_keys()
            change = (self._pick_all(list(map(_get_local_part, keys))) - self.before).abs()
            # NaN counts as moved
            moved = ~(change <= FLOOR)
            used = self._find_used(keys).to(change.device)
            elements = self._count_elements().to(change.device) * used
            self.record.write(
                "weights",
                step=self.process.at,
                steps=step,
                sampled=int(moved.numel()),
                moved=int(moved.sum()),
                unused=int((~used).sum()),
                elements=float(elements.sum()),
                share=float((elements * moved).sum() / elements.sum()),
                largest=keep_finite(float(change.max())),
                tensors=len(self.sample.sizes),
            )

    def _count_elements(self) -> Tensor:
        """How many weights each element of the sample stands for: most are of small tensors."""
        torch = sys.modules["torch"]
        counts = torch.tensor(self.sample.counts)
        each = torch.tensor(self.sample.sizes, dtype=torch.float64) / counts
        return torch.repeat_interleave(each, counts)

    def _find_used(self, keys: list[Tensor]) -> Tensor:
        """Which elements of the sample ever had a gradient; all if the optimizer does not tell.

        An embedding's rows of tokens that the data do not have never do. Adam's second moment is 0
        then (torch/optim/adam.py::_single_tensor_adam[exp_avg_sq.mul_ #2]).
        """
        torch = sys.modules["torch"]
        inner = getattr(self.optimizer.engine, "optimizer", None) or self.stepping
        while getattr(inner, "optimizer", None) is not None:
            inner = inner.optimizer
        states = getattr(inner, "state", None) or {}
        parts = []
        for row, key in enumerate(keys):
            moment = _get_local_part(states.get(key, {}).get("exp_avg_sq"))
            part = torch.ones(self.sample.counts[row], dtype=torch.bool)
            if moment is not None and moment.numel() == self.sample.sizes[row]:
                part = self.sample.pick(row, moment) != 0
            # offloaded moments may lie on several devices
            parts.append(part.cpu())
        used = torch.cat(parts)
        # where nothing had a gradient, all of it is still
        return used if bool(used.any()) else ~used
