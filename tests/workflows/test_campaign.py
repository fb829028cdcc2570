"""Folders that several runs share: found again, one command at a time, never begun twice."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPOSITORY

from launcher import files
from launcher.errors import NotReady
from launcher.runs import rundir
from launcher.workflows import experiment
from launcher.workflows.experiment import Campaign


@pytest.fixture
def about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Campaign(kind="bench", key="k", name="a b/c", root=tmp_path / "runs")


def test_the_newest_of_the_same_key_is_found_again(about: Campaign) -> None:
    folders = [rundir.new_folder(about.root, about.kind, about.name) for _ in range(3)]
    assert len(set(folders)) == 3 and folders[0].name.endswith("-bench-a-b-c")
    for folder, key in zip(folders, ("k", "k", "other"), strict=True):
        files.write_json(folder / "bench.json", {"key": key})
    assert about.earlier() == folders[1]
    assert replace(about, kind="tune").earlier() is None
    with about.opened() as folder:
        assert folder == folders[1]
    with about.opened(fresh=True) as folder:
        assert folder not in folders


def test_a_folder_that_cannot_be_made_is_refused(about: Campaign) -> None:
    about.root.write_text("")
    with pytest.raises(NotReady), about.opened():
        pass


_TWO = """
import sys, time
from pathlib import Path
from launcher.workflows.experiment import Campaign
from launcher.errors import NotReady
try:
    with Campaign(kind="bench", key="k", name="x", root=Path(sys.argv[1])).opened():
        print("in", flush=True)
        sys.stdin.read()
except NotReady as error:
    print(error.findings[0].code, flush=True)
"""


def test_two_that_begin_at_once_do_not_begin_twice(about: Campaign) -> None:
    """Before either has a record, and so a folder that the other could find."""
    words = [sys.executable, "-c", _TWO, str(about.root)]
    both = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        for _ in range(4)
    ]
    said = [one.stdout.readline().strip() for one in both if one.stdout]
    for one in both:
        one.communicate()
    assert sorted(said) == ["in", *["under-way"] * 3]
    assert len(list(about.root.iterdir())) == 1
    # and whoever was killed holds nothing
    with about.opened() as folder:
        assert [folder] == list(about.root.iterdir())


def test_a_record_that_cannot_be_written_is_said_and_the_old_one_stays(about: Campaign) -> None:
    with about.opened() as folder:
        record = folder / "bench.json"
        before = record.read_text()
        (folder / "in-the-way").mkdir()
        with pytest.raises(NotReady):
            experiment.write(folder / "in-the-way", {"key": "k"})
        assert record.read_text() == before
        assert sorted(one.name for one in folder.iterdir()) == [".lock", "bench.json", "in-the-way"]
