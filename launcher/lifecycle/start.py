"""Whatever was prepared is started, queued, run again, and judged: every start goes through here."""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.cache import folders, inputs, keys
from launcher.errors import NotReady, errors, not_ready
from launcher.lifecycle import manifest, supervisor, tokenising
from launcher.machine import devices, process
from launcher.machine.codec import Misfit
from launcher.machine.devices import Devices
from launcher.paths import MODULE_FLAG, PACKAGE
from launcher.planning.collect import Scope
from launcher.planning.doctor import disk
from launcher.planning.prepare import Prepared, prepare
from launcher.planning.request import Request
from launcher.planning.resume import decision
from launcher.redaction import borrowed
from launcher.runs import attempt as attempts
from launcher.runs import lease, preemption, rendezvous, rundir, runner, slurm, trackers
from launcher.runs.attempt import Attempt
from launcher.runs.record import Json
from launcher.runs.rundir import RunFolder
from launcher.runs.trackers import TrackerRun

SHORTEST_WARNING_S = 120
"""Seconds before the end of a job's time that a run is asked to save: for a step, and what Slurm is late by."""
LONGEST_WARNING_S = 1800


def begin(prepared: Prepared, say: tokenising.Say = lambda _: None, **at_end: Any) -> tuple[RunFolder, Attempt]:
    """Start the keeper of this machine; training runs at return. `at_end` are fields of `Attempt`. Raises NotReady.

    What a script does not tokenise itself is tokenised first, before any GPU is taken; `say` gets a line about it.
    """
    machine = prepared.start.machine
    rendezvous.check_port(machine)
    prepared = _continuing_trackers(prepared)
    with _reserved(prepared) as prepared:
        prepared = tokenising.before_training(prepared, say)
        attempt = _attempt(prepared, **at_end)
        if machine is not None:
            attempt = replace(attempt, argv=rendezvous.filled(attempt.argv, machine), rank=machine.rank)
        folder = prepared.folder.node(attempt.rank)
        if not attempt.rank:
            _require_not_queued(folder)
        output = None if attempt.rank else prepared.output
        with (
            _released(folder),
            runner.lock_run(folder, attempt.number, output) as (granted, locks),
            _taken_back(folder),
        ):
            if not attempt.rank or not prepared.folder.manifest.exists():
                _make(prepared, attempt)
            attempt.write(folder)
            _keep(folder, attempt, granted, locks, prepared.start.devices or Devices())
    return folder, attempt


def _continued_trackers(prepared: Prepared) -> tuple[TrackerRun, ...]:
    """The runs of trackers that a resume goes on with; what begins anew reports to a new one."""
    return trackers.recorded(prepared.folder) if prepared.decision.kind == "resume" else ()


def _continuing_trackers(prepared: Prepared) -> Prepared:
    added = trackers.environment(_continued_trackers(prepared), os.environ)
    if not added:
        return prepared
    command = replace(prepared.command, env={**prepared.command.env, **added})
    return replace(prepared, command=command)


@contextlib.contextmanager
def _reserved(prepared: Prepared) -> Iterator[Prepared]:
    """Make the run folder of a new run, the first thing that a start writes; removed again if nothing begins.

    Yields the same start, in a folder of another name where a start at the same time took the planned one.
    """
    if not prepared.start.target.is_new:
        yield prepared
        return
    folder = rundir.reserve(prepared.folder)
    with _released(folder):
        yield prepared if folder == prepared.folder else prepared.in_folder(folder)


@contextlib.contextmanager
def _released(folder: RunFolder) -> Iterator[None]:
    """Remove a folder that is empty when what is inside has failed."""
    try:
        yield
    except BaseException:
        rundir.release(folder)
        raise


def _require_not_queued(folder: RunFolder) -> None:
    """A job that waits, or runs elsewhere, has the attempt already."""
    waiting = slurm.job(folder)
    if waiting is not None and slurm.state(waiting) is not None:
        message = f"the run {folder.path.name} is Slurm's job {waiting}"
        help = f"wait for it, or launch stop {folder.path.name}"
        raise not_ready("run-is-live", message, help, file=str(folder.path))


def queue(prepared: Prepared, **at_end: Any) -> tuple[RunFolder, str]:
    """Make the run folder and hand it to Slurm, for `launch exec` on every node. Raises NotReady.

    Returns the folder and the job.
    """
    prepared = _continuing_trackers(prepared)
    with _reserved(prepared) as prepared:
        prepared = tokenising.before_training(prepared)
        folder = prepared.folder
        attempt = _attempt(prepared, **at_end)
        with _released(folder), runner.lock_run(folder, attempt.number, prepared.output), _taken_back(folder):
            _require_not_queued(folder)
            _make(prepared, attempt)
            attempt.write(folder)
            job = slurm.submit(folder, batch_script(prepared), os.environ)
    return folder, job


def batch_script(prepared: Prepared) -> str:
    planned, folder = prepared.plan, prepared.command_folder.path
    command, options = [*ours(), "exec", str(folder)], planned.stage.options.slurm
    warning = _warning_s(prepared)
    return slurm.script(folder, command, nodes=planned.nodes, gpus=planned.gpus, options=options, warning_s=warning)


def _warning_s(prepared: Prepared) -> int:
    """Seconds before the end of a job's time that its run is asked to save."""
    if os.environ.get(preemption.GRACE_VARIABLE):
        return math.ceil(preemption.grace(os.environ[preemption.GRACE_VARIABLE])) + slurm.RESERVED_S
    needs = disk.needs(prepared.plan, prepared.output, os.environ)
    save_s = 0.0 if needs is None else preemption.save_seconds(needs.saved.checkpoint)
    return math.ceil(min(LONGEST_WARNING_S, SHORTEST_WARNING_S + 2 * save_s))


def save_and_end(folder: RunFolder) -> bool:
    """What `launch exec --save` does: have the attempt that runs save on all its machines and end.

    Returns whether it has ended on this one within the seconds for a save, and for the stop after that.
    """
    request = runner.StopRequest(attempt=max(1, folder.attempts()), checkpoint=True)
    for node in folder.nodes():
        request.write(node)
    seconds = preemption.grace(os.environ.get(preemption.GRACE_VARIABLE)) + slurm.RESERVED_S / 2
    until = time.monotonic() + seconds
    while runner.keeper_lives(folder) or runner.alive(folder.path):
        if time.monotonic() > until:
            return False
        time.sleep(0.5)
    return True


def ours(module: str | None = None) -> list[str]:
    """The argv that stands for `launch`, or for a module of it, wherever this folder and this Python can be reached.

    By its path: no variable of the environment is needed, and the folder that it is started in is no part of it.
    """
    words = [sys.executable, "-P", str(PACKAGE / "__main__.py")]
    return words if module is None else [*words, MODULE_FLAG, module]


def _make(prepared: Prepared, attempt: Attempt) -> None:
    folder = prepared.folder
    decision.set_aside(prepared.decision, attempt.number)
    if rundir.read_manifest(folder).attempt != attempt.number:
        rundir.keep_manifest(folder)
    record = manifest.manifest(
        attempt.number,
        rundir.now(),
        prepared.plan,
        prepared.command,
        prepared.facts.trainer,
        prepared.output,
        [one.as_json() for one in prepared.start.caches],
        devices=prepared.start.devices.as_json() if prepared.start.devices else None,
        warnings=prepared.warnings,
    )
    for path, text in prepared.command.files.items():
        with rundir.writing(folder.path):
            files.write_text(Path(path), text)
    program = Path(sys.argv[0])
    # None where another program calls launch
    typed = ["launch", *sys.argv[1:]] if program.name == "launch" or program.parent.name == "launcher" else None
    continued: list[Json] = [run.as_json() for run in _continued_trackers(prepared)]
    manifest.create(folder, replace(record, **prepared.for_record(), launch_argv=typed, trackers=continued))
    with contextlib.suppress(OSError):
        restored = {one.what: one.before for one in prepared.decision.changes if one.restored}
        manifest.write_stage_file(prepared.plan, folder, restored)


@contextlib.contextmanager
def _taken_back(folder: RunFolder) -> Iterator[None]:
    """Have a run folder be as it was before, where what was prepared inside does not come to begin."""
    begun, names = folder.attempts(), set(os.listdir(folder.path))
    if names == {folder.lock.name}:
        # that of this start: the run is a new one
        names = set()
    written = [folder.manifest, folder.start, folder.stage_file, folder.deepspeed]
    written += [path for path in folder.path.iterdir() if path.suffix == ".yaml"]
    before = {path: path.read_bytes() for path in written if path.name in names}
    try:
        yield
    except BaseException:
        ignored = (signal.SIGINT, signal.SIGTERM)
        with process.handling(dict.fromkeys(ignored, process.ignore)), contextlib.suppress(OSError):
            if folder.attempts() == begun:
                # first what gives room back, where the disk is full
                for path in folder.path.iterdir():
                    if path.name not in names and not path.is_dir():
                        path.unlink()
                for path, raw in before.items():
                    mode = 0o600 if path == folder.start else 0o666
                    files.write_bytes(path, raw, mode=mode)
        raise


def _attempt(prepared: Prepared, **at_end: Any) -> Attempt:
    planned, options = prepared.plan, prepared.plan.stage.options
    return Attempt(
        number=prepared.attempt,
        argv=prepared.command.argv,
        env=prepared.command.env,
        environ=dict(os.environ),
        cwd=str(prepared.command.cwd),
        stage=options.stage,
        backend=options.backend,
        title=planned.title,
        total=planned.steps,
        world=planned.processes,
        nodes=planned.nodes,
        output=None if prepared.output is None else str(prepared.output),
        caches=tuple(one.as_json() for one in prepared.start.caches),
        devices=() if prepared.start.devices is None else tuple(slot.id for slot in prepared.start.devices.slots),
        config=str(planned.stage.config.path),
        borrowed=borrowed(os.environ),
        request={**prepared.facts.request.as_json(), "gpus": planned.gpus},
        **at_end,
    )


def prepare_again(folder: RunFolder) -> Attempt:
    """Have an attempt wait in a run folder that goes on where the last one ended: a job came back.

    Does nothing while the one that waits has begun on no machine, unless its data or models changed meanwhile, or
    when the run is finished. Raises what `prepare` raises, and NotReady where there is no further checkpoint.
    """
    waiting, last = attempts.read(folder), rundir.read_manifest(folder)
    begun = max(one.attempts() for one in folder.nodes())
    if begun < waiting.number and not inputs.changed(last.contents, Path(waiting.cwd)):
        return waiting
    attempts.require_own(folder)
    os.chdir(waiting.cwd)
    # what the shell had that submitted it and the job lacks
    os.environ.update({**waiting.environ, **os.environ})
    again = Request.from_json(waiting.request, config=folder.stage_file)
    cut_short, reached = slurm.cut_short(folder), last.resumed_step or 0
    prepared = prepare(replace(again, folder=folder), Scope.HOST)
    if prepared.decision.kind == "finished":
        return waiting
    prepared = tokenising.before_training(prepared)
    if cut_short and prepared.decision.step <= reached:
        message = f"the job's time was up before a checkpoint behind step {reached}: it would never end"
        help = "ask Slurm for more time, or save checkpoints more often"
        raise not_ready("no-progress", message, help, file=str(folder.path))
    if prepared.output is not None:
        lease.outlast(prepared.output, folder.path)
    with runner.lock_run(folder, prepared.attempt, prepared.output):
        kept = ("on_finish", "on_finish_s", "allow_unproven", "environ", "request")
        attempt = replace(_attempt(prepared), **{name: getattr(waiting, name) for name in kept})
        _make(prepared, attempt)
        attempt.write(folder)
    return attempt


def execute(folder: RunFolder, rank: int | None = None, address: str | None = None) -> tuple[RunFolder, Attempt]:
    """What `launch exec` does: start the attempt that waits, unless it has begun. Raises NotReady or UsageError."""
    attempt = attempts.read(folder)
    if folder.attempts() < attempt.number:
        attempts.require_own(folder)
    here = rendezvous.find(attempt.nodes, rank, address, os.environ)
    if here is not None:
        argv = rendezvous.filled(attempt.argv, here)
        attempt = replace(attempt, argv=argv, rank=here.rank)
        folder = folder.node(here.rank)
        folder.path.mkdir(rundir.OWN, exist_ok=True)
        attempt.write(folder)
    if folder.attempts() < attempt.number:
        rendezvous.check_port(here)
        # the first machine asks whether the output folder is free: it is the same for all
        output = None if attempt.output is None or attempt.rank else Path(attempt.output)
        with runner.lock_run(folder, attempt.number, output) as (granted, locks):
            # the GPUs that it was given when it was prepared, if they still are to be had
            named = attempt.devices
            chosen = devices.choose(None, named, devices.look(attempt.environ)) if named else Devices()
            if chosen.refused:
                raise NotReady(errors(chosen.findings))
            _keep(folder, attempt, granted, locks, chosen)
    return folder, attempt


def _keep(
    folder: RunFolder, attempt: Attempt, granted: lease.Lease | None, locks: Sequence[int], chosen: Devices
) -> None:
    try:
        caches = tuple(keys.from_json(one) for one in attempt.caches)
    except Misfit as misfit:
        message = f"the caches in {folder.start.name} cannot be read: {misfit}"
        raise not_ready("not-prepared", message, file=str(folder.start)) from None
    config = None if attempt.config is None else Path(attempt.config)
    if granted is not None:
        lease.keep_manifest(granted, rundir.read_manifest(folder))
    with (
        folders.lock(caches, folder, attempt.number, config=config) as cache_locks,
        devices.lock_slots(chosen, folder.path) as gpu_locks,
    ):
        supervisor.spawn(folder, attempt.number, (*cache_locks, *gpu_locks, *locks), attempt.digest(), granted)
