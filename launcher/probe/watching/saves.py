"""What was saved, by content: the fingerprint of each file of weights right after the save.

`artifacts/digest.py` does the reading, for launch compares with the same functions.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from .process import EventLog


@functools.cache
def content() -> Any:
    path = Path(__file__).resolve().parents[2] / "artifacts" / "digest.py"
    spec = importlib.util.spec_from_file_location("launch_content", path)
    assert spec is not None and spec.loader is not None
    # a dataclass looks its module up
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def note(record: EventLog, folder: Any) -> None:
    """Fingerprint a model that has just been saved; a checkpoint is none of the final ones."""
    if not isinstance(folder, (str, os.PathLike)) or content().CHECKPOINT.search(os.fspath(folder)):
        return
    path = os.path.abspath(os.fspath(folder))
    names = content().weights(path) if os.path.isdir(path) else ()
    found = [(name, content().read(Path(path, name))[0]) for name in names]
    files = [{"name": name, "size": one.size, "method": one.method, "digest": one.digest} for name, one in found]
    record.write("saved_model", path=path, files=files)
