"""What differs between the trainers that launch can start: as data, and a few small functions.

A backend is a module that satisfies `Backend`. `register_trainer` and `register_script` add to
those below.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from launcher.config import keys
from launcher.upstream import open_instruct, trl
from launcher.upstream.entry import Checkpoints, Entry, Moved, Names, Release
from launcher.upstream.schema import Schema, Values

__all__ = ["BACKENDS", "Backend", "Entry", "Moved", "Names", "Release", "find_entry"]


class Backend(Protocol):
    """The questions that the rest of launch asks a trainer."""

    NAME: str
    PACKAGES: tuple[str, ...]
    """Top-level packages whose source holds the dataclasses."""
    CHECKOUT: bool
    """Whether it runs from a git checkout, of which `PIN` is a commit; else from installed
    packages.
    """
    PIN: str
    """The commit, or the version, that the committed snapshot was read from."""
    BASELINE: str
    """The commit, or the version, at which every rule is true that names no other in `reviewed`."""
    KNOWN: tuple[Release, ...]
    """The releases that have a snapshot, `PIN` first: each is judged and run as it is."""
    COMPUTED: Mapping[str, tuple[str, ...]]
    """Choices that its source computes: the expression as it stands there, or the dotted name of a
    type of another package that no snapshot holds, and its values.
    """
    TAKES_NONE: bool
    """Whether its parser reads the word `none`."""
    STAGES: dict[str, Entry]
    NEEDS: tuple[str, ...]
    """Distributions without which its scripts cannot be imported."""
    GPU_NEEDS: tuple[str, ...]
    """Those without which they crash where there is CUDA; our extra `gpu` installs them."""
    EXTRA: str
    """The extra of ours that installs `NEEDS`."""
    ENVIRON: Mapping[str, str]
    """Variables that its scripts are started with."""
    CHECKPOINTS: Checkpoints
    """The library whose layout its checkpoints have; see artifacts/checkpoints.py."""
    DATA_CACHE: Literal["own", "datasets"]
    """Whether tokenised data lie in a cache of its own, or in that of the library `datasets`."""
    MODEL_ARGUMENTS: tuple[str, ...]
    """Where a further stage is given the model of the one before: the model, and its tokenizer if
    apart.
    """
    SHORT_RUN: Mapping[str, Any]
    """Arguments of a run without consequences, where a script has them; None: left out."""
    REHEARSAL: Mapping[str, Any]
    """The same in a rehearsal, one process on a CPU for two steps."""
    ONE_GPU: bool
    """Whether it trains on the one GPU that is here, or the CPU, where nobody says how many."""

    def output_folder(self, values: Values) -> Path | None:
        """Where the final model will lie; None where the config names no place."""


BACKENDS: dict[str, Backend] = {"open_instruct": open_instruct, "trl": trl}


def register_trainer(backend: Backend) -> None:
    """Add a trainer; `backend: NAME` in a stage file chooses it."""
    BACKENDS[backend.NAME] = backend
    keys.TRAINERS.append(backend.NAME)


def register_script(backend: str, key: str, entry: Entry) -> None:
    """Add an entry script to a trainer; `script: KEY` in a stage file chooses it."""
    BACKENDS[backend].STAGES[key] = entry


def find_entry(schema: Schema) -> Entry:
    """The description of a schema's entry script, in the names of its commit."""
    backend = BACKENDS[schema.backend]
    entry = backend.STAGES[schema.key]
    if schema.script != entry.script:
        # a checkout in which it has the name that was announced
        entry = replace(entry, script=schema.script)
    is_pin = schema.tested and schema.version == backend.PIN
    return entry if is_pin else entry.at(schema.fields)
