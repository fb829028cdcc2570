"""A split as `load_dataset` takes it, such as `train[:10%]+test`, as ranges of rows.

Follows datasets/arrow_reader.py (ReadInstruction): the grammar, how a percentage becomes a row, and
what is refused.
"""

from __future__ import annotations

import math
import re

from launcher.lazy_dataclass import dataclass

# datasets/arrow_reader.py::[_SUB_SPEC_RE = re.compile],
# datasets/arrow_reader.py::[_ADDITION_SEP_RE]
_PART = re.compile(
    r"(?P<split>\w+(\.\w+)*)"
    r"(\[((?P<start>-?[\d_]+)(?P<start_percent>%)?)?:((?P<stop>-?[\d_]+)(?P<stop_percent>%)?)?\])?"
    r"(\((?P<rounding>[^)]*)\))?"
)
_PLUS = re.compile(r"\s*\+\s*")
_ROUNDINGS = ("closest", "pct1_dropremainder")
_LEAST_FOR_WHOLE_PERCENT = 100  # datasets/arrow_reader.py::_pct_to_abs_pct1[if num_examples]


class BadSplit(ValueError):
    """A split that `load_dataset` refuses; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A part of a split: rows `start` to `stop`, in rows or in percent; None for its beginning and
    its end.
    """

    split: str
    start: int | None = None
    stop: int | None = None
    in_percent: bool = False
    drops_remainder: bool = False

    @property
    def is_whole(self) -> bool:
        return self.start is None and self.stop is None

    def rows(self, total: int) -> range:
        """The rows that are read of so many. Raises BadSplit where that is refused."""
        start = 0
        stop = total
        if self.start is not None:
            start = _clip_row(self._find_row(self.start, total), total)
        if self.stop is not None:
            stop = _clip_row(self._find_row(self.stop, total), total)
        return range(start, max(start, stop))

    def _find_row(self, boundary: int, total: int) -> int:
        if not self.in_percent:
            return boundary
        if not self.drops_remainder:
            return round(boundary * total / 100)
        if total < _LEAST_FOR_WHOLE_PERCENT:
            raise BadSplit(
                f"pct1_dropremainder needs {_LEAST_FOR_WHOLE_PERCENT} rows, and there are {total}"
            )
        return boundary * math.trunc(total / 100)


def _clip_row(row: int, total: int) -> int:
    """A negative row counts from the end."""
    if row < 0:
        row += total
    return min(max(row, 0), total)


def parse_slices(text: str) -> tuple[Slice, ...]:
    """The parts that a split names, which are read one after the other. Raises BadSplit."""
    parts = [_parse_slice(part) for part in _PLUS.split(text)]
    roundings = {part.drops_remainder for part in parts if part.in_percent}
    if len(roundings) > 1:
        raise BadSplit("parts with different roundings cannot be added")
    return tuple(parts)


def _parse_slice(text: str) -> Slice:
    match = _PART.fullmatch(text)
    if match is None:
        raise BadSplit(f"`{text}` is not a split, such as train, train[:1000] or train[10%:20%]")
    in_percent = bool(match["start_percent"] or match["stop_percent"])
    rounding = match["rounding"]
    if rounding and rounding not in _ROUNDINGS:
        raise BadSplit(f"`{rounding}` is not a rounding: {' or '.join(_ROUNDINGS)}")
    if rounding and not in_percent:
        raise BadSplit("a rounding needs percentages")
    start = _parse_number(match["start"])
    stop = _parse_number(match["stop"])
    if in_percent and any(abs(bound or 0) > 100 for bound in (start, stop)):
        raise BadSplit("a percentage lies between -100 and 100")
    drops_remainder = rounding == "pct1_dropremainder"
    return Slice(
        split=match["split"],
        start=start,
        stop=stop,
        in_percent=in_percent,
        drops_remainder=drops_remainder,
    )


def _parse_number(digits: str | None) -> int | None:
    if not digits:
        return None
    try:
        return int(digits)
    except ValueError:
        raise BadSplit(f"`{digits}` is not a whole number") from None
