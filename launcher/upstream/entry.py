"""The types in which a backend describes an entry script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.upstream.schema import Field

_CITED = re.compile(r"\b[\w/]+\.py:\d+")


@dataclass(frozen=True, slots=True)
class Moved:
    """A key that this script does not have: what became of it, and who says so.

    `to` is the key to write instead (None: nothing replaces it); `why` names the commit, or the other
    stage or backend where the key lives.
    """

    to: str | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How one script spells the ideas that launch itself has to know."""

    model: str = "model_name_or_path"
    data: str
    output: str = "output_dir"
    per_device: str = "per_device_train_batch_size"
    accumulation: str = "gradient_accumulation_steps"
    epochs: str = "num_train_epochs"
    max_steps: str
    max_length: str
    logging_steps: str = "logging_steps"
    liger: str = "use_liger_kernel"
    packing: str | None = "packing"

    @property
    def needed(self) -> frozenset[str]:
        """The fields without which nothing can be planned; Liger and packing came later upstream."""
        return frozenset(
            {self.model, self.data, self.output, self.per_device, self.accumulation, self.epochs}
            | {self.max_steps, self.max_length, self.logging_steps}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry script: where it is, which dataclasses it parses, how it names things.

    `script` is relative to the folder that holds the package. `classes` are (module, class name) in
    the parser's order, for a script that does not show them; `owner` is the one of them to name to
    people. `splits` are list keys whose value may be one text split at blanks. `hints` say what to
    write instead of a value that is refused, or of a key that always is. `derived` are values that
    launch sets where the stage file is silent, each with its reason. `older` are the names that ideas
    had at other commits. `recorders` are functions of upstream's that only write down what they read.
    `instead` says what to write for an argument that nothing reads. `beside` are other scripts that
    parse the same dataclasses. `partial` are switches that end the script early, on purpose: what it
    then leaves unread is no mistake.
    `stage` is what a further script of a stage is one of; the script that a stage starts by itself
    stands under the stage's own name. `torchrun` scripts are started by torchrun alone: no accelerate,
    no DeepSpeed. `models` says where its source lists the models that it can build, as (module, name of
    the mapping) and (module, class whose methods are the configs). `tables` are the mappings of a module in
    which it looks up what arguments name. `flattens`: `packing` lays the rows of a micro-batch behind each
    other, and joins none beforehand. `needs` are distributions that it imports beside the backend's,
    `imports` modules that it imports only when it runs.
    """

    script: str
    classes: tuple[tuple[str, str], ...]
    owner: str
    names: Names
    splits: frozenset[str] = frozenset()
    hints: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, Moved] = field(default_factory=dict)
    derived: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    older: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recorders: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()
    partial: frozenset[str] = frozenset()
    instead: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""
    torchrun: bool = False
    models: tuple[tuple[str, str], tuple[str, str]] | None = None
    tables: tuple[str, tuple[str, ...]] | None = None
    flattens: bool = False
    needs: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()

    def packs(self, values: Mapping[str, Any], per_device: int | None) -> bool:
        """Whether these arguments come to rows of several samples, of `per_device` rows a micro-batch.

        One row alone is packed with nothing, unless rows are joined before they are batched, as by TRL's
        `packing` (trl/trainer/sft_trainer.py:926), or are pairs, as of DPO.
        """
        name = self.names.packing
        joined = bool(name and values.get(name))
        if per_device == 1 and (self.flattens or name == "packing"):
            return joined and not self.flattens
        return joined or bool(values.get("padding_free"))

    def at(self, fields: Mapping[str, Field]) -> Entry:
        """This script at a commit that has these fields: each idea under the name it has there.

        What is said about it and cites a line says that the line is the pin's. Where the script would
        log no step by default, it is told to.
        """
        names = {
            idea: next((name for name in older if name in fields), getattr(self.names, idea))
            for idea, older in self.older.items()
            if getattr(self.names, idea) not in fields
        }
        changed = replace(self.names, **names)
        splits = {changed.data if name == self.names.data else name for name in self.splits}

        def told(text: str) -> str:
            text = text.replace(f"`{self.names.data}:", f"`{changed.data}:")
            return _CITED.sub(r"\g<0> at the pin", text)

        derived = {key: (value, told(text)) for key, (value, text) in self.derived.items()}
        logging = fields.get(changed.logging_steps)
        if logging is not None and logging.default is None and not logging.default_text:
            derived.setdefault(
                logging.name, (1, "the default of this commit prints no loss line at all")
            )
        return replace(
            self, names=changed, splits=frozenset(splits),
            hints={key: told(text) for key, text in self.hints.items()},
            instead={key: told(text) for key, text in self.instead.items()},
            derived=derived,
        )  # fmt: skip
