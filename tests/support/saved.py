"""Checkpoints and finished models as trainers leave them, made by hand: whole files without
weights.
"""

import json
import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNKNOWN = '{"auto_map": {}}'
"""The config of a model of no family that any rule knows: code of its own makes it."""


def tensors(path: Path, size: int = 64) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02}." + bytes(200))


def loadable(folder: Path) -> None:
    """What a folder with a config needs beside it to be loaded from, as far as names and headers
    tell.
    """
    # stand-ins of trainers have launcher's packages only where they need them
    from launcher.artifacts import architecture
    from launcher.errors import InvalidConfig
    from launcher.rules.model import by_name

    config = json.loads((folder / "config.json").read_text())
    try:
        sizes = dict(by_name(architecture.parse_shape(config)))
    except InvalidConfig:
        sizes = {"w": (64,)}
    header: dict[str, Any] = {}
    end = 0
    for name, size in sizes.items():
        begin, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        # no block of it is on the disk
        file.truncate(8 + len(raw) + end)
    (folder / "tokenizer.json").write_text("{}")


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def pinned(output: Path, name: str, *, ranks: int = 1, completed: bool = True) -> Path:
    folder = output / name
    folder.mkdir(parents=True)
    tensors(folder / "model.safetensors")
    for file in ("optimizer.bin", "scheduler.bin"):
        archive(folder / file)
    for rank in range(ranks):
        archive(folder / f"random_states_{rank}.pkl")
    if completed:
        (folder / "COMPLETED").write_text("COMPLETED")
    return folder


def engine(output: Path, name: str, *, ranks: int = 2) -> Path:
    folder = output / name
    inside = folder / "pytorch_model"
    inside.mkdir(parents=True)
    archive(inside / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        archive(inside / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        archive(folder / f"random_states_{rank}.pkl")
    archive(folder / "scheduler.bin")
    (folder / "latest").write_text("pytorch_model")
    (folder / "COMPLETED").write_text("COMPLETED")
    return folder


def trl(
    output: Path,
    step: int,
    *,
    epoch: float = 0.5,
    ranks: int = 1,
    state: Mapping[str, Any] | None = None,
) -> Path:
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    tensors(folder / "model.safetensors")
    for file in ("optimizer.pt", "scheduler.pt", "training_args.bin"):
        archive(folder / file)
    for rank in range(ranks):
        archive(folder / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"))
    told = {"global_step": step, "epoch": epoch, "train_batch_size": 2, **(state or {})}
    (folder / "trainer_state.json").write_text(json.dumps(told))
    (folder / "config.json").write_text("{}")
    return folder


def model(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(UNKNOWN)
    tensors(output / "model.safetensors")
    (output / "tokenizer.json").write_text("{}")
