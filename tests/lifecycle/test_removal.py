"""`launch rm`: what the records say that a run wrote goes, whatever else lies there stays."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_runs
import pytest
import saved
from conftest import PATIENCE_S
from fake_world import World, made, until

from launcher import files
from launcher.runs import inventory, lease, outputs, rundir
from launcher.runs.rundir import RunFolder

MODEL = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with made(tmp_path / "world") as world:
        world.environ["HOME"] = str(world.root / "home")
        for name in ("HOME", "LAUNCH_RUNS", "XDG_STATE_HOME"):
            monkeypatch.setenv(name, world.environ[name])
        yield world


def out(world: World) -> Path:
    return world.root / "out"


def trained(
    world: World,
    *steps: str,
    name: str = "20260101T000000Z-sft-a",
    output: Path | None = None,
    **changes: Any,
) -> RunFolder:
    """A run that has saved a model, to its end."""
    output = output or out(world)
    steps = steps or (f"checkpoint={output}:2", f"model={output}")
    folder = world.prepared(*steps, name=name, output=str(output), **changes)
    rundir.register("runs", folder.path)
    world.launch("exec", str(folder.path))
    return folder


def again(world: World, folder: RunFolder, *steps: str) -> None:
    """A further attempt of a run into the same output."""
    number = folder.attempts() + 1
    world.prepared(*steps, name=folder.path.name, output=str(out(world)), number=number)
    world.launch("exec", str(folder.path))


def removed(world: World, folder: RunFolder, *words: str) -> subprocess.CompletedProcess[str]:
    return world.launch("rm", str(folder.path), "--model", "--yes", *words)


def names(folder: Path) -> list[str]:
    """All below a folder that is no folder itself; links are not followed."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    )


def test_all_that_a_run_wrote_goes(world: World) -> None:
    folder = trained(world)
    assert {*MODEL, "checkpoint-2/optimizer.pt", ".cache/huggingface/launch/lease-1.json"} < {
        *names(out(world))
    }
    done = removed(world, folder)
    assert done.returncode == 0, done.stderr
    assert not out(world).exists()
    assert not folder.path.exists()
    assert "kept" not in done.stdout


def test_what_goes_is_shown_with_sizes_before_it_is_asked_for(world: World) -> None:
    folder = trained(world)
    (out(world) / "notes.md").write_text("mine")
    asked = world.launch("rm", str(folder.path), "--model")
    assert asked.returncode == 2
    assert f"{out(world)} (3 files, " in asked.stderr
    assert f"{out(world)}/checkpoint-2 (7 files, " in asked.stderr
    assert f"kept in {out(world)}: 1 file that this run did not write (notes.md)" in asked.stderr
    assert folder.path.is_dir() and (out(world) / "config.json").exists()
    done = removed(world, folder, "--format", "json")
    data = json.loads(done.stdout)["data"]
    assert data["removed"] == [str(folder.path), str(out(world))]
    assert "notes.md" in data["kept"][0]


def test_own_files_of_before_and_after_are_kept(world: World) -> None:
    output = out(world)
    (output / "checkpoint-1").mkdir(parents=True)
    mine = {"thesis.txt", "README.md", "merges.txt", "checkpoint-1/model.safetensors"}
    for name in mine:
        (output / name).write_text("mine")
    folder = trained(world)
    later = {
        "eval_results.json",
        "checkpoint-2/samples.json",
        "all_results.json",
        "checkpoint-3/optimizer.pt",
    }
    (output / "checkpoint-3").mkdir()
    for name in later:
        (output / name).write_text("mine too")
    done = removed(world, folder)
    assert done.returncode == 0, done.stderr
    assert {*names(output)} == mine | later
    assert "8 files that this run did not write" in done.stdout
    assert not folder.path.exists()


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def write_over(path: Path) -> None:
    status = path.stat()
    path.write_bytes(b"x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.write_bytes(b"y" * path.stat().st_size)
    os.utime(copy, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    copy.rename(path)


def to_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("change", [grow, write_over, replace, to_link])
def test_a_file_of_another_content_is_no_longer_the_runs(
    world: World, change: Callable[[Path], None]
) -> None:
    folder = trained(world)
    config = out(world) / "config.json"
    change(config)
    text = config.read_bytes()
    done = removed(world, folder)
    assert done.returncode == 0, done.stderr
    assert names(out(world)) == ["config.json"]
    assert config.read_bytes() == text
    assert "1 file that changed after this run wrote it (config.json)" in done.stdout


def test_what_only_got_another_mode_is_still_the_runs(world: World) -> None:
    folder = trained(world)
    for name in MODEL:
        (out(world) / name).chmod(0o640)
    os.link(out(world) / "model.safetensors", world.root / "backup")
    removed(world, folder)
    assert not out(world).exists()
    assert (world.root / "backup").is_file()


def test_every_attempt_counts(world: World) -> None:
    output = out(world)
    folder = trained(world, f"checkpoint={output}:2", "exit=1")
    (output / "notes.txt").write_text("between two attempts")
    (output / "README.md").write_text("between two attempts")
    again(world, folder, f"checkpoint={output}:4", f"model={output}")
    assert folder.attempts() == 2
    removed(world, folder)
    assert names(output) == ["README.md", "notes.txt"]


def test_a_run_killed_with_its_supervisor_leaves_what_came_before(world: World) -> None:
    output = out(world)
    output.mkdir()
    (output / "README.md").write_text("mine")
    folder = world.prepared(f"checkpoint={output}:2", "pid=leader", "sleep=600", output=str(output))
    watching = world.started("exec", str(folder.path))
    leader = world.pid("leader")
    until(folder.process.exists)
    keeper = rundir.read_json(folder.process)["keeper"]["pid"]
    for pid in (watching.pid, keeper, leader):
        os.kill(pid, signal.SIGKILL)
    watching.wait()
    world.quiet()
    record = inventory.read_inventory(folder, 1)
    assert record is not None and record.written is None
    # long after the last sign of life somebody puts a model there
    (output / "model.safetensors").write_text("mine")
    os.utime(output / "model.safetensors", (time.time() + 100,) * 2)
    done = removed(world, folder)
    assert done.returncode == 0, done.stderr
    assert names(output) == ["README.md", "model.safetensors"]


def older(world: World, output: Path) -> RunFolder:
    """A run of before launch recorded what it wrote: from 03:04 to 04:34 on 2 January 2026."""
    told = made_runs.manifest(output=str(output))
    folder = RunFolder(made_runs.made(world.runs / "20260102T030405Z-sft-older", told=told))
    saved.model(output)
    saved.trl(output, 2)
    for path in output.rglob("*"):
        os.utime(path, (1767326400, 1767326400))  # 2026-01-02T04:00:00Z
    return folder


def test_a_home_folder_survives_the_run_that_trained_into_it(world: World) -> None:
    home = Path(world.environ["HOME"])
    for name in ("Documents/thesis.tex", ".ssh/id", "runs/mine.txt", "model.bin"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("mine")
    folder = trained(world, f"model={home}", output=home)
    done = removed(world, folder)
    assert done.returncode == 0, done.stderr
    assert names(home) == [".ssh/id", "Documents/thesis.tex", "model.bin", "runs/mine.txt"]


def live(world: World, output: Path) -> RunFolder:
    """A run that trains into a folder now, whose own folder lies elsewhere."""
    environ = {**world.environ, "LAUNCH_RUNS": str(world.root / "others")}
    folder = world.prepared(
        "pid=other", "sleep=600", name="other", output=str(output), environ=environ
    )
    world.started("exec", str(folder.path), env={"LAUNCH_RUNS": environ["LAUNCH_RUNS"]})
    world.pid("other")
    return folder


@pytest.mark.parametrize("place", ["stage2", "checkpoint-2/deep/er", "."])
def test_beside_a_live_run_nothing_goes(world: World, place: str) -> None:
    folder = trained(world)
    inner = out(world) / place
    live(world, inner)
    before = names(out(world))
    done = removed(world, folder)
    assert done.returncode == 5
    assert "error[run-is-live]" in done.stderr
    # the live run may have added records meanwhile
    assert {*before} <= {*names(out(world))}
    assert folder.path.is_dir()


def test_nor_below_one(world: World) -> None:
    inner = out(world) / "inner"
    folder = trained(world, f"model={inner}", output=inner)
    live(world, out(world))
    done = removed(world, folder)
    assert done.returncode == 5
    assert "trains into" in done.stderr and "which lies above" in done.stderr
    assert (inner / "config.json").exists()


@pytest.mark.parametrize("leased", [True, False])
def test_a_finished_model_inside_or_above_stops_it(world: World, leased: bool) -> None:
    outer = trained(world)
    place = out(world) / "stage2"
    if leased:
        inner = trained(world, f"model={place}", name="20260101T000001Z-dpo-b", output=place)
        shutil.rmtree(world.root / "state")
    else:
        # of no lease, and in a runs folder that only the index knows
        told = made_runs.manifest(output=str(place))
        inner = RunFolder(
            made_runs.made(world.root / "elsewhere" / "20260101T000001Z-dpo-b", told=told)
        )
        rundir.register("runs", inner.path)
        saved.model(place)
    before = names(out(world))
    done = removed(world, outer)
    assert done.returncode == 2
    assert f"{place}, the output of {inner.path.name}, lies inside {out(world)}" in done.stderr
    done = removed(world, inner)
    assert done.returncode == 2
    assert f"the output of {outer.path.name}, lies above" in done.stderr
    assert names(out(world)) == before
    # the record of the outer run goes by itself, and after that the inner model can
    assert world.launch("rm", str(outer.path), "--yes").returncode == 0
    assert world.launch("rm", str(inner.path), "--yes", "--model").returncode == 0
    # of a run without a record of it, only what its time fits
    assert place.exists() is not leased
    assert {*MODEL} < {*names(out(world))}


def test_no_link_is_followed(world: World) -> None:
    precious = world.root / "precious"
    saved.model(precious)
    output = out(world)
    link = output / "checkpoint-9"
    folder = trained(world, f"model={output}", f"link={link}:{precious}")
    (output / "own").symlink_to(precious)
    done = removed(world, folder)
    assert done.returncode == 0, done.stderr
    assert names(precious) == [*MODEL]
    assert not link.is_symlink(), "the run made it"
    assert (output / "own").is_symlink()
    assert names(output) == ["own"]


def test_a_folder_that_became_a_link_is_not_entered(world: World) -> None:
    folder = trained(world)
    elsewhere = world.root / "elsewhere"
    (out(world) / "checkpoint-2").rename(elsewhere)
    (out(world) / "checkpoint-2").symlink_to(elsewhere)
    before = names(elsewhere)
    removed(world, folder)
    assert names(elsewhere) == before
    assert names(out(world)) == ["checkpoint-2"]


def test_an_output_that_became_a_link_is_not_entered(world: World) -> None:
    folder = trained(world)
    moved = world.root / "moved"
    out(world).rename(moved)
    out(world).symlink_to(moved)
    before = [name for name in names(moved) if "launch/" not in name]
    done = removed(world, folder)
    assert [name for name in names(moved) if "launch/" not in name] == before
    assert "in a folder that is not the one that this run wrote into" in done.stdout + done.stderr


def test_an_output_that_was_a_link_at_the_start_is_the_same_folder(world: World) -> None:
    real = world.root / "disk" / "out"
    real.mkdir(parents=True)
    out(world).symlink_to(real)
    folder = trained(world)
    done = removed(world, folder)
    assert done.returncode == 0, done.stderr
    assert names(real.parent) == []
    assert out(world).is_symlink()


def test_another_folder_under_its_name_is_not_the_runs(world: World) -> None:
    folder = trained(world)
    copy = world.root / "copy"
    shutil.copytree(out(world), copy)
    shutil.rmtree(out(world))
    copy.rename(out(world))
    removed(world, folder)
    assert {*MODEL} <= {*names(out(world))}


@contextlib.contextmanager
def bound(source: Path, target: Path) -> Iterator[None]:
    words = ["mount", "--bind", str(source), str(target)]
    try:
        done = subprocess.run(words, capture_output=True, timeout=PATIENCE_S)
    except OSError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


def test_no_mount_point_is_crossed(world: World) -> None:
    folder = trained(world)
    inside = out(world) / "checkpoint-2"
    same = world.root / "same"
    inside.rename(same)
    inside.mkdir()
    before = names(same)
    # of one file system: device and inodes are those of the record
    with bound(same, inside):
        done = removed(world, folder)
        assert done.returncode == 0, done.stderr
        assert names(same) == before
        assert "behind a mount point" in done.stdout


def test_an_output_under_a_second_name_is_found(world: World) -> None:
    outer = trained(world)
    second = world.root / "second"
    second.mkdir()
    with bound(out(world), second):
        live(world, second / "stage2")
        assert removed(world, outer).returncode == 5
        for pid in world.left():
            os.kill(pid, signal.SIGKILL)
    assert (out(world) / "config.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_others_stays(world: World) -> None:
    folder = trained(world)
    os.chown(out(world) / "config.json", 12345, 12345)
    os.chown(out(world), 12345, 12345)
    done = removed(world, folder)
    assert done.returncode == 2
    assert f"{out(world)} belongs to user 12345" in done.stderr
    os.chown(out(world), 0, 0)
    assert removed(world, folder).returncode == 0
    assert names(out(world)) == ["config.json"]


def test_own_files_in_a_run_folder_are_kept(world: World) -> None:
    folder = trained(world)
    (folder.path / "thoughts.md").write_text("mine")
    (folder.path / "plots").mkdir()
    (folder.path / "plots" / "loss.png").write_text("mine")
    done = removed(world, folder)
    assert done.returncode == 0, done.stderr
    assert names(folder.path) == ["plots/loss.png", "thoughts.md"]
    assert "2 files that this run did not write (plots/loss.png, thoughts.md)" in done.stdout
    assert folder not in rundir.known_runs()


def test_a_run_folder_that_is_a_link_is_refused(world: World) -> None:
    folder = trained(world)
    moved = world.root / "moved-run"
    folder.path.rename(moved)
    folder.path.symlink_to(moved)
    assert removed(world, folder).returncode == 2
    assert (moved / "run.json").exists()


def test_a_model_in_the_run_folder_goes_with_it(world: World) -> None:
    output = world.runs / "20260101T000000Z-sft-a" / "model"
    folder = trained(world, f"model={output}", output=output)
    assert world.launch("rm", str(folder.path), "--yes").returncode == 2
    (output / "eval.csv").write_text("mine")
    assert removed(world, folder).returncode == 0
    assert names(folder.path) == ["model/eval.csv"]


def campaign(world: World) -> tuple[Path, RunFolder]:
    """The folder of a bench with one run, whose model lies in it."""
    bench = world.runs / "20260101T000000Z-bench-x"
    output = bench / "models" / "baseline-1"
    folder = trained(
        world, f"model={output}", name=f"{bench.name}/20260101T000000Z-sft-trial", output=output
    )
    files.write_json(bench / "bench.json", {"trials": [{"run": str(folder.path)}]})
    return bench, folder


def test_of_a_bench_what_launch_put_there_goes(world: World) -> None:
    bench, _ = campaign(world)
    (bench / "conclusions.md").write_text("mine")
    assert world.launch("rm", bench.name, "--yes").returncode == 2
    assert world.launch("rm", bench.name, "--yes", "--model").returncode == 0
    assert names(bench) == ["conclusions.md"]
    assert [path.name for path in bench.iterdir()] == ["conclusions.md"]


def test_a_model_of_another_run_in_a_bench_stops_it(world: World) -> None:
    bench, _ = campaign(world)
    place = bench / "models" / "mine"
    trained(world, f"model={place}", name="20260102T000000Z-sft-mine", output=place)
    done = world.launch("rm", bench.name, "--yes", "--model")
    assert done.returncode == 2
    assert "the output of 20260102T000000Z-sft-mine" in done.stderr
    assert (place / "config.json").exists()


def test_a_pipeline_keeps_its_stages(world: World) -> None:
    stage = trained(world)
    pipeline = world.runs / "20260101T000000Z-pipeline-p"
    pipeline.mkdir()
    files.write_json(pipeline / "pipeline.json", {"stages": [{"run": str(stage.path)}]})
    assert world.launch("rm", pipeline.name, "--yes", "--model").returncode == 0
    assert not pipeline.exists()
    assert stage.manifest.exists()
    assert {*MODEL} < {*names(out(world))}


def test_a_damaged_record_makes_nothing_the_runs(world: World) -> None:
    for text in ("{}", "[1", '{"output": 3, "written": {"config.json": [1, 2]}}', "null"):
        folder = trained(world)
        folder.inventory(1).write_text(text)
        exit = rundir.read_json(folder.exit(1))
        files.write_json(folder.exit(1), {**exit, "started": "never", "ended": None})
        done = removed(world, folder)
        assert done.returncode == 0, done.stderr
        assert {*MODEL} <= {*names(out(world))}
        shutil.rmtree(out(world))


def test_a_start_in_a_full_folder_looks_no_further_than_trainers_do(world: World) -> None:
    output = out(world)
    for number in range(300):
        (output / "photos" / str(number)).mkdir(parents=True)
    folder = trained(world)
    record = inventory.read_inventory(folder, 1)
    assert record is not None and record.before == {}
    removed(world, folder)
    assert [path.name for path in output.iterdir()] == ["photos"]


def test_the_list_of_outputs_can_be_lost(world: World) -> None:
    folder = trained(world)
    place = out(world).resolve()
    (world.root / "state" / "launch" / "outputs.jsonl").unlink(missing_ok=True)
    assert outputs.outputs_by_run(seconds=None)[str(folder.path)] == str(place)
    with (world.root / "state" / "launch" / "outputs.jsonl").open("a") as stream:
        stream.write('["/gone", "/nowhere", "x"]\n[3]\n{"a": 1}\n["torn')
    assert str(folder.path) in outputs.outputs_by_run(seconds=None)
    assert [other.run for other in outputs.find_neighbours(place, Path("/x/other"))] == [
        str(folder.path)
    ]
    assert lease.newest_lease(place) is not None
