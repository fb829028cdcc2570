"""What every test gets: no colour, a fixed width, folders and an environment of its own."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkouts
import pytest
from hypothesis import HealthCheck, settings

# The same examples everywhere: a test that fails on one machine in a hundred helps nobody, nor does
# one that fails because the machine stood still while examples were made.
settings.register_profile(
    "launch",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("launch")

# a shell that runs the tests in its background has them, and all they start, ignore Ctrl-C
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# without a buffer, a process that is stopped and continued loses what a pipe did not take at once
os.environ.pop("PYTHONUNBUFFERED", None)

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = REPOSITORY / "tests" / "data"
SUPPORT = REPOSITORY / "tests" / "support"
STAGE_FILES = [
    path for path in sorted((REPOSITORY / "configs").rglob("*.yaml")) if "pipeline" not in path.name
]
NO_PACKAGES = "no training packages"
STAND_INS = os.pathsep.join(
    filter(None, (str(SUPPORT / "stand_ins"), os.environ.get("PYTHONPATH")))
)
"""PYTHONPATH for the pinned scripts, with a stand-in for litellm.

SFT and DPO import it and never call it, and that takes a fifth of a start.
tests/support/real_parser.py imports the real one.
"""
PATIENCE_S = 500.0
"""Seconds after which whatever a test waits for hangs.

Nothing that goes well comes near it, even on a busy machine. A process that a test must end sleeps
for longer.
"""

Write = Callable[[str, str | bytes], Path]


# Minutes each, because processes are the point of them. What takes longest goes first, or one
# worker is still busy when the others have long been done.
LONG = (
    "test_preemption",
    "test_olmo_sft_training",
    "test_preview",
    "test_rehearsed_stages",
    "test_tracker_training",
    "test_hang",
    "test_rotary",
    "test_isolation",
    "test_mixture_training",
    "test_pipeline_training",
    "test_after_training",
    "test_evaluated_pipeline",
    "test_rehearsal_agreement",
    "test_gradients",
    "test_contract",
    "test_cache_training",
    "test_training",
    "test_row_agreement",
    "test_open_instruct_row_agreement",
    "test_pipeline",
    "test_slurm",
    "test_prefetch",
    "test_resume_training",
    "test_records",
    "test_faults",
    "test_memory",
    "test_bench",
    "test_tune",
    "test_ladder",
    "test_supervisor",
    "test_lease",
    "test_fix",
    "test_locate",
    "test_parser_agreement",
    "test_trl_agreement",
    "test_trl_machine_rules",
    "test_gpu_benchmarks",
    "test_report_browser",
    "test_difference",
    "test_corpus",
    "test_secrets",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first, all others as they were found."""
    place = {name: nth for nth, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session")
def compiled_by_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where torch keeps what it compiles, for all workers: DeepSpeed's operators take a minute."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return folder / "compiled_by_torch"


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, compiled_by_torch: Path) -> Iterator[None]:
    # a context of its own: a test's monkeypatch is undone before the comparison
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "200")
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        patch.setenv("LAUNCH_GPU_LOCKS", str(tmp_path))
        patch.setenv("LAUNCH_RUNS", str(tmp_path / "runs"))
        patch.setenv("LAUNCH_REHEARSE", "0")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(compiled_by_torch / "extensions"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled_by_torch / "inductor"))
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


@pytest.fixture
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A machine with invented cards for this process, as many as `CARDS` of the test's module."""
    from experiment import machine

    with machine(tmp_path / "world", monkeypatch, getattr(request.module, "CARDS", 2)) as one:
        yield one


@pytest.fixture(scope="session")
def demo_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo trains on (`model`, `data`), made once. Copy it to change it."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo-assets"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            half = place.with_suffix(".half")
            maker = REPOSITORY / "scripts" / "make_demo_assets.py"
            words = [sys.executable, str(maker), str(half)]
            done = subprocess.run(words, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            half.rename(place)
    return place


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The pinned open-instruct checkout. Without one, tests skip, or fail if it is required."""
    return checkouts.require()


def pytest_configure() -> None:
    """Hide a checkout of another commit if the pin is not here: files here are for the pin."""
    if checkouts.only_another_is_found():
        os.environ["HOME"] = tempfile.mkdtemp(prefix="launch-tests-home-")


def find_checkout() -> Path | None:
    """The checkout of the pin, whatever other commits lie in the places before it."""
    return checkouts.find()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say plainly how much could not be tried here, and why."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    terminalreporter.write_line(f"skipped in all: {len(reasons)} test(s)")
    for what in (*map(checkouts.missing, checkouts.COMMITS), NO_PACKAGES):
        count = sum(what in reason for reason in reasons)
        if count:
            terminalreporter.write_line(f"skipped: {count} test(s), for {what} here")
