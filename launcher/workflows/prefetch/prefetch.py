"""`launch prepare`: what a run needs and no GPU has to do, done beforehand and proved to be found.

Downloads come first: upstream's key of tokenised data holds what is in the hub's cache
(dataset_transformation.py::get_commit_hash[file = launch_utils.custom_cached_file]). Then
upstream's own script tokenises, in one process on the CPU: it leaves before the model is loaded
(finetune.py::main[if args.cache_dataset_only], dpo_tune_cache.py::main[if args.cache_dataset_only],
dpo.py::main[if args.cache_dataset_only]). What cannot be had so is listed: TRL tokenises while its
trainer is made, and reference log-probabilities need the model.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.artifacts.model_config import is_offline
from launcher.cache import hub, keys
from launcher.cache.hub import Part
from launcher.cache.keys import Cache
from launcher.errors import Exit, Finding, InvalidConfig, NotReady, naming_variables, select_errors
from launcher.lazy_dataclass import dataclass
from launcher.lifecycle import tokenising
from launcher.lifecycle.tokenising import Tokenised
from launcher.machine.python import Trainer
from launcher.machine.sizes import format_size
from launcher.plan.plan import Plan
from launcher.planning import check
from launcher.planning.collect import Facts
from launcher.planning.doctor import checks
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

# the model is fetched here; the output folder matters once something is trained into it
_ASKED_LATER = frozenset(
    {"missing-model", "incomplete-model", "foreign-checkpoints", "finished-output"}
)
Say = tokenising.Say


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
        if self.tokenised.missed:
            return Exit.VERDICT
        return Exit.OK

    @property
    def did_nothing(self) -> bool:
        states = {self.tokenised.state, *(part.state for part in self.parts)}
        return states <= {"there", "unknown", "left"}

    @property
    def size(self) -> int:
        return self.tokenised.size + sum(part.size for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": {"gpus": [self.plan.record.as_json()]},
            "ready": self.exit is Exit.OK,
            "already_there": self.did_nothing,
            "seconds": round(self.seconds, 2),
            "bytes": self.size,
            "parts": [part.as_json() for part in self.parts],
            "dataset": self.tokenised.as_json(),
            "left": list(self.left),
            "log": None if self.work is None else str(RunFolder(self.work).console(1)),
        }

    def lines(self) -> Iterator[str]:
        data = self.tokenised
        place = str(data.place or "-")
        width = len(place)
        for part in self.parts:
            width = max(width, len(part.name))
        for part in self.parts:
            text = (
                f"{part.kind:<10} {part.name:<{width}}  {part.state:<8} {format_size(part.size):>9}"
            )
            yield text + _format_duration(part.state, part.seconds)
        text = f"tokenised  {place:<{width}}  {data.state:<8} {format_size(data.size):>9}"
        yield text + _format_duration(data.state, data.seconds)
        lengths = data.lengths
        if lengths is not None and lengths.rows is not None:
            tokens = f"{lengths.mean:,.1f} tokens a row, {lengths.longest:,} at most"
            yield f"rows       {lengths.rows:,} rows; {tokens}, {lengths.tokens:,} in all"
        for text in self.left:
            yield f"left       {text}"
        where = "the CPU"
        if self.plan.gpus:
            where = f"{self.plan.gpus} GPU(s)"
        if self.exit is not Exit.OK:
            end = f"not prepared: the run on {where} would miss what it needs"
        elif self.did_nothing:
            end = f"already there: nothing was to be done for {where}"
        else:
            end = f"prepared for {where} in {self.seconds:.0f} s"
        yield f"{end}; {format_size(self.size)} in all"


def _format_duration(state: str, seconds: float) -> str:
    if state not in ("fetched", "filled"):
        return ""
    return f"  in {seconds:.0f} s"


def prepare_caches(resolved: Facts, say: Say = lambda _: None) -> Prefetch:
    """Do for a run whatever needs no GPU; `say` gets a line before what takes long.

    Raises InvalidConfig and NotReady as a start would, NotReady too where a model cannot be
    fetched, TokenisingFailed where upstream's script fails, and Interrupted.
    """
    with naming_variables(resolved.redactor):
        return _fill_caches(resolved, say)


def _fill_caches(resolved: Facts, say: Say) -> Prefetch:
    began = time.monotonic()
    trainer = resolved.trainer
    plan = _settle_plan(resolved)
    # what training needs besides is asked where it trains
    subject = replace(checks.make_subject(plan, trainer), gpus=0, plan=None)
    lacking = select_errors([*checks.check_source(subject), *checks.check_local_files(plan)])
    if lacking:
        raise NotReady(lacking)
    needed = hub.list_required_parts(plan)
    models = [part for part in needed if part.role != "data"]
    parts = _fetch_parts(models, plan, trainer, {})
    # of what lies here now: the names of the cache folders hold the tokenizer's content
    caches = keys.derive(plan, trainer.packages)
    data = [part for part in needed if part.role == "data"]
    parts += _fetch_parts(data, plan, trainer, keys.derive_environment(caches))
    filling = tokenising.Filling(plan, trainer, resolved.request, say, caches)
    tokenised = filling.fill()
    return Prefetch(
        plan=plan,
        parts=parts,
        tokenised=tokenised,
        left=tuple(_list_remaining_work(plan, parts, caches, tokenised)),
        work=filling.work,
        findings=tuple(dict.fromkeys((*plan.all_findings, *tokenised.missed))),
        seconds=time.monotonic() - began,
    )


def _settle_plan(resolved: Facts) -> Plan:
    """The later run's own plan. Raises InvalidConfig with what a start would refuse."""
    # what trains may have other packages than there are here
    facts = replace(resolved, packages=None)
    output = rundir.find_runs_root() / "model"
    plan = check.plan_with_findings(facts, output=output)
    kept = []
    for finding in plan.stage.findings:
        if finding.code not in _ASKED_LATER:
            kept.append(finding)
    stage = replace(plan.stage, findings=tuple(kept))
    plan = replace(plan, stage=stage)
    if select_errors(plan.all_findings, strict=resolved.request.strict):
        raise InvalidConfig(plan.all_findings)
    return plan


def _fetch_parts(
    parts: Sequence[Part], plan: Plan, trainer: Trainer, variables: Mapping[str, str]
) -> tuple[Part, ...]:
    fetched = hub.fetch(parts, trainer, {**os.environ, **variables})
    missing = tuple(hub.check_parts(fetched, plan, offline=is_offline(os.environ)))
    if missing:
        raise NotReady(missing)
    return fetched


def _list_remaining_work(
    plan: Plan, parts: Sequence[Part], caches: Sequence[Cache], tokenised: Tokenised
) -> Iterator[str]:
    """What the run still does before its first step."""
    if tokenised.state == "left":
        yield "tokenising: TRL does it while its trainer is made, before the first step"
    for part in parts:
        if part.role in ("whole", "model"):
            yield f"loading {part.name} ({format_size(part.size)}) on every process"
            break
    if plan.values.get("precompute_ref_log_probs") is True:
        yield "the reference log-probabilities (`precompute_ref_log_probs`): one pass of the model"
        return
    for cache in caches:
        if cache.kind == "reference":
            text = "the reference log-probabilities, where they are not there yet: one pass of the "
            text += "model over every pair, before the first step, kept in"
            yield f"{text} {cache.path}"
            break
