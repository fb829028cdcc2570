"""A stage in its situation: the rules that need more than upstream's arguments, given what is known.

Validation knows the stage file, the environment and what lies here; a start (`doctor.situation`) knows
GPUs, packages, the output folder and the run that was there before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.arguments import placed
from launcher.backends import Entry, stage_rules
from launcher.backends.context import Context
from launcher.config import Config
from launcher.errors import Finding
from launcher.options import Batch, Options
from launcher.schema import Values

if TYPE_CHECKING:
    from launcher.backends.trl_attention import Choice


def findings(
    config: Config, options: Options, entry: Entry, values: Values, *, running: bool
) -> Iterator[Finding]:
    """What is wrong before it is known on how many GPUs, and with which packages."""
    deepspeed, fault = deepspeed_of(options)
    if fault is not None:
        yield _placed(config, fault)
    batch = options.batch or Batch()
    context = Context(
        values=values, environ=os.environ, deepspeed=deepspeed,
        mixed_precision=options.mixed_precision, gpus=options.gpus,
        per_device=batch.per_device or _number(values, entry.names.per_device),
        accumulation=None if batch.total else _number(values, entry.names.accumulation),
        running=running,
    )  # fmt: skip
    yield from judged(config, context)


def judged(config: Config, context: Context) -> Iterator[Finding]:
    """Every finding of every such rule, at its place in the file."""
    for finding in stage_rules.apply(context):
        yield _placed(config, finding)


def attention(
    options: Options, values: Values, *, gpus: int | None = None,
    packages: Mapping[str, str] | None = None,
) -> Choice | None:  # fmt: skip
    """Which of the attention implementations that a stage file prefers can be had; None without any.

    `gpus` counts those of all nodes, `packages` are those of the trainer's Python: None is not known.
    """
    if not options.attention or "attn_implementation" not in values.schema.fields:
        return None
    from launcher.backends import trl_attention

    context = Context(
        values=values, environ=os.environ, mixed_precision=options.mixed_precision, gpus=gpus,
        packages=packages,
    )  # fmt: skip
    return trl_attention.choose(options.attention, context)


def _placed(config: Config, finding: Finding) -> Finding:
    if finding.key == "deepspeed" and config.shape == "wrapped":
        finding = replace(finding, key="deepspeed_config")
    return placed(config, finding)


def _number(values: Values, name: str) -> int | None:
    given = values.get(name)
    return given if isinstance(given, int) else None


def deepspeed_of(options: Options) -> tuple[Mapping[str, Any] | None, Finding | None]:
    """The DeepSpeed file in use, parsed, or what is wrong with it."""
    if options.deepspeed is None:
        return None, None
    try:
        told = json.loads(options.deepspeed.read_text(encoding="utf-8"))
        reason = None if isinstance(told, dict) else "it is no mapping"
    except (OSError, ValueError, RecursionError) as error:
        told, reason = None, str(error)
    if reason is None:
        return told, None
    return None, Finding(
        severity="error", layer="launch", code="bad-deepspeed", key="deepspeed",
        message=f"{options.deepspeed} is no DeepSpeed config: {reason}",
        help="a JSON mapping, as DeepSpeed reads it",
    )  # fmt: skip
