"""The point `gradients`: what the optimizer uses against what autograd made, on real processes."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import made_runs
import pytest
from conftest import PATIENCE_S, REPOSITORY, SUPPORT
from gradient_case import FAULTY_STEP, Case

from launcher.cli.main import main
from launcher.probe.watching.gradients import ElementSample, compute_tolerance
from launcher.rules.deepspeed import fault
from launcher.runs.rundir import RunFolder
from launcher.verdict import judge as judgement
from launcher.verdict.check import Point, judge_evidence
from launcher.verdict.evidence import Evidence, read_log, read_run
from launcher.workflows.bench.comparison import (
    CurveStep,
    Sample,
    VariantSummary,
    compare,
    find_baseline_fault,
)

VIOLATION = 79

DDP = Case(engine="ddp", half=False)
FSDP2 = Case(engine="fsdp2")
ZERO1 = Case(engine="zero1")
ZERO2 = Case(engine="zero2")
ZERO3 = Case(engine="zero3")
TRUE = [
    Case(engine="one", world=1, half=False),
    replace(DDP, accumulation=2, clip=0.1, sparse=True),
    replace(FSDP2, accumulation=2, clip=0.1, sparse=True),
    replace(ZERO1, accumulation=4, clip=0.1),
    replace(ZERO1, accumulation=2, clip=0.1, summed="fp32"),
    replace(ZERO2, accumulation=3, clip=0.1, wire="fp32"),
    replace(ZERO2, accumulation=2, offload=True, tied=True, checkpointing="reentrant"),
    replace(ZERO3, accumulation=2, clip=0.1, offload=True),
    replace(ZERO3, accumulation=2, tied=True, checkpointing="plain", frozen=True, sparse=True),
]
CORRUPT = [
    replace(DDP, fault="bucket"),
    replace(FSDP2, fault="undivided"),
    replace(ZERO1, fault="undivided"),
    replace(ZERO2, fault="bucket", clip=0.1),
    replace(ZERO3, fault="undivided", clip=0.1),
    replace(DDP, fault="dropped", accumulation=2),
    replace(FSDP2, fault="dropped", accumulation=2, clip=0.1),
    replace(ZERO1, fault="dropped", accumulation=2),
    replace(ZERO2, fault="dropped", accumulation=2),
    replace(ZERO3, fault="dropped", accumulation=2),
]
UNWATCHED = replace(DDP, unwatched=(1,), patience=2)
CASES = [*TRUE, *CORRUPT, UNWATCHED]


@dataclass(frozen=True, slots=True)
class Training:
    """The evidence of a case, and the exit codes of its processes."""

    evidence: Evidence
    exits: list[int]

    def point(self, name: str, want: str) -> Point:
        return judge_evidence("sft", {name: want}, self.evidence).point(name)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Training]:
    """Every case, trained by one process after the other."""
    for package in ("deepspeed", "transformers", "accelerate"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("gradients")
    run_cases(folder, CASES)
    exits = json.loads((folder / "exits.json").read_text())
    trained = {}
    for number, case in enumerate(CASES):
        evidence = read_case(folder / str(number))
        trained[case] = Training(evidence, exits[number])
    return trained


def run_cases(folder: Path, cases: list[Case]) -> None:
    """Each leaves a folder with its number; the exit codes of all are in exits.json."""
    settings = [json.dumps(case.as_json()) for case in cases]
    path = os.pathsep.join((str(SUPPORT), str(REPOSITORY)))
    log = folder / "log"
    with log.open("w") as stream:
        subprocess.run(
            [sys.executable, str(SUPPORT / "gradient_ranks.py"), str(folder), *settings],
            env={**os.environ, "PYTHONPATH": path},
            stdout=stream,
            stderr=stream,
            cwd=folder,
            timeout=PATIENCE_S,
            check=False,
        )
    has_finished = (folder / "exits.json").exists()
    assert has_finished, log.read_text(errors="replace")[-2000:]


def read_case(folder: Path) -> Evidence:
    (folder / "probe").mkdir()
    for path in folder.glob("rank-*.jsonl"):
        path.rename(folder / "probe" / path.name)
    evidence = read_run(folder)
    if evidence.probe is None:
        logs = [path.read_text(errors="replace") for path in folder.glob("log-*")]
        raise AssertionError("".join(logs)[-2000:])
    return evidence


@pytest.mark.slow
@pytest.mark.parametrize("case", TRUE, ids=str)
def test_true_gradients_are_true(case: Case, trainings: dict[Case, Training]) -> None:
    training = trainings[case]
    assert set(training.exits) == {0}
    gradients = training.point("gradients", "true")
    assert (gradients.state, gradients.ok) == ("true", True), gradients
    assert gradients.detail["checks"] == (3 if case.sparse else 5)
    # the weights that this engine's optimizer steps, wherever it keeps them
    weights = training.point("weights", "moved")
    assert (weights.state, weights.ok) == ("moved", True), weights


@pytest.mark.slow
@pytest.mark.parametrize("case", TRUE, ids=str)
def test_true_gradients_are_far_from_the_tolerance(
    case: Case, trainings: dict[Case, Training]
) -> None:
    """Or it would hide what is small."""
    probe = trainings[case].evidence.probe
    assert probe is not None
    for record in probe.ranks.values():
        event = record.last("gradients")
        assert event is not None and not event.fields["skipped"]
        largest = event.number("largest_error")
        allowed = event.number("allowed")
        assert largest is not None and allowed is not None
        assert largest < 0.4 * allowed


@pytest.mark.slow
@pytest.mark.parametrize("case", CORRUPT, ids=str)
def test_corrupt_gradients_stop_the_run_in_the_step_that_is_wrong(
    case: Case, trainings: dict[Case, Training]
) -> None:
    training = trainings[case]
    assert VIOLATION in training.exits
    stopped = training.evidence.stopped
    assert stopped is not None and stopped.text("point") == "gradients"

    gradients = training.point("gradients", "true")
    assert (gradients.state, gradients.ok) == ("corrupt", False)
    assert gradients.detail["first_step"] == FAULTY_STEP
    # the parameter, with how large its gradient is and should be
    assert "model." in str(gradients.detail["parameter"])
    used = gradients.detail["used_norm"]
    true = gradients.detail["true_norm"]
    assert isinstance(used, float) and isinstance(true, float)
    if case.fault == "undivided":
        assert used == pytest.approx(2 * true, rel=0.02)
    if case.fault == "bucket":
        assert used > 10 * true


@pytest.mark.slow
def test_beside_a_process_without_a_probe_nothing_is_claimed(
    trainings: dict[Case, Training],
) -> None:
    training = trainings[UNWATCHED]
    assert set(training.exits) == {0}
    gradients = training.point("gradients", "true")
    assert (gradients.state, gradients.ok) == ("unknown", None)
    assert "every process" in str(gradients.detail["reason"])


SIZES = [1, 7, 64, 65, 4096, 100_003]


def test_samples_cover_small_parameters_whole_and_large_ones_from_end_to_end() -> None:
    sample = ElementSample(SIZES, 64)
    assert sample.counts == [1, 7, 64, 64, 64, 64]
    assert sample.strides[5] * 64 > 0.95 * 100_003


@pytest.mark.parametrize("row", range(len(SIZES)))
def test_every_part_of_a_parameter_has_its_own_samples(row: int) -> None:
    sample = ElementSample(SIZES, 64)
    size = SIZES[row]
    part = max(1, size // 5)
    for seed in range(20):
        sample.draw(seed)
        begin = sample.offsets[row]
        stride = sample.strides[row]
        places = range(begin, begin + sample.counts[row] * stride, stride)
        assert places[0] >= 0
        assert places[-1] < size
        for start in range(0, size, part):
            end = min(size, start + part)
            inside = [number for number, place in enumerate(places) if start <= place < end]
            first, after_last = sample.within(row, start, end)
            assert list(range(first, after_last)) == inside


@pytest.mark.parametrize(("world", "accumulated"), [(1, 1), (2, 4), (8, 1), (8, 16), (64, 2)])
def test_the_tolerance_lies_between_rounding_and_a_lost_micro_batch(
    world: int, accumulated: int
) -> None:
    """Of n independent micro-batches over all processes one is 1 / sqrt(n) of the sum."""
    bf16 = 2**-8
    allowed = compute_tolerance(bf16, world + accumulated + 2)
    assert bf16 < allowed < (world * accumulated) ** -0.5


def test_the_tolerance_has_a_least_value() -> None:
    assert compute_tolerance(2**-24, 100) == 1e-4


def overlapping(stage: int, wire: str = "") -> dict[str, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": stage, "overlap_comm": True}}
    if wire:
        config["communication_data_type"] = wire
    return config


@pytest.mark.parametrize(
    ("stage", "version", "wire", "accumulation", "severity", "code"),
    [
        (2, "0.18.9", "", 1, "error", "overlap-corrupts"),
        (1, "0.18.5", "", 1, "error", "overlap-corrupts"),
        (2, "0.17.4", "", 1, "error", "overlap-corrupts"),
        (2, "0.19.1", "", 1, "warning", "overlap-corrupts"),
        (2, None, "", 1, "warning", "overlap-corrupts"),
        (2, "0.19.8", "fp32", 1, "error", "overlap-corrupts"),
        (2, "0.18.2", "", 2, "error", "accumulation-lost"),
    ],
)
def test_releases_that_are_known_to_corrupt(
    stage: int, version: str | None, wire: str, accumulation: int, severity: str, code: str
) -> None:
    config = overlapping(stage, wire)
    finding = fault(config, version, precision="bf16", accumulation=accumulation)
    assert finding is not None
    assert (finding[0], finding[1]) == (severity, code)


@pytest.mark.parametrize(
    ("stage", "version", "wire", "accumulation"),
    [
        (2, "0.17.5", "", 4),
        (2, "0.18.4", "", 4),
        (2, "0.19.8", "", 4),
        (2, "0.19.8", "bf16", 1),
        (1, "0.19.8", "fp32", 1),
        (3, "0.18.9", "", 1),
        (2, "0.18.2", "", 1),
    ],
)
def test_releases_that_are_not_known_to_corrupt(
    stage: int, version: str, wire: str, accumulation: int
) -> None:
    config = overlapping(stage, wire)
    assert fault(config, version, precision="bf16", accumulation=accumulation) is None


def test_without_overlap_only_accumulation_is_lost() -> None:
    config = {"zero_optimization": {"stage": 2}, "communication_data_type": "fp32"}
    assert fault(config, "0.18.9") is None
    assert fault(config, "0.18.1", accumulation=2) is not None


@pytest.mark.parametrize("version", ["0.18.9", None])
def test_no_file_that_ships_overlaps_under_zero_1_or_2(version: str | None) -> None:
    for path in (REPOSITORY / "launcher" / "plan" / "deepspeed").glob("*.json"):
        assert fault(json.loads(path.read_text()), version) is None, path.name


FALLING = [2.0 - 0.1 * number for number in range(10)]
STEADY = [7.0, 7.2, 6.9, 7.1, 7.0, 6.8, 7.3, 7.1, 7.0, 6.9]
NOISE = [201, 133, 27243, 7755801, 18072, 5252, 9e3, 2e4, 3e3, 4e3]


def point_of_norms(folder: Path, losses: list[float], norms: list[float], want: str = "") -> Point:
    """The point of a log with these losses and gradient norms."""
    lines = []
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        step = {"loss": loss, "grad_norm": norm, "learning_rate": 1e-05, "epoch": number / 10}
        lines.append(f"{step}\n")
    path = folder / "train.log"
    path.write_text("".join(lines))
    expected = {"gradients": want} if want else {}
    verdict = judge_evidence("sft", expected, read_log(path))
    return verdict.point("gradients")


@pytest.mark.parametrize(
    ("losses", "norms", "words"),
    [
        ([2.0] * 10, NOISE, "does not fall"),
        (FALLING, [*STEADY[:4], 187.0, *STEADY[5:]], "jumps to 187 at step 5"),
    ],
)
def test_norms_that_no_batch_gives_pass_no_log(
    tmp_path: Path, losses: list[float], norms: list[float], words: str
) -> None:
    point = point_of_norms(tmp_path, losses, norms)
    assert (point.state, point.ok) == ("unknown", None)
    assert words in str(point.detail["reason"])
    assert point_of_norms(tmp_path, losses, norms, "any").ok is True


@pytest.mark.parametrize(
    # the first steps may be far from the others
    "norms",
    [STEADY, [300.0, 40.0, *STEADY[2:]]],
)
def test_usual_norms_pass_a_log(tmp_path: Path, norms: list[float]) -> None:
    point = point_of_norms(tmp_path, FALLING, norms)
    assert (point.state, point.ok) == ("unknown", True)


def trial(
    name: str,
    losses: list[float],
    *,
    speed: float = 100.0,
    norm: float | None = 7.0,
    tokens: float = 50.0,
    micro_batches: int = 4,
    gradients: str | None = "true",
    **more: Any,
) -> Sample:
    curve = tuple(CurveStep(tokens, tokens, loss, norm, micro_batches) for loss in losses)
    metrics = {"tokens_per_second_per_gpu": speed}
    return Sample(variant=name, curve=curve, metrics=metrics, gradients=gradients, **more)


# as two H200 gave them for ZeRO-3, and for ZeRO-2 on noise
LEARNS = [12.637, 12.626, 12.612, 12.604, 12.588, 12.573]
LEARNS_NOTHING = [12.637, 12.637, 12.638, 12.636, 12.637, 12.636]


BASE = trial("a", LEARNS)


def shifted(losses: list[float], by: float) -> list[float]:
    """All losses but the first."""
    return [losses[0], *[loss + by for loss in losses[1:]]]


def row_of(sample: Sample) -> VariantSummary:
    """What a faster sample is beside the baseline."""
    (_, row) = compare([BASE, sample])
    return row


@pytest.mark.parametrize(
    # a loss that falls further is no reason against a sample
    "losses",
    [LEARNS, shifted(LEARNS, -0.02)],
)
def test_a_speed_that_trained_as_well_is_recommended(losses: list[float]) -> None:
    row = row_of(trial("b", losses, speed=150))
    assert (row.standing, row.recommended) == ("faster", True)


def test_a_speed_that_trained_on_noise_is_not_accepted() -> None:
    """Its loss is within 5 % of one that fell by 0.5 %."""
    row = row_of(trial("b", LEARNS_NOTHING, speed=150))
    assert row.loss_change == pytest.approx(0, abs=0.01)
    assert (row.standing, row.recommended) == ("loss changed", False)
    assert "falls by 0.00066" in row.why and "0.0486" in row.why


def test_what_repeats_differ_by_is_no_difference() -> None:
    repeats = [BASE, trial("a", shifted(LEARNS, 0.02))]
    faster = trial("b", shifted(LEARNS, 0.025), speed=150)
    assert compare([*repeats, faster, faster])[1].standing == "faster"


def test_a_first_gradient_norm_far_from_the_baseline_is_a_change() -> None:
    """It is that of the same rows."""
    row = row_of(trial("b", LEARNS, speed=150, norm=201.0))
    assert row.standing == "loss changed" and "201" in row.why


@pytest.mark.parametrize(
    ("norm", "micro_batches", "tokens", "standing"),
    [
        (7.2, 4, 50.0, "faster"),
        (7.3, 4, 50.0, "loss changed"),
        # split otherwise over micro-batches
        (7.6, 2, 50.0, "faster"),
        (8.2, 2, 50.0, "loss changed"),
        # other rows: nothing to compare
        (9.0, 4, 60.0, "faster"),
    ],
)
def test_first_gradient_norms_are_compared(
    norm: float, micro_batches: int, tokens: float, standing: str
) -> None:
    sample = trial("b", LEARNS, speed=150, norm=norm, micro_batches=micro_batches, tokens=tokens)
    assert row_of(sample).standing == standing


def test_nothing_is_compared_with_a_corrupt_baseline() -> None:
    reason = "gradients are corrupt: w"
    bad = trial("a", LEARNS[:2], gradients="corrupt", cause="contract", reason=reason)
    good = trial("b", LEARNS, speed=150)
    first, second = compare([bad, good])
    assert first.standing == "flawed"
    assert reason in first.why
    assert second.standing == "unknown"
    assert "nothing is compared" in second.why

    (finding,) = find_baseline_fault([bad, good])
    assert (finding.severity, finding.code) == ("error", "corrupt-baseline")
    assert find_baseline_fault([BASE]) == ()


def test_gradients_that_nobody_compared_prove_no_speed() -> None:
    row = row_of(trial("b", LEARNS, speed=150, gradients="unknown"))
    assert (row.standing, row.recommended) == ("unproven", False)


def test_a_sample_is_read_as_it_was_written() -> None:
    assert Sample.from_json(json.loads(json.dumps(BASE.as_json()))) == BASE


@pytest.mark.parametrize(
    ("stage", "version", "ok"), [(2, "0.18.9", None), (2, "0.18.4", True), (3, "0.18.9", True)]
)
def test_gradients_that_nobody_compared_do_not_pass_where_deepspeed_corrupts_them(
    tmp_path: Path, stage: int, version: str, ok: bool | None
) -> None:
    deepspeed = {"version": version, "config": overlapping(stage)}
    manifest = made_runs.manifest(deepspeed=deepspeed)
    folder = made_runs.write_run(tmp_path / "run", record=manifest)
    point = judgement.judge_run(RunFolder(folder)).verdict.point("gradients")
    assert (point.state, point.ok) == ("unknown", ok)
    assert ok or "corrupt gradients" in str(point.detail["reason"])


@pytest.mark.parametrize(
    ("options", "exit_code", "severity"),
    [([], 3, "error"), (["--allow-corrupting-overlap"], 0, "warning")],
)
def test_a_corrupting_file_is_refused_unless_it_is_allowed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    exit_code: int,
    severity: str,
) -> None:
    config = {
        **overlapping(2, "fp32"), "bf16": {"enabled": "auto"}, "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }  # fmt: skip
    file = tmp_path / "own.json"
    file.write_text(json.dumps(config))
    stage = REPOSITORY / "configs" / "tulu" / "sft_qwen7b_25pct.yaml"
    words = ["sft", str(stage), f"deepspeed={file}", "--gpus", "8", "--dry-run"]

    assert main([*words, "--format", "json", *options]) == exit_code

    findings = json.loads(capsys.readouterr().out)["findings"]
    (finding,) = [finding for finding in findings if finding["code"] == "overlap-corrupts"]
    assert (finding["key"], finding["layer"]) == ("deepspeed", "run")
    assert finding["severity"] == severity
