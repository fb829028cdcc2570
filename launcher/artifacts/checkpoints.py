"""What lies in an output folder -> `Checkpoint`: the training states in it, and whether they are
whole.

open-instruct writes `step_N` and `epoch_N` and a file COMPLETED into them, which every rank writes
when its own part is done (finetune.py::main[with open(os.path.join #1]): with several ranks it can
stand beside weights that are still being written. transformers writes `checkpoint-N` and
trainer_state.json last
(transformers/trainer.py::Trainer._save_checkpoint[self.state.save_to_json]), and takes the highest
number whatever is in it (transformers/trainer_utils.py::get_last_checkpoint). So no mark is
believed: every file that a resume reads must be there and end where its own header or directory
says. No weights are loaded.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from launcher import files
from launcher.artifacts import model_files
from launcher.artifacts.model_files import find_archive_fault, find_file_fault
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_dir
from launcher.upstream.trainers import BACKENDS

Kind = Literal["step", "epoch"]
_RANKS_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One folder of a training state.

    `number` stands in its name: optimizer steps done, or for `epoch` the epoch that was trained
    last, counted from 0. `epochs` is the place in the data in passes, where the state says it.
    `marked` is what upstream itself goes by. `ranks` is how many processes left their part.
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
        if self.kind != "step":
            return None
        return self.number


def find(
    backend: str, output: Path | None, *, ranks: int | None = None, digested: Container[str] = ()
) -> list[Checkpoint]:
    """The checkpoints of an output folder but those `digested`, what upstream would take last.

    `ranks` is how many processes must have left their part, where it is known.
    """
    layout = _find_layout(backend)
    checkpoints = []
    for path in _list_folders(backend, output):
        if path.name not in digested:
            checkpoints.append(_read_checkpoint(layout, path, ranks))
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.kind, checkpoint.number))


def find_last_write(backend: str, output: Path | None) -> float | None:
    times = []
    for path in _list_folders(backend, output):
        status = _read_status(path)
        if status is not None:
            times.append(status.st_mtime)
    return max(times, default=None)


def find_upstream_resume(backend: str, output: Path | None) -> Path | None:
    """The checkpoint that open-instruct would resume from by itself
    (utils.py::get_last_checkpoint).

    None for a trainer that resumes only from what is named. Raises ValueError where a name in the
    folder makes its own look-up crash.
    """
    if output is None or not _find_layout(backend).resumes_itself:
        return None
    names = files.list_names(output)
    # steps go before epochs, complete or not: a first half-written one hides every epoch
    candidates = _keep_prefixed(names, "step_") or _keep_prefixed(names, "epoch_")
    marked = []
    for name in candidates:
        if (output / name / "COMPLETED").exists():
            marked.append(output / name)
    return max(marked, key=_read_number, default=None)


def _read_number(path: Path) -> int:
    return int(path.name.split("_")[-1])


def _keep_prefixed(names: Iterable[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def list_strange_names(backend: str, output: Path | None) -> list[str]:
    """Names that open-instruct takes for checkpoints and that are none of its own
    (utils.py::get_last_checkpoint[checkpoint_steps =]).
    """
    layout = _find_layout(backend)
    if not layout.resumes_itself:
        return []
    strange = []
    for name in files.list_names(output):
        if name.startswith(("step_", "epoch_")) and not layout.folder.match(name):
            strange.append(name)
    return strange


def name_checkpoint(backend: str, kind: Kind, number: int) -> str | None:
    """What a trainer calls a checkpoint of so many steps, or of an epoch; None if it saves none."""
    stem = _find_layout(backend).stems.get(kind)
    if stem is None:
        return None
    return f"{stem}{number}"


def find_model_fault(folder: Path | None) -> str | None:
    """What a folder lacks to be a trained model; None where it is one."""
    names = set(files.list_names(folder))
    if folder is None or not {"config.json", "adapter_config.json"} & names:
        return "it holds no config"
    return _find_weights_fault(folder)


def find_damage(folder: Path) -> str | None:
    """What is wrong with the weights that lie in a folder; None where none do, or all are whole."""
    fault = _find_weights_fault(folder)
    if fault == model_files.NO_WEIGHTS:
        return None
    return fault


def _list_folders(backend: str, output: Path | None) -> Iterator[Path]:
    if output is None:
        return
    layout = _find_layout(backend)
    for name in files.list_names(output):
        path = output / name
        if layout.folder.match(name) and path.is_dir():
            yield path


_ONE_RANK = "rng_state.pth"
"""The random states of a training with one process, under transformers."""


def _read_checkpoint(layout: _Layout, path: Path, ranks: int | None) -> Checkpoint:
    names = set(files.list_names(path))
    stem, number = re.split("[_-]", path.name)
    kind: Kind = "step"
    if stem == "epoch":
        kind = "epoch"
    state = files.read_json(path / "trainer_state.json")
    epochs = state.get("epoch")
    if isinstance(epochs, int | float):
        epochs = float(epochs)
    else:
        epochs = None
    return Checkpoint(
        path=path,
        kind=kind,
        number=int(number),
        marked=bool(state) or "COMPLETED" in names,
        why_incomplete=_find_fault(layout, path, names, state, ranks),
        epochs=epochs,
        ranks=_count_ranks(layout, names),
    )


def _find_fault(
    layout: _Layout, path: Path, names: set[str], state: Mapping[str, object], ranks: int | None
) -> str | None:
    """Why a checkpoint is incomplete; None if it is whole."""
    if layout.mark not in names:
        return f"it was not finished: {layout.unmarked}"
    if layout.mark == "trainer_state.json":
        number = re.split("[_-]", path.name)[-1]
        if state.get("global_step") != int(number):
            return f"trainer_state.json is not that of step {number}"
    fault = _find_state_fault(layout, path, names)
    if fault is not None:
        return fault
    if _ONE_RANK in names and (ranks or 1) == 1:
        return find_archive_fault(path / _ONE_RANK)
    return _find_ranks_fault(path, names, layout.states, ranks)


def _count_ranks(layout: _Layout, names: set[str]) -> int | None:
    if _ONE_RANK in names:
        return 1
    states = [name for name in names if layout.states.match(name)]
    return len(states) or None


class _Layout(NamedTuple):
    """How the checkpoints of a loop lie in an output folder.

    `folder` matches their names, which begin with one of `stems`; `mark` is the file that upstream
    itself goes by, `states` matches the files of each rank's random states. `resumes_itself`: a
    start takes the newest that is marked.
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


def _find_layout(backend: str) -> _Layout:
    # a record may be of a backend that is no more, or say none
    trainer = BACKENDS.get(backend)
    if trainer is None:
        return _LAYOUTS["accelerate"]
    return _LAYOUTS[trainer.CHECKPOINTS]


def _find_state_fault(layout: _Layout, path: Path, names: set[str]) -> str | None:
    """What is wrong with weights, optimizer and schedule: DeepSpeed's, FSDP's, or those of one
    process.
    """
    engine = _find_engine_folder(path, names)
    if engine is not None:
        fault = _find_engine_fault(engine)
    elif _keep_prefixed(names, "pytorch_model_fsdp"):
        fault = _find_fsdp_fault(path, names)
    else:
        fault = _find_single_fault(path, names, f"optimizer.{layout.suffix}")
    if fault is not None:
        return fault
    scheduler = f"scheduler.{layout.suffix}"
    if scheduler in names:
        return find_archive_fault(path / scheduler)
    if engine is None:
        return f"it lacks {scheduler}"
    # DeepSpeed's own schedule lies in its engine's state
    return None


def _find_single_fault(path: Path, names: set[str], optimizer: str) -> str | None:
    fault = _find_weights_fault(path)
    if fault is not None:
        return fault
    if optimizer not in names:
        return f"it holds the model without {optimizer}"
    return find_archive_fault(path / optimizer)


def _find_ranks_fault(
    path: Path, names: set[str], pattern: re.Pattern[str], ranks: int | None
) -> str | None:
    states: dict[int, str] = {}
    for name in names:
        match = pattern.match(name)
        if match is not None:
            states[int(match[1])] = name
    if ranks is None:
        ranks = max(states, default=0) + 1
    missing = _list_missing_ranks(states, ranks)
    if missing:
        return f"the random states of rank {missing} are missing"
    return _find_archive_fault(path, states.values())


def _list_missing_ranks(present: Container[int], count: int) -> str:
    """The first ranks that are not present, of so many, separated by commas."""
    missing = [str(rank) for rank in range(count) if rank not in present]
    return ", ".join(missing[:_RANKS_NAMED])


def _find_archive_fault(folder: Path, names: Iterable[str]) -> str | None:
    for name in names:
        fault = find_archive_fault(folder / name)
        if fault is not None:
            return fault
    return None


def _find_engine_folder(path: Path, names: set[str]) -> Path | None:
    """DeepSpeed's part: `pytorch_model` under accelerate, `global_stepN` under transformers."""
    if "latest" in names:
        with contextlib.suppress(OSError, ValueError):
            return path / files.read_bytes(path / "latest", 4096).decode().strip()
    for name in sorted(names, reverse=True):
        is_engine = name == "pytorch_model" or name.startswith("global_step")
        if is_engine and is_dir(path / name):
            return path / name
    return None


def _find_engine_fault(folder: Path) -> str | None:
    """Every rank's optimizer and at least one model state (deepspeed/runtime/engine.py)."""
    names = files.list_names(folder)
    models = [name for name in names if name.endswith("model_states.pt")]
    optimizers = [name for name in names if name.endswith("optim_states.pt")]
    if not models:
        return f"{folder.name} holds no model states"
    ranks = set()
    for name in optimizers:
        match = re.search(r"zero_pp_rank_(\d+)_", name)
        if match is not None:
            ranks.add(int(match[1]))
    missing = _list_missing_ranks(ranks, max(ranks, default=-1) + 1)
    if missing:
        return f"{folder.name} lacks the optimizer of rank {missing}"
    return _find_archive_fault(folder, models + optimizers)


def _find_fsdp_fault(path: Path, names: Iterable[str]) -> str | None:
    """Single files, or folders of torch's distributed checkpoints, which write `.metadata` last."""
    for name in sorted(names):
        if not name.startswith(("pytorch_model_fsdp", "optimizer_")):
            continue
        place = path / name
        if is_dir(place):
            fault = _find_distributed_fault(place)
        else:
            fault = find_archive_fault(place)
        if fault is not None:
            return fault
    return None


def _find_distributed_fault(folder: Path) -> str | None:
    names = files.list_names(folder)
    if ".metadata" not in names:
        return f"{folder.name} was not finished: no .metadata"
    for name in sorted(names):
        status = _read_status(folder / name)
        if status is None or not status.st_size:
            return f"{folder.name}/{name} is empty"
    return None


def _find_weights_fault(folder: Path) -> str | None:
    """What is wrong with a whole model, or with adapters: PEFT writes some into folders of their
    own.
    """
    adapters = sorted([*folder.glob("adapter_model.*"), *folder.glob("*/adapter_model.*")])
    if not adapters or model_files.find_first_weights(folder) is not None:
        return model_files.find_weights_fault(folder)
    for adapter in adapters:
        fault = find_file_fault(adapter)
        if fault is not None:
            return fault
    return None


def _read_status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
