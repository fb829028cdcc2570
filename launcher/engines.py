"""What weights, gradients and the optimizer take: one class an engine.

What DeepSpeed's stages keep follows "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(Rajbhandari et al., 2020), the temporary copies are read from DeepSpeed 0.18.9 and measured there: a
test runs its engine and counts every allocation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from launcher import passes
from launcher.moments import GIB, Part, summed
from launcher.setups import FULL, HALF, Setup, Sharding, Zero


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
            few = self.setup.shape.linear_elements
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
        linear = setup.shape.linear_elements
        if setup.checkpointing and not passing:
            linear //= setup.shape.layers
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


# --- DeepSpeed -------------------------------------------------------------------------------------


class Partitioned(Engine):
    """ZeRO-2: bf16 weights everywhere, gradients, fp32 weights and states cut into one part a rank."""

    def __init__(self, setup: Setup, zero: Zero) -> None:
        super().__init__(setup)
        self.zero = zero
        self.own = self.trained / self.ranks
        owned = [(self.own, self.own)] if setup.adapters else cut(setup.shape.sizes, self.ranks)
        self.fullest = max(kept for kept, _ in owned)
        self.at_norm = max(owned, key=lambda one: HALF * one[0] + 8 * one[1])

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
                          "deepspeed/runtime/zero/stage_1_and_2.py:560"),)  # fmt: skip

    def start(self) -> tuple[Part, ...]:
        made = 0 if self.zero.offload_optimizer else (FULL + FULL) * self.own
        why = "8P/N, fp32 weights and zeros"
        return (*self.weights(), self.part("optimizer", "being made", made, why))

    def flattened(self) -> tuple[Part, ...]:
        flat = self.part("weights", "the same, flat", HALF * self.trained, "2P",
                         "deepspeed/runtime/zero/stage_1_and_2.py:453")  # fmt: skip
        return (*self.weights(), flat)

    def untrained(self) -> tuple[Part, ...]:
        return (*self.weights(), *self.master())

    def resting(self) -> tuple[Part, ...]:
        if self.zero.offload_optimizer:
            buffer = HALF * (
                max(self.setup.shape.sizes) if not self.setup.adapters else self.trained
            )
            return (*self.weights(), self.part("communication", "buffer for offloaded gradients",
                                               buffer, "2 x the largest weight"))  # fmt: skip
        states = self.part("optimizer", "Adam's two states (fp32)", 2 * FULL * self.own, "8P/N",
                           "made in the first step")  # fmt: skip
        return (*self.weights(), *self.master(), states)

    def partition(self, name: str, elements: float | None = None) -> Part:
        size = self.fullest if elements is None else elements
        formula = f"2 x {size:,.0f}: P/N, and the rest of weights that the boundaries cut"
        return self.part("gradients", name, HALF * size, formula,
                         "deepspeed/runtime/zero/stage_1_and_2.py:2192")  # fmt: skip

    def norm(self) -> tuple[Part, ...]:
        if self.zero.offload_optimizer:
            return ()
        kept, largest = self.at_norm
        return (
            self.partition("gradients of this rank", kept),
            self.part("gradients", "one of them in fp64", 8 * largest, "8 x the largest",
                      "deepspeed/runtime/zero/stage_1_and_2.py:2684"),
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
        return (self._bucket(),)

    def sending(self) -> tuple[Part, ...]:
        """One flat copy where several ranks' parts are in it, one more in the communication type."""
        elements, width = min(self.zero.bucket, self.trained), self.zero.communication
        flat = HALF * elements if self.ranks > 1 and elements == self.zero.bucket else 0
        wide = width * elements if width != HALF else 0
        return (self.part("communication", "bucket being sent", flat + wide,
                          f"{width} x {elements:,.0f} to send"),)  # fmt: skip

    @property
    def early(self) -> bool:
        """Whether something is sent before the last layer is through."""
        large = not self.setup.shape.tied and self.setup.shape.embedding > self.zero.bucket
        return large or not _passed(self.setup, self.zero)

    def begun(self) -> tuple[Part, ...]:
        """Room for all of this rank's gradients is made when the first of them has been sent."""
        return (*self.accumulated(), *(self.filling() if self.early else ()))

    def sends(self) -> Iterator[tuple[str, int, tuple[Part, ...]]]:
        passed, held = _passed(self.setup, self.zero), (*self.begun(), *self.sending())
        yield "first bucket being sent", passed, held
        if not self.early:
            yield "second bucket being sent", 2 * passed, (*held, *self.filling())

    def sent(self, elements: int) -> tuple[Part, ...]:
        if self.zero.communication == HALF or elements <= self.zero.bucket:
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
        where = "deepspeed/runtime/zero/stage_1_and_2.py:3117"
        return (
            self.partition("gradients of this rank"),
            self.part("gradients", "the same, flat", HALF * self.own, "2P/N", where),
            self.part("gradients", "the same, fp32", FULL * self.own, "4P/N", where),
        )


def _passed(setup: Setup, zero: Zero) -> int:
    """Layers whose gradients fill the first bucket: the output layer's are before them, if not too large.

    Adapters fill none.
    """
    shape = setup.shape
    if setup.adapters:
        return shape.layers
    ahead = 0 if shape.tied or shape.embedding > zero.bucket else shape.embedding
    return min(shape.layers, (zero.bucket - ahead) // shape.layer_parameters)


def cut(sizes: Sequence[int], ranks: int) -> list[tuple[float, float]]:
    """Of each rank, all weights in a row cut evenly: elements of those it has a part of; the largest part.

    (deepspeed/runtime/zero/stage_1_and_2.py:2579)
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


class Whole(Partitioned):
    """ZeRO-1: gradients are whole until all micro-batches' have been reduced, once
    (deepspeed/runtime/engine.py:3089).

    The last rank owns what the backward pass begins with and the first what it ends with: each moment
    is that of the rank that has most then.
    """

    def accumulated(self) -> tuple[Part, ...]:
        if not self.several:
            return ()
        return (self.part("gradients", "gradients so far", HALF * self.trained, "2P, not cut"),)

    def waiting(self) -> tuple[Part, ...]:
        # nothing lets them go before the reduction (deepspeed/runtime/zero/stage_1_and_2.py:924)
        return (*self.accumulated(), self._bucket()) if self.several else ()

    def begun(self) -> tuple[Part, ...]:
        filling = self.filling() if self.early else ()
        if not self.several:
            return filling
        shape, elements, why = self.setup.shape, self.trained, "2P"
        if not (self.setup.adapters or shape.tied):
            elements, why = elements - shape.embedding, "2(P - VH), the output layer's has gone"
        return (self.part("gradients", "gradients so far", HALF * elements, why), *filling)

    def ended(self) -> tuple[Part, ...]:
        """Those of other ranks stay to the end, unless they fitted into a bucket and live there."""
        shape, setup = self.setup.shape, self.setup
        large = 0 if setup.adapters else self.trained - shape.smaller_than(self.zero.bucket + 1)
        others = self.part(
            "gradients", "gradients of other ranks, reduced", HALF * max(0, large - self.fullest),
            "2 x weights larger than a bucket, less this rank's",
            "deepspeed/runtime/zero/stage_1_and_2.py:2272",
        )  # fmt: skip
        parts = [others, *self.filling()]
        if self.several and not setup.adapters:
            so_far = HALF * shape.embedding
            parts.append(self.part("gradients", "the embedding's so far", so_far, "2VH"))
        return tuple(parts)


class Sharded(Engine):
    """ZeRO-3: everything cut into one part a rank; weights are gathered where they are used."""

    def __init__(self, setup: Setup, zero: Zero) -> None:
        super().__init__(setup)
        self.zero = zero
        self.own = self.trained / self.ranks

    @property
    def alone(self) -> bool:
        """Whether there is nothing to gather."""
        return self.ranks == 1 and not self.zero.offload_params

    def weights(self) -> tuple[Part, ...]:
        shape, parts = self.setup.shape, []
        if not self.zero.offload_params:
            parts.append(self.part("weights", "weights (bf16), this rank's",
                                   HALF * self.parameters / self.ranks, "2P/N"))  # fmt: skip
        small = HALF * shape.smaller_than(self.zero.persistence)
        parts.append(self.part("weights", "small weights, whole", small,
                               f"2 x weights under {self.zero.persistence:,}"))  # fmt: skip
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
        return (*self.weights(), *self.flat(), self._bucket(), *gathered)

    def resting(self) -> tuple[Part, ...]:
        if self.zero.offload_optimizer:
            return (*self.weights(), self._bucket())
        states = self.part("optimizer", "Adam's two states (fp32)", 2 * FULL * self.own, "8P/N")
        return (*self.weights(), *self.flat(), states, self._bucket())

    def _bucket(self) -> Part:
        """Made with the engine, for good, however small the model is."""
        width = self.zero.communication
        return self.part("communication", "gradient bucket", width * self.zero.bucket,
                         f"{width} x {self.zero.bucket:,}",
                         "deepspeed/runtime/zero/stage3.py:782")  # fmt: skip

    def gathered_embedding(self) -> tuple[Part, ...]:
        size = 0 if self.alone else HALF * self.setup.shape.embedding
        return (self.part("weights", "gathered embedding", size, "2VH"),) if size else ()

    def gathered(self, *, whole: bool, output: bool = True) -> tuple[Part, ...]:
        """A weight stays while it is used again within the reuse distance.

        A single rank takes its own as they are (deepspeed/runtime/zero/partition_parameters.py:2030).
        """
        if self.alone:
            return ()
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

    def sending(self) -> tuple[Part, ...]:
        """Each rank's parts of all gradients are put side by side."""
        elements, width = min(self.zero.bucket, self.trained), self.zero.communication
        return (self.part("communication", "bucket being sent", width * elements,
                          f"{width} x {elements:,.0f} to send"),)  # fmt: skip

    def sends(self) -> Iterator[tuple[str, int, tuple[Part, ...]]]:
        yield "first bucket being sent", _passed(self.setup, self.zero), self.sending()

    def sent(self, elements: int) -> tuple[Part, ...]:
        """In the communication type; once more where it has to be filled up to be cut evenly.

        (deepspeed/runtime/comm/coalesced_collectives.py:102)
        """
        width = self.zero.communication
        copies = int(width != HALF) + int(elements % self.ranks > 0)
        if not copies or elements <= self.zero.bucket:
            return ()
        return (self.part("communication", "large gradient being sent", copies * width * elements,
                          f"{copies * width}VH"),)  # fmt: skip

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
