"""How busy this machine is now: processor, memory and GPUs, from /proc and NVIDIA's library.

NVIDIA's library (`pip install nvidia-ml-py`) is optional: without it there are no numbers of GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.lazy_dataclass import dataclass

_PROC = Path("/proc")
_GIB = 2**30
_KIB_PER_GIB = 2**20
NVML = "pynvml"
"""The module that `nvidia-ml-py` installs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUsage:
    """The whole machine. `cpu` is the share of all cores that were busy since the last look.

    It is None at the first. Memory is in GiB, as the kernel counts it.
    """

    cpu: float | None = None
    memory_gib: float | None = None
    memory_total_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """One GPU. `busy` is the share of the time in which a kernel ran, as the driver counts it.

    Memory is in GiB, power in watts. What the driver does not tell is None.
    """

    index: int
    busy: float | None = None
    memory_gib: float | None = None
    power_w: float | None = None
    celsius: float | None = None


@dataclass(frozen=True, slots=True)
class _Ticks:
    """Of all cores since boot."""

    busy: int
    total: int


class HostMeter:
    """Reads /proc; what cannot be read there is None."""

    def __init__(self) -> None:
        self.last: _Ticks | None = None

    def look(self) -> HostUsage:
        cpu = self._measure_cpu()
        memory = _read_memory()
        if memory is None:
            return HostUsage(cpu=cpu)
        used_gib, total_gib = memory
        return HostUsage(cpu=cpu, memory_gib=used_gib, memory_total_gib=total_gib)

    def _measure_cpu(self) -> float | None:
        ticks = _read_ticks()
        before = self.last
        self.last = ticks
        if ticks is None or before is None:
            return None
        total = ticks.total - before.total
        if total <= 0:
            return None
        share = (ticks.busy - before.busy) / total
        return min(1.0, max(0.0, share))


def _read_ticks() -> _Ticks | None:
    """See proc(5), `stat`."""
    try:
        line = (_PROC / "stat").read_text(encoding="ascii").partition("\n")[0]
        numbers = [int(word) for word in line.split()[1:9]]
    except (OSError, ValueError):
        return None
    if len(numbers) < 5:
        return None
    total = sum(numbers)
    idle = numbers[3] + numbers[4]
    return _Ticks(busy=total - idle, total=total)


def _read_memory() -> tuple[float, float] | None:
    """GiB used and in all; memory that the kernel can reclaim at once is not used."""
    sizes: dict[str, int] = {}
    try:
        lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0])
    total = sizes.get("MemTotal")
    available = sizes.get("MemAvailable")
    if total is None or available is None:
        return None
    return (total - available) / _KIB_PER_GIB, total / _KIB_PER_GIB


class GpuMeter:
    """Asks NVIDIA's library about GPUs; about none if it is missing or fails."""

    def __init__(self, ids: Sequence[str] | None) -> None:
        """`ids` as nvidia-smi has them (`GPU-...`); None for all of the machine."""
        self.nvml: Any = None
        self.handles: dict[int, Any] = {}
        with contextlib.suppress(Exception):
            self.nvml = importlib.import_module(NVML)
            self.nvml.nvmlInit()
            self.handles = self._open_handles(ids)

    def _open_handles(self, ids: Sequence[str] | None) -> dict[int, Any]:
        """A handle of the library by the index of its GPU."""
        handles = {}
        if ids is None:
            for index in range(self.nvml.nvmlDeviceGetCount()):
                handles[index] = self.nvml.nvmlDeviceGetHandleByIndex(index)
            return handles
        for name in ids:
            handle = self.nvml.nvmlDeviceGetHandleByUUID(name)
            handles[self.nvml.nvmlDeviceGetIndex(handle)] = handle
        return handles

    def look(self) -> list[GpuUsage]:
        return [self._read_gpu(index, handle) for index, handle in self.handles.items()]

    def _read_gpu(self, index: int, handle: Any) -> GpuUsage:
        nvml = self.nvml
        values: dict[str, float] = {}
        # one by one: a card may tell its memory and not its power
        with contextlib.suppress(Exception):
            values["busy"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        with contextlib.suppress(Exception):
            values["memory_gib"] = nvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB
        with contextlib.suppress(Exception):
            values["power_w"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        with contextlib.suppress(Exception):
            sensor = nvml.NVML_TEMPERATURE_GPU
            values["celsius"] = float(nvml.nvmlDeviceGetTemperature(handle, sensor))
        return GpuUsage(index=index, **values)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.nvml.nvmlShutdown()


def list_visible_gpu_ids(
    devices: Sequence[str], environ: Mapping[str, str]
) -> Sequence[str] | None:
    """The ids of the GPUs that a training has: its own, else those that its environment shows.

    None for all of the machine; empty on the CPU.
    """
    if devices:
        return devices
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or visible.strip():
        return None
    return ()
