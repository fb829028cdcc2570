"""Rehearsals before something long starts: a job in a queue, a series of runs, a download."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from launcher.errors import Finding, InvalidConfig, NotReady, errors
from launcher.lifecycle.prepare import ResolvedStage
from launcher.workflows.rehearse import memory, rehearsal
from launcher.workflows.rehearse.ask import Servers

VARIABLE = "LAUNCH_REHEARSE"
"""0: nothing is rehearsed unless the command line or the stage file asks for it."""


def require(
    stages: Mapping[str, ResolvedStage], say: Callable[[str], None], *, by_itself: bool
) -> tuple[Finding, ...]:
    """Rehearse what is to start, by name; the warnings, each once.

    A stage is rehearsed if the command line or its file says so, or where it happens `by_itself` and neither
    they nor `LAUNCH_REHEARSE=0` say no. Raises InvalidConfig with all that any trainer refuses, and NotReady
    where a rehearsal that was asked for cannot be had.
    """
    found: dict[str, Finding] = {}
    strict = False
    with Servers() as servers:
        for name, resolved in stages.items():
            requested = _requested(resolved)
            if requested is False or (requested is None and not by_itself):
                continue
            try:
                done = rehearsal.rehearse(resolved.checked, resolved.trainer, servers, say=say)
            except NotReady as error:
                if requested:
                    raise
                done = rehearsal.Rehearsal(findings=_not_possible(error.findings), seconds=0)
            strict = strict or resolved.request.strict
            for one in done.findings:
                if one.severity != "note" and one.message not in found:
                    whose = f"[{name}] " if len(stages) > 1 else ""
                    found[one.message] = replace(one, message=whose + one.message)
    if errors(found.values(), strict=strict):
        raise InvalidConfig(tuple(found.values()))
    return tuple(found.values())


def row_tokens(resolved: ResolvedStage) -> str | None:
    """Tokens a row as an earlier rehearsal saw them, in the words of `--row-tokens`; None without one."""
    known = memory.recall(resolved.checked, resolved.trainer)
    return None if known is None else known.get("row_tokens")


def _requested(resolved: ResolvedStage) -> bool | None:
    if resolved.request.rehearse is not None:
        return resolved.request.rehearse
    option = resolved.stage.options.rehearse
    return False if option is None and os.environ.get(VARIABLE) == "0" else option


def _not_possible(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Why nothing could be rehearsed, where nobody had asked for it."""
    return tuple(
        replace(one, severity="warning", code="not-rehearsed", message=f"not rehearsed: {one.message}")
        for one in findings
    )
