"""Conditions over argument names: what follows from a test, and whether it holds."""

import ast
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.upstream.source import conditions

UNKNOWN = object()
UNSURE = "..."


def about_arguments(node: ast.expr) -> str | None:
    """Every name is an argument, except `x`."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    if not names or "x" in names:
        return None
    return ast.unparse(node)


def implied(test: str, truth: bool) -> set[str]:
    node = ast.parse(test, mode="eval").body
    return set(conditions.find_implied(node, truth, about_arguments))


@pytest.mark.parametrize(
    ("test", "if_true", "if_false"),
    [
        ("not a", {"not a"}, {"a"}),
        ("a and b", {"a", "b"}, {"not a or not b"}),
        ("a or b", {"a or b"}, {"not a", "not b"}),
        ("a and x", {"a", UNSURE}, {UNSURE}),
        ("a or x", {UNSURE}, {"not a", UNSURE}),
        ("a > 1", {"a > 1"}, {"a <= 1"}),
        ("0 < a < 3", {"0 < a < 3"}, {"not 0 < a < 3"}),
        ("(y := a)", {"a"}, {"not a"}),
        ("a and (b or c)", {"a", "b or c"}, {"not a or (not b and (not c))"}),
    ],
)
def test_what_a_test_implies(test: str, if_true: set[str], if_false: set[str]) -> None:
    assert implied(test, True) == if_true
    assert implied(test, False) == if_false


@pytest.mark.parametrize(
    ("text", "values", "truth"),
    [
        ("a", {"a": True}, True),
        ("a", {}, None),
        ("a", {"a": UNKNOWN}, None),
        ("a and b", {"a": False, "b": UNKNOWN}, False),
        ("a or b", {"a": UNKNOWN, "b": True}, True),
        ("a is 'x'", {"a": "x"}, True),
        ("a is not 'x'", {"a": "x"}, False),
        ("a < 1", {"a": None}, None),
        ("'x' in a", {"a": ["x"]}, True),
        ("(a or 5) == 5", {"a": 5}, True),
        ("(a and b) == 0", {"a": 0, "b": UNKNOWN}, True),
        ("not a <= 1", {"a": math.nan}, None),
        ("a.b", {"a": 1}, None),
        ("f(a)", {"a": 1}, None),
    ],
)
def test_whether_a_condition_holds(text: str, values: dict[str, Any], truth: bool | None) -> None:
    assert conditions.holds(text, values, UNKNOWN) is truth


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("(not {})".format, inner),
        st.builds("({} and {})".format, inner, inner),
        st.builds("({} or {})".format, inner, inner),
        st.builds("(({}) == ({}))".format, inner, inner),
    )


ATOMS = st.sampled_from(["a", "b", "c > 1", "c == d", "c in (1, 3)", "0 < c < d", "d is None", "d"])
TESTS = st.recursive(ATOMS, combined, max_leaves=6)

Values = dict[str, Any]
EVERY_VALUE: list[Values] = []
for numbers in itertools.product((True, False), (True, False), (0, 1, 2, 3), (0, 1, 3)):
    EVERY_VALUE.append(dict(zip("abcd", numbers, strict=True)))


def evaluate(text: str, values: Values) -> bool:
    """What Python makes of a condition."""
    return bool(eval(text, {}, dict(values)))


@given(TESTS)
def test_conditions_mean_what_python_means(text: str) -> None:
    for values in EVERY_VALUE:
        truth = evaluate(text, values)
        assert conditions.holds(text, values, UNKNOWN) is truth
        assert conditions.holds(conditions.negate(text), values, UNKNOWN) is (not truth)


@given(TESTS, st.sampled_from("abcd"))
def test_an_unknown_value_is_never_guessed(text: str, name: str) -> None:
    """An answer is given only where every value leads to it."""
    for values in EVERY_VALUE[::7]:
        truth = conditions.holds(text, {**values, name: UNKNOWN}, UNKNOWN)
        if truth is None:
            continue
        for other in EVERY_VALUE:
            if {**other, name: values[name]} == values:
                assert evaluate(text, other) == truth


@given(TESTS, st.booleans())
def test_what_is_implied_holds(text: str, truth: bool) -> None:
    followed = implied(text, truth)
    for values in EVERY_VALUE:
        if evaluate(text, values) is not truth:
            continue
        assert not conditions.is_impossible(followed)
        for condition in [*followed, *conditions.simplify(followed)]:
            assert conditions.holds(condition, values, UNKNOWN)


@pytest.mark.parametrize(
    ("together", "is_impossible"),
    [
        ({"a", "not a"}, True),
        ({"c", "a > 1", "a <= 1"}, True),
        ({"a", "not b"}, False),
        ({UNSURE}, False),
    ],
)
def test_conditions_that_exclude_each_other(together: set[str], is_impossible: bool) -> None:
    assert conditions.is_impossible(together) is is_impossible


def test_alternatives_that_are_decided_go() -> None:
    assert conditions.simplify({"a", "a or b"}) == {"a"}
    assert conditions.simplify({"c", "a or b"}) == {"c", "a or b"}
