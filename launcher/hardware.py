"""The machine beneath training: driver against torch, shared memory, open files.

Everything is read from files; nothing is allocated on a GPU.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Finding, said
from launcher.machine import Trainer

SHM = Path("/dev/shm")
LEAST_SHM = 2**30
"""Bytes that several GPUs should find in /dev/shm: NCCL's buffers and the loaders' batches go there."""
LEAST_FILES = 1024

_TORCH = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*(?:'([\d.]+)[^']*'|None)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """What the trainer's torch was built for, from its own version file; None: neither."""

    version: str
    cuda: str | None = None
    hip: str | None = None


def torch_of(trainer: Trainer) -> Torch | None:
    """The trainer's torch; None where it has none, or where its version file says nothing."""
    for folder in trainer.path:
        try:
            text = (folder / "torch" / "version.py").read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        told = {m[1]: m[2] for m in _TORCH.finditer(text)}
        if "cuda" in told:
            version = trainer.packages.get("torch", "unknown")
            return Torch(version=version, cuda=told["cuda"], hip=told.get("hip"))
        return None
    return None


def driver_and_torch(
    torch: Torch | None, cuda: tuple[int, int] | None, trainer: Trainer
) -> Iterator[Finding]:
    """Whether torch can use the GPUs that the driver serves. `cuda` is the driver's newest version.

    Within one major version an older driver serves newer CUDA (NVIDIA's minor version compatibility).
    """
    if torch is None or torch.hip is not None:
        return
    install = f"{trainer.python} -m pip install --force-reinstall torch --index-url"
    index = "https://download.pytorch.org/whl/cu" + ("" if cuda is None else f"{cuda[0]}{cuda[1]}")
    if torch.cuda is None:
        yield said(
            "error", "cpu-torch", f"torch {torch.version} of {trainer.python} is built for the CPU",
            f"install a CUDA build, such as {install} {index}, or --gpus 0",
        )  # fmt: skip
    elif cuda is not None and int(torch.cuda.partition(".")[0]) > cuda[0]:
        yield said(
            "error", "old-driver",
            f"torch {torch.version} is built for CUDA {torch.cuda}, the driver serves CUDA "
            f"{cuda[0]}.{cuda[1]} at most",
            f"a newer driver, or a torch that is built for it: {install} {index} (see pytorch.org "
            "for the builds that there are)",
        )  # fmt: skip


def shared_memory(processes: int) -> Iterator[Finding]:
    """/dev/shm too small for several processes: Docker gives 64 MiB."""
    size = shm_size()
    if processes > 1 and size is not None and size < LEAST_SHM:
        yield said(
            "warning", "small-shm", f"{SHM} holds {size / 2**20:.0f} MiB: NCCL and the data loaders of "
            f"{processes} processes may not fit",
            "docker run --shm-size=16g (or --ipc=host), or mount -o remount,size=16g /dev/shm",
        )  # fmt: skip


def shm_size() -> int | None:
    """Bytes of /dev/shm in all; None where there is none."""
    try:
        told = os.statvfs(SHM)
    except OSError:
        return None
    return told.f_frsize * told.f_blocks


def open_files() -> Iterator[Finding]:
    """A low limit of open files: loaders pass batches through descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else hard
        yield said(
            "warning", "few-open-files", f"a process may open {soft} files only (ulimit -n)",
            f"ulimit -n {most}",
        )  # fmt: skip
