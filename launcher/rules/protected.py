"""The folders of this machine that no run may overwrite or delete, whatever it trains."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from launcher.artifacts import model_config
from launcher.artifacts.fingerprint import cache_home
from launcher.lazy_dataclass import dataclass
from launcher.machine.trees import ResolvedFolder
from launcher.paths import IS_CLONE, PACKAGE, PROJECT, exists
from launcher.runs import places


@dataclass(frozen=True, slots=True)
class Place:
    """A folder that is no output; `below`: nor is any folder in it."""

    folder: ResolvedFolder
    name: str
    below: bool = False


@dataclass(slots=True)
class ProtectedPlaces:
    """Looks at these folders once, for as many files as one command judges."""

    _by_source: dict[Path | None, tuple[Place, ...]] = field(default_factory=dict)

    def find(self, source: Path | None) -> tuple[Place, ...]:
        """The places of the machine, and those of a trainer's source."""
        if source not in self._by_source:
            found = list(_list_machine_places())
            if source is not None:
                found += _list_source_places(source)
            self._by_source[source] = tuple(found)
        return self._by_source[source]


def _list_machine_places() -> Iterator[Place]:
    """Those with `below` may hold no output folder, the others may."""
    try:
        yield _resolve_place(Path.cwd(), "the working folder")
    except OSError:
        return
    yield _resolve_place(Path(os.path.expanduser("~")), "the home folder")
    yield _resolve_place(Path(tempfile.gettempdir()), "the folder of temporary files")
    if IS_CLONE:
        yield _resolve_place(PROJECT, "launch's own folder")
        yield _resolve_place(PROJECT / ".git", "launch's own repository", below=True)
    yield _resolve_place(PACKAGE, "launch's own package", below=True)
    yield _resolve_place(places.find_runs_root(), "the folder of the runs")
    yield _resolve_place(places.find_state_folder(), "launch's list of runs", below=True)
    yield _resolve_place(cache_home(os.environ), "launch's cache", below=True)
    yield _resolve_place(model_config.find_hub_home(os.environ), "Hugging Face's cache")


def _list_source_places(source: Path) -> Iterator[Place]:
    """A checkout; what somebody who works in it puts below the working folder is their own."""
    checkout = ResolvedFolder.of(source)
    yield Place(checkout, "the folder of the trainer's source")
    if not exists(checkout.path / ".git"):
        yield Place(checkout, "the trainer's packages", below=True)
        return
    if not ResolvedFolder.of(Path.cwd()).is_within(checkout):
        yield Place(checkout, "the checkout", below=True)
    yield _resolve_place(source / ".git", "the checkout's repository", below=True)
    yield _resolve_place(source / "open_instruct", "the checkout's source", below=True)


def _resolve_place(path: Path, name: str, *, below: bool = False) -> Place:
    return Place(ResolvedFolder.of(path), name, below)
