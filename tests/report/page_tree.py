"""A page of HTML as a tree, and what its tables say."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "input", "img", "link", "hr"}


@dataclass
class Element:
    """One element; its text has that of all below it."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, *names: str, **attributes: str) -> list[Element]:
        """Every element below with one of these names and all of these attributes, in order."""
        matching: list[Element] = []
        for child in self.children:
            if child.name in names and attributes.items() <= child.attributes.items():
                matching.append(child)
            matching += child.all(*names, **attributes)
        return matching

    def one(self, *names: str, **attributes: str) -> Element:
        (element,) = self.all(*names, **attributes)
        return element

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        assert len(attributes) == len(attrs), f"an attribute of {tag} is there twice"
        element = Element(tag, attributes)
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data


def parse(page: str) -> Element:
    """The tree of a page, in which every tag is closed once."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    (top,) = parser.open
    return top


def rows(element: Element) -> list[list[str]]:
    """The rows of all tables below as text."""
    texts = []
    for row in element.all("tr"):
        texts.append([cell.words for cell in row.all("td", "th")])
    return texts


class Page:
    """A page about runs, by its parts."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = parse(text)

    def section(self, key: str) -> Element:
        """The section whose heading has this id."""
        for element in self.tree.all("section"):
            if element.all("h2", id=key):
                return element
        raise AssertionError(f"there is no section {key}")

    def row(self, key: str, first: str) -> list[str]:
        """The cells of a row of a section, after the first one, which has this text."""
        (row,) = [row for row in rows(self.section(key)) if row[0] == first]
        return row[1:]

    @property
    def heading(self) -> str:
        return self.tree.one("h1").text

    @property
    def banners(self) -> list[Element]:
        sections = self.tree.all("section")
        return [element for element in sections if "banner" in element.attributes.get("class", "")]

    @property
    def curves(self) -> Any:
        """The data that the page draws."""
        return json.loads(self.tree.one("script", id="curves-data").text)

    @property
    def panels(self) -> dict[str, Any]:
        return {panel["key"]: panel for panel in self.curves["panels"]}
