"""How busy the machine is while a run trains: sampled by the supervisor, drawn on the page."""

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_world import World, made, until

from launcher.cli import main
from launcher.lifecycle import usage as sampling
from launcher.machine import usage as meters
from launcher.report import usage as drawing
from launcher.runs import usage
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder

GPU = "GPU-0a1b"


class Nvml(types.ModuleType):
    """NVIDIA's library for a machine with two cards, the second of which tells nothing but its memory."""

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
        self.require(handle)
        return types.SimpleNamespace(gpu=93)

    def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:
        return types.SimpleNamespace(used=3 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self.require(handle)
        return 650_000

    def nvmlDeviceGetTemperature(self, handle: int, _: int) -> int:
        self.require(handle)
        return 61

    def require(self, handle: int) -> None:
        if handle:
            raise RuntimeError("Not Supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, meters.NVML, Nvml(meters.NVML))


def attempt(number: int = 1, **changes: Any) -> Attempt:
    given: dict[str, Any] = {
        "number": number, "argv": ("true",), "env": {}, "environ": {}, "cwd": "/", "stage": "sft", "backend": "trl",
        "title": "sft", **changes,
    }  # fmt: skip
    return Attempt(**given)


def sampled(folder: Path, *attempts: Attempt) -> list[usage.UsageSample]:
    run = RunFolder(folder)
    for one in attempts:
        before = len(usage.read_usage(run))
        thread = sampling.UsageThread(run, one, look_s=0.01)
        thread.start()
        until(lambda before=before: len(usage.read_usage(run)) >= before + 3)
        thread.end()
        assert not thread.thread.is_alive()
    return usage.read_usage(run)


def test_without_a_gpu_the_host_alone_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, meters.NVML, None)
    samples = sampled(tmp_path, attempt())
    assert all(sample.gpus == () for sample in samples)
    last = samples[-1]
    assert last.memory_gib is not None and last.memory_total_gib is not None
    assert 0 < last.memory_gib < last.memory_total_gib
    assert "gpus" not in json.loads((tmp_path / "usage.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("given", "cards"),
    [
        ({"devices": (GPU,)}, [0]),
        ({}, [0, 1]),
        # a training on the CPU
        ({"env": {"CUDA_VISIBLE_DEVICES": ""}}, []),
        ({"devices": ("GPU-of-another-machine",)}, []),
    ],
)
@pytest.mark.usefixtures("nvml")
def test_the_gpus_of_the_run_are_sampled(
    tmp_path: Path, given: dict[str, Any], cards: list[int]
) -> None:
    sample = sampled(tmp_path, attempt(**given))[-1]
    assert [gpu.index for gpu in sample.gpus] == cards
    for gpu in sample.gpus:
        expected = (0.93, 3.0, 650.0, 61.0) if gpu.index == 0 else (None, 3.0, None, None)
        assert (gpu.busy, gpu.memory_gib, gpu.power_w, gpu.celsius) == expected


def test_a_folder_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    thread = sampling.UsageThread(RunFolder(tmp_path / "gone"), attempt(), look_s=0.01)
    thread.start()
    thread.end()
    assert not thread.thread.is_alive()


def test_long_runs_are_sampled_at_longer_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(float(5 * number) for number in range(10**6))
    monkeypatch.setattr(sampling.time, "monotonic", lambda: next(clock))
    thread = sampling.UsageThread(RunFolder(tmp_path), attempt())
    # a week of looks
    left = iter(range(7 * 24 * 3600 // 5))
    monkeypatch.setattr(thread.over, "wait", lambda _: next(left, None) is None)
    thread._sample()
    assert (tmp_path / "usage.jsonl").stat().st_size < 600_000


@pytest.mark.usefixtures("nvml")
def test_damaged_lines_are_left_out_and_the_rest_is_drawn(tmp_path: Path) -> None:
    sampled(tmp_path, attempt(devices=(GPU,)), attempt(2, devices=(GPU,)))
    with (tmp_path / "usage.jsonl").open("a") as stream:
        stream.write('{"t": "now"}\n{"t": 1e300}\n[1]\n{"t": 5, "cpu"')
    samples = usage.read_usage(RunFolder(tmp_path))
    assert {sample.attempt for sample in samples} == {1, 2}
    titles = [chart.title for chart in drawing._charts(samples) if chart.lines]
    assert titles == ["GPU busy", "GPU memory", "GPU power", "processor busy", "host memory"]


def test_a_line_is_broken_where_nobody_sampled() -> None:
    points = [drawing.UsagePoint(seconds, 1.0) for seconds in (0.0, 5.0, 10.0, 900.0, 905.0)]
    assert [len(stretch) for stretch in drawing._split_at_gaps(points)] == [3, 2]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    root = tmp_path / "world"
    with made(root / "unused"):
        yield World(root)


@pytest.mark.slow
def test_the_supervisor_samples_and_the_page_shows_it(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = world.prepared("step=1", "sleep=12", env={"CUDA_VISIBLE_DEVICES": ""})
    world.launch("exec", "a run")
    assert len(usage.read_usage(folder)) >= 2
    for name, value in world.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(world.root)
    assert main.main(["report", str(folder.path)]) == 0
    capsys.readouterr()
    page = folder.report.read_text()
    assert '<h2 id="machine">' in page
    assert 'aria-label="processor busy over' in page and "GPU busy" not in page
    # removed with the run
    assert world.launch("rm", str(folder.path), "--yes").returncode == 0
    assert not folder.path.exists()
