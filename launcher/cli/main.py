"""The console entry: every way out of a command is one of the documented exit codes."""

import contextlib
import datetime
import errno
import itertools
import os
import platform
import sys
import traceback
from typing import Any

import typer

from launcher import __version__
from launcher.cli.commands import app
from launcher.cli.help import overrides
from launcher.cli.options import Findings, answer
from launcher.errors import DISK_FULL, Exit, LaunchError, not_ready, unreadable, usage
from launcher.printable import folded, printable
from launcher.redaction import forget, redact

# what typer raises for a command line that it cannot parse: only its heir has a public name
_Unparsed: type[Any] = typer.BadParameter.__mro__[1]
# another user's run, and what stands in a file's place and is none
_UNREADABLE = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ESTALE}


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code, or exits with it where `argv` is the process' own."""
    code = _run_guarded(sys.argv[1:] if argv is None else argv)
    if argv is None:
        sys.exit(code)
    return code


def _run_guarded(arguments: list[str]) -> int:
    try:
        _run_command(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except LaunchError as error:
        return _report(error, arguments)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except OSError as error:
        try:
            os.getcwd()
        except FileNotFoundError:
            message = "the folder that this shell is in has been removed"
            return _report(not_ready("no-cwd", message, "cd to one that is there"), arguments)
        if error.errno in _UNREADABLE and error.filename is not None:
            return _report(unreadable(error.filename, error), arguments)
        full = error.errno in DISK_FULL
        if not full and error.errno not in {errno.EPIPE, errno.EIO}:
            return _bug(error, arguments)
        if full:
            where = error.filename or "what the answer is written to"
            message = f"{where} cannot be written: {error.strerror}"
            help = "free space; a run that has begun continues: launch runs"
            # what is full may be what the answer goes to
            with contextlib.suppress(OSError):
                _report(not_ready("disk-full", message, help), arguments)
                sys.stdout.flush()
        # the reader has gone: nothing is left to say, and Python must not complain at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return Exit.NOT_READY if full else Exit.OK
    except Exception as error:
        return _bug(error, arguments)
    return Exit.OK


def _run_command(arguments: list[str]) -> None:
    """Run one command. A machine that asks wrongly gets its envelope too, people typer's usage lines."""
    forget()
    try:
        code = app(args=arguments, prog_name="launch", standalone_mode=False)
    except _Unparsed as error:
        # typer repeats the word that it does not understand, and that may be a token
        instead = overrides(arguments, error.ctx.command) if error.ctx else []
        help = f"write {redact(folded(' '.join(instead)))}" if instead else None
        message = redact(folded(error.message if instead else error.format_message()))
        if _form(arguments) != "json":
            error.format_message = lambda: f"{message}\n  help: {help}" if help else message
            error.show()
            sys.exit(error.exit_code)
        where = error.ctx.command_path if error.ctx else "launch"
        raise usage("bad-command-line", message, help or f"{where} -h") from None
    sys.exit(code)


def _report(error: LaunchError, arguments: list[str]) -> Exit:
    return answer(_command_name(arguments), _form(arguments), None, (), error.findings, error.exit_code)


def _command_name(arguments: list[str]) -> str:
    """The command of a command line as its answers name it: `pin diff`, not `pin`."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    grouped = words[:1] in [[group.name] for group in app.registered_groups]
    return " ".join(words[: 2 if grouped else 1]) or "launch"


def _form(arguments: list[str]) -> Findings:
    line = " ".join(arguments).replace("--format=", "--format ") + " "
    forms: tuple[Findings, ...] = ("json", "github")
    return next((form for form in forms if f"--format {form} " in line), "text")


def _bug(error: Exception, arguments: list[str]) -> int:
    from launcher.runs import rundir

    folder = rundir.state_folder()
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    text = "".join(traceback.format_exception(error))
    path = folder / f"bug-{now}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        on = f"launch {__version__}, Python {platform.python_version()}, {platform.platform()}"
        head = f"launch {' '.join(arguments)}\n{on}\n\n"
        # the name of a file need not be UTF-8
        path.write_text(redact(head + text), encoding="utf-8", errors="backslashreplace")
    except OSError:
        typer.echo(_encodable(redact(printable(text))), err=True)
    summary = redact(folded(f"{type(error).__name__}: {error}"))
    typer.echo(_encodable(f"bug in launch: {summary}  (traceback in {path})"), err=True)
    return Exit.BUG


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
