"""Real processes: started, followed, stopped, killed; nothing lost, nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_world import FAKE, bearing, until

from launcher import files
from launcher.machine import process
from launcher.runs import rundir, runner
from launcher.runs.attempt import Command
from launcher.runs.rundir import RunFolder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.02)
    monkeypatch.setattr(runner, "GRACE_S", (0.3, 0.3, 0.3))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "runs" / "a run"
    path.mkdir(parents=True)
    return RunFolder(path)


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder where fake trainers leave their process numbers; none may live afterwards."""
    place = tmp_path / "pids"
    place.mkdir()
    monkeypatch.setenv("FAKE_PIDS", str(place))
    yield place
    for pid in bearing("FAKE_PIDS", place):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def fake(*steps: str) -> Command:
    return Command(argv=(sys.executable, "-u", str(FAKE), *steps), env={}, cwd=Path.cwd())


def living(pid: int) -> bool:
    return process.identify(pid).is_alive() if Path(f"/proc/{pid}").exists() else False


def pid_of(pids: Path, name: str) -> int:
    until(lambda: (pids / name).exists())
    return int((pids / name).read_text())


def record(folder: RunFolder, attempt: int = 1) -> dict[str, Any]:
    return rundir.read_json(folder.exit(attempt))


@pytest.mark.parametrize(
    ("steps", "code", "number"),
    [(["print=2"], 0, None), (["raise=no"], 1, None), (["kill=KILL"], 137, 9)],
)
def test_the_exit_is_recorded(
    folder: RunFolder, steps: list[str], code: int, number: int | None
) -> None:
    ended = runner.run(fake(*steps), folder, 1)
    assert (ended.returncode, ended.signal, ended.stopped) == (code, number, None)
    assert record(folder) == {
        "returncode": code, "signal": number, "stopped": None, "started": ended.started,
        "ended": ended.ended, "attempt": 1, "preempted": False, "grace_s": None,
    }  # fmt: skip
    assert ended.started <= ended.ended
    assert not runner.is_alive(folder.path)


def test_a_full_disk_costs_the_records_not_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_json", full)
    assert runner.run(fake("print=1", "exit=0"), folder, 1).returncode == 0
    assert folder.console(1).read_text() == "line 0\n"


@pytest.mark.parametrize(("where", "end"), [("group", "exit=0"), ("session", "kill=KILL")])
def test_what_outlives_the_leader_is_ended(
    folder: RunFolder, pids: Path, where: str, end: str
) -> None:
    steps = [f"child={where}", f"wait={pids / 'child'}", end]
    runner.run(fake(*steps), folder, 1)
    # killed it is, but a busy machine may take its time to bury it
    until(lambda: not living(pid_of(pids, "child")))
    assert not runner.is_alive(folder.path)


def written(folder: RunFolder, **changes: object) -> None:
    own = {**process.identify(os.getpid()).as_json(), "mark": "another", "attempt": 1}
    files.write_json(folder.process, {**own, **changes})


@pytest.mark.parametrize(
    "changes", [{"began": 1}, {"boot": "an earlier boot"}, {"host": "elsewhere"}, {"pid": None}]
)
def test_a_reused_number_is_not_alive(folder: RunFolder, changes: dict[str, object]) -> None:
    assert not runner.is_alive(folder.path)
    written(folder)
    assert runner.is_alive(folder.path)
    written(folder, **changes)
    assert not runner.is_alive(folder.path)


def test_a_zombie_is_dead(folder: RunFolder) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    told = process.identify(child.pid)
    until(lambda: not told.is_alive())
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()


def test_a_worker_without_its_leader_is_alive_until_it_ends(folder: RunFolder, pids: Path) -> None:
    environment = {**os.environ, process.MARK: str(folder.path)}
    argv = [sys.executable, str(FAKE), "child=session", f"wait={pids / 'child'}"]
    leader = subprocess.Popen(argv, env=environment, start_new_session=True)
    written(folder, **process.identify(leader.pid).as_json(), mark=str(folder.path))
    leader.wait()
    assert runner.is_alive(folder.path)
    files.write_json(folder.exit(1), {"returncode": 0})
    assert not runner.is_alive(folder.path)
    folder.exit(1).unlink()
    os.kill(pid_of(pids, "child"), signal.SIGKILL)
    until(lambda: not runner.is_alive(folder.path))


def test_a_command_name_with_brackets_is_read_right(tmp_path: Path) -> None:
    script = tmp_path / "a) S 1 (b"
    script.symlink_to("/bin/sleep")
    child = subprocess.Popen([script, "60"])
    try:
        assert process.identify(child.pid).is_alive()
        assert child.pid in process.ProcessTree(process.identify(child.pid), "no mark").living()
    finally:
        child.kill()
        child.wait()
