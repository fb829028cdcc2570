"""The probe as training runs it: a script in a process of its own, over packages that are fakes."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, REPOSITORY

from launcher.probe.watching import Probe

PROBE = REPOSITORY / "launcher" / "probe" / "run.py"
PIECES = {path.stem: path for path in (PROBE.parent / "watching").glob("*.py")}

FAKES = {
    "torch/__init__.py": """
        class Scalar:
            def __init__(self, value): self.value = value
            def detach(self): return self
            def float(self): return self
            def reshape(self, _): return self
            def __float__(self): return float(self.value)
            def backward(self): pass

        class _Stack(list):
            def tolist(self): return [float(s) for s in self]

        def stack(scalars): return _Stack(scalars)

        from torch import cuda

        class Ids:
            def __init__(self, *shape): self.shape = shape
            def numel(self):
                count = 1
                for n in self.shape: count *= n
                return count
            def dim(self): return len(self.shape)
        """,
    "torch/cuda.py": """
        def is_initialized(): return True
        def memory_stats_as_nested_dict():
            sizes = {"allocated_bytes": 3 * 2**30, "reserved_bytes": 4 * 2**30}
            return {name: {"all": {"current": 0, "peak": size}} for name, size in sizes.items()}
        def current_device(): return 0
        class Properties: name, total_memory = "A GPU", 80 * 2**30
        def get_device_properties(_): return Properties
        class Event:
            def __init__(self, enable_timing): pass
            def record(self): pass
        """,
    "accelerate/__init__.py": "from accelerate.accelerator import Accelerator",
    "accelerate/accelerator.py": """
        class Accelerator:
            sync_gradients = True
            state = scaler = None
            def prepare(self, *args):
                return args
            def clip_grad_norm_(self, norm):
                return norm
            def save_state(self): pass
            def load_state(self): pass
            def backward(self, loss, **kwargs):
                loss.backward()
                return "the result"
        """,
    "transformers/__init__.py": "",
    "transformers/modeling_utils.py": """
        class PreTrainedModel:
            def save_pretrained(self, save_directory, is_main_process=True):
                return save_directory
        """,
    "liger_kernel/__init__.py": "",
    "liger_kernel/ops/__init__.py": "",
    "liger_kernel/ops/rms_norm.py": """
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        class LigerRMSNormFunction:
            @staticmethod
            def forward(ctx, x): return x + 1
            @classmethod
            def apply(cls, x): return cls.forward(None, x)

        class helper: pass
        """,
    "liger_kernel/ops/swiglu.py": """
        class LigerSiLUMulFunction:
            @staticmethod
            def forward(ctx, x): return x * 2
            @classmethod
            def apply(cls, x): return cls.forward(None, x)
        """,
    "liger_kernel/transformers/__init__.py": "",
    "liger_kernel/transformers/monkey_patch.py": """
        def apply_liger_kernel_to_qwen2(rope=True, model=None): return "patched"
        def apply_liger_kernel_to_gemma(fused_linear_cross_entropy=True, model=None): return "patched"
        MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": apply_liger_kernel_to_qwen2}
        """,
    "open_instruct/__init__.py": "",
    "open_instruct/dataset_transformation.py": """
        import os

        class LocalDatasetTransformationCache:
            def get_cache_path(self): return os.environ["FAKE_CACHE"]
            def load_or_transform_dataset(self, dcs, tc, dataset_skip_cache=False):
                return "the set"
        """,
    "model.py": """
        class Parameter:
            dtype, requires_grad = "torch.bfloat16", True
            def numel(self): return 12

        class Config:
            model_type, _attn_implementation = "qwen2", "sdpa"

        class Model:
            config, training = Config(), True
            def __init__(self): self.hooks = []
            def named_parameters(self): return [("w", Parameter())]
            def parameters(self): return [Parameter(), Parameter()]
            def register_forward_pre_hook(self, hook, with_kwargs, prepend): self.hooks.append(hook)
            def forward(self, *args, **kwargs):
                for hook in self.hooks:
                    hook(self, args, kwargs)

        class AdamW:
            param_groups, state = [{"params": [], "lr": 0.0}, {"params": [], "lr": 0.25}], {}
            def zero_grad(self): pass
        """,
}


WATCHERS = {
    "open_instruct.dataset_transformation": "watch_tokenising",
    "open_instruct.dpo_utils": "watch_pairs",
    "open_instruct.model_utils": "watch_final_save",
}
"""Of the modules of open-instruct that are faked, by its entry scripts."""


def oldest_python() -> str:
    for minor in (10, 11, 12, 13):
        name = f"python3.{minor}"
        installed = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))
        for python in (shutil.which(name), *map(str, installed)):
            if python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
                return python
    return sys.executable


OLDEST = oldest_python()


class Training:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out of it"
        self.environ: dict[str, str] = {"FAKE_CACHE": str(folder / "no cache")}
        for name, text in FAKES.items():
            path = folder / "packages" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    def run(
        self, script: str, *argv: str, python: str = OLDEST, cpu: bool = False,
        options: tuple[str, ...] = ("-S",), probe: Path = PROBE,
        **settings: Any,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        target = self.folder / "a script" / "train.py"
        target.parent.mkdir(exist_ok=True)
        target.write_text(textwrap.dedent(script))
        defaults = {"target": str(target), "out": str(self.out), "cpu": cpu, "watchers": WATCHERS}
        settings = {**defaults, **settings}
        environ = {
            "PATH": os.environ["PATH"], "PYTHONPATH": str(self.folder / "packages"),
            "LAUNCH_PROBE": json.dumps(settings), **self.environ,
        }  # fmt: skip
        return subprocess.run(
            [python, *options, str(probe), *argv], env=environ, capture_output=True, text=True,
            timeout=PATIENCE_S, cwd=self.folder,
        )  # fmt: skip

    def events(self, name: str | None = None, rank: int = 0) -> list[dict[str, Any]]:
        lines = (self.out / f"rank-{rank}.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [event for event in events if name in (None, event["event"])]

    def notes(self) -> list[str]:
        return [event["text"] for event in self.events("note")]


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


# the probe loads it by its place, too
CONTENT = PROBE.parent.parent / "artifacts" / "digest.py"


def test_it_needs_the_standard_library_only_and_nothing_of_ours() -> None:
    for path in (PROBE, CONTENT, *PIECES.values()):
        text = path.read_text(encoding="utf-8")
        # `match` and the like are too new for 3.10 only by their syntax
        tree = ast.parse(text, feature_version=(3, 10))
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {one.name for node in top if isinstance(node, ast.Import) for one in node.names}
        names |= {str(n.module) for n in top if isinstance(n, ast.ImportFrom) and not n.level}
        assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names, path
        everywhere = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        assert not [n for n in everywhere if "launcher" in ast.unparse(n)], path
        # one dot reaches no further than their folder
        assert all(n.level <= 1 for n in everywhere if isinstance(n, ast.ImportFrom)), path


def test_all_of_it_is_there_before_the_script_begins_and_under_no_other_name(
    training: Training,
) -> None:
    """The code of a run may be replaced while it trains, and a trainer may have a `record` of its own."""
    folder = training.folder / "a script"
    folder.mkdir()
    (folder / "record.py").write_text("")
    done = training.run(
        """
        import sys, record
        ours = [n for n, m in sys.modules.items() if "watching" in (getattr(m, "__file__", 0) or "")]
        print(*sorted(ours), sep=chr(10))
        assert record.__file__.startswith(sys.path[0])
        assert not [path for path in sys.path if "launcher" in path], sys.path
        """
    )
    names = {f"launch_probe.{name}" for name in PIECES if name != "__init__"}
    assert set(done.stdout.split()) == names | {"launch_probe"}, done.stderr


def test_the_script_is_main(training: Training) -> None:
    done = training.run(
        """
        import json, os, pickle, sys
        import beside
        class Here: pass
        print(json.dumps([__name__, __file__, sys.argv, sys.path[0], beside.value, __spec__]))
        assert sys.modules["__main__"].Here is Here
        assert isinstance(pickle.loads(pickle.dumps(Here())), Here)
        """,
        "--a", "b c", "",
    )  # fmt: skip
    folder = training.folder / "a script"
    assert "No module named 'beside'" in done.stderr
    (folder / "beside.py").write_text("value = 5")
    done = training.run((folder / "train.py").read_text(), "--a", "b c", "")
    assert (done.returncode, done.stderr) == (0, "")
    argv = [str(folder / "train.py"), "--a", "b c", ""]
    assert json.loads(done.stdout) == ["__main__", argv[0], argv, str(folder), 5, None]


@pytest.mark.parametrize(
    ("script", "code", "recorded"),
    [
        ("", 0, 0), ("import sys; sys.exit()", 0, 0), ("import sys; sys.exit(0)", 0, 0),
        ("import sys; sys.exit(7)", 7, 7), ("import sys; sys.exit('no')", 1, 1),
        ("raise ValueError('bad')", 1, 1), ("raise KeyboardInterrupt", -2, 1),
        ("1 +", 1, 1), ("import no_such_module", 1, 1),
    ],
)  # fmt: skip
def test_exit_codes_are_those_of_the_script(
    training: Training, script: str, code: int, recorded: int
) -> None:
    done = training.run(script)
    assert done.returncode in {code, 130 if code == -2 else code}
    assert [event["exit"] for event in training.events("end")] == [recorded]


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
    assert [e["event"] for e in training.events(rank=1)] == ["start", "end"] * 2


@pytest.mark.parametrize("how", ["a file in the way", "read only", "full"])
def test_a_record_that_cannot_be_written_stops_nothing(training: Training, how: str) -> None:
    if how == "a file in the way":
        training.out.write_text("")
    else:
        training.out.mkdir()
        record = training.out / "rank-0.jsonl"
        record.mkdir() if how == "read only" else record.symlink_to("/dev/full")
    done = training.run(
        """
        from accelerate import Accelerator
        import torch
        assert Accelerator().backward(torch.Scalar(1.0)) == "the result"
        print("trained")
        """
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")


TRAIN = """
    from accelerate import Accelerator
    import torch
    from model import AdamW, Model

    accelerator, model = Accelerator(), Model()
    assert accelerator.prepare(model, AdamW())[0] is model
    accelerator.prepare(model)
    for step in range(3):
        for micro in range(2):
            accelerator.sync_gradients = micro == 1
            model.forward(input_ids=torch.Ids(2, 8))
            assert accelerator.backward(torch.Scalar(3.0 + step + micro)) == "the result"
"""


def test_steps_of_two_micro_batches_the_model_and_the_optimizer(training: Training) -> None:
    done = training.run(TRAIN)
    assert (done.returncode, done.stderr) == (0, "")
    steps = training.events("step")
    assert [(s["step"], s["loss"]) for s in steps] == [(1, 3.5), (2, 4.5), (3, 5.5)]
    first = {key: steps[0][key] for key in ("micro_batches", "tokens", "positions", "finite")}
    assert first == {"micro_batches": 2, "tokens": 32, "positions": 32, "finite": True}
    assert 0 <= steps[0]["seconds"] <= steps[0]["elapsed"] <= steps[2]["elapsed"]
    assert training.notes() == []
    (model,) = training.events("model")
    del model["t"], model["event"]
    assert {k: v for k, v in model.items() if v} == {
        "class": "Model", "model_type": "qwen2", "attention": "sdpa", "dtype": "bfloat16",
        "parameters": 24, "trainable": 24,
    }  # fmt: skip
    (optimizer,) = training.events("optimizer")
    assert (optimizer["class"], optimizer["zero_stage"]) == ("model.AdamW", None)


def test_the_losses_of_trl_are_parts_already_and_evaluation_counts_no_tokens(
    training: Training,
) -> None:
    script = TRAIN.replace("for step in", "model.training = False\n    for step in")
    training.run(script, divides_loss=True)
    assert [(s["loss"], s["tokens"]) for s in training.events("step")] == [(7, 0), (9, 0), (11, 0)]


def test_a_loss_that_is_not_finite(training: Training) -> None:
    training.run(TRAIN.replace("3.0 + step + micro", "float('inf') if step == 1 else 1.0"))
    assert [(s["finite"], s["loss"]) for s in training.events("step")] == [
        (True, 1),
        (False, None),
        (True, 1),
    ]
    (found,) = training.events("nonfinite")
    assert (found["step"], found["value"]) == (2, "inf")


def test_memory_is_read_on_gpus_only_and_marked_where_a_phase_ends(training: Training) -> None:
    script = f"import torch.cuda\n{textwrap.dedent(TRAIN)}accelerator.save_state()\n"
    training.run(script)
    assert {(s["allocated_gib"], s["reserved_gib"]) for s in training.events("step")} == {(3, 4)}
    phases = [(e["phase"], e["step"]) for e in training.events("memory")]
    assert phases == [
        ("load", 0),
        ("prepare", 0),
        ("gradients", 1),
        ("optimizer", 1),
        ("steps", 3),
        ("end", 3),
    ]
    assert {e["peak_allocated_gib"] for e in training.events("memory")} == {3.0}
    (device,) = training.events("device")
    assert (device["name"], device["total_gib"]) == ("A GPU", 80.0)
    assert training.notes() == []
    training.run(script, cpu=True)
    assert training.events("step")[-1]["allocated_gib"] is None


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
    steps = training.events("step")
    assert [(s["grad_norm"], s["finite"]) for s in steps] == [(2, True), (None, False), (3, True)]
    assert {s["learning_rate"] for s in steps} == {0.25}
    (found,) = training.events("nonfinite")
    assert (found["step"], found["what"], found["value"]) == (2, "gradient", "inf")
    # a loss scaler meets gradients that are not finite
    training.run(NORMS.replace("for norm", "accelerator.scaler = 1\n    for norm"))
    assert [s["finite"] for s in training.events("step")[3:]] == [True, True, True]
    assert len(training.events("nonfinite")) == 1


def test_kernels_patches_and_saves_are_recorded(training: Training) -> None:
    done = training.run(
        """
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Norm, LigerSiLUMulFunction as Act
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
    assert [event["path"] for event in training.events("saved")] == ["here"]
    found = [(e["function"], e["kwargs"]) for e in training.events("liger_patch")]
    name = "apply_liger_kernel_to_qwen2"
    assert found == [(name, {"rope": False}), (name, {})]


def test_the_dataset_cache(training: Training) -> None:
    cache = training.folder / "cache"
    training.environ["FAKE_CACHE"] = str(cache)
    calls = ("None, None", "None, None, True", "None, None, dataset_skip_cache=True")
    done = training.run(
        f"""
        from open_instruct.dataset_transformation import LocalDatasetTransformationCache as Cache
        assert Cache().load_or_transform_dataset(None, None) == "the set"
        open({str(cache)!r}, "w")
        {"; ".join(f"Cache().load_or_transform_dataset({call})" for call in calls)}
        """
    )
    assert done.stderr == ""
    states = ["miss", "hit", "miss", "miss"]
    assert [(e["state"], e["path"]) for e in training.events("dataset_cache")] == [
        (s, str(cache)) for s in states
    ]


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


def test_packages_of_another_shape_are_notes_and_broken_ones_fail_as_without(
    training: Training,
) -> None:
    packages = training.folder / "packages"
    accelerator = packages / "accelerate" / "accelerator.py"
    accelerator.write_text("class Accelerator:\n    pass\n")
    (packages / "transformers" / "modeling_utils.py").write_text("")
    done = training.run("import accelerate, transformers.modeling_utils; print('fine')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
    for name in ("accelerate.accelerator", "transformers.modeling_utils"):
        assert any(f"watching {name}" in note for note in training.notes())
    accelerator.write_text("raise ImportError('libcuda is missing')")
    done = training.run("try:\n    import accelerate\nexcept ImportError as e:\n    print(e)")
    assert (done.returncode, done.stdout) == (0, "libcuda is missing\n")
    shutil.rmtree(packages / "accelerate")
    assert (
        "ModuleNotFoundError: No module named 'accelerate'"
        in training.run("import accelerate").stderr
    )


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
    assert len(training.events("step")) == 1
    assert [e["event"] for e in training.events() if e["event"] in {"start", "end"}] == [
        "start",
        "end",
    ]


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
    fake = types.SimpleNamespace(cuda=cuda, empty=Host, stack=list, float64=None)
    monkeypatch.setitem(sys.modules, "torch", fake)
    probe = Probe({"target": "", "out": str(tmp_path)})

    def step(loss: float) -> list[dict[str, Any]]:
        probe.begin_backward(OnDevice(loss))
        probe.end_backward(types.SimpleNamespace())
        probe.clipped(OnDevice(0.25))
        probe.close_step()
        lines = (tmp_path / "rank-0.jsonl").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] == "step"]

    assert (step(3.0), Arrival.waited) == ([], 0)
    # for the step before, at most: a loss that is not finite is known within one step
    assert [(s["step"], s["loss"], s["grad_norm"]) for s in step(2.0)] == [(1, 3.0, 0.25)]
    assert Arrival.waited == 1
    monkeypatch.setattr(Arrival, "there", True)
    told = step(1.0)
    assert [s["loss"] for s in told] == [3.0, 2.0, 1.0]
    assert Arrival.waited == 1
    # the device's own clock, from the end of one step to that of the next
    assert told[2]["seconds"] == 1.5
