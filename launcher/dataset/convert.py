"""Rows of a known form -> JSON lines that the trainers read."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from launcher.dataset import reading, shapes, sources, survey
from launcher.dataset.reading import BadRow
from launcher.dataset.shapes import CannotConvert
from launcher.dataset.survey import Fault
from launcher.errors import InvalidConfig, UsageError, launch_finding, usage
from launcher.lazy_dataclass import dataclass
from launcher.paths import is_dir, is_file

_SAY_EVERY_S = 2.0
_MOST_FAULTS = 20  # rows that are told one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion wrote: `rows` of the form `shape` into `output`; `skipped` rows were left
    out.
    """

    output: Path
    rows: int
    shape: str
    into: str
    skipped: tuple[Fault, ...] = ()


def convert(
    source: Path,
    output: Path,
    *,
    split: str = "train",
    skip: bool = False,
    say: Callable[[str], None] | None = None,
) -> Converted:
    """Convert the rows of a file, or of the split of a folder; `say` gets the progress.

    Raises UsageError where there is nothing to convert, or `output` is there already; InvalidConfig
    where rows have not the form of the others, unless `skip` leaves them out. Writes all of
    `output` or nothing.
    """
    files = _find_files(source, split)
    if os.path.exists(output):
        raise usage(
            "output-exists", f"{output} is there already", "name another file, or delete it"
        )
    if output.suffix != ".jsonl":
        raise usage("bad-output", f"{output} would hold JSON lines", "name it .jsonl")
    surveyed = survey.look(files)
    if surveyed.unread:
        raise usage("unreadable-data", "; ".join(surveyed.unread), "pip install pyarrow")
    shape = shapes.recognise(surveyed)
    if shape is None and any(reading.find_data_suffix(file) != ".jsonl" for file in files):
        shape = shapes.find_readable_form(surveyed)
    if shape is None:
        raise _refuse_form(source, surveyed)
    output.parent.mkdir(parents=True, exist_ok=True)
    half = output.with_name(f".{output.name}.{os.urandom(4).hex()}")
    try:
        rows, faults = _write_rows(files, half, shape, say or (lambda _: None))
        if faults and not skip:
            raise _report_faults(faults)
        os.rename(half, output)
    finally:
        with contextlib.suppress(FileNotFoundError):
            half.unlink()
    return Converted(
        output=output, rows=rows, shape=shape.name, into=shape.into, skipped=tuple(faults)
    )


def _find_files(source: Path, split: str) -> tuple[Path, ...]:
    if is_dir(source):
        data = sources.find_named_source(str(source), split, None, os.environ)
    elif is_file(source):
        data = sources.open_file_source(str(source))
    else:
        raise usage("no-such-data", f"there is no file or folder {source}")
    if not data.files:
        raise usage("no-such-data", f"{source}: {data.fault or data.unseen}")
    return data.files


def _write_rows(
    files: tuple[Path, ...], output: Path, shape: shapes.RowForm, say: Callable[[str], None]
) -> tuple[int, list[Fault]]:
    rows = 0
    faults = []
    began = time.monotonic()
    said_at = began
    with output.open("w", encoding="utf-8") as stream:
        for file in files:
            for number, row in reading.read_rows(file):
                try:
                    if isinstance(row, BadRow):
                        raise CannotConvert(row.reason)
                    if not isinstance(row, dict):
                        raise CannotConvert("is not a JSON object")
                    converted = shape.convert(row)
                except CannotConvert as error:
                    faults.append(Fault(str(file), str(error), number))
                    continue
                stream.write(json.dumps(converted, ensure_ascii=False, default=str) + "\n")
                rows += 1
                now = time.monotonic()
                if now - said_at >= _SAY_EVERY_S:
                    said_at = now
                    say(f"converting {file}: {rows:,} rows in {now - began:.0f} s")
    return rows, faults


def _refuse_form(source: Path, surveyed: survey.Survey) -> UsageError:
    columns = ", ".join(sorted(surveyed.columns)) or "no columns"
    message = f"{source} has {columns}: launch knows no conversion of such rows"
    help = "rows that a trainer reads need none: launch validate-config says which columns it reads"
    return usage("unknown-form", message, help)


def _report_faults(faults: list[Fault]) -> InvalidConfig:
    shown = [
        launch_finding("error", "bad-data", f"{fault.reason}", file=fault.file, line=fault.number)
        for fault in faults[:_MOST_FAULTS]
    ]
    if len(faults) > _MOST_FAULTS:
        shown.append(launch_finding("error", "bad-data", f"{len(faults) - _MOST_FAULTS} more rows"))
    shown.append(
        launch_finding("note", "bad-data", "nothing was written", "--skip leaves these rows out")
    )
    return InvalidConfig(shown)
