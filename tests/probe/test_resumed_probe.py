"""Steps of a resumed process are those of the run, whatever it was resumed from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_probe import Training

from launcher.plan.command import PROBE

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
    text = fake.read_text().replace("def load_state(self): pass", "def load_state(self, folder): pass")
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


def test_a_numbered_cpu_can_be_loaded_onto(tmp_path: Path) -> None:
    """What accelerate calls the CPU of one of several processes; torch alone refuses it."""
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\ntorch.save({'a': torch.ones(2)}, 'x.pt')\n"
        "assert torch.load('x.pt', map_location='cpu:1')['a'].sum() == 2\n"
    )
    settings = {"target": str(script), "out": str(tmp_path / "probe"), "cpu": True}
    done = subprocess.run(
        [sys.executable, str(PROBE)], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "LAUNCH_PROBE": json.dumps(settings)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cpu_location" in (tmp_path / "probe" / "rank-0.jsonl").read_text()
