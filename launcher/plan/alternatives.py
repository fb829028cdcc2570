"""What of a set-up can be turned so that it fits a card, by the same estimate of memory."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from launcher.errors import InvalidConfig
from launcher.plan.footprint import Footprint
from launcher.plan.plan import Plan
from launcher.rules.model import LIGER_MODELS
from launcher.stage.batch import divisors
from launcher.stage.options import deepspeed_file
from launcher.upstream.schema import Values

Alternative = tuple[str, Mapping[str, Any]]
"""One change in words and by name: `per_device`, `gpus`, `nodes`, `deepspeed`, or arguments."""


def find_alternatives(
    footprint: Footprint, peak_of: Callable[[Footprint], float], usable: float
) -> list[tuple[str, float]]:
    """What can be turned so that it fits, with its peak in GiB: one change alone, else two together.

    The mildest come first, and of each group only the first that fits. The global batch and the rows stay.
    """
    groups = [tuple(group(footprint)) for group in _GROUPS]

    def first(choices: Iterator[tuple[Alternative, ...]]) -> Iterator[tuple[str, float]]:
        for ways in choices:
            try:
                changed = _changed(footprint, {k: v for _, way in ways for k, v in way.items()})
                peak = math.inf if changed is None else peak_of(changed)
            except InvalidConfig:
                continue
            if peak <= usable:
                yield " with ".join(words for words, _ in ways), peak
                return

    for size in (1, 2):
        sets = itertools.combinations(groups, size)
        if fitting := [mend for some in sets for mend in first(itertools.product(*some))]:
            return fitting
    return []


def _changed(footprint: Footprint, way: Mapping[str, Any]) -> Footprint | None:
    """The same set-up with a change; None where the batch cannot be split so, or it would crash."""
    plan, stage, args = footprint.plan, footprint.plan.stage, dict(way)
    split = {k: args.pop(k, getattr(plan, k)) for k in ("per_device", "gpus", "nodes")}
    accumulation, rest = divmod(plan.global_batch, math.prod(split.values()))
    if rest or not accumulation:
        return None
    if (name := args.pop("deepspeed", None)) is not None:
        stage = replace(stage, options=replace(stage.options, deepspeed=deepspeed_file(name), deepspeed_name=name))
    derived = {name: one.value for name, one in plan.derived.items()}
    values = Values(stage.schema, {**stage.args, **derived, **args})
    changed = replace(footprint, plan=replace(plan, stage=stage, values=values, accumulation=accumulation, **split))
    zero = changed.zero
    # LoRA's frozen weights under ZeRO-3 are gone when finetune.py computes a layer again: CheckpointError.
    # It takes transformers' own way of checkpointing, which is not the reentrant one that TRL asks for
    # (finetune.py::main[model.gradient_checkpointing_enable #1],
    # transformers/modeling_utils.py::PreTrainedModel.gradient_checkpointing_enable[gradient_checkpointing_kwargs =])
    adapted = not stage.entry.reentrant and changed.adapters is not None and changed.checkpointing
    return None if adapted and zero is not None and zero.stage == 3 else changed


def _smaller_batches(footprint: Footprint) -> Iterator[Alternative]:
    plan = footprint.plan
    if plan.stage.entry.takes_one_row(plan.values):
        # a packed row is as long as it may be, however many pairs stand in it
        return
    names, batch = plan.stage.entry.names, plan.stage.options.batch
    each = plan.per_device * plan.accumulation
    smaller = [one for one in divisors(each) if one < plan.per_device]
    # a search through all of them would take long where the batch is large
    for one in reversed([*smaller[:1], *smaller[1:][-8:]]):
        words = f"`per_device: {one}`"
        if batch is None or batch.total is None:
            words = f"`{names.per_device}: {one}` and `{names.accumulation}: {each // one}`"
        args, also = without_packing(plan, one)
        yield words + also, {"per_device": one, **args}


def without_packing(plan: Plan, per_device: int) -> tuple[Mapping[str, Any], str]:
    """What goes with a micro-batch of so many rows that packs nothing where the file packs, and in words."""
    entry, values, expect = plan.stage.entry, plan.values, plan.stage.options.expect
    if not entry.packs(values, plan.per_device) or entry.packs(values, per_device):
        return {}, ""
    name = "packing" if values.get("packing") else "padding_free"
    also = " and `expect: {packing: off}`" if expect.get("packing") in ("isolated", "on") else ""
    return {name: False}, f" with `{name}: false`{also}"


def _recomputing(footprint: Footprint) -> Iterator[Alternative]:
    values, key = footprint.plan.values, "activation_memory_budget"
    now = values.get(key)
    if footprint.plan.stage.entry.selects_modules(values):
        # no budget is read
        return
    if (needed := footprint.plan.stage.entry.names.recompute_needs) is not None:
        given = values.get(needed)
        for share in (0.5, 0.1):
            if not given or share < float(now or 0):
                yield f"`{key}: {share}`" + ("" if given else f" with `{needed}: true`"), {key: share, needed: True}
    elif not footprint.checkpointing and not isinstance(now, int | float):
        yield "`gradient_checkpointing: true`", {"gradient_checkpointing": True}
    elif not footprint.checkpointing and footprint.adapters is None:
        # dpo_tune_cache.py::main[elif args.activation_memory_budget]
        yield f"`{key}: 0.5`", {key: 0.5}


def _kernels(footprint: Footprint) -> Iterator[Alternative]:
    name = footprint.plan.stage.entry.names.liger
    known = name in footprint.plan.values and footprint.shape.family in LIGER_MODELS
    if name and known and not footprint.liger and footprint.adapters is None:
        yield f"`{name}: true`", {name: True}


def _zero_stages(footprint: Footprint) -> Iterator[Alternative]:
    stage, zero = footprint.plan.stage, footprint.zero
    if stage.entry.sharding != "deepspeed" or (zero is not None and zero.offload_params):
        return
    now = 0 if zero is None else zero.stage
    # with LoRA, ZeRO-2 crashes on models with biases: what comes after it takes less anyhow
    known = [one for one in (2, 3) if one > now and not (one == 2 and footprint.adapters)]
    wide = "_fp32_comm" if stage.options.deepspeed_name.endswith("_fp32_comm") else ""
    for name in (*(f"zero{one}{wide if one == 2 else ''}" for one in known), "zero3_offload"):
        yield f"`deepspeed: {name}`", {"deepspeed": name}


def _more_gpus(footprint: Footprint) -> Iterator[Alternative]:
    plan = footprint.plan
    for count in (2, 4, 8):
        if count > plan.gpus and plan.nodes == 1:
            yield f"`--gpus {count}`", {"gpus": count}
    if plan.gpus >= 8:
        for nodes in (2 * plan.nodes, 4 * plan.nodes):
            yield f"`--nodes {nodes}`", {"nodes": nodes}


_GROUPS = (_smaller_batches, _recomputing, _kernels, _zero_stages, _more_gpus)
