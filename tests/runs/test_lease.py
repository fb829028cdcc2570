"""Who may train into an output folder: refused, taken over, fenced off, out of sight.

With real processes, some of them in a PID namespace of their own, as in a container.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import saved
from conftest import PATIENCE_S
from fake_world import LAUNCH, World, kill, needs_trl, open_world, wait_until, wait_until_shown

from launcher.cli import main
from launcher.errors import NotReady
from launcher.lifecycle import start
from launcher.machine import process
from launcher.probe.watching import watchdog
from launcher.runs import attempt, lease, rundir
from launcher.runs.lease import Lease
from launcher.runs.rundir import RunFolder

Capture = pytest.CaptureFixture[str]

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")
ACQUIRE = Path(__file__).with_name("acquire_lease.py")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        world.enter(monkeypatch)
        yield world


def launch(*words: str) -> int:
    """Run a command in this process; its exit code."""
    return main.main(list(words))


@pytest.fixture
def container() -> tuple[str, ...]:
    """The words before a command that run it in a PID namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    if subprocess.run([*NAMESPACE, "true"]).returncode:
        pytest.skip("no PID namespace can be made here")
    return NAMESPACE


def output_of(world: World) -> Path:
    return world.root / "out"


def start_training(world: World, **changes: object) -> RunFolder:
    output = str(output_of(world))
    folder = world.prepared("pid=leader", "sleep=600", output=output, **changes)
    start.execute(folder)
    world.pid("leader")
    return folder


def second_run(world: World) -> RunFolder:
    return world.prepared("exit=0", name="second", output=str(output_of(world)))


def start_inside(container: tuple[str, ...], world: World, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*container, *LAUNCH, *words],
        env=world.environ,
        cwd=world.root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )


def run_inside(container: tuple[str, ...], world: World, *words: str) -> tuple[int, bytes]:
    """The exit code of a command and what it printed."""
    running = start_inside(container, world, *words)
    printed, _ = running.communicate(timeout=PATIENCE_S)
    return running.returncode, printed


def state_in(answer: str | bytes) -> str:
    """The state of the only run in an answer of `launch runs`."""
    (row,) = json.loads(answer)["data"]
    return str(row["state"])


def data_of(capsys: Capture, *words: str) -> Any:
    """The data of a command's JSON answer."""
    capsys.readouterr()
    launch(*words, "--format", "json")
    return json.loads(capsys.readouterr().out)["data"]


def state_here(capsys: Capture) -> str:
    (row,) = data_of(capsys, "runs")
    return str(row["state"])


def newest_lease(output: Path) -> Lease:
    newest = lease.find_newest_lease(output)
    assert newest is not None
    return newest


def set_last_beat(held: Lease, seconds_ago: float) -> None:
    beat = time.time() - seconds_ago
    os.utime(held.path, (beat, beat))


def lease_of_ended_process(output: Path, **owner: object) -> Lease:
    """A lease whose process has gone; `owner` says what else is unlike this process."""
    ended = subprocess.Popen(["true"])
    identity = process.identify(ended.pid)
    ended.wait()
    held = lease.acquire(output, output / "run")
    held = replace(held, owner=replace(identity, began=1, **owner))
    held.write()
    return held


@pytest.mark.parametrize(
    ("owner", "seconds_ago"),
    [
        pytest.param({}, 0, id="ended on this machine"),
        pytest.param({"host": "another"}, lease.SILENT_S + 5, id="silent on another machine"),
        pytest.param({"host": "another"}, -3600, id="the clock was set back"),
        # only a heartbeat could tell of another machine of this name
        pytest.param({"boot": "before"}, 4 * lease.BEAT_S, id="this machine has rebooted"),
    ],
)
def test_a_lease_is_taken_over_once_its_owner_is_gone(
    tmp_path: Path, owner: dict[str, object], seconds_ago: float
) -> None:
    held = lease_of_ended_process(tmp_path, **owner)
    set_last_beat(held, seconds_ago)

    assert lease.acquire(tmp_path, tmp_path / "next").fence == 2


@pytest.mark.parametrize("seconds_ago", [0, lease.SILENT_S - 5])
def test_a_lease_of_another_namespace_counts_while_it_beats(
    tmp_path: Path, seconds_ago: float
) -> None:
    held = lease_of_ended_process(tmp_path, namespace=1)
    set_last_beat(held, seconds_ago)

    with pytest.raises(NotReady, match=r"last heartbeat \d+s ago") as refused:
        lease.acquire(tmp_path, tmp_path / "next")

    (finding,) = refused.value.findings
    assert finding.code == "run-is-live"
    assert held.owner is not None
    assert f"pid {held.owner.pid}" in finding.message


def test_a_job_that_comes_back_elsewhere_waits_for_its_own_lease_to_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = lease_of_ended_process(tmp_path, host="another")
    lease.wait_for_expiry(tmp_path, tmp_path / "another run")
    with pytest.raises(NotReady):
        lease.require_free(tmp_path)

    monkeypatch.setattr(lease, "SILENT_S", 1.0)
    lease.wait_for_expiry(tmp_path, Path(held.run))

    lease.require_free(tmp_path)


def write_half(path: Path) -> None:
    path.write_text('{"owner": 3, "state"')


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [write_half, replace_by_pipe])
def test_an_unreadable_lease_has_an_unknown_owner(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    held = lease_of_ended_process(tmp_path)
    damage(held.path)

    with pytest.raises(NotReady, match="an unknown host"):
        lease.acquire(tmp_path, tmp_path / "next")

    os.utime(held.path, (0, 0))
    assert lease.acquire(tmp_path, tmp_path / "next").fence == 2


def test_of_many_starts_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    children = []
    for number in range(4):
        words = [sys.executable, str(ACQUIRE), str(tmp_path), f"run-{number}"]
        children.append(
            subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
        )
    for child in children:
        child.stdin.write("go\n")

    answers = []
    for child in children:
        answers.append(child.stdout.readline().strip())
    for child in children:
        child.communicate("end\n")

    assert sorted(answers) == ["1", "refused", "refused", "refused"]


def test_a_start_that_fails_leaves_no_lease(world: World) -> None:
    output = output_of(world)
    folder = world.prepared(argv=("/no/such/python",), output=str(output))
    assert launch("exec", str(folder.path)) == 5
    assert list(output.iterdir()) == []


def test_a_heartbeat_is_cheap_and_survives_a_tidied_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    held = lease.acquire(tmp_path, tmp_path / "run")
    lease.keep_manifest(held, {"stage": "sft"})

    with lease.heartbeat(held, lambda _: None) as end:
        first_beat = held.path.stat().st_mtime_ns
        wait_until(lambda: held.path.stat().st_mtime_ns > first_beat)
        (tmp_path / ".cache").rename(tmp_path / "tidied")
        wait_until(lambda: lease.read_manifests(tmp_path) == [{"stage": "sft"}])
        begun = time.thread_time()
        end("finished", 0)
        assert time.thread_time() - begun < 0.1

    last = newest_lease(tmp_path)
    assert last.state == "finished"
    assert last.code == 0
    lease.require_free(tmp_path)


def require_refusal(world: World, folder: RunFolder, code: int, answer: str | bytes) -> str:
    """Check that a second start names the first one; returns its advice."""
    (finding,) = json.loads(answer)["findings"]
    owner = newest_lease(output_of(world)).owner
    assert owner is not None
    assert code == 5
    assert finding["code"] == "run-is-live"
    for part in (folder.path.name, owner.host, f"pid {owner.pid}", "last heartbeat"):
        assert part in finding["message"]
    return str(finding["help"])


@pytest.mark.slow
def test_a_second_start_into_the_same_output_is_refused(
    world: World, container: tuple[str, ...], capsys: Capture
) -> None:
    first = start_training(world)
    second = second_run(world)
    words = ("exec", str(second.path), "--format", "json")

    code, answer = run_inside(container, world, *words)
    require_refusal(world, first, code, answer)

    # from an account of its own, that knows of no other run
    elsewhere = {
        "LAUNCH_RUNS": str(world.root / "other runs"),
        "XDG_STATE_HOME": str(world.root / "other state"),
    }
    done = world.launch(*words, env=elsewhere)
    require_refusal(world, first, done.returncode, done.stdout)

    shutil.rmtree(first.path)
    capsys.readouterr()
    code = launch(*words)
    advice = require_refusal(world, first, code, capsys.readouterr().out)
    assert f"kill {newest_lease(output_of(world)).owner.pid}" in advice  # type: ignore[union-attr]

    assert world.pid("leader") in world.left()
    assert second.attempts() == 0


def test_an_orphan_keeps_its_output_folder(world: World, capsys: Capture) -> None:
    folder = start_training(world)
    kill(rundir.read_json(folder.process)["keeper"]["pid"])
    shutil.rmtree(folder.path)
    set_last_beat(newest_lease(output_of(world)), 2 * lease.SILENT_S)

    assert launch("exec", str(second_run(world).path)) == 5

    assert "its training continues" in capsys.readouterr().err


def test_the_probe_keeps_the_heartbeat_of_a_run_without_a_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = lease.acquire(tmp_path, tmp_path / "run")
    os.utime(held.path, (0, 0))
    monkeypatch.setenv(attempt.LEASE, str(held.path))
    record = SimpleNamespace(
        quietly=lambda _: contextlib.nullcontext(), stacks=str(tmp_path / "rank-0.stacks.txt")
    )
    settings = SimpleNamespace(hang_seconds=0.04, hang_factor=1)
    rank = SimpleNamespace(rank=0, settings=settings, record=record)

    watchdog.Watchdog(rank, lambda: None).start()  # type: ignore[arg-type]

    wait_until(lambda: held.path.stat().st_mtime > 0)


@pytest.mark.slow
def test_a_run_whose_lease_was_taken_over_stops_its_training_and_says_so(world: World) -> None:
    folder = start_training(world)
    first = newest_lease(output_of(world))
    assert first.owner is not None

    successor = replace(
        first,
        path=first.path.with_name("lease-2.json"),
        owner=replace(first.owner, host="another", pid=77),
        run="/runs/other",
    )
    successor.write()
    world.quiet()

    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT
    message = "was taken over by the run /runs/other (started on"
    assert message in folder.console(1).read_text()
    assert message in folder.supervisor_log.read_text()
    newest = newest_lease(output_of(world))
    assert newest.run == "/runs/other"
    assert newest.fence == 2


def test_a_run_of_another_namespace_is_seen_running_and_can_be_stopped(
    world: World, container: tuple[str, ...]
) -> None:
    folder = start_training(world)
    _, answer = run_inside(container, world, "runs", "--format", "json")
    assert state_in(answer) == "running"

    viewer = start_inside(container, world, "attach", "a run")
    wait_until_shown(viewer)
    code, _ = run_inside(container, world, "stop", "a run")

    assert code == 0
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT
    viewer.communicate(timeout=PATIENCE_S)
    _, answer = run_inside(container, world, "runs", "--format", "json")
    assert state_in(answer) == "stopped"


def kill_namespace(outside: subprocess.Popen[bytes]) -> None:
    """With its first process, a namespace ends."""
    children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text()
    os.kill(int(children.split()[0]), signal.SIGKILL)
    outside.wait()


@pytest.mark.slow
def test_nothing_is_concluded_of_a_run_that_cannot_be_seen(
    world: World, container: tuple[str, ...], capsys: Capture
) -> None:
    notified = world.root / "notified"
    output = output_of(world)
    folder = world.prepared(
        "pid=leader", "step=3", "sleep=600", output=str(output), on_finish=("touch", str(notified))
    )
    pod = start_inside(container, world, "exec", str(folder.path))
    world.pid("leader")
    wait_until(folder.process.exists)
    kill_namespace(pod)

    set_last_beat(newest_lease(output), 0)
    assert state_here(capsys) == "running"

    set_last_beat(newest_lease(output), 2 * lease.SILENT_S)
    assert state_here(capsys) == "unknown"
    for word in ("attach", "stop"):
        assert launch(word, "a run") == 5
        err = capsys.readouterr().err
        assert "unknown here" in err
        assert "PID namespace" in err

    verdict = data_of(capsys, "check", "a run")
    states = {point["name"]: point["state"] for point in verdict["points"]}
    assert states["finish"] == "unknown"
    assert verdict["status"] == "unproven"
    for conclusion in (folder.concluded(1), folder.exit(1), notified):
        assert not conclusion.exists()


def require_resumed(world: World) -> None:
    """Check that the newest run continues from step 4 with the arguments of the first one."""
    manifest = rundir.read_manifest(RunFolder(max(world.runs.iterdir())))
    assert manifest["resume"]["kind"] == "resume"
    assert manifest["resume"]["step"] == 4
    assert str(output_of(world) / "checkpoint-4") in manifest["argv"]
    assert manifest["args"]["learning_rate"]["value"] == 0.005


@pytest.fixture
def train(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`launch sft` with a fake trainer that does these steps."""
    config = str(world.config(save_steps=2, max_steps=10, learning_rate=0.005))

    def run(*words: str, steps: list[str]) -> int:
        monkeypatch.setenv("FAKE_STEPS", json.dumps(steps))
        return launch("sft", config, "--python", str(world.python()), "--gpus", "0", *words)

    return run


@pytest.mark.slow
@needs_trl
def test_the_same_command_resumes_without_its_run_folder(
    world: World, train: Callable[..., int], capsys: Capture
) -> None:
    assert train("--detach", steps=["pid=leader", "sleep=600"]) == 0
    world.pid("leader")
    (first,) = world.runs.iterdir()
    assert launch("stop", first.name) == 0
    saved.trl(output_of(world), 2)
    saved.trl(output_of(world), 4)

    # the arguments are those of the training, not those that the command names
    (first / "run.json").write_text("")
    train("learning_rate=0.004", steps=["exit=1"])
    require_resumed(world)

    shutil.rmtree(world.runs)
    train("learning_rate=0.004", steps=["exit=1"])
    require_resumed(world)

    # without any record of whose they are, checkpoints are not trained over
    shutil.rmtree(world.runs)
    shutil.rmtree(output_of(world) / ".cache")
    assert train(steps=["exit=0"]) == 3
    assert "error[not-resumed]" in capsys.readouterr().err
    assert (output_of(world) / "checkpoint-4").is_dir()
