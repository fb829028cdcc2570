"""What a command answered about a real training, and what the training recorded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import answers
import pytest
import real_training
from recorded_events import read_events


@dataclass(frozen=True, slots=True)
class Answer(answers.Answer):
    """The exit code of a command and its JSON, about a run."""

    @property
    def run(self) -> Path:
        return Path(self.data["run"])

    @property
    def states(self) -> dict[str, str]:
        """The state of each point of the verdict, by the point's name."""
        return real_training.states({"data": self.data})

    @property
    def outcome(self) -> tuple[int, str]:
        return self.code, self.data["status"]

    def finding(self, code: str) -> Any:
        """The only finding with this code."""
        (finding,) = self.with_code(code)
        return finding


def launch(place: Path, *words: str) -> Answer:
    with pytest.MonkeyPatch.context() as patch:
        # several threads only slow down models this small
        patch.setenv("OMP_NUM_THREADS", "1")
        # a fixture of a module begins before the environment of its first test is set
        patch.setenv("LAUNCH_REHEARSE", "0")
        code, envelope = real_training.launch(place, *words)
    return Answer(code=code, findings=envelope["findings"], data=envelope["data"])


def succeed(place: Path, *words: str) -> Answer:
    """Run a command that must exit with 0."""
    answer = launch(place, *words)
    assert answer.code == 0, answer
    return answer


def find_point(verdict: Any, name: str) -> Any:
    return next(point for point in verdict["points"] if point["name"] == name)


def supplied(run: Path) -> set[str]:
    """What the probe put in place of something that a machine without a GPU lacks."""
    return {event["what"] for event in read_events(run / "probe", "supplied")}
