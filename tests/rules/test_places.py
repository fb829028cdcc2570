"""Output folders that nobody means: refused by the stage file's rules, with the reason."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_world import World, needs_trl, open_world

from launcher.config import load
from launcher.errors import Finding
from launcher.machine.trees import ResolvedFolder
from launcher.paths import PACKAGE, PROJECT
from launcher.stage import stage as stages
from launcher.upstream.locate import Locator

pytestmark = needs_trl


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The working folder lies in the home folder."""
    with open_world(tmp_path / "home" / "work") as world:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("LAUNCH_RUNS", str(world.root / "runs"))
        monkeypatch.chdir(world.root)
        world.config()
        yield world


def refusals(world: World, output: str | Path, **args: object) -> list[Finding]:
    config = world.config(output_dir=str(output), **args)
    findings = stages.judge_stage_file(load.load(config)).findings
    return [finding for finding in findings if finding.code == "unintended-output"]


def reason(world: World, output: str | Path, **args: object) -> str:
    (finding,) = refusals(world, output, **args)
    assert finding.severity == "error"
    assert finding.layer == "launch"
    assert finding.key == "args.output_dir"
    assert finding.line is not None
    assert finding.help
    return finding.message


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("/", "is the root of the file system"),
        ("//", "is the root of the file system"),
        ("/tmp/..", "is the root of the file system"),
        (".", "is the working folder"),
        ("./", "is the working folder"),
        ("nowhere/..", "is the working folder"),
        ("..", "holds the working folder"),
        ("../..", "holds the working folder"),
        ("~", "would make a folder called `~`"),
        ("~/out", "would make a folder called `~`"),
        ("~root/out", "would make a folder called `~root`"),
        ("./~/out", "would make a folder called `~`"),
        ("~x/../out-2", "would make a folder called `~x`"),
        ("$HOME/out", "would make a folder called `$HOME`"),
        ("$SCRATCH/out", "would make a folder called `$SCRATCH`"),
        ("runs", "is the folder of the runs"),
        ("data", "is the folder of the data"),
        ("data/", "is the folder of the data"),
        ("model", "is the folder of the model"),
        ("/etc", "lies in /etc"),
        ("/etc/out", "lies in /etc"),
        ("/usr", "/usr"),
        ("/usr/lib/out", "lies in /usr"),
        ("/tmp", "/tmp"),
        ("/var", "/var"),
        ("/proc/self", "/proc"),
        (PROJECT, "launch's own folder"),
        (PACKAGE, "launch's own package"),
        (PACKAGE / "rules" / "out", "launch's own package"),
    ],
)
def test_what_nobody_means_is_refused(world: World, output: str | Path, why: str) -> None:
    assert why in reason(world, output)


def test_any_checkout_is_refused(world: World) -> None:
    (world.root / "repository" / ".git").mkdir(parents=True)
    assert "is the checkout" in reason(world, "repository")


def test_home_and_what_is_above_it(world: World, tmp_path: Path) -> None:
    assert "the working folder" in reason(world, tmp_path / "home")
    other = tmp_path / "elsewhere"
    other.mkdir()
    (world.root / "at-home").symlink_to(tmp_path / "home")
    os.chdir(other)
    config = world.config(output_dir=str(world.root / "at-home"))
    findings = stages.judge_stage_file(load.load(config)).findings
    (finding,) = [finding for finding in findings if finding.code == "unintended-output"]
    assert "is the home folder" in finding.message


@pytest.mark.parametrize("output", ["out", "output/a", "o", "../beside", "data/out", "model/out"])
def test_a_folder_of_the_runs_own_is_fine(world: World, output: str) -> None:
    assert not refusals(world, output)


def test_links_and_data_files_count_by_where_they_lead(world: World, tmp_path: Path) -> None:
    (world.root / "link").symlink_to(world.root / "data")
    assert "is the folder of the data" in reason(world, "link")
    place = tmp_path / "sets" / "a"
    place.mkdir(parents=True)
    (place / "train.jsonl").write_text("{}\n")
    assert "holds the folder of the data" in reason(world, place.parent, dataset_name=str(place))
    assert not refusals(world, place / "out", dataset_name=str(place))


def test_the_checkout_is_no_place_unless_one_works_there(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    file = world.root / "open.yaml"

    def messages(output: Path) -> list[str]:
        lines = ["stage: sft", "backend: open_instruct", "args:", "  model_name_or_path: model"]
        lines += ["  do_not_randomize_output_dir: true", f"  output_dir: {output}"]
        file.write_text("\n".join(lines) + "\n")
        judged = stages.judge_stage_file(load.load(file), locator=Locator(checkout=checkout))
        return [f.message for f in judged.findings if f.code == "unintended-output"]

    for place in (
        checkout,
        checkout.parent,
        checkout / "output",
        checkout / "open_instruct" / "out",
    ):
        assert messages(place), place
    monkeypatch.chdir(checkout)
    assert not messages(checkout / "output")
    assert messages(checkout / "open_instruct" / "out")
    assert messages(checkout / ".git" / "out")


def test_an_upper_case_twin_is_the_same_folder_where_it_is(world: World) -> None:
    twin = world.root / "DATA"
    if not twin.exists():
        twin.symlink_to(world.root / "data")
    assert "is the folder of the data" in reason(world, "DATA")


def test_what_lies_there_counts_too_and_not_only_the_name(tmp_path: Path) -> None:
    """As under a bind mount, or where a file system ignores case."""
    inside = tmp_path / "folder" / "inside"
    inside.mkdir(parents=True)
    folder = ResolvedFolder.of(inside.parent)
    missing = ResolvedFolder.of(tmp_path / "missing")
    renamed = replace(folder, path=tmp_path / "twin", paths=frozenset())
    assert renamed.is_same(folder)
    assert ResolvedFolder.of(inside).is_within(renamed)
    assert not ResolvedFolder.of(inside).is_same(renamed)
    assert not missing.is_same(replace(missing, path=tmp_path / "twin"))
    assert not missing.is_within(replace(missing, path=tmp_path / "twin"))


def test_each_file_of_a_command_is_judged_by_its_own_output(world: World) -> None:
    text = world.config(output_dir="OUTPUT").read_text()
    expected = []
    for output, is_fine in (("out", True), ("runs", False), ("data", False), ("data/out", True)):
        file = world.root / f"{output.replace('/', '-')}.yaml"
        file.write_text(text.replace("OUTPUT", output))
        expected.append((str(file), is_fine))
    words = [path for path, _ in expected]
    answer = json.loads(world.launch("validate-config", *words, "--format", "json").stdout)
    assert [(file["path"], file["valid"]) for file in answer["data"]["files"]] == expected


def test_every_command_refuses_it(world: World) -> None:
    world.config(output_dir="/")
    python = ("--python", str(world.python()), "--gpus", "0")
    for words in (
        ("validate-config", "stage.yaml"),
        ("sft", "stage.yaml", *python),
        ("sft", "stage.yaml", *python, "--dry-run"),
        ("plan", "stage.yaml", "--gpus", "1"),
        ("bench", "stage.yaml", *python),
        ("ladder", "stage.yaml", "--gpus", "1", "--dry-run"),
    ):
        done = world.launch(*words)
        assert done.returncode == 3, (words, done.stderr)
        assert (
            "error[unintended-output]: `output_dir: /` is the root of the file system"
            in done.stderr + done.stdout
        )
        assert "stage.yaml:" in done.stderr + done.stdout
