"""What TRL's arguments come to once its scripts have read them: mappings, precision, attention, engines.

An argument that is a mapping may be JSON text, the name of a JSON file, or neither.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.backends.context import Context, section
from launcher.errors import brief
from launcher.paths import is_file
from launcher.schema import Values, json_fault

LARGEST_FILE = 4 * 2**20  # bytes; what is larger is no config


# --- mappings
# --------------------------------------------------------------------------------------


class Unreadable(ValueError):
    """A text that is neither a mapping nor a file that holds one; the message says why."""


class Missing(Unreadable):
    """A text that names a file which is not on this machine; on another it may be."""


def inline(value: Any) -> dict[str, Any] | None:
    """The mapping that a JSON text holds, None for other texts and for broken JSON.

    Numbers and bools inside texts are converted, as transformers/training_args.py:161 does.
    """
    if not isinstance(value, str) or not value.startswith("{") or json_fault(value) is not None:
        return None
    converted = _converted(json.loads(value))
    assert isinstance(converted, dict)
    return converted


def _converted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _converted(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if value.isdigit():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdigit() else value


def mapping(text: str, *, encoded: bool = False) -> dict[str, Any]:
    """The mapping that a text holds or names; raises Missing where no such file is here, else Unreadable.

    `encoded`: what is no file may be the mapping itself, as JSON or in base64; that is how
    accelerate/utils/deepspeed.py:155 reads DeepSpeed's.
    """
    if (given := inline(text)) is not None:
        return given
    try:
        return _from_file(text)
    except Missing:
        for decoded in (str, _base64) if encoded else ():
            try:
                value = json.loads(decoded(text))
            except (RecursionError, ValueError):
                continue
            return _checked(value, text)
        raise


def _from_file(name: str) -> dict[str, Any]:
    if not name:
        raise Unreadable("the empty text names no file")
    path = Path(name)
    if not is_file(path):
        raise Missing(f"there is no file {brief(name)} here")
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise Unreadable(f"{brief(name)} is too large for a config")
        return _checked(json.loads(path.read_text(encoding="utf-8")), name)
    except OSError as error:
        raise Missing(f"{brief(name)} cannot be read: {error.strerror}") from None
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Unreadable(f"{brief(name)} is not JSON: {error}") from None


def _base64(text: str) -> str:
    return base64.urlsafe_b64decode(text).decode()


def _checked(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unreadable(f"{brief(name)} holds no mapping")
    return value


def prepared(values: Values) -> bool:
    """Whether the rows are taken as they are, tokenised (trl/trainer/sft_trainer.py:1009)."""
    return bool((inline(values.get("dataset_kwargs")) or {}).get("skip_prepare_dataset"))


# --- precision, attention, compilation
# -------------------------------------------------------------


def precision(values: Values) -> str | None:
    """`bf16` or `fp16`, None for neither; bfloat16 by default (trl/trainer/base_config.py:108)."""
    if values["fp16"]:
        return "fp16"
    bf16 = values["bf16"]
    return "bf16" if bf16 or bf16 is None else None


def attention(values: Values) -> tuple[str | None, str]:
    """The attention implementation asked for, and the key that says so (trl/scripts/sft.py:83)."""
    kwargs = inline(values["model_init_kwargs"]) or {}
    key = "model_init_kwargs" if "attn_implementation" in kwargs else "attn_implementation"
    given = kwargs.get("attn_implementation", values["attn_implementation"])
    return (given.removeprefix("paged|") if isinstance(given, str) else None), key


def compiled(values: Values) -> bool:
    """Whether the model is compiled: a mode or a backend asks too (transformers/training_args.py:1589)."""
    named = values["torch_compile_backend"] is not None or values["torch_compile_mode"] is not None
    return bool(values["torch_compile"] or named)


# --- engines
# ---------------------------------------------------------------------------------------


def own_deepspeed(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The mapping behind TRL's own `deepspeed`; empty where it cannot be read, None without one."""
    text = values["deepspeed"]
    if not isinstance(text, str) or not text:
        return None
    try:
        return mapping(text, encoded=True) or None
    except Unreadable:
        return {}


def engine(context: Context) -> Mapping[str, Any] | None:
    """The DeepSpeed config in use: TRL's own wins over launch's; None on the CPU and without one."""
    if context.gpus == 0:
        return None
    own = own_deepspeed(context.values)
    return context.file if own is None else own


def zero_stage(context: Context) -> int | None:
    """The ZeRO stage in use."""
    config = engine(context)
    stage = None if config is None else section(config, "zero_optimization").get("stage", 0)
    return stage if isinstance(stage, int) else None


def fsdp_config(text: Any) -> dict[str, Any]:
    """The mapping of `fsdp_config`, without the prefix that its keys may have; raises Unreadable."""
    config = {} if text is None else mapping(str(text))
    plain = {key: value for key, value in config.items() if not key.startswith("fsdp_")}
    return plain | {k[5:]: value for k, value in config.items() if k.startswith("fsdp_")}


def fsdp(values: Values) -> Mapping[str, Any] | None:
    """That mapping where FSDP is asked for; empty where it is unreadable."""
    if not values["fsdp"]:
        return None
    try:
        return fsdp_config(values["fsdp_config"])
    except Unreadable:
        return {}


def alone(context: Context) -> bool:
    """Whether a single process would run, started without DeepSpeed's or torch's launcher."""
    return context.gpus == 0 or (context.gpus == 1 and context.file is None)
