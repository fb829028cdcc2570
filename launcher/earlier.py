"""What the attempts of a run have left behind, for the next one: manifests, logs, where each began.

A checkpoint is compared with the settings it was saved under, not with those of the last attempt: that
one may have been started with others and saved nothing. So every attempt keeps its manifest, and with it
the names of the checkpoints that it found.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher import checkpoints, evidence, files, lease, measures, position, rundir
from launcher.checkpoints import Checkpoint
from launcher.evidence import Evidence, Probe, RankRecord
from launcher.paths import exists
from launcher.plan import Plan
from launcher.position import Place, Shape
from launcher.rundir import RunFolder

Manifest = Mapping[str, Any]

_LOOKED_AT = 64 * 2**20  # bytes of a log: training begins long before
_ROWS = re.compile(rb"\*{5} Running training \*{5}.{0,400}?Num examples = ([\d,]+)", re.DOTALL)
_REFERENCE = re.compile(rb"(?:Saving|Loading) reference logprobs cache (?:to|from) (\S[^\r\n]*)")


def keep_manifest(folder: RunFolder) -> None:
    """Copy the manifest of the last attempt to `run.N.json` before the next one writes its own."""
    told = rundir.read_manifest(folder)
    attempt = number(told.get("attempt"))
    if attempt is not None and not exists(kept := kept_manifest(folder, attempt)):
        # a full disk costs a comparison later, not this start
        with contextlib.suppress(OSError):
            rundir.write_json(kept, told)


def kept_manifest(folder: RunFolder, attempt: int) -> Path:
    """Where the manifest of an attempt is, once another has begun."""
    return folder.path / f"run.{attempt}.json"


def manifests(stage: str, folder: RunFolder | None, output: Path | None) -> list[Manifest]:
    """The manifests of the attempts of a stage so far, the oldest first, without those that cannot be read.

    They are in the run folder, and in the output folder too: there those of all starts into it, whichever
    run folder these had, and whatever has become of that.
    """
    kept: list[Manifest] = [one for one in lease.manifests(output) if one.get("stage") == stage]
    own: list[Manifest] = []
    if folder is not None:
        last = rundir.read_manifest(folder)
        before = range(1, number(last.get("attempt")) or 1)
        own = [*(rundir.read_json(kept_manifest(folder, n)) for n in before), last]
    return max([one for one in own if one], kept, key=len)


@dataclass(frozen=True, slots=True)
class Attempts:
    """The earlier attempts of a run: `manifests` are theirs, the oldest first; `folder` is None where it is
    gone, and `code` then the exit code of the last one, as far as the output folder tells."""

    plan: Plan
    folder: RunFolder | None
    manifests: Sequence[Manifest]
    code: int | None = None

    @property
    def last(self) -> Manifest:
        """The manifest of the last one, empty without any."""
        return self.manifests[-1] if self.manifests else {}

    def maker(self, one: Checkpoint) -> Manifest:
        """The manifest of the attempt that saved it: the last that did not find it there."""
        found = (
            told for told in reversed(self.manifests)
            if one.name not in listed(mapping(told.get("resume")).get("kept"))
        )  # fmt: skip
        return next(found, self.manifests[0] if self.manifests else {})

    def shape(self, told: Manifest | None = None) -> Shape | None:
        """How epochs are cut into steps, now or under an earlier manifest; None where rows are unknown.

        The log of an earlier attempt says how many rows were left after filtering.
        """
        rows = self.rows()
        if rows is None:
            return None
        names, plan = self.plan.stage.entry.names, self.plan
        per_device, count, accumulation = plan.per_device, plan.processes, plan.accumulation
        value: Callable[[str], Any] = plan.values.get
        if told is not None:
            before, value = mapping(told.get("plan")), partial(value_of, told)
            per_device = number(before.get("per_device")) or per_device
            count = processes(told) or 1
            accumulation = number(before.get("accumulation")) or accumulation
        shared, limit = value("sequence_parallel_size"), value(names.max_steps)
        epochs = value(names.epochs)
        return Shape(
            rows=rows, per_device=per_device, devices=max(1, count // max(1, int(shared or 1))),
            accumulation=accumulation, epochs=epochs if isinstance(epochs, int | float) else 1,
            limit=limit if isinstance(limit, int) and limit > 0 else None,
        )  # fmt: skip

    def rows(self) -> int | None:
        """Rows that are trained on."""
        logged = self._in_logs(_ROWS)
        return self.plan.rows if logged is None else int(logged.replace(b",", b""))

    def reference(self) -> Path | None:
        """The file of reference log-probabilities that was used last."""
        logged = self._in_logs(_REFERENCE)
        return None if logged is None else Path(os.fsdecode(logged))

    def _in_logs(self, pattern: re.Pattern[bytes]) -> bytes | None:
        """The newest match in the logs of the attempts, each looked at where training begins."""
        for attempt in range(self.folder.attempts() if self.folder else 0, 0, -1):
            assert self.folder is not None
            try:
                with files.open_regular(self.folder.console(attempt)) as file:
                    found = pattern.findall(file.read(_LOOKED_AT))
            except OSError:
                continue
            if found:
                return bytes(found[-1])
        return None

    def steps(self, one: Checkpoint) -> int:
        """Optimizer steps that a checkpoint has behind it."""
        if one.step is not None:
            return one.step
        shape = self.shape(self.maker(one) or None)
        return (one.number + 1) * (shape.updates if shape is not None else 1)

    def saved_at(self, one: Checkpoint, told: Manifest, was: Shape) -> Place:
        """Where in the data its attempt was: from where that began, by its own count of steps."""
        begun = mapping(told.get("resume"))
        at, step = listed(begun.get("place")), number(begun.get("step"))
        if len(at) == 2 and step is not None and step <= one.number:
            return position.advanced(was, Place(int(at[0]), int(at[1])), one.number - step)
        return position.advanced(was, Place(0, 0), one.number)

    def total(self, told: Manifest | None = None) -> int | None:
        """The last step, now or under an earlier manifest."""
        if self.plan.stage.options.backend == "open_instruct":
            shape = self.shape(told)
            return None if shape is None else shape.total
        return self.plan.steps if told is None else number(mapping(told.get("plan")).get("steps"))

    def finished(self, output: Path | None) -> bool:
        """Whether the last attempt ended well and its model lies in the output folder."""
        if value_of(self.last, "cache_dataset_only") is True:
            return False
        if checkpoints.model_fault(output) is not None:
            return False
        if self.folder is None:
            return self.code == 0
        ended = rundir.read_json(self.folder.exit(max(1, self.folder.attempts())))
        if number(ended.get("returncode")) is not None:
            return bool(ended["returncode"] == 0)
        # whoever had to write that record did not live to: the probe's last word
        with contextlib.suppress(OSError):
            probe = evidence.read_run(self.folder.path).probe
            records = probe.ranks.values() if probe is not None else ()
            ends = [event.number("exit") for one in records if (event := one.last("end"))]
            return bool(ends) and all(code == 0 for code in ends)
        return False


def read(folder: RunFolder) -> tuple[Evidence, ...]:
    """The evidence of every attempt, the last one last. Raises OSError like `read_run`."""
    before = (evidence.read_run(folder.path, attempt=n) for n in range(1, folder.attempts()))
    return *before, evidence.read_run(folder.path)


def rows_of(attempts: Sequence[Evidence]) -> list[measures.Row]:
    """Every optimizer step of a run once; see `measures.merged_rows`."""
    return measures.merged_rows(measures.metrics_rows(one) for one in attempts)


def whole(attempts: Sequence[Evidence]) -> Evidence:
    """The evidence of the last attempt, with the losses and gradient norms before it.

    Where that had no step left to train, with the steps of one before: it was resumed from the last step
    of all, and only saved the model.
    """
    found = _of_the_last(attempts)
    if len(attempts) < 2:
        return found
    own = measures.metrics_rows(found)
    kept = [row for row in rows_of(attempts[:-1]) if own and row["step"] < own[0]["step"]]
    losses, norms = (
        tuple(row[name] for row in kept if name in row) for name in ("loss", "grad_norm")
    )
    bad = tuple(int(row["step"]) for row in kept if row.get("finite") is False)
    moved = max((measures.moved_share(one) or 0.0 for one in attempts[:-1]), default=0.0)
    return replace(found, before=losses, norms_before=norms, bad_before=bad, moved_before=moved)


def _of_the_last(attempts: Sequence[Evidence]) -> Evidence:
    last = attempts[-1]
    probe = last.probe
    if probe is None or probe.last_step is not None or not last.events("resumed"):
        return last
    for one in reversed(attempts[:-1]):
        before = one.probe
        if before is not None and before.last_step is not None:
            both = {rank: _joined(before.ranks.get(rank), own) for rank, own in probe.ranks.items()}
            return replace(last, probe=Probe(ranks=both))
    return last


def _joined(before: RankRecord | None, last: RankRecord) -> RankRecord:
    # one file holds both, so the lines of the later one are the higher ones
    if before is None:
        return last
    return replace(last, events=(*before.events, *last.events), steps=before.steps)


# --- manifests, which may be torn or of another version ---------------------------------------------


def processes(told: Manifest) -> int | None:
    """Training processes of an attempt."""
    plan = mapping(told.get("plan"))
    gpus, nodes = number(plan.get("gpus")), number(plan.get("nodes"))
    return None if gpus is None else max(1, gpus) * (nodes or 1)


def begun_at(told: Manifest) -> int:
    """The step that an attempt went on from."""
    return number(mapping(told.get("resume")).get("step")) or 0


def recorded(told: Manifest, name: str) -> bool:
    """Whether a manifest holds a value of an argument."""
    return isinstance(mapping(told.get("args")).get(name), Mapping)


def value_of(told: Manifest, name: str) -> Any:
    """The value of an argument in a manifest; None where it holds none."""
    return mapping(mapping(told.get("args")).get(name)).get("value")


def number(value: object) -> int | None:
    """A whole number, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def mapping(value: object) -> Mapping[str, Any]:
    """A mapping, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> Sequence[Any]:
    """A list, or an empty one."""
    return value if isinstance(value, list | tuple) else []
