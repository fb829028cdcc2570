"""Read the console log of a training into signals and metrics with line numbers: a `Log`.

What to look for is data (`Pattern`) of `upstream/logs`; this module reads logs that are huge,
interleaved, coloured, cut off or full of progress bars. Some pattern names have a meaning of their
own: `arguments` (groups block, first, deep, field, other), `step` (step, lr, loss, aux, tps),
`metrics` (pairs) and `total_steps` (total). A match of any other becomes a `Signal` of that name.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise
from pathlib import Path

from launcher.lazy_dataclass import dataclass
from launcher.upstream.logs import olmo_core
from launcher.upstream.logs.common import Pattern
from launcher.verdict.logs.segments import SEGMENT_BYTES, clean_segment, decode_text, open_pieces
from launcher.verdict.logs.survey import KEPT_SIGNALS, KEPT_STEPS, Hit, LastBar, ShownBar, survey

KEPT_BAD = 1_000
"""Steps that are not finite and are kept, whatever else is left out."""
KEPT_ARGUMENTS = 2_000
FIELD_BYTES = 4_096
"""Bytes of what a pattern names."""
PAIRS_BYTES = 8_192
"""Bytes of one dict of metrics."""

_COMPLETE_LOSS = re.compile(rb"\.\d{4}|nan|inf")
"""Enough of a loss if the log is cut off behind it."""
_PAIR = re.compile(rb"'([^']+)': (?:'([^']*)'|([^,}']+))")
_EPOCH_ERROR = 0.005
"""The largest error of an epoch that HF Trainer rounds."""
_WORK = ("total_steps", "progress")
"""Signals after which an earlier failure is of the past."""
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
    """Everything one console log says about its last run (a file may hold several).

    `arguments` is their dump, `argument_lines` the line of each, and `blocks` the dataclasses it
    shows. `total_steps` is the announced or displayed number of optimizer steps; `last_bar` the
    (step, line) of the training bar's end. `numbered` is False if nothing tells which step a loss
    is of: `step` then counts the losses. `summed`: HF Trainer has summed the run up, as it does
    after the last step of whatever it trained. Of each signal some of the first and last are kept.
    Of many step lines some 50,000 are read at even distances, with the first, the last, and those
    whose loss or gradient norm is not finite (of every 4 MiB the first 64 for sure).
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
        return tuple(signal for signal in self.signals if signal.name in names)

    def last(self, *names: str) -> Signal | None:
        for signal in reversed(self.signals):
            if signal.name in names:
                return signal
        return None

    @property
    def headless(self) -> bool:
        """Whether the beginning is missing.

        Of open-instruct the arguments; of HF Trainer the first steps, or the bar before them. Its
        stdout alone, or what W&B kept of it, has nothing that came before training.
        """
        is_of_trainer = bool(self.steps) and "epoch" in self.steps[0].extra
        if not is_of_trainer:
            has_training = bool(self.steps or self.all("total_steps"))
            return has_training and not self.blocks
        if any(int(bar.fields["total"]) == self.total_steps for bar in self.all("bar_begun")):
            return False
        has_bar = any("%|" in signal.text for signal in self.all(*_STARTS))
        if not has_bar and not self.all("trainer", "trainer_of"):
            return True
        if not self.numbered:
            return False
        if len(self.steps) == 1:
            return True
        first = self.steps[0].step
        return first > self.steps[1].step - first

    @property
    def last_step(self) -> int | None:
        steps = []
        if self.steps and self.numbered:
            steps.append(self.steps[-1].step)
        if self.last_bar is not None:
            steps.append(self.last_bar[0])
        return max(steps, default=None)

    def argument(self, key: str) -> tuple[LogLine, ...]:
        """The line of an argument, if there is one."""
        if key not in self.arguments:
            return ()
        text = f"{key}={self.arguments[key]}"
        return (LogLine(path=self.path, line=self.argument_lines[key], text=text),)


def scan(path: Path, patterns: Sequence[Pattern]) -> Log:
    """Read a console log of any size, in pieces, into a `Log`.

    Lines are counted by line feeds; carriage returns divide a line into segments. A log that is
    still written to is read as far as it goes now, a pipe to its end. Raises OSError if the file
    cannot be read; nothing in its content raises.
    """
    with open_pieces(path) as pieces:
        reading = _Scan(path=path, patterns=patterns)
        bars: list[LastBar] = []
        # hits beyond the end of a piece, which belong among those of the next, with their lines
        late: list[tuple[int, Hit]] = []
        line = 1
        # a piece at a time: all of them together would hold the whole file
        for piece in survey(pieces, patterns):
            next_line = line + piece.feeds
            hits = late
            for hit in piece.hits:
                hits.append((line + hit.line, hit))
            hits.sort(key=lambda placed: placed[0])
            late = []
            for number, hit in hits:
                if number < next_line:
                    reading.add(hit, number)
                else:
                    late.append((number, hit))
            for bar in piece.bars:
                bars.append(bar._replace(line=line + bar.line))
            line = next_line
            # the next piece is then read into the memory of this one, which saves time
            del piece
        for number, hit in late:
            reading.add(hit, number)
        for bar in bars:
            reading.add_bar(bar)
        if not pieces.cut_off:
            line -= 1
        return reading.finish(line)


def parse_number(text: str | bytes | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(slots=True, kw_only=True)
class _Scan:
    """One scan: what is kept so far, and what is still open where a piece ends.

    `dicts` are the step lines of HF Trainer, `entries` counts its dicts, `shown` are the bars
    beside them by line. `busy_line` is the last line of work, `earlier_line` the one before.
    """

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
    shown: dict[int, ShownBar] = field(default_factory=dict)
    entries: int = 0
    final_epoch: float | None = None
    over: bool = False
    rated: int | None = None
    numbered: bool = True
    bars: dict[int, LastBar] = field(default_factory=dict)
    begins: int = 1
    busy_line: int = 0
    earlier_line: int = 0

    def add_bar(self, bar: LastBar) -> None:
        if bar.line < self.begins:
            return
        if bar.total in self.bars or len(self.bars) < KEPT_SIGNALS:
            self.bars[bar.total] = bar

    def add(self, hit: Hit, line: int) -> None:
        """Add what a line of the log says; lines come in order."""
        if hit.fields is not None:
            self._keep_signal("exception", hit, hit.fields, line)
            return
        pattern = self.patterns[hit.pattern]
        match = pattern.regex.search(hit.segment)
        if match is None:
            if pattern.name == "metrics":
                self.entries += hit.skipped
        elif pattern.name == "metrics":
            self._add_dict(match["pairs"], hit, line)
        elif pattern.name == "step":
            if hit.is_complete or _COMPLETE_LOSS.search(match["loss"]):
                self._add_step(match, hit.segment, line)
        elif pattern.name == "block_loss":
            self._add_block(match["loss"], hit, line)
        elif pattern.name == "arguments":
            self._add_argument(_read_groups(match, len(hit.segment)), line)
        else:
            self._add_signal(pattern.name, _read_groups(match, FIELD_BYTES), hit, line)

    def _add_signal(self, name: str, fields: Mapping[str, str], hit: Hit, line: int) -> None:
        if name in _WORK:
            self._note_work(line)
        if name == "total_steps":
            # a step line before it is a word of the training data, which upstream shows
            self.announced = int(fields["total"])
            self.highest = 0
            self.steps = []
        self._keep_signal(name, hit, fields, line)

    def _note_work(self, line: int) -> None:
        self.earlier_line = self.busy_line
        self.busy_line = line

    def _keep_signal(self, name: str, hit: Hit, fields: Mapping[str, str], line: int) -> None:
        """Keep a signal; of many the first, the first after the last work, and the last."""
        kept = self.kept.setdefault(name, [])
        content = clean_segment(hit.segment)
        kept.append(Signal(name=name, path=self.path, line=line, text=content, fields=fields))
        while len(kept) > 2 * KEPT_SIGNALS:
            is_after_work = kept[0].line <= self.earlier_line < kept[KEPT_SIGNALS].line
            if not is_after_work:
                del kept[KEPT_SIGNALS]
            elif len(kept) > 3 * KEPT_SIGNALS:
                del kept[2 * KEPT_SIGNALS]
            else:
                break

    def _add_argument(self, groups: Mapping[str, str], line: int) -> None:
        """Add a line of the arguments dump: one value a line, a long list over several."""
        if "field" in groups:
            if self.in_block and len(self.arguments) < KEPT_ARGUMENTS:
                self._add_value(groups["field"], line, is_deep="deep" in groups)
            return
        self.in_block = "block" in groups
        self.open_value = None
        if not self.in_block:
            return
        block = groups["block"]
        if block in self.blocks or ("first" in groups and self.blocks):
            # a second dump is of a second run in one file; of what stood before it, only what came
            # after the last work stays: DPO prints its attention line before the dump
            attention = self._list_kept("attention")
            late = [signal for signal in attention if signal.line > self.busy_line]
            self._forget_arguments()
            self._restart(line)
            self.kept = {"attention": late}
        self.blocks.append(block)

    def _add_value(self, shown: str, line: int, *, is_deep: bool) -> None:
        key, value = self.open_value or ("", "")
        if is_deep:
            value += f"{shown} "
        elif self.open_value and shown.startswith(("]", "}", ")")):
            value = value.rstrip(", ") + shown
        else:
            key, _, value = shown.partition("=")
        is_closed = not is_deep and not value.endswith(("[", "{", "("))
        self.open_value = None
        if not is_closed and len(value) <= SEGMENT_BYTES:
            self.open_value = (key, value)
        if is_closed and key:
            self.arguments.setdefault(key, value.rstrip(","))
            self.argument_lines.setdefault(key, line)

    def _forget_arguments(self) -> None:
        self.steps = []
        self.blocks = []
        self.arguments = {}
        self.argument_lines = {}
        self.announced = None
        self.highest = 0

    def _restart(self, begins: int) -> None:
        """Forget what stands before this line: it is of an earlier run in the same file."""
        self.begins = begins
        for name, signals in self.kept.items():
            self.kept[name] = [signal for signal in signals if signal.line >= begins]
        self.bars = {bar.total: bar for bar in self.bars.values() if bar.line >= begins}
        self.dicts = []
        self.shown = {}
        self.entries = 0
        self.final_epoch = None
        self.over = False
        self.rated = None

    def _forget_ended_run(self) -> None:
        """Forget a run if another one began behind its end and came to no step."""
        ended = 0
        if self.over:
            ended = self.busy_line
        for signal in self._list_kept(*_ENDS):
            ended = max(ended, signal.line)
        last = max((step.line for step in self.steps + self.dicts), default=0)
        if last >= ended:
            return
        begun = []
        for signal in self._list_kept("begun", "refused"):
            if signal.line > ended:
                begun.append(signal.line)
        if begun:
            self._forget_arguments()
            self._restart(min(begun))

    def _list_kept(self, *names: str) -> list[Signal]:
        signals = []
        for name in names:
            signals += self.kept.get(name, [])
        return signals

    def _add_step(self, match: re.Match[bytes], segment: bytes, line: int) -> None:
        step = int(match["step"])
        loss = parse_number(match["loss"])
        # every rank of DPO prints the same step
        if loss is None or step <= self.highest:
            return
        self.highest = step
        extra = {}
        aux_loss = parse_number(match["aux"])
        if aux_loss is not None:
            extra["aux_loss"] = aux_loss
        logged = StepLine(
            path=self.path,
            line=line,
            text=clean_segment(segment),
            step=step,
            loss=loss,
            learning_rate=parse_number(match["lr"]),
            tokens_per_second=parse_number(match["tps"]),
            extra=extra,
        )
        self._keep_step(logged, self.steps)

    def _keep_step(self, step: StepLine, steps: list[StepLine]) -> None:
        steps.append(step)
        self._note_work(step.line)
        self._thin_out(steps)

    def _add_block(self, loss_text: bytes, hit: Hit, line: int) -> None:
        """Add the loss of a block of OLMo-core's, whose other metrics stand above it."""
        loss = _parse_shortened(loss_text)
        marker = olmo_core.MARKER.match(hit.heading)
        if loss is None or marker is None:
            return
        step = int(marker["step"])
        # a run that continues from a checkpoint repeats the steps after it
        while self.steps and self.steps[-1].step >= step:
            self.steps.pop()
        metrics = {}
        for metric in olmo_core.METRIC.finditer(hit.heading):
            value = _parse_shortened(metric["value"])
            if value is not None:
                metrics[decode_text(metric["name"])] = value
        extra = {}
        if olmo_core.GRADIENT_NORM in metrics:
            extra["grad_norm"] = metrics[olmo_core.GRADIENT_NORM]
        segment = marker[0] + b" " + hit.segment.strip()
        logged = StepLine(
            path=self.path,
            line=line,
            text=clean_segment(segment),
            step=step,
            loss=loss,
            learning_rate=metrics.get(olmo_core.LEARNING_RATE),
            tokens_per_second=metrics.get(olmo_core.TOKENS_PER_SECOND),
            extra=extra,
        )
        self._keep_step(logged, self.steps)

    def _add_dict(self, pairs: bytes, hit: Hit, line: int) -> None:
        """Add a dict of HF Trainer; `_number_dicts` finds later which step it belongs to."""
        shown = {}
        for key, quoted, plain in _PAIR.findall(pairs[:PAIRS_BYTES]):
            shown[decode_text(key)] = decode_text(quoted or plain)
        values = {}
        for name, words in shown.items():
            value = parse_number(words)
            if value is not None:
                values[name] = value
        if "loss" not in values:
            # HF Trainer sums up
            self.over = True
            self.final_epoch = values.get("epoch", self.final_epoch)
            runtime = shown.get("train_runtime", "")
            steps_per_second = shown.get("train_steps_per_second", "")
            self.rated = _infer_product(runtime, steps_per_second)
            self._note_work(line)
            return
        epoch_before = 0.0
        if self.dicts:
            epoch_before = self.dicts[-1].extra.get("epoch", 0.0)
        if self.over or values.get("epoch", 0) < epoch_before:
            self._restart(self.busy_line + 1)
        self.entries += 1 + hit.skipped
        if hit.bar is not None:
            self.shown[line] = hit.bar
        loss = values.pop("loss")
        learning_rate = values.pop("learning_rate", None)
        logged = StepLine(
            path=self.path,
            line=line,
            text=clean_segment(hit.segment),
            step=self.entries,
            loss=loss,
            learning_rate=learning_rate,
            extra=values,
        )
        self._keep_step(logged, self.dicts)

    def _thin_out(self, steps: list[StepLine]) -> None:
        """Let half of a long run go, so that memory is bounded; not the steps that are bad."""
        if len(steps) <= KEPT_STEPS:
            return
        bad = [step.line for step in steps if not _is_finite(step)]
        spared = set(bad[:KEPT_BAD])
        middle = []
        for index, step in enumerate(steps[1:-1]):
            if index % 2 or step.line in spared:
                middle.append(step)
        steps[1:-1] = middle
        lines = {step.line for step in steps}
        self.shown = {line: bar for line, bar in self.shown.items() if line in lines}

    def finish(self, lines: int) -> Log:
        """The whole log: now the total is known, and the steps of HF Trainer's dicts."""
        self._forget_ended_run()
        bars = [self.shown.get(step.line, ShownBar(0, 0)) for step in self.dicts]
        total = self.announced or self._find_total_beside_dict(bars) or self._find_total_alone()
        # with an announcement, a dict is a word of the training data
        if not self.steps and self.announced is None:
            shown_steps = [bar.done for bar in bars if bar.total == total]
            numbers = self._number_dicts(shown_steps, total)
            for step, step_number in zip(self.dicts, numbers, strict=True):
                self.steps.append(replace(step, step=step_number))
        last_bar = None
        if total is not None and total in self.bars:
            last_bar = (self.bars[total].done, self.bars[total].line)
        signals = self._list_kept(*self.kept)
        signals.sort(key=lambda signal: (signal.line, signal.name))
        return Log(
            path=self.path,
            lines=lines,
            signals=tuple(signals),
            steps=tuple(self.steps),
            numbered=self.numbered,
            arguments=self.arguments,
            argument_lines=self.argument_lines,
            blocks=tuple(self.blocks),
            total_steps=total,
            last_bar=last_bar,
            summed=self.over,
        )

    def _find_total_beside_dict(self, bars: Sequence[ShownBar]) -> int | None:
        """The total of training's bar: the last one beside a dict that is no evaluation's."""
        totals = [bar.total for bar in bars if bar.total]
        if not totals:
            return None
        last = totals[-1]
        counts = Counter(totals)
        if counts[last] > 1 or len(counts) == 1:
            return last
        dict_before = self.dicts[-2].line
        for signal in self._list_kept(*_STARTS):
            if signal.line > dict_before:
                # another training began in between
                return last
        return counts.most_common(1)[0][0]

    def _find_total_alone(self) -> int | None:
        """The steps if no dict stands beside a bar. A bar alone may be of anything."""
        planned = self._list_kept("planned")
        if planned:
            announced = int(planned[-1].fields["total"].replace(",", ""))
            if announced:
                return announced
        if not self._is_training():
            return self.rated
        begun = []
        for signal in self._list_kept("bar_begun"):
            total = int(signal.fields["total"])
            if total in self.bars:
                begun.append(total)
        # bars of the data are over before training begins, bars of its evaluations begin after it
        for total in begun:
            if self.bars[total].done < total:
                return total
        if begun:
            return max(begun)
        return next(iter(self.bars), self.rated)

    def _is_training(self) -> bool:
        if self.dicts or self.over or self.blocks:
            return True
        if self._list_kept("planned", "trainer", "saving", *_ENDS):
            return True
        return any(" train dataset" in signal.text for signal in self._list_kept("begun"))

    def _number_dicts(self, shown_steps: list[int], total: int | None) -> list[int]:
        """The optimizer step of each of HF Trainer's dicts, which do not name it.

        The bar redrawn beside the dict shows it, unless stdout was buffered and all dicts came in
        one heap: then the share of the epochs done tells, else the count.
        """
        if len(shown_steps) == len(self.dicts) and _is_rising(shown_steps):
            return shown_steps
        if total and self.final_epoch:
            numbers = self._number_by_epochs(total, self.final_epoch)
            if numbers is not None:
                return numbers
        last = 0
        if total is not None and total in self.bars:
            last = self.bars[total].done
        self.numbered = not self.dicts or last > 0
        interval = max(1, round(last / max(1, self.entries)))
        return [step.step * interval for step in self.dicts]

    def _number_by_epochs(self, total: int, final_epoch: float) -> list[int] | None:
        by_epoch = []
        for step in self.dicts:
            epoch = step.extra.get("epoch", 0.0)
            by_epoch.append(round(total * epoch / final_epoch))
        interval = 1
        if self.dicts:
            interval = max(1, round(by_epoch[-1] / self.dicts[-1].step))
        by_count = [interval * step.step for step in self.dicts]
        margin = total / final_epoch * _EPOCH_ERROR + 1
        if _are_close(by_count, by_epoch, margin):
            return by_count
        if _is_rising([0, *by_epoch]):
            return by_epoch
        return None


def _parse_shortened(raw: bytes) -> float | None:
    """A number as OLMo-core writes it: `4,357`, `2.00E-05`, `4.414B`."""
    word = decode_text(raw).replace(",", "")
    factor = 1.0
    if word[-1:] in olmo_core.SUFFIXES:
        factor = olmo_core.SUFFIXES[word[-1]]
        word = word[:-1]
    value = parse_number(word)
    if value is None:
        return None
    return value * factor


def _read_groups(match: re.Match[bytes], most: int) -> dict[str, str]:
    groups = {}
    for name, value in match.groupdict().items():
        if value is not None:
            groups[name] = decode_text(value[:most])
    return groups


def _is_finite(step: StepLine) -> bool:
    return math.isfinite(step.loss) and math.isfinite(step.extra.get("grad_norm", 0.0))


def _infer_product(*factors: str) -> int | None:
    """The whole number of which these are rounded factors, if only one is possible."""
    low = 1.0
    high = 1.0
    for factor in factors:
        value = parse_number(factor)
        decimals = len(factor.partition(".")[2])
        error = 0.5 * 0.1**decimals
        if value is None or not error < value < math.inf:
            return None
        low *= value - error
        high *= value + error
    if math.floor(high) != math.ceil(low):
        return None
    return math.floor(high)


def _are_close(left: Sequence[int], right: Sequence[int], margin: float) -> bool:
    return all(abs(a - b) <= margin for a, b in zip(left, right, strict=True))


def _is_rising(values: Sequence[int]) -> bool:
    return all(before < after for before, after in pairwise(values))
