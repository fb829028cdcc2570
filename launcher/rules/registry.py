"""The rules of every backend and stage, applied to typed `Values` and to a `Context`.

Layer `parser` repeats upstream's own `__post_init__`; layer `run` is what would parse and then crash
or do something else than it says; layer `launch` is our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache

from launcher.errors import Finding
from launcher.rules.context import Context, StageRule
from launcher.rules.rule import Rule, as_it_stands
from launcher.upstream.open_instruct import OLMO_CORE
from launcher.upstream.schema import NoSuchField, Values

# The other backend's modules are not imported: that is a good part of the time that one file takes.


def of_backend(backend: str) -> Mapping[str, tuple[Rule, ...]]:
    """The rules about arguments alone, by stage."""
    if backend == "trl":
        from launcher.rules.trl import arguments as trl_rules

        return trl_rules.RULES
    from launcher.rules.open_instruct import arguments as open_instruct_rules

    return open_instruct_rules.RULES


def of_script(backend: str, key: str) -> tuple[Rule, ...]:
    """The rules about arguments alone of one entry script, by its key."""
    if key != OLMO_CORE:
        return of_backend(backend)[key]
    from launcher.rules.open_instruct import olmo_core

    return olmo_core.RULES


@cache
def of_stage(backend: str, key: str) -> tuple[StageRule, ...]:
    """The rules of one entry script that need more than its arguments."""
    if key == OLMO_CORE:
        from launcher.rules.open_instruct import olmo_core

        return olmo_core.STAGE_RULES
    from launcher.rules import deepspeed, loading, model, output

    shared = (
        *deepspeed.RULES[backend][key],
        *model.RULES[backend][key],
        *loading.RULES,
        *output.RULES[backend][key],
    )
    if backend == "trl":
        from launcher.rules.trl import attention, machine
        from launcher.rules.trl import data as trl_data_rules

        return (
            *shared,
            *machine.RULES,
            *attention.RULES[key],
            *trl_data_rules.RULES,
        )
    from launcher.rules import services
    from launcher.rules.open_instruct import data as data_rules

    return (*shared, *services.RULES, *data_rules.RULES)


def of_split(values: Values, rows: int | None, **split: int) -> Iterator[Finding]:
    """Every finding of the rules about a batch as it is split over devices; see `olmo_core.of_split`."""
    if values.schema.key == OLMO_CORE:
        from launcher.rules.open_instruct import olmo_core

        yield from olmo_core.of_split(values, rows, **split)


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
