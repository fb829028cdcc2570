"""A run whose model nobody wants ends well after its last step; a resumed one counts the steps of the run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from probed_scripts import Training

from launcher.plan.command import PROBE

STEPS = """
    from accelerate import Accelerator
    import torch
    from model import AdamW, Model

    accelerator, model = Accelerator(), Model()
    accelerator.prepare(model, AdamW())
    for step in range(1, 4):
        model.forward(input_ids=torch.Ids(2, 8))
        accelerator.backward(torch.Scalar(2.5))
        print(step)
"""
OPEN_INSTRUCT = f"""{STEPS}
    from open_instruct import model_utils
    model_utils.save_with_accelerate(accelerator, model)
    print("saved")
"""
TRL = f"""{STEPS}
    from transformers.trainer import Trainer
    trainer = Trainer()
    trainer._save_checkpoint()
    trainer.save_model("out")
    print("saved")
"""
FAKES = {
    "open_instruct/model_utils.py": "def save_with_accelerate(*args, **kwargs): pass\n",
    "transformers/trainer.py": (
        "class Trainer:\n"
        "    def _save_checkpoint(self): self.save_model('checkpoint', _internal_call=True)\n"
        "    def save_model(self, output_dir, _internal_call=False): print('wrote', output_dir)\n"
        "    def evaluate(self): pass\n"
        "    def push_to_hub(self): pass\n"
        "    def _load_optimizer_and_scheduler(self, checkpoint): pass\n"
    ),
}


@pytest.mark.parametrize(
    ("script", "before"),
    [(OPEN_INSTRUCT, ""), (TRL, "wrote checkpoint\n")],
    ids=("open_instruct", "trl"),
)
def test_it_ends_before_the_final_save(tmp_path: Path, script: str, before: str) -> None:
    training = Training(tmp_path)
    for name, text in FAKES.items():
        (tmp_path / "packages" / name).write_text(text)
    # without being asked it saves
    done = training.run(script)
    assert done.returncode == 0 and done.stdout.endswith("saved\n"), done.stderr
    assert training.events("not_saved") == []
    (training.out / "rank-0.jsonl").unlink()
    done = training.run(script, final_save=False)
    # a checkpoint is no final save
    assert (done.returncode, done.stdout) == (0, f"1\n2\n3\n{before}"), done.stderr
    assert [event["step"] for event in training.events("not_saved")] == [3]
    assert [event["exit"] for event in training.events("end")] == [0]
    # every step was written before it ended
    assert [event["step"] for event in training.events("step")] == [1, 2, 3]


RESUMED = """
from accelerate import Accelerator
from model import Model, AdamW
from torch import Scalar

accelerator, optimizer = Accelerator(), AdamW()
optimizer.state = {counted}
accelerator.prepare(Model(), optimizer)
if {path!r}:
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
        ("", {}, 0),
    ],
)
def test_steps_are_counted_from_the_checkpoint(
    tmp_path: Path, path: str, counted: dict[str, object], base: int
) -> None:
    training = Training(tmp_path)
    fake = tmp_path / "packages" / "accelerate" / "accelerator.py"
    fake.write_text(
        fake.read_text().replace("def load_state(self): pass", "def load_state(self, folder): pass")
    )
    done = training.run(RESUMED.format(path=path, counted=counted))
    assert (done.returncode, done.stderr) == (0, "")
    assert [event["step"] for event in training.events("step")] == [base + 1, base + 2]
    resumed = [(event["path"], event["step"]) for event in training.events("resumed")]
    assert resumed == [(path, base)] * bool(path)
    assert training.notes() == []


def test_a_numbered_cpu_can_be_loaded_onto(tmp_path: Path) -> None:
    """What accelerate calls the CPU of one of several processes; torch alone refuses it."""
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\ntorch.save({'a': torch.ones(2)}, 'x.pt')\n"
        "assert torch.load('x.pt', map_location='cpu:1')['a'].sum() == 2\n"
    )
    settings = json.dumps({"target": str(script), "out": str(tmp_path / "probe"), "cpu": True})
    env = {**os.environ, "LAUNCH_PROBE": settings}
    done = subprocess.run(
        [sys.executable, str(PROBE)], cwd=tmp_path, capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "cpu_location" in (tmp_path / "probe" / "rank-0.jsonl").read_text()
