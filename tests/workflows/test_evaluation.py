"""`eval:` of a stage in a pipeline: what a file may say, how metrics are read and held against gates, and how an
evaluation runs, stops and is not run twice."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, SUPPORT, Write
from fake_world import needs_trl, until
from test_pipeline import Chained, codes, statuses
from test_pipeline import world as world  # a fixture

from launcher.cli import main
from launcher.config import evaluation, pipeline
from launcher.config.evaluation import Gate
from launcher.errors import InvalidConfig
from launcher.runs import rundir
from launcher.workflows.pipeline import scores
from launcher.workflows.pipeline.scores import MetricsPlace, UnreadableScores

FAKE = str(SUPPORT / "fake_evaluation.py")
LM_EVAL = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "sample_len": 1319,
            "exact_match,strict-match": 0.41,
            "exact_match_stderr,strict-match": 0.013,
            "exact_match,flexible-extract": 0.44,
            "exact_match_stderr,flexible-extract": 0.014,
        },
        "mmlu": {"alias": "mmlu", "acc,none": 0.62, "acc_stderr,none": 0.004},
        "mmlu_law": {"alias": " - law", "acc,none": 0.5, "acc_stderr,none": "N/A"},
        "broken": {"alias": "broken", "acc,none": "N/A"},
    },
    "groups": {"mmlu": {"alias": "mmlu", "acc,none": 0.62, "acc_stderr,none": 0.004}},
    "config": {"model": "hf", "batch_size": 8},
    "n-shot": {"gsm8k": 5},
}

# what a file says below `eval`, the line of the fault, and a part of its message
REFUSED = [
    ("eval: lm_eval", 4, "`eval` is a mapping, not `lm_eval`"),
    ("eval: {}", 4, "`command` is the list of the words"),
    ("eval: {command: lm_eval --tasks gsm8k}", 4, "no shell reads it"),
    ("eval: {command: []}", 4, "`command` is the list of the words"),
    ("eval:\n      command: ['']", 5, "names a program, and is empty"),
    ("eval:\n      command:\n        - a\n        - {b: 1}", 7, "a word of `command` is a text"),
    ("eval:\n      command: [a]\n      comand: [b]", 6, "`comand` is not a key of an evaluation"),
    ("eval:\n      command: [a, '{modle}']", 5, "`{modle}` is not a placeholder"),
    (
        "eval:\n      command: [a]\n      metrics: [m.json]",
        6,
        "`metrics` is the path of a JSON file",
    ),
    ("eval:\n      command: [a]\n      metrics: '{out}/m.json'", 6, "`{out}` is not a placeholder"),
    ("eval:\n      command: [a]\n      expect: {x: '>= 1'}", 6, "`expect` needs `metrics`"),
    (
        "eval:\n      command: [a]\n      metrics: m\n      expect:\n        x: 0.4",
        8,
        "not a sign and a number",
    ),
    (
        "eval:\n      command: [a]\n      metrics: m\n      expect:\n        x: '=> 0.4'",
        8,
        "not a sign and a number",
    ),
    (
        "eval:\n      command: [a]\n      metrics: m\n      expect:\n        x: '> much'",
        8,
        "not a sign and a number",
    ),
    (
        "eval:\n      command: [a]\n      metrics: m\n      expect: [x]",
        7,
        "`expect` is a mapping of metrics",
    ),
    ("eval:\n      command: [a]\n      timeout: soon", 6, "is not a duration"),
    ("eval:\n      command: [a]\n      timeout: [1]", 6, "`timeout` is a duration"),
]


def of_stage(write: Write, text: str) -> Path:
    write("sft.yaml", "stage: sft\n")
    return write("p.yaml", f"stages:\n  - name: sft\n    config: sft.yaml\n    {text}\n")


@pytest.mark.parametrize(("text", "line", "message"), REFUSED)
def test_a_fault_is_refused_at_its_line(write: Write, text: str, line: int, message: str) -> None:
    path = of_stage(write, text)
    with pytest.raises(InvalidConfig) as caught:
        pipeline.load(path)
    found = [(f.code, f.file, f.line, f.message) for f in caught.value.findings]
    assert any(
        one[:3] == ("bad-pipeline", str(path), line) and message in one[3] for one in found
    ), found


def test_all_faults_of_an_evaluation_are_said_at_once(write: Write) -> None:
    text = "eval:\n      command: [a, '{modle}']\n      metrics: 7\n      timeout: x\n      expect: {y: 1}\n      z: 1"
    with pytest.raises(InvalidConfig) as caught:
        pipeline.load(of_stage(write, text))
    assert sorted(f.line or 0 for f in caught.value.findings) == [5, 6, 7, 8, 9]


def test_a_secret_is_kept_off_the_command_line(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB_PASS", "hunter2-and-more")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    text = "eval:\n      command: [a, '--out', '${oc.env:SCRATCH}', '--key=${oc.env:DB_PASS}']"
    with pytest.raises(InvalidConfig) as caught:
        pipeline.load(of_stage(write, text))
    (finding,) = caught.value.findings
    assert (finding.code, finding.line) == ("exposed-secret", 5)
    assert "hunter2" not in finding.message and "--key=${oc.env:DB_PASS}" in finding.message


def test_what_an_evaluation_says(write: Write) -> None:
    text = 'eval: {command: [a, 1, "{model}"], metrics: m.json, expect: {"x/y,z": "<= -1e-3"}, timeout: 1h30m}'
    (link,) = pipeline.load(of_stage(write, text)).links
    assert link.evaluation is not None
    assert link.evaluation.command == ("a", "1", "{model}")
    assert link.evaluation.expect == {"x/y,z": Gate("<=", -0.001)}
    assert link.evaluation.timeout_s == 5400


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("pretrained={model},dtype=auto", "pretrained=/a b/$(touch x),dtype=auto"),
        ("{gpus}", "2"),
        ("{{model}}", "{model}"),
        ('{"a": 1}', '{"a": 1}'),
        ("{}", "{}"),
        ("{model}{model}", "/a b/$(touch x)/a b/$(touch x)"),
    ],
)
def test_a_placeholder_is_replaced_inside_its_word(word: str, filled: str) -> None:
    assert evaluation.fill(word, {"model": "/a b/$(touch x)", "gpus": "2"}) == filled


def test_what_a_placeholder_stands_for_is_not_filled_again() -> None:
    assert evaluation.fill("{model}", {"model": "{gpus}", "gpus": "2"}) == "{gpus}"


def scored(tmp_path: Path, content: object) -> scores.Scores:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(content))
    return scores.read(path)


@pytest.mark.parametrize(
    ("content", "name", "gate", "ok", "reason"),
    [
        ({"gsm8k": 0.4}, "gsm8k", ">= 0.4", True, None),
        ({"gsm8k": 0.4}, "gsm8k", "> 0.4", False, "gsm8k is 0.4, expected > 0.4"),
        ({"a": {"b": 1}}, "a/b", "== 1", True, None),
        ({"a": {"b": 1}}, "a", "== 1", True, None),
        ({"loss": 2}, "lsos", "< 3", False, "did you mean `loss`?"),
        ({"a": "0.4", "b": 1}, "a", "> 0", False, 'is "0.4", not a number'),
        ({"a": True, "b": 1}, "a", "> 0", False, "is true, not a number"),
        ({"a": float("nan"), "b": 1}, "a", "> 0", False, "is NaN, not a number"),
        ({"a": None, "b": 1}, "a", "> 0", False, "is null, not a number"),
        # the first of several filters, as the task has them
        (LM_EVAL, "gsm8k", "<= 0.41", True, None),
        (LM_EVAL, "gsm8k/exact_match", "<= 0.41", True, None),
        (LM_EVAL, "gsm8k/exact_match,flexible-extract", ">= 0.44", True, None),
        (LM_EVAL, "mmlu", ">= 0.62", True, None),
        (LM_EVAL, "mmlu/acc_stderr", "<= 0.01", True, None),
        (LM_EVAL, "broken", ">= 0", False, 'is "N/A", not a number'),
        (LM_EVAL, "gsm8", ">= 0", False, "did you mean `gsm8k`?"),
        (LM_EVAL, "batch_size", ">= 0", False, "has no metric `batch_size`"),
    ],
)
def test_a_gate_is_held_against_the_number_that_its_name_stands_for(
    tmp_path: Path, content: object, name: str, gate: str, ok: bool, reason: str | None
) -> None:
    sign, bound = gate.split()
    (result,) = scores.judge(scored(tmp_path, content), {name: Gate(sign, float(bound))})
    assert result.ok is ok
    assert (reason or "") in (result.reason or "")


@pytest.mark.parametrize("text", ["", "[]", "[1]", "7", "{", "{}", '{"a": "b"}', "[" * 100_000])
def test_a_file_without_numbers_is_unreadable(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(UnreadableScores):
        scores.read(path)


def test_the_newest_file_of_this_evaluation_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "a [run]"
    (folder / "model").mkdir(parents=True)
    old = folder / "model" / "results_2026-01-01T00-00-00.json"
    old.write_text("{}")
    place = MetricsPlace.of("**/results_*.json", folder, {})
    before = scores.snapshot(place)
    with pytest.raises(UnreadableScores, match="of an earlier evaluation"):
        scores.written_since(before, place)
    new = old.with_name("results_2026-01-02T00-00-00.json")
    new.write_text("{}")
    os.utime(new, (1, 1))
    assert scores.written_since(before, place) == new
    old.write_text("{ }")
    assert scores.written_since(before, place) == old
    with pytest.raises(UnreadableScores, match="wrote no"):
        scores.written_since(before, MetricsPlace.of("gone.json", folder, {}))


class Evaluated(Chained):
    """A pipeline of two stages, the second of which is evaluated by a fake."""

    def evaluated(self, *steps: str, **more: Any) -> Path:
        self.usual()
        command = [sys.executable, FAKE, "{model}", "{folder}", *steps]
        given = {"command": command, "metrics": "m.json", **more}
        whole = {key: value for key, value in given.items() if value is not None}
        return self.pipeline("first.yaml", {"config": "second.yaml", "eval": whole}, gpus=0)

    def evaluations(self) -> list[dict[str, Any]]:
        """What each evaluation since this was asked last was told."""
        path = self.root / "evaluated"
        told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return told

    def second_run(self) -> rundir.RunFolder:
        (folder,) = self.runs.glob("*-sft-second")
        return rundir.RunFolder(folder)


@pytest.fixture(name="bench")
def _bench(world: Chained) -> Iterator[Evaluated]:
    world.__class__ = Evaluated
    assert isinstance(world, Evaluated)
    yield world


def place_of(told: dict[str, Any], code: str) -> tuple[str, int]:
    (finding,) = (f for f in told["findings"] if f["code"] == code)
    return Path(finding["file"]).name, finding["line"]


def line_of(path: Path, text: str) -> int:
    return next(n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line)


@pytest.mark.slow
@needs_trl
def test_an_evaluation_runs_once_and_its_numbers_stand_in_verdict_and_report(
    bench: Evaluated, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.dumps(LM_EVAL)
    steps = (f"write=o/results_1.json:{content}",)
    more: dict[str, Any] = {
        "metrics": "**/results_*.json",
        "expect": {"gsm8k": ">= 0.4", "mmlu": "> 0.6"},
    }
    bench.evaluated(*steps, **more)
    code, told = bench.run()
    assert (code, statuses(told)) == (0, ["passed", "passed"]), told
    row = told["data"]["stages"][1]
    assert "eval" not in told["data"]["stages"][0]
    assert row["eval"]["state"] == "measured"
    assert [gate["ok"] for gate in row["eval"]["gates"]] == [True, True]
    whole = (Path(told["data"]["pipeline"]) / "report.html").read_text()
    assert 'data-label="eval">gsm8k 0.41 (&gt;= 0.4); mmlu 0.62' in whole
    assert row["eval"]["metrics"]["gsm8k/exact_match,strict-match"] == 0.41
    (asked,) = bench.evaluations()
    run = bench.second_run()
    assert asked["model"] == str(bench.root / "o" / "second")
    assert asked["folder"] == str(run.path / "eval")
    # no GPU is visible to it on the CPU
    assert asked["cuda"] == ""
    assert (run.path / "eval" / "console.log").exists()

    # in the verdict and on the page of the run
    assert main.main(["check", str(run.path), "--format", "json"]) == 0
    points = {
        point["name"]: point for point in json.loads(capsys.readouterr().out)["data"]["points"]
    }
    assert points["evaluation"]["state"] == "passed"
    assert points["evaluation"]["detail"]["gates"][0]["value"] == 0.41
    assert main.main(["check", str(run.path)]) == 0
    assert "measured: gsm8k 0.41, mmlu 0.62" in capsys.readouterr().out
    page = run.report.read_text()
    assert '<h2 id="evaluation">' in page and "gsm8k/exact_match,flexible-extract" in page
    assert "&gt;= 0.4" in page

    # the same again: nothing is trained, nothing evaluated
    code, told = bench.run()
    assert (code, statuses(told), bench.evaluations()) == (0, ["skipped", "skipped"], [])
    assert told["data"]["stages"][1]["eval"]["state"] == "measured"

    # with other gates the same numbers are judged, with another command it runs again
    path = bench.evaluated(*steps, **{**more, "expect": {"gsm8k": ">= 0.5"}})
    code, told = bench.run()
    assert (code, bench.evaluations()) == (1, [])
    assert place_of(told, "eval-gate") == ("p.yaml", line_of(path, "gsm8k: "))
    assert "0.41, expected >= 0.5" in codes(told)["eval-gate"]
    # the row is that of the stage: its name is not said again
    assert told["data"]["stages"][1]["reason"].startswith("gsm8k")
    assert main.main(["check", str(run.path)]) == 1
    assert "0.41, expected >= 0.5" in capsys.readouterr().out
    bench.evaluated(*steps, "sleep=0", **more)
    code, told = bench.run()
    assert (code, len(bench.evaluations()), statuses(told)) == (0, 1, ["skipped", "skipped"])
    assert bench.quiet()


@pytest.mark.slow
@needs_trl
@pytest.mark.parametrize(
    ("steps", "more", "code", "finding", "key", "message"),
    [
        (["write=m.json:{\"a\": 1}"], {"expect": {"b": ">= 1"}}, 1, "eval-gate", "b: ", "has no metric `b`"),
        (["write=m.json:{\"b\": \"1\", \"c\": 1}"], {"expect": {"b": ">= 1"}}, 1, "eval-gate", "b: ", "not a number"),
        (["write=m.json:{"], {}, 1, "eval-metrics", "metrics: ", "is not JSON"),
        ([], {}, 1, "eval-metrics", "metrics: ", "wrote no"),
        (["exit=3"], {}, 4, "eval-failed", "command:", "exit code 3"),
        (["sleep=60"], {"timeout": "1s"}, 4, "eval-failed", "timeout: ", "its time was up after 1 s"),
    ],
)  # fmt: skip
def test_an_evaluation_that_fails_stops_the_pipeline_at_its_line(
    bench: Evaluated,
    steps: list[str],
    more: dict[str, Any],
    code: int,
    finding: str,
    key: str,
    message: str,
) -> None:
    path = bench.evaluated(*steps, **more)
    found, told = bench.run()
    assert (found, statuses(told)) == (code, ["passed", "failed"]), told
    assert place_of(told, finding) == ("p.yaml", line_of(path, f"  {key}"))
    assert message in codes(told)[finding]
    assert told["data"]["state"] == "stopped" and told["data"]["stages"][1]["reason"]
    assert bench.quiet()
    # once that is mended, the model is evaluated and not trained again
    bench.evaluated('write=m.json:{"b": 1}', expect={"b": ">= 1"})
    bench.trained()
    found, told = bench.run()
    assert (found, bench.trained()) == (0, []), told


@pytest.mark.slow
@needs_trl
def test_ctrl_c_ends_an_evaluation_and_the_same_command_evaluates_again(bench: Evaluated) -> None:
    go = bench.root / "go"
    bench.evaluated("pid=evaluation", f"wait={go}", 'write=m.json:{"b": 1}')
    running = bench.started(*bench.words("--format", "json"), start_new_session=True)
    pid = bench.pid("evaluation")
    os.kill(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=PATIENCE_S)
    told = json.loads(out)
    assert running.returncode == 130, err
    assert (told["data"]["state"], statuses(told)) == ("interrupted", ["passed", "interrupted"])
    assert told["data"]["stages"][1]["eval"]["state"] == "interrupted"
    assert not Path(f"/proc/{pid}").exists() and bench.quiet()
    bench.evaluations()
    bench.trained()
    go.touch()
    code, told = bench.run()
    assert (code, bench.trained(), len(bench.evaluations())) == (0, [], 1), told
    assert (bench.second_run().path / "eval" / "console.2.log").exists()


@pytest.mark.slow
@needs_trl
def test_what_a_killed_pipeline_left_evaluating_is_ended_by_the_next(bench: Evaluated) -> None:
    go = bench.root / "go"
    bench.evaluated("pid=evaluation", f"wait={go}", 'write=m.json:{"b": 1}')
    running = bench.started(*bench.words(), start_new_session=True)
    pid = bench.pid("evaluation")
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    assert Path(f"/proc/{pid}").exists()
    go_again = bench.root / "pids" / "evaluation"
    go_again.unlink()
    second = bench.started(*bench.words(), start_new_session=True)
    bench.pid("evaluation")
    until(lambda: not Path(f"/proc/{pid}").exists())
    go.touch()
    _, err = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, err
    assert len(bench.evaluations()) == 2 and bench.quiet()


@pytest.mark.slow
@needs_trl
def test_launch_stop_ends_the_evaluation_of_a_run(bench: Evaluated) -> None:
    bench.evaluated("pid=evaluation", "sleep=600")
    running = bench.started(*bench.words("--format", "json"), start_new_session=True)
    bench.pid("evaluation")
    run = bench.second_run()
    refused = bench.launch("rm", str(run.path), "--yes")
    assert "is being evaluated" in refused.stderr, refused
    stopped = bench.launch("stop", str(run.path))
    assert stopped.returncode == 0, stopped.stderr
    out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert json.loads(out)["data"]["stages"][1]["eval"]["state"] == "interrupted"
    assert bench.quiet()


@pytest.mark.slow
@needs_trl
def test_a_dry_run_and_validate_config_show_it(
    bench: Evaluated, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bench.evaluated(expect={"b": ">= 1"}, timeout="90m")
    bench.stage("second", output_dir="o/a $(touch pwned) b")
    done = bench.launch(*bench.words("--dry-run"))
    assert done.returncode == 0, done.stderr
    assert "# evaluation of second, at most 1.5 h, expects b >= 1" in done.stdout
    assert f"'{bench.root}/o/a $(touch pwned) b'" in done.stdout
    _, told = bench.run("--dry-run")
    planned = told["data"]["stages"][1]["eval"]
    assert planned["argv"][2] == str(bench.root / "o" / "a $(touch pwned) b")
    assert (planned["expect"], planned["timeout_s"]) == ({"b": ">= 1"}, 5400)
    assert "eval" not in told["data"]["stages"][0]
    assert main.main(["validate-config", str(path)]) == 0
    assert "(a pipeline: first, second; evaluated: second)" in capsys.readouterr().out
    assert bench.evaluations() == [] and not (bench.root / "pwned").exists()


@pytest.mark.slow
@needs_trl
def test_the_current_folder_gives_it_no_program_and_no_code(bench: Evaluated) -> None:
    program = bench.root / "tools" / "measure"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\ntouch $FAKE_WORLD/pwned\n")
    program.chmod(0o755)
    (bench.root / "planted.py").write_text(f"open({str(bench.root / 'pwned')!r}, 'w').close()\n")
    bench.environ["PATH"] = f":tools:{bench.environ['PATH']}"
    bench.evaluated(command=["measure", "{model}"])
    assert bench.run()[0] == 5
    bench.evaluated(command=["{python}", "-c", "import planted"], metrics=None)
    code, told = bench.run()
    assert (code, told["data"]["stages"][1]["eval"]["state"]) == (4, "crashed")
    assert not (bench.root / "pwned").exists()


@pytest.mark.slow
@needs_trl
def test_a_program_that_is_not_there_is_missing_before_the_first_stage(bench: Evaluated) -> None:
    path = bench.evaluated(command=["no-such-program", "{model}"])
    code, told = bench.run()
    assert (code, bench.trained()) == (5, [])
    assert place_of(told, "no-eval-program") == ("p.yaml", line_of(path, "command:"))
    # a plan is for any machine
    assert bench.run("--dry-run")[0] == 0
