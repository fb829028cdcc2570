"""The command that starts a stage, and an attempt of a run that waits to be started.

`start.json` holds the user's whole environment, tokens included: whoever starts the run later
(tmux, Slurm, another shell) must not use another one. So its mode is 0600, and no other file
repeats it.
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
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Any

from launcher import files
from launcher.errors import not_ready
from launcher.lazy_dataclass import dataclass
from launcher.machine import codec
from launcher.machine.codec import Between, Count, Misfit, Omission
from launcher.printable import make_printable
from launcher.redaction import Redactor
from launcher.runs import rundir
from launcher.runs.record import LARGEST_WORLD, Record
from launcher.runs.rundir import RunFolder

# Variables that the probe reads. It imports nothing of launch; watching/process.py repeats them.
PROBE_SETTINGS = "LAUNCH_PROBE"
ATTEMPT = "LAUNCH_ATTEMPT"
LEASE = "LAUNCH_LEASE"
TOKENISED = "LAUNCH_TOKENISED"
"""Whether the data were tokenised before (`hit`) or for this start (`miss`), and where; JSON."""
ARGUMENT = "LAUNCH_ARG_"  # prefix of variables that hold secret words of the command line
_SCHEDULER = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
# these come from the job, even if the shell that submitted it had them too
_OF_THE_JOB = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TMPDIR", "HOSTNAME")
ON_FINISH_S = 600.0  # seconds that `--on-finish` may take
_NOBODY = 65534  # the owner that a user namespace shows for every user it does not map
_END_OF_FILE = "END_OF_FILE"


def read_probe_settings(env: Mapping[str, str]) -> Record:
    """The probe's settings in a command's environment; empty without a probe."""
    try:
        return Record(json.loads(env.get(PROBE_SETTINGS, "{}")))
    except ValueError:
        return Record()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start one stage.

    `env` is added to the environment, `variables` are the names in it that hold secrets. `files`
    (path to text) have to be written first: the command reads them.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """The command for a POSIX shell, after the lines that write its files.

        Of a redacted command, the secrets are filled in from the shell's variables.
        """
        text = ""
        for path, content in self.files.items():
            text += _render_here_document(Path(path), content)
        words = [self._render_assignment(name) for name in self.env]
        words += [_quote(word) for word in self.argv]
        return text + " ".join(words)

    def _render_assignment(self, name: str) -> str:
        value = self.env[name]
        if value == f"${self.variables.get(name)}":
            return f'{name}="{value}"'
        return f"{name}={_quote(value)}"

    def redacted(self, redactor: Redactor) -> Command:
        """The command as it may be shown, with `$VARIABLE` for the secrets that it hands over."""
        references = {name: f"${variable}" for name, variable in self.variables.items()}
        command = redactor.redact(replace(self, env={**self.env, **references}))
        return replace(command, variables=self.variables)


def _render_here_document(path: Path, text: str) -> str:
    """Shell lines that write a file and make its folder; nothing in the text is expanded."""
    end = _END_OF_FILE
    while end in text:
        end += "_"
    folder = _quote(str(path.parent))
    return f"mkdir -p {folder} && cat > {_quote(str(path))} <<'{end}'\n{text}{end}\n"


def _quote(word: str) -> str:
    """A word for a shell; in the `$'...'` of bash and zsh if it has unprintable characters."""
    if make_printable(word) == word:
        return shlex.quote(word)
    quoted = ""
    for character in word:
        if character.isprintable() and character not in "\\'#":
            quoted += character
            continue
        for byte in os.fsencode(character):
            quoted += f"\\x{byte:02x}"
    return f"$'{quoted}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What to start, and what to do before and after.

    `environ` is the environment of whoever gave the command, `env` what the command adds. `rank`
    is the number of this machine among `nodes`, `devices` are ids of its GPUs. `caches` are records
    of `cache.keys.Cache`, `total` is in optimizer steps. `on_finish` is an argv that may take
    `on_finish_s` seconds. `borrowed` are variables that the config took a secret from. `request` is
    the `Request` of the command, to be prepared again.
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

    @property
    def redactor(self) -> Redactor:
        """What is secret by the environment of whoever gave the command."""
        return Redactor.of(self.environ, self.borrowed)

    def command(self, environ: Mapping[str, str]) -> Command:
        """The command in the whole environment that it runs in; `environ` is the starter's own."""
        job_variables = self._find_job_variables(environ)
        env = {**self.environ, **job_variables, **self.env}
        # for a single GPU the command names one; which one is the job's to say
        visible = job_variables.get("CUDA_VISIBLE_DEVICES")
        if visible and self.env.get("CUDA_VISIBLE_DEVICES") and not self.devices:
            env["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
        return Command(argv=self.argv, env=env, cwd=Path(self.cwd))

    def _find_job_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What a scheduler set for its job, if the attempt was not prepared in that job."""
        job = environ.get("SLURM_JOB_ID")
        if not job or job == self.environ.get("SLURM_JOB_ID"):
            return {}
        variables = {}
        for name, value in environ.items():
            if name.startswith(_SCHEDULER) or name in _OF_THE_JOB:
                variables[name] = value
        return variables

    def _encode(self) -> bytes:
        # ASCII, as an environment need not be UTF-8
        return json.dumps(asdict(self), indent=1).encode("ascii")

    def digest(self) -> str:
        return hashlib.sha256(self._encode()).hexdigest()

    def write(self, folder: RunFolder) -> None:
        """Write `start.json`, readable by its owner alone. Raises NotReady."""
        with rundir.writing(folder.path):
            files.write_bytes(folder.start, self._encode(), mode=0o600)


def read_attempt(folder: RunFolder) -> Attempt:
    """The attempt that was prepared last. Raises NotReady if there is none, or it is damaged."""
    left_out: list[Omission] = []
    with contextlib.suppress(Misfit):
        attempt = codec.read_record(Attempt, rundir.read_json(folder.start), left_out)
        # with part of its environment or its words missing, it would be another command
        if not left_out:
            return attempt
    message = f"{folder.path.name} holds no attempt that could be started"
    if left_out:
        message += f": in {folder.start.name} {left_out[0]}"
    help = "start the stage itself: launch sft CONFIG, or launch dpo CONFIG"
    raise not_ready("not-prepared", message, help, file=str(folder.path))


def find_other_writer_of_start(folder: RunFolder, *, parents: bool = True) -> str | None:
    """Why somebody else may have written a run's `start.json`; None if nobody can have.

    As for ssh's keys: folder and file belong to this user, are no links, and nobody else can write
    them. With `parents`, nobody else can replace the folder either: folders above that others can
    write are sticky.
    """
    path = folder.path.absolute()
    try:
        for entry in (path, folder.start):
            reason = files.find_other_writer(entry)
            if reason is not None:
                return reason
        if parents:
            # the folders above as they are named, and those that links among them lead to
            for above in dict.fromkeys([*path.parents, *path.resolve().parents]):
                reason = _explain_replaceable(above)
                if reason is not None:
                    return reason
    except OSError as error:
        return f"{error.filename} cannot be looked at: {error.strerror}"
    return None


def _explain_replaceable(above: Path) -> str | None:
    """Why somebody else can replace what lies in a folder; None if nobody can. Raises OSError."""
    status = above.stat()
    if status.st_uid not in (os.geteuid(), 0, _NOBODY):
        return f"{above} belongs to user {status.st_uid}, who can replace the run's folder"
    shared_bits = stat.S_IWOTH
    if not is_private_group(status.st_gid):
        shared_bits |= stat.S_IWGRP
    if status.st_mode & shared_bits and not status.st_mode & stat.S_ISVTX:
        return f"others can write {above}, and so replace the run's folder"
    return None


def is_private_group(gid: int) -> bool:
    """Whether a group has this user alone, as many systems make one for each user."""
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
        return user.pw_gid == gid and {*group.gr_mem, group.gr_name} == {user.pw_name}
    return False


def require_own(folder: RunFolder) -> None:
    """Raise NotReady if another user may have written what a run folder would start."""
    # without the parents: by its name alone only another run of this user can take its place
    reason = find_other_writer_of_start(folder, parents=False)
    if reason is not None:
        message = f"{folder.path.name} is not started: {reason}"
        help = "start a stage file of your own: launch sft CONFIG"
        raise not_ready("not-your-run", message, help, file=str(folder.path))


def find_redactor(folder: RunFolder) -> Redactor:
    """What is secret here, or was where the run was started."""
    start = Record(rundir.read_json(folder.start))
    environ = {name: str(value) for name, value in start.part("environ").items()}
    then = Redactor.of(environ, map(str, start.items_of("borrowed")))
    return Redactor.of(os.environ).joined(then)
