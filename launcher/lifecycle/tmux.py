"""A tmux session for a run, named after it: somewhere to look in from any terminal.

The run does not depend on it. Without tmux there is `launch attach`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from launcher.paths import PROJECT
from launcher.runs.rundir import RunFolder

TIMEOUT_S = 10.0


# an interrupt is for what runs in the shell
_STAY = 'trap : INT; "$@"; printf "press Enter to close this session "; read -r _'


def session(folder: RunFolder) -> str:
    """The name of a run's session: tmux takes no dots and no colons, and `#(...)` for a command."""
    return re.sub(r"[.:#\x00-\x1f\x7f]", "_", folder.path.name)


def opened(folder: RunFolder) -> str | None:
    """Open the session, detached, with `launch exec RUN` in it; its name, None where that cannot be."""
    if shutil.which("tmux") is None:
        return None
    ours = str(PROJECT)
    # several words after the options are an argv, which the shell hands on as it is: the verdict is to stay
    inside = [
        *("sh", "-c", _STAY, "sh"),
        *("env", f"PYTHONPATH={ours}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)),
        *(sys.executable, "-m", "launcher", "exec", str(folder.path)),
    ]  # fmt: skip
    name = session(folder)
    try:
        # that of an earlier attempt waits for its key
        subprocess.run(
            ["tmux", "kill-session", "-t", f"={name}"], capture_output=True, timeout=TIMEOUT_S
        )
        subprocess.run(
            ["tmux", "new-session", "-d", "-s", name, "-x", "200", "-y", "50", *inside],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return name
