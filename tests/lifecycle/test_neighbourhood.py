"""A start beside other runs, and in a folder with somebody's files."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import made_runs
import pytest
import saved
from fake_world import World, needs_trl, open_world
from in_process import Answer, launch

from launcher import files
from launcher.errors import NotReady
from launcher.lifecycle import start
from launcher.runs import lease, rundir

pytestmark = needs_trl

Capture = pytest.CaptureFixture[str]
Train = Callable[..., Answer]
Begin = Callable[[World, Train, str], None]
Findings = Callable[..., dict[str, str]]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path / "world") as world:
        world.environ["HOME"] = str(tmp_path / "home")
        world.enter(monkeypatch)
        yield world


@pytest.fixture
def train(world: World, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Train:
    """`launch sft` of a config into an output, with a fake trainer."""

    def run(output: str | Path, *words: str, steps: tuple[str, ...] = ()) -> Answer:
        path = world.config(output_dir=str(output))
        monkeypatch.setenv("FAKE_STEPS", json.dumps(steps))
        machine = ("--python", str(world.python()), "--gpus", "0")
        return launch(capsys, "sft", str(path), *words, *machine)

    return run


@pytest.fixture
def findings(train: Train) -> Callable[..., dict[str, str]]:
    """Codes and messages of a dry run into a folder."""

    def run(output: str | Path, *words: str) -> dict[str, str]:
        answer = train(output, "--dry-run", "--format", "json", *words)
        messages = {}
        expected_code = 0
        for finding in json.loads(answer.out)["findings"]:
            messages[finding["code"]] = finding["message"]
            if finding["severity"] == "error":
                expected_code = 3
        assert answer.code == expected_code
        return messages

    return run


def train_to_the_end(world: World, train: Train, output: str) -> None:
    answer = train(output, steps=(f"checkpoint={output}:20", f"model={output}"))
    assert (world.root / output / "config.json").exists(), answer.err


def train_now(world: World, train: Train, output: str) -> None:
    """A run with a runs folder of its own."""
    environ = {**world.environ, "LAUNCH_RUNS": str(world.root / "others")}
    steps = ("pid=other", "sleep=600")
    place = str(world.root / output)
    folder = world.prepared(*steps, name="other", output=place, environ=environ)
    start.execute(folder)
    world.pid("other")


def only_run(world: World) -> Path:
    (run,) = (path for path in world.runs.iterdir() if path.is_dir())
    return run


@pytest.mark.parametrize(
    ("begin", "place"),
    [
        (train_to_the_end, "out/stage2"),
        (train_to_the_end, "OUT/../out/x"),
        (train_now, "out/checkpoint-20"),
    ],
)
def test_nothing_starts_inside_the_output_of_another_run(
    world: World, train: Train, begin: Begin, place: str
) -> None:
    begin(world, train, "out")
    (world.root / "OUT").mkdir()

    answer = train(place)

    assert answer.code == 3
    assert "error[nested-output]" in answer.err
    assert "stage.yaml:" in answer.err
    assert f"in {world.root}/out, which the run " in answer.err
    assert not (world.root / place / ".cache").exists()


@pytest.mark.parametrize("begin", [train_to_the_end, train_now])
def test_nor_above_it_with_or_without_an_index(
    world: World, train: Train, findings: Findings, begin: Begin
) -> None:
    begin(world, train, "o/deep/er")
    message = f"above {world.root}/o/deep/er, which the run "
    assert message in findings("o")["nested-output"]

    shutil.rmtree(world.root / "state", ignore_errors=True)
    assert message in findings("o")["nested-output"]


def test_the_index_knows_a_run_without_a_lease(world: World, findings: Findings) -> None:
    place = world.root / "o" / "model"
    saved.model(place)
    manifest = made_runs.manifest(output=str(place))
    run = made_runs.write_run(world.root / "elsewhere" / "20260101T000000Z-sft-a", record=manifest)
    rundir.register("runs", run)
    assert "nested-output" in findings("o")
    assert "nested-output" in findings("o/model/x")

    shutil.rmtree(place)
    assert "nested-output" not in findings("o")


def test_side_by_side_and_again_into_the_same_is_fine(
    world: World, train: Train, findings: Findings
) -> None:
    train_to_the_end(world, train, "o/first")
    # where launch moves a card of the trainer
    (world.root / "o" / "first" / "README.before.md").write_text("of the trainer")

    assert "nested-output" not in findings("o/second")
    again = findings("o/first")
    assert "nested-output" not in again
    assert "foreign-files" not in again


def test_run_folders_are_no_outputs(world: World, train: Train, findings: Findings) -> None:
    train_to_the_end(world, train, "out")
    run = only_run(world)
    for place in (run, run / "probe"):
        assert f"the run folder {run}" in findings(place)["nested-output"]

    archive = world.root / "archive"
    shutil.copytree(run, archive / run.name)
    assert "holds the run folder" in findings(archive)["nested-output"]

    bench = world.runs / "20260101T000000Z-bench-x"
    bench.mkdir()
    files.write_json(bench / "bench.json", {})
    place = bench / "models" / "mine"
    assert "lies in the run folder" in findings(place)["nested-output"]


def test_the_model_of_a_run_folder_continues_there(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """`launch sft RUN/stage.yaml` names the folder in the run folder."""
    config = world.config()
    config.write_text(config.read_text().replace("  output_dir: out\n", ""))
    monkeypatch.setenv("FAKE_STEPS", '["exit=1"]')
    machine = ("--python", str(world.python()), "--gpus", "0")
    launch(capsys, "sft", str(config), *machine)
    answer = launch(capsys, "sft", str(only_run(world) / "stage.yaml"), *machine)
    assert answer.code == 4
    assert "nested-output" not in answer.err


def test_files_of_ones_own_are_named(world: World, train: Train, findings: Findings) -> None:
    for name in ("b.txt", "a.txt", "notes/x", "d.txt"):
        path = world.root / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    expected = f"{world.root}/out holds 4 names that launch did not make: a.txt, b.txt, d.txt, ..."

    # about the machine: not even --strict stops for it
    assert findings("out", "--strict")["foreign-files"] == expected
    assert "warning[foreign-files]" in train("out", steps=("model=out",)).err
    # what the run wrote since is launch's
    assert findings("out")["foreign-files"] == expected


def test_two_stages_of_a_pipeline_do_not_nest(world: World, capsys: Capture) -> None:
    world.config("first.yaml", output_dir="o")
    world.config("second.yaml", output_dir="o/second", model_name_or_path=None)
    (world.root / "p.yaml").write_text("stages: [first.yaml, second.yaml]\n")
    words = ("--python", str(world.python()), "--gpus", "0", "--dry-run")
    answer = launch(capsys, "pipeline", "p.yaml", *words)
    assert answer.code == 3
    message = answer.err.replace(f"{world.root}/", "")
    assert "second writes into o/second, which lies in" in message


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def file(path: Path) -> None:
    path.write_text("x")


FOLDER = ".cache/huggingface/launch"
LEASE = f"{FOLDER}/lease-1.json"


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        (
            ".cache",
            dangling_link,
            "is a link to nowhere, which leads nowhere, and must be a folder",
        ),
        (
            ".cache",
            link_to_itself,
            "is a link to .cache, which leads nowhere, and must be a folder",
        ),
        (".cache", file, "is a file, and must be a folder"),
        (".cache/huggingface", dangling_link, "is a link to nowhere, which leads nowhere"),
        (LEASE, Path.mkdir, "is a folder, and must be a file"),
        (LEASE, dangling_link, "is a link to nowhere, which leads nowhere, and must be a file"),
        (f"{FOLDER}/lock", Path.mkdir, "is a folder, and must be a file"),
        (f"{FOLDER}/lock", dangling_link, "is a link to nowhere"),
    ],
)
def test_what_lies_in_the_place_of_a_lease_is_named(
    tmp_path: Path, name: str, make: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    make(path)

    with pytest.raises(NotReady) as refused:
        lease.acquire(tmp_path / "out", tmp_path / "run")

    (finding,) = refused.value.findings
    assert finding.code == "bad-lease"
    assert f"{path} {message}" in finding.message
    command = "rm -r" if make is Path.mkdir else "rm"
    assert f"delete it ({command} {path})" in str(finding.help)


def test_an_output_that_is_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    dangling_link(tmp_path / "out")
    with pytest.raises(NotReady, match="is a link to nowhere, which leads nowhere"):
        lease.acquire(tmp_path / "out" / "x", tmp_path / "run")
