"""Watching modules as they are imported: so nothing is imported any earlier than upstream would."""

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

from .process import EventLog


def wrap(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Have `instead` called in place of `owner.name`, with that and its arguments."""
    raw = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name)
    if raw is None:
        raise AttributeError(f"{owner!r} has no {name}")
    kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
    original = raw if kind is None else raw.__func__

    @functools.wraps(original)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs)

    setattr(owner, name, inner if kind is None else kind(inner))


def wrap_known(owner: Any, names: tuple[str, ...], instead: Callable[..., Any]) -> None:
    """The same for those of the names that this version has."""
    for name in names:
        if vars(owner).get(name) is not None:
            wrap(owner, name, instead)


def observed(
    record: EventLog, *, before: Callable[..., object] | None = None, after: Callable[..., object] | None = None
) -> Callable[..., Any]:
    """For `wrap`: calls `before` with the arguments, `after` with the result too; what fails in them is noted."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = getattr(original, "__name__", "a call")
        if before is not None:
            with record.quietly(f"before {name}"):
                before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after is not None:
            with record.quietly(f"after {name}"):
                after(result, *args, **kwargs)
        return result

    return call


class Watcher:
    """Calls a function once, right after the module that it is registered for has been executed."""

    def __init__(self, record: EventLog, after: dict[str, Callable[[types.ModuleType], None]]):
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

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            # not before: whoever only asks whether a package is installed looks for it too
            action = self.after.pop(fullname, None)
            if action is not None:
                with self.record.quietly(f"watching {fullname}"):
                    action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
