"""Which upstream source is here, whether it is the pinned one, and the `Schema` of an entry script.

The committed snapshot answers when nothing is installed or checked out, and also when the files
here are byte for byte those that it was read from: then nothing has to be parsed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.errors import Finding, InvalidConfig, NotReady, Severity, launch_finding
from launcher.lazy_dataclass import dataclass
from launcher.machine.git import CommitTree, Repository
from launcher.paths import PROJECT, SNAPSHOTS, exists, expand_user, is_file
from launcher.upstream import behaviour, facts, history
from launcher.upstream.history import ArgumentChange
from launcher.upstream.schema import Schema, name_source, shorten_version
from launcher.upstream.source.packages import Folder, Tree, find_package
from launcher.upstream.trainers import BACKENDS, Entry

if TYPE_CHECKING:
    # what asks programs is imported only where a Python was named
    from launcher.machine.python import Interpreter
    from launcher.upstream.citations import RuleStanding

REPOSITORY = PROJECT
SUBMODULE = REPOSITORY / "external" / "open-instruct"
State = Literal["checkout", "missing", "empty", "other"]
_STATES = {"missing": "is not there", "empty": "is empty", "other": "does not hold one"}
_COMMIT = re.compile(r"[0-9a-f]{40}")
FOUND_IN = (Path("/workspace/open-instruct"), Path("~/open-instruct"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """The upstream source that a run or a check would use.

    `root` is the folder on PYTHONPATH (the checkout, or the one that holds the entry scripts'
    package), None if only the snapshot is here; `packages` are the files of all packages that are
    read, on disk in one or several places, or at a commit. `is_named` is false for a checkout that
    was merely found in one of the usual places.

    `release` is the known release whose facts serve: the one that the files are of, else the pin,
    or of an edited checkout the commit that it was. `changed` are the files that differ from that
    release's.
    """

    backend: str
    root: Path | None
    source: str
    is_named: bool
    pin: str
    version: str
    packages: Mapping[str, Tree] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    release: str = ""

    @property
    def pinned(self) -> bool:
        """Whether its files are those of a known release: the pin, or one kept beside it."""
        return not self.changed

    @property
    def facts(self) -> Mapping[str, Any]:
        """The committed facts of the known release that serves."""
        return load_known_facts(self.backend, self.release or self.pin)

    @property
    def is_checkout(self) -> bool:
        return BACKENDS[self.backend].CHECKOUT

    @property
    def name(self) -> str:
        return name_source(self.backend, self.version)

    def describe(self) -> str:
        where = f"{self.root} ({self.source})" if self.root else "the committed snapshot"
        return f"{self.name}, {where}"

    def as_json(self) -> dict[str, object]:
        return {
            "backend": self.backend,
            "root": None if self.root is None else str(self.root),
            "source": self.source,
            "pin": self.pin,
            "release": self.release or self.pin,
            "version": self.version,
            "pinned": self.pinned,
            "changed_files": list(self.changed),
        }


@cache
def load_snapshot(backend: str) -> Mapping[str, Any]:
    """The committed facts of one backend at its pin; empty if none were taken yet."""
    pin = BACKENDS[backend].KNOWN[0]
    return _read_committed_facts(pin.snapshot) or {
        "version": pin.version,
        "stages": {},
        "files": {},
        "externals": {},
    }


@cache
def _read_committed_facts(name: str) -> Mapping[str, Any] | None:
    """A file of committed facts; None where it was not taken yet."""
    path = SNAPSHOTS / name
    if not path.is_file():
        return None
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def load_known_facts(backend: str, version: str) -> Mapping[str, Any]:
    """The committed facts of a known release; those of the pin for any other version."""
    pin = load_snapshot(backend)
    if version == pin["version"]:
        return pin
    return _read_other_facts(backend).get(version, pin)


def _read_other_facts(backend: str) -> dict[str, Mapping[str, Any]]:
    """The committed facts of the known releases but the pin, by version."""
    pin = load_snapshot(backend)["version"]
    others = {}
    for release in BACKENDS[backend].KNOWN:
        release_facts = None if release.version == pin else _read_committed_facts(release.snapshot)
        if release_facts is not None:
            others[release.version] = release_facts
    return others


def locate(
    backend: str,
    *,
    checkout: Path | None = None,
    search: Sequence[Path] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Upstream:
    """Find the source of `backend`: the checkout in the documented order, or installed packages.

    `search` is the import path of another interpreter (the trainer's). Raises NotReady where a
    checkout was named and is none.
    """
    if BACKENDS[backend].CHECKOUT:
        return _locate_checkout(checkout, os.environ if environ is None else environ)
    return _locate_packages(backend, search)


def list_checkout_places(
    named: Path | None, environ: Mapping[str, str]
) -> Iterator[tuple[Path, str]]:
    """Where a checkout may lie, each place with who names it, in the documented order."""
    if named is not None:
        yield expand_user(named).absolute(), "--open-instruct"
    variable = environ.get("LAUNCH_OPEN_INSTRUCT")
    if variable:
        yield expand_user(variable).absolute(), "LAUNCH_OPEN_INSTRUCT"
    yield SUBMODULE, "submodule"
    usual = [expand_user(place) for place in FOUND_IN]
    for place in usual:
        yield place, "found"
    for place in usual:
        # named after a usual place, as `~/open-instruct-45901fd0` is
        with suppress(OSError):
            for beside in sorted(place.parent.glob(f"{place.name}-*")):
                yield beside, "found"


def _locate_checkout(named: Path | None, environ: Mapping[str, str]) -> Upstream:
    """The checkout that is named, or the submodule; of those that are merely found, the first at
    the pin, else the first at another known commit, else the first.
    """
    candidates: list[Upstream] = []
    for root, source in list_checkout_places(named, environ):
        is_named = source != "found"
        if examine_place(root) != "checkout":
            if is_named and source != "submodule":
                raise NotReady(_report_no_checkout(root, source))
            continue
        packages = find_packages("open_instruct", root)
        located = _compare_with_releases("open_instruct", root, packages, source, is_named=is_named)
        if is_named or (located.pinned and located.version == located.pin):
            return located
        candidates.append(located)
    for located in candidates:
        if located.pinned:
            return located
    return candidates[0] if candidates else _use_snapshot("open_instruct")


# the script for SFT, by its name and the one that is announced
_SIGNS = ("open_instruct/finetune.py", "open_instruct/sft_deepspeed.py")


def examine_place(path: Path) -> State:
    """What is in a place where a checkout may lie."""
    if any(is_file(path / name) for name in _SIGNS):
        return "checkout"
    if not exists(path):
        return "missing"
    try:
        return "empty" if path.is_dir() and not any(path.iterdir()) else "other"
    except OSError:
        return "other"


def _report_no_checkout(root: Path, source: str) -> Finding:
    message = f"{source} names an open-instruct checkout, but {root} {_STATES[examine_place(root)]}"
    help = f"name a folder that holds open_instruct/finetune.py, or leave out {source}"
    if root == SUBMODULE:
        help = "git submodule update --init external/open-instruct"
    return launch_finding("error", "no-checkout", message, help, file=str(root))


def _use_snapshot(backend: str) -> Upstream:
    pin = str(load_snapshot(backend)["version"])
    return Upstream(
        backend=backend,
        root=None,
        source="snapshot",
        is_named=False,
        pin=pin,
        version=pin,
        release=pin,
    )


def _locate_packages(backend: str, search: Sequence[Path] | None) -> Upstream:
    packages = {}
    for name in BACKENDS[backend].PACKAGES:
        path = find_package(name, search)
        if path is None:
            return _use_snapshot(backend)
        packages[name] = Folder(path)
    root = packages[BACKENDS[backend].PACKAGES[0]].path.parent
    return _compare_with_releases(backend, root, packages, "installed", is_named=True)


def find_packages(backend: str, root: Path) -> dict[str, Folder]:
    return {name: Folder(root / name) for name in BACKENDS[backend].PACKAGES}


def read_commit(repository: Repository, commit: str) -> Upstream:
    """open-instruct as it was at a commit of a repository, without a checkout of it.

    Its `root` is the repository's folder: DeepSpeed files that a stage file names may lie there.
    """
    names = BACKENDS["open_instruct"].PACKAGES
    trees = {name: CommitTree(repository, commit, name) for name in names}
    source = _compare_with_releases("open_instruct", repository.top(), trees, "git", is_named=True)
    return replace(source, version=commit)


def _compare_with_releases(
    backend: str, root: Path | None, packages: Mapping[str, Tree], source: str, *, is_named: bool
) -> Upstream:
    pin = _use_snapshot(backend)
    located = replace(pin, root=root, source=source, is_named=is_named, packages=packages)
    changed = _find_differing_files(packages, load_snapshot(backend))
    if not changed:
        return located
    others = _read_other_facts(backend)
    for version, release_facts in others.items():
        if not _find_differing_files(packages, release_facts):
            return replace(located, version=version, release=version)
    folders = {name: tree for name, tree in packages.items() if isinstance(tree, Folder)}
    if folders:
        version = find_version(backend, folders)
        located = replace(located, version=version)
        # a known release that was edited
        release = version.partition("+")[0]
        if release in others:
            changed = _find_differing_files(packages, others[release])
            return replace(located, changed=changed, release=release)
    return replace(located, changed=changed)


def _find_differing_files(
    packages: Mapping[str, Tree], release_facts: Mapping[str, Any]
) -> tuple[str, ...]:
    """The files that are not as committed facts have them."""
    files = release_facts["files"].items()
    return tuple(label for label, sha in files if facts.digest(packages, label) != sha)


def find_version(backend: str, packages: Mapping[str, Folder]) -> str:
    """The commit of a checkout (`+edited` with local changes), or the versions of packages."""
    if BACKENDS[backend].CHECKOUT:
        from launcher.machine.python import read_git_version

        return read_git_version(packages[backend].path.parent, backend) or "no git history"
    versions = [
        f"{name} {find_package_version(p.path.parent, name)}" for name, p in packages.items()
    ]
    return ", ".join(versions)


def find_package_version(site: Path, name: str) -> str:
    """The version of an installed distribution, from the name of its metadata folder."""
    stem = name.replace("-", "_").lower()
    for path in sorted(site.glob("*.dist-info")):
        if path.name.lower().startswith(f"{stem}-"):
            return path.name.removesuffix(".dist-info").partition("-")[2]
    return "unknown"


def report_unpinned(upstream: Upstream, *, allowed: bool, where_found: Severity) -> Finding | None:
    """What to say about a source that is not of a known release; None if there is nothing to say.

    A checkout that was named, or is the submodule, must be at a known commit. If one that was
    merely found is not, that has the severity `where_found`. Installed TRL packages are simply
    read: they are what will run.
    """
    if upstream.pinned:
        return None
    if not upstream.is_checkout:
        message = f"checked against the installed {upstream.version}; tested with {upstream.pin}"
        return launch_finding("note", "other-version", message)
    severity: Severity = "error" if upstream.is_named else where_found
    if allowed:
        severity = "warning"
    git = f"git -C {upstream.root}"
    checkout = f"{git} checkout {upstream.pin[:12]}"
    commit = upstream.version.removesuffix("+edited")
    help = checkout
    if commit != upstream.version:
        help = f"{git} stash"
        # checking out the commit that is checked out undoes no edit
        if commit != (upstream.release or upstream.pin):
            help = f"{help} && {checkout}"
    if not allowed:
        help += ", or continue with --allow-unpinned"
    files_changed = ", ".join(upstream.changed[:4])
    others = " and ".join(map(shorten_version, _read_other_facts(upstream.backend)))
    expected = f"the pin is {upstream.pin}"
    if others:
        expected += f", {others} known beside it"
    return launch_finding(
        severity,
        "unpinned-checkout",
        f"the checkout is at {upstream.version}, {expected} (different: {files_changed})",
        help,
        file=str(upstream.root),
    )


def no_trainer(backend: str, interpreter: Interpreter, severity: Severity) -> Finding:
    """That the Python which was named does not hold the packages of a trainer."""
    lacking = []
    for name in BACKENDS[backend].PACKAGES:
        if find_package(name, interpreter.path) is None:
            lacking.append(name)
    message = f"{interpreter.source} names a Python without {' and '.join(lacking)}"
    message = f"{message}: {interpreter.python}"
    names = " ".join(lacking)
    help = f"install them there ({names}), or name the Python that trains with --python PATH"
    return launch_finding(severity, "no-trainer", message, help, file=str(interpreter.python))


def load_schema(
    upstream: Upstream,
    stage: str,
    *,
    allow_unpinned: bool = False,
    say: Callable[[str], None] | None = None,
) -> Schema:
    """The schema of one entry script, from a source that differs from the snapshot and may be used.

    `say` is told if the source has to be read first, which takes long. Raises InvalidConfig if the
    source lacks the dataclasses (another commit's layout).
    """
    backend = BACKENDS[upstream.backend]
    release_facts = upstream.facts
    use_source = not upstream.pinned and (allow_unpinned or not upstream.is_checkout)
    # the snapshot may be older than the description of a further script
    if not use_source and stage in release_facts["stages"]:
        release = str(release_facts["version"])
        schema = facts.build_schema(release_facts, backend, stage, "snapshot", release)
        return replace(schema, standing=_find_standing(upstream, schema.script, release))

    def announce() -> None:
        if say is not None:
            say(f"reading the source of {upstream.version}: once, which can take half a minute")

    read = facts.read_cached_facts(
        backend, upstream.packages, release_facts["externals"], stage, announce
    )
    try:
        schema = facts.build_schema(read, backend, stage, "source", upstream.version)
    except LookupError as error:
        message = f"{upstream.version} cannot be read as this stage's source: {error.args[0]}"
        file = None if upstream.root is None else str(upstream.root)
        raise InvalidConfig(
            launch_finding("error", "unreadable-source", message, file=file)
        ) from None
    models = release_facts.get("models", {}).get(stage, {})
    # OLMo-core is no part of a checkout
    configs = schema.configs | frozenset(models.get("configs", ()))
    behaviours = _complete_behaviours(upstream, schema)
    standing = _find_standing(upstream, schema.script)
    return replace(schema, configs=configs, standing=standing, behaviours=behaviours)


def _complete_behaviours(upstream: Upstream, schema: Schema) -> Mapping[str, bool | None]:
    """What this source does: as it shows, else as its history says, where it has one."""
    answers = schema.behaviours
    key = BACKENDS[schema.backend].STAGES[schema.key].behaves_as or schema.key
    tree = upstream.packages.get(upstream.backend)
    if not upstream.is_checkout or None not in answers.values():
        return answers
    if isinstance(tree, CommitTree):
        return behaviour.complete_answers(answers, key, tree.repository, tree.commit)
    commit = upstream.version.removesuffix("+edited")
    if upstream.root is None or not _COMMIT.fullmatch(commit):
        return answers
    return behaviour.complete_answers(answers, key, Repository(upstream.root), commit)


def _list_own_files(entry: Entry) -> set[str]:
    """The files of one script, and those that define its arguments; shared ones are a library's."""
    files = {entry.script}
    if not entry.behaves_as:
        files |= {f"{module.replace('.', '/')}.py" for module, _ in entry.classes}
    return files


def _find_standing(upstream: Upstream, script: str, release: str = "") -> RuleStanding | None:
    """Whether the rules about a script hold in a source, or in a known `release`.

    None if they were written for just this one, and its lines are those that messages show.
    """
    from launcher.upstream import citations

    backend = BACKENDS[upstream.backend]
    if release and release == backend.PIN == backend.BASELINE:
        return None
    # scripts that do not run, and files that define arguments of theirs
    others: set[str] = set()
    running: set[str] = set()
    for entry in backend.STAGES.values():
        others |= _list_own_files(entry)
        if not running and script in (entry.script, entry.renamed):
            running = _list_own_files(entry)
    confirmed: Mapping[str, citations.Table]
    place: Callable[[str], citations.CitedPlace | None]
    if backend.CHECKOUT:
        confirmed = citations.load_commits(backend.NAME, backend.BASELINE)
    else:
        confirmed = {backend.PIN: citations.merge_tables(backend.PIN.split(", "))}
    if backend.CHECKOUT and release:
        place = confirmed.get(f"{backend.NAME} {release}", {}).get
    else:
        place = citations.SourceFiles(upstream.packages).place
    return citations.RuleStanding(
        written_for=shorten_version(backend.BASELINE),
        confirmed=confirmed,
        place=place,
        others=frozenset(others - running),
        by_line=not backend.CHECKOUT,
    )


def find_line_at_pin(schema: Schema, key: str) -> str | None:
    """The `file:line` that defines an argument of a script at the pin; None at the pin itself."""
    pin_facts = load_snapshot(schema.backend)
    if schema.version == pin_facts["version"]:
        return None
    for name in pin_facts["stages"].get(schema.key, ()):
        if name.partition(".")[2] == key:
            return str(pin_facts["fields"][name]["where"])
    return None


def find_past(upstream: Upstream, script: str, key: str) -> tuple[ArgumentChange, ...]:
    """What happened to an argument of a script, newest first; see `history.find_changes`.

    At the pin the committed table answers; anything else asks its own git history, if it has one.
    Of another known commit without a history, the table answers up to that commit's day.
    """
    release = upstream.release or upstream.pin
    if not upstream.is_checkout or (upstream.pinned and release == upstream.pin):
        return history.find_changes(key, script)
    tree = upstream.packages.get(upstream.backend)
    if isinstance(tree, CommitTree):
        return history.find_changes(key, script, tree.repository, head=tree.commit)
    repository = Repository(upstream.root) if upstream.root is not None else None
    events = history.find_changes(key, script, repository)
    releases = BACKENDS[upstream.backend].KNOWN
    dates = {release.version: release.date for release in releases if release.date}
    if not upstream.pinned or release not in dates:
        return events
    return tuple(event for event in events if event.date <= dates[release])


@dataclass(slots=True)
class Locator:
    """Finds each source once, and reads each schema once, for as many files as one command judges.

    `interpreter` is the Python that was named, whose packages are judged by: one that lacks them is
    refused. `say` is told what takes long. The other parameters are those of `locate` and
    `load_schema`.
    """

    checkout: Path | None = None
    search: Sequence[Path] | None = None
    allow_unpinned: bool = False
    interpreter: Interpreter | None = None
    say: Callable[[str], None] | None = None
    _found: dict[str, Upstream] = field(default_factory=dict)
    _schemas: dict[tuple[str, str], Schema] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Upstream) -> Locator:
        return cls(allow_unpinned=True, _found={source.backend: source})

    def find(self, backend: str) -> Upstream:
        """The source of a backend.

        Raises NotReady if a checkout was named and is none, or a Python that lacks the trainer's
        packages.
        """
        if backend not in self._found:
            self._found[backend] = self._locate(backend)
        return self._found[backend]

    def _locate(self, backend: str) -> Upstream:
        if self.interpreter is None:
            return locate(backend, checkout=self.checkout, search=self.search)
        source = locate(backend, checkout=self.checkout, search=self.interpreter.path)
        if source.root is None and not source.is_checkout:
            raise NotReady(no_trainer(backend, self.interpreter, "error"))
        return source

    def schema(self, backend: str, stage: str) -> Schema:
        """The schema of an entry script; raises InvalidConfig where the source cannot be read."""
        key = (backend, stage)
        if key not in self._schemas:
            source = self.find(backend)
            self._schemas[key] = load_schema(
                source, stage, allow_unpinned=self.allow_unpinned, say=self.say
            )
        return self._schemas[key]
