"""The meanings of findings' codes, as docs/findings.md has them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from launcher.paths import shipped

_ROW = re.compile(r"\| (`[^|]*) \| ([a-z, ]+) \| (.+) \|\Z")


@dataclass(frozen=True, slots=True)
class Meaning:
    """One code: the layer that says it, what it means, and the section that lists it."""

    code: str
    layer: str
    meaning: str
    section: str

    def as_json(self) -> dict[str, Any]:
        """For envelopes."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """For people: one fact a line."""
        yield f"{self.code}  (a finding: {self.section})"
        yield f"  meaning    {self.meaning}"
        yield f"  layer      {self.layer}"


def _rows() -> Iterator[Meaning]:
    section = ""
    try:
        text = shipped("docs/findings.md").read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif row := _ROW.match(line.replace("\\|", "\0")):
            meaning = row[3].replace("\0", "|")
            for code in re.findall(r"`([a-z0-9-]+)`", row[1]):
                yield Meaning(code, row[2], re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", meaning), section)


def meanings(code: str) -> list[Meaning]:
    """What the code means; several where several commands say it."""
    return [one for one in _rows() if one.code == code]


def near(code: str) -> list[str]:
    """Codes that are spelt like it."""
    return difflib.get_close_matches(code, [one.code for one in _rows()], n=2, cutoff=0.7)
