"""What is expected of this run, against what happens while it trains: Liger's kernels and the caches first."""

import os
import time
import types
from collections.abc import Callable
from typing import Any

from .hooks import wrap
from .process import ProbePiece, Process
from .supplies import supply_process_group
from .watchdog import Watchdog

# Modules of liger_kernel.ops whose autograd functions are counted, each under the module's name.
OPS = ("rms_norm", "rope", "swiglu", "geglu", "layer_norm", "cross_entropy", "fused_linear_cross_entropy")
LOSSES = ("fused_linear_cross_entropy", "cross_entropy")
PREFERENCE = "liger_kernel.chunked_loss.fused_linear_preference"
FIRST_LOSS = 0.01  # more than rounding moves the first loss by


class Liger(ProbePiece):
    """Calls of Liger's kernels by op, and the losses that its patches were to put in."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.calls: dict[str, int] = {}
        self.losses: set[str] = set()
        self.reported: dict[str, int] = {}

    def report(self) -> None:
        if self.calls != self.reported:
            self.reported = dict(self.calls)
            self.record.write("liger", calls=self.reported)

    def watched(self) -> dict[str, Callable[[types.ModuleType], None]]:
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


class Contract(ProbePiece):
    """What was expected of this run, held against what is seen; ends the process where it is broken."""

    def __init__(self, process: Process, liger: Liger, leave: Callable[..., None]) -> None:
        super().__init__(process)
        self.liger, self.leave = liger, leave
        self.states: dict[str, str] = {}
        self.reported: set[str] = set()
        # one rank of a machine fills a cache, and the others find it
        free = {"dataset_cache", "reference_cache"} if int(os.environ.get("LOCAL_RANK") or 0) else set()
        self.expect = {point: state for point, state in self.settings.expect.items() if point not in free}

    def seen(
        self, point: str, state: str | None, *, final: bool = True, step: int | None = None, message: str = ""
    ) -> None:
        """Note a state; where it is `final` and not the one expected, the contract is broken."""
        if state is None:
            return
        self.states[point] = state
        if final and not self.met(point):
            self.broken(point, state, step=step, message=message)

    def met(self, point: str) -> bool:
        expected, state = self.expect.get(point), self.states.get(point)
        also = "isolated" if (point, expected) == ("packing", "on") else expected
        return expected is None or state in (expected, also)

    def after_step(self, step: int) -> None:
        """What has to be proved within the first steps is proved now, or it is not."""
        if step > self.settings.within:
            return
        engaged = self.expect.get("liger") == "engaged"
        # what was to be saved is the logits': without the loss that was asked for, the others are not it
        if self.liger.calls and (self.liger.losses <= self.liger.calls.keys() or not engaged):
            self.seen("liger", "engaged")
        if step < self.settings.within:
            return
        self.states.setdefault("liger", "not_engaged" if engaged else "off")
        for point in ("liger", "packing", "attention", "dataset_cache", "reference_cache"):
            state, expected = self.states.get(point), self.expect.get(point)
            if (state, expected) == ("on", "isolated") and not self.settings.isolation:
                # whoever switches the test off wants no proof
                continue
            if not self.met(point):
                self.broken(point, state or "unknown")

    def nonfinite(self, what: str, value: str, step: int) -> None:
        self.record.write("nonfinite", step=step, what=what, value=value)
        if self.settings.checks_loss:
            self.broken("loss", f"{what} {value}", step=step, message=f"{what} is {value}", expected="finite")

    def broken(
        self, point: str, state: str, *, step: int | None = None, message: str = "", expected: str | None = None
    ) -> None:
        """Say so once: `message`, in place of the two states, and the `step` it was met in; maybe end the process."""
        if point in self.reported:
            return
        self.reported.add(point)
        process, last = self.process, self.process.last
        expected = expected or self.expect.get(point)
        # a step in the making is the one that the user will look for
        begun = process.base + 1 if process.step_begun is not None else None
        at = step if step is not None else process.at if process.step else begun
        when = f"step {at}" if at else "before the first step"
        message = message or f"{point} expected {expected}, seen {state}"
        message += f" ({when}, rank {process.rank})"
        if point == "loss" and last:
            norm = f", gradient norm {last['grad_norm']:.4g}" if last["grad_norm"] is not None else ""
            message += f"; last finite: loss {last['loss']:.6g}{norm} at step {last['step']}"
        self.record.write(
            "violation",
            point=point,
            expected=expected,
            seen=state,
            step=at,
            rank=process.rank,
            last=last or None,
            message=message,
            stopped=self.settings.stops,
        )
        self.leave(message, stops=self.settings.stops)


class Caches(ProbePiece):
    """Each cache as it is asked for, before the work that it is to save."""

    def __init__(self, process: Process, contract: Contract, watchdog: Watchdog) -> None:
        super().__init__(process)
        self.contract, self.watchdog = contract, watchdog
        self.reference: str | None = None

    def tell(self, point: str, hit: bool, path: str) -> None:
        state = "hit" if hit else "miss"
        self.record.write(point, state=state, path=path)
        self.contract.seen(point, state)

    def watch_dataset(self, module: types.ModuleType) -> None:
        """open-instruct's tokenised set: it prints the same line for a hit and a miss."""

        def load(original: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
            with self.record.quietly("dataset cache"):
                path = cache.get_cache_path()
                skip = kwargs.get("dataset_skip_cache", args[2] if len(args) > 2 else False)
                self.tell("dataset_cache", os.path.exists(path) and not skip, str(path))
            return original(cache, *args, **kwargs)

        wrap(module.LocalDatasetTransformationCache, "load_or_transform_dataset", load)

    def watch_maps(self, module: types.ModuleType) -> None:
        """TRL tokenises with `Dataset.map`: a hit is a result whose files are older than the call."""

        def mapped(original: Any, *args: Any, **kwargs: Any) -> Any:
            begun = time.time()
            result = original(*args, **kwargs)
            with self.record.quietly("dataset cache"):
                names = [file["filename"] for file in getattr(result, "cache_files", None) or ()]
                if str(kwargs.get("desc", "")).startswith("Tokenizing") and names:
                    hit = all(os.path.getmtime(name) < begun for name in names)
                    self.tell("dataset_cache", hit, os.path.dirname(names[0]))
            return result

        wrap(module.Dataset, "map", mapped)

    def watch_reference(self, module: types.ModuleType) -> None:
        def build(original: Any, *args: Any, **kwargs: Any) -> Any:
            with self.record.quietly("reference cache"):
                path = kwargs["cache_path"]
                self.reference = str(path)
                self.tell("reference_cache", path.exists(), self.reference)
            self.watchdog.enter(None)
            if self.settings.cpu:
                supply_process_group(self.record)
            return original(*args, **kwargs)

        wrap(module, "build_reference_logprobs_cache", build)

    def check_first_loss(self, loss: float) -> None:
        """A policy that has not moved is its own reference: another loss shows another reference."""
        expected, path = self.settings.first_loss, self.reference
        if expected is None or path is None or self.process.resumed or abs(loss - expected) <= FIRST_LOSS:
            return
        self.record.write("reference_cache", state="stale", path=path, first_loss=loss, expected_loss=expected)
        state = f"stale: the first loss is {loss:.4f}, not {expected:.4f}"
        self.contract.broken("reference_cache", state, step=1, expected="that of this model")
