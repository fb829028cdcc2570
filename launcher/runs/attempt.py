"""The command that starts a stage, and one attempt of a run as it waits to be started: all that its keeper needs.

`start.json` holds the user's whole environment, tokens included: whoever starts the run later (tmux, Slurm,
another shell) must not start it in another one. Hence mode 0600, and no other file repeats it.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import json
import os
import pwd
import shlex
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from launcher import files
from launcher.errors import not_ready
from launcher.machine import codec
from launcher.machine.codec import Between, Count, Misfit, Omission
from launcher.paths import PACKAGE
from launcher.printable import printable
from launcher.redaction import redact, remember
from launcher.runs import rundir
from launcher.runs.record import LARGEST_WORLD, Record
from launcher.runs.rundir import RunFolder

# The variables in which a training's probe finds what it needs. The probe imports nothing of launch, and has the same
# names in watching/process.py
PROBE_SETTINGS = "LAUNCH_PROBE"
ATTEMPT = "LAUNCH_ATTEMPT"
LEASE = "LAUNCH_LEASE"
TOKENISED = "LAUNCH_TOKENISED"
"""Whether the data were tokenised before this start (`hit`) or for it (`miss`), and where, as JSON."""
ARGUMENT = "LAUNCH_ARG_"  # how the names begin of variables that hold secret words of the command line
_SCHEDULER = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
# what a scheduler hands to a job counts for more than what the shell had that submitted it
_OF_THE_JOB = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TMPDIR", "HOSTNAME")
ON_FINISH_S = 600.0  # seconds that `--on-finish` may take
# where files of this package were before: an attempt that waited while launch was updated names them there
_MOVED = {"probe.py": "probe/run.py", "accelerate/": "plan/accelerate/", "deepspeed/": "plan/deepspeed/"}
_NOBODY = 65534  # what a user namespace shows of every owner that it does not map


def probe_settings(env: Mapping[str, str]) -> Record:
    """What a command's own environment `env` tells the probe; empty where there is no probe to tell."""
    try:
        return Record(json.loads(env.get(PROBE_SETTINGS, "{}")))
    except ValueError:
        return Record()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start one stage; `env` is what is added to the environment, `variables` those of it that hold secrets.

    `files` are files that the command reads and that have to be written first: path and text.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """The command as it can be pasted into a POSIX shell; redacted, that fills in the secrets.

        Where it reads files, lines that write them come first.
        """
        written = [_here_document(Path(path), text) for path, text in self.files.items()]
        return "".join(written) + self._line()

    def _line(self) -> str:
        words = [
            f'{name}="{value}"' if value == f"${self.variables.get(name)}" else f"{name}={_quoted(value)}"
            for name, value in self.env.items()
        ]
        return " ".join([*words, *map(_quoted, self.argv)])

    def redacted(self) -> Command:
        named = {name: f"${variable}" for name, variable in self.variables.items()}
        shown = redact(replace(self, env={**self.env, **named}))
        return replace(shown, variables=self.variables)


_END = "END_OF_FILE"


def _here_document(path: Path, text: str) -> str:
    """Lines of shell that write a file, in the folder that they make for it; nothing in the text is expanded."""
    end = _END
    while end in text:
        end += "_"
    folder = _quoted(str(path.parent))
    return f"mkdir -p {folder} && cat > {_quoted(str(path))} <<'{end}'\n{text}{end}\n"


def _quoted(word: str) -> str:
    """A word for a shell; where it is not fit for a terminal as it is, in the `$'...'` of bash and zsh."""
    if printable(word) == word:
        return shlex.quote(word)
    shown = "".join(
        one if one.isprintable() and one not in "\\'#" else "".join(f"\\x{byte:02x}" for byte in os.fsencode(one))
        for one in word
    )
    return f"$'{shown}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What to start, and what to do around it.

    `environ` is the environment of whoever gave the command, `env` what the command adds to it. `rank` is the
    number of this machine among `nodes`, `devices` are ids of its GPUs. `caches` are records of `cache.keys.Cache`,
    `total` optimizer steps. `on_finish` is an argv that may take `on_finish_s` seconds. `borrowed` are variables
    that the config took a secret from, `request` is the `Request` of the command, to be prepared again.
    """

    number: Annotated[int, Between(1, 9999)]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    environ: Mapping[str, str]
    cwd: str
    stage: str
    backend: str
    title: str
    output: str | None = None
    total: Count | None = None
    world: Annotated[int, Between(1, LARGEST_WORLD)] = 1
    nodes: Annotated[int, Between(1, LARGEST_WORLD)] = 1
    rank: Annotated[int, Between(0, LARGEST_WORLD)] = 0
    devices: tuple[str, ...] = ()
    caches: tuple[Mapping[str, Any], ...] = ()
    config: str | None = None
    on_finish: tuple[str, ...] = ()
    on_finish_s: Annotated[float, Between(0, 10**9)] = ON_FINISH_S
    allow_unproven: bool = False
    request: Mapping[str, Any] = field(default_factory=dict)
    borrowed: tuple[str, ...] = ()

    def command(self, environ: Mapping[str, str]) -> Command:
        """The command in the whole environment that it is to run in; `environ` is the starter's own."""
        job, inside = environ.get("SLURM_JOB_ID"), dict[str, str]()
        if job and job != self.environ.get("SLURM_JOB_ID"):
            names = (k for k in environ if k.startswith(_SCHEDULER) or k in _OF_THE_JOB)
            inside = {name: environ[name] for name in names}
        whole = {**self.environ, **inside, **self.env}
        # for a single GPU the command names one; which one is the job's to say
        given = inside.get("CUDA_VISIBLE_DEVICES")
        if given and self.env.get("CUDA_VISIBLE_DEVICES") and not self.devices:
            whole["CUDA_VISIBLE_DEVICES"] = given.partition(",")[0]
        return Command(argv=tuple(map(_present, self.argv)), env=whole, cwd=Path(self.cwd))

    def _raw(self) -> bytes:
        # not ASCII would have to be UTF-8, which an environment need not be
        return json.dumps(asdict(self), indent=1).encode("ascii")

    def digest(self) -> str:
        return hashlib.sha256(self._raw()).hexdigest()

    def write(self, folder: RunFolder) -> None:
        """Write `start.json`, for the owner's eyes alone. Raises NotReady where that fails."""
        with rundir.writing(folder.path):
            files.write_bytes(folder.start, self._raw(), mode=0o600)


def _present(word: str) -> str:
    """A word of a command line; a file of this package's where it is today."""
    _, ours, name = word.rpartition("/launcher/")
    paths = (PACKAGE / name.replace(old, new, 1) for old, new in _MOVED.items() if ours and name.startswith(old))
    return next((str(path) for path in paths if path.is_file()), word)


def read(folder: RunFolder) -> Attempt:
    """The attempt that was prepared last. Raises NotReady where none was, or its file is damaged."""
    left_out: list[Omission] = []
    with contextlib.suppress(Misfit):
        waiting = codec.read(Attempt, rundir.read_json(folder.start), left_out)
        # half of an environment, or of a command, is another one
        if not left_out:
            return waiting
    message = f"{folder.path.name} holds no attempt that could be started"
    if left_out:
        message += f": in {folder.start.name} {left_out[0]}"
    help = "start the stage itself: launch sft CONFIG, or launch dpo CONFIG"
    raise not_ready("not-prepared", message, help, file=str(folder.path))


def writable_by_others(folder: RunFolder, *, parents: bool = True) -> str | None:
    """Why somebody else may have written what a run's `start.json` says; None where nobody can have.

    As with ssh's keys: folder and file are this user's own, no links, and writable by nobody else; nor, with
    `parents`, can anybody put another folder in its place: those above that others may write are sticky.
    """
    own, path = os.geteuid(), folder.path.absolute()
    try:
        for one in (path, folder.start):
            if (why := files.writable_by_others(one)) is not None:
                return why
        # the folders above as they are named, and those that links among them lead to
        above = dict.fromkeys((*path.parents, *path.resolve().parents)) if parents else ()
        for one in above:
            status = one.stat()
            if status.st_uid not in (own, 0, _NOBODY):
                return f"{one} belongs to user {status.st_uid}, who can replace the run's folder"
            private = stat.S_IWGRP if is_private_group(status.st_gid) else 0
            others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) & ~private
            if others and not status.st_mode & stat.S_ISVTX:
                return f"others can write {one}, and so replace the run's folder"
    except OSError as error:
        return f"{error.filename} cannot be looked at: {error.strerror}"
    return None


def is_private_group(gid: int) -> bool:
    """Whether it is this user's own group without further members, as many systems make one for each."""
    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
        return user.pw_gid == gid and {*group.gr_mem, group.gr_name} == {user.pw_name}
    return False


def require_own(folder: RunFolder) -> None:
    """Raises NotReady where what a run folder would start may be another user's word."""
    # by its name alone nobody else's command can be slipped in, only another run of this user's
    if (why := writable_by_others(folder, parents=False)) is not None:
        message = f"{folder.path.name} is not started: {why}"
        help = "start a stage file of your own: launch sft CONFIG"
        raise not_ready("not-your-run", message, help, file=str(folder.path))


def tokens(folder: RunFolder) -> dict[str, str]:
    """For `redact`: this environment and that of who started the run, whose tokens a later reader need not have."""
    start = Record(rundir.read_json(folder.start))
    borrowed, then = start.items_of("borrowed"), start.part("environ").items()
    # names of their own: both may have the same variable with another value
    recorded = {f"THEN_{'SECRET_' * (name in borrowed)}{name}": str(value) for name, value in then}
    return {**os.environ, **recorded}


def remember_secrets(folder: RunFolder) -> None:
    """Hide what was secret at the start of a run in all that this process prints: it may have other variables."""
    remember(tokens(folder))
