"""GPUs -> `Plan`: batch x accumulation, steps, and the arguments that upstream will be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.backends import BACKENDS
from launcher.errors import Finding, InvalidConfig
from launcher.schema import Values
from launcher.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A value that launch sets where the stage file is silent, and why."""

    value: Any
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run on how many devices.

    `gpus` 0 is the CPU. `per_device` x `accumulation` x devices = `global_batch`, in rows. `rows` and
    `steps` are None where they cannot be known without reading data elsewhere. `values` are the typed
    values, derived ones included.
    """

    stage: Stage
    gpus: int
    nodes: int
    per_device: int
    accumulation: int
    global_batch: int
    rows: int | None
    steps: int | None
    derived: Mapping[str, Derived]
    values: Values
    findings: tuple[Finding, ...]

    @property
    def processes(self) -> int:
        """Training processes over all nodes; the CPU runs one a node."""
        return max(1, self.gpus) * self.nodes

    def arguments(self) -> dict[str, list[str]]:
        """Upstream's flags and their words, the file's first, then the derived ones."""
        schema = self.stage.schema
        given = {**self.stage.args, **{k: d.value for k, d in self.derived.items()}}
        return {name: schema.words(name, value) for name, value in given.items()}

    def as_json(self) -> dict[str, Any]:
        """One entry of the `gpus` list in the plan's JSON contract."""
        return {
            "gpus": self.gpus,
            "nodes": self.nodes,
            "per_device": self.per_device,
            "accumulation": self.accumulation,
            "global": self.global_batch,
            "rows": self.rows,
            "steps": self.steps,
        }


def make(stage: Stage, *, gpus: int, nodes: int = 1, output: Path | None = None) -> Plan:
    """Solve the batch for this many GPUs (a node) and settle every argument.

    `output` is where the model goes when the stage file names no place. Raises InvalidConfig with
    the nearest possible splits where the global batch cannot be divided.
    """
    names = stage.entry.names
    per_device, accumulation = _solve(stage, max(1, gpus) * nodes)
    derived: dict[str, Derived] = {}
    if stage.options.batch is not None:
        total = per_device * accumulation * max(1, gpus) * nodes
        why = f"batch of {total} over {max(1, gpus) * nodes} device(s)"
        for name, number in ((names.per_device, per_device), (names.accumulation, accumulation)):
            if stage.args.get(name) is None:
                derived[name] = Derived(value=number, why=why)
    notes = []
    for name, (value, why) in stage.entry.derived.items():
        if name not in stage.args:
            derived[name] = Derived(value=value, why=why)
            notes.append(_note(stage, name, value, why))
    if names.output not in stage.args and output is not None:
        why = "the stage file names no place: inside the run folder"
        derived[names.output] = Derived(value=str(output), why=why)
        if "do_not_randomize_output_dir" in stage.schema.fields:
            derived.setdefault("do_not_randomize_output_dir", Derived(value=True, why=why))
    values = Values(stage.schema, {**stage.args, **{k: d.value for k, d in derived.items()}})
    rows = count_rows(stage, values)
    world = per_device * accumulation * max(1, gpus) * nodes
    return Plan(
        stage=stage, gpus=gpus, nodes=nodes, per_device=per_device, accumulation=accumulation,
        global_batch=world, rows=rows, derived=derived, values=values,
        steps=_steps(values, names.max_steps, names.epochs, rows, world), findings=tuple(notes),
    )  # fmt: skip


def output_folder(plan: Plan) -> Path | None:
    """Where upstream will put the final model."""
    return BACKENDS[plan.stage.options.backend].output_folder(plan.values)


def _note(stage: Stage, name: str, value: Any, why: str) -> Finding:
    return Finding(
        severity="note", layer="launch", code="derived", key=f"args.{name}",
        message=f"`{name}: {value}` is set by launch: {why}", file=str(stage.config.path),
    )  # fmt: skip


def _solve(stage: Stage, devices: int) -> tuple[int, int]:
    """Rows per device and forward pass, and forward passes per optimizer step."""
    names, batch = stage.entry.names, stage.options.batch
    if batch is None:
        return int(stage.values[names.per_device]), int(stage.values[names.accumulation])
    findings = []
    for name, wanted in ((names.per_device, batch.per_device), (names.accumulation, batch.total)):
        if stage.args.get(name) is not None and (name == names.accumulation or wanted is not None):
            findings.append(_twice(stage, name))
    if findings:
        raise InvalidConfig(findings)
    per_device = batch.per_device or int(stage.values[names.per_device])
    total = batch.total
    if total is None:
        return per_device, int(stage.values[names.accumulation])
    if total % (per_device * devices):
        raise InvalidConfig(_impossible(stage, total, per_device, devices))
    return per_device, total // (per_device * devices)


def _twice(stage: Stage, name: str) -> Finding:
    origin = stage.config.origin(f"args.{name}")
    return Finding(
        severity="error", layer="launch", code="batch-twice", key=f"args.{name}",
        message=f"`{name}` and `batch:` both set the batch", help="keep `batch:`, delete this line",
        file=origin.file, line=origin.line,
    )  # fmt: skip


def _impossible(stage: Stage, total: int, per_device: int, devices: int) -> Finding:
    unit = per_device * devices
    lower, upper = total // unit * unit, -(-total // unit) * unit
    totals = [str(n) for n in (lower, upper) if n]
    options = [f"batch.global={' or '.join(totals)} with per_device {per_device}"]
    if total % devices == 0:
        share = total // devices
        divisors = [n for n in range(1, share + 1) if share % n == 0]
        near = sorted(divisors, key=lambda n: (abs(n - per_device), n))[:2]
        options.append(
            f"batch.per_device={' or '.join(map(str, sorted(near)))} with global {total}"
        )
    origin = stage.config.origin("batch.global")
    return Finding(
        severity="error", layer="launch", code="impossible-batch", key="batch.global",
        message=f"a global batch of {total} cannot be split into {per_device} rows on "
        f"{devices} device(s)",
        help="nearest possible: " + "; ".join(options), file=origin.file, line=origin.line,
    )  # fmt: skip


def _steps(values: Values, max_steps: str, epochs: str, rows: int | None, batch: int) -> int | None:
    """Optimizer steps in all; upstream rounds the last batch of an epoch up (finetune.py:683)."""
    limit = values[max_steps]
    if isinstance(limit, int) and limit > 0:
        return limit
    if rows is None or not isinstance(values[epochs], int | float):
        return None
    return int(-(-rows // batch) * values[epochs])


def count_rows(stage: Stage, values: Values) -> int | None:
    """Rows before filtering, from counts in the mixer list and from local files; None if unknown."""
    listed = values.get(stage.entry.names.data)
    if isinstance(listed, list) and len(listed) % 2 == 0:
        counted = [_rows_of(str(n), str(a)) for n, a in zip(listed[::2], listed[1::2], strict=True)]
        return None if not counted or None in counted else sum(c for c in counted if c is not None)
    if isinstance(listed, str):
        split = str(values.get("dataset_train_split") or "train")
        return lines_of(sorted(Path(listed).expanduser().glob(f"{split}*.jsonl")))
    return None


def _rows_of(name: str, amount: str) -> int | None:
    if amount.isdigit():
        return int(amount)
    path = Path(name).expanduser()
    rows = lines_of([path]) if name.endswith(".jsonl") and path.is_file() else None
    try:
        return None if rows is None else int(rows * float(amount))
    except ValueError:
        return None


def lines_of(paths: Sequence[Path]) -> int | None:
    """Lines of local .jsonl files in all; None where there are none or they are too large to count."""
    if not paths or sum(path.stat().st_size for path in paths) > 64 * 2**20:
        return None
    return sum(path.read_bytes().count(b"\n") for path in paths)
