"""What a run left, as a `Run`: its curves by step, its verdict, and what was decided before it.

A run of launch is read from its folder, live or finished; any other training from its log alone.
"""

import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.config.keys import PAIRED
from launcher.errors import unreadable, usage
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.paths import exists, is_file
from launcher.redaction import redact
from launcher.report import progress
from launcher.runs import attempt, rundir
from launcher.runs.record import PlanRecord, as_mapping
from launcher.runs.rundir import RunFolder
from launcher.verdict import check, judge
from launcher.verdict.evidence import Evidence, Row, keep_finite
from launcher.verdict.judge import RunJudgement

REPORT_VERSION = 1
"""Version of the JSON form; it rises with each change that a reader would notice."""

_RUN_FILES = ("run.json", "verdict.json", "metrics.jsonl", "console.log", "probe")
"""A folder with any of these is a run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A table with a row a step and a column a quantity; None where a step does not have it.

    `nonfinite` are the steps whose loss, or whatever else the probe watches, was NaN or infinite.
    """

    steps: tuple[int, ...] = ()
    columns: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    nonfinite: tuple[int, ...] = ()

    def as_json(self) -> dict[str, object]:
        columns = {name: list(values) for name, values in self.columns.items()}
        return {"steps": list(self.steps), "columns": columns, "nonfinite": list(self.nonfinite)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, without secrets.

    `manifest` is run.json (empty for a log), `verdict` the JSON form, `ended` exit.json, `samples`
    samples.json. `arguments` holds value and origin of every argument. `ranks` counts the processes
    that the probe saw or missed. `tail` are the last lines of the log, `tracker` is the address of
    the run at W&B or the like.
    """

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
        stage = self.manifest.get("stage") or self.verdict.get("stage")
        return None if stage is None else str(stage)

    def as_json(self) -> dict[str, object]:
        return {
            "run": self.name,
            "path": str(self.path),
            "stage": self.stage,
            "verdict": self.verdict or None,
            "plan": as_mapping(self.manifest.get("plan")) or None,
            "measured": list_measured_figures(self),
            "series": self.series.as_json(),
            "ended": self.ended or None,
            "samples": self.samples or None,
            "upstream": as_mapping(self.manifest.get("upstream")) or None,
            "args": {name: dict(entry) for name, entry in self.arguments.items()},
        }


def as_json(runs: Sequence[Run]) -> dict[str, object]:
    return {"report_version": REPORT_VERSION, "runs": [run.as_json() for run in runs]}


def load_runs(targets: Sequence[str]) -> list[Run]:
    """Runs by folder, name, unique beginning or `last`, and logs, each under a name of its own.

    The folder of a pipeline, bench, ladder or tune stands for its runs. Raises UsageError if a
    target is unknown, NotReady if a file cannot be read, InvalidConfig if it is no training log.
    """
    paths: list[Path] = []
    for target in targets:
        members = rundir.list_campaign_runs(Path(target))
        if members:
            paths += [member.path for member in members]
        else:
            paths.append(_resolve_target(target))
    runs = []
    for path in paths:
        try:
            runs.append(load_run(path))
        except OSError as error:
            raise unreadable(error.filename or path, error) from None
    return rename_duplicates(runs)


def _resolve_target(target: str) -> Path:
    path = Path(target)
    if is_file(path) or any(exists(path / name) for name in _RUN_FILES):
        return path
    folder = rundir.find_run(target)
    if folder is None:
        raise usage("no-such-run", f"there is no run or log `{target}`", "launch runs")
    return folder.path


def load_run(path: Path) -> Run:
    """A log or a run folder, judged as it stands now; the kept results where no more is left.

    Raises OSError.
    """
    if is_file(path):
        return _load_log(path)
    judgement = judge.judge_run(RunFolder(path))
    last = judgement.attempts[-1]
    if last.log is not None or last.probe is not None:
        return run_from_judgement(path, judgement)
    rows = []
    for row in files.read_lines(path / "metrics.jsonl"):
        if keep_finite(row.get("step")) is not None:
            rows.append(row)
    rows.sort(key=lambda row: row["step"])
    verdict = rundir.read_json(path / "verdict.json")
    return run_from_records(path, judgement.manifest, verdict, rows, last)


def _load_log(path: Path) -> Run:
    training = check.read_training_log(path)
    lines: Mapping[str, int] = {}
    if training.log is not None:
        lines = training.log.argument_lines
    arguments = {}
    for name, value in training.arguments.items():
        origin = f"{path.name}:{lines.get(name)}"
        arguments[name] = {"value": _unquote(value), "origin": origin}
    return Run(
        name=path.name,
        path=path.absolute(),
        manifest={},
        verdict=redact(check.judge_log_evidence(training).as_json()),
        series=make_series(training.rows),
        ended={},
        arguments=redact(arguments),
        tail=progress.read_last_lines(path),
        tracker=progress.find_tracker(path),
    )


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def run_from_judgement(path: Path, judgement: RunJudgement) -> Run:
    rows = judge.merge_rows(judgement.attempts)
    verdict = judgement.verdict.as_json()
    return run_from_records(path, judgement.manifest, verdict, rows, judgement.attempts[-1])


def run_from_records(
    path: Path, manifest: object, verdict: object, rows: Iterable[Row], last: Evidence
) -> Run:
    """A run from what was recorded of it, and the evidence of its last attempt."""
    path = path.absolute()
    folder = RunFolder(path)
    ended: Mapping[str, Any] = {}
    if last.exit is not None:
        ended = rundir.read_json(last.exit.path)
    ranks = None
    if last.probe is not None:
        ranks = last.probe.world
    redactor = attempt.find_redactor(folder)
    records: dict[str, Mapping[str, Any]] = {
        "manifest": as_mapping(manifest),
        "verdict": as_mapping(verdict),
        "ended": ended,
        "samples": rundir.read_json(folder.samples),
    }
    clean = redactor.redact(records)
    arguments = {}
    for name, argument in as_mapping(clean["manifest"].get("args")).items():
        if isinstance(argument, Mapping):
            arguments[name] = argument
    console = folder.console(max(1, folder.attempts()))
    return Run(
        name=path.name,
        path=path,
        manifest=clean["manifest"],
        verdict=clean["verdict"],
        series=make_series(rows),
        ended=clean["ended"],
        arguments=arguments,
        ranks=ranks,
        tail=progress.read_last_lines(console, redactor),
        tracker=progress.find_tracker(console, redactor),
        samples=clean["samples"],
    )


def make_series(rows: Iterable[Row]) -> Series:
    """The curves of some steps; speed and wasted share follow from other columns."""
    steps: list[int] = []
    nonfinite: list[int] = []
    table: list[Row] = []
    names: dict[str, None] = {}
    for row in rows:
        if keep_finite(row.get("step")) is None:
            continue
        table.append(row)
        step = int(row["step"])
        steps.append(step)
        if row.get("finite") is False:
            nonfinite.append(step)
        names.update(dict.fromkeys(row))
    columns: dict[str, tuple[float | None, ...]] = {}
    for name in names:
        if name not in ("step", "finite"):
            columns[name] = tuple(keep_finite(row.get(name)) for row in table)
    _add_ratio(columns, "tokens_per_second", "tokens", "seconds")
    _add_ratio(columns, "wasted_share", "wasted", "positions")
    return Series(
        steps=tuple(steps),
        columns={name: values for name, values in columns.items() if has_number(values)},
        nonfinite=tuple(nonfinite),
    )


def _add_ratio(
    columns: dict[str, tuple[float | None, ...]], name: str, numerator: str, denominator: str
) -> None:
    if name in columns or numerator not in columns or denominator not in columns:
        return
    ratios: list[float | None] = []
    for over, under in zip(columns[numerator], columns[denominator], strict=True):
        if over is None or not under:
            ratios.append(None)
        else:
            ratios.append(over / under)
    columns[name] = tuple(ratios)


def has_number(values: Iterable[float | None]) -> bool:
    return any(value is not None for value in values)


_METRICS = (
    "tokens_per_second",
    "logged_tokens_per_second",
    "mfu",
    "wasted_share",
    "first_loss",
    "last_loss",
    "min_loss",
    "rewards_margin",
    "rewards_accuracy",
)


def list_measured_figures(run: Run) -> dict[str, float | None]:
    """What was measured of a run, under the plan's names; None where nothing was.

    Memory is the peak in GiB. `hours` is the whole last attempt, loading and saving included.
    `wasted_share` and `mfu` are shares of 1; `logged_tokens_per_second` is upstream's own figure.
    """
    rows_per_step = _compute_mean(run.series.columns.get("rows", ()))
    if rows_per_step is not None and run.stage in PAIRED:
        # the plan counts rows of the data; a batch of DPO holds two sequences of each
        rows_per_step /= 2
    metrics = as_mapping(run.verdict.get("metrics"))
    figures = {
        "processes": run.ranks,
        "rows_per_step": rows_per_step,
        "steps": keep_finite(run.verdict.get("steps")),
        "tokens_per_step": _compute_mean(run.series.columns.get("tokens", ())),
        "peak_gib": keep_finite(metrics.get("peak_allocated_gib")),
        "reserved_gib": keep_finite(metrics.get("peak_reserved_gib")),
        "hours": _compute_hours(run.ended),
    }
    for name in _METRICS:
        figures[name] = keep_finite(metrics.get(name))
    return figures


def _compute_mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    return math.fsum(numbers) / len(numbers)


def _compute_hours(ended: Mapping[str, Any]) -> float | None:
    try:
        start = datetime.datetime.fromisoformat(str(ended["started"]))
        end = datetime.datetime.fromisoformat(str(ended["ended"]))
        return (end - start).total_seconds() / 3600
    except (KeyError, TypeError, ValueError):
        return None


def list_planned_figures(run: Run) -> dict[str, float | None]:
    """What was planned, under the names of `list_measured_figures`; None where it is unknown."""
    plan = codec.read_record(PlanRecord, as_mapping(run.manifest.get("plan")))
    tokens_per_step = keep_finite(plan.tokens_per_step)
    tokens_per_second = keep_finite(plan.tokens_per_second)
    hours = keep_finite(plan.hours)
    if tokens_per_second is None and plan.steps and tokens_per_step and hours:
        tokens_per_second = plan.steps * tokens_per_step / (hours * 3600)
    processes = None
    if plan.gpus is not None:
        processes = max(1, plan.gpus) * (plan.nodes or 1)
    memory = plan.memory_gib or {}
    return {
        "processes": processes,
        "rows_per_step": plan.global_batch,
        "steps": plan.steps,
        "tokens_per_step": tokens_per_step,
        "tokens_per_second": tokens_per_second,
        "peak_gib": keep_finite(memory.get("peak")),
        "hours": hours,
    }


def rename_duplicates(runs: Sequence[Run]) -> list[Run]:
    """The runs, each under a name of its own: with its parent folder, else with a number."""
    names = [run.name for run in runs]
    taken: set[str] = set()
    renamed: list[Run] = []
    for number, run in enumerate(runs, start=1):
        name = run.name
        if names.count(name) > 1:
            name = f"{run.path.parent.name}/{name}"
        if name in taken:
            name = f"{name} ({number})"
        taken.add(name)
        renamed.append(replace(run, name=name))
    return renamed


def render_compact_json(series: Series) -> str:
    """The JSON form with no more digits than a curve can show: half of the bytes."""
    columns = []
    for name, values in series.columns.items():
        digits = ",".join(map(_format_seven_digits, values))
        columns.append(f"{json.dumps(name)}:[{digits}]")
    steps = ",".join(map(str, series.steps))
    nonfinite = ",".join(map(str, series.nonfinite))
    return f'{{"steps":[{steps}],"columns":{{{",".join(columns)}}},"nonfinite":[{nonfinite}]}}'


def _format_seven_digits(value: float | None) -> str:
    return "null" if value is None else f"{value:.7g}"
