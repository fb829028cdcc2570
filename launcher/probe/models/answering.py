"""One answer of a model, with its text as it is generated."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .channel import ModelRefused
from .loading import Loaded

Messages = list[dict[str, str]]
"""A conversation; each message has a `role` and its `content`."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens are chosen: `temperature` 0 takes the likeliest."""

    temperature: float
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """`ended` is `stop`, `length` or `interrupted`."""

    text: str
    prompt_tokens: int
    tokens: int
    seconds: float
    ended: str


def encode(loaded: Loaded, messages: Messages) -> Any:
    """A conversation by the chat template; without one its last message as plain text."""
    tokenizer = loaded.tokenizer
    if not loaded.has_template:
        return tokenizer(messages[-1]["content"], return_tensors="pt")
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:
        message = f"the chat template refuses this conversation: {error}"
        raise ModelRefused("template-refuses", message) from error


def answer(
    loaded: Loaded,
    messages: Messages,
    decoding: Decoding,
    say: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> GeneratedAnswer:
    """Generate one answer. `say` gets its text in pieces.

    Raises ModelRefused if the conversation leaves no room for an answer.
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
            return torch.full_like(input_ids[:, 0], is_stopped(), dtype=torch.bool)

    pieces: list[str] = []
    encoded = encode(loaded, messages)
    ids = encoded["input_ids"].to(loaded.device)
    length = ids.shape[1]
    config = _build_generation_config(loaded, decoding, length)
    torch.manual_seed(decoding.seed)
    began = time.monotonic()
    with torch.inference_mode():
        output = loaded.model.generate(
            input_ids=ids,
            attention_mask=encoded["attention_mask"].to(loaded.device),
            generation_config=config,
            streamer=PieceStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True),
            stopping_criteria=StoppingCriteriaList([StopOnInterrupt()]),
        )
    tokens = output[0, length:].tolist()
    if tokens and tokens[-1] in loaded.stops:
        ended = "stop"
    elif is_stopped():
        ended = "interrupted"
    else:
        ended = "length"
    return GeneratedAnswer(
        text="".join(pieces).strip(),
        prompt_tokens=length,
        tokens=len(tokens),
        seconds=round(time.monotonic() - began, 3),
        ended=ended,
    )


def _build_generation_config(loaded: Loaded, decoding: Decoding, length: int) -> Any:
    """The model's own config with these settings; its `top_p` and `top_k` apply to drawn tokens.

    Raises ModelRefused if a prompt of `length` tokens leaves no room.
    """
    most = decoding.max_new_tokens
    if loaded.limit is not None:
        most = min(most, loaded.limit - length)
    if most < 1:
        message = f"the conversation has {length} tokens, and the model takes {loaded.limit}"
        raise ModelRefused("too-long-prompt", message)
    config = copy.deepcopy(loaded.model.generation_config)
    config.max_length = None
    config.max_new_tokens = most
    config.eos_token_id = loaded.stops or None
    if config.pad_token_id is None:
        config.pad_token_id = loaded.tokenizer.pad_token_id
    if config.pad_token_id is None and loaded.stops:
        config.pad_token_id = loaded.stops[0]
    config.do_sample = decoding.temperature > 0
    if config.do_sample:
        config.temperature = decoding.temperature
    else:
        # transformers warns about settings without effect
        for name in ("temperature", "top_p", "top_k", "min_p", "typical_p"):
            setattr(config, name, None)
    return config
