"""Whether accelerate and transformers themselves refuse DeepSpeed configs, as a process.

usage: python real_trl_machine.py < requests.jsonl > answers.jsonl

One line in is {"file": ..., "arguments": ..., "running": "bf16"}, one line out whether it is
refused. Exit code 1, with the reason on stderr, where the packages are not there or other releases
are.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

PINNED = {"transformers": "5.17.0", "accelerate": "1.15.0"}


def refused(file, arguments, running):
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    try:
        plugin = DeepSpeedPlugin(hf_ds_config=file)
        plugin.set_mixed_precision(running)
        filled = HfTrainerDeepSpeedConfig(plugin.hf_ds_config.config)
        filled.trainer_config_process(SimpleNamespace(**arguments))
    except ValueError:
        return True
    return bool(filled.mismatches)


def main():
    # DeepSpeed's own lines go to stdout
    answers, sys.stdout = sys.stdout, sys.stderr
    for name, wanted in PINNED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = "not installed"
        if installed != wanted:
            sys.exit(f"{name} is {installed}, not {wanted}")
    try:
        import deepspeed  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        sys.exit(str(error))
    for line in sys.stdin:
        print(json.dumps(refused(**json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
