"""What is wrong with prepared rows although the trainer refuses none of them -> findings."""

from collections.abc import Iterator

from launcher.errors import Finding, Severity
from launcher.upstream.trainers import Entry
from launcher.workflows.rehearse.inside.records import FilterPass, PreparedRows

DROPPED = "rows-dropped"
"""The code of rows that the trainer leaves out."""
_MUCH = 0.1
"""The share of rows from which a remark about rows is worth a warning."""
# what a pass that leaves rows out says of itself, why it does, and what to do
_LARGER = "a larger `{length}`, or shorter prompts"
_DROPPED = (
    ("fully masked", "no token of them that counts in the loss is within `{length}`", _LARGER),
    ("fully truncated", "their prompt alone fills `{length}`", _LARGER),
    ("sft_tulu_filter", "no token of them that counts in the loss is within `{length}`", _LARGER),
    (
        "preference_tulu_filter",
        "no token of an answer that counts in the loss is within `{length}`",
        _LARGER,
    ),
    (
        "sft_filter",
        "they are longer than the filter allows, or no token of them counts in the loss",
        "",
    ),
    ("preference_filter", "they are longer than the filter allows", ""),
)


def create_trainer_finding(
    severity: Severity, code: str, message: str, help: str | None = None, *, key: str | None
) -> Finding:
    return Finding(
        severity=severity, layer="trainer", code=code, message=message, help=help, key=key
    )


def check_rows(rows: PreparedRows, entry: Entry, data_key: str) -> Iterator[Finding]:
    """`data_key` is the key that names the data."""
    for dropping in rows.dropped:
        yield _report_dropped(dropping, rows, entry, data_key)
    which = _name_rows(rows)
    if rows.empty:
        message = f"{rows.empty / rows.rows:.0%} of {which} have no token"
        severity = _choose_severity(rows.empty, rows)
        yield create_trainer_finding(severity, "empty-rows", message, key=data_key)
    if rows.masked > rows.empty:
        message = f"{rows.masked / rows.rows:.0%} of {which} have no token that counts in the loss"
        help = (
            "an answer that is cut off, or a chat template without the markers that masking needs"
        )
        severity = _choose_severity(rows.masked, rows)
        yield create_trainer_finding(severity, "nothing-to-learn", message, help, key=data_key)
    length = entry.names.max_length
    if rows.cut >= _MUCH * rows.rows:
        message = f"{rows.cut / rows.rows:.0%} of {which} are cut off at the limit"
        help = f"a larger `{length}`"
        yield create_trainer_finding("warning", "cut-rows", message, help, key=f"args.{length}")
    for token, present in rows.present.items():
        if present < (rows.rows - rows.cut) * (1 - _MUCH):
            message = f"only {present / rows.rows:.0%} of {which} hold the tokenizer's end token "
            message += f"`{token}`: the model does not learn to stop"
            help = "a chat template that ends answers with it"
            yield create_trainer_finding("warning", "no-end-token", message, help, key=data_key)


def _choose_severity(count: int, rows: PreparedRows) -> Severity:
    return "error" if count == rows.rows else "warning"


def _name_rows(rows: PreparedRows, count: int | None = None) -> str:
    """The rows that were rehearsed, in words: the first ones, unless others were added."""
    number = "" if count is None else f"{count:,} "
    if rows.further:
        return f"the {number}rows rehearsed"
    return f"the first {number}rows"


def _report_dropped(
    dropping: FilterPass, rows: PreparedRows, entry: Entry, data_key: str
) -> Finding:
    """Rows that the trainer leaves out, by the sizes of its own data set before and after."""
    length = entry.names.max_length
    where = _name_rows(rows, dropping.before)
    # open-instruct repeats the rows of a set of which more are wanted than it has
    if rows.total == dropping.before:
        where = f"{dropping.before:,} rows"
    message = f"{dropping.before - dropping.after:,} of {where} are dropped"
    for words, reason, help in _DROPPED:
        if words not in dropping.what:
            continue
        message += f": {reason.format(length=length)}"
        if help:
            help = help.format(length=length)
            return create_trainer_finding("warning", DROPPED, message, help, key=f"args.{length}")
        return create_trainer_finding("warning", DROPPED, message, key=data_key)
    if dropping.what:
        message += f": left out by {dropping.what}"
    return create_trainer_finding("warning", DROPPED, message, key=data_key)
