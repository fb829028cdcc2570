"""What to ask of Slurm: to queue a run as a job, what became of jobs, to end one -> `Job`, states."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher import files
from launcher.errors import Finding, NotReady, brief, launch_finding
from launcher.runs import rundir
from launcher.runs.record import Record
from launcher.runs.rundir import RunFolder
from launcher.runs.sbatch import LIMIT, VALUED, Options

TIMEOUT_S = 20.0
ASK_TIMEOUT_S = 5.0
"""For a list of runs: it is shown without Slurm's word rather than late."""
SCRIPT = "slurm.sh"
"""The batch script in a run folder."""

_JOB = re.compile(r"(\d+)(?:;.*)?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Which job a run is, as `slurm.json` keeps it."""

    id: str
    submitted: str
    nodes: int
    options: Options


def job(folder: RunFolder) -> Job | None:
    """The job that a run was submitted as last; None where it was not."""
    record = Record(rundir.read_json(folder.job))
    number = record.get("job")
    if not isinstance(number, str) or not number.isdecimal():
        return None
    submitted = str(record.get("submitted"))
    nodes = record.number("nodes") or 1
    return Job(id=number, submitted=submitted, nodes=nodes, options=record.part("options"))


def submit(folder: RunFolder, text: str, *, nodes: int, options: Options, environ: Mapping[str, str]) -> Job:
    """Write the batch script into the run folder and queue it.

    Nothing of `environ` goes with it but what finds Slurm and the user's own defaults for sbatch.
    Raises NotReady where there is no sbatch, or with its complaint.
    """
    path = folder.path / SCRIPT
    try:
        files.write_bytes(path, os.fsencode(text))
    except OSError as error:
        raise rundir.not_writable(folder.path, error.strerror) from None
    answer = _call(["sbatch", "--parsable", str(path)], _outside(environ), TIMEOUT_S)
    found = _JOB.match(answer.strip())
    if found is None:
        raise NotReady(_refused("sbatch", f"answered `{brief(answer.strip())}`"))
    record: dict[str, Any] = {"job": found[1], "submitted": rundir.now(), "nodes": nodes, "options": dict(options)}
    files.write_json(folder.job, record)
    return Job(id=found[1], submitted=record["submitted"], nodes=nodes, options=options)


_PASSED = frozenset({"HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TZ", "USER"})
_DEFAULTS = frozenset(f"SBATCH_{name.upper().replace('-', '_')}" for name in VALUED | {"exclusive"})


def _outside(environ: Mapping[str, str]) -> dict[str, str]:
    """What sbatch gets of an environment: Slurm keeps it, for its administrators to read."""
    names = _PASSED | _DEFAULTS | {"SBATCH_TIMELIMIT", "SLURM_CONF", "SLURM_CONF_SERVER"}
    return {name: value for name, value in environ.items() if name in names}


def states(environ: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """Job -> state (`PENDING`, `RUNNING`, ...) of all of the user's jobs that Slurm still knows.

    None where Slurm does not answer: then nothing is known.
    """
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


def state(made: Job) -> str | None:
    """`queued` or `running`; None for a job that is over, or where Slurm does not answer."""
    return word((states() or {}).get(made.id))


def cancel(made: Job, environ: Mapping[str, str] | None = None) -> None:
    """Have a job ended, or never begin. One that is over already is no mistake.

    Every process of it gets TERM, and KILL after Slurm's KillWait. Raises NotReady.
    """
    _call(["scancel", made.id], environ, TIMEOUT_S)


def cut_short(folder: RunFolder) -> bool:
    """Whether the job's time was up when it ran last. Asked once, it is forgotten."""
    try:
        (folder.path / LIMIT).unlink()
    except OSError:
        return False
    return True


def _call(argv: Sequence[str], environ: Mapping[str, str] | None, timeout_s: float) -> str:
    """What one of Slurm's clients says. Raises NotReady with its complaint."""
    try:
        env = None if environ is None else dict(environ)
        stdin = subprocess.DEVNULL
        done = subprocess.run(argv, env=env, cwd="/", stdin=stdin, capture_output=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        help = "start this where jobs are submitted, or without --slurm"
        raise NotReady(_refused(argv[0], "is not installed here", help)) from None
    except subprocess.TimeoutExpired:
        raise NotReady(_refused(argv[0], f"did not answer within {timeout_s:.0f} s")) from None
    except OSError as error:
        raise NotReady(_refused(argv[0], f"cannot be started: {error.strerror}")) from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()
        raise NotReady(_refused(argv[0], "; ".join(last[-3:]) or f"ended with {done.returncode}"))
    return os.fsdecode(done.stdout)


def _refused(program: str, why: str, help: str | None = None) -> Finding:
    return launch_finding("error", "slurm-failed", f"{program} {why}", help)
