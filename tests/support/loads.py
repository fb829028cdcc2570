"""How often stage files are read, checked and planned while a command runs in this process."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from launcher.config import load
from launcher.plan import plan
from launcher.stage import stage


@dataclass
class Loads:
    """The requests of each kind, with how often each was made: a file with its overrides, and its GPUs."""

    read: Counter[Any] = field(default_factory=Counter)
    checked: Counter[Any] = field(default_factory=Counter)
    planned: Counter[Any] = field(default_factory=Counter)

    @property
    def repeated(self) -> dict[str, list[Any]]:
        """What was done again for the same request."""
        kinds = {"read": self.read, "checked": self.checked, "planned": self.planned}
        return {
            kind: [(count, key) for key, count in counts.items() if count > 1]
            for kind, counts in kinds.items()
            if any(count > 1 for count in counts.values())
        }

    @property
    def files(self) -> dict[str, tuple[int, int]]:
        """How often each file was read and checked, by its name."""
        names = {key[0] for key in (*self.read, *self.checked)}
        return {
            name: tuple(  # type: ignore[misc]
                sum(count for key, count in counts.items() if key[0] == name) for counts in (self.read, self.checked)
            )
            for name in sorted(names)
        }


def counted(monkeypatch: pytest.MonkeyPatch) -> Loads:
    """The counts of what this process does from now on."""
    counts, read, judge, make = Loads(), load.load, stage.judge, plan.make

    def counted_load(path: Any, overrides: Any = (), **more: Any) -> Any:
        counts.read[(str(path).rpartition("/")[2], tuple(overrides))] += 1
        return read(path, overrides, **more)

    def counted_judge(config: Any, **more: Any) -> Any:
        counts.checked[(config.path.name, repr((config.options, config.args)))] += 1
        return judge(config, **more)

    def counted_make(checked: Any, *, gpus: int, **more: Any) -> Any:
        about = checked.options, dict(checked.args), gpus
        counts.planned[(checked.config.path.name, repr(about))] += 1
        return make(checked, gpus=gpus, **more)

    monkeypatch.setattr(load, "load", counted_load)
    monkeypatch.setattr(stage, "judge", counted_judge)
    monkeypatch.setattr(plan, "make", counted_make)
    return counts
