"""The global batch: rows of a micro-batch x forward passes x devices. Which can be, and the nearest of them."""

import math
from dataclasses import replace

from launcher.config.load import Config
from launcher.errors import Finding, launch_finding


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def impossible(config: Config, *, total: int, per_device: int, devices: int | None = None) -> Finding:
    """The finding about a global batch that cannot be split; `devices` is None where no number of them can."""
    where = "any number of devices"
    if devices is not None:
        where = f"{devices} device(s)"
    divided = devices or 1
    unit = per_device * divided
    lower = total // unit * unit
    upper = -(-total // unit) * unit
    totals = [str(rows) for rows in (lower, upper) if rows]
    options = [f"batch.global={' or '.join(totals)} with per_device {per_device}"]
    if total % divided == 0:
        nearest = sorted(divisors(total // divided), key=lambda rows: abs(rows - per_device))[:2]
        options.append(f"batch.per_device={' or '.join(map(str, sorted(nearest)))} with global {total}")
    origin = config.origin("batch.per_device")
    if origin.override is None:
        origin = config.origin("batch.global")
    message = f"a global batch of {total} cannot be split into {per_device} rows on {where}"
    help = "nearest possible: " + "; ".join(options)
    return replace(launch_finding("error", "impossible-batch", message, help, key="batch.global"), **origin.place)
