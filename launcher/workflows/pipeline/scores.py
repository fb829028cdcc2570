"""The file that an evaluation leaves -> its numbers by name, and the one that a short name stands
for.

Two forms are read: an object of numbers, nested or not, and what lm-evaluation-harness writes,
whose `results` hold for each task numbers that are called `metric,filter` (its docs/interface.md,
`--output_path`).
"""

import contextlib
import glob
import json
import math
import os
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.config import keys
from launcher.config.evaluation import Gate, fill
from launcher.lazy_dataclass import dataclass
from launcher.runs.evaluation import GateResult

LARGEST_BYTES = 256 * 2**20
"""Of a metrics file: lm-evaluation-harness writes single samples into files of their own."""
_DEEPEST = 8
# what stands beside the numbers of a task and measures nothing
_NO_METRICS = frozenset({"alias", "samples", "sample_len", "sample_count", "n"})


class UnreadableScores(Exception):
    """There is no such file, or it holds no object of JSON; the text says which."""


@dataclass(frozen=True, slots=True)
class Scores:
    """`values` holds whatever stands at a full name (`gsm8k/exact_match,strict-match`), a number or
    not. `main` is the full name that a task stands for.
    """

    path: Path
    values: Mapping[str, object] = field(default_factory=dict)
    main: Mapping[str, str] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        numbers = {}
        for name, value in self.values.items():
            number = _read_number(value)
            if number is not None:
                numbers[name] = number
        return numbers

    def full_name(self, name: str) -> str | None:
        """The full name of `gsm8k`, `gsm8k/exact_match` or a full name; None if there is none."""
        if name in self.values:
            return name
        if name in self.main:
            return self.main[name]
        for full in self.values:
            if full.startswith(f"{name},"):
                return full
        return None


@dataclass(frozen=True, slots=True)
class MetricsPlace:
    """Where a metrics file is expected: `path` as it is written, and the same as a `pattern` of
    glob.
    """

    path: Path
    pattern: str

    @classmethod
    def of(cls, text: str, folder: Path, values: Mapping[str, str]) -> "MetricsPlace":
        """A text of `metrics:`; what its placeholders stand for is no pattern, whatever characters
        it holds.
        """
        escaped = {name: glob.escape(value) for name, value in values.items()}
        pattern = os.path.join(glob.escape(str(folder)), fill(text, escaped))
        return cls(path=folder / fill(text, values), pattern=pattern)

    def matching(self) -> list[Path]:
        # a name may hold brackets
        if self.path.is_file():
            return [self.path]
        paths = map(Path, glob.glob(self.pattern, recursive=True))
        return sorted(path for path in paths if os.path.isfile(path))


Snapshot = Mapping[Path, tuple[int, ...]]
"""The files that matched at one moment, with what no write leaves as it is."""


def take_snapshot(place: MetricsPlace) -> Snapshot:
    return {path: _read_file_state(path) for path in place.matching()}


def find_written_since(before: Snapshot, place: MetricsPlace) -> Path:
    """The newest file that matches and was written since. Raises UnreadableScores if none was."""
    matching = place.matching()
    fresh = [path for path in matching if before.get(path) != _read_file_state(path)]
    if fresh:
        return max(fresh, key=lambda path: (_read_file_state(path)[-1], str(path)))
    fault = f"the command wrote no {place.path}"
    if matching:
        fault += f": {matching[-1]} is of an earlier evaluation"
    raise UnreadableScores(fault)


def _read_file_state(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_scores(path: Path) -> Scores:
    """Raises UnreadableScores."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UnreadableScores(f"{path} is larger than {LARGEST_BYTES // 2**20} MiB")
        content = json.loads(files.read_bytes(path))
    except OSError as error:
        raise UnreadableScores(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UnreadableScores(f"{path} is not JSON") from None
    if not isinstance(content, Mapping):
        raise UnreadableScores(f"{path} holds no object of names and numbers")
    values: dict[str, object] = {}
    main: dict[str, str] = {}
    _flatten(_find_tasks(content), "", values, main)
    scores = Scores(path=path, values=values, main=main)
    if not scores.numbers:
        raise UnreadableScores(f"{path} holds no number")
    return scores


def _find_tasks(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tasks and groups of lm-evaluation-harness; of any other file the whole."""
    results = content.get("results")
    groups = content.get("groups")
    if not isinstance(results, Mapping):
        return content
    if not all(isinstance(task, Mapping) for task in results.values()):
        return content
    if not isinstance(groups, Mapping):
        return results
    return {**groups, **results}


def _flatten(
    tree: Mapping[str, Any],
    prefix: str,
    values: dict[str, object],
    main: dict[str, str],
    depth: int = 0,
) -> None:
    for key, value in tree.items():
        name = f"{prefix}{key}".strip()
        if not isinstance(value, Mapping):
            values[name] = value
        elif depth < _DEEPEST:
            _flatten(value, f"{name}/", values, main, depth + 1)
            chosen = _find_main_metric(value)
            if chosen is not None:
                main[name] = f"{name}/{chosen}".strip()


def _find_main_metric(task: Mapping[str, Any]) -> str | None:
    """The first metric of a task, which lm-evaluation-harness has in the order of the task."""
    measures = [key for key in task if key not in _NO_METRICS and not _is_error(key)]
    for key in measures:
        if "," in key:
            return key
    for key in measures:
        if _read_number(task[key]) is not None:
            return key
    return None


def _is_error(name: str) -> bool:
    """Whether a name is that of a standard error: `acc_stderr,none`."""
    return name.partition(",")[0].endswith("_stderr")


def _read_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with contextlib.suppress(OverflowError):
        if math.isfinite(value):
            return float(value)
    return None


def judge_scores(scores: Scores, expect: Mapping[str, Gate]) -> tuple[GateResult, ...]:
    """Each gate against its number; one without a number fails."""
    return tuple(_judge_gate(scores, name, gate) for name, gate in expect.items())


def _judge_gate(scores: Scores, name: str, gate: Gate) -> GateResult:
    full = scores.full_name(name)
    result = GateResult(metric=name, expected=str(gate), ok=False, name=full)
    if full is None:
        names = list(dict.fromkeys([*scores.main, *scores.numbers]))
        advice = keys.suggest_name(name, names[:20])
        return replace(result, reason=f"{scores.path} has no metric `{name}`: {advice}")
    value = _read_number(scores.values[full])
    if value is None:
        shown = json.dumps(scores.values[full])[:80]
        return replace(result, reason=f"`{full}` in {scores.path} is {shown}, not a number")
    if gate.holds(value):
        return replace(result, ok=True, value=value)
    return replace(result, value=value, reason=f"{full} is {value:.6g}, expected {gate}")
