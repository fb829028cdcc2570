"""Folders and names -> models and tokenizers, as transformers and peft load them."""

import contextlib
import copy
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .channel import ModelRefused

_MARK = "launch7mark"
"""A word that no template holds: what follows it in a rendered answer is what ends one."""


@dataclass
class Loaded:
    """A model with its tokenizer. `stops` are ids of tokens that end an answer; `limit` is the longest text in tokens.

    An adapter's model gives the base's answers inside `as_base`.
    """

    model: Any
    tokenizer: Any
    stops: list[int] = field(default_factory=list)
    limit: int | None = None

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def device(self) -> Any:
        return self.model.get_input_embeddings().weight.device

    @contextlib.contextmanager
    def as_base(self) -> Iterator[None]:
        with self.model.disable_adapter():
            yield


def load(described: dict[str, Any]) -> Loaded:
    """Load what `described` names: `path`, and for an adapter its `base` with `name` and `revision`.

    Raises what transformers and peft raise; ModelRefused for a base that is stored quantised.
    """
    base = described["base"] if described["is_adapter"] else None
    tokenizer = load_tokenizer(described)
    if base is None:
        model = load_weights(described["path"], None, described)
    else:
        model = load_weights(base["name"], base["revision"], described)
        model = add_adapter(model, described["path"])
    model.eval()
    return complete(model, tokenizer)


def load_base(described: dict[str, Any], trained: Loaded) -> Loaded:
    """The model that a whole model was trained from, with its own tokenizer and the trained one's chat template."""
    base = described["base"]
    model = load_weights(base["name"], base["revision"], described)
    model.eval()
    try:
        tokenizer = _tokenizer(base["name"], base["revision"], described)
    except (OSError, ValueError):
        # a base without a tokenizer of its own: the trained one's fits, as training used it
        tokenizer = copy.copy(trained.tokenizer)
    tokenizer.chat_template = trained.tokenizer.chat_template
    return complete(model, tokenizer)


def complete(model: Any, tokenizer: Any) -> Loaded:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    limit = getattr(config, "max_position_embeddings", None)
    return Loaded(model=model, tokenizer=tokenizer, stops=_stops(model, tokenizer), limit=limit)


def load_tokenizer(described: dict[str, Any]) -> Any:
    """The tokenizer beside the trained model, else that of its base."""
    if described["has_tokenizer"] or described["base"] is None:
        return _tokenizer(described["path"], None, described)
    return _tokenizer(described["base"]["name"], described["base"]["revision"], described)


def _tokenizer(name: str, revision: Any, described: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=described["trusts_code"])


def load_weights(name: str, revision: Any, described: dict[str, Any]) -> Any:
    """A whole model in the format that its weights are stored in, on the GPUs where there are some."""
    import torch
    import transformers

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": described["trusts_code"]}
    options[_dtype_option(transformers.__version__)] = "auto"
    if torch.cuda.is_available():
        options["device_map"] = "auto"
    config = transformers.AutoConfig.from_pretrained(
        name, revision=revision, trust_remote_code=described["trusts_code"]
    )
    if described["is_adapter"] and getattr(config, "quantization_config", None) and described.get("needs_whole_base"):
        raise ModelRefused("quantised-base", f"{name} is stored quantised: an adapter cannot be merged into it")
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(name, **options)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        # a model of text and pictures
        return transformers.AutoModelForImageTextToText.from_pretrained(name, **options)


def _dtype_option(version: str) -> str:
    """transformers 4.56 renamed `torch_dtype`."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


def add_adapter(model: Any, path: str) -> Any:
    """The model with an adapter on it. Embeddings that were trained with more rows make room for them first."""
    from peft import PeftModel

    rows = _embedding_rows(path)
    if rows is not None and rows != model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows)
    return PeftModel.from_pretrained(model, path)


def _embedding_rows(path: str) -> Any:
    """Rows of the input embeddings that an adapter's file holds whole; None where it holds none."""
    file = os.path.join(path, "adapter_model.safetensors")
    try:
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error):
        return None
    for name, tensor in header.items():
        if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight")):
            return tensor["shape"][0]
    return None


def _stops(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: those of the generation config and the tokenizer, and the template's own."""
    given = model.generation_config.eos_token_id
    stops = list(given) if isinstance(given, list) else [given]
    stops.append(tokenizer.eos_token_id)
    stops.append(_end_of_turn(tokenizer))
    return sorted({token for token in stops if token is not None})


def _end_of_turn(tokenizer: Any) -> Any:
    """The special token that the chat template writes behind an answer; None where it writes none."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:
        # a template may take conversations of another form only
        return None
    behind = text.rpartition(_MARK)[2].lstrip()
    if not behind:
        return None
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    if ids and ids[0] in special:
        return ids[0]
    return None
