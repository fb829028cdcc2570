"""Run upstream's script as `__main__`, watched; its exit code and exceptions stay its own."""

import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path

from . import supplies, trainers
from .hooks import ModuleAction, Watcher, load_file
from .probe import Probe
from .process import ARGUMENT, SETTINGS, Console, protect_streams, read_attempt_number, say

LIBRARIES = {
    "accelerate.accelerator": "watch_accelerate",
    "accelerate.optimizer": "watch_optimizer",
    "datasets.arrow_dataset": "watch_data_sets",
    "mlflow": "watch_mlflow",
    "trackio": "watch_trackio",
    "transformers.modeling_utils": "watch_pretrained",
    "transformers.trainer": "watch_trainer",
    "transformers.trainer_callback": "watch_callbacks",
    "wandb": "watch_wandb",
}
"""Watchers of what any script may use; those of its own modules are in the settings."""

EXPORTING = Path(__file__).resolve().parents[1] / "models" / "exporting.py"


def list_watchers(probe: Probe) -> dict[str, ModuleAction]:
    """What is called with each module once it is imported."""
    settings = probe.settings
    watching = {**LIBRARIES, **settings.watchers}
    supplying = {"huggingface_hub": "supply_snapshot"}
    if settings.cpu:
        supplying["torch.serialization"] = "supply_locations"
        supplying |= settings.stand_ins
    actions = probe.liger.watchers()
    for module, name in watching.items():
        actions[module] = partial(getattr(trainers, name), probe)
    for module, name in supplying.items():
        actions[module] = partial(getattr(supplies, name), probe.record)
    return actions


def resolve_word(shown: str) -> str:
    """A word of the command line: a secret is in a variable, which the word names."""
    if not shown.startswith(f"${ARGUMENT}"):
        return shown
    return os.environ.get(shown[1:], shown)


def run(target: str) -> None:
    sys.argv = [target, *map(resolve_word, sys.argv[1:])]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


def export(probe: Probe) -> None:
    """Write the trained model for another library, if the script does not do that itself."""
    settings = probe.settings.export
    if not settings or probe.process.rank:
        return
    probe.rest()
    exporting = load_file(str(EXPORTING), "launch_export")
    say(f"writing the weights for transformers into {settings['into']}")
    getattr(exporting, settings["function"])(settings, probe.record.write)
    trainers.note_saved(probe.record, settings["into"])


def main() -> None:
    protect_streams()
    probe = Probe(json.loads(os.environ[SETTINGS]))
    record = probe.record
    record.write(
        "start",
        rank=probe.process.rank,
        world=probe.process.world,
        pid=os.getpid(),
        target=probe.settings.target,
        attempt=read_attempt_number(),
        python=".".join(map(str, sys.version_info[:3])),
    )
    sys.meta_path.insert(0, Watcher(record, list_watchers(probe)))
    probe.watchdog.start()
    probe.preemption.start()
    code = 0
    try:
        run(probe.settings.target)
        export(probe)
    except SystemExit as stop:
        code = _convert_exit_code(stop)
        raise
    except BaseException as error:
        code = 1
        record.write("error", type=type(error).__name__, message=str(error)[:2000])
        raise
    finally:
        probe.end()
        if Console.lost:
            record.write(
                "note", text=f"the disk was full: {Console.lost} bytes of the log are lost"
            )
        record.write("end", exit=code)


def _convert_exit_code(stop: SystemExit) -> int:
    """As Python exits: a message counts as 1."""
    if stop.code is None:
        return 0
    return stop.code if isinstance(stop.code, int) else 1
