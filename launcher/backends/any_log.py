"""What the log of any trainer says when it fails: torch, torchrun, accelerate, the shell, Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from signal import Signals

from launcher.logs import Pattern, pattern

_ELASTIC = "torch/distributed/elastic/multiprocessing"
_TORCHRUN = (
    "distributed/elastic/multiprocessing/api.py",
    "distributed.elastic.multiprocessing.api",
)
# How a parser's refusal goes on; the edges of a log are searched for all others.
_REFUSALS = (
    *(f"{name}: error: argument --" for name in (".py", "launch", "trl", "torchrun", "deepspeed")),
    ": error: unrecognized arguments: ",
    ": error: ambiguous option: ",
    ": error: the following arguments are required: ",
    ": error: one of the arguments ",
)
# How the probe begins to say which part of the contract is broken.
_BROKEN = (
    *("loss is ", "gradient is "),
    *(f"{point} expected " for point in ("liger", "packing", "attention")),
    *(f"{point} expected " for point in ("dataset_cache", "reference_cache")),
)

# What may stand before a word of the shell's: a number, a job, a bar, or what collects lines.
_SHELL = r"(?:^|[\]|>] ?|[\d\]]: ?|[ZF] |\d |^\[\d+\][+-]? +)"
SHELL_SIGNALS: Mapping[str, Signals] = {
    "Killed": Signals.SIGKILL,
    "Terminated": Signals.SIGTERM,
    "Segmentation fault": Signals.SIGSEGV,
    "Aborted": Signals.SIGABRT,
    "Bus error": Signals.SIGBUS,
    "Illegal instruction": Signals.SIGILL,
    "Floating point exception": Signals.SIGFPE,
    "Out Of Memory": Signals.SIGKILL,
}
"""How bash (glibc's strsignal) and srun say which signal ended a process."""

# Raised: what is only warned about is tried again, or done without. Others than the hub, such as wandb,
# answer in the same words.
_RAISED = r"\b(?:requests|urllib3|httpx|huggingface_hub)\.[\w.]+: "
_BY_HUB = r"\b(?:huggingface_hub\.[\w.]+: |(?:requests|httpx)\.[\w.]+: (?=.*//huggingface\.co/))"
_SLURMSTEPD = r"slurmstepd(?:-[\w.-]+)?: error: "

PATTERNS: tuple[Pattern, ...] = (
    pattern(
        "begun",
        "nohup: ignoring input",
        r"^nohup: ignoring input",
        "coreutils nohup, before what it starts",
        anchors=(),
    ),
    pattern(
        "begun",
        "get_accelerator] Setting ",
        r"real_accelerator\.py:\d+:get_accelerator\] Setting ",
        "deepspeed/accelerator/real_accelerator.py, while it is imported",
    ),
    pattern(
        "oom",
        "ut of memory",
        r"(?:CUDA|HIP|XPU|MPS|cuda|hip|Cuda failure)[^\n]{0,60}[Oo]ut of memory"
        r"(?:.*Tried to allocate (?P<tried>[\d.]+ \w+))?(?:.*GPU (?P<gpu>\d+) has)?",
        "torch CUDACachingAllocator.cpp, MPSAllocator.mm; torch/cuda/__init__.py OutOfMemoryError; NCCL",
        anchors=(
            *(f"{device} out of memory. Tried to allocate " for device in ("CUDA", "HIP", "XPU")),
            *(f"{device} error: out of memory" for device in ("CUDA", "HIP")),
            "Error: CUDA out of memory",
            "MPS backend out of memory",
            *(f"Cuda failure {number}'out of memory'" for number in ("", "2 ")),
        ),
    ),
    pattern(
        "oom", "CUBLAS_STATUS_ALLOC_FAILED", r"CUBLAS_STATUS_ALLOC_FAILED", "torch CUDABlas.cpp"
    ),
    pattern(
        "oom_host",
        "allocate memory",
        r"DefaultCPUAllocator: (?:not enough|can't allocate) memory|Cannot allocate memory",
        "torch c10/core/impl/alloc_cpu.cpp; errno ENOMEM",
        anchors=(
            "DefaultCPUAllocator: can't allocate memory",
            " Cannot allocate memory",
            "(Cannot allocate memory",
        ),
    ),
    pattern(
        "oom_host",
        "MemoryError",
        r"(?:^|[\s.])(?:_Array|Arrow)?MemoryError(?::|$)",
        "CPython; numpy/_core/_exceptions.py; pyarrow/error.pxi",
        anchors=("_exceptions._ArrayMemoryError: ", "pyarrow.lib.ArrowMemoryError: "),
    ),
    pattern(
        "oom_host",
        "std::bad_alloc",
        r"terminate called after throwing an instance of 'std::bad_alloc'",
        "libstdc++",
        anchors=("terminate called after throwing an instance of 'std::bad_alloc'",),
    ),
    pattern(
        "oom_host",
        "oom-kill",
        r"oom.kill event|oom-kill:",
        "slurmstepd; the kernel",
        anchors=("slurmstepd: error: Detected ", "oom-kill:constraint=CONSTRAINT_"),
    ),
    pattern(
        "oom_host",
        "oom_kill event",
        r"Detected \d+ oom_kill event",
        "slurmstepd",
        anchors=("slurmstepd: error: Detected ",),
    ),
    pattern(
        "oom_host",
        ": Out Of Memory",
        r"srun: error: \S+: tasks? [\d,-]+: Out Of Memory$",
        "srun, of a task that the cgroup's limit ended",
        anchors=(),
    ),
    pattern(
        "oom_host",
        "ut of memory: Killed process ",
        r"ut of memory: Killed process \d+",
        "the kernel's own log",
    ),
    pattern(
        "oom_host",
        ": job killed",
        r"TERM_MEMLIMIT: job killed|=>> PBS: job killed: v?mem ",
        "LSF and PBS, of a job that took more than it had asked for",
        anchors=(
            "TERM_MEMLIMIT: job killed ",
            *(f"=>> PBS: job killed: {what} " for what in ("mem", "vmem")),
        ),
    ),
    pattern(
        "oom_host",
        "node running low on memory",
        r"OutOfMemoryError: Task was killed due to the node running low on memory",
        "ray, as which SkyPilot runs a job",
    ),
    pattern(
        "worker_killed",
        "is killed by signal: Killed",
        r"DataLoader worker \(pid \d+\) is killed by signal: Killed",
        "torch csrc/DataLoader.cpp",
    ),
    pattern(
        "shared_memory",
        "is killed by signal: Bus error",
        r"DataLoader worker \(pid \d+\) is killed by signal: Bus error",
        "torch csrc/DataLoader.cpp",
    ),
    pattern(
        "shared_memory",
        "Unexpected bus error encountered in worker",
        r"Unexpected bus error encountered in worker",
        "torch csrc/DataLoader.cpp",
    ),
    pattern(
        "shared_memory",
        "unable to write to file </torch_",
        r"unable to (?:write to|resize) file </torch_",
        "torch ATen/MapAllocator.cpp",
    ),
    pattern(
        "child_failed",
        "failed (exitcode: ",
        r"failed \(exitcode: (?P<exitcode>-?\d+)\)(?: local_rank: (?P<rank>\d+))?",
        f"{_ELASTIC}/api.py:1003",
        anchors=_TORCHRUN,
    ),
    pattern(
        "child_failed",
        "exitcode  : ",
        r"exitcode  : (?P<exitcode>-?\d+) +\(pid: \d+\)",
        f"{_ELASTIC}/errors/__init__.py:188",
        anchors=("Root Cause (first observed failure):", "  error_file: <N/A>\n  traceback : "),
    ),
    pattern(
        "child_failed",
        "non-zero exit status",
        r"returned non-zero exit status (?P<exitcode>\d{1,12})",
        "subprocess.CalledProcessError, raised by accelerate/commands/launch.py:999,1070",
        anchors=("returned non-zero exit status ",),
    ),
    pattern(
        "child_failed",
        " exits with return code = ",
        r"launch\.py:\d+:sigkill_handler\] .* exits with return code = (?P<exitcode>-?\d{1,12})$",
        "deepspeed/launcher/launch.py sigkill_handler",
    ),
    pattern(
        "child_failed",
        ": Exited with exit code ",
        r"srun: error: \S+: tasks? [\d,-]+: Exited with exit code (?P<exitcode>\d{1,12})$",
        "srun",
    ),
    pattern(
        "child_failed",
        "command terminated with exit code ",
        r"command terminated with exit code (?P<exitcode>\d{1,12})$",
        "kubectl exec",
        anchors=(),
    ),
    pattern(
        "child_signal",
        "died with <Signals",
        r"died with <Signals\.(?P<name>SIG\w+): (?P<signal>\d{1,12})>",
        "subprocess.CalledProcessError, raised by accelerate/commands/launch.py:999,1070",
        anchors=tuple(f"died with <Signals.{known.name}" for known in Signals),
    ),
    pattern(
        "child_signal",
        "received by PID",
        r"Signal (?P<signal>\d{1,12}) \((?P<name>SIG\w+)\) received by PID",
        f"{_ELASTIC}/errors/__init__.py:143",
        anchors=tuple(f"({known.name}) received by PID " for known in Signals),
    ),
    pattern(
        "stop_asked",
        "got signal: ",
        r"Process \d+ got signal: (?P<signal>\d{1,12})",
        f"{_ELASTIC}/api.py:86 SignalException",
        anchors=("SignalException: Process ",),
    ),
    pattern(
        "stop_asked",
        "Main process received SIG",
        r"launch\.py:\d+:sigkill_handler\] Main process received (?P<name>SIG(?:INT|TERM)), exiting",
        "deepspeed/launcher/launch.py sigkill_handler",
    ),
    pattern(
        "stop_asked",
        " death signal, shutting down workers",
        r"Received (?:Signals\.(?P<name>SIG\w+)|(?P<signal>\d{1,12})) death signal, shutting down workers",
        "torch/distributed/elastic/agent/server/api.py",
    ),
    *(
        pattern(
            "shell_killed",
            word,
            _SHELL + rf"(?P<how>{word})(?: \(core dumped\))?(?:\s{{2,}}|$)",
            "bash, after a signal; behind a progress bar, which ends no line",
            anchors=(),  # eight spaces are everywhere
        )
        for word in SHELL_SIGNALS
    ),
    pattern(
        "shell_killed",
        "Fatal Python error: ",
        rf"Fatal Python error: (?P<how>{'|'.join(SHELL_SIGNALS)})$",
        "CPython Modules/faulthandler.c",
        anchors=(),
    ),
    pattern(
        "terminated",
        "terminate called after throwing an instance of ",
        r"terminate called after throwing an instance of '(?P<type>[^']+)'",
        "libstdc++: an exception that nothing caught, then SIGABRT",
    ),
    pattern(
        "watchdog",
        "watchdog thread terminated with exception: ",
        r"(?P<type>watchdog) thread terminated with exception: (?P<message>.*)",
        "torch ProcessGroupNCCL.cpp: the process goes down with it",
    ),
    pattern(
        "what",
        "what():  ",
        r"^ *what\(\):  (?P<message>.*)",
        "libstdc++, right behind that line",
        anchors=(),
    ),
    pattern(
        "syntax",
        "Error: ",
        r"^(?P<type>SyntaxError|IndentationError|TabError): (?P<message>.+)",
        "CPython, of the script itself: no traceback stands before it",
        anchors=(),
    ),
    pattern(
        "not_started",
        "python",
        r"(?:^|[\s/:|>])python[\d.]*: (?P<message>can't open file .*|No module named \S+$)",
        "CPython Modules/main.c; runpy",
        anchors=(),
    ),
    pattern(
        "not_found",
        "not found",
        r"(?P<message>(?:[\w./-]+: )?(?:line \d+: )?[\w./-]+: command not found"
        r"|zsh: command not found: \S+|\bsh: \d+: [\w./-]+: not found)$",
        "bash, zsh, dash",
        anchors=(),
    ),
    pattern(
        "cancelled",
        "CANCELLED AT",
        _SLURMSTEPD
        + r"\*\*\* \w+ (?P<job>\d*).* CANCELLED AT \S+(?: DUE TO (?P<why>[A-Z ]+?))?(?:,[^*]*)?"
        r" *\*\*\*",
        "slurmstepd",
        anchors=("slurmstepd: error: *** ", "DUE TO NODE FAILURE, SEE SLURMCTLD LOG"),
    ),
    pattern(
        "cancelled",
        ": job killed ",
        r"(?:^|\s)TERM_(?P<why>[A-Z_]+): job killed ",
        "LSF, in the report of a job",
        anchors=tuple(
            f"TERM_{why}: job killed " for why in ("RUNLIMIT", "MEMLIMIT", "PREEMPT", "OWNER")
        ),
    ),
    pattern(
        "cancelled",
        "PBS: job killed: ",
        r"=>> PBS: job killed: (?P<why>\w+)",
        "PBS, at a limit of a job",
        anchors=tuple(f"=>> PBS: job killed: {what} " for what in ("walltime", "mem", "vmem")),
    ),
    pattern(
        "refused",
        "error: ",
        r"(?:\w\.py|^[\w-]+(?: [\w<>\[\] -]+)?): error: (?P<message>(?:argument |unrecognized |ambiguous |"
        r"the following |one of |expected ).*)",
        "argparse.ArgumentParser.error",
        anchors=_REFUSALS,
    ),
    pattern(
        "refused",
        "are not used by the HfArgumentParser",
        r"(?P<message>Some (?:specified arguments|keys) are not used by the HfArgumentParser: \[.*)",
        "transformers/hf_argparser.py:354,383",
    ),
    pattern(
        "nccl_timeout",
        "Watchdog caught collective operation timeout",
        r"Watchdog caught collective operation timeout: (?P<what>.*)",
        "torch ProcessGroupNCCL.cpp",
    ),
    pattern(
        "nccl_timeout",
        "ProcessGroupNCCL's watchdog got stuck for ",
        r"ProcessGroupNCCL's watchdog got stuck for (?P<what>\d+ seconds)",
        "torch ProcessGroupNCCL.cpp",
    ),
    pattern(
        "nccl_timeout",
        "ms for recv operation to complete",
        r"Timed out waiting (?P<what>\d+ms for recv operation to complete)",
        "gloo/transport/tcp/unbound_buffer.cc",
    ),
    pattern(
        "nccl_timeout",
        "ms for send operation to complete",
        r"Timed out waiting (?P<what>\d+ms for send operation to complete)",
        "gloo/transport/tcp/unbound_buffer.cc",
    ),
    pattern(
        "port_in_use",
        "ddress already in use",
        r"[Aa]ddress already in use",
        "errno EADDRINUSE",
        anchors=(" Address already in use", " address already in use"),
    ),
    pattern(
        "port_in_use",
        "Tried to launch distributed communication on port ",
        r"Tried to launch distributed communication on port `?\d+`?, but another process",
        "accelerate/utils/launch.py:245,517",
    ),
    pattern(
        "nccl_error",
        "NCCL error in: ",
        r"NCCL error in: \S+, (?P<what>.*?)(?:, NCCL version (?P<version>[\d.]+))?$",
        "torch csrc/distributed/c10d/NCCLUtils.cpp",
        anchors=("DistBackendError: NCCL error in: ", "RuntimeError: NCCL error in: "),
    ),
    pattern(
        "nccl_error",
        "Bootstrap : no socket interface found",
        r"Bootstrap : no socket interface found",
        "NCCL bootstrap.cc",
    ),
    pattern(
        "rendezvous",
        " seconds waiting for clients. ",
        r"Timed out after \d+ seconds waiting for clients\. (?P<joined>\d+/\d+) clients joined",
        "torch csrc/distributed/c10d/TCPStore.cpp",
    ),
    pattern(
        "rendezvous",
        "wait timeout after ",
        r"wait timeout after \d+ms, keys: ",
        "torch csrc/distributed/c10d/TCPStore.cpp",
        anchors=("DistStoreError: wait timeout after ",),
    ),
    pattern(
        "rendezvous",
        "The client socket has timed out after ",
        r"The client socket has timed out after .* while trying to connect to \((?P<address>[^)]+)\)",
        "torch csrc/distributed/c10d/socket.cpp",
    ),
    pattern(
        "gpu_fault",
        "uncorrectable ECC error encountered",
        r"uncorrectable ECC error encountered",
        "cudaErrorECCUncorrectable of the CUDA runtime",
    ),
    pattern(
        "gpu_fault",
        "GPU has fallen off the bus",
        r"GPU has fallen off the bus",
        "the kernel's own log, Xid 79 of the NVIDIA driver",
    ),
    pattern(
        "device_assert",
        "device-side assert triggered",
        r"(?:CUDA|HIP) error: device-side assert triggered",
        "cudaErrorAssert of the CUDA runtime",
    ),
    pattern(
        "illegal_access",
        "an illegal memory access was encountered",
        r"(?:(?:CUDA|HIP) error: |Cuda failure (?:\d+ )?')an illegal memory access was encountered",
        "cudaErrorIllegalAddress of the CUDA runtime",
    ),
    pattern(
        "loss_scale",
        "Current loss scale already at minimum",
        r"Current loss scale already at minimum",
        "deepspeed/runtime/fp16/loss_scaler.py",
    ),
    pattern(
        "abi_mismatch",
        ": undefined symbol: ",
        r"[Ee]rror: /\S+\.so[.\d]*: undefined symbol: (?P<symbol>\S+)",
        "the dynamic linker, in CPython's import or by itself",
        anchors=(
            ".so: undefined symbol: ",
            *(f".so.{n}: undefined symbol: " for n in (11, 12, 13)),
        ),
    ),
    pattern(
        "corrupt_file",
        "Error while deserializing header: ",
        r"SafetensorError: Error while deserializing header: (?P<what>.*)",
        "safetensors_rust",
    ),
    pattern(
        "corrupt_file",
        "PytorchStreamReader failed ",
        r"Error: (?:\[enforce fail at [^\]]*\] *\. *)?PytorchStreamReader failed (?P<what>.*)",
        "torch caffe2/serialize/inline_container.cc",
    ),
    pattern(
        "no_gpu",
        "no CUDA-capable device is detected",
        r"no CUDA-capable device is detected",
        "cudaErrorNoDevice of the CUDA runtime",
    ),
    pattern(
        "no_gpu",
        "CUDA error: invalid device ordinal",
        r"CUDA error: invalid device ordinal",
        "cudaErrorInvalidDevice of the CUDA runtime",
    ),
    pattern(
        "no_gpu",
        "Found no NVIDIA driver on your system",
        r"(?<!CUDA initialization: )Found no NVIDIA driver on your system",
        "torch c10/cuda/CUDAFunctions.cpp",
    ),
    pattern(
        "no_gpu",
        "Torch not compiled with CUDA enabled",
        r"Torch not compiled with CUDA enabled",
        "torch/cuda/__init__.py:522",
    ),
    pattern(
        "cuda_driver",
        "The NVIDIA driver on your system is too old",
        r"(?<!CUDA initialization: )The NVIDIA driver on your system is too old"
        r"(?: \(found version (?P<version>\d+)\))?",
        "torch c10/cuda/CUDAFunctions.cpp",
    ),
    pattern(
        "cuda_driver",
        "CUDA driver version is insufficient for CUDA runtime version",
        r"CUDA driver version is insufficient for CUDA runtime version",
        "cudaErrorInsufficientDriver of the CUDA runtime",
    ),
    pattern(
        "cuda_driver",
        "no kernel image is available for execution on the device",
        r"no kernel image is available for execution on the device",
        "cudaErrorNoKernelImageForDevice of the CUDA runtime",
    ),
    pattern(
        "cuda_driver",
        "forward compatibility was attempted on non supported HW",
        r"Error 804: forward compatibility was attempted on non supported HW",
        "cudaErrorCompatNotSupportedOnDevice of the CUDA runtime",
    ),
    pattern(
        "cuda_driver",
        "system has unsupported display driver / cuda driver combination",
        r"Error 803: system has unsupported display driver / cuda driver combination",
        "cudaErrorSystemDriverMismatch of the CUDA runtime",
    ),
    pattern(
        "flash_attn_missing",
        "flash_attn",
        r"No module named 'flash_attn|package flash_attn seems to be not installed",
        "open_instruct/model_utils.py:69; transformers/modeling_utils.py",
        anchors=("No module named 'flash_attn", "package flash_attn seems to be not installed"),
    ),
    pattern(
        "flash_attn_missing",
        " doesn't seem to be installed",
        r"the package for FlashAttention\d doesn't seem to be installed",
        "transformers/modeling_utils.py:1563",
    ),
    pattern(
        "hub_access",
        "You are trying to access a gated repo",
        r"You are trying to access a gated repo",
        "transformers/utils/hub.py:512",
    ),
    pattern(
        "hub_access",
        "Cannot access gated repo for url ",
        r"Cannot access gated repo for url (?P<url>\S+?)\.?$",
        "huggingface_hub/utils/_http.py:860",
    ),
    pattern(
        "hub_access",
        " is a gated dataset on the Hub",
        r"Dataset '(?P<name>[^']*)' is a gated dataset on the Hub",
        "datasets/load.py:1127",
        anchors=("' is a gated dataset on the Hub.",),
    ),
    pattern(
        "hub_access",
        "Repository Not Found for url: ",
        r"Repository Not Found for url: (?P<url>\S+?)\.?$",
        "huggingface_hub/utils/_http.py:917",
    ),
    pattern(
        "hub_access",
        "is not a local folder and is not a valid model identifier",
        r"(?P<name>\S+) is not a local folder and is not a valid model identifier",
        "transformers/utils/hub.py:471",
    ),
    pattern(
        "hub_access",
        "doesn't exist on the Hub or cannot be accessed",
        r"Dataset '(?P<name>[^']*)' doesn't exist on the Hub or cannot be accessed",
        "datasets/load.py:1134",
    ),
    pattern(
        "hub_access",
        "401 Client Error",
        r"Error: 401 Client Error",
        "requests and huggingface_hub, of an HTTP answer",
        anchors=("401 Client Error: Unauthorized", "Error: 401 Client Error"),
    ),
    pattern(
        "hub_access",
        "Client error '401 Unauthorized'",
        r"Client error '401 Unauthorized' for url",
        "httpx, of an HTTP answer",
    ),
    pattern(
        "hub_access",
        "403 ",
        _BY_HUB + r".*(?:403 Client Error|Client error '403 |\b403 Forbidden: )",
        "requests, httpx and huggingface_hub, of an HTTP answer",
        anchors=(
            "403 Client Error: Forbidden",
            "Client error '403 Forbidden'",
            "HfHubHTTPError: 403 Forbidden",
        ),
    ),
    pattern(
        "hub_access",
        "Make sure your token has the correct permissions",
        r"^Make sure your token has the correct permissions",
        "huggingface_hub/utils/_http.py, below `403 Forbidden: ` and the address",
    ),
    pattern(
        "hub_limit",
        "429 ",
        _BY_HUB + r".*(?:429 Client Error|Client error '429 |\b429 Too Many Requests)",
        "requests, httpx and huggingface_hub, of an HTTP answer",
        anchors=("429 Client Error: Too Many", "Client error '429 Too Many"),
    ),
    pattern(
        "hub_access",
        "Token is required ",
        r"Token is required (?:to call the /whoami-v2 endpoint|\(`token=True`\)), but no token found",
        "huggingface_hub/hf_api.py:2343, huggingface_hub/utils/_headers.py:140",
        anchors=("Token is required to call the ", "Token is required (`token=True`)"),
    ),
    pattern(
        "hub_access",
        "Invalid user token.",
        r"Invalid user token\.",
        "huggingface_hub/hf_api.py:2367",
        anchors=("HTTPError: Invalid user token.",),
    ),
    pattern(
        "hub_unreachable",
        " to load the files, and couldn't find them in the",
        r"We couldn't connect to '(?P<url>[^']*)' to load the files",
        "transformers/utils/hub.py:522",
    ),
    pattern(
        "hub_unreachable",
        "and outgoing traffic has been disabled",
        r"Cannot find .* and outgoing traffic has been disabled",
        "huggingface_hub/_snapshot_download.py, file_download.py",
    ),
    pattern(
        "hub_unreachable",
        "Couldn't reach '",
        r"Couldn't reach '(?P<name>[^']*)' on the Hub",
        "datasets/load.py:1125",
        anchors=("ConnectionError: Couldn't reach '",),
    ),
    pattern(
        "hub_unreachable",
        "huggingface.co",
        _RAISED + r".*(?:\b50[0234] Server Error: .* for url: https://huggingface\.co/"
        r"|Server error '50[0234] [^']*' for url 'https://huggingface\.co/"
        r"|HTTPSConnectionPool\(host='huggingface\.co', port=443\): (?:Max retries|Read timed out))",
        "requests, httpx and urllib3, of an HTTP answer or none",
        anchors=(
            "HTTPSConnectionPool(host='huggingface.co', port=443): ",
            " for url: https://huggingface.co/",
            " for url 'https://huggingface.co/",
        ),
    ),
    pattern(
        "wandb_login",
        "No API key configured. Use `wandb login`",
        r"No API key configured\. Use `wandb login` to log in",
        "wandb/sdk/lib/wbauth/authenticate.py:142",
    ),
    pattern(
        "wandb_login",
        "api_key not configured (no-tty)",
        r"api_key not configured \(no-tty\)",
        "older wandb, wandb_login.py",
    ),
    pattern(
        "wandb_unreachable",
        "Failed to verify credentials with ",
        r"Failed to verify credentials with (?P<url>\S+?): ",
        "wandb/sdk/wandb_login.py:352",
    ),
    pattern(
        "wandb_unreachable",
        "Run initialization has timed out after ",
        r"Run initialization has timed out after [\d.]+ sec",
        "older wandb, wandb_init.py",
    ),
    pattern(
        "too_many_files",
        "Too many open files",
        r"Too many open files",
        "errno EMFILE; torch/utils/data/dataloader.py:1327",
        anchors=(
            "[Errno 24] Too many open files",
            "Too many open files. Communication with the",
            "Too many open files (24)",
        ),
    ),
    pattern(
        "violation",
        "launch: stopped: ",
        r"(?:^|[\s:])launch: stopped: (?P<message>.*)",
        "launcher/probe.py, of a run of ours",
        anchors=tuple(f"launch: stopped: {how}" for how in (*_BROKEN, "nothing moved for ")),
    ),
    pattern(
        "warned",
        "launch: warning: ",
        r"(?:^|[\s:])launch: warning: (?P<message>.*)",
        "launcher/probe.py, of a run of ours",
        anchors=tuple(f"launch: warning: {how}" for how in _BROKEN),
    ),
    pattern("disk_full", "No space left on device", r"No space left on device", "errno ENOSPC"),
    pattern(
        "disk_full",
        "isk quota exceeded",
        r"Disk quota exceeded",
        "errno EDQUOT",
        anchors=("[Errno 122] Disk quota exceeded", "Disk quota exceeded (os error 122)"),
    ),
    pattern(
        "file_limit",
        "File too large",
        r"\[Errno 27\] File too large|File too large \(os error 27\)",
        "errno EFBIG",
        anchors=("[Errno 27] File too large", "File too large (os error 27)"),
    ),
)
