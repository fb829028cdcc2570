"""Which GPUs a run gets: those that were named, or free ones, and none that another run has.

Every GPU has a lock file under its own id, in a place that all users of the machine share. The lock is the
kernel's and is inherited by the training process: a GPU is another run's for as long as anything of that
run lives, and never longer. What is not launch's is known from the driver alone: from who computes there,
and, in a container that does not see them, from the memory that is used.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import Finding, NotReady, launch_finding, usage
from launcher.machine import python, tools
from launcher.machine.locks import locked
from launcher.machine.python import Gpu, GpuProcess

VARIABLE = "CUDA_VISIBLE_DEVICES"
# by default CUDA puts the fastest card first, nvidia-smi goes by the PCI bus: one order for both
ORDER = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
FREE_MIB = 1024  # what may be in use on a GPU that counts as free: a driver's own, a display's
LOCKS = "LAUNCH_GPU_LOCKS"  # the environment variable that names another folder for the locks than the machine's own
_SHARED = ("/dev/shm", "/tmp")
# another start that only looks holds a lock for microseconds
_GLANCE_S = 0.25


@dataclass(frozen=True, slots=True)
class Slot:
    """What CUDA_VISIBLE_DEVICES can name; `name` is how the variable spells it."""

    name: str
    gpu: Gpu

    @property
    def id(self) -> str:
        return self.gpu.uuid


@dataclass(frozen=True, slots=True)
class Use:
    """Who has a GPU. `run` is the run of launch's that holds the GPU's lock; `locked` whether any start does."""

    text: str
    run: str | None = None
    locked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The GPUs here at one moment; `uses` by id, `hidden` is CUDA_VISIBLE_DEVICES, `fault` nvidia-smi's complaint.

    `silent` where nvidia-smi did not answer in time.
    """

    present: tuple[Gpu, ...]
    visible: tuple[Slot, ...]
    uses: Mapping[str, Use] = field(default_factory=dict)
    hidden: str | None = None
    fault: str | None = None
    silent: bool = False

    def free(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.visible if slot.id not in self.uses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The GPUs of a run, or why it gets none: then `findings` holds an error, and `slots` is empty."""

    slots: tuple[Slot, ...] = ()
    why: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def visible(self) -> str:
        return ",".join(slot.name for slot in self.slots)

    @property
    def refused(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def env(self) -> dict[str, str]:
        ordered = any(slot.name.isdecimal() for slot in self.slots)
        return {VARIABLE: self.visible} | (dict([ORDER]) if ordered else {})

    def as_json(self) -> dict[str, Any]:
        return {
            "visible": self.visible,
            "why": self.why,
            "gpus": [
                {"index": gpu.index, "id": gpu.uuid, "name": gpu.name, "memory_mib": gpu.memory_mib}
                for gpu in (slot.gpu for slot in self.slots)
            ],
        }


def look(environ: Mapping[str, str] | None = None) -> Look:
    """Ask the driver, the lock files and /proc; no GPU is touched."""
    environ = os.environ if environ is None else environ
    driver = python.ask_driver()
    slots = visible(driver.gpus, environ)
    uses = {slot.id: use for slot in slots if (use := _use(slot, driver.processes)) is not None}
    return Look(
        present=driver.gpus,
        visible=slots,
        uses=uses,
        hidden=environ.get(VARIABLE),
        fault=driver.fault,
        silent=driver.silent,
    )


def visible(present: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Slot, ...]:
    """Read as CUDA does: a wrong entry hides what follows, a repeated one all (torch `_parse_visible_devices`)."""
    listed = environ.get(VARIABLE)
    if listed is None:
        return tuple(Slot(str(gpu.index), gpu) for gpu in present)
    found: dict[str, Slot] = {}
    for entry in (word.strip() for word in listed.split(",")):
        if number := re.match(r"\d+", entry):
            fitting = [Slot(str(gpu.index), gpu) for gpu in present if gpu.index == int(number[0])]
        else:
            # an id may be cut short as long as it means one
            fitting = [Slot(entry, gpu) for gpu in present if entry[:4] == "GPU-" and gpu.uuid.startswith(entry)]
        if len(fitting) != 1:
            break
        if fitting[0].id in found:
            return ()
        found[fitting[0].id] = fitting[0]
    return tuple(found.values())


def _use(slot: Slot, computing: Sequence[GpuProcess]) -> Use | None:
    if (lock := _opened(slot.id, make=False)) is not None:
        try:
            if locked(lock, shared=True) is False:
                name = Path(_written(lock)).name or None
                return Use(f"the run {name}" if name else "another start of launch", name, locked=True)
        finally:
            os.close(lock)
    if here := [_described(one) for one in computing if one.uuid == slot.id]:
        return Use(", ".join(here[:3]))
    if slot.gpu.used_mib > FREE_MIB:
        return Use(f"something that is not seen from here ({slot.gpu.used_mib} MiB)")
    return None


def _described(one: GpuProcess) -> str:
    name = Path(one.name).name if one.name and not one.name.startswith("[") else ""
    about = ", ".join(filter(None, (name, f"{one.used_mib} MiB" if one.used_mib else "")))
    return f"pid {one.pid} ({about})" if about else f"pid {one.pid}"


def named(text: str | None) -> tuple[str, ...] | None:
    """`--devices 2,3` in parts; raises UsageError for what names nothing, or something twice."""
    parts = () if text is None else tuple(part.strip() for part in text.split(","))
    twice = sorted({part for part in parts if parts.count(part) > 1})
    odd = [p for p in parts if not (p.isascii() and p.isdecimal()) and p[:4] != "GPU-"]
    if not odd and not twice:
        return parts or None
    what = f"`{odd[0]}` is not a GPU" if odd else f"{', '.join(twice)} is named twice"
    raise usage("bad-devices", f"--devices {text}: {what}", "numbers of nvidia-smi: 2,3")


def choose(count: int | None, asked: Sequence[str] | None, seen: Look) -> Devices:
    """The GPUs of a run. Never raises: a refusal is an error among the findings, a busy one named a warning."""
    if asked is not None:
        return _named(asked, seen)
    if not count:
        return Devices(why="on the CPU")
    free, every = seen.free(), len(seen.visible)
    if len(free) < count:
        return Devices(findings=(_too_few(count, seen, free),))
    return Devices(slots=free[:count], why="the only ones here" if count == every else f"the first free of {every}")


def _named(names: Sequence[str], seen: Look) -> Devices:
    slots: list[Slot] = []
    faults: list[Finding] = []
    for name in names:
        number = int(name) if name.isdecimal() else None
        # an id may be cut short
        ids = () if name.isdecimal() or len(name) <= 4 else (name,)
        slot = next((s for s in seen.visible if s.gpu.index == number or s.id.startswith(ids)), None)
        if slot is None:
            left = ", ".join(one.name for one in seen.visible) or "none"
            hidden = any(name in {str(gpu.index), gpu.uuid} for gpu in seen.present)
            why = f"{VARIABLE}={seen.hidden} hides it" if hidden else "there is no such GPU here"
            faults.append(launch_finding("error", "no-such-gpu", f"--devices {name}: {why}", f"to be seen: {left}"))
            continue
        slots.append(slot)
        use = seen.uses.get(slot.id)
        if use is not None and use.locked:
            faults.append(_held_by(slot, use))
        elif use is not None:
            message = f"GPU {slot.gpu.index} is named, and used by {use.text}: both may run out of memory"
            faults.append(launch_finding("warning", "busy-gpu", message, "wait until it is over"))
    refused = any(fault.severity == "error" for fault in faults)
    return Devices(slots=() if refused else tuple(slots), why="named by --devices", findings=tuple(faults))


def _too_few(count: int, seen: Look, free: Sequence[Slot]) -> Finding:
    here = len(seen.visible)
    if seen.silent:
        help = f"see whether `nvidia-smi -L` answers; {tools.VARIABLE}=30 waits longer; --gpus 0 trains on the CPU"
        return launch_finding("error", "no-driver", f"{seen.fault}: the GPUs are not known", help)
    if seen.fault is not None:
        help = "fix the driver (after an update: reboot), or start the container with --gpus all"
        help += "; --gpus 0 trains on the CPU"
        return launch_finding("error", "no-driver", f"nvidia-smi says: {seen.fault}", help)
    if here < count:
        limit = "" if seen.hidden is None else f" ({VARIABLE}={seen.hidden})"
        message = f"{count} GPU(s) asked for, {here} here{limit}"
        help = f"--gpus {here}" if here else "--gpus 0 trains on the CPU"
        return launch_finding("error", "too-few-gpus", message, help)
    taken = [f"GPU {s.gpu.index} is used by {seen.uses[s.id].text}" for s in seen.visible if s not in free]
    runs = dict.fromkeys(use.run for use in seen.uses.values() if use.run)
    ways = [f"--gpus {len(free)}"] if free else []
    ways += ["wait", *(f"`launch stop {run}`" for run in list(runs)[:2])]
    message = f"{count} GPU(s) asked for, {len(free)} of {here} free: {'; '.join(taken)}"
    return launch_finding("error", "gpus-taken", message, ", or ".join(ways))


def _held_by(slot: Slot, use: Use) -> Finding:
    help = "another one, or " + (f"wait, or `launch stop {use.run}`" if use.run else "wait until it is over")
    return launch_finding("error", "gpus-taken", f"GPU {slot.gpu.index} is taken by {use.text}", help)


@contextlib.contextmanager
def lock_slots(devices: Devices, run: Path, *, patience_s: float = 10.0) -> Iterator[tuple[int, ...]]:
    """Lock these; yields descriptors that training must inherit. Raises NotReady where another start was quicker."""
    locks: list[int] = []
    try:
        # all starts go in one order: of two that want the same GPUs one gets them
        for slot in sorted(devices.slots, key=lambda slot: slot.id):
            lock = _opened(slot.id)
            if lock is None:
                continue
            locks.append(lock)
            # on a file system without locks (None) what the driver says has to do; the holder may be this very
            # run, which is about to let go
            if locked(lock, seconds=_GLANCE_S) is False and (
                _written(lock) != str(run) or locked(lock, seconds=patience_s) is False
            ):
                raise NotReady(_held_by(slot, _use(slot, ()) or Use("another start of launch")))
            with contextlib.suppress(OSError):
                os.ftruncate(lock, 0)
                os.pwrite(lock, json.dumps({"run": str(run)}).encode(), 0)
        yield tuple(locks)
    finally:
        for lock in locks:
            os.close(lock)


def _written(lock: int) -> str:
    try:
        run = files.parse_line(os.pread(lock, 65536, 0)).get("run")
    except OSError:
        return ""
    return run if isinstance(run, str) else ""


def _opened(name: str, *, make: bool = True) -> int | None:
    """A lock file that every user can lock, and nobody else's file instead of it; None where none can be had."""
    file = "launch-" + re.sub(r"[^\w.-]+", "-", f"{name}.lock")
    given = os.environ.get(LOCKS)
    for folder in [given] if given else _SHARED:
        with contextlib.suppress(OSError):
            # of the whole machine, and nobody can remove another's file in it
            if os.stat(folder).st_mode & stat.S_ISVTX or given:
                return _shared(Path(folder) / file, make=make)
    return None


def _shared(path: Path, *, make: bool) -> int:
    """Raises OSError where there is none, or something else lies in its place."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    # not O_CREAT at once: in a sticky folder Linux refuses that for the file of another user
    if make and not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):
            lock = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            # whatever the umask of who comes first
            os.fchmod(lock, 0o666)
            return lock
    lock = os.open(path, flags)
    status = os.fstat(lock)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(lock)
        raise FileNotFoundError(path)
    return lock
