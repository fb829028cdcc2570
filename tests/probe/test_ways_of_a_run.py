"""A run whose model nobody wants ends after its last step; a resumed one counts on."""

import sys

import pytest
from probed_scripts import FAKES as FAKE_PACKAGES
from probed_scripts import Training
from probed_scripts import training as training  # a fixture

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


BOTH = pytest.mark.parametrize(
    ("script", "checkpoint"),
    [(OPEN_INSTRUCT, ""), (TRL, "wrote checkpoint\n")],
    ids=("open_instruct", "trl"),
)


@pytest.fixture
def saving(training: Training) -> Training:
    for name, text in FAKES.items():
        training.write_package(name, text)
    return training


@BOTH
def test_it_ends_before_a_final_save_that_nobody_wants(
    saving: Training, script: str, checkpoint: str
) -> None:
    done = saving.run(script, final_save=False)
    # a checkpoint is no final save
    assert (done.returncode, done.stdout) == (0, f"1\n2\n3\n{checkpoint}"), done.stderr
    assert saving.values("not_saved", "step") == [3]
    assert saving.values("end", "exit") == [0]
    # every step was written before it ended
    assert saving.values("step", "step") == [1, 2, 3]


@BOTH
def test_it_saves_unless_it_is_asked_not_to(saving: Training, script: str, checkpoint: str) -> None:
    done = saving.run(script)
    assert done.returncode == 0 and done.stdout.endswith("saved\n"), done.stderr
    assert saving.events("not_saved") == []


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
    training: Training, path: str, counted: dict[str, object], base: int
) -> None:
    fake = FAKE_PACKAGES["accelerate/accelerator.py"]
    with_folder = fake.replace("def load_state(self)", "def load_state(self, folder)")
    training.write_package("accelerate/accelerator.py", with_folder)

    done = training.run(RESUMED.format(path=path, counted=counted))

    assert (done.returncode, done.stderr) == (0, "")
    assert training.values("step", "step") == [base + 1, base + 2]
    resumed = [(event["path"], event["step"]) for event in training.events("resumed")]
    assert resumed == ([(path, base)] if path else [])
    assert training.notes() == []


def test_a_numbered_cpu_can_be_loaded_onto(training: Training) -> None:
    """What accelerate calls the CPU of one of several processes; torch alone refuses it."""
    pytest.importorskip("torch")
    training.packages = training.folder / "no packages"
    done = training.run(
        """
        import torch
        torch.save({"a": torch.ones(2)}, "x.pt")
        assert torch.load("x.pt", map_location="cpu:1")["a"].sum() == 2
        """,
        python=sys.executable,
        options=(),
        cpu=True,
    )
    assert done.returncode == 0, done.stderr
    assert "cpu_location" in (training.out / "rank-0.jsonl").read_text()
