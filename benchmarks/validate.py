"""What `launch validate-config` costs beside importing what it is made of, and beside its neighbours.

usage: python -m benchmarks.validate [--json]

Whole processes, interleaved, warm; prints medians and the ratio to `import typer, rich, yaml` measured
in the same run. Goals on two cores: one file at most 0.20 s and a ratio of at most 2.5; 1,000 files in
one call at most 2 s. A neighbour (`trl sft`, `llamafactory-cli train`) is asked for the same thing where
it is installed: how long it takes to refuse one misspelt key.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import ratio
from benchmarks.ratio import ROOT, Pair, Taken

ROUNDS = 15
FILES = 1_000
LAUNCH = [sys.executable, "-m", "launcher.cli", "validate-config"]
PARSE = (
    "import sys, typer, yaml\nloader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)\n"
    "for path in sys.argv[1:]: yaml.load(open(path, 'rb'), loader)"
)
STAGE_FILE = ROOT / "configs" / "tulu" / "sft_qwen7b_25pct.yaml"
MISSPELT = "model_name_or_path: m\noutput_dir: out\nlearning_rat: 0.1\nmax_stepz: 1\n"
NEIGHBOURS: Mapping[str, Sequence[str]] = {
    "trl": ("sft", "--config"),
    "llamafactory-cli": ("train",),
}


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
            name=f"validation, {name}", what="launch validate-config / import typer, parse the YAML",
            rounds=rounds, ours=ratio.command([*LAUNCH, *files]),
            beside=ratio.command([sys.executable, "-c", PARSE, *files]),
        )  # fmt: skip


def cases(folder: Path) -> dict[str, Taken]:
    """Everything that is measured for people, neighbours among programs included."""
    misspelt = folder / "misspelt.yaml"
    misspelt.write_text(MISSPELT)
    found = {
        "python": ratio.command([sys.executable, "-c", "pass"]),
        "imports": ratio.command([sys.executable, "-c", "import typer, rich, yaml"]),
        "one file": ratio.command([*LAUNCH, str(STAGE_FILE)]),
        "misspelt": ratio.command([*LAUNCH, str(misspelt)], fails=True),
        "1,000 files": ratio.command([*LAUNCH, *copied(folder)]),
    }
    beside = Path(sys.executable).parent
    for name, words in NEIGHBOURS.items():
        program = shutil.which(name, path=str(beside)) or shutil.which(name)
        if program is not None:
            found[name] = ratio.command([program, *words, str(misspelt)], fails=True)
    return found


def measure(found: Mapping[str, Taken]) -> dict[str, list[float]]:
    """The times of every case, one round of all of them after the other."""
    rare = {"1,000 files": 5, **dict.fromkeys(NEIGHBOURS, 3)}
    return ratio.interleaved(found, {name: rare.get(name, ROUNDS) for name in found})


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
