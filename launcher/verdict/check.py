"""Judge evidence by what was expected: a `Verdict` of points, each with the lines it rests on.

`ok` is True or False only with proof; it is None if something was expected and nothing proves it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from launcher import redaction
from launcher.config.keys import PAIRED
from launcher.config.points import ANY, DEFAULTS, POINTS, PointType
from launcher.errors import Exit, InvalidConfig, launch_finding, unreadable
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.codec import Misfit, Omission
from launcher.redaction import Redactor
from launcher.runs.record import Json, as_mapping
from launcher.verdict.evidence import Event, Evidence, ExitRecord, ProbeStep, read_log
from launcher.verdict.logs.scan import Log
from launcher.verdict.metrics import compute_metrics
from launcher.verdict.points import Citable, Observation

Status = Literal["pass", "fail", "unproven"]

Observe = Callable[[Evidence, str | None], Observation]

NOT_SHOWN = "unknown"
"""What is expected of a point if no record shows what was requested."""

CITES = 8
"""Lines that a point cites at most: 64 ranks would say the same."""

_RANKS_NAMED = 8
_EVENT_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Cite:
    """A line that a point rests on; `line` is 1-based."""

    source: Literal["probe", "log", "exit"]
    file: str
    line: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    name: str
    state: str
    expected: str | None
    ok: bool | None
    evidence: tuple[Cite, ...] = ()
    detail: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to `did what was requested run?`; `steps` is the last optimizer step."""

    status: Status
    stage: str | None
    steps: int | None
    points: tuple[Point, ...]
    metrics: Mapping[str, float | None]

    def point(self, name: str) -> Point:
        by_name = {point.name: point for point in self.points}
        return by_name[name]

    @property
    def stopped(self) -> str | None:
        """Why a process of the run ended itself, in one line; None if none did."""
        finish = self.point("finish").detail
        error = finish.get("error")
        if not error or finish.get("reason") not in ("violation", "hang"):
            return None
        return str(as_mapping(error)["message"])

    def amend(self, name: str, detail: Mapping[str, object], **changes: Any) -> Verdict:
        """The verdict with more details of a point, and other fields of it."""
        points = {point.name: point for point in self.points}
        point = points[name]
        points[name] = replace(point, detail={**point.detail, **detail}, **changes)
        return self.with_points(points.values())

    def with_points(self, points: Iterable[Point]) -> Verdict:
        points = tuple(points)
        status = _combine_status(point.ok for point in points)
        return replace(self, points=points, status=status)

    def as_json(self) -> dict[str, object]:
        points = []
        for point in self.points:
            evidence = [asdict(cite) for cite in point.evidence]
            points.append({**asdict(point), "evidence": evidence})
        return {**asdict(self), "points": points}


def read_verdict(data: Json) -> Verdict | None:
    """Read what `Verdict.as_json` wrote; None if it is damaged."""
    omissions: list[Omission] = []
    try:
        verdict = codec.read_record(Verdict, data, omissions)
    except Misfit:
        return None
    has_finish = any(point.name == "finish" for point in verdict.points)
    if omissions or not has_finish:
        return None
    return verdict


def _find_observer(point: PointType) -> Observe:
    module = import_module(point.observed_in)
    observe: Observe = getattr(module, f"observe_{point.name}")
    return observe


def judge_evidence(
    stage: str | None, expected: Mapping[str, str | None], evidence: Evidence
) -> Verdict:
    """Compare what was expected with what the evidence shows.

    A state of None or `any` expects nothing.
    """
    stage = stage or evidence.stage
    points = []
    for kind in POINTS:
        if kind.pairs_only and stage not in PAIRED:
            continue
        state = expected.get(kind.name, kind.default)
        if kind.needs_plan and state is None and evidence.manifest.processes is None:
            # of a log alone, the plan is unknown
            continue
        observe = _find_observer(kind)
        if state == ANY:
            state = None
            observation = replace(observe(evidence, None), unwanted=False)
        else:
            observation = observe(evidence, state)
        if kind.optional and state is None and observation.state == "unknown":
            # the record of an older version, or a log alone
            continue
        points.append(_judge_point(kind, state, observation))
    return Verdict(
        status=_combine_status(point.ok for point in points),
        stage=stage,
        steps=evidence.last_step,
        points=tuple(points),
        metrics=compute_metrics(evidence),
    )


def judge_log(path: Path, redactor: Redactor | None = None) -> Verdict:
    """The verdict of a console log; `redactor` is that of its run, if that is known."""
    redactor = redactor or redaction.find_process_secrets()
    return redactor.redact(judge_log_evidence(read_training_log(path)))


def judge_log_evidence(evidence: Evidence) -> Verdict:
    """Judge a console log by itself, by what it says was requested."""
    return judge_evidence(evidence.stage, expect_by_log(evidence), evidence)


def read_training_log(path: Path) -> Evidence:
    """The evidence of a console log alone.

    Raises NotReady if it cannot be read, InvalidConfig if no line of it could be a training's.
    """
    try:
        evidence = read_log(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if evidence.log is None or not _shows_training(evidence.log):
        finding = launch_finding(
            "error",
            "not-a-training-log",
            "not a training log: it holds no arguments, step, progress bar or error",
            "name a run (launch runs), or the console log of an SFT or DPO training",
            file=str(path),
        )
        raise InvalidConfig(finding)
    return evidence


def _shows_training(log: Log) -> bool:
    return bool(log.signals or log.steps or log.blocks or log.last_bar)


def decide_exit_code(verdict: Verdict, *, allow_unproven: bool) -> Exit:
    if verdict.status == "pass":
        return Exit.OK
    if verdict.status == "unproven" and allow_unproven:
        return Exit.OK
    return Exit.VERDICT


def _combine_status(oks: Iterable[bool | None]) -> Status:
    states = set(oks)
    if False in states:
        return "fail"
    if None in states:
        return "unproven"
    return "pass"


def expect_nothing() -> dict[str, str | None]:
    """What is expected of a run without any record of what was requested."""
    return {point.name: NOT_SHOWN for point in POINTS if point.from_arguments}


def expect_by_log(evidence: Evidence) -> dict[str, str | None]:
    """What was requested, by the arguments near the top of a log, or by its messages."""
    log = evidence.log
    if log is None:
        return expect_nothing()
    expected: dict[str, str | None] = {"liger": None, "packing": None, **DEFAULTS}
    if log.headless:
        expected |= {"liger": NOT_SHOWN, "packing": NOT_SHOWN}
    # TRL shows no arguments, and says these only if they were requested
    if log.all("liger_asked"):
        expected["liger"] = "engaged"
    if log.all("packing"):
        expected["packing"] = "isolated"
    liger = log.arguments.get("use_liger_kernel")
    if liger == "True":
        expected["liger"] = "engaged"
    elif liger == "False":
        expected["liger"] = "off"
    packing = log.arguments.get("packing")
    if packing == "False" or (packing == "True" and evidence.packs_nothing):
        expected["packing"] = "off"
    elif packing == "True":
        expected["packing"] = "isolated"
    return expected


def _meets(kind: PointType, expected: str | None, observation: Observation) -> bool:
    if expected is None:
        return False
    accepted = kind.meets.get(expected, (expected,))
    return observation.state in accepted or observation.synonym == expected


def _judge_point(kind: PointType, expected: str | None, observation: Observation) -> Point:
    ok: bool | None = True
    if expected is not None or observation.unwanted:
        ok = None
        if observation.proved and expected != NOT_SHOWN:
            ok = _meets(kind, expected, observation)
    detail = observation.detail
    if ok is not True:
        reasons = _explain_point(expected, observation)
        # first, and not to be replaced
        detail = {**reasons, **detail, **reasons}
    return Point(
        name=kind.name,
        state=observation.state,
        expected=expected,
        ok=ok,
        evidence=tuple(map(_cite, observation.cites[:CITES])),
        detail=detail,
    )


def _explain_point(expected: str | None, observation: Observation) -> dict[str, str]:
    """Why a point is not as expected, and what to do about it, as far as that is known."""
    if expected == NOT_SHOWN:
        return {"reason": "what was requested is unknown: its record is missing"}
    reason = observation.reason
    help = observation.help
    missing = observation.detail.get("missing_ranks")
    if reason is None and observation.state == "unknown":
        reason = "no record of it, neither by the probe nor in the log"
    elif reason is None and isinstance(missing, list):
        ranks = ", ".join(map(str, missing[:_RANKS_NAMED]))
        if len(missing) > _RANKS_NAMED:
            ranks += ", …"
        reason = f"no record of rank {ranks}"
        help = "its file in `probe/` is missing or cut off: check that folder, and the disk"
    reasons = {}
    if reason is not None:
        reasons["reason"] = reason
    if help is not None:
        reasons["help"] = help
    return reasons


def _cite(source: Citable) -> Cite:
    file = str(source.path)
    match source:
        case ExitRecord():
            text = f"returncode {source.returncode}, signal {source.signal}"
            return Cite(source="exit", file=file, line=1, text=text)
        case Event():
            event = {"event": source.name, **source.fields}
            text = json.dumps(event, ensure_ascii=False)[:_EVENT_CHARS]
            return Cite(source="probe", file=file, line=source.line, text=text)
        case ProbeStep():
            text = f"step {source.step}, loss {source.loss}, finite {source.finite}"
            return Cite(source="probe", file=file, line=source.line, text=text)
        case _:
            return Cite(source="log", file=file, line=source.line, text=source.text)
