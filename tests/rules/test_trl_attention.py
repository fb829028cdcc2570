"""Attention and packing under TRL: what a run gets and why, and which documents attend to each other."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from test_rules import HERE, values_of
from test_trl_machine_rules import ON_CPU, told

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
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def judged(write: Write, text: str, *overrides: str) -> stage.Judged:
    return stage.judge(load.load(write("a.yaml", text), overrides), locator=Locator(search=()))


def planned(write: Write, text: str, *, gpus: int = 8, packages: Any = None) -> Plan:
    return plan.make(stage.validate(judged(write, text)), gpus=gpus, packages=packages)


def preferring(*names: str) -> str:
    return FILE + f"attention: [{', '.join(names)}]\n"


CHOICES: list[tuple[tuple[str, ...], int, Any, str | None, str]] = [
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
]  # fmt: skip


def test_the_first_that_can_be_had() -> None:
    for names, gpus, packages, chosen, why in CHOICES:
        context = Context(values=values_of("trl-sft", {}), gpus=gpus, packages=packages)
        choice = trl_attention.choose(names, context)
        assert choice.name == chosen and why in choice.why and bool(why) is bool(choice.why)


SIXTEEN_BITS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"bf16": False, "dtype": "float32"}, None, "sdpa"),
    ({"bf16": False, "dtype": "float32"}, "bf16", "flash_attention_2"),
    ({"bf16": False, "model_init_kwargs": {"dtype": "float32"}}, None, "sdpa"),
    ({"dtype": "float32"}, None, "flash_attention_2"),
    ({"bf16": False, "dtype": "float32", "load_in_4bit": True}, None, "flash_attention_2"),
]


def test_flash_attention_needs_16_bits() -> None:
    for args, mixed, chosen in SIXTEEN_BITS:
        context = Context(values=values_of("trl-sft", args), gpus=8, packages=FLASH, mixed_precision=mixed)
        assert trl_attention.choose(("flash_attention_2", "sdpa"), context).name == chosen
    args = {"attn_implementation": "flash_attention_2", "bf16": False}
    assert told("trl-sft", args) == [("flash-in-float32", "error", "attn_implementation")]
    assert told("trl-sft", {**args, "dtype": "bfloat16"}) == []
    assert told("trl-sft", args, mixed_precision="bf16") == []


def test_attention_that_is_not_installed() -> None:
    for name, packages, missing in PACKAGES:
        args = {"attn_implementation": name}
        for machine, severity in ((HERE, "error"), (None, "warning")):
            expected = [("attention-missing", severity, "attn_implementation")] if missing else []
            assert told("trl-sft", args, gpus=1, packages=packages, machine=machine) == expected


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
    # without it nothing is chosen nor expected
    made = planned(write, FILE, packages={})
    assert made.attention is None and "attn_implementation" not in made.arguments()
    assert "attention" not in command.expectations(made)
    # what is expected may be said otherwise
    text = preferring("flash_attention_2", "sdpa") + "expect: {attention: any}\n"
    assert command.expectations(planned(write, text))["attention"] == "any"
    # a kernel of the hub is handed over and not expected
    made = planned(write, preferring("kernels-community/flash-attn2"), packages={"kernels": "1"})
    assert made.arguments()["attn_implementation"] == ["kernels-community/flash-attn2"]
    assert "attention" not in command.expectations(made)
    assert "kernels-community/flash-attn2" not in EXPECT["attention"]


def test_a_single_one_has_nothing_to_fall_back_to(write: Write) -> None:
    text = FILE + "attention: flash_attention_2\n"
    faults = [f for f in planned(write, text, packages={}).findings if f.severity == "error"]
    assert [f.code for f in faults] == ["attention-missing"]
    assert "sdpa" in str(faults[0].help)
    assert planned(write, text, packages=FLASH).attention == "flash_attention_2"


def test_rules_see_the_first_choice(write: Write) -> None:
    text = FILE + "  packing: true\n  max_length: 1024\n"
    codes = {f.code for f in judged(write, text).findings}
    assert "packing-without-flash" in codes
    preferred = judged(write, text + "attention: [flash_attention_2, sdpa]\n")
    assert "packing-without-flash" not in {f.code for f in preferred.findings}
    assert preferred.values is not None
    assert preferred.values["attn_implementation"] == "flash_attention_2"
    # an override replaces the list
    chosen = judged(write, preferring("flash_attention_2", "sdpa"), "attention=[eager]").options
    assert chosen is not None and chosen.attention == ("eager",)
    # a schema without the field chooses nothing
    known = judged(write, preferring("sdpa"))
    assert known.options is not None
    other = values_of("sft", {})
    assert stage.preferred_attention(known.options, other) is None


FAULTS: list[tuple[str, str, str]] = [
    (preferring("flash_attention"), "bad-attention", "did you mean `flash_attention_"),
    (preferring("sdpa", "sdpa"), "bad-attention", "once"),
    (FILE + "attention: []\n", "bad-attention", "once"),
    (FILE + "attention: {a: b}\n", "bad-attention", "invalid value"),
    (FILE + "attention: [1]\n", "bad-attention", "invalid value"),
    (FILE.replace("trl", "open_instruct") + "attention: sdpa\n", "bad-attention", "for TRL only"),
    (FILE + "  attn_implementation: sdpa\nattention: sdpa\n", "attention-twice", "keep `attention:`"),
    (
        FILE + "  model_init_kwargs: {attn_implementation: sdpa}\nattention: sdpa\n",
        "attention-twice",
        "keep `attention:`",
    ),
]  # fmt: skip


def test_what_cannot_be_meant(write: Write) -> None:
    for text, code, words in FAULTS:
        found = [f for f in judged(write, text).findings if f.code == code]
        assert len(found) == 1 and found[0].severity == "error" and found[0].line
        assert words in f"{found[0].message} {found[0].help}"
        with pytest.raises(InvalidConfig):
            stage.validate(judged(write, text))


PACKAGES: list[tuple[str, dict[str, str] | None, bool]] = [
    ("flash_attention_2", {}, True), ("flash_attention_2", FLASH, False), ("flash_attention_2", None, False),
    ("flash_attention_2", {"flash-attn-3": "3.0"}, True), ("flash_attention_3", {"flash-attn-3": "3.0"}, False),
    ("paged|flash_attention_2", {}, True), ("flash_attention_2", {"kernels": "0.16.0"}, False),
    ("kernels-community/flash-attn2", {}, True), ("kernels-community/flash-attn2", {"kernels": "0.16.0"}, False),
    ("flex_attention", {}, False), ("sdpa", {}, False), ("eager", {}, False),
]  # fmt: skip


@pytest.mark.parametrize("name", ["flash_2", "torch", "nonsense", "a/b/c"])
def test_attention_that_does_not_exist(name: str) -> None:
    expected = ("unknown-attention", "error", "attn_implementation")
    assert told("trl-dpo", {"attn_implementation": name}) == [expected]


SLOW = "packing-without-flash"
LEAKS = "packing-leaks"
FREE: dict[str, Any] = {"packing": False, "padding_free": True, "max_length": "none"}
PACKED: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    ({}, {}, SLOW), ({"attn_implementation": "sdpa"}, {"gpus": 8}, SLOW), (FREE, {}, SLOW),
    ({"attn_implementation": "eager"}, {"gpus": 8}, SLOW), ({"attn_implementation": "flash_attention_2"}, {}, None),
    ({"attn_implementation": "kernels-community/flash-attn2"}, {}, None),
    ({"attn_implementation": "flex_attention"}, {}, None), ({"bf16": False}, ON_CPU, None),
    # a row alone is joined with none
    (FREE, {"per_device": 1}, "packing-of-one"),
    # packing that joins examples without a boundary
    ({"packing_strategy": "wrapped", "attn_implementation": "sdpa"}, {"gpus": 8}, LEAKS),
    ({"packing_strategy": "wrapped", "attn_implementation": "flash_attention_2"}, {"gpus": 8}, LEAKS),
]  # fmt: skip


def test_packing_without_flash_attention() -> None:
    for args, known, code in PACKED:
        key = "padding_free" if args.get("padding_free") else "packing"
        expected = [] if code is None else [(code, "warning", key)]
        assert told("trl-sft", {"packing": True, **args}, **known) == expected, args
