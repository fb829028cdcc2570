"""The same under DeepSpeed's ZeRO stages: what each rank keeps, and the copies that reducing makes.

What the stages keep follows "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(Rajbhandari et al., 2020), the temporary copies are read from DeepSpeed 0.18.9 and measured there: a
test runs its engine and counts every allocation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from launcher.activations import FULL, HALF
from launcher.engines import Engine
from launcher.moments import Part
from launcher.setups import Setup, Zero


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
