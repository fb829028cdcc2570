"""Checksums of checkpoints: taken beside the training once one is complete, compared before a
resume.

Files are read whole: a changed block in an optimizer's state shows in no header. sha256 takes about
3 s a GB on one slow core; the supervisor does it at the lowest priority, mostly out of the page
cache. They lie in the run folder and beside the lease in the output folder, for a run folder may
vanish; nothing may be written into a checkpoint that upstream is about to delete.
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

# between two looks for new checkpoints; one that was written to since the last is not complete yet
EVERY_S = 2.0
_WHOLE = 2**63


class ChecksumThread(threading.Thread):
    """Takes the checksums of checkpoints while a run trains into `output`."""

    def __init__(self, folder: RunFolder, backend: str, output: Path | None, ranks: int) -> None:
        super().__init__(name="checksums", daemon=True)
        self.folder = folder
        self.backend = backend
        self.output = output
        self.ranks = ranks
        self.over = threading.Event()
        self.digests: dict[str, dict[str, Any]] = {}
        for name, digests in read_checksums(folder, output).items():
            # a name may come again after its folder was set aside or deleted
            if output is not None and (output / name).is_dir():
                self.digests[name] = digests

    def run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self.over.wait(EVERY_S):
            self._record_checkpoints(EVERY_S)

    def end(self, *, resumable: bool) -> None:
        """Stop at the end of the training; the last checkpoints count if it may be resumed."""
        self.over.set()
        if resumable:
            self.join()
            self._record_checkpoints(0)

    def _record_checkpoints(self, quiet_s: float) -> None:
        # whatever fails here must not end the watch over the training
        with contextlib.suppress(OSError, ValueError):
            for checkpoint in checkpoints.find(
                self.backend, self.output, ranks=self.ranks, digested=self.digests
            ):
                if not checkpoint.complete:
                    continue
                digests = _hash_files(checkpoint.path, quiet_s)
                if digests:
                    self.digests[checkpoint.name] = digests
                    self._write()

    def _write(self) -> None:
        content = {"checkpoints": self.digests}
        files.write_json(self.folder.checksums, content)
        if self.output is not None:
            # where no lease is, nobody but this run goes by what lies there
            with contextlib.suppress(OSError):
                files.write_json(find_copy_beside_lease(self.output), content)


def find_copy_beside_lease(output: Path) -> Path:
    """The copy of the checksums that outlives the run folder."""
    return output / lease.FOLDER / "checksums.json"


def read_checksums(
    folder: RunFolder | None, output: Path | None = None
) -> dict[str, dict[str, Any]]:
    """The checksums of files by checkpoint: those in the run folder, and those in the output
    folder.
    """
    paths = []
    if folder is not None:
        paths.append(folder.checksums)
    if output is not None:
        # whoever trained there last has written it
        paths.append(find_copy_beside_lease(output))
    recorded = {}
    for path in paths:
        for name, digests in Record(rundir.read_json(path)).part("checkpoints").items():
            if isinstance(digests, dict):
                recorded[name] = digests
    return recorded


def read_recorded(folder: RunFolder | None, checkpoint: Checkpoint) -> dict[str, Any]:
    """The checksums of the files of a checkpoint; empty if none were recorded."""
    return read_checksums(folder, checkpoint.path.parent).get(checkpoint.name, {})


def find_fault(folder: RunFolder | None, checkpoint: Checkpoint) -> str | None:
    """What is not as it was saved; without checksums by torch's own CRCs, and whether weights are
    all zeros.
    """
    digests = read_recorded(folder, checkpoint)
    for name, digest in digests.items():
        try:
            now = _hash_file(checkpoint.path / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if now != digest:
            before = str(digest)[:12]
            return f"{name} was changed after it was saved: sha256 {before}, now {now[:12]}"
    if digests:
        return None
    for path in _list_files(checkpoint.path):
        damage = _find_damage(path)
        if damage is not None:
            return damage
    return None


def _hash_file(path: Path) -> str:
    return content.read_content(path, whole_below=_WHOLE)[0].digest


def _find_damage(path: Path) -> str | None:
    """What a file shows by itself."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
            return bad and f"{path.name} is damaged: the CRC of {bad} does not match"
    except (OSError, zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
        return f"{path.name} is damaged"
    if path.suffix == ".safetensors" and model_files.is_blank(path):
        return f"every weight in {path.name} is 0"
    return None


def _hash_files(folder: Path, quiet_s: float) -> dict[str, str]:
    """The checksums by name; empty if a file was written less than `quiet_s` ago, or meanwhile."""
    before = _read_times(folder)
    if any(time.time() - written_ns / 10**9 < quiet_s for written_ns in before.values()):
        return {}
    digests = {str(path.relative_to(folder)): _hash_file(path) for path in before}
    if _read_times(folder) != before:
        return {}
    return digests


def _read_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in _list_files(folder)}


def _list_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
