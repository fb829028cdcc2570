"""Evidence -> how the run ended, and the first real error: an `Ending`. A traceback proves no crash, training data is
printed into logs: what counts is an error after which no work follows, an exit code, or a signal."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from signal import Signals

from launcher.upstream.logs import common
from launcher.upstream.logs.common import SHELL_SIGNALS
from launcher.verdict.evidence import Event, Evidence
from launcher.verdict.logs.scan import Log, Signal
from launcher.verdict.summary import MESSENGERS

HELP: Mapping[str, str] = {
    "oom": "GPU memory ran out: see the memory point",
    "oom_host": "host memory ran out: fewer dataset or dataloader workers, no offloading, or a larger machine",
    "refused": "the trainer's parser refused the arguments: `launch validate-config` names them",
    "gpu_fault": "a GPU is faulty: run without that GPU or node; `nvidia-smi -q -d ECC` and `dmesg` name it",
    "device_assert": "an index was out of range on the GPU, most often a token: CUDA_LAUNCH_BLOCKING=1 shows where",
    "illegal_access": "a GPU kernel read or wrote where it must not: CUDA_LAUNCH_BLOCKING=1 shows where",
    "nccl_timeout": "a collective timed out: one rank was busy or dead. If rank 0 was still "
    "tokenizing, run once with `cache_dataset_only: true` or raise `timeout`",
    "port_in_use": "another run holds the port: choose another main process port",
    "flash_attn_missing": "open-instruct needs `flash_attn`: `pip install --no-build-isolation flash-attn`",
    "shared_memory": "/dev/shm ran out: `--shm-size` or `--ipc=host` for a container, or fewer dataloader workers",
    "worker_killed": "a dataloader worker was killed, most often because host memory ran out: fewer workers",
    "no_gpu": "CUDA sees no such GPU: see `launch doctor`, CUDA_VISIBLE_DEVICES and the number of processes",
    "cuda_driver": "update the NVIDIA driver, or install torch for the CUDA version that it supports",
    "hub_access": "check the repository's name, set HF_TOKEN, and accept the terms of a gated repository",
    "hub_limit": "the hub allows no more requests for now: set HF_TOKEN, wait, or `launch prepare` once beforehand",
    "hub_unreachable": "the hub could not be reached: fetch model and data first, or name local folders",
    "wandb_login": "wandb has no key: set WANDB_API_KEY, or switch tracking off",
    "wandb_unreachable": "wandb could not be reached (open-instruct asks it even offline): switch tracking off",
    "too_many_files": "too many open files: raise `ulimit -n`, or use fewer dataloader workers",
    "rendezvous": "not all processes came together: check that every node runs and reaches the main address",
    "disk_full": "the disk is full, or a quota: free space, or point the output and cache folders elsewhere",
    "corrupt_file": "a file of weights is cut off or damaged: remove it, and fetch or save it again",
    "abi_mismatch": "a compiled package was built for another torch or CUDA than is installed: build it "
    "again, `pip install --no-build-isolation --force-reinstall --no-deps PACKAGE`",
    "loss_scale": "in fp16 the gradients overflow at every loss scale: train in bf16, or with a lower learning rate",
    "file_limit": "a file would have been larger than is allowed: raise `ulimit -f`",
    "not_started": "Python did not find what it was to run: check the path, the folder and the environment",
    "not_found": "the shell did not find the command: check PATH and which environment is active",
    "time_limit": "the scheduler's time limit was reached: ask for more, and save checkpoints to resume from",
    "save_late": "the checkpoint that was requested was not saved in time, and the run was stopped without: the same "
    "command continues from the one before; LAUNCH_SAVE_GRACE gives a save more seconds",
    "preempted": "the scheduler took the machine: the same command continues from the last checkpoint",
    "node_failure": "a node of the job failed: the same command continues from the last checkpoint, elsewhere",
    "hangup": "its terminal or connection was closed: start it with --detach, or under tmux or a scheduler",
    "violation": "the run violated `expect:` and was stopped: the failed point says why; "
    "`expect: {POINT: any}` accepts anything, `on_violation: warn` only warns",
    "hang_saving": "a save did not end on every rank: one still wrote or gathered the weights while the others "
    "waited. Check that every rank calls it, and that disk's speed and space; raise `ddp_timeout`, or save sharded",
    "hang_evaluation": "a rank hung in the evaluation, most often as ranks had different numbers of batches, or "
    "one was still computing metrics: check `dataloader_drop_last`, and raise `ddp_timeout`",
    "hang": "training made no progress: `probe/rank-N.stacks.txt` of the run shows where each rank was",
    "nccl_error": "NCCL could not set up or lost a connection: NCCL_DEBUG=INFO says why; with no socket "
    "interface found, set NCCL_SOCKET_IFNAME. The first error of another rank may be the cause",
    "killed": "killed from outside, most often because host memory ran out: see `dmesg` or the scheduler",
    "ended_early": "training ended without an error, before the announced last step",
    "no_save": "training ended without an error, but no final save was seen",
    "no_steps": "the command ended without an error, but neither the probe nor the log recorded an optimizer step",
    "fewer_steps": "training ended without an error after fewer steps than planned, and no log says how many",
}

_STOPS = {Signals.SIGINT, Signals.SIGTERM}
# What Slurm says of why it ended a job, where that was nobody's wish.
_TAKEN: Mapping[str, str] = {"TIME LIMIT": "time_limit", "PREEMPTION": "preempted", "NODE FAILURE": "node_failure"}
# A process does these to itself; the others come from outside.
_OWN_FAULTS = {s for s in Signals if s.name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")}
_WORK = (
    *("total_steps", "liger_attempted", "liger_applied", "attention", "packing", "resumed"),
    *("begun", "loading", "reference_hit", "progress", "training_completed", "saved"),
)
_FAILURES = (
    *("exception", "child_failed", "child_signal", "refused", "shell_killed", "cancelled"),
    *("violation", "not_started", "terminated", "syntax", "watchdog"),
)
# Whatever uses a model loads it.
_ANYBODYS = {known.name for known in common.PATTERNS} - {"begun"} | {"exception", "loading"}
_END_LINES = 10  # what stands below the last word of an error: torchrun's frame, the shell, Slurm
_LAST_LINES = 3  # of a log: what else comes after a command was not found is something else
# What only points to the exception before
# (transformers/utils/import_utils.py::_LazyModule.__getattr__[raise ModuleNotFoundError #2],
# trl/_lazy_module.py::_LazyModule._get_module[raise RuntimeError]).
_LOOK_UP = re.compile(r"\(look up to see its traceback\)|^Could not import module '")
_LAUNCHED = re.compile(r"accelerate/commands/launch\.py:\d+$")
# What a rank says because another one is gone.
_BEREFT = re.compile(r"Connection (?:closed|reset) by peer|remote process exited or there was a network error")
# What training is busy with, by what is said before it.
_BUSY: Mapping[str, str] = {"save_begun": "saving", "saving": "saving", "evaluating": "evaluation"}
_FIRST_COLLECTIVE = re.compile(r"SeqNum=[0-3]\b")
_WHAT_LINES = 3  # between what C++ terminates for and its message


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended. `state` is as in the `finish` point; `proved` is False where the evidence allows it to have
    ended well and does not show it; `reason` is a key of `HELP`; `saved` is of the checkpoint before a preemption."""

    state: str
    proved: bool = True
    reason: str | None = None
    error: Mapping[str, str] | None = None
    signal: str | None = None
    lines: tuple[Signal, ...] = ()
    saved: Event | None = None


def fatal(evidence: Evidence, *names: str) -> tuple[Signal, ...]:
    """The signals of these names after which the log shows no work any more. One step may still be logged: rank 0
    prints it while another rank is already going under. A log of which nothing shows that it is a training's tells of
    one's failure only if it ends with it."""
    log = evidence.log
    if log is None:
        return ()
    trains = evidence.exit or evidence.probe or log.steps or log.blocks or log.last_bar
    if not trains and all(s.name in _ANYBODYS or s.text.startswith("nohup: ") for s in log.signals):
        ends = log.all(*_FAILURES, "not_found", "stop_asked")
        if not any(s.line > log.lines - _END_LINES for s in ends):
            return ()
    work = max((s.line for s in log.all(*_WORK)), default=0)
    work = max(work, log.steps[-2].line if len(log.steps) > 1 else 0, _of_an_earlier(log))
    return tuple(s for s in log.all(*names) if s.line > work)


def _of_an_earlier(log: Log) -> int:
    """The last line of an earlier attempt in the same file: its launcher's word, behind which one begins. accelerate
    speaks of its only child, so that what is raised later is another's; torchrun of one node may have spoken before
    the ranks of the others. Of several jobs of Slurm the last one counts."""
    raised, begun = log.all("exception"), log.all("begun", "bar_begun", "loading")
    ends = [s for s in raised if _carries(s)]
    others = [*(s for s in raised if s not in ends), *log.all("refused", "syntax")]
    past = [s.line for s in ends if any(one.line > s.line for one in begun)]
    alone = (s.line for s in ends if _LAUNCHED.search(s.fields["at"]))
    past += [line for line in alone if any(one.line > line for one in others)]
    jobs = [s for s in log.all("cancelled") if s.fields.get("job")]
    again = max((s.line for s in log.all("bar_begun") if s.fields["total"] == str(log.total_steps)), default=0)
    past += [s.line for s in jobs if s.fields["job"] != jobs[-1].fields["job"] or again > s.line]
    return max(past, default=0)


def ending(evidence: Evidence) -> Ending:
    """How the run ended: an exit record counts first, then the log and the probe."""
    ended = evidence.exit
    saved = evidence.events("preempted")
    if saved:
        # the first machine leaves this word once all ranks have saved
        return Ending(state="preempted", saved=saved[0])
    if (stopped := evidence.stopped) is not None:
        # a process ended itself, and the others were ended for it: what they say then counts for nothing
        error = {"type": stopped.name, "message": stopped.text("message") or "", "rank": str(stopped.rank)}
        return Ending(state="stopped", reason=stopped.name, error=error)
    # a job script goes on after a command that is not there: that one counts at the very end alone
    late = evidence.log.lines - _LAST_LINES if evidence.log else 0
    failures = tuple(s for s in fatal(evidence, *_FAILURES, "not_found") if s.name != "not_found" or s.line > late)
    violation = next((s for s in failures if s.name == "violation"), None)
    if violation is not None and not (ended and not ended.returncode):
        message = violation.fields["message"]
        kind = "hang" if message.startswith("nothing moved ") else "violation"
        return Ending(state="stopped", reason=kind, error={"type": kind, "message": message}, lines=(violation,))
    signal, probe_code = _signal(evidence, failures), _probe_code(evidence)
    code = ended.returncode if ended else probe_code
    # what started the script may end well all the same
    failed = code or probe_code or (code is None and failures) or (ended is None and evidence.events("error"))
    if signal is None and not failed:
        return _well(evidence, clean=code == 0)
    state = "crashed"
    if signal is not None and signal not in _OWN_FAULTS:
        state = "stopped" if signal in _STOPS else "killed"
    by_signal = {Signals.SIGKILL: "killed", Signals.SIGHUP: "hangup"}
    # what the log names after its last work
    names = {s.name for s in (*fatal(evidence, *HELP), *failures)}
    names -= {"not_found"} - {s.name for s in failures}
    if any(s.name == "exception" and not _carries(s) for s in failures):
        names -= {"not_started"}  # a job script went on without what it missed
    if evidence.last_step is not None or evidence.lines:
        names -= {"rendezvous"}  # once they have trained together, whoever is gone was there
    reason = next((name for name in HELP if name in names), by_signal.get(signal) if signal else None)
    if reason == "nccl_timeout":
        reason = _timed_out(evidence)
    if ended is not None and ended.grace_s is not None:
        reason = "save_late"
    taken = (_TAKEN.get(s.fields.get("why", "")) for s in failures if s.name == "cancelled")
    if taken_for := next(filter(None, taken), None):
        state, reason = "killed", taken_for
    return Ending(
        state=state,
        reason=reason,
        error=_error(evidence, failures),
        signal=signal.name if signal else None,
        lines=(failures or fatal(evidence, "stop_asked"))[:3],
    )


def phase(evidence: Evidence) -> str | None:
    """What training was busy with when it ended: evaluation, saving, reference, loading; None for training itself, or
    where nothing tells."""
    raised = [s for s in fatal(evidence, "exception") if not _carries(s)]
    named = [s.fields["phase"] for s in raised if s.fields.get("phase")]
    if named:
        return named[0]
    if raised or evidence.log is None:
        return None
    since = evidence.lines[-1].line if evidence.lines else 0
    begun = {s.fields["path"] for s in evidence.signals("saving")}
    during = None
    for signal in evidence.signals(*_BUSY, "saved", "remaining", "tokenizer_saved"):
        if signal.line <= since:
            continue
        if signal.name in _BUSY:
            during = _BUSY[signal.name]
        elif signal.name != "tokenizer_saved" or signal.fields["path"] in begun:
            during = None
    return during


def _timed_out(evidence: Evidence) -> str:
    """Why a collective timed out, by what the processes were to do meanwhile."""
    during = phase(evidence)
    if during in ("saving", "evaluation"):
        return f"hang_{during}"
    first = [s for s in evidence.signals("nccl_timeout") if _FIRST_COLLECTIVE.search(s.fields.get("what", ""))]
    busy = evidence.signals("begun", "loading", "dataset_missed", "dataset_saved", "dataset_found", "planned", *_WORK)
    trained = evidence.last_step is not None or evidence.lines
    return "rendezvous" if first and not busy and not trained else "nccl_timeout"


def _carries(signal: Signal) -> bool:
    """Whether an exception only hands on that another process failed."""
    return signal.fields["type"].endswith(MESSENGERS)


def _well(evidence: Evidence, clean: bool) -> Ending:
    """The ending of a run of which nothing bad is known; `clean` if it is known to be over."""
    last, total, log = evidence.last_step, evidence.total_steps, evidence.log
    done = log.last("training_completed") if log else None
    alone = evidence.exit is None and evidence.probe is None
    clean = clean or (done is not None and not (log and log.steps and log.steps[-1].line > done.line))
    if done is not None and last is None:
        total = None  # the log begins after the last step
    summed = alone and log is not None and _summed_up(evidence, log)
    if summed and done is None:
        return Ending(state="completed")
    all_steps = last is not None and last >= total if total is not None else clean
    doubt, planned = None, evidence.manifest.steps
    if total is None and last is None and not alone and not evidence.events("resumed"):
        doubt = "no_steps"
    elif total is None and last is not None and planned is not None and last < planned:
        doubt = "fewer_steps"
    if all_steps and not doubt and (evidence.final_save or evidence.left_out_save):
        return Ending(state="completed")
    if not clean:
        return Ending(state="running", proved=False)
    if log and log.arguments.get("cache_dataset_only") == "True" and last is None:
        return Ending(state="completed")
    if all_steps:
        return Ending(state="stopped", proved=False, reason=doubt or "no_save")
    if alone and log and not log.summed:
        # of what is filtered, or on another stream, the last steps may be: a run that has ended sums up
        return Ending(state="running", proved=False)
    if not alone and fatal(evidence, "disk_full"):
        # training may go on without a log; whether it did is not known
        return Ending(state="stopped", proved=False, reason="disk_full")
    return Ending(state="stopped", reason="ended_early")


def _summed_up(evidence: Evidence, log: Log) -> bool:
    """Whether HF Trainer summed up a run whose last step it came to, and nothing shows a save that did not end."""
    last, total = evidence.last_step, evidence.total_steps
    if not log.summed or last is None or total is None or phase(evidence) is not None:
        return False
    # without a bar the last step that is known is the last one that was logged
    steps = [line.step for line in log.steps[-2:]]
    every = steps[1] - steps[0] if len(steps) == 2 else 1
    return last + max(1, every) > total


def _signal(evidence: Evidence, failures: tuple[Signal, ...]) -> Signals | None:
    """The signal that ended the run, by its exit or by what torchrun, accelerate and bash say."""
    numbers: list[int] = []
    if (ended := evidence.exit) is not None:
        code = ended.returncode
        if code == 0 and not ended.signal:
            return None
        numbers += [ended.signal or 0, -code, code - 128]
    if requests := fatal(evidence, "stop_asked"):
        name = requests[0].fields.get("name")
        numbers.append(Signals[name] if name else int(requests[0].fields["signal"]))
    children = [s for s in failures if s.name == "child_failed"]
    roots = [s for s in children if "rank" in s.fields] or children[-1:]
    for root in roots[:1]:
        code = int(root.fields["exitcode"])
        numbers += [-code, code - 128]
    numbers += [int(s.fields["signal"]) for s in failures if s.name == "child_signal" and not roots]
    # else it is an earlier run's, in the same file
    error = _error(evidence, failures) if failures or ended else None
    if error is not None and error["type"] == "KeyboardInterrupt":
        numbers.append(Signals.SIGINT)
    numbers += [SHELL_SIGNALS[s.fields["how"]] for s in failures if s.name == "shell_killed"]
    numbers += [Signals.SIGTERM for s in failures if s.name == "cancelled"]
    numbers += [Signals.SIGABRT for s in failures if s.name in ("terminated", "watchdog")]
    if ended is not None:
        # in the middle of imports an interrupt may end as any other exception
        numbers.append(ended.stopped or 0)
    return next((Signals(n) for n in numbers if n in set(Signals)), None)


def _probe_code(evidence: Evidence) -> int | None:
    """0 if every rank's probe saw a clean end, another number if one saw a bad one."""
    if evidence.probe is None:
        return None
    # a record of two attempts has two ends
    ends = [record.last("end") for record in evidence.probe.ranks.values()]
    if any(end.number("exit") for end in ends if end):
        return 1
    return 0 if not evidence.probe.missing and all(ends) else None


def _replaces(signal: Signal, before: Signal) -> bool:
    """Whether this later exception of the same chain says more: a worker's is raised again by its parent."""
    if not signal.fields["chained"] or _LOOK_UP.search(signal.fields["message"]):
        return False
    same = all(signal.fields[key] == before.fields[key] for key in ("type", "message"))
    return signal.fields["rank"] == before.fields["rank"] and not same


def _error(evidence: Evidence, failures: tuple[Signal, ...]) -> dict[str, str] | None:
    """The first real error: not the launcher's report of it, and the last of a chain."""
    raised = [s for s in failures if s.name == "exception"]
    real = [s for s in raised if not _carries(s)]
    if not real and evidence.log:  # another rank was still at work when this one was going under
        begun = max((s.line for s in evidence.log.all("begun")), default=0)
        past = _of_an_earlier(evidence.log)
        earlier = [s for s in evidence.log.all("exception") if s.fields["rank"] or s.line > begun]
        real = [s for s in earlier if s.line > past and not _carries(s)][-1:]
    left = [s for s in real if not _BEREFT.search(s.fields["message"])]
    chosen: Signal | None = None
    for signal in left or real:
        if chosen is None or _replaces(signal, chosen):
            chosen = signal
    # in a file that is appended to the last start counts; ranks of one say the same
    if refused := next((s for s in reversed(failures) if s.name == "refused"), None):
        return {"type": "arguments", "message": refused.fields["message"]}
    absent = next((s for s in failures if s.name in ("not_started", "not_found")), None)
    if absent is not None and chosen is None:
        return {"type": absent.name, "message": absent.fields["message"]}
    if chosen is not None:
        return _raised(chosen)
    for names in (("syntax", "terminated"), ("watchdog",)):
        if aborted := next((s for s in failures if s.name in names), None):
            # Python raised it nowhere: the message is beside its type, or right below it
            near = (s for s in evidence.signals("what") if 0 < s.line - aborted.line <= _WHAT_LINES)
            message = next(near, aborted).fields.get("message", "")
            return {"type": aborted.fields["type"], "message": message}
    for event in evidence.events("error"):
        return {"type": event.text("type") or "", "message": event.text("message") or "", "rank": str(event.rank)}
    return _raised(raised[0]) if raised else None


def _raised(exception: Signal) -> dict[str, str]:
    return {key: exception.fields[key] for key in ("type", "message", "at", "rank")}
