"""Everything a run left behind -> `Evidence`: its console log, its probe's events, its exit.

Each part may be missing. By default it is all of the last attempt: `console.3.log` and
`exit.3.json` with the probe's events since the third `start`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import files
from launcher.artifacts.digest import CHECKPOINT
from launcher.config.keys import PAIRED, STAGES
from launcher.runs import rundir
from launcher.upstream.logs import open_instruct, trl
from launcher.upstream.trainers import BACKENDS
from launcher.verdict.logs.scan import Cite, Log, Pattern, Signal, StepLine, scan

PATTERNS: tuple[Pattern, ...] = tuple(dict.fromkeys(open_instruct.PATTERNS + trl.PATTERNS))
"""The patterns of every backend: a stranger's log does not say which one wrote it."""

MEASURED = (
    *("tokens", "positions", "wasted", "rows", "seconds"),
    *("allocated_gib", "reserved_gib", "grad_norm", "learning_rate"),
)
"""The numbers of a `ProbeStep`."""

LARGEST_WORLD = 100_000
"""Processes of a run; whatever names more is no record of one."""
KEPT_EVENTS = 1_000  # of each name but `step`, a rank
_SCRIPT = re.compile(r"\b(?:(?P<dpo>dpo\w*)|finetune)\.py:")
# What HF Trainer's dicts hold of DPO, and of none of both: ORPO, KTO, online methods, a reward model.
_DPO_METRICS = {"rewards/chosen", "rewards/margins"}
_SFT_METRICS = {"mean_token_accuracy", "num_tokens"}  # anything may show but a loss
_OTHER_METRICS = {"log_odds_ratio", "kl", "objective/kl", "reward", "reward_std", "margin"}
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
        """The field as text, None where it is missing or null."""
        value = self.fields.get(key)
        return None if value is None else str(value)

    def number(self, key: str) -> float | None:
        """The field as a finite number, None where it is none."""
        return _finite(self.fields.get(key))

    def cite(self) -> Cite:
        """The event as it stands in the file, short."""
        text = json.dumps({"event": self.name, **self.fields}, ensure_ascii=False)[:300]
        return Cite(source="probe", file=str(self.path), line=self.line, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeStep:
    """One optimizer step as one rank lived it; memory in GiB, time in seconds.

    `wasted` positions hold no token; `interrupted` steps followed a save or an evaluation. Of a pair of
    DPO's, `rows` counts both.
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

    def cite(self) -> Cite:
        """The step as it stands in the file, short."""
        text = f"step {self.step}, loss {self.loss}, finite {self.finite}"
        return Cite(source="probe", file=str(self.path), line=self.line, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank's probe wrote in one attempt."""

    rank: int
    path: Path
    events: tuple[Event, ...]
    steps: tuple[ProbeStep, ...]

    def all(self, *names: str) -> tuple[Event, ...]:
        """The events of these names, in order."""
        return tuple(e for e in self.events if e.name in names)

    def last(self, name: str) -> Event | None:
        """The last event of this name."""
        return next((e for e in reversed(self.events) if e.name == name), None)

    def first(self, name: str) -> Event | None:
        """The first event of this name."""
        return next((e for e in self.events if e.name == name), None)

    def start(self, key: str) -> int | None:
        """A whole number out of the attempt's `start` event."""
        event = self.last("start")
        value = event.number(key) if event else None
        return int(value) if value is not None and 0 <= value <= LARGEST_WORLD else None

    @property
    def liger_calls(self) -> Mapping[str, int]:
        """Calls by operation, as counted last."""
        event = self.last("liger")
        calls = event.fields.get("calls") if event else None
        if not isinstance(calls, dict):
            return {}
        return {str(k): int(n) for k, v in calls.items() if (n := _finite(v)) is not None and n > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecords:
    """The records of all ranks of one attempt, by rank."""

    ranks: Mapping[int, RankRecord]

    @property
    def world(self) -> int:
        """How many ranks there should be."""
        worlds = [record.start("world") or 1 for record in self.ranks.values()]
        return max(worlds, default=0)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that left no record."""
        return self.without(self.ranks)

    def without(self, ranks: Container[int]) -> tuple[int, ...]:
        """The ranks that should be there and are not among those given."""
        return tuple(rank for rank in range(self.world) if rank not in ranks)

    @property
    def last_step(self) -> int | None:
        """The last optimizer step that any rank finished."""
        return max((r.steps[-1].step for r in self.ranks.values() if r.steps), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """How the training command ended; a negative `returncode` is a signal too.

    `signal` is the one that ended it, `stopped` the one that launch sent, which it may have answered.
    """

    path: Path
    returncode: int
    signal: int | None
    stopped: int | None
    attempt: int

    def cite(self) -> Cite:
        """Where it stands."""
        text = f"returncode {self.returncode}, signal {self.signal}"
        return Cite(source="exit", file=str(self.path), line=1, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the manifest says that an attempt was to be; None where it does not, or cannot know.

    `world` is the number of processes. `micro_batches` and `per_device` (rows of each) are those of one
    rank and optimizer step, as its probe counts them; `data` are the rows of an epoch before filtering,
    `batch` those of a step over all ranks.
    """

    steps: int | None = None
    world: int | None = None
    micro_batches: int | None = None
    per_device: int | None = None
    batch: int | None = None
    data: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of one attempt of a run.

    `pinned` is whether its source is the one whose log lines the patterns know; None where it is not
    known which source it was. `earlier` are the steps (see `measures.Row`) of the attempts that this one
    goes on from, `moved_before` the largest share of the weights that one of them moved. `inputs` is what of
    data and model had changed at the end (see `contents.changed`), `model` how the files of the saved
    model are now (see `judgement`); both None where it is not known.
    """

    log: Log | None = None
    probe: ProbeRecords | None = None
    exit: ExitRecord | None = None
    pinned: bool | None = None
    earlier: Sequence[Mapping[str, float]] = ()
    planned: Planned = Planned()
    moved_before: float = 0.0
    inputs: Sequence[Mapping[str, object]] | None = None
    model: Mapping[str, object] | None = None

    @property
    def records(self) -> tuple[RankRecord, ...]:
        """What the ranks' probes wrote, by rank."""
        ranks = self.probe.ranks if self.probe else {}
        return tuple(record for _, record in sorted(ranks.items()))

    @property
    def rank_steps(self) -> Iterator[ProbeStep]:
        """Every step of every rank, rank by rank."""
        return (step for record in self.records for step in record.steps)

    @property
    def lines(self) -> tuple[StepLine, ...]:
        """The lines of steps in the log."""
        return self.log.steps if self.log else ()

    @property
    def arguments(self) -> Mapping[str, str]:
        """The arguments that the log shows."""
        return self.log.arguments if self.log else {}

    def signals(self, *names: str) -> tuple[Signal, ...]:
        """The signals of these names in the log."""
        return self.log.all(*names) if self.log else ()

    def events(self, *names: str) -> tuple[Event, ...]:
        """The events of these names, rank by rank."""
        return tuple(event for record in self.records for event in record.all(*names))

    def last_events(self, name: str) -> tuple[Event, ...]:
        """The last event of this name of each rank that has one."""
        return tuple(event for record in self.records if (event := record.last(name)))

    def missing_ranks(self, present: Container[int]) -> dict[str, object]:
        """The ranks that should be there and are not among those given, as a detail of a point."""
        absent = self.probe.without(present) if self.probe else ()
        return {"missing_ranks": list(absent)} if absent else {}

    @property
    def last_step(self) -> int | None:
        """The last optimizer step that the log or the probe saw."""
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
    def total_steps(self) -> int | None:
        """The optimizer steps that the log announced."""
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
            whole = signal.name != "tokenizer_saved" or signal.fields["path"] in begun
            if signal.line >= since and whole and _final(signal):
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
        if log is not None and log.steps:
            last = log.steps[-1]
            if "epoch" in last.extra:  # a dict of HF Trainer
                return _stage_of(last.extra, log)
            if name := _SCRIPT.search(last.text):
                return "dpo" if name["dpo"] else "sft"
        if log is not None and not log.blocks and (trainer := _named(log)) is not None:
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


def read_log(path: Path, patterns: Sequence[Pattern] = PATTERNS) -> Evidence:
    """The evidence of a console log alone. Raises OSError if it cannot be read."""
    return Evidence(log=scan(path, patterns))


def read_run(folder: Path, patterns: Sequence[Pattern] = PATTERNS, attempt: int | None = None) -> Evidence:
    """The evidence of a run folder, of its last attempt unless one is named.

    What is missing or unreadable is None. Raises OSError if a file that is there cannot be opened.
    """
    if attempt is None:
        attempt = rundir.RunFolder(folder).attempts() or None
    infix = "" if attempt in (None, 1) else f".{attempt}"
    console = folder / f"console{infix}.log"
    # that of an attempt which another one followed is kept beside it
    kept = rundir.read_json(folder / f"run.{attempt}.json")
    manifest = kept or rundir.read_json(folder / "run.json")
    source = manifest.get("upstream")
    pinned = source.get("pinned") if isinstance(source, dict) else None
    return Evidence(
        log=scan(console, patterns) if console.is_file() else None,
        probe=_read_probe(folder / "probe", attempt),
        exit=_read_exit(folder / f"exit{infix}.json", attempt or 1),
        pinned=pinned if isinstance(pinned, bool) else None,
        planned=_planned(manifest),
        inputs=_changed_inputs(folder / f"inputs{infix}.json"),
    )


def _changed_inputs(path: Path) -> list[Mapping[str, object]] | None:
    listed = rundir.read_json(path).get("changed")
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else None


def _planned(manifest: Mapping[str, object]) -> Planned:
    """The plan in a manifest, as the ranks would show it."""
    plan, args = manifest.get("plan"), manifest.get("args")
    plan, args = (one if isinstance(one, dict) else {} for one in (plan, args))
    packing, split = (
        one.get("value") if isinstance(one := args.get(key), dict) else None
        for key in ("packing", "sequence_parallel_size")
    )
    keys = ("steps", "gpus", "nodes", "accumulation", "per_device", "global", "rows")
    steps, gpus, nodes, accumulation, per_device, batch, data = (
        value if isinstance(value := plan.get(key), int) else None for key in keys
    )
    stage, backend = manifest.get("stage"), BACKENDS.get(str(manifest.get("backend")))
    entry = None if backend is None else backend.STAGES.get(str(stage))
    kind = entry.packing if packing and entry is not None else None
    if kind in ("paired", "one-row") or (isinstance(split, int) and split > 1):
        # dpo.py fills its micro-batches anew (data_loader.py:283); ranks that share rows take turns with them
        accumulation = per_device = None
    elif kind == "refilled":
        per_device = None  # of a row that is packed nobody knows how many it holds
    return Planned(
        steps=steps,
        world=None if gpus is None else max(1, gpus) * (nodes or 1),
        micro_batches=accumulation,
        per_device=None if per_device is None else per_device * (2 if stage in PAIRED else 1),
        batch=batch,
        data=data,
    )


def _stage_of(metrics: Mapping[str, float], log: Log) -> str | None:
    if not _OTHER_METRICS.isdisjoint(metrics):
        return None
    if not _DPO_METRICS.isdisjoint(metrics):
        return "dpo"
    if not _SFT_METRICS.isdisjoint(metrics):
        return "sft"
    return _named(log)


def _named(log: Log) -> str | None:
    """The stage of the one trainer that warnings and frames name; None where they name several, or none."""
    trainers = _trainers(log)
    return next(iter(trainers)) if len(trainers) == 1 and trainers <= {*STAGES} else None


def _trainers(log: Log) -> set[str]:
    """The trainers whose files or scripts the log names."""
    signals = log.all("trainer", "trainer_of")
    names = {of for s in signals if (of := s.fields.get("of"))}
    # what all of them inherit from
    return {one.lower() for one in names} - {"base"}


def _final(signal: Signal) -> bool:
    """Whether a save is the final one: open-instruct says the same of its checkpoints."""
    if signal.name == "remaining":
        return bool(re.search(r"'(?:adapter_)?(?:pytorch_)?model[\w.-]*'", signal.fields["files"]))
    return not CHECKPOINT.search(signal.fields["path"])


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # a whole number of JSON may be larger than any float
    return value if abs(value) <= sys.float_info.max else None


def _read_exit(path: Path, attempt: int) -> ExitRecord | None:
    values = files.read_json(path)
    if not isinstance(values.get("returncode"), int):
        return None
    signal, stopped = values.get("signal"), values.get("stopped")
    return ExitRecord(
        path=path,
        returncode=values["returncode"],
        signal=signal if isinstance(signal, int) else None,
        stopped=stopped if isinstance(stopped, int) else None,
        attempt=values.get("attempt") or attempt,
    )


def _read_probe(folder: Path, attempt: int | None) -> ProbeRecords | None:
    records = [_read_rank(path, attempt) for path in sorted(folder.glob("rank-*.jsonl")) if path.is_file()]
    found = [r for r in records if r is not None]
    # A rank of an earlier, larger attempt left its file behind: it is not of this one.
    latest = max((r.start("attempt") or 1 for r in found), default=1)
    ours = [r for r in found if (r.start("attempt") or 1) == latest]
    world = next((r.start("world") for r in ours if r.rank == 0), None)
    ranks = {r.rank: r for r in ours if world is None or r.rank < world}
    return ProbeRecords(ranks=ranks) if ranks else None


def _read_rank(path: Path, attempt: int | None) -> RankRecord | None:
    """The events since the last `start`, of the attempt if it is named."""
    events: dict[str, list[Event]] = {}
    steps: list[ProbeStep] = []
    ours, rank = True, int(re.sub(r"\D", "", path.stem) or 0)
    with files.open_regular(path) as file:
        for number, raw in enumerate(files.lines(file), start=1):
            event = _event(rank, path, number, raw)
            if event is None:
                continue
            if event.name == "start":
                ours = attempt is None or (event.number("attempt") or attempt) == attempt
                events, steps = ({}, []) if ours else (events, steps)
            if not ours:
                continue
            if event.name == "step":
                steps += _step(event)
                continue
            kept = events.setdefault(event.name, [])
            kept.append(event)
            if len(kept) > KEPT_EVENTS:
                del kept[KEPT_EVENTS // 2]
    if not events and not steps:
        return None
    flat = sorted((e for kept in events.values() for e in kept), key=lambda e: e.line)
    return RankRecord(rank=rank, path=path, events=tuple(flat), steps=tuple(steps))


def _event(rank: int, path: Path, line: int, raw: bytes) -> Event | None:
    fields = files.parse_line(raw)
    name = fields.pop("event", None)
    if not isinstance(name, str):
        return None
    return Event(rank=rank, path=path, line=line, name=name, fields=fields)


def _step(event: Event) -> list[ProbeStep]:
    number = event.number("step")
    if number is None:
        return []
    loss, raw = event.number("loss"), event.fields.get("loss")
    finite = event.fields.get("finite") is not False and (raw is None or loss is not None)
    known = {key: event.number(key) for key in (*MEASURED, "micro_batches")}
    known["loss"] = loss
    return [
        ProbeStep(
            rank=event.rank,
            path=event.path,
            line=event.line,
            step=int(number),
            finite=finite,
            interrupted=event.fields.get("interrupted") is True,
            **known,
        )
    ]
