"""The peak of torch's allocated memory on the fullest rank, in GiB, by part and by moment.

A run's memory has a few moments that can be its peak: the engine's start, the reference pass, the loss, a
layer's backward pass, the embedding's gradient, the optimizer's step. Each is a sum of parts; each part
carries its formula and where that comes from. The largest moment is the peak. What is not described
raises, instead of being guessed.

What the ZeRO stages keep follows "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(Rajbhandari et al., 2020), the temporary copies are read from DeepSpeed 0.18.9 and measured there: a
test runs its engine and counts every allocation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher import activations
from launcher.activations import FULL, HALF, Amount, Kernels
from launcher.errors import Finding, InvalidConfig, brief
from launcher.lengths import Batch
from launcher.shapes import Shape

GIB = 2**30

# cuBLAS keeps one workspace a thread that multiplies on Hopper: forward and backward
_WORKSPACE = 2 * 32 * 2**20

KINDS = ("weights", "gradients", "optimizer", "communication", "activations", "logits", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing in memory at a moment: `kind` is one of KINDS."""

    kind: str
    name: str
    gib: float
    formula: str
    source: str = ""

    def as_json(self) -> dict[str, Any]:
        """The part as `--format json` shows it."""
        return {
            "kind": self.kind, "name": self.name, "gib": round(self.gib, 3),
            "formula": self.formula, "source": self.source,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is in memory at one point of a run; `spared` where there is no room: then the host takes it."""

    name: str
    parts: tuple[Part, ...]
    spared: bool = False

    @property
    def gib(self) -> float:
        """All parts together."""
        return sum(part.gib for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The moments of a run; the fullest is its peak."""

    moments: tuple[Moment, ...]

    @property
    def fullest(self) -> Moment:
        """The moment of the peak."""
        return max(self.moments, key=lambda moment: moment.gib)

    @property
    def peak(self) -> float:
        """GiB allocated at most."""
        return self.fullest.gib

    def within(self, gib: float) -> Memory:
        """The same where so many GiB can be used: without what is spared then."""
        return Memory(moments=tuple(m for m in self.moments if not m.spared or m.gib <= gib))

    def of(self, kind: str) -> float:
        """GiB of one kind at the peak."""
        return sum(part.gib for part in self.fullest.parts if part.kind == kind)

    def as_json(self) -> dict[str, Any]:
        """`memory_gib` of the plan's JSON contract: the peak, and its parts by kind."""
        kinds = {kind: round(self.of(kind), 2) for kind in KINDS}
        return {"peak": round(self.peak, 2), **kinds, "moment": self.fullest.name}

    def why(self) -> list[dict[str, Any]]:
        """Every moment with its parts and their formulas, the fullest first."""
        ordered = sorted(self.moments, key=lambda moment: -moment.gib)
        return [
            {"moment": m.name, "gib": round(m.gib, 2), "parts": [p.as_json() for p in m.parts]}
            for m in ordered
        ]


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
            _unknown(f"`stage` of `zero_optimization` is {brief(repr(stage), 40)}, no number")
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

    `share` is the activation memory budget of torch.compile, None without compile.
    """

    shards: int
    share: float | None = None


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


def estimate(setup: Setup) -> Memory:
    """The peak of a run and what it is made of; raises InvalidConfig (`unknown-memory`)."""
    if setup.shape.experts:
        _require_plain_experts(setup)
    if setup.quantised is not None and setup.zero is not None:
        raise InvalidConfig(_unknown("DeepSpeed with quantised weights is not described"))
    if setup.shape.layout.fused and setup.adapters:
        raise InvalidConfig(_unknown("LoRA on fused projections is not described"))
    if setup.zero is not None and setup.zero.stage not in {1, 2, 3}:
        raise InvalidConfig(
            _unknown(f"DeepSpeed without ZeRO (stage {setup.zero.stage}) is not described")
        )
    engine: _Engine
    if setup.sharding is not None:
        engine = _Fsdp(setup, setup.sharding)
    elif setup.zero is not None and setup.zero.stage == 3:
        engine = _Sharded(setup, setup.zero)
    elif setup.zero is not None and setup.zero.stage == 2:
        engine = _Partitioned(setup, setup.zero)
    elif setup.zero is not None and setup.zero.stage == 1:
        engine = _Whole(setup, setup.zero)
    else:
        engine = _Plain(setup)
    return Memory(moments=tuple(_moments(setup, engine)))


# what lies beside the experts
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


def _require_plain_experts(setup: Setup) -> None:
    if setup.sharding is not None:
        raise InvalidConfig(_unknown("dpo.py with experts is not described: OLMo-core has its own"))
    if setup.weight_bytes == FULL:
        # torch's grouped products take 16 bits, what else they do depends on its version
        raise InvalidConfig(
            _unknown("experts in 32 bits are not described: `dtype: bfloat16` is, and DeepSpeed")
        )
    if setup.adapters and not set(setup.adapters.targets) <= _ATTENTION:
        raise InvalidConfig(_unknown(
            "LoRA on experts is not described: PEFT makes whole weights of it; on "
            f"{', '.join(sorted(_ATTENTION))} it is"
        ))  # fmt: skip


def _moments(setup: Setup, engine: _Engine) -> Iterable[Moment]:
    work = Part(kind="other", name="cuBLAS workspaces", gib=_WORKSPACE / GIB, formula="2 x 32 MiB")
    always = (work, *setup.extra)
    yield Moment(name="start", parts=engine.start())
    if flat := engine.flattened():
        yield Moment(name="start, weights made flat", parts=flat, spared=True)
    resting = (*engine.resting(), *always)
    if setup.reference == "cache":
        yield Moment(
            name="reference pass", parts=(*engine.untrained(), *always, *_reference(setup))
        )
    if setup.reference in {"model", "adapter"}:
        held = (*resting, *engine.waiting(), *engine.gathered(whole=False))
        yield Moment(name="reference pass", parts=(*held, *_kept(setup), *_reference(setup)))
    before = (*resting, *engine.accumulated(), *engine.cast())
    copies = engine.cast(passing=True)
    if setup.checkpointing and copies and not setup.adapters:
        # autocast forgets its copies at the end of the pass, whatever is checkpointed
        ahead = (*resting, *engine.waiting(), *copies)
        yield Moment(name="forward pass", parts=(*ahead, *_kept(setup), *_passing(setup)))
    # the backward pass of the loss needs none: what is checkpointed is cast again
    held = () if setup.checkpointing else engine.cast()
    at_loss = (*resting, *engine.waiting(), *held, *engine.gathered(whole=True))
    yield Moment(name="loss", parts=(*at_loss, *_kept(setup), *_head(setup)))
    if not setup.adapters:
        yield Moment(
            name="output layer's gradient",
            parts=(*at_loss, *_kept(setup), *_output_gradient(setup)),
        )
        if not setup.shape.tied and setup.sharding is None:
            # when the next gradient is there; a tied one, and FSDP's, wait for the embedding's
            held = (*before, *engine.buckets(), *engine.gathered(whole=True, output=False))
            parts = (*_output_gradient(setup, made=True), *engine.sent(setup.shape.embedding))
            yield Moment(
                name="sending the output layer's gradient", parts=(*held, *_kept(setup), *parts)
            )
    layer = activations.backward(setup.shape, setup.kernels, setup.batch)
    yield Moment(
        name="last layer's backward pass",
        parts=(
            *resting, *engine.begun(), *engine.cast(), *engine.buckets(),
            *engine.gathered(whole=False), *_kept(setup), *_recomputed(setup),
            _part("activations", "gradients inside a layer", layer), *_held_output(setup),
            *_dequantised(setup),
        ),
    )  # fmt: skip
    if setup.shape.experts and not setup.adapters:
        wide, _ = setup.shape.expert_weights
        if sent := engine.sent(wide):
            gradient = Amount(bytes=HALF * wide, formula="4EHI")
            yield Moment(
                name="sending of the experts' gradient",
                parts=(
                    *resting, *engine.begun(), *engine.buckets(), *engine.gathered(whole=False),
                    *_kept(setup), _part("gradients", "gate and up weights' gradient", gradient),
                    *_held_output(setup), *sent,
                ),
            )  # fmt: skip
    if not setup.adapters:
        yield Moment(name="embedding's gradient", parts=(*resting, *engine.at_embedding()))
    yield Moment(name="gradient norm", parts=(*resting, *engine.norm()))
    yield Moment(name="optimizer's step", parts=(*resting, *engine.step()))


# --- activations at a moment -----------------------------------------------------------------------


def _part(kind: str, name: str, amount: Amount, times: int = 1, source: str = "") -> Part:
    formula = amount.formula if times == 1 else f"{times} x ({amount.formula})"
    return Part(
        kind=kind, name=name, gib=times * amount.bytes / GIB, formula=formula, source=source
    )


def _kept(setup: Setup) -> tuple[Part, ...]:
    """What all layers keep when the loss is there."""
    shape, kernels, batch = setup.shape, setup.kernels, setup.batch
    rope = Amount(
        bytes=2 * (FULL if kernels.wide else HALF) * shape.head_dim * batch.width,
        formula="cosines and sines",
    )
    share = None if setup.sharding is None else setup.sharding.share
    if setup.checkpointing:
        amount = activations.checkpoint(shape, kernels, batch)
        name = "inputs of checkpointed layers"
    elif share is not None:
        amount = activations.budgeted(shape, kernels, batch, share)
        name = f"kept by the layers, activation budget {share:g}"
    else:
        amount, name = activations.layers(shape, kernels, batch), "kept by the layers"
    masks = _masks(setup)
    mask = Amount(
        bytes=masks * batch.rows * batch.width**2,
        formula="BS^2, the mask" if masks == 1 else f"{masks} x BS^2, all tokens' and the window's",
    )
    times = shape.layers if name != "kept by the layers" else 1
    parts = [_part("activations", name, amount, times)]
    if setup.sharding is None:
        parts.append(_part("activations", "rope", rope))
    return (*parts, _part("activations", "attention mask", mask)) if mask.bytes else tuple(parts)


def _masks(setup: Setup) -> int:
    """How many masks are made for all layers together: of all tokens, and of a window of them."""
    if setup.attention not in {"sdpa", "eager"}:
        return 0
    shape, needed = setup.shape, setup.batch.real < setup.batch.tokens or setup.parted
    windows = needed or activations.masked_windows(shape, setup.kernels, setup.batch)
    return int(needed and shape.windowed < shape.layers) + int(windows and shape.windowed > 0)


def _recomputed(setup: Setup) -> tuple[Part, ...]:
    share = None if setup.sharding is None else setup.sharding.share
    if share is not None and share < 1:
        whole = activations.compiled_layer(setup.shape, setup.kernels, setup.batch)
        kept = activations.budgeted(setup.shape, setup.kernels, setup.batch, share)
        again = Amount(bytes=whole.bytes - kept.bytes, formula=f"{1 - share:g} x a layer")
        return (_part("activations", "one layer, computed again", again),)
    if not setup.checkpointing:
        return ()
    windowed = activations.masked_windows(setup.shape, setup.kernels, setup.batch)
    amount = activations.layer(setup.shape, setup.kernels, setup.batch, windowed=windowed)
    if setup.liger:
        # its first norm keeps the layer's input itself, which is counted already
        shared = HALF * setup.shape.hidden * setup.batch.tokens
        amount = Amount(bytes=amount.bytes - shared, formula=f"{amount.formula} - 2HT")
    return (_part("activations", "one layer, computed again", amount),)


def _head(setup: Setup) -> tuple[Part, ...]:
    """The final norm and the loss at its fullest point, forward or backward."""
    shape, batch = setup.shape, setup.batch
    norm = activations.final_norm(shape, setup.kernels, batch)
    parts = [Part(kind="activations", name="final norm", gib=norm / GIB, formula="kept and output")]
    trained = setup.adapters is None
    if setup.loss == "liger":
        amount = activations.fused_loss(
            shape, batch, weight_bytes=setup.weight_bytes, trained=trained
        )
        return (*parts, _part("logits", "fused linear cross entropy", amount))
    if setup.loss == "tiled":
        amount = activations.tiled_loss(
            shape, batch, weight_bytes=setup.weight_bytes, trained=trained
        )
        return (*parts, _part("logits", "log-probabilities in tiles", amount))
    one = activations.logits(shape, batch, element=FULL)
    if shape.capped:
        capped = activations.logits(shape, batch, element=HALF)
        parts.append(_part("logits", "tanh of the capped logits (bf16)", capped))
    return (
        *parts,
        _part("logits", "log-softmax, kept (fp32)", one),
        _part("logits", "gradient of the log-softmax (fp32)", one),
        _part("logits", "gradient of the logits (fp32)", one),
    )


def _passing(setup: Setup) -> tuple[Part, ...]:
    """At the end of a checkpointed forward pass: the last layer's own, or a tile of logits after it."""
    amount = activations.passing(setup.shape, setup.kernels, setup.batch)
    layer = _part("activations", "the last layer, passing", amount)
    if setup.loss != "tiled":
        return (layer,)
    tiles = activations.tiles(setup.shape, setup.batch, weight_bytes=setup.weight_bytes)
    tile = _part("logits", "a tile of logits", tiles)
    return (max(layer, tile, key=lambda part: part.gib),)


def _output_gradient(setup: Setup, *, made: bool = False) -> tuple[Part, ...]:
    """The output layer's weight gradient; that of the logits lives until it is made."""
    shape, batch = setup.shape, setup.batch
    weight = setup.gradient_bytes * shape.embedding
    parts = [Part(kind="gradients", name="output layer's gradient", gib=weight / GIB,
                  formula=f"{setup.gradient_bytes}VH")]  # fmt: skip
    norm = activations.final_norm(shape, setup.kernels, batch)
    parts.append(
        Part(kind="activations", name="final norm", gib=norm / GIB, formula="kept and output")
    )
    if setup.loss in {"full", "logprobs"} and not made:
        amount = activations.logits(shape, batch, element=HALF)
        parts.append(_part("logits", "gradient of the logits (bf16)", amount))
    return tuple(parts)


def _held_output(setup: Setup) -> tuple[Part, ...]:
    """A tied output layer's gradient waits for the embedding's; under FSDP any: it is the root's."""
    if setup.adapters or not (setup.shape.tied or setup.sharding is not None):
        return ()
    size, name = setup.gradient_bytes * setup.shape.embedding, "output layer's gradient"
    return (Part(kind="gradients", name=f"tied {name}" if setup.shape.tied else name, gib=size / GIB,
                 formula=f"{setup.gradient_bytes}VH, until the embedding's is there"),)  # fmt: skip


def _dequantised(setup: Setup) -> tuple[Part, ...]:
    """A linear weight while it is multiplied with, before or behind the MLP's gradients: what it has more."""
    if setup.quantised is None:
        return ()
    shape, state = setup.shape, setup.weight_bytes
    widest = max(out * into for out, into in shape.linears().values())
    # in its former type, and cast
    width = HALF if state == HALF else HALF + FULL
    gradients = 2 * state * shape.intermediate * setup.batch.tokens
    return (Part(kind="weights", name="one weight, dequantised", gib=max(0, width * widest - gradients) / GIB,
                 formula=f"{width} x {widest:,} - {2 * state}IT",
                 source="bitsandbytes/autograd/_functions.py"),)  # fmt: skip


def _embedding_gradient(setup: Setup, sent: Sequence[Part]) -> tuple[Part, ...]:
    """A dense gradient; a tied output layer's is added to it, out of place, before it is sent."""
    one = setup.gradient_bytes * setup.shape.embedding
    added = 2 * one if setup.shape.tied else 0
    name, width = "embedding's gradient", setup.gradient_bytes
    if added / GIB > summed(sent):
        return (Part(kind="gradients", name=name, gib=(one + added) / GIB,
                     formula=f"3 x {width}VH: its own, the output layer's, their sum"),)  # fmt: skip
    return (Part(kind="gradients", name=name, gib=one / GIB, formula=f"{width}VH"), *sent)


def _reference(setup: Setup) -> tuple[Part, ...]:
    """The reference pass keeps nothing but its logits (dpo_utils.py:462), and before them a cache of keys."""
    shape, batch = setup.shape, setup.reference_batch or setup.batch
    if setup.loss == "tiled":
        amount = activations.tiled_loss(
            shape, batch, weight_bytes=setup.weight_bytes, trained=False
        )
        return (_part("logits", "log-probabilities in tiles", amount),)
    full = activations.logits(shape, batch, element=FULL)
    half = activations.logits(shape, batch, element=HALF)
    at_loss = (
        _part("logits", "logits (bf16)", half),
        _part("logits", "logits (fp32)", full, source="padding_free_collator.py:14"),
        _part("logits", "log-softmax (fp32)", full, source="padding_free_collator.py:16"),
    )
    if setup.sharding is not None:
        return at_loss
    # until the logits are there
    keys, last = activations.cached(shape, setup.kernels, batch)
    held = _part("activations", "keys and values of all layers", keys, source="dpo_utils.py:865")
    passing = max(_part("activations", "the last layer, passing", last), at_loss[0],
                  key=lambda part: part.gib)  # fmt: skip
    return max(at_loss, (held, passing), key=summed)


# --- engines ---------------------------------------------------------------------------------------


class _Engine:
    """What weights, gradients and the optimizer take; one subclass an engine."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.parameters = setup.shape.parameters
        self.trained = setup.trained
        self.ranks = setup.processes

    def part(self, kind: str, name: str, size: float, formula: str, source: str = "") -> Part:
        return Part(kind=kind, name=name, gib=size / GIB, formula=formula, source=source)

    def start(self) -> tuple[Part, ...]:
        """The engine's making."""
        raise NotImplementedError

    def flattened(self) -> tuple[Part, ...]:
        """While the weights are copied into one, before that, where the card has room for it."""
        return ()

    def resting(self) -> tuple[Part, ...]:
        """Between two steps, from the second on."""
        raise NotImplementedError

    def untrained(self) -> tuple[Part, ...]:
        """Before the first step."""
        raise NotImplementedError

    def accumulated(self) -> tuple[Part, ...]:
        """Gradients of earlier micro-batches."""
        return ()

    def cast(self, *, passing: bool = False) -> tuple[Part, ...]:
        """Weights in another type: kept for the backward pass, or (`passing`) while in the forward pass."""
        return ()

    def gathered(self, *, whole: bool, output: bool = True) -> tuple[Part, ...]:
        """Weights of other ranks that are here: at the loss (`whole`) or in a layer.

        Without `output` the output layer has been let go again.
        """
        return ()

    def gathered_embedding(self) -> tuple[Part, ...]:
        """The embedding, where it is only here for its backward pass."""
        return ()

    def buckets(self) -> tuple[Part, ...]:
        """Buffers of the backward pass."""
        return ()

    def sent(self, elements: int) -> tuple[Part, ...]:
        """Copies made to send one large gradient."""
        return ()

    def filling(self) -> tuple[Part, ...]:
        """Gradient memory at the backward pass' beginning."""
        return ()

    def filled(self) -> tuple[Part, ...]:
        """Gradient memory at its end."""
        return self.filling()

    def waiting(self) -> tuple[Part, ...]:
        """What earlier micro-batches left for a forward pass: their gradients, at least."""
        return self.accumulated()

    def begun(self) -> tuple[Part, ...]:
        """Gradients of all micro-batches when the first layers have been through the last backward pass."""
        return (*self.accumulated(), *self.filling())

    def ended(self) -> tuple[Part, ...]:
        """The same when the embedding's is made."""
        return (*self.accumulated(), *self.filled())

    def at_embedding(self) -> tuple[Part, ...]:
        """When the embedding's gradient is made, beside what rests."""
        sent = self.sent(self.setup.shape.embedding)
        return (
            *self.ended(), *self.buckets(), *self.gathered_embedding(),
            *_embedding_gradient(self.setup, sent),
        )  # fmt: skip

    def norm(self) -> tuple[Part, ...]:
        """While the gradients' norm is taken, beside what rests."""
        return ()

    def step(self) -> tuple[Part, ...]:
        """Beside what rests."""
        raise NotImplementedError

    def roots(self, elements: float, formula: str, width: float = FULL) -> Part:
        """What torch's Adam makes beside its states where it is not the fused one."""
        return self.part("optimizer", "square roots of a state", width * elements, formula,
                         "torch/optim/adam.py:790")  # fmt: skip

    @property
    def several(self) -> bool:
        return self.setup.accumulation > 1


class _Plain(_Engine):
    """No DeepSpeed: one process, or torch's DistributedDataParallel."""

    @property
    def states(self) -> float:
        told = self.setup.state_bytes
        own = self.setup.adapters.bytes if self.setup.adapters else self.setup.weight_bytes
        return 2 * own if told is None else told

    def weights(self) -> tuple[Part, ...]:
        width = self.setup.weight_bytes
        parts = [self.part("weights", "weights", width * self.parameters, f"{width}P")]
        if (quantised := self.setup.quantised) is not None:
            few = quantised.elements(self.setup.shape)
            parts = [
                self.part("weights", "linear weights (4 bits and their scales)", quantised.bytes * few,
                          f"{quantised.bytes:.3f} x {few:,}", "bitsandbytes/functional.py"),
                self.part("weights", "other weights", width * (self.parameters - few), f"{width} x the rest"),
            ]  # fmt: skip
        if self.setup.adapters:
            own = self.setup.adapters.bytes * self.trained
            parts.append(self.part("weights", "adapters", own, f"{self.setup.adapters.bytes}A"))
        if self.setup.reference == "model":
            size = width * self.parameters
            parts.append(self.part("weights", "reference model", size, f"{width}P"))
        return tuple(parts)

    def start(self) -> tuple[Part, ...]:
        return self.weights()

    def untrained(self) -> tuple[Part, ...]:
        return self.weights()

    def resting(self) -> tuple[Part, ...]:
        states = self.part("optimizer", "Adam's two states", self.states * self.trained,
                           f"{self.states:g} x trained parameters")  # fmt: skip
        buckets: tuple[Part, ...] = ()
        if self.ranks > 1:
            size = self.setup.gradient_bytes * self.trained
            why = "DistributedDataParallel's buckets: one copy of the gradients"
            buckets = (self.part("communication", "gradient buckets", size, why),)
        return (*self.weights(), states, *buckets)

    def gradients(self) -> Part:
        width = self.setup.gradient_bytes
        return self.part("gradients", "gradients", width * self.trained, f"{width} x trained")

    def accumulated(self) -> tuple[Part, ...]:
        return (self.gradients(),) if self.several else ()

    def cast(self, *, passing: bool = False) -> tuple[Part, ...]:
        setup = self.setup
        if not setup.autocast or setup.weight_bytes != FULL or setup.quantised is not None:
            return ()
        shape = self.setup.shape
        linear = shape.layers * sum(out * into for out, into in shape.linears().values())
        if self.setup.checkpointing and not passing:
            linear //= shape.layers
        why = "bf16 copies that autocast keeps: 2 x the layers' linear weights"
        return (self.part("weights", "autocast's copies", HALF * linear, why),)

    def filled(self) -> tuple[Part, ...]:
        return () if self.several else (self.gradients(),)

    def step(self) -> tuple[Part, ...]:
        if self.setup.fused_optimizer:
            return (self.gradients(),)
        half = self.states / 2
        return (self.gradients(), self.roots(self.trained, f"{half:g} x trained", half))


class _Partitioned(_Engine):
    """ZeRO-2: bf16 weights everywhere, gradients, fp32 weights and states cut into one part a rank."""

    def __init__(self, setup: Setup, zero: Zero) -> None:
        super().__init__(setup)
        self.zero = zero
        self.own = self.trained / self.ranks
        cut = [(self.own, self.own)] if setup.adapters else _cut(setup.shape.sizes, self.ranks)
        self.fullest = max(kept for kept, _ in cut)
        self.at_norm = max(cut, key=lambda one: HALF * one[0] + 8 * one[1])

    def weights(self) -> tuple[Part, ...]:
        parts = [self.part("weights", "weights (bf16)", HALF * self.parameters, "2P")]
        if self.setup.adapters:
            parts.append(self.part("weights", "adapters (bf16)", HALF * self.trained, "2A"))
        if self.setup.reference == "model":
            parts.append(self.part("weights", "reference model", HALF * self.parameters, "2P"))
        return tuple(parts)

    def master(self) -> tuple[Part, ...]:
        if self.zero.offload_optimizer:
            return ()
        return (self.part("optimizer", "weights (fp32)", FULL * self.own, "4P/N",
                          "deepspeed/runtime/zero/stage_1_and_2.py:472"),)  # fmt: skip

    def start(self) -> tuple[Part, ...]:
        made = 0 if self.zero.offload_optimizer else (FULL + FULL) * self.own
        why = "8P/N, fp32 weights and zeros"
        return (*self.weights(), self.part("optimizer", "being made", made, why))

    def flattened(self) -> tuple[Part, ...]:
        flat = self.part("weights", "the same, flat", HALF * self.trained, "2P",
                         "deepspeed/runtime/zero/stage_1_and_2.py:383")  # fmt: skip
        return (*self.weights(), flat)

    def untrained(self) -> tuple[Part, ...]:
        return (*self.weights(), *self.master())

    def resting(self) -> tuple[Part, ...]:
        if self.zero.offload_optimizer:
            buffer = HALF * (self.setup.shape.largest if not self.setup.adapters else self.trained)
            return (*self.weights(), self.part("communication", "buffer for offloaded gradients",
                                               buffer, "2 x the largest weight"))  # fmt: skip
        states = self.part("optimizer", "Adam's two states (fp32)", 2 * FULL * self.own, "8P/N",
                           "made in the first step")  # fmt: skip
        return (*self.weights(), *self.master(), states)

    def partition(self, name: str, elements: float | None = None) -> Part:
        size = self.fullest if elements is None else elements
        formula = f"2 x {size:,.0f}: P/N, and the rest of weights that the boundaries cut"
        return self.part("gradients", name, HALF * size, formula,
                         "deepspeed/runtime/zero/stage_1_and_2.py:1527")  # fmt: skip

    def norm(self) -> tuple[Part, ...]:
        if self.zero.offload_optimizer:
            return ()
        kept, largest = self.at_norm
        return (
            self.partition("gradients of this rank", kept),
            self.part("gradients", "one of them in fp64", 8 * largest, "8 x the largest",
                      "deepspeed/runtime/zero/stage_1_and_2.py:1933"),
        )  # fmt: skip

    def accumulated(self) -> tuple[Part, ...]:
        if not self.several or self.zero.offload_optimizer:
            return ()
        return (self.partition("gradients so far"),)

    def _bucket(self) -> Part:
        count = 2 if self.zero.overlap else 1
        return self.part("communication", "gradient buckets", HALF * count * self.zero.bucket,
                         f"{count} x 2 x {self.zero.bucket:,}")  # fmt: skip

    def buckets(self) -> tuple[Part, ...]:
        size, why = self._sending(min(self.zero.bucket, self.trained))
        return (self._bucket(), self.part("communication", "bucket being sent", size, why))

    def _sending(self, elements: float) -> tuple[float, str]:
        """One flat copy where several ranks' parts are in it, one more in the communication type."""
        flat = HALF * elements if self.ranks > 1 and elements == self.zero.bucket else 0
        wide = self.zero.communication * elements if self.zero.communication != HALF else 0
        return flat + wide, f"{self.zero.communication} x {elements:,.0f} to send"

    def sent(self, elements: int) -> tuple[Part, ...]:
        if self.zero.communication == HALF:
            return ()
        size = self.zero.communication * elements
        return (self.part("communication", "large gradient being sent", size,
                          f"{self.zero.communication}VH"),)  # fmt: skip

    def filling(self) -> tuple[Part, ...]:
        if self.zero.offload_optimizer:
            return ()
        return (self.partition("gradients of this rank"),)

    def step(self) -> tuple[Part, ...]:
        if self.zero.offload_optimizer:
            return ()
        where = "deepspeed/runtime/zero/stage_1_and_2.py:2171"
        return (
            self.partition("gradients of this rank"),
            self.part("gradients", "the same, flat", HALF * self.own, "2P/N", where),
            self.part("gradients", "the same, fp32", FULL * self.own, "4P/N", where),
        )


def _cut(sizes: Sequence[int], ranks: int) -> list[tuple[float, float]]:
    """Of each rank, all weights in a row cut evenly: elements of those it has a part of; the largest part.

    (deepspeed/runtime/zero/stage_1_and_2.py:1829)
    """
    own, start = -(-sum(sizes) // ranks), 0
    found = [(0.0, 0.0)] * ranks
    for size in sizes:
        end = start + size
        for rank in range(start // own, (end - 1) // own + 1):
            part = min(end, (rank + 1) * own) - max(start, rank * own)
            kept, largest = found[rank]
            found[rank] = (kept + size, max(largest, part))
        start = end
    return found


class _Whole(_Partitioned):
    """ZeRO-1: gradients are whole until all micro-batches' have been reduced, once
    (deepspeed/runtime/engine.py:2428).

    The last rank owns what the backward pass begins with and the first what it ends with: each moment
    is that of the rank that has most then.
    """

    def accumulated(self) -> tuple[Part, ...]:
        if not self.several:
            return ()
        return (self.part("gradients", "gradients so far", HALF * self.trained, "2P, not cut"),)

    def waiting(self) -> tuple[Part, ...]:
        # nothing lets them go before the reduction (deepspeed/runtime/zero/stage_1_and_2.py:788)
        return (*self.accumulated(), self._bucket()) if self.several else ()

    def begun(self) -> tuple[Part, ...]:
        if not self.several:
            return self.filling()
        shape, elements, why = self.setup.shape, self.trained, "2P"
        if not (self.setup.adapters or shape.tied):
            elements, why = elements - shape.embedding, "2(P - VH), the output layer's has gone"
        return (self.part("gradients", "gradients so far", HALF * elements, why), *self.filling())

    def ended(self) -> tuple[Part, ...]:
        """Those of other ranks stay to the end, unless they fitted into a bucket and live there."""
        shape, setup = self.setup.shape, self.setup
        large = 0 if setup.adapters else self.trained - shape.smaller_than(self.zero.bucket + 1)
        others = self.part(
            "gradients", "gradients of other ranks, reduced", HALF * max(0, large - self.fullest),
            "2 x weights larger than a bucket, less this rank's",
            "deepspeed/runtime/zero/stage_1_and_2.py:1601",
        )  # fmt: skip
        parts = [others, *self.filling()]
        if self.several and not setup.adapters:
            so_far = HALF * shape.embedding
            parts.append(self.part("gradients", "the embedding's so far", so_far, "2VH"))
        return tuple(parts)


class _Sharded(_Engine):
    """ZeRO-3: everything cut into one part a rank; weights are gathered where they are used."""

    def __init__(self, setup: Setup, zero: Zero) -> None:
        super().__init__(setup)
        self.zero = zero
        self.own = self.trained / self.ranks

    def weights(self) -> tuple[Part, ...]:
        shape, parts = self.setup.shape, []
        if not self.zero.offload_params:
            parts.append(self.part("weights", "weights (bf16), this rank's",
                                   HALF * self.parameters / self.ranks, "2P/N"))  # fmt: skip
        small = HALF * shape.smaller_than(self.zero.persistence)
        parts.append(self.part("weights", "small weights, whole", small,
                               f"2 x weights under {self.zero.persistence:,}"))  # fmt: skip
        if 1 < self.zero.secondary <= self.ranks:
            size = HALF * self.parameters / self.zero.secondary
            parts.append(self.part("weights", "second copy (ZeRO++)", size,
                                   f"2P/{self.zero.secondary}"))  # fmt: skip
        if self.setup.adapters:
            parts.append(self.part("weights", "adapters", HALF * self.trained, "2A"))
        if self.setup.reference == "model":
            size = HALF * self.parameters / self.ranks
            parts.append(self.part("weights", "reference model", size, "2P/N"))
        return tuple(parts)

    def flat(self) -> tuple[Part, ...]:
        if self.zero.offload_optimizer:
            return ()
        return (
            self.part("gradients", "gradients (bf16), this rank's", HALF * self.own, "2P/N"),
            self.part("optimizer", "weights (fp32)", FULL * self.own, "4P/N"),
        )

    def start(self) -> tuple[Part, ...]:
        # offloaded, the fp32 weights are made on the host
        made = 0 if self.zero.offload_optimizer else FULL * self.own
        return (*self.weights(), *self.flat(), self.part("optimizer", "being made", made, "4P/N"))

    def untrained(self) -> tuple[Part, ...]:
        gathered = self.gathered(whole=True)
        return (*self.weights(), *self.flat(), *gathered)

    def resting(self) -> tuple[Part, ...]:
        if self.zero.offload_optimizer:
            return self.weights()
        states = self.part("optimizer", "Adam's two states (fp32)", 2 * FULL * self.own, "8P/N")
        return (*self.weights(), *self.flat(), states)

    def gathered_embedding(self) -> tuple[Part, ...]:
        size = HALF * self.setup.shape.embedding
        return (self.part("weights", "gathered embedding", size, "2VH"),)

    def gathered(self, *, whole: bool, output: bool = True) -> tuple[Part, ...]:
        """A weight stays while it is used again within the reuse distance."""
        elements = self._live_at_loss() if whole else self._live_in_layer()
        if whole and not output:
            elements -= self.setup.shape.embedding
        return (self.part("weights", "gathered weights", HALF * elements,
                          f"2 x {elements:,.0f}"),)  # fmt: skip

    def _live_at_loss(self) -> float:
        """The output layer, and of the last layers those whose next use is near enough."""
        shape = self.setup.shape
        reach = min(self.zero.reuse, 2 * self.parameters)
        # from a layer's end to its backward pass lie twice what is after it, and the output layer
        left, live = reach - 2.0 * shape.embedding, float(shape.embedding)
        near = math.ceil(left / (2 * shape.layer_parameters))
        count = min(shape.layers, near)
        if count > 0:
            last = left - 2 * (count - 1) * shape.layer_parameters
            live += (count - 1) * shape.layer_parameters + min(last, shape.layer_parameters)
        # the embedding itself, which a tied model has counted
        return live if near < shape.layers or shape.tied else live + shape.embedding

    def _live_in_layer(self) -> float:
        shape = self.setup.shape
        if self.zero.reuse >= 2 * self.parameters:
            return float(self.parameters)
        widest = max(out * into for out, into in shape.linears().values())
        held = shape.layer_parameters if self.setup.checkpointing else widest
        return min(held + self.zero.prefetch, float(self.parameters))

    def buckets(self) -> tuple[Part, ...]:
        size = HALF * min(self.zero.bucket, self.parameters) * (2 if self.zero.overlap else 1)
        return (self.part("communication", "gradient bucket", size, f"2 x {self.zero.bucket:,}"),)

    def sent(self, elements: int) -> tuple[Part, ...]:
        """A gradient is made flat for all ranks, and before that turned into the communication type."""
        width = self.zero.communication
        size = width * elements + (width * elements if width != HALF else 0)
        return (self.part("communication", "large gradient being sent", size,
                          f"{size // max(1, elements)}VH"),)  # fmt: skip

    def step(self) -> tuple[Part, ...]:
        if self.zero.offload_optimizer:
            return ()
        group = min(self.own, self.zero.sub_group)
        wide = self.part("gradients", "fp32, one sub-group", FULL * group, f"4 x {group:,.0f}")
        if not self.setup.fused_optimizer:
            # by then the flat one has gone
            return (wide, self.roots(group, f"4 x {group:,.0f}"))
        flat = self.part("gradients", "flat, one sub-group", HALF * group, f"2 x {group:,.0f}")
        return (flat, wide)


class _Fsdp(_Engine):
    """FSDP2 with a group a layer: fp32 weights, gradients and states in parts, bf16 where they are used.

    The embedding is a group of its own, the output layer belongs to the root (olmo_core's
    `Transformer.apply_fsdp`, wrapping strategy `blocks`). Neither is given anything that has a gradient: both
    wait for the end of the backward pass (torch/distributed/fsdp/_fully_shard/_fsdp_state.py:
    `_root_post_backward_final_callback`).
    """

    def __init__(self, setup: Setup, sharding: Sharding) -> None:
        super().__init__(setup)
        self.shards = sharding.shards
        self.own = self.parameters / self.shards

    def weights(self) -> tuple[Part, ...]:
        return (
            self.part("weights", "weights (fp32), this rank's", FULL * self.own, "4P/N"), self.rope(),
        )  # fmt: skip

    def rope(self) -> Part:
        """Every layer has its own, for good: an empty cache is taken for none (olmo_core/nn/rope.py:388)."""
        setup, shape = self.setup, self.setup.shape
        width = max(setup.batch.width, (setup.reference_batch or setup.batch).width)
        size = shape.layers * 2 * FULL * width * shape.head_dim
        formula = f"{shape.layers} x 8 x {width:,} x {shape.head_dim}"
        return self.part("other", "rope: sines and cosines of each layer (fp32)", size, formula)

    def start(self) -> tuple[Part, ...]:
        return self.weights()

    def untrained(self) -> tuple[Part, ...]:
        return (*self.weights(), self.whole(self.setup.shape.embedding))

    def resting(self) -> tuple[Part, ...]:
        states = self.part("optimizer", "Adam's two states (fp32)", 2 * FULL * self.own, "8P/N")
        return (*self.weights(), states)

    def gradients(self) -> Part:
        return self.part("gradients", "gradients (fp32), this rank's", FULL * self.own, "4P/N")

    def accumulated(self) -> tuple[Part, ...]:
        return (self.gradients(),) if self.several else ()

    def gathered(self, *, whole: bool, output: bool = True) -> tuple[Part, ...]:
        """The output layer, for all of the backward pass, and the next layer ahead.

        A layer itself is let go before its gradients are reduced, which is its fullest point.
        """
        shape = self.setup.shape
        return (self.whole(shape.layer_parameters + shape.embedding),)

    def whole(self, elements: int) -> Part:
        return self.part("weights", "gathered weights (bf16)", HALF * elements, f"2 x {elements:,}")

    def buckets(self) -> tuple[Part, ...]:
        """A layer's gradients: bf16 as they are made, and fp32 for the reduction."""
        size = (HALF + FULL) * self.setup.shape.layer_parameters
        return (self.part("communication", "gradients being reduced", size, "6 x one layer"),)

    def at_embedding(self) -> tuple[Part, ...]:
        """At the end: the output layer's gradient and the embedding's, whole (bf16), are reduced in turn."""
        size = FULL * self.setup.shape.embedding
        return (
            self.gradients(),
            self.part("communication", "large gradient being reduced", size, "4VH"),
            self.part("gradients", "embedding's and output layer's gradients, whole",
                      size * (1 - 1 / self.shards), "4VH - 4VH/N"),
        )  # fmt: skip

    def filling(self) -> tuple[Part, ...]:
        return ()

    def norm(self) -> tuple[Part, ...]:
        return (self.gradients(),)

    def step(self) -> tuple[Part, ...]:
        if self.setup.fused_optimizer:
            return (self.gradients(),)
        return (self.gradients(), self.roots(self.own, "4P/N"))


def fits(memory: Memory, gib: float, *, margin: float = 0.08) -> tuple[bool, float]:
    """Whether a card of `gib` holds it, and GiB to spare (negative: missing).

    `margin` is the share of the card that allocated memory cannot use: CUDA's own context, NCCL's
    buffers, and what the allocator has reserved in pieces.
    """
    usable = gib * (1 - margin)
    peak = memory.within(usable).peak
    return peak <= usable, usable - peak


def _unknown(message: str) -> Finding:
    return Finding(
        severity="error", layer="launch", code="unknown-memory", message=message,
        help="memory cannot be planned for it; the steps and tokens can",
    )  # fmt: skip


def summed(parts: Sequence[Part]) -> float:
    """GiB of several parts."""
    return sum(part.gib for part in parts)
