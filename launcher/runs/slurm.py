"""What to ask of Slurm: to queue a run as a job, what became of jobs, to end one. A job is known by its number."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from launcher import files
from launcher.errors import NotReady, brief, not_ready
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder
from launcher.runs.sbatch import LIMIT, VALUED, Options

TIMEOUT_S = 20.0
ASK_TIMEOUT_S = 5.0  # for a list of runs: it is shown without Slurm's word rather than late
SCRIPT = "slurm.sh"  # the batch script in a run folder

_JOB = re.compile(r"(\d+)(?:;.*)?\Z")


def job(folder: RunFolder) -> str | None:
    """The job that a run was submitted as last; None where it was not."""
    number = rundir.read_json(folder.job).get("job")
    return number if isinstance(number, str) and number.isdecimal() else None


def submit(folder: RunFolder, text: str, *, nodes: int, options: Options, environ: Mapping[str, str]) -> str:
    """Queue a batch script; of `environ` Slurm gets what finds it and the user's defaults. Raises NotReady."""
    path = folder.path / SCRIPT
    with rundir.writing(folder.path):
        files.write_bytes(path, os.fsencode(text))
    answer = _call(["sbatch", "--parsable", str(path)], _outside(environ), TIMEOUT_S)
    found = _JOB.match(answer.strip())
    if found is None:
        raise not_ready("slurm-failed", f"sbatch answered `{brief(answer.strip())}`")
    record = {"job": found[1], "submitted": rundir.now(), "nodes": nodes, "options": dict(options)}
    files.write_json(folder.job, record)
    return found[1]


_PASSED = frozenset({"HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TZ", "USER"})
_DEFAULTS = frozenset(f"SBATCH_{name.upper().replace('-', '_')}" for name in VALUED | {"exclusive"})


def _outside(environ: Mapping[str, str]) -> dict[str, str]:
    """What sbatch gets of an environment: Slurm keeps it, for its administrators to read."""
    names = _PASSED | _DEFAULTS | {"SBATCH_TIMELIMIT", "SLURM_CONF", "SLURM_CONF_SERVER"}
    return {name: value for name, value in environ.items() if name in names}


def states(environ: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """Job -> state of all of the user's jobs that Slurm still knows; None where it does not answer."""
    path = (os.environ if environ is None else environ).get("PATH")
    if shutil.which("squeue", path=path) is None:
        return None
    argv = ["squeue", "--noheader", f"--user={os.getuid()}", "--states=all", "--format=%A %T"]
    try:
        answer = _call(argv, environ, ASK_TIMEOUT_S)
    except NotReady:
        return None
    rows = [line.split() for line in answer.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2}


WAITING = frozenset(
    """
    CONFIGURING PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT
    """.split()
)
ACTIVE = frozenset({"COMPLETING", "RESIZING", "RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"})


def word(state: str | None) -> str | None:
    """A state of Slurm's in ours: `queued`, `running`, or None for a job that is over or unknown."""
    if state in WAITING:
        return "queued"
    return "running" if state in ACTIVE else None


def state(job: str) -> str | None:
    """`queued` or `running`; None for a job that is over, or where Slurm does not answer."""
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


def _call(argv: Sequence[str], environ: Mapping[str, str] | None, timeout_s: float) -> str:
    """What one of Slurm's clients says. Raises NotReady with its complaint."""
    try:
        env, null = None if environ is None else dict(environ), subprocess.DEVNULL
        done = subprocess.run(argv, env=env, cwd="/", stdin=null, capture_output=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        help = "start this where jobs are submitted, or without --slurm"
        raise not_ready("slurm-failed", f"{argv[0]} is not installed here", help) from None
    except subprocess.TimeoutExpired:
        raise not_ready("slurm-failed", f"{argv[0]} did not answer within {timeout_s:.0f} s") from None
    except OSError as error:
        raise not_ready("slurm-failed", f"{argv[0]} cannot be started: {error.strerror}") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()
        why = "; ".join(last[-3:]) or f"ended with {done.returncode}"
        raise not_ready("slurm-failed", f"{argv[0]} {why}")
    return os.fsdecode(done.stdout)
