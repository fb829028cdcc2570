"""The text of a function changes with its behaviour, and with nothing else."""

import ast

import pytest

from launcher.upstream.source.functions import normalise

STEP = """
class Trainer:
    def step(self, loss):
        loss.backward()
        if self.clip > 0:
            clip(self.model, self.clip)
"""

SAME = {
    "a docstring": STEP.replace("        loss.back", '        """One step."""\n        loss.back'),
    "a comment": STEP.replace("loss.backward()", "loss.backward()  # fp32"),
    "a log call": STEP.replace(
        "        loss.back", '        logger.info("step")\n        loss.back'
    ),
    "a logger of its own": STEP.replace(
        "        loss.back", '        self.logger.info("step")\n        loss.back'
    ),
    "a log call of one rank": STEP.replace(
        "        loss.back",
        '        if self.is_main:\n            print("step")\n        loss.back',
    ),
    "a line broken in two": STEP.replace("self.model, ", "self.model,\n                "),
    "another method": STEP + "    def other(self):\n        return 1\n",
}

CHANGED = {
    "a condition": STEP.replace("self.clip > 0", "self.clip is not None"),
    "a line inside a new `if`": STEP.replace(
        "        loss.backward()", "        if self.ready:\n            loss.backward()"
    ),
    "a decorator": STEP.replace("    def step", "    @no_grad\n    def step"),
    "a default": STEP.replace("self, loss", "self, loss=None"),
    "a test that acts and guards a log call": STEP.replace(
        "        loss.back",
        '        if self.advance():\n            print("step")\n        loss.back',
    ),
    "a condition of a loop that only logs": STEP.replace(
        "        loss.back", "        for part in self:\n            print(part)\n        loss.back"
    ),
}


def text(source: str) -> str:
    """The normalised text of the first method of the first class."""
    owner = ast.parse(source).body[0]
    assert isinstance(owner, ast.ClassDef)
    return normalise(owner.body[0])


@pytest.mark.parametrize("name", SAME)
def test_what_cannot_act_does_not_count(name: str) -> None:
    assert text(SAME[name]) == text(STEP)


@pytest.mark.parametrize("name", CHANGED)
def test_what_can_act_counts(name: str) -> None:
    assert text(CHANGED[name]) != text(STEP)


def test_a_function_that_only_logs_is_still_python() -> None:
    function = ast.parse('def f():\n    """Say it."""\n    print(1)\n').body[0]
    assert "pass" in normalise(function)
