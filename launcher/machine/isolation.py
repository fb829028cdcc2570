"""Environments in which the folder that a process is started in gives it no code.

An empty entry of a search path means the current folder: `PYTHONPATH=$PYTHONPATH:/x` has one where the variable was
not set before. Python adds that folder by itself for `-c` and `-m` (PYTHONSAFEPATH switches that off from 3.11 on).
"""

import os
import shutil
from collections.abc import Mapping

SAFE_PATH = "PYTHONSAFEPATH"
# The first lines of a program for `python -c`: before 3.11 nothing else takes the folder away. `sys` is built in.
HEAD = 'import sys\nsys.path[:] = [entry for entry in sys.path if entry != ""]\n'
_SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def changes(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that isolate a Python that is started with `environ`: those to add, and those to replace.

    A relative entry that the user wrote into PYTHONPATH stays.
    """
    changed = {SAFE_PATH: "1"}
    for name in _SEARCH_PATHS:
        value = environ.get(name, "")
        clean = _cleaned(name, value)
        if clean != value:
            changed[name] = clean
    return changed


def isolated(environ: Mapping[str, str]) -> dict[str, str]:
    return {**environ, **changes(environ)}


def find_program(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The path of a program, as `shutil.which` finds it, but in absolute entries of PATH alone."""
    environ = os.environ if environ is None else environ
    return shutil.which(name, path=_cleaned("PATH", environ.get("PATH", os.defpath)))


def _cleaned(name: str, value: str) -> str:
    entries = [entry for entry in value.split(os.pathsep) if entry]
    if name == "PATH" and value:
        entries = [entry for entry in entries if os.path.isabs(entry)]
        # without any entry, the current folder would be searched
        return os.pathsep.join(entries) or os.defpath
    return os.pathsep.join(entries)
