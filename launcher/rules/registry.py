"""The rules of every backend and stage, applied to typed `Values` and to a `Context`.

Layer `parser` repeats upstream's own `__post_init__`; layer `run` is what would parse and then crash
or do something else than it says; layer `launch` is our own.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from launcher.errors import Finding
from launcher.rules.context import Context, StageRule
from launcher.rules.rule import Rule, as_it_stands
from launcher.upstream.open_instruct import OLMO_CORE
from launcher.upstream.schema import NoSuchField, Values
from launcher.upstream.trainers import BACKENDS

# Modules of launcher.rules beside `arguments`, by backend; one that has no rules of its own is not listed.
# Imported where they are needed: importing is a good part of the time that one file takes.
_FURTHER = {
    "open_instruct": (
        *("services", "open_instruct.data", "open_instruct.machine"),
        *("open_instruct.gradient", "open_instruct.tokenizer"),
    ),
    "trl": ("trl.machine", "trl.attention", "trl.adapters", "trl.data"),
}


# a further script of a stage has the rules of that stage, or all of a module
_OWN = {OLMO_CORE: "open_instruct.olmo_core"}


def _stage(backend: str, key: str) -> str:
    return BACKENDS[backend].STAGES[key].stage or key


def _rules(module: str, key: str, table: str = "RULES") -> tuple[Any, ...]:
    rules = getattr(import_module(f"launcher.rules.{module}"), table)
    return tuple(rules[key] if isinstance(rules, Mapping) else rules)


def of_script(backend: str, key: str) -> tuple[Rule, ...]:
    """The rules about arguments alone of one entry script, by its key."""
    if key in _OWN:
        return _rules(_OWN[key], key)
    return _rules(f"{backend}.arguments", _stage(backend, key)) if backend in _FURTHER else ()


@cache
def of_stage(backend: str, key: str) -> tuple[StageRule, ...]:
    """The rules of one entry script that need more than its arguments."""
    if key in _OWN:
        return _rules(_OWN[key], key, "STAGE_RULES")
    key = _stage(backend, key)
    from launcher.rules import deepspeed, embedding, model, output, precision

    modules = (deepspeed, model, precision, embedding, output)
    shared = (rule for module in modules for rule in module.RULES.get(backend, {}).get(key, ()))
    further = (rule for module in _FURTHER.get(backend, ()) for rule in _rules(module, key))
    return (*shared, *further)


def of_split(context: Context, rows: int | None, *, devices: int, is_global: bool) -> Iterator[Finding]:
    """Every finding of the rules about a batch as it is split over devices; see `olmo_core.of_split`.

    The `gpus` of the context are processes.
    """
    schema = context.values.schema
    if (module := _OWN.get(schema.key)) is not None:
        rules = import_module(f"launcher.rules.{module}")
        yield from rules.of_split(context, rows, devices=devices, is_global=is_global)
        return
    from launcher.rules import split

    stage = _stage(schema.backend, schema.key)
    for rule in split.RULES.get(schema.backend, {}).get(stage, ()):
        with suppress(NoSuchField):
            yield from as_it_stands(rule, rule(context), schema)


def split_rules(backend: str, key: str) -> tuple[StageRule, ...]:
    """The rules of one entry script about a batch as it is split over devices."""
    if (module := _OWN.get(key)) is not None:
        return tuple(getattr(import_module(f"launcher.rules.{module}"), "SPLIT_RULES", ()))
    from launcher.rules import split

    return split.RULES.get(backend, {}).get(_stage(backend, key), ())


def apply(values: Values) -> Iterator[Finding]:
    for rule in of_script(values.schema.backend, values.schema.key):
        # at another commit than the pin: a rule about a field that is not there has nothing to say
        with suppress(NoSuchField):
            yield from as_it_stands(rule, rule(values), values.schema)


def apply_in(context: Context) -> Iterator[Finding]:
    """Every finding of every other rule; keys are `args.NAME`, `deepspeed` or `mixed_precision`."""
    schema = context.values.schema
    for rule in of_stage(schema.backend, schema.key):
        with suppress(NoSuchField):
            yield from as_it_stands(rule, rule(context), schema)
