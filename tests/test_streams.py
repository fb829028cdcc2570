"""Closed and full streams, limits of the shell, no home: an exit code of the table and a sentence,
never 70.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE_S, REPOSITORY
from fake_world import made
from real_training import needs_trl

LAUNCH = shlex.join([sys.executable, "-P", str(REPOSITORY / "launcher" / "__main__.py")])
BAD = "stage: sft\nbackend: trl\nargs: {nothing_such: 1}\n"
COMMANDS = (
    "-h",
    "runs",
    "runs --format json",
    "configs",
    "validate-config bad.yaml",
    "plan bad.yaml",
    "nosuch",
    "cache list",
)


def run(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "bad.yaml").write_text(BAD)
    environ = {**os.environ, "HOME": str(tmp_path), "LAUNCH": LAUNCH}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "Traceback" not in done.stderr and "bug in launch" not in done.stderr, done.stderr
    assert not list((tmp_path / "state").rglob("bug-*"))
    return done


def expected(command: str) -> int:
    if command == "nosuch":
        return 2
    return 3 if "bad.yaml" in command else 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_one_that_takes_nothing(
    tmp_path: Path, closed: str, command: str
) -> None:
    assert run(f"$LAUNCH {command} {closed}", tmp_path).returncode == expected(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_has_gone_is_no_failure(tmp_path: Path, command: str) -> None:
    done = run(f"$LAUNCH {command} 2>&1 | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert done.returncode == expected(command) and not done.stderr


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("full", [">/dev/full", "2>/dev/full", ">/dev/full 2>&1"])
def test_what_cannot_be_written_is_no_success(tmp_path: Path, full: str, command: str) -> None:
    done = run(f"$LAUNCH {command} {full}", tmp_path)
    if expected(command):
        # it may be what is wrong that cannot be written
        assert done.returncode in (expected(command), 5)
    elif full.startswith(">"):
        assert done.returncode == 5
        assert "2>&1" in full or "error[disk-full]" in done.stderr
    else:
        assert done.returncode in (0, 5)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("limit", ["-f 0", "-n 16", "-n 6", "-v 80000", "-v 40000"])
def test_a_limit_of_the_shell_is_named(tmp_path: Path, limit: str, command: str) -> None:
    done = run(f"ulimit {limit}; $LAUNCH {command}", tmp_path)
    assert done.returncode in (expected(command), 5)
    if done.returncode == 5:
        assert "error[" in done.stderr or '"code"' in done.stdout


@needs_trl
@pytest.mark.parametrize("limit", ["-f 0", "-n 12", "-v 60000"])
def test_a_start_that_a_limit_stops_says_so(tmp_path: Path, limit: str) -> None:
    with made(tmp_path / "world") as world:
        words = f"sft {world.config().name} --gpus 0 --python {world.python()} --detach"
        script = f"cd {world.root}; ulimit {limit}; $LAUNCH {words}"
        done = run(script, tmp_path)
        assert limit != "-f 0" or done.returncode == 5
        # where it is enough, it starts
        assert done.returncode in (0, 5), done.stderr
        assert done.returncode == 0 or "error[" in done.stderr
        assert limit != "-n 12" or "tmux attach" not in done.stdout
        world.quiet()


def test_a_file_that_may_not_grow_is_named(tmp_path: Path) -> None:
    done = run("(ulimit -f 0; $LAUNCH configs > list)", tmp_path)
    assert done.returncode == 5
    assert "error[" in done.stderr


@pytest.mark.parametrize("home", ["/nonexistent", "/proc", ""])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_home_that_cannot_be_written_stops_no_question(
    tmp_path: Path, home: str, command: str
) -> None:
    unset = "unset XDG_STATE_HOME XDG_CACHE_HOME LAUNCH_RUNS HOME"
    set_home = f"export HOME={home}" if home else ":"
    done = run(f"{unset}; {set_home}; $LAUNCH {command}", tmp_path)
    assert done.returncode == expected(command), done.stderr
