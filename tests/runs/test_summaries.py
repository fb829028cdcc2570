"""Beside many other runs, a command opens the files of few."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher import files
from launcher.cli import main
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder

OTHERS = 200
FEW = 20  # files that a command may open among those of other runs
MINE = "20260101T000000Z-sft-mine"

Capture = pytest.CaptureFixture[str]


class Opened:
    """What this process opens and lists, while it is asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.is_recording = False
        sys.addaudithook(self.record)

    def record(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_recording or event not in ("open", "os.listdir", "os.scandir"):
            return
        if isinstance(arguments[0], str | os.PathLike):
            self.paths.append(os.fspath(arguments[0]))


# an audit hook cannot be removed
OPENED = Opened()


@contextmanager
def opened_below(*folders: Path) -> Iterator[list[str]]:
    """The paths below these folders that are opened inside, known at the end."""
    below: list[str] = []
    OPENED.paths.clear()
    OPENED.is_recording = True
    try:
        yield below
    finally:
        OPENED.is_recording = False
        for path in OPENED.paths:
            if any(path.startswith(f"{folder}/") for folder in folders):
                below.append(path)


def make_run(path: Path, **content: object) -> RunFolder:
    path.mkdir(parents=True)
    folder = RunFolder(path)
    files.write_json(folder.manifest, {"stage": "sft", "backend": "trl", **content})
    return folder


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """Runs of another folder, all in the index."""
    root = tmp_path / "others"
    for number in range(OTHERS):
        path = root / f"20250101T{number:06}Z-sft-other"
        make_run(path, output=f"/models/{number}", cwd="/elsewhere")
        rundir.register("runs", path)
    return root


@pytest.fixture
def mine(tmp_path: Path) -> RunFolder:
    """A run of this folder, with a log."""
    output = str(tmp_path / "model")
    folder = make_run(rundir.find_runs_root() / MINE, output=output, cwd=os.getcwd())
    folder.console(1).write_text("one\ntwo\n")
    rundir.register("runs", folder.path)
    return folder


def state_of_index() -> Path:
    return rundir.find_state_folder() / "runs"


def keep_summaries() -> Path:
    """Have the summaries of all known runs written; returns their file."""
    rundir.find_run("last")
    return rundir.find_state_folder() / "summaries.json"


def known_outputs() -> dict[Path, str | None]:
    return {summary.path: summary.output for summary in rundir.summarize(rundir.list_known_runs())}


@pytest.mark.parametrize("name", ["last", MINE, "20260101T000000Z"])
def test_a_run_is_found_without_opening_the_others(
    others: Path, mine: RunFolder, name: str, capsys: Capture
) -> None:
    keep_summaries()
    with opened_below(others, state_of_index()) as opened:
        assert main.main(["logs", name, "-n", "1"]) == 0
    assert capsys.readouterr().out == "two\n"
    assert len(opened) <= FEW


def test_a_name_is_looked_up_by_names_alone(others: Path, mine: RunFolder) -> None:
    with opened_below(others) as opened:
        assert rundir.find_run(MINE) == mine
        assert rundir.find_run(f"20250101T{OTHERS - 1:06}Z-sft-other") is not None
    assert opened == []


def test_the_runs_into_an_output_are_known_without_opening_the_others(
    others: Path, mine: RunFolder, tmp_path: Path
) -> None:
    output = tmp_path / "model"
    keep_summaries()
    with opened_below(others, state_of_index()) as opened:
        assert rundir.choose_folder("sft", "mine", output, rundir.find_runs_root())[0] == mine
        rundir.choose_folder("sft", "new", Path("/models/new"), others)
        outputs = known_outputs()
    assert len(opened) <= FEW
    assert len(outputs) == OTHERS + 1
    assert outputs[mine.path] == str(output)


def test_runs_of_this_folder_are_listed_without_opening_the_others(
    others: Path, mine: RunFolder, capsys: Capture
) -> None:
    keep_summaries()
    with opened_below(others, state_of_index()) as opened:
        assert main.main(["runs", "--here"]) == 0
    assert MINE in capsys.readouterr().out
    assert len(opened) <= FEW


def test_a_further_attempt_is_seen_at_once(others: Path, mine: RunFolder) -> None:
    assert rundir.find_run("last") == mine
    other = RunFolder(others / "20250101T000007Z-sft-other")
    files.write_json(other.manifest, {"stage": "sft", "cwd": os.getcwd(), "output": "/moved"})
    other.console(1).touch()

    assert rundir.find_run("last") == other
    assert known_outputs()[other.path] == "/moved"

    other.manifest.unlink()
    assert rundir.find_run("last") == mine


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"version": 1, "runs": 3}', '{"version": 9, "runs": {}}']
)
def test_a_damaged_file_of_summaries_is_made_anew(mine: RunFolder, content: str) -> None:
    kept = keep_summaries()
    text = kept.read_text()
    kept.write_text(content)
    assert rundir.find_run("last") == mine
    assert kept.read_text() == text


@pytest.mark.parametrize(
    "row",
    [
        "null",
        "[]",
        "[[1, 2, 3], [null, null, null, null, null, null, null, null]]",
        "[STAMP, {}]",
        "[STAMP, [{}, {}, {}, {}, {}, {}, {}, {}]]",
    ],
)
def test_a_damaged_summary_is_read_again(mine: RunFolder, row: str) -> None:
    kept = keep_summaries()
    content = files.read_json(kept)
    stamp = content["runs"][str(mine.path)][0]
    content["runs"][str(mine.path)] = json.loads(row.replace("STAMP", json.dumps(stamp)))
    files.write_json(kept, content)
    assert rundir.find_run("last") == mine


@pytest.mark.parametrize(
    ("stage", "output", "is_same"),
    [("sft", "real", True), ("sft", "link", True), ("dpo", "link", False)],
)
def test_an_output_behind_a_link_is_that_of_its_run(
    tmp_path: Path, stage: str, output: str, is_same: bool
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    root = tmp_path / "runs"
    folder = make_run(root / "20260101T000000Z-sft-a", output=str(tmp_path / "link"))
    chosen, _ = rundir.choose_folder(stage, "a", tmp_path / output, root)
    assert (chosen == folder) == is_same
