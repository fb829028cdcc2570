"""A real Slurm of two nodes on this machine, for a test: munged, one slurmctld, two slurmd.

Everything lies below one folder and listens on ports of its own: nothing of an installed Slurm is
read, written or stopped. Works as root in a container without systemd.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conftest import PATIENCE_S
from fake_world import find_processes

NODES = ("n1", "n2")
DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
_SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
PlugStackConfig={folder}/plugstack.conf
SlurmdParameters=config_overrides
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
JobRequeue=1
KillWait=120
KillOnBadExit=0
InactiveLimit=0
MinJobAge=60
SlurmctldTimeout=60
SlurmdTimeout=60
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here; None where it can."""
    lacking = [name for name in (*DAEMONS, *CLIENTS) if program(name) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    return None if os.geteuid() == 0 else "slurmd wants to be root"


def program(name: str) -> str | None:
    """The full path of a program; daemons lie outside of most users' PATH."""
    return shutil.which(name, path=_SEARCH)


@dataclass
class Cluster:
    """A running Slurm; `environment` is what its clients need."""

    folder: Path
    conf: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.conf)}

    def call(self, *argv: str) -> str:
        done = subprocess.run(
            argv,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, (argv, done.stdout, done.stderr, self.logs())
        return done.stdout

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def ready(self) -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%t"],
            env={**os.environ, **self.environment}, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.split() == ["idle"] * len(NODES)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            ports.append(int(taken.getsockname()[1]))
        return ports


@contextlib.contextmanager
def started() -> Iterator[Cluster]:
    """A cluster that takes jobs, gone with all its processes afterwards.

    In a folder directly below /tmp: the path of a socket holds 107 characters.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    cluster = Cluster(folder=folder, conf=folder / "slurm.conf")
    try:
        # slurmd and munged refuse what others may write to
        folder.chmod(0o755)
        _configure(cluster)
        _start(cluster)
        yield cluster
    finally:
        _stop(cluster)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(cluster: Cluster) -> None:
    folder = cluster.folder
    controller, *ports = free_ports(1 + len(NODES))
    # as many as a job of ours may ask for; whether they exist does not matter here
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} "
        "CPUs=4 RealMemory=1000 State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=True)
    )
    cluster.conf.write_text(
        CONF.format(
            host=socket.gethostname().partition(".")[0], folder=folder, controller=controller,
            nodes=nodes, names=",".join(NODES),
        )
    )  # fmt: skip
    (folder / "plugstack.conf").write_text("")
    (folder / "state").mkdir()
    for name in NODES:
        (folder / f"spool.{name}").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)


def _start(cluster: Cluster) -> None:
    folder = cluster.folder
    _daemon(
        cluster, "munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
        f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed", "--num-threads=2",
    )  # fmt: skip
    _until(cluster, (folder / "munge.socket").exists)
    _daemon(cluster, "slurmctld", "-D", "-i", "-f", str(cluster.conf))
    for name in NODES:
        _daemon(cluster, "slurmd", "-D", "-N", name, "-f", str(cluster.conf))
    _until(cluster, cluster.ready)


def _daemon(cluster: Cluster, name: str, *words: str) -> None:
    executable = program(name)
    assert executable is not None
    log = cluster.folder / f"{name}{len(cluster.daemons)}.out.log"
    with log.open("wb") as stream:
        daemon = subprocess.Popen(
            [executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, **cluster.environment},
            start_new_session=True,
        )
    cluster.daemons.append(daemon)


def _until(cluster: Cluster, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, cluster.logs()
        for daemon in cluster.daemons:
            assert daemon.poll() is None, cluster.logs()
        time.sleep(0.1)


def _stop(cluster: Cluster) -> None:
    """First the nodes, whose jobs go with them, then the controller."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            ["scancel", "--user=root"],
            env={**os.environ, **cluster.environment},
            capture_output=True,
            timeout=30,
        )
    for daemon in reversed(cluster.daemons):
        daemon.terminate()
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    for pid in left(cluster):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def left(cluster: Cluster) -> list[int]:
    """The living processes of this cluster's jobs: known by their environment, and none of a
    daemon.
    """
    sessions = {daemon.pid for daemon in cluster.daemons}
    pids = []
    for pid in find_processes("SLURM_CONF", cluster.conf):
        # a process may go while it is looked at
        with contextlib.suppress(OSError):
            if os.getsid(pid) not in sessions:
                pids.append(pid)
    return pids
