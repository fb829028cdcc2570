"""What starting costs: launch itself, a plan, a dry run, keeping a command, a whole small
training.

`exec` keeps a command that ends at once (keeper, log, verdict, report) beside the same command
alone; `demo` is two steps of TRL's SFT on the CPU beside the very command that `--dry-run` shows.
Goals on two idle cores: `--help` within 0.15 s, a plan within 0.5 s.
"""

import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import ratio
from benchmarks.ratio import ROOT, Pair, Taken
from launcher import files
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder

LAUNCH = [sys.executable, "-m", "launcher"]
TYPER = [sys.executable, "-c", "import typer"]
IMPORTS = [sys.executable, "-c", "import typer, rich, yaml"]
STAGE_FILE = ROOT / "configs" / "tulu" / "sft_qwen7b_25pct.yaml"
DEMO = ROOT / "configs" / "demo" / "sft.yaml"
PLAN = ["--gpus", "1,2,8", "--row-tokens", "290:1100", "--gpu", "H100", "--gpu-memory", "80"]
STEPS = "import json\nfor n in range(1, 11): print(json.dumps({'step': n}), flush=True)"


def starting(_folder: Path) -> Iterator[Pair]:
    """The command line alone."""
    yield Pair(
        name="start-up",
        what="launch --help / import typer", rounds=15,
        ours=ratio.command([*LAUNCH, "--help"]), beside=ratio.command(TYPER),
    )  # fmt: skip


def pairs(folder: Path) -> Iterator[Pair]:
    """From a plan to a training."""
    plan, dry = [*LAUNCH, "plan", str(STAGE_FILE), *PLAN], [*LAUNCH, "sft", str(STAGE_FILE)]
    yield Pair(
        name="plan",
        what="launch plan / import typer, rich, yaml",
        ours=ratio.command(plan), beside=ratio.command(IMPORTS),
    )  # fmt: skip
    yield Pair(
        name="dry run",
        what="launch sft --dry-run / import typer, rich, yaml",
        ours=ratio.command([*dry, "--gpus", "8", "--dry-run"]), beside=ratio.command(IMPORTS),
    )  # fmt: skip
    yield Pair(
        name="keeping a command",
        what="launch exec / the command alone, after import typer, rich, yaml",
        ours=kept(folder),
        beside=ratio.command([sys.executable, "-c", f"import typer, rich, yaml\n{STEPS}"]),
    )  # fmt: skip
    yield demo(folder)


def kept(folder: Path) -> Taken:
    """`launch exec` on run folders that wait, a new one each time; making those is not measured."""
    numbers = itertools.count(1)

    def taken() -> float:
        run = RunFolder(folder / "runs" / f"20260101T{next(numbers):06d}Z-sft-kept")
        run.path.mkdir(parents=True)
        files.write_json(
            run.manifest, {"stage": "sft", "backend": "trl", "name": "kept", "attempt": 1}
        )
        Attempt(
            number=1, argv=(sys.executable, "-c", STEPS), env={}, environ=dict(os.environ),
            cwd=str(folder), stage="sft", backend="trl", title="sft kept", allow_unproven=True,
        ).write(run)  # fmt: skip
        return ratio.command([*LAUNCH, "exec", str(run.path)])()

    return taken


def demo(folder: Path) -> Pair:
    """Two steps of real training, by launch and by the command that it would start."""
    assets = ROOT / "scripts" / "make_demo_assets.py"
    argv = [sys.executable, str(assets), "build/demo"]
    subprocess.run(argv, cwd=folder, check=True, capture_output=True)
    argv = [*LAUNCH, "sft", str(DEMO), "max_steps=2", "--gpus", "0"]
    shown = subprocess.run(
        [*argv, "--dry-run"], cwd=folder, check=True, capture_output=True, text=True
    )
    # variables first, then the command
    alone = ["env", *shlex.split(shown.stdout.strip().rpartition("\n")[2])]
    # one thread: on several it would be the other programs on this machine that are measured
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Pair(
        name="a small training",
        what="launch sft / the command that it shows", rounds=3,
        ours=ratio.command([*argv, "--fresh", "--allow-unproven"], cwd=folder, env=env),
        beside=ratio.command(alone, cwd=folder, env=env),
    )  # fmt: skip
