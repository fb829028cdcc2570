"""From a command line to everything decided: stage, plan, command, place. Nothing starts here."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.cache import inputs, keys
from launcher.cache.keys import Cache
from launcher.errors import (
    Finding,
    InvalidConfig,
    Severity,
    launch_finding,
    naming_variables,
    select_errors,
    set_subject,
)
from launcher.lazy_dataclass import dataclass
from launcher.machine.devices import Devices
from launcher.paths import exists
from launcher.plan import command
from launcher.plan import plan as plans
from launcher.plan.plan import Plan
from launcher.planning import check
from launcher.planning.collect import Facts, Scope, collect
from launcher.planning.doctor import checks
from launcher.planning.neighbourhood import OutputPlace
from launcher.planning.request import Request
from launcher.planning.resume import decision as resume
from launcher.redaction import Redactor
from launcher.runs import lease, rendezvous, rundir
from launcher.runs.attempt import Command
from launcher.runs.record import Manifest, PlanRecord
from launcher.runs.rendezvous import Rendezvous
from launcher.runs.rundir import RunFolder
from launcher.stage.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything decided, nothing started.

    `start` is what this was decided from, `plan` its plan with the last values. `folder` is the run
    folder of the attempt; of a finished run that of its last attempt. `forecast` is what the plan
    says of memory, time and disk.
    """

    start: StartPlan
    plan: Plan
    command: Command
    folder: RunFolder
    decision: resume.Decision
    warnings: tuple[Finding, ...] = ()
    forecast: PlanRecord | None = None

    @property
    def facts(self) -> Facts:
        return self.start.facts

    @property
    def attempt(self) -> int:
        return self.start.target.attempt

    @property
    def output(self) -> Path | None:
        return check.find_output(self.plan)

    @property
    def requested_output(self) -> Path | None:
        return self.start.target.requested

    @property
    def command_folder(self) -> RunFolder:
        """The run folder that the command names; of a dry run one that no earlier run has."""
        return self.start.target.dry_run_folder or self.folder

    def in_folder(self, folder: RunFolder) -> Prepared:
        """The same new run in another run folder, which has the model if the stage file has no
        place.
        """
        start = replace(self.start, target=replace(self.start.target, folder=folder))
        prepared = start.prepare(self.decision)
        return replace(prepared, warnings=self.warnings, forecast=self.forecast)

    @property
    def redactor(self) -> Redactor:
        """What must not be shown of this start."""
        return self.plan.redactor

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.plan.all_findings, *self.warnings)

    def as_json(self) -> dict[str, object]:
        shown = self.command.redacted(self.redactor)
        content: dict[str, object] = {
            "plan": {"gpus": [self.plan.record.as_json()]},
            "upstream": self.plan.stage.upstream.as_json(),
            "derived": {name: value.value for name, value in self.plan.derived.items()},
            "argv": list(shown.argv),
            "env": dict(shown.env),
            "cwd": str(shown.cwd),
        }
        if shown.files:
            content["files"] = dict(shown.files)
        content["run"] = str(self.command_folder.path)
        return content

    def for_record(self) -> dict[str, Any]:
        """The fields of the run's record that planning decides."""
        requested = self.requested_output
        record: dict[str, Any] = {
            "resume": self.decision.as_json(),
            "asked_output": None,
            "contents": list(self.start.contents),
        }
        if requested is not None:
            record["asked_output"] = str(requested)
        if self.forecast is not None:
            record["plan"] = self.forecast.as_json()
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a start goes, and what has been there.

    `requested` is the output that the stage file names, `output` that of this start. `folder` is
    the run folder of the next `attempt`; a start makes it if it `is_new`. A dry run's command names
    `dry_run_folder` if `folder` is an earlier run's. `history` are the manifests of the attempts so
    far, `earlier` is their run folder.
    """

    requested: Path | None
    output: resume.OutputChoice
    folder: RunFolder
    attempt: int
    dry_run_folder: RunFolder | None
    history: Sequence[Manifest]
    earlier: RunFolder | None
    is_new: bool

    @property
    def attempts_so_far(self) -> int | None:
        """None for a new run."""
        return len(self.history) or None


def _choose_target(facts: Facts, rank: int) -> Target:
    """`rank` is which of several machines this is."""
    request = facts.request
    stage = facts.stage
    root = request.runs or rundir.find_runs_root()
    requested = _find_requested_output(stage)
    runs = rundir.list_newest_first(root)
    output = resume.choose_output(stage, requested, runs, fresh=request.fresh)
    kind = stage.options.stage
    # as a manifest holds them
    redact = stage.config.redactor.redact
    name = redact(stage.name)
    if request.folder is None:
        place = output.output
        if place is not None:
            place = Path(redact(str(place)))
        folder, attempt = rundir.choose_folder(kind, name, place, root, rank=rank)
    else:
        folder = request.folder
        attempt = max(node.attempts() for node in folder.nodes()) + 1
    is_new = not exists(folder.path)
    dry_run_folder = None
    if facts.machine is None and not is_new:
        # a pasted command is no attempt of that run, and must not write into its record
        dry_run_folder, _ = rundir.choose_folder(kind, name, None, root)
    earlier = None
    if attempt > 1:
        earlier = folder
    history = resume.list_manifests(kind, earlier, output.output)
    last = lease.find_newest_lease(output.output)
    if rank and last is not None and last.is_beating():
        # the first of several machines has begun this very start
        history = history[:-1]
    if earlier is None and history and last is not None and os.path.isdir(last.run):
        earlier = RunFolder(Path(last.run))
    return Target(
        requested=requested,
        output=output,
        folder=folder,
        attempt=attempt,
        dry_run_folder=dry_run_folder,
        history=history,
        earlier=earlier,
        is_new=is_new,
    )


def _find_requested_output(stage: Stage) -> Path | None:
    """The folder that the stage file names; what launch derives does not move it."""
    if stage.entry.names.output not in stage.args:
        return None
    folder = stage.backend.output_folder(stage.values)
    if folder is None:
        return None
    return folder.absolute()


def prepare_start(request: Request, scope: Scope) -> Prepared:
    """Read and plan a request; see `collect` and `complete` for what is raised."""
    return complete(collect(request, scope))


def complete(facts: Facts) -> Prepared:
    """Plan what was read, and check that this machine is ready if it trains. Writes nothing.

    Raises InvalidConfig, NotReady or UsageError.
    """
    start = plan_start(facts)
    return start.prepare(start.decide(facts.request.allowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """A start planned without what earlier attempts left: see `decide`, then `prepare` here.

    `plan` lacks the values of the caches. `contents` are what its data and models hold. `place` is
    the output folder, None if another machine checks it. `warnings` are about this machine.
    """

    facts: Facts
    plan: Plan
    target: Target
    caches: tuple[Cache, ...]
    place: OutputPlace | None
    machine: Rendezvous | None = None
    devices: Devices | None = None
    contents: inputs.Contents = ()
    warnings: tuple[Finding, ...] = ()

    def decide(self, allowed: Collection[str]) -> resume.Decision:
        """What this start is if these changes are allowed; a new run if no machine is known.

        Raises UsageError for a name in `allowed` that does not exist.
        """
        if self.facts.machine is None:
            return resume.Decision()
        judge = resume.ResumeJudge(
            plan=self.plan,
            output=check.find_output(self.plan),
            history=self.target.history,
            folder=self.target.earlier,
            trainer=self.facts.trainer,
            caches=self.caches,
            now=self.contents,
            allowed=allowed,
        )
        return judge.decide()

    def prepare(self, decision: resume.Decision) -> Prepared:
        """The start with this decision. Raises InvalidConfig with everything that stops it."""
        with naming_variables(self.facts.redactor):
            plan = self._complete_plan(decision)
            if select_errors(plan.all_findings, strict=self.facts.request.strict):
                raise InvalidConfig(plan.all_findings)
            _require_concealed(plan)
            target = self.target
            folder = target.folder
            if decision.kind == "finished" and target.earlier is not None:
                folder = target.earlier
            named = folder
            attempt = target.attempt
            if target.dry_run_folder is not None:
                named = target.dry_run_folder
                attempt = 1
            devices = None
            if self.devices is not None and plan.gpus:
                devices = self.devices.env()
            built = command.build(
                plan,
                self.facts.trainer,
                named.path,
                environ=os.environ,
                caches=keys.derive_environment(self.caches),
                devices=devices,
                attempt=attempt,
            )
        warnings = (*self.warnings, *self._find_foreign_files(plan), *_find_exposed_overrides(plan))
        return Prepared(
            start=self,
            plan=plan,
            command=built,
            folder=folder,
            decision=decision,
            warnings=warnings,
        )

    def _complete_plan(self, decision: resume.Decision) -> Plan:
        """The plan with the values of the output, the caches and the resume."""
        plan = self.plan
        stage = plan.stage
        last = {**keys.derive_arguments(self.caches), **decision.derived}
        output = stage.entry.names.output
        if output not in stage.args:
            value = str(self.target.folder.path / "model")
            last[output] = replace(plan.derived[output], value=value)
        findings: list[Finding] = []
        if self.facts.machine is not None:
            findings += keys.check_caches(plan, self.caches)
        findings += decision.findings
        return plans.complete_plan(plan, last, findings)

    def _find_foreign_files(self, plan: Plan) -> tuple[Finding, ...]:
        """Files in the output folder that launch did not make."""
        if self.place is None:
            return ()
        codes = frozenset[str]()
        if self.facts.machine is not None:
            codes = frozenset(finding.code for finding in plan.all_findings)
        return set_subject("machine", map(plan.stage.config.placed, self.place.foreign(codes)))


def plan_start(facts: Facts, *, judged: Plan | None = None) -> StartPlan:
    """Plan what was read, without what earlier attempts left.

    `judged` is the plan of these facts if there is one. Raises InvalidConfig, NotReady or
    UsageError.
    """
    request = facts.request
    machine: Rendezvous | None = None
    if facts.look is not None:
        machine = rendezvous.find_rendezvous(
            request.nodes, request.node_rank, request.main_address, os.environ
        )
    rank = 0
    if machine is not None:
        rank = machine.rank
    packages = facts.trainer.packages
    with naming_variables(facts.redactor):
        target = _choose_target(facts, rank)
        plan = judged or check.plan_with_findings(
            facts,
            output=target.folder.path / "model",
            decided=target.output.derived,
            attempts=target.attempts_so_far,
        )
        place = None
        if rank == 0:
            # the first of several machines checks the output folder
            place = _find_output_place(plan, target)
        if place is not None:
            nested = map(plan.stage.config.placed, place.nested())
            plan = replace(plan, findings=(*plan.findings, *nested))
        if facts.machine is None:
            caches = keys.derive(plan, packages, lenient=True)
            return StartPlan(facts=facts, plan=plan, target=target, caches=caches, place=place)
        if any(finding.about != "machine" for finding in select_errors(plan.all_findings)):
            raise InvalidConfig(plan.all_findings)
        chosen = facts.choose_devices()
        warnings = checks.require_ready(plan, facts.trainer, chosen)
        return StartPlan(
            facts=facts,
            plan=plan,
            target=target,
            caches=keys.derive(plan, packages),
            place=place,
            machine=machine,
            devices=chosen,
            contents=inputs.record_inputs(plan),
            warnings=warnings,
        )


def _find_output_place(plan: Plan, target: Target) -> OutputPlace | None:
    output = check.find_output(plan)
    if output is None:
        return None
    key = plan.stage.entry.names.output
    return OutputPlace(output=output, run=target.folder, attempt=target.attempt, key=key)


def _require_concealed(plan: Plan) -> None:
    """Raise InvalidConfig if a secret would be on the command line or in the run folder."""
    watched = plan.stage.options.probe is not None
    concealed = command.hide_secrets(plan.arguments(), plan, os.environ, watched=watched)
    faults = []
    for name in concealed.exposed:
        message = f"without the probe `{name}`, a secret, would stand in the training's command "
        message += "line, which every user of the machine can read"
        help = "leave the probe on: it takes it from the environment"
        faults.append(_report_exposed_secret("error", f"args.{name}", message, help))
    if not faults:
        for name in command.find_secrets_in_file(plan, os.environ):
            message = f"`{name}` holds a secret, and no flag can carry it: "
            message += "it would stand in a file of the run folder"
            help = "leave it out: `hf auth login`, or the variable HF_TOKEN, "
            help += "is what `datasets` reads"
            faults.append(_report_exposed_secret("error", f"args.{name}", message, help))
    if faults:
        raise InvalidConfig(map(plan.stage.config.placed, faults))


def _report_exposed_secret(severity: Severity, key: str, message: str, help: str) -> Finding:
    return launch_finding(severity, "exposed-secret", message, help, key=key)


def warn_of_earlier_run(dry: Prepared) -> tuple[Finding, ...]:
    """A dry run's command would write into the output of an earlier run."""
    if dry.attempt == 1 or not rundir.read_manifest(dry.folder):
        return ()
    message = f"{dry.output} is the output of {dry.folder.path.name}; "
    message += "pasted, this command may overwrite it"
    help = "start it without --dry-run, which compares the two first, "
    help += "or add --fresh for a new folder"
    key = f"args.{dry.plan.stage.entry.names.output}"
    warning = launch_finding("warning", "earlier-run", message, help, key=key)
    return (dry.plan.stage.config.placed(warning),)


def _find_exposed_overrides(plan: Plan) -> Iterator[Finding]:
    """Secrets in overrides, which are in the command line of launch itself."""
    redact = plan.redactor.redact
    for key, origin in plan.stage.config.origins.items():
        name, _, value = (origin.override or "").partition("=")
        if not value or "${" in value or redact({name: value}) == {name: value}:
            continue
        message = f"`{name}` holds a secret, and every user of the machine can read the command "
        message += "line of launch itself"
        help = f"set a variable, and write {name}='${{oc.env:VARIABLE}}'"
        finding = _report_exposed_secret("warning", key, message, help)
        yield replace(plan.stage.config.placed(finding), about="machine")
