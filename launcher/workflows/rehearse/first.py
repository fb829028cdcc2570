"""Rehearsals before something long starts: a job in a queue, a series of runs, a download."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from launcher.errors import Finding, InvalidConfig, NotReady, errors
from launcher.lifecycle import prepare
from launcher.lifecycle.prepare import Request
from launcher.stage.stage import Judged
from launcher.workflows.rehearse import memory, rehearsal
from launcher.workflows.rehearse.ask import Servers

VARIABLE = "LAUNCH_REHEARSE"
"""0: nothing is rehearsed unless the command line or the stage file asks for it."""


def require(
    requests: Mapping[str, Request], say: Callable[[str], None], *, by_itself: bool
) -> tuple[Finding, ...]:
    """Rehearse what is to start, by name; the warnings, each once.

    A stage is rehearsed if the command line or its file says so, or where it happens `by_itself` and neither
    they nor `LAUNCH_REHEARSE=0` say no. Raises InvalidConfig with all that any trainer refuses, and NotReady
    where a rehearsal that was asked for cannot be had.
    """
    found: dict[str, Finding] = {}
    strict = False
    with Servers() as servers:
        for name, request in requests.items():
            judged, trainer = prepare.judge(request)
            wanted = _wanted(request, judged)
            if wanted is False or (wanted is None and not by_itself) or errors(judged.findings):
                # what rules refuse is said by whoever starts it
                continue
            try:
                done = rehearsal.rehearse(judged, trainer, servers, say=say)
            except NotReady as error:
                if wanted:
                    raise
                done = rehearsal.Rehearsal(findings=_not_possible(error.findings), seconds=0)
            strict = strict or request.strict
            for one in done.findings:
                if one.severity != "note" and one.message not in found:
                    whose = f"[{name}] " if len(requests) > 1 else ""
                    found[one.message] = replace(one, message=whose + one.message)
    if errors(found.values(), strict=strict):
        raise InvalidConfig(tuple(found.values()))
    return tuple(found.values())


def row_tokens(request: Request) -> str | None:
    """Tokens a row as an earlier rehearsal saw them, in the words of `--row-tokens`; None without one."""
    judged, trainer = prepare.judge(request)
    known = None if judged.schema is None else memory.recall(judged, trainer)
    return None if known is None else known.get("row_tokens")


def _wanted(request: Request, judged: Judged) -> bool | None:
    if request.rehearse is not None:
        return request.rehearse
    asked = None if judged.options is None else judged.options.rehearse
    return False if asked is None and os.environ.get(VARIABLE) == "0" else asked


def _not_possible(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Why nothing could be rehearsed, where nobody had asked for it."""
    return tuple(
        replace(
            one, severity="warning", code="not-rehearsed", message=f"not rehearsed: {one.message}"
        )
        for one in findings
    )
