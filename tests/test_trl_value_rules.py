"""TRL's rules about single values and about the columns of local rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import saved
from conftest import Write
from test_trl_machine_rules import told as told_of_stage
from test_trl_rules import found, schema_of

from launcher.backends import trl_value_rules

LORA = {"use_peft": True}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # folders of these tests are named relative to their own
    monkeypatch.chdir(tmp_path)


def told(stage_name: str, **changes: Any) -> list[tuple[str, str, str]]:
    return [
        (f.code, f.severity, (f.key or "").removeprefix("args."))
        for f in found(stage_name, **changes)
    ]


def test_every_number_of_the_table_is_an_argument() -> None:
    fields = schema_of("sft").fields.keys() | schema_of("dpo").fields.keys()
    assert trl_value_rules._RANGES.keys() <= fields
    assert trl_value_rules._OPTIMIZER.keys() <= schema_of("sft").fields.keys()


def test_every_schedule_is_known() -> None:
    kinds = {*trl_value_rules._SCHEDULES, *trl_value_rules._UNREAD}
    assert kinds == {*schema_of("sft").fields["lr_scheduler_type"].choices}


# --- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage_name", "changes", "severity", "key"),
    [
        ("sft", {"learning_rate": 0.0}, "warning", "learning_rate"),
        ("sft", {"weight_decay": -1}, "warning", "weight_decay"),
        ("sft", {"data_seed": 2**64}, "error", "data_seed"),
        ("sft", {"warmup_steps": "inf"}, "error", "warmup_steps"),
        ("sft", {"warmup_steps": "nan"}, "error", "warmup_steps"),
        ("sft", {"max_grad_norm": -1}, "warning", "max_grad_norm"),
        ("sft", {**LORA, "lora_dropout": 1.5}, "error", "lora_dropout"),
        ("sft", {**LORA, "lora_dropout": 1.0}, "warning", "lora_dropout"),
        ("sft", {**LORA, "lora_dropout": -0.5}, "warning", "lora_dropout"),
        ("sft", {**LORA, "lora_alpha": 0}, "warning", "lora_alpha"),
        ("sft", {"dataset_num_proc": -1}, "error", "dataset_num_proc"),
        ("sft", {"neftune_noise_alpha": -1}, "error", "neftune_noise_alpha"),
        ("sft", {"num_train_epochs": 0}, "warning", "num_train_epochs"),
        ("sft", {"num_train_epochs": -1}, "warning", "num_train_epochs"),
        ("sft", {"max_steps": 0}, "warning", "max_steps"),
        ("sft", {"max_steps": -5}, "warning", "max_steps"),
        ("sft", {"max_steps": 100, "warmup_steps": 100}, "warning", "warmup_steps"),
        ("sft", {"logging_steps": -1}, "warning", "logging_steps"),
        ("sft", {"eval_strategy": "steps", "eval_steps": -1}, "warning", "eval_steps"),
        ("sft", {"save_steps": -1}, "warning", "save_steps"),
        ("sft", {**EVALUATED, "per_device_eval_batch_size": 0}, "error", "per_device_eval_batch_size"),
        ("sft", {**EVALUATED, "eval_accumulation_steps": 0}, "error", "eval_accumulation_steps"),
        ("sft", {"max_length": 0}, "error", "max_length"),
        ("sft", {"max_length": -3}, "warning", "max_length"),
        ("sft", {"max_length": 0, "truncation_mode": "keep_end"}, "warning", "max_length"),
        ("sft", {"max_length": -3, "packing": True}, "error", "max_length"),
        ("dpo", {"max_length": -3}, "error", "max_length"),
        ("dpo", {"max_length": -3, "truncation_mode": "keep_end"}, "warning", "max_length"),
        (
            "dpo",
            {"precompute_ref_log_probs": True, "precompute_ref_batch_size": -1},
            "error",
            "precompute_ref_batch_size",
        ),
        ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 0}, "error", "ref_model_sync_steps"),
        ("dpo", {"loss_type": ["exo_pair"], "label_smoothing": -0.1}, "warning", "label_smoothing"),
        ("dpo", {"loss_type": ["aot"], "label_smoothing": 1.5}, "warning", "label_smoothing"),
    ],
)  # fmt: skip
def test_a_number_out_of_its_range(
    stage_name: str, changes: dict[str, Any], severity: str, key: str
) -> None:
    assert told(stage_name, **changes) == [("out-of-range", severity, key)]


@pytest.mark.parametrize(
    ("stage_name", "changes"),
    [
        ("sft", {"lora_dropout": 1.5, "lora_alpha": 0}),
        ("sft", {**LORA, "lora_dropout": 0, "lora_alpha": -4}),
        ("sft", {"num_train_epochs": 0.4}),
        ("sft", {"max_steps": 5}),
        ("sft", {"num_train_epochs": 2, "max_steps": -1}),
        ("sft", {"warmup_steps": 0.9, "max_steps": 5}),
        ("sft", {"warmup_steps": 4, "max_steps": 5}),
        ("sft", {"max_grad_norm": 0, "weight_decay": 0}),
        ("sft", {"save_strategy": "no", "save_steps": 0}),
        ("sft", {"logging_strategy": "epoch", "logging_steps": -1, "eval_steps": -1}),
        ("sft", {"per_device_eval_batch_size": 0, "eval_accumulation_steps": 0}),
        ("sft", {"max_length": 0, "dataset_kwargs": {"skip_prepare_dataset": True}}),
        ("dpo", {"max_length": 1, "precompute_ref_batch_size": -1, "ref_model_sync_steps": 0}),
        ("dpo", {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 0}),
        ("dpo", {"loss_type": ["exo_pair"], "label_smoothing": 0.1}),
        ("dpo", {"loss_type": ["aot"], "label_smoothing": 1}),
    ],
)
def test_a_number_that_works(stage_name: str, changes: dict[str, Any]) -> None:
    assert told(stage_name, **changes) == []


def test_steps_come_before_epochs() -> None:
    unread = [("conditional-key", "warning", "num_train_epochs")]
    assert told("sft", num_train_epochs=0, max_steps=5) == unread
    assert told("dpo", num_train_epochs=2, max_steps=5) == unread


def test_what_stands_in_place_of_a_limit_is_said() -> None:
    (finding,) = found("sft", max_steps=-5)
    assert "`num_train_epochs` decides, which is 3" in finding.message


@pytest.mark.parametrize("script", ["trl-sft", "trl-dpo"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", -0.1), ("learning_rate", "nan"), ("adam_beta1", 1.5), ("adam_beta1", -0.1),
        ("adam_beta2", 1.0), ("adam_epsilon", -1),
    ],
)  # fmt: skip
def test_a_number_that_the_optimizer_refuses(script: str, key: str, value: Any) -> None:
    args = {key: value}
    assert told_of_stage(script, args) == [("out-of-range", "error", key)]
    bitsandbytes = told_of_stage(script, {**args, "optim": "paged_adamw_32bit"})
    assert bitsandbytes == [("out-of-range", "warning", key)]
    # which takes the place of the one that refuses
    own = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}
    assert ("out-of-range", "warning", key) in told_of_stage(script, args, deepspeed=own)


def test_numbers_that_an_optimizer_does_not_read() -> None:
    args = {"optim": "sgd", "adam_beta1": 1.5, "adam_beta2": 2, "adam_epsilon": -1}
    assert told_of_stage("trl-sft", args) == []
    args = {"optim": "sgd", "learning_rate": -1}
    assert told_of_stage("trl-sft", args) == [("out-of-range", "error", "learning_rate")]
    args = {"optim": "adafactor", "learning_rate": -1}
    assert told_of_stage("trl-sft", args) == [("out-of-range", "warning", "learning_rate")]
    assert told_of_stage("trl-sft", {"adam_beta1": 0, "adam_epsilon": 0}) == []


# --- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["q_proj,v_proj", "q_proj, v_proj", "q_proj v_proj", ["q_proj,v_proj"]]
)
def test_several_modules_in_one_word(words: Any) -> None:
    (finding,) = found("sft", **LORA, lora_target_modules=words)
    assert (finding.code, finding.severity) == ("lora-targets", "error")
    assert finding.help == "write a list: `lora_target_modules: [q_proj, v_proj]`"
    assert told("sft", lora_target_modules=words) == []


def test_one_good_module_beside_them() -> None:
    words = ["k_proj", "q_proj,v_proj"]
    assert told("sft", **LORA, lora_target_modules=words) == [
        ("lora-targets", "warning", "lora_target_modules")
    ]


@pytest.mark.parametrize(
    "words", [".*q_proj", ["q_proj", "v_proj"], "all-linear", r".*layers\.\d{1,2}\..*q_proj", None]
)
def test_module_names_and_patterns(words: Any) -> None:
    assert told("dpo", **LORA, lora_target_modules=words) == []


@pytest.mark.parametrize("words", ["q_proj", ["q_proj"]])
def test_a_single_word_is_a_pattern_that_matches_nothing(words: Any) -> None:
    wrong = [("lora-targets", "error", "lora_target_modules")]
    assert told("sft", **LORA, lora_target_modules=words) == wrong
    assert told("sft", lora_target_modules=words) == []


KWARGS = "lr_scheduler_kwargs"


@pytest.mark.parametrize(
    ("kind", "kwargs", "severity"),
    [
        ("linear", {"foo": 1}, "error"),
        ("linear", {"num_training_steps": 9}, "error"),
        ("cosine", {"min_lr": 1e-6}, "error"),
        ("inverse_sqrt", {"num_cycles": 1}, "error"),
        ("reduce_lr_on_plateau", {"foo": 1}, "error"),
        ("greedy", {"foo": 1}, "error"),
        ("constant", {"foo": 1}, "warning"),
        ("constant_with_warmup", {"foo": 1}, "warning"),
        ("warmup_stable_decay", {"num_decay_steps": 1, "decay_type": "cos"}, "error"),
        ("polynomial", {"lr_end": 1.0}, "error"),
    ],
)
def test_what_a_schedule_does_not_take(kind: str, kwargs: dict[str, Any], severity: str) -> None:
    args = {"lr_scheduler_type": kind, KWARGS: kwargs}
    assert told_of_stage("trl-sft", args) == [("scheduler-kwargs", severity, KWARGS)]
    own = {"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"}}
    codes = {code for code, _, _ in told_of_stage("trl-sft", args, deepspeed=own)}
    assert "scheduler-kwargs" not in codes


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("cosine", {"num_cycles": 1}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("polynomial", {"power": 2.0}),
        ("warmup_stable_decay", {"num_decay_steps": 10, "decay_type": "linear"}),
        ("reduce_lr_on_plateau", {"factor": 0.5}),
        ("greedy", {"smooth": True, "patience": 3}),
        ("linear", {}),
    ],
)
def test_what_a_schedule_takes(kind: str, kwargs: dict[str, Any]) -> None:
    assert told_of_stage("trl-sft", {"lr_scheduler_type": kind, KWARGS: kwargs}) == []


# --- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "severity", "key"),
    [
        ({"beta": "nan"}, "out-of-range", "error", "beta"),
        ({"beta": "inf"}, "out-of-range", "error", "beta"),
        ({"beta": -0.5}, "out-of-range", "warning", "beta"),
        ({"beta": 0}, "zero-beta", "warning", "beta"),
        ({"beta": 0, "loss_type": ["sft", "ipo"]}, "zero-beta", "error", "beta"),
        ({"beta": 0.5, "loss_type": ["sft"]}, "conditional-key", "warning", "beta"),
        ({"ld_alpha": 2}, "out-of-range", "warning", "ld_alpha"),
        ({"ld_alpha": "nan"}, "out-of-range", "error", "ld_alpha"),
        ({"ld_alpha": 0.5, "loss_type": ["sft"]}, "conditional-key", "warning", "ld_alpha"),
        ({"discopop_tau": 0, "loss_type": ["discopop"]}, "out-of-range", "error", "discopop_tau"),
        ({"discopop_tau": -1, "loss_type": ["discopop"]}, "out-of-range", "warning", "discopop_tau"),
        ({"discopop_tau": 0}, "conditional-key", "warning", "discopop_tau"),
        ({"label_smoothing": 0.1}, "conditional-key", "warning", "label_smoothing"),
        (
            {"label_smoothing": "nan", "loss_type": ["exo_pair"]},
            "out-of-range", "warning", "label_smoothing",
        ),
        (
            {"f_divergence_type": "js_divergence", "loss_type": ["sft"]},
            "conditional-key", "warning", "f_divergence_type",
        ),
        ({"f_alpha_divergence_coef": 0.2}, "conditional-key", "warning", "f_alpha_divergence_coef"),
        ({"loss_weights": [0.0]}, "out-of-range", "warning", "loss_weights"),
        ({"loss_weights": ["nan"]}, "out-of-range", "error", "loss_weights"),
        (
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1, -1]},
            "out-of-range", "warning", "loss_weights",
        ),
    ],
)  # fmt: skip
def test_numbers_of_the_losses(changes: dict[str, Any], code: str, severity: str, key: str) -> None:
    given = {name: _number(value) for name, value in changes.items()}
    assert told("dpo", **given) == [(code, severity, key)]


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(one) for one in value]
    return float(value) if value in ("nan", "inf") else value


@pytest.mark.parametrize(
    "changes",
    [
        {"label_smoothing": 0.1, "loss_type": ["sigmoid", "robust"]},
        {"ld_alpha": 0.5, "loss_type": ["sft", "sigmoid"]},
        {"discopop_tau": 0.1, "loss_type": ["discopop"]},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.2},
        {"beta": 0.5},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0]},
    ],
)
def test_what_the_losses_read(changes: dict[str, Any]) -> None:
    assert told("dpo", **changes) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"eval_strategy": "steps", "eval_delay": 9, "max_steps": 8}, "eval_delay"),
        ({"eval_strategy": "epoch", "eval_delay": 1.5, "num_train_epochs": 1}, "eval_delay"),
        ({"sync_ref_model": True, "max_steps": 8}, "sync_ref_model"),
    ],
)
def test_what_begins_after_the_last_step(changes: dict[str, Any], key: str) -> None:
    assert [(severity, named) for _, severity, named in told("dpo", **changes)] == [
        ("warning", key)
    ]
    sooner = {"eval_delay": 1} if key == "eval_delay" else {"ref_model_sync_steps": 8}
    assert told("dpo", **{**changes, **sooner}) == []


def test_the_loss_sft_has_one_number_for_all_rows() -> None:
    args = {"use_weighting": True, "loss_type": ["sigmoid", "sft"]}
    wrong = [("weighting-of-loss", "error", "use_weighting")]
    assert told_of_stage("trl-dpo", args, per_device=4) == wrong
    for known in ({"per_device": 1}, {}):
        assert told_of_stage("trl-dpo", args, **known) == []
    assert told_of_stage("trl-dpo", {"use_weighting": True}, per_device=4) == []


@pytest.mark.parametrize("share", [-1, 0, 1.5, math.nan])
def test_the_share_of_a_moving_reference(share: float) -> None:
    moving = {"sync_ref_model": True, "ref_model_mixup_alpha": share}
    severity = "error" if math.isnan(share) else "warning"
    assert told("dpo", **moving) == [("out-of-range", severity, "ref_model_mixup_alpha")]


# --- columns ---------------------------------------------------------------------------------------

ASKED = [{"role": "user", "content": "hi"}]
CHAT = [*ASKED, {"role": "assistant", "content": "yes"}]
OTHER = [*ASKED, {"role": "assistant", "content": "no"}]
TOLD = [("data-columns", "error", "dataset_name")]


def columns(
    write: Write, script: str, *rows: dict[str, Any], **args: Any
) -> list[tuple[str, str, str]]:
    write("data/train.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    return told_of_stage(script, {"dataset_name": "data", **args}, running=True)


# each was trained on
@pytest.mark.parametrize(
    ("row", "read"),
    [
        ({"messages": CHAT}, True),
        ({"messages": CHAT, "chosen": CHAT, "rejected": OTHER}, True),
        ({"text": "hello"}, True),
        ({"prompt": "a", "completion": "b"}, True),
        ({"conversations": [{"from": "user", "value": "x"}]}, True),
        ({"input_ids": [1, 2, 3]}, True),
        ({"image": "x.png", "prompt": "a"}, True),
        ({"chosen": CHAT, "rejected": OTHER}, False),
        ({"chosen": "a", "rejected": "b"}, False),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, False),
        ({"prompt": "a"}, False),
        ({"completion": "a"}, False),
        ({"conversations": CHAT}, False),
        ({"prompt": "a", "messages": CHAT}, False),
        ({"instruction": "a", "output": "b"}, False),
    ],
)
def test_the_columns_that_sft_reads(write: Write, row: dict[str, Any], read: bool) -> None:
    assert columns(write, "trl-sft", row, row) == ([] if read else TOLD)


@pytest.mark.parametrize(
    ("row", "read"),
    [
        ({"chosen": CHAT, "rejected": OTHER}, True),
        ({"prompt": ASKED, "chosen": CHAT[1:], "rejected": OTHER[1:]}, True),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, True),
        ({"chosen": "a", "rejected": "b", "label": True}, True),
        ({"messages": CHAT}, False),
        ({"prompt": "a", "completion": "b"}, False),
        ({"chosen": CHAT}, False),
        ({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}, False),
        ({"prompt": "q", "chosen": CHAT, "rejected": OTHER}, False),
        ({"prompt": ASKED, "chosen": "a", "rejected": "b"}, False),
        ({"prompt": ASKED, "chosen": CHAT[1:], "rejected": "b"}, False),
        ({"chosen": CHAT, "rejected": "b"}, False),
        ({"prompt": ASKED, "chosen": [], "rejected": OTHER[1:]}, False),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, False),
        ({"prompt": "q", "chosen": None, "rejected": None}, False),
        ({"prompt": 1, "chosen": 2, "rejected": 3}, False),
        ({"prompt": "q", "chosen": CHAT[1], "rejected": OTHER[1]}, False),
        (
            {
                "chosen": [{"from": "gpt", "value": "a"}],
                "rejected": [{"from": "gpt", "value": "b"}],
            },
            False,
        ),
        # nothing that both begin with is left as the prompt
        ({"chosen": CHAT[1:], "rejected": OTHER[1:]}, False),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, True),
        ({"prompt": ASKED, "chosen": CHAT[1:], "rejected": CHAT[1:]}, True),
    ],
)
def test_the_columns_that_dpo_reads(write: Write, row: dict[str, Any], read: bool) -> None:
    assert columns(write, "trl-dpo", row, row) == ([] if read else TOLD)


def test_the_rows_that_are_evaluated_are_looked_at(write: Write) -> None:
    good, bad = {"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a"}
    write("data/test.jsonl", json.dumps(bad))
    assert columns(write, "trl-dpo", good) == []
    assert columns(write, "trl-dpo", good, **EVALUATED) == TOLD
    write("data/test.jsonl", json.dumps(good))
    assert columns(write, "trl-dpo", good, **EVALUATED) == []


@pytest.mark.parametrize("script", ["trl-sft", "trl-dpo"])
def test_pictures_are_for_models_that_take_them(write: Write, script: str) -> None:
    row = {"prompt": "q", "completion": "c", "chosen": "a", "rejected": "b", "images": []}
    assert columns(write, script, row) == []
    write("model/config.json", '{"model_type": "qwen2"}')
    saved.loadable(Path("model"))
    assert columns(write, script, row, model_name_or_path="model") == TOLD
    write("model/config.json", '{"model_type": "qwen2_vl"}')
    assert columns(write, script, row, model_name_or_path="model") == []


def test_conversations_need_a_template(write: Write) -> None:
    model = {"model_name_or_path": "model"}
    missing = [("missing-template", "error", "model_name_or_path")]
    pairs = {"chosen": CHAT, "rejected": OTHER}
    # nothing is known of its tokenizer
    assert columns(write, "trl-dpo", pairs, model_name_or_path="elsewhere") == []
    write("model/config.json", saved.UNKNOWN)
    write("model/tokenizer_config.json", "{}")
    saved.loadable(Path("model"))
    assert columns(write, "trl-dpo", pairs, **model) == missing
    assert columns(write, "trl-sft", {"messages": CHAT}, **model) == missing
    write("other/chat_template.jinja", "{{ messages }}")
    path = {"chat_template_path": "other/chat_template.jinja"}
    assert columns(write, "trl-sft", {"messages": CHAT}, **model, **path) == []
    assert columns(write, "trl-sft", {"text": "a"}, **model) == []
    texts = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert columns(write, "trl-dpo", texts, **model) == []
    write("model/tokenizer_config.json", '{"chat_template": "{{ messages }}"}')
    assert columns(write, "trl-dpo", pairs, **model) == []
    write("model/tokenizer_config.json", "{}")
    write("model/chat_template.jinja", "{{ messages }}")
    assert columns(write, "trl-dpo", pairs, **model) == []


def test_columns_that_arguments_speak_of(write: Write) -> None:
    assert columns(write, "trl-sft", {"body": "a"}, dataset_text_field="body") == []
    skipped = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    assert columns(write, "trl-sft", {"body": "a"}, **skipped) == []
    assert columns(write, "trl-sft", {"body": "a"}, dataset_config="en") == []


def test_all_rows_bring_columns(write: Write) -> None:
    # a row that lacks one has null there
    assert columns(write, "trl-sft", {"body": "a"}, {"text": "b"}) == []
    write("data/train-2.jsonl", '{"text": "a"}\n')
    assert columns(write, "trl-sft", {"body": "a"}) == []
    write("data/train-2.jsonl", '{"body": "a"}\n')
    assert columns(write, "trl-sft", {"body": "a"}) == TOLD
    # what is not read here may bring them
    write("data/train-3.parquet", b"PAR1")
    assert columns(write, "trl-sft", {"body": "a"}) == []


def test_a_row_that_is_longer_than_what_is_read(write: Write) -> None:
    assert columns(write, "trl-sft", {"body": "a" * 2**20}) == []
    assert columns(write, "trl-sft", {"body": "a"}, {"body": "a" * 2**20}) == TOLD
