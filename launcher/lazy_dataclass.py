"""`dataclass` as in the standard library, but quick to define.

The standard library writes and compiles five to seven methods when a class is defined, about 0.6 ms
for each class. A command defines more than a hundred of them and creates instances of a few. Here
only `__init__` is compiled, and that when the first instance is created; the other methods are
shared by all classes. `fields`, `replace`, `asdict` and `is_dataclass` work as for any dataclass.
"""

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]


def _lazy_dataclass(
    *, frozen: bool = False, slots: bool = False, kw_only: bool = False, eq: bool = True
) -> Callable[[type], type]:
    def define(cls: type) -> type:
        if cls.__doc__ is None:
            # otherwise the standard library describes the signature, which takes 0.1 ms
            cls.__doc__ = cls.__name__
        options = {"slots": slots, "kw_only": kw_only}
        cls = dataclasses.dataclass(init=False, repr=False, eq=False, **options)(cls)
        methods: dict[str, object] = {"__init__": _init_compiled_by_first_call(cls, frozen)}
        methods["__repr__"] = _render_fields
        if eq:
            methods.update(_make_comparison(cls, frozen))
        if frozen:
            methods["__setattr__"] = _refuse_assignment
            methods["__delattr__"] = _refuse_deletion
            methods["__setstate__"] = _restore
        written = vars(cls)
        for name, method in methods.items():
            # Python itself sets `__hash__` to None where a class has an `__eq__`
            if written.get(name) is None:
                setattr(cls, name, method)
        return cls

    return define


if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    dataclass = _lazy_dataclass


def _init_compiled_by_first_call(cls: Any, frozen: bool) -> Callable[..., None]:
    def __init__(self: object, *values: object, **named: object) -> None:
        init = _compile_init(cls, frozen)
        cls.__init__ = init
        init(self, *values, **named)

    return __init__


def _compile_init(cls: type, frozen: bool) -> Callable[..., None]:
    names: dict[str, object] = {"_set": object.__setattr__, "_MISSING": MISSING}
    by_place = ["self"]
    by_name: list[str] = []
    body = []
    for field in dataclasses.fields(cls):
        parameter = value = field.name
        if field.default is not MISSING:
            names[f"_default_{field.name}"] = field.default
            parameter += f"=_default_{field.name}"
        elif field.default_factory is not MISSING:
            names[f"_make_{field.name}"] = field.default_factory
            parameter += "=_MISSING"
            value = f"_make_{field.name}() if {value} is _MISSING else {value}"
        parameters = by_name if field.kw_only else by_place
        parameters.append(parameter)
        if frozen:
            body.append(f"_set(self, {field.name!r}, {value})")
        else:
            body.append(f"self.{field.name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    if by_name:
        by_name.insert(0, "*")
    lines = "\n ".join(body or ["pass"])
    exec(f"def __init__({', '.join(by_place + by_name)}):\n {lines}", names)
    init: Any = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init  # type: ignore[no-any-return]


def _make_comparison(cls: type, frozen: bool) -> dict[str, object]:
    compared = [field.name for field in dataclasses.fields(cls) if field.compare]
    values_of: Callable[[object], object] = type
    if compared:
        values_of = operator.attrgetter(*compared)

    def __eq__(self: object, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return bool(values_of(self) == values_of(other))

    def __hash__(self: object) -> int:
        return hash(values_of(self))

    return {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}


def _render_fields(self: Any) -> str:
    shown = []
    for field in dataclasses.fields(self):
        if field.repr:
            shown.append(f"{field.name}={getattr(self, field.name)!r}")
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse_assignment(self: object, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(self: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _restore(self: object, state: Any) -> None:
    """Set what `copy` or `pickle` has kept of an instance: its slots, or its `__dict__`."""
    values = state[1] if isinstance(state, tuple) else state
    for name, value in values.items():
        object.__setattr__(self, name, value)
