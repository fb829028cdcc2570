"""One command line, as every plan begins from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.runs.rundir import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One command line: which stage (None: as the file says), from which file, on what.

    `folder` is the run that is to go on, `runs` where a new one is made. `rehearse` is None where the file, or the
    command, decides. `borrowed` are variables of the environment whose values the overrides hold.
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
        """What `from_json` reads, but for the folder and the names of machines."""
        skipped = {"folder", "node_rank", "main_address", "fresh", "rehearse"}
        given = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in skipped}
        paths = {name: str(value.absolute()) for name, value in given.items() if isinstance(value, Path)}
        return given | paths | {name: list(given[name]) for name in ("overrides", "allowed", "borrowed")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, config: Path) -> Request:
        """The same request of a resolved stage file, whose overrides are in it."""
        given = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        given |= {k: Path(given[k]) for k in ("python", "checkout", "runs") if given.get(k)}
        borrowed = frozenset(given.get("borrowed", ()))
        return cls(**{**given, "config": config, "overrides": (), "borrowed": borrowed})
