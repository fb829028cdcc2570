"""What looking at runs costs.

`launch runs` over 1,000 run folders (goal: 0.4 s on two idle cores, given as a ratio to importing
what it is made of), and the first line of `launch attach` with 1 GiB in the log (0.5 s).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import ratio
from benchmarks.ratio import ROOT, Pair

sys.path.insert(0, str(ROOT / "tests" / "support"))

from made_runs import manifest, write_run  # type: ignore[import-not-found]

from launcher import files
from launcher.lifecycle import start
from launcher.runs import rundir, runner
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder

RUNS, ROUNDS, LOG_GIB = 1_000, 7, 1
WATCHED_S = 20.0
LAUNCH = [sys.executable, "-m", "launcher"]
PADDING = {f"field_{n}": {"value": n, "origin": "default: a.py:1"} for n in range(250)}


def listed(place: Path) -> Pair:
    """A thousand run folders, listed, beside importing what the command line is made of."""
    for number in range(RUNS):
        record = manifest(args=PADDING)
        write_run(place / "runs" / f"20260101T{number:06d}Z-sft-x", steps=40, record=record)
        path = place / "runs" / f"20260101T{number:06d}Z-sft-x" / "run.json"
        path.write_text(json.dumps(record, indent=2))
    # the environment of now: where the runs are may change before this is measured
    environ = {**os.environ, "LAUNCH_RUNS": str(place / "runs")}
    return Pair(
        name="list of runs",
        what="launch runs, 1,000 of them / import typer, rich, yaml", rounds=ROUNDS,
        ours=ratio.command([*LAUNCH, "runs"], env=environ),
        beside=ratio.command([sys.executable, "-c", "import typer, rich, yaml"]),
    )  # fmt: skip


def pairs(place: Path) -> Iterator[Pair]:
    """The list, and the first line about a run with a long log."""
    os.environ["LAUNCH_RUNS"] = str(place / "runs")
    yield listed(place)
    folder = waiting(place, "20270101T000000Z-sft-waiting")
    try:
        yield Pair(
            name="first line of attach",
            what="launch attach, 1 GiB of log / import typer, rich, yaml",
            rounds=5, ours=lambda: first_line(folder),
            beside=ratio.command([sys.executable, "-c", "import typer, rich, yaml"]),
        )  # fmt: skip
    finally:
        ended(folder)


def waiting(place: Path, name: str) -> RunFolder:
    """A run that does nothing for a while, with a log of a gigabyte."""
    folder = RunFolder(place / "runs" / name)
    folder.path.mkdir(parents=True)
    files.write_json(folder.manifest, manifest())
    Attempt(
        number=1, argv=(sys.executable, "-c", f"import time; time.sleep({WATCHED_S * 2})"), env={},
        environ=dict(os.environ), cwd=str(place), stage="sft", backend="trl", title="sft waiting",
    ).write(folder)  # fmt: skip
    start.execute(folder)
    folder.probe.mkdir()
    steps = [{"event": "start", "attempt": 1}, {"event": "step", "step": 9, "loss": 1.0}]
    (folder.probe / "rank-0.jsonl").write_text("".join(map(rundir.json_line, steps)))
    block = (b"x" * 99 + b"\n") * 10_000
    with folder.console(1).open("ab") as log:
        for _ in range(LOG_GIB * 2**30 // len(block)):
            log.write(block)
    return folder


def ended(folder: RunFolder) -> None:
    """End the run, and wait for its keeper's last word about it."""
    runner.end_orphans(folder, (0, 0, 0), 1)
    until = time.monotonic() + 60
    while runner.read_processes(folder).supervisor is not None and time.monotonic() < until:
        time.sleep(0.05)


def first_line(folder: RunFolder) -> float:
    """Seconds until `launch attach` shows something."""
    lines: list[bytes] = []
    looking: list[subprocess.Popen[bytes]] = []

    def look() -> None:
        process = subprocess.Popen(
            [*LAUNCH, "attach", str(folder.path)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert process.stderr is not None
        looking.append(process)
        lines.append(process.stderr.readline())

    taken = ratio.timed(look)()
    looking[0].kill()
    looking[0].communicate()
    if b"step 9" not in lines[0]:
        raise SystemExit(f"attach said {lines[0]!r}")
    return taken
