"""launch's own keys of a stage file, as one table: what each takes, its default and what it means.

The reader (`options`), overrides, `launch explain` and the editors' JSON Schema all use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.errors import brief

Kind = Literal["word", "number", "switch", "text", "list", "mapping", "path"]
Fault = tuple[str, str, str | None]
"""Where a value is wrong (`probe.within`), the message, and what to write instead."""

TRAINERS = ("open_instruct", "trl")
"""The names of `backends.BACKENDS`: this table is read before any of them is imported."""
ON, OFF = ("on", "yes", "true"), ("off", "no", "false")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key: the words it knows, the keys of a mapping, and in words what holds without it.

    `switch`: a mapping that can be `off` as a whole. `takes` is said of what the kind does not tell.
    """

    name: str
    kind: Kind
    meaning: str = ""
    words: tuple[str, ...] = ()
    default: str = "none"
    takes: str = ""
    example: str | None = None
    parts: tuple[Key, ...] = ()
    switch: bool = False
    least: int = 1

    @property
    def shape(self) -> str:
        """What it takes, as a phrase."""
        return self.takes or _SHAPES[self.kind]

    def part(self, name: str) -> Key | None:
        """A key of this mapping."""
        return next((one for one in self.parts if one.name == name), None)

    def read(self, value: Any, where: str = "") -> tuple[Any, list[Fault]]:
        """The value, None for a null or faulty one, and what is wrong with it."""
        where = where or self.name
        if value is None:
            return None, []
        if self.switch and (on := as_switch(value)) is not None:
            return ({} if on else False), []
        if self.kind == "mapping":
            return self._read_mapping(value, where)
        found: Any = value
        if self.kind == "word":
            found = as_word(value, self.words)
            if found not in self.words:
                return None, [self._invalid(where, found)]
        elif self.kind == "list":
            found = tuple(value) if isinstance(value, list) else (value,)
            for one in found:
                # a kernel has the name of its repository
                if not isinstance(one, str) or (one not in self.words and "/" not in one):
                    return None, [self._invalid(where, one)]
            if len({*found}) < len(found) or not found:
                return None, [(where, f"`{where}` names each once", self._example(where))]
        elif self.kind == "number":
            found = whole_number(value, self.least)
        elif self.kind == "switch":
            found = as_switch(value)
        elif self.kind == "text":
            found = None if isinstance(value, dict | list) else str(value)
        if found is None:
            limits = f", at most {LARGEST:,}" if self.kind == "number" else ""
            message = f"`{where}` is {self.shape}{limits}, not `{brief(value)}`"
            return None, [(where, message, self._example(where))]
        return found, []

    def _read_mapping(self, value: Any, where: str) -> tuple[Any, list[Fault]]:
        if not isinstance(value, dict):
            message = f"`{where}` is {self.shape}, not `{brief(value)}`"
            return None, [(where, message, self._example(where))]
        values: dict[str, Any] = {}
        faults: list[Fault] = []
        for name, below in value.items():
            part = self.part(str(name))
            if part is None:
                names = tuple(one.name for one in self.parts)
                message = f"unknown key `{brief(name)}` in `{where}`"
                faults.append((f"{where}.{name}", message, nearest(str(name), names)))
                continue
            found, wrong = part.read(below, f"{where}.{part.name}")
            faults += wrong
            if not wrong:
                values[part.name] = found
        return values, faults

    def _invalid(self, where: str, value: Any) -> Fault:
        # a point of the verdict has few states: all are said
        near = "" if "any" in self.words else str(value).lower().replace("-", "_")
        return where, f"invalid value `{brief(value)}` for `{where}`", nearest(near, self.words)

    def _example(self, where: str) -> str | None:
        if self.example is None:
            return None
        above, _, own = where.rpartition(".")
        line = f"{own}: {self.example}"
        return f"write for example `{f'{above}: {{{line}}}' if above else line}`"


def nearest(given: str, names: tuple[str, ...]) -> str:
    """The name that was probably meant, else all of them."""
    near = difflib.get_close_matches(given, names, n=1)
    return f"did you mean `{near[0]}`?" if near else f"one of {', '.join(names)}"


def as_word(value: Any, words: tuple[str, ...]) -> str:
    """The word as its author meant it: a plain `no`, `on` or `true` is a boolean in YAML."""
    if isinstance(value, bool):
        spellings = ON if value else OFF
        return next((word for word in spellings if word in words), spellings[0])
    return str(value)


def as_switch(value: Any) -> bool | None:
    """On or off, as YAML's own bool or in quotes; None for anything else."""
    if isinstance(value, bool):
        return value
    words = {**dict.fromkeys(ON, True), **dict.fromkeys(OFF, False)}
    return words.get(value.lower()) if isinstance(value, str) else None


def whole_number(value: Any, least: int) -> int | None:
    """A whole number from `least` to `LARGEST`, also as text; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        value = int(value)
    valid = isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST
    return value if valid else None


STAGES = ("sft", "dpo")
PAIRED = frozenset({"dpo"})
"""Stages of which a row is a chosen and a rejected answer: two sequences."""
DEEPSPEED = ("zero1", "zero1_fp32_comm", "zero2", "zero2_fp32_comm", "zero3", "zero3_offload")

# What may be expected of each point of a verdict; `any` switches the point off.
EXPECT: Mapping[str, tuple[str, ...]] = {
    "liger": ("engaged", "off", "any"),
    "packing": ("isolated", "on", "off", "any"),
    "attention": (
        "any",
        "eager",
        "sdpa",
        "flex_attention",
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
    ),
    "batch": ("planned", "any"),
    "dataset_cache": ("hit", "miss", "any"),
    "reference_cache": ("hit", "miss", "any"),
    "loss": ("finite", "any"),
    "gradients": ("true", "any"),
    "weights": ("moved", "any"),
    "model": ("saved", "any"),
    "inputs": ("same", "any"),
    "resume": ("continuous", "any"),
    "trend": ("falling", "any"),
    "memory": ("ok", "any"),
    "finish": ("completed", "any"),
}

TABLE: tuple[Key, ...] = (
    Key(name="stage", kind="word", words=STAGES, default="none, it must be given", meaning="the training stage"),
    Key(name="backend", kind="word", words=TRAINERS, default="open_instruct", meaning="the trainer"),
    Key(
        name="script",
        kind="word",
        takes="one of these, or upstream's file name",
        default="the stage's own",
        meaning="which of upstream's scripts of this stage runs",
    ),
    Key(
        name="deepspeed",
        kind="path",
        words=(*DEEPSPEED, "none"),
        takes="one of these words, or the path of a DeepSpeed file",
        meaning="a DeepSpeed config",
    ),
    Key(
        name="attention",
        kind="list",
        words=tuple(name for name in EXPECT["attention"] if name != "any"),
        takes="one implementation or a list in the order of preference, a kernel's repository too; TRL only",
        default="what the trainer chooses",
        example="[flash_attention_2, sdpa]",
        meaning="TRL: attention implementations in the order of preference; the first that can be had is "
        "used, and proved",
    ),
    Key(
        name="mixed_precision",
        kind="word",
        words=("no", "fp16", "bf16"),
        default="bf16 on GPUs, no on the CPU",
        meaning="accelerate's mixed precision",
    ),
    Key(
        name="batch",
        kind="mapping",
        default="the batch numbers below `args:`",
        example="{global: 128, per_device: 16}",
        meaning="rows of an optimizer step; accumulation follows from the number of GPUs",
        parts=(
            Key(name="global", kind="number", meaning="rows per optimizer step, over all devices"),
            Key(name="per_device", kind="number", meaning="rows per device and forward pass"),
        ),
    ),
    Key(
        name="expect",
        kind="mapping",
        takes="a mapping of points of the verdict to states",
        example="{liger: engaged, loss: finite}",
        default="loss finite, memory ok, finish completed, and what the arguments ask for (Liger, packing)",
        meaning="what the verdict holds the run to; `any` switches a point off",
        parts=tuple(Key(name=point, kind="word", words=states) for point, states in EXPECT.items()),
    ),
    Key(
        name="on_violation",
        kind="word",
        words=("stop", "warn"),
        default="stop",
        meaning="what the run does when it is not what `expect` says: stop within the first steps, or warn",
    ),
    Key(
        name="on_hang",
        kind="word",
        words=("report", "stop"),
        default="report",
        meaning="what the run does when nothing moves any more",
    ),
    Key(
        name="probe",
        kind="mapping",
        switch=True,
        takes="off or a mapping",
        example="off",
        default="on, with the numbers above",
        meaning="how the probe watches the run; off starts upstream's script alone",
        parts=(
            Key(
                name="within",
                kind="number",
                default="3",
                example="3",
                meaning="optimizer steps until what is expected must be proved",
            ),
            Key(
                name="isolation",
                kind="switch",
                default="on",
                example="on",
                meaning="test whether packed samples see each other",
            ),
            Key(
                name="hang_factor",
                kind="number",
                default="20",
                example="20",
                meaning="times the median step without anything moving that make a hang",
            ),
            Key(
                name="hang_seconds",
                kind="number",
                default="300",
                example="300",
                meaning="seconds without anything moving that a hang takes at least",
            ),
        ),
    ),
    Key(
        name="rehearse",
        kind="switch",
        default="before what takes long: prepare, a job, a series of runs",
        meaning="whether two steps of the script run on the CPU before it starts, or never do",
    ),
    Key(name="name", kind="text", takes="a word for the run", default="the file's name", meaning="the run's name"),
    Key(
        name="slurm",
        kind="mapping",
        takes="a mapping of sbatch's options, for --slurm",
        meaning="options of sbatch, for --slurm",
    ),
    Key(
        name="gates",
        kind="mapping",
        default="the limits above",
        takes="a mapping of limits of `launch ladder`: a number, `{red: N, yellow: N}` or off",
        meaning="what every rung of `launch ladder` must show",
    ),
    Key(
        name="args",
        kind="mapping",
        takes="a mapping of upstream's arguments",
        default="none: `launch schema` lists them",
        meaning="handed to upstream under exactly these names",
    ),
    Key(
        name="extends",
        kind="path",
        takes="a path, relative to the file that holds it",
        meaning="another stage file, relative to this one, whose keys this one inherits",
    ),
)
KEYS = {key.name: key for key in TABLE}
