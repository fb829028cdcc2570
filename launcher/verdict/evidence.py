"""Everything a run left behind -> `Evidence`: its console log, its probe's events, its exit, each of which may be
missing; of the last attempt `console.3.log` and `exit.3.json` with the events since the third `start`."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher import files
from launcher.artifacts.digest import CHECKPOINT
from launcher.config.keys import PAIRED, STAGES
from launcher.machine.codec import Omission
from launcher.runs import evaluation, rundir, runner
from launcher.runs import events as probe_events
from launcher.runs.evaluation import EvaluationRecord
from launcher.runs.record import LARGEST_WORLD, Manifest
from launcher.upstream.logs import open_instruct, trl
from launcher.upstream.logs.common import Pattern
from launcher.verdict.logs.scan import Log, Signal, StepLine, scan

PATTERNS: tuple[Pattern, ...] = tuple(dict.fromkeys(open_instruct.PATTERNS + trl.PATTERNS))
"""The patterns of every backend: a stranger's log does not say which one wrote it."""

MEASURED = "tokens positions wasted rows seconds allocated_gib reserved_gib grad_norm learning_rate".split()

_LOGGED_PAIR = re.compile(r"'(\w+)': '?(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b")
_EVALUATION_SPEEDS = ("_runtime", "_per_second", "_time")
_SUMMED = ("tokens", "positions", "wasted", "rows")
Row = dict[str, float]  # one optimizer step: `step`, `finite`, and what is known of the rest

FaultAt = tuple[Path, int, Omission]  # what was left out, in which file and line
KEPT_FAULTS = 100  # of a rank: they are said, not counted
KEPT_EVENTS = 1_000  # of each name but `step`, a rank
_SCRIPT = re.compile(r"\b(?:(?P<dpo>dpo\w*)|finetune)\.py:")
# What HF Trainer's dicts hold of DPO, and of none of both: ORPO, KTO, online methods, a reward model.
_DPO_METRICS = {"rewards/chosen", "rewards/margins"}
_SFT_METRICS = {"mean_token_accuracy", "num_tokens"}  # anything may show but a loss
_OTHER_METRICS = {"log_odds_ratio", "kl", "objective/kl", "reward", "reward_std", "margin"}
_MODEL_FILE = re.compile(r"'(?:adapter_)?(?:pytorch_)?model[\w.-]*'")
_DPO_ARGUMENT = re.compile(r"^dpo_")  # of a time when both stages had a class of one name


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
        return value if isinstance(value, str) else None

    def number(self, key: str) -> float | None:
        return finite(self.fields.get(key))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeStep:
    """One optimizer step as one rank lived it; memory in GiB, time in seconds. `wasted` positions hold no token;
    `interrupted` steps followed a save or an evaluation. Of a pair of DPO's, `rows` counts both."""

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
        return tuple(e for e in self.events if e.name in names)

    def last(self, name: str) -> Event | None:
        return next((e for e in reversed(self.events) if e.name == name), None)

    def start(self, key: str) -> int | None:
        event = self.last("start")
        value = event.number(key) if event else None
        return int(value) if value is not None and 0 <= value <= LARGEST_WORLD else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecords:
    ranks: Mapping[int, RankRecord]

    @property
    def world(self) -> int:
        return max((record.start("world") or 1 for record in self.ranks.values()), default=0)

    @property
    def missing(self) -> tuple[int, ...]:
        return self.without(self.ranks)

    def without(self, ranks: Container[int]) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world) if rank not in ranks)

    @property
    def last_step(self) -> int | None:
        return max((r.steps[-1].step for r in self.ranks.values() if r.steps), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """How the training command ended; a negative `returncode` is a signal too. `signal` is the one that ended it,
    `stopped` the one that launch sent, which it may have answered; `grace_s` see `runner.ProcessExit`."""

    path: Path
    returncode: int
    signal: int | None
    stopped: int | None
    grace_s: float | None = None


# without slots: the rows of all steps are computed once, when they are needed
@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of one attempt of a run.

    `earlier` are the steps (see `Row`) of the attempts that this one continues, `moved_before` the largest
    share of the weights that one of them moved. `inputs` is what of data and model had changed at the end (see
    `contents.changed`), `model` how the files of the saved model are now (see `judge`); both None where unknown.
    `evaluation` is that of the model of this attempt, None where it was not evaluated.
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
        """Whether its source is the one whose log lines the patterns know; None where that is unknown."""
        return self.manifest.upstream.pinned

    @property
    def records(self) -> tuple[RankRecord, ...]:
        ranks = self.probe.ranks if self.probe else {}
        return tuple(record for _, record in sorted(ranks.items()))

    @property
    def rank_steps(self) -> Iterator[ProbeStep]:
        return (step for record in self.records for step in record.steps)

    @property
    def lines(self) -> tuple[StepLine, ...]:
        return self.log.steps if self.log else ()

    @cached_property
    def rows(self) -> Sequence[Row]:
        """One row a step of this attempt, sorted: what the probe says, and of the log what it does not.

        A logged loss is a mean over the steps since the line before: where the probe has the loss of every step and
        the log tells of fewer, the mean is `logged_loss`. Tokens, positions, wasted positions and rows are sums over
        the ranks, seconds and memory (GiB) the largest of them. A number that is not finite is left out, and `finite`
        is then false.
        """
        rows = _metrics_rows(self.rank_steps, self.lines)
        measured = self.records[0].all("evaluation") if self.records else ()
        if measured:
            _add_evaluations(rows, measured)
        elif self.log is not None:
            _add_logged_evaluations(rows, self.log)
        return rows

    def changed(self, **changes: Any) -> Evidence:
        """The same steps with other facts about them; `log` and `probe` are not among the changes."""
        rows = self.rows
        evidence = replace(self, **changes)
        # how a cached property keeps its value
        vars(evidence)["rows"] = rows
        return evidence

    @property
    def arguments(self) -> Mapping[str, str]:
        return self.log.arguments if self.log else {}

    def signals(self, *names: str) -> tuple[Signal, ...]:
        return self.log.all(*names) if self.log else ()

    def events(self, *names: str) -> tuple[Event, ...]:
        return tuple(event for record in self.records for event in record.all(*names))

    def last_events(self, name: str) -> tuple[Event, ...]:
        return tuple(event for record in self.records if (event := record.last(name)))

    def missing_ranks(self, present: Container[int]) -> dict[str, object]:
        """The ranks that should be there and are not among those given, as a detail of a point."""
        absent = self.probe.without(present) if self.probe else ()
        return {"missing_ranks": list(absent)} if absent else {}

    @property
    def last_step(self) -> int | None:
        steps = [part.last_step for part in (self.log, self.probe) if part is not None]
        steps += [int(signal.fields["step"]) for signal in self.signals("progress")[-1:]]
        return max((s for s in steps if s is not None), default=None)

    @property
    def stopped(self) -> Event | None:
        """The broken contract, or the hang, for which a process ended itself: the earliest of all."""
        events = self.events("violation", "hang")
        ended = [event for event in events if event.fields.get("stopped") is True]
        return min(ended, key=lambda event: event.number("t") or 0.0, default=None)

    @property
    def last_hang(self) -> Event | None:
        """That nothing moved on a rank, where nothing shows that it went on."""
        for record in self.records:
            word = next((event for event in reversed(record.events) if event.name in ("hang", "hang_over")), None)
            after = record.steps[-1].line if record.steps else 0
            if word is not None and word.name == "hang" and word.line > after:
                return word
        return None

    @property
    def total_steps(self) -> int | None:
        if self.log is None:
            return None
        progress = self.log.last("progress")
        return self.log.total_steps or (int(progress.fields["total"]) if progress else None)

    @property
    def final_save(self) -> Signal | Event | None:
        """Where the final model was saved: after the last step, and no checkpoint."""
        since = self.lines[-1].line if self.lines else 0
        begun = {s.fields["path"] for s in self.signals("saving") if s.line >= since}
        for signal in self.signals("saved", "remaining", "tokenizer_saved"):
            if signal.name == "remaining":
                final = bool(_MODEL_FILE.search(signal.fields["files"]))
            else:  # open-instruct says the same of its checkpoints
                final = not CHECKPOINT.search(signal.fields["path"])
            whole = signal.name != "tokenizer_saved" or signal.fields["path"] in begun
            if signal.line >= since and whole and final:
                return signal
        for record in self.records:
            since = record.steps[-1].line if record.steps else 0
            for event in record.all("saved"):
                if event.line > since and not CHECKPOINT.search(event.text("path") or ""):
                    return event
        return None

    @property
    def left_out_save(self) -> bool:
        """Whether the probe ended every rank before the final save, as requested."""
        return bool(self.records) and len(self.last_events("not_saved")) == len(self.records)

    @property
    def stage(self) -> str | None:
        """`sft` or `dpo`, by the arguments dump, DPO's rewards or the script; None if unknown."""
        log, stages = self.log, open_instruct.STAGES
        if log is not None and (named := [stages[b] for b in log.blocks if b in stages]):
            return "dpo" if any(map(_DPO_ARGUMENT.match, log.arguments)) else named[-1]
        last = log.steps[-1] if log is not None and log.steps else None
        shown = {} if last is None else last.extra
        if not _OTHER_METRICS.isdisjoint(shown):
            return None
        if not (_DPO_METRICS | _SFT_METRICS).isdisjoint(shown):
            return "sft" if _DPO_METRICS.isdisjoint(shown) else "dpo"
        if last is not None and (name := _SCRIPT.search(last.text)):
            return "dpo" if name["dpo"] else "sft"
        if log is not None and (trainer := _named(log)) is not None:
            return trainer
        for start in self.events("start"):
            script = Path(start.text("target") or "").name
            return "dpo" if "dpo" in script else "sft" if re.search("sft|finetune", script) else None
        return None

    @property
    def packs_nothing(self) -> bool:
        """Whether the arguments dump leaves SFT one row a micro-batch: it is packed with no other."""
        alone = self.arguments.get("per_device_train_batch_size") == "1"
        return alone and self.stage not in {None, *PAIRED}


def _metrics_rows(steps: Iterable[ProbeStep], lines: Sequence[StepLine]) -> list[Row]:
    by_step: dict[int, list[ProbeStep]] = {}
    for step in steps:
        by_step.setdefault(step.step, []).append(step)
    rows: dict[int, Row] = {}
    for number, ranks in sorted(by_step.items()):
        rows[number] = _recorded_row(number, ranks)
    measured = sum("loss" in row for row in rows.values())
    is_mean = len(lines) < measured
    # Trainer's lines bear no step: after a resume the first may be counted from the bar's begin
    first = min(rows, default=0)
    for line in lines:
        if line.step >= first:
            row = rows.setdefault(line.step, {"step": line.step})
            _add_logged(row, line, is_mean=is_mean)
    return [rows[number] for number in sorted(rows)]


def _recorded_row(number: int, ranks: Sequence[ProbeStep]) -> Row:
    row = Row(step=number, finite=all(step.finite for step in ranks))
    losses = [step.loss for step in ranks if step.loss is not None]
    if row["finite"] and losses:
        row["loss"] = math.fsum(losses) / len(losses)
    for key in MEASURED:
        values = [getattr(step, key) for step in ranks]
        parts = [value for value in values if value is not None]
        if parts:
            row[key] = sum(parts) if key in _SUMMED else max(parts)
    return row


def _add_logged(row: Row, line: StepLine, *, is_mean: bool) -> None:
    """Add what a logged line tells of a step and the probe does not."""
    own = row.get("loss")
    finite = math.isfinite(line.loss)
    logged = {
        "loss": own if own is not None and finite else line.loss,
        "logged_loss": line.loss if is_mean else None,
        "learning_rate": line.learning_rate,
        "logged_tokens_per_second": line.tokens_per_second,
        **line.extra,
    }
    row["finite"] = row.get("finite", True) and finite
    if not finite:
        row.pop("loss", None)
    for name, value in logged.items():
        if value is not None and math.isfinite(value):
            row[name] = value


def _add_evaluations(rows: Sequence[Row], evaluations: Iterable[Event]) -> None:
    """Add what evaluations measured to the rows of the steps behind which they came."""
    by_step = {row["step"]: row for row in rows}
    for event in evaluations:
        row = by_step.get(event.number("step") or 0)
        metrics = event.fields.get("metrics")
        if row is not None and isinstance(metrics, Mapping):
            _add_evaluation(row, metrics)


def _add_logged_evaluations(rows: Sequence[Row], log: Log) -> None:
    """The same of what the log shows, behind the last step that it shows before."""
    by_step = {row["step"]: row for row in rows}
    for signal in log.all("evaluated"):
        before = [line.step for line in log.steps if line.line < signal.line]
        row = by_step.get(before[-1]) if before else None
        if row is not None:
            pairs = _LOGGED_PAIR.findall(signal.fields["pairs"] or "")
            _add_evaluation(row, {name: float(number) for name, number in pairs})


def _add_evaluation(row: Row, metrics: Mapping[str, object]) -> None:
    """Add the losses and accuracies of an evaluation, not how fast it was."""
    for name, value in metrics.items():
        number = finite(value)
        if number is not None and name.startswith("eval_") and not name.endswith(_EVALUATION_SPEEDS):
            row[name] = number


def read_log(path: Path) -> Evidence:
    """The evidence of a console log alone. Raises OSError if it cannot be read."""
    return Evidence(log=scan(path, PATTERNS))


def read_run(folder: Path, attempt: int | None = None, current: Manifest | None = None) -> Evidence:
    """The evidence of an attempt, of the last one unless it is named; `current` is run.json where the caller has read
    it. Raises OSError if a file cannot be opened."""
    run = rundir.RunFolder(folder)
    attempt = attempt or run.attempts() or None
    console = run.console(attempt or 1)
    # that of an attempt which another one followed is kept beside it
    kept = files.read_json(folder / f"run.{attempt}.json")
    manifest = Manifest(kept) if kept else current
    if manifest is None:
        manifest = rundir.read_manifest(run)
    inputs = files.read_json(run.inputs(attempt or 1)).get("changed")
    evaluated = evaluation.read_evaluation(run)
    if evaluated is not None and evaluated.attempt != (attempt or 1):
        evaluated = None
    return Evidence(
        manifest=manifest,
        log=scan(console, PATTERNS) if console.is_file() else None,
        probe=_read_probe(run.probe, attempt),
        exit=_read_exit(run, attempt or 1),
        inputs=[one for one in inputs if isinstance(one, dict)] if isinstance(inputs, list) else None,
        evaluation=evaluated,
    )


def _named(log: Log) -> str | None:
    """The stage of the one trainer that warnings and frames name; None where they name several, or none."""
    names = {of.lower() for s in log.all("trainer", "trainer_of") if (of := s.fields.get("of"))}
    trainers = names - {"base"}  # what all of them inherit from
    return trainers.pop() if len(trainers) == 1 and trainers <= {*STAGES} else None


def finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # a whole number of JSON may be larger than any float
    return value if abs(value) <= sys.float_info.max else None


def _read_exit(folder: rundir.RunFolder, attempt: int) -> ExitRecord | None:
    ended = runner.read_exit(folder, attempt)
    if ended is None:
        return None
    path = folder.exit(attempt)
    return ExitRecord(
        path=path, returncode=ended.returncode, signal=ended.signal, stopped=ended.stopped, grace_s=ended.grace_s
    )


def _read_probe(folder: Path, attempt: int | None) -> ProbeRecords | None:
    records = (_read_rank(path, attempt) for path in sorted(folder.glob("rank-*.jsonl")) if path.is_file())
    found = [record for record in records if record is not None]
    # a rank of an earlier, larger attempt left its file behind: it is not of this one
    latest = max((r.start("attempt") or 1 for r in found), default=1)
    ours = [r for r in found if (r.start("attempt") or 1) == latest]
    world = next((r.start("world") for r in ours if r.rank == 0), None)
    ranks = {r.rank: r for r in ours if world is None or r.rank < world}
    return ProbeRecords(ranks=ranks) if ranks else None


def _read_rank(path: Path, attempt: int | None) -> RankRecord | None:
    """The events since the last `start`, of the attempt if it is named."""
    events: dict[str, list[Event]] = {}
    steps: list[ProbeStep] = []
    left_out: list[FaultAt] = []
    ours, rank = True, _rank_of(path)
    with files.open_regular(path) as file:
        for number, raw in enumerate(files.lines(file), start=1):
            faults: list[Omission] = []
            fields = probe_events.parse_event(raw, faults)
            left_out += [(path, number, fault) for fault in faults[:1] if len(left_out) < KEPT_FAULTS]
            if fields is None:
                continue
            name = fields.pop("event")
            event = Event(rank=rank, path=path, line=number, name=name, fields=fields)
            if name == "start":
                ours = attempt is None or (event.number("attempt") or attempt) == attempt
                events, steps = ({}, []) if ours else (events, steps)
            if not ours:
                continue
            if name == "step":
                step, loss = event.number("step"), event.number("loss")
                if step is not None:
                    sound = fields.get("finite") is not False and (loss is not None or fields.get("loss") is None)
                    values: dict[str, Any] = {key: event.number(key) for key in (*MEASURED, "micro_batches")}
                    values |= {"finite": sound, "interrupted": fields.get("interrupted") is True}
                    steps.append(ProbeStep(rank=rank, path=path, line=number, step=int(step), loss=loss, **values))
                continue
            kept = events.setdefault(name, [])
            kept.append(event)
            if len(kept) > KEPT_EVENTS:
                del kept[KEPT_EVENTS // 2]
    flat = sorted((e for kept in events.values() for e in kept), key=lambda e: e.line)
    if not flat and not steps:
        return None
    return RankRecord(rank=rank, events=tuple(flat), steps=tuple(steps), left_out=tuple(left_out))


def _rank_of(path: Path) -> int:
    digits = path.stem.removeprefix("rank-")
    return min(int(digits), LARGEST_WORLD) if digits.isascii() and digits.isdigit() else 0
