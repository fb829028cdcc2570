"""Who trains into an output folder: refused, taken over, fenced off, out of sight; with real processes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import saved
from conftest import PATIENCE_S
from fake_world import LAUNCH, World, looks_on, made, needs_trl, until

from launcher.errors import NotReady
from launcher.machine import process
from launcher.probe.watching import watchdog
from launcher.runs import attempt, lease, rundir
from launcher.runs.rundir import RunFolder

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with made(tmp_path / "world") as world:
        yield world


@pytest.fixture
def container() -> tuple[str, ...]:
    if (
        shutil.which("unshare") is None
        or subprocess.run([*NAMESPACE, "true"], check=False).returncode
    ):
        pytest.skip("no PID namespace can be made here")
    return NAMESPACE


def output(world: World) -> Path:
    return world.root / "out"


def training(world: World, *steps: str, **changes: Any) -> RunFolder:
    folder = world.prepared(*steps, "pid=leader", "sleep=600", output=str(output(world)), **changes)
    world.started("exec", str(folder.path))
    world.pid("leader")
    until(folder.process.exists)
    return folder


def inside(container: tuple[str, ...], world: World, *words: str, **env: str) -> Any:
    return subprocess.run(
        [*container, *LAUNCH, *words], env={**world.environ, **env}, cwd=world.root, text=True,
        capture_output=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def silence(world: World, seconds: float) -> None:
    last = lease.newest_lease(output(world))
    assert last is not None
    os.utime(last.path, (time.time() - seconds,) * 2)


def state(done: subprocess.CompletedProcess[str]) -> str:
    (row,) = json.loads(done.stdout)["data"]
    return str(row["state"])


def owned(place: Path, **changes: Any) -> lease.Lease:
    """A lease of a process that has gone, with another owner where `changes` say so."""
    gone = subprocess.Popen(["true"])
    owner = process.identify(gone.pid)
    gone.wait()
    granted = lease.acquire(place, place / "run")
    granted = replace(granted, owner=replace(owner, began=1, **changes))
    granted.write()
    return granted


@pytest.mark.parametrize(
    ("owner", "seconds", "free"),
    [
        ({}, 0, True),
        ({"namespace": 1}, 0, False),
        ({"namespace": 1}, lease.SILENT_S - 5, False),
        ({"host": "another"}, lease.SILENT_S + 5, True),
        # the clock was set back since
        ({"host": "another"}, -3600, True),
        # this machine was started anew: only a heartbeat could tell of another of its name
        ({"boot": "before"}, 4 * lease.BEAT_S, True),
    ],
)
def test_a_lease_is_taken_over_once_its_owner_is_gone(
    tmp_path: Path, owner: dict[str, Any], seconds: float, free: bool
) -> None:
    granted = owned(tmp_path, **owner)
    os.utime(granted.path, (time.time() - seconds,) * 2)
    if free:
        assert lease.acquire(tmp_path, tmp_path / "next").fence == granted.fence + 1 == 2
    else:
        with pytest.raises(NotReady, match=r"last heartbeat \d+s ago") as caught:
            lease.acquire(tmp_path, tmp_path / "next")
        told = caught.value.findings[0]
        assert told.code == "run-is-live"
        assert f"pid {granted.owner.pid}" in told.message if granted.owner else False


def test_a_job_that_comes_back_elsewhere_outlasts_its_last_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = owned(tmp_path, host="another")
    lease.wait_for_expiry(tmp_path, tmp_path / "another run")
    with pytest.raises(NotReady):
        lease.require_free(tmp_path)
    monkeypatch.setattr(lease, "SILENT_S", 2.0)
    lease.wait_for_expiry(tmp_path, Path(granted.run))
    lease.require_free(tmp_path)


@pytest.mark.parametrize("text", ['{"owner": 3, "state"', None])
def test_a_lease_that_cannot_be_read_has_an_unknown_owner(tmp_path: Path, text: str | None) -> None:
    granted = owned(tmp_path)
    if text is None:
        granted.path.unlink()
        os.mkfifo(granted.path)
    else:
        granted.path.write_text(text)
    with pytest.raises(NotReady, match="an unknown host"):
        lease.acquire(tmp_path, tmp_path / "next")
    os.utime(granted.path, (0, 0))
    assert lease.acquire(tmp_path, tmp_path / "next").fence == 2


def test_of_many_starts_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from launcher.runs import lease\n"
        "from launcher.errors import NotReady\n"
        "sys.stdin.readline()\n"
        "try: print(lease.acquire(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])).fence, flush=True)\n"
        "except NotReady: print('refused', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), f"run-{n}"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, bufsize=1,
        )
        for n in range(6)
    ]  # fmt: skip
    for one in starts:
        assert one.stdin is not None
        one.stdin.write("go\n")
    told = [one.stdout.readline().strip() for one in starts if one.stdout is not None]
    for one in starts:
        one.communicate("over\n")
    assert sorted(told) == ["1", *["refused"] * 5]


def test_a_start_that_fails_leaves_no_lease(world: World) -> None:
    folder = world.prepared(argv=("/no/such/python",), output=str(output(world)))
    assert world.launch("exec", str(folder.path)).returncode == 5
    assert not any(output(world).iterdir())


def test_a_heartbeat_costs_next_to_nothing_and_outlives_a_tidied_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    granted = lease.acquire(tmp_path, tmp_path / "run")
    lease.keep_manifest(granted, {"stage": "sft"})
    with lease.heartbeat(granted, lambda _: None) as end:
        before = granted.path.stat().st_mtime_ns
        until(lambda: granted.path.stat().st_mtime_ns > before)
        (tmp_path / ".cache").rename(tmp_path / "tidied")
        until(lambda: lease.read_manifests(tmp_path) == [{"stage": "sft"}])
        used = time.thread_time()
        end("finished", 0)
        assert time.thread_time() - used < 0.1
    last = lease.newest_lease(tmp_path)
    assert last is not None and (last.state, last.code) == ("finished", 0)
    lease.require_free(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["runs", "gone", "namespace"])
def test_a_second_start_into_the_same_output_is_refused(
    world: World, where: str, container: tuple[str, ...]
) -> None:
    folder = training(world)
    second = world.prepared("exit=0", name="second", output=str(output(world)))
    env = {"XDG_STATE_HOME": str(world.root / "other state")}
    if where == "runs":
        shutil.move(second.path, world.root / "other runs" / "second")
        second = RunFolder(world.root / "other runs" / "second")
        env["LAUNCH_RUNS"] = str(world.root / "other runs")
    elif where == "gone":
        shutil.rmtree(folder.path)
    prefix = container if where == "namespace" else ()
    done = inside(prefix, world, "exec", str(second.path), "--format", "json", **env)
    (told,) = json.loads(done.stdout)["findings"]
    assert (done.returncode, told["code"]) == (5, "run-is-live"), done.stderr
    owner = lease.newest_lease(output(world)).owner  # type: ignore[union-attr]
    assert owner is not None
    for part in (folder.path.name, owner.host, f"pid {owner.pid}", "last heartbeat"):
        assert part in told["message"]
    assert world.pid("leader") in world.left() and second.attempts() == 0
    if where == "gone":
        assert f"kill {owner.pid}" in told["help"]


def test_an_orphan_keeps_its_output_folder(world: World) -> None:
    folder = training(world)
    os.kill(rundir.read_json(folder.process)["keeper"]["pid"], signal.SIGKILL)
    shutil.rmtree(folder.path)
    silence(world, 2 * lease.SILENT_S)
    second = world.prepared("exit=0", name="second", output=str(output(world)))
    done = world.launch("exec", str(second.path))
    assert done.returncode == 5 and "its training continues" in done.stderr


def test_the_probe_keeps_the_heartbeat_of_a_run_without_a_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = lease.acquire(tmp_path, tmp_path / "run")
    os.utime(granted.path, (0, 0))
    monkeypatch.setenv(attempt.LEASE, str(granted.path))
    stacks = str(tmp_path / "rank-0.stacks.txt")
    record = SimpleNamespace(quietly=lambda _: contextlib.nullcontext(), stacks=stacks)
    settings = SimpleNamespace(hang_seconds=0.04, hang_factor=1)
    process = SimpleNamespace(rank=0, settings=settings, record=record)
    watchdog.Watchdog(process, lambda: None).start()  # type: ignore[arg-type]
    until(lambda: granted.path.stat().st_mtime > 0)


@pytest.mark.slow
def test_who_was_overtaken_stops_its_training_and_says_so(world: World) -> None:
    folder = training(world)
    last = lease.newest_lease(output(world))
    assert last is not None and last.owner is not None
    other = replace(last.owner, host="another", pid=77)
    place = last.path.with_name(f"lease-{last.fence + 1}.json")
    replace(last, path=place, owner=other, run="/runs/other").write()
    assert world.quiet()
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT
    said = "was taken over by the run /runs/other (started on"
    assert said in folder.console(1).read_text() and said in folder.supervisor_log.read_text()
    now = lease.newest_lease(output(world))
    assert now is not None and (now.run, now.fence) == ("/runs/other", 2)


def test_a_run_of_another_namespace_is_seen_running_and_can_be_stopped(
    world: World, container: tuple[str, ...]
) -> None:
    folder = training(world)
    assert state(inside(container, world, "runs", "--format", "json")) == "running"
    looking = subprocess.Popen(
        [*container, *LAUNCH, "attach", "a run"], env=world.environ, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, bufsize=0,
    )  # fmt: skip
    looks_on(looking)
    done = inside(container, world, "stop", "a run", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT
    looking.communicate(timeout=PATIENCE_S)
    assert state(inside(container, world, "runs", "--format", "json")) == "stopped"


@pytest.mark.slow
def test_nothing_is_concluded_of_a_run_that_cannot_be_seen(
    world: World, container: tuple[str, ...]
) -> None:
    told = world.root / "told"
    folder = world.prepared(
        "pid=leader", "step=3", "sleep=600", output=str(output(world)),
        on_finish=(sys.executable, "-c", f"open({str(told)!r}, 'a').write('x')"),
    )  # fmt: skip
    pod = subprocess.Popen(
        [*container, *LAUNCH, "exec", str(folder.path)], env=world.environ, cwd=world.root,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    world.pid("leader")
    until(folder.process.exists)
    assert state(world.launch("runs", "--format", "json")) == "running"
    # with its first process a namespace ends
    children = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    pod.wait()
    silence(world, 0)
    assert state(world.launch("runs", "--format", "json")) == "running", "it beat a moment ago"
    silence(world, 2 * lease.SILENT_S)
    assert state(world.launch("runs", "--format", "json")) == "unknown"
    assert "unknown here" in world.launch("runs").stdout
    for words in (("attach", "a run"), ("stop", "a run")):
        done = world.launch(*words)
        assert done.returncode == 5 and "unknown here" in done.stderr, done.stderr
        assert "PID namespace" in done.stderr
    checked = json.loads(world.launch("check", "a run", "--format", "json").stdout)["data"]
    (finish,) = (one for one in checked["points"] if one["name"] == "finish")
    assert (finish["state"], checked["status"]) == ("unknown", "unproven")
    assert not folder.concluded(1).exists() and not folder.exit(1).exists() and not told.exists()


@pytest.mark.slow
@needs_trl
@pytest.mark.parametrize("lost", ["folder", "record"])
def test_the_same_command_resumes_without_its_run_folder(world: World, lost: str) -> None:
    config = world.config(save_steps=2, max_steps=10, save_total_limit=2, learning_rate=0.005)
    first = world.trained(str(config), "--detach", steps=("pid=leader", "sleep=600"))
    assert first.returncode == 0, first.stderr
    world.pid("leader")
    (run,) = world.runs.iterdir()
    assert world.launch("stop", run.name).returncode == 0
    saved.trl(output(world), 2)
    saved.trl(output(world), 4)
    if lost == "folder":
        shutil.rmtree(run)
    else:
        (run / "run.json").write_text("")
    world.trained(str(config), "learning_rate=0.004", steps=("exit=0",))
    newest = max(world.runs.iterdir())
    told = rundir.read_manifest(RunFolder(newest))
    assert (told["resume"]["kind"], told["resume"]["step"]) == ("resume", 4)
    assert str(output(world) / "checkpoint-4") in told["argv"]
    # what trained, not what was asked for
    assert told["args"]["learning_rate"]["value"] == 0.005
    assert told["argv"][told["argv"].index("--learning_rate") + 1] == "0.005"
    # and with nothing left that tells whose they are, they are not trained over
    shutil.rmtree(world.runs)
    shutil.rmtree(output(world) / ".cache")
    refused = world.trained(str(config), steps=("exit=0",))
    assert refused.returncode == 3 and "error[not-resumed]" in refused.stderr, refused.stderr
    assert (output(world) / "checkpoint-4").is_dir()
