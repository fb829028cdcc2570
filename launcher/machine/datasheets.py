"""The speed of GPUs in their makers' data sheets: arithmetic, and bytes a second."""

import re
from dataclasses import replace

from launcher.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One device, by default with the proportions of an A100 on PCIe.

    `gib` is its memory (None: unknown), `flops` are FLOP/s in dense bfloat16. `bandwidth` of its
    memory and `link` to another device (NVLink, else PCIe; one direction) are in bytes a second.
    `launch` is the least time of a kernel in seconds. `pattern` finds it in the driver's name.
    """

    name: str = ""
    gib: float | None = None
    flops: float = 312e12
    bandwidth: float = 2.0e12
    link: float = 25e9
    launch: float = 6e-6
    pattern: str = ""


CPU = Card(name="CPU", flops=2e11, bandwidth=2e10, link=1e10, launch=4e-6)
# the first whose pattern matches counts
SHEETS = (
    # blackwell-datasheet: HGX B200 36 PFLOPS with sparsity on 8 GPUs, GB200 5 PFLOPS on each
    Card(name="GB200", flops=2_500e12, bandwidth=8.0e12, link=900e9),
    Card(name="B200", flops=2_250e12, bandwidth=8.0e12, link=900e9),
    # nvidia.com/en-us/data-center/h200: 1,979 TFLOPS with sparsity, NVL 1,671
    Card(name="H200 NVL", flops=835.5e12, bandwidth=4.8e12, link=450e9),
    Card(name="H200", flops=989.5e12, bandwidth=4.8e12, link=450e9, pattern=r"\bG?H200\b"),
    # nvidia.com/en-us/data-center/h100: SXM 1,979, NVL 1,671, PCIe 1,513 TFLOPS with sparsity
    Card(name="H100 NVL", flops=835.5e12, bandwidth=3.9e12, link=300e9),
    Card(name="H100 PCIe", flops=756.5e12, bandwidth=2.0e12, link=64e9),
    Card(name="H100", flops=989.5e12, bandwidth=3.35e12, link=450e9, pattern=r"\bH[18]00\b"),
    # nvidia-a100-datasheet: 312 TFLOPS, SXM and PCIe
    Card(name="A100", flops=312e12, bandwidth=2.0e12, link=300e9, pattern=r"\bA[18]00\b"),
    # l40s-datasheet: 362.05, l40: 181.05, l4: 242 with sparsity
    Card(name="L40S", flops=362.05e12, bandwidth=0.864e12, link=32e9),
    Card(name="L40", flops=181.05e12, bandwidth=0.864e12, link=32e9),
    Card(name="L4", flops=121e12, bandwidth=0.3e12, link=32e9),
    # a40-datasheet: 149.7, a10-datasheet: 125, a10g: 70
    Card(name="A40", flops=149.7e12, bandwidth=0.696e12, link=32e9),
    Card(name="A10G", flops=70e12, bandwidth=0.6e12, link=32e9),
    Card(name="A10", flops=125e12, bandwidth=0.6e12, link=32e9),
    Card(name="4090", flops=165e12, bandwidth=1.01e12, link=32e9),
)


def find_sheet(name: str | None) -> Card | None:
    """The data sheet of a GPU by the driver's name: `NVIDIA H100 80GB HBM3` is an H100."""
    for card in SHEETS:
        pattern = card.pattern or rf"\b{card.name}\b"
        if re.search(pattern, name or "", re.IGNORECASE):
            return card
    return None


def find_card(name: str, gib: float | None) -> Card:
    sheet = find_sheet(name) or Card()
    return replace(sheet, name=name, gib=gib)


def find_peak_flops(name: str | None) -> float | None:
    """The FLOP/s of a GPU in dense bfloat16; None if unknown."""
    sheet = find_sheet(name)
    if sheet is None:
        return None
    return sheet.flops


def compute_flops_a_token(
    *, trained: float, frozen: float = 0.0, layers: float, query: float, width: float
) -> float:
    """FLOP of one token's forward and backward pass in rows of `width` tokens, as MFU counts it.

    6 for each trained weight that is multiplied with (the output layer, not the embedding table), 4
    for a frozen one, and 6 L Q S for causal attention ("PaLM: Scaling Language Modeling with
    Pathways", Chowdhery et al., 2022, appendix B). The second forward pass of checkpointing does
    not count.
    """
    weights = 6 * trained + 4 * frozen
    attention = 6 * layers * query * width
    return weights + attention
