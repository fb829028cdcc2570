"""A run and its supervisor: started, looked at, stopped, orphaned, notified of; by the CLI."""

import fcntl
import json
import os
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
from fake_world import FAKE, LAUNCH, World, open_world, wait_until, wait_until_shown

from launcher import files
from launcher.cli import main
from launcher.errors import NotReady, UsageError
from launcher.lifecycle import background, conclude, on_finish, start, stop, supervisor
from launcher.machine import process, tools
from launcher.runs import attempt, rundir, runner
from launcher.runs.rundir import RunFolder

Capture = pytest.CaptureFixture[str]
PYTHON = sys.executable


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        world.environ["LAUNCH_GRACE"] = "0.5,0.5,0.5"
        for name in ("LAUNCH_RUNS", "XDG_STATE_HOME", "LAUNCH_CACHE", "LAUNCH_GRACE", "FAKE_PIDS"):
            monkeypatch.setenv(name, world.environ[name])
        yield world


def launch(*words: str) -> int:
    """Run a command in this process; its exit code."""
    return main.main(list(words))


def start_run(world: World, *steps: str, **changes: Any) -> RunFolder:
    """A run whose training has begun."""
    folder = world.prepared("pid=leader", *steps, **changes)
    start.execute(folder)
    world.pid("leader")
    return folder


def wait_for_go(world: World) -> str:
    """The step of a fake training that waits for `let_go`."""
    return f"wait={world.root / 'go'}"


def let_go(world: World) -> None:
    (world.root / "go").touch()


def start_viewer(world: World, *words: str) -> subprocess.Popen[bytes]:
    """A command that shows a run, once it does."""
    viewer = world.started(*words)
    wait_until_shown(viewer)
    return viewer


def is_alive(pid: int) -> bool:
    return process.identify(pid).is_alive()


def supervisor_pid(folder: RunFolder) -> int:
    return int(rundir.read_json(folder.process)["keeper"]["pid"])


def kill_supervisor(folder: RunFolder) -> None:
    os.kill(supervisor_pid(folder), signal.SIGKILL)
    wait_until(lambda: not runner.has_live_supervisor(folder))


def run_state(capsys: Capture) -> str:
    """The state of the only run, as `launch runs` prints it."""
    capsys.readouterr()
    launch("runs", "--format", "json")
    (row,) = json.loads(capsys.readouterr().out)["data"]
    return str(row["state"])


# Starting


def test_exec_runs_an_attempt_to_its_end_and_judges_it(world: World) -> None:
    folder = world.prepared("print=3", "exit=0")
    done = world.launch("exec", str(folder.path))
    assert folder.console(1).read_text() == "line 0\nline 1\nline 2\n"
    assert rundir.read_json(folder.exit(1))["returncode"] == 0
    assert rundir.read_json(folder.verdict)["stage"] == "sft"
    assert done.returncode == 1, "nothing was proved"
    assert "verdict: " in done.stdout
    assert folder.report.is_file()

    # what is over is shown, not repeated
    assert launch("exec", str(folder.path)) == 1
    assert folder.attempts() == 1


def test_the_supervisor_outlives_the_launcher(world: World) -> None:
    folder = world.prepared("pid=leader", wait_for_go(world), "print=2", "exit=3")
    running = world.started("exec", str(folder.path), start_new_session=True)
    world.pid("leader")
    wait_until(folder.process.exists)

    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    let_go(world)
    wait_until(folder.verdict.exists)

    assert rundir.read_json(folder.exit(1))["returncode"] == 3
    assert folder.console(1).read_text() == "line 0\nline 1\n"


def test_a_command_that_cannot_be_started_is_an_error(world: World, capsys: Capture) -> None:
    folder = world.prepared(argv=("/no/such/python",))
    assert launch("exec", str(folder.path)) == 5
    assert "error[not-started]" in capsys.readouterr().err
    assert not runner.is_alive(folder.path)


def test_a_folder_without_a_prepared_start_is_refused(world: World, capsys: Capture) -> None:
    folder = world.prepared()
    folder.start.unlink()
    assert launch("exec", "a run") == 5
    assert "not-prepared" in capsys.readouterr().err

    folder.start.write_text('{"number": 1')
    assert launch("exec", "a run") == 5


def test_an_attempt_is_readable_by_its_owner_alone(world: World) -> None:
    environ = {"A": "$(no) `sh`;\n'x'", "B": os.fsdecode(b"\xff\xfe"), "HF_TOKEN": "hf_secret"}
    folder = world.prepared(environ=environ, argv=("a", "ü\n"))
    read = attempt.read_attempt(folder)
    assert read.environ == environ
    assert read.argv == ("a", "ü\n")
    assert stat.S_IMODE(folder.start.stat().st_mode) == 0o600
    for path in folder.path.iterdir():
        assert path == folder.start or b"hf_secret" not in path.read_bytes()


def test_the_environment_is_that_of_the_start(world: World) -> None:
    world.environ["OUTER"] = "then"
    folder = world.prepared("env=OUTER", "env=INNER", "env=LAUNCH_ATTEMPT", env={"INNER": "$(x)"})
    world.launch("exec", "a run", env={"OUTER": "now"}, cwd="/")
    assert folder.console(1).read_text() == "OUTER=then\nINNER=$(x)\nLAUNCH_ATTEMPT=1\n"


def test_only_what_was_written_at_the_start_is_started(world: World) -> None:
    folder = world.prepared("pid=leader")
    with pytest.raises(NotReady) as refused:
        supervisor.spawn(folder, 1, digest="another")
    assert refused.value.findings[0].code == "start-changed"
    assert not (world.root / "pids" / "leader").exists()


def test_a_supervisor_that_fails_says_so_in_one_line(world: World) -> None:
    folder = world.prepared("exit=0")
    words = [PYTHON, "-m", "launcher.lifecycle.supervisor", str(folder.path), "1", "999", ""]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    message = "launch: the supervisor of the run failed: [Errno 9] Bad file descriptor\n"
    assert done.stderr == message


def test_what_has_not_begun_is_not_judged(world: World, capsys: Capture) -> None:
    folder = world.prepared("print=1")
    for word in ("check", "attach"):
        assert launch(word, "a run") == 2
        assert "error[not-begun]" in capsys.readouterr().err
    assert not folder.verdict.exists()

    assert launch("exec", "a run") == 1
    assert launch("check", "a run") == 1


# Orphans


@pytest.mark.slow
def test_a_killed_supervisor_leaves_an_orphan_that_ends_well(world: World, capsys: Capture) -> None:
    notify = append_exit_code(world)
    folder = start_run(world, wait_for_go(world), "print=2", on_finish=notify)
    viewer = start_viewer(world, "attach", "a run")
    kill_supervisor(folder)
    assert run_state(capsys) == "orphaned"

    let_go(world)
    viewer.communicate(timeout=PATIENCE_S)
    launch("attach", "a run")

    assert folder.console(1).read_text() == "line 0\nline 1\n"
    assert folder.verdict.exists()
    assert notified_codes(world) == "1", "once, however many looked on"


# Stopping


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_orphan", "ignored"), [(True, "INT"), (False, "INT,TERM")], ids=["orphan", "stubborn"]
)
def test_stop_ends_every_process(
    world: World, is_orphan: bool, ignored: str, capsys: Capture
) -> None:
    steps = (f"ignore={ignored}", "child=session", "child=group", "sleep=600")
    folder = start_run(world, *steps)
    child = world.pid("child")
    if is_orphan:
        kill_supervisor(folder)

    assert launch("stop", "a r") == 0

    assert not is_alive(world.pid("leader"))
    assert not is_alive(child)
    assert not process.ProcessTree(None, str(folder.path)).living()
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT
    assert run_state(capsys) == "stopped"
    assert folder.verdict.exists()


DAEMON = """
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
@pytest.mark.parametrize("is_stopped", [True, False])
def test_no_process_is_left_whatever_it_has_done_to_hide(world: World, is_stopped: bool) -> None:
    code = DAEMON.format(fake=str(FAKE))
    steps = ("pid=leader", wait_for_go(world), "exit=0")
    folder = start_run(world, argv=(PYTHON, "-c", code, *steps))
    daemon = world.pid("daemon")
    assert os.getsid(daemon) == daemon

    if is_stopped:
        assert launch("stop", "last") == 0
    else:
        let_go(world)
        wait_until(folder.verdict.exists)

    assert not is_alive(daemon)
    assert not is_alive(world.pid("leader"))


def test_a_supervisor_that_hangs_is_killed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = start_run(world, "ignore=INT", "child=session", "sleep=600")
    child = world.pid("child")
    os.kill(supervisor_pid(folder), signal.SIGSTOP)
    monkeypatch.setattr(stop, "_compute_patience_s", lambda _: 0.5)

    ended = stop.stop(folder)

    assert ended is not None
    assert ended.stopped == signal.SIGINT
    for pid in (world.pid("leader"), child, supervisor_pid(folder)):
        assert not is_alive(pid)
    assert folder.verdict.exists()


def test_a_repeated_interrupt_does_not_wait(world: World) -> None:
    world.environ["LAUNCH_GRACE"] = f"{2 * PATIENCE_S},{2 * PATIENCE_S},0.3"
    folder = world.prepared("note=INT,TERM", "pid=leader", "sleep=600")
    viewer = start_viewer(world, "exec", "a run")
    # it is shown before the handlers of the training stand; they stand once its number is written
    world.pid("leader")

    for name in ("SIGINT", "SIGTERM"):
        viewer.send_signal(signal.SIGINT)
        wait_until((world.root / name).exists)
    viewer.send_signal(signal.SIGINT)
    viewer.communicate(timeout=PATIENCE_S)

    ended = rundir.read_json(folder.exit(1))
    assert ended["signal"] == signal.SIGKILL
    assert ended["stopped"] == signal.SIGINT


def test_what_does_not_run_is_not_stopped(world: World, capsys: Capture) -> None:
    folder = run_that_ended(world)
    assert launch("stop", "a run") == 2
    assert "not-running" in capsys.readouterr().err
    assert not folder.stop.exists()
    assert launch("stop", "nobody") == 2


def test_a_reused_number_is_never_killed(world: World) -> None:
    folder = run_that_ended(world)
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        other = {**process.identify(bystander.pid).as_json(), "began": 1}
        files.write_json(folder.process, {**other, "keeper": other, "mark": str(folder.path)})
        assert launch("stop", "a run") == 2
        runner.end_orphans(folder, (0, 0, 0), 1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_stop_says_what_is_lost(world: World, capsys: Capture) -> None:
    start_run(world, "step=37", "sleep=600", output=str(world.root / "out"))
    wait_until((world.runs / "a run" / "probe").exists)
    launch("stop", "last")
    assert "all 37 steps are lost" in capsys.readouterr().out


# Looking


def test_attach_follows_to_the_end_and_leaves_the_run_alone(world: World) -> None:
    start_run(world, wait_for_go(world), "exit=0")
    viewer = start_viewer(world, "attach")
    viewer.send_signal(signal.SIGINT)
    out, _ = viewer.communicate(timeout=PATIENCE_S)
    assert viewer.returncode == 0
    assert b"the run continues" in out
    assert is_alive(world.pid("leader"))

    viewer = start_viewer(world, "attach", "a run")
    let_go(world)
    assert b"verdict: " in viewer.communicate(timeout=PATIENCE_S)[0]


@pytest.fixture
def printed(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., bytes]:
    """What `launch logs` prints of the run."""

    def run_logs(*words: str) -> bytes:
        capfdbinary.readouterr()
        assert launch("logs", "a run", *words) == 0
        return capfdbinary.readouterr().out

    return run_logs


def test_logs_are_printed_without_what_would_steer_a_terminal(
    world: World, printed: Callable[..., bytes]
) -> None:
    log = world.prepared().console(1)
    log.write_bytes(b"one\ntwo\xff\n\x1b[31mthree\rfour\nfive")
    assert printed() == b"one\ntwo\xff\nthree\nfour\nfive"
    assert printed("-n", "1") == b"five"
    assert printed("-n", "2") == b"four\nfive"
    assert printed("-n", "99") == b"one\ntwo\xff\nfour\nfive"

    log.write_bytes(b"x" * 200_000 + b"\n" + b"y" * 70_000 + b"\n")
    assert printed("-n", "1") == b"y" * 70_000 + b"\n"

    # of a progress bar the last lines hold one frame
    log.write_bytes(b"one\n\r1%|#| 1/100\r2%|#| 2/100\ntwo\r\n\r1%|#| 1/100\r2%|#| 2/100")
    assert printed("-n", "3") == b"2%|#| 2/100\ntwo\n2%|#| 2/100"


def test_a_log_that_is_not_there_is_an_error(world: World, capsys: Capture) -> None:
    log = world.prepared().console(1)
    log.touch()
    assert launch("logs", "a run", "--attempt", "7") == 2
    assert "it has 1: launch logs a run --attempt 1" in capsys.readouterr().err

    log.unlink()
    assert launch("logs", "a run") == 2
    assert "launch check a run" in capsys.readouterr().err


def test_following_a_log_ends_with_the_run(world: World) -> None:
    start_run(world, "print=1", wait_for_go(world), "print=2")
    reader = subprocess.Popen([*LAUNCH, "logs", "-f"], stdout=subprocess.PIPE, bufsize=0)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"line 0\n"
    let_go(world)
    assert reader.communicate(timeout=PATIENCE_S)[0] == b"line 0\nline 1\n"


# The command at the end


def append_exit_code(world: World, then: str = "true") -> tuple[str, ...]:
    """A command at the end that notes the exit code of the run with each call."""
    file = world.root / "codes"
    return ("sh", "-c", f'printf "$LAUNCH_FINISHED_CODE" >> {file}; {then}')


def notified_codes(world: World) -> str:
    """The exit codes that the command at the end was called with."""
    file = world.root / "codes"
    return file.read_text() if file.exists() else ""


def run_that_ended(world: World, code: int = 0, **changes: Any) -> RunFolder:
    """A run whose supervisor was killed before it notified anybody."""
    folder = world.prepared(**changes)
    dead = {**process.identify(os.getpid()).as_json(), "began": 1}
    files.write_json(folder.process, {**dead, "keeper": dead, "mark": "x", "attempt": 1})
    folder.console(1).write_text("line 0\n")
    files.write_json(folder.exit(1), {"returncode": code, "stopped": None})
    return folder


def call_command(world: World, *words: str, limit_s: float) -> int | None:
    """Call the command at the end of a run in this process."""
    folder = run_that_ended(world, on_finish=words, on_finish_s=limit_s)
    return on_finish.call(folder, attempt.read_attempt(folder), 0)


def test_the_command_at_the_end_learns_how_the_run_ended(world: World) -> None:
    script = "import os, json; json.dump(dict(os.environ), open('env.json', 'w')); print('sent')"
    folder = world.prepared("exit=7", on_finish=(PYTHON, "-c", script))
    done = world.launch("exec", "a run", cwd="/")

    variables = json.loads((world.root / "env.json").read_text())
    assert process.MARK not in variables
    prefix = "LAUNCH_FINISHED"
    finished = {name: value for name, value in variables.items() if name.startswith(prefix)}
    assert finished == {
        prefix: "a run",
        f"{prefix}_FOLDER": str(folder.path),
        f"{prefix}_STATE": "failed",
        f"{prefix}_STATUS": "fail",
        f"{prefix}_VERDICT": str(folder.verdict),
        f"{prefix}_CODE": str(done.returncode),
    }
    assert "sent" in folder.supervisor_log.read_text()


def test_the_command_at_the_end_is_an_argv_and_no_shell() -> None:
    words = on_finish.parse_command("notify 'a b' $(touch x); `y`")
    assert words == ("notify", "a b", "$(touch", "x);", "`y`")
    for wrong in ("", "  ", "say 'it"):
        with pytest.raises(UsageError):
            on_finish.parse_command(wrong)


def test_the_program_of_the_command_at_the_end_must_exist() -> None:
    on_finish.require_program(("env", "true"))
    with pytest.raises(UsageError, match="no program `notify"):
        on_finish.require_program(("notify-nobody", "x"))


def make_writable(folder: RunFolder) -> None:
    folder.path.chmod(0o775)


def make_start_a_link(folder: RunFolder) -> None:
    folder.start.rename(folder.path / "elsewhere.json")
    folder.start.symlink_to("elsewhere.json")


def make_replaceable(folder: RunFolder) -> None:
    folder.path.parent.chmod(0o777)


def give_away(folder: RunFolder) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(folder.path, 12345, -1)


@pytest.mark.parametrize("expose", [make_writable, make_start_a_link, make_replaceable, give_away])
def test_what_somebody_else_may_have_written_is_not_run(
    world: World, expose: Callable[[RunFolder], None], capsys: Capture
) -> None:
    folder = run_that_ended(world, on_finish=append_exit_code(world))
    expose(folder)

    assert launch("attach", str(folder.path)) == 1, "its result is shown all the same"
    err = capsys.readouterr().err
    assert "--on-finish `sh -c" in err
    assert "was not run: " in err
    assert notified_codes(world) == ""

    # nor is its training; the folder itself is the user's own, under whatever name
    for record in (folder.exit(1), folder.console(1), folder.process):
        record.unlink()
    if expose is not make_replaceable:
        assert launch("exec", str(folder.path)) == 5
        assert "error[not-your-run]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("killed", "expected"),
    [("while judging", "4"), ("before the call", "4"), ("after the call", "")],
)
def test_the_command_at_the_end_is_called_at_least_once(
    world: World, killed: str, expected: str
) -> None:
    folder = run_that_ended(world, code=3, on_finish=append_exit_code(world))
    folder.concluded(1).touch()
    if killed != "while judging":
        conclude.finish(folder)
        rundir.mark_judged(folder, 1, notify_pending=killed == "before the call")

    for _ in range(2):
        assert launch("attach", "a run") == 4

    assert notified_codes(world) == expected


def test_a_supervisor_that_is_killed_in_the_command_at_the_end_has_called_it(world: World) -> None:
    notify = append_exit_code(world, f"touch {world.root}/called; sleep 3")
    folder = world.prepared("exit=0", on_finish=notify)
    start.execute(folder)
    wait_until((world.root / "called").exists)
    # the call is recorded while the command runs
    wait_until(lambda: rundir.is_concluded(folder, 1))
    os.kill(supervisor_pid(folder), signal.SIGKILL)
    launch("attach", "a run")
    assert notified_codes(world) == "1"


def test_the_command_at_the_end_finds_the_locks_free(world: World) -> None:
    lock = world.root / "gpu.lock"
    free = world.root / "free"
    script = f"flock -n {lock} true; echo $? > {free}"
    folder = world.prepared("pid=leader", wait_for_go(world), on_finish=("sh", "-c", script))
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        supervisor.spawn(folder, 1, (held.fileno(),))
    world.pid("leader")
    assert subprocess.run(["flock", "-n", str(lock), "true"]).returncode == 1, "training has it"
    let_go(world)
    wait_until(free.exists)
    wait_until(lambda: free.read_text() == "0\n")


def test_term_to_the_supervisor_reaches_the_command_at_the_end(world: World) -> None:
    begun = world.root / "begun"
    ended = world.root / "ended"
    script = f"trap 'echo ended > {ended}; exit 3' TERM; touch {begun}; sleep 600 & wait"
    folder = world.prepared("exit=0", on_finish=("sh", "-c", script))
    start.execute(folder)
    wait_until(begun.exists)
    os.kill(supervisor_pid(folder), signal.SIGTERM)
    wait_until(ended.exists)
    wait_until(lambda: not runner.has_live_supervisor(folder))
    assert "ended with 3" in folder.supervisor_log.read_text()


# Time limit of the command at the end


@pytest.fixture
def _short_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_finish, "ENDING_S", 0.5)


def test_a_command_whose_time_is_up_is_terminated(world: World, capfd: Capture) -> None:
    script = "trap 'echo ended > ended' TERM; sleep 600 & wait; wait"
    call_command(world, "sh", "-c", script, limit_s=0.5)
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
            os.execve("/bin/sleep", ["sleep", "900"], {{}})
        time.sleep(900)
open("all-started", "w").close()
if {leaves}:
    sys.exit()
time.sleep(900)
"""


@pytest.mark.parametrize("bare", [False, True], ids=["with their environment", "without"])
@pytest.mark.usefixtures("_short_ending")
def test_of_a_command_whose_time_is_up_nothing_is_left(world: World, bare: bool) -> None:
    earlier = process.find_descendants(os.getpid())
    script = STUBBORN.format(count=20, bare=bare, leaves=False)
    call_command(world, PYTHON, "-c", script, limit_s=5.0)
    assert (world.root / "all-started").exists()
    assert not process.find_descendants(os.getpid()) - earlier
    assert not world.left() - {os.getpid()}


def test_a_command_that_ends_in_time_may_leave_something_running(world: World) -> None:
    script = STUBBORN.format(count=1, bare=False, leaves=True)
    assert call_command(world, PYTHON, "-c", script, limit_s=60.0) == 0
    assert len(world.left()) == 1


SPAWN = """
import pathlib, sys, time
from launcher.lifecycle import supervisor
from launcher.runs import rundir
supervisor.spawn(rundir.RunFolder(pathlib.Path(sys.argv[1])), 1)
time.sleep(900)
"""


@pytest.mark.usefixtures("_short_ending")
def test_a_run_that_a_command_at_the_end_has_started_goes_on(world: World, capfd: Capture) -> None:
    next_run = world.prepared("pid=next", wait_for_go(world), name="next run")
    words = ("env", f"PYTHONPATH={REPOSITORY}", PYTHON, "-c", SPAWN, str(next_run.path))
    call_command(world, *words, limit_s=10.0)
    assert "it took longer than 10 s" in capfd.readouterr().err
    assert is_alive(world.pid("next"))
    assert runner.is_alive(next_run.path)
    let_go(world)
    world.quiet()


# Sessions of tmux


@pytest.fixture
def _tmux_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    place = tempfile.mkdtemp(prefix="lt-", dir="/tmp")
    monkeypatch.setenv(tools.VARIABLE, str(PATIENCE_S))
    monkeypatch.setenv("TMUX_TMPDIR", place)
    monkeypatch.delenv("TMUX", raising=False)
    yield
    subprocess.run(["tmux", "kill-server"], capture_output=True)
    shutil.rmtree(place, ignore_errors=True)


def screen(session: str) -> str:
    words = ["tmux", "capture-pane", "-p", "-t", session]
    return subprocess.run(words, capture_output=True, text=True).stdout


def until_shown(session: str, text: str) -> None:
    wait_until(lambda: text in screen(session))


@pytest.mark.usefixtures("_tmux_server")
def test_a_session_shows_the_run_stays_with_the_verdict_and_may_die(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tmux expands a name, and `#(...)` in it is a command
    name = "20260101T000000Z-sft-v1.5 $(touch pwned) `x` ;\"'ü#(touch pwned)#{pid}a.b:c\n"
    folder = start_run(world, wait_for_go(world), "print=1", name=name)
    session = background.open_session(folder)
    assert session is not None
    until_shown(session, "sft fake")

    subprocess.run(["tmux", "kill-server"], check=True)
    assert is_alive(world.pid("leader"))
    assert background.open_session(folder) == session
    let_go(world)
    until_shown(session, "press Enter to close")
    assert "verdict: " in screen(session)
    assert folder.console(1).read_text() == "line 0\n"

    # a further attempt gets a session of its own
    assert background.open_session(folder) == session
    until_shown(session, "press Enter to close")
    subprocess.run(["tmux", "send-keys", "-t", session, "Enter"], check=True)
    wait_until(lambda: not screen(session))
    assert not list(world.root.rglob("pwned"))
    with monkeypatch.context() as without_tmux:
        without_tmux.setenv("PATH", str(world.root))
        assert background.open_session(folder) is None
