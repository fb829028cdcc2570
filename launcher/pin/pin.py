"""Which open-instruct checkouts are here and how they stand to the pin; commits by any name git knows.

Everything is asked of git and of the files; nothing is changed, and nothing asks the network.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from launcher.errors import Exit, Finding, NotReady, UsageError, launch_finding, not_ready, usage
from launcher.machine.git import Repository
from launcher.paths import canonical, exists, is_file
from launcher.upstream import locate
from launcher.upstream.trainers import BACKENDS

PIN = BACKENDS["open_instruct"].PIN
PACKAGE = BACKENDS["open_instruct"].PACKAGES[0]
URL = "https://github.com/allenai/open-instruct.git"
_SHOWN = 12

State = Literal["checkout", "missing", "empty", "other", "unreadable"]
_STATES: Mapping[State, str] = {
    "missing": "not there",
    "empty": "an empty folder",
    "other": "holds no open-instruct checkout",
    "unreadable": "cannot be read",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckoutStatus:
    """One place where a checkout may lie, and what is there.

    `source` says who names it. `commit`, `date` (YYYY-MM-DD) and `subject` are what is checked out,
    None without a git history of its own; `edited_files` are tracked files that differ from that commit,
    `changed_files` those files that launch reads and that differ from the pin's. `ahead` and `behind` count
    commits against the pin, None where the pin is not among the objects (`knows_pin`).
    """

    path: Path
    source: str
    used: bool
    state: State
    commit: str | None = None
    date: str | None = None
    subject: str | None = None
    edited_files: tuple[str, ...] = ()
    changed_files: tuple[str, ...] = ()
    ahead: int | None = None
    behind: int | None = None
    knows_pin: bool = False
    shallow: bool = False

    @property
    def edited_source(self) -> bool:
        """Whether a file of the package that training runs is edited."""
        return any(name.startswith(f"{PACKAGE}/") for name in self.edited_files)

    @property
    def equal(self) -> bool:
        """Whether it is the pin: its commit, as far as there is one, and no edit in the package."""
        here = self.state == "checkout" and self.commit in {None, PIN}
        return here and not self.changed_files and not self.edited_source

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "path": str(self.path), "equal": self.equal}

    def lines(self) -> Iterator[str]:
        mark = "used" if self.used else "here" if self.state == "checkout" else "-"
        standing = self._standing() if self.state == "checkout" else _STATES[self.state]
        yield f"{mark:<5} {self.path}  ({self.source}): {standing}"
        if self.state != "checkout":
            return
        if self.commit is not None:
            yield f"      at {self.commit[:_SHOWN]}, {self.date}, {self.subject}"
        else:
            yield "      without a git history of its own"
        if counts := _counts(self.ahead, self.behind):
            yield f"      {counts}"
        elif self.commit is not None and not self.knows_pin:
            yield "      the pin is not among its objects"
        if self.edited_files:
            yield f"      edited: {_listed(self.edited_files)}"
        if unedited := [name for name in self.changed_files if name not in self.edited_files]:
            yield f"      different from the pin: {_listed(unedited)}"

    def _standing(self) -> str:
        if self.equal:
            edits = ", edited outside of the package" if self.edited_files else ""
            return f"the pin{edits}" if self.commit else "the files of the pin"
        parts = []
        if self.commit not in {None, PIN}:
            same = "" if self.changed_files else ", with the same files as far as launch reads them"
            parts.append(f"another commit than the pin{same}")
        if self.edited_source:
            parts.append("edited")
        return " and ".join(parts) or "other files than the pin's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Which checkout launch would use, which others are here, and what to do next.

    `repository` is launch's own, None where it was installed without it; `recorded` the commit that its
    index names for the submodule. `fault` is why the place that was named cannot be used.
    """

    places: tuple[CheckoutStatus, ...]
    repository: Path | None = None
    recorded: str | None = None
    fault: Finding | None = None

    @property
    def submodule(self) -> CheckoutStatus:
        own = canonical(locate.SUBMODULE)
        return next(place for place in self.places if canonical(place.path) == own)

    @property
    def fill(self) -> str | None:
        """The one command that fills the submodule, from wherever it is typed."""
        if self.repository is None or self.recorded is None:
            return None
        below = locate.SUBMODULE.relative_to(self.repository)
        return f"git -C {_word(self.repository)} submodule update --init {below}"

    @property
    def used(self) -> CheckoutStatus | None:
        """The checkout that a run would use; None: only the committed snapshot is here."""
        return next((place for place in self.places if place.used), None)

    @property
    def exit_code(self) -> Exit:
        """0 for the pin, 3 for another commit or edits, 5 where there is no checkout."""
        if self.used is None:
            return Exit.NOT_READY
        return Exit.OK if self.used.equal else Exit.CONFIG

    @property
    def findings(self) -> tuple[Finding, ...]:
        if self.fault is not None:
            return (self.fault,)
        if self.used is not None and self.used.equal:
            return ()
        code, file = "no-checkout", None
        message = "there is no open-instruct checkout; what needs none uses the committed snapshot"
        if self.used is not None:
            edited = ", edited" if self.used.edited_source else ""
            code, file = "unpinned-checkout", str(self.used.path)
            message = f"the checkout is at {self.used.commit or 'an unknown commit'}{edited}, the pin is {PIN}"
        return tuple(not_ready(code, message, next(iter(self.next), None), file=file).findings)

    @property
    def next(self) -> tuple[str, ...]:
        return tuple(_next(self))

    def as_json(self) -> dict[str, object]:
        used = self.used
        return {
            "pin": PIN,
            "equal": used is not None and used.equal,
            "used": None if used is None else used.as_json(),
            "places": [place.as_json() for place in self.places],
            "submodule": {
                "path": str(locate.SUBMODULE),
                "state": self.submodule.state,
                "repository": None if self.repository is None else str(self.repository),
                "recorded": self.recorded,
                "fill": self.fill,
            },
            "next": list(self.next),
        }

    def lines(self) -> list[str]:
        told = [f"pin   {PIN}"]
        for place in self.places:
            told += place.lines()
        if self.used is None:
            told.append("used  none of these: what needs no checkout uses the committed snapshot")
        if self.repository is None:
            told.append("launch is installed without its repository: there is no submodule here")
        elif self.recorded is None:
            told.append(f"{self.repository} records no commit for its submodule")
        elif self.recorded != PIN:
            told.append(f"launch's repository records {self.recorded[:_SHOWN]}, not the pin")
        return told + [f"next: {command}" for command in self.next]


def status(checkout: Path | None, environ: Mapping[str, str]) -> Status:
    """Look at every documented place, in the order in which launch looks for a checkout.

    Raises nothing for what is there: a place that was named and cannot be used is `Status.fault`.
    """
    fault, used = None, None
    try:
        used = locate.locate("open_instruct", checkout=checkout, environ=environ).root
    except NotReady as error:
        fault = error.findings[0]
    places: list[CheckoutStatus] = []
    for path, source in locate.checkout_places(checkout, environ):
        if all(canonical(path) != canonical(known.path) for known in places):
            taken = used is not None and canonical(path) == canonical(used)
            places.append(_look(path, source, used=taken and not any(p.used for p in places)))
    # launch may be installed somewhere inside of another repository
    root = locate.REPOSITORY
    if not locate.SUBMODULE.is_relative_to(root) or not _is_own(Repository(root)):
        return Status(places=tuple(places), fault=fault)
    # the commit that the index names for the submodule
    entry = Repository(root).ask("ls-files", "-s", "--", locate.SUBMODULE.relative_to(root).as_posix()) or ""
    found = re.match(r"160000 ([0-9a-f]+) 0\t", entry)
    return Status(places=tuple(places), repository=root, recorded=found and found[1], fault=fault)


def get_checkout() -> str:
    return next(iter(status(None, {}).next), "git submodule update --init external/open-instruct")


def _look(path: Path, source: str, *, used: bool) -> CheckoutStatus:
    place = CheckoutStatus(path=path, source=source, used=used, state=_state(path))
    if place.state != "checkout":
        return place
    facts = locate.locate("open_instruct", checkout=path, environ={})
    place = replace(place, changed_files=facts.changed)
    repository = Repository(path)
    if not _is_own(repository):
        return place
    commit = repository.commit("HEAD")
    date, subject = describe(repository, commit) if commit else (None, None)
    edited = repository.ask("diff", "--name-only", "--no-ext-diff", "-z", "HEAD", "--") or ""
    ahead, behind = distance(repository, PIN, commit) if commit else (None, None)
    return replace(
        place,
        commit=commit,
        date=date,
        subject=subject,
        edited_files=tuple(filter(None, edited.split("\0"))),
        ahead=ahead,
        behind=behind,
        knows_pin=repository.commit(PIN) is not None,
        shallow=repository.is_shallow(),
    )


def _state(path: Path) -> State:
    if is_file(path / PACKAGE / "finetune.py"):
        return "checkout"
    if not exists(path):
        return "missing"
    try:
        return "empty" if path.is_dir() and not any(path.iterdir()) else "other"
    except OSError:
        return "unreadable"


def _next(told: Status) -> Iterator[str]:
    used = told.used
    # what the index records may be another commit than the pin
    fill = told.fill if told.recorded == PIN else None
    if used is None:
        other = next((place for place in told.places if place.equal), None)
        if other is not None and told.fault is not None:
            # the place that was named is none, another one is
            yield f"export LAUNCH_OPEN_INSTRUCT={_word(other.path)}"
        place = _word(told.places[-1].path)
        yield fill or f"git clone {URL} {place} && git -C {place} checkout {PIN}"
    elif not used.equal and used.commit is None:
        yield f"git clone {URL} PATH && git -C PATH checkout {PIN}"
    elif not used.equal:
        git = f"git -C {_word(used.path)}"
        if used.edited_source:
            yield f"{git} stash"
        if used.commit != PIN:
            fetch = "" if used.knows_pin else f"{git} fetch origin {PIN} && "
            yield fill if fill and used.source == "submodule" else f"{fetch}{git} checkout {PIN}"
    elif fill is not None and told.submodule.state in {"empty", "missing"}:
        # not needed, while the other one is there
        yield fill


@dataclass(frozen=True, slots=True)
class Commits:
    repository: Repository
    old: str
    new: str
    names: tuple[str, str]


def find_commits(words: Sequence[str], checkout: Path | None, environ: Mapping[str, str]) -> Commits:
    """Two commits for `OLD NEW`, `OLD..NEW`, or `NEW` alone (against the pin), and where they are.

    A name is any that git knows, or `pin`. Searched are the checkout that was named (also a bare
    repository), else all documented places: the first that holds both commits counts.

    Raises UsageError for words or names that make no sense, NotReady where there is no repository or
    where objects were never fetched; the help is the command that gets them.
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
            raise usage("unknown-commit", "two commits are compared", "launch pin diff pin origin/main")
    places = list(locate.checkout_places(checkout, environ))
    named = checkout is not None or bool(environ.get("LAUNCH_OPEN_INSTRUCT"))
    places = places[:1] if named else places
    repositories = [Repository(path) for path, _ in places if _is_own(Repository(path), bare=True)]
    if not repositories:
        where = f"{places[0][1]} names no git repository: {places[0][0]}"
        raise not_ready(
            "no-repository",
            where if named else "there is no open-instruct repository to read commits from",
            f"git clone {URL}, then --open-instruct PATH (a bare clone will do)",
        )
    for repository in repositories:
        found = [repository.commit(PIN if name == "pin" else name) for name in names]
        if found[0] is not None and found[1] is not None:
            return Commits(repository, found[0], found[1], names)
    raise _unknown(repositories[0], names)


def _is_own(repository: Repository, *, bare: bool = False) -> bool:
    """Whether a folder is a repository: an empty one inside of another would answer for that one."""
    if not exists(repository.root):
        return False
    here = canonical(repository.root)
    top = repository.top()
    if top is not None and canonical(top) == here:
        return True
    folder = repository.ask("rev-parse", "--absolute-git-dir") if bare else None
    return folder is not None and canonical(Path(folder)) == here


def _unknown(first: Repository, names: tuple[str, str]) -> NotReady | UsageError:
    """The error for names that no repository knows, of the first one, with what would get them."""
    meant = [PIN if name == "pin" else name for name in dict.fromkeys(names)]
    lacking = [name for name in meant if first.commit(name) is None] or meant
    whole = re.fullmatch(r"[0-9a-f]{40,64}", lacking[0]) is not None
    shallow = first.is_shallow()
    words = f"origin {lacking[0]}" if whole else "--unshallow origin" if shallow else "origin"
    message = f"{' and '.join(f'`{n}`' for n in lacking)}: no commit that {first.root} knows"
    message += ", whose history was cut off when it was cloned" if shallow else ""
    help = f"git -C {_word(first.root)} fetch {words}"
    finding = launch_finding("error", "unknown-commit", message, help, file=str(first.root))
    return NotReady(finding) if shallow or whole else UsageError(finding)


def describe(repository: Repository, commit: str) -> tuple[str | None, str | None]:
    """The date (YYYY-MM-DD) and the subject of a commit; None where it is not there."""
    told = repository.ask("show", "-s", "--no-show-signature", "--format=%cs%x00%s", commit)
    date, found, subject = (told or "").partition("\0")
    return (date, subject) if found else (None, None)


def distance(repository: Repository, old: str, new: str) -> tuple[int | None, int | None]:
    """How many commits `new` is ahead of `old` and behind it; None where one is not there."""
    told = repository.ask("rev-list", "--left-right", "--count", f"{old}...{new}", "--")
    counts = (told or "").split()
    return (int(counts[1]), int(counts[0])) if len(counts) == 2 else (None, None)


def _counts(ahead: int | None, behind: int | None) -> str:
    if ahead and behind:
        return f"{ahead} commit(s) ahead of it, {behind} behind it"
    number, word = (ahead, "ahead of") if ahead else (behind, "behind")
    return f"{number} commit(s) {word} it" if number else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def _word(path: Path) -> str:
    return shlex.quote(str(path))
