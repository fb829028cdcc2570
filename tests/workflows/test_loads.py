"""A stage file is read, checked and planned once for each request that a command makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from experiment import Here, shaped
from fake_world import World, needs_trl
from loads import Loads, counted

from launcher.lifecycle import start
from launcher.planning import prepare
from launcher.planning.collect import Facts
from launcher.planning.prepare import Prepared
from launcher.workflows import experiment
from launcher.workflows.bench import measure
from launcher.workflows.bench.comparison import SPEED, CurveStep, Sample
from launcher.workflows.bench.variants import Variant
from launcher.workflows.rehearse import rehearsal

pytestmark = needs_trl
TWO_CARDS = ("--gpus", "2")
ROWS = ("--row-tokens", "100:900")


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """`launch` in this process, whose trials come to their end at once."""

    def measured(
        facts: Facts, variant: Variant, *, steps: int, root: Path, repeat: int = 0, **more: Any
    ) -> Sample:
        place = root / f"{variant.name.encode().hex()}-{repeat}"
        overrides = more.get("overrides", ())
        turned = facts.with_overrides(*overrides) if overrides else facts
        trial = measure.short(turned, steps, place, more.get("batch"), runs=root)
        prepare.complete(trial.look_again())
        figures = {SPEED: 2000.0, "seconds_per_step": 0.1, "peak_allocated_gib": 5.0}
        curve = (CurveStep(400.0, 400.0, 2.0),) * 3
        name = variant.name
        return Sample(
            variant=name, repeat=repeat, gradients="true", seconds=4.0, metrics=figures, curve=curve
        )

    monkeypatch.setattr(experiment, "of_prepared", lambda prepared, **_: prepared)
    monkeypatch.setattr(measure, "measure", measured)
    return Here(capsys)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    """What is counted in this test."""
    return counted(monkeypatch)


def written(world: World, name: str = "stage.yaml", *, stage: str = "sft", **args: Any) -> str:
    """A stage file whose memory and speed can be planned; its path."""
    path = world.config(name, model_name_or_path=shaped(world), max_length=1024, bf16=True, **args)
    whole = yaml.safe_load(path.read_text())
    path.write_text(
        yaml.safe_dump({**whole, "stage": stage, "batch": {"global": 8, "per_device": 2}})
    )
    return str(path)


def launched(here: Here, world: World, *words: str) -> dict[str, Any]:
    """The data that a command answers with."""
    python = ("--python", str(world.root / "python"), "--format", "json")
    code, out, err = here.launch(*words, *python)
    assert code == 0, out + err
    data: dict[str, Any] = json.loads(out)["data"]
    return data


class Begun(Exception):
    """A start came to its first side effect."""


@pytest.fixture
def nothing_begins(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts and queues end where they would write for the first time; there is nothing on disk yet."""

    def begin(*_prepared: Any, **_at_end: Any) -> Any:
        assert not list(world.runs.glob("*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "begin", begin)
    monkeypatch.setattr(start, "queue", begin)


def chain(world: World) -> str:
    """A pipeline of two stages, each with a file of its own."""
    written(world, "sft.yaml", output_dir=str(world.root / "first"))
    second = yaml.safe_load(
        Path(written(world, "dpo.yaml", output_dir=str(world.root / "second"))).read_text()
    )
    second["name"] = "second"
    # it comes from the stage before
    del second["args"]["model_name_or_path"]
    (world.root / "dpo.yaml").write_text(yaml.safe_dump(second))
    whole = {
        "stages": [
            {"name": "first", "config": "sft.yaml"},
            {"name": "second", "config": "dpo.yaml"},
        ]
    }
    path = world.root / "pipeline.yaml"
    path.write_text(yaml.safe_dump(whole))
    return str(path)


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("sft", *TWO_CARDS, "--dry-run"),
    ("sft", *TWO_CARDS, "--slurm", "--dry-run"),
    ("dpo", *TWO_CARDS, "--dry-run"),
    ("validate-config",),
    ("plan", *TWO_CARDS, *ROWS),
    ("plan", "--gpus", "1,2,4", *ROWS),
    ("ladder", "--gpus", "1,2", "--dry-run"),
    ("bench", *TWO_CARDS, "--vary", "learning_rate=1e-5,2e-5"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_nothing_is_read_typed_planned_or_judged_twice(
    world: World, here: Here, loads: Loads, words: tuple[str, ...]
) -> None:
    command, *options = words
    file = written(world, stage="dpo" if command == "dpo" else "sft")
    if command == "validate-config":
        here.launch(command, file)
    else:
        launched(here, world, command, file, *options)
    assert loads.files and not loads.repeated


STARTS: tuple[tuple[str, ...], ...] = (
    ("sft", "--gpus", "0"),
    ("sft", *TWO_CARDS, "--slurm"),
    ("dpo", "--gpus", "0"),
    ("dpo", *TWO_CARDS, "--slurm"),
    ("prepare", *TWO_CARDS),
)


@pytest.mark.parametrize("words", STARTS, ids=" ".join)
def test_a_start_reads_plans_and_judges_once_and_writes_nothing_before_it_begins(
    world: World, here: Here, loads: Loads, nothing_begins: None, words: tuple[str, ...]
) -> None:
    command, *options = words
    file = written(world, stage="dpo" if command == "dpo" else "sft")
    here.launch(command, file, *options, "--python", str(world.root / "python"), "--no-rehearse")
    assert loads.files and loads.planned and loads.judged and not loads.repeated


def test_a_search_reads_its_file_once_and_plans_each_trial_once(
    world: World, here: Here, loads: Loads
) -> None:
    launched(here, world, "tune", written(world), *TWO_CARDS, *ROWS, "--steps", "3")
    assert set(loads.files.values()) == {1} and loads.planned
    assert not {"planned", "judged"} & loads.repeated.keys()


def test_explain_reads_a_file_once(world: World, here: Here, loads: Loads) -> None:
    here.launch("explain", "learning_rate", written(world))
    assert set(loads.files.values()) == {1} and loads.planned
    assert not {"planned", "judged"} & loads.repeated.keys()


def test_each_file_of_a_pipeline_is_read_once(world: World, here: Here, loads: Loads) -> None:
    launched(here, world, "pipeline", chain(world), "--gpus", "0", "--dry-run")
    assert set(loads.files.values()) == {1}
    assert not {"planned", "judged"} & loads.repeated.keys()


def test_a_rehearsal_reads_and_judges_its_file_once(
    world: World, here: Here, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "rehearse", interrupted)
    here.launch("rehearse", written(world), "--python", str(world.root / "python"))
    assert loads.files and loads.typed and not loads.repeated


def test_the_start_of_a_pipeline_reads_and_plans_once_and_makes_no_run_before_one_begins(
    world: World, here: Here, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def begin(prepared: Prepared, **_at_end: Any) -> Any:
        begun.append(prepared.plan.stage.name)
        assert not prepared.folder.path.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "of_prepared", begin)
    here.launch(
        "pipeline",
        chain(world),
        "--gpus",
        "0",
        "--no-rehearse",
        "--python",
        str(world.root / "python"),
    )
    assert begun == ["sft"]
    assert set(loads.files.values()) == {1}
    # the first stage starts as it was judged; a later one is judged once more when its turn comes
    assert not {"planned", "judged"} & loads.repeated.keys()


def interrupted(*_words: Any, **_options: Any) -> Any:
    raise KeyboardInterrupt
