"""The verdict that people read: the cause first, each run by its name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import write_run

from launcher.cli.main import main
from launcher.verdict import summary

CRASH = (
    "Traceback (most recent call last):\n"
    '  File "/a/train.py", line 7, in <module>\n    main()\n'
    "ValueError: row 7 has no messages\n"
)


def crashed(path: Path, *, steps: int) -> Path:
    write_run(path, steps=steps, extra=CRASH)
    return ended_with(path, returncode=1)


def ended_with(path: Path, **fields: Any) -> Path:
    record = json.loads((path / "exit.json").read_text())
    (path / "exit.json").write_text(json.dumps({**record, **fields}))
    return path


def check(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = main(["check", str(path)])
    return code, capsys.readouterr().out.splitlines()


def test_a_crash_begins_with_its_cause_and_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = crashed(tmp_path / "20260102T030405Z-dpo-tulu", steps=0)
    code, lines = check(path, capsys)
    assert code == 1
    assert lines[0] == "verdict: fail  20260102T030405Z-dpo-tulu  (dpo, 0 steps)"
    assert lines[1] == "  cause: ValueError: row 7 has no messages  (/a/train.py:7)"
    log = path / "console.log"
    logged = log.read_text().splitlines()
    number = 1 + logged.index("ValueError: row 7 has no messages")
    assert lines[2] == f"    {log}:{number}: ValueError: row 7 has no messages"
    assert lines[3].startswith("    help: ")
    # the point that failed first, and once what was not reached
    assert lines[4].split() == ["finish", "crashed", "FAIL", "expected", "completed"]
    (unreached,) = [line for line in lines if "training never reached step 1" in line]
    assert {"liger", "loss"} <= set(unreached.partition(": ")[2].split(", "))
    naming = [line for line in lines if "row 7 has no messages" in line]
    assert len(naming) == 2


def test_a_run_that_passed_takes_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = check(write_run(tmp_path / "run"), capsys)
    assert (code, lines) == (0, ["verdict: pass  run  (dpo, 40 steps)"])


def test_only_the_points_that_are_not_as_expected_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = crashed(tmp_path / "run", steps=20)
    _, lines = check(path, capsys)
    output = "\n".join(lines)
    assert re.search("finish +crashed +FAIL", output)
    assert " ok " not in output


def test_a_run_that_was_stopped_is_shown_as_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run", steps=20)
    ended_with(path, returncode=-15, signal=15, stopped=15)
    code, lines = check(path, capsys)
    assert code == 1
    assert lines[0] == "verdict: stopped  run  (dpo, 20 steps)"
    assert lines[1] == "  cause: the run was stopped by SIGTERM after step 20 of 20"
    assert lines[2].startswith("    help: start the same command again")
    assert lines[3].split() == ["finish", "stopped", "stopped", "expected", "completed"]
    assert json.loads((path / "verdict.json").read_text())["status"] == "fail"


def finish_point(state: str, **detail: Any) -> dict[str, Any]:
    steps = {"last_step": 3, "total_steps": 9}
    return {"name": "finish", "state": state, "ok": False, "detail": {**steps, **detail}}


def cause_of(*points: dict[str, Any]) -> summary.Cause:
    cause = summary.find_cause({"status": "fail", "points": list(points)})
    assert cause is not None
    return cause


def test_what_ctrl_c_raises_is_no_fault_of_the_trainer() -> None:
    error = {"type": "KeyboardInterrupt", "message": "", "at": "a:1"}
    cause = cause_of(finish_point("stopped", signal="SIGINT", error=error))
    assert cause.text == "the run was stopped by SIGINT after step 3 of 9"
    assert (cause.help or "").startswith("start the same command again: it continues")


def test_a_violation_has_the_help_of_its_point() -> None:
    error = {"type": "violation", "message": "loss is nan"}
    finish = finish_point("stopped", error=error, help="see the point")
    loss = {"name": "loss", "ok": False, "detail": {"help": "lower the learning rate"}}
    cause = cause_of(finish, loss)
    assert (cause.text, cause.help) == ("loss is nan", "lower the learning rate")


def test_a_killed_rank_is_not_the_error_of_its_launcher() -> None:
    kind = "subprocess.CalledProcessError"
    error = {"type": kind, "message": "Command '[...]' died", "at": "launch.py:9"}
    finish = finish_point(
        "killed", signal="SIGKILL", error=error, reason="killed", help="see dmesg"
    )
    cause = cause_of(finish)
    assert cause.text == "the run was killed by SIGKILL after step 3 of 9"
    assert cause.repeated == ("ended by SIGKILL", "see dmesg")


@pytest.mark.parametrize("command", ["check", "report"])
def test_a_text_that_is_no_log_has_no_verdict(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "README.md"
    text.write_text("# Training\n\nIt fails with an error, and the loss is nan at step 3.\n")
    assert main([command, str(text)]) == 3
    output = capsys.readouterr()
    assert "error[not-a-training-log]: not a training log" in output.err
    assert f"--> {text}" in output.err
    assert "verdict" not in output.out
    assert list(tmp_path.iterdir()) == [text]


@pytest.mark.parametrize(
    "verdict",
    [
        {},
        {"status": "fail"},
        {"status": "x", "points": [{"name": 1}, 2, {"ok": False, "detail": 3}]},
    ],
)
def test_a_damaged_verdict_has_a_summary(verdict: dict[str, Any]) -> None:
    points = summary.list_points(verdict)
    has_cause = summary.find_cause(verdict) is not None
    assert summary.describe_outcome(verdict) == str(verdict.get("status"))
    assert has_cause is bool(points)
    for point in points:
        assert summary.describe_point(point) is None


def _record_rungs(runs: list[dict[str, str]]) -> dict[str, Any]:
    return {"rungs": {str(number): run for number, run in enumerate(runs)}}


RECORDS: dict[str, Callable[[list[dict[str, str]]], dict[str, Any]]] = {
    "pipeline": lambda runs: {"stages": runs},
    "bench": lambda runs: {"runs": runs},
    "ladder": _record_rungs,
    "tune": lambda runs: {"trials": {"samples": runs}},
}


@pytest.mark.parametrize("kind", RECORDS)
def test_the_folder_of_several_runs_stands_for_all_of_them(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_run(tmp_path / "good")
    crashed(tmp_path / "bad", steps=20)
    # as it was before the folder of the second one was moved; the third never began
    places = [good, tmp_path / "elsewhere" / "bad", tmp_path / "none", good]
    record = RECORDS[kind]([{"run": str(path)} for path in places])
    (tmp_path / f"{kind}.json").write_text(json.dumps(record))

    code, lines = check(tmp_path, capsys)
    assert code == 1
    assert [line for line in lines if line.startswith("verdict: ")] == [
        "verdict: pass  good  (dpo, 40 steps)",
        "verdict: fail  bad  (dpo, 20 steps)",
    ]

    assert main(["check", str(tmp_path), "--format", "json"]) == 1
    runs = json.loads(capsys.readouterr().out)["data"]["runs"]
    statuses = {Path(run["run"]).name: run["status"] for run in runs}
    assert statuses == {"good": "pass", "bad": "fail"}


def test_the_page_of_several_runs_names_each(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "first"), write_run(tmp_path / "second")]
    record = {"runs": [{"run": str(path)} for path in paths]}
    (tmp_path / "bench.json").write_text(json.dumps(record))
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "-o", str(page)]) == 0
    content = page.read_text()
    assert ">first<" in content
    assert ">second<" in content
