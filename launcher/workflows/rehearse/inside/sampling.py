"""Rows of each data set that a preview looks at, numbered as the stage's data are."""

import math
from dataclasses import dataclass
from typing import Any

from .calls import call_trainer
from .loading import FirstRows
from .records import MixturePart, ServerRequest, ServerResponse, SetSize

ROW = "launch_row"
"""A column that holds the number of a row among all rows of the stage's data, from 0."""
MOST_ROWS = 4000
MOST_BYTES = 24 << 20
"""Rows and bytes of a set that are looked at; of a larger one, evenly spread rows."""
_FEWEST_ROWS = 50
_UNKNOWN_SIZE = 1000


class Absent(Exception):
    """Something that is not on this machine: `data` or `tokenizer`, and its name."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name}")
        self.kind = kind
        self.name = name


@dataclass
class LoadedSet:
    """The rows of a set that are looked at, the number of its first row, and of all of its rows."""

    rows: Any
    first: int
    total: int | None


@dataclass(frozen=True)
class Extent:
    """How many rows a set has, and how many bytes; None where that is unknown."""

    total: int | None
    bytes: int | None

    @property
    def most(self) -> int:
        """How many rows of it are looked at."""
        if not self.total or self.bytes is None:
            return _UNKNOWN_SIZE
        mean = max(1.0, self.bytes / self.total)
        return max(_FEWEST_ROWS, min(MOST_ROWS, int(MOST_BYTES / mean)))

    def takes(self, number: int) -> bool:
        if self.total is None or self.bytes is None:
            return number < self.most
        return number % math.ceil(self.total / self.most) == 0

    @property
    def last(self) -> int:
        """The number of the last row that is looked at."""
        if self.total is None or self.bytes is None:
            return self.most - 1
        return self.total - 1


class SampledRows(FirstRows):
    """Loads some evenly spread rows of each set, and those that the request names."""

    def __init__(self, request: ServerRequest, response: ServerResponse, split: str | None) -> None:
        super().__init__(request, response, split)
        self.sets: list[LoadedSet] = []

    def take(self, rows: Any, name: str) -> Any:
        size = self.request.sizes.get(name, SetSize())
        return self.sample(rows, Extent(size.rows, size.bytes))

    def take_other(self, rows: Any) -> Any:
        return rows

    def take_piece(self, stream: Any, length: int, part: MixturePart) -> Any:
        return self.sample(stream, Extent(length, part.bytes))

    def take_part(self, rows: Any, part: MixturePart) -> Any:
        return rows

    def stand_in(self, name: str, split: Any) -> Any:
        raise Absent("data", name)

    def sample(self, rows: Any, extent: Extent) -> Any:
        offset = self.offset()
        named = {number - offset for number in self.request.numbers if number >= offset}
        if hasattr(rows, "select"):
            extent = Extent(len(rows), rows.data.nbytes)
            numbers = []
            for number in range(len(rows)):
                if extent.takes(number) or number in named:
                    numbers.append(number)
            taken = rows.select(numbers)
        else:
            numbers, taken, end = read_some(rows, extent, named)
            if end is not None:
                extent = Extent(end, extent.bytes)
        taken = taken.add_column(ROW, [offset + number for number in numbers])
        self.sets.append(LoadedSet(taken, offset, extent.total))
        return taken

    def total(self) -> int | None:
        """Rows of all sets; None where one of them was not counted."""
        total = 0
        for loaded in self.sets:
            if loaded.total is None:
                return None
            total += loaded.total
        return total

    def is_sampled(self) -> bool:
        return any(loaded.total is None or len(loaded.rows) < loaded.total for loaded in self.sets)

    def offset(self) -> int:
        """The number of the first row of the next set."""
        if not self.sets:
            return 0
        last = self.sets[-1]
        if last.total is None:
            return last.first + len(last.rows)
        return last.first + last.total


def read_some(stream: Any, extent: Extent, named: set[int]) -> tuple[list[int], Any, int | None]:
    """Some rows of a stream, and their numbers; how many rows it has, if it was read to its end."""
    import datasets

    last = max([extent.last, *named])
    numbers = []
    kept = []
    end = None
    iterator = iter(stream)
    # one more row: without it the stream is known to end here
    for number in range(last + 2):
        try:
            row = call_trainer(next, iterator)
        except StopIteration:
            end = number
            break
        if extent.takes(number) or number in named:
            numbers.append(number)
            kept.append(row)
    taken = datasets.Dataset.from_list(kept, features=None if kept else stream.features)
    return numbers, taken, end
