"""Load models and tokenizers, with transformers and peft."""

import contextlib
import copy
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .channel import ModelRefused

_MARK = "launch7mark"
"""A word in no template: what follows it in a rendered answer is what ends an answer."""

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A folder, or a name on the hub with its revision."""

    name: str
    revision: str | None
    trusts_code: bool

    def load(self, factory: Any, **options: Any) -> Any:
        """By a class of transformers that has `from_pretrained`."""
        return factory.from_pretrained(
            self.name, revision=self.revision, trust_remote_code=self.trusts_code, **options
        )


@dataclass(frozen=True, slots=True)
class ModelSources:
    """A trained model; `base` is what it was trained from, and what an adapter needs."""

    trained: ModelSource
    base: ModelSource | None
    is_adapter: bool
    has_tokenizer: bool

    @property
    def tokenizer(self) -> ModelSource:
        if self.base is None or self.has_tokenizer:
            return self.trained
        return self.base


def parse_sources(model: dict[str, Any]) -> ModelSources:
    """Read what `launcher.trained.model` writes."""
    trusts_code = model["trusts_code"]
    base = model["base"]
    if base is not None:
        base = ModelSource(base["name"], base["revision"], trusts_code)
    trained = ModelSource(model["path"], None, trusts_code)
    return ModelSources(trained, base, model["is_adapter"], model["has_tokenizer"])


@dataclass
class Loaded:
    """A model with its tokenizer. `stops` are ids of tokens that end an answer; `limit` is the
    longest text in tokens, None if the model has no limit.
    """

    model: Any
    tokenizer: Any
    stops: list[int]
    limit: int | None

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def device(self) -> str:
        return str(self.model.get_input_embeddings().weight.device)

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @contextlib.contextmanager
    def as_base(self) -> Iterator[None]:
        """The model of an adapter gives its base's answers inside."""
        with self.model.disable_adapter():
            yield


def load(sources: ModelSources) -> Loaded:
    """Load a trained model. Raises what transformers and peft raise."""
    from transformers import AutoTokenizer

    tokenizer = sources.tokenizer.load(AutoTokenizer)
    if sources.is_adapter and sources.base is not None:
        model = add_adapter(load_weights(sources.base), sources.trained.name)
    else:
        model = load_weights(sources.trained)
    return complete(model, tokenizer)


def load_base(base: ModelSource, trained_tokenizer: Any) -> Loaded:
    """Load the base of a whole model, with its own tokenizer and the trained chat template."""
    from transformers import AutoTokenizer

    model = load_weights(base)
    try:
        tokenizer = base.load(AutoTokenizer)
    except (OSError, ValueError):
        # training used the trained one's with this base
        tokenizer = copy.copy(trained_tokenizer)
    tokenizer.chat_template = trained_tokenizer.chat_template
    return complete(model, tokenizer)


def load_weights(source: ModelSource) -> Any:
    """A whole model in its stored precision, on the GPUs if there are any."""
    import torch
    import transformers

    options = {"dtype": "auto"}
    if torch.cuda.is_available():
        options["device_map"] = "auto"
    try:
        return source.load(transformers.AutoModelForCausalLM, **options)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        # a model of text and pictures
        return source.load(transformers.AutoModelForImageTextToText, **options)


def require_whole(source: ModelSource) -> None:
    """Raise ModelRefused for a model that is stored quantised."""
    import transformers

    config = source.load(transformers.AutoConfig)
    if getattr(config, "quantization_config", None):
        message = f"{source.name} is stored quantised: an adapter cannot be merged into it"
        raise ModelRefused("quantised-base", message)


def complete(model: Any, tokenizer: Any) -> Loaded:
    model.eval()
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    ends = end_tokens(model)
    ends.add(tokenizer.eos_token_id)
    ends.add(_find_end_of_turn(tokenizer))
    return Loaded(model, tokenizer, sorted(ends - {None}), limit)


def add_adapter(model: Any, path: str) -> Any:
    """The model with an adapter on it, after making room for embeddings trained with more rows."""
    from peft import PeftModel

    rows = _read_embedding_rows(path)
    if rows is not None and rows != model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows)
    return PeftModel.from_pretrained(model, path)


def _read_embedding_rows(path: str) -> Any:
    """Rows of the input embeddings that an adapter's file holds whole; None if it holds none."""
    file = os.path.join(path, "adapter_model.safetensors")
    try:
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error):
        return None
    for name, tensor in header.items():
        if name.endswith(_EMBEDDINGS):
            return tensor["shape"][0]
    return None


def end_tokens(model: Any) -> set[Any]:
    """The tokens that end an answer by the generation config."""
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


def _find_end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template writes behind an answer; None if it writes none."""
    if not tokenizer.chat_template:
        return None
    answer = {"role": "assistant", "content": _MARK}
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}, answer], tokenize=False
        )
    except Exception:
        # a template may take conversations of another form only
        return None
    behind = text.rpartition(_MARK)[2].lstrip()
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"] if behind else []
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    return ids[0] if ids and ids[0] in special else None
