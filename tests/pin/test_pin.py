"""Which checkouts are here, how they stand to the pin."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from repositories import UTILS, commit, git, script, transformation

from launcher.errors import Exit
from launcher.pin import pin
from launcher.pin.pin import CheckoutStatus, Status
from launcher.upstream import locate

FILES = {
    "__init__.py": "", "utils.py": UTILS, "finetune.py": script(),
    "dpo_tune_cache.py": script(exp_name="dpo"), "dataset_transformation.py": transformation(),
}  # fmt: skip


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with three commits, the second of which is the pin; nothing else is around."""
    path = tmp_path / "upstream"
    commit(path, {**FILES, "finetune.py": script(more="seed: int = 1")}, "before")
    named = commit(path, FILES, "the pinned one")
    # what the committed facts would hold of it
    facts = dict(locate.snapshot("open_instruct"))
    facts["version"] = named
    facts["files"] = {
        f"open_instruct/{name}": hashlib.sha256(text.encode()).hexdigest()
        for name, text in FILES.items()
    }
    commit(path, {"finetune.py": script(more="seed: int = 2")}, "after")
    git(path, "checkout", "-q", named)
    monkeypatch.setattr(pin, "PIN", named)
    monkeypatch.setattr(locate, "snapshot", lambda backend: facts)
    monkeypatch.setattr(locate, "REPOSITORY", tmp_path / "installed")
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path / "installed" / "external" / "oi")
    monkeypatch.setattr(locate, "FOUND_IN", (tmp_path / "found",))
    return path


def place(told: Status, source: str) -> CheckoutStatus:
    return next(one for one in told.places if one.source == source)


def launch_repository() -> Path:
    """launch's own repository, with an empty folder for its submodule."""
    root = locate.REPOSITORY
    (root / "external" / "oi").mkdir(parents=True)
    (root / ".gitmodules").touch()
    return root


def test_the_pin_is_the_pin(pinned: Path) -> None:
    told = pin.status(pinned, {})
    assert told.used is not None and told.used.source == "--open-instruct"
    assert (told.used.commit, told.used.subject) == (pin.PIN, "the pinned one")
    assert told.used.date == "2026-01-02"
    assert (told.used.ahead, told.used.behind, told.used.edited_files) == (0, 0, ())
    assert (told.exit_code, told.findings, told.next) == (Exit.OK, (), ())
    assert json.loads(json.dumps(told.as_json()))["equal"] is True


def test_another_commit(pinned: Path) -> None:
    for revision, counts in (("main", (1, 0)), ("main~2", (0, 1))):
        git(pinned, "checkout", "-q", revision)
        told = pin.status(pinned, {})
        assert told.used is not None
        assert (told.used.ahead, told.used.behind) == counts
        assert told.used.changed_files == ("open_instruct/finetune.py",)
        assert told.exit_code is Exit.CONFIG
        assert [finding.code for finding in told.findings] == ["unpinned-checkout"]
        assert told.next == (f"git -C {pinned} checkout {pin.PIN}",)
    assert "0 commit(s) ahead, 1 behind" in "\n".join(told.lines())


def test_edits_matter_in_the_package_only(pinned: Path) -> None:
    (pinned / "README.md").write_text("x")
    git(pinned, "add", "README.md")
    told = pin.status(pinned, {})
    assert told.used is not None and told.used.edited_files == ("README.md",)
    assert told.exit_code is Exit.OK and "edited: README.md" in "\n".join(told.lines())
    (pinned / "open_instruct" / "utils.py").write_text("x = 1\n")
    told = pin.status(pinned, {})
    assert told.used is not None and told.used.edited_source
    assert told.exit_code is Exit.CONFIG and told.next == (f"git -C {pinned} stash",)
    assert "edited" in told.findings[0].message


def test_a_folder_without_history(pinned: Path, tmp_path: Path) -> None:
    shutil.copytree(pinned / "open_instruct", tmp_path / "copy" / "open_instruct")
    told = pin.status(tmp_path / "copy", {})
    assert told.used is not None and told.used.commit is None
    assert told.exit_code is Exit.OK and "without a git history" in "\n".join(told.lines())
    (tmp_path / "copy" / "open_instruct" / "finetune.py").write_text("x = 1\n")
    assert pin.status(tmp_path / "copy", {}).exit_code is Exit.CONFIG
    # nor has one inside another repository
    shutil.copytree(pinned / "open_instruct", pinned / "inner" / "open_instruct")
    told = pin.status(pinned / "inner", {})
    assert told.used is not None and told.used.commit is None


def test_a_pin_that_was_never_fetched(pinned: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", "-b", "main", f"file://{pinned}", "shallow")
    told = pin.status(tmp_path / "shallow", {})
    assert told.used is not None and (told.used.ahead, told.used.behind) == (None, None)
    assert told.next[0].startswith(f"git -C {tmp_path / 'shallow'} fetch origin {pin.PIN} && ")
    assert "not among its objects" in "\n".join(told.lines())


def test_all_documented_places_are_told_in_their_order(pinned: Path, tmp_path: Path) -> None:
    shutil.copytree(pinned, tmp_path / "found")
    git(tmp_path / "found", "checkout", "-q", "main")
    (tmp_path / "empty").mkdir()
    told = pin.status(None, {"LAUNCH_OPEN_INSTRUCT": str(pinned)})
    assert [one.source for one in told.places] == ["LAUNCH_OPEN_INSTRUCT", "submodule", "found"]
    assert [one.used for one in told.places] == [True, False, False]
    assert place(told, "submodule").state == "missing"
    assert place(told, "found").subject == "after"
    told = pin.status(None, {})
    assert told.used is not None and told.used.source == "found"


def test_an_empty_folder_that_was_named(pinned: Path, tmp_path: Path) -> None:
    shutil.copytree(pinned, tmp_path / "found")
    (tmp_path / "empty").mkdir()
    told = pin.status(None, {"LAUNCH_OPEN_INSTRUCT": str(tmp_path / "empty")})
    assert told.used is None and told.exit_code is Exit.NOT_READY
    assert told.findings[0].code == "no-checkout" and "is empty" in told.findings[0].message
    assert place(told, "LAUNCH_OPEN_INSTRUCT").state == "empty"
    # the other one is offered, not taken
    assert told.next[0] == f"export LAUNCH_OPEN_INSTRUCT={tmp_path / 'found'}"


def test_nothing_anywhere_installed_from_a_wheel(pinned: Path, tmp_path: Path) -> None:
    told = pin.status(None, {})
    assert told.exit_code is Exit.NOT_READY and told.fill is None
    assert told.next == (
        f"git clone {pin.URL} {tmp_path / 'found'} && git -C {tmp_path / 'found'} checkout {pin.PIN}",
    )


def test_a_submodule_is_filled_by_one_command(pinned: Path) -> None:
    root = launch_repository()
    fill = f"git -C {root} submodule update --init external/oi"
    told = pin.status(None, {})
    assert (told.submodule.state, told.exit_code, told.next) == ("empty", Exit.NOT_READY, (fill,))
    shutil.rmtree(root / "external" / "oi")
    shutil.copytree(pinned, root / "external" / "oi")
    assert pin.status(None, {}).submodule.equal
    git(root / "external" / "oi", "checkout", "-q", "main")
    told = pin.status(None, {})
    assert (told.submodule.equal, told.exit_code, told.next) == (False, Exit.CONFIG, (fill,))
