"""The script that every training process runs: it watches upstream's script from inside.

Standard library only, Python 3.10 and later, and no import of launch: it runs under the trainer's
interpreter. `LAUNCH_PROBE` has its settings as JSON (`Settings` in `watching/process.py`). Each
rank appends JSON lines to `OUT/rank-N.jsonl`; docs/probe.md lists the events. A process that breaks
the contract ends itself with `VIOLATION`, so that the contract holds when nobody watches.
"""

import importlib.util
import os
import sys
from typing import Any


def load_package() -> Any:
    """The package `watching/`, under a name that no package of a trainer has."""
    folder = os.path.dirname(os.path.abspath(__file__))
    path = os.path.join(folder, "watching", "__init__.py")
    spec = importlib.util.spec_from_file_location("launch_probe", path)
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package
    spec.loader.exec_module(package)
    return package


if __name__ == "__main__":
    load_package().main()
