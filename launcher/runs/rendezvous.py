"""Which of several machines this is, and where the first one listens -> `Rendezvous`.

A prepared run holds one command for all nodes, with placeholders for what differs. Each node fills
them in from its options, or from the scheduler that started it. torchrun connects the nodes by its
static rendezvous: node 0 opens the port, the others wait for it.
"""

import re
import socket
from collections.abc import Mapping, Sequence

from launcher.errors import shorten, usage
from launcher.lazy_dataclass import dataclass

RANK = "NODE_RANK"
ADDRESS = "HEAD_ADDRESS"
PORT = "HEAD_PORT"
# options of accelerate and torchrun that differ from node to node, and their placeholders
OPTIONS: Mapping[str, str] = {
    "--machine_rank": RANK,
    "--main_process_ip": ADDRESS,
    "--main_process_port": PORT,
}
TORCHRUN: Mapping[str, str] = {"--node-rank": RANK, "--master-addr": ADDRESS, "--master-port": PORT}
DEFAULT_PORT = 29500
# below the ports that the kernel hands out; another one for each job on a node
JOB_PORTS = range(20000, 32000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """This machine is number `rank` of `nodes`; node 0 listens at `address`:`port`."""

    nodes: int
    rank: int
    address: str
    port: int


def render_placeholders(options: Mapping[str, str] = OPTIONS) -> list[str]:
    """The options with their placeholders, as words of a command line."""
    words = []
    for option, placeholder in options.items():
        words += [option, placeholder]
    return words


def fill_placeholders(argv: Sequence[str], rendezvous: Rendezvous | None) -> tuple[str, ...]:
    """The command of one node: the values of OPTIONS and TORCHRUN are set; it can be refilled."""
    words = list(argv)
    if rendezvous is None:
        return tuple(words)
    values = {RANK: str(rendezvous.rank), ADDRESS: rendezvous.address, PORT: str(rendezvous.port)}
    for option, placeholder in [*OPTIONS.items(), *TORCHRUN.items()]:
        if option in words:
            index = words.index(option)
            words[index + 1] = values[placeholder]
    return tuple(words)


def find_rendezvous(
    nodes: int, rank: int | None, address: str | None, environ: Mapping[str, str]
) -> Rendezvous | None:
    """By `--node-rank` and `--main-address`, else by the scheduler. Raises UsageError.

    None for a single node.
    """
    if nodes == 1:
        _require_no_rank(rank, address)
        return None
    scheduled = None
    if rank is None or address is None:
        scheduled = _find_slurm_rendezvous(nodes, environ)
    if rank is None and scheduled is not None:
        rank = scheduled.rank
    if address is None and scheduled is not None:
        host = scheduled.address
        port = scheduled.port
    else:
        host, port = _parse_address(address, rank, nodes)
    if rank is None:
        message = f"the run takes {nodes} machines: which one is this?"
        help = "give --node-rank 0 on the first, --node-rank 1 on the next, "
        help += "or let --slurm start all"
        raise usage("no-node-rank", message, help)
    if not 0 <= rank < nodes:
        message = f"there is no node {rank} among {nodes}: they count from 0"
        raise usage("bad-node-rank", message, f"--node-rank 0 to {nodes - 1}")
    return Rendezvous(nodes=nodes, rank=rank, address=host, port=port)


def _require_no_rank(rank: int | None, address: str | None) -> None:
    if rank not in (None, 0) or address is not None:
        message = "the run takes one machine: --node-rank is not needed"
        raise usage("bad-node-rank", message, "give --nodes too")


_HOST = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*))(?::(?P<port>\d+))?\Z"
)


def _parse_address(address: str | None, rank: int | None, nodes: int) -> tuple[str, int]:
    """Host and port of `HOST[:PORT]`; an IPv6 address stands in brackets."""
    help = "HOST or HOST:PORT of the first machine, such as --main-address 10.0.0.4:29500"
    if address is None:
        question = "which one is this?" if rank is None else "where is the first one?"
        raise usage("no-main-address", f"the run takes {nodes} machines: {question}", help)
    match = _HOST.match(address)
    if match is None:
        message = f"`{shorten(address)}` is not the address of a machine"
        raise usage("bad-main-address", message, help)
    port = int(match["port"] or DEFAULT_PORT)
    if not 0 < port < 2**16:
        message = f"{port} is not a port: they go from 1 to 65535"
        raise usage("bad-main-address", message, help)
    return match["host"], port


def _find_slurm_rendezvous(nodes: int, environ: Mapping[str, str]) -> Rendezvous | None:
    job = environ.get("SLURM_JOB_ID", "")
    rank = environ.get("SLURM_NODEID", "")
    if not job.isdecimal() or not rank.isdecimal():
        return None
    # a batch script sees the whole job, but runs on its first node alone
    step_nodes = environ.get("SLURM_STEP_NUM_NODES", "1")
    step_tasks = environ.get("SLURM_STEP_NUM_TASKS", step_nodes)
    if step_nodes != str(nodes) or step_tasks != step_nodes:
        message = f"Slurm started {step_tasks} process(es) on {step_nodes} node(s), "
        message += f"the run takes one on each of {nodes}"
        help = f"srun --nodes={nodes} --ntasks-per-node=1 launch ..."
        raise usage("wrong-step", message, help)
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    head = find_first_host(nodelist)
    # the name of a node may be unknown outside of Slurm; a batch job's first node started the step
    if not _can_resolve(head):
        head = environ.get("SLURM_LAUNCH_NODE_IPADDR") or head
    port = JOB_PORTS[int(job) % len(JOB_PORTS)]
    return Rendezvous(nodes=nodes, rank=int(rank), address=head, port=port)


def find_first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: `node007` of `node[007-012,20],login1`."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    if match is None:
        return ""
    return re.sub(r"\[(\d*)[^\]]*\]", r"\1", match[0])


def _can_resolve(host: str) -> bool:
    try:
        return bool(host and socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def check_port(rendezvous: Rendezvous | None) -> None:
    """Raise UsageError on node 0 if its port is taken: accelerate only shows a traceback."""
    if rendezvous is None or rendezvous.rank != 0:
        return
    port = rendezvous.port
    with socket.socket() as probe:
        # as torch's store does: a port that an earlier run left in TIME_WAIT is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            message = f"port {port} cannot be used: {error.strerror}"
            help = f"another one on every node: --main-address {rendezvous.address}:{port + 1}"
            raise usage("port-taken", message, help) from None
