"""Releases and settings of DeepSpeed under which the optimizer gets other gradients than the batch's.

docs/gradients.md has what was measured with each release, and how. Line numbers are DeepSpeed 0.19.8's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from launcher.backends.context import Context, StageRule, section
from launcher.backends.deepspeed_rules import engine_config
from launcher.errors import Finding, Severity

OVERLAP = "overlap-corrupts"
SYNCHRONIZED = Version("0.17.5")  # DeepSpeed's PR 7371
UNSYNCHRONIZED = (Version("0.18.5"), Version("0.19.0"))  # from PR 7805 on, until PR 7965
ALL_STREAMS = Version("0.19.3")  # PR 8080
LOSES_MICRO_BATCHES = (Version("0.17.6"), Version("0.18.3"))  # until PR 7665
LARGEST_WEIGHT = 1e9  # elements; no gradient is then larger than the bucket, which is copied
_FORMATS = {
    "fp32": "no",
    "float32": "no",
    "fp16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}


def fault(
    config: Mapping[str, Any], version: str | None, *, precision: str | None = None,
    accumulation: int | None = None,
) -> tuple[Severity, str, str, str] | None:  # fmt: skip
    """What DeepSpeed is known to do to gradients: severity, code, message, help; None for nothing.

    `precision` is accelerate's word (bf16, fp16, no), `accumulation` the micro-batches of a step.
    """
    zero = section(config, "zero_optimization")
    stage, overlaps = zero.get("stage", 0), zero.get("overlap_comm") is True
    if stage not in (1, 2):
        return None
    try:
        release = Version(version or "")
    except InvalidVersion:
        release = None
    serial = "or set `overlap_comm: false` in the DeepSpeed file"
    wire = _FORMATS.get(str(config.get("communication_data_type")).lower())
    bucket = zero.get("reduce_bucket_size")
    whole = isinstance(bucket, int | float) and bucket >= LARGEST_WEIGHT
    converts = wire is not None and wire != (precision or "bf16")
    if stage == 2 and overlaps and converts and not whole:
        # stage_1_and_2.py, allreduce_and_copy_with_multiple_ranks: only the converted copy is recorded on
        # the stream of the reduction, so the gradient's memory is used again before it was read
        return (
            "error", OVERLAP,
            "ZeRO-2 with `overlap_comm` and a `communication_data_type` of its own trains on corrupt "
            "gradients: every release up to 0.19.8 reuses the memory of gradients larger than "
            "`reduce_bucket_size` before they were sent",
            "set `overlap_comm: false` in the DeepSpeed file, or use ZeRO-1 or ZeRO-3",
        )  # fmt: skip
    if stage == 2 and release and _within(release, LOSES_MICRO_BATCHES) and (accumulation or 1) > 1:
        return (
            "error", "accumulation-lost",
            f"DeepSpeed {version} keeps only the last micro-batch of a step under ZeRO-2",
            "install deepspeed 0.19.8, or do not accumulate",
        )  # fmt: skip
    if not overlaps:
        return None
    corrupts = "trains on corrupt gradients: buffers are reused before their reduction is done"
    if release is None:
        return (
            "warning", OVERLAP,
            "ZeRO 1 and 2 with `overlap_comm` " + corrupts + ", with DeepSpeed 0.18.5 to 0.18.9 and before "
            "0.17.5; the installed version is not known here",
            f"install deepspeed 0.19.8 where it trains, {serial}",
        )  # fmt: skip
    if release < SYNCHRONIZED or _within(release, UNSYNCHRONIZED):
        message = f"DeepSpeed {version} with ZeRO-{stage} and `overlap_comm` {corrupts}"
        return "error", OVERLAP, message, f"install deepspeed 0.19.8, {serial}"
    if UNSYNCHRONIZED[1] <= release < ALL_STREAMS:
        return (
            "warning", OVERLAP,
            f"DeepSpeed {version} with ZeRO-{stage} and `overlap_comm` may send gradients before they are "
            "complete where several streams compute them, as under torch.compile",
            f"install deepspeed 0.19.8, {serial}",
        )  # fmt: skip
    return None


def _within(version: Version, span: tuple[Version, Version]) -> bool:
    return span[0] <= version < span[1]


def _engine(context: Context) -> tuple[Mapping[str, Any] | None, str, str | None]:
    """The DeepSpeed config in use, the key that sets it, and accelerate's word for the precision."""
    values = context.values
    if values.schema.backend == "trl":
        from launcher.backends import trl_resolved

        own = trl_resolved.own_deepspeed(values) is not None
        precision = trl_resolved.precision(values) or "no"
        config = engine_config(values, context.file, trl=True)
        return config, "args.deepspeed" if own else "deepspeed", precision
    key = "deepspeed" if values.get("zero_stage") is None else "args.zero_stage"
    return engine_config(values, context.file), key, context.mixed_precision


def true_gradients(context: Context) -> Iterator[Finding]:
    """deepspeed/runtime/zero/stage_1_and_2.py:1516; the probe compares gradients in each run."""
    if context.gpus == 0:
        return
    config, key, precision = _engine(context)
    # at a start the packages are looked at in a moment
    if not config or (context.running and context.packages is None):
        return
    version = None if context.packages is None else context.packages.get("deepspeed")
    found = fault(config, version, precision=precision, accumulation=context.accumulation)
    if found is not None:
        severity, code, message, help = found
        if key == "args.zero_stage":
            help = (
                "leave out `zero_stage` and set launch's `deepspeed: zero2`, which does not overlap"
            )
        yield Finding(
            severity=severity, layer="run", code=code, key=key, message=message, help=help
        )


RULES: tuple[StageRule, ...] = (true_gradients,)
