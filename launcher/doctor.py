"""Is this machine ready for a plan: what is missing, each with what mends it.

Before every run only what is cheap is looked at: metadata of packages, files, the driver's answers.
`launch doctor` also imports what training imports, which costs seconds, and says what it found good.
"""

from __future__ import annotations

import os
import resource
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher import devices as gpus
from launcher import disk, hardware, imports, install, machine, requirements, rundir
from launcher.backends import BACKENDS, Backend, stage_rules
from launcher.backends.context import Context
from launcher.devices import Devices, Look
from launcher.errors import Exit, Finding, NotReady, errors, said
from launcher.imports import Failure, Import, Result
from launcher.install import Step
from launcher.machine import Trainer
from launcher.plan import Plan
from launcher.plan import output_folder as output_of
from launcher.requirements import Deviation, Wanted
from launcher.sizes import sized
from launcher.sources import Tree
from launcher.upstream import Upstream, unpinned

OLDEST = (3, 10)
# what a switch needs beside the backend's own packages
_OPTIONAL = {
    "use_peft": "peft",
    "use_qlora": "bitsandbytes",
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "dpo_use_paged_optimizer": "bitsandbytes",
}
_MODULES = {"flash-attn": "flash_attn", "liger-kernel": "liger_kernel"}
_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is asked about: a plan, or a backend with some of its stages where there is none.

    `gpus` are those of one machine. `runs` is where run folders go, `output` where the model goes.
    """

    trainer: Trainer
    upstream: Upstream
    stages: tuple[str, ...]
    gpus: int
    nodes: int = 1
    plan: Plan | None = None
    runs: Path = field(default_factory=rundir.runs_root)
    output: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def backend(self) -> Backend:
        """What differs between the trainers."""
        return BACKENDS[self.upstream.backend]

    @property
    def scripts(self) -> tuple[str, ...]:
        """The entry scripts of the stages."""
        return tuple(self.backend.STAGES[stage].script for stage in self.stages)

    @property
    def processes(self) -> int:
        """Training processes over all machines."""
        return max(1, self.gpus) * self.nodes

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """What the scripts import of other packages, by their source."""
        trees: Mapping[str, Tree] = self.upstream.packages
        found = [one for script in self.scripts for one in imports.of_script(script, trees)]
        return tuple(dict.fromkeys(found))

    @cached_property
    def declared(self) -> tuple[Wanted, ...] | None:
        """What the checkout itself asks for; None where it does not say."""
        root = self.upstream.root
        if self.upstream.backend != "open_instruct" or root is None:
            return None
        return requirements.of_checkout(root, self.trainer)

    @cached_property
    def deviations(self) -> tuple[Deviation, ...]:
        """Where the trainer's environment is not what is asked for."""
        wanted = requirements.of_packages(needed(self), self.trainer)
        return requirements.deviations([*(self.declared or ()), *wanted], self.trainer)


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that was looked at: its name, what to say of it, and the same for machines."""

    name: str
    text: str
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `launch doctor` answers: what is wrong, what was seen, and what would build the environment."""

    findings: tuple[Finding, ...]
    facts: tuple[Fact, ...]
    install: tuple[Step, ...]

    @property
    def exit_code(self) -> Exit:
        """5 where something stops a run."""
        return Exit.NOT_READY if errors(self.findings) else Exit.OK

    def lines(self) -> list[str]:
        """What was seen, a line each; the findings are shown as those of any command."""
        width = max((len(fact.name) for fact in self.facts), default=0)
        return [f"{fact.name:<{width}}  {fact.text}" for fact in self.facts]

    def as_json(self) -> dict[str, Any]:
        """For the envelope."""
        return {
            "ready": self.exit_code is Exit.OK,
            "facts": {
                fact.name: fact.text if fact.value is None else fact.value for fact in self.facts
            },
            "install": [step.as_json() for step in self.install],
        }


# --- the two questions ----------------------------------------------------------------------------


def require_ready(
    plan: Plan, trainer: Trainer, chosen: Devices | None = None, *, elsewhere: bool = False
) -> tuple[Finding, ...]:
    """Before a run: raises NotReady with everything that is missing, returns the warnings.

    `chosen` are the GPUs that the run gets; without it they are chosen here, for the answer only. Where
    other machines will train (`elsewhere`), nothing is asked of the GPUs of this one.
    What only an import shows is left to training, which imports the same within its first seconds.
    """
    subject = of_plan(plan, trainer)
    if elsewhere:
        subject, chosen = replace(subject, gpus=0), Devices()
    if chosen is None:
        chosen = gpus.choose(plan.gpus, None, gpus.look(subject.environ))
    found = [*_quick(subject, chosen), *local_files(plan)]
    if errors(found):
        raise NotReady(errors(found))
    return tuple(found)


def of_plan(plan: Plan, trainer: Trainer) -> Subject:
    """The question whether this machine is ready for a plan."""
    output = output_of(plan)
    return Subject(
        trainer=trainer, upstream=plan.stage.upstream, stages=(plan.stage.schema.key,),
        gpus=plan.gpus, nodes=plan.nodes, plan=plan, runs=rundir.runs_root(),
        output=None if output is None else output.absolute(),
    )  # fmt: skip


def examine(
    subject: Subject, chosen: Devices, *, seen: Look | None = None, importing: bool = True,
    timeout_s: float = imports.TIMEOUT_S,
) -> Report:  # fmt: skip
    """Look at everything, import what training imports, and say what builds the environment.

    Never raises for what is wrong with the machine: it is among the findings.
    """
    result = None
    if importing and subject.trainer.version >= OLDEST:
        result = _import(subject, chosen, timeout_s)
    cuda = machine.cuda_of_driver() if subject.gpus else None
    found = list(_quick(subject, chosen, result, cuda))
    found += [] if subject.plan is None else local_files(subject.plan)
    found += _standing(subject)
    facts = [
        *_environment(subject, result), *_cards(chosen, seen, cuda),
        *_room(subject), *_limits(subject),
    ]  # fmt: skip
    return Report(
        findings=tuple(found), facts=tuple(facts),
        install=install.steps(
            subject.trainer, subject.backend.EXTRA, gpus=bool(subject.gpus), more=_beyond(subject)
        ),
    )  # fmt: skip


def _quick(
    subject: Subject, chosen: Devices, result: Result | None = None,
    cuda: tuple[int, int] | None = None,
) -> Iterator[Finding]:  # fmt: skip
    """Everything that costs no import, and what importing showed where it was tried; worst first."""
    trainer = subject.trainer
    yield from checkout(subject)
    yield from interpreter(trainer)
    yield from packages(subject, result)
    yield from chosen.findings
    if subject.gpus:
        if chosen.refused and not any(f.code == "gpus-taken" for f in chosen.findings):
            yield from hardware.driver_fault(subject.gpus)
        elif not chosen.refused:
            cuda = cuda or machine.cuda_of_driver()
            yield from hardware.driver_and_torch(hardware.torch_of(trainer), cuda, trainer)
        yield from hardware.shared_memory(subject.gpus)
        yield from hardware.interfaces(subject.processes, subject.environ)
    yield from hardware.open_files()
    yield from versions(subject)
    found = list(disk.places(subject.plan, subject.output, subject.runs, subject.environ))
    yield from disk.unwritable(found)
    needed = disk.Needs()
    if subject.plan is not None:
        needed = disk.needs(subject.plan, subject.output, subject.environ)
    yield from disk.too_little(needed, subject.output, found)


# --- source and interpreter -----------------------------------------------------------------------


def checkout(subject: Subject) -> Iterator[Finding]:
    """open-instruct runs from a checkout; the snapshot only validates."""
    if subject.upstream.root is None and subject.upstream.backend == "open_instruct":
        from launcher import pin

        fill = next(
            iter(pin.status(None, {}).next), "git submodule update --init external/open-instruct"
        )
        yield said(
            "error", "no-checkout",
            "there is no open-instruct checkout (external/open-instruct, /workspace/open-instruct, "
            "~/open-instruct)", f"{fill}, or --open-instruct PATH",
        )  # fmt: skip


def _standing(subject: Subject) -> Iterator[Finding]:
    """A submodule that is empty while another checkout is used, and a checkout that is not the pin."""
    from launcher import pin

    if subject.upstream.backend != "open_instruct" or subject.upstream.root is None:
        return
    if subject.plan is None:
        fault = unpinned(subject.upstream, running=True, allowed=False)
        if fault is not None:
            yield fault
    told = pin.status(subject.upstream.root, subject.environ)
    module = told.submodule
    if told.fill is not None and module.state in {"missing", "empty"}:
        yield said(
            "note", "empty-submodule",
            f"the submodule {module.path} is {module.state}; {subject.upstream.root} is used", told.fill,
        )  # fmt: skip


def interpreter(trainer: Trainer) -> Iterator[Finding]:
    """The probe and upstream need Python 3.10."""
    if trainer.version < OLDEST:
        version = ".".join(map(str, trainer.version))
        yield said(
            "error", "old-python", f"{trainer.python} ({trainer.source}) is Python {version}",
            f"name Python {'.'.join(map(str, OLDEST))} or later with --python",
        )  # fmt: skip


# --- packages -------------------------------------------------------------------------------------


def packages(subject: Subject, result: Result | None = None) -> Iterator[Finding]:
    """Packages that the trainer's Python lacks, and those that are there and cannot be imported.

    Without the `result` of importing only metadata and files tell.
    """
    read = dict.fromkeys(one.top for one in subject.imports)
    missing = [imports.distribution(name) for name in imports.missing(tuple(read), subject.trainer)]
    missing += [name for name in needed(subject) if _is_missing(name, subject.trainer)]
    failures = () if result is None else result.failures
    missing += [imports.distribution(one.missing) for one in failures if one.missing]
    yield from _missing(subject, tuple(dict.fromkeys(missing)))
    for one in failures:
        if one.missing is None:
            yield _import_error(one, subject)
    if result is not None:
        yield from _cuda(subject, result)
        if result.fault is not None:
            yield said(
                "error", "no-python", f"{subject.trainer.python} could not import: {result.fault}",
                "name another interpreter with --python",
            )  # fmt: skip


def needed(subject: Subject) -> tuple[str, ...]:
    """The distributions that the backend needs, and those that the plan's switches ask for."""
    plan = subject.plan
    wanted = list(subject.backend.NEEDS)
    if subject.gpus and subject.backend.NAME == "open_instruct":
        # with CUDA and no such package its detection raises (model_utils.py:69)
        wanted.append("flash-attn")
    if plan is not None:
        if plan.values.get(plan.stage.entry.names.liger):
            wanted.append("liger-kernel")
        own = plan.values.get("zero_stage") is not None
        if plan.gpus and (own or plan.stage.options.deepspeed is not None):
            wanted.append("deepspeed")
        wanted += [name for key, name in _OPTIONAL.items() if plan.values.get(key) is True]
    return tuple(dict.fromkeys(wanted))


def _is_missing(name: str, trainer: Trainer) -> bool:
    known = {theirs: module for module, theirs in imports.DISTRIBUTIONS.items()}
    module = known.get(name, name.replace("-", "_"))
    return name not in trainer.packages and bool(imports.missing([module], trainer))


def _missing(subject: Subject, names: Sequence[str]) -> Iterator[Finding]:
    """One finding a command: most packages come together, some need others to be there first."""
    trainer = subject.trainer
    ordinary = [name for name in names if name not in install.BUILT]
    for group in (ordinary, *([name] for name in names if name in install.BUILT)):
        if not group:
            continue
        steps = install.packages(trainer, [_requirement(name, subject) for name in group])
        commands = "; then ".join(step.shell() for step in steps)
        yield said(
            "error", "missing-packages",
            f"{trainer.python} ({trainer.source}) lacks {', '.join(group)}",
            f"{commands} ({_whole(subject)}); or name another interpreter with --python",
        )  # fmt: skip


def _whole(subject: Subject) -> str:
    """Which command has everything: without the stage file it knows nothing of what that adds."""
    if subject.plan is None:
        return f"`launch doctor --install` has all that `{subject.backend.EXTRA}` needs"
    path = shlex.quote(str(subject.plan.stage.config.path))
    return f"`launch doctor {path} --install` has all that this stage needs"


def _beyond(subject: Subject) -> tuple[str, ...]:
    """What `packages` would ask for and launch's extras neither name nor bring along."""
    read = dict.fromkeys(imports.distribution(one.top) for one in subject.imports)
    known, along = install.known(), install.tested()
    names = [name for name in read if name in known or name not in along]
    return tuple(_requirement(name, subject) for name in [*names, *needed(subject)])


def _requirement(name: str, subject: Subject) -> str:
    """What to tell pip: the version that launch was tested with, else the one upstream asks for."""
    tested = install.known().get(name)
    if tested is not None:
        return tested
    return next((one.text for one in subject.declared or () if one.name == name), name)


def versions(subject: Subject) -> Iterator[Finding]:
    """Packages here in other versions than upstream, or what it needs, asks for: a warning in all.

    What is missing is an error where it is imported, and of no interest where it is not.
    """
    differing = [one for one in subject.deviations if one.found is not None]
    if not differing:
        return
    texts = []
    for by in dict.fromkeys(one.by for one in differing):
        own = [one.text for one in differing if one.by == by]
        more = f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
        texts.append(f"{', '.join(own[:_SHOWN])}{more}, by {by}")
    known = install.known()
    untested = [
        known[one.name]
        for one in differing
        if one.name in known and not requirements.satisfied(known[one.name], one.found or "")
    ]
    steps = install.packages(subject.trainer, untested) if untested else ()
    yield said(
        "warning", "other-requirements",
        f"{subject.trainer.python} differs from what is asked for: {'; '.join(texts)}",
        "; then ".join(step.shell() for step in steps)
        or "nothing to do where everything imports, which `launch doctor` tries",
    )  # fmt: skip


# --- imports --------------------------------------------------------------------------------------


def _import(subject: Subject, chosen: Devices, timeout_s: float) -> Result:
    """Import everything that the stages import, and last the scripts themselves."""
    root, trainer = subject.upstream.root, subject.trainer
    wanted = list(subject.imports)
    for name in needed(subject):
        if name in _MODULES:
            wanted.append(Import(_MODULES[name], (), "an option of the stage", 0))
    environ = {**subject.environ, **(chosen.env() if subject.gpus and not chosen.refused else {})}
    if not subject.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    paths: tuple[Path, ...] = ()
    if subject.upstream.backend != "open_instruct":
        trees: Mapping[str, Tree] = subject.upstream.packages
        wanted += [one for script in subject.scripts for one in imports.lazy(script, trees)]
    elif root is not None:
        for script in subject.scripts:
            wanted.append(Import(script.removesuffix(".py").replace("/", "."), (), script, 0))
        before = environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = f"{root}{os.pathsep}{before}" if before else str(root)
        # importing litellm would otherwise ask the network for model prices
        environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        paths = tuple(dict.fromkeys((root / script).parent for script in subject.scripts))
    return imports.attempt(
        wanted, trainer, paths=paths, environ=environ, timeout_s=timeout_s, cuda=bool(subject.gpus)
    )


def _import_error(failure: Failure, subject: Subject) -> Finding:
    """A package that is there and cannot be imported: what it said itself, and where."""
    wanted, trainer = failure.wanted, subject.trainer
    name = imports.distribution(wanted.top)
    version = trainer.packages.get(name)
    place = f" ({wanted.file}:{wanted.line} imports it)" if wanted.line else ""
    what = f"`{wanted.module}`" + (f" ({name} {version})" if version else "")
    steps = install.packages(trainer, [_requirement(name, subject)], held=False)
    pip = steps[-1].shell().replace(" install ", " install --force-reinstall --no-deps ", 1)
    own = wanted.top in subject.backend.PACKAGES and subject.upstream.backend == "open_instruct"
    return Finding(
        severity="error", layer="launch", code="import-error",
        message=f"importing {what} fails{place}: {failure.error}: {failure.message}",
        file=failure.file, line=failure.line,
        help="the file named is where it was raised: a version that does not fit"
        if own
        else f"it is installed and does not work here; {pip} installs it anew",
    )  # fmt: skip


def _cuda(subject: Subject, result: Result) -> Iterator[Finding]:
    told = result.cuda
    if not subject.gpus or told is None or told.get("cuda") is None:
        return
    fault = told.get("error")
    if fault is None and told.get("count", 0) >= subject.gpus:
        return
    what = fault or f"it sees {told.get('count')} GPU(s) of {subject.gpus}"
    yield said(
        "error", "cuda-unusable", f"torch {told.get('version')} cannot use the GPUs: {what}",
        "compare the driver (nvidia-smi) with what this torch is built for; in a container: --gpus all",
    )  # fmt: skip


# --- what was seen --------------------------------------------------------------------------------


def _environment(subject: Subject, result: Result | None) -> Iterator[Fact]:
    trainer, source, torch = subject.trainer, subject.upstream, hardware.torch_of(subject.trainer)
    version = ".".join(map(str, trainer.version))
    python = {"path": str(trainer.python), "version": version, "source": trainer.source}
    yield Fact("python", f"{trainer.python} ({trainer.source}), {version}", python)
    yield Fact("source", source.describe(), source.as_json())
    if torch is not None:
        built = (
            f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "the CPU"
        )
        yield Fact(
            "torch", f"{torch.version}, built for {built}",
            {"version": torch.version, "cuda": torch.cuda, "hip": torch.hip},
        )  # fmt: skip
    if result is not None:
        fine = [name for name in result.modules if name not in result.failed]
        yield Fact(
            "imports", f"{len(fine)} of {len(result.modules)} packages import",
            {"fine": fine, "failed": list(result.failed)},
        )  # fmt: skip
    yield Fact("requirements", *_requirements(subject))


def _requirements(subject: Subject) -> tuple[str, dict[str, Any]]:
    declared, found = subject.declared, subject.deviations
    ours = subject.upstream.backend != "open_instruct"
    by = "of the installed packages" if ours else "unknown: no pyproject.toml there"
    if declared is not None:
        packages = sum(one.name != requirements.PYTHON for one in declared)
        by = f"{packages} of the checkout's pyproject.toml"
    absent = [one.name for one in found if one.found is None]
    differing = [one for one in found if one.found is not None]
    text = f"{by}; {len(differing)} here in another version"
    text += f", {len(absent)} not installed" if absent else ""
    return text, {
        "known": declared is not None or ours,
        "deviating": [one.as_json() for one in differing], "not_installed": absent,
    }  # fmt: skip


def _cards(chosen: Devices, seen: Look | None, cuda: tuple[int, int] | None) -> Iterator[Fact]:
    if seen is not None and not seen.present:
        yield Fact("GPUs", "none", [])
        return
    if seen is not None:
        driver = seen.present[0].driver
        serves = "" if cuda is None else f", CUDA up to {cuda[0]}.{cuda[1]}"
        yield Fact("driver", f"{driver or 'unknown'}{serves}", {"version": driver, "cuda": cuda})
        for slot in seen.visible:
            use = seen.uses.get(slot.id)
            state = "taken" if slot in chosen.slots else "free"
            state = f"used by {use.text}" if use is not None else state
            gpu = slot.gpu
            text = f"{gpu.name}, {gpu.used_mib} of {gpu.memory_mib} MiB used, {state}"
            yield Fact(
                slot.label, text,
                {
                    "id": slot.id, "name": gpu.name, "memory_mib": gpu.memory_mib,
                    "used_mib": gpu.used_mib, "used_by": None if use is None else use.text,
                },
            )  # fmt: skip
    yield Fact("run gets", chosen.visible or chosen.why or "no GPU", chosen.as_json())


def _room(subject: Subject) -> Iterator[Fact]:
    if subject.plan is not None:
        needed = disk.needs(subject.plan, subject.output, subject.environ)
        known = needed.likely is not None
        text = f"up to {sized(needed.likely or 0)}: {disk.described(needed)}"
        yield Fact(
            "will write", text if known else "unknown: the model's size is not known from here",
            needed.as_json(),
        )  # fmt: skip
    for place in disk.places(subject.plan, subject.output, subject.runs, subject.environ):
        told = disk.free(place.path)
        room = "unknown" if told is None else f"{sized(told[0])} free"
        value = {"path": str(place.path), "free": None if told is None else told[0]}
        yield Fact(place.what, f"{place.path}, {room}", value)


def _limits(subject: Subject) -> Iterator[Fact]:
    size, here = hardware.shm_size(), hardware.names()
    if size is not None:
        yield Fact("/dev/shm", sized(size), size)
    if here is not None:
        yield Fact("network", ", ".join(here) or "no interface", list(here))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = soft == resource.RLIM_INFINITY
    yield Fact("open files", "unlimited" if unlimited else str(soft), None if unlimited else soft)


# --- the plan's own situation ---------------------------------------------------------------------


def situation(plan: Plan, trainer: Trainer, output: Path | None) -> Iterator[Finding]:
    """What is wrong on these GPUs, with these packages, in this folder; only what is new."""
    stage = plan.stage
    deepspeed, _ = stage.options.read_deepspeed()
    context = Context(
        values=plan.values, environ=os.environ, deepspeed=deepspeed,
        mixed_precision=plan.mixed_precision,
        gpus=plan.gpus * plan.nodes, per_device=plan.per_device, accumulation=plan.accumulation,
        cpus=os.cpu_count(), packages=trainer.packages, running=True, output=output,
    )  # fmt: skip
    known = {(finding.code, finding.key) for finding in stage.findings}
    for finding in map(stage.config.placed, stage_rules.apply(context)):
        if finding.severity == "error" or (finding.code, finding.key) not in known:
            yield finding


def local_files(plan: Plan) -> Iterator[Finding]:
    """Data and config files that validation only warned about."""
    for finding in plan.stage.findings:
        if finding.code in {"missing-data", "missing-config"}:
            yield replace(finding, severity="error")
