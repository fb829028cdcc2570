"""How much a run will write, whether there is room, and whether folders can be written."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import plans
import pytest
from conftest import Write
from plans import CONFIGS, from_text

from launcher.plan.plan import Plan
from launcher.planning.doctor import disk
from launcher.planning.doctor.disk import Needs, Saved, WriteTarget
from launcher.stage.options import Watch
from launcher.upstream import behaviour

GIB = 2**30
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
}  # fmt: skip


def safetensors(path: Path, **shapes: list[int]) -> None:
    """A file of weights: its header alone, and none of the data."""
    header = {name: {"dtype": "BF16", "shape": shape} for name, shape in shapes.items()}
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of a billion parameters, by its header."""
    folder = tmp_path / "model"
    safetensors(folder / "model.safetensors", a=[1000, 900_000], b=[100_000_000])
    (folder / "config.json").write_text("{}")
    return folder


def test_parameters_from_headers(model: Path, write: Write) -> None:
    assert disk.parameters_of(str(model), {}) == 10**9
    mapped = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (model / "model.safetensors").unlink()
    write("model/model.safetensors.index.json", json.dumps({"weight_map": mapped}))
    safetensors(model / "model-1.safetensors", a=[10, 10])
    safetensors(model / "model-2.safetensors", b=[5], c=[])
    assert disk.parameters_of(str(model), {}) == 106


@pytest.mark.parametrize(
    ("limits", "given", "kept"), [(False, 2, None), (True, 2, 2), (True, -1, None), (True, 3, 3)]
)  # fmt: skip
def test_olmo_core_keeps_as_many_checkpoints_as_its_source_says(
    tmp_path: Path, limits: bool, given: int, kept: int | None
) -> None:
    text = (CONFIGS / "olmo_core" / "dpo_qwen3_0_6b.yaml").read_text(encoding="utf-8")
    text = text.replace(
        "  logging_steps: 1", f"  logging_steps: 1\n  keep_last_n_checkpoints: {given}"
    )
    made = plans.planned(from_text(tmp_path, text), 1)
    schema = made.stage.schema
    schema = replace(schema, behaviours={**schema.behaviours, behaviour.LIMITS_CHECKPOINTS: limits})
    saved = disk.saved(replace(made, stage=replace(made.stage, schema=schema)), 10**9)
    assert saved is not None
    assert saved.limit == kept
    assert ("none of which is deleted" in saved.formula) == (kept is None)


def test_parameters_from_the_hubs_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "hub" / "models--org--name"
    safetensors(repository / "snapshots" / "abc" / "model.safetensors", a=[7])
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc\n")
    environ = {"HF_HOME": str(tmp_path / "hub")}
    told = disk.parameters_of("org/name", environ)
    assert told == 7
    assert disk.parameters_of("org/name", environ, "other") is None


def test_a_size_that_is_not_known_is_none(write: Write, tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"model_type": "mamba"}', '{"model_type": "llama"}'):
        write("config.json", text)
        assert disk.parameters_of(str(tmp_path), {}) is None
    for name in (None, "", 3, "org/never-downloaded", "/no/such"):
        assert disk.parameters_of(name, {}) is None


SFT = """
stage: sft
{deepspeed}
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
{deepspeed}
args:
  model_name_or_path: {model}
  dataset_name: some/set
  {more}
"""


def needed(
    tmp_path: Path, model: Path, text: str, more: str, gpus: int = 2, deepspeed: str = "zero2",
    output: Path | None = None, nodes: int = 1,
) -> Needs | None:  # fmt: skip
    line = f"deepspeed: {deepspeed}" if deepspeed else ""
    stage = from_text(tmp_path, text.format(model=model, more=more or "seed: 1", deepspeed=line))
    return disk.needs(plans.planned(stage, gpus, nodes), output, {})


@pytest.mark.parametrize(
    ("more", "gpus", "each", "least", "likely"),
    [
        # no checkpoint without `checkpointing_steps`: the model alone
        ("", 2, 14, 2, 2),
        # 200 steps: four checkpoints, of which three are kept and a fourth is there before one goes
        ("checkpointing_steps: 50", 2, 14, 56, 56),
        ("checkpointing_steps: epoch", 2, 14, 30, 30),
        ("checkpointing_steps: 10\n  keep_last_n_checkpoints: 1", 2, 14, 28, 28),
        ("checkpointing_steps: 500", 2, 14, 2, 2),
        # without DeepSpeed the moments are as wide as the weights
        ("checkpointing_steps: 50", 0, 6, 24, 24),
        ("checkpointing_steps: 50\n  use_lora: true", 2, 2, 8, 8),
        ("checkpointing_steps: 50\n  cache_dataset_only: true", 2, None, None, None),
    ],
)
def test_open_instruct(
    tmp_path: Path, model: Path, more: str, gpus: int, each: int, least: int, likely: int
) -> None:
    told = needed(tmp_path, model, SFT, more, gpus)
    if each is None:
        assert told is None
        return
    assert told is not None and told.saved.checkpoint == each * 10**9
    assert (told.least, told.likely) == (least * 10**9, likely * 10**9)


@pytest.mark.parametrize(
    ("more", "deepspeed", "each", "least", "likely"),
    [
        ("save_strategy: 'no'", "", 12, 4, 4),
        ("max_steps: 100\n  save_steps: 40\n  save_total_limit: 1", "", 12, 24, 24),
        ("max_steps: 100\n  save_steps: 0.5\n  dtype: bfloat16", "", 6, 14, 14),
        ("max_steps: 100\n  save_only_model: true\n  save_steps: 50", "", 4, 12, 12),
        ("max_steps: 100\n  save_steps: 50\n  dtype: bfloat16", "zero2", 16, 34, 34),
        ("max_steps: 100\n  save_steps: 50\n  optim: adamw_bnb_8bit", "", 6, 16, 16),
        ("num_train_epochs: 3\n  save_strategy: epoch", "", 12, 40, 40),
        # how many steps there will be is not known: none is certain
        ("save_steps: 50", "", 12, 4, 16),
    ],
)
def test_trl(
    tmp_path: Path, model: Path, more: str, deepspeed: str, each: int, least: int, likely: int
) -> None:
    told = needed(tmp_path, model, TRL, more, 1, deepspeed)
    assert told is not None and told.saved.checkpoint == each * 10**9
    assert (told.least, told.likely) == (least * 10**9, likely * 10**9)


def test_what_leaves_room(tmp_path: Path, model: Path) -> None:
    stage = from_text(tmp_path, SFT.format(model=model, more="seed: 1", deepspeed=""))
    for final_save, least in ((True, 2 * 10**9), (False, 0)):
        options = replace(stage.options, probe=Watch(final_save=final_save))
        made = plans.planned(replace(stage, options=options), 2)
        plain = disk.needs(made, tmp_path / "output", {})
        assert plain is not None and plain.least == least
    # several machines may share the work
    told = needed(tmp_path, model, SFT, "checkpointing_steps: 50", nodes=2)
    assert told is not None and (told.least, told.likely) == (28 * 10**9, 56 * 10**9)
    # what is not known is not made up
    assert needed(tmp_path, model, TRL, "use_peft: true", 1, "") is None
    assert needed(tmp_path, Path("org/never-downloaded"), SFT, "checkpointing_steps: 50") is None
    assert list(disk.too_little(None, tmp_path / "output", ())) == []


def test_checkpoints_that_go_are_room(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "output"
    (output / "step_50").mkdir(parents=True)
    with (output / "step_50" / "weights").open("wb") as file:
        file.truncate(14 * 10**9)
    told = needed(tmp_path, model, SFT, "checkpointing_steps: 50", output=output)
    assert told is not None and told.likely == (56 - 14) * 10**9
    assert disk.described(told).endswith("; 13.0 GiB of it are there already")


def needs(least: int, likely: int) -> Needs:
    saved = Saved(checkpoint=14, final=2, times=3, limit=None, formula="a + b")
    return Needs(least=least, likely=likely, saved=saved, parameters=10**9)


def test_room(tmp_path: Path) -> None:
    output = tmp_path / "not" / "there" / "yet"
    told = disk.free(output)
    assert told is not None
    room = told[0]
    assert list(disk.too_little(needs(0, 0), output, ())) == []
    (finding,) = disk.too_little(needs(room * 2, room * 2), output, ())
    assert (finding.severity, finding.code) == ("error", "too-little-space")
    assert "3 checkpoint(s) of 14 B (a + b)" in finding.message and finding.file == str(output)
    (finding,) = disk.too_little(needs(0, room * 2), output, ())
    assert (finding.severity, finding.code) == ("warning", "little-space")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if os.getuid() or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    return place


def test_a_file_system_that_is_nearly_full(small: Path, tmp_path: Path) -> None:
    try:
        found = [WriteTarget(small / "a" / "b", "run folders", "LAUNCH_RUNS", vital=True)]
        (finding,) = disk.too_little(None, None, [*found, WriteTarget(small, "kernels", "")])
        assert (finding.severity, finding.code) == ("warning", "little-space")
        assert "8.0 MiB free" in finding.message and "(run folders, kernels)" in finding.message
        told = needs(9 * 2**20, 9 * 2**20)
        (finding,) = disk.too_little(told, small / "out", found)
        assert finding.code == "too-little-space"
        (small / "all").write_bytes(b"0" * (8 * 2**20))
        # full is not unwritable
        assert disk.not_writable(small / "out") is None
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        (finding,) = disk.unwritable(found)
        assert (finding.severity, finding.code) == ("error", "not-writable")
        assert "Read-only file system" in finding.message
    finally:
        subprocess.run(["umount", str(small)], check=True)


def places(tmp_path: Path, made: Plan | None = None, **environ: str) -> dict[str, Path]:
    told = disk.places(made, tmp_path / "out", tmp_path / "runs", {"HOME": "/home/a", **environ})
    return {one.what: one.path for one in told}


def test_the_folders_that_are_written(tmp_path: Path, model: Path) -> None:
    told = places(tmp_path)
    assert told["models from the hub"] == Path("/home/a/.cache/huggingface/hub")
    assert told["data sets from the hub"] == Path("/home/a/.cache/huggingface/datasets")
    assert told["compiled kernels"] == Path("/home/a/.triton/cache")
    assert told["launch's caches"] == Path("/home/a/.cache/launch")
    told = places(tmp_path, HF_HOME="/hf", TRITON_CACHE_DIR="/t", TMPDIR="/elsewhere")
    paths = [told[name] for name in ("models from the hub", "compiled kernels", "temporary files")]
    assert paths == [Path("/hf/hub"), Path("/t"), Path("/elsewhere")]
    text = SFT.format(model=model, more="dataset_local_cache_dir: /tokens", deepspeed="")
    made = plans.planned(from_text(tmp_path, text), 2)
    assert places(tmp_path, made)["tokenised data"] == Path("/tokens")


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    vital = WriteTarget(tmp_path / "file" / "below", "run folders", "LAUNCH_RUNS", vital=True)
    cache = WriteTarget(tmp_path / "file" / "kernels", "compiled kernels", "TRITON_CACHE_DIR")
    first, second = disk.unwritable([vital, cache, WriteTarget(tmp_path / "new", "fine", "")])
    assert (first.severity, first.code) == ("error", "not-writable")
    assert "is not a folder" in first.message and "LAUNCH_RUNS" in (first.help or "")
    assert second.severity == "warning" and "TRITON_CACHE_DIR" in (second.help or "")
    # nothing was made by asking
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
