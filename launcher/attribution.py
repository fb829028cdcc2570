"""What each change of a setting gains: the same setting without it, where that was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from launcher.candidates import Candidate, Item, Trial
from launcher.comparison import Spread
from launcher.levers import ORDER, Settings, described
from launcher.paces import Paces
from launcher.results import Results


@dataclass(slots=True)
class Attribution:
    """Over the candidates of a grid by their keys; `eligible` says whether one may be tried."""

    grid: Mapping[tuple[Item, ...], Candidate]
    results: Results
    paces: Paces
    eligible: Callable[[Candidate], bool]

    def due(self, left: float) -> Candidate | None:
        """The best setting with one lever as the file has it: the most doubtful one first.

        None where nothing is open that fits into the seconds that are `left`.
        """
        best = self.results.best
        if best is None or not self.results.surpasses(best):
            return None
        names = self.results.differing(best.candidate)
        if len(names) < 2:
            # what the only change gains, the file as written tells
            return None
        open_ones = []
        for name in names:
            without = self._without(best.candidate, name)
            if without is None or self.results.tried(without) or not self.eligible(without):
                continue
            if self.paces.trial_seconds(without) > left:
                continue
            mean, deviation = self.paces.predicted(without)
            open_ones.append((abs(mean - math.log(best.speed)) + deviation, name, without))
        if not open_ones:
            return None
        _, name, one = max(open_ones, key=lambda t: t[0])
        gone = described(name, best.candidate.settings[name])
        return replace(one, purpose="gain", why=f"what `{gone}` gains: the best setting without it")

    def gain(self, best: Trial, name: str) -> tuple[Spread, Trial] | None:
        """What a lever of a setting gains, as a share of the speed without it, and the trial without."""
        wanted = self._without(best.candidate, name)
        trials = self.results.trials if wanted is not None else ()
        found = next((one for one in trials if one.ok and wanted and one.of(wanted)), None)
        if found is None:
            return None
        with_it, without = self.results.speeds(best), self.results.speeds(found)
        told = Spread(
            with_it.median / without.median - 1, with_it.min / without.max - 1,
            with_it.max / without.min - 1, min(with_it.n, without.n),
        )  # fmt: skip
        return told, found

    def _without(self, candidate: Candidate, name: str) -> Candidate | None:
        """The same with one lever as the file has it, in micro-batches as large as then fit."""
        base = self.results.base.settings
        if name not in base:
            # other rows need another split, which the file's do not have
            return None
        settings = {**candidate.settings, name: base[name]}
        sizes = self._sizes(settings)
        if name == "packing" and "bfd" in (settings[name], candidate.settings[name]):
            # other rows hold the tokens of a step: a size of the one says nothing of the other
            return self._planned({**settings, "per_device": base.get("per_device", 1)})
        if name == "per_device" or not sizes:
            return self._planned(settings)
        for size in sizes:
            if size > int(candidate.settings["per_device"]):
                continue
            one = self._planned({**settings, "per_device": size})
            if one is not None and (self.results.tried(one) or self.eligible(one)):
                return one
        return None

    def _planned(self, settings: Settings) -> Candidate | None:
        return self.grid.get(replace(self.results.base, settings=settings).key)

    def _sizes(self, settings: Settings) -> Iterable[int]:
        """The micro-batches in which these settings can be planned, the largest first."""
        return sorted(
            (int(one.settings["per_device"]) for one in self.grid.values()
             if "per_device" in one.settings and _same_but_batch(one.settings, settings)),
            reverse=True,
        )  # fmt: skip


def _same_but_batch(one: Settings, other: Settings) -> bool:
    return all(one.get(name) == other.get(name) for name in ORDER if name != "per_device")
