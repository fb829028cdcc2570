"""An adapter and its base -> one model, saved, loaded again, and compared with what it was made from."""

import gc
import math
import os
from typing import Any

from . import loading
from .channel import Channel, ModelRefused
from .loading import Loaded

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and 12 + 30 = 42.",
    "def mean(values):\n    return sum(values) / len(values)\n",
)
QUESTION = "Name three primary colours, and say why they are called primary."


def merge(channel: Channel, settings: dict[str, Any]) -> None:
    """Merge the adapter of `settings` into its base and save the result in the folder `into`.

    The event `merged` compares logits over the same texts, as shares of the root mean square of all logits: `error`
    is how far the saved model lies from base and adapter, `effect` how far the base alone does. `kept` is the share of
    that effect which the saved model has, along its direction: rounding, which has none, does not count.
    """
    described = settings["model"]
    loaded = loading.load({**described, "needs_whole_base": True})
    if not hasattr(loaded.model, "merge_and_unload"):
        raise ModelRefused("not-mergeable", "this kind of adapter has no weights that could be added to the base's")
    texts = _texts(loaded)
    expected = _logits(loaded, texts)
    with loaded.as_base():
        before = _logits(loaded, texts)
    channel.send("loaded", device=str(loaded.device), dtype=_dtype(loaded.model))
    _merge(loaded)
    channel.send("saving")
    _save(loaded, settings["into"])
    tokenizer = loaded.tokenizer
    del loaded
    gc.collect()
    channel.send("checking")
    whole = {**described, "path": settings["into"], "is_adapter": False, "has_tokenizer": True}
    again = loading.load(whole)
    merged = _logits(again, texts)
    size = _root_mean_square(expected)
    channel.send(
        "merged",
        dtype=_dtype(again.model),
        error=_distance(merged, expected) / size,
        effect=_distance(before, expected) / size,
        kept=_share_kept(before, expected, merged),
        positions=sum(len(row) for row in expected),
        template=bool(tokenizer.chat_template) and again.tokenizer.chat_template == tokenizer.chat_template,
    )


def _merge(loaded: Loaded) -> None:
    from peft import PeftType

    kinds = {config.peft_type for config in loaded.model.peft_config.values()}
    if kinds & {PeftType.PROMPT_TUNING, PeftType.PREFIX_TUNING, PeftType.P_TUNING}:
        names = ", ".join(sorted(str(kind.value) for kind in kinds))
        raise ModelRefused("not-mergeable", f"an adapter of the kind {names} has no weights to add to the base's")
    loaded.model = loaded.model.merge_and_unload(safe_merge=True)


def _save(loaded: Loaded, folder: str) -> None:
    """Weights, config, generation config, tokenizer and chat template."""
    given = loaded.model.generation_config.eos_token_id
    ends = list(given) if isinstance(given, list) else [given]
    end = loaded.tokenizer.eos_token_id
    # training may have given the model another end of an answer than its base has
    if end is not None and end not in ends:
        known = [token for token in ends if token is not None]
        loaded.model.generation_config.eos_token_id = [end, *known] if known else end
    os.makedirs(folder, exist_ok=True)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def _texts(loaded: Loaded) -> list[Any]:
    """What the logits are compared over: plain texts, and a question in the chat template where there is one."""
    tokenizer = loaded.tokenizer
    texts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
    if loaded.has_template:
        messages = [{"role": "user", "content": QUESTION}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        texts.append(encoded["input_ids"])
    return texts


def _logits(loaded: Loaded, texts: list[Any]) -> list[Any]:
    """The logits of every position in float32 on the CPU, one matrix a text."""
    import torch

    rows = []
    with torch.inference_mode():
        for ids in texts:
            output = loaded.model(input_ids=ids.to(loaded.device), use_cache=False)
            rows.append(output.logits[0].float().cpu())
    return rows


def _distance(some: list[Any], others: list[Any]) -> float:
    return _root_mean_square([one - other for one, other in zip(some, others, strict=True)])


def _share_kept(before: list[Any], expected: list[Any], merged: list[Any]) -> float:
    """How much of the way from `before` to `expected` lies between `before` and `merged`; 1 where there is no way."""
    along = 0.0
    whole = 0.0
    for start, end, reached in zip(before, expected, merged, strict=True):
        way = (end - start).double()
        along += float(((reached - start).double() * way).sum())
        whole += float(way.pow(2).sum())
    return along / whole if whole else 1.0


def _root_mean_square(rows: list[Any]) -> float:
    total = sum(float(row.double().pow(2).sum()) for row in rows)
    count = sum(row.numel() for row in rows)
    return math.sqrt(total / count)


def _dtype(model: Any) -> str:
    return str(model.dtype).replace("torch.", "")
