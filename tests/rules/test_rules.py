"""Each cross-field rule: where it speaks, where it is silent, and that every one is tried."""

import math
from dataclasses import replace

import pytest
from conftest import Write
from rule_findings import BASES, judge_arguments, values_of

from launcher.rules import registry
from launcher.upstream.schema import Values


@pytest.mark.parametrize("script", BASES)
def test_a_quiet_base_is_quiet(script: str) -> None:
    assert judge_arguments(script) == []


# script, what is set, `code severity layer key`
SPEAKS = [
    ("sft", {"dataset_name": "x"}, "two-data-sources error parser dataset_name"),
    ("sft", {"dataset_mixer": ""}, "two-data-sources error parser dataset_mixer"),
    ("dpo", {"dataset_name": "x"}, "two-data-sources error parser dataset_name"),
    ("sft", {"try_launch_beaker_eval_jobs": True}, "beaker-without-push error parser push_to_hub"),
    ("dpo", {"try_launch_beaker_eval_jobs": None}, "beaker-without-push error parser push_to_hub"),
    (
        "sft",
        {"final_lr_ratio": 0.1, "lr_scheduler_type": "cosine"},
        "final-lr-scheduler error parser final_lr_ratio",
    ),
    ("sft", {"final_lr_ratio": 1.2}, "final-lr-range error parser final_lr_ratio"),
    (
        "sft",
        {"additional_model_arguments": "{x"},
        "bad-json error parser additional_model_arguments",
    ),
    ("dpo", {"zero_stage": 4}, "zero-stage error parser zero_stage"),
    (
        "dpo",
        {"zero_stage": 2, "offload_param": True},
        "offload-without-zero3 error parser offload_param",
    ),
    ("sft", {"model_name_or_path": None}, "no-model error run model_name_or_path"),
    ("sft", {"dataset_mixer_list": None}, "no-data error launch dataset_mixer_list"),
    ("dpo", {"mixer_list": None}, "no-data error launch mixer_list"),
    (
        "sft",
        {"dataset_mixer_list": ["a", "1.0", "b"]},
        "odd-mixer-list error run dataset_mixer_list",
    ),
    (
        "sft",
        {
            "dataset_mixer_list": ["a", "1.0", "b", "1.0"],
            "dataset_mixer_list_splits": ["train", "train", "test"],
        },
        "mixer-splits error run dataset_mixer_list_splits",
    ),
    ("sft", {"dataset_mixer_list": ["a", 1]}, "one-sample warning run dataset_mixer_list[1]"),
    ("dpo", {"mixer_list": "a 1.0 b 01"}, "one-sample warning run mixer_list[3]"),
    ("sft", {"dataset_mixer_list": ["a", "b"]}, "mixer-amount error run dataset_mixer_list[1]"),
    ("sft", {"dataset_mixer_list": ["a", 0]}, "mixer-amount error run dataset_mixer_list[1]"),
    ("sft", {"dataset_mixer_list": ["a", -0.5]}, "mixer-amount error run dataset_mixer_list[1]"),
    (
        "sft",
        {"dataset_mixer_list": ["/no/such.jsonl", "1.0"]},
        "missing-data warning run dataset_mixer_list[0]",
    ),
    (
        "dpo",
        {"mixer_list": ["a", 1.0, "~/x.parquet", 1.0]},
        "missing-data warning run mixer_list[2]",
    ),
    ("sft", {"push_to_hub": True, "hf_repo_id": "me/model"}, "entity-twice error run hf_repo_id"),
    (
        "dpo",
        {"push_to_hub": True, "hf_repo_id": "me/model", "hf_entity": "me"},
        "entity-twice error run hf_repo_id",
    ),
    ("sft", {"push_to_hub": None}, "push-by-default warning run push_to_hub"),
    ("dpo", {"push_to_hub": None}, "push-by-default warning run push_to_hub"),
    ("sft", {"checkpointing_steps": None}, "no-checkpoints warning run checkpointing_steps"),
    ("sft", {"checkpointing_steps": "often"}, "checkpoint-steps error run checkpointing_steps"),
    ("sft", {"checkpointing_steps": 0}, "checkpoint-steps error run checkpointing_steps"),
    ("sft", {"checkpointing_steps": -1}, "checkpoint-sign warning run checkpointing_steps"),
    ("dpo", {"checkpointing_steps": 0}, "checkpoint-steps error run checkpointing_steps"),
    ("sft", {"with_tracking": True}, "tracking-needs-wandb error run report_to"),
    (
        "sft",
        {"with_tracking": True, "report_to": "tensorboard"},
        "tracking-needs-wandb error run report_to",
    ),
    ("dpo", {"max_train_samples": 200}, "max-train-samples error run max_train_samples"),
    (
        "dpo",
        {"max_train_samples": 8, "mixer_list": ["a", 4, "b", 5]},
        "max-train-samples error run max_train_samples",
    ),
    ("sft", {"learning_rate": -0.1}, "out-of-range error run learning_rate"),
    ("dpo", {"learning_rate": 0}, "out-of-range warning run learning_rate"),
    ("sft", {"weight_decay": -0.1}, "out-of-range warning run weight_decay"),
    ("sft", {"warmup_ratio": 100}, "out-of-range warning run warmup_ratio"),
    ("dpo", {"beta": 0}, "zero-beta warning run beta"),
    ("dpo", {"beta": -0.1}, "out-of-range warning run beta"),
    ("dpo", {"beta": math.nan}, "out-of-range error run beta"),
    ("dpo", {"label_smoothing": 0.5}, "out-of-range warning run label_smoothing"),
    ("dpo", {"max_seq_length": 0}, "out-of-range error run max_seq_length"),
    ("sft", {"use_lora": True, "lora_rank": 0}, "out-of-range error run lora_rank"),
    ("sft", {"logging_steps": 0}, "out-of-range warning run logging_steps"),
    ("sft", {"max_train_steps": 0}, "out-of-range warning run max_train_steps"),
    ("sft", {"sequence_parallel_size": 0}, "out-of-range error run sequence_parallel_size"),
    ("sft", {"sequence_parallel_size": -1}, "out-of-range warning run sequence_parallel_size"),
    (
        "sft",
        {"output_dir": "", "do_not_randomize_output_dir": True},
        "no-output error run output_dir",
    ),
    (
        "dpo",
        {"output_dir": "", "do_not_randomize_output_dir": True},
        "no-output error run output_dir",
    ),
    ("dpo", {"keep_last_n_checkpoints": 0}, "out-of-range warning run keep_last_n_checkpoints"),
    ("sft", {"num_train_epochs": 0}, "out-of-range warning run num_train_epochs"),
    (
        "sft",
        {"num_train_epochs": 2, "max_train_steps": 10},
        "conditional-key warning run num_train_epochs",
    ),
    (
        "sft",
        {"lr_scheduler_type": "constant", "warmup_ratio": 0.1},
        "warmup-unread warning run warmup_ratio",
    ),
    ("dpo", {"output_dir": "~/x"}, "unexpanded-path warning run output_dir"),
    ("dpo", {"lr_scheduler_type": "nosuch"}, "scheduler-type error run lr_scheduler_type"),
    ("sft", {"dataset_config_hash": "abc"}, "cache-key warning run dataset_config_hash"),
    ("dpo", {"config_hash": "abc"}, "cache-key warning run config_hash"),
    ("sft", {"chat_template_name": "tullu"}, "unknown-template warning run chat_template_name"),
    (
        "dpo",
        {"chat_template_name": "tullu", "get_tokenizer_fn": "get_tokenizer_tulu_v2_1"},
        "unknown-template error run chat_template_name",
    ),
    ("sft", {"get_tokenizer_fn": "tulu"}, "unknown-function error run get_tokenizer_fn"),
    (
        "sft",
        {"dataset_transform_fn": ["sft_tulu_tokenize_and_truncate_v1", "sft_filter"]},
        "unknown-function error run dataset_transform_fn[1]",
    ),
    (
        "sft",
        {"additional_model_arguments": '{"dtype": "float32"}'},
        "model-arguments-unread warning run additional_model_arguments",
    ),
    (
        "dpo",
        {"additional_model_arguments": {"attn_implementation": "eager"}},
        "model-arguments-unread warning run additional_model_arguments",
    ),
    ("sft", {"use_qlora": True}, "qlora-without-lora warning run use_qlora"),
    (
        "dpo",
        {"resume_from_checkpoint": "output/step_5"},
        "resume-unread warning run resume_from_checkpoint",
    ),
]


def test_each_rule_speaks_where_it_should() -> None:
    wrong = []
    for script, changes, expected in SPEAKS:
        shown = [
            f"{f.code} {f.severity} {f.layer} {(f.key or '').removeprefix('args.')}"
            for f in judge_arguments(script, **changes)
        ]
        if shown != [expected]:
            wrong.append((script, changes, expected, shown))
    assert wrong == []


SILENT = [
    ("sft", {"push_to_hub": True, "try_launch_beaker_eval_jobs": None}),
    ("sft", {"push_to_hub": True, "hf_repo_id": "model", "hf_entity": "me"}),
    ("sft", {"hf_repo_id": "me/model"}),
    ("sft", {"final_lr_ratio": 0.0}),
    ("sft", {"additional_model_arguments": {"a": "1.5"}}),
    ("sft", {"use_liger_kernel": True, "additional_model_arguments": {"dtype": "float32"}}),
    ("sft", {"learning_rate": 0.0001, "weight_decay": 0, "warmup_ratio": 0, "seed": 0}),
    ("sft", {"warmup_ratio": 1}),
    ("sft", {"lora_rank": 0, "lora_dropout": 5}),
    ("sft", {"use_lora": True, "lora_rank": 8, "lora_dropout": 0}),
    ("sft", {"sequence_parallel_size": 1, "packing": True}),
    ("sft", {"output_dir": "", "do_not_randomize_output_dir": False}),
    ("sft", {"sequence_parallel_size": 2}),
    ("dpo", {"keep_last_n_checkpoints": -1}),
    ("sft", {"chat_template_name": "tulu"}),
    ("sft", {"chat_template_name": "mine", "get_tokenizer_fn": "get_tokenizer_simple_v1"}),
    ("sft", {"dataset_transform_fn": ["sft_tulu_tokenize_and_truncate_v1", "sft_filter_v1"]}),
    ("sft", {"dataset_cache_mode": "local"}),
    ("sft", {"use_qlora": True, "use_lora": True}),
    ("dpo", {"load_balancing_loss": True}),
    ("dpo", {"mixer_list": ["a", 2, "b", 2]}),
    ("dpo", {"mixer_list": ["a", 2], "cache_dataset_only": True}),
    ("dpo", {"lr_scheduler_type": "nosuch", "cache_dataset_only": True}),
    ("dpo", {"mixer_list": ["a", "0.5"]}),
    ("sft", {"model_name_or_path": None, "config_name": "c", "tokenizer_name_or_path": "t"}),
    ("sft", {"dataset_mixer_list": "a 1.0 b 200"}),
    ("sft", {"checkpointing_steps": None, "max_train_steps": 100}),
    ("sft", {"checkpointing_steps": None, "dataset_mixer_list": ["a", 200]}),
    ("sft", {"checkpointing_steps": 500}),
    ("sft", {"checkpointing_steps": "+500"}),
    ("sft", {"with_tracking": True, "report_to": "wandb"}),
    ("sft", {"with_tracking": True, "report_to": ["tensorboard", "wandb"]}),
    ("sft", {"with_tracking": True, "report_to": "all"}),
    ("sft", {"report_to": "tensorboard"}),
    ("sft", {"max_train_samples": 5}),
    ("dpo", {"with_tracking": True}),
    ("dpo", {"with_tracking": True, "report_to": "wandb"}),
    ("dpo", {"zero_stage": 3, "offload_param": True}),
    ("dpo", {"offload_param": True}),
    ("dpo", {"packing": True}),
    ("dpo", {"beta": 0.01, "label_smoothing": 0.49}),
    ("dpo", {"max_train_samples": 5, "loss_type": "simpo"}),
    ("dpo", {"max_train_samples": 9, "mixer_list": ["a", 4, "b", 5]}),
    # upstream's default warm-up is nobody's wish
    ("sft", {"lr_scheduler_type": "constant"}),
    ("sft", {"lr_scheduler_type": "constant", "warmup_ratio": 0}),
    ("sft", {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1}),
    ("sft", {"num_train_epochs": 3}),
    ("dpo", {"max_train_steps": 300}),
]


def test_none_speaks_elsewhere() -> None:
    for script, changes in SILENT:
        assert judge_arguments(script, **changes) == [], (script, changes)


FOLDERS = pytest.mark.parametrize(
    ("script", "key"), [("sft", "output_dir"), ("dpo", "local_cache_dir")]
)


@FOLDERS
@pytest.mark.parametrize(
    ("path", "folder"), [("~/x", "./~/x"), ("/data/${USER}/x", "/data/${USER}/x")]
)
def test_no_shell_expands_a_path(script: str, key: str, path: str, folder: str) -> None:
    (finding,) = judge_arguments(script, **{key: path})
    assert f"make a folder {folder}:" in finding.message


@FOLDERS
@pytest.mark.parametrize("path", ["/data/x~", "out/$", "out"])
def test_a_path_that_no_shell_would_expand(script: str, key: str, path: str) -> None:
    assert judge_arguments(script, **{key: path}) == []


def test_local_files(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write("train.jsonl", "{}\n").parent)
    write("train.json", "[]")
    assert judge_arguments("sft", dataset_mixer_list=["train.jsonl", "1.0"]) == []
    (finding,) = judge_arguments("sft", dataset_mixer_list=["train.json", "1.0"])
    assert finding.code == "json-data"
    assert finding.severity == "error"
    (finding,) = judge_arguments("sft", dataset_mixer_list=["x" * 5000 + ".jsonl", "1.0"])
    assert finding.code == "missing-data"
    assert len(finding.message) < 200


def test_names_are_looked_up_in_the_source_at_hand() -> None:
    values = values_of("sft", {"chat_template_name": "new", "get_tokenizer_fn": "new"})
    unknown = {"unknown-template", "unknown-function"}
    assert {finding.code for finding in registry.apply(values)} == unknown
    # another commit's mappings know both names; of one without such mappings nothing is known
    new_names = {"CHAT_TEMPLATES": {"new": []}, "GET_TOKENIZER_FN": {"new": ["tc"]}}
    for tables in (new_names, {}):
        schema = replace(values.schema, version="0123456789ab", tables=tables)
        findings = registry.apply(Values(schema, dict(values)))
        assert unknown.isdisjoint(finding.code for finding in findings)


@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_without_data_it_says_what_upstream_would_do(script: str) -> None:
    name = "dataset_mixer_list" if script == "sft" else "mixer_list"
    (finding,) = judge_arguments(script, **{name: None})
    assert ("allenai/tulu-3-sft-personas-algebra" in finding.message) is (script == "sft")


def test_every_rule_is_tried_above() -> None:
    tried = set()
    for script, changes, _ in SPEAKS:
        for rule in registry.of_script("open_instruct", script):
            if list(rule(values_of(script, changes))):
                tried.add(rule.__doc__)
    for script in ("sft", "dpo"):
        for rule in registry.of_script("open_instruct", script):
            assert rule.__doc__ in tried, rule.__name__
