"""Facts and a plan of them -> findings: every rule is asked once, when all values are known."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.errors import Finding, InvalidConfig, select_errors
from launcher.plan import plan as plans
from launcher.plan.derive import Derived
from launcher.plan.plan import Plan
from launcher.planning.collect import Facts, apply_request, collect_unplanned
from launcher.rules.context import Context, Split
from launcher.stage import stage as stages
from launcher.stage.options import Batch


def plan_with_findings(
    facts: Facts,
    *,
    gpus: int | None = None,
    output: Path | None = None,
    rows: int | None = None,
    decided: Mapping[str, Derived] = MappingProxyType({}),
    attempts: int | None = None,
) -> Plan:
    """Plan facts on so many GPUs (None: as they say), with everything that is worth saying of it.

    `output` is where the model goes when the stage file names no place, `rows` are those of the
    data set where somebody says how many, `decided` values that hold whatever the file says,
    `attempts` those that this run has had. What stops the run is among the findings. Raises
    InvalidConfig where the batch cannot be divided.
    """
    if gpus is None:
        gpus = facts.gpus
    try:
        plan = plans.make(
            facts.stage,
            gpus=gpus,
            nodes=facts.request.nodes,
            output=output,
            packages=facts.packages,
            rows=rows,
            decided=decided,
        )
    except InvalidConfig as error:
        findings = collect_unplanned(facts.file, facts.checked, facts.machine)
        raise InvalidConfig((*findings, *error.findings)) from None
    ruled = stages.apply_rules(facts.checked, _build_context(facts, plan, attempts))
    findings = apply_request(facts.file, facts.checked, facts.machine, ruled)
    return replace(plan, stage=replace(plan.stage, findings=findings))


def require(facts: Facts, **about: Any) -> Plan:
    """The same plan, where nothing stops it. Raises InvalidConfig with everything that is worth
    saying of it.
    """
    plan = plan_with_findings(facts, **about)
    if select_errors(plan.all_findings, strict=facts.request.strict):
        raise InvalidConfig(plan.all_findings)
    return plan


def check_plan(plan: Plan) -> tuple[Finding, ...]:
    """What is worth saying of a plan beyond its stage file."""
    of_plan = (finding for finding in plan.stage.findings if finding.about == "plan")
    return (*plan.findings, *of_plan)


def find_output(plan: Plan) -> Path | None:
    """The absolute folder that the model goes to."""
    folder = plans.find_output_folder(plan)
    if folder is None:
        return None
    return folder.absolute()


def _build_context(facts: Facts, plan: Plan, attempts: int | None) -> Context:
    options = plan.stage.options
    batch = options.batch or Batch()
    split = Split(processes=plan.processes, devices=plan.devices, rows=plan.rows, total=batch.total)
    return Context(
        values=plan.values,
        environ=os.environ,
        deepspeed=facts.checked.deepspeed,
        mixed_precision=plan.mixed_precision,
        named_precision=options.mixed_precision,
        gpus=plan.gpus * plan.nodes,
        per_device=plan.per_device,
        accumulation=plan.accumulation,
        split=split,
        packages=facts.packages,
        machine=facts.machine,
        output=find_output(plan),
        attempts=attempts,
        source=plan.stage.upstream.root,
    )
