"""What a run folder keeps of what was decided before the start: manifest and stage file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from launcher import files
from launcher.config.keys import DEEPSPEED, KEYS
from launcher.errors import Finding
from launcher.machine import python
from launcher.machine.python import Trainer
from launcher.paths import PROJECT
from launcher.plan.command import HUB, expectations
from launcher.plan.plan import Plan
from launcher.redaction import redact
from launcher.rules.deepspeed import engine_config
from launcher.runs import outputs, rundir
from launcher.runs.attempt import Command
from launcher.runs.record import RunRecord
from launcher.runs.rundir import RunFolder

_HEAD = "# What `{stage}` was resolved to: inheritance, overrides and interpolation done.\n"


def manifest(
    attempt: int,
    created: str,
    plan: Plan,
    command: Command,
    trainer: Trainer,
    output: Path | None,
    caches: Sequence[Mapping[str, object]] = (),
    *,
    devices: dict[str, Any] | None = None,
    warnings: Sequence[Finding] = (),
) -> RunRecord:
    """Every resolved field with who set it, the plan, the command and all versions."""
    stage = plan.stage
    return RunRecord(
        created=created,
        attempt=attempt,
        stage=stage.options.stage,
        backend=stage.options.backend,
        name=stage.name,
        config=str(stage.config.path),
        output=None if output is None else str(output),
        expect=expectations(plan),
        deepspeed=_deepspeed(plan, trainer),
        cwd=str(command.cwd),
        plan=plan.record.as_json(),
        # open-instruct reports to W&B with either, whatever else is named
        tracked=plan.values.get("with_tracking") is True or "wandb" in str(plan.values.get("report_to")),
        args=_resolved(plan),
        argv=list(command.argv),
        env=sorted(command.env),
        caches=[*caches],
        upstream=stage.upstream.as_json(),
        launch_commit=python.git_version(PROJECT),
        trainer={
            "python": str(trainer.python),
            "source": trainer.source,
            "version": ".".join(map(str, trainer.version)),
            "packages": dict(sorted(trainer.packages.items())),
        },
        machine=python.describe(),
        devices=devices,
        findings=[finding.as_json() for finding in (*stage.findings, *plan.findings, *warnings)],
        samples=stage.options.samples,
        script=stage.options.script,
    )


def _deepspeed(plan: Plan, trainer: Trainer) -> dict[str, Any] | None:
    """Release and settings that decide whether gradients can be trusted; None without DeepSpeed."""
    file, _ = plan.stage.read_deepspeed()
    config = engine_config(plan.values, file)
    if config is None or not plan.gpus:
        return None
    kept = {k: config[k] for k in ("zero_optimization", "communication_data_type") if k in config}
    return {"version": trainer.packages.get("deepspeed"), "config": kept}


def _resolved(plan: Plan) -> dict[str, dict[str, Any]]:
    fields, config = {}, plan.stage.config
    for name, known in plan.stage.schema.fields.items():
        value = plan.values[name]
        if name in plan.derived:
            origin = f"derived: {plan.derived[name].why}"
        else:
            given = name in plan.stage.args
            origin = str(config.origin(f"args.{name}")) if given else f"default: {known.where}"
            value = config.secrets.get(f"args.{name}", value)
        fields[name] = {"value": value, "origin": origin}
    return fields


def write_stage_file(plan: Plan, folder: RunFolder, restored: Mapping[str, Any] | None = None) -> None:
    """Write the resolved stage file, with values `restored` from a checkpoint, tokens taken out. Raises OSError."""
    options = plan.stage.options
    same = ("stage", "backend", "script", "mixed_precision", "on_violation", "on_hang")
    given: dict[str, Any] = {
        **{name: getattr(options, name) for name in same},
        "name": plan.stage.name,
        "deepspeed": options.deepspeed_name,
        "attention": list(options.attention) or None,
        "expect": dict(options.expect) or None,
        "samples": options.samples or None,
        "slurm": {k: True if v is None else v for k, v in options.slurm.items()} or None,
        "probe": "off",
    }
    if options.probe is not None:
        watch = asdict(options.probe)
        given["probe"] = {key: watch[key] for part in KEYS["probe"].parts if watch[key := part.name] is not None}
    if options.batch is not None:
        batch = {"global": options.batch.total, "per_device": options.batch.per_device}
        given["batch"] = {key: value for key, value in batch.items() if value is not None}
    if options.deepspeed is not None and options.deepspeed_name not in DEEPSPEED:
        files.write_bytes(folder.deepspeed, options.deepspeed.read_bytes())
        given["deepspeed"] = folder.deepspeed.name
    shown = {key: value for key, value in given.items() if value is not None}
    content = escaped(redact({**shown, "args": {**plan.stage.args, **(restored or {})}}))
    for name, value in content["args"].items():
        # what is started again takes it from where it was taken, or from where huggingface_hub looks
        whole = plan.stage.config.secrets.get(f"args.{name}")
        if whole is None and name == "hub_token" and value is not None:
            whole = f"${{oc.env:{HUB},null}}"
        content["args"][name] = value if whole is None else whole
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    files.write_text(folder.stage_file, _HEAD.format(stage=plan.stage.config.path) + text)


def escaped(value: Any) -> Any:
    """Values as they are, for a file that will be interpolated once more."""
    if isinstance(value, Mapping):
        return {str(key): escaped(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(below) for below in value]
    if isinstance(value, str):
        return value.replace("${", "\\${")
    return value if isinstance(value, bool | int | float) or value is None else str(value)


def create(folder: RunFolder, record: RunRecord) -> None:
    """Make the folder, write its manifest without tokens, enter the run in the index. Raises NotReady where that
    fails."""
    content = redact(record.as_json())
    with rundir.writing(folder.path):
        folder.path.mkdir(rundir.OWN, parents=True, exist_ok=True)
        files.write_json(folder.manifest, content)
    rundir.enter("runs", folder.path)
    outputs.enter(folder.path, content["output"])
