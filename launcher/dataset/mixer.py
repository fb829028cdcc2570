"""Entries of open-instruct's mixer lists, a name and an amount each: how many rows they give."""

import math

from launcher.dataset import survey
from launcher.paths import expand_user, is_file

# Rows of the `train` split, `num_examples` on each set's card at huggingface.co/datasets.
HUB_ROWS = {
    "allenai/tulu-3-sft-mixture": 939_343,
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": 271_409,
    "allenai/llama-3.1-tulu-3-70b-preference-mixture": 334_367,
    "allenai/llama-3.1-tulu-3-405b-preference-mixture": 360_924,
}
# what is read from disk by its name
# (dataset_transformation.py::DatasetConfig.__post_init__[.jsonl],
# dataset_transformation.py::DatasetConfig.__post_init__[elif os.path.exists])
LOCAL_SUFFIXES = (".jsonl", ".parquet")


def count_entry_rows(name: str, amount: str) -> int | None:
    """Rows that one entry gives before filtering; None where that is not known.

    A count stands for itself, rows are repeated
    (dataset_transformation.py::load_dataset_configs[frac_or_num_samples * original_size] rounds a
    share down).
    """
    try:
        if "." not in amount:
            return int(amount)
        share = float(amount)
    except ValueError:
        return None
    rows = HUB_ROWS.get(name)
    if rows is None and name.endswith(LOCAL_SUFFIXES):
        rows = _count_file_rows(name)
    if rows is None or not math.isfinite(share):
        return None
    return int(rows * share)


def _count_file_rows(name: str) -> int | None:
    path = expand_user(name)
    if not is_file(path):
        return None
    surveyed = survey.look([path])
    if surveyed.unread:
        return None
    return surveyed.rows
