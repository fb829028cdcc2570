"""The accelerator's memory, at the end of each phase and of each step."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from .process import Process


def torch_in_use(cpu: bool) -> Any:
    """torch, where a GPU is in use; else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and not cpu and torch.cuda.is_initialized() else None


class Memory:
    """Peaks of torch's counters. Upstream reads them too, so they are never reset."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.phases: set[str] = set()

    def peaks(self) -> tuple[float | None, float | None]:
        """The peaks so far, in GiB, allocated and reserved; one walk over torch's counters."""
        told = self.counters()
        if told is None:
            return None, None
        return told["peak_allocated_gib"], told["peak_reserved_gib"]

    def counters(self) -> dict[str, float] | None:
        """What is allocated and reserved, in GiB; None where no GPU is in use."""
        torch = torch_in_use(self.process.settings.cpu)
        if torch is None:
            return None
        kinds = (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes"))
        told: dict[str, float] = {}
        stats = getattr(torch.cuda, "memory_stats_as_nested_dict", None)
        if stats is None:
            for kind, _ in kinds:
                peak = getattr(torch.cuda, f"max_memory_{kind}")()
                told[f"peak_{kind}_gib"] = round(peak / 2**30, 3)
            return told
        found = stats()
        for kind, name in kinds:
            counter = found.get(name, {}).get("all", {})
            told[f"{kind}_gib"] = round(counter.get("current", 0) / 2**30, 3)
            told[f"peak_{kind}_gib"] = round(counter.get("peak", 0) / 2**30, 3)
        return told

    def mark(self, phase: str, *, again: bool = False) -> None:
        """Memory at the end of a phase, once each unless it ends `again`."""
        if phase in self.phases and not again:
            return
        self.phases.add(phase)
        record = self.process.record
        with record.quietly("memory"):
            told: dict[str, float] = {**(self.counters() or {})}
            with contextlib.suppress(Exception):
                import resource

                # KiB on Linux, bytes on macOS
                unit = 2**30 if sys.platform == "darwin" else 2**20
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
                told["peak_host_gib"] = round(peak, 3)
            record.write("memory", phase=phase, step=self.process.at, **told)
