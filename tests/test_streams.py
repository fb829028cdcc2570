"""Closed and full streams, limits of the shell, no home: a documented exit code, never 70."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE_S, REPOSITORY
from fake_world import open_world
from real_training import needs_trl

LAUNCH = shlex.join([sys.executable, "-P", str(REPOSITORY / "launcher" / "__main__.py")])
COMMANDS = [
    # help, a list, JSON, findings on stderr, a refused command line
    pytest.param("-h", 0, id="help"),
    pytest.param("runs", 0, id="text"),
    pytest.param("runs --format json", 0, id="json"),
    pytest.param("validate-config bad.yaml", 3, id="findings"),
    pytest.param("nosuch", 2, id="usage"),
]
with_commands = pytest.mark.parametrize(("command", "code"), COMMANDS)


def run(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `$LAUNCH` starts launch."""
    text = "stage: sft\nbackend: trl\nargs: {nothing_such: 1}\n"
    (tmp_path / "bad.yaml").write_text(text)
    process = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "LAUNCH": LAUNCH},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "Traceback" not in process.stderr, process.stderr
    assert "bug in launch" not in process.stderr, process.stderr
    assert not list((tmp_path / "state").rglob("bug-*"))
    return process


@with_commands
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_one_that_takes_nothing(
    tmp_path: Path, closed: str, command: str, code: int
) -> None:
    assert run(f"$LAUNCH {command} {closed}", tmp_path).returncode == code


@with_commands
def test_a_reader_that_has_gone_is_no_failure(tmp_path: Path, command: str, code: int) -> None:
    process = run(f"$LAUNCH {command} 2>&1 | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert process.returncode == code
    assert not process.stderr


@pytest.mark.parametrize("command", ["-h", "runs", "runs --format json"])
def test_an_answer_that_cannot_be_written_is_no_success(tmp_path: Path, command: str) -> None:
    process = run(f"$LAUNCH {command} >/dev/full", tmp_path)
    assert process.returncode == 5
    assert "error[disk-full]" in process.stderr
    assert run(f"$LAUNCH {command} >/dev/full 2>&1", tmp_path).returncode == 5


@pytest.mark.parametrize(
    ("command", "code"), [("runs", 0), ("validate-config bad.yaml", 3), ("nosuch", 2)]
)
def test_findings_that_cannot_be_written_leave_an_exit_code(
    tmp_path: Path, command: str, code: int
) -> None:
    process = run(f"$LAUNCH {command} 2>/dev/full", tmp_path)
    # it may be what is wrong that cannot be written
    assert process.returncode in (code, 5)


@pytest.mark.parametrize(
    ("command", "code"),
    [("-h", 0), ("runs --format json", 0), ("validate-config bad.yaml", 3)],
    ids=["help", "json", "findings"],
)
@pytest.mark.parametrize("limit", ["-f 0", "-n 16", "-n 6", "-v 80000", "-v 40000"])
def test_a_limit_of_the_shell_is_named(tmp_path: Path, limit: str, command: str, code: int) -> None:
    process = run(f"ulimit {limit}; $LAUNCH {command}", tmp_path)
    assert process.returncode in (code, 5)
    if process.returncode == 5:
        assert "error[" in process.stderr or '"code"' in process.stdout


@needs_trl
@pytest.mark.parametrize("limit", ["-f 0", "-n 12", "-v 60000"])
def test_a_start_that_a_limit_stops_says_so(tmp_path: Path, limit: str) -> None:
    with open_world(tmp_path / "world") as world:
        words = f"sft {world.config().name} --gpus 0 --python {world.python()} --detach"
        sessions = f"export TMUX_TMPDIR={world.environ['TMUX_TMPDIR']}"
        process = run(f"cd {world.root}; {sessions}; ulimit {limit}; $LAUNCH {words}", tmp_path)
        # where it is enough, it starts
        assert process.returncode in (0, 5), process.stderr
        if process.returncode == 5:
            assert "error[" in process.stderr
        if limit == "-f 0":
            assert process.returncode == 5
        if limit == "-n 12":
            assert "tmux attach" not in process.stdout
        world.quiet()
        world.close_sessions()


def test_a_file_that_may_not_grow_is_named(tmp_path: Path) -> None:
    process = run("(ulimit -f 0; $LAUNCH configs > list)", tmp_path)
    assert process.returncode == 5
    assert "error[" in process.stderr


@pytest.mark.parametrize("home", ["export HOME=/nonexistent", "export HOME=/proc", ":"])
@pytest.mark.parametrize(("command", "code"), [("runs", 0), ("validate-config bad.yaml", 3)])
def test_a_home_that_cannot_be_written_stops_no_question(
    tmp_path: Path, home: str, command: str, code: int
) -> None:
    unset = "unset XDG_STATE_HOME XDG_CACHE_HOME LAUNCH_RUNS HOME"
    process = run(f"{unset}; {home}; $LAUNCH {command}", tmp_path)
    assert process.returncode == code, process.stderr
