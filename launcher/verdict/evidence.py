"""What a run left, as `Evidence`: its console log, its probe's events, its exit, or some of these.

The third attempt has `console.3.log`, `exit.3.json`, and the events since the third `start`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher import files
from launcher.artifacts.digest import CHECKPOINT
from launcher.config.keys import PAIRED, STAGES
from launcher.lazy_dataclass import dataclass
from launcher.machine.codec import Omission
from launcher.runs import evaluation, rundir, runner
from launcher.runs import events as probe_events
from launcher.runs.evaluation import EvaluationRecord
from launcher.runs.record import LARGEST_WORLD, Manifest
from launcher.upstream.logs import olmo_core, open_instruct, trl
from launcher.upstream.logs.common import Pattern
from launcher.verdict.logs.scan import Log, Signal, StepLine, scan

PATTERNS: tuple[Pattern, ...] = tuple(
    dict.fromkeys(open_instruct.PATTERNS + olmo_core.PATTERNS + trl.PATTERNS)
)
"""The patterns of every backend: a log alone does not say which one wrote it."""

MEASURED = (
    "tokens",
    "positions",
    "wasted",
    "rows",
    "seconds",
    "allocated_gib",
    "reserved_gib",
    "grad_norm",
    "learning_rate",
)
"""What the probe measures of each step."""
_SUMMED = ("tokens", "positions", "wasted", "rows")

_LOGGED_PAIR = re.compile(r"'(\w+)': '?(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b")
_EVALUATION_SPEEDS = ("_runtime", "_per_second", "_time")
KEPT_FAULTS = 100
"""Damaged lines of a rank that are named; the others are not counted."""
KEPT_EVENTS = 1_000
"""Events of each name but `step` that are kept of a rank."""
_SCRIPT = re.compile(r"\b(?:(?P<dpo>dpo\w*)|finetune)\.py:")
# What the dicts of HF Trainer hold of DPO, of SFT (which may show no more than a loss), and of
# neither: ORPO, KTO, online methods, a reward model.
_DPO_METRICS = {"rewards/chosen", "rewards/margins"}
_SFT_METRICS = {"mean_token_accuracy", "num_tokens"}
_OTHER_METRICS = {"log_odds_ratio", "kl", "objective/kl", "reward", "reward_std", "margin"}
_MODEL_FILE = re.compile(r"'(?:adapter_)?(?:pytorch_)?model[\w.-]*'")

Row = dict[str, float]
"""One optimizer step: `step`, `finite`, and what else is known of it."""

FaultAt = tuple[Path, int, Omission]
"""What was left out of a record, with its file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a rank's JSONL; `line` is 1-based."""

    rank: int
    path: Path
    line: int
    name: str
    fields: Mapping[str, object]

    def text(self, key: str) -> str | None:
        value = self.fields.get(key)
        if not isinstance(value, str):
            return None
        return value

    def number(self, key: str) -> float | None:
        return keep_finite(self.fields.get(key))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeStep:
    """One optimizer step of one rank; memory in GiB, time in seconds.

    `wasted` positions hold no token. `interrupted` steps followed a save or an evaluation. `rows`
    counts both rows of a pair of DPO's.
    """

    rank: int
    path: Path
    line: int
    step: int
    loss: float | None
    finite: bool
    tokens: float | None
    positions: float | None
    wasted: float | None
    rows: float | None
    seconds: float | None
    allocated_gib: float | None
    reserved_gib: float | None
    grad_norm: float | None
    learning_rate: float | None
    interrupted: bool = False
    micro_batches: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    rank: int
    events: tuple[Event, ...]
    steps: tuple[ProbeStep, ...]
    left_out: tuple[FaultAt, ...] = ()

    def all(self, *names: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.name in names)

    def last(self, *names: str) -> Event | None:
        for event in reversed(self.events):
            if event.name in names:
                return event
        return None

    def start(self, key: str) -> int | None:
        """A count from the last `start`."""
        event = self.last("start")
        if event is None:
            return None
        value = event.number(key)
        if value is None or not 0 <= value <= LARGEST_WORLD:
            return None
        return int(value)

    @property
    def attempt(self) -> int:
        return self.start("attempt") or 1

    @property
    def last_line(self) -> int:
        """The line of the last step, 0 before the first."""
        if not self.steps:
            return 0
        return self.steps[-1].line


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecords:
    ranks: Mapping[int, RankRecord]

    @property
    def world(self) -> int:
        world = 0
        for record in self.ranks.values():
            world = max(world, record.start("world") or 1)
        return world

    @property
    def missing(self) -> tuple[int, ...]:
        return self.without(self.ranks)

    def without(self, ranks: Container[int]) -> tuple[int, ...]:
        """The ranks of the world that are not among these."""
        return tuple(rank for rank in range(self.world) if rank not in ranks)

    @property
    def last_step(self) -> int | None:
        last = None
        for record in self.ranks.values():
            if record.steps:
                last = max(last or 0, record.steps[-1].step)
        return last


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """How the training command ended; a negative `returncode` is a signal too.

    `signal` is the signal that ended it, `stopped` the one that launch sent, which it may have
    answered; `grace_s`: see `runner.ProcessExit`.
    """

    path: Path
    returncode: int
    signal: int | None
    stopped: int | None
    grace_s: float | None = None


# without slots: the rows of all steps are computed once, when they are needed
@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of one attempt of a run.

    `earlier` are the steps (see `Row`) of the attempts that this one continues, `moved_before` is
    the largest share of the weights that one of them moved. `inputs` is what of data and model had
    changed at the end (see `contents.changed`), `model` how the files of the saved model are now
    (see `judge`); both None if unknown. `evaluation` is that of the model of this attempt, None if
    it was not evaluated.
    """

    manifest: Manifest = field(default_factory=Manifest)
    log: Log | None = None
    probe: ProbeRecords | None = None
    exit: ExitRecord | None = None
    earlier: Sequence[Mapping[str, float]] = ()
    moved_before: float = 0.0
    inputs: Sequence[Mapping[str, object]] | None = None
    model: Mapping[str, object] | None = None
    evaluation: EvaluationRecord | None = None

    @property
    def pinned(self) -> bool | None:
        """Whether its source is the one whose log lines the patterns know; None if unknown."""
        return self.manifest.upstream.pinned

    @property
    def records(self) -> tuple[RankRecord, ...]:
        if self.probe is None:
            return ()
        ranks = self.probe.ranks
        return tuple(ranks[rank] for rank in sorted(ranks))

    @property
    def rank_steps(self) -> Iterator[ProbeStep]:
        for record in self.records:
            yield from record.steps

    @property
    def lines(self) -> tuple[StepLine, ...]:
        if self.log is None:
            return ()
        return self.log.steps

    @cached_property
    def rows(self) -> Sequence[Row]:
        """One row a step of this attempt, sorted: what the probe says, and what only the log says.

        A logged loss is a mean over the steps since the line before. If the probe has the loss of
        every step and the log has fewer, the mean is `logged_loss`. Tokens, positions, wasted
        positions and rows are sums over the ranks; seconds and memory (GiB) are the largest of
        them. A number that is not finite is left out, and `finite` is false then.
        """
        rows = _build_step_rows(self.rank_steps, self.lines)
        evaluations: tuple[Event, ...] = ()
        for record in self.records[:1]:
            evaluations = record.all("evaluation")
        if evaluations:
            _add_evaluations(rows, evaluations)
        elif self.log is not None:
            _add_logged_evaluations(rows, self.log)
        return rows

    def with_facts(self, **facts: Any) -> Evidence:
        """The same steps with other facts about them; not for other values of `log` or `probe`."""
        rows = self.rows
        evidence = replace(self, **facts)
        # a cached property keeps its value here
        vars(evidence)["rows"] = rows
        return evidence

    @property
    def arguments(self) -> Mapping[str, str]:
        if self.log is None:
            return {}
        return self.log.arguments

    def signals(self, *names: str) -> tuple[Signal, ...]:
        if self.log is None:
            return ()
        return self.log.all(*names)

    def events(self, *names: str) -> tuple[Event, ...]:
        return tuple(event for record in self.records for event in record.all(*names))

    def last_events(self, name: str) -> tuple[Event, ...]:
        """The last event of this name on each rank that has one."""
        events = []
        for record in self.records:
            event = record.last(name)
            if event is not None:
                events.append(event)
        return tuple(events)

    def missing_ranks(self, present: Container[int]) -> dict[str, object]:
        """The ranks that should be there and are not `present`, as a detail of a point."""
        if self.probe is None:
            return {}
        missing = self.probe.without(present)
        if not missing:
            return {}
        return {"missing_ranks": list(missing)}

    @property
    def last_step(self) -> int | None:
        steps = []
        for source in (self.log, self.probe):
            if source is not None and source.last_step is not None:
                steps.append(source.last_step)
        for signal in self.signals("progress")[-1:]:
            steps.append(int(signal.fields["step"]))
        return max(steps, default=None)

    @property
    def stopped(self) -> Event | None:
        """The first broken contract, or hang, for which a process ended itself."""
        stops = []
        for event in self.events("violation", "hang"):
            if event.fields.get("stopped") is True:
                stops.append(event)
        return min(stops, key=lambda event: event.number("t") or 0.0, default=None)

    @property
    def last_hang(self) -> Event | None:
        """That a rank does not move, unless something shows that it went on."""
        for record in self.records:
            event = record.last("hang", "hang_over")
            if event is None or event.name == "hang_over":
                continue
            if event.line > record.last_line:
                return event
        return None

    @property
    def total_steps(self) -> int | None:
        if self.log is None:
            return None
        if self.log.total_steps:
            return self.log.total_steps
        progress = self.log.last("progress")
        if progress is None:
            return None
        return int(progress.fields["total"])

    @property
    def final_save(self) -> Signal | Event | None:
        """Where the final model was saved: after the last step, and not as a checkpoint."""
        last_line = self.lines[-1].line if self.lines else 0
        saving = set()
        for signal in self.signals("saving"):
            if signal.line >= last_line:
                saving.add(signal.fields["path"])
        for signal in self.signals("saved", "remaining", "tokenizer_saved"):
            if signal.line >= last_line and _is_final_save(signal, saving):
                return signal
        for signal in self.signals("step_saving"):
            # OLMo-core's last checkpoint is its model, and it waits for it before it says so
            is_last = int(signal.fields["step"]) == self.total_steps
            if is_last and self._is_completed_after(signal.line):
                return signal
        for record in self.records:
            for event in record.all("saved"):
                is_checkpoint = CHECKPOINT.search(event.text("path") or "")
                if event.line > record.last_line and not is_checkpoint:
                    return event
        return None

    def _is_completed_after(self, line: int) -> bool:
        return any(signal.line > line for signal in self.signals("training_completed"))

    @property
    def left_out_save(self) -> bool:
        """Whether the probe ended every rank before the final save, as requested."""
        return bool(self.records) and len(self.last_events("not_saved")) == len(self.records)

    @property
    def stage(self) -> str | None:
        """`sft` or `dpo`, by the arguments dump, DPO's rewards or the script; None if unknown."""
        if self.log is not None:
            stage = _find_stage_in_arguments(self.log)
            if stage is not None:
                return stage
            if self.log.steps:
                last = self.log.steps[-1]
                if not _OTHER_METRICS.isdisjoint(last.extra):
                    return None
                stage = _find_stage_in_step(last)
                if stage is not None:
                    return stage
            stage = _find_stage_of_trainer(self.log)
            if stage is not None:
                return stage
        for start in self.events("start")[:1]:
            script = Path(start.text("target") or "").name
            if "dpo" in script:
                return "dpo"
            if "sft" in script or "finetune" in script:
                return "sft"
        return None

    @property
    def packs_nothing(self) -> bool:
        """Whether the arguments dump leaves SFT one row a micro-batch: nothing to pack it with."""
        if self.arguments.get("per_device_train_batch_size") != "1":
            return False
        return self.stage is not None and self.stage not in PAIRED


def list_ranks(events: Iterable[Event]) -> set[int]:
    return {event.rank for event in events}


def select_state(events: Iterable[Event], state: str) -> list[Event]:
    return [event for event in events if event.text("state") == state]


def _is_final_save(signal: Signal, saving: Container[str]) -> bool:
    """Whether a line tells of a save that is no checkpoint; `saving` are paths of begun saves."""
    if signal.name == "remaining":
        return _MODEL_FILE.search(signal.fields["files"]) is not None
    path = signal.fields["path"]
    # open-instruct says the same of its checkpoints
    if CHECKPOINT.search(path):
        return False
    return signal.name == "saved" or path in saving


def _find_stage_in_arguments(log: Log) -> str | None:
    stage = None
    for block in log.blocks:
        stage = open_instruct.STAGES.get(block, stage)
    if stage is not None and any(name.startswith("dpo_") for name in log.arguments):
        # once, both stages had a class of one name
        return "dpo"
    return stage


def _find_stage_in_step(line: StepLine) -> str | None:
    if not _DPO_METRICS.isdisjoint(line.extra):
        return "dpo"
    if not _SFT_METRICS.isdisjoint(line.extra):
        return "sft"
    script = _SCRIPT.search(line.text)
    if script is None:
        return None
    return "dpo" if script["dpo"] else "sft"


def _find_stage_of_trainer(log: Log) -> str | None:
    """The stage of the one trainer that warnings and frames name; None if they name several."""
    names = set()
    for signal in log.all("trainer", "trainer_of"):
        name = signal.fields.get("of")
        if name:
            names.add(name.lower())
    # all of them inherit from it
    names.discard("base")
    if len(names) != 1:
        return None
    name = names.pop()
    if name not in STAGES:
        return None
    return name


def _build_step_rows(steps: Iterable[ProbeStep], lines: Sequence[StepLine]) -> list[Row]:
    """One row for each step that the probe recorded or the log shows, in order."""
    by_step: dict[int, list[ProbeStep]] = {}
    for step in steps:
        by_step.setdefault(step.step, []).append(step)
    rows: dict[int, Row] = {}
    for number, ranks in by_step.items():
        rows[number] = _build_recorded_row(number, ranks)
    measured = sum("loss" in row for row in rows.values())
    is_mean = len(lines) < measured
    # Trainer's lines bear no step: after a resume the first may be counted from the bar's begin
    first = min(rows, default=0)
    for line in lines:
        if line.step >= first:
            row = rows.setdefault(line.step, {"step": line.step})
            _add_logged(row, line, is_mean=is_mean)
    return [rows[number] for number in sorted(rows)]


def _build_recorded_row(number: int, ranks: Sequence[ProbeStep]) -> Row:
    """The row of one step, of which every rank has a record."""
    is_finite = all(step.finite for step in ranks)
    row = Row(step=number, finite=is_finite)
    losses = [step.loss for step in ranks if step.loss is not None]
    if is_finite and losses:
        row["loss"] = math.fsum(losses) / len(losses)
    for key in MEASURED:
        values = [getattr(step, key) for step in ranks]
        numbers = [value for value in values if value is not None]
        if not numbers:
            continue
        if key in _SUMMED:
            row[key] = sum(numbers)
        else:
            row[key] = max(numbers)
    return row


def _add_logged(row: Row, line: StepLine, *, is_mean: bool) -> None:
    """Add what a logged line tells of a step and the probe does not."""
    is_finite = math.isfinite(line.loss)
    logged: dict[str, float | None] = {}
    if "loss" not in row:
        logged["loss"] = line.loss
    if is_mean:
        logged["logged_loss"] = line.loss
    logged |= {
        "learning_rate": line.learning_rate,
        "logged_tokens_per_second": line.tokens_per_second,
        **line.extra,
    }
    row["finite"] = row.get("finite", True) and is_finite
    if not is_finite:
        row.pop("loss", None)
    for name, value in logged.items():
        if value is not None and math.isfinite(value):
            row[name] = value


def _add_evaluations(rows: Sequence[Row], evaluations: Iterable[Event]) -> None:
    """Add the results of evaluations to the rows of the steps that they followed."""
    by_step = _key_by_step(rows)
    for event in evaluations:
        row = by_step.get(event.number("step") or 0)
        metrics = event.fields.get("metrics")
        if row is not None and isinstance(metrics, Mapping):
            _add_evaluation(row, metrics)


def _add_logged_evaluations(rows: Sequence[Row], log: Log) -> None:
    """Add the logged results of evaluations to the rows of the steps logged before them."""
    by_step = _key_by_step(rows)
    for signal in log.all("evaluated"):
        row = None
        for line in log.steps:
            if line.line < signal.line:
                row = by_step.get(line.step)
        if row is None:
            continue
        metrics = {}
        for name, number in _LOGGED_PAIR.findall(signal.fields["pairs"] or ""):
            metrics[name] = float(number)
        _add_evaluation(row, metrics)


def _key_by_step(rows: Iterable[Row]) -> dict[float, Row]:
    return {row["step"]: row for row in rows}


def _add_evaluation(row: Row, metrics: Mapping[str, object]) -> None:
    """Add the losses and accuracies of an evaluation, not its speed."""
    for name, value in metrics.items():
        if not name.startswith("eval_") or name.endswith(_EVALUATION_SPEEDS):
            continue
        number = keep_finite(value)
        if number is not None:
            row[name] = number


def read_log(path: Path) -> Evidence:
    """The evidence of a console log alone. Raises OSError if it cannot be read."""
    return Evidence(log=scan(path, PATTERNS))


def read_run(folder: Path, attempt: int | None = None, current: Manifest | None = None) -> Evidence:
    """The evidence of an attempt, by default the last one.

    `current` is run.json if the caller has read it. Raises OSError if a file cannot be opened.
    """
    run = rundir.RunFolder(folder)
    attempt = attempt or run.attempts() or None
    number = attempt or 1
    console = run.console(number)
    evaluated = evaluation.read_evaluation(run)
    if evaluated is not None and evaluated.attempt != number:
        evaluated = None
    return Evidence(
        manifest=_read_manifest(run, attempt, current),
        log=scan(console, PATTERNS) if console.is_file() else None,
        probe=_read_probe(run.probe, attempt),
        exit=_read_exit(run, number),
        inputs=_read_inputs(run.inputs(number)),
        evaluation=evaluated,
    )


def _read_manifest(
    run: rundir.RunFolder, attempt: int | None, current: Manifest | None
) -> Manifest:
    """The manifest of an attempt: kept beside run.json if another attempt followed."""
    kept = files.read_json(run.path / f"run.{attempt}.json")
    if kept:
        return Manifest(kept)
    if current is not None:
        return current
    return rundir.read_manifest(run)


def _read_inputs(path: Path) -> Sequence[Mapping[str, object]] | None:
    changes = files.read_json(path).get("changed")
    if not isinstance(changes, list):
        return None
    return [change for change in changes if isinstance(change, dict)]


def keep_finite(value: object) -> float | None:
    """A number of a JSON record; None for anything else, NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # a whole number of JSON may be larger than any float
    if abs(value) > sys.float_info.max or math.isnan(value):
        return None
    return value


def _read_exit(folder: rundir.RunFolder, attempt: int) -> ExitRecord | None:
    ended = runner.read_exit(folder, attempt)
    if ended is None:
        return None
    return ExitRecord(
        path=folder.exit(attempt),
        returncode=ended.returncode,
        signal=ended.signal,
        stopped=ended.stopped,
        grace_s=ended.grace_s,
    )


def _read_probe(folder: Path, attempt: int | None) -> ProbeRecords | None:
    records = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        record = _read_rank(path, attempt) if path.is_file() else None
        if record is not None:
            records.append(record)
    # a rank of an earlier, larger attempt may have left its file
    latest = max((record.attempt for record in records), default=1)
    ranks = {record.rank: record for record in records if record.attempt == latest}
    world = None
    if 0 in ranks:
        world = ranks[0].start("world")
    if world is not None:
        ranks = {rank: record for rank, record in ranks.items() if rank < world}
    if not ranks:
        return None
    return ProbeRecords(ranks=ranks)


def _read_rank(path: Path, attempt: int | None) -> RankRecord | None:
    """The events since the last `start`, or of the named attempt."""
    reading = _RankReading(rank=_parse_rank(path), attempt=attempt)
    left_out: list[FaultAt] = []
    with files.open_regular(path) as file:
        for number, raw in enumerate(files.read_raw_lines(file), start=1):
            faults: list[Omission] = []
            fields = probe_events.parse_event(raw, faults)
            if faults and len(left_out) < KEPT_FAULTS:
                left_out.append((path, number, faults[0]))
            if fields is not None:
                name = fields.pop("event")
                reading.add(
                    Event(rank=reading.rank, path=path, line=number, name=name, fields=fields)
                )
    events = []
    for same_name in reading.events.values():
        events += same_name
    if not events and not reading.steps:
        return None
    events.sort(key=lambda event: event.line)
    return RankRecord(
        rank=reading.rank,
        events=tuple(events),
        steps=tuple(reading.steps),
        left_out=tuple(left_out),
    )


@dataclass(slots=True)
class _RankReading:
    """What is kept of a rank's record while it is read."""

    rank: int
    attempt: int | None
    events: dict[str, list[Event]] = field(default_factory=dict)
    steps: list[ProbeStep] = field(default_factory=list)
    is_wanted: bool = True

    def add(self, event: Event) -> None:
        if event.name == "start":
            self._begin_attempt(event)
        if not self.is_wanted:
            return
        if event.name == "step":
            step = _parse_probe_step(event)
            if step is not None:
                self.steps.append(step)
            return
        kept = self.events.setdefault(event.name, [])
        kept.append(event)
        if len(kept) > KEPT_EVENTS:
            # the first and the last events say the most
            del kept[KEPT_EVENTS // 2]

    def _begin_attempt(self, event: Event) -> None:
        number = event.number("attempt") or self.attempt
        self.is_wanted = self.attempt is None or number == self.attempt
        if self.is_wanted:
            self.events = {}
            self.steps = []


def _parse_probe_step(event: Event) -> ProbeStep | None:
    step = event.number("step")
    if step is None:
        return None
    loss = event.number("loss")
    is_loss_sound = loss is not None or event.fields.get("loss") is None
    measured: dict[str, Any] = {key: event.number(key) for key in MEASURED}
    return ProbeStep(
        rank=event.rank,
        path=event.path,
        line=event.line,
        step=int(step),
        loss=loss,
        finite=is_loss_sound and event.fields.get("finite") is not False,
        interrupted=event.fields.get("interrupted") is True,
        micro_batches=event.number("micro_batches"),
        **measured,
    )


def _parse_rank(path: Path) -> int:
    digits = path.stem.removeprefix("rank-")
    if digits.isascii() and digits.isdigit():
        return min(int(digits), LARGEST_WORLD)
    return 0
