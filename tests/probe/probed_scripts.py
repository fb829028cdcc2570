"""A script under the probe, in a process of its own over packages that are fakes."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, REPOSITORY
from recorded_events import Event, read_events

PROBE = REPOSITORY / "launcher" / "probe" / "run.py"

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
        def apply_liger_kernel_to_gemma(fused_linear_cross_entropy=True, model=None):
            return "patched"
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

# the modules of open-instruct that are faked, by its entry scripts
WATCHERS = {
    "open_instruct.dataset_transformation": "watch_tokenising",
    "open_instruct.dpo_utils": "watch_pairs",
    "open_instruct.model_utils": "watch_final_save",
}

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


def runs_here(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def oldest_python() -> str:
    for minor in (10, 11, 12, 13):
        name = f"python3.{minor}"
        pythons = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))
        for python in (shutil.which(name), *map(str, pythons)):
            if python and runs_here(python):
                return python
    return sys.executable


OLDEST = oldest_python()


class Training:
    """A folder with the fake packages, and the records of what is run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages = folder / "packages"
        self.out = folder / "out of it"
        self.environ: dict[str, str] = {"FAKE_CACHE": str(folder / "no cache")}
        for name, text in FAKES.items():
            self.write_package(name, text)

    def write_package(self, name: str, text: str) -> None:
        path = self.packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def run(
        self,
        script: str,
        *argv: str,
        python: str = OLDEST,
        options: tuple[str, ...] = ("-S",),
        **settings: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script under the probe; `settings` are the probe's."""
        target = self.folder / "a script" / "train.py"
        target.parent.mkdir(exist_ok=True)
        target.write_text(textwrap.dedent(script))
        defaults = {"target": str(target), "out": str(self.out), "cpu": False, "watchers": WATCHERS}
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.packages),
            "LAUNCH_PROBE": json.dumps({**defaults, **settings}),
            **self.environ,
        }
        return subprocess.run(
            [python, *options, str(PROBE), *argv], env=environ, capture_output=True, text=True,
            timeout=PATIENCE_S, cwd=self.folder,
        )  # fmt: skip

    def events(self, name: str | None = None, rank: int = 0) -> list[Event]:
        return read_events(self.out, name, rank)

    def values(self, name: str, key: str) -> list[Any]:
        """One field of all events of a kind."""
        return [event[key] for event in self.events(name)]

    def notes(self) -> list[str]:
        return self.values("note", "text")


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)
