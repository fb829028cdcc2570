"""The findings of layer `parser` against TRL's own parser and every `__post_init__` behind it.

The verdicts of the pinned pair lie in data/agreement/trl.json, so that launch's are compared with
them also where the packages are not installed. LAUNCH_GOLDEN=write asks the packages and writes
them anew.
"""

import json
import os
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from argument_sets import Arguments, generate
from conftest import NO_PACKAGES
from real_process import ask_process
from verdicts import (
    GOLDEN,
    bits,
    differences,
    digest,
    flags,
    refused_by_launch,
    schema_of,
    words_of,
)

from launcher.upstream import locate
from launcher.upstream.schema import Schema

COUNT = 2500  # for each stage
SEED = 20260407
STAGES = ("sft", "dpo")
VERDICTS = GOLDEN / "trl.json"

# What depends on the machine, by the text of the refusal; everything else must agree.
MACHINE = (
    # an argument names a file; the machine that trains may have it
    "FileNotFoundError",
    # the same for DeepSpeed's, which is then tried as base64
    "Received: ",
    # `ddp_backend` where one process runs
    "Default process group has not been initialized",
    # a package that is not installed
    "distribution was not found",
)

STEPS = (
    None,
    0,
    1,
    2,
    3,
    10,
    500,
    0.1,
    0.2,
    0.3,
    0.05,
    1.5,
    10.0,
    -1,
    "inf",
    "nan",
    "-inf",
    "none",
)
MAPPINGS = ("", "x.json", "{}", "{", "[]", "null", {"a": 1})
FSDP = (
    {"version": 1},
    {"version": "x"},
    {"reshard_after_forward": "full_shard"},
    {"auto_wrap_policy": 5},
)
DEEPSPEED = (
    {"zero_optimization": {"stage": 3}},
    {"zero_optimization": None},
    {"zero_optimization": 3},
    {"zero_optimization": {"stage": "3", "offload_param": "cpu"}},
    {"fp16": {"enabled": "auto"}},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 2, "offload_param": {"device": ["cpu"]}}},
    {"zero_optimization": {"stage": 1, "offload_param": {"device": ["cpu"]}}},
    {"zero_optimization": {}, "optimizer": "adam"},
    {"zero_optimization": {}, "scheduler": {}},
    {"zero_optimization": {}, "optimizer": {"params": 5}},
    {"zero_optimization": {}, "fp16": True},
    {"zero_optimization": {}, "optimizer": {"params": {"lr": "auto"}}, "train_batch_size": "auto"},
    {"zero_optimization": {}, "checkpoint": None},
    {"zero_optimization": {}, "checkpoint": {}},
    {"zero_optimization": {}, "checkpoint": 5},
    {"zero_optimization": {}, "gradient_clipping": "auto"},
    "eyJ6ZXJvX29wdGltaXphdGlvbiI6IHsic3RhZ2UiOiAzfX0=",
    "eyJhIjogMX0=",
)
ACCELERATOR = (
    {"split_batches": True},
    {"split_batches": True, "x": 1},
    {"use_configured_state": True},
)
# The mini-languages of these are the trainer's: only a rehearsal refuses what is wrong in them.
# TRL's own `deepspeed` launch refuses itself, whatever it holds.
TRAINERS = {"accelerator_config", "deepspeed", "fsdp", "fsdp_config"}

# Arguments that decide together, each group reaching every branch behind it.
GROUPS: tuple[dict[str, tuple[Any, ...]], ...] = (
    {
        "logging_strategy": ("steps", "no", "epoch", None),
        "logging_steps": STEPS,
        "eval_strategy": ("steps", "no", "epoch"),
        "eval_steps": STEPS,
        "save_strategy": ("steps", "no", "epoch", "best"),
        "save_steps": STEPS,
        "load_best_model_at_end": (True, True, False, None),
        "metric_for_best_model": (None, "loss", ""),
    },
    {
        "fp16": (True, False, None),
        "bf16": (True, False, None),
        "use_cpu": (True, False, None),
        "fp16_full_eval": (True, False, None),
        "bf16_full_eval": (True, False, None),
        "tf32": (True, False, None),
        "torch_compile": (True, False),
        "torch_compile_mode": (None, "default", "x"),
    },
    {
        "lr_scheduler_type": ("reduce_lr_on_plateau", "greedy", "linear", "constant"),
        "eval_strategy": ("steps", "no", "epoch", None),
        "warmup_steps": (0, 10, 0.1, -1, -0.5, "nan"),
        "lr_scheduler_kwargs": (None, {"min_lr": "0.1"}, "{", "x", {"a": {"b": "²"}}),
    },
    {
        "dataloader_num_workers": (None, 0, 1, -1, "0"),
        "dataloader_prefetch_factor": (None, 0, 2, "none", -1),
        "torch_empty_cache_steps": (None, 0, 1, -5, "none", 10),
        "ddp_timeout": (None, 0, -1, 1800),
        "ddp_backend": (None, None, None, "nccl", "gloo"),
    },
    {
        "fsdp": (
            True,
            [],
            "",
            " ",
            "full_shard",
            "FULL_SHARD",
            "shard_grad_op auto_wrap",
            "offload",
            "hybrid_shard",
            "no_shard",
            "full_shard x",
            "false",
            None,
        ),
        "fsdp_config": (None, None, *FSDP, *MAPPINGS),
    },
    {
        "deepspeed": (*DEEPSPEED, *MAPPINGS),
        "save_on_each_node": (True, False, None),
        "accelerator_config": (None, None, *ACCELERATOR, *MAPPINGS),
        "parallelism_config": (None, None, None, "none", "x", 2, {"tp_size": 2}),
    },
    {
        "accelerator_config": (*ACCELERATOR, *MAPPINGS),
        "dataset_kwargs": MAPPINGS,
        "model_init_kwargs": MAPPINGS,
        "gradient_checkpointing_kwargs": MAPPINGS,
        "liger_kernel_config": (None, "", "none", {"rope": True}),
    },
    {
        "load_in_8bit": (True, False),
        "load_in_4bit": (True, False, None),
        "use_peft": (True, False),
        "lora_target_modules": (None, ["q_proj"], ["q_proj", "v_proj"]),
        "pad_to_multiple_of": (None, 8, "auto", "none", "x", "8.0", " 8 ", ""),
        "datasets": (None, ["a"], ["a", "b"]),
        "test_split_size": (None, 0.1, 5, "none"),
    },
    {
        "loss_type": (["sigmoid"], ["sigmoid", "sft"], "ipo", None, ["x"]),
        "loss_weights": (None, [1.0], [1, 0.5], [0.1, 0.2, 0.3]),
        "packing_strategy": (None, "bfd", "x"),
        "max_length": (None, "none", 0, 512),
        "debug": (None, ["underflow_overflow"], ["x"]),
        "report_to": (None, "none", "all", "x"),
    },
)


@cache
def sets_of(stage: str) -> tuple[Arguments, ...]:
    """Generated sets, three of four with arguments that decide together on top."""
    schema = schema_of("trl", stage)
    chance = random.Random(f"trl {stage} {SEED}")
    sets = []
    for index, arguments in enumerate(generate(schema, COUNT, SEED)):
        match index % 4:
            case 0:
                sets.append(arguments)
            case 1:
                sets.append({**arguments, **draw_group(schema, chance)})
            case _:
                sets.append(draw_group(schema, chance))
    return tuple(sets)


def draw_group(schema: Schema, chance: random.Random) -> Arguments:
    """Values for some arguments of one group, two at least."""
    group = chance.choice(GROUPS)
    names = sorted(group.keys() & schema.fields.keys())
    count = chance.randint(min(2, len(names)), len(names))
    return {name: chance.choice(group[name]) for name in chance.sample(names, count)}


@cache
def words_by_stage() -> dict[str, list[list[str]]]:
    by_stage = {}
    for stage in STAGES:
        schema = schema_of("trl", stage)
        by_stage[stage] = [words_of(schema, arguments) for arguments in sets_of(stage)]
    return by_stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder to start in: no argument names a file that is there."""
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(scope="module")
def launch_refusals(folder: Path) -> dict[str, list[list[str]]]:
    """What launch says that upstream would refuse, for each set."""
    by_stage = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for stage in STAGES:
            by_stage[stage] = refused_by_launch("trl", stage, sets_of(stage))
    return by_stage


OUTSIDE = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "LOCAL_", "WORLD_", "RANK", "MASTER_", "PMI_")
"""Variables that decide what TRL's parser does."""


@pytest.fixture(scope="module")
def trl_refusals(folder: Path) -> dict[str, list[str | None]]:
    """Why the real packages refuse each set, None where they take it; skips without them."""
    installed = locate.locate("trl")
    if installed.root is None or not installed.pinned:
        pytest.skip(f"{NO_PACKAGES}: {installed.pin} is not installed")
    environ = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    for name, value in os.environ.items():
        if not name.startswith(OUTSIDE):
            environ.setdefault(name, value)
    requests = []
    for stage in STAGES:
        for words in words_by_stage()[stage]:
            requests.append({"stage": stage, "words": words})
    answers = ask_process("real_trl_parser.py", requests=requests, folder=folder, environ=environ)
    return {"sft": answers[:COUNT], "dpo": answers[COUNT:]}


def is_of_machine(refusal: str | None) -> bool:
    return refusal is not None and any(text in refusal for text in MACHINE)


@dataclass(frozen=True)
class Verdicts:
    """Which sets of a stage TRL refuses, and which of those for the sake of the machine."""

    refused: list[bool]
    by_machine: list[bool]


def kept_verdicts(stage: str) -> Verdicts:
    kept = json.loads(VERDICTS.read_text())
    return Verdicts(flags(kept["refused"][stage], COUNT), flags(kept["by_machine"][stage], COUNT))


def write_verdicts(by_stage: dict[str, Verdicts]) -> None:
    content = {
        "pair": locate.locate("trl").pin,
        "seed": SEED,
        "count": COUNT,
        "words": digest(words_by_stage()),
        "refused": {stage: bits(by_stage[stage].refused) for stage in STAGES},
        "by_machine": {stage: bits(by_stage[stage].by_machine) for stage in STAGES},
    }
    VERDICTS.write_text(json.dumps(content, indent=1) + "\n")


def test_the_kept_verdicts_are_those_of_the_packages(
    trl_refusals: dict[str, list[str | None]],
) -> None:
    by_stage = {}
    for stage, refusals in trl_refusals.items():
        is_refused = [refusal is not None for refusal in refusals]
        by_stage[stage] = Verdicts(is_refused, list(map(is_of_machine, refusals)))
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        write_verdicts(by_stage)

    for stage, verdicts in by_stage.items():
        kept = kept_verdicts(stage)
        for index, arguments in enumerate(sets_of(stage)):
            if not verdicts.by_machine[index] and not kept.by_machine[index]:
                assert verdicts.refused[index] == kept.refused[index], arguments


@pytest.mark.parametrize("stage", STAGES)
def test_launch_says_what_the_kept_verdicts_say(
    launch_refusals: dict[str, list[list[str]]], stage: str
) -> None:
    content = json.loads(VERDICTS.read_text())
    assert content["seed"] == SEED
    assert content["count"] == COUNT
    assert content["words"] == digest(words_by_stage()), "other sets are generated: make golden"
    kept = kept_verdicts(stage)
    left_out = []
    for index, arguments in enumerate(sets_of(stage)):
        is_of_trainer = not TRAINERS.isdisjoint(arguments) and not launch_refusals[stage][index]
        left_out.append(kept.by_machine[index] or is_of_trainer)

    different = differences(sets_of(stage), launch_refusals[stage], kept.refused, left_out)

    assert not different, "\n".join(different)


def test_every_code_of_the_parser_layer_comes_up(
    launch_refusals: dict[str, list[list[str]]],
) -> None:
    codes = set()
    for stage in STAGES:
        for refusals in launch_refusals[stage]:
            codes |= {refusal.partition(":")[0] for refusal in refusals}
    assert codes >= set(
        "bad-json bad-value best-model-steps best-model-strategy empty-cache-steps eval-steps "
        "logging-steps loss-weights negative-warmup pad-multiple parallelism-config "
        "prefetch-workers scheduler-needs-eval two-precisions unknown-key whole-steps".split()
    )
