"""What goes wrong around a run, done for real: nothing lost, nobody left behind, a documented exit code."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S
from fake_world import LAUNCH, World, cmdline, looks_on, made, needs_trl, until

from launcher.machine import process
from launcher.runs import lease, rundir, runner
from launcher.runs.rundir import RunFolder

pytestmark = pytest.mark.slow

MIB = 2**20


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with made(tmp_path / "world") as world:
        for name in ("LAUNCH_RUNS", "LAUNCH_CACHE", "LAUNCH_GRACE", "FAKE_WORLD", "FAKE_PIDS"):
            monkeypatch.setenv(name, world.environ[name])
        yield world


Mount = Callable[[Path, str], Path]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """A file system of its own, in memory; skips where that is not allowed."""
    mounted = []

    def mounting(path: Path, options: str) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
            why = done.stderr.strip() if done.returncode else None
        except OSError as error:
            why = str(error)
        if why is not None:
            pytest.skip(f"no file system can be mounted here: {why}")
        mounted.append(path)
        return path

    yield mounting
    for path in reversed(mounted):
        subprocess.run(["umount", "-l", str(path)], check=True)


def state(world: World, name: str = "a run") -> str:
    rows = json.loads(world.launch("runs", "--format", "json").stdout)["data"]
    return str(next(row["state"] for row in rows if row["run"] == name))


def finish(folder: RunFolder) -> dict[str, Any]:
    points = json.loads(folder.verdict.read_text())["points"]
    found: dict[str, Any] = next(point for point in points if point["name"] == "finish")
    return found


def whole(folder: RunFolder) -> None:
    for path in folder.path.iterdir():
        assert not path.name.startswith((".reserve", ".room", ".exit", ".verdict", ".process"))
        if path.suffix == ".json":
            assert json.loads(path.read_text()), path.name


def test_a_disk_that_fills_with_the_log(world: World, mount: Mount) -> None:
    mount(world.runs, "size=1m")
    folder = world.prepared("print=3", "flood=2", "exit=0")
    done = world.launch("exec", "a run")
    assert done.returncode == 4
    assert rundir.read_json(folder.exit(1))["returncode"] == 1
    assert finish(folder)["detail"]["reason"] == "disk_full"
    text = folder.console(1).read_text()
    assert text.startswith("line 0\nline 1\nline 2\n")
    assert "No space left on device" in text.splitlines()[-1]
    whole(folder)
    assert state(world) == "failed"
    assert world.quiet()


def test_no_run_begins_on_a_disk_that_is_full(world: World, mount: Mount) -> None:
    mount(world.runs, "size=1m")
    folder = world.prepared("pid=leader")
    with pytest.raises(OSError, match="No space"), (world.runs / "filler").open("wb") as stream:
        stream.write(b"x" * 2 * MIB)
    done = world.launch("exec", "a run", "--format", "json")
    assert done.returncode == 5
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["code"], "No space" in finding["message"]) == ("runs-not-writable", True)
    assert not (world.root / "pids" / "leader").exists()
    whole(folder)


def test_a_run_on_a_full_disk_can_be_stopped(world: World, mount: Mount) -> None:
    mount(world.runs, "size=1m,nr_inodes=32")
    folder = world.prepared(
        f"brimful={world.runs / 'filler'}", "pid=leader", "sleep=600", name="a run"
    )
    running = world.started("exec", "a run")
    leader = world.pid("leader")
    until(folder.process.exists)
    for number in range(40):
        # not even an empty file fits any more
        with pytest.MonkeyPatch.context(), open(os.devnull):
            try:
                (world.runs / f"file {number}").touch()
            except OSError:
                break
    assert world.launch("stop", "a run").returncode == 0
    assert not process.identify(leader).is_alive()
    assert running.wait(PATIENCE_S) == 130
    assert world.quiet()
    assert not folder.stop.exists()


@pytest.mark.parametrize("how", ["removed", "truncated"])
def test_a_log_that_is_changed_is_followed(world: World, how: str) -> None:
    folder = world.prepared("print=100", "pid=leader", f"wait={world.root}/go", "print=3")
    keeping = world.started("exec", "a run")
    world.pid("leader")
    reading, looking = world.started("logs", "a run", "-f"), world.started("attach", "a run")
    looks_on(looking)
    first, lines = b"", b"".join(b"line %d\n" % number for number in range(100))
    assert reading.stdout is not None
    while len(first) < len(lines):
        first += os.read(reading.stdout.fileno(), 65536)
    assert first == lines
    log = folder.console(1)
    if how == "removed":
        log.unlink()
    else:
        os.truncate(log, 0)
    # what comes is shorter than what was read: a reader sees that whenever it looks
    (world.root / "go").touch()
    assert reading.communicate(timeout=PATIENCE_S)[0] == b"line 0\nline 1\nline 2\n"
    assert b"verdict: " in looking.communicate(timeout=PATIENCE_S)[0]
    keeping.communicate(timeout=PATIENCE_S)
    assert (reading.returncode, looking.returncode, keeping.returncode) == (0, 1, 1)


AHEAD = time.time() + 10 * 365 * 86400


def test_a_verdict_is_known_by_what_it_is_and_not_by_its_time(world: World) -> None:
    folder = world.prepared("exit=0")
    assert world.launch("exec", "a run").returncode == 1
    assert rundir.is_judged(folder, 1)
    os.utime(folder.verdict, (1, 1))
    assert rundir.is_judged(folder, 1), "the clock was set back between the end and the verdict"
    # a further attempt fails, its keeper is killed before it judges: the old verdict is not its own
    os.utime(folder.verdict, (AHEAD, AHEAD))
    world.prepared("raise=no", number=2)
    assert world.launch("exec", "a run").returncode == 4
    folder.verdict.write_text(json.dumps({**rundir.read_json(folder.verdict), "steps": 77}))
    os.utime(folder.verdict, (AHEAD, AHEAD))
    done = world.launch("attach", "a run", "--format", "json")
    assert json.loads(done.stdout)["data"]["steps"] != 77


def test_a_lock_of_the_dead_is_free_and_one_of_a_stranger_is_not(world: World) -> None:
    folder = world.prepared("exit=0")
    holding = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(); input()"
    stranger = subprocess.Popen(
        [sys.executable, "-c", holding, str(folder.lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert stranger.stdout is not None
    stranger.stdout.readline()
    assert lease.is_locked(folder.lock)
    done = world.launch("exec", "a run", "--format", "json")
    assert done.returncode == 5
    assert [f["code"] for f in json.loads(done.stdout)["findings"]] == ["run-is-live"]
    stranger.kill()
    stranger.communicate()
    assert folder.lock.exists()
    assert not lease.is_locked(folder.lock)
    assert world.launch("exec", "a run").returncode == 1


def kept(folder: RunFolder) -> int:
    return int(rundir.read_json(folder.process)["keeper"]["pid"])


def test_a_keeper_stops_its_run_on_term_and_not_on_hup(world: World) -> None:
    folder = world.prepared("child=session", "pid=leader", "sleep=600")
    running = world.started("exec", "a run")
    leader, child = world.pid("leader"), world.pid("child")
    looks_on(running)
    for victim in (kept(folder), running.pid):
        os.kill(victim, signal.SIGHUP)
    time.sleep(0.5)
    assert process.identify(leader).is_alive()
    assert running.poll() is None
    os.kill(kept(folder), signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 130
    assert not process.identify(child).is_alive()
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGTERM
    assert folder.verdict.exists()
    assert world.quiet()


@needs_trl
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_start_that_is_cut_short_is_no_run(world: World, number: int) -> None:
    slow = world.root / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import sys, time\n"
        "if 'launcher.lifecycle.supervisor' in sys.orig_argv[:4]:\n"
        f"    open({str(slow / 'keeper')!r}, 'w').close()\n"
        "    time.sleep(600)\n"
    )
    env = {"PYTHONPATH": str(slow), "FAKE_STEPS": json.dumps(["pid=leader", "sleep=600"])}
    words = ("sft", str(world.config()), "--gpus", "0", "--python", str(world.python()))
    running = world.started(*words, env=env)
    until((slow / "keeper").exists)
    running.send_signal(number)
    assert running.wait(PATIENCE_S) == (-number if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert world.quiet()
        assert not list(world.runs.iterdir())
    assert json.loads(world.launch("runs", "--format", "json").stdout)["data"] == []
    assert not (world.root / "pids" / "leader").exists()


@needs_trl
def test_a_second_start_that_is_cut_short_leaves_the_run_as_it_was(world: World) -> None:
    words = (str(world.config()), "--format", "json")
    done = world.trained(*words, steps=("exit=3",))
    folder = RunFolder(Path(json.loads(done.stdout)["data"]["run"]))
    slow = world.root / "slow"
    slow.mkdir()
    broken = (
        "import os, sys\nif 'launcher.lifecycle.supervisor' in sys.orig_argv[:4]: os._exit(9)\n"
    )
    (slow / "sitecustomize.py").write_text(broken)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    refused = world.trained(*words, "max_steps=7", env={"PYTHONPATH": str(slow)})
    assert [f["code"] for f in json.loads(refused.stdout)["findings"]] == ["no-keeper"]
    after = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    assert after == before


@needs_trl
def test_a_job_that_cannot_be_submitted_is_no_run(world: World) -> None:
    sbatch = world.root / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    path = {"PATH": f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}"}
    done = world.trained(str(world.config()), "--slurm", "--format", "json", env=path)
    (finding,) = (f for f in json.loads(done.stdout)["findings"] if f["severity"] == "error")
    assert (done.returncode, finding["code"]) == (5, "slurm-failed")
    assert "invalid partition" in finding["message"]
    assert not list(world.runs.iterdir())
    assert world.launch("attach", "last").returncode == 2


def test_a_stop_while_it_starts(world: World) -> None:
    slow = world.root / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if 'launcher.lifecycle.supervisor' in sys.orig_argv:\n"
        f"    open({str(slow / 'keeper')!r}, 'w').close()\n"
        f"    while not os.path.exists({str(slow / 'go')!r}): time.sleep(0.01)\n"
    )
    folder = world.prepared("pid=leader", "sleep=600")
    running = world.started("exec", "a run", env={"PYTHONPATH": str(slow)})
    until((slow / "keeper").exists)
    assert not folder.process.exists()
    stopping = world.started("stop", "a run")
    until(folder.stop.exists)
    (slow / "go").touch()
    assert (stopping.wait(PATIENCE_S), running.wait(PATIENCE_S)) == (0, 130)
    assert rundir.read_json(folder.exit(1))["stopped"] == signal.SIGINT
    assert world.quiet()


def test_a_request_to_stop_what_never_began_is_not_meant_for_the_next(world: World) -> None:
    folder = world.prepared("exit=0")
    with runner.lock_run(folder, 1, None):
        stopping = world.started("stop", "a run")
        until(folder.stop.exists)
    assert stopping.wait(PATIENCE_S) == 0
    assert not folder.stop.exists()
    assert world.launch("exec", "a run").returncode == 1
    assert rundir.read_json(folder.exit(1))["stopped"] is None


def shell(world: World, line: str, **more: str) -> subprocess.CompletedProcess[str]:
    words = " ".join(LAUNCH)
    return subprocess.run(
        ["bash", "-c", f'launch() {{ {words} "$@"; }}; {line}'], cwd=world.root, text=True,
        env={**world.environ, **more}, capture_output=True, timeout=PATIENCE_S,
    )  # fmt: skip


@needs_trl
def test_a_reader_that_leaves_before_it_begins(world: World) -> None:
    # whoever wants to see one line only wants the run all the same, and its exit code
    more = {"FAKE_STEPS": '["print=3", "exit=0"]', "CONFIG": str(world.config())}
    words = f'{world.python()} --gpus 0 "$CONFIG"'
    line = f"set -o pipefail; launch sft --allow-unproven --python {words} 2>&1 | true; echo $?"
    done = shell(world, line, **more)
    assert (done.stdout, done.stderr) == ("0\n", "")
    (folder,) = (RunFolder(path) for path in world.runs.iterdir())
    assert folder.console(1).read_text() == "line 0\nline 1\nline 2\n"
    assert rundir.is_judged(folder, 1)


def test_streams_that_are_closed(world: World) -> None:
    closed = "<&- >&- 2>&-"
    folder = world.prepared("pid=leader", f"wait={world.root}/go", "stdin=", "exit=0")
    running = subprocess.Popen(
        ["bash", "-c", f"{' '.join(LAUNCH)} exec 'a run' {closed}; echo $? > code"],
        cwd=world.root, env=world.environ, start_new_session=True,
    )  # fmt: skip
    world.pid("leader")
    # its launcher is killed: training and keeper hold the lock, whatever was closed
    launcher = next(p for p in world.left() if b"exec\0a run\0" in cmdline(p))
    os.kill(launcher, signal.SIGKILL)
    until(lambda: not process.identify(launcher).is_alive())
    assert lease.is_locked(folder.lock)
    (world.root / "go").touch()
    running.wait(PATIENCE_S)
    until(lambda: rundir.is_judged(folder, 1))
    assert rundir.read_json(folder.exit(1))["returncode"] == 0
    assert folder.console(1).read_text() == "stdin: ''\n"
    done = shell(world, f"launch attach 'a run' {closed}")
    assert (done.returncode, done.stderr) == (1, "")
    assert shell(world, f"launch logs 'a run' {closed}").returncode == 0


HALVES = ["run.json", "start.json", "process.json", "verdict.json", "probe/rank-0.jsonl"]


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with made(tmp_path_factory.mktemp("complete") / "world") as world:
        folder = world.prepared("print=3", "step=1", "step=2", "exit=0")
        assert world.launch("exec", "a run").returncode == 1
        runner.StopRequest(attempt=1).write(folder)
        assert {name for name in HALVES if not (folder.path / name).is_file()} == set()
        return folder.path


@pytest.mark.parametrize("name", HALVES)
def test_a_half_written_file(world: World, complete: Path, name: str) -> None:
    for run, keep in (("none of it", 0.0), ("half of it", 0.5)):
        place = world.runs / run
        shutil.copytree(complete, place)
        raw = (place / name).read_bytes()
        (place / name).write_bytes(raw[: int(len(raw) * keep)])
    # in one process: each command would import anew
    script = (
        "import sys\nfrom launcher.cli import main as cli\n"
        "for line in sys.argv[1:]: print('\\nCODE %s' % cli.main(line.split('/')))\n"
    )
    commands = ("check", "attach", "logs", "stop", "report", "report/--format/json", "cache/why")
    lines = [f"{command}/{run}" for command in commands for run in ("none of it", "half of it")]
    done = subprocess.run(
        [sys.executable, "-c", script, *lines, "runs"], env=world.environ, capture_output=True,
        text=True, cwd=world.root, timeout=PATIENCE_S, errors="replace",
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    codes = [int(line[5:]) for line in done.stdout.splitlines() if line.startswith("CODE")]
    assert len(codes) == len(lines) + 1
    assert set(codes) <= {0, 1, 2, 4, 5}, done.stdout
    assert codes[-1] == 0
    assert not list((world.root / "state").rglob("bug*"))


ODD = 'it\'s "q" -new\nline ü-文-🙂$(touch pwned)`touch pwned`;#(touch pwned)'


@needs_trl
def test_names_of_every_kind(world: World) -> None:
    odd = ODD
    root = world.root / odd
    root.mkdir()
    config = world.config(f"{odd}/{odd}.yaml", output_dir=f"out {odd}")
    for name in ("model", "data"):
        (world.root / name).rename(root / name)
    runs = root / "runs" / odd
    words = (sys.executable, "-c", "import os, sys; open('told', 'w').write(sys.argv[1])", odd)
    done = world.trained(
        "--format", "json", "--on-finish", shlex.join(words), "--", config.name, f"run_name=x{odd}",
        steps=("print=2", "step=1", "exit=0"), cwd=root, env={"LAUNCH_RUNS": str(runs)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    folder = RunFolder(Path(json.loads(done.stdout)["data"]["run"]))
    assert folder.path.parent == runs
    assert folder.console(1).read_text() == "line 0\nline 1\n"
    manifest = rundir.read_manifest(folder)
    assert manifest["output"] == str(root / f"out {odd}")
    argv = json.loads((world.root / "argv.json").read_text())
    assert argv[argv.index("--run_name") + 1] == f"x{odd}"
    assert argv[argv.index("--output_dir") + 1] == f"out {odd}"
    assert (root / "told").read_text() == odd
    at = {"cwd": root, "env": {"LAUNCH_RUNS": str(runs)}}
    name = folder.path.name
    rows = json.loads(world.launch("runs", "--format", "json", **at).stdout)["data"]
    assert [(row["run"], row["state"], row["step"]) for row in rows] == [(name, "finished", 1)]
    assert world.launch("logs", "last", **at).stdout == "line 0\nline 1\n"
    assert world.launch("attach", "--", str(folder.path), **at).returncode == 1
    # into the same folder again: a further attempt of the same run
    again = world.trained(
        "--format", "json", "--", config.name, f"run_name=x{odd}", steps=("exit=3",), cwd=root,
        env={"LAUNCH_RUNS": str(runs)},
    )  # fmt: skip
    assert again.returncode in {0, 4}, again.stderr
    assert world.quiet()
    assert not list(world.root.rglob("pwned"))
    assert not list(Path.cwd().glob("pwned"))


@needs_trl
def test_the_exit_codes_from_end_to_end(world: World) -> None:
    config = str(world.config())

    def code(*words: str, steps: tuple[str, ...] = ()) -> int:
        return int(world.trained(*words, steps=steps).returncode)

    assert code(config, steps=("exit=0",)) == 1
    assert code(config, "--allow-unproven", "output_dir=out0", steps=("exit=0",)) == 0
    assert code(config, "--no-such-option") == 2
    assert code(config, "learning_rte=1") == 3
    assert code(config, "output_dir=out4", steps=("raise=no",)) == 4
    world.environ["LAUNCH_RUNS"] = "/dev/null/runs"
    assert code(config, "output_dir=out5") == 5
    world.environ["LAUNCH_RUNS"] = str(world.root / "runs")
    env = {"FAKE_STEPS": json.dumps(["child=session", "pid=leader", "sleep=600"])}
    words = ("sft", config, "output_dir=out6", "--gpus", "0", "--python", str(world.python()))
    running = world.started(*words, env=env)
    child, leader = world.pid("child"), world.pid("leader")
    looks_on(running)
    running.send_signal(signal.SIGINT)
    assert running.wait(PATIENCE_S) == 130
    assert not process.identify(leader).is_alive()
    assert not process.identify(child).is_alive()
    assert world.quiet()


@needs_trl
def test_nobody_else_may_write_a_run_whatever_the_umask(world: World) -> None:
    umask = 0
    done = world.trained(str(world.config()), "--format", "json", steps=("exit=0",), umask=umask)
    folder = RunFolder(Path(json.loads(done.stdout)["data"]["run"]))
    for path in (world.runs, folder.path, folder.start):
        assert not path.stat().st_mode & 0o022, path


def test_a_training_that_does_not_mind_a_full_disk_goes_on(world: World, mount: Mount) -> None:
    mount(world.runs, "size=1m")
    filler = world.runs / "filler"
    folder = world.prepared("print=3", f"brimful={filler}", "pid=leader", f"wait={world.root}/go")
    running = world.started("exec", "a run")
    world.pid("leader")
    until(folder.process.exists)
    assert state(world) == "running"
    (world.root / "go").touch()
    assert running.wait(PATIENCE_S) == 1, "nothing is proved of it, and it ended well"
    assert rundir.read_json(folder.exit(1))["returncode"] == 0
    assert folder.verdict.exists()
    whole(folder)
    assert state(world) == "finished"


def test_a_log_without_room_does_not_end_the_training(world: World, mount: Mount) -> None:
    mount(world.runs, "size=1m")
    script = (
        "import sys, os\n"
        "from launcher.probe.watching.process import Console, EventLog, spare_streams\n"
        "record = EventLog(sys.argv[1], 0)\n"
        "spare_streams()\n"
        "for number in range(20000): print('x' * 100)\n"
        "sys.stdout.flush()\n"
        "for number in range(50): record.write('step', step=number)\n"
        "print('y', file=sys.stderr, flush=True)\n"
        "os.unlink(sys.argv[2])\n"
        "print('back')\n"
        "record.write('end', exit=0, lost=Console.lost)\n"
    )
    filler, log = world.runs / "filler", world.runs / "console.log"
    filler.write_bytes(b"x" * 100_000)
    with log.open("ab") as stream:
        done = subprocess.run(
            [sys.executable, "-c", script, str(world.runs / "probe"), str(filler)],
            stdout=stream, stderr=subprocess.PIPE, text=True, env=world.environ,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "y\n")
    assert log.read_text().endswith("back\n")
    lines = (world.runs / "probe" / "rank-0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [one["step"] for one in events[:-1]] == list(range(50)), "nothing of the record is lost"
    assert events[-1]["lost"] > 1_000_000


@needs_trl
def test_term_stops_a_run_however_soon_it_comes(world: World) -> None:
    env = {"FAKE_STEPS": json.dumps(["child=session", "pid=leader", "sleep=600"])}
    words = ("sft", str(world.config()), "--gpus", "0", "--python", str(world.python()))
    running = world.started(*words, env=env)
    # the keeper may not have said yet that training is there
    until((world.root / "pids" / "leader").exists)
    running.send_signal(signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 130
    assert world.quiet()
    (row,) = json.loads(world.launch("runs", "--format", "json").stdout)["data"]
    assert row["state"] == "stopped"
