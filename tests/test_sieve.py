"""A sieve misses nothing, wherever it lies, and lets little else through."""

from __future__ import annotations

import random

import pytest
from log_lines import LINES

from launcher.evidence import PATTERNS
from launcher.patterns import LEAST
from launcher.sieve import Sieve

SIEVE = Sieve([known.anchors for known in PATTERNS])
# Known only near the beginning and the end of a large log, as what has no anchor is: too short.
BARE = ("MemoryError",)


def bits(block: bytes) -> set[int]:
    found = SIEVE.sift(block)
    return {index for index in range(len(PATTERNS)) if found >> index & 1}


@pytest.mark.parametrize("index", range(len(PATTERNS)))
def test_a_line_is_found_wherever_it_lies(index: int) -> None:
    known = PATTERNS[index]
    lines = LINES.get((known.name, known.needle.decode()), []) if known.anchors else []
    texts = [*(line.encode() for line in lines if line not in BARE), *known.anchors]
    for text in texts:
        for at in range(33):
            for tail in (b"", b"\n", b"abcdefgh\n"):
                assert index in bits(b"x" * at + text + tail), text


def test_prose_holds_next_to_nothing() -> None:
    rng = random.Random(0)
    letters = b"abcdefghijklmnopqrstuvwxyz      .,:-_0123456789"
    block = bytes(rng.choices(letters, k=1 << 20))
    assert bits(block) == set()
    assert bits(rng.randbytes(1 << 20)) <= {i for i, p in enumerate(PATTERNS) if p.name == "saved"}
    assert bits(b"") == set()


def test_few_needles_cost_a_search_of_their_own() -> None:
    short = [anchor for known in PATTERNS for anchor in known.anchors if len(anchor) < LEAST]
    assert len(short) <= 6
