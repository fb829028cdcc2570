"""Commands in the background: as a process without a terminal, as a Slurm job; tmux sessions.

A command that starts several runs is run again without `--detach` and `--slurm`, in a folder below
`runs/commands` that keeps its output. A run does not depend on its session: without tmux there is
`launch attach`.
"""

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.errors import Exit, NotReady
from launcher.lifecycle import on_finish, start
from launcher.machine import isolation, tools
from launcher.runs import attempt as attempts
from launcher.runs import rundir, runner, slurm
from launcher.runs.rundir import RunFolder

FOLDER = (
    "LAUNCH_COMMAND_FOLDER"  # the variable that names the folder of a command that runs on its own
)
LOG = "console.log"
# in the shell that stays open: an interrupt is for the command
_STAY_OPEN = 'trap : INT; "$@"; printf "press Enter to close this session "; read -r _'
# with fewer open files, tmux's server takes a whole core and shows nothing
_MIN_OPEN_FILES = 64


class Started(NamedTuple):
    """Where a command runs: its process or job, and the file with its output."""

    folder: str
    log: str
    pid: int | None = None
    session: str | None = None
    job: str | None = None

    def lines(self) -> list[str]:
        lines = []
        if self.job is not None:
            lines.append(f"job: {self.job}")
        if self.session is not None:
            lines.append(f"tmux attach -t {self.session}")
        lines.append(f"log: tail -F {self.log}")
        if self.job is None:
            lines.append(f"stop: kill -INT {self.pid}")
        else:
            lines.append(f"stop: scancel {self.job}")
        return lines


def strip_background_options(argv: Sequence[str]) -> list[str]:
    """A command line without the options that run it elsewhere, or change its output format."""
    words = []
    is_format = False
    for word in argv:
        if is_format:
            is_format = False
        elif word == "--format":
            is_format = True
        elif word not in ("--detach", "--slurm") and not word.startswith("--format="):
            words.append(word)
    return words


def detach(kind: str, name: str, argv: Sequence[str]) -> Started:
    """Start a command line in a session of its own. Raises NotReady if it gets no folder."""
    folder = _make_folder(kind, name)
    log_file = folder / LOG
    with rundir.writing(folder), runner.open_private_log(log_file) as log:
        child = subprocess.Popen(
            [*start.launch_argv(), *strip_background_options(argv)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, FOLDER: str(folder)},
        )
    tail = ["tail", f"--pid={child.pid}", "-n", "+1", "-F", str(log_file)]
    session = _open_session(folder.name, tail)
    return Started(folder=str(folder), log=str(log_file), pid=child.pid, session=session)


def queue(
    kind: str, name: str, argv: Sequence[str], *, gpus: int, options: slurm.Options
) -> Started:
    """Queue a command line as a job on one machine. Raises NotReady with sbatch's complaint."""
    folder = RunFolder(_make_folder(kind, name))
    attempt = attempts.Attempt(
        number=1,
        argv=(*start.launch_argv(), *strip_background_options(argv)),
        env={FOLDER: str(folder.path)},
        environ=dict(os.environ),
        cwd=os.getcwd(),
        stage=kind,
        backend="",
        title=f"{kind} {name}",
    )
    attempt.write(folder)
    command = [*start.launch_argv("launcher.lifecycle.background"), str(folder.path)]
    script = slurm.render_batch_script(
        folder.path, command, nodes=1, gpus=gpus, options=options, prepare=False
    )
    try:
        job = slurm.submit(folder, script, os.environ)
    except NotReady:
        # it holds the whole environment, and nothing will read it
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    log = str(folder.path / slurm.LOG)
    return Started(folder=str(folder.path), log=log, job=job)


def _make_folder(kind: str, name: str) -> Path:
    return rundir.make_folder(rundir.find_runs_root() / "commands", kind, name)


def finish(
    words: Sequence[str], limit_s: float, command: str, code: int, status: str
) -> int | None:
    """Run the `--on-finish` command of a command that has ended with `code`."""
    state = "failed"
    if code == Exit.OK:
        state = "finished"
    elif code == Exit.INTERRUPTED:
        state = "stopped"
    environ: Mapping[str, str] = {
        **os.environ,
        "LAUNCH_FINISHED": command,
        "LAUNCH_FINISHED_FOLDER": os.environ.get(FOLDER, os.getcwd()),
        "LAUNCH_FINISHED_STATE": state,
        "LAUNCH_FINISHED_STATUS": status,
        "LAUNCH_FINISHED_CODE": str(code),
    }
    return on_finish.run(words, environ, Path.cwd(), limit_s)


def open_session(folder: RunFolder) -> str | None:
    """Open a tmux session named after a run, with `launch exec RUN`; None if that fails."""
    # tmux refuses dots and colons, and runs `#(...)`
    name = re.sub(r"[.:#\x00-\x1f\x7f]", "_", folder.path.name)
    return _open_session(name, [*start.launch_argv(), "exec", str(folder.path)])


def _open_session(name: str, command: Sequence[str]) -> str | None:
    """Open a tmux session that stays open after its command; its name, or None if that fails."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files < _MIN_OPEN_FILES:
        return None
    # resolved here: the PATH of tmux's server may have the current folder in it
    program = isolation.find_program(command[0]) or command[0]
    argv = ["/bin/sh", "-c", _STAY_OPEN, "sh", program, *command[1:]]
    # in the session of an earlier attempt if there is one: ending the last would end the server
    respawn = ["respawn-pane", "-k", "-t", f"={name}:", *argv]
    new = ["new-session", "-d", "-s", name, "-x", "200", "-y", "50", *argv]
    for words in (respawn, new):
        with contextlib.suppress(OSError, ValueError):
            if tools.run_tool(["tmux", *words]).returncode == 0:
                return name
    return None


def main(folder: Path) -> None:
    """Become the command that waits in a folder, in the environment of its submitter and job."""
    attempt = attempts.read_attempt(RunFolder(folder))
    attempts.require_own(RunFolder(folder))
    command = attempt.command(os.environ)
    os.chdir(command.cwd)
    os.execvpe(command.argv[0], list(command.argv), dict(command.env))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
