"""Edits of YAML text where it stands: spans of characters found by PyYAML's marks, nothing written anew."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from launcher.builder import LOADER


class Leave(Exception):
    """Something is not mended; the text says why, to its author."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Characters `start` to `end` become `text`."""

    start: int
    end: int
    text: str = ""


@dataclass(slots=True)
class Node:
    """A YAML node and where it is written, properties (an anchor, a tag) included.

    `items` are the entries of a sequence, or keys and values of a mapping in turn.
    """

    kind: type
    start: int
    end: int
    value: str = ""
    style: str | None = None
    flow: bool = False
    properties: bool = False
    target: Node | None = None
    items: list[Node] = field(default_factory=list)

    @property
    def entries(self) -> list[tuple[Node, Node]]:
        """The keys and values of a mapping; empty for anything else."""
        if self.kind is not yaml.MappingStartEvent:
            return []
        return list(zip(self.items[::2], self.items[1::2], strict=True))

    def resolved(self) -> Node:
        """What an alias stands for, or the node itself."""
        return self.target if self.target is not None else self


@dataclass(frozen=True, slots=True)
class Place:
    """One entry of a mapping."""

    mapping: Node
    key: Node
    value: Node


def _parse(text: str) -> Node | None:
    """The root node; the text is known to load."""
    anchors: dict[str, Node] = {}
    open_nodes: list[Node] = []
    root = None
    events: Iterator[Any] = yaml.parse(text, Loader=LOADER)
    for event in events:
        kind = type(event)
        if issubclass(kind, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            node = open_nodes.pop()
            # a block collection ends where its last entry does; the event says where the next begins
            node.end = event.end_mark.index if node.flow else node.items[-1].end
        elif issubclass(kind, yaml.NodeEvent):
            node = _node(text, event)
            if kind is yaml.AliasEvent:
                node.target = anchors.get(event.anchor)
            elif event.anchor:
                anchors[event.anchor] = node
            if open_nodes:
                open_nodes[-1].items.append(node)
            root = root or node
            if issubclass(kind, yaml.CollectionStartEvent):
                open_nodes.append(node)
    return root


def _node(text: str, event: Any) -> Node:
    start, end = event.start_mark.index, event.end_mark.index
    value = getattr(event, "value", "")
    style = getattr(event, "style", None) or None
    if style in {"|", ">"} or start == end:
        # both may reach up to the next token
        while end and text[end - 1].isspace():
            end -= 1
        start = min(start, end)
    tagged = getattr(event, "tag", None) is not None
    return Node(
        kind=type(event), start=start, end=end, value=value,
        style=style, flow=bool(getattr(event, "flow_style", False)),
        properties=tagged or bool(event.anchor),
    )  # fmt: skip


# YAML's own line ends
BREAK = re.compile(r"\r\n|[\n\r\x85\u2028\u2029]")
_COMMENT = r"#[^\n\r\x85\u2028\u2029]*"
_REST = re.compile(rf"[ \t]*(?:{_COMMENT})?(?=[\n\r\x85\u2028\u2029]|\Z)")
_SPACE = re.compile(rf"(?:\s|{_COMMENT})*")
_BLANKS = re.compile(r"[ \t]*")
_COLON = re.compile(r"[ \t]*:\s*\Z")


def _is_blank(text: str) -> bool:
    return not text.strip(" \t")


class Text:
    """The text of a file and the edits that can be made to it; raises Leave where it cannot."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.root = _parse(text)
        self._starts = [0, *(match.end() for match in BREAK.finditer(text))]

    def raw(self, node: Node) -> str:
        """A node as its author wrote it."""
        return self.text[node.start : node.end]

    def row(self, index: int) -> int:
        """The 0-based number of the line that a character stands in."""
        return bisect.bisect_right(self._starts, index) - 1

    def line_start(self, index: int) -> int:
        """Where the line of a character begins."""
        return self._starts[self.row(index)]

    def next_line(self, index: int) -> int:
        """Where the line after that of a character begins, or the end of the text."""
        row = self.row(index) + 1
        return self._starts[row] if row < len(self._starts) else len(self.text)

    def _break_before(self, index: int) -> int:
        """Where the line end before the line of a character stands."""
        start = self.line_start(index)
        return start - (2 if self.text[start - 2 : start] == "\r\n" else 1)

    def newline(self, index: int) -> str:
        """The line end in use around a place."""
        match = BREAK.search(self.text, index) or BREAK.search(self.text)
        return match.group() if match else "\n"

    def renamed(self, key: Node, name: str) -> Edit:
        """Another key in the same quotes."""
        raw = self.raw(key)
        if raw == key.value:
            return Edit(key.start, key.end, name)
        if raw[:1] in {"'", '"'} and raw[1:-1] == key.value:
            return Edit(key.start + 1, key.end - 1, name)
        raise Leave("the key is written in an unusual way")

    def replaced(self, value: Node, raw: str) -> Edit:
        """Another value in place of one that stands in one line."""
        self.plain(value)
        return Edit(value.start, value.end, raw)

    def plain(self, value: Node) -> str:
        """The raw text of a scalar (or `[]`) in one line; raises Leave for anything else."""
        raw = self.raw(value)
        single = value.kind is yaml.ScalarEvent or (value.flow and not value.items)
        if not single or value.properties or value.style in {"|", ">"}:
            raise Leave("its value has an anchor, an alias or a tag, or is a block")
        if not raw or BREAK.search(raw):
            raise Leave("its value does not stand in one line")
        return raw

    def deleted(self, place: Place) -> Edit:
        """An entry with its trailing comment; a comment above it stays."""
        key, end = place.key, max(place.key.end, place.value.end)
        begin = self.line_start(key.start)
        alone = _is_blank(self.text[begin : key.start])
        if place.mapping.flow:
            return self._deleted_in_flow(key.start, end, begin if alone else None)
        rest = _REST.match(self.text, end)
        if not alone or rest is None:
            raise Leave("it shares its line with something else")
        after = self.next_line(rest.end())
        if after == rest.end() and begin:
            # the last line, without a line end: then the file goes on having none
            while self.row(begin) and _is_blank(self.text[self.line_start(begin) : begin]):
                begin = self._break_before(begin)
        return Edit(begin, after)

    def _deleted_in_flow(self, start: int, end: int, line: int | None) -> Edit:
        before = self.text[:start].rstrip()
        if before.endswith("?"):
            raise Leave("the key is written in an unusual way")
        following = self._significant(end)
        comma = self.text[following : following + 1] == ","
        stop = following + 1 if comma else end
        rest = _REST.match(self.text, stop)
        if line is not None and rest is not None and rest.end() < len(self.text):
            return Edit(line, self.next_line(rest.end()))
        if comma:
            blanks = _BLANKS.match(self.text, stop)
            return Edit(start, blanks.end() if blanks else stop)
        if before.endswith(",") and _is_blank(self.text[len(before) : start]):
            start = len(before) - 1
        return Edit(start, end)

    def _significant(self, index: int) -> int:
        """Where the next token of a flow collection stands."""
        match = _SPACE.match(self.text, index)
        return match.end() if match else index

    def listed(self, mapping: Node, amounts: Sequence[str | None]) -> Iterator[Edit]:
        """A mapping of names to amounts as a list of both in turn; None keeps an amount's text."""
        if mapping.properties or mapping.kind is not yaml.MappingStartEvent:
            raise Leave("it has an anchor, an alias or a tag")
        if mapping.flow:
            yield Edit(mapping.start, mapping.start + 1, "[")
            yield Edit(mapping.end - 1, mapping.end, "]")
        for (key, value), amount in zip(mapping.entries, amounts, strict=True):
            self.plain(value)
            indent = self.text[self.line_start(key.start) : key.start]
            between = self.text[key.end : value.start]
            usual = _COLON.match(between) and (mapping.flow or _is_blank(indent))
            if not usual or key.properties or (mapping.flow and "?" in between):
                raise Leave("an entry is written in an unusual way")
            if not mapping.flow:
                yield Edit(key.start, key.start, "- ")
            parted = ", " if mapping.flow else f"{self.newline(key.end)}{indent}- "
            yield Edit(key.end, value.start, parted)
            if amount is not None:
                yield Edit(value.start, value.end, amount)

    def edited(self, edits: Iterable[Edit]) -> str:
        """The text after edits that do not overlap."""
        parts, done = [], 0
        for edit in sorted(edits, key=lambda e: (e.start, e.end)):
            parts += [self.text[done : edit.start], edit.text]
            done = edit.end
        return "".join([*parts, self.text[done:]])

    def lines(self, numbers: Sequence[int], edits: Iterable[Edit]) -> tuple[int, ...]:
        """Which line of the original each line is, after edits that do not overlap."""
        kept = list(numbers)
        for edit in sorted(edits, key=lambda e: (e.start, e.end), reverse=True):
            first, last = self.row(edit.start), self.row(edit.end)
            gone = not edit.text and edit.start == self._starts[first]
            now = [kept[last]] if gone else [kept[first]] * (1 + len(BREAK.findall(edit.text)))
            kept[first : last + 1] = now
        return tuple(kept)
