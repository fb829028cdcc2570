"""Questions to a git repository, through real repositories made here."""

from pathlib import Path

import pytest
from repositories import git

from launcher.machine import python
from launcher.machine.git import Repository

BINARY = b"\xff\x00 no text\n" * 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of two commits: `pkg/a.py` changes, `pkg/b.py` is added."""
    root = tmp_path / "repository"
    (root / "pkg" / "deep").mkdir(parents=True)
    git(root, "init", "-q", "-b", "trunk")
    (root / "pkg" / "a.py").write_bytes(b"one = 1\n")
    (root / "pkg" / "deep" / "c.py").touch()
    commit_all(root, "first")
    git(root, "tag", "v1")
    (root / "pkg" / "a.py").write_bytes(b"two = 2\n")
    (root / "pkg" / "b.py").write_bytes(BINARY)
    commit_all(root, "second")
    return root


def commit_all(root: Path, subject: str) -> None:
    git(root, "add", ".")
    git(root, "commit", "-qm", subject)


def test_a_commit_has_many_names(root: Path) -> None:
    repository = Repository(root)
    head = git(root, "rev-parse", "HEAD")
    for name in ("HEAD", head, head[:8], "trunk", "HEAD~0", "refs/heads/trunk"):
        assert repository.commit(name) == head
    assert repository.commit("v1") == repository.commit("HEAD~1") != head
    for name in ("nothing", "", "--all", "HEAD:pkg", "\0"):
        assert repository.commit(name) is None


@pytest.mark.parametrize(
    ("commit", "path", "content"),
    [
        ("v1", "pkg/a.py", b"one = 1\n"),
        ("HEAD", "pkg/a.py", b"two = 2\n"),
        ("HEAD", "pkg/b.py", BINARY),
        ("HEAD", "pkg/deep/c.py", b""),
        ("HEAD", "pkg/none.py", None),
        ("HEAD", "pkg", None),
        ("HEAD", "", None),
        ("HEAD", "../x", None),
        ("v1", "pkg/b.py", None),
        ("nothing", "pkg/a.py", None),
    ],
)
def test_a_file_at_a_commit(root: Path, commit: str, path: str, content: bytes | None) -> None:
    assert Repository(root).read(commit, path) == content


def test_many_files_are_read_in_one_go(root: Path) -> None:
    names = ["HEAD:pkg/a.py", "HEAD:none", "HEAD:pkg", "HEAD:pkg/deep/c.py", "v1:pkg/a.py", "HEAD"]
    contents = list(Repository(root).blobs(names))
    assert contents == [b"two = 2\n", None, None, b"", b"one = 1\n", None]
    assert list(Repository(root).blobs([])) == []


@pytest.mark.parametrize("name", ["", "nothing"])
def test_a_folder_without_a_repository_has_no_answers(tmp_path: Path, name: str) -> None:
    repository = Repository(tmp_path / name)
    assert repository.top() is None
    assert repository.commit("HEAD") is None
    assert repository.read("HEAD", "a") is None
    assert list(repository.blobs(["HEAD:a"])) in ([None], [])
    assert not repository.is_shallow()


def test_a_repository_is_known_by_a_folder_inside_and_not_by_a_hooks_variables(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_WORK_TREE", "/nowhere")
    assert Repository(root / "pkg").top() == root
    assert Repository(root / "pkg").read("v1", "pkg/a.py") == b"one = 1\n"


def test_a_shallow_clone_says_so(root: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{root}", str(clone))
    assert Repository(clone).is_shallow()
    assert not Repository(root).is_shallow()
    assert Repository(clone).commit("HEAD~1") is None


def test_a_replaced_object_is_not_followed(root: Path) -> None:
    git(root, "replace", "HEAD", "v1")
    assert Repository(root).read("HEAD", "pkg/a.py") == b"two = 2\n"


COMMANDS = (
    "core.fsmonitor",
    "core.sshCommand",
    "core.pager",
    "core.alternateRefsCommand",
    "core.askPass",
    "diff.external",
    "diff.d.command",
    "diff.d.textconv",
    "filter.f.clean",
    "filter.f.smudge",
    "filter.f.process",
    "gpg.program",
    "credential.helper",
    "uploadpack.packObjectsHook",
)


@pytest.mark.parametrize("scope", ["--local", "--worktree"])
def test_no_command_of_a_checkouts_own_config_is_run(tmp_path: Path, scope: str) -> None:
    """What a cloned or unpacked checkout names in its config is somebody else's code."""
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init", "-q")
    (root / "a.txt").write_text("one\n")
    commit_all(root, "one")

    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$0 $*" >> {ran}\ncat\n')
    program.chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-checkout", "post-index-change", "reference-transaction"):
        (hooks / name).symlink_to(program)

    included = str(tmp_path / "more")
    for name in COMMANDS:
        git(root, "config", "-f", included, name, str(program))
    git(root, "config", "-f", included, "log.showSignature", "true")
    git(root, "config", "-f", included, "core.hooksPath", str(hooks))
    git(root, "config", "extensions.worktreeConfig", "true")
    git(root, "config", scope, "include.path", included)
    (root / ".git" / "info").mkdir(exist_ok=True)
    (root / ".git" / "info" / "attributes").write_text("* filter=f diff=d\n")
    (root / "a.txt").write_text("two\n")

    repository = Repository(root)
    commit = repository.commit("HEAD")
    assert commit is not None
    assert python.read_git_version(root) == f"{commit}+edited"
    assert "+two" in str(repository.ask("diff", "HEAD"))
    assert repository.ask("show", "-s", "--format=%s", commit) == "one"
    assert repository.ask("log", "--format=%H") == commit
    assert repository.read(commit, "a.txt") == b"one\n"
    assert not ran.exists(), ran.read_text()
