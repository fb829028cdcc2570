"""The rules that need more than upstream's arguments, by backend and stage, applied to a `Context`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache

from launcher.backends.context import Context, StageRule
from launcher.backends.open_instruct import OLMO_CORE
from launcher.backends.rule import as_it_stands
from launcher.errors import Finding
from launcher.schema import NoSuchField


@cache
def of_stage(backend: str, stage: str) -> tuple[StageRule, ...]:
    """The rules of one stage; the other backend's modules are not imported."""
    return _trl(stage) if backend == "trl" else _open_instruct(stage)


def _open_instruct(stage: str) -> tuple[StageRule, ...]:
    if stage == OLMO_CORE:
        from launcher.backends import olmo_core_rules

        return olmo_core_rules.STAGE_RULES
    from launcher.backends import (
        data_rules,
        deepspeed_rules,
        gradient_rules,
        loading_rules,
        model_rules,
        output_rules,
        service_rules,
    )

    return (
        *deepspeed_rules.RULES[stage],
        *gradient_rules.RULES,
        *model_rules.RULES["open_instruct"][stage],
        *loading_rules.RULES,
        *service_rules.RULES,
        *data_rules.RULES,
        *output_rules.RULES[stage],
    )


def _trl(stage: str) -> tuple[StageRule, ...]:
    from launcher.backends import (
        gradient_rules,
        loading_rules,
        model_rules,
        trl_attention,
        trl_data_rules,
        trl_deepspeed_rules,
        trl_machine_rules,
        trl_output_rules,
    )

    return (
        *model_rules.RULES["trl"][stage],
        *loading_rules.RULES,
        *trl_machine_rules.RULES,
        *trl_deepspeed_rules.RULES,
        *gradient_rules.RULES,
        *trl_attention.RULES,
        *(trl_attention.RULES_OF_SFT if stage == "sft" else ()),
        *trl_data_rules.RULES,
        *trl_output_rules.RULES,
    )


def apply(context: Context) -> Iterator[Finding]:
    """Every finding of every stage rule; keys are `args.NAME`, `deepspeed` or `mixed_precision`."""
    schema = context.values.schema
    for rule in of_stage(schema.backend, schema.key):
        # at another commit than the pin: a rule about a field that is not there has nothing to say
        with suppress(NoSuchField):
            yield from as_it_stands(rule, rule(context), schema)
