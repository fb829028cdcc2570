"""What runs left behind -> `Run`: their curves by step, the verdict, and what was decided before. A run of ours is
read from its folder, live or finished; a stranger's from its console log alone."""

import contextlib
import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.config.keys import PAIRED
from launcher.errors import unreadable, usage
from launcher.machine import codec
from launcher.paths import exists, is_file
from launcher.redaction import redact
from launcher.report import progress
from launcher.runs import attempt, rundir
from launcher.runs.record import PlanRecord, mapping
from launcher.runs.rundir import RunFolder
from launcher.verdict import check, judge
from launcher.verdict.evidence import Evidence, Row, finite
from launcher.verdict.judge import RunJudgement

REPORT_VERSION = 1  # of the JSON form; a change that a reader would notice counts it up

_RUN_FILES = ("run.json", "verdict.json", "metrics.jsonl", "console.log", "probe")  # any makes a folder a run's


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A table: one row a step, one column a quantity; None where a step does not have it. `nonfinite` are the steps
    whose loss, or whatever else the probe looks at, was NaN or infinite."""

    steps: tuple[int, ...] = ()
    columns: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    nonfinite: tuple[int, ...] = ()

    def as_json(self) -> dict[str, object]:
        columns = {name: list(values) for name, values in self.columns.items()}
        return {"steps": list(self.steps), "columns": columns, "nonfinite": list(self.nonfinite)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: `manifest` is run.json (empty for a log), `verdict` the JSON form, `ended` exit.json. `arguments` holds
    value and origin of every argument, `ranks` is how many processes the probe saw or missed, `tail` the last lines of
    the log, `tracker` the address of the run at W&B or the like, `samples` what samples.json holds. Secrets are taken
    out of all of it."""

    name: str
    path: Path
    manifest: Mapping[str, Any]
    verdict: Mapping[str, Any]
    series: Series
    ended: Mapping[str, Any]
    arguments: Mapping[str, Mapping[str, Any]]
    ranks: int | None = None
    tail: tuple[str, ...] = ()
    tracker: str | None = None
    samples: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stage(self) -> str | None:
        named = self.manifest.get("stage") or self.verdict.get("stage")
        return None if named is None else str(named)

    def as_json(self) -> dict[str, object]:
        return {
            "run": self.name,
            "path": str(self.path),
            "stage": self.stage,
            "verdict": self.verdict or None,
            "plan": mapping(self.manifest.get("plan")) or None,
            "measured": measured(self),
            "series": self.series.as_json(),
            "ended": self.ended or None,
            "samples": self.samples or None,
            "upstream": mapping(self.manifest.get("upstream")) or None,
            "args": {name: dict(entry) for name, entry in self.arguments.items()},
        }


def as_json(runs: Sequence[Run]) -> dict[str, object]:
    return {"report_version": REPORT_VERSION, "runs": [run.as_json() for run in runs]}


def gather(targets: Sequence[str]) -> list[Run]:
    """Runs by folder, name, unique beginning or `last`, and console logs, each called differently. The folder of a
    pipeline, bench, ladder or tune stands for its runs. Raises UsageError where one is not known, NotReady where a
    file cannot be read, InvalidConfig of a text that is no training log."""
    runs = []
    for target in targets:
        for path in [run.path for run in rundir.members(Path(target))] or [_path(target)]:
            try:
                runs.append(read(path))
            except OSError as error:
                raise unreadable(error.filename or path, error) from None
    return named_apart(runs)


def _path(target: str) -> Path:
    path = Path(target)
    if is_file(path) or any(exists(path / name) for name in _RUN_FILES):
        return path
    if (found := rundir.find(target)) is None:
        raise usage("no-such-run", f"there is no run or log `{target}`", "launch runs")
    return found.path


def read(path: Path) -> Run:
    """A log alone, or a run folder, judged as it stands now; where only results were kept, those. Raises OSError."""
    if is_file(path):
        return _read_log(path)
    judged = judge.judge(RunFolder(path))
    last = judged.attempts[-1]
    if last.log is not None or last.probe is not None:
        return of_judged(path, judged)
    rows = [row for row in files.read_lines(path / "metrics.jsonl") if finite(row.get("step")) is not None]
    rows.sort(key=lambda row: row["step"])
    return of_kept(path, judged.manifest, rundir.read_json(path / "verdict.json"), rows, last)


def _read_log(path: Path) -> Run:
    found = check.read_training_log(path)
    lines = found.log.argument_lines if found.log else {}
    arguments = {}
    for name, value in found.arguments.items():
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
        value = value[1:-1] if quoted else value
        arguments[name] = {"value": value, "origin": f"{path.name}:{lines.get(name)}"}
    return Run(
        name=path.name,
        path=path.absolute(),
        manifest={},
        verdict=redact(check.judge_alone(found).as_json()),
        series=of_rows(found.rows),
        ended={},
        arguments=redact(arguments),
        tail=progress.last_lines(path),
        tracker=progress.tracker(path),
    )


def of_judged(path: Path, judged: RunJudgement) -> Run:
    rows = judge.rows_of(judged.attempts)
    return of_kept(path, judged.manifest, judged.verdict.as_json(), rows, judged.attempts[-1])


def of_kept(path: Path, manifest: object, verdict: object, rows: Iterable[Row], last: Evidence | None = None) -> Run:
    """A run out of what was written about it, whatever it is by now, and its last attempt."""
    path = path.absolute()
    folder = RunFolder(path)
    ended = {} if last is None or last.exit is None else rundir.read_json(last.exit.path)
    redactor = attempt.redactor(folder)
    samples = rundir.read_json(folder.samples)
    records = {"manifest": mapping(manifest), "verdict": mapping(verdict), "ended": ended, "samples": samples}
    clean = redactor.redact(records)
    arguments = mapping(clean["manifest"].get("args"))
    console = folder.console(max(1, folder.attempts()))
    return Run(
        name=path.name,
        path=path,
        **clean,
        series=of_rows(rows),
        arguments={name: item for name, item in arguments.items() if isinstance(item, Mapping)},
        ranks=None if last is None or last.probe is None else last.probe.world,
        tail=progress.last_lines(console, redactor),
        tracker=progress.tracker(console, redactor),
    )


def of_rows(rows: Iterable[Row]) -> Series:
    kept = [row for row in rows if finite(row.get("step")) is not None]
    names = dict.fromkeys(name for row in kept for name in row if name not in ("step", "finite"))
    columns = {name: tuple(finite(row.get(name)) for row in kept) for name in names}
    for name, part, whole in (("tokens_per_second", "tokens", "seconds"), ("wasted_share", "wasted", "positions")):
        if part in columns and whole in columns:
            pairs = zip(columns[part], columns[whole], strict=True)
            columns.setdefault(name, tuple(a / b if a is not None and b else None for a, b in pairs))
    return Series(
        steps=tuple(int(row["step"]) for row in kept),
        columns={name: values for name, values in columns.items() if any_number(values)},
        nonfinite=tuple(int(row["step"]) for row in kept if row.get("finite") is False),
    )


def any_number(values: Iterable[float | None]) -> bool:
    return any(value is not None for value in values)


_MEASURED = (
    *("tokens_per_second", "logged_tokens_per_second", "mfu", "wasted_share"),
    *("first_loss", "last_loss", "min_loss", "rewards_margin", "rewards_accuracy"),
)


def measured(run: Run) -> dict[str, float | None]:
    """What the run turned out to be, under the plan's names; None where nobody measured it. Memory is the peak in GiB,
    `hours` the whole last attempt, loading and saving included, `wasted_share` and `mfu` are shares of 1;
    `logged_tokens_per_second` is upstream's own figure."""
    figures, means, hours = mapping(run.verdict.get("metrics")), dict[str, float](), None
    for name in ("tokens", "rows"):
        if kept := [value for value in run.series.columns.get(name, ()) if value is not None]:
            means[name] = math.fsum(kept) / len(kept)
    # in the rows of the data, as the plan counts: DPO's batches hold two sequences of each
    each = 2 if run.stage in PAIRED else 1
    with contextlib.suppress(KeyError, TypeError, ValueError):
        begun, ended = (datetime.datetime.fromisoformat(str(run.ended[key])) for key in ("started", "ended"))
        hours = (ended - begun).total_seconds() / 3600
    return {
        "processes": run.ranks,
        "rows_per_step": means["rows"] / each if "rows" in means else None,
        "steps": finite(run.verdict.get("steps")),
        "tokens_per_step": means.get("tokens"),
        "peak_gib": finite(figures.get("peak_allocated_gib")),
        "reserved_gib": finite(figures.get("peak_reserved_gib")),
        "hours": hours,
        **{name: finite(figures.get(name)) for name in _MEASURED},
    }


def planned(run: Run) -> dict[str, float | None]:
    """What was planned, under the names of `measured`; None where it is unknown."""
    plan = codec.read(PlanRecord, mapping(run.manifest.get("plan")))
    tokens, hours = finite(plan.tokens_per_step), finite(plan.hours)
    rate = finite(plan.tokens_per_second)
    if rate is None and plan.steps and tokens and hours:
        rate = plan.steps * tokens / (hours * 3600)
    return {
        "processes": None if plan.gpus is None else max(1, plan.gpus) * (plan.nodes or 1),
        "rows_per_step": plan.global_batch,
        "steps": plan.steps,
        "tokens_per_step": tokens,
        "tokens_per_second": rate,
        "peak_gib": finite((plan.memory_gib or {}).get("peak")),
        "hours": hours,
    }


def named_apart(runs: Sequence[Run]) -> list[Run]:
    names = [run.name for run in runs]
    apart: list[Run] = []
    for number, run in enumerate(runs, start=1):
        name = f"{run.path.parent.name}/{run.name}" if names.count(run.name) > 1 else run.name
        taken = {other.name for other in apart}
        apart.append(replace(run, name=f"{name} ({number})" if name in taken else name))
    return apart


def compact(series: Series) -> str:
    """The JSON form with no more digits than a curve can show: half of the bytes."""
    columns = ",".join(
        f"{json.dumps(name)}:[{','.join(['null' if v is None else f'{v:.7g}' for v in values])}]"
        for name, values in series.columns.items()
    )
    steps, bad = (",".join(map(str, numbers)) for numbers in (series.steps, series.nonfinite))
    return f'{{"steps":[{steps}],"columns":{{{columns}}},"nonfinite":[{bad}]}}'
