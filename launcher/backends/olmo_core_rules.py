"""Rules for open-instruct's second DPO script, dpo.py: OLMo-core models under FSDP.

What it refuses by a `raise` is found by reading it (`noops.refused`); these say it better, and say what
nobody raises for. Line numbers are those of the pin, and of the pinned OLMo-core where they name it.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from launcher import shapes
from launcher.backends import (
    loading_rules,
    model_config,
    model_files,
    model_rules,
    service_rules,
)
from launcher.backends.context import Context, StageRule, caches_only
from launcher.backends.data_rules import tokenising_outlasts
from launcher.backends.mixer_rules import RULES as MIXER_RULES
from launcher.backends.open_instruct import output_folder
from launcher.backends.open_instruct_rules import (
    beaker_without_push,
    entity_twice,
    json_mappings,
    push_by_default,
    two_data_sources,
    zero_stage,
)
from launcher.backends.rule import Rule, check, say
from launcher.backends.value_rules import (
    cache_on_the_hub,
    no_epochs,
    out_of_range,
    transforms,
    unknown_template,
    unknown_tokenizer_function,
)
from launcher.errors import Finding, brief
from launcher.paths import is_file
from launcher.schema import Values

_OTHER = "leave out `script:`: dpo_tune_cache.py does that"
_TRAINS = "leave out `script:`, dpo_tune_cache.py trains it"
# olmo_core's prepare_training_environment, which `timeout` does not reach
_TIMEOUT_S = 15 * 60
# OLMo-core's shapes (olmo_core/nn/transformer/config.py), in the words of a config.json
_SIZES = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim",
)  # fmt: skip
_OLMO2: Mapping[str, tuple[int, ...]] = {
    "1M": (12, 4, 256, 4, 4, 4), "14M": (128, 4, 512, 8, 8, 16), "30M": (256, 4, 768, 8, 8, 32),
    "60M": (384, 8, 1536, 8, 8, 48), "100M": (512, 12, 2048, 8, 8, 64),
    "190M": (768, 12, 3072, 12, 12, 64), "370M": (1024, 16, 4096, 16, 16, 64),
    "600M": (1344, 16, 5376, 16, 16, 84), "760M": (1536, 16, 6144, 16, 16, 96),
    "1B": (2048, 18, 8192, 16, 16, 128), "1B_v2": (2048, 16, 8192, 16, 16, 128),
    "3B": (3328, 16, 13312, 16, 16, 208), "7B": (4096, 32, 11008, 32, 32, 128),
    "13B": (5120, 40, 13824, 40, 40, 128), "32B": (5120, 64, 27648, 40, 8, 128),
}  # fmt: skip
_SHAPES: Mapping[str, tuple[int, ...]] = {
    **{f"olmo2_{size}": sizes for size, sizes in _OLMO2.items()},
    **{f"olmo3_{size}": sizes for size, sizes in _OLMO2.items() if size != "1B_v2"},
    "olmo3_600M": (1280, 16, 5120, 16, 16, 80), "olmo3_1B": _OLMO2["1B_v2"],
    "qwen3_0_6B": (1024, 28, 3072, 16, 8, 128), "qwen3_1_7B": (2048, 28, 6144, 16, 8, 128),
    "qwen3_4B": (2560, 36, 9728, 32, 8, 128), "qwen3_8B": (4096, 36, 12288, 32, 8, 128),
    # neither is Qwen's own, which has 40 layers, and 64 heads
    "qwen3_14B": (5120, 48, 17408, 40, 8, 128), "qwen3_32B": (5120, 64, 25600, 40, 8, 128),
    "llama2_271M": (1024, 16, 2816, 8, 8, 128), "llama2_1B": (2048, 18, 5632, 16, 16, 128),
    "llama2_7B": (4096, 32, 11008, 32, 32, 128), "llama2_13B": (5120, 40, 13824, 40, 40, 128),
    "llama2_26B": (5120, 80, 13824, 40, 40, 128), "llama2_70B": (8192, 80, 28672, 64, 8, 128),
    "llama3_1B": (2048, 16, 8192, 32, 8, 64), "llama3_8B": (4096, 32, 14336, 32, 8, 128),
    "llama3_70B": (8196, 80, 28672, 64, 8, 128), "llama3_405B": (16384, 126, 53248, 128, 8, 128),
}  # fmt: skip
_LOADED = ("gemma3_text", "llama", "olmo2", "olmo3", "qwen3")
# biases, joined weights and experts are refused (olmo_core/nn/conversion/state_converter.py:141);
# in the
# others the second norm is taken for the first one (olmo_core/nn/hf/convert.py:45)
_UNLOADED = frozenset({
    "gemma", "gemma2", "granite", "mistral", "mixtral", "olmo", "olmoe", "phi3", "qwen2", "qwen3_moe",
    "smollm3",
})  # fmt: skip
_SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup")
# what OLMo-core 2.6.0 ties as the models do (olmo_core/nn/transformer/config.py); at the pin it
# ties none
_TIED = ("qwen3_0_6B", "qwen3_1_7B", "qwen3_4B")
# the families whose layers OLMo-core writes in transformers' form (olmo_core/nn/hf/config.py)
_EXPORTED = ("olmo2", "olmo3", "olmoe")
# of a folder OLMo-core asserts one of these (olmo_core/nn/hf/checkpoint.py:90), whatever else is
# in it
_ASSERTED = ("generation_config.json", "model.safetensors.index.json", "pytorch_model.bin")


# --- what the arguments alone decide
# ---------------------------------------------------------------


def model(values: Values) -> Iterator[Finding]:
    """olmo_core_utils.py:208 looks the name up, olmo_core_utils.py:212 asks OLMo-core."""
    name, config = values["model_name_or_path"], values["config_name"]
    models, configs = values.schema.models, values.schema.configs
    wanted = str(config or name)
    if not name or not models:
        return
    if str(name) in configs and not model_config.here(str(name)):
        # the config's vocabulary is read from the model first (olmo_core_utils.py:230)
        yield say(
            "error", "run", "unsupported-model", "model_name_or_path",
            f"{brief(name)} is OLMo-core's name of a shape, which has no weights",
            f"write the model as `model_name_or_path` and `config_name: {name}`",
        )  # fmt: skip
        return
    # of a commit read without OLMo-core beside it, the names of its shapes are not known
    if wanted in models or wanted in configs or (config and not configs):
        return
    key = "config_name" if config else "model_name_or_path"
    names = sorted(set(models.values()))
    folder = model_config.here(str(name)) or model_config.is_path(str(name))
    if not config and folder:
        yield say(
            "error", "run", "unsupported-model", key,
            f"OLMo-core knows models by name: of the folder {brief(name)} it cannot tell which "
            "one it is",
            f"add `config_name:`, {_shape_hint(str(name), names)}",
        )  # fmt: skip
        return
    near = difflib.get_close_matches(wanted, [*models, *configs], n=1, cutoff=0.8)
    # the shapes are those of the pin's OLMo-core: another commit may want one that has more
    surely = values.schema.stands is None or "/" in wanted
    help = f"did you mean `{near[0]}`? " if near else ""
    listed = (
        f"the models {', '.join(models)}, or a `config_name` of OLMo-core's ({', '.join(names)})"
    )
    yield say(
        "error" if surely else "warning", "run", "unsupported-model", key,
        f"{brief(wanted)} is no model that dpo.py can build",
        f"{help}{listed}; for any other leave out `script:`: dpo_tune_cache.py trains it",
    )  # fmt: skip


def _shape_hint(folder: str, names: list[str]) -> str:
    told = _shape_of(model_config.read(folder, {}))
    return f"by its config.json {told}" if told else f"one of {', '.join(names)}"


def _shape_of(config: Mapping[str, Any]) -> str | None:
    """The name that fits; none of llama's, whose rotary embedding OLMo-core does not scale."""
    if any(config.get(key) is None for key in ("model_type", *_SIZES[:2])):
        return None
    named = (name for name in _SHAPES if not name.startswith("llama"))
    return next((name for name in named if not _differences(config, name)), None)


def _described(name: str | None) -> Mapping[str, Any]:
    """What a config.json of that shape would hold; empty of a shape that is not listed."""
    if name is None or name not in _SHAPES:
        return {}
    family = name.partition("_")[0]
    kind = "llama" if family.startswith("llama") else family
    return {"model_type": kind, **dict(zip(_SIZES, _SHAPES[name], strict=True))}


def _differences(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The keys that say something else; what the config leaves out is not guessed."""
    return tuple(
        key for key, size in _described(name).items() if config.get(key) not in (None, size)
    )


def budget(values: Values) -> Iterator[Finding]:
    """olmo_core_utils.py:101: the budget acts below 1 and under compile alone.

    OLMo-core takes 0 to 1 (olmo_core/nn/transformer/model.py: `apply_activation_checkpointing`).
    """
    key = "activation_memory_budget"
    share = values[key]
    if not isinstance(share, int | float):
        return
    if share < 1 and not values["compile_model"]:
        yield say(
            "warning", "run", "budget-without-compile", key,
            f"`{key}: {share}` does nothing with `compile_model: false`: every activation is kept",
            "leave `compile_model` true",
        )  # fmt: skip
    elif not 0 < share <= 1:
        what = "every activation is computed again" if share == 0 else "it does what 1.0 does"
        yield say(
            "error" if share < 0 else "warning", "run", "out-of-range", key,
            f"`{key}: {share}`: {'OLMo-core refuses it' if share < 0 else what}",
            "a share above 0 and up to 1: 0.1 is the lowest that was measured, 0.5 upstream's "
            "example",
        )  # fmt: skip


def packing(values: Values) -> Iterator[Finding]:
    """dpo_utils.py:992 hands the model tokens and labels alone: no boundaries, no positions."""
    if not values["packing"]:
        return
    if not values["concatenated_forward"]:
        return
    row = values["max_seq_length"]
    size = f" of {2 * row:,} positions" if isinstance(row, int) else ""
    yield say(
        "warning", "run", "packing-leaks", "packing",
        "`packing`: samples in a row attend to each other: the model is told no boundaries, "
        "and chosen "
        f"and rejected stand in one row{size}; the reference is computed beside other samples "
        "than training",
        "`packing: false`, or `expect: {packing: on}` with `probe: {isolation: off}` to run it "
        "all the same",
    )  # fmt: skip


def export(values: Values) -> Iterator[Finding]:
    """olmo_core_utils.py:287: where OLMo-core cannot write the model, a plain state dict is saved."""
    config = values["config_name"] or values["model_name_or_path"]
    named = values.schema.models.get(str(config), str(config))
    if values["cache_dataset_only"] or values["cache_logprobs_only"]:
        return
    if named in values.schema.configs and not named.startswith(_EXPORTED):
        yield say(
            "warning", "run", "no-hf-export",
            "config_name" if values["config_name"] else "model_name_or_path",
            f"OLMo-core cannot write {named} as transformers reads it: `hf_model` will hold "
            "model_state_dict.pt under OLMo-core's names, and from_pretrained finds no weights "
            "there"
            + (", neither on the hub" if values["push_to_hub"] else ""),
            f"rename the weights afterwards, or {_OTHER}",
        )  # fmt: skip


def ranges(values: Values) -> Iterator[Finding]:
    """Those of the other scripts, but for what is not read by this one."""
    own = ("logging_steps", "keep_last_n_checkpoints", "lora_rank", "lora_dropout")
    skipped = {f"args.{key}" for key in own}
    yield from (found for found in out_of_range(values) if found.key not in skipped)


def _interval(values: Values) -> bool:
    steps, between = values["checkpointing_steps"], values["ephemeral_save_interval"]
    whole = isinstance(between, int) and isinstance(steps, int)
    return whole and not 1 <= between < steps


RULES: tuple[Rule, ...] = (
    two_data_sources, beaker_without_push, json_mappings, zero_stage, *MIXER_RULES, entity_twice,
    push_by_default, model, export, budget, packing, ranges, no_epochs, unknown_template,
    unknown_tokenizer_function, transforms, cache_on_the_hub,
    *(
        check("dpo.py:160, dpo.py:168, dpo.py:171", "not-with-olmo-core", key, itemgetter(key),
              f"`{key}` is refused by dpo.py", f"write `{key}: false`, or {_OTHER}")
        for key in ("use_lora", "dpo_use_paged_optimizer", "use_8bit_optimizer")
    ),
    # no line of dpo.py reads it (dpo.py:160 asks for `use_lora` alone)
    check(
        "dpo.py:160", "not-with-olmo-core", "use_qlora", itemgetter("use_qlora"),
        "`use_qlora` is not read by dpo.py, which would train all weights", _OTHER,
    ),
    check(
        "dpo.py:157", "no-model", "model_name_or_path", lambda v: not v["model_name_or_path"],
        "no model named", "add `model_name_or_path: <hub name or folder>`",
    ),
    # its default is none (dpo_utils.py:255)
    check(
        "olmo_core_train_modules.py:126", "no-length", "max_seq_length",
        lambda v: v["max_seq_length"] is None,
        "without `max_seq_length` dpo.py crashes: its default is none",
        "add `max_seq_length: 2048`, or as long as the rows are",
    ),
    # the one takes the forward that knows no packing, the other asks it for packing
    check(
        "dpo.py:259, dpo.py:262", "packing-separate-forward", "packing",
        lambda v: v["packing"] and not v["concatenated_forward"],
        "`packing` with `concatenated_forward: false` crashes in the reference pass",
        "write `concatenated_forward: true`",
    ),
    # where its forward passes give no auxiliary loss, none is added
    # (olmo_core_train_modules.py:192)
    check(
        "dpo_utils.py:1008", "balancing-unread", "load_balancing_loss",
        itemgetter("load_balancing_loss"),
        "`load_balancing_loss` adds nothing: this script's forward passes give no such loss",
        f"delete the line, or {_OTHER}", severity="warning",
    ),
    # olmo_core/optim/scheduler.py: alpha_f, which dpo.py:58 leaves at its default
    check(
        "dpo.py:57", "scheduler-replaced", "lr_scheduler_type",
        lambda v: v["lr_scheduler_type"] == "cosine",
        "`lr_scheduler_type: cosine` ends at a tenth of the rate here, not at 0", severity="note",
    ),
    check(
        "dpo.py:59", "scheduler-replaced", "lr_scheduler_type",
        lambda v: v["lr_scheduler_type"] == "constant" and v["warmup_ratio"],
        "`lr_scheduler_type: constant` warms up here, over {warmup_ratio} of all steps",
        "`warmup_ratio: 0.0` for none", severity="note",
    ),
    check(
        "dpo.py:57, dpo.py:59", "scheduler-replaced", "lr_scheduler_type",
        lambda v: v["lr_scheduler_type"] not in _SCHEDULERS,
        "`lr_scheduler_type: {lr_scheduler_type}` runs a constant rate after the warm-up",
        f"one of {', '.join(_SCHEDULERS[:3])}", severity="warning",
    ),
    # olmo_core/train/callbacks/checkpointer.py refuses these, and the logger divides
    check(
        "olmo_core_callbacks.py:169", "checkpoint-steps", "checkpointing_steps",
        lambda v: isinstance(v["checkpointing_steps"], int) and v["checkpointing_steps"] < 1,
        "`checkpointing_steps: {checkpointing_steps}`: OLMo-core takes 1 and more",
        "write a number of steps",
    ),
    check(
        "olmo_core_callbacks.py:169", "checkpoint-steps", "ephemeral_save_interval", _interval,
        "`ephemeral_save_interval: {ephemeral_save_interval}` is not between 1 and "
        "`checkpointing_steps: {checkpointing_steps}`",
        "leave it out, or write less than `checkpointing_steps`",
    ),
    check(
        "olmo_core_callbacks.py:169", "out-of-range", "logging_steps",
        lambda v: v.given("logging_steps") and v["logging_steps"] < 1,
        "`logging_steps: {logging_steps}`: the trainer divides by it",
    ),
)  # fmt: skip


# --- what needs more than the arguments
# ------------------------------------------------------------


def no_deepspeed(context: Context) -> Iterator[Finding]:
    """dpo.py:294 shards with FSDP; torchrun starts it, and nothing hands it a DeepSpeed file."""
    if context.deepspeed is not None:
        yield Finding(
            severity="error", layer="launch", code="deepspeed-with-torchrun", key="deepspeed",
            message="dpo.py shards with FSDP: nothing would read a DeepSpeed file",
            help="delete `deepspeed:`; `fsdp_shard_degree` says over how many GPUs it shards",
        )  # fmt: skip


def precision(context: Context) -> Iterator[Finding]:
    """dpo.py:298: bfloat16 for the computation, 32 bits for weights and gradients, whatever is asked."""
    if context.mixed_precision not in {None, "bf16"} and context.gpus != 0:
        yield Finding(
            severity="warning", layer="run", code="mixed-precision-unread", key="mixed_precision",
            message="`mixed_precision` is not read here: FSDP computes in bfloat16 over 32-bit weights",
            help="delete the line",
        )  # fmt: skip


def other_shape(context: Context) -> Iterator[Finding]:
    """dpo.py:329 loads the model's weights into the shape that `config_name`, or its own name, stands for.

    Only what the file has is looked up there (olmo_core/nn/hf/checkpoint.py:117): layers that it has
    not stay as they were made. The vocabulary is the model's own (olmo_core_utils.py:231).
    """
    values, models = context.values, context.values.schema.models
    name, config = values["model_name_or_path"], values["config_name"]
    named = models.get(str(config or name), str(config or name))
    if named not in values.schema.configs or caches_only(context):
        return
    key = "config_name" if config else "model_name_or_path"
    known = shapes.table().get(str(name).lower()) or _described(models.get(str(name)))
    held = model_config.read(name, context.environ) or known
    own = models.get(str(name), "").partition("_")[0]
    family, found = str(held.get("model_type", own)), _shape_of(held)
    help = f"write `config_name: {found}`" if found else f"no `config_name` fits it: {_TRAINS}"
    if family in _UNLOADED:
        yield say(
            "error", "run", "other-shape", key,
            f"{brief(name)} is of the family {family}: OLMo-core loads {', '.join(_LOADED)}; "
            "of others it "
            "refuses weights once the data are tokenised, or leaves some out", help,
        )  # fmt: skip
        return
    differs = _differences(held, named)
    if {family, _described(named).get("model_type")} == {"olmo2", "olmo3"} and len(differs) == 1:
        yield say(
            "warning", "run", "other-shape", key,
            f"{brief(name)} is an {family} model: its weights load into {named}, and beyond "
            "4,096 positions "
            "the attention is not the one it was trained with", help,
        )  # fmt: skip
    elif differs:
        wanted = _described(named)
        said = ", ".join(f"{one} is {brief(held[one])}, not {wanted[one]}" for one in differs)
        yield say(
            "error", "run", "other-shape", key,
            f"{brief(name)} does not fit OLMo-core's {named}: {said}; "
            f"{_unfit(held, named, differs)}",
            help,
        )  # fmt: skip
    elif found not in {None, named}:
        yield say(
            "error", "run", "other-shape", key,
            f"{brief(name)} has the shape of {found}: its weights do not fit {named}", help,
        )  # fmt: skip


def _unfit(held: Mapping[str, Any], named: str, differs: tuple[str, ...]) -> str:
    layers, wanted = held.get("num_hidden_layers"), _described(named)["num_hidden_layers"]
    if differs == ("num_hidden_layers",) and isinstance(layers, int) and layers < wanted:
        return f"the last {wanted - layers} layers would keep random weights, without a word"
    if "model_type" in differs:
        return "its weights do not fit"
    return "loading its weights fails once the data are tokenised"


def offline_model(context: Context) -> Iterator[Finding]:
    """dpo.py:329: after tokenising and building, OLMo-core asks the hub whether it has the name.

    No cache answers that (olmo_core/nn/hf/checkpoint.py:94), and of a folder it is not asked.
    """
    values, environ = context.values, context.environ
    name, variable = values["model_name_or_path"], model_config.offline_by(environ)
    far = isinstance(name, str) and name and not model_config.here(name)
    if variable is None or not far or model_config.is_path(name) or caches_only(context):
        # dpo.py:213: a `config_name` is one of OLMo-core's own, no folder and nothing of the hub's
        found = loading_rules.missing_model(context)
        yield from (finding for finding in found if finding.key != "args.config_name")
        return
    shape = values.schema.models.get(name) or _shape_of(model_config.read(name, environ))
    config = f" and `config_name: {shape or '<its shape>'}`" if not values["config_name"] else ""
    folder = _whole(name, environ)
    if folder is None:
        help = (
            f"{model_config.hub_cache(environ)} does not hold it whole: `hf download {name}` "
            "where the hub "
            f"can be reached; then write the folder that it prints as `model_name_or_path`{config}"
        )
    else:
        help = f"write `model_name_or_path: {folder}`{config}"
        if not any(is_file(folder / one) for one in _ASSERTED):
            help += f", and {_made(folder)}"
    yield say(
        "error" if context.running else "warning", "run", "offline-hub-model", "model_name_or_path",
        f"{variable} is set and {brief(name)} is a hub name: with the data tokenised and the "
        "model built, "
        "OLMo-core asks the hub whether it has that name, and crashes, whatever lies in the "
        "hub's cache",
        f"{help}; or unset {variable}",
    )  # fmt: skip


def _whole(name: str, environ: Mapping[str, str]) -> Path | None:
    """The folder of the hub's cache with all of a model; it takes `main`, as this script does."""
    folder = model_config.snapshot(name, environ)
    if folder is None or model_files.config_fault(folder) or model_files.weights_fault(folder):
        return None
    return folder.absolute()


def folder_unread(context: Context) -> Iterator[Finding]:
    """dpo.py:329: of a folder OLMo-core wants to see a file that one of 0.6B need not have.

    Weights in one file and no generation settings end in an assertion (olmo_core/nn/hf/checkpoint.py:90).
    """
    name = context.values["model_name_or_path"]
    if not isinstance(name, str) or not name or caches_only(context):
        return
    folder = Path(name)
    # a folder without weights is one to plan with
    if not is_file(folder / "model.safetensors") or any(is_file(folder / one) for one in _ASSERTED):
        return
    yield say(
        "error", "run", "folder-not-loaded", "model_name_or_path",
        f"{brief(name)} holds none of {', '.join(_ASSERTED)}: with the model built, OLMo-core "
        "ends there",
        f"{_made(folder)}: it is not read for training",
    )  # fmt: skip


def _made(folder: Path) -> str:
    return f"`echo '{{}}' > {shlex.quote(str(folder / _ASSERTED[0]))}`"


def goes_on(context: Context) -> Iterator[Finding]:
    """dpo.py:349: OLMo-core's trainer goes on from what its save folder holds; launch does not judge that."""
    if not context.running:
        return
    folder = output_folder(context.values)
    try:
        saved = [int(n[4:]) for n in os.listdir(folder) if n[:4] == "step" and n[4:].isdecimal()]
    except OSError:
        return
    if any(saved):
        yield say(
            "warning", "run", "resume-unjudged", "output_dir",
            f"{folder} holds step{max(saved)}: OLMo-core goes on from there by itself, and "
            "whether data, "
            "model and arguments are the same is not looked at for this script",
            "name another `output_dir` to start over",
        )  # fmt: skip


def no_compiler(context: Context) -> Iterator[Finding]:
    """Triton builds a launcher in C for every kernel; without a GPU OLMo-core compiles nothing."""
    compiles = context.running and context.gpus and context.values["compile_model"]
    if compiles and not caches_only(context):
        yield from service_rules.no_compiler(context, "compile_model")


def accumulation(context: Context) -> Iterator[Finding]:
    """data_loader.py:324: what the file itself says; of a batch that the plan splits it says `unreached`."""
    if context.values["packing"] and not context.running and (context.accumulation or 1) > 1:
        yield _accumulated(context.accumulation or 1, "gradient_accumulation_steps")


def _accumulated(times: int, key: str) -> Finding:
    """dpo.py:224: a step's pairs of one rank go into one row (data_loader.py:324), or wait for the next."""
    return say(
        "warning", "run", "accumulation-packed", key,
        f"with `packing` a step is one row a GPU: {times} accumulation steps only raise "
        "how many pairs may stand in it, and what does not fit waits for the next step",
        "write the pairs of a row as `per_device`, without accumulation",
    )  # fmt: skip


def wandb_key(context: Context) -> Iterator[Finding]:
    """olmo_core's WandBCallback wants the variable; an entry in ~/.netrc does not do."""
    if not context.values["with_tracking"] or context.environ.get("WANDB_API_KEY"):
        return
    yield say(
        "error" if context.running else "warning", "run", "no-wandb-key", "with_tracking",
        "`with_tracking`: OLMo-core wants WANDB_API_KEY in the environment, ~/.netrc is not enough",
        "export WANDB_API_KEY, or `with_tracking: false`",
    )  # fmt: skip


def tokenising(context: Context) -> Iterator[Finding]:
    """olmo_core_utils.py:265: the others wait for so long, which `timeout` does not reach."""
    yield from tokenising_outlasts(context, seconds=_TIMEOUT_S)


def wpo(context: Context) -> Iterator[Finding]:
    """As in the other script (dpo_utils.py:601), and a packed row holds several samples."""
    if context.values["loss_type"] == "wpo" and context.values["packing"]:
        yield say(
            "error", "run", "wpo-batch", "loss_type",
            "`loss_type: wpo` crashes with `packing`: its weights fit a single sample only",
            "write `packing: false` and `per_device: 1`, or another loss",
        )  # fmt: skip
    else:
        yield from model_rules.wpo_batch(context)


def positions(context: Context) -> Iterator[Finding]:
    """Packed, chosen and rejected stand behind each other: positions go on to twice the length."""
    values = context.values
    reach = model_rules.positions(model_config.built_from(values, context.environ))
    row = values["max_seq_length"]
    if values["packing"] and isinstance(row, int) and reach and row <= reach < 2 * row:
        yield say(
            "warning", "run", "beyond-positions", "max_seq_length",
            f"`packing`: the rows have {2 * row} positions, counted through, and the model was "
            "made for "
            f"{reach}", f"write `max_seq_length: {reach // 2}`, or `packing: false`",
        )  # fmt: skip
    else:
        yield from model_rules.beyond_positions(context)


STAGE_RULES: tuple[StageRule, ...] = (
    no_deepspeed, precision, other_shape, goes_on, no_compiler, accumulation, wandb_key, tokenising,
    wpo, positions, model_rules.attention_missing, model_rules.olmo_bos, offline_model, folder_unread,
    service_rules.hub_token, service_rules.remote_code,
)  # fmt: skip


# --- what needs the number of processes
# ------------------------------------------------------------


# FSDP's two degrees, also as older commits spell them; the first dpo.py has neither
_SHARDS = ("fsdp_shard_degree", "shard_degree")
_REPLICAS = ("fsdp_num_replicas", "num_replicas")


def degrees(values: Values, processes: int) -> Iterator[Finding]:
    """Whether FSDP's mesh can be laid over so many processes.

    olmo_core's DataParallelConfig: replicas x shards are the data-parallel
    processes, which are all of them divided by `tensor_parallel_degree` (dpo.py:199).
    """
    tensor = values["tensor_parallel_degree"]
    if not isinstance(tensor, int) or tensor < 1 or processes % tensor:
        yield _uneven("tensor_parallel_degree", tensor, processes, "processes")
        return
    world = processes // tensor
    given: dict[str, int] = {}
    for key in (*_SHARDS, *_REPLICAS):
        degree = values.get(key)
        if degree is None:
            continue
        given[key] = degree
        if degree < 1 or world % degree:
            yield _uneven(key, degree, world, "data-parallel processes")
            return
    if len(given) == 2 and math.prod(given.values()) != world:
        (first, shards), (second, replicas) = given.items()
        yield say(
            "error", "run", "shard-degree", second,
            f"{replicas} replicas of {shards} shards are {shards * replicas} processes, not "
            f"{world}",
            f"give one of `{first}` and `{second}`: the other follows",
        )  # fmt: skip


def unreached(values: Values, *, accumulation: int, processes: int) -> Iterator[Finding]:
    """A packed batch that accumulation is to make up: the plan split it, and no step will hold it."""
    if values["packing"] and accumulation > 1:
        found = _accumulated(accumulation, "batch.global")
        yield replace(
            found, key="batch.global",
            help=f"`batch.global` is `per_device` x {processes} GPU(s) here, and the pairs of a step are "
            "what fits: the learning rate is for that many",
        )  # fmt: skip


def too_few_rows(
    values: Values, rows: int | None, *, per_device: int, accumulation: int, processes: int
) -> Iterator[Finding]:
    """Fewer rows than a step of all ranks takes (the last batch is left out), or than the reference pass.

    A filter may leave less than `rows`, never more. The reference pass repeats rows once to fill its
    batch of four times as many pairs (dpo.py:244, data_loader.py:287), packed its last row.
    """
    if rows is None or values["cache_dataset_only"]:
        return
    step = processes if values["packing"] else per_device * accumulation * processes
    reference = 0 if values["packing"] else 4 * per_device * processes
    if rows < step and not values["cache_logprobs_only"]:
        yield say(
            "error", "run", "too-few-rows", "mixer_list",
            f"{rows:,} rows are less than one step of {step:,}, and dpo.py leaves out what is "
            "not full: "
            "there is nothing to train on", "fewer GPUs, a smaller batch, or more rows",
        )  # fmt: skip
    elif 2 * rows < reference:
        yield say(
            "error", "run", "too-few-rows", "mixer_list",
            f"the reference pass takes {reference:,} pairs at a time and crashes below "
            f"{reference // 2:,} rows: there are {rows:,}",
            "a smaller `per_device`, fewer GPUs, or more rows",
        )  # fmt: skip


def _uneven(key: str, degree: Any, world: int, what: str) -> Finding:
    fits = [n for n in range(1, world + 1) if world % n == 0]
    return say(
        "error", "run", "shard-degree", key,
        f"`{key}: {degree}` does not divide {world} {what}",
        f"one of {', '.join(map(str, fits))}, or leave it out: each machine then holds one "
        "whole model"
        if key != "tensor_parallel_degree" else f"one of {', '.join(map(str, fits))}",
    )  # fmt: skip


def ties(values: Values, packages: Mapping[str, str]) -> bool:
    """Whether OLMo-core trains embedding and output layer of that shape as one weight.

    Where none is installed yet, it is the release of constraints.txt.
    """
    name = str(values["config_name"] or values["model_name_or_path"])
    release = re.findall(r"\d+", packages.get("ai2-olmo-core", "2.6"))
    late = [int(part) for part in release[:2]] >= [2, 6]
    return late and values.schema.models.get(name, name) in _TIED


def mesh(values: Values, processes: int, nodes: int) -> tuple[int, int]:
    """(replicas, shards) of the model, as OLMo-core lays them: one replica a machine by default.

    The degrees have to fit (`degrees`).
    """
    world = processes // max(1, values["tensor_parallel_degree"])
    shards, replicas = (
        next((degree for name in names if (degree := values.get(name)) is not None), None)
        for names in (_SHARDS, _REPLICAS)
    )
    if shards is not None:
        return world // shards, shards
    if replicas is not None:
        return replicas, world // replicas
    return nodes, world // nodes
