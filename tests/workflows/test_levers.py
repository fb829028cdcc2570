"""What can be turned for each backend and stage: the keys, the limits, and why something stays."""

from typing import Any

import pytest
import tuned
from conftest import Write
from fake_world import needs_trl

from launcher.config import load
from launcher.errors import select_errors
from launcher.stage import stage
from launcher.workflows.tune.space import Space

pytestmark = needs_trl

HAND = "bench/hand_recipe.yaml"
TULU = "tulu/dpo_qwen7b.yaml"
LORA = "lora/sft_qwen7b.yaml"
OLMO = "olmo_core/dpo_qwen3_0_6b.yaml"
DEMO = "demo/sft.yaml"
QWEN_7B = "model_name_or_path=Qwen/Qwen2.5-7B"
SMALL = "model_name_or_path=Qwen/Qwen2.5-0.5B"
FULL = f"use_peft=false {SMALL} attn_implementation=sdpa expect.liger=any"


def space_of(path: Any, overrides: str = "", **terms: Any) -> Space:
    return tuned.outlook(path, *overrides.split(), **terms)


def turn(space: Space, **settings: Any) -> dict[str, object]:
    """The keys that change if these levers are turned."""
    return space.changes({**space.base, **settings})


def sizes(space: Space, *, packed: bool) -> set[object]:
    """The rows a device that are tried with or without packing."""
    return {one["per_device"] for one in space.settings() if one["packing"] is packed}


def test_the_file_as_written_changes_nothing() -> None:
    space = space_of(HAND)
    assert turn(space) == {}
    assert space.base == {
        "packing": False,
        "liger": True,
        "per_device": 16,
        "checkpointing": True,
        "deepspeed": "zero2_fp32_comm",
    }
    assert "installed" in space.fixed["attention"]


@pytest.mark.parametrize(
    ("overrides", "settings", "changes"),
    [
        ("", {"packing": True}, {"args.packing": True, "expect.packing": "isolated"}),
        ("", {"liger": False}, {"args.use_liger_kernel": False, "expect.liger": "off"}),
        # what is turned on is proved even where the file does not care
        (
            "expect.packing=any",
            {"packing": True},
            {"args.packing": True, "expect.packing": "isolated"},
        ),
        ("expect.liger=any", {"liger": False}, {"args.use_liger_kernel": False}),
        (
            "expect.liger=any use_liger_kernel=false",
            {"liger": True},
            {"args.use_liger_kernel": True, "expect.liger": "engaged"},
        ),
    ],
)
def test_the_expectations_of_a_file_follow_what_is_turned(
    overrides: str, settings: dict[str, object], changes: dict[str, object]
) -> None:
    assert turn(space_of(HAND, overrides), **settings) == changes


def test_one_row_is_packed_with_no_other() -> None:
    space = space_of("tulu/sft_qwen7b.yaml", rows="64:900")
    assert 1 not in sizes(space, packed=True)
    assert 2 in sizes(space, packed=True)
    assert 1 in sizes(space, packed=False)


@pytest.mark.parametrize(
    ("path", "overrides", "gpus"),
    [
        (HAND, "", 2),
        (TULU, QWEN_7B, 8),
        (LORA, "expect.liger=any", 1),
        (LORA, FULL, 2),
        (DEMO, "max_length=256", 0),
    ],
)
def test_every_value_is_one_that_upstream_takes(path: str, overrides: str, gpus: int) -> None:
    space = space_of(path, overrides, gpus=gpus, rows="400:1000" if gpus else "80:200")
    for lever in space.levers:
        for value in lever.values:
            settings = {**space.base, lever.name: value}
            total = space.total_rows(settings)
            largest = total // space.plan.devices
            if lever.name != "per_device":
                settings["per_device"] = min(int(settings["per_device"]), largest)
            if largest % int(settings["per_device"]):
                continue
            words = (*overrides.split(), *space.overrides(settings))
            judged = stage.judge_stage_file(load.load(tuned.REPOSITORY / "configs" / path, words))
            assert not select_errors(judged.findings), settings
            assert space.planned(settings).global_batch == total
            if lever.name != "packing":
                assert total == space.plan.global_batch


def test_the_global_batch_is_kept_in_the_files_own_words(write: Write) -> None:
    args = "model_name_or_path: m, dataset_name: d, output_dir: o, attn_implementation: sdpa"
    batch = "per_device_train_batch_size: 4, gradient_accumulation_steps: 8"
    head = "stage: sft\nbackend: trl\n"
    plain = space_of(write("plain.yaml", f"{head}args: {{{args}, {batch}}}\n"), SMALL)
    assert turn(plain, per_device=16) == {
        "args.per_device_train_batch_size": 16,
        "args.gradient_accumulation_steps": 2,
    }
    head += "batch: {global: 64}\n"
    text = f"{head}args: {{{args}, per_device_train_batch_size: 4}}\n"
    half = space_of(write("half.yaml", text), SMALL)
    assert turn(half, per_device=16) == {"args.per_device_train_batch_size": 16}
    assert half.planned({**half.base, "per_device": 16}).accumulation == 2


def test_packed_rows_hold_as_many_tokens_a_step() -> None:
    space = space_of(LORA, f"{FULL} batch.global=128 max_length=1000", rows="250:900")
    changes = turn(space, packing=True, per_device=8)
    assert changes["batch.global"] == 32
    assert changes["args.packing"] is True
    assert sizes(space, packed=True) == {1, 2, 4, 8, 16}


@pytest.mark.parametrize(
    ("path", "overrides", "terms", "lever", "reason"),
    [
        (LORA, "", {"gpus": 1}, "liger", "adapters"),
        ("lora/dpo_qwen7b.yaml", "", {"gpus": 1}, "packing", "pads"),
        (LORA, FULL, {"packages": {}}, "attention", "not installed"),
        (LORA, f"{FULL} padding_free=true max_length=none", {}, "packing", "padding_free"),
        (LORA, FULL, {}, "deepspeed", "without it"),
        (HAND, "", {"packages": {}}, "liger", "not installed"),
        (HAND, "batch.global=2 batch.per_device=1", {}, "per_device", "2 rows"),
        (TULU, f"{QWEN_7B} zero_stage=2", {}, "deepspeed", "zero_stage"),
        ("demo/sft_open_instruct.yaml", SMALL, {"gpus": 0}, "deepspeed", "CPU"),
        ("demo/sft_open_instruct.yaml", SMALL, {"gpus": 0}, "liger", "GPU"),
        (DEMO, "", {"gpus": 0, "rows": "80:2000"}, "packing", "as many tokens"),
        (DEMO, "max_length=none", {"gpus": 0}, "packing", "no length to fill"),
        # packed, its steps hold what fits into a row
        (OLMO, "", {"rows": "300:2000"}, "per_device", "one row a GPU"),
        (OLMO, "compile_model=false", {"rows": "300:2000"}, "checkpointing", "compile_model"),
        (
            OLMO,
            "packing=false expect.packing=off",
            {"rows": "300:2000"},
            "packing",
            "another global batch",
        ),
    ],
)
def test_a_lever_that_stays_as_it_is_has_a_reason(
    path: str, overrides: str, terms: dict[str, object], lever: str, reason: str
) -> None:
    space = space_of(path, overrides, **terms)
    assert reason in space.fixed[lever]
    assert lever not in {one.name for one in space.levers}


@pytest.mark.parametrize(
    ("packages", "attention"), [({}, "sdpa"), (tuned.PACKAGES, "flash_attention_2")]
)
def test_only_attention_that_is_installed_is_planned_with(
    write: Write, packages: dict[str, str], attention: str
) -> None:
    text = (
        "stage: sft\nbackend: trl\ndeepspeed: none\nattention: [flash_attention_2, sdpa]\n"
        "args: {model_name_or_path: Qwen/Qwen2.5-0.5B, dataset_name: d, output_dir: o}\n"
    )
    space = space_of(write("prefers.yaml", text), gpus=1, packages=packages)
    assert space.planned(space.base).attention == attention
