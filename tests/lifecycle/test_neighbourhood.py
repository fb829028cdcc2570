"""A start beside other runs, and in a folder with somebody's files."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import made_runs
import pytest
import saved
from fake_world import World, made, needs_trl

from launcher import files
from launcher.errors import NotReady
from launcher.runs import lease, rundir

pytestmark = needs_trl


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with made(tmp_path / "world") as world:
        world.environ["HOME"] = str(tmp_path / "home")
        for name in ("HOME", "LAUNCH_RUNS", "XDG_STATE_HOME"):
            monkeypatch.setenv(name, world.environ[name])
        yield world


def findings(world: World, output: str | Path, *words: str) -> dict[str, str]:
    """Codes and messages of a dry run into a folder."""
    config = world.config(output_dir=str(output))
    done = world.trained(str(config), "--dry-run", "--format", "json", *words)
    listed = json.loads(done.stdout)["findings"]
    errors = any(one["severity"] == "error" for one in listed)
    assert done.returncode == (3 if errors else 0)
    return {one["code"]: one["message"] for one in listed}


def finished(world: World, output: str) -> None:
    """A run with a model, to its end."""
    config = world.config(output_dir=output)
    done = world.trained(str(config), steps=(f"checkpoint={output}:20", f"model={output}"))
    assert (world.root / output / "config.json").exists(), done.stderr


def live(world: World, output: str) -> None:
    place = str(world.root / output)
    environ = {**world.environ, "LAUNCH_RUNS": str(world.root / "others")}
    folder = world.prepared("pid=other", "sleep=600", name="other", output=place, environ=environ)
    world.started("exec", str(folder.path), env={"LAUNCH_RUNS": environ["LAUNCH_RUNS"]})
    world.pid("other")


@pytest.mark.parametrize("place", ["out/stage2", "out/checkpoint-20", "out/a/b/c", "OUT/../out/x"])
@pytest.mark.parametrize("begun", [finished, live])
def test_inside_anothers_output_nothing_starts(
    world: World, begun: Callable[[World, str], None], place: str
) -> None:
    begun(world, "out")
    (world.root / "OUT").mkdir()
    message = findings(world, place)["nested-output"]
    assert f"in {world.root}/out, which the run " in message
    config = world.config(output_dir=place)
    done = world.trained(str(config))
    assert done.returncode == 3
    assert "error[nested-output]" in done.stderr and "stage.yaml:" in done.stderr
    assert not (world.root / place / ".cache").exists()


@pytest.mark.parametrize("begun", [finished, live])
@pytest.mark.parametrize("forgotten", [True, False])
def test_nor_above_one(world: World, begun: Callable[[World, str], None], forgotten: bool) -> None:
    begun(world, "o/deep/er")
    if forgotten:
        shutil.rmtree(world.root / "state", ignore_errors=True)
    assert f"above {world.root}/o/deep/er, which the run " in findings(world, "o")["nested-output"]


def test_of_a_run_without_a_lease_the_index_tells(world: World) -> None:
    place = world.root / "o" / "model"
    saved.model(place)
    told = made_runs.manifest(output=str(place))
    rundir.register(
        "runs", made_runs.made(world.root / "elsewhere" / "20260101T000000Z-sft-a", told=told)
    )
    assert "nested-output" in findings(world, "o")
    assert "nested-output" in findings(world, "o/model/x")
    shutil.rmtree(place)
    assert "nested-output" not in findings(world, "o")


def test_side_by_side_and_again_into_the_same_is_fine(world: World) -> None:
    finished(world, "o/first")
    assert "nested-output" not in findings(world, "o/second")
    assert "nested-output" not in findings(world, "o/first")
    assert "foreign-files" not in findings(world, "o/first")
    again = world.trained(str(world.config(output_dir="o/first")))
    assert "nested-output" not in again.stderr and "foreign-files" not in again.stderr


def test_run_folders_are_no_outputs(world: World) -> None:
    finished(world, "out")
    (run,) = [path for path in world.runs.iterdir() if path.is_dir()]
    for place in (run, run / "model", run / "probe"):
        assert f"the run folder {run}" in findings(world, place)["nested-output"]
    moved = world.root / "archive"
    moved.mkdir()
    shutil.copytree(run, moved / run.name)
    assert "holds the run folder" in findings(world, moved)["nested-output"]
    bench = world.runs / "20260101T000000Z-bench-x"
    files.write_json(bench.with_name("x.json"), {})
    bench.mkdir()
    files.write_json(bench / "bench.json", {})
    assert "lies in the run folder" in findings(world, bench / "models" / "mine")["nested-output"]


def test_the_model_of_a_run_folder_goes_on_there(world: World) -> None:
    """`launch sft RUN/stage.yaml` names the folder in the run folder."""
    config = world.config()
    text = config.read_text().replace("  output_dir: out\n", "")
    config.write_text(text)
    done = world.trained(str(config), steps=("exit=1",))
    (run,) = [path for path in world.runs.iterdir() if path.is_dir()]
    assert "nested-output" not in done.stderr
    done = world.trained(str(run / "stage.yaml"), steps=("exit=1",))
    assert "nested-output" not in done.stderr


def test_the_card_that_launch_moved_aside_is_its_own(world: World) -> None:
    finished(world, "out")
    (world.root / "out" / "README.before.md").write_text("of the trainer")
    assert "foreign-files" not in findings(world, "out")


def test_files_of_ones_own_are_named(world: World) -> None:
    for name in ("b.txt", "a.txt", "notes/x", "d.txt"):
        (world.root / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (world.root / "out" / name).write_text("mine")
    message = findings(world, "out")["foreign-files"]
    assert (
        message
        == f"{world.root}/out holds 4 names that launch did not make: a.txt, b.txt, d.txt, ..."
    )
    done = world.trained(str(world.config()), steps=("model=out",))
    assert "warning[foreign-files]" in done.stderr
    # a warning about the machine: not even --strict stops for it
    assert "foreign-files" in findings(world, "out", "--strict")
    # what the run made since is launch's
    assert findings(world, "out")["foreign-files"] == message


def test_two_stages_of_a_pipeline_do_not_nest(world: World) -> None:
    world.config("first.yaml", output_dir="o")
    world.config("second.yaml", output_dir="o/second", model_name_or_path=None)
    (world.root / "p.yaml").write_text("stages: [first.yaml, second.yaml]\n")
    done = world.launch(
        "pipeline", "p.yaml", "--python", str(world.python()), "--gpus", "0", "--dry-run"
    )
    assert done.returncode == 3
    assert "second writes into o/second, which lies in" in done.stderr.replace(f"{world.root}/", "")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def text(path: Path) -> None:
    path.write_text("x")


LEASE = ".cache/huggingface/launch/lease-1.json"


@pytest.mark.parametrize(
    ("name", "put", "says"),
    [
        (".cache", dangling, "is a link to nowhere, which leads nowhere, and must be a folder"),
        (".cache", loop, "is a link to .cache, which leads nowhere, and must be a folder"),
        (".cache", text, "is a file, and must be a folder"),
        (".cache/huggingface", dangling, "is a link to nowhere, which leads nowhere"),
        (LEASE, Path.mkdir, "is a folder, and must be a file"),
        (LEASE, loop, "is a link to lease-1.json, which leads nowhere, and must be a file"),
        (LEASE, dangling, "is a link to nowhere"),
        (".cache/huggingface/launch/lock", Path.mkdir, "is a folder, and must be a file"),
        (".cache/huggingface/launch/lock", dangling, "is a link to nowhere"),
    ],
)
def test_what_lies_in_the_place_of_a_lease_is_said(
    tmp_path: Path, name: str, put: Callable[[Path], None], says: str
) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    put(path)
    with pytest.raises(NotReady) as raised:
        lease.acquire(tmp_path / "out", tmp_path / "run")
    (finding,) = raised.value.findings
    assert finding.code == "bad-lease"
    assert f"{path} {says}" in finding.message
    assert f"delete it (rm {'-r ' if put is Path.mkdir else ''}{path})" in str(finding.help)
    shutil.rmtree(path) if path.is_dir() else os.unlink(path)
    assert lease.acquire(tmp_path / "out", tmp_path / "run").fence == 1


def test_an_output_that_is_a_link_to_nothing_is_said(tmp_path: Path) -> None:
    dangling(tmp_path / "out")
    with pytest.raises(NotReady, match="is a link to nowhere, which leads nowhere"):
        lease.acquire(tmp_path / "out" / "x", tmp_path / "run")
