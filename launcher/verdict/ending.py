"""How a run ended, and its first real error: an `Ending`.

A traceback proves no crash: upstream prints training data into logs. An error counts if no work
follows it; so do an exit code and a signal.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from signal import Signals

from launcher.lazy_dataclass import dataclass
from launcher.upstream.logs import common
from launcher.upstream.logs.common import SHELL_SIGNALS
from launcher.verdict.evidence import Event, Evidence
from launcher.verdict.logs.scan import Log, Signal
from launcher.verdict.summary import MESSENGERS

HELP: Mapping[str, str] = {
    "oom": "GPU memory ran out: see the memory point",
    "oom_host": "host memory ran out: fewer dataset or dataloader workers, no offloading, or a "
    "larger machine",
    "refused": "the trainer's parser refused the arguments: `launch validate-config` names them",
    "gpu_fault": "a GPU is faulty: run without that GPU or node; `nvidia-smi -q -d ECC` and "
    "`dmesg` name it",
    "device_assert": "an index was out of range on the GPU, most often a token: "
    "CUDA_LAUNCH_BLOCKING=1 shows where",
    "illegal_access": "a GPU kernel read or wrote where it must not: CUDA_LAUNCH_BLOCKING=1 shows "
    "where",
    "nccl_timeout": "a collective timed out: one rank was busy or dead. If rank 0 was still "
    "tokenizing, run once with `cache_dataset_only: true` or raise `timeout`",
    "port_in_use": "another run holds the port: choose another main process port",
    "flash_attn_missing": "open-instruct needs `flash_attn`: `pip install --no-build-isolation "
    "flash-attn`",
    "shared_memory": "/dev/shm ran out: `--shm-size` or `--ipc=host` for a container, or fewer "
    "dataloader workers",
    "worker_killed": "a dataloader worker was killed, most often because host memory ran out: "
    "fewer workers",
    "no_gpu": "CUDA sees no such GPU: see `launch doctor`, CUDA_VISIBLE_DEVICES and the number of "
    "processes",
    "cuda_driver": "update the NVIDIA driver, or install torch for the CUDA version that it "
    "supports",
    "hub_access": "check the repository's name, set HF_TOKEN, and accept the terms of a gated "
    "repository",
    "hub_limit": "the hub allows no more requests for now: set HF_TOKEN, wait, or `launch prepare` "
    "once beforehand",
    "hub_unreachable": "the hub could not be reached: fetch model and data first, or name local "
    "folders",
    "wandb_login": "wandb has no key: set WANDB_API_KEY, or switch tracking off",
    "wandb_unreachable": "wandb could not be reached (open-instruct asks it even offline): switch "
    "tracking off",
    "too_many_files": "too many open files: raise `ulimit -n`, or use fewer dataloader workers",
    "rendezvous": "not all processes came together: check that every node runs and reaches the "
    "main address",
    "disk_full": "the disk is full, or a quota: free space, or point the output and cache folders "
    "elsewhere",
    "corrupt_file": "a file of weights is cut off or damaged: remove it, and fetch or save it "
    "again",
    "abi_mismatch": "a compiled package was built for another torch or CUDA than is installed: "
    "build it "
    "again, `pip install --no-build-isolation --force-reinstall --no-deps PACKAGE`",
    "loss_scale": "in fp16 the gradients overflow at every loss scale: train in bf16, or with a "
    "lower learning rate",
    "file_limit": "a file would have been larger than is allowed: raise `ulimit -f`",
    "not_started": "Python did not find what it was to run: check the path, the folder and the "
    "environment",
    "not_found": "the shell did not find the command: check PATH and which environment is active",
    "time_limit": "the scheduler's time limit was reached: ask for more, and save checkpoints to "
    "resume from",
    "save_late": "the checkpoint that was requested was not saved in time, and the run was stopped "
    "without: the same "
    "command continues from the one before; LAUNCH_SAVE_GRACE gives a save more seconds",
    "preempted": "the scheduler took the machine: the same command continues from the last "
    "checkpoint",
    "node_failure": "a node of the job failed: the same command continues from the last "
    "checkpoint, elsewhere",
    "hangup": "its terminal or connection was closed: start it with --detach, or under tmux or a "
    "scheduler",
    "violation": "the run violated `expect:` and was stopped: the failed point says why; "
    "`expect: {POINT: any}` accepts anything, `on_violation: warn` only warns",
    "hang_saving": "a save did not end on every rank: one still wrote or gathered the weights "
    "while the others "
    "waited. Check that every rank calls it, and that disk's speed and space; raise `ddp_timeout`, "
    "or save sharded",
    "hang_evaluation": "a rank hung in the evaluation, most often as ranks had different numbers "
    "of batches, or "
    "one was still computing metrics: check `dataloader_drop_last`, and raise `ddp_timeout`",
    "hang": "training made no progress: `probe/rank-N.stacks.txt` of the run shows where each rank "
    "was",
    "nccl_error": "NCCL could not set up or lost a connection: NCCL_DEBUG=INFO says why; with no "
    "socket "
    "interface found, set NCCL_SOCKET_IFNAME. The first error of another rank may be the cause",
    "killed": "killed from outside, most often because host memory ran out: see `dmesg` or the "
    "scheduler",
    "ended_early": "training ended without an error, before the announced last step",
    "no_save": "training ended without an error, but no final save was seen",
    "no_steps": "the command ended without an error, but neither the probe nor the log recorded an "
    "optimizer step",
    "fewer_steps": "training ended without an error after fewer steps than planned, and no log "
    "says how many",
}

_STOPS = {Signals.SIGINT, Signals.SIGTERM}
_REASONS_OF_SIGNALS = {Signals.SIGKILL: "killed", Signals.SIGHUP: "hangup"}
_SLURM_REASONS: Mapping[str, str] = {
    "TIME LIMIT": "time_limit",
    "PREEMPTION": "preempted",
    "NODE FAILURE": "node_failure",
}
"""Why Slurm ended a job, where nobody asked for it."""
_OWN_FAULTS = {Signals.SIGABRT, Signals.SIGSEGV, Signals.SIGBUS, Signals.SIGFPE, Signals.SIGILL}
"""Signals that a process brings on itself; the others come from outside."""
_WORK = (
    "total_steps",
    "liger_attempted",
    "liger_applied",
    "attention",
    "packing",
    "resumed",
    "begun",
    "loading",
    "reference_hit",
    "progress",
    "training_completed",
    "saved",
)
_FAILURES = (
    "exception",
    "child_failed",
    "child_signal",
    "refused",
    "shell_killed",
    "cancelled",
    "violation",
    "not_started",
    "terminated",
    "syntax",
    "watchdog",
)
_FIRST_COLLECTIVE_WORK = (
    "begun",
    "loading",
    "dataset_missed",
    "dataset_saved",
    "dataset_found",
    "planned",
    *_WORK,
)
"""Work that can keep a rank from its first collective."""
_ANY_PROGRAM = {pattern.name for pattern in common.PATTERNS} - {"begun"} | {"exception", "loading"}
"""Signals that any program may log: whatever uses a model loads it."""
_END_LINES = 10
"""What stands below the last line of an error: torchrun's frame, the shell, Slurm."""
_LAST_LINES = 3
"""Where a command that was not found ended the script; earlier ones did not."""
# What only points to the exception before
# (transformers/utils/import_utils.py::_LazyModule.__getattr__[raise ModuleNotFoundError #2],
# trl/_lazy_module.py::_LazyModule._get_module[raise RuntimeError]).
_LOOK_UP = re.compile(r"\(look up to see its traceback\)|^Could not import module '")
_LAUNCHED = re.compile(r"accelerate/commands/launch\.py:\d+$")
# What a rank says because another one is gone.
_PEER_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|remote process exited or there was a network error"
)
_OUT_OF_PHASE: Mapping[str, str] = {
    "save_begun": "saving",
    "saving": "saving",
    "evaluating": "evaluation",
}
"""What training is busy with, by the signal that announces it."""
_FIRST_COLLECTIVE = re.compile(r"SeqNum=[0-3]\b")
_MESSAGE_LINES = 3
"""Lines between what C++ terminates for and its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended.

    `state` is as in the `finish` point. `proved` is False if the run may have ended well and the
    evidence does not show it. `reason` is a key of `HELP`; `saved` is the checkpoint of a
    preemption.
    """

    state: str
    proved: bool = True
    reason: str | None = None
    error: Mapping[str, str] | None = None
    signal: str | None = None
    lines: tuple[Signal, ...] = ()
    saved: Event | None = None


def find_final_signals(evidence: Evidence, *names: str) -> tuple[Signal, ...]:
    """The signals of these names after which the log shows no more work.

    One step may still be logged: rank 0 prints it while another rank fails. A log that does not
    show a training counts only if the failure is at its end.
    """
    log = evidence.log
    if log is None:
        return ()
    if not _is_training(evidence, log) and not _ends_with_failure(log):
        return ()
    last_work = _find_end_of_previous_run(log)
    if len(log.steps) > 1:
        last_work = max(last_work, log.steps[-2].line)
    for signal in log.all(*_WORK):
        last_work = max(last_work, signal.line)
    return tuple(signal for signal in log.all(*names) if signal.line > last_work)


def _is_training(evidence: Evidence, log: Log) -> bool:
    if evidence.exit or evidence.probe or log.steps or log.blocks or log.last_bar:
        return True
    for signal in log.signals:
        if signal.name not in _ANY_PROGRAM and not signal.text.startswith("nohup: "):
            return True
    return False


def _ends_with_failure(log: Log) -> bool:
    for signal in log.all(*_FAILURES, "not_found", "stop_asked"):
        if signal.line > log.lines - _END_LINES:
            return True
    return False


def _find_end_of_previous_run(log: Log) -> int:
    """The last line of an earlier run in the same file: its launcher's report, before a start.

    accelerate reports its only child, so what is raised later is another run's. torchrun of one
    node may report before the ranks of the others. Of several jobs of Slurm the last one counts.
    """
    return max([0, *_find_reports_before_start(log), *_find_previous_cancellations(log)])


def _find_reports_before_start(log: Log) -> Iterator[int]:
    starts = log.all("begun", "bar_begun", "loading")
    exceptions = log.all("exception")
    errors = [*log.all("refused", "syntax"), *_drop_relayed(exceptions)]
    for report in exceptions:
        if not _is_relayed(report):
            continue
        is_of_accelerate = _LAUNCHED.search(report.fields["at"])
        if _is_followed(report, starts) or (is_of_accelerate and _is_followed(report, errors)):
            yield report.line


def _is_followed(signal: Signal, others: Sequence[Signal]) -> bool:
    return any(other.line > signal.line for other in others)


def _find_previous_cancellations(log: Log) -> Iterator[int]:
    cancellations = [signal for signal in log.all("cancelled") if signal.fields.get("job")]
    restart = 0
    for bar in log.all("bar_begun"):
        if bar.fields["total"] == str(log.total_steps):
            restart = bar.line
    for signal in cancellations:
        is_of_last_job = signal.fields["job"] == cancellations[-1].fields["job"]
        if not is_of_last_job or restart > signal.line:
            yield signal.line


def find_ending(evidence: Evidence) -> Ending:
    """How the run ended: an exit record counts first, then the log and the probe."""
    saved = evidence.events("preempted")
    if saved:
        # the first machine records this once all ranks have saved
        return Ending(state="preempted", saved=saved[0])
    stopped = evidence.stopped
    if stopped is not None:
        # a process ended itself, and the others were ended for it: their words do not count
        error = _describe_event_error(stopped, stopped.name)
        return Ending(state="stopped", reason=stopped.name, error=error)
    failures = _find_failures(evidence)
    violation = _find_first(failures, "violation")
    exit = evidence.exit
    has_exited_well = exit is not None and exit.returncode == 0
    if violation is not None and not has_exited_well:
        return _build_violation_ending(violation)
    return _judge_end(evidence, failures)


def _judge_end(evidence: Evidence, failures: Sequence[Signal]) -> Ending:
    """How a run ended that did not end itself."""
    exit = evidence.exit
    probe_code = _derive_probe_code(evidence)
    code = probe_code
    if exit is not None:
        code = exit.returncode
    signal = _find_ending_signal(evidence, failures)
    # what started the script may end well even so
    has_failed = bool(code or probe_code or (code is None and failures))
    if exit is None and evidence.events("error"):
        has_failed = True
    if signal is None and not has_failed:
        return _judge_end_without_failure(evidence, is_over=code == 0)
    state = "killed"
    if signal is None or signal in _OWN_FAULTS:
        state = "crashed"
    elif signal in _STOPS:
        state = "stopped"
    reason = _find_reason(evidence, failures, signal)
    for cancelled in _select_named(failures, "cancelled"):
        slurm_reason = _SLURM_REASONS.get(cancelled.fields.get("why", ""))
        if slurm_reason is not None:
            state = "killed"
            reason = slurm_reason
            break
    lines = tuple(failures) or find_final_signals(evidence, "stop_asked")
    return Ending(
        state=state,
        reason=reason,
        error=_find_first_error(evidence, failures),
        signal=signal.name if signal else None,
        lines=lines[:3],
    )


def _find_failures(evidence: Evidence) -> tuple[Signal, ...]:
    last_lines = 0
    if evidence.log is not None:
        last_lines = evidence.log.lines - _LAST_LINES
    failures = []
    for signal in find_final_signals(evidence, *_FAILURES, "not_found"):
        # a job script goes on after a missing command: that counts only at the very end
        if signal.name != "not_found" or signal.line > last_lines:
            failures.append(signal)
    return tuple(failures)


def _build_violation_ending(violation: Signal) -> Ending:
    message = violation.fields["message"]
    kind = "hang" if message.startswith("nothing moved ") else "violation"
    error = {"type": kind, "message": message}
    return Ending(state="stopped", reason=kind, error=error, lines=(violation,))


def _find_reason(
    evidence: Evidence, failures: Sequence[Signal], signal: Signals | None
) -> str | None:
    """The key of `HELP` for what the log names after its last work, or for the signal."""
    exit = evidence.exit
    if exit is not None and exit.grace_s is not None:
        return "save_late"
    failure_names = {failure.name for failure in failures}
    names = {final.name for final in find_final_signals(evidence, *HELP)} | failure_names
    if "not_found" not in failure_names:
        names.discard("not_found")
    if _drop_relayed(_select_named(failures, "exception")):
        # a job script went on without what it missed
        names.discard("not_started")
    if evidence.last_step is not None or evidence.lines:
        # the ranks had found each other before they trained
        names.discard("rendezvous")
    for name in HELP:
        if name == "nccl_timeout" and name in names:
            return _find_timeout_reason(evidence)
        if name in names:
            return name
    if signal is None:
        return None
    return _REASONS_OF_SIGNALS.get(signal)


def find_phase(evidence: Evidence) -> str | None:
    """What training was busy with when it ended: evaluation, saving, reference, loading.

    None for training itself, or if nothing tells.
    """
    exceptions = _drop_relayed(find_final_signals(evidence, "exception"))
    for exception in exceptions:
        if exception.fields.get("phase"):
            return exception.fields["phase"]
    if exceptions or evidence.log is None:
        return None
    last_step_line = 0
    if evidence.lines:
        last_step_line = evidence.lines[-1].line
    saving = {signal.fields["path"] for signal in evidence.signals("saving")}
    phase = None
    for signal in evidence.signals(*_OUT_OF_PHASE, "saved", "remaining", "tokenizer_saved"):
        if signal.line <= last_step_line:
            continue
        if signal.name in _OUT_OF_PHASE:
            phase = _OUT_OF_PHASE[signal.name]
        elif signal.name != "tokenizer_saved" or signal.fields["path"] in saving:
            phase = None
    return phase


def _find_timeout_reason(evidence: Evidence) -> str:
    """Why a collective timed out, by what the processes did meanwhile."""
    phase = find_phase(evidence)
    if phase in ("saving", "evaluation"):
        return f"hang_{phase}"
    if evidence.last_step is not None or evidence.lines:
        return "nccl_timeout"
    if evidence.signals(*_FIRST_COLLECTIVE_WORK):
        return "nccl_timeout"
    for signal in evidence.signals("nccl_timeout"):
        if _FIRST_COLLECTIVE.search(signal.fields.get("what", "")):
            return "rendezvous"
    return "nccl_timeout"


def _is_relayed(exception: Signal) -> bool:
    """Whether an exception only reports that another process failed."""
    return exception.fields["type"].endswith(MESSENGERS)


def _drop_relayed(exceptions: Sequence[Signal]) -> list[Signal]:
    return [exception for exception in exceptions if not _is_relayed(exception)]


def _select_named(signals: Sequence[Signal], *names: str) -> list[Signal]:
    return [signal for signal in signals if signal.name in names]


def _find_first(signals: Sequence[Signal], *names: str) -> Signal | None:
    for signal in signals:
        if signal.name in names:
            return signal
    return None


def _judge_end_without_failure(evidence: Evidence, *, is_over: bool) -> Ending:
    """The ending of a run of which nothing bad is known; `is_over` if it is known to have ended."""
    log = evidence.log
    last = evidence.last_step
    total = evidence.total_steps
    is_alone = evidence.exit is None and evidence.probe is None
    completed = None
    if log is not None:
        completed = log.last("training_completed")
    if log is not None and completed is not None:
        if not log.steps or log.steps[-1].line <= completed.line:
            is_over = True
        if last is None:
            # the log begins after the last step
            total = None
    elif is_alone and log is not None and _is_summed_up(evidence, log):
        return Ending(state="completed")
    has_all_steps = is_over
    if total is not None:
        has_all_steps = last is not None and last >= total
    doubt = None
    if total is None:
        doubt = _find_doubt_without_total(evidence, is_alone=is_alone)
    if has_all_steps and doubt is None and (evidence.final_save or evidence.left_out_save):
        return Ending(state="completed")
    if not is_over:
        return Ending(state="running", proved=False)
    if log is not None and log.arguments.get("cache_dataset_only") == "True" and last is None:
        return Ending(state="completed")
    if has_all_steps:
        return Ending(state="stopped", proved=False, reason=doubt or "no_save")
    if is_alone and log is not None and not log.summed:
        # the last steps may have been filtered out, or on another stream
        return Ending(state="running", proved=False)
    if not is_alone and find_final_signals(evidence, "disk_full"):
        # training may have gone on without a log
        return Ending(state="stopped", proved=False, reason="disk_full")
    return Ending(state="stopped", reason="ended_early")


def _find_doubt_without_total(evidence: Evidence, *, is_alone: bool) -> str | None:
    """Why a run may not have made all steps, if no log says how many they are."""
    last = evidence.last_step
    if last is None and (is_alone or evidence.events("resumed")):
        return None
    if last is None:
        return "no_steps"
    planned = evidence.manifest.steps
    if planned is not None and last < planned:
        return "fewer_steps"
    return None


def _is_summed_up(evidence: Evidence, log: Log) -> bool:
    """Whether HF Trainer summed up a run after its last step, and no save was left unfinished."""
    last = evidence.last_step
    total = evidence.total_steps
    if not log.summed or last is None or total is None or find_phase(evidence) is not None:
        return False
    # without a bar, the last known step is the last one that was logged
    interval = 1
    if len(log.steps) > 1:
        interval = max(1, log.steps[-1].step - log.steps[-2].step)
    return last + interval > total


def _find_ending_signal(evidence: Evidence, failures: Sequence[Signal]) -> Signals | None:
    """The signal that ended the run, by its exit or by torchrun, accelerate and bash."""
    exit = evidence.exit
    if exit is not None and exit.returncode == 0 and not exit.signal:
        return None
    for number in _find_signal_numbers(evidence, failures):
        if number in set(Signals):
            return Signals(number)
    return None


def _find_signal_numbers(evidence: Evidence, failures: Sequence[Signal]) -> Iterator[int]:
    """What may be the number of the signal, the best evidence first."""
    exit = evidence.exit
    if exit is not None:
        yield exit.signal or 0
        yield from _decode_return_code(exit.returncode)
    for request in find_final_signals(evidence, "stop_asked")[:1]:
        name = request.fields.get("name")
        yield Signals[name] if name else int(request.fields["signal"])
    children = _select_named(failures, "child_failed")
    first_failures = [child for child in children if "rank" in child.fields] or children[-1:]
    for child in first_failures[:1]:
        yield from _decode_return_code(int(child.fields["exitcode"]))
    if not first_failures:
        for signal in _select_named(failures, "child_signal"):
            yield int(signal.fields["signal"])
    # without a failure, an error is an earlier run's in the same file
    if failures or exit is not None:
        error = _find_first_error(evidence, failures)
        if error is not None and error["type"] == "KeyboardInterrupt":
            yield Signals.SIGINT
    for signal in _select_named(failures, "shell_killed"):
        yield SHELL_SIGNALS[signal.fields["how"]]
    if _select_named(failures, "cancelled"):
        yield Signals.SIGTERM
    if _select_named(failures, "terminated", "watchdog"):
        yield Signals.SIGABRT
    if exit is not None:
        # during imports, an interrupt may end as any other exception
        yield exit.stopped or 0


def _decode_return_code(returncode: int) -> tuple[int, int]:
    """The signal of a return code, as Python and as a shell write it."""
    return -returncode, returncode - 128


def _derive_probe_code(evidence: Evidence) -> int | None:
    """0 if every rank's probe saw a clean end, 1 if one saw a bad one, else None."""
    if evidence.probe is None:
        return None
    is_complete = not evidence.probe.missing
    for record in evidence.probe.ranks.values():
        # a record of two attempts has two ends
        end = record.last("end")
        if end is None:
            is_complete = False
        elif end.number("exit"):
            return 1
    if not is_complete:
        return None
    return 0


def _find_first_error(evidence: Evidence, failures: Sequence[Signal]) -> dict[str, str] | None:
    """The first real error: not a launcher's report of it, and the last of a chain."""
    # in a file that is appended to the last start counts; ranks of one say the same
    refusals = _select_named(failures, "refused")
    if refusals:
        return {"type": "arguments", "message": refusals[-1].fields["message"]}
    exception = _choose_last_of_chain(_find_real_exceptions(evidence, failures))
    if exception is not None:
        return _describe_exception(exception)
    missing = _find_first(failures, "not_started", "not_found")
    if missing is not None:
        return {"type": missing.name, "message": missing.fields["message"]}
    abort = _find_first(failures, "syntax", "terminated") or _find_first(failures, "watchdog")
    if abort is not None:
        return {"type": abort.fields["type"], "message": _find_abort_message(evidence, abort)}
    for event in evidence.events("error"):
        return _describe_event_error(event, event.text("type") or "")
    relayed = _find_first(failures, "exception")
    if relayed is None:
        return None
    return _describe_exception(relayed)


def _find_real_exceptions(evidence: Evidence, failures: Sequence[Signal]) -> list[Signal]:
    """The exceptions that are no reports of others, without those for a lost peer if possible."""
    real = _drop_relayed(_select_named(failures, "exception"))
    if not real and evidence.log is not None:
        real = _find_last_real_exception(evidence.log)
    causes = []
    for exception in real:
        if not _PEER_LOST.search(exception.fields["message"]):
            causes.append(exception)
    return causes or real


def _find_last_real_exception(log: Log) -> list[Signal]:
    """The last exception of this run, though another rank was still at work after it."""
    start = 0
    begun = log.last("begun")
    if begun is not None:
        start = begun.line
    previous = _find_end_of_previous_run(log)
    real = []
    for exception in _drop_relayed(log.all("exception")):
        is_of_this_start = exception.fields["rank"] or exception.line > start
        if is_of_this_start and exception.line > previous:
            real.append(exception)
    return real[-1:]


def _choose_last_of_chain(exceptions: Sequence[Signal]) -> Signal | None:
    chosen: Signal | None = None
    for exception in exceptions:
        if chosen is None or _replaces(exception, chosen):
            chosen = exception
    return chosen


def _replaces(later: Signal, earlier: Signal) -> bool:
    """Whether a later exception of a chain says more: a parent raises a worker's again."""
    if not later.fields["chained"] or _LOOK_UP.search(later.fields["message"]):
        return False
    if later.fields["rank"] != earlier.fields["rank"]:
        return False
    is_same_type = later.fields["type"] == earlier.fields["type"]
    return not is_same_type or later.fields["message"] != earlier.fields["message"]


def _find_abort_message(evidence: Evidence, abort: Signal) -> str:
    """The message of an error that Python did not raise: beside its type, or right below it."""
    for signal in evidence.signals("what"):
        if 0 < signal.line - abort.line <= _MESSAGE_LINES:
            return signal.fields.get("message", "")
    return abort.fields.get("message", "")


def _describe_event_error(event: Event, kind: str) -> dict[str, str]:
    message = event.text("message") or ""
    return {"type": kind, "message": message, "rank": str(event.rank)}


def _describe_exception(exception: Signal) -> dict[str, str]:
    return {key: exception.fields[key] for key in ("type", "message", "at", "rank")}
