"""The variables that launch sets for a training are those that its probe reads: neither side imports the other."""

import pytest

from launcher.probe.watching import process, script
from launcher.runs import attempt


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (attempt.PROBE_SETTINGS, process.SETTINGS),
        (attempt.ATTEMPT, process.ATTEMPT),
        (attempt.LEASE, process.LEASE),
        (attempt.ARGUMENT, process.ARGUMENT),
    ],
)
def test_launch_and_the_probe_name_a_variable_alike(written: str, read: str) -> None:
    assert written == read


def test_a_hidden_word_of_the_command_line_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{attempt.ARGUMENT}PROJECT", "s3cret")
    assert script.word(f"${attempt.ARGUMENT}PROJECT") == "s3cret"
    assert script.word("$HOME") == "$HOME"
