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


def say(node: ast.expr) -> str | None:
    """Every name is an argument, except `x`."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return ast.unparse(node) if names and "x" not in names else None


def implied(test: str, truth: bool) -> set[str]:
    return set(conditions.implied(ast.parse(test, mode="eval").body, truth, say))


@pytest.mark.parametrize(
    ("test", "true", "false"),
    [
        ("a", {"a"}, {"not a"}),
        ("not a", {"not a"}, {"a"}),
        ("a and b", {"a", "b"}, {"not a or not b"}),
        ("a or b", {"a or b"}, {"not a", "not b"}),
        ("a and x", {"a", "..."}, {"..."}),
        ("a or x", {"..."}, {"not a", "..."}),
        ("x", {"..."}, {"..."}),
        ("a > 1", {"a > 1"}, {"a <= 1"}),
        ("0 < a < 3", {"0 < a < 3"}, {"not 0 < a < 3"}),
        ("(y := a)", {"a"}, {"not a"}),
        ("a and (b or c)", {"a", "b or c"}, {"not a or (not b and (not c))"}),
    ],
)
def test_what_a_test_implies(test: str, true: set[str], false: set[str]) -> None:
    assert implied(test, True) == true
    assert implied(test, False) == false


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("a", {"a": True}, True),
        ("a", {}, None),
        ("a", {"a": UNKNOWN}, None),
        ("a and b", {"a": False, "b": UNKNOWN}, False),
        ("a and b", {"a": True, "b": UNKNOWN}, None),
        ("a or b", {"a": UNKNOWN, "b": True}, True),
        ("a is 'x'", {"a": "x"}, True),
        ("a is not 'x'", {"a": "x"}, False),
        ("a < 1", {"a": None}, None),
        ("'x' in a", {"a": ["x"]}, True),
        ("'x' in a", {"a": None}, None),
        ("(a or 5) == 5", {"a": 5}, True),
        ("(a and b) == 0", {"a": 0, "b": UNKNOWN}, True),
        ("(a or b) == 1", {"a": UNKNOWN, "b": 1}, None),
        ("a > 1", {"a": math.nan}, None),
        ("not a <= 1", {"a": math.nan}, None),
        ("a.b", {"a": 1}, None),
        ("f(a)", {"a": 1}, None),
    ],
)
def test_whether_a_condition_holds(
    text: str, values: dict[str, Any], expected: bool | None
) -> None:
    assert conditions.holds(text, values, UNKNOWN) is expected


ATOMS = st.sampled_from(["a", "b", "c > 1", "c == d", "c in (1, 3)", "0 < c < d", "d is None", "d"])
TESTS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("(not {})".format, inner),
        st.builds("({} and {})".format, inner, inner),
        st.builds("({} or {})".format, inner, inner),
        st.builds("(({}) == ({}))".format, inner, inner),
    ),
    max_leaves=6,
)
VALUES = [
    {"a": a, "b": b, "c": c, "d": d}
    for a, b, c, d in itertools.product((True, False), (True, False), (0, 1, 2, 3), (0, 1, 3))
]


@given(TESTS)
def test_conditions_mean_what_python_means(text: str) -> None:
    for values in VALUES:
        truth = bool(eval(text, {}, dict(values)))
        assert conditions.holds(text, values, UNKNOWN) is truth
        assert conditions.holds(conditions.negated(text), values, UNKNOWN) is (not truth)


@given(TESTS, st.sampled_from(["a", "b", "c", "d"]))
def test_what_is_not_known_is_never_guessed(text: str, name: str) -> None:
    """With one value unknown, an answer is given only where every value leads to it."""
    for values in VALUES[::7]:
        told = conditions.holds(text, {**values, name: UNKNOWN}, UNKNOWN)
        if told is not None:
            other = [v for v in VALUES if all(v[n] == values[n] for n in values if n != name)]
            assert {bool(eval(text, {}, dict(v))) for v in other} == {told}


@given(TESTS, st.booleans())
def test_what_is_implied_holds(text: str, truth: bool) -> None:
    told = conditions.implied(ast.parse(text, mode="eval").body, truth, say)
    for values in VALUES:
        if bool(eval(text, {}, dict(values))) is truth:
            assert all(conditions.holds(c, values, UNKNOWN) for c in told)
            assert not conditions.impossible(told)
            assert all(conditions.holds(c, values, UNKNOWN) for c in conditions.simplified(told))


def test_excluded_and_decided() -> None:
    assert conditions.impossible({"a", "not a"})
    assert conditions.impossible({"c", "a > 1", "a <= 1"})
    assert not conditions.impossible({"a", "not b"})
    assert not conditions.impossible({"..."})
    assert not conditions.impossible(set())
    # alternatives that are decided go
    assert conditions.simplified({"a", "a or b"}) == {"a"}
    assert conditions.simplified({"c", "a or b"}) == {"c", "a or b"}
