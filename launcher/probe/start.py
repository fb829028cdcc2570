"""Run a module as `python -m` does, without the current folder on any import path.

`python -m` itself puts that folder first before 3.11, and accelerate writes it into the PYTHONPATH
of DeepSpeed's workers (accelerate/utils/launch.py::prepare_deepspeed_cmd_env[PYTHONPATH]). Standard
library only, Python 3.10 and later, nothing of launch.
"""

import os
import sys


def keep_python_path() -> None:
    """Let accelerate pass PYTHONPATH unchanged to DeepSpeed's workers."""
    try:
        from accelerate.utils import launch
    except ImportError:
        # the module that is run says better what is missing
        return
    launch.env_var_path_add = lambda name, _folder: os.environ.get(name, "")


def main() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry not in ("", folder)]
    # only now: it would be looked for in the folder of this file
    import runpy

    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    if module.startswith("accelerate."):
        keep_python_path()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
