"""Runs as Slurm jobs: the options in `slurm:`, the batch script, submission, states, cancellation.

The script starts `launch exec RUN` once on every node. Of the stage file it holds only `slurm:`, in
comments that sbatch alone reads, and no environment: training reads what it needs from the run
folder.
"""

import contextlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import Complain, Finding, NotReady, not_ready, shorten
from launcher.machine import isolation, tools
from launcher.paths import exists, resolve_path
from launcher.runs import preemption, rundir
from launcher.runs.record import Record
from launcher.runs.rundir import RunFolder

WARNING_S = 60  # a job is queued again this long before its end; Slurm may signal a minute earlier
RESERVED_S = 50  # part of that: to stop a run that has not saved, and to requeue its job
TIMEOUT_S = 20.0
SCRIPT = "slurm.sh"  # the batch script in a run folder
LOG = "slurm.log"  # what the job prints
LIMIT = "slurm.limit"  # exists once the job's time was up

# options of sbatch that launch sets itself
RESERVED = frozenset(
    """
    array chdir clusters error export export-file get-user-env job-name no-requeue nodes ntasks
    ntasks-per-node open-mode output signal wrap
    """.split()
)
ASKS_FOR_GPUS = frozenset({"gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"})
ASKS_FOR_CPUS = frozenset({"cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus"})
# the environment that sbatch gets, which Slurm keeps for its administrators to read
_PASSED = frozenset(
    """
    HOME LANG LC_ALL LOGNAME PATH SHELL TZ USER SLURM_CONF SLURM_CONF_SERVER SBATCH_TIMELIMIT
    """.split()
)
_RESERVED_VARIABLES = frozenset({"SBATCH_ARRAY_INX", "SBATCH_REQUEUE"})

_OPTION = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_JOB = re.compile(r"[0-9]{1,20}", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
Options = Mapping[str, str | None]  # option of sbatch -> value; None for a flag


def read_options(value: Any, complain: Complain) -> tuple[dict[str, str | None], list[Finding]]:
    """The options of `slurm:` and what is wrong with them. Whether they exist is sbatch's to say.

    False leaves an option out, true makes it a flag; `requeue: false` becomes `no-requeue`.
    """
    if not isinstance(value, Mapping):
        message = f"`slurm:` is a mapping of sbatch's options, not `{shorten(value)}`"
        help = "slurm: {partition: gpu, time: 1-00:00:00}"
        return {}, [complain("bad-slurm", "", message, help)]
    options: dict[str, str | None] = {}
    findings = []
    for key, setting in value.items():
        name = spell_option(str(key))
        finding = _check_option(name, str(key), setting, complain)
        if finding is not None:
            findings.append(finding)
        elif name == "requeue":
            if setting is False:
                options["no-requeue"] = None
        elif setting is True:
            options[name] = None
        elif setting not in (None, False):
            options[name] = str(setting)
    return options, findings


def spell_option(key: str) -> str:
    """A key of `slurm:` as sbatch spells it: `cpus_per_task` is `cpus-per-task`."""
    return _CONTROL.sub(" ", key).replace("_", "-").removeprefix("--")


def is_settable(name: str) -> bool:
    """Whether a stage file may set this option: launch does not, and it could be a long option."""
    return name not in RESERVED and _OPTION.fullmatch(name) is not None


def _check_option(name: str, key: str, setting: Any, complain: Complain) -> Finding | None:
    if name in RESERVED:
        help = "launch sets nodes (--nodes), tasks, names, logs, signals and environment; "
        help += "or write `requeue: false`"
        message = f"`{name}` is set by launch itself"
        return complain("reserved-slurm-option", key, message, help)
    if not is_settable(name):
        message = f"`{shorten(name)}` is not the long name of an option of sbatch"
        return complain("bad-slurm-option", key, message, "`sbatch --help` lists them")
    if setting is None or isinstance(setting, bool):
        return None
    shown = shorten(_CONTROL.sub(" ", str(setting)))
    if name == "requeue":
        message = f"`requeue` is true or false, not `{shown}`"
        return complain("bad-slurm-option", key, message, None)
    if not _is_one_line(setting):
        message = f"`{name}` is words on one line, not `{shown}`"
        return complain("bad-slurm-option", key, message, None)
    return None


def _is_one_line(setting: object) -> bool:
    if not isinstance(setting, str | int | float):
        return False
    text = str(setting)
    return bool(text.strip()) and _CONTROL.search(text) is None


def warn_of_single_cpu(options: Options, gpus: int) -> str | None:
    """A hint for a job that would get one core of each node; None if it asks for more."""
    if ASKS_FOR_CPUS & options.keys():
        return None
    cpus = 8 * max(1, gpus)
    return f"slurm: {{cpus_per_task: {cpus}}}, or {{exclusive: true}} for whole machines"


def render_batch_script(
    folder: Path,
    command: Sequence[str],
    *,
    nodes: int,
    gpus: int,
    options: Options,
    prepare: bool = True,
    warning_s: int = WARNING_S,
) -> str:
    """A batch script that starts `command` on each node.

    With `prepare`, a job that was queued again first prepares its run, and `warning_s` seconds
    before its end the run is asked to save. Then the job goes back into the queue.
    """
    requeues = "no-requeue" not in options
    log_pattern = _make_log_pattern(folder)
    directives: dict[str, str | None] = {
        "job-name": rundir.replace_unsafe(folder.name).strip("-") or "launch",
        "nodes": str(nodes),
        "ntasks-per-node": "1",
    }
    if gpus and not ASKS_FOR_GPUS & options.keys():
        directives["gres"] = f"gpu:{gpus}"
    directives["output"] = log_pattern or "/dev/null"
    directives["open-mode"] = "append"
    directives["chdir"] = "/"
    if requeues:
        directives["requeue"] = None
        directives["signal"] = f"B:USR1@{warning_s}"
    directives.update(options)

    lines = ["#!/bin/sh"]
    lines += [_render_directive(name, value) for name, value in directives.items()]
    lines.append("")
    if log_pattern is None:
        lines.append(_REDIRECT.format(log=shlex.quote(str(folder / LOG))))
    lines.append(f"set -- {shlex.join(command)}")
    if prepare:
        lines.append(_PREPARE)
    lines.append(_TRAP_STOP)
    if requeues:
        template = _TRAP_SAVE if prepare else _TRAP_REQUEUE
        trap = template.format(
            limit=shlex.quote(str(folder / LIMIT)),
            variable=preemption.GRACE_VARIABLE,
            seconds=max(1, warning_s - RESERVED_S),
        )
        lines.append(trap)
    lines.append(_SRUN.format(nodes=nodes))
    lines.append(_WAIT)
    if requeues and prepare:
        lines.append(_QUEUE_AGAIN)
    lines.append('exit "$code"')
    return "\n".join(lines) + "\n"


_REDIRECT = "# sbatch cannot write down the name of this folder\nexec >>{log} 2>&1"
_PREPARE = """\
# queued again, the run continues from its last complete checkpoint
"$@" --prepare || exit"""
_TRAP_STOP = """\
# whoever stops the job tells every process of it: wait for what they still write down
trap 'signalled=1' TERM INT"""
_TRAP_REQUEUE = """\
# its time is almost up: back into the queue
queue_again() {{ signalled=1; : >{limit}; scontrol requeue "$SLURM_JOB_ID"; }}
trap queue_again USR1"""
_TRAP_SAVE = """\
# its time is almost up: it saves a checkpoint, and goes back into the queue, \
without one if that takes too long
limit={limit}
export {variable}={seconds}
trap 'signalled=1; : >"$limit"; again=1; \
("$@" --save || scontrol requeue "$SLURM_JOB_ID") &' USR1"""
# srun does not take the number of cores from the job (Slurm 22.05)
_SRUN = (
    "srun --nodes={nodes} --ntasks-per-node=1 --mpi=none --cpu-bind=none --kill-on-bad-exit=0 "
    '${{SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}} "$@" &'
)
_WAIT = """\
job=$!
while signalled=; wait $job; code=$?; [ "$signalled" ]; do :; done"""
_QUEUE_AGAIN = '[ "$again" ] && [ "$code" -ne 0 ] && scontrol requeue "$SLURM_JOB_ID"'


def _make_log_pattern(folder: Path) -> str | None:
    """The job's log as sbatch's filename pattern; None if no pattern can express it."""
    path = str(folder / LOG)
    # a backslash anywhere disables all patterns, and is dropped
    if "\\" in path or _CONTROL.search(path):
        return None
    return path.replace("%", "%%")


def _render_directive(name: str, value: str | None) -> str:
    if value is None:
        return f"#SBATCH --{name}"
    if not re.fullmatch(r"[A-Za-z0-9._:,=@/+%-]+", value):
        # sbatch reads double quotes, with a backslash before quotes and backslashes
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{name}={value}"


def find_job(folder: RunFolder) -> str | None:
    """The job that a run was submitted as; None for a copy, whose job is the original's."""
    record = Record(rundir.read_json(folder.job))
    job = record.text("job") or ""
    if not _JOB.fullmatch(job):
        return None
    run = record.text("run")
    if run is None or not exists(Path(run)):
        return job
    if resolve_path(Path(run)) != resolve_path(folder.path):
        return None
    return job


def require_own(folder: RunFolder) -> None:
    """Raise NotReady if somebody else may have written which job a run is; it is not cancelled."""
    reason = files.find_other_writer(folder.job)
    if reason is not None:
        message = f"no job is ended because {folder.job.name} names it: {reason}"
        help = f"look at job {find_job(folder)}; if it is the run's: scancel {find_job(folder)}"
        raise not_ready("not-your-process", message, help, file=str(folder.job))


def submit(folder: RunFolder, text: str, environ: Mapping[str, str]) -> str:
    """Submit a batch script; returns the job. Raises NotReady.

    Of `environ` sbatch gets what locates Slurm, and the user's defaults for its options.
    """
    path = folder.path / SCRIPT
    with rundir.writing(folder.path):
        files.write_bytes(path, os.fsencode(text))
    passed = {}
    for name, value in environ.items():
        if _is_passed(name):
            passed[name] = value
    answer = _call_slurm(["sbatch", "--parsable", str(path)], passed, TIMEOUT_S).strip()
    match = re.fullmatch(r"(\d+)(?:;.*)?", answer)
    if match is None:
        raise not_ready("slurm-failed", f"sbatch answered `{shorten(answer)}`")
    job = match[1]
    record = {"job": job, "submitted": rundir.format_utc_now(), "run": str(folder.path)}
    files.write_private_json(folder.job, record)
    return job


def _is_passed(variable: str) -> bool:
    if variable in _PASSED:
        return True
    if not variable.startswith("SBATCH_") or variable in _RESERVED_VARIABLES:
        return False
    option = variable.removeprefix("SBATCH_").lower().replace("_", "-")
    return option not in RESERVED


def ask_job_states(environ: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """The state of each job of this user that Slurm knows; None if it does not answer."""
    if isolation.find_program("squeue", environ) is None:
        return None
    argv = ["squeue", "--noheader", f"--user={os.getuid()}", "--states=all", "--format=%A %T"]
    try:
        answer = _call_slurm(argv, environ, None)
    except NotReady:
        return None
    states = {}
    for line in answer.splitlines():
        words = line.split()
        if len(words) == 2:
            states[words[0]] = words[1]
    return states


WAITING = frozenset(
    """
    CONFIGURING PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT
    """.split()
)
ACTIVE = frozenset("COMPLETING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED SUSPENDED".split())


def run_state(state: str | None) -> str | None:
    """`queued` or `running` for a state of Slurm; None for a job that is over or unknown."""
    if state in WAITING:
        return "queued"
    if state in ACTIVE:
        return "running"
    return None


def ask_job_state(job: str) -> str | None:
    """`queued`, `running` or None, by asking Slurm now."""
    states = ask_job_states() or {}
    return run_state(states.get(job))


def cancel(job: str, environ: Mapping[str, str] | None = None) -> None:
    """TERM to every process of a job, KILL after Slurm's KillWait. Raises NotReady.

    Cancelling a job that is over succeeds.
    """
    _call_slurm(["scancel", job], environ, TIMEOUT_S)


def take_limit_mark(folder: RunFolder) -> bool:
    """Whether the job's time was up when it ran last; the mark is removed."""
    with contextlib.suppress(OSError):
        (folder.path / LIMIT).unlink()
        return True
    return False


def _call_slurm(
    argv: Sequence[str], environ: Mapping[str, str] | None, timeout_s: float | None
) -> str:
    """The output of a Slurm command. Raises NotReady if it fails.

    Without `timeout_s` it shares the limit of all tools.
    """
    name = argv[0]
    help = None
    try:
        answer = tools.run_tool(argv, environ=environ, cwd="/", seconds=timeout_s)
    except FileNotFoundError:
        reason = f"{name} is not installed here"
        help = "start this where jobs are submitted, or without --slurm"
    except tools.NoAnswer as error:
        reason = str(error)
    except OSError as error:
        reason = f"{name} cannot be started: {error.strerror}"
    else:
        if answer.returncode == 0:
            return os.fsdecode(answer.out)
        last_lines = answer.err.decode(errors="replace").strip().splitlines()[-3:]
        complaint = "; ".join(last_lines) or f"ended with {answer.returncode}"
        reason = f"{name} {complaint}"
    raise not_ready("slurm-failed", reason, help)
