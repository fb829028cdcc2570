"""How long upstream tokenises, while the other processes wait."""

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
    values, key = context.values, listed(context.values)
    patience, rows = seconds or values["timeout"], _known_rows(values[key] or [])
    # one process waits for nobody; 0 is the CPU, one process too
    if context.gpus in {0, 1} or not isinstance(patience, int) or caches_only(context):
        return
    cores = context.cpus or _MANY_CPUS
    needed = rows / (_CHATS_PER_SECOND * cores) + rows / _COUNTED_PER_SECOND
    if key == "mixer_list":
        needed = rows / (_PAIRS_PER_SECOND * cores)
    if needed > patience > 0:
        limit = f"`timeout: {patience}`" if seconds is None else f"OLMo-core's {seconds}"
        minutes = math.ceil(needed / 60)
        message = f"tokenising {rows:,} rows takes about {minutes} minutes, the other processes give up after {limit} "
        help = "run once with `cache_dataset_only: true`" + (", or raise `timeout`" if seconds is None else "")
        place = "timeout" if seconds is None else key
        yield say("warning", "tokenising-outlasts", place, f"{message}seconds", help)


def _known_rows(words: list[str]) -> int:
    """Rows that a mixer list asks for, at least: sets of unknown size count as nothing."""
    pairs = zip(words[::2], words[1::2], strict=False)
    return sum(entry_rows(str(name), str(amount)) or 0 for name, amount in pairs)


RULES: tuple[StageRule, ...] = (tokenising_outlasts,)
