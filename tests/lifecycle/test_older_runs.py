"""Runs that launch wrote at commit 661540d, one finished and one killed with its supervisor: they still open.

Written by a real SFT of a model of 824 parameters. PLACE stands for the folder that it ran in, HOST for the
machine.
"""

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import saved
from conftest import DATA, PATIENCE_S, REPOSITORY
from real_training import needs_trl

from launcher.cli.main import main
from launcher.errors import Exit
from launcher.planning import prepare
from launcher.planning.collect import Scope
from launcher.planning.request import Request
from launcher.planning.resume.decision import Decision

FINISHED, KILLED = "20261124T110632Z-sft-sft", "20261124T110709Z-sft-killed"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "demo"
    shutil.copytree(DATA / "run_661540d", folder)
    for path in (folder / "runs").rglob("*"):
        if path.is_file():
            text = path.read_text().replace("PLACE", str(folder))
            path.write_text(text.replace("HOST", socket.gethostname()))
    saved.trl(folder / "out2", 24)
    (saved.trl(folder / "out2", 28) / "trainer_state.json").unlink()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LAUNCH_RUNS", str(folder / "runs"))
    return folder


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: Exit = Exit.OK) -> Any:
    assert main([*words, "--format", "json"]) == code
    return json.loads(capsys.readouterr().out)["data"]


def decision(*overrides: str) -> Decision:
    """What the command that began a run comes to when it is given again."""
    request = Request(stage="sft", config=Path("sft.yaml"), overrides=overrides, gpus=0)
    decided = prepare.prepare(request, Scope.START).decision
    assert decided is not None
    return decided


def test_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["run"]: row for row in answer(capsys, "runs")}
    shown = ("state", "verdict", "step", "loss", "stage")
    assert [rows[FINISHED][key] for key in shown] == ["finished", "pass", 12, 2.461, "sft"]
    assert [rows[KILLED][key] for key in shown] == ["lost", None, 28, 2.083, "sft"]


def test_they_are_judged_as_they_were(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    then = json.loads((place / "runs" / FINISHED / "verdict.json").read_text())
    found = answer(capsys, "check", FINISHED)
    assert found["status"] == then["status"] == "pass"
    states = {point["name"]: point["state"] for point in found["points"]}
    assert states.items() >= {point["name"]: point["state"] for point in then["points"]}.items()
    # what verdicts say since then
    assert states.keys() - {point["name"] for point in then["points"]} == {"gradients"}
    killed = answer(capsys, "check", KILLED, code=Exit.VERDICT)
    (finish,) = (point for point in killed["points"] if point["name"] == "finish")
    assert (finish["state"], killed["steps"]) == ("killed", 28)


@pytest.mark.parametrize("name", [FINISHED, KILLED])
def test_the_page_and_the_log_are_shown(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (run,) = answer(capsys, "report", name)["runs"]
    assert run["stage"] == "sft"
    assert main(["report", name]) == Exit.OK
    assert name in (place / "runs" / name / "report.html").read_text()
    assert main(["logs", name]) == Exit.OK
    assert "'loss': '2.678'" in capsys.readouterr().out


def test_attaching_says_how_they_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "attach", FINISHED)["status"] == "pass"
    assert answer(capsys, "attach", KILLED, code=Exit.VERDICT)["status"] == "fail"


@needs_trl
def test_the_same_command_goes_on_or_is_done(place: Path) -> None:
    assert decision().kind == "finished"
    killed = decision("output_dir=out2", "max_steps=40", "name=killed")
    assert (killed.kind, killed.step, killed.changes) == ("resume", 24, ())
    assert killed.checkpoint is not None
    assert killed.checkpoint.path == place / "out2" / "checkpoint-24"


@needs_trl
@pytest.mark.slow
@pytest.mark.training
def test_a_job_that_was_queued_still_trains(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As its batch script starts it, after the checkout that it was queued from was updated."""
    folder = place / "runs" / KILLED
    for name in ("console.log", "process.json", "keeper.log", "lock", "probe/rank-0.jsonl"):
        (folder / name).unlink()
    shutil.rmtree(place / "out2")
    trl = importlib.util.find_spec("trl")
    assert trl is not None and trl.origin is not None
    scripts = str(Path(trl.origin).parent / "scripts")
    text = (folder / "start.json").read_text().replace("/srv/venv/bin/python", sys.executable)
    text = text.replace("/srv/venv/lib/python3.11/site-packages/trl/scripts", scripts)
    text = text.replace("/srv/launch", str(REPOSITORY))
    (folder / "start.json").write_text(text)
    words = [sys.executable, "-m", "launcher.cli", "exec", str(folder)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert answer(capsys, "check", KILLED)["steps"] == 40
