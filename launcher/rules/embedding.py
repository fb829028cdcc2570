"""Rules about tokens without a row in the model's embedding, and what each trainer does about them.

Tried on the CPU with TRL 1.16 and transformers 5.17: padding with such a token is an IndexError in
the first batch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.artifacts import architecture, model_config, vocabulary
from launcher.artifacts.vocabulary import Vocabulary
from launcher.errors import Finding, Severity, shorten
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_file
from launcher.rules import data
from launcher.rules.context import Context, RuleTable, StageRule, caches_only
from launcher.rules.model import folder_of
from launcher.rules.rule import cites, say

_MODEL = "model_name_or_path"
_CODE = "tokens-beyond-embedding"
_SHOWN = 3
# finetune.py::main[model.resize_token_embeddings],
# dpo_tune_cache.py::main[model.resize_token_embeddings]
_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Excess:
    """A tokenizer with more tokens than the embedding of its model has rows."""

    vocabulary: Vocabulary
    rows: int

    def __str__(self) -> str:
        size = self.vocabulary.size
        tokens = self.vocabulary.beyond(self.rows)
        names = ", ".join(shorten(f"`{token}`") for token in tokens[:_SHOWN])
        if len(tokens) > _SHOWN:
            names += ", ..."
        missing = size - self.rows
        lacking = "1 has none" if missing == 1 else f"{missing:,} have none"
        if tokens:
            lacking += f" ({names})"
        return f"the tokenizer has {size:,} tokens, the embedding {self.rows:,} rows: {lacking}"

    @property
    def remedy(self) -> str:
        call = f"resize_token_embeddings({self.vocabulary.size}, pad_to_multiple_of=64)"
        return f"resize the model once, with `{call}`, and save it"


def _find_excess(context: Context) -> Excess | None:
    """None where the tokens have rows, or where either number is unknown."""
    rows = _read_rows(_read_config(context))
    if rows is None:
        return None
    words = _read_vocabulary(context)
    if words is None or words.size <= rows:
        return None
    return Excess(words, rows)


def _read_config(context: Context) -> Mapping[str, Any]:
    return model_config.take_text_part(model_config.build_config(context.values, context.environ))


def _read_rows(config: Mapping[str, Any]) -> int | None:
    rows = config.get("vocab_size")
    return rows if isinstance(rows, int) and rows > 0 else None


def _read_vocabulary(context: Context) -> Vocabulary | None:
    """That of the tokenizer which is read, in a folder here or in the hub's cache."""
    values = context.values
    name = values.get("tokenizer_name_or_path")
    revision = values.get("tokenizer_revision")
    if not name:
        name = values[_MODEL]
        revision = values.get("model_revision")
    folder = folder_of(context, name, revision)
    return None if folder is None else vocabulary.read_vocabulary(folder)


@cites(
    "trl/trainer/sft_trainer.py::SFTTrainer.__init__[model, processing_class, added_tokens]",
    "trl/trainer/sft_trainer.py::SFTTrainer.__init__[pad_token = args.pad_token]",
    "trl/trainer/dpo_trainer.py::DPOTrainer.__init__[pad_token = args.pad_token]",
)
def beyond_embedding(context: Context) -> Iterator[Finding]:
    """`sft_trainer.py` resizes the model for the tokens of another tokenizer's template alone.

    The pad token fills the shorter rows of a batch.
    """
    excess = _find_excess(context)
    if excess is None or _takes_tokens_of_another(context):
        return
    words = excess.vocabulary
    used = [
        role for role in _list_used_tokens(context) if _lacks_row(context, words, role, excess.rows)
    ]
    effect = (
        "a row that holds one of them crashes (index out of range, on a GPU a device-side assert)"
    )
    severity: Severity = "warning"
    if used:
        severity = "error"
        token = shorten(_find_token(context, words, used[0]))
        role = used[0].removesuffix("_find_token")
        effect = f"the {role} token is {token}, and the first batch with it crashes"
    help = excess.remedy
    if used == ["pad_token"]:
        help += "; or set `pad_token` to a token that has a row"
    yield say(severity, _CODE, _MODEL, f"{excess}: {effect}", help)


def _takes_tokens_of_another(context: Context) -> bool:
    """Whether the chat template is another tokenizer's, whose tokens are added and get rows."""
    template = str(context.values.get("chat_template_path") or "")
    is_template = template.endswith((".jinja", ".j2")) and is_file(Path(template))
    return bool(template) and not is_template


def _find_token(context: Context, words: Vocabulary, role: str) -> str:
    token = context.values.get(role) or words.special.get(role)
    if token is None and role == "pad_token":
        token = _find_token(context, words, "eos_token")
    return str(token or "")


def _lacks_row(context: Context, words: Vocabulary, role: str, rows: int) -> bool:
    return words.added.get(_find_token(context, words, role), 0) >= rows


def _list_used_tokens(context: Context) -> Sequence[str]:
    """The special tokens that are certainly in the first batches."""
    values = context.values
    used = []
    packed = values.get("packing") or (values.get("padding_free") and not values.schema.pairs)
    # a batch of pairs has two rows at least
    if not packed and (values.schema.pairs or (context.per_device or 0) > 1):
        used.append("pad_token")
    template = data.tokenizer_template(values[_MODEL], values.get("chat_template_path"), context)
    # text gets it from the trainer, conversations from the template
    if template is not None and (not template or "eos_token" in template):
        used.append("eos_token")
    return used


@cites(
    "olmo_core_utils.py::setup_model[vocab_size = hf_config.vocab_size]", reviewed=("e6c3044aa620",)
)
def beyond_olmo_core(context: Context) -> Iterator[Finding]:
    """The model is built with the rows of its config, and never resized."""
    excess = _find_excess(context)
    if excess is not None:
        message = f"{excess}: a row that holds one of them crashes"
        yield say("warning", _CODE, _MODEL, message, excess.remedy)


@cites(
    "finetune.py::main[model.resize_token_embeddings]",
    "dpo_tune_cache.py::main[model.resize_token_embeddings]",
    "finetune.py::main[target_modules]",
    "dpo_tune_cache.py::main[target_modules]",
    reviewed=("e6c3044aa620",),
)
def resized(context: Context) -> Iterator[Finding]:
    """The embedding grows where the tokenizer has more tokens.

    Peft trains the layers of `finetune.py` and `dpo_tune_cache.py` alone.
    """
    excess = _find_excess(context)
    if excess is None or caches_only(context):
        return
    grown = math.ceil(excess.vocabulary.size / _MULTIPLE) * _MULTIPLE
    message = f"{excess}: upstream adds rows up to {grown:,}"
    if context.values["use_lora"]:
        message += ", and LoRA leaves the new ones as they were made: the new tokens are not learnt"
        help = "train without `use_lora`, or use a tokenizer whose tokens the model has"
        yield say("warning", "embedding-resized", _MODEL, message, help)
        return
    yield say("note", "embedding-resized", _MODEL, f"{message}, which training has to fill")


@cites("torch/nn/modules/sparse.py::Embedding.__init__[if padding_idx >= self.num_embeddings]")
def special_ids(context: Context) -> Iterator[Finding]:
    """A model that gives its embedding a padding row wants it to be there.

    Others are for generating: no token of the model ever has that id.
    """
    config = _read_config(context)
    rows = _read_rows(config)
    if rows is None or caches_only(context):
        return
    for key in ("pad_token_id", "eos_token_id", "bos_token_id"):
        ids = config.get(key)
        if not isinstance(ids, list):
            ids = [ids]
        outside = [index for index in ids if isinstance(index, int) and index >= rows]
        if not outside:
            continue
        severity: Severity = "warning"
        effect = "no token has it"
        if key == "pad_token_id" and config.get("model_type") in architecture.FAMILIES:
            severity = "error"
            effect = "the model cannot be built (Padding_idx must be within num_embeddings)"
        numbers = f"`{key}: {outside[0]}`, and the embedding {rows:,} rows"
        message = f"config.json has {numbers}: {effect}"
        help = "write the id of the tokenizer's own token into config.json, or null"
        yield say(severity, _CODE, _MODEL, message, help)


_TRL: tuple[StageRule, ...] = (beyond_embedding, special_ids)
_OPEN_INSTRUCT: tuple[StageRule, ...] = (resized, special_ids)

RULES: RuleTable = {
    "open_instruct": dict.fromkeys(("sft", "dpo"), _OPEN_INSTRUCT),
    "trl": dict.fromkeys(("sft", "dpo"), _TRL),
}
