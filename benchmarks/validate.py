"""What `launch validate-config` costs beside importing what it is made of, and beside its
neighbours.

Whole processes, interleaved, warm. Goals on two cores: one file at most 0.20 s; 1,000 files in one
call at most 2 s.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import ratio
from benchmarks.ratio import ROOT, Pair

ROUNDS = 15
FILES = 1_000
LAUNCH = [sys.executable, "-m", "launcher", "validate-config"]
PARSE = (
    "import sys, typer, yaml\nloader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)\n"
    "for path in sys.argv[1:]: yaml.load(open(path, 'rb'), loader)"
)
STAGE_FILE = ROOT / "configs" / "tulu" / "sft_qwen7b_25pct.yaml"


def copied(folder: Path) -> list[str]:
    """Copies of a stage file, so that none is read twice."""
    copies = [str(folder / f"{number}.yaml") for number in range(FILES)]
    for copy in copies:
        shutil.copy(STAGE_FILE, copy)
    return copies


def pairs(folder: Path) -> Iterator[Pair]:
    """Validation beside importing typer and parsing the same YAML."""
    copies = copied(folder)
    for name, files, rounds in (
        ("one file", [str(STAGE_FILE)], ROUNDS),
        ("1,000 files", copies, 5),
    ):
        yield Pair(
            name=f"validation, {name}",
            what="launch validate-config / import typer, parse the YAML",
            rounds=rounds, ours=ratio.command([*LAUNCH, *files]),
            beside=ratio.command([sys.executable, "-c", PARSE, *files]),
        )  # fmt: skip
