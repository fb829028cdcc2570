"""A preview for people: in colour on a terminal, with brackets elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.redaction import Redactor
from launcher.report import marked
from launcher.report.marked import Span
from launcher.workflows.preview.preview import Preview, PreviewedRow, Section

_SHOWN_TOKENS = 400
"""Tokens of a part of a row that are shown, unless `--row` names it: half at the start, half at the end."""
_CUT_CHARACTERS = 60
_BINS = 8
_BAR = 32
_LABEL = 10


def show(preview: Preview, redactor: Redactor, *, whole: bool) -> None:
    """Print a preview; `whole` leaves nothing out of the rows."""
    paper = marked.Paper(redactor)
    paper.line([Span(preview.title, "title"), Span(f"  {preview.data}")])
    paper.line([])
    for label, parts in _head(preview):
        paper.line([Span(f"  {label:<{_LABEL}}", "quiet"), *parts])
    if preview.rows:
        paper.line([])
        paper.line([Span("  "), *_legend(preview, paper)])
    for row in preview.rows:
        paper.line([])
        _show_row(row, preview, paper, whole=whole)


def _head(preview: Preview) -> Iterator[tuple[str, list[Span]]]:
    style = "warning" if preview.template["fallback"] or preview.template["source"] == "none" else None
    yield "template", [Span(preview.template_text, style)]
    counts = preview.counts
    if counts is None:
        yield "rows", [Span("not counted: the trainer refuses one of them", "warning")]
        return
    yield "rows", [Span(_how_many(preview, counts))]
    if counts["cut"]:
        message = f"{counts['cut']:,} of {counts['rows']:,} rows, at `{preview.length_key}: {preview.limit}`"
        yield "cut", [Span(message, "warning")]
    for reason, name in (("too_long", "the prompt fills `{key}: {limit}`"), ("untrained", "nothing in them counts")):
        if counts[reason]:
            why = name.format(key=preview.length_key, limit=preview.limit)
            yield "dropped", [Span(f"{counts[reason]:,} of {counts['rows']:,} rows: {why}", "warning")]
    yield "trained", _share(preview, counts)
    yield from _histogram(preview, counts)


def _how_many(preview: Preview, counts: Mapping[str, Any]) -> str:
    rows = counts["rows"]
    dropped = preview.dropped
    whole = rows - counts["cut"] - dropped
    if preview.sampled:
        total = "more" if preview.total is None else f"{preview.total:,}"
        text = f"{rows:,} of {total} looked at"
    elif preview.mixes and preview.total not in (None, rows):
        text = f"{rows:,}, taken from {preview.total:,}"
    else:
        text = f"{rows:,}"
    if preview.packs:
        sequences = "sequence" if counts["sequences"] == 1 else "sequences"
        return f"{text}, packed into {counts['sequences']:,} {sequences} of at most {preview.limit} tokens"
    if whole == rows:
        return f"{text}, none cut, none dropped"
    return f"{text}: {whole:,} whole, {counts['cut']:,} cut, {dropped:,} dropped"


def _share(preview: Preview, counts: Mapping[str, Any]) -> list[Span]:
    tokens = counts["tokens"]
    trained = counts["trained"]
    parts = [Span(_percent(trained, tokens), "trained"), Span(f" of {tokens:,} tokens")]
    # a collator without padding leaves out the first token of a row
    trains_on_all = trained + counts["rows"] >= tokens
    if preview.template["used"] and trains_on_all and not preview.is_pairs:
        parts.append(Span(": of the questions too, `assistant_only_loss: true` leaves the answers", "warning"))
    return parts


def _percent(part: int, whole: int) -> str:
    if not whole:
        return "0 %"
    share = 100 * part / whole
    if 0 < share < 1:
        return "under 1 %"
    if 99 < share < 100:
        return "over 99 %"
    return f"{share:.0f} %"


@dataclass(frozen=True, slots=True)
class _Bin:
    """Rows of `low` to `high` tokens; without `high`, of all that are longer."""

    low: int
    high: int | None
    count: int

    @property
    def label(self) -> str:
        return f"{self.low:,}+" if self.high is None else f"{self.low:,}-{self.high:,}"


def _histogram(preview: Preview, counts: Mapping[str, Any]) -> Iterator[tuple[str, list[Span]]]:
    lengths = counts["lengths"]
    if not lengths:
        return
    mean = sum(lengths) / len(lengths)
    of_what = " of prompt and longer answer" if preview.is_pairs else ""
    yield "lengths", [Span(f"{mean:,.0f} tokens{of_what} on average, {max(lengths):,} at most, before any cut")]
    bins = _bins(lengths)
    width = max(len(entry.label) for entry in bins)
    most = max(entry.count for entry in bins)
    for entry in bins:
        size = round(_BAR * entry.count / most)
        if entry.count and not size:
            size = 1
        is_over = preview.limit is not None and entry.low > preview.limit
        bar = Span(marked.BAR * size, "warning" if is_over else "bar")
        yield "", [Span(f"{entry.label:>{width}}  ", "quiet"), bar, Span(f" {entry.count:,}", "quiet")]


def _bins(lengths: list[int]) -> list[_Bin]:
    """At most `_BINS` bins of a round width; a few rows that are far longer share the last one."""
    ordered = sorted(lengths)
    longest = ordered[-1]
    usual = ordered[int(0.98 * (len(ordered) - 1))]
    top = longest if longest < 2 * usual else usual
    width = _round_width(top)
    bins = []
    low = 1
    while low <= top:
        high = low + width - 1
        bins.append(_Bin(low, high, sum(low <= length <= high for length in lengths)))
        low = high + 1
    if longest >= low:
        bins.append(_Bin(low, None, sum(length >= low for length in lengths)))
    empty = sum(length == 0 for length in lengths)
    return [_Bin(0, 0, empty), *bins] if empty else bins


def _round_width(top: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... with which `_BINS` bins reach `top`."""
    width = 1
    while True:
        for factor in (1, 2, 5):
            if width * factor * _BINS >= top:
                return width * factor
        width *= 10


def _legend(preview: Preview, paper: marked.Paper) -> list[Span]:
    what = "tokens that count in the loss"
    if preview.is_pairs:
        what = "tokens that are compared"
    if paper.colour:
        rejected = [Span(", of rejected", "rejected")] if preview.is_pairs else []
        special = Span("special tokens", "special")
        return [Span(what, "trained"), *rejected, Span("   "), special, Span("   the rest is context")]
    return [Span(f"[[ ]] encloses {what}", "quiet")]


def _show_row(row: PreviewedRow, preview: Preview, paper: marked.Paper, *, whole: bool) -> None:
    paper.line([Span(f"row {row.number}", "title"), *_about_row(row)])
    if row.difference is not None:
        paper.line([Span("  "), *_about_difference(row)])
    for section in row.sections:
        if len(row.sections) > 1:
            paper.line([Span("  "), Span(section.name, "title"), Span(f"  {_about_section(section)}", "quiet")])
        _show_pieces(section, row, paper, whole=whole)
        if section.cut:
            paper.line(list(_about_cut(section)))


def _about_row(row: PreviewedRow) -> list[Span]:
    parts = []
    if row.place is not None:
        parts.append(Span(f"  {row.place}", "quiet"))
    if row.sections:
        parts.append(Span(f"  {row.tokens:,} tokens, {_percent(row.trained, row.tokens)} trained"))
    if row.status == "cut":
        parts.append(Span(f", {row.cut:,} cut", "warning"))
    if row.parts > 1:
        parts.append(Span(f", in {row.parts} sequences"))
    if row.status == "dropped":
        parts.append(Span(f"  dropped: {row.reason}", "warning"))
    if not row.taken:
        parts.append(Span("  not among the rows that the mixture takes", "warning"))
    return parts


def _about_section(section: Section) -> str:
    if not section.tokens and not section.cut:
        return "empty"
    return f"{section.tokens:,} tokens"


def _about_difference(row: PreviewedRow) -> list[Span]:
    difference = row.difference or {}
    if difference["equal"]:
        return [Span("chosen and rejected are the same: this pair teaches nothing", "warning")]
    chosen = difference["chosen"]
    rejected = difference["rejected"]
    text = f"they differ in {chosen:,} tokens of chosen and {rejected:,} of rejected"
    if difference["same_start"]:
        text += f", after {difference['same_start']:,} that are the same"
    return [Span(text, "quiet")]


def _show_pieces(section: Section, row: PreviewedRow, paper: marked.Paper, *, whole: bool) -> None:
    kept = [piece for piece in section.pieces if not piece["cut"]]
    parts = [Span(piece["text"], _style(piece, section, row)) for piece in kept]
    tokens = sum(piece["tokens"] for piece in kept)
    if whole or tokens <= _SHOWN_TOKENS:
        paper.text(parts)
        return
    start, end = _both_ends(kept, parts)
    paper.text(start)
    left = tokens - _SHOWN_TOKENS
    paper.line(
        [Span(f"  {marked.GUTTER} ", "quiet"), Span(f"... about {left:,} more tokens: --row {row.number}", "quiet")]
    )
    paper.text(end)


def _both_ends(pieces: list[Any], parts: list[Span]) -> tuple[list[Span], list[Span]]:
    """The start and the end of a long text, of about `_SHOWN_TOKENS` tokens together."""
    half = _SHOWN_TOKENS // 2
    start = list(_head_of(pieces, parts, half, from_end=False))
    end = list(_head_of(pieces[::-1], parts[::-1], half, from_end=True))
    return start, end[::-1]


def _head_of(pieces: Iterable[Any], parts: Iterable[Span], tokens: int, *, from_end: bool) -> Iterator[Span]:
    left = tokens
    for piece, part in zip(pieces, parts, strict=True):
        if left <= 0:
            return
        if piece["tokens"] <= left:
            yield part
        else:
            # tokens have no places in a text: the same share of its characters
            size = max(1, len(part.text) * left // piece["tokens"])
            yield Span(part.text[-size:] if from_end else part.text[:size], part.style)
        left -= piece["tokens"]


def _style(piece: Mapping[str, Any], section: Section, row: PreviewedRow) -> str | None:
    if row.status == "dropped":
        return "special" if piece["special"] else None
    if piece["trained"]:
        style = "rejected" if section.name == "rejected" else "trained"
        if piece["special"]:
            return f"{style} special"
        if row.difference is not None and not piece.get("differs"):
            return f"{style} same"
        return style
    return "special" if piece["special"] else None


def _about_cut(section: Section) -> Iterator[Span]:
    text = "".join(piece["text"] for piece in section.pieces if piece["cut"])
    shown = " ".join(text.split())
    if len(shown) > _CUT_CHARACTERS:
        shown = f"{shown[:_CUT_CHARACTERS]}..."
    yield Span(f"  {section.cut:,} tokens cut at the {section.cut_at}: ", "warning")
    yield Span(shown, "cut")
