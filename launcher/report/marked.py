"""Text in which parts are marked: by colour on a terminal, by brackets where there is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from launcher.lazy_dataclass import dataclass
from launcher.printable import make_printable
from launcher.redaction import Redactor
from launcher.report import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

GUTTER = "│"
BAR = "█"
_ASCII = {GUTTER: "|", BAR: "#"}
_STYLES = {
    "title": "bold",
    "quiet": "dim",
    "warning": "yellow",
    "bar": "blue",
    "trained": "green",
    "trained same": "green dim",
    "trained special": "bold green",
    "rejected": "red",
    "rejected same": "red dim",
    "rejected special": "bold red",
    "special": "cyan",
    "cut": "dim strike",
}
_TRAINED = ("trained", "rejected")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a line, in one of the styles of `_STYLES`, or in none."""

    text: str
    style: str | None = None


class Paper:
    """Standard output, in colour where it is a terminal and NO_COLOR does not forbid it."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = is_terminal and not os.environ.get("NO_COLOR")
        encoding = sys.stdout.encoding or "ascii"
        self._is_ascii = not encoding.lower().startswith("utf")

    def line(self, parts: Sequence[Span]) -> None:
        """One line of launch's own words; what they quote stays on it."""
        clean = []
        for part in self._clean_parts(parts):
            text = part.text.replace("\n", " ")
            clean.append(Span(text, part.style))
        if self.colour:
            self._print(clean)
            return
        line = "".join(part.text for part in clean)
        console.say(line.rstrip())

    def text(self, parts: Sequence[Span]) -> None:
        """Text of any length behind a line at the left; trained parts are marked."""
        gutter = Span(f"  {self._replace_drawn(GUTTER)} ", "quiet")
        for line in _split_lines(self._clean_parts(parts)):
            if self.colour:
                self._print_wrapped(gutter, line)
            else:
                text = gutter.text + "".join(_bracket_trained(line))
                console.say(text.rstrip())

    def _replace_drawn(self, text: str) -> str:
        if self._is_ascii:
            for drawn, plain in _ASCII.items():
                text = text.replace(drawn, plain)
        return text

    def _clean_parts(self, parts: Sequence[Span]) -> list[Span]:
        clean = []
        for part in parts:
            text = self._replace_drawn(self._redactor.redact(make_printable(part.text)))
            clean.append(Span(text, part.style))
        return clean

    def _print(self, parts: Sequence[Span]) -> None:
        # the terminal wraps it
        _make_terminal().print(_convert_to_rich(parts), soft_wrap=True)

    def _print_wrapped(self, gutter: Span, line: Sequence[Span]) -> None:
        terminal = _make_terminal()
        room = max(20, terminal.width - len(gutter.text))
        for wrapped in _convert_to_rich(line).wrap(terminal, room, overflow="fold"):
            terminal.print(_convert_to_rich([gutter]) + wrapped, soft_wrap=True)


def _make_terminal() -> Console:
    from rich.console import Console

    # whether there is colour was decided before: an empty NO_COLOR forbids none
    return Console(highlight=False, no_color=False)


def _convert_to_rich(parts: Sequence[Span]) -> Text:
    from rich.text import Text

    text = Text()
    for part in parts:
        style = "" if part.style is None else _STYLES[part.style]
        text.append(part.text, style)
    return text


def _split_lines(parts: Sequence[Span]) -> Iterator[list[Span]]:
    """The lines of a text; a trained end of a line is shown, as nothing else of it could be."""
    line: list[Span] = []
    for part in parts:
        pieces = part.text.split("\n")
        for index, piece in enumerate(pieces):
            is_last = index == len(pieces) - 1
            if not is_last and _is_trained(part):
                piece += "↵"
            if piece:
                line.append(Span(piece, part.style))
            if not is_last:
                yield line
                line = []
    if line:
        yield line


def _bracket_trained(line: Sequence[Span]) -> Iterator[str]:
    """A line with brackets around what is trained; trained parts beside each other share them."""
    inside = False
    for part in line:
        if _is_trained(part) and not inside:
            yield "[["
        if inside and not _is_trained(part):
            yield "]]"
        inside = _is_trained(part)
        yield part.text
    if inside:
        yield "]]"


def _is_trained(part: Span) -> bool:
    return part.style is not None and part.style.startswith(_TRAINED)
