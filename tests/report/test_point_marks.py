"""Which points of a verdict are called `ok`."""

from typing import Any

import pytest

from launcher.config.points import POINTS
from launcher.report import judgement
from launcher.verdict import summary


def point(state: str, expected: str | None) -> dict[str, Any]:
    detail = {"wasted": "half of the batch is empty"}
    name = POINTS[0].name
    return {"name": name, "state": state, "ok": True, "expected": expected, "detail": detail}


@pytest.mark.parametrize("expected", [None, "any"])
@pytest.mark.parametrize("state", ["unknown", "off"])
def test_nothing_is_ok_where_nothing_was_expected(
    state: str, expected: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    judgement._print_point(point(state, expected), "fail")
    printed = capsys.readouterr().out
    assert state in printed
    assert "ok" not in printed


def test_what_is_as_expected_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    engaged = point("engaged", "engaged")
    judgement._print_point(engaged, "pass")
    assert "ok" in capsys.readouterr().out
    assert summary.is_wanted(engaged)
