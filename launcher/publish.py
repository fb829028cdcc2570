"""What `launch report` is asked for -> runs, and the files that show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launcher import exports, page, rundir, series
from launcher.errors import not_ready, usage
from launcher.series import Run

_LEFT = ("run.json", "verdict.json", "metrics.jsonl", "console.log", "probe")
"""Any of these makes a folder a run's, also where only results were kept."""


def gather(targets: Sequence[str]) -> list[Run]:
    """Runs by folder, name, unique beginning or `last`, and console logs, each called differently.

    Raises UsageError where one is not known, NotReady where a file cannot be read.
    """
    runs = []
    for target in targets:
        place = _place(target)
        try:
            runs.append(series.read(place))
        except OSError as error:
            file = str(error.filename or place)
            message = f"cannot be read: {error.strerror}"
            raise not_ready("unreadable-file", message, file=file) from None
    return series.named_apart(runs)


def _place(target: str) -> Path:
    path = Path(target)
    if path.is_file():
        return path
    if path.is_dir() and any((path / name).exists() for name in _LEFT):
        return path
    found = rundir.find(target)
    if found is None:
        raise usage("no-such-run", f"there is no run or log `{target}`", "launch runs")
    return found.path


def usual_place(runs: Sequence[Run]) -> Path:
    """Where the page goes when nobody says: into the run's own folder, else `report.html` here."""
    if len(runs) == 1 and runs[0].path.is_dir():
        return rundir.RunFolder(runs[0].path).report
    return Path("report.html")


def write_page(runs: Sequence[Run], path: Path) -> None:
    """The HTML file. Raises NotReady where it cannot be written."""
    text = page.overlay(runs)
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        rundir.write_text(path, text)


def write_png(runs: Sequence[Run], path: Path) -> None:
    """The PNG; one that is there is replaced only by a whole one. Raises as `write_page` does."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.half")
        try:
            exports.draw(runs, page.short_names(runs), half)
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)


def write_events(runs: Sequence[Run], folder: Path) -> list[Path]:
    """TensorBoard event files below the folder. Raises as `write_page` does."""
    with _writing(folder):
        return exports.write_events(runs, [run.name for run in runs], folder)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise not_ready("unwritable-file", message, file=str(path)) from None
