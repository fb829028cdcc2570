"""The rules of every backend and stage, applied to typed `Values` and to a `Context`, each once.

Layer `parser` repeats upstream's own `__post_init__`; layer `run` is what would parse and then
crash or do something else than it says; layer `launch` is our own.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from launcher.errors import About, Finding, set_subject
from launcher.rules.context import Context, StageRule
from launcher.rules.rule import Rule, as_it_stands
from launcher.upstream.schema import NoSuchField, Values
from launcher.upstream.trainers import BACKENDS

# Modules of launcher.rules beside `arguments`, by backend; one that has no rules of its own is not
# listed. Imported where they are needed: importing is a good part of the time that one file takes.
_FURTHER = {
    "open_instruct": (
        "services",
        "open_instruct.data",
        "open_instruct.machine",
        "open_instruct.gradient",
        "open_instruct.tokenizer",
    ),
    "trl": ("trl.machine", "trl.attention", "trl.adapters", "trl.data"),
}


_REGISTERED: dict[tuple[str, str], list[Rule]] = {}
"""Rules of extensions, by backend and entry script."""


def register_rule(rule: Rule, backend: str, *keys: str) -> None:
    """Apply a rule to these entry scripts of a trainer, too."""
    for key in keys:
        _REGISTERED.setdefault((backend, key), []).append(rule)


def _find_stage(backend: str, key: str) -> str:
    return BACKENDS[backend].STAGES[key].stage or key


def _import_rules(module: str, key: str, table: str = "RULES") -> tuple[Any, ...]:
    rules = getattr(import_module(f"launcher.rules.{module}"), table)
    if isinstance(rules, Mapping):
        rules = rules[key]
    return tuple(rules)


def of_script(backend: str, key: str) -> tuple[Rule, ...]:
    """The rules about arguments alone of one entry script, by its key."""
    return (*_import_own_rules(backend, key), *_REGISTERED.get((backend, key), ()))


def _import_own_rules(backend: str, key: str) -> tuple[Rule, ...]:
    own = BACKENDS[backend].STAGES[key].rules
    if own:
        return _import_rules(own, key)
    if backend not in _FURTHER:
        return ()
    return _import_rules(f"{backend}.arguments", _find_stage(backend, key))


@cache
def of_stage(backend: str, key: str) -> tuple[StageRule, ...]:
    """The rules of one entry script that need more than its arguments."""
    own = BACKENDS[backend].STAGES[key].rules
    if own:
        return _import_rules(own, key, "STAGE_RULES")
    key = _find_stage(backend, key)
    from launcher.rules import deepspeed, embedding, model, output, precision, split

    rules: list[StageRule] = []
    for module in (deepspeed, model, precision, embedding, output, split):
        rules += module.RULES.get(backend, {}).get(key, ())
    for name in _FURTHER.get(backend, ()):
        rules += _import_rules(name, key)
    return tuple(rules)


def apply(values: Values) -> Iterator[Finding]:
    for rule in of_script(values.schema.backend, values.schema.key):
        # at another commit than the pin: a rule about a field that is not there has nothing to say
        with suppress(NoSuchField):
            yield from as_it_stands(rule, rule(values), values.schema)


def apply_in(context: Context) -> Iterator[Finding]:
    """Every finding of every other rule that these facts suffice for.

    Keys are `args.NAME` or those of options.
    """
    schema = context.values.schema
    for rule in of_stage(schema.backend, schema.key):
        if not _is_due(rule, context):
            continue
        with suppress(NoSuchField):
            yield from set_subject(_find_subject(rule), as_it_stands(rule, rule(context), schema))


def _find_subject(rule: StageRule) -> About:
    needed = getattr(rule, "needs", ())
    if "packages" in needed:
        return "machine"
    if "split" in needed:
        return "plan"
    return "file"


def _is_due(rule: StageRule, context: Context) -> bool:
    """Whether every fact that a rule needs is known, and none that says more than it."""
    for fact in getattr(rule, "needs", ()):
        if getattr(context, fact) is None:
            return False
    better = getattr(rule, "superseded_by", ())
    return all(getattr(context, fact) is None for fact in better)
