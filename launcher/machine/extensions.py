"""Modules of others that register rules, commands, entry scripts, trainers and points."""

import os
from importlib import import_module
from typing import Any

from launcher.errors import NotReady, launch_finding

VARIABLE = "LAUNCH_EXTENSIONS"


def load() -> None:
    """Import the modules that `LAUNCH_EXTENSIONS` names, separated by commas.

    Raises NotReady if one cannot be imported.
    """
    for name in os.environ.get(VARIABLE, "").split(","):
        if not name:
            continue
        try:
            import_module(name)
        except Exception as error:
            raise _explain_refusal(name, error) from error


def _explain_refusal(name: str, error: Exception) -> NotReady:
    from launcher.machine import importing

    failure = importing.describe_failure(error)
    message = f"{VARIABLE} names `{name}`, whose import fails: "
    message += f"{failure['error']}: {failure['message']}"
    help = f"correct the module, add its folder to PYTHONPATH, or unset {VARIABLE}"
    place: dict[str, Any] = {}
    if failure["file"] != __file__:
        place = {"file": failure["file"], "line": failure["line"]}
    return NotReady(launch_finding("error", "bad-extension", message, help, **place))
