"""Console lines of a training run -> signals and metrics with line numbers: a `Log`.

What to look for is data (`Pattern`), supplied by `upstream/logs`; how to read a log that is huge, interleaved,
coloured, cut off or full of progress bars is here. Pattern names with a meaning of their own: `arguments` (groups
block, first, deep, field, other), `step` (step, lr, loss, aux, tps), `metrics` (pairs) and `total_steps` (total). Any
other match becomes a `Signal` of that name.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.upstream.logs.common import Pattern
from launcher.verdict.logs.segments import SEGMENT_BYTES, clean, opened, text
from launcher.verdict.logs.survey import KEPT_SIGNALS, KEPT_STEPS, Hit, survey

KEPT_BAD = 1_000  # steps that are not finite, whatever else is left out
KEPT_ARGUMENTS = 2_000
FIELD_BYTES = 4_096  # of what a pattern names
PAIRS_BYTES = 8_192  # of one dict of metrics

_WHOLE = re.compile(rb"\.\d{4}|nan|inf")  # enough of a loss where the log is cut off
_PAIR = re.compile(rb"'([^']+)': (?:'([^']*)'|([^,}']+))")
_EPOCH_DIGITS = 0.005  # what HF Trainer rounds an epoch by, at most
_WORK = ("total_steps", "progress")  # signals after which a failure before them is of the past
_STARTS = ("begun", "loading")
_ENDS = ("saved", "remaining", "training_completed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of a log: `line` is 1-based, `text` clean and at most 300 characters."""

    path: Path
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal(LogLine):
    name: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine(LogLine):
    """What the log says about one optimizer step; `loss` may be nan or infinite."""

    step: int
    loss: float
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    extra: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Everything one console log says about its last run (an appended-to file holds several).

    `arguments` is their dump, `argument_lines` the line of each, and `blocks` the dataclasses it shows; `total_steps`
    the announced or displayed number of optimizer steps; `last_bar` the (step, line) of the training bar's end;
    `numbered` is False where nothing tells which step a loss is of: `step` then counts the losses. `summed` is whether
    HF Trainer has summed the run up, as it does behind the last step of whatever it trained. Of each signal some of
    the first and last are kept. Of many step lines some 50,000 are read at even distances, with the first, the last,
    and those whose loss or gradient norm is not finite (of every 4 MiB the first 64 for sure).
    """

    path: Path
    lines: int
    signals: tuple[Signal, ...]
    steps: tuple[StepLine, ...]
    numbered: bool
    arguments: Mapping[str, str]
    argument_lines: Mapping[str, int]
    blocks: tuple[str, ...]
    total_steps: int | None
    last_bar: tuple[int, int] | None
    summed: bool

    def all(self, *names: str) -> tuple[Signal, ...]:
        return tuple(s for s in self.signals if s.name in names)

    def last(self, *names: str) -> Signal | None:
        return next((s for s in reversed(self.signals) if s.name in names), None)

    @property
    def headless(self) -> bool:
        """Whether the beginning is not there: of open-instruct its arguments; of HF Trainer its first steps, or the
        bar before them. Of its stdout alone, or what W&B kept of it, nothing that came before training is there."""
        if not any("epoch" in s.extra for s in self.steps[:1]):
            return not self.blocks and bool(self.steps or self.all("total_steps"))
        started = [int(s.fields["total"]) for s in self.all("bar_begun")]
        if self.total_steps in started:
            return False
        prepared = any("%|" in s.text for s in self.all(*_STARTS))
        if not prepared and not self.all("trainer", "trainer_of"):
            return True
        steps = [s.step for s in self.steps[:2]]
        return self.numbered and (len(steps) == 1 or steps[0] > steps[1] - steps[0])

    @property
    def last_step(self) -> int | None:
        shown = [self.steps[-1].step] if self.steps and self.numbered else []
        return max([*shown, *(self.last_bar or ())[:1]], default=None)

    def argument(self, key: str) -> tuple[LogLine, ...]:
        if key not in self.arguments:
            return ()
        return (LogLine(path=self.path, line=self.argument_lines[key], text=f"{key}={self.arguments[key]}"),)


def scan(path: Path, patterns: Sequence[Pattern]) -> Log:
    """Read a console log of any size, in pieces, into a `Log`. Lines are counted by line feeds; carriage returns
    divide a line into segments. A log that is still written to is read as far as it goes now, a pipe to its end.
    Raises OSError if the file cannot be read; nothing in its content raises."""
    with opened(path) as pieces:
        reading = _Reading(path=path, patterns=patterns)
        bars: list[tuple[int, int, int]] = []
        late: list[tuple[int, Hit]] = []
        line = 1
        # a piece at a time: all of them together would hold the whole file
        for piece in survey(pieces, patterns):
            following = line + piece.feeds
            hits = late + [(line + hit.line, hit) for hit in piece.hits]
            hits.sort(key=lambda placed: placed[0])
            # what is followed past the end of a piece stands among the hits of the next
            late = [(at, hit) for at, hit in hits if at >= following]
            for at, hit in hits:
                if at < following:
                    reading.match(hit, at)
            bars += [(total, done, line + at) for total, done, at in piece.bars]
            line = following
        for at, hit in late:
            reading.match(hit, at)
        for total, done, at in bars:
            reading.bar(total, done, at)
        return reading.log(line - (not pieces.cut_off))


def number(text: str | bytes | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


@dataclass(slots=True, kw_only=True)
class _Reading:
    """One scan: what was kept so far, and what is still open where a piece ends."""

    path: Path
    patterns: Sequence[Pattern]
    kept: dict[str, list[Signal]] = field(default_factory=dict)
    steps: list[StepLine] = field(default_factory=list)
    dicts: list[StepLine] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    argument_lines: dict[str, int] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    in_block: bool = False
    open_value: tuple[str, str] | None = None
    announced: int | None = None
    highest: int = 0
    shown: dict[int, tuple[int, int]] = field(default_factory=dict)
    entries: int = 0
    final_epoch: float | None = None
    over: bool = False
    rated: int | None = None
    numbered: bool = True
    bars: dict[int, tuple[int, int]] = field(default_factory=dict)
    begins: int = 1
    busy_line: int = 0
    earlier_line: int = 0

    def bar(self, total: int, done: int, line: int) -> None:
        if line >= self.begins and (total in self.bars or len(self.bars) < KEPT_SIGNALS):
            self.bars[total] = (done, line)

    def match(self, hit: Hit, line: int) -> None:
        if hit.fields is not None:
            self._keep("exception", hit, hit.fields, line)
            return
        name, regex = self.patterns[hit.pattern].name, self.patterns[hit.pattern].regex
        match = regex.search(hit.segment)
        if match is None:
            self.entries += hit.skipped if name == "metrics" else 0
            return
        if name == "metrics":
            self._metrics(match["pairs"], hit, line)
            return
        if name == "step":
            if hit.whole or _WHOLE.search(match["loss"]):
                self._step(match, hit.segment, line)
            return
        # of arguments the whole value counts
        most = len(hit.segment) if name == "arguments" else FIELD_BYTES
        groups = {k: text(v[:most]) for k, v in match.groupdict().items() if v is not None}
        if name == "arguments":
            self._argument(groups, line)
            return
        if name in _WORK:
            self.earlier_line, self.busy_line = self.busy_line, line
        if name == "total_steps":
            # a line of a step before is a word of the training data, which upstream shows
            self.announced, self.highest, self.steps = int(groups["total"]), 0, []
        self._keep(name, hit, groups, line)

    def _keep(self, name: str, hit: Hit, fields: Mapping[str, str], line: int) -> None:
        """Of many, the first ones, the first ones after the last work, and the last ones."""
        kept = self.kept.setdefault(name, [])
        kept.append(Signal(name=name, path=self.path, line=line, text=clean(hit.segment), fields=fields))
        while len(kept) > 2 * KEPT_SIGNALS:
            since = kept[0].line <= self.earlier_line < kept[KEPT_SIGNALS].line
            if since and len(kept) <= 3 * KEPT_SIGNALS:
                break
            del kept[(2 if since else 1) * KEPT_SIGNALS]

    def _argument(self, groups: Mapping[str, str], line: int) -> None:
        """A line of the arguments dump: one value a line, a long list over several."""
        if "field" in groups:
            if self.in_block and len(self.arguments) < KEPT_ARGUMENTS:
                self._value(groups["field"], "deep" in groups, line)
            return
        self.in_block, self.open_value = "block" in groups, None
        if self.in_block:
            if groups["block"] in self.blocks or ("first" in groups and self.blocks):
                # a second dump means a second run in one file; of the first only what came after its last sign of
                # work stays, because DPO prints its attention line before the dump
                late = [s for s in self._kept("attention") if s.line > self.busy_line]
                self._forget_arguments()
                self._restart(line)
                self.kept = {"attention": late}
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
            self.arguments.setdefault(key, value.rstrip(","))
            self.argument_lines.setdefault(key, line)

    def _forget_arguments(self) -> None:
        self.steps, self.blocks, self.arguments, self.argument_lines = [], [], {}, {}
        self.announced, self.highest = None, 0

    def _restart(self, begins: int) -> None:
        """What stands before this line is of an earlier run, to whose log this one's is appended."""
        self.begins = begins
        self.kept = {n: [s for s in ss if s.line >= begins] for n, ss in self.kept.items()}
        self.bars = {total: bar for total, bar in self.bars.items() if bar[1] >= begins}
        self.dicts, self.shown, self.entries = [], {}, 0
        self.final_epoch, self.over, self.rated = None, False, None

    def _leave_an_earlier(self) -> None:
        """What has begun behind the end of a run, and came to no step, is another one."""
        ended = max([self.busy_line if self.over else 0, *(s.line for s in self._kept(*_ENDS))])
        last = max((s.line for s in self.steps + self.dicts), default=0)
        if begun := [s.line for s in self._kept("begun", "refused") if s.line > ended > last]:
            self._forget_arguments()
            self._restart(min(begun))

    def _kept(self, *names: str) -> list[Signal]:
        return [signal for name in names for signal in self.kept.get(name, ())]

    def _step(self, match: re.Match[bytes], segment: bytes, line: int) -> None:
        step, loss, aux = int(match["step"]), number(match["loss"]), number(match["aux"])
        if loss is None or step <= self.highest:  # every rank of DPO prints the same step
            return
        self.highest = step
        rates = {"learning_rate": number(match["lr"]), "tokens_per_second": number(match["tps"])}
        extra = {} if aux is None else {"aux_loss": aux}
        self._add(self.steps, segment, line, step=step, loss=loss, extra=extra, **rates)

    def _metrics(self, pairs: bytes, hit: Hit, line: int) -> None:
        """One dict of HF Trainer; which step it belongs to is settled at the end (`_number`)."""
        shown = {text(k): text(a or b) for k, a, b in _PAIR.findall(pairs[:PAIRS_BYTES])}
        values = {k: v for k in shown if (v := number(shown[k])) is not None}
        if "loss" not in values:
            self.final_epoch, self.over = values.get("epoch", self.final_epoch), True
            self.rated = _product(*(shown.get(k, "") for k in ("train_runtime", "train_steps_per_second")))
            self.earlier_line, self.busy_line = self.busy_line, line
            return
        before = self.dicts[-1].extra.get("epoch", 0) if self.dicts else 0
        if self.over or values.get("epoch", 0) < before:
            self._restart(self.busy_line + 1)
        self.entries += 1 + hit.skipped
        if hit.bar is not None:
            self.shown[line] = hit.bar
        loss, rate = values.pop("loss"), values.pop("learning_rate", None)
        self._add(self.dicts, hit.segment, line, step=self.entries, loss=loss, learning_rate=rate, extra=values)

    def _add(self, steps: list[StepLine], segment: bytes, line: int, **values: Any) -> None:
        self.earlier_line, self.busy_line = self.busy_line, line
        steps.append(StepLine(path=self.path, line=line, text=clean(segment), **values))
        if len(steps) > KEPT_STEPS:  # memory is bounded: half of a longer run is let go
            sound = (math.isfinite(s.loss) and math.isfinite(s.extra.get("grad_norm", 0.0)) for s in steps)
            spared = set([s.line for s, good in zip(steps, sound, strict=True) if not good][:KEPT_BAD])
            steps[1:-1] = [s for i, s in enumerate(steps[1:-1]) if i % 2 or s.line in spared]
            self.shown = {s.line: self.shown[s.line] for s in steps if s.line in self.shown}

    def log(self, lines: int) -> Log:
        self._leave_an_earlier()
        bars = [self.shown.get(found.line, (0, 0)) for found in self.dicts]
        total = self.announced or self._beside([of for _, of in bars]) or self._total()
        if not self.steps and self.announced is None:  # else a dict is a word of the training data
            steps = self._number([done for done, of in bars if of == total], total)
            self.steps = [replace(found, step=step) for found, step in zip(self.dicts, steps, strict=True)]
        return Log(
            path=self.path,
            lines=lines,
            signals=tuple(sorted(itertools.chain(*self.kept.values()), key=lambda s: (s.line, s.name))),
            steps=tuple(self.steps),
            numbered=self.numbered,
            arguments=self.arguments,
            argument_lines=self.argument_lines,
            blocks=tuple(self.blocks),
            total_steps=total,
            last_bar=self.bars.get(total) if total is not None else None,
            summed=self.over,
        )

    def _beside(self, totals: Sequence[int]) -> int | None:
        """The total of the training's bar: the last one beside a dict, where that is no evaluation's."""
        counts = Counter(total for total in totals if total)
        last = next((total for total in reversed(totals) if total), None)
        if last is None or counts[last] > 1 or len(counts) == 1:
            return last
        since = self.dicts[-2].line
        again = any(s.line > since for s in self._kept(*_STARTS))
        return last if again else counts.most_common(1)[0][0]

    def _total(self) -> int | None:
        """The steps where no dict stands beside a bar. A bar alone may be of anything."""
        trains = self.dicts or self.over or self.blocks or self._kept("planned", "trainer", "saving", *_ENDS)
        bars = self.bars if trains or any(" train dataset" in s.text for s in self._kept("begun")) else {}
        planned = self._kept("planned")
        announced = int(planned[-1].fields["total"].replace(",", "")) if planned else None
        # those of the data are over before it begins, those of its evaluations begin after it
        begun = [of for s in self._kept("bar_begun") if (of := int(s.fields["total"])) in bars]
        cut = next((of for of in begun if bars[of][0] < of), None)
        return announced or cut or max(begun, default=next(iter(bars), self.rated))

    def _number(self, beside: list[int], total: int | None) -> list[int]:
        """The optimizer step of each of HF Trainer's dicts, which do not name it. The bar redrawn beside the dict
        shows it, unless stdout was buffered and all dicts came in one heap: then the share of the epochs done tells,
        else the count."""
        if len(beside) == len(self.dicts) and _rising(beside):
            return beside
        epochs = [s.extra.get("epoch", 0.0) for s in self.dicts]
        if total and self.final_epoch:
            shares = [round(total * epoch / self.final_epoch) for epoch in epochs]
            counts = [s.step for s in self.dicts]
            each = max(1, round(shares[-1] / counts[-1])) if counts else 1
            margin = total / self.final_epoch * _EPOCH_DIGITS + 1
            if all(abs(each * n - at) <= margin for n, at in zip(counts, shares, strict=True)):
                return [each * n for n in counts]
            if _rising([0, *shares]):
                return shares
        last = self.bars.get(total or 0, (0, 0))[0]
        self.numbered = not self.dicts or last > 0
        every = max(1, round(last / max(1, self.entries)))
        return [s.step * every for s in self.dicts]


def _product(*factors: str) -> int | None:
    """The whole number of which these are rounded factors, where they leave but one."""
    low = high = 1.0
    for shown in factors:
        value, half = number(shown), 0.5 * 0.1 ** len(shown.partition(".")[2])
        if value is None or not half < value < math.inf:
            return None
        low, high = low * (value - half), high * (value + half)
    return math.floor(high) if math.floor(high) == math.ceil(low) else None


def _rising(values: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))
