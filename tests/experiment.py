"""A machine with cards that are not there, for commands that start several short runs."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_world
import pytest
from fake_smi import Smi, uuid
from fake_world import World

from launcher import cli

TRAINER = Path(__file__).with_name("experiment_trainer.py")
_BEGIN = """
import os, sys
os.execv(sys.executable, [sys.executable, "-u", {trainer!r}, *sys.argv[1:]])
"""
_BUSY = """#!/bin/sh
case "$*" in
  *--query-gpu=uuid,utilization.gpu*) printf '{first}, 97\\n{second}, 12\\n'
    printf . >> "$FAKE_WORLD/asked" ;;
  *) exec {real} "$@" ;;
esac
"""


@contextlib.contextmanager
def machine(root: Path, monkeypatch: pytest.MonkeyPatch, cards: int = 2) -> Iterator[World]:
    """A world with so many cards and an interpreter whose training is made up, entered by this process."""
    with fake_world.made(root) as world:
        smi = Smi(world.root / "smi")
        smi.cards(*[0] * cards)
        busy = world.root / "bin" / "nvidia-smi"
        busy.parent.mkdir()
        real = shlex.quote(str(smi.path))
        busy.write_text(_BUSY.format(first=uuid(0), second=uuid(1), real=real))
        busy.chmod(0o755)
        world.environ["PATH"] = f"{busy.parent}:{os.environ['PATH']}"
        world.cuda_torch()
        (world.root / "begin.py").write_text(_BEGIN.format(trainer=str(TRAINER)))
        for name, value in world.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(world.root)
        yield world


def started(world: World, key: str) -> list[str]:
    """What of each training that was begun, in turn."""
    path = world.root / "started"
    lines = path.read_text().splitlines() if path.exists() else []
    return [dict(part.split("=") for part in line.split(","))[key] for line in lines]


class Here:
    """`launch` in this process; `scene` says what its runs, which are made up, look like."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.scene = capsys, dict[str, Any]()
        self.started: list[str] = []

    def launch(self, *words: str, **scene: Any) -> tuple[int, str, str]:
        """The exit code, and what was written to stdout and stderr."""
        self.scene = scene
        self.capsys.readouterr()
        code = cli.main(list(words))
        return (code, *self.capsys.readouterr())
