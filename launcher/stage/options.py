"""launch's own top-level keys of a stage file -> `Options`."""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from launcher.config.keys import DEEPSPEED, KEYS, STAGES, Key, nearest
from launcher.config.load import Config
from launcher.errors import Finding, brief, launch_finding
from launcher.paths import expanded, is_file
from launcher.upstream.trainers import BACKENDS

# what a file of the shape `open_instruct:` may say; the rest of the table is for `stage:` and `args:`
WRAPPED_KEYS = (
    *(name for name in KEYS if name not in {"stage", "backend", "attention", "args", "extends"}),
    "num_gpus",
)
# as an override on a stage file it would say what --gpus says
_INSTEAD = {
    "num_gpus": "the number of GPUs is given with --gpus",
    "open_instruct": "either `stage:` and `args:`, or everything inside `open_instruct:`",
}
_ELSEWHERE = {"stage", "backend", "script", "deepspeed", "slurm", "gates", "args", "extends"}
# those whose value the table alone judges; `num_gpus` is a key of the wrapped shape alone
_BY_TABLE = [
    *(KEYS[name] for name in KEYS if name not in _ELSEWHERE),
    Key("num_gpus", "number", takes="a whole number", least=0),
]

TREND_LOSSES = 8
"""Losses, one a step, of which a trend can be told; fewer say nothing."""
# what a verdict calls a switch that is on, and one that is off
SWITCHED = {"liger": ("engaged", "off"), "packing": ("isolated", "off")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows per optimizer step, and per device and forward pass; None where the file is silent."""

    total: int | None = None
    per_device: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How the probe watches a run.

    What is expected must be proved `within` so many optimizer steps. Packing is tested where
    `isolation` is set. A run hangs when nothing moves for `hang_factor` times the median step and for
    `hang_seconds` at least.
    Without `final_save` it ends after the last step and leaves no model: only trials ask for that, no file.
    """

    within: int = 3
    isolation: bool = True
    hang_factor: int = 20
    hang_seconds: int = 300
    final_save: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the stage file asks of launch itself.

    `script` is the key of a further script of the stage, None for the stage's own. `deepspeed` is a
    file, or None for no DeepSpeed; `attention` are implementations in the order of preference;
    `probe` is None where training runs without it; `rehearse` where the file leaves that to the command.
    `samples` is the number of prompts that the trained model and its base answer for the report.
    `slurm` are options of sbatch, None for one without a value; `gates` those limits of a ladder that are
    not the usual ones.
    """

    stage: str
    backend: str = "open_instruct"
    script: str | None = None
    deepspeed: Path | None = None
    deepspeed_name: str = "none"
    attention: tuple[str, ...] = ()
    mixed_precision: str | None = None
    batch: Batch | None = None
    expect: Mapping[str, str] = field(default_factory=dict)
    on_violation: str = "stop"
    on_hang: str = "report"
    probe: Watch | None = Watch()
    rehearse: bool | None = None
    samples: int = 0
    name: str | None = None
    gpus: int | None = None
    slurm: Mapping[str, str | None] = field(default_factory=dict)
    gates: Mapping[str, Any] = field(default_factory=dict)

    def read_deepspeed(self) -> tuple[Mapping[str, Any] | None, Finding | None]:
        if self.deepspeed is None:
            return None, None
        try:
            content = json.loads(self.deepspeed.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                return content, None
            reason = "it is not a mapping"
        except (OSError, ValueError, RecursionError) as error:
            reason = str(error)
        message = f"{self.deepspeed} is not a DeepSpeed config: {reason}"
        return None, _bad("deepspeed", message, "a JSON mapping, as DeepSpeed reads it")


def read(
    config: Config, stage: str, folders: Sequence[Path] = (), fields: Collection[str] = ()
) -> tuple[Options, list[Finding]]:
    """The options of a config and everything wrong with them; faulty ones keep their default.

    `folders` are further places (a checkout) that a relative DeepSpeed path may start from;
    `fields` are upstream's own names, for those who write them beside `args:`.
    """
    keys = WRAPPED_KEYS if config.shape == "wrapped" else tuple(KEYS)
    findings = [_unknown(key, keys, fields) for key in config.options if key not in keys]
    raw = config.options
    wrong_backend = backend_fault(config)
    backend = str(raw.get("backend") or "open_instruct") if wrong_backend is None else "open_instruct"
    script, wrong_script = entry_of(config, stage, backend)
    findings += [one for one in (wrong_backend, wrong_script) if one is not None]
    values: dict[str, Any] = {}
    for key in _BY_TABLE:
        values[key.name], faults = key.read(raw.get(key.name))
        findings += [_bad(*one) for one in faults]
    # two that a module of their own reads, imported only where a file has one
    for name in ("slurm", "gates"):
        if raw.get(name) is not None:
            values[name], faulty = _read_elsewhere(config, name)
            findings += faulty
    if values["attention"] and BACKENDS[backend].STAGES[script].best_attention:
        values["attention"] = None
        message = "`attention` is read for TRL only: open-instruct takes the first that is installed"
        findings.append(_bad("attention", message, "delete the line"))
    deepspeed, deepspeed_name, wrong_deepspeed = _deepspeed(config, folders)
    findings += [] if wrong_deepspeed is None else [wrong_deepspeed]
    if (batch := values["batch"]) is not None:
        values["batch"] = Batch(total=batch.get("global"), per_device=batch.get("per_device"))
    if values["expect"] is not None:
        values["expect"] = {point: state or "any" for point, state in values["expect"].items()}
    probe, gpus = values.pop("probe"), values.pop("num_gpus")
    watch = {name: value for name, value in (probe or {}).items() if value is not None}
    return Options(
        stage=stage,
        backend=backend,
        script=None if script == stage else script,
        deepspeed=deepspeed,
        deepspeed_name=deepspeed_name,
        probe=None if probe is False else Watch(**watch),
        gpus=gpus,
        # what the file leaves open, or says wrongly, keeps its default
        **{name: value for name, value in values.items() if value is not None},
    ), findings


def _read_elsewhere(config: Config, key: str) -> tuple[Mapping[str, Any], list[Finding]]:
    from launcher.runs import slurm
    from launcher.stage import gates

    def complain(code: str, below: str, message: str, help: str | None) -> Finding:
        return replace(_bad(f"{key}.{below}" if below else key, message, help), code=code)

    reader: Any = {"slurm": slurm.read_options, "gates": gates.read}[key]
    values, findings = reader(config.options[key], complain)
    return values, findings


def stage_of(config: Config) -> str | None:
    """The stage that a file names: by `stage`, or by the script of the wrapped shape."""
    stage = config.options.get("stage")
    if config.shape == "wrapped":
        key = _script_key(config.options.get("script"), "open_instruct")
        return None if key is None else _stage_of(key)
    return stage if isinstance(stage, str) and stage in STAGES else None


def entry_of(config: Config, stage: str, backend: str) -> tuple[str, Finding | None]:
    """Which of a backend's scripts a file of this stage asks for, by its key, and what is wrong there.

    `script:` may be the key or a file name of upstream's; without it the stage's own script runs.
    """
    given = config.options.get("script")
    if given is None:
        return stage, None
    entries = BACKENDS[backend].STAGES
    key = _script_key(given, backend)
    if key is not None and _stage_of(key, backend) == stage:
        return key, None
    names = [name for name in entries if _stage_of(name, backend) == stage]
    if key is not None:
        message = f"`script: {brief(given)}` belongs to {_stage_of(key, backend)}, the file's stage is {stage}"
    else:
        message = f"`{brief(given)}` is not a script that launch starts"
        names = difflib.get_close_matches(str(given), entries, n=1) or names
    return stage, _bad("script", message, nearest(str(given), names))


def _script_key(given: Any, backend: str) -> str | None:
    """The key of the script that a text names: itself, or a path that ends in upstream's file name."""
    entries = BACKENDS[backend].STAGES
    if not isinstance(given, str) or given in entries:
        return given if isinstance(given, str) else None
    name = Path(given).name
    # at a checkout that has it, or before
    for key, entry in entries.items():
        if name and name in (Path(entry.script).name, Path(entry.renamed).name):
            return key
    return None


def _stage_of(key: str, backend: str = "open_instruct") -> str:
    return BACKENDS[backend].STAGES[key].stage or key


def stage_fault(config: Config) -> Finding | None:
    """Why a file that should name its stage does not; None for flat files, which need not."""
    if stage_of(config) is not None or (config.shape == "flat" and "stage" not in config.options):
        return None
    key, what, names, inside = "stage", "stage", [*STAGES], ""
    if config.shape == "wrapped":
        key, what, inside = "script", "script that launch starts", " inside `open_instruct:`"
        names = [Path(entry.script).name for entry in BACKENDS["open_instruct"].STAGES.values()]
    help = f"one of {', '.join(names)}"
    if (given := config.options.get(key)) is None:
        return _bad(key, f"`{key}` is missing", f"add `{key}:`{inside}, {help}")
    return _bad(key, f"`{brief(given)}` is not a {what}", help)


def backend_fault(config: Config) -> Finding | None:
    _, faults = KEYS["backend"].read(config.options.get("backend"))
    return _bad(*faults[0]) if faults else None


def _bad(key: str, message: str, help: str | None = None) -> Finding:
    return launch_finding("error", f"bad-{key.partition('.')[0].replace('_', '-')}", message, help, key=key)


def _unknown(key: str, keys: tuple[str, ...], fields: Collection[str]) -> Finding:
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    if key in _INSTEAD:
        help = _INSTEAD[key]
    elif key in fields:
        help = f"`{key}` is upstream's: write it under `args:`"
    elif near:
        help = f"did you mean `{near[0]}`?"
    else:
        help = f"upstream's own names go under `args:`; ours are {', '.join(keys)}"
    return launch_finding("error", "unknown-option", f"`{key}` is not a stage-file option", help, key=key)


def deepspeed_file(name: str) -> Path:
    return Path(str(files("launcher.plan.deepspeed").joinpath(f"{name}.json")))


def _deepspeed(config: Config, folders: Sequence[Path]) -> tuple[Path | None, str, Finding | None]:
    given = config.options.get("deepspeed")
    if given is None or given is False or given == "none":
        return None, "none", None
    if given in DEEPSPEED:
        return deepspeed_file(given), str(given), None
    if isinstance(given, str):
        # beside the stage file, or where launch was started
        for base in (Path(), config.path.parent, *folders):
            path = base / expanded(given)
            if is_file(path):
                return path.absolute(), path.stem, None
    message = f"`{brief(given)}` is neither a DeepSpeed file nor a known name"
    return (None, "none", _bad("deepspeed", message, nearest(str(given), ("a path", *DEEPSPEED, "none"))))
