"""What lies in an output folder -> `Checkpoint`: the training states in it, and whether they are whole.

open-instruct writes `step_N` and `epoch_N` and a file COMPLETED into them, which every rank writes when
its own part is done (finetune.py::main[with open(os.path.join #1]): with several ranks it can stand beside weights
that are still being written. transformers writes `checkpoint-N` and trainer_state.json last
(transformers/trainer.py::Trainer._save_checkpoint[self.state.save_to_json]), and takes the highest number whatever is
in it (transformers/trainer_utils.py::get_last_checkpoint). So no mark is believed: every file that a resume reads must
be there and end where its own header or directory says. No weights are loaded.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from launcher import files
from launcher.artifacts import model_files
from launcher.artifacts.model_files import archive_fault, file_fault
from launcher.paths import is_dir
from launcher.upstream.trainers import BACKENDS

Kind = Literal["step", "epoch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One folder of a training state.

    `number` stands in its name: optimizer steps done, or for `epoch` the epoch that was trained last,
    counted from 0. `epochs` is the place in the data in passes, where the state says it. `marked` is
    what upstream itself goes by. `ranks` is how many processes left their part.
    """

    path: Path
    kind: Kind
    number: int
    marked: bool
    why_incomplete: str | None = None
    epochs: float | None = None
    ranks: int | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def complete(self) -> bool:
        return self.why_incomplete is None

    @property
    def step(self) -> int | None:
        return self.number if self.kind == "step" else None


def find(
    backend: str, output: Path | None, *, ranks: int | None = None, known: Container[str] = ()
) -> list[Checkpoint]:
    """The checkpoints of an output folder, what upstream would take last, without those whose names are `known`.

    `ranks` is how many processes must have left their part, where it is known.
    """
    folders = (path for path in _folders(backend, output) if path.name not in known)
    found = (_read(_layout(backend), path, ranks) for path in folders)
    return sorted(found, key=lambda checkpoint: (checkpoint.kind, checkpoint.number))


def last_written(backend: str, output: Path | None) -> float | None:
    found = filter(None, map(_status, _folders(backend, output)))
    return max((status.st_mtime for status in found), default=None)


def taken_by_upstream(backend: str, output: Path | None) -> Path | None:
    """The checkpoint that open-instruct would resume from by itself (utils.py::get_last_checkpoint).

    None for a trainer that resumes only from what is named. Raises ValueError where a name in the folder
    makes its own look-up crash.
    """
    if output is None or not _layout(backend).resumes_itself:
        return None
    steps, epochs = ([n for n in files.names(output) if n.startswith(stem)] for stem in ("step_", "epoch_"))
    # steps go before epochs, complete or not: a first half-written one hides every epoch
    marked = [output / name for name in steps or epochs if (output / name / "COMPLETED").exists()]
    return max(marked, key=lambda path: int(path.name.split("_")[-1]), default=None)


def strange_names(backend: str, output: Path | None) -> list[str]:
    """Names that open-instruct takes for checkpoints and that are none of its own
    (utils.py::get_last_checkpoint[checkpoint_steps =]).
    """
    layout = _layout(backend)
    names = files.names(output) if layout.resumes_itself else []
    return [n for n in names if n.startswith(("step_", "epoch_")) and not layout.folder.match(n)]


def folder_name(backend: str, kind: Kind, number: int) -> str | None:
    """What a trainer calls a checkpoint of so many steps, or of an epoch; None if it saves none."""
    stem = _layout(backend).stems.get(kind)
    return None if stem is None else f"{stem}{number}"


def model_fault(folder: Path | None) -> str | None:
    """What a folder lacks to be a trained model; None where it is one."""
    names = set(files.names(folder))
    if folder is None or not {"config.json", "adapter_config.json"} & names:
        return "it holds no config"
    return _weights_fault(folder)


def damage(folder: Path) -> str | None:
    """What is wrong with the weights that lie in a folder; None where none do, or all are whole."""
    fault = _weights_fault(folder)
    return None if fault == model_files.NO_WEIGHTS else fault


def _folders(backend: str, output: Path | None) -> Iterator[Path]:
    names = filter(_layout(backend).folder.match, files.names(output))
    return (path for name in names if output is not None and (path := output / name).is_dir())


def _read(layout: _Layout, path: Path, ranks: int | None) -> Checkpoint:
    names, alone = set(files.names(path)), path / "rng_state.pth"
    stem, number = re.split("[_-]", path.name)
    state = files.read_json(path / "trainer_state.json")
    fault = None if layout.mark in names else f"it was not finished: {layout.unmarked}"
    if fault is None and layout.mark == "trainer_state.json" and state.get("global_step") != int(number):
        fault = f"trainer_state.json is not that of step {number}"
    fault = fault or _state_fault(path, names, f"optimizer.{layout.suffix}", f"scheduler.{layout.suffix}")
    if fault is None and (ranks or 1) == 1 and alone.name in names:
        fault = archive_fault(alone)
    elif fault is None:
        fault = _ranks_fault(path, names, layout.states, ranks)
    epochs = state.get("epoch")
    return Checkpoint(
        path=path,
        kind="epoch" if stem == "epoch" else "step",
        number=int(number),
        marked=bool(state) or "COMPLETED" in names,
        why_incomplete=fault,
        epochs=float(epochs) if isinstance(epochs, int | float) else None,
        ranks=1 if alone.name in names else sum(map(bool, map(layout.states.match, names))) or None,
    )


class _Layout(NamedTuple):
    """How the checkpoints of a loop lie in an output folder.

    `folder` matches their names, which begin with one of `stems`; `mark` is the file that upstream itself goes
    by, `states` matches the files of each rank's random states. `resumes_itself`: a start takes the newest
    that is marked.
    """

    folder: re.Pattern[str]
    stems: Mapping[Kind, str]
    mark: str
    unmarked: str
    suffix: str
    states: re.Pattern[str]
    resumes_itself: bool


_LAYOUTS = {
    "accelerate": _Layout(
        folder=re.compile(r"(step|epoch)_(\d+)\Z", re.ASCII),
        stems={"step": "step_", "epoch": "epoch_"},
        mark="COMPLETED",
        unmarked="no COMPLETED in it",
        suffix="bin",
        states=re.compile(r"random_states_(\d+)\.pkl\Z"),
        resumes_itself=True,
    ),
    "transformers": _Layout(
        folder=re.compile(r"checkpoint-(\d+)\Z", re.ASCII),
        stems={"step": "checkpoint-"},
        mark="trainer_state.json",
        unmarked="no trainer_state.json",
        suffix="pt",
        states=re.compile(r"rng_state_(\d+)\.pth\Z"),
        resumes_itself=False,
    ),
}


def _layout(backend: str) -> _Layout:
    # a record may be of a backend that is no more, or say none
    known = BACKENDS.get(backend)
    return _LAYOUTS["accelerate" if known is None else known.CHECKPOINTS]


def _state_fault(path: Path, names: set[str], optimizer: str, scheduler: str) -> str | None:
    """What is wrong with weights, optimizer and schedule, in whichever of the three layouts."""
    engine = _engine_folder(path, names)
    sharded = [name for name in sorted(names) if name.startswith(("pytorch_model_fsdp", "optimizer_"))]
    if engine is not None:
        fault = _engine_fault(engine)
    elif any(name.startswith("pytorch_model_fsdp") for name in sharded):
        fault = _fsdp_fault(path, sharded)
    else:
        fault = _weights_fault(path)
        if fault is None and optimizer not in names:
            fault = f"it holds the model without {optimizer}"
        fault = fault or archive_fault(path / optimizer)
    if fault is not None:
        return fault
    if scheduler not in names:
        # DeepSpeed's own schedule lies in its engine's state
        return f"it lacks {scheduler}" if engine is None else None
    return archive_fault(path / scheduler)


def _ranks_fault(path: Path, names: set[str], pattern: re.Pattern[str], ranks: int | None) -> str | None:
    found = {int(m[1]): name for name in names if (m := pattern.match(name)) is not None}
    expected = range(ranks if ranks is not None else max(found, default=0) + 1)
    if lacking := [str(rank) for rank in expected if rank not in found]:
        return f"the random states of rank {', '.join(lacking[:8])} are missing"
    return next(filter(None, (archive_fault(path / name) for name in found.values())), None)


def _engine_folder(path: Path, names: set[str]) -> Path | None:
    """DeepSpeed's part: `pytorch_model` under accelerate, `global_stepN` under transformers."""
    if "latest" in names:
        with contextlib.suppress(OSError, ValueError):
            return path / files.read_bytes(path / "latest", 4096).decode().strip()
    inside = [n for n in sorted(names) if n == "pytorch_model" or n.startswith("global_step")]
    return next((path / name for name in reversed(inside) if is_dir(path / name)), None)


def _engine_fault(folder: Path) -> str | None:
    """Every rank's optimizer and at least one model state (deepspeed/runtime/engine.py)."""
    names = files.names(folder)
    models, optimizers = ([n for n in names if n.endswith(f"{kind}_states.pt")] for kind in ("model", "optim"))
    if not models:
        return f"{folder.name} holds no model states"
    ranks = {int(m[1]) for n in optimizers if (m := re.search(r"zero_pp_rank_(\d+)_", n))}
    if lacking := [str(rank) for rank in range(max(ranks, default=-1) + 1) if rank not in ranks]:
        return f"{folder.name} lacks the optimizer of rank {', '.join(lacking[:8])}"
    return next(filter(None, (archive_fault(folder / name) for name in (*models, *optimizers))), None)


def _fsdp_fault(path: Path, names: Iterable[str]) -> str | None:
    """Single files, or folders of torch's distributed checkpoints, which write `.metadata` last."""
    for name in names:
        if is_dir(path / name):
            inside = set(files.names(path / name))
            if ".metadata" not in inside:
                return f"{name} was not finished: no .metadata"
            statuses = ((n, _status(path / name / n)) for n in sorted(inside))
            if empty := [n for n, status in statuses if status is None or not status.st_size]:
                return f"{name}/{empty[0]} is empty"
        elif (fault := archive_fault(path / name)) is not None:
            return fault
    return None


def _weights_fault(folder: Path) -> str | None:
    """What is wrong with a whole model, or with adapters: PEFT writes some into folders of their own."""
    adapters = sorted([*folder.glob("adapter_model.*"), *folder.glob("*/adapter_model.*")])
    if adapters and model_files.first(folder) is None:
        return next(filter(None, map(file_fault, adapters)), None)
    return model_files.weights_fault(folder)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
