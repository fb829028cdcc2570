"""Conversations with a trained model, and with its base beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher.machine.python import Trainer
from launcher.trained.model import TrainedModel
from launcher.trained.worker import Worker

NEEDS = ("torch", "transformers")
NEEDS_OF_ADAPTERS = (*NEEDS, "peft")
BASE, MODEL = "base", "model"
"""Who answers."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn: at `temperature` 0 the likeliest one. `max_new_tokens` is the longest answer."""

    temperature: float
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer. `ended` is `stop`, `length` (it was cut off) or `interrupted`; `seconds` are those of generating."""

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
        base = None if self.base is None else asdict(self.base)
        return {"prompt": self.prompt, MODEL: asdict(self.model), BASE: base}


@dataclass(slots=True)
class _Conversation:
    messages: list[dict[str, str]] = field(default_factory=list)

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


class Chat:
    """A model that has been loaded, and the conversation with it."""

    def __init__(self, worker: Worker, loaded: Mapping[str, Any], sampling: Sampling, system: str | None) -> None:
        self._worker = worker
        self._sampling = sampling
        self._system = system
        self.device = str(loaded["device"])
        self.dtype = str(loaded["dtype"])
        self.has_template = loaded["template"] is True
        self.begin()

    def begin(self) -> None:
        """Begin a new conversation."""
        self._conversations = {MODEL: _Conversation(), BASE: _Conversation()}
        if self._system is not None:
            for conversation in self._conversations.values():
                conversation.add("system", self._system)

    def ask(self, prompt: str, who: str, say: Say) -> Reply:
        """The next answer of the model or its base; `say` gets it in pieces. Raises NotReady where that fails."""
        conversation = self._conversations[who]
        conversation.add("user", prompt)
        self._worker.send({"messages": conversation.messages, "as": who, "sampling": asdict(self._sampling)})
        try:
            answer = self._receive(say)
        except BaseException:
            # it was not answered: the next prompt stands in its place
            conversation.messages.pop()
            raise
        conversation.add("assistant", answer.text)
        return answer

    def _receive(self, say: Say) -> Reply:
        for event in self._worker.events("answered"):
            if event["event"] == "text":
                say(event["text"])
                continue
            return Reply(**{name: event[name] for name in Reply.__dataclass_fields__})
        raise AssertionError("`events` ends with an answer")

    def interrupt(self) -> None:
        """End the answer that is being generated: its beginning counts."""
        self._worker.interrupt()


def needs(model: TrainedModel) -> tuple[str, ...]:
    """The packages without which a model cannot be loaded."""
    return NEEDS_OF_ADAPTERS if model.is_adapter else NEEDS


def open_worker(model: TrainedModel, trainer: Trainer, environ: Mapping[str, str], *, beside: bool) -> Worker:
    """A process that answers as the model, and with `beside` as its base."""
    return Worker(trainer, "chat", {"model": model.as_json(), "beside": beside}, environ)


def answer_all(chat: Chat, prompts: Iterable[str], *, beside: bool) -> list[Turn]:
    """The turns of one conversation, without a word on the way."""
    return [_turn(chat, prompt, beside=beside) for prompt in prompts]


def _turn(chat: Chat, prompt: str, *, beside: bool) -> Turn:
    base = chat.ask(prompt, BASE, _nothing) if beside else None
    return Turn(prompt=prompt, model=chat.ask(prompt, MODEL, _nothing), base=base)


def _nothing(_text: str) -> None:
    """Say nothing."""
