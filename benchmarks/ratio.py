"""Times beside those of a physical neighbour: taken in turn, as a ratio, compared with what is stored.

A second says little: machines differ, and are shared. What launch does is therefore measured beside
something that no launcher could do without (an import, `grep`, the bare command), one right after the
other, and the ratio of each such round is what counts.
"""

import json
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0.20
"""How much worse than what is stored a ratio may be."""
REPEATS = 3
"""How often what looks worse is measured, all rounds of it, before that is believed."""

Taken = Callable[[], float]
"""Does something once and says how many seconds it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What is measured, what beside, and how often; `what` is both for people."""

    name: str
    what: str
    ours: Taken
    beside: Taken
    rounds: int = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """What came out: medians of seconds, and the median of the ratio of each round with its spread."""

    name: str
    what: str
    ratio: float
    least: float
    most: float
    seconds: float
    beside: float
    rounds: int

    def line(self) -> str:
        """One row of the table."""
        spread = f"({self.least:.3g} .. {self.most:.3g})"
        times = f"{_time(self.seconds)} / {_time(self.beside)}"
        return f"{self.name:<26} {self.ratio:8.3g} x {spread:<20} {times:<22} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """A ratio that is worse than the stored one by more than the limit, in every repeat."""

    name: str
    stored: float
    measured: float
    repeats: int

    @property
    def share(self) -> float:
        """How much worse."""
        return self.measured / self.stored - 1

    def line(self) -> str:
        """What is said of it."""
        return (
            f"{self.name}: {self.measured:.3g} x its neighbour, {self.stored:.3g} stored: "
            f"{self.share:.0%} worse, at best of {self.repeats}"
        )


def timed(call: Callable[[], object], *, cpu: bool = False) -> Taken:
    """A call as something that is timed; `cpu` as for a command, all threads together."""
    clock = time.process_time if cpu else time.perf_counter

    def taken() -> float:
        begun = clock()
        call()
        return clock() - begun

    return taken


def command(
    argv: Sequence[str], *, fails: bool = False, cwd: Path = ROOT, cpu: bool = False,
    env: Mapping[str, str] | None = None,
) -> Taken:  # fmt: skip
    """A whole process as something that is timed; one that ends otherwise than expected stops all.

    `cpu` counts the processors' time in place of the clock's: for what works on several at once, which
    on a shared machine is slowed down otherwise than a neighbour that works on one.
    """

    def run() -> None:
        # not to /dev/null: grep stops at the first match then
        done = subprocess.run(argv, capture_output=True, cwd=cwd, env=env, check=False)
        if (done.returncode != 0) is not fails:
            told = done.stderr.decode(errors="replace").strip()[-500:]
            raise SystemExit(f"{' '.join(argv)[:200]} answered {done.returncode}: {told}")

    def worked() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return worked if cpu else timed(run)


def interleaved(
    cases: Mapping[str, Taken], rounds: int | Mapping[str, int], *, warm: bool = True
) -> dict[str, list[float]]:
    """The seconds of every case, one round of all of them after the other; once before, unmeasured."""
    for case in cases.values() if warm else ():
        case()
    many = {name: rounds if isinstance(rounds, int) else rounds[name] for name in cases}
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(max(many.values(), default=0)):
        for name, case in cases.items():
            if number < many[name]:
                taken[name].append(case())
    return taken


def measure(pair: Pair) -> Ratio:
    """A pair's ratio: neighbours in time are compared, so that a machine that slows down slows both."""
    taken = interleaved({"beside": pair.beside, "ours": pair.ours}, pair.rounds)
    rounds = [a / b for a, b in zip(taken["ours"], taken["beside"], strict=True)]
    return Ratio(
        name=pair.name, what=pair.what, ratio=statistics.median(rounds), least=min(rounds),
        most=max(rounds), seconds=statistics.median(taken["ours"]),
        beside=statistics.median(taken["beside"]), rounds=pair.rounds,
    )  # fmt: skip


def regression(
    pair: Pair, stored: float, *, limit: float = LIMIT, repeats: int = REPEATS
) -> tuple[Ratio, Regression | None]:
    """Measure, and again as long as it looks worse; the best of so many repeats counts."""
    best = measure(pair)
    done = 1
    while best.ratio > stored * (1 + limit) and done < repeats:
        best = min(best, measure(pair), key=lambda ratio: ratio.ratio)
        done += 1
    if best.ratio <= stored * (1 + limit):
        return best, None
    return best, Regression(name=pair.name, stored=stored, measured=best.ratio, repeats=done)


def write(path: Path, ratios: Iterable[Ratio], about: Mapping[str, Any]) -> None:
    """Store what was measured, with what it was measured on."""
    rows = {ratio.name: {k: _rounded(v) for k, v in asdict(ratio).items()} for ratio in ratios}
    path.write_text(json.dumps({**about, "ratios": rows}, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, float]:
    """The stored ratios by name. Raises ValueError where there are none to compare with."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        found = {name: float(row["ratio"]) for name, row in told["ratios"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no ratios: {error}") from None
    if not found or not all(0 < ratio < float("inf") for ratio in found.values()):
        raise ValueError(f"{path} holds no ratios that can be compared with")
    return found


def checked(
    pairs: Iterable[Pair], stored: Mapping[str, float], *, limit: float = LIMIT, repeats: int = REPEATS
) -> Iterator[tuple[Ratio, Regression | None]]:  # fmt: skip
    """Each pair measured and held against what is stored; one that is new there only measured."""
    for pair in pairs:
        if pair.name in stored:
            yield regression(pair, stored[pair.name], limit=limit, repeats=repeats)
        else:
            yield measure(pair), None


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
