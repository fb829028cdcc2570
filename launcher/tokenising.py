"""The script that `launch prepare` starts: upstream's own, until its data are ready and no further.

Standard library only and the probe's pieces beside it, Python 3.10 and later: it runs under the trainer's
interpreter. `LAUNCH_TOKENISING` holds its settings as JSON: `target` upstream's script, `out` folder of
the record, `backend`, and `weights`, which has the model loaded for real. open-instruct leaves by itself
(`cache_dataset_only`). TRL tokenises while its trainer is made, between loading the model and
transformers' own part of the trainer: it gets a model without weights, and ends where that part begins.
Every `Dataset.map` on the way is recorded, and whether its result was there already.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

SETTINGS = "LAUNCH_TOKENISING"


def _watching() -> Any:
    """`watching/`, by its place, as probe.py loads it: the folder of both must not become an import path."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "watching", "__init__.py")
    spec = importlib.util.spec_from_file_location("launch_probe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["launch_probe"] = module
    spec.loader.exec_module(module)
    return module


watching = _watching()


class Weightless:
    """Whether a model without weights was handed out: what fails after that may fail because of it."""

    given = False


def lengths_of(dataset: Any) -> dict[int, int]:
    """Rows by their number of tokens; of a pair, each of its two sequences with the prompt."""
    names = dataset.column_names
    pairs = [("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids")]
    wanted = [("input_ids",)] if "input_ids" in names else pairs
    counts: dict[int, int] = {}
    for columns in wanted:
        if not set(columns) <= set(names):
            continue
        compute = sys.modules["pyarrow.compute"]
        total = None
        for name in columns:
            found = compute.list_value_length(_column(dataset, name))
            total = found if total is None else compute.add(total, found)
        for value in compute.value_counts(total).to_pylist():
            if value["values"] is not None:
                length = int(value["values"])
                counts[length] = counts.get(length, 0) + int(value["counts"])
    return counts


def _column(dataset: Any, name: str) -> Any:
    # sorted, packed and shuffled sets are a table and the order of its rows
    column = dataset.data.column(name)
    order = getattr(dataset, "_indices", None)
    return column if order is None else column.take(order.column(0))


def watch_maps(record: Any, module: types.ModuleType) -> None:
    def mapped(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.time()
        result = original(self, *args, **kwargs)
        with record.quietly("map"):
            files = [one["filename"] for one in getattr(result, "cache_files", None) or ()]
            old = bool(files) and all(os.path.getmtime(name) < begun for name in files)
            step = str(kwargs.get("desc") or "")
            told = lengths_of(result) if step.startswith("Tokenizing") else None
            # nothing is kept of no rows
            kept = "hit" if old or not len(self) else "miss" if files else "uncached"
            record.write(
                "mapped", step=step, state=kept, files=files, rows=len(result), of=len(self),
                seconds=round(time.time() - begun, 3), lengths=told,
            )  # fmt: skip
        return result

    def filtered(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        with record.quietly("filter"):
            step = str(kwargs.get("desc") or "")
            record.write("filtered", step=step, rows=len(result), of=len(self))
        return result

    watching.wrap(module.Dataset, "map", mapped)
    watching.wrap(module.Dataset, "filter", filtered)


def end_at_the_trainer(record: Any, module: types.ModuleType) -> None:
    def made(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        data: Any = kwargs.get("train_dataset")
        files = [one["filename"] for one in getattr(data, "cache_files", None) or ()]
        told: dict[int, int] = {}
        with record.quietly("lengths"):
            told = lengths_of(data)
        rows = len(data) if hasattr(data, "__len__") else None
        record.write("ready", rows=rows, files=files, lengths=told)
        raise SystemExit(0)

    watching.wrap(module.Trainer, "__init__", made)


def leave_weights_out(record: Any, module: types.ModuleType) -> None:
    def load(original: Any, cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            config = kwargs.get("config") or sys.modules["transformers"].AutoConfig.from_pretrained(
                name,
                revision=kwargs.get("revision") or "main",
                trust_remote_code=kwargs.get("trust_remote_code") or False,
            )
            with sys.modules["torch"].device("meta"):
                model = cls(config)
        except Exception as error:
            record.trouble("model without weights", error)
            return original(cls, name, *args, **kwargs)
        Weightless.given = True
        return model

    watching.wrap(module.PreTrainedModel, "from_pretrained", load)


def watched(
    probe: Any, backend: str, *, weights: bool
) -> dict[str, Callable[[types.ModuleType], None]]:
    """Module name -> what to do once it is there."""
    if backend == "open_instruct":
        return {"open_instruct.dataset_transformation": probe.caches.watch_dataset}
    after: dict[str, Callable[[Any, types.ModuleType], None]] = {
        "datasets.arrow_dataset": watch_maps,
        "transformers.trainer": end_at_the_trainer,
    }
    if not weights:
        after["transformers.modeling_utils"] = leave_weights_out
    return {name: functools.partial(watch, probe.record) for name, watch in after.items()}


def main() -> None:
    """Run upstream's script as `__main__`; its exceptions stay its own."""
    given = json.loads(os.environ[SETTINGS])
    target, backend = str(given["target"]), str(given["backend"])
    probe = watching.Probe({"target": target, "out": given["out"], "backend": backend, "cpu": True})
    record = probe.record
    record.write("start", pid=os.getpid(), target=target)
    after = watched(probe, backend, weights=bool(given.get("weights")))
    sys.meta_path.insert(0, watching.Watcher(record, after))
    words = sys.argv[1:]
    try:
        watching.run(target)
    except Exception as error:
        record.write("error", type=type(error).__name__, message=str(error)[:2000])
        if not Weightless.given:
            raise
        # a chat template with tokens of its own, say, makes new rows of weights
        print(f"again, with the model's weights: {type(error).__name__}: {error}", flush=True)
        environ = {**os.environ, SETTINGS: json.dumps({**given, "weights": True})}
        os.execve(sys.executable, [sys.executable, os.path.abspath(__file__), *words], environ)
    record.write("end", exit=0)


if __name__ == "__main__":
    main()
