"""One answer of a model, with its text as it comes."""

import copy
import time
from collections.abc import Callable
from typing import Any

from .channel import ModelRefused
from .loading import Loaded


def encode(loaded: Loaded, messages: list[dict[str, str]]) -> Any:
    """The tokens of a conversation, by the chat template; without one, of its last message as plain text."""
    tokenizer = loaded.tokenizer
    if not loaded.has_template:
        return tokenizer(messages[-1]["content"], return_tensors="pt")
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:
        raise ModelRefused("template-refuses", f"the chat template refuses this conversation: {error}") from error


def answer(
    loaded: Loaded,
    messages: list[dict[str, str]],
    sampling: dict[str, Any],
    say: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> dict[str, Any]:
    """Generate one answer. `say` gets its text in pieces; the result is the whole of it and its figures.

    `sampling` has `temperature` (0 takes the likeliest token), `max_new_tokens` and `seed`. Raises ModelRefused where
    the conversation leaves no room for an answer.
    """
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

    class PieceStreamer(TextStreamer):  # type: ignore[misc, unused-ignore]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                pieces.append(text)
                say(text)

    class StopOnInterrupt(StoppingCriteria):  # type: ignore[misc, unused-ignore]
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return torch.full((input_ids.shape[0],), is_stopped(), dtype=torch.bool, device=input_ids.device)

    pieces: list[str] = []
    inputs = encode(loaded, messages)
    inputs = {name: inputs[name].to(loaded.device) for name in ("input_ids", "attention_mask")}
    length = inputs["input_ids"].shape[1]
    most = sampling["max_new_tokens"]
    if loaded.limit is not None:
        most = min(most, loaded.limit - length)
    if most < 1:
        message = f"the conversation has {length} tokens, and the model takes {loaded.limit}"
        raise ModelRefused("too-long-prompt", message)
    torch.manual_seed(sampling["seed"])
    began = time.monotonic()
    with torch.inference_mode():
        output = loaded.model.generate(
            **inputs,
            generation_config=_generation_config(loaded, sampling["temperature"], most),
            streamer=PieceStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True),
            stopping_criteria=StoppingCriteriaList([StopOnInterrupt()]),
        )
    new = output[0, length:].tolist()
    return {
        "text": "".join(pieces).strip(),
        "prompt_tokens": length,
        "tokens": len(new),
        "seconds": round(time.monotonic() - began, 3),
        "ended": _how_it_ended(new, loaded, is_stopped()),
    }


def _how_it_ended(new: list[int], loaded: Loaded, stopped: bool) -> str:
    if new and new[-1] in loaded.stops:
        return "stop"
    return "interrupted" if stopped else "length"


def _generation_config(loaded: Loaded, temperature: float, most: int) -> Any:
    """The model's own, with these settings; its `top_p` and `top_k` hold where tokens are drawn."""
    config = copy.deepcopy(loaded.model.generation_config)
    config.max_length = None
    config.max_new_tokens = most
    config.eos_token_id = loaded.stops or None
    if config.pad_token_id is None:
        config.pad_token_id = loaded.tokenizer.pad_token_id
    if config.pad_token_id is None and loaded.stops:
        config.pad_token_id = loaded.stops[0]
    config.do_sample = temperature > 0
    if temperature > 0:
        config.temperature = temperature
    else:
        # transformers warns of settings that have no effect
        for name in ("temperature", "top_p", "top_k", "min_p", "typical_p"):
            setattr(config, name, None)
    return config
