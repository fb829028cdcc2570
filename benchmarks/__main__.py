"""launch's own cost in one place, each part beside its physical neighbour.

usage: python -m benchmarks [PART...] [--check] [--stored benchmarks/results.json]

Without `--check` the ratios are stored. With it they are compared with what is stored: exit code 1
names each that is more than 20 % worse, and by how much, once measuring it three times over has not
helped. Minutes on two cores; PART (start_up, validation, logs, probe, launching, keeping, content,
pages) measures only that.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import (
    check,
    fingerprint,
    keeping,
    launching,
    probe,
    ratio,
    report,
    surroundings,
    validate,
)
from benchmarks.ratio import Pair, Ratio, Regression

STORED = ratio.ROOT / "benchmarks" / "results.json"
PARTS: dict[str, Callable[[Path], Iterator[Pair]]] = {
    "start_up": launching.starting,
    "validation": validate.pairs,
    "logs": check.pairs,
    "keeping": keeping.pairs,
    "content": fingerprint.pairs,
    "pages": report.pairs,
    "probe": probe.pairs,
    "launching": launching.pairs,
}


def pairs(parts: Sequence[str]) -> Iterator[Pair]:
    """Everything that is measured, each part in a folder of its own, with state of its own."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as compiled:
        # launch is used from modules that are compiled once, and not anew in every process
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = compiled
        try:
            for part in parts or PARTS:
                yield from _pairs(part)
        finally:
            os.environ.clear()
            os.environ.update(before)


def _pairs(part: str) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        # nothing of this user's runs and caches is read or written
        for name in ("LAUNCH_RUNS", "XDG_STATE_HOME", "LAUNCH_CACHE"):
            os.environ[name] = str(place / name.lower())
        yield from PARTS[part](place)


def warn_if_shared(others: float) -> None:
    if others >= surroundings.SHARED:
        print(
            f"the machine was shared: others took {others:.0%} of the processors", file=sys.stderr
        )


def store(options: argparse.Namespace) -> int:
    """Measure and store the ratios; nothing is stored if only some parts are measured."""
    others = surroundings.Others()
    ratios: list[Ratio] = []
    for pair in pairs(options.parts):
        ratios.append(ratio.measure(pair))
        print(ratios[-1].line(), flush=True)
    about = surroundings.about(others.share())
    warn_if_shared(others.share())
    if options.parts:
        print("only a part was measured: nothing is stored", file=sys.stderr)
    else:
        ratio.write(options.stored, ratios, about)
    return 0


def compare(options: argparse.Namespace) -> int:
    """Measure and compare with the stored ratios; 1 if one became worse, 2 without stored ones."""
    try:
        stored = ratio.read(options.stored)
    except ValueError as error:
        print(f"{error}; `make bench` stores them", file=sys.stderr)
        return 2
    others = surroundings.Others()
    regressions: list[Regression] = []
    missing: set[str] = set()
    if not options.parts:
        missing.update(stored)
    for pair in pairs(options.parts):
        if pair.name not in stored:
            print(f"{ratio.measure(pair).line()}  [not stored]", flush=True)
            continue
        missing.discard(pair.name)
        measured, regression = ratio.compare(pair, stored[pair.name])
        print(f"{measured.line()}  [{stored[pair.name]:.3g} stored]", flush=True)
        if regression is not None:
            regressions.append(regression)
    for name in sorted(missing):
        print(f"{name}: stored, and cannot be measured here", file=sys.stderr)
    warn_if_shared(others.share())
    for regression in regressions:
        print(f"regression: {regression.line()}", file=sys.stderr)
    return 1 if regressions else 0


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--stored", type=Path, default=STORED)
    options = parser.parse_args(arguments)
    if options.check:
        return compare(options)
    return store(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
