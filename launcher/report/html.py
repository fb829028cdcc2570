"""HTML from plain values. Text is escaped where it enters; `Html` marks what is markup already."""

import re
from collections.abc import Iterable, Sequence
from html import escape

# control characters, marks that turn the direction of text, and unpaired surrogates
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Html(str):
    """Markup: it is not escaped again."""


def escape_text(value: object) -> Html:
    """Escape a value; invisible characters are written as `\\x..`."""
    if isinstance(value, Html):
        return value
    visible = _INVISIBLE.sub(lambda match: f"\\x{ord(match[0]):02x}", str(value))
    return Html(escape(visible))


def render_tag(name: str, *parts: object, **attributes: str) -> Html:
    """An element; `class_` and `data_copy` stand for `class` and `data-copy`."""
    opening = name
    for key, value in attributes.items():
        attribute = key.strip("_").replace("_", "-")
        opening += f' {attribute}="{escape_text(value)}"'
    return Html(f"<{opening}>{join(parts)}</{name}>")


def join(parts: Iterable[object], separator: str = "") -> Html:
    return Html(separator.join(map(escape_text, parts)))


def render_section(key: str, title: str, *parts: object) -> Html:
    """A part of the page below its heading; empty without content."""
    content = join(parts)
    if not content:
        return content
    heading = render_tag("h2", title, id=key)
    return render_tag("section", heading, content)


def render_small_below(value: object, note: object) -> Html:
    """A value with a note in small print on the next line."""
    return join([value, Html("<br>"), render_tag("small", note)])


def render_table(head: Sequence[object], rows: Iterable[Sequence[object]], kind: str = "") -> Html:
    """A table; a cell that is Html and begins with `<t` is a cell already."""
    body = []
    for first, *others in rows:
        cells = [_render_cell(first, "th", scope="row")]
        cells += map(_render_cell, others)
        body.append(render_tag("tr", *cells))
    if not body:
        return Html("")
    titles = join(_render_cell(title, "th", scope="col") for title in head)
    parts = [render_tag("thead", render_tag("tr", titles)), render_tag("tbody", *body)]
    element = render_tag("table", *parts, class_=kind)
    if "wide" in kind:
        return element
    return render_tag("div", element, class_="scroll", tabindex="0")


def _render_cell(value: object, name: str = "td", **attributes: str) -> Html:
    if isinstance(value, Html) and value.startswith(("<td", "<th")):
        return value
    return render_tag(name, value, **attributes)


def format_number(value: float, digits: int = 4) -> str:
    """A number for people: at most so many significant digits, with thousands separators."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}"


def render_details(
    summary: object, inner: object, *, is_open: bool = False, **attributes: str
) -> Html:
    """A part that the reader can unfold."""
    if is_open:
        attributes["open"] = "open"
    return render_tag("details", render_tag("summary", summary), inner, **attributes)
