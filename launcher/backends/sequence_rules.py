"""Rules about sequence parallelism, which open-instruct's SFT has: one sequence over several GPUs.

Line numbers are those of the pin and of the packages named in tests/test_upstream_facts.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.backends import model_config
from launcher.backends.context import Context, StageRule, caches_only
from launcher.backends.rule import say
from launcher.errors import Finding, brief

# accelerate builds no device mesh for DeepSpeed's sequence parallelism from here on
_NO_MESH = (1, 13)
_KEY = "sequence_parallel_size"
_FLASH = ("flash-attn", "flash-attn-3")


def _split(context: Context) -> int:
    """Over how many processes a sequence is split; 1 where it is not."""
    size = context.values["sequence_parallel_size"]
    return size if isinstance(size, int) and size > 1 and not caches_only(context) else 1


def sequence_stage(context: Context) -> Iterator[Finding]:
    """finetune.py:803 finds no `shift_labels` without DeepSpeed; finetune.py:322 asks for ZeRO-3."""
    if (size := _split(context)) == 1 or context.gpus == 0:
        return
    stage = context.zero_stage
    if stage is None:
        yield say(
            "error", "run", "sequence-zero-stage", _KEY,
            f"`sequence_parallel_size: {size}` crashes without DeepSpeed, which splits the batches",
            "write `deepspeed: zero3`",
        )  # fmt: skip
    elif stage != 3:
        yield say(
            "warning", "run", "sequence-zero-stage", _KEY,
            f"`sequence_parallel_size: {size}` requires ZeRO-3, upstream says; this is stage {stage}",
            "write `deepspeed: zero3`",
        )  # fmt: skip


def sequence_world(context: Context) -> Iterator[Finding]:
    """finetune.py:385."""
    size, gpus = _split(context), context.gpus
    if gpus is not None and (world := max(1, gpus)) % size:
        yield say(
            "error", "run", "sequence-world", _KEY,
            f"`sequence_parallel_size: {size}` does not divide {world} process(es)",
            f"use a multiple of {size} GPUs, or another size",
        )  # fmt: skip


def sequence_heads(context: Context) -> Iterator[Finding]:
    """deepspeed/runtime/sequence_parallel/ulysses_sp.py:148, ulysses_sp.py:151."""
    size, config = (
        _split(context),
        model_config.text_part(model_config.built_from(context.values, context.environ)),
    )
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads", heads)
    if not isinstance(heads, int) or not isinstance(groups, int) or min(heads, groups) < 1:
        return
    if heads % size or (groups % size and size % groups):
        yield say(
            "error", "run", "sequence-heads", _KEY,
            f"{heads} attention heads ({groups} for keys and values) cannot be split over "
            f"`sequence_parallel_size: {size}`",
        )  # fmt: skip


def sequence_attention(context: Context) -> Iterator[Finding]:
    """finetune.py:322 asks for flash attention, which is detected (finetune.py:393)."""
    if _split(context) > 1 and context.gpus != 0 and context.lacks(*_FLASH):
        yield say(
            "warning", "run", "sequence-attention", _KEY,
            "`sequence_parallel_size` requires flash attention, upstream says; the trainer's Python "
            "has no flash-attn",
            "pip install flash-attn",
        )  # fmt: skip


def sequence_mesh(context: Context) -> Iterator[Finding]:
    """finetune.py:836 asks accelerate for a mesh; accelerate/parallelism_config.py:221 makes none."""
    have = (context.packages or {}).get("accelerate")
    if _split(context) > 1 and have is not None and _release(have) >= _NO_MESH:
        yield say(
            "error", "run", "sequence-accelerate", _KEY,
            f"`sequence_parallel_size` crashes with accelerate {brief(have)}: since 1.13 it makes no "
            "device mesh for it",
            "pip install 'accelerate<1.13' (the pin's own lock file has 1.12.0)",
        )  # fmt: skip


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


RULES: tuple[StageRule, ...] = (
    sequence_stage, sequence_world, sequence_heads, sequence_attention, sequence_mesh,
)  # fmt: skip
