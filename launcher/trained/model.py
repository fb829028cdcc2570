"""A run, or a folder -> `TrainedModel`: where its final model lies, and its base."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher import files, redaction
from launcher.artifacts import checkpoints, model_config, model_files
from launcher.artifacts.checkpoints import Checkpoint
from launcher.errors import NotReady, not_ready
from launcher.lazy_dataclass import dataclass
from launcher.machine import python
from launcher.machine.python import Trainer
from launcher.paths import exists, is_dir, is_file, resolve_path
from launcher.redaction import Redactor
from launcher.runs import attempt, outputs, rundir
from launcher.runs.record import Manifest
from launcher.runs.rundir import RunFolder
from launcher.upstream.trainers import BACKENDS
from launcher.verdict import judge, summary

_QUANTISED = ("load_in_4bit", "load_in_8bit", "use_qlora")
"""Arguments of the trainers that load a base in 4 or 8 bits."""
_SHOWN = 5
"""Checkpoints that an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model that training started from: a folder, or a name of the hub with its revision."""

    name: str
    revision: str | None = None

    @property
    def is_folder(self) -> bool:
        return is_dir(self.name)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model that can be loaded; `run` wrote it, None if no record names its folder.

    `quantised` is whether the base was loaded in 4 or 8 bits for training, `trusts_code` whether
    training ran code of the model's repository.
    """

    path: Path
    is_adapter: bool
    base: Base | None
    run: RunFolder | None = None
    quantised: bool = False
    trusts_code: bool = False

    @property
    def name(self) -> str:
        """What commands call it: its run, else its folder."""
        if self.run is None:
            return describe_path(self.path)
        return self.run.path.name

    @property
    def redactor(self) -> Redactor:
        """What must not be shown of it: what was secret to its run, else to this process."""
        if self.run is None:
            return redaction.find_process_secrets()
        return attempt.find_redactor(self.run)

    def as_json(self) -> dict[str, object]:
        """Its description for the code under the trainer's Python."""
        return {
            "path": str(self.path),
            "is_adapter": self.is_adapter,
            "base": None if self.base is None else self.base.as_json(),
            "has_tokenizer": model_files.has_tokenizer(self.path),
            "trusts_code": self.trusts_code,
        }


def find_in_folder(folder: Path, base: Base | None = None) -> TrainedModel | None:
    """The model in a folder; None if there is none. `base` replaces the recorded base.

    Raises NotReady if the model is damaged, or the base of an adapter is unknown or missing.
    """
    if not _has_config(folder):
        return None
    path = Path(os.path.abspath(folder))
    run = find_writer(path)
    return _describe_model(path, run, base)


def find_of_run(run: RunFolder, base: Base | None = None) -> TrainedModel:
    """The final model of a run. Raises NotReady if there is none; the help names checkpoints."""
    manifest = rundir.read_manifest(run)
    output = find_output(manifest)
    if output is None:
        message = f"the record of {run.path.name} names no output folder"
        raise not_ready(
            "no-final-model", message, "give the model's folder instead", file=str(run.manifest)
        )
    why = explain_unfinished(run)
    if why is not None:
        raise _explain_missing_model(run, manifest, output, why)
    folder = find_final_folder(manifest, output)
    if not _has_config(folder):
        raise _explain_missing_model(run, manifest, output, f"{folder} holds no model any more")
    return _describe_model(folder, run, base)


def _describe_model(path: Path, run: RunFolder | None, base: Base | None) -> TrainedModel:
    fault = checkpoints.find_model_fault(path)
    if fault is not None:
        raise not_ready("damaged-model", f"the model cannot be loaded: {fault}", file=str(path))
    manifest = Manifest()
    if run is not None:
        manifest = rundir.read_manifest(run)
    base = base or _find_recorded_base(manifest)
    is_adapter = model_files.is_adapter(path)
    if is_adapter:
        base = _require_base(path, base)
    return TrainedModel(
        path=path,
        is_adapter=is_adapter,
        base=base,
        run=run,
        quantised=any(manifest.argument(name) is True for name in _QUANTISED),
        trusts_code=manifest.argument("trust_remote_code") is True and _is_own(run),
    )


def _require_base(adapter: Path, recorded: Base | None) -> Base:
    """The base of an adapter, by its config if no run recorded it.

    Raises NotReady if it is unknown, or is not on this machine.
    """
    base = recorded
    if base is None:
        name = model_files.find_adapter_base(adapter)
        if name is None:
            message = "neither a run's record nor the adapter's config names its base model"
            help = "set base_model_name_or_path in its config"
            raise not_ready("no-base-model", message, help, file=str(adapter))
        base = Base(name=name)
    if model_config.is_path(base.name) and not base.is_folder:
        message = f"the base model {base.name} is not here"
        help = (
            "start this where that path begins, "
            f"or change base_model_name_or_path in {model_files.ADAPTER}"
        )
        raise not_ready("no-base-model", message, help, file=str(adapter))
    return base


def _find_recorded_base(manifest: Manifest) -> Base | None:
    """The model that a run started from; a relative name starts where launch was started."""
    name = manifest.argument("model_name_or_path")
    if not isinstance(name, str) or not name:
        return None
    if manifest.cwd is not None:
        folder = os.path.join(manifest.cwd, name)
        if is_dir(folder):
            return Base(name=folder)
    revision = manifest.argument("model_revision")
    if not isinstance(revision, str):
        revision = None
    return Base(name=name, revision=revision)


def _has_config(folder: Path) -> bool:
    return is_file(folder / "config.json") or is_file(folder / model_files.ADAPTER)


def find_output(manifest: Manifest) -> Path | None:
    """The output folder of a run as an absolute path."""
    if manifest.output is None:
        return None
    return Path(os.path.abspath(os.path.join(manifest.cwd or ".", manifest.output)))


def find_final_folder(manifest: Manifest, output: Path) -> Path:
    """The folder of a run's final model: its output folder, or one below it (`final_model`)."""
    backend = BACKENDS.get(manifest.backend or "")
    if backend is None:
        return output
    for entry in backend.STAGES.values():
        folder = output / entry.final_model
        if entry.final_model and _has_config(folder):
            return folder
    return output


def find_writer(folder: Path) -> RunFolder | None:
    """The newest known run whose output folder this is, or lies right above it."""
    place = resolve_path(folder)
    places = {str(place), str(place.parent)}
    runs = []
    for name, output in outputs.map_outputs().items():
        run = RunFolder(Path(name))
        if output in places and rundir.is_run(run.path):
            runs.append(run)
    return max(runs, key=lambda run: run.path.name, default=None)


def explain_unfinished(run: RunFolder) -> str | None:
    """Why a run has no final model, by its verdict; None if the run completed."""
    verdict = _read_verdict(run)
    for point in summary.list_points(verdict):
        if point.get("name") != "finish":
            continue
        if point.get("state") == "completed":
            return None
        if point.get("state") == "running":
            last = verdict.get("steps") or 0
            return f"it is still running, at step {last}"
    cause = summary.find_cause(verdict)
    if cause is None:
        return "it did not come to its end"
    return cause.text


def _read_verdict(run: RunFolder) -> Mapping[str, Any]:
    """The verdict of a run's last attempt, judged now if it was not before."""
    if rundir.is_judged(run, max(1, run.attempts())):
        return files.read_json(run.verdict)
    return judge.judge_run(run).verdict.as_json()


def _explain_missing_model(run: RunFolder, manifest: Manifest, output: Path, why: str) -> NotReady:
    message = f"{run.path.name} has no final model: {why}"
    help = "; ".join(_suggest_alternatives(manifest, output)) or "launch runs lists the others"
    return not_ready("no-final-model", message, help, file=str(output))


def _suggest_alternatives(manifest: Manifest, output: Path) -> Iterator[str]:
    """Load a checkpoint, or continue the training."""
    saved: list[Checkpoint] = []
    if manifest.backend in BACKENDS:
        saved = checkpoints.find(str(manifest.backend), output)
    loadable = []
    for checkpoint in saved:
        if checkpoints.find_model_fault(checkpoint.path) is None:
            loadable.append(checkpoint)
    if loadable:
        yield f"checkpoints that can be loaded: {_join_names(loadable)}"
        yield f"launch chat {describe_path(loadable[-1].path)}"
    elif saved:
        yield f"its checkpoints hold training states, no model: {_join_names(saved)}"
    else:
        yield "it has saved no checkpoint"
    yield "the command that started it continues it"


def _join_names(listed: list[Checkpoint]) -> str:
    return ", ".join(checkpoint.name for checkpoint in listed[-_SHOWN:])


def describe_path(path: Path) -> str:
    """A path as it is typed: relative where it lies below the working directory."""
    folder = Path.cwd()
    if path.is_relative_to(folder):
        path = path.relative_to(folder)
    return str(path)


def find_trainer(model: TrainedModel, named: Path | None, needs: tuple[str, ...]) -> Trainer:
    """The Python to load a model with: the named one, the one that trained it, else launch's.

    Raises NotReady if it does not run, or lacks one of the packages `needs`.
    """
    trainer = _find_trainer(model, named)
    lacking = [name for name in needs if name not in trainer.packages]
    if lacking:
        message = f"{trainer.python} ({trainer.source}) has no {', '.join(lacking)}"
        raise not_ready("missing-packages", message, "name the trainer's Python with --python PATH")
    return trainer


def _find_trainer(model: TrainedModel, named: Path | None) -> Trainer:
    if named is not None or os.environ.get("LAUNCH_PYTHON"):
        return python.find_trainer(named, None)
    recorded = _find_recorded_python(model)
    if recorded is not None:
        return python.ask_trainer(recorded, "the Python that trained it")
    return python.find_trainer(None, None)


def _is_own(run: RunFolder | None) -> bool:
    """Whether only this user can have written the record of a run, so that it may be executed."""
    if run is None or attempt.find_other_writer_of_start(run, parents=False) is not None:
        return False
    try:
        status = run.manifest.lstat()
    except OSError:
        return False
    others = stat.S_IWOTH
    if not attempt.is_private_group(status.st_gid):
        others |= stat.S_IWGRP
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & others
    )


def _find_recorded_python(model: TrainedModel) -> Path | None:
    """The Python that a run's record names; None if it is gone, or others may have written it."""
    if model.run is None or not _is_own(model.run):
        return None
    recorded = rundir.read_manifest(model.run).value("trainer", "python")
    if not isinstance(recorded, str) or not exists(Path(recorded)):
        return None
    return Path(recorded)
