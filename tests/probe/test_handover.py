"""The variables that launch sets for a training are those that its probe reads.

Neither side imports the other.
"""

import pytest

from launcher.probe.watching import process, script, supplies, trainers
from launcher.runs import attempt
from launcher.upstream.trainers import BACKENDS, Entry

SCRIPTS = [entry for backend in BACKENDS.values() for entry in backend.STAGES.values()]


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
    assert script.resolve_word(f"${attempt.ARGUMENT}PROJECT") == "s3cret"
    assert script.resolve_word("$HOME") == "$HOME"


@pytest.mark.parametrize("entry", SCRIPTS)
def test_a_script_names_functions_that_the_probe_has(entry: Entry) -> None:
    for name in entry.watchers.values():
        assert hasattr(trainers, name)
    for name in entry.stand_ins.values():
        assert hasattr(supplies, name)


def test_settings_that_this_probe_does_not_know_are_ignored() -> None:
    """An attempt that waits in a queue may have been prepared by another release of launch."""
    settings = process.Settings.from_json({"target": "x.py", "out": "y", "cpu": True, "later": 1})
    assert (settings.target, settings.cpu) == ("x.py", True)
