"""Liger: its patches as they are applied, its kernels as they are called."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from .hooks import wrap
from .process import Process

# Modules of liger_kernel.ops whose autograd functions are counted, each under the module's name.
OPS = (
    "rms_norm", "rope", "swiglu", "geglu", "layer_norm", "cross_entropy",
    "fused_linear_cross_entropy",
)  # fmt: skip
LOSSES = ("fused_linear_cross_entropy", "cross_entropy")
PREFERENCE = "liger_kernel.chunked_loss.fused_linear_preference"


class Liger:
    """Calls of Liger's kernels by op, and the losses that its patches were to put in."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.record = process.record
        self.calls: dict[str, int] = {}
        self.losses: set[str] = set()
        self.reported: dict[str, int] = {}

    def report(self) -> None:
        """Write the calls where there were any since the last time."""
        if self.calls != self.reported:
            self.reported = dict(self.calls)
            self.record.write("liger", calls=self.reported)

    def watched(self) -> dict[str, Callable[[types.ModuleType], None]]:
        """Module name -> what to do once it is there."""
        return {
            "liger_kernel.transformers.monkey_patch": self.watch_patch,
            PREFERENCE: self.watch_preference,
            **{f"liger_kernel.ops.{name}": self.watch_op for name in OPS},
        }

    def watch_op(self, module: types.ModuleType) -> None:
        """`apply` looks `forward` up on the class at each call, so replacing it reaches every user."""
        op = module.__name__.rpartition(".")[2]
        for function in list(vars(module).values()):
            own = isinstance(function, type) and function.__module__ == module.__name__
            if own and function.__name__.endswith("Function") and "forward" in vars(function):
                wrap(function, "forward", self.counter(op))

    def watch_preference(self, module: types.ModuleType) -> None:
        wrap(module.LigerFusedLinearPreferenceBase, "forward", self.counter("preference_loss"))

    def counter(self, op: str) -> Callable[..., Any]:
        def count(original: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.process.testing:
                self.calls[op] = self.calls.get(op, 0) + 1
            return original(*args, **kwargs)

        return count

    def watch_patch(self, module: types.ModuleType) -> None:
        """Every apply_liger_kernel_to_X is recorded with its kwargs, wherever it is looked up."""
        table = getattr(module, "MODEL_TYPE_TO_APPLY_LIGER_FN", {})
        for name in [n for n in vars(module) if n.startswith("apply_liger_kernel_to_")]:
            original = getattr(module, name)
            wrap(module, name, self.recorder(name))
            for kind, function in list(table.items()):
                if function is original:
                    table[kind] = getattr(module, name)

    def recorder(self, name: str) -> Callable[..., Any]:
        def record(original: Any, *args: Any, **kwargs: Any) -> Any:
            plain = {k: v for k, v in kwargs.items() if isinstance(v, (bool, int, str))}
            self.losses |= {op for op in LOSSES if plain.get(op) is True}
            result = original(*args, **kwargs)
            self.record.write("liger_patch", function=name, kwargs=plain)
            return result

        return record
