"""`launch pin move`: all files or none, whatever interrupts it; and what it lists for a person."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from launcher.pin.move.review import Review, review
from launcher.rules.rule import cites
from launcher.upstream.citations import SourceFiles
from launcher.upstream.open_instruct import PIN
from launcher.upstream.source.packages import Folder

FILES = {"README.md": b"new\n", "docs/a.md": b"new too\n", "launcher/made.py": b"MADE = 1\n"}
GONE = "docs/gone.md"
"""A file that a change removes."""
COMMIT = 40 * "b"


def git(place: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(place), *who, *words], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with two of the files, one of them with the right to run, and a submodule."""
    place = tmp_path / "clone"
    (place / "docs").mkdir(parents=True)
    (place / "README.md").write_text("old\n")
    (place / "docs/a.md").write_text("old too\n")
    (place / GONE).write_text("of a commit that is forgotten\n")
    (place / "README.md").chmod(0o755)
    git(place, "init", "-q")
    git(place, "add", ".")
    git(place, "update-index", "--add", "--cacheinfo", f"160000,{40 * 'a'},external/open-instruct")
    git(place, "commit", "-qm", "first")
    return place


def journal_of(clone: Path) -> Journal:
    return Journal(clone, clone / ".git" / NAME)


def state(clone: Path) -> tuple[dict[str, bytes], str]:
    """The files of the work tree, and what git says of each."""
    paths = [
        path for path in sorted(clone.rglob("*")) if path.is_file() and ".git" not in path.parts
    ]
    files = {path.relative_to(clone).as_posix(): path.read_bytes() for path in paths}
    return files, git(clone, "ls-files", "-s", "external")


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


def run(clone: Path, limit: int) -> int:
    """Change the clone by a process that is killed before its renaming number `limit`; its exit code."""
    program = PROGRAM.format(files={**FILES, GONE: None}, commit=COMMIT)
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-c", program, str(clone), str(limit)], env=environ
    ).returncode


def test_a_killed_change_is_completed_by_the_next_one_wherever_it_was(
    clone: Path, tmp_path: Path
) -> None:
    before = state(clone)
    whole = tmp_path / "whole"
    shutil.copytree(clone, whole)
    assert run(whole, 1000) == 0
    after = state(whole)
    assert after[0] == FILES and COMMIT in after[1]
    killed = 0
    for limit in range(1000):
        place = tmp_path / str(limit)
        shutil.copytree(clone, place)
        if run(place, limit) != -signal.SIGKILL:
            break
        killed += 1
        # before the journal is whole nothing is changed
        assert journal_of(place).exists or state(place) == before
        assert run(place, 1000) == 0
        assert state(place) == after
        assert not journal_of(place).exists
        assert os.access(place / "README.md", os.X_OK)
    # a text is written, and put in place, for each file
    assert killed >= 2 * len(FILES)


def test_what_was_changed_in_the_meantime_is_not_written_over(clone: Path) -> None:
    journal_of(clone).write(FILES, {})
    for name in ("README.md", "docs/a.md"):
        (clone / name).write_text("by hand\n")
    before = state(clone)
    with pytest.raises(NotReady) as refusal:
        journal_of(clone).apply()
    codes = [(finding.code, finding.file) for finding in refusal.value.findings]
    assert codes == [("move-interrupted", "README.md"), ("move-interrupted", "docs/a.md")]
    assert "rm -r" in str(refusal.value.findings[0].help)
    assert state(clone) == before and journal_of(clone).exists


def test_where_git_refuses_the_submodules_commit_nothing_is_changed(clone: Path) -> None:
    before = state(clone)
    journal_of(clone).write(FILES, {"external/open-instruct": COMMIT})
    (clone / ".git/index.lock").touch()
    with pytest.raises(NotReady) as refusal:
        journal_of(clone).apply()
    assert [finding.code for finding in refusal.value.findings] == ["move-interrupted"]
    (clone / ".git/index.lock").unlink()
    assert state(clone) == before and not journal_of(clone).exists


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


def rule_about(
    name: str, *places: str, reviewed: tuple[str, ...] = ()
) -> Callable[[Any], Iterator[Finding]]:
    @cites(*places, reviewed=reviewed)
    def rule(_: Any) -> Iterator[Finding]:
        yield from ()

    rule.__dict__["about"] = name
    return rule


@pytest.fixture
def reviewed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Review]:
    """Review made-up rules after a move from `OLD` to another text of the same file."""

    def at(new: str, confirmed: tuple[str, ...] = (), later: tuple[str, ...] = ()) -> Review:
        trees = {}
        for commit, text in ((40 * "a", OLD), (40 * "b", new)):
            folder = tmp_path / commit / "open_instruct"
            folder.mkdir(parents=True)
            (folder / "train.py").write_text(text)
            trees[commit] = SourceFiles({"open_instruct": Folder(folder)})
        places = {"loss": LOSS, "save": SAVE, "seed": SEED, "clip": CLIP}
        rules = [rule_about(name, place, reviewed=confirmed) for name, place in places.items()]
        monkeypatch.setattr(reviews, "rules_of", lambda _: rules)
        monkeypatch.setattr(cited, "rules_of", lambda _: rules)
        monkeypatch.setattr(reviews, "commits_of_rules", lambda: (40 * "a", *confirmed))
        citing = [
            Citing("launcher/rules/a.py", number, place)
            for number, place in enumerate(places.values(), 1)
        ]
        return review(citing, trees, (40 * "a", 40 * "b"), later)

    return at


@pytest.mark.parametrize(
    ("change", "waiting"),
    [
        (("    loss = model", "    # why\n    print(1)\n    loss = model"), []),
        (
            (
                "    loss = model(args.rows)",
                "    loss = 0\n    if args.rows:\n        loss = model(args.rows)",
            ),
            ["loss"],
        ),
        (("args.clip > 0", "args.clip is not None"), ["loss"]),
        (("clip: float = -1", "clip: float | None = None"), ["clip"]),
        (("def save(", "def keep("), ["save"]),
        (("seed: int", "rank: int = 0\n    seed: int"), []),
    ],
)
def test_a_rule_waits_where_its_line_or_its_function_changed(
    reviewed_at: Callable[..., Review], change: tuple[str, str], waiting: list[str]
) -> None:
    assert change[0] in OLD
    assert [rule.name for rule in reviewed_at(OLD.replace(*change)).rules] == waiting


def test_a_rule_that_is_confirmed_at_the_commit_does_not_wait(
    reviewed_at: Callable[..., Review],
) -> None:
    found = reviewed_at(
        OLD.replace("args.clip > 0", "args.clip").replace("clip: float = -1", "top: float"),
        ("bbbb",),
    )
    assert found.rules == {} and found.changed == ()
    # a citation that is gone is excused by the rule that cites it
    assert found.stale == ()


def test_what_changed_in_a_function_is_shown(reviewed_at: Callable[..., Review]) -> None:
    found = reviewed_at(OLD.replace("args.clip > 0", "args.clip is not None"))
    (function,) = found.changed
    assert function.name == "open_instruct/train.py::train"
    assert function.lines == ((LOSS, 4, 4),)
    rows = function.diff()
    assert "-    if args.clip > 0:" in rows and "+    if args.clip is not None:" in rows
    assert "One step" not in "".join(rows)
    assert any("launcher/rules/a.py:1: loss" in line for line in found.lines())


def test_a_citation_that_is_gone_says_what_may_have_become_of_it(
    reviewed_at: Callable[..., Review],
) -> None:
    (gone,) = reviewed_at(
        OLD.replace("model.save(args.output)", "model.save_whole(args.output)")
    ).stale
    assert (gone.where, gone.citation, gone.text) == (
        "launcher/rules/a.py:2",
        SAVE,
        "model.save(args.output)",
    )
    assert gone.now == "open_instruct/train.py:11: model.save_whole(args.output)"


def test_what_a_later_known_commit_has_may_be_cited(reviewed_at: Callable[..., Review]) -> None:
    assert reviewed_at(OLD.replace("def save(", "def keep("), later=(40 * "a",)).stale == ()


def test_a_move_says_what_to_do_next_and_with_which_code(
    reviewed_at: Callable[..., Review],
) -> None:
    same = reviewed_at(OLD)
    assert Move("a", 40 * "b", (), same, ()).exit_code == 0
    move = Move(
        "a",
        40 * "b",
        ("README.md",),
        replace(same, stale=(reviews.Stale("a.py:3", LOSS, "x", None),)),
        ("t::x",),
    )
    assert move.exit_code == 1
    places = [(finding.code, finding.file, finding.line) for finding in move.findings]
    assert places == [("stale-citation", "a.py", 3), ("golden-differs", "t", None)]
    assert all(finding.help for finding in move.findings)
    assert json.loads(json.dumps(move.as_json()))["review"]["stale"][0]["where"] == "a.py:3"


def launch(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(place)}
    command = [sys.executable, "-m", "launcher", "pin", "move", *words]
    return subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True)


def test_without_a_clone_nothing_is_moved(tmp_path: Path) -> None:
    shutil.copytree(
        REPOSITORY / "launcher", tmp_path / "launcher", ignore=shutil.ignore_patterns("__pycache__")
    )
    done = launch(tmp_path, PIN, "--format", "json")
    assert done.returncode == 5, done.stderr
    assert [finding["code"] for finding in json.loads(done.stdout)["findings"]] == ["no-clone"]


def scratch(place: Path) -> Path:
    """A clone of this repository with the work tree's own changes."""
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(place)], check=True)
    listed = git(REPOSITORY, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split(
        "\0"
    )
    for name in filter(None, listed):
        if (REPOSITORY / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, place / name)
        else:
            (place / name).unlink(missing_ok=True) if not (place / name).is_dir() else None
    git(place, "add", ".")
    git(place, "commit", "-qm", "as it is", "--allow-empty")
    return place


@pytest.fixture(scope="module")
def upstream() -> Path:
    """A checkout of open-instruct that has commits after the pin; skips without one."""
    checkout = find_checkout()
    if checkout is None or not (checkout / ".git").exists():
        pytest.skip("no open-instruct checkout with a history")
    return checkout


def test_a_name_that_git_does_not_know_changes_nothing(tmp_path: Path, upstream: Path) -> None:
    pytest.importorskip("olmo_core")
    place = scratch(tmp_path / "launch")
    done = launch(place, "no-such-commit", "--open-instruct", str(upstream))
    assert done.returncode == 2 and "unknown-commit" in done.stderr
    assert git(place, "status", "--porcelain") == ""


@pytest.mark.slow
def test_there_and_back_again_is_the_same_and_a_kill_loses_nothing(
    tmp_path: Path, upstream: Path
) -> None:
    pytest.importorskip("olmo_core")
    later = git(upstream, "rev-list", "--reverse", "--first-parent", f"{PIN}..e6c3044aa620").split()
    if not later:
        pytest.skip("no commit after the pin is in this checkout")
    target = later[len(later) // 2]
    place = scratch(tmp_path / "launch")
    where = ("--open-instruct", str(upstream))

    # killed while it works in its copy: the clone is as it was
    command = [sys.executable, "-m", "launcher", "pin", "move", target, *where]
    environ = {**os.environ, "PYTHONPATH": str(place)}
    with subprocess.Popen(
        command, cwd=place, env=environ, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "snapshot" not in process.stderr.readline():
            assert process.poll() is None
        process.kill()
    assert git(place, "status", "--porcelain") == ""

    assert launch(place, target, *where).returncode in {0, 1}
    moved = git(place, "diff", "HEAD")
    assert f'+PIN = "{target}"' in moved and f"+Subproject commit {target}" in moved
    assert launch(place, target, *where).returncode in {0, 1}
    assert git(place, "diff", "HEAD") == moved
    assert launch(place, PIN, *where).returncode == 0
    assert git(place, "status", "--porcelain") == ""
    assert not list((place / ".git").glob(f"{NAME}-*"))
