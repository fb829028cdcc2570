"""One line of the probe's record -> its event, with the types that the probe writes (`probe/watching`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from launcher import files
from launcher.machine import codec
from launcher.machine.codec import LARGEST, Between, Count, Misfit, Omission, Positive

Text = str | None
Number = Annotated[float, Between(-LARGEST, LARGEST)] | None
Seconds = Annotated[float, Between(0, 10**12)] | None
Gib = Annotated[float, Between(0, 10**9)] | None
Loss = float | None  # one that is not finite is evidence


EVERY: Mapping[str, Any] = {
    "t": Seconds,
    "rank": Count,
    "step": Count,
    "state": Text,
    "reason": Text,
    "path": Text,
    "message": Text,
    "stopped": bool,
}
"""Fields that mean the same in each event."""

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "start": {"world": Positive, "attempt": Positive, "target": Text, "python": Text},
    "step": {
        **dict.fromkeys("positions rows tokens micro_batches".split(), Count | None),
        **dict.fromkeys("grad_norm learning_rate margin accuracy".split(), Number),
        **dict.fromkeys("seconds elapsed".split(), Seconds),
        **dict.fromkeys("allocated_gib reserved_gib".split(), Gib),
        "loss": Loss,
        "wasted": Number,
        "finite": bool,
        "interrupted": bool,
    },
    "end": {"exit": Annotated[int, Between(-255, 255)]},
    "error": {"type": Text},
    "model": {
        **dict.fromkeys("class model_type attention dtype".split(), Text),
        **dict.fromkeys("parameters trainable layers hidden heads head_dim embedding experts".split(), Count | None),
        "tied": bool | None,
    },
    "device": {"name": Text, "total_gib": Gib, "versions": Mapping[str, str]},
    "memory": {"phase": str},
    "liger": {"calls": Mapping[str, Count]},
    "liger_patch": {"function": Text, "kwargs": Mapping[str, bool | int | str]},
    "packing": {"detail": Text},
    "packing_isolation": {"loss": Loss, "changed_loss": Loss, "attention": Text, "samples": list[int]},
    "half_wasted": {"pairs": Count, "better": Count, "filled": Number},
    "gradients": {
        **dict.fromkeys("engine parameter".split(), Text),
        **dict.fromkeys(
            "checks skipped corrupt_checks first_step last_step parameters elements first_corrupt broken".split(),
            Count | None,
        ),
        **dict.fromkeys("largest_error allowed true_norm used_norm error".split(), Number),
    },
    "weights": {**dict.fromkeys("steps sampled moved tensors".split(), Count), "largest": Number},
    "nonfinite": {"what": Text, "value": Text},
    "violation": {"point": Text, "expected": Text, "seen": Text},
    "saved_model": {"files": list[Mapping[str, str | Count]]},
    "tracker": dict.fromkeys("tracker id project name".split(), Text),
    "evaluation": {"metrics": Mapping[str, Loss]},
    "reference_cache": {"first_loss": Loss, "expected_loss": Loss},
}
"""What each event holds beside that; what is not listed is nothing but shown."""

# without them a step says nothing, and is none that was seen
_DECISIVE = {"step": ("step", "loss", "finite")}


def read(raw: bytes, left_out: list[Omission] | None = None) -> dict[str, Any] | None:
    """The fields of one line, `event` its name; None where it is torn, no object, or lacks what it is about."""
    line = files.parse_line(raw)
    name = line.get("event")
    if not isinstance(name, str):
        if line:
            codec.note(left_out, "event", name, Misfit("a text"))
        return None
    readers = _readers(name)
    event: dict[str, Any] = {}
    for key, value in line.items():
        reader = readers.get(key)
        if reader is None:
            event[key] = value
            continue
        try:
            event[key] = reader(value, key, left_out)
        except Misfit as misfit:
            codec.note(left_out, key, value, misfit)
            if key in _DECISIVE.get(name, ()):
                return None
    return event


def read_all(path: Path) -> list[dict[str, Any]]:
    """The events of a rank; none where its record cannot be read."""
    try:
        with files.open_regular(path) as stream:
            found = map(read, files.lines(stream))
            return [event for event in found if event is not None]
    except OSError:
        return []


_READERS: dict[str, Mapping[str, codec.Reader]] = {}


def _readers(name: str) -> Mapping[str, codec.Reader]:
    known = name if name in FIELDS else ""
    if known not in _READERS:
        kinds = {**EVERY, **FIELDS.get(known, {})}
        _READERS[known] = {key: codec.reader(kind) for key, kind in kinds.items()}
    return _READERS[known]
