"""Which of many texts a piece of a log may hold, at a cost that does not grow with their number.

Wherever a text of 23 bytes or more stands, one of its words of 8 bytes begins at a multiple of 16.
So it is enough to look at every second word of the piece, all of which one set operation compares
with a word of each text for each way to lie (where there are several, one that few other texts
hold); only what that finds is then searched for. Shorter texts are searched for one by one, where a
rare byte of theirs is in the piece at all.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from launcher.patterns import LEAST

_WORD, _STRIDE = 8, 16
# The bytes of a log, the most common first; all others are rarer.
_COMMON = b" 0123456789etaonisrlcdpmu.,:-_gfhvykbw/'\"INFORAKLPSTE[]()|=%ACDGMU"


class Sieve:
    """The texts of each index, several of which may mean the same."""

    def __init__(self, texts: Sequence[Sequence[bytes]]) -> None:
        long = [(text, 1 << i) for i, alike in enumerate(texts) for text in alike]
        self._short = [(_rarest(text), text, bit) for text, bit in long if len(text) < LEAST]
        long = [(text, bit) for text, bit in long if len(text) >= LEAST]
        common = Counter(word for text, _ in long for word in {*_words(text)})
        self._words: dict[int, int] = {}
        for text, bit in long:
            words = _words(text)
            for at in range(_STRIDE):
                word = min(words[at::_STRIDE], key=common.__getitem__)
                self._words[word] = self._words.get(word, 0) | bit
        self._wanted = frozenset(self._words)

    def sift(self, block: bytes) -> int:
        """A bit for each index of which a text may be in the block; no other index has one there."""
        words = memoryview(block)[: len(block) // _WORD * _WORD].cast("Q")
        found = 0
        for word in self._wanted.intersection(words[:: _STRIDE // _WORD]):
            found |= self._words[word]
        for rare, text, bit in self._short:
            if not found & bit and rare in block and text in block:
                found |= bit
        return found


def _words(text: bytes) -> list[int]:
    return [
        int.from_bytes(text[at : at + _WORD], sys.byteorder) for at in range(len(text) - _WORD + 1)
    ]


def _rarest(text: bytes) -> bytes:
    # of a character of several bytes the last one tells it from others of its kind
    places = range(len(text) - 1, -1, -1)
    at = max(places, key=lambda i: _COMMON.find(text[i]) % (len(_COMMON) + 1))
    return text[at : at + 1]
