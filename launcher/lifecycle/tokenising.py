"""The data of a run, tokenised by upstream's script on the CPU, where the run will look for them.

It leaves before the model is loaded (finetune.py::main[if args.cache_dataset_only],
dpo_tune_cache.py::main[if args.cache_dataset_only],
dpo.py::main[if args.cache_dataset_only]). `launch prepare` asks
for that; a script that does not tokenise itself (`TokenisingPhase`) is always started so first.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.artifacts import lengths
from launcher.artifacts.fingerprint import cache_home
from launcher.artifacts.lengths import Lengths
from launcher.cache import entries, folders, keys
from launcher.cache.keys import Cache
from launcher.config.load import spell_override
from launcher.dataset import packed
from launcher.dataset.packed import PackedRows
from launcher.errors import Exit, Finding, LaunchError, NotReady, launch_finding
from launcher.lazy_dataclass import dataclass
from launcher.machine import locks, sizes
from launcher.machine.python import Trainer
from launcher.plan import command
from launcher.plan import plan as plans
from launcher.plan.plan import Plan
from launcher.planning.prepare import Prepared
from launcher.planning.request import Request
from launcher.runs import rundir, runner
from launcher.runs.attempt import PROBE_SETTINGS, TOKENISED, Command
from launcher.runs.rundir import RunFolder
from launcher.upstream.citations import render_citations
from launcher.verdict import evidence
from launcher.verdict.ending import find_ending

# no key of tokenised data holds any of these: services, engines, devices. None: not handed over
_REPLACED: Mapping[str, bool | None] = {
    "cache_dataset_only": True,
    "push_to_hub": False,
    "try_launch_beaker_eval_jobs": False,
    "with_tracking": False,
    "send_slack_alerts": False,
    "zero_stage": None,
    "use_liger_kernel": None,
    "use_qlora": None,
    "use_lora": None,
    "use_8bit_optimizer": None,
    "dpo_use_paged_optimizer": None,
    "attn_implementation": None,
    "offload_param": None,
    "offload_optimizer": None,
}

Say = Callable[[str], None]

_LOOKS = (
    "dataset_transformation.py::LocalDatasetTransformationCache.load_or_transform_dataset"
    "[cache_path) and]"
)


class TokenisingFailed(LaunchError):
    """Upstream's script ended with an error before the data were ready (exit 4)."""

    exit_code = Exit.TRAINING


class Interrupted(LaunchError):
    """The user stopped it (exit 130)."""

    exit_code = Exit.INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenised:
    """The tokenised data of a run: where, and how long their rows are, where that is known.

    `state` is `there`, `filled`, `missed` (the run would not find them, and `missed` says why), or
    `left` (the run makes them).
    """

    state: str
    place: Path | None = None
    seconds: float = 0.0
    lengths: Lengths | None = None
    missed: tuple[Finding, ...] = ()

    @property
    def size(self) -> int:
        return 0 if self.place is None else sizes.measure_size(self.place, links=True)

    def as_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "state": self.state,
            "places": [] if self.place is None else [str(self.place)],
            "bytes": self.size,
            "seconds": round(self.seconds, 2),
            "rows": None,
            "tokens": None,
            "mean": None,
            "longest": None,
        }
        if self.lengths is not None:
            content["rows"] = self.lengths.rows
            content["tokens"] = self.lengths.tokens
            content["mean"] = round(self.lengths.mean, 2)
            content["longest"] = self.lengths.longest
        return content


class Filling:
    """The tokenised data of one plan, made where the run will look."""

    def __init__(
        self, planned: Plan, trainer: Trainer, request: Request, say: Say, caches: Sequence[Cache]
    ) -> None:
        self.plan = planned
        self.trainer = trainer
        self.request = request
        self.say = say
        self.caches = caches
        self.work: Path | None = None

    def fill(self) -> Tokenised:
        """Tokenise the data unless the run would find them."""
        if self.plan.stage.backend.DATA_CACHE != "own":
            return Tokenised(state="left")
        missed = tuple(self._check_possible())
        if missed:
            return Tokenised(state="missed", missed=missed)
        cache = next(entry for entry in self.caches if entry.kind == "dataset")
        entry = self._find_entry(cache)
        if entry is not None:
            return self._describe_entry(entry, "there", 0.0)
        lock = cache_home() / "prepared" / f"{cache.path.name}.lock"
        waiting = "another `launch prepare` is filling this: waiting for it"
        with locks.hold_exclusive(lock, waiting=lambda: self.say(waiting)):
            # whoever was at it may have filled it in the meantime
            entry = self._find_entry(cache)
            if entry is not None:
                return self._describe_entry(entry, "there", 0.0)
            return self._tokenise(cache)

    def _find_entry(self, cache: Cache) -> Path | None:
        """The set that the run would find; None if there is none, or if a part of it is missing."""
        entry = entries.find_hit(cache.path, self.plan)
        phase = self.plan.stage.entry.tokenising
        if entry is None or phase is None:
            return entry
        place = phase.place(entry, self.plan.values)
        if phase.is_complete(place):
            return entry
        return None

    def _check_possible(self) -> Iterator[Finding]:
        values = self.plan.values
        prefix = ""
        if "dataset_skip_cache" in values:
            prefix = "dataset_"
        lookup = render_citations(_LOOKS)
        ways = {
            "skip_cache": f"the run tokenises all over, and looks for no set ({lookup})",
            "cache_mode": "the run looks for its set on the hub, not here",
            "config_hash": "the run takes a set by its name, whatever is there",
        }
        for key, why in ways.items():
            name = f"{prefix}{key}"
            value = values.get(name)
            if value in (None, False, "local"):
                continue
            message = f"`{name}: {spell_override(value)}`: {why}"
            help = f"leave {name} out"
            key = f"args.{name}"
            place = self.plan.stage.config.origin(key).place
            yield launch_finding("error", "would-miss", message, help, key=key, **place)

    def _describe_entry(self, entry: Path, state: str, seconds: float) -> Tokenised:
        row_lengths: Lengths | None = None
        # no pyarrow in launch's own Python, or other columns: nothing hangs on it
        with contextlib.suppress(LaunchError):
            row_lengths = lengths.measure_lengths(entry, pairs=self.plan.stage.schema.pairs)
        return Tokenised(state=state, place=entry, seconds=seconds, lengths=row_lengths)

    def _tokenise(self, cache: Cache) -> Tokenised:
        began = time.monotonic()
        redactor = self.plan.redactor
        name = redactor.redact(self.plan.stage.name)
        self.work = rundir.make_folder(
            self.request.runs or rundir.find_runs_root(), "prepare", name
        )
        folder = RunFolder(self.work)
        self.say(f"tokenising with {self.plan.stage.entry.script}; log: {folder.console(1)}")
        with folders.lock((cache,), folder, 1, redactor=redactor) as locks:
            tokenise = self._build_command(cache, folder)
            ended = runner.run(tokenise, folder, 1, pass_fds=locks, inherited=os.environ)
        if ended.stopped is not None:
            raise Interrupted(())
        if ended.returncode:
            raise self._report_failure(folder, _find_reason(folder))
        spoiled = folders.discard_spoiled(cache) is not None
        entry = self._find_entry(cache)
        if entry is not None and not spoiled:
            return self._describe_entry(entry, "filled", time.monotonic() - began)
        why = "the data, the tokenizer or the model were written to while they were read"
        if not spoiled:
            sets = folders.list_entries(cache.path, "dataset")
            if not sets:
                raise self._report_failure(folder, "upstream saved no set of tokenised data")
            why = f"the run would not find what was tokenised into {cache.path}: "
            why += "upstream made it with other values"
        place = self.plan.stage.config.origin("args").place
        missed = launch_finding("error", "would-miss", why, "run this again", **place)
        return Tokenised(state="missed", missed=(missed,))

    def _build_command(self, cache: Cache, folder: RunFolder) -> Command:
        """Upstream's script in one process on the CPU, as far as its data are ready."""
        caches = (cache,)
        completed = plans.complete_plan(self.plan, keys.derive_arguments(caches))
        plan = replace(completed, gpus=0, nodes=1)
        stage = plan.stage
        arguments = dict(plan.arguments())
        for name, value in _REPLACED.items():
            arguments.pop(name, None)
            if value is not None and name in stage.schema.fields:
                arguments[name] = stage.schema.words(name, value)
        arguments[stage.entry.names.output] = [str(folder.path / "model")]
        cache_env = keys.derive_environment(caches)
        built = command.build(plan, self.trainer, folder.path, environ=os.environ, caches=cache_env)
        assert stage.upstream.root is not None
        script = stage.upstream.root / stage.entry.script
        argv = [str(self.trainer.python), str(script)]
        for name, values in arguments.items():
            argv += [f"--{name}", *values]
        env = dict(built.env)
        env.pop(PROBE_SETTINGS, None)
        return Command(argv=tuple(argv), env=env, cwd=built.cwd)

    def _report_failure(self, folder: RunFolder, why: str) -> TokenisingFailed:
        message = "upstream's script failed before the data were ready: "
        message += self.plan.redactor.redact(why)
        log = str(folder.console(1))
        failed = launch_finding("error", "tokenising-failed", message, "read the log", file=log)
        return TokenisingFailed(replace(failed, layer="run"))


def _find_reason(folder: RunFolder) -> str:
    run = evidence.read_run(folder.path, attempt=1)
    if run.log is None:
        return "no reason"
    end = find_ending(run)
    error = end.error or {}
    parts = []
    for key in ("type", "message"):
        if error.get(key):
            parts.append(str(error[key]))
    why = ": ".join(parts)
    if not why and run.exit is not None and run.exit.signal:
        why = f"killed by {signal.Signals(run.exit.signal).name}"
    return why or end.reason or "no reason"


def tokenise_before_training(prepared: Prepared, say: Say = lambda _: None) -> Prepared:
    """Tokenise for a script that does not do that itself; returns the start with the data's state.

    Raises TokenisingFailed if upstream's script fails, NotReady if the run would not find the data,
    Interrupted.
    """
    plan = prepared.plan
    if plan.stage.entry.tokenising is None:
        return prepared
    if plans.find_caches_only(plan.stage, plan.values) is not None:
        return prepared
    caches = prepared.start.caches
    filling = Filling(plan, prepared.facts.trainer, prepared.facts.request, say, caches)
    tokenised = filling.fill()
    if tokenised.missed:
        raise NotReady(tokenised.missed)
    state = "hit" if tokenised.state == "there" else "miss"
    answer = {"state": state, "path": str(tokenised.place)}
    env = {**prepared.command.env, TOKENISED: json.dumps(answer)}
    prepared = replace(prepared, command=replace(prepared.command, env=env))
    return _count_steps(prepared, tokenised, say)


def _count_steps(prepared: Prepared, tokenised: Tokenised, say: Say) -> Prepared:
    """The start with the steps that the tokenised data make. Raises NotReady."""
    plan = prepared.plan
    phase = plan.stage.entry.tokenising
    limit = plan.values.get(plan.stage.entry.names.max_length)
    if phase is None or tokenised.place is None or not isinstance(limit, int):
        return prepared
    name = plan.values.get("tokenizer_name_or_path")
    if not name:
        name = plan.values.get(plan.stage.entry.names.model)
    place = phase.place(tokenised.place, plan.values)
    rows: PackedRows | None = None
    # a file that cannot be read costs the count; the training says what is wrong
    with contextlib.suppress(OSError):
        rows = packed.read_packed_rows(place, limit=limit, tokenizer=str(name))
    if rows is None:
        return prepared
    data = f"args.{plan.stage.entry.names.data}"
    if rows.documents > rows.samples:
        cut = _cut_samples(plan, rows, data)
        say(cut.message)
        prepared = replace(prepared, warnings=(*prepared.warnings, cut))
    steps = plans.count_steps(plan.stage, plan.values, rows.rows, plan.global_batch)
    if steps is not None and steps < 1:
        # with `max_train_steps` OLMo-core would begin epochs without a step for ever
        message = f"{rows.samples:,} samples are packed into {rows.rows:,} rows: "
        message += f"less than one step of {plan.global_batch:,}, there is nothing to train on"
        help = "a smaller batch, fewer GPUs, or more data"
        finding = launch_finding("error", "too-few-rows", message, help, key=data)
        raise NotReady(plan.stage.config.placed(finding))
    if plans.find_step_limit(plan.stage, plan.values) is not None:
        return prepared
    say(
        f"{rows.samples:,} samples are packed into {rows.rows:,} rows of {limit:,} tokens: "
        f"{steps or 0:,} steps"
    )
    return replace(prepared, plan=replace(plan, steps=steps, rows=rows.rows))


def _cut_samples(plan: Plan, rows: PackedRows, key: str) -> Finding:
    message = f"OLMo-core splits {rows.samples:,} samples into {rows.documents:,} documents, "
    message += "one for each end-of-text token: an answer does not see the question before it"
    help = "use a chat template that writes the end-of-text token after the last turn only"
    finding = launch_finding("warning", "cut-samples", message, help, key=key)
    return plan.stage.config.placed(finding)
