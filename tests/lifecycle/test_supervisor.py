"""A run and the process that keeps it: started, looked at, stopped, orphaned, told of; by the CLI."""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S
from fake_world import FAKE, LAUNCH, bearing, looks_on, prepared, until

from launcher import files
from launcher.errors import NotReady, UsageError
from launcher.lifecycle import background, follow, on_finish, start, stop, supervisor
from launcher.machine import process
from launcher.printable import printable_bytes
from launcher.redaction import redact_bytes
from launcher.runs import attempt, rundir, runner
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A world of its own: runs, state folder, and process numbers of fake trainers, which all end."""
    monkeypatch.setenv("LAUNCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("LAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LAUNCH_GRACE", "0.5,0.5,0.5")
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    (tmp_path / "pids").mkdir()
    yield tmp_path
    for folder in rundir.known_runs():
        runner.end_orphans(folder, (0, 0, 0), 1)
    for pid in bearing("FAKE_PIDS", tmp_path / "pids"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def launch(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, *words], capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL, **settings
    )


def shown(*words: str, **settings: Any) -> subprocess.Popen[bytes]:
    """A command that shows its run already, left running."""
    running = subprocess.Popen(
        [*LAUNCH, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        bufsize=0, **settings,
    )  # fmt: skip
    looks_on(running)
    return running


def living(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and process.identify(pid).lives()


def kept(folder: RunFolder) -> int:
    """The number of the keeper."""
    data = rundir.read_json(folder.process)["keeper"]
    return int(data["pid"])


def started(folder: RunFolder) -> Attempt:
    return start.execute(folder)[1]


def pid_of(place: Path, name: str) -> int:
    until((place / "pids" / name).exists)
    return int((place / "pids" / name).read_text())


def test_exec_runs_an_attempt_to_its_end_and_judges_it(place: Path) -> None:
    folder = prepared(place, "print=3", "exit=0")
    done = launch("exec", str(folder.path))
    assert folder.console(1).read_text() == "line 0\nline 1\nline 2\n"
    assert rundir.read_json(folder.exit(1))["returncode"] == 0
    assert rundir.read_json(folder.verdict)["stage"] == "sft"
    assert done.returncode == 1, "nothing was proved"
    assert "verdict: " in done.stdout
    assert folder.report.is_file()
    again = launch("exec", str(folder.path))
    assert (again.returncode, folder.attempts()) == (1, 1), "what is over is shown, not repeated"


def test_the_keeper_outlives_the_launcher(place: Path) -> None:
    folder = prepared(place, "pid=leader", f"wait={place / 'go'}", "print=2", "exit=3")
    running = subprocess.Popen(
        [*LAUNCH, "exec", str(folder.path)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    pid_of(place, "leader")
    until(folder.process.exists)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    (place / "go").touch()
    until(folder.verdict.exists)
    assert rundir.read_json(folder.exit(1))["returncode"] == 3
    assert folder.console(1).read_text() == "line 0\nline 1\n"


@pytest.mark.slow
@pytest.mark.parametrize("looking", [True, False])
def test_a_killed_keeper_leaves_an_orphan_that_ends_well(place: Path, looking: bool) -> None:
    told = place / "told"
    folder = prepared(
        place, "pid=leader", f"wait={place / 'go'}", "print=2",
        on_finish=(sys.executable, "-c", f"open({str(told)!r}, 'a').write('x')"),
    )  # fmt: skip
    started(folder)
    pid_of(place, "leader")
    viewer = None
    if looking:
        viewer = shown("attach", "a run")
    os.kill(kept(folder), signal.SIGKILL)
    until(lambda: not runner.keeper_lives(folder))
    (row,) = json.loads(launch("runs", "--format", "json").stdout)["data"]
    assert row["state"] == "orphaned"
    (place / "go").touch()
    if viewer is not None:
        viewer.communicate(timeout=PATIENCE_S)
    else:
        until(lambda: not runner.alive(folder.path))
        launch("attach", "a run")
        launch("attach", "a run")
    assert folder.console(1).read_text() == "line 0\nline 1\n"
    assert folder.verdict.exists()
    assert told.read_text() == "x", "told once, however many looked on"


def test_what_cannot_be_started_is_said_by_who_asked(place: Path) -> None:
    folder = prepared(place, argv=("/no/such/python",))
    done = launch("exec", str(folder.path), "--format", "json")
    assert done.returncode == 5
    assert [f["code"] for f in json.loads(done.stdout)["findings"]] == ["not-started"]
    assert not runner.alive(folder.path)
    # a folder where nothing waits
    folder = RunFolder(place / "runs" / "old")
    folder.path.mkdir(parents=True)
    files.write_json(folder.manifest, {"stage": "sft"})
    done = launch("exec", "old")
    assert (done.returncode, "not-prepared" in done.stderr) == (5, True)
    folder.start.write_text('{"number": 1')
    assert launch("exec", "old").returncode == 5


def test_an_attempt_is_kept_for_its_owner_alone_and_read_back(place: Path) -> None:
    odd = {"A": "$(no) `sh`;\n'x'", "B": os.fsdecode(b"\xff\xfe"), "HF_TOKEN": "hf_secret"}
    folder = prepared(place, environ=odd, argv=("a", "ü\n"), cwd=str(place))
    assert stat.S_IMODE(folder.start.stat().st_mode) == 0o600
    told = attempt.read(folder)
    assert (told.environ, told.argv, told.number) == (odd, ("a", "ü\n"), 1)
    assert not [p for p in folder.path.iterdir() if p != folder.start and b"hf_s" in p.read_bytes()]


def test_the_environment_is_that_of_the_start(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTER", "then")
    folder = prepared(place, "env=OUTER", "env=INNER", "env=LAUNCH_ATTEMPT", env={"INNER": "$(x)"})
    launch("exec", "a run", env={**os.environ, "OUTER": "now"}, cwd="/")
    assert folder.console(1).read_text() == "OUTER=then\nINNER=$(x)\nLAUNCH_ATTEMPT=1\n"


@pytest.mark.slow
@pytest.mark.parametrize(("orphan", "stubborn"), [(False, ""), (True, "INT"), (False, "INT,TERM")])
def test_stop_ends_every_process(place: Path, orphan: bool, stubborn: str) -> None:
    steps = [f"ignore={stubborn}"] if stubborn else []
    folder = prepared(place, *steps, "child=session", "child=group", "pid=leader", "sleep=600")
    started(folder)
    leader, child = pid_of(place, "leader"), pid_of(place, "child")
    if orphan:
        os.kill(kept(folder), signal.SIGKILL)
        until(lambda: not runner.keeper_lives(folder))
    done = launch("stop", "a r", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert not living(leader)
    assert not living(child)
    assert not process.family(None, str(folder.path))
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT
    assert json.loads(launch("runs", "--format", "json").stdout)["data"][0]["state"] == "stopped"
    assert folder.verdict.exists()


ALONE = """
import os, subprocess, sys
# a daemon as some trainers start them: a session of its own, no environment, no parent
if os.fork() == 0:
    os.setsid()
    argv = [sys.executable, {fake!r}, "ignore=INT,TERM", "pid=daemon", "sleep=600"]
    subprocess.Popen(argv, env={{"FAKE_PIDS": os.environ["FAKE_PIDS"]}}, start_new_session=True)
    os._exit(0)
os.wait()
os.execv(sys.executable, [sys.executable, {fake!r}, *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stop", "exit"])
def test_no_process_is_left_whatever_it_has_done_to_hide(place: Path, way: str) -> None:
    steps = ("pid=leader", f"wait={place / 'go'}", "exit=0")
    code = ALONE.format(fake=str(FAKE))
    folder = prepared(place, argv=(sys.executable, "-c", code, *steps))
    started(folder)
    leader, daemon = pid_of(place, "leader"), pid_of(place, "daemon")
    assert os.getsid(daemon) == daemon
    if way == "exit":
        (place / "go").touch()
        until(folder.verdict.exists)
    else:
        done = launch("stop", "last")
        assert done.returncode == 0, done.stderr
        assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT
    assert not living(daemon) and not living(leader)


def test_a_keeper_that_does_not_go_on_is_done_without(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepared(place, "ignore=INT", "child=session", "pid=leader", "sleep=600")
    started(folder)
    leader, child = pid_of(place, "leader"), pid_of(place, "child")
    os.kill(kept(folder), signal.SIGSTOP)
    monkeypatch.setattr(stop, "_patience", lambda _: 1.0)
    ended = stop.stop(folder)
    assert ended is not None and ended.stopped == signal.SIGINT
    assert not living(leader) and not living(child) and not living(kept(folder))
    assert folder.verdict.exists()


def test_asked_again_a_stop_does_not_wait(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_GRACE", f"{2 * PATIENCE_S},{2 * PATIENCE_S},0.3")
    folder = prepared(place, "note=INT,TERM", "pid=leader", "sleep=600")
    running = shown("exec", "a run")
    # it is shown before the training's own handlers stand; they stand once its number is written
    pid_of(place, "leader")
    for name in ("SIGINT", "SIGTERM"):
        running.send_signal(signal.SIGINT)
        until((place / name).exists)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=PATIENCE_S)
    ended = rundir.read_json(folder.exit(1))
    assert (ended["returncode"], ended["signal"], ended["stopped"]) == (137, 9, 2)


def test_what_does_not_run_is_not_stopped(place: Path) -> None:
    folder = prepared(place, "exit=0")
    launch("exec", "a run")
    done = launch("stop", "a run")
    assert (done.returncode, "not-running" in done.stderr) == (2, True)
    assert launch("stop", "nobody").returncode == 2
    assert not folder.stop.exists()


def test_a_reused_number_is_never_killed(place: Path) -> None:
    folder = prepared(place, "exit=0")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        other = {**process.identify(bystander.pid).as_json(), "began": 1}
        files.write_json(folder.process, {**other, "keeper": other, "mark": str(folder.path)})
        folder.console(1).touch()
        assert launch("stop", "a run").returncode == 2
        runner.end_orphans(folder, (0, 0, 0), 1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_stop_tells_what_it_loses(place: Path) -> None:
    folder = prepared(place, "pid=leader", "sleep=600")
    output = place / "out"
    files.write_json(folder.manifest, {"stage": "sft", "backend": "trl", "output": str(output), "plan": {}})
    started(folder)
    pid_of(place, "leader")
    folder.probe.mkdir()
    rows = [{"event": "start", "attempt": 1}, {"event": "step", "step": 37, "loss": 1.0}]
    (folder.probe / "rank-0.jsonl").write_text("".join(rundir.json_line(row) for row in rows))
    done = launch("stop", "last")
    assert "all 37 steps are lost" in done.stdout


def test_attach_follows_to_the_end_and_leaves_alone(place: Path) -> None:
    folder = prepared(place, "pid=leader", f"wait={place / 'go'}", "exit=0")
    started(folder)
    leader = pid_of(place, "leader")
    looking = shown("attach")
    looking.send_signal(signal.SIGINT)
    out, _ = looking.communicate(timeout=PATIENCE_S)
    assert (looking.returncode, b"goes on" in out) == (0, True)
    assert living(leader)
    again = shown("attach", "a run")
    (place / "go").touch()
    assert b"verdict: " in again.communicate(timeout=PATIENCE_S)[0]


def test_logs_are_printed_without_what_would_steer_a_terminal(place: Path) -> None:
    folder = prepared(place, "exit=0")
    raw = b"one\ntwo\xff\n\x1b[31mthree\rfour\nfive"
    folder.console(1).write_bytes(raw)

    def printed(*words: str) -> bytes:
        return subprocess.run([*LAUNCH, "logs", *words], capture_output=True, check=True).stdout

    harmless = b"one\ntwo\xff\nthree\nfour\nfive"
    assert printed("a run") == harmless
    assert printed("a run", "-n", "1") == b"five"
    assert printed("a run", "-n", "2") == b"four\nfive"
    assert printed("a run", "-n", "99") == harmless.replace(b"three\n", b"")
    folder.console(1).write_bytes(b"x" * 200_000 + b"\n" + b"y" * 70_000 + b"\n")
    assert printed("a run", "-n", "1") == b"y" * 70_000 + b"\n"
    done = launch("logs", "a run", "--attempt", "7")
    assert done.returncode == 2 and "it has 1: launch logs a run --attempt 1" in done.stderr
    folder.console(1).unlink()
    done = launch("logs", "a run")
    assert done.returncode == 2 and "launch check a run" in done.stderr
    # the last lines of a log hold one frame of a progress bar
    folder = prepared(place, "exit=0")
    frames = "".join(f"\r{percent}%|###| {percent}/100" for percent in range(100))
    folder.console(1).write_text(f"one\n{frames}\ntwo\r\n{frames}")
    shown = subprocess.run([*LAUNCH, "logs", "a run", "-n", "3"], capture_output=True, check=True)
    assert shown.stdout.split(b"\n") == [b"99%|###| 99/100", b"two", b"99%|###| 99/100"]


@pytest.mark.parametrize(
    ("every", "done", "said"),
    [
        (20, 41, "waiting for the checkpoint of step 60; step 41 is done"),
        (20, 100, "no further checkpoint is due: waiting for its end, step 110"),
        ("epoch", 41, "waiting for the next checkpoint"),
    ],
)
def test_when_the_next_checkpoint_comes(place: Path, every: int | str | None, done: int, said: str) -> None:
    folder = prepared(place, "exit=0")
    told = {**rundir.read_manifest(folder), "checkpoints": every, "plan": {"gpus": 0, "steps": 110}}
    files.write_json(folder.manifest, told)
    folder.probe.mkdir()
    line = rundir.json_line({"event": "step", "step": done, "t": 1.0})
    (folder.probe / "rank-0.jsonl").write_text(line)
    assert stop.due(folder) == said


def test_following_a_log_ends_with_the_run(place: Path) -> None:
    folder = prepared(place, "print=2", "pid=leader", f"wait={place / 'go'}", "print=3")
    started(folder)
    pid_of(place, "leader")
    reading = subprocess.Popen([*LAUNCH, "logs", "-f"], stdout=subprocess.PIPE, bufsize=0)
    assert reading.stdout is not None
    # what was there when it began, and what comes
    assert [reading.stdout.readline() for _ in range(2)] == [b"line 0\n", b"line 1\n"]
    (place / "go").touch()
    out, _ = reading.communicate(timeout=PATIENCE_S)
    assert out == b"line 0\nline 1\nline 2\n"


def test_the_command_at_the_end_learns_what_became_of_it(place: Path) -> None:
    end, state = "exit=7", "failed"
    script = "import os, json; json.dump(dict(os.environ), open('told.json', 'w')); print('sent')"
    folder = prepared(place, end, on_finish=(sys.executable, "-c", script))
    done = launch("exec", "a run", cwd="/")
    told = json.loads((place / "told.json").read_text())
    assert told["LAUNCH_FINISHED"] == "a run"
    assert told["LAUNCH_FINISHED_STATE"] == state
    assert told["LAUNCH_FINISHED_VERDICT"] == str(folder.verdict)
    assert told["LAUNCH_FINISHED_STATUS"] == "fail"
    assert int(told["LAUNCH_FINISHED_CODE"]) == done.returncode
    assert Path(told["LAUNCH_FINISHED_FOLDER"]) == folder.path
    assert process.MARK not in told
    assert "sent" in folder.diary.read_text()


def test_it_is_an_argv_and_no_shell() -> None:
    words = on_finish.parsed("notify 'a b' $(touch x); `y`")
    with pytest.raises(UsageError, match="no program `notify"):
        on_finish.require_here(("notify-nobody", "x"))
    on_finish.require_here(("env", "true"))
    assert words == ("notify", "a b", "$(touch", "x);", "`y`")
    for wrong in ("", "  ", "say 'it"):
        with pytest.raises(UsageError):
            on_finish.parsed(wrong)


def told_by(place: Path, then: str = "") -> tuple[str, ...]:
    """A command at the end that leaves a mark for each call."""
    return (sys.executable, "-c", f"open({str(place / 'told')!r}, 'a').write('x'); {then}")


def over(place: Path, **changes: Any) -> RunFolder:
    """A run that ended, whose keeper was killed before it told anybody."""
    folder = prepared(place, **changes)
    dead = {**process.identify(os.getpid()).as_json(), "began": 1}
    files.write_json(folder.process, {**dead, "keeper": dead, "mark": "x", "attempt": 1})
    folder.console(1).write_text("line 0\n")
    files.write_json(folder.exit(1), {"returncode": 0, "stopped": None})
    return folder


def writable(folder: RunFolder) -> None:
    folder.path.chmod(0o775)


def linked_file(folder: RunFolder) -> None:
    folder.start.rename(folder.path / "elsewhere.json")
    folder.start.symlink_to("elsewhere.json")


def replaceable(folder: RunFolder) -> None:
    folder.path.parent.chmod(0o777)


def strangers(folder: RunFolder) -> None:
    os.chown(folder.path, 12345, -1)


EVERYBODYS = (writable, linked_file, replaceable, strangers)


@pytest.mark.slow
@pytest.mark.parametrize("way", EVERYBODYS)
def test_a_command_that_somebody_else_may_have_written_is_named_and_not_run(
    place: Path, way: Callable[[RunFolder], None]
) -> None:
    folder = over(place, on_finish=told_by(place))
    if way.__name__.startswith("strangers") and os.geteuid():
        pytest.skip("only root gives files away")
    way(folder)
    done = launch("attach", str(folder.path))
    assert f"--on-finish `{sys.executable} -c" in done.stderr and "was not run: " in done.stderr
    assert not (place / "told").exists()
    assert done.returncode == 1, "what it came to is shown all the same"
    # nor is what it would train, but for a folder that is the user's own under whatever name
    folder.exit(1).unlink()
    folder.console(1).unlink()
    folder.process.unlink()
    if way is not replaceable:
        refused = launch("exec", str(folder.path))
        assert (refused.returncode, "error[not-your-run]" in refused.stderr) == (5, True)
        assert not (place / "pids" / "leader").exists()


def test_only_what_was_written_at_the_start_is_started(place: Path) -> None:
    folder = prepared(place, "pid=leader")
    with pytest.raises(NotReady) as caught:
        supervisor.spawn(folder, 1, digest="another")
    assert caught.value.findings[0].code == "start-changed"
    assert not (place / "pids" / "leader").exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["while judging", "before the call", "after the call"])
def test_the_command_at_the_end_is_called_at_least_once(place: Path, killed: str) -> None:
    folder = over(place, on_finish=told_by(place))
    mark = folder.concluded(1)
    mark.touch()
    if killed != "while judging":
        start.finish(folder)
        rundir.seal(folder, 1, untold=killed == "before the call")
    for _ in range(2):
        assert launch("attach", "a run").returncode == 1
    assert (place / "told").exists() == (killed != "after the call")
    assert killed == "after the call" or (place / "told").read_text() == "x"


def test_the_command_at_the_end_finds_the_locks_free(place: Path) -> None:
    lock = place / "gpu.lock"
    script = f"flock -n {shlex.quote(str(lock))} true; echo $? > {shlex.quote(str(place / 'free'))}"
    folder = prepared(place, "pid=leader", f"wait={place / 'go'}", on_finish=("sh", "-c", script))
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        supervisor.spawn(folder, 1, (held.fileno(),))
    pid_of(place, "leader")
    assert subprocess.run(["flock", "-n", str(lock), "true"]).returncode == 1, "training has it"
    (place / "go").touch()
    until((place / "free").exists)
    until(lambda: (place / "free").read_text() == "0\n")


def test_a_command_at_the_end_has_its_time(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "trap 'echo ended > ended' TERM; sleep 600 & wait; wait"
    folder = over(place, on_finish=("sh", "-c", script), on_finish_s=0.5)
    on_finish.call(folder, attempt.read(folder), 0)
    assert "it took longer than 0.5 s" in capfd.readouterr().err
    assert (place / "ended").exists()


@pytest.fixture
def server(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tmux server of its own."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    short = tempfile.mkdtemp(prefix="lt-", dir="/tmp")
    monkeypatch.setattr(background, "TMUX_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setenv("TMUX_TMPDIR", short)
    monkeypatch.delenv("TMUX", raising=False)
    yield
    subprocess.run(["tmux", "kill-server"], capture_output=True)
    shutil.rmtree(short, ignore_errors=True)


def screen(session: str) -> str:
    shown = subprocess.run(["tmux", "capture-pane", "-p", "-t", session], capture_output=True, text=True)
    return shown.stdout


@pytest.mark.usefixtures("server")
def test_a_session_shows_the_run_and_may_die(place: Path) -> None:
    # tmux expands what is given for a name, and `#(...)` in it is a command
    name = "20260101T000000Z-sft-v1.5 $(touch pwned) `x` ;\"'ü#(touch pwned)#{pid}a.b:c\n"
    folder = prepared(place, "pid=leader", f"wait={place / 'go'}", "print=1", name=name)
    started(folder)
    leader = pid_of(place, "leader")
    session = background.open_session(folder)
    assert session is not None
    until(lambda: "sft fake" in screen(session))
    subprocess.run(["tmux", "kill-server"], check=True)
    assert living(leader)
    (place / "go").touch()
    until(folder.verdict.exists)
    assert folder.console(1).read_text() == "line 0\n"
    assert not list(place.rglob("pwned"))


@pytest.mark.usefixtures("server")
def test_a_session_stays_with_the_verdict_until_a_key_is_pressed(place: Path) -> None:
    folder = prepared(place, f"wait={place / 'go'}", "print=1")
    started(folder)
    session = background.open_session(folder)
    assert session is not None
    until(lambda: "sft fake" in screen(session))
    (place / "go").touch()
    until(lambda: "press Enter to close" in screen(session))
    assert "verdict: " in screen(session)
    # a further attempt gets a session of its own
    assert background.open_session(folder) == session
    until(lambda: "press Enter to close" in screen(session))
    subprocess.run(["tmux", "send-keys", "-t", session, "Enter"], check=True)
    until(lambda: not screen(session))


def test_without_tmux_there_is_no_session(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepared(place, "exit=0")
    monkeypatch.setenv("PATH", str(place))
    assert background.open_session(folder) is None


@pytest.mark.slow
def test_what_has_not_begun_is_not_judged(place: Path) -> None:
    folder = prepared(place, "say=hello")
    for word in ("check", "attach"):
        told = launch(word, str(folder.path))
        assert (told.returncode, "error[not-begun]" in told.stderr) == (2, True), told
    assert not folder.verdict.exists()
    assert launch("exec", str(folder.path)).returncode != 2
    assert launch("check", str(folder.path)).returncode != 2 and folder.verdict.exists()


@pytest.mark.parametrize("size", [1, 17])
def test_a_log_is_shown_without_tokens_however_it_comes(size: int) -> None:
    token = "hf_" + "aB3" * 11
    raw = f"one\r 5%|#| 1/9\rlogin HF_TOKEN=abc\nsee {token} there\n\xff {token}".encode("latin-1")
    shown = follow.Shown(("a known value",))
    parts = [shown.of(raw[at : at + size]) for at in range(0, len(raw), size)]
    told = b"".join([*parts, shown.rest()])
    assert token.encode() not in told and told == redact_bytes(printable_bytes(raw), ())


def test_a_keeper_that_is_killed_in_the_command_at_the_end_has_called_it(place: Path) -> None:
    folder = prepared(place, "exit=0", on_finish=told_by(place, "import time; time.sleep(2)"))
    started(folder)
    until(lambda: rundir.concluded(folder, 1))
    os.kill(kept(folder), signal.SIGKILL)
    launch("attach", "a run")
    until((place / "told").exists)
    assert (place / "told").read_text() == "x"


def test_term_to_the_keeper_reaches_the_command_at_the_end(place: Path) -> None:
    script = f"trap 'echo ended > ended; exit 3' TERM; touch {place}/up; sleep 600 & wait"
    folder = prepared(place, "exit=0", on_finish=("sh", "-c", script))
    started(folder)
    until((place / "up").exists)
    os.kill(kept(folder), signal.SIGTERM)
    until((place / "ended").exists)
    until(lambda: not runner.keeper_lives(folder))
    assert "ended with 3" in folder.diary.read_text()
