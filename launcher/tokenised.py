"""Tokenised data for a later run, made by upstream's own script and proved to be what that run would find.

The script runs in one process on the CPU with the arguments of the later run, as far as any key knows
them. open-instruct leaves before the model is loaded (finetune.py:520, dpo_tune_cache.py:267); its set is
made out of sight and moved into the folder of the later run in one step. TRL's sets are made by its
trainer and found again by the fingerprint of everything that made them: a second process has to find
all of them before they count.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import (
    cache_folders,
    caches,
    command,
    entries,
    evidence,
    hub_files,
    lengths,
    rundir,
    runner,
)  # fmt: skip
from launcher.command import Command
from launcher.ending import ending
from launcher.errors import Exit, Finding, LaunchError, brief
from launcher.fingerprint import cache_home
from launcher.hub_files import Part
from launcher.lengths import Lengths
from launcher.machine import Trainer
from launcher.plan import Plan
from launcher.preparation import Request
from launcher.redaction import redact
from launcher.rundir import RunFolder

TOKENISING = Path(__file__).resolve().parent / "tokenising.py"
RECORD = "prepare.json"
_FORM = 1

# a launcher around this one would have several processes wait for each other
_DISTRIBUTED = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
        "MASTER_ADDR", "MASTER_PORT",
    }
)  # fmt: skip
# no key of tokenised data holds any of these: places, services, engines, devices
_OPEN_INSTRUCT: Mapping[str, Any] = {
    "cache_dataset_only": True, "push_to_hub": False, "try_launch_beaker_eval_jobs": False,
    "with_tracking": False, "send_slack_alerts": False, "zero_stage": None, "use_liger_kernel": None,
    "use_qlora": None, "use_lora": None, "use_8bit_optimizer": None, "dpo_use_paged_optimizer": None,
    "attn_implementation": None, "offload_param": None, "offload_optimizer": None,
}  # fmt: skip
_TRL: Mapping[str, Any] = {
    "use_cpu": True, "bf16": False, "fp16": None, "tf32": None, "bf16_full_eval": None,
    "fp16_full_eval": None, "deepspeed": None, "fsdp": None, "fsdp_config": None,
    "parallelism_config": None, "accelerator_config": None, "use_liger_kernel": None,
    "liger_kernel_config": None, "push_to_hub": None, "hub_model_id": None, "report_to": "none",
    "load_in_4bit": None, "load_in_8bit": None, "use_peft": None, "attn_implementation": None,
    "optim": None, "optim_args": None, "torch_compile": None, "ddp_backend": None,
    "resume_from_checkpoint": None,
}  # fmt: skip

Say = Callable[[str], None]


class TokenisingFailed(LaunchError):
    """Upstream's script ended with an error before the data were ready (exit 4)."""

    exit_code = Exit.TRAINING


class Interrupted(LaunchError):
    """The user stopped it (exit 130)."""

    exit_code = Exit.INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenised:
    """The tokenised data of a run: where, how large, and what is known of their rows.

    `state` is `there` (an earlier run or preparation made them), `filled`, or `missed`: the run would
    not find them. `of` are the rows before filters, `cut` those that are as long as rows may be. `size` is
    what the run reads, `whole` all that the cache folder holds, both in bytes.
    """

    state: str
    places: tuple[Path, ...] = ()
    size: int = 0
    seconds: float = 0.0
    rows: int | None = None
    of: int | None = None
    lengths: Lengths | None = None
    limit: int | None = None
    cut: int | None = None
    packed: bool = False
    whole: int = 0

    def as_json(self) -> dict[str, Any]:
        """For the envelope: tokens a row, `bytes`, `seconds`."""
        known = self.lengths
        return {
            "state": self.state, "places": [str(path) for path in self.places], "bytes": self.size,
            "folder_bytes": self.whole, "seconds": round(self.seconds, 2), "rows": self.rows,
            "rows_before_filters": self.of,
            "tokens": None if known is None else known.tokens,
            "mean": None if known is None else round(known.mean, 2),
            "longest": None if known is None else known.longest,
            "limit": self.limit, "at_limit": self.cut, "packed": self.packed,
        }  # fmt: skip

    def line(self) -> str | None:
        """Rows and tokens in one line."""
        if self.rows is None:
            return None
        told = f"{self.rows:,} rows"
        if self.of is not None and self.of != self.rows and not self.packed:
            told += f" of {self.of:,} ({self.of - self.rows:,} dropped)"
        if self.packed:
            told += f", packed from {self.of:,}" if self.of is not None else ", packed"
        known = self.lengths
        if known is not None:
            told += f"; {known.mean:,.1f} tokens a row, {known.longest:,} at most, {known.tokens:,} in all"
        if self.cut is not None:
            told += f"; {self.cut:,} cut at {self.limit:,}, or exactly so long"
        return told


class Filling:
    """The tokenised data of one plan."""

    def __init__(
        self, planned: Plan, trainer: Trainer, request: Request, environ: Mapping[str, str], say: Say,
        parts: Sequence[Part],
    ) -> None:  # fmt: skip
        self.plan, self.trainer, self.request = planned, trainer, request
        self.environ, self.say = environ, say
        self.commits = [[one.name, one.commit] for one in parts]
        self.caches = caches.derive(planned, trainer.packages, environ=environ)
        self.cache = next((one for one in self.caches if one.kind == "dataset"), None)
        self.trl = planned.stage.options.backend == "trl"
        self.entry: Path | None = None
        self.work: Path | None = None

    def done(self) -> tuple[Tokenised, tuple[Finding, ...], Path | None]:
        """Fill what is not there; returns the data, what is to be said, and the folder of the log."""
        told, said, work = self._done()
        folder = None if self.cache is None else self.cache.path
        # without a folder of ours: what was seen being written
        whole = told.size if folder is None else hub_files.size_of(folder)
        return replace(told, whole=whole), said, work

    def _done(self) -> tuple[Tokenised, tuple[Finding, ...], Path | None]:
        missed = tuple(self._impossible())
        if missed:
            return Tokenised(state="missed"), missed, None
        there = self.there()
        if there is not None:
            return there, (), None
        with cache_folders.alone(self._lock(), self._wait):
            # whoever was at it may have filled it in the meantime
            there = self.there()
            if there is not None:
                return there, (), None
            try:
                root = self.request.runs or rundir.runs_root()
                self.work = rundir.new_folder(root, "prepare", self.plan.stage.name)
                told, said = self._fill_trl() if self.trl else self._fill_open_instruct()
            except BaseException:
                self._keep(None)
                raise
        self._keep(told)
        return told, said, self.work

    def _keep(self, told: Tokenised | None) -> None:
        """A record beside the log."""
        if self.work is not None:
            end = {"state": "failed"} if told is None else told.as_json()
            head = {"launch_prepare": _FORM, "time": rundir.now(), "gpus": self.plan.gpus}
            rundir.write_json(self.work / RECORD, {**head, "dataset": end})

    def _wait(self) -> None:
        self.say("another `launch prepare` is filling this: waiting for it")

    def _lock(self) -> Path:
        return cache_home(self.environ) / "prepared" / f"{self.key}.lock"

    @property
    def key(self) -> str:
        """What the lock, and TRL's record, are called: everything that the sets may depend on."""
        trainer = self.trainer
        versions = [[name, trainer.packages[name]] for name in sorted(trainer.packages)]
        told = [
            _FORM, self.words("-"), [one.digest for one in self.caches if one.kind == "dataset"],
            self.commits, versions if self.trl else [], list(trainer.version),
            [self.environ.get(name) for name in ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")],
            os.getcwd(),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()[:24]

    # -- what no preparation helps with --------------------------------------------------------------

    def _impossible(self) -> Iterator[Finding]:
        values, prefix = self.plan.values, "dataset_"
        if self.trl:
            if values.get("dataset_streaming") is True:
                yield self.missed(
                    "dataset_streaming", "the run reads its data as a stream, and keeps nothing of it",
                    "dataset_streaming: false",
                )  # fmt: skip
            return
        prefix = prefix if "dataset_skip_cache" in values else ""
        if values.get(f"{prefix}skip_cache") is True:
            yield self.missed(
                f"{prefix}skip_cache",
                f"`{prefix}skip_cache: true`: the run tokenises all over, and looks for no set "
                "(dataset_transformation.py:1912)", f"leave {prefix}skip_cache out",
            )  # fmt: skip
        if values.get(f"{prefix}cache_mode") != "local":
            yield self.missed(
                f"{prefix}cache_mode", f"`{prefix}cache_mode: {values.get(f'{prefix}cache_mode')}`: "
                "the run looks for its set on the hub, not here", f"{prefix}cache_mode: local",
            )  # fmt: skip
        if "BEAKER_JOB_ID" in self.environ:
            yield self.missed(
                None, "BEAKER_JOB_ID is set: upstream puts tokenised data into a folder of its own",
                "unset BEAKER_JOB_ID for this, and for the run",
            )  # fmt: skip
        own = values.get(f"{prefix}config_hash")
        if own is not None:
            place = Path(str(values.get(f"{prefix}local_cache_dir"))) / str(own)
            if not cache_folders.is_complete(place):
                yield self.missed(
                    f"{prefix}config_hash", f"a set is asked for by its name, and {place} is no complete set",
                    f"leave {prefix}config_hash out",
                )  # fmt: skip

    def missed(self, key: str | None, message: str, help: str) -> Finding:
        """That the run would not find what was, or could be, made."""
        origin = self.plan.stage.config.origin(f"args.{key}") if key else None
        return Finding(
            severity="error", layer="launch", code="would-miss", key=f"args.{key}" if key else None,
            message=message, help=help, file=origin.file if origin else None,
            line=origin.line if origin else None,
        )  # fmt: skip

    # -- what is there -------------------------------------------------------------------------------

    def there(self) -> Tokenised | None:
        """The data as an earlier run or preparation left them; None where anything of them is missing."""
        if self.trl:
            return self._recorded()
        if self.cache is None:
            # by a name of the user's own, which `_impossible` has looked for
            prefix = "dataset_" if "dataset_config_hash" in self.plan.values else ""
            base = Path(str(self.plan.values.get(f"{prefix}local_cache_dir")))
            self.entry = base / str(self.plan.values.get(f"{prefix}config_hash"))
        else:
            self.entry = entries.hit(self.cache.path, self.plan, self.environ)
        return None if self.entry is None else self._of_entry(self.entry, "there", 0.0)

    def _of_entry(self, entry: Path, state: str, seconds: float) -> Tokenised:
        """A set of open-instruct's."""
        dpo = self.plan.stage.options.stage == "dpo"
        columns = ("chosen_input_ids", "rejected_input_ids") if dpo else ("input_ids",)
        try:
            known: Lengths | None = lengths.of_dataset(entry, columns)
        except LaunchError:
            # no pyarrow in launch's own Python, or other columns: nothing hangs on it
            known = None
        told = rundir.read_json(entry / "dataset_statistics.json").get("per_dataset_stats")
        stats = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
        rows = None if known is None else known.rows
        rows = _sum(stats, "final_instances") if rows is None else rows
        limit = self.plan.values.get("max_seq_length")
        limit = limit if isinstance(limit, int) else None
        return Tokenised(
            state=state, places=(entry,), size=hub_files.size_of(entry), seconds=seconds, rows=rows,
            of=_sum(stats, "initial_instances"), lengths=known, limit=limit,
            cut=None if known is None or limit is None else known.reaching(limit),
        )  # fmt: skip

    # -- open-instruct -------------------------------------------------------------------------------

    def _fill_open_instruct(self) -> tuple[Tokenised, tuple[Finding, ...]]:
        cache, began = self.cache, time.monotonic()
        assert cache is not None and self.work is not None
        with (
            cache_folders.held(
                (cache,), RunFolder(self.work), 1, config=self.request.config
            ) as locks,
            cache_folders.staging(cache.path) as (place, lock),
        ):
            self._run(1, (*locks, lock), str(place))
            made = [one for one in place.iterdir() if cache_folders.is_complete(one)]
            if len(made) != 1:
                raise TokenisingFailed(self._failed("upstream saved no set of tokenised data", 1))
            if caches.read_again(cache).digest != cache.digest:
                return Tokenised(state="missed"), (
                    self.missed(
                        None, "the data, the tokenizer or the model were written to while they were "
                        "read: what was made of them is thrown away", "run this again",
                    ),
                )  # fmt: skip
            taken = cache_folders.take_in(made[0], cache.path)
        self.entry = entries.hit(cache.path, self.plan, self.environ)
        if taken is None or self.entry != taken:
            reasons = [] if taken is None else list(self._unlike(taken))
            why = "; ".join(reasons) or "another run is writing the same set there now"
            return Tokenised(state="missed"), (
                self.missed(None, f"the run would not find what was tokenised: {why}", "run this again"),
            )  # fmt: skip
        return self._of_entry(taken, "filled", time.monotonic() - began), ()

    def _unlike(self, entry: Path) -> Iterator[str]:
        yield from entries.differences(entries.key(self.plan, self.environ), entry)

    # -- TRL -----------------------------------------------------------------------------------------

    def _fill_trl(self) -> tuple[Tokenised, tuple[Finding, ...]]:
        began = time.monotonic()
        assert self.work is not None
        held = () if self.cache is None else (self.cache,)
        folder = RunFolder(self.work)
        with cache_folders.held(held, folder, 1, config=self.request.config) as locks:
            self._run(1, locks, "")
            steps = self._steps()
            state = "there" if all(one["state"] == "hit" for one in steps) else "filled"
            if state == "filled":
                self.say("once more, to see whether another process finds it")
                self._run(2, locks, "")
                steps = self._steps()
            if self.cache is not None and caches.read_again(self.cache).digest != self.cache.digest:
                return Tokenised(state="missed"), (
                    self.missed(None, "the data were written to while they were read", "run this again"),
                )  # fmt: skip
        lost = [one for one in steps if one["state"] != "hit"]
        if lost:
            names = ", ".join(dict.fromkeys(brief(one["step"] or "a step") for one in lost))
            return Tokenised(state="missed"), (
                self.missed(
                    None, f"a second process does not find again what the first one made ({names}): "
                    "`datasets` has no stable fingerprint for it", "the run will tokenise by itself",
                ),
            )  # fmt: skip
        self._write_record(steps)
        return self._of_steps(steps, state, time.monotonic() - began), ()

    def _steps(self) -> list[dict[str, Any]]:
        """The maps of the newest process, and its end as the last of them."""
        assert self.work is not None
        steps: list[dict[str, Any]] = []
        for event in self._events():
            if event.get("event") == "start":
                steps = []
            elif event.get("event") == "mapped":
                steps.append(event)
            elif event.get("event") in ("ready", "filtered"):
                steps.append({**event, "state": "hit"})
        return steps

    def _of_steps(
        self, steps: Sequence[Mapping[str, Any]], state: str, seconds: float
    ) -> Tokenised:
        end: Mapping[str, Any] = next((o for o in reversed(steps) if o["event"] == "ready"), {})
        first: Mapping[str, Any] = next(
            (one for one in steps if str(one.get("step", "")).startswith("Tokenizing train")), {}
        )
        files = [Path(name) for one in steps for name in one.get("files") or ()]
        places = tuple(dict.fromkeys(path.parent for path in files))
        limit = self.plan.values.get("max_length")
        limit = limit if isinstance(limit, int) else None
        packed = self.plan.values.get("packing") is True and "packing" in self.plan.values
        rows = end.get("rows")
        known = lengths.of_counts(end.get("lengths") or {}, "", rows)
        before = lengths.of_counts(first.get("lengths") or {}, "")
        return Tokenised(
            state=state, places=places, size=sum(hub_files.size_of(path) for path in set(files)),
            seconds=seconds, rows=rows, of=first.get("of"), lengths=known, limit=limit, packed=packed,
            cut=None if before is None or limit is None or packed else before.reaching(limit),
        )  # fmt: skip

    def _record(self) -> Path:
        return self._lock().with_suffix(".json")

    def _write_record(self, steps: Sequence[Mapping[str, Any]]) -> None:
        files = {name: _state(Path(name)) for one in steps for name in one.get("files") or ()}
        told = {
            "launch_prepared": _FORM,
            "time": rundir.now(),
            "files": files,
            "steps": list(steps),
        }
        rundir.write_json(self._record(), told)

    def _recorded(self) -> Tokenised | None:
        """What an earlier preparation of exactly this has left, if all of it is as it was."""
        told = rundir.read_json(self._record())
        files, steps = told.get("files"), told.get("steps")
        if told.get("launch_prepared") != _FORM or not isinstance(files, dict):
            return None
        if not isinstance(steps, list) or not files:
            return None
        if any(_state(Path(name)) != was for name, was in files.items()):
            return None
        return self._of_steps(steps, "there", 0.0)

    # -- the process ---------------------------------------------------------------------------------

    def words(self, place: str) -> list[str]:
        """Upstream's arguments: those of the run, but for what no key of tokenised data knows."""
        made = self.plan if self.cache is None else caches.applied(self.plan, (self.cache,))
        schema, names = made.stage.schema, made.stage.entry.names
        given = dict(made.arguments())
        for name, value in (_TRL if self.trl else _OPEN_INSTRUCT).items():
            given.pop(name, None)
            if value is not None and name in schema.fields:
                given[name] = schema.words(name, value)
        for name in (names.per_device, names.accumulation):
            # of so many GPUs; no key holds it, and one record serves them all
            given.pop(name, None)
        given[names.output] = [
            str(Path(place or "-") / "output") if self.trl else f"{place}/output"
        ]
        if not self.trl and self.cache is not None:
            for name in self.cache.arguments:
                given[name] = [place]
        return [word for name, words in given.items() for word in (f"--{name}", *words)]

    def command(self, place: str) -> Command:
        """Upstream's script in one process on the CPU, as far as its data are ready."""
        assert self.work is not None
        stage = self.plan.stage
        here = replace(self.plan, gpus=0, nodes=1)
        held = () if self.cache is None else (self.cache,)
        built = command.build(
            here, self.trainer, self.work, environ=self.environ, caches=caches.environment(held)
        )
        root = stage.upstream.root
        assert root is not None
        settings = {
            "target": str(root / stage.entry.script), "out": str(self.work / "probe"),
            "backend": stage.options.backend,
        }  # fmt: skip
        env = {name: value for name, value in built.env.items() if name != "LAUNCH_PROBE"}
        env["LAUNCH_TOKENISING"] = json.dumps(settings)
        return Command(
            argv=(str(self.trainer.python), str(TOKENISING), *self.words(place)),
            env=env,
            cwd=built.cwd,
        )

    def _run(self, attempt: int, held: Sequence[int], place: str) -> None:
        assert self.work is not None
        folder = RunFolder(self.work)
        self.say(f"tokenising with {self.plan.stage.entry.script}; log: {folder.console(attempt)}")
        inherited = {
            name: value
            for name, value in self.environ.items()
            if name not in _DISTRIBUTED and not name.startswith(("ACCELERATE_", "FSDP_"))
        }
        scratch = str(self.work / "scratch") if self.trl else place
        try:
            ended = runner.run(
                self.command(scratch), folder, attempt, held=held, inherited=inherited
            )
        finally:
            shutil.rmtree(self.work / "scratch", ignore_errors=True)
        if ended.stopped is not None:
            raise Interrupted(())
        if ended.returncode:
            raise TokenisingFailed(self._failed(None, attempt))

    def _events(self) -> list[dict[str, Any]]:
        assert self.work is not None
        try:
            raw = (self.work / "probe" / "rank-0.jsonl").read_bytes()
        except OSError:
            return []
        return [rundir.parse_line(line) for line in raw.splitlines()]

    def _failed(self, why: str | None, attempt: int) -> Finding:
        """What upstream's script said in the end."""
        assert self.work is not None
        console = RunFolder(self.work).console(attempt)
        seen = evidence.read_run(self.work, attempt=attempt)
        if why is None and seen.log is not None:
            over = ending(seen)
            error = over.error or {}
            told = ": ".join(str(error[k]) for k in ("type", "message") if error.get(k))
            killed = seen.exit is not None and seen.exit.signal
            said = f"killed by {signal.Signals(killed).name}" if killed else over.reason
            why = told or said or _last_line(console)
        return Finding(
            severity="error", layer="run", code="tokenising-failed", file=str(console),
            message=f"upstream's script failed before the data were ready: {redact(why or 'no reason')}",
            help="the whole of it is in the log",
        )  # fmt: skip


def _sum(stats: Sequence[Mapping[str, Any]], name: str) -> int | None:
    found = [one.get(name) for one in stats]
    return sum(int(n) for n in found if isinstance(n, int)) if found and None not in found else None


def _state(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
