"""A run as a batch script for Slurm: what `slurm:` may say, and the script as text.

The script starts `launch exec RUN` once on every node. It holds no value of the stage file but those
of `slurm:`, which stand in comments that sbatch alone reads, and no environment: what training needs
lies in the run folder.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Complain, Finding, brief

WARNING_S = 60  # how long before its time is up a job is queued again; Slurm may say so up to a minute earlier

# The long options of sbatch that a run may set; flags take no value, the last ones need none.
VALUED = frozenset(
    """
    account acctg-freq bb bbf begin cluster-constraint comment constraint container core-spec
    cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
    distribution exclude extra-node-info gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
    gpus-per-task gres gres-flags hint kill-on-invalid-dep licenses mail-type mail-user mcs-label
    mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist ntasks-per-gpu
    partition power prefer priority profile qos reservation sockets-per-node switches thread-spec
    threads-per-core time time-min tmp tres-bind tres-per-task wait-all-nodes wckey
    """.split()
)
FLAGS = frozenset({"contiguous", "hold", "overcommit", "reboot", "spread-job", "use-min-nodes"})
OPTIONAL = frozenset({"exclusive", "nice", "no-kill", "oversubscribe", "propagate"})
# options that the run decides, and what to do instead
OURS: Mapping[str, str] = {
    "nodes": "the number of machines is given with --nodes",
    "ntasks": "launch starts one process on each node, which starts the others",
    "ntasks-per-node": "launch starts one process on each node, which starts the others",
    "job-name": "the job is named after the run",
    "chdir": "the run has its own folder",
    "output": "the job writes to slurm.log in the run folder",
    "error": "the job writes to slurm.log in the run folder",
    "open-mode": "an attempt never overwrites what an earlier one wrote",
    "signal": "launch asks for a signal itself, to queue the job again before its time is up",
    "no-requeue": "write `requeue: false`",
    "export": "what training needs lies in the run folder, with tokens, for the owner alone",
    "export-file": "what training needs lies in the run folder, with tokens, for the owner alone",
    "get-user-env": "what training needs lies in the run folder, with tokens, for the owner alone",
    "wrap": "the job is `launch exec`",
    "array": "one run is one job",
    "clusters": "a run stays on the cluster that `squeue` asks",
}
ASKS_FOR_GPUS = frozenset({"gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"})
ASKS_FOR_CPUS = frozenset({"cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus"})
KEYS = (*sorted(VALUED | FLAGS | OPTIONAL), "requeue")

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

Options = Mapping[str, str | None]  # an option of sbatch -> its value; None for one that stands alone


def read(given: Any, complain: Complain) -> tuple[dict[str, str | None], list[Finding]]:
    """The options of a `slurm:` mapping, and everything wrong with it.

    `_` is taken for `-`. null and false leave an option out, true names it alone. `requeue: false`
    is kept as an option without a value, `no-requeue`.
    """
    if given is None:
        return {}, []
    if not isinstance(given, Mapping):
        message = f"`slurm:` is a mapping of sbatch's options, not `{brief(given)}`"
        return {}, [complain("bad-slurm", "", message, "slurm: {partition: gpu, time: 1-00:00:00}")]
    options: dict[str, str | None] = {}
    findings = []
    for key, value in given.items():
        name = _CONTROL.sub(" ", str(key)).replace("_", "-").removeprefix("--")
        wrong = _wrong(name, value)
        if wrong is not None:
            findings.append(complain(wrong[0], str(key), *wrong[1:]))
        elif name == "requeue":
            options |= {} if value in (True, None) else {"no-requeue": None}
        elif value not in (None, False):
            options[name] = None if value is True else str(value)
    return options, findings


def _wrong(name: str, value: Any) -> tuple[str, str, str | None] | None:
    """Code, message and help of what is wrong with an option; None where nothing is."""
    if name in OURS:
        return "reserved-slurm-option", f"`{brief(name)}` is not for the run to set", OURS[name]
    if name not in KEYS:
        near = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.6)
        help = f"did you mean `{near[0]}`?" if near else "`sbatch --help` lists them"
        return "unknown-slurm-option", f"`{brief(name)}` is no option of sbatch", help
    if value is None:
        return None
    if isinstance(value, bool):
        if name in VALUED:
            return "bad-slurm-option", f"`{name}` needs a value", None
        return None
    if name in FLAGS or name == "requeue":
        return "bad-slurm-option", f"`{name}` is true or false, not `{brief(value)}`", None
    if not isinstance(value, str | int | float) or not str(value).strip():
        return "bad-slurm-option", f"`{name}` is one word, not `{brief(value)}`", None
    if _CONTROL.search(str(value)):
        return "bad-slurm-option", f"`{name}` holds a line break or another control character", None
    return None


def one_cpu(options: Options, gpus: int) -> str | None:
    """What to say of a job that would get a single core of each node; None where it asks for more."""
    if ASKS_FOR_CPUS & options.keys():
        return None
    most = f"{8 * gpus}" if gpus else "8"
    return f"slurm: {{cpus_per_task: {most}}}, or {{exclusive: true}} for whole machines"


def script(
    *,
    name: str,
    folder: Path,
    nodes: int,
    gpus: int,
    options: Options,
    launch: Sequence[str] = (),
    command: Sequence[str] = (),
) -> str:
    """The batch script of a run: its directives, and `launch exec` on every node.

    `gpus` is the number on each node. `launch` is the argv that stands for `launch`; it and the
    folder have to be there on the nodes too. A `command` stands in the place of `launch exec RUN`.
    Paths that are no UTF-8 are in it as surrogates.
    """
    lines = ["#!/bin/sh", *_directives(name, folder, nodes, gpus, options), ""]
    if _pattern(folder) is None:
        lines += ["# sbatch cannot write down the name of this folder", f"exec >>{_in(folder, LOG)} 2>&1"]
    again = "no-requeue" not in options
    srun = f"srun --nodes={nodes} --ntasks-per-node=1 --mpi=none --cpu-bind=none --kill-on-bad-exit=0"
    lines += [
        f"set -- {shlex.join(command or [*launch, 'exec', str(folder)])}",
        *(() if command else _PREPARE),
        "# whoever stops the job tells every process of it: wait for what they still write down",
        "trap 'signalled=1' TERM INT",
        *([_REQUEUE.format(limit=_in(folder, LIMIT))] if again else []),
        # srun does not take the number of cores from the job (Slurm 22.05)
        f'{srun} ${{SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}} "$@" &',
        _WAIT,
    ]
    return "\n".join(lines) + "\n"


LOG, LIMIT = "slurm.log", "slurm.limit"  # files of a run folder: what the job prints, and that its time was up

_PREPARE = ("# queued again, the run goes on from its last complete checkpoint", '"$@" --prepare || exit')
_REQUEUE = """\
# its time is almost up: back into the queue
queue_again() {{ signalled=1; : >{limit}; scontrol requeue "$SLURM_JOB_ID"; }}
trap queue_again USR1"""
_WAIT = """\
while signalled=; wait $!; code=$?; [ "$signalled" ]; do :; done
exit "$code\""""


def _in(folder: Path, name: str) -> str:
    return shlex.quote(str(folder / name))


def _directives(name: str, folder: Path, nodes: int, gpus: int, options: Options) -> list[str]:
    words: dict[str, str | None] = {
        "job-name": _UNSAFE.sub("-", name).strip("-") or "launch",
        "nodes": str(nodes),
        "ntasks-per-node": "1",
    }
    if gpus and not ASKS_FOR_GPUS & options.keys():
        words["gres"] = f"gpu:{gpus}"
    words |= {"output": _pattern(folder) or "/dev/null", "open-mode": "append", "chdir": "/"}
    if "no-requeue" not in options:
        words |= {"requeue": None, "signal": f"B:USR1@{WARNING_S}"}
    return [
        f"#SBATCH --{key}" if value is None else f"#SBATCH --{key}={_quoted(value)}"
        for key, value in (words | dict(options)).items()
    ]


def _pattern(folder: Path) -> str | None:
    """The job's log as sbatch's filename pattern; None where a pattern cannot express it."""
    path = str(folder / LOG)
    # a backslash anywhere switches all patterns off and is lost itself
    return None if "\\" in path or _CONTROL.search(path) else path.replace("%", "%%")


def _quoted(value: str) -> str:
    """A value as sbatch reads it in a script: in double quotes, a backslash before quotes and itself."""
    if re.fullmatch(r"[A-Za-z0-9._:,=@/+%-]+", value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
