"""How much a run will write, whether there is room, and whether folders can be written."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import plans
import pytest
from conftest import Write
from plans import CONFIGS, from_text

from launcher.errors import Finding
from launcher.plan.plan import Plan
from launcher.planning.doctor import disk
from launcher.planning.doctor.disk import Needs, Saved, WriteTarget
from launcher.stage.options import Watch
from launcher.upstream import behaviour

BILLION = 10**9


def write_weights(path: Path, **shapes: list[int]) -> None:
    """A file of weights: its header alone, and none of the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape}
    raw = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of a billion parameters, by its header."""
    folder = tmp_path / "model"
    write_weights(folder / "model.safetensors", a=[1000, 900_000], b=[100_000_000])
    (folder / "config.json").write_text("{}")
    return folder


def test_parameters_are_counted_by_the_header_of_the_weights(model: Path) -> None:
    assert disk.count_parameters(str(model), {}) == BILLION


def test_parameters_of_sharded_weights_are_counted(tmp_path: Path, write: Write) -> None:
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    write("model.safetensors.index.json", json.dumps({"weight_map": files}))
    write("config.json", "{}")
    write_weights(tmp_path / "model-1.safetensors", a=[10, 10])
    write_weights(tmp_path / "model-2.safetensors", b=[5], c=[])
    assert disk.count_parameters(str(tmp_path), {}) == 106


def test_parameters_are_counted_in_the_cache_of_the_hub(write: Write, tmp_path: Path) -> None:
    snapshot = write("hub/models--org--name/snapshots/abc/config.json", "{}").parent
    write_weights(snapshot / "model.safetensors", a=[7])
    write("hub/models--org--name/refs/main", "abc\n")
    environ = {"HF_HOME": str(tmp_path)}
    assert disk.count_parameters("org/name", environ) == 7
    assert disk.count_parameters("org/name", environ, "other") is None


@pytest.mark.parametrize(
    "config", ["", "[]", "{}", '{"model_type": "mamba"}', '{"model_type": "llama"}']
)
def test_a_config_without_a_shape_has_no_size(write: Write, tmp_path: Path, config: str) -> None:
    write("config.json", config)
    assert disk.count_parameters(str(tmp_path), {}) is None


@pytest.mark.parametrize("name", [None, "", 3, "org/never-downloaded", "/no/such"])
def test_a_model_that_is_not_here_has_no_size(name: object) -> None:
    assert disk.count_parameters(name, {}) is None


@pytest.mark.parametrize(
    ("limits", "setting", "kept"), [(False, 2, None), (True, 2, 2), (True, -1, None)]
)
def test_olmo_core_keeps_as_many_checkpoints_as_its_source_says(
    tmp_path: Path, limits: bool, setting: int, kept: int | None
) -> None:
    text = (CONFIGS / "olmo_core" / "dpo_qwen3_0_6b.yaml").read_text(encoding="utf-8")
    stage = from_text(tmp_path, text, f"keep_last_n_checkpoints={setting}")
    behaviours = {**stage.schema.behaviours, behaviour.LIMITS_CHECKPOINTS: limits}
    schema = replace(stage.schema, behaviours=behaviours)
    plan = plans.make_plan(replace(stage, schema=schema), 1)
    saved = disk.estimate_saved(plan, BILLION)
    assert saved is not None
    assert saved.limit == kept
    assert ("none of which is deleted" in saved.formula) is (kept is None)


SFT = """
stage: sft
deepspeed: {deepspeed}
batch: {{global: 16, per_device: 2}}
args:
  model_name_or_path: {model}
  dataset_mixer_list: [set, "1600"]
  num_train_epochs: 2
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
  {more}
"""
TRL = """
stage: sft
backend: trl
deepspeed: {deepspeed}
args:
  model_name_or_path: {model}
  dataset_name: some/set
  {more}
"""


def plan_stage(
    model: Path, text: str, more: str, gpus: int = 2, deepspeed: str = "zero2", nodes: int = 1
) -> Plan:
    """The plan of a stage that trains `model` with further lines below `args:`."""
    text = text.format(model=model, more=more, deepspeed=deepspeed)
    return plans.make_plan(from_text(model.parent, text), gpus, nodes)


def measure(plan: Plan, output: Path | None = None) -> Needs:
    needs = disk.estimate_needs(plan, output, {})
    assert needs is not None
    return needs


@pytest.mark.parametrize(
    "more, gpus, checkpoint, least",
    [
        # no checkpoint without `checkpointing_steps`: the model alone
        ("seed: 1", 2, 14, 2),
        # 200 steps: four checkpoints, of which three are kept and a fourth is there before one goes
        ("checkpointing_steps: 50", 2, 14, 56),
        ("checkpointing_steps: epoch", 2, 14, 30),
        ("checkpointing_steps: 10\n  keep_last_n_checkpoints: 1", 2, 14, 28),
        ("checkpointing_steps: 500", 2, 14, 2),
        # without DeepSpeed the moments are as wide as the weights
        ("checkpointing_steps: 50", 0, 6, 24),
        ("checkpointing_steps: 50\n  use_lora: true", 2, 2, 8),
    ],
)
def test_what_open_instruct_writes(
    model: Path, more: str, gpus: int, checkpoint: int, least: int
) -> None:
    needs = measure(plan_stage(model, SFT, more, gpus))
    assert needs.saved.checkpoint == checkpoint * BILLION
    assert needs.least == least * BILLION
    assert needs.likely == needs.least


@pytest.mark.parametrize(
    "more, deepspeed, checkpoint, least",
    [
        ("save_strategy: 'no'", "null", 12, 4),
        ("max_steps: 100\n  save_steps: 40\n  save_total_limit: 1", "null", 12, 24),
        ("max_steps: 100\n  save_steps: 0.5\n  dtype: bfloat16", "null", 6, 14),
        ("max_steps: 100\n  save_only_model: true\n  save_steps: 50", "null", 4, 12),
        ("max_steps: 100\n  save_steps: 50\n  dtype: bfloat16", "zero2", 16, 34),
        ("max_steps: 100\n  save_steps: 50\n  optim: adamw_bnb_8bit", "null", 6, 16),
        ("num_train_epochs: 3\n  save_strategy: epoch", "null", 12, 40),
    ],
)
def test_what_trl_writes(
    model: Path, more: str, deepspeed: str, checkpoint: int, least: int
) -> None:
    needs = measure(plan_stage(model, TRL, more, 1, deepspeed))
    assert needs.saved.checkpoint == checkpoint * BILLION
    assert needs.least == least * BILLION
    assert needs.likely == needs.least


EVERY_50 = "checkpointing_steps: 50"


def test_checkpoints_of_a_run_of_unknown_length_are_not_certain(model: Path) -> None:
    needs = measure(plan_stage(model, TRL, "save_steps: 50", 1, "null"))
    assert needs.least == 4 * BILLION
    assert needs.likely == 16 * BILLION


def test_several_machines_may_share_the_work(model: Path) -> None:
    needs = measure(plan_stage(model, SFT, EVERY_50, nodes=2))
    assert needs.least == 28 * BILLION
    assert needs.likely == 56 * BILLION


def test_a_run_without_a_final_save_may_write_nothing(model: Path, tmp_path: Path) -> None:
    plan = plan_stage(model, SFT, "seed: 1")
    options = replace(plan.stage.options, probe=Watch(final_save=False))
    unsaved = replace(plan, stage=replace(plan.stage, options=options))
    assert measure(unsaved, tmp_path / "output").least == 0


def test_needs_that_are_not_known_are_not_made_up(model: Path, tmp_path: Path) -> None:
    cache_alone = plan_stage(model, SFT, f"{EVERY_50}\n  cache_dataset_only: true")
    adapter = plan_stage(model, TRL, "use_peft: true", 1, "null")
    not_here = plan_stage(tmp_path / "never-downloaded", SFT, EVERY_50)
    for plan in (cache_alone, adapter, not_here):
        assert disk.estimate_needs(plan, None, {}) is None
    assert list(disk.check_space(None, tmp_path / "output", ())) == []


def test_checkpoints_that_are_replaced_are_room(model: Path, write: Write, tmp_path: Path) -> None:
    os.truncate(write("output/step_50/weights", ""), 14 * BILLION)
    needs = measure(plan_stage(model, SFT, EVERY_50), tmp_path / "output")
    assert needs.likely == (56 - 14) * BILLION
    assert disk.describe_needs(needs).endswith("; 13.0 GiB of it are there already")


def describe(finding: Finding) -> str:
    return f"{finding.severity} {finding.code}"


def needs_of(least: int, likely: int) -> Needs:
    saved = Saved(checkpoint=14, final=2, times=3, limit=None, formula="a + b")
    return Needs(least=least, likely=likely, saved=saved, parameters=BILLION)


def test_a_lack_of_room_is_an_error_where_it_is_certain(tmp_path: Path) -> None:
    output = tmp_path / "not" / "there" / "yet"
    free = disk.measure_room(output)
    assert free is not None
    too_much = 2 * free[0]
    nothing = needs_of(least=0, likely=0)
    perhaps = needs_of(least=0, likely=too_much)
    certainly = needs_of(least=too_much, likely=too_much)

    assert list(disk.check_space(nothing, output, ())) == []
    (finding,) = disk.check_space(perhaps, output, ())
    assert describe(finding) == "warning little-space"
    (finding,) = disk.check_space(certainly, output, ())
    assert describe(finding) == "error too-little-space"
    assert "3 checkpoint(s) of 14 B (a + b)" in finding.message
    assert finding.file == str(output)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_file_system_that_is_nearly_full(small: Path) -> None:
    runs = WriteTarget(small / "a" / "b", "run folders", "LAUNCH_RUNS", vital=True)
    (finding,) = disk.check_space(None, None, [runs, WriteTarget(small, "kernels", "")])
    assert describe(finding) == "warning little-space"
    assert "8.0 MiB free" in finding.message
    assert "(run folders, kernels)" in finding.message
    needs = needs_of(9 * 2**20, 9 * 2**20)
    (finding,) = disk.check_space(needs, small / "out", [runs])
    assert finding.code == "too-little-space"
    # full is not unwritable
    (small / "all").write_bytes(bytes(8 * 2**20))
    assert disk.find_write_fault(small / "out") is None
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    (finding,) = disk.check_writable([runs])
    assert describe(finding) == "error not-writable"
    assert "Read-only file system" in finding.message


def places(plan: Plan | None = None, **environ: str) -> dict[str, str]:
    """The folders that are written, by what they hold."""
    targets = disk.list_places(plan, Path("out"), Path("runs"), {"HOME": "/home/a", **environ})
    return {target.what: str(target.path) for target in targets}


def test_the_folders_that_are_written() -> None:
    usual = places()
    assert usual["models from the hub"] == "/home/a/.cache/huggingface/hub"
    assert usual["data sets from the hub"] == "/home/a/.cache/huggingface/datasets"
    assert usual["compiled kernels"] == "/home/a/.triton/cache"
    assert usual["launch's caches"] == "/home/a/.cache/launch"


def test_variables_move_the_folders_that_are_written() -> None:
    moved = places(HF_HOME="/hf", TRITON_CACHE_DIR="/t", TMPDIR="/elsewhere")
    assert moved["models from the hub"] == "/hf/hub"
    assert moved["compiled kernels"] == "/t"
    assert moved["temporary files"] == "/elsewhere"


def test_the_stage_file_names_the_folder_of_tokenised_data(model: Path) -> None:
    plan = plan_stage(model, SFT, "dataset_local_cache_dir: /tokens")
    assert places(plan)["tokenised data"] == "/tokens"


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    runs = WriteTarget(file / "below", "run folders", "LAUNCH_RUNS", vital=True)
    cache = WriteTarget(file / "kernels", "compiled kernels", "TRITON_CACHE_DIR")
    writable = WriteTarget(tmp_path / "new", "output", "")
    first, second = disk.check_writable([runs, cache, writable])
    assert describe(first) == "error not-writable"
    assert "is not a folder" in first.message
    assert "LAUNCH_RUNS" in str(first.help)
    assert second.severity == "warning"
    assert "TRITON_CACHE_DIR" in str(second.help)
    # nothing was made by asking
    assert list(tmp_path.iterdir()) == [file]
