"""Rules about a model: what it can do, by its config where that lies here; is it here, and is all of it here?"""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.artifacts import architecture, chat_template, model_config, model_files
from launcher.artifacts.architecture import Shape
from launcher.errors import Finding, InvalidConfig, Severity, brief
from launcher.paths import can_be_name, exists, is_dir, is_file
from launcher.rules.context import Context, StageRule, caches_only, section
from launcher.rules.premises import where
from launcher.rules.rule import cites, needs, say
from launcher.rules.trl.resolved import inline
from launcher.upstream import behaviour

# liger_kernel/transformers/monkey_patch.py::[MODEL_TYPE_TO_APPLY_LIGER_FN], release 0.7.0, the one that the pin locks
LIGER_RELEASE = [0, 7]
LIGER_MODELS = frozenset(
    """
    gemma gemma2 gemma3_text gemma3 glm4 glm4v glm4v_moe gpt_oss internvl llama llama4_text llama4 llava
    granite mllama mllama_text_model mistral mixtral olmo2 pixtral olmo3 qwen2 qwen3 qwen3_moe qwen2_vl
    qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3_next qwen3_vl qwen3_vl_text qwen3_vl_moe
    qwen3_vl_moe_text smollm3 phi3 paligemma falcon_h1 smolvlm hunyuan_v1_dense hunyuan_v1_moe exaone4
    """.split()
)
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
    config = model_config.read(values["model_name_or_path"], context.environ, values.get("model_revision"))
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in LIGER_MODELS:
        return
    have = (context.packages or {}).get("liger-kernel")
    # of a later release nothing is known
    known = have is not None and [int(part) for part in re.findall(r"\d+", have)[:2]] <= LIGER_RELEASE
    crashes = context.entry.strict_liger
    what = "upstream fails with a KeyError" if crashes else "nothing would be patched"
    message = f"Liger {have if known else '0.7.0'} has no kernels for {kind} models: {what}"
    severity: Severity = "error" if crashes and known else "warning"
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
    key = "max_seq_length" if "max_seq_length" in context.values else "max_length"
    length, reach = context.values.get(key), positions(model_config.built_from(context.values, context.environ))
    if reach is not None:
        reach = max(reach, _scaled_positions(context))
    if context.values.given(key) and isinstance(length, int) and reach and length > reach:
        message = f"`{key}: {length}` goes beyond the {reach} positions that the model was made for"
        help = f"write `{key}: {reach}`, or a model with a longer context"
        yield say("warning", "beyond-positions", key, message, help)


def _scaled_positions(context: Context) -> int:
    """How far a model reaches by arguments that scale its rotary embedding; 0 where none does."""
    values = context.values
    factor = values.get("rope_scaling_factor")
    original = values.get("rope_scaling_old_context_len")
    if not context.entry.scales_positions or not isinstance(factor, int | float) or not isinstance(original, int):
        return 0
    return int(factor * original) if math.isfinite(factor) else 0


def positions(config: Mapping[str, Any]) -> int | None:
    """How many positions a model was made for, the scaling of its rotary embedding included."""
    text = model_config.text_part(config)
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
    given = values.get("attn_implementation")
    slow = f"`attn_implementation: {given}` has" if given in {"torch", "te"} else None
    if given is None and context.lacks("flash-attn", "flash-attn-3"):
        slow = "the trainer's Python has no flash-attn, so there are"
    if slow is None:
        return
    worse = "packing was measured slower than padding without"
    if values.schema.pairs:
        # measured with the pinned script: it leaves the cache on, and transformers drops the mask
        worse += ", and DPO's packed samples see each other"
    message = f"{slow} no flash-attention kernels: {worse}"
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
        message = "`packing` does nothing here: it joins the rows of a micro-batch, which is one row"
        help = "`batch: {per_device: 2}` or more, or `packing: false`"
        yield say("warning", "packing-of-one", "packing", message, help)


# arguments of the loader with which other files are right than the usual ones
_OTHER_FILES = {"gguf_file", "ignore_mismatched_sizes", "subfolder", "use_safetensors", "variant"}
_CODE = "incomplete-model"
_MODEL = "model_name_or_path"


def _config(context: Context) -> Mapping[str, Any]:
    values = context.values
    name = values.get("config_name") or values[_MODEL]
    return model_config.read(name, context.environ, values.get("model_revision"))


def _arguments(context: Context) -> Mapping[str, Any]:
    values = context.values
    return inline(values.get("model_init_kwargs")) or model_config.replaced(values.get("additional_model_arguments"))


@cites("transformers/modeling_utils.py::PreTrainedModel.from_pretrained[model = cls(config]")
def other_weights(context: Context) -> Iterator[Finding]:
    """What has another size in the files is refused, and what is not in them begins at random,
    which a table in the log says.
    """
    given = _arguments(context)
    name = str(context.values[_MODEL] or "")
    own = _shape(model_config.read(name, context.environ)) if is_dir(name) else None
    there = None if own is None or given.keys() & _OTHER_FILES else model_files.sizes(Path(name))
    if own is None or there is None:
        return
    if not any(one.startswith("model.") for one in there):
        # a model without its head, whose names transformers completes
        there = {one if one in own.outer else f"model.{one}": size for one, size in there.items()}
    needed = by_name(_shape({**_config(context), **given}) or own)
    other = [one for one in needed.keys() & there.keys() if by_name(own).get(one) != there[one]]
    if other:
        found, expected = (" x ".join(map(str, sizes[min(other)])) for sizes in (there, needed))
        fault = f"{min(other)} is {found} in its files, and {expected} by its config.json"
        message = f"{brief(name)} cannot be trained from: {fault}"
        yield say(context.at_start, _CODE, _MODEL, message, "config.json is another model's")
    if gone := sorted(needed.keys() - there.keys()):
        some = next(iter(there), None)
        message = (
            f"{len(gone)} of {len(needed)} weights of {brief(name)} are in no file and begin at random: {gone[0]} ..."
        )
        help = f"its files hold {some} and others" if some else None
        # single ones may be meant to
        yield say(context.at_start if len(gone) == len(needed) else "warning", _CODE, _MODEL, message, help)


def by_name(shape: Shape) -> Mapping[str, tuple[int, ...]]:
    inner = {f"model.layers.{i}.{n}": s for i in range(shape.layers) for n, s in shape.layer.items()}
    return {**shape.outer, **inner}


def _shape(config: Mapping[str, Any]) -> Shape | None:
    try:
        return architecture.shape_of(config)
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
    """Neither a folder nor a hub name; nor what open-instruct takes the config or the tokenizer
    from.
    """
    seen = set()
    for key in (_MODEL, "config_name", "tokenizer_name_or_path"):
        name = context.values.get(key)
        if isinstance(name, str) and name and name not in seen:
            seen.add(name)
            yield from _missing(context, key, name)


def _missing(context: Context, key: str, name: str) -> Iterator[Finding]:
    # the config alone may be a file
    if is_file(name) and key != "config_name":
        message = f"{name} is a file, not a folder"
        help = f"name the folder with its config.json, such as {Path(name).parent}"
    elif model_config.here(name) or (key == _MODEL and _config(context)):
        return
    elif model_config.is_path(name):
        message = f"there is no folder {name} here"
        help = "relative paths start where launch is started; `~` is not expanded"
    elif model_config.offline(context.environ) and not model_config.cached(name, context.environ):
        message = f"{name} is neither a folder here nor in the hub's cache, and HF_HUB_OFFLINE is set"
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
    values = context.values
    names = context.entry.names
    for key in (_MODEL, "config_name", "tokenizer_name_or_path", names.data):
        given = values.get(key)
        texts = given[::2] if isinstance(given, list) and context.entry.mixes else [given]
        for text in texts:
            if isinstance(text, str) and _is_impossible(text):
                message = f"`{key}`: no folder and nothing on the hub can be called {brief(text)}"
                yield say("error", "impossible-name", key, message, "name a folder, or something on the hub")


def _is_impossible(text: str) -> bool:
    if not can_be_name(text):
        return True
    return chat_template.is_template(text) and not exists(text)


@cites(
    "transformers/modeling_utils.py::_get_resolved_checkpoint_files[Error no file named #2]",
    "transformers/models/auto/configuration_auto.py::AutoConfig.from_pretrained[Unrecognized model]",
)
def incomplete_model(context: Context) -> Iterator[Finding]:
    """Seen when it is loaded, on every GPU. A folder with a config alone is one to plan with."""
    values = context.values
    revision, config = values.get("model_revision"), values.get("config_name")
    if caches_only(context) or _arguments(context).keys() & _OTHER_FILES:
        return
    folder = _read_from(context, config or values[_MODEL], revision)
    if folder is not None and model_files.is_adapter(folder):
        # `adapter_alone` speaks of it
        return
    if folder is not None and (fault := model_files.config_fault(folder)) is not None:
        yield _incomplete(context, _CODE, "config_name" if config else _MODEL, fault)
        if not config:
            return
    folder = _read_from(context, values[_MODEL], revision)
    if folder is None or model_files.is_adapter(folder):
        return
    fault = model_files.weights_fault(folder)
    # transformers/integrations/peft.py::PeftAdapterMixin.load_adapter[module.requires_grad_]
    if fault is None and is_file(folder / model_files.ADAPTER) and not context.lacks("peft"):
        fault = f"the adapter beside its weights ({model_files.ADAPTER}) is put on, and nothing is trained"
    if fault is not None:
        yield _incomplete(context, _CODE, _MODEL, fault)


@cites(
    "transformers/models/auto/configuration_auto.py::AutoConfig.from_pretrained[Unrecognized model]",
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
        folder = _adapter_folder(context, values.get(key))
        if folder is None:
            continue
        name = str(values[key])
        message = f"{brief(name)} is an adapter alone ({model_files.ADAPTER}), without the model that it was made for"
        base = model_files.adapter_base(folder)
        if base is not None:
            message += f", {brief(base)}"
        help = f"merge it first, and name the merged model: {_merge_command(name, folder, base)}"
        yield say(context.at_start, "adapter-alone", key, message, help)


def _adapter_folder(context: Context, name: object) -> Path | None:
    """The folder of an adapter without a model, here or in the hub's cache."""
    if not isinstance(name, str) or not name:
        return None
    folder: Path | None = Path(name)
    if not is_dir(name):
        folder = None
        if not model_config.is_path(name):
            folder = model_config.snapshot(name, context.environ, context.values.get("model_revision"))
    return folder if folder is not None and model_files.is_adapter(folder) else None


def _merge_command(name: str, folder: Path, base: str | None) -> str:
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
        "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; "
        f"M.from_pretrained({quoted[0]}).merge_and_unload().save_pretrained({quoted[1]}); "
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
        folder = _read_from(context, values.get(key), revision)
        if key == _MODEL and folder is not None and model_files.is_adapter(folder):
            continue
        if folder is not None and (fault := model_files.tokenizer_fault(folder)) is not None:
            yield _incomplete(context, "incomplete-tokenizer", key, fault)


def _incomplete(context: Context, code: str, key: str, fault: str) -> Finding:
    name = str(context.values[key])
    message = f"{brief(name)} cannot be trained from: {fault}"
    whole = "finish the run that makes it, or copy it again"
    help = f"git -C {shlex.quote(name)} lfs pull" if "git-lfs" in fault else whole
    return say(context.at_start, code, key, message, help)


def _read_from(context: Context, name: object, revision: str | None) -> Path | None:
    """The folder that is read and nothing else: of the hub's cache what is missing is fetched.

    One that only describes a model says nothing before something is to be started.
    """
    folder = None
    if isinstance(name, str) and name and is_dir(name):
        folder = Path(name)
    elif model_config.offline(context.environ):
        config = model_config.where(name, context.environ, revision)
        folder = None if config is None else config.parent
    described = folder is not None and context.machine is None and model_files.is_bare(folder)
    return None if described else folder


_ABLE: tuple[StageRule, ...] = (liger_unknown, liger_on_cpu, beyond_positions)
_FILES: tuple[StageRule, ...] = (impossible_name, missing_model, adapter_alone, incomplete_model, incomplete_tokenizer)
_SHARED: tuple[StageRule, ...] = (*_ABLE, *_FILES, other_weights)

RULES: Mapping[str, Mapping[str, tuple[StageRule, ...]]] = {
    "open_instruct": {"sft": (*_SHARED, packed_without_flash, packed_alone), "dpo": (*_SHARED, packed_without_flash)},
    "trl": dict.fromkeys(("sft", "dpo"), _SHARED),
}
