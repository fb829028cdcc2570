"""Real training in a chain, on the CPU: TRL, and the pinned scripts fed with each other's folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from real_training import (
    CONFIGS,
    known_commit,
    launch,
    needs_open_instruct,
    needs_training,
    place,
    states,
)

__all__ = ["known_commit", "place"]  # fixtures

pytestmark = [pytest.mark.slow, *needs_training]


def events(run: str, name: str) -> list[dict[str, Any]]:
    record = Path(run) / "probe" / "rank-0.jsonl"
    told = [json.loads(line) for line in record.read_text().splitlines()]
    return [event for event in told if event["event"] == name]


SHORT = (
    "sft.batch.global=4", "sft.batch.per_device=4", "sft.max_steps=12", "sft.logging_steps=1",
    "dpo.batch.global=4", "dpo.batch.per_device=2", "dpo.max_steps=2", "dpo.logging_steps=1",
    "dpo.expect.trend=any",
)  # fmt: skip


@pytest.fixture(scope="module")
def chain(place: Path) -> dict[str, Any]:
    """The demo's SFT, then its DPO: what the command answered."""
    code, told = launch(place, "pipeline", str(CONFIGS / "pipeline.yaml"), *SHORT)
    assert code == 0, told
    return told


def verdict(run: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((Path(run) / "verdict.json").read_text())
    return told


def seen(run: str) -> dict[str, str]:
    return states({"data": verdict(run)})


def test_trl_sft_passes_and_says_what_ran(chain: dict[str, Any]) -> None:
    run = Path(chain["data"]["stages"][0]["run"])
    told = verdict(str(run))
    assert (told["status"], told["steps"]) == ("pass", 12)
    assert told["metrics"]["last_loss"] < told["metrics"]["first_loss"]
    points = seen(str(run))
    assert (points["attention"], points["dataset_cache"]) == ("sdpa", "miss")
    assert (points["trend"], points["finish"]) == ("falling", "completed")
    assert {path.name for path in run.iterdir()} >= {
        "run.json", "console.log", "metrics.jsonl", "exit.json", "verdict.json", "report.html",
    }  # fmt: skip
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(row["tokens"] <= row["positions"] for row in rows)


def test_trl_step_losses_agree_with_the_log(chain: dict[str, Any]) -> None:
    """The probe's loss is the step's, also where Trainer has divided it by the accumulation."""
    first = events(chain["data"]["stages"][1]["run"], "step")[0]
    assert first["micro_batches"] == 2
    # that of a model that is its own reference
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_trl_sft_then_dpo_and_sft_again_to_the_same_weights(
    place: Path, chain: dict[str, Any]
) -> None:
    words = ("pipeline", str(CONFIGS / "pipeline.yaml"), *SHORT)
    sft, dpo = chain["data"]["stages"]
    assert (sft["status"], dpo["status"]) == ("passed", "passed")
    assert dpo["model"] == str(place / "build" / "demo" / "sft")
    assert Path(chain["data"]["report"]).stat().st_size > 10_000
    code, told = launch(place, *words)
    assert [one["status"] for one in told["data"]["stages"]] == ["skipped", "skipped"]
    assert code == 0 and told["data"]["stages"][0]["run"] == sft["run"]
    # trained again to the same weights: a real trainer's too are known by content
    shutil.rmtree(place / "build" / "demo" / "sft")
    code, told = launch(place, *words)
    assert [one["status"] for one in told["data"]["stages"]] == ["passed", "skipped"], told


FEW = ("max_train_steps=3", "expect.trend=any")


def outputs_of(commit: str) -> str:
    return f"oi/{commit[:8]}"


@pytest.fixture(scope="module")
def pinned(place: Path, known_commit: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Their SFT, the same again on its result, then their DPO: the words, and what these answered."""
    outputs = outputs_of(known_commit)
    (place / f"chain-{known_commit}.yaml").write_text(
        "gpus: 0\nstages:\n"
        f"  - {{name: one, config: {CONFIGS}/sft_open_instruct.yaml, with: {{output_dir: {outputs}/one}}}}\n"
        f"  - {{name: two, config: {CONFIGS}/sft_open_instruct.yaml, from: one,\n"
        f"     with: {{output_dir: {outputs}/two, seed: 7}}}}\n"
        f"  - {{name: dpo, config: {CONFIGS}/dpo_open_instruct.yaml, from: two,\n"
        f"     with: {{output_dir: {outputs}/dpo}}}}\n"
    )
    short = [f"{name}.{key}" for name in ("one", "two", "dpo") for key in FEW]
    words = ("pipeline", f"chain-{known_commit}.yaml", *short)
    code, told = launch(place, *words)
    assert code == 0, told
    return words, told


@needs_open_instruct
def test_the_pinned_scripts_take_each_others_folders(
    place: Path, pinned: tuple[tuple[str, ...], dict[str, Any]]
) -> None:
    words, told = pinned
    one, two, dpo = told["data"]["stages"]
    assert [two["model"], dpo["model"]] == [one["output"], two["output"]]
    # the pinned SFT asks the hub for a snapshot of the folder; the probe answers
    supplied = {event["what"] for event in events(two["run"], "supplied")}
    assert "snapshot_download" in supplied
    # it began where the first one ended, with a template that every tokenizer of the chain holds
    losses = [events(stage["run"], "step") for stage in (one, two)]
    assert losses[1][0]["loss"] < losses[0][0]["loss"]
    kept = {
        (Path(stage["output"]) / "chat_template.jinja").read_text() for stage in (one, two, dpo)
    }
    assert len(kept) == 1
    code, told = launch(place, *words)
    assert (code, [one["status"] for one in told["data"]["stages"]]) == (0, ["skipped"] * 3)


@needs_open_instruct
def test_the_pinned_dpo_runs_on_the_sft_result(
    pinned: tuple[tuple[str, ...], dict[str, Any]],
) -> None:
    run = pinned[1]["data"]["stages"][2]["run"]
    points = seen(run)
    assert (points["dataset_cache"], points["reference_cache"]) == ("miss", "miss")
    assert events(run, "step")[0]["loss"] == pytest.approx(0.6931, abs=2e-3)
    assert verdict(run)["metrics"]["first_loss"] == pytest.approx(0.6931, abs=2e-3)
    assert "process_group" in {event["what"] for event in events(run, "supplied")}


@needs_open_instruct
def test_the_pinned_finetune_runs_and_hits_its_cache_the_second_time(
    place: Path, known_commit: str, pinned: tuple[tuple[str, ...], dict[str, Any]]
) -> None:
    first = pinned[1]["data"]["stages"][0]
    run = Path(first["run"])
    assert seen(str(run)) | {"trend": ""} == {
        "liger": "off", "packing": "off", "attention": "sdpa", "positions": "exact", "batch": "planned",
        "dataset_cache": "miss", "data": "as_planned",
        "loss": "finite", "gradients": "true", "trend": "", "memory": "ok", "finish": "completed",
        "weights": "moved", "model": "saved", "inputs": "same",
    }  # fmt: skip
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["upstream"]["pinned"] is True
    assert manifest["upstream"]["version"] == known_commit
    assert manifest["args"]["logging_steps"]["value"] == 1
    assert "snapshot_download" in {event["what"] for event in events(str(run), "supplied")}

    config = str(CONFIGS / "sft_open_instruct.yaml")
    words = ("sft", config, f"output_dir={outputs_of(known_commit)}/one", *FEW, "--gpus", "0")
    code, answer = launch(place, *words, "--fresh")
    assert code == 0, answer
    assert states(answer)["dataset_cache"] == "hit"
    assert answer["data"]["run"] != str(run), "a run of its own, beside the old one"

    code, answer = launch(place, *words)
    assert code == 0, answer
    assert "already-finished" in [found["code"] for found in answer["findings"]]
    assert not (run / "console.2.log").exists()
