"""Is this machine ready for a plan: what is missing, each with what mends it.

Before every run only what is cheap is looked at: metadata of packages, files, the driver's answers.
`launch doctor` also imports what training imports, which costs seconds, and says what it found
good.
"""

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import (
    Exit,
    Finding,
    InvalidConfig,
    NotReady,
    launch_finding,
    select_errors,
    set_subject,
)
from launcher.lazy_dataclass import dataclass
from launcher.machine.devices import VARIABLE, Devices, Look, Slot
from launcher.machine.python import Trainer
from launcher.machine.sizes import format_size
from launcher.plan.command import build_source_environment
from launcher.plan.plan import Plan
from launcher.planning import check
from launcher.planning.doctor import disk, install
from launcher.planning.doctor.install import TIMEOUT_S, Imports, InstallStep
from launcher.runs import rundir
from launcher.upstream import behaviour
from launcher.upstream.locate import Upstream, load_schema, report_unpinned
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
"""Bytes that several GPUs should find in /dev/shm: NCCL's buffers and the loaders' batches go
there.
"""
_TORCH = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*(?:'([\d.]+)[^']*'|None)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is examined: a plan, or a backend with some of its stages if there is none.

    `gpus` are those of one machine. `runs` is where run folders go, `output` where the model goes.
    """

    trainer: Trainer
    upstream: Upstream
    stages: tuple[str, ...]
    gpus: int
    plan: Plan | None = None
    runs: Path = field(default_factory=rundir.find_runs_root)
    output: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.upstream.backend]

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self.backend.STAGES[stage] for stage in self.stages)

    def places(self) -> tuple[disk.WriteTarget, ...]:
        """The folders that a run writes into."""
        return tuple(disk.list_places(self.plan, self.output, self.runs, self.environ))

    def needs(self) -> disk.Needs | None:
        """The space that a run needs; None if unknown."""
        if self.plan is None:
            return None
        return disk.estimate_needs(self.plan, self.output, self.environ)


class Fact(NamedTuple):
    """A line of `launch doctor`; `value` is what JSON has in place of the text."""

    name: str
    text: str
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer of `launch doctor`; `install` are the commands that build the environment."""

    findings: tuple[Finding, ...]
    facts: tuple[Fact, ...]
    install: tuple[InstallStep, ...]

    @property
    def exit_code(self) -> Exit:
        if select_errors(self.findings):
            return Exit.NOT_READY
        return Exit.OK

    def lines(self) -> list[str]:
        width = max((len(fact.name) for fact in self.facts), default=0)
        lines = [f"{fact.name:<{width}}  {fact.text}" for fact in self.facts]
        codes = dict.fromkeys(finding.code for finding in select_errors(self.findings))
        end = "ready"
        if codes:
            end = f"not ready: {', '.join(codes)}"
        return [*lines, end]

    def as_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for fact in self.facts:
            facts[fact.name] = fact.value
            if fact.value is None:
                facts[fact.name] = fact.text
        return {
            "ready": self.exit_code is Exit.OK,
            "facts": facts,
            "install": [step.as_json() for step in self.install],
        }


def require_ready(plan: Plan, trainer: Trainer, chosen: Devices | None) -> tuple[Finding, ...]:
    """Check before a run, without imports; returns the warnings.

    `chosen` are the GPUs of the run; None if those of this machine do not count, because it trains
    elsewhere or later. Raises NotReady with everything that is missing.
    """
    subject = make_subject(plan, trainer)
    if chosen is None:
        subject = replace(subject, gpus=0)
        chosen = Devices()
    findings = (*_check_subject(subject, chosen), *check_local_files(plan))
    if select_errors(findings):
        raise NotReady(select_errors(findings))
    return set_subject("machine", findings)


def make_subject(plan: Plan, trainer: Trainer) -> Subject:
    return Subject(
        trainer=trainer,
        upstream=plan.stage.upstream,
        stages=(plan.stage.schema.key,),
        gpus=plan.gpus,
        plan=plan,
        output=check.find_output(plan),
    )


def examine(
    subject: Subject,
    chosen: Devices,
    *,
    look: Look | None = None,
    importing: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Report:
    """Check everything, import what training imports, and list what builds the environment.

    What is wrong with the machine is among the findings and never raised.
    """
    imports = None
    if importing and subject.trainer.version >= OLDEST:
        imports = _try_imports(subject, chosen, timeout_s)
    findings = [*_check_subject(subject, chosen, imports)]
    if subject.plan is not None:
        findings += check_local_files(subject.plan)
    findings += _check_checkout(subject)
    extra = subject.backend.EXTRA
    gpus = bool(subject.gpus)
    return Report(
        findings=tuple(findings),
        facts=tuple(_list_facts(subject, imports, chosen, look)),
        install=install.list_steps(subject.trainer, extra, gpus=gpus, more=list_needed(subject)),
    )


def _check_subject(
    subject: Subject, chosen: Devices, imports: Imports | None = None
) -> Iterator[Finding]:
    """Everything that costs no import, and what `imports` showed; worst first."""
    yield from check_source(subject, imports)
    yield from chosen.findings
    if subject.gpus and chosen.slots:
        yield from check_driver_and_torch(subject.trainer, chosen.slots[0].gpu.cuda)
    yield from check_shared_memory(subject.gpus)
    places = subject.places()
    yield from disk.check_writable(places)
    yield from disk.check_space(subject.needs(), subject.output, places)


def check_source(subject: Subject, imports: Imports | None = None) -> Iterator[Finding]:
    """Check for a checkout, packages, and a Python that upstream and the probe run on."""
    trainer = subject.trainer
    if subject.upstream.root is None and subject.upstream.is_checkout:
        from launcher.pin import pin

        places = "external/open-instruct, /workspace/open-instruct, ~/open-instruct"
        message = f"there is no open-instruct checkout ({places})"
        help = f"{pin.get_checkout()}, or --open-instruct PATH"
        yield launch_finding("error", "no-checkout", message, help)
    if trainer.version < OLDEST:
        version = _format_version(trainer.version)
        message = f"{trainer.python} ({trainer.source}) is Python {version}"
        help = f"name Python {_format_version(OLDEST)} or later with --python"
        yield launch_finding("error", "old-python", message, help)
    yield from check_packages(subject, imports)


def _format_version(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def _check_checkout(subject: Subject) -> Iterator[Finding]:
    """A checkout that is not the pin, and an empty submodule if another checkout is used."""
    from launcher.pin import pin

    upstream = subject.upstream
    if not upstream.is_checkout or upstream.root is None:
        return
    if subject.plan is None:
        fault = report_unpinned(upstream, allowed=False, where_found="error")
        if fault is not None:
            yield fault
    status = pin.read_status(upstream.root, subject.environ)
    module = status.submodule
    if status.fill is not None and module.state in {"missing", "empty"}:
        message = f"the submodule {module.path} is {module.state}; {upstream.root} is used"
        yield launch_finding("note", "empty-submodule", message, status.fill)


def check_packages(subject: Subject, imports: Imports | None = None) -> Iterator[Finding]:
    """Packages that the trainer's Python lacks, and those that cannot be imported.

    Without `imports` only metadata and files tell.
    """
    imports = imports or Imports()
    trainer = subject.trainer
    absent = _find_absent(subject, imports)
    if absent:
        steps = install.install(trainer, [install.find_requirement(name) for name in absent])
        commands = "; then ".join(step.shell() for step in steps)
        target = f" --backend {subject.upstream.backend}"
        if subject.plan is not None:
            target = f" {shlex.quote(str(subject.plan.stage.config.path))}"
        message = f"{trainer.python} ({trainer.source}) lacks {', '.join(absent)}"
        help = f"{commands} (`launch doctor{target} --install` has all that is needed); "
        help += "or name another interpreter with --python"
        yield launch_finding("error", "missing-packages", message, help)
    reinstall = f"{shlex.join(install.pip_install(trainer))} --force-reinstall --no-deps PACKAGE"
    for failure in imports.failures:
        if failure.missing is None:
            message = f"importing `{failure.module}` fails: {failure.error}: {failure.message}"
            help = "the package of the file named does not work here: "
            help += f"reinstall it with {reinstall}"
            place = {"file": failure.file, "line": failure.line}
            yield launch_finding("error", "import-error", message, help, **place)
    yield from _check_cuda(subject, imports)


def _find_absent(subject: Subject, imports: Imports) -> list[str]:
    """The distributions that are missing, each once."""
    distributions = {module: name for name, module in install.MODULES.items()}
    absent = list(install.find_missing(list_needed(subject), subject.trainer))
    for failure in imports.failures:
        if failure.missing:
            absent.append(distributions.get(failure.missing, failure.missing))
    return list(dict.fromkeys(absent))


def list_needed(subject: Subject) -> tuple[str, ...]:
    """The distributions that training imports."""
    plan = subject.plan
    names = list(subject.backend.NEEDS)
    for entry in subject.entries:
        names += entry.needs
    if subject.gpus and not _does_without_flash(subject):
        names += subject.backend.GPU_NEEDS
    if plan is not None:
        values = plan.values
        if plan.stage.entry.liger(values):
            names.append("liger-kernel")
        has_file = plan.stage.options.deepspeed is not None
        if plan.gpus and (has_file or values.get("zero_stage") is not None):
            names.append("deepspeed")
        for switch, name in _OPTIONAL.items():
            if values.get(switch) is True:
                names.append(name)
    return tuple(dict.fromkeys(names))


def _does_without_flash(subject: Subject) -> bool:
    """Whether the source that trains is known to start without flash-attn."""
    if subject.plan is not None:
        return _begins_without_flash(subject.plan)
    if not subject.upstream.is_checkout:
        return False
    stage = next(iter(subject.backend.STAGES))
    try:
        schema = load_schema(subject.upstream, stage, allow_unpinned=True)
    except InvalidConfig:
        return False
    return bool(schema.does(behaviour.DETECTS_WITHOUT_FLASH))


def _begins_without_flash(plan: Plan) -> bool:
    schema = plan.stage.schema
    if not schema.does(behaviour.DETECTS_WITHOUT_FLASH):
        return False
    if plan.stage.entry.packing == "always":
        return False
    # OLMo-core keeps packed samples apart with flash-attn alone
    return not (schema.does(behaviour.PACKS_WITH_FLASH_ALONE) and plan.values.get("packing"))


def _try_imports(subject: Subject, chosen: Devices, timeout_s: float) -> Imports:
    modules = [_MODULES[name] for name in list_needed(subject) if name in _MODULES]
    for entry in subject.entries:
        modules.append(entry.script.removesuffix(".py").replace("/", "."))
    for entry in subject.entries:
        modules += entry.imports
    gpus = bool(subject.gpus)
    environ = dict(subject.environ)
    if not gpus:
        environ[VARIABLE] = ""
    elif not chosen.refused:
        environ |= chosen.env()
    if subject.upstream.root is not None:
        environ |= build_source_environment(subject.backend, subject.upstream.root, environ)
    return install.try_imports(
        modules, subject.trainer, environ=environ, timeout_s=timeout_s, cuda=gpus
    )


def _check_cuda(subject: Subject, imports: Imports) -> Iterator[Finding]:
    torch = imports.cuda or {}
    if not subject.gpus or torch.get("cuda") is None:
        return
    fault = torch.get("error")
    count = torch.get("count", 0)
    if fault is None and count >= subject.gpus:
        return
    reason = fault or f"it sees {count} GPU(s) of {subject.gpus}"
    message = f"torch {torch.get('version')} cannot use the GPUs: {reason}"
    help = "compare the driver (nvidia-smi) with what this torch is built for; "
    help += "in a container: --gpus all"
    yield launch_finding("error", "cuda-unusable", message, help)


class TorchBuild(NamedTuple):
    """What torch is built for: the versions of CUDA and ROCm, both None for the CPU."""

    version: str
    cuda: str | None
    hip: str | None


def read_torch_build(trainer: Trainer) -> TorchBuild | None:
    """The build of the trainer's torch by its own version file; None if that is not readable."""
    for folder in trainer.path:
        with contextlib.suppress(OSError, ValueError):
            text = (folder / "torch" / "version.py").read_text(encoding="utf-8")
            versions = {match[1]: match[2] for match in _TORCH.finditer(text)}
            if "cuda" not in versions:
                return None
            version = trainer.packages.get("torch", "unknown")
            return TorchBuild(version, versions["cuda"], versions.get("hip"))
    return None


def check_driver_and_torch(trainer: Trainer, cuda: tuple[int, int] | None) -> Iterator[Finding]:
    """Check that torch can use the driver; `cuda` is the newest version that the driver serves.

    Within a major version an older driver serves newer CUDA (NVIDIA's minor version compatibility).
    """
    torch = read_torch_build(trainer)
    if torch is None or torch.hip is not None:
        return
    command = f"{trainer.python} -m pip install --force-reinstall torch"
    command += " --index-url https://download.pytorch.org/whl/cu"
    if cuda is not None:
        command += f"{cuda[0]}{cuda[1]}"
    if torch.cuda is None:
        message = f"torch {torch.version} of {trainer.python} is built for the CPU"
        help = f"install a CUDA build, such as {command}, or --gpus 0"
        yield launch_finding("error", "cpu-torch", message, help)
    elif cuda is not None and int(torch.cuda.partition(".")[0]) > cuda[0]:
        message = f"torch {torch.version} is built for CUDA {torch.cuda}, "
        message += f"the driver serves CUDA {_format_version(cuda)} at most"
        help = f"a newer driver, or a torch that is built for it: {command} "
        help += "(see pytorch.org for the builds that there are)"
        yield launch_finding("error", "old-driver", message, help)


def check_shared_memory(processes: int) -> Iterator[Finding]:
    try:
        size = shutil.disk_usage(SHM).total
    except OSError:
        return
    if processes > 1 and size < LEAST_SHM:
        message = f"{SHM} holds {size / 2**20:.0f} MiB: NCCL and the data loaders of "
        message += f"{processes} processes may not fit"
        help = "docker run --shm-size=16g (or --ipc=host), or mount -o remount,size=16g /dev/shm"
        yield launch_finding("warning", "small-shm", message, help)


def _list_facts(
    subject: Subject, imports: Imports | None, chosen: Devices, look: Look | None
) -> Iterator[Fact]:
    trainer = subject.trainer
    python = {
        "path": str(trainer.python),
        "version": _format_version(trainer.version),
        "source": trainer.source,
    }
    yield Fact("python", f"{trainer.python} ({trainer.source}), {python['version']}", python)
    yield Fact("source", subject.upstream.describe(), subject.upstream.as_json())
    torch = read_torch_build(trainer)
    if torch is not None:
        target = "the CPU"
        if torch.cuda:
            target = f"CUDA {torch.cuda}"
        elif torch.hip:
            target = f"ROCm {torch.hip}"
        yield Fact("torch", f"{torch.version}, built for {target}", torch._asdict())
    if imports is not None:
        failed = [failure.module for failure in imports.failures]
        fine = [name for name in imports.modules if name not in failed]
        text = f"{len(fine)} of {len(imports.modules)} modules import"
        yield Fact("imports", text, {"fine": fine, "failed": failed})
    yield from _list_gpu_facts(chosen, look)
    if subject.plan is not None:
        text = "unknown: the model's size is not known from here"
        needs = subject.needs()
        if needs is not None:
            text = f"up to {format_size(needs.likely)}: {disk.describe_needs(needs)}"
        yield Fact("will write", text)
    for place in subject.places():
        room = disk.measure_room(place.path)
        text = "unknown"
        value: dict[str, object] = {"path": str(place.path), "free": None}
        if room is not None:
            text = f"{format_size(room.free)} free"
            value["free"] = room.free
        yield Fact(place.what, f"{place.path}, {text}", value)


def _list_gpu_facts(chosen: Devices, look: Look | None) -> Iterator[Fact]:
    if look is not None and not look.present:
        yield Fact("GPUs", "none", [])
        return
    if look is not None:
        gpu = look.present[0]
        text = gpu.driver or "unknown"
        if gpu.cuda is not None:
            text += f", CUDA up to {_format_version(gpu.cuda)}"
        yield Fact("driver", text, {"version": gpu.driver, "cuda": gpu.cuda})
        for slot in look.visible:
            yield _describe_slot(slot, chosen, look)
    yield Fact("run gets", chosen.visible or chosen.why or "no GPU", chosen.as_json())


def _describe_slot(slot: Slot, chosen: Devices, look: Look) -> Fact:
    gpu = slot.gpu
    use = look.uses.get(slot.id)
    card = {
        "id": slot.id,
        "name": gpu.name,
        "memory_mib": gpu.memory_mib,
        "used_mib": gpu.used_mib,
        "used_by": None,
    }
    state = "taken" if slot in chosen.slots else "free"
    if use is not None:
        state = f"used by {use.text}"
        card["used_by"] = use.text
    text = f"{gpu.name}, {gpu.used_mib} of {gpu.memory_mib} MiB used, {state}"
    return Fact(f"GPU {gpu.index}", text, card)


def check_local_files(plan: Plan) -> Iterator[Finding]:
    """Data files that are missing, which is an error where the run starts."""
    for finding in plan.stage.findings:
        if finding.code == "missing-data":
            yield replace(finding, severity="error")
