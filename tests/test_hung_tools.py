"""Tools that never answer, as on a sick node: each is waited for once, ended, and named."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_world import World, find_processes, open_world, wait_until
from real_training import needs_trl

from launcher.machine import tools
from launcher.machine.git import Repository
from launcher.machine.python import ask_driver

NAMES = ("nvidia-smi", "git", "squeue", "sbatch", "scancel", "scontrol", "sacct", "tmux")
HANGS = """#!/bin/bash
trap '' TERM INT HUP
while :; do sleep 7357; done
"""
LEAVES_A_CHILD = """#!/bin/bash
trap '' TERM INT HUP
(trap '' TERM; setsid sleep 7357) &
while :; do sleep 7357; done
"""
ANSWERS_AND_HOLDS_THE_PIPE = """#!/bin/bash
echo "git version 2.40"
sleep 7357 &
"""


def put(folder: Path, names: tuple[str, ...], body: str) -> Path:
    """Programs of these names; returns their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first in PATH, in an environment that its processes are known by."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HUNG_TEST", str(tmp_path))
    tools.forget_silences()
    return folder


def nothing_is_left(tmp_path: Path) -> None:
    wait_until(lambda: not find_processes("HUNG_TEST", tmp_path) - {os.getpid()})


@pytest.mark.parametrize("body", [HANGS, LEAVES_A_CHILD])
def test_a_tool_that_hangs_is_ended_with_what_it_started_and_not_asked_again(
    on_path: Path, tmp_path: Path, body: str
) -> None:
    put(on_path, ("some-tool",), body)
    start = time.monotonic()
    with pytest.raises(tools.NoAnswer, match="some-tool did not answer in 1 s"):
        tools.run_tool(["some-tool"], seconds=1.0)
    first_s = time.monotonic() - start
    assert 0.5 < first_s < 30
    start = time.monotonic()
    with pytest.raises(tools.NoAnswer, match="some-tool did not answer in 1 s"):
        tools.run_tool(["some-tool", "again"], seconds=60.0)
    assert time.monotonic() - start < 0.5
    nothing_is_left(tmp_path)
    tools.forget_silences()
    assert not tools.describe_silences()


def test_a_tool_that_has_answered_need_not_close_its_output(on_path: Path, tmp_path: Path) -> None:
    put(on_path, ("git",), ANSWERS_AND_HOLDS_THE_PIPE)
    answer = tools.run_tool(["git", "--version"], seconds=60.0)
    assert (answer.returncode, answer.out) == (0, b"git version 2.40\n")
    assert not tools.describe_silences()
    nothing_is_left(tmp_path)


def test_all_tools_together_have_a_limit(on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a", "b", "c", "d")
    put(on_path, names, HANGS)
    monkeypatch.setenv(tools.VARIABLE, "2")
    for name in names:
        with pytest.raises(tools.NoAnswer):
            tools.run_tool([name])
    assert tools.describe_silences() == [
        "a did not answer in 2 s",
        "b did not answer in 1.2 s",
        "c did not answer in 1 s",
        "d did not answer in 1 s",
    ]
    tools.forget_silences()


def test_questions_to_hanging_tools_have_an_answer(
    on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(on_path, ("nvidia-smi", "git"), HANGS)
    monkeypatch.setenv(tools.VARIABLE, "0.3")
    driver = ask_driver()
    assert driver.silent
    assert driver.fault == "nvidia-smi did not answer in 0.3 s"
    monkeypatch.setattr("launcher.machine.git._require_answer", lambda: tools.run_tool(["git"]))
    assert Repository(tmp_path).commit("HEAD") is None
    tools.forget_silences()


def call_where_all_tools_hang(
    world: World, *words: str, codes: set[int]
) -> subprocess.CompletedProcess[str]:
    """Call a command; it must end in time, with one of these exit codes."""
    folder = put(world.root / "tools", NAMES, LEAVES_A_CHILD)
    env = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "HUNG_TEST": str(world.root),
        tools.VARIABLE: "0.5",
        "LAUNCH_PYTHON": sys.executable,
    }
    start = time.monotonic()
    process = world.launch(*words, env=env)
    seconds = time.monotonic() - start
    assert process.returncode in codes, process.stderr
    # all tools together may take 0.8 s, the command itself 33 s on a busy machine
    assert seconds < 34, (words, process.stderr)
    return process


@needs_trl
def test_a_start_goes_on_where_all_tools_hang_and_names_them(tmp_path: Path) -> None:
    with open_world(tmp_path / "world") as world:
        world.config()
        start = ["sft", "stage.yaml", "--python", str(world.python()), "--gpus", "0", "--detach"]
        process = call_where_all_tools_hang(world, *start, codes={0})
        for name in ("nvidia-smi", "git", "tmux"):
            assert f"warning[tool-hangs]: {name} did not answer in" in process.stderr
        call_where_all_tools_hang(world, "runs", codes={0})
        call_where_all_tools_hang(world, "stop", "last", codes={0, 2})
        call_where_all_tools_hang(world, "plan", "stage.yaml", "--gpus", "1", codes={0, 3})
        start = ["sft", "stage.yaml", "--gpus", "1", "output_dir=b", "--detach"]
        process = call_where_all_tools_hang(world, *start, codes={5})
        assert "error[no-driver]: nvidia-smi did not answer in" in process.stderr
        # what the tools had started, in sessions of their own, has gone too
        world.quiet()


def test_a_python_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.errors import NotReady
    from launcher.machine import python

    program = put(tmp_path, ("python",), HANGS) / "python"
    monkeypatch.setattr(python, "PYTHON_LIMIT_S", 0.3)
    with pytest.raises(NotReady, match="did not list its packages in"):
        python.ask_trainer(program, "--python")
    tools.forget_silences()
