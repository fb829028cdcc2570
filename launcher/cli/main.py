"""The console entry: every way out of a command is one of the documented exit codes."""

import contextlib
import datetime
import errno
import gc
import itertools
import os
import platform
import sys
import traceback
from typing import Any, NoReturn

import typer

from launcher import __version__
from launcher.cli.commands import build_app
from launcher.cli.help import suggest_overrides
from launcher.cli.options import Findings, answer, app
from launcher.errors import DISK_FULL, Exit, LaunchError, NotReady, not_ready, unreadable, usage
from launcher.machine import extensions, process, tools
from launcher.printable import indent_lines, make_printable
from launcher.redaction import Redactor, redact

# what typer raises for a command line that it cannot parse: only a subclass has a public name
_Unparsed: type[Any] = typer.BadParameter.__mro__[1]
# files of other users, and what is no file
_UNREADABLE = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ESTALE}
# the reader of the answer has gone
_GONE = {errno.EPIPE, errno.EIO}
# what is used up
_LIMITS = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EFBIG}
# what tempfile says of a machine where nothing can be written
_NO_TEMPORARY = "No usable temporary directory"
_NO_MEMORY = ("failed to map segment", "annot allocate memory", "can't start new thread")


def main(argv: list[str] | None = None) -> int:
    """Run `argv` and return its exit code; without it, run that of this process and exit."""
    if argv is not None:
        return _run_guarded(argv)
    open_standard_streams()
    code = _flush_streams(_run_guarded(sys.argv[1:]))
    # without this, Python collects garbage once more before it exits
    gc.freeze()
    sys.exit(code)


def open_standard_streams() -> None:
    """Replace those of stdin, stdout and stderr that are closed by /dev/null."""
    process.hold_standard_streams()
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _flush_streams(code: int) -> int:
    """Flush stdout and stderr, and return the exit code.

    A stream that fails goes to /dev/null from then on, or Python would complain at exit.
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
        extensions.load()
        _run_command(arguments)
    except SystemExit as stop:
        return _convert_exit_code(stop)
    except LaunchError as error:
        return _report_error(error, arguments)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except MemoryError:
        return _report_out_of_memory(arguments)
    except OSError as error:
        return _report_os_error(error, arguments)
    except Exception as error:
        if _is_out_of_memory(error):
            return _report_out_of_memory(arguments)
        return _report_bug(error, arguments)
    return Exit.OK


def _convert_exit_code(stop: SystemExit) -> int:
    cause = stop.__context__
    if isinstance(cause, OSError) and cause.errno in _GONE:
        # the reader of a help text has gone, which click calls a failure
        return Exit.OK
    if stop.code is None:
        return Exit.OK
    if isinstance(stop.code, int):
        return stop.code
    return Exit.VERDICT


def _report_os_error(error: OSError, arguments: list[str]) -> int:
    if error.errno in _GONE:
        # nothing is left to say
        return Exit.OK
    refusal = _explain_os_error(error)
    if refusal is None:
        return _report_bug(error, arguments)
    return _report_error(refusal, arguments)


def _explain_os_error(error: OSError) -> LaunchError | None:
    """The error for the user; None if neither the machine nor a file of the user is the cause."""
    if not _has_working_folder():
        message = "the folder that this shell is in has been removed"
        return not_ready("no-cwd", message, "cd to one that is there")
    if error.errno in _UNREADABLE and error.filename is not None:
        return unreadable(error.filename, error)
    if error.errno in DISK_FULL:
        where = error.filename or "what the answer is written to"
        message = f"{where} cannot be written: {error.strerror}"
        help = "free space; a run that has begun continues: launch runs"
        return not_ready("disk-full", message, help)
    if error.errno in _LIMITS:
        return _explain_limit(str(error.strerror))
    if _NO_TEMPORARY in str(error):
        help = "free space in one of them, name another with TMPDIR, or see `ulimit -f`"
        return not_ready("no-space", str(error.strerror), help)
    return None


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _explain_limit(message: str) -> NotReady:
    help = "a limit of this shell or machine; `ulimit -a` shows those of the shell"
    return not_ready("resource-limit", message, help)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a library or a thread got no memory, by the words of its error."""
    text = str(error)
    is_of_library = isinstance(error, ImportError | RuntimeError)
    return is_of_library and any(words in text for words in _NO_MEMORY)


def _report_out_of_memory(arguments: list[str]) -> int:
    message = "the memory that this command may use is used up"
    try:
        return _report_error(_explain_limit(message), arguments)
    except MemoryError:
        with contextlib.suppress(OSError):
            os.write(2, f"error[resource-limit]: {message}\n".encode())
        return Exit.NOT_READY


def _run_command(arguments: list[str]) -> None:
    """Run one command. A command line that cannot be parsed is refused as text or as JSON."""
    # empty if a shell completes a line
    name = arguments[0] if arguments else ""
    try:
        code = build_app(name)(args=arguments, prog_name="launch", standalone_mode=False)
    except _Unparsed as error:
        _refuse_command_line(error, arguments)
    sys.exit(code)


def _refuse_command_line(error: Any, arguments: list[str]) -> NoReturn:
    message = error.format_message()
    where = "launch"
    help = None
    if error.ctx is not None:
        where = error.ctx.command_path
        words = suggest_overrides(arguments, error.ctx.command)
        if words:
            message = error.message
            help = f"write {redact(indent_lines(' '.join(words)))}"
    # typer repeats the word that it does not understand, and that may be a token
    message = redact(indent_lines(message))
    if _find_format(arguments) == "json":
        raise usage("bad-command-line", message, help or f"{where} -h") from None
    if help is not None:
        message += f"\n  help: {help}"
    error.format_message = lambda: message
    # the reader may have gone
    with contextlib.suppress(OSError):
        error.show()
    sys.exit(error.exit_code)


def _report_error(error: LaunchError, arguments: list[str]) -> Exit:
    # what is full or gone may be where the answer goes
    with contextlib.suppress(OSError):
        answer(
            _find_command_name(arguments),
            _find_format(arguments),
            None,
            (),
            error.findings,
            error.exit_code,
        )
    return error.exit_code


def _find_command_name(arguments: list[str]) -> str:
    """The command of a command line as its answers name it: `pin diff`, not `pin`."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not words:
        return "launch"
    for group in app.registered_groups:
        if group.name == words[0]:
            return " ".join(words[:2])
    return words[0]


def _find_format(arguments: list[str]) -> Findings:
    line = " ".join(arguments).replace("--format=", "--format ") + " "
    if "--format json " in line:
        return "json"
    if "--format github " in line:
        return "github"
    return "text"


def _report_bug(error: Exception, arguments: list[str]) -> int:
    from launcher.runs import rundir

    # the stage file may have borrowed any variable
    redactor = Redactor.of(os.environ, os.environ)
    folder = rundir.find_state_folder()
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    text = "".join(traceback.format_exception(error))
    path = folder / f"bug-{now}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        on = f"launch {__version__}, Python {platform.python_version()}, {platform.platform()}"
        line = " ".join(arguments)
        head = f"launch {line}\n{on}\n\n"
        # the name of a file need not be UTF-8
        path.write_text(redactor.redact(head + text), encoding="utf-8", errors="backslashreplace")
    except OSError:
        typer.echo(_escape_unencodable(redactor.redact(make_printable(text))), err=True)
    summary = redactor.redact(indent_lines(f"{type(error).__name__}: {error}"))
    typer.echo(_escape_unencodable(f"bug in launch: {summary}  (traceback in {path})"), err=True)
    return Exit.BUG


def _escape_unencodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
