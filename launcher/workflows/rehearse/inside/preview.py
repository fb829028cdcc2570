"""Rows as the model gets them: what the trainer's own preparation and collator make of some of them."""

import copy
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import rows, shrink
from .calls import call_trainer

ROW = "launch_row"
"""A column that holds the number of a row among all rows of the stage's data, from 0."""
MOST_ROWS = 4000
MOST_BYTES = 24 << 20
"""Of how many rows, and of how much of the files, the counts are made; of more, evenly spread rows are taken."""
UNKNOWN_SIZE = 1000
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")
Prepare = Callable[[Any, bool], Any]
"""Prepares rows as the trainer does: as they are trained on, or (False) without a limit on their length.

Then no row is left out either, as far as the trainer can do without.
"""
Collate = Callable[[dict[str, Any], bool], dict[str, Any]]
"""The batch of one prepared row, as the trainer's collator makes it; False for one without a limit."""


class Absent(Exception):
    """Something that is not on this machine: `data` or `tokenizer`, and its name."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name}")
        self.kind = kind
        self.name = name


class Finished(BaseException):
    """Ends the trainer's script once its rows have been looked at; no handler of errors may catch it."""


@dataclass
class Strand:
    """One sequence of a row: its token ids, and which of them count in the loss."""

    name: str
    ids: list[int]
    trained: list[bool]


@dataclass
class LoadedSet:
    """One data set, or the part of it that is looked at: the number of its first row, and of its rows."""

    rows: Any
    first: int
    total: int | None


@dataclass
class Loader:
    """Stands in for `load_dataset`: loads some rows of each set and gives each its number in `ROW`."""

    request: dict[str, Any]
    sets: list[LoadedSet] = field(default_factory=list)

    def replace(self, real: Callable[..., Any]) -> Callable[..., Any]:
        import datasets

        absent = (ConnectionError, datasets.exceptions.DatasetNotFoundError)

        def load_pieces(mixed: dict[str, Any], kwargs: dict[str, Any]) -> Any:
            parts = []
            for split, start, stop in mixed["pieces"]:
                stream = call_trainer(real, **{**kwargs, "split": split, "streaming": True})
                parts.append(self.take_some(stream.skip(start).take(stop - start), Size(stop - start, mixed["bytes"])))
            return datasets.concatenate_datasets([part for part in parts if len(part)] or parts)

        def load(path: Any, *args: Any, **kwargs: Any) -> Any:
            mixed = rows.set_of_mixture(self.request, {"path": path, **kwargs})
            if mixed is not None:
                return load_pieces(mixed, {"path": path, **kwargs})
            local = rows.is_local(path)
            # a stream cannot be sliced
            if local and "[" not in str(kwargs.get("split")):
                kwargs.pop("num_proc", None)
                kwargs["streaming"] = True
            try:
                loaded = call_trainer(real, path, *args, **kwargs)
            except absent:
                if local or not rows.is_hub_name(path):
                    raise
                raise Absent("data", str(path)) from None
            name = str(kwargs.get("data_files") or path)
            if not isinstance(loaded, dict):
                return self.take(loaded, name)
            split = self.request["split"]
            taken = {}
            for key, value in loaded.items():
                taken[key] = self.take(value, name) if key == split else value
            return datasets.DatasetDict(taken)

        return load

    def take(self, loaded: Any, name: str) -> Any:
        """The rows of a set that are looked at: some that are evenly spread, and those of the request."""
        return self.take_some(loaded, Size(*self.request["sizes"].get(name, (None, None))))

    def take_some(self, loaded: Any, size: "Size") -> Any:
        if hasattr(loaded, "__len__"):
            size = Size(len(loaded), loaded.data.nbytes)
        offset = self.offset()
        named = {number - offset for number in self.request["numbers"] if number >= offset}
        if hasattr(loaded, "select"):
            numbers = [number for number in range(len(loaded)) if size.takes(number) or number in named]
            taken = loaded.select(numbers)
        else:
            numbers, taken, ended = read_some(loaded, size, named)
            if ended is not None:
                size = Size(ended, size.bytes)
        taken = taken.add_column(ROW, [offset + number for number in numbers])
        self.sets.append(LoadedSet(taken, offset, size.total))
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
        return last.first + (len(last.rows) if last.total is None else last.total)


@dataclass(frozen=True)
class Size:
    """How many rows a set has, and how many bytes; None where that is unknown."""

    total: int | None
    bytes: int | None

    @property
    def most(self) -> int:
        """How many rows of it are looked at."""
        if not self.total or self.bytes is None:
            return UNKNOWN_SIZE
        mean = max(1.0, self.bytes / self.total)
        return max(50, min(MOST_ROWS, int(MOST_BYTES / mean)))

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


def read_some(stream: Any, size: Size, named: set[int]) -> tuple[list[int], Any, int | None]:
    """Some rows of a stream, and their numbers; how many rows it has, if it was read to its end."""
    import datasets

    last = max([size.last, *named])
    numbers = []
    kept = []
    ended = None
    iterator = iter(stream)
    number = 0
    # one more row: without it the stream is known to end here
    while number <= last + 1:
        try:
            row = call_trainer(next, iterator)
        except StopIteration:
            ended = number
            break
        if size.takes(number) or number in named:
            numbers.append(number)
            kept.append(row)
        number += 1
    taken = datasets.Dataset.from_list(kept, features=None if kept else stream.features)
    return numbers, taken, ended


def model_folder(request: dict[str, Any], report: dict[str, Any], name: str) -> str:
    """A folder with the tokenizer of a model and a config; raises Absent where no tokenizer is here."""
    source = shrink.source_folder(name, request.get("revision"))
    if source is None or not holds_tokenizer(source):
        raise Absent("tokenizer", name)
    if os.path.isfile(os.path.join(source, "config.json")):
        return source
    import transformers
    from transformers.models.auto import modeling_auto

    out = request["out"]
    os.makedirs(out)
    shrink.copy_small_files(source, out)
    shape = dict(request["shape"])
    config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    config.architectures = [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(out)
    report["notes"].append(["config", name])
    return str(out)


def holds_tokenizer(folder: str) -> bool:
    names = os.listdir(folder)
    return any(name.startswith(_TOKENIZER_FILES) or name.endswith(".tiktoken") for name in names)


def strands(batch: dict[str, Any]) -> list[Strand]:
    """The sequences of a batch of one row, without padding."""
    if "chosen_input_ids" in batch:
        return [strand(batch, name, prefix=f"{name}_") for name in ("chosen", "rejected")]
    if "completion_mask" in batch:
        pair = []
        for place, name in enumerate(("chosen", "rejected")):
            count = int(batch["attention_mask"][place].sum())
            ids = batch["input_ids"][place][:count].tolist()
            trained = [bool(bit) for bit in batch["completion_mask"][place][:count].tolist()]
            pair.append(Strand(name, ids, trained))
        return pair
    return [strand(batch, "text")]


def strand(batch: dict[str, Any], name: str, prefix: str = "") -> Strand:
    ids = batch[f"{prefix}input_ids"][0]
    labels = batch[f"{prefix}labels"][0]
    attended = batch.get(f"{prefix}attention_mask")
    lengths = batch.get(f"{prefix}cu_seq_lens_q")
    if attended is not None:
        present = attended[0].bool()
        ids = ids[present]
        labels = labels[present]
    elif lengths is not None:
        # a collator that flattens may pad up to a fixed length
        ids = ids[: int(lengths[-1])]
        labels = labels[: int(lengths[-1])]
    return Strand(name, ids.tolist(), [label != -100 for label in labels.tolist()])


def by_number(prepared: Any) -> dict[int, list[dict[str, Any]]]:
    """Prepared rows by the number of the row that they come from; a mixture may repeat one."""
    listed: dict[int, list[dict[str, Any]]] = {}
    for row in prepared:
        listed.setdefault(row[ROW], []).append(row)
    return listed


@dataclass
class PreparedSet:
    """The rows of one data set as they are looked at.

    `selected` are those that the trainer prepares, `loaded` those that a request may name. `packs` says that
    prepared rows are no longer those of the file.
    """

    selected: Any
    loaded: Any
    prepare: Prepare
    collate: Collate
    tokenizer: Any
    limit: int | None
    packs: bool = False

    def count(self) -> dict[str, Any]:
        """What becomes of the selected rows, in numbers. Raises what the trainer raises."""
        uncut = by_number(self.prepare(self.selected, False))
        numbers = self.selected[ROW]
        lengths = {number: self.longest(listed[0]) for number, listed in uncut.items()}
        prepared = self.prepare(self.selected, True)
        counts: dict[str, Any] = {
            "rows": len(numbers),
            "lengths": [lengths[number] for number in numbers if number in lengths],
            "tokens": 0,
            "trained": 0,
            "sequences": len(prepared),
        }
        for row in prepared:
            for part in strands(self.collate(row, True)):
                counts["tokens"] += len(part.ids)
                counts["trained"] += sum(part.trained)
        if self.packs:
            is_cut = counts["tokens"] < sum(counts["lengths"])
            over = sum(lengths[number] > (self.limit or 0) for number in numbers)
            # other strategies go on in a further sequence
            return {**counts, "cut": over if is_cut else 0, "too_long": 0, "untrained": 0}
        kept = by_number(prepared)
        cut = 0
        too_long = 0
        untrained = 0
        for number in numbers:
            if number in kept:
                cut += self.longest(kept[number][0], limited=True) < lengths.get(number, 0)
            elif self.has_trained(uncut.get(number)):
                too_long += 1
            else:
                untrained += 1
        return {**counts, "cut": cut, "too_long": too_long, "untrained": untrained}

    def has_trained(self, listed: list[dict[str, Any]] | None) -> bool:
        """Whether each sequence of a row has a token that counts, as long as nothing is cut."""
        if not listed:
            return False
        return all(any(part.trained) for part in strands(self.collate(listed[0], False)))

    def longest(self, row: dict[str, Any], *, limited: bool = False) -> int:
        return max(len(part.ids) for part in strands(self.collate(row, limited)))

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
            self.prepare(self.selected.select(numbers), True)
        except Exception:
            return True
        return False

    def row(self, number: int) -> dict[str, Any] | None:
        """One row as it is trained on, piece by piece; None where it was not loaded."""
        numbers = self.loaded[ROW]
        if number not in numbers:
            return None
        place = numbers.index(number)
        shown = self.loaded.select([place])
        beside = shown if place == 0 else self.loaded.select([0, place])
        uncut = by_number(self.prepare(beside, False)).get(number)
        kept = self.kept(number, shown, beside)
        taken = number in self.selected[ROW]
        about = {"number": number, "taken": taken, "status": "kept", "reason": None, "sequences": []}
        about |= {"tokens": 0, "trained": 0, "cut": 0}
        if uncut is None and not kept:
            return {**about, "status": "dropped", "reason": "untrained"}
        whole = strands(self.collate(uncut[0], False)) if uncut else []
        if not kept:
            limit = self.limit or 0
            remaining = [Strand(part.name, part.ids[:limit], part.trained[:limit]) for part in whole]
            reason = "too_long" if self.has_trained(uncut) else "untrained"
            return {**about, "status": "dropped", "reason": reason, **self.described(whole, remaining)}
        remaining = joined([strands(self.collate(row, True)) for row in kept])
        described = self.described(whole or remaining, remaining)
        if described["cut"]:
            about["status"] = "cut"
        return {**about, **described, "parts": len(kept)}

    def kept(self, number: int, shown: Any, beside: Any) -> list[dict[str, Any]]:
        """What is left of a row: one prepared row, none where it is dropped, several where packing splits it."""
        if self.packs:
            # alone, or packing would put it into one sequence with another row
            return list(self.prepare(shown, True))
        return by_number(self.prepare(beside, True)).get(number, [])

    def described(self, whole: list[Strand], remaining: list[Strand]) -> dict[str, Any]:
        tokens = sum(len(part.ids) for part in remaining)
        about = {
            "tokens": tokens,
            "trained": sum(sum(part.trained) for part in remaining),
            "cut": sum(len(part.ids) for part in whole) - tokens,
        }
        if len(whole) == 2:
            return {**about, **self.described_pair(whole, remaining)}
        (full,) = whole
        marks = mark(full, remaining[0], self.special)
        return {**about, "sequences": sections(self.tokenizer, full, marks), "difference": None}

    def described_pair(self, whole: list[Strand], remaining: list[Strand]) -> dict[str, Any]:
        """A pair as prompt, chosen and rejected: the prompt is what both begin with up to the first trained token."""
        chosen, rejected = whole
        start = common(chosen.ids, rejected.ids)
        prompt = min(start, first(chosen.trained), first(rejected.trained))
        end = common(chosen.ids[start:][::-1], rejected.ids[start:][::-1])
        described = []
        for full, left in zip(whole, remaining, strict=True):
            marks = mark(full, left, self.special)
            for place, entry in enumerate(marks):
                entry["section"] = "prompt" if place < prompt else full.name
                entry["differs"] = start <= place < len(full.ids) - end
            found = sections(self.tokenizer, full, marks)
            # both have the same prompt: it is shown once
            described += [section for section in found if section["name"] != "prompt" or full is chosen]
        for name in ("prompt", "chosen", "rejected"):
            if all(section["name"] != name for section in described):
                described.append({"name": name, "tokens": 0, "trained": 0, "cut": 0, "cut_at": None, "pieces": []})
        order = ("prompt", "chosen", "rejected")
        described.sort(key=lambda section: order.index(section["name"]))
        return {
            "sequences": described,
            "difference": {
                "equal": chosen.ids == rejected.ids,
                "same_start": start - prompt,
                "same_end": end,
                "chosen": len(chosen.ids) - start - end,
                "rejected": len(rejected.ids) - start - end,
            },
        }

    @property
    def special(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder
        return {*self.tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}


def joined(parts: list[list[Strand]]) -> list[Strand]:
    """The sequences that one row was split into, as one again."""
    whole = copy.deepcopy(parts[0])
    for further in parts[1:]:
        for strand_of_row, addition in zip(whole, further, strict=True):
            strand_of_row.ids += addition.ids
            strand_of_row.trained += addition.trained
    return whole


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same at the start."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def first(trained: list[bool]) -> int:
    return trained.index(True) if True in trained else len(trained)


def mark(full: Strand, kept: Strand, special: set[int]) -> list[dict[str, Any]]:
    """What is shown of each token of a sequence, `kept` being what is left of it."""
    begin = 0
    if full.ids[: len(kept.ids)] != kept.ids and full.ids[-len(kept.ids) :] == kept.ids:
        begin = len(full.ids) - len(kept.ids)
    marks = []
    for place, number in enumerate(full.ids):
        is_cut = not begin <= place < begin + len(kept.ids)
        trained = False if is_cut else kept.trained[place - begin]
        marks.append({"section": full.name, "trained": trained, "special": number in special, "cut": is_cut})
    return marks


def sections(tokenizer: Any, full: Strand, marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a sequence, each with its tokens and with its text in pieces of tokens of one kind."""
    described: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(entry["section"] for entry in marks):
        own = [entry for entry in marks if entry["section"] == name]
        cut = sum(entry["cut"] for entry in own)
        described[name] = {
            "name": name,
            "tokens": len(own) - cut,
            "trained": sum(entry["trained"] for entry in own),
            "cut": cut,
            "cut_at": cut_end(marks) if cut else None,
            "pieces": [],
        }
    begin = 0
    for end in range(1, len(marks) + 1):
        is_last = end == len(marks)
        if not is_last and marks[end] == marks[begin] and not marks[begin]["special"]:
            continue
        piece = {key: value for key, value in marks[begin].items() if key != "section"}
        text = text_of(tokenizer, full.ids, begin, end)
        described[marks[begin]["section"]]["pieces"].append({"text": text, "tokens": end - begin, **piece})
        begin = end
    return list(described.values())


def cut_end(marks: list[dict[str, Any]]) -> str:
    """At which end of a sequence tokens are cut."""
    return "start" if marks[0]["cut"] else "end"


def text_of(tokenizer: Any, ids: list[int], begin: int, end: int) -> str:
    """The text of some tokens as it stands in that of all: alone, some tokenizers leave out a leading space."""
    before = decoded(tokenizer, ids[:begin])
    until = decoded(tokenizer, ids[:end])
    if until.startswith(before):
        return until[len(before) :]
    return decoded(tokenizer, ids[begin:end])


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def finish(views: list[PreparedSet], loader: Loader, request: dict[str, Any], template: dict[str, Any]) -> None:
    """Write the rows to `request["result"]` and end the script.

    Raises Finished, or what the trainer raises for the first row that it refuses.
    """
    error: Exception | None = None
    refused: int | None = None
    counts = []
    shown = []
    for view in views:
        try:
            counts.append(view.count())
        except Exception as fault:
            error = error or fault
            refused = view.first_refused() if refused is None else refused
    for number in numbers_to_show(views, request):
        for view in views:
            try:
                row = view.row(number)
            except Exception as fault:
                error = error or fault
                refused = number if refused is None else refused
                continue
            if row is not None:
                shown.append(row)
    content = {
        "template": template,
        "counts": None if error is not None else added(counts),
        "refused": refused,
        "rows": shown,
        "limit": views[0].limit,
        "packs": views[0].packs,
        "total": loader.total(),
        "sampled": loader.is_sampled(),
    }
    with open(request["result"], "w", encoding="utf-8") as file:
        json.dump(content, file)
    if error is not None:
        raise error
    raise Finished


def numbers_to_show(views: list[PreparedSet], request: dict[str, Any]) -> list[int]:
    """The rows that the request names, or the first ones that are trained on."""
    if request["numbers"]:
        return list(request["numbers"])
    taken = dict.fromkeys(number for view in views for number in sorted(view.selected[ROW]))
    return list(taken)[: request["first"]]


def added(counts: list[dict[str, Any]]) -> dict[str, Any]:
    whole = dict(counts[0])
    for further in counts[1:]:
        for key, value in further.items():
            whole[key] = whole[key] + value
    return whole
