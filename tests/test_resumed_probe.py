"""Steps of a resumed process are those of the run, whatever it was resumed from."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_probe import Training

SCRIPT = """
from accelerate import Accelerator
from model import Model, AdamW
from torch import Scalar

accelerator, optimizer = Accelerator(), AdamW()
optimizer.state = {counted}
accelerator.prepare(Model(), optimizer)
accelerator.load_state({path!r})
for loss in (2.0, 1.5):
    accelerator.backward(Scalar(loss))
"""


@pytest.mark.parametrize(
    ("path", "counted", "base"),
    [
        ("out/step_12/", {}, 12),
        ("out/checkpoint-30", {}, 30),
        ("out/epoch_1", {"w": {"step": 14.0}, "b": {"step": 14.0}}, 14),
        ("out/epoch_1", {}, 0),
    ],
)
def test_steps_are_counted_from_the_checkpoint(
    tmp_path: Path, path: str, counted: dict[str, object], base: int
) -> None:
    training = Training(tmp_path)
    fake = tmp_path / "packages" / "accelerate" / "accelerator.py"
    text = fake.read_text().replace(
        "def load_state(self): pass", "def load_state(self, folder): pass"
    )
    fake.write_text(text)
    done = training.run(SCRIPT.format(path=path, counted=counted))
    assert (done.returncode, done.stderr) == (0, "")
    assert [event["step"] for event in training.events("step")] == [base + 1, base + 2]
    (resumed,) = training.events("resumed")
    assert (resumed["path"], resumed["step"]) == (path, base)
    assert training.notes() == []


def test_without_a_checkpoint_the_first_step_is_one(tmp_path: Path) -> None:
    training = Training(tmp_path)
    script = SCRIPT.replace("accelerator.load_state({path!r})", "")
    assert training.run(script.format(counted={})).returncode == 0
    assert [event["step"] for event in training.events("step")] == [1, 2]
    assert training.events("resumed") == []
