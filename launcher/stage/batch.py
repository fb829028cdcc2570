"""The global batch: rows of a micro-batch x forward passes x devices."""

import math
from dataclasses import replace

from launcher.config.load import Config
from launcher.errors import Finding, launch_finding


def find_divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def report_impossible_batch(
    config: Config, *, total: int, per_device: int, devices: int | None = None
) -> Finding:
    """The finding about a global batch that cannot be split, with the nearest that can.

    `devices` is None if no number of devices can split it.
    """
    where = "any number of devices"
    if devices is not None:
        where = f"{devices} device(s)"
    devices = devices or 1
    unit = per_device * devices
    lower = total // unit * unit
    totals = [str(rows) for rows in (lower, lower + unit) if rows]
    help = f"nearest possible: batch.global={' or '.join(totals)} with per_device {per_device}"
    if total % devices == 0:
        candidates = find_divisors(total // devices)
        candidates.sort(key=lambda rows: abs(rows - per_device))
        nearest = " or ".join(map(str, sorted(candidates[:2])))
        help = f"{help}; batch.per_device={nearest} with global {total}"
    origin = config.origin("batch.per_device")
    if origin.override is None:
        origin = config.origin("batch.global")
    message = f"a global batch of {total} cannot be split into {per_device} rows on {where}"
    finding = launch_finding("error", "impossible-batch", message, help, key="batch.global")
    return replace(finding, **origin.place)
