"""The script that works with a trained model: chat, merge, samples.

It runs under the trainer's Python, 3.10 and later, and imports nothing of launch from an import path. Its word is the
task; the settings of the task are the first line of stdin, as JSON. What it has to say is one JSON object a line on
stdout (`channel.py`); what packages print goes to stderr.
"""

import importlib.util
import os
import sys
from typing import Any


def pieces() -> Any:
    """The package of this file, by its place and under a name that no package of a trainer has."""
    folder = os.path.dirname(os.path.abspath(__file__))
    # nothing beside this file is to be found by a plain name
    sys.path[:] = [entry for entry in sys.path if entry not in ("", folder)]
    spec = importlib.util.spec_from_file_location("launch_models", os.path.join(folder, "__init__.py"))
    assert spec is not None and spec.loader is not None
    package = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


if __name__ == "__main__":
    pieces().main(sys.argv[1])
