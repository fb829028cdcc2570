"""The tokens of a row as text in sections and pieces, each of one kind: trained, special, cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .records import PairDifference, RowPiece, RowSection


@dataclass
class Strand:
    """One sequence of a row: its token ids, and which of them count in the loss."""

    name: str
    ids: list[int]
    trained: list[bool]

    def first(self, count: int) -> "Strand":
        return Strand(self.name, self.ids[:count], self.trained[:count])


@dataclass(frozen=True)
class Mark:
    """The kind of a token; `differs` is None outside of pairs."""

    section: str
    trained: bool
    special: bool
    cut: bool
    differs: bool | None = None


def split_strands(batch: Any) -> list[Strand]:
    """The sequences of a batch of one row, without padding."""
    if "chosen_input_ids" in batch:
        return [make_labelled_strand(batch, name, f"{name}_") for name in ("chosen", "rejected")]
    if "completion_mask" in batch:
        return [make_masked_strand(batch, "chosen", 0), make_masked_strand(batch, "rejected", 1)]
    return [make_labelled_strand(batch, "text", "")]


def make_masked_strand(batch: Any, name: str, place: int) -> Strand:
    count = int(batch["attention_mask"][place].sum())
    ids = batch["input_ids"][place][:count].tolist()
    mask = batch["completion_mask"][place][:count].tolist()
    return Strand(name, ids, [bool(bit) for bit in mask])


def make_labelled_strand(batch: Any, name: str, prefix: str) -> Strand:
    ids = batch[f"{prefix}input_ids"][0]
    labels = batch[f"{prefix}labels"][0]
    attended = batch.get(f"{prefix}attention_mask")
    ends = batch.get(f"{prefix}cu_seq_lens_q")
    if attended is not None:
        present = attended[0].bool()
        ids = ids[present]
        labels = labels[present]
    elif ends is not None:
        # a collator that flattens may pad up to a fixed length
        ids = ids[: int(ends[-1])]
        labels = labels[: int(ends[-1])]
    return Strand(name, ids.tolist(), [label != -100 for label in labels.tolist()])


class Renderer:
    """Turns token ids into sections, with the tokenizer of the stage."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = set(tokenizer.all_special_ids)
        for number, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                self.special.add(number)

    def render_sequence(self, whole: Strand, kept: Strand) -> list[RowSection]:
        return self.render_sections(whole.ids, self.mark(whole, kept))

    def render_pair(
        self, whole: list[Strand], kept: list[Strand]
    ) -> tuple[list[RowSection], PairDifference]:
        """Prompt, chosen and rejected: the prompt ends before the first trained token."""
        chosen, rejected = whole
        start = count_common(chosen.ids, rejected.ids)
        prompt = min(start, find_first_trained(chosen), find_first_trained(rejected))
        end = count_common(chosen.ids[start:][::-1], rejected.ids[start:][::-1])
        sections = {name: RowSection(name=name) for name in ("prompt", "chosen", "rejected")}
        # the prompt is shown once: as chosen has it
        for full, left in ((rejected, kept[1]), (chosen, kept[0])):
            ending = len(full.ids) - end
            marks = []
            for place, mark in enumerate(self.mark(full, left)):
                section = "prompt" if place < prompt else full.name
                differs = start <= place < ending
                marks.append(replace(mark, section=section, differs=differs))
            for part in self.render_sections(full.ids, marks):
                sections[part.name] = part
        difference = PairDifference(
            equal=chosen.ids == rejected.ids,
            same_start=start - prompt,
            same_end=end,
            chosen=len(chosen.ids) - start - end,
            rejected=len(rejected.ids) - start - end,
        )
        return list(sections.values()), difference

    def mark(self, whole: Strand, kept: Strand) -> list[Mark]:
        """The kind of each token of a sequence, `kept` being what is left of it."""
        begin = 0
        count = len(kept.ids)
        is_cut_at_start = whole.ids[-count:] == kept.ids
        if is_cut_at_start and whole.ids[:count] != kept.ids:
            begin = len(whole.ids) - count
        marks = []
        for place, number in enumerate(whole.ids):
            is_cut = not begin <= place < begin + count
            is_trained = not is_cut and kept.trained[place - begin]
            is_special = number in self.special
            marks.append(Mark(whole.name, is_trained, is_special, is_cut))
        return marks

    def render_sections(self, ids: list[int], marks: list[Mark]) -> list[RowSection]:
        """The sections of a sequence, in pieces of tokens of one kind."""
        sections: dict[str, RowSection] = {}
        cut_at = "start" if marks and marks[0].cut else "end"
        begin = 0
        before = ""
        for end in range(1, len(marks) + 1):
            mark = marks[begin]
            if end < len(marks) and marks[end] == mark and not mark.special:
                continue
            until = self.decode(ids[:end])
            # alone, some tokenizers leave out a leading space
            text = until.removeprefix(before)
            if not until.startswith(before):
                text = self.decode(ids[begin:end])
            piece = RowPiece(
                text=text,
                tokens=end - begin,
                trained=mark.trained,
                special=mark.special,
                cut=mark.cut,
                differs=mark.differs,
            )
            section = sections.setdefault(mark.section, RowSection(name=mark.section))
            section.pieces.append(piece)
            count_piece(section, piece, cut_at)
            begin = end
            before = until
        return list(sections.values())

    def decode(self, ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def count_piece(section: RowSection, piece: RowPiece, cut_at: str) -> None:
    if piece.cut:
        section.cut += piece.tokens
        section.cut_at = cut_at
        return
    section.tokens += piece.tokens
    if piece.trained:
        section.trained += piece.tokens


def count_common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens are the same at the start."""
    count = 0
    for left_id, right_id in zip(left, right, strict=False):
        if left_id != right_id:
            break
        count += 1
    return count


def find_first_trained(strand: Strand) -> int:
    if True in strand.trained:
        return strand.trained.index(True)
    return len(strand.trained)
