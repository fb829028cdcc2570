"""The tests that need a checkout find it wherever it lies, and say so where they do not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import checkouts
import pytest
from conftest import REPOSITORY

from launcher.upstream import locate

# the fixtures of these tests, on a machine without any checkout
NOWHERE = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
sys.path[:0] = ["{tests}", "{tests}/support"]
from launcher.upstream import locate
locate.SUBMODULE, locate.FOUND_IN = locate.SUBMODULE / "none", ()
spec = spec_from_file_location("fixtures", "{tests}/conftest.py")
fixtures = module_from_spec(spec)
spec.loader.exec_module(fixtures)
globals().update({{name: one for name, one in vars(fixtures).items() if not name.startswith("__")}})
"""


def other_commit(place: Path) -> Path:
    """A checkout that is not the pin's."""
    folder = place / "open_instruct"
    folder.mkdir(parents=True)
    (folder / "finetune.py").write_text("print('another commit')\n")
    return place


@pytest.fixture
def pinned() -> Path:
    return checkouts.require()


def test_the_search_goes_on_past_other_commits(
    pinned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = other_commit(tmp_path / "first"), other_commit(tmp_path / "second")
    monkeypatch.setenv("LAUNCH_OPEN_INSTRUCT", str(first))
    monkeypatch.setattr(locate, "FOUND_IN", (second, pinned))
    assert checkouts.find() == pinned


def test_a_checkout_beside_the_usual_place_is_found(
    pinned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "open-instruct-45901fd0"
    shutil.copytree(pinned / "open_instruct", beside / "open_instruct")
    other_commit(tmp_path / "open-instruct")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LAUNCH_OPEN_INSTRUCT", raising=False)
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path / "none")
    monkeypatch.setattr(locate, "FOUND_IN", (Path("~/open-instruct"),))
    assert checkouts.find() == beside


@pytest.mark.parametrize(("required", "outcome"), [("1", "1 error"), ("", "1 skipped")])
def test_a_missing_checkout_is_a_failure_where_one_is_required(
    tmp_path: Path, required: str, outcome: str
) -> None:
    """A test that asks for the checkout, run where none can be found; the number of skipped ones is
    said.
    """
    (tmp_path / "test_one.py").write_text("def test_one(checkout): pass\n")
    (tmp_path / "conftest.py").write_text(NOWHERE.format(tests=str(REPOSITORY / "tests")))
    environ = {name: value for name, value in os.environ.items() if name != "LAUNCH_OPEN_INSTRUCT"}
    environ |= {"HOME": str(tmp_path), checkouts.REQUIRED: required}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "test_one.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert outcome in done.stdout, done.stdout + done.stderr
    if required:
        assert f"{checkouts.missing(checkouts.PIN)}, and {checkouts.REQUIRED} is set" in done.stdout
    else:
        assert "skipped in all: 1 test(s)" in done.stdout
