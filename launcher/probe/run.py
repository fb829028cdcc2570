"""The script that every training process really runs: it watches upstream's script from inside.

Standard library only, Python 3.10 and later, imports nothing of ours from an import path: it runs under the
trainer's interpreter. `LAUNCH_PROBE` holds its settings as JSON (`Settings` in `watching/process.py`). Each rank
appends JSON lines to `OUT/rank-N.jsonl`; docs/probe.md lists the events. What was asked for and is not so (the
contract) ends the process with `VIOLATION`, from the inside, so that it holds when nobody watches.
"""

import importlib.util
import os
import sys
from typing import Any


def pieces() -> Any:
    """`watching/`, by its place and under a name that no package of a trainer has."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "watching")
    spec = importlib.util.spec_from_file_location("launch_probe", os.path.join(folder, "__init__.py"))
    assert spec is not None and spec.loader is not None
    package = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


if __name__ == "__main__":
    pieces().main()
