"""What weights, gradients and the optimizer take: plain, DistributedDataParallel, and OLMo-core's FSDP."""

from __future__ import annotations

from collections.abc import Iterator

from launcher import passes
from launcher.activations import FULL, HALF
from launcher.moments import GIB, Part, summed
from launcher.setups import Setup, Sharding


class Engine:
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
        """Copies made to send one gradient that fits into no bucket."""
        return ()

    def sending(self) -> tuple[Part, ...]:
        """Copies made to send a full bucket."""
        return ()

    def sends(self) -> Iterator[tuple[str, int, tuple[Part, ...]]]:
        """Full buckets on their way: a name, layers that are through by then, all there is of gradients."""
        yield from ()

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
        sent = max(self.sent(self.setup.shape.embedding), self.sending(), key=summed)
        return (
            *self.ended(), *self.buckets(), *self.gathered_embedding(),
            *passes.embedding_gradient(self.setup, sent),
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


class Plain(Engine):
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


class Fsdp(Engine):
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
