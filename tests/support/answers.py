"""The command line called in this process, and its answer read as JSON."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from launcher.cli.main import main


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    findings: list[Any]
    data: Any

    def with_code(self, code: str) -> list[Any]:
        return [finding for finding in self.findings if finding["code"] == code]

    @property
    def refusal(self) -> Any:
        """The first finding of a command that failed."""
        assert self.code != 0
        return self.findings[0]

    @property
    def codes(self) -> set[str]:
        return {finding["code"] for finding in self.findings}

    @property
    def errors(self) -> list[tuple[str, str]]:
        """Code and key of each error."""
        errors = []
        for finding in self.findings:
            if finding["severity"] == "error":
                errors.append((finding["code"], finding["key"]))
        return errors


Ask = Callable[..., Answer]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Call a command with `--format json`."""

    def call(*words: str) -> Answer:
        capsys.readouterr()
        code = main([*words, "--format", "json"])
        envelope = json.loads(capsys.readouterr().out)
        return Answer(code=code, findings=envelope["findings"], data=envelope["data"])

    return call
