"""What `launch check` costs on a large console log, beside `grep` and a loop over its lines.

usage: python -m benchmarks.check [KIND...] [--mib 1024] [--rounds 1] [--json]

Makes one log of each kind in a temporary folder and reads it in whole processes, warm: `launch check
LOG --allow-unproven`, `grep -cE 'Step: [0-9]+' LOG`, and a Python loop over its lines. Prints seconds
(the best round), CPU seconds, MiB/s, the ratios to both neighbours, and the most memory that any
process of the check held at once. Goals for 1 GiB on two cores: at most 3 s and 200 MiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ratio
from benchmarks.ratio import ROOT, Pair

STAMP = "2026-11-20 15:53:00 - INFO - "
_TOLD = {"grep": "grep -cE 'Step: [0-9]+'", "loop": "a Python loop over its lines"}
LINE_LOOP = "import sys\nfor _ in open(sys.argv[1], 'rb'): pass"


def words(rng: random.Random, count: int = 3_000) -> list[str]:
    """A vocabulary of made-up words."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(count)]


def sft(rng: random.Random) -> Iterator[str]:
    """Step lines of eight ranks, each of which prints its own."""
    yield f"{STAMP}finetune.py:745 - [RANK 0]   Total optimization steps = 99999999\n"
    for step in itertools.count(1):
        for rank in range(8):
            yield (
                f"{STAMP}finetune.py:956 - [RANK {rank}]   Step: {step}, LR: {1 / (step + 9e4)}, "
                f"Loss: {rng.random() * 12}, TPS: {rng.random() * 2000}\n"
            )


def dpo(rng: random.Random) -> Iterator[str]:
    """Step lines of DPO: all eight ranks print the same."""
    for step in itertools.count(1):
        line = f"{STAMP}dpo_tune_cache.py:682 -   Step: {step}, LR: 5e-07, Loss: {rng.random()}\n"
        yield line * 8


def diverged(rng: random.Random) -> Iterator[str]:
    """Step lines of which most are not a number."""
    for step in itertools.count(1):
        loss = str(rng.random()) if step < 1_000 else "nan"
        yield f"{STAMP}finetune.py:956 - [RANK 0]   Step: {step}, LR: 1e-05, Loss: {loss}, TPS: 9.5\n"


def coloured(rng: random.Random) -> Iterator[str]:
    """Step lines as a terminal shows them."""
    for step in itertools.count(1):
        yield (
            f"\x1b[2m{STAMP}\x1b[0m\x1b[32mfinetune.py:956\x1b[0m - [RANK 0]   Step: \x1b[1m{step}\x1b"
            f"[0m, LR: 1e-05, Loss: {rng.random()}, TPS: 12.5\n"
        )


def bars(_rng: random.Random) -> Iterator[str]:
    """One progress bar that is redrawn for ever: a single line."""
    for step in itertools.count(1):
        yield f"\r {step % 100:2d}%|███▌      | {step}/99999999 [05:00<01:08,  5.28s/it]"


def dicts(rng: random.Random) -> Iterator[str]:
    """What HF Trainer logs, each dict behind the bar."""
    for step in itertools.count(1):
        yield (
            f"\r  1%|▏         | {step}/99999999 [05:00<01:08,  5.28s/it]"
            f"{{'loss': '{rng.random():.4f}', 'grad_norm': '{rng.random():.4f}', "
            f"'learning_rate': '1e-05', 'entropy': '1.234', 'mean_token_accuracy': '0.5678', "
            f"'epoch': '{step / 1e6:.4f}'}}\n"
        )


def prose(rng: random.Random) -> Iterator[str]:
    """Lines of random words."""
    known = words(rng)
    while True:
        yield " ".join(rng.choices(known, k=12)) + "\n"


def tracebacks(rng: random.Random) -> Iterator[str]:
    """An error that is caught and printed again and again."""
    while True:
        rank = rng.randint(0, 7)
        yield (
            f"[rank{rank}]: Traceback (most recent call last):\n"
            f'[rank{rank}]:   File "/app/data.py", line 12, in fetch\n'
            f"[rank{rank}]:     return table[key]\n"
            f"[rank{rank}]: KeyError: {rng.random()}\n"
        )


def one_line(rng: random.Random) -> Iterator[str]:
    """Lines of 50 MB each, with a step line between them."""
    for step in itertools.count(1):
        yield "".join(rng.choices("abcdefghij klm", k=1_000)) * 50_000 + "\n"
        yield f"{STAMP}finetune.py:956 - [RANK 0]   Step: {step}, LR: 1e-05, Loss: 2.5, TPS: 12.5\n"


def mixture(rng: random.Random) -> Iterator[str]:
    """A long run: a bar and a step line each step, samples, saves, cache messages, warnings."""
    known = words(rng)
    yield "[\n│   FlatArguments(\n│   │   use_liger_kernel=True,\n│   │   packing=True\n│   )\n]\n"
    yield f"{STAMP}finetune.py:745 - [RANK 0]   Total optimization steps = 99999999\n"
    for step in itertools.count(1):
        yield f"\r  1%|▏         | {step}/99999999 [05:00<01:08,  5.28s/it]"
        yield (
            f"{STAMP}finetune.py:956 - [RANK 0]   Step: {step}, LR: {1 / (step + 9e4)}, "
            f"Loss: {2 + rng.random()}, TPS: {rng.random() * 2000}\n"
        )
        if step % 10 == 0:
            yield f"<|user|>\n{' '.join(rng.choices(known, k=200))}\n<|assistant|>\n"
        if step % 1_000 == 0:
            yield "✅ Found cached dataset at local_dataset_cache/4afd4c7ff8\n"
            yield f"[transformers] Model weights saved in out/step_{step}/model.safetensors\n"


KINDS: Mapping[str, Callable[[random.Random], Iterator[str]]] = {
    "sft": sft,
    "dpo": dpo,
    "diverged": diverged,
    "coloured": coloured,
    "bars": bars,
    "dicts": dicts,
    "prose": prose,
    "tracebacks": tracebacks,
    "one_line": one_line,
    "mixture": mixture,
}


def make(kind: str, path: Path, size: int) -> None:
    """Write a log of this kind and about this many bytes, the same on every call."""
    written = 0
    lines = KINDS[kind](random.Random(kind))
    with path.open("wb") as file:
        while written < size:
            written += file.write(
                "".join(itertools.islice(lines, 5_000 if kind != "one_line" else 2)).encode()
            )


@dataclass(frozen=True)
class Cost:
    """Wall and CPU seconds of a command with its children, and the most MiB it held."""

    seconds: float
    cpu: float
    mib: float


def measure(argv: Sequence[str]) -> Cost:
    """Run a command to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # not to /dev/null: grep stops at the first match then
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    peaks: list[float] = [0.0]
    watch = threading.Thread(target=_watch, args=(process.pid, peaks), daemon=True)
    watch.start()
    taken = ratio.timed(process.communicate)()
    code = process.returncode
    watch.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code < 0 or code > 3:
        raise SystemExit(f"{' '.join(argv)} answered {code}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds=taken, cpu=cpu, mib=max(peaks))


def _watch(pid: int, peaks: list[float]) -> None:
    """Add up what a process and its children hold, as long as it lives; shared pages count once."""
    while True:
        held = [_held(found) for found in (pid, *_children(pid))]
        if held[0] is None:
            return
        peaks.append(sum(mib for mib in held if mib is not None))
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _held(pid: int) -> float | None:
    """Proportional set size in MiB; None once the process is over."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return None


def commands(path: Path) -> dict[str, list[str]]:
    """The check of a log and its neighbours."""
    return {
        "check": [sys.executable, "-m", "launcher.cli", "check", str(path), "--allow-unproven"],
        "grep": ["grep", "-cE", "Step: [0-9]+", str(path)],
        "loop": [sys.executable, "-c", LINE_LOOP, str(path)],
    }


def pairs(folder: Path) -> Iterator[Pair]:
    """A long run's log of 1 GiB beside grep, one of step lines alone beside a loop over them."""
    for kind, mib, neighbour in (("mixture", 1024, "grep"), ("sft", 256, "loop")):
        path = folder / f"{kind}.log"
        make(kind, path, mib << 20)
        argv = commands(path)
        yield Pair(
            name=f"log scan, {kind}", rounds=3,
            what=f"CPU time of launch check of {mib} MiB / {_TOLD[neighbour]}",
            ours=ratio.command(argv["check"], cpu=True),
            beside=ratio.command(argv[neighbour], cpu=True),
        )  # fmt: skip
        path.unlink()


def cost_of(path: Path, rounds: int) -> dict[str, Cost]:
    """The check and its neighbours on one file, interleaved; of each the fastest round."""
    asked = commands(path)
    costs = [{name: measure(argv) for name, argv in asked.items()} for _ in range(rounds)]
    return {name: min((c[name] for c in costs), key=lambda c: c.seconds) for name in asked}


def main() -> int:
    """Measure and print; always exits 0, the figures are for people and for the record."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="KIND")
    options.add_argument("--mib", type=int, default=1024)
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    rows = {}
    for kind in asked.kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{kind}.log"
            make(kind, path, asked.mib << 20)
            size = os.path.getsize(path) / (1 << 20)
            found = cost_of(path, asked.rounds)
        check, grep, loop = found["check"], found["grep"], found["loop"]
        rows[kind] = {
            "seconds": round(check.seconds, 2),
            "cpu": round(check.cpu, 2),
            "mib_per_second": round(size / check.seconds),
            "peak_mib": round(check.mib),
            "grep": round(grep.seconds, 2),
            "loop": round(loop.seconds, 2),
            "to_grep": round(check.seconds / grep.seconds, 2),
            "to_loop": round(check.seconds / loop.seconds, 2),
        }
        if not asked.json:
            shown = "  ".join(f"{name} {value}" for name, value in rows[kind].items())
            print(f"{kind:<11} {shown}", flush=True)
    if asked.json:
        print(json.dumps({"mib": asked.mib, "cores": os.cpu_count(), "kinds": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
