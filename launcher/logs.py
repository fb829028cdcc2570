"""Console lines of a training run -> signals and metrics with line numbers: a `Log`.

What to look for is data (`Pattern`), supplied by `backends/*_log.py`; how to read a log that is
huge, interleaved, coloured, cut off or full of progress bars is here. Pattern names with a meaning
of their own: `arguments` (groups block, deep, field, other), `step` (step, lr, loss, aux, tps),
`metrics` (pairs) and `total_steps` (total). Any other match becomes a `Signal` of that name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

from launcher.segments import BAR, BAR_BYTES, SEGMENT_BYTES, blocks, bounds, clean, text
from launcher.tracebacks import FIRST_LINE, Tracebacks

LAST_BARS = 400  # of a block, looked through from its end
KEPT_SIGNALS = 50  # of each name, first and last
KEPT_STEPS = 50_000
KEPT_ARGUMENTS = 2_000

_WHOLE = re.compile(r"\.\d{4}|nan|inf")  # enough of a loss where the log is cut off
_PAIR = re.compile(rb"'([^']+)': (?:'([^']*)'|([^,}']+))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One line that means something: `regex` is tried only on segments that hold `needle`.

    `where` names the upstream `file:line` that prints it.
    """

    name: str
    needle: bytes
    regex: re.Pattern[bytes]
    where: str


def pattern(name: str, needle: str, regex: str, where: str) -> Pattern:
    """A `Pattern` from readable text; `regex` is searched for within one segment of a line."""
    return Pattern(name=name, needle=needle.encode(), regex=re.compile(regex.encode()), where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One line that matched: `line` is 1-based, `text` clean and at most 300 characters."""

    name: str
    line: int
    text: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """What the log says about one optimizer step; `loss` may be nan or infinite."""

    step: int
    loss: float
    learning_rate: float | None
    tokens_per_second: float | None
    line: int
    text: str
    extra: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Everything one console log says about its last run (an appended-to file holds several).

    `asked` is the arguments dump, `asked_at` the line of each value, and `blocks` the dataclasses
    it shows; `total_steps` the announced or displayed number of optimizer steps; `last_bar` the
    (step, line) of the training bar's end; `begins` the line where the last run's dump begins;
    `counts` how often each signal came.
    """

    path: Path
    lines: int
    begins: int
    signals: tuple[Signal, ...]
    counts: Mapping[str, int]
    steps: tuple[StepLine, ...]
    asked: Mapping[str, str]
    asked_at: Mapping[str, int]
    blocks: tuple[str, ...]
    total_steps: int | None
    last_bar: tuple[int, int] | None

    def all(self, *names: str) -> tuple[Signal, ...]:
        """The signals of these names, in the order of their lines."""
        return tuple(s for s in self.signals if s.name in names)

    def first(self, *names: str) -> Signal | None:
        """The first signal of any of these names."""
        return next((s for s in self.signals if s.name in names), None)

    def last(self, *names: str) -> Signal | None:
        """The last signal of any of these names."""
        return next((s for s in reversed(self.signals) if s.name in names), None)

    @property
    def last_step(self) -> int | None:
        """The last optimizer step that a loss line or the training bar shows."""
        shown = [self.steps[-1].step] if self.steps else []
        if self.last_bar is not None:
            shown.append(self.last_bar[0])
        return max(shown, default=None)


def scan(path: Path, patterns: Sequence[Pattern]) -> Log:
    """Read a console log of any size, in pieces, into a `Log`.

    Lines are counted by line feeds; carriage returns divide a line into segments. Raises OSError
    if the file cannot be read; nothing in its content raises.
    """
    reading = _Reading(patterns=tuple(patterns))
    line, ended = 1, True
    with path.open("rb") as file:
        for block in blocks(file):
            reading.take(block, line)
            line += block.count(b"\n")
            ended = block.endswith(b"\n")
    return reading.log(path, line - 1 if ended else line)


def number(text: str | bytes | None) -> float | None:
    """A float as a log prints it (nan and inf included); None where it is none."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


@dataclass(slots=True, kw_only=True)
class _Reading:
    """One scan: what was kept so far, and what is still open where a piece ends."""

    patterns: tuple[Pattern, ...]
    kept: dict[str, list[Signal]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    steps: list[StepLine] = field(default_factory=list)
    dicts: list[StepLine] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)
    asked_at: dict[str, int] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    in_block: bool = False
    open_value: tuple[str, str] | None = None
    announced: int | None = None
    highest: int = 0
    shown: dict[int, tuple[int, int]] = field(default_factory=dict)
    entries: int = 0
    final_epoch: float | None = None
    bars: dict[int, tuple[int, int]] = field(default_factory=dict)
    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    begins: int = 1
    busy_line: int = 0
    tail: bytes = b""

    def take(self, block: bytes, line: int) -> None:
        """Take in one piece of the log; `line` is the number of its first line."""
        done = self._follow(block, 0, line) if self.tracebacks.open else 0
        at, here = 0, line
        for start, end, found in self._hits(block):
            here += block.count(b"\n", at, start)
            at = start
            if found is not None:
                self._match(found, block, start, end, here)
            elif start >= done:
                done = self._follow(block, start, here)
        self._bars(block, line)
        self.tail = block[-BAR_BYTES:]

    def _hits(self, block: bytes) -> list[tuple[int, int, Pattern | None]]:
        """Segments that hold a needle, in order; no pattern stands for a traceback's first line."""
        found: list[tuple[int, int, int]] = []
        for index, needle in enumerate((FIRST_LINE, *(p.needle for p in self.patterns))):
            at = block.find(needle)
            while at >= 0:
                start, end = bounds(block, at)
                if start >= 0:
                    found.append((start, index, end))
                at = block.find(needle, end)
        return [(s, e, self.patterns[i - 1] if i else None) for s, i, e in sorted(found)]

    def _match(self, found: Pattern, block: bytes, start: int, end: int, line: int) -> None:
        segment = block[start:end]
        match = found.regex.search(segment)
        if match is None:
            return
        groups = {k: text(v) for k, v in match.groupdict().items() if v is not None}
        if found.name == "arguments":
            self._argument(groups, line)
        elif found.name == "step":
            if end < len(block) or _WHOLE.search(groups["loss"]):
                self._step(groups, segment, line)
        elif found.name == "metrics":
            self._metrics(match["pairs"], block, start, end, line)
        else:
            if found.name == "total_steps":
                self.announced, self.highest = int(groups["total"]), 0
            self._keep(found.name, segment, groups, line)

    def _keep(self, name: str, segment: bytes, fields: Mapping[str, str], line: int) -> None:
        kept = self.kept.setdefault(name, [])
        kept.append(Signal(name=name, line=line, text=clean(segment), fields=fields))
        self.counts[name] = self.counts.get(name, 0) + 1
        if len(kept) > 2 * KEPT_SIGNALS:
            del kept[KEPT_SIGNALS]

    def _argument(self, groups: Mapping[str, str], line: int) -> None:
        """A line of the arguments dump: one value a line, a long list over several."""
        if "field" in groups:
            if self.in_block and len(self.asked) < KEPT_ARGUMENTS:
                self._value(groups["field"], "deep" in groups, line)
            return
        self.in_block, self.open_value = "block" in groups, None
        if self.in_block:
            if groups["block"] in self.blocks:
                self._begin_again(line)
            self.blocks.append(groups["block"])

    def _value(self, shown: str, deep: bool, line: int) -> None:
        key, value = self.open_value or ("", "")
        if deep or (self.open_value and shown[:1] in ("]", "}", ")")):
            value = f"{value}{shown} " if deep else value.rstrip(", ") + shown
        else:
            key, _, value = shown.partition("=")
        closed = not deep and not value.endswith(("[", "{", "("))
        self.open_value = None if closed or len(value) > SEGMENT_BYTES else (key, value)
        if closed and key:
            self.asked.setdefault(key, value.rstrip(","))
            self.asked_at.setdefault(key, line)

    def _begin_again(self, line: int) -> None:
        """A second dump means a second run in one file; of the first only what came after its last
        sign of work stays, because DPO prints its attention line before the dump."""
        late = [s for s in self.kept.get("attention", []) if s.line > self.busy_line]
        self.kept, self.counts = {"attention": late}, {"attention": len(late)}
        self.steps, self.dicts, self.shown, self.blocks = [], [], {}, []
        self.asked, self.asked_at, self.bars = {}, {}, {}
        self.announced, self.final_epoch, self.highest, self.begins = None, None, 0, line

    def _step(self, groups: Mapping[str, str], segment: bytes, line: int) -> None:
        step, loss, aux = int(groups["step"]), number(groups["loss"]), number(groups.get("aux"))
        if loss is None or step <= self.highest:  # every rank of DPO prints the same step
            return
        self.highest = step
        extra = {} if aux is None else {"aux_loss": aux}
        numbers = {k: number(groups.get(k)) for k in ("lr", "tps")}
        self._add(self.steps, step, loss, numbers, extra, segment, line)

    def _metrics(self, pairs: bytes, block: bytes, start: int, end: int, line: int) -> None:
        """One dict of HF Trainer; which step it belongs to is settled at the end (`_number`)."""
        numbers = {text(k): number(a or b) for k, a, b in _PAIR.findall(pairs)}
        values = {k: v for k, v in numbers.items() if v is not None}
        if "loss" not in values:
            self.final_epoch = values.get("epoch", self.final_epoch)
            return
        lead = self.tail + block[:start] if start < BAR_BYTES else block[start - BAR_BYTES : start]
        after = BAR.match(block, end, end + BAR_BYTES) or BAR.match(block, end + 1)
        bar = after or next(iter(reversed(list(BAR.finditer(lead)))), None)
        if self.dicts and values.get("epoch", 0) < self.dicts[-1].extra.get("epoch", 0):
            self.dicts, self.shown = [], {}  # appended to an older run's log
            self.entries = 0
        self.entries += 1
        if bar:
            self.shown[line] = (int(bar["done"]), int(bar["total"]))
        loss, numbers = values.pop("loss"), {"lr": values.pop("learning_rate", None)}
        self._add(self.dicts, self.entries, loss, numbers, values, block[start:end], line)

    def _add(
        self,
        steps: list[StepLine],
        step: int,
        loss: float,
        numbers: Mapping[str, float | None],
        extra: Mapping[str, float],
        segment: bytes,
        line: int,
    ) -> None:
        self.busy_line = line
        steps.append(
            StepLine(
                step=step,
                loss=loss,
                learning_rate=numbers.get("lr"),
                tokens_per_second=numbers.get("tps"),
                line=line,
                text=clean(segment),
                extra=extra,
            )
        )
        if len(steps) > KEPT_STEPS:  # memory is bounded: half of a longer run is let go
            bad = next((s for s in steps if not isfinite(s.loss)), None)
            steps[1:-1] = [s for i, s in enumerate(steps[1:-1]) if i % 2 or s is bad]
            self.shown = {s.line: self.shown[s.line] for s in steps if s.line in self.shown}

    def _bars(self, block: bytes, line: int) -> None:
        """Remember where each bar without a description stands last; training's has none."""
        at, seen = len(block), set[int]()
        for _ in range(LAST_BARS):
            at = block.rfind(b"%|", 0, at)
            if at < 0:
                return
            start, end = bounds(block, at)
            bar = BAR.match(block[start:end]) if start >= 0 else None
            if bar is None or (total := int(bar["total"])) in seen:
                continue
            seen.add(total)
            if total in self.bars or len(self.bars) < KEPT_SIGNALS:
                self.bars[total] = (int(bar["done"]), line + block.count(b"\n", 0, start))

    def _follow(self, block: bytes, start: int, line: int) -> int:
        """Follow open tracebacks to what was raised; the position reached."""
        reached, raised = self.tracebacks.follow(block, start, line)
        for found in raised:
            self._keep("exception", found.segment, found.as_fields(), found.line)
        return reached

    def log(self, path: Path, lines: int) -> Log:
        """What the whole file came to."""
        beside = [self.shown[d.line] for d in self.dicts if d.line in self.shown]
        total = self.announced or (beside[-1][1] if beside else next(iter(self.bars), None))
        if not self.steps and self.announced is None:  # else a dict is a word of the training data
            steps = self._number([done for done, _ in beside], total)
            pairs = zip(self.dicts, steps, strict=True)
            self.steps = [replace(found, step=step) for found, step in pairs]
        signals = sorted(itertools.chain(*self.kept.values()), key=lambda s: s.line)
        return Log(
            path=path,
            lines=lines,
            begins=self.begins,
            signals=tuple(signals),
            counts=self.counts,
            steps=tuple(self.steps),
            asked=self.asked,
            asked_at=self.asked_at,
            blocks=tuple(self.blocks),
            total_steps=total,
            last_bar=self.bars.get(total) if total is not None else None,
        )

    def _number(self, beside: list[int], total: int | None) -> list[int]:
        """The optimizer step of each of HF Trainer's dicts, which do not name it.

        The bar redrawn beside the dict shows it, unless stdout was buffered and all dicts came in
        one heap: then the share of the epochs done tells, else the count.
        """
        if len(beside) == len(self.dicts) and _rising(beside):
            return beside
        epochs = [s.extra.get("epoch", 0.0) for s in self.dicts]
        if total and self.final_epoch:
            shares = [round(total * epoch / self.final_epoch) for epoch in epochs]
            if _rising([0, *shares]):
                return shares
        last = self.bars.get(total or 0, (0, 0))[0]
        every = max(1, round(last / max(1, len(self.dicts))))
        return [s.step * every for s in self.dicts]


def _rising(values: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))
