"""The optimizer and DeepSpeed's engine around it: what is in force, and whether weights move.

A learning rate below what a weight's format can add, a frozen model or an optimizer that holds other
parameters leave losses that look well. So a sample of the weights that the optimizer updates is compared
with what it was before the first step: of the fp32 copies where an engine keeps some, for they move where
their bfloat16 copies do not yet.
"""

import os
import re
import sys
from typing import Any

from .gradients import ElementSample, elements
from .model import PeakMemory
from .process import ProbePiece, Process, finite

SAMPLED = 64  # tensors, each this small, where nobody computes a norm
SMALL = 2**16
ELEMENTS = 2**18  # of all tensors together, about: 1 MiB in fp32
FLOOR = 2.0**-40  # an element that moved by less has not moved: from exactly 0, every learning rate leads away
# deepspeed/runtime/zero/stage3.py, stage_1_and_2.py, runtime/bf16_optimizer.py
_MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")


class Optimizer(ProbePiece):
    """The optimizer of this run. `scaled` where a loss scaler meets overflows: they are its business."""

    def __init__(self, process: Process, memory: PeakMemory) -> None:
        super().__init__(process)
        self.memory = memory
        self.given: Any = None
        self.engine: Any = None
        self.scaled = False
        self.small: list[Any] | None = None

    def saw(self, optimizer: Any, accelerator: Any) -> None:
        self.given = optimizer
        plugin = getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None)
        self.record.write("optimizer", **_class_of(optimizer), zero_stage=getattr(plugin, "zero_stage", None))

    def saw_engine(self, engine: Any) -> None:
        """DeepSpeed after it was set up: what is in force, not what was asked for."""
        self.engine, original = engine, engine.step
        self.scaled = bool(getattr(engine, "fp16_enabled", bool)())
        outer, stage = type(getattr(engine, "optimizer", None)).__name__, engine.zero_optimization_stage()
        self.record.write("engine", **_class_of(engine), optimizer=outer, zero_stage=stage)

        def first_step(*args: Any, **kwargs: Any) -> Any:
            self.memory.mark("gradients")
            vars(engine).pop("step", None)
            return original(*args, **kwargs)

        vars(engine)["step"] = first_step

    def norm(self) -> Any:
        return self.engine.get_global_grad_norm() if self.engine is not None else None

    def sample(self, optimizer: Any) -> Any:
        """A norm of a few small gradients, on the device; None where there are none."""
        if self.small is None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            trained = [p for p in trained if getattr(p, "grad", None) is not None]
            small = [p for p in trained if p.numel() <= SMALL]
            self.small = (small or sorted(trained, key=lambda p: p.numel()))[:SAMPLED]
        torch = sys.modules["torch"]
        found = [getattr(p.grad, "_local_tensor", p.grad) for p in self.small if p.grad is not None]
        return torch.stack([n.float() for n in torch._foreach_norm(found)]).sum() if found else None

    def learning_rate(self) -> float | None:
        groups = self.given.param_groups if self.given is not None else []
        rates = [rate for group in groups if (rate := group.get("lr")) is not None]
        if not rates or any(getattr(rate, "is_cuda", False) for rate in rates):
            return None
        return max(map(float, rates))

    def steps_done(self, checkpoint: str) -> int:
        """Steps that a checkpoint has behind it: by its name, by the engine, by AdamW's own count."""
        name = os.path.basename(checkpoint.rstrip("/"))
        if (named := re.fullmatch(r"(?:step_|checkpoint-)(\d+)", name)) is not None:
            return int(named[1])
        counted = getattr(self.engine, "global_steps", None)
        if isinstance(counted, int) and counted:
            return counted
        states = getattr(self.given, "state", None) or {}
        counts = (state.get("step") for state in states.values() if isinstance(state, dict))
        return max((int(count) for count in counts if count is not None), default=0)


def _class_of(made: Any) -> dict[str, str]:
    return {"class": f"{type(made).__module__}.{type(made).__name__}"}


class Movement(ProbePiece):
    """The sample before the first step, and what has become of it."""

    def __init__(self, process: Process, optimizer: Optimizer) -> None:
        super().__init__(process)
        self.optimizer = optimizer
        self.begun = False
        self.before: Any = None
        self.stepping: Any = None
        self.reported = 0

    def begin(self, stepping: Any = None) -> None:
        """An optimizer is about to take its first step: the given one, or that of the engine."""
        if self.begun:
            return
        self.begun = True
        # `prepare` may have put another one in place of the one that it was given
        self.stepping = stepping or self.optimizer.given
        with self.record.quietly("weights"):
            tensors = self._tensors()
            sizes = [int(tensor.numel()) for tensor in tensors]
            if not sizes:
                self.record.write("weights", reason="the optimizer's weights were not found")
                return
            self.sample = ElementSample(sizes, max(16, ELEMENTS // len(sizes)))
            self.sample.draw(0)
            self.before = self._taken(tensors)

    def _tensors(self) -> list[Any]:
        """What this process's optimizer updates, without what has no element here."""
        outer = getattr(self.optimizer.engine, "optimizer", None)
        masters = next((m for name in _MASTERS if (m := getattr(outer, name, None))), None)
        if masters is None:
            groups = getattr(outer or self.stepping, "param_groups", ())
            masters = [p for group in groups for p in group["params"] if p.requires_grad]
        local = (getattr(tensor, "_local_tensor", tensor) for tensor in masters)
        return [tensor for tensor in local if tensor.numel()]

    def _taken(self, tensors: list[Any]) -> Any:
        torch, sample = sys.modules["torch"], self.sample
        if [int(tensor.numel()) for tensor in tensors] != sample.sizes:
            raise RuntimeError("the optimizer has other tensors than before its first step")
        with torch.no_grad():
            parts = [elements(tensor, *sample.place(row)) for row, tensor in enumerate(tensors)]
            # one device, whichever the optimizer's tensors are on
            return torch.cat([part.detach().float().to(parts[0].device) for part in parts])

    def report(self) -> None:
        step = self.process.step
        if self.before is None or step == self.reported:
            return
        self.reported = step
        with self.record.quietly("weights"):
            change = (self._taken(self._tensors()) - self.before).abs()
            # what is no number has moved as well
            sampled, still = int(change.numel()), int((change <= FLOOR).sum())
            self.record.write(
                "weights",
                step=self.process.at,
                steps=step,
                sampled=sampled,
                moved=sampled - still,
                largest=finite(float(change.max())),
                tensors=len(self.sample.sizes),
            )
