"""A run as a SkyPilot task: what a dry run would start, written into a file for `sky launch`."""

from __future__ import annotations

import os
from pathlib import Path

from launcher import files
from launcher.errors import Finding, not_ready
from launcher.lifecycle.prepare import Request, prepare
from launcher.paths import IS_CLONE
from launcher.runs import skypilot


def write(request: Request, path: Path) -> tuple[Finding, ...]:
    """Write the task of a run; returns what there is to say of the run.

    Raises what a dry run raises, UsageError where it is not known which GPUs, NotReady where the file
    cannot be written.
    """
    if not IS_CLONE:
        # the task installs launch on the machine that it is copied to
        raise not_ready("no-clone", "a SkyPilot task needs a clone of launch", "run launch from its clone")
    prepared = prepare(request, running=False)
    stage, planned = prepared.plan.stage, prepared.plan
    # files below the working folder go along with it
    config = os.path.relpath(request.config)
    words = [str(request.stage), config, *request.overrides, "--gpus", str(planned.gpus)]
    words += ["--nodes", str(request.nodes)] if request.nodes > 1 else []
    switches = {
        "--strict": request.strict,
        "--allow-unpinned": request.allow_unpinned,
        "--allow-corrupting-overlap": request.allow_corrupting_overlap,
        "--no-probe": not request.probe,
    }
    words += [name for name, on in switches.items() if on]
    made = skypilot.task(
        name=stage.name,
        words=words,
        gpus=planned.gpus,
        nodes=planned.nodes,
        backend=stage.options.backend,
        checkout=stage.upstream.root if stage.upstream.is_checkout else None,
        settings=stage.options.skypilot,
        environ=os.environ,
        cwd=Path.cwd(),
    )
    try:
        files.write_text(path, skypilot.text(made, path))
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
        raise not_ready("unwritable-file", reason, file=str(path)) from None
    return prepared.findings
