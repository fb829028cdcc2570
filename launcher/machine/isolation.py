"""Environments in which a process does not run code from the folder that it is started in.

An empty entry of a search path means the current folder: `PYTHONPATH=$PYTHONPATH:/x` has one if the
variable was unset before. Python adds the current folder itself for `-c` and `-m` (PYTHONSAFEPATH
switches that off from 3.11 on).
"""

import os
import shutil
from collections.abc import Mapping

SAFE_PATH = "PYTHONSAFEPATH"
# The first lines of a program for `python -c`: before 3.11 nothing else removes the folder.
# `sys` is built in.
HEAD = 'import sys\nsys.path[:] = [entry for entry in sys.path if entry != ""]\n'
_SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def list_changes(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set so that a Python started with `environ` is isolated.

    A relative entry that the user wrote into PYTHONPATH stays.
    """
    changed = {SAFE_PATH: "1"}
    for name in _SEARCH_PATHS:
        value = environ.get(name, "")
        clean = _clean_search_path(name, value)
        if clean != value:
            changed[name] = clean
    return changed


def isolate(environ: Mapping[str, str]) -> dict[str, str]:
    return {**environ, **list_changes(environ)}


def find_program(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The path of a program as `shutil.which` finds it, in absolute folders of PATH alone."""
    if environ is None:
        environ = os.environ
    path = environ.get("PATH", os.defpath)
    return shutil.which(name, path=_clean_search_path("PATH", path))


def _clean_search_path(name: str, value: str) -> str:
    """A search path without empty entries; PATH also without relative ones."""
    entries = []
    for entry in value.split(os.pathsep):
        if entry and (name != "PATH" or os.path.isabs(entry)):
            entries.append(entry)
    if name == "PATH" and value and not entries:
        # an empty PATH would search the current folder
        return os.defpath
    return os.pathsep.join(entries)
