"""What a command answered about a real training, and what the training recorded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import real_training


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The exit code of a command and its JSON."""

    code: int
    envelope: Any

    @property
    def data(self) -> Any:
        return self.envelope["data"]

    @property
    def run(self) -> Path:
        return Path(self.data["run"])

    @property
    def states(self) -> dict[str, str]:
        """The state of each point of the verdict, by the point's name."""
        return real_training.states(self.envelope)

    @property
    def outcome(self) -> tuple[int, str]:
        return self.code, self.data["status"]

    def point(self, name: str) -> Any:
        return find_point(self.data, name)

    def finding(self, code: str) -> Any:
        """The only finding with this code."""
        findings = self.envelope["findings"]
        matching = [finding for finding in findings if finding["code"] == code]
        assert len(matching) == 1, findings
        return matching[0]


def launch(place: Path, *words: str) -> Answer:
    with pytest.MonkeyPatch.context() as patch:
        # several threads only slow down models this small
        patch.setenv("OMP_NUM_THREADS", "1")
        # a fixture of a module begins before the environment of its first test is set
        patch.setenv("LAUNCH_REHEARSE", "0")
        code, envelope = real_training.launch(place, *words)
    return Answer(code=code, envelope=envelope)


def succeed(place: Path, *words: str) -> Answer:
    """Run a command that must exit with 0."""
    answer = launch(place, *words)
    assert answer.code == 0, answer.envelope
    return answer


def find_point(verdict: Any, name: str) -> Any:
    return next(point for point in verdict["points"] if point["name"] == name)


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_events(run: Path, name: str) -> list[Any]:
    """The events of this name that the first rank recorded."""
    records = read_lines(run / "probe" / "rank-0.jsonl")
    return [record for record in records if record["event"] == name]


def supplied(run: Path) -> set[str]:
    """What the probe put in place of something that a machine without a GPU lacks."""
    return {event["what"] for event in read_events(run, "supplied")}
