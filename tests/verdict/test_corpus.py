"""Real logs with what truly happened: no verdict may contradict it, whatever carried the log here."""

import itertools
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY

from launcher.errors import InvalidConfig
from launcher.verdict.check import Point, Verdict, judge_log

CORPUS = REPOSITORY / "tests" / "corpus"
TRUTH: Mapping[str, Any] = yaml.safe_load((CORPUS / "truth.yaml").read_text(encoding="utf-8"))
LOGS: Mapping[str, Mapping[str, Any]] = TRUTH["logs"]

# A claim, and of what it may be made. `unknown` and its like claim nothing.
HOLDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "liger": {
        "engaged": ("engaged",),
        "applied": ("engaged", "applied"),
        "attempted": ("engaged", "applied", "attempted", "not_engaged"),
        "not_engaged": ("not_engaged",),
        "off": ("off",),
    },
    "packing": {"on": ("on", "isolated", "leaking"), "off": ("off",)},
    "loss": {"finite": ("finite",), "nonfinite": ("nonfinite",)},
    "memory": {"ok": ("ok",), "oom": ("oom",)},
    "trend": {"falling": ("falling",), "rising": ("rising",), "flat": ("flat",)},
}
SILENT = ("unknown", "none_logged", "too_short")


def said(point: Point) -> str | None:
    """What the verdict claims of a point; None where it says that it does not know."""
    if point.state in SILENT or (point.state in ("running", "finite") and point.ok is None):
        return None
    return point.state


def contradictions(verdict: Verdict, truth: Mapping[str, Any]) -> list[str]:
    """Where a verdict says what is not so."""
    problems = []
    if verdict.status == "pass" and not truth["good"]:
        problems.append("false pass")
    if verdict.status == "fail" and truth["good"]:
        problems.append("false fail")
    if verdict.stage not in (None, truth["stage"]):
        problems.append(f"stage {verdict.stage}")
    for point in verdict.points:
        claim, true = said(point), truth.get(point.name)
        if claim is None or true is None:
            continue
        if true not in HOLDS.get(point.name, {}).get(claim, (claim,)):
            problems.append(f"{point.name} is {true}, not {claim}")
    low, high = steps_of(truth)
    if verdict.steps is not None and not low <= verdict.steps <= high:
        problems.append(f"steps {verdict.steps}, not {low} to {high}")
    return problems + misnamed(verdict, truth)


def misnamed(verdict: Verdict, truth: Mapping[str, Any]) -> list[str]:
    """Where it gives a wrong reason for the end."""
    detail, problems = verdict.point("finish").detail, []
    error = detail.get("error") or {}
    assert isinstance(error, Mapping)
    for what, claim in (
        ("reason", detail.get("reason")),
        ("signal", detail.get("signal")),
        ("error", error.get("type")),
    ):
        if claim is not None and claim != truth.get(what):
            problems.append(f"{what} is {truth.get(what)}, not {claim}")
    if error and truth.get("says", "") not in error.get("message", ""):
        problems.append(f"the message is not {error.get('message')}")
    return problems


def steps_of(truth: Mapping[str, Any]) -> tuple[int, int]:
    """The optimizer steps that the log can show: a range where the end is not in it."""
    steps = truth["steps"]
    return (steps[0], steps[1]) if isinstance(steps, list) else (steps, steps)


@cache
def judged(name: str) -> Verdict:
    return judge_log(CORPUS / f"{name}.log")


def test_every_log_has_its_truth() -> None:
    assert {path.stem for path in CORPUS.glob("*.log")} == set(LOGS)
    assert len(LOGS) >= 30
    assert {truth["stage"] for truth in LOGS.values()} == {"sft", "dpo", None}


def test_no_verdict_contradicts_what_happened() -> None:
    """Not to claim anything would be easy: steps, the end and its reason are in the log or are not."""
    wrong = {}
    for name, truth in LOGS.items():
        verdict, known = judged(name), {} if truth.get("unseen") else truth
        finish, (low, high) = verdict.point("finish"), steps_of(truth)
        error: Any = finish.detail.get("error") or {}
        ending = (finish.state, *map(finish.detail.get, ("reason", "signal")), error.get("type"))
        expected = (known.get("finish", "running"), *map(known.get, ("reason", "signal", "error")))
        steps = high == 0 or low <= (verdict.steps or 0) <= high
        if (problems := contradictions(verdict, truth)) or ending != expected or not steps:
            wrong[name] = (problems, ending, expected, verdict.steps)
    assert wrong == {}


def test_the_unproven_are_known() -> None:
    """So that a change of what a log can prove is seen."""
    unproven: dict[str, list[str]] = {}
    for name in LOGS:
        verdict = judged(name)
        if verdict.status == "unproven":
            unproven[name] = [point.name for point in verdict.points if point.ok is None]
    assert unproven == TRUTH["unproven"]


@pytest.mark.parametrize("path", sorted((CORPUS / "others").iterdir()), ids=lambda path: path.stem)
def test_a_log_of_another_program_proves_nothing(path: Path) -> None:
    """Whatever failed there, and was caught: no training did. One that ends so cannot be told apart."""
    if path.stem == "pip":
        with pytest.raises(InvalidConfig, match="not a training log"):
            judge_log(path)
        return
    verdict = judge_log(path)
    assert (verdict.status, verdict.stage, verdict.steps) == ("unproven", None, None)
    assert [said(point) for point in verdict.points if point.name != "memory"] == [None] * 8


def test_no_log_names_the_machine_it_comes_from() -> None:
    for path in sorted(CORPUS.rglob("*.log")):
        content = path.read_bytes()
        assert not re.search(rb"/(?:root|tmp|home)/(?!user/)", content), path.name
        assert len(content) < 150_000, path.name


def each_line(prefix: Callable[[int], str]) -> Callable[[bytes], bytes]:
    """Put something before every line, as what collects logs of many containers does."""

    def put(content: bytes) -> bytes:
        lines = content.split(b"\n")
        last = lines.pop()
        prefixed = [prefix(n).encode() + line + b"\n" for n, line in enumerate(lines)]
        return b"".join([*prefixed, prefix(len(lines)).encode() + last if last else b""])

    return put


def clock(n: int) -> str:
    return f"2026-11-20T{n // 3600 % 24:02}:{n // 60 % 60:02}:{n % 60:02}.123456789Z "


CARRIERS: Mapping[str, Callable[[bytes], bytes]] = {
    "docker compose logs": each_line(lambda _: "trainer-1  | "),
    "docker logs --timestamps": each_line(clock),
    "srun --label": each_line(lambda _: "0: "),
    "sky logs": each_line(lambda _: "(sft, pid=4711) "),
    "torchrun --tee": each_line(lambda _: "[default0]:"),
    "ts with brackets": each_line(lambda _: "[2026-11-20 15:41:37] "),
    "a Windows editor": lambda content: content.replace(b"\n", b"\r\n"),
    "an editor without \\r": lambda content: content.replace(b"\r\n", b"\n").replace(b"\r", b"\n"),
    "wandb": lambda content: re.sub(rb"[^\r\n]*\r(?!\n)", b"", content),
    "a colouring terminal": lambda content: content.replace(b"\n", b"\x1b[0m\n\x1b[36m"),
    "nobody's probe": lambda content: re.sub(rb"\nlaunch: warning: [^\n]*\n", b"", content),
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_carries_a_log_makes_no_verdict_wrong(carrier: str, tmp_path: Path) -> None:
    """A third of the logs each: every log meets three or four carriers, every carrier fifty logs."""
    wrong, first = {}, list(CARRIERS).index(carrier)
    for name, truth in list(LOGS.items())[first % 3 :: 3]:
        path = tmp_path / f"{name}.log"
        path.write_bytes(CARRIERS[carrier]((CORPUS / f"{name}.log").read_bytes()))
        verdict = judged_or_refused(path)
        if verdict is not None and (problems := contradictions(verdict, truth)):
            wrong[name] = problems
    assert wrong == {}


def judged_or_refused(path: Path) -> Verdict | None:
    """None where the text holds nothing of a training: a refusal claims nothing."""
    try:
        return judge_log(path)
    except InvalidConfig:
        return None


@pytest.mark.parametrize("part", range(8))
def test_a_part_of_a_log_is_not_taken_for_the_whole(part: int, tmp_path: Path) -> None:
    """While a run goes on, its log is the beginning of what it will be; `tail` shows the end of it."""
    for name in list(LOGS)[part::8]:
        check_parts(name, tmp_path / "console.log")


def check_parts(name: str, path: Path) -> None:
    content, truth = (CORPUS / f"{name}.log").read_bytes(), LOGS[name]
    good = judged(name).status
    for share in (2, 5, 8, 10):
        path.write_bytes(content[: len(content) * share // 12])
        if (verdict := judged_or_refused(path)) is None:
            continue
        assert verdict.status != "pass" or good == "pass" or truth.get("attempts")
        # cut off within a sample of training data that is a crash, or behind an attempt that failed, a
        # log does end like a crash
        if truth["good"] and not (truth.get("crash_as_data") or truth.get("earlier_fails")):
            assert verdict.status != "fail", (name, share, verdict.points)
    for share in (2, 8):
        # what was asked for, or the miss of a cache, stood before it
        end = content[-len(content) // share :]
        path.write_bytes(end[end.index(b"\n") + 1 :])
        if (verdict := judged_or_refused(path)) is None:
            continue
        status, case = verdict.status, (name, share, verdict)
        assert status != ("fail" if truth["good"] else "pass"), case
        # nor does it prove more than the whole; of TRL's a cut before the first bar cannot be seen
        assert status != "pass" or b"\r  0%|          | 0/" in end or good == "pass", case
        assert verdict.stage in (None, truth["stage"]), case
        assert verdict.point("dataset_cache").state in ("unknown", truth.get("dataset_cache")), case


def test_logs_one_after_the_other_are_the_last_run(tmp_path: Path) -> None:
    """A file that is appended to: what an earlier run did is no claim about the last one."""
    ends = ("sft_miss", "sft_nan", "sft_missing_column", "dpo_hit", "sft_hit", "dpo_nan")
    trl = ("trl_sft", "trl_dpo", "trl_sft_nan", "trl_sft_crash", "trl_sft_lora")
    pairs = [*itertools.permutations(ends, 2), *itertools.permutations(trl, 2)]
    # of TRL nothing shows that another run has begun before its first loss
    pairs = [(first, second) for first, second in pairs if second != "trl_sft_crash"]
    wrong = {}
    for first, second in pairs:
        path = tmp_path / "console.log"
        path.write_bytes(
            b"".join((CORPUS / f"{name}.log").read_bytes() for name in (first, second))
        )
        if problems := contradictions(judge_log(path), LOGS[second]):
            wrong[first, second] = problems
    assert wrong == {}
