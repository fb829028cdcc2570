"""Taking a snapshot: the facts of what is checked out or installed, written as the committed JSON is.

For those who move the pin. What else has to move with it is named, not done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher import cited, history, machine, rules, upstream
from launcher.backends import BACKENDS, stage_rules
from launcher.errors import Finding, InvalidConfig, NotReady, not_ready, usage
from launcher.git import Repository
from launcher.paths import expanded
from launcher.pin import gitlink
from launcher.sources import Folder, find_package

# package folder -> the distribution it comes from
FOREIGN: Mapping[str, Mapping[str, str]] = {"open_instruct": {"olmo_core": "ai2_olmo_core"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A snapshot that was written. `next` are the further places that must move with a new pin."""

    backend: str
    target: Path
    version: str
    fields: int
    unreadable: Mapping[str, str]
    next: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """For the envelope."""
        return {
            "backend": self.backend, "target": str(self.target), "version": self.version,
            "fields": self.fields, "unreadable": dict(self.unreadable), "next": list(self.next),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """The answer for people."""
        told = [f"{self.target}: {self.fields} fields at {self.version}"]
        told += [f"not in it: {stage}, {reason}" for stage, reason in self.unreadable.items()]
        return told + [f"next: {step}" for step in self.next]


def take(
    backend: str = "open_instruct",
    *,
    checkout: Path | None = None,
    environ: Mapping[str, str] | None = None,
    output: Path | None = None,
    allow_edited: bool = False,
) -> Taken:
    """Write the facts of a backend's source, as it is here, to `output`.

    Without `output` it is the committed place, which only a source tree of launch has. Raises
    UsageError where it has none, NotReady where there is no source, where types are not installed
    that the dataclasses use, or where a checkout is edited (unless `allow_edited`), and
    InvalidConfig where no entry script can be read.
    """
    environ = os.environ if environ is None else environ
    target = _committed(backend) if output is None else expanded(output)
    source = upstream.locate(backend, checkout=checkout, environ=environ)
    if source.root is None:
        raise NotReady(_no_source(backend))
    packages = {name: tree for name, tree in source.packages.items() if isinstance(tree, Folder)}
    version = upstream.version_of(backend, packages)
    if not allow_edited and (backend == "open_instruct") and not version.isalnum():
        raise NotReady(_edited(source.root, version))
    search = tuple(_search(backend, source.root, environ))
    foreign = {name: _foreign(name, search) for name in FOREIGN.get(backend, {})}
    facts = upstream.take_snapshot(backend, packages, foreign)
    facts["foreign"] = {
        FOREIGN[backend][n]: upstream.package_version(p.path.parent, FOREIGN[backend][n])
        for n, p in foreign.items()
    }
    if not facts["stages"]:
        raise InvalidConfig(_unreadable(source.root, facts["unreadable"]))
    try:
        target.write_text(written(facts) + "\n", encoding="utf-8")
    except OSError as error:
        raise NotReady(_unwritable(target, error)) from None
    if output is None:
        _write_cited(backend, packages)
    steps = _next(backend, str(facts["version"])) if output is None else iter(())
    return Taken(
        backend=backend, target=target, version=str(facts["version"]), fields=len(facts["fields"]),
        unreadable=facts["unreadable"], next=tuple(steps),
    )  # fmt: skip


def cited_of(backend: str, packages: Mapping[str, Folder]) -> dict[str, list[str]]:
    """Where what the rules of a backend cite stands in its source; see `cited.table`."""
    places: list[str] = []
    for stage in BACKENDS[backend].STAGES:
        for rule in rules.of_script(backend, stage):
            places += cited.of_rule(rule)
        for wider in stage_rules.of_stage(backend, stage):
            places += cited.of_rule(wider)
    return cited.table(packages, places)


def _write_cited(backend: str, packages: Mapping[str, Folder]) -> None:
    target = Path(__file__).with_name("cited.json")
    told = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else {}
    told[backend] = cited_of(backend, packages)
    target.write_text(written(dict(sorted(told.items()))) + "\n", encoding="utf-8")


def _committed(backend: str) -> Path:
    folder = Path(__file__).resolve().parent
    if (upstream.REPOSITORY / "pyproject.toml").is_file() and folder.is_relative_to(
        upstream.REPOSITORY
    ):
        return folder / f"{backend}.json"
    raise usage(
        "no-output-file",
        "launch does not run from its source tree: there is no committed snapshot here",
        "name a file with -o FILE",
    )  # fmt: skip


def _search(backend: str, root: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """The import path of the trainer's Python, where types of other packages may be installed."""
    if backend == "open_instruct":
        with suppress(NotReady):
            yield from machine.find_trainer(None, root, environ).path


def _foreign(name: str, search: tuple[Path, ...]) -> Folder:
    path = find_package(name) or find_package(name, search)
    if path is None:
        raise not_ready(
            "missing-packages", f"{name} is not installed, and the dataclasses use types of it",
            "make install-open-instruct",
        )  # fmt: skip
    return Folder(path)


def _no_source(backend: str) -> Finding:
    code, help = "no-checkout", "launch pin status"
    if backend != "open_instruct":
        code, help = "missing-packages", f"pip install -e '.[{BACKENDS[backend].EXTRA}]'"
    return Finding(
        severity="error", layer="launch", code=code, help=help,
        message=f"there is no source of {backend} here to take a snapshot of",
    )  # fmt: skip


def _edited(root: Path, version: str) -> Finding:
    return Finding(
        severity="error", layer="launch", code="edited-checkout", file=str(root),
        message=f"the checkout is at {version.partition('+')[0]} and edited: its facts are those of no "
        "commit" if "+" in version else f"{root} has no git history: its facts are those of no commit",
        help=f"git -C {root} stash, or --allow-edited" if "+" in version else "--allow-edited",
    )  # fmt: skip


def _unreadable(root: Path, reasons: Mapping[str, str]) -> Finding:
    return Finding(
        severity="error", layer="launch", code="unreadable-source", file=str(root),
        message="; ".join(f"{stage}: {reason}" for stage, reason in reasons.items()),
    )  # fmt: skip


def _unwritable(target: Path, error: OSError) -> Finding:
    return Finding(
        severity="error", layer="launch", code="not-writable", file=str(target),
        message=f"the snapshot cannot be written: {error.strerror}",
    )  # fmt: skip


def _next(backend: str, version: str) -> Iterator[str]:
    """What of launch's own repository does not name this version yet, and what to make anew."""
    module, root = BACKENDS[backend], upstream.REPOSITORY
    named = version.partition("+")[0]
    moved = named != module.PIN
    if moved:
        yield f"write {named} as PIN in launcher/backends/{backend}.py"
    if backend == "open_instruct":
        recorded = gitlink(Repository(root), "external/open-instruct")
        if recorded != named:
            yield f"git update-index --cacheinfo 160000,{named},external/open-instruct"
        if history.table_commit(backend) != named:
            yield "python scripts/history.py: what became of arguments up to this commit"
        if not _holds(root / "README.md", named):
            yield "name the commit in README.md"
    elif moved:
        yield "name the versions in pyproject.toml and constraints.txt"
    if moved:
        yield "mend the cited lines that tests/test_upstream_facts.py names, then make golden"


def _holds(path: Path, text: str) -> bool:
    try:
        return text in path.read_text(encoding="utf-8")
    except OSError:
        return False


# --- the form -------------------------------------------------------------------------------------


def written(data: Mapping[str, object]) -> str:
    """The JSON, one fact a line: differences between two snapshots can be read."""
    lines = []
    for key, value in data.items():
        if isinstance(value, dict):
            below = [f"  {json.dumps(k)}: {_below(v)}" for k, v in value.items()]
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(below) + "\n }")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _below(value: object) -> str:
    if isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values()):
        inner = [f"   {json.dumps(k)}: {_below(v)}" for k, v in value.items()]
        return "{\n" + ",\n".join(inner) + "\n  }"
    if isinstance(value, list) and value and not isinstance(value[0], list):
        inner = [f"   {json.dumps(v, ensure_ascii=False)}" for v in value]
        return "[\n" + ",\n".join(inner) + "\n  ]" if len(value) > 4 else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)
