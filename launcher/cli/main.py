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
from launcher.errors import DISK_FULL, Exit, LaunchError, NotReady, not_ready, unreadable, usage
from launcher.machine import process, tools
from launcher.printable import folded, printable
from launcher.redaction import Redactor, redact

# what typer raises for a command line that it cannot parse: only its heir has a public name
_Unparsed: type[Any] = typer.BadParameter.__mro__[1]
# another user's run, and what stands in a file's place and is none
_UNREADABLE = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ESTALE}
# whoever read the answer has gone
_GONE = {errno.EPIPE, errno.EIO}
# what is used up, and the option of `ulimit` that limits it
_LIMITS = {
    errno.ENOMEM: ("there is not enough memory", "-v"),
    errno.EMFILE: ("this command may not open more files", "-n"),
    errno.ENFILE: ("this machine can open no more files", "-n"),
    errno.EAGAIN: ("no further process can be started", "-u"),
    errno.EFBIG: ("a file cannot be written", "-f"),
}
# what tempfile says of a machine where nothing can be written
_NO_TEMPORARY = "No usable temporary directory"
_NO_MEMORY = ("failed to map segment", "annot allocate memory", "can't start new thread")


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code, or exits with it where `argv` is the process'
    own.
    """
    if argv is not None:
        return _run_guarded(argv)
    open_standard_streams()
    code = _run_guarded(sys.argv[1:])
    sys.exit(_flush_streams(code))


def open_standard_streams() -> None:
    """Have those of stdin, stdout and stderr that are closed read and write nothing."""
    process.hold_standard_streams()
    # what they stand for in this process is theirs until it ends
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _flush_streams(code: int) -> int:
    """Write what is buffered. Where that fails, nothing more is written: Python would complain
    at exit.
    """
    failed: OSError | None = None
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError as error:
            failed = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
    if failed is None or failed.errno in _GONE:
        return code
    with contextlib.suppress(OSError):
        os.write(2, f"error[disk-full]: the answer cannot be written: {failed.strerror}\n".encode())
    return code or Exit.NOT_READY


def _run_guarded(arguments: list[str]) -> int:
    try:
        tools.forget_silences()
        _run_command(arguments)
    except SystemExit as stop:
        return _exit_code(stop)
    except LaunchError as error:
        return _report(error, arguments)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except MemoryError:
        return _out_of_memory(arguments)
    except OSError as error:
        return _report_os_error(error, arguments)
    except Exception as error:
        if _is_of_a_limit(error):
            return _out_of_memory(arguments)
        return _bug(error, arguments)
    return Exit.OK


def _exit_code(stop: SystemExit) -> int:
    cause = stop.__context__
    if isinstance(cause, OSError) and cause.errno in _GONE:
        # the reader of a help text has gone, which click calls a failure
        return Exit.OK
    if stop.code is None:
        return Exit.OK
    return stop.code if isinstance(stop.code, int) else Exit.VERDICT


def _report_os_error(error: OSError, arguments: list[str]) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:
        message = "the folder that this shell is in has been removed"
        return _report(not_ready("no-cwd", message, "cd to one that is there"), arguments)
    if error.errno in _UNREADABLE and error.filename is not None:
        return _report(unreadable(error.filename, error), arguments)
    if error.errno in _GONE:
        # nothing is left to say
        return Exit.OK
    if error.errno in DISK_FULL:
        where = error.filename or "what the answer is written to"
        message = f"{where} cannot be written: {error.strerror}"
        help = "free space; a run that has begun continues: launch runs"
        return _report(not_ready("disk-full", message, help), arguments)
    if error.errno in _LIMITS:
        what, option = _LIMITS[error.errno]
        return _report(_limited(f"{what}: {error.strerror}", option), arguments)
    if _NO_TEMPORARY in str(error):
        help = "free space in one of them, name another with TMPDIR, or see `ulimit -f`"
        return _report(not_ready("no-space", str(error.strerror), help), arguments)
    return _bug(error, arguments)


def _limited(message: str, option: str) -> NotReady:
    help = f"a limit of this shell or machine; `ulimit {option}` shows that of the shell"
    return not_ready("resource-limit", message, help)


def _is_of_a_limit(error: Exception) -> bool:
    """Whether a library or a thread found no memory, and says so in words."""
    text = str(error)
    return isinstance(error, ImportError | RuntimeError) and any(
        words in text for words in _NO_MEMORY
    )


def _out_of_memory(arguments: list[str]) -> int:
    try:
        return _report(_limited("the memory that this command may use is used up", "-v"), arguments)
    except MemoryError:
        with contextlib.suppress(OSError):
            os.write(2, b"error[resource-limit]: the memory that this command may use is used up\n")
        return Exit.NOT_READY


def _run_command(arguments: list[str]) -> None:
    """Run one command. A machine that asks wrongly gets its envelope too, people typer's usage
    lines.
    """
    try:
        code = app(args=arguments, prog_name="launch", standalone_mode=False)
    except _Unparsed as error:
        # typer repeats the word that it does not understand, and that may be a token
        instead = overrides(arguments, error.ctx.command) if error.ctx else []
        help = f"write {redact(folded(' '.join(instead)))}" if instead else None
        message = redact(folded(error.message if instead else error.format_message()))
        if _form(arguments) != "json":
            error.format_message = lambda: f"{message}\n  help: {help}" if help else message
            # nobody may be there to read it
            with contextlib.suppress(OSError):
                error.show()
            sys.exit(error.exit_code)
        where = error.ctx.command_path if error.ctx else "launch"
        raise usage("bad-command-line", message, help or f"{where} -h") from None
    sys.exit(code)


def _report(error: LaunchError, arguments: list[str]) -> Exit:
    # what is full, or gone, may be what the answer goes to
    with contextlib.suppress(OSError):
        answer(
            _command_name(arguments), _form(arguments), None, (), error.findings, error.exit_code
        )
    return error.exit_code


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

    # nobody knows here what the file of the command borrowed: any variable may be it
    redactor = Redactor.of(os.environ, os.environ)
    folder = rundir.state_folder()
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    text = "".join(traceback.format_exception(error))
    path = folder / f"bug-{now}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        on = f"launch {__version__}, Python {platform.python_version()}, {platform.platform()}"
        head = f"launch {' '.join(arguments)}\n{on}\n\n"
        # the name of a file need not be UTF-8
        path.write_text(redactor.redact(head + text), encoding="utf-8", errors="backslashreplace")
    except OSError:
        typer.echo(_encodable(redactor.redact(printable(text))), err=True)
    summary = redactor.redact(folded(f"{type(error).__name__}: {error}"))
    typer.echo(_encodable(f"bug in launch: {summary}  (traceback in {path})"), err=True)
    return Exit.BUG


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
