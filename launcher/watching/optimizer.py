"""The optimizer and DeepSpeed's engine around it: what is in force, and the state that lies in memory."""

from __future__ import annotations

import collections
import os
import re
import sys
from typing import Any

from .memory import Memory
from .process import Process

SAMPLED = 64  # tensors, each this small, where nobody computes a norm
SMALL = 2**16


class Optimizer:
    """The optimizer of this run. `scaled` where a loss scaler meets overflows: they are its business."""

    def __init__(self, process: Process, memory: Memory) -> None:
        self.record = process.record
        self.memory = memory
        self.given: Any = None
        self.engine: Any = None
        self.scaled = False
        self.small: list[Any] | None = None

    def saw(self, optimizer: Any, accelerator: Any) -> None:
        self.given = optimizer
        plugin = getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None)
        self.record.write(
            "optimizer",
            **{"class": f"{type(optimizer).__module__}.{type(optimizer).__name__}"},
            zero_stage=getattr(plugin, "zero_stage", None),
        )

    def saw_engine(self, engine: Any) -> None:
        """DeepSpeed after it was set up: what is in force, not what was asked for."""
        self.engine = engine
        settings = {}
        for part in ("optimizer", "param"):
            offload = getattr(engine, f"zero_offload_{part}", lambda: None)()
            device = getattr(offload, "device", None)
            settings[f"offload_{part}"] = (
                None if device is None else str(getattr(device, "value", device))
            )
        fp16 = bool(getattr(engine, "fp16_enabled", bool)())
        self.scaled = fp16
        bf16 = bool(getattr(engine, "bfloat16_enabled", bool)())
        self.record.write(
            "engine", **{"class": f"{type(engine).__module__}.{type(engine).__name__}"},
            optimizer=type(getattr(engine, "optimizer", None)).__name__,
            zero_stage=engine.zero_optimization_stage(),
            precision="fp16" if fp16 else "bf16" if bf16 else "fp32", **settings,
        )  # fmt: skip
        self._mark_before_first_step(engine)

    def _mark_before_first_step(self, engine: Any) -> None:
        original = engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self.memory.mark("gradients")
            vars(engine).pop("step", None)
            return original(*args, **kwargs)

        vars(engine)["step"] = step

    def norm(self) -> Any:
        """The norm of all gradients that an engine has; None where there is none."""
        return self.engine.get_global_grad_norm() if self.engine is not None else None

    def sample(self, optimizer: Any) -> Any:
        """A norm of a few small gradients, on the device; None where there are none."""
        if self.small is None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            trained = [p for p in trained if getattr(p, "grad", None) is not None]
            small = [p for p in trained if p.numel() <= SMALL]
            self.small = (small or sorted(trained, key=lambda p: p.numel()))[:SAMPLED]
        torch = sys.modules["torch"]
        found = [p.grad for p in self.small if p.grad is not None]
        found = [getattr(grad, "_local_tensor", grad) for grad in found]
        return torch.stack([n.float() for n in torch._foreach_norm(found)]).sum() if found else None

    def learning_rate(self) -> float | None:
        """The highest of the groups, where it lies on the host."""
        groups = self.given.param_groups if self.given is not None else []
        rates = [rate for group in groups if (rate := group.get("lr")) is not None]
        if not rates or any(getattr(rate, "is_cuda", False) for rate in rates):
            return None
        return max(map(float, rates))

    def tell_state(self) -> None:
        """After the first step: the state that really lies in memory, on this rank."""
        outer = getattr(self.engine, "optimizer", None) or self.given
        if outer is None:
            return
        # ZeRO's optimizer holds the one that steps
        inner = getattr(outer, "optimizer", outer)
        states: dict[str, dict[str, Any]] = {}
        elements: collections.Counter[tuple[str, str]] = collections.Counter()
        size = 0
        for state in list(inner.state.values()):
            for name, tensor in state.items() if isinstance(state, dict) else ():
                if not hasattr(tensor, "element_size") or not tensor.dim():
                    continue
                # torchao keeps 8 bits behind a tensor that says float32
                held: Any = getattr(tensor, "codes", tensor)
                size += held.numel() * held.element_size()
                dtype = str(held.dtype).removeprefix("torch.")
                elements[name, dtype] += held.numel()
                # bitsandbytes leaves small tensors at 32 bits: what most of them are counts
                if elements[name, dtype] < max(n for (of, _), n in elements.items() if of == name):
                    continue
                states[name] = {
                    "dtype": dtype,
                    "bits": 8 * held.element_size(),
                    "device": str(held.device).partition(":")[0],
                }
        updated = next((p for group in inner.param_groups for p in group["params"]), None)
        self.record.write(
            "optimizer_state", **{"class": f"{type(inner).__module__}.{type(inner).__name__}"},
            states=states, gib=round(size / 2**30, 4),
            updates=None if updated is None else str(updated.dtype).removeprefix("torch."),
        )  # fmt: skip

    def steps_done(self, checkpoint: str) -> int:
        """Steps that a checkpoint has behind it: by its name, by the engine, by AdamW's own count."""
        name = os.path.basename(checkpoint.rstrip("/"))
        named = re.fullmatch(r"(?:step_|checkpoint-)(\d+)", name)
        if named is not None:
            return int(named[1])
        counted = getattr(self.engine, "global_steps", None)
        if isinstance(counted, int) and counted:
            return counted
        states = getattr(self.given, "state", None) or {}
        counts = (state.get("step") for state in states.values() if isinstance(state, dict))
        return max((int(count) for count in counts if count is not None), default=0)
