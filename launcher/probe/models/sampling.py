"""The same prompts to a model before and after its training, each loaded alone."""

import gc
from typing import Any

from . import answering, loading
from .channel import Channel
from .loading import Loaded


def sample(channel: Channel, settings: dict[str, Any]) -> None:
    """Answer the prompts of `settings` with the trained model, then with its base; one event `sample` each."""
    described = settings["model"]
    trained = loading.load(described)
    _answer_all(channel, "after", trained, settings)
    if described["base"] is None:
        channel.send("done")
        return
    if described["is_adapter"]:
        with trained.as_base():
            _answer_all(channel, "before", trained, settings)
    else:
        # the two need not fit beside each other: of the trained one only the tokenizer is needed
        tokenizer = trained.tokenizer
        del trained
        gc.collect()
        base = loading.load_base(described, Loaded(model=None, tokenizer=tokenizer))
        _answer_all(channel, "before", base, settings)
    channel.send("done")


def _answer_all(channel: Channel, when: str, loaded: Loaded, settings: dict[str, Any]) -> None:
    for number, messages in enumerate(settings["prompts"]):
        result = answering.answer(loaded, messages, settings["sampling"], lambda _: None, lambda: False)
        channel.send("sample", number=number, when=when, **result)
