"""launch's own top-level keys of a stage file -> `Options`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from launcher.backends import BACKENDS
from launcher.config import Config
from launcher.errors import Finding

STAGES = ("sft", "dpo")
PRECISIONS = ("no", "fp16", "bf16")
DEEPSPEED = ("zero2", "zero2_fp32_comm", "zero3", "zero3_offload")
KEYS = (
    "stage",
    "backend",
    "deepspeed",
    "mixed_precision",
    "batch",
    "expect",
    "name",
    "args",
    "extends",
)
WRAPPED_KEYS = ("script", "deepspeed_config", "num_gpus", "args")
SCRIPTS = {"finetune.py": "sft", "dpo_tune_cache.py": "dpo"}

# What may be expected of each point of a verdict; `any` switches the point off.
EXPECT: Mapping[str, tuple[str, ...]] = {
    "liger": ("engaged", "off", "any"),
    "packing": ("isolated", "on", "off", "any"),
    "attention": (
        "any", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3",
        "flash_attention_4",
    ),
    "dataset_cache": ("hit", "miss", "any"),
    "reference_cache": ("hit", "miss", "any"),
    "loss": ("finite", "any"),
    "trend": ("falling", "any"),
    "memory": ("ok", "any"),
    "finish": ("completed", "any"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows per optimizer step, and per device and forward pass; None where the file is silent."""

    total: int | None = None
    per_device: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the stage file asks of launch itself. `deepspeed` is a file, or None for no DeepSpeed."""

    stage: str
    backend: str = "open_instruct"
    deepspeed: Path | None = None
    deepspeed_name: str = "none"
    mixed_precision: str | None = None
    batch: Batch | None = None
    expect: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    gpus: int | None = None


def read(config: Config, stage: str, folders: Sequence[Path] = ()) -> tuple[Options, list[Finding]]:
    """The options of a config and everything wrong with them; faulty ones keep their default.

    `folders` are further places (a checkout) that a relative DeepSpeed path may start from.
    """
    findings: list[Finding] = []
    raw = config.options
    keys = WRAPPED_KEYS if config.shape == "wrapped" else KEYS
    for key in raw:
        if key not in keys:
            findings.append(_unknown(config, key, keys))
    backend = str(raw.get("backend") or "open_instruct")
    if backend not in BACKENDS:
        findings.append(_bad(config, "backend", f"`{backend}` is no backend", ", ".join(BACKENDS)))
        backend = "open_instruct"
    precision = raw.get("mixed_precision")
    # a plain `no` is a boolean in YAML
    precision = "no" if precision is False else precision
    if precision is not None and precision not in PRECISIONS:
        choices = ", ".join(PRECISIONS)
        findings.append(_bad(config, "mixed_precision", f"`{precision}` is no precision", choices))
        precision = None
    deepspeed, name = _deepspeed(config, folders, findings)
    return Options(
        stage=stage, backend=backend, deepspeed=deepspeed, deepspeed_name=name,
        mixed_precision=precision, batch=_batch(config, findings), expect=_expect(config, findings),
        name=str(raw["name"]) if raw.get("name") is not None else None,
        gpus=_gpus(config, findings),
    ), findings  # fmt: skip


def stage_of(config: Config) -> str | None:
    """The stage that a file names: by `stage`, or by the script of the wrapped shape."""
    if config.shape == "wrapped":
        return SCRIPTS.get(Path(str(config.options.get("script", ""))).name)
    stage = config.options.get("stage")
    return stage if stage in STAGES else None


def stage_fault(config: Config) -> Finding | None:
    """Why a file that should name its stage does not; None for flat files, which never do."""
    if config.shape == "flat" or stage_of(config) is not None:
        return None
    if config.shape == "wrapped":
        script = config.options.get("script")
        known = ", ".join(SCRIPTS)
        return _bad(config, "script", f"`{script}` is no script that launch starts", known)
    if "stage" not in config.options:
        return _bad(config, "stage", "`stage` is missing", "add `stage: sft` or `stage: dpo`")
    given = config.options["stage"]
    return _bad(config, "stage", f"`{given}` is no stage", ", ".join(STAGES))


def _bad(config: Config, key: str, message: str, help: str | None = None) -> Finding:
    origin = config.origin(key)
    return Finding(
        severity="error", layer="launch", code=f"bad-{key.partition('.')[0].replace('_', '-')}",
        key=key, message=message, help=help, file=origin.file, line=origin.line,
    )  # fmt: skip


def _unknown(config: Config, key: str, keys: tuple[str, ...]) -> Finding:
    near = difflib.get_close_matches(key, keys, n=1)
    help = (
        f"did you mean `{near[0]}`?"
        if near
        else f"upstream's own names go under `args:`; ours are {', '.join(keys)}"
    )
    origin = config.origin(key)
    return Finding(
        severity="error", layer="launch", code="unknown-option", key=key,
        message=f"`{key}` is no option of a stage file", help=help, file=origin.file,
        line=origin.line,
    )  # fmt: skip


def deepspeed_file(name: str) -> Path:
    """The packaged DeepSpeed config of that name."""
    return Path(str(files("launcher.deepspeed").joinpath(f"{name}.json")))


def _deepspeed(
    config: Config, folders: Sequence[Path], findings: list[Finding]
) -> tuple[Path | None, str]:
    key = "deepspeed_config" if config.shape == "wrapped" else "deepspeed"
    given = config.options.get(key)
    if given is None or given is False or given == "none":
        return None, "none"
    if given in DEEPSPEED:
        return deepspeed_file(given), str(given)
    if isinstance(given, str):
        # beside the stage file, or where launch was started
        for base in (Path(), config.path.parent, *folders):
            path = (base / given).expanduser()
            if path.is_file():
                return path.absolute(), path.stem
    names = ", ".join((*DEEPSPEED, "none"))
    near = difflib.get_close_matches(str(given), DEEPSPEED, n=1)
    help = f"did you mean `{near[0]}`?" if near else f"a path, or one of {names}"
    findings.append(
        _bad(config, key, f"`{given}` is neither a DeepSpeed file nor a known name", help)
    )
    return None, "none"


def _batch(config: Config, findings: list[Finding]) -> Batch | None:
    given = config.options.get("batch")
    if given is None:
        return None
    if not isinstance(given, dict):
        findings.append(_bad(config, "batch", "`batch` is {global: N, per_device: N}"))
        return None
    numbers: dict[str, int | None] = {"global": None, "per_device": None}
    for key, value in given.items():
        number = _positive(value)
        if key not in numbers:
            findings.append(
                _bad(config, f"batch.{key}", f"`{key}` is no part of `batch`", "global, per_device")
            )
        elif number is None:
            findings.append(
                _bad(
                    config,
                    f"batch.{key}",
                    f"`batch.{key}` is a whole number above 0, not `{value}`",
                )
            )
        else:
            numbers[key] = number
    return Batch(total=numbers["global"], per_device=numbers["per_device"])


def _positive(value: Any) -> int | None:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if valid else None


def _gpus(config: Config, findings: list[Finding]) -> int | None:
    given = config.options.get("num_gpus")
    if given is None:
        return None
    number = 0 if given == 0 and given is not False else _positive(given)
    if number is None:
        findings.append(_bad(config, "num_gpus", f"`num_gpus` is a whole number, not `{given}`"))
    return number


def _expect(config: Config, findings: list[Finding]) -> dict[str, str]:
    given = config.options.get("expect")
    if given is None:
        return {}
    if not isinstance(given, dict):
        findings.append(_bad(config, "expect", "`expect` maps points of the verdict to states"))
        return {}
    expected = {}
    for point, value in given.items():
        # a plain `off` or `on` is a boolean in YAML
        state = (
            {True: "on", False: "off", None: "any"}.get(value, value)
            if not isinstance(value, str)
            else value
        )
        if point not in EXPECT:
            findings.append(
                _bad(
                    config,
                    f"expect.{point}",
                    f"`{point}` is no point of a verdict",
                    ", ".join(EXPECT),
                )
            )
        elif state not in EXPECT[point]:
            findings.append(
                _bad(
                    config,
                    f"expect.{point}",
                    f"`{state}` cannot be expected of `{point}`",
                    ", ".join(EXPECT[point]),
                )
            )
        else:
            expected[point] = str(state)
    return expected
