"""The evaluation of a stage's model: planned beside the stage, run after it, judged by what it
expects.

It is a process tree like a training's: in a session of its own, writing its own log, ended as a
whole by a signal to the pipeline, by `launch stop` of the stage's run, or when its time is up. What
it leaves lies in the run folder of the stage, where the verdict and the page of the run find it.
"""

import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from launcher import files, redaction
from launcher.artifacts import fingerprint
from launcher.config.evaluation import Evaluation
from launcher.config.pipeline import Link
from launcher.errors import Exit, Finding, NotReady, launch_finding
from launcher.lazy_dataclass import dataclass
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
    """An evaluation with everything that its placeholders stand for; `run` is the run folder of its
    stage.
    """

    link: Link
    spec: Evaluation
    run: RunFolder
    model: Path
    gpus: int
    python: Path
    redactor: Redactor = field(default_factory=redaction.find_process_secrets)

    @property
    def folder(self) -> RunFolder:
        return records.find_evaluation_folder(self.run)

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

    def as_json(self) -> dict[str, object]:
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
        hours = self.spec.timeout_s / 3600
        yield f"# evaluation of {self.link.name}, at most {hours:g} h{expected}"
        yield " ".join(map(shlex.quote, self.redactor.redact(self.argv)))

    def environment(self, chosen: Devices | None) -> dict[str, str]:
        """The variables of the command.

        It gets the stage's GPUs alone, the programs of the trainer's Python before others of the
        same name, and no code out of the current folder.
        """
        path = str(self.python.parent)
        inherited = isolation.isolate(os.environ).get("PATH")
        if inherited:
            path += os.pathsep + inherited
        environ = {**isolation.list_changes(os.environ), "PATH": path, "PYTHONUNBUFFERED": "1"}
        if not self.gpus:
            environ[devices.VARIABLE] = ""
        elif chosen is not None:
            environ |= chosen.env()
        return environ


def plan_evaluation(link: Link, prepared: Prepared, model: Path) -> PlannedEvaluation | None:
    """The evaluation of a stage whose model goes to `model`; None if its pipeline has none."""
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


def find_missing_program(evaluation: PlannedEvaluation) -> Iterator[Finding]:
    """An error if the program of an evaluation is not on this machine."""
    name = evaluation.argv[0]
    if shutil.which(name, path=evaluation.environment(None)["PATH"]) is not None:
        return
    message = f"the program of the evaluation, `{evaluation.redactor.redact(name)}`, "
    message += f"is neither in {evaluation.python.parent} nor on PATH"
    help = "install it in the trainer's Python, or name its path"
    place = _locate_key(evaluation.link, "command")
    yield launch_finding("error", "no-eval-program", message, help, **place)


def _locate_key(link: Link, name: str) -> dict[str, Any]:
    """A key of `eval` with its place in the pipeline file, as a finding has them."""
    key = f"eval.{name}"
    return {"key": key, **link.origin(key).place}


def evaluate(
    evaluation: PlannedEvaluation, chosen: Devices | None, attempt: int
) -> EvaluationRecord:
    """Run an evaluation, or take the finished one of the same command and model; its record.

    `attempt` is that of the training. INT and TERM end it, and the record says `interrupted`.
    Raises NotReady if it cannot be started, if its folder cannot be written, or if another process
    evaluates the same model.
    """
    folder = evaluation.folder
    message = f"the model of {evaluation.link.name} is being evaluated"
    taken = launch_finding("error", "eval-running", message, file=str(folder.path))
    with rundir.writing(folder.path):
        folder.path.mkdir(rundir.OWN, parents=True, exist_ok=True)
    with locks.hold_exclusive(folder.path / ".lock", taken=taken):
        if runner.is_alive(folder.path):
            # left by a pipeline that was killed: nobody reads its result
            runner.end_orphans(folder, runner.GRACE_S, max(1, folder.attempts()))
        key = _compute_key(evaluation)
        earlier = _find_measurement(evaluation, key)
        if earlier is not None:
            gates = _judge_again(earlier, evaluation)
            return _write_record(evaluation, replace(earlier, attempt=attempt, gates=gates))
        return _run_command(evaluation, chosen, attempt, key)


def is_finished(evaluation: PlannedEvaluation) -> bool:
    """Whether the same command has measured the same model before."""
    return _find_measurement(evaluation, _compute_key(evaluation)) is not None


def _find_measurement(evaluation: PlannedEvaluation, key: str) -> EvaluationRecord | None:
    record = records.read_evaluation(evaluation.run)
    if record is not None and record.state == "measured" and record.key == key:
        return record
    return None


def _compute_key(evaluation: PlannedEvaluation) -> str:
    model = fingerprint.fingerprint_model(str(evaluation.model)).digest
    tokenizer = fingerprint.fingerprint_tokenizer(str(evaluation.model)).digest
    place = evaluation.metrics
    pattern = None if place is None else place.pattern
    # where the model lies is no part of what was measured, but its words are those of the command
    return experiment.digest_values([evaluation.argv, pattern, model, tokenizer])


def _run_command(
    evaluation: PlannedEvaluation, chosen: Devices | None, attempt: int, key: str
) -> EvaluationRecord:
    folder = evaluation.folder
    number = folder.attempts() + 1
    timeout_s = evaluation.spec.timeout_s
    record = EvaluationRecord(
        key=key,
        attempt=attempt,
        state="running",
        command=evaluation.argv,
        model=str(evaluation.model),
        gpus=evaluation.gpus,
        timeout_s=timeout_s,
        began=rundir.format_utc_now(),
        log=str(folder.console(number)),
    )
    _write_record(evaluation, record)
    place = evaluation.metrics
    before = None if place is None else scores.take_snapshot(place)
    environ = evaluation.environment(chosen)
    command = Command(argv=evaluation.argv, env=environ, cwd=Path.cwd())
    clock = _Clock(timeout_s)
    try:
        with devices.lock_slots(chosen or Devices(), evaluation.run.path) as descriptors:
            ended = runner.run(
                command, folder, number, descriptors, stands_still=lambda _: clock.is_up()
            )
    except NotReady as error:
        message = str(error.findings[0].message)
        crashed = replace(record, state="crashed", ended=rundir.format_utc_now(), reason=message)
        _write_record(evaluation, crashed)
        raise
    seconds = round(clock.seconds, 1)
    now = rundir.format_utc_now()
    record = replace(record, ended=now, seconds=seconds, returncode=ended.returncode)
    if clock.rang:
        reason = f"its time was up after {timeout_s:g} s; log: {record.log}"
        record = replace(record, state="timed_out", reason=reason)
    elif ended.stopped is not None:
        record = replace(record, state="interrupted", reason="it was stopped")
    elif ended.returncode:
        reason = f"the command ended with exit code {ended.returncode}; log: {record.log}"
        record = replace(record, state="crashed", reason=reason)
    elif place is None or before is None:
        record = replace(record, state="measured")
    else:
        record = _add_scores(evaluation, record, before, place)
    return _write_record(evaluation, record)


def _add_scores(
    evaluation: PlannedEvaluation,
    record: EvaluationRecord,
    before: scores.Snapshot,
    place: MetricsPlace,
) -> EvaluationRecord:
    try:
        measured = scores.read_scores(scores.find_written_since(before, place))
    except UnreadableScores as error:
        return replace(record, state="unreadable", reason=str(error))
    return replace(
        record,
        state="measured",
        metrics_file=str(measured.path),
        metrics=measured.numbers,
        main=dict(measured.main),
        gates=scores.judge_scores(measured, evaluation.spec.expect),
    )


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


def _judge_again(
    record: EvaluationRecord, evaluation: PlannedEvaluation
) -> tuple[records.GateResult, ...]:
    """The gates of a finished evaluation as they are now: they may have been changed since."""
    if record.metrics_file is None:
        return ()
    path = Path(record.metrics_file)
    try:
        # the file itself also holds what is not a number
        measured = scores.read_scores(path)
    except UnreadableScores:
        measured = scores.Scores(path=path, values=record.metrics, main=record.main)
    return scores.judge_scores(measured, evaluation.spec.expect)


def _write_record(evaluation: PlannedEvaluation, record: EvaluationRecord) -> EvaluationRecord:
    content = evaluation.redactor.redact(record.as_json())
    with rundir.writing(evaluation.folder.path):
        files.write_json(records.record_file(evaluation.run), content)
    return record


def decide_exit_code(record: EvaluationRecord) -> Exit:
    if record.state != "measured":
        return _EXITS.get(record.state, Exit.TRAINING)
    if record.passed:
        return Exit.OK
    return Exit.VERDICT


_FAULTS: Mapping[State, tuple[str, str]] = {
    "crashed": ("eval-failed", "command"),
    "timed_out": ("eval-failed", "timeout"),
    "unreadable": ("eval-metrics", "metrics"),
}


def list_faults(evaluation: PlannedEvaluation, record: EvaluationRecord) -> list[Finding]:
    """What is wrong with an evaluation, each at its line of the pipeline file."""
    link = evaluation.link
    findings = []
    if record.state == "measured":
        help = f"the numbers: {record.metrics_file}"
        for gate in record.gates:
            if not gate.ok:
                message = f"{link.name}: {gate.reason}"
                place = _locate_key(link, f"expect.{gate.metric}")
                findings.append(launch_finding("error", "eval-gate", message, help, **place))
    elif record.state in _FAULTS:
        code, key = _FAULTS[record.state]
        message = f"the evaluation of {link.name} failed: {record.reason}"
        help = f"its log: {record.log}"
        place = _locate_key(link, key)
        findings.append(launch_finding("error", code, message, help, **place))
    return findings


def describe_ending(name: str, record: EvaluationRecord, *, reused: bool) -> str:
    """One line about the result."""
    if record.state != "measured":
        return f"{name}: evaluation {record.state.replace('_', ' ')}: {record.reason}"
    result = "done"
    if record.gates:
        result = "passed" if record.passed else "failed"
    how = "measured before" if reused else f"measured in {record.seconds:.0f} s"
    line = f"{name}: evaluation {result}, {how}"
    text = summarize(record)
    if text:
        line += f": {text}"
    return line


def summarize(record: EvaluationRecord) -> str:
    """The numbers that gates are on, else the first few tasks'."""
    numbers = []
    for gate in record.gates:
        value = "no number" if gate.value is None else f"{gate.value:.4g}"
        numbers.append(f"{gate.metric} {value} ({gate.expected})")
    if numbers:
        return "; ".join(numbers)
    names = dict(record.main) or {name: name for name in record.metrics}
    for name, full_name in names.items():
        if full_name in record.metrics:
            numbers.append(f"{name} {record.metrics[full_name]:.4g}")
    return "; ".join(numbers[:4])
