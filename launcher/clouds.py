"""A stage file as a SkyPilot task file: judged and planned here, started there."""

from __future__ import annotations

import os
from pathlib import Path

from launcher import rundir, skypilot
from launcher.errors import Finding, not_ready
from launcher.preparation import Request, prepare
from launcher.skypilot import Places


def write(request: Request, path: Path) -> tuple[Finding, ...]:
    """Write the task of a run; returns what there is to say of the run, and of paths left behind.

    Raises what a dry run raises, UsageError where it is not known which GPUs, NotReady where the file
    cannot be written.
    """
    prepared = prepare(request, running=False)
    stage = prepared.plan.stage
    settings = stage.options.skypilot
    checkout = stage.upstream.root if stage.options.backend == "open_instruct" else None
    project = Path(__file__).resolve().parent.parent
    places = Places(cwd=Path.cwd(), project=project, checkout=checkout)
    words = _words(request, prepared.plan.gpus)
    task = skypilot.task(
        name=stage.name, words=words, gpus=prepared.plan.gpus, nodes=prepared.plan.nodes,
        backend=stage.options.backend, places=places, settings=settings, environ=os.environ,
    )  # fmt: skip
    try:
        rundir.write_text(path, skypilot.text(task, path))
    except OSError as error:
        raise not_ready(
            "unwritable-file", f"cannot be written: {error.strerror}", file=str(path),
        ) from None  # fmt: skip
    named = (str(value) for value in stage.args.values())
    left = skypilot.outside([*words, *named], places, settings)
    return (*prepared.findings, *(_left_behind(word) for word in dict.fromkeys(left)))


def _words(request: Request, gpus: int) -> list[str]:
    """The command line to be said there; files below the working folder go along with it."""
    config = Path(os.path.relpath(request.config))
    words = [str(request.stage), str(config), *request.overrides]
    words += ["--gpus", str(gpus)]
    if request.nodes > 1:
        words += ["--nodes", str(request.nodes)]
    switches = {"--strict": request.strict, "--allow-unpinned": request.allow_unpinned}
    switches["--allow-corrupting-overlap"] = request.allow_corrupting_overlap
    switches["--no-probe"] = not request.probe
    return [*words, *(name for name, on in switches.items() if on)]


def _left_behind(word: str) -> Finding:
    return Finding(
        severity="warning", layer="launch", code="left-behind", file=word,
        message="is on this machine, and will not be there",
        help="name it relative to the working folder, or mount it: `skypilot: {file_mounts: ...}`",
    )  # fmt: skip
