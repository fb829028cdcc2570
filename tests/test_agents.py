"""AGENTS.md says what a program can rely on: its commands, exit codes and JSON."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import REPOSITORY

from launcher.cli import main
from launcher.cli.commands import app
from launcher.errors import Exit, Finding

TEXT = (REPOSITORY / "AGENTS.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.M | re.S)
# what starts, watches or stops a run: tests/test_docs.py checks its options
OF_RUNS = BLOCKS[1]


def commands(block: str) -> list[str]:
    """The lines of a block without comments."""
    return [re.sub(r" +# .*", "", line).removeprefix("launch ") for line in block.splitlines()]


@pytest.mark.parametrize("command", commands(BLOCKS[0]))
def test_a_command_that_starts_nothing_answers_in_one_envelope(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LAUNCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    code = main.main(shlex.split(command))
    answer = json.loads(capsys.readouterr().out)
    assert (code, answer["ok"]) == (Exit.OK, True), answer
    example = re.search(r"^```json\n(.*?)^```", TEXT, re.M | re.S)
    assert example
    envelope = json.loads(example[1])
    assert list(answer) == list(envelope)
    assert answer["schema_version"] == envelope["schema_version"]
    assert not (tmp_path / "runs").exists()


def test_each_exit_code_has_a_row() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \| .+ \|$", TEXT, re.M)
    assert rows == [str(int(code)) for code in Exit]


def test_the_fields_of_a_finding_are_those_that_it_has() -> None:
    described = re.search(r"A finding has (.*?)\. All errors", TEXT, re.S)
    assert described
    fields = Finding(severity="note", layer="launch", code="x", message="y").as_json()
    named = set(re.findall(r"`([a-z]+)`", described[1])) - {"parser", "run", "launch"}
    # an override stands in the place of a line
    assert named == fields.keys() - {"override"}


def options_of(command: Any) -> set[str]:
    """The options of a command and of those below it."""
    options = {option for parameter in command.params for option in parameter.opts}
    for below in getattr(command, "commands", {}).values():
        options |= options_of(below)
    return options


def test_options_and_commands_that_it_names_exist() -> None:
    command: Any = typer.main.get_command(app)
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.S)
    assert set(re.findall(r"--[a-z][a-z-]+", prose)) <= options_of(command) | {"--help"}
    assert set(re.findall(r"`launch ([a-z-]+)", prose)) <= command.commands.keys()


@pytest.mark.parametrize("command", commands(OF_RUNS))
def test_what_watches_a_run_is_shown_with_json(command: str) -> None:
    assert "--format json" in command


def test_a_measurement_is_claimed_with_a_page_that_records_it() -> None:
    page = (REPOSITORY / "docs" / "supported.md").read_text(encoding="utf-8")
    records = ("evidence/", "benchmarks.md", "gradients.md", "olmo_core.md", "resuming.md")
    for line in page.splitlines():
        if not line.startswith("|"):
            continue
        for cell in line.split("|"):
            if "measured:" in cell:
                links = re.findall(r"\]\(([^)#]+)", cell)
                assert any(link.startswith(records) for link in links), cell
