"""Commands of launch in the process of a test: starting another one takes longer than most."""

from dataclasses import dataclass

import pytest

from launcher.cli import main


@dataclass
class Answer:
    code: int
    out: str
    err: str


def launch(capsys: pytest.CaptureFixture[str], *words: str) -> Answer:
    capsys.readouterr()
    code = main.main(list(words))
    return Answer(code, *capsys.readouterr())
