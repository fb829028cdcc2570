"""launch's own top-level keys of a stage file -> `Options`."""

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from launcher.config.keys import DEEPSPEED, KEYS, STAGES, Key, suggest_name
from launcher.config.load import Config
from launcher.errors import Finding, launch_finding, shorten
from launcher.lazy_dataclass import dataclass
from launcher.paths import PACKAGE, expand_user, is_file
from launcher.upstream.trainers import BACKENDS

# the keys of a file of the shape `open_instruct:`
WRAPPED_KEYS = (
    *(name for name in KEYS if name not in {"stage", "backend", "attention", "args", "extends"}),
    "num_gpus",
)
_INSTEAD = {
    "num_gpus": "the number of GPUs is given with --gpus",
    "open_instruct": "either `stage:` and `args:`, or everything inside `open_instruct:`",
}
_ELSEWHERE = {"stage", "backend", "script", "deepspeed", "slurm", "gates", "args", "extends"}
# the keys that the table alone reads
_BY_TABLE = [
    *(key for name, key in KEYS.items() if name not in _ELSEWHERE),
    Key("num_gpus", "number", takes="a whole number", least=0),
]

TREND_LOSSES = 8
"""The fewest losses, one a step, that show a trend."""
# the states of a verdict's point that is on, and of one that is off
SWITCHED = {"liger": ("engaged", "off"), "packing": ("isolated", "off")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows per optimizer step, and per device and forward pass; None if the file is silent."""

    total: int | None = None
    per_device: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How the probe watches a run.

    What is expected must be proved `within` so many optimizer steps. `isolation` tests packing. A
    run hangs if nothing moves for `hang_factor` times the median step and for `hang_seconds` at
    least. Without `final_save` it ends after the last step and saves no model: only trials ask for
    that, no file.
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
    `probe` is None if training runs without it; `rehearse` if the file leaves that to the command.
    `samples` is the number of prompts that the trained model and its base answer for the report.
    `slurm` are options of sbatch, None for one without a value; `gates` those limits of a ladder
    that are not the defaults.
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
        return None, _report_bad("deepspeed", message, "a JSON mapping, as DeepSpeed reads it")


def read_stage_options(
    config: Config, stage: str, checkout: Path | None = None, fields: Collection[str] = ()
) -> tuple[Options, list[Finding]]:
    """The options of a config and everything wrong with them; faulty ones keep their default.

    A relative DeepSpeed path may start from `checkout` too. `fields` are upstream's own names, for
    those who write them beside `args:`.
    """
    raw = config.options
    keys = tuple(KEYS)
    if config.shape == "wrapped":
        keys = WRAPPED_KEYS
    findings = [_report_unknown(key, keys, fields) for key in raw if key not in keys]
    backend = "open_instruct"
    wrong_backend = find_backend_fault(config)
    if wrong_backend is not None:
        findings.append(wrong_backend)
    elif raw.get("backend"):
        backend = str(raw["backend"])
    script, wrong_script = read_entry_key(config, stage, backend)
    if wrong_script is not None:
        findings.append(wrong_script)
    values, faults = _read_values(config)
    findings += faults
    if values.get("attention") and BACKENDS[backend].STAGES[script].best_attention:
        del values["attention"]
        message = "`attention` is read for TRL only: "
        message += "open-instruct takes the first that is installed"
        findings.append(_report_bad("attention", message, "delete the line"))
    deepspeed, deepspeed_name, wrong_deepspeed = _find_deepspeed(config, checkout)
    if wrong_deepspeed is not None:
        findings.append(wrong_deepspeed)
    if script != stage:
        values["script"] = script
    options = Options(
        stage=stage, backend=backend, deepspeed=deepspeed, deepspeed_name=deepspeed_name, **values
    )
    return options, findings


def _read_values(config: Config) -> tuple[dict[str, Any], list[Finding]]:
    """The options that do not hang on the trainer, where a file has them, and what is wrong."""
    raw = config.options
    values: dict[str, Any] = {}
    findings: list[Finding] = []
    for key in _BY_TABLE:
        values[key.name], faults = key.read(raw.get(key.name))
        findings += [_report_bad(*fault) for fault in faults]
    for name in ("slurm", "gates"):
        if raw.get(name) is not None:
            values[name], faulty = _read_slurm_or_gates(config, name)
            findings += faulty
    values["gpus"] = values.pop("num_gpus")
    batch = values["batch"]
    if batch is not None:
        values["batch"] = Batch(total=batch.get("global"), per_device=batch.get("per_device"))
    if values["expect"] is not None:
        values["expect"] = {point: state or "any" for point, state in values["expect"].items()}
    probe = values.pop("probe")
    written = _drop_none(values)
    if probe is False:
        written["probe"] = None
    elif probe is not None:
        written["probe"] = Watch(**_drop_none(probe))
    return written, findings


def _drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _read_slurm_or_gates(config: Config, key: str) -> tuple[Mapping[str, Any], list[Finding]]:
    """A key that a module of its own reads, imported only if a file has the key."""
    from launcher.runs import slurm
    from launcher.stage import gates

    value = config.options[key]

    def complain(code: str, part: str, message: str, help: str | None) -> Finding:
        place = key
        if part:
            place = f"{key}.{part}"
        return launch_finding("error", code, message, help, key=place)

    if key == "slurm":
        return slurm.read_options(value, complain)
    return gates.read_limits(value, complain)


def find_stage(config: Config) -> str | None:
    """The stage that a file names: by `stage`, or by the script of the wrapped shape."""
    if config.shape == "wrapped":
        key = _find_script_key(config.options.get("script"), "open_instruct")
        if key is None:
            return None
        return _find_stage(key)
    stage = config.options.get("stage")
    if isinstance(stage, str) and stage in STAGES:
        return stage
    return None


def read_entry_key(config: Config, stage: str, backend: str) -> tuple[str, Finding | None]:
    """The key of the script that a file of this stage asks for, and what is wrong there.

    `script:` may be the key or a file name of upstream's; without it the stage's own script runs.
    """
    script = config.options.get("script")
    if script is None:
        return stage, None
    key = _find_script_key(script, backend)
    entries = BACKENDS[backend].STAGES
    names = [name for name in entries if _find_stage(name, backend) == stage]
    if key is None:
        message = f"`{shorten(script)}` is not a script that launch starts"
        names = difflib.get_close_matches(str(script), entries, n=1) or names
    elif key in names:
        return key, None
    else:
        belongs = f"belongs to {_find_stage(key, backend)}"
        message = f"`script: {shorten(script)}` {belongs}, the file's stage is {stage}"
    return stage, _report_bad("script", message, suggest_name(str(script), names))


def _find_script_key(script: Any, backend: str) -> str | None:
    """The key of the script that a text names: itself, or a path that ends in its file name."""
    entries = BACKENDS[backend].STAGES
    if not isinstance(script, str):
        return None
    if script in entries:
        return script
    name = Path(script).name
    for key, entry in entries.items():
        # some checkouts have it under a new name
        if name and name in (Path(entry.script).name, Path(entry.renamed).name):
            return key
    return None


def _find_stage(key: str, backend: str = "open_instruct") -> str:
    return BACKENDS[backend].STAGES[key].stage or key


def find_stage_fault(config: Config) -> Finding | None:
    """Why a file that should name its stage does not; None for flat files, which need not."""
    if find_stage(config) is not None:
        return None
    if config.shape == "flat" and "stage" not in config.options:
        return None
    key = "stage"
    noun = "stage"
    place = ""
    names = list(STAGES)
    if config.shape == "wrapped":
        key = "script"
        noun = "script that launch starts"
        place = " inside `open_instruct:`"
        entries = BACKENDS["open_instruct"].STAGES.values()
        names = [Path(entry.script).name for entry in entries]
    help = f"one of {', '.join(names)}"
    value = config.options.get(key)
    if value is None:
        return _report_bad(key, f"`{key}` is missing", f"add `{key}:`{place}, {help}")
    return _report_bad(key, f"`{shorten(value)}` is not a {noun}", help)


def find_backend_fault(config: Config) -> Finding | None:
    _, faults = KEYS["backend"].read(config.options.get("backend"))
    if not faults:
        return None
    return _report_bad(*faults[0])


def _report_bad(key: str, message: str, help: str | None = None) -> Finding:
    code = f"bad-{key.partition('.')[0].replace('_', '-')}"
    return launch_finding("error", code, message, help, key=key)


def _report_unknown(key: str, keys: tuple[str, ...], fields: Collection[str]) -> Finding:
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    if key in _INSTEAD:
        help = _INSTEAD[key]
    elif key in fields:
        help = f"`{key}` is upstream's: write it under `args:`"
    elif near:
        help = f"did you mean `{near[0]}`?"
    else:
        help = f"upstream's own names go under `args:`; ours are {', '.join(keys)}"
    message = f"`{key}` is not a stage-file option"
    return launch_finding("error", "unknown-option", message, help, key=key)


def find_deepspeed_file(name: str) -> Path:
    return PACKAGE / "plan" / "deepspeed" / f"{name}.json"


def _find_deepspeed(
    config: Config, checkout: Path | None
) -> tuple[Path | None, str, Finding | None]:
    """The DeepSpeed file, its name, and what is wrong with them."""
    value = config.options.get("deepspeed")
    if value is None or value is False or value == "none":
        return None, "none", None
    if value in DEEPSPEED:
        return find_deepspeed_file(value), str(value), None
    if isinstance(value, str):
        # where launch was started, or beside the stage file
        folders = [Path(), config.path.parent]
        if checkout is not None:
            folders.append(checkout)
        for folder in folders:
            path = folder / expand_user(value)
            if is_file(path):
                return path.absolute(), path.stem, None
    message = f"`{shorten(value)}` is neither a DeepSpeed file nor a known name"
    help = suggest_name(str(value), ("a path", *DEEPSPEED, "none"))
    return None, "none", _report_bad("deepspeed", message, help)
