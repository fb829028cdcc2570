"""The folder of a run: attempts, names, the manifest, the index; and no token in any of it."""

import os
import re
import time
from dataclasses import fields
from pathlib import Path

import pytest
from plans import CONFIGS, SFT, TRL, built, from_text, planned, staged, trainer

from launcher import files
from launcher.errors import NotReady, UsageError
from launcher.lifecycle import manifest
from launcher.runs import rundir
from launcher.runs.record import Manifest, PlanRecord, RunRecord
from launcher.runs.rundir import RunFolder

TOKEN = "hf_" + "abcDEF123" * 4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    assert rundir.runs_root() == tmp_path / "runs"
    return tmp_path / "runs"


def run(root: Path, name: str, **manifest: object) -> RunFolder:
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    files.write_json(folder.manifest, manifest)
    return folder


def create(folder: RunFolder, *overrides: str, output: Path | None = None) -> None:
    text = SFT.format(more="exp_name: one")
    made = planned(from_text(folder.path.parent, text, *overrides))
    content = manifest.build_manifest(
        1, rundir.utc_now(), made, built(made), trainer("torch"), output
    )
    manifest.create(folder, content)


def test_a_manifest_is_written_and_read_by_one_type(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    create(folder)
    content = files.read_json(folder.manifest)
    # left out: trackers of a run that continues none, the script where it is the stage's own
    optional = {"trackers", "script"}
    assert list(content) == [
        field.name for field in fields(RunRecord) if field.name not in optional
    ]
    read = rundir.read_manifest(folder)
    assert read.left_out() == []
    assert (read.stage, read.attempt, read.gpus) == ("sft", 1, 0)
    assert read.plan.global_batch == content["plan"]["global"]
    # what is damaged reads as missing, and the rest stands
    torn = Manifest(
        {
            **content,
            "plan": {"global": "x", "gpus": 1},
            "resume": [],
            "trainer": {"packages": {"a": 1}},
        }
    )
    assert torn.plan == PlanRecord(gpus=1)
    assert (torn.resumed_step, list(torn.packages)) == (None, [])
    damaged = Manifest({**content, "env": "HOME", "launch_commit": 7})
    assert [fault.where for fault in damaged.left_out()] == ["env", "launch_commit"]


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["console.log", "console.2.log"], 2), (["console.log", "exit.3.json"], 3),
        (["exit.json", "console.10.log"], 10), (["console.x.log", "console.log.bak"], 0),
    ],
)  # fmt: skip
def test_attempts_are_counted_by_what_is_left(tmp_path: Path, names: list[str], count: int) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert RunFolder(tmp_path).attempts() == count
    assert RunFolder(tmp_path / "none").attempts() == 0


def test_the_same_output_is_another_attempt_of_the_newest_run(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    run(root, "20250101T000000Z-sft-a", stage="sft", output=str(output))
    newest = run(root, "20250102T000000Z-sft-a", stage="sft", output=str(output))
    run(root, "20250103T000000Z-sft-a", stage="sft", output="elsewhere")
    run(root, "20250104T000000Z-dpo-a", stage="dpo", output=str(output))
    newest.console(1).touch()
    assert rundir.choose_folder("sft", "a", output, root) == (newest, 2)
    # however it is written, through `..` or a link
    (output.parent / "link").symlink_to(output.parent)
    for again in (output.parent / "x" / ".." / output.name, output.parent / "link" / output.name):
        assert rundir.choose_folder("sft", "a", again, root) == (newest, 2)
    assert rundir.choose_folder("sft", "a", None, root)[1] == 1
    assert rundir.choose_folder("sft", "a", None, root)[0] != newest


@pytest.mark.parametrize(
    ("name", "shown"),
    [("../../etc", "..-..-etc"), ("a b\n'c'", "a-b-c"), ("ü", "run"), (TOKEN, "redacted")],
)
def test_any_name_makes_a_folder_below_the_root(root: Path, name: str, shown: str) -> None:
    folder, _ = rundir.choose_folder("dpo", name, None, root)
    assert folder.path.parent == root
    assert folder.path.name.partition("-dpo-")[2] == shown


def test_choosing_a_folder_makes_none(root: Path) -> None:
    folder, attempt = rundir.choose_folder("sft", "a", None, root)
    assert attempt == 1
    assert not folder.path.exists()


def test_two_starts_of_one_second_get_two_folders(root: Path) -> None:
    folder, _ = rundir.choose_folder("sft", "a", None, root)
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


def test_a_runs_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(NotReady, match="cannot be written") as caught:
        rundir.make_folder(tmp_path / "runs", "sft", "a")
    assert [f.code for f in caught.value.findings] == ["runs-not-writable"]
    with pytest.raises(NotReady, match="cannot be written"):
        rundir.make_folder(tmp_path / "runs" / "deeper", "sft", "a")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.json"
    files.write_json(path, {"n": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        files.write_json(path, {"n": 2})
    assert rundir.read_json(path) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["data.json"]


def test_every_field_has_a_value_and_an_origin(root: Path) -> None:
    root.mkdir()
    folder = RunFolder(root / "run")
    create(folder, "learning_rate=1e-5", output=Path("/models/one"))
    kept = rundir.read_manifest(folder)
    fields = kept["args"]
    assert len(fields) > 80
    assert fields["learning_rate"] == {"value": 1e-5, "origin": fields["learning_rate"]["origin"]}
    assert "learning_rate=1e-5" in fields["learning_rate"]["origin"]
    assert fields["exp_name"]["origin"].endswith("stage.yaml:9")
    assert fields["gradient_accumulation_steps"]["value"] == 8
    assert fields["gradient_accumulation_steps"]["origin"].startswith("derived: batch of 16")
    assert re.fullmatch(r"default: .+\.py:\d+", fields["weight_decay"]["origin"])
    assert (kept["stage"], kept["output"], kept["attempt"]) == ("sft", "/models/one", 1)
    assert kept["argv"][1:3] == ["-m", "accelerate.commands.launch"]
    assert kept["env"] == sorted(kept["env"])
    assert kept["trainer"]["packages"] == {"torch": "1.0"}
    assert kept["expect"]["finish"] == "completed"


def test_expectations_follow_from_the_arguments() -> None:
    made = planned(staged(CONFIGS / "tulu" / "sft_qwen7b.yaml"), 8)
    from launcher.lifecycle.manifest import expectations

    assert expectations(made) == {
        "loss": "finite", "memory": "ok", "finish": "completed", "liger": "engaged",
        "packing": "isolated", "batch": "planned", "dataset_cache": "any", "gradients": "true",
    }  # fmt: skip


def test_one_row_a_micro_batch_is_not_expected_to_be_packed(tmp_path: Path) -> None:
    from launcher.plan.command import expectations

    def packing(text: str, *overrides: str) -> str:
        return expectations(planned(from_text(tmp_path, text, *overrides)))["packing"]

    for each, state in ((1, "off"), (2, "isolated")):
        sft, split = SFT.format(more="packing: true"), f"batch.per_device={each}"
        assert packing(sft, split) == state
        free = TRL.format(data="d", more="padding_free: true\n  max_length: none")
        size = f"per_device_train_batch_size={each}"
        assert packing(free, size) == state
        # TRL packs rows of the data set, and a row of DPO is a pair
        assert packing(TRL.format(data="d", more="packing: true"), size) == "isolated"
        dpo = sft.replace("stage: sft", "stage: dpo").replace("dataset_mixer_list", "mixer_list")
        assert packing(dpo, split) == "isolated"


def test_runs_are_known_from_elsewhere(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "a 'b'\nü" / "runs"
    odd.mkdir(parents=True)
    for folder in (RunFolder(odd / "2025-b"), RunFolder(odd / "2025 b"), RunFolder(odd / "2025-a")):
        create(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAUNCH_RUNS", str(tmp_path / "none"))
    assert [f.path.name for f in rundir.known_runs()] == ["2025 b", "2025-a", "2025-b"]
    assert rundir.find_run("2025-a") == RunFolder(odd / "2025-a")
    # each once, whatever else lies in the runs folder here
    monkeypatch.setenv("LAUNCH_RUNS", str(odd))
    (odd / "not a run").mkdir()
    (odd / "2025 b" / "run.json").unlink()
    assert [f.path.name for f in rundir.known_runs()] == ["2025-a", "2025-b"]


def test_find_by_folder_name_prefix_and_last(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = run(root, "20250101T000000Z-sft-a")
    two = run(root, "20250102T000000Z-sft-a")
    longer = run(root, "20250102T000000Z-sft-a-2")
    assert rundir.find_run(str(one.path)) == one
    monkeypatch.chdir(one.path.parent)
    assert rundir.find_run(f"./{one.path.name}") == one
    assert rundir.find_run("20250101") == one
    assert rundir.find_run("20250102T000000Z-sft-a") == two
    # the newest of a name
    assert rundir.find_run("a") == two
    assert rundir.find_run("sft-a") == two
    assert rundir.find_run("a-2") == longer
    assert rundir.find_run("nothing") is None
    assert rundir.find_run("") is None
    with pytest.raises(UsageError) as caught:
        rundir.find_run("2025")
    (finding,) = caught.value.findings
    assert finding.code == "ambiguous-run"
    assert longer.path.name in (finding.help or "")


def test_last_is_the_run_that_was_started_last(root: Path) -> None:
    assert rundir.find_run("last") is None
    first, second = run(root, "20250101T000000Z-sft-a"), run(root, "20250102T000000Z-sft-a")
    for one in (first, second):
        os.utime(one.manifest, (time.time() - 10,) * 2)
    assert rundir.find_run("last") == second
    # a further attempt writes its manifest anew
    files.write_json(first.manifest, {"attempt": 2})
    assert rundir.find_run("last") == first


@pytest.mark.parametrize("name", ["20250103T000000Z-pipeline-demo", "demo", "pipeline-demo"])
def test_a_campaign_is_found_by_name_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "project/runs"
    elsewhere.mkdir(parents=True)
    create(RunFolder(elsewhere / "20250103T000001Z-sft-sft"))
    pipeline = elsewhere / "20250103T000000Z-pipeline-demo"
    pipeline.mkdir()
    (pipeline / rundir.PIPELINE_RECORD).write_text("{}")
    monkeypatch.setenv("LAUNCH_RUNS", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    assert rundir.find_campaign(name) == RunFolder(pipeline)
    assert rundir.find_campaign("other") is None
