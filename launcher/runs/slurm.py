"""Runs as jobs of Slurm's: what `slurm:` may say, the batch script, queueing it, what became of jobs, ending one.

The script starts `launch exec RUN` once on every node. It holds no value of the stage file but those of `slurm:`,
which stand in comments that sbatch alone reads, and no environment: what training needs lies in the run folder.
A job is known by its number.
"""

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import Complain, Finding, NotReady, brief, not_ready
from launcher.machine import isolation, tools
from launcher.paths import canonical, exists
from launcher.runs import preemption, rundir
from launcher.runs.record import Record
from launcher.runs.rundir import RunFolder

WARNING_S = 60  # how long before its time is up a job is queued again; Slurm may say so up to a minute earlier
RESERVED_S = 50  # of that, what is kept to stop a run that has not saved, and to put its job back into the queue
TIMEOUT_S = 20.0
SCRIPT = "slurm.sh"  # the batch script in a run folder
LOG, LIMIT = "slurm.log", "slurm.limit"  # what the job prints, and that its time was up

# the long options of sbatch that a run may set
_OPTIONS = """
    account acctg-freq bb bbf begin cluster-constraint comment constraint container contiguous core-spec
    cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution exclude
    exclusive extra-node-info gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags
    hint hold kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
    mincpus network nice no-kill nodefile nodelist ntasks-per-gpu overcommit oversubscribe partition power prefer
    priority profile propagate qos reboot reservation sockets-per-node spread-job switches thread-spec
    threads-per-core time time-min tmp tres-bind tres-per-task use-min-nodes wait-all-nodes wckey
""".split()
KEYS = (*_OPTIONS, "requeue")
# options that the run decides
_OURS = """
    array chdir clusters error export export-file get-user-env job-name no-requeue nodes ntasks ntasks-per-node
    open-mode output signal wrap
""".split()
ASKS_FOR_GPUS = frozenset({"gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"})
ASKS_FOR_CPUS = frozenset({"cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus"})
# what sbatch gets of an environment, which Slurm keeps for its administrators to read
_PASSED = {
    *("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TZ", "USER"),
    *("SLURM_CONF", "SLURM_CONF_SERVER", "SBATCH_TIMELIMIT"),
    *(f"SBATCH_{name.upper().replace('-', '_')}" for name in _OPTIONS),
}

_JOB = re.compile(r"[0-9]{1,20}", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
Options = Mapping[str, str | None]  # an option of sbatch -> its value; None for one that stands alone


def read_options(given: Any, complain: Complain) -> tuple[dict[str, str | None], list[Finding]]:
    """Options and faults of `slurm:`; false leaves one out, true names it alone, `requeue: false` is `no-requeue`."""
    if not isinstance(given, Mapping):
        message = f"`slurm:` is a mapping of sbatch's options, not `{brief(given)}`"
        return {}, [complain("bad-slurm", "", message, "slurm: {partition: gpu, time: 1-00:00:00}")]
    options: dict[str, str | None] = {}
    findings = []
    for key, value in given.items():
        name = _CONTROL.sub(" ", str(key)).replace("_", "-").removeprefix("--")
        if (wrong := _wrong(name, value)) is not None:
            findings.append(complain(wrong[0], str(key), *wrong[1:]))
        elif name == "requeue":
            options |= {} if value in (True, None) else {"no-requeue": None}
        elif value not in (None, False):
            options[name] = None if value is True else str(value)
    return options, findings


def _wrong(name: str, value: Any) -> tuple[str, str, str | None] | None:
    if name in _OURS:
        help = "launch sets nodes (--nodes), tasks, names, logs, signals and environment; or write `requeue: false`"
        return "reserved-slurm-option", f"`{name}` is set by launch itself", help
    if name not in KEYS:
        near = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.6)
        help = f"did you mean `{near[0]}`?" if near else "`sbatch --help` lists them"
        return "unknown-slurm-option", f"`{brief(name)}` is not an option of sbatch", help
    if isinstance(value, bool | None):
        return None
    word = isinstance(value, str | int | float) and str(value).strip() and not _CONTROL.search(str(value))
    if name == "requeue" or not word:
        kind = "true or false" if name == "requeue" else "words on one line"
        shown = brief(_CONTROL.sub(" ", str(value)))
        return "bad-slurm-option", f"`{name}` is {kind}, not `{shown}`", None
    return None


def one_cpu(options: Options, gpus: int) -> str | None:
    """What to say of a job that would get a single core of each node; None where it asks for more."""
    if ASKS_FOR_CPUS & options.keys():
        return None
    most = f"{8 * gpus}" if gpus else "8"
    return f"slurm: {{cpus_per_task: {most}}}, or {{exclusive: true}} for whole machines"


def script(
    folder: Path,
    command: Sequence[str],
    *,
    nodes: int,
    gpus: int,
    options: Options,
    prepare: bool = True,
    warning_s: int = WARNING_S,
) -> str:
    """A batch script for a command on each node, which first `prepare`s a run that was queued again.

    `warning_s` seconds before its time is up, such a run is asked to save; then the job goes back into the queue.
    """
    requeue, log = "no-requeue" not in options, _pattern(folder)
    words: dict[str, str | None] = {
        "job-name": rundir.dashed(folder.name).strip("-") or "launch",
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        **({"gres": f"gpu:{gpus}"} if gpus and not ASKS_FOR_GPUS & options.keys() else {}),
        **{"output": log or "/dev/null", "open-mode": "append", "chdir": "/"},
        **({"requeue": None, "signal": f"B:USR1@{warning_s}"} if requeue else {}),
        **options,
    }
    srun = f"srun --nodes={nodes} --ntasks-per-node=1 --mpi=none --cpu-bind=none --kill-on-bad-exit=0"
    lines = [
        "#!/bin/sh",
        *(f"#SBATCH --{key}" + ("" if value is None else f"={_quoted(value)}") for key, value in words.items()),
        "",
        *([] if log else [_OWN_LOG.format(log=shlex.quote(str(folder / LOG)))]),
        f"set -- {shlex.join(command)}",
        *([_PREPARE] if prepare else []),
        "# whoever stops the job tells every process of it: wait for what they still write down",
        "trap 'signalled=1' TERM INT",
    ]
    if requeue:
        trap = _SAVE if prepare else _REQUEUE
        seconds = max(1, warning_s - RESERVED_S)
        limit = shlex.quote(str(folder / LIMIT))
        lines.append(trap.format(limit=limit, variable=preemption.GRACE_VARIABLE, seconds=seconds))
    # srun does not take the number of cores from the job (Slurm 22.05)
    lines.append(f'{srun} ${{SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}} "$@" &')
    lines.append(_WAIT)
    if requeue and prepare:
        lines.append(_QUEUE_AGAIN)
    lines.append('exit "$code"')
    return "\n".join(lines) + "\n"


_OWN_LOG = "# sbatch cannot write down the name of this folder\nexec >>{log} 2>&1"
_PREPARE = '# queued again, the run continues from its last complete checkpoint\n"$@" --prepare || exit'
_REQUEUE = """\
# its time is almost up: back into the queue
queue_again() {{ signalled=1; : >{limit}; scontrol requeue "$SLURM_JOB_ID"; }}
trap queue_again USR1"""
_SAVE = """\
# its time is almost up: it saves a checkpoint, and goes back into the queue, without one if that takes too long
limit={limit}
export {variable}={seconds}
trap 'signalled=1; : >"$limit"; again=1; ("$@" --save || scontrol requeue "$SLURM_JOB_ID") &' USR1"""
_WAIT = """\
job=$!
while signalled=; wait $job; code=$?; [ "$signalled" ]; do :; done"""
_QUEUE_AGAIN = '[ "$again" ] && [ "$code" -ne 0 ] && scontrol requeue "$SLURM_JOB_ID"'


def _pattern(folder: Path) -> str | None:
    """The job's log as sbatch's filename pattern; None where a pattern cannot express it."""
    path = str(folder / LOG)
    # a backslash anywhere switches all patterns off and is lost itself
    return None if "\\" in path or _CONTROL.search(path) else path.replace("%", "%%")


def _quoted(value: str) -> str:
    """A value as sbatch reads it in a script: in double quotes, a backslash before quotes and itself."""
    plain = re.fullmatch(r"[A-Za-z0-9._:,=@/+%-]+", value)
    return value if plain else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def job(folder: RunFolder) -> str | None:
    """The job that a run was submitted as; None of a copy, whose job is another run's."""
    record = Record(rundir.read_json(folder.job))
    number, run = record.text("job") or "", record.text("run")
    if not _JOB.fullmatch(number):
        return None
    copied = run is not None and exists(Path(run)) and canonical(Path(run)) != canonical(folder.path)
    return None if copied else number


def require_own(folder: RunFolder) -> None:
    """Raise NotReady where somebody else may have written which job a run is: none is ended by that word."""
    if (why := files.writable_by_others(folder.job)) is not None:
        message = f"no job is ended because {folder.job.name} names it: {why}"
        help = f"look at job {job(folder)}; if it is the run's: scancel {job(folder)}"
        raise not_ready("not-your-process", message, help, file=str(folder.job))


def submit(folder: RunFolder, text: str, environ: Mapping[str, str]) -> str:
    """Queue a batch script; of `environ` Slurm gets what finds it and the user's defaults. Raises NotReady."""
    path = folder.path / SCRIPT
    with rundir.writing(folder.path):
        files.write_bytes(path, os.fsencode(text))
    passed = {name: value for name, value in environ.items() if name in _PASSED}
    answer = _call(["sbatch", "--parsable", str(path)], passed, TIMEOUT_S).strip()
    found = re.fullmatch(r"(\d+)(?:;.*)?", answer)
    if found is None:
        raise not_ready("slurm-failed", f"sbatch answered `{brief(answer)}`")
    record = {"job": found[1], "submitted": rundir.now(), "run": str(folder.path)}
    files.write_private_json(folder.job, record)
    return found[1]


def states(environ: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """Job -> state of all of the user's jobs that Slurm still knows; None where it does not answer."""
    if isolation.find_program("squeue", environ) is None:
        return None
    argv = ["squeue", "--noheader", f"--user={os.getuid()}", "--states=all", "--format=%A %T"]
    try:
        answer = _call(argv, environ, None)
    except NotReady:
        return None
    rows = [line.split() for line in answer.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2}


WAITING = "CONFIGURING PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT".split()
ACTIVE = "COMPLETING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED SUSPENDED".split()


def word(state: str | None) -> str | None:
    """A state of Slurm's in ours: `queued`, `running`, or None for a job that is over or unknown."""
    if state in WAITING:
        return "queued"
    return "running" if state in ACTIVE else None


def state(job: str) -> str | None:
    return word((states() or {}).get(job))


def cancel(job: str, environ: Mapping[str, str] | None = None) -> None:
    """TERM to every process of a job, KILL after Slurm's KillWait; one that is over is no mistake. Raises NotReady."""
    _call(["scancel", job], environ, TIMEOUT_S)


def cut_short(folder: RunFolder) -> bool:
    """Whether the job's time was up when it ran last. Asked once, it is forgotten."""
    with contextlib.suppress(OSError):
        (folder.path / LIMIT).unlink()
        return True
    return False


def _call(argv: Sequence[str], environ: Mapping[str, str] | None, timeout_s: float | None) -> str:
    """What a command of Slurm's answers; without `timeout_s` it shares the limit of all tools. Raises NotReady."""
    help = None
    try:
        answer = tools.ask(argv, environ=environ, cwd="/", seconds=timeout_s)
        if answer.returncode == 0:
            return os.fsdecode(answer.out)
        last = answer.err.decode(errors="replace").strip().splitlines()
        why = f"{argv[0]} {'; '.join(last[-3:]) or f'ended with {answer.returncode}'}"
    except FileNotFoundError:
        why, help = f"{argv[0]} is not installed here", "start this where jobs are submitted, or without --slurm"
    except tools.NoAnswer as error:
        why = str(error)
    except OSError as error:
        why = f"{argv[0]} cannot be started: {error.strerror}"
    raise not_ready("slurm-failed", why, help)
