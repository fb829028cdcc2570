"""Real hits and misses: the pinned DPO script meets a retrained model and edited data."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from real_answers import Answer, launch, succeed
from real_training import CONFIGS, needs_open_instruct, needs_training

pytestmark = [pytest.mark.slow, *needs_training]

MODEL = "build/demo/model/model.safetensors"
DATA = "build/demo/data/dpo/train.jsonl"


@pytest.fixture
def place(demo_assets: Path, tmp_path: Path) -> Path:
    """A folder to launch from, with the demo's model and eight of its pairs."""
    shutil.copytree(demo_assets, tmp_path / "build" / "demo")
    data = tmp_path / DATA
    rows = data.read_text().splitlines(keepends=True)
    data.write_text("".join(rows[:8]))
    return tmp_path


def write_with_old_times(path: Path, content: bytes) -> None:
    """Other bytes in a file that keeps its size and the time of its last write."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def start_dpo(place: Path, name: str) -> Answer:
    """Train one step; the run of each name has its own output folder."""
    config = str(CONFIGS / "dpo_open_instruct.yaml")
    overrides = (
        "model_name_or_path=build/demo/model",
        f"mixer_list=[{DATA}, '1.0']",
        f"output_dir=out/{name}",
        "batch.global=8",
        "batch.per_device=8",
        "max_train_steps=1",
        "expect.trend=any",
    )
    return launch(place, "dpo", config, "--gpus", "0", *overrides)


def require(answer: Answer, *, dataset: str, reference: str) -> None:
    assert answer.states["dataset_cache"] == dataset
    assert answer.states["reference_cache"] == reference


def explain(place: Path, answer: Answer) -> Any:
    """Why each cache was hit or missed."""
    reasons = succeed(place, "cache", "why", answer.run.name).data
    return {reason["kind"]: reason for reason in reasons}


@needs_open_instruct
def test_dpo_never_meets_a_stale_cache(place: Path) -> None:
    require(start_dpo(place, "first"), dataset="miss", reference="miss")

    # written back unchanged
    for path in (place / DATA, place / MODEL):
        path.write_bytes(path.read_bytes())
    same = start_dpo(place, "same")
    require(same, dataset="hit", reference="hit")
    for reason in explain(place, same).values():
        assert "the same content" in reason["text"]

    weights = (place / MODEL).read_bytes()
    write_with_old_times(place / MODEL, weights[:-4096] + bytes(4096))
    retrained = start_dpo(place, "retrained")
    require(retrained, dataset="hit", reference="miss")
    differences = explain(place, retrained)["reference"]["differences"]
    assert [difference["what"] for difference in differences] == [MODEL]

    pairs = (place / DATA).read_bytes()
    write_with_old_times(place / DATA, pairs.replace(b" the ", b" thy "))
    require(start_dpo(place, "edited"), dataset="miss", reference="miss")
