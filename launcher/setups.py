"""Everything that the peak of a run depends on: shape, batch, loss, kernels, and what is cut how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.activations import FULL, HALF, Kernels
from launcher.errors import Finding, InvalidConfig, brief
from launcher.lengths import Batch
from launcher.moments import Part
from launcher.shapes import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """A DeepSpeed config as far as memory depends on it; sizes are elements, `communication` bytes."""

    stage: int
    communication: int = HALF
    overlap: bool = False
    bucket: int = 500_000_000
    prefetch: int = 50_000_000
    persistence: int = 100_000
    live: int = 1_000_000_000
    reuse: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_params: bool = False
    secondary: int = 1
    """ZeRO++: how many ranks share a second copy of the weights (`zero_hpz_partition_size`)."""


_TYPES = {
    "fp32": FULL,
    "float32": FULL,
    "bf16": HALF,
    "bfp16": HALF,
    "bfloat16": HALF,
    "fp16": HALF,
}


def zero_of(config: Mapping[str, Any] | None, hidden: int) -> Zero | None:
    """A parsed DeepSpeed file; `auto` becomes what accelerate fills in (accelerate/accelerator.py:2323).

    None without DeepSpeed. Raises InvalidConfig (`unknown-memory`) for a stage that is no number.
    """
    if config is None:
        return None
    section = config.get("zero_optimization")
    zero: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise InvalidConfig(
            undescribed(f"`stage` of `zero_optimization` is {brief(repr(stage), 40)}, no number")
        )
    auto = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }

    def number(key: str, default: int) -> int:
        value = zero.get(key, default)
        value = auto.get(key, default) if value == "auto" else value
        return int(value) if isinstance(value, int | float) and value >= 0 else default

    def device(key: str) -> bool:
        part = zero.get(key)
        return isinstance(part, Mapping) and part.get("device", "none") not in ("none", None)

    said = config.get("communication_data_type")
    overlap = zero.get("overlap_comm")
    return Zero(
        stage=stage, communication=_TYPES.get(str(said), HALF),
        overlap=bool(overlap) if overlap is not None else stage == 3,
        bucket=number("reduce_bucket_size", 500_000_000),
        prefetch=number("stage3_prefetch_bucket_size", 50_000_000),
        persistence=number("stage3_param_persistence_threshold", 100_000),
        live=number("stage3_max_live_parameters", 1_000_000_000),
        reuse=number("stage3_max_reuse_distance", 1_000_000_000),
        sub_group=number("sub_group_size", 1_000_000_000),
        offload_optimizer=device("offload_optimizer"), offload_params=device("offload_param"),
        secondary=number("zero_hpz_partition_size", 1),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA: rank, the linears it is put on, and bytes an element of its weights."""

    rank: int
    targets: tuple[str, ...]
    bytes: int = HALF
    dropout: bool = True

    def parameters(self, shape: Shape, *, below: int | None = None) -> int:
        """Trained parameters; those in weights of fewer elements than `below`."""
        wanted = [s for name, s in shape.linears().items() if name in self.targets]
        each = [self.rank * width for pair in wanted for width in pair]
        return shape.layers * sum(one for one in each if below is None or one < below)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """bitsandbytes: the layers' linears in 4 bits, with a scale for every 64 values.

    `nested` scales are of 8 bits themselves, with one of theirs in fp32 for every 256. Everything else,
    the embedding and the output layer too, has the weights' type.
    """

    nested: bool = False

    @property
    def bytes(self) -> float:
        """Bytes an element (bitsandbytes/functional.py: `quantize_4bit`, blocks of 64)."""
        return 0.5 + ((1 + FULL / 256) if self.nested else FULL) / 64

    @staticmethod
    def elements(shape: Shape) -> int:
        """Those of the layers' linears: transformers leaves the output layer out."""
        return shape.layers * sum(out * into for out, into in shape.linears().values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """FSDP as OLMo-core lays it: 32-bit weights cut over `shards` ranks, 16 bits where they compute.

    `share` is the activation memory budget of torch.compile, None without compile. The loss is compiled
    with the output layer (olmo_core_train_modules.py:32), but not before upstream's PR 1467.
    """

    shards: int
    share: float | None = None
    loss: bool = True

    @property
    def compiles_loss(self) -> bool:
        """Whether the loss is compiled with the output layer."""
        return self.share is not None and self.loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that the peak depends on.

    `batch` is the largest micro-batch (DPO: chosen and rejected rows together). `loss` is "full" (the
    model's own), "liger" (fused into the output layer), "tiled" (TRL's) or "logprobs" (open-instruct's
    DPO). `reference` is "" (none), "cache" (a pass beforehand: open-instruct), "model" (a second model
    beside: TRL) or "adapter" (the adapters are switched off: TRL with LoRA). `weight_bytes` are those of
    the loaded weights; `weight_bytes` 4 with `autocast` is TRL's default. `reference_batch` is that of the
    pass beforehand where it is not the training's. `quantised` are frozen weights below the adapters.
    """

    shape: Shape
    batch: Batch
    processes: int
    accumulation: int
    stage: str = "sft"
    loss: str = "full"
    reference: str = ""
    zero: Zero | None = None
    attention: str = "flash"
    liger: bool = False
    checkpointing: bool = False
    weight_bytes: int = HALF
    autocast: bool = False
    fused_optimizer: bool = True
    state_bytes: float | None = None
    adapters: Adapters | None = None
    quantised: Quantised | None = None
    packed: bool = False
    steps: int | None = None
    sharding: Sharding | None = None
    reference_batch: Batch | None = None
    extra: tuple[Part, ...] = field(default=())

    @property
    def kernels(self) -> Kernels:
        """What decides on the layers' operators."""
        sdpa = "sdpa_packed" if self.attention == "sdpa" and self.parted else self.attention
        adapters = self.adapters
        return Kernels(
            attention=sdpa, liger=self.liger, checkpointing=self.checkpointing, cached=self.cached,
            wide=self.weight_bytes == FULL, autocast=self.autocast, quantised=self.quantised is not None,
            adapter_rank=adapters.rank if adapters else 0,
            adapter_bytes=adapters.bytes if adapters else HALF,
            adapter_dropout=adapters.dropout if adapters else True,
            adapter_targets=adapters.targets if adapters else (),
            linears_keep=self.zero is not None and self.zero.stage == 3,
        )  # fmt: skip

    @property
    def cached(self) -> bool:
        """Whether keys and values are kept as for generating: dpo_utils.py:865 does not say `use_cache`."""
        return self.loss == "logprobs" and not self.checkpointing and self.sharding is None

    @property
    def parted(self) -> bool:
        """Whether a mask parts packed rows, as transformers does where nothing is cached.

        (transformers/masking_utils.py:860)
        """
        return self.packed and not self.cached

    @property
    def trained(self) -> int:
        """Trained parameters."""
        return self.adapters.parameters(self.shape) if self.adapters else self.shape.parameters

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the adapters' weights; 0 where the model itself is trained."""
        return self.adapters.bytes * self.trained if self.adapters else 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of the model's own weights as they are loaded."""
        whole = self.weight_bytes * self.shape.parameters
        if self.quantised is None:
            return whole
        few = self.quantised.elements(self.shape)
        return int(whole - (self.weight_bytes - self.quantised.bytes) * few)

    @property
    def gradient_bytes(self) -> int:
        """Bytes an element of a gradient as the backward pass makes it."""
        return self.adapters.bytes if self.adapters else self.weight_bytes


def undescribed(message: str) -> Finding:
    """`unknown-memory`: what the memory model leaves out."""
    return Finding(
        severity="error", layer="launch", code="unknown-memory", message=message,
        help="memory cannot be planned for it; the steps and tokens can",
    )  # fmt: skip
