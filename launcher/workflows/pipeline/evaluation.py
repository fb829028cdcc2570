"""The evaluation of a stage's model: planned beside the stage, run after it, judged by what it expects.

It is a process tree like a training's: in a session of its own, writing its own log, ended as a whole by a signal to
the pipeline, by `launch stop` of the stage's run, or when its time is up. What it leaves lies in the run folder of the
stage, where the verdict and the page of the run find it.
"""

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import files, redaction
from launcher.artifacts import fingerprint
from launcher.config.evaluation import Evaluation
from launcher.config.pipeline import Link
from launcher.errors import Exit, Finding, NotReady, launch_finding
from launcher.machine import devices, isolation, locks
from launcher.machine.devices import Devices
from launcher.planning.prepare import Prepared
from launcher.redaction import Redactor
from launcher.runs import evaluation as records
from launcher.runs import rundir, runner
from launcher.runs.attempt import Command
from launcher.runs.evaluation import EvaluationRecord, State
from launcher.runs.rundir import RunFolder
from launcher.workflows import experiment
from launcher.workflows.pipeline import scores
from launcher.workflows.pipeline.scores import MetricsPlace, UnreadableScores

_EXITS: Mapping[State, Exit] = {
    "crashed": Exit.TRAINING,
    "timed_out": Exit.TRAINING,
    "unreadable": Exit.VERDICT,
    "interrupted": Exit.INTERRUPTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEvaluation:
    """An evaluation with everything that its placeholders stand for; `run` is the run folder of its stage."""

    link: Link
    spec: Evaluation
    run: RunFolder
    model: Path
    gpus: int
    python: Path
    redactor: Redactor = field(default_factory=redaction.of_process)

    @property
    def folder(self) -> RunFolder:
        return records.folder_of(self.run)

    @property
    def values(self) -> dict[str, str]:
        return {
            "model": str(self.model),
            "gpus": str(self.gpus),
            "run": str(self.run.path),
            "folder": str(self.folder.path),
            "stage": self.link.name,
            "python": str(self.python),
        }

    @property
    def argv(self) -> tuple[str, ...]:
        return self.spec.argv(self.values)

    @property
    def metrics(self) -> MetricsPlace | None:
        if self.spec.metrics is None:
            return None
        return MetricsPlace.of(self.spec.metrics, self.folder.path, self.values)

    def as_json(self) -> dict[str, Any]:
        """For the answer of a dry run."""
        place = self.metrics
        return {
            "argv": list(self.redactor.redact(self.argv)),
            "metrics": None if place is None else str(place.path),
            "expect": {name: str(gate) for name, gate in self.spec.expect.items()},
            "timeout_s": self.spec.timeout_s,
            "folder": str(self.folder.path),
        }

    def lines(self) -> Iterator[str]:
        """For people: what is run after the stage, as it can be pasted into a shell."""
        gates = "; ".join(f"{name} {gate}" for name, gate in self.spec.expect.items())
        expected = f", expects {gates}" if gates else ""
        yield f"# evaluation of {self.link.name}, at most {self.spec.timeout_s / 3600:g} h{expected}"
        yield " ".join(map(shlex.quote, self.redactor.redact(self.argv)))

    def environment(self, chosen: Devices | None) -> dict[str, str]:
        """The stage's GPUs alone, the programs of the trainer's Python before others of the same name, and no code out
        of the current folder."""
        isolated = isolation.isolated(os.environ)
        path = os.pathsep.join(filter(None, (str(self.python.parent), isolated.get("PATH"))))
        visible = {devices.VARIABLE: ""}
        if self.gpus:
            visible = {} if chosen is None else chosen.env()
        return {**isolation.changes(os.environ), "PATH": path, "PYTHONUNBUFFERED": "1", **visible}


def planned(link: Link, prepared: Prepared, model: Path) -> PlannedEvaluation | None:
    """The evaluation of a stage whose model goes to `model`; None where its pipeline asks for none."""
    if link.evaluation is None:
        return None
    return PlannedEvaluation(
        link=link,
        spec=link.evaluation,
        run=prepared.command_folder,
        model=model,
        gpus=prepared.plan.gpus,
        redactor=prepared.redactor,
        python=prepared.facts.trainer.python,
    )


def missing_program(evaluation: PlannedEvaluation) -> Finding | None:
    """An error where the program of an evaluation is not on this machine."""
    name = evaluation.argv[0]
    path = evaluation.environment(None)["PATH"]
    if shutil.which(name, path=path) is not None:
        return None
    shown = evaluation.redactor.redact(name)
    message = f"the program of the evaluation, `{shown}`, is neither in {evaluation.python.parent} nor on PATH"
    help = "install it in the trainer's Python, or name its path"
    return launch_finding("error", "no-eval-program", message, help, **_place(evaluation.link, "command"))


def _place(link: Link, key: str) -> dict[str, Any]:
    return {"key": f"eval.{key}", **link.origin(f"eval.{key}").place}


def evaluate(evaluation: PlannedEvaluation, chosen: Devices | None, attempt: int) -> EvaluationRecord:
    """Run an evaluation to its end, or take the finished one of the same command and model; returns its record.

    `attempt` is that of the training. INT and TERM end it, and the record says `interrupted`. Raises NotReady where
    it cannot be started, where its folder cannot be written, or where another process evaluates the same model.
    """
    folder = evaluation.folder
    taken = launch_finding(
        "error", "eval-running", f"the model of {evaluation.link.name} is being evaluated", file=str(folder.path)
    )
    with rundir.writing(folder.path):
        folder.path.mkdir(rundir.OWN, parents=True, exist_ok=True)
    with locks.alone(folder.path / ".lock", taken=taken):
        _end_leftovers(folder)
        key = _key_of(evaluation)
        earlier = records.read(evaluation.run)
        if earlier is not None and earlier.key == key and earlier.state == "measured":
            record = replace(earlier, attempt=attempt)
            return _written(evaluation, _with_gates(record, evaluation))
        return _started(evaluation, chosen, attempt, key)


def is_finished(evaluation: PlannedEvaluation) -> bool:
    """Whether the same command has measured the same model before."""
    earlier = records.read(evaluation.run)
    return earlier is not None and earlier.state == "measured" and earlier.key == _key_of(evaluation)


def _key_of(evaluation: PlannedEvaluation) -> str:
    model = fingerprint.of_model(str(evaluation.model)).digest
    tokenizer = fingerprint.of_tokenizer(str(evaluation.model)).digest
    place = evaluation.metrics
    # where the model lies is no part of what was measured, but its words are those of the command
    return experiment.key_of([evaluation.argv, None if place is None else place.pattern, model, tokenizer])


def _end_leftovers(folder: RunFolder) -> None:
    """End what an evaluation left running whose pipeline was killed: nobody reads its result."""
    if runner.alive(folder.path):
        runner.end_orphans(folder, runner.GRACE_S, max(1, folder.attempts()))


def _started(evaluation: PlannedEvaluation, chosen: Devices | None, attempt: int, key: str) -> EvaluationRecord:
    folder = evaluation.folder
    number = folder.attempts() + 1
    log = folder.console(number)
    record = EvaluationRecord(
        key=key,
        attempt=attempt,
        state="running",
        command=evaluation.argv,
        model=str(evaluation.model),
        gpus=evaluation.gpus,
        timeout_s=evaluation.spec.timeout_s,
        began=rundir.now(),
        log=str(log),
    )
    _written(evaluation, record)
    place = evaluation.metrics
    before = None if place is None else scores.snapshot(place)
    command = Command(argv=evaluation.argv, env=evaluation.environment(chosen), cwd=Path.cwd())
    clock = _Clock(evaluation.spec.timeout_s)
    try:
        with _holding(chosen, evaluation.run) as descriptors:
            ended = runner.run(command, folder, number, descriptors, stands_still=lambda _: clock.is_up())
    except NotReady as error:
        reason = str(error.findings[0].message)
        _written(evaluation, replace(record, state="crashed", ended=rundir.now(), reason=reason))
        raise
    record = replace(record, ended=rundir.now(), seconds=round(clock.seconds, 1), returncode=ended.returncode)
    if clock.rang:
        reason = f"its time was up after {evaluation.spec.timeout_s:g} s; log: {log}"
        return _written(evaluation, replace(record, state="timed_out", reason=reason))
    if ended.stopped is not None:
        return _written(evaluation, replace(record, state="interrupted", reason="it was stopped"))
    if ended.returncode:
        reason = f"the command ended with exit code {ended.returncode}; log: {log}"
        return _written(evaluation, replace(record, state="crashed", reason=reason))
    record = replace(record, state="measured")
    if place is None or before is None:
        return _written(evaluation, record)
    try:
        found = scores.read(scores.written_since(before, place))
    except UnreadableScores as error:
        return _written(evaluation, replace(record, state="unreadable", reason=str(error)))
    record = replace(record, metrics_file=str(found.path), metrics=found.numbers, main=dict(found.main))
    return _written(evaluation, replace(record, gates=scores.judge(found, evaluation.spec.expect)))


class _Clock:
    """How long an evaluation takes, and whether that was longer than it may."""

    def __init__(self, limit_s: float) -> None:
        self.began = time.monotonic()
        self.limit_s = limit_s
        self.rang = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def is_up(self) -> bool:
        self.rang = self.rang or self.seconds > self.limit_s
        return self.rang


@contextlib.contextmanager
def _holding(chosen: Devices | None, run: RunFolder) -> Iterator[tuple[int, ...]]:
    """Keep other runs away from the GPUs meanwhile; the training of this run may be about to let go of them."""
    if chosen is None or not chosen.slots:
        yield ()
        return
    with devices.lock_slots(chosen, run.path) as descriptors:
        yield descriptors


def _with_gates(record: EvaluationRecord, evaluation: PlannedEvaluation) -> EvaluationRecord:
    """A finished evaluation by what is expected of it now: that may have been changed since."""
    if record.metrics_file is None:
        return replace(record, gates=())
    kept = scores.Scores(path=Path(record.metrics_file), values=record.metrics, main=record.main)
    with contextlib.suppress(UnreadableScores):
        # the file itself also holds what is not a number
        kept = scores.read(kept.path)
    return replace(record, gates=scores.judge(kept, evaluation.spec.expect))


def _written(evaluation: PlannedEvaluation, record: EvaluationRecord) -> EvaluationRecord:
    with rundir.writing(evaluation.folder.path):
        files.write_json(records.record_file(evaluation.run), evaluation.redactor.redact(record.as_json()))
    return record


def exit_code(record: EvaluationRecord) -> Exit:
    if record.state == "measured":
        return Exit.OK if record.passed else Exit.VERDICT
    return _EXITS.get(record.state, Exit.TRAINING)


def faults(evaluation: PlannedEvaluation, record: EvaluationRecord) -> list[Finding]:
    """What is wrong with an evaluation, each at its line of the pipeline file; nothing of one that was interrupted."""
    link = evaluation.link
    name = link.name
    if record.state == "measured":
        help = f"the numbers: {record.metrics_file}"
        return [
            launch_finding(
                "error", "eval-gate", f"{name}: {gate.reason}", help, **_place(link, f"expect.{gate.metric}")
            )
            for gate in record.gates
            if not gate.ok
        ]
    codes: dict[State, tuple[str, str]] = {
        "crashed": ("eval-failed", "command"),
        "timed_out": ("eval-failed", "timeout"),
        "unreadable": ("eval-metrics", "metrics"),
    }
    if record.state not in codes:
        return []
    code, key = codes[record.state]
    message = f"the evaluation of {name} failed: {record.reason}"
    return [launch_finding("error", code, message, f"its log: {record.log}", **_place(link, key))]


def ending(name: str, record: EvaluationRecord, *, reused: bool) -> str:
    """One line about what came of it."""
    if record.state != "measured":
        return f"{name}: evaluation {record.state.replace('_', ' ')}: {record.reason}"
    verb = "measured before" if reused else f"measured in {record.seconds:.0f} s"
    word = "passed" if record.passed else "failed"
    return f"{name}: evaluation {word if record.gates else 'done'}, {verb}{_shown(record)}"


def _shown(record: EvaluationRecord) -> str:
    text = summary(record)
    return f": {text}" if text else ""


def summary(record: EvaluationRecord) -> str:
    """The numbers that gates are on, else the first few tasks'."""
    if record.gates:
        return "; ".join(_of_gate(gate) for gate in record.gates)
    names = dict(record.main) or {name: name for name in record.metrics}
    shown = [f"{name} {record.metrics[full]:.4g}" for name, full in names.items() if full in record.metrics]
    return "; ".join(shown[:4])


def _of_gate(gate: records.GateResult) -> str:
    value = "no number" if gate.value is None else f"{gate.value:.4g}"
    return f"{gate.metric} {value} ({gate.expected})"
