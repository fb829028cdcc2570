"""The folder of a run: the names of its files, the manifest, and the index of all runs.

A run is identified by the folder that its model goes to: starting the same stage into the same
folder again is a new attempt of the same run.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import machine
from launcher.command import Command
from launcher.errors import Finding, NotReady
from launcher.plan import Plan

MANIFEST_VERSION = 1
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_SECRET_NAME = re.compile(r"(token|secret|password|api_?key|credential)", re.IGNORECASE)
_SECRET_SHAPE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|"
    r"AKIA[0-9A-Z]{16}|xox[abp]-[A-Za-z0-9-]{10,})"
)
REDACTED = "<redacted>"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The only place that knows what the files of a run are called."""

    path: Path

    @property
    def manifest(self) -> Path:
        """Everything that was decided before the start."""
        return self.path / "run.json"

    @property
    def probe(self) -> Path:
        """One `rank-N.jsonl` a training process."""
        return self.path / "probe"

    @property
    def metrics(self) -> Path:
        """One line a step, over all attempts."""
        return self.path / "metrics.jsonl"

    @property
    def verdict(self) -> Path:
        """What `check` found."""
        return self.path / "verdict.json"

    def console(self, attempt: int) -> Path:
        """What the training processes wrote, raw."""
        return self.path / _numbered("console", attempt, "log")

    def exit(self, attempt: int) -> Path:
        """How the attempt ended."""
        return self.path / _numbered("exit", attempt, "json")

    def attempts(self) -> int:
        """How many attempts have begun."""
        count = 0
        while self.console(count + 1).exists():
            count += 1
        return count


def _numbered(stem: str, attempt: int, suffix: str) -> str:
    return f"{stem}.{suffix}" if attempt == 1 else f"{stem}.{attempt}.{suffix}"


def runs_root(environ: Mapping[str, str] | None = None) -> Path:
    """Where runs live: LAUNCH_RUNS, else `./runs`."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("LAUNCH_RUNS") or "runs").expanduser().absolute()


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The user's state folder, where the index of runs is kept (XDG)."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "launch"


def choose(stage: str, name: str, output: Path | None, root: Path) -> tuple[RunFolder, int]:
    """The folder of this start and the number of the attempt; nothing is created.

    The newest run into the same output folder is continued, any other start is a new run.
    """
    for folder in _newest_first(root) if output is not None else ():
        if read_manifest(folder).get("output") == str(output) and output is not None:
            return folder, folder.attempts() + 1
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    stem = f"{now}-{stage}-{_UNSAFE.sub('-', name).strip('-') or 'run'}"
    path, count = root / stem, 1
    while path.exists():
        count += 1
        path = root / f"{stem}-{count}"
    return RunFolder(path), 1


def _newest_first(root: Path) -> Iterator[RunFolder]:
    if root.is_dir():
        for path in sorted(root.iterdir(), reverse=True):
            if (path / "run.json").is_file():
                yield RunFolder(path)


def create(
    folder: RunFolder, attempt: int, plan: Plan, command: Command, trainer: machine.Trainer,
    output: Path | None,
) -> None:  # fmt: skip
    """Make the folder, write the manifest, enter the run in the index.

    Raises NotReady where the folder cannot be written.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        write_json(folder.manifest, manifest(attempt, plan, command, trainer, output))
    except OSError as error:
        raise NotReady(
            Finding(
                severity="error", layer="launch", code="runs-not-writable", file=str(folder.path),
                message=f"the run folder cannot be written: {error.strerror}",
                help="set LAUNCH_RUNS to a writable folder",
            )
        ) from None  # fmt: skip
    _enter_in_index(folder)


def manifest(
    attempt: int, plan: Plan, command: Command, trainer: machine.Trainer, output: Path | None
) -> dict[str, Any]:
    """Every resolved field with who set it, the plan, the command and the versions of everything."""
    stage = plan.stage
    project = Path(__file__).resolve().parent.parent
    return {
        "schema_version": MANIFEST_VERSION,
        "created": now(),
        "attempt": attempt,
        "stage": stage.options.stage,
        "backend": stage.options.backend,
        "name": stage.name,
        "config": str(stage.config.path),
        "output": None if output is None else str(output),
        "expect": expectations(plan),
        "plan": plan.as_json(),
        "args": redact(_resolved(plan)),
        "argv": redact(list(command.argv)),
        "env": sorted(command.env),
        "cwd": str(command.cwd),
        "upstream": stage.upstream.as_json(),
        "launch_commit": machine.git_version(project),
        "trainer": {
            "python": str(trainer.python),
            "source": trainer.source,
            "version": ".".join(map(str, trainer.version)),
            "packages": dict(sorted(trainer.packages.items())),
        },
        "machine": machine.describe(),
        "findings": [finding.as_json() for finding in (*stage.findings, *plan.findings)],
    }


def expectations(plan: Plan) -> dict[str, str]:
    """What the verdict will hold the run to: `expect:`, completed by what the arguments ask for."""
    names, values = plan.stage.entry.names, plan.values
    expected = {"loss": "finite", "memory": "ok", "finish": "completed"}
    expected["liger"] = "engaged" if values.get(names.liger) else "off"
    packed = bool(names.packing and values.get(names.packing))
    expected["packing"] = "isolated" if packed else "off"
    return {**expected, **plan.stage.options.expect}


def _resolved(plan: Plan) -> dict[str, dict[str, Any]]:
    """Value and origin of every field: default (file:line), stage file, override, or derived."""
    fields = {}
    for name, known in plan.stage.schema.fields.items():
        if name in plan.derived:
            origin = f"derived: {plan.derived[name].why}"
        elif name in plan.stage.args:
            origin = str(plan.stage.config.origin(f"args.{name}"))
        else:
            origin = f"default: {known.where}"
        fields[name] = {"value": plan.values[name], "origin": origin}
    return fields


def redact(value: Any, name: str = "") -> Any:
    """The same value with tokens taken out, by the name of their key and by their shape."""
    if isinstance(value, Mapping):
        return {key: redact(below, str(key)) for key, below in value.items()}
    if isinstance(value, list | tuple):
        hidden = False
        clean = []
        for item in value:
            clean.append(REDACTED if hidden else redact(item))
            hidden = isinstance(item, str) and item.startswith("--") and _is_secret(item)
        return clean
    if isinstance(value, str):
        if _is_secret(name) and value:
            return REDACTED
        return _SECRET_SHAPE.sub(REDACTED, value)
    return value


def _is_secret(name: str) -> bool:
    # `eos_token`, `max_tokens` and the like are words of the trade
    plain = re.sub(
        r"(eos|pad|bos|unk|image|mask|special|tokens?_per|num|max|new)_tokens?", "", name
    )
    return bool(_SECRET_NAME.search(plain.replace("tokenizer", "")))


def read_manifest(folder: RunFolder) -> dict[str, Any]:
    """The manifest, or an empty mapping where it is missing or half written."""
    return read_json(folder.manifest)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is none to be had."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_json(path: Path, data: Any) -> None:
    """Write atomically: a reader sees the old file or the new one, never a half."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write atomically, by renaming a finished file over the old one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _enter_in_index(folder: RunFolder) -> None:
    """One small file a run, named by its folder: no lock, no file that two starts could tear."""
    index = state_folder() / "runs"
    name = _UNSAFE.sub("-", str(folder.path)).strip("-")[-200:]
    try:
        index.mkdir(parents=True, exist_ok=True)
        (index / name).write_text(str(folder.path), encoding="utf-8")
    except OSError:
        # a read-only home costs the overview from elsewhere, not the run
        return


def known_runs() -> list[RunFolder]:
    """Every run of the index and of the runs folder here, oldest first."""
    paths = {folder.path for folder in _newest_first(runs_root())}
    index = state_folder() / "runs"
    for entry in index.iterdir() if index.is_dir() else ():
        try:
            paths.add(Path(entry.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError):
            continue
    return sorted(
        (RunFolder(p) for p in paths if (p / "run.json").is_file()), key=lambda f: f.path.name
    )


def find(name: str) -> RunFolder | None:
    """A run by its folder, its name, a unique prefix of it, or `last`."""
    path = Path(name)
    if (path / "run.json").is_file():
        return RunFolder(path)
    runs = known_runs()
    if name == "last":
        return runs[-1] if runs else None
    matching = [folder for folder in runs if folder.path.name.startswith(name)]
    exact = [folder for folder in matching if folder.path.name == name]
    return exact[0] if exact else (matching[0] if len(matching) == 1 else None)


def json_line(value: Mapping[str, Any]) -> str:
    """One line of a JSONL file."""
    return json.dumps(value, ensure_ascii=False, default=str) + "\n"


def parse_line(raw: bytes) -> dict[str, Any]:
    """One line of a JSONL file as a mapping; empty where it is torn or none."""
    try:
        data = json.loads(raw)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
