"""A stage file is read, checked and planned once for each request that a command makes of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from experiment import Here, shaped
from fake_world import World, needs_trl
from loads import Loads, counted

from launcher.planning import prepare
from launcher.planning.collect import Scope
from launcher.planning.request import Request
from launcher.stage.stage import Stage
from launcher.workflows import experiment
from launcher.workflows.bench import measure
from launcher.workflows.bench.comparison import SPEED, CurveStep, Sample
from launcher.workflows.bench.variants import Variant

pytestmark = needs_trl
TWO_CARDS = ("--gpus", "2")
ROWS = ("--row-tokens", "100:900")


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """`launch` in this process, whose trials come to their end at once."""

    def measured(
        request: Request, variant: Variant, stage: Stage, *, steps: int, root: Path, repeat: int = 0, **more: Any
    ) -> Sample:
        place = root / f"{variant.name.encode().hex()}-{repeat}"
        trial = measure.short(variant.of(request), stage, steps, place, more.get("batch"))
        prepare.prepare(replace(trial, runs=root), Scope.START)
        figures = {SPEED: 2000.0, "seconds_per_step": 0.1, "peak_allocated_gib": 5.0}
        curve = (CurveStep(400.0, 400.0, 2.0),) * 3
        name = variant.name
        return Sample(variant=name, repeat=repeat, gradients="true", seconds=4.0, metrics=figures, curve=curve)

    monkeypatch.setattr(experiment, "of_prepared", lambda prepared, **_: prepared)
    monkeypatch.setattr(measure, "measure", measured)
    return Here(capsys)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    """What is counted in this test."""
    return counted(monkeypatch)


def written(world: World, name: str = "stage.yaml", **args: Any) -> str:
    """A stage file whose memory and speed can be planned; its path."""
    path = world.config(name, model_name_or_path=shaped(world), max_length=1024, bf16=True, **args)
    whole = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**whole, "batch": {"global": 8, "per_device": 2}}))
    return str(path)


def launched(here: Here, world: World, *words: str) -> dict[str, Any]:
    """The data that a command answers with."""
    python = ("--python", str(world.root / "python"), "--format", "json")
    code, out, err = here.launch(*words, *python)
    assert code == 0, out + err
    data: dict[str, Any] = json.loads(out)["data"]
    return data


@pytest.mark.parametrize(
    "words",
    [
        ("sft", *TWO_CARDS, "--dry-run"),
        ("plan", *TWO_CARDS, *ROWS),
        ("ladder", "--gpus", "1,2", "--dry-run"),
        ("bench", *TWO_CARDS, "--vary", "learning_rate=1e-5,2e-5", "--repeats", "2"),
        ("tune", *TWO_CARDS, *ROWS, "--steps", "3"),
    ],
    ids=lambda words: words[0],
)
def test_no_request_is_read_checked_or_planned_twice(
    world: World, here: Here, loads: Loads, words: tuple[str, ...]
) -> None:
    launched(here, world, words[0], written(world), *words[1:])
    assert loads.files and not loads.repeated
