"""The script that works with a trained model: chat, merge, samples.

It runs under the trainer's Python, 3.10 and later, and imports nothing of launch from an import
path. Its argument is the task; the first line of stdin has the settings, as JSON. It answers with
one JSON object a line on stdout (`channel.py`); what packages print goes to stderr.
"""

import importlib.util
import os
import sys
from typing import Any


def load_package() -> Any:
    """The package of this file, under a name that no package of a trainer has."""
    folder = os.path.dirname(os.path.abspath(__file__))
    # the modules beside this file must not be imported by a plain name
    sys.path[:] = [entry for entry in sys.path if entry not in ("", folder)]
    path = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location("launch_models", path)
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package
    spec.loader.exec_module(package)
    return package


if __name__ == "__main__":
    load_package().main(sys.argv[1])
