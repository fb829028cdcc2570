"""A stage file and numbers of GPUs -> `Rung`s: the same stage, short, on each of them.

What each needs beyond the file is derived: no DeepSpeed on one GPU, where nothing is sharded, unless it
was asked for or cannot be done without; places of its own; an end to a hang.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import footprint, forecast, lengths, plan, preparation, rehearsal, rundir
from launcher.devices import Look
from launcher.errors import Finding, InvalidConfig, LaunchError, NotReady, not_ready, usage
from launcher.forecast import Terms
from launcher.plan import Plan
from launcher.preparation import Prepared, Request
from launcher.stage import Stage

MODELS = "models"
"""The folder of a ladder into which its rungs save; it goes when one has been judged."""
_NAMES_DEEPSPEED = ("deepspeed=", "deepspeed_config=", "open_instruct.deepspeed_config=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """The short run on so many GPUs, 0 being the CPU."""

    gpus: int
    request: Request
    prepared: Prepared
    notes: tuple[Finding, ...] = ()

    @property
    def name(self) -> str:
        """What it is called among the others."""
        return label(self.gpus)


def label(gpus: int) -> str:
    """A number of GPUs, for people."""
    return f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "CPU"


def counts(text: str) -> list[int]:
    """`--gpus 1,2,8` as numbers. Raises UsageError for what is none, or stands there twice."""
    found = forecast.counts(text)
    if len(set(found)) < len(found):
        raise usage("bad-gpus", f"--gpus {text}: a rung stands there twice", "--gpus 1,2,8")
    return found


def terms(
    gpus: Sequence[int], *, price: float | None, rows: int | None, row_tokens: str | None
) -> Terms:
    """What the stage file does not say. Raises UsageError for what makes no sense."""
    if price is not None and not 0 < price < float("inf"):
        raise usage("bad-price", f"--price is more than 0, not {price:g}")
    if price is not None and not any(gpus):
        raise usage("price-without-gpus", "a price is for GPUs, and there are none")
    if row_tokens is not None:
        lengths.parse(row_tokens)
    return Terms(price=price, rows=rows, row_tokens=row_tokens)


def require_here(gpus: Sequence[int], seen: Look | None) -> None:
    """Raise NotReady, naming the rungs that can be run, where one needs more GPUs than there are."""
    most, here = max(gpus), 0 if seen is None else len(seen.visible)
    if most <= here:
        return
    possible = [str(count) for count in gpus if count <= here]
    raise not_ready(
        "too-few-gpus", f"the rung of {label(most)} needs more than the {here} here",
        f"--gpus {','.join(possible)} can be run here" if possible else "--gpus 0 trains on the CPU",
    )  # fmt: skip


def prepare(
    stage: Stage, request: Request, gpus: Sequence[int], *, steps: int, folder: Path, terms: Terms,
    running: bool,
) -> list[Rung]:  # fmt: skip
    """Every rung, validated and planned as it will be started, before any is.

    Raises InvalidConfig, NotReady or UsageError with what is wrong with any of them.
    """
    faults: list[LaunchError] = []
    batch = _largest_batch(stage, gpus, faults)
    made = []
    for count in gpus if not faults else ():
        try:
            made.append(_rung(stage, request, count, steps, batch, folder, terms, running=running))
        except LaunchError as error:
            faults.append(error)
    if faults:
        kind = next(
            (k for k in (InvalidConfig, NotReady) if any(type(f) is k for f in faults)), None
        )
        chosen = [fault for fault in faults if kind is None or type(fault) is kind]
        raise type(chosen[0])(dict.fromkeys(f for fault in chosen for f in fault.findings))
    return made


def findings(stage: Stage, rungs: Sequence[Rung], steps: int) -> tuple[Finding, ...]:
    """What is to be said of all of them, each thing once."""
    said = [*rehearsal.findings(stage, steps), *_not_constant(stage, rungs)]
    said += [note for rung in rungs for note in rung.notes]
    said += [f for rung in rungs for f in rung.prepared.findings if f.severity != "note"]
    return tuple(dict.fromkeys(said))


def _largest_batch(stage: Stage, gpus: Sequence[int], faults: list[LaunchError]) -> int:
    """Rows of a step on the rung that takes most: all of them then read the same slice."""
    most = 0
    for count in gpus:
        try:
            most = max(most, plan.make(stage, gpus=count).global_batch)
        except InvalidConfig as error:
            faults.append(error)
    return most


def _rung(
    stage: Stage, request: Request, count: int, steps: int, batch: int, folder: Path, terms: Terms,
    *, running: bool,
) -> Rung:  # fmt: skip
    short = f"{count}gpu" if count else "cpu"
    output = folder / MODELS / short
    overrides = [
        *rehearsal.overrides(stage, steps=steps, output=output, batch=batch),
        f"name={json.dumps(f'{stage.name}-{short}', ensure_ascii=False)}",
    ]
    if stage.config.options.get("on_hang") is None:
        # nobody looks on, and the next rung waits
        overrides.append("on_hang=stop")
    asked = replace(
        request, gpus=count, overrides=(*request.overrides, *overrides), runs=folder, fresh=True
    )
    changed, notes = _without_deepspeed(stage, asked, terms)
    asked = replace(asked, overrides=(*asked.overrides, *changed))
    known = predicted(asked, terms)
    notes += known.findings if known is not None else ()
    prepared = preparation.prepare(asked, running=running)
    # only looked at: it is prepared anew when its turn comes
    rundir.release(prepared.folder)
    return Rung(gpus=count, request=asked, prepared=prepared, notes=tuple(notes))


def predicted(request: Request, terms: Terms) -> forecast.Rung | None:
    """The forecast for one rung; None on the CPU, and where shape or row lengths are not known."""
    if not request.gpus:
        return None
    try:
        found = forecast.make(request, [request.gpus], terms).rungs
    except (LaunchError, OSError):
        return None
    return found[0] if found else None


def full_steps(stage: Stage, request: Request, gpus: int, terms: Terms) -> tuple[Plan, int | None]:
    """The whole run on so many GPUs, and its optimizer steps, if they can be known."""
    whole = plan.make(stage, gpus=gpus)
    known = predicted(replace(request, gpus=gpus), terms)
    if known is not None and known.steps is not None:
        return whole, known.steps
    if not plan.repacks(stage, stage.values):
        return whole, footprint.optimizer_steps(whole, terms.rows, told=True)
    if terms.row_tokens is None:
        # of rows whose lengths are not known nobody can say how many packed ones they come to
        return whole, whole.steps
    seen = lengths.parse(terms.row_tokens)
    rows = footprint.trained_rows(whole, seen, terms.rows or whole.rows)
    return whole, footprint.optimizer_steps(whole, rows, footprint.rows_of(whole, seen))


def missing_for_steps(stage: Stage, whole: Plan, terms: Terms) -> Iterator[str]:
    """The options that would tell how many steps the whole run has."""
    if whole.rows is None and terms.rows is None:
        yield "--rows N"
    if plan.repacks(stage, stage.values) and terms.row_tokens is None:
        yield "--row-tokens MEAN:MAX"


def _without_deepspeed(
    stage: Stage, request: Request, terms: Terms
) -> tuple[list[str], list[Finding]]:
    """On one GPU: the override that leaves DeepSpeed out, or why it stays."""
    options = stage.options
    named = any(text.startswith(_NAMES_DEEPSPEED) for text in request.overrides)
    if request.gpus != 1 or options.deepspeed is None or named:
        return [], []
    if options.backend == "open_instruct" and options.stage == "dpo":
        why = "without it one process has no process group (dpo_utils.py:453)"
        return [], [_note(stage, "deepspeed-kept", f"DeepSpeed stays on one GPU: {why}")]
    without = replace(request, overrides=(*request.overrides, "deepspeed=none"))
    off, on = predicted(without, terms), predicted(request, terms)
    peaks = [one.memory.peak for one in (off, on) if one is not None and one.memory is not None]
    if off is None or on is None or off.spare is None or on.spare is None:
        keep = "offload" in options.deepspeed_name
        why = f"`{options.deepspeed_name}` keeps on the host what the card may not hold"
    else:
        keep = off.spare < 0 and on.spare > off.spare
        why = f"without it {peaks[0]:.1f} GiB are planned, with it {peaks[1]:.1f}"
    if keep:
        return [], [_note(stage, "deepspeed-kept", f"DeepSpeed stays on one GPU: {why}")]
    message = "DeepSpeed is off on one GPU, where it would shard nothing"
    help = f"`deepspeed={options.deepspeed_name}` on the command line keeps it"
    return ["deepspeed=none"], [_note(stage, "deepspeed-off", message, help)]


def _not_constant(stage: Stage, rungs: Sequence[Rung]) -> Iterator[Finding]:
    sizes = [rung.prepared.plan.global_batch for rung in rungs]
    if len(set(sizes)) > 1:
        told = ", ".join(f"{n} on {rung.name}" for n, rung in zip(sizes, rungs, strict=True))
        origin = stage.config.origin("batch")
        yield Finding(
            severity="warning", layer="launch", code="batch-not-constant", key="batch.global",
            message=f"the rungs train with different global batches: {told}",
            help="`batch: {global: N, per_device: M}` keeps it, and accumulation follows from --gpus",
            **origin.place,
        )  # fmt: skip


def _note(stage: Stage, code: str, message: str, help: str | None = None) -> Finding:
    key = "deepspeed_config" if stage.config.shape == "wrapped" else "deepspeed"
    origin = stage.config.origin(key)
    return Finding(
        severity="note", layer="launch", code=code, key=key, message=message, help=help,
        **origin.place,
    )  # fmt: skip
