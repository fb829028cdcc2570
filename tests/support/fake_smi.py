"""An `nvidia-smi` on PATH: an executable that answers as the real one does, cards as asked for."""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

DRIVER = "580.159.04"
CARD = """\
<gpu id="00000000:{index:02X}:00.0">
  <product_name>{name}</product_name>
  <mig_mode><current_mig>{mig}</current_mig><pending_mig>{mig}</pending_mig></mig_mode>
  <uuid>{uuid}</uuid>
  <fb_memory_usage><total>{memory}</total><used>{used} MiB</used></fb_memory_usage>
  <processes>{processes}</processes>
</gpu>
"""
PROCESS = (
    "\n    <process_info><pid>{pid}</pid><type>{type}</type>"
    "\n    <process_name>/usr/bin/python3</process_name>"
    "<used_memory>{mib} MiB</used_memory></process_info>"
)


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-1a2b-4c3d-8e4f-0123456789ab"


class Smi:
    """The executable, and what it says from now on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "nvidia-smi"
        self.answer = folder / "answer.xml"
        self.cards()

    def cards(
        self, *used: int, name: str = "NVIDIA H200", memory: int | str = 143771,
        mig: Sequence[int] = (), cuda: str = "13.0",
    ) -> None:  # fmt: skip
        """As many cards as there are numbers (MiB in use); `mig` are those that are divided."""
        self._known = (used, name, memory, mig, cuda)
        self.processes()

    def processes(self, *rows: tuple[int, int, int], type: str = "C") -> None:
        used, name, memory, mig, cuda = self._known
        if not used:
            self.fails("No devices were found", 6)
            return
        total = memory
        if isinstance(memory, int):
            total = f"{memory} MiB"
        listed_processes: dict[int, str] = defaultdict(str)
        for card, pid, mib in rows:
            listed_processes[card] += PROCESS.format(pid=pid, mib=mib, type=type)
        cards = []
        for index, mib in enumerate(used):
            shown = CARD.format(
                index=index,
                name=name,
                uuid=uuid(index),
                mig="Enabled" if index in mig else "Disabled",
                memory=total,
                used=mib,
                processes=listed_processes[index],
            )
            cards.append(shown)
        self.answer.write_text(
            '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
            f"<nvidia_smi_log>\n<driver_version>{DRIVER}</driver_version>\n"
            f"<cuda_version>{cuda}</cuda_version>\n{''.join(cards)}</nvidia_smi_log>\n"
        )
        listed = [f"GPU {index}: {name} (UUID: {uuid(index)})" for index in range(len(used))]
        self._write(
            f'[ "$*" = "-q -x" ] && exec cat {shlex.quote(str(self.answer))}\n'
            f'[ "$*" = "-L" ] && exec echo {shlex.quote(chr(10).join(listed))}\nexit 2'
        )

    def fails(self, words: str, code: int) -> None:
        self._write(f"echo {shlex.quote(words)}\nexit {code}")

    def _write(self, commands: str) -> None:
        self.path.write_text(f"#!/bin/sh\n{commands}\n")
        self.path.chmod(0o755)
