"""A stage rehearsed: what the trainer refuses, named by the arguments without which it does not."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from launcher.errors import Finding, InvalidConfig, NotReady, launch_finding, select_errors
from launcher.machine.python import Trainer
from launcher.planning.collect import Facts
from launcher.stage.stage import Judged
from launcher.upstream.trainers import find_entry
from launcher.workflows.rehearse import memory
from launcher.workflows.rehearse.arguments import ROWS
from launcher.workflows.rehearse.ask import Servers
from launcher.workflows.rehearse.attempts import Attempts
from launcher.workflows.rehearse.remarks import DROPPED
from launcher.workflows.rehearse.result import FAILED, Rehearsal

Say = Callable[[str], None]
VARIABLE = "LAUNCH_REHEARSE"
"""0: nothing is rehearsed unless the command line or the stage file asks for it."""


def rehearse(
    judged: Judged,
    trainer: Trainer,
    servers: Servers | None = None,
    *,
    anew: bool = False,
    say: Say = lambda _: None,
) -> Rehearsal:
    """Run a stage's own script on the CPU with a tiny model, and say everything it refuses.

    It uses one of the `servers`, else one of its own; `say` gets a line before what takes long.
    What errors of `judged` are about is left out, so that the rest is found too. Raises NotReady
    where the trainer's Python cannot import the script.
    """
    if judged.schema is None or judged.options is None or judged.upstream is None:
        return Rehearsal(findings=(), seconds=0)
    entry = find_entry(judged.schema)
    if entry.rehearsal is None:
        message = f"{entry.script} is not rehearsed: "
        message += "how it trains on a CPU with few rows is not described"
        help = "`launch prepare` tokenises its data; a short run: max_train_steps=2"
        note = launch_finding("note", "not-rehearsed", message, help)
        return Rehearsal(findings=(judged.config.placed(note),), seconds=0)
    remembered = None if anew else memory.recall(judged, trainer)
    if remembered is not None:
        findings = tuple(map(judged.config.placed, remembered.findings))
        return replace(remembered, findings=findings, remembered=True)
    began = time.monotonic()
    say(f"rehearsing {judged.config.path} on the CPU: importing packages, usually 15 to 60 s")
    with contextlib.ExitStack() as stack:
        opened = servers or stack.enter_context(Servers())
        server = opened.of(trainer, judged.schema.backend, judged.schema.key, judged.upstream.root)
        result = Attempts(judged, server).run()
    result = replace(result, seconds=time.monotonic() - began)
    if not result.failed:
        memory.keep(judged, trainer, result)
    return result


def merge_findings(first: Iterable[Finding], more: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings of validation, then those of a rehearsal that it does not say itself, or worse."""
    findings = list(first)
    codes = {finding.code for finding in findings}
    wrong = {finding.key for finding in findings if finding.severity == "error" and finding.key}
    for finding in more:
        is_said = finding.code in codes or (finding.severity != "note" and finding.key in wrong)
        if not is_said:
            findings.append(finding)
    return tuple(findings)


def require(stages: Mapping[str, Facts], say: Say, *, by_itself: bool) -> tuple[Finding, ...]:
    """Rehearse what is to start, by name; the warnings, each once.

    A stage is rehearsed if the command line or its file says so, or where it happens `by_itself`
    and neither they nor `LAUNCH_REHEARSE=0` say no. Raises InvalidConfig with all that any trainer
    refuses, and NotReady where a rehearsal that was requested cannot be had.
    """
    findings: dict[str, Finding] = {}
    failed: list[Finding] = []
    is_strict = False
    with Servers() as servers:
        for name, facts in stages.items():
            requested = _read_request(facts)
            if requested is False or (requested is None and not by_itself):
                continue
            is_strict = is_strict or facts.request.strict
            for finding in _rehearse_stage(facts, servers, say, is_required=requested is True):
                named = finding
                if len(stages) > 1:
                    named = replace(finding, message=f"[{name}] {finding.message}")
                if finding.code == FAILED:
                    failed.append(named)
                elif finding.severity != "note":
                    findings.setdefault(finding.message, named)
    if select_errors(findings.values(), strict=is_strict):
        raise InvalidConfig((*findings.values(), *failed))
    return (*findings.values(), *failed)


def _read_request(facts: Facts) -> bool | None:
    """True if a rehearsal is asked for, False if it is refused, else None."""
    if facts.request.rehearse is not None:
        return facts.request.rehearse
    if facts.stage.options.rehearse is not None:
        return facts.stage.options.rehearse
    return False if os.environ.get(VARIABLE) == "0" else None


def _rehearse_stage(
    facts: Facts, servers: Servers, say: Say, *, is_required: bool
) -> tuple[Finding, ...]:
    try:
        return rehearse(facts.checked, facts.trainer, servers, say=say).findings
    except NotReady as error:
        if is_required:
            raise
        findings = []
        for finding in error.findings:
            message = f"not rehearsed: {finding.message}"
            findings.append(
                replace(finding, severity="warning", code="not-rehearsed", message=message)
            )
        return tuple(findings)


def recall_row_tokens(resolved: Facts) -> str | None:
    """Tokens a row by an earlier rehearsal, in the words of `--row-tokens`; None without one."""
    remembered = memory.recall(resolved.checked, resolved.trainer)
    return None if remembered is None else remembered.row_tokens


def recall_dropped_rows(resolved: Facts) -> tuple[Finding, ...]:
    """The rows that the trainer drops by an earlier rehearsal, which the plan still counts.

    Without a rehearsal a note says that it would count them.
    """
    stage = resolved.stage
    remembered = memory.recall(resolved.checked, resolved.trainer)
    if remembered is not None:
        findings = []
        for finding in remembered.findings:
            if finding.code == DROPPED:
                message = f"{finding.message}; the plan counts them"
                findings.append(stage.config.placed(replace(finding, message=message)))
        return tuple(findings)
    names = stage.entry.names
    limit = stage.values.get(names.max_length)
    joins_rows = stage.entry.packing == "always" or stage.values.get(names.packing or "")
    if not isinstance(limit, int) or joins_rows:
        return ()
    message = "the plan counts every row: how many the trainer drops at "
    message += f"`{names.max_length}: {limit}` is not known"
    help = f"`launch rehearse {stage.config.path}` counts those among the first {ROWS}"
    note = launch_finding("note", DROPPED, message, help, key=f"args.{names.max_length}")
    return (stage.config.placed(note),)
