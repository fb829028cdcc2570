"""What a training of gradient_ranks.py is like."""

from dataclasses import asdict, dataclass
from typing import Any

FAULTY_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training of a tiny model, whose gradients are wrong in step FAULTY_STEP where it has a
    `fault`.

    `sparse` checks steps 1, 2 and 4 of 5: the hooks are taken off and put on again. `unwatched`
    are ranks without a probe, for which the others wait `patience` seconds.
    """

    engine: str
    world: int = 2
    half: bool = True
    accumulation: int = 1
    clip: float = 0.0
    fault: str | None = None
    sparse: bool = False
    offload: bool = False
    tied: bool = False
    frozen: bool = False
    checkpointing: str = ""
    summed: str = ""
    wire: str = ""
    unwatched: tuple[int, ...] = ()
    patience: int = 0

    @property
    def is_zero(self) -> bool:
        return self.engine.startswith("zero")

    @property
    def is_real(self) -> bool:
        """Whether accelerate prepares the model: it starts the other engines on GPUs only."""
        return self.engine in ("one", "ddp")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "-".join(f"{name}={value}" for name, value in asdict(self).items() if value)
