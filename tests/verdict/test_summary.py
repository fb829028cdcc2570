"""What a verdict says to people: the cause first, each run by its name, no verdict about any other text."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import made

from launcher.cli.main import main
from launcher.verdict import summary

CRASH = (
    "Traceback (most recent call last):\n"
    '  File "/a/train.py", line 7, in <module>\n    main()\n'
    "ValueError: row 7 has no messages\n"
)


def crashed(path: Path, *, steps: int, **ended: Any) -> Path:
    made(path, steps=steps, extra=CRASH if not ended else "")
    over = json.loads((path / "exit.json").read_text())
    (path / "exit.json").write_text(json.dumps({**over, "returncode": 1, **ended}))
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
    number = 1 + log.read_text().splitlines().index("ValueError: row 7 has no messages")
    assert lines[2] == f"    {log}:{number}: ValueError: row 7 has no messages"
    assert lines[3].startswith("    help: ")
    # the point that failed first, and once what was not reached
    assert lines[4].split() == ["finish", "crashed", "FAIL", "expected", "completed"]
    (unreached,) = (line for line in lines if "training never reached step 1" in line)
    assert {"liger", "loss"} <= set(unreached.partition(": ")[2].split(", "))
    assert sum("row 7 has no messages" in line for line in lines) == 2


def test_a_run_that_passed_takes_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = check(made(tmp_path / "run"), capsys)
    assert (code, lines) == (0, ["verdict: pass  run  (dpo, 40 steps)"])


def test_only_the_points_that_are_not_as_expected_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, lines = check(crashed(tmp_path / "run", steps=20), capsys)
    states = [line.split()[1:3] for line in lines if line.startswith("  ") and line[2] != " "]
    assert ["crashed", "FAIL"] in states
    assert not [line for line in lines if " ok " in line]


def test_a_run_that_was_stopped_is_shown_as_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = crashed(tmp_path / "run", steps=20, returncode=-15, signal=15, stopped=15)
    code, lines = check(path, capsys)
    assert (code, lines[0]) == (1, "verdict: stopped  run  (dpo, 20 steps)")
    assert lines[1] == "  cause: the run was stopped by SIGTERM after step 20 of 20"
    assert lines[2].startswith("    help: start the same command again")
    assert lines[3].split() == ["finish", "stopped", "stopped", "expected", "completed"]
    assert json.loads((path / "verdict.json").read_text())["status"] == "fail"


@pytest.mark.parametrize(
    ("detail", "cause", "help"),
    [
        # what Ctrl-C raises in the trainer is no fault of its
        (
            {
                "signal": "SIGINT",
                "error": {"type": "KeyboardInterrupt", "message": "", "at": "a:1"},
            },
            "the run was stopped by SIGINT after step 3 of 9",
            "start the same command again: it continues from the last checkpoint, if there is one",
        ),
        # what broke `expect:` knows what to do about it
        (
            {"error": {"type": "violation", "message": "loss is nan"}, "help": "see the point"},
            "loss is nan",
            "lower the learning rate",
        ),
    ],
)
def test_a_stop_names_its_cause(detail: dict[str, Any], cause: str, help: str) -> None:
    finish = {"name": "finish", "state": "stopped", "ok": False, "expected": "completed"}
    finish |= {"detail": {"last_step": 3, "total_steps": 9, **detail}}
    loss = {"name": "loss", "ok": False, "detail": {"help": "lower the learning rate"}}
    points = [finish] if "signal" in detail else [finish, loss]
    found = summary.cause({"status": "fail", "points": points})
    assert found is not None and (found.text, found.help) == (cause, help)


def test_a_killed_rank_is_not_the_error_of_its_launcher() -> None:
    error = {
        "type": "subprocess.CalledProcessError",
        "message": "Command '[...]' died",
        "at": "launch.py:9",
    }
    detail = {
        "signal": "SIGKILL",
        "error": error,
        "last_step": 3,
        "total_steps": 9,
        "reason": "killed",
    }
    finish = {
        "name": "finish",
        "state": "killed",
        "ok": False,
        "detail": {**detail, "help": "see dmesg"},
    }
    found = summary.cause({"status": "fail", "points": [finish]})
    assert found is not None and found.text == "the run was killed by SIGKILL after step 3 of 9"
    assert found.repeated == ("ended by SIGKILL", "see dmesg")


@pytest.mark.parametrize("command", ["check", "report"])
def test_a_text_that_is_no_log_has_no_verdict(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "README.md"
    text.write_text("# Training\n\nIt fails with an error, and the loss is nan at step 3.\n")
    assert main([command, str(text)]) == 3
    said = capsys.readouterr()
    assert "error[not-a-training-log]: not a training log" in said.err
    assert f"--> {text}" in said.err and "verdict" not in said.out
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
    assert summary.outcome(verdict) == str(verdict.get("status"))
    points = summary.points(verdict)
    assert (summary.cause(verdict) is None) == (not points)
    assert {summary.sentence(point) for point in points} <= {None}


@pytest.mark.parametrize("kind", ["pipeline", "bench", "ladder", "tune"])
def test_the_folder_of_several_runs_stands_for_all_of_them(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = made(tmp_path / "good")
    crashed(tmp_path / "bad", steps=20)
    # as it was before the folder of the second one was moved; the third never began
    places = [good, tmp_path / "elsewhere" / "bad", tmp_path / "none", good]
    runs = [{"run": str(path)} for path in places]
    rungs = {"rungs": {str(n): run for n, run in enumerate(runs)}}
    rows = {
        "pipeline": {"stages": runs},
        "bench": {"runs": runs},
        "ladder": rungs,
        "tune": {"trials": {"samples": runs}},
    }
    (tmp_path / f"{kind}.json").write_text(json.dumps(rows[kind]))
    code, lines = check(tmp_path, capsys)
    heads = [line for line in lines if line.startswith("verdict: ")]
    assert (code, heads) == (
        1,
        ["verdict: pass  good  (dpo, 40 steps)", "verdict: fail  bad  (dpo, 20 steps)"],
    )
    assert main(["check", str(tmp_path), "--format", "json"]) == 1
    data = json.loads(capsys.readouterr().out)["data"]
    assert [(Path(run["run"]).name, run["status"]) for run in data["runs"]] == [
        ("good", "pass"),
        ("bad", "fail"),
    ]
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "-o", str(page)]) == 0
    assert ">good<" in page.read_text() and ">bad<" in page.read_text()
