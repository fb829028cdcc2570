"""What GPUs can do, from their makers' data sheets: arithmetic, and bytes a second."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A data sheet: `flops` is dense bfloat16, FLOP/s; `bandwidth` that of its memory and `link` one
    direction to another device (NVLink, else PCIe), in bytes a second.
    """

    name: str
    flops: float
    bandwidth: float
    link: float
    pattern: str = ""

    def matches(self, name: str) -> bool:
        """Whether a device of this name is one: `NVIDIA H100 80GB HBM3` is an H100."""
        return bool(re.search(self.pattern or rf"\b{self.name}\b", name, re.IGNORECASE))


SHEETS = (
    # blackwell-datasheet: HGX B200 36 PFLOPS with sparsity on 8 GPUs, GB200 5 PFLOPS on each
    Sheet(name="GB200", flops=2_500e12, bandwidth=8.0e12, link=900e9),
    Sheet(name="B200", flops=2_250e12, bandwidth=8.0e12, link=900e9),
    # nvidia.com/en-us/data-center/h200: 1,979 TFLOPS with sparsity, NVL 1,671
    Sheet(name="H200 NVL", flops=835.5e12, bandwidth=4.8e12, link=450e9),
    Sheet(name="H200", flops=989.5e12, bandwidth=4.8e12, link=450e9, pattern=r"\bG?H200\b"),
    # nvidia.com/en-us/data-center/h100: SXM 1,979, NVL 1,671, PCIe 1,513 TFLOPS with sparsity
    Sheet(name="H100 NVL", flops=835.5e12, bandwidth=3.9e12, link=300e9),
    Sheet(name="H100 PCIe", flops=756.5e12, bandwidth=2.0e12, link=64e9),
    Sheet(name="H100", flops=989.5e12, bandwidth=3.35e12, link=450e9, pattern=r"\bH[18]00\b"),
    # nvidia-a100-datasheet: 312 TFLOPS, SXM and PCIe
    Sheet(name="A100", flops=312e12, bandwidth=2.0e12, link=300e9, pattern=r"\bA[18]00\b"),
    # l40s-datasheet: 362.05, l40: 181.05, l4: 242 with sparsity
    Sheet(name="L40S", flops=362.05e12, bandwidth=0.864e12, link=32e9),
    Sheet(name="L40", flops=181.05e12, bandwidth=0.864e12, link=32e9),
    Sheet(name="L4", flops=121e12, bandwidth=0.3e12, link=32e9),
    # a40-datasheet: 149.7, a10-datasheet: 125, a10g: 70
    Sheet(name="A40", flops=149.7e12, bandwidth=0.696e12, link=32e9),
    Sheet(name="A10G", flops=70e12, bandwidth=0.6e12, link=32e9),
    Sheet(name="A10", flops=125e12, bandwidth=0.6e12, link=32e9),
    Sheet(name="4090", flops=165e12, bandwidth=1.01e12, link=32e9),
)
"""The first that matches is meant."""


def sheet_of(name: str | None) -> Sheet | None:
    """The data sheet of a device by its name; None where it is not known."""
    return next((one for one in SHEETS if one.matches(name or "")), None)


def peak_flops(name: str | None) -> float | None:
    """What a GPU of this name can do at most in dense bfloat16, in FLOP/s; None where not known."""
    found = sheet_of(name)
    return found.flops if found else None
