"""What the log of any trainer says when it fails: torch, torchrun, accelerate, the shell, Slurm."""

from __future__ import annotations

from launcher.logs import Pattern, pattern

_ELASTIC = "torch/distributed/elastic/multiprocessing"

PATTERNS: tuple[Pattern, ...] = (
    pattern(
        "oom",
        "ut of memory",
        r"(?:CUDA|HIP|XPU|cuda|hip)[^\n]{0,60}[Oo]ut of memory"
        r"(?:.*Tried to allocate (?P<tried>[\d.]+ \w+))?(?:.*GPU (?P<gpu>\d+) has)?",
        "torch CUDACachingAllocator.cpp; torch/cuda/__init__.py OutOfMemoryError",
    ),
    pattern(
        "oom", "CUBLAS_STATUS_ALLOC_FAILED", r"CUBLAS_STATUS_ALLOC_FAILED", "torch CUDABlas.cpp"
    ),
    pattern(
        "oom_host",
        "allocate memory",
        r"DefaultCPUAllocator: (?:not enough|can't allocate) memory|Cannot allocate memory",
        "torch c10/core/impl/alloc_cpu.cpp; errno ENOMEM",
    ),
    pattern("oom_host", "oom-kill", r"oom.kill event|oom-kill:", "slurmstepd; the kernel"),
    pattern(
        "child_failed",
        "failed (exitcode: ",
        r"failed \(exitcode: (?P<exitcode>-?\d+)\)(?: local_rank: (?P<rank>\d+))?",
        f"{_ELASTIC}/api.py:1003",
    ),
    pattern(
        "child_failed",
        "exitcode  : ",
        r"exitcode  : (?P<exitcode>-?\d+) +\(pid: \d+\)",
        f"{_ELASTIC}/errors/__init__.py:188",
    ),
    pattern(
        "child_failed",
        "non-zero exit status",
        r"returned non-zero exit status (?P<exitcode>\d{1,12})",
        "subprocess.CalledProcessError, raised by accelerate/commands/launch.py:999,1070",
    ),
    pattern(
        "child_signal",
        "died with <Signals",
        r"died with <Signals\.(?P<name>SIG\w+): (?P<signal>\d{1,12})>",
        "subprocess.CalledProcessError, raised by accelerate/commands/launch.py:999,1070",
    ),
    pattern(
        "child_signal",
        "received by PID",
        r"Signal (?P<signal>\d{1,12}) \((?P<name>SIG\w+)\) received by PID",
        f"{_ELASTIC}/errors/__init__.py:143",
    ),
    pattern(
        "stop_asked",
        "got signal: ",
        r"Process \d+ got signal: (?P<signal>\d{1,12})",
        f"{_ELASTIC}/api.py:86 SignalException",
    ),
    pattern("shell_killed", "Killed", r"(?:^|\d )Killed(?:\s{2,}|$)", "bash, after SIGKILL"),
    pattern(
        "cancelled",
        "CANCELLED AT",
        r"slurmstepd: error: \*\*\*.* CANCELLED AT \S+(?: DUE TO (?P<why>[A-Z ]+?))? *\*\*\*",
        "slurmstepd",
    ),
    pattern(
        "refused",
        "error: ",
        r"(?:\w\.py|^[\w-]+): error: (?P<message>(?:argument |unrecognized |ambiguous |"
        r"the following |one of |expected ).*)",
        "argparse.ArgumentParser.error",
    ),
    pattern(
        "refused",
        "are not used by the HfArgumentParser",
        r"(?P<message>Some (?:specified arguments|keys) are not used by the HfArgumentParser: .*)",
        "transformers/hf_argparser.py:354,383",
    ),
    pattern(
        "nccl_timeout",
        "Watchdog caught collective operation timeout",
        r"Watchdog caught collective operation timeout: (?P<what>.*)",
        "torch ProcessGroupNCCL.cpp",
    ),
    pattern(
        "port_in_use", "ddress already in use", r"[Aa]ddress already in use", "errno EADDRINUSE"
    ),
    pattern(
        "flash_attn_missing",
        "flash_attn",
        r"No module named 'flash_attn|package flash_attn seems to be not installed",
        "open_instruct/model_utils.py:69; transformers/modeling_utils.py",
    ),
    pattern("disk_full", "No space left on device", r"No space left on device", "errno ENOSPC"),
)
