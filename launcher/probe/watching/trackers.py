"""W&B, MLflow and trackio: which run of theirs this training reports to, so that a resume can continue it.

The first two take the run to continue from variables of their own. trackio has none: a run is continued by its name
(`init(name=..., resume="allow")`), which no trainer passes where the stage file names none.
"""

import os
import types
from collections.abc import Callable
from typing import Any

from .hooks import observed, wrap_known
from .probe import Probe

TRACKIO_RUN = "LAUNCH_TRACKIO_RUN"  # the variable with the name of the trackio run to continue


def watch_wandb(probe: Probe, module: types.ModuleType) -> None:
    def began(run: Any, *_: Any, **__: Any) -> None:
        # a run of W&B's disabled mode is none that could be continued
        if run is not None and not getattr(run, "disabled", False):
            _note(probe, "wandb", run.id, project=run.project, name=run.name)

    wrap_known(module, ("init",), observed(probe.record, after=began))


def watch_mlflow(probe: Probe, module: types.ModuleType) -> None:
    def began(run: Any, *_: Any, **__: Any) -> None:
        _note(probe, "mlflow", run.info.run_id, project=run.info.experiment_id, name=run.info.run_name)

    wrap_known(module, ("start_run",), observed(probe.record, after=began))


def watch_trackio(probe: Probe, module: types.ModuleType) -> None:
    def begin(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        continued = os.environ.get(TRACKIO_RUN)
        # the name is the second parameter
        if continued and len(args) < 2 and kwargs.get("name") in (None, continued):
            kwargs = {**kwargs, "name": continued, "resume": "allow"}
        run = original(*args, **kwargs)
        with probe.record.quietly("after trackio.init"):
            _note(probe, "trackio", run.name, project=run.project, name=run.name)
        return run

    wrap_known(module, ("init",), begin)


def _note(probe: Probe, tracker: str, key: Any, *, project: Any, name: Any) -> None:
    if not isinstance(key, str) or not key:
        return
    shown = {"project": project, "name": name}
    texts = {field: value for field, value in shown.items() if isinstance(value, str)}
    probe.record.write("tracker", tracker=tracker, id=key, **texts)
