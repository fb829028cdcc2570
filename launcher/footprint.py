"""`Plan` -> `Setup`: what of a stage file memory depends on, under either backend's names."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher import lengths, setups, shapes
from launcher.backends import model_config, olmo_core_rules, trl_resolved
from launcher.backends.deepspeed_rules import engine_config
from launcher.backends.model_rules import LIGER_MODELS
from launcher.backends.trl_adapter_rules import DEFAULTS as PEFT_CHOOSES
from launcher.errors import Finding, InvalidConfig
from launcher.lengths import Batch, Lengths
from launcher.options import deepspeed_file
from launcher.packed_rows import Packed, pack
from launcher.plan import Plan, divisors, limited, steps_of
from launcher.schema import Values
from launcher.setups import FULL, HALF, Adapters, Quantised, Setup, Sharding, Zero
from launcher.shapes import Shape

ATTENTIONS = ("flash_2", "flash_3", "flash_4", "sdpa", "eager")
UNKNOWN_STEPS = 1000
"""The largest of so many steps is taken where it is not known how many there are."""
# finetune.py:633 and dpo_tune_cache.py:372; PEFT's own choice where TRL names none
_OPEN_INSTRUCT_TARGETS = (
    "q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
# peft/utils/constants.py: of the families of shapes.py for which it chooses itself
_PEFT_TARGETS = ("q_proj", "v_proj")
# bitsandbytes/optim/optimizer.py: tensors of fewer elements are not paged
_PAGED = 100_000
# what keeps Adam's two states, and whether it is the fused one; transformers/training_args.py:809
_ADAM = {"adamw_torch_fused": True, "adamw_torch": False}
_BITSANDBYTES = frozenset({
    "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit",
})  # fmt: skip
_OPTIMIZER = "adamw_torch_fused"


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
        return self._packed(self.plan.per_device)

    def _packed(self, per_device: int) -> bool:
        stage = self.plan.stage
        if stage.options.backend == "trl" and self.dpo:
            # it pads whatever is asked for (trl/trainer/dpo_trainer.py:735)
            return False
        return stage.entry.packs(self.plan.values, per_device)

    @property
    def typical(self) -> Batch:
        """A micro-batch as it is on average."""
        sequences = self.plan.per_device * (2 if self.dpo else 1)
        return lengths.typical(self.rows, rows=sequences, packed=self.packed)

    @property
    def checkpointing(self) -> bool:
        """Whether activations are computed again: open-instruct's DPO asks by its memory budget."""
        values = self.plan.values
        budget = values.get("activation_memory_budget")
        if isinstance(budget, int | float):
            # dpo_tune_cache.py:359
            return budget < 1 and (self.adapters is None or self.quantised is not None)
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
            # on 4-bit weights TRL has made them bf16 (trl/trainer/sft_trainer.py:908)
            width = HALF if self.zero is not None or self.quantised is not None else FULL
            return Adapters(
                rank=int(values["lora_r"]), targets=self._targets()[0], bytes=width,
                dropout=bool(values.get("lora_dropout")),
            )  # fmt: skip
        return None

    @property
    def quantised(self) -> Quantised | None:
        """Whether the frozen weights are of 4 bits; open-instruct always takes nested scales for them."""
        values = self.plan.values
        if values.get("use_qlora"):
            return Quantised(nested=True)
        if values.get("load_in_4bit"):
            return Quantised(nested=bool(values.get("use_bnb_nested_quant")))
        return None

    def _state_bytes(self) -> float | None:
        """Of bitsandbytes' Adam, an element; None for torch's own.

        Two states of 8 bits, but those of the embedding, with scales for every 256. Paged states of large
        tensors are none of torch's memory: they leave the card where there is no room; scales stay.
        """
        values, adapters, shape = self.plan.values, self.adapters, self.shape
        name, narrow = _optimizer(values), bool(values.get("use_8bit_optimizer"))
        if values.get("use_qlora"):
            # finetune.py:678
            name = "paged_adamw_8bit" if narrow else "paged_adamw_32bit"
        if name not in _BITSANDBYTES:
            return None
        width, scales = 2.0 * FULL, 0.0
        if "8bit" in name:
            # transformers/trainer.py:1296
            wide = 0.0 if adapters else shape.embedding / shape.parameters
            scales = (1 - wide) * 2 * FULL / 256
            width = (1 - wide) * 2 + wide * width
        if "paged" not in name:
            return width + scales
        few, whole = shape.smaller_than(_PAGED), shape.parameters
        if adapters is not None:
            few, whole = adapters.parameters(shape, below=_PAGED), adapters.parameters(shape)
        return width * few / max(1, whole) + scales

    def _targets(self) -> tuple[tuple[str, ...], str]:
        """The layer's linears that PEFT adapts, by the ends of their paths; and what is not described."""
        named, linears = self.plan.values.get("lora_target_modules"), self.shape.linears()
        if named in ("all-linear", ["all-linear"]):
            return tuple(linears), ""
        if not named:
            chosen = self.shape.family in PEFT_CHOOSES
            fault = f"PEFT itself chooses no `lora_target_modules` for {self.shape.family} models"
            return _PEFT_TARGETS, "" if chosen else fault
        paths = [name.removesuffix(".weight") for name in self.shape.layer]
        found, fault = set[str](), ""
        for target in [named] if isinstance(named, str) else named:
            ends = {path.split(".")[-1] for path in paths if f".{path}".endswith(f".{target}")}
            if not ends or not ends <= linears.keys():
                known = ", ".join(linears)
                fault = f"the memory of LoRA on `{target}` is not described: described are {known}"
            found |= ends
        return tuple(name for name in linears if name in found), fault

    @property
    def zero(self) -> Zero | None:
        """DeepSpeed, by the stage file or by DPO's own option, which replaces it."""
        return zero_of(self.plan, self.shape.hidden)

    @property
    def autocast(self) -> bool:
        """Whether accelerate casts to 16 bits around each operator; DeepSpeed casts the model instead."""
        if self.zero is not None:
            return False
        if self.plan.stage.options.backend == "trl":
            return trl_resolved.precision(self.plan.values) is not None
        return self.plan.mixed_precision != "no"

    @property
    def liger(self) -> bool:
        """Whether Liger's kernels run: TRL goes on without them where it has none for the model."""
        values = self.plan.values
        # finetune.py:572
        asked = bool(values.get(self.plan.stage.entry.names.liger)) and not values.get("use_qlora")
        return asked and self.shape.family in LIGER_MODELS

    def setup(self, per_device: int | None = None, accumulation: int | None = None) -> Setup:
        """What memory depends on; another split of the global batch where one is given.

        Raises InvalidConfig (`unknown-memory`) for what is not described.
        """
        plan, values = self.plan, self.plan.values
        _require_described(plan, self.attention)
        if values.get("use_peft") and (fault := self._targets()[1]):
            raise InvalidConfig(_undescribed(plan, fault))
        each = per_device or plan.per_device
        rows, packed = each * (2 if self.dpo else 1), self._packed(each)
        times = accumulation or plan.accumulation
        if plan.stage.entry.torchrun:
            return self._sharded(rows, times)
        batches = (plan.steps or UNKNOWN_STEPS) * times * plan.processes
        trl = plan.stage.options.backend == "trl"
        return Setup(
            shape=self.shape,
            batch=lengths.largest(self.rows, rows=rows, batches=batches, packed=packed),
            processes=plan.processes, accumulation=times,
            loss=self._loss(), reference=self._reference(), zero=self.zero,
            attention=self.attention.partition("_")[0],
            liger=self.liger, checkpointing=self.checkpointing, weight_bytes=self._weight_bytes(),
            autocast=self.autocast, adapters=self.adapters, packed=packed,
            quantised=self.quantised, state_bytes=self._state_bytes(),
            # bitsandbytes' kernel makes nothing beside its states
            fused_optimizer=_ADAM.get(_optimizer(values), True)
            if trl
            else bool(values.get("fused_optimizer") or values.get("use_qlora")),
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
            accumulation=times, loss="logprobs", reference="cache",
            attention=self.attention.partition("_")[0],
            sharding=Sharding(
                shards=shards, share=min(1.0, float(share or 0)) if compiled else None
            ),
            fused_optimizer=bool(values.get("fused_optimizer")),
        )  # fmt: skip

    def _weight_bytes(self) -> int:
        """Bytes an element of the loaded weights; what DeepSpeed trains it has cast to 16 bits.

        Raises InvalidConfig where the config would have to say their type, or everything is of 32 bits.
        """
        if self.zero is not None:
            # deepspeed/runtime/engine.py:2088
            return HALF
        values, told = self.plan.values, "bfloat16"
        if values.get("use_qlora"):
            # what is not quantised PEFT makes fp32 (peft/utils/other.py:204)
            told = "float32"
        elif self.plan.stage.options.backend == "trl":
            own = _model_arguments(values)
            told = str(
                own.get("dtype") or own.get("torch_dtype") or values.get("dtype") or "float32"
            )
        elif self.liger:
            # finetune.py:578 names no type there
            told = "auto"
        told = self.shape.dtype if told == "auto" else told
        if not told:
            raise InvalidConfig(_undescribed(
                self.plan, "the type of the loaded weights is not known: the model's config.json has no "
                "`torch_dtype`"
            ))  # fmt: skip
        width = HALF if told in {"bfloat16", "float16", "bf16", "fp16"} else FULL
        if width == FULL and not self.autocast and self.plan.gpus:
            raise InvalidConfig(
                _undescribed(
                    self.plan, "the memory of training in 32 bits throughout is not described"
                )
            )
        return width

    def _loss(self) -> str:
        if self.plan.stage.options.backend == "trl":
            # its own head goes through the vocabulary in tiles (trl/kernels/chunked_logprob.py:31)
            return "tiled"
        if self.dpo:
            return "logprobs"
        return "liger" if self.liger else "full"

    def _reference(self) -> str:
        values = self.plan.values
        if not self.plan.stage.refers:
            return ""
        if self.plan.stage.options.backend == "open_instruct":
            return "cache"
        if self.adapters is not None:
            return "adapter"
        return "" if values.get("precompute_ref_log_probs") else "model"


def _unmasked(batch: Batch) -> Batch:
    """The same batch for a model that is told of no padding, and computes it like any token."""
    return replace(batch, real=batch.tokens)


_SPELT = {"flash_attention_2": "flash_2", "flash_attention_3": "flash_3", "torch": "sdpa"}


def attention_of(plan: Plan, asked: str | None = None) -> str:
    """The attention that is asked for, else what the file says, else the backend's own choice.

    That is sdpa for TRL and on the CPU; open-instruct takes the best that is installed: said to be flash_2.
    """
    said = asked or plan.values.get("attn_implementation")
    if asked is None and plan.stage.options.backend == "trl":
        said = trl_resolved.attention(plan.values)[0]
    if isinstance(said, str) and (named := _SPELT.get(said, said)) in ATTENTIONS:
        return named
    return "sdpa" if plan.stage.options.backend == "trl" or not plan.gpus else "flash_2"


def zero_of(plan: Plan, hidden: int) -> Zero | None:
    """DeepSpeed as memory depends on it; None without, and on the CPU."""
    if not plan.gpus:
        return None
    file, _ = plan.stage.options.read_deepspeed()
    trl = plan.stage.options.backend == "trl"
    return setups.zero_of(engine_config(plan.values, file, trl=trl), hidden)


def _model_arguments(values: Values) -> Mapping[str, Any]:
    """What TRL hands to the model's making (trl/scripts/sft.py:83): keys of its config among them."""
    return trl_resolved.inline(values.get("model_init_kwargs")) or {}


def shape_of(
    plan: Plan, like: str | None = None, packages: Mapping[str, str] | None = None
) -> Shape:
    """The model's shape, or that of another one that it is `like`; `packages` are those that train.

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
        # neither of the two is read there
        found = shapes.find(name, environ)
        return found if olmo_core_rules.ties(values, packages or {}) else shapes.untied(found)
    trl = plan.stage.options.backend == "trl"
    given = _model_arguments(values) if trl else values.get("additional_model_arguments")
    replaced = given if isinstance(given, Mapping) else None
    revision = values.get("model_revision")
    return shapes.find(name, environ, revision if isinstance(revision, str) else None, replaced)


def _require_described(plan: Plan, attention: str) -> None:
    values = plan.values
    narrow = bool(values.get("use_qlora") or values.get("load_in_4bit"))
    lora = values.get("use_lora") or values.get("use_peft")
    optimizer, trl = _optimizer(values), plan.stage.options.backend == "trl"
    told = {
        "eager attention": attention == "eager",
        "weights quantised to 8 bits": bool(values.get("load_in_8bit")),
        "quantised weights without adapters": narrow and not lora,
        "FSDP": bool(values.get("fsdp")),
        "tensor parallelism": int(values.get("tensor_parallel_degree") or 1) > 1
        and plan.stage.entry.torchrun,
        "sequence parallelism": int(values.get("sequence_parallel_size") or 1) > 1,
        "an optimizer of less than 32 bits": "8bit" in optimizer and optimizer not in _BITSANDBYTES,
        f"`optim: {optimizer}`": trl and "8bit" not in optimizer
        and optimizer not in {*_ADAM, *_BITSANDBYTES},
        f"`optim: {optimizer}` under DeepSpeed": optimizer in _BITSANDBYTES
        and zero_of(plan, 1) is not None,
        # dpo_tune_cache.py:425
        "a paged optimizer": bool(values.get("dpo_use_paged_optimizer")),
        "separate forward passes": values.get("concatenated_forward") is False,
        "adapters that are more than LoRA": trl and bool(values.get("use_peft")) and any(
            values.get(k) for k in ("use_dora", "lora_modules_to_save", "lora_target_parameters")
        ),
        "offloaded activations": trl and bool(values.get("activation_offloading")),
        "the Muon optimizer": values.get("optimizer_type") == "muon",
    }  # fmt: skip
    lacking = [what for what, asked in told.items() if asked]
    if lacking:
        raise InvalidConfig(
            _undescribed(plan, f"the memory of {' and '.join(lacking)} is not described")
        )


def _optimizer(values: Values) -> str:
    """TRL's, where it has one."""
    return str(values.get("optim") or _OPTIMIZER)


def _undescribed(plan: Plan, message: str) -> Finding:
    return Finding(
        severity="error", layer="launch", code="unknown-memory", message=message,
        help="measure it: `launch check` tells the peak of a short run",
        **plan.stage.config.origin("args").place,
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


def optimizer_steps(
    plan: Plan, rows: int | None, seen: Lengths | None = None, *, told: bool = False
) -> int | None:
    """Steps in all: what the plan knows, else by the number of rows, and (packed) their lengths.

    `told`: somebody says how many rows there are, whatever the plan has counted.
    """
    counted = told and limited(plan.stage, plan.values) is None
    if rows is None or (plan.steps is not None and not counted):
        return plan.steps
    epochs = plan.values.get(plan.stage.entry.names.epochs)
    if (row := packed_row(plan, seen)) is not None and isinstance(epochs, int | float):
        return int(rows / row.pairs / plan.processes) * int(epochs)
    return steps_of(plan.stage, plan.values, rows, plan.global_batch)


# --- what can be turned to take less ---------------------------------------------------------------


Way = tuple[str, Mapping[str, Any]]
"""One change of a set-up in words and by name: `per_device`, `gpus`, `nodes`, `deepspeed`, or arguments."""


def mends(
    found: Footprint, peak_of: Callable[[Footprint], float], usable: float
) -> list[tuple[str, float]]:
    """What can be turned so that it fits, with its peak in GiB: one change alone, else two together.

    The mildest come first, and of each group only the first that fits. The global batch and the rows stay.
    """
    groups = [tuple(group) for group in (
        _smaller_batches(found.plan), _recomputing(found), _kernels(found), _zero_stages(found),
        _more_gpus(found.plan),
    )]  # fmt: skip
    for size in (1, 2):
        fitting = []
        for some in itertools.combinations(groups, size):
            for chosen in itertools.product(*some):
                try:
                    other = _changed(found, {k: v for _, way in chosen for k, v in way.items()})
                    peak = math.inf if other is None else peak_of(other)
                except InvalidConfig:
                    continue
                if peak <= usable:
                    fitting.append((" with ".join(words for words, _ in chosen), peak))
                    break
        if fitting:
            return fitting
    return []


def _changed(found: Footprint, way: Mapping[str, Any]) -> Footprint | None:
    """The same set-up with a change; None where the batch cannot be split so, or it would crash."""
    planned, stage, args = found.plan, found.plan.stage, dict(way)
    split = {k: args.pop(k, getattr(planned, k)) for k in ("per_device", "gpus", "nodes")}
    accumulation, rest = divmod(planned.global_batch, math.prod(split.values()))
    if rest or not accumulation:
        return None
    options, name = stage.options, args.pop("deepspeed", None)
    if name is not None:
        options = replace(options, deepspeed=deepspeed_file(name), deepspeed_name=name)
    derived = {name: one.value for name, one in planned.derived.items()}
    values = Values(stage.schema, {**stage.args, **derived, **args})
    stage = replace(stage, options=options)
    made = replace(planned, stage=stage, values=values, accumulation=accumulation, **split)
    changed = replace(found, plan=made)
    return None if _released_too_soon(changed) else changed


def _released_too_soon(found: Footprint) -> bool:
    """LoRA's frozen weights under ZeRO-3 are gone when finetune.py computes a layer again: CheckpointError.

    It takes transformers' own way of checkpointing, which is not the reentrant one
    (finetune.py:624, transformers/modeling_utils.py:3132); TRL asks for that one.
    """
    own = found.plan.stage.options.backend == "open_instruct" and found.adapters is not None
    return own and found.checkpointing and found.zero is not None and found.zero.stage == 3


def _smaller_batches(planned: Plan) -> Iterator[Way]:
    if planned.stage.entry.torchrun and planned.values.get("packing"):
        # a packed row is as long as it may be, however many pairs stand in it
        return
    names, batch = planned.stage.entry.names, planned.stage.options.batch
    each = planned.per_device * planned.accumulation
    smaller = [one for one in divisors(each) if one < planned.per_device]
    # a search through all of them would take long where the batch is large
    for one in reversed([*smaller[:1], *smaller[1:][-8:]]):
        words = f"`per_device: {one}`"
        if batch is None or batch.total is None:
            words = f"`{names.per_device}: {one}` and `{names.accumulation}: {each // one}`"
        args, also = unpacked(planned, one)
        yield words + also, {"per_device": one, **args}


def unpacked(planned: Plan, per_device: int) -> tuple[Mapping[str, Any], str]:
    """What goes with a micro-batch of so many rows that packs nothing where the file packs, and in words."""
    entry, values, expect = planned.stage.entry, planned.values, planned.stage.options.expect
    if not entry.packs(values, planned.per_device) or entry.packs(values, per_device):
        return {}, ""
    name = "packing" if values.get("packing") else "padding_free"
    also = " and `expect: {packing: off}`" if expect.get("packing") in ("isolated", "on") else ""
    return {name: False}, f" with `{name}: false`{also}"


def _recomputing(found: Footprint) -> Iterator[Way]:
    values, key = found.plan.values, "activation_memory_budget"
    now = values.get(key)
    if found.plan.stage.entry.torchrun:
        # computed again is only what is compiled (olmo_core_utils.py:101)
        compiled = bool(values.get("compile_model"))
        also = "" if compiled else " with `compile_model: true`"
        for share in (0.5, 0.1):
            if not compiled or share < float(now or 0):
                yield f"`{key}: {share}`{also}", {key: share, "compile_model": True}
    elif found.checkpointing:
        return
    elif not isinstance(now, int | float):
        yield "`gradient_checkpointing: true`", {"gradient_checkpointing": True}
    elif found.adapters is None:
        # dpo_tune_cache.py:376
        yield f"`{key}: 0.5`", {key: 0.5}


def _kernels(found: Footprint) -> Iterator[Way]:
    name = found.plan.stage.entry.names.liger
    known = name in found.plan.values and found.shape.family in LIGER_MODELS
    if known and not found.liger and found.adapters is None and not found.plan.stage.entry.torchrun:
        yield f"`{name}: true`", {name: True}


def _zero_stages(found: Footprint) -> Iterator[Way]:
    stage, zero = found.plan.stage, found.zero
    if stage.entry.torchrun or (zero is not None and zero.offload_params):
        return
    now = 0 if zero is None else zero.stage
    # with LoRA, ZeRO-2 crashes on models with biases: what comes after it takes less anyhow
    known = [one for one in (2, 3) if one > now and not (one == 2 and found.adapters)]
    wide = "_fp32_comm" if stage.options.deepspeed_name.endswith("_fp32_comm") else ""
    for name in (*(f"zero{one}{wide if one == 2 else ''}" for one in known), "zero3_offload"):
        yield f"`deepspeed: {name}`", {"deepspeed": name}


def _more_gpus(planned: Plan) -> Iterator[Way]:
    for count in (2, 4, 8):
        if count > planned.gpus and planned.nodes == 1:
            yield f"`--gpus {count}`", {"gpus": count}
    if planned.gpus >= 8:
        for nodes in (2 * planned.nodes, 4 * planned.nodes):
            yield f"`--nodes {nodes}`", {"nodes": nodes}
