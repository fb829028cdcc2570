"""What a run folder keeps of everything that was decided before the start, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher import machine, situation
from launcher.backends.deepspeed_rules import engine_config
from launcher.command import Command, expectations
from launcher.errors import Finding
from launcher.machine import Trainer
from launcher.plan import Plan
from launcher.redaction import redact

MANIFEST_VERSION = 1


def manifest(
    attempt: int,
    created: str,
    plan: Plan,
    command: Command,
    trainer: Trainer,
    output: Path | None,
    caches: list[dict[str, Any]] | None = None,
    *,
    devices: dict[str, Any] | None = None,
    warnings: Sequence[Finding] = (),
) -> dict[str, Any]:
    """Every resolved field with who set it, the plan, the command and the versions of everything.

    Tokens are taken out of all of it.
    """
    stage = plan.stage
    project = Path(__file__).resolve().parent.parent
    whole = {
        "schema_version": MANIFEST_VERSION,
        "created": created,
        "attempt": attempt,
        "stage": stage.options.stage,
        "backend": stage.options.backend,
        "name": stage.name,
        "config": str(stage.config.path),
        "output": None if output is None else str(output),
        "expect": expectations(plan),
        "deepspeed": _deepspeed(plan, trainer),
        "plan": plan.as_json(),
        "tracked": _tracked(plan),
        "args": _resolved(plan),
        "argv": list(command.argv),
        "env": sorted(command.env),
        "cwd": str(command.cwd),
        "caches": caches or [],
        "upstream": stage.upstream.as_json(),
        "reworded": sorted(stage.schema.reworded),
        "launch_commit": machine.git_version(project),
        "trainer": {
            "python": str(trainer.python),
            "source": trainer.source,
            "version": ".".join(map(str, trainer.version)),
            "packages": dict(sorted(trainer.packages.items())),
        },
        "machine": machine.describe(),
        "devices": devices,
        "findings": [finding.as_json() for finding in (*stage.findings, *plan.findings, *warnings)],
    }
    return redact(whole)


def _deepspeed(plan: Plan, trainer: Trainer) -> dict[str, Any] | None:
    """Release and settings that decide whether gradients can be trusted; None without DeepSpeed."""
    file, _ = situation.deepspeed_of(plan.stage.options)
    config = engine_config(plan.values, file, trl=plan.stage.options.backend == "trl")
    if config is None or not plan.gpus:
        return None
    kept = {k: config[k] for k in ("zero_optimization", "communication_data_type") if k in config}
    return {"version": trainer.packages.get("deepspeed"), "config": kept}


def _tracked(plan: Plan) -> bool:
    """Whether the run reports to W&B: open-instruct does with either, whatever else is named."""
    told = plan.values.get("report_to")
    return plan.values.get("with_tracking") is True or "wandb" in str(told)


def _resolved(plan: Plan) -> dict[str, dict[str, Any]]:
    """Value and origin of every field: default (file:line), stage file, override, or derived."""
    fields = {}
    for name, known in plan.stage.schema.fields.items():
        if name in plan.derived:
            origin = f"derived: {plan.derived[name].why}"
        elif name in plan.stage.args:
            origin = str(plan.stage.config.origin(f"args.{name}"))
        else:
            origin = f"default: {known.where}"
        value = plan.values[name]
        if f"args.{name}" in plan.stage.config.secrets and name not in plan.derived:
            value = plan.stage.config.secrets[f"args.{name}"]
        fields[name] = {"value": value, "origin": origin}
    return fields
