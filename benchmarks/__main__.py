"""launch's own cost in one place, each part beside its physical neighbour.

usage: python -m benchmarks [PART...] [--check] [--stored benchmarks/results.json] [--json]

Without `--check` the ratios are stored. With it they are compared with what is stored: exit code 1 names
each that is more than 20 % worse, and by how much, once measuring it three times over has not helped.
Minutes on two cores; PART (start_up, validation, logs, probe, launching, keeping, content, pages) measures
only that.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import check, fingerprint, keeping, launching, probe, ratio, report, surroundings, validate
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


def shared(others: float) -> str | None:
    """What is said where the machine was not ours alone."""
    if others < surroundings.SHARED:
        return None
    return f"others took {others:.0%} of the processors meanwhile: the machine was shared"


def store(asked: argparse.Namespace) -> int:
    """Measure everything and write it down; parts that were not asked for stay as they are stored."""
    others, told = surroundings.Others(), list[Ratio]()
    for pair in pairs(asked.parts):
        told.append(ratio.measure(pair))
        print(told[-1].line(), file=sys.stderr if asked.json else sys.stdout, flush=True)
    about = surroundings.about(others.share())
    if note := shared(others.share()):
        print(note, file=sys.stderr)
    if asked.json:
        print(json.dumps({**about, "ratios": [asdict(one) for one in told]}))
    if asked.parts:
        print("only a part was measured: nothing is stored", file=sys.stderr)
    else:
        ratio.write(asked.stored, told, about)
    return 0


def compare(asked: argparse.Namespace) -> int:
    """Measure everything and hold it against what is stored; 1 where something has become worse."""
    try:
        stored = ratio.read(asked.stored)
    except ValueError as error:
        print(f"{error}; `make bench` stores them", file=sys.stderr)
        return 2
    others, worse, seen = surroundings.Others(), list[Regression](), set[str]()
    for found, regression in ratio.checked(pairs(asked.parts), stored):
        seen.add(found.name)
        kept = f"{stored[found.name]:.3g} stored" if found.name in stored else "not stored"
        print(f"{found.line()}  [{kept}]", flush=True)
        worse += [regression] if regression is not None else []
    for name in sorted(set() if asked.parts else stored.keys() - seen):
        print(f"{name}: stored, and cannot be measured here", file=sys.stderr)
    if note := shared(others.share()):
        print(note, file=sys.stderr)
    for one in worse:
        print(f"regression: {one.line()}", file=sys.stderr)
    return 1 if worse else 0


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--stored", type=Path, default=STORED)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    return compare(asked) if asked.check else store(asked)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
