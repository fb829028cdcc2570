"""The types in which a backend describes an entry script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from launcher.lazy_dataclass import dataclass
from launcher.upstream.schema import Field, Values

Checkpoints = Literal["accelerate", "transformers"]
Packing = Literal["flattened", "paired", "refilled", "one-row", "padded", "always"]
"""What packing makes of a micro-batch: its rows behind each other (`paired`: two sequences a row,
so that one row is packed too); full rows, made before batching (`always`: whatever the arguments
say); one row of a rank's whole step; or still padded rows.
"""

_CITED = re.compile(r"\b[\w/]+\.py::[\w.]*(?:\[[^\]]*\])?")

DATA_FILE = "train_file"
"""What open-instruct called a file of rows; no script has it any more."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A key that this script does not have: what became of it, and who says so.

    `to` is the key to write instead (None: nothing replaces it); `why` names the commit, or the
    other stage or backend where the key lives.
    """

    to: str | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A key that is gone and that changed what was trained: deleting it does not bring that back.

    `did` is what it did, `now` what holds without it, `instead` what to do. With the values of
    `harmless` it did nothing.
    """

    did: str
    now: str
    instead: str
    harmless: tuple[str, ...] = ("false",)

    def mattered(self, value: object) -> bool:
        text = str(value).strip().strip("'\"").lower()
        return text not in {"none", "null", "", *self.harmless}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How a script spells the ideas that launch has to know; None if it has no such argument.

    `shared` says how many GPUs work on one row; `resume` names the checkpoint to start from,
    `exact_output` puts the model into the output folder itself, `recompute_needs` is what
    recomputing activations needs.
    """

    model: str = "model_name_or_path"
    data: str
    output: str = "output_dir"
    per_device: str = "per_device_train_batch_size"
    accumulation: str = "gradient_accumulation_steps"
    epochs: str = "num_train_epochs"
    max_steps: str
    max_length: str
    logging_steps: str = "logging_steps"
    liger: str | None = "use_liger_kernel"
    packing: str | None = "packing"
    shared: str = "sequence_parallel_size"
    save_every: str
    save_strategy: str | None = None
    resume: str | None = None
    exact_output: str | None = None
    recompute_needs: str | None = None

    @property
    def needed(self) -> frozenset[str]:
        """The fields without which nothing can be planned: Liger and packing came later."""
        return frozenset(
            {self.model, self.data, self.output, self.per_device, self.accumulation, self.epochs}
            | {self.max_steps, self.max_length, self.logging_steps}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release of a trainer that launch knows: it has a snapshot, and rules are held against it.

    `version` is a full commit, or the versions of packages; `date` (YYYY-MM-DD) that of a commit,
    "" of packages.
    """

    version: str
    snapshot: str
    date: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenisingPhase:
    """How launch lets a script tokenise its data in a separate start, before any GPU is taken.

    `arguments` make it do that alone. `columns` are those of the set that it makes, whatever
    `target_columns` says. `place` is where the training looks, by the folder of that set in the
    cache; `is_complete` whether all is there.
    """

    arguments: Mapping[str, Any]
    columns: tuple[str, ...]
    place: Callable[[Path, Values], Path]
    is_complete: Callable[[Path], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPhase:
    """What the probe does once the training is over: it writes the model as transformers reads it.

    `function` is one of `probe/models/exporting.py`; `settings` are what it needs to know, by the
    typed values; None where there is no way.
    """

    function: str
    settings: Callable[[Values], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalRecipe:
    """How a script is rehearsed: two steps in one process on a CPU.

    `values` are arguments that this takes. `parses` is the method of its parser that the script
    calls, `trainer` the class of its library that it builds. `adapts` names a function of
    `workflows/rehearse/inside` that makes the script's model small. Where it `imports_others`, what
    it imports for the sake of other scripts may be absent.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    parses: str = "parse_args_into_dataclasses"
    trainer: str = ""
    adapts: str = ""
    imports_others: bool = False


def _read_output_dir(values: Values) -> Path | None:
    folder = values["output_dir"]
    return Path(str(folder)) if folder else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry script: where it is, which dataclasses it parses, how it names things.

    `script` is relative to the folder that holds the package, `renamed` what it is called where a
    checkout has that file (upstream's issue 1827 announces it; the old name then only points
    there). `classes` are (module, class name) in the parser's order, for a script that does not
    show them; `owner` is the one of them to name to people. `splits` are list keys whose value may
    be one text split at blanks. `by_file` are those whose values a config file of the trainer's can
    hold where no flag can. `hints` say what to write instead of a value that is refused, or of a
    key that always is. `lost` are keys that are gone and changed what was trained. `derived` are
    values that launch sets where the stage file is silent, each with its reason. `older` are the
    names that ideas had at other commits. `recorders` are functions of upstream's that only write
    down what they read. `instead` says what to write for an argument that nothing reads. `beside`
    are other scripts that parse the same dataclasses. `partial` are switches that end the script
    early, on purpose: what it then leaves unread is no mistake.

    `stage` is what a further script of a stage is one of; the script that a stage starts by itself
    stands under the stage's own name. `models` says where its source lists the models that it can
    build, as (module, name of the mapping) and (module, class whose methods are the configs);
    `own_shapes` is the mapping of configs that it has beside the library's, at commits that have
    one. `tables` are the mappings of a module in which it looks up what arguments name. `needs` are
    distributions that it imports beside the backend's, `imports` modules that it imports only when
    it runs. `settle` gives further derived values, by the typed values and the number of GPUs;
    `rehearsal` is how it is rehearsed, None where it cannot be. `rules` is the module of
    `launcher.rules` that holds all its rules; without one a script has those of its stage.
    `behaves_as` is the key of the script whose behaviours (`behaviour.py`) it shares, where it has
    none of its own.

    What runs inside: `watchers` are functions of `probe/watching` by the module that each watches,
    beside those of the libraries that every script may use; `stand_ins` those that supply what a
    module lacks on a CPU.

    Its phases: `tokenising` before the training, in a process of its own, and `export` after it.

    How it starts: `launcher`; whether one GPU without DeepSpeed is not enough
    (`needs_process_group`). Its loop: `loop` is the library that counts steps, saves states and
    resumes from them; `drops_last` an epoch's last batch that is not full; `divides_loss` the loss
    of each micro-batch by their number, or by the tokens of all; `zero_is_limit`: no step at all is
    a limit; `skips_each_epoch`: after a resume, every later epoch skips batches too;
    `epoch_checkpoints`: it can save one an epoch; `unjudged` is a pattern of states that it resumes
    from by itself, and launch does not read; `ends_after` are switches after which it ends without
    a model, and after what; `output` is the folder of the output, by the typed values, and
    `final_model` that of the model below it.

    Memory: `sharding`; `own_precision`: its arguments decide, not accelerate's; `dtype` of loaded
    weights, and `liger_dtype` under Liger, `strict_liger`: which crashes for models without
    kernels; `attentions` are its names for torch's own and for flash-attn's, `best_attention`: it
    takes the best that is installed where none is named; `tiled_loss`, `reentrant` checkpointing.
    DPO: `caches_reference` before the first step; `without_reference` are losses that take none;
    `whole_model`: it fetches the model's whole repository.
    """

    script: str
    renamed: str = ""
    classes: tuple[tuple[str, str], ...]
    owner: str
    names: Names
    splits: frozenset[str] = frozenset()
    by_file: frozenset[str] = frozenset()
    hints: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, Moved] = field(default_factory=dict)
    lost: Mapping[str, Lost] = field(default_factory=dict)
    derived: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    older: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recorders: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()
    partial: frozenset[str] = frozenset()
    instead: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""
    models: tuple[tuple[str, str], tuple[str, str]] | None = None
    own_shapes: tuple[str, str] | None = None
    tables: tuple[str, tuple[str, ...]] | None = None
    needs: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    rules: str = ""
    behaves_as: str = ""
    watchers: Mapping[str, str] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    rehearsal: RehearsalRecipe | None = RehearsalRecipe()
    settle: Callable[[Values, int], Iterable[tuple[str, Any, str]]] = lambda values, gpus: ()
    tokenising: TokenisingPhase | None = None
    export: ExportPhase | None = None
    launcher: Literal["accelerate", "torchrun"] = "accelerate"
    needs_process_group: bool = False
    loop: Literal["accelerate", "transformers", "olmo_core"]
    drops_last: bool = False
    divides_loss: bool = False
    zero_is_limit: bool = True
    skips_each_epoch: bool = False
    epoch_checkpoints: bool = False
    ends_after: Mapping[str, str] = field(default_factory=dict)
    unjudged: str = ""
    output: Callable[[Values], Path | None] = _read_output_dir
    final_model: str = ""
    packing: Packing
    sharding: Literal["deepspeed", "fsdp"] = "deepspeed"
    own_precision: bool = False
    dtype: str
    liger_dtype: str
    strict_liger: bool = False
    attentions: tuple[str, str] = ("torch", "flash_2")
    best_attention: bool = False
    tiled_loss: bool = False
    reentrant: bool = False
    caches_reference: bool = False
    without_reference: tuple[str, ...] = ()
    whole_model: bool = False

    @property
    def runs_on_cpu(self) -> bool:
        """Whether it runs on a CPU without what the probe supplies there."""
        return not self.stand_ins

    @property
    def mixes(self) -> bool:
        """Whether its data are a list of sets, each with an amount; else one set."""
        return self.names.data in self.splits

    @property
    def by_trainer(self) -> bool:
        """Whether transformers' Trainer runs the steps: it divides each loss, fills in what is
        `auto` in a DeepSpeed config, and finds its place in the data by the number of the step.
        """
        return self.loop == "transformers"

    @property
    def saves_last_step(self) -> bool:
        """Whether the loop saves its state at the end of training too, whatever the step."""
        return self.loop != "accelerate"

    @property
    def keeps_every_state(self) -> bool:
        """Whether no saved state is ever deleted, and each holds weights and moments in 32 bits."""
        return self.loop == "olmo_core"

    @property
    def scales_positions(self) -> bool:
        """Whether the script's own arguments scale the rotary embedding
        (olmo_core_utils.py::setup_model).
        """
        return self.loop == "olmo_core"

    @property
    def counts_in_script(self) -> bool:
        """Whether the script itself counts its steps after a resume; other loops are exact."""
        return self.loop == "accelerate"

    def liger(self, values: Mapping[str, Any]) -> bool:
        return bool(self.names.liger and values.get(self.names.liger))

    def recomputes(self, values: Mapping[str, Any]) -> bool:
        """Whether activations are computed again: open-instruct's DPO asks by its memory budget."""
        if self.selects_modules(values):
            return True
        needed = self.names.recompute_needs
        if needed is not None and not values.get(needed):
            return False
        budget = values.get("activation_memory_budget")
        if isinstance(budget, int | float):
            # dpo_tune_cache.py::main[if args.use_lora]
            is_plain_lora = bool(values.get("use_lora")) and not values.get("use_qlora")
            return budget < 1 and not is_plain_lora
        return bool(values.get("gradient_checkpointing"))

    def selects_modules(self, values: Mapping[str, Any]) -> bool:
        """Whether modules are computed again by their names, without a budget or torch.compile
        (olmo_core_utils.py::build_ac_config). The other scripts have the argument and do not read
        it.
        """
        return (
            self.loop == "olmo_core"
            and values.get("activation_checkpointing_mode") == "selected_modules"
        )

    def packs(self, values: Mapping[str, Any], per_device: int | None) -> bool:
        """Whether these arguments pack samples into rows, `per_device` rows a micro-batch.

        One row alone is packed with nothing, unless rows are joined before they are batched, as by
        TRL's `packing`
        (trl/trainer/sft_trainer.py::SFTTrainer.__init__[if args.per_device_train_batch_size]), or
        are pairs, as of DPO.
        """
        if self.packing == "always":
            return True
        joined = bool(self.names.packing and values.get(self.names.packing))
        if per_device == 1 and self.packing != "padded":
            return joined and self.packing != "flattened"
        return joined or bool(values.get("padding_free"))

    def joins_rows(self, values: Mapping[str, Any]) -> bool:
        """Whether several samples may stand in a row, however few rows a micro-batch has."""
        return self.packing == "always" or bool(values.get("packing") or values.get("padding_free"))

    def fills_rows(self, values: Mapping[str, Any]) -> bool:
        """Whether full rows are made of the samples before they are counted into batches."""
        return self.packing == "always" or (
            self.packing == "refilled" and bool(values.get("packing"))
        )

    def takes_one_row(self, values: Mapping[str, Any]) -> bool:
        """Whether a step of a rank is one packed row, however many samples it holds."""
        return self.packing == "one-row" and bool(values.get("packing"))

    def repacks(self, values: Mapping[str, Any]) -> bool:
        """Whether rows are put together before they are counted into batches."""
        return self.fills_rows(values) or self.takes_one_row(values)

    def at(self, fields: Mapping[str, Field]) -> Entry:
        """This script at a commit that has these fields: each idea under the name it has there.

        A text that cites a line then says that the line is the pin's. Where the script would
        log no step by default, launch sets the interval.
        """
        names = {}
        for idea, older in self.older.items():
            name = getattr(self.names, idea)
            if name not in fields:
                names[idea] = next((old for old in older if old in fields), name)
        changed = replace(self.names, **names)
        splits = {changed.data if name == self.names.data else name for name in self.splits}

        def cite(text: str) -> str:
            text = text.replace(f"`{self.names.data}:", f"`{changed.data}:")
            return _CITED.sub(r"\g<0> at the pin", text)

        derived = {key: (value, cite(text)) for key, (value, text) in self.derived.items()}
        logging = fields.get(changed.logging_steps)
        if logging is not None and logging.default is None and not logging.default_text:
            derived.setdefault(
                logging.name, (1, "the default of this commit prints no loss line at all")
            )
        return replace(
            self,
            names=changed,
            splits=frozenset(splits),
            hints={key: cite(text) for key, text in self.hints.items()},
            instead={key: cite(text) for key, text in self.instead.items()},
            derived=derived,
        )
