"""What can be turned for each backend and stage: the keys, the limits, and why something stays."""

import pytest
import tuned
from conftest import Write
from fake_world import needs_trl

from launcher.config import load
from launcher.errors import errors
from launcher.stage import stage
from launcher.workflows.tune.space import Space

HAND = "bench/hand_recipe.yaml"
pytestmark = needs_trl
TULU = "tulu/dpo_qwen7b.yaml"
LORA = "lora/sft_qwen7b.yaml"
OLMO = "olmo_core/dpo_qwen3_0_6b.yaml"
FULL = (
    "use_peft=false",
    "model_name_or_path=Qwen/Qwen2.5-0.5B",
    "attn_implementation=sdpa",
    "expect.liger=any",
)


def names(world: Space) -> set[str]:
    return {one.name for one in world.levers}


def values(world: Space, name: str) -> tuple[object, ...]:
    return next(one.values for one in world.levers if one.name == name)


def turned(world: Space, **settings: object) -> dict[str, object]:
    return world.changes({**world.base, **settings})  # type: ignore[dict-item]


def test_the_file_as_written_changes_nothing() -> None:
    world = tuned.outlook(HAND)
    assert turned(world) == {}
    assert world.base == {
        "packing": False, "liger": True, "per_device": 16, "checkpointing": True,
        "deepspeed": "zero2_fp32_comm",
    }  # fmt: skip
    assert "installed" in world.fixed["attention"]
    # what the file expects follows what is turned
    world = tuned.outlook(HAND)
    assert turned(world, packing=True) == {"args.packing": True, "expect.packing": "isolated"}
    assert turned(world, liger=False) == {"args.use_liger_kernel": False, "expect.liger": "off"}
    # what is turned on is proved even where the file does not care
    world = tuned.outlook(HAND, "expect.packing=any", "expect.liger=any")
    assert turned(world, packing=True)["expect.packing"] == "isolated"
    assert turned(world, liger=False) == {"args.use_liger_kernel": False}
    world = tuned.outlook(HAND, "expect.liger=any", "use_liger_kernel=false")
    assert turned(world, liger=True)["expect.liger"] == "engaged"
    # one row is packed with none
    grid = list(tuned.outlook("tulu/sft_qwen7b.yaml", rows="64:900").settings())
    sizes = {one["per_device"] for one in grid if one["packing"]}
    assert 1 not in sizes and 2 in sizes
    assert 1 in {one["per_device"] for one in grid if not one["packing"]}


@pytest.mark.parametrize(
    ("path", "overrides", "gpus"),
    [
        (HAND, (), 2),
        (TULU, ("model_name_or_path=Qwen/Qwen2.5-7B",), 8),
        (LORA, ("expect.liger=any",), 1),
        (LORA, FULL, 2),
        ("demo/sft.yaml", ("max_length=256",), 0),
    ],
)
def test_every_value_is_one_that_upstream_takes(
    path: str, overrides: tuple[str, ...], gpus: int
) -> None:
    world = tuned.outlook(path, *overrides, gpus=gpus, rows="80:200" if gpus == 0 else "400:1000")
    made = world.plan
    for lever in world.levers:
        for value in lever.values:
            settings = {**world.base, lever.name: value}
            total = world.total_rows(settings)
            if lever.name != "per_device":
                settings["per_device"] = min(int(settings["per_device"]), total // made.devices)
            if total % (int(settings["per_device"]) * made.devices):
                continue
            given = (*overrides, *world.overrides(settings))
            loaded = load.load(tuned.REPOSITORY / "configs" / path, given)
            judged = stage.judge_stage_file(loaded)
            assert not errors(judged.findings), (lever.name, value, judged.findings)
            planned = world.planned(settings)
            assert planned.global_batch == total
            if settings.get("packing") == world.base.get("packing"):
                assert planned.global_batch == made.global_batch


def test_the_global_batch_is_kept_in_the_files_own_words(write: Write) -> None:
    text = (
        "stage: sft\nbackend: trl\nargs: {model_name_or_path: m, dataset_name: d, output_dir: o, "
        "per_device_train_batch_size: 4, gradient_accumulation_steps: 8, attn_implementation: sdpa}\n"
    )
    world = tuned.outlook(write("plain.yaml", text), "model_name_or_path=Qwen/Qwen2.5-0.5B")
    assert turned(world, per_device=16) == {
        "args.per_device_train_batch_size": 16, "args.gradient_accumulation_steps": 2,
    }  # fmt: skip
    half = text.replace("stage: sft", "stage: sft\nbatch: {global: 64}").replace(
        "gradient_accumulation_steps: 8, ", ""
    )
    world = tuned.outlook(write("half.yaml", half), "model_name_or_path=Qwen/Qwen2.5-0.5B")
    assert turned(world, per_device=16) == {"args.per_device_train_batch_size": 16}
    assert world.planned({**world.base, "per_device": 16}).accumulation == 2


def test_full_rows_hold_as_many_tokens_a_step_or_are_no_choice() -> None:
    world = tuned.outlook(LORA, *FULL, "batch.global=128", "max_length=1000", rows="250:900")
    changes = turned(world, packing=True, per_device=8)
    assert changes["batch.global"] == 32
    assert changes["args.packing"] is True
    settings = [one for one in world.settings() if one["packing"]]
    assert {int(one["per_device"]) for one in settings} == {1, 2, 4, 8, 16}
    world = tuned.outlook("demo/sft.yaml", gpus=0, rows="80:2000")
    assert "as many tokens" in world.fixed["packing"]
    short = tuned.outlook("demo/sft.yaml", "max_length=256", gpus=0, rows="80:200")
    assert values(short, "packing") == (False, True)
    free = tuned.outlook("demo/sft.yaml", "max_length=none", gpus=0, rows="80:200")
    assert "no length to fill" in free.fixed["packing"]


@pytest.mark.parametrize(
    ("path", "overrides", "terms", "lever", "words"),
    [
        (LORA, (), {"gpus": 1}, "liger", "adapters"),
        ("lora/dpo_qwen7b.yaml", (), {"gpus": 1}, "packing", "pads"),
        (LORA, FULL, {"packages": {}}, "attention", "not installed"),
        (LORA, (*FULL, "padding_free=true", "max_length=none"), {}, "packing", "padding_free"),
        (LORA, FULL, {}, "deepspeed", "without it"),
        (HAND, (), {"packages": {}}, "liger", "not installed"),
        (HAND, ("batch.global=2", "batch.per_device=1"), {}, "per_device", "2 rows"),
        (
            TULU,
            ("model_name_or_path=Qwen/Qwen2.5-7B", "zero_stage=2"),
            {},
            "deepspeed",
            "zero_stage",
        ),
        ("demo/sft_open_instruct.yaml", (), {"gpus": 0}, "deepspeed", "CPU"),
        ("demo/sft_open_instruct.yaml", (), {"gpus": 0}, "liger", "GPU"),
        # packed, its steps hold what fits into a row
        (OLMO, (), {"rows": "300:2000"}, "per_device", "one row a GPU"),
        (OLMO, ("compile_model=false",), {"rows": "300:2000"}, "checkpointing", "compile_model"),
        (
            OLMO,
            ("packing=false", "expect.packing=off"),
            {"rows": "300:2000"},
            "packing",
            "another global batch",
        ),
    ],
)
def test_what_stays_as_it_is_has_a_reason(
    path: str, overrides: tuple[str, ...], terms: dict[str, object], lever: str, words: str
) -> None:
    if "demo" in path:
        overrides = (*overrides, "model_name_or_path=Qwen/Qwen2.5-0.5B")
    world = tuned.outlook(path, *overrides, **terms)  # type: ignore[arg-type]
    assert words in world.fixed[lever]
    assert lever not in names(world)


def test_only_attention_that_can_be_had_is_planned_with(write: Write) -> None:
    text = (
        "stage: sft\nbackend: trl\ndeepspeed: none\nattention: [flash_attention_2, sdpa]\nargs: "
        "{model_name_or_path: Qwen/Qwen2.5-0.5B, dataset_name: d, output_dir: o}\n"
    )
    path = write("prefers.yaml", text)
    for packages, chosen in (({}, "sdpa"), (tuned.PACKAGES, "flash_attention_2")):
        space = tuned.outlook(path, gpus=1, packages=packages)
        assert space.planned(space.base).attention == chosen
