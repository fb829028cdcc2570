"""One command line, as every plan begins from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.runs.rundir import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One command line: which stage (None: as the file says), from which file, on what.

    `folder` is the run that is to go on, `runs` where a new one is made. `rehearse` is None where
    the file, or the command, decides. `borrowed` are variables of the environment whose values the
    overrides hold.
    """

    stage: str | None
    config: Path
    overrides: Sequence[str] = ()
    gpus: int | None = None
    nodes: int = 1
    python: Path | None = None
    checkout: Path | None = None
    allow_unpinned: bool = False
    allow_corrupting_overlap: bool = False
    rehearse: bool | None = None
    strict: bool = False
    probe: bool = True
    final_save: bool = True
    devices: str | None = None
    node_rank: int | None = None
    main_address: str | None = None
    folder: RunFolder | None = None
    runs: Path | None = None
    fresh: bool = False
    allowed: Sequence[str] = ()
    borrowed: frozenset[str] = frozenset()

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads: all but the folder and what only this start needs."""
        record: dict[str, Any] = {}
        for name, value in codec.as_json(self).items():
            if name in _OF_THIS_START:
                continue
            if isinstance(value, Path):
                value = str(value.absolute())
            elif isinstance(value, tuple | frozenset):
                value = list(value)
            record[name] = value
        return record

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, config: Path) -> Request:
        """The same request of a resolved stage file, which contains the overrides."""
        values = {**data, "config": config, "overrides": ()}
        for name in ("python", "checkout", "runs"):
            if values.get(name) is not None:
                values[name] = Path(values[name])
        values["borrowed"] = frozenset(values.get("borrowed", ()))
        return cls(**values)


_OF_THIS_START = ("folder", "node_rank", "main_address", "fresh", "rehearse")
