"""`Plan` -> `Setup`: what of a stage file memory and time depend on, for either trainer."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from launcher.artifacts import architecture, lengths, model_config
from launcher.artifacts.architecture import Shape
from launcher.artifacts.lengths import Lengths, MicroBatch, Packed, pack
from launcher.errors import InvalidConfig
from launcher.lazy_dataclass import dataclass
from launcher.plan.memory.setup import (
    FULL,
    HALF,
    Adapters,
    Quantised,
    Setup,
    Sharding,
    Zero,
    parse_zero,
    refuse_undescribed,
)
from launcher.plan.plan import Plan, count_steps, find_step_limit
from launcher.rules.deepspeed import engine_config
from launcher.rules.model import LIGER_MODELS
from launcher.rules.open_instruct import olmo_core
from launcher.rules.trl import resolved
from launcher.upstream.entry import Entry
from launcher.upstream.schema import Values

ATTENTIONS = ("flash_2", "flash_3", "flash_4", "sdpa", "eager")
UNKNOWN_STEPS = 1000  # where the number of steps is not known, the largest of this many is taken
# finetune.py::main[target_modules] and dpo_tune_cache.py::main[target_modules]
_OPEN_INSTRUCT_TARGETS = tuple("q_proj o_proj v_proj k_proj gate_proj up_proj down_proj".split())
# peft/utils/constants.py::[TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING =]: what PEFT adapts
# where nothing is named, and of the families in `shapes` those for which it does
_PEFT_TARGETS = ("q_proj", "v_proj")
_PEFT_CHOOSES = ("llama", "mistral", "qwen2", "qwen3")
# what keeps Adam's two states, and whether it is the fused one;
# transformers/training_args.py::TrainingArguments[default_optim #2]
_ADAM = {"adamw_torch_fused": True, "adamw_torch": False}
_BITSANDBYTES = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit")


class Tokens(NamedTuple):
    """Tokens of one optimizer step over all ranks: `real` ones, and `computed` with padding."""

    real: float
    computed: float
    formula: str

    @property
    def waste(self) -> float:
        if not self.computed:
            return 0.0
        return 1 - self.real / self.computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One plan with the shape of its model and the lengths of its rows; `attention` as in
    ATTENTIONS.
    """

    plan: Plan
    shape: Shape
    rows: Lengths
    attention: str

    @property
    def entry(self) -> Entry:
        return self.plan.stage.entry

    @property
    def values(self) -> Values:
        return self.plan.values

    @property
    def pairs(self) -> bool:
        """Whether a row is two sequences, forwarded together."""
        return self.plan.stage.schema.pairs

    @property
    def packed(self) -> bool:
        return self._packs(self.plan.per_device)

    def _packs(self, per_device: int) -> bool:
        return self.entry.packing != "padded" and self.entry.packs(self.values, per_device)

    def _count_sequences(self, per_device: int) -> int:
        return 2 * per_device if self.pairs else per_device

    @property
    def typical(self) -> MicroBatch:
        sequences = self._count_sequences(self.plan.per_device)
        return lengths.find_typical_batch(self.rows, rows=sequences, packed=self.packed)

    @property
    def tokens(self) -> Tokens:
        """What one step reads on average; DPO reads two sequences a row, as one batch.

        Rows that dpo.py packs are computed whole, however full: one a rank.
        """
        ranks = self.plan.processes
        if self.entry.packing == "always":
            # ranks that share a row compute its parts
            ranks = self.plan.devices
        row = measure_packed_row(self.plan, self.rows)
        if row is not None:
            formula = (
                f"{ranks} rows of {row.positions:,} positions, {row.pairs:.1f} pairs and "
                f"{row.real:,.0f} tokens in each on average"
            )
            return Tokens(row.real * ranks, float(row.positions * ranks), formula)
        batch = self.typical
        accumulation = self.plan.accumulation
        formula = f"{batch.rows} x {batch.width:,} on average, x {accumulation} x {ranks}"
        batches = accumulation * ranks
        return Tokens(batch.real * batches, batch.tokens * batches, formula)

    @property
    def checkpointing(self) -> bool:
        """Whether activations are recomputed."""
        return self.entry.recomputes(self.values)

    @property
    def adapters(self) -> Adapters | None:
        values = self.values
        width = FULL
        if self.zero is not None:
            width = HALF
        if values.get("use_lora"):
            rank = values["lora_rank"]
            targets: tuple[str, ...] = _OPEN_INSTRUCT_TARGETS
        elif values.get("use_peft"):
            rank = values["lora_r"]
            targets = self._choose_peft_targets()
            if self.quantised is not None:
                # on 4-bit weights TRL has made them bf16
                # (trl/trainer/sft_trainer.py::SFTTrainer.__init__[if _is_quantized_model])
                width = HALF
        else:
            return None
        return Adapters(int(rank), targets, width, bool(values.get("lora_dropout")))

    def _list_named_targets(self) -> list[str]:
        """The last parts of `lora_target_modules`; empty where PEFT itself chooses."""
        named = self.values.get("lora_target_modules") or []
        if isinstance(named, str):
            named = [named]
        return [str(target).split(".")[-1] for target in named]

    def _choose_peft_targets(self) -> tuple[str, ...]:
        """The layer's linears that PEFT adapts."""
        named = self._list_named_targets()
        if not named:
            return _PEFT_TARGETS
        linears = self.shape.linears()
        if named == ["all-linear"]:
            return tuple(linears)
        return tuple(name for name in linears if name in named)

    def _find_peft_fault(self) -> str | None:
        """What is not described of the linears that PEFT adapts."""
        named = self._list_named_targets()
        family = self.shape.family
        if not named and family not in _PEFT_CHOOSES:
            return f"PEFT itself chooses no `lora_target_modules` for {family} models"
        linears = self.shape.linears()
        unknown = [name for name in named if name not in linears]
        if not unknown or named == ["all-linear"]:
            return None
        described = ", ".join(linears)
        return f"the memory of LoRA on `{unknown[-1]}` is not described: described are {described}"

    @property
    def quantised(self) -> Quantised | None:
        """Frozen weights of 4 bits; open-instruct always takes nested scales for them."""
        qlora = self.values.get("use_qlora")
        if not qlora and not self.values.get("load_in_4bit"):
            return None
        return Quantised(bool(qlora or self.values.get("use_bnb_nested_quant")))

    @property
    def zero(self) -> Zero | None:
        """DeepSpeed by the stage file, or by DPO's own option instead; None on the CPU."""
        if not self.plan.gpus:
            return None
        file, _ = self.plan.stage.read_deepspeed()
        return parse_zero(engine_config(self.values, file), self.shape.hidden)

    @property
    def autocast(self) -> bool:
        """Whether accelerate casts to 16 bits around each operator; DeepSpeed casts the model."""
        if self.zero is not None:
            return False
        if self.entry.own_precision:
            return resolved.precision(self.values) is not None
        return self.plan.mixed_precision != "no"

    @property
    def liger(self) -> bool:
        """Whether Liger's kernels run: TRL goes on without them where it has none for the model."""
        # finetune.py::main[elif args.use_liger_kernel]
        if self.values.get("use_qlora") or self.shape.family not in LIGER_MODELS:
            return False
        return self.entry.liger(self.values)

    @property
    def reference(self) -> str:
        """Where DPO's reference stands, as in `Setup`."""
        if not self.plan.stage.refers:
            return ""
        if self.entry.caches_reference:
            return "cache"
        if self.adapters is not None:
            return "adapter"
        if self.values.get("precompute_ref_log_probs"):
            return ""
        return "model"

    def setup(self, per_device: int | None = None, accumulation: int | None = None) -> Setup:
        """What memory depends on, with this split of the batch.

        Raises InvalidConfig (`unknown-memory`).
        """
        self._require_described()
        per_device = per_device or self.plan.per_device
        accumulation = accumulation or self.plan.accumulation
        if self.entry.sharding == "fsdp" and self.entry.fills_rows(self.values):
            return self._set_up_full_rows(per_device, accumulation)
        if self.entry.sharding == "fsdp":
            return self._set_up_pairs(per_device, accumulation)
        packed = self._packs(per_device)
        sequences = self._count_sequences(per_device)
        return Setup(
            shape=self.shape,
            batch=self._find_largest_batch(sequences, accumulation, packed=packed),
            processes=self.plan.processes,
            accumulation=accumulation,
            reference=self.reference,
            zero=self.zero,
            loss=self._loss,
            attention=self._kernel,
            liger=self.liger,
            checkpointing=self.checkpointing,
            weight_bytes=self._count_weight_bytes(),
            autocast=self.autocast,
            adapters=self.adapters,
            packed=packed,
            quantised=self.quantised,
            state_bytes=self._count_state_bytes(),
            fused_optimizer=self._fuses_optimizer(),
        )

    @property
    def _loss(self) -> str:
        """The loss, as in `Setup`."""
        if self.entry.tiled_loss:
            return "tiled"
        if self.pairs:
            return "logprobs"
        if self.liger:
            return "liger"
        return "full"

    def _fuses_optimizer(self) -> bool:
        values = self.values
        if "optim" in values:
            # bitsandbytes' kernel makes nothing beside its states
            return _ADAM.get(self._optimizer, True)
        return bool(values.get("fused_optimizer") or values.get("use_qlora"))

    @property
    def _kernel(self) -> str:
        return self.attention.partition("_")[0]

    def _find_largest_batch(
        self, rows: int, accumulation: int, *, packed: bool = False
    ) -> MicroBatch:
        batches = self._count_batches(accumulation)
        return lengths.find_largest_batch(self.rows, rows=rows, batches=batches, packed=packed)

    def _count_batches(self, accumulation: int) -> int:
        """The micro-batches of all ranks in the whole run."""
        steps = self.plan.steps or UNKNOWN_STEPS
        return steps * accumulation * self.plan.processes

    @property
    def _limit(self) -> int:
        return int(self.values.get(self.entry.names.max_length) or self.rows.longest)

    def _set_up_fsdp(self, batch: MicroBatch, accumulation: int, shards: int) -> Setup:
        """OLMo-core's FSDP; what the loss needs is left to the scripts."""
        share = None
        if self.values.get("compile_model"):
            share = min(1.0, float(self.values.get("activation_memory_budget") or 0))
        selected = self.entry.selects_modules(self.values)
        return Setup(
            shape=self.shape,
            batch=batch,
            processes=self.plan.processes,
            accumulation=accumulation,
            attention=self._kernel,
            sharding=Sharding(shards=shards, share=share, selected=selected),
        )

    def _set_up_full_rows(self, rows: int, accumulation: int) -> Setup:
        """olmo_core_finetune.py: full rows, each split over the GPUs that share it, FSDP over a
        machine.
        """
        shared = int(self.values.get(self.entry.names.shared) or 1)
        shared = max(1, shared)
        width = math.ceil(self._limit / shared)
        batch = MicroBatch(rows=rows, width=width, real=rows * width)
        per_machine = self.plan.processes // self.plan.nodes
        shards = max(1, per_machine // shared)
        setup = self._set_up_fsdp(batch, accumulation, shards)
        loss = "full"
        if self.values.get("loss_implementation") == "fused_linear":
            loss = "liger"
        # SkipStepAdamW has three lists as large as the gradients at once
        # (olmo_core_finetune.py::main[optim=optim.SkipStepAdamWConfig])
        return replace(setup, loss=loss, step_copies=3)

    def _set_up_pairs(self, per_device: int, accumulation: int) -> Setup:
        """dpo.py: no mask, and packed rows that are as long as they may be, however full."""
        if self.packed:
            # chosen and rejected, each filled up
            width = 2 * self._limit
            batch = MicroBatch(rows=1, width=width, real=width)
            reference = batch
            # every step is one row: nothing is accumulated
            # (dpo.py::main[args.gradient_accumulation_steps])
            accumulation = 1
        else:
            rows = 2 * per_device
            batch = self._find_largest_batch(rows, accumulation)
            # the reference takes four times the rows (dpo.py::main[cache_batch_size = int])
            batches = max(1, self._count_batches(accumulation) // 4)
            reference = lengths.find_largest_batch(
                self.rows, rows=4 * rows, batches=batches, packed=False
            )
            # a model that gets no mask of the padding computes it like any token
            batch = replace(batch, real=batch.tokens)
            reference = replace(reference, real=reference.tokens)
        _, shards = olmo_core.mesh(self.values, self.plan.processes, self.plan.nodes)
        setup = self._set_up_fsdp(batch, accumulation, shards)
        fused = bool(self.values.get("fused_optimizer"))
        return replace(
            setup,
            reference_batch=reference,
            loss="logprobs",
            reference="cache",
            fused_optimizer=fused,
        )

    @property
    def _optimizer(self) -> str:
        values = self.values
        if not values.get("use_qlora"):
            return str(values.get("optim") or "adamw_torch_fused")
        # finetune.py::main[if args.use_qlora #3]
        if values.get("use_8bit_optimizer"):
            return "paged_adamw_8bit"
        return "paged_adamw_32bit"

    def _count_state_bytes(self) -> float | None:
        """Of bitsandbytes' Adam, an element; None for torch's own.

        Two states of 8 bits, but those of the embedding, with scales for every 256
        (transformers/trainer.py::Trainer.create_optimizer[manager.register_module_override]). Paged
        states leave the card where there is no room, scales stay.
        """
        name = self._optimizer
        if name not in _BITSANDBYTES:
            return None
        if "8bit" not in name:
            return 0.0
        narrow = 1.0
        if self.adapters is None:
            narrow = 1 - self.shape.embedding / self.shape.parameters
        scales = narrow * 2 * FULL / 256
        if "paged" in name:
            return scales
        return scales + 2 * narrow + 2 * FULL * (1 - narrow)

    def _count_weight_bytes(self) -> int:
        """Bytes of one element of the loaded weights.

        DeepSpeed casts what it trains to 16 bits
        (deepspeed/runtime/engine.py::DeepSpeedEngine._configure_distributed_model[is_zero_init_model,]).
        Raises InvalidConfig if nothing says their type, or if training is in 32 bits throughout.
        """
        if self.zero is not None:
            return HALF
        dtype = self._find_dtype()
        if dtype == "auto":
            dtype = self.shape.dtype
        if not dtype:
            where = "the model's config.json has no `torch_dtype`"
            raise self._build_error(f"the type of the loaded weights is not known: {where}")
        if dtype in {"bfloat16", "float16", "bf16", "fp16"}:
            return HALF
        if not self.autocast and self.plan.gpus:
            message = "the memory of training in 32 bits throughout is not described"
            raise self._build_error(message)
        return FULL

    def _find_dtype(self) -> str:
        """The type that the arguments ask for, else the script's; `auto` is the model's own."""
        if self.values.get("use_qlora"):
            # what is not quantised PEFT makes fp32
            # (peft/utils/other.py::prepare_model_for_kbit_training[cast all non INT8])
            return "float32"
        own = _read_model_arguments(self.values)
        dtype = own.get("dtype") or own.get("torch_dtype") or self.values.get("dtype")
        if dtype:
            return str(dtype)
        if self.liger:
            return self.entry.liger_dtype
        return self.entry.dtype

    def _require_described(self) -> None:
        values = self.values
        entry = self.entry
        optimizer = self._optimizer
        shared = entry.names.shared
        peft = values.get("use_peft")
        adapted = peft or values.get("use_lora")
        more = ("use_dora", "lora_modules_to_save", "lora_target_parameters")
        selects = entry.selects_modules(values) and not entry.fills_rows(values)
        is_shared = int(values.get(shared) or 1) > 1 and entry.packing != "always"
        is_bitsandbytes = optimizer in _BITSANDBYTES
        table = {
            "eager attention": self.attention == "eager",
            "weights quantised to 8 bits": values.get("load_in_8bit"),
            "quantised weights without adapters": self.quantised is not None and not adapted,
            "FSDP": values.get("fsdp"),
            f"`{shared}`": is_shared,
            f"`optim: {optimizer}`": not is_bitsandbytes and optimizer not in _ADAM,
            f"`optim: {optimizer}` under DeepSpeed": is_bitsandbytes and self.zero is not None,
            # dpo_tune_cache.py::main[if args.use_qlora or]
            "a paged optimizer": values.get("dpo_use_paged_optimizer"),
            "separate forward passes": values.get("concatenated_forward") is False,
            "adapters that are more than LoRA": peft and any(values.get(key) for key in more),
            "offloaded activations": values.get("activation_offloading"),
            "the Muon optimizer": values.get("optimizer_type") == "muon",
            "`activation_checkpointing_mode: selected_modules`": selects,
        }
        lacking = [name for name, present in table.items() if present]
        if lacking:
            raise self._build_error(f"the memory of {' and '.join(lacking)} is not described")
        if peft:
            fault = self._find_peft_fault()
            if fault is not None:
                raise self._build_error(fault)

    def _build_error(self, message: str) -> InvalidConfig:
        return refuse_undescribed(message, **self.plan.stage.config.origin("args").place)


_SPELT = {"flash_attention_2": "flash_2", "flash_attention_3": "flash_3", "torch": "sdpa"}


def decide_attention(plan: Plan, requested: str | None = None) -> str:
    """The attention that is requested, else what the file says, else the backend's own choice.

    That is sdpa, or (`Entry.best_attention`) the best that is installed on GPUs: taken to be
    flash_2.
    """
    name = requested or _read_model_arguments(plan.values).get("attn_implementation")
    name = str(name or plan.values.get("attn_implementation")).removeprefix("paged|")
    name = _SPELT.get(name, name)
    if name in ATTENTIONS:
        return name
    if plan.gpus and plan.stage.entry.best_attention:
        return "flash_2"
    return "sdpa"


def _read_model_arguments(values: Values) -> Mapping[str, Any]:
    """What TRL passes to the model (trl/scripts/sft.py::main[model_init_kwargs.update]): keys of
    its config among them.
    """
    return resolved.inline(values.get("model_init_kwargs")) or {}


def find_model_shape(
    plan: Plan, like: str | None = None, packages: Mapping[str, str] | None = None
) -> Shape:
    """The shape of the plan's model, or of the model `like`; `packages` are those that train.

    Raises InvalidConfig (`unknown-shape`) where no config of it is to be had.
    """
    values = plan.values
    stage = plan.stage
    if like is not None:
        return architecture.find(like, os.environ)
    model = values.get(stage.entry.names.model)
    name = values.get("config_name") or model
    if stage.entry.models is None:
        replaced = _read_model_arguments(values) or values.get("additional_model_arguments")
        if not isinstance(replaced, Mapping):
            replaced = None
        revision = values.get("model_revision")
        if not isinstance(revision, str):
            revision = None
        return architecture.find(name, os.environ, revision, replaced)
    if values.get("config_name"):
        # OLMo-core's name for a shape: the folder itself says it, or else the model of that name
        hubs = [hub for hub, config in stage.schema.models.items() if config == name]
        if model_config.read_model_config(model, os.environ):
            name = model
        elif hubs:
            name = hubs[0]
    shape = architecture.find(name, os.environ)
    if olmo_core.ties(values, packages or {}):
        return shape
    return architecture.untie_embeddings(shape)


def _read_row_limit(plan: Plan) -> int | None:
    """Tokens of a row at most, where the arguments say so."""
    limit = plan.values.get(plan.stage.entry.names.max_length)
    if isinstance(limit, int) and limit > 0:
        return limit
    return None


def measure_trained_rows(plan: Plan, data: Lengths) -> Lengths:
    """The rows as training gets them: cut at the limit, or packed into full ones.

    Best fit leaves less than 1 % of a row empty, which is taken for none; only `bfd` cuts first.
    """
    limit = _read_row_limit(plan)
    entry = plan.stage.entry
    cut = data.cut(limit)
    if limit is None or not entry.fills_rows(plan.values):
        return cut
    if entry.packing == "always" or plan.values.get("packing_strategy") == "bfd":
        data = cut
    rows = None
    if data.rows is not None:
        rows = math.ceil(data.rows * data.mean / limit)
    return lengths.make_uniform(limit, f"{data.source}, packed into rows of {limit:,}", rows)


def count_rows_per_epoch(plan: Plan, data: Lengths, rows: int | None) -> int | None:
    """How many rows an epoch has where the data set has `rows`."""
    if rows is None:
        return None
    return measure_trained_rows(plan, replace(data, rows=rows)).rows


def measure_packed_row(plan: Plan, rows: Lengths | None) -> Packed | None:
    """How full the row of each rank is on average where dpo.py packs; None anywhere else."""
    limit = _read_row_limit(plan)
    if not plan.stage.entry.takes_one_row(plan.values) or rows is None or limit is None:
        return None
    return pack(rows, pairs=plan.per_device * plan.accumulation, limit=limit)


def count_optimizer_steps(
    plan: Plan, rows: int | None, data: Lengths | None = None, *, override: bool = False
) -> int | None:
    """Steps in all: what the plan knows, else by the number of rows, and (packed) their lengths.

    `override`: `rows` replace what the plan has counted.
    """
    if rows is None:
        return plan.steps
    is_limited = find_step_limit(plan.stage, plan.values) is not None
    if plan.steps is not None and (is_limited or not override):
        return plan.steps
    epochs = plan.values.get(plan.stage.entry.names.epochs)
    row = measure_packed_row(plan, data)
    if row is not None and isinstance(epochs, int | float):
        steps_per_epoch = int(rows / row.pairs / plan.processes)
        return steps_per_epoch * int(epochs)
    return count_steps(plan.stage, plan.values, rows, plan.global_batch)
