"""A stage file is read, checked and planned once for each request that a command makes of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from experiment import Here, shaped
from fake_world import World, needs_trl
from loads import Loads, counted

from launcher.lifecycle import start
from launcher.planning import prepare
from launcher.planning.prepare import Prepared
from launcher.workflows import experiment
from launcher.workflows.bench import measure
from launcher.workflows.bench.comparison import SPEED, CurveStep, Sample
from launcher.workflows.rehearse import rehearsal

pytestmark = needs_trl


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """`launch` in this process, whose trials come to their end at once."""

    def measure_nothing(
        facts: Any, variant: Any, *, steps: int, root: Path, repeat: int = 0, **options: Any
    ) -> Sample:
        folder = root / f"{variant.name.encode().hex()}-{repeat}"
        overrides = options.get("overrides", ())
        if overrides:
            facts = facts.with_overrides(*overrides)
        trial = measure.shorten_run(facts, steps, folder, options.get("batch"), runs=root)
        prepare.complete(trial.look_again())
        return Sample(
            variant=variant.name,
            repeat=repeat,
            gradients="true",
            seconds=4.0,
            metrics={SPEED: 2000.0, "seconds_per_step": 0.1, "peak_allocated_gib": 5.0},
            curve=(CurveStep(400.0, 400.0, 2.0),) * 3,
        )

    monkeypatch.setattr(experiment, "run_prepared", lambda prepared, **_: prepared)
    monkeypatch.setattr(measure, "measure", measure_nothing)
    return Here(capsys)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    """What is counted in this test."""
    return counted(monkeypatch)


def write_stage(world: World, name: str = "stage.yaml", **args: Any) -> Path:
    """Write a stage file whose memory and speed can be planned."""
    path = world.config(name, model_name_or_path=shaped(world), max_length=1024, bf16=True, **args)
    content = yaml.safe_load(path.read_text())
    content["batch"] = {"global": 8, "per_device": 2}
    path.write_text(yaml.safe_dump(content))
    return path


def write_pipeline(world: World) -> str:
    """Write a pipeline of two stages, each with a file of its own; its path."""
    write_stage(world, "sft.yaml", output_dir=str(world.root / "first"))
    second = write_stage(world, "dpo.yaml", output_dir=str(world.root / "second"))
    content = yaml.safe_load(second.read_text())
    # it comes from the stage before
    del content["args"]["model_name_or_path"]
    second.write_text(yaml.safe_dump({**content, "stage": "dpo", "name": "second"}))
    path = world.root / "pipeline.yaml"
    path.write_text("stages: [sft.yaml, dpo.yaml]\n")
    return str(path)


def launch(here: Here, world: World, *words: str) -> None:
    """Run a command to its end."""
    code, out, err = here.launch(*words, "--python", str(world.root / "python"))
    assert code == 0, out + err


@pytest.mark.parametrize(
    "command",
    [
        "sft FILE --gpus 2 --dry-run",
        "sft FILE --gpus 2 --slurm --dry-run",
        "plan FILE --gpus 2 --row-tokens 100:900",
        "plan FILE --gpus 1,2,4 --row-tokens 100:900",
        "ladder FILE --gpus 1,2 --dry-run",
        "bench FILE --gpus 2 --vary learning_rate=1e-5,2e-5",
    ],
)
def test_nothing_is_read_typed_planned_or_judged_twice(
    command: str, world: World, here: Here, loads: Loads
) -> None:
    launch(here, world, *command.replace("FILE", str(write_stage(world))).split())

    assert loads.files
    assert not loads.repeated


def test_a_file_is_validated_once(world: World, here: Here, loads: Loads) -> None:
    here.launch("validate-config", str(write_stage(world)))

    assert loads.files
    assert not loads.repeated


@pytest.mark.parametrize(
    "command", ["sft FILE --gpus 0", "sft FILE --gpus 2 --slurm", "prepare FILE --gpus 2"]
)
def test_a_start_plans_and_judges_once_and_writes_nothing_before_it_begins(
    command: str, world: World, here: Here, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*_: Any, **__: Any) -> Any:
        assert not list(world.runs.glob("*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "begin", begin)
    monkeypatch.setattr(start, "queue", begin)
    words = command.replace("FILE", str(write_stage(world))).split()

    here.launch(*words, "--python", str(world.root / "python"), "--no-rehearse")

    assert loads.files
    assert loads.planned
    assert loads.judged
    assert not loads.repeated


def is_planned_and_judged_once(loads: Loads) -> bool:
    """Whether each file was read once, and nothing planned or judged twice."""
    is_read_once = set(loads.files.values()) == {1}
    return is_read_once and not {"planned", "judged"} & loads.repeated.keys()


def test_a_search_reads_its_file_once_and_plans_each_trial_once(
    world: World, here: Here, loads: Loads
) -> None:
    options = "--gpus 2 --row-tokens 100:900 --steps 3".split()
    launch(here, world, "tune", str(write_stage(world)), *options)

    assert loads.planned
    assert is_planned_and_judged_once(loads)


def test_explain_reads_a_file_once(world: World, here: Here, loads: Loads) -> None:
    here.launch("explain", "learning_rate", str(write_stage(world)))

    assert loads.planned
    assert is_planned_and_judged_once(loads)


def test_each_file_of_a_pipeline_is_read_once(world: World, here: Here, loads: Loads) -> None:
    launch(here, world, "pipeline", write_pipeline(world), "--gpus", "0", "--dry-run")

    assert is_planned_and_judged_once(loads)


def test_a_rehearsal_reads_and_judges_its_file_once(
    world: World, here: Here, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "rehearse", interrupt)

    here.launch("rehearse", str(write_stage(world)), "--python", str(world.root / "python"))

    assert loads.files
    assert loads.typed
    assert not loads.repeated


def test_the_first_stage_of_a_pipeline_starts_as_it_was_judged(
    world: World, here: Here, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def begin(prepared: Prepared, **_: Any) -> Any:
        begun.append(prepared.plan.stage.name)
        assert not prepared.folder.path.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "run_prepared", begin)
    options = ["--gpus", "0", "--no-rehearse", "--python", str(world.root / "python")]

    here.launch("pipeline", write_pipeline(world), *options)

    assert begun == ["sft"]
    assert is_planned_and_judged_once(loads)
