"""How busy this machine is right now: processor, memory and GPUs, from /proc and NVIDIA's library.

NVIDIA's library (`pip install nvidia-ml-py`) is an option: without it, or without a GPU, there are no numbers of GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_GIB = 2**30
_KIB_PER_GIB = 2**20
NVML = "pynvml"
"""The module that `nvidia-ml-py` installs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUsage:
    """`cpu` is the share of all cores that were busy since the last look, None at the first; memory in GiB, as the
    kernel counts it for the whole machine."""

    cpu: float | None = None
    memory_gib: float | None = None
    memory_total_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """One GPU: `busy` is the share of the time in which a kernel ran, as the driver counts it; memory in GiB, power in
    watts, temperature in degrees Celsius. What the driver does not tell is None."""

    index: int
    busy: float | None = None
    memory_gib: float | None = None
    power_w: float | None = None
    celsius: float | None = None


class HostMeter:
    """Looks at /proc; what cannot be read there is None."""

    def __init__(self) -> None:
        self.last: tuple[int, int] | None = None

    def look(self) -> HostUsage:
        memory = _memory()
        return HostUsage(cpu=self._cpu(), memory_gib=memory[0], memory_total_gib=memory[1])

    def _cpu(self) -> float | None:
        times = _processor_times()
        before, self.last = self.last, times
        if times is None or before is None:
            return None
        total = times[1] - before[1]
        if total <= 0:
            return None
        return min(1.0, max(0.0, (times[0] - before[0]) / total))


def _processor_times() -> tuple[int, int] | None:
    """Ticks of all cores since boot, those that were busy and all; see proc(5), `stat`."""
    try:
        first = (_PROC / "stat").read_text(encoding="ascii").partition("\n")[0]
        numbers = [int(word) for word in first.split()[1:9]]
    except (OSError, ValueError):
        return None
    if len(numbers) < 5:
        return None
    total = sum(numbers)
    idle = numbers[3] + numbers[4]
    return total - idle, total


def _memory() -> tuple[float | None, float | None]:
    """GiB in use, and all; what the kernel would give back at once is not in use."""
    sizes: dict[str, int] = {}
    try:
        for line in (_PROC / "meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdigit():
                sizes[name] = int(words[0])
    except (OSError, ValueError):
        return None, None
    total = sizes.get("MemTotal")
    available = sizes.get("MemAvailable")
    if total is None or available is None:
        return None, None
    return (total - available) / _KIB_PER_GIB, total / _KIB_PER_GIB


class GpuMeter:
    """Asks NVIDIA's library about GPUs, by their ids; about none where it is not installed or answers nothing."""

    def __init__(self, ids: Sequence[str] | None) -> None:
        """`ids` as nvidia-smi has them (`GPU-...`); None for all that the machine has."""
        self.nvml: Any = None
        self.handles: list[tuple[int, Any]] = []
        with contextlib.suppress(Exception):
            self.nvml = importlib.import_module(NVML)
            self.nvml.nvmlInit()
            self.handles = self._handles(ids)

    def _handles(self, ids: Sequence[str] | None) -> list[tuple[int, Any]]:
        if ids is None:
            count = self.nvml.nvmlDeviceGetCount()
            return [(index, self.nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        handles = [self.nvml.nvmlDeviceGetHandleByUUID(name) for name in ids]
        return [(self.nvml.nvmlDeviceGetIndex(handle), handle) for handle in handles]

    def look(self) -> list[GpuUsage]:
        return [self._of(index, handle) for index, handle in self.handles]

    def _of(self, index: int, handle: Any) -> GpuUsage:
        values: dict[str, float] = {}
        # each by itself: a card may tell its memory and not its power
        with contextlib.suppress(Exception):
            values["busy"] = self.nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        with contextlib.suppress(Exception):
            values["memory_gib"] = self.nvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB
        with contextlib.suppress(Exception):
            values["power_w"] = self.nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        with contextlib.suppress(Exception):
            values["celsius"] = float(self.nvml.nvmlDeviceGetTemperature(handle, self.nvml.NVML_TEMPERATURE_GPU))
        return GpuUsage(index=index, **values)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.nvml.nvmlShutdown()


def visible(devices: Sequence[str], environ: Mapping[str, str]) -> Sequence[str] | None:
    """The ids of the GPUs that a training has: those that it was given, else what its environment lets it see; empty
    on the CPU."""
    if devices:
        return devices
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    return None if shown is None or shown.strip() else ()
