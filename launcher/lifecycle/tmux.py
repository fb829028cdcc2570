"""A tmux session for a run, named after it: somewhere to look in from any terminal.

The run does not depend on it. Without tmux there is `launch attach`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from launcher.paths import PROJECT
from launcher.runs.rundir import RunFolder

TIMEOUT_S = 10.0


# an interrupt is for what runs in the shell
_STAY = 'trap : INT; "$@"; printf "press Enter to close this session "; read -r _'


def session(folder: RunFolder) -> str:
    """The name of a run's session: tmux takes no dots and no colons, and `#(...)` for a command."""
    return re.sub(r"[.:#\x00-\x1f\x7f]", "_", folder.path.name)


def opened(folder: RunFolder) -> str | None:
    """Open the session of a run, with `launch exec RUN` in it; see `show`."""
    return show(session(folder), [sys.executable, "-m", "launcher", "exec", str(folder.path)])


def show(name: str, command: Sequence[str]) -> str | None:
    """Open a session, detached, with a command in it; its name, None where that cannot be."""
    if shutil.which("tmux") is None:
        return None
    ours = str(PROJECT)
    # several words after the options are an argv, which the shell hands on as it is: the verdict is to stay
    inside = [
        *("sh", "-c", _STAY, "sh"),
        "env",
        f"PYTHONPATH={ours}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
        *command,
    ]
    # that of an earlier attempt waits for its key; to end the last session would end the server
    again = ["respawn-pane", "-k", "-t", f"={name}:", *inside]
    new = ["new-session", "-d", "-s", name, "-x", "200", "-y", "50", *inside]
    return name if _done(again) or _done(new) else None


def _done(words: list[str]) -> bool:
    """Whether tmux took this command."""
    null = subprocess.DEVNULL
    try:
        done = subprocess.run(["tmux", *words], stdin=null, stdout=null, stderr=null, timeout=TIMEOUT_S)
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
