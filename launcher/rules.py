"""The rules of every backend and stage, applied to typed `Values` and to a `Context`.

Layer `parser` repeats upstream's own `__post_init__`; layer `run` is what would parse and then crash
or do something else than it says; layer `launch` is our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache

from launcher.backends.context import Context, StageRule
from launcher.backends.open_instruct import OLMO_CORE
from launcher.backends.rule import Rule, as_it_stands
from launcher.errors import Finding
from launcher.schema import NoSuchField, Values

# The other backend's modules are not imported: that is a good part of the time that one file takes.


def of_backend(backend: str) -> Mapping[str, tuple[Rule, ...]]:
    """The rules about arguments alone, by stage."""
    if backend == "trl":
        from launcher.backends import trl_rules

        return trl_rules.RULES
    from launcher.backends import open_instruct_rules

    return open_instruct_rules.RULES


def of_script(backend: str, key: str) -> tuple[Rule, ...]:
    """The rules about arguments alone of one entry script, by its key."""
    if key != OLMO_CORE:
        return of_backend(backend)[key]
    from launcher.backends import olmo_core_rules

    return olmo_core_rules.RULES


@cache
def of_stage(backend: str, key: str) -> tuple[StageRule, ...]:
    """The rules of one entry script that need more than its arguments."""
    if key == OLMO_CORE:
        from launcher.backends import olmo_core_rules

        return olmo_core_rules.STAGE_RULES
    from launcher.backends import deepspeed_rules, loading_rules, model_rules, output_rules

    shared = (
        *deepspeed_rules.RULES[backend][key],
        *model_rules.RULES[backend][key],
        *loading_rules.RULES,
        *output_rules.RULES[backend][key],
    )
    if backend == "trl":
        from launcher.backends import trl_attention, trl_data_rules, trl_machine_rules

        return (
            *shared,
            *trl_machine_rules.RULES,
            *trl_attention.RULES[key],
            *trl_data_rules.RULES,
        )
    from launcher.backends import data_rules, service_rules

    return (*shared, *service_rules.RULES, *data_rules.RULES)


def apply(values: Values) -> Iterator[Finding]:
    """Every finding of every rule about arguments alone."""
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
