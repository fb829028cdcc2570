"""What `launch report` is asked for -> runs, and the files that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launcher import event_files, page, plot, rundir, series
from launcher.errors import NotReady, not_ready, usage
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
            raise _not_ready("unreadable-file", file, f"cannot be read: {error.strerror}") from None
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
    """The PNG. Raises NotReady without matplotlib or where it cannot be written."""
    _in_full(path, lambda place: plot.draw(runs, page.short_names(runs), place))


def write_events(runs: Sequence[Run], folder: Path) -> list[Path]:
    """TensorBoard event files below the folder. Raises NotReady as `write_png` does."""
    with _writing(folder):
        return event_files.write(runs, [run.name for run in runs], folder)


def _in_full(path: Path, write: Callable[[Path], None]) -> None:
    """A file that is there is replaced only by a whole one."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.half")
        try:
            write(half)
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise _not_ready("unwritable-file", str(path), message) from None


def _not_ready(code: str, file: str, message: str) -> NotReady:
    return not_ready(code, message, file=file)
