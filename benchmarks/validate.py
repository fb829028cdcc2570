"""What `launch validate-config` costs beside importing what it is made of.

usage: python benchmarks/validate.py [--json]

Whole processes, interleaved, warm; prints medians and the ratio to `import typer, rich, yaml` measured
in the same run. The goal is a ratio of at most 2.5 and at most 0.25 s on two cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 15
ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "python": [sys.executable, "-c", "pass"],
    "imports": [sys.executable, "-c", "import typer, rich, yaml"],
    "validate": [
        sys.executable, "-m", "launcher.cli", "validate-config",
        str(ROOT / "configs" / "tulu" / "sft_qwen7b_25pct.yaml"),
    ],
}  # fmt: skip


def seconds(argv: list[str]) -> float:
    """Wall time of one process."""
    begun = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return time.perf_counter() - begun


def main(arguments: list[str]) -> int:
    """Measure and print; always exits 0, the figures are for people and for the record."""
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for argv in CASES.values():
        seconds(argv)
    for _ in range(ROUNDS):
        for name, argv in CASES.items():
            taken[name].append(seconds(argv))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    ratio = medians["validate"] / medians["imports"]
    result = {**{f"{k}_s": round(v, 4) for k, v in medians.items()}, "ratio": round(ratio, 2)}
    if "--json" in arguments:
        print(json.dumps(result))
    else:
        for name, times in taken.items():
            spread = f"{min(times):.3f} .. {max(times):.3f}"
            print(f"{name:<10} {medians[name]:.3f} s   ({spread})")
        print(f"validate / imports = {ratio:.2f}   (goal: 2.5)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
