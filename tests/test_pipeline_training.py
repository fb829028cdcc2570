"""Real training in a chain, on the CPU: TRL, and the pinned scripts fed with each other's folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_training import CONFIGS, TRAINING, launch, missing, needs_open_instruct, place

__all__ = ["place"]  # a fixture

pytestmark = [
    pytest.mark.training,
    pytest.mark.skipif(
        bool(missing(TRAINING)), reason=f"no training packages: {', '.join(missing(TRAINING))}"
    ),
]


def events(run: str, name: str) -> list[dict[str, Any]]:
    record = Path(run) / "probe" / "rank-0.jsonl"
    told = [json.loads(line) for line in record.read_text().splitlines()]
    return [event for event in told if event["event"] == name]


def test_trl_sft_then_dpo_and_again_with_another_first_stage(place: Path) -> None:
    short = ("sft.max_steps=6", "dpo.max_steps=2", "sft.expect.trend=any", "dpo.expect.trend=any")
    words = ("pipeline", str(CONFIGS / "pipeline.yaml"), *short, "dpo.logging_steps=1")
    code, told = launch(place, *words)
    assert code == 0, told
    sft, dpo = told["data"]["stages"]
    assert (sft["status"], dpo["status"]) == ("passed", "passed")
    assert dpo["model"] == str(place / "build" / "demo" / "sft")
    # the loss of a model that is its own reference
    assert events(dpo["run"], "step")[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert Path(told["data"]["report"]).stat().st_size > 10_000
    code, told = launch(place, *words)
    assert [one["status"] for one in told["data"]["stages"]] == ["skipped", "skipped"]
    assert code == 0 and told["data"]["stages"][0]["run"] == sft["run"]
    # trained again to the same weights: a real trainer's too are known by content
    shutil.rmtree(place / "build" / "demo" / "sft")
    code, told = launch(place, *words)
    assert [one["status"] for one in told["data"]["stages"]] == ["passed", "skipped"], told
    code, told = launch(place, *words, "sft.seed=3")
    sft, dpo = told["data"]["stages"]
    assert (code, sft["status"], dpo["status"]) == (0, "passed", "passed")
    assert Path(dpo["model"]) == place / "build" / "demo" / "sft-2"
    assert Path(dpo["output"]) == place / "build" / "demo" / "dpo-2"


@needs_open_instruct
def test_the_pinned_scripts_take_each_others_folders(place: Path) -> None:
    (place / "chain.yaml").write_text(
        "gpus: 0\nstages:\n"
        f"  - {{name: one, config: {CONFIGS}/sft_open_instruct.yaml, with: {{output_dir: oi/one}}}}\n"
        f"  - {{name: two, config: {CONFIGS}/sft_open_instruct.yaml, from: one,\n"
        "     with: {output_dir: oi/two, seed: 7}}\n"
        f"  - {{name: dpo, config: {CONFIGS}/dpo_open_instruct.yaml, from: two,\n"
        "     with: {output_dir: oi/dpo}}\n"
    )
    short = [f"{name}.{key}" for name in ("one", "two", "dpo")
             for key in ("max_train_steps=3", "expect.trend=any")]  # fmt: skip
    code, told = launch(place, "pipeline", "chain.yaml", *short)
    assert code == 0, told
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
    assert events(dpo["run"], "step")[0]["loss"] == pytest.approx(0.6931, abs=2e-2)
    code, told = launch(place, "pipeline", "chain.yaml", *short)
    assert (code, [one["status"] for one in told["data"]["stages"]]) == (0, ["skipped"] * 3)


def test_an_adapter_is_refused_before_anything_starts(place: Path) -> None:
    words = (
        "sft.use_peft=true",
        "sft.lora_target_modules=[q_proj]",
        "sft.output_dir=build/demo/lora",
    )
    config = str(CONFIGS / "pipeline.yaml")
    code, told = launch(place, "pipeline", config, *words, "dpo.model_name_or_path=build/demo/lora")
    assert code == 3
    assert "pipeline-adapter" in {f["code"] for f in told["findings"]}
