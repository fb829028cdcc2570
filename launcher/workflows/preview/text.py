"""A preview for people: in colour on a terminal, with brackets elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from launcher.dataset.survey import RowPlace
from launcher.redaction import Redactor
from launcher.report import marked
from launcher.report.marked import Span
from launcher.workflows.preview.preview import Preview
from launcher.workflows.rehearse.inside.records import (
    PairDifference,
    RowCounts,
    RowPiece,
    RowSection,
    ShownRow,
)

_SHOWN_TOKENS = 400
"""Tokens of a section that are shown without `--row`: half at the start, half at the end."""
_CUT_CHARACTERS = 60
_BINS = 8
_BAR = 32
_LABEL = 10


def show(preview: Preview, redactor: Redactor, *, whole: bool) -> None:
    """Print a preview; `whole` leaves nothing out of the rows."""
    paper = marked.Paper(redactor)
    paper.line([Span(preview.title, "title"), Span(f"  {preview.data}")])
    paper.line([])
    for label, parts in _render_head(preview):
        paper.line([Span(f"  {label:<{_LABEL}}", "quiet"), *parts])
    if preview.content.rows:
        paper.line([])
        paper.line([Span("  "), *_render_legend(preview, paper)])
    for row in preview.content.rows:
        paper.line([])
        _show_row(row, paper, whole=whole)


def _render_head(preview: Preview) -> Iterator[tuple[str, list[Span]]]:
    template = preview.content.template
    is_odd = template.fallback or template.source == "none"
    yield "template", [Span(template.description, "warning" if is_odd else None)]
    counts = preview.content.counts
    if counts is None:
        yield "rows", [Span("not counted: the trainer refuses one of them", "warning")]
        return
    yield "rows", [Span(_describe_counts(preview, counts))]
    total = f"of {counts.looked_at:,} rows"
    dropped = counts.dropped
    if counts.cut:
        yield "cut", [Span(f"{counts.cut:,} {total}, at {preview.limit}", "warning")]
    if dropped.too_long:
        text = f"{dropped.too_long:,} {total}: the prompt fills {preview.limit}"
        yield "dropped", [Span(text, "warning")]
    if dropped.untrained:
        text = f"{dropped.untrained:,} {total}: nothing in them counts"
        yield "dropped", [Span(text, "warning")]
    yield "trained", _render_share(preview, counts)
    yield from _render_histogram(preview, counts.lengths)


def _describe_counts(preview: Preview, counts: RowCounts) -> str:
    text = f"{counts.looked_at:,}"
    if counts.sampled:
        total = "more" if counts.total is None else f"{counts.total:,}"
        text += f" of {total} looked at"
    elif preview.entry.mixes and counts.total not in (None, counts.looked_at):
        text += f", taken from {counts.total:,}"
    if preview.content.packs:
        noun = "sequence" if counts.sequences == 1 else "sequences"
        limit = preview.content.limit
        return f"{text}, packed into {counts.sequences:,} {noun} of at most {limit} tokens"
    dropped = counts.dropped.too_long + counts.dropped.untrained
    if not counts.cut and not dropped:
        return f"{text}, none cut, none dropped"
    whole = counts.looked_at - counts.cut - dropped
    return f"{text}: {whole:,} whole, {counts.cut:,} cut, {dropped:,} dropped"


def _render_share(preview: Preview, counts: RowCounts) -> list[Span]:
    share = Span(_format_percent(counts.trained, counts.tokens), "trained")
    parts = [share, Span(f" of {counts.tokens:,} tokens")]
    # a collator without padding leaves out the first token of a row
    trains_on_all = counts.trained + counts.looked_at >= counts.tokens
    if preview.content.template.used and trains_on_all and not preview.is_pairs:
        text = ": of the questions too, `assistant_only_loss: true` leaves the answers"
        parts.append(Span(text, "warning"))
    return parts


def _format_percent(part: int, whole: int) -> str:
    if not whole:
        return "0 %"
    share = 100 * part / whole
    if 0 < share < 1:
        return "under 1 %"
    if 99 < share < 100:
        return "over 99 %"
    return f"{share:.0f} %"


def _render_histogram(preview: Preview, lengths: list[int]) -> Iterator[tuple[str, list[Span]]]:
    if not lengths:
        return
    mean = sum(lengths) / len(lengths)
    of_what = " of prompt and longer answer" if preview.is_pairs else ""
    text = f"{mean:,.0f} tokens{of_what} on average, {max(lengths):,} at most, before any cut"
    yield "lengths", [Span(text)]
    limit = preview.content.limit
    bins = _sort_into_bins(lengths)
    width = max(len(label) for _, label, _ in bins)
    most = max(count for _, _, count in bins)
    for low, label, count in bins:
        size = round(_BAR * count / most)
        if count:
            size = max(1, size)
        is_over = limit is not None and low > limit
        bar = Span(marked.BAR * size, "warning" if is_over else "bar")
        yield "", [Span(f"{label:>{width}}  ", "quiet"), bar, Span(f" {count:,}", "quiet")]


def _sort_into_bins(lengths: list[int]) -> list[tuple[int, str, int]]:
    """Bins of a round width: the fewest tokens, a label, and the number of rows.

    A few rows that are far longer than the others share the last one.
    """
    ordered = sorted(lengths)
    longest = ordered[-1]
    usual = ordered[int(0.98 * (len(ordered) - 1))]
    top = longest if longest < 2 * usual else usual
    width = _choose_bin_width(top)
    overflow = math.ceil(top / width)
    counts = Counter(min((length - 1) // width, overflow) for length in lengths)
    bins = []
    first = min(0, *counts)
    last = max(overflow - 1, *counts)
    for index in range(first, last + 1):
        low = index * width + 1
        label = f"{low:,}-{low + width - 1:,}"
        if index < 0:
            label = "0-0"
        elif index == overflow:
            label = f"{low:,}+"
        bins.append((low, label, counts[index]))
    return bins


def _choose_bin_width(top: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... with which `_BINS` bins reach `top`."""
    width = 1
    while True:
        for factor in (1, 2, 5):
            if width * factor * _BINS >= top:
                return width * factor
        width *= 10


def _render_legend(preview: Preview, paper: marked.Paper) -> list[Span]:
    what = "tokens that are compared" if preview.is_pairs else "tokens that count in the loss"
    if not paper.colour:
        return [Span(f"[[ ]] encloses {what}", "quiet")]
    spans = [Span(what, "trained")]
    if preview.is_pairs:
        spans.append(Span(", of rejected", "rejected"))
    return [*spans, Span("   "), Span("special tokens", "special"), Span("   the rest is context")]


def _show_row(row: ShownRow, paper: marked.Paper, *, whole: bool) -> None:
    title = Span(f"row {row.row}", "title")
    indent = Span("  ")
    paper.line([title, *_describe_row(row)])
    if row.difference is not None:
        paper.line([indent, _describe_difference(row.difference)])
    for section in row.sections:
        if len(row.sections) > 1:
            name = Span(section.name, "title")
            size = Span(f"  {_describe_section(section)}", "quiet")
            paper.line([indent, name, size])
        _show_pieces(section, row, paper, whole=whole)
        if section.cut:
            paper.line(list(_describe_cut(section)))


def _describe_row(row: ShownRow) -> Iterator[Span]:
    if row.file is not None and row.line is not None:
        yield Span(f"  {RowPlace(row.file, row.line)}", "quiet")
    if row.sections:
        yield Span(f"  {row.tokens:,} tokens, {_format_percent(row.trained, row.tokens)} trained")
    if row.status == "cut":
        yield Span(f", {row.cut:,} cut", "warning")
    if row.sequences > 1:
        yield Span(f", in {row.sequences} sequences")
    if row.status == "dropped":
        yield Span(f"  dropped: {row.reason}", "warning")
    if not row.taken:
        yield Span("  not among the rows that the mixture takes", "warning")


def _describe_section(section: RowSection) -> str:
    if not section.tokens and not section.cut:
        return "empty"
    return f"{section.tokens:,} tokens"


def _describe_difference(pair: PairDifference) -> Span:
    if pair.equal:
        return Span("chosen and rejected are the same: this pair teaches nothing", "warning")
    text = f"they differ in {pair.chosen:,} tokens of chosen and {pair.rejected:,} of rejected"
    if pair.same_start:
        text += f", after {pair.same_start:,} that are the same"
    return Span(text, "quiet")


def _show_pieces(section: RowSection, row: ShownRow, paper: marked.Paper, *, whole: bool) -> None:
    kept = [piece for piece in section.pieces if not piece.cut]
    left = section.tokens - _SHOWN_TOKENS
    if whole or left <= 0:
        paper.text([_style_piece(piece, section, row) for piece in kept])
        return
    half = _SHOWN_TOKENS // 2
    start = _take_first(kept, half)
    paper.text([_style_piece(piece, section, row) for piece in start])
    note = f"... about {left:,} more tokens: --row {row.row}"
    paper.line([Span(f"  {marked.GUTTER} ", "quiet"), Span(note, "quiet")])
    end = _take_first(reversed(kept), half, from_end=True)
    end.reverse()
    paper.text([_style_piece(piece, section, row) for piece in end])


def _take_first(
    pieces: Iterable[RowPiece], tokens: int, *, from_end: bool = False
) -> list[RowPiece]:
    """The first pieces with `tokens` tokens in all; the last piece may be cut."""
    left = tokens
    first = []
    for piece in pieces:
        if left <= 0:
            break
        if piece.tokens > left:
            # tokens have no places in a text: the same share of its characters
            size = max(1, len(piece.text) * left // piece.tokens)
            text = piece.text[-size:] if from_end else piece.text[:size]
            first.append(replace(piece, text=text))
        else:
            first.append(piece)
        left -= piece.tokens
    return first


def _style_piece(piece: RowPiece, section: RowSection, row: ShownRow) -> Span:
    text = piece.text
    if not piece.trained or row.status == "dropped":
        return Span(text, "special" if piece.special else None)
    style = "rejected" if section.name == "rejected" else "trained"
    if piece.special:
        style += " special"
    elif piece.differs is False:
        style += " same"
    return Span(text, style)


def _describe_cut(section: RowSection) -> Iterator[Span]:
    text = "".join(piece.text for piece in section.pieces if piece.cut)
    shown = " ".join(text.split())
    if len(shown) > _CUT_CHARACTERS:
        shown = f"{shown[:_CUT_CHARACTERS]}..."
    yield Span(f"  {section.cut:,} tokens cut at the {section.cut_at}: ", "warning")
    yield Span(shown, "cut")
