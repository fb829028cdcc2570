"""What it costs to know data and checkpoints by content, beside `sha256sum` in the same run.

usage: python benchmarks/fingerprint.py [--json] [--folder PATH] [--gib N]

Data: one file of N GiB (1 unless told), in the page cache, read whole. A checkpoint: four sparse files
shaped like Qwen2.5-7B's (339 tensors, 15.2 GB), sampled; once with nothing remembered, once with. Best of
three, interleaved. Goals on two cores: data at 1 GB/s and more, a checkpoint in 2 s, a known one in 10 ms.
Sparse files cost no disk: on a real one the samples take as long as it needs for so many random reads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher import content
from launcher.fingerprint import Memory, of_file, of_model

ROUNDS = 3
HIDDEN, FEED, KEYS, WORDS, LAYERS, SHARDS = 3584, 18944, 512, 152064, 28, 4


def tensors() -> Iterator[tuple[str, int]]:
    """Name and number of elements of every tensor of Qwen2.5-7B."""
    yield "model.embed_tokens.weight", WORDS * HIDDEN
    for layer in range(LAYERS):
        head = f"model.layers.{layer}"
        for name, rows in (("q", HIDDEN), ("k", KEYS), ("v", KEYS)):
            yield f"{head}.self_attn.{name}_proj.weight", rows * HIDDEN
            yield f"{head}.self_attn.{name}_proj.bias", rows
        yield f"{head}.self_attn.o_proj.weight", HIDDEN * HIDDEN
        for name in ("gate", "up", "down"):
            yield f"{head}.mlp.{name}_proj.weight", FEED * HIDDEN
        yield f"{head}.input_layernorm.weight", HIDDEN
        yield f"{head}.post_attention_layernorm.weight", HIDDEN
    yield "model.norm.weight", HIDDEN
    yield "lm_head.weight", WORDS * HIDDEN


def make_checkpoint(folder: Path) -> int:
    """Write the shards, sparse, with their real headers; returns their bytes in all."""
    folder.mkdir()
    listed = list(tensors())
    total = sum(count for _, count in listed)
    shards: list[list[tuple[str, int]]] = [[] for _ in range(SHARDS)]
    done = 0
    for name, count in listed:
        shards[min(SHARDS - 1, done * SHARDS // total)].append((name, count))
        done += count
    size = 0
    for number, shard in enumerate(shards):
        header, at = {}, 0
        for name, count in shard:
            offsets = [at, at + 2 * count]
            header[name] = {"dtype": "BF16", "shape": [count], "data_offsets": offsets}
            at += 2 * count
        text = json.dumps(header).encode()
        path = folder / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + at)
        size += path.stat().st_size
    (folder / "config.json").write_text("{}")
    return size


def make_data(path: Path, gib: float) -> int:
    """A file of random bytes, repeated, so that it is in the page cache afterwards."""
    block = os.urandom(2**20)
    with path.open("wb") as file:
        for _ in range(round(gib * 1024)):
            file.write(block)
    return path.stat().st_size


def seconds(what: Callable[[], object]) -> float:
    """Wall time of one call."""
    begun = time.perf_counter()
    what()
    return time.perf_counter() - begun


def sampled_bytes(folder: Path) -> int:
    """How much of the checkpoint is read at all."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            found = content.sampled_regions(file.fileno(), path.stat().st_size) or []
        total += sum(length for _, length in found)
    return total


def measure(folder: Path, gib: float) -> dict[str, float]:
    """Every figure, by what it is of; seconds, bytes, and bytes a second."""
    data, model = folder / "data.jsonl", folder / "model"
    size, weights = make_data(data, gib), make_checkpoint(model)
    # only what has been still for a while is remembered
    time.sleep(Memory.MARGIN_S + 0.5)
    known = Memory(folder / "prints.json")
    of_model(str(model), known)
    cases: dict[str, Callable[[], object]] = {
        "data": lambda: of_file(data, Memory()),
        "checkpoint": lambda: of_model(str(model), Memory()),
        "checkpoint, known": lambda: of_model(str(model), known),
    }
    if shutil.which("sha256sum"):
        command = ["sha256sum", str(data)]
        cases["sha256sum"] = lambda: subprocess.run(
            command, stdout=subprocess.DEVNULL, check=True
        )  # fmt: skip
    taken = {
        name: min(times)
        for name, times in zip(
            cases,
            zip(*[[seconds(case) for case in cases.values()] for _ in range(ROUNDS)], strict=True),
            strict=True,
        )
    }
    return {
        **{f"{name}, s": value for name, value in taken.items()},
        "data, GB/s": size / taken["data"] / 1e9,
        "sha256sum, GB/s": size / taken.get("sha256sum", float("inf")) / 1e9,
        "checkpoint, GB": weights / 1e9,
        "checkpoint read, MB": sampled_bytes(model) / 1e6,
    }


def main(arguments: list[str]) -> int:
    """Measure and print; always exits 0, the figures are for people and for the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gib", type=float, default=1.0)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(Path(folder), given.gib)
    if given.json:
        print(json.dumps({name: round(value, 4) for name, value in found.items()}))
        return 0
    for name, value in found.items():
        print(f"{name:<24} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
