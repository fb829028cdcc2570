"""How the evaluation of a stage runs, stops, is judged, and is not run twice."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from chained import Answer, Chained, answer_of
from chained import finished as finished  # a fixture
from chained import finished_copy as finished_copy  # a fixture
from chained import world as world  # a fixture
from conftest import PATIENCE_S, SUPPORT
from fake_world import needs_trl, wait_until
from parsed_answers import parse_answer

from launcher.cli import main
from launcher.errors import Exit
from launcher.runs import rundir

pytestmark = [pytest.mark.slow, needs_trl]
FAKE = str(SUPPORT / "fake_evaluation.py")
LM_EVAL = {
    "results": {
        "gsm8k": {"exact_match,strict-match": 0.41, "exact_match,flexible-extract": 0.44},
        "mmlu": {"acc,none": 0.62},
    }
}
B_IS_1 = 'write=m.json:{"b": 1}'


def evaluate(world: Chained, *steps: str, **options: Any) -> Path:
    """Write a pipeline of two stages, of which a fake evaluates the second."""
    command = [sys.executable, FAKE, "{model}", "{folder}", *steps]
    entry = {"command": command, "metrics": "m.json", **options}
    if entry["metrics"] is None:
        del entry["metrics"]
    second = {"config": "second.yaml", "eval": entry}
    return world.pipeline("first.yaml", second, gpus=0)


def evaluations(world: Chained) -> list[Any]:
    """What each evaluation since the last call was given."""
    return [parse_answer(line) for line in world.taken("evaluated")]


def second_run(world: Chained) -> rundir.RunFolder:
    (folder,) = world.runs.glob("*-sft-second")
    return rundir.RunFolder(folder)


def evaluation_of(answer: Answer) -> Any:
    return answer.stages[1].eval


def place_of(answer: Answer, code: str) -> tuple[str, int]:
    finding = answer.finding(code)
    return Path(finding.file).name, finding.line


def line_of(path: Path, text: str) -> int:
    lines = path.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_numbers_stand_in_the_answer_the_verdict_and_the_pages(
    world: Chained, capsys: pytest.CaptureFixture[str]
) -> None:
    expect = {"gsm8k": ">= 0.4", "mmlu": "> 0.6"}
    write = f"write=o/results_1.json:{json.dumps(LM_EVAL)}"
    evaluate(world, write, metrics="**/results_*.json", expect=expect)

    answer = world.run()

    assert answer.exit == 0, answer
    assert answer.statuses == "passed, passed"
    run = second_run(world)
    (given,) = evaluations(world)
    assert given.model == str(world.root / "o" / "second")
    assert given.folder == str(run.path / "eval")
    # no GPU is visible to it on the CPU
    assert given.cuda == ""
    assert (run.path / "eval" / "console.log").exists()

    assert not hasattr(answer.stages[0], "eval")
    evaluation = evaluation_of(answer)
    assert evaluation.state == "measured"
    assert [gate.ok for gate in evaluation.gates] == [True, True]
    assert vars(evaluation.metrics)["gsm8k/exact_match,strict-match"] == 0.41

    folder = Path(answer.content.data.pipeline)
    cell = 'data-label="eval">gsm8k 0.41 (&gt;= 0.4); mmlu 0.62'
    assert cell in (folder / "report.html").read_text()
    page = run.report.read_text()
    assert '<h2 id="evaluation">' in page
    assert "gsm8k/exact_match,flexible-extract" in page
    assert "&gt;= 0.4" in page

    assert main.main(["check", str(run.path), "--format", "json"]) == 0
    points = parse_answer(capsys.readouterr().out).data.points
    (point,) = [point for point in points if point.name == "evaluation"]
    assert point.state == "passed"
    assert point.detail.gates[0].value == 0.41
    assert main.main(["check", str(run.path)]) == 0
    assert "measured: gsm8k 0.41, mmlu 0.62" in capsys.readouterr().out


def test_an_evaluation_runs_again_only_for_another_command(
    finished: Chained, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(finished, B_IS_1, expect={"b": ">= 1"})
    assert finished.run().statuses == "skipped, skipped"
    assert len(evaluations(finished)) == 1

    answer = finished.run()

    assert answer.exit == 0
    assert evaluations(finished) == []
    assert evaluation_of(answer).state == "measured"

    # by other gates the same numbers are judged
    path = evaluate(finished, B_IS_1, expect={"b": ">= 2"})
    answer = finished.run()

    assert answer.exit == 1
    assert evaluations(finished) == []
    assert place_of(answer, "eval-gate") == ("p.yaml", line_of(path, "b: '>"))
    assert "1, expected >= 2" in answer.finding("eval-gate").message
    # the row is that of the stage: its name is not said again
    assert answer.stages[1].reason.startswith("b")
    assert main.main(["check", str(second_run(finished).path)]) == 1
    assert "1, expected >= 2" in capsys.readouterr().out

    evaluate(finished, B_IS_1, "sleep=0", expect={"b": ">= 1"})
    answer = finished.run()

    assert answer.exit == 0
    assert len(evaluations(finished)) == 1
    assert finished.trained() == ""
    assert finished.quiet()


@pytest.mark.parametrize(
    ("steps", "options", "code", "finding", "key", "message"),
    [
        (
            ['write=m.json:{"a": 1}'],
            {"expect": {"b": ">= 1"}},
            Exit.VERDICT,
            "eval-gate",
            "b: '>",
            "has no metric `b`",
        ),
        (["write=m.json:{"], {}, Exit.VERDICT, "eval-metrics", "metrics:", "is not JSON"),
        ([], {}, Exit.VERDICT, "eval-metrics", "metrics:", "wrote no"),
        (["exit=3"], {}, Exit.TRAINING, "eval-failed", "command:", "exit code 3"),
        (
            ["sleep=60"],
            {"timeout": "1s"},
            Exit.TRAINING,
            "eval-failed",
            "timeout:",
            "its time was up after 1 s",
        ),
    ],
    ids=["no such metric", "no JSON", "no file", "exit code", "timeout"],
)
def test_an_evaluation_that_fails_stops_the_pipeline_at_its_line(
    steps: list[str], options: Any, code: Exit, finding: str, key: str, message: str,
    finished: Chained,
) -> None:  # fmt: skip
    path = evaluate(finished, *steps, **options)

    answer = finished.run()

    assert answer.exit == code, answer
    assert answer.statuses == "skipped, failed"
    assert place_of(answer, finding) == ("p.yaml", line_of(path, key))
    assert message in answer.finding(finding).message
    assert answer.content.data.state == "stopped"
    assert answer.stages[1].reason
    assert finished.quiet()


def test_ctrl_c_ends_an_evaluation_and_the_same_command_evaluates_again(finished: Chained) -> None:
    go = finished.root / "go"
    evaluate(finished, "pid=evaluation", f"wait={go}", B_IS_1)
    running = finished.started(*finished.words("--format", "json"), start_new_session=True)
    pid = finished.pid("evaluation")

    os.kill(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=PATIENCE_S)

    assert running.returncode == Exit.INTERRUPTED, err
    answer = answer_of(running.returncode, out.decode())
    assert answer.content.data.state == "interrupted"
    assert answer.statuses == "skipped, interrupted"
    assert evaluation_of(answer).state == "interrupted"
    assert not Path(f"/proc/{pid}").exists()
    assert finished.quiet()

    evaluations(finished)
    go.touch()
    assert finished.run().exit == Exit.OK
    assert finished.trained() == ""
    assert len(evaluations(finished)) == 1
    assert (second_run(finished).path / "eval" / "console.2.log").exists()


def test_what_a_killed_pipeline_left_evaluating_is_ended_by_the_next(finished: Chained) -> None:
    go = finished.root / "go"
    evaluate(finished, "pid=evaluation", f"wait={go}", B_IS_1)
    first = finished.started(*finished.words(), start_new_session=True)
    pid = finished.pid("evaluation")
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert Path(f"/proc/{pid}").exists()
    (finished.root / "pids" / "evaluation").unlink()

    second = finished.started(*finished.words(), start_new_session=True)
    finished.pid("evaluation")
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    go.touch()
    _, err = second.communicate(timeout=PATIENCE_S)

    assert second.returncode == 0, err
    assert len(evaluations(finished)) == 2
    assert finished.quiet()


def test_launch_stop_ends_the_evaluation_of_a_run(finished: Chained) -> None:
    evaluate(finished, "pid=evaluation", "sleep=600")
    running = finished.started(*finished.words("--format", "json"), start_new_session=True)
    finished.pid("evaluation")
    run = str(second_run(finished).path)

    removal = finished.launch("rm", run, "--yes")
    assert "is being evaluated" in removal.stderr, removal
    stop = finished.launch("stop", run)
    assert stop.returncode == 0, stop.stderr

    out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == Exit.INTERRUPTED
    answer = answer_of(running.returncode, out.decode())
    assert evaluation_of(answer).state == "interrupted"
    assert finished.quiet()


def test_a_dry_run_and_validate_config_show_it(
    world: Chained, capsys: pytest.CaptureFixture[str]
) -> None:
    path = evaluate(world, expect={"b": ">= 1"}, timeout="90m")
    world.stage("second", output_dir="o/a $(touch pwned) b")
    model = f"{world.root}/o/a $(touch pwned) b"

    assert main.main([*world.words("--dry-run")]) == 0
    shown = capsys.readouterr().out
    answer = world.run("--dry-run")
    assert main.main(["validate-config", str(path)]) == 0

    assert "# evaluation of second, at most 1.5 h, expects b >= 1" in shown
    assert f"'{model}'" in shown
    assert not hasattr(answer.stages[0], "eval")
    evaluation = evaluation_of(answer)
    assert evaluation.argv[2] == model
    assert evaluation.expect.b == ">= 1"
    assert evaluation.timeout_s == 5400
    assert "(a pipeline: first, second; evaluated: second)" in capsys.readouterr().out
    assert evaluations(world) == []
    assert not (world.root / "pwned").exists()


def test_the_current_folder_gives_it_no_program(
    world: Chained, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = world.root / "tools" / "measure"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f":tools:{os.environ['PATH']}")
    path = evaluate(world, command=["measure", "{model}"])

    answer = world.run()

    assert answer.exit == Exit.NOT_READY
    assert place_of(answer, "no-eval-program") == ("p.yaml", line_of(path, "command:"))
    assert world.trained() == ""
    # a plan is for any machine
    assert world.run("--dry-run").exit == Exit.OK


def test_the_current_folder_gives_it_no_code(finished: Chained) -> None:
    pwned = finished.root / "pwned"
    (finished.root / "planted.py").write_text(f"open({str(pwned)!r}, 'w').close()\n")
    evaluate(finished, command=["{python}", "-c", "import planted"], metrics=None)

    answer = finished.run()

    assert answer.exit == Exit.TRAINING
    assert evaluation_of(answer).state == "crashed"
    assert not pwned.exists()
