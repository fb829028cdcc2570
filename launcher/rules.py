"""The cross-field rules of every backend and stage, applied to typed `Values`.

Layer `parser` repeats upstream's own `__post_init__`; layer `run` is what would parse and then crash
or do something else than it says; layer `launch` is our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from launcher.backends import open_instruct_rules, trl_rules
from launcher.backends.rule import Rule
from launcher.errors import Finding
from launcher.schema import NoSuchField, Values

RULES: Mapping[str, Mapping[str, tuple[Rule, ...]]] = {
    "open_instruct": open_instruct_rules.RULES,
    "trl": trl_rules.RULES,
}


def apply(values: Values) -> Iterator[Finding]:
    """Every finding of every rule for the stage and backend of `values`."""
    for rule in RULES[values.schema.backend][values.schema.stage]:
        # at another commit than the pin: a rule about a field that is not there has nothing to say
        with suppress(NoSuchField):
            yield from rule(values)
