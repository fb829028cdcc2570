"""One attempt of a run as it waits to be started: everything that its keeper needs, in one private file.

It holds the user's whole environment, tokens included: whoever starts the run later (tmux, Slurm,
another shell) must not start it in another one. Hence mode 0600, and no other file repeats it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import rundir
from launcher.errors import not_ready
from launcher.rundir import RunFolder

if TYPE_CHECKING:
    from launcher.command import Command

_SCHEDULER = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
# what a scheduler hands to a job counts for more than what the shell had that submitted it
_OF_THE_JOB = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TMPDIR", "HOSTNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What to start, and what to do around it.

    `environ` is the environment of whoever gave the command, `env` what the command adds to it.
    `rank` is the number of this machine among `nodes`, `devices` are ids of its GPUs. `caches` are
    records of `caches.Cache`, `on_finish` is an argv, `total` the number of optimizer steps, where
    known. `request` is what was asked for (`preparation.Request`), to be asked again.
    """

    number: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    environ: Mapping[str, str]
    cwd: str
    stage: str
    backend: str
    title: str
    output: str | None = None
    total: int | None = None
    world: int = 1
    nodes: int = 1
    rank: int = 0
    devices: tuple[str, ...] = ()
    caches: tuple[Mapping[str, Any], ...] = ()
    config: str | None = None
    on_finish: tuple[str, ...] = ()
    allow_unproven: bool = False
    request: Mapping[str, Any] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def command(self, environ: Mapping[str, str]) -> Command:
        """The command in the whole environment that it is to run in; `environ` is the starter's own."""
        # whoever looks on starts nothing, and should not wait for what plans and validates
        from launcher.command import Command

        inside = {k: v for k, v in environ.items() if _given_by_scheduler(k)}
        job = environ.get("SLURM_JOB_ID")
        if job and job != self.environ.get("SLURM_JOB_ID"):
            inside |= {k: environ[k] for k in _OF_THE_JOB if k in environ}
        else:
            inside = {}
        whole = {**self.environ, **inside, **self.env}
        # for a single GPU the command names one; which one is the job's to say
        given = inside.get("CUDA_VISIBLE_DEVICES")
        if given and self.env.get("CUDA_VISIBLE_DEVICES") and not self.devices:
            whole["CUDA_VISIBLE_DEVICES"] = given.partition(",")[0]
        return Command(argv=self.argv, env=whole, cwd=Path(self.cwd))

    def environ_of_the_shell(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What the shell had and this process lacks."""
        return {name: value for name, value in self.environ.items() if name not in environ}

    def write(self, folder: RunFolder) -> None:
        """Write `start.json`, for the owner's eyes alone. Raises NotReady where that fails."""
        # not ASCII would have to be UTF-8, which an environment need not be
        raw = json.dumps(asdict(self), indent=1).encode("ascii")
        temporary = folder.start.with_name(f".start.json.{self.token}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(raw)
            os.replace(temporary, folder.start)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise rundir.not_writable(folder.path, error.strerror) from None


def read(folder: RunFolder) -> Attempt:
    """The attempt that was prepared last. Raises NotReady where none was, or its file is damaged."""
    data = rundir.read_json(folder.start)
    try:
        given = {name: data[name] for name in Attempt.__dataclass_fields__ if name in data}
        for name in ("argv", "devices", "caches", "on_finish"):
            given[name] = tuple(given.get(name, ()))
        return Attempt(**given)
    except (TypeError, KeyError):
        raise not_ready(
            "not-prepared", f"{folder.path.name} holds no attempt that could be started",
            "start the stage itself: launch sft CONFIG, or launch dpo CONFIG",
            file=str(folder.path),
        ) from None  # fmt: skip


def tokens(folder: RunFolder) -> dict[str, str]:
    """The environments whose tokens may stand in what a run left: this one, and that of who started it.

    For `redact`: whoever looks at a run later need not have its tokens to know them.
    """
    told = rundir.read_json(folder.start).get("environ")
    then = told.items() if isinstance(told, dict) else ()
    # names of their own: both may have the same variable with another value
    return {**os.environ, **{f"THEN_{name}": str(value) for name, value in then}}


def _given_by_scheduler(name: str) -> bool:
    return name.startswith(_SCHEDULER)
