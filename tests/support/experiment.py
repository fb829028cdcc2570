"""A machine with cards that are not there, for commands that start several short runs."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_world
import pytest
import saved
from fake_smi import Smi
from fake_world import World

from launcher.cli import main

TRAINER = Path(__file__).with_name("experiment_trainer.py")
_BEGIN = """
import os, sys
os.execv(sys.executable, [sys.executable, "-u", {trainer!r}, *sys.argv[1:]])
"""
SHAPE = {
    "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
    "torch_dtype": "float32", "tie_word_embeddings": True, "max_position_embeddings": 2048,
    "architectures": ["Qwen2ForCausalLM"],
}  # fmt: skip
"""What a config.json says of a model whose memory and speed can be planned."""


@contextlib.contextmanager
def machine(root: Path, monkeypatch: pytest.MonkeyPatch, cards: int = 2) -> Iterator[World]:
    """A world with so many cards and an interpreter whose training is made up, entered by this
    process.
    """
    with fake_world.open_world(root) as world:
        smi = Smi(world.root / "smi")
        smi.cards(*[0] * cards)
        world.environ["PATH"] = f"{smi.folder}:{os.environ['PATH']}"
        world.cuda_torch()
        (world.root / "begin.py").write_text(_BEGIN.format(trainer=str(TRAINER)))
        world.enter(monkeypatch)
        yield world


def started(world: World, key: str) -> list[str]:
    """What of each training that was begun, in turn."""
    path = world.root / "started"
    lines = path.read_text().splitlines() if path.exists() else []
    return [dict(part.split("=") for part in line.split(","))[key] for line in lines]


def shaped(world: World) -> str:
    """A model of which nothing but its shape is known; its name in a stage file."""
    folder = world.root / "shaped"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    saved.loadable(folder)
    return folder.name


class Here:
    """`launch` in this process; `scene` says what its runs, which are made up, look like."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.scene: dict[str, Any] = {}
        self.started: list[str] = []

    def launch(self, *words: str, **scene: Any) -> tuple[int, str, str]:
        """The exit code, and what was written to stdout and stderr."""
        self.scene = scene
        self.capsys.readouterr()
        code = main.main(list(words))
        return (code, *self.capsys.readouterr())
