"""`launch validate-config --fix`: the text of a stage file with only the faulty spans edited.

Nothing is written out anew from values: comments, quotes, order, line ends and blank lines stay byte
for byte. What is not mended is left with the reason.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import config, stage
from launcher.builder import bad
from launcher.config import Config
from launcher.errors import Finding, NotReady
from launcher.mends import Judge, State
from launcher.stage import Judged
from launcher.surgery import BREAK
from launcher.upstream import Locator

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Change:
    """One edit, in words for people; `line` is 1-based, of the text as it was."""

    line: int
    key: str
    what: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}"

    def as_json(self) -> dict[str, object]:
        """For envelopes."""
        return {"line": self.line, "key": self.key, "what": self.what}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A file's text before and after; `left` is everything still found about it afterwards.

    Of a finding that could have been mended and was not, the help says why.
    """

    path: Path
    before: str
    after: str
    changes: tuple[Change, ...]
    left: tuple[Finding, ...]

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return self.after != self.before

    def with_reasons(self, found: Sequence[Finding]) -> tuple[Finding, ...]:
        """Findings of the file as it stands now, with why those that could be mended were not."""
        helps = {(f.code, f.key, f.message): f.help for f in self.left}
        return tuple(replace(f, help=helps.get((f.code, f.key, f.message), f.help)) for f in found)

    def as_json(self) -> dict[str, object]:
        """For envelopes."""
        changes = [change.as_json() for change in self.changes]
        return {"path": str(self.path), "changed": self.changed, "changes": changes}

    def diff(self) -> str:
        """The edits as a unified diff, as `git apply` and `patch` take it; empty where there are none."""
        name = str(self.path)
        told = difflib.unified_diff(_lines(self.before), _lines(self.after), name, name)
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in told
        )


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def of_file(path: Path, *, stage_name: str | None = None, locator: Locator | None = None) -> Fix:
    """The mended text of a file, judged as `stage.judge` does it; writes nothing.

    Raises InvalidConfig where the file cannot be read at all: then there is nothing to mend.
    """
    locator = locator or Locator()

    def judge(loaded: Config) -> Judged:
        return stage.judge(loaded, stage=stage_name, locator=locator)

    judged = judge(config.load(path))
    text = _read(path).decode("utf-8-sig")
    return propose(text, judged, lambda new: judge(config.load(path, text=new)))


def propose(text: str, judged: Judged, again: Judge) -> Fix:
    """Mend what can be mended mechanically in the text of `judged.config.path`.

    `again` judges another text in place of the file's, and raises InvalidConfig where it cannot be
    loaded. Pure but for what `again` does.
    """
    state = State(text, judged, again, tuple(range(1, len(BREAK.findall(text)) + 2)))
    changes: list[Change] = []
    while True:
        declined: dict[Finding, str] = {}
        mends = state.best(declined)
        if not mends:
            break
        changes += [Change(state.lines[m.row], m.finding.key or "", m.what) for m in mends]
        state = state.then(mends)
    left = tuple(_explained(f, declined.get(f)) for f in state.judged.findings)
    ordered = tuple(sorted(changes, key=lambda change: change.line))
    return Fix(path=judged.config.path, before=text, after=state.text, changes=ordered, left=left)


def _explained(finding: Finding, why: str | None) -> Finding:
    if why is None:
        return finding
    help = f"{finding.help}; " if finding.help else ""
    return replace(finding, help=f"{help}--fix leaves it: {why}")


def apply(fix: Fix) -> None:
    """Write the new text in place of the old one, in one step; a file with no change is not touched.

    Permissions, a byte order mark and the file that a link points at stay what they are. Raises
    NotReady where the file cannot be written, or is no longer the one that was judged.
    """
    if not fix.changed:
        return
    target = Path(os.path.realpath(fix.path))
    old = _read(target)
    if old.removeprefix(BOM).decode("utf-8", "replace") != fix.before:
        message = "was changed in the meantime, and not written"
        raise NotReady(bad(fix.path, "file-changed", message, None, "run it again"))
    new = fix.after.encode("utf-8")
    try:
        told = target.stat()
        # replacing needs the folder's permission only: the file's own is asked here
        if not told.st_mode & 0o222 or not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
        _replace(target, BOM + new if old.startswith(BOM) else new, told)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        help = f"chmod u+w {fix.path}, or write what --diff shows by hand"
        raise NotReady(bad(fix.path, "unwritable-file", message, None, help)) from None


def _replace(target: Path, content: bytes, told: os.stat_result) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            with contextlib.suppress(OSError):
                os.fchown(stream.fileno(), told.st_uid, told.st_gid)
            # after the owner: a change of owner takes bits away
            os.fchmod(stream.fileno(), stat.S_IMODE(told.st_mode))
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise NotReady(bad(path, "unreadable-file", message, None)) from None
