"""Attention and packing under TRL: what a run gets and why, and what attends to what."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from rule_findings import THIS_MACHINE, summarise_run, values_of

from launcher.config import load
from launcher.config.keys import EXPECT
from launcher.errors import InvalidConfig
from launcher.plan import command, plan
from launcher.plan.plan import Plan
from launcher.rules.context import Context
from launcher.rules.trl import attention as trl_attention
from launcher.stage import stage
from launcher.upstream.locate import Locator

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
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def judge_file(write: Write, text: str, *overrides: str) -> stage.Judged:
    return stage.judge_stage_file(
        load.load(write("a.yaml", text), overrides), locator=Locator(search=())
    )


def plan_run(write: Write, text: str, *, gpus: int = 8, packages: Any = None) -> Plan:
    return plan.make(stage.validate(judge_file(write, text)), gpus=gpus, packages=packages)


def prefer(*names: str) -> str:
    return FILE + f"attention: [{', '.join(names)}]\n"


CHOICES = [
    (("flash_attention_2", "sdpa"), 8, FLASH, "flash_attention_2", ""),
    (("flash_attention_2", "sdpa"), 8, None, "flash_attention_2", ""),
    (("flash_attention_2", "sdpa"), 8, {}, "sdpa", "has no flash-attn"),
    (("flash_attention_2", "sdpa"), 8, {"flash-attn": "2.3.2"}, "sdpa", "older than 2.3.3"),
    (("flash_attention_2", "sdpa"), 8, {"flash-attn": "2.3.3"}, "flash_attention_2", ""),
    # a kernel of the hub comes under a name of its own
    (("flash_attention_2", "sdpa"), 8, {"kernels": "0.10"}, "sdpa", "has no flash-attn"),
    (("flash_attention_2", "sdpa"), 0, FLASH, "sdpa", "there is no GPU"),
    (
        ("flash_attention_3", "flash_attention_2", "sdpa"),
        8,
        FLASH,
        "flash_attention_2",
        "flash-attn-3",
    ),
    (("flex_attention", "eager"), 0, {}, "eager", "there is no GPU"),
    (("flex_attention", "eager"), 1, {}, "flex_attention", ""),
    (("kernels-community/flash-attn2", "sdpa"), 1, {}, "sdpa", "has no kernels"),
    (("sdpa", "flash_attention_2"), 8, FLASH, "sdpa", ""),
    (("flash_attention_2",), 8, {}, None, "has no flash-attn"),
]


def test_the_first_that_can_be_had() -> None:
    for names, gpus, packages, chosen, why in CHOICES:
        context = Context(values=values_of("trl-sft", {}), gpus=gpus, packages=packages)
        choice = trl_attention.choose(names, context)
        assert choice.name == chosen and why in choice.why and bool(why) is bool(choice.why)


SIXTEEN_BITS = [
    ({"bf16": False, "dtype": "float32"}, None, "sdpa"),
    ({"bf16": False, "dtype": "float32"}, "bf16", "flash_attention_2"),
    ({"bf16": False, "model_init_kwargs": {"dtype": "float32"}}, None, "sdpa"),
    ({"dtype": "float32"}, None, "flash_attention_2"),
    ({"bf16": False, "dtype": "float32", "load_in_4bit": True}, None, "flash_attention_2"),
]


def test_flash_attention_needs_16_bits() -> None:
    for args, mixed, chosen in SIXTEEN_BITS:
        context = Context(
            values=values_of("trl-sft", args), gpus=8, packages=FLASH, mixed_precision=mixed
        )
        assert trl_attention.choose(("flash_attention_2", "sdpa"), context).name == chosen
    args = {"attn_implementation": "flash_attention_2", "bf16": False}
    assert summarise_run("trl-sft", args) == ["flash-in-float32 error attn_implementation"]
    assert summarise_run("trl-sft", {**args, "dtype": "bfloat16"}) == []
    assert summarise_run("trl-sft", args, mixed_precision="bf16") == []


def test_attention_that_is_not_installed() -> None:
    for name, packages, missing in PACKAGES:
        args = {"attn_implementation": name}
        for machine, severity in ((THIS_MACHINE, "error"), (None, "warning")):
            expected = [f"attention-missing {severity} attn_implementation"] if missing else []
            assert (
                summarise_run("trl-sft", args, gpus=1, packages=packages, machine=machine)
                == expected
            )


def test_the_run_gets_what_was_chosen_and_is_held_to_it(write: Write) -> None:
    text = prefer("flash_attention_2", "sdpa")
    run = plan_run(write, text, packages={})
    assert run.arguments()["attn_implementation"] == ["sdpa"]
    assert run.values["attn_implementation"] == run.attention == "sdpa"
    assert command.expectations(run)["attention"] == "sdpa"
    said = {f.code: f for f in run.findings}["attention-fallback"]
    assert (said.severity, said.key, said.line) == ("note", "attention", 7)
    assert "flash_attention_2: the trainer's Python has no flash-attn" in said.message
    run = plan_run(write, text, packages=FLASH)
    assert run.arguments()["attn_implementation"] == ["flash_attention_2"]
    assert command.expectations(run)["attention"] == "flash_attention_2"
    assert "attention-fallback" not in {f.code for f in run.findings}
    # without it nothing is chosen nor expected
    run = plan_run(write, FILE, packages={})
    assert run.attention is None and "attn_implementation" not in run.arguments()
    assert "attention" not in command.expectations(run)
    # what is expected may be said otherwise
    text = prefer("flash_attention_2", "sdpa") + "expect: {attention: any}\n"
    assert command.expectations(plan_run(write, text))["attention"] == "any"
    # a kernel of the hub is handed over and not expected
    run = plan_run(write, prefer("kernels-community/flash-attn2"), packages={"kernels": "1"})
    assert run.arguments()["attn_implementation"] == ["kernels-community/flash-attn2"]
    assert "attention" not in command.expectations(run)
    assert "kernels-community/flash-attn2" not in EXPECT["attention"]


def test_a_single_one_has_nothing_to_fall_back_to(write: Write) -> None:
    text = FILE + "attention: flash_attention_2\n"
    faults = [f for f in plan_run(write, text, packages={}).findings if f.severity == "error"]
    assert [f.code for f in faults] == ["attention-missing"]
    assert "sdpa" in str(faults[0].help)
    assert plan_run(write, text, packages=FLASH).attention == "flash_attention_2"


def test_rules_see_the_first_choice(write: Write) -> None:
    text = FILE + "  packing: true\n  max_length: 1024\n"
    codes = {f.code for f in judge_file(write, text).findings}
    assert "packing-without-flash" in codes
    preferred = judge_file(write, text + "attention: [flash_attention_2, sdpa]\n")
    assert "packing-without-flash" not in {f.code for f in preferred.findings}
    assert preferred.values is not None
    assert preferred.values["attn_implementation"] == "flash_attention_2"
    # an override replaces the list
    chosen = judge_file(write, prefer("flash_attention_2", "sdpa"), "attention=[eager]").options
    assert chosen is not None and chosen.attention == ("eager",)
    # a schema without the field chooses nothing
    known = judge_file(write, prefer("sdpa"))
    assert known.options is not None
    other = values_of("sft", {})
    assert stage.preferred_attention(known.options, other) is None


FAULTS = [
    (prefer("flash_attention"), "bad-attention", "did you mean `flash_attention_"),
    (prefer("sdpa", "sdpa"), "bad-attention", "once"),
    (FILE + "attention: []\n", "bad-attention", "once"),
    (FILE + "attention: {a: b}\n", "bad-attention", "invalid value"),
    (FILE + "attention: [1]\n", "bad-attention", "invalid value"),
    (FILE.replace("trl", "open_instruct") + "attention: sdpa\n", "bad-attention", "for TRL only"),
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
]


def test_what_cannot_be_meant(write: Write) -> None:
    for text, code, words in FAULTS:
        faults = [f for f in judge_file(write, text).findings if f.code == code]
        assert len(faults) == 1 and faults[0].severity == "error" and faults[0].line
        assert words in f"{faults[0].message} {faults[0].help}"
        with pytest.raises(InvalidConfig):
            stage.validate(judge_file(write, text))


PACKAGES = [
    ("flash_attention_2", {}, True),
    ("flash_attention_2", FLASH, False),
    ("flash_attention_2", None, False),
    ("flash_attention_2", {"flash-attn-3": "3.0"}, True),
    ("flash_attention_3", {"flash-attn-3": "3.0"}, False),
    ("paged|flash_attention_2", {}, True),
    ("flash_attention_2", {"kernels": "0.16.0"}, False),
    ("kernels-community/flash-attn2", {}, True),
    ("kernels-community/flash-attn2", {"kernels": "0.16.0"}, False),
    ("flex_attention", {}, False),
    ("sdpa", {}, False),
    ("eager", {}, False),
]


@pytest.mark.parametrize("name", ["flash_2", "torch", "nonsense", "a/b/c"])
def test_attention_that_does_not_exist(name: str) -> None:
    expected = "unknown-attention error attn_implementation"
    assert summarise_run("trl-dpo", {"attn_implementation": name}) == [expected]


SLOW = "packing-without-flash"
LEAKS = "packing-leaks"
FREE = {"packing": False, "padding_free": True, "max_length": "none"}
PACKED = [
    ({}, {}, SLOW),
    ({"attn_implementation": "sdpa"}, {"gpus": 8}, SLOW),
    (FREE, {}, SLOW),
    ({"attn_implementation": "eager"}, {"gpus": 8}, SLOW),
    ({"attn_implementation": "flash_attention_2"}, {}, None),
    ({"attn_implementation": "kernels-community/flash-attn2"}, {}, None),
    ({"attn_implementation": "flex_attention"}, {}, None),
    ({"bf16": False}, {"gpus": 0}, None),
    # a row alone is joined with none
    (FREE, {"per_device": 1}, "packing-of-one"),
    # packing that joins examples without a boundary
    ({"packing_strategy": "wrapped", "attn_implementation": "sdpa"}, {"gpus": 8}, LEAKS),
    (
        {"packing_strategy": "wrapped", "attn_implementation": "flash_attention_2"},
        {"gpus": 8},
        LEAKS,
    ),
]


def test_packing_without_flash_attention() -> None:
    for args, known, code in PACKED:
        key = "padding_free" if args.get("padding_free") else "packing"
        expected = [] if code is None else [f"{code} warning {key}"]
        assert summarise_run("trl-sft", {"packing": True, **args}, **known) == expected, args
