"""The rules that need more than upstream's arguments, by backend and stage, applied to a `Context`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from launcher.backends import (
    data_rules,
    deepspeed_rules,
    model_rules,
    output_rules,
    sequence_rules,
    service_rules,
)
from launcher.backends.context import Context, StageRule
from launcher.errors import Finding
from launcher.schema import NoSuchField

RULES: Mapping[str, Mapping[str, tuple[StageRule, ...]]] = {
    "open_instruct": {
        stage: (
            *deepspeed_rules.RULES[stage],
            *(sequence_rules.RULES if stage == "sft" else ()),
            *model_rules.RULES["open_instruct"][stage],
            *service_rules.RULES,
            *data_rules.RULES,
            *output_rules.RULES[stage],
        )
        for stage in ("sft", "dpo")
    },
    "trl": model_rules.RULES["trl"],
}


def apply(context: Context) -> Iterator[Finding]:
    """Every finding of every stage rule; keys are `args.NAME`, `deepspeed` or `mixed_precision`."""
    schema = context.values.schema
    for rule in RULES[schema.backend][schema.stage]:
        # at another commit than the pin: a rule about a field that is not there has nothing to say
        with suppress(NoSuchField):
            yield from rule(context)
