"""What became of an argument: from the committed table, and from git histories of all shapes."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.machine.git import Repository
from launcher.upstream import history, locate
from launcher.upstream.history import ArgumentChange
from launcher.upstream.open_instruct import PIN
from launcher.upstream.trainers import BACKENDS

SFT = "open_instruct/finetune.py"
DPO = "open_instruct/dpo_tune_cache.py"
SETTINGS = (
    "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main",
    "-c", "commit.gpgsign=false",
)  # fmt: skip
TRANSFORMATION = "open_instruct/dataset_transformation.py"


def script(*fields: str, bases: str = "", imports: str = "") -> str:
    """A script with one dataclass of these fields."""
    body = "\n    ".join(fields or ["pass"])
    parser = "parser = ArgumentParserPlus((FlatArguments,))"
    return f"{imports}@dataclass\nclass FlatArguments{bases}:\n    {body}\n\n\n{parser}\n"


@dataclass
class Checkout:
    """A git repository with an `open_instruct` package, committed to file by file."""

    root: Path
    commits: list[str] = field(default_factory=list)

    def git(self, *words: str) -> str:
        day = f"2031-01-{len(self.commits) + 1:02}T12:00:00+0000"
        environ = {**os.environ, "GIT_COMMITTER_DATE": day, "GIT_AUTHOR_DATE": day}
        command = ["git", "-C", str(self.root), *SETTINGS, *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
        return done.stdout.strip()

    def commit(self, subject: str, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", subject)
        self.commits.append(self.git("rev-parse", "HEAD"))

    def changes_of(self, key: str, head: str = "HEAD") -> tuple[ArgumentChange, ...]:
        """The changes of an argument of SFT, the newest first."""
        return history.find_changes(key, SFT, Repository(self.root), head=head)

    def last_change(self, key: str) -> str:
        """The newest change and its commit, as the number that it was committed as."""
        change = self.changes_of(key)[0]
        number = self.commits.index(change.commit)
        if change.to is not None:
            return f"{change.what} to {change.to} in commit {number}"
        return f"{change.what} in commit {number}"


@pytest.fixture
def repo(tmp_path: Path) -> Checkout:
    root = tmp_path / "checkout"
    root.mkdir()
    checkout = Checkout(root)
    checkout.git("init", "-q")
    return checkout


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize("backend", ["open_instruct", "trl"])
def test_the_table_agrees_with_the_snapshot(backend: str, stage: str) -> None:
    """An argument that is there was last added; one that went away is not there."""
    keys = locate.load_snapshot(backend)["stages"][stage]
    fields = {key.partition(".")[2] for key in keys}
    script = BACKENDS[backend].STAGES[stage].script
    newest: dict[str, ArgumentChange] = {}
    for change in history.load_events(script):
        newest.setdefault(change.key, change)
    gone = {key for key, change in newest.items() if change.gone}
    assert gone.isdisjoint(fields)
    if backend == "open_instruct":
        assert newest.keys() - gone == fields


def test_at_the_commit_of_the_table_no_process_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(subprocess, "run")
    (change, *_) = history.find_changes("use_flash_attn", SFT, Repository(tmp_path), head=PIN)
    assert change.pull == 1567
    assert history.find_changes("max_seq_length", "trl/scripts/sft.py", Repository(tmp_path))


@pytest.mark.parametrize(
    ("key", "stage", "sentence"),
    [
        ("max_seq_length", "sft", "renamed to `max_length` by #3704 (e102ac8df, trl 0.20.0, "),
        ("num_of_sequences", "sft", "removed by #3364 (a8cfca6d0, trl 0.18.0, 2025-04-26); see "),
        ("evaluation_strategy", "dpo", "renamed to `eval_strategy` in transformers 4.51"),
        ("per_gpu_train_batch_size", "sft", "removed in transformers 5.0; see `per_device_"),
    ],
)
def test_what_became_of_an_argument_of_trl(key: str, stage: str, sentence: str) -> None:
    (change, *_) = history.find_changes(key, f"trl/scripts/{stage}.py")
    assert history.describe_event(change).startswith(sentence)


@pytest.mark.parametrize("key", ["", "use_flash", ".*", "-S--foo"])
def test_what_never_was_an_argument_has_no_history(key: str) -> None:
    assert history.find_changes(key, SFT) == ()


def test_an_unknown_script_has_no_history() -> None:
    assert history.find_changes("use_flash_attn", "elsewhere/train.py") == ()


@pytest.mark.parametrize(
    ("key", "name"), [("dataset_mixer_list", "mixer_list"), ("use_flash_attn", None)]
)
def test_what_an_argument_is_called_now(key: str, name: str | None) -> None:
    def past(key: str) -> tuple[ArgumentChange, ...]:
        return history.find_changes(key, DPO)

    assert history.find_present_name(past(key)[0], past, ["mixer_list"]) == name


RATE = "lr: float = 1.0"
COUNT = "count: int = 3"
OLD_COUNT = "old_count: int = 3"
FLAG = "gone: bool = True"


def test_arguments_that_are_removed_renamed_and_moved(repo: Checkout) -> None:
    repo.commit("Start", {SFT: script(RATE, OLD_COUNT, FLAG)})
    repo.commit("Rename (#7)", {SFT: script(RATE, COUNT, FLAG)})
    repo.commit("Remove (#8)", {SFT: script(RATE, COUNT)})
    base = script(RATE, COUNT).replace("FlatArguments", "Base")
    imports = "from open_instruct import dataset_transformation\n"
    derived = script(bases="(dataset_transformation.Base)", imports=imports)
    repo.commit("Move", {TRANSFORMATION: base, SFT: derived})

    assert repo.last_change("old_count") == "renamed to count in commit 1"
    assert repo.last_change("gone") == "removed in commit 2"
    assert repo.last_change("lr") == "added in commit 0"
    assert repo.last_change("count") == "added in commit 1"
    removed, added = repo.changes_of("gone")
    assert added.what == "added"
    assert (removed.owner, removed.pull) == ("FlatArguments", 8)
    assert (removed.file, removed.line) == (SFT, 5)
    assert history.describe_event(removed) == f"removed by #8 ({removed.commit[:9]}, 2031-01-03)"


def test_the_oldest_commit_of_a_shallow_clone_added_nothing(repo: Checkout, tmp_path: Path) -> None:
    repo.commit("Start", {SFT: script(RATE)})
    repo.commit("Note", {SFT: script(RATE) + "# note\n"})
    repo.commit("Add", {SFT: script(RATE, COUNT)})
    folder = tmp_path / "shallow"
    repo.git("clone", "-q", "--depth", "2", f"file://{repo.root}", str(folder))
    shallow = Checkout(folder, repo.commits)

    assert shallow.last_change("count") == "added in commit 2"
    assert shallow.changes_of("lr") == history.find_changes("lr", SFT)


def test_without_a_history_the_table_answers(
    repo: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = history.find_changes("use_flash_attn", SFT)
    assert repo.changes_of("use_flash_attn") == table

    repo.commit("Unrelated", {"README": "x"})
    for head in ("HEAD", "no-such-branch", "--all"):
        assert repo.changes_of("use_flash_attn", head) == table

    missing = Repository(tmp_path / "missing")
    assert history.find_changes("use_flash_attn", SFT, missing) == table

    # no git
    monkeypatch.setenv("PATH", str(tmp_path))
    assert repo.changes_of("use_flash_attn") == table


def test_git_finds_what_the_table_holds(checkout: Path) -> None:
    """The search that goes beyond the table, tried on the changes of the months before it."""
    repository = Repository(checkout)
    base = "2e696f5f6~1"
    if repository.commit(base) is None or repository.is_shallow():
        pytest.skip("the checkout has no history")
    missed = set()
    count = 0
    for change in history.load_events(DPO):
        if change.date <= "2026-01-14" or not change.gone:
            continue
        count += 1
        matches = set()
        for other in history.find(repository, change.key, DPO, base, PIN):
            matches.add((other.what, other.to, other.commit))
        if (change.what, change.to, change.commit) not in matches:
            missed.add(change.key)
    assert count > 15
    # the same commit adds a parameter of the one's name; the other is found by how it is read
    assert missed <= {"attn_backend", "clip_grad_norm"}
