"""`eval:` of a stage: what a file may say, and how metrics are read and held against gates."""

import json
import os
from pathlib import Path

import pytest
from conftest import Write

from launcher.config import evaluation, pipeline
from launcher.config.evaluation import Gate
from launcher.config.pipeline import Chain
from launcher.errors import Finding, InvalidConfig
from launcher.workflows.pipeline import scores
from launcher.workflows.pipeline.scores import MetricsPlace, UnreadableScores


def load(write: Write, text: str) -> Chain:
    """Load a pipeline of one stage with this evaluation; its text begins in line 3."""
    write("sft.yaml", "stage: sft\n")
    return pipeline.load(write("p.yaml", f"stages:\n  - config: sft.yaml\n    {text}\n"))


def faults(write: Write, text: str) -> list[Finding]:
    with pytest.raises(InvalidConfig) as caught:
        load(write, text)
    return list(caught.value.findings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eval: lm_eval", "`eval` is a mapping, not `lm_eval`"),
        ("eval: {}", "`command` is the list of the words"),
        ("eval: {command: lm_eval --tasks gsm8k}", "no shell reads it"),
        ("eval: {command: ['']}", "names a program, and is empty"),
        ("eval: {command: [a, {b: 1}]}", "a word of `command` is a text"),
        ("eval: {command: [a], comand: [b]}", "`comand` is not a key of an evaluation"),
        ("eval: {command: [a, '{modle}']}", "`{modle}` is not a placeholder"),
        ("eval: {command: [a], metrics: [m]}", "`metrics` is the path of a JSON file"),
        ("eval: {command: [a], metrics: '{out}/m'}", "`{out}` is not a placeholder"),
        ("eval: {command: [a], expect: {x: '>= 1'}}", "`expect` needs `metrics`"),
        ("eval: {command: [a], metrics: m, expect: [x]}", "`expect` is a mapping of metrics"),
        ("eval: {command: [a], metrics: m, expect: {x: 0.4}}", "not a sign and a number"),
        ("eval: {command: [a], metrics: m, expect: {x: '=> 0.4'}}", "not a sign and a number"),
        ("eval: {command: [a], metrics: m, expect: {x: '> 1e999'}}", "is too large"),
        ("eval: {command: [a], timeout: soon}", "is not a duration"),
        ("eval: {command: [a], timeout: [1]}", "`timeout` is a duration"),
    ],
)
def test_a_fault_is_refused(text: str, message: str, write: Write) -> None:
    findings = faults(write, text)

    assert {(finding.code, finding.line) for finding in findings} == {("bad-pipeline", 3)}
    assert any(message in finding.message for finding in findings)


FAULTS = """\
eval:
      command:
        - a
        - '{modle}'
      metrics: 7
      timeout: x
      expect: {y: 1}
      z: 1"""


def test_all_faults_are_said_at_once_at_their_lines(write: Write) -> None:
    lines = [finding.line or 0 for finding in faults(write, FAULTS)]

    assert sorted(lines) == [6, 7, 8, 9, 10]


def test_a_secret_is_kept_off_the_command_line(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB_PASS", "hunter2-and-more")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    command = "[a, '--out', '${oc.env:SCRATCH}', '--key=${oc.env:DB_PASS}']"

    (finding,) = faults(write, f"eval: {{command: {command}}}")

    assert finding.code == "exposed-secret"
    assert finding.line == 3
    assert "hunter2" not in finding.message
    assert "--key=${oc.env:DB_PASS}" in finding.message


def test_what_an_evaluation_says(write: Write) -> None:
    text = 'command: [a, 1, "{model}"], metrics: m, expect: {"x/y,z": "<= -1e-3"}, timeout: 1h30m'

    (link,) = load(write, f"eval: {{{text}}}").links

    assert link.evaluation is not None
    assert link.evaluation.command == ("a", "1", "{model}")
    assert link.evaluation.expect == {"x/y,z": Gate("<=", -0.001)}
    assert link.evaluation.timeout_s == 5400


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("pretrained={model},dtype=auto", "pretrained=/a b/{gpus},dtype=auto"),
        ("{gpus}", "2"),
        ("{{model}}", "{model}"),
        ('{"a": 1}', '{"a": 1}'),
        ("{}", "{}"),
        ("{model}{gpus}", "/a b/{gpus}2"),
    ],
)
def test_a_placeholder_is_replaced_once_inside_its_word(word: str, filled: str) -> None:
    assert evaluation.fill(word, {"model": "/a b/{gpus}", "gpus": "2"}) == filled


# As lm-evaluation-harness writes it.
LM_EVAL = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "sample_len": 1319,
            "exact_match,strict-match": 0.41,
            "exact_match_stderr,strict-match": 0.013,
            "exact_match,flexible-extract": 0.44,
        },
        "mmlu": {"alias": "mmlu", "acc,none": 0.62, "acc_stderr,none": 0.004},
        "broken": {"alias": "broken", "acc,none": "N/A"},
    },
    "groups": {"mmlu": {"alias": "mmlu", "acc,none": 0.62, "acc_stderr,none": 0.004}},
    "config": {"model": "hf", "batch_size": 8},
}
NESTED = {"a": {"b": 1}}


def judge(tmp_path: Path, content: object, gate: str) -> tuple[bool, str]:
    """Whether a gate such as `gsm8k >= 0.4` holds, and why not."""
    path = tmp_path / "m.json"
    path.write_text(json.dumps(content))
    name, sign, bound = gate.split()
    (result,) = scores.judge_scores(scores.read_scores(path), {name: Gate(sign, float(bound))})
    return result.ok, result.reason or ""


@pytest.mark.parametrize(
    ("content", "gate"),
    [
        ({"gsm8k": 0.4}, "gsm8k >= 0.4"),
        (NESTED, "a/b == 1"),
        (NESTED, "a == 1"),
        # the first of several filters, as the task has them
        (LM_EVAL, "gsm8k <= 0.41"),
        (LM_EVAL, "gsm8k/exact_match <= 0.41"),
        (LM_EVAL, "gsm8k/exact_match,flexible-extract >= 0.44"),
        (LM_EVAL, "mmlu >= 0.62"),
        (LM_EVAL, "mmlu/acc_stderr <= 0.01"),
    ],
)
def test_a_name_stands_for_a_number(content: object, gate: str, tmp_path: Path) -> None:
    assert judge(tmp_path, content, gate) == (True, "")


@pytest.mark.parametrize(
    ("content", "gate", "reason"),
    [
        ({"gsm8k": 0.4}, "gsm8k > 0.4", "gsm8k is 0.4, expected > 0.4"),
        ({"loss": 2}, "lsos < 3", "did you mean `loss`?"),
        ({"a": "0.4", "b": 1}, "a > 0", 'is "0.4", not a number'),
        ({"a": True, "b": 1}, "a > 0", "is true, not a number"),
        ({"a": float("nan"), "b": 1}, "a > 0", "is NaN, not a number"),
        (LM_EVAL, "broken >= 0", 'is "N/A", not a number'),
        (LM_EVAL, "gsm8 >= 0", "did you mean `gsm8k`?"),
        (LM_EVAL, "batch_size >= 0", "has no metric `batch_size`"),
    ],
)
def test_a_gate_that_fails_says_why(
    content: object, gate: str, reason: str, tmp_path: Path
) -> None:
    ok, why = judge(tmp_path, content, gate)
    assert not ok
    assert reason in why


@pytest.mark.parametrize("text", ["", "[1]", "{", "{}", '{"a": "b"}', "[" * 100_000])
def test_a_file_without_numbers_is_unreadable(text: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)

    with pytest.raises(UnreadableScores):
        scores.read_scores(path)


def test_the_newest_file_of_this_evaluation_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "a [run]"
    (folder / "model").mkdir(parents=True)
    old = folder / "model" / "results_2026-01-01T00-00-00.json"
    old.write_text("{}")
    place = MetricsPlace.of("**/results_*.json", folder, {})
    before = scores.take_snapshot(place)
    with pytest.raises(UnreadableScores, match="of an earlier evaluation"):
        scores.find_written_since(before, place)

    new = old.with_name("results_2026-01-02T00-00-00.json")
    new.write_text("{}")
    os.utime(new, (1, 1))
    assert scores.find_written_since(before, place) == new

    old.write_text("{ }")
    assert scores.find_written_since(before, place) == old

    absent = MetricsPlace.of("gone.json", folder, {})
    with pytest.raises(UnreadableScores, match="wrote no"):
        scores.find_written_since(before, absent)
