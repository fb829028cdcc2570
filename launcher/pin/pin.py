"""Which open-instruct checkouts are here and how they stand to the pin; commits by any name git knows.

Everything is asked of git and of the files; nothing is changed, and nothing asks the network.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.errors import Exit, Finding, NotReady, UsageError, launch_finding, not_ready, usage
from launcher.machine.git import Repository
from launcher.paths import canonical, exists, expanded
from launcher.upstream import locate
from launcher.upstream.trainers import BACKENDS

PIN = BACKENDS["open_instruct"].PIN
KNOWN = tuple(release.version for release in BACKENDS["open_instruct"].KNOWN)
PACKAGE = BACKENDS["open_instruct"].PACKAGES[0]
URL = "https://github.com/allenai/open-instruct.git"
_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckoutStatus:
    """One place where a checkout may lie, and what is there.

    `source` says who names it. `commit`, `date` (YYYY-MM-DD) and `subject` are what is checked out,
    None without a git history of its own; `edited_files` are tracked files that differ from that commit.
    `release` is the known commit that the files are compared with, `changed_files` those files that launch reads
    and that differ from it. `ahead` and `behind` count commits against the pin, None where the pin is not among the
    objects.
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
        """Whether it is a known commit: its commit, as far as there is one, and no edit in the package."""
        here = self.state == "checkout" and self.commit in {None, self.release}
        return here and not self.changed_files and not self.edited_source

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
        here = self.state == "checkout"
        standing = self.standing()
        yield f"{'used' if self.used else 'here' if here else '-':<5} {self.path}  ({self.source}): {standing}"
        if self.commit is not None:
            yield f"      at {self.commit[:_SHOWN]}, {self.date}, {self.subject}"
            yield f"      {counts(self.ahead, self.behind) or 'the pin is not among its objects'}"
        elif here:
            yield "      without a git history of its own"
        if self.edited_files:
            yield f"      edited: {_listed(self.edited_files)}"
        if self.changed_files:
            other = "the pin" if self.release in {None, PIN} else f"{str(self.release)[:_SHOWN]}"
            yield f"      different from {other}: {_listed(self.changed_files)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Which checkout launch would use, which others are here, and what to do next.

    `fill` is the command that fills launch's own submodule, from wherever it is typed; None where launch
    was installed without its repository. `fault` is why the place that was named cannot be used.
    """

    places: tuple[CheckoutStatus, ...]
    fill: str | None = None
    fault: Finding | None = None

    @property
    def submodule(self) -> CheckoutStatus:
        own = canonical(locate.SUBMODULE)
        return next(place for place in self.places if canonical(place.path) == own)

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
        if self.used is not None and self.used.known:
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
        used, module = self.used, self.submodule
        return {
            "pin": PIN,
            "known": list(dict.fromkeys((PIN, *KNOWN))),
            "equal": used is not None and used.equal,
            "used": None if used is None else _as_json(used),
            "places": [_as_json(place) for place in self.places],
            "submodule": {"path": str(module.path), "state": module.state, "fill": self.fill},
            "next": list(self.next),
        }

    def lines(self) -> list[str]:
        lines = [f"pin   {PIN}"]
        lines += [f"known {commit}" for commit in KNOWN if commit != PIN]
        for place in self.places:
            lines += place.lines()
        if self.used is None:
            lines.append("used  none of these: what needs no checkout uses the committed snapshot")
        return lines + [f"next: {command}" for command in self.next]


def _as_json(place: CheckoutStatus) -> dict[str, object]:
    return {**asdict(place), "path": str(place.path), "equal": place.equal, "known": place.known}


def status(checkout: Path | None, environ: Mapping[str, str]) -> Status:
    """Look at every documented place, in the order in which launch looks for a checkout.

    Raises nothing for what is there: a place that was named and cannot be used is `Status.fault`.
    """
    fault, used = None, None
    try:
        used = locate.locate("open_instruct", checkout=checkout, environ=environ).root
    except NotReady as error:
        fault = error.findings[0]
    places: dict[Path, CheckoutStatus] = {}
    for path, source in locate.checkout_places(checkout, environ):
        if (place := canonical(path)) not in places:
            places[place] = _look(path, source, used=used is not None and place == canonical(used))
    root, fill = locate.REPOSITORY, None
    if exists(root / ".gitmodules") and locate.SUBMODULE.is_relative_to(root):
        fill = f"git -C {_word(root)} submodule update --init {locate.SUBMODULE.relative_to(root)}"
    return Status(places=tuple(places.values()), fill=fill, fault=fault)


def get_checkout() -> str:
    return next(iter(status(None, {}).next), "git submodule update --init external/open-instruct")


def _look(path: Path, source: str, *, used: bool) -> CheckoutStatus:
    place = CheckoutStatus(path=path, source=source, used=used, state=locate.state_of(path))
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
    ahead, behind = distance(repository, PIN, commit)
    return replace(
        place,
        commit=commit,
        date=date,
        subject=subject,
        edited_files=tuple(filter(None, edited.split("\0"))),
        ahead=ahead,
        behind=behind,
    )


def _next(status: Status) -> Iterator[str]:
    used = status.used
    if used is None:
        other = next((place for place in status.places if place.known), None)
        if other is not None and status.fault is not None:
            # the place that was named is none, another one is
            yield f"export LAUNCH_OPEN_INSTRUCT={_word(other.path)}"
        place = _word(expanded(locate.FOUND_IN[-1]) if locate.FOUND_IN else status.places[-1].path)
        yield status.fill or f"git clone {URL} {place} && git -C {place} checkout {PIN}"
    elif not used.known and used.commit is None:
        yield f"git clone {URL} PATH && git -C PATH checkout {PIN}"
    elif not used.known:
        git = f"git -C {_word(used.path)}"
        if used.edited_source:
            yield f"{git} stash"
        if used.commit != used.release:
            fetch = f"{git} fetch origin {PIN} && " if used.ahead is None else ""
            own = status.fill if used.source == "submodule" else None
            yield own or f"{fetch}{git} checkout {PIN}"


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

    A name is any that git knows, or `pin`. They are looked for in the first place of a checkout that is a
    repository, be it a bare one.

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
            raise usage(
                "unknown-commit", "two commits are compared", "launch pin diff pin origin/main"
            )
    places = list(locate.checkout_places(checkout, environ))
    if checkout is not None or environ.get("LAUNCH_OPEN_INSTRUCT"):
        places = places[:1]
    repository = next((one for path, _ in places if _is_own(one := Repository(path))), None)
    if repository is None:
        message = f"there is no git repository in {' or '.join(str(path) for path, _ in places)}"
        help = f"git clone {URL}, then --open-instruct PATH (a bare clone will do)"
        raise not_ready("no-repository", message, help)
    old, new = (PIN if name == "pin" else name for name in names)
    commits = repository.commit(old), repository.commit(new)
    if commits[0] is None or commits[1] is None:
        raise _unknown(repository, old if commits[0] is None else new)
    return Commits(repository, commits[0], commits[1], names)


def _is_own(repository: Repository) -> bool:
    """Whether a folder is a repository: an empty one inside of another would answer for that one."""
    if not exists(repository.root):
        return False
    found = repository.top(), repository.ask("rev-parse", "--absolute-git-dir")
    return canonical(repository.root) in {canonical(Path(one)) for one in found if one}


def _unknown(repository: Repository, name: str) -> NotReady | UsageError:
    """The error for a name that a repository does not know, with what would get it."""
    whole = re.fullmatch(r"[0-9a-f]{40,64}", name) is not None
    shallow = repository.is_shallow()
    words = f"origin {name}" if whole else "--unshallow origin" if shallow else "origin"
    message = f"`{name}`: no commit that {repository.root} knows"
    message += ", whose history was cut off when it was cloned" if shallow else ""
    help = f"git -C {_word(repository.root)} fetch {words}"
    finding = launch_finding("error", "unknown-commit", message, help, file=str(repository.root))
    return NotReady(finding) if shallow or whole else UsageError(finding)


def describe(repository: Repository, commit: str) -> tuple[str | None, str | None]:
    """The date (YYYY-MM-DD) and the subject of a commit; None where it is not there."""
    answer = repository.ask("show", "-s", "--no-show-signature", "--format=%cs%x00%s", commit)
    date, found, subject = (answer or "").partition("\0")
    return (date, subject) if found else (None, None)


def distance(repository: Repository, old: str, new: str) -> tuple[int | None, int | None]:
    """How many commits `new` is ahead of `old` and behind it; None where one is not there."""
    answer = repository.ask("rev-list", "--left-right", "--count", f"{old}...{new}", "--")
    numbers = (answer or "").split()
    return (int(numbers[1]), int(numbers[0])) if len(numbers) == 2 else (None, None)


def counts(ahead: int | None, behind: int | None) -> str | None:
    return None if ahead is None else f"{ahead} commit(s) ahead, {behind} behind"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def _word(path: Path) -> str:
    return shlex.quote(str(path))
