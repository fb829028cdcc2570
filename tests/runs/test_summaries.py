"""Beside thousands of other runs a command opens the files of few."""

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

OTHERS = 2_000
FEW = 20  # files that a command may open among those of other runs

Capture = pytest.CaptureFixture[str]
_opened: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is None or event not in ("open", "os.listdir", "os.scandir"):
        return
    if isinstance(arguments[0], str | os.PathLike):
        _opened.append(os.fspath(arguments[0]))


sys.addaudithook(_note)


@contextmanager
def opened_below(*folders: Path) -> Iterator[list[str]]:
    """Gathers what is opened, and listed, below these folders."""
    global _opened
    noted: list[str] = []
    below: list[str] = []
    _opened = noted
    try:
        yield below
    finally:
        _opened = None
        beginnings = tuple(f"{folder}/" for folder in folders)
        below += [path for path in noted if path.startswith(beginnings)]


def make_run(
    root: Path, name: str, *, output: str, cwd: str = "/elsewhere", stage: str = "sft"
) -> RunFolder:
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    files.write_json(
        folder.manifest, {"stage": stage, "backend": "trl", "output": output, "cwd": cwd}
    )
    return folder


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """Runs of another folder that the index knows, as every launch has entered them."""
    root = tmp_path / "others"
    for number in range(OTHERS):
        path = make_run(root, f"20250101T{number:06}Z-sft-other", output=f"/models/{number}").path
        rundir.register("runs", path)
    return root


@pytest.fixture
def mine(others: Path) -> RunFolder:
    """A run of this folder, begun, with a log."""
    output = str(others.parent / "model")
    folder = make_run(
        rundir.runs_root(), "20260101T000000Z-sft-mine", output=output, cwd=os.getcwd()
    )
    folder.console(1).write_text("one\ntwo\n")
    rundir.register("runs", folder.path)
    return folder


def state() -> Path:
    return rundir.state_folder() / "runs"


@pytest.mark.parametrize("name", ["last", "20260101T000000Z-sft-mine", "20260101T000000Z"])
def test_a_run_is_found_without_opening_the_others(
    others: Path, mine: RunFolder, name: str, capsys: Capture
) -> None:
    # what an earlier command has read is kept
    rundir.find_run("last")
    with opened_below(others, state()) as opened:
        assert main.main(["logs", name, "-n", "1"]) == 0
    assert capsys.readouterr().out == "two\n"
    assert len(opened) <= FEW


def test_a_name_is_looked_up_by_names_alone(others: Path, mine: RunFolder) -> None:
    with opened_below(others) as opened:
        assert rundir.find_run(mine.path.name) == mine
        assert rundir.find_run(f"20250101T{OTHERS - 1:06}Z-sft-other") is not None
    assert opened == []


def known_outputs() -> list[tuple[Path, str | None]]:
    return [(one.path, one.output) for one in rundir.summarize(rundir.known_runs())]


def test_the_runs_into_an_output_are_known_without_opening_the_others(
    others: Path, mine: RunFolder
) -> None:
    output = others.parent / "model"
    rundir.find_run("last")
    with opened_below(others, state()) as opened:
        assert rundir.choose_folder("sft", "mine", output, rundir.runs_root())[0] == mine
        assert (
            rundir.choose_folder("sft", "new", Path("/models/new"), others)[0].path.parent == others
        )
        pairs = known_outputs()
    assert len(opened) <= FEW
    assert len(pairs) == OTHERS + 1
    assert (mine.path, str(output)) in pairs


def test_a_further_attempt_is_seen_at_once(others: Path, mine: RunFolder) -> None:
    assert rundir.find_run("last") == mine
    other = RunFolder(others / "20250101T000007Z-sft-other")
    files.write_json(
        other.manifest, {"stage": "sft", "cwd": os.getcwd(), "output": "/models/moved"}
    )
    other.console(1).touch()
    assert rundir.find_run("last") == other
    assert (other.path, "/models/moved") in known_outputs()
    other.manifest.unlink()
    assert rundir.find_run("last") == mine


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"version": 1, "runs": 3}', '{"version": 9, "runs": {}}']
)
def test_a_damaged_file_of_summaries_is_made_anew(mine: RunFolder, content: str) -> None:
    kept = rundir.state_folder() / "summaries.json"
    rundir.find_run("last")
    before = kept.read_text()
    kept.write_text(content)
    assert rundir.find_run("last") == mine
    assert kept.read_text() == before


@pytest.mark.parametrize("row", [None, 3, [], [[1, 2, 3]], [[1, 2, 3], {}], [[1, 2, 3], [{}] * 8]])
def test_a_damaged_summary_costs_one_look(mine: RunFolder, row: object) -> None:
    kept = rundir.state_folder() / "summaries.json"
    rundir.find_run("last")
    content = files.read_json(kept)
    stamp = content["runs"][str(mine.path)][0]
    if isinstance(row, list) and row:
        row = [stamp, *row[1:]]
    content["runs"][str(mine.path)] = row
    files.write_json(kept, content)
    assert rundir.find_run("last") == mine


def test_an_output_behind_a_link_is_that_of_its_run(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    folder = make_run(root, "20260101T000000Z-sft-a", output=str(tmp_path / "link"))
    assert rundir.choose_folder("sft", "a", tmp_path / "real", root)[0] == folder
    assert rundir.choose_folder("sft", "a", tmp_path / "link", root)[0] == folder
    assert rundir.choose_folder("dpo", "a", tmp_path / "link", root)[0] != folder


def test_runs_of_this_folder_are_listed_without_opening_the_others(
    others: Path, mine: RunFolder, capsys: Capture
) -> None:
    rundir.find_run("last")
    with opened_below(others, state()) as opened:
        assert main.main(["runs", "--here"]) == 0
    assert mine.path.name in capsys.readouterr().out
    assert len(opened) <= FEW
