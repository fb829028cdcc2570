"""Questions to a git repository, through real repositories made here."""

from pathlib import Path

import pytest
from repositories import git

from launcher.machine import python
from launcher.machine.git import Repository


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository of two commits: `pkg/a.py` changes, `pkg/b.py` comes."""
    root = tmp_path / "repository"
    (root / "pkg" / "deep").mkdir(parents=True)
    git(root.parent, "init", "-q", "-b", "trunk", str(root))
    (root / "pkg" / "a.py").write_bytes(b"one = 1\n")
    (root / "pkg" / "deep" / "c.py").write_bytes(b"")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    git(root, "tag", "v1")
    (root / "pkg" / "a.py").write_bytes(b"two = 2\n")
    (root / "pkg" / "b.py").write_bytes(b"\xff\x00 no text\n" * 3)
    git(root, "add", ".")
    git(root, "commit", "-qm", "second")
    return root


def test_commits_by_any_name(folder: Path) -> None:
    known = Repository(folder)
    head = git(folder, "rev-parse", "HEAD")
    for name in ("HEAD", head, head[:8], "trunk", "HEAD~0", "refs/heads/trunk"):
        assert known.commit(name) == head
    assert known.commit("v1") == known.commit("HEAD~1") != head
    for name in ("nothing", "", "--all", "HEAD:pkg", "\0"):
        assert known.commit(name) is None


def test_files_at_a_commit(folder: Path) -> None:
    known = Repository(folder)
    assert known.read("v1", "pkg/a.py") == b"one = 1\n"
    assert known.read("HEAD", "pkg/a.py") == b"two = 2\n"
    assert known.read("HEAD", "pkg/b.py") == b"\xff\x00 no text\n" * 3
    assert known.read("HEAD", "pkg/deep/c.py") == b""
    for name in ("pkg/none.py", "pkg", "", "../x", "pkg/a.py/x"):
        assert known.read("HEAD", name) is None
    assert known.read("v1", "pkg/b.py") is None
    assert known.read("nothing", "pkg/a.py") is None
    asked = ["HEAD:pkg/a.py", "HEAD:none", "HEAD:pkg", "HEAD:pkg/deep/c.py", "v1:pkg/a.py", "HEAD"]
    told = list(Repository(folder).blobs(asked))
    assert told == [b"two = 2\n", None, None, b"", b"one = 1\n", None]
    assert list(Repository(folder).blobs([])) == []


def test_no_repository(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nothing"):
        known = Repository(root)
        assert known.top() is None
        assert known.commit("HEAD") is None
        assert known.read("HEAD", "a") is None
        assert list(known.blobs(["HEAD:a", "HEAD:b"])) in ([None, None], [])
        assert not known.is_shallow()


def test_from_inside_a_folder_and_inside_a_hook(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_WORK_TREE", "/nowhere")
    assert Repository(folder / "pkg").top() == folder.resolve()
    assert Repository(folder / "pkg").read("v1", "pkg/a.py") == b"one = 1\n"


def test_a_shallow_clone_says_so(folder: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{folder}", str(clone))
    assert Repository(clone).is_shallow()
    assert not Repository(folder).is_shallow()
    assert Repository(clone).commit("HEAD~1") is None


def test_a_replaced_object_is_not_followed(folder: Path) -> None:
    known = Repository(folder)
    old, new = known.commit("v1"), known.commit("HEAD")
    assert old and new
    git(folder, "replace", new, old)
    assert known.read(new, "pkg/a.py") == b"two = 2\n"


@pytest.mark.parametrize("scope", ["--local", "--worktree"])
def test_no_command_of_a_checkouts_own_config_is_run(tmp_path: Path, scope: str) -> None:
    """What a cloned or unpacked checkout names in its config is somebody else's code."""
    root, ran = tmp_path / "checkout", tmp_path / "ran"
    hook = tmp_path / "hook"
    hook.write_text(f'#!/bin/sh\necho "$0 $*" >> {ran}\ncat\n')
    hook.chmod(0o755)

    root.mkdir()
    git(root, "init", "-q")
    (root / "a.txt").write_text("one\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    target = ["-f", str(tmp_path / "more")]
    for name in (
        "core.fsmonitor", "core.sshCommand", "core.pager", "core.alternateRefsCommand", "core.askPass",
        "diff.external", "diff.d.command", "diff.d.textconv", "filter.f.clean", "filter.f.smudge",
        "filter.f.process", "gpg.program", "credential.helper", "uploadpack.packObjectsHook",
    ):  # fmt: skip
        git(root, "config", *target, name, str(hook))
    git(root, "config", *target, "log.showSignature", "true")
    git(root, "config", *target, "core.hooksPath", str(tmp_path / "hooks"))
    git(root, "config", "extensions.worktreeConfig", "true")
    git(root, "config", scope, "include.path", target[1])
    (tmp_path / "hooks").mkdir()
    for name in ("post-checkout", "post-index-change", "reference-transaction"):
        (tmp_path / "hooks" / name).symlink_to(hook)
    (root / ".git" / "info").mkdir(exist_ok=True)
    (root / ".git" / "info" / "attributes").write_text("* filter=f diff=d\n")
    (root / "a.txt").write_text("two\n")
    repository = Repository(root)
    commit = repository.commit("HEAD")
    assert commit is not None
    assert python.git_version(root) == f"{commit}+edited"
    assert "+two" in (repository.ask("diff", "HEAD") or "")
    assert repository.ask("show", "-s", "--format=%s", commit) == "one"
    assert repository.ask("log", "--format=%H") == commit
    assert repository.read(commit, "a.txt") == b"one\n"
    assert not ran.exists(), ran.read_text()
