"""What a stage file takes from a variable is shown and kept nowhere.

Neither the variable's name nor its value looks like a secret. What hides the value travels with the
file, the plan and the run, also into a process that has other variables.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fake_world import World, needs_trl, open_world

from launcher.cli import main
from launcher.config import load
from launcher.errors import shorten
from launcher.redaction import Redactor, redact

VARIABLE = "SITE_LABEL"
VALUE = "x9-Quartz-y8!"
PRIVATE = {"start.json", "keeper.log"}

pytestmark = needs_trl


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        world.environ[VARIABLE] = VALUE
        yield world


def require_hidden(text: str) -> None:
    place = text.find(VALUE)
    assert place < 0, text[max(0, place - 200) : place + 60]


def clean_output(result: subprocess.CompletedProcess[str]) -> str:
    """All that a command has printed, which must not hold the value."""
    output = result.stdout + result.stderr
    require_hidden(output)
    return output


def without_variable(world: World) -> dict[str, str]:
    return {name: value for name, value in world.environ.items() if name != VARIABLE}


def borrowing_config(world: World, **args: str) -> str:
    return str(world.config(run_name=f"at-${{oc.env:{VARIABLE}}}", **args))


def test_the_value_itself_looks_like_nothing() -> None:
    assert redact(f"at {VALUE}", {VARIABLE: VALUE}) == f"at {VALUE}"
    assert Redactor.of({VARIABLE: VALUE}, [VARIABLE]).redact(f"at {VALUE}") == "at <redacted>"


@pytest.mark.parametrize("form", ["text", "json"])
def test_commands_about_a_file_hide_the_value(world: World, form: str) -> None:
    config = borrowing_config(world)
    for words in (
        ["validate-config", config],
        ["explain", "run_name", config],
        ["plan", config, "--gpus", "1", "--gpu", "H100"],
        ["ladder", config, "--gpus", "0", "--dry-run"],
    ):
        clean_output(world.launch(*words, "--format", form))
    words = ["sft", config, "--gpus", "0", "--python", str(world.python()), "--dry-run"]
    output = clean_output(world.launch(*words, "--format", form))
    assert "$LAUNCH_ARG_RUN_NAME" in output


def test_annotations_hide_the_value(world: World) -> None:
    config = borrowing_config(world)
    clean_output(world.launch("validate-config", config, "--format", "github"))


@pytest.mark.parametrize("form", ["text", "json"])
def test_findings_name_the_variable(world: World, form: str) -> None:
    borrowed = f"${{oc.env:{VARIABLE}}}"
    config = borrowing_config(
        world, learning_rate=borrowed, dataset_name=borrowed, lr_scheduler_type=borrowed
    )
    for words in (("validate-config", config), ("sft", config, "--gpus", "0", "--dry-run")):
        result = world.launch(*words, "--format", form)
        assert result.returncode == 3
        assert borrowed in clean_output(result)


def is_private(path: Path) -> bool:
    is_of_owner = path.name in PRIVATE or path.name.startswith("console.")
    return is_of_owner or path.parent.name == "probe"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_run_hides_the_value_from_its_start_to_its_page(world: World, form: str) -> None:
    steps = ("step=1", f"raise=cannot log in as {VALUE}")
    result = world.trained(borrowing_config(world), "--format", form, steps=steps)
    assert result.returncode == 4
    assert "<redacted>" in clean_output(result)

    (manifest,) = world.runs.rglob("run.json")
    folder = manifest.parent
    assert VALUE in (folder / "console.log").read_text()
    for path in folder.rglob("*"):
        if path.is_file() and not is_private(path):
            require_hidden(f"{path}: {path.read_bytes().decode(errors='replace')}")
    assert json.loads((folder / "start.json").read_text())["borrowed"] == [VARIABLE]

    # whoever looks later need not have the variable
    for environ in (world.environ, without_variable(world)):
        for command in ("check", "attach", "report"):
            result = world.launch(command, folder.name, "--format", form, only=environ)
            clean_output(result)
        logs = clean_output(world.launch("logs", folder.name, "-n", "20", only=environ))
        assert "<redacted>" in logs
        clean_output(world.launch("check", str(folder / "console.log"), only=environ))


def test_a_pipeline_that_borrows_hides_the_value(world: World) -> None:
    changes = {"run_name": f"at-${{oc.env:{VARIABLE}}}"}
    stage = {"name": "first", "config": world.config().name, "with": changes}
    pipeline = world.root / "pipeline.yaml"
    pipeline.write_text(yaml.safe_dump({"gpus": 0, "stages": [stage]}))
    words = ["pipeline", str(pipeline), "--python", str(world.python())]
    for form in ("text", "json"):
        clean_output(world.launch(*words, "--dry-run", "--format", form))

    steps = json.dumps(["step=1", f"raise=cannot log in as {VALUE}"])
    output = clean_output(world.launch(*words, env={"FAKE_STEPS": steps}))
    assert "<redacted>" in output
    (manifest,) = world.runs.rglob("run.json")
    folder = manifest.parent
    assert json.loads((folder / "start.json").read_text())["borrowed"] == [VARIABLE]
    for name in ("run.json", "verdict.json", "report.html", "stage.yaml"):
        require_hidden((folder / name).read_text())
    (campaign,) = world.runs.rglob("pipeline.json")
    require_hidden(campaign.read_text())
    clean_output(world.launch("check", str(folder), only=without_variable(world)))


def test_a_value_that_was_cut_is_named() -> None:
    value = f"{VALUE} " * 20
    redactor = Redactor.of({VARIABLE: value}, [VARIABLE])
    text = redactor.name_variables(f"`{shorten(value)}` is no number: {shorten('other-' * 30, 40)}")
    require_hidden(text)
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
