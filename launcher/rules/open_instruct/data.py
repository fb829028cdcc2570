"""Rules about the data of a run: how long tokenising takes, and which tokenised set is used."""

from __future__ import annotations

import math
from collections.abc import Iterator

from launcher.artifacts.rows import entry_rows
from launcher.errors import Finding
from launcher.rules.context import Context, StageRule, caches_only
from launcher.rules.open_instruct.arguments import listed
from launcher.rules.rule import say

# Rows a second on one core, measured with upstream's own functions (chats of two turns, 556 tokens): 572
# chats, 263 pairs. Upstream reckons with 400 (dataset_transformation.py:115). Rounded up, so that the
# estimate is rather too short.
_CHATS_PER_SECOND = 600.0
_PAIRS_PER_SECOND = 300.0
# SFT then counts tokens row by row, on one core whatever there are (dataset_transformation.py:1966)
_COUNTED_PER_SECOND = 6000.0
# where the number of cores is not known: what would be long even on a large machine
_MANY_CPUS = 64


def tokenising_outlasts(context: Context, seconds: int | None = None) -> Iterator[Finding]:
    """finetune.py:500, dpo_tune_cache.py:247: one process tokenises while the others wait in a
    collective, which ends after `timeout` seconds (finetune.py:377), or after `seconds` whatever it says.
    """
    values = context.values
    patience, rows = seconds or values["timeout"], known_rows(context)
    # one process waits for nobody; 0 is the CPU, one process too
    if context.gpus in {0, 1} or not isinstance(patience, int) or rows is None:
        return
    if caches_only(context):
        return
    data = listed(values)
    needed = tokenising_seconds(rows, pairs=data == "mixer_list", cpus=context.cpus)
    if needed > patience > 0:
        limit = f"`timeout: {patience}`" if seconds is None else f"OLMo-core's {seconds}"
        yield say(
            "warning",
            "run",
            "tokenising-outlasts",
            "timeout" if seconds is None else data,
            f"tokenising {rows:,} rows takes about {math.ceil(needed / 60)} minutes, the other "
            f"processes give up after {limit} seconds",
            "run once with `cache_dataset_only: true`" + (", or raise `timeout`" if seconds is None else ""),
        )


def tokenising_seconds(rows: int, *, pairs: bool, cpus: int | None) -> float:
    """A low estimate, in seconds, of what upstream needs to tokenise this many rows for the first time."""
    cores = max(1, cpus or _MANY_CPUS)
    if pairs:
        return rows / (_PAIRS_PER_SECOND * cores)
    return rows / (_CHATS_PER_SECOND * cores) + rows / _COUNTED_PER_SECOND


def known_rows(context: Context) -> int | None:
    """Rows that the mixer list asks for, at least: sets of unknown size count as nothing.

    None where nothing is known.
    """
    words = context.values[listed(context.values)] or []
    pairs = zip(words[::2], words[1::2], strict=False)
    counted = [entry_rows(str(name), str(amount), estimated=True) for name, amount in pairs]
    known = [rows for rows in counted if rows is not None]
    return sum(known) if known else None


def foreign_cache_key(context: Context) -> Iterator[Finding]:
    """dataset_transformation.py:2120, dataset_transformation.py:1977: no data are named beside such a key."""
    values = context.values
    key = "dataset_config_hash" if "dataset_config_hash" in values else "config_hash"
    if values[key] is not None:
        message = f"`{key}: {values[key]}` decides what is trained on: `{listed(values)}` is not read"
        yield say("warning", "run", "cache-key", key, message, f"leave out `{key}`")


RULES: tuple[StageRule, ...] = (tokenising_outlasts, foreign_cache_key)
