"""launch's own keys of a stage file, as one table: what each takes, its default and what it means.

The reader (`options`), overrides, `launch explain` and the editors' JSON Schema all use it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from launcher.config.points import ATTENTIONS, BY_NAME, DEFAULTS, POINTS, PointType
from launcher.errors import shorten
from launcher.lazy_dataclass import dataclass

Kind = Literal["word", "number", "switch", "text", "list", "mapping", "path"]


class KeyFault(NamedTuple):
    """Where a value is wrong (`probe.within`), the message, and what to write instead."""

    where: str
    message: str
    help: str | None = None


TRAINERS = ["open_instruct", "trl"]
"""The names of `trainers.BACKENDS`: this table is read before any of them is imported."""
ON = ("on", "yes", "true")
OFF = ("off", "no", "false")
LARGEST = 999_999_999
_SHAPES: Mapping[Kind, str] = {
    "word": "one of these words",
    "number": "a whole number above 0",
    "switch": "on or off",
    "text": "a word",
    "list": "a word or a list of words",
    "mapping": "a mapping",
    "path": "a path",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key: the words it knows, the keys of a mapping, and in words what holds without it.

    `switch`: a mapping that can be `off` as a whole. `takes` is said of what the kind does not
    tell.
    """

    name: str
    kind: Kind
    meaning: str = ""
    default: str = "none"
    takes: str = ""
    words: Sequence[str] = ()
    parts: Sequence[Key] = ()
    switch: bool = False
    least: int = 1

    @property
    def shape(self) -> str:
        return self.takes or _SHAPES[self.kind]

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.name,
            "type": self.shape,
            "default": self.default,
            "meaning": self.meaning,
            "words": list(self.words),
            "parts": [part.as_json() for part in self.parts],
        }

    def read(self, value: Any, where: str = "") -> tuple[Any, list[KeyFault]]:
        """The value, None for a null or faulty one, and what is wrong with it."""
        where = where or self.name
        if value is None:
            return None, []
        if self.switch:
            is_on = _parse_switch(value)
            if is_on is False:
                return False, []
            if is_on is True:
                return {}, []
        if self.kind == "mapping" and isinstance(value, dict):
            return self._read_parts(value, where)
        if self.kind == "list":
            return self._read_words(value, where)
        result: Any = None
        match self.kind:
            case "word":
                result = _spell_word(value, self.words)
                if result not in self.words:
                    return None, [self._refuse_value(where, result)]
            case "number":
                result = _parse_whole_number(value, self.least)
            case "switch":
                result = _parse_switch(value)
            case "text" if not isinstance(value, dict | list):
                result = str(value)
        if result is not None:
            return result, []
        shape = self.shape
        if self.kind == "number":
            shape += f", at most {LARGEST:,}"
        message = f"`{where}` is {shape}, not `{shorten(value)}`"
        return None, [KeyFault(where, message)]

    def _read_words(self, value: Any, where: str) -> tuple[Any, list[KeyFault]]:
        words = [value]
        if isinstance(value, list):
            words = value
        for word in words:
            # a kernel has the name of its repository
            is_kernel = isinstance(word, str) and "/" in word
            if word not in self.words and not is_kernel:
                return None, [self._refuse_value(where, word)]
        if not words or len(set(words)) < len(words):
            return None, [KeyFault(where, f"`{where}` names each once")]
        return tuple(words), []

    def _read_parts(
        self, value: dict[str, Any], where: str
    ) -> tuple[dict[str, Any], list[KeyFault]]:
        parts = {part.name: part for part in self.parts}
        values: dict[str, Any] = {}
        faults: list[KeyFault] = []
        for name, below in value.items():
            place = f"{where}.{name}"
            if name not in parts:
                message = f"unknown key `{shorten(name)}` in `{where}`"
                help = suggest_name(str(name), tuple(parts))
                faults.append(KeyFault(place, message, help))
                continue
            result, wrong = parts[name].read(below, place)
            faults += wrong
            if not wrong:
                values[name] = result
        return values, faults

    def _refuse_value(self, where: str, value: Any) -> KeyFault:
        word = str(value).lower().replace("-", "_")
        if "any" in self.words:
            # a point of the verdict has few states: all are said
            word = ""
        message = f"invalid value `{shorten(value)}` for `{where}`"
        return KeyFault(where, message, suggest_name(word, self.words))


def suggest_name(name: str, names: Sequence[str]) -> str:
    """The name that was probably meant, else all of them."""
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"one of {', '.join(names)}"


def _spell_word(value: Any, words: Sequence[str]) -> str:
    """The word as its author meant it: a plain `no`, `on` or `true` is a boolean in YAML."""
    if not isinstance(value, bool):
        return str(value)
    spellings = OFF
    if value:
        spellings = ON
    for spelling in spellings:
        if spelling in words:
            return spelling
    return spellings[0]


def _parse_switch(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        return None
    word = value.lower()
    if word in ON:
        return True
    if word in OFF:
        return False
    return None


def _parse_whole_number(value: Any, least: int) -> int | None:
    """A whole number from `least` to `LARGEST`, also as text."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if least <= value <= LARGEST:
        return value
    return None


STAGES = ("sft", "dpo")
PAIRED = frozenset({"dpo"})
"""Stages of which a row is a chosen and a rejected answer: two sequences."""
DEEPSPEED = ("zero1", "zero1_fp32_comm", "zero2", "zero2_fp32_comm", "zero3", "zero3_offload")
EXPECT = {point.name: point.states for point in POINTS}
"""What may be expected of each point of a verdict; `any` switches the point off."""
_EXPECT_KEYS = [Key(point.name, "word", words=point.states) for point in POINTS]

_BATCH = (
    Key("global", "number", "rows per optimizer step, over all devices"),
    Key("per_device", "number", "rows per device and forward pass"),
)
_PROBE = (
    Key("within", "number", "optimizer steps after which every expectation must be proved", "3"),
    Key("isolation", "switch", "test whether packed samples see each other", "on"),
    Key("hang_factor", "number", "a hang is this many median steps without progress", "20"),
    Key("hang_seconds", "number", "and at least this many seconds without progress", "300"),
)
TABLE = (
    Key("stage", "word", "the training stage", "none, it must be given", words=STAGES),
    Key("backend", "word", "the trainer", "open_instruct", words=TRAINERS),
    Key(
        "script",
        "word",
        "the script of this stage that runs",
        "the stage's own",
        "one of these, or its file name",
    ),
    Key(
        "deepspeed",
        "path",
        "a DeepSpeed config",
        takes="one of these words, or a path",
        words=(*DEEPSPEED, "none"),
    ),
    Key(
        "attention",
        "list",
        "TRL: attention implementations in the order of preference; the first that is available "
        "is used, and proved",
        "what the trainer chooses",
        "one implementation or a list in the order of preference, a kernel's repository too; "
        "TRL only",
        ATTENTIONS,
    ),
    Key(
        "mixed_precision",
        "word",
        "mixed precision",
        "bf16 on GPUs, no on the CPU",
        words=("no", "fp16", "bf16"),
    ),
    Key(
        "batch",
        "mapping",
        "rows of an optimizer step; accumulation follows from the number of GPUs",
        "the batch numbers below `args:`",
        "a mapping of `global` and `per_device`",
        parts=_BATCH,
    ),
    Key(
        "expect",
        "mapping",
        "what the verdict expects of the run; `any` switches a point off",
        "loss finite, memory ok, finish completed, and what the arguments ask for (Liger, packing)",
        "a mapping of points of the verdict to states",
        parts=_EXPECT_KEYS,
    ),
    Key(
        "on_violation",
        "word",
        "what the run does when it violates `expect`",
        "stop",
        words=("stop", "warn"),
    ),
    Key("on_hang", "word", "what the run does when it hangs", "report", words=("report", "stop")),
    Key(
        "probe",
        "mapping",
        "how the probe watches the run; off starts upstream's script alone",
        "on, with the numbers above",
        "off or a mapping",
        parts=_PROBE,
        switch=True,
    ),
    Key(
        "rehearse",
        "switch",
        "whether two steps of the script run on the CPU before it starts, or never do",
        "before what takes long: prepare, a job, a series of runs",
    ),
    Key(
        "samples",
        "number",
        "prompts of the data set that the model answers once it is trained, and its base beside "
        "it, for the report",
        takes="a whole number",
        least=0,
    ),
    Key("name", "text", "the run's name", "the file's name", "a word for the run"),
    Key("slurm", "mapping", "options of sbatch, for --slurm"),
    Key(
        "gates",
        "mapping",
        "what every rung of `launch ladder` must show",
        "the limits above",
        "a mapping of limits of `launch ladder`: a number, `{red: N, yellow: N}` or off",
    ),
    Key(
        "args",
        "mapping",
        "upstream's arguments under exactly their names",
        "none: `launch schema` lists them",
    ),
    Key(
        "extends", "path", "another stage file, relative to this one, whose keys this one inherits"
    ),
)
KEYS = {key.name: key for key in TABLE}


def register_point(point: PointType) -> None:
    """Add a point to the verdict of every run. `expect:` takes its states."""
    POINTS.append(point)
    BY_NAME[point.name] = point
    if point.default is not None:
        DEFAULTS[point.name] = point.default
    EXPECT[point.name] = point.states
    _EXPECT_KEYS.append(Key(point.name, "word", words=point.states))


_EVAL = (
    Key(
        "command",
        "list",
        "the words of the command; `{model}` is the folder of the stage's model",
        takes="a list",
    ),
    Key(
        "metrics",
        "path",
        "the JSON file with its numbers, or a pattern for it, below the evaluation's folder",
    ),
    Key(
        "expect", "mapping", "gates", takes='a mapping of metrics to what they must be: `">= 0.4"`'
    ),
    Key("timeout", "text", "how long it may take", "24h", "a duration such as 90s, 10m or 1h30m"),
)
PIPELINE_TABLE = (
    Key("name", "text", "the name of the pipeline, or of a stage in it", "the name of its file"),
    Key("gpus", "number", "GPUs of every stage, or of one; 0 is the CPU", "--gpus", "a number"),
    Key(
        "stages",
        "list",
        "the stages in their order",
        "none, it must be given",
        "a list of mappings, or of stage files",
    ),
    Key(
        "config",
        "path",
        "the stage file of a stage",
        "none, it must be given",
        "a path relative to the pipeline file",
    ),
    Key("stage", "word", "the training stage", "as the stage file says", words=STAGES),
    Key(
        "from",
        "text",
        "the earlier stage whose model this one starts from",
        "the stage before",
        "a name, or none",
    ),
    Key(
        "with",
        "mapping",
        "changes of the stage file",
        takes="a mapping of keys to values: {learning_rate: 1e-5}",
    ),
    Key(
        "eval",
        "mapping",
        "a command that measures the stage's model, and what its metrics must be",
        parts=_EVAL,
    ),
)
PIPELINE = {key.name: key for key in PIPELINE_TABLE}
"""The keys of pipeline files, those of one stage among them."""
