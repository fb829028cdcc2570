"""From a command line to everything decided: stage, plan, command, place. Nothing starts here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from launcher.cache import inputs, keys
from launcher.cache.keys import Cache, environment
from launcher.errors import Finding, InvalidConfig, about, errors, launch_finding
from launcher.machine.devices import Devices
from launcher.machine.python import Trainer
from launcher.paths import exists
from launcher.plan import command, plan
from launcher.plan.plan import Plan
from launcher.planning import check
from launcher.planning.collect import Facts, Scope, collect
from launcher.planning.doctor import checks
from launcher.planning.neighbourhood import OutputPlace
from launcher.planning.request import Request
from launcher.planning.resume import decision as resume
from launcher.redaction import redact
from launcher.runs import lease, rendezvous, rundir
from launcher.runs.attempt import Command
from launcher.runs.record import Manifest
from launcher.runs.rendezvous import Rendezvous
from launcher.runs.rundir import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything decided, nothing started.

    `machine` is which of several machines this is, `forecast` what the plan says of memory, time and disk.
    `dry_run_folder` is that of a dry run's command where `folder` is an earlier run's, which stays as it is.
    `is_new` says that there was no `folder` when this was planned: a start makes it.
    """

    facts: Facts
    plan: Plan
    command: Command
    folder: RunFolder
    attempt: int
    output: Path | None
    caches: tuple[keys.Cache, ...] = ()
    devices: Devices | None = None
    warnings: tuple[Finding, ...] = ()
    machine: Rendezvous | None = None
    decision: resume.Decision = field(default_factory=resume.Decision)
    requested_output: Path | None = None
    input_digests: tuple[dict[str, Any], ...] = ()
    forecast: Mapping[str, Any] | None = None
    dry_run_folder: RunFolder | None = None
    is_new: bool = False

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.plan.all_findings, *self.warnings)

    def as_json(self) -> dict[str, object]:
        shown = self.command.redacted()
        files = {"files": dict(shown.files)} if shown.files else {}
        return {
            "plan": {"gpus": [self.plan.as_json()]},
            "upstream": self.plan.stage.upstream.as_json(),
            "derived": {name: d.value for name, d in self.plan.derived.items()},
            "argv": list(shown.argv),
            "env": dict(shown.env),
            "cwd": str(shown.cwd),
            **files,
            "run": str((self.dry_run_folder or self.folder).path),
        }

    def for_record(self) -> dict[str, Any]:
        return {
            **({} if self.forecast is None else {"plan": dict(self.forecast)}),
            "resume": self.decision.as_json(),
            "asked_output": None if self.requested_output is None else str(self.requested_output),
            "contents": list(self.input_digests),
        }


class _Location(NamedTuple):
    """`earlier` is the folder of the attempts that `history` tells of; for `dry_run_folder` see `Prepared`."""

    requested: Path | None
    output: resume.OutputChoice
    folder: RunFolder
    attempt: int
    dry_run_folder: RunFolder | None
    history: Sequence[Manifest]
    earlier: RunFolder | None


def _locate(facts: Facts, machine: Rendezvous | None) -> _Location:
    request = facts.request
    stage = facts.stage
    root = request.runs or rundir.runs_root()
    # what launch derives does not move an output that the stage file names
    given = stage.entry.names.output in stage.args
    named = stage.backend.output_folder(stage.values) if given else None
    requested = None if named is None else named.absolute()
    placed = resume.choose_output(stage, requested, rundir.newest_first(root), fresh=request.fresh)
    kind, rank, dry_run_folder = stage.options.stage, 0 if machine is None else machine.rank, None
    if request.folder is None:
        folder, attempt = rundir.choose(kind, stage.name, placed.output, root, rank=rank)
    else:
        folder = request.folder
        attempt = max(one.attempts() for one in folder.nodes()) + 1
    if facts.machine is None and exists(folder.path):
        # what is pasted is no attempt of that run, and must not write into its record
        dry_run_folder, _ = rundir.choose(kind, stage.name, None, root)
    earlier = folder if attempt > 1 else None
    history, last = resume.manifests(kind, earlier, placed.output), lease.newest(placed.output)
    if rank and last is not None and last.beats():
        # the first of several machines has begun already: that is this very start
        history = history[:-1]
    if earlier is None and history and last is not None and os.path.isdir(last.run):
        earlier = RunFolder(Path(last.run))
    return _Location(requested, placed, folder, attempt, dry_run_folder, history, earlier)


def prepare(request: Request, scope: Scope) -> Prepared:
    """Read and plan a request; see `collect` and `complete` for what is raised."""
    return complete(collect(request, scope))


def complete(facts: Facts) -> Prepared:
    """Plan what was read; where that is about this machine too, say whether it is ready. Writes nothing.

    Raises InvalidConfig, NotReady or UsageError.
    """
    request, trainer = facts.request, facts.trainer
    machine: Rendezvous | None = None
    if facts.look is not None:
        machine = rendezvous.find(request.nodes, request.node_rank, request.main_address, os.environ)
    location = _locate(facts, machine)
    made = check.settle(
        facts,
        output=location.folder.path / "model",
        decided=location.output.derived,
        attempts=len(location.history) or None,
    )
    output = _output(made)
    place = _place(made, location, output, machine)
    if place is not None:
        made = replace(made, findings=(*made.findings, *map(made.stage.config.placed, place.nested())))
    if facts.machine is None:
        caches = keys.derive(made, trainer.packages, lenient=True)
        beside = _foreign(made, place, ())
        return _prepared(facts, location, keys.applied(made, caches), caches=caches, warnings=beside)
    if any(finding.about != "machine" for finding in errors(made.all_findings)):
        raise InvalidConfig(made.all_findings)
    chosen = facts.choose_devices()
    warnings = checks.require_ready(made, trainer, chosen)
    caches = keys.derive(made, trainer.packages)
    made = keys.applied(made, caches)
    now = inputs.of_plan(made)
    decision = resume.judge(
        made,
        output=output,
        history=location.history,
        folder=location.earlier,
        trainer=trainer,
        caches=caches,
        now=now,
        allowed=request.allowed,
    )
    if decision.kind == "finished" and location.earlier not in (None, location.folder):
        location = location._replace(folder=location.earlier)
    findings = (*made.findings, *keys.findings(made, caches), *decision.findings)
    made = replace(plan.with_derived(made, decision.derived), findings=findings)
    return _prepared(
        facts,
        location,
        made,
        caches=caches,
        machine=machine,
        devices=chosen,
        warnings=(*warnings, *_foreign(made, place, made.all_findings)),
        decision=decision,
        input_digests=tuple(now),
    )


def _place(made: Plan, location: _Location, output: Path | None, machine: Rendezvous | None) -> OutputPlace | None:
    """Where the model goes, for what is asked of that; None where the first of several machines has asked."""
    if output is None or (machine is not None and machine.rank):
        return None
    key = made.stage.entry.names.output
    return OutputPlace(output=output, run=location.folder, attempt=location.attempt, key=key)


def _foreign(made: Plan, place: OutputPlace | None, said: Iterable[Finding]) -> tuple[Finding, ...]:
    if place is None:
        return ()
    codes = frozenset(finding.code for finding in said)
    return about("machine", map(made.stage.config.placed, place.foreign(codes)))


def _output(made: Plan) -> Path | None:
    folder = plan.output_folder(made)
    return None if folder is None else folder.absolute()


def _prepared(facts: Facts, location: _Location, made: Plan, *, caches: tuple[Cache, ...], **decided: Any) -> Prepared:
    if errors(made.all_findings, strict=facts.request.strict):
        raise InvalidConfig(made.all_findings)
    watched = made.stage.options.probe is not None
    concealed = command.hide_secrets(made.arguments(), made, os.environ, watched=watched)
    if concealed.exposed:
        raise InvalidConfig(
            launch_finding(
                "error",
                "exposed-secret",
                f"without the probe `{name}`, a secret, would stand in the training's command line, "
                "which every user of the machine can read",
                "leave the probe on: it takes it from the environment",
                key=f"args.{name}",
                **made.stage.config.origin(f"args.{name}").place,
            )
            for name in concealed.exposed
        )
    for name in command.secrets_in_file(made, os.environ):
        message = f"`{name}` holds a secret, and no flag can carry it: it would stand in a file of the run folder"
        help = "leave it out: `hf auth login`, or the variable HF_TOKEN, is what `datasets` reads"
        place = made.stage.config.origin(f"args.{name}").place
        raise InvalidConfig(launch_finding("error", "exposed-secret", message, help, key=f"args.{name}", **place))
    prepared = Prepared(
        facts=facts,
        plan=made,
        command=_command(
            made,
            facts.trainer,
            location.dry_run_folder or location.folder,
            caches=caches,
            devices=decided.get("devices"),
            attempt=1 if location.dry_run_folder else location.attempt,
        ),
        folder=location.folder,
        attempt=location.attempt,
        output=_output(made),
        caches=caches,
        requested_output=location.requested,
        dry_run_folder=location.dry_run_folder,
        is_new=not exists(location.folder.path),
        **decided,
    )
    return replace(prepared, warnings=(*prepared.warnings, *_on_our_command_line(made)))


def _command(
    made: Plan, trainer: Trainer, folder: RunFolder, *, caches: Sequence[Cache], devices: Devices | None, attempt: int
) -> Command:
    visible = devices.env() if devices is not None and made.gpus else None
    return command.build(
        made, trainer, folder.path, environ=os.environ, caches=environment(caches), devices=visible, attempt=attempt
    )


def in_folder(prepared: Prepared, folder: RunFolder) -> Prepared:
    """The same new run in another run folder, with the model inside where the stage file has no place for it."""
    made = prepared.plan
    name = made.stage.entry.names.output
    if name not in made.stage.args:
        inside = made.derived[name]._replace(value=str(folder.path / "model"))
        made = plan.with_derived(made, {name: inside})
    built = _command(
        made,
        prepared.facts.trainer,
        folder,
        caches=prepared.caches,
        devices=prepared.devices,
        attempt=prepared.attempt,
    )
    return replace(prepared, plan=made, command=built, folder=folder, output=_output(made))


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
    for key, origin in made.stage.config.origins.items():
        name, _, value = (origin.override or "").partition("=")
        if value and "${" not in value and redact({name: value}) != {name: value}:
            yield launch_finding(
                "warning",
                "exposed-secret",
                f"`{name}` holds a secret, and every user of the machine can read the command line of launch itself",
                f"set a variable, and write {name}='${{oc.env:VARIABLE}}'",
                key=key,
                about="machine",
                **origin.place,
            )
