"""Rungs in turn: gated, resumed, refused beforehand; and a real one."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import saved
from conftest import NO_PACKAGES, PATIENCE_S, REPOSITORY
from fake_smi import Smi
from fake_world import World, made, needs_trl, until

from launcher import ladder
from launcher.forecast import Terms
from launcher.gates import GATES
from launcher.preparation import Request

pytestmark = [pytest.mark.slow, needs_trl]
CONFIGS = REPOSITORY / "configs"
SHORT = ("--steps", "20", "batch.global=8")
GREEN = {
    (name, "green") for name in (*GATES, "verdict", "loss")
}  # fmt: skip
TRAINER = Path(__file__).with_name("ladder_trainer.py")
_BEGIN = """
import os, sys
os.execv(sys.executable, [sys.executable, "-u", {trainer!r}, *sys.argv[1:]])
"""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A machine with four cards, and an interpreter whose training is made up."""
    with made(tmp_path / "world") as one:
        smi = Smi(one.root / "bin")
        smi.cards(0, 0, 0, 0)
        one.environ["PATH"] = f"{smi.folder}:{os.environ['PATH']}"
        one.cuda_torch()
        (one.root / "begin.py").write_text(_BEGIN.format(trainer=str(TRAINER)))
        yield one


def climb(world: World, *words: str, scenes: dict[str, Any] | None = None, **args: Any) -> Any:
    """`launch ladder` of 20 steps, to its end."""
    path = world.config(**args)
    env = {"LADDER_SCENES": json.dumps(scenes or {})}
    python = str(world.root / "python")
    return world.launch("ladder", str(path), "--python", python, *SHORT, *words, env=env)


def started(world: World) -> list[str]:
    """How many processes each training had, in turn."""
    path = world.root / "started"
    return path.read_text().split() if path.exists() else []


def ladders(world: World) -> list[Path]:
    """The folders of ladders."""
    return sorted(world.runs.glob("*-ladder-*"))


def test_go(world: World) -> None:
    done = climb(world, "--gpus", "1,2,4", "--price", "2", "--rows", "800")
    assert done.returncode == 0, done.stderr
    assert started(world) == ["1", "2", "4"]
    rows = [line.split() for line in done.stdout.splitlines() if " GPU" in line and "->" in line]
    assert [row[:8] for row in rows] == [
        ["1", "GPU", "2", "x", "4", "x", "1", "2.001"],
        ["2", "GPUs", "2", "x", "2", "x", "2", "2.001"],
        ["4", "GPUs", "2", "x", "1", "x", "4", "2.001"],
    ]
    assert [row[-3:] for row in rows] == [
        ["2,000", "100%", "go"], ["4,000", "100%", "go"], ["8,000", "100%", "go"],
    ]  # fmt: skip
    assert "\ngo\n" in done.stdout
    # 800 rows, 8 a step, 3 epochs, half a second each, 2 for each of 4 GPUs and hour
    assert "full run on 4 GPUs: 2.5 min, costs 0.33  (300 steps x 0.5 s" in done.stdout
    (folder,) = ladders(world)
    page = (folder / "report.html").read_text()
    assert "stage-1gpu" in page and "stage-4gpu" in page
    assert not (folder / "models").exists()
    assert len(list(folder.glob("*-sft-*"))) == 3
    # a price is for GPUs
    done = climb(world, "--gpus", "1,0", "--price", "2", "--rows", "800")
    assert "full run on CPU: 2.5 min  (" in done.stdout, done.stdout
    assert world.quiet()


def test_it_goes_on_at_the_rung_that_failed(world: World) -> None:
    failed = climb(world, "--gpus", "1,2,4", scenes={"2": {"exit": 1}})
    assert failed.returncode == 4
    assert "no-go: 2 GPUs: " in failed.stdout and "NCCL" in failed.stdout
    assert started(world) == ["1", "2"]
    again = climb(world, "--gpus", "1,2,4", "--format", "json")
    assert again.returncode == 0, again.stdout
    assert started(world) == ["1", "2", "2", "4"]
    told = json.loads(again.stdout)["data"]
    assert [rung["before"] for rung in told["rungs"]] == [True, False, False]
    assert told["go"] and told["reason"] is None and len(ladders(world)) == 1
    # all have passed: nothing is left to do, whichever of them are asked for and are still there
    shutil.rmtree(told["rungs"][0]["run"])
    done = climb(world, "--gpus", "4,1")
    assert done.returncode == 0 and "\nreport: " in done.stdout
    assert len(started(world)) == 4
    assert climb(world, "--gpus", "1", "--fresh").returncode == 0
    assert started(world)[4:] == ["1"] and len(ladders(world)) == 2
    # another stage is another ladder
    assert climb(world, "--gpus", "1", learning_rate=1e-4).returncode == 0
    assert started(world)[5:] == ["1"] and len(ladders(world)) == 3


def test_a_red_flag_stops_and_gates_are_in_the_file(world: World) -> None:
    slow = {"2": {"speed": 0.3}}
    done = climb(world, "--gpus", "1,2,4", "--format", "json", scenes=slow)
    assert done.returncode == 1 and started(world) == ["1", "2"]
    told = json.loads(done.stdout)
    assert told["ok"] is False and told["data"]["estimate"] is None
    assert "30% of the first rung's tokens/s" in told["data"]["reason"]
    red = [f for f in told["data"]["rungs"][1]["flags"] if f["colour"] == "red"]
    assert [(f["gate"], f["value"]) for f in red] == [("efficiency", 0.3)]
    # what was measured is judged anew, and not measured again
    done = climb(world, "--gpus", "1,2", "gates={efficiency: {red: 0.2, yellow: 0.25}}")
    assert done.returncode == 0 and started(world) == ["1", "2"]
    assert "2 GPUs: " not in done.stdout.partition("\ngo")[0].partition("verdict")[2]
    worse = climb(world, "--gpus", "1,2", "gates.loss_fall=0.5", "gates.efficiency=off")
    assert worse.returncode == 1 and "red[loss_fall]" in worse.stdout
    assert started(world) == ["1", "2", "1"]


@pytest.mark.parametrize(("fall", "colour"), [(-0.1, "red"), (0.3, None)])
def test_the_trend_that_the_file_expects(world: World, fall: float, colour: str | None) -> None:
    done = climb(
        world, "--gpus", "1", "--format", "json", "gates={loss_fall: off}",
        "expect.trend=falling", scenes={"1": {"fall": fall}},
    )  # fmt: skip
    (rung,) = json.loads(done.stdout)["data"]["rungs"]
    told = {flag["gate"]: flag["colour"] for flag in rung["flags"]}
    assert told["trend"] == (colour or "green")
    assert done.returncode == (1 if colour else 0)


def test_memory_against_the_plan_and_the_card(world: World) -> None:
    shape = {
        "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "torch_dtype": "float32",
        "tie_word_embeddings": True, "max_position_embeddings": 2048,
        "architectures": ["Qwen2ForCausalLM"],
    }  # fmt: skip
    (world.root / "shaped").mkdir()
    (world.root / "shaped" / "config.json").write_text(json.dumps(shape))
    saved.loadable(world.root / "shaped")
    words = ("--gpus", "1,2", "--row-tokens", "100:200", "--format", "json")
    scenes = {"1": {"gib": 0.001}, "2": {"gib": 145.0}}
    done = climb(world, *words, scenes=scenes, model_name_or_path="shaped")
    one, two = json.loads(done.stdout)["data"]["rungs"]
    assert 0 < one["planned_gib"] < 1 and one["go"]
    assert done.returncode == 1 and two["peak_reserved_gib"] == 145.0
    colours = {f["gate"]: f["colour"] for f in two["flags"]}
    assert (colours["memory"], colours["memory_over_plan"]) == ("red", "yellow")


def test_a_loss_that_is_no_number(world: World) -> None:
    done = climb(world, "--gpus", "0,1", scenes={"1": {"nan": 7}})
    assert done.returncode == 1 and started(world) == ["1"]
    assert "CPU" in done.stdout and "red[loss] NaN or infinite at step 7" in done.stdout


def test_nothing_starts_where_one_rung_cannot(world: World) -> None:
    done = climb(world, "--gpus", "1,2,8")
    assert done.returncode == 5
    assert "the rung of 8 GPUs needs more than the 4 here" in done.stderr
    assert "--gpus 1,2 can be run here" in done.stderr
    done = climb(world, "--gpus", "1,3")
    assert done.returncode == 3 and "impossible-batch" in done.stderr
    assert climb(world, "--gpus", "1", "learning_rat=1").returncode == 3
    assert climb(world, "--gpus", "1", "gates.loss_fal=1").returncode == 3
    assert climb(world, "--gpus", "1,1").returncode == 2
    assert climb(world, "--gpus", "one").returncode == 2
    assert climb(world, "--gpus", "0", "--price", "2").returncode == 2
    assert climb(world, "--gpus", "1", "--price", "-2").returncode == 2
    assert climb(world, "--gpus", "1", "--row-tokens", "x").returncode == 2
    assert not started(world) and not ladders(world)


def test_a_dry_run_leaves_nothing(world: World) -> None:
    done = climb(world, "--gpus", "1,8", "--dry-run", "batch.global=16")
    assert done.returncode == 0
    assert "# rung: 1 GPU\n" in done.stdout and "# rung: 8 GPUs\n" in done.stdout
    assert done.stdout.count("--max_steps 20") == 2
    assert not world.runs.exists() or not list(world.runs.iterdir())


def test_ctrl_c_ends_it_and_the_next_command_goes_on(world: World) -> None:
    path, python = world.config(), str(world.root / "python")
    scenes = {"LADDER_SCENES": json.dumps({"2": {"sleep": 600}})}
    words = ("ladder", str(path), "--python", python, *SHORT, "--gpus", "1,2,4")
    running = world.started(*words, env=scenes)
    until(lambda: started(world) == ["1", "2"] and (world.root / "pids" / "trainer-2").exists())
    # another command may not climb at the same time
    other = world.launch(*words)
    assert other.returncode == 5 and "under-way" in other.stderr
    assert world.launch(*words, "--dry-run").returncode == 0
    os.kill(running.pid, signal.SIGINT)
    out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, out
    assert b"no-go: 2 GPUs: interrupted" in out
    assert world.quiet()
    again = climb(world, "--gpus", "1,2,4")
    assert again.returncode == 0 and started(world) == ["1", "2", "2", "4"]


def test_two_starts_at_once(world: World) -> None:
    path, python = world.config(), str(world.root / "python")
    words = ("ladder", str(path), "--python", python, *SHORT, "--gpus", "0")
    sleeping = {"LADDER_SCENES": json.dumps({"1": {"sleep": 600}})}
    both = [world.started(*words, env=sleeping) for _ in range(2)]
    until(lambda: any(one.poll() is not None for one in both))
    late, first = sorted(both, key=lambda one: one.poll() is None)
    _, err = late.communicate(timeout=PATIENCE_S)
    assert late.returncode == 5 and b"under-way" in err
    world.pid("trainer-1")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130 and started(world) == ["1"] and len(ladders(world)) == 1


def test_a_rung_whose_processes_are_not_known_yet_is_live(world: World) -> None:
    assert climb(world, "--gpus", "0", scenes={"1": {"exit": 1}}).returncode == 4
    (run,) = ladders(world)[0].glob("*-sft-*")
    # as between the start of a keeper and its first record
    with (run / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = climb(world, "--gpus", "0")
        assert other.returncode == 5 and "run-is-live" in other.stderr
    assert climb(world, "--gpus", "0").returncode == 0


def test_a_killed_command_leaves_its_rung_to_itself(world: World) -> None:
    path, python = world.config(), str(world.root / "python")
    words = ("ladder", str(path), "--python", python, *SHORT, "--gpus", "0")
    sleeping = {"LADDER_SCENES": json.dumps({"1": {"sleep": 600}})}
    running = world.started(*words, env=sleeping)
    trainer = world.pid("trainer-1")
    running.kill()
    running.communicate()
    other = world.launch(*words)
    assert other.returncode == 5 and "run-is-live" in other.stderr
    os.kill(trainer, signal.SIGKILL)
    until(lambda: not world.left())
    assert world.launch(*words).returncode == 0
    assert started(world) == ["1", "1"] and len(ladders(world)) == 1
    assert not (ladders(world)[0] / "models").exists()


def test_a_rung_that_went_on_to_its_end_without_its_command_is_not_repeated(world: World) -> None:
    path, python = world.config(), str(world.root / "python")
    words = ("ladder", str(path), "--python", python, *SHORT, "--gpus", "1,2")
    running = world.started(*words, env={"LADDER_SCENES": json.dumps({"1": {"sleep": 2}})})
    world.pid("trainer-1")
    running.kill()
    running.communicate()
    until(lambda: not world.left())
    told = world.launch(*words, "--format", "json")
    assert told.returncode == 0, told.stderr
    assert started(world) == ["1", "2"] and len(ladders(world)) == 1
    assert not (ladders(world)[0] / "models").exists()
    assert all(one["first_loss"] for one in json.loads(told.stdout)["data"]["rungs"])


def test_rungs_of_other_packages_are_repeated(world: World) -> None:
    assert climb(world, "--gpus", "1").returncode == 0
    assert climb(world, "--gpus", "1").returncode == 0
    assert started(world) == ["1"]
    installed = world.root / "site" / "liger_kernel-99.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: liger-kernel\nVersion: 99.0\n"
    )
    assert climb(world, "--gpus", "1").returncode == 0
    assert started(world) == ["1", "1"] and len(ladders(world)) == 2


def test_the_terminal_may_go(world: World) -> None:
    path, python = world.config(), str(world.root / "python")
    words = ("ladder", str(path), "--python", python, *SHORT, "--gpus", "1,2,4")
    running = world.started(*words, env={"LADDER_SCENES": json.dumps({"1": {"sleep": 2}})})
    until(lambda: bool(started(world)))
    # while a rung trains, and between two of them
    while len(started(world)) < 3 and running.poll() is None:
        running.send_signal(signal.SIGHUP)
        time.sleep(0.05)
    out, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, err
    assert started(world) == ["1", "2", "4"] and b"go\n" in out


def test_steps_of_packed_rows_are_not_guessed(world: World) -> None:
    # made up training has no packing to prove
    told = {"packing": True, "max_length": 64, "bf16": False, "attn_implementation": "eager"}
    words = ("--gpus", "1", "--rows", "800", "expect.packing=any")
    done = climb(world, *words, **told)
    unknown = "full run: its steps are not known: --row-tokens MEAN:MAX\n"
    assert unknown in done.stdout, (done.stdout, done.stderr)
    # 800 rows of 32 tokens are 400 of 64: 50 steps of 8 an epoch, 3 epochs
    done = climb(world, *words, "--row-tokens", "32:32", **told)
    assert "(150 steps x 0.5 s" in done.stdout, (done.stdout, done.stderr)


def test_a_step_that_something_held_up_is_no_step() -> None:
    assert ladder.usual_step([]) is None
    assert ladder.usual_step([1.0, 1.0, 2.0, 2.0]) == 1.5
    assert ladder.usual_step([1.0] * 9 + [30.0]) == 1.0


def test_rewards_of_dpo(world: World) -> None:
    path = world.config()
    path.write_text(path.read_text().replace("stage: sft", "stage: dpo"))
    python = str(world.root / "python")
    words = ("ladder", str(path), "--python", python, *SHORT, "--gpus", "1", "--format", "json")

    def flags(**scene: Any) -> set[tuple[str, str]]:
        scenes = {"LADDER_SCENES": json.dumps({"1": scene})}
        told = json.loads(world.launch(*words, "--fresh", env=scenes).stdout)["data"]
        return {(f["gate"], f["colour"]) for f in told["rungs"][0]["flags"]} - GREEN

    assert flags(first=0.6931, accuracy=0.8) == set()
    assert flags(first=0.6931, accuracy=0.5) == {("rewards_accuracy", "red")}
    assert flags(first=1.6, accuracy=0.8) == {("first_loss", "red")}


@pytest.mark.parametrize(
    ("config", "kept"), [("tulu/sft_qwen7b", False), ("tulu/dpo_qwen7b", True)]
)
def test_deepspeed_on_one_gpu(
    config: str, kept: bool, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAUNCH_PYTHON", raising=False)
    request = Request(stage=None, config=CONFIGS / f"{config}.yaml", checkout=checkout)

    def used(*overrides: str) -> list[str]:
        asked = replace(request, overrides=overrides)
        climbing = ladder.prepared(asked, [1, 2], steps=20, terms=Terms(), running=False)
        with climbing as planned:
            return [rung.prepared.plan.stage.options.deepspeed_name for rung in planned.rungs]

    assert used() == ["zero2_fp32_comm" if kept else "none", "zero2_fp32_comm"]
    assert used("deepspeed=zero3") == ["zero3", "zero3"]


def test_deepspeed_stays_where_the_card_is_too_small_without(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = Smi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{smi.folder}:{os.environ['PATH']}")
    path = tmp_path / "offload.yaml"
    text = (CONFIGS / "tulu" / "sft_qwen7b.yaml").read_text()
    path.write_text(text.replace("zero2_fp32_comm", "zero3_offload"))
    request = Request(stage=None, config=path, checkout=checkout)

    def used(memory_mib: int) -> str:
        smi.cards(0, memory=memory_mib)
        terms = Terms(row_tokens="290:1100")
        with ladder.prepared(request, [1], steps=20, terms=terms, running=False) as planned:
            return planned.rungs[0].prepared.plan.stage.options.deepspeed_name

    assert used(183_359) == "none"
    assert used(49_140) == "zero3_offload"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason=NO_PACKAGES)
def test_the_demo_for_real(tmp_path: Path, demo_assets: Path) -> None:
    """Training of the tiny model on the CPU."""
    with made(tmp_path / "real") as one:
        shutil.copytree(demo_assets, one.root / "build" / "demo")
        config = str(CONFIGS / "demo" / "sft.yaml")
        words = ("batch.global=4", "batch.per_device=4", "--gpus", "0", "--steps", "8")
        done = one.launch("ladder", config, *words, "--format", "json")
        assert done.returncode == 0, done.stdout + done.stderr
        (rung,) = json.loads(done.stdout)["data"]["rungs"]
        assert rung["last_loss"] < rung["first_loss"] and rung["tokens_per_second"] > 0
        assert (rung["steps"], rung["status"]) == (8, "pass")
