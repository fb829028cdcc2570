"""Answers to the same prompts by a model before and after its training, each loaded alone."""

import gc
from typing import Any

from . import answering, loading
from .channel import Channel
from .loading import Loaded


def sample(channel: Channel, settings: dict[str, Any]) -> None:
    """Answer the prompts with the trained model, then with its base; one event `sample` each."""
    sources = loading.sources_of(settings["model"])
    trained = loading.load(sources)
    _answer_all(channel, "after", trained, settings)
    if sources.is_adapter:
        with trained.as_base():
            _answer_all(channel, "before", trained, settings)
    elif sources.base is not None:
        # both need not fit into memory
        tokenizer = trained.tokenizer
        del trained
        gc.collect()
        base = loading.load_base(sources.base, tokenizer)
        _answer_all(channel, "before", base, settings)
    channel.send("done")


def _answer_all(channel: Channel, when: str, loaded: Loaded, settings: dict[str, Any]) -> None:
    decoding = answering.Decoding(**settings["sampling"])
    for number, messages in enumerate(settings["prompts"]):
        result = answering.answer(loaded, messages, decoding, lambda _: None, lambda: False)
        channel.send("sample", number=number, when=when, **result)
