"""Everything that the peak of a run depends on: shape, batch, loss, operators, sharding."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from launcher.artifacts.architecture import Shape
from launcher.artifacts.lengths import MicroBatch
from launcher.errors import InvalidConfig, launch_finding, shorten
from launcher.lazy_dataclass import dataclass
from launcher.runs.record import as_mapping

# bytes of an element in 16 and in 32 bits
HALF = 2
FULL = 4


class Zero(NamedTuple):
    """What memory depends on in a DeepSpeed config; sizes are elements, `communication` bytes."""

    stage: int
    communication: int = HALF
    overlap: bool = False
    bucket: int = 500_000_000
    prefetch: int = 50_000_000
    persistence: int = 100_000
    reuse: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_params: bool = False
    plain_linears: bool = False
    """`memory_efficient_linear: false`: autograd keeps the gathered weight of every linear that it
    has passed.
    """


_SIZES = {
    "bucket": "reduce_bucket_size",
    "prefetch": "stage3_prefetch_bucket_size",
    "persistence": "stage3_param_persistence_threshold",
    "reuse": "stage3_max_reuse_distance",
    "sub_group": "sub_group_size",
}


def parse_zero(config: Mapping[str, Any] | None, hidden: int) -> Zero | None:
    """A parsed DeepSpeed file; `auto` becomes what accelerate fills in
    (accelerate/accelerator.py::Accelerator._prepare_deepspeed[: hidden_size * hidden_size]).

    None without DeepSpeed. Raises InvalidConfig (`unknown-memory`) for a stage that is no number.
    """
    if config is None:
        return None
    section = as_mapping(config.get("zero_optimization"))
    stage = section.get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int):
        shown = shorten(repr(stage), 40)
        raise refuse_undescribed(f"`stage` of `zero_optimization` is {shown}, no number")
    square = hidden * hidden
    auto = {"bucket": square, "prefetch": int(0.9 * square), "persistence": 10 * hidden}
    sizes: dict[str, int] = {}
    for name, key in _SIZES.items():
        size = section.get(key)
        if size == "auto":
            size = auto.get(name)
        if isinstance(size, int | float) and size >= 0:
            sizes[name] = int(size)
    overlap = section.get("overlap_comm")
    if overlap is None:
        overlap = stage == 3
    communication = HALF
    if config.get("communication_data_type") in ("fp32", "float32"):
        communication = FULL
    return Zero(
        stage=stage,
        communication=communication,
        overlap=bool(overlap),
        offload_optimizer=_offloads(section, "offload_optimizer"),
        offload_params=_offloads(section, "offload_param"),
        plain_linears=section.get("memory_efficient_linear") is False,
        **sizes,
    )


def _offloads(section: Mapping[str, Any], key: str) -> bool:
    return as_mapping(section.get(key)).get("device") not in ("none", None)


class Adapters(NamedTuple):
    """LoRA: rank, the linears it is put on, and bytes an element of its weights."""

    rank: int
    targets: tuple[str, ...]
    bytes: int = HALF
    dropout: bool = True

    def parameters(self, shape: Shape) -> int:
        widths = [sum(size) for name, size in shape.linears().items() if name in self.targets]
        return shape.layers * self.rank * sum(widths)


class Quantised(NamedTuple):
    """bitsandbytes: the layers' linears in 4 bits, with a scale for every 64 values.

    transformers leaves the output layer out. `nested` scales have 8 bits themselves, with one of
    theirs in fp32 for every 256. Everything else, the embedding too, has the weights' type.
    """

    nested: bool = False

    @property
    def bytes(self) -> float:
        """Bytes an element (bitsandbytes/functional.py: `quantize_4bit`, blocks of 64)."""
        scale: float = FULL
        if self.nested:
            scale = 1 + FULL / 256
        return 0.5 + scale / 64


def count_trained(shape: Shape, adapters: Adapters | None) -> int:
    """Trained parameters: those of the adapters, else the whole model's."""
    if adapters is None:
        return shape.parameters
    return adapters.parameters(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """OLMo-core's FSDP: 32-bit weights sharded over `shards` ranks, 16 bits where they compute.

    `share` is the activation memory budget of torch.compile, None without compile. With `selected`
    each module of a layer is recomputed from its inputs, by itself. The loss is compiled with the
    output layer (olmo_core_train_modules.py::DPOLMHead[All DTensor handling]), but not before
    upstream's PR 1467.
    """

    shards: int
    share: float | None = None
    loss: bool = True
    selected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that the peak depends on.

    `batch` is the largest micro-batch (DPO: chosen and rejected rows together), `attention` flash
    or sdpa. `loss` is "full" (the model's own), "liger" (fused into the output layer), "tiled"
    (TRL's) or "logprobs" (open-instruct's DPO). `reference` is "" (none), "cache" (a pass
    beforehand: open-instruct), "model" (a second model beside: TRL) or "adapter" (the adapters are
    switched off: TRL with LoRA). `weight_bytes` are those of the loaded weights; 4 with `autocast`
    is TRL's default. `reference_batch` is that of the pass beforehand where it differs from the
    training's. `quantised` are frozen weights below the adapters. `state_bytes` are those of the
    optimizer's states for each trained element; None for torch's Adam. `step_copies` are the
    temporary copies of all gradients that the optimizer's step makes.
    """

    shape: Shape
    batch: MicroBatch
    processes: int
    accumulation: int
    loss: str = "full"
    reference: str = ""
    zero: Zero | None = None
    attention: str = "flash"
    liger: bool = False
    checkpointing: bool = False
    weight_bytes: int = HALF
    autocast: bool = False
    fused_optimizer: bool = True
    step_copies: int = 0
    state_bytes: float | None = None
    adapters: Adapters | None = None
    quantised: Quantised | None = None
    packed: bool = False
    sharding: Sharding | None = None
    reference_batch: MicroBatch | None = None

    @property
    def wide(self) -> bool:
        """Whether the states between layers are fp32: fp32 weights under bf16 autocast."""
        return self.weight_bytes == FULL

    @property
    def state_width(self) -> int:
        """Bytes an element of the states between layers."""
        return FULL if self.wide else HALF

    @property
    def casts(self) -> bool:
        """Whether autocast keeps 16-bit copies of the weights."""
        return self.autocast and self.wide and self.quantised is None

    @property
    def frozen(self) -> bool:
        """Whether linears under adapters keep no input: ZeRO-3's own do
        (deepspeed/runtime/zero/linear.py::LinearFunctionForZeroStage3.setup_context[ctx.save_for_backward]).
        """
        return self.adapters is not None and (self.zero is None or self.zero.stage != 3)

    @property
    def share(self) -> float | None:
        return None if self.sharding is None else self.sharding.share

    @property
    def selects_modules(self) -> bool:
        """Whether the modules of a layer are recomputed one by one."""
        return self.sharding is not None and self.sharding.selected

    @property
    def compiles_loss(self) -> bool:
        """Whether the loss is compiled with the output layer."""
        return self.sharding is not None and self.share is not None and self.sharding.loss

    @property
    def trained(self) -> int:
        return count_trained(self.shape, self.adapters)

    @property
    def adapter_bytes(self) -> int:
        if self.adapters is None:
            return 0
        return self.adapters.bytes * self.trained

    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights but the adapters'."""
        whole = self.weight_bytes * self.shape.parameters
        if self.quantised is None:
            return whole
        return int(whole - (self.weight_bytes - self.quantised.bytes) * self.shape.linear_elements)

    @property
    def gradient_bytes(self) -> int:
        """Bytes an element of a gradient as the backward pass makes it."""
        if self.adapters is None:
            return self.weight_bytes
        return self.adapters.bytes


def refuse_undescribed(message: str, **place: Any) -> InvalidConfig:
    """`unknown-memory`: what the memory model leaves out; `place` is where the file asks for it."""
    help = "measure it: `launch check` tells the peak of a short run"
    return InvalidConfig(launch_finding("error", "unknown-memory", message, help, **place))
