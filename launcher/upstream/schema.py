"""`Schema`: upstream's argument names, types and defaults, and what its parser would take.

The parser modelled is `HfArgumentParser` (transformers/hf_argparser.py) on top of argparse: which
words a field accepts, and with which words it is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field
from typing import TYPE_CHECKING, Any, Literal

from launcher.config.keys import PAIRED
from launcher.errors import shorten
from launcher.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from launcher.upstream.citations import RuleStanding

Kind = Literal["int", "float", "str", "bool", "dict", "choice", "opaque"]

_NEGATIVE_NUMBER = re.compile(
    r"-\d+$|-\d*\.\d+$"
)  # argparse's own, with its `$`: a line end may follow
_SHOWN = ("name", "type", "many", "choices", "required", "default", "default_text", "owner")
_TRUE = {"yes", "true", "t", "y", "1"}
_FALSE = {"no", "false", "f", "n", "0"}
_EXPECTED = {"int": "a whole number", "float": "a number"}


def shorten_version(version: str) -> str:
    """A version for people: of a commit the first twelve digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", version)


def name_source(backend: str, version: str) -> str:
    """A trainer with its version for people; that of packages names the trainer by itself."""
    named = version.startswith(backend)
    return shorten_version(version) if named else f"{backend} {shorten_version(version)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One argument of upstream's.

    `kind` is what each word is converted by; `many` means one flag with several words. `default` is
    None also where only running the module could tell, then `default_text` holds the expression.
    `nullable` fields take the word `none` (TRL's parser only); `word_optional` ones say so in their
    metadata.
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
    word_optional: bool = False
    nullable: bool = False
    owner: str = ""
    where: str = ""
    external: str | None = None

    def refusal(self, words: Sequence[str]) -> str | None:
        """Why the field cannot hold these words; None where it can (see `Schema.refusal`)."""
        if not words:
            return None if self.bare else "expected at least one value, got an empty list"
        if len(words) > 1 and not self.many:
            return f"takes one value, got {len(words)}"
        return next(filter(None, map(self._refuse_word, words)), None)

    @property
    def bare(self) -> bool:
        """Whether the flag may stand without a value, meaning true (`nargs="?"`)."""
        if self.word_optional:
            return True
        return self.kind == "bool" and ("None" not in self.type or self.default is not None)

    def typed(self, words: Sequence[str]) -> Any:
        if not words:
            return True
        values = [self._convert_word(word) for word in words]
        return values if self.many else values[0]

    def _refuse_word(self, word: str) -> str | None:
        if self.kind == "bool" and word.lower() not in _TRUE | _FALSE:
            return f"expected true or false, got `{shorten(word)}`"
        try:
            value = self._convert_word(word)
        except (ValueError, OverflowError):
            if self.kind == "dict":
                return "a mapping cannot be given as a flag, upstream refuses every value"
            return f"expected {_EXPECTED.get(self.kind, 'text')}, got `{shorten(word)}`"
        # `choices` in the field's metadata go straight to argparse
        choices: Sequence[Any] = self.choices
        if self.kind == "choice":
            value = word
            choices = [str(choice) for choice in choices]
        elif not choices:
            return None
        if value in choices:
            return None
        return f"`{shorten(word)}` is not one of {', '.join(map(str, choices))}"

    def _convert_word(self, word: str) -> Any:
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
            case "dict" if word:
                # `type=dict` calls dict("..."), which takes nothing but the empty text
                raise ValueError
            case "dict":
                return {}
        return word


@dataclass(frozen=True, slots=True)
class Read:
    """One place (`file:line`) where the entry script's path reads an argument.

    `when` are the conditions over arguments that all have to hold there (see `conditions`).
    """

    where: str
    when: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """One `raise` that arguments alone lead to: all of `when` have to hold.

    `parsing` ones stand in `__post_init__`, so that the parser itself refuses.
    """

    where: str
    when: tuple[str, ...]
    error: str
    parsing: bool = False


@dataclass(frozen=True, slots=True)
class Shadow:
    """A read (`file:line`) that is never reached: the arguments `by` take precedence."""

    where: str
    by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Path:
    """What the path of an entry script does with arguments; one without reads is dead."""

    reads: Mapping[str, tuple[Read, ...]] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    shadows: Mapping[str, Shadow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptionString:
    """One option string of upstream's parser: the field it sets; `negated` ones set it to false."""

    name: str
    negated: bool = False


def find_json_fault(value: Any) -> str | None:
    """Why upstream's `__post_init__` cannot read a text as JSON; only one with a brace is tried.

    transformers/training_args.py::_convert_str_dict converts the values in it, and stumbles over
    digits such as `²`.
    """

    if not isinstance(value, str) or not value.startswith("{"):
        return None
    try:
        _convert_numbers(json.loads(value))
    except (ValueError, RecursionError) as error:
        return str(error)
    return None


def _convert_numbers(mapping: dict[str, Any]) -> None:
    for value in mapping.values():
        if isinstance(value, dict):
            _convert_numbers(value)
        elif isinstance(value, str) and value.isdigit():
            int(value)
        elif isinstance(value, str) and value.replace(".", "", 1).isdigit():
            float(value)


def spell_flag(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What one entry script takes, what it does with it, and where that knowledge comes from.

    `version` is a commit or a package version; `digests` are sha256 of the files read. `owner` is
    the dataclass to name to people; `path` what the script reads and refuses. `beside` are the
    reads of other scripts that parse the same dataclasses. `entry` is the script's key among those
    of its backend: the stage's name, but for a further script of the stage. `models` are the hub
    names that it knows, each with its config's name, and `configs` all such names; empty where it
    takes any. `tables` are mappings by name in which it looks up what an argument names: each text,
    with the parameters of the function behind it. `standing` tells whether what a rule cites is as
    it was when the rule was confirmed; None where nothing changed. `behaviours` are what this
    source does, by the names of `behaviour.BEHAVIOURS`.
    """

    backend: str
    stage: str
    script: str
    source: Literal["source", "snapshot"]
    version: str
    fields: Mapping[str, Field]
    digests: Mapping[str, str] = field(default_factory=dict)
    splits: frozenset[str] = frozenset()
    by_file: frozenset[str] = frozenset()
    owner: str = ""
    path: Path = field(default_factory=Path)
    beside: Mapping[str, Mapping[str, tuple[Read, ...]]] = field(default_factory=dict)
    entry: str = ""
    models: Mapping[str, str] = field(default_factory=dict)
    configs: frozenset[str] = frozenset()
    tables: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    standing: RuleStanding | None = field(default=None, compare=False, repr=False)
    behaviours: Mapping[str, bool | None] = field(default_factory=dict)

    def does(self, behaviour: str) -> bool | None:
        """Whether upstream behaves so at this commit; None if neither source nor history tells."""
        return self.behaviours.get(behaviour)

    @property
    def key(self) -> str:
        """What the description and the rules of this script are found under."""
        return self.entry or self.stage

    @property
    def pairs(self) -> bool:
        """Whether a row is a chosen and a rejected answer, as two sequences."""
        return self.stage in PAIRED

    @property
    def tested(self) -> bool:
        """Whether it is a committed snapshot, with which the rules were tested."""
        return self.source == "snapshot"

    @property
    def named(self) -> str:
        return shorten_version(self.version)

    def as_json(self) -> dict[str, object]:
        fields: list[dict[str, object]] = []
        for name, argument in self.fields.items():
            shown: dict[str, object] = {key: getattr(argument, key) for key in _SHOWN}
            shown |= {"choices": list(argument.choices), "defined": argument.where, "reads": None}
            reads = self.path.reads.get(name)
            if reads is not None:
                shown["reads"] = [{"where": read.where, "when": list(read.when)} for read in reads]
            fields.append(shown)
        return {
            "stage": self.stage,
            "backend": self.backend,
            "script": self.script,
            "version": self.version,
            "fields": fields,
        }

    def words(self, name: str, value: Any) -> list[str]:
        """The words after `--name` for a value as the stage file holds it."""
        if isinstance(value, str) and name in self.splits:
            return value.split()
        return (
            [spell_flag(item) for item in value] if isinstance(value, list) else [spell_flag(value)]
        )

    def in_file(self, name: str, value: Any) -> bool:
        """Whether a value goes into the trainer's config file: a flag would refuse or change it.

        trl/scripts/utils.py::TrlParser.set_defaults_with_config.apply_defaults[action.default]
        makes it the default of the argument, and argparse converts defaults only where they are
        texts: a list of mappings stays one, and a whole number is not made a float.
        """
        if name not in self.by_file:
            return False
        argument = self.fields[name]
        if argument.kind == "float":
            return isinstance(value, int) and not isinstance(value, bool)
        if not isinstance(value, list):
            return False
        if argument.many:
            return any(isinstance(item, dict) for item in value)
        # a list of one is the same as its word
        # (transformers/training_args.py::TrainingArguments.__post_init__[elif not isinstance])
        return len(value) != 1

    def refusal(self, name: str, words: Sequence[str]) -> str | None:
        """Why upstream's parser would refuse `--name WORDS...`; None if it takes them."""
        for word in words:
            if self._reads_as_flag(word):
                return f"`{shorten(word)}` would be read as a flag"
        return self.fields[name].refusal(words)

    def flags(self) -> dict[str, OptionString | None]:
        """Every flag that upstream's parser knows, in its order; None for help."""
        flags: dict[str, OptionString | None] = {"-h": None, "--help": None}
        for name, argument in self.fields.items():
            dashed = name.replace("_", "-")
            option = OptionString(name)
            flags[f"--{name}"] = option
            flags[f"--{dashed}"] = option
            if argument.kind == "bool" and argument.default is True and not argument.many:
                negation = OptionString(name, negated=True)
                flags[f"--no_{name}"] = negation
                flags[f"--no-{dashed}"] = negation
        return flags

    def taken_as(self, key: str) -> OptionString | None:
        """What argparse takes `--key` for: an alias, or the only flag that starts like this."""
        flags = self.flags()
        if f"--{key}" in flags:
            return flags[f"--{key}"]
        # two spellings of one field are still two flags: argparse calls that ambiguous
        matches = [flag for flag in flags if flag.startswith(f"--{key}")]
        return flags[matches[0]] if len(matches) == 1 else None

    def _reads_as_flag(self, word: str) -> bool:
        """argparse's own test (`_parse_optional`) for a word that cannot be a value."""
        if len(word) < 2 or word[0] != "-":
            return False
        head = word.partition("=")[0]
        flags = self.flags()
        if head in flags or word.startswith("-h"):
            return True
        if word.startswith("--") and any(flag.startswith(head) for flag in flags):
            return True
        return not _NEGATIVE_NUMBER.match(word) and " " not in word


class NoSuchField(KeyError):
    """The source at this commit has no field of that name."""


class Values(Mapping[str, Any]):
    """What upstream's dataclass will hold: the given values, typed, and defaults for the rest."""

    def __init__(self, schema: Schema, written: Mapping[str, Any]) -> None:
        self.schema = schema
        self._given: dict[str, Any] = {}
        for name, value in written.items():
            if name not in schema.fields or value is None:
                continue
            if schema.in_file(name, value):
                self._given[name] = value
                continue
            words = schema.words(name, value)
            if schema.refusal(name, words) is None:
                self._given[name] = schema.fields[name].typed(words)

    def __getitem__(self, name: str) -> Any:
        if name in self._given:
            return self._given[name]
        if name not in self.schema.fields:
            raise NoSuchField(name)
        return self.schema.fields[name].default

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or `default` where this schema has no such field."""
        return self[name] if name in self.schema.fields else default

    def given(self, name: str) -> bool:
        return name in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self.schema.fields)

    def __len__(self) -> int:
        return len(self.schema.fields)


def render_field(argument: Field) -> dict[str, object]:
    """A field for the snapshot; keys with their standard value are left out."""
    standard = asdict(Field(name="", type="", kind="str"))
    data: dict[str, object] = {}
    for key, value in asdict(argument).items():
        if key == "name" or value != standard[key]:
            data[key] = list(value) if isinstance(value, tuple) else value
    return data


def parse_field(data: Mapping[str, Any]) -> Field:
    return Field(**{"type": "", "kind": "str", **data, "choices": tuple(data.get("choices", ()))})
