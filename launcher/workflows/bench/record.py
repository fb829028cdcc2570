"""`bench.json`: what a comparison writes, and reads again when the same command continues it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.machine import codec
from launcher.machine.codec import Misfit
from launcher.redaction import Redactor
from launcher.runs import rundir
from launcher.workflows import experiment
from launcher.workflows.bench.comparison import Sample, VariantSummary
from launcher.workflows.bench.variants import Variant

BENCH_VERSION = 1
FILE = rundir.BENCH_RECORD


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What rows were compared by: the kind of loss, the tokens that every trial saw, and the tolerance as a share."""

    loss: str = ""
    tokens: float | None = None
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """One comparison as it stands on disk, and under `data` of `--format json`.

    A folder that was made a moment ago holds nothing but its `key`. `batch` is the rows of a step, of the largest
    variant.
    """

    bench_version: int = BENCH_VERSION
    key: str = ""
    config: str = ""
    overrides: tuple[str, ...] = ()
    gpus: int | None = None
    steps: int = 0
    repeats: int = 0
    batch: int | None = None
    variants: tuple[Variant, ...] = ()
    compared: Compared = Compared()
    complete: bool = False
    rows: tuple[VariantSummary, ...] = ()
    samples: tuple[Sample, ...] = ()
    folder: str = ""

    def as_json(self) -> dict[str, Any]:
        record = codec.as_json(self)
        record["overrides"] = list(self.overrides)
        record["variants"] = [asdict(variant) for variant in self.variants]
        record["compared"] = asdict(self.compared)
        record["rows"] = [row.as_json() for row in self.rows]
        record["samples"] = [sample.as_json() for sample in self.samples]
        return record

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchRecord:
        """What `as_json` wrote. Raises Misfit where a trial is damaged: then all are measured again. A damaged row is
        left out: rows follow from the trials."""
        record = codec.read(cls, {**data, "rows": [], "samples": []})
        samples = [Sample.from_json(sample) for sample in mappings(data.get("samples"))]
        rows = []
        for row in mappings(data.get("rows")):
            with contextlib.suppress(Misfit):
                rows.append(VariantSummary.from_json(row))
        return replace(record, rows=tuple(rows), samples=tuple(samples))

    def write(self, folder: Path, redactor: Redactor) -> None:
        """Raises NotReady where it cannot be written."""
        experiment.write(folder / FILE, self.as_json(), redactor)


def mappings(value: object) -> Sequence[Mapping[str, Any]]:
    """The objects of a list in a record; none where there is no list. Raises Misfit for a list of anything else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise Misfit("a list of objects")
    return value


def read(folder: Path) -> BenchRecord:
    """The record of a folder; an empty one where it is damaged."""
    try:
        return BenchRecord.from_json(rundir.read_json(folder / FILE))
    except Misfit:
        return BenchRecord()
