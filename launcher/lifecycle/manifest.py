"""What a run folder keeps of the decisions before a start: manifest and stage file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from launcher import files, redaction
from launcher.config.keys import DEEPSPEED, KEYS
from launcher.errors import Finding
from launcher.machine import python
from launcher.machine.python import Trainer
from launcher.paths import PROJECT
from launcher.plan.command import HUB, list_expectations
from launcher.plan.plan import Plan
from launcher.redaction import Redactor
from launcher.rules.deepspeed import engine_config
from launcher.runs import outputs, rundir
from launcher.runs.attempt import Command
from launcher.runs.record import RunRecord
from launcher.runs.rundir import RunFolder

_HEAD = "# What `{stage}` was resolved to: inheritance, overrides and interpolation done.\n"


def build_manifest(
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
    """Every resolved argument with its origin, the plan, the command and all versions."""
    stage = plan.stage
    # open-instruct reports to W&B with either, whatever else is named
    tracked = plan.values.get("with_tracking") is True
    if "wandb" in str(plan.values.get("report_to")):
        tracked = True
    findings = [*stage.findings, *plan.findings, *warnings]
    return RunRecord(
        created=created,
        attempt=attempt,
        stage=stage.options.stage,
        backend=stage.options.backend,
        name=stage.name,
        config=str(stage.config.path),
        output=None if output is None else str(output),
        expect=list_expectations(plan),
        deepspeed=_describe_deepspeed(plan, trainer),
        cwd=str(command.cwd),
        plan=plan.record.as_json(),
        tracked=tracked,
        args=_resolve_arguments(plan),
        argv=list(command.argv),
        env=sorted(command.env),
        caches=[*caches],
        upstream=stage.upstream.as_json(),
        launch_commit=python.read_git_version(PROJECT),
        trainer={
            "python": str(trainer.python),
            "source": trainer.source,
            "version": ".".join(map(str, trainer.version)),
            "packages": dict(sorted(trainer.packages.items())),
        },
        machine=python.describe(),
        devices=devices,
        findings=[finding.as_json() for finding in findings],
        samples=stage.options.samples,
        script=stage.options.script,
    )


def _describe_deepspeed(plan: Plan, trainer: Trainer) -> dict[str, Any] | None:
    """The version and settings that gradients depend on; None without DeepSpeed."""
    file, _ = plan.stage.read_deepspeed()
    config = engine_config(plan.values, file)
    if config is None or not plan.gpus:
        return None
    deciding = {}
    for name in ("zero_optimization", "communication_data_type"):
        if name in config:
            deciding[name] = config[name]
    return {"version": trainer.packages.get("deepspeed"), "config": deciding}


def _resolve_arguments(plan: Plan) -> dict[str, dict[str, Any]]:
    """The value of every argument, and its origin."""
    config = plan.stage.config
    arguments = {}
    for name, field in plan.stage.schema.fields.items():
        key = f"args.{name}"
        value = plan.values[name]
        if name in plan.derived:
            origin = f"derived: {plan.derived[name].why}"
        else:
            value = config.secrets.get(key, value)
            origin = f"default: {field.where}"
            if name in plan.stage.args:
                origin = str(config.origin(key))
        arguments[name] = {"value": value, "origin": origin}
    return arguments


def write_stage_file(
    plan: Plan, folder: RunFolder, restored: Mapping[str, Any] | None = None
) -> None:
    """Write the resolved stage file without secrets, so that it can be started again.

    `restored` are arguments that a checkpoint has. Raises OSError.
    """
    options = plan.stage.options
    keys = _collect_options(plan)
    if options.deepspeed is not None and options.deepspeed_name not in DEEPSPEED:
        files.write_bytes(folder.deepspeed, options.deepspeed.read_bytes())
        keys["deepspeed"] = folder.deepspeed.name
    keys["args"] = {**plan.stage.args, **(restored or {})}
    content = escape_interpolation(plan.stage.config.redactor.redact(keys))
    arguments = content["args"]
    for name, value in arguments.items():
        reference = plan.stage.config.secrets.get(f"args.{name}")
        if reference is not None:
            # a start takes the secret from where this one did
            arguments[name] = reference
        elif name == "hub_token" and value is not None:
            # or from where huggingface_hub looks
            arguments[name] = f"${{oc.env:{HUB},null}}"
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    head = _HEAD.format(stage=plan.stage.config.path)
    files.write_text(folder.stage_file, head + text)


def _collect_options(plan: Plan) -> dict[str, Any]:
    """launch's own keys of a stage file, without those that are not set."""
    options = plan.stage.options
    slurm = {}
    for name, value in options.slurm.items():
        slurm[name] = True if value is None else value
    probe: str | dict[str, Any] = "off"
    if options.probe is not None:
        settings = asdict(options.probe)
        names = [part.name for part in KEYS["probe"].parts]
        probe = _drop_none({name: settings[name] for name in names})
    keys: dict[str, Any] = {
        "stage": options.stage,
        "backend": options.backend,
        "script": options.script,
        "mixed_precision": options.mixed_precision,
        "on_violation": options.on_violation,
        "on_hang": options.on_hang,
        "name": plan.stage.name,
        "deepspeed": options.deepspeed_name,
        "attention": list(options.attention) or None,
        "expect": dict(options.expect) or None,
        "samples": options.samples or None,
        "slurm": slurm or None,
        "probe": probe,
    }
    if options.batch is not None:
        batch = {"global": options.batch.total, "per_device": options.batch.per_device}
        keys["batch"] = _drop_none(batch)
    return _drop_none(keys)


def _drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def escape_interpolation(value: Any) -> Any:
    """The same values, for a file that will be interpolated once more."""
    if isinstance(value, Mapping):
        return {str(key): escape_interpolation(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [escape_interpolation(below) for below in value]
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)


def create(folder: RunFolder, record: RunRecord, redactor: Redactor | None = None) -> None:
    """Make the folder, write its manifest without secrets, register the run. Raises NotReady."""
    content = (redactor or redaction.find_process_secrets()).redact(record.as_json())
    with rundir.writing(folder.path):
        folder.path.mkdir(rundir.OWN, parents=True, exist_ok=True)
        files.write_json(folder.manifest, content)
    rundir.register("runs", folder.path)
    outputs.register_output(folder.path, content["output"])
