"""`launch pin move`: all files or none, whatever interrupts it; and what it lists for a person."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, find_checkout

from launcher.errors import Finding, NotReady
from launcher.pin import cited
from launcher.pin.cited import Citing
from launcher.pin.move import review as reviews
from launcher.pin.move.journal import NAME, Journal
from launcher.pin.move.move import Move
from launcher.pin.move.review import Review
from launcher.rules.rule import cites
from launcher.upstream.citations import SourceFiles
from launcher.upstream.open_instruct import PIN
from launcher.upstream.source.packages import Folder

FILES = {"README.md": b"new\n", "docs/a.md": b"new too\n", "launcher/made.py": b"MADE = 1\n"}
"""What a change writes."""
GONE = "docs/gone.md"
"""What a change removes."""
COMMIT = 40 * "b"
SUBMODULE = "external/open-instruct"


def git(place: Path, *words: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(place), *author, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with two of the files, an executable among them, and a submodule."""
    place = tmp_path / "clone"
    (place / "docs").mkdir(parents=True)
    (place / "README.md").write_text("old\n")
    (place / "README.md").chmod(0o755)
    (place / "docs/a.md").write_text("old too\n")
    (place / GONE).write_text("of a commit that is forgotten\n")
    git(place, "init", "-q")
    git(place, "add", ".")
    entry = f"160000,{40 * 'a'},{SUBMODULE}"
    git(place, "update-index", "--add", "--cacheinfo", entry)
    git(place, "commit", "-qm", "first")
    return place


def journal_of(clone: Path) -> Journal:
    return Journal(clone, clone / ".git" / NAME)


@dataclass(frozen=True)
class State:
    """The files of a work tree, and the commit that git has recorded of the submodule."""

    files: dict[str, bytes]
    submodule: str


def state_of(clone: Path) -> State:
    files = {}
    for path in sorted(clone.rglob("*")):
        if path.is_file() and ".git" not in path.parts:
            files[path.relative_to(clone).as_posix()] = path.read_bytes()
    return State(files, git(clone, "ls-files", "-s", "external"))


PROGRAM = """
import os, signal, sys
from pathlib import Path
from launcher.pin.move.journal import NAME, Journal

clone, limit = Path(sys.argv[1]), int(sys.argv[2])
journal = Journal(clone, clone / ".git" / NAME)
count = 0
for name in ("replace", "rename"):
    def stopping(*words, real=getattr(os, name), **more):
        global count
        if count == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return real(*words, **more)
    setattr(os, name, stopping)
if journal.exists:
    journal.apply()
else:
    journal.write({files!r}, {{"external/open-instruct": {commit!r}}})
    journal.apply()
"""


def change(clone: Path, kill_before: int = 1000) -> int:
    """Change a clone in a process that is killed before so many renamings; its exit code."""
    program = PROGRAM.format(files={**FILES, GONE: None}, commit=COMMIT)
    command = [sys.executable, "-c", program, str(clone), str(kill_before)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, env=environ).returncode


def test_the_next_change_completes_one_that_was_killed_anywhere(
    clone: Path, tmp_path: Path
) -> None:
    before = state_of(clone)
    complete = shutil.copytree(clone, tmp_path / "complete")
    assert change(complete) == 0
    after = state_of(complete)
    assert after.files == FILES
    assert COMMIT in after.submodule

    kills = 0
    while True:
        place = shutil.copytree(clone, tmp_path / str(kills))
        if change(place, kill_before=kills) != -signal.SIGKILL:
            break
        kills += 1
        # before the journal is complete nothing is changed
        assert journal_of(place).exists or state_of(place) == before
        assert change(place) == 0
        assert state_of(place) == after
        assert not journal_of(place).exists
        assert os.access(place / "README.md", os.X_OK)
    # each file is written, and then put in place
    assert kills >= 2 * len(FILES)


def test_a_file_that_was_changed_meanwhile_is_not_overwritten(clone: Path) -> None:
    journal_of(clone).write(FILES, {})
    for name in ("README.md", "docs/a.md"):
        (clone / name).write_text("by hand\n")
    before = state_of(clone)

    with pytest.raises(NotReady) as refusal:
        journal_of(clone).apply()

    findings = refusal.value.findings
    assert [finding.file for finding in findings] == ["README.md", "docs/a.md"]
    assert {finding.code for finding in findings} == {"move-interrupted"}
    assert "rm -r" in (findings[0].help or "")
    assert state_of(clone) == before
    assert journal_of(clone).exists


def test_nothing_is_changed_where_git_refuses_the_submodules_commit(clone: Path) -> None:
    before = state_of(clone)
    journal_of(clone).write(FILES, {SUBMODULE: COMMIT})
    (clone / ".git/index.lock").touch()

    with pytest.raises(NotReady) as refusal:
        journal_of(clone).apply()

    (clone / ".git/index.lock").unlink()
    assert [finding.code for finding in refusal.value.findings] == ["move-interrupted"]
    assert state_of(clone) == before
    assert not journal_of(clone).exists


OLD = """
def train(args, model):
    \"\"\"One step.\"\"\"
    loss = model(args.rows)
    if args.clip > 0:
        clip(model, args.clip)
    return loss


def save(args, model):
    model.save(args.output)


class Arguments:
    seed: int = 1
    clip: float = -1
"""
LOSS = "open_instruct/train.py::train[loss = model]"
SAVE = "open_instruct/train.py::save[model.save]"
SEED = "open_instruct/train.py::Arguments[seed: int]"
CLIP = "open_instruct/train.py::Arguments[clip: float]"
PLACES = {"loss": LOSS, "save": SAVE, "seed": SEED, "clip": CLIP}
"""A line of `OLD` for each of four rules."""


def rule_about(name: str, place: str, reviewed: tuple[str, ...]) -> Callable[..., Any]:
    @cites(place, reviewed=reviewed)
    def rule(_: Any) -> Iterator[Finding]:
        yield from ()

    rule.__dict__["about"] = name
    return rule


Reviewer = Callable[..., Review]


@pytest.fixture
def review(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reviewer:
    """Review the rules after a move from `OLD`, with some words of it replaced."""
    before = 40 * "a"
    after = COMMIT

    def sources_at(commit: str, text: str) -> SourceFiles:
        folder = tmp_path / commit / "open_instruct"
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(text)
        return SourceFiles({"open_instruct": Folder(folder)})

    def review_move(
        *replaced: tuple[str, str], confirmed: tuple[str, ...] = (), later: tuple[str, ...] = ()
    ) -> Review:
        text = OLD
        for words, others in replaced:
            assert words in text
            text = text.replace(words, others)
        trees = {before: sources_at(before, OLD), after: sources_at(after, text)}
        rules = []
        citing = []
        for number, (name, place) in enumerate(PLACES.items(), 1):
            rules.append(rule_about(name, place, confirmed))
            citing.append(Citing("launcher/rules/a.py", number, place))
        monkeypatch.setattr(reviews, "list_rules", lambda _: rules)
        monkeypatch.setattr(cited, "list_rules", lambda _: rules)
        monkeypatch.setattr(reviews, "list_commits_of_rules", lambda: (before, *confirmed))
        return reviews.review(citing, trees, (before, after), later)

    return review_move


NEW_CLIP_TEST = ("args.clip > 0", "args.clip is not None")
NEW_SAVE_NAME = ("def save(", "def keep(")


@pytest.mark.parametrize(
    ("words", "others", "waiting"),
    [
        pytest.param("    loss =", "    # why\n    print(1)\n    loss =", [], id="a log line"),
        pytest.param("    loss =", "    if args.rows:\n     loss =", ["loss"], id="a new test"),
        pytest.param(*NEW_CLIP_TEST, ["loss"], id="another line of its function"),
        pytest.param("clip: float = -1", "clip: float = 0", ["clip"], id="its line"),
        pytest.param(*NEW_SAVE_NAME, ["save"], id="the name of its function"),
        pytest.param("seed: int", "rank: int = 0\n    seed: int", [], id="another argument"),
    ],
)
def test_a_rule_waits_where_its_line_or_its_function_changed(
    words: str, others: str, waiting: list[str], review: Reviewer
) -> None:
    assert [rule.name for rule in review((words, others)).rules] == waiting


def test_a_rule_that_is_confirmed_at_the_commit_does_not_wait(review: Reviewer) -> None:
    gone_line = ("clip: float = -1", "top: float")
    result = review(NEW_CLIP_TEST, gone_line, confirmed=("bbbb",))
    assert not result.rules
    assert not result.changed
    # the rule that cites a line that is gone excuses it
    assert not result.stale


def test_what_changed_in_a_function_is_shown(review: Reviewer) -> None:
    result = review(NEW_CLIP_TEST)
    (function,) = result.changed
    assert function.name == "open_instruct/train.py::train"
    assert function.lines == ((LOSS, 4, 4),)
    rows = function.diff()
    assert "-    if args.clip > 0:" in rows
    assert "+    if args.clip is not None:" in rows
    assert "One step" not in "".join(rows)
    assert "launcher/rules/a.py:1: loss" in "\n".join(result.lines())


def test_a_citation_that_is_gone_says_what_it_may_be_now(review: Reviewer) -> None:
    (gone,) = review(("model.save(args.output)", "model.save_whole(args.output)")).stale
    assert gone.where == "launcher/rules/a.py:2"
    assert gone.citation == SAVE
    assert gone.text == "model.save(args.output)"
    assert gone.now == "open_instruct/train.py:11: model.save_whole(args.output)"


def test_what_a_later_known_commit_has_may_be_cited(review: Reviewer) -> None:
    assert not review(NEW_SAVE_NAME, later=(40 * "a",)).stale


def test_a_move_says_what_to_do_next(review: Reviewer) -> None:
    unchanged = review()
    assert Move("a", COMMIT, (), unchanged, ()).exit_code == 0

    stale = reviews.Stale("a.py:3", LOSS, "x", None)
    move = Move("a", COMMIT, ("README.md",), replace(unchanged, stale=(stale,)), ("t::x",))
    assert move.exit_code == 1
    for_citation, for_golden = move.findings
    assert (for_citation.code, for_citation.file, for_citation.line) == (
        "stale-citation",
        "a.py",
        3,
    )
    assert (for_golden.code, for_golden.file) == ("golden-differs", "t")
    assert for_citation.help
    assert for_golden.help
    (listed,) = json.loads(json.dumps(move.as_json()))["review"]["stale"]
    assert listed["where"] == "a.py:3"


@dataclass(frozen=True)
class Project:
    """A copy of this repository, and the command that runs in it."""

    place: Path
    upstream: Path

    def command(self, commit: str) -> list[str]:
        words = ["pin", "move", commit, "--open-instruct", str(self.upstream)]
        return [sys.executable, "-m", "launcher", *words]

    def environ(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.place)}

    def move(self, commit: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command(commit), *options],
            cwd=self.place,
            env=self.environ(),
            capture_output=True,
            text=True,
        )

    def is_clean(self) -> bool:
        return git(self.place, "status", "--porcelain") == ""


def test_without_a_clone_nothing_is_moved(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "launcher", tmp_path / "launcher", ignore=ignore)
    done = Project(tmp_path, tmp_path).move(PIN, "--format", "json")
    assert done.returncode == 5, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["code"] == "no-clone"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A clone of this repository with the work tree's own changes, committed."""
    pytest.importorskip("olmo_core")
    checkout = find_checkout()
    if checkout is None or not (checkout / ".git").exists():
        pytest.skip("no open-instruct checkout with a history")
    place = tmp_path / "launch"
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(place)], check=True)
    listed = git(REPOSITORY, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in listed.rstrip("\0").split("\0"):
        source = REPOSITORY / name
        target = place / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
        elif not target.is_dir():
            target.unlink(missing_ok=True)
    git(place, "add", ".")
    git(place, "commit", "-qm", "as it is", "--allow-empty")
    return Project(place, checkout)


def test_a_name_that_git_does_not_know_changes_nothing(project: Project) -> None:
    done = project.move("no-such-commit")
    assert done.returncode == 2
    assert "unknown-commit" in done.stderr
    assert project.is_clean()


def commit_after_pin(checkout: Path) -> str:
    """A commit halfway between the pin and the newest known commit."""
    commits = f"{PIN}..e6c3044aa620"
    later = git(checkout, "rev-list", "--reverse", "--first-parent", commits).split()
    if not later:
        pytest.skip("no commit after the pin is in this checkout")
    return later[len(later) // 2]


def start_and_kill(project: Project, commit: str) -> None:
    """Kill a move of the pin while it works in its copy."""
    with subprocess.Popen(
        project.command(commit),
        cwd=project.place,
        env=project.environ(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        while "snapshot" not in process.stderr.readline():
            assert process.poll() is None
        process.kill()


@pytest.mark.slow
def test_a_move_there_and_back_again_changes_nothing_and_a_kill_loses_nothing(
    project: Project,
) -> None:
    commit = commit_after_pin(project.upstream)

    start_and_kill(project, commit)
    assert project.is_clean()

    assert project.move(commit).returncode in {0, 1}
    moved = git(project.place, "diff", "HEAD")
    assert f'+PIN = "{commit}"' in moved
    assert f"+Subproject commit {commit}" in moved

    assert project.move(commit).returncode in {0, 1}
    assert git(project.place, "diff", "HEAD") == moved

    assert project.move(PIN).returncode == 0
    assert project.is_clean()
    assert not list((project.place / ".git").glob(f"{NAME}-*"))
