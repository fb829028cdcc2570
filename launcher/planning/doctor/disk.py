"""Room for what a run will write, and folders that it must be able to write into.

What a checkpoint holds follows from the sources: DeepSpeed keeps the weights and, in 32 bits, a copy
of them with two moments; without it the optimizer's moments have the weights' own type. A size that
is not known is reported as unknown, and stops nothing.
"""

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from launcher.artifacts import architecture, model_config, model_files
from launcher.artifacts.fingerprint import cache_home
from launcher.cache.keys import REFERENCE_VARIABLE
from launcher.errors import DISK_FULL, Finding, InvalidConfig, launch_finding
from launcher.files import read_json
from launcher.machine.sizes import below, sized
from launcher.paths import exists
from launcher.plan.memory.setup import Setup
from launcher.plan.plan import Plan, step_limit
from launcher.planning.resume.epochs import interval
from launcher.upstream import behaviour

LOW = 2**30
"""Bytes below which a file system is called nearly full, whatever the run will need."""
MARGIN = 1.1
_CHECKPOINTS = ("step_", "epoch_", "checkpoint-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Bytes of a checkpoint and of the final model, and how many checkpoints there will be.

    `times` in the whole run and `limit` side by side are None where that is not known, or unlimited.
    """

    checkpoint: int
    final: int
    times: int | None
    limit: int | None
    formula: str

    @property
    def together(self) -> int:
        """How many checkpoints there are at once: old ones go only after a new one is there."""
        if self.times is None:
            return 1 if self.limit is None else self.limit + 1
        return self.times if self.limit is None else min(self.times, self.limit + 1)

    @property
    def most(self) -> int:
        """Bytes at the fullest moment; the model is saved beside the checkpoints that are left."""
        at_end = self.together if self.limit is None else min(self.together, self.limit)
        return max(self.together * self.checkpoint, at_end * self.checkpoint + self.final)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run will write into its output folder, in bytes at the fullest moment.

    `least` is certain, `likely` what has to be expected. `there` is what lies there already of that, and is
    counted in neither.
    """

    least: int
    likely: int
    saved: Saved
    parameters: int
    there: int = 0


def parameters_of(name: object, environ: Mapping[str, str], revision: str | None = None) -> int | None:
    """The parameters of a model by folder or hub name: from its weights' headers, else from its config.

    Nothing is downloaded and no weight is read; None where the number cannot be known from here.
    """
    path = model_config.where(name, environ, revision)
    if path is None:
        return None
    if sizes := model_files.sizes(path.parent):
        return sum(map(math.prod, sizes.values()))
    try:
        return architecture.shape_of(read_json(path)).parameters
    except InvalidConfig:
        return None


def needs(plan: Plan, output: Path | None, environ: Mapping[str, str]) -> Needs | None:
    """The bytes that checkpoints and the final model take; None where the model's size is not known."""
    values = plan.values
    count = parameters_of(values.get("model_name_or_path"), environ, values.get("model_revision"))
    if count is None or values.get("cache_dataset_only") is True or (likely := saved(plan, count)) is None:
        return None
    watch = plan.stage.options.probe
    if watch is not None and not watch.final_save:
        likely = replace(likely, final=0)
        if plan.stage.entry.keeps_every_state:
            # a trial saves no state of OLMo-core's, either
            likely = replace(likely, times=0)
    # shards of several machines may lie on a disk each, and unknown steps may save nothing
    least = replace(likely, checkpoint=likely.checkpoint // plan.nodes, times=likely.times or 0)
    there = 0
    if output is not None:
        # they go as new ones come
        with contextlib.suppress(OSError, ValueError):
            there = sum(below(place) for place in output.iterdir() if place.name.startswith(_CHECKPOINTS))
    at_least, at_most, there = max(0, least.most - there), max(0, likely.most - there), min(there, likely.most)
    return Needs(least=at_least, likely=at_most, there=there, saved=likely, parameters=count)


def saved(plan: Plan, count: int, setup: Setup | None = None) -> Saved | None:
    """What a run saves of a model of `count` parameters; None where that is not known.

    Only its `setup` tells the size of an adapter and of weights in 4 bits.
    """
    entry = plan.stage.entry
    if entry.by_trainer:
        return _trl(plan, count, setup)
    if entry.keeps_every_state:
        return _olmo_core(plan, count)
    return _open_instruct(plan, count, setup)


def _open_instruct(plan: Plan, count: int, setup: Setup | None) -> Saved:
    """finetune.py::main[accelerator.save_state(output_dir #1],
    dpo_tune_cache.py::main[accelerator.save_state(output_dir #1] save the whole state;
    finetune.py::main[clean_last_n_checkpoints(args.output_dir #1],
    dpo_tune_cache.py::main[clean_last_n_checkpoints(args.output_dir #1] delete the oldest after that;
    model_utils.py::save_with_accelerate[unwrapped_model.save_pretrained #2] saves the model at the end.
    """
    values, final = plan.values, 2 * count
    limit, own = values.get("keep_last_n_checkpoints"), values.get("zero_stage")
    sharded = bool(plan.gpus) and (plan.stage.options.deepspeed is not None or own is not None)
    moments = 2 if values.get("dpo_use_paged_optimizer") else 8
    if values.get("use_lora") or values.get("use_qlora"):
        final = 0 if setup is None else setup.adapter_bytes
        each = 2 * final + (2 * count if setup is None else setup.stored_bytes)
        formula = "2 bytes of weights a parameter, beside the adapter"
        if values.get("use_qlora"):
            each = count // 2 if setup is None else each
            formula = "weights in 4 bits, at least"
    elif sharded:
        each = (2 + 4 + moments) * count
        formula = f"2 + 4 + {moments} bytes a parameter: weights, their 32-bit copy, moments"
    else:
        each, formula = (2 + 4) * count, "2 + 4 bytes a parameter: weights and moments"
    kept = limit if isinstance(limit, int) and limit >= 0 else None
    return Saved(checkpoint=each, final=final, times=_times(plan), formula=formula, limit=kept)


def _olmo_core(plan: Plan, count: int) -> Saved:
    """The oldest checkpoints go where `keep_last_n_checkpoints` limits them
    (olmo_core_utils.py::build_checkpointer_callback[max_checkpoints=max_checkpoints]). Before #1701 every one stays,
    the first and the last step's too.
    """
    times, final = _times(plan), 4 * count
    formula = "4 + 8 bytes a parameter: weights and moments"
    limit = None
    if plan.stage.schema.does(behaviour.LIMITS_CHECKPOINTS):
        kept = plan.values.get("keep_last_n_checkpoints")
        limit = kept if isinstance(kept, int) and kept >= 0 else None
    if limit is None:
        formula += ", none of which is deleted"
    if plan.values.get("cache_logprobs_only"):
        times, final = 0, 0
    elif times is not None:
        times += 1
    return Saved(checkpoint=12 * count, final=final, times=times, limit=limit, formula=formula)


def _trl(plan: Plan, count: int, setup: Setup | None) -> Saved | None:
    """transformers/trainer.py::Trainer._save_checkpoint saves model, optimizer and state; the oldest go after that.

    Of a PeftModel it saves the adapter alone (transformers/trainer.py::Trainer._save[self.model.save_pretrained]).
    """
    values = plan.values
    # `auto` is what the files hold
    width = {"bfloat16": 2, "float16": 2, "float32": 4}.get(str(values.get("dtype")), 2)
    sharded = bool(plan.gpus) and plan.stage.options.deepspeed is not None
    final, alone = width * count, values.get("save_only_model")
    if values.get("use_peft"):
        if setup is None:
            return None
        final = setup.adapter_bytes
        each, formula = final if alone else 3 * final, "the adapter, and its moments"
    elif alone:
        each, formula = final, f"{width} bytes a parameter: weights"
    elif sharded:
        each = final + (2 + 12) * count
        formula = f"{width} + 2 + 12 bytes a parameter: weights, and DeepSpeed's own with moments"
    else:
        # the default is AdamW, under a name that is computed
        # (transformers/training_args.py::TrainingArguments[default_optim #1])
        optim = str(values.get("optim")) if values.given("optim") else "adamw"
        # of other kinds it is not known here
        moments = 2 * width if optim.startswith(("adamw", "paged_adamw")) and "4bit" not in optim else 0
        moments = min(moments, 2) if "8bit" in optim else moments
        each = final + moments * count
        formula = f"{width} + {moments} bytes a parameter: weights and moments"
    limit = values.get("save_total_limit")
    kept = limit if isinstance(limit, int) and limit > 0 else None
    return Saved(checkpoint=each, final=final, times=_times(plan), formula=formula, limit=kept)


def _times(plan: Plan) -> int | None:
    """Checkpoints that are saved every so often in the whole run; None where that is not known."""
    every, entry = interval(plan), plan.stage.entry
    if every is None or plan.steps == 0:
        return 0
    if every == "epoch":
        epochs = plan.values.get(entry.names.epochs)
        if step_limit(plan.stage, plan.values) is not None or not isinstance(epochs, int | float):
            return None
        return math.ceil(epochs)
    if not isinstance(every, int) or plan.steps is None:
        return None
    return -(-plan.steps // every) if entry.saves_last_step else plan.steps // every


class WriteTarget(NamedTuple):
    """A folder that a run writes into: what for, what to set for another, and whether it needs it."""

    path: Path
    what: str
    setting: str
    vital: bool = False


def places(plan: Plan | None, output: Path | None, runs: Path, environ: Mapping[str, str]) -> Iterator[WriteTarget]:
    hub, home = model_config.hub_home(environ), model_config.home(environ)
    triton = Path(environ.get("TRITON_HOME") or home) / ".triton" / "cache"

    def of(variable: str, what: str, default: Path) -> WriteTarget:
        return WriteTarget(Path(environ.get(variable) or default), what, variable)

    if output is not None:
        yield WriteTarget(output, "checkpoints and the model", "output_dir", vital=True)
    yield WriteTarget(runs, "run folders", "LAUNCH_RUNS", vital=True)
    yield WriteTarget(model_config.hub_cache(environ), "models from the hub", "HF_HOME")
    yield of("HF_DATASETS_CACHE", "data sets from the hub", hub / "datasets")
    yield WriteTarget(cache_home(environ), "launch's caches", "LAUNCH_CACHE")
    yield of("TRITON_CACHE_DIR", "compiled kernels", triton)
    yield of("TMPDIR", "temporary files", Path(tempfile.gettempdir()))
    if plan is None:
        return
    for name in ("dataset_local_cache_dir", "local_cache_dir"):
        if name in plan.stage.args:
            yield WriteTarget(Path(str(plan.values[name])), "tokenised data", name)
    if plan.stage.entry.caches_reference and environ.get(REFERENCE_VARIABLE):
        reference = Path(environ[REFERENCE_VARIABLE])
        yield WriteTarget(reference, "reference log-probabilities", REFERENCE_VARIABLE)


def free(path: Path) -> tuple[int, int] | None:
    """Bytes that this user may still write at a place that need not be there yet, and its file system.

    None where nothing above it can be read.
    """
    there = _nearest(path)
    try:
        return shutil.disk_usage(there).free, os.stat(there).st_dev
    except (OSError, ValueError):
        return None


def not_writable(path: Path) -> str | None:
    """Why nothing can be written at a place; None where it can. A nameless file is tried."""
    there = _nearest(path)
    if not there.is_dir():
        return f"{there} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        # a full disk is another matter, which has words of its own
        return None if error.errno in DISK_FULL else (error.strerror or str(error))


def _nearest(path: Path) -> Path:
    path = path.absolute()
    return next((one for one in (path, *path.parents) if exists(one)), Path("/"))


def unwritable(found: Iterable[WriteTarget]) -> Iterator[Finding]:
    reported: set[Path] = set()
    for place in found:
        reason = not_writable(place.path)
        if reason is None or place.path in reported:
            continue
        reported.add(place.path)
        message = f"{place.path} ({place.what}) cannot be written: {reason}"
        help = f"set {place.setting} to a writable folder"
        yield launch_finding(
            "error" if place.vital else "warning", "not-writable", message, help, file=str(place.path)
        )


def too_little(needed: Needs | None, output: Path | None, found: Iterable[WriteTarget]) -> Iterator[Finding]:
    available = None if output is None else free(output)
    tight: int | None = None
    if available is not None and needed is not None:
        room, device = available
        message = f"{sized(room)} free at {output}, and this run writes "
        help = "another output_dir, fewer checkpoints (keep_last_n_checkpoints or save_total_limit), "
        help += "or remove what is not needed"
        if room < needed.least:
            tight, message = device, f"{message}at least {sized(needed.least)}: {described(needed)}"
            yield launch_finding("error", "too-little-space", message, help, file=str(output))
        elif room < needed.likely * MARGIN:
            tight, message = device, f"{message}up to {sized(needed.likely)}: {described(needed)}"
            yield launch_finding("warning", "little-space", message, help, file=str(output))
    low: dict[int, tuple[int, list[WriteTarget]]] = {}
    for place in found:
        here = free(place.path)
        if here is not None and here[0] < LOW and here[1] != tight:
            low.setdefault(here[1], (here[0], []))[1].append(place)
    for room, listed in low.values():
        names, first = ", ".join(dict.fromkeys(place.what for place in listed)), listed[0].path
        message = f"{sized(room)} free at {first} ({names})"
        yield launch_finding("warning", "little-space", message, "remove what is not needed there", file=str(first))


def described(needed: Needs) -> str:
    """The sum behind a number: `3 checkpoints of 99 GiB (...), final model 14 GiB`."""
    parts, saved = [], needed.saved
    if saved.together:
        parts.append(f"{saved.together} checkpoint(s) of {sized(saved.checkpoint)} ({saved.formula})")
    if saved.final:
        parts.append(f"the model, {sized(saved.final)}")
    text = f"{', '.join(parts) or 'an adapter'}; {needed.parameters:,} parameters"
    return text + (f"; {sized(needed.there)} of it are there already" if needed.there else "")
