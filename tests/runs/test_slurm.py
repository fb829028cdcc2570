"""Runs as jobs of a real Slurm of two nodes, which the tests start where it is installed."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster
from conftest import PATIENCE_S
from fake_world import World, open_world
from real_training import CONFIGS, needs_packages, needs_trl
from saved import trl as save_checkpoint
from slurm_cluster import Cluster

from launcher.errors import NotReady
from launcher.lifecycle import background
from launcher.runs import rundir, slurm
from launcher.runs.rundir import RunFolder

SECRET = "hf_thisIsNoTokenButLooksLikeOne"
STAND_IN = Path(__file__).with_name("slurm_stand_in.py")

pytestmark = pytest.mark.skipif(
    slurm_cluster.missing() is not None, reason=f"no Slurm here: {slurm_cluster.missing()}"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster.started() as cluster:
        yield cluster
        assert slurm_cluster.left(cluster) == []


@pytest.fixture
def environ(cluster: Cluster) -> dict[str, str]:
    return {**os.environ, **cluster.environment, "HF_TOKEN": SECRET, "SBATCH_REQUEUE": "no"}


def until(condition: Callable[[], object], explain: Callable[[], object]) -> None:
    """Wait for something that comes soon; fail with the explanation if it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)


def job_of(folder: Path) -> str:
    job = slurm.find_job(RunFolder(folder))
    assert job is not None
    return job


def until_state(job: str, environ: dict[str, str], *states: str) -> None:
    def state() -> str | None:
        return (slurm.ask_job_states(environ) or {}).get(job)

    until(lambda: state() in states, state)


def start_again(cluster: Cluster, job: str) -> None:
    """Slurm lets a job rest for two minutes: start it as soon as nothing of it is left."""
    until(cluster.ready, cluster.logs)
    until(lambda: not slurm_cluster.left(cluster), cluster.logs)
    # the controller takes what the last process says a moment later, and for the new one's word
    time.sleep(2)
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")


# Jobs of a stand-in for `launch exec`


def submit(folder: Path, environ: dict[str, str], **options: str | None) -> str:
    folder.mkdir()
    words = [sys.executable, str(STAND_IN), "exec", str(folder)]
    text = slurm.render_batch_script(folder, words, nodes=2, gpus=0, options=options)
    return slurm.submit(RunFolder(folder), text, environ)


def reports(folder: Path) -> list[dict[str, Any]]:
    """What the stand-ins wrote, in the order of time."""
    path = folder / "reports.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def started_nodes(folder: Path) -> set[str]:
    nodes = set()
    for report in reports(folder):
        if report["argv"] == ["exec", str(folder)]:
            nodes.add(report["node"])
    return nodes


def until_started(folder: Path) -> None:
    until(lambda: started_nodes(folder) == {"0", "1"}, lambda: reports(folder))


def stops(folder: Path) -> list[int]:
    return [report["stopped"] for report in reports(folder) if "stopped" in report]


@pytest.mark.slow
def test_the_same_command_on_each_node_whatever_the_folder(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    folder = tmp_path / "two words $(touch pwned) `touch pwned`; 'a' \"b\" 100 %j\n#SBATCH --hold"
    job = submit(folder, environ, comment='it\'s "a" $(touch pwned) \\ # b')
    assert job_of(folder) == job
    (folder / "go").touch()
    until_state(job, environ, "COMPLETED")

    first, *others = reports(folder)
    assert first["argv"] == ["exec", str(folder), "--prepare"]
    assert len(others) == 2
    assert started_nodes(folder) == {"0", "1"}
    # nothing of who submitted it but what finds Slurm
    assert "HF_TOKEN" not in others[0]["variables"]
    assert "started on 0" in (folder / "slurm.log").read_text()
    assert SECRET not in (folder / "slurm.sh").read_text()
    assert not list(tmp_path.rglob("pwned"))


def test_a_cancelled_job_may_record_how_it_ended(
    tmp_path: Path, environ: dict[str, str], cluster: Cluster
) -> None:
    folder = tmp_path / "run"
    job = submit(folder, environ)
    until_started(folder)
    until_state(job, environ, "RUNNING")

    slurm.cancel(job, environ)
    until_state(job, environ, "CANCELLED")

    assert stops(folder) == [15, 15]
    assert slurm_cluster.left(cluster) == []
    assert slurm.run_state("CANCELLED") is None
    # once more is no mistake
    slurm.cancel(job, environ)


@pytest.mark.parametrize("saves", [True, False])
def test_a_job_whose_time_is_up_saves_and_goes_back_into_the_queue(
    saves: bool, tmp_path: Path, environ: dict[str, str], cluster: Cluster
) -> None:
    folder = tmp_path / "run"
    job = submit(folder, environ)
    until_started(folder)
    if not saves:
        (folder / "deaf").touch()

    # what Slurm sends to the batch script alone when the time is almost up
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    until_state(job, environ, "PENDING")

    requests = [report for report in reports(folder) if "--save" in report["argv"]]
    assert len(requests) == 1
    # Slurm itself has to stop what does not save
    assert bool(stops(folder)) == (not saves)
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

    folder = Path(started.folder)
    job = job_of(folder)
    assert job == started.job
    until_state(job, environ, "COMPLETED")
    assert "no runs yet" in Path(started.log).read_text()
    assert folder.parent == tmp_path / "here" / "commands"
    assert SECRET not in (folder / "slurm.sh").read_text()


def test_a_refusal_of_sbatch_is_an_error(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "run"
    with pytest.raises(NotReady, match=r"nowhere|partition"):
        submit(folder, environ, partition="nowhere")
    assert slurm.find_job(RunFolder(folder)) is None


def test_a_controller_that_does_not_answer(
    tmp_path: Path, environ: dict[str, str], cluster: Cluster
) -> None:
    port = slurm_cluster.free_ports(1)[0]
    text = cluster.conf.read_text().replace("SlurmctldPort=", f"SlurmctldPort={port}\n#")
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"{text}MessageTimeout=1\n")
    lost = {**environ, "SLURM_CONF": str(conf)}

    assert slurm.ask_job_states(lost) is None
    with pytest.raises(NotReady):
        submit(tmp_path / "run", lost)


def test_a_machine_without_slurm(tmp_path: Path, environ: dict[str, str]) -> None:
    without = {**environ, "PATH": str(tmp_path)}
    assert slurm.ask_job_states(without) is None
    with pytest.raises(NotReady, match="not installed"):
        submit(tmp_path / "other", without)


# Runs with a trainer of no brains


@pytest.fixture
def world(tmp_path: Path, cluster: Cluster) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        world.environ.update(cluster.environment)
        yield world


def queue_fake_run(world: World, *steps: str) -> Path:
    """A run of two nodes, once both have begun."""
    config = world.config(save_strategy="steps", save_steps=2, max_steps=4)
    words = ("batch.global=4", "--nodes", "2", "--slurm")
    done = world.trained(str(config), *words, steps=steps)
    assert done.returncode == 0, done.stderr
    (folder,) = world.runs.glob("*-sft-*")
    until_both_begin(folder, 1)
    return folder


def until_both_begin(folder: Path, attempt: int) -> None:
    run = RunFolder(folder)
    for node in (run, RunFolder(folder / "node1")):
        until(
            lambda node=node: rundir.read_json(node.process).get("attempt") == attempt,
            lambda: (folder / "slurm.log").read_text(),
        )


def until_run_state(world: World, folder: Path, state: str) -> None:
    """A supervisor may end a moment after its job: Slurm does not wait for it."""

    def read_state() -> str:
        (row,) = json.loads(world.launch("runs", "--format", "json").stdout)["data"]
        return str(row["state"])

    log = folder / "slurm.log"
    until(lambda: read_state() == state, lambda: (read_state(), log.read_text()))


@pytest.mark.slow
@needs_trl
def test_a_stopped_job_leaves_no_process(
    world: World, environ: dict[str, str], cluster: Cluster
) -> None:
    # as a trainer with the probe does, it leaves the signal of Slurm to its supervisor
    folder = queue_fake_run(world, "ignore=TERM", "sleep=600")

    assert world.launch("stop", folder.name).returncode == 0

    until_state(job_of(folder), environ, "CANCELLED")
    until_run_state(world, folder, "stopped")
    until(lambda: not slurm_cluster.left(cluster), lambda: slurm_cluster.left(cluster))


@pytest.mark.slow
@needs_trl
def test_a_job_that_is_queued_again_resumes(
    world: World, environ: dict[str, str], cluster: Cluster
) -> None:
    go = world.root / "go"
    folder = queue_fake_run(world, f"wait={go}")
    job = job_of(folder)
    until_run_state(world, folder, "running")
    checkpoint = save_checkpoint(world.root / "out", 2, ranks=2)

    cluster.call("scontrol", "requeue", job)
    until_state(job, environ, "PENDING")
    until_run_state(world, folder, "queued")
    start_again(cluster, job)
    until_both_begin(folder, 2)
    go.touch()
    until_state(job, environ, "COMPLETED", "FAILED")

    argv = json.loads((world.root / "argv.json").read_text())
    assert str(checkpoint) in argv
    for node in (folder, folder / "node1"):
        assert (node / "console.2.log").exists()
        assert (node / "start.json").stat().st_mode & 0o077 == 0


# Real trainings


@pytest.fixture
def place(tmp_path: Path, demo_assets: Path) -> Path:
    """A folder with the assets of the demo, of which each node of each attempt reads few rows."""
    demo = tmp_path / "build" / "demo"
    shutil.copytree(demo_assets, demo)
    rows = demo / "data" / "sft" / "train.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:100]))
    return tmp_path


def recorded_steps(run: Path) -> int:
    path = run / "probe" / "rank-0.jsonl"
    if not path.exists():
        return 0
    return path.read_bytes().count(b'"event": "step"')


@pytest.mark.slow
@pytest.mark.training
@needs_packages
def test_two_nodes_whose_time_is_up_save_and_continue_by_themselves(
    place: Path, environ: dict[str, str], cluster: Cluster
) -> None:
    environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(place / "hf"),
        "OMP_NUM_THREADS": "1",
    }
    overrides = (
        "batch.global=8", "batch.per_device=4", "logging_steps=1", "expect.trend=any",
        "output_dir=build/demo/out", "max_steps=40", "learning_rate=1e-3",
    )  # fmt: skip
    words = ("sft", str(CONFIGS / "sft.yaml"), *overrides, "--gpus", "0", "--nodes", "2", "--slurm")
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *words, "--format", "json"],
        cwd=place,
        env=environ,
        capture_output=True,
        text=True,
    )
    run = Path(json.loads(done.stdout)["data"]["run"])
    log = run / "slurm.log"
    job = job_of(run)
    until(lambda: recorded_steps(run) > 2, lambda: log.read_text() + cluster.logs())

    # it saves no other checkpoint
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    until_state(job, environ, "PENDING")
    for node in (run, run / "node1"):
        until((node / "exit.json").exists, log.read_text)
        assert rundir.read_json(node / "exit.json")["preempted"] is True
    start_again(cluster, job)
    until_state(job, environ, "COMPLETED", "FAILED")
    until((run / "verdict.json").exists, log.read_text)

    assert rundir.read_json(run / "verdict.json")["status"] == "pass", log.read_text()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 41))
    records = {path.name for path in (run / "probe").glob("*.jsonl")}
    assert records == {"rank-0.jsonl", "rank-1.jsonl"}
    for path in (run / "slurm.sh", log, run / "run.json", *run.glob("console*.log")):
        assert SECRET not in path.read_text(errors="replace"), path
