"""The folder of a run: attempts, names, the manifest, the index; and no token in any of it."""

import os
import re
import time
from dataclasses import fields
from pathlib import Path

import pytest
from plans import CONFIGS, SFT, TRL, build_command, from_text, load_stage, make_plan, trainer

from launcher import files
from launcher.errors import NotReady, UsageError
from launcher.lifecycle import manifest
from launcher.plan import command
from launcher.runs import rundir
from launcher.runs.record import Manifest, PlanRecord, RunRecord
from launcher.runs.rundir import RunFolder

TOKEN = "hf_" + "abcDEF123" * 4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The runs folder; it does not exist yet."""
    return tmp_path / "runs"


def make_run(root: Path, name: str, **content: object) -> RunFolder:
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    files.write_json(folder.manifest, content)
    return folder


def make_planned_run(path: Path, *overrides: str) -> RunFolder:
    """A run with the manifest that a start writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plan = make_plan(from_text(path.parent, SFT.format(more="exp_name: one"), *overrides))
    folder = RunFolder(path)
    output = Path("/models/one")
    content = manifest.build_manifest(
        1, rundir.format_utc_now(), plan, build_command(plan), trainer("torch"), output
    )
    manifest.create(folder, content)
    return folder


def test_a_manifest_is_written_and_read_by_one_type(root: Path) -> None:
    folder = make_planned_run(root / "run")
    content = files.read_json(folder.manifest)
    # trackers are those of a resume, the script one that is not the stage's own
    optional = {"trackers", "script"}
    expected = [field.name for field in fields(RunRecord) if field.name not in optional]

    assert list(content) == expected
    assert rundir.read_manifest(folder).left_out() == []
    assert rundir.read_manifest(folder).plan.global_batch == content["plan"]["global"]


def test_what_is_damaged_in_a_manifest_reads_as_missing() -> None:
    damage = {"plan": {"global": "x", "gpus": 1}, "resume": [], "env": "HOME", "launch_commit": 7}
    damaged = Manifest({**damage, "trainer": {"packages": {"a": 1}}})
    assert damaged.plan == PlanRecord(gpus=1)
    assert damaged.resumed_step is None
    assert list(damaged.packages) == []
    places = {omission.where for omission in damaged.left_out()}
    assert {"env", "launch_commit"} <= places


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["console.log", "console.2.log"], 2),
        (["console.log", "exit.3.json"], 3),
        (["exit.json", "console.10.log"], 10),
        (["console.x.log", "console.log.bak"], 0),
    ],
)
def test_attempts_are_counted_by_what_is_left(tmp_path: Path, names: list[str], count: int) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert RunFolder(tmp_path).attempts() == count


def test_the_same_output_is_another_attempt_of_the_newest_run(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    make_run(root, "20250101T000000Z-sft-a", stage="sft", output=str(output))
    newest = make_run(root, "20250102T000000Z-sft-a", stage="sft", output=str(output))
    make_run(root, "20250103T000000Z-sft-a", stage="sft", output="elsewhere")
    make_run(root, "20250104T000000Z-dpo-a", stage="dpo", output=str(output))
    newest.console(1).touch()
    (tmp_path / "link").symlink_to(tmp_path)

    for same in (output, tmp_path / "x" / ".." / "model", tmp_path / "link" / "model"):
        assert rundir.choose_folder("sft", "a", same, root) == (newest, 2)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("../../etc", "..-..-etc"), ("a b\n'c'", "a-b-c"), ("ü", "run"), (TOKEN, "redacted")],
)
def test_any_name_chooses_a_new_folder_below_the_root(root: Path, name: str, shown: str) -> None:
    folder, attempt = rundir.choose_folder("dpo", name, None, root)
    assert attempt == 1
    assert folder.path.parent == root
    assert folder.path.name.partition("-dpo-")[2] == shown
    assert not folder.path.exists()


def test_two_starts_of_one_second_get_two_folders(root: Path) -> None:
    folder = rundir.free_folder(root, "sft", "a")
    assert rundir.reserve(folder) == folder
    assert rundir.reserve(folder).path.name == f"{folder.path.name}-2"


def test_a_reserved_folder_is_removed_only_if_empty(root: Path) -> None:
    folder = rundir.reserve(rundir.free_folder(root, "sft", "a"))
    (folder.path / "x").touch()
    rundir.remove_if_empty(folder)
    assert folder.path.is_dir()

    (folder.path / "x").unlink()
    rundir.remove_if_empty(folder)
    rundir.remove_if_empty(folder)
    assert not folder.path.exists()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_runs_folder_that_is_a_file_is_refused(root: Path, below: str) -> None:
    root.touch()
    with pytest.raises(NotReady, match="cannot be written") as refused:
        rundir.make_folder(root / below, "sft", "a")
    assert refused.value.findings[0].code == "runs-not-writable"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.json"
    files.write_json(path, {"n": 1})

    def disk_is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", disk_is_full)
    with pytest.raises(OSError, match="No space"):
        files.write_json(path, {"n": 2})

    assert rundir.read_json(path) == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_every_argument_has_a_value_and_an_origin(root: Path) -> None:
    record = rundir.read_manifest(make_planned_run(root / "run", "learning_rate=1e-5"))
    arguments = record["args"]
    assert len(arguments) > 80
    assert arguments["learning_rate"]["value"] == 1e-5
    assert arguments["gradient_accumulation_steps"]["value"] == 8
    origins = {name: argument["origin"] for name, argument in arguments.items()}
    assert "learning_rate=1e-5" in origins["learning_rate"]
    assert origins["exp_name"].endswith("stage.yaml:9")
    assert origins["gradient_accumulation_steps"].startswith("derived: batch of 16")
    assert re.fullmatch(r"default: .+\.py:\d+", origins["weight_decay"])


def test_a_manifest_records_the_command_and_what_is_expected(root: Path) -> None:
    record = rundir.read_manifest(make_planned_run(root / "run"))
    assert record["stage"] == "sft"
    assert record["output"] == "/models/one"
    assert record["attempt"] == 1
    assert record["argv"][1:3] == ["-m", "accelerate.commands.launch"]
    assert record["env"] == sorted(record["env"])
    assert record["trainer"]["packages"] == {"torch": "1.0"}
    assert record["expect"]["finish"] == "completed"


def test_expectations_follow_from_the_arguments() -> None:
    plan = make_plan(load_stage(CONFIGS / "tulu" / "sft_qwen7b.yaml"), 8)
    assert manifest.list_expectations(plan) == {
        "loss": "finite",
        "memory": "ok",
        "finish": "completed",
        "liger": "engaged",
        "packing": "isolated",
        "batch": "planned",
        "dataset_cache": "any",
        "gradients": "true",
    }


OPEN_INSTRUCT_SFT = SFT.format(more="packing: true")
OPEN_INSTRUCT_DPO = OPEN_INSTRUCT_SFT.replace("stage: sft", "stage: dpo").replace(
    "dataset_mixer_list", "mixer_list"
)
PADDING_FREE = TRL.format(data="d", more="padding_free: true\n  max_length: none")


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        (OPEN_INSTRUCT_SFT, "batch.per_device=1", "off"),
        (OPEN_INSTRUCT_SFT, "batch.per_device=2", "isolated"),
        (PADDING_FREE, "per_device_train_batch_size=1", "off"),
        (PADDING_FREE, "per_device_train_batch_size=2", "isolated"),
        # a row of DPO is a pair
        (OPEN_INSTRUCT_DPO, "batch.per_device=1", "isolated"),
        # TRL packs rows of the data set
        (TRL.format(data="d", more="packing: true"), "per_device_train_batch_size=1", "isolated"),
    ],
)
def test_one_row_a_micro_batch_is_not_expected_to_be_packed(
    tmp_path: Path, text: str, override: str, expected: str
) -> None:
    plan = make_plan(from_text(tmp_path, text, override))
    assert command.list_expectations(plan)["packing"] == expected


def known_names() -> list[str]:
    return [folder.path.name for folder in rundir.list_known_runs()]


def test_runs_are_known_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "a 'b'\nü" / "runs"
    for name in ("2025-b", "2025 b", "2025-a"):
        make_planned_run(odd / name)
    monkeypatch.chdir(tmp_path)
    assert known_names() == ["2025 b", "2025-a", "2025-b"]
    assert rundir.find_run("2025-a") == RunFolder(odd / "2025-a")

    # each once, whatever else lies in the runs folder
    monkeypatch.setenv("LAUNCH_RUNS", str(odd))
    (odd / "not a run").mkdir()
    (odd / "2025 b" / "run.json").unlink()
    assert known_names() == ["2025-a", "2025-b"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("20250101", "20250101T000000Z-sft-a"),
        ("20250102T000000Z-sft-a", "20250102T000000Z-sft-a"),
        # the newest of a name
        ("a", "20250102T000000Z-sft-a"),
        ("sft-a", "20250102T000000Z-sft-a"),
        ("a-2", "20250102T000000Z-sft-a-2"),
        ("./20250101T000000Z-sft-a", "20250101T000000Z-sft-a"),
        ("nothing", None),
        ("", None),
    ],
)
def test_a_run_is_found_by_folder_name_and_prefix(
    root: Path, name: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stamp in ("20250101T000000Z-sft-a", "20250102T000000Z-sft-a", "20250102T000000Z-sft-a-2"):
        make_run(root, stamp)
    monkeypatch.chdir(root)
    folder = rundir.find_run(name)
    assert (folder and folder.path.name) == expected


def test_a_prefix_of_several_runs_names_them(root: Path) -> None:
    make_run(root, "20250101T000000Z-sft-a")
    make_run(root, "20250102T000000Z-sft-b")
    with pytest.raises(UsageError) as refused:
        rundir.find_run("2025")
    (finding,) = refused.value.findings
    assert finding.code == "ambiguous-run"
    assert "20250102T000000Z-sft-b" in str(finding.help)


def test_last_is_the_run_that_was_started_last(root: Path) -> None:
    assert rundir.find_run("last") is None
    first = make_run(root, "20250101T000000Z-sft-a")
    second = make_run(root, "20250102T000000Z-sft-a")
    for folder in (first, second):
        os.utime(folder.manifest, (time.time() - 10,) * 2)
    assert rundir.find_run("last") == second

    # a further attempt writes its manifest anew
    files.write_json(first.manifest, {"attempt": 2})
    assert rundir.find_run("last") == first


@pytest.mark.parametrize("name", ["20250103T000000Z-pipeline-demo", "demo", "pipeline-demo"])
def test_a_campaign_is_found_by_name_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "project" / "runs"
    make_planned_run(elsewhere / "20250103T000001Z-sft-sft")
    pipeline = elsewhere / "20250103T000000Z-pipeline-demo"
    pipeline.mkdir()
    (pipeline / rundir.PIPELINE_RECORD).write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert rundir.find_campaign(name) == RunFolder(pipeline)
    assert rundir.find_campaign("other") is None
