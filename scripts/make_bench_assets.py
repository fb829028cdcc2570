"""Make what the benchmarks train on, without a network: models of random weights, chats and pairs.

usage: python scripts/make_bench_assets.py [--out build/bench] [--model NAME ...] [--tiny]

OUT/hub               a hub cache: with HF_HUB_OFFLINE=1 HF_HUB_CACHE=OUT/hub the names are found
OUT/sft/train.jsonl   chats of made-up words, as long as those of Tulu 3: 300 tokens on average, 1,100 at most
OUT/dpo/train.jsonl   pairs: two answers of such lengths to the same question
OUT/assets.json       what was made, with the tokens of a sample as they were counted

The shapes are those of launcher/artifacts/shapes.json; weights are made on a GPU if there is one: 15 GB take
seconds. A model that is there already stays. `--tiny` keeps the names and makes everything small, for a CPU.
The same libraries make the same text and, on the same kind of device, the same weights.
"""

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from make_demo_assets import Row, chat, train_tokenizer, write_rows
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from launcher.artifacts import architecture

SEED = 0
COMMIT = f"{SEED:040x}"
"""The revision that the made models have in the hub cache."""
MODELS = ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B")
CHATS, PAIRS = 4_000, 1_000
TOKENS, TINY_TOKENS = (20, 295, 1_040), (8, 40, 100)
"""Of the words of a row: the least, the mean before cutting, the most."""
SPREAD = 0.8
WORDS = 3_000
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1_536,
}  # fmt: skip


def main(out: Path, models: Sequence[str], *, tiny: bool) -> int:
    """Make what is missing; returns the exit code."""
    if unknown := [name for name in models if name.lower() not in architecture.table()]:
        print(f"error: no shape of {', '.join(unknown)} in launcher/artifacts/shapes.json", file=sys.stderr)
        return 1
    chance = random.Random(SEED)
    words = made_up_words(chance)
    tokenizer = train_tokenizer(sentence(chance, words, 40) for _ in range(2_000))
    tokenizer.model_max_length = 32_768
    sample = sentence(chance, words, 10_000)
    each = len(tokenizer(sample)["input_ids"]) / 10_000
    text = Text(chance, words, each, TINY_TOKENS if tiny else TOKENS)

    chats = [text.chat() for _ in range(CHATS // 20 if tiny else CHATS)]
    pairs = [text.pair(row) for row in chats[: PAIRS // 20 if tiny else PAIRS]]
    rows: list[Row] = [{"id": str(n), "messages": row} for n, row in enumerate(chats)]
    write_rows(out / "sft" / "train.jsonl", rows)
    write_rows(out / "dpo" / "train.jsonl", pairs)
    samples = [pair[side] for pair in pairs for side in ("chosen", "rejected")]
    told: dict[str, Any] = {
        "seed": SEED, "tiny": tiny, "chats": counted(tokenizer, chats),
        "pairs": {**counted(tokenizer, samples), "rows": len(pairs)},
        "models": {name: make_model(out, name, tokenizer, tiny=tiny) for name in models},
    }  # fmt: skip
    for what in ("chats", "pairs"):
        said = "{}: {rows:,} of {mean:.0f} tokens a sample on average, {most:,} at most"
        print(said.format(what, **told[what]))
    (out / "assets.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


def made_up_words(chance: random.Random) -> list[str]:
    """Words of one to four syllables."""
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in "aeiou"]
    return ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(WORDS)]


def sentence(chance: random.Random, words: Sequence[str], many: int) -> str:
    """So many words."""
    return " ".join(chance.choices(words, k=max(1, many)))


class Text:
    """Rows of a wanted length: `each` is the tokens of a word, `limits` the least, mean and most of a row."""

    def __init__(self, chance: random.Random, words: Sequence[str], each: float, limits: tuple[int, int, int]) -> None:
        self.chance, self.words, self.each = chance, words, each
        self.least, self.mean, self.most = limits

    def tokens(self) -> float:
        """How long a row is to be: most are short, a few are long."""
        drawn = self.chance.lognormvariate(math.log(self.mean) - SPREAD**2 / 2, SPREAD)
        return min(self.most, max(self.least, drawn))

    def of(self, tokens: float) -> str:
        """A text of about so many tokens."""
        return sentence(self.chance, self.words, round(tokens / self.each))

    def chat(self) -> list[dict[str, str]]:
        """A question and its answer."""
        whole, share = self.tokens(), self.chance.uniform(0.05, 0.3)
        return chat(self.of(share * whole), self.of((1 - share) * whole))

    def pair(self, chosen: list[dict[str, str]]) -> Row:
        """The same question with another answer beside it."""
        question = chosen[0]["content"]
        answer = self.of(max(self.least, self.tokens() - len(question.split()) * self.each))
        return {"chosen": chosen, "rejected": chat(question, answer)}


def counted(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Any]) -> dict[str, float]:
    """Rows, and the tokens of one in its chat template."""
    texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    return {"rows": len(rows), "mean": round(fmean(lengths), 1), "most": max(lengths)}


def snapshot(out: Path, name: str) -> Path:
    """Where the hub cache has a made model."""
    return out / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT


def make_model(out: Path, name: str, tokenizer: PreTrainedTokenizerFast, *, tiny: bool) -> dict[str, int]:
    """Make one model in the hub cache, unless it is there; its parameters and bytes."""
    place, began = snapshot(out, name), time.monotonic()
    known = architecture.table()[name.lower()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = architecture.shape_of({**known, **(TINY if tiny else {})}, name=name).parameters
    if not place.is_dir():
        config = AutoConfig.for_model(
            **{**known, **(TINY if tiny else {})}, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        torch.manual_seed(SEED)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # whole or not at all: what is there is taken for good
        half = place.with_name("half")
        shutil.rmtree(half, ignore_errors=True)
        model.save_pretrained(half)
        tokenizer.save_pretrained(half)
        refs = place.parent.parent / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(COMMIT, encoding="ascii")
        half.rename(place)
    weights = sum(path.stat().st_size for path in place.iterdir())
    told = f"{size / 1e6:,.1f} M parameters, {weights / 2**20:,.0f} MiB"
    print(f"{name}: {told}, {time.monotonic() - began:.0f} s on {device}, {place}", flush=True)
    return {"parameters": size, "bytes": weights}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR")
    parser.add_argument("--model", action="append", metavar="NAME", help="instead of all three")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few rows, for a CPU")
    given = parser.parse_args()
    sys.exit(main(given.out, given.model or MODELS, tiny=given.tiny))
