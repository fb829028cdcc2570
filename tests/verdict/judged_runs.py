"""Builders of what a verdict reads: a run folder, events of its probe, lines of its log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.verdict.check import Point, Verdict, expect_by_log, judge_evidence
from launcher.verdict.evidence import read_log, read_run

Event = dict[str, Any]

STAMP = "2026-11-20 15:41:37 - INFO - "
SAVED: Event = {"event": "saved", "path": "out"}
END: Event = {"event": "end", "exit": 0}


def step(number: int, loss: float | None = 2.0, finite: bool = True) -> Event:
    return {"event": "step", "step": number, "loss": loss, "finite": finite}


def steps(last: int, first: int = 1) -> list[Event]:
    return [step(number) for number in range(first, last + 1)]


def liger(**calls: int) -> Event:
    return {"event": "liger", "calls": calls}


def total(count: int) -> str:
    return f"{STAMP}finetune.py:745 - [RANK 0]   Total optimization steps = {count}\n"


def sft(count: int, losses: Sequence[float | str] = (), until: int | None = None) -> str:
    """The log of an SFT run as far as its last loss line."""
    lines = [total(count)]
    values = losses or [2.5] * count
    for number, loss in enumerate(values[:until], start=1):
        lines.append(
            f"\r 10%|█ | {number}/{count} [00:01<00:09,  1.00s/it]{STAMP}finetune.py:956 - "
            f"[RANK 0]   Step: {number}, LR: 1e-05, Loss: {loss}, TPS: 12.5\n"
        )
    return "".join(lines)


def dump(block: str = "FlatArguments", **values: object) -> str:
    """The arguments as open-instruct prints them."""
    lines = "".join(f"│   │   {key}={value!r},\n" for key, value in values.items())
    return f"[\n│   {block}(\n{lines}│   )\n]\n"


class Run:
    """A run folder in the making."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "probe").mkdir(parents=True)

    def log(self, content: str) -> Run:
        (self.folder / "console.log").write_text(content)
        return self

    def rank(self, number: int, *events: Event, world: int = 1) -> Run:
        start = {"event": "start", "rank": number, "world": world, "attempt": 1}
        lines = [json.dumps(event) for event in (start, *events)]
        record = self.folder / "probe" / f"rank-{number}.jsonl"
        record.write_text("\n".join([*lines, ""]))
        return self

    def ranks(self, *records: Sequence[Event] | None) -> Run:
        """The events of each rank; one that is None left no record."""
        for number, events in enumerate(records):
            if events is not None:
                self.rank(number, *events, world=len(records))
        return self

    def exit(self, code: int, number: int | None = None) -> Run:
        values = {"returncode": code, "signal": number, "stopped": None, "attempt": 1}
        (self.folder / "exit.json").write_text(json.dumps(values))
        return self

    def manifest(self, record: Mapping[str, Any]) -> Run:
        (self.folder / "run.json").write_text(json.dumps(record))
        return self

    def judge(self, stage: str = "sft", **expected: str | None) -> Verdict:
        return judge_evidence(stage, expected, read_run(self.folder))  # type: ignore[arg-type]

    def point(self, name: str, want: str | None = None) -> Point:
        """A point of an SFT of which this is expected."""
        expected = {} if want is None else {name: want}
        return self.judge("sft", **expected).point(name)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def verdict_of_log(
    folder: Path, content: str, expected: Mapping[str, str | None] | None = None
) -> Verdict:
    """By default what is expected is what the log says that the run was asked for."""
    path = folder / "some.log"
    path.write_text(content)
    evidence = read_log(path)
    if expected is None:
        expected = expect_by_log(evidence)
    return judge_evidence(None, expected, evidence)


def point_of_log(folder: Path, content: str, name: str, want: str | None = None) -> Point:
    expected = {} if want is None else {name: want}
    return verdict_of_log(folder, content, expected).point(name)


def brief(point: Point) -> tuple[str, bool | None]:
    return point.state, point.ok


def advice(point: Point) -> str:
    """The reason and the help of a point."""
    return f"{point.detail.get('reason')} {point.detail.get('help')}"
