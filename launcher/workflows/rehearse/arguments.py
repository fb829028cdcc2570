"""A stage's arguments as they are rehearsed: harmless, small, and without what one CPU process cannot run."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from launcher.artifacts import model_config
from launcher.dataset import sources
from launcher.paths import exists
from launcher.stage.options import Batch, Options
from launcher.upstream import behaviour
from launcher.upstream.schema import Schema
from launcher.upstream.trainers import BACKENDS, Entry

OWN = "@own"
"""In a request's words: its own folder, which is gone afterwards (`server.py`)."""
ROWS = 64
"""Rows that are read of each data set."""
LARGEST_BATCH = 2
_TEST_SIZE = "test_split_size"
_LARGEST_TEST_SHARE = 0.5


class LeftOut(NamedTuple):
    """What one process on a CPU cannot show: which arguments ask for it, when, and their stand-in."""

    what: str
    names: tuple[str, ...]
    asks: Callable[[Any], bool] = bool
    instead: Any = None


def _on_gpu(attention: Any) -> bool:
    return isinstance(attention, str) and attention not in {"eager", "sdpa", "torch"}


def _quantised(optimizer: Any) -> bool:
    return any(word in str(optimizer) for word in ("8bit", "4bit", "bnb", "paged", "apex", "npu"))


LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut("DeepSpeed", ("deepspeed", "zero_stage"), lambda value: value is not None),
    LeftOut("FSDP", ("fsdp", "fsdp_config", "fsdp_shard_degree", "fsdp_num_replicas")),
    LeftOut("torch.compile", ("torch_compile", "torch_compile_backend", "torch_compile_mode", "compile_model")),
    LeftOut("Liger's kernels", ("use_liger_kernel", "liger_kernel_config")),
    LeftOut("the attention kernels of GPUs", ("attn_implementation",), _on_gpu),
    LeftOut("quantised weights", ("load_in_8bit", "load_in_4bit", "use_bnb_nested_quant", "use_qlora")),
    LeftOut("16-bit floats", ("fp16", "tf32")),
    LeftOut("the optimizers of GPUs", ("optim",), _quantised, "adamw_torch"),
    LeftOut("the optimizers of GPUs", ("use_8bit_optimizer", "dpo_use_paged_optimizer")),
    LeftOut(
        "parallel sequences and tensors",
        ("sequence_parallel_size", "tensor_parallel_degree", "context_parallel_degree"),
        lambda value: value not in (None, 1),
    ),
    LeftOut("activations moved to the CPU", ("activation_offloading",)),
    LeftOut("resuming", ("resume_from_checkpoint",)),
    LeftOut("code of the model's repository", ("trust_remote_code",)),
    LeftOut("a checkpointing budget", ("activation_memory_budget",), lambda value: value not in (None, 1)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of one rehearsal: those of the file (`given`), as far as they are rehearsed.

    `added` are launch's own, which no finding is about. `left_out` says what is not rehearsed, each with
    the file's arguments that ask for it.
    """

    given: Mapping[str, Any]
    added: Mapping[str, Any]
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    report_to: tuple[str, ...] = ()

    def words(self, schema: Schema) -> list[str]:
        words = []
        for name, value in self._all().items():
            if not schema.in_file(name, value):
                words += [f"--{name}", *schema.words(name, value)]
        return words

    def in_file(self, schema: Schema) -> dict[str, Any]:
        """Those that no flag can carry, for the trainer's config file."""
        return {name: value for name, value in self._all().items() if schema.in_file(name, value)}

    def _all(self) -> dict[str, Any]:
        return {name: value for name, value in {**self.given, **self.added}.items() if value is not None}


def of_stage(args: Mapping[str, Any], options: Options, schema: Schema, entry: Entry) -> Arguments:
    """What of a stage's arguments is rehearsed; the model and the caches go into a request's own folder."""
    fields, names = schema.fields, entry.names
    given = {name: value for name, value in args.items() if value is not None and name in fields}
    left: dict[str, tuple[str, ...]] = {}
    added: dict[str, Any] = {}
    if schema.does(behaviour.PACKS_WITH_FLASH_ALONE) and given.get(names.packing or "packing"):
        # it asserts that attention is one of flash-attn's
        packing = names.packing or "packing"
        given[packing] = False
        left["packing, which needs the attention kernels of GPUs"] = (packing,)
    for one in LEFT_OUT:
        asking = tuple(name for name in one.names if name in given and one.asks(given[name]))
        for name in asking:
            del given[name]
            if one.instead is not None:
                added[name] = one.instead
        if asking:
            left[one.what] = (*left.get(one.what, ()), *asking)
    if options.deepspeed is not None:
        left.setdefault("DeepSpeed", ())
    reporters = given.get("report_to")
    for name, value in BACKENDS[schema.backend].REHEARSAL.items():
        if name in fields:
            given.pop(name, None)
            added[name] = value
    # at most two rows a micro-batch and two micro-batches a step
    batch = options.batch or Batch()
    each, accumulation = batch.per_device or LARGEST_BATCH, 1 if batch.total else None
    replaced = {names.per_device: each, names.accumulation: accumulation, "per_device_eval_batch_size": None}
    for name, default in replaced.items():
        value = given.pop(name, default)
        if isinstance(value, int):
            added[name] = min(value, LARGEST_BATCH)
        elif value is not None:
            # not a number: the parser has something to say of it
            given[name] = value
    for name in (names.output, "dataset_local_cache_dir", "local_cache_dir"):
        if name in fields:
            given.pop(name, None)
            added[name] = f"{OWN}/{'model' if name == names.output else 'cache'}"
    for name in ("dataset_cache_mode", "cache_mode"):
        if given.pop(name, None) == "hf":
            left["the dataset cache on the hub"] = (name,)
    if entry.rehearsal is not None:
        added |= entry.rehearsal.values
    _shorten_mixture(given, added, left)
    listed = reporters if isinstance(reporters, list) else [reporters] if reporters else []
    trackers = [str(name) for name in listed if "report_to" in added and name not in ("none", "all")]
    return Arguments(given=given, added=added, left_out=left, report_to=tuple(trackers))


def _shorten_mixture(given: dict[str, Any], added: dict[str, Any], left: dict[str, tuple[str, ...]]) -> None:
    """Of a mixture the sets that are on this machine, and a test split that its first rows can bear."""
    size = given.get(_TEST_SIZE)
    if isinstance(size, int | float) and not isinstance(size, bool):
        del given[_TEST_SIZE]
        added[_TEST_SIZE] = min(size, 1) if isinstance(size, int) else min(size, _LARGEST_TEST_SHARE)
    listed = given.get("datasets")
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        return
    there = [item for item in listed if not _is_absent(item.get("path"))]
    if there and len(there) < len(listed):
        names = [str(item.get("path")) for item in listed if item not in there]
        left[f"the rows of {', '.join(names)}, which are not on this machine"] = ("datasets",)
        given["datasets"] = there
    elif not there:
        # the rows that stand in have columns of their own
        given["datasets"] = [{**item, "columns": None} if "columns" in item else item for item in listed]


def _is_absent(path: Any) -> bool:
    """Whether it is the name of a data set of the hub that was not downloaded."""
    if not isinstance(path, str) or path in sources.LOADERS or exists(Path(path)) or path.count("/") != 1:
        return False
    return not model_config.is_path(path) and model_config.snapshot(path, os.environ, kind="datasets") is None
