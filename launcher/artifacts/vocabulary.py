"""The tokens that a tokenizer's files give ids, as transformers counts them once it is loaded.

Compared with transformers 5.17: what `added_tokens_decoder`, added_tokens.json or the special
tokens of tokenizer_config.json name beside tokenizer.json gets the next free id, whatever number is
written there.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.files import read_bytes, read_json
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_file

_LARGEST = 2**26
# quotes inside of a word are escaped
_WORDS = re.compile(r'"vocab"\s*:\s*[\[{]')
_ADDED = re.compile(r'"added_tokens"\s*:\s*\[')
_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """How many ids a tokenizer uses, from 0 on; those that were added to its own vocabulary, by
    their token.

    `special` has the token of each role, such as `pad_token`.
    """

    size: int
    added: Mapping[str, int]
    special: Mapping[str, str]

    def beyond(self, rows: int) -> list[str]:
        """The added tokens whose id has no row in an embedding of so many."""
        return [token for token, index in self.added.items() if index >= rows]


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of a tokenizer's folder; None where its files do not tell, as with code of its
    own.
    """
    path = folder / "tokenizer.json"
    if not is_file(path):
        return None
    status = path.stat()
    base = _read_base(path, status.st_mtime_ns, status.st_size)
    if base is None:
        return None
    config = read_json(folder / "tokenizer_config.json")
    if "auto_map" in config:
        return None
    special = dict(_list_special_tokens(config))
    tokens = [
        *base.added,
        *_list_added_tokens(folder, config),
        *special.values(),
        *_list_extra_tokens(config),
    ]
    added: dict[str, int] = {}
    for token in tokens:
        if token not in base.own and token not in added:
            added[token] = base.next_id + len(added)
    return Vocabulary(size=base.next_id + len(added), added=added, special=special)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What tokenizer.json holds: its own words, the tokens added to them, and the first id behind
    the words.
    """

    own: frozenset[str]
    added: tuple[str, ...]
    next_id: int


@functools.lru_cache(maxsize=4)
def _read_base(path: Path, _changed: int, _size: int) -> _Base | None:
    """Two parts of the file alone are parsed: all of a large one takes half a second, most of it
    for its merges.
    """
    try:
        text = read_bytes(path, _LARGEST).decode()
        words = _parse_value(text, _WORDS)
        entries = _parse_value(text, _ADDED)
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(words, dict):
        own = frozenset(words)
        ids = [index for index in words.values() if isinstance(index, int)]
        next_id = max(ids, default=-1) + 1
    elif isinstance(words, list):
        # each with its score
        own = frozenset(str(word[0]) for word in words if isinstance(word, list) and word)
        next_id = len(words)
    else:
        return None
    added: list[str] = []
    if isinstance(entries, list):
        for entry in entries:
            if isinstance(entry, dict):
                added.append(str(entry.get("content")))
    return _Base(own=own, added=tuple(added), next_id=next_id)


def _parse_value(text: str, beginning: re.Pattern[str]) -> Any:
    """The value of the first key that looks like this; None without one. Raises ValueError."""
    match = beginning.search(text)
    if match is None:
        return None
    value, _ = json.JSONDecoder().raw_decode(text, match.end() - 1)
    return value


def _list_added_tokens(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for entry in decoder.values():
            yield from _read_content(entry)
    yield from read_json(folder / "added_tokens.json")


def _list_special_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for role in _SPECIAL:
        for token in _read_content(config.get(role)):
            yield role, token


def _list_extra_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    """The further special tokens: those of the older name count without the newer one."""
    listed = config.get("extra_special_tokens", config.get("additional_special_tokens"))
    if isinstance(listed, dict):
        listed = list(listed.values())
    if not isinstance(listed, list):
        return
    for entry in listed:
        yield from _read_content(entry)


def _read_content(entry: Any) -> Iterator[str]:
    if isinstance(entry, dict):
        entry = entry.get("content")
    if isinstance(entry, str) and entry:
        yield entry
