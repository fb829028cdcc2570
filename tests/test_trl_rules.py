"""TRL's rules: where each speaks, where it is silent, and that none breaks at another release."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from argument_sets import generate
from conftest import REPOSITORY, Write

from launcher import config, rules, stage, upstream
from launcher.backends import trl_rules
from launcher.errors import Finding
from launcher.schema import NoSuchField, Schema, Values

STAGES = ("sft", "dpo")
BASE = {"model_name_or_path": "m", "dataset_name": "d"}
FULL_SHARD = {"fsdp": "full_shard"}


# Nowhere to look for packages: the committed snapshot answers, whatever is installed.
SNAPSHOT = upstream.Locator(search=())


def schema_of(stage_name: str) -> Schema:
    return SNAPSHOT.schema("trl", stage_name)


def values_of(stage_name: str, changes: Mapping[str, Any]) -> Values:
    schema = schema_of(stage_name)
    assert changes.keys() <= schema.fields.keys()
    return Values(schema, {**BASE, **changes})


def found(stage_name: str, **changes: Any) -> list[Finding]:
    return list(rules.apply(values_of(stage_name, changes)))


# stage, what is set, (code, severity, layer, key without `args.`)
SPEAKS: list[tuple[str, dict[str, Any], tuple[str, str, str, str]]] = [
    # what a __post_init__ refuses
    ("sft", {"model_init_kwargs": "{x"}, ("bad-json", "error", "parser", "model_init_kwargs")),
    ("sft", {"dataset_kwargs": "{x"}, ("bad-json", "error", "parser", "dataset_kwargs")),
    ("dpo", {"deepspeed": '{"a": "²"}'}, ("bad-json", "error", "parser", "deepspeed")),
    ("sft", {"fp16": True, "bf16": True}, ("two-precisions", "error", "parser", "fp16")),
    (
        "sft",
        {"fp16_full_eval": True, "bf16_full_eval": True},
        ("two-precisions", "error", "parser", "fp16_full_eval"),
    ),
    (
        "dpo",
        {"load_in_4bit": True, "load_in_8bit": True},
        ("two-precisions", "error", "parser", "load_in_8bit"),
    ),
    ("dpo", {"loss_weights": [1.0, 0.5]}, ("loss-weights", "error", "parser", "loss_weights")),
    ("sft", {"logging_steps": 0}, ("logging-steps", "error", "parser", "logging_steps")),
    ("sft", {"logging_steps": 2.5}, ("whole-steps", "error", "parser", "logging_steps")),
    ("sft", {"save_steps": "inf"}, ("whole-steps", "error", "parser", "save_steps")),
    (
        "dpo",
        {"eval_strategy": "steps", "eval_steps": 2.5},
        ("whole-steps", "error", "parser", "eval_steps"),
    ),
    (
        "sft",
        {"logging_strategy": "no", "logging_steps": 2.5, "eval_strategy": "steps"},
        ("whole-steps", "error", "parser", "logging_steps"),
    ),
    (
        "sft",
        {"eval_strategy": "steps", "logging_strategy": "no", "logging_steps": 0},
        ("eval-steps", "error", "parser", "eval_steps"),
    ),
    (
        "sft",
        {"load_best_model_at_end": True},
        ("best-model-strategy", "error", "parser", "load_best_model_at_end"),
    ),
    (
        "sft",
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 300},
        ("best-model-steps", "error", "parser", "save_steps"),
    ),
    (
        "sft",
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1},
        ("best-model-steps", "error", "parser", "save_steps"),
    ),
    (
        "sft",
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.2, "save_steps": 0.3},
        ("best-model-steps", "error", "parser", "save_steps"),
    ),
    (
        "dpo",
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        ("scheduler-needs-eval", "error", "parser", "lr_scheduler_type"),
    ),
    ("sft", {"warmup_steps": -1}, ("negative-warmup", "error", "parser", "warmup_steps")),
    (
        "sft",
        {"dataloader_prefetch_factor": 2},
        ("prefetch-workers", "error", "parser", "dataloader_prefetch_factor"),
    ),
    (
        "sft",
        {"torch_empty_cache_steps": 0},
        ("empty-cache-steps", "error", "parser", "torch_empty_cache_steps"),
    ),
    (
        "dpo",
        {"parallelism_config": 2},
        ("parallelism-config", "error", "parser", "parallelism_config"),
    ),
    ("sft", {"pad_to_multiple_of": "x"}, ("pad-multiple", "error", "parser", "pad_to_multiple_of")),
    (
        "sft",
        {"accelerator_config": {"split_batch": True}},
        ("accelerator-config", "error", "parser", "accelerator_config"),
    ),
    (
        "sft",
        {"accelerator_config": {"use_configured_state": True}},
        ("accelerator-config", "error", "parser", "accelerator_config"),
    ),
    ("sft", {"accelerator_config": ""}, ("accelerator-config", "error", "parser", "accelerator_config")),
    ("sft", {"deepspeed": {"fp16": {}}}, ("deepspeed-mapping", "error", "parser", "deepspeed")),
    (
        "sft",
        {"deepspeed": {"zero_optimization": {}, "optimizer": "adamw"}},
        ("deepspeed-mapping", "error", "parser", "deepspeed"),
    ),
    (
        "sft",
        {"deepspeed": {"zero_optimization": {}, "checkpoint": None}, "save_on_each_node": True},
        ("deepspeed-mapping", "error", "parser", "deepspeed"),
    ),
    ("sft", {"deepspeed": "null"}, ("deepspeed-mapping", "error", "parser", "deepspeed")),
    ("sft", {"fsdp": True}, ("fsdp-option", "error", "parser", "fsdp")),
    ("sft", {"fsdp": "hybrid_shard"}, ("fsdp-option", "error", "parser", "fsdp")),
    ("sft", {"fsdp": "FULL_SHARD"}, ("fsdp-option", "error", "parser", "fsdp")),
    (
        "sft",
        {**FULL_SHARD, "fsdp_config": {"reshard_after_forward": "full_shard"}},
        ("fsdp-config", "error", "parser", "fsdp_config"),
    ),
    (
        "sft",
        {**FULL_SHARD, "fsdp_config": {"fsdp_auto_wrap_policy": "transformer"}},
        ("fsdp-config", "error", "parser", "fsdp_config"),
    ),
    (
        "dpo",
        {**FULL_SHARD, "fsdp_config": {"transformer_layer_cls_to_wrap": ["A", 5]}},
        ("fsdp-config", "error", "parser", "fsdp_config"),
    ),
    (
        "dpo",
        {**FULL_SHARD, "fsdp_config": {"version": "two"}},
        ("fsdp-config", "error", "parser", "fsdp_config"),
    ),
    # what parses and goes wrong
    ("sft", {"model_name_or_path": None}, ("no-model", "error", "run", "model_name_or_path")),
    ("dpo", {"dataset_name": None}, ("no-data", "error", "run", "dataset_name")),
    ("dpo", {"datasets": [{"path": "x"}]}, ("datasets-by-flag", "error", "run", "datasets")),
    (
        "sft",
        {"use_liger_kernel": True, "use_peft": True},
        ("liger-with-lora", "warning", "run", "use_liger_kernel"),
    ),
    ("sft", {"deepspeed": "no/such.json"}, ("missing-config", "warning", "run", "deepspeed")),
    (
        "sft",
        {**FULL_SHARD, "fsdp_config": "no/such.json"},
        ("missing-config", "warning", "run", "fsdp_config"),
    ),
    (
        "sft",
        {"accelerator_config": "no/such.json"},
        ("missing-config", "warning", "run", "accelerator_config"),
    ),
    ("sft", {"lr_scheduler_kwargs": "x"}, ("not-a-mapping", "error", "run", "lr_scheduler_kwargs")),
    ("sft", {"ddp_timeout": 10**14}, ("ddp-timeout", "error", "run", "ddp_timeout")),
    ("sft", {"report_to": "wandbb"}, ("unknown-report", "error", "run", "report_to")),
    (
        "sft",
        {"torch_compile_backend": "x"},
        ("unknown-compiler", "error", "run", "torch_compile_backend"),
    ),
    (
        "sft",
        {"eval_strategy": "epoch", "metric_for_best_model": "rewards/margins"},
        ("unknown-metric", "error", "run", "metric_for_best_model"),
    ),
    (
        "sft",
        {"use_peft": True, "lora_task_type": "causal_lm"},
        ("lora-task", "error", "run", "lora_task_type"),
    ),
    ("dpo", {"pad_to_multiple_of": "0"}, ("out-of-range", "error", "run", "pad_to_multiple_of")),
    (
        "dpo",
        {"dtype": "bfloat16", "model_init_kwargs": '{"dtype": "float32"}'},
        ("conditional-key", "warning", "run", "dtype"),
    ),
    (
        "sft",
        {"model_init_kwargs": '{"torch_dtype": "bfloat16"}'},
        ("conditional-key", "warning", "run", "model_init_kwargs"),
    ),
    (
        "sft",
        {"torch_compile_mode": "fast"},
        ("unknown-compiler", "error", "run", "torch_compile_mode"),
    ),
    ("sft", {"optim_args": "rank"}, ("optim-args", "error", "run", "optim_args")),
    ("sft", {"optim_args": "rank=2"}, ("optim-args", "warning", "run", "optim_args")),
    (
        "dpo",
        {"optim": "sgd", "optim_args": "momentum=0.9, lr=1"},
        ("optim-args", "warning", "run", "optim_args"),
    ),
    (
        "sft",
        {"optim": "sgd", "optim_target_modules": "all-linear"},
        ("optim-targets", "warning", "run", "optim_target_modules"),
    ),
    (
        "sft",
        {"gradient_checkpointing_kwargs": '{"use_reentrant": true, "reentrant": true}'},
        ("checkpointing-kwargs", "error", "run", "gradient_checkpointing_kwargs"),
    ),
    (
        "dpo",
        {"gradient_checkpointing_kwargs": '{"use_reentrant": false, "selective": true}'},
        ("checkpointing-kwargs", "warning", "run", "gradient_checkpointing_kwargs"),
    ),
    ("sft", {"optim": "galore_adamw"}, ("optim-targets", "error", "run", "optim_target_modules")),
    (
        "sft",
        {
            "optim": "apollo_adamw_layerwise", "optim_target_modules": "all-linear",
            "gradient_accumulation_steps": 2,
        },
        ("optim-accumulation", "error", "run", "gradient_accumulation_steps"),
    ),
    ("dpo", {"seed": -1}, ("seed-range", "error", "run", "seed")),
    (
        "sft",
        {"dataloader_persistent_workers": True},
        ("no-workers", "error", "run", "dataloader_persistent_workers"),
    ),
    (
        "sft",
        {"dataloader_num_workers": -1},
        ("negative-workers", "error", "run", "dataloader_num_workers"),
    ),
    (
        "sft",
        {"dataloader_num_workers": 2, "dataloader_prefetch_factor": -1},
        ("negative-workers", "error", "run", "dataloader_prefetch_factor"),
    ),
    ("sft", {"output_dir": ""}, ("empty-output", "error", "run", "output_dir")),
    ("sft", {"eval_on_start": True}, ("eval-on-start", "error", "run", "eval_on_start")),
    (
        "sft",
        {"save_strategy": "best", "eval_strategy": "steps"},
        ("best-without-metric", "error", "run", "save_strategy"),
    ),
    (
        "sft",
        {"save_strategy": "best", "metric_for_best_model": "loss"},
        ("best-without-eval", "warning", "run", "save_strategy"),
    ),
    (
        "sft",
        {"lr_scheduler_type": "cosine_with_min_lr"},
        ("scheduler-kwargs", "error", "run", "lr_scheduler_kwargs"),
    ),
    (
        "sft",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0, "min_lr_rate": 0}},
        ("scheduler-kwargs", "error", "run", "lr_scheduler_kwargs"),
    ),
    (
        "sft",
        {"lr_scheduler_type": "warmup_stable_decay"},
        ("scheduler-kwargs", "error", "run", "lr_scheduler_kwargs"),
    ),
    (
        "sft",
        {"lr_scheduler_type": "constant", "warmup_steps": 10},
        ("warmup-unread", "warning", "run", "warmup_steps"),
    ),
    (
        "sft",
        {"resume_from_checkpoint": "true"},
        ("resume-word", "error", "run", "resume_from_checkpoint"),
    ),
    ("sft", {"dataset_streaming": True}, ("stream-without-steps", "error", "run", "dataset_streaming")),
    ("sft", {"datasets": ["d"], "streaming": True}, ("stream-without-steps", "error", "run", "streaming")),
    (
        "sft",
        {"datasets": ["d"], "streaming": True, "max_steps": 5, "test_split_size": 0.1},
        ("split-of-stream", "error", "run", "test_split_size"),
    ),
    (
        "dpo",
        {"datasets": ["d"], "eval_strategy": "steps"},
        ("no-such-split", "error", "run", "dataset_test_split"),
    ),
    ("sft", {"load_in_4bit": True}, ("quantised-whole", "error", "run", "load_in_4bit")),
    (
        "sft",
        {"load_in_4bit": True, "use_peft": True, "model_init_kwargs": {"quantization_config": {}}},
        ("quantised-twice", "error", "run", "model_init_kwargs"),
    ),
    ("sft", {"use_peft": True, "lora_r": 0}, ("lora-rank", "error", "run", "lora_r")),
    (
        "dpo",
        {"use_peft": True, "lora_target_modules": ["q_proj", "lm_head"]},
        ("lora-on-head", "error", "run", "lora_target_modules"),
    ),
    (
        "sft",
        {**FULL_SHARD, "deepspeed": {"zero_optimization": {}}},
        ("two-engines", "error", "run", "fsdp"),
    ),
    (
        "sft",
        {"packing": True, "max_length": "none"},
        ("packing-without-length", "error", "run", "packing"),
    ),
    (
        "sft",
        {"eval_packing": True, "eval_strategy": "steps", "max_length": "none"},
        ("packing-without-length", "error", "run", "eval_packing"),
    ),
    ("sft", {"padding_free": True}, ("padding-free-length", "error", "run", "padding_free")),
    (
        "sft",
        {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"selective": True}},
        ("selective-checkpointing", "error", "run", "gradient_checkpointing_kwargs"),
    ),
    (
        "sft",
        {"gradient_checkpointing_kwargs": {"selective": True, "use_reentrant": True}},
        ("selective-checkpointing", "error", "run", "gradient_checkpointing_kwargs"),
    ),
    ("dpo", {"loss_type": ["orpo"]}, ("unknown-loss", "error", "run", "loss_type")),
    (
        "dpo",
        {"f_divergence_type": "kl"},
        ("unknown-divergence", "error", "run", "f_divergence_type"),
    ),
    (
        "dpo",
        {"f_divergence_type": "forward_kl", "loss_type": ["apo_zero"]},
        ("divergence-of-loss", "error", "run", "f_divergence_type"),
    ),
    ("dpo", {"loss_type": ["exo_pair"]}, ("exo-smoothing", "error", "run", "label_smoothing")),
    (
        "dpo",
        {"loss_type": ["robust"], "label_smoothing": 0.5},
        ("robust-smoothing", "warning", "run", "label_smoothing"),
    ),
    ("dpo", {"loss_type": ["sigmoid", "ipo"], "beta": 0}, ("zero-beta", "error", "run", "beta")),
    (
        "dpo",
        {"loss_type": ["aot"], "use_weighting": True},
        ("weighting-of-loss", "error", "run", "use_weighting"),
    ),
    (
        "dpo",
        {"sync_ref_model": True, "use_peft": True},
        ("moving-reference", "error", "run", "use_peft"),
    ),
    (
        "dpo",
        {"sync_ref_model": True, "precompute_ref_log_probs": True},
        ("moving-reference", "error", "run", "precompute_ref_log_probs"),
    ),
    (
        "dpo",
        {"dataset_streaming": True, "max_steps": 5, "precompute_ref_log_probs": True},
        ("streamed-reference", "error", "run", "precompute_ref_log_probs"),
    ),
    ("dpo", {"padding_free": True}, ("padding-free-off", "warning", "run", "padding_free")),
    # numbers, and names written as one; more of them in test_trl_value_rules.py
    ("sft", {"weight_decay": -1}, ("out-of-range", "warning", "run", "weight_decay")),
    ("sft", {"num_train_epochs": 0}, ("out-of-range", "warning", "run", "num_train_epochs")),
    ("sft", {"max_steps": 5, "warmup_steps": 5}, ("out-of-range", "warning", "run", "warmup_steps")),
    ("sft", {"save_steps": 0}, ("out-of-range", "warning", "run", "save_steps")),
    (
        "sft",
        {"eval_strategy": "steps", "per_device_eval_batch_size": 0},
        ("out-of-range", "error", "run", "per_device_eval_batch_size"),
    ),
    ("dpo", {"max_length": 0}, ("out-of-range", "error", "run", "max_length")),
    (
        "dpo",
        {"loss_type": ["exo_pair"], "label_smoothing": 1},
        ("out-of-range", "warning", "run", "label_smoothing"),
    ),
    (
        "sft",
        {"use_peft": True, "lora_target_modules": "q_proj,v_proj"},
        ("lora-targets", "error", "run", "lora_target_modules"),
    ),
    (
        "dpo",
        {"use_peft": True, "lora_target_parameters": ["a", "b"]},
        ("lora-targets", "error", "run", "lora_dropout"),
    ),
    (
        "sft",
        {"dataset_kwargs": '{"add_special_tokens": false}'},
        ("conditional-key", "warning", "run", "dataset_kwargs"),
    ),
    (
        "sft",
        {"eval_strategy": "steps", "eval_delay": 9, "max_steps": 8},
        ("out-of-range", "warning", "run", "eval_delay"),
    ),
    (
        "dpo",
        {"train_sampling_strategy": "group_by_length"},
        ("sampling-of-pairs", "error", "run", "train_sampling_strategy"),
    ),
    (
        "dpo",
        {"label_smoothing_factor": 0.1},
        ("conditional-key", "warning", "run", "label_smoothing_factor"),
    ),
    (
        "sft",
        {"batch_eval_metrics": True},
        ("conditional-key", "warning", "run", "batch_eval_metrics"),
    ),
    ("dpo", {"loss_weights": [0.0]}, ("out-of-range", "warning", "run", "loss_weights")),
    (
        "dpo",
        {"f_alpha_divergence_coef": 0.2},
        ("conditional-key", "warning", "run", "f_alpha_divergence_coef"),
    ),
    ("dpo", {"label_smoothing": 0.1}, ("conditional-key", "warning", "run", "label_smoothing")),
]  # fmt: skip


@pytest.mark.parametrize(("stage_name", "changes", "expected"), SPEAKS)
def test_it_speaks(
    stage_name: str,
    changes: dict[str, Any],
    expected: tuple[str, str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, severity, layer, key = expected
    # one combination of settings can be wrong twice, and then both are said
    (finding,) = [
        f for f in found(stage_name, **changes) if (f.code, f.key) == (code, f"args.{key}")
    ]
    assert (finding.severity, finding.layer) == (severity, layer)
    assert finding.message
    others = {f.code for f in found(stage_name, **changes)} - {code}
    assert others <= {"logging-steps", "prefetch-workers"}


SILENT: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"fp16": True}),
    ("sft", {"pad_to_multiple_of": 8}),
    ("sft", {"pad_to_multiple_of": "auto"}),
    ("sft", {"logging_steps": 0, "logging_strategy": "no"}),
    ("sft", {"logging_steps": 0.1, "save_steps": 20.0}),
    ("sft", {"logging_steps": 2.5, "logging_strategy": "epoch"}),
    ("sft", {"eval_strategy": "steps"}),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 250}),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps"}),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}),
    (
        "sft",
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.3},
    ),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "best"}),
    ("dpo", {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}),
    ("sft", {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}),
    ("sft", {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}),
    ("sft", {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 2}),
    ("sft", {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}),
    ("sft", {"accelerator_config": {"split_batches": True}}),
    ("sft", {"deepspeed": {}}),
    ("sft", {"deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}}),
    ("sft", {"deepspeed": "eyJ6ZXJvX29wdGltaXphdGlvbiI6IHsic3RhZ2UiOiAzfX0="}),
    ("sft", {"fsdp": "full_shard auto_wrap"}),
    ("sft", {"fsdp": "hybrid_shard", "fsdp_config": {"fsdp_version": 1}}),
    ("sft", {"fsdp_config": {"version": "two"}}),
    (
        "sft",
        {**FULL_SHARD, "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block", "cpu_offload": True}},
    ),
    ("sft", {"use_peft": True, "load_in_4bit": True}),
    ("sft", {"use_peft": True, "lora_target_modules": ["all-linear"]}),
    ("sft", {"packing": True}),
    ("sft", {"packing": True, "padding_free": True}),
    ("sft", {"padding_free": True, "max_length": "none"}),
    ("sft", {"packing": True, "max_length": "none", "dataset_kwargs": {"skip_prepare_dataset": True}}),
    ("sft", {"gradient_checkpointing_kwargs": {"selective": True}}),
    ("sft", {"report_to": "wandb"}),
    ("sft", {"report_to": "all"}),
    ("sft", {"torch_compile": True, "torch_compile_backend": "Inductor"}),
    ("sft", {"optim": "galore_adamw", "optim_target_modules": "all-linear", "optim_args": "a=6, b=2"}),
    ("sft", {"dataset_streaming": True, "max_steps": 100}),
    ("sft", {"datasets": ["a", "b"], "test_split_size": 0.1, "eval_strategy": "steps"}),
    ("dpo", {"loss_weights": [1.0, 0.5], "loss_type": ["sigmoid", "sft"]}),
    ("dpo", {"datasets": ["path"], "dataset_name": None}),
    ("dpo", {"f_divergence_type": "js_divergence", "loss_type": ["hinge"]}),
    ("dpo", {"loss_type": ["exo_pair"], "label_smoothing": 1e-3}),
    ("dpo", {"loss_type": ["robust"], "label_smoothing": 0.1}),
    ("dpo", {"sync_ref_model": True}),
    ("sft", {"torch_compile_mode": "max-autotune"}),
    ("sft", {"dtype": "float32", "model_init_kwargs": '{"dtype": "float32"}'}),
    ("sft", {"model_init_kwargs": '{"dtype": "bfloat16", "torch_dtype": "bfloat16"}'}),
    ("sft", {"eval_strategy": "epoch", "metric_for_best_model": "eval_mean_token_accuracy"}),
    ("dpo", {"eval_strategy": "epoch", "metric_for_best_model": "rewards/margins"}),
    ("dpo", {"metric_for_best_model": "accuracy"}),
    ("sft", {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"}),
    ("sft", {"optim": "rmsprop_bnb", "optim_args": "alpha=0.9"}),
    ("sft", {"gradient_checkpointing_kwargs": '{"use_reentrant": false, "every_n_layers": 2}'}),
    ("sft", {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": '{"x": 1}'}),
    ("dpo", {"use_peft": True, "precompute_ref_log_probs": True}),
]  # fmt: skip


@pytest.mark.parametrize(("stage_name", "changes"), SILENT)
def test_it_is_silent(
    stage_name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert found(stage_name, **changes) == []


def test_every_rule_is_tried_above() -> None:
    tried = {
        rule.__name__
        for stage_name, changes, _ in SPEAKS
        for rule in trl_rules.RULES[stage_name]
        if any(True for _ in rule(values_of(stage_name, changes)))
    }
    assert {rule.__name__ for name in STAGES for rule in trl_rules.RULES[name]} - tried == set()


@pytest.mark.parametrize("stage_name", STAGES)
def test_a_plain_config_is_quiet(stage_name: str) -> None:
    assert found(stage_name) == []


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_the_demo_is_quiet(name: str) -> None:
    path = REPOSITORY / "configs" / "demo" / f"{name}.yaml"
    judged = stage.judge(config.load(path), locator=SNAPSHOT)
    assert judged.findings == ()


# --- files that arguments name ---------------------------------------------------------------------

GOOD_FILES = {
    "accelerator_config": {"split_batches": True},
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "fsdp_config": {"version": 2},
}
BAD_FILES = {
    "accelerator_config": {"split": True},
    "deepspeed": {"fp16": {"enabled": True}},
    "fsdp_config": {"auto_wrap_policy": "x"},
}


def with_file(key: str, name: str) -> list[Finding]:
    changes = FULL_SHARD if key == "fsdp_config" else {}
    return found("sft", **{**changes, key: name})


@pytest.mark.parametrize("key", GOOD_FILES)
def test_a_file_is_read_like_the_mapping_itself(
    key: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write("good.json", json.dumps(GOOD_FILES[key])).parent)
    write("bad.json", json.dumps(BAD_FILES[key]))
    assert with_file(key, "good.json") == []
    (finding,) = with_file(key, "bad.json")
    assert (finding.layer, finding.severity, finding.key) == ("parser", "error", f"args.{key}")


@pytest.mark.parametrize("key", GOOD_FILES)
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000],
    ids=["empty", "cut", "list", "null", "bytes", "deep"],
)
def test_a_file_that_holds_no_mapping(
    key: str, content: bytes, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write("x.json", content).parent)
    (finding,) = with_file(key, "x.json")
    assert (finding.layer, finding.severity) == ("parser", "error")
    assert "x.json" in finding.message


@pytest.mark.parametrize("key", GOOD_FILES)
@pytest.mark.parametrize(
    "name", ["x" * 5000, "~nobody-here/x.json", "/dev/null/x", ".", "/dev/zero"]
)
def test_a_name_that_no_file_can_have(key: str, name: str) -> None:
    (finding,) = with_file(key, name)
    assert (finding.code, finding.severity) == ("missing-config", "warning")
    assert len(finding.message) < 200


# --- other releases --------------------------------------------------------------------------------


def outcomes(schema: Schema, changes: Mapping[str, Any]) -> list[Finding]:
    """What all rules say; a missing field may end a rule, nothing else may."""
    said: list[Finding] = []
    for rule in trl_rules.RULES[schema.stage]:
        try:
            said += rule(Values(schema, changes))
        except NoSuchField:
            continue
    return said


@pytest.mark.parametrize("stage_name", STAGES)
def test_no_rule_breaks_where_a_field_is_missing_or_its_default_unknown(stage_name: str) -> None:
    schema = schema_of(stage_name)
    for name in schema.fields:
        without = {k: f for k, f in schema.fields.items() if k != name}
        assert outcomes(replace(schema, fields=without), BASE) == []
        unknown = replace(schema.fields[name], default=None, default_text="computed()")
        outcomes(replace(schema, fields={**schema.fields, name: unknown}), BASE)
    assert outcomes(replace(schema, fields={}), BASE) == []


@pytest.mark.parametrize("stage_name", STAGES)
def test_no_rule_breaks_whatever_is_given(stage_name: str) -> None:
    schema = schema_of(stage_name)
    unknown = {k: replace(f, default=None, default_text="f()") for k, f in schema.fields.items()}
    for arguments in generate(schema, 300, seed=1):
        known = {k: v for k, v in arguments.items() if k in schema.fields}
        outcomes(schema, known)
        outcomes(replace(schema, fields=unknown), known)


@pytest.mark.parametrize(
    ("stage_name", "changes"),
    [
        ("sft", {"report_to": "newest"}),
        ("sft", {"torch_compile_backend": "newest"}),
        ("sft", {"accelerator_config": {"newest": True}}),
        ("dpo", {"loss_type": ["newest"]}),
        ("dpo", {"f_divergence_type": "newest"}),
        ("dpo", {"padding_free": True}),
    ],
)
def test_names_are_not_judged_at_another_release(stage_name: str, changes: dict[str, Any]) -> None:
    newer = replace(schema_of(stage_name), source="source", version="trl 9.9")
    assert outcomes(newer, {**BASE, **changes}) == []
