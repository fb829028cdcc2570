"""How launch's own cost is compared with what is stored: with made-up numbers, nothing is timed."""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from benchmarks import __main__ as bench
from benchmarks import ratio


def timer(*seconds: float) -> Callable[[], float]:
    """A measurement with these results, one a call, again and again."""
    return itertools.cycle(seconds).__next__


def pair(name: str, launch: Callable[[], float], neighbour: Callable[[], float]) -> ratio.Pair:
    return ratio.Pair(name=name, what="a / b", launch=launch, neighbour=neighbour, rounds=3)


def test_a_ratio_is_the_median_of_rounds_and_one_call_before_them_does_not_count() -> None:
    measured = ratio.measure(pair("x", timer(99, 2, 3, 8), timer(99, 1, 1, 2)))
    assert measured.ratio == 3
    assert measured.least == 2
    assert measured.most == 4
    assert measured.seconds == 3
    assert measured.beside == 1
    assert measured.rounds == 3


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of known cost in place of the real ones."""

    def quick(_folder: Path) -> Iterator[ratio.Pair]:
        yield pair("quick", timer(2.0), timer(1.0))

    def slow(_folder: Path) -> Iterator[ratio.Pair]:
        yield pair("slow", timer(6.0), timer(1.0))

    monkeypatch.setattr(bench, "PARTS", {"one": quick, "two": slow})
    for name in ("LAUNCH_RUNS", "XDG_STATE_HOME", "LAUNCH_CACHE"):
        monkeypatch.setenv(name, "before")


def test_stored_and_compared(
    parts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    assert bench.main(["--stored", str(path)]) == 0
    assert ratio.read(path) == {"quick": 2, "slow": 6}
    assert bench.main(["--stored", str(path), "--check"]) == 0
    capsys.readouterr()

    content = json.loads(path.read_text())
    content["ratios"] = {"slow": {"ratio": 3.0}, "gone": {"ratio": 1.0}}
    path.write_text(json.dumps(content))
    assert bench.main(["--stored", str(path), "--check"]) == 1
    out, err = capsys.readouterr()
    assert "quick" in out
    assert "not stored" in out
    assert "regression: slow: 6 x its neighbour, 3 stored: 100% worse" in err
    assert "gone: stored, and cannot be measured here" in err
    assert "quick" not in err


def test_the_stored_ratios_are_those_of_the_parts() -> None:
    stored = ratio.read(bench.STORED)
    assert {"start-up", "validation, one file", "validation, 1,000 files", "plan"} <= stored.keys()
