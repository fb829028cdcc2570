"""Values that the trainer's parser takes and no plan can use: a finding, never a bug in launch."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_world import World, needs_trl, open_world

from launcher.cli import main

pytestmark = needs_trl


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        monkeypatch.chdir(world.root)
        monkeypatch.setenv("LAUNCH_RUNS", world.environ["LAUNCH_RUNS"])
        yield world


def dry_run(world: World, *words: str) -> int:
    return main.main(["sft", str(world.root / "stage.yaml"), "--gpus", "0", "--dry-run", *words])


@pytest.mark.parametrize("epochs", ["inf", "nan"])
def test_epochs_that_are_no_number_of_steps(
    world: World, capfd: pytest.CaptureFixture[str], epochs: str
) -> None:
    world.config(num_train_epochs=epochs)
    assert dry_run(world) == 3
    assert f"error[out-of-range]: `num_train_epochs: {epochs}`" in capfd.readouterr().err


def test_epochs_do_not_matter_beside_a_limit_of_steps(world: World) -> None:
    world.config(num_train_epochs="inf", max_steps=4)
    assert dry_run(world) == 0


def test_an_output_folder_that_is_a_dash(world: World) -> None:
    world.config(output_dir="-")
    (world.root / "-").mkdir()
    assert dry_run(world) == 0
    assert dry_run(world, "--fresh") == 0
