"""Rules about a model: is all of it here, and what can it do, by its config."""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.artifacts import architecture, chat_template, model_config, model_files
from launcher.artifacts.architecture import Shape
from launcher.errors import Finding, InvalidConfig, Severity, shorten
from launcher.paths import can_be_name, exists, is_dir, is_file
from launcher.rules.context import Context, RuleTable, StageRule, caches_only, section
from launcher.rules.premises import where
from launcher.rules.rule import cites, needs, say
from launcher.rules.trl.resolved import inline
from launcher.upstream import behaviour

# liger_kernel/transformers/monkey_patch.py::[MODEL_TYPE_TO_APPLY_LIGER_FN], release 0.7.0, the one
# that the pin locks
LIGER_RELEASE = [0, 7]
LIGER_MODELS = frozenset(
    """
    gemma gemma2 gemma3_text gemma3 glm4 glm4v glm4v_moe gpt_oss internvl
    llama llama4_text llama4 llava granite mllama mllama_text_model mistral mixtral
    olmo2 pixtral olmo3 qwen2 qwen3 qwen3_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text
    qwen3_next qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text smollm3 phi3 paligemma
    falcon_h1 smolvlm hunyuan_v1_dense hunyuan_v1_moe exaone4
    """.split()
)
Sizes = Mapping[str, architecture.Size]
_NO_LIGER = "write `use_liger_kernel: false`"


@cites(
    "liger_kernel/transformers/auto_model.py::AutoLigerKernelForCausalLM.from_pretrained[MODEL_TYPE_TO_APPLY_LIGER_FN]",
    "liger_kernel/transformers/monkey_patch.py::_apply_liger_kernel_to_instance[logger.info(f]",
)
def liger_unknown(context: Context) -> Iterator[Finding]:
    """open-instruct looks the model up and fails; TRL patches nothing without a word."""
    values = context.values
    if not values["use_liger_kernel"] or values.get("use_qlora") or caches_only(context):
        return
    config = model_config.read_model_config(
        values["model_name_or_path"], context.environ, values.get("model_revision")
    )
    family = config.get("model_type")
    if not isinstance(family, str) or family in LIGER_MODELS:
        return
    severity: Severity = "warning"
    release = "0.7.0"
    installed = (context.packages or {}).get("liger-kernel")
    # of a later release nothing is known
    if installed is not None and list(map(int, re.findall(r"\d+", installed)[:2])) <= LIGER_RELEASE:
        release = installed
        if context.entry.strict_liger:
            severity = "error"
    effect = "nothing would be patched"
    if context.entry.strict_liger:
        effect = "upstream fails with a KeyError"
    message = f"Liger {release} has no kernels for {family} models: {effect}"
    yield say(severity, "liger-unknown-model", "use_liger_kernel", message, _NO_LIGER)


@cites("liger_kernel/ops/rms_norm.py::rms_norm_forward[n_rows,)]")
def liger_on_cpu(context: Context) -> Iterator[Finding]:
    """Its kernels are Triton's, which need a GPU."""
    if not context.values["use_liger_kernel"] or context.gpus != 0 or caches_only(context):
        return
    if not context.environ.get("TRITON_INTERPRET"):
        message = "Liger's kernels need a GPU, and `--gpus 0` has none"
        yield say("error", "liger-on-cpu", "use_liger_kernel", message, _NO_LIGER)


@where(behaviour.CUTS_ROWS)
@cites(
    "dataset_transformation.py::sft_tulu_tokenize_and_truncate_v1[max_length=max_seq_length]",
    "trl/trainer/sft_config.py::SFTConfig[max_length: int]",
    reviewed=("e6c3044aa620",),
)
def beyond_positions(context: Context) -> Iterator[Finding]:
    """`dataset_transformation.py` and `sft_config.py` cut at what is asked for; no one asks the
    model how far it reaches.
    """
    values = context.values
    key = "max_seq_length" if "max_seq_length" in values else "max_length"
    length = values.get(key)
    reach = positions(model_config.build_config(values, context.environ))
    if reach is None or not values.given(key) or not isinstance(length, int):
        return
    reach = max(reach, _compute_scaled_positions(context))
    if length > reach:
        message = f"`{key}: {length}` goes beyond the {reach} positions that the model was made for"
        help = f"write `{key}: {reach}`, or a model with a longer context"
        yield say("warning", "beyond-positions", key, message, help)


def _compute_scaled_positions(context: Context) -> int:
    """How far a model reaches by arguments that scale its rotary embedding; 0 where none does."""
    values = context.values
    factor = values.get("rope_scaling_factor")
    original = values.get("rope_scaling_old_context_len")
    if not context.entry.scales_positions or not isinstance(original, int):
        return 0
    if not isinstance(factor, int | float) or not math.isfinite(factor):
        return 0
    return int(factor * original)


def positions(config: Mapping[str, Any]) -> int | None:
    """How many positions a model was made for, the scaling of its rotary embedding included."""
    text = model_config.take_text_part(config)
    plain = text.get("max_position_embeddings", text.get("n_positions"))
    if not isinstance(plain, int) or plain < 1:
        return None
    scaling = section(text, "rope_parameters") or section(text, "rope_scaling")
    factor = scaling.get("factor", 1)
    # some families write the stretched length into `max_position_embeddings`, some the original
    original = scaling.get("original_max_position_embeddings", plain)
    stretched = isinstance(factor, int | float) and math.isfinite(factor) and factor > 1
    if stretched and isinstance(original, int):
        return max(plain, int(original * factor))
    return plain


@cites(
    "finetune.py::main[attn_implementation #3]",
    "olmo_core_utils.py::ModelConfig.__post_init__[model_utils.detect_attn_implementation]",
    reviewed=("e6c3044aa620",),
)
def packed_without_flash(context: Context) -> Iterator[Finding]:
    """Measured: 4,209 against 6,804 tokens/s (0.5 B model, H200). `finetune.py` detects the
    attention, as DPO does where none is given.
    """
    values = context.values
    if not values["packing"] or context.gpus == 0 or caches_only(context):
        return
    attention = values.get("attn_implementation")
    if attention in {"torch", "te"}:
        cause = f"`attn_implementation: {attention}` has"
    elif attention is None and context.lacks("flash-attn", "flash-attn-3"):
        cause = "the trainer's Python has no flash-attn, so there are"
    else:
        return
    worse = "packing was measured slower than padding without"
    if values.schema.pairs:
        # measured with the pinned script: it leaves the cache on, and transformers drops the mask
        worse += ", and DPO's packed samples see each other"
    message = f"{cause} no flash-attention kernels: {worse}"
    help = "pip install flash-attn, or `packing: false`"
    yield say("warning", "packing-without-flash", "packing", message, help)


@cites(
    "finetune.py::main[TensorDataCollatorWithFlattening]",
    "padding_free_collator.py::TensorDataCollatorWithFlattening.__call__[cu_seq_lens_q]",
    reviewed=("e6c3044aa620",),
)
def packed_alone(context: Context) -> Iterator[Finding]:
    """`finetune.py` packs the rows of one micro-batch, and no others."""
    if context.values["packing"] and context.per_device == 1 and not caches_only(context):
        message = (
            "`packing` does nothing here: it joins the rows of a micro-batch, which is one row"
        )
        help = "`batch: {per_device: 2}` or more, or `packing: false`"
        yield say("warning", "packing-of-one", "packing", message, help)


# arguments of the loader with which other files are right than the usual ones
_OTHER_FILES = {"gguf_file", "ignore_mismatched_sizes", "subfolder", "use_safetensors", "variant"}
_CODE = "incomplete-model"
_MODEL = "model_name_or_path"


def _read_config(context: Context) -> Mapping[str, Any]:
    values = context.values
    name = values.get("config_name") or values[_MODEL]
    return model_config.read_model_config(name, context.environ, values.get("model_revision"))


def _read_arguments(context: Context) -> Mapping[str, Any]:
    values = context.values
    arguments = inline(values.get("model_init_kwargs"))
    return arguments or model_config.parse_replacements(values.get("additional_model_arguments"))


@cites("transformers/modeling_utils.py::PreTrainedModel.from_pretrained[model = cls(config]")
def other_weights(context: Context) -> Iterator[Finding]:
    """What has another size in the files is refused, and what is not in them begins at random,
    which a table in the log says.
    """
    arguments = _read_arguments(context)
    name = str(context.values[_MODEL] or "")
    if not is_dir(name) or arguments.keys() & _OTHER_FILES:
        return
    shape = _find_shape(model_config.read_model_config(name, context.environ))
    if shape is None:
        return
    stored = model_files.read_sizes(Path(name))
    if stored is None:
        return
    if not any(weight.startswith("model.") for weight in stored):
        stored = _add_prefix(stored, shape)
    described = by_name(shape)
    needed = by_name(_find_shape({**_read_config(context), **arguments}) or shape)
    common = needed.keys() & stored.keys()
    differing = [weight for weight in common if described.get(weight) != stored[weight]]
    if differing:
        weight = min(differing)
        of_files = " x ".join(map(str, stored[weight]))
        of_config = " x ".join(map(str, needed[weight]))
        fault = f"{weight} is {of_files} in its files, and {of_config} by its config.json"
        message = f"{shorten(name)} cannot be trained from: {fault}"
        yield say(context.at_start, _CODE, _MODEL, message, "config.json is another model's")
    missing = sorted(needed.keys() - stored.keys())
    if missing:
        share = f"{len(missing)} of {len(needed)} weights of {shorten(name)}"
        message = f"{share} are in no file and begin at random: {missing[0]} ..."
        help = None
        if stored:
            help = f"its files hold {next(iter(stored))} and others"
        # single ones may be meant to
        severity: Severity = "warning"
        if len(missing) == len(needed):
            severity = context.at_start
        yield say(severity, _CODE, _MODEL, message, help)


def _add_prefix(sizes: Sizes, shape: Shape) -> Sizes:
    """The weights of a model without its head, by the names that transformers completes."""
    completed = {}
    for weight, size in sizes.items():
        if weight not in shape.outer:
            weight = f"model.{weight}"
        completed[weight] = size
    return completed


def by_name(shape: Shape) -> Sizes:
    sizes = dict(shape.outer)
    for layer in range(shape.layers):
        for name, size in shape.layer.items():
            sizes[f"model.layers.{layer}.{name}"] = size
    return sizes


def _find_shape(config: Mapping[str, Any]) -> Shape | None:
    try:
        return architecture.parse_shape(config)
    except InvalidConfig:
        return None


@cites(
    "finetune.py::main[args.model_name_or_path #6]",
    "dpo_tune_cache.py::main[config = AutoConfig.from_pretrained #2]",
    "finetune.py::main[model_path = args.config_name]",
    "finetune.py::main[args.model_name_or_path if]",
    "trl/scripts/sft.py::main[model=model_args.model_name_or_path]",
    reviewed=("e6c3044aa620",),
)
@needs("machine")
def missing_model(context: Context) -> Iterator[Finding]:
    """Neither a folder nor a hub name; nor what the config or the tokenizer is taken from."""
    seen = set()
    for key in (_MODEL, "config_name", "tokenizer_name_or_path"):
        name = context.values.get(key)
        if isinstance(name, str) and name and name not in seen:
            seen.add(name)
            yield from _check_missing(context, key, name)


def _check_missing(context: Context, key: str, name: str) -> Iterator[Finding]:
    # the config alone may be a file
    if is_file(name) and key != "config_name":
        message = f"{name} is a file, not a folder"
        help = f"name the folder with its config.json, such as {Path(name).parent}"
    elif model_config.is_local(name) or (key == _MODEL and _read_config(context)):
        return
    elif model_config.is_path(name):
        message = f"there is no folder {name} here"
        help = "relative paths start where launch is started; `~` is not expanded"
    elif model_config.is_offline(context.environ) and not model_config.is_cached(
        name, context.environ
    ):
        absent = f"{name} is neither a folder here nor in the hub's cache"
        message = f"{absent}, and HF_HUB_OFFLINE is set"
        help = "unset HF_HUB_OFFLINE, or download it first"
    else:
        return
    yield say("error", "missing-model", key, message, help)


@cites(
    "finetune.py::main[model_path = args.config_name]",
    "finetune.py::main[args.model_name_or_path if]",
    reviewed=("e6c3044aa620",),
)
def impossible_name(context: Context) -> Iterator[Finding]:
    """Looked up as a folder, then on the hub, and neither can have such a name."""
    help = "name a folder, or something on the hub"
    for key in (_MODEL, "config_name", "tokenizer_name_or_path", context.entry.names.data):
        value = context.values.get(key)
        names = [value]
        if isinstance(value, list) and context.entry.mixes:
            names = value[::2]
        for name in names:
            if isinstance(name, str) and _is_impossible(name):
                message = f"`{key}`: no folder and nothing on the hub can be called {shorten(name)}"
                yield say("error", "impossible-name", key, message, help)


def _is_impossible(text: str) -> bool:
    if not can_be_name(text):
        return True
    return chat_template.is_template(text) and not exists(text)


@cites(
    "transformers/modeling_utils.py::_get_resolved_checkpoint_files[Error no file named #2]",
    "transformers/models/auto/configuration_auto.py::"
    "AutoConfig.from_pretrained[Unrecognized model]",
)
def incomplete_model(context: Context) -> Iterator[Finding]:
    """Seen when it is loaded, on every GPU. A folder with a config alone is one to plan with."""
    values = context.values
    if caches_only(context) or _read_arguments(context).keys() & _OTHER_FILES:
        return
    revision = values.get("model_revision")
    key = "config_name" if values.get("config_name") else _MODEL
    folder = _find_folder_to_read(context, values[key], revision)
    if folder is not None:
        # `adapter_alone` speaks of it
        if model_files.is_adapter(folder):
            return
        fault = model_files.find_config_fault(folder)
        if fault is not None:
            yield _report_incomplete(context, _CODE, key, fault)
            if key == _MODEL:
                return
    folder = _find_folder_to_read(context, values[_MODEL], revision)
    if folder is None or model_files.is_adapter(folder):
        return
    fault = model_files.find_weights_fault(folder)
    # transformers/integrations/peft.py::PeftAdapterMixin.load_adapter[module.requires_grad_]
    if fault is None and is_file(folder / model_files.ADAPTER) and not context.lacks("peft"):
        fault = (
            f"the adapter beside its weights ({model_files.ADAPTER}) is put on, and nothing is "
            "trained"
        )
    if fault is not None:
        yield _report_incomplete(context, _CODE, _MODEL, fault)


@cites(
    "transformers/models/auto/configuration_auto.py::"
    "AutoConfig.from_pretrained[Unrecognized model]",
    "transformers/modeling_utils.py::_get_resolved_checkpoint_files[Error no file named #2]",
)
def adapter_alone(context: Context) -> Iterator[Finding]:
    """No trainer loads an adapter's folder as a model.

    With a config.json beside the adapter it looks for weights of the whole model.
    """
    values = context.values
    if caches_only(context):
        return
    for key in ("config_name", _MODEL):
        folder = _find_adapter_folder(context, values.get(key))
        if folder is None:
            continue
        name = str(values[key])
        alone = f"{shorten(name)} is an adapter alone ({model_files.ADAPTER})"
        message = f"{alone}, without the model that it was made for"
        base = model_files.find_adapter_base(folder)
        if base is not None:
            message += f", {shorten(base)}"
        command = _render_merge_command(name, folder, base)
        help = f"merge it first, and name the merged model: {command}"
        yield say(context.at_start, "adapter-alone", key, message, help)


def _find_adapter_folder(context: Context, name: object) -> Path | None:
    """The folder of an adapter without a model, here or in the hub's cache."""
    folder = folder_of(context, name, context.values.get("model_revision"))
    if folder is None or not model_files.is_adapter(folder):
        return None
    return folder


def folder_of(context: Context, name: object, revision: str | None) -> Path | None:
    """The folder of that name, or else of the hub's cache."""
    if not isinstance(name, str) or not name:
        return None
    if is_dir(name):
        return Path(name)
    if model_config.is_path(name):
        return None
    return model_config.find_snapshot(name, context.environ, revision)


def _render_merge_command(name: str, folder: Path, base: str | None) -> str:
    """A line for a shell that writes the merged model, and the tokenizer with it."""
    merged = f"{name.rstrip('/')}-merged"
    if folder != Path(name):
        merged = f"./{name.split('/')[-1]}-merged"
    tokenizer = name
    if base is not None and not model_files.has_tokenizer(folder):
        tokenizer = base
    # the shell's quotes are single ones
    quoted = [json.dumps(text) for text in (name, merged, tokenizer)]
    code = (
        "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer "
        f"as T; M.from_pretrained({quoted[0]}).merge_and_unload().save_pretrained({quoted[1]}); "
        f"T.from_pretrained({quoted[2]}).save_pretrained({quoted[1]})"
    )
    return f"python -c {shlex.quote(code)}"


@cites("transformers/models/qwen2/tokenization_qwen2.py::Qwen2Tokenizer.__init__[self._vocab =]")
def incomplete_tokenizer(context: Context) -> Iterator[Finding]:
    """Without its files one without words is made."""
    values = context.values
    named = [key for key in ("tokenizer_name_or_path", _MODEL) if values.get(key)]
    revision = values.get("tokenizer_revision") or values.get("model_revision")
    for key in (*named[:1], "chat_template_path"):
        folder = _find_folder_to_read(context, values.get(key), revision)
        if folder is None or (key == _MODEL and model_files.is_adapter(folder)):
            continue
        fault = model_files.find_tokenizer_fault(folder)
        if fault is not None:
            yield _report_incomplete(context, "incomplete-tokenizer", key, fault)


def _report_incomplete(context: Context, code: str, key: str, fault: str) -> Finding:
    name = str(context.values[key])
    message = f"{shorten(name)} cannot be trained from: {fault}"
    help = "finish the run that makes it, or copy it again"
    if "git-lfs" in fault:
        help = f"git -C {shlex.quote(name)} lfs pull"
    return say(context.at_start, code, key, message, help)


def _find_folder_to_read(context: Context, name: object, revision: str | None) -> Path | None:
    """The folder that is read and nothing else: of the hub's cache what is missing is fetched.

    One that only describes a model says nothing before something is to be started.
    """
    if isinstance(name, str) and name and is_dir(name):
        folder = Path(name)
    elif model_config.is_offline(context.environ):
        config = model_config.find_config_file(name, context.environ, revision)
        if config is None:
            return None
        folder = config.parent
    else:
        return None
    if context.machine is None and model_files.is_bare(folder):
        return None
    return folder


_ABLE: tuple[StageRule, ...] = (liger_unknown, liger_on_cpu, beyond_positions)
_FILES = (impossible_name, missing_model, adapter_alone, incomplete_model, incomplete_tokenizer)
_SHARED: tuple[StageRule, ...] = (*_ABLE, *_FILES, other_weights)

RULES: RuleTable = {
    "open_instruct": {
        "sft": (*_SHARED, packed_without_flash, packed_alone),
        "dpo": (*_SHARED, packed_without_flash),
    },
    "trl": dict.fromkeys(("sft", "dpo"), _SHARED),
}
