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


def timer(seconds: tuple[float, ...]) -> Callable[[], float]:
    """A timer that returns these, one a call, again and again."""
    return itertools.cycle(seconds).__next__


def pair(
    name: str = "x", launch: tuple[float, ...] = (2.0,), neighbour: tuple[float, ...] = (1.0,)
) -> ratio.Pair:
    return ratio.Pair(
        name=name, what="a / b", launch=timer(launch), neighbour=timer(neighbour), rounds=3
    )


def test_a_ratio_is_the_median_of_rounds_and_one_call_before_them_does_not_count() -> None:
    measured = ratio.measure(pair(launch=(99, 2, 3, 8), neighbour=(99, 1, 1, 2)))
    assert (measured.ratio, measured.least, measured.most) == (3, 2, 4)
    assert (measured.seconds, measured.beside, measured.rounds) == (3, 1, 3)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of known cost in place of the real ones."""

    def quick(_folder: Path) -> Iterator[ratio.Pair]:
        yield pair("quick")

    def slow(_folder: Path) -> Iterator[ratio.Pair]:
        yield pair("slow", launch=(6.0,))

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
    stored = json.loads(path.read_text())
    stored["ratios"]["slow"]["ratio"] = 3.0
    stored["ratios"]["gone"] = {"ratio": 1.0}
    del stored["ratios"]["quick"]
    path.write_text(json.dumps(stored))
    assert bench.main(["--stored", str(path), "--check"]) == 1
    out, err = capsys.readouterr()
    assert "quick" in out and "not stored" in out
    assert "regression: slow: 6 x its neighbour, 3 stored: 100% worse" in err
    assert "gone: stored, and cannot be measured here" in err
    assert "quick" not in err


def test_the_stored_ratios_are_those_of_the_parts() -> None:
    stored = ratio.read(bench.STORED)
    assert {"start-up", "validation, one file", "validation, 1,000 files", "plan"} <= stored.keys()
