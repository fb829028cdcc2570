"""Rules for open-instruct's second DPO script, dpo.py: OLMo-core models under FSDP.

What it refuses by a `raise` is found by reading it (`noops.refused`); these say it better, and say
what nobody raises for. Line numbers are those of the pin, and of the pinned OLMo-core where they
name it.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import PurePath
from typing import Any

from launcher import files
from launcher.artifacts import architecture, model_config
from launcher.errors import Finding, Severity, shorten
from launcher.rules import services
from launcher.rules.context import Context, StageRule, caches_only
from launcher.rules.embedding import beyond_olmo_core
from launcher.rules.model import beyond_positions, impossible_name, missing_model
from launcher.rules.open_instruct import gradient
from launcher.rules.open_instruct.arguments import (
    OF_ALL_SCRIPTS,
    out_of_range,
    severity_if_unknown,
    zero_stage,
)
from launcher.rules.open_instruct.data import tokenising_outlasts
from launcher.rules.open_instruct.tokenizer import olmo_tokenizer
from launcher.rules.places import unintended_output
from launcher.rules.premises import asks, unless, where
from launcher.rules.rule import (
    Range,
    Rule,
    check,
    cites,
    needs,
    no_model,
    number,
    outside,
    say,
    say_of_option,
    warn,
)
from launcher.upstream import behaviour
from launcher.upstream.open_instruct import STAGES, output_folder
from launcher.upstream.schema import Values

_OTHER = "leave out `script:`: dpo_tune_cache.py does that"
# olmo_core's prepare_training_environment, which `timeout` does not reach
_TIMEOUT_S = 15 * 60
# OLMo-core's shapes (olmo_core/nn/transformer/config.py), in the words of a config.json
_SIZES = (
    "model_type hidden_size num_hidden_layers intermediate_size num_attention_heads "
    "num_key_value_heads"
).split()
_SHAPES: Mapping[str, tuple[str | int, ...]] = {
    "olmo2_1B": ("olmo2", 2048, 18, 8192, 16, 16),
    "olmo2_1B_v2": ("olmo2", 2048, 16, 8192, 16, 16),
    "olmo2_7B": ("olmo2", 4096, 32, 11008, 32, 32),
    "olmo2_13B": ("olmo2", 5120, 40, 13824, 40, 40),
    "olmo2_32B": ("olmo2", 5120, 64, 27648, 40, 8),
    "olmo3_1B": ("olmo3", 2048, 16, 8192, 16, 16),
    "olmo3_7B": ("olmo3", 4096, 32, 11008, 32, 32),
    "olmo3_32B": ("olmo3", 5120, 64, 27648, 40, 8),
    "qwen3_0_6B": ("qwen3", 1024, 28, 3072, 16, 8),
    "qwen3_1_7B": ("qwen3", 2048, 28, 6144, 16, 8),
    "qwen3_4B": ("qwen3", 2560, 36, 9728, 32, 8),
    "qwen3_8B": ("qwen3", 4096, 36, 12288, 32, 8),
    # neither is Qwen's own, which has 40 layers, and 64 heads
    "qwen3_14B": ("qwen3", 5120, 48, 17408, 40, 8),
    "qwen3_32B": ("qwen3", 5120, 64, 25600, 40, 8),
    "llama3_8B": ("llama", 4096, 32, 14336, 32, 8),
}
# biases, joined weights and experts are refused
# (olmo_core/nn/conversion/state_converter.py::StateConverter.convert[if len(unused_original_keys]);
# of others the second norm is taken for the first one
# (olmo_core/nn/hf/convert.py::[model.layers. #9])
_LOADED = ("gemma3_text", "llama", "olmo2", "olmo3", "qwen3")
_RANGES: Mapping[str, tuple[Range, ...]] = {
    "activation_memory_budget": (
        Range(lambda n: n >= 0, "error", "it is a share"),
        Range(lambda n: n < 0 or 0 < n <= 1, "warning", "it is a share above 0 and up to 1"),
    )
}
_SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup")
# what OLMo-core 2.6.0 ties as the models do (olmo_core/nn/transformer/config.py); the commits
# of it that open-instruct locks tie none
_TIED = ("qwen3_0_6B", "qwen3_1_7B", "qwen3_4B")
# the families whose layers OLMo-core writes in transformers' form (olmo_core/nn/hf/config.py)
_EXPORTED = ("olmo2", "olmo3", "olmoe")
# since #1671 a converter writes them all but the mixtures of experts, and the run is refused
NOT_EXPORTED = ("olmoe", "smallmoe", "small_hybrid_moe")
# the family that upstream itself builds and loads since #1822, beside OLMo-core
_HYBRID = "olmo3_hybrid"
_SELECTED = "selected_modules"
# shapes of OLMo-core with layers of Gated DeltaNet, and those of nGPT
_RECURRENT = ("qwen3_5_", "olmo3_hybrid", "olmo_hybrid")
_OWN_ATTENTION = "ngpt_"


def script_of(values: Values) -> str:
    return PurePath(values.schema.script).name


def trains_instead(values: Values) -> str:
    """The script of the stage itself, which builds any model of transformers'."""
    return f"leave out `script:`, {PurePath(STAGES[values.schema.stage].script).name} trains it"


@cites(
    "olmo_core_utils.py::get_transformer_config[config_name = OLMO_MODEL_CONFIG_MAP.get]",
    "olmo_core_utils.py::get_transformer_config[if not hasattr]",
    reviewed=("e6c3044aa620",),
)
def model(values: Values) -> Iterator[Finding]:
    """The name is looked up, then OLMo-core is asked; a shape has no weights."""
    name = str(values["model_name_or_path"] or "")
    config = values["config_name"]
    models = values.schema.models
    configs = values.schema.configs
    requested = str(config or name)
    # of a commit read without OLMo-core beside it, the names of its shapes are not known
    if (
        not name
        or not models
        or requested in models
        or (config and (not configs or requested in configs))
    ):
        return
    help = ""
    near = difflib.get_close_matches(requested, [*models, *configs], n=1, cutoff=0.8)
    if near:
        help = f"did you mean `{near[0]}`? "
    if not config and name in configs:
        help = f"add `config_name: {name}` to a model's name or folder; "
    elif not config and (model_config.is_local(name) or model_config.is_path(name)):
        help = "add `config_name: <its shape>` to a model's name or folder; "
    shapes = ", ".join(sorted(set(models.values())))
    help += f"the models {', '.join(models)}, or a `config_name` of OLMo-core's ({shapes}); "
    help += f"for any other {trains_instead(values)}"
    message = f"{shorten(requested)} is not a model that {script_of(values)} can build"
    yield say(
        severity_if_unknown(values), "unsupported-model", _choose_shape_key(values), message, help
    )


@where(behaviour.MIXES_PACKED_SAMPLES)
@cites("dpo_utils.py::concatenated_forward_olmo[output = model]", reviewed=("e6c3044aa620",))
def packing(values: Values) -> Iterator[Finding]:
    """`dpo_utils.py` hands the model tokens and labels alone: no boundaries, no positions."""
    if not values["packing"] or not values["concatenated_forward"]:
        return
    row = values["max_seq_length"]
    size = ""
    if isinstance(row, int):
        size = f" of {2 * row:,} positions"
    message = (
        f"`packing`: samples in a row{size} attend to each other: the model gets no boundaries"
    )
    help = (
        "`packing: false`, or `expect: {packing: on}` with `probe: {isolation: off}` to run it "
        "all the same"
    )
    yield say("warning", "packing-leaks", "packing", message, help)


@where(behaviour.EXPORTS_OLMO_ALONE)
@cites(
    "olmo_core_utils.py::save_state_dict_as_hf[except NotImplementedError]",
    reviewed=("e6c3044aa620",),
)
def export(values: Values) -> Iterator[Finding]:
    """Where OLMo-core cannot write the model, a plain state dict is saved."""
    named, key = shape_of(values)
    if values["cache_dataset_only"] or values["cache_logprobs_only"]:
        return
    if named in values.schema.configs and not named.startswith(_EXPORTED):
        message = f"OLMo-core cannot write {named} as transformers reads it, "
        message += "only a model_state_dict.pt of its own"
        if values["push_to_hub"]:
            message += ", also on the hub"
        yield say(
            "warning", "no-hf-export", key, message, f"rename the weights afterwards, or {_OTHER}"
        )


@where(behaviour.VERIFIES_EXPORT)
def unexportable(values: Values) -> Iterator[Finding]:
    """Since #1671 OLMo-core's names are converted before training, and what cannot be is refused.

    Of the shapes of ai2-olmo-core 2.6.0 these are the mixtures of experts.
    """
    named, key = shape_of(values)
    if values["cache_dataset_only"]:
        return
    if named.startswith(NOT_EXPORTED):
        message = f"OLMo-core cannot write {named} as transformers reads it: "
        message += f"{script_of(values)} crashes once the model is built"
        yield say("error", "no-hf-export", key, message, trains_instead(values))


def shape_of(values: Values) -> tuple[str, str]:
    """OLMo-core's name of the shape that is built, and the argument that says so."""
    key = _choose_shape_key(values)
    name = str(values[key])
    return values.schema.models.get(name, name), key


def _choose_shape_key(values: Values) -> str:
    if values["config_name"]:
        return "config_name"
    return "model_name_or_path"


@asks(behaviour.RECOMPUTES_MODULES)
@cites(
    "olmo_core_utils.py::build_ac_config[if activation_memory_budget]", reviewed=("e6c3044aa620",)
)
def ranges(values: Values) -> Iterator[Finding]:
    """Those of the other scripts, but for what is not read by this one, and
    `olmo_core_utils.py`.
    """
    if not _selects_modules(values):
        yield from outside(values, _RANGES)
    skipped = {f"args.{key}" for key in ("logging_steps", "keep_last_n_checkpoints", "lora_rank")}
    for finding in out_of_range(values):
        if finding.key not in skipped:
            yield finding


@where(behaviour.LIMITS_CHECKPOINTS)
def kept_checkpoints(values: Values) -> Iterator[Finding]:
    """Since #1701 the number of checkpoints goes to OLMo-core; a negative one keeps all of them."""
    if values["keep_last_n_checkpoints"] == 0 and not _ends_early(values):
        message = (
            "`keep_last_n_checkpoints: 0`: OLMo-core keeps at least one, and crashes once the "
            "model is loaded"
        )
        yield say(
            "error",
            "out-of-range",
            "keep_last_n_checkpoints",
            message,
            "write 1 or more, or -1 for all",
        )


@asks(behaviour.SKIPS_NO_INTERVAL)
def checkpoint_intervals(values: Values) -> Iterator[Finding]:
    """OLMo-core refuses intervals below 1, and a temporary one that is not the shorter.

    Since #1810 a temporary one below 1 means none.
    """
    key = "ephemeral_save_interval"
    interval = values[key]
    steps = values["checkpointing_steps"]
    if _ends_early(values):
        return
    if isinstance(steps, int) and steps < 1:
        message = f"`checkpointing_steps: {steps}`: OLMo-core refuses it once the model is loaded"
        yield say(
            "error", "checkpoint-steps", "checkpointing_steps", message, "write a number of steps"
        )
    # without one, launch sets one that fits the other
    if not isinstance(interval, int) or not values.given(key):
        return
    if interval < 1:
        if not values.schema.does(behaviour.SKIPS_NO_INTERVAL):
            message = f"`{key}: {interval}`: OLMo-core refuses it once the model is loaded"
            yield say(
                "error",
                "checkpoint-steps",
                key,
                message,
                "delete the line, or write a number of steps",
            )
    elif isinstance(steps, int) and interval >= steps:
        message = (
            f"`{key}: {interval}` is not below `checkpointing_steps: {steps}`: OLMo-core refuses it"
        )
        yield say(
            "error", "checkpoint-steps", key, message, f"a number below {steps}, or delete the line"
        )


def _ends_early(values: Values) -> bool:
    return bool(values["cache_dataset_only"] or values.get("cache_logprobs_only"))


def _keeps_activations(values: Values) -> bool:
    """Whether a budget below 1 is given and nothing is recomputed."""
    below = (number(values["activation_memory_budget"]) or 0) < 1
    return below and not values["compile_model"] and not _selects_modules(values)


def _selects_modules(values: Values) -> bool:
    """Whether modules are recomputed by their names, and no budget is read
    (olmo_core_utils.py::build_ac_config).
    """
    return bool(values.get("activation_checkpointing_mode") == _SELECTED)


@where(behaviour.RECOMPUTES_MODULES)
def unread_recomputing(values: Values) -> Iterator[Finding]:
    """Since #1715 either a budget or the names of modules says what is recomputed."""
    key = "activation_checkpointing_modules"
    mode = _SELECTED
    if _selects_modules(values):
        key = "activation_memory_budget"
        mode = "budget"
    if values.given(key) and values[key] != values.schema.fields[key].default:
        message = (
            f"`{key}` does nothing here: it is read only with `activation_checkpointing_mode: "
            f"{mode}`"
        )
        yield say("warning", "conditional-key", key, message, "delete the line")


@where(behaviour.CHOOSES_LOSS)
def unread_loss(values: Values) -> Iterator[Finding]:
    """OLMo-core's head is replaced by one that knows no other loss
    (olmo_core_train_modules.py::DPOTrainModule.__init__[model.lm_head.__class__]).
    """
    key = "loss_implementation"
    if values.get(key) not in (None, "default"):
        message = (
            f"`{key}` does nothing here: DPO computes its loss with an output layer of its own"
        )
        yield say("warning", "unread-key", key, message, "delete the line")


@where(behaviour.SCALES_ROPE)
def unsaved_scaling(values: Values) -> Iterator[Finding]:
    """Since #1620 the rotary embedding can be scaled; the model is saved with the config that it
    came with.

    olmo_core/nn/transformer/config.py refuses that of layers which are not all of one kind.
    """
    key = "rope_scaling_factor"
    factor = number(values.get(key))
    if factor is None or values["cache_dataset_only"]:
        return
    named, _ = shape_of(values)
    if named.startswith(_HYBRID):
        message = (
            f"`{key}`: OLMo-core scales no model with layers of several kinds, and crashes once it "
            "is built"
        )
        yield say("error", "rope-scaling", key, message, "delete the line")
        return
    message = (
        f"`{key}: {factor:g}` is not in the config.json of the saved model: whoever loads it "
        "computes other positions than were trained"
    )
    help = (
        "write the YaRN scaling of these arguments into its `rope_parameters` (`rope_scaling`) "
        "afterwards"
    )
    yield say("warning", "rope-scaling", key, message, help)


@unless(behaviour.REPLACES_SCHEDULES)
def refused_schedule(values: Values) -> Iterator[Finding]:
    """Since #1620 a schedule that is not known is refused, once the model is built."""
    name = values["lr_scheduler_type"]
    if name not in _SCHEDULERS[:3] and not values["cache_dataset_only"]:
        schedules = ", ".join(_SCHEDULERS[:3])
        message = f"`lr_scheduler_type: {shorten(name)}` crashes: dpo.py knows {schedules}"
        help = f"write `{nearest_schedule(name)}`"
        if name == "constant_with_warmup":
            help += ": it warms up by `warmup_ratio` here"
        yield say("error", "scheduler-type", "lr_scheduler_type", message, help)


def nearest_schedule(name: object) -> str:
    """The schedule of OLMo-core's scripts that comes nearest to another."""
    for schedule in _SCHEDULERS[:3]:
        if str(name).startswith(schedule):
            return schedule
    return "linear"


budget_without_compile = asks(behaviour.RECOMPUTES_MODULES)(
    warn(
        "olmo_core_utils.py::build_ac_config[if activation_memory_budget]",
        "budget-without-compile",
        "activation_memory_budget",
        _keeps_activations,
        "`activation_memory_budget` does nothing with `compile_model: false`: every activation "
        "is kept",
        "leave `compile_model` true",
        reviewed=("e6c3044aa620",),
    )
)

RULES: tuple[Rule, ...] = (
    *OF_ALL_SCRIPTS,
    zero_stage,
    model,
    export,
    unexportable,
    packing,
    ranges,
    kept_checkpoints,
    checkpoint_intervals,
    refused_schedule,
    unread_recomputing,
    unread_loss,
    unsaved_scaling,
    budget_without_compile,
    # no line of dpo.py reads it (dpo.py::main[LoRA is not supported] asks for `use_lora` alone)
    check(
        "dpo.py::main[LoRA is not supported]",
        "not-with-olmo-core",
        "use_qlora",
        itemgetter("use_qlora"),
        "`use_qlora` is not read by dpo.py, which would train all weights",
        _OTHER,
        reviewed=("e6c3044aa620",),
    ),
    where(behaviour.ASKS_FOR_MODEL)(
        no_model("dpo.py::main[--model_name_or_path]", reviewed=("e6c3044aa620",))
    ),
    # its default is none (dpo_utils.py::DPOExperimentConfig[max_seq_length])
    check(
        "olmo_core_train_modules.py::DPOTrainModule.__init__[max_sequence_length * 2]",
        "no-length",
        "max_seq_length",
        lambda v: v["max_seq_length"] is None,
        "without `max_seq_length` dpo.py crashes: its default is none",
        "add `max_seq_length: 2048`, or as long as the rows are",
        reviewed=("e6c3044aa620",),
    ),
    where(behaviour.REPLACES_SCHEDULES)(
        warn(
            "dpo.py::_setup_scheduler[cosine], "
            "dpo.py::_setup_scheduler[elif args.lr_scheduler_type]",
            "scheduler-replaced",
            "lr_scheduler_type",
            lambda v: v["lr_scheduler_type"] not in _SCHEDULERS,
            "`lr_scheduler_type: {lr_scheduler_type}` runs a constant rate after the warm-up",
            f"one of {', '.join(_SCHEDULERS[:3])}",
            reviewed=("e6c3044aa620",),
        )
    ),
)


@cites("dpo.py::main[transformer_config.TransformerDataParallelConfig]", reviewed=("e6c3044aa620",))
def no_deepspeed(context: Context) -> Iterator[Finding]:
    """`dpo.py` shards with FSDP; torchrun starts it, and nothing hands it a DeepSpeed file."""
    if context.deepspeed is not None:
        message = (
            f"{script_of(context.values)} shards with FSDP: nothing would read a DeepSpeed file"
        )
        help = "delete `deepspeed:`"
        if _DEGREES[0] in context.values:
            help += "; `fsdp_shard_degree` says over how many GPUs it shards"
        yield say_of_option(
            "error", "deepspeed-with-torchrun", "deepspeed", message, help, layer="launch"
        )


@cites("dpo.py::main[param_dtype=DType.bfloat16]", reviewed=("e6c3044aa620",))
def precision(context: Context) -> Iterator[Finding]:
    """bfloat16 for the computation, 32 bits for weights and gradients, whatever the file says."""
    if context.mixed_precision not in {None, "bf16"} and context.gpus != 0:
        message = (
            "`mixed_precision` is not read here: FSDP computes in bfloat16 over 32-bit weights"
        )
        yield say_of_option(
            "warning", "mixed-precision-unread", "mixed_precision", message, "delete the line"
        )


@where(behaviour.LOADS_HF_WEIGHTS)
@asks(behaviour.VERIFIES_EXPORT)
@cites(
    "dpo.py::main[load_hf_model(args.model_name_or_path]",
    "olmo_core/nn/hf/checkpoint.py::load_hf_model[for key in sorted]",
    reviewed=("e6c3044aa620",),
)
def other_shape(context: Context) -> Iterator[Finding]:
    """`dpo.py` loads the model's weights into the shape that `config_name`, or its own name,
    stands for.

    Layers that the files do not have stay as they were made; since #1671 they are refused.
    """
    values = context.values
    name = str(values["model_name_or_path"])
    named, key = shape_of(values)
    model = (
        model_config.read_model_config(name, context.environ)
        or architecture.load_known_shapes().get(name.lower())
        or {}
    )
    if named not in values.schema.configs or not model or caches_only(context):
        return
    family = model.get("model_type")
    differing = _find_differences(model, named)
    help = f"no `config_name` fits it: {trains_instead(values)}"
    fitting = _find_fitting_shape(model)
    if fitting is not None:
        help = f"write `config_name: {fitting}`"
    if family not in _LOADED and family in architecture.FAMILIES:
        message = f"{shorten(name)} is of the family {family}: OLMo-core loads {', '.join(_LOADED)}"
        yield say("error", "other-shape", key, message, help)
    elif differing:
        severity: Severity = "error"
        if [*differing] == ["model_type"] and {family, _SHAPES[named][0]} == {"olmo2", "olmo3"}:
            # the one trains as the other, but for the attention beyond 4,096 positions
            severity = "warning"
        what = ", ".join(
            f"{size} is {shorten(model[size])}, not {n}" for size, n in differing.items()
        )
        late = "loading fails once the data are tokenised"
        if not values.schema.does(behaviour.VERIFIES_EXPORT):
            late += ", or layers keep random weights"
        message = f"{shorten(name)} does not fit OLMo-core's {named}: {what}: {late}"
        yield say(severity, "other-shape", key, message, help)


def _find_fitting_shape(model: Mapping[str, Any]) -> str | None:
    for shape in _SHAPES:
        # OLMo-core does not scale llama's rotary embedding
        if shape != "llama3_8B" and not _find_differences(model, shape):
            return shape
    return None


def _find_differences(model: Mapping[str, Any], shape: str) -> dict[str, str | int]:
    """What OLMo-core's shape has otherwise than a model's config, which may leave something out."""
    expected = zip(_SIZES, _SHAPES.get(shape, ()), strict=False)
    return {size: n for size, n in expected if model.get(size) not in (None, n)}


@where(behaviour.LOADS_HF_WEIGHTS)
@cites(
    "dpo.py::main[load_hf_model(args.model_name_or_path]",
    "olmo_core/nn/hf/checkpoint.py::load_hf_model[elif repo_exists]",
    reviewed=("e6c3044aa620",),
)
def offline_model(context: Context) -> Iterator[Finding]:
    """After tokenising and building, OLMo-core asks the hub whether it has the name.

    No cache answers that, and of a folder it is not asked. Hybrid models transformers loads, from
    its cache too.
    """
    values = context.values
    environ = context.environ
    name = values["model_name_or_path"]
    variable = model_config.find_offline_variable(environ)
    far = isinstance(name, str) and name and not model_config.is_local(name)
    by_transformers = shape_of(values)[0].startswith(_HYBRID)
    asks_hub = far and not model_config.is_path(name) and not by_transformers
    if variable is None or not asks_hub or caches_only(context):
        yield from _check_missing_weights(context)
        return
    folder = model_config.find_snapshot(name, environ) or "<what `hf download` prints>"
    message = f"{variable} is set and {shorten(name)} is a hub name: "
    message += "OLMo-core asks the hub once the model is built, and crashes, whatever is cached"
    help = f"write `model_name_or_path: {folder}`"
    if not values["config_name"]:
        help += f" and `config_name: {values.schema.models.get(name, '<its shape>')}`"
    help += f"; or unset {variable}"
    yield say(context.at_start, "offline-hub-model", "model_name_or_path", message, help)


def _check_missing_weights(context: Context) -> Iterator[Finding]:
    """olmo_core_utils.py::setup_model[model_config_args.config_name or]: a `config_name` is one of
    OLMo-core's own, no folder and nothing of the hub's.
    """
    if context.machine is None:
        return
    for finding in missing_model(context):
        if finding.key != "args.config_name":
            yield finding


@cites("dpo.py::main[trainer = train.TrainerConfig]", reviewed=("e6c3044aa620",))
@needs("machine")
def goes_on(context: Context) -> Iterator[Finding]:
    """OLMo-core's trainer continues from what its save folder holds; launch does not judge that."""
    folder = output_folder(context.values)
    saved = [int(n[4:]) for n in files.list_names(folder) if n[:4] == "step" and n[4:].isdecimal()]
    if any(saved):
        message = (
            f"{folder} holds step{max(saved)}: OLMo-core continues from there, unchecked by launch"
        )
        help = "name another `output_dir` to start over"
        yield say("warning", "resume-unjudged", "output_dir", message, help)


@needs("machine")
def no_compiler(context: Context) -> Iterator[Finding]:
    """Triton builds a launcher in C for every kernel; without a GPU OLMo-core compiles nothing."""
    compiles = context.gpus and context.values["compile_model"]
    if compiles and not caches_only(context):
        yield from services.no_compiler(context, "compile_model")


@cites("data_loader.py::HFDataLoader._reshard_with_packing[at_max_samples = len]")
def accumulation(context: Context) -> Iterator[Finding]:
    """What the file itself says; `packed_batch` judges a `batch.global` that the plan splits."""
    is_planned = context.split is not None and context.split.total is not None
    if context.values["packing"] and not is_planned and (context.accumulation or 1) > 1:
        help = "write the pairs of a row as `per_device`, without accumulation"
        message = _explain_accumulation(context.accumulation)
        yield say("warning", "accumulation-packed", "gradient_accumulation_steps", message, help)


def _explain_accumulation(times: int | None) -> str:
    """dpo.py::main[args.gradient_accumulation_steps]: a step's pairs of one rank go into one row
    (data_loader.py::HFDataLoader._reshard_with_packing[at_max_samples = len]), or wait for the
    next.
    """
    return (
        f"with `packing` a step is one row a GPU: {times} accumulation steps only raise "
        "how many pairs may stand in it, and what does not fit waits for the next step"
    )


def wandb_key(context: Context) -> Iterator[Finding]:
    """olmo_core's WandBCallback wants the variable; an entry in ~/.netrc does not do."""
    if context.values["with_tracking"] and not context.environ.get("WANDB_API_KEY"):
        message = (
            "`with_tracking`: OLMo-core wants WANDB_API_KEY in the environment, ~/.netrc is not "
            "enough"
        )
        help = "export WANDB_API_KEY, or `with_tracking: false`"
        yield say(context.at_start, "no-wandb-key", "with_tracking", message, help)


@cites("olmo_core_utils.py::load_dataset_distributed[dist.barrier()]")
def tokenising(context: Context) -> Iterator[Finding]:
    """The others wait for so long, which `timeout` does not reach."""
    yield from tokenising_outlasts(context, seconds=_TIMEOUT_S)


@where(behaviour.PACKS_WITH_FLASH_ALONE)
def packed_without_documents(context: Context) -> Iterator[Finding]:
    """Since #1670 samples are kept apart by flash-attn's lengths of documents; others are refused.

    `model_utils.py` takes flash-attn where it is installed and none is named, and torch's own
    without a GPU.
    """
    values = context.values
    if not values["packing"] or values["cache_dataset_only"]:
        return
    why = why_joined(context)
    if why is None:
        return
    key = "packing"
    if values["attn_implementation"] is not None:
        key = "attn_implementation"
    message = f"`packing` crashes once the model is built: {why}"
    yield say(
        "error",
        "packing-refused",
        key,
        message,
        "`pip install flash-attn`, or write `packing: false`",
    )


def why_joined(context: Context) -> str | None:
    """Why packed samples would attend to each other; None where flash-attn keeps them apart."""
    chosen = context.values["attn_implementation"]
    if str(chosen).startswith("flash"):
        return None
    if chosen is not None:
        return f"`attn_implementation: {chosen}` keeps no packed samples apart"
    if context.gpus == 0:
        return "without a GPU attention is torch's, which keeps no packed samples apart"
    if context.lacks("flash-attn", "flash-attn-3"):
        return (
            "the trainer's Python has no flash-attn, and torch's attention keeps no packed "
            "samples apart"
        )
    return None


@cites(
    "olmo_core/nn/attention/recurrent.py::GatedDeltaNet.__init__[assert has_fla()]",
    "olmo_core/nn/transformer/config.py::TransformerConfig.ngpt_like",
)
def unbuildable(context: Context) -> Iterator[Finding]:
    """Some of OLMo-core's shapes want a package more, or refuse the attention that scripts pass."""
    named, key = shape_of(context.values)
    if context.values["cache_dataset_only"] or named not in context.values.schema.configs:
        return
    if named.startswith(_RECURRENT) and context.lacks("flash-linear-attention", "fla-core"):
        message = (
            f"{named} has recurrent layers: building it crashes without flash-linear-attention"
        )
        yield say(
            "error", "unsupported-model", key, message, "`pip install flash-linear-attention`"
        )
    if named.startswith(_OWN_ATTENTION):
        script = script_of(context.values)
        message = (
            f"{named} takes no `attn_implementation`, which {script} always hands over: "
            "building it crashes"
        )
        help = f"another shape; for any other model {trains_instead(context.values)}"
        yield say("error", "unsupported-model", key, message, help)


# older commits have others, or neither
_DEGREES = ("fsdp_shard_degree", "fsdp_num_replicas")


@needs("split")
def laid_out(context: Context) -> Iterator[Finding]:
    """FSDP's mesh over so many processes."""
    if context.split is not None:
        yield from degrees(context.values, context.split.processes)


@needs("split")
def filled_step(context: Context) -> Iterator[Finding]:
    """Rows that fill no step of these devices."""
    values = context.values
    split = context.split
    if split is None or split.rows is None or values["cache_dataset_only"]:
        return
    times = context.accumulation or 1
    yield from _check_row_count(
        values, split.rows, each=context.per_device or 1, times=times, devices=split.devices
    )


@needs("split")
def packed_batch(context: Context) -> Iterator[Finding]:
    """A packed step, of which the stage file says how many rows it has."""
    split = context.split
    times = context.accumulation or 1
    if split is None or split.total is None or not context.values["packing"] or times <= 1:
        return
    help = (
        f"`batch.global` is at most `per_device` x {split.devices} GPU(s) here: choose the "
        "learning rate for that"
    )
    yield say_of_option(
        "warning", "accumulation-packed", "batch.global", _explain_accumulation(times), help
    )


def degrees(values: Values, processes: int) -> Iterator[Finding]:
    """Whether FSDP's mesh can be laid over so many processes.

    olmo_core's DataParallelConfig: replicas x shards are the data-parallel
    processes, which are all of them divided by `tensor_parallel_degree`
    (dpo.py::main[dp_world_size = world_size]).
    """
    tensor = values["tensor_parallel_degree"]
    if not isinstance(tensor, int) or tensor < 1 or processes % tensor:
        yield _report_uneven("tensor_parallel_degree", tensor, processes, "processes")
        return
    world = processes // tensor
    chosen = {key: values[key] for key in _DEGREES if values.get(key) is not None}
    for key, degree in chosen.items():
        if degree < 1 or world % degree:
            yield _report_uneven(key, degree, world, "data-parallel processes")
            return
    if len(chosen) == 2 and math.prod(chosen.values()) != world:
        shards, replicas = chosen.values()
        message = (
            f"{replicas} replicas of {shards} shards are {shards * replicas} processes, not {world}"
        )
        help = "give one of `fsdp_shard_degree` and `fsdp_num_replicas`: the other follows"
        yield say("error", "shard-degree", "fsdp_num_replicas", message, help)


def _check_row_count(
    values: Values, rows: int, *, each: int, times: int, devices: int
) -> Iterator[Finding]:
    """Fewer rows than a step of all ranks takes (the last batch is left out), or than the reference
    pass.

    A filter may leave less than `rows`, never more. The reference pass repeats rows once to fill
    its batch of four times as many pairs (dpo.py::main[cache_batch_size = int],
    data_loader.py::HFDataLoader._reshard[pad_indices = all_indices]), packed its last row.
    """
    step = each * times * devices
    reference = 4 * each * devices
    if values["packing"]:
        step = devices
        reference = 0
    if rows < step and not values["cache_logprobs_only"]:
        message = f"{rows:,} rows are less than one step of {step:,}: there is nothing to train on"
        yield say(
            "error",
            "too-few-rows",
            "mixer_list",
            message,
            "fewer GPUs, a smaller batch, or more rows",
        )
    elif 2 * rows < reference:
        message = (
            f"the reference pass takes {reference:,} pairs at a time and needs half as many "
            f"rows, not {rows:,}"
        )
        yield say(
            "error",
            "too-few-rows",
            "mixer_list",
            message,
            "a smaller `per_device`, fewer GPUs, or more rows",
        )


def _report_uneven(key: str, degree: Any, world: int, what: str) -> Finding:
    message = f"`{key}: {degree}` does not divide {world} {what}"
    help = one_divisor(world)
    if key != "tensor_parallel_degree":
        help += ", or leave it out: each machine then holds one whole model"
    return say("error", "shard-degree", key, message, help)


def one_divisor(number: int) -> str:
    """What to write where a number has to divide another."""
    divisors = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return f"one of {', '.join(divisors)}"


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
    shards, replicas = map(values.get, _DEGREES)
    if shards is not None:
        return world // shards, shards
    if replicas is not None:
        return replicas, world // replicas
    return nodes, world // nodes


STAGE_RULES: tuple[StageRule, ...] = (
    unintended_output,
    impossible_name,
    no_deepspeed,
    packed_without_documents,
    unbuildable,
    gradient.scaled_by_limit,
    olmo_tokenizer,
    tokenising,
    precision,
    other_shape,
    goes_on,
    no_compiler,
    accumulation,
    wandb_key,
    beyond_positions,
    beyond_olmo_core,
    offline_model,
    services.hub_token,
    services.remote_code,
    laid_out,
    filled_step,
    packed_batch,
)
