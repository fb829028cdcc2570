"""Whether an output folder is a run's own, as far as this machine tells: other runs around it, files in it.

What the path alone tells is a rule of the stage file (`rules.places`). This belongs to a start, or to its dry run:
the same file can be right on one machine and wrong on another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.artifacts import layout
from launcher.errors import Finding, launch_finding
from launcher.machine.trees import is_within
from launcher.paths import canonical
from launcher.runs import inventory, lease, outputs, rundir
from launcher.runs.outputs import Neighbour
from launcher.runs.rundir import RunFolder

_LISTED = 1000  # names of an output folder that are looked at
_SHOWN = 3
# what says of the same files what is more to the point
_SAID = frozenset({"finished-output", "foreign-checkpoints", "not-resumed", "broken-checkpoint"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlace:
    """The output folder of a start, under the argument `key`; `run` is its run folder, `attempt` the next one."""

    output: Path
    run: RunFolder
    attempt: int
    key: str

    @property
    def goes_on(self) -> bool:
        """Whether an earlier attempt of this run has been here."""
        return self.attempt > 1 or bool(outputs.leases_of(self.output, self.run.path))

    def nested(self) -> Iterator[Finding]:
        """That it lies in a run folder, or inside or above the output of another run."""
        place = canonical(self.output)
        if place.is_relative_to(canonical(self.run.path)):
            return
        goes_on = self.goes_on
        message = None if goes_on else self._run_folder(place)
        if message is not None:
            yield self._refusal(message, self._help())
        for other in outputs.find_neighbours(self.output, self.run.path):
            if other.where == "here" or (goes_on and not other.live):
                continue
            if other.where == "above" and not other.live and _is_common(other.output):
                continue
            yield self._refusal(f"lies {_relation(other)}", self._help())
            return

    def _help(self) -> str:
        return f"give `{self.key}` a folder beside the other one, such as `{self.output.name}-2` next to it"

    def _refusal(self, reason: str, help: str) -> Finding:
        return launch_finding("error", "nested-output", f"{self.output} {reason}", help, key=f"args.{self.key}")

    def _run_folder(self, place: Path) -> str | None:
        """Which run folder it is, holds or lies in, in words."""
        own = canonical(self.run.path)
        for above in (place, *place.parents):
            if own.is_relative_to(above) and above != place:
                # the folder of a ladder or bench, whose run this is
                break
            if rundir.is_run(above) or rundir.is_campaign(above):
                return f"is the run folder {above}" if above == place else f"lies in the run folder {above}"
        for name in _names(place):
            if rundir.is_run(place / name):
                return f"holds the run folder {place / name}"
        return None

    def foreign(self, said: frozenset[str]) -> Iterator[Finding]:
        """That it holds files which no run of launch made; `said` are codes of what was found besides."""
        of_launch = {lease.FOLDER.parts[0], layout.PREVIOUS_CARD}
        names = [name for name in _names(self.output) if name not in of_launch]
        trained = [name for name in names if layout.is_file(name) or layout.is_folder(name)]
        known = set(trained) if said & _SAID else set()
        if self.goes_on or lease.newest_lease(self.output) is not None:
            known = set(trained) | self._recorded()
        foreign = [name for name in names if name not in known]
        if not foreign:
            return
        shown = ", ".join(foreign[:_SHOWN]) + (", ..." if len(foreign) > _SHOWN else "")
        count = "1 name" if len(foreign) == 1 else f"{len(foreign)} names"
        if len(names) >= _LISTED - 1:
            count = f"{len(foreign)} names or more"
        message = f"{self.output} holds {count} that launch did not make: {shown}"
        help = "training may write over them, and an upload of the folder would take them along: give "
        help += f"another `{self.key}`, or move them"
        yield launch_finding("warning", "foreign-files", message, help, key=f"args.{self.key}")

    def _recorded(self) -> set[str]:
        """The names that earlier attempts left, or adapters' folders among them."""
        names = set()
        for attempt in range(1, self.attempt):
            record = inventory.read_inventory(self.run, attempt)
            for path in record.written or () if record is not None else ():
                names.add(path.partition("/")[0])
        return names


def _relation(other: Neighbour) -> str:
    preposition = "in" if other.where == "above" else "above"
    verb = "trains into now" if other.live else "wrote"
    return f"{preposition} {other.output}, which the run {other.name} {verb}"


def _is_common(folder: Path) -> bool:
    """Whether a folder is one that nothing trains into any more, and everything lies in: an old run may have."""
    places = [Path(os.path.expanduser("~"))]
    with contextlib.suppress(OSError):
        places.append(Path.cwd())
    return any(is_within(canonical(place), folder) for place in places)


def _names(folder: Path) -> list[str]:
    names = []
    with contextlib.suppress(OSError), os.scandir(folder) as listing:
        for entry in listing:
            names.append(entry.name)
            if len(names) >= _LISTED:
                break
    return sorted(names)
