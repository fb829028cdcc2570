"""Start, queue and repeat what was prepared: every start goes through here."""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.cache import folders, inputs, keys
from launcher.errors import NotReady, naming_variables, not_ready, select_errors
from launcher.lifecycle import manifest, supervisor, tokenising
from launcher.machine import devices, process
from launcher.machine.codec import Misfit
from launcher.machine.devices import Devices
from launcher.paths import MODULE_FLAG, PACKAGE
from launcher.planning.collect import Scope
from launcher.planning.doctor import disk
from launcher.planning.prepare import Prepared, prepare_start
from launcher.planning.request import Request
from launcher.planning.resume import decision
from launcher.runs import attempt as attempts
from launcher.runs import lease, preemption, rendezvous, rundir, runner, slurm, trackers
from launcher.runs.attempt import Attempt
from launcher.runs.record import Json
from launcher.runs.rundir import RunFolder
from launcher.runs.trackers import TrackerRun

SHORTEST_WARNING_S = 120
"""Before the end of a job's time a run is asked to save: for a step, and Slurm's own delay."""
LONGEST_WARNING_S = 1800
_POLL_S = 0.5


def begin(
    prepared: Prepared, say: tokenising.Say = lambda _: None, **at_end: Any
) -> tuple[RunFolder, Attempt]:
    """Start the supervisor of this machine; training runs at return. Raises NotReady.

    `at_end` are fields of `Attempt`. A script that does not tokenise itself gets its data tokenised
    first, before any GPU is taken; `say` gets a line about it.
    """
    with naming_variables(prepared.redactor):
        return _begin_attempt(prepared, say, at_end)


def _begin_attempt(
    prepared: Prepared, say: tokenising.Say, at_end: Mapping[str, Any]
) -> tuple[RunFolder, Attempt]:
    machine = prepared.start.machine
    rendezvous.check_port(machine)
    prepared = _add_tracker_variables(prepared)
    with _reserve_folder(prepared) as prepared:
        prepared = tokenising.tokenise_before_training(prepared, say)
        attempt = _build_attempt(prepared, **at_end)
        if machine is not None:
            argv = rendezvous.fill_placeholders(attempt.argv, machine)
            attempt = replace(attempt, argv=argv, rank=machine.rank)
        folder = prepared.folder.node(attempt.rank)
        is_first = attempt.rank == 0
        output = None
        if is_first:
            _require_not_queued(folder)
            output = prepared.output
        with (
            _remove_empty_on_error(folder),
            runner.lock_run(folder, attempt.number, output) as (acquired, locks),
            _rollback_on_error(folder),
        ):
            if is_first or not prepared.folder.manifest.exists():
                _write_records(prepared, attempt)
            attempt.write(folder)
            chosen = prepared.start.devices or Devices()
            _spawn_supervisor(folder, attempt, acquired, locks, chosen)
    return folder, attempt


def _find_continued_trackers(prepared: Prepared) -> tuple[TrackerRun, ...]:
    """The tracker runs that a resume continues; a run that begins anew reports to new ones."""
    if prepared.decision.kind != "resume":
        return ()
    return trackers.read_trackers(prepared.folder)


def _add_tracker_variables(prepared: Prepared) -> Prepared:
    variables = trackers.list_tracker_variables(_find_continued_trackers(prepared), os.environ)
    if not variables:
        return prepared
    env = {**prepared.command.env, **variables}
    return replace(prepared, command=replace(prepared.command, env=env))


@contextlib.contextmanager
def _reserve_folder(prepared: Prepared) -> Iterator[Prepared]:
    """Make the run folder of a new run; it is removed again if nothing begins.

    Yields the start in another folder if a simultaneous start took the planned one.
    """
    if not prepared.start.target.is_new:
        yield prepared
        return
    folder = rundir.reserve(prepared.folder)
    with _remove_empty_on_error(folder):
        if folder != prepared.folder:
            prepared = prepared.in_folder(folder)
        yield prepared


@contextlib.contextmanager
def _remove_empty_on_error(folder: RunFolder) -> Iterator[None]:
    """Remove a folder if the body fails and leaves it empty."""
    try:
        yield
    except BaseException:
        rundir.remove_if_empty(folder)
        raise


def _require_not_queued(folder: RunFolder) -> None:
    """Raise NotReady if a job that waits, or runs elsewhere, has the attempt already."""
    job = slurm.find_job(folder)
    if job is not None and slurm.ask_job_state(job) is not None:
        message = f"the run {folder.path.name} is Slurm's job {job}"
        help = f"wait for it, or launch stop {folder.path.name}"
        raise not_ready("run-is-live", message, help, file=str(folder.path))


def queue(prepared: Prepared, **at_end: Any) -> tuple[RunFolder, str]:
    """Make the run folder, and submit a job that runs `launch exec` on every node.

    Returns the folder and the job. Raises NotReady.
    """
    prepared = _add_tracker_variables(prepared)
    with _reserve_folder(prepared) as prepared:
        prepared = tokenising.tokenise_before_training(prepared)
        folder = prepared.folder
        attempt = _build_attempt(prepared, **at_end)
        with (
            _remove_empty_on_error(folder),
            runner.lock_run(folder, attempt.number, prepared.output),
            _rollback_on_error(folder),
        ):
            _require_not_queued(folder)
            _write_records(prepared, attempt)
            attempt.write(folder)
            job = slurm.submit(folder, write_batch_script(prepared), os.environ)
    return folder, job


def write_batch_script(prepared: Prepared) -> str:
    plan = prepared.plan
    folder = prepared.command_folder.path
    return slurm.render_batch_script(
        folder,
        [*launch_argv(), "exec", str(folder)],
        nodes=plan.nodes,
        gpus=plan.gpus,
        options=plan.stage.options.slurm,
        warning_s=_compute_warning_s(prepared),
    )


def _compute_warning_s(prepared: Prepared) -> int:
    """Seconds before the end of a job's time that its run is asked to save."""
    grace = os.environ.get(preemption.GRACE_VARIABLE)
    if grace:
        grace_s = preemption.parse_save_grace(grace)
        return math.ceil(grace_s) + slurm.RESERVED_S
    save_s = 0.0
    needs = disk.estimate_needs(prepared.plan, prepared.output, os.environ)
    if needs is not None:
        save_s = preemption.save_seconds(needs.saved.checkpoint)
    warning_s = SHORTEST_WARNING_S + 2 * save_s
    return math.ceil(min(LONGEST_WARNING_S, warning_s))


def save_and_end(folder: RunFolder) -> bool:
    """What `launch exec --save` does: ask the running attempt to save on all machines and end.

    Returns whether it has ended on this one within the seconds for a save and a stop.
    """
    request = runner.StopRequest(attempt=max(1, folder.attempts()), checkpoint=True)
    for node in folder.nodes():
        request.write(node)
    grace = os.environ.get(preemption.GRACE_VARIABLE)
    patience_s = preemption.parse_save_grace(grace) + slurm.RESERVED_S / 2
    until = time.monotonic() + patience_s
    while runner.has_live_supervisor(folder) or runner.is_alive(folder.path):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def launch_argv(module: str | None = None) -> list[str]:
    """The argv of `launch`, or of a module of it, wherever this folder and Python are reachable.

    By its path: it needs no variable of the environment, and imports nothing from the folder that
    it is started in.
    """
    words = [sys.executable, "-P", str(PACKAGE / "__main__.py")]
    if module is not None:
        words += [MODULE_FLAG, module]
    return words


def _write_records(prepared: Prepared, attempt: Attempt) -> None:
    """Write the manifest, the stage file, and the files that the command reads."""
    folder = prepared.folder
    decision.set_aside(prepared.decision, attempt.number)
    if rundir.read_manifest(folder).attempt != attempt.number:
        rundir.keep_manifest(folder)
    chosen = prepared.start.devices
    record = manifest.build_manifest(
        attempt.number,
        rundir.format_utc_now(),
        prepared.plan,
        prepared.command,
        prepared.facts.trainer,
        prepared.output,
        [cache.as_json() for cache in prepared.start.caches],
        devices=chosen.as_json() if chosen else None,
        warnings=prepared.warnings,
    )
    for path, text in prepared.command.files.items():
        with rundir.writing(folder.path):
            files.write_text(Path(path), text)
    continued: list[Json] = [run.as_json() for run in _find_continued_trackers(prepared)]
    record = replace(
        record, **prepared.for_record(), launch_argv=_read_typed_argv(), trackers=continued
    )
    manifest.create(folder, record, prepared.redactor)
    restored = {}
    for change in prepared.decision.changes:
        if change.restored:
            restored[change.what] = change.before
    with contextlib.suppress(OSError):
        manifest.write_stage_file(prepared.plan, folder, restored)


def _read_typed_argv() -> list[str] | None:
    """The command line as it was typed; None if another program calls launch."""
    program = Path(sys.argv[0])
    if program.name != "launch" and program.parent.name != "launcher":
        return None
    return ["launch", *sys.argv[1:]]


@contextlib.contextmanager
def _rollback_on_error(folder: RunFolder) -> Iterator[None]:
    """Restore the run folder if starting fails."""
    attempts_before = folder.attempts()
    names = set(os.listdir(folder.path))
    if names == {folder.lock.name}:
        # the lock of this start, in the folder of a new run
        names = set()
    replaced = [folder.manifest, folder.start, folder.stage_file, folder.deepspeed]
    replaced += [path for path in folder.path.iterdir() if path.suffix == ".yaml"]
    contents = {path: path.read_bytes() for path in replaced if path.name in names}
    try:
        yield
    except BaseException:
        ignored = dict.fromkeys((signal.SIGINT, signal.SIGTERM), process.ignore_signal)
        with process.install_handlers(ignored), contextlib.suppress(OSError):
            if folder.attempts() == attempts_before:
                _restore_files(folder, names, contents)
        raise


def _restore_files(folder: RunFolder, names: set[str], contents: dict[Path, bytes]) -> None:
    # deleting first: on a full disk it makes room for the rest
    for path in folder.path.iterdir():
        if path.name not in names and not path.is_dir():
            path.unlink()
    for path, raw in contents.items():
        mode = 0o600 if path == folder.start else 0o666
        files.write_bytes(path, raw, mode=mode)


def _build_attempt(prepared: Prepared, **at_end: Any) -> Attempt:
    plan = prepared.plan
    options = plan.stage.options
    output = None
    if prepared.output is not None:
        output = str(prepared.output)
    gpu_ids: tuple[str, ...] = ()
    if prepared.start.devices is not None:
        gpu_ids = tuple(slot.id for slot in prepared.start.devices.slots)
    return Attempt(
        number=prepared.attempt,
        argv=prepared.command.argv,
        env=prepared.command.env,
        environ=dict(os.environ),
        cwd=str(prepared.command.cwd),
        stage=options.stage,
        backend=options.backend,
        title=plan.title,
        total=plan.steps,
        world=plan.processes,
        nodes=plan.nodes,
        output=output,
        caches=tuple(cache.as_json() for cache in prepared.start.caches),
        devices=gpu_ids,
        config=str(plan.stage.config.path),
        borrowed=prepared.redactor.secrets,
        request={**prepared.facts.request.as_json(), "gpus": plan.gpus},
        **at_end,
    )


def prepare_again(folder: RunFolder) -> Attempt:
    """Prepare the next attempt of a run whose job was queued again, to continue the last one.

    Returns the attempt that waits if it has begun on no machine, and neither data nor models have
    changed, or if the run is finished. Raises what `prepare_start` does, NotReady if there is no
    further checkpoint.
    """
    waiting = attempts.read_attempt(folder)
    last = rundir.read_manifest(folder)
    begun = max(node.attempts() for node in folder.nodes())
    if begun < waiting.number and not inputs.compare_inputs(last.contents, Path(waiting.cwd)):
        return waiting
    attempts.require_own(folder)
    os.chdir(waiting.cwd)
    # what the shell that submitted it had, and the job lacks
    os.environ.update({**waiting.environ, **os.environ})
    request = Request.from_json(waiting.request, config=folder.stage_file)
    time_was_up = slurm.take_limit_mark(folder)
    prepared = prepare_start(replace(request, folder=folder), Scope.HOST)
    if prepared.decision.kind == "finished":
        return waiting
    prepared = tokenising.tokenise_before_training(prepared)
    last_step = last.resumed_step or 0
    if time_was_up and prepared.decision.step <= last_step:
        message = f"the job's time was up before a checkpoint behind step {last_step}: "
        message += "it would never end"
        help = "ask Slurm for more time, or save checkpoints more often"
        raise not_ready("no-progress", message, help, file=str(folder.path))
    if prepared.output is not None:
        lease.wait_for_expiry(prepared.output, folder.path)
    with runner.lock_run(folder, prepared.attempt, prepared.output):
        attempt = replace(
            _build_attempt(prepared),
            on_finish=waiting.on_finish,
            on_finish_s=waiting.on_finish_s,
            allow_unproven=waiting.allow_unproven,
            environ=waiting.environ,
            request=waiting.request,
        )
        _write_records(prepared, attempt)
        attempt.write(folder)
    return attempt


def execute(
    folder: RunFolder, rank: int | None = None, address: str | None = None
) -> tuple[RunFolder, Attempt]:
    """What `launch exec` does: start the attempt that waits, unless it has begun.

    Raises NotReady or UsageError.
    """
    attempt = attempts.read_attempt(folder)
    if folder.attempts() < attempt.number:
        attempts.require_own(folder)
    machine = rendezvous.find_rendezvous(attempt.nodes, rank, address, os.environ)
    if machine is not None:
        argv = rendezvous.fill_placeholders(attempt.argv, machine)
        attempt = replace(attempt, argv=argv, rank=machine.rank)
        folder = folder.node(machine.rank)
        folder.path.mkdir(rundir.OWN, exist_ok=True)
        attempt.write(folder)
    if folder.attempts() < attempt.number:
        rendezvous.check_port(machine)
        output = None
        # the output folder is the same for all machines: the first one takes its lease
        if attempt.output is not None and attempt.rank == 0:
            output = Path(attempt.output)
        with runner.lock_run(folder, attempt.number, output) as (acquired, locks):
            chosen = _choose_devices(attempt)
            _spawn_supervisor(folder, attempt, acquired, locks, chosen)
    return folder, attempt


def _choose_devices(attempt: Attempt) -> Devices:
    """The GPUs that an attempt got when it was prepared. Raises NotReady if they are taken."""
    if not attempt.devices:
        return Devices()
    look = devices.survey_devices(attempt.environ)
    chosen = devices.choose_devices(None, attempt.devices, look)
    if chosen.refused:
        raise NotReady(select_errors(chosen.findings))
    return chosen


def _spawn_supervisor(
    folder: RunFolder,
    attempt: Attempt,
    acquired: lease.Lease | None,
    locks: Sequence[int],
    chosen: Devices,
) -> None:
    try:
        caches = tuple(keys.parse_cache(cache) for cache in attempt.caches)
    except Misfit as misfit:
        message = f"the caches in {folder.start.name} cannot be read: {misfit}"
        raise not_ready("not-prepared", message, file=str(folder.start)) from None
    if acquired is not None:
        lease.keep_manifest(acquired, rundir.read_manifest(folder))
    with (
        folders.lock(caches, folder, attempt.number, redactor=attempt.redactor) as cache_locks,
        devices.lock_slots(chosen, folder.path) as gpu_locks,
    ):
        all_locks = (*cache_locks, *gpu_locks, *locks)
        supervisor.spawn(folder, attempt.number, all_locks, attempt.digest(), acquired)
