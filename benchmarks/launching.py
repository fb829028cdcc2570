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
from benchmarks.ratio import ROOT, Pair, Timer
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
        what="launch --help / import typer",
        rounds=15,
        launch=ratio.time_command([*LAUNCH, "--help"]),
        neighbour=ratio.time_command(TYPER),
    )


def pairs(folder: Path) -> Iterator[Pair]:
    """From a plan to a training."""
    plan = [*LAUNCH, "plan", str(STAGE_FILE), *PLAN]
    yield Pair(
        name="plan",
        what="launch plan / import typer, rich, yaml",
        launch=ratio.time_command(plan),
        neighbour=ratio.time_command(IMPORTS),
    )
    dry_run = [*LAUNCH, "sft", str(STAGE_FILE), "--gpus", "8", "--dry-run"]
    yield Pair(
        name="dry run",
        what="launch sft --dry-run / import typer, rich, yaml",
        launch=ratio.time_command(dry_run),
        neighbour=ratio.time_command(IMPORTS),
    )
    command = [sys.executable, "-c", f"import typer, rich, yaml\n{STEPS}"]
    yield Pair(
        name="keeping a command",
        what="launch exec / the command alone, after import typer, rich, yaml",
        launch=time_exec(folder),
        neighbour=ratio.time_command(command),
    )
    yield pair_with_training(folder)


def time_exec(folder: Path) -> Timer:
    """`launch exec` on run folders that wait, a new one each time; making those is not measured."""
    numbers = itertools.count(1)
    manifest = {"stage": "sft", "backend": "trl", "name": "kept", "attempt": 1}
    attempt = Attempt(
        number=1,
        argv=(sys.executable, "-c", STEPS),
        env={},
        environ=dict(os.environ),
        cwd=str(folder),
        stage="sft",
        backend="trl",
        title="sft kept",
        allow_unproven=True,
    )

    def run_next() -> float:
        run = RunFolder(folder / "runs" / f"20260101T{next(numbers):06d}Z-sft-kept")
        run.path.mkdir(parents=True)
        files.write_json(run.manifest, manifest)
        attempt.write(run)
        timer = ratio.time_command([*LAUNCH, "exec", str(run.path)])
        return timer()

    return run_next


def pair_with_training(folder: Path) -> Pair:
    """Two steps of real training, by launch and by the command that it would start."""
    maker = [sys.executable, str(ROOT / "scripts" / "make_demo_assets.py"), "build/demo"]
    subprocess.run(maker, cwd=folder, check=True, capture_output=True)
    sft = [*LAUNCH, "sft", str(DEMO), "max_steps=2", "--gpus", "0"]
    dry_run = subprocess.run(
        [*sft, "--dry-run"], cwd=folder, check=True, capture_output=True, text=True
    )
    # variables first, then the command
    command = dry_run.stdout.strip().rpartition("\n")[2]
    # one thread: on several it would be the other programs on this machine that are measured
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Pair(
        name="a small training",
        what="launch sft / the command that it shows",
        rounds=3,
        launch=ratio.time_command([*sft, "--fresh", "--allow-unproven"], cwd=folder, env=env),
        neighbour=ratio.time_command(["env", *shlex.split(command)], cwd=folder, env=env),
    )
