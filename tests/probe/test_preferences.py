"""Margin and accuracy of open-instruct's DPO stand in the record of each step."""

import textwrap

from probed_scripts import TRAIN, Training
from probed_scripts import training as training  # a fixture

REWARDS = """
    class Rewards:
        def __init__(self, *values): self.values = values
        def detach(self): return self
        def float(self): return self
        def mean(self): return sum(self.values) / len(self.values)
        def __sub__(self, other):
            pairs = zip(self.values, other.values)
            return Rewards(*(a - b for a, b in pairs))
        def __gt__(self, other):
            pairs = zip(self.values, other.values)
            return Rewards(*(float(a > b) for a, b in pairs))

    def compute_loss(*pairs):
        chosen = Rewards(*(pair[0] for pair in pairs))
        rejected = Rewards(*(pair[1] for pair in pairs))
        return "the losses", chosen, rejected
"""
# margins of the two micro-batches are (2, -1) and (2, 0)
LOSS = "assert compute_loss((3, 1), (1 + micro, 2))[0] == 'the losses'"


def test_they_are_means_over_the_micro_batches(training: Training) -> None:
    training.write_package("open_instruct/dpo_utils.py", REWARDS)
    train = textwrap.dedent(TRAIN)
    backward = "assert accelerator.backward"
    train = train.replace(backward, f"{LOSS}\n        {backward}")

    done = training.run("from open_instruct.dpo_utils import compute_loss\n" + train)

    assert (done.returncode, done.stderr) == (0, "")
    first = training.events("step")[0]
    assert (first["margin"], first["accuracy"]) == (0.75, 0.5)


def test_a_loss_of_another_kind_has_none(training: Training) -> None:
    assert training.run(TRAIN).returncode == 0
    assert "margin" not in training.events("step")[0]
