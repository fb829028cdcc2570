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


def copy_stage_file(folder: Path) -> list[str]:
    """Copies of a stage file, so that none is read twice."""
    copies = [str(folder / f"{number}.yaml") for number in range(FILES)]
    for copy in copies:
        shutil.copy(STAGE_FILE, copy)
    return copies


def pairs(folder: Path) -> Iterator[Pair]:
    """Validation beside importing typer and parsing the same YAML."""
    yield pair_with_parsing("one file", [str(STAGE_FILE)], ROUNDS)
    yield pair_with_parsing("1,000 files", copy_stage_file(folder), 5)


def pair_with_parsing(name: str, files: list[str], rounds: int) -> Pair:
    return Pair(
        name=f"validation, {name}",
        what="launch validate-config / import typer, parse the YAML",
        rounds=rounds,
        launch=ratio.time_command([*LAUNCH, *files]),
        neighbour=ratio.time_command([sys.executable, "-c", PARSE, *files]),
    )
