"""`launch pin move`: citations found again at another commit, and what follows from the pin."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from launcher.errors import Exit, Finding, NotReady, launch_finding
from launcher.lazy_dataclass import dataclass
from launcher.machine.git import CommitTree, Repository
from launcher.machine.locks import hold_exclusive
from launcher.paths import IS_CLONE
from launcher.pin import cited, pin
from launcher.pin.move import staging
from launcher.pin.move.journal import NAME, Journal
from launcher.pin.move.review import Review, review
from launcher.upstream import locate
from launcher.upstream.citations import SourceFiles

SUBMODULE = "external/open-instruct"
_SHORT = 12


@dataclass(frozen=True, slots=True)
class Move:
    """A finished move: the files that it changed, what waits for a person, tests that fail now."""

    old: str
    new: str
    files: tuple[str, ...]
    review: Review
    failed: tuple[str, ...]

    @property
    def exit_code(self) -> Exit:
        """0 where nothing waits for a person, else 1."""
        return Exit.VERDICT if self.findings else Exit.OK

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(self._list_findings())

    def _list_findings(self) -> Iterator[Finding]:
        for line in self.review.stale:
            file, _, number = line.where.rpartition(":")
            message = f"{line.citation} is not in open-instruct at {self.new[:_SHORT]}"
            help = "cite what is there now" + ("" if line.now is None else f", perhaps {line.now}")
            yield launch_finding(
                "error", "stale-citation", message, help, file=file, line=int(number)
            )
        reviewed = f'reviewed=("{self.new[:_SHORT]}",)'
        for rule, functions in self.review.rules.items():
            file, _, number = rule.where.rpartition(":")
            changed = ", ".join(functions)
            message = f"{rule.name} is a note at {self.new[:_SHORT]} until it is confirmed"
            message = f"{message}: {changed} changed"
            help = "compare the texts below; where the rule is still true,"
            help = f"{help} add {reviewed} to its citations"
            yield launch_finding(
                "warning", "unconfirmed-rule", message, help, file=file, line=int(number)
            )
        for test in self.failed:
            file = test.partition("::")[0]
            message = f"{test} fails at {self.new[:_SHORT]}"
            yield launch_finding("error", "golden-differs", message, f"pytest {test}", file=file)

    def as_json(self) -> dict[str, object]:
        return {
            "old": self.old,
            "new": self.new,
            "files": list(self.files),
            "review": self.review.as_json(),
            "failed": list(self.failed),
        }

    def lines(self) -> Iterator[str]:
        yield from self.review.lines()
        yield ""
        state = f"moved to {self.new}" if self.files else f"the pin is {self.new}"
        rules = f"{len(self.review.rules)} rule(s) to confirm"
        stale = f"{len(self.review.stale)} citation(s) to mend"
        yield f"{state}: {len(self.files)} file(s) written; {rules}, {stale}"
        update = f"git -C {locate.REPOSITORY} submodule update --init {SUBMODULE}"
        yield f"next: {update}, make test, git commit"


def move(
    name: str,
    checkout: Path | None,
    environ: Mapping[str, str],
    say: Callable[[str], None] = lambda text: None,
) -> Move:
    """Move the pin of this clone to a commit by any name that git knows.

    Raises UsageError and NotReady as `pin.find_commits`, NotReady outside of a clone or without the
    packages, InvalidConfig for a commit that launch cannot read. Whatever is raised, the clone is
    as it was.
    """
    clone = locate.REPOSITORY
    git_folder = _find_git_folder(clone)
    journal = Journal(clone, git_folder / NAME)
    with hold_exclusive(
        git_folder / f"{NAME}.lock", waiting=lambda: say("Waiting for another move of the pin")
    ):
        staging.require_packages()
        if journal.exists:
            say("Completing a move of the pin that was interrupted")
            journal.apply()
            # what this process has imported may be of the pin before
            os.execv(sys.executable, sys.orig_argv)
        return _move(name, checkout, environ, journal, say)


def _move(
    name: str,
    checkout: Path | None,
    environ: Mapping[str, str],
    journal: Journal,
    say: Callable[[str], None],
) -> Move:
    clone = journal.clone
    commits = pin.find_commits([name], checkout, environ)
    trees = _read_trees(commits)
    for leftover in journal.folder.parent.glob(f"{NAME}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=f"{NAME}-", dir=journal.folder.parent))
    try:
        staged = staging.stage_move(clone, place, commits.repository, commits.new, say)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    names = cited.list_commits_of_rules()
    confirmed_commits = [commit for commit in trees if commit.startswith(names)]
    later = cited.select_later_commits(commits.new, confirmed_commits, commits.repository)
    reviewed = review(cited.find_citations(clone), trees, (commits.old, commits.new), later)
    gitlink = {SUBMODULE: commits.new} if _is_submodule(clone) else {}
    journal.write(staged.files, gitlink)
    journal.apply()
    return Move(commits.old, commits.new, tuple(sorted(staged.files)), reviewed, staged.failed)


def _read_trees(commits: pin.Commits) -> dict[str, SourceFiles]:
    """open-instruct's files at both commits and at each that confirms a rule; NotReady without."""
    repository = commits.repository
    names = [commits.old, commits.new, *cited.list_commits_of_rules()]
    trees = {}
    findings = []
    for name in names:
        commit = repository.commit(name)
        if commit is None:
            message = f"{repository.root} lacks {name}, at which rules were confirmed"
            help = f"git -C {repository.root} fetch origin {name}"
            file = str(repository.root)
            findings.append(launch_finding("error", "unknown-commit", message, help, file=file))
        else:
            tree = CommitTree(repository, commit, cited.PACKAGE)
            trees[commit] = SourceFiles({cited.PACKAGE: tree})
    if findings:
        raise NotReady(findings)
    return trees


def _find_git_folder(clone: Path) -> Path:
    """The folder of the clone's git data. Raises NotReady if launch has no clone."""
    repository = Repository(clone)
    top = repository.top()
    answer = repository.ask("rev-parse", "--absolute-git-dir")
    if not IS_CLONE or top is None or answer is None or not os.path.samefile(top, clone):
        message = f"{clone} is no clone of launch: the pin belongs to its source"
        raise NotReady(
            launch_finding(
                "error", "no-clone", message, "run .venv/bin/launch of a clone", file=str(clone)
            )
        )
    return Path(answer)


def _is_submodule(clone: Path) -> bool:
    return bool(Repository(clone).ask("ls-files", "-s", SUBMODULE))
