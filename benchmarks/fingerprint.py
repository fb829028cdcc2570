"""What it costs to know data and checkpoints by content, beside `sha256sum` in the same run.

Data: one file in the page cache, read whole. A checkpoint: four sparse files shaped like
Qwen2.5-7B's (339 tensors, 15.2 GB), sampled. Best of three, interleaved. Goals on two cores: data
at 1 GB/s and more, a checkpoint in 2 s. Sparse files cost no disk: on a real one the samples take
as long as it needs for so many random reads.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import ratio
from benchmarks.ratio import Pair
from launcher.artifacts import digest

# the shape of Qwen2.5-7B
HIDDEN = 3584
FEED = 18944
KEYS = 512
WORDS = 152064
LAYERS = 28
SHARDS = 4


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


def make_checkpoint(folder: Path) -> None:
    """Write the shards, sparse, with their real headers."""
    folder.mkdir()
    total = sum(count for _, count in tensors())
    shards: list[dict[str, int]] = [{} for _ in range(SHARDS)]
    done = 0
    for name, count in tensors():
        shard = shards[done * SHARDS // total]
        shard[name] = count
        done += count
    for number, shard in enumerate(shards, 1):
        write_shard(folder / f"model-{number:05}-of-{SHARDS:05}.safetensors", shard)
    (folder / "config.json").write_text("{}")


def write_shard(path: Path, counts: Mapping[str, int]) -> None:
    """Write a sparse file of safetensors; `counts` are the elements of its tensors."""
    header = {}
    begin = 0
    for name, count in counts.items():
        end = begin + 2 * count
        header[name] = {"dtype": "BF16", "shape": [count], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + begin)


def make_data(path: Path) -> None:
    """Write 512 MiB of repeated random bytes, which are in the page cache afterwards."""
    block = os.urandom(2**20)
    with path.open("wb") as file:
        for _ in range(512):
            file.write(block)


def regions(folder: Path) -> Iterator[tuple[int, int, int]]:
    """What of the checkpoint is read at all: open file, offset, length."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            sampled = digest.choose_regions(file.fileno(), path.stat().st_size)
            for offset, length in sampled or []:
                yield file.fileno(), offset, length


def pairs(folder: Path) -> Iterator[Pair]:
    """Data by content beside `sha256sum` of them; a checkpoint's samples beside reading as much."""
    data = folder / "data.jsonl"
    model = folder / "model"
    make_data(data)
    make_checkpoint(model)
    if shutil.which("sha256sum"):
        yield Pair(
            name="data by content",
            what="CPU time of fingerprinting 512 MiB / sha256sum",
            rounds=5,
            launch=ratio.time_call(lambda: digest.read_content(data), cpu=True),
            neighbour=ratio.time_command(["sha256sum", str(data)], cpu=True),
        )

    def sample() -> None:
        for path in model.glob("*"):
            digest.read_content(path)

    def read() -> None:
        for fd, offset, length in regions(model):
            os.pread(fd, length, offset)

    yield Pair(
        name="checkpoint by content",
        what="samples of a 15 GB checkpoint / reading the same bytes",
        launch=ratio.time_call(sample),
        neighbour=ratio.time_call(read),
    )
