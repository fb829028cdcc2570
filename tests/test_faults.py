"""What goes wrong around a run: nothing lost, no process left, a documented exit code."""

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S
from fake_world import (
    LAUNCH,
    World,
    needs_trl,
    open_world,
    read_cmdline,
    wait_until,
    wait_until_shown,
)

from launcher.machine import process
from launcher.runs import lease, rundir, runner
from launcher.runs.rundir import RunFolder

pytestmark = pytest.mark.slow

MIB = 2**20
INTERRUPTED = 130


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        for name in ("LAUNCH_RUNS", "LAUNCH_CACHE", "LAUNCH_GRACE", "FAKE_WORLD", "FAKE_PIDS"):
            monkeypatch.setenv(name, world.environ[name])
        yield world


Mount = Callable[..., Path]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """A file system of 1 MiB in memory; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount_at(path: Path, options: str = "") -> None:
        path.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size=1m{options}", "tmpfs", str(path)]
        try:
            subprocess.run(words, capture_output=True, check=True, timeout=PATIENCE_S)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        mounted.append(path)

    yield mount_at
    for path in reversed(mounted):
        subprocess.run(["umount", "-l", str(path)], check=True)


def ask(world: World, *words: str) -> Any:
    """The data of a command's JSON."""
    return json.loads(world.launch(*words, "--format", "json").stdout)["data"]


def read_state(world: World) -> str:
    rows = ask(world, "runs")
    return str(next(row["state"] for row in rows if row["run"] == "a run"))


def error_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The only error of a command's JSON."""
    findings = json.loads(done.stdout)["findings"]
    (error,) = [finding for finding in findings if finding["severity"] == "error"]
    return error


def run_of(done: subprocess.CompletedProcess[str]) -> RunFolder:
    return RunFolder(Path(json.loads(done.stdout)["data"]["run"]))


def stopped_by(folder: RunFolder) -> object:
    return rundir.read_json(folder.exit(1))["stopped"]


def return_code(folder: RunFolder) -> object:
    return rundir.read_json(folder.exit(1))["returncode"]


def require_whole_files(folder: RunFolder) -> None:
    for path in folder.path.iterdir():
        assert not path.name.startswith((".reserve", ".room", ".exit", ".verdict", ".process"))
        if path.suffix == ".json":
            assert json.loads(path.read_text()), path.name


def in_supervisor(world: World, code: str) -> dict[str, str]:
    """A variable with which every supervisor first runs this code; `{folder}` is its folder."""
    folder = world.root / "hook"
    folder.mkdir()
    condition = "if 'launcher.lifecycle.supervisor' in sys.orig_argv[:4]:\n"
    body = textwrap.indent(code.format(folder=folder), "    ")
    (folder / "sitecustomize.py").write_text(f"import os, sys, time\n{condition}{body}")
    return {"PYTHONPATH": str(folder)}


def train_words(world: World) -> tuple[str, ...]:
    return ("sft", str(world.config()), "--gpus", "0", "--python", str(world.python()))


def test_a_disk_that_fills_with_the_log(world: World, mount: Mount) -> None:
    mount(world.runs)
    folder = world.prepared("print=3", "flood=2", "exit=0")
    assert world.launch("exec", "a run").returncode == 4
    assert return_code(folder) == 1
    points = json.loads(folder.verdict.read_text())["points"]
    finish = next(point for point in points if point["name"] == "finish")
    assert finish["detail"]["reason"] == "disk_full"
    text = folder.console(1).read_text()
    assert text.startswith("line 0\nline 1\nline 2\n")
    assert "No space left on device" in text.splitlines()[-1]
    require_whole_files(folder)
    assert read_state(world) == "failed"
    assert world.quiet()


def test_no_run_begins_on_a_full_disk(world: World, mount: Mount) -> None:
    mount(world.runs)
    folder = world.prepared("pid=leader")
    with pytest.raises(OSError, match="No space"), (world.runs / "filler").open("wb") as stream:
        stream.write(b"x" * 2 * MIB)
    done = world.launch("exec", "a run", "--format", "json")
    assert done.returncode == 5
    error = error_of(done)
    assert error["code"] == "runs-not-writable"
    assert "No space" in error["message"]
    assert not (world.root / "pids" / "leader").exists()
    require_whole_files(folder)


def test_a_run_on_a_full_disk_can_be_stopped(world: World, mount: Mount) -> None:
    mount(world.runs, ",nr_inodes=32")
    folder = world.prepared(f"brimful={world.runs / 'filler'}", "pid=leader", "sleep=600")
    running = world.started("exec", "a run")
    leader = world.pid("leader")
    wait_until(folder.process.exists)
    # until not even an empty file fits
    with pytest.raises(OSError, match="No space"):
        for number in range(40):
            (world.runs / f"file {number}").touch()

    assert world.launch("stop", "a run").returncode == 0
    assert not process.identify(leader).is_alive()
    assert running.wait(PATIENCE_S) == INTERRUPTED
    assert world.quiet()
    assert not folder.stop.exists()


def test_a_training_that_does_not_mind_a_full_disk_goes_on(world: World, mount: Mount) -> None:
    mount(world.runs)
    filler = world.runs / "filler"
    folder = world.prepared("print=3", f"brimful={filler}", "pid=leader", f"wait={world.root}/go")
    running = world.started("exec", "a run")
    world.pid("leader")
    wait_until(folder.process.exists)
    assert read_state(world) == "running"
    (world.root / "go").touch()
    # it ended well, and nothing about it was proved
    assert running.wait(PATIENCE_S) == 1
    assert return_code(folder) == 0
    assert folder.verdict.exists()
    require_whole_files(folder)
    assert read_state(world) == "finished"


LOGS_A_LOT = """
import os, sys
from launcher.probe.watching.process import Console, EventLog, protect_streams
record = EventLog(sys.argv[1], 0)
protect_streams()
for number in range(20000): print('x' * 100)
sys.stdout.flush()
for number in range(50): record.write('step', step=number)
print('y', file=sys.stderr, flush=True)
os.unlink(sys.argv[2])
print('back')
record.write('end', exit=0, lost=Console.lost)
"""


def test_a_log_without_room_costs_nothing_of_the_record(world: World, mount: Mount) -> None:
    mount(world.runs)
    filler = world.runs / "filler"
    filler.write_bytes(b"x" * 100_000)
    log = world.runs / "console.log"
    with log.open("ab") as stream:
        done = subprocess.run(
            [sys.executable, "-c", LOGS_A_LOT, str(world.runs / "probe"), str(filler)],
            stdout=stream, stderr=subprocess.PIPE, text=True, env=world.environ,
        )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == "y\n"
    assert log.read_text().endswith("back\n")
    lines = (world.runs / "probe" / "rank-0.jsonl").read_text().splitlines()
    *steps, end = map(json.loads, lines)
    assert [event["step"] for event in steps] == list(range(50))
    assert end["lost"] > 1_000_000


def truncate(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("change", [Path.unlink, truncate])
def test_a_log_that_is_removed_or_truncated_is_followed(
    world: World, change: Callable[[Path], None]
) -> None:
    folder = world.prepared("print=100", "pid=leader", f"wait={world.root}/go", "print=3")
    keeping = world.started("exec", "a run")
    world.pid("leader")
    reading = world.started("logs", "a run", "-f")
    looking = world.started("attach", "a run")
    wait_until_shown(looking)
    expected = b"".join(b"line %d\n" % number for number in range(100))
    assert reading.stdout is not None
    text = b""
    while len(text) < len(expected):
        text += os.read(reading.stdout.fileno(), 65536)
    assert text == expected

    change(folder.console(1))
    # what follows is shorter than what was read, so that a reader notices whenever it looks
    (world.root / "go").touch()
    assert reading.communicate(timeout=PATIENCE_S)[0] == b"line 0\nline 1\nline 2\n"
    assert b"verdict: " in looking.communicate(timeout=PATIENCE_S)[0]
    keeping.communicate(timeout=PATIENCE_S)
    assert reading.returncode == 0
    assert looking.returncode == keeping.returncode == 1


def test_a_verdict_counts_by_its_content_and_not_by_its_time(world: World) -> None:
    folder = world.prepared("exit=0")
    assert world.launch("exec", "a run").returncode == 1
    # as if the clock had been set back between the end and the verdict
    os.utime(folder.verdict, (1, 1))
    assert rundir.is_judged(folder, 1)

    # the supervisor of a further attempt is killed before it judges, and the old verdict is newer
    world.prepared("raise=no", number=2)
    assert world.launch("exec", "a run").returncode == 4
    folder.verdict.write_text(json.dumps({**rundir.read_json(folder.verdict), "steps": 77}))
    in_ten_years = time.time() + 10 * 365 * 86400
    os.utime(folder.verdict, (in_ten_years, in_ten_years))
    assert ask(world, "attach", "a run")["steps"] != 77


HOLDS_A_LOCK = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(); input()"


def test_a_lock_is_held_while_its_holder_lives(world: World) -> None:
    folder = world.prepared("exit=0")
    stranger = subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_LOCK, str(folder.lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert stranger.stdout is not None
    stranger.stdout.readline()
    done = world.launch("exec", "a run", "--format", "json")
    assert done.returncode == 5
    assert error_of(done)["code"] == "run-is-live"

    stranger.kill()
    stranger.communicate()
    assert folder.lock.exists()
    assert not lease.is_locked(folder.lock)
    assert world.launch("exec", "a run").returncode == 1


def test_a_supervisor_stops_its_run_on_term_and_not_on_hup(world: World) -> None:
    folder = world.prepared("child=session", "pid=leader", "sleep=600")
    running = world.started("exec", "a run")
    leader = world.pid("leader")
    child = world.pid("child")
    wait_until_shown(running)
    supervisor = int(rundir.read_json(folder.process)["keeper"]["pid"])
    os.kill(supervisor, signal.SIGHUP)
    os.kill(running.pid, signal.SIGHUP)
    time.sleep(0.5)
    assert process.identify(leader).is_alive()
    assert running.poll() is None

    os.kill(supervisor, signal.SIGTERM)
    assert running.wait(PATIENCE_S) == INTERRUPTED
    assert not process.identify(child).is_alive()
    assert stopped_by(folder) == signal.SIGTERM
    assert folder.verdict.exists()
    assert world.quiet()


@needs_trl
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_start_that_is_cut_short_is_no_run(world: World, number: int) -> None:
    hook = in_supervisor(world, "open('{folder}/begun', 'w').close()\ntime.sleep(600)\n")
    steps = json.dumps(["pid=leader", "sleep=600"])
    running = world.started(*train_words(world), env={**hook, "FAKE_STEPS": steps})
    wait_until((world.root / "hook" / "begun").exists)
    running.send_signal(number)
    if number == signal.SIGKILL:
        assert running.wait(PATIENCE_S) == -signal.SIGKILL
    else:
        assert running.wait(PATIENCE_S) == INTERRUPTED
        assert world.quiet()
        assert not list(world.runs.iterdir())
    assert ask(world, "runs") == []
    assert not (world.root / "pids" / "leader").exists()


def read_files(folder: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}


@needs_trl
def test_a_second_start_that_is_cut_short_leaves_the_run_as_it_was(world: World) -> None:
    words = (str(world.config()), "--format", "json")
    folder = run_of(world.trained(*words, steps=("exit=3",)))
    before = read_files(folder)
    refused = world.trained(*words, "max_steps=7", env=in_supervisor(world, "os._exit(9)\n"))
    assert error_of(refused)["code"] == "no-keeper"
    assert read_files(folder) == before


@needs_trl
def test_a_checkpoint_with_other_bytes_is_not_resumed_from(world: World) -> None:
    output = world.root / "out"
    words = (str(world.config()), "save_strategy=steps", "save_steps=4", "--format", "json")
    saves = (f"checkpoint={output}:4", f"checkpoint={output}:8")
    folder = run_of(world.trained(*words, steps=(*saves, "exit=3")))
    damaged = output / "checkpoint-8" / "optimizer.pt"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    done = world.trained(*words, steps=("exit=3",))
    findings = json.loads(done.stdout)["findings"]
    (message,) = [f["message"] for f in findings if f["code"] == "damaged-checkpoint"]
    assert "checkpoint-8" in message
    assert "optimizer.pt" in message
    assert rundir.read_json(folder.manifest)["resume"]["checkpoint"] == "checkpoint-4"


@needs_trl
def test_a_job_that_cannot_be_submitted_is_no_run(world: World) -> None:
    sbatch = world.root / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    path = {"PATH": f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}"}
    done = world.trained(str(world.config()), "--slurm", "--format", "json", env=path)
    assert done.returncode == 5
    error = error_of(done)
    assert error["code"] == "slurm-failed"
    assert "invalid partition" in error["message"]
    assert not list(world.runs.iterdir())


def test_a_stop_while_the_run_starts(world: World) -> None:
    waits = "open('{folder}/begun', 'w').close()\n"
    waits += "while not os.path.exists('{folder}/go'): time.sleep(0.01)\n"
    hook = in_supervisor(world, waits)
    folder = world.prepared("pid=leader", "sleep=600")
    running = world.started("exec", "a run", env=hook)
    wait_until((world.root / "hook" / "begun").exists)
    assert not folder.process.exists()
    stopping = world.started("stop", "a run")
    wait_until(folder.stop.exists)
    (world.root / "hook" / "go").touch()
    assert stopping.wait(PATIENCE_S) == 0
    assert running.wait(PATIENCE_S) == INTERRUPTED
    assert stopped_by(folder) == signal.SIGINT
    assert world.quiet()


def test_a_request_to_stop_what_never_began_does_not_stop_the_next(world: World) -> None:
    folder = world.prepared("exit=0")
    with runner.lock_run(folder, 1, None):
        stopping = world.started("stop", "a run")
        wait_until(folder.stop.exists)
    assert stopping.wait(PATIENCE_S) == 0
    assert not folder.stop.exists()
    assert world.launch("exec", "a run").returncode == 1
    assert stopped_by(folder) is None


@needs_trl
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_however_soon_it_comes(world: World, number: int) -> None:
    steps = json.dumps(["child=session", "pid=leader", "sleep=600"])
    running = world.started(*train_words(world), env={"FAKE_STEPS": steps})
    # the supervisor may not have reported yet that the training has begun
    wait_until((world.root / "pids" / "leader").exists)
    running.send_signal(number)
    assert running.wait(PATIENCE_S) == INTERRUPTED
    assert world.quiet()
    (row,) = ask(world, "runs")
    assert row["state"] == "stopped"


def run_shell(
    world: World, line: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    function = f'launch() {{ {" ".join(LAUNCH)} "$@"; }}'
    return subprocess.run(
        ["bash", "-c", f"{function}; {line}"], cwd=world.root, text=True,
        env={**world.environ, **(variables or {})}, capture_output=True, timeout=PATIENCE_S,
    )  # fmt: skip


@needs_trl
def test_a_reader_that_leaves_at_once_neither_ends_the_run_nor_changes_its_exit_code(
    world: World,
) -> None:
    variables = {"FAKE_STEPS": '["print=3", "exit=0"]', "CONFIG": str(world.config())}
    command = f'launch sft --allow-unproven --python {world.python()} --gpus 0 "$CONFIG"'
    done = run_shell(world, f"set -o pipefail; {command} 2>&1 | true; echo $?", variables)
    assert done.stdout == "0\n"
    assert done.stderr == ""
    (path,) = world.runs.iterdir()
    assert (path / "console.log").read_text() == "line 0\nline 1\nline 2\n"
    assert rundir.is_judged(RunFolder(path), 1)


def test_streams_that_are_closed(world: World) -> None:
    closed = "<&- >&- 2>&-"
    folder = world.prepared("pid=leader", f"wait={world.root}/go", "stdin=", "exit=0")
    running = subprocess.Popen(
        ["bash", "-c", f"{' '.join(LAUNCH)} exec 'a run' {closed}"],
        cwd=world.root, env=world.environ, start_new_session=True,
    )  # fmt: skip
    world.pid("leader")
    # the launcher is killed; the training and its supervisor hold the lock all the same
    launcher = next(pid for pid in world.left() if b"exec\0a run\0" in read_cmdline(pid))
    os.kill(launcher, signal.SIGKILL)
    wait_until(lambda: not process.identify(launcher).is_alive())
    assert lease.is_locked(folder.lock)
    (world.root / "go").touch()
    running.wait(PATIENCE_S)
    wait_until(lambda: rundir.is_judged(folder, 1))
    assert return_code(folder) == 0
    assert folder.console(1).read_text() == "stdin: ''\n"

    done = run_shell(world, f"launch attach 'a run' {closed}")
    assert done.returncode == 1
    assert done.stderr == ""
    assert run_shell(world, f"launch logs 'a run' {closed}").returncode == 0


ODD = 'it\'s "q" -new\nline ü-文-🙂$(touch pwned)`touch pwned`;#(touch pwned)'


@needs_trl
def test_names_of_every_kind(world: World) -> None:
    root = world.root / ODD
    root.mkdir()
    config = world.config(f"{ODD}/{ODD}.yaml", output_dir=f"out {ODD}")
    for name in ("model", "data"):
        (world.root / name).rename(root / name)
    place = {"cwd": root, "env": {"LAUNCH_RUNS": str(root / "runs" / ODD)}}
    writes = (sys.executable, "-c", "import sys; open('argument', 'w').write(sys.argv[1])", ODD)
    words = ("--format", "json", "--on-finish", shlex.join(writes), "--", config.name)
    done = world.trained(*words, f"run_name=x{ODD}", steps=("print=2", "step=1", "exit=0"), **place)
    assert done.returncode == 1, done.stderr
    folder = run_of(done)
    assert folder.path.parent == root / "runs" / ODD
    assert folder.console(1).read_text() == "line 0\nline 1\n"
    assert rundir.read_manifest(folder).output == root / f"out {ODD}"
    argv = json.loads((world.root / "argv.json").read_text())
    assert argv[argv.index("--run_name") + 1] == f"x{ODD}"
    assert argv[argv.index("--output_dir") + 1] == f"out {ODD}"
    assert (root / "argument").read_text() == ODD

    (row,) = json.loads(world.launch("runs", "--format", "json", **place).stdout)["data"]
    assert row["run"] == folder.path.name
    assert row["state"] == "finished"
    assert row["step"] == 1
    assert world.launch("logs", "last", **place).stdout == "line 0\nline 1\n"
    assert world.launch("attach", "--", str(folder.path), **place).returncode == 1
    assert world.quiet()
    assert not list(world.root.rglob("pwned"))
    assert not list(Path.cwd().glob("pwned"))


@needs_trl
def test_nobody_else_may_write_a_run_whatever_the_umask(world: World) -> None:
    done = world.trained(str(world.config()), "--format", "json", steps=("exit=0",), umask=0)
    folder = run_of(done)
    for path in (world.runs, folder.path, folder.start):
        assert not path.stat().st_mode & 0o022, path
