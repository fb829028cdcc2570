"""An `nvidia-smi` on PATH: a real executable that answers as the real one does, cards as asked for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

HEADER = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.159.04             Driver Version: 580.159.04     CUDA Version: {cuda:<8} |
|-----------------------------------------+------------------------+----------------------+"""
ANSWER = """\
case "$*" in
  *--query-gpu=index,uuid,name,memory.total,memory.used,driver_version,mig.mode.current*) cat {cards} ;;
  *--query-compute-apps=gpu_uuid,pid,used_memory,process_name*) cat {apps} ;;
  -L) cat {listed} ;;
  "") cat {header} ;;
  *) echo "Field is not a valid field to query." ; exit 2 ;;
esac
"""


def uuid(index: int) -> str:
    """The id of a card, as NVIDIA's are."""
    return f"GPU-{index:08x}-1a2b-4c3d-8e4f-0123456789ab"


class Smi:
    """The executable, and what it says from now on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        parts = {
            n: shlex.quote(str(folder / f"{n}.txt")) for n in ("cards", "apps", "listed", "header")
        }
        self.path = folder / "nvidia-smi"
        self.path.write_text(f"#!/bin/sh\n{ANSWER.format(**parts)}")
        self.path.chmod(0o755)
        self.cards()

    def cards(
        self, *used: int, name: str = "NVIDIA H200", memory: int | str = 143771, mig: Sequence[int] = (),
        cuda: str = "13.0",
    ) -> None:  # fmt: skip
        """As many cards as there are numbers (MiB in use); `mig` are those that are divided."""
        rows, listed = [], []
        for index, mib in enumerate(used):
            state = "Enabled" if index in mig else "Disabled"
            rows.append(f"{index}, {uuid(index)}, {name}, {memory}, {mib}, 580.159.04, {state}")
            listed.append(f"GPU {index}: {name} (UUID: {uuid(index)})")
        self._say("cards", rows or ["No devices were found"])
        self._say("listed", listed or ["No devices found."])
        self._say("header", [HEADER.format(cuda=cuda)])
        self.processes()

    def processes(self, *rows: tuple[int, int, int]) -> None:
        """Card, pid and MiB of everything that computes."""
        self._say("apps", [f"{uuid(c)}, {pid}, {mib}, /usr/bin/python3" for c, pid, mib in rows])

    def fails(self, words: str, code: int) -> None:
        """Say the same to every question, as without a driver."""
        self.path.write_text(f"#!/bin/sh\necho {shlex.quote(words)}\nexit {code}\n")

    def _say(self, which: str, lines: Sequence[str]) -> None:
        (self.folder / f"{which}.txt").write_text("".join(f"{line}\n" for line in lines))
