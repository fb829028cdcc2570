"""The same stage, short and without consequences: what the overrides make of every kind of file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import STAGE_FILES

from launcher.config import load
from launcher.errors import errors
from launcher.plan import plan
from launcher.stage import stage
from launcher.stage.stage import Stage
from launcher.workflows.ladder.short import rows_needed, short_findings, short_overrides

OUTPUT = Path("/somewhere/a folder")
SFT = {
    "model_name_or_path": "some/model", "chat_template_name": "tulu", "max_seq_length": 512,
    "dataset_mixer_list": ["a/b", "1.0"], "output_dir": "out",
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
TRL = {"model_name_or_path": "some/model", "dataset_name": "a/b", "output_dir": "out"}


def of(path: Path, overrides: Sequence[str] = ()) -> Stage:
    return stage.validate(stage.judge_stage_file(load.load(path, overrides)))


def made(
    tmp_path: Path, args: dict[str, Any], overrides: Sequence[str] = (), **options: Any
) -> Stage:
    path = tmp_path / "stage.yaml"
    path.write_text(yaml.safe_dump({"stage": "sft", **options, "args": args}))
    return of(path, overrides)


def short(tmp_path: Path, args: dict[str, Any], steps: int = 20, **options: Any) -> Stage:
    """The same, shortened."""
    batch = options.pop("rows", None)
    full = made(tmp_path, args, **options)
    words = short_overrides(full, steps=steps, output=OUTPUT, batch=batch)
    found = made(tmp_path, args, words, **options)
    assert not errors(found.findings)
    assert found.values[full.entry.names.max_steps] == steps
    assert found.values[full.entry.names.logging_steps] == 1
    assert Path(found.values["output_dir"]) == OUTPUT
    assert not found.values["push_to_hub"]
    return found


@pytest.mark.parametrize("path", STAGE_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_config_of_ours(path: Path) -> None:
    full, steps = of(path), 50
    found = of(path, short_overrides(full, steps=steps, output=OUTPUT))
    assert not errors(found.findings)
    planned = plan.make(found, gpus=8 if full.options.deepspeed else 1)
    assert planned.steps == steps
    output = plan.output_folder(planned)
    assert output is not None and output.is_relative_to(OUTPUT)
    # what the short run is measured for stays as it is
    kept = ("learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "seed", "packing")
    assert [full.values.get(k) for k in kept] == [found.values.get(k) for k in kept]
    assert found.options.batch == full.options.batch
    assert found.options.deepspeed == full.options.deepspeed


@pytest.mark.parametrize("shape", ["wrapped", "flat"])
def test_the_other_shapes_of_files(tmp_path: Path, shape: str) -> None:
    wrapped = {"open_instruct": {"script": "finetune.py", "args": SFT}}
    path = tmp_path / "stage.yaml"
    path.write_text(yaml.safe_dump(wrapped if shape == "wrapped" else SFT))
    words = short_overrides(of(path), steps=20, output=OUTPUT, batch=8)
    found = of(path, (*words, "name=short", "on_hang=stop", "deepspeed=none"))
    assert found.values["max_train_steps"] == 20
    assert found.values["dataset_mixer_list"] == ["a/b", "208"]
    assert (found.name, found.options.on_hang) == ("short", "stop")


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
    assert int(values["checkpointing_steps"]) > 20


def test_what_is_cut_of_trl_and_dpo(tmp_path: Path) -> None:
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
    # dpo has other names
    args = {**SFT, "mixer_list": SFT["dataset_mixer_list"], "config_hash": "mine"}
    del args["dataset_mixer_list"]
    args |= {"push_to_hub": False, "try_launch_beaker_eval_jobs": False, "checkpointing_steps": 5}
    options = {"stage": "dpo", "deepspeed": "zero2", "batch": {"global": 8, "per_device": 1}}
    values = short(tmp_path, args, **options).values
    assert values["mixer_list"] == ["a/b", "208"]
    assert values["config_hash"] is None and values["checkpointing_steps"] == 21


@pytest.mark.parametrize(("given", "steps", "kept"), [(10, 20, 2), (0.1, 20, 0.1), (10, 200, 10)])
def test_warm_up_keeps_its_share(tmp_path: Path, given: float, steps: int, kept: float) -> None:
    args = {**TRL, "max_steps": 100, "warmup_steps": given}
    assert short(tmp_path, args, steps, backend="trl").values["warmup_steps"] == kept


def lines(tmp_path: Path, name: str, count: int, **row: Any) -> str:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text((json.dumps(row or CHAT) + "\n") * count)
    return str(path)


def test_packed_rows_and_unknown_batches(tmp_path: Path) -> None:
    data = Path(lines(tmp_path, "data/train.jsonl", 1600, text="a")).parent
    args = {**TRL, "dataset_name": str(data), "num_train_epochs": 1, "warmup_steps": 50}
    options = {"backend": "trl", "batch": {"global": 16, "per_device": 16}}
    # of 100 steps half are warm-up; how many packed ones there are is not known
    assert short(tmp_path, args, **options).values["warmup_steps"] == 10
    packed = short(tmp_path, {**args, "packing": True, "max_length": 512}, **options)
    assert packed.values["warmup_steps"] == 2
    # how much is taken where the batch is not known
    args = {**SFT, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    full = made(tmp_path, args)
    # as for eight devices
    assert rows_needed(full, 10) == 10 * 64 * 1.25 + 64
    assert rows_needed(full, 10, 8) == 108
    assert rows_needed(made(tmp_path, SFT, batch={"global": 16}), 10) == 216
    # a step of OLMo-core's SFT counts packed rows: 8 samples of 64 tokens fill one of 512
    args = {
        "model_name_or_path": "allenai/OLMo-2-1124-7B",
        "mixer_list": ["a/b", "1.0"],
        "max_seq_length": 512,
    }
    olmo = made(
        tmp_path, {**args, "output_dir": "out"}, batch={"global": 16}, script="sft_olmo_core"
    )
    assert rows_needed(olmo, 10) == 8 * 216


@pytest.mark.parametrize(
    ("listed", "counts"),
    [
        # 20 steps of 8 rows and a quarter more, and one batch, in proportion
        (["a/b", "9000", "c/d", "1000"], ["188", "21"]),
        (["a/b", "1000000", "c/d", "10"], ["208", "2"]),
        (["a/b", "200"], ["200"]),
        (["large", "1.0", "small", "1.0"], ["156", "52"]),
        (["large", "0.1", "small", "0.9"], ["52", "156"]),
        (["tiny", "1.0"], ["1.0"]),
        # sizes that are not known
        (["a/b", "1.0"], ["208"]),
        (["a/b", "0.75", "c/d", "0.25"], ["156", "52"]),
        (["a/b", "1.0", "c/d", "500"], ["104", "104"]),
        (["a/b", "1.0", "c/d", "10"], ["198", "10"]),
        ("a/b 1.0 c/d 1.0", ["104", "104"]),
    ],
)
def test_the_slice(tmp_path: Path, listed: Any, counts: list[str]) -> None:
    sizes = {"large": 3000, "small": 1000, "tiny": 100}
    if isinstance(listed, list):
        listed = [
            lines(tmp_path, f"{word}.jsonl", sizes[word]) if word in sizes else word
            for word in listed
        ]
    values = short(tmp_path, {**SFT, "dataset_mixer_list": listed}, rows=8).values
    assert values["dataset_mixer_list"][1::2] == counts


def test_what_cannot_be_cut_is_said(tmp_path: Path) -> None:
    def said(args: dict[str, Any], **options: Any) -> set[str]:
        found = short_findings(made(tmp_path, args, **options), 20)
        assert {one.severity for one in found} == {"note"}
        return {one.code for one in found}

    assert said(TRL, backend="trl") == {"uncut-data", "short-schedule"}
    streamed = {**TRL, "dataset_streaming": True, "max_steps": 5}
    assert said(streamed, backend="trl") == said(SFT) == {"short-schedule"}
