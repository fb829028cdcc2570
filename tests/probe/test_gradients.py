"""The point `gradients`: what the optimizer uses against what autograd made, on two real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import made_runs
import pytest
from conftest import PATIENCE_S, REPOSITORY, SUPPORT

from launcher.cli.main import main
from launcher.probe.watching.gradients import ElementSample, tolerance
from launcher.rules.deepspeed import fault
from launcher.runs.rundir import RunFolder
from launcher.verdict import judge as judgement
from launcher.verdict.check import judge_evidence
from launcher.verdict.evidence import Evidence, read_log, read_run
from launcher.workflows.bench.comparison import CurveStep, Sample, baseline_fault, compare

pytestmark = pytest.mark.slow

FAULTY = 3  # gradient_ranks.FAULTY
VIOLATION = 79

HALF = {"half": True}
TRUE: list[dict[str, Any]] = [
    {"engine": "one", "world": 1},
    {"engine": "ddp", "accumulation": 2, "clip": 0.1},
    {"engine": "fsdp2", "accumulation": 2, "clip": 0.1, **HALF},
    {"engine": "zero1", "accumulation": 4, "clip": 0.1, **HALF},
    {"engine": "zero1", "accumulation": 2, "clip": 0.1, "summed": "fp32", **HALF},
    {"engine": "zero2", "accumulation": 3, "clip": 0.1, **HALF},
    {"engine": "zero2", "accumulation": 2, "wire": "fp32", **HALF},
    {"engine": "zero2", "accumulation": 2, "offload": True, "clip": 0.1, **HALF},
    {"engine": "zero2", "tied": True, "checkpointing": "reentrant", "accumulation": 2, **HALF},
    {"engine": "zero3", "accumulation": 2, "clip": 0.1, "offload": True, **HALF},
    {"engine": "zero3", "tied": True, "checkpointing": "plain", "frozen": True, **HALF},
    # steps 1, 2 and 4 of 5: the hooks are taken off and put on again
    {"engine": "ddp", "accumulation": 2, "sparse": True},
    {"engine": "fsdp2", "accumulation": 2, "sparse": True, **HALF},
    {"engine": "zero3", "accumulation": 2, "sparse": True, **HALF},
]
CORRUPT: list[dict[str, Any]] = [
    {
        "engine": engine,
        "fault": kind,
        "accumulation": 4 if kind == "dropped" else 1,
        "clip": 0.1,
        **precision,
    }
    for engine, precision in (
        ("ddp", {}),
        ("fsdp2", {}),
        ("zero1", HALF),
        ("zero2", HALF),
        ("zero3", HALF),
    )
    for kind in ("bucket", "undivided", "dropped")
]
UNKNOWN: list[dict[str, Any]] = [{"engine": "ddp", "unwatched": [1], "patience": 2}]
CASES = [*TRUE, *CORRUPT, *UNKNOWN]


def named(case: dict[str, Any]) -> str:
    return "-".join(str(v) if k == "engine" else f"{k}_{v}" for k, v in case.items())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Every case trained: the folder, and the exit codes of its processes."""
    for package in ("deepspeed", "transformers", "accelerate"):
        pytest.importorskip(package)
    place = tmp_path_factory.mktemp("gradients")
    path = os.pathsep.join((str(SUPPORT), str(REPOSITORY)))
    script = str(SUPPORT / "gradient_ranks.py")
    words = [sys.executable, script, str(place), *map(json.dumps, CASES)]
    with (place / "log").open("w") as log:
        subprocess.run(
            words, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log, cwd=place,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    assert (place / "exits.json").exists(), (place / "log").read_text(errors="replace")[-2000:]
    return place, json.loads((place / "exits.json").read_text())


Runs = tuple[Path, list[list[int]]]


def evidence_of(runs: Runs, case: dict[str, Any]) -> tuple[Evidence, list[int]]:
    number = CASES.index(case)
    folder = runs[0] / str(number)
    (folder / "probe").mkdir(exist_ok=True)
    for path in folder.glob("rank-*.jsonl"):
        path.rename(folder / "probe" / path.name)
    found = read_run(folder)
    logs = "".join(path.read_text(errors="replace") for path in folder.glob("log-*"))
    assert found.probe is not None, logs[-2000:]
    return found, runs[1][number]


@pytest.mark.parametrize("case", TRUE, ids=named)
def test_true_gradients_are_true(case: dict[str, Any], runs: Runs) -> None:
    found, exits = evidence_of(runs, case)
    assert set(exits) == {0}
    point = judge_evidence("sft", {"gradients": "true"}, found).point("gradients")
    assert (point.state, point.ok) == ("true", True), point
    assert point.detail["checks"] == (3 if case.get("sparse") else 5)
    # of the weights that this engine's optimizer steps, wherever it keeps them
    moved = judge_evidence("sft", {"weights": "moved"}, found).point("weights")
    assert (moved.state, moved.ok) == ("moved", True), moved
    assert found.probe is not None
    for record in found.probe.ranks.values():
        event = record.last("gradients")
        assert event is not None and not event.fields["skipped"]
        # far from the tolerance, or it would hide what is small
        largest, allowed = event.number("largest_error"), event.number("allowed")
        assert largest is not None and allowed is not None and largest < 0.4 * allowed


@pytest.mark.parametrize("case", CORRUPT, ids=named)
def test_corrupt_gradients_stop_the_run_in_the_step_that_is_wrong(
    case: dict[str, Any], runs: Runs
) -> None:
    found, exits = evidence_of(runs, case)
    assert VIOLATION in exits
    point = judge_evidence("sft", {"gradients": "true"}, found).point("gradients")
    assert (point.state, point.ok, point.detail["first_step"]) == ("corrupt", False, FAULTY)
    # said of the parameter, with how large it is and should be
    assert "model." in str(point.detail["parameter"])
    used, true = point.detail["used_norm"], point.detail["true_norm"]
    assert isinstance(used, float) and isinstance(true, float)
    if case["fault"] == "undivided":
        assert used == pytest.approx(2 * true, rel=0.02)
    if case["fault"] == "bucket":
        assert used > 10 * true
    assert found.stopped is not None and found.stopped.text("point") == "gradients"


@pytest.mark.parametrize("case", UNKNOWN, ids=named)
def test_a_process_without_a_probe_is_waited_for_once_and_nothing_is_claimed(
    case: dict[str, Any], runs: Runs
) -> None:
    found, exits = evidence_of(runs, case)
    assert set(exits) == {0}
    point = judge_evidence("sft", {"gradients": "true"}, found).point("gradients")
    assert (point.state, point.ok) == ("unknown", None)
    assert "every process" in str(point.detail["reason"])


def test_the_samples_cover_a_parameter_and_every_part_of_it_finds_its_own() -> None:
    sizes = [1, 7, 64, 65, 4096, 100_003]
    sample = ElementSample(sizes, 64)
    for seed in range(50):
        sample.draw(seed)
        for row, size in enumerate(sizes):
            step, count = sample.strides[row], sample.counts[row]
            places = [sample.offsets[row] + i * step for i in range(count)]
            assert places[0] >= 0 and places[-1] < size
            for start in range(0, size, max(1, size // 5)):
                end = min(size, start + max(1, size // 5))
                first, last = sample.within(row, start, end)
                inside = [i for i, place in enumerate(places) if start <= place < end]
                assert list(range(first, last)) == inside
    # small ones whole, large ones from end to end
    assert sample.counts[:3] == [1, 7, 64]
    assert sample.strides[5] * 64 > 0.95 * 100_003


def test_the_tolerance_lies_between_rounding_and_a_lost_micro_batch() -> None:
    """Of n independent micro-batches over all processes one is 1 / sqrt(n) of the sum."""
    bf16 = 2**-8
    for world, accumulated in ((1, 1), (2, 4), (8, 1), (8, 16), (64, 2)):
        allowed = tolerance(bf16, world + accumulated + 2)
        assert bf16 < allowed
        assert allowed < (world * accumulated) ** -0.5
    assert tolerance(2**-24, 100) == 1e-4


@pytest.mark.parametrize(
    ("stage", "version", "wire", "accumulation", "severity", "code"),
    [
        (2, "0.18.9", None, 1, "error", "overlap-corrupts"),
        (1, "0.18.5", None, 1, "error", "overlap-corrupts"),
        (2, "0.17.4", None, 1, "error", "overlap-corrupts"),
        (2, "0.17.5", None, 4, None, None),
        (2, "0.18.4", None, 4, None, None),
        (2, "0.19.1", None, 1, "warning", "overlap-corrupts"),
        (2, "0.19.8", None, 4, None, None),
        (2, None, None, 1, "warning", "overlap-corrupts"),
        (2, "0.19.8", "fp32", 1, "error", "overlap-corrupts"),
        (2, "0.19.8", "bf16", 1, None, None),
        (1, "0.19.8", "fp32", 1, None, None),
        (3, "0.18.9", None, 1, None, None),
        (2, "0.18.2", None, 2, "error", "accumulation-lost"),
        (2, "0.18.2", None, 1, None, None),
    ],
)
def test_releases_that_are_known_to_corrupt(
    stage: int,
    version: str | None,
    wire: str | None,
    accumulation: int,
    severity: str | None,
    code: str | None,
) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": stage, "overlap_comm": True}}
    config |= {"communication_data_type": wire} if wire else {}
    found = fault(config, version, precision="bf16", accumulation=accumulation)
    assert (found and found[0], found and found[1]) == (severity, code)


def test_overlap_and_files_that_ship() -> None:
    config = {"zero_optimization": {"stage": 2}, "communication_data_type": "fp32"}
    assert fault(config, "0.18.9") is None
    assert fault(config, "0.18.1", accumulation=2) is not None
    # no file that ships overlaps under zero 1 or 2
    for path in (REPOSITORY / "launcher" / "plan" / "deepspeed").glob("*.json"):
        config = json.loads(path.read_text())
        assert fault(config, "0.18.9") is None, path.name
        assert fault(config, None) is None, path.name


FALLING = [2.0 - 0.1 * i for i in range(10)]


@pytest.mark.parametrize(
    ("losses", "norms", "reason"),
    [
        (FALLING, [7.0, 7.2, 6.9, 7.1, 7.0, 6.8, 7.3, 7.1, 7.0, 6.9], None),
        ([2.0] * 10, [201, 133, 27243, 7755801, 18072, 5252, 9e3, 2e4, 3e3, 4e3], "does not fall"),
        (FALLING, [7.0, 7.2, 6.9, 7.1, 187.0, 6.8, 7.3, 7.1, 7.0, 6.9], "jumps to 187 at step 5"),
        # the first steps may be far from the others
        (FALLING, [300.0, 40.0, 6.9, 7.1, 7.0, 6.8, 7.3, 7.1, 7.0, 6.9], None),
    ],
)
def test_norms_that_no_batch_gives_pass_no_log(
    tmp_path: Path, losses: list[float], norms: list[float], reason: str | None
) -> None:
    path = tmp_path / "train.log"
    rows = (
        f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 1e-05, 'epoch': {i / 10:.2f}}}\n"
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)
    )
    path.write_text("".join(rows))
    found = read_log(path)
    point = judge_evidence("sft", {}, found).point("gradients")
    assert point.state == "unknown"
    assert point.ok is (True if reason is None else None)
    assert reason is None or reason in str(point.detail["reason"])
    # switched off
    assert judge_evidence("sft", {"gradients": "any"}, found).point("gradients").ok is True


def trial(
    name: str, losses: list[float], *, speed: float = 100.0, norm: float | None = 7.0,
    tokens: float = 50.0, micro_batches: int = 4, gradients: str | None = "true", **more: Any,
) -> Sample:  # fmt: skip
    curve = tuple(CurveStep(tokens, tokens, loss, norm, micro_batches) for loss in losses)
    metrics = {"tokens_per_second_per_gpu": speed}
    return Sample(variant=name, curve=curve, metrics=metrics, gradients=gradients, **more)


# as two H200 gave them for ZeRO-3, and for ZeRO-2 on noise
LEARNS = [12.637, 12.626, 12.612, 12.604, 12.588, 12.573]
LEARNS_NOTHING = [12.637, 12.637, 12.638, 12.636, 12.637, 12.636]


def standings(*samples: Sample) -> list[tuple[str, bool]]:
    return [(row.standing, row.recommended) for row in compare(samples)]


def test_a_speed_that_trained_on_noise_is_not_accepted() -> None:
    base = trial("a", LEARNS)
    assert standings(base, trial("b", LEARNS, speed=150))[1] == ("faster", True)
    # within 5 % of a loss that fell by 0.5 %
    rows = compare([base, trial("b", LEARNS_NOTHING, speed=150)])
    assert rows[1].loss_change == pytest.approx(0, abs=0.01)
    assert (rows[1].standing, rows[1].recommended) == ("loss changed", False)
    assert "falls by 0.00066" in rows[1].why and "0.0486" in rows[1].why
    # falls further: no reason against it
    further = [12.637, *(x - 0.02 for x in LEARNS[1:])]
    assert standings(base, trial("b", further, speed=150))[1] == ("faster", True)


def test_what_repeats_differ_by_is_no_difference() -> None:
    spread = [trial("a", LEARNS), trial("a", [12.637, *(x + 0.02 for x in LEARNS[1:])])]
    less = [trial("b", [12.637, *(x + 0.025 for x in LEARNS[1:])], speed=150)] * 2
    assert compare([*spread, *less])[1].standing == "faster"
    # the first gradient norm is that of the same rows
    base = trial("a", LEARNS)
    other = trial("b", LEARNS, speed=150, norm=201.0)
    (_, row) = compare([base, other])
    assert row.standing == "loss changed" and "201" in row.why
    for norm, micro_batches, tokens, standing in (
        (7.2, 4, 50.0, "faster"),
        (7.3, 4, 50.0, "loss changed"),
        # split otherwise over micro-batches
        (7.6, 2, 50.0, "faster"),
        (8.2, 2, 50.0, "loss changed"),
        # other rows: nothing to compare
        (9.0, 4, 60.0, "faster"),
    ):
        other = trial("b", LEARNS, speed=150, norm=norm, micro_batches=micro_batches, tokens=tokens)
        assert compare([base, other])[1].standing == standing, (norm, micro_batches, tokens)


def test_nothing_is_compared_with_a_corrupt_baseline() -> None:
    bad = trial(
        "a", LEARNS[:2], gradients="corrupt", cause="contract", reason="gradients are corrupt: w"
    )
    rows = compare([bad, trial("b", LEARNS, speed=150)])
    assert [row.standing for row in rows] == ["flawed", "unknown"]
    assert "gradients are corrupt: w" in rows[0].why and "nothing is compared" in rows[1].why
    (finding,) = baseline_fault([bad, trial("b", LEARNS)])
    assert (finding.severity, finding.code) == ("error", "corrupt-baseline")
    assert baseline_fault([trial("a", LEARNS)]) == ()
    # and gradients that nobody compared prove nothing
    assert standings(trial("a", LEARNS), trial("b", LEARNS, speed=150, gradients="unknown"))[1] == (
        "unproven",
        False,
    )
    # a sample is read as it was written
    one = trial("a", LEARNS)
    assert Sample.from_json(json.loads(json.dumps(one.as_json()))) == one


@pytest.mark.parametrize(
    ("stage", "overlap", "version", "doubted"),
    [(2, True, "0.18.9", True), (2, True, "0.18.4", False), (3, True, "0.18.9", False)],
)
def test_gradients_that_nobody_compared_do_not_pass_where_deepspeed_corrupts_them(
    tmp_path: Path, stage: int, overlap: bool, version: str, doubted: bool
) -> None:
    config = {"zero_optimization": {"stage": stage, "overlap_comm": overlap}}
    told = made_runs.manifest(deepspeed={"version": version, "config": config})
    folder = made_runs.made(tmp_path / "runs" / "one", told=told)
    found = judgement.judge_run(RunFolder(folder)).verdict.point("gradients")
    assert (found.state, found.ok) == ("unknown", None if doubted else True)
    assert not doubted or "corrupt gradients" in str(found.detail["reason"])


def test_a_corrupting_file_is_refused_unless_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"}
    config = {
        "bf16": {"enabled": "auto"}, "communication_data_type": "fp32", "zero_optimization": zero,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    }  # fmt: skip
    own = tmp_path / "own.json"
    own.write_text(json.dumps(config))
    tulu = REPOSITORY / "configs" / "tulu" / "sft_qwen7b_25pct.yaml"
    words = ["sft", str(tulu), f"deepspeed={own}", "--gpus", "8", "--dry-run", "--format", "json"]
    for more, exit_code, severity in (([], 3, "error"), (["--allow-corrupting-overlap"], 0, None)):
        assert main([*words, *more]) == exit_code
        found = json.loads(capsys.readouterr().out)["findings"]
        (finding,) = [one for one in found if one["code"] == "overlap-corrupts"]
        assert (finding["key"], finding["layer"]) == ("deepspeed", "run")
        assert [one["severity"] for one in found if one["severity"] == "error"] == [
            severity
        ] * bool(severity)
