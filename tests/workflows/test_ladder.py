"""Rungs in turn: gated, gone on with, refused beforehand; and a real one."""

import json
import math
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, REPOSITORY
from experiment import Here, shaped, started
from fake_world import World, needs_trl, until

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
CONFIGS = REPOSITORY / "configs"
CARDS = 4
SHORT = ("--steps", "20", "batch.global=8")
JSON = ("--format", "json")


class Rungs(Here):
    """Rungs without a process: what one shows stands in the scene under its number of processes, `at_2`."""

    def of_prepared(self, prepared: Prepared, **_: Any) -> Outcome:
        plan = prepared.plan
        scene = {"fall": 0.3, "speed": 1.0, "first": 2.0, "nan": None, "gib": None, "accuracy": None,
                 "trend": "falling", "exit": Exit.OK}  # fmt: skip
        scene |= self.scene.get(f"at_{plan.processes}", {})
        self.started.append(str(plan.processes))
        lines = []
        for step in range(20):
            loss = scene["first"] * (1 - scene["fall"] * step / 19) + 0.001 * math.sin(7 * step)
            row = {
                "step": step + 1,
                "loss": loss,
                "grad_norm": 1.5,
                "seconds": 0.5 / scene["speed"],
            }
            row |= {"finite": False, "loss": None} if step + 1 == scene["nan"] else {"finite": True}
            if scene["accuracy"] is not None:
                row |= {"rewards/accuracies": scene["accuracy"], "rewards/margins": 0.1}
            lines.append(json.dumps(row))
        folder = rundir.reserve(prepared.folder)
        files.write_text(folder.metrics, "".join(f"{line}\n" for line in lines))
        metrics = {"tokens_per_second": 2000.0 * plan.processes * scene["speed"],
                   "peak_allocated_gib": scene["gib"], "peak_reserved_gib": scene["gib"]}  # fmt: skip
        trend = check.Point(name="trend", state=scene["trend"], expected="any", ok=True)
        finish = check.Point(
            name="finish", state="failed", expected="completed", ok=scene["exit"] is Exit.OK,
            detail={"error": {"message": "NCCL timed out"}},
        )  # fmt: skip
        verdict = check.Verdict(
            status="pass",
            stage=plan.stage.options.stage,
            steps=20,
            points=(trend, finish),
            metrics=metrics,
        )
        return Outcome(run=folder, plan=plan, verdict=verdict, exit=scene["exit"], seconds=1.0)


@pytest.fixture
def rungs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rungs:
    made = Rungs(capsys)
    monkeypatch.setattr(experiment, "of_prepared", made.of_prepared)
    return made


def words_for(world: World, *words: str, **args: Any) -> tuple[str, ...]:
    python = str(world.root / "python")
    return ("ladder", str(world.config(**args)), "--python", python, *SHORT, *words)


def ladders(world: World) -> list[Path]:
    return sorted(world.runs.glob("*-ladder-*"))


def test_go(world: World, rungs: Rungs) -> None:
    code, out, err = rungs.launch(
        *words_for(world, "--gpus", "1,2,4", "--price", "2", "--rows", "800")
    )
    assert code == 0, err
    assert rungs.started == ["1", "2", "4"]
    rows = [line.split() for line in out.splitlines() if " GPU" in line and "->" in line]
    # the global batch is constant
    assert [row[2:7] for row in rows] == [
        ["2", "x", "4", "x", "1"], ["2", "x", "2", "x", "2"], ["2", "x", "1", "x", "4"],
    ]  # fmt: skip
    assert [row[-3:] for row in rows] == [
        ["2,000", "100%", "go"],
        ["4,000", "100%", "go"],
        ["8,000", "100%", "go"],
    ]
    assert "\ngo\n" in out
    # 800 rows, 8 a step, 3 epochs, half a second each, 2 for each of 4 GPUs and hour
    assert "full run on 4 GPUs: 2.5 min, costs 0.33  (300 steps x 0.5 s" in out
    # a price is for GPUs
    out = rungs.launch(*words_for(world, "--gpus", "1,0", "--price", "2", "--rows", "800"))[1]
    assert "full run on CPU: 2.5 min  (" in out


def test_it_goes_on_at_the_rung_that_failed(world: World, rungs: Rungs) -> None:
    words = words_for(world, "--gpus", "1,2,4")
    code, out, _ = rungs.launch(*words, at_2={"exit": Exit.TRAINING})
    assert code == 4 and "no-go: 2 GPUs: NCCL" in out and rungs.started == ["1", "2"]
    assert rungs.launch(*words, at_2={"exit": Exit.INTERRUPTED})[0] == 130
    code, out, _ = rungs.launch(*words, *JSON)
    data = json.loads(out)["data"]
    assert code == 0 and data["go"] and data["reason"] is None
    assert [rung["before"] for rung in data["rungs"]] == [True, False, False]
    assert rungs.started == ["1", "2", "2", "2", "4"] and len(ladders(world)) == 1
    # all have passed: nothing is left to do, whichever of them are asked for and are still there
    shutil.rmtree(data["rungs"][0]["run"])
    assert rungs.launch(*words_for(world, "--gpus", "4,1"))[0] == 0 and len(rungs.started) == 5
    rungs.launch(*words_for(world, "--gpus", "1", "--fresh"))
    assert rungs.started[5:] == ["1"] and len(ladders(world)) == 2
    # another stage, or other packages, are another ladder
    rungs.launch(*words_for(world, "--gpus", "1", learning_rate=1e-4))
    installed = world.root / "site" / "liger_kernel-99.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: liger-kernel\nVersion: 99.0\n"
    )
    rungs.launch(*words_for(world, "--gpus", "1"))
    assert rungs.started[6:] == ["1", "1"] and len(ladders(world)) == 4


def test_a_red_flag_stops_and_gates_are_in_the_file(world: World, rungs: Rungs) -> None:
    code, out, _ = rungs.launch(*words_for(world, "--gpus", "1,2,4", *JSON), at_2={"speed": 0.3})
    assert code == 1 and rungs.started == ["1", "2"]
    answer = json.loads(out)
    assert answer["ok"] is False and answer["data"]["estimate"] is None
    assert "30% of the first rung's tokens/s" in answer["data"]["reason"]
    red = [f for f in answer["data"]["rungs"][1]["flags"] if f["colour"] == "red"]
    assert [(f["gate"], f["value"]) for f in red] == [("efficiency", 0.3)]
    # what was measured is judged anew, and not measured again
    gates = "gates={efficiency: {red: 0.2, yellow: 0.25}}"
    assert rungs.launch(*words_for(world, "--gpus", "1,2", gates))[0] == 0
    assert len(rungs.started) == 2
    code, out, _ = rungs.launch(*words_for(world, "--gpus", "1,2", "gates.loss_fall=0.5"))
    assert code == 1 and "red[loss_fall]" in out and rungs.started == ["1", "2", "1"]


@pytest.mark.parametrize(
    ("scene", "more", "colours"),
    [
        ({"trend": "rising"}, ("expect.trend=falling",), {"trend": "red"}),
        ({"nan": 7}, (), {"loss": "red"}),
        ({"gib": 145.0}, (), {"memory": "red", "memory_over_plan": "yellow"}),
        ({"first": 0.6931, "accuracy": 0.8}, ("stage=dpo",), {}),
        ({"first": 0.6931, "accuracy": 0.5}, ("stage=dpo",), {"rewards_accuracy": "red"}),
    ],
)
def test_flags(
    world: World,
    rungs: Rungs,
    scene: dict[str, Any],
    more: tuple[str, ...],
    colours: dict[str, str],
) -> None:
    words = words_for(
        world,
        "--gpus",
        "1",
        "--row-tokens",
        "100:200",
        *JSON,
        *more,
        model_name_or_path=shaped(world),
    )
    code, out, _ = rungs.launch(*words, at_1=scene)
    (rung,) = json.loads(out)["data"]["rungs"]
    assert 0 < rung["planned_gib"] < 1
    found = {f["gate"]: f["colour"] for f in rung["flags"] if f["colour"] != "green"}
    assert found == colours and code == ("red" in colours.values())


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("--gpus", "1,2,8"), 5, "the rung of 8 GPUs needs more than the 4 here"),
        (("--gpus", "1,3"), 3, "impossible-batch"),
        (("--gpus", "1", "learning_rat=1"), 3, "learning_rat"),
        (("--gpus", "1", "gates.loss_fal=1"), 3, "unknown-gate"),
        (("--gpus", "1,1"), 2, "different counts"),
        (("--gpus", "0", "--price", "2"), 2, "there are none"),
        (("--gpus", "1", "--price", "-2"), 2, "more than 0"),
        (("--gpus", "1", "--row-tokens", "x"), 2, "MEAN:MAX"),
    ],
)
def test_nothing_starts_where_one_rung_cannot(
    world: World, rungs: Rungs, words: tuple[str, ...], code: int, why: str
) -> None:
    found, _, err = rungs.launch(*words_for(world, *words))
    assert (found, why in err) == (code, True), err
    assert not rungs.started and not ladders(world)


def test_a_dry_run_leaves_nothing(world: World, rungs: Rungs) -> None:
    code, out, _ = rungs.launch(*words_for(world, "--gpus", "1,8", "--dry-run", "batch.global=16"))
    assert code == 0 and out.count("--max_steps 20") == 2
    assert "# rung: 1 GPU\n" in out and "# rung: 8 GPUs\n" in out
    assert not world.runs.exists() or not list(world.runs.iterdir())


def test_steps_of_packed_rows_are_not_guessed(world: World, rungs: Rungs) -> None:
    args = {"packing": True, "max_length": 64, "bf16": False, "attn_implementation": "eager"}
    words = words_for(world, "--gpus", "1", "--rows", "800", "expect.packing=any", **args)
    out = rungs.launch(*words)[1]
    assert "full run: its steps are not known: --row-tokens MEAN:MAX\n" in out
    # 800 rows of 32 tokens are 400 of 64: 50 steps of 8 an epoch, 3 epochs
    assert "(150 steps x 0.5 s" in rungs.launch(*words, "--row-tokens", "32:32")[1]


def test_a_step_that_something_held_up_is_no_step() -> None:
    assert ladder.usual_step([]) is None
    assert ladder.usual_step([1.0, 1.0, 2.0, 2.0]) == 1.5
    assert ladder.usual_step([1.0] * 9 + [30.0]) == 1.0


@pytest.mark.parametrize(
    ("config", "kept"), [("tulu/sft_qwen7b", False), ("tulu/dpo_qwen7b", True)]
)
def test_deepspeed_on_one_gpu(
    config: str, kept: bool, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAUNCH_PYTHON", raising=False)
    request = Request(stage=None, config=CONFIGS / f"{config}.yaml", checkout=checkout)

    def used(*overrides: str) -> list[str]:
        asked = replace(request, overrides=overrides)
        planned = ladder.plan_rungs(
            asked, [1, 2], steps=20, terms=ForecastOptions(), scope=Scope.PLAN
        )
        return [rung.plan.stage.options.deepspeed_name for rung in planned.rungs]

    assert used() == ["zero2_fp32_comm" if kept else "none", "zero2_fp32_comm"]
    assert used("deepspeed=zero3") == ["zero3", "zero3"]
    # what the file keeps on the host, the card may not hold
    path = tmp_path / "offload.yaml"
    path.write_text(request.config.read_text().replace("zero2_fp32_comm", "zero3_offload"))
    request = replace(request, config=path)
    assert used() == ["zero3_offload", "zero3_offload"]


FALLING = {"": {"fall": 0.3}}


@pytest.mark.slow
def test_interrupted_killed_and_gone_on_with(world: World) -> None:
    words = words_for(world, "--gpus", "1,2,4")
    scenes = {**FALLING, "world=2": {"sleep": 600}}
    running = world.started(*words, env={"SCENES": json.dumps(scenes)})
    until(lambda: started(world, "world") == ["1", "2"])
    # another command may not climb at the same time
    other = world.launch(*words)
    assert other.returncode == 5 and "under-way" in other.stderr
    assert world.launch(*words, "--dry-run").returncode == 0
    # that of the first rung has gone
    until(lambda: Path("/proc", str(world.pid("trainer"))).exists())
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130 and b"no-go: 2 GPUs: interrupted" in out and world.quiet()
    # what a killed command left is ended before the rung is run again; and the terminal may go
    (world.root / "pids" / "trainer").unlink()
    running = world.started(*words, env={"SCENES": json.dumps(scenes)})
    world.pid("trainer")
    running.kill()
    running.communicate()
    scenes = {**FALLING, "world=4": {"fall": 0.3, "sleep": 2}}
    running = world.started(*words, *JSON, env={"SCENES": json.dumps(scenes)})
    until(lambda: len(started(world, "world")) == 5)
    for _ in range(10):
        running.send_signal(signal.SIGHUP)
        time.sleep(0.05)
    out, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, err
    assert started(world, "world") == ["1", "2", "2", "2", "4"] and len(ladders(world)) == 1
    data = json.loads(out)["data"]
    assert all(rung["first_loss"] for rung in data["rungs"])
    page = (ladders(world)[0] / "report.html").read_text()
    assert "stage-1gpu" in page and "stage-4gpu" in page
    # the decision and the gates stand above the curves
    top = page[page.index("<h1>") : page.index('id="curves"')]
    assert "ladder stage" in top and ">go</span>" in top and "gate" in top
    assert not (ladders(world)[0] / "models").exists() and world.quiet()
