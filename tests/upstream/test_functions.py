"""The text of a function changes with its behaviour, and with nothing else."""

import pytest

from launcher.upstream.source.functions import enclosing, functions_in, texts_by_name

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
    "a log call": STEP.replace("        loss.back", '        logger.info("step")\n        loss.back'),
    "a logger of its own": STEP.replace("        loss.back", '        self.logger.info("step")\n        loss.back'),
    "a log call of one rank": STEP.replace(
        "        loss.back", '        if self.is_main:\n            print("step")\n        loss.back'
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
        "        loss.back", '        if self.advance():\n            print("step")\n        loss.back'
    ),
    "a condition of a loop that only logs": STEP.replace(
        "        loss.back", "        for part in self:\n            print(part)\n        loss.back"
    ),
}


def text(source: str) -> str:
    return texts_by_name(functions_in(source))["Trainer.step"]


@pytest.mark.parametrize("name", SAME)
def test_what_cannot_act_does_not_count(name: str) -> None:
    assert text(SAME[name]) == text(STEP)


@pytest.mark.parametrize("name", CHANGED)
def test_what_can_act_counts(name: str) -> None:
    assert text(CHANGED[name]) != text(STEP)


def test_the_innermost_function_holds_a_line() -> None:
    source = """class A:
    x = 1

    @wrap
    def f(self):
        def g():
            return 1
        return g
"""
    functions = functions_in(source)
    names = [enclosing(functions, line) for line in range(1, 9)]
    expected = [None, None, None, "A.f", "A.f", "A.f.g", "A.f.g", "A.f"]
    assert [function and function.name for function in names] == expected


def test_a_name_that_is_defined_twice_has_both_texts() -> None:
    source = "class A:\n    @property\n    def x(self): return 1\n    @x.setter\n    def x(self, value): pass\n"
    both = texts_by_name(functions_in(source))["A.x"]
    assert "return 1" in both and "value" in both


def test_a_function_that_only_logs_is_still_python() -> None:
    assert "pass" in texts_by_name(functions_in('def f():\n    """Say it."""\n    print(1)\n'))["f"]
