"""How busy the machine is while a run trains: sampled by the supervisor, drawn on the page."""

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_world import World, open_world, wait_until
from made_runs import write_run

from launcher.cli import main
from launcher.lifecycle import usage as sampling
from launcher.machine import usage as meters
from launcher.report import usage as drawing
from launcher.runs import usage
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder
from launcher.runs.usage import UsageSample

GPU = "GPU-0a1b"


class Nvml(types.ModuleType):
    """NVIDIA's library for two cards, the second of which tells nothing but its memory."""

    NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {GPU: 0}[name]

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.require_first(handle)
        return types.SimpleNamespace(gpu=93)

    def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:
        return types.SimpleNamespace(used=3 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self.require_first(handle)
        return 650_000

    def nvmlDeviceGetTemperature(self, handle: int, _: int) -> int:
        self.require_first(handle)
        return 61

    def require_first(self, handle: int) -> None:
        if handle:
            raise RuntimeError("Not Supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, meters.NVML, Nvml(meters.NVML))


def make_attempt(number: int = 1, **changes: Any) -> Attempt:
    settings = {"argv": ("true",), "env": {}, "environ": {}, "cwd": "/", **changes}
    return Attempt(number=number, stage="sft", backend="trl", title="sft", **settings)


def take_samples(folder: Path, attempt: Attempt) -> list[UsageSample]:
    """Sample until there are three more samples; returns all of the folder."""
    run = RunFolder(folder)
    enough = len(usage.read_usage(run)) + 3
    thread = sampling.UsageThread(run, attempt, look_s=0.01)
    thread.start()
    wait_until(lambda: len(usage.read_usage(run)) >= enough)
    thread.end()
    assert not thread.thread.is_alive()
    return usage.read_usage(run)


def test_without_a_gpu_the_host_alone_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, meters.NVML, None)
    last = take_samples(tmp_path, make_attempt())[-1]
    assert last.gpus == ()
    assert last.memory_gib is not None
    assert last.memory_total_gib is not None
    assert 0 < last.memory_gib < last.memory_total_gib
    line = (tmp_path / "usage.jsonl").read_text().splitlines()[-1]
    assert "gpus" not in json.loads(line)


@pytest.mark.parametrize(
    ("changes", "cards"),
    [
        pytest.param({"devices": (GPU,)}, [0], id="the card of the run"),
        pytest.param({}, [0, 1], id="all cards"),
        pytest.param({"env": {"CUDA_VISIBLE_DEVICES": ""}}, [], id="on the CPU"),
        pytest.param({"devices": ("GPU-of-another-machine",)}, [], id="a card that is not here"),
    ],
)
@pytest.mark.usefixtures("nvml")
def test_the_gpus_of_the_run_are_sampled(
    tmp_path: Path, changes: dict[str, Any], cards: list[int]
) -> None:
    sample = take_samples(tmp_path, make_attempt(**changes))[-1]
    figures = {}
    for gpu in sample.gpus:
        figures[gpu.index] = (gpu.busy, gpu.memory_gib, gpu.power_w, gpu.celsius)
    expected = {0: (0.93, 3.0, 650.0, 61.0), 1: (None, 3.0, None, None)}
    assert figures == {index: expected[index] for index in cards}


def test_a_folder_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    thread = sampling.UsageThread(RunFolder(tmp_path / "gone"), make_attempt(), look_s=0.01)
    thread.start()
    thread.end()
    assert not thread.thread.is_alive()


def test_long_runs_are_sampled_at_longer_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10**8, 5))
    looks_of_a_week = iter(range(7 * 24 * 3600 // 5))
    monkeypatch.setattr(sampling.time, "monotonic", lambda: float(next(clock)))
    thread = sampling.UsageThread(RunFolder(tmp_path), make_attempt())
    monkeypatch.setattr(thread.over, "wait", lambda _: next(looks_of_a_week, None) is None)
    thread._sample_until_over()
    assert (tmp_path / "usage.jsonl").stat().st_size < 600_000


@pytest.mark.usefixtures("nvml")
def test_damaged_lines_are_left_out_and_the_rest_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(write_run(tmp_path / "runs" / "a run"))
    take_samples(folder.path, make_attempt(1, devices=(GPU,)))
    with folder.usage.open("a") as stream:
        stream.write('{"t": "now"}\n{"t": 1e300}\n[1]\n{"t": 5, "cpu"\n')
    samples = take_samples(folder.path, make_attempt(2, devices=(GPU,)))
    assert {sample.attempt for sample in samples} == {1, 2}

    assert main.main(["report", str(folder.path)]) == 0
    page = folder.report.read_text()
    assert '<h2 id="machine">' in page
    for chart in ("GPU busy", "GPU memory", "GPU power", "processor busy", "host memory"):
        assert f'aria-label="{chart} over' in page


def test_a_line_is_broken_where_nobody_sampled() -> None:
    points = [drawing.UsagePoint(seconds, 1.0) for seconds in (0.0, 5.0, 10.0, 900.0, 905.0)]
    assert [len(stretch) for stretch in drawing._split_at_gaps(points)] == [3, 2]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        yield world


@pytest.mark.slow
def test_the_supervisor_samples_until_the_training_ends(world: World) -> None:
    record = world.runs / "a run" / "usage.jsonl"
    folder = world.prepared(f"wait={record}", "exit=0", env={"CUDA_VISIBLE_DEVICES": ""})
    world.launch("exec", "a run")
    assert len(usage.read_usage(folder)) >= 1

    assert world.launch("rm", "a run", "--yes").returncode == 0
    assert not folder.path.exists()
