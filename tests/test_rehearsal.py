"""The same stage, short and without consequences: what the overrides make of every kind of file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY

from launcher import config, plan, rehearsal
from launcher import stage as stages
from launcher.stage import Stage

CONFIGS = [
    path
    for path in sorted((REPOSITORY / "configs").rglob("*.yaml"))
    if not path.stem.startswith("pipeline")
]
OUTPUT = Path("/somewhere/a folder")
SFT = {
    "model_name_or_path": "some/model", "chat_template_name": "tulu", "max_seq_length": 512,
    "dataset_mixer_list": ["a/b", "1.0"], "output_dir": "out",
}  # fmt: skip
DPO = {
    "model_name_or_path": "some/model", "chat_template_name": "tulu", "max_seq_length": 512,
    "mixer_list": ["a/b", "1.0"], "output_dir": "out",
}  # fmt: skip
TRL = {"model_name_or_path": "some/model", "dataset_name": "a/b", "output_dir": "out"}


def made(
    tmp_path: Path, args: dict[str, Any], overrides: Sequence[str] = (), **options: Any
) -> Stage:
    """A valid stage of a file that holds this."""
    path = tmp_path / "stage.yaml"
    path.write_text(yaml.safe_dump({"stage": "sft", **options, "args": args}))
    return of(path, overrides)


def of(path: Path, overrides: Sequence[str] = ()) -> Stage:
    return stages.validate(stages.judge(config.load(path, overrides)))


def short(tmp_path: Path, args: dict[str, Any], steps: int = 20, **options: Any) -> Stage:
    """The same, rehearsed; nothing new may be said of it."""
    batch = options.pop("rows", None)
    full = made(tmp_path, args, **options)
    words = rehearsal.overrides(full, steps=steps, output=OUTPUT, batch=batch)
    rehearsed = made(tmp_path, args, words, **options)
    assert new(full, rehearsed) == []
    assert rehearsed.values[full.entry.names.max_steps] == steps
    assert rehearsed.values[full.entry.names.logging_steps] == 1
    assert Path(rehearsed.values["output_dir"]) == OUTPUT
    assert not rehearsed.values["push_to_hub"]
    return rehearsed


def new(full: Stage, rehearsed: Stage) -> list[tuple[str, str | None]]:
    """What is said of the short one that was not said of the full one."""
    before = {(f.code, f.key) for f in full.findings}
    return [(f.code, f.key) for f in rehearsed.findings if (f.code, f.key) not in before]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_config_of_ours(path: Path) -> None:
    full, steps = of(path), 50
    words = rehearsal.overrides(full, steps=steps, output=OUTPUT)
    rehearsed = of(path, words)
    assert new(full, rehearsed) == []
    made = plan.make(rehearsed, gpus=8 if full.options.deepspeed else 1)
    assert made.steps == steps
    output = plan.output_folder(made)
    assert output is not None and output.is_relative_to(OUTPUT)
    # what the short run is measured for stays as it is
    kept = ("learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "seed", "packing")
    assert [full.values.get(k) for k in kept] == [rehearsed.values.get(k) for k in kept]
    assert rehearsed.options.batch == full.options.batch
    assert rehearsed.options.deepspeed == full.options.deepspeed


@pytest.mark.parametrize("shape", ["wrapped", "flat"])
def test_the_other_shapes_of_files(tmp_path: Path, shape: str) -> None:
    told = {"open_instruct": {"script": "finetune.py", "args": SFT}} if shape == "wrapped" else SFT
    path = tmp_path / "stage.yaml"
    path.write_text(yaml.safe_dump(told))
    full = of(path)
    assert full.config.shape == shape
    words = rehearsal.overrides(full, steps=20, output=OUTPUT, batch=8)
    rehearsed = of(path, (*words, "name=short", "on_hang=stop", "deepspeed=none"))
    assert new(full, rehearsed) == []
    assert rehearsed.values["max_train_steps"] == 20
    assert rehearsed.values["dataset_mixer_list"] == ["a/b", "208"]
    assert (rehearsed.name, rehearsed.options.on_hang) == ("short", "stop")


def test_the_hub_and_everybody_else_hear_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without them the full run is refused
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    loud = {
        "push_to_hub": True, "hf_entity": "me", "hf_repo_id": "model", "with_tracking": True,
        "report_to": "wandb", "wandb_entity": "me", "checkpointing_steps": "epoch",
        "keep_last_n_checkpoints": 2, "dataset_config_hash": "mine",
    }  # fmt: skip
    values = short(tmp_path, {**SFT, **loud}).values
    for name in ("try_launch_beaker_eval_jobs", "try_auto_save_to_beaker", "with_tracking"):
        assert values[name] is False
    # or the slice would be found under the name of the whole
    assert values["dataset_config_hash"] is None
    assert values["hf_repo_id"] is None and values["wandb_entity"] is None
    assert int(values["checkpointing_steps"]) > 20


def test_dpo_has_other_names(tmp_path: Path) -> None:
    args = {
        **DPO,
        "config_hash": "mine",
        "push_to_hub": False,
        "try_launch_beaker_eval_jobs": False,
    }
    options = {"stage": "dpo", "deepspeed": "zero2", "batch": {"global": 8, "per_device": 1}}
    values = short(tmp_path, {**args, "checkpointing_steps": 5}, **options).values
    assert values["mixer_list"] == ["a/b", "208"]
    assert values["config_hash"] is None
    assert values["checkpointing_steps"] == 21


def test_trl(tmp_path: Path) -> None:
    loud = {
        "push_to_hub": True, "hub_model_id": "me/x", "report_to": "wandb", "run_name": "x",
        "save_strategy": "steps", "save_steps": 5, "save_total_limit": 2, "logging_strategy": "epoch",
        "eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True, "max_steps": 900,
        "metric_for_best_model": "loss", "greater_is_better": False, "per_device_eval_batch_size": 2,
    }  # fmt: skip
    values = short(tmp_path, {**TRL, **loud}, backend="trl").values
    assert str(values["save_strategy"]) == "no" and str(values["eval_strategy"]) == "no"
    assert values["report_to"] in ("none", ["none"])
    assert values["load_best_model_at_end"] is False
    assert str(values["logging_strategy"]) == "steps"


@pytest.mark.parametrize(
    ("given", "steps", "told"),
    [(10, 20, 2), (0.1, 20, 0.1), (10, 200, 10)],
)
def test_warm_up_keeps_its_share(tmp_path: Path, given: float, steps: int, told: float) -> None:
    args = {**TRL, "max_steps": 100, "warmup_steps": given}
    assert short(tmp_path, args, steps, backend="trl").values["warmup_steps"] == told


def test_packed_rows_are_not_counted_as_rows(tmp_path: Path) -> None:
    data = tmp_path / "data" / "train.jsonl"
    data.parent.mkdir()
    data.write_text('{"text": "a"}\n' * 1600)
    args = {**TRL, "dataset_name": str(data.parent), "num_train_epochs": 1, "warmup_steps": 50}
    told = {"backend": "trl", "batch": {"global": 16, "per_device": 16}}
    # of 100 steps half are warm-up; how many packed ones there are is not known
    assert short(tmp_path, args, **told).values["warmup_steps"] == 10
    packed = short(tmp_path, {**args, "packing": True, "max_length": 512}, **told)
    assert packed.values["warmup_steps"] == 2


def test_what_does_not_matter_is_not_touched(tmp_path: Path) -> None:
    args = {
        **SFT, "push_to_hub": False, "try_launch_beaker_eval_jobs": False,
        "try_auto_save_to_beaker": False, "do_not_randomize_output_dir": True,
    }  # fmt: skip
    words = rehearsal.overrides(made(tmp_path, args), steps=5, output=OUTPUT)
    named = {word.partition("=")[0] for word in words}
    assert named == {
        "max_train_steps", "logging_steps", "checkpointing_steps", "dataset_mixer_list", "output_dir",
    }  # fmt: skip


# --- the slice ------------------------------------------------------------------------------------


def sliced(tmp_path: Path, listed: list[Any], rows: int = 8, steps: int = 20) -> list[str]:
    values = short(tmp_path, {**SFT, "dataset_mixer_list": listed}, steps, rows=rows).values
    return list(values["dataset_mixer_list"])


def lines(tmp_path: Path, name: str, count: int) -> str:
    path = tmp_path / name
    path.write_text(json.dumps({"messages": []}) + "\n")
    path.write_text(path.read_text() * count)
    return str(path)


def test_counts_keep_their_proportions(tmp_path: Path) -> None:
    # 20 steps of 8 rows and a quarter more, and one batch
    assert sliced(tmp_path, ["a/b", "9000", "c/d", "1000"]) == ["a/b", "188", "c/d", "21"]
    assert sliced(tmp_path, ["a/b", "1000000", "c/d", "10"]) == ["a/b", "208", "c/d", "2"]


def test_what_is_no_more_than_that_stays(tmp_path: Path) -> None:
    assert sliced(tmp_path, ["a/b", "200"]) == ["a/b", "200"]
    small = lines(tmp_path, "small data.jsonl", 100)
    assert sliced(tmp_path, [small, "1.0"]) == [small, "1.0"]


def test_local_files_are_counted(tmp_path: Path) -> None:
    large, small = lines(tmp_path, "l.jsonl", 3000), lines(tmp_path, "s.jsonl", 1000)
    assert sliced(tmp_path, [large, "1.0", small, "1.0"]) == [large, "156", small, "52"]
    assert sliced(tmp_path, [large, "0.1", small, "0.9"]) == [large, "52", small, "156"]
    # never more than the entry gives
    assert sliced(tmp_path, [small, "0.1", large, "1.0"], rows=100)[1] == "84"


def test_sizes_that_are_not_known(tmp_path: Path) -> None:
    assert sliced(tmp_path, ["a/b", "1.0"]) == ["a/b", "208"]
    assert sliced(tmp_path, ["a/b", "0.75", "c/d", "0.25"]) == ["a/b", "156", "c/d", "52"]
    assert sliced(tmp_path, ["a/b", "1.0", "c/d", "500"]) == ["a/b", "104", "c/d", "104"]
    assert sliced(tmp_path, ["a/b", "1.0", "c/d", "10"]) == ["a/b", "198", "c/d", "10"]


def test_how_much_is_taken_where_the_batch_is_not_known(tmp_path: Path) -> None:
    args = {**SFT, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    full = made(tmp_path, args)
    # as for eight devices
    assert rehearsal.rows_wanted(full, 10) == 10 * 64 * 1.25 + 64
    assert rehearsal.rows_wanted(full, 10, 8) == 108
    assert rehearsal.rows_wanted(made(tmp_path, SFT, batch={"global": 16}), 10) == 216


def test_a_list_written_as_one_text(tmp_path: Path) -> None:
    values = short(tmp_path, {**SFT, "dataset_mixer_list": "a/b 1.0 c/d 1.0"}, rows=8).values
    assert values["dataset_mixer_list"] == ["a/b", "104", "c/d", "104"]


def test_what_cannot_be_cut_is_said(tmp_path: Path) -> None:
    full = made(tmp_path, TRL, backend="trl")
    told = {f.code: f for f in rehearsal.findings(full, 20)}
    assert set(told) == {"uncut-data", "short-schedule"}
    assert {f.severity for f in told.values()} == {"note"}
    streamed = made(tmp_path, {**TRL, "dataset_streaming": True, "max_steps": 5}, backend="trl")
    assert {f.code for f in rehearsal.findings(streamed, 20)} == {"short-schedule"}
    assert {f.code for f in rehearsal.findings(made(tmp_path, SFT), 20)} == {"short-schedule"}
