"""What a run was to do + what it left behind -> a `Verdict`, each point with its evidence. `ok` is True or False only
where there is proof; None where something was expected and there is none either way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from launcher import redaction
from launcher.config.keys import PAIRED
from launcher.config.points import ANY, DEFAULTS, POINTS, PointType
from launcher.errors import Exit, InvalidConfig, launch_finding, unreadable
from launcher.machine import codec
from launcher.machine.codec import Misfit, Omission
from launcher.redaction import Redactor
from launcher.runs.record import mapping
from launcher.verdict.evidence import Event, Evidence, ExitRecord, ProbeStep, read_log
from launcher.verdict.metrics import metrics
from launcher.verdict.points import Citable, Observation

Status = Literal["pass", "fail", "unproven"]

Observe = Callable[[Evidence, str | None], Observation]

NOT_SHOWN = "unknown"  # what is expected of a point where the log does not show what was requested

UNKNOWN: Mapping[str, str] = {point.name: NOT_SHOWN for point in POINTS if point.from_arguments}
"""What is expected where no record says what was requested."""

CITES = 8  # of one point: 64 ranks would say the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Cite:
    """One line that a point of a verdict rests on; `line` is 1-based."""

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
        return {point.name: point for point in self.points}[name]

    @property
    def stopped(self) -> str | None:
        """Why a process of the run ended itself, in one line; None where none did."""
        finish = self.point("finish").detail
        broke = finish.get("reason") in ("violation", "hang")
        return str(mapping(finish.get("error"))["message"]) if broke and finish.get("error") else None

    def amended(self, name: str, detail: Mapping[str, object], **changes: Any) -> Verdict:
        old = self.point(name)
        new = replace(old, detail={**old.detail, **detail}, **changes)
        return self.with_points(new if point is old else point for point in self.points)

    def with_points(self, points: Iterable[Point]) -> Verdict:
        points = tuple(points)
        return replace(self, points=points, status=_status(point.ok for point in points))

    def as_json(self) -> dict[str, object]:
        points = [{**asdict(point), "evidence": [*map(asdict, point.evidence)]} for point in self.points]
        return {**asdict(self), "points": points}


def from_json(data: Mapping[str, Any]) -> Verdict | None:
    """What `Verdict.as_json` wrote; None where it is damaged."""
    left_out: list[Omission] = []
    try:
        verdict = codec.read(Verdict, data, left_out)
    except Misfit:
        return None
    return None if left_out or "finish" not in {point.name for point in verdict.points} else verdict


def _observer(point: PointType) -> Observe:
    module = import_module(f"launcher.verdict.{point.observed_in}")
    observe: Observe = getattr(module, f"observe_{point.name}")
    return observe


OBSERVERS: Mapping[str, Observe] = {point.name: _observer(point) for point in POINTS}


def judge(stage: str | None, expected: Mapping[str, str | None], evidence: Evidence) -> Verdict:
    """Compare what was expected with what the evidence shows. A state of None or `any` expects nothing."""
    named = stage or evidence.stage
    judged = []
    for kind in POINTS:
        if kind.pairs_only and named not in PAIRED:
            continue
        state = expected.get(kind.name, kind.default)
        if kind.needs_plan and state is None and evidence.manifest.processes is None:
            continue  # a stranger's run: nobody knows what was planned
        observe = OBSERVERS[kind.name]
        if state == ANY:
            state = None
            observed = replace(observe(evidence, None), unwanted=False)
        else:
            observed = observe(evidence, state)
        if kind.optional and state is None and observed.state == "unknown":
            continue  # a record of an older version, or a stranger's
        judged.append(_point(kind, state, observed))
    return Verdict(
        status=_status(point.ok for point in judged),
        stage=named,
        steps=evidence.last_step,
        points=tuple(judged),
        metrics=metrics(evidence),
    )


def judge_log(path: Path, redactor: Redactor | None = None) -> Verdict:
    """The verdict of a console log; `redactor` is that of its run, where that is known."""
    redactor = redactor or redaction.of_process()
    return redactor.redact(judge_alone(read_training_log(path)))


def judge_alone(found: Evidence) -> Verdict:
    """What a console log can prove by itself."""
    return judge(found.stage, expected_from_log(found), found)


def read_training_log(path: Path) -> Evidence:
    """The evidence of a console log alone. Raises NotReady where it cannot be read, InvalidConfig where no line of it
    could be a training's."""
    try:
        found = read_log(path)
    except OSError as error:
        raise unreadable(path, error) from None
    log = found.log
    if log is None or not (log.signals or log.steps or log.blocks or log.last_bar):
        message = "not a training log: it holds no arguments, step, progress bar or error"
        help = "name a run (launch runs), or the console log of an SFT or DPO training"
        raise InvalidConfig(launch_finding("error", "not-a-training-log", message, help, file=str(path)))
    return found


def exit_code(verdict: Verdict, *, allow_unproven: bool) -> Exit:
    passed = verdict.status == "pass" or (verdict.status == "unproven" and allow_unproven)
    return Exit.OK if passed else Exit.VERDICT


def _status(oks: Iterable[bool | None]) -> Status:
    known = {*oks}
    return "fail" if False in known else "unproven" if None in known else "pass"


def expected_from_log(found: Evidence) -> dict[str, str | None]:
    """What a stranger's run was to do, by the arguments dump near its top or by what follows it."""
    log = found.log
    if log is None:
        return dict(UNKNOWN)
    liger = {"True": "engaged", "False": "off"}.get(log.arguments.get("use_liger_kernel", ""))
    packs = "off" if found.packs_nothing else "isolated"
    packing = {"True": packs, "False": "off"}.get(log.arguments.get("packing", ""))
    # TRL shows no arguments, and says these only where they were requested
    liger = liger or ("engaged" if log.all("liger_asked") else None)
    packing = packing or ("isolated" if log.all("packing") else None)
    if log.headless:
        liger, packing = liger or NOT_SHOWN, packing or NOT_SHOWN
    return {"liger": liger, "packing": packing, **DEFAULTS}


def _meets(kind: PointType, expected: str | None, observed: Observation) -> bool:
    if expected is None:
        return False
    accepted = kind.meets.get(expected, (expected,))
    return observed.state in accepted or observed.synonym == expected


def _point(kind: PointType, expected: str | None, observed: Observation) -> Point:
    ok: bool | None = True
    if expected is not None or observed.unwanted:
        settled = observed.proved and expected != NOT_SHOWN
        ok = _meets(kind, expected, observed) if settled else None
    reason, help = observed.reason, observed.help
    absent = observed.detail.get("missing_ranks")
    if expected == NOT_SHOWN:
        reason, help = "what was requested is unknown: its record is missing", None
    elif reason is None and observed.state == "unknown":
        reason = "no record of it, neither by the probe nor in the log"
    elif reason is None and isinstance(absent, list):
        ranks = ", ".join(map(str, absent[:8])) + (", …" if absent[8:] else "")
        reason = f"no record of rank {ranks}"
        help = "its file in `probe/` is missing or cut off: check that folder, and the disk"
    why = {key: text for key, text in (("reason", reason), ("help", help)) if text is not None}
    return Point(
        name=kind.name,
        state=observed.state,
        expected=expected,
        ok=ok,
        evidence=tuple(map(_cite, observed.cites[:CITES])),
        detail=observed.detail if ok is True else {**why, **observed.detail, **why},
    )


def _cite(found: Citable) -> Cite:
    file = str(found.path)
    match found:
        case ExitRecord():
            text = f"returncode {found.returncode}, signal {found.signal}"
            return Cite(source="exit", file=file, line=1, text=text)
        case Event():
            text = json.dumps({"event": found.name, **found.fields}, ensure_ascii=False)[:300]
        case ProbeStep():
            text = f"step {found.step}, loss {found.loss}, finite {found.finite}"
        case _:
            return Cite(source="log", file=file, line=found.line, text=found.text)
    return Cite(source="probe", file=file, line=found.line, text=text)
