"""launch's own top-level keys of a stage file -> `Options`."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as parts_of
from importlib.resources import files
from pathlib import Path
from typing import Any

from launcher.backends import BACKENDS
from launcher.config import Config
from launcher.errors import Finding, brief
from launcher.paths import expanded, is_file

STAGES = ("sft", "dpo")
PRECISIONS = ("no", "fp16", "bf16")
DEEPSPEED = ("zero1", "zero1_fp32_comm", "zero2", "zero2_fp32_comm", "zero3", "zero3_offload")
ON_VIOLATION = ("stop", "warn")
ON_HANG = ("report", "stop")
_ON, _OFF = ("on", "yes", "true"), ("off", "no", "false")
_SHARED = (
    "mixed_precision", "batch", "expect", "on_violation", "on_hang", "probe", "name", "slurm",
    "skypilot", "gates",
)  # fmt: skip
KEYS = ("stage", "backend", "script", "deepspeed", "attention", *_SHARED, "args", "extends")
WRAPPED_KEYS = ("script", "deepspeed_config", "num_gpus", *_SHARED)
# as an override on a stage file it would say what --gpus says
_ELSEWHERE = {
    "num_gpus": "the number of GPUs is given with --gpus",
    "open_instruct": "either `stage:` and `args:`, or everything inside `open_instruct:`",
}
SCRIPTS = {
    Path(entry.script).name: name for name, entry in BACKENDS["open_instruct"].STAGES.items()
}
"""open-instruct's scripts by file name: the wrapped shape names its stage by one."""

# What may be expected of each point of a verdict; `any` switches the point off.
EXPECT: Mapping[str, tuple[str, ...]] = {
    "liger": ("engaged", "off", "any"),
    "packing": ("isolated", "on", "off", "any"),
    "attention": (
        "any", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3",
        "flash_attention_4",
    ),
    "batch": ("planned", "any"),
    "dataset_cache": ("hit", "miss", "any"),
    "reference_cache": ("hit", "miss", "any"),
    "loss": ("finite", "any"),
    "trend": ("falling", "any"),
    "memory": ("ok", "any"),
    "finish": ("completed", "any"),
}  # fmt: skip
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
    `hang_seconds` at least. The GPU's kernels of optimizer step `profile` are recorded, where it is set.
    Without `final_save` it ends after the last step and leaves no model: only trials ask for that, no file.
    """

    within: int = 3
    isolation: bool = True
    hang_factor: int = 20
    hang_seconds: int = 300
    final_save: bool = True
    profile: int | None = None


WATCHED = tuple(part.name for part in parts_of(Watch) if part.name != "final_save")
SWITCHES = ("isolation",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the stage file asks of launch itself.

    `script` is the key of a further script of the stage, None for the stage's own. `deepspeed` is a
    file, or None for no DeepSpeed; `attention` are implementations in the order of preference;
    `probe` is None where training runs without it.
    `slurm` are options of sbatch, None for one without a value; `skypilot` what goes into a task;
    `gates` those limits of a ladder that are not the usual ones.
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
    name: str | None = None
    gpus: int | None = None
    slurm: Mapping[str, str | None] = field(default_factory=dict)
    skypilot: Mapping[str, Any] = field(default_factory=dict)
    gates: Mapping[str, Any] = field(default_factory=dict)


def read(
    config: Config, stage: str, folders: Sequence[Path] = (), fields: Collection[str] = ()
) -> tuple[Options, list[Finding]]:
    """The options of a config and everything wrong with them; faulty ones keep their default.

    `folders` are further places (a checkout) that a relative DeepSpeed path may start from;
    `fields` are upstream's own names, for those who write them beside `args:`.
    """
    findings = unknown(config, fields)
    raw = config.options
    unlike = backend_fault(config)
    findings += [unlike] if unlike is not None else []
    backend = str(raw.get("backend") or "open_instruct") if unlike is None else "open_instruct"
    precision = raw.get("mixed_precision")
    # a plain `no` is a boolean in YAML
    precision = "no" if precision is False else precision
    if precision is not None and precision not in PRECISIONS:
        message = f"`{brief(precision)}` is no precision"
        findings.append(_bad(config, "mixed_precision", message, _one_of(PRECISIONS)))
        precision = None
    deepspeed, name = _deepspeed(config, folders, findings)
    key, fault = entry_of(config, stage, backend)
    findings += [fault] if fault is not None else []
    return Options(
        stage=stage, backend=backend, script=None if key == stage else key, deepspeed=deepspeed,
        deepspeed_name=name,
        attention=_attention(config, backend, findings),
        mixed_precision=precision, batch=_batch(config, findings), expect=_expect(config, findings),
        on_violation=_choice(config, "on_violation", ON_VIOLATION, findings),
        on_hang=_choice(config, "on_hang", ON_HANG, findings), probe=_probe(config, findings),
        name=_name(config, findings), gpus=_gpus(config, findings),
        slurm=_elsewhere(config, "slurm", findings),
        skypilot=_elsewhere(config, "skypilot", findings), gates=_elsewhere(config, "gates", findings),
    ), findings  # fmt: skip


def unknown(config: Config, fields: Collection[str] = ()) -> list[Finding]:
    """A finding for every top-level key that is none of ours."""
    keys = WRAPPED_KEYS if config.shape == "wrapped" else KEYS
    return [_unknown(config, key, keys, fields) for key in config.options if key not in keys]


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
    if key is None:
        near = difflib.get_close_matches(str(given), entries, n=1)
        message = f"`{brief(given)}` is no script that launch starts"
        help = f"did you mean `{near[0]}`?" if near else _one_of(names)
        return stage, _bad(config, "script", message, help)
    message = f"`script: {brief(given)}` belongs to {_stage_of(key, backend)}, the file's stage is {stage}"
    return stage, _bad(config, "script", message, _one_of(names))


def _script_key(given: Any, backend: str) -> str | None:
    """The key of the script that a text names: itself, or a path that ends in upstream's file name."""
    entries = BACKENDS[backend].STAGES
    if not isinstance(given, str) or given in entries:
        return given if isinstance(given, str) else None
    name = Path(given).name
    return next((key for key, one in entries.items() if Path(one.script).name == name), None)


def _stage_of(key: str, backend: str = "open_instruct") -> str:
    return BACKENDS[backend].STAGES[key].stage or key


def stage_fault(config: Config) -> Finding | None:
    """Why a file that should name its stage does not; None for flat files, which need not."""
    if stage_of(config) is not None or (config.shape == "flat" and "stage" not in config.options):
        return None
    if config.shape == "wrapped":
        script = config.options.get("script")
        if script is None:
            help = f"add `script:` inside `open_instruct:`, {_one_of(SCRIPTS)}"
            return _bad(config, "script", "`script` is missing", help)
        message = f"`{brief(script)}` is no script that launch starts"
        return _bad(config, "script", message, _one_of(SCRIPTS))
    given = config.options.get("stage")
    if given is None:
        return _bad(config, "stage", "`stage` is missing", "add `stage: sft` or `stage: dpo`")
    return _bad(config, "stage", f"`{brief(given)}` is no stage", _one_of(STAGES))


def backend_fault(config: Config) -> Finding | None:
    """Why the backend that a file names is none; None where it is one, or none is named."""
    given = config.options.get("backend")
    if given is None or (isinstance(given, str) and given in BACKENDS):
        return None
    near = difflib.get_close_matches(str(given).lower().replace("-", "_"), BACKENDS, n=1)
    help = f"did you mean `{near[0]}`?" if near else _one_of(BACKENDS)
    return _bad(config, "backend", f"`{brief(given)}` is no backend", help)


def _one_of(names: Iterable[str]) -> str:
    return f"one of {', '.join(names)}"


def _bad(config: Config, key: str, message: str, help: str | None = None) -> Finding:
    origin = config.origin(key)
    return Finding(
        severity="error", layer="launch", code=f"bad-{key.partition('.')[0].replace('_', '-')}",
        key=key, message=message, help=help, **origin.place,
    )  # fmt: skip


def _unknown(config: Config, key: str, keys: tuple[str, ...], fields: Collection[str]) -> Finding:
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    if key in _ELSEWHERE:
        help = _ELSEWHERE[key]
    elif key in fields:
        help = f"`{key}` is upstream's: write it under `args:`"
    elif near:
        help = f"did you mean `{near[0]}`?"
    else:
        help = f"upstream's own names go under `args:`; ours are {', '.join(keys)}"
    origin = config.origin(key)
    return Finding(
        severity="error", layer="launch", code="unknown-option", key=key,
        message=f"`{key}` is no option of a stage file", help=help,
        **origin.place,
    )  # fmt: skip


def deepspeed_file(name: str) -> Path:
    """The packaged DeepSpeed config of that name."""
    return Path(str(files("launcher.deepspeed").joinpath(f"{name}.json")))


def _deepspeed(
    config: Config, folders: Sequence[Path], findings: list[Finding]
) -> tuple[Path | None, str]:
    key = "deepspeed_config" if config.shape == "wrapped" else "deepspeed"
    given = config.options.get(key)
    if given is None or given is False or given == "none":
        return None, "none"
    if given in DEEPSPEED:
        return deepspeed_file(given), str(given)
    if isinstance(given, str):
        # beside the stage file, or where launch was started
        for base in (Path(), config.path.parent, *folders):
            path = base / expanded(given)
            if is_file(path):
                return path.absolute(), path.stem
    names = _one_of((*DEEPSPEED, "none"))
    near = difflib.get_close_matches(str(given), DEEPSPEED, n=1)
    help = f"did you mean `{near[0]}`?" if near else f"a path, or {names}"
    message = f"`{brief(given)}` is neither a DeepSpeed file nor a known name"
    findings.append(_bad(config, key, message, help))
    return None, "none"


def _attention(config: Config, backend: str, findings: list[Finding]) -> tuple[str, ...]:
    """`attention:`, one or several in the order of preference; a kernel's repository is one too."""
    key, given = "attention", config.options.get("attention")
    if given is None:
        return ()
    if backend != "trl":
        message = (
            "`attention` is read for TRL only: open-instruct takes the first that is installed"
        )
        findings.append(_bad(config, key, message, "delete the line"))
        return ()
    known = [name for name in EXPECT[key] if name != "any"]
    names = given if isinstance(given, list) else [given]
    for name in names:
        if not isinstance(name, str) or (name not in known and "/" not in name):
            near = difflib.get_close_matches(str(name), known, n=1)
            help = f"did you mean `{near[0]}`?" if near else _one_of(known)
            message = f"`{brief(name)}` is no attention implementation"
            findings.append(_bad(config, key, message, help))
            return ()
    if not names or len({*names}) < len(names):
        help = "write for example `attention: [flash_attention_2, sdpa]`"
        findings.append(_bad(config, key, "`attention` names each implementation once", help))
        return ()
    return tuple(names)


def _name(config: Config, findings: list[Finding]) -> str | None:
    given = config.options.get("name")
    if given is None:
        return None
    if isinstance(given, dict | list):
        findings.append(_bad(config, "name", "`name` is one word for the run"))
        return None
    return str(given)


def _batch(config: Config, findings: list[Finding]) -> Batch | None:
    given = config.options.get("batch")
    if given is None:
        return None
    if not isinstance(given, dict):
        help = "write `batch: {global: 128, per_device: 16}`"
        findings.append(_bad(config, "batch", f"`batch` is a mapping, not `{brief(given)}`", help))
        return None
    numbers: dict[str, int | None] = {"global": None, "per_device": None}
    for key, value in given.items():
        if key not in numbers:
            message = f"`{key}` is no part of `batch`"
            findings.append(_bad(config, f"batch.{key}", message, _one_of(numbers)))
            continue
        numbers[key] = _whole(value) or None
        if value is not None and numbers[key] is None:
            message = f"`batch.{key}` is a whole number above 0, at most 999,999,999, not `{brief(value)}`"
            findings.append(_bad(config, f"batch.{key}", message))
    return Batch(total=numbers["global"], per_device=numbers["per_device"])


def _whole(value: Any) -> int | None:
    """A whole number from 0 on, also as text; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9
    return value if valid else None


def _gpus(config: Config, findings: list[Finding]) -> int | None:
    given = config.options.get("num_gpus")
    if given is None:
        return None
    number = _whole(given)
    if number is None:
        findings.append(
            _bad(config, "num_gpus", f"`num_gpus` is a whole number, not `{brief(given)}`")
        )
    return number


def _expect(config: Config, findings: list[Finding]) -> dict[str, str]:
    given = config.options.get("expect")
    if given is None:
        return {}
    if not isinstance(given, dict):
        help = "write for example `expect: {liger: engaged, loss: finite}`"
        message = "`expect` is a mapping of points of the verdict to their states"
        findings.append(_bad(config, "expect", message, help))
        return {}
    expected = {}
    for point, value in given.items():
        state = _state(value)
        if point not in EXPECT:
            near = difflib.get_close_matches(point, EXPECT, n=1)
            help = f"did you mean `{near[0]}`?" if near else _one_of(EXPECT)
            message = f"`{point}` is no point of a verdict"
            findings.append(_bad(config, f"expect.{point}", message, help))
        elif state not in EXPECT[point]:
            message = f"`{brief(state)}` cannot be expected of `{point}`"
            findings.append(_bad(config, f"expect.{point}", message, _one_of(EXPECT[point])))
        else:
            expected[point] = state
    return expected


def _choice(config: Config, key: str, names: tuple[str, ...], findings: list[Finding]) -> str:
    """One of some words, the first where the file is silent."""
    given = config.options.get(key)
    if given is None:
        return names[0]
    if given not in names:
        findings.append(_bad(config, key, f"`{key}` cannot be `{brief(given)}`", _one_of(names)))
        return names[0]
    return str(given)


def _probe(config: Config, findings: list[Finding]) -> Watch | None:
    """`probe: off`, or a mapping of what is to be changed of it; None for off."""
    given = config.options.get("probe")
    switch = _switch(given)
    if given is None or switch is not None:
        return None if switch is False else Watch()
    if not isinstance(given, dict):
        help = "`probe: off`, or for example `probe: {within: 5, isolation: off}`"
        message = f"`probe` is `off` or a mapping, not `{brief(given)}`"
        findings.append(_bad(config, "probe", message, help))
        return Watch()
    changed: dict[str, Any] = {}
    for key, value in given.items():
        name = f"probe.{key}"
        if key in SWITCHES:
            changed[key] = _switch(value)
            wrong = f"`{name}` is on or off, not `{brief(value)}`"
        elif key in WATCHED:
            changed[key] = _whole(value) or None
            wrong = f"`{name}` is a whole number above 0, at most 999,999,999, not `{brief(value)}`"
        else:
            near = difflib.get_close_matches(str(key), WATCHED, n=1)
            help = f"did you mean `{near[0]}`?" if near else _one_of(WATCHED)
            findings.append(_bad(config, name, f"`{key}` is no part of `probe`", help))
            continue
        if value is not None and changed[key] is None:
            usual = {"isolation": "on", "profile": 4}.get(key, getattr(Watch(), key))
            findings.append(_bad(config, name, wrong, f"for example `probe: {{{key}: {usual}}}`"))
    return Watch(**{key: value for key, value in changed.items() if value is not None})


def _elsewhere(config: Config, key: str, findings: list[Finding]) -> dict[str, Any]:
    """`slurm:`, `skypilot:` or `gates:`."""
    given = config.options.get(key)
    if given is None:
        return {}
    from launcher import gates, sbatch, skypilot

    readers: Mapping[str, Any] = {
        "slurm": sbatch.read,
        "skypilot": skypilot.read,
        "gates": gates.read,
    }

    def complain(code: str, below: str, message: str, help: str | None) -> Finding:
        where = f"{key}.{below}" if below else key
        return replace(_bad(config, where, message, help), code=code)

    told, wrong = readers[key](given, complain)
    findings += wrong
    return dict(told)


def _switch(value: Any) -> bool | None:
    """On or off, as YAML's own bool or in quotes; None for anything else."""
    if isinstance(value, bool):
        return value
    words = {**dict.fromkeys(_ON, True), **dict.fromkeys(_OFF, False)}
    return words.get(value.lower()) if isinstance(value, str) else None


def _state(value: Any) -> str:
    """A state as its author meant it: a plain `off` or `on` is a boolean in YAML."""
    if value is None:
        return "any"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
