"""Room for what a run will write, and folders that it must be able to write into.

What a checkpoint holds follows from the sources: DeepSpeed keeps the weights and, in 32 bits, a
copy of them with two moments; without it the optimizer's moments have the weights' own type. A size
that is not known is reported as unknown, and stops nothing.
"""

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from launcher.artifacts import architecture, model_config, model_files
from launcher.artifacts.fingerprint import cache_home
from launcher.cache.keys import REFERENCE_VARIABLE
from launcher.errors import DISK_FULL, Finding, InvalidConfig, Severity, launch_finding
from launcher.files import read_json
from launcher.lazy_dataclass import dataclass
from launcher.machine.sizes import format_size, measure_size
from launcher.paths import exists
from launcher.plan.memory.setup import Setup
from launcher.plan.plan import Plan, find_step_limit
from launcher.planning.resume.epochs import find_interval
from launcher.upstream import behaviour
from launcher.upstream.schema import Values

LOW = 2**30
"""Bytes below which a file system is called nearly full, whatever the run will need."""
MARGIN = 1.1
_CHECKPOINTS = ("step_", "epoch_", "checkpoint-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Bytes of a checkpoint and of the final model, and the number of checkpoints.

    `times` is how many are saved in the whole run, None if unknown. `limit` is how many the trainer
    keeps, None for all.
    """

    checkpoint: int
    final: int
    times: int | None
    limit: int | None
    formula: str

    @property
    def together(self) -> int:
        """The checkpoints at once: the trainer deletes an old one after it has saved a new one."""
        counts = []
        if self.times is not None:
            counts.append(self.times)
        if self.limit is not None:
            counts.append(self.limit + 1)
        return min(counts, default=1)

    @property
    def most(self) -> int:
        """Bytes at the fullest moment; the model is saved beside the checkpoints that are left."""
        at_end = self.together
        if self.limit is not None:
            at_end = min(at_end, self.limit)
        return max(self.together * self.checkpoint, at_end * self.checkpoint + self.final)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run will write into its output folder, in bytes at the fullest moment.

    `least` is certain, `likely` is to be expected. Neither counts `there`, the part that the folder
    holds already.
    """

    least: int
    likely: int
    saved: Saved
    parameters: int
    there: int = 0


class Room(NamedTuple):
    """Bytes that this user may still write, and the file system (`st_dev`)."""

    free: int
    device: int


def count_parameters(
    name: object, environ: Mapping[str, str], revision: str | None = None
) -> int | None:
    """The parameters of a model by folder or hub name, from its weights' headers or its config.

    None if neither is on this machine; nothing is downloaded.
    """
    path = model_config.find_config_file(name, environ, revision)
    if path is None:
        return None
    sizes = model_files.read_sizes(path.parent)
    if sizes:
        return sum(map(math.prod, sizes.values()))
    try:
        return architecture.parse_shape(read_json(path)).parameters
    except InvalidConfig:
        return None


def estimate_needs(plan: Plan, output: Path | None, environ: Mapping[str, str]) -> Needs | None:
    """The bytes of checkpoints and the final model; None if the model's size is unknown."""
    values = plan.values
    name = values.get("model_name_or_path")
    count = count_parameters(name, environ, values.get("model_revision"))
    if count is None or values.get("cache_dataset_only") is True:
        return None
    likely = estimate_saved(plan, count)
    if likely is None:
        return None
    watch = plan.stage.options.probe
    if watch is not None and not watch.final_save:
        likely = replace(likely, final=0)
        if plan.stage.entry.keeps_every_state:
            # a trial saves no state of OLMo-core's, either
            likely = replace(likely, times=0)
    # shards of several machines may lie on a disk each, and unknown steps may save nothing
    shard = likely.checkpoint // plan.nodes
    least = replace(likely, checkpoint=shard, times=likely.times or 0)
    there = _measure_checkpoints(output)
    return Needs(
        least=max(0, least.most - there),
        likely=max(0, likely.most - there),
        there=min(there, likely.most),
        saved=likely,
        parameters=count,
    )


def _measure_checkpoints(output: Path | None) -> int:
    """The bytes of checkpoints that lie there: they go as new ones come."""
    if output is None:
        return 0
    total = 0
    with contextlib.suppress(OSError, ValueError):
        for place in output.iterdir():
            if place.name.startswith(_CHECKPOINTS):
                total += measure_size(place)
    return total


def estimate_saved(plan: Plan, count: int, setup: Setup | None = None) -> Saved | None:
    """What a run saves of a model with `count` parameters; None if unknown.

    Only its `setup` tells the size of an adapter and of weights in 4 bits.
    """
    entry = plan.stage.entry
    if entry.by_trainer:
        return _estimate_trl(plan, count, setup)
    if entry.keeps_every_state:
        return _estimate_olmo_core(plan, count)
    return _estimate_open_instruct(plan, count, setup)


def _estimate_open_instruct(plan: Plan, count: int, setup: Setup | None) -> Saved:
    """finetune.py::main[accelerator.save_state(output_dir #1],
    dpo_tune_cache.py::main[accelerator.save_state(output_dir #1] save the whole state;
    finetune.py::main[clean_last_n_checkpoints(args.output_dir #1],
    dpo_tune_cache.py::main[clean_last_n_checkpoints(args.output_dir #1] delete the oldest after
    that; model_utils.py::save_with_accelerate[unwrapped_model.save_pretrained #2] saves the model
    at the end.
    """
    values = plan.values
    final = 2 * count
    has_engine = plan.stage.options.deepspeed is not None or values.get("zero_stage") is not None
    moments = 2 if values.get("dpo_use_paged_optimizer") else 8
    if values.get("use_lora") or values.get("use_qlora"):
        final = 0
        frozen = 2 * count
        formula = "2 bytes of weights a parameter, beside the adapter"
        if values.get("use_qlora"):
            frozen = count // 2
            formula = "weights in 4 bits, at least"
        if setup is not None:
            final = setup.adapter_bytes
            frozen = setup.stored_bytes
        each = 2 * final + frozen
    elif plan.gpus and has_engine:
        each = (2 + 4 + moments) * count
        formula = f"2 + 4 + {moments} bytes a parameter: weights, their 32-bit copy, moments"
    else:
        each = (2 + 4) * count
        formula = "2 + 4 bytes a parameter: weights and moments"
    return Saved(
        checkpoint=each,
        final=final,
        times=_count_saves(plan),
        formula=formula,
        limit=_read_limit(plan, "keep_last_n_checkpoints", 0),
    )


def _read_limit(plan: Plan, name: str, least: int) -> int | None:
    """How many checkpoints the trainer keeps; below `least` it keeps all."""
    limit = plan.values.get(name)
    if isinstance(limit, int) and limit >= least:
        return limit
    return None


def _estimate_olmo_core(plan: Plan, count: int) -> Saved:
    """The oldest checkpoints go where `keep_last_n_checkpoints` limits them
    (olmo_core_utils.py::build_checkpointer_callback[max_checkpoints=max_checkpoints]). Before #1701
    every one stays, the first and the last step's too.
    """
    times = _count_saves(plan)
    final = 4 * count
    formula = "4 + 8 bytes a parameter: weights and moments"
    limit = None
    if plan.stage.schema.does(behaviour.LIMITS_CHECKPOINTS):
        limit = _read_limit(plan, "keep_last_n_checkpoints", 0)
    if limit is None:
        formula += ", none of which is deleted"
    if plan.values.get("cache_logprobs_only"):
        times = 0
        final = 0
    elif times is not None:
        times += 1
    return Saved(checkpoint=12 * count, final=final, times=times, limit=limit, formula=formula)


def _estimate_trl(plan: Plan, count: int, setup: Setup | None) -> Saved | None:
    """transformers/trainer.py::Trainer._save_checkpoint saves model, optimizer and state; the
    oldest go after that.

    Of a PeftModel it saves the adapter alone
    (transformers/trainer.py::Trainer._save[self.model.save_pretrained]).
    """
    values = plan.values
    # `auto` is what the files hold
    width = {"bfloat16": 2, "float16": 2, "float32": 4}.get(str(values.get("dtype")), 2)
    final = width * count
    if values.get("use_peft"):
        if setup is None:
            return None
        final = setup.adapter_bytes
        states = 2 * final
        formula = "the adapter, and its moments"
    elif values.get("save_only_model"):
        states = 0
        formula = f"{width} bytes a parameter: weights"
    elif plan.gpus and plan.stage.options.deepspeed is not None:
        states = (2 + 12) * count
        formula = f"{width} + 2 + 12 bytes a parameter: weights, and DeepSpeed's own with moments"
    else:
        moments = _count_moment_bytes(values, width)
        states = moments * count
        formula = f"{width} + {moments} bytes a parameter: weights and moments"
    if values.get("save_only_model"):
        states = 0
    return Saved(
        checkpoint=final + states,
        final=final,
        times=_count_saves(plan),
        formula=formula,
        limit=_read_limit(plan, "save_total_limit", 1),
    )


def _count_moment_bytes(values: Values, width: int) -> int:
    """Bytes a parameter of the optimizer's state; 0 for a kind that is not described.

    The default is AdamW, under a name that is computed
    (transformers/training_args.py::TrainingArguments[default_optim #1]).
    """
    name = "adamw"
    if values.given("optim"):
        name = str(values["optim"])
    if not name.startswith(("adamw", "paged_adamw")) or "4bit" in name:
        return 0
    if "8bit" in name:
        return 2
    return 2 * width


def _count_saves(plan: Plan) -> int | None:
    """How many periodic checkpoints the whole run saves; None if unknown."""
    every = find_interval(plan)
    entry = plan.stage.entry
    if every is None or plan.steps == 0:
        return 0
    if every == "epoch":
        epochs = plan.values.get(entry.names.epochs)
        has_limit = find_step_limit(plan.stage, plan.values) is not None
        if has_limit or not isinstance(epochs, int | float):
            return None
        return math.ceil(epochs)
    if not isinstance(every, int) or plan.steps is None:
        return None
    if entry.saves_last_step:
        return math.ceil(plan.steps / every)
    return plan.steps // every


class WriteTarget(NamedTuple):
    """A folder that a run writes into; `setting` names another, `vital`: no run without it."""

    path: Path
    what: str
    setting: str
    vital: bool = False


def list_places(
    plan: Plan | None, output: Path | None, runs: Path, environ: Mapping[str, str]
) -> Iterator[WriteTarget]:
    hub = model_config.find_hub_home(environ)
    triton = Path(environ.get("TRITON_HOME") or model_config.find_home(environ), ".triton", "cache")
    if output is not None:
        yield WriteTarget(output, "checkpoints and the model", "output_dir", vital=True)
    yield WriteTarget(runs, "run folders", "LAUNCH_RUNS", vital=True)
    yield WriteTarget(model_config.find_hub_cache(environ), "models from the hub", "HF_HOME")
    by_variable = (
        ("HF_DATASETS_CACHE", "data sets from the hub", hub / "datasets"),
        ("LAUNCH_CACHE", "launch's caches", cache_home(environ)),
        ("TRITON_CACHE_DIR", "compiled kernels", triton),
        ("TMPDIR", "temporary files", tempfile.gettempdir()),
    )
    for variable, what, default in by_variable:
        yield WriteTarget(Path(environ.get(variable) or default), what, variable)
    if plan is None:
        return
    for name in ("dataset_local_cache_dir", "local_cache_dir"):
        if name in plan.stage.args:
            yield WriteTarget(Path(str(plan.values[name])), "tokenised data", name)
    reference = environ.get(REFERENCE_VARIABLE)
    if plan.stage.entry.caches_reference and reference:
        yield WriteTarget(Path(reference), "reference log-probabilities", REFERENCE_VARIABLE)


def measure_room(path: Path) -> Room | None:
    """The room at a place that need not exist yet; None if nothing above it can be read."""
    folder = _find_nearest(path)
    try:
        return Room(shutil.disk_usage(folder).free, os.stat(folder).st_dev)
    except (OSError, ValueError):
        return None


def find_write_fault(path: Path) -> str | None:
    """Why nothing can be written at a place; None if it can. A nameless file is tried."""
    folder = _find_nearest(path)
    if not folder.is_dir():
        return f"{folder} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        if error.errno in DISK_FULL:
            # `check_space` reports it
            return None
        return error.strerror or str(error)


def _find_nearest(path: Path) -> Path:
    """The path, or the first folder above it that exists."""
    path = path.absolute()
    while not exists(path) and path != path.parent:
        path = path.parent
    return path


def check_writable(targets: Iterable[WriteTarget]) -> Iterator[Finding]:
    reported: set[Path] = set()
    for target in targets:
        reason = find_write_fault(target.path)
        if reason is None or target.path in reported:
            continue
        reported.add(target.path)
        severity: Severity = "error" if target.vital else "warning"
        message = f"{target.path} ({target.what}) cannot be written: {reason}"
        help = f"set {target.setting} to a writable folder"
        yield launch_finding(severity, "not-writable", message, help, file=str(target.path))


def check_space(
    needed: Needs | None, output: Path | None, targets: Iterable[WriteTarget]
) -> Iterator[Finding]:
    room = None
    if output is not None:
        room = measure_room(output)
    reported: int | None = None
    if room is not None and needed is not None:
        message = f"{format_size(room.free)} free at {output}, and this run writes "
        help = "another output_dir, fewer checkpoints (keep_last_n_checkpoints or "
        help += "save_total_limit), or remove what is not needed"
        if room.free < needed.least:
            reported = room.device
            message += f"at least {format_size(needed.least)}: {describe_needs(needed)}"
            yield launch_finding("error", "too-little-space", message, help, file=str(output))
        elif room.free < needed.likely * MARGIN:
            reported = room.device
            message += f"up to {format_size(needed.likely)}: {describe_needs(needed)}"
            yield launch_finding("warning", "little-space", message, help, file=str(output))
    full: dict[int, tuple[Room, list[WriteTarget]]] = {}
    for target in targets:
        room = measure_room(target.path)
        if room is not None and room.free < LOW and room.device != reported:
            full.setdefault(room.device, (room, []))[1].append(target)
    for room, on_device in full.values():
        path = on_device[0].path
        names = ", ".join(dict.fromkeys(target.what for target in on_device))
        message = f"{format_size(room.free)} free at {path} ({names})"
        help = "remove what is not needed there"
        yield launch_finding("warning", "little-space", message, help, file=str(path))


def describe_needs(needed: Needs) -> str:
    """The sum behind a number: `3 checkpoint(s) of 99 GiB (...), the model, 14 GiB; ...`."""
    saved = needed.saved
    parts = []
    if saved.together:
        size = format_size(saved.checkpoint)
        parts.append(f"{saved.together} checkpoint(s) of {size} ({saved.formula})")
    if saved.final:
        parts.append(f"the model, {format_size(saved.final)}")
    text = f"{', '.join(parts) or 'an adapter'}; {needed.parameters:,} parameters"
    if needed.there:
        text += f"; {format_size(needed.there)} of it are there already"
    return text
