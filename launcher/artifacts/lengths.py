"""Row lengths in tokens, and what they make of a batch: from `MEAN:MAX`, from a tokenised dataset.

A padded batch is as wide as its longest row; a packed one is the sum of its rows. The peak of a run
is its largest micro-batch, so both are given as the median largest of so many. How full the rows
are that dpo.py packs is found by packing as it does.
"""

from __future__ import annotations

import importlib
import json
import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from launcher.errors import InvalidConfig, NotReady, launch_finding, shorten, usage
from launcher.lazy_dataclass import dataclass

# With a mean and a maximum alone, rows are taken as log-normal, which lengths of documents commonly
# are, with this many standard deviations (of the logarithm) from the median to the maximum.
_REACH = 2.9
# A maximum further away than that comes to is one row of its own, and says nothing of the others.
_WIDEST = 1.5
_STEPS = 8192  # different lengths of such rows, at most
_PAIRS = 20_000  # of packed rows
_NORMAL = NormalDist()
_MIDDLES_OF_QUARTERS = (0.125, 0.375, 0.625, 0.875)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long rows are, in tokens.

    `counts` are the rows of each length, or its share where `mean` and `longest` are given and the
    form between them is assumed. A row of DPO is one of its two sequences. `rows` counts dataset
    rows.
    """

    mean: float
    deviation: float
    longest: int
    source: str
    counts: tuple[tuple[int, float], ...]
    rows: int | None = None

    @property
    def tokens(self) -> int:
        return int(sum(length * count for length, count in self.counts))

    def cut(self, limit: int | None) -> Lengths:
        if not limit or limit >= self.longest:
            return self
        counts: dict[int, float] = {}
        for length, count in self.counts:
            kept = min(length, limit)
            counts[kept] = counts.get(kept, 0) + count
        cut = _summarise_counts(counts, f"{self.source}, cut at {limit}", self.rows)
        uncut = _summarise_counts(dict(self.counts), "", None)
        mean = self.mean * cut.mean / uncut.mean
        mean = min(max(1.0, mean), float(limit))
        return replace(cut, mean=mean, longest=limit)

    def quantiles(self, shares: Iterable[float]) -> list[int]:
        sums = list(accumulate(count for _, count in self.counts))
        quantiles = []
        for share in shares:
            place = bisect_left(sums, share * sums[-1])
            length, _ = self.counts[min(place, len(sums) - 1)]
            quantiles.append(length)
        return quantiles

    def sum_of(self, rows: int, batches: int = 1) -> float:
        """The median largest sum over batches of so many rows, by a gamma curve of the same
        moments.
        """
        mean = rows * self.mean
        deviation = math.sqrt(rows) * self.deviation
        if not deviation:
            return mean
        share = 0.5 ** (1 / max(1, batches))
        z = _NORMAL.inv_cdf(share)
        # Wilson and Hilferty: the cube root of a gamma variable is nearly normal
        form = (mean / deviation) ** 2
        root = 1 - 1 / (9 * form) + z / (3 * math.sqrt(form))
        median = mean * root**3
        longest = float(rows * self.longest)
        return min(longest, max(mean, median))


def _summarise_counts(counts: Mapping[int, float], source: str, rows: int | None) -> Lengths:
    total = sum(counts.values())
    mean = sum(x * n for x, n in counts.items()) / total
    squares = sum(n * (x - mean) ** 2 for x, n in counts.items()) / total
    return Lengths(
        mean=max(1.0, mean),
        deviation=math.sqrt(squares),
        longest=max(counts),
        source=source,
        rows=rows,
        counts=tuple(sorted(counts.items())),
    )


def make_uniform(length: int, source: str, rows: int | None = None) -> Lengths:
    return _summarise_counts({length: 1}, source, rows)


def make_log_normal(mean: float, longest: int, source: str) -> Lengths:
    """Rows of which mean and maximum alone are known."""
    # from longest/mean = exp(reach s - s^2/2)
    ratio = math.log(max(1.0, longest / mean))
    root = _REACH * _REACH - 2 * ratio
    spread = _WIDEST
    if root > 0:
        spread = min(_WIDEST, _REACH - math.sqrt(root))
    if not spread:
        return make_uniform(longest, source)
    curve = NormalDist(math.log(mean) - spread * spread / 2, spread)
    counts: dict[int, float] = {}
    step = max(1, longest // _STEPS)
    below = 0.0
    for length in range(step, longest, step):
        share = curve.cdf(math.log(length))
        counts[length] = share - below
        below = share
    counts[longest] = 1 - below
    deviation = mean * math.sqrt(math.expm1(spread * spread))
    return Lengths(
        mean=mean,
        deviation=min(deviation, longest / 2),
        longest=longest,
        source=source,
        counts=tuple(counts.items()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch: `rows` sequences of `width` positions (packed: one row of all tokens).

    `tokens` are all positions the model computes, `real` those that are no padding.
    """

    rows: int
    width: int
    real: int

    @property
    def tokens(self) -> int:
        return self.rows * self.width


def find_largest_batch(lengths: Lengths, *, rows: int, batches: int, packed: bool) -> MicroBatch:
    """The largest micro-batch of `rows` sequences among `batches` of them (all ranks together)."""
    if packed:
        tokens = math.ceil(lengths.sum_of(rows, batches))
        return MicroBatch(rows=1, width=tokens, real=tokens)
    # the median longest
    (width,) = lengths.quantiles([0.5 ** (1 / max(1, rows * batches))])
    real = min(rows * width, math.ceil(width + (rows - 1) * lengths.mean))
    return MicroBatch(rows=rows, width=width, real=real)


def find_typical_batch(lengths: Lengths, *, rows: int, packed: bool) -> MicroBatch:
    """A micro-batch as it is on average: for tokens a step and time, not for memory."""
    real = math.ceil(rows * lengths.mean)
    if packed:
        return MicroBatch(rows=1, width=real, real=real)
    # the mean of a maximum, from the middles of its quarters
    shares = [middle ** (1 / rows) for middle in _MIDDLES_OF_QUARTERS]
    longest = sum(lengths.quantiles(shares)) / 4
    width = max(math.ceil(longest), math.ceil(lengths.mean))
    return MicroBatch(rows=rows, width=width, real=min(real, rows * width))


class Packed(NamedTuple):
    """One row of a rank on average: pairs in it, real tokens of both branches, and all its
    positions.
    """

    pairs: float
    real: float
    positions: int

    @property
    def filled(self) -> float:
        return self.real / self.positions


@cache
def pack(rows: Lengths, *, pairs: int, limit: int) -> Packed:
    """Rows of at most `pairs` pairs and `limit` tokens a branch, from pairs as long as `rows` says.

    dpo.py goes through the shuffled pairs in order
    (data_loader.py::HFDataLoader._reshard_with_packing[for i in range]): a row holds as many pairs
    as fit, chosen and rejected each within the limit, and never more than the rank's batch. What is
    left of the row is padding, and the model computes it all the same. The same pairs are drawn
    each time, so that plans of different batches compare.
    """
    chance = random.Random(20260101)
    drawn = rows.quantiles(chance.random() for _ in range(2 * _PAIRS))
    full_rows = 0
    full_tokens = 0
    # the row that is being filled: its pairs, and the tokens of its two branches
    current = 0
    chosen = 0
    rejected = 0
    for place in range(0, len(drawn), 2):
        chosen_length = min(limit, drawn[place])
        rejected_length = min(limit, drawn[place + 1])
        is_longer = chosen + chosen_length > limit or rejected + rejected_length > limit
        if current and (current >= pairs or is_longer):
            full_rows += 1
            full_tokens += chosen + rejected
            current = 0
            chosen = 0
            rejected = 0
        current += 1
        chosen += chosen_length
        rejected += rejected_length
    if not full_rows:
        return Packed(pairs=current, real=chosen + rejected, positions=2 * limit)
    # the last row may not be full
    full_pairs = _PAIRS - current
    return Packed(pairs=full_pairs / full_rows, real=full_tokens / full_rows, positions=2 * limit)


def fill_rows(rows: Lengths, *, pairs: int, limit: int) -> tuple[int, Packed]:
    """The least doubling of a batch that fills rows to 80 %, or fills them no further."""
    row = pack(rows, pairs=pairs, limit=limit)
    while row.filled < 0.8 and pairs < 4096:
        doubled = pack(rows, pairs=2 * pairs, limit=limit)
        if doubled.filled < 1.02 * row.filled:
            break
        pairs *= 2
        row = doubled
    return pairs, row


def parse(text: str) -> Lengths:
    """`MEAN:MAX` (tokens a row) or one number for rows of one length; raises UsageError."""
    mean, _, longest = text.partition(":")
    try:
        mean_tokens = float(mean)
        longest_tokens = int(longest or mean_tokens)
    except (ValueError, OverflowError):
        mean_tokens = 0.0
        longest_tokens = 0
    if not 1 <= mean_tokens <= longest_tokens:
        message = f"--row-tokens {shorten(text, 40)} is not MEAN:MAX with 1 <= MEAN <= MAX"
        raise usage("row-tokens", message, "for example --row-tokens 290:1100")
    return make_log_normal(mean_tokens, longest_tokens, f"--row-tokens {text}")


def measure_lengths(folder: Path, *, pairs: bool = False) -> Lengths:
    """Lengths of a tokenised dataset on disk (`save_to_disk`, or a folder of .arrow files).

    The files are mapped, and only the offsets of the list columns are read: no row is made into
    Python objects. The two sequences of `pairs` count as rows of their own. Raises NotReady without
    pyarrow, InvalidConfig where there is no such dataset or column.
    """
    try:
        arrow = importlib.import_module("pyarrow")
    except ImportError:
        help = "pip install pyarrow, or give --row-tokens MEAN:MAX"
        raise NotReady(
            _report_unread(f"{folder} cannot be read without pyarrow", help).findings
        ) from None
    columns: tuple[str, ...] = ("input_ids",)
    if pairs:
        columns = ("chosen_input_ids", "rejected_input_ids")
    counts: Counter[int] = Counter()
    rows = 0
    for path in _find_arrow_files(folder):
        try:
            with arrow.memory_map(str(path)) as source:
                for chunk in arrow.ipc.open_stream(source):
                    rows += chunk.num_rows
                    counts.update(_count_lengths(path, chunk, columns))
        except (OSError, arrow.ArrowException) as error:
            message = f"{path} is not a readable arrow file: {shorten(error)}"
            raise _report_unread(message, "delete it, or give --row-tokens") from None
    if not counts:
        raise _report_unread(f"{folder} holds no rows")
    return _summarise_counts(counts, f"{rows:,} rows of {folder}", rows)


def _count_lengths(path: Path, chunk: Any, columns: Sequence[str]) -> Counter[int]:
    """How many lists of each length the columns of a pyarrow RecordBatch hold."""
    compute = importlib.import_module("pyarrow.compute")
    names = chunk.schema.names
    missing = ", ".join(name for name in columns if name not in names)
    if missing:
        present = shorten(", ".join(names))
        raise _report_unread(f"{path} has no column {missing}: it has {present}")
    counts: Counter[int] = Counter()
    for name in columns:
        lengths = compute.list_value_length(chunk.column(name))
        for value in compute.value_counts(lengths).to_pylist():
            if value["values"] is not None:
                counts[int(value["values"])] += int(value["counts"])
    return counts


def _find_arrow_files(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        paths = [folder / str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        paths = sorted(folder.glob("*.arrow"))
    if not paths:
        message = f"{folder} is not a tokenised dataset: it has no .arrow files"
        raise _report_unread(message, "run `launch prepare` first, or give --row-tokens MEAN:MAX")
    return paths


def _report_unread(message: str, help: str = "give --row-tokens MEAN:MAX") -> InvalidConfig:
    return InvalidConfig(
        launch_finding("error", "unknown-lengths", message, help, key="row_tokens")
    )
