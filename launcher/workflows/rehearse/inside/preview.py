"""Rows as the model gets them, after the trainer's own preparation and collator."""

import contextlib
import copy
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from . import shrink
from .records import (
    PreviewContent,
    RowCounts,
    ServerRequest,
    ServerResponse,
    ShownRow,
    TemplateFacts,
)
from .sampling import ROW, Absent, SampledRows
from .sections import Renderer, Strand, split_strands

_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")


class Preparation(Protocol):
    """Prepares rows as they are trained on; not `limited`, whatever their length.

    Then no row is left out either, as far as the trainer can do without.
    """

    def __call__(self, rows: Any, /, *, limited: bool) -> Any: ...


class Collation(Protocol):
    """Makes the trainer's batch of one prepared row; not `limited`, whatever its length."""

    def __call__(self, row: Any, /, *, limited: bool) -> Any: ...


class Finished(BaseException):
    """Ends the trainer's script, whose handlers of errors must not catch it."""


@contextlib.contextmanager
def until_finished(response: ServerResponse) -> Iterator[None]:
    try:
        yield
    except Absent as absent:
        response.absent = (absent.kind, absent.name)
    except Finished:
        pass


def prepare_model_folder(request: ServerRequest, response: ServerResponse, name: str) -> str:
    """A folder with a model's tokenizer and a config. Raises Absent without a tokenizer."""
    source = shrink.find_source_folder(name, request.revision)
    if source is None or not holds_tokenizer(source):
        raise Absent("tokenizer", name)
    if os.path.isfile(os.path.join(source, "config.json")):
        return source
    from transformers.models.auto import modeling_auto

    os.makedirs(request.out)
    shrink.copy_small_files(source, request.out)
    config = shrink.make_config(request.shape)
    config.architectures = [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(request.out)
    response.notes.append(("config", name))
    return request.out


def holds_tokenizer(folder: str) -> bool:
    for name in os.listdir(folder):
        if name.startswith(_TOKENIZER_FILES) or name.endswith(".tiktoken"):
            return True
    return False


def group_by_number(prepared: Iterable[Any]) -> dict[int, list[Any]]:
    """Prepared rows by the number of the row that they come from; a mixture may repeat one."""
    listed: dict[int, list[Any]] = {}
    for row in prepared:
        listed.setdefault(int(row[ROW]), []).append(row)
    return listed


@dataclass
class PreparedSet:
    """The rows of one data set as they are looked at.

    `selected` are those that the trainer prepares, `loaded` those that a request may name. `packs`
    says that prepared rows are no longer those of the file.
    """

    selected: Any
    loaded: Any
    prepare: Preparation
    collate: Collation
    tokenizer: Any
    limit: int | None
    packs: bool = False

    def whole_strands(self, row: Any) -> list[Strand]:
        return split_strands(self.collate(row, limited=False))

    def kept_strands(self, row: Any) -> list[Strand]:
        return split_strands(self.collate(row, limited=True))

    def count(self) -> RowCounts:
        """What becomes of the selected rows, in numbers. Raises what the trainer raises."""
        numbers = list(self.selected[ROW])
        uncut = group_by_number(self.prepare(self.selected, limited=False))
        lengths = {}
        for number, listed in uncut.items():
            lengths[number] = longest_length(self.whole_strands(listed[0]))
        prepared = self.prepare(self.selected, limited=True)
        counts = RowCounts(looked_at=len(numbers), sequences=len(prepared))
        counts.lengths = [lengths[number] for number in numbers if number in lengths]
        for row in prepared:
            for strand in self.kept_strands(row):
                counts.tokens += len(strand.ids)
                counts.trained += sum(strand.trained)
        if self.packs:
            # other strategies go on in a further sequence
            if counts.tokens < sum(counts.lengths):
                counts.cut = sum(length > (self.limit or 0) for length in counts.lengths)
            return counts
        kept = group_by_number(prepared)
        for number in numbers:
            if number in kept:
                left = longest_length(self.kept_strands(kept[number][0]))
                counts.cut += left < lengths.get(number, 0)
            elif self.has_trained(uncut.get(number)):
                counts.dropped.too_long += 1
            else:
                counts.dropped.untrained += 1
        return counts

    def has_trained(self, listed: list[Any] | None) -> bool:
        """Whether each sequence of a row has a token that counts, as long as nothing is cut."""
        if not listed:
            return False
        return all(any(strand.trained) for strand in self.whole_strands(listed[0]))

    def first_refused(self) -> int | None:
        """The number of the first selected row without which the rows before it are not refused."""
        low = 0
        high = len(self.selected)
        while high - low > 1:
            middle = (low + high) // 2
            if self.refuses(range(low, middle)):
                high = middle
            elif self.refuses(range(middle, high)):
                low = middle
            else:
                return None
        return int(self.selected[low][ROW])

    def refuses(self, places: range) -> bool:
        # what the first row is like decides how the trainer reads all of them
        numbers = list(dict.fromkeys([0, *places]))
        try:
            self.prepare(self.selected.select(numbers), limited=True)
        except Exception:
            return True
        return False

    def show(self, number: int) -> list[ShownRow]:
        """One row as it is trained on, piece by piece; none where it was not loaded."""
        numbers = list(self.loaded[ROW])
        if number not in numbers:
            return []
        place = numbers.index(number)
        alone = self.loaded.select([place])
        beside = alone if place == 0 else self.loaded.select([0, place])
        row = ShownRow(row=number, taken=number in self.selected[ROW])
        uncut = group_by_number(self.prepare(beside, limited=False)).get(number)
        whole = self.whole_strands(uncut[0]) if uncut else []
        if self.packs:
            # alone, or packing would put it into one sequence with another row
            kept = list(self.prepare(alone, limited=True))
        else:
            kept = group_by_number(self.prepare(beside, limited=True)).get(number, [])
        if kept:
            row.sequences = len(kept)
            parts = [self.kept_strands(part) for part in kept]
            remaining = join_strands(parts)
            self.describe(row, whole or remaining, remaining)
            if row.cut:
                row.status = "cut"
            return [row]
        row.status = "dropped"
        row.reason = "too_long" if self.has_trained(uncut) else "untrained"
        if whole:
            within = [strand.first(self.limit or 0) for strand in whole]
            self.describe(row, whole, within)
        return [row]

    def describe(self, row: ShownRow, whole: list[Strand], kept: list[Strand]) -> None:
        """Fill in a row's counts and its text, by its sequences before and after they are cut.

        A pair has two: chosen and rejected.
        """
        row.tokens = count_tokens(kept)
        row.trained = sum(sum(strand.trained) for strand in kept)
        row.cut = count_tokens(whole) - row.tokens
        renderer = Renderer(self.tokenizer)
        if len(whole) == 2:
            row.sections, row.difference = renderer.render_pair(whole, kept)
        else:
            row.sections = renderer.render_sequence(whole[0], kept[0])


def count_tokens(strands: list[Strand]) -> int:
    return sum(len(strand.ids) for strand in strands)


def longest_length(strands: list[Strand]) -> int:
    return max(len(strand.ids) for strand in strands)


def join_strands(parts: list[list[Strand]]) -> list[Strand]:
    """The sequences that one row was split into, as one again."""
    whole = copy.deepcopy(parts[0])
    for part in parts[1:]:
        for strand, addition in zip(whole, part, strict=True):
            strand.ids += addition.ids
            strand.trained += addition.trained
    return whole


def finish(
    views: list[PreparedSet], loader: SampledRows, request: ServerRequest, template: TemplateFacts
) -> None:
    """Write the rows to `request.result` and end the script.

    Raises Finished, or what the trainer raises for the first row that it refuses.
    """
    faults: list[tuple[Exception, int | None]] = []
    counts = []
    rows = []
    for view in views:
        try:
            counts.append(view.count())
        except Exception as error:
            faults.append((error, view.first_refused()))
    for number in choose_numbers(views, request):
        for view in views:
            try:
                rows += view.show(number)
            except Exception as error:
                faults.append((error, number))
    refused = [number for _, number in faults if number is not None]
    content = PreviewContent(
        template=template,
        counts=None if faults else add_up(counts, loader),
        refused=refused[0] if refused else None,
        rows=rows,
        limit=views[0].limit,
        packs=views[0].packs,
        total=loader.total(),
    )
    with open(request.result, "w", encoding="utf-8") as file:
        json.dump(asdict(content), file)
    raise faults[0][0] if faults else Finished


def choose_numbers(views: list[PreparedSet], request: ServerRequest) -> Sequence[int]:
    """The rows that the request names, or the first ones that are trained on."""
    if request.numbers:
        return request.numbers
    numbers: dict[int, None] = {}
    for view in views:
        numbers.update(dict.fromkeys(sorted(view.selected[ROW])))
    return list(numbers)[: request.first]


def add_up(counts: list[RowCounts], loader: SampledRows) -> RowCounts:
    whole = RowCounts(total=loader.total(), sampled=loader.is_sampled())
    for part in counts:
        whole.looked_at += part.looked_at
        whole.cut += part.cut
        whole.dropped.too_long += part.dropped.too_long
        whole.dropped.untrained += part.dropped.untrained
        whole.tokens += part.tokens
        whole.trained += part.trained
        whole.sequences += part.sequences
        whole.lengths += part.lengths
    return whole
