"""Margin and accuracy of open-instruct's DPO, as its loss has them, stand in the record of each step."""

import textwrap

from probed_scripts import TRAIN, Training
from probed_scripts import training as training  # a fixture

DPO_UTILS = """
    class Rewards:
        def __init__(self, *values): self.values = values
        def detach(self): return self
        def __sub__(self, other): return Rewards(*(a - b for a, b in zip(self.values, other.values)))
        def __gt__(self, other): return Rewards(*(float(a > b) for a, b in zip(self.values, other.values)))
        def float(self): return self
        def mean(self): return sum(self.values) / len(self.values)
    def compute_loss(*pairs):
        chosen = Rewards(*(one for one, _ in pairs))
        return "the losses", chosen, Rewards(*(one for _, one in pairs))
"""


def test_they_are_means_over_the_micro_batches(training: Training) -> None:
    module = training.folder / "packages" / "open_instruct" / "dpo_utils.py"
    with module.open("a") as stream:
        stream.write(textwrap.dedent(DPO_UTILS))
    loss = "            assert dpo_utils.compute_loss((3, 1), (1 + micro, 2))[0] == 'the losses'\n"
    script = TRAIN.replace(
        "    import torch\n", "    import torch\n    from open_instruct import dpo_utils\n"
    )
    script = script.replace(
        "            assert accelerator.backward",
        f"{loss}            assert accelerator.backward",
        1,
    )
    done = training.run(script)
    assert (done.returncode, done.stderr) == (0, "")
    first = training.events("step")[0]
    # margins of the micro-batches are (2, -1) and (2, 0)
    assert (first["margin"], first["accuracy"]) == (0.75, 0.5)


def test_a_loss_of_another_kind_has_none(training: Training) -> None:
    assert training.run(TRAIN).returncode == 0
    assert "margin" not in training.events("step")[0]
