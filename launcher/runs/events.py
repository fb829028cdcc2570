"""The events that the probe writes (`probe/watching`), one JSON line each, with their types."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from launcher import files
from launcher.machine import codec
from launcher.machine.codec import LARGEST, Between, Count, Misfit, Omission, Positive

Text = str | None
Number = Annotated[float, Between(-LARGEST, LARGEST)] | None
Seconds = Annotated[float, Between(0, 10**12)] | None
Gib = Annotated[float, Between(0, 10**9)] | None
Loss = float | None  # a loss that is not finite is evidence

COMMON: Mapping[str, Any] = {
    "t": Seconds,
    "rank": Count,
    "step": Count,
    "state": Text,
    "reason": Text,
    "path": Text,
    "message": Text,
    "stopped": bool,
}
"""Fields that mean the same in every event."""

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
        **dict.fromkeys(
            "parameters trainable layers hidden heads head_dim embedding experts".split(),
            Count | None,
        ),
        "tied": bool | None,
    },
    "device": {"name": Text, "total_gib": Gib, "versions": Mapping[str, str]},
    "memory": {"phase": str},
    "liger": {"calls": Mapping[str, Count]},
    "liger_patch": {"function": Text, "kwargs": Mapping[str, bool | int | str]},
    "packing": {"detail": Text},
    "packing_isolation": {
        "loss": Loss,
        "changed_loss": Loss,
        "attention": Text,
        "samples": list[int],
    },
    "half_wasted": {"pairs": Count, "better": Count, "filled": Number},
    "gradients": {
        **dict.fromkeys("engine parameter".split(), Text),
        **dict.fromkeys("checks skipped corrupt_checks broken first_corrupt".split(), Count | None),
        **dict.fromkeys("first_step last_step parameters elements".split(), Count | None),
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
"""Further fields by event. A field that is not listed is only displayed."""

# without these the event is dropped
_REQUIRED = {"step": ("step", "loss", "finite")}


def parse_event(raw: bytes, left_out: list[Omission] | None = None) -> dict[str, Any] | None:
    """The fields of one line, `event` is its name; None if it is torn or lacks a required field."""
    line = files.parse_line(raw)
    name = line.get("event")
    if not isinstance(name, str):
        if line:
            codec.note_omission(left_out, "event", name, Misfit("a text"))
        return None
    readers = _build_readers(name)
    event: dict[str, Any] = {}
    for key, value in line.items():
        if key not in readers:
            event[key] = value
            continue
        try:
            event[key] = readers[key](value, key, left_out)
        except Misfit as misfit:
            codec.note_omission(left_out, key, value, misfit)
            if key in _REQUIRED.get(name, ()):
                return None
    return event


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of one rank's record; none if it cannot be read."""
    events = []
    try:
        with files.open_regular(path) as stream:
            for line in files.read_raw_lines(stream):
                event = parse_event(line)
                if event is not None:
                    events.append(event)
    except OSError:
        return []
    return events


@lru_cache(maxsize=64)
def _build_readers(name: str) -> Mapping[str, codec.Reader]:
    kinds = {**COMMON, **FIELDS.get(name, {})}
    return {key: codec.make_reader(kind) for key, kind in kinds.items()}
