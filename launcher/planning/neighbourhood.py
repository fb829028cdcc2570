"""Whether an output folder is a run's own, as far as this machine tells: other runs around it,
files in it.

What the path alone tells is a rule of the stage file (`rules.places`). This belongs to a start, or
to its dry run: the same file can be right on one machine and wrong on another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from launcher import files
from launcher.artifacts import layout
from launcher.errors import Finding, launch_finding
from launcher.lazy_dataclass import dataclass
from launcher.machine.trees import ResolvedFolder
from launcher.paths import resolve_path
from launcher.runs import inventory, lease, outputs, rundir
from launcher.runs.rundir import RunFolder

_LISTED = 1000  # names of an output folder that are looked at
_SHOWN = 3
# findings that say something more specific about the same files
_MORE_SPECIFIC = frozenset(
    {"finished-output", "foreign-checkpoints", "not-resumed", "broken-checkpoint"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlace:
    """The output folder of a start, under the argument `key`; `run` is its run folder, `attempt`
    the next one.
    """

    output: Path
    run: RunFolder
    attempt: int
    key: str

    @property
    def is_used(self) -> bool:
        """Whether an earlier attempt of this run has been here."""
        return self.attempt > 1 or bool(outputs.list_leases_of_run(self.output, self.run.path))

    def nested(self) -> Iterator[Finding]:
        """An error if it lies in a run folder, or inside or above the output of another run."""
        place = resolve_path(self.output)
        if place.is_relative_to(resolve_path(self.run.path)):
            return
        is_used = self.is_used
        if not is_used:
            relation = self._describe_run_folder(place)
            if relation is not None:
                yield self._report_nested_output(relation)
        for other in outputs.find_neighbours(self.output, self.run.path):
            if other.where == "here" or (is_used and not other.live):
                continue
            if other.where == "above" and not other.live and _is_common(other.output):
                continue
            preposition = "in" if other.where == "above" else "above"
            verb = "trains into now" if other.live else "wrote"
            relation = f"lies {preposition} {other.output}, which the run {other.name} {verb}"
            yield self._report_nested_output(relation)
            return

    def _report_nested_output(self, relation: str) -> Finding:
        message = f"{self.output} {relation}"
        help = f"give `{self.key}` a folder beside the other one, such as `{self.output.name}-2` "
        key = f"args.{self.key}"
        return launch_finding("error", "nested-output", message, f"{help}next to it", key=key)

    def _describe_run_folder(self, place: Path) -> str | None:
        """Which run folder it is, holds or lies in, in words."""
        own = resolve_path(self.run.path)
        for above in (place, *place.parents):
            if own.is_relative_to(above) and above != place:
                # the folder of a ladder or bench, which this run belongs to
                break
            if rundir.is_run(above) or rundir.is_campaign(above):
                if above == place:
                    return f"is the run folder {above}"
                return f"lies in the run folder {above}"
        for name in _list_names(place):
            if rundir.is_run(place / name):
                return f"holds the run folder {place / name}"
        return None

    def foreign(self, codes: frozenset[str]) -> Iterator[Finding]:
        """A warning about files that no run made; `codes` are those of other findings."""
        own = self._collect_own_names(codes)
        foreign = [name for name in _list_names(self.output) if name not in own]
        if not foreign:
            return
        shown = ", ".join(foreign[:_SHOWN])
        if len(foreign) > _SHOWN:
            shown += ", ..."
        count = "1 name" if len(foreign) == 1 else f"{len(foreign)} names"
        message = f"{self.output} holds {count} that launch did not make: {shown}"
        help = "training may write over them, and an upload of the folder would take them along: "
        help += f"give another `{self.key}`, or move them"
        yield launch_finding("warning", "foreign-files", message, help, key=f"args.{self.key}")

    def _collect_own_names(self, codes: frozenset[str]) -> set[str]:
        """Names that launch made, a trainer uses, or that earlier attempts left."""
        names = {lease.FOLDER.parts[0], layout.PREVIOUS_CARD}
        was_trained = self.is_used or lease.find_newest_lease(self.output) is not None
        if was_trained or codes & _MORE_SPECIFIC:
            for name in _list_names(self.output):
                if layout.is_file(name) or layout.is_folder(name):
                    names.add(name)
        for attempt in range(1, self.attempt):
            record = inventory.read_inventory(self.run, attempt)
            if record is None:
                continue
            for path in record.written or ():
                first, _, _ = path.partition("/")
                names.add(first)
        return names


def _is_common(folder: Path) -> bool:
    """Whether everything lies in a folder, such as the home, that an old run trained into."""
    places = [Path(os.path.expanduser("~"))]
    with contextlib.suppress(OSError):
        places.append(Path.cwd())
    common = ResolvedFolder.of(folder)
    return any(ResolvedFolder.of(place).is_within(common) for place in places)


def _list_names(folder: Path) -> list[str]:
    return files.list_names(folder)[:_LISTED]
