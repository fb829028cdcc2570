"""TRL's rules about arguments: where each speaks, where it is silent, and that none breaks elsewhere."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from argument_sets import generate
from conftest import REPOSITORY

from launcher.config import load
from launcher.errors import Finding
from launcher.rules import registry
from launcher.rules.trl import arguments as trl_rules
from launcher.stage import stage
from launcher.upstream import locate
from launcher.upstream.schema import NoSuchField, Schema, Values

STAGES = ("sft", "dpo")
BASE = {"model_name_or_path": "m", "dataset_name": "d"}
FULL_SHARD = {"fsdp": "full_shard"}
LORA = {"use_peft": True}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


# Nowhere to look for packages: the committed snapshot answers, whatever is installed.
SNAPSHOT = locate.Locator(search=())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # no argument names a file that is there
    monkeypatch.chdir(tmp_path)


def schema_of(stage_name: str) -> Schema:
    return SNAPSHOT.schema("trl", stage_name)


def values_of(stage_name: str, changes: Mapping[str, Any]) -> Values:
    schema = schema_of(stage_name)
    assert changes.keys() <= schema.fields.keys()
    return Values(schema, {**BASE, **changes})


def found(stage_name: str, **changes: Any) -> list[Finding]:
    return list(registry.apply(values_of(stage_name, changes)))


def told(stage_name: str, changes: Mapping[str, Any]) -> list[str]:
    """Each finding as `code severity key`."""
    return [f"{f.code} {f.severity} {(f.key or '').removeprefix('args.')}" for f in found(stage_name, **changes)]


# what a __post_init__ refuses, by the code and the argument
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("sft", {"model_init_kwargs": "{x"}, "bad-json error model_init_kwargs"),
    ("dpo", {"deepspeed": '{"a": "²"}'}, "bad-json error deepspeed"),
    ("sft", {"fp16": True, "bf16": True}, "two-precisions error fp16"),
    ("sft", {"fp16_full_eval": True, "bf16_full_eval": True},
     "two-precisions error fp16_full_eval"),
    ("dpo", {"load_in_4bit": True, "load_in_8bit": True}, "two-precisions error load_in_8bit"),
    ("dpo", {"loss_weights": [1.0, 0.5]}, "loss-weights error loss_weights"),
    ("sft", {"logging_steps": 0}, "logging-steps error logging_steps"),
    ("sft", {"logging_steps": 2.5}, "whole-steps error logging_steps"),
    ("sft", {"save_steps": "inf"}, "whole-steps error save_steps"),
    ("dpo", {"eval_strategy": "steps", "eval_steps": 2.5}, "whole-steps error eval_steps"),
    ("sft", {"logging_strategy": "no", "logging_steps": 2.5, "eval_strategy": "steps"},
     "whole-steps error logging_steps"),
    ("sft", {"eval_strategy": "steps", "logging_strategy": "no", "logging_steps": 0},
     "eval-steps error eval_steps"),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "epoch"},
     "best-model-strategy error load_best_model_at_end"),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 300},
     "best-model-steps error save_steps"),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.2, "save_steps": 0.3},
     "best-model-steps error save_steps"),
    ("dpo", {"lr_scheduler_type": "reduce_lr_on_plateau"},
     "scheduler-needs-eval error lr_scheduler_type"),
    ("sft", {"warmup_steps": -1}, "negative-warmup error warmup_steps"),
    ("sft", {"dataloader_prefetch_factor": 2}, "prefetch-workers error dataloader_prefetch_factor"),
    ("sft", {"torch_empty_cache_steps": 0}, "empty-cache-steps error torch_empty_cache_steps"),
    ("dpo", {"parallelism_config": 2}, "parallelism-config error parallelism_config"),
    ("sft", {"pad_to_multiple_of": "x"}, "pad-multiple error pad_to_multiple_of"),
]  # fmt: skip

# what parses, and then crashes or does nothing
GOES_WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("sft", {"model_name_or_path": None}, "no-model error model_name_or_path"),
    ("dpo", {"dataset_name": None}, "no-data error dataset_name"),
    ("dpo", {"datasets": [{"path": "x"}]}, "datasets-by-flag error datasets"),
    ("sft", {"use_liger_kernel": True, **LORA}, "liger-with-lora warning use_liger_kernel"),
    ("sft", {"deepspeed": "no/such.json"}, "own-deepspeed error deepspeed"),
    ("dpo", {"dtype": "bfloat16", "model_init_kwargs": '{"dtype": "float32"}'},
     "conditional-key warning dtype"),
    ("sft", {"model_init_kwargs": '{"torch_dtype": "bfloat16"}'},
     "conditional-key warning model_init_kwargs"),
    ("sft", {"save_strategy": "best", "metric_for_best_model": "loss"},
     "best-without-eval warning save_strategy"),
    ("sft", {"lr_scheduler_type": "constant", "warmup_steps": 10},
     "warmup-unread warning warmup_steps"),
    ("sft", {"resume_from_checkpoint": "true"}, "resume-word error resume_from_checkpoint"),
    ("sft", {"load_in_8bit": True}, "quantised-whole error load_in_4bit"),
    ("sft", {**LORA, "lora_target_modules": "q_proj,v_proj"},
     "lora-targets error lora_target_modules"),
    ("sft", {**LORA, "lora_target_modules": "q_proj"}, "lora-targets error lora_target_modules"),
    ("sft", {**FULL_SHARD, "fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}},
     "fsdp-unsaved warning fsdp_config"),
    ("sft", {"padding_free": True}, "padding-free-length error padding_free"),
    ("sft", {"dataset_kwargs": '{"add_special_tokens": false}'},
     "conditional-key warning dataset_kwargs"),
    ("dpo", {"padding_free": True}, "padding-free-off warning padding_free"),
    # what belongs to something that is off
    ("sft", {"packing_strategy": "wrapped"}, "conditional-key warning packing_strategy"),
    ("sft", {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
     "conditional-key warning gradient_checkpointing_kwargs"),
    ("sft", {"do_eval": True}, "conditional-key warning do_eval"),
    ("sft", {"save_strategy": "no", "load_best_model_at_end": True},
     "conditional-key warning load_best_model_at_end"),
    ("dpo", {"precompute_ref_batch_size": 4}, "conditional-key warning precompute_ref_batch_size"),
    ("dpo", {"ref_model_sync_steps": 4}, "conditional-key warning ref_model_sync_steps"),
    ("dpo", {"label_smoothing_factor": 0.1}, "conditional-key warning label_smoothing_factor"),
    ("sft", {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"foo": 1}},
     "conditional-key warning lr_scheduler_kwargs"),
    # numbers
    ("sft", {"learning_rate": -0.1}, "out-of-range error learning_rate"),
    ("sft", {"learning_rate": 0.0}, "out-of-range warning learning_rate"),
    ("sft", {"weight_decay": -1}, "out-of-range warning weight_decay"),
    ("sft", {"max_grad_norm": -1}, "out-of-range warning max_grad_norm"),
    ("sft", {**LORA, "lora_alpha": 0}, "out-of-range warning lora_alpha"),
    ("sft", {"num_train_epochs": 0}, "out-of-range warning num_train_epochs"),
    ("sft", {"num_train_epochs": 0, "max_steps": 5}, "conditional-key warning num_train_epochs"),
    ("sft", {"max_steps": 0}, "out-of-range warning max_steps"),
    ("sft", {"max_steps": -5}, "out-of-range warning max_steps"),
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
]  # fmt: skip


@pytest.mark.parametrize(("table", "parser"), [(REFUSED, True), (GOES_WRONG, False)])
def test_each_rule_speaks_where_it_should(table: list[tuple[str, dict[str, Any], str]], parser: bool) -> None:
    wrong = []
    for stage_name, changes, expected in table:
        # one combination of settings can be wrong twice, and then both are said
        others = {*told(stage_name, changes)} - {
            expected, "logging-steps error logging_steps", "own-deepspeed error deepspeed",
            "conditional-key warning metric_for_best_model",
            "prefetch-workers error dataloader_prefetch_factor",
        }  # fmt: skip
        layers = {f.layer == "parser" for f in found(stage_name, **changes) if expected[:9] in f.code}
        if told(stage_name, changes).count(expected) != 1 or others or layers - {parser}:
            wrong.append((changes, expected, told(stage_name, changes)))
    assert wrong == []


SILENT: list[tuple[str, dict[str, Any]]] = [
    ("sft", {}), ("dpo", {}), ("sft", {"fp16": True}), ("sft", {"pad_to_multiple_of": "auto"}),
    ("sft", {"logging_steps": 0, "logging_strategy": "no"}),
    ("sft", {"logging_steps": 0.1, "save_steps": 20.0}),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 250}),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.3}),
    ("dpo", {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}),
    ("sft", {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}),
    ("sft", {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}),
    ("sft", {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 2,
             "dataloader_persistent_workers": True}),
    ("sft", {"accelerator_config": {"split_batches": True}}),
    ("sft", {"fsdp": "full_shard auto_wrap"}), ("sft", {"fsdp_config": {"version": "two"}}),
    ("sft", {"fsdp": "hybrid_shard", "fsdp_config": {"fsdp_version": 1}}),
    ("sft", {**LORA, "load_in_4bit": True}),
    ("sft", {**LORA, "lora_target_modules": ["all-linear"]}),
    ("sft", {"lora_dropout": 1.5, "lora_alpha": 0}),
    ("sft", {"packing": True, "padding_free": True, "packing_strategy": "bfd_split"}),
    ("sft", {"padding_free": True, "max_length": "none"}),
    ("sft", {"gradient_checkpointing_kwargs": {"selective": True}}), ("sft", {"report_to": "all"}),
    ("dpo", {"datasets": ["a"], "dataset_name": None}),
    ("sft", {"model_init_kwargs": '{"dtype": "bfloat16", "torch_dtype": "bfloat16"}'}),
    ("dpo", {"eval_strategy": "epoch", "metric_for_best_model": "rewards/margins"}),
    ("sft", {**EVALUATED, "do_eval": True, "per_device_eval_batch_size": 2}),
    ("sft", {"max_steps": 5, "warmup_steps": 0.9}),
    ("sft", {"max_grad_norm": 0, "weight_decay": 0}),
    ("sft", {"save_strategy": "no", "save_steps": 0}), ("dpo", {"beta": 0.5}),
    ("dpo", {"loss_weights": [1.0, 0.5], "loss_type": ["sigmoid", "sft"], "ld_alpha": 0.5}),
    ("dpo", {"f_divergence_type": "js_divergence", "loss_type": ["hinge"]}),
    ("dpo", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.2}),
    ("dpo", {"loss_type": ["exo_pair"], "label_smoothing": 1e-3}),
    ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 4}),
    ("dpo", {**LORA, "precompute_ref_log_probs": True}),
]  # fmt: skip


def test_none_speaks_elsewhere() -> None:
    assert [(changes, told(name, changes)) for name, changes in SILENT if told(name, changes)] == []


def test_every_rule_is_tried_above() -> None:
    tried = {
        rule.__doc__
        for stage_name, changes, _ in (*REFUSED, *GOES_WRONG)
        for rule in trl_rules.RULES[stage_name]
        if _said(rule, stage_name, changes)
    }
    assert {rule.__doc__ for name in STAGES for rule in trl_rules.RULES[name]} - tried == set()


def _said(rule: Any, stage_name: str, changes: Mapping[str, Any]) -> list[Finding]:
    schema = schema_of(stage_name)
    try:
        return list(rule(Values(schema, {**BASE, **changes})))
    except NoSuchField:
        return []


def test_every_number_is_an_argument_of_the_pair() -> None:
    assert trl_rules.RANGES.keys() <= schema_of("dpo").fields.keys()


@pytest.mark.parametrize("name", STAGES)
def test_the_demo_is_quiet(name: str) -> None:
    path = REPOSITORY / "configs" / "demo" / f"{name}.yaml"
    assert stage.judge(load.load(path), locator=SNAPSHOT).findings == ()


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
    ("stage_name", "changes"), [("dpo", {"padding_free": True}), ("sft", {"dataset_kwargs": {"newest": True}})]
)
def test_names_are_not_judged_at_another_release(stage_name: str, changes: dict[str, Any]) -> None:
    newer = replace(schema_of(stage_name), source="source", version="trl 9.9")
    assert outcomes(newer, {**BASE, **changes}) == []
