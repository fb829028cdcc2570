"""The border between the trainer and launch's code around it, as frames that a traceback shows (`server.py`)."""

from collections.abc import Callable
from typing import Any


class Refused(Exception):
    """What no exception of the trainer's says, and what makes its result worthless."""


class NoRehearsal(Exception):
    """What launch cannot rehearse; no fault of the stage."""


def call_trainer(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the trainer's or of its libraries: what it raises is the trainer's word."""
    return function(*args, **kwargs)


def pass_on(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call what the caller replaces: what it raises is the word of whoever called the replacement."""
    return function(*args, **kwargs)
