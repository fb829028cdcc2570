"""A thread of the supervisor that records how busy the machine is: `usage.jsonl`."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import field

from launcher.lazy_dataclass import dataclass
from launcher.machine import usage
from launcher.machine.usage import GpuMeter, GpuUsage, HostMeter, HostUsage
from launcher.runs import rundir
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder
from launcher.runs.usage import GpuSample, UsageSample

LOOK_S = 5.0
"""Seconds between two samples."""
LINES = 500
"""A line is a mean over one 500th of the time so far, so that a week leaves half a megabyte."""


@dataclass(slots=True)
class _Looks:
    """The looks since the last line."""

    hosts: list[HostUsage] = field(default_factory=list)
    gpus: list[list[GpuUsage]] = field(default_factory=list)

    def sample(self, at: float, attempt: int) -> UsageSample:
        by_index: dict[int, list[GpuUsage]] = {}
        for gpus in self.gpus:
            for gpu in gpus:
                by_index.setdefault(gpu.index, []).append(gpu)
        samples = []
        for index in sorted(by_index):
            samples.append(_average_gpu(index, by_index[index]))
        return UsageSample(
            t=round(at, 1),
            attempt=attempt,
            cpu=_average(host.cpu for host in self.hosts),
            memory_gib=_average(host.memory_gib for host in self.hosts),
            memory_total_gib=_average(host.memory_total_gib for host in self.hosts),
            gpus=tuple(samples),
        )


def _average_gpu(index: int, looks: Sequence[GpuUsage]) -> GpuSample:
    return GpuSample(
        index=index,
        busy=_average(look.busy for look in looks),
        memory_gib=_average(look.memory_gib for look in looks),
        power_w=_average(look.power_w for look in looks),
        celsius=_average(look.celsius for look in looks),
    )


def _average(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    return round(statistics.fmean(numbers), 4)


class UsageThread:
    """Samples until it is ended. A failure costs the samples, not the run."""

    def __init__(self, folder: RunFolder, attempt: Attempt, look_s: float = LOOK_S) -> None:
        self.folder = folder
        self.attempt = attempt
        self.look_s = look_s
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="usage", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def end(self) -> None:
        self.over.set()
        self.thread.join(timeout=self.look_s)

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self._sample_until_over()

    def _sample_until_over(self) -> None:
        environ = {**self.attempt.environ, **self.attempt.env}
        host = HostMeter()
        gpus = GpuMeter(usage.list_visible_gpu_ids(self.attempt.devices, environ))
        host.look()
        began = time.monotonic()
        last = began
        looks = _Looks()
        while not self.over.wait(self.look_s):
            looks.hosts.append(host.look())
            looks.gpus.append(gpus.look())
            now = time.monotonic()
            if now - last >= (now - began) / LINES:
                self._write_sample(looks)
                looks = _Looks()
                last = now
        if looks.hosts:
            self._write_sample(looks)
        gpus.close()

    def _write_sample(self, looks: _Looks) -> None:
        sample = looks.sample(time.time(), self.attempt.number)
        line = rundir.render_json_line(sample.as_json())
        # a full disk, or a folder that is gone: the next line may find room
        with contextlib.suppress(OSError), self.folder.usage.open("a", encoding="utf-8") as stream:
            stream.write(line)
