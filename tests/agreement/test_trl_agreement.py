"""The findings of layer `parser` against TRL's own parser and every `__post_init__` behind it.

The verdicts of the pinned pair lie in data/agreement/trl.json, so that ours are compared with them
also where the packages are not installed. LAUNCH_GOLDEN=write asks the packages and writes them anew.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from argument_sets import Arguments, generate
from conftest import NO_PACKAGES, SUPPORT
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

# Nowhere to look for packages: the committed snapshot answers, whatever is installed.
SNAPSHOT = locate.Locator(search=())

# What depends on the machine, by the text of the refusal; everything else must agree.
MACHINE = {
    "FileNotFoundError": "an argument names a file; the machine that trains may have it",
    "Received: ": "the same for DeepSpeed's, which is then tried as base64",
    "Default process group has not been initialized": "`ddp_backend` where one process runs",
    "distribution was not found": "a package that is not installed",
}

STEPS = (
    None, 0, 1, 2, 3, 10, 500, 0.1, 0.2, 0.3, 0.05, 1.5, 10.0, -1, "inf", "nan", "-inf", "none",
)  # fmt: skip
MAPPINGS = ("", "x.json", "{}", "{", "[]", "null", {"a": 1})
FSDP = (
    {"version": 1},
    {"version": "x"},
    {"reshard_after_forward": "full_shard"},
    {"auto_wrap_policy": 5},
)
DEEPSPEED = (
    {"zero_optimization": {"stage": 3}}, {"zero_optimization": None}, {"zero_optimization": 3},
    {"zero_optimization": {"stage": "3", "offload_param": "cpu"}}, {"fp16": {"enabled": "auto"}},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 2, "offload_param": {"device": ["cpu"]}}},
    {"zero_optimization": {"stage": 1, "offload_param": {"device": ["cpu"]}}},
    {"zero_optimization": {}, "optimizer": "adam"}, {"zero_optimization": {}, "scheduler": {}},
    {"zero_optimization": {}, "optimizer": {"params": 5}}, {"zero_optimization": {}, "fp16": True},
    {"zero_optimization": {}, "optimizer": {"params": {"lr": "auto"}}, "train_batch_size": "auto"},
    {"zero_optimization": {}, "checkpoint": None}, {"zero_optimization": {}, "checkpoint": {}},
    {"zero_optimization": {}, "checkpoint": 5}, {"zero_optimization": {}, "gradient_clipping": "auto"},
    "eyJ6ZXJvX29wdGltaXphdGlvbiI6IHsic3RhZ2UiOiAzfX0=", "eyJhIjogMX0=",
)  # fmt: skip
ACCELERATOR = (
    {"split_batches": True},
    {"split_batches": True, "x": 1},
    {"use_configured_state": True},
)
# The mini-languages of these are the trainer's: only a rehearsal refuses what is wrong in them. TRL's own
# `deepspeed` launch refuses itself, whatever it holds.
TRAINERS = {"accelerator_config", "deepspeed", "fsdp", "fsdp_config"}

# Arguments that decide together, each group reaching every branch behind it.
GROUPS: tuple[dict[str, tuple[Any, ...]], ...] = (
    {
        "logging_strategy": ("steps", "no", "epoch", None), "logging_steps": STEPS,
        "eval_strategy": ("steps", "no", "epoch"), "eval_steps": STEPS,
        "save_strategy": ("steps", "no", "epoch", "best"), "save_steps": STEPS,
        "load_best_model_at_end": (True, True, False, None),
        "metric_for_best_model": (None, "loss", ""),
    },
    {
        "fp16": (True, False, None), "bf16": (True, False, None), "use_cpu": (True, False, None),
        "fp16_full_eval": (True, False, None), "bf16_full_eval": (True, False, None),
        "tf32": (True, False, None), "torch_compile": (True, False),
        "torch_compile_mode": (None, "default", "x"),
    },
    {
        "lr_scheduler_type": ("reduce_lr_on_plateau", "greedy", "linear", "constant"),
        "eval_strategy": ("steps", "no", "epoch", None), "warmup_steps": (0, 10, 0.1, -1, -0.5, "nan"),
        "lr_scheduler_kwargs": (None, {"min_lr": "0.1"}, "{", "x", {"a": {"b": "²"}}),
    },
    {
        "dataloader_num_workers": (None, 0, 1, -1, "0"),
        "dataloader_prefetch_factor": (None, 0, 2, "none", -1),
        "torch_empty_cache_steps": (None, 0, 1, -5, "none", 10),
        "ddp_timeout": (None, 0, -1, 1800), "ddp_backend": (None, None, None, "nccl", "gloo"),
    },
    {
        "fsdp": (True, [], "", " ", "full_shard", "FULL_SHARD", "shard_grad_op auto_wrap", "offload",
                 "hybrid_shard", "no_shard", "full_shard x", "false", None),
        "fsdp_config": (None, None, *FSDP, *MAPPINGS),
    },
    {
        "deepspeed": (*DEEPSPEED, *MAPPINGS), "save_on_each_node": (True, False, None),
        "accelerator_config": (None, None, *ACCELERATOR, *MAPPINGS),
        "parallelism_config": (None, None, None, "none", "x", 2, {"tp_size": 2}),
    },
    {
        "accelerator_config": (*ACCELERATOR, *MAPPINGS), "dataset_kwargs": MAPPINGS,
        "model_init_kwargs": MAPPINGS, "gradient_checkpointing_kwargs": MAPPINGS,
        "liger_kernel_config": (None, "", "none", {"rope": True}),
    },
    {
        "load_in_8bit": (True, False), "load_in_4bit": (True, False, None), "use_peft": (True, False),
        "lora_target_modules": (None, ["q_proj"], ["q_proj", "v_proj"]),
        "pad_to_multiple_of": (None, 8, "auto", "none", "x", "8.0", " 8 ", ""),
        "datasets": (None, ["a"], ["a", "b"]), "test_split_size": (None, 0.1, 5, "none"),
    },
    {
        "loss_type": (["sigmoid"], ["sigmoid", "sft"], "ipo", None, ["x"]),
        "loss_weights": (None, [1.0], [1, 0.5], [0.1, 0.2, 0.3]),
        "packing_strategy": (None, "bfd", "x"), "max_length": (None, "none", 0, 512),
        "debug": (None, ["underflow_overflow"], ["x"]), "report_to": (None, "none", "all", "x"),
    },
)  # fmt: skip


@cache
def sets_of(stage_name: str) -> tuple[Arguments, ...]:
    """Generated sets, three of four with arguments that decide together on top."""
    schema = schema_of("trl", stage_name)
    chance = random.Random(f"trl {stage_name} {SEED}")
    sets = []
    for index, arguments in enumerate(generate(schema, COUNT, SEED)):
        if index % 4:
            plain = arguments if index % 4 == 1 else {}
            arguments = {**plain, **_together(schema, chance)}
        sets.append(arguments)
    return tuple(sets)


def _together(schema: Schema, chance: random.Random) -> Arguments:
    group = {k: v for k, v in chance.choice(GROUPS).items() if k in schema.fields}
    names = chance.sample(sorted(group), chance.randint(min(2, len(group)), len(group)))
    return {name: chance.choice(group[name]) for name in names}


@cache
def words_of_all() -> dict[str, list[list[str]]]:
    return {s: [words_of(schema_of("trl", s), one) for one in sets_of(s)] for s in STAGES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder to start in: no argument names a file that is there."""
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, list[list[str]]]:
    """What launch says that upstream would refuse, for each set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {s: refused_by_launch("trl", s, sets_of(s)) for s in STAGES}


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, list[str | None]]:
    """Why the installed pair refuses each set, None where it takes it; skips without the pair."""
    installed = locate.locate("trl")
    if installed.root is None or not installed.pinned:
        pytest.skip(f"{NO_PACKAGES}: {installed.pin} is not installed")
    requests = [{"stage": s, "words": words} for s in STAGES for words in words_of_all()[s]]
    outside = (
        "ACCELERATE_", "FSDP_", "PARALLELISM_", "LOCAL_", "WORLD_", "RANK", "MASTER_", "PMI_",
    )  # fmt: skip
    environ = {k: v for k, v in os.environ.items() if not k.startswith(outside)}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "real_trl_parser.py")],
        input="".join(f"{json.dumps(request)}\n" for request in requests),
        env=environ, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 3:
        pytest.skip(f"{NO_PACKAGES}: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(requests)
    return {s: answers[i * COUNT : (i + 1) * COUNT] for i, s in enumerate(STAGES)}


def by_machine(refusal: str | None) -> bool:
    return refusal is not None and any(text in refusal for text in MACHINE)


def left_out(stage_name: str, ours: list[list[str]], machine: Iterable[bool]) -> list[bool]:
    """Where a refusal is the machine's, or the trainer's alone."""
    return [
        by or (not said and not TRAINERS.isdisjoint(arguments))
        for arguments, said, by in zip(sets_of(stage_name), ours, machine, strict=True)
    ]


def verdicts(theirs: dict[str, list[str | None]]) -> dict[str, Any]:
    return {
        "pair": locate.locate("trl").pin,
        "seed": SEED,
        "count": COUNT,
        "words": digest(words_of_all()),
        "refused": {s: bits([a is not None for a in theirs[s]]) for s in STAGES},
        "by_machine": {s: bits([by_machine(a) for a in theirs[s]]) for s in STAGES},
    }


def test_the_golden_verdicts_are_those_of_the_packages(theirs: dict[str, list[str | None]]) -> None:
    made = verdicts(theirs)
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        VERDICTS.write_text(json.dumps(made, indent=1) + "\n")
    golden = json.loads(VERDICTS.read_text())
    for stage_name in STAGES:
        either = [
            here or there
            for here, there in zip(
                flags(made["by_machine"][stage_name], COUNT), flags(golden["by_machine"][stage_name], COUNT),
                strict=True,
            )
        ]  # fmt: skip
        differ = [
            sets_of(stage_name)[index]
            for index, (here, there, out) in enumerate(
                zip(
                    flags(made["refused"][stage_name], COUNT),
                    flags(golden["refused"][stage_name], COUNT),
                    either, strict=True,
                )
            )
            if here != there and not out
        ]  # fmt: skip
        assert differ == []


@pytest.mark.parametrize("stage_name", STAGES)
def test_launch_says_what_the_golden_verdicts_say(
    ours: dict[str, list[list[str]]], stage_name: str
) -> None:
    golden = json.loads(VERDICTS.read_text())
    assert (golden["seed"], golden["count"]) == (SEED, COUNT)
    assert golden["words"] == digest(words_of_all()), (
        "other sets are generated: LAUNCH_GOLDEN=write"
    )
    refused = flags(golden["refused"][stage_name], COUNT)
    out = left_out(stage_name, ours[stage_name], flags(golden["by_machine"][stage_name], COUNT))
    found = differences(sets_of(stage_name), ours[stage_name], refused, out)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("stage_name", STAGES)
def test_the_generated_sets_are_a_fair_mixture(
    ours: dict[str, list[list[str]]], stage_name: str
) -> None:
    refused = sum(bool(found) for found in ours[stage_name])
    assert 0.3 < refused / COUNT < 0.8
    golden = json.loads(VERDICTS.read_text())
    assert sum(flags(golden["by_machine"][stage_name], COUNT)) < 0.15 * COUNT


def test_every_code_of_the_parser_layer_comes_up(ours: dict[str, list[list[str]]]) -> None:
    said = {text.partition(":")[0] for s in STAGES for found in ours[s] for text in found}
    assert said >= {
        "bad-json", "bad-value", "best-model-steps", "best-model-strategy",
        "empty-cache-steps", "eval-steps",
        "logging-steps", "loss-weights", "negative-warmup", "pad-multiple", "parallelism-config",
        "prefetch-workers", "scheduler-needs-eval", "two-precisions", "unknown-key", "whole-steps",
    }  # fmt: skip
