"""`launch rm`: which folders of a run would be deleted, and whether nothing needs them any more."""

from __future__ import annotations

from pathlib import Path

from launcher.errors import not_ready, usage
from launcher.paths import canonical, exists
from launcher.report import overview
from launcher.runs import lease, rundir
from launcher.runs.rundir import RunFolder

_LIVE = ("running", "orphaned", "queued", "unknown")


def require_over(folder: RunFolder) -> None:
    """Raise NotReady where the run, or any of a pipeline, bench, ladder or tune, trains, waits or may train unseen."""
    for run in [folder, *rundir.members(folder.path)]:
        state, name = overview.state(run), run.path.name
        if state in _LIVE or any(lease.is_locked(run.path / lock) for lock in ("lock", ".lock")):
            now = state if state in _LIVE else "being started"
            raise not_ready("run-is-live", f"{name} is {now}", f"launch stop {name}")


def paths(folder: RunFolder, *, model: bool) -> list[Path]:
    """The folder of a run, or of a pipeline, bench, ladder or tune; with `model` the output folder too.

    Raises NotReady where the run is not over, UsageError where the output folder is not its alone.
    """
    require_over(folder)
    output = rundir.read_manifest(folder).output
    where = None if output is None or not exists(output) else canonical(output)
    if not model and exists(folder.path / "models"):
        raise usage("output-kept", f"models lie in the folder: {folder.path}/models", "--model")
    if output is None or where is None:
        return [folder.path]
    if not model:
        if where.is_relative_to(canonical(folder.path)):
            raise usage("output-kept", f"the model lies in the run folder: {output}", "--model")
        return [folder.path]
    runs = [run.path for run in rundir.known_runs() if run != folder]
    if any(canonical(path).is_relative_to(where) for path in (folder.path, *runs, Path.cwd())):
        raise usage("output-kept", f"{output} holds more than this model", "delete it by hand")
    for path in runs:
        other = rundir.read_head(RunFolder(path)).output
        if other is not None and canonical(other) == where:
            raise usage("output-kept", f"{output} is the output of {path.name} too", None)
    lease.require_free(output)
    return [folder.path, output]
