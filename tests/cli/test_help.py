"""What the help pages show, and what an argument written as an option is answered with."""

import re

import pytest
from answers import Ask
from answers import ask as ask  # a fixture
from typer.testing import CliRunner

from launcher.cli import main
from launcher.cli.commands import app


def help_of(*words: str, columns: int = 80) -> list[str]:
    """The lines of a help page in a terminal of that width."""
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return result.stdout.splitlines()


@pytest.mark.parametrize("words", [(), ("cache",), ("pin",), ("configs",)])
def test_summaries_fit_a_line_of_80_columns(words: tuple[str, ...]) -> None:
    lines = help_of(*words)
    assert max(map(len, lines)) <= 80
    for line in lines:
        assert "[OPTIONS]" in line or not line.endswith("...")


COMMANDS = """
sft dpo pipeline init configs data validate-config preview rehearse plan prepare doctor runs attach
logs stop check report chat merge card rm cache ladder bench tune explain schema pin
"""


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS.split())
def test_every_help_page_fits_its_terminal(command: str, columns: int) -> None:
    assert max(map(len, help_of(command, columns=columns))) <= columns


def test_commands_and_options_stand_in_groups() -> None:
    page = "\n".join(help_of())
    titles = re.findall(r"^(\w+):$", page, re.M)
    assert titles == ["Options", "Run", "Before", "Watch", "After", "Tune", "Know"]
    assert "\n  exec " not in page
    text = "\n".join(help_of("sft", columns=120))
    for part in ("Machines:", "Checks:", "learning_rate=1e-5", "[default: 1]"):
        assert part in text


@pytest.mark.parametrize(
    ("command", "override"),
    [
        ("sft f.yaml --learning-rate=1e-3 --packing --gpus 0", "learning_rate=1e-3 packing=true"),
        ("sft --packing f.yaml --warmup_ratio 0.03", "packing=true warmup_ratio=0.03"),
        ("pipeline p.yaml --max-steps 3", "STAGE.max_steps=3"),
        ("plan f.yaml --beta 0.1 --deepspeed zero3", "beta=0.1 deepspeed=zero3"),
    ],
)
def test_an_argument_written_as_an_option(
    capsys: pytest.CaptureFixture[str], command: str, override: str
) -> None:
    assert main.main(command.split()) == 2
    assert f"help: write {override}\n" in capsys.readouterr().err


def test_a_program_gets_the_override_in_json(ask: Ask) -> None:
    answer = ask("sft", "f.yaml", "--beta", "1", "--max_steps", "3")
    (finding,) = answer.findings
    assert answer.code == 2
    assert (finding["code"], finding["help"]) == ("bad-command-line", "write max_steps=3")
