"""Rules that need the model's own config, where that lies here; the Liger ones serve TRL as well."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.backends import model_config, model_files
from launcher.backends.context import Context, StageRule, caches_only, section
from launcher.backends.loading_rules import CONFIGS, given_to_loader
from launcher.backends.rule import say
from launcher.errors import Finding, brief
from launcher.paths import is_file
from launcher.schema import Values

# liger_kernel/transformers/monkey_patch.py:2879, release 0.7.0, the one that the pin locks
LIGER_RELEASE = (0, 7)
LIGER_MODELS = frozenset({
    "gemma", "gemma2", "gemma3_text", "gemma3", "glm4", "glm4v", "glm4v_moe", "gpt_oss", "internvl",
    "llama", "llama4_text", "llama4", "llava", "granite", "mllama", "mllama_text_model", "mistral",
    "mixtral", "olmo2", "pixtral", "olmo3", "qwen2", "qwen3", "qwen3_moe", "qwen2_vl",
    "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_next", "qwen3_vl", "qwen3_vl_text",
    "qwen3_vl_moe", "qwen3_vl_moe_text", "smollm3", "phi3", "paligemma", "falcon_h1", "smolvlm",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "exaone4",
})  # fmt: skip

# what each of olmo-core's names needs installed (model_utils.py:51)
_FLASH = {"flash_2": "flash-attn", "flash_3": "flash-attn-3", "flash_4": "flash-attn-4"}
# what transformers wants to read files of torch.save with
_UNPICKLES = (2, 6)
_WHOLE = "finish the run that makes it, or copy it again"
_OFFLINE = {"1", "ON", "YES", "TRUE"}


def _own(context: Context) -> Mapping[str, Any]:
    """The config of the model whose weights are loaded."""
    values = context.values
    name, revision = values["model_name_or_path"], values.get("model_revision")
    return model_config.read(name, context.environ, revision)


# --- Liger -----------------------------------------------------------------------------------------


def liger_unknown(context: Context) -> Iterator[Finding]:
    """open-instruct looks the model up and fails (liger_kernel/transformers/auto_model.py:36); TRL
    patches nothing without a word (liger_kernel/transformers/monkey_patch.py:2974).
    """
    kind = _patched(context)
    if kind is None or kind in LIGER_MODELS:
        return
    have, known = _liger(context)
    crashes = context.values.schema.backend == "open_instruct"
    what = "upstream fails with a KeyError" if crashes else "nothing would be patched"
    yield say(
        "error" if crashes and known else "warning", "run", "liger-unknown-model",
        "use_liger_kernel", f"Liger {have} has no kernels for {kind} models: {what}",
        "write `use_liger_kernel: false`",
    )  # fmt: skip


def liger_without_fused_loss(context: Context) -> Iterator[Finding]:
    """finetune.py:587 asks for the fused loss beside the other one, which Granite's kernels have on
    (liger_kernel/transformers/monkey_patch.py:171: an AssertionError).
    """
    if _patched(context) != "granite":
        return
    have, known = _liger(context)
    yield say(
        "error" if known else "warning", "run", "liger-without-fused-loss", "use_liger_kernel",
        f"Liger {have} has no fused loss for granite models, which upstream asks "
        "for: it fails with an AssertionError",
        "write `use_liger_kernel: false`",
    )  # fmt: skip


def _patched(context: Context) -> str | None:
    """The type of the model that Liger is to patch, where it is to and the type is known."""
    values = context.values
    if not values["use_liger_kernel"] or values.get("use_qlora") or caches_only(context):
        return None
    kind = _own(context).get("model_type")
    return kind if isinstance(kind, str) else None


def _liger(context: Context) -> tuple[str, bool]:
    """The release to speak of, and whether it is the installed one: of a later one nothing is known."""
    have = (context.packages or {}).get("liger-kernel")
    if have is not None and _release(have) <= LIGER_RELEASE:
        return have, True
    return "0.7.0", False


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def liger_on_cpu(context: Context) -> Iterator[Finding]:
    """liger_kernel/ops/rms_norm.py:442: its kernels are Triton's, which need a GPU."""
    if not context.values["use_liger_kernel"] or context.gpus != 0 or caches_only(context):
        return
    if not context.environ.get("TRITON_INTERPRET"):
        yield say(
            "error", "run", "liger-on-cpu", "use_liger_kernel",
            "Liger's kernels need a GPU, and `--gpus 0` has none", "write `use_liger_kernel: false`",
        )  # fmt: skip


# --- length and attention --------------------------------------------------------------------------


def beyond_positions(context: Context) -> Iterator[Finding]:
    """dataset_transformation.py:1195, trl/trainer/sft_config.py:202 cut at what is asked for; no one
    asks the model how far it reaches.
    """
    key = "max_seq_length" if "max_seq_length" in context.values else "max_length"
    wanted, reach = (
        context.values.get(key),
        positions(model_config.built_from(context.values, context.environ)),
    )
    if context.values.given(key) and isinstance(wanted, int) and reach and wanted > reach:
        yield say(
            "warning", "run", "beyond-positions", key,
            f"`{key}: {wanted}` goes beyond the {reach} positions that the model was made for",
            f"write `{key}: {reach}`, or a model with a longer context",
        )  # fmt: skip


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


def packed_without_flash(context: Context) -> Iterator[Finding]:
    """Measured: 4,209 against 6,804 tokens/s (0.5 B model, H200). finetune.py:598 detects the attention,
    as DPO does where none is given (olmo_core_utils.py:57).
    """
    values = context.values
    if not values["packing"] or caches_only(context):
        return
    if context.gpus == 0:
        yield from _packed_on_cpu(values)
        return
    given = values.get("attn_implementation")
    slow = f"`attn_implementation: {given}` has" if given in {"torch", "te"} else None
    if given is None and context.lacks("flash-attn", "flash-attn-3"):
        slow = "the trainer's Python has no flash-attn, so there are"
    if slow is None:
        return
    worse = "packing was measured slower than padding without"
    if values.schema.stage == "dpo":
        # measured with the pinned script: it leaves the cache on, and transformers drops the mask
        worse += ", and DPO's packed samples see each other"
    yield say(
        "warning", "run", "packing-without-flash", "packing",
        f"{slow} no flash-attention kernels: {worse}",
        "pip install flash-attn, or `packing: false`",
    )  # fmt: skip


def _packed_on_cpu(values: Values) -> Iterator[Finding]:
    """transformers/masking_utils.py:860 keeps packed samples apart where there is no cache, as in SFT
    (finetune.py:830). In DPO checkpointing does without one (dpo_tune_cache.py:376); the reference, which
    simpo alone does not need (dpo_utils.py:88), has it on.
    """
    if values.schema.stage != "dpo":
        return
    budget = values["activation_memory_budget"]
    without = isinstance(budget, int | float) and budget < 1 and not values["use_lora"]
    if values["loss_type"] != "simpo" or not without:
        yield say(
            "warning", "run", "packing-leaks", "packing",
            "`packing`: samples in a row see each other: a CPU has no flash attention, and DPO leaves "
            "the cache on", "`packing: false`",
        )  # fmt: skip


def packed_alone(context: Context) -> Iterator[Finding]:
    """finetune.py:642 packs the rows of one micro-batch (padding_free_collator.py:102), and no others."""
    if context.values["packing"] and context.per_device == 1 and not caches_only(context):
        yield say(
            "warning", "run", "packing-of-one", "packing",
            "`packing` does nothing here: it joins the rows of a micro-batch, which is one row",
            "`batch: {per_device: 2}` or more, or `packing: false`",
        )  # fmt: skip


def attention_missing(context: Context) -> Iterator[Finding]:
    """dpo_tune_cache.py:338: transformers refuses an implementation whose package is missing."""
    given = context.values["attn_implementation"]
    if given not in _FLASH or caches_only(context):
        return
    if context.gpus == 0:
        yield say(
            "error", "run", "attention-missing", "attn_implementation",
            f"`attn_implementation: {given}` needs a GPU, and `--gpus 0` has none",
            "leave it out, or write torch",
        )  # fmt: skip
    elif context.lacks(_FLASH[given], "kernels"):
        yield say(
            "error" if context.running else "warning", "run", "attention-missing",
            "attn_implementation",
            f"`attn_implementation: {given}`: the trainer's Python has no {_FLASH[given]}",
            f"pip install {_FLASH[given]}, or leave it out: what is installed is detected",
        )  # fmt: skip


def attention_replaced(context: Context) -> Iterator[Finding]:
    """model_utils.py:55."""
    if context.values["attn_implementation"] == "te":
        yield say(
            "warning", "run", "attention-replaced", "attn_implementation",
            "`attn_implementation: te` runs torch's own attention in this script",
            "write torch, or leave it out",
        )  # fmt: skip


# --- losses, tokenizer, place ----------------------------------------------------------------------


def dense_balancing(context: Context) -> Iterator[Finding]:
    """finetune.py:828, dpo_utils.py:863: only a mixture of experts has an `aux_loss`."""
    config = model_config.text_part(model_config.built_from(context.values, context.environ))
    if not context.values["load_balancing_loss"] or not config or caches_only(context):
        return
    if not any("expert" in key for key in config):
        yield say(
            "error", "run", "balancing-dense", "load_balancing_loss",
            f"`load_balancing_loss` crashes: a {config.get('model_type')} model has no experts to balance",
            "write `load_balancing_loss: false`",
        )  # fmt: skip


def dense_router(context: Context) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py:1202, trl/trainer/dpo_trainer.py:902, transformers/trainer.py:3300: without
    experts there is no such loss.
    """
    values, kind = context.values, _own(context).get("model_type")
    names = CONFIGS.get(kind) if isinstance(kind, str) else None
    if names is None or "output_router_logits" in names:
        return
    if values["router_aux_loss_coef"]:
        yield say(
            "error", "run", "balancing-dense", "router_aux_loss_coef",
            f"`router_aux_loss_coef` is refused: a {kind} model has no experts to balance",
            "delete the line",
        )  # fmt: skip
    metric, evaluated = values["metric_for_best_model"], values["eval_strategy"] != "no"
    if evaluated and str(metric).removeprefix("eval_") == "aux_loss":
        yield say(
            "error", "run", "unknown-metric", "metric_for_best_model",
            f"`metric_for_best_model: {metric}`: a {kind} model has no experts to balance",
            "write `metric_for_best_model: loss`",
        )  # fmt: skip


def wpo_batch(context: Context) -> Iterator[Finding]:
    """dpo_utils.py:601 multiplies one number a row with one a token: only a single row fits."""
    rows = context.per_device
    if context.values["loss_type"] == "wpo" and rows is not None and rows > 1:
        yield say(
            "error", "run", "wpo-batch", "loss_type",
            f"`loss_type: wpo` crashes with {rows} rows a device: its weights fit a single row only",
            "set `per_device: 1`, or another loss",
        )  # fmt: skip


def olmo_bos(context: Context) -> Iterator[Finding]:
    """dataset_transformation.py:793, dataset_transformation.py:797, dataset_transformation.py:799,
    dataset_transformation.py:800.
    """
    values = context.values
    if values["get_tokenizer_fn"] != "get_tokenizer_tulu_v2_2":
        return
    name = values["tokenizer_name_or_path"] or values["model_name_or_path"]
    revision = values["tokenizer_revision"] or values["model_revision"]
    kind = model_config.read(name, context.environ, revision).get("model_type")
    if not isinstance(kind, str) or "olmo" not in kind:
        return
    template = values["chat_template_name"]
    if not values["use_fast"]:
        yield _olmo("use_fast", "OLMo needs `use_fast: true`")
    if template is not None and ("olmo" in template) == bool(values["add_bos"]):
        needed = "false" if "olmo" in template else "true"
        yield _olmo("add_bos", f"OLMo with the chat template {template} needs `add_bos: {needed}`")


def _olmo(key: str, message: str) -> Finding:
    return say("error", "run", "olmo-tokenizer", key, f"{message}: upstream asserts it")


def missing_model(context: Context) -> Iterator[Finding]:
    """finetune.py:541, dpo_tune_cache.py:279, trl/scripts/sft.py:104: neither a folder nor a hub name; nor
    what open-instruct takes the config or the tokenizer from (finetune.py:526, finetune.py:411).
    """
    if not context.running:
        return
    seen = set()
    for key in ("model_name_or_path", "config_name", "tokenizer_name_or_path"):
        name = context.values.get(key)
        if isinstance(name, str) and name and name not in seen:
            seen.add(name)
            yield from _missing(context, key, name)


def _missing(context: Context, key: str, name: str) -> Iterator[Finding]:
    # the config alone may be a file
    if is_file(Path(name)) and key != "config_name":
        yield say(
            "error", "run", "missing-model", key, f"{name} is a file, no folder",
            f"name the folder with its config.json, such as {Path(name).parent}",
        )  # fmt: skip
        return
    if model_config.here(name) or (key == "model_name_or_path" and _own(context)):
        return
    if model_config.is_path(name):
        yield say(
            "error", "run", "missing-model", key, f"there is no folder {name} here",
            "relative paths start where launch is started; `~` is not expanded",
        )  # fmt: skip
    elif offline(context.environ) and not model_config.cached(name, context.environ):
        yield say(
            "error", "run", "missing-model", key,
            f"{name} is neither here nor in the hub's cache, and HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE, or download it first",
        )  # fmt: skip
    elif _half_here(name) and not model_config.cached(name, context.environ):
        yield say(
            "warning", "run", "missing-model", key,
            f"there is no {name} here, although there is {name.partition('/')[0]}/: it is taken for a name "
            "on the hub", "correct the path, or write ./ before it to mean a folder",
        )  # fmt: skip


def incomplete_model(context: Context) -> Iterator[Finding]:
    """transformers/modeling_utils.py:631, transformers/models/auto/configuration_auto.py:433: seen when
    it is loaded, on every GPU. A folder with a config alone is one to plan with.
    """
    values = context.values
    model, revision = values["model_name_or_path"], values.get("model_revision")
    config = values.get("config_name")
    loader = given_to_loader(context)[1] if values.schema.backend == "trl" else {}
    if caches_only(context) or loader.get("gguf_file"):
        return
    faults: dict[str, str | None] = {}
    if (folder := _read_from(context, config or model, revision)) is not None:
        faults["config_name" if config else "model_name_or_path"] = model_files.config_fault(folder)
    if (folder := _read_from(context, model, revision)) is not None:
        fault = model_files.weights_fault(folder, loader) or _unloaded(context, folder, loader)
        faults["model_name_or_path"] = faults.get("model_name_or_path") or fault
    for key, said in faults.items():
        if said is not None:
            yield _incomplete(context, "incomplete-model", key, said)


def _unloaded(context: Context, folder: Path, loader: Mapping[str, Any]) -> str | None:
    """What the trainer's packages make of weights that are whole.

    transformers/integrations/peft.py:340 puts an adapter beside them on, and freezes all;
    transformers/modeling_utils.py:360 unpickles nothing with an older torch.
    """
    if is_file(folder / model_files.ADAPTER) and not context.lacks("peft"):
        return f"the adapter beside its weights ({model_files.ADAPTER}) is put on, and nothing is trained"
    pickled, torch = model_files.pickled(folder, loader), (context.packages or {}).get("torch")
    if pickled is not None and torch is not None and _release(torch) < _UNPICKLES:
        return f"torch {torch} is too old for {pickled}: transformers wants 2.6, or safetensors"
    return None


def incomplete_tokenizer(context: Context) -> Iterator[Finding]:
    """transformers/models/qwen2/tokenization_qwen2.py:53: without its files one without words is made."""
    values = context.values
    named = [key for key in ("tokenizer_name_or_path", "model_name_or_path") if values.get(key)]
    revision = values.get("tokenizer_revision") or values.get("model_revision")
    for key in (*named[:1], "chat_template_path"):
        folder = _read_from(context, values.get(key), revision)
        if folder is not None and (fault := model_files.tokenizer_fault(folder)) is not None:
            yield _incomplete(context, "incomplete-tokenizer", key, fault)


def _incomplete(context: Context, code: str, key: str, fault: str) -> Finding:
    name = str(context.values[key])
    return say(
        "error" if context.running else "warning", "run", code, key,
        f"{brief(name)} cannot be trained from: {fault}",
        f"git -C {shlex.quote(name)} lfs pull" if "git-lfs" in fault else _WHOLE,
    )  # fmt: skip


def _read_from(context: Context, name: object, revision: str | None) -> Path | None:
    """The folder that is read and nothing else: of the hub's cache what is missing is fetched.

    One that only describes a model says nothing before something is to be started.
    """
    folder = None
    if isinstance(name, str) and name and Path(name).is_dir():
        folder = Path(name)
    elif offline(context.environ):
        config = model_config.where(name, context.environ, revision)
        folder = None if config is None else config.parent
    described = folder is not None and not context.running and model_files.is_bare(folder)
    return None if described else folder


def revision_of_folder(context: Context) -> Iterator[Finding]:
    """finetune.py:411, dpo_tune_cache.py:150, trl/scripts/sft.py:77: transformers/utils/hub.py:404 reads a
    folder as it is.
    """
    values = context.values
    model, tokenizer = values["model_name_or_path"], values.get("tokenizer_name_or_path")
    own = values.get("tokenizer_revision")
    read = {
        "model_revision": {model, values.get("config_name")}
        | ({tokenizer} if own is None else set()),
        "tokenizer_revision": {tokenizer or model},
    }
    for key, names in read.items():
        revision = values.get(key)
        folders = [name for name in names if isinstance(name, str) and name]
        if revision in (None, "main") or not folders or not all(map(model_config.here, folders)):
            continue
        yield say(
            "warning", "run", "conditional-key", key,
            f"`{key}: {brief(revision)}` does nothing here: {brief(folders[0])} is a folder, which has no "
            "revisions", "delete the line",
        )  # fmt: skip


def _half_here(name: str) -> bool:
    """Whether a name of two words begins with a folder that is here: a path with a mistake in it."""
    return "/" in name and model_config.here(name.partition("/")[0])


def offline(environ: Mapping[str, str]) -> bool:
    """Whether huggingface_hub was told to stay off the network."""
    return offline_by(environ) is not None


def offline_by(environ: Mapping[str, str]) -> str | None:
    """The variable that keeps huggingface_hub off the network; the first of two that holds anything decides.

    huggingface_hub/constants.py:194.
    """
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    first = next((name for name in names if environ.get(name)), None)
    return first if first and environ[first].upper() in _OFFLINE else None


_LIGER: tuple[StageRule, ...] = (
    liger_unknown, liger_on_cpu, beyond_positions, missing_model, incomplete_model,
    incomplete_tokenizer, revision_of_folder,
)  # fmt: skip
_SHARED: tuple[StageRule, ...] = (*_LIGER, packed_without_flash, dense_balancing, olmo_bos)

RULES: Mapping[str, Mapping[str, tuple[StageRule, ...]]] = {
    "open_instruct": {
        "sft": (*_SHARED, packed_alone, liger_without_fused_loss),
        "dpo": (*_SHARED, attention_missing, attention_replaced, wpo_batch),
    },
    "trl": dict.fromkeys(("sft", "dpo"), (*_LIGER, dense_router)),
}
