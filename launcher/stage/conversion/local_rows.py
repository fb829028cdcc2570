"""Local rows that the trainer cannot read -> the file that `launch data convert` makes of them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from launcher.errors import LaunchError
from launcher.stage import rows
from launcher.stage.conversion.ledger import ConversionLedger
from launcher.stage.conversion.settings import SourceSetting

FOLDER = "converted"


def find_readable(path: str, setting: SourceSetting, ledger: ConversionLedger) -> str:
    """The path of rows that the trainer reads: this one, or that of a file yet to be converted."""
    draft = ledger.draft
    try:
        local = rows.read_rows(path, draft.stage, draft.backend, os.environ)
    except (LaunchError, OSError, ValueError):
        return path
    if local is None:
        return path
    ledger.kinds.add(local.kind or "")
    if local.conversion is None:
        return path
    output = _find_free_name(Path(path).stem, draft.remarks)
    command = f"launch data convert {shlex.quote(path)} -o {shlex.quote(output)}"
    ledger.kinds.add("chats")
    draft.remarks += (f"first: {command}",)
    advice = f"{path} has rows of the form {local.conversion.name}: `{command}` makes {output}"
    ledger.check(setting, advice, target=ledger.entry.names.data)
    return output


def _find_free_name(stem: str, remarks: tuple[str, ...]) -> str:
    name = f"{FOLDER}/{stem}.jsonl"
    number = 1
    while any(remark.endswith(f" {shlex.quote(name)}") for remark in remarks):
        number += 1
        name = f"{FOLDER}/{stem}_{number}.jsonl"
    return name
