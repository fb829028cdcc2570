"""SFT by OLMo-core's own scripts: refused by name, so that nobody gets another training.

Its model is a checkpoint of OLMo-core's, its rows are token files and its batch counts tokens.
"""

from __future__ import annotations

import re

from launcher.lazy_dataclass import dataclass

# src/scripts/train/sft/OLMo-sft.py, Olmo-3-7B-SFT.py, FlexOlmo-SFT.py, in any folder
_OF_OLMO_CORE = re.compile(
    r"(^|/)src/scripts/(official|train)/(.*/)?[^/]*olmo[^/]*\.py$|(^|/)(flex)?olmo[^/]*-sft\.py$",
    re.IGNORECASE,
)
_OTHER_WAY = (
    "`launch init sft --model NAME --data NAME` writes a stage file of the same model and data "
    "for TRL, with `--backend open_instruct` for open-instruct"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedProgram:
    """`what` a program is, as the end of a sentence about it, and what to do `instead`."""

    what: str
    instead: str


def find_refusal(program: str) -> UnsupportedProgram | None:
    """Why a program of OLMo-core is not converted; None for any other program."""
    if _OF_OLMO_CORE.search(program):
        return UnsupportedProgram(
            what="is a training of OLMo-core, which launch does not support yet",
            instead="convert its checkpoint to a folder that transformers loads, take the rows "
            f"before they became token files; then {_OTHER_WAY}",
        )
    return None
