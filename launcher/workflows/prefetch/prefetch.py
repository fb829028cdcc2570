"""`launch prepare`: whatever a run will need and no GPU has to do, done beforehand and proved to be found.

Downloads come first: upstream's key of tokenised data holds what is in the hub's cache
(dataset_transformation.py::get_commit_hash[file = launch_utils.custom_cached_file]). Then upstream's own script
tokenises, in one process on the CPU: it leaves before the model is loaded
(finetune.py::main[if args.cache_dataset_only], dpo_tune_cache.py::main[if args.cache_dataset_only],
dpo.py::main[if args.cache_dataset_only]). What cannot be had so is listed: TRL tokenises while its trainer is made,
and reference log-probabilities need the model.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.artifacts import lengths
from launcher.artifacts.fingerprint import cache_home
from launcher.artifacts.lengths import Lengths
from launcher.artifacts.model_config import offline
from launcher.cache import entries, folders, hub, keys
from launcher.cache.hub import Part
from launcher.cache.keys import Cache
from launcher.config.load import spelt
from launcher.errors import Exit, Finding, InvalidConfig, LaunchError, NotReady, errors, launch_finding
from launcher.machine import locks, sizes
from launcher.machine.python import Trainer
from launcher.machine.sizes import sized
from launcher.plan import command
from launcher.plan import plan as plans
from launcher.plan.plan import Plan
from launcher.planning import check
from launcher.planning.collect import Facts
from launcher.planning.doctor import checks
from launcher.planning.request import Request
from launcher.redaction import redact
from launcher.runs import rundir, runner
from launcher.runs.attempt import PROBE_SETTINGS, Command
from launcher.runs.rundir import RunFolder
from launcher.upstream.citations import rendered
from launcher.verdict import evidence
from launcher.verdict.ending import find_ending

# the model is fetched here, and what lies in the output folder is asked when something is to be trained into it
_ASKED_LATER = frozenset({"missing-model", "incomplete-model", "foreign-checkpoints", "finished-output"})
# no key of tokenised data holds any of these: services, engines, devices. None: not handed over
_REPLACED: Mapping[str, bool | None] = {
    "cache_dataset_only": True,
    **dict.fromkeys("push_to_hub try_launch_beaker_eval_jobs with_tracking send_slack_alerts".split(), False),
    **dict.fromkeys("zero_stage use_liger_kernel use_qlora use_lora use_8bit_optimizer".split()),
    **dict.fromkeys("dpo_use_paged_optimizer attn_implementation offload_param offload_optimizer".split()),
}

Say = Callable[[str], None]

_LOOKS = "dataset_transformation.py::LocalDatasetTransformationCache.load_or_transform_dataset[cache_path) and]"


class TokenisingFailed(LaunchError):
    """Upstream's script ended with an error before the data were ready (exit 4)."""

    exit_code = Exit.TRAINING


class Interrupted(LaunchError):
    """The user stopped it (exit 130)."""

    exit_code = Exit.INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenised:
    """The tokenised data of a run: where, and how long their rows are, where that is known.

    `state` is `there`, `filled`, `missed` (the run would not find them), or `left` (the run makes them).
    """

    state: str
    place: Path | None = None
    seconds: float = 0.0
    lengths: Lengths | None = None

    @property
    def size(self) -> int:
        return 0 if self.place is None else sizes.below(self.place, links=True)

    def as_json(self) -> dict[str, Any]:
        known = self.lengths
        return {
            "state": self.state,
            "places": [] if self.place is None else [str(self.place)],
            "bytes": self.size,
            "seconds": round(self.seconds, 2),
            "rows": None if known is None else known.rows,
            "tokens": None if known is None else known.tokens,
            "mean": None if known is None else round(known.mean, 2),
            "longest": None if known is None else known.longest,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """What `launch prepare` has done, and what the run will find."""

    plan: Plan
    parts: tuple[Part, ...]
    tokenised: Tokenised
    left: tuple[str, ...]
    findings: tuple[Finding, ...]
    seconds: float
    work: Path | None

    @property
    def exit(self) -> Exit:
        """1 where the run would miss something."""
        missed = any(one.code == "would-miss" for one in self.findings)
        return Exit.VERDICT if missed else Exit.OK

    @property
    def did_nothing(self) -> bool:
        states = {self.tokenised.state, *(one.state for one in self.parts)}
        return states <= {"there", "unknown", "left"}

    @property
    def size(self) -> int:
        return self.tokenised.size + sum(one.size for one in self.parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": {"gpus": [self.plan.record.as_json()]},
            "ready": self.exit is Exit.OK,
            "already_there": self.did_nothing,
            "seconds": round(self.seconds, 2),
            "bytes": self.size,
            "parts": [one.as_json() for one in self.parts],
            "dataset": self.tokenised.as_json(),
            "left": list(self.left),
            "log": None if self.work is None else str(RunFolder(self.work).console(1)),
        }

    def lines(self) -> list[str]:
        made = self.tokenised
        rows = [(one.kind, one.name, one.state, one.size, one.seconds) for one in self.parts]
        rows.append(("tokenised", str(made.place or "-"), made.state, made.size, made.seconds))
        wide = max(len(row[1]) for row in rows)
        lines = [
            f"{kind:<10} {name:<{wide}}  {state:<8} {sized(size):>9}"
            + (f"  in {seconds:.0f} s" if state in ("fetched", "filled") else "")
            for kind, name, state, size, seconds in rows
        ]
        if (known := made.lengths) is not None and known.rows is not None:
            tokens = f"{known.mean:,.1f} tokens a row, {known.longest:,} at most, {known.tokens:,} in all"
            lines.append(f"rows       {known.rows:,} rows; {tokens}")
        lines += [f"left       {one}" for one in self.left]
        where = f"{self.plan.gpus} GPU(s)" if self.plan.gpus else "the CPU"
        if self.exit is not Exit.OK:
            end = f"not prepared: the run on {where} would miss what it needs"
        elif self.did_nothing:
            end = f"already there: nothing was to be done for {where}"
        else:
            end = f"prepared for {where} in {self.seconds:.0f} s"
        return [*lines, f"{end}; {sized(self.size)} in all"]


def prepare(resolved: Facts, say: Say = lambda _: None) -> Prefetch:
    """Do for a run whatever needs no GPU; `say` gets a line before what takes long.

    Raises InvalidConfig and NotReady as a start would, NotReady too where a model cannot be fetched,
    TokenisingFailed where upstream's script fails, and Interrupted.
    """
    began = time.monotonic()
    request, trainer, planned = resolved.request, resolved.trainer, _planned(resolved)
    # what training needs besides is asked where it trains
    subject = replace(checks.of_plan(planned, trainer), gpus=0, plan=None)
    if lacking := errors([*checks.source(subject), *checks.local_files(planned)]):
        raise NotReady(lacking)
    needed = hub.required_parts(planned)
    parts = _fetched([one for one in needed if one.role != "data"], planned, trainer, {})
    # of what lies here now: the names of the cache folders hold the tokenizer's content
    folders = keys.derive(planned, trainer.packages)
    environment = keys.environment(folders)
    parts += _fetched([one for one in needed if one.role == "data"], planned, trainer, environment)
    filling = _Filling(planned, trainer, request, say, folders)
    tokenised, missed = filling.done()
    return Prefetch(
        plan=planned,
        parts=parts,
        tokenised=tokenised,
        left=tuple(_left(planned, parts, folders, tokenised)),
        work=filling.work,
        findings=tuple(dict.fromkeys((*planned.all_findings, *missed))),
        seconds=time.monotonic() - began,
    )


def _planned(resolved: Facts) -> Plan:
    """The later run's own plan. Raises InvalidConfig with what a start would refuse."""
    # what trains may have other packages than there are here
    made = check.settle(replace(resolved, packages=None), output=rundir.runs_root() / "model")
    findings = tuple(finding for finding in made.stage.findings if finding.code not in _ASKED_LATER)
    made = replace(made, stage=replace(made.stage, findings=findings))
    if errors(made.all_findings, strict=resolved.request.strict):
        raise InvalidConfig(made.all_findings)
    return made


def _fetched(needed: Sequence[Part], planned: Plan, trainer: Trainer, more: Mapping[str, str]) -> tuple[Part, ...]:
    parts = hub.fetch(needed, trainer, {**os.environ, **more})
    missing = tuple(hub.findings(parts, planned, offline=offline(os.environ)))
    if missing:
        raise NotReady(missing)
    return parts


def _left(planned: Plan, parts: Sequence[Part], folders: Sequence[Cache], tokenised: Tokenised) -> Iterator[str]:
    if tokenised.state == "left":
        yield "tokenising: TRL does it while its trainer is made, before the first step"
    model = next((one for one in parts if one.role in ("whole", "model")), None)
    if model is not None:
        yield f"loading {model.name} ({sized(model.size)}) on every process"
    reference = next((one for one in folders if one.kind == "reference"), None)
    if planned.values.get("precompute_ref_log_probs") is True:
        yield "the reference log-probabilities (`precompute_ref_log_probs`): one pass of the model"
    elif reference is not None:
        text = "the reference log-probabilities, where they are not there yet: one pass of the model over "
        yield f"{text}every pair, before the first step, kept in {reference.path}"


class _Filling:
    """The tokenised data of one plan, made where the run will look."""

    def __init__(self, planned: Plan, trainer: Trainer, request: Request, say: Say, caches: Sequence[Cache]) -> None:
        self.plan, self.trainer, self.request, self.say, self.caches = planned, trainer, request, say, caches
        self.work: Path | None = None

    def done(self) -> tuple[Tokenised, tuple[Finding, ...]]:
        """Fill what is not there; returns the data and what the run would miss."""
        if self.plan.stage.backend.DATA_CACHE != "own":
            return Tokenised(state="left"), ()
        missed = tuple(self._impossible())
        if missed:
            return Tokenised(state="missed"), missed
        cache = next(one for one in self.caches if one.kind == "dataset")
        entry = entries.hit(cache.path, self.plan)
        if entry is not None:
            return self._of(entry, "there", 0.0), ()
        lock = cache_home() / "prepared" / f"{cache.path.name}.lock"
        waiting = "another `launch prepare` is filling this: waiting for it"
        with locks.alone(lock, waiting=lambda: self.say(waiting)):
            # whoever was at it may have filled it in the meantime
            entry = entries.hit(cache.path, self.plan)
            return self._fill(cache) if entry is None else (self._of(entry, "there", 0.0), ())

    def _impossible(self) -> Iterator[Finding]:
        values = self.plan.values
        prefix = "dataset_" if "dataset_skip_cache" in values else ""
        ways = {
            "skip_cache": f"the run tokenises all over, and looks for no set ({rendered(_LOOKS)})",
            "cache_mode": "the run looks for its set on the hub, not here",
            "config_hash": "the run takes a set by its name, whatever is there",
        }
        for key, why in ways.items():
            name = f"{prefix}{key}"
            if (value := values.get(name)) not in (None, False, "local"):
                yield self._missed(name, f"`{name}: {spelt(value)}`: {why}", f"leave {name} out")

    def _missed(self, key: str | None, message: str, help: str) -> Finding:
        """That the run would not find what was, or could be, made."""
        place = self.plan.stage.config.origin(f"args.{key}").place
        return launch_finding("error", "would-miss", message, help, key=key and f"args.{key}", **place)

    def _of(self, entry: Path, state: str, seconds: float) -> Tokenised:
        known: Lengths | None = None
        # no pyarrow in launch's own Python, or other columns: nothing hangs on it
        with contextlib.suppress(LaunchError):
            known = lengths.of_dataset(entry, pairs=self.plan.stage.schema.pairs)
        return Tokenised(state=state, place=entry, seconds=seconds, lengths=known)

    def _fill(self, cache: Cache) -> tuple[Tokenised, tuple[Finding, ...]]:
        began = time.monotonic()
        self.work = rundir.new_folder(self.request.runs or rundir.runs_root(), "prepare", self.plan.stage.name)
        folder = RunFolder(self.work)
        self.say(f"tokenising with {self.plan.stage.entry.script}; log: {folder.console(1)}")
        with folders.lock((cache,), folder, 1, config=self.request.config) as locks:
            made = self._command(cache, folder)
            ended = runner.run(made, folder, 1, pass_fds=locks, inherited=os.environ)
        if ended.stopped is not None:
            raise Interrupted(())
        if ended.returncode:
            raise self._failure(folder, _reason(folder))
        spoiled = folders.discard_spoiled(cache) is not None
        entry = entries.hit(cache.path, self.plan)
        if entry is not None and not spoiled:
            return self._of(entry, "filled", time.monotonic() - began), ()
        why = "the data, the tokenizer or the model were written to while they were read"
        if not spoiled:
            sets = folders.CacheFolder(cache.path, {"kind": "dataset"}).entries()
            if not sets:
                raise self._failure(folder, "upstream saved no set of tokenised data")
            why = f"the run would not find what was tokenised into {cache.path}: upstream made it with other values"
        return Tokenised(state="missed"), (self._missed(None, why, "run this again"),)

    def _command(self, cache: Cache, folder: RunFolder) -> Command:
        """Upstream's script in one process on the CPU, as far as its data are ready."""
        made = replace(plans.completed(self.plan, keys.derived((cache,))), gpus=0, nodes=1)
        stage, arguments = made.stage, dict(made.arguments())
        for name, value in _REPLACED.items():
            arguments.pop(name, None)
            if value is not None and name in stage.schema.fields:
                arguments[name] = stage.schema.words(name, value)
        arguments[stage.entry.names.output] = [str(folder.path / "model")]
        built = command.build(made, self.trainer, folder.path, environ=os.environ, caches=keys.environment((cache,)))
        assert stage.upstream.root is not None
        words = [word for name, given in arguments.items() for word in (f"--{name}", *given)]
        env = {name: value for name, value in built.env.items() if name != PROBE_SETTINGS}
        argv = (str(self.trainer.python), str(stage.upstream.root / stage.entry.script), *words)
        return Command(argv=argv, env=env, cwd=built.cwd)

    def _failure(self, folder: RunFolder, why: str) -> TokenisingFailed:
        message = f"upstream's script failed before the data were ready: {redact(why)}"
        failed = launch_finding("error", "tokenising-failed", message, "read the log", file=str(folder.console(1)))
        return TokenisingFailed(replace(failed, layer="run"))


def _reason(folder: RunFolder) -> str:
    found = evidence.read_run(folder.path, attempt=1)
    if found.log is None:
        return "no reason"
    end = find_ending(found)
    error = end.error or {}
    why = ": ".join(str(error[k]) for k in ("type", "message") if error.get(k))
    if not why and found.exit is not None and found.exit.signal:
        why = f"killed by {signal.Signals(found.exit.signal).name}"
    return why or end.reason or "no reason"
