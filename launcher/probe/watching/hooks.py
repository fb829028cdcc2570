"""Watch modules as upstream imports them, so that nothing is imported any earlier."""

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .process import EventLog


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a watched function; a method's object is the first of `args`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None

    @property
    def owner(self) -> Any:
        return self.args[0]

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        if len(self.args) > place:
            return self.args[place]
        return self.kwargs.get(name, default)


Reaction = Callable[[Call], object]
Replacement = Callable[..., Any]
"""Gets the function that it replaces, then that function's arguments."""
ModuleAction = Callable[[ModuleType], None]
"""What is done with a module once it is imported."""


def wrap(owner: Any, name: str, instead: Replacement) -> None:
    """Replace `owner.name`. Raises AttributeError if there is no such function."""
    if isinstance(owner, type):
        # a static or class method itself, and not what it binds
        raw = vars(owner).get(name)
    else:
        raw = getattr(owner, name)
    if raw is None:
        raise AttributeError(f"{owner!r} has no {name}")
    is_bound = isinstance(raw, (staticmethod, classmethod))
    original = raw
    if is_bound:
        original = raw.__func__

    @functools.wraps(original)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs)

    replacement: Any = inner
    if is_bound:
        replacement = type(raw)(inner)
    setattr(owner, name, replacement)


def wrap_if_present(owner: Any, name: str, instead: Replacement) -> None:
    """`wrap`, unless this release of the package has no such function."""
    if vars(owner).get(name) is not None:
        wrap(owner, name, instead)


def react(
    record: EventLog, *, before: Reaction | None = None, after: Reaction | None = None
) -> Replacement:
    """React to each call. What fails in a reaction is a note in the record."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = getattr(original, "__name__", "a call")
        if before is not None:
            with record.quietly(f"before {name}"):
                before(Call(args, kwargs))
        result = original(*args, **kwargs)
        if after is not None:
            with record.quietly(f"after {name}"):
                after(Call(args, kwargs, result))
        return result

    return call


def load_file(path: str, name: str) -> Any:
    """Import a file by its path, under a name that no package of a trainer has."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Watcher:
    """An import hook that calls a function once, after the module it is registered for has run."""

    def __init__(self, record: EventLog, after: dict[str, ModuleAction]) -> None:
        self.record = record
        self.after = after
        self.looking: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in self.after or fullname in self.looking:
            return None
        self.looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        except (ImportError, ValueError):
            return None
        finally:
            self.looking.discard(fullname)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # only now: find_spec is also called to ask whether a package is installed
            action = self.after.pop(fullname, None)
            if action is not None:
                with self.record.quietly(f"watching {fullname}"):
                    action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
