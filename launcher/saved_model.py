"""The model that a run saved, as its probe fingerprinted it, against what lies there now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import checkpoints, fingerprint
from launcher.evidence import Evidence
from launcher.fingerprint import Memory, MissingContent
from launcher.watching import saves


def compare(found: Evidence, output: object, *, here: bool) -> dict[str, Any] | None:
    """`path` and, where the model is not as it was saved, `state` and `reason`.

    None where nothing was fingerprinted; without a probe it is only asked whether the `output` folder is
    there. `here` is whether the run trained on this machine: of another
    one the folder may just not be visible.
    """
    event = next(
        (e for r in (found.probe.ranks.values() if found.probe else ()) if (e := r.last("saved_model"))),
        None,
    )  # fmt: skip
    path, files = (None, None) if event is None else (event.text("path"), event.fields.get("files"))
    if found.probe is None and here and isinstance(output, str) and not Path(output).exists():
        return {"path": output, "state": "missing", "reason": f"{output} does not exist"}
    if path is None or not isinstance(files, list):
        return None
    folder = Path(path)
    told = {"path": path}
    known = {str(one.get("name")): one for one in files if isinstance(one, Mapping)}
    if not folder.is_dir() and not here:
        return {**told, "state": "unknown", "reason": f"{folder} cannot be seen from this machine"}
    if not known:
        return {**told, "state": "missing", "reason": f"the save left no weights in {folder}"}
    try:
        now = saves.weights(path)
    except OSError:
        return {**told, "state": "missing", "reason": f"{folder} is gone"}
    if gone := [name for name in known if name not in now]:
        reason = f"{', '.join(gone[:4])} in {folder} is gone"
        return {**told, "state": "missing", "reason": reason}
    if more := [name for name in now if name not in known]:
        reason = f"{folder} holds {', '.join(more[:4])}, which the run did not save"
        return {**told, "state": "changed", "reason": reason}
    with fingerprint.remembered() as memory:
        for name, one in known.items():
            change = _change(folder / name, str(one.get("digest")), memory)
            if change is not None:
                return {**told, "state": "changed", "file": name, **change}
    return told


def _change(path: Path, before: str, memory: Memory) -> dict[str, Any] | None:
    try:
        after = fingerprint.of_file(path, memory).digest
    except MissingContent as error:
        return {"reason": error.findings[0].message}
    if path.suffix == ".safetensors" and checkpoints.blank(path):
        return {"reason": f"every weight in {path} is 0", "before": before, "after": after}
    if after == before:
        return None
    reason = f"{path} was changed after the save: sha256 {before[:12]}, now {after[:12]}"
    return {"reason": reason, "before": before, "after": after}
