"""What is expected of this run against what is seen: Liger's kernels, the caches, and the rest."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

from .hooks import Call, ModuleAction, react, wrap
from .process import ProbePiece, Process, read_local_rank
from .supplies import supply_process_group
from .watchdog import Watchdog

# Modules of liger_kernel.ops whose autograd functions are counted, each under the module's name.
OPS = (
    "rms_norm",
    "rope",
    "swiglu",
    "geglu",
    "layer_norm",
    "cross_entropy",
    "fused_linear_cross_entropy",
)
LOSSES = ("fused_linear_cross_entropy", "cross_entropy")
PREFERENCE = "liger_kernel.chunked_loss.fused_linear_preference"
FIRST_LOSS = 0.01  # rounding moves the first loss by less
PROVED_EARLY = ("liger", "packing", "attention", "dataset_cache", "reference_cache")


class Liger(ProbePiece):
    """Calls of Liger's kernels by op, and the losses that its patches put in."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.calls: dict[str, int] = {}
        self.losses: set[str] = set()
        self.reported: dict[str, int] = {}

    def report(self) -> None:
        if self.calls != self.reported:
            self.reported = dict(self.calls)
            self.record.write("liger", calls=self.reported)

    def is_engaged(self) -> bool:
        """The other kernels do not save what a patched loss saves: the logits."""
        return bool(self.calls) and self.losses <= self.calls.keys()

    def watchers(self) -> dict[str, ModuleAction]:
        ops = {f"liger_kernel.ops.{name}": self.watch_op for name in OPS}
        patches = "liger_kernel.transformers.monkey_patch"
        return {patches: self.watch_patches, PREFERENCE: self.watch_preference, **ops}

    def watch_op(self, module: ModuleType) -> None:
        """Count by `forward`: `apply` looks it up on the class at each call."""
        op = module.__name__.rpartition(".")[2]
        for member in list(vars(module).values()):
            if not isinstance(member, type) or not member.__name__.endswith("Function"):
                continue
            if member.__module__ == module.__name__ and "forward" in vars(member):
                self._count_calls(member, op)

    def watch_preference(self, module: ModuleType) -> None:
        self._count_calls(module.LigerFusedLinearPreferenceBase, "preference_loss")

    def _count_calls(self, owner: type, op: str) -> None:
        def count(original: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.process.testing:
                self.calls[op] = self.calls.get(op, 0) + 1
            return original(*args, **kwargs)

        wrap(owner, "forward", count)

    def watch_patches(self, module: ModuleType) -> None:
        """Record each apply_liger_kernel_to_X, also where it is looked up by the model's type."""
        table = getattr(module, "MODEL_TYPE_TO_APPLY_LIGER_FN", {})
        for name, original in list(vars(module).items()):
            if not name.startswith("apply_liger_kernel_to_"):
                continue
            self._record_patch(module, name)
            for kind, function in list(table.items()):
                if function is original:
                    table[kind] = getattr(module, name)

    def _record_patch(self, module: ModuleType, name: str) -> None:
        def patched(call: Call) -> None:
            plain = {}
            for key, value in call.kwargs.items():
                if isinstance(value, (bool, int, str)):
                    plain[key] = value
            for loss in LOSSES:
                if plain.get(loss) is True:
                    self.losses.add(loss)
            self.record.write("liger_patch", function=name, kwargs=plain)

        wrap(module, name, react(self.record, after=patched))


class Contract(ProbePiece):
    """What was expected of this run; may end the process if it is broken."""

    def __init__(self, process: Process, liger: Liger, leave: Callable[..., None]) -> None:
        super().__init__(process)
        self.liger = liger
        self.leave = leave
        self.states: dict[str, str] = {}
        self.reported: set[str] = set()
        self.expect = {}
        for point, state in self.settings.expect.items():
            # the first rank of a machine fills a cache, and the others hit it
            shared = point in ("dataset_cache", "reference_cache") and read_local_rank()
            if state != "any" and not shared:
                self.expect[point] = state

    def saw(self, point: str, state: str | None, **violation: Any) -> None:
        """Note a state that cannot change any more; `violation` is passed to `break_at`."""
        if state is None:
            return
        self.states[point] = state
        if not self.is_met(point):
            self.break_at(point, state, **violation)

    def note(self, point: str, state: str) -> None:
        """Note a state that may still change."""
        self.states[point] = state

    def is_met(self, point: str) -> bool:
        expected = self.expect.get(point)
        state = self.states.get(point)
        if point == "packing" and expected == "on" and state == "isolated":
            return True
        return expected is None or state == expected

    def after_step(self, step: int) -> None:
        """Check what has to be proved within the first steps."""
        if step > self.settings.within:
            return
        is_expected = self.expect.get("liger") == "engaged"
        if self.liger.is_engaged() or (self.liger.calls and not is_expected):
            self.saw("liger", "engaged")
        if step < self.settings.within:
            return
        self.states.setdefault("liger", "not_engaged" if is_expected else "off")
        for point in PROVED_EARLY:
            state = self.states.get(point)
            # without the test of isolation nothing could prove it
            untested = self.expect.get(point) == "isolated" and not self.settings.isolation
            if not self.is_met(point) and not (untested and state == "on"):
                self.break_at(point, state or "unknown")

    def tell_nonfinite(self, what: str, number: float | None, step: int) -> None:
        value = str(number)
        self.record.write("nonfinite", step=step, what=what, value=value)
        if self.settings.checks("loss"):
            message = f"{what} is {value}"
            self.break_at("loss", f"{what} {value}", step=step, message=message, expected="finite")

    def break_at(
        self,
        point: str,
        state: str,
        *,
        step: int | None = None,
        message: str = "",
        expected: str | None = None,
    ) -> None:
        """Report a violation, once a point; maybe end the process.

        `message` replaces the sentence about the two states, `step` the step of the process.
        """
        if point in self.reported:
            return
        self.reported.add(point)
        process = self.process
        expected = expected or self.expect.get(point)
        if step is None:
            step = self._open_step()
        when = f"step {step}" if step else "before the first step"
        message = message or f"{point} expected {expected}, seen {state}"
        message += f" ({when}, rank {process.rank})"
        last = process.last
        if point == "loss" and last is not None:
            message += f"; last finite: {last.describe()}"
        self.record.write(
            "violation",
            point=point,
            expected=expected,
            seen=state,
            step=step,
            rank=process.rank,
            last=None if last is None else asdict(last),
            message=message,
            stopped=self.settings.stops,
        )
        self.leave(message, stops=self.settings.stops)

    def _open_step(self) -> int | None:
        """The step that the user will look for; None before any."""
        if self.process.step:
            return self.process.at
        if self.process.step_begun is not None:
            return self.process.base + 1
        return None


class Caches(ProbePiece):
    """Whether each cache is hit, seen before the work that it is to save."""

    def __init__(self, process: Process, contract: Contract, watchdog: Watchdog) -> None:
        super().__init__(process)
        self.contract = contract
        self.watchdog = watchdog
        self.reference: str | None = None

    def tell(self, point: str, hit: bool, path: str) -> None:
        state = "hit" if hit else "miss"
        self.record.write(point, state=state, path=path)
        self.contract.saw(point, state)

    def watch_dataset(self, module: ModuleType) -> None:
        """open-instruct's tokenised set: its log line is the same for a hit and a miss."""

        def load(call: Call) -> None:
            path = call.owner.get_cache_path()
            skips = call.argument(3, "dataset_skip_cache", False)
            self.tell("dataset_cache", os.path.exists(path) and not skips, str(path))

        owner = module.LocalDatasetTransformationCache
        wrap(owner, "load_or_transform_dataset", react(self.record, before=load))

    def watch_maps(self, module: ModuleType) -> None:
        """TRL tokenises with `Dataset.map`: the files of a hit are older than the call."""

        def map_rows(original: Any, *args: Any, **kwargs: Any) -> Any:
            begun = time.time()
            result = original(*args, **kwargs)
            with self.record.quietly("dataset cache"):
                description = str(kwargs.get("desc", ""))
                if description.startswith("Tokenizing"):
                    self._tell_cache(result, begun)
            return result

        wrap(module.Dataset, "map", map_rows)

    def _tell_cache(self, dataset: Any, begun: float) -> None:
        files = getattr(dataset, "cache_files", None) or ()
        paths = [file["filename"] for file in files]
        if paths:
            hit = all(os.path.getmtime(path) < begun for path in paths)
            self.tell("dataset_cache", hit, os.path.dirname(paths[0]))

    def watch_reference(self, module: ModuleType) -> None:
        def build(call: Call) -> None:
            # it may take any time
            self.watchdog.enter(None)
            if self.settings.cpu:
                supply_process_group(self.record)
            path = call.kwargs["cache_path"]
            self.reference = str(path)
            self.tell("reference_cache", path.exists(), self.reference)

        wrap(module, "build_reference_logprobs_cache", react(self.record, before=build))

    def check_first_loss(self, loss: float) -> None:
        """An unchanged policy is its own reference: another loss means another reference."""
        expected = self.settings.first_loss
        path = self.reference
        if expected is None or path is None or self.process.resumed:
            return
        if abs(loss - expected) <= FIRST_LOSS:
            return
        self.record.write(
            "reference_cache", state="stale", path=path, first_loss=loss, expected_loss=expected
        )
        state = f"stale: the first loss is {loss:.4f}, not {expected:.4f}"
        self.contract.break_at("reference_cache", state, step=1, expected="that of this model")
