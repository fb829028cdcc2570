"""Which of several attention implementations a TRL run can have, and why not those before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.backends import trl_resolved
from launcher.backends.context import Context
from launcher.backends.trl_mappings import inline
from launcher.schema import Values

# transformers/modeling_utils.py:5076, beside eager
NAMES = (
    "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention",
)  # fmt: skip
PACKAGES = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
_OLDEST = (2, 3, 3)  # transformers/utils/import_utils.py:1199
_ALWAYS = ("eager", "sdpa")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The first implementation that can be had, None for none; those before it, each with the reason."""

    name: str | None
    passed: tuple[tuple[str, str], ...] = ()

    @property
    def why(self) -> str:
        """The reasons, for people."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.passed)


def choose(preferred: Sequence[str], context: Context) -> Choice:
    """The first of these that can be had here; what is not known speaks for it."""
    passed: list[tuple[str, str]] = []
    for name in preferred:
        reason = lacking(name, context)
        if reason is None:
            return Choice(name=name, passed=tuple(passed))
        passed.append((name, reason))
    return Choice(name=None, passed=tuple(passed))


def lacking(name: str, context: Context) -> str | None:
    """Why an implementation cannot be had; None where it can be, or where that is not known.

    A flash attention is its own package here. transformers would also fetch a kernel from the hub
    (transformers/modeling_utils.py:1783), under another name: one that is meant is named itself.
    """
    if name in _ALWAYS:
        return None
    if context.gpus == 0:
        return "there is no GPU"
    if name == "flex_attention":
        return None
    package = PACKAGES.get(name, "kernels")
    if context.lacks(package):
        return f"the trainer's Python has no {package}"
    if name in PACKAGES and full_precision(context.values, context.mixed_precision):
        return "it takes 16 bits only, and the model is float32 with neither `bf16` nor `fp16`"
    version = (context.packages or {}).get(package) or ""
    if name == "flash_attention_2" and version and _release(version) < _OLDEST:
        return f"flash-attn {version} is older than {'.'.join(map(str, _OLDEST))}"
    return None


def full_precision(values: Values, mixed_precision: str | None) -> bool:
    """Whether attention gets float32 (transformers/integrations/flash_attention.py:22)."""
    kwargs = inline(values["model_init_kwargs"]) or {}
    plain = kwargs.get("dtype", values["dtype"]) == "float32"
    quantised = values["load_in_4bit"] or values["load_in_8bit"]
    mixed = trl_resolved.precision(values) is not None or mixed_precision not in (None, "no")
    return bool(plain and not mixed and not quantised)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
