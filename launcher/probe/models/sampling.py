"""Answers to the same prompts by a model before and after its training, each loaded alone."""

import gc
from dataclasses import asdict
from typing import Any

from . import answering, loading
from .answering import Decoding, Messages
from .channel import Channel
from .loading import Loaded


def sample(channel: Channel, settings: dict[str, Any]) -> None:
    """Answer the prompts with the trained model, then with its base; one event `sample` each."""
    sources = loading.parse_sources(settings["model"])
    prompts = settings["prompts"]
    decoding = Decoding(**settings["sampling"])
    trained = loading.load(sources)
    _answer_all(channel, "after", trained, prompts, decoding)
    if sources.is_adapter:
        with trained.as_base():
            _answer_all(channel, "before", trained, prompts, decoding)
    elif sources.base is not None:
        # both need not fit into memory
        tokenizer = trained.tokenizer
        del trained
        gc.collect()
        base = loading.load_base(sources.base, tokenizer)
        _answer_all(channel, "before", base, prompts, decoding)
    channel.send("done")


def _answer_all(
    channel: Channel, when: str, loaded: Loaded, prompts: list[Messages], decoding: Decoding
) -> None:
    for number, messages in enumerate(prompts):
        result = answering.answer(loaded, messages, decoding, lambda _: None, lambda: False)
        channel.send("sample", number=number, when=when, **asdict(result))
