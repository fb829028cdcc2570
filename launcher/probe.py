"""The script that every training process really runs: it watches upstream's script from inside.

Standard library only, Python 3.10 and later, imports nothing of ours: it runs under the trainer's
interpreter. `LAUNCH_PROBE` holds its settings as JSON (see `Settings`). Each rank appends JSON lines
to `OUT/rank-N.jsonl`; docs/probe.md lists the events. Modules are watched as they are imported, so
that nothing heavy is imported any earlier than upstream would. Whatever fails here is noted in the
record and never raised into training. What was asked for and is not so (the contract) ends the
process with `VIOLATION`, from the inside, so that it holds when nobody watches from the outside.

On a CPU, and only there, it supplies what upstream takes for granted on a GPU machine: memory
counters, a process group for one process, a device name for the MFU line, a place to load onto. Each
supply is recorded.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import math
import os
import re
import runpy
import statistics
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

VIOLATION = 79
"""The exit code of a process that stopped itself; no signal and no shell uses it."""

# Modules of liger_kernel.ops whose autograd functions are counted, each under the module's name.
LIGER_OPS = (
    "rms_norm", "rope", "swiglu", "geglu", "layer_norm", "cross_entropy",
    "fused_linear_cross_entropy",
)  # fmt: skip
LIGER_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")
PREFERENCE = "liger_kernel.chunked_loss.fused_linear_preference"

ISOLATION_TOKENS = 256  # of each of the two samples: far less than a training step holds
FIRST_LOSS = 0.01  # more than rounding moves the first loss by
LOOKS = 8  # micro-batches that are looked at for packing at least
SAMPLED_GRADIENTS = 64  # tensors, each this small, where nobody computes a norm
SMALL = 2**16


class Settings:
    """What `launch` wants of the probe; whatever is missing asks for nothing.

    `target` upstream's script, `out` folder of the records, `cpu`, `backend`, `stage`; `packed`
    whether packing was asked for (the same on every rank, so that collectives may depend on it);
    `expect` point -> state; `on_violation` stop or warn; `within` optimizer steps until what is
    expected must be proved; `isolation` whether packing is tested; `on_hang` stop or report;
    `hang_factor` times the median step, and `hang_seconds` at least, make a hang; `first_loss` is what
    the first step must give where the policy still is its own reference; without `final_save` the run
    ends after its last step; `profile` is the step whose kernels are recorded.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.target = str(given["target"])
        self.out = str(given["out"])
        self.cpu = bool(given.get("cpu"))
        self.backend = given.get("backend")
        self.stage = given.get("stage")
        self.packed = bool(given.get("packed"))
        wanted = given.get("expect") or {}
        self.expect = {point: state for point, state in wanted.items() if state != "any"}
        self.checks_loss = wanted.get("loss", "finite") != "any"
        self.stops = given.get("on_violation") == "stop"
        self.within = int(given.get("within") or 3)
        self.isolation = bool(given.get("isolation", True))
        self.stops_hang = given.get("on_hang") == "stop"
        self.hang_factor = float(given.get("hang_factor") or 20)
        self.hang_seconds = float(given.get("hang_seconds") or 300)
        self.first_loss = given.get("first_loss")
        self.final_save = bool(given.get("final_save", True))
        self.profile = int(given.get("profile") or 0)


class Record:
    """Appends events to this rank's file; flushes each; only in the process that opened it."""

    def __init__(self, folder: str, rank: int) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.stream: Any = None
        self.stacks = os.path.join(folder, f"rank-{rank}.stacks.txt")
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"rank-{rank}.jsonl")
            self.stream = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open until the end

    def ours(self) -> bool:
        """False in forked data workers, which inherit the stream: their events would tear lines."""
        return os.getpid() == self.pid

    def write(self, event: str, **fields: Any) -> None:
        if self.stream is None or not self.ours():
            return
        # whatever is wrong, with the disk or with a value, is no reason to stop training
        with contextlib.suppress(Exception):
            line = json.dumps({"t": round(time.time(), 3), "event": event, **fields}, default=str)
            with self.lock:
                self.stream.write(line + "\n")
                self.stream.flush()


class Reading:
    """The numbers of one optimizer step on their way from the device: nobody waits for them."""

    def __init__(
        self, scalars: dict[str, list[Any]], known: dict[str, Any], *, at_once: bool = False
    ) -> None:
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
        """The values; waits for the device where they have not arrived."""
        if self.event is not None and self.host is not None:
            self.event.synchronize()
            for (name, index), value in zip(self.places, self.host.tolist(), strict=True):
                self.values[name][index] = value
            self.host = None
        return self.values


class Contract:
    """What was expected of this run, held against what is seen; ends the process where it is broken."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.settings = probe.settings
        self.states: dict[str, str] = {}
        self.told: set[str] = set()
        if self.settings.stage == "sft":
            self.settings.expect.pop("reference_cache", None)
        # one rank of a machine fills a cache, and the others find it
        if int(os.environ.get("LOCAL_RANK") or 0):
            for point in ("dataset_cache", "reference_cache"):
                self.settings.expect.pop(point, None)

    def wanted(self, point: str) -> str | None:
        return self.settings.expect.get(point)

    def seen(self, point: str, state: str | None, *, final: bool = True) -> None:
        """Note a state; where it is `final` and not the one expected, the contract is broken."""
        if state is None:
            return
        self.states[point] = state
        if final and not self.met(point):
            self.broken(point, self.wanted(point), state)

    def met(self, point: str) -> bool:
        wanted, state = self.wanted(point), self.states.get(point)
        met = {wanted, "isolated"} if (point, wanted) == ("packing", "on") else {wanted}
        return wanted is None or state in met

    def after_step(self, step: int) -> None:
        """What has to be proved within the first steps is proved now, or it is not."""
        if step > self.settings.within:
            return
        # what was to be saved is the logits': without the loss that was asked for, the others are not it
        whole = self.probe.liger_losses <= self.probe.liger.keys()
        if self.probe.liger and (whole or self.wanted("liger") != "engaged"):
            self.seen("liger", "engaged")
        if step < self.settings.within:
            return
        self.states.setdefault(
            "liger", "not_engaged" if self.wanted("liger") == "engaged" else "off"
        )
        for point in ("liger", "packing", "attention", "dataset_cache", "reference_cache"):
            switched_off = point == "packing" and not self.settings.isolation
            if switched_off and self.wanted(point) == "isolated" and self.states.get(point) == "on":
                # whoever switches the test off wants no proof
                continue
            if not self.met(point):
                self.broken(point, self.wanted(point), self.states.get(point, "unknown"))

    def nonfinite(self, what: str, value: str, step: int) -> None:
        self.probe.record.write("nonfinite", step=step, what=what, value=value)
        if self.settings.checks_loss:
            self.broken("loss", "finite", f"{what} {value}", step=step)

    def broken(self, point: str, expected: str | None, seen: str, step: int | None = None) -> None:
        if point in self.told:
            return
        self.told.add(point)
        probe, last = self.probe, self.probe.last
        # a step in the making is the one that the user will look for
        begun = probe.base + 1 if probe.step_begun is not None else None
        at = step if step is not None else probe.at if probe.step else begun
        when = f"step {at}" if at else "before the first step"
        message = f"{point} expected {expected}, seen {seen} ({when}, rank {probe.rank})"
        if point == "loss":
            message = f"{seen.replace(' ', ' is ', 1)} ({when}, rank {probe.rank})"
            if last:
                norm = last.get("grad_norm")
                told = f", gradient norm {norm:.4g}" if norm is not None else ""
                message += f"; last finite: loss {last['loss']:.6g}{told} at step {last['step']}"
        probe.record.write(
            "violation", point=point, expected=expected, seen=seen, step=at, rank=probe.rank,
            last=last or None, message=message, stopped=self.settings.stops,
        )  # fmt: skip
        if self.settings.stops:
            probe.leave(f"stopped: {message}")
        else:
            say(f"warning: {message}")


class Watchdog(threading.Thread):
    """Notices that nothing moves any more: no forward pass and no step for far longer than a step.

    It watches from the end of the first step on, and not while something is saved, evaluated or
    uploaded. What hangs is told from every rank's own stacks.
    """

    def __init__(self, probe: Probe) -> None:
        super().__init__(name="launch-watchdog", daemon=True)
        self.probe = probe
        self.settings = probe.settings
        self.moved = time.monotonic()
        self.armed = False
        self.seconds: collections.deque[float] = collections.deque(maxlen=101)
        self.reported = False

    def beat(self) -> None:
        self.moved = time.monotonic()

    def step(self, seconds: float, first: bool) -> None:
        """A step is over; the first one compiles, and says nothing of the others."""
        if not first:
            self.seconds.append(seconds)
        self.beat()
        self.armed = True

    def rest(self) -> None:
        """Something began that is no step and may take long; the next training forward ends it."""
        self.armed = False

    def limit(self) -> float:
        median = statistics.median(self.seconds) if self.seconds else 0.0
        return max(self.settings.hang_seconds, self.settings.hang_factor * median)

    def run(self) -> None:
        while True:
            time.sleep(min(5.0, self.settings.hang_seconds / 4))
            with self.probe.quietly("watchdog"):
                self.look()

    def look(self) -> None:
        waited, limit = time.monotonic() - self.moved, self.limit()
        if not self.armed or waited < limit:
            if self.reported:
                self.reported = False
                self.probe.record.write("hang_over", step=self.probe.at)
            return
        if not self.reported:
            self.reported = True
            self.report(waited, limit)

    def report(self, waited: float, limit: float) -> None:
        probe, stops = self.probe, self.settings.stops_hang
        path = probe.record.stacks
        with probe.quietly("stacks"), open(path, "a", encoding="utf-8") as stream:
            stream.write(f"# step {probe.at}, nothing moved for {waited:.0f} s\n")
            stream.flush()
            faulthandler.dump_traceback(file=stream, all_threads=True)
        message = (
            f"nothing moved for {waited:.0f} s after step {probe.at} (limit {limit:.0f} s), "
            f"rank {probe.rank}; stacks in {path}"
        )
        probe.record.write(
            "hang", step=probe.at, waited=round(waited, 1), limit=round(limit, 1), stacks=path,
            median=round(statistics.median(self.seconds), 4) if self.seconds else None,
            message=message, stopped=stops,
        )  # fmt: skip
        if stops:
            probe.leave(f"stopped: {message}", settle=False)
        else:
            say(f"warning: {message}")


class Probe:
    """What has been seen so far in this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank = int(os.environ.get("RANK") or 0)
        self.world = int(os.environ.get("WORLD_SIZE") or 1)
        self.settings = Settings(settings)
        self.cpu = self.settings.cpu
        self.record = Record(self.settings.out, self.rank)
        self.begun = time.perf_counter()
        self.step_begun: float | None = None
        self.liger: dict[str, int] = {}
        self.liger_losses: set[str] = set()
        self.reported_liger: dict[str, int] = {}
        self.step = 0
        self.base = 0
        self.micro = 0
        self.batch: dict[str, list[Any]] = {"loss": [], "tokens": [], "rows": []}
        self.positions = 0
        self.norm: list[Any] = []
        self.sampled: list[Any] | None = None
        self.open = False
        self.scaled = False
        self.accelerator: Any = None
        self.engine: Any = None
        self.optimizer: Any = None
        self.readings: collections.deque[Reading] = collections.deque()
        self.timing: Any = None
        self.last: dict[str, Any] = {}
        self.models: set[int] = set()
        self.phases: set[str] = set()
        self.marked = 0
        self.rested = False
        self.resumed = False
        self.reference: str | None = None
        self.supplied: set[str] = set()
        self.packing: bool | None = None
        self.looks = 0
        self.isolation_done = False
        self.kernels: Kernels | None = None
        self.recorded = False
        self.testing = False
        self.troubles = 0
        self.leaving = False
        self.micro_batch: dict[str, Any] = {}
        self.pairs: list[int] = []
        self.alike = 1
        self.contract = Contract(self)
        self.watchdog = Watchdog(self)

    @property
    def at(self) -> int:
        """The optimizer step of the run: those before the checkpoint it was resumed from, and its own."""
        return self.base + self.step

    def resumes(self, checkpoint: Any) -> None:
        """The policy comes out of a checkpoint: it is not its own reference any more."""
        self.resumed = True
        if isinstance(checkpoint, (str, os.PathLike)):
            self.base = _steps_done(os.fspath(checkpoint), self.optimizer, self.engine)
            self.record.write("resumed", path=os.fspath(checkpoint), step=self.base)

    # -- never raise into training -----------------------------------------------------------------

    def trouble(self, where: str, error: BaseException) -> None:
        self.troubles += 1
        if self.troubles <= 20:
            self.record.write("note", text=f"probe: {where}: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def quietly(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.trouble(where, error)

    def supply(self, what: str, why: str) -> None:
        if what not in self.supplied:
            self.supplied.add(what)
            self.record.write("supplied", what=what, why=why)

    def leave(self, message: str, *, settle: bool = True) -> None:
        """End this process now; whoever started the ranks then ends the others."""
        if self.leaving or not self.record.ours():
            return
        self.leaving = True
        if settle:
            with self.quietly("last steps"):
                self.settle(wait=True)
        self.report_liger()
        self.record.write("end", exit=VIOLATION)
        say(message)
        with contextlib.suppress(Exception):
            for name in ("multiprocessing", "multiprocess"):
                for child in getattr(sys.modules.get(name), "active_children", list)():
                    child.kill()
        os._exit(VIOLATION)

    # -- what was loaded ---------------------------------------------------------------------------

    def saw_model(self, model: Any) -> None:
        if id(model) in self.models:
            return
        self.models.add(id(model))
        inner = model
        with self.quietly("unwrap"):
            inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = getattr(inner, "config", None)
        sizes = [(_count(p), p.requires_grad) for p in model.parameters()]
        attention = getattr(config, "_attn_implementation", None) or _olmo_attention(inner)
        shape: dict[str, Any] = {}
        with self.quietly("shape"):
            olmo = config is None and hasattr(inner, "blocks")
            shape = _olmo_shape(inner) if olmo else _shape(inner, config)
        self.record.write(
            "model",
            **{"class": type(inner).__name__},
            model_type=getattr(config, "model_type", None),
            attention=attention,
            dtype=str(next(iter(model.parameters())).dtype).removeprefix("torch."),
            parameters=sum(n for n, _ in sizes),
            trainable=sum(n for n, trainable in sizes if trainable),
            **shape,
        )
        model.register_forward_pre_hook(self.forward_begins, with_kwargs=True)
        self.contract.seen("attention", attention)

    def saw_optimizer(self, optimizer: Any, accelerator: Any) -> None:
        self.optimizer = optimizer
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
        self.mark_before_first_step(engine)

    def mark_before_first_step(self, engine: Any) -> None:
        original = engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self.mark("gradients")
            vars(engine).pop("step", None)
            return original(*args, **kwargs)

        vars(engine)["step"] = step

    def optimizer_state(self) -> None:
        """After the first step: the state that really lies in memory, on this rank."""
        outer = getattr(self.engine, "optimizer", None) or self.optimizer
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

    def device(self) -> None:
        """The accelerator by name; what its peak is worth is looked up when the run is judged."""
        torch = sys.modules.get("torch")
        told: dict[str, Any] = {"name": "cpu", "total_gib": None}
        if torch is not None and not self.cpu and torch.cuda.is_initialized():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            told = {"name": properties.name, "total_gib": round(properties.total_memory / 2**30, 2)}
        versions = {
            name: _version(name)
            for name in ("torch", "transformers", "accelerate", "deepspeed", "trl", "liger_kernel",
                         "flash_attn", "bitsandbytes", "peft")
            if name in sys.modules
        }  # fmt: skip
        self.record.write("device", **told, versions=versions)

    # -- a forward pass begins ---------------------------------------------------------------------

    def forward_begins(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self.testing:
            return
        self.watchdog.beat()
        with self.quietly("forward"):
            ids = kwargs.get("input_ids", args[0] if args else None)
            # a reference pass or an evaluation is no training, whatever mode the model is in
            if ids is None or not getattr(module, "training", True) or not _grad_enabled():
                return
            self.close_step()
            self.settle()
            if self.step_begun is None:
                self.training_begins()
            self.kernels_begin()
            # what was being saved or evaluated is over
            self.watchdog.armed = self.step > 0
            # what the model is not told (dpo_utils.py:992), the batch says
            seen = {**kwargs, **self.micro_batch}
            if "counted" not in seen:
                self.count(ids, kwargs)
            self.look_at_packing(module, ids, seen)
            self.test_isolation(module, args, ids, kwargs, seen)

    def training_begins(self) -> None:
        self.step_begun = time.perf_counter()
        self.mark("load")
        with self.quietly("device"):
            self.device()
        torch = sys.modules.get("torch")
        if torch is not None and not self.cpu and torch.cuda.is_initialized():
            with self.quietly("timing"):
                self.timing = torch.cuda.Event(enable_timing=True)
                self.timing.record()

    def count(self, ids: Any, kwargs: dict[str, Any]) -> None:
        """Rows, positions, and the positions that hold a token; summed on the device, read once a step."""
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
        self.positions += int(ids.numel())
        self.batch["tokens"].append(real)
        self.batch["rows"].append(rows)

    # -- packing -----------------------------------------------------------------------------------

    def look_at_packing(self, module: Any, ids: Any, kwargs: dict[str, Any]) -> None:
        # each look reads the device; a batch that is packed says so at once
        if self.packing or (self.looks >= LOOKS and self.step >= self.settings.within):
            return
        self.looks += 1
        mask, boundaries = kwargs.get("attention_mask"), kwargs.get("cu_seq_lens_q")
        positions = kwargs.get("position_ids")
        rows = int(ids.shape[0]) if ids.dim() == 2 else 1
        packed, detail = False, f"{rows} rows of {int(ids.shape[-1])} positions"
        samples = kwargs.get("samples", 0 if boundaries is None else int(boundaries.numel()) - 1)
        if samples > 1:
            packed, detail = True, f"{samples} samples in one row (cu_seq_lens)"
        elif positions is not None and positions.dim() == 2:
            starts = int((positions == 0).sum())
            packed = mask is None and starts > int(positions.shape[0])
            detail = f"{starts} samples in {int(positions.shape[0])} row(s) (position_ids)"
        elif self.settings.packed and _run_on(module, ids, mask) is not None:
            packed, detail = (
                True,
                f"samples run on in {rows} row(s), with no boundary but their end",
            )
        if self.packing is None or packed:
            self.packing = packed
            self.record.write("packing", state="on" if packed else "off", detail=detail)
            wanted_off = self.contract.wanted("packing") == "off"
            self.contract.seen("packing", "on" if packed else "off", final=packed and wanted_off)

    def test_isolation(
        self, module: Any, args: Any, ids: Any, kwargs: dict[str, Any], seen: dict[str, Any]
    ) -> None:
        """Once, at the first micro-batch that is packed on every rank.

        A sharded model's forward is a collective, so the ranks agree on it first; whether they ask
        each other at all depends on the settings alone, which are the same everywhere.
        """
        if self.isolation_done or not self.settings.isolation or self.step >= self.settings.within:
            return
        if self.world == 1 and not self.packing:
            return
        if self.world > 1 and not self.settings.packed:
            return
        pair: Any = None
        begun = time.perf_counter()
        reason = None
        try:
            pair = two_samples(module, args, ids, kwargs, seen) if self.packing else None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if not _all_agree(pair is not None, ids, self.world):
            if reason is not None:
                self.isolation_done = self.world == 1
                self.record.write("packing_isolation", state="untested", reason=reason)
            return
        self.isolation_done, self.testing = True, True
        try:
            before, after = leak(module, *pair)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.record.write("packing_isolation", state="untested", reason=reason)
            return
        finally:
            self.testing = False
        self.tell_isolation(module, before, after, pair, time.perf_counter() - begun)

    def tell_isolation(
        self, module: Any, before: float, after: float, pair: Any, seconds: float
    ) -> None:
        inner = module.get_base_model() if hasattr(module, "get_base_model") else module
        config = getattr(inner, "config", None)
        state, finite = "untested", math.isfinite(before) and math.isfinite(after)
        if finite:
            # the same shapes give the same bits; only experts that swap places do not
            tolerance = 1e-3 if _shape(inner, config).get("experts") else 1e-6
            moved = abs(after - before) > tolerance * max(1.0, abs(before))
            state = "leaking" if moved else "isolated"
        _, _, first, second = pair
        self.record.write(
            "packing_isolation", state=state, loss=_finite(before), changed_loss=_finite(after),
            attention=getattr(config, "_attn_implementation", None), samples=[first, second],
            seconds=round(seconds, 4), reason=None if finite else "the loss is not finite",
        )  # fmt: skip
        if state != "untested":
            self.contract.seen("packing", state)

    # -- steps -------------------------------------------------------------------------------------

    def backward_begins(self, loss: Any) -> None:
        with self.quietly("loss"):
            self.close_step()
            self.batch["loss"].append(loss.detach())
            self.micro += 1

    def micro_batch_begins(self, batch: dict[str, Any]) -> None:
        """DPO by OLMo-core: what a micro-batch holds, where its model sees tokens and labels alone."""
        ids = [batch[f"{branch}_input_ids"] for branch in ("chosen", "rejected")]
        ends: list[Any] = [
            batch.get(f"{branch}_cu_seq_lens_k") for branch in ("chosen", "rejected")
        ]
        masks: list[Any] = [
            batch.get(f"{branch}_attention_mask") for branch in ("chosen", "rejected")
        ]
        real: Any = sum(int(one.numel()) for one in ids)
        rows = sum(int(one.shape[0]) for one in ids)
        told: dict[str, Any] = {"counted": True}
        if ends[0] is not None and ends[1] is not None:
            real = ends[0][-1] + ends[1][-1]
            rows = int(ends[0].numel()) + int(ends[1].numel()) - 2
            # of the row that both become, the first half
            told |= {"cu_seq_lens_q": ends[0], "samples": rows}
            self.batch.setdefault("longer", []).append(ends[0][-1].maximum(ends[1][-1]))
        elif masks[0] is not None and masks[1] is not None:
            real = masks[0].sum() + masks[1].sum()
            told["attention_mask"] = masks[0]
        self.micro_batch = told
        self.close_step()
        self.pairs.append(rows // 2)
        if self.rank % self.alike:
            # the same batch as another rank's, which counts it
            return
        self.positions += sum(int(one.numel()) for one in ids)
        self.batch["tokens"].append(real)
        self.batch["rows"].append(rows)

    def step_begins(self) -> None:
        """The gradients of a step are there; its optimizer is about to use them."""
        self.step += 1
        self.open = True
        self.mark("gradients")

    def backward_ended(self, accelerator: Any) -> None:
        self.watchdog.beat()
        if not getattr(accelerator, "sync_gradients", True):
            return
        with self.quietly("step"):
            self.accelerator = accelerator
            self.step += 1
            self.open = True
            if getattr(accelerator, "deepspeed_engine_wrapped", None) is not None:
                # the engine has stepped inside its backward, and has a norm of all gradients
                norm = self.engine.get_global_grad_norm() if self.engine is not None else None
                self.norm = [] if norm is None else [norm]
                self.close_step()
            else:
                self.scaled = getattr(accelerator, "scaler", None) is not None
                self.mark("gradients")

    def clipped(self, norm: Any) -> None:
        """A norm that upstream computed anyway."""
        if norm is not None and self.open:
            self.norm = [norm]

    def before_optimizer(self, optimizer: Any) -> None:
        """Where nobody computes a norm, a few small gradients tell: what is not finite spreads down."""
        if not self.open or self.norm or self.scaled:
            return
        if self.sampled is None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            trained = [p for p in trained if getattr(p, "grad", None) is not None]
            small = [p for p in trained if p.numel() <= SMALL]
            self.sampled = (small or sorted(trained, key=lambda p: p.numel()))[:SAMPLED_GRADIENTS]
        torch = sys.modules["torch"]
        found = [p.grad for p in self.sampled if p.grad is not None]
        found = [getattr(grad, "_local_tensor", grad) for grad in found]
        if found:
            self.batch["sampled"] = [
                torch.stack([n.float() for n in torch._foreach_norm(found)]).sum()
            ]

    def close_step(self) -> None:
        """The optimizer step that is open, if one is, has been taken."""
        if not self.open:
            return
        self.open = False
        if self.step == 1:
            self.mark("optimizer")
            with self.quietly("optimizer state"):
                self.optimizer_state()
        now = time.perf_counter()
        allocated, reserved = None, None
        with self.quietly("memory"):
            allocated, reserved = self.peaks()
        rate = None
        with self.quietly("learning rate"):
            rate = self.learning_rate()
        # transformers' Trainer has already divided each micro-batch's loss, open-instruct has not
        parts = 1 if self.settings.backend == "trl" else max(1, len(self.batch["loss"]))
        known: dict[str, Any] = {
            "step": self.at, "micro_batches": self.micro, "positions": self.positions,
            "seconds": now - (self.step_begun or self.begun), "elapsed": now - self.begun,
            "allocated_gib": allocated, "reserved_gib": reserved, "learning_rate": rate,
            "parts": parts, "scaled": self.scaled, "interrupted": self.rested,
        }  # fmt: skip
        self.watchdog.step(known["seconds"], first=self.step == 1)
        # at most the step before this one is still on its way: no bubble, and no more than one step late
        self.settle(wait=True)
        scalars = {**self.batch, "norm": self.norm}
        try:
            reading = Reading(scalars, known)
        except Exception as error:
            self.trouble("reading without waiting", error)
            reading = Reading(scalars, known, at_once=True)
        self.readings.append(reading)
        # a step lasts from the end of the one before: its data loading and logging are part of it
        self.step_begun = now
        self.batch = {"loss": [], "tokens": [], "rows": []}
        self.norm, self.positions, self.micro, self.rested = [], 0, 0, False
        self.settle()
        self.kernels_end()
        if self.step & (self.step - 1) == 0:
            self.report_liger()
        self.contract.after_step(self.step)

    def kernels_begin(self) -> None:
        """At a training forward pass: the first of the step whose kernels are asked for starts the record."""
        if self.kernels is not None or self.at + 1 != self.settings.profile or self.cpu:
            return
        with self.quietly("profile"):
            self.kernels = Kernels(sys.modules["torch"])
        # that step tells no speed
        self.rested = True

    def kernels_end(self) -> None:
        """After a step: say what its kernels were."""
        if self.kernels is None:
            return
        # to read them may take seconds in which nothing else moves
        self.watchdog.rest()
        with self.quietly("profile"):
            self.record.write("kernels", step=self.at, **self.kernels.taken())
            self.recorded = True
        self.kernels, self.rested = None, True

    def learning_rate(self) -> float | None:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        rates = [rate for group in groups if (rate := group.get("lr")) is not None]
        if not rates or any(getattr(rate, "is_cuda", False) for rate in rates):
            return None
        return max(map(float, rates))

    def settle(self, *, wait: bool = False) -> None:
        """Write the steps whose numbers have arrived; with `wait`, all of them."""
        while self.readings and (wait or self.readings[0].ready()):
            with self.quietly("step"):
                self.finish_step(self.readings.popleft())

    def finish_step(self, reading: Reading) -> None:
        values, known = reading.take(), reading.known
        seconds = known["seconds"]
        if reading.event is not None:
            if self.timing is not None:
                seconds = self.timing.elapsed_time(reading.event) / 1000
            self.timing = reading.event
        losses = values["loss"]
        finite = all(math.isfinite(loss) for loss in losses)
        mean = sum(losses) / known["parts"] if losses and finite else None
        norm = values["norm"][0] if values["norm"] else None
        gradient = next((v for v in (norm, *values.get("sampled", ())) if v is not None), 0.0)
        # a loss scaler meets overflows and skips the step: that is its business
        whole = finite and (known["scaled"] or math.isfinite(gradient))
        tokens = int(sum(values["tokens"]))
        if known["step"] == self.base + self.settings.within:
            pairs = int(sum(values["rows"])) // 2
            self.tell_waste(tokens, known["positions"], pairs, max(values.get("longer", [0])))
        self.record.write(
            "step", step=known["step"], loss=mean, finite=whole,
            micro_batches=known["micro_batches"], rows=int(sum(values["rows"])), tokens=tokens,
            positions=known["positions"], wasted=known["positions"] - tokens,
            grad_norm=_finite(norm), learning_rate=known["learning_rate"],
            seconds=round(seconds, 4), elapsed=round(known["elapsed"], 4),
            interrupted=known["interrupted"],
            allocated_gib=known["allocated_gib"], reserved_gib=known["reserved_gib"],
        )  # fmt: skip
        if not finite:
            value = next(str(loss) for loss in losses if not math.isfinite(loss))
            self.contract.nonfinite("loss", value, known["step"])
        elif not whole:
            self.contract.nonfinite("gradient", str(gradient), known["step"])
        elif mean is not None:
            self.last = {"step": known["step"], "loss": mean, "grad_norm": _finite(norm)}
            if known["step"] == 1:
                self.check_reference(mean)

    def tell_waste(self, tokens: int, positions: int, pairs: int, longer: float) -> None:
        """Rows that are computed whole, and stay empty for more than half.

        Chosen and rejected fill a half each: the one with more tokens, `longer`, decides how many pairs fit.
        """
        if not self.pairs or not self.packing or not positions or tokens * 2 >= positions:
            return
        filled = tokens / positions
        # by this step's own lengths; a row with fewer pairs than another had no room for the next one
        known = longer > 0 and pairs >= max(self.pairs)
        fits = max(pairs, int(pairs * positions / 2 / longer)) if known else pairs
        better = 1 << max(0, fits.bit_length() - 1)
        message = f"batch {pairs} uses {filled:.0%} of each step"
        if better > pairs:
            message += f"; {better} fills {min(1.0, filled * better / max(1, pairs)):.0%}"
        self.record.write(
            "half_wasted", pairs=pairs, filled=round(filled, 4), better=better, message=message
        )
        if self.rank == 0:
            say(f"warning: {message}: rows are computed whole, however many pairs stand in them")

    def check_reference(self, loss: float) -> None:
        """A policy that has not moved is its own reference: another loss shows another reference."""
        expected = self.settings.first_loss
        if expected is None or self.reference is None or self.resumed:
            return
        if abs(loss - expected) > FIRST_LOSS:
            self.record.write(
                "reference_cache", state="stale", path=self.reference, first_loss=loss,
                expected_loss=expected,
            )  # fmt: skip
            self.contract.broken(
                "reference_cache", "that of this model",
                f"stale: the first loss is {loss:.4f}, not {expected:.4f}", step=1,
            )  # fmt: skip

    # -- memory ------------------------------------------------------------------------------------

    def peaks(self) -> tuple[float | None, float | None]:
        """The peaks so far, in GiB, allocated and reserved; one walk over torch's counters."""
        told = self.counters()
        if told is None:
            return None, None
        return told["peak_allocated_gib"], told["peak_reserved_gib"]

    def counters(self) -> dict[str, float] | None:
        torch = sys.modules.get("torch")
        if self.cpu or torch is None or not torch.cuda.is_initialized():
            return None
        kinds = (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes"))
        told: dict[str, float] = {}
        stats = getattr(torch.cuda, "memory_stats_as_nested_dict", None)
        if stats is None:
            for kind, _ in kinds:
                peak = getattr(torch.cuda, f"max_memory_{kind}")()
                told[f"peak_{kind}_gib"] = round(peak / 2**30, 3)
            return told
        found = stats()
        for kind, name in kinds:
            counter = found.get(name, {}).get("all", {})
            told[f"{kind}_gib"] = round(counter.get("current", 0) / 2**30, 3)
            told[f"peak_{kind}_gib"] = round(counter.get("peak", 0) / 2**30, 3)
        return told

    def mark(self, phase: str, *, again: bool = False) -> None:
        """Memory at the end of a phase. Upstream reads torch's peaks too, so they are never reset."""
        if phase in self.phases and not again:
            return
        self.phases.add(phase)
        with self.quietly("memory"):
            told: dict[str, float] = {**(self.counters() or {})}
            with contextlib.suppress(Exception):
                import resource

                # KiB on Linux, bytes on macOS
                unit = 2**30 if sys.platform == "darwin" else 2**20
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
                told["peak_host_gib"] = round(peak, 3)
            self.record.write("memory", phase=phase, step=self.at, **told)

    # -- the end -----------------------------------------------------------------------------------

    def rests(self) -> None:
        """Something is saved, evaluated or uploaded: first see that what is saved is any good."""
        with self.quietly("last step"):
            self.watchdog.rest()
            self.close_step()
            self.rested = True
            self.settle(wait=True)
            if self.step:
                self.mark("steps", again=self.step > self.marked)
                self.marked = self.step

    def leaves_out_final_save(self) -> None:
        """The script ends here, well, where nobody wants its model. Raises SystemExit then."""
        if self.settings.final_save:
            return
        with self.quietly("final save"):
            if self.world > 1:
                # another rank may still be reading from this one's memory
                sys.modules["torch"].distributed.barrier()
            self.record.write("not_saved", step=self.at)
        raise SystemExit(0)

    def ends(self) -> None:
        self.rests()
        if self.settings.profile and not self.recorded:
            why = f"the last one was step {self.at}"
            if self.cpu:
                why = "there is no GPU"
            elif self.settings.profile <= self.base:
                why = f"this attempt began after step {self.base}"
            elif self.settings.profile <= self.at:
                why = "their record failed"
            self.record.write("note", text=f"the kernels of step {self.settings.profile}: {why}")
        if self.step:
            self.mark("end")

    def report_liger(self) -> None:
        if self.liger != self.reported_liger:
            self.reported_liger = dict(self.liger)
            self.record.write("liger", calls=self.reported_liger)


_CLASSES = (
    ("communication", re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa?_", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|nvjet|xmma|cutlass|cublas|matmul|splitk", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy|memset|copy_kernel|CatArray", re.IGNORECASE)),
    ("optimizer", re.compile(r"multi_tensor|adam", re.IGNORECASE)),
)
"""What a kernel is for, by its name; the first that matches. All others are `other`."""


def class_of(kernel: str) -> str:
    return next((name for name, pattern in _CLASSES if pattern.search(kernel)), "other")


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of (begin, end)."""
    length, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length


def of_kernels(spans: list[tuple[str, float, float]], seconds: float) -> dict[str, Any]:
    """What (kernel, begin, end), in seconds, say of a step that took `seconds`.

    `shares` are of the step, and overlap where kernels do; `exposed_communication` is the share in
    which nothing but communication ran, `idle` that in which nothing did.
    """
    classes: dict[str, float] = collections.defaultdict(float)
    names: dict[str, list[float]] = collections.defaultdict(list)
    for name, begin, end in spans:
        classes[class_of(name)] += end - begin
        names[name].append(end - begin)
    apart = [(b, e) for name, b, e in spans if class_of(name) != "communication"]
    busy = covered([(begin, end) for _, begin, end in spans])
    top = sorted(names.items(), key=lambda one: -sum(one[1]))[:15]
    return {
        "seconds": round(seconds, 6), "kernels": len(spans),
        "shares": {name: round(taken / seconds, 5) for name, taken in sorted(classes.items())},
        "exposed_communication": round((busy - covered(apart)) / seconds, 5),
        "idle": round(max(0.0, 1 - busy / seconds), 5),
        "top": [
            {"kernel": name[:160], "class": class_of(name), "calls": len(taken),
             "share": round(sum(taken) / seconds, 5)}
            for name, taken in top
        ],
    }  # fmt: skip


class Kernels:
    """Kineto's record of what the GPU runs, from here until `taken`; both wait for the GPU."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self.profiler = torch.profiler.profile(activities=activities)
        torch.cuda.synchronize()
        self.profiler.start()
        self.begun = time.perf_counter()

    def taken(self) -> dict[str, Any]:
        self.torch.cuda.synchronize()
        seconds = time.perf_counter() - self.begun
        self.profiler.stop()
        on_device = self.torch.autograd.DeviceType.CUDA
        spans = [
            (str(one.name), one.time_range.start / 1e6, one.time_range.end / 1e6)
            for one in self.profiler.events()
            if one.device_type == on_device and not getattr(one, "is_user_annotation", False)
        ]
        return of_kernels(spans, seconds)


def _version(name: str) -> str | None:
    """Of an imported package; liger_kernel does not say its own."""
    told = getattr(sys.modules[name], "__version__", None)
    if told is None:
        with contextlib.suppress(Exception):
            import importlib.metadata

            told = importlib.metadata.version(name)
    return None if told is None else str(told)


def say(message: str) -> None:
    """One line on stderr, which goes into the run's console log; a bar may stand on the line."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nlaunch: {message}\n".encode(errors="replace"))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _grad_enabled() -> bool:
    return bool(getattr(sys.modules.get("torch"), "is_grad_enabled", lambda: True)())


def _count(parameter: Any) -> int:
    # DeepSpeed ZeRO-3 leaves a placeholder of size 0 and keeps the real count beside it
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _shape(model: Any, config: Any) -> dict[str, Any]:
    """What the cost of a token follows from; the text part of a model that also sees."""
    text = getattr(config, "text_config", None) or config
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = getattr(table, "weight", None)
    experts = next(
        (n for name in ("num_experts", "num_local_experts", "n_routed_experts")
         if isinstance(n := getattr(text, name, None), int)), None,
    )  # fmt: skip
    return {
        "layers": getattr(text, "num_hidden_layers", None),
        "hidden": getattr(text, "hidden_size", None),
        "heads": getattr(text, "num_attention_heads", None),
        "head_dim": getattr(text, "head_dim", None),
        "embedding": None if weight is None else _count(weight),
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
        "experts": experts,
        "checkpointing": bool(getattr(model, "is_gradient_checkpointing", False)),
    }


def _olmo_attention(model: Any) -> str | None:
    """The attention of an OLMo-core model, under transformers' names; None for any other."""
    blocks: Any = getattr(model, "blocks", None)
    block = next(iter(blocks.values()), None) if hasattr(blocks, "values") else None
    backend = getattr(getattr(block, "attention", None), "backend", None)
    name = type(backend).__name__.lower() if backend is not None else ""
    known = {"flash4": "flash_attention_4", "flash3": "flash_attention_3",
             "flash2": "flash_attention_2", "torch": "sdpa"}  # fmt: skip
    plain = name.replace("attention", "").replace("_", "")
    return next((theirs for ours, theirs in known.items() if ours in plain), None)


def _olmo_shape(model: Any) -> dict[str, Any]:
    """The same of a model of OLMo-core, which has no config of transformers'."""
    block = next(iter(model.blocks.values()))
    attention = getattr(block, "attention", None)
    weight = getattr(model.embeddings, "weight", None)
    return {
        "layers": len(model.blocks),
        "hidden": getattr(model, "d_model", None),
        "heads": getattr(attention, "n_heads", None),
        "head_dim": getattr(attention, "head_dim", None),
        "embedding": None if weight is None else _count(weight),
        "tied": bool(getattr(model, "tie_word_embeddings", False)),
        "experts": getattr(getattr(block, "feed_forward_moe", None), "num_experts", None),
        "checkpointing": False,
    }


# --- do packed samples see each other? ---------------------------------------------------------------


def _run_on(module: Any, ids: Any, mask: Any) -> int | None:
    """Where the first sample of a full row without boundaries ends, by its end-of-text token."""
    if ids.dim() != 2 or (mask is not None and (mask.dim() != 2 or not bool(mask[0].all()))):
        return None
    end = getattr(getattr(module, "config", None), "eos_token_id", None)
    ends = end if isinstance(end, (list, tuple)) else [] if end is None else [end]
    row = ids[0].tolist()
    found = [i + 1 for i, token in enumerate(row) if token in ends]
    return next((i for i in found if 2 <= i <= len(row) - 2), None)


def _spans(module: Any, ids: Any, kwargs: dict[str, Any]) -> tuple[int, list[tuple[int, int]]]:
    """A row, and where its samples begin and end."""
    ends, places = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if ends is not None:
        marks = ends.tolist()
        return 0, list(itertools.pairwise(marks))
    if places is not None and places.dim() == 2:
        for row, values in enumerate(places.tolist()):
            marks = [i for i, place in enumerate(values) if place == 0] + [len(values)]
            if len(marks) > 2:
                return row, list(itertools.pairwise(marks))
    split = _run_on(module, ids, kwargs.get("attention_mask"))
    return 0, [] if split is None else [(0, split), (split, int(ids.shape[-1]))]


def two_samples(
    module: Any, args: Any, ids: Any, kwargs: dict[str, Any], seen: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Any, int, int] | None:
    """The first two samples of a packed batch as a batch of their own, and other tokens for the first.

    `kwargs` are what the model is given, `seen` also what is known of the batch besides. None where
    there are no two; raises ValueError where the batch has parts whose meaning is not
    known. Each sample is cut to `ISOLATION_TOKENS`.
    """
    torch = sys.modules["torch"]
    if ids.dim() != 2 or len(args) > 1:
        raise ValueError("the batch is no plain rows of tokens")
    if kwargs.get("shift_labels") is not None:
        raise ValueError("the sequence is split over several GPUs")
    row, spans = _spans(module, ids, kwargs if seen is None else seen)
    whole = int(ids.shape[-1])
    long = [(a, b) for a, b in spans if b - a >= 2]
    near = [(x, y) for x, y in itertools.pairwise(long) if x[1] == y[0]]
    if not near:
        return None
    (begin, split), (_, end) = near[0]
    first, second = min(split - begin, ISOLATION_TOKENS), min(end - split, ISOLATION_TOKENS)

    def cut(tensor: Any) -> Any:
        line = tensor[row : row + 1]
        return torch.cat([line[:, begin : begin + first], line[:, split : split + second]], dim=1)

    made: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name == "num_items_in_batch" or value is None:
            continue
        if name.startswith("cu_seq_lens"):
            made[name] = torch.tensor(
                [0, first, first + second], dtype=value.dtype, device=value.device
            )
        elif name.startswith("max_length"):
            made[name] = max(first, second)
        elif hasattr(value, "dim") and value.dim() == 2 and tuple(value.shape) == tuple(ids.shape):
            made[name] = cut(value)
        elif hasattr(value, "dim") and value.dim() and whole in tuple(value.shape):
            raise ValueError(f"`{name}` has a shape that is not known")
        else:
            made[name] = value
    made["input_ids"] = cut(ids)
    if "seq_idx" in made:
        made["seq_idx"] = (torch.arange(first + second, device=ids.device)[None] >= first).to(
            made["seq_idx"].dtype
        )
    if "labels" in made:
        # the loss is the second sample's alone, its first token belongs to nobody
        labels = made["input_ids"].clone()
        labels[:, : first + 1] = -100
        made["labels"] = labels
    other = made["input_ids"].clone()
    other[:, :first] = other[:, :first].flip(1)
    if bool((other == made["input_ids"]).all()):
        other[:, :first] = made["input_ids"][:, -1:]
    if bool((other == made["input_ids"]).all()):
        return None
    return made, other, first, second


def leak(
    module: Any, made: dict[str, Any], other: Any, first: int, second: int
) -> tuple[float, float]:
    """The second sample's loss beside the first sample as it is, and beside a changed one.

    In the mode of training, with the same random numbers for both; nothing is left behind of it: no
    gradient, no random number drawn, no weight cast without its history.
    """
    torch = sys.modules["torch"]
    ids = made["input_ids"]
    host = torch.get_rng_state()
    card = torch.cuda.get_rng_state(ids.device) if ids.is_cuda else None

    def rewind() -> None:
        torch.set_rng_state(host)
        if card is not None:
            torch.cuda.set_rng_state(card, ids.device)

    losses = []
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for tokens in (ids, other):
                rewind()
                result = module(**{**made, "input_ids": tokens})
                losses.append(_loss_of(result, ids, first))
                del result
        before, after = torch.stack(losses).tolist()
    finally:
        rewind()
        # a cast made without gradients would be used again by the forward that needs them
        torch.clear_autocast_cache()
    return before, after


def _loss_of(result: Any, ids: Any, first: int) -> Any:
    """The mean loss of the tokens behind `first`, in whatever form the model tells it."""
    torch = sys.modules["torch"]
    told = getattr(result, "log_probs", None)
    if told is not None:
        return -told.double().sum() / (ids.shape[1] - first - 1)
    loss = getattr(result, "loss", None)
    if loss is not None and loss.numel() > 1:
        # OLMo-core's head under DPO: one log-probability a token, of the token behind it
        return -loss[0, first:-1].detach().double().mean()
    if loss is not None:
        return loss.detach().double().reshape(())
    logits = result.logits[0, first:-1]
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, first + 1 :]).double()


def _all_agree(mine: bool, ids: Any, world: int) -> bool:
    if world == 1:
        return mine
    torch = sys.modules["torch"]
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    flag = torch.tensor([int(mine)], device=ids.device)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MIN)
    return bool(flag.item())


# --- watching modules as they are imported ---------------------------------------------------------


def wrap(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Have `instead` called in place of `owner.name`, with that and its arguments.

    Static and class methods stay what they are.
    """
    raw = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name)
    if raw is None:
        raise AttributeError(f"{owner!r} has no {name}")
    kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
    original = raw if kind is None else raw.__func__

    @functools.wraps(original)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs)

    setattr(owner, name, inner if kind is None else kind(inner))


def wrap_known(owner: Any, names: tuple[str, ...], instead: Callable[..., Any]) -> None:
    """The same for those of the names that this version has."""
    for name in names:
        if vars(owner).get(name) is not None:
            wrap(owner, name, instead)


def watch_accelerate(probe: Probe, module: types.ModuleType) -> None:
    def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        model = False
        for item in args:
            with probe.quietly("prepare"):
                if hasattr(item, "named_parameters") and hasattr(item, "forward"):
                    model = True
                    probe.mark("load")
                    probe.saw_model(item)
                elif hasattr(item, "param_groups") and hasattr(item, "zero_grad"):
                    probe.saw_optimizer(item, self)
        result = original(self, *args, **kwargs)
        for item in result if isinstance(result, (tuple, list)) else (result,):
            with probe.quietly("prepared"):
                if hasattr(item, "zero_optimization_stage"):
                    probe.saw_engine(item)
        if model:
            probe.mark("prepare")
        return result

    def backward(original: Any, self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        probe.backward_begins(loss)
        result = original(self, loss, *args, **kwargs)
        probe.backward_ended(self)
        return result

    wrap(module.Accelerator, "prepare", prepare)
    wrap(module.Accelerator, "backward", backward)
    wrap_known(module.Accelerator, ("clip_grad_norm_",), clipping(probe))
    wrap_known(module.Accelerator, ("save_state", "get_state_dict"), resting(probe))
    wrap_known(module.Accelerator, ("load_state",), resuming(probe))


def watch_optimizer(probe: Probe, module: types.ModuleType) -> None:
    """accelerate's wrapper steps in every micro-batch and acts in the last one."""

    def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with probe.quietly("gradients"):
            probe.before_optimizer(self)
        result = original(self, *args, **kwargs)
        with probe.quietly("step"):
            probe.close_step()
        return result

    wrap(module.AcceleratedOptimizer, "step", step)


def resting(probe: Probe) -> Callable[..., Any]:
    """For what takes long and is no step."""

    def rest(original: Any, *args: Any, **kwargs: Any) -> Any:
        probe.rests()
        return original(*args, **kwargs)

    return rest


def saving(probe: Probe) -> Callable[..., Any]:
    """For what writes the final model; Trainer's checkpoints call it too, and say so."""

    def save(original: Any, *args: Any, **kwargs: Any) -> Any:
        probe.rests()
        if not kwargs.get("_internal_call"):
            probe.leaves_out_final_save()
        return original(*args, **kwargs)

    return save


def resuming(probe: Probe) -> Callable[..., Any]:
    """For what loads a checkpoint, given as the first argument; afterwards its steps are counted."""

    def resume(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else next(iter(kwargs.values()), None)
        # Trainer calls it without a checkpoint too
        probe.resumed = probe.resumed or given is not None or not (args or kwargs)
        result = original(self, *args, **kwargs)
        with probe.quietly("resume"):
            if given is not None:
                probe.resumes(given)
        return result

    return resume


def clipping(probe: Probe) -> Callable[..., Any]:
    """For what clips the gradients and returns their norm."""

    def clip(original: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        with probe.quietly("gradient norm"):
            probe.clipped(norm)
        return norm

    return clip


def _steps_done(checkpoint: str, optimizer: Any, engine: Any) -> int:
    """Optimizer steps that a checkpoint has behind it: by its name, by the engine, by AdamW's own count."""
    named = re.fullmatch(r"(?:step_|checkpoint-)(\d+)", os.path.basename(checkpoint.rstrip("/")))
    if named is not None:
        return int(named[1])
    counted = getattr(engine, "global_steps", None)
    if isinstance(counted, int) and counted:
        return counted
    states = getattr(optimizer, "state", None) or {}
    counts = (state.get("step") for state in states.values() if isinstance(state, dict))
    return max((int(count) for count in counts if count is not None), default=0)


def watch_trainer(probe: Probe, module: types.ModuleType) -> None:
    names = ("_save_checkpoint", "evaluate", "push_to_hub")
    wrap_known(module.Trainer, names, resting(probe))
    wrap_known(module.Trainer, ("save_model",), saving(probe))
    wrap_known(module.Trainer, ("_load_optimizer_and_scheduler",), resuming(probe))


def watch_final_save(probe: Probe, module: types.ModuleType) -> None:
    wrap_known(module, ("push_folder_to_hub",), resting(probe))
    wrap_known(module, ("save_with_accelerate",), saving(probe))


def watch_liger_op(probe: Probe, module: types.ModuleType) -> None:
    """`apply` looks `forward` up on the class at each call, so replacing it reaches every user."""
    op = module.__name__.rpartition(".")[2]
    for function in list(vars(module).values()):
        own = isinstance(function, type) and function.__module__ == module.__name__
        if own and function.__name__.endswith("Function") and "forward" in vars(function):
            wrap(function, "forward", _counter(probe, op))


def watch_preference(probe: Probe, module: types.ModuleType) -> None:
    function = module.LigerFusedLinearPreferenceBase
    wrap(function, "forward", _counter(probe, "preference_loss"))


def _counter(probe: Probe, op: str) -> Callable[..., Any]:
    def count(original: Any, *args: Any, **kwargs: Any) -> Any:
        if not probe.testing:
            probe.liger[op] = probe.liger.get(op, 0) + 1
        return original(*args, **kwargs)

    return count


def watch_liger_patch(probe: Probe, module: types.ModuleType) -> None:
    """Every apply_liger_kernel_to_X is recorded with its kwargs, wherever it is looked up."""

    def recorder(name: str) -> Callable[..., Any]:
        def record(original: Any, *args: Any, **kwargs: Any) -> Any:
            plain = {k: v for k, v in kwargs.items() if isinstance(v, (bool, int, str))}
            probe.liger_losses |= {op for op in LIGER_LOSSES if plain.get(op) is True}
            result = original(*args, **kwargs)
            patched: dict[str, str] = {}
            with probe.quietly("patched classes"):
                patched = patched_by_liger(name.removeprefix("apply_liger_kernel_to_"), kwargs)
            probe.record.write("liger_patch", function=name, kwargs=plain, patched=patched)
            return result

        return record

    table = getattr(module, "MODEL_TYPE_TO_APPLY_LIGER_FN", {})
    for name in [n for n in vars(module) if n.startswith("apply_liger_kernel_to_")]:
        original = getattr(module, name)
        wrap(module, name, recorder(name))
        for kind, function in list(table.items()):
            if function is original:
                table[kind] = getattr(module, name)


def patched_by_liger(kind: str, kwargs: dict[str, Any]) -> dict[str, str]:
    """What of a model's module is Liger's now, and which modules of an instance are."""
    patched: dict[str, str] = {}
    for name in (kind, kind.rpartition("_")[0]):
        source = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
        for key, value in list(vars(source).items()) if name and source else ():
            if _of_liger(value):
                patched[key] = value.__qualname__
            forward: Any = vars(value).get("forward") if isinstance(value, type) else None
            if _of_liger(forward):
                patched[f"{key}.forward"] = forward.__qualname__
    model: Any = kwargs.get("model")
    for part in model.modules() if hasattr(model, "modules") else ():
        forward = vars(part).get("forward")
        if _of_liger(getattr(forward, "__func__", forward)):
            key = type(part).__name__
            patched[key] = getattr(forward, "__qualname__", str(forward))
    return patched


def _of_liger(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("liger_kernel")


def watch_saving(probe: Probe, module: types.ModuleType) -> None:
    def save(original: Any, self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        probe.rests()
        result = original(self, save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            probe.record.write("saved", path=str(save_directory))
        probe.mark("save", again=True)
        return result

    wrap(module.PreTrainedModel, "save_pretrained", save)


def watch_dataset_cache(probe: Probe, module: types.ModuleType) -> None:
    """open-instruct's tokenised set: it prints the same line for a hit and a miss."""

    def load(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with probe.quietly("dataset cache"):
            path = self.get_cache_path()
            skip = kwargs.get("dataset_skip_cache", args[2] if len(args) > 2 else False)
            hit = os.path.exists(path) and not skip
            state = "hit" if hit else "miss"
            probe.record.write("dataset_cache", state=state, path=str(path))
            probe.contract.seen("dataset_cache", state)
        return original(self, *args, **kwargs)

    wrap(module.LocalDatasetTransformationCache, "load_or_transform_dataset", load)


def watch_tokenising(probe: Probe, module: types.ModuleType) -> None:
    """TRL tokenises with `Dataset.map`: a hit is a result whose files are older than the call."""

    def mapped(original: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.time()
        result = original(*args, **kwargs)
        with probe.quietly("dataset cache"):
            names = [file["filename"] for file in getattr(result, "cache_files", None) or ()]
            if str(kwargs.get("desc", "")).startswith("Tokenizing") and names:
                hit = all(os.path.getmtime(name) < begun for name in names)
                state = "hit" if hit else "miss"
                probe.record.write("dataset_cache", state=state, path=os.path.dirname(names[0]))
                probe.contract.seen("dataset_cache", state)
        return result

    wrap(module.Dataset, "map", mapped)


def watch_reference_cache(probe: Probe, module: types.ModuleType) -> None:
    def build(original: Any, *args: Any, **kwargs: Any) -> Any:
        with probe.quietly("reference cache"):
            path = kwargs["cache_path"]
            state = "hit" if path.exists() else "miss"
            probe.record.write("reference_cache", state=state, path=str(path))
            probe.reference = str(path)
            probe.contract.seen("reference_cache", state)
        probe.watchdog.rest()
        if probe.cpu:
            supply_process_group(probe)
        return original(*args, **kwargs)

    wrap(module, "build_reference_logprobs_cache", build)


def watch_olmo_module(probe: Probe, module: types.ModuleType) -> None:
    """OLMo-core's trainer calls these itself, with no accelerate around them."""

    def build(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        probe.mark("load")
        result = original(self, *args, **kwargs)
        with probe.quietly("train module"):
            probe.saw_model(self.model)
            probe.saw_optimizer(self.optim, None)
            # dpo.py:191
            probe.alike = max(1, int(getattr(self.dpo_config, "tensor_parallel_degree", 1)))
            probe.mark("prepare")
        return result

    def micro(original: Any, self: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not probe.testing:
            with probe.quietly("micro-batch"):
                probe.micro_batch_begins(micro_batch)
        result = original(self, micro_batch, *args, **kwargs)
        probe.micro_batch = {}
        if not probe.testing:
            probe.backward_begins(result[0])
        return result

    def train(original: Any, self: Any, batch: Any, dry_run: bool = False) -> Any:
        # a batch that only warms up is none of training
        probe.testing = probe.testing or dry_run
        try:
            return original(self, batch, dry_run=dry_run)
        finally:
            probe.testing = False if dry_run else probe.testing

    owner = module.DPOTrainModule
    wrap(owner, "__init__", build)
    wrap(owner, "_compute_microbatch_loss", micro)
    wrap(owner, "train_batch", train)


def watch_olmo_step(probe: Probe, module: types.ModuleType) -> None:
    def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with probe.quietly("gradients"):
            probe.step_begins()
            if getattr(self, "max_grad_norm", None) is None:
                probe.before_optimizer(self.optim)
        result = original(self, *args, **kwargs)
        with probe.quietly("step"):
            probe.close_step()
        return result

    wrap(module.TransformerTrainModule, "optim_step", step)
    wrap_known(module.TransformerTrainModule, ("_clip_grad_norm",), clipping(probe))


def watch_olmo_trainer(probe: Probe, module: types.ModuleType) -> None:
    """Checkpoints are loaded and saved by it; after `fit` the weights are gathered, which may take long."""

    def load(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        with probe.quietly("resume"):
            done = int(getattr(self, "global_step", 0) or 0)
            if done:
                probe.resumed, probe.base = True, done
                given = args[0] if args else kwargs.get("dir")
                probe.record.write("resumed", path=str(given), step=done)
        return result

    def fit(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # OLMo-core's memory monitor sets the counters back before its first step
        probe.mark("reference")
        result = original(self, *args, **kwargs)
        probe.rests()
        probe.leaves_out_final_save()
        return result

    wrap_known(module.Trainer, ("load_checkpoint",), load)
    wrap_known(module.Trainer, ("save_checkpoint", "save_checkpoint_async"), resting(probe))
    wrap(module.Trainer, "fit", fit)


def watch_hub(probe: Probe, module: types.ModuleType) -> None:
    """finetune.py:528 asks the hub for a snapshot of whatever the model is called, folders too."""

    def download(original: Any, repo_id: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(repo_id, str) and os.path.isdir(repo_id):
            probe.supply("snapshot_download", f"{repo_id} is a local folder, not a hub name")
            return repo_id
        return original(repo_id, *args, **kwargs)

    wrap(module, "snapshot_download", download)


# --- what a CPU lacks ------------------------------------------------------------------------------


def supply_process_group(probe: Probe) -> None:
    """One process needs no group on a GPU with DeepSpeed, which makes one; on a CPU nothing does."""
    with probe.quietly("process group"):
        import torch.distributed as dist

        if dist.is_available() and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            probe.supply("process_group", "the reference pass calls barrier (dpo_utils.py:453)")


def supply_gloo(probe: Probe, module: types.ModuleType) -> None:
    """OLMo-core asks for NCCL beside gloo whatever the machine has; torch for the CPU has no NCCL."""

    def group(original: Any, backend: str = "gloo", *args: Any, **kwargs: Any) -> Any:
        probe.supply("process_group", f"gloo in place of `{backend}`")
        return original("gloo", *args, **kwargs)

    wrap(module, "init_distributed", group)


def supply_memory_monitor(probe: Probe, module: types.ModuleType) -> None:
    """dpo.py:70 watches the GPU's memory whether there is one or not."""

    def nothing(original: Any, *_: Any, **__: Any) -> None:
        probe.supply("memory_monitor", "OLMo-core's memory monitor needs a GPU")

    wrap_known(module.GPUMemoryMonitorCallback, ("pre_train", "pre_step", "post_step"), nothing)


def supply_cuda_counters(probe: Probe, module: types.ModuleType) -> None:
    """finetune.py:911 and dpo_utils.py:488 read them without asking whether there is a GPU."""
    why = "upstream reads CUDA memory counters at every log line"

    def zero() -> Callable[..., int]:
        # one function a name: torch.compile's own table refuses one object under two of its names
        def counter(*_: Any, **__: Any) -> int:
            probe.supply("cuda_counters", why)
            return 0

        return counter

    class Properties:
        name = "cpu"
        # upstream divides by it
        total_memory = 1

    def properties(*_: Any, **__: Any) -> Properties:
        probe.supply("cuda_counters", why)
        return Properties()

    # OLMo-core chooses its device without asking, too (olmo_core/distributed/utils.py: set_device)
    zeros = ("max_memory_allocated", "max_memory_reserved", "current_device", "set_device")
    supplies = {**{name: zero() for name in zeros}, "get_device_properties": properties}
    for name, supplied in supplies.items():
        setattr(module, name, supplied)


def supply_locations(probe: Probe, module: types.ModuleType) -> None:
    """accelerate numbers the CPU of each of several processes, and torch cannot load a checkpoint onto it."""

    def load(storage: Any, location: str) -> Any:
        if not location.startswith("cpu:"):
            return None
        probe.supply("cpu_location", f"torch does not load onto `{location}`")
        return storage

    module.register_package(11, lambda _: None, load)


def supply_mfu(probe: Probe, module: types.ModuleType) -> None:
    """utils.py:1872: MFU needs a known GPU name; on a CPU the figure means nothing and is 0."""
    dims = module.ModelDims

    def none(value: Any) -> Callable[..., Any]:
        def told(*_: Any, **__: Any) -> Any:
            probe.supply("mfu", "MFU needs a known GPU; reported as 0")
            return value

        return told

    wrap(dims, "calculate_mfu", none(0.0))
    wrap(dims, "approximate_learner_utilization", none({"mfu": 0.0}))


# --- the import hook -------------------------------------------------------------------------------


class Watcher(importlib.abc.MetaPathFinder):
    """Calls a function once, right after the module that it is registered for has been executed."""

    def __init__(self, probe: Probe, after: dict[str, Callable[[Probe, types.ModuleType], None]]):
        self.probe = probe
        self.after = after
        self.looking: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in self.after or fullname in self.looking:
            return None
        self.looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        except (ImportError, ValueError):
            return None
        finally:
            self.looking.discard(fullname)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        action = self.after.pop(fullname)
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            with self.probe.quietly(f"watching {fullname}"):
                action(self.probe, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watched(probe: Probe) -> dict[str, Callable[[Probe, types.ModuleType], None]]:
    """Module name -> what to do once it is there."""
    after: dict[str, Callable[[Probe, types.ModuleType], None]] = {
        "accelerate.accelerator": watch_accelerate,
        "accelerate.optimizer": watch_optimizer,
        "transformers.modeling_utils": watch_saving,
        "transformers.trainer": watch_trainer,
        "liger_kernel.transformers.monkey_patch": watch_liger_patch,
        PREFERENCE: watch_preference,
        "open_instruct.dataset_transformation": watch_dataset_cache,
        "open_instruct.dpo_utils": watch_reference_cache,
        "open_instruct.model_utils": watch_final_save,
        "open_instruct.olmo_core_train_modules": watch_olmo_module,
        "olmo_core.train.train_module.transformer.train_module": watch_olmo_step,
        "olmo_core.train.trainer": watch_olmo_trainer,
    }
    after.update({f"liger_kernel.ops.{name}": watch_liger_op for name in LIGER_OPS})
    if probe.cpu:
        after["torch.serialization"] = supply_locations
    if probe.settings.backend == "trl":
        after["datasets.arrow_dataset"] = watch_tokenising
    if probe.settings.backend == "open_instruct":
        after["huggingface_hub"] = watch_hub
        if probe.cpu:
            after["torch.cuda"] = supply_cuda_counters
            after["open_instruct.utils"] = supply_mfu
            after["olmo_core.distributed.utils"] = supply_gloo
            after["olmo_core.train.callbacks.gpu_memory_monitor"] = supply_memory_monitor
    return after


def main() -> None:
    """Run upstream's script as `__main__` under watch; its exit code and exceptions stay its own."""
    probe = Probe(json.loads(os.environ["LAUNCH_PROBE"]))
    target = probe.settings.target
    probe.record.write(
        "start", rank=probe.rank, world=probe.world, pid=os.getpid(), target=target,
        attempt=int(os.environ.get("LAUNCH_ATTEMPT") or 1),
        python=".".join(map(str, sys.version_info[:3])),
    )  # fmt: skip
    sys.meta_path.insert(0, Watcher(probe, watched(probe)))
    probe.watchdog.start()
    sys.argv[0] = target
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(target))
    code: Any = 0
    try:
        runpy.run_path(target, run_name="__main__")
    except SystemExit as stop:
        code = stop.code
        raise
    except BaseException as error:
        code = 1
        probe.record.write("error", type=type(error).__name__, message=str(error)[:2000])
        raise
    finally:
        probe.ends()
        probe.report_liger()
        probe.record.write("end", exit=code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
