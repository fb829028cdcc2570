"""`launch rm`: what the records say that a run wrote goes, whatever else lies there stays."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import made_runs
import pytest
import saved
from fake_world import World, kill, open_world, wait_until
from in_process import Answer, launch

from launcher import files
from launcher.cli import main
from launcher.lifecycle import start
from launcher.runs import inventory, lease, outputs, rundir
from launcher.runs.rundir import RunFolder

NAME = "20260101T000000Z-sft-a"
MODEL = {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        world.environ["HOME"] = str(world.root / "home")
        for name in ("HOME", "LAUNCH_RUNS", "XDG_STATE_HOME"):
            monkeypatch.setenv(name, world.environ[name])
        yield world


@pytest.fixture
def out(world: World) -> Path:
    """The output folder of the run; it does not exist yet."""
    return world.root / "out"


Remove = Callable[..., Answer]


@pytest.fixture
def remove(capsys: pytest.CaptureFixture[str]) -> Remove:
    """`launch rm` of a run or a campaign with its model, unless told to ask first."""

    def run(target: RunFolder | Path, *words: str) -> Answer:
        path = target.path if isinstance(target, RunFolder) else target
        return launch(capsys, "rm", str(path), *(words or ("--model", "--yes")))

    return run


def train(
    world: World, *steps: str, name: str = NAME, output: Path | None = None, number: int = 1
) -> RunFolder:
    """Run an attempt to its end; without other steps it saves a checkpoint and a model."""
    output = output or world.root / "out"
    steps = steps or (f"checkpoint={output}:2", f"model={output}")
    folder = world.prepared(*steps, name=name, output=str(output), number=number)
    rundir.register("runs", folder.path)
    main.main(["exec", str(folder.path)])
    return folder


def start_live_run(world: World, output: Path) -> None:
    """A run that trains into a folder now, whose own folder lies elsewhere."""
    environ = {**world.environ, "LAUNCH_RUNS": str(world.root / "others")}
    steps = ("pid=other", "sleep=600")
    folder = world.prepared(*steps, name="other", output=str(output), environ=environ)
    start.execute(folder)
    world.pid("other")


def write_own(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")


def names(folder: Path) -> set[str]:
    """Everything below a folder but folders; links are not followed."""
    below = set()
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            below.add(str(path.relative_to(folder)))
    return below


def require_removed(answer: Answer) -> None:
    assert answer.code == 0, answer.err


# What goes


def test_all_that_a_run_wrote_goes(world: World, out: Path, remove: Remove) -> None:
    folder = train(world)
    lease_file = ".cache/huggingface/launch/lease-1.json"
    assert {*MODEL, "checkpoint-2/optimizer.pt", lease_file} < names(out)

    answer = remove(folder)

    require_removed(answer)
    assert not out.exists()
    assert not folder.path.exists()
    assert "kept" not in answer.out


def test_what_goes_is_shown_with_sizes_before_it_is_asked_for(
    world: World, out: Path, remove: Remove
) -> None:
    folder = train(world)
    write_own(out / "notes.md")

    question = remove(folder, "--model")
    assert question.code == 2
    assert f"{out} (3 files, " in question.err
    assert f"{out}/checkpoint-2 (7 files, " in question.err
    assert f"kept in {out}: 1 file that this run did not write (notes.md)" in question.err
    assert names(out) > MODEL

    answer = remove(folder, "--model", "--yes", "--format", "json")
    data = json.loads(answer.out)["data"]
    assert data["removed"] == [str(folder.path), str(out)]
    assert "notes.md" in data["kept"][0]


def test_own_files_of_before_and_after_are_kept(world: World, out: Path, remove: Remove) -> None:
    before = {"thesis.txt", "README.md", "checkpoint-1/model.safetensors"}
    write_own(*[out / name for name in before])
    folder = train(world)
    after = {"eval_results.json", "checkpoint-2/samples.json", "checkpoint-3/optimizer.pt"}
    write_own(*[out / name for name in after])

    answer = remove(folder)

    require_removed(answer)
    assert names(out) == before | after
    assert "6 files that this run did not write" in answer.out
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
    copy.rename(path)


def make_a_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("change", [grow, write_over, replace, make_a_link])
def test_a_file_that_changed_is_no_longer_the_runs(
    world: World, out: Path, remove: Remove, change: Callable[[Path], None]
) -> None:
    folder = train(world)
    change(out / "config.json")
    content = (out / "config.json").read_bytes()

    answer = remove(folder)

    require_removed(answer)
    assert names(out) == {"config.json"}
    assert (out / "config.json").read_bytes() == content
    assert "1 file that changed after this run wrote it (config.json)" in answer.out


def test_a_file_of_another_mode_or_with_a_second_name_is_still_the_runs(
    world: World, out: Path, remove: Remove
) -> None:
    folder = train(world)
    (out / "config.json").chmod(0o640)
    os.link(out / "model.safetensors", world.root / "backup")
    remove(folder)
    assert not out.exists()
    assert (world.root / "backup").is_file()


def test_every_attempt_counts(world: World, out: Path, remove: Remove) -> None:
    folder = train(world, f"checkpoint={out}:2", "exit=1")
    write_own(out / "README.md")
    train(world, f"checkpoint={out}:4", f"model={out}", number=2)
    remove(folder)
    assert names(out) == {"README.md"}


def test_of_a_run_killed_with_its_supervisor_what_was_there_stays(
    world: World, out: Path, remove: Remove
) -> None:
    write_own(out / "README.md")
    steps = (f"checkpoint={out}:2", "pid=leader", "sleep=600")
    folder = world.prepared(*steps, output=str(out))
    launcher = world.started("exec", str(folder.path))
    leader = world.pid("leader")
    wait_until(folder.process.exists)
    supervisor = rundir.read_json(folder.process)["keeper"]["pid"]
    kill(launcher.pid, supervisor, leader)
    launcher.wait()
    world.quiet()
    # long after the last sign of life somebody puts a model there
    write_own(out / "model.safetensors")
    os.utime(out / "model.safetensors", (time.time() + 100,) * 2)

    require_removed(remove(folder))

    assert names(out) == {"README.md", "model.safetensors"}


def test_a_home_folder_survives_the_run_that_trained_into_it(world: World, remove: Remove) -> None:
    home = world.root / "home"
    own = {"Documents/thesis.tex", ".ssh/id", "runs/mine.txt", "model.bin"}
    write_own(*[home / name for name in own])
    folder = train(world, f"model={home}", output=home)
    require_removed(remove(folder))
    assert names(home) == own


def test_a_damaged_record_makes_nothing_the_runs(world: World, out: Path, remove: Remove) -> None:
    for text in ("{}", "[1", '{"output": 3, "written": {"config.json": [1, 2]}}'):
        folder = train(world)
        folder.inventory(1).write_text(text)
        ended = rundir.read_json(folder.exit(1))
        files.write_json(folder.exit(1), {**ended, "started": "never", "ended": None})
        require_removed(remove(folder))
        assert names(out) >= MODEL
        shutil.rmtree(out)


def test_a_start_in_a_full_folder_looks_no_further_than_trainers_do(
    world: World, out: Path, remove: Remove
) -> None:
    for number in range(300):
        (out / "photos" / str(number)).mkdir(parents=True)
    folder = train(world)
    record = inventory.read_inventory(folder, 1)
    assert record is not None
    assert record.before == {}
    remove(folder)
    assert list(out.iterdir()) == [out / "photos"]


# Other runs


@pytest.mark.parametrize("place", ["stage2", "."])
def test_nothing_above_or_beside_a_live_run_goes(
    world: World, out: Path, remove: Remove, place: str
) -> None:
    folder = train(world)
    start_live_run(world, out / place)
    written = names(out)

    answer = remove(folder)

    assert answer.code == 5
    assert "error[run-is-live]" in answer.err
    # the live run may have added records meanwhile
    assert written <= names(out)
    assert folder.path.is_dir()


def test_nothing_below_a_live_run_goes(world: World, out: Path, remove: Remove) -> None:
    inner = out / "inner"
    folder = train(world, f"model={inner}", output=inner)
    start_live_run(world, out)

    answer = remove(folder)

    assert answer.code == 5
    assert "trains into" in answer.err
    assert "which lies above" in answer.err
    assert names(inner) >= MODEL


@pytest.mark.parametrize("leased", [True, False])
def test_a_finished_model_inside_or_above_is_named(
    world: World, out: Path, remove: Remove, leased: bool
) -> None:
    outer = train(world)
    place = out / "stage2"
    if leased:
        inner = train(world, f"model={place}", name="20260101T000001Z-dpo-b", output=place)
        shutil.rmtree(world.root / "state")
    else:
        # in a runs folder that only the index knows
        manifest = made_runs.manifest(output=str(place))
        path = world.root / "elsewhere" / "20260101T000001Z-dpo-b"
        inner = RunFolder(made_runs.write_run(path, record=manifest))
        rundir.register("runs", path)
        saved.model(place)
    written = names(out)

    answer = remove(outer)
    assert answer.code == 2
    assert f"{place}, the output of {inner.path.name}, lies inside {out}" in answer.err
    answer = remove(inner)
    assert answer.code == 2
    assert f"the output of {outer.path.name}, lies above" in answer.err
    assert names(out) == written

    # the record of the outer run goes by itself, and after that the inner model can
    require_removed(remove(outer, "--yes"))
    require_removed(remove(inner))
    assert place.exists() is not leased
    assert names(out) > MODEL


# Links and mounts


def test_no_link_is_followed(world: World, out: Path, remove: Remove) -> None:
    precious = world.root / "precious"
    saved.model(precious)
    link = out / "checkpoint-9"
    folder = train(world, f"model={out}", f"link={link}:{precious}")
    (out / "own").symlink_to(precious)

    require_removed(remove(folder))

    assert names(precious) == MODEL
    assert names(out) == {"own"}, "the run made the other link"


def test_a_folder_that_became_a_link_is_not_entered(
    world: World, out: Path, remove: Remove
) -> None:
    folder = train(world)
    elsewhere = world.root / "elsewhere"
    (out / "checkpoint-2").rename(elsewhere)
    (out / "checkpoint-2").symlink_to(elsewhere)
    written = names(elsewhere)
    remove(folder)
    assert names(elsewhere) == written
    assert names(out) == {"checkpoint-2"}


def test_an_output_that_became_a_link_is_not_entered(
    world: World, out: Path, remove: Remove
) -> None:
    folder = train(world)
    moved = out.rename(world.root / "moved")
    out.symlink_to(moved)
    answer = remove(folder)
    assert {*MODEL, "checkpoint-2/optimizer.pt"} < names(moved)
    message = "in a folder that is not the one that this run wrote into"
    assert message in answer.out + answer.err


def test_an_output_that_was_a_link_at_the_start_is_the_same_folder(
    world: World, out: Path, remove: Remove
) -> None:
    real = world.root / "disk" / "out"
    real.mkdir(parents=True)
    out.symlink_to(real)
    folder = train(world)
    require_removed(remove(folder))
    assert names(real.parent) == set()
    assert out.is_symlink()


def test_another_folder_under_its_name_is_not_the_runs(
    world: World, out: Path, remove: Remove
) -> None:
    folder = train(world)
    copy = world.root / "copy"
    shutil.copytree(out, copy)
    shutil.rmtree(out)
    copy.rename(out)
    remove(folder)
    assert names(out) >= MODEL


@contextlib.contextmanager
def mounted(source: Path, target: Path) -> Iterator[None]:
    """A folder under a second name of the same file system."""
    target.mkdir()
    try:
        done = subprocess.run(["mount", "--bind", str(source), str(target)], capture_output=True)
    except OSError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


def test_no_mount_point_is_crossed(world: World, out: Path, remove: Remove) -> None:
    folder = train(world)
    moved = (out / "checkpoint-2").rename(world.root / "same")
    written = names(moved)
    # device and inodes are those of the record
    with mounted(moved, out / "checkpoint-2"):
        answer = remove(folder)
        require_removed(answer)
        assert names(moved) == written
        assert "behind a mount point" in answer.out


def test_a_live_run_under_a_second_name_is_found(world: World, out: Path, remove: Remove) -> None:
    folder = train(world)
    second = world.root / "second"
    with mounted(out, second):
        start_live_run(world, second / "stage2")
        assert remove(folder).code == 5
        kill(*world.left() - {os.getpid()})
    assert names(out) > MODEL


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_others_stays(world: World, out: Path, remove: Remove) -> None:
    folder = train(world)
    os.chown(out / "config.json", 12345, 12345)
    os.chown(out, 12345, 12345)
    answer = remove(folder)
    assert answer.code == 2
    assert f"{out} belongs to user 12345" in answer.err

    os.chown(out, 0, 0)
    require_removed(remove(folder))
    assert names(out) == {"config.json"}


# Run folders and campaigns


def test_own_files_in_a_run_folder_are_kept(world: World, remove: Remove) -> None:
    folder = train(world)
    write_own(folder.path / "thoughts.md", folder.path / "plots" / "loss.png")
    answer = remove(folder)
    require_removed(answer)
    assert names(folder.path) == {"plots/loss.png", "thoughts.md"}
    assert "2 files that this run did not write (plots/loss.png, thoughts.md)" in answer.out
    assert folder not in rundir.list_known_runs()


def test_a_run_folder_that_is_a_link_is_refused(world: World, remove: Remove) -> None:
    folder = train(world)
    moved = folder.path.rename(world.root / "moved-run")
    folder.path.symlink_to(moved)
    assert remove(folder).code == 2
    assert (moved / "run.json").exists()


def test_a_model_in_the_run_folder_goes_with_it(world: World, remove: Remove) -> None:
    output = world.runs / NAME / "model"
    folder = train(world, f"model={output}", output=output)
    assert remove(folder, "--yes").code == 2
    write_own(output / "eval.csv")
    require_removed(remove(folder))
    assert names(folder.path) == {"model/eval.csv"}


@pytest.fixture
def bench(world: World) -> Path:
    """The folder of a bench with one run, whose model lies in it."""
    folder = world.runs / "20260101T000000Z-bench-x"
    output = folder / "models" / "baseline-1"
    trial = train(world, f"model={output}", name=f"{folder.name}/{NAME}", output=output)
    files.write_json(folder / "bench.json", {"trials": [{"run": str(trial.path)}]})
    return folder


def test_of_a_bench_what_launch_put_there_goes(bench: Path, remove: Remove) -> None:
    write_own(bench / "conclusions.md")
    assert remove(bench, "--yes").code == 2
    require_removed(remove(bench))
    assert list(bench.iterdir()) == [bench / "conclusions.md"]


def test_a_model_of_another_run_in_a_bench_is_named(
    world: World, bench: Path, remove: Remove
) -> None:
    place = bench / "models" / "mine"
    train(world, f"model={place}", name="20260102T000000Z-sft-mine", output=place)
    answer = remove(bench)
    assert answer.code == 2
    assert "the output of 20260102T000000Z-sft-mine" in answer.err
    assert names(place) >= MODEL


def test_a_pipeline_keeps_its_stages(world: World, out: Path, remove: Remove) -> None:
    stage = train(world)
    pipeline = world.runs / "20260101T000000Z-pipeline-p"
    pipeline.mkdir()
    files.write_json(pipeline / "pipeline.json", {"stages": [{"run": str(stage.path)}]})
    require_removed(remove(pipeline))
    assert not pipeline.exists()
    assert stage.manifest.exists()
    assert names(out) > MODEL


def test_the_list_of_outputs_can_be_lost(world: World, out: Path) -> None:
    run = str(train(world).path)
    index = world.root / "state" / "launch" / "outputs.jsonl"
    index.unlink(missing_ok=True)
    assert outputs.map_outputs(seconds=None)[run] == str(out)

    with index.open("a") as stream:
        stream.write('["/gone", "/nowhere", "x"]\n[3]\n{"a": 1}\n["torn')
    assert run in outputs.map_outputs(seconds=None)
    (neighbour,) = outputs.find_neighbours(out, Path("/x/other"))
    assert neighbour.run == run
    assert lease.find_newest_lease(out) is not None
