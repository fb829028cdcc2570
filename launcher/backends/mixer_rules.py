"""Rules for open-instruct's mixer list: `[name, amount, name, amount, ...]`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.backends import rows
from launcher.backends.rule import Rule, say
from launcher.errors import Finding, brief
from launcher.paths import exists
from launcher.schema import Values

LOCAL_DATA = (".jsonl", ".json", ".parquet")


def listed(values: Values) -> str:
    """How this stage calls its mixer list."""
    return "mixer_list" if "mixer_list" in values.schema.fields else "dataset_mixer_list"


def no_data(values: Values) -> Iterator[Finding]:
    """SFT would train on a small default set (finetune.py:126); DPO's default is an empty list."""
    data = listed(values)
    others = ("dataset_name", "dataset_mixer", "train_file")
    if values[data] is None and any(values.get(other) is not None for other in others):
        return  # a commit that takes its data from there too
    if not values.given(data):
        what = f"train on its default {values[data]}" if values[data] else "find no data at all"
        yield say(
            "error", "launch", "no-data", data,
            f"no data named: upstream would {what}", f"add `{data}: [name, amount, ...]`",
        )  # fmt: skip


def mixer_amounts(values: Values) -> Iterator[Finding]:
    """dataset_transformation.py:2051: with a dot a share, without one a count."""
    data = listed(values)
    if not values.given(data):
        return
    words = values[data]
    if len(words) % 2:
        yield say(
            "error", "run", "odd-mixer-list", data,
            f"`{data}` alternates names and amounts, but has {len(words)} entries",
            "every set needs its amount: 1.0 is all of it, 200 is 200 samples",
        )  # fmt: skip
        return
    for index in range(0, len(words), 2):
        name, amount = words[index : index + 2]
        yield from _amount(f"{data}[{index + 1}]", str(name), str(amount))


def _amount(key: str, name: str, amount: str) -> Iterator[Finding]:
    try:
        number = float(amount) if "." in amount else int(amount)
    except ValueError:
        yield say(
            "error", "run", "mixer-amount", key, f"`{brief(amount)}` is no amount for {name}",
            "with a dot it is a share (0.25), without one a number of samples (200)",
        )  # fmt: skip
        return
    if not number > 0:
        # below 0 upstream counts from the end, and draws at random (dataset_transformation.py:1658)
        what = f"is below 0, for {name}" if number < 0 else f"leaves nothing of {name}"
        message = f"the amount {amount} {what}"
        yield say("error", "run", "mixer-amount", key, message)
    elif number == 1 and isinstance(number, int):
        message = f"the amount {amount} is ONE sample of {name}"
        yield say("warning", "run", "one-sample", key, message, "1.0 is all of it")


def mixer_splits(values: Values) -> Iterator[Finding]:
    """dataset_transformation.py:2041: one split for all, or one for every entry, amounts included."""
    data = listed(values)
    splits, words = values[f"{data}_splits"], values[data]
    if values.given(data) and splits and len(splits) not in {1, len(words)}:
        yield say(
            "error", "run", "mixer-splits", f"{data}_splits",
            f"`{data}_splits` has {len(splits)} entries: upstream wants 1, or {len(words)} "
            f"(as many as `{data}`, amounts included)",
        )  # fmt: skip


def local_splits(values: Values) -> Iterator[Finding]:
    """dataset_transformation.py:1619, dataset_transformation.py:1624: a local file is all `train`."""
    data = listed(values)
    splits, words = values[f"{data}_splits"] or [], values[data] or []
    if not values.given(data) or len(splits) not in {1, len(words)}:
        return
    for index in range(0, len(words), 2):
        name, split = str(words[index]), splits[0] if len(splits) == 1 else splits[index]
        if name.endswith((".jsonl", ".parquet")) and split != "train" and exists(Path(name)):
            yield say(
                "error", "run", "local-split", f"{data}_splits",
                f"{brief(name)} is a local file, which has the split train only, not `{brief(split)}`",
                f"write `{data}_splits: [train]`",
            )  # fmt: skip


def too_few_samples(values: Values) -> Iterator[Finding]:
    """dpo_tune_cache.py:400 shows three samples of the set before it begins."""
    data = listed(values)
    amounts = [str(amount) for amount in (values[data] or [])[1::2]]
    if not values.given(data) or not all(amount.isdecimal() for amount in amounts):
        return
    if amounts and 0 < (total := sum(map(int, amounts))) < 3 and not values["cache_dataset_only"]:
        yield say(
            "error", "run", "too-few-samples", data,
            f"`{data}` asks for {total} sample(s), DPO crashes with fewer than 3",
        )  # fmt: skip


def missing_data_files(values: Values) -> Iterator[Finding]:
    """dataset_transformation.py:1618: what is no .jsonl or .parquet here is looked up on the hub."""
    data = listed(values)
    if not values.given(data):
        return
    for index, word in enumerate(values[data][::2]):
        name, key = str(word), f"{data}[{2 * index}]"
        if not name.endswith(LOCAL_DATA):
            continue
        # upstream expands no `~`
        if not exists(Path(name)):
            yield say(
                "warning", "run", "missing-data", key, f"there is no file {brief(name)} here",
                "relative paths start where launch is started; `~` is not expanded",
            )  # fmt: skip
        elif name.endswith(".json"):
            yield say(
                "error", "run", "json-data", key,
                f"{brief(name)} would be looked up on the hub: only .jsonl and .parquet are read from disk",
                "write one JSON object a line, and name the file .jsonl",
            )  # fmt: skip
        elif (what := rows.fault(Path(name))) is not None:
            yield say(
                "error", "run", "bad-data", key, f"{brief(name)}: {what}", "correct the file, or name another"
            )  # fmt: skip


RULES: tuple[Rule, ...] = (
    no_data, mixer_amounts, mixer_splits, local_splits, missing_data_files,
)  # fmt: skip
