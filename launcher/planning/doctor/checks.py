"""Is this machine ready for a plan: what is missing, each with what mends it.

Before every run only what is cheap is looked at: metadata of packages, files, the driver's answers.
`launch doctor` also imports what training imports, which costs seconds, and says what it found good.
"""

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import Exit, Finding, InvalidConfig, NotReady, about, errors, launch_finding
from launcher.machine.devices import Devices, Look
from launcher.machine.python import Trainer
from launcher.machine.sizes import sized
from launcher.plan.command import source_environment
from launcher.plan.plan import Plan
from launcher.plan.plan import output_folder as output_of
from launcher.planning.doctor import disk, install
from launcher.planning.doctor.install import TIMEOUT_S, Imports, InstallStep
from launcher.runs import rundir
from launcher.upstream import behaviour
from launcher.upstream.locate import Upstream, load_schema, unpinned
from launcher.upstream.trainers import BACKENDS, Backend, Entry

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
SHM = Path("/dev/shm")
LEAST_SHM = 2**30
"""Bytes that several GPUs should find in /dev/shm: NCCL's buffers and the loaders' batches go there."""
_TORCH = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*(?:'([\d.]+)[^']*'|None)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is examined: a plan, or a backend with some of its stages where there is none.

    `gpus` are those of one machine. `runs` is where run folders go, `output` where the model goes.
    """

    trainer: Trainer
    upstream: Upstream
    stages: tuple[str, ...]
    gpus: int
    plan: Plan | None = None
    runs: Path = field(default_factory=rundir.runs_root)
    output: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.upstream.backend]

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self.backend.STAGES[stage] for stage in self.stages)


class Fact(NamedTuple):
    name: str
    text: str
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `launch doctor` answers: what is wrong, what was found, and what would build the environment."""

    findings: tuple[Finding, ...]
    facts: tuple[Fact, ...]
    install: tuple[InstallStep, ...]

    @property
    def exit_code(self) -> Exit:
        return Exit.NOT_READY if errors(self.findings) else Exit.OK

    def lines(self) -> list[str]:
        width = max((len(fact.name) for fact in self.facts), default=0)
        faults = ", ".join(dict.fromkeys(fault.code for fault in errors(self.findings)))
        return [
            *(f"{fact.name:<{width}}  {fact.text}" for fact in self.facts),
            f"not ready: {faults}" if faults else "ready",
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "ready": self.exit_code is Exit.OK,
            "facts": {fact.name: fact.text if fact.value is None else fact.value for fact in self.facts},
            "install": [step.as_json() for step in self.install],
        }


def require_ready(plan: Plan, trainer: Trainer, chosen: Devices | None) -> tuple[Finding, ...]:
    """Before a run: raises NotReady with everything that is missing, returns the warnings.

    `chosen` are the GPUs that the run gets, None where those of this machine do not count: others train, or these
    are free only later. What only an import shows is left to training, which imports the same within its first
    seconds.
    """
    subject = of_plan(plan, trainer)
    if chosen is None:
        subject = replace(subject, gpus=0)
        chosen = Devices()
    found = (*_quick(subject, chosen), *local_files(plan))
    if errors(found):
        raise NotReady(errors(found))
    return about("machine", found)


def of_plan(plan: Plan, trainer: Trainer) -> Subject:
    output = output_of(plan)
    output = None if output is None else output.absolute()
    stage = plan.stage
    stages = (plan.stage.schema.key,)
    return Subject(trainer=trainer, upstream=stage.upstream, stages=stages, gpus=plan.gpus, plan=plan, output=output)


def examine(
    subject: Subject,
    chosen: Devices,
    *,
    look: Look | None = None,
    importing: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Report:
    """Look at everything, import what training imports, and say what builds the environment.

    Never raises for what is wrong with the machine: it is among the findings.
    """
    able = importing and subject.trainer.version >= OLDEST
    imports = _import(subject, chosen, timeout_s) if able else None
    local = () if subject.plan is None else local_files(subject.plan)
    return Report(
        findings=(*_quick(subject, chosen, imports), *local, *_standing(subject)),
        facts=tuple(_facts(subject, imports, chosen, look)),
        install=install.steps(subject.trainer, subject.backend.EXTRA, gpus=bool(subject.gpus), more=needed(subject)),
    )


def _quick(subject: Subject, chosen: Devices, imports: Imports | None = None) -> Iterator[Finding]:
    """Everything that costs no import, and what importing showed where it was tried; worst first."""
    yield from source(subject, imports)
    yield from chosen.findings
    if subject.gpus and chosen.slots:
        yield from driver_and_torch(subject.trainer, chosen.slots[0].gpu.cuda)
    yield from shared_memory(subject.gpus)
    found = list(disk.places(subject.plan, subject.output, subject.runs, subject.environ))
    yield from disk.unwritable(found)
    yield from disk.too_little(_needs(subject), subject.output, found)


def _needs(subject: Subject) -> disk.Needs | None:
    return None if subject.plan is None else disk.needs(subject.plan, subject.output, subject.environ)


def source(subject: Subject, imports: Imports | None = None) -> Iterator[Finding]:
    """Whether a checkout, a Python from 3.10 on (upstream and the probe need it) and the packages are there."""
    trainer = subject.trainer
    if subject.upstream.root is None and subject.upstream.is_checkout:
        from launcher.pin import pin

        places = "external/open-instruct, /workspace/open-instruct, ~/open-instruct"
        help = f"{pin.get_checkout()}, or --open-instruct PATH"
        yield launch_finding("error", "no-checkout", f"there is no open-instruct checkout ({places})", help)
    if trainer.version < OLDEST:
        message = f"{trainer.python} ({trainer.source}) is Python {'.'.join(map(str, trainer.version))}"
        help = f"name Python {'.'.join(map(str, OLDEST))} or later with --python"
        yield launch_finding("error", "old-python", message, help)
    yield from packages(subject, imports)


def _standing(subject: Subject) -> Iterator[Finding]:
    """A submodule that is empty while another checkout is used, and a checkout that is not the pin."""
    from launcher.pin import pin

    if not subject.upstream.is_checkout or subject.upstream.root is None:
        return
    if subject.plan is None and (fault := unpinned(subject.upstream, allowed=False, where_found="error")):
        yield fault
    status = pin.status(subject.upstream.root, subject.environ)
    module = status.submodule
    if status.fill is not None and module.state in {"missing", "empty"}:
        message = f"the submodule {module.path} is {module.state}; {subject.upstream.root} is used"
        yield launch_finding("note", "empty-submodule", message, status.fill)


def packages(subject: Subject, imports: Imports | None = None) -> Iterator[Finding]:
    """Packages that the trainer's Python lacks, and those that are there and cannot be imported.

    Without `imports` only metadata and files tell.
    """
    imports = imports or Imports()
    trainer = subject.trainer
    absent = install.missing(needed(subject), trainer)
    names = {module: name for name, module in install.MODULES.items()}
    absent += tuple(names.get(one.missing, one.missing) for one in imports.failures if one.missing)
    if distinct := list(dict.fromkeys(absent)):
        tested = install.tested()
        steps = install.install(trainer, [tested.get(name, name) for name in distinct])
        target = f" --backend {subject.upstream.backend}"
        if subject.plan is not None:
            target = f" {shlex.quote(str(subject.plan.stage.config.path))}"
        message = f"{trainer.python} ({trainer.source}) lacks {', '.join(distinct)}"
        help = (
            f"{'; then '.join(step.shell() for step in steps)} (`launch doctor{target} --install` has all that "
            "is needed); or name another interpreter with --python"
        )
        yield launch_finding("error", "missing-packages", message, help)
    for one in imports.failures:
        if one.missing is None:
            message = f"importing `{one.module}` fails: {one.error}: {one.message}"
            help = "the package of the file named does not work here: reinstall it with "
            help += f"{shlex.join(install.pip_install(trainer))} --force-reinstall --no-deps PACKAGE"
            yield launch_finding("error", "import-error", message, help, file=one.file, line=one.line)
    yield from _cuda(subject, imports)
    if imports.fault is not None:
        message = f"{trainer.python} could not import: {imports.fault}"
        yield launch_finding("error", "no-python", message, "name another interpreter with --python")


def needed(subject: Subject) -> tuple[str, ...]:
    plan = subject.plan
    distributions = [*subject.backend.NEEDS, *(name for entry in subject.entries for name in entry.needs)]
    if subject.gpus and not _does_without_flash(subject):
        distributions += subject.backend.GPU_NEEDS
    if plan is not None:
        if plan.stage.entry.liger(plan.values):
            distributions.append("liger-kernel")
        own = plan.values.get("zero_stage") is not None
        if plan.gpus and (own or plan.stage.options.deepspeed is not None):
            distributions.append("deepspeed")
        distributions += [name for key, name in _OPTIONAL.items() if plan.values.get(key) is True]
    return tuple(dict.fromkeys(distributions))


def _does_without_flash(subject: Subject) -> bool:
    """Whether the source that trains is known to begin without flash-attn."""
    if subject.plan is not None:
        return _begins_without_flash(subject.plan)
    if not subject.upstream.is_checkout:
        return False
    stage = next(iter(subject.backend.STAGES))
    with contextlib.suppress(InvalidConfig):
        schema = load_schema(subject.upstream, stage, allow_unpinned=True)
        return bool(schema.does(behaviour.DETECTS_WITHOUT_FLASH))
    return False


def _begins_without_flash(plan: Plan) -> bool:
    schema = plan.stage.schema
    if not schema.does(behaviour.DETECTS_WITHOUT_FLASH):
        return False
    if plan.stage.entry.packing == "always":
        return False
    # OLMo-core keeps packed samples apart with flash-attn alone
    return not (schema.does(behaviour.PACKS_WITH_FLASH_ALONE) and plan.values.get("packing"))


def _import(subject: Subject, chosen: Devices, timeout_s: float) -> Imports:
    modules = [_MODULES[name] for name in needed(subject) if name in _MODULES]
    modules += [entry.script.removesuffix(".py").replace("/", ".") for entry in subject.entries]
    modules += [module for entry in subject.entries for module in entry.imports]
    environ = dict(subject.environ)
    if not subject.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not chosen.refused:
        environ |= chosen.env()
    if subject.upstream.root is not None:
        environ |= source_environment(subject.backend, subject.upstream.root, environ)
    return install.try_imports(modules, subject.trainer, environ=environ, timeout_s=timeout_s, cuda=bool(subject.gpus))


def _cuda(subject: Subject, imports: Imports) -> Iterator[Finding]:
    torch = imports.cuda or {}
    if not subject.gpus or torch.get("cuda") is None:
        return
    fault = torch.get("error")
    if fault is not None or torch.get("count", 0) < subject.gpus:
        what = fault or f"it sees {torch.get('count')} GPU(s) of {subject.gpus}"
        message = f"torch {torch.get('version')} cannot use the GPUs: {what}"
        help = "compare the driver (nvidia-smi) with what this torch is built for; in a container: --gpus all"
        yield launch_finding("error", "cuda-unusable", message, help)


def torch_of(trainer: Trainer) -> dict[str, str | None]:
    """What the trainer's torch is built for, as its own version file says; empty where that says nothing."""
    for folder in trainer.path:
        with contextlib.suppress(OSError, ValueError):
            text = (folder / "torch" / "version.py").read_text(encoding="utf-8")
            built = {m[1]: m[2] for m in _TORCH.finditer(text)}
            version = trainer.packages.get("torch", "unknown")
            return {"version": version, "cuda": built["cuda"], "hip": built.get("hip")} if "cuda" in built else {}
    return {}


def driver_and_torch(trainer: Trainer, cuda: tuple[int, int] | None) -> Iterator[Finding]:
    """Whether torch can use the GPUs that the driver serves. `cuda` is the driver's newest version.

    Within one major version an older driver serves newer CUDA (NVIDIA's minor version compatibility).
    """
    torch = torch_of(trainer)
    if not torch or torch["hip"] is not None:
        return
    version = torch["version"]
    needs = torch["cuda"]
    install = f"{trainer.python} -m pip install --force-reinstall torch --index-url"
    index = "https://download.pytorch.org/whl/cu" + ("" if cuda is None else f"{cuda[0]}{cuda[1]}")
    if needs is None:
        message = f"torch {version} of {trainer.python} is built for the CPU"
        help = f"install a CUDA build, such as {install} {index}, or --gpus 0"
        yield launch_finding("error", "cpu-torch", message, help)
    elif cuda is not None and int(needs.partition(".")[0]) > cuda[0]:
        message = f"torch {version} is built for CUDA {needs}, the driver serves CUDA {cuda[0]}.{cuda[1]} at most"
        help = f"a newer driver, or a torch that is built for it: {install} {index} (see pytorch.org "
        help += "for the builds that there are)"
        yield launch_finding("error", "old-driver", message, help)


def shared_memory(processes: int) -> Iterator[Finding]:
    try:
        size = shutil.disk_usage(SHM).total
    except OSError:
        return
    if processes > 1 and size < LEAST_SHM:
        message = f"{SHM} holds {size / 2**20:.0f} MiB: NCCL and the data loaders of {processes} processes may not fit"
        help = "docker run --shm-size=16g (or --ipc=host), or mount -o remount,size=16g /dev/shm"
        yield launch_finding("warning", "small-shm", message, help)


def _facts(subject: Subject, imports: Imports | None, chosen: Devices, look: Look | None) -> Iterator[Fact]:
    trainer = subject.trainer
    source = subject.upstream
    torch = torch_of(subject.trainer)
    python = {"path": str(trainer.python), "version": ".".join(map(str, trainer.version)), "source": trainer.source}
    yield Fact("python", f"{trainer.python} ({trainer.source}), {python['version']}", python)
    yield Fact("source", source.describe(), source.as_json())
    if torch:
        kinds = {"CUDA": torch["cuda"], "ROCm": torch["hip"]}
        built = next((f"{kind} {version}" for kind, version in kinds.items() if version), "the CPU")
        yield Fact("torch", f"{torch['version']}, built for {built}", torch)
    if imports is not None:
        failed = [one.module for one in imports.failures]
        fine = [name for name in imports.modules if name not in failed]
        text = f"{len(fine)} of {len(imports.modules)} modules import"
        yield Fact("imports", text, {"fine": fine, "failed": failed})
    if look is not None and not look.present:
        yield Fact("GPUs", "none", [])
    elif look is not None:
        driver = look.present[0].driver
        cuda = look.present[0].cuda
        serves = "" if cuda is None else f", CUDA up to {cuda[0]}.{cuda[1]}"
        yield Fact("driver", f"{driver or 'unknown'}{serves}", {"version": driver, "cuda": cuda})
        for slot in look.visible:
            use = look.uses.get(slot.id)
            gpu = slot.gpu
            state = "taken" if slot in chosen.slots else "free"
            state = f"used by {use.text}" if use is not None else state
            card = {"id": slot.id, "name": gpu.name, "memory_mib": gpu.memory_mib, "used_mib": gpu.used_mib}
            card["used_by"] = None if use is None else use.text
            yield Fact(f"GPU {gpu.index}", f"{gpu.name}, {gpu.used_mib} of {gpu.memory_mib} MiB used, {state}", card)
    if look is None or look.present:
        yield Fact("run gets", chosen.visible or chosen.why or "no GPU", chosen.as_json())
    if subject.plan is not None:
        needs = _needs(subject)
        text = "unknown: the model's size is not known from here"
        if needs is not None:
            text = f"up to {sized(needs.likely)}: {disk.described(needs)}"
        yield Fact("will write", text)
    for place in disk.places(subject.plan, subject.output, subject.runs, subject.environ):
        room = disk.free(place.path)
        text = "unknown" if room is None else f"{sized(room[0])} free"
        value = {"path": str(place.path), "free": None if room is None else room[0]}
        yield Fact(place.what, f"{place.path}, {text}", value)


def local_files(plan: Plan) -> Iterator[Finding]:
    for finding in plan.stage.findings:
        if finding.code == "missing-data":
            yield replace(finding, severity="error")
