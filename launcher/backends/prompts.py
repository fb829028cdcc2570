"""Prompts of local rows that fill all of a sequence: trainers cut the answer off and drop the row."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.backends import model_config, rows
from launcher.backends.context import Context
from launcher.backends.rule import say
from launcher.errors import Finding, brief
from launcher.paths import is_file

Prompt = Callable[[Mapping[str, Any]], Sequence[str] | None]
"""The texts before the first answer of a row, which all have to fit; None where that is not known."""


def before_answer(chat: Any) -> Sequence[str] | None:
    """The contents of a conversation's turns before the first that is trained on."""
    if not isinstance(chat, list):
        return None
    texts: list[str] = []
    for turn in chat:
        content = turn.get("content") if isinstance(turn, dict) else None
        if not isinstance(content, str):
            return None
        if turn.get("role") == "assistant":
            return texts
        texts.append(content)
    return None


def that_fill(
    context: Context, key: str, limit: Any, files: Sequence[tuple[str, Path]], prompt: Prompt
) -> Iterator[Finding]:
    """Says so where most rows of a file's head have no room for an answer within `limit` tokens.

    Counted are the contents alone: with its template a prompt is longer still.
    """
    if not isinstance(limit, int) or limit < 1:
        return
    encoder = None
    for name, path in files:
        told = rows.head(path)
        texts = [prompt(row) for row in told[0]] if told is not None else []
        known = [one for one in texts if one is not None]
        # a token is a byte at least: a tokenizer takes long to be read
        long = [one for one in known if len("".join(one).encode("utf-8", "replace")) >= limit]
        if told is None or 2 * len(long) <= len(texts):
            continue
        encoder = encoder or _encoder(context)
        if encoder is None:
            return
        counts = [sum(len(e.ids) for e in encoder.encode_batch(list(one))) for one in long]
        filled = [count for count in counts if count >= limit]
        if 2 * len(filled) <= len(texts):
            continue
        # what one file drops, another may hold
        every = told[1] and len(filled) == len(texts) and len(files) == 1
        whose = f"{'all' if told[1] else 'the first'} {len(texts):,} rows"
        yield say(
            "error" if every else "warning", "run", "prompts-too-long", key,
            f"`{key}: {limit}`: of {whose} of {brief(name)} {len(filled):,} have prompts of {min(filled):,} "
            f"to {max(filled):,} tokens, which leave no room for an answer: they are dropped"
            + (", and none is left to train on" if every else ""),
            f"write `{key}: {max(filled) * 2}` or more, or shorter prompts",
        )  # fmt: skip


def _encoder(context: Context) -> Any:
    """The model's own tokenizer, where it lies here and can be read."""
    values = context.values
    name = values.get("tokenizer_name_or_path") or values["model_name_or_path"]
    config = model_config.where(name, context.environ, values.get("model_revision"))
    if config is None or not is_file(file := config.with_name("tokenizer.json")):
        return None
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises plain Exceptions
        return None
