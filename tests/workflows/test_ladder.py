"""Rungs in turn: stopped by a red flag, continued, refused beforehand; and real ones."""

import json
import math
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, REPOSITORY
from experiment import Here, shaped, started
from fake_world import World, needs_trl, wait_until

from launcher import files
from launcher.errors import Exit
from launcher.planning.collect import Scope
from launcher.planning.forecast import ForecastOptions
from launcher.planning.prepare import Prepared
from launcher.planning.request import Request
from launcher.runs import rundir
from launcher.verdict import check
from launcher.workflows import experiment
from launcher.workflows.experiment import Outcome
from launcher.workflows.ladder import ladder

pytestmark = needs_trl

CARDS = 4
JSON = ("--format", "json")
STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What a rung measures: the loss falls from `first_loss` by `fall`, a share of it."""

    first_loss: float = 2.0
    fall: float = 0.3
    speed: float = 1.0
    nan_step: int | None = None
    gib: float | None = None
    accuracy: float | None = None
    trend: str = "falling"
    exit: Exit = Exit.OK


class Rungs(Here):
    """Rungs without a process; `scene` has the unusual ones, as `at_2` for two processes."""

    def of_prepared(self, prepared: Prepared, **_: Any) -> Outcome:
        plan = prepared.plan
        self.started.append(str(plan.processes))
        rung = self.scene.get(f"at_{plan.processes}", Rung())
        folder = rundir.reserve(prepared.folder)
        lines = [json.dumps(metrics_of(rung, step)) + "\n" for step in range(1, STEPS + 1)]
        files.write_text(folder.metrics, "".join(lines))
        trend = check.Point(name="trend", state=rung.trend, expected="any", ok=True)
        finish = check.Point(
            name="finish",
            state="failed",
            expected="completed",
            ok=rung.exit is Exit.OK,
            detail={"error": {"message": "NCCL timed out"}},
        )
        verdict = check.Verdict(
            status="pass",
            stage=plan.stage.options.stage,
            steps=STEPS,
            points=(trend, finish),
            metrics={
                "tokens_per_second": 2000.0 * plan.processes * rung.speed,
                "peak_allocated_gib": rung.gib,
                "peak_reserved_gib": rung.gib,
            },
        )
        return Outcome(run=folder, plan=plan, verdict=verdict, exit=rung.exit, seconds=1.0)


def metrics_of(rung: Rung, step: int) -> Mapping[str, object]:
    progress = (step - 1) / (STEPS - 1)
    noise = 0.001 * math.sin(7 * step)
    row = {
        "step": step,
        "loss": rung.first_loss * (1 - rung.fall * progress) + noise,
        "finite": True,
        "grad_norm": 1.5,
        "seconds": 0.5 / rung.speed,
    }
    if step == rung.nan_step:
        row |= {"finite": False, "loss": None}
    if rung.accuracy is not None:
        row |= {"rewards/accuracies": rung.accuracy, "rewards/margins": 0.1}
    return row


@pytest.fixture
def rungs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rungs:
    rungs = Rungs(capsys)
    monkeypatch.setattr(experiment, "run_prepared", rungs.of_prepared)
    return rungs


def command(world: World, *words: str, **args: Any) -> list[str]:
    config = str(world.config(**args))
    python = str(world.root / "python")
    short = ("--steps", str(STEPS), "batch.global=8")
    return ["ladder", config, "--python", python, *short, *words]


def ladders(world: World) -> list[Path]:
    return sorted(world.runs.glob("*-ladder-*"))


def test_all_rungs_pass_and_the_full_run_is_estimated(world: World, rungs: Rungs) -> None:
    price = ("--price", "2", "--rows", "800")
    code, out, err = rungs.launch(*command(world, "--gpus", "1,2,4", *price))
    assert code == 0, err
    assert rungs.started == ["1", "2", "4"]
    first, second, third = [line for line in out.splitlines() if " GPU" in line and "->" in line]
    # the global batch is constant
    assert " 2 x 4 x 1 " in first
    assert " 2 x 2 x 2 " in second
    assert " 2 x 1 x 4 " in third
    assert first.split()[-3:] == ["2,000", "100%", "go"]
    assert second.split()[-3:] == ["4,000", "100%", "go"]
    assert third.split()[-3:] == ["8,000", "100%", "go"]
    assert "\ngo\n" in out
    # 800 rows, 8 a step, 3 epochs, half a second each, 2 for each of 4 GPUs and hour
    assert "full run on 4 GPUs: 2.5 min, costs 0.33  (300 steps x 0.5 s" in out


def test_a_price_is_for_gpus(world: World, rungs: Rungs) -> None:
    price = ("--price", "2", "--rows", "800")
    _, out, _ = rungs.launch(*command(world, "--gpus", "1,0", *price))
    assert "full run on CPU: 2.5 min  (" in out


def test_it_continues_at_the_rung_that_failed(world: World, rungs: Rungs) -> None:
    words = command(world, "--gpus", "1,2,4")
    code, out, _ = rungs.launch(*words, at_2=Rung(exit=Exit.TRAINING))
    assert code == 4
    assert "no-go: 2 GPUs: NCCL" in out
    assert rungs.launch(*words, at_2=Rung(exit=Exit.INTERRUPTED))[0] == 130

    code, out, _ = rungs.launch(*words, *JSON)
    assert code == 0
    data = json.loads(out)["data"]
    assert data["go"]
    assert data["reason"] is None
    assert [rung["before"] for rung in data["rungs"]] == [True, False, False]
    assert rungs.started == ["1", "2", "2", "2", "4"]

    # nothing is left to do, even if the run of a rung that passed was deleted
    shutil.rmtree(data["rungs"][0]["run"])
    assert rungs.launch(*command(world, "--gpus", "4,1"))[0] == 0
    assert len(rungs.started) == 5
    assert len(ladders(world)) == 1


def test_a_fresh_or_another_stage_or_other_packages_are_another_ladder(
    world: World, rungs: Rungs
) -> None:
    words = ("--gpus", "1")
    rungs.launch(*command(world, *words))
    rungs.launch(*command(world, *words, "--fresh"))
    rungs.launch(*command(world, *words, learning_rate=1e-4))
    installed = world.root / "site" / "liger_kernel-99.0.dist-info"
    installed.mkdir()
    metadata = "Metadata-Version: 2.1\nName: liger-kernel\nVersion: 99.0\n"
    (installed / "METADATA").write_text(metadata)
    rungs.launch(*command(world, *words))
    assert rungs.started == ["1"] * 4
    assert len(ladders(world)) == 4


def test_a_red_flag_stops_the_ladder(world: World, rungs: Rungs) -> None:
    words = command(world, "--gpus", "1,2,4", *JSON)
    code, out, _ = rungs.launch(*words, at_2=Rung(speed=0.3))
    assert code == 1
    assert rungs.started == ["1", "2"]
    answer = json.loads(out)
    assert answer["ok"] is False
    assert answer["data"]["estimate"] is None
    assert "30% of the first rung's tokens/s" in answer["data"]["reason"]
    flags = answer["data"]["rungs"][1]["flags"]
    (red,) = [flag for flag in flags if flag["colour"] == "red"]
    assert red["gate"] == "efficiency"
    assert red["value"] == 0.3


def test_another_gate_judges_anew_what_was_measured(world: World, rungs: Rungs) -> None:
    words = command(world, "--gpus", "1,2")
    assert rungs.launch(*words, at_2=Rung(speed=0.3))[0] == 1
    assert rungs.launch(*words, "gates={efficiency: {red: 0.2, yellow: 0.25}}")[0] == 0
    assert len(rungs.started) == 2
    code, out, _ = rungs.launch(*words, "gates.loss_fall=0.5")
    assert code == 1
    assert "red[loss_fall]" in out
    assert rungs.started == ["1", "2", "1"]


@pytest.mark.parametrize(
    ("rung", "words", "colours"),
    [
        (Rung(trend="rising"), ["expect.trend=falling"], {"trend": "red"}),
        (Rung(nan_step=7), [], {"loss": "red"}),
        (Rung(gib=145.0), [], {"memory": "red", "memory_over_plan": "yellow"}),
        (Rung(first_loss=0.6931, accuracy=0.8), ["stage=dpo"], {}),
        (Rung(first_loss=0.6931, accuracy=0.5), ["stage=dpo"], {"rewards_accuracy": "red"}),
    ],
)
def test_a_gate_raises_its_flag(
    world: World, rungs: Rungs, rung: Rung, words: list[str], colours: Mapping[str, str]
) -> None:
    terms = ("--gpus", "1", "--row-tokens", "100:200", *JSON, *words)
    words_of_shaped = command(world, *terms, model_name_or_path=shaped(world))
    code, out, _ = rungs.launch(*words_of_shaped, at_1=rung)
    (shown,) = json.loads(out)["data"]["rungs"]
    assert 0 < shown["planned_gib"] < 1
    raised = {}
    for flag in shown["flags"]:
        if flag["colour"] != "green":
            raised[flag["gate"]] = flag["colour"]
    assert raised == colours
    assert code == ("red" in colours.values())


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("--gpus", "1,2,8"), 5, "the rung of 8 GPUs needs more than the 4 here"),
        (("--gpus", "1,3"), 3, "impossible-batch"),
        (("--gpus", "1", "gates.loss_fal=1"), 3, "unknown-gate"),
        (("--gpus", "1,1"), 2, "different counts"),
        (("--gpus", "0", "--price", "2"), 2, "there are none"),
        (("--gpus", "1", "--price", "-2"), 2, "more than 0"),
        (("--gpus", "1", "--row-tokens", "x"), 2, "MEAN:MAX"),
    ],
)
def test_nothing_starts_if_one_rung_cannot(
    world: World, rungs: Rungs, words: tuple[str, ...], code: int, reason: str
) -> None:
    exit_code, _, err = rungs.launch(*command(world, *words))
    assert exit_code == code
    assert reason in err
    assert not rungs.started
    assert not ladders(world)


def test_a_dry_run_leaves_nothing(world: World, rungs: Rungs) -> None:
    code, out, _ = rungs.launch(*command(world, "--gpus", "1,8", "--dry-run", "batch.global=16"))
    assert code == 0
    assert out.count("--max_steps 20") == 2
    assert "# rung: 1 GPU\n" in out
    assert "# rung: 8 GPUs\n" in out
    assert not list(world.runs.glob("*"))


def test_steps_of_packed_rows_are_not_guessed(world: World, rungs: Rungs) -> None:
    args = {"packing": True, "max_length": 64, "bf16": False, "attn_implementation": "eager"}
    words = command(world, "--gpus", "1", "--rows", "800", "expect.packing=any", **args)
    _, out, _ = rungs.launch(*words)
    assert "full run: its steps are not known: --row-tokens MEAN:MAX\n" in out
    # 800 rows of 32 tokens are 400 of 64: 50 steps of 8 an epoch, 3 epochs
    _, out, _ = rungs.launch(*words, "--row-tokens", "32:32")
    assert "(150 steps x 0.5 s" in out


def test_a_step_that_was_held_up_does_not_count() -> None:
    assert ladder.compute_usual_step([]) is None
    assert ladder.compute_usual_step([1.0, 1.0, 2.0, 2.0]) == 1.5
    assert ladder.compute_usual_step([1.0] * 9 + [30.0]) == 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOneGpu:
    """DeepSpeed on the rung of one GPU of so many GiB; `note`: how the note about it ends."""

    config: str = "tulu/sft_qwen7b"
    words: str = ""
    gib: float = 79.2
    deepspeed: str
    note: str | None = None
    weights: str | None = None
    offloads: bool = False


SMALL = "model_name_or_path=Qwen/Qwen2.5-0.5B"
# Liger's loader takes the format of a model that is not here
PLAIN = "use_liger_kernel=false expect.liger=any"
LOSES = "keep copies of the weights in float32"


@pytest.mark.parametrize(
    "case",
    [
        OnOneGpu(words=PLAIN, deepspeed="none", note=LOSES, weights="any"),
        OnOneGpu(
            words=f"{PLAIN} expect.weights=moved", deepspeed="none", note=LOSES, weights="moved"
        ),
        # copies of these weights in float32 fit
        OnOneGpu(deepspeed="zero2_fp32_comm", words=SMALL),
        # it fits neither way
        OnOneGpu(deepspeed="zero2_fp32_comm", gib=30),
        # who names it wants it
        OnOneGpu(deepspeed="zero2", words="deepspeed=zero2"),
        OnOneGpu(deepspeed="zero3", words="deepspeed=zero3"),
        # what this keeps on the host, the card would have to hold
        OnOneGpu(deepspeed="zero3_offload", offloads=True),
        # without it, one process of this script has no process group
        OnOneGpu(deepspeed="zero2_fp32_comm", config="tulu/dpo_qwen7b"),
        OnOneGpu(deepspeed="none", config="bench/hand_recipe_trl", note=LOSES, weights="any"),
        # in float32 no step is lost
        OnOneGpu(
            deepspeed="none",
            config="bench/hand_recipe_trl",
            words="dtype=float32",
            gib=139,
            note="139.0",
        ),
        OnOneGpu(
            deepspeed="zero2_fp32_comm", config="bench/hand_recipe_trl", words="dtype=float32"
        ),
    ],
)
def test_one_gpu_keeps_deepspeed_if_its_memory_suffices(
    case: OnOneGpu, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAUNCH_PYTHON", raising=False)
    text = (REPOSITORY / "configs" / f"{case.config}.yaml").read_text()
    if case.offloads:
        text = text.replace("zero2_fp32_comm", "zero3_offload")
    path = tmp_path / "stage.yaml"
    path.write_text(text)
    overrides = tuple(case.words.split())
    request = Request(stage=None, config=path, checkout=checkout, overrides=overrides)
    terms = ForecastOptions(gpu="H100", gpu_memory=case.gib)
    planned = ladder.plan_rungs(request, [1, 2], steps=20, terms=terms, scope=Scope.PLAN)
    one, two = [rung.plan.stage.options for rung in planned.rungs]
    assert one.deepspeed_name == case.deepspeed
    assert two.deepspeed_name == planned.stage.options.deepspeed_name != "none"
    assert one.expect.get("weights") == case.weights
    notes = [finding.message for finding in planned.findings if finding.code == "deepspeed-off"]
    assert len(notes) == (case.note is not None)
    assert all(message.endswith(str(case.note)) for message in notes)


def start(world: World, *words: str, second_rung: Mapping[str, object]) -> Any:
    """A ladder of two rungs with real processes."""
    scenes = {"": {"fall": 0.3}, "world=2": second_rung}
    return world.started(
        *command(world, "--gpus", "1,2"), *words, env={"SCENES": json.dumps(scenes)}
    )


@pytest.mark.slow
def test_a_ladder_is_interrupted_and_killed_and_continues(world: World) -> None:
    running = start(world, second_rung={"sleep": 600})
    wait_until(lambda: started(world, "world") == ["1", "2"])
    # another command may not climb at the same time
    other = world.launch(*command(world, "--gpus", "1,2"))
    assert other.returncode == 5
    assert "under-way" in other.stderr

    # the trainer of the first rung has ended
    wait_until(lambda: Path("/proc", str(world.pid("trainer"))).exists())
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert b"no-go: 2 GPUs: interrupted" in out
    assert world.quiet()

    # what a killed command left is ended before the rung is run again
    (world.root / "pids" / "trainer").unlink()
    running = start(world, second_rung={"sleep": 600})
    world.pid("trainer")
    running.kill()
    running.communicate()

    # the terminal may close
    running = start(world, *JSON, second_rung={"fall": 0.3, "sleep": 1})
    wait_until(lambda: len(started(world, "world")) == 4)
    for _ in range(5):
        running.send_signal(signal.SIGHUP)
        time.sleep(0.05)
    out, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, err
    assert started(world, "world") == ["1", "2", "2", "2"]
    assert all(rung["first_loss"] for rung in json.loads(out)["data"]["rungs"])
    (folder,) = ladders(world)
    assert not (folder / "models").exists()
    assert world.quiet()

    page = (folder / "report.html").read_text()
    assert "stage-1gpu" in page
    assert "stage-2gpu" in page
    # the decision and the gates stand above the curves
    top = page[page.index("<h1>") : page.index('id="curves"')]
    for text in ("ladder stage", ">go</span>", "gate"):
        assert text in top
