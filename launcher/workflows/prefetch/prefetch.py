"""`launch prepare`: whatever a run will need and no GPU has to do, done beforehand and proved to be found.

Downloads come first: upstream's key of tokenised data holds what is in the hub's cache
(dataset_transformation.py::get_commit_hash[file = launch_utils.custom_cached_file]). Then upstream's own script
tokenises, in one process on the CPU: it leaves before the model is loaded
(finetune.py::main[if args.cache_dataset_only], dpo_tune_cache.py::main[if args.cache_dataset_only],
dpo.py::main[if args.cache_dataset_only]). What cannot be had so is listed: TRL tokenises while its trainer is made,
and reference log-probabilities need the model.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.artifacts.model_config import offline
from launcher.cache import hub, keys
from launcher.cache.hub import Part
from launcher.cache.keys import Cache
from launcher.errors import Exit, Finding, InvalidConfig, NotReady, errors
from launcher.lifecycle import tokenising
from launcher.lifecycle.tokenising import Tokenised
from launcher.machine.python import Trainer
from launcher.machine.sizes import sized
from launcher.plan.plan import Plan
from launcher.planning import check
from launcher.planning.collect import Facts
from launcher.planning.doctor import checks
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

# the model is fetched here, and what lies in the output folder is asked when something is to be trained into it
_ASKED_LATER = frozenset({"missing-model", "incomplete-model", "foreign-checkpoints", "finished-output"})
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
    filling = tokenising.Filling(planned, trainer, request, say, folders)
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
