"""The tokenised set and the reference log-probabilities: whether they were there, and whose they are."""

from __future__ import annotations

import os
import time
import types
from typing import Any

from .contract import Contract
from .hooks import wrap
from .process import ProbePiece, Process
from .supplies import supply_process_group
from .watchdog import Watchdog

FIRST_LOSS = 0.01  # more than rounding moves the first loss by


class Caches(ProbePiece):
    """Each cache as it is asked for, before the work that it is to save."""

    def __init__(self, process: Process, contract: Contract, watchdog: Watchdog) -> None:
        super().__init__(process)
        self.contract, self.watchdog = contract, watchdog
        self.reference: str | None = None

    def tell(self, point: str, hit: bool, path: str) -> None:
        state = "hit" if hit else "miss"
        self.record.write(point, state=state, path=path)
        self.contract.seen(point, state)

    def watch_dataset(self, module: types.ModuleType) -> None:
        """open-instruct's tokenised set: it prints the same line for a hit and a miss."""

        def load(original: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
            with self.record.quietly("dataset cache"):
                path = cache.get_cache_path()
                skip = kwargs.get("dataset_skip_cache", args[2] if len(args) > 2 else False)
                self.tell("dataset_cache", os.path.exists(path) and not skip, str(path))
            return original(cache, *args, **kwargs)

        wrap(module.LocalDatasetTransformationCache, "load_or_transform_dataset", load)

    def watch_maps(self, module: types.ModuleType) -> None:
        """TRL tokenises with `Dataset.map`: a hit is a result whose files are older than the call."""

        def mapped(original: Any, *args: Any, **kwargs: Any) -> Any:
            begun = time.time()
            result = original(*args, **kwargs)
            with self.record.quietly("dataset cache"):
                names = [file["filename"] for file in getattr(result, "cache_files", None) or ()]
                if str(kwargs.get("desc", "")).startswith("Tokenizing") and names:
                    hit = all(os.path.getmtime(name) < begun for name in names)
                    self.tell("dataset_cache", hit, os.path.dirname(names[0]))
            return result

        wrap(module.Dataset, "map", mapped)

    def watch_reference(self, module: types.ModuleType) -> None:
        def build(original: Any, *args: Any, **kwargs: Any) -> Any:
            with self.record.quietly("reference cache"):
                path = kwargs["cache_path"]
                self.reference = str(path)
                self.tell("reference_cache", path.exists(), self.reference)
            self.watchdog.armed = False
            if self.settings.cpu:
                supply_process_group(self.record)
            return original(*args, **kwargs)

        wrap(module, "build_reference_logprobs_cache", build)

    def check_first_loss(self, loss: float) -> None:
        """A policy that has not moved is its own reference: another loss shows another reference."""
        expected, path = self.settings.first_loss, self.reference
        if expected is None or path is None or self.process.resumed or abs(loss - expected) <= FIRST_LOSS:
            return
        self.record.write("reference_cache", state="stale", path=path, first_loss=loss, expected_loss=expected)
        state = f"stale: the first loss is {loss:.4f}, not {expected:.4f}"
        self.contract.broken("reference_cache", state, step=1, expected="that of this model")
