"""The cross-field rules of every backend and stage, applied to typed `Values`.

Layer `parser` repeats upstream's own `__post_init__`; layer `run` is what would parse and then crash
or do something else than it says; layer `launch` is our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from launcher.backends.open_instruct import OLMO_CORE
from launcher.backends.rule import Rule, as_it_stands
from launcher.errors import Finding
from launcher.schema import NoSuchField, Values


def of_backend(backend: str) -> Mapping[str, tuple[Rule, ...]]:
    """The rules of a backend, by stage. The others' modules are not imported: that is a good part of
    the time that one file takes.
    """
    if backend == "trl":
        from launcher.backends import trl_rules

        return trl_rules.RULES
    from launcher.backends import open_instruct_rules

    return open_instruct_rules.RULES


def of_script(backend: str, key: str) -> tuple[Rule, ...]:
    """The rules of one entry script, by its key."""
    if key != OLMO_CORE:
        return of_backend(backend)[key]
    from launcher.backends import olmo_core_rules

    return olmo_core_rules.RULES


def apply(values: Values) -> Iterator[Finding]:
    """Every finding of every rule for the stage and backend of `values`."""
    for rule in of_script(values.schema.backend, values.schema.key):
        # at another commit than the pin: a rule about a field that is not there has nothing to say
        with suppress(NoSuchField):
            yield from as_it_stands(rule, rule(values), values.schema)
