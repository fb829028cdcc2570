"""`usage.jsonl`: how busy the machine was while a run trained, a line every few seconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from launcher import files
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.codec import Between, Count, Misfit
from launcher.runs.rundir import RunFolder

Share = Annotated[float, Between(0, 1)] | None
Amount = Annotated[float, Between(0, 10**9)] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """Means since the line before. `busy` is a share; memory in GiB, power in watts."""

    index: Count
    busy: Share = None
    memory_gib: Amount = None
    power_w: Amount = None
    celsius: Amount = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSample:
    """One line. `t` is the end of its interval, in seconds since the epoch.

    `cpu` is the share of all cores that worked.
    """

    t: Annotated[float, Between(0, 10**12)]
    attempt: Count = 1
    cpu: Share = None
    memory_gib: Amount = None
    memory_total_gib: Amount = None
    gpus: tuple[GpuSample, ...] = ()

    def as_json(self) -> dict[str, object]:
        content = _drop_none(asdict(self))
        if self.gpus:
            content["gpus"] = [_drop_none(asdict(gpu)) for gpu in self.gpus]
        else:
            del content["gpus"]
        return content


def _drop_none(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def read_usage(folder: RunFolder) -> list[UsageSample]:
    """The samples of all attempts in order, without torn and damaged lines."""
    samples = []
    for line in files.read_lines(folder.usage):
        try:
            sample = codec.read_record(UsageSample, line)
        except Misfit:
            continue
        samples.append(sample)
    return samples
