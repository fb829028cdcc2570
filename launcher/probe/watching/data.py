"""What the data hold as the model gets them: masked labels, equal pairs, doubled prompts.

The rows of the first micro-batches are read one by one. Of all others only sums are taken, on the
device; they travel with the numbers of their step.
"""

import collections
import difflib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .hooks import Call, react, wrap, wrap_if_present
from .packing import UNLABELLED, TokenBatch, find_starts, take_side
from .process import Module, ProbePiece, Process, Tensor

LOOKS = 8  # micro-batches whose rows are read
ROWS = 64  # rows that are read at most
SEARCHED = 16  # pairs whose answers are searched for their prompt
PROMPT_TOKENS = 256  # of a prompt, counted from its end, that are searched for
ANSWER_TOKENS = 600  # of an answer, counted from its start, that are searched
TAIL = 3  # tokens that a template may put behind the end of a turn
SUMS = ("unlabelled", "equal_pairs", "full_rows")
"""Micro-batches without any label, pairs that are equal, rows of the maximal length."""

TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|return|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "</s>",
    "[/INST]",
)
"""Tokens that end a turn in common chat templates, whatever tokenizer and model declare."""


@dataclass(frozen=True, slots=True)
class FilteredRows:
    """How many rows a filter of the data set has left out, and what it says of itself."""

    rows: int
    purpose: str


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row without its padding, and the places of its tokens that have a label."""

    tokens: list[int]
    trained: list[int]

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.trained[0]] if self.trained else self.tokens

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.trained[0] : self.trained[-1] + 1] if self.trained else []


def read_row(tokens: list[int], labels: list[int]) -> TokenRow:
    trained = [place for place, label in enumerate(labels) if label != UNLABELLED]
    return TokenRow(tokens, trained)


class Data(ProbePiece):
    """Counts of what the rows hold.

    `ends` are the tokens that may end an answer. `first` counts the rows that were read one by one.
    """

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.begin_token: int | None = None
        self.ends: set[int] = set()
        self.max_length = self.settings.max_length
        self.batches = 0
        self.pairs = 0
        self.looks = 0
        self.rows = 0
        self.sums = dict.fromkeys(SUMS, 0)
        self.first: collections.Counter[str] = collections.Counter(rows=0)
        self.reported: tuple[int, ...] = ()
        self.filtered: list[FilteredRows] | None = None
        self.reference_seen = False

    # -- the data set, before and after the trainer prepared it

    def watch_filters(self, module: ModuleType) -> None:
        def note(call: Call) -> None:
            if self.filtered is not None:
                rows = len(call.owner) - len(call.result)
                purpose = str(call.kwargs.get("desc") or "filtering")
                self.filtered.append(FilteredRows(rows, purpose))

        wrap(module.Dataset, "filter", react(self.record, after=note))

    def watch_preparation(self, module: ModuleType) -> None:
        """TRL's trainers, which filter the rows and may then pack them."""

        def prepare(original: Any, trainer: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            texts = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
            # the last one is the name of the data set
            if texts and texts[-1] != "train":
                return original(trainer, dataset, *args, **kwargs)
            filtered: list[FilteredRows] = []
            self.filtered = filtered
            try:
                result = original(trainer, dataset, *args, **kwargs)
            finally:
                self.filtered = None
            with self.record.quietly("rows of the data set"):
                # the trainer has no arguments yet: they are passed behind the tokenizer
                arguments = getattr(trainer, "args", None) or args[1]
                self.saw_tokenizer(getattr(trainer, "_tokenizer", None))
                self._tell_prepared_rows(arguments, dataset, result, filtered)
            return result

        for name in ("SFTTrainer", "DPOTrainer"):
            owner = getattr(module, name, None)
            if owner is not None:
                wrap_if_present(owner, "_prepare_dataset", prepare)

    def _tell_prepared_rows(
        self, arguments: Any, dataset: Any, result: Any, filtered: list[FilteredRows]
    ) -> None:
        limit = getattr(arguments, "max_length", None)
        if isinstance(limit, int) and limit > 0:
            self.max_length = limit
        if not hasattr(dataset, "__len__"):
            return
        before = len(dataset)
        after = before - sum(loss.rows for loss in filtered)
        # packs are no rows
        if hasattr(result, "__len__") and not getattr(arguments, "packing", False):
            after = len(result)
        self.tell_rows(before, after, filtered)

    def watch_transformation(self, module: ModuleType) -> None:
        """open-instruct's data set: its statistics count the rows before its filters."""

        def loaded(call: Call) -> None:
            self.saw_tokenizer(getattr(call.argument(2, "tc"), "tokenizer", None))
            if not isinstance(call.result, tuple) or not hasattr(call.result[0], "__len__"):
                return
            rows, statistics = call.result
            before = 0
            filtered = []
            for part in statistics.get("per_dataset_stats") or []:
                before += part["initial_instances"]
                filtered.append(FilteredRows(part["instances_filtered"], "filtering"))
            after = len(rows)
            self.tell_rows(before if filtered else after, after, filtered)

        owner = module.LocalDatasetTransformationCache
        wrap(owner, "load_or_transform_dataset", react(self.record, after=loaded))

    def tell_rows(self, before: int, after: int, filtered: list[FilteredRows]) -> None:
        dropped = []
        for loss in filtered:
            if loss.rows:
                dropped.append({"rows": loss.rows, "while": loss.purpose})
        self.record.write(
            "data_rows", given=before, kept=after, dropped=dropped, max_length=self.max_length
        )

    def saw_tokenizer(self, tokenizer: Any) -> None:
        if tokenizer is None:
            return
        begin = getattr(tokenizer, "bos_token_id", None)
        if isinstance(begin, int):
            self.begin_token = begin
        self._add_ends(getattr(tokenizer, "eos_token_id", None))
        vocabulary: Any = getattr(tokenizer, "get_added_vocab", dict)()
        self._add_ends([vocabulary.get(text) for text in TURN_ENDS])

    def saw_model(self, model: Module) -> None:
        for name in ("config", "generation_config"):
            config = getattr(model, name, None)
            self._add_ends(getattr(config, "eos_token_id", None))

    def _add_ends(self, ends: Any) -> None:
        if not isinstance(ends, (list, tuple)):
            ends = [ends]
        self.ends.update(end for end in ends if isinstance(end, int))

    # -- the reference that DPO gets with its rows

    def watch_inputs(self, module: ModuleType) -> None:
        def prepared(call: Call) -> None:
            if self.reference_seen or not isinstance(call.result, dict):
                return
            self.reference_seen = True
            reference = call.result.get("ref_chosen_logps")
            if reference is None or self.process.testing:
                return
            kind = str(reference.dtype).removeprefix("torch.")
            size = float(reference.float().abs().mean())
            self.record.write("reference_precision", dtype=kind, mean=round(size, 2))

        watch = react(self.record, after=prepared)
        wrap_if_present(module.Trainer, "_prepare_inputs", watch)

    def watch_pairs(self, module: ModuleType, open_tally: Callable[[], Any]) -> None:
        """open-instruct's DPO: the labels are in its batch of pairs, and not given to the model."""

        def forward(call: Call) -> None:
            if not self.process.testing and sys.modules["torch"].is_grad_enabled():
                pairs = call.argument(1, "batch")
                chosen = take_side(pairs, "chosen")
                rejected = take_side(pairs, "rejected")
                self.count_pairs(chosen, rejected, open_tally())

        wrap_if_present(module, "concatenated_forward", react(self.record, before=forward))

    # -- batches

    def count_batch(self, batch: TokenBatch, tally: Any) -> None:
        """A micro-batch with labels; of pairs it has the chosen rows, then the rejected ones."""
        if batch.labels is None:
            return
        self._count_batch(_count_labels(batch), tally)
        if batch.padding is not None and self.max_length:
            self.rows += batch.rows
            full = batch.padding.sum(1) >= self.max_length
            tally.scalars["full_rows"].append(full.sum())
        half = batch.rows // 2
        is_paired = self.settings.pairs and batch.rows % 2 == 0
        if is_paired:
            self.pairs += half
            equal = (batch.ids[:half] == batch.ids[half:]).all(1)
            tally.scalars["equal_pairs"].append(equal.sum())
        if not self._is_next_read():
            return
        samples = list(split_samples(batch))
        if is_paired:
            half = len(samples) // 2
            self._read_pairs(samples[:half], samples[half:])
        else:
            self._read_samples(samples)

    def count_pairs(self, chosen: TokenBatch, rejected: TokenBatch, tally: Any) -> None:
        """A micro-batch of open-instruct's pairs."""
        labels = _count_labels(chosen) + _count_labels(rejected)
        self._count_batch(labels, tally)
        if chosen.ends is None:
            self.pairs += chosen.rows
            equal = _compare_pairs(chosen, rejected)
            tally.scalars["equal_pairs"].append(equal.sum())
        if self._is_next_read():
            self._read_pairs(list(split_samples(chosen)), list(split_samples(rejected)))

    def _count_batch(self, labelled: Tensor, tally: Any) -> None:
        self.batches += 1
        tally.scalars["unlabelled"].append(labelled == 0)

    def add_sums(self, values: dict[str, list[float]]) -> None:
        for name in SUMS:
            self.sums[name] += int(sum(values.get(name, ())))

    def _is_next_read(self) -> bool:
        """Whether the rows of this micro-batch are read one by one."""
        self.looks += 1
        return self.looks <= LOOKS and self.first["rows"] < ROWS

    def _read_samples(self, samples: list[TokenRow]) -> None:
        for sample in samples[: ROWS - self.first["rows"]]:
            self.first["rows"] += 1
            if self.begin_token is not None and sample.tokens[:2] == [self.begin_token] * 2:
                self.first["begun_twice"] += 1
            if sample.trained and self.ends:
                self._read_end(sample)

    def _read_end(self, sample: TokenRow) -> None:
        if not self.ends.isdisjoint(sample.answer[-TAIL:]):
            self.first["ended"] += 1
        elif self.max_length is None or len(sample.tokens) < self.max_length:
            self.first["endless"] += 1
        elif len(sample.trained) < len(sample.tokens):
            # where no token is masked, a text may well have been divided into rows of this length
            self.first["cut"] += 1

    def _read_pairs(self, chosen: list[TokenRow], rejected: list[TokenRow]) -> None:
        for first, second in zip(chosen, rejected, strict=False):
            self._read_samples([first, second])
            self.first["pairs"] += 1
            self.first["equal"] += first.tokens == second.tokens
            self.first["empty"] += self._is_empty(first) or self._is_empty(second)
            prompt = first.prompt
            if len(prompt) <= 2:
                self.first["promptless"] += 1
            elif self.first["searched"] < SEARCHED:
                self.first["searched"] += 1
                self.first["prompt_twice"] += is_repeated(prompt, first.answer)

    def _is_empty(self, sample: TokenRow) -> bool:
        """Whether the answer holds nothing but its end."""
        return all(token in self.ends for token in sample.answer)

    def report(self) -> None:
        state = (self.batches, *self.sums.values())
        if not self.batches or state == self.reported:
            return
        self.reported = state
        first = {name: count for name, count in self.first.items() if count or name == "rows"}
        sums = {**self.sums, "equal_pairs": max(self.sums["equal_pairs"], self.first["equal"])}
        self.record.write(
            "data",
            micro_batches=self.batches,
            pairs=self.pairs or self.first["pairs"],
            rows=self.rows,
            max_length=self.max_length,
            first=first,
            **sums,
        )


def _compare_pairs(chosen: TokenBatch, rejected: TokenBatch) -> Tensor:
    """Whether the two answers of each pair are the same, on the device."""
    width = min(int(chosen.ids.shape[1]), int(rejected.ids.shape[1]))
    same = chosen.ids[:, :width] == rejected.ids[:, :width]
    equal = same.all(1)
    if chosen.mask is not None and rejected.mask is not None:
        same_length = chosen.mask.sum(1) == rejected.mask.sum(1)
        equal = equal & same_length
    return equal


def _count_labels(batch: TokenBatch) -> Tensor:
    """How many labels there are, on the device."""
    return (batch.labels != UNLABELLED).sum()


def split_samples(batch: TokenBatch) -> Iterator[TokenRow]:
    """The samples of a micro-batch with labels, packed or padded."""
    ids = batch.ids.tolist()
    labels = batch.labels.tolist()
    if batch.ends is not None:
        yield from _cut_row(ids[0], labels[0], batch.ends.tolist())
    elif batch.padding is not None:
        for row, kept in enumerate(batch.padding.tolist()):
            tokens = itertools.compress(ids[row], kept)
            targets = itertools.compress(labels[row], kept)
            yield read_row(list(tokens), list(targets))
    elif batch.positions is not None:
        for row, positions in enumerate(batch.positions.tolist()):
            starts = find_starts(positions)
            for sample in _cut_row(ids[row], labels[row], starts):
                # padding behind the last sample has position 0 throughout
                if len(sample.tokens) >= 2:
                    yield sample
    else:
        yield from map(read_row, ids, labels)


def _cut_row(tokens: list[int], labels: list[int], ends: list[int]) -> Iterator[TokenRow]:
    """The samples of a packed row."""
    for begin, end in itertools.pairwise(ends):
        yield read_row(tokens[begin:end], labels[begin:end])


def is_repeated(prompt: list[int], answer: list[int]) -> bool:
    """Whether most of a prompt stands at the beginning of its answer once more."""
    asked = prompt[-PROMPT_TOKENS:]
    said = answer[: min(ANSWER_TOKENS, 2 * len(asked) + 32)]
    matcher = difflib.SequenceMatcher(None, asked, said, autojunk=False)
    common = matcher.find_longest_match(0, len(asked), 0, len(said)).size
    return common >= 6 and common * 2 >= len(asked)
