"""Tools that never answer, as on a sick node: each is waited for once, ended, and named."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_world import World, bearing, made, until
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
    until(lambda: not bearing("HUNG_TEST", tmp_path) - {os.getpid()})


@pytest.mark.parametrize("body", [HANGS, LEAVES_A_CHILD])
def test_a_tool_that_hangs_is_ended_with_what_it_started_and_not_asked_again(
    on_path: Path, tmp_path: Path, body: str
) -> None:
    put(on_path, ("some-tool",), body)
    began = time.monotonic()
    with pytest.raises(tools.NoAnswer, match="some-tool did not answer in 1 s"):
        tools.run_tool(["some-tool"], seconds=1.0)
    between = time.monotonic()
    with pytest.raises(tools.NoAnswer, match="some-tool did not answer in 1 s"):
        tools.run_tool(["some-tool", "again"], seconds=60.0)
    assert time.monotonic() - between < 0.5 < between - began < 30
    nothing_is_left(tmp_path)
    tools.forget_silences()
    assert not tools.silent()


def test_a_tool_that_has_answered_need_not_close_its_output(on_path: Path, tmp_path: Path) -> None:
    put(on_path, ("git",), ANSWERS_AND_HOLDS_THE_PIPE)
    answer = tools.run_tool(["git", "--version"], seconds=60.0)
    assert (answer.returncode, answer.out) == (0, b"git version 2.40\n")
    assert not tools.silent()
    nothing_is_left(tmp_path)


def test_all_tools_together_have_a_limit(on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a", "b", "c", "d")
    put(on_path, names, HANGS)
    monkeypatch.setenv(tools.VARIABLE, "2")
    for name in names:
        with pytest.raises(tools.NoAnswer):
            tools.run_tool([name])
    assert tools.silent() == [
        f"{name} did not answer in {seconds} s"
        for name, seconds in zip(names, (2, 1.2, 1, 1), strict=True)
    ]
    tools.forget_silences()


def test_questions_to_hanging_tools_have_an_answer(
    on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(on_path, ("nvidia-smi", "git"), HANGS)
    monkeypatch.setenv(tools.VARIABLE, "0.3")
    driver = ask_driver()
    assert driver.silent and driver.fault == "nvidia-smi did not answer in 0.3 s"
    monkeypatch.setattr("launcher.machine.git._require_answer", lambda: tools.run_tool(["git"]))
    assert Repository(tmp_path).commit("HEAD") is None
    tools.forget_silences()


def asked(
    world: World, *words: str, seconds: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    """What a command answers where all tools hang, and how long it took."""
    folder = put(world.root / "tools", NAMES, LEAVES_A_CHILD)
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    began = time.monotonic()
    env = {
        **path,
        "HUNG_TEST": str(world.root),
        tools.VARIABLE: seconds,
        "LAUNCH_PYTHON": sys.executable,
    }
    done = world.launch(*words, env=env)
    return done, time.monotonic() - began


@needs_trl
@pytest.mark.parametrize("seconds", ["0.5", pytest.param("5", marks=pytest.mark.slow)])
def test_a_start_goes_on_where_all_tools_hang_and_names_them(tmp_path: Path, seconds: str) -> None:
    with made(tmp_path / "world") as world:
        world.config()
        limit = 1.6 * float(seconds) + 3 + 30
        python = ("--python", str(world.python()), "--gpus", "0")
        done, took = asked(world, "sft", "stage.yaml", *python, "--detach", seconds=seconds)
        assert done.returncode == 0 and took < limit, (took, done.stderr)
        for name in ("nvidia-smi", "git", "tmux"):
            assert f"warning[tool-hangs]: {name} did not answer in" in done.stderr
        for words, codes in (
            (["runs"], {0}),
            (["stop", "last"], {0, 2}),
            (["plan", "stage.yaml", "--gpus", "1"], {0, 3}),
            (["sft", "stage.yaml", "--gpus", "1", "output_dir=b", "--detach"], {5}),
        ):
            done, took = asked(world, *words, seconds=seconds)
            assert done.returncode in codes and took < limit, (words, took, done.stderr)
        assert "error[no-driver]: nvidia-smi did not answer in" in done.stderr
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
