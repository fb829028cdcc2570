"""`Schema`: upstream's argument names, types and defaults, and what its parser would take.

The parser modelled is `HfArgumentParser` (transformers/hf_argparser.py) on top of argparse: which
words a field accepts, and with which words it is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["int", "float", "str", "bool", "dict", "choice", "opaque"]

_NEGATIVE_NUMBER = re.compile(r"-\d+\Z|-\d*\.\d+\Z")
_TRUE = {"yes", "true", "t", "y", "1"}
_FALSE = {"no", "false", "f", "n", "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One argument of upstream's.

    `kind` is what each word is converted by; `many` means one flag with several words. `default` is
    None also where only running the module could tell, then `default_text` holds the expression.
    `nullable` fields take the word `none` (TRL's parser only).
    `where` is `file:line` of the definition. `external` names a type that lives in another package.
    """

    name: str
    type: str
    kind: Kind
    many: bool = False
    choices: tuple[Any, ...] = ()
    default: Any = None
    default_text: str | None = None
    required: bool = False
    nullable: bool = False
    owner: str = ""
    where: str = ""
    external: str | None = None

    def refusal(self, words: Sequence[str]) -> str | None:
        """Why upstream's parser would refuse `--name WORDS...`; None where it takes them."""
        if not words:
            return None if self.bare else "expected at least one value, got an empty list"
        if len(words) > 1 and not self.many:
            return f"takes one value, got {len(words)}"
        for word in words:
            if _looks_like_flag(word):
                return f"`{word}` would be read as a flag"
            if (reason := self._word_refusal(word)) is not None:
                return reason
        return None

    @property
    def bare(self) -> bool:
        """Whether the flag may stand without a value, meaning true (`nargs="?"`)."""
        return self.kind == "bool" and ("None" not in self.type or self.default is not None)

    def typed(self, words: Sequence[str]) -> Any:
        """The value that upstream's dataclass will hold, for words that it takes."""
        if not words:
            return True
        values = [self._convert(word) for word in words]
        return values if self.many else values[0]

    def _word_refusal(self, word: str) -> str | None:
        if self.kind == "bool" and word.lower() not in _TRUE | _FALSE:
            return f"expected true or false, got `{word}`"
        if self.kind == "choice" and word not in {str(choice) for choice in self.choices}:
            return f"`{word}` is not one of {', '.join(str(c) for c in self.choices)}"
        if self.choices and self.kind != "choice" and self._convertible(word):
            # `choices` in the field's metadata go straight to argparse
            if self._convert(word) not in self.choices:
                return f"`{word}` is not one of {', '.join(str(c) for c in self.choices)}"
        elif self.kind == "dict" and word:
            return "a mapping cannot be given as a flag, upstream refuses every value"
        elif not self._convertible(word):
            return f"expected {_article(self.kind)}, got `{word}`"
        return None

    def _convertible(self, word: str) -> bool:
        try:
            self._convert(word)
        except (ValueError, OverflowError):
            return False
        return True

    def _convert(self, word: str) -> Any:
        if self.nullable and word.lower() in {"none", "null"}:
            return None
        match self.kind:
            case "int":
                return int(word)
            case "float":
                return float(word)
            case "bool":
                return word.lower() in _TRUE
            case "choice":
                return next((c for c in self.choices if str(c) == word), word)
            case "dict":
                # `type=dict` calls dict("..."), which takes nothing but the empty text
                if word:
                    raise ValueError("a mapping cannot be given as a flag")
                return {}
        return word


def _article(kind: Kind) -> str:
    return {
        "int": "a whole number",
        "float": "a number",
    }.get(kind, "text")


def _looks_like_flag(word: str) -> bool:
    """argparse's own test (`_parse_optional`) for a word that cannot be a value."""
    return (
        len(word) > 1 and word[0] == "-" and not _NEGATIVE_NUMBER.match(word)
        and " " not in word
    )  # fmt: skip


def text(value: Any) -> str:
    """One value as the word that goes on the command line."""
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What one entry script takes, and where that knowledge comes from.

    `version` is a commit or a package version; `digests` are sha256 of the files read.
    """

    backend: str
    stage: str
    script: str
    source: Literal["source", "snapshot"]
    version: str
    fields: Mapping[str, Field]
    digests: Mapping[str, str] = field(default_factory=dict)
    splits: frozenset[str] = frozenset()

    def words(self, name: str, value: Any) -> list[str]:
        """The words after `--name` for a value as the stage file holds it."""
        if isinstance(value, str) and name in self.splits:
            return value.split()
        return [text(item) for item in value] if isinstance(value, list) else [text(value)]

    def flags(self) -> Iterator[str]:
        """Every flag that upstream's parser knows, aliases too."""
        for known in self.fields.values():
            names = [known.name]
            if known.kind == "bool" and known.default is True and not known.many:
                names.append(f"no_{known.name}")
            for name in names:
                yield f"--{name}"
                if "_" in known.name:
                    head = "no-" if name.startswith("no_") and name != known.name else ""
                    yield f"--{head}{known.name.replace('_', '-')}"
        yield from ("--help", "-h")


class Values(Mapping[str, Any]):
    """What upstream's dataclass will hold: the given values, typed, and defaults for the rest."""

    def __init__(self, schema: Schema, given: Mapping[str, Any]) -> None:
        self.schema = schema
        self._given: dict[str, Any] = {}
        for name, value in given.items():
            known = schema.fields.get(name)
            if known is not None and value is not None:
                words = schema.words(name, value)
                if known.refusal(words) is None:
                    self._given[name] = known.typed(words)

    def __getitem__(self, name: str) -> Any:
        if name in self._given:
            return self._given[name]
        return self.schema.fields[name].default

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or `default` where this schema has no such field."""
        return self[name] if name in self.schema.fields else default

    def given(self, name: str) -> bool:
        """Whether the stage file, an override or the launcher set this field."""
        return name in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self.schema.fields)

    def __len__(self) -> int:
        return len(self.schema.fields)


def field_as_json(known: Field) -> dict[str, Any]:
    """A field for the snapshot; keys with their standard value are left out."""
    standard = asdict(Field(name="", type="", kind="str"))
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(known).items()
        if key == "name" or value != standard[key]
    }


def field_from_json(data: Mapping[str, Any]) -> Field:
    """The inverse of `field_as_json`."""
    known = {"type": "", "kind": "str", **data}
    return Field(**{**known, "choices": tuple(known.get("choices", ()))})
