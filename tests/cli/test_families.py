"""Which module of `launcher.cli.commands` has which command."""

import subprocess
import sys

import pytest
import typer

from launcher.cli.commands import FAMILIES, app


def test_every_command_is_of_one_family() -> None:
    listed = " ".join(FAMILIES.values()).split()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert sorted(listed) == sorted(commands)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_command_is_found_in_its_family(family: str) -> None:
    """In a process of its own, where no other family was imported."""
    for command in FAMILIES[family].split():
        code = f"from launcher.cli.main import main; main([{command!r}, '--help'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert f"Usage: launch {command}" in done.stdout, command


def test_one_command_imports_no_other_family() -> None:
    code = "import sys; from launcher.cli.main import main; main(['validate-config', '--help'])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*sys.modules)"], capture_output=True, text=True
    )
    loaded = {name for name in FAMILIES if f"launcher.cli.commands.{name}" in done.stdout.split()}
    assert loaded == {"configs"}
