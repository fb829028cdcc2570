"""A run whose model nobody wants ends after its last step, and has ended well."""

from pathlib import Path

import pytest
from test_probe import Training

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
    "open_instruct/__init__.py": "",
    "open_instruct/model_utils.py": "def save_with_accelerate(*args, **kwargs): pass\n",
    "transformers/__init__.py": "",
    "transformers/trainer.py": (
        "class Trainer:\n"
        "    def _save_checkpoint(self): self.save_model('checkpoint', _internal_call=True)\n"
        "    def save_model(self, output_dir, _internal_call=False): print('wrote', output_dir)\n"
        "    def evaluate(self): pass\n"
        "    def push_to_hub(self): pass\n"
        "    def _load_optimizer_and_scheduler(self, checkpoint): pass\n"
    ),
}


@pytest.fixture
def training(tmp_path: Path) -> Training:
    made = Training(tmp_path)
    for name, text in FAKES.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or name.startswith("open_instruct") or "trainer" in name:
            path.write_text(text)
    return made


@pytest.mark.parametrize(
    ("script", "before"), [(OPEN_INSTRUCT, ""), (TRL, "wrote checkpoint\n")], ids=("open_instruct", "trl")
)
def test_it_ends_before_the_final_save(training: Training, script: str, before: str) -> None:
    done = training.run(script, final_save=False)
    # a checkpoint is no final save
    assert (done.returncode, done.stdout) == (0, f"1\n2\n3\n{before}"), done.stderr
    assert [event["step"] for event in training.events("not_saved")] == [3]
    assert [event["exit"] for event in training.events("end")] == [0]
    # every step was written before it ended
    assert [event["step"] for event in training.events("step")] == [1, 2, 3]


@pytest.mark.parametrize("script", [OPEN_INSTRUCT, TRL], ids=("open_instruct", "trl"))
def test_without_being_asked_it_saves(training: Training, script: str) -> None:
    done = training.run(script)
    assert done.returncode == 0 and done.stdout.endswith("saved\n"), done.stderr
    assert training.events("not_saved") == []
