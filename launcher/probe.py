"""The script that every training process really runs: it watches upstream's script from inside.

Standard library only, Python 3.10 and later, imports nothing of ours: it runs under the trainer's
interpreter. `LAUNCH_PROBE` holds its settings as JSON: `target` (upstream's script), `out` (folder of
the records), `cpu`, `backend`. Each rank appends JSON lines to `OUT/rank-N.jsonl`; docs/probe.md lists the
events. Modules are watched as they are imported, so that nothing heavy is imported any earlier than
upstream would. Whatever fails here is noted in the record and never raised into training.

On a CPU, and only there, it supplies what upstream takes for granted on a GPU machine: memory
counters, a process group for one process, a device name for the MFU line. Each supply is recorded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import runpy
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

# Modules of liger_kernel.ops whose autograd functions are counted, each under the module's name.
LIGER_OPS = (
    "rms_norm", "rope", "swiglu", "geglu", "layer_norm", "cross_entropy",
    "fused_linear_cross_entropy",
)  # fmt: skip
PREFERENCE = "liger_kernel.chunked_loss.fused_linear_preference"


class Record:
    """Appends events to this rank's file; flushes each; only in the process that opened it."""

    def __init__(self, folder: str, rank: int) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.stream: Any = None
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"rank-{rank}.jsonl")
            self.stream = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open until the end

    def write(self, event: str, **fields: Any) -> None:
        # forked data workers inherit the stream; their events would tear the lines
        if self.stream is None or os.getpid() != self.pid:
            return
        # whatever is wrong, with the disk or with a value, is no reason to stop training
        with contextlib.suppress(Exception):
            line = json.dumps({"t": round(time.time(), 3), "event": event, **fields}, default=str)
            with self.lock:
                self.stream.write(line + "\n")
                self.stream.flush()


class Probe:
    """What has been seen so far in this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank = int(os.environ.get("RANK") or 0)
        self.world = int(os.environ.get("WORLD_SIZE") or 1)
        self.settings = settings
        self.cpu = bool(settings.get("cpu"))
        self.record = Record(settings["out"], self.rank)
        self.begun = time.perf_counter()
        self.step_begun: float | None = None
        self.liger: dict[str, int] = {}
        self.reported_liger: dict[str, int] = {}
        self.step = 0
        self.micro = 0
        self.losses: list[Any] = []
        self.tokens: list[Any] = []
        self.positions = 0
        self.models: set[int] = set()
        self.supplied: set[str] = set()
        self.packing: bool | None = None
        self.looks = 0
        self.troubles = 0

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
        self.record.write(
            "model",
            **{"class": type(inner).__name__},
            model_type=getattr(config, "model_type", None),
            attention=getattr(config, "_attn_implementation", None),
            dtype=str(next(iter(model.parameters())).dtype).removeprefix("torch."),
            parameters=sum(n for n, _ in sizes),
            trainable=sum(n for n, trainable in sizes if trainable),
        )
        model.register_forward_pre_hook(self.forward_begins, with_kwargs=True)

    def saw_optimizer(self, optimizer: Any, accelerator: Any) -> None:
        plugin = getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None)
        self.record.write(
            "optimizer",
            **{"class": f"{type(optimizer).__module__}.{type(optimizer).__name__}"},
            zero_stage=getattr(plugin, "zero_stage", None),
        )

    def forward_begins(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        with self.quietly("forward"):
            if not getattr(module, "training", True):
                return
            ids = kwargs.get("input_ids", args[0] if args else None)
            if ids is None:
                return
            mask = kwargs.get("attention_mask")
            if self.step_begun is None:
                self.step_begun = time.perf_counter()
            self.positions += int(ids.numel())
            # summed on the device; read once a step
            real = mask.sum() if mask is not None and mask.dim() == 2 else ids.numel()
            self.tokens.append(real)
            self.look_at_packing(ids, mask, kwargs)

    def look_at_packing(self, ids: Any, mask: Any, kwargs: dict[str, Any]) -> None:
        # each look reads the device; a batch that is packed says so at once
        if self.packing or self.looks >= 8:
            return
        self.looks += 1
        boundaries = kwargs.get("cu_seq_lens_q")
        positions = kwargs.get("position_ids")
        rows = int(ids.shape[0]) if ids.dim() == 2 else 1
        packed, detail = False, f"{rows} rows of {int(ids.shape[-1])} positions"
        if boundaries is not None and int(boundaries.numel()) > 2:
            packed, detail = True, f"{int(boundaries.numel()) - 1} samples in one row (cu_seq_lens)"
        elif positions is not None and positions.dim() == 2:
            starts = int((positions == 0).sum())
            packed = mask is None and starts > int(positions.shape[0])
            detail = f"{starts} samples in {int(positions.shape[0])} row(s) (position_ids)"
        if self.packing is None or packed:
            self.packing = packed
            self.record.write("packing", state="on" if packed else "off", detail=detail)

    # -- steps -------------------------------------------------------------------------------------

    def backward_begins(self, loss: Any) -> None:
        with self.quietly("loss"):
            self.losses.append(loss.detach())
            self.micro += 1

    def backward_ended(self, accelerator: Any) -> None:
        if not getattr(accelerator, "sync_gradients", True):
            return
        with self.quietly("step"):
            self.end_of_step()

    def end_of_step(self) -> None:
        self.step += 1
        losses = _read(self.losses)
        finite = all(math.isfinite(loss) for loss in losses)
        # transformers' Trainer has already divided each micro-batch's loss, open-instruct has not
        parts = 1 if self.settings.get("backend") == "trl" else max(1, len(losses))
        mean = sum(losses) / parts if losses and finite else None
        if not finite:
            value = next(str(loss) for loss in losses if not math.isfinite(loss))
            self.record.write("nonfinite", step=self.step, what="loss", value=value)
        allocated, reserved = None, None
        with self.quietly("memory"):
            allocated, reserved = self.memory()
        now = time.perf_counter()
        self.record.write(
            "step", step=self.step, loss=mean, finite=finite, micro_batches=self.micro,
            tokens=int(sum(self.tokens)), positions=self.positions,
            seconds=round(now - (self.step_begun or self.begun), 4),
            elapsed=round(now - self.begun, 4),
            allocated_gib=allocated, reserved_gib=reserved,
        )  # fmt: skip
        # a step lasts from the end of the one before: its data loading and logging are part of it
        self.step_begun = now
        self.losses, self.tokens, self.positions, self.micro = [], [], 0, 0
        if self.step & (self.step - 1) == 0:
            self.report_liger()

    def memory(self) -> tuple[float | None, float | None]:
        torch = sys.modules.get("torch")
        if self.cpu or torch is None or not torch.cuda.is_initialized():
            return None, None
        scale = 2**30
        return (
            round(torch.cuda.max_memory_allocated() / scale, 3),
            round(torch.cuda.max_memory_reserved() / scale, 3),
        )

    def report_liger(self) -> None:
        if self.liger != self.reported_liger:
            self.reported_liger = dict(self.liger)
            self.record.write("liger", calls=self.reported_liger)


def _count(parameter: Any) -> int:
    # DeepSpeed ZeRO-3 leaves a placeholder of size 0 and keeps the real count beside it
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _read(scalars: list[Any]) -> list[float]:
    """The values of scalar tensors with one wait for the device."""
    if len(scalars) < 2:
        return [float(scalar) for scalar in scalars]
    stacked = sys.modules["torch"].stack([scalar.float().reshape(()) for scalar in scalars])
    return [float(value) for value in stacked.tolist()]


# --- watching modules as they are imported ---------------------------------------------------------


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)`, keeping static and class methods what they are."""
    raw = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name)
    if raw is None:
        raise AttributeError(f"{owner!r} has no {name}")
    if isinstance(raw, staticmethod):
        setattr(owner, name, staticmethod(make(raw.__func__)))
    elif isinstance(raw, classmethod):
        setattr(owner, name, classmethod(make(raw.__func__)))
    else:
        setattr(owner, name, make(raw))


def watch_accelerate(probe: Probe, module: types.ModuleType) -> None:
    def prepare(original: Any) -> Any:
        @functools.wraps(original)
        def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
            for item in args:
                with probe.quietly("prepare"):
                    if hasattr(item, "named_parameters") and hasattr(item, "forward"):
                        probe.saw_model(item)
                    elif hasattr(item, "param_groups") and hasattr(item, "zero_grad"):
                        probe.saw_optimizer(item, self)
            return original(self, *args, **kwargs)

        return inner

    def backward(original: Any) -> Any:
        @functools.wraps(original)
        def inner(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            probe.backward_begins(loss)
            result = original(self, loss, *args, **kwargs)
            probe.backward_ended(self)
            return result

        return inner

    wrap(module.Accelerator, "prepare", prepare)
    wrap(module.Accelerator, "backward", backward)


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


def _counter(probe: Probe, op: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def inner(*args: Any, **kwargs: Any) -> Any:
            probe.liger[op] = probe.liger.get(op, 0) + 1
            return original(*args, **kwargs)

        return inner

    return make


def watch_liger_patch(probe: Probe, module: types.ModuleType) -> None:
    """Every apply_liger_kernel_to_X is recorded with its kwargs, wherever it is looked up."""

    def recorder(name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def inner(*args: Any, **kwargs: Any) -> Any:
                plain = {k: v for k, v in kwargs.items() if isinstance(v, (bool, int, str))}
                probe.record.write("liger_patch", function=name, kwargs=plain)
                return original(*args, **kwargs)

            return inner

        return make

    table = getattr(module, "MODEL_TYPE_TO_APPLY_LIGER_FN", {})
    for name in [n for n in vars(module) if n.startswith("apply_liger_kernel_to_")]:
        original = getattr(module, name)
        wrap(module, name, recorder(name))
        for kind, function in list(table.items()):
            if function is original:
                table[kind] = getattr(module, name)


def watch_saving(probe: Probe, module: types.ModuleType) -> None:
    def save(original: Any) -> Any:
        @functools.wraps(original)
        def inner(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, save_directory, *args, **kwargs)
            if kwargs.get("is_main_process", True):
                probe.record.write("saved", path=str(save_directory))
            return result

        return inner

    wrap(module.PreTrainedModel, "save_pretrained", save)


def watch_dataset_cache(probe: Probe, module: types.ModuleType) -> None:
    """open-instruct's tokenised set: it prints the same line for a hit and a miss."""

    def load(original: Any) -> Any:
        @functools.wraps(original)
        def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
            with probe.quietly("dataset cache"):
                path = self.get_cache_path()
                skip = kwargs.get("dataset_skip_cache", args[2] if len(args) > 2 else False)
                hit = os.path.exists(path) and not skip
                probe.record.write("dataset_cache", state="hit" if hit else "miss", path=str(path))
            return original(self, *args, **kwargs)

        return inner

    wrap(module.LocalDatasetTransformationCache, "load_or_transform_dataset", load)


def watch_tokenising(probe: Probe, module: types.ModuleType) -> None:
    """TRL tokenises with `Dataset.map`: a hit is a result whose files are older than the call."""

    def mapped(original: Any) -> Any:
        @functools.wraps(original)
        def inner(*args: Any, **kwargs: Any) -> Any:
            begun = time.time()
            result = original(*args, **kwargs)
            with probe.quietly("dataset cache"):
                names = [file["filename"] for file in getattr(result, "cache_files", None) or ()]
                if str(kwargs.get("desc", "")).startswith("Tokenizing") and names:
                    hit = all(os.path.getmtime(name) < begun for name in names)
                    state = "hit" if hit else "miss"
                    probe.record.write("dataset_cache", state=state, path=os.path.dirname(names[0]))
            return result

        return inner

    wrap(module.Dataset, "map", mapped)


def watch_reference_cache(probe: Probe, module: types.ModuleType) -> None:
    def build(original: Any) -> Any:
        @functools.wraps(original)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with probe.quietly("reference cache"):
                path = kwargs["cache_path"]
                state = "hit" if path.exists() else "miss"
                probe.record.write("reference_cache", state=state, path=str(path))
            if probe.cpu:
                supply_process_group(probe)
            return original(*args, **kwargs)

        return inner

    wrap(module, "build_reference_logprobs_cache", build)


def watch_hub(probe: Probe, module: types.ModuleType) -> None:
    """finetune.py:528 asks the hub for a snapshot of whatever the model is called, folders too."""

    def download(original: Any) -> Any:
        @functools.wraps(original)
        def inner(repo_id: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(repo_id, str) and os.path.isdir(repo_id):
                probe.supply("snapshot_download", f"{repo_id} is a local folder, not a hub name")
                return repo_id
            return original(repo_id, *args, **kwargs)

        return inner

    wrap(module, "snapshot_download", download)


# --- what a CPU lacks ------------------------------------------------------------------------------


def supply_process_group(probe: Probe) -> None:
    """One process needs no group on a GPU with DeepSpeed, which makes one; on a CPU nothing does."""
    with probe.quietly("process group"):
        import torch.distributed as dist

        if dist.is_available() and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            probe.supply("process_group", "the reference pass calls barrier (dpo_utils.py:453)")


def supply_cuda_counters(probe: Probe, module: types.ModuleType) -> None:
    """finetune.py:911 and dpo_utils.py:488 read them without asking whether there is a GPU."""
    why = "upstream reads CUDA memory counters at every log line"

    def zero(*_: Any, **__: Any) -> int:
        probe.supply("cuda_counters", why)
        return 0

    class Properties:
        name = "cpu"
        # upstream divides by it
        total_memory = 1

    def properties(*_: Any, **__: Any) -> Properties:
        probe.supply("cuda_counters", why)
        return Properties()

    zeros = ("max_memory_allocated", "max_memory_reserved", "current_device")
    supplies = {**dict.fromkeys(zeros, zero), "get_device_properties": properties}
    for name, supplied in supplies.items():
        setattr(module, name, supplied)


def supply_mfu(probe: Probe, module: types.ModuleType) -> None:
    """utils.py:1872: MFU needs a known GPU name; on a CPU the figure means nothing and is 0."""
    dims = module.ModelDims

    def none(value: Any) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def inner(*_: Any, **__: Any) -> Any:
                probe.supply("mfu", "MFU needs a known GPU; reported as 0")
                return value

            return inner

        return make

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
        "transformers.modeling_utils": watch_saving,
        "liger_kernel.transformers.monkey_patch": watch_liger_patch,
        PREFERENCE: watch_preference,
        "open_instruct.dataset_transformation": watch_dataset_cache,
        "open_instruct.dpo_utils": watch_reference_cache,
    }
    after.update({f"liger_kernel.ops.{name}": watch_liger_op for name in LIGER_OPS})
    if probe.settings.get("backend") == "trl":
        after["datasets.arrow_dataset"] = watch_tokenising
    if probe.settings.get("backend") == "open_instruct":
        after["huggingface_hub"] = watch_hub
        if probe.cpu:
            after["torch.cuda"] = supply_cuda_counters
            after["open_instruct.utils"] = supply_mfu
    return after


def main() -> None:
    """Run upstream's script as `__main__` under watch; its exit code and exceptions stay its own."""
    settings = json.loads(os.environ["LAUNCH_PROBE"])
    target = settings["target"]
    probe = Probe(settings)
    probe.record.write(
        "start", rank=probe.rank, world=probe.world, pid=os.getpid(), target=target,
        attempt=int(os.environ.get("LAUNCH_ATTEMPT") or 1),
        python=".".join(map(str, sys.version_info[:3])),
    )  # fmt: skip
    sys.meta_path.insert(0, Watcher(probe, watched(probe)))
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
        probe.report_liger()
        probe.record.write("end", exit=code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
