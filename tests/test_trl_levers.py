"""TRL's settings for speed and memory: which attention a run gets and why, and what does nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Write
from test_rules import values_of
from test_trl_machine_rules import AUTO, SHIPPED, told, without

from launcher import command, config, plan, situation, stage
from launcher.backends import trl_attention
from launcher.backends.context import Context
from launcher.errors import InvalidConfig
from launcher.keys import EXPECT
from launcher.plan import Plan
from launcher.upstream import Locator

FILE = """\
stage: sft
backend: trl
deepspeed: none
args:
  model_name_or_path: a/model
  dataset_name: some/data
"""
FLASH = {"flash-attn": "2.8.3"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def judged(write: Write, text: str, *overrides: str) -> stage.Judged:
    return stage.judge(config.load(write("a.yaml", text), overrides), locator=Locator(search=()))


def planned(write: Write, text: str, *, gpus: int = 8, packages: Any = None) -> Plan:
    return plan.make(stage.validate(judged(write, text)), gpus=gpus, packages=packages)


def preferring(*names: str) -> str:
    return FILE + f"attention: [{', '.join(names)}]\n"


# --- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "gpus", "packages", "chosen", "why"),
    [
        (("flash_attention_2", "sdpa"), 8, FLASH, "flash_attention_2", ""),
        (("flash_attention_2", "sdpa"), 8, None, "flash_attention_2", ""),
        (("flash_attention_2", "sdpa"), 8, {}, "sdpa", "has no flash-attn"),
        (("flash_attention_2", "sdpa"), 8, {"flash-attn": "2.3.2"}, "sdpa", "older than 2.3.3"),
        (("flash_attention_2", "sdpa"), 8, {"flash-attn": "2.3.3"}, "flash_attention_2", ""),
        # a kernel of the hub comes under a name of its own
        (("flash_attention_2", "sdpa"), 8, {"kernels": "0.10"}, "sdpa", "has no flash-attn"),
        (("flash_attention_2", "sdpa"), 0, FLASH, "sdpa", "there is no GPU"),
        (("flash_attention_3", "flash_attention_2", "sdpa"), 8, FLASH, "flash_attention_2", "flash-attn-3"),
        (("flex_attention", "eager"), 0, {}, "eager", "there is no GPU"),
        (("flex_attention", "eager"), 1, {}, "flex_attention", ""),
        (("kernels-community/flash-attn2", "sdpa"), 1, {}, "sdpa", "has no kernels"),
        (("sdpa", "flash_attention_2"), 8, FLASH, "sdpa", ""),
        (("flash_attention_2",), 8, {}, None, "has no flash-attn"),
    ],
)  # fmt: skip
def test_the_first_that_can_be_had(
    names: tuple[str, ...], gpus: int, packages: Any, chosen: str | None, why: str
) -> None:
    context = Context(values=values_of("trl-sft", {}), gpus=gpus, packages=packages)
    choice = trl_attention.choose(names, context)
    assert choice.name == chosen and why in choice.why and bool(why) is bool(choice.passed)


@pytest.mark.parametrize(
    ("args", "mixed", "chosen"),
    [
        ({"bf16": False, "dtype": "float32"}, None, "sdpa"),
        ({"bf16": False, "dtype": "float32"}, "no", "sdpa"),
        ({"bf16": False, "dtype": "float32"}, "bf16", "flash_attention_2"),
        ({"bf16": False, "model_init_kwargs": {"dtype": "float32"}}, None, "sdpa"),
        ({"bf16": False, "dtype": "bfloat16"}, None, "flash_attention_2"),
        ({"dtype": "float32"}, None, "flash_attention_2"),
        ({"bf16": False, "dtype": "float32", "load_in_4bit": True}, None, "flash_attention_2"),
    ],
)
def test_flash_attention_takes_16_bits(
    args: dict[str, Any], mixed: str | None, chosen: str
) -> None:
    context = Context(
        values=values_of("trl-sft", args), gpus=8, packages=FLASH, mixed_precision=mixed
    )
    assert trl_attention.choose(("flash_attention_2", "sdpa"), context).name == chosen


def test_the_run_gets_what_was_chosen_and_is_held_to_it(write: Write) -> None:
    text = preferring("flash_attention_2", "sdpa")
    made = planned(write, text, packages={})
    assert made.arguments()["attn_implementation"] == ["sdpa"]
    assert made.values["attn_implementation"] == made.attention == "sdpa"
    assert command.expectations(made)["attention"] == "sdpa"
    said = {f.code: f for f in made.findings}["attention-fallback"]
    assert (said.severity, said.key, said.line) == ("note", "attention", 7)
    assert "flash_attention_2: the trainer's Python has no flash-attn" in said.message
    made = planned(write, text, packages=FLASH)
    assert made.arguments()["attn_implementation"] == ["flash_attention_2"]
    assert command.expectations(made)["attention"] == "flash_attention_2"
    assert "attention-fallback" not in {f.code for f in made.findings}


def test_a_single_one_has_nothing_to_fall_back_to(write: Write) -> None:
    text = FILE + "attention: flash_attention_2\n"
    faults = [f for f in planned(write, text, packages={}).findings if f.severity == "error"]
    assert [f.code for f in faults] == ["attention-missing"]
    assert "sdpa" in str(faults[0].help)
    assert planned(write, text, packages=FLASH).attention == "flash_attention_2"


def test_without_it_nothing_is_chosen_nor_expected(write: Write) -> None:
    made = planned(write, FILE, packages={})
    assert made.attention is None and "attn_implementation" not in made.arguments()
    assert "attention" not in command.expectations(made)


def test_what_is_expected_may_be_said_otherwise(write: Write) -> None:
    text = preferring("flash_attention_2", "sdpa") + "expect: {attention: any}\n"
    assert command.expectations(planned(write, text))["attention"] == "any"


def test_a_kernel_of_the_hub_is_handed_over_and_not_expected(write: Write) -> None:
    made = planned(write, preferring("kernels-community/flash-attn2"), packages={"kernels": "1"})
    assert made.arguments()["attn_implementation"] == ["kernels-community/flash-attn2"]
    assert "attention" not in command.expectations(made)
    assert "kernels-community/flash-attn2" not in EXPECT["attention"]


def test_rules_see_the_first_choice(write: Write) -> None:
    text = FILE + "  packing: true\n  max_length: 1024\n"
    codes = {f.code for f in judged(write, text).findings}
    assert "packing-without-flash" in codes
    preferred = judged(write, text + "attention: [flash_attention_2, sdpa]\n")
    assert "packing-without-flash" not in {f.code for f in preferred.findings}
    assert preferred.values is not None
    assert preferred.values["attn_implementation"] == "flash_attention_2"


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        (preferring("flash_attention"), "bad-attention", "did you mean `flash_attention_"),
        (preferring("sdpa", "sdpa"), "bad-attention", "once"),
        (FILE + "attention: []\n", "bad-attention", "once"),
        (FILE + "attention: {a: b}\n", "bad-attention", "no attention implementation"),
        (FILE + "attention: [1]\n", "bad-attention", "no attention implementation"),
        (
            FILE.replace("trl", "open_instruct") + "attention: sdpa\n",
            "bad-attention",
            "for TRL only",
        ),
        (
            FILE + "  attn_implementation: sdpa\nattention: sdpa\n",
            "attention-twice",
            "keep `attention:`",
        ),
        (
            FILE + "  model_init_kwargs: {attn_implementation: sdpa}\nattention: sdpa\n",
            "attention-twice",
            "keep `attention:`",
        ),
    ],
)
def test_what_cannot_be_meant(write: Write, text: str, code: str, told: str) -> None:
    found = [f for f in judged(write, text).findings if f.code == code]
    assert len(found) == 1 and found[0].severity == "error" and found[0].line
    assert told in f"{found[0].message} {found[0].help}"
    with pytest.raises(InvalidConfig):
        stage.validate(judged(write, text))


def test_an_override_replaces_the_list(write: Write) -> None:
    chosen = judged(write, preferring("flash_attention_2", "sdpa"), "attention=[eager]").options
    assert chosen is not None and chosen.attention == ("eager",)


def test_a_schema_without_the_field_chooses_nothing(write: Write) -> None:
    known = judged(write, preferring("sdpa"))
    assert known.options is not None
    other = values_of("sft", {})
    assert situation.attention(known.options, other) is None


# --- what does nothing -----------------------------------------------------------------------------

OFFLOADING = SHIPPED["zero3_offload"]
QUIET = [
    ({"optim": "adamw_torch"}, OFFLOADING),
    ({"optim": "paged_adamw_32bit"}, OFFLOADING),
    ({"optim": "lion_32bit"}, OFFLOADING),
    ({}, OFFLOADING),
    ({"optim": "adamw_bnb_8bit"}, SHIPPED["zero2"]),
    ({"optim": "adamw_bnb_8bit"}, None),
    ({"optim": "adamw_bnb_8bit"}, {**OFFLOADING, "zero_force_ds_cpu_optimizer": False}),
    ({}, {**AUTO, "optimizer": {"type": "AdamW"}}),
    ({"torch_compile": True, "pad_to_multiple_of": 512}, None),
    ({"dataloader_num_workers": 4, "dataloader_persistent_workers": True}, None),
    ({"dataloader_num_workers": 8, "dataloader_pin_memory": True}, None),
    ({"activation_offloading": True}, None),
]
INSTALLED = {"bitsandbytes": "0.50.2"}


@pytest.mark.parametrize("script", ["trl-sft", "trl-dpo"])
@pytest.mark.parametrize(("args", "file"), QUIET)
def test_what_acts_is_left_alone(script: str, args: dict[str, Any], file: Any) -> None:
    known = {"gpus": 8, "deepspeed": file, "cpus": 64, "packages": INSTALLED}
    assert told(script, args, **known) == []


@pytest.mark.parametrize("script", ["trl-sft", "trl-dpo"])
@pytest.mark.parametrize(
    "name", ["adamw_bnb_8bit", "adafactor", "paged_adamw_8bit", "lion_8bit", "sgd"]
)
def test_offloading_makes_an_adam_of_it(script: str, name: str) -> None:
    known: dict[str, Any] = {"gpus": 8, "packages": INSTALLED}
    expected = [("optim-replaced", "warning", "optim")]
    assert told(script, {"optim": name}, deepspeed=OFFLOADING, **known) == expected
    # on the CPU there is no DeepSpeed
    assert told(script, {"optim": name, "bf16": False}, gpus=0, deepspeed=OFFLOADING) == []


def test_a_config_with_an_optimizer_decides() -> None:
    file = {**AUTO, "optimizer": {"type": "Lamb"}}
    known: dict[str, Any] = {"gpus": 8, "packages": INSTALLED}
    expected = [("optim-unread", "warning", "optim")]
    assert told("trl-sft", {"optim": "adamw_8bit"}, deepspeed=file, **known) == expected
    own = {"optim": "adamw_8bit", "deepspeed": json.dumps(file)}
    assert told("trl-sft", own, **known) == expected
    offloading = {**OFFLOADING, "optimizer": {"type": "AdamW"}}
    assert told("trl-sft", {"optim": "sgd"}, deepspeed=offloading, **known) == expected
    plain = without(offloading, "optimizer")
    assert told("trl-sft", {"optim": "sgd"}, deepspeed=plain, **known) == [
        ("optim-replaced", "warning", "optim")
    ]


@pytest.mark.parametrize("script", ["trl-sft", "trl-dpo"])
@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_torch_4bit"])
def test_an_adapter_has_little_to_save(script: str, name: str) -> None:
    packages = {**INSTALLED, "torchao": "1"}
    given = {"optim": name, "use_peft": True}
    assert told(script, given, gpus=1, packages=packages) == [("optim-on-adapter", "note", "optim")]


@pytest.mark.parametrize("script", ["trl-sft", "trl-dpo"])
@pytest.mark.parametrize(
    "args",
    [
        {"torch_compile": True},
        {"torch_compile_mode": "max-autotune"},
        {"torch_compile_backend": "eager"},
        {"torch_compile": True, "pad_to_multiple_of": "none"},
        {"torch_compile": True, "pad_to_multiple_of": "auto"},
    ],
)
def test_lengths_are_compiled_one_by_one(script: str, args: dict[str, Any]) -> None:
    assert told(script, args, gpus=8) == [("compile-lengths", "warning", next(iter(args)))]


def test_compiling_needs_a_compiler(tmp_path: Path) -> None:
    args = {"torch_compile": True, "pad_to_multiple_of": 64}
    bare = {"PATH": str(tmp_path)}
    missing = [("no-compiler", "error", "torch_compile")]
    assert told("trl-sft", args, gpus=8, running=True, environ=bare) == missing
    assert told("trl-sft", {**args, "bf16": False}, gpus=0, running=True, environ=bare) == missing
    assert told("trl-sft", args, gpus=8, environ=bare) == []
    eager = {**args, "torch_compile_backend": "eager"}
    assert told("trl-sft", eager, gpus=8, running=True, environ=bare) == []
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert told("trl-sft", args, gpus=8, running=True, environ=bare) == []
    named = {**bare, "CC": "no-such-compiler"}
    assert told("trl-sft", args, gpus=8, running=True, environ=named) == missing


@pytest.mark.parametrize(
    ("script", "args", "code", "key"),
    [
        ("trl-sft", {"packing_strategy": "wrapped"}, "conditional-key", "packing_strategy"),
        (
            "trl-sft",
            {
                "gradient_checkpointing": False,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
            "conditional-key",
            "gradient_checkpointing_kwargs",
        ),
        (
            "trl-dpo",
            {"precompute_ref_batch_size": 4},
            "conditional-key",
            "precompute_ref_batch_size",
        ),
        ("trl-dpo", {"ref_model_sync_steps": 4}, "conditional-key", "ref_model_sync_steps"),
        ("trl-sft", {"do_eval": True}, "conditional-key", "do_eval"),
        (
            "trl-sft",
            {"save_strategy": "no", "load_best_model_at_end": True},
            "conditional-key",
            "load_best_model_at_end",
        ),
        (
            "trl-dpo",
            {"per_device_eval_batch_size": 2},
            "conditional-key",
            "per_device_eval_batch_size",
        ),
    ],
)
def test_what_belongs_to_something_that_is_off(
    script: str, args: dict[str, Any], code: str, key: str
) -> None:
    assert told(script, args, gpus=8) == [(code, "warning", key)]


def test_what_belongs_to_something_that_is_on() -> None:
    wrapped = {"packing": True, "packing_strategy": "bfd_split", "max_length": 64}
    assert told("trl-sft", {**wrapped, "attn_implementation": "flash_attention_2"}, gpus=8) == []
    assert told("trl-dpo", {"sync_ref_model": True, "ref_model_sync_steps": 4}, gpus=8) == []
    assert told("trl-sft", {"packing_strategy": "bfd"}, gpus=8) == []
    evaluated = {"eval_strategy": "steps", "do_eval": True, "per_device_eval_batch_size": 2}
    assert told("trl-sft", evaluated, gpus=8) == []


def test_workers() -> None:
    many = {"dataloader_num_workers": 4}
    known: dict[str, Any] = {"gpus": 8, "running": True, "packages": {}}
    noted = [("many-workers", "note", "dataloader_num_workers")]
    assert told("trl-sft", many, cpus=16, **known) == noted
    assert told("trl-sft", many, cpus=32, **known) == []
    assert told("trl-sft", many, **known) == []
    # 16 GPUs are of two machines or more
    assert told("trl-sft", many, cpus=16, **{**known, "gpus": 16}) == []
    kept = {**many, "dataloader_persistent_workers": True, "num_train_epochs": 1}
    once = [("persistent-once", "note", "dataloader_persistent_workers")]
    assert told("trl-sft", kept, gpus=8) == once
    assert told("trl-sft", {**kept, "eval_strategy": "epoch"}, gpus=8) == []
    assert told("trl-sft", {**kept, "max_steps": 9000}, gpus=8) == []


@pytest.mark.parametrize(
    ("args", "words"), [({"use_peft": True}, "63 % more memory"), ({}, "saves its weights")]
)
def test_the_price_of_a_reference_computed_beforehand(
    write: Write, args: dict[str, Any], words: str
) -> None:
    given = {
        "model_name_or_path": "a/b",
        "dataset_name": "c/d",
        "precompute_ref_log_probs": True,
        **args,
    }
    text = yaml.safe_dump({"stage": "dpo", "backend": "trl", "args": given})
    found = [f for f in judged(write, text).findings if f.code == "reference-price"]
    assert [f.severity for f in found] == ["note"] and words in found[0].message
