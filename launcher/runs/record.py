"""A JSON object that a run wrote -> `Record`: it may be torn, edited, or of another version of launch.

`Manifest` is the one of `run.json`: only here its keys are spelt.
"""

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


class _Field:
    """Where a field of the manifest lies."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys


class _Text(_Field):
    def __get__(self, manifest: Manifest, _owner: type[Manifest]) -> str | None:
        found = manifest.value(*self.keys)
        return found if isinstance(found, str) else None


class _Number(_Field):
    def __get__(self, manifest: Manifest, _owner: type[Manifest]) -> int | None:
        return manifest.number(*self.keys)


class _Items(_Field):
    def __get__(self, manifest: Manifest, _owner: type[Manifest]) -> list[Any]:
        return manifest.items_of(*self.keys)


class _Part(_Field):
    def __get__(self, manifest: Manifest, _owner: type[Manifest]) -> Record:
        return manifest.part(*self.keys)


class Manifest(Record):
    """`run.json`: everything that was decided before the start of an attempt."""

    created, stage, backend, cwd = _Text("created"), _Text("stage"), _Text("backend"), _Text("cwd")
    requested_output = _Text("asked_output")
    """The output folder that the stage file names, where that is not the one of the run."""
    attempt = _Number("attempt")
    plan, upstream, deepspeed = _Part("plan"), _Part("upstream"), _Part("deepspeed")
    gpus, nodes, steps = _Number("plan", "gpus"), _Number("plan", "nodes"), _Number("plan", "steps")
    global_batch, per_device = _Number("plan", "global"), _Number("plan", "per_device")
    accumulation = _Number("plan", "accumulation")
    args, argv, packages = _Part("args"), _Items("argv"), _Part("trainer", "packages")
    cards = _Items("machine", "gpus")
    contents, caches = _Items("contents"), _Items("caches")
    resumed_step, kept = _Number("resume", "step"), _Items("resume", "kept")

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
        return None if self.gpus is None else max(1, self.gpus) * (self.nodes or 1)

    @property
    def expected(self) -> Mapping[str, str | None] | None:
        """What `expect:` was at the start."""
        found = self.get("expect")
        return found if isinstance(found, dict) else None


def mapping(value: object) -> Mapping[str, Any]:
    """A mapping, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> Sequence[Any]:
    """A list, or an empty one."""
    return value if isinstance(value, list | tuple) else []
