"""A stage's arguments, made harmless, small, and free of what a process on a CPU cannot run."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launcher.artifacts import model_config
from launcher.dataset import sources
from launcher.errors import select_errors
from launcher.lazy_dataclass import dataclass
from launcher.paths import exists
from launcher.stage.options import Batch, Options
from launcher.stage.stage import Judged
from launcher.upstream import behaviour
from launcher.upstream.schema import Schema
from launcher.upstream.trainers import BACKENDS, Entry

OWN = "@own"
"""In a request's words: its own folder, which is gone afterwards (`server.py`)."""
ROWS = 64
"""Rows that are read of each data set."""
LARGEST_BATCH = 2
_TEST_SIZE = "test_split_size"


class LeftOut(NamedTuple):
    """What one process on a CPU cannot show, and the arguments that ask for it.

    One does if `asks` is true of its value; then it is left out, or has the value `instead`.
    """

    what: str
    names: tuple[str, ...]
    asks: Callable[[Any], bool] = bool
    instead: Any = None


def _is_for_gpus(attention: Any) -> bool:
    return isinstance(attention, str) and attention not in {"eager", "sdpa", "torch"}


def _is_quantised(optimizer: Any) -> bool:
    kinds = ("8bit", "4bit", "bnb", "paged", "apex", "npu")
    return any(kind in str(optimizer) for kind in kinds)


def _is_set(value: Any) -> bool:
    return value is not None


def _is_not_one(value: Any) -> bool:
    return value not in (None, 1)


def _is_hub(cache_mode: Any) -> bool:
    return bool(cache_mode == "hf")


_COMPILING = ("torch_compile", "torch_compile_backend", "torch_compile_mode", "compile_model")
_FSDP = ("fsdp", "fsdp_config", "fsdp_shard_degree", "fsdp_num_replicas")
_PARALLEL = ("sequence_parallel_size", "tensor_parallel_degree", "context_parallel_degree")
_QUANTISING = ("load_in_8bit", "load_in_4bit", "use_bnb_nested_quant", "use_qlora")
LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut("DeepSpeed", ("deepspeed", "zero_stage"), _is_set),
    LeftOut("FSDP", _FSDP),
    LeftOut("torch.compile", _COMPILING),
    LeftOut("Liger's kernels", ("use_liger_kernel", "liger_kernel_config")),
    LeftOut("the attention kernels of GPUs", ("attn_implementation",), _is_for_gpus),
    LeftOut("quantised weights", _QUANTISING),
    LeftOut("16-bit floats", ("fp16", "tf32")),
    LeftOut("the optimizers of GPUs", ("optim",), _is_quantised, "adamw_torch"),
    LeftOut("the optimizers of GPUs", ("use_8bit_optimizer", "dpo_use_paged_optimizer")),
    LeftOut("parallel sequences and tensors", _PARALLEL, _is_not_one),
    LeftOut("activations moved to the CPU", ("activation_offloading",)),
    LeftOut("streaming", ("dataset_streaming", "streaming")),
    LeftOut("resuming", ("resume_from_checkpoint",)),
    LeftOut("code of the model's repository", ("trust_remote_code",)),
    LeftOut("the dataset cache on the hub", ("dataset_cache_mode", "cache_mode"), _is_hub),
    LeftOut("a checkpointing budget", ("activation_memory_budget",), _is_not_one),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of one rehearsal: those of the file (`kept`), as far as they are rehearsed.

    `added` are launch's own, which no finding is about. `left_out` says what is not rehearsed, each
    with the file's arguments that ask for it.
    """

    kept: Mapping[str, Any]
    added: Mapping[str, Any]
    left_out: Mapping[str, tuple[str, ...]]

    def words(self, schema: Schema) -> list[str]:
        words = []
        for name, value in self._iterate_values():
            if not schema.in_file(name, value):
                words += [f"--{name}", *schema.words(name, value)]
        return words

    def in_file(self, schema: Schema) -> dict[str, Any]:
        """Those that no flag can carry, for the trainer's config file."""
        values = {}
        for name, value in self._iterate_values():
            if schema.in_file(name, value):
                values[name] = value
        return values

    def _iterate_values(self) -> Iterator[tuple[str, Any]]:
        for name, value in {**self.kept, **self.added}.items():
            if value is not None:
                yield name, value


def fit_for_cpu(
    args: Mapping[str, Any], options: Options, schema: Schema, entry: Entry
) -> Arguments:
    """What of a stage's arguments is rehearsed; model and caches go into a request's folder."""
    draft = _Draft(args, schema)
    names = entry.names
    if schema.does(behaviour.PACKS_WITH_FLASH_ALONE):
        # it asserts that attention is one of flash-attn's
        what = "packing, which needs the attention kernels of GPUs"
        draft.leave_out(LeftOut(what, (names.packing or "packing",), instead=False))
    for kind in LEFT_OUT:
        draft.leave_out(kind)
    if options.deepspeed is not None:
        draft.left_out.setdefault("DeepSpeed", ())
    for name, value in BACKENDS[schema.backend].REHEARSAL.items():
        draft.replace(name, value)
    batch = options.batch or Batch()
    draft.limit_batch(names.per_device, batch.per_device or LARGEST_BATCH)
    draft.limit_batch(names.accumulation, None if batch.total is None else 1)
    draft.limit_batch("per_device_eval_batch_size", None)
    draft.replace(names.output, f"{OWN}/model")
    for name in ("dataset_local_cache_dir", "local_cache_dir"):
        draft.replace(name, f"{OWN}/cache")
    if entry.rehearsal is not None:
        draft.added |= entry.rehearsal.values
    if isinstance(draft.kept.get(_TEST_SIZE), int):
        # more than the first rows may be split off
        draft.replace(_TEST_SIZE, 1)
    draft.leave_absent_sets_out()
    return Arguments(kept=draft.kept, added=draft.added, left_out=draft.left_out)


def list_refused_names(judged: Judged) -> set[str]:
    """The arguments that validation refuses."""
    names = set()
    for finding in select_errors(judged.findings):
        if finding.key:
            names.add(finding.key.removeprefix("args.").partition("[")[0])
    return names


class _Draft:
    """Arguments while they are made fit for a rehearsal."""

    def __init__(self, args: Mapping[str, Any], schema: Schema) -> None:
        self.schema = schema
        self.kept: dict[str, Any] = {}
        self.added: dict[str, Any] = {}
        self.left_out: dict[str, tuple[str, ...]] = {}
        for name, value in args.items():
            if value is not None and name in schema.fields:
                self.kept[name] = value

    def replace(self, name: str, value: Any) -> None:
        if name in self.schema.fields:
            self.kept.pop(name, None)
            self.added[name] = value

    def leave_out(self, kind: LeftOut) -> None:
        for name in kind.names:
            if name not in self.kept or not kind.asks(self.kept[name]):
                continue
            del self.kept[name]
            before = self.left_out.get(kind.what, ())
            self.left_out[kind.what] = (*before, name)
            if kind.instead is not None:
                self.added[name] = kind.instead

    def limit_batch(self, name: str, default: int | None) -> None:
        """At most two rows a micro-batch and two micro-batches a step."""
        value = self.kept.get(name, default)
        # the parser has something to say of what is no number
        if isinstance(value, int):
            self.kept.pop(name, None)
            self.added[name] = min(value, LARGEST_BATCH)

    def leave_absent_sets_out(self) -> None:
        """Of a mixture the sets that are on this machine, if any are."""
        listed = self.kept.get("datasets")
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            return
        present = []
        absent = []
        for item in listed:
            path = item.get("path")
            if _is_absent(path):
                absent.append(str(path))
            else:
                present.append(item)
        if not present:
            # the rows that stand in have columns of their own
            self.kept["datasets"] = [_keep_all_columns(item) for item in listed]
        elif absent:
            what = f"the rows of {', '.join(absent)}, which are not on this machine"
            self.left_out[what] = ("datasets",)
            self.kept["datasets"] = present


def _keep_all_columns(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**item, "columns": None} if "columns" in item else item


def _is_absent(path: Any) -> bool:
    """Whether it is the name of a data set of the hub that was not downloaded."""
    if not isinstance(path, str) or path in sources.LOADERS or path.count("/") != 1:
        return False
    if exists(Path(path)) or model_config.is_path(path):
        return False
    return model_config.find_snapshot(path, os.environ, kind="datasets") is None
