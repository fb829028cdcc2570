"""What the log of any trainer says when it fails: torch, torchrun, accelerate, the shell, Slurm."""

import re
from collections.abc import Iterable, Mapping
from re import _constants, _parser  # type: ignore[attr-defined]
from signal import Signals

from launcher.lazy_dataclass import dataclass

EVERYWHERE = {"step", "block_loss", "metrics", "evaluated", "mean_nonfinite", "warned"}
"""The names that are looked for in the middle of a large log too; all others only near both its
ends.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One line that means something: `regex` is tried only on segments that hold `needle`.

    `always` finds, among lines of which only a sample is read, those that must all be read.
    """

    name: str
    needle: bytes
    regex: re.Pattern[bytes]
    always: tuple[re.Pattern[bytes], ...] = ()


def make_pattern(
    name: str, regex: str, needle: str | None = None, *, always: Iterable[str] = ()
) -> Pattern:
    """A `Pattern` from readable text; its needle is by default the longest text in every match."""
    if needle is None:
        needle = _find_longest_literal(regex)
    return Pattern(
        name=name,
        needle=needle.encode(),
        regex=re.compile(regex.encode()),
        always=tuple(re.compile(text.encode()) for text in always),
    )


def _find_longest_literal(regex: str) -> str:
    longest = ""
    run = ""
    for operation, value in _parser.parse(regex):
        if operation is _constants.LITERAL:
            run += chr(value)
        else:
            run = ""
        if len(run) > len(longest):
            longest = run
    return longest


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

# What may stand before a word of the shell's: a number, a job, or a bar.
_SHELL = r"(?:^|[\]|>] ?|[\d\]]: ?|[ZF] |\d |^\[\d+\][+-]? +)"
# Raised: what is only warned about is tried again, or done without. Others than the hub, such as
# wandb, answer in the same words.
_RAISED = r"\b(?:requests|urllib3|httpx|huggingface_hub)\.[\w.]+: "
_BY_HUB = r"\b(?:huggingface_hub\.[\w.]+: |(?:requests|httpx)\.[\w.]+: (?=.*//huggingface\.co/))"

Table = Mapping[str, tuple[str | tuple[str, str], ...]]
"""Name -> what is looked for: a regular expression, or one with the text that is found first."""


def make_patterns(table: Table) -> tuple[Pattern, ...]:
    patterns = []
    for name, regexes in table.items():
        for regex in regexes:
            needle = None
            if not isinstance(regex, str):
                needle, regex = regex
            patterns.append(make_pattern(name, regex, needle))
    return tuple(patterns)


_TABLE: Table = {
    "begun": (r"^nohup: ignoring input", r"real_accelerator\.py:\d+:get_accelerator\] Setting "),
    "oom": (
        (
            r"(?:CUDA|HIP|XPU|MPS|cuda|hip|Cuda failure)[^\n]{0,60}[Oo]ut of memory"
            r"(?:.*Tried to allocate (?P<tried>[\d.]+ \w+))?(?:.*GPU (?P<gpu>\d+) has)?"
        ),
        "CUBLAS_STATUS_ALLOC_FAILED",
    ),
    "oom_host": (
        (
            "allocate memory",
            r"DefaultCPUAllocator: (?:not enough|can't allocate) memory|Cannot allocate memory",
        ),
        r"(?:^|[\s.])(?:_Array|Arrow)?MemoryError(?::|$)",  # numpy, pyarrow
        "terminate called after throwing an instance of 'std::bad_alloc'",
        ("oom-kill", r"oom.kill event|oom-kill:"),  # slurmstepd; the kernel
        r"Detected \d+ oom_kill event",
        r"srun: error: \S+: tasks? [\d,-]+: Out Of Memory$",
        r"ut of memory: Killed process \d+",  # the kernel
    ),
    "worker_killed": (r"DataLoader worker \(pid \d+\) is killed by signal: Killed",),
    "shared_memory": (
        r"DataLoader worker \(pid \d+\) is killed by signal: Bus error",
        "Unexpected bus error encountered in worker",
        r"unable to (?:write to|resize) file </torch_",
    ),
    "child_failed": (
        # torch/distributed/elastic/multiprocessing/api.py::SubprocessContext._poll[failed (exitcode]
        r"failed \(exitcode: (?P<exitcode>-?\d+)\)(?: local_rank: (?P<rank>\d+))?",
        # torch/distributed/elastic/multiprocessing/errors/__init__.py::[exitcode : $]
        r"exitcode  : (?P<exitcode>-?\d+) +\(pid: \d+\)",
        # subprocess.CalledProcessError, raised by
        # accelerate/commands/launch.py::simple_launcher[raise subprocess.CalledProcessError],
        # accelerate/commands/launch.py::deepspeed_launcher[raise subprocess.CalledProcessError]
        r"returned non-zero exit status (?P<exitcode>\d{1,12})",
        r"launch\.py:\d+:sigkill_handler\] .* exits with return code = (?P<exitcode>-?\d{1,12})$",
        r"srun: error: \S+: tasks? [\d,-]+: Exited with exit code (?P<exitcode>\d{1,12})$",
    ),
    "child_signal": (
        # accelerate/commands/launch.py::simple_launcher[raise subprocess.CalledProcessError],
        # accelerate/commands/launch.py::deepspeed_launcher[raise subprocess.CalledProcessError]
        r"died with <Signals\.(?P<name>SIG\w+): (?P<signal>\d{1,12})>",
        # torch/distributed/elastic/multiprocessing/errors/__init__.py::ProcessFailure.__post_init__[received by PID]
        r"Signal (?P<signal>\d{1,12}) \((?P<name>SIG\w+)\) received by PID",
    ),
    "stop_asked": (
        # torch/distributed/elastic/multiprocessing/api.py::_terminate_process_handler[raise SignalException]
        # SignalException
        r"Process \d+ got signal: (?P<signal>\d{1,12})",
        (
            "Main process received SIG",  # deepspeed/launcher/launch.py sigkill_handler
            r"launch\.py:\d+:sigkill_handler\] Main process received (?P<name>SIG(?:INT|TERM)), exiting",
        ),
        (
            " death signal, shutting down workers",  # torch/distributed/elastic/agent/server/api.py
            r"Received (?:Signals\.(?P<name>SIG\w+)|(?P<signal>\d{1,12})) death signal, shutting down",
        ),
    ),
    "shell_killed": (
        *(
            (word, _SHELL + rf"(?P<how>{word})(?: \(core dumped\))?(?:\s{{2,}}|$)")
            for word in SHELL_SIGNALS
        ),
        rf"Fatal Python error: (?P<how>{'|'.join(SHELL_SIGNALS)})$",
    ),
    "terminated": (
        # libstdc++: an exception that nothing caught, then SIGABRT
        r"terminate called after throwing an instance of '(?P<type>[^']+)'",
    ),
    "watchdog": (
        # torch ProcessGroupNCCL.cpp: the process goes down with it
        (
            "watchdog thread terminated with exception: ",
            r"(?P<type>watchdog) thread terminated with exception: (?P<message>.*)",
        ),
    ),
    "what": (r"^ *what\(\):  (?P<message>.*)",),
    # of the script itself: no traceback stands before it
    "syntax": (("Error: ", r"^(?P<type>SyntaxError|IndentationError|TabError): (?P<message>.+)"),),
    "not_started": (
        r"(?:^|[\s/:|>])python[\d.]*: (?P<message>can't open file .*|No module named \S+$)",
    ),
    "not_found": (
        (
            "not found",
            r"(?P<message>(?:[\w./-]+: )?(?:line \d+: )?[\w./-]+: command not found"
            r"|\bsh: \d+: [\w./-]+: not found)$",
        ),
    ),
    "cancelled": (
        (
            r"slurmstepd(?:-[\w.-]+)?: error: \*\*\* \w+ (?P<job>\d*).* CANCELLED AT \S+"
            r"(?: DUE TO (?P<why>[A-Z ]+?))?(?:,[^*]*)? *\*\*\*"
        ),
    ),
    "refused": (
        (
            r"(?:\w\.py|^[\w-]+(?: [\w<>\[\] -]+)?): error: (?P<message>(?:argument |unrecognized "
            r"|ambiguous |the following |one of |expected ).*)"
        ),
        # transformers/hf_argparser.py::HfArgumentParser.parse_args_into_dataclasses[raise ValueError],
        # transformers/hf_argparser.py::HfArgumentParser.parse_dict[raise ValueError]
        (
            "are not used by the HfArgumentParser",
            r"(?P<message>Some (?:specified arguments|keys) are not used by the HfArgumentParser: \[.*)",
        ),
    ),
    "nccl_timeout": (
        r"Watchdog caught collective operation timeout: (?P<what>.*)",
        r"ProcessGroupNCCL's watchdog got stuck for (?P<what>\d+ seconds)",
        *(
            (
                f"ms for {way} operation to complete",  # gloo
                rf"Timed out waiting (?P<what>\d+ms for {way} operation to complete)",
            )
            for way in ("send", "recv")
        ),
    ),
    "port_in_use": (
        r"[Aa]ddress already in use",
        # accelerate/utils/launch.py::prepare_multi_gpu_env[Tried to launch],
        # accelerate/utils/launch.py::prepare_deepspeed_cmd_env[Tried to launch]
        "Tried to launch distributed communication on port ",
    ),
    "nccl_error": (
        r"NCCL error in: \S+, (?P<what>.*?)(?:, NCCL version (?P<version>[\d.]+))?$",
        "Bootstrap : no socket interface found",
    ),
    "rendezvous": (
        r"Timed out after \d+ seconds waiting for clients\. (?P<joined>\d+/\d+) clients joined",
        r"wait timeout after \d+ms, keys: ",
        r"The client socket has timed out after .* trying to connect to \((?P<address>[^)]+)\)",
        # torch/distributed/elastic/rendezvous/api.py
        (".Rendezvous", r"\.Rendezvous(?:Timeout|Connection|Closed)Error\b"),
        # torch TCPStore and ProcessGroupNCCL: what is only warned about is tried again
        (
            " socket",
            r"\[E[^\]]* socket\S*\] (?:\[c10d\] )?The client socket has (?:timed out|failed to connect)",
        ),
        ("store->get(", r"store->get\('[^']*'\) got error: "),
        ("DistStoreError", r"DistStoreError: (?:Timed out|Socket Timeout|wait timeout)"),
        (
            "DistNetworkError",
            r"DistNetworkError: .*(?:failed to connect|timed out|gai error|Name or service not known)",
        ),
    ),
    "gpu_fault": ("uncorrectable ECC error encountered", "GPU has fallen off the bus"),
    "device_assert": (r"(?:CUDA|HIP) error: device-side assert triggered",),
    "illegal_access": (
        (
            "an illegal memory access was encountered",
            r"(?:(?:CUDA|HIP) error: |Cuda failure (?:\d+ )?')an illegal memory access was",
        ),
    ),
    "loss_scale": ("Current loss scale already at minimum",),
    "abi_mismatch": (r"[Ee]rror: /\S+\.so[.\d]*: undefined symbol: (?P<symbol>\S+)",),
    "corrupt_file": (
        r"SafetensorError: Error while deserializing header: (?P<what>.*)",
        r"Error: (?:\[enforce fail at [^\]]*\] *\. *)?PytorchStreamReader failed (?P<what>.*)",
    ),
    "no_gpu": (
        "no CUDA-capable device is detected",
        "CUDA error: invalid device ordinal",
        r"(?<!CUDA initialization: )Found no NVIDIA driver on your system",
        "Torch not compiled with CUDA enabled",  # torch/cuda/__init__.py::_lazy_init[Torch not compiled]
    ),
    "cuda_driver": (
        (
            r"(?<!CUDA initialization: )The NVIDIA driver on your system is too old"
            r"(?: \(found version (?P<version>\d+)\))?"
        ),
        "CUDA driver version is insufficient for CUDA runtime version",
        "no kernel image is available for execution on the device",
        "Error 804: forward compatibility was attempted on non supported HW",
        "Error 803: system has unsupported display driver / cuda driver combination",
    ),
    "flash_attn_missing": (
        # open_instruct/model_utils.py before #1716; transformers/modeling_utils.py
        ("flash_attn", r"No module named 'flash_attn|package flash_attn seems to be not installed"),
        # transformers/modeling_utils.py::PreTrainedModel._flash_attn_import_error[the package for]
        (
            " doesn't seem to be installed",
            r"the package for FlashAttention\d doesn't seem to be installed",
        ),
    ),
    "hub_access": (
        "You are trying to access a gated repo",  # transformers/utils/hub.py::cached_files[You are trying]
        # huggingface_hub/utils/_http.py::hf_raise_for_status[Cannot access gated]
        r"Cannot access gated repo for url (?P<url>\S+?)\.?$",
        # datasets/load.py::dataset_module_factory[message = f #1]
        r"Dataset '(?P<name>[^']*)' is a gated dataset on the Hub",
        # huggingface_hub/utils/_http.py::hf_raise_for_status[Repository Not]
        r"Repository Not Found for url: (?P<url>\S+?)\.?$",
        # transformers/utils/hub.py::cached_files[is not a local]
        r"(?P<name>\S+) is not a local folder and is not a valid model identifier",
        # datasets/load.py::dataset_module_factory[raise DatasetNotFoundError(f #3]
        r"Dataset '(?P<name>[^']*)' doesn't exist on the Hub or cannot be accessed",
        "Error: 401 Client Error",
        "Client error '401 Unauthorized' for url",
        ("403 ", _BY_HUB + r".*(?:403 Client Error|Client error '403 |\b403 Forbidden: )"),
        # huggingface_hub/utils/_http.py, below `403 Forbidden: ` and the address
        r"^Make sure your token has the correct permissions",
        # huggingface_hub/hf_api.py::HfApi.whoami[Token is required],
        # huggingface_hub/utils/_headers.py::get_token_to_send[Token is required]
        r"Token is required (?:to call the /whoami-v2 endpoint|\(`token=True`\)), but no token",
        r"Invalid user token\.",  # huggingface_hub/hf_api.py::HfApi._inner_whoami[Invalid user token.]
    ),
    "hub_limit": (
        ("429 ", _BY_HUB + r".*(?:429 Client Error|Client error '429 |\b429 Too Many Requests)"),
    ),
    "hub_unreachable": (
        # transformers/utils/hub.py::cached_files[We couldn]
        (
            " to load the files, and couldn't find them in the",
            r"We couldn't connect to '(?P<url>[^']*)' to load the files",
        ),
        r"Cannot find .* and outgoing traffic has been disabled",
        # datasets/load.py::dataset_module_factory[raise ConnectionError(f #3]
        r"Couldn't reach '(?P<name>[^']*)' on the Hub",
        (
            "huggingface.co",
            _RAISED + r".*(?:\b50[0234] Server Error: .* for url: https://huggingface\.co/"
            r"|Server error '50[0234] [^']*' for url 'https://huggingface\.co/"
            r"|HTTPSConnectionPool\(host='huggingface\.co', port=443\): (?:Max retries|Read timed))",
        ),
    ),
    "wandb_login": (
        # wandb/sdk/lib/wbauth/authenticate.py::authenticate_session[No API key configured. Use]
        "No API key configured. Use `wandb login`",
        r"api_key not configured \(no-tty\)",  # older wandb
    ),
    "wandb_unreachable": (
        # wandb/sdk/wandb_login.py::_verify_login[Failed to verify]
        r"Failed to verify credentials with (?P<url>\S+?): ",
        "Run initialization has timed out after ",  # older wandb
    ),
    "too_many_files": ("Too many open files",),
    "disk_full": ("No space left on device", "Disk quota exceeded"),
    "file_limit": (
        ("File too large", r"\[Errno 27\] File too large|File too large \(os error 27\)"),
    ),
    "violation": (
        r"(?:^|[\s:])launch: stopped: (?P<message>.*)",
    ),  # launcher/probe.py, of a run of ours
    "warned": (r"(?:^|[\s:])launch: warning: (?P<message>.*)",),
}

PATTERNS: tuple[Pattern, ...] = make_patterns(_TABLE)
