"""A command that goes on by itself: as a process without a terminal, as a Slurm job; and sessions of tmux.

One that starts several runs is the same command line without `--detach` and `--slurm`, in a folder below
`runs/commands` that keeps what it prints. A run does not depend on its session: without tmux there is
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

FOLDER = "LAUNCH_COMMAND_FOLDER"  # the variable that names the folder of a command that runs on its own
LOG = "console.log"
# an interrupt is for what runs in the shell
_STAY = 'trap : INT; "$@"; printf "press Enter to close this session "; read -r _'


_FILES_OF_TMUX = 64


class Started(NamedTuple):
    """Where a command runs: the process, or the job, and the file that takes what it prints."""

    folder: str
    log: str
    pid: int | None = None
    session: str | None = None
    job: str | None = None

    def lines(self) -> list[str]:
        end = f"kill -INT {self.pid}" if self.job is None else f"scancel {self.job}"
        lines = [] if self.job is None else [f"job: {self.job}"]
        lines += [] if self.session is None else [f"tmux attach -t {self.session}"]
        return [*lines, f"log: tail -F {self.log}", f"stop: {end}"]


def foreground_argv(argv: Sequence[str]) -> list[str]:
    """A command line without what has it run elsewhere, or answer a machine."""
    words, rest = list[str](), iter(argv)
    for word in rest:
        if word == "--format":
            next(rest, None)
        elif word not in ("--detach", "--slurm") and not word.startswith("--format="):
            words.append(word)
    return words


def detach(kind: str, name: str, argv: Sequence[str]) -> Started:
    """Start a command line in a session of its own. Raises NotReady where its folder cannot be made."""
    folder = _folder(kind, name)
    with rundir.writing(folder), runner.open_private_log(folder / LOG) as log:
        child = subprocess.Popen(
            [*start.launch_argv(), *foreground_argv(argv)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, FOLDER: str(folder)},
        )
    session = _show(folder.name, ["tail", f"--pid={child.pid}", "-n", "+1", "-F", str(folder / LOG)])
    return Started(folder=str(folder), log=str(folder / LOG), pid=child.pid, session=session)


def queue(kind: str, name: str, argv: Sequence[str], *, gpus: int, options: slurm.Options) -> Started:
    """Queue a command line as a job on one machine. Raises NotReady with sbatch's complaint."""
    folder = RunFolder(_folder(kind, name))
    attempts.Attempt(
        number=1,
        argv=(*start.launch_argv(), *foreground_argv(argv)),
        env={FOLDER: str(folder.path)},
        environ=dict(os.environ),
        cwd=os.getcwd(),
        stage=kind,
        backend="",
        title=f"{kind} {name}",
    ).write(folder)
    command = [*start.launch_argv("launcher.lifecycle.background"), str(folder.path)]
    script = slurm.batch_script(folder.path, command, nodes=1, gpus=gpus, options=options, prepare=False)
    try:
        job = slurm.submit(folder, script, os.environ)
    except NotReady:
        # it holds the whole environment, and nothing will read it
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return Started(folder=str(folder.path), log=str(folder.path / slurm.LOG), job=job)


def _folder(kind: str, name: str) -> Path:
    return rundir.make_folder(rundir.runs_root() / "commands", kind, name)


def finish(words: Sequence[str], limit_s: float, command: str, code: int, status: str) -> int | None:
    about: Mapping[str, str] = {
        "LAUNCH_FINISHED": command,
        "LAUNCH_FINISHED_FOLDER": os.environ.get(FOLDER, os.getcwd()),
        "LAUNCH_FINISHED_STATE": {0: "finished", Exit.INTERRUPTED: "stopped"}.get(code, "failed"),
        "LAUNCH_FINISHED_STATUS": status,
        "LAUNCH_FINISHED_CODE": str(code),
    }
    return on_finish.run(words, {**os.environ, **about}, Path.cwd(), limit_s)


def open_session(folder: RunFolder) -> str | None:
    """Open a tmux session named after a run, with `launch exec RUN` in it; None where that cannot be."""
    # tmux takes no dots and no colons, and `#(...)` for a command
    name = re.sub(r"[.:#\x00-\x1f\x7f]", "_", folder.path.name)
    return _show(name, [*start.launch_argv(), "exec", str(folder.path)])


def _show(name: str, command: Sequence[str]) -> str | None:
    # with fewer files than it needs, tmux's server takes a whole core and shows nothing
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _FILES_OF_TMUX:
        return None
    # several words after the options are an argv, which the shell hands on as it is: the verdict is to stay
    # what tmux starts has the PATH of its server, in which the current folder may stand
    program = isolation.find_program(command[0]) or command[0]
    inside = ["/bin/sh", "-c", _STAY, "sh", program, *command[1:]]
    # that of an earlier attempt waits for its key; to end the last session would end the server
    again = ["respawn-pane", "-k", "-t", f"={name}:", *inside]
    new = ["new-session", "-d", "-s", name, "-x", "200", "-y", "50", *inside]
    for words in (again, new):
        with contextlib.suppress(OSError, ValueError):
            if tools.run_tool(["tmux", *words]).returncode == 0:
                return name
    return None


def main(folder: Path) -> None:
    """Become the command that waits in a folder, in the environment of who queued it and of the job."""
    attempt = attempts.read_attempt(RunFolder(folder))
    attempts.require_own(RunFolder(folder))
    command = attempt.command(os.environ)
    os.chdir(command.cwd)
    os.execvpe(command.argv[0], list(command.argv), dict(command.env))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
