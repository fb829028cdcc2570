"""Stages that train on each other's models, on the CPU: TRL, and the pinned scripts."""

import json
import shutil
from pathlib import Path

import pytest
from real_answers import Answer, find_point, launch, succeed, supplied
from real_training import CONFIGS, needs_open_instruct, needs_training, states
from real_training import known_commit as known_commit  # a fixture
from real_training import place as place  # a fixture
from recorded_events import read_events, read_lines

from launcher.upstream.open_instruct import PIN

pytestmark = [pytest.mark.slow, *needs_training]

LN_2 = 0.6931
"""The first loss of DPO: that of a model that is its own reference."""
TRL_PIPELINE = (
    "pipeline", str(CONFIGS / "pipeline.yaml"),
    "sft.batch.global=4", "sft.batch.per_device=4", "sft.max_steps=12", "sft.logging_steps=1",
    "dpo.batch.global=4", "dpo.batch.per_device=2", "dpo.max_steps=2", "dpo.logging_steps=1",
    "dpo.expect.trend=any",
)  # fmt: skip
FEW_STEPS = ("max_train_steps=3", "expect.trend=any")


def read_verdict(run: Path) -> dict[str, object]:
    verdict: dict[str, object] = json.loads((run / "verdict.json").read_text())
    return verdict


def read_states(run: Path) -> dict[str, str]:
    return states({"data": read_verdict(run)})


def statuses(answer: Answer) -> list[str]:
    return [stage["status"] for stage in answer.data["stages"]]


def run_of(answer: Answer, stage: int) -> Path:
    return Path(answer.data["stages"][stage]["run"])


@pytest.fixture(scope="module")
def chain(place: Path) -> Answer:
    """The demo's SFT, then its DPO."""
    return succeed(place, *TRL_PIPELINE)


def test_trl_sft_passes_with_every_point_proved(chain: Answer) -> None:
    run = run_of(chain, 0)
    verdict = read_verdict(run)
    assert verdict["status"] == "pass"
    assert verdict["steps"] == 12
    expected = {
        "attention": "sdpa",
        "dataset_cache": "miss",
        "trend": "falling",
        "weights": "moved",
        "model": "saved",
        "inputs": "same",
        "finish": "completed",
    }
    assert expected.items() <= read_states(run).items()
    assert find_point(verdict, "trend")["detail"]["losses"] == 12


def test_the_metrics_have_a_row_for_each_step(chain: Answer) -> None:
    run = run_of(chain, 0)
    rows = read_lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(row["tokens"] <= row["positions"] for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (run / "report.html").is_file()


def test_the_recorded_loss_is_that_of_the_step_whatever_the_accumulation(chain: Answer) -> None:
    first = read_events(run_of(chain, 1) / "probe", "step")[0]
    assert first["micro_batches"] == 2
    assert first["loss"] == pytest.approx(LN_2, abs=1e-3)


def test_a_model_that_was_changed_after_the_run_fails(place: Path, chain: Answer) -> None:
    run = run_of(chain, 0)
    weights = place / "build" / "demo" / "sft" / "model.safetensors"
    trained = weights.read_bytes()
    shutil.copy(place / "build" / "demo" / "model" / "model.safetensors", weights)
    changed = launch(place, "check", run.name)
    weights.unlink()
    missing = launch(place, "check", run.name)
    weights.write_bytes(trained)

    assert changed.outcome == missing.outcome == (1, "fail")
    assert changed.states["model"] == "changed"
    assert missing.states["model"] == "missing"
    assert launch(place, "check", run.name).states["model"] == "saved"


def test_a_stage_trained_again_to_the_same_weights_leaves_the_next_one_valid(
    place: Path, chain: Answer
) -> None:
    sft, dpo = chain.data["stages"]
    assert statuses(chain) == ["passed", "passed"]
    assert dpo["model"] == str(place / "build" / "demo" / "sft")
    assert Path(chain.data["report"]).stat().st_size > 10_000

    again = succeed(place, *TRL_PIPELINE)
    assert statuses(again) == ["skipped", "skipped"]
    assert again.data["stages"][0]["run"] == sft["run"]

    shutil.rmtree(place / "build" / "demo" / "sft")
    assert statuses(launch(place, *TRL_PIPELINE)) == ["passed", "skipped"]


def outputs_of(commit: str) -> str:
    return f"oi/{commit[:8]}"


def pinned_pipeline(place: Path, commit: str) -> tuple[str, ...]:
    """The words of a pipeline: open-instruct's SFT, then its DPO."""
    outputs = outputs_of(commit)
    path = place / f"chain-{commit}.yaml"
    path.write_text(
        "gpus: 0\n"
        "stages:\n"
        f"- name: sft\n"
        f"  config: {CONFIGS}/sft_open_instruct.yaml\n"
        f"  with: {{output_dir: {outputs}/sft}}\n"
        f"- name: dpo\n"
        f"  config: {CONFIGS}/dpo_open_instruct.yaml\n"
        f"  from: sft\n"
        f"  with: {{output_dir: {outputs}/dpo}}\n"
    )
    short = [f"{stage}.{word}" for stage in ("sft", "dpo") for word in FEW_STEPS]
    return ("pipeline", path.name, *short, "sft.samples=1")


@pytest.fixture(scope="module")
def pinned(place: Path, known_commit: str) -> Answer:
    """The pinned SFT, then the pinned DPO on its result."""
    return succeed(place, *pinned_pipeline(place, known_commit))


@needs_open_instruct
def test_the_pinned_sft_runs_with_every_point_proved(pinned: Answer, known_commit: str) -> None:
    run = run_of(pinned, 0)
    points = read_states(run)
    # of so few steps
    points.pop("trend")
    assert points == {
        "liger": "off", "packing": "off", "attention": "sdpa", "positions": "exact",
        "batch": "planned", "dataset_cache": "miss", "data": "as_planned", "loss": "finite",
        "gradients": "true", "memory": "ok", "finish": "completed", "weights": "moved",
        "model": "saved", "inputs": "same",
    }  # fmt: skip
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["upstream"]["pinned"] is True
    assert manifest["upstream"]["version"] == known_commit
    assert manifest["args"]["logging_steps"]["value"] == 1
    # the pinned SFT asks the hub for a snapshot of the folder; the probe answers
    assert "snapshot_download" in supplied(run)


@needs_open_instruct
def test_the_pinned_dpo_runs_on_the_model_of_the_pinned_sft(pinned: Answer) -> None:
    sft, dpo = pinned.data["stages"]
    assert dpo["model"] == sft["output"]
    templates = []
    for stage in (sft, dpo):
        templates.append((Path(stage["output"]) / "chat_template.jinja").read_text())
    assert templates[0] == templates[1]

    run = Path(dpo["run"])
    points = read_states(run)
    assert points["dataset_cache"] == "miss"
    assert points["reference_cache"] == "miss"
    first, *_ = read_events(run / "probe", "step")
    assert first["loss"] == pytest.approx(LN_2, abs=2e-3)
    assert "process_group" in supplied(run)


@needs_open_instruct
@pytest.mark.parametrize("known_commit", [PIN], indirect=True)
def test_the_model_of_open_instruct_answers(place: Path, pinned: Answer) -> None:
    run = run_of(pinned, 0)
    samples = json.loads((run / "samples.json").read_text())
    assert samples["failed"] is None
    assert samples["from"] == "rows that were trained on"
    words = ("chat", run.name, "--prompt", "What is a list?", "--max-new-tokens", "8")
    assert succeed(place, *words).data["chat_template"] is True


@needs_open_instruct
@pytest.mark.parametrize("known_commit", [PIN], indirect=True)
def test_the_pinned_sft_hits_its_cache_and_is_not_repeated(
    place: Path, known_commit: str, pinned: Answer
) -> None:
    assert statuses(succeed(place, *pinned_pipeline(place, known_commit))) == ["skipped"] * 2

    config = str(CONFIGS / "sft_open_instruct.yaml")
    output = f"output_dir={outputs_of(known_commit)}/sft"
    words = ("sft", config, output, *FEW_STEPS, "--gpus", "0")
    fresh = succeed(place, *words, "--fresh")
    assert fresh.states["dataset_cache"] == "hit"
    assert fresh.run != run_of(pinned, 0)

    again = succeed(place, *words)
    assert again.finding("already-finished")
    assert not (run_of(pinned, 0) / "console.2.log").exists()
