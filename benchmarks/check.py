"""What `launch check` costs on a large console log, beside `grep` and a loop over its lines.

Makes a log in a temporary folder and reads it in whole processes, warm: `launch check LOG
--allow-unproven`, `grep -cE 'Step: [0-9]+' LOG`, and a Python loop over its lines. Goal for 1 GiB:
at most 5 s.
"""

import itertools
import random
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import ratio
from benchmarks.ratio import Pair

STAMP = "2026-11-20 15:53:00 - INFO - "
LINE_LOOP = "import sys\nfor _ in open(sys.argv[1], 'rb'): pass"

LogKind = Callable[[random.Random], Iterator[str]]
"""Makes up the lines of a log, without end."""


def make_words(rng: random.Random, count: int = 3_000) -> list[str]:
    """A vocabulary of made-up words, with all characters that a text has."""
    words = []
    for _ in range(count):
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9)))
        if rng.random() < 0.3:
            word = rng.choice(string.ascii_uppercase + string.digits) + word
        if rng.random() < 0.3:
            word += rng.choice(string.punctuation)
        words.append(word)
    return words


def sft(rng: random.Random) -> Iterator[str]:
    """Step lines of eight ranks, each of which prints its own."""
    yield f"{STAMP}finetune.py:745 - [RANK 0]   Total optimization steps = 99999999\n"
    for step in itertools.count(1):
        for rank in range(8):
            yield (
                f"{STAMP}finetune.py:956 - [RANK {rank}]   Step: {step}, LR: {1 / (step + 9e4)}, "
                f"Loss: {rng.random() * 12}, TPS: {rng.random() * 2000}\n"
            )


def mixture(rng: random.Random) -> Iterator[str]:
    """A long run: a bar and a step line each step, samples, saves, cache messages, warnings."""
    vocabulary = make_words(rng)
    yield "[\n│   FlatArguments(\n│   │   use_liger_kernel=True,\n│   │   packing=True\n│   )\n]\n"
    yield f"{STAMP}finetune.py:745 - [RANK 0]   Total optimization steps = 99999999\n"
    for step in itertools.count(1):
        yield f"\r  1%|▏         | {step}/99999999 [05:00<01:08,  5.28s/it]"
        yield (
            f"{STAMP}finetune.py:956 - [RANK 0]   Step: {step}, LR: {1 / (step + 9e4)}, "
            f"Loss: {2 + rng.random()}, TPS: {rng.random() * 2000}\n"
        )
        if step % 10 == 0:
            text = " ".join(rng.choices(vocabulary, k=200))
            yield f"<|user|>\n{text}\n<|assistant|>\n"
        if step % 1_000 == 0:
            yield "✅ Found cached dataset at local_dataset_cache/4afd4c7ff8\n"
            yield f"[transformers] Model weights saved in out/step_{step}/model.safetensors\n"


def write_log(path: Path, kind: LogKind, mib: int) -> None:
    """Write a log of this kind and about this size, the same on every call."""
    size = mib << 20
    written = 0
    lines = kind(random.Random(kind.__name__))
    with path.open("wb") as file:
        while written < size:
            block = "".join(itertools.islice(lines, 5_000))
            written += file.write(block.encode())


def pairs(folder: Path) -> Iterator[Pair]:
    """A long run's log of 1 GiB beside grep, one of step lines alone beside a loop over them."""
    grep = ["grep", "-cE", "Step: [0-9]+"]
    yield from pair_with_reader(folder, mixture, 1024, grep, "grep -cE 'Step: [0-9]+'")
    loop = [sys.executable, "-c", LINE_LOOP]
    yield from pair_with_reader(folder, sft, 256, loop, "a Python loop over its lines")


def pair_with_reader(
    folder: Path, kind: LogKind, mib: int, reader: list[str], description: str
) -> Iterator[Pair]:
    """The check of a log beside another command that reads it."""
    path = folder / f"{kind.__name__}.log"
    write_log(path, kind, mib)
    check = [sys.executable, "-m", "launcher", "check", str(path), "--allow-unproven"]
    yield Pair(
        name=f"log scan, {kind.__name__}",
        what=f"CPU time of launch check of {mib} MiB / {description}",
        rounds=3,
        launch=ratio.time_command(check, cpu=True),
        neighbour=ratio.time_command([*reader, str(path)], cpu=True),
    )
    path.unlink()
