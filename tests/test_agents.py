"""AGENTS.md says what a program can rely on: its commands, exit codes and JSON are held against the
program.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from conftest import REPOSITORY

from launcher.cli import main
from launcher.cli.commands import app
from launcher.errors import Exit, Finding

TEXT = (REPOSITORY / "AGENTS.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.M | re.S)
# what starts, watches or stops a run: its options are held against the program by
# tests/test_docs.py
OF_RUNS = BLOCKS[1]


def lines(block: str) -> list[str]:
    return [re.sub(r" +# .*", "", line).removeprefix("launch ") for line in block.splitlines()]


@pytest.mark.parametrize("line", lines(BLOCKS[0]))
def test_a_command_that_starts_nothing_answers_in_one_envelope(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LAUNCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    code = main.main(shlex.split(line))
    answer = json.loads(capsys.readouterr().out)
    assert code == Exit.OK and answer["ok"] is True, answer
    shown = json.loads(re.findall(r"^```json\n(.*?)^```", TEXT, re.M | re.S)[0])
    assert list(answer) == list(shown)
    assert answer["schema_version"] == shown["schema_version"]
    assert not (tmp_path / "runs").exists()


def test_each_exit_code_is_said_with_what_to_do() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \| .+ \|$", TEXT, re.M)
    assert rows == [str(int(code)) for code in Exit]


def test_the_fields_of_a_finding_are_those_that_it_has() -> None:
    described = re.search(r"A finding has (.*?)\. All errors", TEXT, re.S)
    assert described is not None
    fields = Finding(severity="note", layer="launch", code="x", message="y").as_json()
    named = set(re.findall(r"`([a-z]+)`", described[1])) - {"parser", "run", "launch"}
    # an override stands in the place of a line
    assert named == fields.keys() - {"override"}


def test_options_and_commands_that_it_names_exist() -> None:
    command = typer.main.get_command(app)
    commands = command.commands  # type: ignore[attr-defined]
    options = {option for one in commands.values() for part in one.params for option in part.opts}
    for group in ("cache", "data", "pin", "configs"):
        options |= {
            option
            for one in getattr(commands[group], "commands", {}).values()
            for part in one.params
            for option in part.opts
        }
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.S)
    assert set(re.findall(r"--[a-z][a-z-]+", prose)) <= options | {"--help"}
    for words in re.findall(r"`launch ([a-z-]+)", prose):
        assert words in commands, words


def test_what_watches_a_run_is_shown_with_json() -> None:
    assert all("--format json" in line for line in lines(OF_RUNS))


def test_only_evidence_and_benchmarks_are_cited_for_what_was_measured() -> None:
    """docs/supported.md claims a measurement only with a link to a page that records one."""
    page = (REPOSITORY / "docs" / "supported.md").read_text(encoding="utf-8")
    sources = {"evidence", "benchmarks.md", "gradients.md", "olmo_core.md", "resuming.md"}
    for line in page.splitlines():
        if line.startswith("|") and "measured:" in line:
            for cell in line.split("|"):
                links = re.findall(r"\]\(([^)#]+)", cell)
                assert "measured:" not in cell or any(
                    link.split("/")[0] in sources for link in links
                ), cell
