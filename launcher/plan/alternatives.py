"""Which changes of a setup make it fit a card, by the same estimate of memory."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from launcher.errors import InvalidConfig
from launcher.plan.footprint import Footprint
from launcher.plan.plan import Plan, combine_arguments
from launcher.rules.model import LIGER_MODELS
from launcher.stage.batch import find_divisors
from launcher.stage.options import find_deepspeed_file
from launcher.upstream.schema import Values


class Alternative(NamedTuple):
    """A change in words, and by name: `per_device`, `gpus`, `nodes`, `deepspeed`, or arguments."""

    words: str
    values: Mapping[str, Any]


def find_alternatives(
    footprint: Footprint, peak_of: Callable[[Footprint], float], usable: float
) -> list[tuple[str, float]]:
    """The changes that make it fit, with its peak in GiB: one change alone, else two together.

    The mildest come first, and of each group only the first that fits. The global batch and the
    rows stay.
    """
    groups = [list(group(footprint)) for group in _GROUPS]
    for size in (1, 2):
        fitting: list[tuple[str, float]] = []
        for chosen in itertools.combinations(groups, size):
            for changes in itertools.product(*chosen):
                peak = _compute_peak(footprint, changes, peak_of)
                if peak <= usable:
                    fitting.append((" with ".join(change.words for change in changes), peak))
                    break
        if fitting:
            return fitting
    return []


def _compute_peak(
    footprint: Footprint, changes: Iterable[Alternative], peak_of: Callable[[Footprint], float]
) -> float:
    """GiB with these changes; infinite where the batch cannot be split so, or it would crash."""
    values: dict[str, Any] = {}
    for change in changes:
        values.update(change.values)
    try:
        changed = _change_footprint(footprint, values)
        if changed is not None:
            return peak_of(changed)
    except InvalidConfig:
        pass
    return math.inf


def _change_footprint(footprint: Footprint, changes: dict[str, Any]) -> Footprint | None:
    plan = footprint.plan
    stage = plan.stage
    per_device = changes.pop("per_device", plan.per_device)
    gpus = changes.pop("gpus", plan.gpus)
    nodes = changes.pop("nodes", plan.nodes)
    accumulation, rest = divmod(plan.global_batch, per_device * gpus * nodes)
    if rest or not accumulation:
        return None
    deepspeed = changes.pop("deepspeed", None)
    if deepspeed is not None:
        file = find_deepspeed_file(deepspeed)
        options = replace(stage.options, deepspeed=file, deepspeed_name=deepspeed)
        stage = replace(stage, options=options)
    changed_plan = replace(
        plan,
        stage=stage,
        values=Values(stage.schema, {**combine_arguments(stage, plan.derived), **changes}),
        per_device=per_device,
        gpus=gpus,
        nodes=nodes,
        accumulation=accumulation,
    )
    changed = replace(footprint, plan=changed_plan)
    if _loses_weights(changed):
        return None
    return changed


def _loses_weights(footprint: Footprint) -> bool:
    """Whether LoRA's frozen weights under ZeRO-3 are gone when finetune.py recomputes a layer.

    It takes transformers' default checkpointing, not the reentrant one that TRL asks for
    (finetune.py::main[model.gradient_checkpointing_enable #1]).
    """
    if footprint.entry.reentrant or footprint.adapters is None or not footprint.checkpointing:
        return False
    return footprint.zero is not None and footprint.zero.stage == 3


def _suggest_smaller_batches(footprint: Footprint) -> Iterator[Alternative]:
    plan = footprint.plan
    entry = footprint.entry
    if entry.takes_one_row(plan.values):
        # a packed row is as long as it may be, however many pairs stand in it
        return
    names = entry.names
    batch = plan.stage.options.batch
    rows = plan.per_device * plan.accumulation
    smaller = [size for size in find_divisors(rows) if size < plan.per_device]
    # a search through all of them would take long where the batch is large
    for size in reversed([*smaller[:1], *smaller[1:][-8:]]):
        words = f"`per_device: {size}`"
        if batch is None or batch.total is None:
            words = f"`{names.per_device}: {size}` and `{names.accumulation}: {rows // size}`"
        args, also = drop_packing(plan, size)
        yield Alternative(words + also, {"per_device": size, **args})


def drop_packing(plan: Plan, per_device: int) -> tuple[Mapping[str, Any], str]:
    """The arguments that go with a micro-batch too small to pack where the file packs, and in
    words.
    """
    entry = plan.stage.entry
    values = plan.values
    if not entry.packs(values, plan.per_device) or entry.packs(values, per_device):
        return {}, ""
    name = "padding_free"
    if values.get("packing"):
        name = "packing"
    words = f" with `{name}: false`"
    if plan.stage.options.expect.get("packing") in ("isolated", "on"):
        words += " and `expect: {packing: off}`"
    return {name: False}, words


def _suggest_recomputing(footprint: Footprint) -> Iterator[Alternative]:
    values = footprint.values
    entry = footprint.entry
    budget = "activation_memory_budget"
    now = values.get(budget)
    needed = entry.names.recompute_needs
    if entry.selects_modules(values):
        # no budget is read
        return
    if needed is not None:
        is_set = values.get(needed)
        also = ""
        if not is_set:
            also = f" with `{needed}: true`"
        for share in (0.5, 0.1):
            if not is_set or share < float(now or 0):
                yield Alternative(f"`{budget}: {share}`{also}", {budget: share, needed: True})
    elif footprint.checkpointing:
        return
    elif not isinstance(now, int | float):
        yield Alternative("`gradient_checkpointing: true`", {"gradient_checkpointing": True})
    elif footprint.adapters is None:
        # dpo_tune_cache.py::main[elif args.activation_memory_budget]
        yield Alternative(f"`{budget}: 0.5`", {budget: 0.5})


def _suggest_kernels(footprint: Footprint) -> Iterator[Alternative]:
    name = footprint.entry.names.liger
    if name is None or name not in footprint.values or footprint.shape.family not in LIGER_MODELS:
        return
    if not footprint.liger and footprint.adapters is None:
        yield Alternative(f"`{name}: true`", {name: True})


def _suggest_zero_stages(footprint: Footprint) -> Iterator[Alternative]:
    zero = footprint.zero
    if footprint.entry.sharding != "deepspeed" or (zero is not None and zero.offload_params):
        return
    stage = 0
    if zero is not None:
        stage = zero.stage
    # with LoRA, ZeRO-2 crashes on models with biases: what comes after it takes less anyhow
    if stage < 2 and not footprint.adapters:
        is_wide = footprint.plan.stage.options.deepspeed_name.endswith("_fp32_comm")
        yield _use_deepspeed("zero2_fp32_comm" if is_wide else "zero2")
    if stage < 3:
        yield _use_deepspeed("zero3")
    yield _use_deepspeed("zero3_offload")


def _use_deepspeed(name: str) -> Alternative:
    return Alternative(f"`deepspeed: {name}`", {"deepspeed": name})


def _suggest_more_gpus(footprint: Footprint) -> Iterator[Alternative]:
    plan = footprint.plan
    for gpus in (2, 4, 8):
        if gpus > plan.gpus and plan.nodes == 1:
            yield Alternative(f"`--gpus {gpus}`", {"gpus": gpus})
    if plan.gpus >= 8:
        for nodes in (2 * plan.nodes, 4 * plan.nodes):
            yield Alternative(f"`--nodes {nodes}`", {"nodes": nodes})


_GROUPS = (
    _suggest_smaller_batches,
    _suggest_recomputing,
    _suggest_kernels,
    _suggest_zero_stages,
    _suggest_more_gpus,
)
