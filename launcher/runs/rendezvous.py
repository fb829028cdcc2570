"""Which of several machines this is and where the first one listens -> `Rendezvous`, and into a command.

A prepared run holds one command for all nodes, with words in place of what differs. Each node fills
them in from its options or from the scheduler that started it. torchrun does the meeting itself, with
its static rendezvous: node 0 opens the port, the others wait for it.
"""

import contextlib
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import brief, usage

RANK, ADDRESS, PORT = "NODE_RANK", "HEAD_ADDRESS", "HEAD_PORT"
# options of accelerate and of torchrun that differ from node to node, and the words that stand for their values
OPTIONS: Mapping[str, str] = {"--machine_rank": RANK, "--main_process_ip": ADDRESS, "--main_process_port": PORT}
TORCHRUN: Mapping[str, str] = {"--node-rank": RANK, "--master-addr": ADDRESS, "--master-port": PORT}
DEFAULT_PORT = 29500
# a job's port: below those that the kernel hands out, and not the same for two jobs on one node
JOB_PORTS = range(20000, 32000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """This machine is number `rank` of `nodes`; node 0 listens at `address`:`port`."""

    nodes: int
    rank: int
    address: str
    port: int


def placeholders(options: Mapping[str, str] = OPTIONS) -> list[str]:
    return [word for pair in options.items() for word in pair]


def filled(argv: Sequence[str], here: Rendezvous | None) -> tuple[str, ...]:
    """The command of one node: only words after accelerate's or torchrun's options change; it can be filled again."""
    words = list(argv)
    if here is None:
        return tuple(words)
    values = {RANK: str(here.rank), ADDRESS: here.address, PORT: str(here.port)}
    for option, word in (*OPTIONS.items(), *TORCHRUN.items()):
        with contextlib.suppress(ValueError):
            place = words.index(option) + 1
            words[place : place + 1] = [values[word]]
    return tuple(words)


def find(nodes: int, rank: int | None, address: str | None, environ: Mapping[str, str]) -> Rendezvous | None:
    """By `--node-rank` and `--main-address`, else by the scheduler; None for a single node. Raises UsageError."""
    if nodes == 1:
        if rank in (None, 0) and address is None:
            return None
        raise usage("bad-node-rank", "the run takes one machine: --node-rank is not needed", "give --nodes too")
    scheduled = _slurm(nodes, environ) if rank is None or address is None else None
    if rank is None and scheduled is not None:
        rank = scheduled.rank
    if address is None and scheduled is not None:
        host, port = scheduled.address, scheduled.port
    else:
        host, port = _address(address, rank, nodes)
    if rank is None:
        help = "give --node-rank 0 on the first, --node-rank 1 on the next, or let --slurm start all"
        raise usage("no-node-rank", f"the run takes {nodes} machines: which one is this?", help)
    if not 0 <= rank < nodes:
        message = f"there is no node {rank} among {nodes}: they count from 0"
        raise usage("bad-node-rank", message, f"--node-rank 0 to {nodes - 1}")
    return Rendezvous(nodes=nodes, rank=rank, address=host, port=port)


_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*))(?::(?P<port>\d+))?\Z")


def _address(given: str | None, rank: int | None, nodes: int) -> tuple[str, int]:
    """`HOST[:PORT]`, an IPv6 address in brackets."""
    help = "HOST or HOST:PORT of the first machine, such as --main-address 10.0.0.4:29500"
    if given is None:
        who = "where is the first one?" if rank is not None else "which one is this?"
        raise usage("no-main-address", f"the run takes {nodes} machines: {who}", help)
    matched = _HOST.match(given)
    if matched is None:
        raise usage("bad-main-address", f"`{brief(given)}` is not the address of a machine", help)
    port = int(matched["port"] or DEFAULT_PORT)
    if not 0 < port < 2**16:
        raise usage("bad-main-address", f"{port} is not a port: they go from 1 to 65535", help)
    return matched["host"], port


def _slurm(nodes: int, environ: Mapping[str, str]) -> Rendezvous | None:
    job, rank = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_NODEID", "")
    if not job.isdecimal() or not rank.isdecimal():
        return None
    # a batch script sees the whole job, but runs on its first node alone
    spread = environ.get("SLURM_STEP_NUM_NODES", "1")
    tasks = environ.get("SLURM_STEP_NUM_TASKS", spread)
    if spread != str(nodes) or tasks != spread:
        message = f"Slurm started {tasks} process(es) on {spread} node(s), the run takes one on each of {nodes}"
        raise usage("wrong-step", message, f"srun --nodes={nodes} --ntasks-per-node=1 launch ...")
    head = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    # a node's name need not be known outside of Slurm; a batch job's first node started the step
    if not _resolves(head):
        head = environ.get("SLURM_LAUNCH_NODE_IPADDR") or head
    port = JOB_PORTS[int(job) % len(JOB_PORTS)]
    return Rendezvous(nodes=nodes, rank=int(rank), address=head, port=port)


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: `node007` of `node[007-012,20],login1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\d*)[^\]]*\]", r"\1", first[0] if first else "")


def _resolves(host: str) -> bool:
    try:
        return bool(host and socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def check_port(here: Rendezvous | None) -> None:
    """Raises UsageError on node 0 where its port is taken: accelerate would only say so in a traceback."""
    if here is None or here.rank:
        return
    with socket.socket() as tried:
        # as torch's store does: what an earlier run left in TIME_WAIT is free
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", here.port))
        except OSError as error:
            message = f"port {here.port} cannot be used: {error.strerror}"
            help = f"another one on every node: --main-address {here.address}:{here.port + 1}"
            raise usage("port-taken", message, help) from None
