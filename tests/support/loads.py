"""How often a command in this process reads files and settings, plans and judges."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from launcher.config import document
from launcher.plan import plan
from launcher.rules import registry
from launcher.stage import stage


@dataclass
class Loads:
    """How often each thing was done: a file read, a setting of it typed, planned on GPUs, judged by
    its facts.
    """

    files: Counter[str] = field(default_factory=Counter)
    typed: Counter[str] = field(default_factory=Counter)
    planned: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(default_factory=Counter)

    @property
    def repeated(self) -> dict[str, list[tuple[int, str]]]:
        """What was done again, with how often."""
        kinds = {
            "files": self.files,
            "typed": self.typed,
            "planned": self.planned,
            "judged": self.judged,
        }
        repeats = {}
        for kind, counts in kinds.items():
            more = [(count, key) for key, count in counts.items() if count > 1]
            if more:
                repeats[kind] = more
        return repeats


def counted(monkeypatch: pytest.MonkeyPatch) -> Loads:
    """The counts of what this process does from now on."""
    counts = Loads()
    read_yaml = document.read_yaml
    read = stage.read_stage_file
    make = plan.make
    apply_in = registry.apply_in

    def counted_file(path: Any) -> Any:
        counts.files[str(path)] += 1
        return read_yaml(path)

    def counted_read(config: Any, **more: Any) -> Any:
        stage = (config.path.name, config.options, config.args)
        counts.typed[repr(stage)] += 1
        return read(config, **more)

    def counted_make(checked: Any, *, gpus: int, **more: Any) -> Any:
        plan = (checked.config.path.name, checked.options, checked.args, gpus, more)
        counts.planned[repr(plan)] += 1
        return make(checked, gpus=gpus, **more)

    def counted_rules(context: Any) -> Any:
        about = dict(context.values), context.gpus, context.split, context.output, context.machine
        counts.judged[repr((context.values.schema.key, about))] += 1
        return apply_in(context)

    monkeypatch.setattr(document, "read_yaml", counted_file)
    monkeypatch.setattr(stage, "read_stage_file", counted_read)
    monkeypatch.setattr(plan, "make", counted_make)
    monkeypatch.setattr(registry, "apply_in", counted_rules)
    return counts
