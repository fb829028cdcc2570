"""TRL's rules about arguments: where each speaks, and where it is silent."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from rule_findings import summarise, values_of

from launcher.config import load
from launcher.rules import registry
from launcher.rules.trl import arguments as trl_rules
from launcher.stage import stage
from launcher.upstream.locate import Locator
from launcher.upstream.schema import NoSuchField, Values

FULL_SHARD = {"fsdp": "full_shard"}
LORA = {"use_peft": True}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


def mixed(*entries: Any) -> dict[str, Any]:
    return {"dataset_name": None, "datasets": [*entries]}


MIXED = mixed({"path": "x"}, {"path": "y"})


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # no argument names a file that is there
    monkeypatch.chdir(tmp_path)


def summarise_arguments(values: Values) -> list[str]:
    """Each finding as `code severity key`, those of layer `parser` marked."""
    lines = []
    for finding in registry.apply(values):
        (line,) = summarise([finding])
        if finding.layer == "parser":
            line += "!"
        lines.append(line)
    return lines


# what a __post_init__ refuses, by the code and the argument
REFUSED = [
    ("sft", {"model_init_kwargs": "{x"}, "bad-json error model_init_kwargs"),
    ("dpo", {"deepspeed": '{"a": "²"}'}, "bad-json error deepspeed"),
    ("sft", {"fp16": True, "bf16": True}, "two-precisions error fp16"),
    (
        "sft",
        {"fp16_full_eval": True, "bf16_full_eval": True},
        "two-precisions error fp16_full_eval",
    ),
    ("dpo", {"load_in_4bit": True, "load_in_8bit": True}, "two-precisions error load_in_8bit"),
    ("dpo", {"loss_weights": [1.0, 0.5]}, "loss-weights error loss_weights"),
    ("sft", {"logging_steps": 0}, "logging-steps error logging_steps"),
    ("sft", {"logging_steps": 2.5}, "whole-steps error logging_steps"),
    ("sft", {"save_steps": "inf"}, "whole-steps error save_steps"),
    ("dpo", {"eval_strategy": "steps", "eval_steps": 2.5}, "whole-steps error eval_steps"),
    (
        "sft",
        {"logging_strategy": "no", "logging_steps": 2.5, "eval_strategy": "steps"},
        "whole-steps error logging_steps",
    ),
    (
        "sft",
        {"eval_strategy": "steps", "logging_strategy": "no", "logging_steps": 0},
        "eval-steps error eval_steps",
    ),
    (
        "sft",
        {"load_best_model_at_end": True, "eval_strategy": "epoch"},
        "best-model-strategy error load_best_model_at_end",
    ),
    (
        "sft",
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 300},
        "best-model-steps error save_steps",
    ),
    (
        "sft",
        {
            "load_best_model_at_end": True,
            "eval_strategy": "steps",
            "eval_steps": 0.2,
            "save_steps": 0.3,
        },
        "best-model-steps error save_steps",
    ),
    (
        "dpo",
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        "scheduler-needs-eval error lr_scheduler_type",
    ),
    ("sft", {"warmup_steps": -1}, "negative-warmup error warmup_steps"),
    ("sft", {"dataloader_prefetch_factor": 2}, "prefetch-workers error dataloader_prefetch_factor"),
    ("sft", {"torch_empty_cache_steps": 0}, "empty-cache-steps error torch_empty_cache_steps"),
    ("dpo", {"parallelism_config": 2}, "parallelism-config error parallelism_config"),
    ("sft", mixed({"path": "x", "splitt": "train"}), "unknown-key error datasets[0].splitt"),
    ("sft", mixed({"name": "x"}), "bad-dataset error datasets[0]"),
    ("sft", {"pad_to_multiple_of": "x"}, "pad-multiple error pad_to_multiple_of"),
]

# what parses, and then crashes or does nothing
GOES_WRONG = [
    ("sft", {"model_name_or_path": None}, "no-model error model_name_or_path"),
    ("dpo", {"dataset_name": None}, "no-data error dataset_name"),
    ("dpo", {**MIXED, "dataset_name": "x"}, "two-data-sources error dataset_name"),
    ("sft", mixed({"path": "x", "fraction": 1}, {"path": "y"}), "bad-fraction error datasets[1]"),
    (
        "sft",
        mixed({"path": "x", "fraction": -1}, {"path": "y", "fraction": 1}),
        "bad-fraction error datasets[0].fraction",
    ),
    ("sft", mixed({"path": "x", "fraction": 0.1}), "conditional-key warning datasets[0].fraction"),
    ("sft", mixed({"path": "x", "split": "train[1:2"}), "no-such-split error datasets[0].split"),
    ("sft", mixed({"path": "x", "split": 3}), "bad-dataset error datasets[0].split"),
    ("sft", mixed({"path": "x", "columns": "messages"}), "bad-dataset error datasets[0].columns"),
    ("sft", mixed({"path": "x", "data_files": 5}), "bad-dataset error datasets[0].data_files"),
    ("sft", mixed({"path": "x"}, "y"), "bad-dataset error datasets[1]"),
    (
        "sft",
        {**MIXED, "dataset_train_split": "train_sft"},
        "no-such-split error dataset_train_split",
    ),
    ("sft", {**MIXED, "test_split_size": 1.5}, "bad-test-split error test_split_size"),
    ("sft", {**MIXED, "test_split_size": 0}, "bad-test-split error test_split_size"),
    ("sft", {"use_liger_kernel": True, **LORA}, "liger-with-lora warning use_liger_kernel"),
    ("sft", {"deepspeed": "no/such.json"}, "own-deepspeed error deepspeed"),
    (
        "dpo",
        {"dtype": "bfloat16", "model_init_kwargs": '{"dtype": "float32"}'},
        "conditional-key warning dtype",
    ),
    (
        "sft",
        {"model_init_kwargs": '{"torch_dtype": "bfloat16"}'},
        "conditional-key warning model_init_kwargs",
    ),
    ("sft", {"eval_on_start": True}, "eval-without-data error eval_on_start"),
    (
        "sft",
        {"save_strategy": "best", "metric_for_best_model": "loss"},
        "best-without-eval warning save_strategy",
    ),
    (
        "sft",
        {"lr_scheduler_type": "constant", "warmup_steps": 10},
        "warmup-unread warning warmup_steps",
    ),
    ("sft", {"dataset_streaming": True}, "stream-without-steps error dataset_streaming"),
    (
        "dpo",
        {"datasets": ["a"], "dataset_name": None, "streaming": True},
        "stream-without-steps error streaming",
    ),
    ("sft", {"output_dir": ""}, "no-output error output_dir"),
    ("sft", {"packing": True, "max_length": "none"}, "packing-without-length error packing"),
    ("sft", {"resume_from_checkpoint": "true"}, "resume-word error resume_from_checkpoint"),
    ("sft", {"load_in_8bit": True}, "quantised-whole error load_in_4bit"),
    (
        "sft",
        {**LORA, "lora_target_modules": "q_proj,v_proj"},
        "lora-targets error lora_target_modules",
    ),
    ("sft", {**LORA, "lora_target_modules": "q_proj"}, "lora-targets error lora_target_modules"),
    (
        "sft",
        {**FULL_SHARD, "fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}},
        "fsdp-unsaved warning fsdp_config",
    ),
    ("sft", {"padding_free": True}, "padding-free-length error padding_free"),
    (
        "sft",
        {"dataset_kwargs": '{"add_special_tokens": false}'},
        "conditional-key warning dataset_kwargs",
    ),
    ("dpo", {"padding_free": True}, "padding-free-off warning padding_free"),
    # what belongs to something that is off
    ("sft", {"packing_strategy": "wrapped"}, "conditional-key warning packing_strategy"),
    (
        "sft",
        {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "conditional-key warning gradient_checkpointing_kwargs",
    ),
    ("sft", {"do_eval": True}, "conditional-key warning do_eval"),
    (
        "sft",
        {"save_strategy": "no", "load_best_model_at_end": True},
        "conditional-key warning load_best_model_at_end",
    ),
    ("dpo", {"precompute_ref_batch_size": 4}, "conditional-key warning precompute_ref_batch_size"),
    ("dpo", {"ref_model_sync_steps": 4}, "conditional-key warning ref_model_sync_steps"),
    ("dpo", {"label_smoothing_factor": 0.1}, "conditional-key warning label_smoothing_factor"),
    (
        "sft",
        {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"foo": 1}},
        "conditional-key warning lr_scheduler_kwargs",
    ),
    # numbers
    ("sft", {"learning_rate": -0.1}, "out-of-range error learning_rate"),
    ("sft", {"learning_rate": 0.0}, "out-of-range warning learning_rate"),
    ("sft", {"weight_decay": -1}, "out-of-range warning weight_decay"),
    ("sft", {"max_grad_norm": -1}, "out-of-range warning max_grad_norm"),
    ("sft", {**LORA, "lora_alpha": 0}, "out-of-range warning lora_alpha"),
    ("sft", {"num_train_epochs": 0}, "out-of-range warning num_train_epochs"),
    ("sft", {"num_train_epochs": 0, "max_steps": 5}, "conditional-key warning num_train_epochs"),
    ("sft", {"max_steps": 0}, "out-of-range warning max_steps"),
    ("sft", {"max_steps": 5, "warmup_steps": 5}, "out-of-range warning warmup_steps"),
    ("sft", {"save_steps": 0}, "out-of-range warning save_steps"),
    ("dpo", {"max_length": 0}, "out-of-range error max_length"),
    # losses of DPO
    ("dpo", {"loss_type": ["sigmoid", "ipo"], "beta": 0}, "zero-beta error beta"),
    ("dpo", {"beta": 0}, "zero-beta warning beta"),
    ("dpo", {"beta": -0.5}, "out-of-range warning beta"),
    ("dpo", {"beta": float("nan")}, "out-of-range error beta"),
    ("dpo", {"beta": 0.5, "loss_type": ["sft"]}, "conditional-key warning beta"),
    ("dpo", {"label_smoothing": 0.1}, "conditional-key warning label_smoothing"),
    ("dpo", {"discopop_tau": 0}, "conditional-key warning discopop_tau"),
    ("dpo", {"f_alpha_divergence_coef": 0.2}, "conditional-key warning f_alpha_divergence_coef"),
]


# one combination of settings can be wrong twice, and then both are said
BESIDE = {
    "logging-steps error logging_steps!",
    "own-deepspeed error deepspeed",
    "conditional-key warning metric_for_best_model",
    "prefetch-workers error dataloader_prefetch_factor!",
}


def test_each_rule_speaks_where_it_should_and_every_one_is_tried() -> None:
    silent = {rule.__doc__ for rules in trl_rules.RULES.values() for rule in rules}
    for stage_name, changes, expected in [(s, c, f"{e}!") for s, c, e in REFUSED] + GOES_WRONG:
        values = values_of(f"trl-{stage_name}", changes)
        said = summarise_arguments(values)
        assert said.count(expected) == 1 and {*said} - BESIDE <= {expected}, changes
        for rule in trl_rules.RULES[stage_name]:
            with suppress(NoSuchField):
                silent -= {rule.__doc__} if list(rule(values)) else set()
    assert silent == set()
    assert trl_rules.RANGES.keys() <= values_of("trl-dpo", {}).schema.fields.keys()


SILENT = [
    ("sft", MIXED),
    ("dpo", {**MIXED, **EVALUATED, "test_split_size": 20}),
    ("sft", {**mixed({"path": "x", "split": "train+test"}), "streaming": True, "max_steps": 5}),
    ("sft", mixed({"path": "x", "fraction": 0.3}, {"path": "y", "fraction": 7})),
    ("sft", {}),
    ("dpo", {}),
    ("sft", {"fp16": True}),
    ("sft", {"pad_to_multiple_of": "auto"}),
    ("sft", {"logging_steps": 0, "logging_strategy": "no"}),
    ("sft", {"logging_steps": 0.1, "save_steps": 20.0}),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 250}),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}),
    (
        "sft",
        {
            "load_best_model_at_end": True,
            "eval_strategy": "steps",
            "eval_steps": 0.1,
            "save_steps": 0.3,
        },
    ),
    ("dpo", {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}),
    (
        "sft",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    ),
    ("sft", {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}),
    (
        "sft",
        {
            "dataloader_num_workers": 2,
            "dataloader_prefetch_factor": 2,
            "dataloader_persistent_workers": True,
        },
    ),
    ("sft", {"accelerator_config": {"split_batches": True}}),
    ("sft", {"fsdp": "full_shard auto_wrap"}),
    ("sft", {"fsdp_config": {"version": "two"}}),
    ("sft", {"fsdp": "hybrid_shard", "fsdp_config": {"fsdp_version": 1}}),
    ("sft", {**LORA, "load_in_4bit": True}),
    ("sft", {**LORA, "lora_target_modules": ["all-linear"]}),
    ("sft", {"lora_dropout": 1.5, "lora_alpha": 0}),
    ("sft", {"packing": True, "padding_free": True, "packing_strategy": "bfd_split"}),
    ("sft", {"padding_free": True, "max_length": "none"}),
    ("sft", {"gradient_checkpointing_kwargs": {"selective": True}}),
    ("sft", {"report_to": "all"}),
    ("dpo", {"datasets": ["a"], "dataset_name": None}),
    # each way to name data has a switch of its own
    ("dpo", {"datasets": ["a"], "dataset_name": None, "dataset_streaming": True}),
    ("sft", {"streaming": True}),
    ("sft", {"datasets": ["a"], "dataset_name": None, "streaming": True, "max_steps": 5}),
    ("sft", {"dataset_streaming": True, "max_steps": 5}),
    ("sft", {"model_init_kwargs": '{"dtype": "bfloat16", "torch_dtype": "bfloat16"}'}),
    ("dpo", {"eval_strategy": "epoch", "metric_for_best_model": "rewards/margins"}),
    ("sft", {**EVALUATED, "do_eval": True, "per_device_eval_batch_size": 2}),
    ("sft", {"max_steps": 5, "warmup_steps": 0.9}),
    ("sft", {"max_grad_norm": 0, "weight_decay": 0}),
    ("sft", {"save_strategy": "no", "save_steps": 0}),
    ("dpo", {"beta": 0.5}),
    ("dpo", {"loss_weights": [1.0, 0.5], "loss_type": ["sigmoid", "sft"], "ld_alpha": 0.5}),
    ("dpo", {"f_divergence_type": "js_divergence", "loss_type": ["hinge"]}),
    ("dpo", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.2}),
    ("dpo", {"loss_type": ["exo_pair"], "label_smoothing": 1e-3}),
    ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 4}),
    ("dpo", {**LORA, "precompute_ref_log_probs": True}),
]


def test_none_speaks_elsewhere() -> None:
    for stage_name, changes in SILENT:
        assert summarise_arguments(values_of(f"trl-{stage_name}", changes)) == [], changes


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_the_demo_is_quiet(name: str) -> None:
    path = REPOSITORY / "configs" / "demo" / f"{name}.yaml"
    findings = stage.judge_stage_file(load.load(path), locator=Locator(search=())).findings
    # before `make demo` they are not here
    assert {finding.code for finding in findings} <= {"missing-data"}


def test_names_are_not_judged_at_another_release() -> None:
    for script, changes in (
        ("trl-dpo", {"padding_free": True}),
        ("trl-sft", {"dataset_kwargs": {"newest": True}}),
    ):
        values = values_of(script, changes)
        newer = replace(values.schema, source="source", version="trl 9.9")
        assert (
            summarise_arguments(
                Values(newer, {"model_name_or_path": "m", "dataset_name": "d", **changes})
            )
            == []
        )
