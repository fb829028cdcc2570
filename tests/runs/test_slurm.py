"""Runs as jobs of a real Slurm of two nodes, which the tests start themselves where it is installed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster
from conftest import PATIENCE_S
from real_training import CONFIGS, needs_packages
from slurm_cluster import Cluster

from launcher.errors import NotReady
from launcher.lifecycle import background
from launcher.runs import rundir, slurm
from launcher.runs.rundir import RunFolder

SECRET = "hf_thisIsNoTokenButLooksLikeOne"
# What stands for `launch exec` where no training is needed: writes down who was started how, and waits.
STAND_IN = """\
import json, os, signal, sys, time
told = {"node": os.environ.get("SLURM_NODEID"), "argv": sys.argv[1:],
        "restart": os.environ.get("SLURM_RESTART_COUNT"), "names": sorted(os.environ)}
folder = sys.argv[2]
def stop(number, frame):
    time.sleep(0.5)
    told["stopped"] = number
    write()
    os._exit(3)
def write():
    with open(os.path.join(folder, "told.jsonl"), "a") as stream:
        stream.write(json.dumps(told) + "\\n")
signal.signal(signal.SIGTERM, stop)
write()
print("said on", told["node"], flush=True)
if "--save" in sys.argv:
    if os.path.exists(os.path.join(folder, "deaf")):
        sys.exit(4)
    open(os.path.join(folder, "save"), "w").close()
while not {"--prepare", "--save"} & set(sys.argv) and not os.path.exists(os.path.join(folder, "go")):
    if os.path.exists(os.path.join(folder, "save")):
        sys.exit(130)
    time.sleep(0.05)
"""

pytestmark = pytest.mark.skipif(
    slurm_cluster.missing() is not None, reason=f"no Slurm here: {slurm_cluster.missing()}"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster.started() as made:
        yield made
        assert slurm_cluster.left(made) == []


@pytest.fixture
def environ(cluster: Cluster) -> dict[str, str]:
    return {**os.environ, **cluster.environment, "HF_TOKEN": SECRET, "SBATCH_REQUEUE": "no"}


@pytest.fixture
def stand_in(tmp_path: Path) -> list[str]:
    path = tmp_path / "stand in.py"
    path.write_text(STAND_IN)
    return [sys.executable, str(path)]


def until(true: Callable[[], bool], told: Callable[[], object]) -> None:
    """Wait for something that comes soon; `told` is said where it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)


def until_state(job: str, environ: dict[str, str], *wanted: str) -> None:
    def state() -> str | None:
        return (slurm.job_states(environ) or {}).get(job)

    until(lambda: state() in wanted, state)


def submitted(
    folder: Path, launch: list[str], environ: dict[str, str], **options: str | None
) -> str:
    folder.mkdir()
    text = slurm.batch_script(
        folder, [*launch, "exec", str(folder)], nodes=2, gpus=0, options=options
    )
    return slurm.submit(RunFolder(folder), text, environ)


def told(folder: Path) -> list[dict[str, Any]]:
    path = folder / "told.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def nodes_up(folder: Path, times: int = 1) -> Callable[[], bool]:
    started = ["exec", str(folder)]
    return lambda: (
        sum(one["argv"] == started and "stopped" not in one for one in told(folder)) >= 2 * times
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["two words $(touch pwned) `touch pwned`; 'a' \"b\" 100 %j", "new\nline\n#SBATCH --hold"],
)
def test_the_same_command_on_each_node_whatever_the_folder(
    name: str, tmp_path: Path, environ: dict[str, str], stand_in: list[str]
) -> None:
    folder = tmp_path / name
    job = submitted(folder, stand_in, environ, comment='it\'s "a" $(touch pwned) \\ # b')
    assert slurm.job_of(RunFolder(folder)) == job
    (folder / "go").touch()
    until_state(job, environ, "COMPLETED")
    first, *others = told(folder)
    assert first["argv"] == ["exec", str(folder), "--prepare"]
    assert [one["argv"] for one in others] == [["exec", str(folder)]] * 2
    assert {one["node"] for one in others} == {"0", "1"}
    # nothing of whoever submitted it but what finds Slurm; tokens above all
    assert "HF_TOKEN" not in others[0]["names"]
    assert "said on 0" in (folder / "slurm.log").read_text()
    assert SECRET not in (folder / "slurm.sh").read_text()
    assert not list(tmp_path.rglob("pwned"))


def test_a_cancelled_job_may_write_down_how_it_ended(
    tmp_path: Path, environ: dict[str, str], stand_in: list[str], cluster: Cluster
) -> None:
    folder = tmp_path / "run"
    job = submitted(folder, stand_in, environ)
    until(nodes_up(folder), lambda: told(folder))
    assert (slurm.job_states(environ) or {})[job] == "RUNNING"
    slurm.cancel(job, environ)
    until_state(job, environ, "CANCELLED")
    assert [one["stopped"] for one in told(folder) if "stopped" in one] == [15, 15]
    assert slurm_cluster.left(cluster) == []
    assert slurm.run_state("CANCELLED") is None
    # once more is no mistake
    slurm.cancel(job, environ)


@pytest.mark.parametrize("saves", [True, False])
def test_a_job_whose_time_is_up_saves_and_goes_back_into_the_queue(
    saves: bool, tmp_path: Path, environ: dict[str, str], stand_in: list[str], cluster: Cluster
) -> None:
    folder = tmp_path / "run"
    job = submitted(folder, stand_in, environ)
    until(nodes_up(folder), lambda: told(folder))
    if not saves:
        (folder / "deaf").touch()
    # what Slurm sends to the batch script alone when the time is almost up
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    until_state(job, environ, "PENDING")
    assert len([one for one in told(folder) if "--save" in one["argv"]]) == 1
    # Slurm itself has to stop what does not save
    assert any("stopped" in one for one in told(folder)) == (not saves)
    assert slurm.take_limit_mark(RunFolder(folder))
    assert not slurm.take_limit_mark(RunFolder(folder))
    slurm.cancel(job, environ)
    until_state(job, environ, "CANCELLED")


@pytest.mark.slow
def test_a_command_runs_where_and_as_it_was_queued(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {**environ, "LAUNCH_RUNS": "here"}.items():
        monkeypatch.setenv(name, value)
    started = background.queue("bench", "a b", ["runs", "--slurm"], gpus=0, options={})
    job = slurm.job_of(RunFolder(Path(started.folder)))
    assert job is not None and job == started.job
    until_state(job, environ, "COMPLETED")
    assert "no runs yet" in Path(started.log).read_text()
    assert Path(started.folder).parent == tmp_path / "here" / "commands"
    assert SECRET not in (Path(started.folder) / "slurm.sh").read_text()


def again(cluster: Cluster, job: str) -> None:
    """Slurm lets a job rest for two minutes: start it again as soon as nothing of it is left."""
    until(cluster.ready, cluster.logs)
    until(lambda: not steps_of(job), cluster.logs)
    # the controller takes what the last of them says a moment later, and for the new one's word
    time.sleep(2)
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")


def steps_of(job: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if (entry / "cmdline").read_bytes().startswith(f"slurmstepd: [{job}.".encode()):
                    found.append(int(entry.name))
    return found


def test_what_sbatch_refuses_is_said(
    tmp_path: Path, environ: dict[str, str], stand_in: list[str]
) -> None:
    with pytest.raises(NotReady) as error:
        submitted(tmp_path / "run", stand_in, environ, partition="nowhere")
    message = error.value.findings[0].message
    assert "nowhere" in message or "partition" in message
    assert slurm.job_of(RunFolder(tmp_path / "run")) is None


def test_without_an_answer_nothing_is_said(
    tmp_path: Path, environ: dict[str, str], stand_in: list[str], cluster: Cluster
) -> None:
    nowhere = tmp_path / "slurm.conf"
    port = slurm_cluster.free_ports(1)[0]
    text = cluster.conf.read_text().replace("SlurmctldPort=", f"SlurmctldPort={port}\n#")
    nowhere.write_text(text + "MessageTimeout=2\n")
    lost = {**environ, "SLURM_CONF": str(nowhere)}
    assert slurm.job_states(lost) is None
    with pytest.raises(NotReady):
        submitted(tmp_path / "run", stand_in, lost)
    # where there is no Slurm at all
    assert slurm.job_states({"PATH": str(tmp_path)}) is None
    with pytest.raises(NotReady) as error:
        submitted(tmp_path / "other", stand_in, {**environ, "PATH": str(tmp_path)})
    assert "not installed" in error.value.findings[0].message


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, demo_assets: Path) -> Path:
    folder = tmp_path_factory.mktemp("slurm")
    shutil.copytree(demo_assets, folder / "build" / "demo")
    # each node of each attempt reads them anew
    rows = folder / "build" / "demo" / "data" / "sft" / "train.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:100]))
    return folder


@pytest.fixture
def launch(place: Path, cluster: Cluster) -> Callable[..., dict[str, Any]]:
    environment = {
        **os.environ, **cluster.environment, "LAUNCH_RUNS": str(place / "runs"),
        "XDG_STATE_HOME": str(place / "state"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(place / "hf"),
        "OMP_NUM_THREADS": "1", "HF_TOKEN": SECRET,
    }  # fmt: skip

    def answered(*words: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "launcher", *words, "--format", "json"],
            cwd=place, env=environment, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.stdout, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return answered


def queued(launch: Callable[..., dict[str, Any]], name: str, *words: str) -> Path:
    answer = launch(
        "sft", str(CONFIGS / "sft.yaml"), "batch.global=8", "batch.per_device=4", "logging_steps=1",
        "expect.trend=any", f"output_dir=build/demo/{name}", *words, "--gpus", "0", "--nodes", "2", "--slurm",
    )  # fmt: skip
    assert answer["ok"], answer
    return Path(answer["data"]["run"])


def state(launch: Callable[..., dict[str, Any]], run: Path) -> str:
    rows = launch("runs")["data"]
    return next(str(row["state"]) for row in rows if row["path"] == str(run))


def until_word(launch: Callable[..., dict[str, Any]], run: Path, wanted: str) -> None:
    """Slurm does not wait for what left its job's process tree: keepers end a moment after the job."""
    until(
        lambda: state(launch, run) == wanted,
        lambda: (state(launch, run), (run / "slurm.log").read_text()),
    )


@contextlib.contextmanager
def standing_still(cluster: Cluster) -> Iterator[None]:
    trainers = [
        pid
        for pid in slurm_cluster.left(cluster)
        if b"probe/run.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    for pid in trainers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in trainers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def steps(run: Path) -> int:
    path = run / "probe" / "rank-0.jsonl"
    return path.read_bytes().count(b'"event": "step"') if path.exists() else 0


@pytest.mark.slow
@pytest.mark.training
@needs_packages
def test_two_nodes_train_are_queued_again_and_finish(
    launch: Callable[..., dict[str, Any]], environ: dict[str, str], cluster: Cluster
) -> None:
    run = queued(
        launch, "again", "max_steps=10", "save_strategy=steps", "save_steps=2", "learning_rate=1e-3"
    )
    job = slurm.job_of(RunFolder(run))
    assert job is not None
    until(lambda: steps(run) > 2, lambda: (run / "slurm.log").read_text() + cluster.logs())
    # its ten steps may be over before the question is answered
    with standing_still(cluster):
        assert state(launch, run) == "running"
        cluster.call("scontrol", "requeue", job)
    until_state(job, environ, "PENDING")
    until_word(launch, run, "queued")
    again(cluster, job)
    until_state(job, environ, "COMPLETED", "FAILED")
    until_word(launch, run, "finished")
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["status"] == "pass", (run / "slurm.log").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11))
    # both ranks counted, each node with its own log of each attempt
    records = {path.name for path in (run / "probe").glob("*.jsonl")}
    assert records == {"rank-0.jsonl", "rank-1.jsonl"}
    for node in (run, run / "node1"):
        assert {path.name for path in node.glob("console*")} == {"console.log", "console.2.log"}
    for path in [*run.glob("*.sh"), *run.glob("*.log"), run / "run.json"]:
        assert SECRET not in path.read_text(errors="replace"), path
    assert (run / "start.json").stat().st_mode & 0o077 == 0
    assert (run / "node1" / "start.json").stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.training
@needs_packages
def test_two_nodes_whose_time_is_up_save_and_continue_by_themselves(
    launch: Callable[..., dict[str, Any]], environ: dict[str, str], cluster: Cluster
) -> None:
    # it saves no other checkpoint
    run = queued(launch, "warned", "max_steps=40", "learning_rate=1e-3")
    job = slurm.job_of(RunFolder(run))
    assert job is not None
    until(lambda: steps(run) > 2, lambda: (run / "slurm.log").read_text() + cluster.logs())
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    until_state(job, environ, "PENDING")
    until_word(launch, run, "queued")
    assert [one["preempted"] for one in map(rundir.read_json, run.glob("**/exit.json"))] == [
        True,
        True,
    ]
    again(cluster, job)
    until_state(job, environ, "COMPLETED", "FAILED")
    until_word(launch, run, "finished")
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["status"] == "pass", (run / "slurm.log").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.training
@needs_packages
def test_a_stopped_job_leaves_no_process(
    launch: Callable[..., dict[str, Any]], environ: dict[str, str], cluster: Cluster
) -> None:
    run = queued(launch, "stopped", "max_steps=100000")
    until(lambda: steps(run) > 0, lambda: (run / "slurm.log").read_text() + cluster.logs())
    assert launch("stop", str(run))["ok"]
    job = slurm.job_of(RunFolder(run))
    assert job is not None
    until_state(job, environ, "CANCELLED")
    until_word(launch, run, "stopped")
    until(lambda: not slurm_cluster.left(cluster), lambda: slurm_cluster.left(cluster))
