"""Which GPUs a run gets: those that were named, or free ones, and none that another run has.

Every GPU has a lock file named after its id, in a folder that all users of the machine share. The
training process inherits the kernel's lock: a GPU belongs to a run as long as any of its processes
lives, and no longer. Of other programs only the driver tells: which processes compute there, and,
in a container that does not see them, how much memory is used.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from launcher import files
from launcher.errors import Finding, NotReady, launch_finding, usage
from launcher.lazy_dataclass import dataclass
from launcher.machine import python, tools
from launcher.machine.locks import try_lock
from launcher.machine.python import Gpu, GpuProcess

VARIABLE = "CUDA_VISIBLE_DEVICES"
# CUDA's default order is the fastest card first, nvidia-smi's the PCI bus: use one for both
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
ORDER = "PCI_BUS_ID"
FREE_MIB = 1024  # a GPU with less in use is free: the driver, or a display
LOCKS = "LAUNCH_GPU_LOCKS"  # the variable that names another folder for the locks
_SHARED_FOLDERS = ("/dev/shm", "/tmp")
# a start that only looks holds a lock for microseconds
_GLANCE_S = 0.25
_UUID_PREFIX = "GPU-"
_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Slot:
    """One GPU that CUDA_VISIBLE_DEVICES can name; `name` is how the variable spells it."""

    name: str
    gpu: Gpu

    @property
    def id(self) -> str:
        return self.gpu.uuid


@dataclass(frozen=True, slots=True)
class Use:
    """Who uses a GPU. `run` of launch holds its lock, if any; `locked`: some start does."""

    text: str
    run: str | None = None
    locked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The GPUs of this machine at one moment.

    `uses` is by id, `hidden` the value of CUDA_VISIBLE_DEVICES, `fault` nvidia-smi's complaint.
    `silent`: nvidia-smi did not answer in time.
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
    """The GPUs of a run. If it gets none, `findings` holds the error."""

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
        variables = {VARIABLE: self.visible}
        if any(slot.name.isdecimal() for slot in self.slots):
            variables[ORDER_VARIABLE] = ORDER
        return variables

    def as_json(self) -> dict[str, Any]:
        gpus = []
        for slot in self.slots:
            gpu = {
                "index": slot.gpu.index,
                "id": slot.gpu.uuid,
                "name": slot.gpu.name,
                "memory_mib": slot.gpu.memory_mib,
            }
            gpus.append(gpu)
        return {"visible": self.visible, "why": self.why, "gpus": gpus}


def survey_devices(environ: Mapping[str, str] | None = None) -> Look:
    """Ask the driver, the lock files and /proc; no GPU is touched."""
    if environ is None:
        environ = os.environ
    driver = python.ask_driver()
    slots = list_visible_slots(driver.gpus, environ)
    uses = {}
    for slot in slots:
        use = _find_use(slot, driver.processes)
        if use is not None:
            uses[slot.id] = use
    return Look(
        present=driver.gpus,
        visible=slots,
        uses=uses,
        hidden=environ.get(VARIABLE),
        fault=driver.fault,
        silent=driver.silent,
    )


def list_visible_slots(present: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Slot, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows, read as CUDA does.

    A wrong entry hides those after it, a repeated one all (torch `_parse_visible_devices`).
    """
    listed = environ.get(VARIABLE)
    if listed is None:
        return tuple(Slot(str(gpu.index), gpu) for gpu in present)
    slots: dict[str, Slot] = {}
    for word in listed.split(","):
        slot = _find_visible_slot(word.strip(), present)
        if slot is None:
            break
        if slot.id in slots:
            return ()
        slots[slot.id] = slot
    return tuple(slots.values())


def _find_visible_slot(entry: str, present: Sequence[Gpu]) -> Slot | None:
    """The GPU that an entry of CUDA_VISIBLE_DEVICES names; None if it names none, or several."""
    number = re.match(r"\d+", entry)
    if number is not None:
        name = str(int(number[0]))
        matches = [gpu for gpu in present if str(gpu.index) == name]
    elif entry.startswith(_UUID_PREFIX):
        # an id may be shortened as long as it is unique
        name = entry
        matches = [gpu for gpu in present if gpu.uuid.startswith(entry)]
    else:
        return None
    if len(matches) != 1:
        return None
    return Slot(name, matches[0])


def _find_use(slot: Slot, computing: Sequence[GpuProcess]) -> Use | None:
    use = _find_lock_holder(slot)
    if use is not None:
        return use
    processes = [_describe_process(process) for process in computing if process.uuid == slot.id]
    if processes:
        return Use(", ".join(processes[:_MAX_SHOWN]))
    used_mib = slot.gpu.used_mib
    if used_mib > FREE_MIB:
        return Use(f"something that is not seen from here ({used_mib} MiB)")
    return None


def _find_lock_holder(slot: Slot) -> Use | None:
    lock = _open_lock(slot.id, make=False)
    if lock is None:
        return None
    try:
        if try_lock(lock, shared=True) is not False:
            return None
        run = Path(_read_holder(lock)).name
    finally:
        os.close(lock)
    if run:
        return Use(f"the run {run}", run, locked=True)
    return Use("another start of launch", locked=True)


def _describe_process(process: GpuProcess) -> str:
    details = []
    if process.name and not process.name.startswith("["):
        details.append(Path(process.name).name)
    if process.used_mib:
        details.append(f"{process.used_mib} MiB")
    if not details:
        return f"pid {process.pid}"
    return f"pid {process.pid} ({', '.join(details)})"


def parse_slots(text: str | None) -> tuple[str, ...] | None:
    """The parts of `--devices 2,3`. Raises UsageError for one that is no GPU, or repeated."""
    if text is None:
        return None
    parts = tuple(part.strip() for part in text.split(","))
    repeated = sorted({part for part in parts if parts.count(part) > 1})
    odd = [part for part in parts if not _names_gpu(part)]
    if odd:
        fault = f"`{odd[0]}` is not a GPU"
    elif repeated:
        fault = f"{', '.join(repeated)} is named twice"
    else:
        return parts
    raise usage("bad-devices", f"--devices {text}: {fault}", "numbers of nvidia-smi: 2,3")


def _names_gpu(part: str) -> bool:
    if part.startswith(_UUID_PREFIX):
        return True
    return part.isascii() and part.isdecimal()


def choose_devices(count: int | None, names: Sequence[str] | None, look: Look) -> Devices:
    """The GPUs of a run: those named, else the first `count` free ones. Never raises.

    A refusal is an error among the findings, a named GPU that is in use a warning.
    """
    if names is not None:
        return _choose_named(names, look)
    if not count:
        return Devices(why="on the CPU")
    free = look.free()
    if len(free) < count:
        return Devices(findings=(_report_too_few(count, look, free),))
    visible = len(look.visible)
    why = f"the first free of {visible}"
    if count == visible:
        why = "the only ones here"
    return Devices(slots=free[:count], why=why)


def _choose_named(names: Sequence[str], look: Look) -> Devices:
    slots: list[Slot] = []
    findings: list[Finding] = []
    for name in names:
        slot = _find_slot(name, look)
        if slot is None:
            findings.append(_report_missing_gpu(name, look))
            continue
        slots.append(slot)
        use = look.uses.get(slot.id)
        if use is None:
            continue
        if use.locked:
            findings.append(_report_taken(slot, use))
        else:
            message = f"GPU {slot.gpu.index} is named, and used by {use.text}: "
            message += "both may run out of memory"
            help = "wait until it is over"
            findings.append(launch_finding("warning", "busy-gpu", message, help))
    devices = Devices(slots=tuple(slots), why="named by --devices", findings=tuple(findings))
    if devices.refused:
        return replace(devices, slots=())
    return devices


def _find_slot(name: str, look: Look) -> Slot | None:
    for slot in look.visible:
        if name.isdecimal():
            if slot.gpu.index == int(name):
                return slot
        elif len(name) > len(_UUID_PREFIX) and slot.id.startswith(name):
            # an id may be shortened
            return slot
    return None


def _report_missing_gpu(name: str, look: Look) -> Finding:
    visible = ", ".join(slot.name for slot in look.visible) or "none"
    reason = "there is no such GPU here"
    for gpu in look.present:
        if name in (str(gpu.index), gpu.uuid):
            reason = f"{VARIABLE}={look.hidden} hides it"
    message = f"--devices {name}: {reason}"
    return launch_finding("error", "no-such-gpu", message, f"to be seen: {visible}")


def _report_too_few(count: int, look: Look, free: Sequence[Slot]) -> Finding:
    visible = len(look.visible)
    if look.silent:
        message = f"{look.fault}: the GPUs are not known"
        help = f"see whether `nvidia-smi -L` answers; {tools.VARIABLE}=30 waits longer; "
        help += "--gpus 0 trains on the CPU"
        return launch_finding("error", "no-driver", message, help)
    if look.fault is not None:
        message = f"nvidia-smi says: {look.fault}"
        help = "fix the driver (after an update: reboot), or start the container with --gpus all"
        help += "; --gpus 0 trains on the CPU"
        return launch_finding("error", "no-driver", message, help)
    if visible < count:
        message = f"{count} GPU(s) asked for, {visible} here"
        if look.hidden is not None:
            message += f" ({VARIABLE}={look.hidden})"
        help = f"--gpus {visible}" if visible else "--gpus 0 trains on the CPU"
        return launch_finding("error", "too-few-gpus", message, help)
    taken = []
    for slot in look.visible:
        if slot not in free:
            taken.append(f"GPU {slot.gpu.index} is used by {look.uses[slot.id].text}")
    message = f"{count} GPU(s) asked for, {len(free)} of {visible} free: {'; '.join(taken)}"
    ways = ["wait"]
    if free:
        ways.insert(0, f"--gpus {len(free)}")
    runs = dict.fromkeys(use.run for use in look.uses.values() if use.run)
    ways += [f"`launch stop {run}`" for run in list(runs)[:2]]
    return launch_finding("error", "gpus-taken", message, ", or ".join(ways))


def _report_taken(slot: Slot, use: Use) -> Finding:
    message = f"GPU {slot.gpu.index} is taken by {use.text}"
    help = "another one, or wait until it is over"
    if use.run:
        help = f"another one, or wait, or `launch stop {use.run}`"
    return launch_finding("error", "gpus-taken", message, help)


@contextlib.contextmanager
def lock_slots(
    devices: Devices, run: Path, *, patience_s: float = 10.0
) -> Iterator[tuple[int, ...]]:
    """Lock GPUs; yields descriptors that training must inherit.

    Raises NotReady if another start was quicker.
    """
    locks: list[int] = []
    try:
        # every start locks in the same order: of two that want the same GPUs one gets them
        for slot in sorted(devices.slots, key=_get_slot_id):
            lock = _open_lock(slot.id)
            if lock is None:
                continue
            locks.append(lock)
            if not _try_lock_gpu(lock, run, patience_s):
                use = _find_use(slot, ()) or Use("another start of launch")
                raise NotReady(_report_taken(slot, use))
            with contextlib.suppress(OSError):
                os.ftruncate(lock, 0)
                os.pwrite(lock, json.dumps({"run": str(run)}).encode(), 0)
        yield tuple(locks)
    finally:
        for lock in locks:
            os.close(lock)


def _get_slot_id(slot: Slot) -> str:
    return slot.id


def _try_lock_gpu(lock: int, run: Path, patience_s: float) -> bool:
    """Whether a GPU could be locked, or its file system has no locks: then the driver has to do.

    Its holder may be an earlier attempt of this run, which is about to release it.
    """
    if try_lock(lock, seconds=_GLANCE_S) is not False:
        return True
    if _read_holder(lock) != str(run):
        return False
    return try_lock(lock, seconds=patience_s) is not False


def _read_holder(lock: int) -> str:
    """The run folder that is written in a lock file; empty if unreadable."""
    try:
        run = files.parse_line(os.pread(lock, 65536, 0)).get("run")
    except OSError:
        return ""
    if not isinstance(run, str):
        return ""
    return run


def _open_lock(name: str, *, make: bool = True) -> int | None:
    """A lock file that every user can lock; None if there is none to be had."""
    file = "launch-" + re.sub(r"[^\w.-]+", "-", f"{name}.lock")
    own_folder = os.environ.get(LOCKS)
    if own_folder:
        with contextlib.suppress(OSError):
            return _open_shared(Path(own_folder, file), make=make)
        return None
    for folder in _SHARED_FOLDERS:
        with contextlib.suppress(OSError):
            # sticky: nobody can remove another user's file
            if os.stat(folder).st_mode & stat.S_ISVTX:
                return _open_shared(Path(folder, file), make=make)
    return None


def _open_shared(path: Path, *, make: bool) -> int:
    """Raises OSError if there is no file, or something else in its place."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    # Linux refuses O_CREAT for the existing file of another user in a sticky folder
    if make and not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):
            lock = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            # whatever the umask of the first user
            os.fchmod(lock, 0o666)
            return lock
    lock = os.open(path, flags)
    status = os.fstat(lock)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(lock)
        raise FileNotFoundError(path)
    return lock
