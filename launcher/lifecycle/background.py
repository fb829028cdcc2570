"""A command that starts several runs, on its own: as a process without a terminal, or as a Slurm job.

It is the same command line without `--detach` and `--slurm`, in a folder below `runs/commands` that keeps
what it prints.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Exit, NotReady
from launcher.lifecycle import on_finish, start, tmux
from launcher.runs import attempt as attempts
from launcher.runs import rundir, runner, sbatch, slurm
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder

FOLDER = "LAUNCH_COMMAND_FOLDER"
"""The variable that names the folder of a command that runs on its own."""
LOG = "console.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Where a command runs: the process, or the job, and the file that takes what it prints."""

    folder: Path
    log: Path
    pid: int | None = None
    session: str | None = None
    job: str | None = None

    def as_json(self) -> dict[str, object]:
        """The data of the command's answer."""
        return {
            "folder": str(self.folder),
            "log": str(self.log),
            "pid": self.pid,
            "session": self.session,
            "job": self.job,
        }

    def lines(self) -> list[str]:
        """How to look at it, and how to end it."""
        end = f"kill -INT {self.pid}" if self.job is None else f"scancel {self.job}"
        lines = [] if self.job is None else [f"job: {self.job}"]
        lines += [] if self.session is None else [f"tmux attach -t {self.session}"]
        return [*lines, f"log: tail -F {self.log}", f"stop: {end}"]


def own_words(argv: Sequence[str]) -> list[str]:
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
    try:
        with runner.private(folder / LOG) as log:
            child = subprocess.Popen(
                [*start.ours(), *own_words(argv)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, FOLDER: str(folder)},
            )
    except OSError as error:
        raise rundir.not_writable(folder, error.strerror) from None
    shown = ["tail", f"--pid={child.pid}", "-n", "+1", "-F", str(folder / LOG)]
    session = tmux.show(folder.name, shown)
    return Started(folder=folder, log=folder / LOG, pid=child.pid, session=session)


def queue(kind: str, name: str, argv: Sequence[str], *, gpus: int, options: sbatch.Options) -> Started:
    """Queue a command line as a job on one machine. Raises NotReady with sbatch's complaint."""
    folder = RunFolder(_folder(kind, name))
    Attempt(
        number=1,
        argv=(*start.ours(), *own_words(argv)),
        env={FOLDER: str(folder.path)},
        environ=dict(os.environ),
        cwd=os.getcwd(),
        stage=kind,
        backend="",
        title=f"{kind} {name}",
    ).write(folder)
    script = sbatch.script(
        name=folder.path.name,
        folder=folder.path,
        nodes=1,
        gpus=gpus,
        options=options,
        command=[*start.ours()[:-1], "launcher.lifecycle.background", str(folder.path)],
    )
    try:
        job = slurm.submit(folder, script, nodes=1, options=options, environ=os.environ)
    except NotReady:
        # it holds the whole environment, and nothing will read it
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return Started(folder=folder.path, log=folder.path / sbatch.LOG, job=job.id)


def _folder(kind: str, name: str) -> Path:
    return rundir.new_folder(rundir.runs_root() / "commands", kind, name)


def finish(words: Sequence[str], limit_s: float, command: str, code: int, status: str) -> int | None:
    """Run what `--on-finish` names, once a command has ended; see `on_finish.run`."""
    about: Mapping[str, str] = {
        "LAUNCH_FINISHED": command,
        "LAUNCH_FINISHED_FOLDER": os.environ.get(FOLDER, os.getcwd()),
        "LAUNCH_FINISHED_STATE": {0: "finished", Exit.INTERRUPTED: "stopped"}.get(code, "failed"),
        "LAUNCH_FINISHED_STATUS": status,
        "LAUNCH_FINISHED_CODE": str(code),
    }
    return on_finish.run(words, {**os.environ, **about}, Path.cwd(), limit_s)


def main(folder: Path) -> None:
    """Become the command that waits in a folder, in the environment of who queued it and of the job."""
    attempt = attempts.read(RunFolder(folder))
    attempts.require_own(RunFolder(folder))
    command = attempt.command(os.environ)
    os.chdir(command.cwd)
    os.execvpe(command.argv[0], list(command.argv), dict(command.env))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
