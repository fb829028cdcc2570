"""What the data hold as the model gets them: rows dropped, labels masked, pairs that are equal, prompts doubled.

The rows of the first micro-batches are read one by one. Of all others only sums are taken on the device, which travel
with the numbers of their step: nothing waits for them.
"""

import difflib
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from .hooks import observed, wrap, wrap_known
from .process import ProbePiece, Process

LOOKS = 8  # micro-batches whose rows are read
ROWS = 64  # rows that are read at most
SEARCHED = 16  # pairs whose answers are searched for their prompt
PROMPT_TOKENS = 256  # of a prompt, counted from its end, that are searched for
ANSWER_TOKENS = 600  # of an answer, counted from its start, that are searched
TAIL = 3  # tokens that a template may put behind the end of a turn
IGNORED = -100
COUNTS = ("unlabelled", "equal_pairs", "full_rows")
"""Sums over all micro-batches: those without any label, pairs that are equal, rows of the maximal length."""

FOUND = (
    *("rows", "begun_twice", "ended", "endless", "cut"),
    *("pairs", "equal", "empty", "promptless", "searched", "prompt_twice"),
)
"""Counts over the rows that were read one by one."""

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
"""Tokens that end a turn in common chat templates, beside what the tokenizer and the model call their end."""


class TokenRow:
    """One row without its padding: its tokens, and where each label stands, those of the prompt left out."""

    def __init__(self, tokens: list[int], labels: list[int]) -> None:
        self.tokens = tokens
        self.trained = [place for place, label in enumerate(labels) if label != IGNORED]

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.trained[0]] if self.trained else self.tokens

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.trained[0] : self.trained[-1] + 1] if self.trained else []


class Data(ProbePiece):
    """Counts of what the rows hold; `ends` are the tokens that may end an answer, empty while none is known."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.begin_token: int | None = None
        self.ends: set[int] = set()
        self.max_length = self.settings.max_length
        self.batches = 0
        self.pairs = 0
        self.looks = 0
        self.rows_counted = 0
        self.sums = dict.fromkeys(COUNTS, 0)
        self.found = dict.fromkeys(FOUND, 0)
        self.reported: tuple[int, ...] = ()
        self.dropped: list[dict[str, Any]] | None = None
        self.reference_seen = False

    # -- the data set, before and after the trainer prepared it

    def watch_filters(self, module: types.ModuleType) -> None:
        def filtered(original: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(dataset, *args, **kwargs)
            if self.dropped is not None:
                with self.record.quietly("rows dropped"):
                    rows = len(dataset) - len(result)
                    self.dropped.append({"rows": rows, "while": str(kwargs.get("desc") or "filtering")})
            return result

        wrap(module.Dataset, "filter", filtered)

    def watch_preparation(self, module: types.ModuleType) -> None:
        """TRL's trainers: with packing the rows become packs, so the samples that a filter dropped are counted."""

        def prepare(original: Any, trainer: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            texts = [value for value in args if isinstance(value, str)]
            name = kwargs.get("dataset_name", texts[-1] if texts else "train")
            if name != "train":
                return original(trainer, dataset, *args, **kwargs)
            self.dropped = []
            try:
                result = original(trainer, dataset, *args, **kwargs)
            finally:
                dropped = self.dropped
                self.dropped = None
            with self.record.quietly("rows of the data set"):
                arguments = getattr(trainer, "args", None) or kwargs.get("args") or next(iter(args[1:]), None)
                self._know_length(getattr(arguments, "max_length", None))
                self.saw_tokenizer(getattr(trainer, "_tokenizer", None))
                packed = bool(kwargs.get("packing", getattr(arguments, "packing", False)))
                if hasattr(dataset, "__len__"):
                    given = len(dataset)
                    lost = sum(entry["rows"] for entry in dropped)
                    kept = given - lost if packed or not hasattr(result, "__len__") else len(result)
                    self.tell_rows(given, kept, dropped)
            return result

        for name in ("SFTTrainer", "DPOTrainer"):
            owner = getattr(module, name, None)
            if owner is not None:
                wrap_known(owner, ("_prepare_dataset",), prepare)

    def watch_transformation(self, module: types.ModuleType) -> None:
        """open-instruct's data set: its statistics count the rows before its filters."""

        def load(original: Any, cache: Any, dcs: Any, tc: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(cache, dcs, tc, *args, **kwargs)
            with self.record.quietly("rows of the data set"):
                self.saw_tokenizer(getattr(tc, "tokenizer", None))
                if isinstance(result, tuple) and hasattr(result[0], "__len__"):
                    parts = result[1].get("per_dataset_stats") or []
                    kept = len(result[0])
                    given = sum(part["initial_instances"] for part in parts) if parts else kept
                    lost = [{"rows": part["instances_filtered"], "while": "filtering"} for part in parts]
                    self.tell_rows(given, kept, lost)
            return result

        wrap(module.LocalDatasetTransformationCache, "load_or_transform_dataset", load)

    def tell_rows(self, given: int, kept: int, dropped: Iterable[dict[str, Any]]) -> None:
        losses = [entry for entry in dropped if entry["rows"]]
        self.record.write("data_rows", given=given, kept=kept, dropped=losses, max_length=self.max_length)

    def _know_length(self, limit: Any) -> None:
        if isinstance(limit, int) and limit > 0:
            self.max_length = limit

    def saw_tokenizer(self, tokenizer: Any) -> None:
        if tokenizer is None:
            return
        begin = getattr(tokenizer, "bos_token_id", None)
        self.begin_token = begin if isinstance(begin, int) else self.begin_token
        self._add_ends(getattr(tokenizer, "eos_token_id", None))
        known: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        self.ends |= {known[text] for text in TURN_ENDS if text in known}

    def saw_model(self, model: Any) -> None:
        for name in ("config", "generation_config"):
            self._add_ends(getattr(getattr(model, name, None), "eos_token_id", None))

    def _add_ends(self, ends: Any) -> None:
        several = ends if isinstance(ends, (list, tuple)) else [ends]
        self.ends |= {end for end in several if isinstance(end, int)}

    # -- the reference that DPO is given with its rows

    def watch_inputs(self, module: types.ModuleType) -> None:
        def prepared(inputs: Any, *_: Any, **__: Any) -> None:
            if self.reference_seen or not isinstance(inputs, dict):
                return
            self.reference_seen = True
            reference = inputs.get("ref_chosen_logps")
            if reference is None or self.process.testing:
                return
            kind = str(reference.dtype).removeprefix("torch.")
            size = float(reference.float().abs().mean())
            self.record.write("reference_precision", dtype=kind, mean=round(size, 2))

        wrap_known(module.Trainer, ("_prepare_inputs",), observed(self.record, after=prepared))

    def watch_pairs(self, module: types.ModuleType, tally: Any) -> None:
        """open-instruct's DPO hands the model no labels; the batch of pairs has them. `tally` gives the open step."""

        def forward(original: Any, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            with self.record.quietly("pairs"):
                if not self.process.testing and sys.modules["torch"].is_grad_enabled():
                    self.pair_batch(batch, tally())
            return original(model, batch, *args, **kwargs)

        wrap_known(module, ("concatenated_forward",), forward)

    # -- batches

    def batch(self, ids: Any, kwargs: dict[str, Any], tally: Any) -> None:
        """A micro-batch with labels. Of a pair trainer its first half is chosen, its second half rejected."""
        labels = kwargs.get("labels")
        if labels is None or ids.dim() != 2 or tuple(labels.shape) != tuple(ids.shape):
            return
        self._count(tally, [labels])
        mask = kwargs.get("attention_mask")
        places = kwargs.get("position_ids")
        paired = self.settings.pairs and int(ids.shape[0]) % 2 == 0
        whole = mask is not None and mask.dim() == 2
        if mask is not None and whole and self.max_length:
            self.rows_counted += int(ids.shape[0])
            tally.scalars.setdefault("full_rows", []).append((mask.sum(1) >= self.max_length).sum())
        if paired:
            half = int(ids.shape[0]) // 2
            self.pairs += half
            same = (ids[:half] == ids[half:]).all(1).sum()
            tally.scalars.setdefault("equal_pairs", []).append(same)
        if not self._looking():
            return
        samples = list(split(ids, labels, mask if whole else None, places))
        if paired:
            half = len(samples) // 2
            self._read_pairs(samples[:half], samples[half:])
        else:
            self._read(samples)

    def pair_batch(self, batch: dict[str, Any], tally: Any) -> None:
        """A micro-batch of pairs under open-instruct's names."""
        sides = []
        labels = []
        for branch in ("chosen", "rejected"):
            ids = batch[f"{branch}_input_ids"]
            labels.append(batch[f"{branch}_labels"])
            ends = batch.get(f"{branch}_cu_seq_lens_k")
            mask = batch.get(f"{branch}_attention_mask")
            sides.append((ids, labels[-1], mask, ends))
        self._count(tally, labels)
        chosen, rejected = sides[0][0], sides[1][0]
        packed = sides[0][3] is not None
        if not packed:
            self.pairs += int(chosen.shape[0])
            width = min(int(chosen.shape[1]), int(rejected.shape[1]))
            same = chosen[:, :width] == rejected[:, :width]
            equal = same.all(1)
            masks: list[Any] = [side[2] for side in sides]
            if all(mask is not None for mask in masks):
                equal = equal & (masks[0].sum(1) == masks[1].sum(1))
            tally.scalars.setdefault("equal_pairs", []).append(equal.sum())
        if self._looking():
            both = [list(split(ids, labels, mask, None, ends)) for ids, labels, mask, ends in sides]
            self._read_pairs(*both)

    def _count(self, tally: Any, labels: list[Any]) -> None:
        self.batches += 1
        labelled = sum((side != IGNORED).sum() for side in labels)
        tally.scalars.setdefault("unlabelled", []).append(labelled == 0)

    def counted(self, values: dict[str, list[float]]) -> None:
        for name in COUNTS:
            self.sums[name] += int(sum(values.get(name, ())))

    def _looking(self) -> bool:
        self.looks += 1
        return self.looks <= LOOKS and self.found["rows"] < ROWS

    def _read(self, samples: list[TokenRow]) -> None:
        for sample in samples[: ROWS - self.found["rows"]]:
            self.found["rows"] += 1
            begins = sample.tokens[:2]
            if self.begin_token is not None and begins == [self.begin_token] * 2:
                self.found["begun_twice"] += 1
            if not sample.trained or not self.ends:
                continue
            ended = not self.ends.isdisjoint(sample.answer[-TAIL:])
            full = self.max_length is not None and len(sample.tokens) >= self.max_length
            if ended:
                self.found["ended"] += 1
            elif full:
                # where no token is masked, a text may well have been divided into rows of this length
                self.found["cut"] += len(sample.trained) < len(sample.tokens)
            else:
                self.found["endless"] += 1

    def _read_pairs(self, chosen: list[TokenRow], rejected: list[TokenRow]) -> None:
        for first, second in zip(chosen, rejected, strict=False):
            self._read([first, second])
            self.found["pairs"] += 1
            self.found["equal"] += first.tokens == second.tokens
            self.found["empty"] += min(self._said(first), self._said(second)) == 0
            prompt = first.prompt
            self.found["promptless"] += len(prompt) <= 2
            if self.found["searched"] < SEARCHED and len(prompt) > 2:
                self.found["searched"] += 1
                self.found["prompt_twice"] += stands_in(prompt, first.answer)

    def _said(self, sample: TokenRow) -> int:
        """Tokens of the answer that do not merely end it."""
        return sum(token not in self.ends for token in sample.answer)

    def report(self) -> None:
        state = (self.batches, *self.sums.values())
        if not self.batches or state == self.reported:
            return
        self.reported = state
        first = {name: count for name, count in self.found.items() if count or name == "rows"}
        self.record.write(
            "data",
            micro_batches=self.batches,
            pairs=self.pairs or self.found["pairs"],
            rows=self.rows_counted,
            max_length=self.max_length,
            first=first,
            **{**self.sums, "equal_pairs": max(self.sums["equal_pairs"], self.found["equal"])},
        )


def split(ids: Any, labels: Any, mask: Any, places: Any, ends: Any = None) -> Iterator[TokenRow]:
    """The samples of a micro-batch, packed or padded."""
    rows = list(zip(ids.tolist(), labels.tolist(), strict=True))
    if ends is not None:
        marks = ends.tolist()
        tokens, targets = rows[0]
        for begin, end in itertools.pairwise(marks):
            yield TokenRow(tokens[begin:end], targets[begin:end])
        return
    if mask is not None:
        for (tokens, targets), kept in zip(rows, mask.tolist(), strict=True):
            real = [place for place, there in enumerate(kept) if there]
            yield TokenRow([tokens[place] for place in real], [targets[place] for place in real])
        return
    if places is None or tuple(places.shape) != tuple(ids.shape):
        for tokens, targets in rows:
            yield TokenRow(tokens, targets)
        return
    for (tokens, targets), positions in zip(rows, places.tolist(), strict=True):
        marks = [place for place, position in enumerate(positions) if position == 0]
        marks.append(len(positions))
        for begin, end in itertools.pairwise(marks):
            if end - begin > 1:  # behind the last sample every position is said to be the first
                yield TokenRow(tokens[begin:end], targets[begin:end])


def stands_in(prompt: list[int], answer: list[int]) -> bool:
    """Whether most of a prompt stands at the beginning of its answer once more."""
    asked = prompt[-PROMPT_TOKENS:]
    said = answer[: min(ANSWER_TOKENS, 2 * len(asked) + 32)]
    matcher = difflib.SequenceMatcher(None, asked, said, autojunk=False)
    common = matcher.find_longest_match(0, len(asked), 0, len(said)).size
    return common >= 6 and common * 2 >= len(asked)
