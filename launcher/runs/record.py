"""A JSON object that a run wrote -> `Record`: it may be torn, edited, or of another version of launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Record(dict[str, Any]):
    """What is not there, or of another type, reads as None or as empty."""

    def value(self, *keys: str) -> Any:
        """What lies under these keys, each inside the one before."""
        found: Any = self
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def part(self, *keys: str) -> Record:
        """An object inside."""
        found = self.value(*keys)
        return Record(found) if isinstance(found, dict) else Record()

    def items_of(self, *keys: str) -> list[Any]:
        """A list inside."""
        found = self.value(*keys)
        return found if isinstance(found, list) else []

    def number(self, *keys: str) -> int | None:
        """A whole number."""
        found = self.value(*keys)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    # of a manifest

    def argument(self, name: str) -> Any:
        """The value of a training argument."""
        return self.value("args", name, "value")

    @property
    def output(self) -> Path | None:
        """The folder that the model goes to."""
        found = self.get("output")
        return Path(found) if isinstance(found, str) else None

    @property
    def processes(self) -> int | None:
        """Training processes, over all machines."""
        gpus = self.number("plan", "gpus")
        return None if gpus is None else max(1, gpus) * (self.number("plan", "nodes") or 1)


def mapping(value: object) -> Mapping[str, Any]:
    """A mapping, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> Sequence[Any]:
    """A list, or an empty one."""
    return value if isinstance(value, list | tuple) else []
