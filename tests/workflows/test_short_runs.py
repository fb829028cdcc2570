"""The same stage, short and without consequences: what the overrides make of every kind of file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import STAGE_FILES

from launcher.config import load
from launcher.errors import select_errors
from launcher.plan import plan
from launcher.stage import stage
from launcher.stage.stage import Stage
from launcher.workflows.ladder.short import check_short_run, count_needed_rows, list_short_overrides

Args = Mapping[str, object]
OUTPUT = Path("/somewhere/a folder")
STEPS = 20
SFT: Args = {
    "model_name_or_path": "some/model",
    "chat_template_name": "tulu",
    "max_seq_length": 512,
    "dataset_mixer_list": ["a/b", "1.0"],
    "output_dir": "out",
}
TRL: Args = {"model_name_or_path": "some/model", "dataset_name": "a/b", "output_dir": "out"}
ON_TRL = {"stage": "sft", "backend": "trl"}


def judge(path: Path, overrides: Sequence[str] = ()) -> Stage:
    return stage.validate(stage.judge_stage_file(load.load(path, overrides)))


def write_stage(folder: Path, args: Args, **options: object) -> Path:
    path = folder / "stage.yaml"
    path.write_text(yaml.safe_dump({"stage": "sft", **options, "args": dict(args)}))
    return path


def shorten(path: Path, steps: int = STEPS, batch: int | None = None) -> Mapping[str, Any]:
    """The values of the same stage, shortened."""
    full = judge(path)
    short = judge(path, list_short_overrides(full, steps=steps, output=OUTPUT, batch=batch))
    assert not select_errors(short.findings)
    assert short.values[full.entry.names.max_steps] == steps
    assert short.values[full.entry.names.logging_steps] == 1
    assert Path(short.values["output_dir"]) == OUTPUT
    assert not short.values["push_to_hub"]
    return short.values


@pytest.mark.parametrize("path", STAGE_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_config_that_ships_can_be_shortened(path: Path) -> None:
    full = judge(path)
    short = judge(path, list_short_overrides(full, steps=STEPS, output=OUTPUT))
    assert not select_errors(short.findings)
    planned = plan.make(short, gpus=8 if full.options.deepspeed else 1)
    assert planned.steps == STEPS
    output = plan.find_output_folder(planned)
    assert output is not None
    assert output.is_relative_to(OUTPUT)
    # what the short run is measured for stays as it is
    for name in "learning_rate lr_scheduler_type per_device_train_batch_size seed packing".split():
        assert short.values.get(name) == full.values.get(name)
    assert short.options.batch == full.options.batch
    assert short.options.deepspeed == full.options.deepspeed


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(SFT, id="flat"),
        pytest.param({"open_instruct": {"script": "finetune.py", "args": SFT}}, id="wrapped"),
    ],
)
def test_the_other_shapes_of_files(tmp_path: Path, content: Args) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text(yaml.safe_dump(dict(content)))
    words = list_short_overrides(judge(path), steps=STEPS, output=OUTPUT, batch=8)
    short = judge(path, (*words, "name=short", "on_hang=stop", "deepspeed=none"))
    assert short.values["max_train_steps"] == STEPS
    assert short.values["dataset_mixer_list"] == ["a/b", "208"]
    assert short.name == "short"
    assert short.options.on_hang == "stop"


def test_open_instruct_sends_nothing_and_saves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without them the full run is refused
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    hub = {"push_to_hub": True, "hf_entity": "me", "hf_repo_id": "model"}
    tracking = {"with_tracking": True, "report_to": "wandb", "wandb_entity": "me"}
    saves = {"checkpointing_steps": "epoch", "keep_last_n_checkpoints": 2}
    cache = {"dataset_config_hash": "mine"}
    values = shorten(write_stage(tmp_path, {**SFT, **hub, **tracking, **saves, **cache}))
    for name in ("try_launch_beaker_eval_jobs", "try_auto_save_to_beaker", "with_tracking"):
        assert values[name] is False
    # or the slice would be found under the name of the whole
    assert values["dataset_config_hash"] is None
    assert int(values["checkpointing_steps"]) > STEPS


def test_trl_sends_nothing_and_neither_saves_nor_evaluates(tmp_path: Path) -> None:
    hub = {"push_to_hub": True, "hub_model_id": "me/x", "report_to": "wandb", "run_name": "x"}
    saves = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 2}
    evaluation = {"eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 2}
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
    }
    length = {"logging_strategy": "epoch", "max_steps": 900}
    args = {**TRL, **hub, **saves, **evaluation, **best, **length}
    values = shorten(write_stage(tmp_path, args, backend="trl"))
    assert str(values["save_strategy"]) == "no"
    assert str(values["eval_strategy"]) == "no"
    assert values["report_to"] in ("none", ["none"])
    assert values["load_best_model_at_end"] is False
    assert str(values["logging_strategy"]) == "steps"


def test_the_keys_of_dpo_are_others(tmp_path: Path) -> None:
    args = {
        "model_name_or_path": "some/model",
        "chat_template_name": "tulu",
        "max_seq_length": 512,
        "mixer_list": ["a/b", "1.0"],
        "output_dir": "out",
        "config_hash": "mine",
        "push_to_hub": False,
        "try_launch_beaker_eval_jobs": False,
        "checkpointing_steps": 5,
    }
    batch = {"global": 8, "per_device": 1}
    values = shorten(write_stage(tmp_path, args, stage="dpo", deepspeed="zero2", batch=batch))
    assert values["mixer_list"] == ["a/b", "208"]
    assert values["config_hash"] is None
    assert values["checkpointing_steps"] == STEPS + 1


@pytest.mark.parametrize(("warmup", "steps", "kept"), [(10, 20, 2), (0.1, 20, 0.1), (10, 200, 10)])
def test_warm_up_keeps_its_share(tmp_path: Path, warmup: float, steps: int, kept: float) -> None:
    args = {**TRL, "max_steps": 100, "warmup_steps": warmup}
    values = shorten(write_stage(tmp_path, args, backend="trl"), steps)
    assert values["warmup_steps"] == kept


def write_rows(path: Path, count: int, row: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text((json.dumps(row) + "\n") * count)
    return path


def test_warm_up_keeps_its_share_of_an_epoch_whose_steps_are_known(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data/train.jsonl", 1600, {"text": "a"}).parent
    args = {**TRL, "dataset_name": str(data), "num_train_epochs": 1, "warmup_steps": 50}

    def warmup_of(**packing: object) -> object:
        batch = {"global": 16, "per_device": 16}
        path = write_stage(tmp_path, {**args, **packing}, backend="trl", batch=batch)
        return shorten(path)["warmup_steps"]

    # half of 100 steps
    assert warmup_of() == STEPS / 2
    assert warmup_of(packing=True, max_length=512) == 2


def test_the_rows_that_so_many_steps_need(tmp_path: Path) -> None:
    args = {**SFT, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    full = judge(write_stage(tmp_path, args))
    # a quarter more, and one batch; for eight devices where their number is unknown
    assert count_needed_rows(full, 10) == 10 * 64 * 1.25 + 64
    assert count_needed_rows(full, 10, 8) == 108
    with_batch = judge(write_stage(tmp_path, SFT, batch={"global": 16}))
    assert count_needed_rows(with_batch, 10) == 216


def test_a_step_of_olmo_core_counts_packed_rows(tmp_path: Path) -> None:
    args = {
        "model_name_or_path": "allenai/OLMo-2-1124-7B",
        "mixer_list": ["a/b", "1.0"],
        "max_seq_length": 512,
        "output_dir": "out",
    }
    path = write_stage(tmp_path, args, batch={"global": 16}, script="sft_olmo_core")
    # 8 samples of 64 tokens fill a row of 512
    assert count_needed_rows(judge(path), 10) == 8 * 216


CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


@pytest.mark.parametrize(
    ("mixture", "counts"),
    [
        # 20 steps of 8 rows and a quarter more, and one batch, in proportion
        (["a/b", "9000", "c/d", "1000"], ["188", "21"]),
        (["a/b", "1000000", "c/d", "10"], ["208", "2"]),
        (["a/b", "200"], ["200"]),
        (["large.jsonl", "1.0", "small.jsonl", "1.0"], ["156", "52"]),
        (["large.jsonl", "0.1", "small.jsonl", "0.9"], ["52", "156"]),
        (["tiny.jsonl", "1.0"], ["1.0"]),
        # sizes that are not known
        (["a/b", "0.75", "c/d", "0.25"], ["156", "52"]),
        (["a/b", "1.0", "c/d", "500"], ["104", "104"]),
        (["a/b", "1.0", "c/d", "10"], ["198", "10"]),
        ("a/b 1.0 c/d 1.0", ["104", "104"]),
    ],
)
def test_the_slice_of_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixture: object, counts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("large", 3000), ("small", 1000), ("tiny", 100)):
        write_rows(tmp_path / f"{name}.jsonl", rows, CHAT)
    path = write_stage(tmp_path, {**SFT, "dataset_mixer_list": mixture})
    assert shorten(path, batch=8)["dataset_mixer_list"][1::2] == counts


@pytest.mark.parametrize(
    ("args", "options", "codes"),
    [
        (TRL, ON_TRL, {"uncut-data", "short-schedule"}),
        ({**TRL, "dataset_streaming": True, "max_steps": 5}, ON_TRL, {"short-schedule"}),
        (SFT, {}, {"short-schedule"}),
    ],
)
def test_what_cannot_be_cut_is_a_note(
    tmp_path: Path, args: Args, options: Args, codes: set[str]
) -> None:
    findings = check_short_run(judge(write_stage(tmp_path, args, **options)), STEPS)
    assert {finding.severity for finding in findings} == {"note"}
    assert {finding.code for finding in findings} == codes
