"""Real processes: started, followed, killed; nothing lost, nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_world import FAKE, find_processes, wait_until

from launcher import files
from launcher.machine import process
from launcher.machine.process import ProcessTree
from launcher.runs import rundir, runner
from launcher.runs.attempt import Command
from launcher.runs.rundir import RunFolder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.02)
    monkeypatch.setattr(runner, "GRACE_S", (0.3, 0.3, 0.3))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "runs" / "a run"
    path.mkdir(parents=True)
    return RunFolder(path)


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder where fake trainers leave their process numbers."""
    place = tmp_path / "pids"
    place.mkdir()
    monkeypatch.setenv("FAKE_PIDS", str(place))
    yield place
    for pid in find_processes("FAKE_PIDS", place):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def fake_training(*steps: str) -> Command:
    return Command(argv=(sys.executable, "-u", str(FAKE), *steps), env={}, cwd=Path.cwd())


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and process.identify(pid).is_alive()


def child_pid(pids: Path) -> int:
    wait_until((pids / "child").exists)
    return int((pids / "child").read_text())


@pytest.mark.parametrize(
    ("step", "returncode", "number"),
    [("print=2", 0, None), ("raise=no", 1, None), ("kill=KILL", 137, 9)],
)
def test_the_exit_is_recorded(
    folder: RunFolder, step: str, returncode: int, number: int | None
) -> None:
    ended = runner.run(fake_training(step), folder, 1)
    assert ended.started <= ended.ended
    assert rundir.read_json(folder.exit(1)) == {
        "returncode": returncode,
        "signal": number,
        "stopped": None,
        "started": ended.started,
        "ended": ended.ended,
        "attempt": 1,
        "preempted": False,
        "grace_s": None,
    }
    assert not runner.is_alive(folder.path)


def test_a_full_disk_costs_the_records_not_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_json", disk_is_full)
    assert runner.run(fake_training("print=1"), folder, 1).returncode == 0
    assert folder.console(1).read_text() == "line 0\n"


@pytest.mark.parametrize(("where", "end"), [("group", "exit=0"), ("session", "kill=KILL")])
def test_what_outlives_the_leader_is_ended(
    folder: RunFolder, pids: Path, where: str, end: str
) -> None:
    steps = (f"child={where}", f"wait={pids / 'child'}", end)
    runner.run(fake_training(*steps), folder, 1)
    # it is killed, but a busy machine may take its time to bury it
    wait_until(lambda: not is_alive(child_pid(pids)))
    assert not runner.is_alive(folder.path)


def record_process(folder: RunFolder, pid: int, /, **changes: object) -> None:
    identity = process.identify(pid).as_json()
    files.write_json(folder.process, {**identity, "mark": "another", "attempt": 1, **changes})


@pytest.mark.parametrize(
    "changes", [{"began": 1}, {"boot": "an earlier boot"}, {"host": "elsewhere"}, {"pid": None}]
)
def test_a_reused_number_is_not_alive(folder: RunFolder, changes: dict[str, object]) -> None:
    assert not runner.is_alive(folder.path)
    record_process(folder, os.getpid())
    assert runner.is_alive(folder.path)
    record_process(folder, os.getpid(), **changes)
    assert not runner.is_alive(folder.path)


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen(["true"])
    identity = process.identify(child.pid)
    wait_until(lambda: not identity.is_alive())
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()


def test_a_worker_without_its_leader_is_alive_until_it_ends(folder: RunFolder, pids: Path) -> None:
    environ = {**os.environ, process.MARK: str(folder.path)}
    argv = fake_training("child=session", f"wait={pids / 'child'}").argv
    leader = subprocess.Popen(argv, env=environ, start_new_session=True)
    record_process(folder, leader.pid, mark=str(folder.path))
    leader.wait()
    assert runner.is_alive(folder.path)

    files.write_json(folder.exit(1), {"returncode": 0})
    assert not runner.is_alive(folder.path)

    folder.exit(1).unlink()
    os.kill(child_pid(pids), signal.SIGKILL)
    wait_until(lambda: not runner.is_alive(folder.path))


def test_a_command_name_with_brackets_is_read_right(tmp_path: Path) -> None:
    script = tmp_path / "a) S 1 (b"
    script.symlink_to("/bin/sleep")
    child = subprocess.Popen([script, "60"])
    try:
        identity = process.identify(child.pid)
        assert identity.is_alive()
        assert child.pid in ProcessTree(identity, "no mark").living()
    finally:
        child.kill()
        child.wait()
