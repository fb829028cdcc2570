"""Frames that mark in a traceback where launch's code calls the trainer (`server.py`)."""

from collections.abc import Callable
from typing import Any


class Refused(Exception):
    """A fault that raises no exception in the trainer and makes its result worthless."""


def call_trainer(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the trainer or its libraries: what it raises counts as the trainer's."""
    return function(*args, **kwargs)


def pass_on(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call what the caller replaces: what it raises counts as that of the replacement's caller."""
    return function(*args, **kwargs)
