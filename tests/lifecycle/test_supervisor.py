"""A run and the process that keeps it: started, looked at, stopped, orphaned, told of; by the CLI."""

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
from conftest import PATIENCE_S, REPOSITORY
from fake_world import FAKE, LAUNCH, World, looks_on, made, until

from launcher import files
from launcher.errors import NotReady, UsageError
from launcher.lifecycle import background, conclude, on_finish, start, stop, supervisor
from launcher.machine import process, tools
from launcher.runs import attempt, rundir, runner
from launcher.runs.rundir import RunFolder


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with made(tmp_path / "world") as world:
        world.environ["LAUNCH_GRACE"] = "0.5,0.5,0.5"
        for name in ("LAUNCH_RUNS", "XDG_STATE_HOME", "LAUNCH_CACHE", "LAUNCH_GRACE", "FAKE_PIDS"):
            monkeypatch.setenv(name, world.environ[name])
        yield world


def shown(world: World, *words: str) -> subprocess.Popen[bytes]:
    running = world.started(*words)
    looks_on(running)
    return running


def living(pid: int) -> bool:
    return process.identify(pid).is_alive()


def kept(folder: RunFolder) -> int:
    return int(rundir.read_json(folder.process)["keeper"]["pid"])


def test_exec_runs_an_attempt_to_its_end_and_judges_it(world: World) -> None:
    folder = world.prepared("print=3", "exit=0")
    done = world.launch("exec", str(folder.path))
    assert folder.console(1).read_text() == "line 0\nline 1\nline 2\n"
    assert rundir.read_json(folder.exit(1))["returncode"] == 0
    assert rundir.read_json(folder.verdict)["stage"] == "sft"
    assert done.returncode == 1, "nothing was proved"
    assert "verdict: " in done.stdout
    assert folder.report.is_file()
    again = world.launch("exec", str(folder.path))
    assert (again.returncode, folder.attempts()) == (1, 1), "what is over is shown, not repeated"


def test_the_keeper_outlives_the_launcher(world: World) -> None:
    folder = world.prepared("pid=leader", f"wait={world.root / 'go'}", "print=2", "exit=3")
    running = subprocess.Popen(
        [*LAUNCH, "exec", str(folder.path)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    world.pid("leader")
    until(folder.process.exists)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    (world.root / "go").touch()
    until(folder.verdict.exists)
    assert rundir.read_json(folder.exit(1))["returncode"] == 3
    assert folder.console(1).read_text() == "line 0\nline 1\n"


@pytest.mark.slow
@pytest.mark.parametrize("looking", [True, False])
def test_a_killed_keeper_leaves_an_orphan_that_ends_well(world: World, looking: bool) -> None:
    told, go = world.root / "told", f"wait={world.root / 'go'}"
    folder = world.prepared("pid=leader", go, "print=2", on_finish=told_by(world))
    start.execute(folder)
    world.pid("leader")
    viewer = None
    if looking:
        viewer = shown(world, "attach", "a run")
    os.kill(kept(folder), signal.SIGKILL)
    until(lambda: not runner.has_live_supervisor(folder))
    (row,) = json.loads(world.launch("runs", "--format", "json").stdout)["data"]
    assert row["state"] == "orphaned"
    (world.root / "go").touch()
    if viewer is not None:
        viewer.communicate(timeout=PATIENCE_S)
    else:
        until(lambda: not runner.is_alive(folder.path))
        world.launch("attach", "a run")
        world.launch("attach", "a run")
    assert folder.console(1).read_text() == "line 0\nline 1\n"
    assert folder.verdict.exists()
    assert told.read_text() == "1", "told once, however many looked on"


def test_what_cannot_be_started_is_said_by_who_asked(world: World) -> None:
    folder = world.prepared(argv=("/no/such/python",))
    done = world.launch("exec", str(folder.path), "--format", "json")
    assert done.returncode == 5
    assert [f["code"] for f in json.loads(done.stdout)["findings"]] == ["not-started"]
    assert not runner.is_alive(folder.path)
    # a folder where nothing waits
    folder = RunFolder(world.root / "runs" / "old")
    folder.path.mkdir(parents=True)
    files.write_json(folder.manifest, {"stage": "sft"})
    done = world.launch("exec", "old")
    assert (done.returncode, "not-prepared" in done.stderr) == (5, True)
    folder.start.write_text('{"number": 1')
    assert world.launch("exec", "old").returncode == 5


def test_an_attempt_is_kept_for_its_owner_alone_and_read_back(world: World) -> None:
    odd = {"A": "$(no) `sh`;\n'x'", "B": os.fsdecode(b"\xff\xfe"), "HF_TOKEN": "hf_secret"}
    folder = world.prepared(environ=odd, argv=("a", "ü\n"), cwd=str(world.root))
    assert stat.S_IMODE(folder.start.stat().st_mode) == 0o600
    told = attempt.read_attempt(folder)
    assert (told.environ, told.argv, told.number) == (odd, ("a", "ü\n"), 1)
    assert not [p for p in folder.path.iterdir() if p != folder.start and b"hf_s" in p.read_bytes()]


def test_the_environment_is_that_of_the_start(world: World) -> None:
    world.environ["OUTER"] = "then"
    folder = world.prepared("env=OUTER", "env=INNER", "env=LAUNCH_ATTEMPT", env={"INNER": "$(x)"})
    world.launch("exec", "a run", env={"OUTER": "now"}, cwd="/")
    assert folder.console(1).read_text() == "OUTER=then\nINNER=$(x)\nLAUNCH_ATTEMPT=1\n"


@pytest.mark.slow
@pytest.mark.parametrize(("orphan", "stubborn"), [(False, ""), (True, "INT"), (False, "INT,TERM")])
def test_stop_ends_every_process(world: World, orphan: bool, stubborn: str) -> None:
    steps = [f"ignore={stubborn}"] if stubborn else []
    folder = world.prepared(*steps, "child=session", "child=group", "pid=leader", "sleep=600")
    start.execute(folder)
    leader, child = world.pid("leader"), world.pid("child")
    if orphan:
        os.kill(kept(folder), signal.SIGKILL)
        until(lambda: not runner.has_live_supervisor(folder))
    done = world.launch("stop", "a r", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert not living(leader)
    assert not living(child)
    assert not process.ProcessTree(None, str(folder.path)).living()
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT
    assert (
        json.loads(world.launch("runs", "--format", "json").stdout)["data"][0]["state"] == "stopped"
    )
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
def test_no_process_is_left_whatever_it_has_done_to_hide(world: World, way: str) -> None:
    steps = ("pid=leader", f"wait={world.root / 'go'}", "exit=0")
    code = ALONE.format(fake=str(FAKE))
    folder = world.prepared(argv=(sys.executable, "-c", code, *steps))
    start.execute(folder)
    leader, daemon = world.pid("leader"), world.pid("daemon")
    assert os.getsid(daemon) == daemon
    if way == "exit":
        (world.root / "go").touch()
        until(folder.verdict.exists)
    else:
        done = world.launch("stop", "last")
        assert done.returncode == 0, done.stderr
        assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT
    assert not living(daemon) and not living(leader)


def test_a_keeper_that_does_not_go_on_is_done_without(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = world.prepared("ignore=INT", "child=session", "pid=leader", "sleep=600")
    start.execute(folder)
    leader, child = world.pid("leader"), world.pid("child")
    os.kill(kept(folder), signal.SIGSTOP)
    monkeypatch.setattr(stop, "_patience_s", lambda _: 1.0)
    ended = stop.stop(folder)
    assert ended is not None and ended.stopped == signal.SIGINT
    assert not living(leader) and not living(child) and not living(kept(folder))
    assert folder.verdict.exists()


def test_asked_again_a_stop_does_not_wait(world: World) -> None:
    world.environ["LAUNCH_GRACE"] = f"{2 * PATIENCE_S},{2 * PATIENCE_S},0.3"
    folder = world.prepared("note=INT,TERM", "pid=leader", "sleep=600")
    running = shown(world, "exec", "a run")
    # it is shown before the training's own handlers stand; they stand once its number is written
    world.pid("leader")
    for name in ("SIGINT", "SIGTERM"):
        running.send_signal(signal.SIGINT)
        until((world.root / name).exists)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=PATIENCE_S)
    ended = rundir.read_json(folder.exit(1))
    assert (ended["returncode"], ended["signal"], ended["stopped"]) == (137, 9, 2)


def test_what_does_not_run_is_not_stopped(world: World) -> None:
    folder = world.prepared("exit=0")
    world.launch("exec", "a run")
    done = world.launch("stop", "a run")
    assert (done.returncode, "not-running" in done.stderr) == (2, True)
    assert world.launch("stop", "nobody").returncode == 2
    assert not folder.stop.exists()


def test_a_reused_number_is_never_killed(world: World) -> None:
    folder = world.prepared("exit=0")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        other = {**process.identify(bystander.pid).as_json(), "began": 1}
        files.write_json(folder.process, {**other, "keeper": other, "mark": str(folder.path)})
        folder.console(1).touch()
        assert world.launch("stop", "a run").returncode == 2
        runner.end_orphans(folder, (0, 0, 0), 1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_stop_tells_what_it_loses(world: World) -> None:
    folder = world.prepared("pid=leader", "sleep=600")
    output = world.root / "out"
    files.write_json(
        folder.manifest, {"stage": "sft", "backend": "trl", "output": str(output), "plan": {}}
    )
    start.execute(folder)
    world.pid("leader")
    folder.probe.mkdir()
    rows = [{"event": "start", "attempt": 1}, {"event": "step", "step": 37, "loss": 1.0}]
    (folder.probe / "rank-0.jsonl").write_text("".join(rundir.json_line(row) for row in rows))
    done = world.launch("stop", "last")
    assert "all 37 steps are lost" in done.stdout


def test_attach_follows_to_the_end_and_leaves_alone(world: World) -> None:
    folder = world.prepared("pid=leader", f"wait={world.root / 'go'}", "exit=0")
    start.execute(folder)
    leader = world.pid("leader")
    looking = shown(world, "attach")
    looking.send_signal(signal.SIGINT)
    out, _ = looking.communicate(timeout=PATIENCE_S)
    assert (looking.returncode, b"the run continues" in out) == (0, True)
    assert living(leader)
    again = shown(world, "attach", "a run")
    (world.root / "go").touch()
    assert b"verdict: " in again.communicate(timeout=PATIENCE_S)[0]


def test_logs_are_printed_without_what_would_steer_a_terminal(world: World) -> None:
    folder = world.prepared("exit=0")
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
    done = world.launch("logs", "a run", "--attempt", "7")
    assert done.returncode == 2 and "it has 1: launch logs a run --attempt 1" in done.stderr
    folder.console(1).unlink()
    done = world.launch("logs", "a run")
    assert done.returncode == 2 and "launch check a run" in done.stderr
    # the last lines of a log hold one frame of a progress bar
    folder = world.prepared("exit=0")
    frames = "".join(f"\r{percent}%|###| {percent}/100" for percent in range(100))
    folder.console(1).write_text(f"one\n{frames}\ntwo\r\n{frames}")
    shown = subprocess.run([*LAUNCH, "logs", "a run", "-n", "3"], capture_output=True, check=True)
    assert shown.stdout.split(b"\n") == [b"99%|###| 99/100", b"two", b"99%|###| 99/100"]


def test_following_a_log_ends_with_the_run(world: World) -> None:
    folder = world.prepared("print=2", "pid=leader", f"wait={world.root / 'go'}", "print=3")
    start.execute(folder)
    world.pid("leader")
    reading = subprocess.Popen([*LAUNCH, "logs", "-f"], stdout=subprocess.PIPE, bufsize=0)
    assert reading.stdout is not None
    # what was there when it began, and what comes
    assert [reading.stdout.readline() for _ in range(2)] == [b"line 0\n", b"line 1\n"]
    (world.root / "go").touch()
    out, _ = reading.communicate(timeout=PATIENCE_S)
    assert out == b"line 0\nline 1\nline 2\n"


def test_the_command_at_the_end_learns_what_became_of_it(world: World) -> None:
    end, state = "exit=7", "failed"
    script = "import os, json; json.dump(dict(os.environ), open('told.json', 'w')); print('sent')"
    folder = world.prepared(end, on_finish=(sys.executable, "-c", script))
    done = world.launch("exec", "a run", cwd="/")
    told = json.loads((world.root / "told.json").read_text())
    assert told["LAUNCH_FINISHED"] == "a run"
    assert told["LAUNCH_FINISHED_STATE"] == state
    assert told["LAUNCH_FINISHED_VERDICT"] == str(folder.verdict)
    assert told["LAUNCH_FINISHED_STATUS"] == "fail"
    assert int(told["LAUNCH_FINISHED_CODE"]) == done.returncode
    assert Path(told["LAUNCH_FINISHED_FOLDER"]) == folder.path
    assert process.MARK not in told
    assert "sent" in folder.supervisor_log.read_text()


def test_it_is_an_argv_and_no_shell() -> None:
    words = on_finish.parse_command("notify 'a b' $(touch x); `y`")
    with pytest.raises(UsageError, match="no program `notify"):
        on_finish.require_program(("notify-nobody", "x"))
    on_finish.require_program(("env", "true"))
    assert words == ("notify", "a b", "$(touch", "x);", "`y`")
    for wrong in ("", "  ", "say 'it"):
        with pytest.raises(UsageError):
            on_finish.parse_command(wrong)


def told_by(world: World, then: str = "") -> tuple[str, ...]:
    """A command at the end that writes down the run's exit code with each call."""
    place = str(world.root / "told")
    return (
        sys.executable,
        "-c",
        f"import os; open({place!r}, 'a').write(os.environ['LAUNCH_FINISHED_CODE']); {then}",
    )


def over(world: World, code: int = 0, **changes: Any) -> RunFolder:
    """A run that ended, whose keeper was killed before it told anybody."""
    folder = world.prepared(**changes)
    dead = {**process.identify(os.getpid()).as_json(), "began": 1}
    files.write_json(folder.process, {**dead, "keeper": dead, "mark": "x", "attempt": 1})
    folder.console(1).write_text("line 0\n")
    files.write_json(folder.exit(1), {"returncode": code, "stopped": None})
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
    world: World, way: Callable[[RunFolder], None]
) -> None:
    folder = over(world, on_finish=told_by(world))
    if way.__name__.startswith("strangers") and os.geteuid():
        pytest.skip("only root gives files away")
    way(folder)
    done = world.launch("attach", str(folder.path))
    assert f"--on-finish `{sys.executable} -c" in done.stderr and "was not run: " in done.stderr
    assert not (world.root / "told").exists()
    assert done.returncode == 1, "what it came to is shown all the same"
    # nor is what it would train, but for a folder that is the user's own under whatever name
    folder.exit(1).unlink()
    folder.console(1).unlink()
    folder.process.unlink()
    if way is not replaceable:
        refused = world.launch("exec", str(folder.path))
        assert (refused.returncode, "error[not-your-run]" in refused.stderr) == (5, True)
        assert not (world.root / "pids" / "leader").exists()


def test_a_keeper_that_fails_says_so_in_one_line(world: World) -> None:
    folder = world.prepared("exit=0")
    words = [
        sys.executable,
        "-m",
        "launcher.lifecycle.supervisor",
        str(folder.path),
        "1",
        "999",
        "",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (
        1,
        "launch: the supervisor of the run failed: [Errno 9] Bad file descriptor\n",
    )


def test_only_what_was_written_at_the_start_is_started(world: World) -> None:
    folder = world.prepared("pid=leader")
    with pytest.raises(NotReady) as caught:
        supervisor.spawn(folder, 1, digest="another")
    assert caught.value.findings[0].code == "start-changed"
    assert not (world.root / "pids" / "leader").exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["while judging", "before the call", "after the call"])
def test_the_command_at_the_end_is_called_at_least_once(world: World, killed: str) -> None:
    folder = over(world, code=3, on_finish=told_by(world))
    folder.concluded(1).touch()
    if killed != "while judging":
        conclude.finish(folder)
        rundir.mark_judged(folder, 1, notify_pending=killed == "before the call")
    for _ in range(2):
        assert world.launch("attach", "a run").returncode == 4
    assert (world.root / "told").exists() == (killed != "after the call")
    assert killed == "after the call" or (world.root / "told").read_text() == "4"


def test_the_command_at_the_end_finds_the_locks_free(world: World) -> None:
    lock = world.root / "gpu.lock"
    script = (
        f"flock -n {shlex.quote(str(lock))} true; echo $? > {shlex.quote(str(world.root / 'free'))}"
    )
    folder = world.prepared(
        "pid=leader", f"wait={world.root / 'go'}", on_finish=("sh", "-c", script)
    )
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        supervisor.spawn(folder, 1, (held.fileno(),))
    world.pid("leader")
    assert subprocess.run(["flock", "-n", str(lock), "true"]).returncode == 1, "training has it"
    (world.root / "go").touch()
    until((world.root / "free").exists)
    until(lambda: (world.root / "free").read_text() == "0\n")


def test_a_command_at_the_end_has_its_time(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    script = "trap 'echo ended > ended' TERM; sleep 600 & wait; wait"
    folder = over(world, on_finish=("sh", "-c", script), on_finish_s=0.5)
    on_finish.call(folder, attempt.read_attempt(folder), 0)
    assert "it took longer than 0.5 s" in capfd.readouterr().err
    assert (world.root / "ended").exists()


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range({count}):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        if {bare}:
            os.execve(sys.executable, [sys.executable, "-c", {sleep!r}], {{}})
        time.sleep(900)
open("all-started", "w").close()
if {leaves}:
    sys.exit()
time.sleep(900)
"""
SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(900)"


@pytest.mark.parametrize("bare", [False, True], ids=["with their environment", "without"])
def test_of_a_command_whose_time_is_up_nothing_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch, bare: bool
) -> None:
    monkeypatch.setattr(on_finish, "ENDING_S", 0.5)
    before = process.descendants(os.getpid())
    script = STUBBORN.format(count=20 if bare else 150, bare=bare, sleep=SLEEP, leaves=False)
    folder = over(world, on_finish=(sys.executable, "-c", script), on_finish_s=10.0)
    on_finish.call(folder, attempt.read_attempt(folder), 0)
    assert (world.root / "all-started").exists()
    assert not process.descendants(os.getpid()) - before
    assert not world.left() - {os.getpid()}


def test_a_command_that_ends_in_time_may_leave_something_running(world: World) -> None:
    script = STUBBORN.format(count=1, bare=False, sleep=SLEEP, leaves=True)
    folder = over(world, on_finish=(sys.executable, "-c", script), on_finish_s=60.0)
    assert on_finish.call(folder, attempt.read_attempt(folder), 0) == 0
    assert len(world.left()) == 1


def test_a_run_that_a_command_at_the_end_has_started_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_finish, "ENDING_S", 0.5)
    next_run = world.prepared("pid=next", f"wait={world.root / 'go'}", name="next run")
    script = "import pathlib, sys, time\nfrom launcher.lifecycle import supervisor\nfrom launcher.runs import rundir\n"
    script += "supervisor.spawn(rundir.RunFolder(pathlib.Path(sys.argv[1])), 1)\ntime.sleep(900)\n"
    words = ("env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-c", script, str(next_run.path))
    folder = over(world, on_finish=words, on_finish_s=15.0)
    on_finish.call(folder, attempt.read_attempt(folder), 0)
    assert "it took longer than 15 s" in capfd.readouterr().err
    assert living(world.pid("next")) and runner.is_alive(next_run.path)
    (world.root / "go").touch()
    world.quiet()


@pytest.fixture
def server(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    short = tempfile.mkdtemp(prefix="lt-", dir="/tmp")
    monkeypatch.setenv(tools.VARIABLE, str(PATIENCE_S))
    monkeypatch.setenv("TMUX_TMPDIR", short)
    monkeypatch.delenv("TMUX", raising=False)
    yield
    subprocess.run(["tmux", "kill-server"], capture_output=True)
    shutil.rmtree(short, ignore_errors=True)


def screen(session: str) -> str:
    shown = subprocess.run(
        ["tmux", "capture-pane", "-p", "-t", session], capture_output=True, text=True
    )
    return shown.stdout


@pytest.mark.usefixtures("server")
def test_a_session_shows_the_run_stays_with_the_verdict_and_may_die(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tmux expands what is given for a name, and `#(...)` in it is a command
    name = "20260101T000000Z-sft-v1.5 $(touch pwned) `x` ;\"'ü#(touch pwned)#{pid}a.b:c\n"
    folder = world.prepared("pid=leader", f"wait={world.root / 'go'}", "print=1", name=name)
    start.execute(folder)
    leader = world.pid("leader")
    session = background.open_session(folder)
    assert session is not None
    until(lambda: "sft fake" in screen(session))
    subprocess.run(["tmux", "kill-server"], check=True)
    assert living(leader)
    assert background.open_session(folder) == session
    (world.root / "go").touch()
    until(lambda: "press Enter to close" in screen(session))
    assert "verdict: " in screen(session) and folder.console(1).read_text() == "line 0\n"
    # a further attempt gets a session of its own
    assert background.open_session(folder) == session
    until(lambda: "press Enter to close" in screen(session))
    subprocess.run(["tmux", "send-keys", "-t", session, "Enter"], check=True)
    until(lambda: not screen(session))
    assert not list(world.root.rglob("pwned"))
    with monkeypatch.context() as without:
        without.setenv("PATH", str(world.root))
        assert background.open_session(folder) is None


@pytest.mark.slow
def test_what_has_not_begun_is_not_judged(world: World) -> None:
    folder = world.prepared("say=hello")
    for word in ("check", "attach"):
        told = world.launch(word, str(folder.path))
        assert (told.returncode, "error[not-begun]" in told.stderr) == (2, True), told
    assert not folder.verdict.exists()
    assert world.launch("exec", str(folder.path)).returncode != 2
    assert world.launch("check", str(folder.path)).returncode != 2 and folder.verdict.exists()


def test_a_keeper_that_is_killed_in_the_command_at_the_end_has_called_it(world: World) -> None:
    folder = world.prepared("exit=0", on_finish=told_by(world, "import time; time.sleep(2)"))
    start.execute(folder)
    until(lambda: rundir.is_concluded(folder, 1))
    os.kill(kept(folder), signal.SIGKILL)
    world.launch("attach", "a run")
    until((world.root / "told").exists)
    assert (world.root / "told").read_text() == "1"


def test_term_to_the_keeper_reaches_the_command_at_the_end(world: World) -> None:
    script = f"trap 'echo ended > ended; exit 3' TERM; touch {world.root}/up; sleep 600 & wait"
    folder = world.prepared("exit=0", on_finish=("sh", "-c", script))
    start.execute(folder)
    until((world.root / "up").exists)
    os.kill(kept(folder), signal.SIGTERM)
    until((world.root / "ended").exists)
    until(lambda: not runner.has_live_supervisor(folder))
    assert "ended with 3" in folder.supervisor_log.read_text()
