"""Answers of a model before and after its training, for the report of its run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from launcher import files
from launcher.errors import LaunchError
from launcher.runs import attempt, rundir
from launcher.runs.rundir import RunFolder
from launcher.trained import chat, model, prompts, worker
from launcher.trained.model import TrainedModel
from launcher.trained.prompts import Prompts

LIMIT_S = 600.0
"""Seconds that all answers together may take; what there is by then is kept."""
MAX_NEW_TOKENS = 256
VERSION = 1

_SAMPLING = {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS, "seed": 0}


def is_due(folder: RunFolder) -> bool:
    """Whether a run that is over asks for samples, and has a model to take them from."""
    # the runs of a bench, a ladder or a tune are trials
    if not rundir.read_manifest(folder).samples or rundir.is_campaign(folder.path.parent):
        return False
    return model.explain_unfinished(folder) is None


def take(folder: RunFolder, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Write `samples.json` of a run; whatever goes wrong is written there.

    Relative names start at the working directory. A KeyboardInterrupt ends it early and keeps the
    answers so far.
    """
    manifest = rundir.read_manifest(folder)
    chosen = prompts.choose(manifest, manifest.samples or 0)
    record = _build_record(chosen)
    try:
        trained = model.find_of_run(folder)
        record["base"] = None if trained.base is None else trained.base.as_json()
        if chosen.missing is None:
            count = len(chosen.chosen)
            say(f"answering {count} prompt(s) before and after the training, for the report")
            _ask(trained, chosen, record, environ)
        else:
            record["failed"] = chosen.missing
    except LaunchError as error:
        record["failed"] = str(error)
    except KeyboardInterrupt:
        record["failed"] = "it was interrupted"
    files.write_json(folder.samples, attempt.find_redactor(folder).redact(record))


def _build_record(chosen: Prompts) -> dict[str, Any]:
    return {
        "version": VERSION,
        "from": chosen.origin,
        "base": None,
        "max_new_tokens": MAX_NEW_TOKENS,
        "prompts": [
            {**prompt.as_json(), "before": None, "after": None} for prompt in chosen.chosen
        ],
        "failed": None,
    }


def _ask(
    trained: TrainedModel, chosen: Prompts, record: dict[str, Any], environ: Mapping[str, str]
) -> None:
    """Add the answers to a record, one after the other."""
    trainer = model.find_trainer(trained, None, chat.list_needs(trained))
    settings = {
        "model": trained.as_json(),
        "prompts": [prompt.messages for prompt in chosen.chosen],
        "sampling": _SAMPLING,
    }
    inside = worker.build_environment(environ, devices=None, cpu=False)
    with worker.Worker(trainer, "samples", settings, inside) as process:
        timer = threading.Timer(LIMIT_S, process.kill)
        timer.start()
        try:
            for event in process.events("done"):
                if event["event"] == "sample":
                    kept = {name: event[name] for name in ("text", "tokens", "ended")}
                    record["prompts"][event["number"]][event["when"]] = kept
        except LaunchError:
            if timer.is_alive():
                raise
            record["failed"] = f"it took longer than {LIMIT_S:.0f} s"
        finally:
            timer.cancel()
