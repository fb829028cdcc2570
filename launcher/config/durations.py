"""Times as people write them."""

import re

from launcher.errors import shorten, usage

_LONGEST_S = 366 * 24 * 3600.0


def parse_seconds(text: str) -> float:
    """`90`, `90s`, `10m`, `1h30m` in seconds. Raises UsageError for what is no time."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    total = 0.0
    if match is not None:
        hours, minutes, seconds = [float(part or 0) for part in match.groups()]
        total = hours * 3600 + minutes * 60 + seconds
    # timers take no more than the platform's
    if not 0 < total <= _LONGEST_S:
        raise usage("bad-time", f"`{shorten(text)}` is not a duration", "such as 90s, 10m or 1h30m")
    return total


def format_age(seconds: float) -> str:
    """How long ago something was, in its largest unit: `40s`, `12m`, `5h` or `3d`.

    A clock that was set back makes nothing younger than now.
    """
    if seconds >= 86_400:
        return f"{int(seconds / 86_400)}d"
    if seconds >= 3_600:
        return f"{int(seconds / 3_600)}h"
    if seconds >= 60:
        return f"{int(seconds / 60)}m"
    return f"{max(0, int(seconds))}s"
