"""Answers to conversations, one request after the other, until stdin ends."""

import signal
from typing import Any

from . import answering, loading
from .channel import Channel, ModelRefused
from .loading import Loaded


class InterruptFlag:
    """Whether SIGINT came while an answer was being generated: it ends that answer, not this process."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: object) -> None:
        self.came = True


def chat(channel: Channel, settings: dict[str, Any]) -> None:
    """Load the model of `settings`, with `beside` its base too; then answer each request.

    A request is `{"messages": [...], "as": "model" or "base", "sampling": {...}}`. Its answer are events `text`, and
    `answered` at the end.
    """
    interruption = InterruptFlag()
    described = settings["model"]
    trained = loading.load(described)
    base: Loaded | None = None
    if settings["beside"] and not described["is_adapter"]:
        base = loading.load_base(described, trained)
    model = trained.model
    channel.send(
        "loaded",
        device=str(trained.device),
        dtype=str(model.dtype).replace("torch.", ""),
        template=trained.has_template,
    )
    while True:
        request = channel.receive()
        if request is None:
            return
        interruption.came = False
        try:
            result = _answer(channel, trained, base, request, interruption)
        except ModelRefused as refusal:
            channel.send_failure(refusal)
        else:
            channel.send("answered", **result)


def _answer(
    channel: Channel, trained: Loaded, base: Loaded | None, request: dict[str, Any], interruption: InterruptFlag
) -> dict[str, Any]:
    def say(text: str) -> None:
        channel.send("text", text=text)

    def ask(loaded: Loaded) -> dict[str, Any]:
        return answering.answer(loaded, request["messages"], request["sampling"], say, lambda: interruption.came)

    if request["as"] == "model":
        return ask(trained)
    if base is not None:
        return ask(base)
    with trained.as_base():
        return ask(trained)
