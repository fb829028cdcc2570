"""A Python with a TRL of another release beside it: sources of a few lines, to be read and never
imported.
"""

import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

_TRAINING = """
    output_dir: str = "trainer_output"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    logging_steps: float = 500
    bf16: bool = False
    use_cpu: bool = False
"""
_SCRIPT = """
from dataclasses import dataclass
from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments
from trl.trainer.model_config import ModelConfig
from trl.trainer.{module} import {config}

def main(script_args, training_args, model_args, dataset_args):
    raise ImportError("sources are read, not imported")

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, {config}, ModelConfig, DatasetMixtureConfig))
    main(*parser.parse_args_and_config())
"""


def write_trl(site: Path, *fields: str) -> Path:
    """Write sources of TRL and transformers below `site`; both configurations get `fields` too."""
    more = textwrap.indent("\n".join(fields), "    ")
    training = (
        f"from dataclasses import dataclass\n\n@dataclass\nclass TrainingArguments:{_TRAINING}"
    )
    head = (
        "from dataclasses import dataclass\n"
        "from transformers.training_args import TrainingArguments\n\n@dataclass\n"
    )
    files = {
        "trl/__init__.py": "raise ImportError('read as text')\n",
        "transformers/__init__.py": "raise ImportError('read as text')\n",
        "transformers/training_args.py": training,
        "trl/scripts/__init__.py": "",
        "trl/trainer/__init__.py": "",
        "trl/scripts/utils.py": "from dataclasses import dataclass\n\n"
        "@dataclass\nclass ScriptArguments:\n    dataset_name: str = None\n\n"
        "@dataclass\nclass DatasetMixtureConfig:\n    streaming: bool = False\n",
        "trl/trainer/model_config.py": "from dataclasses import dataclass\n\n"
        "@dataclass\nclass ModelConfig:\n"
        "    model_name_or_path: str = None\n    torch_dtype: str = None\n",
    }
    for stage, config in (("sft", "SFTConfig"), ("dpo", "DPOConfig")):
        files[f"trl/scripts/{stage}.py"] = _SCRIPT.format(module=f"{stage}_config", config=config)
        body = f"class {config}(TrainingArguments):\n    max_length: int = 1024\n{more}\n"
        files[f"trl/trainer/{stage}_config.py"] = head + body
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (site / "trl-0.24.0.dist-info").mkdir()
    (site / "transformers-4.57.1.dist-info").mkdir()
    return site


def write_python(folder: Path, path: Sequence[Path]) -> Path:
    """A Python that looks for packages in `path` alone, beside its own library."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "python"
    entries = ":".join(str(entry) for entry in path)
    program.write_text(
        "#!/bin/sh\n"
        f'PYTHONPATH={shlex.quote(entries)} exec {shlex.quote(sys.executable)} -S "$@"\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    return program
