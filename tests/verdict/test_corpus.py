"""Real logs with what truly happened: no verdict may contradict it, whatever carried the log."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY

from launcher.errors import InvalidConfig
from launcher.verdict.check import Point, Verdict, judge_log

CORPUS = REPOSITORY / "tests" / "corpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What truly happened in a log: truth.yaml says what each of these is."""

    made: str
    hardware: str
    good: bool
    stage: str | None
    memory: str
    steps: int | list[int]
    finish: str = "running"
    loss: str | None = None
    liger: str | None = None
    packing: str | None = None
    attention: str | None = None
    dataset_cache: str | None = None
    reference_cache: str | None = None
    trend: str | None = None
    error: str | None = None
    says: str = ""
    reason: str | None = None
    signal: str | None = None
    unseen: bool = False
    attempts: int | None = None
    earlier_fails: bool = False
    crash_as_data: bool = False

    @property
    def possible_steps(self) -> range:
        """The optimizer steps that the log can show: several where the end is not in it."""
        if isinstance(self.steps, int):
            return range(self.steps, self.steps + 1)
        first, last = self.steps
        return range(first, last + 1)


TRUTH: Mapping[str, Any] = yaml.safe_load((CORPUS / "truth.yaml").read_text(encoding="utf-8"))
LOGS = {name: Truth(**truth) for name, truth in TRUTH["logs"].items()}

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


def claim_of(point: Point) -> str | None:
    """The state that the verdict claims; None where it does not know."""
    unproved = point.state in ("running", "finite") and point.ok is None
    if unproved or point.state in SILENT:
        return None
    return point.state


def contradictions(verdict: Verdict, truth: Truth) -> list[str]:
    """What the verdict claims and is not so."""
    problems = []
    if verdict.status == "pass" and not truth.good:
        problems.append("false pass")
    if verdict.status == "fail" and truth.good:
        problems.append("false fail")
    if verdict.stage not in (None, truth.stage):
        problems.append(f"stage {verdict.stage}")
    if verdict.steps is not None and verdict.steps not in truth.possible_steps:
        problems.append(f"steps {verdict.steps}, not {truth.steps}")
    for point in verdict.points:
        claim = claim_of(point)
        true = getattr(truth, point.name, None)
        if claim is None or true is None:
            continue
        if true not in HOLDS.get(point.name, {}).get(claim, (claim,)):
            problems.append(f"{point.name} is {true}, not {claim}")
    return problems + misnamed(verdict, truth)


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended, by its verdict or in truth."""

    state: str
    reason: Any
    signal: Any
    error: Any


def claimed_end(verdict: Verdict) -> End:
    finish = verdict.point("finish")
    detail = finish.detail
    return End(finish.state, detail.get("reason"), detail.get("signal"), error_of(verdict)["type"])


def true_end(truth: Truth) -> End:
    """What a log shows of it: one that does not show its end is that of a run that goes on."""
    if truth.unseen:
        return End("running", None, None, None)
    return End(truth.finish, truth.reason, truth.signal, truth.error)


def error_of(verdict: Verdict) -> Mapping[str, Any]:
    error = verdict.point("finish").detail.get("error")
    return error if isinstance(error, Mapping) else {"type": None, "message": ""}


def misnamed(verdict: Verdict, truth: Truth) -> list[str]:
    """Wrong reasons for the end."""
    problems = []
    end = claimed_end(verdict)
    for name in ("reason", "signal", "error"):
        claim = getattr(end, name)
        true = getattr(truth, name)
        if claim is not None and claim != true:
            problems.append(f"{name} is {true}, not {claim}")
    message = error_of(verdict)["message"]
    if end.error and truth.says not in message:
        problems.append(f"the message is not {message}")
    return problems


def content_of(name: str) -> bytes:
    return (CORPUS / f"{name}.log").read_bytes()


@cache
def judged(name: str) -> Verdict:
    return judge_log(CORPUS / f"{name}.log")


def test_every_log_has_its_truth() -> None:
    assert {path.stem for path in CORPUS.glob("*.log")} == set(LOGS)
    assert len(LOGS) >= 30
    assert {truth.stage for truth in LOGS.values()} == {"sft", "dpo", None}


@pytest.mark.parametrize("name", LOGS)
def test_no_verdict_contradicts_what_happened(name: str) -> None:
    """Not to claim anything would be easy: steps, the end and its reason are in the log."""
    verdict = judged(name)
    truth = LOGS[name]
    assert contradictions(verdict, truth) == []
    assert claimed_end(verdict) == true_end(truth)
    steps = truth.possible_steps
    assert steps[-1] == 0 or (verdict.steps or 0) in steps


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
    """Whatever failed there and was caught: no training did."""
    if path.stem == "pip":
        with pytest.raises(InvalidConfig, match="not a training log"):
            judge_log(path)
        return
    verdict = judge_log(path)
    assert verdict.status == "unproven"
    assert verdict.stage is None and verdict.steps is None
    for point in verdict.points:
        assert point.name == "memory" or claim_of(point) is None


def test_no_log_names_the_machine_it_comes_from() -> None:
    for path in sorted(CORPUS.rglob("*.log")):
        content = path.read_bytes()
        assert not re.search(rb"/(?:root|tmp|home)/(?!user/)", content), path.name
        assert len(content) < 150_000, path.name


def each_line(prefix: Callable[[int], str]) -> Callable[[bytes], bytes]:
    """Put something before every line, as what collects logs of many containers does."""

    def put(content: bytes) -> bytes:
        lines = content.split(b"\n")
        if not lines[-1]:
            lines.pop()
        prefixed = [prefix(number).encode() + line for number, line in enumerate(lines)]
        end = b"\n" if content.endswith(b"\n") else b""
        return b"\n".join(prefixed) + end

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
    """A third of the logs each: every log meets three or four carriers."""
    third = list(CARRIERS).index(carrier) % 3
    carry = CARRIERS[carrier]
    path = tmp_path / "console.log"
    for name in list(LOGS)[third::3]:
        path.write_bytes(carry(content_of(name)))
        verdict = judged_or_refused(path)
        assert verdict is None or contradictions(verdict, LOGS[name]) == [], name


def judged_or_refused(path: Path) -> Verdict | None:
    """None where the text holds nothing of a training: a refusal claims nothing."""
    try:
        return judge_log(path)
    except InvalidConfig:
        return None


@pytest.mark.parametrize("part", range(8))
def test_the_beginning_of_a_log_is_not_taken_for_the_whole(part: int, tmp_path: Path) -> None:
    """While a run goes on, its log is the beginning of what it will be."""
    path = tmp_path / "console.log"
    for name in list(LOGS)[part::8]:
        truth = LOGS[name]
        content = content_of(name)
        may_pass = judged(name).status == "pass" or truth.attempts
        # cut off within a sample of training data that is a crash, or behind an attempt that
        # failed, a log does end like a crash
        may_fail = truth.crash_as_data or truth.earlier_fails or not truth.good
        for share in (2, 5, 8, 10):
            length = len(content) * share // 12
            path.write_bytes(content[:length])
            verdict = judged_or_refused(path)
            if verdict is not None:
                assert may_pass or verdict.status != "pass", (name, share)
                assert may_fail or verdict.status != "fail", (name, share)


@pytest.mark.parametrize("part", range(8))
def test_the_end_of_a_log_proves_no_more_than_the_whole(part: int, tmp_path: Path) -> None:
    """`tail` shows it; the arguments, or the miss of a cache, stood before it."""
    path = tmp_path / "console.log"
    for name in list(LOGS)[part::8]:
        truth = LOGS[name]
        content = content_of(name)
        for share in (2, 8):
            _, _, end = content[-len(content) // share :].partition(b"\n")
            path.write_bytes(end)
            verdict = judged_or_refused(path)
            if verdict is None:
                continue
            case = (name, share, verdict)
            false_status = "fail" if truth.good else "pass"
            assert verdict.status != false_status, case
            # of TRL's a cut before the first bar cannot be seen
            shows_start = b"\r  0%|          | 0/" in end
            may_pass = shows_start or judged(name).status == "pass"
            assert may_pass or verdict.status != "pass", case
            assert verdict.stage in (None, truth.stage), case
            cache = verdict.point("dataset_cache").state
            assert cache in ("unknown", truth.dataset_cache), case


OPEN_INSTRUCT_LOGS = (
    "sft_miss", "sft_nan", "sft_missing_column", "dpo_hit", "sft_hit", "dpo_nan",
)  # fmt: skip
# nothing of a crash before its first loss shows that another run of TRL has begun
TRL_LOGS = ("trl_sft", "trl_dpo", "trl_sft_nan", "trl_sft_lora")


@pytest.mark.parametrize("second", [*OPEN_INSTRUCT_LOGS, *TRL_LOGS])
def test_logs_one_after_the_other_are_the_last_run(second: str, tmp_path: Path) -> None:
    """A file that is appended to: what an earlier run did is no claim about the last one."""
    earlier = OPEN_INSTRUCT_LOGS if second in OPEN_INSTRUCT_LOGS else (*TRL_LOGS, "trl_sft_crash")
    path = tmp_path / "console.log"
    for first in earlier:
        if first == second:
            continue
        path.write_bytes(content_of(first) + content_of(second))
        assert contradictions(judge_log(path), LOGS[second]) == [], first
