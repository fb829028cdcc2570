"""An adapter and its base -> one whole model in a new folder, whose logits were compared."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from launcher.artifacts import checkpoints
from launcher.errors import Finding, launch_finding, not_ready, unwritable, usage
from launcher.lazy_dataclass import dataclass
from launcher.machine.locks import try_lock
from launcher.machine.python import Trainer
from launcher.trained.model import Base, TrainedModel
from launcher.trained.worker import Worker

TOLERANCES: Mapping[str, float] = {"float32": 0.001, "float16": 0.01, "bfloat16": 0.05}
"""How far the logits of the saved model may lie from those of base and adapter, by the format of
its weights: the root mean square of the difference as a share of that of the logits. Adding the
adapter rounds every weight once.
"""
_STRICTEST = min(TOLERANCES.values())
LEAST_KEPT = 0.25
"""The least share of what the adapter changes that the saved model must have. A change that is all
rounding shows as a half, because that of the base is in both; an adapter that was left out shows as
nothing.
"""
MOSTLY_KEPT = 0.9
"""Below this share a warning says that part of the adapter is lost."""
_STEPS = {
    "saving": "saving the merged model",
    "checking": "loading it again, to compare its logits",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A merged model. `error` and `effect` are shares of the size of the logits: how far the saved
    model lies from base and adapter, and how far the base alone does; `tolerance` is the largest
    `error` that is accepted. `kept` is the share of the effect that the saved model has.
    """

    output: Path
    base: Base
    dtype: str
    error: float
    effect: float
    kept: float
    tolerance: float
    positions: int
    template: bool
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, object]:
        return {
            "output": str(self.output),
            "base": self.base.as_json(),
            "dtype": self.dtype,
            "error": self.error,
            "effect": self.effect,
            "kept": self.kept,
            "tolerance": self.tolerance,
            "positions": self.positions,
            "chat_template": self.template,
        }

    def lines(self) -> list[str]:
        allowed = f"at most {_format_share(self.tolerance)} in {self.dtype}"
        return [
            f"merged into {self.base.name}: {self.output} ({self.dtype})",
            f"checked over {self.positions} positions: the logits of base and adapter, and "
            f"those of what was saved, differ by {_format_share(self.error)} ({allowed})",
            f"the adapter itself moves them by {_format_share(self.effect)}, "
            f"and {self.kept:.1%} of that is kept",
        ]


def _format_share(value: float) -> str:
    """Percent, with two significant digits."""
    return f"{value * 100:.2g} %"


def choose_output(model: TrainedModel) -> Path:
    """The default folder of a merged model: beside the adapter."""
    return model.path.with_name(f"{model.path.name}-merged")


def require_mergeable(model: TrainedModel) -> None:
    if not model.is_adapter:
        message = f"{model.path} holds a whole model, no adapter: there is nothing to merge"
        raise usage("not-an-adapter", message, f"launch chat {model.name}")


def merge(
    model: TrainedModel,
    trainer: Trainer,
    output: Path,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Merged:
    """Merge an adapter into its unquantised base, and save the result in `output`.

    The folder is written under another name beside `output`, and renamed once its logits agree.
    Raises UsageError if `output` exists, NotReady if loading, saving or the comparison fails; then
    nothing is left.
    """
    require_mergeable(model)
    assert model.base is not None
    output = Path(os.path.abspath(output))
    require_free(output)
    with _create_unfinished_folder(output) as folder:
        result = _merge_into(folder, model, trainer, environ, say)
        fault = checkpoints.find_model_fault(folder)
        if fault is not None:
            raise not_ready(
                "damaged-model", f"what was saved cannot be loaded: {fault}", file=str(output)
            )
        require_free(output)
        os.rename(folder, output)
    return replace(result, output=output, findings=tuple(_note_differences(model, result)))


def require_free(output: Path) -> None:
    """Raise UsageError if the path exists: nothing is overwritten."""
    if os.path.lexists(output):
        message = f"{output} is there already, and is not written over"
        raise usage("output-exists", message, "name another folder with --output DIR, or remove it")


def _merge_into(
    folder: Path,
    model: TrainedModel,
    trainer: Trainer,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Merged:
    assert model.base is not None
    settings = {"model": model.as_json(), "into": str(folder)}
    say(f"loading {model.base.name} and the adapter {model.path}")
    with Worker(trainer, "merge", settings, environ) as worker:
        for event in worker.events("merged"):
            if event["event"] in _STEPS:
                say(_STEPS[event["event"]])
        result = Merged(
            output=folder,
            base=model.base,
            dtype=event["dtype"],
            error=event["error"],
            effect=event["effect"],
            kept=event["kept"],
            tolerance=TOLERANCES.get(event["dtype"], _STRICTEST),
            positions=event["positions"],
            template=event["template"],
        )
    _require_agreement(result, model)
    return result


def _require_agreement(result: Merged, model: TrainedModel) -> None:
    """Raise NotReady if the merged model answers otherwise than base and adapter."""
    # a NaN is no agreement
    if result.error <= result.tolerance and result.kept >= LEAST_KEPT:
        return
    message = (
        "the merged model does not say what base and adapter say: its logits differ by "
        f"{_format_share(result.error)} (at most {_format_share(result.tolerance)} is rounding "
        f"in {result.dtype}), and {result.kept:.1%} of what the adapter changes is kept"
    )
    help = "nothing was written; serve base and adapter as they are"
    raise not_ready("merge-differs", message, help, file=str(model.path))


def _note_differences(model: TrainedModel, result: Merged) -> Iterator[Finding]:
    if model.quantised:
        message = (
            "the adapter was trained on a base in 4 or 8 bits (QLoRA) and is merged into the "
            f"unquantised {result.base.name}: the comparison is with that"
        )
        yield launch_finding(
            "note", "merged-unquantised", message, "compare some answers: launch chat on both"
        )
    if result.kept < MOSTLY_KEPT:
        message = (
            f"{result.kept:.1%} of what the adapter changes is kept: the rest is less than what "
            f"{result.dtype} can tell apart"
        )
        yield launch_finding(
            "warning", "merge-loses-adapter", message, "serve base and adapter as they are"
        )


@contextlib.contextmanager
def _create_unfinished_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` to write into; it is removed afterwards unless it was renamed.

    Its lock is held: a folder with a free lock was left by a killed merge, and is emptied. Raises
    NotReady.
    """
    folder = output.with_name(f".{output.name}.merging")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise unwritable(output, error) from None
    try:
        if try_lock(lock) is False or not _is_open(folder, lock):
            raise not_ready("merge-runs", f"another merge writes {output}", file=str(folder))
        _empty_folder(folder)
        yield folder
    finally:
        if _is_open(folder, lock):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _is_open(folder: Path, descriptor: int) -> bool:
    """Whether the folder of that name is the one that is open: it may have been renamed."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _empty_folder(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
