"""What the probe recorded of one rank."""

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_events(probe: Path, name: str | None = None, rank: int = 0) -> list[Event]:
    """All events of a rank, or those of this name."""
    events = read_lines(probe / f"rank-{rank}.jsonl")
    return [event for event in events if name in (None, event["event"])]
