"""`Plan` -> `Setup`: what of a stage file memory and time depend on, under either backend's names."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from launcher.artifacts import architecture, lengths, model_config
from launcher.artifacts.architecture import Shape
from launcher.artifacts.lengths import Lengths, MicroBatch, Packed, pack
from launcher.errors import InvalidConfig, launch_finding
from launcher.plan.memory import setup
from launcher.plan.memory.setup import FULL, HALF, Adapters, Quantised, Setup, Sharding, Zero
from launcher.plan.plan import Plan, step_limit, steps_of
from launcher.rules.deepspeed import engine_config
from launcher.rules.model import LIGER_MODELS
from launcher.rules.open_instruct import olmo_core
from launcher.rules.trl import resolved
from launcher.upstream.schema import Values

ATTENTIONS = ("flash_2", "flash_3", "flash_4", "sdpa", "eager")
UNKNOWN_STEPS = 1000  # the largest of so many steps is taken where it is not known how many there are
# finetune.py::main[target_modules] and dpo_tune_cache.py::main[target_modules]; PEFT's own choice where TRL names none
_OPEN_INSTRUCT_TARGETS = ("q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj")
# peft/utils/constants.py::[TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING =]: what PEFT adapts where nothing is
# named, and of the families in `shapes` those for which it does
_PEFT_TARGETS, _PEFT_CHOOSES = ("q_proj", "v_proj"), ("llama", "mistral", "qwen2", "qwen3")
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
        return 1 - self.real / self.computed if self.computed else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One plan with the shape of its model and the lengths of its rows; `attention` as in ATTENTIONS."""

    plan: Plan
    shape: Shape
    rows: Lengths
    attention: str

    @property
    def pairs(self) -> bool:
        """Whether a row is two sequences, forwarded together."""
        return self.plan.stage.schema.pairs

    @property
    def packed(self) -> bool:
        return self._packed(self.plan.per_device)

    def _packed(self, per_device: int) -> bool:
        entry = self.plan.stage.entry
        return entry.packing != "padded" and entry.packs(self.plan.values, per_device)

    @property
    def typical(self) -> MicroBatch:
        sequences = self.plan.per_device * (2 if self.pairs else 1)
        return lengths.typical(self.rows, rows=sequences, packed=self.packed)

    @property
    def tokens(self) -> Tokens:
        """What one step reads on average; DPO reads two sequences a row, as one batch.

        Rows that dpo.py packs are computed whole, however full: one a rank.
        """
        ranks, times = self.plan.processes, self.plan.accumulation
        if self.plan.stage.entry.packing == "always":
            # those that share a row compute its parts
            ranks = self.plan.devices
        if (row := packed_row(self.plan, self.rows)) is not None:
            formula = (
                f"{ranks} rows of {row.positions:,} positions, {row.pairs:.1f} pairs and "
                f"{row.real:,.0f} tokens in each on average"
            )
            return Tokens(row.real * ranks, float(row.positions * ranks), formula)
        one = self.typical
        formula = f"{one.rows} x {one.width:,} on average, x {times} x {ranks}"
        return Tokens(one.real * times * ranks, one.tokens * times * ranks, formula)

    @property
    def checkpointing(self) -> bool:
        """Whether activations are computed again."""
        return self.plan.stage.entry.recomputes(self.plan.values)

    @property
    def adapters(self) -> Adapters | None:
        values, narrow = self.plan.values, self.zero is not None
        targets: tuple[str, ...] = _OPEN_INSTRUCT_TARGETS
        if values.get("use_lora"):
            rank = values["lora_rank"]
        elif values.get("use_peft"):
            rank, targets = values["lora_r"], self._targets()[0]
            # on 4-bit weights TRL has made them bf16
            # (trl/trainer/sft_trainer.py::SFTTrainer.__init__[if _is_quantized_model])
            narrow = narrow or self.quantised is not None
        else:
            return None
        return Adapters(int(rank), targets, HALF if narrow else FULL, bool(values.get("lora_dropout")))

    def _targets(self) -> tuple[tuple[str, ...], str]:
        """The layer's linears that PEFT adapts, and what is not described."""
        named, linears = self.plan.values.get("lora_target_modules"), self.shape.linears()
        if named in ("all-linear", ["all-linear"]):
            return tuple(linears), ""
        if not named:
            chosen = self.shape.family in _PEFT_CHOOSES
            fault = f"PEFT itself chooses no `lora_target_modules` for {self.shape.family} models"
            return _PEFT_TARGETS, "" if chosen else fault
        adapted = [str(target).split(".")[-1] for target in ([named] if isinstance(named, str) else named)]
        fault = ""
        if unknown := [name for name in adapted if name not in linears]:
            fault = f"the memory of LoRA on `{unknown[-1]}` is not described: described are {', '.join(linears)}"
        return tuple(name for name in linears if name in adapted), fault

    @property
    def quantised(self) -> Quantised | None:
        """Whether the frozen weights are of 4 bits; open-instruct always takes nested scales for them."""
        values = self.plan.values
        nested = values.get("use_qlora") or values.get("use_bnb_nested_quant")
        return Quantised(bool(nested)) if values.get("use_qlora") or values.get("load_in_4bit") else None

    @property
    def zero(self) -> Zero | None:
        """DeepSpeed, by the stage file or by DPO's own option, which replaces it; None on the CPU."""
        if not self.plan.gpus:
            return None
        file, _ = self.plan.stage.read_deepspeed()
        return setup.zero_of(engine_config(self.plan.values, file), self.shape.hidden)

    @property
    def autocast(self) -> bool:
        """Whether accelerate casts to 16 bits around each operator; DeepSpeed casts the model instead."""
        if self.zero is not None:
            return False
        if self.plan.stage.entry.own_precision:
            return resolved.precision(self.plan.values) is not None
        return self.plan.mixed_precision != "no"

    @property
    def liger(self) -> bool:
        """Whether Liger's kernels run: TRL goes on without them where it has none for the model."""
        # finetune.py::main[elif args.use_liger_kernel]
        quantised = self.plan.values.get("use_qlora")
        return self.plan.stage.entry.liger(self.plan.values) and not quantised and self.shape.family in LIGER_MODELS

    @property
    def reference(self) -> str:
        """Where DPO's reference stands, as in `Setup`."""
        if not self.plan.stage.refers:
            return ""
        if self.plan.stage.entry.caches_reference:
            return "cache"
        if self.adapters is not None:
            return "adapter"
        return "" if self.plan.values.get("precompute_ref_log_probs") else "model"

    def setup(self, per_device: int | None = None, accumulation: int | None = None) -> Setup:
        """What memory depends on, with this split of the batch. Raises InvalidConfig (`unknown-memory`)."""
        plan, values, entry = self.plan, self.plan.values, self.plan.stage.entry
        self._require_described()
        each, times = per_device or plan.per_device, accumulation or plan.accumulation
        rows, packed = each * (2 if self.pairs else 1), self._packed(each)
        if entry.sharding == "fsdp" and entry.fills_rows(values):
            return self._filled(rows, times)
        if entry.sharding == "fsdp":
            return self._sharded(rows, times)
        batches = (plan.steps or UNKNOWN_STEPS) * times * plan.processes
        fused = values.get("fused_optimizer") or values.get("use_qlora")
        loss = "logprobs" if self.pairs else "liger" if self.liger else "full"
        return Setup(
            shape=self.shape,
            batch=lengths.largest(self.rows, rows=rows, batches=batches, packed=packed),
            processes=plan.processes,
            accumulation=times,
            reference=self.reference,
            zero=self.zero,
            loss="tiled" if entry.tiled_loss else loss,
            attention=self.attention.partition("_")[0],
            liger=self.liger,
            checkpointing=self.checkpointing,
            weight_bytes=self._weight_bytes(),
            autocast=self.autocast,
            adapters=self.adapters,
            packed=packed,
            quantised=self.quantised,
            state_bytes=self._state_bytes(),
            # bitsandbytes' kernel makes nothing beside its states
            fused_optimizer=_ADAM.get(self._optimizer, True) if "optim" in values else bool(fused),
        )

    def _filled(self, rows: int, times: int) -> Setup:
        """olmo_core_finetune.py: FSDP over a machine, full rows, each cut over the GPUs that share it."""
        plan, values, entry = self.plan, self.plan.values, self.plan.stage.entry
        names = entry.names
        limit = int(values.get(names.max_length) or self.rows.longest)
        shared = max(1, int(values.get(names.shared) or 1))
        width = -(-limit // shared)
        share = min(1.0, float(values.get("activation_memory_budget") or 0))
        sharding = Sharding(
            shards=max(1, plan.processes // plan.nodes // shared),
            share=share if values.get("compile_model") else None,
            selected=entry.selects_modules(values),
        )
        return Setup(
            shape=self.shape,
            batch=MicroBatch(rows=rows, width=width, real=rows * width),
            processes=plan.processes,
            accumulation=times,
            loss="liger" if values.get("loss_implementation") == "fused_linear" else "full",
            attention=self.attention.partition("_")[0],
            sharding=sharding,
        )

    def _sharded(self, rows: int, times: int) -> Setup:
        """dpo.py: FSDP, no mask, and packed rows that are as long as they may be, however full."""
        plan, values = self.plan, self.plan.values
        limit = int(values.get(plan.stage.entry.names.max_length) or self.rows.longest)
        if self.packed:
            # chosen and rejected, each filled up
            one = whole = MicroBatch(rows=1, width=2 * limit, real=2 * limit)
            # every step is one row: nothing is accumulated (dpo.py::main[args.gradient_accumulation_steps])
            times = 1
        else:
            batches = (plan.steps or UNKNOWN_STEPS) * times * plan.processes
            # the reference takes four times the rows (dpo.py::main[cache_batch_size = int])
            one, whole = (
                lengths.largest(self.rows, rows=n * rows, batches=b, packed=False)
                for n, b in ((1, batches), (4, max(1, batches // 4)))
            )
            # a model that gets no mask of the padding computes it like any token
            one, whole = replace(one, real=one.tokens), replace(whole, real=whole.tokens)
        share = min(1.0, float(values.get("activation_memory_budget") or 0))
        shards = olmo_core.mesh(values, plan.processes, plan.nodes)[1]
        return Setup(
            shape=self.shape,
            batch=one,
            reference_batch=whole,
            processes=plan.processes,
            accumulation=times,
            loss="logprobs",
            reference="cache",
            attention=self.attention.partition("_")[0],
            sharding=Sharding(shards=shards, share=share if values.get("compile_model") else None),
            fused_optimizer=bool(values.get("fused_optimizer")),
        )

    @property
    def _optimizer(self) -> str:
        values = self.plan.values
        if values.get("use_qlora"):
            # finetune.py::main[if args.use_qlora #3]
            return "paged_adamw_8bit" if values.get("use_8bit_optimizer") else "paged_adamw_32bit"
        return str(values.get("optim") or "adamw_torch_fused")

    def _state_bytes(self) -> float | None:
        """Of bitsandbytes' Adam, an element; None for torch's own.

        Two states of 8 bits, but those of the embedding, with scales for every 256
        (transformers/trainer.py::Trainer.create_optimizer[manager.register_module_override]). Paged states leave the
        card where there is no room, scales stay.
        """
        name = self._optimizer
        if name not in _BITSANDBYTES:
            return None
        narrow = 1 - (0 if self.adapters else self.shape.embedding / self.shape.parameters)
        if "8bit" not in name:
            return 0.0
        scales = narrow * 2 * FULL / 256
        return scales if "paged" in name else scales + 2 * narrow + 2 * FULL * (1 - narrow)

    def _weight_bytes(self) -> int:
        """Bytes an element of the loaded weights; what DeepSpeed trains it has cast to 16 bits.

        Raises InvalidConfig where the config would have to say their type, or everything is of 32 bits.
        """
        if self.zero is not None:
            # deepspeed/runtime/engine.py::DeepSpeedEngine._configure_distributed_model[is_zero_init_model,]
            return HALF
        values, entry = self.plan.values, self.plan.stage.entry
        own = _model_arguments(values)
        dtype = entry.liger_dtype if self.liger else entry.dtype
        if values.get("use_qlora"):
            # what is not quantised PEFT makes fp32
            # (peft/utils/other.py::prepare_model_for_kbit_training[cast all non INT8])
            dtype = "float32"
        else:
            dtype = str(own.get("dtype") or own.get("torch_dtype") or values.get("dtype") or dtype)
        dtype = self.shape.dtype if dtype == "auto" else dtype
        if not dtype:
            where = "the model's config.json has no `torch_dtype`"
            raise self._undescribed(f"the type of the loaded weights is not known: {where}")
        width = HALF if dtype in {"bfloat16", "float16", "bf16", "fp16"} else FULL
        if width == FULL and not self.autocast and self.plan.gpus:
            raise self._undescribed("the memory of training in 32 bits throughout is not described")
        return width

    def _require_described(self) -> None:
        values, optimizer, shared = self.plan.values, self._optimizer, self.plan.stage.entry.names.shared
        lora = values.get("use_lora") or values.get("use_peft")
        more = ("use_dora", "lora_modules_to_save", "lora_target_parameters")
        entry = self.plan.stage.entry
        chooses, fills = entry.selects_modules(values), entry.fills_rows(values)
        table = {
            "eager attention": self.attention == "eager",
            "weights quantised to 8 bits": values.get("load_in_8bit"),
            "quantised weights without adapters": self.quantised is not None and not lora,
            "FSDP": values.get("fsdp"),
            f"`{shared}`": int(values.get(shared) or 1) > 1 and self.plan.stage.entry.packing != "always",
            f"`optim: {optimizer}`": optimizer not in (*_ADAM, *_BITSANDBYTES),
            f"`optim: {optimizer}` under DeepSpeed": optimizer in _BITSANDBYTES and self.zero is not None,
            # dpo_tune_cache.py::main[if args.use_qlora or]
            "a paged optimizer": values.get("dpo_use_paged_optimizer"),
            "separate forward passes": values.get("concatenated_forward") is False,
            "adapters that are more than LoRA": values.get("use_peft") and any(values.get(key) for key in more),
            "offloaded activations": values.get("activation_offloading"),
            "the Muon optimizer": values.get("optimizer_type") == "muon",
            "`activation_checkpointing_mode: selected_modules`": chooses and not fills,
        }
        if lacking := [name for name, present in table.items() if present]:
            raise self._undescribed(f"the memory of {' and '.join(lacking)} is not described")
        if values.get("use_peft") and (fault := self._targets()[1]):
            raise self._undescribed(fault)

    def _undescribed(self, message: str) -> InvalidConfig:
        help = "measure it: `launch check` tells the peak of a short run"
        finding = launch_finding("error", "unknown-memory", message, help)
        return InvalidConfig(replace(finding, **self.plan.stage.config.origin("args").place))


_SPELT = {"flash_attention_2": "flash_2", "flash_attention_3": "flash_3", "torch": "sdpa"}


def attention_of(plan: Plan, named: str | None = None) -> str:
    """The attention that is requested, else what the file says, else the backend's own choice.

    That is sdpa, or (`Entry.best_attention`) the best that is installed on GPUs: taken to be flash_2.
    """
    given = _model_arguments(plan.values).get("attn_implementation")
    chosen = str(named or given or plan.values.get("attn_implementation")).removeprefix("paged|")
    if _SPELT.get(chosen, chosen) in ATTENTIONS:
        return _SPELT.get(chosen, chosen)
    return "flash_2" if plan.gpus and plan.stage.entry.best_attention else "sdpa"


def _model_arguments(values: Values) -> Mapping[str, Any]:
    """What TRL hands to the model's making (trl/scripts/sft.py::main[model_init_kwargs.update]): keys of its config
    among them.
    """
    return resolved.inline(values.get("model_init_kwargs")) or {}


def shape_of(plan: Plan, like: str | None = None, packages: Mapping[str, str] | None = None) -> Shape:
    """The model's shape, or that of another one that it is `like`; `packages` are those that train.

    Raises InvalidConfig (`unknown-shape`) where no config of it is to be had.
    """
    values, environ, stage = plan.values, os.environ, plan.stage
    if like is not None:
        return architecture.find(like, environ)
    own = values.get(stage.entry.names.model)
    name = values.get("config_name") or own
    if stage.entry.models is not None:
        if values.get("config_name"):
            # OLMo-core's name for a shape: the folder itself says it, or else the model of that name
            known = (hub for hub, config in stage.schema.models.items() if config == name)
            name = own if model_config.read(own, environ) else next(known, name)
        shape = architecture.find(name, environ)
        return shape if olmo_core.ties(values, packages or {}) else architecture.untied(shape)
    replaced = _model_arguments(values) or values.get("additional_model_arguments")
    revision = values.get("model_revision")
    revision = revision if isinstance(revision, str) else None
    return architecture.find(name, environ, revision, replaced if isinstance(replaced, Mapping) else None)


def _limit(plan: Plan) -> int | None:
    """Tokens of a row at most, where the arguments say so."""
    limit = plan.values.get(plan.stage.entry.names.max_length)
    return limit if isinstance(limit, int) and limit > 0 else None


def rows_of(plan: Plan, data: Lengths) -> Lengths:
    """The rows as training gets them: cut at the limit, or put together into full ones.

    Best fit leaves less than 1 % of a row empty, which is taken for none; only `bfd` cuts first.
    """
    full = _limit(plan)
    cut = data.cut(full)
    entry = plan.stage.entry
    if full is None or not entry.fills_rows(plan.values):
        return cut
    cuts_first = entry.packing == "always" or plan.values.get("packing_strategy") == "bfd"
    before = cut if cuts_first else data
    rows = None if before.rows is None else math.ceil(before.rows * before.mean / full)
    return lengths.uniform(full, f"{before.source}, packed into rows of {full:,}", rows)


def rows_per_epoch(plan: Plan, data: Lengths, rows: int | None) -> int | None:
    """How many rows an epoch has where the data set has `rows`."""
    return None if rows is None else rows_of(plan, replace(data, rows=rows)).rows


def packed_row(plan: Plan, rows: Lengths | None) -> Packed | None:
    """How full the row of each rank is on average where dpo.py packs; None anywhere else."""
    limit = _limit(plan)
    if not plan.stage.entry.takes_one_row(plan.values) or rows is None or limit is None:
        return None
    return pack(rows, pairs=plan.per_device * plan.accumulation, limit=limit)


def optimizer_steps(
    plan: Plan, rows: int | None, data: Lengths | None = None, *, override: bool = False
) -> int | None:
    """Steps in all: what the plan knows, else by the number of rows, and (packed) their lengths.

    `override`: somebody says how many rows there are, whatever the plan has counted.
    """
    counted = override and step_limit(plan.stage, plan.values) is None
    if rows is None or (plan.steps is not None and not counted):
        return plan.steps
    epochs = plan.values.get(plan.stage.entry.names.epochs)
    if (row := packed_row(plan, data)) is not None and isinstance(epochs, int | float):
        return int(rows / row.pairs / plan.processes) * int(epochs)
    return steps_of(plan.stage, plan.values, rows, plan.global_batch)
