"""Conversations with a trained model, and with its base beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from launcher.lazy_dataclass import dataclass
from launcher.machine.python import Trainer
from launcher.trained.model import TrainedModel
from launcher.trained.worker import Worker

NEEDS = ("torch", "transformers")
NEEDS_OF_ADAPTERS = (*NEEDS, "peft")
BASE = "base"
MODEL = "model"
"""Who answers."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; `temperature` 0 always takes the likeliest one."""

    temperature: float
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer; `ended` is `stop`, `length` (it was cut off) or `interrupted`.

    `seconds` is the time of generating.
    """

    text: str
    prompt_tokens: int
    tokens: int
    seconds: float
    ended: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A prompt with the answers to it; `base` is None where the base did not answer."""

    prompt: str
    model: Reply
    base: Reply | None = None

    def as_json(self) -> dict[str, object]:
        return asdict(self)


class Chat:
    """A model that has been loaded, and the conversation with it."""

    def __init__(
        self, worker: Worker, loaded: Mapping[str, Any], sampling: Sampling, system: str | None
    ) -> None:
        self._worker = worker
        self._sampling = sampling
        self._system = system
        self.device = str(loaded["device"])
        self.dtype = str(loaded["dtype"])
        self.has_template = loaded["template"] is True
        self.begin()

    def begin(self) -> None:
        """Begin a new conversation."""
        self._messages: dict[str, list[dict[str, str]]] = {MODEL: [], BASE: []}
        if self._system is not None:
            for messages in self._messages.values():
                messages.append({"role": "system", "content": self._system})

    def ask(self, prompt: str, who: str, say: Say) -> Reply:
        """The next answer of MODEL or BASE; `say` gets it in pieces. May raise NotReady."""
        messages = self._messages[who]
        messages.append({"role": "user", "content": prompt})
        sampling = asdict(self._sampling)
        self._worker.send({"messages": messages, "as": who, "sampling": sampling})
        try:
            answer = self._receive(say)
        except BaseException:
            # an unanswered prompt is no part of the conversation
            messages.pop()
            raise
        messages.append({"role": "assistant", "content": answer.text})
        return answer

    def _receive(self, say: Say) -> Reply:
        for event in self._worker.events("answered"):
            if event["event"] == "text":
                say(event["text"])
        return Reply(**{name: event[name] for name in Reply.__dataclass_fields__})

    def interrupt(self) -> None:
        """End the answer that is being generated: its beginning counts."""
        self._worker.interrupt()


def list_needs(model: TrainedModel) -> tuple[str, ...]:
    """The packages without which a model cannot be loaded."""
    return NEEDS_OF_ADAPTERS if model.is_adapter else NEEDS


def open_worker(
    model: TrainedModel, trainer: Trainer, environ: Mapping[str, str], *, beside: bool
) -> Worker:
    """A process that answers as the model, and with `beside` as its base."""
    return Worker(trainer, "chat", {"model": model.as_json(), "beside": beside}, environ)


def answer_all(chat: Chat, prompts: Iterable[str], *, beside: bool) -> list[Turn]:
    """Ask all prompts in one conversation, and print nothing."""
    turns: list[Turn] = []
    for prompt in prompts:
        base = chat.ask(prompt, BASE, _say_nothing) if beside else None
        model = chat.ask(prompt, MODEL, _say_nothing)
        turns.append(Turn(prompt=prompt, model=model, base=base))
    return turns


def _say_nothing(_text: str) -> None:
    return
