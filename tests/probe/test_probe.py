"""The probe as training runs it: a script in a process of its own, over packages that are fakes."""

from __future__ import annotations

import ast
import json
import shutil
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
from probed_scripts import PROBE, TRAIN, Training
from probed_scripts import training as training  # a fixture
from recorded_events import Event, read_events

from launcher.probe.watching import Probe

PIECES = {path.stem: path for path in (PROBE.parent / "watching").glob("*.py")}

# the probe loads it by its place, too
CONTENT = PROBE.parent.parent / "artifacts" / "digest.py"


def imported_packages(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [str(node.module).partition(".")[0]]
    return []


@pytest.mark.parametrize("path", [PROBE, CONTENT, *PIECES.values()], ids=lambda path: path.stem)
def test_it_needs_the_standard_library_only_and_nothing_of_launch(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    # `match` and the like are too new for 3.10 only by their syntax
    tree = ast.parse(text, feature_version=(3, 10))
    for node in tree.body:
        assert set(imported_packages(node)) <= sys.stdlib_module_names
    for node in ast.walk(tree):
        assert "launcher" not in imported_packages(node)
        # one dot reaches no further than their folder
        assert not isinstance(node, ast.ImportFrom) or node.level <= 1


def test_all_of_it_is_there_before_the_script_begins_and_under_no_other_name(
    training: Training,
) -> None:
    """The code of a run may be replaced while it trains; a trainer may have its own `record`."""
    folder = training.folder / "a script"
    folder.mkdir()
    (folder / "record.py").write_text("")
    done = training.run(
        """
        import sys, record
        for name, module in list(sys.modules.items()):
            if "watching" in (getattr(module, "__file__", None) or ""):
                print(name)
        assert record.__file__.startswith(sys.path[0])
        assert not [path for path in sys.path if "launcher" in path], sys.path
        """
    )
    names = {f"launch_probe.{name}" for name in PIECES if name != "__init__"}
    assert set(done.stdout.split()) == names | {"launch_probe"}, done.stderr


def test_the_script_is_main(training: Training) -> None:
    folder = training.folder / "a script"
    folder.mkdir()
    (folder / "beside.py").write_text("value = 5")
    done = training.run(
        """
        import json, os, pickle, sys
        import beside
        class Here: pass
        print(json.dumps([__name__, __file__, sys.argv, sys.path[0], beside.value, __spec__]))
        assert sys.modules["__main__"].Here is Here
        assert isinstance(pickle.loads(pickle.dumps(Here())), Here)
        """,
        "--a",
        "b c",
        "",
    )
    assert (done.returncode, done.stderr) == (0, "")
    script = str(folder / "train.py")
    argv = [script, "--a", "b c", ""]
    assert json.loads(done.stdout) == ["__main__", script, argv, str(folder), 5, None]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("raise ValueError('bad')", 1),
        ("1 +", 1),
        ("import no_such_module", 1),
    ],
)
def test_exit_codes_are_those_of_the_script(training: Training, script: str, code: int) -> None:
    assert training.run(script).returncode == code
    assert training.values("end", "exit") == [code]


def test_an_interrupt_ends_the_script_as_without_the_probe(training: Training) -> None:
    assert training.run("raise KeyboardInterrupt").returncode in {-2, 130}
    assert training.values("end", "exit") == [1]


def test_a_crash_is_recorded_and_shown_as_ever(training: Training) -> None:
    done = training.run("def f():\n    raise ValueError('bad ' * 2000)\nf()")
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert 'train.py", line 3, in <module>' in done.stderr
    (error,) = training.events("error")
    assert (error["type"], len(error["message"])) == ("ValueError", 2000)


def test_the_start_says_who_and_what_and_an_attempt_appends(training: Training) -> None:
    training.environ |= {"RANK": "1", "WORLD_SIZE": "4", "LAUNCH_ATTEMPT": "3"}
    training.run("")
    training.run("")
    start, _ = training.events("start", rank=1)
    assert (start["rank"], start["world"], start["attempt"]) == (1, 4, 3)
    assert start["target"].endswith("train.py")
    assert start["python"].startswith("3.")
    names = [event["event"] for event in training.events(rank=1)]
    assert names == ["start", "end", "start", "end"]


@pytest.mark.parametrize("obstacle", ["a file in the way", "a folder in the way", "a full disk"])
def test_a_record_that_cannot_be_written_stops_nothing(training: Training, obstacle: str) -> None:
    record = training.out / "rank-0.jsonl"
    if obstacle == "a file in the way":
        training.out.write_text("")
    elif obstacle == "a folder in the way":
        record.mkdir(parents=True)
    else:
        training.out.mkdir()
        record.symlink_to("/dev/full")
    done = training.run(
        """
        from accelerate import Accelerator
        import torch
        assert Accelerator().backward(torch.Scalar(1.0)) == "the result"
        print("trained")
        """
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")


def test_a_step_sums_up_its_micro_batches(training: Training) -> None:
    done = training.run(TRAIN)
    assert (done.returncode, done.stderr) == (0, "")
    assert training.notes() == []
    assert training.values("step", "step") == [1, 2, 3]
    assert training.values("step", "loss") == [3.5, 4.5, 5.5]
    first, _, last = training.events("step")
    counts = {"micro_batches": 2, "tokens": 32, "positions": 32, "finite": True}
    assert first.items() >= counts.items()
    assert 0 <= first["seconds"] <= first["elapsed"] <= last["elapsed"]


def test_the_model_and_the_optimizer_are_recorded(training: Training) -> None:
    training.run(TRAIN)
    (model,) = training.events("model")
    expected = {
        "class": "Model",
        "model_type": "qwen2",
        "attention": "sdpa",
        "parameters": 24,
        "trainable": 24,
        "dtype": "bfloat16",
    }
    assert model.items() >= expected.items()
    (optimizer,) = training.events("optimizer")
    assert (optimizer["class"], optimizer["zero_stage"]) == ("model.AdamW", None)


def test_the_losses_of_trl_are_parts_already(training: Training) -> None:
    training.run(TRAIN, divides_loss=True)
    assert training.values("step", "loss") == [7, 9, 11]


def test_evaluation_counts_no_tokens(training: Training) -> None:
    training.run(TRAIN.replace("for step in", "model.training = False\n    for step in"))
    assert training.values("step", "tokens") == [0, 0, 0]


def test_a_loss_that_is_not_finite(training: Training) -> None:
    training.run(TRAIN.replace("3.0 + step + micro", "float('inf') if step == 1 else 1.0"))
    assert training.values("step", "finite") == [True, False, True]
    assert training.values("step", "loss") == [1, None, 1]
    (event,) = training.events("nonfinite")
    assert (event["step"], event["value"]) == (2, "inf")


WITH_MEMORY = f"import torch.cuda\n{textwrap.dedent(TRAIN)}accelerator.save_state()\n"


def test_memory_is_marked_where_a_phase_ends(training: Training) -> None:
    training.run(WITH_MEMORY)
    assert training.notes() == []
    assert set(training.values("step", "allocated_gib")) == {3}
    assert set(training.values("step", "reserved_gib")) == {4}
    phases = ["load", "prepare", "gradients", "optimizer", "steps", "end"]
    assert training.values("memory", "phase") == phases
    assert training.values("memory", "step") == [0, 0, 1, 1, 3, 3]
    assert set(training.values("memory", "peak_allocated_gib")) == {3.0}
    (device,) = training.events("device")
    assert (device["name"], device["total_gib"]) == ("A GPU", 80.0)


def test_memory_is_read_on_gpus_only(training: Training) -> None:
    training.run(WITH_MEMORY, cpu=True)
    assert set(training.values("step", "allocated_gib")) == {None}


NORMS = """
    from accelerate import Accelerator
    import torch
    from model import AdamW, Model

    accelerator, model = Accelerator(), Model()
    accelerator.prepare(model, AdamW())
    for norm in (2.0, float("inf"), 3.0):
        model.forward(input_ids=torch.Ids(2, 8))
        accelerator.backward(torch.Scalar(1.5))
        assert accelerator.clip_grad_norm_(torch.Scalar(norm)).value == norm
"""


def test_the_gradient_norm_and_the_rate_of_a_step(training: Training) -> None:
    done = training.run(NORMS)
    assert (done.returncode, training.notes()) == (0, [])
    assert training.values("step", "grad_norm") == [2, None, 3]
    assert training.values("step", "finite") == [True, False, True]
    assert training.values("step", "learning_rate") == [0.25, 0.25, 0.25]
    (event,) = training.events("nonfinite")
    assert (event["step"], event["what"], event["value"]) == (2, "gradient", "inf")


def test_a_loss_scaler_meets_gradients_that_are_not_finite(training: Training) -> None:
    training.run(NORMS.replace("for norm", "accelerator.scaler = 1\n    for norm"))
    assert training.values("step", "finite") == [True, True, True]
    assert training.events("nonfinite") == []


def test_kernels_patches_and_saves_are_recorded(training: Training) -> None:
    done = training.run(
        """
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Norm
        from liger_kernel.ops.rms_norm import LigerSiLUMulFunction as Act
        assert [Norm.apply(1) for _ in range(5)] == [2] * 5
        assert Act.apply(3) == 6
        from liger_kernel.transformers import monkey_patch as m
        assert m.apply_liger_kernel_to_qwen2(rope=False, model=object()) == "patched"
        assert m.MODEL_TYPE_TO_APPLY_LIGER_FN["qwen2"]() == "patched"
        from transformers.modeling_utils import PreTrainedModel
        assert PreTrainedModel().save_pretrained("here") == "here"
        PreTrainedModel().save_pretrained("there", is_main_process=False)
        """
    )
    assert done.stderr == ""
    assert training.events("liger")[-1]["calls"] == {"rms_norm": 5, "swiglu": 1}
    assert training.values("saved", "path") == ["here"]
    assert training.values("liger_patch", "function") == ["apply_liger_kernel_to_qwen2"] * 2
    assert training.values("liger_patch", "kwargs") == [{"rope": False}, {}]


def test_the_dataset_cache(training: Training) -> None:
    cache = training.folder / "cache"
    training.environ["FAKE_CACHE"] = str(cache)
    done = training.run(
        f"""
        from open_instruct.dataset_transformation import LocalDatasetTransformationCache as Cache
        assert Cache().load_or_transform_dataset(None, None) == "the set"
        open({str(cache)!r}, "w")
        Cache().load_or_transform_dataset(None, None)
        Cache().load_or_transform_dataset(None, None, True)
        Cache().load_or_transform_dataset(None, None, dataset_skip_cache=True)
        """
    )
    assert done.stderr == ""
    assert training.values("dataset_cache", "state") == ["miss", "hit", "miss", "miss"]
    assert set(training.values("dataset_cache", "path")) == {str(cache)}


def test_hooks_that_fail_are_notes(training: Training) -> None:
    done = training.run(
        """
        from accelerate import Accelerator
        class Odd:
            param_groups = zero_grad = None
            def named_parameters(self): ...
            def forward(self): ...
            def parameters(self): raise RuntimeError("no parameters for you")
        class Loss:
            def backward(self): print("went back")
        accelerator = Accelerator()
        accelerator.prepare(Odd())
        accelerator.backward(Loss())
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "went back\n", "")
    notes = training.notes()
    assert any("no parameters for you" in note for note in notes)
    assert any("loss: AttributeError" in note for note in notes)


def test_packages_of_another_shape_are_notes(training: Training) -> None:
    training.write_package("accelerate/accelerator.py", "class Accelerator:\n    pass\n")
    training.write_package("transformers/modeling_utils.py", "")
    done = training.run("import accelerate, transformers.modeling_utils; print('fine')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
    for name in ("accelerate.accelerator", "transformers.modeling_utils"):
        assert any(f"watching {name}" in note for note in training.notes())


def test_a_broken_package_fails_as_without_the_probe(training: Training) -> None:
    training.write_package("accelerate/accelerator.py", "raise ImportError('libcuda is missing')")
    done = training.run("try:\n    import accelerate\nexcept ImportError as e:\n    print(e)")
    assert (done.returncode, done.stdout) == (0, "libcuda is missing\n")

    shutil.rmtree(training.packages / "accelerate")
    done = training.run("import accelerate")
    assert "ModuleNotFoundError: No module named 'accelerate'" in done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_train_on_and_write_nothing(training: Training, method: str) -> None:
    done = training.run(
        f"""
        import multiprocessing, os
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from accelerate import Accelerator
        import torch

        def work(number):
            Accelerator().backward(torch.Scalar(number))
            return LigerRMSNormFunction.apply(number)

        if __name__ == "__main__":
            Accelerator().backward(torch.Scalar(1.0))
            with multiprocessing.get_context({method!r}).Pool(2) as pool:
                print(pool.map(work, range(4)))
        """
    )
    assert done.stdout == "[1, 2, 3, 4]\n", done.stderr
    for name in ("start", "step", "end"):
        assert len(training.events(name)) == 1


class OnDevice:
    is_cuda = True

    def __init__(self, value: float) -> None:
        self.value = value

    def detach(self, *_: Any) -> OnDevice:
        return self

    double = reshape = detach


class Host(list[float]):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def copy_(self, scalars: list[OnDevice], non_blocking: bool) -> None:
        assert non_blocking
        self[:] = [scalar.value for scalar in scalars]

    def tolist(self) -> list[float]:
        return self


class Arrival:
    """An event of a stream; `there` once the device has come so far."""

    there = False
    waited = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.there

    def synchronize(self) -> None:
        Arrival.waited += not self.there

    def elapsed_time(self, _: Arrival) -> float:
        return 1500.0


def test_nobody_waits_for_the_numbers_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = types.SimpleNamespace(is_initialized=lambda: False, Event=Arrival)
    torch = types.SimpleNamespace(cuda=cuda, empty=Host, stack=list, float64=None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    probe = Probe({"target": "", "out": str(tmp_path)})

    def take_step(loss: float) -> list[Event]:
        """Take one; returns the steps that are recorded so far."""
        probe.begin_backward(OnDevice(loss))
        probe.end_backward(types.SimpleNamespace())
        probe.clipped(OnDevice(0.25))
        probe.close_step()
        return read_events(tmp_path, "step")

    assert take_step(3.0) == []
    assert Arrival.waited == 0
    # for the step before, at most: a loss that is not finite is known within one step
    (first,) = take_step(2.0)
    assert (first["step"], first["loss"], first["grad_norm"]) == (1, 3.0, 0.25)
    assert Arrival.waited == 1

    monkeypatch.setattr(Arrival, "there", True)
    recorded = take_step(1.0)
    assert [step["loss"] for step in recorded] == [3.0, 2.0, 1.0]
    assert Arrival.waited == 1
    # the device's own clock, from the end of one step to that of the next
    assert recorded[2]["seconds"] == 1.5
