"""What is to be compared -> `Bench`: every variant judged before the first one starts."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher import (
    checkouts,
    comparison,
    devices,
    measures,
    noops,
    preparation,
    rundir,
    variants,
)  # fmt: skip
from launcher.assertions import Assertion
from launcher.backends.open_instruct_log import ATTENTION
from launcher.bench import BENCH_VERSION, Bench
from launcher.comparison import Variant
from launcher.errors import (
    Finding,
    InvalidConfig,
    LaunchError,
    NotReady,
    UsageError,
    brief,
    errors,
    not_ready,
    usage,
)  # fmt: skip
from launcher.keys import EXPECT
from launcher.measurement import identity, of_variant, short
from launcher.options import SWITCHED
from launcher.overrides import OPTIONS, spelt
from launcher.plan import Plan
from launcher.preparation import Prepared, Request
from launcher.stage import Stage

_NOT_OF_A_TRIAL = frozenset({"name", "batch", "slurm", "skypilot"})
"""Options that a trial does not see; `batch` comes to arguments."""


def require_gpu(request: Request, *, cpu: bool) -> Request:
    """The request on the GPUs that it asks for, or on the CPU where that is said.

    Raises NotReady without a GPU, UsageError where both are asked for.
    """
    if cpu:
        refuse_gpus(request)
        return replace(request, gpus=0)
    if request.gpus == 0 or devices.look(os.environ).visible:
        return request
    raise not_ready(
        "no-gpu-here", "no GPU is to be seen here, and speed is measured on GPUs",
        "--cpu tries the mechanics: "
        "launch bench configs/demo/sft.yaml --cpu --vary batch.per_device=8,16",
    )  # fmt: skip


def refuse_gpus(request: Request) -> None:
    """Raise UsageError for what says which GPUs, beside `--cpu`."""
    for option, given in (("--gpus", request.gpus), ("--devices", request.devices)):
        if given:
            raise usage("useless-option", f"{option} says nothing with --cpu")


def plan(
    request: Request, asked: Sequence[variants.Asked], *, steps: int, repeats: int,
    timeout_s: float | None = None, assertions: Sequence[Assertion] = (),
) -> Bench:  # fmt: skip
    """Judge every variant before the first one starts.

    The global batch stays as the file has it where a variant changes only the rows of a device; what
    the file expects of a switch follows the variant that turns it. Raises InvalidConfig with the
    findings of all variants, each with its name, NotReady, or UsageError, also for a key that bench
    itself sets.
    """
    relative = [one.text for one in assertions if one.relative]
    if relative and len(asked) < 2:
        raise usage(
            "bad-assert", f"`{brief(relative[0])}` holds the others to the first variant: there is one",
            "--vary KEY=A,B, or figures that stand by themselves: mfu>=48%",
        )  # fmt: skip
    places = checkouts.Checkouts(request)
    if any(one.split()[1] is not None for one in asked):
        request = replace(request, python=request.python or places.python())
    base = _base(request)
    prepared: list[tuple[Variant, Prepared]] = []
    found: dict[Finding, list[str]] = {}
    wrong = False
    for one in asked:
        overrides, named = one.split()
        try:
            checkout = None if named is None else places.find(named)
            variant = _adapted(request, Variant(one.name, overrides, checkout), base)
            made = preparation.prepare(of_variant(request, variant), running=False)
        except InvalidConfig as error:
            wrong, findings = True, error.findings
        else:
            prepared.append((variant, made))
            # how long a trial is bench says; whoever names a commit knows that it is not the pin
            known = {"profile-and-steps"} | (
                {"unpinned-checkout"} if checkout is not None else set()
            )
            findings = tuple(
                f for f in made.findings if f.severity != "note" and f.code not in known
            )
        for finding in findings:
            found.setdefault(finding, []).append(one.name)
    told = tuple(_attributed(finding, names, len(asked)) for finding, names in found.items())
    if wrong:
        raise InvalidConfig(told)
    stage = prepared[0][1].plan.stage.options.stage
    batch = max(made.plan.global_batch for _, made in prepared)
    trials = [
        (variant, _shortened(request, variant, made, steps, batch)) for variant, made in prepared
    ]
    varied = {variants.bare(text) for one in asked for text in one.split()[0]}
    unvaried = tuple(_unvaried(varied, prepared, trials, steps))
    if refused := errors(unvaried):
        raise UsageError(refused)
    limits = [one.tolerance for one in assertions if one.tolerance is not None]
    return Bench(
        request=replace(request, stage=stage, gpus=prepared[0][1].plan.gpus),
        variants=tuple(variant for variant, _ in prepared), steps=steps, repeats=repeats,
        timeout_s=timeout_s, tolerance=min(limits, default=comparison.TOLERANCE),
        assertions=tuple(assertions),
        key=_key(prepared, steps), batch=batch,
        findings=(*told, *_noted(prepared, steps), *unvaried, *_alike(trials)),
    )  # fmt: skip


def _shortened(
    request: Request, variant: Variant, made: Prepared, steps: int, batch: int
) -> Prepared:
    """A variant as its trials have it; as it is where they will be refused, which the first one says."""
    # one place for all: what differs is then the variant's own
    place = (request.runs or rundir.runs_root()) / "models"
    try:
        asked = short(of_variant(request, variant), steps, place, batch, profile=True)
        return preparation.prepare(asked, running=False)
    except LaunchError:
        return made


def _unvaried(
    keys: set[str], asked: Sequence[tuple[Variant, Prepared]],
    trials: Sequence[tuple[Variant, Prepared]], steps: int,
) -> Iterator[Finding]:  # fmt: skip
    """Keys of which values that differ come to the same in a trial; an error unless it scales them."""
    names = trials[0][1].plan.stage.entry.names
    # these follow what is asked in longer trials, and a variant may be about more than them
    scaled = {names.data, "warmup_steps"}
    for key in sorted(keys):
        wanted = dict.fromkeys(_value(made.plan.stage, key) for _, made in asked)
        had = dict.fromkeys(_value(made.plan.stage, key) for _, made in trials)
        if len(had) >= len(wanted):
            continue
        come = "" if key == names.output else f": {', '.join(wanted)} come to {', '.join(had)}"
        help = "leave it out: a trial is short, watched, saves nothing and reports nowhere"
        if key == names.max_steps:
            help = f"--steps {steps} is how many each trial has"
        elif key in scaled:
            help = f"more --steps: it is scaled to the {steps} of a trial"
        told = f"`{key}` is nothing to compare, bench sets it itself{come}"
        yield Finding(
            severity="warning" if key in scaled else "error", layer="launch", code="set-by-bench",
            message=brief(told, 300), help=help,
        )  # fmt: skip


def _value(stage: Stage, key: str) -> str:
    """What a stage has for a key of an override, as text that compares."""
    first = re.split(r"[.\[]", key, maxsplit=1)[0]
    value: Any = stage.config.options
    if key == "probe":
        # a trial is always watched, by what a file says of it
        value = stage.options.probe is not None
    elif first in stage.schema.fields and first not in OPTIONS:
        value = stage.values[first]
    else:
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else spelt(value)


def _alike(trials: Sequence[tuple[Variant, Prepared]]) -> Iterator[Finding]:
    """Variants whose trials are the same."""
    seen = dict[str, str]()
    for variant, made in trials:
        text = json.dumps(_acting(made), sort_keys=True, default=str)
        same = seen.setdefault(text, variant.name)
        if same != variant.name:
            yield Finding(
                severity="warning", layer="launch", code="same-variant",
                message=f"[{variant.name}] its trial is the same as that of {same}: what differs is "
                "noise",
            )  # fmt: skip


def _acting(made: Prepared) -> dict[str, Any]:
    """The identity of a trial, without what does nothing in it."""
    told, stage = identity(made), made.plan.stage
    idle = {finding.key for finding in noops.find(stage.values, stage.entry)}
    # its steps are counted out
    idle.add(f"args.{stage.entry.names.epochs}")
    options = {k: v for k, v in told["options"].items() if k not in _NOT_OF_A_TRIAL}
    given = {k: v for k, v in told["arguments"].items() if f"args.{k}" not in idle}
    return {**told, "options": options, "arguments": given}


def _base(request: Request) -> Plan | None:
    """The stage file as it is written; None where only its variants stand."""
    try:
        return preparation.prepare(request, running=False).plan
    except InvalidConfig:
        return None


def _adapted(request: Request, variant: Variant, base: Plan | None) -> Variant:
    """The variant with what follows from it. Raises InvalidConfig where its batch cannot be kept."""
    asked = of_variant(request, variant)
    # what it expects of a switch that is turned is not wrong before it has followed
    asked = replace(asked, overrides=(*asked.overrides, "on_violation=warn"))
    stage = preparation.ask(asked, running=False).stage
    changed = {variants.bare(text) for text in variant.overrides}
    more = [*_expected(asked, stage, changed), *_batch(asked, stage, changed, base)]
    return replace(variant, overrides=(*variant.overrides, *more))


def _expected(asked: Request, stage: Stage, changed: set[str]) -> Iterator[str]:
    """A file that expects packing expects none of the variant without."""
    told, entry, batch = stage.options.expect, stage.entry, stage.options.batch
    split = entry.names.per_device
    names = {
        "liger": (entry.names.liger,),
        # with one row a micro-batch packing may be asked for, and there is none
        "packing": (entry.names.packing, "padding_free", "batch", "batch.per_device", split),
    }
    rows = (batch and batch.per_device) or stage.values[split]
    on = {
        "liger": bool(stage.values.get(entry.names.liger)),
        "packing": entry.packs(stage.values, rows),
    }
    if "expect" in changed:
        return
    for point, states in SWITCHED.items():
        wanted = told.get(point)
        if not changed.intersection(names[point]) or f"expect.{point}" in changed:
            continue
        if wanted not in (None, "any") and on[point] != (wanted != "off"):
            yield f"expect.{point}={states[0 if on[point] else 1]}"
    turned = {"attn_implementation", "attention"} & changed
    if turned and told.get("attention") not in (None, "any") and "expect.attention" not in changed:
        yield f"expect.attention={_attention(asked, stage)}"


def _attention(asked: Request, stage: Stage) -> str:
    """What a verdict calls the attention that is asked for; `any` where it has no word for it."""
    chosen = preparation.prepare(asked, running=False).plan.attention
    named = str(chosen or stage.values.get("attn_implementation"))
    state = ATTENTION.get(named, named)
    return state if state in EXPECT["attention"] else "any"


def _batch(asked: Request, stage: Stage, changed: set[str], base: Plan | None) -> Iterator[str]:
    """Accumulation that keeps the rows of a step, where only the rows of a device were changed."""
    names = stage.entry.names
    settled = {names.accumulation, "batch", "batch.global"} & changed
    if (
        base is None
        or settled
        or names.per_device not in changed
        or stage.options.batch is not None
    ):
        return
    made = preparation.prepare(asked, running=False).plan
    rows = made.global_batch // made.accumulation
    if base.global_batch % rows:
        raise InvalidConfig(
            Finding(
                severity="error", layer="launch", code="impossible-batch", key=f"args.{names.per_device}",
                message=f"{rows} rows at once do not divide the global batch of {base.global_batch}",
                help=f"or say {names.accumulation} too: then the global batch is another",
            )
        )  # fmt: skip
    yield f"{names.accumulation}={base.global_batch // rows}"


def _attributed(finding: Finding, names: Sequence[str], of: int) -> Finding:
    if of == 1:
        return finding
    whose = "every variant" if len(names) == of else ", ".join(names)
    return replace(finding, message=f"[{whose}] {finding.message}")


def _noted(prepared: Sequence[tuple[Variant, Prepared]], steps: int) -> Iterator[Finding]:
    """What makes a comparison another one than it looks like."""
    first = prepared[0]
    for variant, made in prepared:
        watch = made.plan.stage.options.probe
        if watch is not None and watch.profile is not None and made.plan.gpus:
            yield from _profiled(variant.name, watch.profile, steps)
        if made.plan.global_batch != first[1].plan.global_batch:
            yield Finding(
                severity="warning", layer="launch", code="other-global-batch",
                message=f"[{variant.name}] {made.plan.global_batch} rows a step, "
                f"{first[1].plan.global_batch} in {first[0].name}: after the same tokens it has taken "
                "another number of steps, and its loss says so",
            )  # fmt: skip


def _profiled(variant: str, profile: int, steps: int) -> Iterator[Finding]:
    """A record of kernels that no step is left beside to tell the speed, or that never begins."""
    if profile > steps:
        what = f"there is no step {profile} in a run of {steps}: no kernels are recorded"
    elif not measures.tells_speed(steps, profile):
        what = (
            f"in a run of {steps} steps none is left that tells a speed: the first is warm-up, and the "
            f"record of step {profile} spoils it and the next"
        )
    else:
        return
    enough = next(n for n in itertools.count(profile) if measures.tells_speed(n, profile))
    yield Finding(
        severity="warning", layer="launch", code="profile-and-steps", key="probe.profile",
        message=f"[{variant}] {what}", help=f"--steps {enough} or more",
    )  # fmt: skip


def _key(prepared: Sequence[tuple[Variant, Prepared]], steps: int) -> str:
    told = [[variant.name, identity(made)] for variant, made in prepared]
    text = json.dumps([BENCH_VERSION, steps, told], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def require_startable(bench: Bench) -> None:
    """Judge every variant's trial for a start on this machine, whatever its GPUs do now.

    Raises InvalidConfig with what is wrong with any of them, each with its name, and what nothing here is
    ready for; a single variant that this machine is not ready for is left to its trial, which says so.
    """
    root = bench.request.runs or rundir.runs_root()
    wrong: dict[Finding, list[str]] = {}
    unready: dict[Finding, list[str]] = {}
    refused = 0
    for variant in bench.variants:
        place = root / "models"
        try:
            asked = short(
                of_variant(bench.request, variant), bench.steps, place, bench.batch, profile=True
            )
            # a trial that a killed command left may have the GPUs: it is ended later
            asked = replace(asked, runs=root, elsewhere=True)
            rundir.release(preparation.prepare(asked, running=True).folder)
        except LaunchError as error:
            refused += 1
            found = wrong if isinstance(error, InvalidConfig) else unready
            for finding in errors(error.findings) or error.findings:
                found.setdefault(finding, []).append(variant.name)
    of = len(bench.variants)
    if wrong:
        raise InvalidConfig(_attributed(one, names, of) for one, names in wrong.items())
    if unready and refused == of:
        raise NotReady(_attributed(one, names, of) for one, names in unready.items())
