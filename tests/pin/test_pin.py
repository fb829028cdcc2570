"""Which checkouts are here, and how they stand to the pin."""

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
    "__init__.py": "",
    "utils.py": UTILS,
    "finetune.py": script(),
    "dpo_tune_cache.py": script(exp_name="dpo"),
    "dataset_transformation.py": transformation(),
}


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with three commits, the second of which is the pin; nothing else is around."""
    path = tmp_path / "upstream"
    commit(path, {**FILES, "finetune.py": script(more="seed: int = 1")}, "before")
    pinned_commit = commit(path, FILES, "the pinned one")
    commit(path, {"finetune.py": script(more="seed: int = 2")}, "after")
    git(path, "checkout", "-q", pinned_commit)

    facts = dict(locate.load_snapshot("open_instruct"))
    facts["version"] = pinned_commit
    facts["files"] = {}
    for name, text in FILES.items():
        facts["files"][f"open_instruct/{name}"] = hashlib.sha256(text.encode()).hexdigest()
    monkeypatch.setattr(pin, "PIN", pinned_commit)
    monkeypatch.setattr(locate, "load_snapshot", lambda backend: facts)
    monkeypatch.setattr(locate, "REPOSITORY", tmp_path / "installed")
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path / "installed" / "external" / "oi")
    monkeypatch.setattr(locate, "FOUND_IN", (tmp_path / "found",))
    return path


def used(status: Status) -> CheckoutStatus:
    """The checkout that launch takes."""
    assert status.used is not None
    return status.used


def place(status: Status, source: str) -> CheckoutStatus:
    (checkout,) = [checkout for checkout in status.places if checkout.source == source]
    return checkout


def text_of(status: Status) -> str:
    return "\n".join(status.lines())


def test_a_checkout_of_the_pin_is_ok(pinned: Path) -> None:
    status = pin.read_status(pinned, {})
    checkout = used(status)
    assert checkout.source == "--open-instruct"
    assert (checkout.commit, checkout.subject) == (pin.PIN, "the pinned one")
    assert checkout.date == "2026-01-02"
    assert (checkout.ahead, checkout.behind) == (0, 0)
    assert checkout.edited_files == ()
    assert status.exit_code is Exit.OK
    assert not status.findings
    assert not status.next
    assert json.loads(json.dumps(status.as_json()))["equal"] is True


@pytest.mark.parametrize(
    ("revision", "counts"),
    [("main", "1 commit(s) ahead, 0 behind"), ("main~2", "0 commit(s) ahead, 1 behind")],
)
def test_a_checkout_of_another_commit_says_how_to_get_to_the_pin(
    revision: str, counts: str, pinned: Path
) -> None:
    git(pinned, "checkout", "-q", revision)
    status = pin.read_status(pinned, {})
    assert counts in text_of(status)
    assert used(status).changed_files == ("open_instruct/finetune.py",)
    assert status.exit_code is Exit.CONFIG
    assert [finding.code for finding in status.findings] == ["unpinned-checkout"]
    assert status.next == (f"git -C {pinned} checkout {pin.PIN}",)


def test_edits_outside_of_the_package_do_no_harm(pinned: Path) -> None:
    (pinned / "README.md").write_text("x")
    git(pinned, "add", "README.md")
    status = pin.read_status(pinned, {})
    assert used(status).edited_files == ("README.md",)
    assert status.exit_code is Exit.OK
    assert "edited: README.md" in text_of(status)


def test_edits_of_the_package_are_to_be_stashed(pinned: Path) -> None:
    (pinned / "open_instruct" / "utils.py").write_text("x = 1\n")
    status = pin.read_status(pinned, {})
    assert used(status).edited_source
    assert status.exit_code is Exit.CONFIG
    assert status.next == (f"git -C {pinned} stash",)
    assert "edited" in status.findings[0].message


def test_a_folder_without_history_is_judged_by_its_files(pinned: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(pinned / "open_instruct", copy / "open_instruct")
    status = pin.read_status(copy, {})
    assert used(status).commit is None
    assert status.exit_code is Exit.OK
    assert "without a git history" in text_of(status)

    (copy / "open_instruct" / "finetune.py").write_text("x = 1\n")
    assert pin.read_status(copy, {}).exit_code is Exit.CONFIG


def test_a_folder_inside_another_repository_has_no_history(pinned: Path) -> None:
    shutil.copytree(pinned / "open_instruct", pinned / "inner" / "open_instruct")
    assert used(pin.read_status(pinned / "inner", {})).commit is None


def test_a_clone_that_never_fetched_the_pin_says_how(pinned: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", "-b", "main", f"file://{pinned}", "shallow")
    shallow = tmp_path / "shallow"
    status = pin.read_status(shallow, {})
    assert (used(status).ahead, used(status).behind) == (None, None)
    assert status.next[0].startswith(f"git -C {shallow} fetch origin {pin.PIN} && ")
    assert "not among its objects" in text_of(status)


def test_the_places_are_listed_in_the_order_in_which_they_are_searched(
    pinned: Path, tmp_path: Path
) -> None:
    shutil.copytree(pinned, tmp_path / "found")
    git(tmp_path / "found", "checkout", "-q", "main")

    status = pin.read_status(None, {"LAUNCH_OPEN_INSTRUCT": str(pinned)})

    sources = [checkout.source for checkout in status.places]
    assert sources == ["LAUNCH_OPEN_INSTRUCT", "submodule", "found"]
    assert [checkout.used for checkout in status.places] == [True, False, False]
    assert place(status, "submodule").state == "missing"
    assert place(status, "found").subject == "after"
    assert used(pin.read_status(None, {})).source == "found"


def test_a_named_folder_that_is_empty_offers_another_and_does_not_take_it(
    pinned: Path, tmp_path: Path
) -> None:
    found = shutil.copytree(pinned, tmp_path / "found")
    (tmp_path / "empty").mkdir()
    status = pin.read_status(None, {"LAUNCH_OPEN_INSTRUCT": str(tmp_path / "empty")})
    assert status.used is None
    assert status.exit_code is Exit.NOT_READY
    assert status.findings[0].code == "no-checkout"
    assert "is empty" in status.findings[0].message
    assert place(status, "LAUNCH_OPEN_INSTRUCT").state == "empty"
    assert status.next[0] == f"export LAUNCH_OPEN_INSTRUCT={found}"


def test_without_a_checkout_or_a_clone_of_launch_the_next_step_is_to_clone(
    pinned: Path, tmp_path: Path
) -> None:
    status = pin.read_status(None, {})
    found = tmp_path / "found"
    assert status.exit_code is Exit.NOT_READY
    assert status.fill is None
    assert status.next == (f"git clone {pin.URL} {found} && git -C {found} checkout {pin.PIN}",)


def test_a_submodule_is_filled_by_one_command(pinned: Path) -> None:
    root = locate.REPOSITORY
    submodule = locate.SUBMODULE
    submodule.mkdir(parents=True)
    (root / ".gitmodules").touch()
    fill = f"git -C {root} submodule update --init external/oi"

    status = pin.read_status(None, {})
    assert status.submodule.state == "empty"
    assert status.exit_code is Exit.NOT_READY
    assert status.next == (fill,)

    shutil.copytree(pinned, submodule, dirs_exist_ok=True)
    assert pin.read_status(None, {}).submodule.equal

    git(submodule, "checkout", "-q", "main")
    status = pin.read_status(None, {})
    assert not status.submodule.equal
    assert status.exit_code is Exit.CONFIG
    assert status.next == (fill,)
