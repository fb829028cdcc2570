"""Checksums of checkpoints: taken beside the training once one is complete, compared before a resume.

Files are read whole: a changed block in an optimizer's state shows in no header. sha256 takes about 3 s a GB on
one slow core; the supervisor does it at the lowest priority, mostly out of the page cache. They lie in the run folder
and beside the lease in the output folder, for a run folder may vanish; nothing may be written into a checkpoint that
upstream is about to delete.
"""

import contextlib
import os
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher import files
from launcher.artifacts import checkpoints, model_files
from launcher.artifacts import digest as content
from launcher.artifacts.checkpoints import Checkpoint
from launcher.runs import lease, rundir
from launcher.runs.record import Record
from launcher.runs.rundir import RunFolder

EVERY_S = 2.0  # between two looks for new checkpoints; one that was written to within this time is not complete yet
_WHOLE = 2**63


class ChecksumThread(threading.Thread):
    def __init__(self, folder: RunFolder, backend: str, output: Path | None, ranks: int) -> None:
        super().__init__(name="checksums", daemon=True)
        self.folder = folder
        self.backend = backend
        self.output = output
        self.ranks = ranks
        self.over = threading.Event()
        # a name may come again after its folder was set aside or deleted
        self.known = {
            name: digests for name, digests in read(folder, output).items() if output and (output / name).is_dir()
        }

    def run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self.over.wait(EVERY_S):
            self._look()

    def end(self, *, resumable: bool) -> None:
        """Training is over; where it may be resumed, the last checkpoints count too."""
        self.over.set()
        if resumable:
            self.join()
            self._look(quiet_s=0)

    def _look(self, quiet_s: float = EVERY_S) -> None:
        # whatever fails here must not end the watch over the training
        with contextlib.suppress(OSError, ValueError):
            found = checkpoints.find(self.backend, self.output, ranks=self.ranks, known=self.known.keys())
            for one in found:
                if one.complete and (taken := _taken(one.path, quiet_s)):
                    self.known[one.name] = taken
                    self._write()

    def _write(self) -> None:
        content = {"checkpoints": self.known}
        files.write_json(self.folder.checksums, content)
        if self.output is not None:
            # where no lease is, nobody but this run goes by what lies there
            with contextlib.suppress(OSError):
                files.write_json(beside_lease(self.output), content)


def beside_lease(output: Path) -> Path:
    """The copy of the digests that outlives the run folder."""
    return output / lease.FOLDER / "checksums.json"


def read(folder: RunFolder | None, output: Path | None = None) -> dict[str, dict[str, Any]]:
    """The digests of checkpoints by their names: those in the run folder, and those in the output folder."""
    recorded: dict[str, dict[str, Any]] = {}
    if folder is not None:
        recorded |= _read(folder.checksums)
    if output is not None:
        # whoever trained there last has written it
        recorded |= _read(beside_lease(output))
    return recorded


def _read(path: Path) -> dict[str, dict[str, Any]]:
    recorded = Record(rundir.read_json(path)).part("checkpoints")
    return {str(name): digests for name, digests in recorded.items() if isinstance(digests, dict)}


def recorded(folder: RunFolder | None, one: Checkpoint) -> bool:
    """Whether the bytes of a checkpoint can be compared with what was saved."""
    return bool(_digests(folder, one))


def _digests(folder: RunFolder | None, one: Checkpoint) -> dict[str, Any]:
    return read(folder, one.path.parent).get(one.name, {})


def fault(folder: RunFolder | None, one: Checkpoint) -> str | None:
    """What is not as it was saved; without checksums by torch's own CRCs, and whether weights are all zeros."""
    known = _digests(folder, one)
    for name, digest in known.items():
        try:
            found = content.read(one.path / name, whole_below=_WHOLE)[0].digest
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != digest:
            return f"{name} was changed after it was saved: sha256 {str(digest)[:12]}, now {found[:12]}"
    return None if known else next(filter(None, map(_own_fault, _files(one.path))), None)


def _own_fault(path: Path) -> str | None:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
            return None if bad is None else f"{path.name} is damaged: the CRC of {bad} does not match"
    except (OSError, zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
        return f"{path.name} is damaged"
    if path.suffix == ".safetensors" and model_files.blank(path):
        return f"every weight in {path.name} is 0"
    return None


def _taken(folder: Path, quiet_s: float) -> dict[str, str]:
    """The digests; empty where a file was written to lately, or meanwhile."""
    paths = list(_files(folder))
    before = [path.stat() for path in paths]
    if any(time.time() - one.st_mtime < quiet_s for one in before):
        return {}
    found = [content.read(path, whole_below=_WHOLE)[0].digest for path in paths]
    if [path.stat().st_mtime_ns for path in _files(folder)] != [b.st_mtime_ns for b in before]:
        return {}
    return {str(path.relative_to(folder)): digest for path, digest in zip(paths, found, strict=True)}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
