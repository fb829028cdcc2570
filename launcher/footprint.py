"""`Plan` -> `memory.Setup`: what of a stage file memory depends on, under either backend's names."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher import lengths, memory, shapes
from launcher import situation as situations
from launcher.activations import FULL, HALF
from launcher.backends import model_config, olmo_core_rules
from launcher.errors import Finding, InvalidConfig
from launcher.lengths import Batch, Lengths
from launcher.memory import Adapters, Setup, Sharding, Zero
from launcher.packed_rows import Packed, pack
from launcher.plan import Plan
from launcher.shapes import Shape

ATTENTIONS = ("flash_2", "flash_3", "flash_4", "sdpa", "eager")
UNKNOWN_STEPS = 1000
"""The largest of so many steps is taken where it is not known how many there are."""
# finetune.py:633 and dpo_tune_cache.py:372; PEFT's own choice where TRL names none
_OPEN_INSTRUCT_TARGETS = (
    "q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
_PEFT_TARGETS = ("q_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One plan with the shape of its model and the lengths of its rows; `attention` as in ATTENTIONS."""

    plan: Plan
    shape: Shape
    rows: Lengths
    attention: str

    @property
    def dpo(self) -> bool:
        """Whether a row is two sequences, forwarded together."""
        return self.plan.stage.options.stage == "dpo"

    @property
    def packed(self) -> bool:
        """Whether the rows of a micro-batch lie behind each other, without padding."""
        names, values = self.plan.stage.entry.names, self.plan.values
        if self.plan.stage.options.backend == "trl":
            # its DPO pads whatever is asked for (trl/trainer/dpo_trainer.py:735)
            return not self.dpo and bool(values.get("packing") or values.get("padding_free"))
        return bool(names.packing and values.get(names.packing))

    @property
    def checkpointing(self) -> bool:
        """Whether activations are computed again: open-instruct's DPO asks by its memory budget."""
        values = self.plan.values
        budget = values.get("activation_memory_budget")
        if isinstance(budget, int | float):
            return budget < 1 and self.adapters is None
        return bool(values.get("gradient_checkpointing"))

    @property
    def adapters(self) -> Adapters | None:
        """LoRA, if any."""
        values = self.plan.values
        if values.get("use_lora"):
            width = HALF if self.zero is not None else FULL
            return Adapters(
                rank=int(values["lora_rank"]), targets=_OPEN_INSTRUCT_TARGETS, bytes=width,
                dropout=bool(values.get("lora_dropout")),
            )  # fmt: skip
        if values.get("use_peft"):
            named = values.get("lora_target_modules") or _PEFT_TARGETS
            if named in ("all-linear", ["all-linear"]):
                named = tuple(self.shape.linears())
            width = HALF if self.zero is not None else FULL
            return Adapters(
                rank=int(values["lora_r"]), targets=tuple(named), bytes=width,
                dropout=bool(values.get("lora_dropout")),
            )  # fmt: skip
        return None

    @property
    def zero(self) -> Zero | None:
        """DeepSpeed, by the stage file or by DPO's own option, which replaces it."""
        return zero_of(self.plan, self.shape.hidden)

    @property
    def autocast(self) -> bool:
        """Whether accelerate casts to 16 bits around each operator; DeepSpeed casts the model instead."""
        if self.plan.stage.options.backend == "trl":
            return self.plan.values.get("bf16") is not False or bool(self.plan.values.get("fp16"))
        return self.zero is None and self.plan.mixed_precision != "no"

    def setup(self, per_device: int | None = None, accumulation: int | None = None) -> Setup:
        """What memory depends on; another split of the global batch where one is given.

        Raises InvalidConfig (`unknown-memory`) for what is not described.
        """
        plan, values = self.plan, self.plan.values
        _require_described(plan)
        rows = (per_device or plan.per_device) * (2 if self.dpo else 1)
        times = accumulation or plan.accumulation
        if plan.stage.entry.torchrun:
            return self._sharded(rows, times)
        batches = (plan.steps or UNKNOWN_STEPS) * times * plan.processes
        trl = plan.stage.options.backend == "trl"
        return Setup(
            shape=self.shape,
            batch=lengths.largest(self.rows, rows=rows, batches=batches, packed=self.packed),
            processes=plan.processes, accumulation=times, stage=plan.stage.options.stage,
            loss=self._loss(), reference=self._reference(), zero=self.zero,
            attention="flash" if self.attention.startswith("flash") else self.attention,
            liger=bool(values.get(plan.stage.entry.names.liger)), checkpointing=self.checkpointing,
            weight_bytes=self._weight_bytes() if trl else HALF, autocast=self.autocast,
            adapters=self.adapters, packed=self.packed, steps=plan.steps,
        )  # fmt: skip

    def _sharded(self, rows: int, times: int) -> Setup:
        """dpo.py: FSDP, no mask, and packed rows that are as long as they may be, however full."""
        plan, values = self.plan, self.plan.values
        limit = int(values.get(plan.stage.entry.names.max_length) or self.rows.longest)
        if self.packed:
            one = whole = Batch(
                rows=1, width=2 * limit, real=2 * limit,
                formula=f"{2 * limit:,} tokens: chosen and rejected, each filled up to {limit:,}",
            )  # fmt: skip
            # every step is one row: nothing is accumulated (dpo.py:224)
            times = 1
        else:
            batches = (plan.steps or UNKNOWN_STEPS) * times * plan.processes
            one = _unmasked(lengths.largest(self.rows, rows=rows, batches=batches, packed=False))
            # dpo.py:244
            whole = _unmasked(
                lengths.largest(
                    self.rows, rows=4 * rows, batches=max(1, batches // 4), packed=False
                )
            )
        compiled = bool(values.get("compile_model"))
        share = values.get("activation_memory_budget")
        shards = olmo_core_rules.mesh(values, plan.processes, plan.nodes)[1]
        return Setup(
            shape=self.shape, batch=one, reference_batch=whole, processes=plan.processes,
            accumulation=times, stage="dpo", loss="logprobs", reference="cache",
            attention="flash" if self.attention.startswith("flash") else self.attention,
            sharding=Sharding(
                shards=shards, share=min(1.0, float(share or 0)) if compiled else None
            ),
            steps=plan.steps,
        )  # fmt: skip

    def _weight_bytes(self) -> int:
        told = str(
            self.plan.values.get("dtype") or self.plan.values.get("torch_dtype") or "float32"
        )
        told = self.shape.dtype if told == "auto" else told
        return HALF if told in {"bfloat16", "float16", "bf16", "fp16"} else FULL

    def _loss(self) -> str:
        if self.plan.stage.options.backend == "trl":
            # its own head goes through the vocabulary in tiles (trl/kernels/chunked_logprob.py:31)
            return "tiled"
        if self.dpo:
            return "logprobs"
        return "liger" if self.plan.values.get(self.plan.stage.entry.names.liger) else "full"

    def _reference(self) -> str:
        values = self.plan.values
        if not self.dpo:
            return ""
        if self.plan.stage.options.backend == "open_instruct":
            return "" if values.get("loss_type") == "simpo" else "cache"
        if self.adapters is not None:
            return "adapter"
        return "" if values.get("precompute_ref_log_probs") else "model"


def _unmasked(batch: Batch) -> Batch:
    """The same batch for a model that is told of no padding, and computes it like any token."""
    return replace(batch, real=batch.tokens)


_SPELT = {"flash_attention_2": "flash_2", "flash_attention_3": "flash_3", "torch": "sdpa"}


def attention_of(plan: Plan, asked: str | None = None) -> str:
    """The attention that is asked for, else what the file says, else the backend's own choice.

    That is sdpa for TRL, and for open-instruct the best that is installed: taken to be flash_2.
    """
    said = asked or plan.values.get("attn_implementation")
    if isinstance(said, str) and (named := _SPELT.get(said, said)) in ATTENTIONS:
        return named
    return "sdpa" if plan.stage.options.backend == "trl" else "flash_2"


def zero_of(plan: Plan, hidden: int) -> Zero | None:
    """DeepSpeed as memory depends on it; None without, and on the CPU."""
    if not plan.gpus:
        return None
    own = plan.values.get("zero_stage")
    if isinstance(own, int) and not isinstance(own, bool):
        # DPO's own option replaces the stage file's (dpo_tune_cache.py:129)
        # what upstream then builds (dpo_tune_cache.py:78)
        section: dict[str, Any] = {
            "stage": own, "overlap_comm": True, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        }  # fmt: skip
        for name in ("optimizer", "param"):
            if plan.values.get(f"offload_{name}"):
                section[f"offload_{name}"] = {"device": "cpu"}
        if own == 3:
            section["zero_hpz_partition_size"] = plan.values.get("zero_hpz_partition_size")
        return memory.zero_of({"zero_optimization": section}, hidden)
    told, _ = situations.deepspeed_of(plan.stage.options)
    return memory.zero_of(told, hidden)


def shape_of(plan: Plan, like: str | None = None) -> Shape:
    """The model's shape, or that of another one that it is `like`.

    Raises InvalidConfig (`unknown-shape`) where no config of it is to be had.
    """
    values, environ = plan.values, os.environ
    if like is not None:
        return shapes.find(like, environ)
    name = values.get("config_name") or values.get(plan.stage.entry.names.model)
    if plan.stage.entry.torchrun and values.get("config_name"):
        # OLMo-core's name for a shape: the folder itself says it, or else the model of that name
        known = (hub for hub, config in plan.stage.schema.models.items() if config == name)
        own = values.get(plan.stage.entry.names.model)
        name = own if model_config.read(own, environ) else next(known, name)
    if plan.stage.entry.torchrun:
        # neither of the two is read there; OLMo-core at the pin ties no embeddings
        return shapes.untied(shapes.find(name, environ))
    given = values.get("additional_model_arguments")
    replaced = given if isinstance(given, Mapping) else None
    revision = values.get("model_revision")
    return shapes.find(name, environ, revision if isinstance(revision, str) else None, replaced)


def _require_described(plan: Plan) -> None:
    values = plan.values
    quantised = [k for k in ("use_qlora", "load_in_4bit", "load_in_8bit") if values.get(k)]
    told = {
        "quantised weights": bool(quantised),
        "FSDP": bool(values.get("fsdp")),
        "tensor parallelism": int(values.get("tensor_parallel_degree") or 1) > 1
        and plan.stage.entry.torchrun,
        "sequence parallelism": int(values.get("sequence_parallel_size") or 1) > 1,
        "an optimizer of less than 32 bits": "8bit" in str(values.get("optim")),
        "the Muon optimizer": values.get("optimizer_type") == "muon",
        "training on the CPU": not plan.gpus,
    }
    lacking = [what for what, asked in told.items() if asked]
    if lacking:
        origin = plan.stage.config.origin("args")
        raise InvalidConfig(
            Finding(
                severity="error", layer="launch", code="unknown-memory",
                message=f"the memory of {' and '.join(lacking)} is not described",
                help="measure it: `launch check` tells the peak of a short run", file=origin.file,
                line=origin.line,
            )
        )  # fmt: skip


def refilled(plan: Plan) -> int | None:
    """Tokens of the rows that rows are put together into beforehand: TRL's SFT does that."""
    options, values = plan.stage.options, plan.values
    if options.backend != "trl" or options.stage != "sft" or not values.get("packing"):
        return None
    limit = values.get(plan.stage.entry.names.max_length)
    return limit if isinstance(limit, int) and limit > 0 else None


def rows_of(plan: Plan, seen: Lengths) -> Lengths:
    """The rows as training gets them: cut at the limit, or put together into full ones.

    Best fit leaves less than 1 % of a row empty, which is taken for none; only `bfd` cuts first.
    """
    limit = plan.values.get(plan.stage.entry.names.max_length)
    cut = seen.cut(limit if isinstance(limit, int) else None)
    full = refilled(plan)
    if full is None:
        return cut
    before = cut if plan.values.get("packing_strategy") == "bfd" else seen
    rows = None if before.rows is None else math.ceil(before.rows * before.mean / full)
    source = f"{before.source}, packed into rows of {full:,}"
    return Lengths(mean=float(full), longest=full, source=source, rows=rows)


def trained_rows(plan: Plan, seen: Lengths, rows: int | None) -> int | None:
    """How many rows an epoch has where the data set has `rows`."""
    return None if rows is None else rows_of(plan, replace(seen, rows=rows)).rows


def packed_row(plan: Plan, rows: Lengths | None) -> Packed | None:
    """How full the row of each rank is on average where dpo.py packs; None anywhere else."""
    values, names = plan.values, plan.stage.entry.names
    limit = values.get(names.max_length)
    if not plan.stage.entry.torchrun or not values.get("packing") or rows is None:
        return None
    if not isinstance(limit, int) or limit < 1:
        return None
    return pack(rows, pairs=plan.per_device * plan.accumulation, limit=limit)


def optimizer_steps(plan: Plan, rows: int | None, seen: Lengths | None = None) -> int | None:
    """Steps in all: what the plan knows, else by the number of rows, and (packed) their lengths."""
    if plan.steps is not None or rows is None:
        return plan.steps
    epochs = plan.values.get(plan.stage.entry.names.epochs)
    if (row := packed_row(plan, seen)) is not None and isinstance(epochs, int | float):
        return int(rows / row.pairs / plan.processes) * int(epochs)
    if plan.stage.entry.torchrun and isinstance(epochs, int | float):
        # what does not fill a batch is left out (dpo.py:235)
        return rows // plan.global_batch * int(epochs)
    each = -(-rows // plan.global_batch)
    return math.ceil(float(epochs) * each) if isinstance(epochs, int | float) else None
