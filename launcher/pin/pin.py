"""Which open-instruct checkouts are here and how they stand to the pin; commits by name.

Everything is asked of git and of the files; nothing is changed, and nothing asks the network.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from launcher.errors import Exit, Finding, NotReady, UsageError, launch_finding, not_ready, usage
from launcher.lazy_dataclass import dataclass
from launcher.machine.git import Repository
from launcher.paths import exists, expand_user, resolve_path
from launcher.upstream import locate
from launcher.upstream.trainers import BACKENDS

PIN = BACKENDS["open_instruct"].PIN
KNOWN = tuple(release.version for release in BACKENDS["open_instruct"].KNOWN)
PACKAGE = BACKENDS["open_instruct"].PACKAGES[0]
URL = "https://github.com/allenai/open-instruct.git"
_SHOWN = 12
_MOST_FILES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckoutStatus:
    """One place where a checkout may lie, and what is there.

    `source` says who names it. `commit`, `date` (YYYY-MM-DD) and `subject` are what is checked out,
    None without a git history of its own; `edited_files` are tracked files that differ from that
    commit. `release` is the known commit that the files are compared with, `changed_files` those
    files that launch reads and that differ from it. `ahead` and `behind` count commits against the
    pin, None if the pin is not among the objects.
    """

    path: Path
    source: str
    used: bool
    state: locate.State
    commit: str | None = None
    date: str | None = None
    subject: str | None = None
    edited_files: tuple[str, ...] = ()
    changed_files: tuple[str, ...] = ()
    release: str | None = None
    ahead: int | None = None
    behind: int | None = None

    @property
    def edited_source(self) -> bool:
        """Whether a file of the package that training runs is edited."""
        return any(name.startswith(f"{PACKAGE}/") for name in self.edited_files)

    @property
    def known(self) -> bool:
        """Whether it is a known commit, as far as there is one, without an edit in the package."""
        if self.state != "checkout" or self.changed_files or self.edited_source:
            return False
        return self.commit in {None, self.release}

    @property
    def equal(self) -> bool:
        """Whether it is the pin."""
        return self.known and self.release == PIN

    def standing(self) -> str:
        if self.state != "checkout":
            return self.state
        if self.equal:
            return "the pin"
        return "a known commit" if self.known else "not the pin"

    def lines(self) -> Iterator[str]:
        word = "-"
        if self.used:
            word = "used"
        elif self.state == "checkout":
            word = "here"
        yield f"{word:<5} {self.path}  ({self.source}): {self.standing()}"
        if self.commit is not None:
            yield f"      at {self.commit[:_SHOWN]}, {self.date}, {self.subject}"
            distance = describe_distance(self.ahead, self.behind)
            yield f"      {distance or 'the pin is not among its objects'}"
        elif self.state == "checkout":
            yield "      without a git history of its own"
        if self.edited_files:
            yield f"      edited: {_join_names(self.edited_files)}"
        if self.changed_files:
            other = "the pin"
            if self.release is not None and self.release != PIN:
                other = self.release[:_SHOWN]
            yield f"      different from {other}: {_join_names(self.changed_files)}"

    def as_json(self) -> dict[str, object]:
        data = asdict(self)
        return {**data, "path": str(self.path), "equal": self.equal, "known": self.known}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Which checkout launch would use, which others are here, and what to do next.

    `fill` is the command that fills launch's own submodule, from wherever it is typed; None if
    launch was installed without its repository. `fault` is why the named place cannot be used.
    """

    places: tuple[CheckoutStatus, ...]
    fill: str | None = None
    fault: Finding | None = None

    @property
    def submodule(self) -> CheckoutStatus:
        own = resolve_path(locate.SUBMODULE)
        return next(place for place in self.places if resolve_path(place.path) == own)

    @property
    def used(self) -> CheckoutStatus | None:
        """The checkout that a run would use; None: only the committed snapshot is here."""
        return next((place for place in self.places if place.used), None)

    @property
    def exit_code(self) -> Exit:
        """0 for a known commit, 3 for another one or edits, 5 where there is no checkout."""
        if self.used is None:
            return Exit.NOT_READY
        return Exit.OK if self.used.known else Exit.CONFIG

    @property
    def findings(self) -> tuple[Finding, ...]:
        if self.fault is not None:
            return (self.fault,)
        used = self.used
        help = self.next[0] if self.next else None
        if used is None:
            message = (
                "there is no open-instruct checkout; what needs none uses the committed snapshot"
            )
            return tuple(not_ready("no-checkout", message, help).findings)
        if used.known:
            return ()
        edited = ", edited" if used.edited_source else ""
        commit = used.commit or "an unknown commit"
        message = f"the checkout is at {commit}{edited}, the pin is {PIN}"
        file = str(used.path)
        return tuple(not_ready("unpinned-checkout", message, help, file=file).findings)

    @property
    def next(self) -> tuple[str, ...]:
        return tuple(_suggest_commands(self))

    def as_json(self) -> dict[str, object]:
        used = self.used
        module = self.submodule
        return {
            "pin": PIN,
            "known": list(dict.fromkeys((PIN, *KNOWN))),
            "equal": used is not None and used.equal,
            "used": None if used is None else used.as_json(),
            "places": [place.as_json() for place in self.places],
            "submodule": {"path": str(module.path), "state": module.state, "fill": self.fill},
            "next": list(self.next),
        }

    def lines(self) -> list[str]:
        lines = [f"pin   {PIN}"]
        for commit in KNOWN:
            if commit != PIN:
                lines.append(f"known {commit}")
        for place in self.places:
            lines += place.lines()
        if self.used is None:
            lines.append("used  none of these: what needs no checkout uses the committed snapshot")
        for command in self.next:
            lines.append(f"next: {command}")
        return lines


def read_status(checkout: Path | None, environ: Mapping[str, str]) -> Status:
    """Look at every documented place, in the order in which launch looks for a checkout.

    Raises nothing for what is there: a named place that cannot be used is `Status.fault`.
    """
    fault = None
    used = None
    try:
        used = locate.locate("open_instruct", checkout=checkout, environ=environ).root
    except NotReady as error:
        fault = error.findings[0]
    places: dict[Path, CheckoutStatus] = {}
    for path, source in locate.list_checkout_places(checkout, environ):
        place = resolve_path(path)
        if place not in places:
            is_used = used is not None and place == resolve_path(used)
            places[place] = _inspect_place(path, source, used=is_used)
    return Status(places=tuple(places.values()), fill=_build_fill_command(), fault=fault)


def _build_fill_command() -> str | None:
    """The command that fills the submodule; None where this launch has none."""
    root = locate.REPOSITORY
    if not exists(root / ".gitmodules") or not locate.SUBMODULE.is_relative_to(root):
        return None
    module = locate.SUBMODULE.relative_to(root)
    return f"git -C {_quote(root)} submodule update --init {module}"


def get_checkout() -> str:
    """The command that brings the pin here."""
    commands = read_status(None, {}).next
    return commands[0] if commands else "git submodule update --init external/open-instruct"


def _inspect_place(path: Path, source: str, *, used: bool) -> CheckoutStatus:
    place = CheckoutStatus(path=path, source=source, used=used, state=locate.examine_place(path))
    if place.state != "checkout":
        return place
    located = locate.locate("open_instruct", checkout=path, environ={})
    place = replace(place, changed_files=located.changed, release=located.release)
    repository = Repository(path)
    commit = repository.commit("HEAD") if _is_own(repository) else None
    if commit is None:
        return place
    date, subject = describe(repository, commit)
    edited = repository.ask("diff", "--name-only", "--no-ext-diff", "-z", "HEAD", "--") or ""
    ahead, behind = count_commits_between(repository, PIN, commit)
    return replace(
        place,
        commit=commit,
        date=date,
        subject=subject,
        edited_files=tuple(filter(None, edited.split("\0"))),
        ahead=ahead,
        behind=behind,
    )


def _suggest_commands(status: Status) -> Iterator[str]:
    used = status.used
    if used is None:
        others = [place for place in status.places if place.known]
        if others and status.fault is not None:
            # the place that was named is none, another one is
            yield f"export LAUNCH_OPEN_INSTRUCT={_quote(others[0].path)}"
        # none is usual in a test
        usual = expand_user(locate.FOUND_IN[-1]) if locate.FOUND_IN else status.places[-1].path
        place = _quote(usual)
        yield status.fill or f"git clone {URL} {place} && git -C {place} checkout {PIN}"
        return
    if used.known:
        return
    if used.commit is None:
        yield f"git clone {URL} PATH && git -C PATH checkout {PIN}"
        return
    git = f"git -C {_quote(used.path)}"
    if used.edited_source:
        yield f"{git} stash"
    if used.commit == used.release:
        return
    if used.source == "submodule" and status.fill is not None:
        yield status.fill
    elif used.ahead is None:
        yield f"{git} fetch origin {PIN} && {git} checkout {PIN}"
    else:
        yield f"{git} checkout {PIN}"


@dataclass(frozen=True, slots=True)
class Commits:
    repository: Repository
    old: str
    new: str
    names: tuple[str, str]


def find_commits(
    words: Sequence[str], checkout: Path | None, environ: Mapping[str, str]
) -> Commits:
    """Two commits for `OLD NEW`, `OLD..NEW`, or `NEW` alone (against the pin), and where they are.

    A name is any that git knows, or `pin`. They are looked for in the first place of a checkout
    that is a repository, be it a bare one.

    Raises UsageError for words or names that make no sense, NotReady if there is no repository or
    objects were never fetched; the help is the command that gets them.
    """
    match words:
        case [both] if ".." in both:
            old, _, new = both.partition("..")
            names = (old or "pin", new.lstrip(".") or "HEAD")
        case [new]:
            names = ("pin", new)
        case [old, new]:
            names = (old, new)
        case _:
            help = "launch pin diff pin origin/main"
            raise usage("unknown-commit", "two commits are compared", help)
    repository = _find_repository(checkout, environ)
    old = _resolve_commit(repository, names[0])
    new = _resolve_commit(repository, names[1])
    return Commits(repository, old, new, names)


def _find_repository(checkout: Path | None, environ: Mapping[str, str]) -> Repository:
    places = [path for path, _ in locate.list_checkout_places(checkout, environ)]
    if checkout is not None or environ.get("LAUNCH_OPEN_INSTRUCT"):
        places = places[:1]
    for path in places:
        repository = Repository(path)
        if _is_own(repository):
            return repository
    message = f"there is no git repository in {' or '.join(map(str, places))}"
    help = f"git clone {URL}, then --open-instruct PATH (a bare clone will do)"
    raise not_ready("no-repository", message, help)


def _is_own(repository: Repository) -> bool:
    """Whether a folder is a repository: an empty one inside another would answer for that one."""
    if not exists(repository.root):
        return False
    own = resolve_path(repository.root)
    for folder in (repository.top(), repository.ask("rev-parse", "--absolute-git-dir")):
        if folder and resolve_path(Path(folder)) == own:
            return True
    return False


def _resolve_commit(repository: Repository, name: str) -> str:
    """The commit of a name. Raises NotReady or UsageError with the command that would fetch it."""
    if name == "pin":
        name = PIN
    commit = repository.commit(name)
    if commit is not None:
        return commit
    is_hash = re.fullmatch(r"[0-9a-f]{40,64}", name) is not None
    message = f"`{name}`: no commit that {repository.root} knows"
    words = "origin"
    if repository.is_shallow():
        message += ", whose history was cut off when it was cloned"
        words = "--unshallow origin"
    if is_hash:
        words = f"origin {name}"
    help = f"git -C {_quote(repository.root)} fetch {words}"
    file = str(repository.root)
    finding = launch_finding("error", "unknown-commit", message, help, file=file)
    if is_hash or repository.is_shallow():
        raise NotReady(finding)
    raise UsageError(finding)


def describe(repository: Repository, commit: str) -> tuple[str | None, str | None]:
    """The date (YYYY-MM-DD) and the subject of a commit; None if it is not there."""
    answer = repository.ask("show", "-s", "--no-show-signature", "--format=%cs%x00%s", commit)
    if not answer or "\0" not in answer:
        return None, None
    date, _, subject = answer.partition("\0")
    return date, subject


def count_commits_between(
    repository: Repository, old: str, new: str
) -> tuple[int | None, int | None]:
    """How many commits `new` is ahead of `old` and behind it; None if one is not there."""
    answer = repository.ask("rev-list", "--left-right", "--count", f"{old}...{new}", "--")
    match (answer or "").split():
        case [behind, ahead]:
            return int(ahead), int(behind)
    return None, None


def describe_distance(ahead: int | None, behind: int | None) -> str | None:
    return None if ahead is None else f"{ahead} commit(s) ahead, {behind} behind"


def _join_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_FILES])
    more = len(names) - _MOST_FILES
    return f"{shown} and {more} more" if more > 0 else shown


def _quote(path: Path) -> str:
    return shlex.quote(str(path))
