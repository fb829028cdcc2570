"""A variable that a file took a value from: nothing that is shown or kept of it says what the variable held.

Neither the variable's name nor its value looks like a secret. What hides it is what travels with the file, the plan
and the run, also in a process that has other variables.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fake_world import World, made, needs_trl

from launcher.cli import main
from launcher.config import load
from launcher.errors import brief
from launcher.redaction import Redactor, redact

VARIABLE = "SITE_LABEL"
VALUE = "x9-Quartz-y8!"
PRIVATE = {"start.json", "keeper.log"}

pytestmark = needs_trl


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with made(tmp_path / "world") as world:
        world.environ[VARIABLE] = VALUE
        yield world


def hidden(text: str) -> bool:
    """Whether the value does not stand in a text; shows where it does."""
    at = text.find(VALUE)
    assert at < 0, text[max(0, at - 200) : at + 60]
    return True


def shown(done: subprocess.CompletedProcess[str]) -> str:
    assert hidden(done.stdout + done.stderr)
    return done.stdout + done.stderr


def without_variable(world: World) -> dict[str, str]:
    return {name: value for name, value in world.environ.items() if name != VARIABLE}


def borrowing_config(world: World, **args: str) -> str:
    return str(world.config(run_name=f"at-${{oc.env:{VARIABLE}}}", **args))


def test_the_value_itself_looks_like_nothing() -> None:
    assert redact(f"at {VALUE}", {VARIABLE: VALUE}) == f"at {VALUE}"
    assert Redactor.of({VARIABLE: VALUE}, [VARIABLE]).redact(f"at {VALUE}") == "at <redacted>"


def test_what_is_asked_of_a_file(world: World) -> None:
    config = borrowing_config(world)
    cpu = ("--gpus", "0", "--python", str(world.python()))
    shown(world.launch("validate-config", config, "--format", "github"))
    for form in ("text", "json"):
        shown(world.launch("validate-config", config, "--format", form))
        assert "$LAUNCH_ARG_RUN_NAME" in shown(
            world.launch("sft", config, *cpu, "--dry-run", "--format", form)
        )
        shown(world.launch("explain", "run_name", config, "--format", form))
        shown(world.launch("plan", config, "--gpus", "1", "--gpu", "H100", "--format", form))
        shown(world.launch("ladder", config, "--gpus", "0", "--dry-run", "--format", form))


@pytest.mark.parametrize("form", ["text", "json"])
def test_findings_name_the_variable(world: World, form: str) -> None:
    borrowed = f"${{oc.env:{VARIABLE}}}"
    config = borrowing_config(
        world, learning_rate=borrowed, dataset_name=borrowed, lr_scheduler_type=borrowed
    )
    for words in (("validate-config", config), ("sft", config, "--gpus", "0", "--dry-run")):
        done = world.launch(*words, "--format", form)
        assert done.returncode == 3
        assert borrowed in shown(done)


def test_a_run_from_its_start_to_its_page(world: World) -> None:
    config = borrowing_config(world)
    steps = ("step=1", f"raise=cannot log in as {VALUE}")
    for form in ("text", "json"):
        done = world.trained(config, "--format", form, steps=steps)
        assert done.returncode == 4
        assert "<redacted>" in shown(done)
    folders = sorted(path for path in world.runs.iterdir() if (path / "run.json").exists())
    assert VALUE in (folders[-1] / "console.log").read_text()
    for folder in folders:
        for path in folder.rglob("*"):
            is_private = (
                path.name in PRIVATE
                or path.name.startswith("console.")
                or path.parent.name == "probe"
            )
            if path.is_file() and not is_private:
                assert hidden(f"{path}: {path.read_bytes().decode(errors='replace')}")
        start = json.loads((folder / "start.json").read_text())
        assert start["borrowed"] == [VARIABLE]
    name = folders[-1].name
    # whoever looks later need not have the variable
    for environ in (world.environ, without_variable(world)):
        for form in ("text", "json"):
            for command in ("check", "attach", "report"):
                shown(world.launch(command, name, "--format", form, only=environ))
        assert "<redacted>" in shown(world.launch("logs", name, "-n", "20", only=environ))
        shown(world.launch("check", str(folders[-1] / "console.log"), only=environ))


def pipeline_file(world: World, config: str, **given: str) -> str:
    path = world.root / "pipeline.yaml"
    stage = {"name": "first", "config": Path(config).name, "with": given}
    path.write_text(yaml.safe_dump({"gpus": 0, "stages": [stage]}))
    return str(path)


def test_a_pipeline_that_borrows(world: World) -> None:
    borrowed = f"at-${{oc.env:{VARIABLE}}}"
    file = pipeline_file(world, str(world.config()), run_name=borrowed)
    python = ("--python", str(world.python()))
    for form in ("text", "json"):
        shown(world.launch("pipeline", file, *python, "--dry-run", "--format", form))
    env = {"FAKE_STEPS": json.dumps(["step=1", f"raise=cannot log in as {VALUE}"])}
    done = world.launch("pipeline", file, *python, env=env)
    assert "<redacted>" in shown(done)
    (record,) = world.runs.rglob("run.json")
    assert hidden(record.read_text())
    assert json.loads((record.parent / "start.json").read_text())["borrowed"] == [VARIABLE]
    for path in (
        record.with_name("verdict.json"),
        record.with_name("report.html"),
        record.with_name("stage.yaml"),
    ):
        assert hidden(path.read_text())
    (campaign,) = world.runs.rglob("pipeline.json")
    assert hidden(campaign.read_text())
    shown(world.launch("check", str(record.parent), only=without_variable(world)))


def test_a_value_that_was_cut_is_named() -> None:
    value = f"{VALUE} " * 20
    redactor = Redactor.of({VARIABLE: value}, [VARIABLE])
    text = redactor.name_variables(f"`{brief(value)}` is no number: {brief('other-' * 30, 40)}")
    assert hidden(text)
    assert f"oc.env:{VARIABLE}" in text
    assert text.endswith("is no number: other-other-other-other-other-other-o...")


def test_one_command_knows_nothing_of_another(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two commands of one process: what the first borrowed is no secret of the second."""
    monkeypatch.setenv(VARIABLE, VALUE)
    assert load.load(borrowing_config(world)).borrowed == {VARIABLE}
    assert load.load(world.config(run_name=VALUE)).borrowed == frozenset()
    for run_name, is_hidden in ((f"${{oc.env:{VARIABLE}}}", True), (VALUE, False)):
        config = str(world.config(run_name=run_name))
        assert main.main(["explain", "run_name", config]) == 0
        assert (VALUE not in capfd.readouterr().out) is is_hidden
