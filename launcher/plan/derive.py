"""A stage on GPUs -> the values that launch sets where the stage file is silent, each with its
reason.

`STEPS` names what derives them, in turn: a new value is one more function there. Two kinds of
values are known only later and come on top: the folders of the caches
(`cache.keys.Cache.arguments`) and what a resumed run needs
(`planning.resume.decision.Decision.derived`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import InvalidConfig
from launcher.lazy_dataclass import dataclass
from launcher.stage.batch import report_impossible_batch
from launcher.stage.stage import Stage, choose_attention
from launcher.upstream.citations import render_citations

if TYPE_CHECKING:
    from launcher.rules.trl.attention import Choice


@dataclass(frozen=True, slots=True)
class Derived:
    """A value that launch sets where the stage file is silent, and why.

    `derive_from_script` says that the entry script needs it: then a note tells of it.
    """

    value: Any
    why: str
    of_script: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """A batch over `devices`, which are groups of processes that share their rows.

    `per_device` rows times `accumulation` forward passes times `devices` are the `rows` of an
    optimizer step.
    """

    per_device: int
    accumulation: int
    devices: int

    @property
    def rows(self) -> int:
        return self.per_device * self.accumulation * self.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A stage on `gpus` of each of `nodes` machines, 0 is the CPU.

    `packages` are those of the trainer's Python, None where they are not known. `output` is where
    the model goes when the stage file names no place.
    """

    stage: Stage
    gpus: int
    nodes: int
    batch: BatchSplit
    attention: Choice | None
    output: Path | None


def make_setting(
    stage: Stage, *, gpus: int, nodes: int, packages: Mapping[str, str] | None, output: Path | None
) -> Setting:
    """Raises InvalidConfig with the nearest possible splits where the global batch cannot be
    divided.
    """
    attention = choose_attention(stage.options, stage.values, gpus=gpus * nodes, packages=packages)
    return Setting(
        stage=stage,
        gpus=gpus,
        nodes=nodes,
        batch=split_batch(stage, gpus, nodes),
        attention=attention,
        output=output,
    )


def split_batch(stage: Stage, gpus: int, nodes: int) -> BatchSplit:
    """The batch of a stage over these GPUs; see `setting` for what is raised."""
    names = stage.entry.names
    batch = stage.options.batch
    processes = max(1, gpus) * nodes
    # GPUs that share a sequence work on the same rows
    # (finetune.py::main[= accelerator.num_processes])
    shared = int(stage.values.get(names.shared) or 1)
    devices = max(1, processes // max(1, shared))
    per_device = int(stage.values[names.per_device])
    if batch is not None and batch.per_device:
        per_device = batch.per_device
    if batch is None or batch.total is None:
        accumulation = int(stage.values[names.accumulation])
    else:
        accumulation, rest = divmod(batch.total, per_device * devices)
        if rest:
            raise InvalidConfig(
                report_impossible_batch(
                    stage.config, total=batch.total, per_device=per_device, devices=devices
                )
            )
    return BatchSplit(per_device=per_device, accumulation=accumulation, devices=devices)


Step = Callable[[Setting], Iterator[tuple[str, Derived]]]


def derive_from_batch(setting: Setting) -> Iterator[tuple[str, Derived]]:
    """The split of `batch:`, in the trainer's own arguments."""
    stage = setting.stage
    batch = setting.batch
    if stage.options.batch is None:
        return
    names = stage.entry.names
    why = f"batch of {batch.rows} over {batch.devices} device(s)"
    split = {names.per_device: batch.per_device, names.accumulation: batch.accumulation}
    for name, number in split.items():
        if _is_open(stage, name):
            yield name, Derived(number, why)


def derive_from_script(setting: Setting) -> Iterator[tuple[str, Derived]]:
    """What the entry script needs: always, or with these values on these GPUs."""
    stage = setting.stage
    always = [(name, *needed) for name, needed in stage.entry.derived.items()]
    for name, value, why in (*always, *stage.entry.settle(stage.values, setting.gpus)):
        if _is_open(stage, name):
            yield name, Derived(value, render_citations(why), of_script=True)


def derive_from_attention(setting: Setting) -> Iterator[tuple[str, Derived]]:
    """The implementation that `attention:` comes to here."""
    choice = setting.attention
    if choice is None or choice.name is None:
        return
    why = "the first of `attention:`"
    if choice.why:
        why = f"`attention:` ({choice.why})"
    yield "attn_implementation", Derived(choice.name, why)


def derive_from_output(setting: Setting) -> Iterator[tuple[str, Derived]]:
    """The model's folder inside the run folder."""
    stage = setting.stage
    names = stage.entry.names
    if setting.output is None or not _is_open(stage, names.output):
        return
    why = "the stage file has no output_dir: inside the run folder"
    yield names.output, Derived(str(setting.output), why)
    if names.exact_output is not None and names.exact_output in stage.schema.fields:
        yield names.exact_output, Derived(True, why)


STEPS: tuple[Step, ...] = (
    derive_from_batch,
    derive_from_script,
    derive_from_attention,
    derive_from_output,
)


def derive(setting: Setting) -> dict[str, Derived]:
    """The values of all steps, by argument."""
    derived: dict[str, Derived] = {}
    for step in STEPS:
        derived.update(step(setting))
    return derived


def _is_open(stage: Stage, name: str) -> bool:
    """Whether the stage file leaves an argument to launch."""
    return stage.args.get(name) is None
