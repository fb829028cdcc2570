"""Rules about LoRA on the embedding and the output layer.

Tried with peft 0.21.2 on the demo's tied model, 20 steps, the losses of the trained and of the
merged model: 6.26 and 91.7 with an adapter on `embed_tokens`, 0.56 and 11.0 with one on `lm_head`;
the same with `modules_to_save`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.artifacts import architecture, model_config
from launcher.errors import Finding
from launcher.rules.context import Context, StageRule
from launcher.rules.rule import cites, say
from launcher.rules.trl.resolved import inline, target_modules

_HEAD = "lm_head"
# families whose output layer has another name
_OTHER_HEADS = ("gpt_neox",)
_EMBEDDINGS = ("embed_tokens", "wte")
# families whose config class ties where config.json does not say so
_TIED_BY_DEFAULT = ("gemma", "gpt2")
# as peft describes it
# (peft/tuners/tuners_utils.py::BaseTuner._check_merge_allowed[Load original tied])
_UNTIE = (
    "load it with `tie_word_embeddings=False`, copy the weight of `embed_tokens` into `lm_head`, "
    "save it"
)
_TARGETS = "lora_target_modules"
_SAVED = "lora_modules_to_save"


def _select_targeted(context: Context, names: tuple[str, ...]) -> list[str]:
    """Which of these modules an adapter is put on."""
    targets = target_modules(context.values)
    if len(targets) != 1:
        parts = {target.split(".")[-1] for target in targets}
        return [name for name in names if name in parts]
    try:
        pattern = re.compile(targets[0])
    except re.error:
        return []
    return [name for name in names if pattern.fullmatch(name) or pattern.fullmatch(f"model.{name}")]


def _read_config(context: Context) -> Mapping[str, Any]:
    """The model's config, if it lies here or stands in the table of models, with what replaces some
    of it.
    """
    values = context.values
    name = values["model_name_or_path"]
    config = model_config.read_model_config(name, context.environ, values.get("model_revision"))
    if not config:
        config = architecture.load_known_shapes().get(str(name).lower(), {})
    return {**config, **(inline(values["model_init_kwargs"]) or {})}


def _is_tied(context: Context) -> bool:
    """Whether embedding and output layer are one matrix."""
    config = _read_config(context)
    tied = config.get(
        "tie_word_embeddings", model_config.take_text_part(config).get("tie_word_embeddings")
    )
    if tied is None:
        return str(config.get("model_type")).startswith(_TIED_BY_DEFAULT)
    return tied is True


@cites(
    "trl/trainer/sft_trainer.py::SFTTrainer.__init__[if is_peft_model(model) and isinstance]",
    "trl/trainer/dpo_trainer.py::DPOTrainer.__init__[if is_peft_model(model) and isinstance]",
)
def head_refused(context: Context) -> Iterator[Finding]:
    """No adapter on the output layer, tied or not."""
    values = context.values
    if (
        not values["use_peft"]
        or not values.schema.tested
        or not _select_targeted(context, (_HEAD,))
    ):
        return
    if _read_config(context).get("model_type") in _OTHER_HEADS:
        return
    message = (
        f"`{_TARGETS}` has `{_HEAD}`: TRL refuses an adapter on the output layer, it would never "
        "be trained"
    )
    help = f"take it out; `{_SAVED}: [{_HEAD}]` trains the whole layer"
    yield say("error", "lora-targets", _TARGETS, message, help)


@cites("peft/tuners/tuners_utils.py::BaseTuner._check_tied_modules[warnings.warn(msg #1]")
def tied_targets(context: Context) -> Iterator[Finding]:
    """An adapter acts where it is put, and is merged into the shared matrix."""
    if not context.values["use_peft"]:
        return
    names: tuple[str, ...] = _EMBEDDINGS
    if not context.values.schema.tested:
        names = (*_EMBEDDINGS, _HEAD)
    targeted = _select_targeted(context, names)
    if not targeted or not _is_tied(context):
        return
    shown = " and ".join(f"`{name}`" for name in targeted)
    message = (
        f"`{_TARGETS}` has {shown}, and this model's embedding and output layer are one matrix "
        "(`tie_word_embeddings`): the adapter acts on one of its two uses, and once merged on "
        "both: the merged model is not the one that was trained"
    )
    help = (
        "take it out, and never merge the adapter otherwise; or untie the model first and name "
        f"that: {_UNTIE}"
    )
    yield say("warning", "lora-on-tied", _TARGETS, message, help)


@cites(
    "peft/tuners/tuners_utils.py::BaseTuner._unload_and_optionally_merge[self.model.config.tie_word_embeddings]"
)
def tied_copies(context: Context) -> Iterator[Finding]:
    """A copy is trained, and the merged model is untied."""
    values = context.values
    if not values["use_peft"]:
        return
    parts = [str(name).split(".")[-1] for name in values[_SAVED] or ()]
    copied = [name for name in parts if name in (*_EMBEDDINGS, _HEAD)]
    if not copied or not _is_tied(context):
        return
    shown = " and ".join(f"`{name}`" for name in copied)
    message = (
        f"`{_SAVED}` has {shown}, and this model's embedding and output layer are one matrix "
        "(`tie_word_embeddings`): peft trains a copy of its own beside it, so that the two come "
        "apart, and the merged model has one matrix more (`tie_word_embeddings: false`); what "
        "loads it as a tied model drops the copy"
    )
    help = (
        "take it out, or merge with the release of peft that trained it and keep the "
        "config.json that it writes"
    )
    yield say("warning", "lora-on-tied", _SAVED, message, help)


RULES: tuple[StageRule, ...] = (head_refused, tied_targets, tied_copies)
