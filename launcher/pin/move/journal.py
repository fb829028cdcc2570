"""Files of a clone replaced together, all or none, from a copy that is whole before it begins.

A journal lies in the clone's git folder. It is renamed into place once it holds every new text;
from then on the change happens, by this process or by the next one.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from launcher.errors import Finding, NotReady, launch_finding
from launcher.files import write_bytes
from launcher.lazy_dataclass import dataclass

NAME = "launch-pin-move"
_PART = f"{NAME}.part"
_GITLINK = "160000"


@dataclass(frozen=True, slots=True)
class _Replacement:
    """One file of a journal: the digests of its text before and after, None without a file."""

    path: str
    before: str | None
    after: str | None

    def is_done(self, clone: Path) -> bool:
        return _digest_file(clone / self.path) == self.after

    def is_foreign(self, clone: Path) -> bool:
        """Whether somebody else has changed the file since."""
        return _digest_file(clone / self.path) not in {self.before, self.after}


@dataclass(frozen=True, slots=True)
class Journal:
    """A folder with the new texts of files, and the clone that they are for."""

    clone: Path
    folder: Path

    @property
    def exists(self) -> bool:
        return (self.folder / "changes.json").is_file()

    def write(self, files: Mapping[str, bytes | None], gitlink: Mapping[str, str]) -> None:
        """Prepare new texts of files, by path in the clone, and the commits of submodules.

        A file without a text is removed.
        """
        part = self.folder.with_name(_PART)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        replacements: list[_Replacement] = []
        for number, name in enumerate(sorted(files)):
            raw = files[name]
            before = _digest_file(self.clone / name)
            after = None
            if raw is not None:
                write_bytes(part / str(number), raw, durable=True)
                after = _digest(raw)
            replacements.append(_Replacement(name, before, after))
        record = {"files": list(map(asdict, replacements)), "gitlink": dict(gitlink)}
        text = json.dumps(record, indent=1)
        write_bytes(part / "changes.json", text.encode(), durable=True)
        os.rename(part, self.folder)

    def apply(self) -> None:
        """Record the submodules' commits, replace files that are not new yet, remove the journal.

        Raises NotReady, before it writes anything, where a file was changed after it was prepared.
        """
        record = json.loads((self.folder / "changes.json").read_bytes())
        replacements = [_Replacement(**row) for row in record["files"]]
        findings = []
        for replacement in replacements:
            if replacement.is_foreign(self.clone):
                findings.append(self._describe_foreign(replacement.path))
        if findings:
            raise NotReady(findings)
        begun = any(replacement.is_done(self.clone) for replacement in replacements)
        # what can be refused comes first
        for path, commit in record["gitlink"].items():
            self._record_commit(path, commit, begun=begun)
        for number, replacement in enumerate(replacements):
            if replacement.is_done(self.clone):
                continue
            target = self.clone / replacement.path
            if replacement.after is None:
                target.unlink()
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            _replace_file(target, (self.folder / str(number)).read_bytes())
        shutil.rmtree(self.folder)

    def _describe_foreign(self, path: str) -> Finding:
        message = "was changed after a move of the pin began that did not end"
        help = "undo the change and repeat the command, or give that move up"
        help = f"{help}: rm -r {self.folder}"
        return launch_finding("error", "move-interrupted", message, help, file=path)

    def _record_commit(self, path: str, commit: str, *, begun: bool) -> None:
        """Write a submodule's commit into git's index; a refusal before it has `begun` ends it."""
        entry = f"{_GITLINK},{commit},{path}"
        words = ["git", "-C", str(self.clone), "update-index", "--add", "--cacheinfo", entry]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode == 0:
            return
        if not begun:
            shutil.rmtree(self.folder)
        reason = " ".join(done.stderr.split())
        message = f"git cannot record the commit of {path}: {reason}"
        raise NotReady(
            launch_finding("error", "move-interrupted", message, "repeat the command", file=path)
        )


def _replace_file(target: Path, raw: bytes) -> None:
    """Write a file whole. A kill leaves one file beside it, which the next run overwrites."""
    beside = target.with_name(f".{target.name}.{NAME}")
    with beside.open("wb") as stream:
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())
    if target.exists():
        shutil.copymode(target, beside)
    os.replace(beside, target)


def _digest_file(path: Path) -> str | None:
    try:
        return _digest(path.read_bytes())
    except FileNotFoundError:
        return None


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
