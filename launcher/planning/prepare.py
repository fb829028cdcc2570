"""From a command line to everything decided: stage, plan, command, place. Nothing starts here."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.cache import inputs, keys
from launcher.cache.keys import Cache
from launcher.errors import Finding, InvalidConfig, about, errors, launch_finding, naming_variables
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

    `start` is what this was decided of, `plan` its plan with the last values. `folder` is the run folder of the
    attempt; that of an earlier run where that is finished. `forecast` is what the plan says of memory, time and disk.
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
        return _output(self.plan)

    @property
    def requested_output(self) -> Path | None:
        return self.start.target.requested

    @property
    def command_folder(self) -> RunFolder:
        """The run folder that the command names; of a dry run none that an earlier run has."""
        return self.start.target.dry_run_folder or self.folder

    def in_folder(self, folder: RunFolder) -> Prepared:
        """The same new run in another run folder, with the model inside where the stage file has no place for it."""
        start = replace(self.start, target=replace(self.start.target, folder=folder))
        return replace(start.prepare(self.decision), warnings=self.warnings, forecast=self.forecast)

    @property
    def redactor(self) -> Redactor:
        """What must not be shown of this start."""
        return self.plan.redactor

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.plan.all_findings, *self.warnings)

    def as_json(self) -> dict[str, object]:
        shown = self.command.redacted(self.redactor)
        files = {"files": dict(shown.files)} if shown.files else {}
        return {
            "plan": {"gpus": [self.plan.record.as_json()]},
            "upstream": self.plan.stage.upstream.as_json(),
            "derived": {name: d.value for name, d in self.plan.derived.items()},
            "argv": list(shown.argv),
            "env": dict(shown.env),
            "cwd": str(shown.cwd),
            **files,
            "run": str(self.command_folder.path),
        }

    def for_record(self) -> dict[str, Any]:
        return {
            **({} if self.forecast is None else {"plan": self.forecast.as_json()}),
            "resume": self.decision.as_json(),
            "asked_output": None if self.requested_output is None else str(self.requested_output),
            "contents": list(self.start.contents),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a start goes, and what has been there.

    `requested` is the output that the stage file names, `output` the one of this start with the values that put
    it there. `folder` is the run folder of the next `attempt`; where it `is_new`, a start makes it. `dry_run_folder`
    is that of a dry run's command where `folder` is an earlier run's, which stays as it is. `history` are the
    manifests of the attempts so far, `earlier` the run folder that they are of.
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
        """How many attempts there were, None for a new run."""
        return len(self.history) or None


def _target(facts: Facts, machine: Rendezvous | None) -> Target:
    request = facts.request
    stage = facts.stage
    root = request.runs or rundir.runs_root()
    rank = 0 if machine is None else machine.rank
    requested = _requested_output(stage)
    output = resume.choose_output(stage, requested, rundir.newest_first(root), fresh=request.fresh)
    kind = stage.options.stage
    if request.folder is None:
        redactor = stage.config.redactor
        # as a manifest holds them
        shown = redactor.redact(stage.name)
        into = None if output.output is None else Path(redactor.redact(str(output.output)))
        folder, attempt = rundir.choose(kind, shown, into, root, rank=rank)
    else:
        folder = request.folder
        attempt = max(node.attempts() for node in folder.nodes()) + 1
    dry_run_folder = None
    if facts.machine is None and exists(folder.path):
        # what is pasted is no attempt of that run, and must not write into its record
        dry_run_folder, _ = rundir.choose(kind, stage.config.redactor.redact(stage.name), None, root)
    earlier = folder if attempt > 1 else None
    history = resume.manifests(kind, earlier, output.output)
    last = lease.newest(output.output)
    if rank and last is not None and last.beats():
        # the first of several machines has begun already: that is this very start
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
        is_new=not exists(folder.path),
    )


def _requested_output(stage: Stage) -> Path | None:
    """The folder that the stage file names; what launch derives does not move it."""
    if stage.entry.names.output not in stage.args:
        return None
    named = stage.backend.output_folder(stage.values)
    return None if named is None else named.absolute()


def prepare(request: Request, scope: Scope) -> Prepared:
    """Read and plan a request; see `collect` and `complete` for what is raised."""
    return complete(collect(request, scope))


def complete(facts: Facts) -> Prepared:
    """Plan what was read; where that is about this machine too, say whether it is ready. Writes nothing.

    Raises InvalidConfig, NotReady or UsageError.
    """
    planned = plan_start(facts)
    return planned.prepare(planned.decide(facts.request.allowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """A start that is planned but for what earlier attempts left: see `decide`, then `prepare`.

    `plan` lacks the values of the caches. `contents` are what its data and models hold. `place` is the output folder,
    None where another machine looks at it. `machine` is which of several machines this is. `warnings` are about it.
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
        """What this start is where these changes are allowed; a new run where no machine is known.

        Raises UsageError for a name in `allowed` that nothing is called.
        """
        if self.facts.machine is None:
            return resume.Decision()
        return resume.judge(
            self.plan,
            output=_output(self.plan),
            history=self.target.history,
            folder=self.target.earlier,
            trainer=self.facts.trainer,
            caches=self.caches,
            now=self.contents,
            allowed=allowed,
        )

    def prepare(self, decision: resume.Decision) -> Prepared:
        """The start with this decision. Raises InvalidConfig with everything that stops it."""
        with naming_variables(self.facts.redactor):
            return self._prepare(decision)

    def _prepare(self, decision: resume.Decision) -> Prepared:
        plan = self._completed(decision)
        if errors(plan.all_findings, strict=self.facts.request.strict):
            raise InvalidConfig(plan.all_findings)
        _require_concealed(plan)
        target = self.target
        folder = target.folder
        if decision.kind == "finished" and target.earlier is not None:
            folder = target.earlier
        visible = self.devices.env() if self.devices is not None and plan.gpus else None
        built = command.build(
            plan,
            self.facts.trainer,
            (target.dry_run_folder or folder).path,
            environ=os.environ,
            caches=keys.environment(self.caches),
            devices=visible,
            attempt=1 if target.dry_run_folder else target.attempt,
        )
        return Prepared(
            start=self,
            plan=plan,
            command=built,
            folder=folder,
            decision=decision,
            warnings=(*self.warnings, *_foreign(self, plan), *_on_our_command_line(plan)),
        )

    def _completed(self, decision: resume.Decision) -> Plan:
        """The plan with its last values: where the model goes, the folders of the caches, what a resume needs."""
        names = self.plan.stage.entry.names
        last = {**keys.derived(self.caches), **decision.derived}
        if names.output not in self.plan.stage.args:
            inside = self.plan.derived[names.output]
            last[names.output] = replace(inside, value=str(self.target.folder.path / "model"))
        findings = list(decision.findings)
        if self.facts.machine is not None:
            findings[:0] = keys.findings(self.plan, self.caches)
        return plans.completed(self.plan, last, findings)


@dataclass(frozen=True, slots=True)
class JudgedPlan:
    """A plan of facts, as it was judged for a start that has had so many attempts (None: a new run)."""

    plan: Plan
    attempts: int | None

    def holds_for(self, target: Target) -> bool:
        """Whether a start that goes there would be planned and judged to the same."""
        output = self.plan.stage.entry.names.output
        is_same_place = self.plan.derived.get(output) == target.output.derived.get(output)
        return is_same_place and self.attempts == target.attempts_so_far


def plan_start(facts: Facts, *, judged: JudgedPlan | None = None) -> StartPlan:
    """Plan what was read, but for what earlier attempts left. Raises InvalidConfig, NotReady or UsageError.

    `judged` is the plan of these facts where they were judged just now.
    """
    with naming_variables(facts.redactor):
        return _plan_start(facts, judged)


def _plan_start(facts: Facts, judged: JudgedPlan | None) -> StartPlan:
    request = facts.request
    machine: Rendezvous | None = None
    if facts.look is not None:
        machine = rendezvous.find(request.nodes, request.node_rank, request.main_address, os.environ)
    target = _target(facts, machine)
    if judged is not None and judged.holds_for(target):
        plan = judged.plan
    else:
        inside = target.folder.path / "model"
        plan = check.settle(facts, output=inside, decided=target.output.derived, attempts=target.attempts_so_far)
    place = _place(plan, target, machine)
    if place is not None:
        plan = replace(plan, findings=(*plan.findings, *map(plan.stage.config.placed, place.nested())))
    packages = facts.trainer.packages
    if facts.machine is None:
        caches = keys.derive(plan, packages, lenient=True)
        return StartPlan(facts=facts, plan=plan, target=target, caches=caches, place=place)
    if any(finding.about != "machine" for finding in errors(plan.all_findings)):
        raise InvalidConfig(plan.all_findings)
    devices = facts.choose_devices()
    warnings = checks.require_ready(plan, facts.trainer, devices)
    return StartPlan(
        facts=facts,
        plan=plan,
        target=target,
        caches=keys.derive(plan, packages),
        place=place,
        machine=machine,
        devices=devices,
        contents=inputs.of_plan(plan),
        warnings=warnings,
    )


def _place(plan: Plan, target: Target, machine: Rendezvous | None) -> OutputPlace | None:
    """Where the model goes, to look at; None where the first of several machines does that."""
    output = _output(plan)
    if output is None or (machine is not None and machine.rank):
        return None
    key = plan.stage.entry.names.output
    return OutputPlace(output=output, run=target.folder, attempt=target.attempt, key=key)


def _foreign(start: StartPlan, plan: Plan) -> tuple[Finding, ...]:
    """Files in the output folder that launch did not make, by what was found of a start besides."""
    if start.place is None:
        return ()
    codes = frozenset[str]()
    if start.facts.machine is not None:
        codes = frozenset(finding.code for finding in plan.all_findings)
    return about("machine", map(plan.stage.config.placed, start.place.foreign(codes)))


def _output(plan: Plan) -> Path | None:
    folder = plans.output_folder(plan)
    return None if folder is None else folder.absolute()


def _require_concealed(plan: Plan) -> None:
    """Raise InvalidConfig where a secret would stand on the command line, or in a file of the run folder."""
    stage = plan.stage
    watched = stage.options.probe is not None
    concealed = command.hide_secrets(plan.arguments(), plan, os.environ, watched=watched)
    faults = []
    for name in concealed.exposed:
        message = f"without the probe `{name}`, a secret, would stand in the training's command line, "
        message += "which every user of the machine can read"
        faults.append(_exposed(stage, name, message, "leave the probe on: it takes it from the environment"))
    if faults:
        raise InvalidConfig(faults)
    for name in command.secrets_in_file(plan, os.environ):
        message = f"`{name}` holds a secret, and no flag can carry it: it would stand in a file of the run folder"
        help = "leave it out: `hf auth login`, or the variable HF_TOKEN, is what `datasets` reads"
        raise InvalidConfig(_exposed(stage, name, message, help))


def _exposed(stage: Stage, name: str, message: str, help: str) -> Finding:
    key = f"args.{name}"
    return launch_finding("error", "exposed-secret", message, help, key=key, **stage.config.origin(key).place)


def of_earlier_run(dry: Prepared) -> tuple[Finding, ...]:
    """That a dry run's command writes into the output of a run here, of which it knows nothing."""
    if dry.attempt == 1 or not rundir.read_manifest(dry.folder):
        return ()
    message = f"{dry.output} is the output of {dry.folder.path.name}; pasted, this command may overwrite it"
    help = "start it without --dry-run, which compares the two first, or add --fresh for a new folder"
    stage = dry.plan.stage
    warning = launch_finding("warning", "earlier-run", message, help, key=f"args.{stage.entry.names.output}")
    return (stage.config.placed(warning),)


def _on_our_command_line(made: Plan) -> Iterator[Finding]:
    redactor = made.redactor
    for key, origin in made.stage.config.origins.items():
        name, _, value = (origin.override or "").partition("=")
        if value and "${" not in value and redactor.redact({name: value}) != {name: value}:
            yield launch_finding(
                "warning",
                "exposed-secret",
                f"`{name}` holds a secret, and every user of the machine can read the command line of launch itself",
                f"set a variable, and write {name}='${{oc.env:VARIABLE}}'",
                key=key,
                about="machine",
                **origin.place,
            )
