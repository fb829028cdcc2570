"""Runs the module that is named first, as `python -m` does, and keeps the current folder off every import path.

`python -m` itself puts that folder first before 3.11, and accelerate writes it into the PYTHONPATH of DeepSpeed's
workers (accelerate/utils/launch.py::prepare_deepspeed_cmd_env[PYTHONPATH]). Standard library only, Python 3.10 and
later, nothing of launch.
"""

import os
import sys


def leave_out_current_folder() -> None:
    """Have accelerate hand PYTHONPATH on to DeepSpeed's workers as it is."""
    try:
        from accelerate.utils import launch
    except ImportError:
        # whatever is missing, the module that is run says it better
        return
    launch.env_var_path_add = lambda name, _folder: os.environ.get(name, "")


def main() -> None:
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry not in ("", own)]
    # not before: runpy would be looked for in the folder of this file
    import runpy

    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    if module.startswith("accelerate."):
        leave_out_current_folder()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
