"""What the plan says of a run stands in its record, before it starts and where it ran out of memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPOSITORY

from launcher import forecast, preparation, series, start
from launcher.devices import Devices, Slot
from launcher.lengths import Lengths
from launcher.machine import Gpu
from launcher.preparation import Prepared, Request
from launcher.rundir import RunFolder

TULU = REPOSITORY / "configs" / "tulu" / "sft_qwen7b_25pct.yaml"
OOM = (
    "[rank1]: Traceback (most recent call last):\n"
    '[rank1]:   File "finetune.py", line 900, in main\n'
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 1 has a total "
    "capacity of 79.00 GiB of which 2.00 GiB is free.\n"
)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """Two cards of 80 GB, rows of a known length, nothing started."""
    monkeypatch.setenv("LAUNCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    known = Lengths(mean=302.0, longest=1104, source="told", rows=235_000)
    monkeypatch.setattr(forecast, "row_lengths", lambda *_: known)
    cards = [
        Gpu(index=n, uuid=f"GPU-{n}", name="NVIDIA H100 80GB HBM3", memory_mib=81559, used_mib=0,
            driver="580")
        for n in range(2)
    ]  # fmt: skip
    told = preparation.prepare(Request(stage="sft", config=TULU, gpus=2), running=False)
    return replace(told, devices=Devices(slots=tuple(Slot(str(g.index), g) for g in cards)))


def test_what_does_not_fit_is_said_before_a_gpu_works(prepared: Prepared) -> None:
    told = forecast.with_forecast(prepared)
    assert told.forecast is not None
    assert told.forecast["memory_gib"]["peak"] == pytest.approx(85.2, rel=0.05)
    assert told.forecast["fits"] is False
    assert "out-of-memory" in {one.code for one in told.warnings}
    # said once
    assert len(forecast.with_forecast(told).warnings) == len(told.warnings)


def test_without_row_lengths_nothing_is_foreseen(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HF_HOME", "/nonexistent")
    assert forecast.with_forecast(prepared) is prepared


def test_the_plan_stands_beside_what_was_measured(prepared: Prepared, tmp_path: Path) -> None:
    told = forecast.with_forecast(prepared)
    record = told.for_record()
    assert record["plan"]["per_device"] == prepared.plan.per_device
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"stage": "sft", **record}))
    planned = series.planned(series.read_folder(tmp_path / "run"))
    assert planned["peak_gib"] == pytest.approx(85.2, rel=0.05)
    assert planned["tokens_per_step"] == pytest.approx(128 * 302, rel=0.02)
    assert planned["hours"] is not None and planned["steps"] == 2 * -(-939_343 // 4 // 128)


def test_out_of_memory_is_explained_by_the_plan(prepared: Prepared, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "20260101T000000Z-sft-x")
    folder.path.mkdir(parents=True)
    record = {
        "stage": "sft",
        "backend": "open_instruct",
        **forecast.with_forecast(prepared).for_record(),
    }
    folder.manifest.write_text(json.dumps(record))
    folder.console(1).write_text(OOM)
    point = start.finish(folder).point("memory")
    assert point.state == "oom"
    assert str(point.detail["reason"]).startswith("the plan said 85")
    assert "optimizer" in str(point.detail["reason"]) and point.detail["help"]
