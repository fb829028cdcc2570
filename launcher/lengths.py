"""Row lengths in tokens, and what they make of a batch: from `MEAN:MAX`, from a tokenised dataset.

A padded batch is as wide as its longest row; a packed one is the sum of its rows. The peak of a run is its
largest micro-batch, so both are asked for as the median largest of so many.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from launcher.errors import Finding, InvalidConfig, NotReady, brief, usage
from launcher.files import open_regular, read_bytes

# With a mean and a maximum alone, rows are taken as log-normal, which lengths of documents commonly are,
# with this many standard deviations (of the logarithm) from the median to the maximum.
_REACH = 2.9
# A maximum further away than that comes to is one row of its own, and says nothing of the others.
_WIDEST = 1.5
_SAMPLE = 400
_SAMPLED_BYTES = 64 * 2**20
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long rows are, in tokens.

    `histogram` counts rows by length where they were seen; else `mean` and `longest` are given and the
    form between them assumed. A row of DPO is one of its two sequences. `rows` counts dataset rows.
    `uncut` are mean and maximum before such rows were truncated at `longest`.
    """

    mean: float
    longest: int
    source: str
    rows: int | None = None
    histogram: tuple[tuple[int, int], ...] = ()
    uncut: tuple[float, int] | None = None

    @property
    def deviation(self) -> float:
        """Standard deviation."""
        if self.histogram:
            total = sum(n for _, n in self.histogram)
            return math.sqrt(sum(n * (x - self.mean) ** 2 for x, n in self.histogram) / total)
        if self.uncut is not None:
            mean, squares = self._moments(self.longest)
            return math.sqrt(max(0.0, squares - mean * mean))
        spread = self._spread()
        return min(self.mean * math.sqrt(math.expm1(spread * spread)), self.longest / 2)

    @property
    def tokens(self) -> int:
        """All tokens of the rows that were seen; 0 where none were."""
        return sum(length * count for length, count in self.histogram)

    def reaching(self, limit: int) -> int:
        """How many of the rows that were seen are so long, or longer."""
        return sum(count for length, count in self.histogram if length >= limit)

    def cut(self, limit: int | None) -> Lengths:
        """The same rows, truncated at so many tokens."""
        if not limit or limit >= self.longest:
            return self
        source = f"{self.source}, cut at {limit}"
        if not self.histogram:
            mean, longest = self.uncut or (self.mean, self.longest)
            share = self._moments(limit)[0] / self._moments(longest)[0]
            return Lengths(
                mean=min(max(1.0, mean * share), float(limit)), longest=limit, source=source,
                rows=self.rows, uncut=(mean, longest),
            )  # fmt: skip
        counts: dict[int, int] = {}
        for length, count in self.histogram:
            counts[min(length, limit)] = counts.get(min(length, limit), 0) + count
        return _counted(counts, source, self.rows)

    def quantile(self, share: float) -> float:
        """The length that this share of the rows does not exceed."""
        if not self.histogram:
            if share <= 0:
                return 1.0
            if share >= 1:
                return float(self.longest)
            value = math.exp(self._middle() + self._spread() * _NORMAL.inv_cdf(share))
            return min(float(self.longest), max(1.0, value))
        wanted = share * sum(n for _, n in self.histogram)
        seen = 0
        for length, count in self.histogram:
            seen += count
            if seen >= wanted:
                return float(length)
        return float(self.longest)

    def longest_of(self, rows: int) -> float:
        """The median longest of so many rows."""
        return self.quantile(0.5 ** (1 / max(1, rows)))

    def sum_of(self, rows: int, batches: int = 1) -> float:
        """The median largest sum over batches of so many rows, by a gamma curve of the same moments."""
        mean, deviation = rows * self.mean, math.sqrt(rows) * self.deviation
        if not deviation:
            return mean
        z = _NORMAL.inv_cdf(0.5 ** (1 / max(1, batches)))
        # Wilson and Hilferty: the cube root of a gamma variable is nearly normal
        form = (mean / deviation) ** 2
        value = mean * (1 - 1 / (9 * form) + z / (3 * math.sqrt(form))) ** 3
        return min(float(rows * self.longest), max(mean, value))

    def _middle(self) -> float:
        """Mean of the logarithm."""
        mean, spread = (self.uncut or (self.mean, 0))[0], self._spread()
        return math.log(mean) - spread * spread / 2

    def _moments(self, limit: int) -> tuple[float, float]:
        """Mean, and mean of the squares, of the assumed rows cut at a limit."""
        middle, spread, end = self._middle(), self._spread(), math.log(limit)
        if not spread:
            one = min(math.exp(middle), float(limit))
            return one, one * one
        beyond = 1 - _NORMAL.cdf((end - middle) / spread)
        found = []
        for power in (1, 2):
            shift = power * spread * spread
            below = _NORMAL.cdf((end - middle - shift) / spread)
            found.append(
                math.exp(power * middle + power * shift / 2) * below + limit**power * beyond
            )
        return found[0], found[1]

    def _spread(self) -> float:
        """Deviation of the logarithm, from longest/mean = exp(reach s - s^2/2)."""
        mean, longest = self.uncut or (self.mean, self.longest)
        ratio = math.log(max(1.0, longest / mean))
        root = _REACH * _REACH - 2 * ratio
        return min(_WIDEST, _REACH - math.sqrt(root)) if root > 0 else _WIDEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch: `rows` sequences of `width` positions (packed: one row of all tokens).

    `tokens` are all positions the model computes, `real` those that are no padding.
    """

    rows: int
    width: int
    real: int
    formula: str

    @property
    def tokens(self) -> int:
        """Positions, padding included."""
        return self.rows * self.width


def largest(lengths: Lengths, *, rows: int, batches: int, packed: bool) -> Batch:
    """The largest micro-batch of `rows` sequences among `batches` of them (all ranks together)."""
    if packed:
        tokens = math.ceil(lengths.sum_of(rows, batches))
        why = f"largest of {batches:,} packed sums of {rows} rows of {lengths.mean:.0f} tokens on average"
        return Batch(rows=1, width=tokens, real=tokens, formula=f"{tokens:,} tokens: {why}")
    width = math.ceil(lengths.longest_of(rows * batches))
    real = min(rows * width, math.ceil(width + (rows - 1) * lengths.mean))
    why = f"padded to the longest of {rows * batches:,} rows"
    return Batch(rows=rows, width=width, real=real, formula=f"{rows} x {width:,} tokens: {why}")


def typical(lengths: Lengths, *, rows: int, packed: bool) -> Batch:
    """A micro-batch as it is on average: for tokens a step and time, not for memory."""
    real = math.ceil(rows * lengths.mean)
    if packed:
        return Batch(
            rows=1, width=real, real=real, formula=f"{rows} rows x {lengths.mean:.0f} tokens"
        )
    # the mean of a maximum, from its quartiles
    width = sum(lengths.quantile(q ** (1 / rows)) for q in (1 / 8, 3 / 8, 5 / 8, 7 / 8)) / 4
    wide = max(math.ceil(width), math.ceil(lengths.mean))
    return Batch(rows=rows, width=wide, real=min(real, rows * wide),
                 formula=f"{rows} rows padded to {wide} on average")  # fmt: skip


def parse(text: str) -> Lengths:
    """`MEAN:MAX` (tokens a row) or one number for rows of one length; raises UsageError."""
    mean, _, longest = text.partition(":")
    try:
        values = float(mean), int(longest) if longest else int(float(mean))
    except (ValueError, OverflowError):
        values = (0.0, 0)
    if not (math.isfinite(values[0]) and 1 <= values[0] <= values[1]):
        raise usage(
            "row-tokens", f"--row-tokens {brief(text, 40)} is not MEAN:MAX with 1 <= MEAN <= MAX",
            "for example --row-tokens 290:1100",
        )  # fmt: skip
    return Lengths(mean=values[0], longest=values[1], source=f"--row-tokens {text}")


def of_dataset(folder: Path, columns: Sequence[str] = ("input_ids",)) -> Lengths:
    """Lengths of a tokenised dataset on disk (`save_to_disk`, or a folder of .arrow files).

    The files are mapped, and only the offsets of the list columns are read: no row is made into Python
    objects. Several columns (DPO's two) count as rows of their own. Raises NotReady without pyarrow,
    InvalidConfig where there is no such dataset or column.
    """
    try:
        arrow: Any = importlib.import_module("pyarrow")
        compute: Any = importlib.import_module("pyarrow.compute")
    except ImportError:
        raise NotReady(_unread(
            f"{folder} cannot be read without pyarrow", "pip install pyarrow, or give --row-tokens MEAN:MAX"
        )) from None  # fmt: skip
    counts: dict[int, int] = {}
    rows = 0
    for path in _arrow_files(folder):
        try:
            with arrow.memory_map(str(path)) as source:
                for chunk in _batches(arrow, source):
                    rows += chunk.num_rows
                    for name in _present(chunk.schema.names, columns, path):
                        found = compute.value_counts(compute.list_value_length(chunk.column(name)))
                        for value in found.to_pylist():
                            if value["values"] is not None:
                                length = int(value["values"])
                                counts[length] = counts.get(length, 0) + int(value["counts"])
        except (OSError, arrow.ArrowException) as error:
            raise InvalidConfig(_unread(
                f"{path} is no readable arrow file: {brief(error)}", "delete it, or give --row-tokens"
            )) from None  # fmt: skip
    if not counts:
        raise InvalidConfig(_unread(f"{folder} holds no rows", "give --row-tokens MEAN:MAX"))
    return _counted(counts, f"{rows:,} rows of {folder}", rows)


def of_texts(path: Path, tokenizer: Path, *, extra: int = 5) -> Lengths:
    """Lengths of a sample of a local .jsonl with chats, by the model's own tokenizer.json.

    `extra` tokens a message stand for the chat template. Raises NotReady without the tokenizers
    package, InvalidConfig where the files cannot be read.
    """
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
    except ImportError:
        raise NotReady(_unread(
            f"{path} cannot be tokenised without the tokenizers package", "give --row-tokens MEAN:MAX"
        )) from None  # fmt: skip
    try:
        encoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise InvalidConfig(_unread(
            f"{tokenizer} is no tokenizer: {brief(error)}", "give --row-tokens MEAN:MAX"
        )) from None  # fmt: skip
    counts: dict[int, int] = {}
    for chat in _sampled(path):
        texts = [str(m.get("content", "")) for m in chat if isinstance(m, Mapping)]
        length = sum(len(e.ids) + extra for e in encoder.encode_batch(texts))
        counts[length] = counts.get(length, 0) + 1
    if not counts:
        raise InvalidConfig(_unread(f"{path} holds no chats", "give --row-tokens MEAN:MAX"))
    sampled = sum(counts.values())
    return _counted(counts, f"a sample of {sampled} chats of {path}", None)


def _sampled(path: Path) -> Iterable[Sequence[Any]]:
    """Chats of every n-th line: `messages`, or DPO's `chosen` and `rejected`."""
    try:
        if path.stat().st_size > _SAMPLED_BYTES:
            with open_regular(path) as file:
                lines = file.read(_SAMPLED_BYTES).splitlines()[:-1]
        else:
            lines = read_bytes(path, _SAMPLED_BYTES).splitlines()
    except OSError as error:
        raise InvalidConfig(_unread(f"{path}: {error.strerror}", "give --row-tokens")) from None
    for line in lines[:: max(1, len(lines) // _SAMPLE)]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        for key in ("messages", "chosen", "rejected"):
            if isinstance(row, dict) and isinstance(row.get(key), list):
                yield row[key]


def _arrow_files(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        try:
            names = sorted(p.name for p in folder.iterdir() if p.suffix == ".arrow")
        except OSError:
            names = []
    if not names:
        raise InvalidConfig(_unread(
            f"{folder} is no tokenised dataset: it has no .arrow files",
            "run `cache_dataset_only` first, or give --row-tokens MEAN:MAX",
        ))  # fmt: skip
    return [folder / name for name in names]


def _batches(arrow: Any, source: Any) -> Iterable[Any]:
    """datasets writes streams; other tools write files."""
    try:
        yield from arrow.ipc.open_stream(source)
    except arrow.ArrowInvalid:
        reader = arrow.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def _present(have: Sequence[str], wanted: Sequence[str], path: Path) -> Sequence[str]:
    missing = [name for name in wanted if name not in have]
    if missing:
        raise InvalidConfig(_unread(
            f"{path} has no column {', '.join(missing)}: it has {brief(', '.join(have))}",
            "give --row-tokens MEAN:MAX",
        ))  # fmt: skip
    return wanted


def _counted(counts: Mapping[int, int], source: str, rows: int | None) -> Lengths:
    total = sum(counts.values())
    return Lengths(
        mean=max(1.0, sum(x * n for x, n in counts.items()) / total), longest=max(counts),
        source=source, rows=rows, histogram=tuple(sorted(counts.items())),
    )  # fmt: skip


def _unread(message: str, help: str) -> Finding:
    return Finding(
        severity="error", layer="launch", code="unknown-lengths", key="row_tokens",
        message=message, help=help,
    )  # fmt: skip
