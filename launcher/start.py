"""From a stage file to a verdict: prepare, run, finish. Every way to start a stage goes through here."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import attempt as attempts
from launcher import (
    cache_folders,
    caches,
    check,
    claim,
    command,
    config,
    contents,
    devices,
    doctor,
    earlier,
    evidence,
    keeper,
    machine,
    manifest,
    measures,
    page,
    plan,
    rendezvous,
    repeat,
    resume,
    rundir,
    runner,
    sbatch,
    slurm,
)  # fmt: skip
from launcher import stage as stages
from launcher.attempt import Attempt
from launcher.command import Command
from launcher.devices import Devices, Look
from launcher.errors import Exit, Finding, InvalidConfig, NotReady, UsageError, errors
from launcher.machine import Trainer
from launcher.plan import Plan
from launcher.redaction import redact
from launcher.rendezvous import Rendezvous
from launcher.rundir import RunFolder
from launcher.upstream import Locator


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One command line: which stage (None: as the file says), from which file, on what.

    `elsewhere`: other machines will train, whose GPUs this one cannot look at. `folder` is the run that
    is to go on, where that is settled.
    """

    stage: str | None
    config: Path
    overrides: Sequence[str] = ()
    gpus: int | None = None
    nodes: int = 1
    python: Path | None = None
    checkout: Path | None = None
    allow_unpinned: bool = False
    strict: bool = False
    probe: bool = True
    devices: str | None = None
    node_rank: int | None = None
    main_address: str | None = None
    elsewhere: bool = False
    folder: RunFolder | None = None
    fresh: bool = False
    allowed: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads, but for the folder and the names of machines."""
        skipped = {"folder", "node_rank", "main_address", "fresh"}
        named = [name for name in self.__dataclass_fields__ if name not in skipped]
        return {name: _plain(getattr(self, name)) for name in named}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, config: Path) -> Request:
        """The same request of a resolved stage file, whose overrides are in it."""
        given = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        paths = {k: Path(given[k]) for k in ("python", "checkout") if given.get(k)}
        return cls(**{**given, **paths, "config": config, "overrides": ()})


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    return value if isinstance(value, str | int | None) else list(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything decided, nothing started. `here` is which of several machines this is."""

    request: Request
    plan: Plan
    command: Command
    trainer: Trainer
    folder: RunFolder
    attempt: int
    output: Path | None
    caches: tuple[caches.Cache, ...] = ()
    devices: Devices | None = None
    warnings: tuple[Finding, ...] = ()
    here: Rendezvous | None = None
    decision: resume.Decision = field(default_factory=resume.Decision)
    asked: Path | None = None
    holds: tuple[dict[str, Any], ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Warnings and notes of validation, of planning, and about this machine."""
        return (*self.plan.stage.findings, *self.plan.findings, *self.warnings)

    def as_json(self) -> dict[str, object]:
        """What a dry run answers, tokens taken out."""
        shown = self.command.redacted()
        return {
            "plan": {"gpus": [self.plan.as_json()]},
            "upstream": self.plan.stage.upstream.as_json(),
            "derived": {name: d.value for name, d in self.plan.derived.items()},
            "argv": list(shown.argv),
            "env": dict(shown.env),
            "cwd": str(shown.cwd),
            "run": str(self.folder.path),
        }

    def of_resume(self) -> dict[str, Any]:
        """What the manifest keeps for the next attempt."""
        return {
            "resume": self.decision.as_json(),
            "asked_output": None if self.asked is None else str(self.asked),
            "contents": list(self.holds),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A valid stage, the Python that trains it, and the GPUs of this machine that it asks for."""

    stage: stages.Stage
    trainer: Trainer
    gpus: int
    named: tuple[str, ...] | None
    seen: Look | None

    def chosen(self) -> Devices:
        """The GPUs that it would get now; see `devices.choose` for how that is refused."""
        return devices.choose(self.gpus, self.named, self.seen or devices.look(os.environ))


def ask(request: Request, *, running: bool) -> Asked:
    """Load and judge a stage file. Raises InvalidConfig, NotReady or UsageError."""
    loaded = config.load(request.config, request.overrides)
    backend, checkout = stages.backend_of(loaded), None
    locator = Locator(checkout=request.checkout, allow_unpinned=request.allow_unpinned)
    if backend == "open_instruct":
        checkout = locator.find(backend).root
    trainer = machine.find_trainer(request.python, checkout)
    locator.search = trainer.path
    judged = stages.judge(loaded, stage=request.stage, locator=locator, running=running)
    stage = stages.validate(judged, strict=request.strict)
    if not request.probe:
        stage = replace(stage, options=replace(stage.options, probe=None))
    named, count = devices.named(request.devices), request.gpus
    if named is not None and count is None:
        count = len(named)
    count = count if count is not None else stage.options.gpus
    # eight cards can take ten seconds to answer: they are asked only where the answer counts
    # and not where other machines will train
    wanted = not request.elsewhere and (running or (count is None and backend == "trl"))
    seen = devices.look(os.environ) if wanted else None
    return Asked(
        stage=stage, trainer=trainer, gpus=_gpus(count, stage, seen), named=named, seen=seen
    )


def prepare(request: Request, *, running: bool) -> Prepared:
    """Load, check, plan; for a run also ask whether the machine is ready for it.

    Raises InvalidConfig, NotReady or UsageError. Writes nothing but, for a run, its empty folder, and
    the memory of fingerprints.
    """
    asked = ask(request, running=running)
    stage, trainer, gpus = asked.stage, asked.trainer, asked.gpus
    here = None
    if running and not request.elsewhere:
        here = rendezvous.find(request.nodes, request.node_rank, request.main_address, os.environ)
    chosen = asked.chosen() if running and not request.elsewhere else None
    warnings: tuple[Finding, ...] = ()
    root = rundir.runs_root()
    # what launch derives does not move an output that the stage file names
    given = stage.entry.names.output in stage.args
    named = stage.backend.output_folder(stage.values) if given else None
    wanted = None if named is None else named.absolute()
    placed = resume.place(stage, wanted, rundir.newest_first(root), fresh=request.fresh)
    if request.folder is None:
        folder, attempt = rundir.choose(
            stage.options.stage, stage.name, placed.output, root, reserve=running,
            rank=0 if here is None else here.rank,
        )  # fmt: skip
    else:
        folder = request.folder
        attempt = max(one.attempts() for one in folder.nodes()) + 1
    before = folder if attempt > 1 else None
    decision, holds = resume.Decision(), list[dict[str, Any]]()
    try:
        made = plan.make(stage, gpus=gpus, nodes=request.nodes, output=folder.path / "model")
        made = resume.applied(made, placed.derived)
        made = _in_situation(made, trainer, before, running=running)
        if running:
            # about the machine, not the stage file: --strict leaves them warnings
            warnings = doctor.require_ready(made, trainer, chosen, elsewhere=request.elsewhere)
        held = caches.derive(made, trainer.packages, running=running)
        made = caches.applied(made, held)
        if running:
            last = plan.output_folder(made)
            where = None if last is None else last.absolute()
            said = caches.findings(made, held, output=where)
            holds = contents.of_plan(made)
            decision = resume.judge(
                made, output=where, folder=before, trainer=trainer, caches=held, now=holds,
                manifest=None if before is None else rundir.read_manifest(before),
                allowed=request.allowed,
            )  # fmt: skip
            # what a rule says of the output folder, the run's own record says better
            known = (*made.findings, *said)
            known = tuple(f for f in known if before is None or f.code not in resume.SUPERSEDED)
            made = resume.applied(made, decision.derived)
            made = replace(made, findings=(*known, *decision.findings))
        if errors(made.findings, strict=request.strict):
            raise InvalidConfig(made.findings)
    except BaseException:
        rundir.release(folder)
        raise
    built = command.build(
        made,
        trainer,
        folder.path,
        environ=os.environ,
        caches=caches.environment(held),
        devices=None if chosen is None or not gpus else chosen.env(),
    )
    final = plan.output_folder(made)
    return Prepared(
        request=request, here=here, plan=made, command=built, trainer=trainer, folder=folder, attempt=attempt,
        output=None if final is None else final.absolute(), caches=held, devices=chosen,
        warnings=warnings, decision=decision, asked=wanted, holds=tuple(holds),
    )  # fmt: skip


def _in_situation(made: Plan, trainer: Trainer, before: RunFolder | None, *, running: bool) -> Plan:
    """The plan with what this machine, its packages and the output folder have to say of it."""
    if not running:
        # a dry run may be made anywhere: what lies here and is installed here says nothing
        return made
    output = plan.output_folder(made)
    told = None if before is None else rundir.read_manifest(before)
    found = doctor.situation(made, trainer, None if output is None else output.absolute(), told)
    return replace(made, findings=(*made.findings, *found))


def _gpus(gpus: int | None, stage: stages.Stage, seen: Look | None) -> int:
    """`--gpus`, `--devices` or `num_gpus` of the file, or for TRL whatever single device is here."""
    if gpus is None and seen is not None and stage.options.backend == "trl":
        gpus = min(1, len(seen.visible))
    if gpus is None or gpus < 0:
        raise UsageError(
            Finding(
                severity="error", layer="launch", code="no-gpus", message="how many GPUs?",
                help="--gpus 8, or --gpus 0 for the CPU",
            )
        )  # fmt: skip
    return gpus


def begin(
    prepared: Prepared, *, on_finish: Sequence[str] = (), allow_unproven: bool = False
) -> tuple[RunFolder, Attempt]:
    """Make the run folder and start the keeper in it; training runs when this returns.

    The folder is that of this machine: where others train too, only the first one's is the run's own.
    Raises NotReady where another run holds the place, or where training cannot be started.
    """
    here = prepared.here
    attempt = _attempt(prepared, on_finish, allow_unproven)
    if here is not None:
        filled = rendezvous.filled(attempt.argv, here)
        attempt = replace(attempt, argv=filled, rank=here.rank)
    folder = prepared.folder.node(attempt.rank)
    try:
        rendezvous.check_port(here)
        if not attempt.rank:
            _require_not_queued(folder)
        with claim.claimed(
            folder, attempt.number, None if attempt.rank else prepared.output
        ) as lock:
            if not attempt.rank or not prepared.folder.manifest.exists():
                _make(prepared, attempt)
            attempt.write(folder)
            _keep(folder, attempt, lock, prepared.devices or Devices())
    finally:
        # the folder that was reserved, if nothing came of it
        rundir.release(folder)
        rundir.release(prepared.folder)
    return folder, attempt


def _require_not_queued(folder: RunFolder) -> None:
    """A job that waits, or runs elsewhere, has the attempt already."""
    waiting = slurm.job(folder)
    if waiting is not None and slurm.active(waiting):
        raise NotReady(
            Finding(
                severity="error", layer="launch", code="run-is-live", file=str(folder.path),
                message=f"the run {folder.path.name} is Slurm's job {waiting.id}",
                help=f"wait for it, or launch stop {folder.path.name}",
            )
        )  # fmt: skip


def queue(
    prepared: Prepared, options: sbatch.Options, *, on_finish: Sequence[str] = (),
    allow_unproven: bool = False,
) -> slurm.Job:  # fmt: skip
    """Make the run folder and hand it to Slurm, which runs `launch exec` on every node.

    Raises NotReady where another run holds the place, or with what sbatch said.
    """
    folder, planned = prepared.folder, prepared.plan
    attempt = _attempt(prepared, on_finish, allow_unproven)
    try:
        with claim.claimed(folder, attempt.number, prepared.output):
            _require_not_queued(folder)
            _make(prepared, attempt)
            attempt.write(folder)
            text = sbatch.script(
                name=folder.path.name, folder=folder.path, launch=ours(), nodes=planned.nodes,
                gpus=planned.gpus, options=options,
            )  # fmt: skip
            return slurm.submit(
                folder, text, nodes=planned.nodes, options=options, environ=os.environ
            )
    finally:
        rundir.release(folder)


def ours() -> list[str]:
    """The argv that stands for `launch` wherever this folder and this Python can be reached."""
    path = Path(__file__).resolve().parent.parent
    return ["env", f"PYTHONPATH={path}", sys.executable, "-m", "launcher.cli"]


def _make(prepared: Prepared, attempt: Attempt) -> None:
    folder = prepared.folder
    resume.set_aside(prepared.decision, attempt.number)
    earlier.keep_manifest(folder)
    rundir.create(
        folder, attempt.number, prepared.plan, prepared.command, prepared.trainer, prepared.output,
        [one.as_json() for one in prepared.caches],
        devices=prepared.devices.as_json() if prepared.devices else None,
        warnings=prepared.warnings, more=prepared.of_resume(),
    )  # fmt: skip
    with contextlib.suppress(OSError):
        repeat.write_stage_file(prepared.plan, folder)


def _attempt(prepared: Prepared, on_finish: Sequence[str], allow_unproven: bool) -> Attempt:
    planned, options = prepared.plan, prepared.plan.stage.options
    return Attempt(
        number=prepared.attempt, argv=prepared.command.argv, env=prepared.command.env,
        environ=dict(os.environ), cwd=str(prepared.command.cwd), stage=options.stage,
        backend=options.backend, title=planned.title, total=planned.steps, world=planned.processes,
        nodes=planned.nodes, output=None if prepared.output is None else str(prepared.output),
        caches=tuple(one.as_json() for one in prepared.caches), devices=_ids(prepared.devices),
        config=str(planned.stage.config.path), on_finish=tuple(on_finish),
        allow_unproven=allow_unproven,
        request={**prepared.request.as_json(), "gpus": planned.gpus},
    )  # fmt: skip


def differences(prepared: Prepared, old: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What is not as it was when the run with this manifest began."""
    cached = [one.as_json() for one in prepared.caches]
    new = manifest.manifest(
        prepared.attempt, rundir.now(), prepared.plan, prepared.command, prepared.trainer,
        prepared.output, cached,
    )  # fmt: skip
    return tuple(repeat.differences(old, new))


def prepare_again(folder: RunFolder) -> Attempt:
    """Have an attempt wait in a run folder that goes on where the last one ended: a job came back.

    Does nothing while the one that waits has begun on no machine, or when the run is finished. Raises
    what `prepare` raises, and NotReady where the job's time was up without a further checkpoint.
    """
    waiting = attempts.read(folder)
    begun = max(one.attempts() for one in folder.nodes())
    if begun < waiting.number:
        return waiting
    os.chdir(waiting.cwd)
    os.environ.update(waiting.environ_of_the_shell(os.environ))
    again = Request.from_json(waiting.request, config=folder.stage_file)
    cut_short, reached = slurm.cut_short(folder), _reached(folder)
    prepared = prepare(replace(again, folder=folder), running=True)
    if prepared.decision.kind == "finished":
        return waiting
    if cut_short and prepared.decision.step <= reached:
        raise NotReady(_no_progress(folder, reached))
    with claim.claimed(folder, prepared.attempt, prepared.output):
        attempt = _attempt(prepared, waiting.on_finish, waiting.allow_unproven)
        attempt = replace(attempt, environ=waiting.environ, request=waiting.request)
        _make(prepared, attempt)
        attempt.write(folder)
    return attempt


def _reached(folder: RunFolder) -> int:
    """The step that the last attempt began at."""
    told = rundir.read_manifest(folder).get("resume")
    step = told.get("step") if isinstance(told, dict) else 0
    return step if isinstance(step, int) else 0


def _no_progress(folder: RunFolder, step: int) -> Finding:
    return Finding(
        severity="error", layer="launch", code="no-progress", file=str(folder.path),
        message=f"the job's time was up before a checkpoint behind step {step}: it would never end",
        help="ask Slurm for more time, or save checkpoints more often",
    )  # fmt: skip


def execute(
    folder: RunFolder, rank: int | None = None, address: str | None = None
) -> tuple[RunFolder, Attempt]:
    """Start the attempt that waits in a run folder, unless it has begun: what `launch exec` does.

    Returns the folder of this machine. Raises NotReady where none waits there, or another run holds
    the place; UsageError where it is not known which of several machines this is.
    """
    attempt = attempts.read(folder)
    here = rendezvous.find(attempt.nodes, rank, address, os.environ)
    if here is not None:
        filled = rendezvous.filled(attempt.argv, here)
        attempt = replace(attempt, argv=filled, rank=here.rank, token=secrets.token_hex(8))
        folder = folder.node(here.rank)
        folder.path.mkdir(exist_ok=True)
        attempt.write(folder)
    if folder.attempts() < attempt.number:
        rendezvous.check_port(here)
        # the first machine asks whether the output folder is free: it is the same for all
        output = None if attempt.output is None or attempt.rank else Path(attempt.output)
        with claim.claimed(folder, attempt.number, output) as lock:
            chosen = _again(attempt)
            if chosen.refused:
                raise NotReady(errors(chosen.findings))
            _keep(folder, attempt, lock, chosen)
    return folder, attempt


def _ids(chosen: Devices | None) -> tuple[str, ...]:
    return () if chosen is None else tuple(slot.id for slot in chosen.slots)


def _again(attempt: Attempt) -> Devices:
    """The GPUs that an attempt was given when it was prepared, if they still are to be had."""
    if not attempt.devices:
        return Devices()
    return devices.choose(None, attempt.devices, devices.look(attempt.environ))


def _keep(folder: RunFolder, attempt: Attempt, lock: int | None, chosen: Devices) -> None:
    held = tuple(caches.from_json(one) for one in attempt.caches)
    config_path = None if attempt.config is None else Path(attempt.config)
    with (
        cache_folders.held(held, folder, attempt.number, config=config_path) as locks,
        devices.held(chosen, folder.path) as gpu_locks,
    ):
        held_open = (*locks, *gpu_locks, *(() if lock is None else (lock,)))
        keeper.spawn(folder, attempt.number, held_open)


def discard_spoiled(attempt: Attempt) -> None:
    """Take away what the run cached of data that were edited between our look and upstream's.

    It belongs neither to what they were nor to what they are.
    """
    before = tuple(caches.from_json(one) for one in attempt.caches)
    cache_folders.discard_spoiled(before, [caches.read_again(one) for one in before])


def of_a_further_machine(folder: RunFolder, attempt: Attempt) -> Exit:
    """The exit code where the first of several machines judges."""
    ended = runner.recorded(folder, attempt.number)
    if ended is not None and ended.stopped is not None:
        return Exit.INTERRUPTED
    return Exit.TRAINING if ended is None or ended.returncode else Exit.OK


def conclusion(folder: RunFolder, attempt: Attempt) -> tuple[check.Verdict, Exit]:
    """The verdict and the exit code of an attempt that is over; judged now where nobody has yet."""
    ended = runner.recorded(folder, attempt.number)
    known = keeper.judged(folder, attempt.number)
    told = check.from_json(rundir.read_json(folder.verdict)) if known else None
    verdict = told or finish(folder)
    return verdict, exit_code(ended, verdict, allow_unproven=attempt.allow_unproven)


def judge_log(path: Path) -> check.Verdict:
    """What a console log can prove by itself. Raises NotReady where it cannot be read."""
    try:
        found = evidence.read_log(path)
    except OSError as error:
        raise NotReady(
            Finding(
                severity="error", layer="launch", code="unreadable-file", file=str(path),
                message=f"cannot be read: {error.strerror}",
            )
        ) from None  # fmt: skip
    assert found.log is not None
    return redact(check.judge(found.stage, check.expected_from_log(found.log), found))


def finish(folder: RunFolder) -> check.Verdict:
    """Judge a run folder; write verdict.json, metrics.jsonl and report.html where that is possible."""
    told = rundir.read_manifest(folder)
    found = earlier.evidence_of(folder)
    # a token that training printed must not get from the log into what is shown and kept
    seen = check.judge(told.get("stage"), told.get("expect") or {}, found)
    judged = redact(seen, attempts.tokens(folder))
    # a read-only or full disk costs these files, not the verdict
    with contextlib.suppress(OSError):
        rundir.write_json(folder.verdict, judged.as_json())
        rows = measures.merged_rows(
            measures.metrics_rows(evidence.read_run(folder.path, attempt=number))
            for number in range(1, folder.attempts() + 1)
        )
        rundir.write_text(folder.metrics, "".join(rundir.json_line(row) for row in rows))
        rundir.write_text(folder.report, page.render(told, judged, found, folder.path))
    return judged


def exit_code(ended: runner.Exit | None, verdict: check.Verdict, *, allow_unproven: bool) -> Exit:
    """The documented exit code of a run that ended so, or of a verdict alone."""
    if ended is not None and ended.stopped is not None:
        return Exit.INTERRUPTED
    if ended is not None and ended.returncode and verdict.stopped is None:
        return Exit.TRAINING
    if verdict.status == "pass" or (verdict.status == "unproven" and allow_unproven):
        return Exit.OK
    return Exit.VERDICT


def unpinned_note(folder: RunFolder) -> tuple[Finding, ...]:
    """What a verdict has to say of a run on another commit than the pin."""
    source = rundir.read_manifest(folder).get("upstream") or {}
    if source.get("pinned", True):
        return ()
    return (
        Finding(
            severity="warning", layer="launch", code="unpinned-checkout", file=source.get("root"),
            message=f"this run used {source.get('version')}, the pin is {source.get('pin')}",
        ),
    )  # fmt: skip
