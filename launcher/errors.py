"""Findings, the exception tree and the exit codes: how `launch` says that something is wrong.

LaunchError                  anything a user can cause and mend
├── InvalidConfig            exit 3   carries every finding, not only the first
├── NotReady                 exit 5   this machine lacks something the run needs
└── UsageError               exit 2   the command line itself makes no sense
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from typing import Any, Literal

from launcher import redaction
from launcher.lazy_dataclass import dataclass
from launcher.redaction import Redactor

# the numbers of an OSError that a full disk, or a quota, is
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# ... that a limit of the shell or the machine is: on memory, open files, processes
RESOURCE_LIMITS = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN})

Severity = Literal["error", "warning", "note"]
Layer = Literal["parser", "run", "launch", "trainer"]
About = Literal["file", "plan", "machine"]


class Exit(IntEnum):
    OK = 0
    VERDICT = 1
    USAGE = 2
    CONFIG = 3
    TRAINING = 4
    NOT_READY = 5
    BUG = 70
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing worth saying about a config, a plan or a machine.

    `layer` tells who objects: `parser` is upstream's own parser and `__post_init__`, `run` is
    upstream later on (a crash, or a value that does nothing), `launch` is our own format and rules,
    `trainer` is the training script in a rehearsal. `code` is stable and listed in
    docs/findings.md; `line` is 1-based. `override` is the `key=value` that set what it is about,
    where one did: then there is no line. `about` the machine: it says nothing of the file, and
    `--strict` leaves it a warning; about the plan: it is so on this number of GPUs.
    """

    severity: Severity
    layer: Layer
    code: str
    message: str
    key: str | None = None
    help: str | None = None
    file: str | None = None
    line: int | None = None
    override: str | None = None
    about: About = "file"

    def naming_variables(self, redactor: Redactor) -> Finding:
        """The same finding, with variables named where a value stands that the stage file borrowed.

        Whoever wrote the file may not be who reads the message, nor whose environment it is.
        """
        if not redactor.borrowed:
            return self
        message = redactor.name_variables(self.message)
        help = self.help
        if help is not None:
            help = redactor.name_variables(help)
        return replace(self, message=message, help=help)

    def as_json(self) -> dict[str, object]:
        names = ("severity", "layer", "code", "key", "message", "help", "file", "line", "override")
        return {name: getattr(self, name) for name in names}

    @property
    def place(self) -> str | None:
        """`file:line`, clickable in most terminals, or the override; None without a file."""
        if self.file is None:
            return None
        if self.override is not None:
            return f"override `{shorten(self.override)}` of {self.file}"
        if self.line is None:
            return self.file
        return f"{self.file}:{self.line}"


Complain = Callable[[str, str, str, str | None], Finding]
"""Makes a finding of a code, the key or option as it was written, a message and a help."""


class LaunchError(Exception):
    exit_code: Exit = Exit.USAGE

    def __init__(self, findings: Finding | Iterable[Finding]) -> None:
        if isinstance(findings, Finding):
            findings = [findings]
        self.findings = tuple(findings)
        super().__init__("; ".join(finding.message for finding in self.findings))

    def naming_variables(self, redactor: Redactor) -> LaunchError:
        """The same error, naming the variables whose values the stage file borrowed."""
        return type(self)(finding.naming_variables(redactor) for finding in self.findings)


class UsageError(LaunchError):
    exit_code = Exit.USAGE


class InvalidConfig(LaunchError):
    exit_code = Exit.CONFIG


class NotReady(LaunchError):
    exit_code = Exit.NOT_READY


@contextmanager
def naming_variables(redactor: Redactor) -> Iterator[None]:
    """Have errors name the variables whose values they would show; see
    `Finding.naming_variables`.
    """
    try:
        yield
    except LaunchError as error:
        if not redactor.borrowed:
            raise
        raise error.naming_variables(redactor).with_traceback(
            error.__traceback__
        ) from error.__cause__


def launch_finding(
    severity: Severity, code: str, message: str, help: str | None = None, **place: Any
) -> Finding:
    return Finding(
        severity=severity, layer="launch", code=code, message=message, help=help, **place
    )


def usage(code: str, message: str, help: str | None = None) -> UsageError:
    return UsageError(launch_finding("error", code, message, help))


def not_ready(
    code: str, message: str, help: str | None = None, *, file: str | None = None
) -> NotReady:
    return NotReady(launch_finding("error", code, message, help, file=file))


def unreadable(path: object, error: OSError) -> NotReady:
    return not_ready("unreadable-file", f"cannot be read: {error.strerror}", file=str(path))


def unwritable(path: object, error: OSError) -> NotReady:
    message = f"cannot be written: {error.strerror or error}"
    return not_ready("unwritable-file", message, file=str(path))


def select_errors(findings: Iterable[Finding], *, strict: bool = False) -> tuple[Finding, ...]:
    """Those findings that stop a run: errors, and under `strict` warnings about the file too."""
    return tuple(finding for finding in findings if _is_stopping(finding, strict=strict))


def _is_stopping(finding: Finding, *, strict: bool) -> bool:
    if finding.severity == "warning":
        return strict and finding.about != "machine"
    return finding.severity == "error"


def set_subject(subject: About, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The same findings as ones about this: see `Finding.about`."""
    return tuple(replace(finding, about=subject) for finding in findings)


def shorten(value: object, limit: int = 80) -> str:
    """A value for a message: its text, cut where it is long."""
    text = str(value)
    if len(text) > limit:
        # half a token is not known for one when it is shown
        text = redaction.name_in_environment(text)
    if len(text) <= limit:
        return text
    return f"{text[: limit - 3]}..."
