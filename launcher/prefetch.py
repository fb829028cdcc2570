"""`launch prepare`: whatever a run will need and no GPU has to do, done beforehand and proved to be found.

Downloads come first: upstream's key of tokenised data holds what is in the hub's cache
(dataset_transformation.py:84). Then upstream's own script tokenises. What cannot be had so is said:
reference log-probabilities need the model, and belong to the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import doctor, entries, hub_files, plan, preparation, rundir
from launcher.backends import model_config
from launcher.backends.model_rules import offline
from launcher.errors import Exit, Finding, InvalidConfig, NotReady, errors
from launcher.hub_files import Part
from launcher.machine import Trainer
from launcher.plan import Plan
from launcher.preparation import Request
from launcher.rundir import RunFolder
from launcher.sizes import sized
from launcher.tokenised import Filling, Say, Tokenised

# what other machines' packages decide, which need not be the ones here
_OF_THESE_PACKAGES = frozenset(
    {"attention-missing", "attention-replaced", "optim-missing", "report-missing"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """What `launch prepare` has done, and what the run will find."""

    plan: Plan
    parts: tuple[Part, ...]
    tokenised: Tokenised
    left: tuple[str, ...]
    needs: Mapping[str, Any]
    findings: tuple[Finding, ...]
    seconds: float = 0.0
    work: Path | None = None

    @property
    def exit(self) -> Exit:
        """1 where the run would miss something."""
        missed = any(one.code == "would-miss" for one in self.findings)
        return Exit.VERDICT if missed else Exit.OK

    @property
    def did_nothing(self) -> bool:
        """Whether all of it was there already."""
        states = {self.tokenised.state, *(one.state for one in self.parts)}
        return states <= {"there", "unknown"}

    @property
    def size(self) -> int:
        """Bytes of all that the run will read."""
        return self.tokenised.size + sum(one.size for one in self.parts)

    def as_json(self) -> dict[str, Any]:
        """For the envelope."""
        return {
            "plan": {"gpus": [self.plan.as_json()]}, "ready": self.exit is Exit.OK,
            "already_there": self.did_nothing, "seconds": round(self.seconds, 2), "bytes": self.size,
            "parts": [one.as_json() for one in self.parts], "dataset": self.tokenised.as_json(),
            "left": list(self.left), "needs": dict(self.needs),
            "log": None if self.work is None else str(RunFolder(self.work).console(1)),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For people: a line for each thing, then what is left to the run."""
        told = self.tokenised
        rows = [(one.kind, one.name, one.state, one.size, one.seconds) for one in self.parts]
        place = str(told.places[0]) if told.places else "-"
        rows.append(("tokenised", place, told.state, told.size, told.seconds))
        wide = max(len(row[1]) for row in rows)
        lines = []
        for kind, name, state, size, seconds in rows:
            took = f"  in {seconds:.0f} s" if state in ("fetched", "filled") else ""
            more = (
                f"  ({sized(told.whole)} with what led to it)"
                if kind == "tokenised" and told.places
                else ""
            )
            lines.append(
                f"{kind:<10} {name:<{wide}}  {state:<8} {sized(size):>9}{more}{took}".rstrip()
            )
        shown = told.line()
        lines += [f"rows       {shown}"] if shown else []
        lines += [f"left       {one}" for one in self.left]
        if self.exit is Exit.OK:
            lines += [f"needs      {one}, where it trains" for one in self.needs.values() if one]
        where = f"{self.plan.gpus} GPU(s)" if self.plan.gpus else "the CPU"
        if self.exit is not Exit.OK:
            end = f"not prepared: the run on {where} would miss what it needs"
        elif self.did_nothing:
            end = f"already there: nothing was to be done for {where}"
        else:
            end = f"prepared for {where} in {self.seconds:.0f} s"
        return [*lines, f"{end}; {sized(self.size)} in all"]


def prepare(request: Request, say: Say = lambda _: None) -> Prefetch:
    """Do for a run whatever needs no GPU; `say` is told what takes long.

    Raises InvalidConfig and NotReady as a start would, NotReady too where a model cannot be fetched,
    TokenisingFailed where upstream's script fails, and Interrupted.
    """
    began = time.monotonic()
    asked = preparation.ask(replace(request, elsewhere=True), running=False)
    planned = _planned(request, asked)
    _require_ready(planned, asked.trainer)
    environ = dict(os.environ)
    parts = hub_files.fetch(hub_files.wanted(planned), asked.trainer, environ)
    missing = tuple(hub_files.findings(parts, planned, offline=offline(environ)))
    if missing:
        raise NotReady(missing)
    filling = Filling(planned, asked.trainer, request, environ, say, parts)
    tokenised, said, work = filling.done()
    found = tuple(dict.fromkeys((*planned.stage.findings, *planned.findings, *said)))
    return Prefetch(
        plan=planned, parts=parts, tokenised=tokenised, left=tuple(_left(planned, parts, filling)),
        needs=_needs(planned, asked.trainer, filling, environ), findings=found,
        seconds=time.monotonic() - began, work=work,
    )  # fmt: skip


def _planned(request: Request, asked: preparation.Asked) -> Plan:
    """The later run's own plan. Raises InvalidConfig with what a start would refuse."""
    made = plan.make(
        asked.stage, gpus=asked.gpus, nodes=request.nodes, output=rundir.runs_root() / "model"
    )
    found = [
        replace(one, severity="warning") if one.code in _OF_THESE_PACKAGES else one
        # what lies in the output folder is asked when something is to be trained into it
        for one in doctor.situation(made, asked.trainer, None, None)
        if one.code not in ("missing-model", "incomplete-model")
    ]
    made = replace(made, findings=(*made.findings, *found))
    if errors(made.findings, strict=request.strict):
        raise InvalidConfig((*made.stage.findings, *made.findings))
    return made


def _require_ready(planned: Plan, trainer: Trainer) -> None:
    """What tokenising needs here; what training needs besides is asked where it trains."""
    subject = replace(doctor.of_plan(planned, trainer), gpus=0, plan=None)
    found = [
        *doctor.checkout(subject), *doctor.interpreter(trainer), *doctor.packages(subject),
        *doctor.local_files(planned),
    ]  # fmt: skip
    if errors(found):
        raise NotReady(errors(found))


# --- what the run will still have to do, and where ------------------------------------------------


def _left(planned: Plan, parts: Sequence[Part], filling: Filling) -> Iterator[str]:
    model = next((one for one in parts if one.role in ("whole", "model")), None)
    if model is not None:
        yield f"loading {model.name} ({sized(model.size)}) on every process"
    reference = next((one for one in filling.caches if one.kind == "reference"), None)
    if reference is not None and filling.entry is not None:
        file = reference.path / f"{entries.reference(planned, filling.entry)}.pt"
        if file.is_file():
            yield f"nothing for the reference log-probabilities: they are there ({file})"
        else:
            yield (
                "the reference log-probabilities: one pass of the model over every pair, before the first "
                f"step, kept in {reference.path}"
            )
    elif reference is not None:
        yield "the reference log-probabilities: one pass of the model over every pair"
    if planned.values.get("precompute_ref_log_probs") is True:
        yield "the reference log-probabilities (`precompute_ref_log_probs`): one pass of the model"


def _needs(
    planned: Plan, trainer: Trainer, filling: Filling, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Where the run has to find all this, and with which packages: under the same names."""
    folders = [str(filling.cache.path)] if filling.cache is not None else []
    far = [one for one in hub_files.wanted(planned) if not one.local]
    if far:
        folders.append(str(model_config.hub_cache(environ)))
    if any(one.role == "data" for one in far):
        home = Path(environ.get("HF_HOME") or model_config.hub_home(environ))
        folders.append(environ.get("HF_DATASETS_CACHE") or str(home / "datasets"))
    names = ("datasets", "tokenizers", "transformers", "trl") if filling.trl else (
        "tokenizers", "transformers",
    )  # fmt: skip
    versions = [f"{name} {trainer.packages[name]}" for name in names if name in trainer.packages]
    version = ".".join(map(str, trainer.version[:2]))
    return {
        "folders": ", ".join(folders),
        "packages": ", ".join([*versions, f"Python {version}"] if filling.trl else versions),
    }
