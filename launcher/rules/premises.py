"""On which of upstream's behaviours a rule depends, so that each checkout is judged by what its own
source does.

A rule whose premises are all known at a commit does not hang on the lines that it cites there.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from launcher.errors import Finding
from launcher.lazy_dataclass import dataclass
from launcher.upstream.schema import Schema

_Rule = TypeVar("_Rule", bound=Callable[..., Iterator[Finding]])
_ATTRIBUTE = "premises"


@dataclass(frozen=True, slots=True)
class Premise:
    """A behaviour, by its name, and how a rule depends on it.

    `holds` is None where the rule itself asks which it is.
    """

    behaviour: str
    holds: bool | None


def where(behaviour: str) -> Callable[[_Rule], _Rule]:
    """The rule is about commits that behave so.

    Where nothing tells, it counts as far as its cited lines stand.
    """
    return _add_premise(Premise(behaviour, True))


def unless(behaviour: str) -> Callable[[_Rule], _Rule]:
    """The rule is about commits that do not behave so; where nothing tells, it is silent."""
    return _add_premise(Premise(behaviour, False))


def asks(behaviour: str) -> Callable[[_Rule], _Rule]:
    """The rule is about both kinds of commits, and asks which one it is at."""
    return _add_premise(Premise(behaviour, None))


def _add_premise(premise: Premise) -> Callable[[_Rule], _Rule]:
    def mark(rule: _Rule) -> _Rule:
        rule.__dict__[_ATTRIBUTE] = (*premises_of(rule), premise)
        return rule

    return mark


def premises_of(rule: Callable[..., Any]) -> tuple[Premise, ...]:
    premises: tuple[Premise, ...] = getattr(rule, _ATTRIBUTE, ())
    return premises


def applies(rule: Callable[..., Any], schema: Schema) -> bool:
    """Whether a rule is about this source, as far as its behaviours are known."""
    for premise in premises_of(rule):
        does = schema.does(premise.behaviour)
        if premise.holds is True and does is False:
            return False
        if premise.holds is False and does is not False:
            return False
    return True


def settled(rule: Callable[..., Any], schema: Schema) -> bool:
    """Whether this source itself tells all that a rule depends on."""
    premises = premises_of(rule)
    return bool(premises) and all(
        schema.does(premise.behaviour) is not None for premise in premises
    )
