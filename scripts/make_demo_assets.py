"""Make what the demo trains on, without a network: chats, pairs, a tokenizer and a tiny model.

usage: python scripts/make_demo_assets.py DIR

The text is real: the docstrings in the source of the standard library of the running Python.
DIR/data/sft/train.jsonl   chats: a question about a module, class or function, and its docstring
DIR/data/dpo/train.jsonl   pairs: the right docstring is chosen, that of another object rejected
DIR/model                  a randomly initialised Qwen2 in float32, and a byte-level BPE tokenizer
The same Python and the same libraries make the same files.
"""

import argparse
import ast
import json
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

SEED = 0
CHATS = 1200
FEWEST_CHATS = 200
PREFERENCES = 400
ANSWER_CHARACTERS = (40, 320)
VOCABULARY = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SKIPPED_PACKAGES = frozenset(
    {"idlelib", "lib2to3", "site-packages", "dist-packages", "test", "tests", "turtledemo"}
)
QUESTIONS = {
    "module": ("What is the module `{}` for?", "Describe the Python module `{}`.", "Explain `{}`."),
    "class": ("What is `{}`?", "Describe the Python class `{}`.", "When would I use `{}`?"),
    "function": ("What does `{}` do?", "Explain `{}`.", "Describe the Python function `{}`."),
}
# ChatML. The generation block marks the answer, so that TRL's `assistant_only_loss` works too.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Message = dict[str, str]
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One documented object of the standard library, by its dotted name."""

    name: str
    kind: str
    answer: str


def main(folder: Path) -> int:
    entries = choose(standard_library_entries())
    if len(entries) < FEWEST_CHATS:
        source = sysconfig.get_path("stdlib")
        print(
            f"error: {len(entries)} usable docstrings under `{source}`, {FEWEST_CHATS} needed: "
            "run this with a Python whose standard library ships its source, docstrings included",
            file=sys.stderr,
        )
        return 1
    chats = sft_rows(entries)
    write_rows(folder / "data/sft/train.jsonl", chats)
    preferences = dpo_rows(entries)
    write_rows(folder / "data/dpo/train.jsonl", preferences)

    tokenizer = train_tokenizer(text for entry in entries for text in (entry.name, entry.answer))
    model = make_model(tokenizer)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder / 'model'}: {parameters / 1e6:.1f} M parameters, {len(tokenizer)} tokens")
    return 0


def standard_library_entries() -> Iterator[Entry]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if parts and SKIPPED_PACKAGES.isdisjoint(parts) and all(map(public, parts)):
            yield from file_entries(path, ".".join(parts))


def file_entries(path: Path, module: str) -> Iterator[Entry]:
    # Parsing, not importing: `antigravity` opens a browser and `this` prints.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # lib2to3 once shipped files that are meant not to parse
            return
    yield from node_entries(tree, module)


def node_entries(node: Documented, name: str) -> Iterator[Entry]:
    answer = opening(ast.get_docstring(node) or "")
    if answer:
        kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
        yield Entry(name=name, kind=kind, answer=answer)
    if not isinstance(node, ast.Module | ast.ClassDef):
        return
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if public(child.name):
            yield from node_entries(child, f"{name}.{child.name}")


def public(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_")


def opening(docstring: str) -> str:
    """The first paragraphs that fit the length limit, or nothing if even the first one does not."""
    shortest, longest = ANSWER_CHARACTERS
    answer = ""
    for paragraph in docstring.strip().split("\n\n"):
        longer = paragraph.rstrip()
        if answer:
            longer = f"{answer}\n\n{longer}"
        if len(longer) > longest:
            break
        answer = longer
    if len(answer) < shortest:
        return ""
    return answer


def choose(entries: Iterable[Entry]) -> list[Entry]:
    # Sibling classes repeat their docstrings: as a preference pair two equal answers teach nothing.
    by_answer: dict[str, Entry] = {}
    for entry in entries:
        by_answer.setdefault(entry.answer, entry)
    distinct = list(by_answer.values())
    return random.Random(SEED).sample(distinct, min(CHATS, len(distinct)))


def sft_rows(entries: Sequence[Entry]) -> list[Row]:
    rows: list[Row] = []
    for index, entry in enumerate(entries):
        questions = QUESTIONS[entry.kind]
        question = questions[index % len(questions)].format(entry.name)
        rows.append({"id": entry.name, "messages": chat(question, entry.answer)})
    return rows


def dpo_rows(entries: Sequence[Entry]) -> list[Row]:
    """Pairs of neighbours by length, so that length tells nothing.

    No answer is in two pairs: rejected here and chosen there, it would pull both ways.
    """
    ordered = sorted(entries, key=lambda entry: (len(entry.answer), entry.name))
    pairs = list(zip(ordered[::2], ordered[1::2], strict=False))
    rows: list[Row] = []
    sample = random.Random(SEED).sample(pairs, min(PREFERENCES, len(pairs)))
    for index, (right, wrong) in enumerate(sample):
        questions = QUESTIONS[right.kind]
        question = questions[index % len(questions)].format(right.name)
        rows.append(
            {
                "id": right.name,
                "chosen": chat(question, right.answer),
                "rejected": chat(question, wrong.answer),
            }
        )
    return rows


def chat(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows, {path.stat().st_size / 1024:.0f} KiB")


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    # AutoTokenizer rebuilds the tokenizer of a Qwen2 model with Qwen2's own way to split text,
    # whatever tokenizer.json says: learn the merges on the same pieces.
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    bpe.normalizer = qwen2.normalizer
    bpe.pre_tokenizer = qwen2.pre_tokenizer
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    # The end of a turn is the end of the text, so both back ends teach the model to stop;
    # padding needs a token of its own, or the end would be masked out of the loss.
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", metavar="DIR", type=Path, help="created if it is missing")
    sys.exit(main(parser.parse_args().folder))
