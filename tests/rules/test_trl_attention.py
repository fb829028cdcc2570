"""Attention and packing under TRL: what a run gets and why, and what attends to what."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from rule_findings import THIS_MACHINE, summarise_run, values_of

from launcher.config import load
from launcher.config.keys import EXPECT
from launcher.errors import Finding, InvalidConfig, select_errors
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
    config = load.load(write("a.yaml", text), overrides)
    return stage.judge_stage_file(config, locator=Locator(search=()))


def plan_run(write: Write, text: str, *, gpus: int = 8, packages: Any = None) -> Plan:
    judged = stage.validate(judge_file(write, text))
    return plan.make(judged, gpus=gpus, packages=packages)


def prefer(*names: str) -> str:
    return FILE + f"attention: [{', '.join(names)}]\n"


def codes(findings: Iterable[Finding]) -> set[str]:
    return {finding.code for finding in findings}


FLASH_OR_SDPA = ("flash_attention_2", "sdpa")


@pytest.mark.parametrize(
    ("names", "gpus", "packages", "chosen", "why"),
    [
        (FLASH_OR_SDPA, 8, None, "flash_attention_2", ""),
        (FLASH_OR_SDPA, 8, {}, "sdpa", "has no flash-attn"),
        (FLASH_OR_SDPA, 8, {"flash-attn": "2.3.2"}, "sdpa", "older than 2.3.3"),
        (FLASH_OR_SDPA, 8, {"flash-attn": "2.3.3"}, "flash_attention_2", ""),
        # a kernel of the hub comes under a name of its own
        (FLASH_OR_SDPA, 8, {"kernels": "0.10"}, "sdpa", "has no flash-attn"),
        (FLASH_OR_SDPA, 0, FLASH, "sdpa", "there is no GPU"),
        (("flash_attention_3", "flash_attention_2"), 8, FLASH, "flash_attention_2", "flash-attn-3"),
        (("flex_attention", "eager"), 0, {}, "eager", "there is no GPU"),
        (("flex_attention", "eager"), 1, {}, "flex_attention", ""),
        (("kernels-community/flash-attn2", "sdpa"), 1, {}, "sdpa", "has no kernels"),
        (("sdpa", "flash_attention_2"), 8, FLASH, "sdpa", ""),
        (("flash_attention_2",), 8, {}, None, "has no flash-attn"),
    ],
)
def test_the_first_that_can_be_had(
    names: tuple[str, ...], gpus: int, packages: Any, chosen: str | None, why: str
) -> None:
    context = Context(values=values_of("trl-sft", {}), gpus=gpus, packages=packages)
    choice = trl_attention.choose(names, context)
    assert choice.name == chosen
    assert why in choice.why
    assert bool(choice.why) == bool(why)


FLOAT32 = {"bf16": False, "dtype": "float32"}


@pytest.mark.parametrize(
    ("args", "mixed_precision", "chosen"),
    [
        (FLOAT32, None, "sdpa"),
        (FLOAT32, "bf16", "flash_attention_2"),
        ({"bf16": False, "model_init_kwargs": {"dtype": "float32"}}, None, "sdpa"),
        ({"dtype": "float32"}, None, "flash_attention_2"),
        ({**FLOAT32, "load_in_4bit": True}, None, "flash_attention_2"),
    ],
)
def test_flash_attention_needs_16_bits(args: Any, mixed_precision: str | None, chosen: str) -> None:
    values = values_of("trl-sft", args)
    context = Context(values=values, gpus=8, packages=FLASH, mixed_precision=mixed_precision)
    assert trl_attention.choose(FLASH_OR_SDPA, context).name == chosen


def test_flash_attention_in_float32_is_refused() -> None:
    args = {"attn_implementation": "flash_attention_2", "bf16": False}
    assert summarise_run("trl-sft", args) == ["flash-in-float32 error attn_implementation"]
    assert summarise_run("trl-sft", {**args, "dtype": "bfloat16", "learning_rate": 1e-4}) == []
    assert summarise_run("trl-sft", args, mixed_precision="bf16") == []


@pytest.mark.parametrize(
    ("name", "packages", "is_missing"),
    [
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
    ],
)
@pytest.mark.parametrize(("machine", "severity"), [(THIS_MACHINE, "error"), (None, "warning")])
def test_attention_that_is_not_installed(
    name: str, packages: Any, is_missing: bool, machine: Any, severity: str
) -> None:
    args = {"attn_implementation": name}
    lines = summarise_run("trl-sft", args, gpus=1, packages=packages, machine=machine)
    assert lines == ([f"attention-missing {severity} attn_implementation"] if is_missing else [])


def test_the_run_gets_what_was_chosen_and_is_held_to_it(write: Write) -> None:
    run = plan_run(write, prefer("flash_attention_2", "sdpa"), packages=FLASH)
    assert run.arguments()["attn_implementation"] == ["flash_attention_2"]
    assert command.list_expectations(run)["attention"] == "flash_attention_2"
    assert "attention-fallback" not in codes(run.findings)


def test_a_run_that_falls_back_says_so(write: Write) -> None:
    run = plan_run(write, prefer("flash_attention_2", "sdpa"), packages={})
    assert run.attention == "sdpa"
    assert run.values["attn_implementation"] == "sdpa"
    assert run.arguments()["attn_implementation"] == ["sdpa"]
    assert command.list_expectations(run)["attention"] == "sdpa"
    (finding,) = [finding for finding in run.findings if finding.code == "attention-fallback"]
    assert finding.severity == "note"
    assert finding.key == "attention"
    assert finding.line == 7
    assert "flash_attention_2: the trainer's Python has no flash-attn" in finding.message


def test_without_a_preference_nothing_is_chosen_nor_expected(write: Write) -> None:
    run = plan_run(write, FILE, packages={})
    assert run.attention is None
    assert "attn_implementation" not in run.arguments()
    assert "attention" not in command.list_expectations(run)


def test_the_expectation_of_the_file_comes_first(write: Write) -> None:
    text = prefer("flash_attention_2", "sdpa") + "expect: {attention: any}\n"
    assert command.list_expectations(plan_run(write, text))["attention"] == "any"


def test_a_kernel_of_the_hub_is_handed_over_and_not_expected(write: Write) -> None:
    name = "kernels-community/flash-attn2"
    run = plan_run(write, prefer(name), packages={"kernels": "1"})
    assert run.arguments()["attn_implementation"] == [name]
    assert "attention" not in command.list_expectations(run)
    assert name not in EXPECT["attention"]


def test_a_single_one_has_nothing_to_fall_back_to(write: Write) -> None:
    text = FILE + "attention: flash_attention_2\n"
    (error,) = select_errors(plan_run(write, text, packages={}).findings)
    assert error.code == "attention-missing"
    assert "sdpa" in str(error.help)
    assert plan_run(write, text, packages=FLASH).attention == "flash_attention_2"


def test_rules_see_the_first_choice(write: Write) -> None:
    text = FILE + "  packing: true\n  max_length: 1024\n"
    assert "packing-without-flash" in codes(judge_file(write, text).findings)

    preferred = judge_file(write, text + "attention: [flash_attention_2, sdpa]\n")
    assert "packing-without-flash" not in codes(preferred.findings)
    assert preferred.values is not None
    assert preferred.values["attn_implementation"] == "flash_attention_2"


def test_an_override_replaces_the_list(write: Write) -> None:
    options = judge_file(write, prefer("flash_attention_2", "sdpa"), "attention=[eager]").options
    assert options is not None
    assert options.attention == ("eager",)


def test_a_schema_without_the_field_chooses_nothing(write: Write) -> None:
    options = judge_file(write, prefer("sdpa")).options
    assert options is not None
    assert stage.choose_attention(options, values_of("sft", {})) is None


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (prefer("flash_attention"), "bad-attention", "did you mean `flash_attention_"),
        (prefer("sdpa", "sdpa"), "bad-attention", "once"),
        (prefer(), "bad-attention", "once"),
        (FILE + "attention: {a: b}\n", "bad-attention", "invalid value"),
        (prefer("1"), "bad-attention", "invalid value"),
        (prefer("sdpa").replace("trl", "open_instruct"), "bad-attention", "for TRL only"),
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
def test_what_cannot_be_meant(write: Write, text: str, code: str, words: str) -> None:
    judged = judge_file(write, text)
    (fault,) = [finding for finding in judged.findings if finding.code == code]
    assert fault.severity == "error"
    assert fault.line
    assert words in f"{fault.message} {fault.help}"
    with pytest.raises(InvalidConfig):
        stage.validate(judged)


@pytest.mark.parametrize("name", ["flash_2", "torch", "nonsense", "a/b/c"])
def test_attention_that_does_not_exist(name: str) -> None:
    expected = "unknown-attention error attn_implementation"
    assert summarise_run("trl-dpo", {"attn_implementation": name}) == [expected]


SLOW = ["packing-without-flash warning packing"]
LEAKS = ["packing-leaks warning packing"]


@pytest.mark.parametrize(
    ("args", "gpus", "expected"),
    [
        ({}, None, SLOW),
        ({"attn_implementation": "sdpa"}, 8, SLOW),
        ({"attn_implementation": "eager"}, 8, SLOW),
        ({"attn_implementation": "flash_attention_2"}, None, []),
        ({"attn_implementation": "kernels-community/flash-attn2"}, None, []),
        ({"attn_implementation": "flex_attention"}, None, []),
        ({"bf16": False}, 0, []),
        # packing that joins examples without a boundary
        ({"packing_strategy": "wrapped", "attn_implementation": "sdpa"}, 8, LEAKS),
        ({"packing_strategy": "wrapped", "attn_implementation": "flash_attention_2"}, 8, LEAKS),
    ],
)
def test_packing_without_flash_attention(args: Any, gpus: int | None, expected: list[str]) -> None:
    assert summarise_run("trl-sft", {"packing": True, **args}, gpus=gpus) == expected


def test_rows_without_padding_and_without_flash_attention() -> None:
    args = {"padding_free": True, "max_length": "none"}
    assert summarise_run("trl-sft", args) == ["packing-without-flash warning padding_free"]
    # a row alone is joined with none
    alone = summarise_run("trl-sft", args, per_device=1)
    assert alone == ["packing-of-one warning padding_free"]
