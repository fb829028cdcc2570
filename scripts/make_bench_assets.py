"""Make what the benchmarks train on, without a network: models of random weights, chats and pairs.

usage: python scripts/make_bench_assets.py [--out build/bench] [--model NAME ...] [--tiny]

OUT/hub               a hub cache, used with HF_HUB_OFFLINE=1 HF_HUB_CACHE=OUT/hub
OUT/sft/train.jsonl   chats of made-up words with the lengths of Tulu 3: 300 tokens on average,
                      1,100 at most
OUT/dpo/train.jsonl   pairs: two answers of such lengths to the same question
OUT/assets.json       a summary: numbers of rows, their tokens, parameters and bytes of the models

The shapes are those of launcher/artifacts/shapes.json. Weights are made on a GPU if there is one:
15 GB take seconds. Existing models stay. `--tiny` keeps the names and makes everything small, for a
CPU. The same libraries make the same text and, on the same kind of device, the same weights.
"""

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from make_demo_assets import Message, Row, chat, train_tokenizer, write_rows
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from launcher.artifacts import architecture

SEED = 0
COMMIT = f"{SEED:040x}"
"""The revision of the made models in the hub cache."""
MODELS = ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B")
SPREAD = 0.8
WORDS = 3_000
TINY_SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1_536,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers of rows; the least, mean (before cutting) and most tokens of the words of a row."""

    chats: int
    pairs: int
    least: int
    mean: int
    most: int


FULL = Size(chats=4_000, pairs=1_000, least=20, mean=295, most=1_040)
TINY = Size(chats=200, pairs=50, least=8, mean=40, most=100)


def main(out: Path, models: Sequence[str], *, tiny: bool) -> int:
    """Make what is missing; returns the exit code."""
    unknown = [name for name in models if name.lower() not in architecture.load_known_shapes()]
    if unknown:
        names = ", ".join(unknown)
        print(f"error: no shape of {names} in launcher/artifacts/shapes.json", file=sys.stderr)
        return 1
    size = TINY if tiny else FULL
    chance = random.Random(SEED)
    words = make_up_words(chance)
    tokenizer = train_tokenizer(draw_text(chance, words, 40) for _ in range(2_000))
    tokenizer.model_max_length = 32_768
    sample = draw_text(chance, words, 10_000)
    tokens_per_word = len(tokenizer(sample)["input_ids"]) / 10_000
    writer = Writer(chance, words, tokens_per_word, size)

    chats = write_chats(out / "sft" / "train.jsonl", writer)
    first_chats = chats[: size.pairs]
    answers = write_pairs(out / "dpo" / "train.jsonl", writer, first_chats)
    summary: dict[str, Any] = {
        "seed": SEED,
        "tiny": tiny,
        "chats": {"rows": len(chats), **measure_lengths(tokenizer, chats)},
        "pairs": {"rows": len(first_chats), **measure_lengths(tokenizer, answers)},
        "models": {name: make_model(out, name, tokenizer, tiny=tiny) for name in models},
    }
    for name in ("chats", "pairs"):
        line = "{}: {rows:,} of {mean:.0f} tokens a sample on average, {most:,} at most"
        print(line.format(name, **summary[name]))
    (out / "assets.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0


def make_up_words(chance: random.Random) -> list[str]:
    """Words of one to four syllables."""
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in "aeiou"]
    return ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(WORDS)]


def draw_text(chance: random.Random, words: Sequence[str], count: int) -> str:
    return " ".join(chance.choices(words, k=max(1, count)))


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes rows of the wanted lengths."""

    chance: random.Random
    words: Sequence[str]
    tokens_per_word: float
    size: Size

    def draw_length(self) -> float:
        """The tokens of a row: most rows are short, a few are long."""
        mean = math.log(self.size.mean) - SPREAD**2 / 2
        length = self.chance.lognormvariate(mean, SPREAD)
        return min(self.size.most, max(self.size.least, length))

    def write(self, tokens: float) -> str:
        """A text of about so many tokens."""
        return draw_text(self.chance, self.words, round(tokens / self.tokens_per_word))

    def write_chat(self) -> list[Message]:
        length = self.draw_length()
        share = self.chance.uniform(0.05, 0.3)
        question = self.write(share * length)
        return chat(question, self.write((1 - share) * length))

    def write_rejected(self, question: str) -> list[Message]:
        """The question with another answer."""
        length = self.draw_length() - len(question.split()) * self.tokens_per_word
        return chat(question, self.write(max(self.size.least, length)))


def write_chats(path: Path, writer: Writer) -> list[list[Message]]:
    """Write the rows for SFT; returns the chats in them."""
    chats = []
    rows: list[Row] = []
    for number in range(writer.size.chats):
        messages = writer.write_chat()
        chats.append(messages)
        rows.append({"id": str(number), "messages": messages})
    write_rows(path, rows)
    return chats


def write_pairs(path: Path, writer: Writer, chats: Iterable[list[Message]]) -> list[list[Message]]:
    """Write the rows for DPO, another answer beside each chat; returns all chats in them."""
    answers = []
    rows: list[Row] = []
    for chosen in chats:
        rejected = writer.write_rejected(chosen[0]["content"])
        rows.append({"chosen": chosen, "rejected": rejected})
        answers += [chosen, rejected]
    write_rows(path, rows)
    return answers


def measure_lengths(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[list[Message]]
) -> dict[str, float]:
    """The mean and most tokens of a row in its chat template."""
    texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    return {"mean": round(fmean(lengths), 1), "most": max(lengths)}


def make_model(
    out: Path, name: str, tokenizer: PreTrainedTokenizerFast, *, tiny: bool
) -> dict[str, int]:
    """Make a model in the hub cache unless it exists; returns its parameters and bytes."""
    began = time.monotonic()
    folder = out / "hub" / f"models--{name.replace('/', '--')}"
    place = folder / "snapshots" / COMMIT
    shape = dict(architecture.load_known_shapes()[name.lower()])
    if tiny:
        shape.update(TINY_SHAPE)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not place.is_dir():
        config = AutoConfig.for_model(
            **shape, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        torch.manual_seed(SEED)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # renamed once it is whole: an existing model counts as whole
        partial = place.with_name("half")
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(COMMIT, encoding="ascii")
        partial.rename(place)
    parameters = architecture.parse_shape(shape, name=name).parameters
    size = sum(path.stat().st_size for path in place.iterdir())
    text = f"{parameters / 1e6:,.1f} M parameters, {size / 2**20:,.0f} MiB"
    seconds = time.monotonic() - began
    print(f"{name}: {text}, {seconds:.0f} s on {device}, {place}", flush=True)
    return {"parameters": parameters, "bytes": size}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR")
    parser.add_argument("--model", action="append", metavar="NAME", help="instead of all three")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few rows, for a CPU")
    options = parser.parse_args()
    sys.exit(main(options.out, options.model or MODELS, tiny=options.tiny))
