"""Where runs are kept on this machine, and launch's list of them."""

import os
from pathlib import Path


def find_runs_root() -> Path:
    return Path(os.environ.get("LAUNCH_RUNS") or "runs").expanduser().absolute()


def find_state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "launch"
