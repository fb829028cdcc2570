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
from launcher.upstream.trainers import BACKENDS

SFT, DPO, OLMO = (f"open_instruct/{name}.py" for name in ("finetune", "dpo_tune_cache", "dpo"))
MAIN = "parser = ArgumentParserPlus((FlatArguments,))"


def arguments(*fields: str, name: str = "FlatArguments", bases: str = "", main: str = MAIN) -> str:
    """A script with one dataclass."""
    body = "\n".join(f"    {text}" for text in fields) or "    pass"
    return f"@dataclass\nclass {name}{bases}:\n{body}\n\n\n{main}\n"


@dataclass
class Checkout:
    """A git repository with an `open_instruct` package, committed to file by file."""

    root: Path
    count: int = 0
    commits: list[str] = field(default_factory=list)

    def git(self, *words: str) -> str:
        day = f"2031-01-{self.count % 28 + 1:02}T12:00:00+0000"
        environ = os.environ | {"GIT_COMMITTER_DATE": day, "GIT_AUTHOR_DATE": day}
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        done = subprocess.run(
            ["git", *identity, "-c", "commit.gpgsign=false", "-C", str(self.root), *words],
            check=True, capture_output=True, text=True, env=environ,
        )  # fmt: skip
        return done.stdout.strip()

    def commit(self, subject: str, files: Mapping[str, str | None]) -> str:
        """Write the files (None: delete), commit; returns the commit."""
        self.count += 1
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                path.unlink()
            else:
                path.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", subject)
        self.commits.append(self.git("rev-parse", "HEAD"))
        return self.commits[-1]

    def of(self, key: str, script: str = SFT, head: str = "HEAD") -> tuple[ArgumentChange, ...]:
        return history.changes_of_argument(key, script, Repository(self.root), head=head)

    def last(self, key: str, script: str = SFT) -> str:
        """The newest event in one line, with the commit as its number, 0 the first."""
        found = self.of(key, script)
        if not found:
            return "nothing"
        at = self.commits.index(found[0].commit)
        return f"{found[0].what} {found[0].to or ''}@{at}".replace(" @", "@")


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
    script = BACKENDS[backend].STAGES[stage].script
    fields = {key.partition(".")[2] for key in locate.snapshot(backend)["stages"][stage]}
    newest: dict[str, ArgumentChange] = {}
    for event in history.events(script):
        newest.setdefault(event.key, event)
    assert {key for key, event in newest.items() if event.gone}.isdisjoint(fields)
    if backend == "open_instruct":
        assert {key for key, event in newest.items() if not event.gone} == fields


def test_at_the_commit_of_the_table_no_process_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", fail)
    pin = BACKENDS["open_instruct"].PIN
    assert (
        history.changes_of_argument("use_flash_attn", SFT, Repository(tmp_path), head=pin)[0].pull
        == 1567
    )
    assert history.changes_of_argument("max_seq_length", "trl/scripts/sft.py", Repository(tmp_path))


@pytest.mark.parametrize(
    ("key", "stage", "said"),
    [
        ("max_seq_length", "sft", "renamed to `max_length` by #3704 (e102ac8df, trl 0.20.0, "),
        ("num_of_sequences", "sft", "removed by #3364 (a8cfca6d0, trl 0.18.0, 2025-04-26); see "),
        ("evaluation_strategy", "dpo", "renamed to `eval_strategy` in transformers 4.51"),
        ("per_gpu_train_batch_size", "sft", "removed in transformers 5.0; see `per_device_"),
        ("warmup_ratio", "sft", "renamed to `warmup_steps` in transformers 5.15"),
    ],
)
def test_trl(key: str, stage: str, said: str) -> None:
    assert history.sentence(
        history.changes_of_argument(key, f"trl/scripts/{stage}.py")[0]
    ).startswith(said)


def test_what_never_was_an_argument_has_no_history() -> None:
    for key in ("", "use_flash", ".*", "-S--foo"):
        assert history.changes_of_argument(key, SFT) == ()
    assert history.changes_of_argument("use_flash_attn", "elsewhere/train.py") == ()


def test_what_an_argument_is_called_now() -> None:
    def now(key: str, *fields: str) -> str | None:
        return history.called_now(
            history.changes_of_argument(key, DPO)[0],
            lambda key: history.changes_of_argument(key, DPO),
            fields,
        )

    assert now("dataset_mixer_list", "mixer_list") == "mixer_list"
    assert now("use_flash_attn", "mixer_list") is None


def test_removed_renamed_and_moved(repo: Checkout) -> None:
    repo.commit(
        "start", {SFT: arguments("lr: float = 1.0", "old_name: int = 3", "gone: bool = True")}
    )
    repo.commit(
        "Rename (#7)", {SFT: arguments("lr: float = 1.0", "new_name: int = 3", "gone: bool = True")}
    )
    repo.commit("Remove (#8)", {SFT: arguments("lr: float = 1.0", "new_name: int = 3")})
    base = arguments("lr: float = 1.0", "new_name: int = 3", name="Base", main="")
    script = "from open_instruct import dataset_transformation\n" + arguments(
        bases="(dataset_transformation.Base)"
    )
    repo.commit("Move", {"open_instruct/dataset_transformation.py": base, SFT: script})
    assert repo.last("old_name") == "renamed new_name@1"
    assert repo.last("gone") == "removed@2"
    assert repo.last("lr") == repo.last("new_name").replace("@1", "@0") == "added@0"
    gone = repo.of("gone")[0]
    assert (gone.owner, gone.file, gone.line, gone.pull) == ("FlatArguments", SFT, 5, 8)
    assert history.sentence(gone) == f"removed by #8 ({gone.commit[:9]}, 2031-01-04)"
    assert [event.what for event in repo.of("gone")] == ["removed", "added"]


def test_the_oldest_commit_of_a_shallow_clone_added_nothing(repo: Checkout, tmp_path: Path) -> None:
    repo.commit("0", {SFT: arguments("a: int = 1")})
    repo.commit("1", {SFT: arguments("a: int = 1") + "# note\n"})
    repo.commit("2", {SFT: arguments("a: int = 1", "b: int = 2")})
    repo.git("clone", "-q", "--depth", "2", f"file://{repo.root}", str(tmp_path / "shallow"))
    shallow = Checkout(tmp_path / "shallow", commits=repo.commits)
    assert shallow.last("b") == "added@2"
    assert shallow.of("a") == history.changes_of_argument("a", SFT), "when it came is not seen"
    assert history.sentence(shallow.of("run_name")[0]).startswith("removed by #747")


def test_no_git_no_repository_no_commits(
    repo: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = history.changes_of_argument("use_flash_attn", SFT)
    assert repo.of("use_flash_attn") == table, "an empty history"
    repo.commit("unrelated", {"README": "x"})
    for head in ("HEAD", "no-such-branch", "--all"):
        assert repo.of("use_flash_attn", head=head) == table
    assert (
        history.changes_of_argument("use_flash_attn", SFT, Repository(tmp_path / "missing"))
        == table
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert history.changes_of_argument("use_flash_attn", SFT, Repository(repo.root)) == table


def test_git_finds_what_the_table_holds(checkout: Path) -> None:
    """The search that goes beyond the table, tried on the changes of the months before it."""
    repository, pin = Repository(checkout), BACKENDS["open_instruct"].PIN
    if repository.commit("2e696f5f6~1") is None or repository.is_shallow():
        pytest.skip("the checkout has no history")
    told = [event for event in history.events(DPO) if event.date > "2026-01-14" and event.gone]
    missed = [
        event.key for event in told
        if (event.what, event.to, event.commit) not in {
            (e.what, e.to, e.commit)
            for e in history.find(repository, event.key, DPO, "2e696f5f6~1", pin)
        }
    ]  # fmt: skip
    # the same commit adds a parameter of the one's name, and the other is found by how it is read
    assert set(missed) <= {"attn_backend", "clip_grad_norm"} and len(told) > 15
