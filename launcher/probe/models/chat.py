"""Answers to conversations, one request after the other, until stdin ends."""

import signal
from dataclasses import asdict
from typing import Any

from . import answering, loading
from .answering import GeneratedAnswer
from .channel import Channel, ModelRefused
from .loading import Loaded


class InterruptFlag:
    """Whether SIGINT came during an answer: it ends that answer, not this process."""

    def __init__(self) -> None:
        self.is_set = False
        signal.signal(signal.SIGINT, self._set)

    def _set(self, *_: object) -> None:
        self.is_set = True


class Dialogue:
    """A trained model and, if it was asked for and is no adapter, its base beside it."""

    def __init__(self, channel: Channel, trained: Loaded, base: Loaded | None) -> None:
        self.channel = channel
        self.trained = trained
        self.base = base
        self.interruption = InterruptFlag()

    def answer(self, request: dict[str, Any]) -> GeneratedAnswer:
        if request["as"] == "model":
            return self._answer_request(self.trained, request)
        if self.base is not None:
            return self._answer_request(self.base, request)
        with self.trained.as_base():
            return self._answer_request(self.trained, request)

    def _answer_request(self, loaded: Loaded, request: dict[str, Any]) -> GeneratedAnswer:
        self.interruption.is_set = False
        return answering.answer(
            loaded,
            request["messages"],
            answering.Decoding(**request["sampling"]),
            lambda text: self.channel.send("text", text=text),
            lambda: self.interruption.is_set,
        )


def chat(channel: Channel, settings: dict[str, Any]) -> None:
    """Load the model, with `beside` its base too; then answer each request.

    A request is `{"messages": [...], "as": "model" or "base", "sampling": {...}}`. Its answer is
    events `text`, and `answered` at the end.
    """
    sources = loading.parse_sources(settings["model"])
    trained = loading.load(sources)
    base = None
    if settings["beside"] and sources.base is not None and not sources.is_adapter:
        base = loading.load_base(sources.base, trained.tokenizer)
    dialogue = Dialogue(channel, trained, base)
    channel.send(
        "loaded", device=trained.device, dtype=trained.dtype, template=trained.has_template
    )
    while True:
        request = channel.receive()
        if request is None:
            return
        try:
            channel.send("answered", **asdict(dialogue.answer(request)))
        except ModelRefused as refusal:
            channel.send_failure(refusal)
