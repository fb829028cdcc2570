"""Merge an adapter into its base, save the model, load it again, and compare the two."""

import gc
import math
import os
from typing import Any

from . import loading
from .channel import Channel, ModelRefused
from .loading import Loaded, ModelSource

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and 12 + 30 = 42.",
    "def mean(values):\n    return sum(values) / len(values)\n",
)
QUESTION = "Name three primary colours, and say why they are called primary."


def merge(channel: Channel, settings: dict[str, Any]) -> None:
    """Merge the adapter of `settings` into its base and save the result in the folder `into`.

    The event `merged` compares logits over the same texts, as shares of the root mean square of all
    logits: `error` is how far the saved model lies from base and adapter, `effect` how far the base
    alone does. `kept` is the share of that effect which the saved model has, along its direction:
    rounding, which has no direction, does not count.
    """
    sources = loading.parse_sources(settings["model"])
    if sources.base is not None:
        loading.require_whole(sources.base)
    loaded = loading.load(sources)
    texts = _tokenize_texts(loaded)
    expected = _compute_logits(loaded, texts)
    with loaded.as_base():
        before = _compute_logits(loaded, texts)
    channel.send("loaded", device=loaded.device, dtype=loaded.dtype)
    _merge_adapter(loaded)
    channel.send("saving")
    folder = settings["into"]
    _save_merged(loaded, folder)
    template = loaded.tokenizer.chat_template
    del loaded
    gc.collect()
    channel.send("checking")
    saved = loading.load(_describe_merged_source(folder, sources.trained.trusts_code))
    merged = _compute_logits(saved, texts)
    size = _compute_root_mean_square(expected)
    channel.send(
        "merged",
        dtype=saved.dtype,
        error=_measure_distance(merged, expected) / size,
        effect=_measure_distance(before, expected) / size,
        kept=_measure_share_kept(before, expected, merged),
        positions=sum(len(row) for row in expected),
        template=bool(template) and saved.tokenizer.chat_template == template,
    )


def _describe_merged_source(folder: str, trusts_code: bool) -> loading.ModelSources:
    trained = ModelSource(folder, None, trusts_code)
    return loading.ModelSources(trained, base=None, is_adapter=False, has_tokenizer=True)


def _merge_adapter(loaded: Loaded) -> None:
    if not hasattr(loaded.model.base_model, "merge_and_unload"):
        configs = loaded.model.peft_config.values()
        kinds = {str(config.peft_type.value) for config in configs}
        names = ", ".join(sorted(kinds))
        message = f"an adapter of the kind {names} has no weights to add to the base's"
        raise ModelRefused("not-mergeable", message)
    loaded.model = loaded.model.merge_and_unload(safe_merge=True)


def _save_merged(loaded: Loaded, folder: str) -> None:
    """Weights, config, generation config, tokenizer and chat template."""
    config = loaded.model.generation_config
    end = loaded.tokenizer.eos_token_id
    ends = loading.end_tokens(loaded.model) - {None}
    # training may have given the model another end of an answer than its base has
    if end is not None and end not in ends:
        config.eos_token_id = [end, *sorted(ends)] if ends else end
    os.makedirs(folder, exist_ok=True)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def _tokenize_texts(loaded: Loaded) -> list[Any]:
    """The tokens to compare logits over: plain texts and, with a chat template, a question."""
    tokenizer = loaded.tokenizer
    texts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
    if loaded.has_template:
        messages = [{"role": "user", "content": QUESTION}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        texts.append(encoded["input_ids"])
    return texts


def _compute_logits(loaded: Loaded, texts: list[Any]) -> list[Any]:
    """The logits of every position in float32 on the CPU, one matrix a text."""
    import torch

    rows = []
    with torch.inference_mode():
        for ids in texts:
            output = loaded.model(input_ids=ids.to(loaded.device), use_cache=False)
            rows.append(output.logits[0].float().cpu())
    return rows


def _measure_distance(some: list[Any], others: list[Any]) -> float:
    differences = [row - other for row, other in zip(some, others, strict=True)]
    return _compute_root_mean_square(differences)


def _measure_share_kept(before: list[Any], expected: list[Any], merged: list[Any]) -> float:
    """How much of the way from `before` to `expected` the merged model has gone; 1 for no way."""
    along = 0.0
    whole = 0.0
    for start, end, reached in zip(before, expected, merged, strict=True):
        way = (end - start).double()
        gone = (reached - start).double()
        along += float((gone * way).sum())
        whole += float(way.pow(2).sum())
    if not whole:
        return 1.0
    return along / whole


def _compute_root_mean_square(rows: list[Any]) -> float:
    total = sum(float(row.double().pow(2).sum()) for row in rows)
    count = sum(row.numel() for row in rows)
    return math.sqrt(total / count)
