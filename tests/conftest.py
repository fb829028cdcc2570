"""What every test gets: no colour, a fixed width, its own state folder, an environment left as it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from launcher import upstream

# The same examples everywhere: a test that fails for one machine in a hundred helps nobody.
settings.register_profile("launch", derandomize=True, database=None, deadline=None)
settings.load_profile("launch")

# a shell that runs the tests in its background has them, and all they start, ignore Ctrl-C
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent
NO_CHECKOUT = "no open-instruct checkout at the pin"
NO_PACKAGES = "no training packages"

Write = Callable[[str, str | bytes], Path]


# Minutes each, because processes are the point of them: what takes long goes first, or the last worker is
# still at it when the others have been done for long.
LONG = (
    "test_prefetch", "test_pipeline_training", "test_bench", "test_resume_training", "test_training",
    "test_cache_training", "test_tune", "test_pipeline", "test_slurm", "test_faults", "test_ladder",
    "test_keeping", "test_probe", "test_rendezvous", "test_resumed_probe", "test_report_browser",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first, all others as they were found."""
    place = {name: nth for nth, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path) -> Iterator[None]:
    # a context of its own: a test's monkeypatch is undone before the comparison
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "200")
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        patch.setenv("LAUNCH_RUNS", str(tmp_path / "runs"))
        before = _environ()
        yield
        changed = [name for name, value in _environ().items() ^ before.items()]
    assert not changed, f"the test left the environment changed: {', '.join(sorted(set(changed)))}"


def _environ() -> dict[str, str]:
    # pytest itself writes this one
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file below the test's own folder; returns its path."""

    def written(name: str, text: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return written


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The pinned open-instruct checkout; skips where there is none."""
    found = find_checkout()
    if found is None:
        pytest.skip(NO_CHECKOUT)
    return found


def find_checkout() -> Path | None:
    """The checkout that launch itself would use, if its files are those of the pin."""
    named = os.environ.get("LAUNCH_OPEN_INSTRUCT")
    candidates = [Path(named)] if named else [upstream.SUBMODULE, *upstream.FOUND_IN]
    for candidate in candidates:
        root = candidate.expanduser()
        if (root / "open_instruct" / "finetune.py").is_file():
            source = upstream.locate("open_instruct", checkout=root)
            return root if source.pinned else None
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say plainly what could not be tried here."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for what in (NO_CHECKOUT, NO_PACKAGES):
        count = sum(what in reason for reason in reasons)
        if count:
            terminalreporter.write_line(f"skipped: {count} test(s), for {what} here")
