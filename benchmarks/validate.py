"""What `launch validate-config` costs beside importing what it is made of, and beside its neighbours.

usage: python benchmarks/validate.py [--json]

Whole processes, interleaved, warm; prints medians and the ratio to `import typer, rich, yaml` measured
in the same run. Goals on two cores: one file at most 0.20 s and a ratio of at most 2.5; 1,000 files in
one call at most 2 s. A neighbour (`trl sft`, `llamafactory-cli train`) is asked for the same thing where
it is installed: how long it takes to refuse one misspelt key.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROUNDS = 15
FILES = 1_000
ROOT = Path(__file__).resolve().parent.parent
STAGE_FILE = ROOT / "configs" / "tulu" / "sft_qwen7b_25pct.yaml"
MISSPELT = "model_name_or_path: m\noutput_dir: out\nlearning_rat: 0.1\nmax_stepz: 1\n"
NEIGHBOURS: Mapping[str, Sequence[str]] = {
    "trl": ("sft", "--config"),
    "llamafactory-cli": ("train",),
}


@dataclass(frozen=True)
class Case:
    """A command, how often it is run, and whether it is expected to fail."""

    argv: Sequence[str]
    rounds: int = ROUNDS
    fails: bool = False

    def seconds(self) -> float:
        """Wall time of one process."""
        begun = time.perf_counter()
        done = subprocess.run(
            self.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, check=False
        )
        taken = time.perf_counter() - begun
        if (done.returncode != 0) is not self.fails:
            raise SystemExit(f"{self.argv[0]} answered {done.returncode}")
        return taken


def cases(folder: Path) -> dict[str, Case]:
    """Everything that is measured; the stage files are copies, so that none is read twice."""
    copies = [folder / f"{number}.yaml" for number in range(FILES)]
    for copy in copies:
        shutil.copy(STAGE_FILE, copy)
    misspelt = folder / "misspelt.yaml"
    misspelt.write_text(MISSPELT)
    launch = [sys.executable, "-m", "launcher.cli", "validate-config"]
    found = {
        "python": Case([sys.executable, "-c", "pass"]),
        "imports": Case([sys.executable, "-c", "import typer, rich, yaml"]),
        "one file": Case([*launch, str(STAGE_FILE)]),
        "misspelt": Case([*launch, str(misspelt)], fails=True),
        "1,000 files": Case([*launch, *map(str, copies)], rounds=5),
    }
    beside = Path(sys.executable).parent
    for name, words in NEIGHBOURS.items():
        program = shutil.which(name, path=str(beside)) or shutil.which(name)
        if program is not None:
            found[name] = Case([program, *words, str(misspelt)], rounds=3, fails=True)
    return found


def measure(found: Mapping[str, Case]) -> dict[str, list[float]]:
    """The times of every case, one round of all of them after the other."""
    taken: dict[str, list[float]] = {name: [] for name in found}
    for case in found.values():
        case.seconds()
    for number in range(ROUNDS):
        for name, case in found.items():
            if number < case.rounds:
                taken[name].append(case.seconds())
    return taken


def main(arguments: Sequence[str]) -> int:
    """Measure and print; always exits 0, the figures are for people and for the record."""
    with tempfile.TemporaryDirectory() as folder:
        taken = measure(cases(Path(folder)))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    base = medians["imports"]
    if "--json" in arguments:
        rows = {
            name: {"seconds": round(value, 4), "ratio": round(value / base, 2)}
            for name, value in medians.items()
        }
        print(json.dumps(rows))
        return 0
    for name, times in taken.items():
        spread = f"({min(times):.3f} .. {max(times):.3f})"
        print(
            f"{name:<18} {medians[name]:7.3f} s  {spread:<18} {medians[name] / base:6.2f} x imports"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
