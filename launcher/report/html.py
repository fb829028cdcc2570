"""HTML out of plain values: whatever is not markup already is escaped where it enters."""

import re
from collections.abc import Iterable, Sequence
from html import escape

# control characters, those that turn the direction of text, and halves of characters
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Html(str):
    """Text that is HTML already; every other text is escaped where it enters one."""


def text(value: object) -> Html:
    """Any text, escaped; characters that nobody would see are written out."""
    if isinstance(value, Html):
        return value
    shown = _UNSEEN.sub(lambda found: f"\\x{ord(found[0]):02x}", str(value))
    return Html(escape(shown))


def tag(name: str, inner: object, **attributes: str) -> Html:
    """An element; `class_` and `data_copy` stand for `class` and `data-copy`."""
    names = {key: key.strip("_").replace("_", "-") for key in attributes}
    written = "".join(f' {names[key]}="{text(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{written}>{text(inner)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(between.join(text(part) for part in parts))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], kind: str = "") -> Html:
    """A table; a cell that is Html and begins with `<t` is a cell already."""
    top = join(cell(word, "th", scope="col") for word in head)
    body = [tag("tr", join([cell(row[0], "th", scope="row"), *map(cell, row[1:])])) for row in rows]
    if not body:
        return Html("")
    whole = tag("table", join([tag("thead", tag("tr", top)), tag("tbody", join(body))]), class_=kind)
    return tag("div", whole, class_="scroll", tabindex="0") if "wide" not in kind else whole


def cell(value: object, name: str = "td", **attributes: str) -> Html:
    if isinstance(value, Html) and value.startswith(("<td", "<th")):
        return value
    return tag(name, value, **attributes)


def figure(value: float, digits: int = 4) -> str:
    """A number for people: at most so many significant digits, thousands apart."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}"


def details(summary: object, inner: object, **attributes: str) -> Html:
    return tag("details", join([tag("summary", summary), inner]), **attributes)
