"""Times as ratios to those of a physical neighbour, compared with stored ratios.

A second says little: machines differ, and are shared. What launch does is therefore measured beside
something that no launcher could do without (an import, `grep`, the bare command), one right after
the other, and the ratio of each such round is what counts.
"""

import json
import math
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0.20
"""How much worse than what is stored a ratio may be."""
REPEATS = 3
"""How often what looks worse is measured, all rounds of it, before that is believed."""

Timer = Callable[[], float]
"""Does something once and returns how many seconds it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Something that launch does, the neighbour that it is measured beside, and how often.

    `what` names both for people.
    """

    name: str
    what: str
    launch: Timer
    neighbour: Timer
    rounds: int = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Medians of seconds, and the median of the ratios of the rounds with its spread."""

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
        times = f"{_format_seconds(self.seconds)} / {_format_seconds(self.beside)}"
        return f"{self.name:<26} {self.ratio:8.3g} x {spread:<20} {times:<22} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """A ratio that is worse than the stored one by more than the limit, in every repeat."""

    name: str
    stored: float
    measured: float

    def line(self) -> str:
        share = self.measured / self.stored - 1
        return (
            f"{self.name}: {self.measured:.3g} x its neighbour, {self.stored:.3g} stored: "
            f"{share:.0%} worse, at best of {REPEATS}"
        )


def time_call(call: Callable[[], object], *, cpu: bool = False) -> Timer:
    """A timer of a call; `cpu` as for a command, all threads together."""
    clock = time.process_time if cpu else time.perf_counter

    def run() -> float:
        begin = clock()
        call()
        return clock() - begin

    return run


def time_command(
    argv: Sequence[str],
    *,
    cwd: Path = ROOT,
    cpu: bool = False,
    env: Mapping[str, str] | None = None,
) -> Timer:
    """A timer of a whole process; one that fails ends the benchmark.

    `cpu` counts the processors' time in place of the clock's: work on several processors is slowed
    down on a shared machine in another way than a neighbour's work on one.
    """

    def run() -> None:
        # not to /dev/null: grep stops at the first match then
        done = subprocess.run(argv, capture_output=True, cwd=cwd, env=env, check=False)
        if done.returncode != 0:
            error = done.stderr.decode(errors="replace").strip()[-500:]
            raise SystemExit(f"{' '.join(argv)[:200]} answered {done.returncode}: {error}")

    def run_for_cpu() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    if cpu:
        return run_for_cpu
    return time_call(run)


def measure_best(timer: Timer, rounds: int) -> float:
    """The least seconds of so many rounds; one before them does not count."""
    timer()
    return min(timer() for _ in range(rounds))


def measure(pair: Pair) -> Ratio:
    """A pair's ratio, after an unmeasured round.

    Times of the same round are compared: a machine that slows down slows both.
    """
    pair.neighbour()
    pair.launch()
    seconds = []
    beside = []
    ratios = []
    for _ in range(pair.rounds):
        beside.append(pair.neighbour())
        seconds.append(pair.launch())
        ratios.append(seconds[-1] / beside[-1])
    return Ratio(
        name=pair.name,
        what=pair.what,
        ratio=statistics.median(ratios),
        least=min(ratios),
        most=max(ratios),
        seconds=statistics.median(seconds),
        beside=statistics.median(beside),
        rounds=pair.rounds,
    )


def compare(pair: Pair, stored: float) -> tuple[Ratio, Regression | None]:
    """Measure, and again as long as it looks worse; the best of `REPEATS` counts."""
    allowed = stored * (1 + LIMIT)
    best = measure(pair)
    for _ in range(REPEATS - 1):
        if best.ratio <= allowed:
            break
        best = min(best, measure(pair), key=lambda ratio: ratio.ratio)
    if best.ratio <= allowed:
        return best, None
    return best, Regression(name=pair.name, stored=stored, measured=best.ratio)


def write(path: Path, ratios: Iterable[Ratio], about: Mapping[str, Any]) -> None:
    """Store the ratios, with what they were measured on."""
    rows = {}
    for ratio in ratios:
        rows[ratio.name] = {name: _round(value) for name, value in asdict(ratio).items()}
    path.write_text(json.dumps({**about, "ratios": rows}, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, float]:
    """The stored ratios by name. Raises ValueError if there are none to compare with."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        ratios = {name: float(row["ratio"]) for name, row in stored["ratios"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no ratios: {error}") from None
    if not ratios or not all(0 < ratio < math.inf for ratio in ratios.values()):
        raise ValueError(f"{path} holds no ratios that can be compared with")
    return ratios


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value


def _format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"
