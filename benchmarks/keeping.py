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

RUNS = 1_000
ROUNDS = 7
LOG_BYTES = 2**30
WATCHED_S = 20.0
LAUNCH = [sys.executable, "-m", "launcher"]
IMPORTS = [sys.executable, "-c", "import typer, rich, yaml"]
PADDING = {f"field_{n}": {"value": n, "origin": "default: a.py:1"} for n in range(250)}


def pair_with_list(place: Path) -> Pair:
    """A thousand run folders, listed, beside importing what the command line is made of."""
    runs = place / "runs"
    for number in range(RUNS):
        record = manifest(args=PADDING)
        folder = runs / f"20260101T{number:06d}Z-sft-x"
        write_run(folder, steps=40, record=record)
        (folder / "run.json").write_text(json.dumps(record, indent=2))
    # the environment of now: where the runs are may change before this is measured
    environ = {**os.environ, "LAUNCH_RUNS": str(runs)}
    return Pair(
        name="list of runs",
        what="launch runs, 1,000 of them / import typer, rich, yaml",
        rounds=ROUNDS,
        launch=ratio.time_command([*LAUNCH, "runs"], env=environ),
        neighbour=ratio.time_command(IMPORTS),
    )


def pairs(place: Path) -> Iterator[Pair]:
    """The list, and the first line about a run with a long log."""
    os.environ["LAUNCH_RUNS"] = str(place / "runs")
    yield pair_with_list(place)
    folder = start_waiting_run(place, "20270101T000000Z-sft-waiting")
    try:
        yield Pair(
            name="first line of attach",
            what="launch attach, 1 GiB of log / import typer, rich, yaml",
            rounds=5,
            launch=lambda: measure_first_line(folder),
            neighbour=ratio.time_command(IMPORTS),
        )
    finally:
        end_run(folder)


def start_waiting_run(place: Path, name: str) -> RunFolder:
    """A run that does nothing for a while, with a log of a gigabyte."""
    folder = RunFolder(place / "runs" / name)
    folder.path.mkdir(parents=True)
    files.write_json(folder.manifest, manifest())
    sleep = f"import time; time.sleep({WATCHED_S * 2})"
    attempt = Attempt(
        number=1,
        argv=(sys.executable, "-c", sleep),
        env={},
        environ=dict(os.environ),
        cwd=str(place),
        stage="sft",
        backend="trl",
        title="sft waiting",
    )
    attempt.write(folder)
    start.execute(folder)
    folder.probe.mkdir()
    steps = [{"event": "start", "attempt": 1}, {"event": "step", "step": 9, "loss": 1.0}]
    (folder.probe / "rank-0.jsonl").write_text("".join(map(rundir.render_json_line, steps)))
    block = (b"x" * 99 + b"\n") * 10_000
    with folder.console(1).open("ab") as log:
        for _ in range(LOG_BYTES // len(block)):
            log.write(block)
    return folder


def end_run(folder: RunFolder) -> None:
    """End the run, and wait until its supervisor has gone."""
    runner.end_orphans(folder, (0, 0, 0), 1)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if runner.read_processes(folder).supervisor is None:
            return
        time.sleep(0.05)


def measure_first_line(folder: RunFolder) -> float:
    """Seconds until `launch attach` shows something."""
    command = [*LAUNCH, "attach", str(folder.path)]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    line = process.stderr.readline()
    seconds = time.perf_counter() - begin
    process.kill()
    process.communicate()
    if b"step 9" not in line:
        raise SystemExit(f"attach said {line!r}")
    return seconds
