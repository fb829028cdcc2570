"""TRL on a machine: the rules that know devices, DeepSpeed, packages and checkpoints.

Where the training packages are, their own code is asked the same questions about DeepSpeed files.
"""

import copy
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES, PATIENCE_S, SUPPORT, Write
from rule_findings import THIS_MACHINE, codes_of_run, judge_run, summarise, summarise_run, values_of

from launcher.config.keys import DEEPSPEED
from launcher.machine.python import find_trainer
from launcher.rules import deepspeed
from launcher.rules.context import Context, Split
from launcher.stage.options import deepspeed_file

SCRIPTS = ("trl-sft", "trl-dpo")
AUTO = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
SHIPPED = {name: json.loads(deepspeed_file(name).read_text("utf-8")) for name in DEEPSPEED}
ON_CPU = {"gpus": 0, "machine": THIS_MACHINE, "split": Split(processes=1, devices=1)}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # folders of these tests are named relative to their own
    monkeypatch.chdir(tmp_path)


def judge_sft(args: dict[str, Any], **known: Any) -> list[str]:
    return summarise_run("trl-sft", args, **known)


def judge_dpo(args: dict[str, Any], **known: Any) -> list[str]:
    return summarise_run("trl-dpo", args, **known)


def without(file: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in file.items() if name not in names}


@pytest.mark.parametrize("script", SCRIPTS)
def test_shipped_deepspeed_files_fit_any_arguments(script: str) -> None:
    arguments = ({}, {"bf16": False}, {"fp16": True}, {"max_grad_norm": 0.5})
    for file in (None, *SHIPPED.values()):
        for args in arguments:
            known = {"deepspeed": file, "packages": {}, "per_device": 4, "accumulation": 4}
            assert summarise_run(script, args, **known, machine=THIS_MACHINE) == []
            # what a start fills in for `mixed_precision:`, which TRL's own arguments decide
            known["mixed_precision"] = "bf16"
            for gpus in (1, 8):
                assert summarise_run(script, args, **known, gpus=gpus, machine=THIS_MACHINE) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_works_is_left_alone(script: str) -> None:
    # each of these was run
    quantised = {"load_in_4bit": True, "use_peft": True}
    packages = {"bitsandbytes": "0.50.2"}
    assert summarise_run(script, {**quantised, "bf16": False}, **ON_CPU, packages=packages) == []
    assert (
        summarise_run(script, quantised, gpus=8, deepspeed=SHIPPED["zero3"], packages=packages)
        == []
    )
    paged = {"optim": "paged_adamw_32bit", "bf16": False}
    assert summarise_run(script, paged, **ON_CPU, packages=packages) == []
    assert summarise_run(script, {"ddp_backend": "gloo"}, gpus=1, deepspeed=AUTO) == []
    assert summarise_run(script, {"ddp_backend": "nccl"}, gpus=8) == []
    assert summarise_run(script, {"fsdp": "full_shard"}, gpus=8) == []
    assert summarise_run(script, {"attn_implementation": "flash_attention_2"}, gpus=8) == []


NO_BF16 = {"bf16": False}
CPU = [
    ({}, "bf16-on-cpu", "bf16"),
    ({"bf16": True}, "bf16-on-cpu", "bf16"),
    ({**NO_BF16, "bf16_full_eval": True}, "bf16-on-cpu", "bf16_full_eval"),
    (
        {**NO_BF16, "attn_implementation": "flash_attention_2"},
        "attention-missing",
        "attn_implementation",
    ),
    (
        {**NO_BF16, "attn_implementation": "flex_attention"},
        "attention-missing",
        "attn_implementation",
    ),
    (
        {**NO_BF16, "model_init_kwargs": {"attn_implementation": "flash_attention_2"}},
        "attention-missing",
        "model_init_kwargs",
    ),
]
PRECISIONS = [
    ({}, "no", True),
    ({}, "fp16", True),
    ({}, "bf16", False),
    ({}, None, False),
    (NO_BF16, "bf16", False),
    (NO_BF16, "no", False),
    ({"fp16": True}, "bf16", True),
    ({"fp16": True}, "fp16", False),
]


def test_the_cpu_and_its_precision() -> None:
    for args, code, key in CPU:
        assert judge_sft(args, **ON_CPU, packages={}) == [f"{code} error {key}"]
        # where there are GPUs the same is fine
        assert (
            judge_sft(args, gpus=8, packages={"flash-attn": "2.8.3"}, mixed_precision="bf16") == []
        )
    (by_default,) = judge_run("trl-sft", {}, **ON_CPU)
    assert "default" in by_default.message
    assert "use_cpu: true" in str(by_default.help)
    (asked_for,) = judge_run("trl-sft", {"bf16": True}, **ON_CPU)
    assert "default" not in asked_for.message
    # ways to train on the cpu
    for args in ({"use_cpu": True, "bf16": True, "bf16_full_eval": True}, NO_BF16):
        assert judge_sft(args, **ON_CPU, packages={}) == []
    assert judge_dpo({"use_cpu": True}, gpus=1) == ["cpu-beside-gpus error use_cpu"]
    # `mixed_precision:` is for accelerate, and is not read
    for args, option, speaks in PRECISIONS:
        expected = ["mixed-precision-unread warning mixed_precision"] if speaks else []
        assert judge_sft(args, mixed_precision=option) == expected
        # a start fills in a default of its own
        assert judge_sft(args, mixed_precision=option, gpus=8) == []


OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
SPLIT = {"gpus": 8, "per_device": 4, "accumulation": 2}
# a file, what else is known, and the code that is said of it
FILES = [
    ({"zero_optimization": {"stage": 2}}, {}, "deepspeed-no-batch"),
    ({**AUTO, "gradient_clipping": 0.5}, {}, "deepspeed-mismatch"),
    ({**AUTO, "train_micro_batch_size_per_gpu": 2}, {"per_device": 4}, "deepspeed-mismatch"),
    ({**AUTO, "gradient_accumulation_steps": 2}, {"accumulation": 4}, "deepspeed-mismatch"),
    ({**AUTO, "train_batch_size": 128}, SPLIT, "deepspeed-mismatch"),
    ({**AUTO, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, {}, "deepspeed-mismatch"),
    ({**AUTO, "scheduler": {"params": {"warmup_num_steps": 5}}}, {}, "deepspeed-mismatch"),
    (without(AUTO, "gradient_accumulation_steps"), {"accumulation": 4}, "deepspeed-mismatch"),
    ({**AUTO, "fp16": {"enabled": True}}, {}, "deepspeed-mismatch"),
    ({**AUTO, "bf16": {"enabled": False}}, {}, "deepspeed-mismatch"),
    ({**AUTO, "zero_optimization": {"stage": 3}}, {}, "zero3-unsaved"),
]
GOOD = [
    (AUTO, {}, {"gpus": 8, "per_device": 4, "accumulation": 4}),
    (without(AUTO, "gradient_accumulation_steps"), {}, {"accumulation": 1}),
    (without(AUTO, "train_micro_batch_size_per_gpu"), {}, {}),
    ({**AUTO, "bf16": {"enabled": False}}, NO_BF16, {}),
    ({**AUTO, "fp16": {"enabled": True}}, {"fp16": True}, {}),
    ({**AUTO, "optimizer": OPTIMIZER}, {}, {}),
    ({**AUTO, "zero_optimization": {"stage": 3}}, {"use_peft": True}, {}),
    ({**AUTO, "train_batch_size": 64}, {}, SPLIT),
]


def test_deepspeed_files() -> None:
    for file, known, code in FILES:
        severity = "warning" if code == "zero3-unsaved" else "error"
        assert judge_sft({}, deepspeed=file, **known) == [f"{code} {severity} deepspeed"]
        # on the CPU no file is read
        assert judge_sft(NO_BF16, deepspeed=file, **{**known, "gpus": 0}) == []
    for file, args, known in GOOD:
        assert judge_sft(args, deepspeed=file, **known) == []


def test_deepspeed_files_and_arguments() -> None:
    file = {**AUTO, "gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 2}
    (finding,) = judge_run("trl-sft", {}, deepspeed=file, per_device=8)
    assert "gradient_clipping: 0.5" in finding.message
    assert "per_device_train_batch_size: 8" in finding.message
    # clipping that a file leaves out
    file = without(AUTO, "gradient_clipping")
    expected = "clipping-unread warning max_grad_norm"
    assert judge_sft({"max_grad_norm": 0.5}, deepspeed=file) == [expected]
    assert judge_sft({"max_grad_norm": 0.0}, deepspeed=file) == []


def ask_transformers(lines: str) -> str:
    """What the packages themselves answer, in a process of their own; skips where they are not."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "real_trl_machine.py")],
        input=lines,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode == 1 and "Traceback" not in done.stderr:
        pytest.skip(f"{NO_PACKAGES}: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def draw_case(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """A DeepSpeed config with few faults, arguments, passes and devices."""
    file = copy.deepcopy(AUTO)
    changes = [
        ("train_batch_size", [8, 64]),
        ("train_micro_batch_size_per_gpu", [4, 8]),
        ("gradient_accumulation_steps", [1, 2]),
        ("gradient_clipping", [1.0, 0.5]),
        ("bf16", [{}, {"enabled": "auto"}, {"enabled": True}, {"enabled": False}]),
        ("fp16", [{}, {"enabled": "auto"}, {"enabled": True}, {"enabled": False}]),
        (
            "optimizer",
            [
                {"type": "AdamW"},
                *(
                    {"params": params}
                    for params in (
                        {"lr": 1e-4},
                        {"lr": "auto"},
                        {"betas": [0.9, 0.999]},
                        {"eps": 1e-8},
                        {"weight_decay": 0.1},
                    )
                ),
            ],
        ),
        ("scheduler", [{"params": {"warmup_max_lr": 1e-4}}, {"params": {"warmup_min_lr": "auto"}}]),
    ]
    for name, values in rng.sample(changes, rng.choice([0, 1, 1, 2])):
        file[name] = copy.deepcopy(rng.choice(values))
    dropped = ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping", "bf16")
    for name in rng.sample(dropped, rng.choice([0, 0, 1])):
        file.pop(name, None)
    args = rng.choice([{}, {}, {"bf16": False}, {"fp16": True}, {"bf16": True}])
    args = {**args, **rng.choice([{}, {"max_grad_norm": 0.5}, {"learning_rate": 1e-4}])}
    return file, args, rng.choice([1, 2]), rng.choice([1, 8])


def question(
    file: dict[str, Any], args: Mapping[str, Any], passes: int, gpus: int
) -> dict[str, Any]:
    """A case as the packages are asked about it: every argument that they look at."""
    values = values_of("trl-sft", dict(args))
    names = (
        "max_grad_norm",
        "learning_rate",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "weight_decay",
        "fp16_full_eval",
        "bf16_full_eval",
        "save_on_each_node",
    )
    fp16 = bool(values["fp16"])
    bf16 = not fp16 if values["bf16"] is None else values["bf16"]
    arguments = {
        **{name: values[name] for name in names},
        "fp16": fp16,
        "bf16": bf16,
        "world_size": gpus,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": passes,
    }
    running = "no"
    if fp16:
        running = "fp16"
    elif bf16:
        running = "bf16"
    return {"file": file, "arguments": arguments, "running": running}


def refused(file: dict[str, Any], args: Mapping[str, Any], passes: int, gpus: int) -> bool:
    values = values_of("trl-sft", dict(args))
    context = Context(values=values, deepspeed=file, gpus=gpus, per_device=4, accumulation=passes)
    return bool(list(deepspeed.mismatches(context)))


def test_the_rules_agree_with_transformers() -> None:
    rng = random.Random(7)
    cases = [draw_case(rng) for _ in range(1500)]
    questions = (json.dumps(question(*case)) for case in cases)
    answers = [json.loads(line) for line in ask_transformers("\n".join(questions)).splitlines()]
    assert len(answers) == len(cases)
    for case, answer in zip(cases, answers, strict=True):
        assert refused(*case) == answer, case
    assert 0.2 < sum(answers) / len(answers) < 0.8


OPTIMIZERS = {
    "adamw_torch": None,
    "sgd": None,
    "adafactor": None,
    "rmsprop": None,
    "paged_adamw_32bit": "bitsandbytes",
    "lion_8bit": "bitsandbytes",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "lomo": "lomo-optim",
    "adalomo": "lomo-optim",
    "grokadamw": "grokadamw",
    "schedule_free_adamw": "schedulefree",
    "stable_adamw": "torch-optimi",
    "adamw_anyprecision": "torchdistx",
}


def test_packages_that_are_not_installed() -> None:
    for optim, package in OPTIMIZERS.items():
        expected = [] if package is None else ["optim-missing error optim"]
        assert judge_sft({"optim": optim}, packages={}) == expected
        assert judge_sft({"optim": optim}) == []
        if package is not None:
            assert judge_sft({"optim": optim}, packages={package: "1"}) == []
    for optim, package in (
        ("galore_adamw", "galore-torch"),
        ("apollo_adamw_layerwise", "apollo-torch"),
    ):
        targets = {"optim": optim, "optim_target_modules": "all-linear"}
        assert judge_sft(targets, packages={}) == ["optim-missing error optim"]
        assert judge_sft(targets, packages={package: "1"}) == []
        assert judge_sft({"optim": optim}, packages={package: "1"}) == ["optim-targets error optim"]
    # DeepSpeed's own is taken in its place
    assert summarise_run(
        "trl-sft",
        {"optim": "adamw_torch_4bit"},
        packages={},
        deepspeed={**AUTO, "optimizer": OPTIMIZER},
    ) == ["optim-unread warning optim"]
    quantised = {"load_in_4bit": True, "use_peft": True}
    assert judge_sft(quantised, packages={}) == ["quantiser-missing error load_in_4bit"]
    for report, missing in (
        ("trackio", True),
        ("comet_ml", True),
        ("dagshub", True),
        ("flyte", True),
        ("none", False),
        (["none"], False),
        (["all"], False),
    ):
        expected = ["report-missing error report_to"] if missing else []
        assert judge_dpo({"report_to": report}, packages={}) == expected
        assert judge_dpo({"report_to": report}) == []
    for name in ("tensorboard", "tensorboardx"):
        assert judge_sft({"report_to": "tensorboard"}, packages={name: "2"}) == []


def test_trackers_that_do_not_exist() -> None:
    for report in ("nosuch", ["nosuch"]):
        assert judge_dpo({"report_to": report}) == ["report-unknown error report_to"]
    assert judge_sft({"report_to": "kubeflow"}) == ["report-missing warning report_to"]
    url = {"HOME": "/nonexistent", "KUBEFLOW_TRAINER_SERVER_URL": "https://x"}
    assert judge_sft({"report_to": "kubeflow"}, environ=url) == []


REAL = """
import json, sys
from types import SimpleNamespace
from transformers import Trainer, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.training_args import OptimizerNames
absent = {}
for name in OptimizerNames:
    args = TrainingArguments(optim=name, use_cpu=True, report_to="none")
    try:
        Trainer.get_optimizer_cls_and_kwargs(args, None)
    except Exception as error:
        absent[name.value] = any(word in str(error).lower() for word in ("install", "import"))
    else:
        absent[name.value] = False
trackers = {}
for name, kind in INTEGRATION_TO_CALLBACK.items():
    try:
        kind()
    except Exception as error:
        trackers[name] = "requires" in str(error)
    else:
        trackers[name] = False
print(json.dumps([absent, trackers]))
"""


def test_the_rules_agree_with_transformers_about_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, timeout=PATIENCE_S
    )
    if "No module named 'transformers'" in done.stderr:
        pytest.skip(f"{NO_PACKAGES}: transformers")
    optimizers, trackers = json.loads(done.stdout.splitlines()[-1])
    assert len(optimizers) > 30 and len(trackers) > 10
    packages = find_trainer(Path(sys.executable), None).packages
    for optim, absent in optimizers.items():
        codes = codes_of_run("trl-sft", {"optim": optim}, packages=packages)
        assert ("optim-missing" in codes) == absent, optim
    environ = {"HOME": "/nonexistent", "WANDB_MODE": "offline"}
    for name, absent in trackers.items():
        codes = codes_of_run("trl-sft", {"report_to": name}, packages=packages, environ=environ)
        assert ("report-missing" in codes) == absent, name


def test_services_need_their_keys(tmp_path: Path) -> None:
    script = "trl-sft"
    args = {"report_to": ["wandb"]}
    home = {"HOME": str(tmp_path)}
    expected = "no-wandb-key warning report_to"
    assert summarise_run(script, args, environ=home) == [expected]
    assert summarise_run(script, args, environ=home, machine=THIS_MACHINE) == [
        "no-wandb-key error report_to"
    ]
    assert summarise_run(script, args, environ={**home, "WANDB_API_KEY": "k"}) == []
    assert summarise_run(script, args, environ={**home, "WANDB_MODE": "offline"}) == []
    assert summarise_run(script, {}, environ=home) == []
    every = {"report_to": "all"}
    assert summarise_run(script, every, environ=home, packages={"wandb": "0.31"}) == [expected]
    assert summarise_run(script, every, environ=home, packages={}) == []
    # pushing needs a token
    # more of it: tests/rules/test_stage_rules.py
    expected = "no-hub-token warning push_to_hub"
    assert judge_sft({"push_to_hub": True}) == [expected]
    assert judge_sft({"push_to_hub": True, "hub_token": "t"}) == []


STATE = {"global_step": 20, "epoch": 0.5, "train_batch_size": 4, "max_steps": 40}


def checkpoint(write: Write, name: str = "out/checkpoint-20", **parts: Any) -> str:
    """A folder as transformers writes one; `None` leaves a file out. Its name."""
    files: dict[str, Any] = {
        "trainer_state.json": json.dumps(STATE),
        "config.json": json.dumps({"model_type": "qwen2", "hidden_size": 64}),
        "model.safetensors": "w",
        "optimizer.pt": "o",
    }
    for part, content in {**files, **{k.replace("__", "."): v for k, v in parts.items()}}.items():
        if content is not None:
            write(f"{name}/{part}", content)
    return name


def resumed(script: str, args: dict[str, Any], **known: Any) -> list[str]:
    known = {"gpus": 1, "machine": THIS_MACHINE, **known}
    return summarise_run(script, {"resume_from_checkpoint": "out/checkpoint-20", **args}, **known)


RESUME = "resume_from_checkpoint"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_good_checkpoint_is_quiet(write: Write, script: str) -> None:
    checkpoint(write)
    for known in ({}, {"per_device": 8}, {"gpus": None}, {"output": Path("out").absolute()}):
        assert resumed(script, {"max_steps": 40}, **known) == resumed(script, {}, **known) == []
    # a sharded one has an index
    sharded = {"model.safetensors.index.json": "{}", "model-00001-of-00002.safetensors": "w"}
    checkpoint(write, "out/sharded", **{"model.safetensors": None}, **sharded)
    assert resumed(script, {RESUME: "out/sharded"}) == []
    # nothing is left to train
    for args, over in (
        ({"max_steps": 20}, 1),
        ({"max_steps": 21}, 0),
        ({"num_train_epochs": 0.5}, 1),
    ):
        assert resumed(script, args) == [f"resume-finished error {RESUME}"] * over


def test_what_is_no_checkpoint(write: Write) -> None:
    expected = [f"resume-missing error {RESUME}"]
    assert resumed("trl-sft", {}) == expected
    assert resumed("trl-sft", {}, machine=None) == []
    for name in ("x" * 5000, "a\0b", "."):
        assert resumed("trl-sft", {RESUME: name}) == expected
    checkpoint(write, "out/checkpoint-5")
    (finding,) = judge_run("trl-sft", {RESUME: "out"}, gpus=1)
    assert summarise([finding]) == expected
    assert finding.help == "write `resume_from_checkpoint: out/checkpoint-5`"
    checkpoint(write, model__safetensors=None)
    assert resumed("trl-sft", {})[0] == expected[0]


@pytest.mark.parametrize("weights", ["model.safetensors", "adapter_model.safetensors"])
def test_an_output_folder_with_a_model(write: Write, weights: str) -> None:
    known = {"gpus": 1, "machine": THIS_MACHINE, "output": Path("out").absolute()}
    write("out/config.json" if weights.startswith("model") else "out/adapter_config.json", "{}")
    assert judge_sft({}, **known) == []
    write(f"out/{weights}", "w")
    assert judge_sft({}, **known) == ["finished-output warning output_dir"]


OFFLOADING = SHIPPED["zero3_offload"]


def test_optimizers_of_a_file() -> None:
    known = {"gpus": 8, "packages": {"bitsandbytes": "0.50.2"}}
    replaced = ["optim-replaced warning optim"]
    for name in ("adamw_bnb_8bit", "adafactor", "sgd"):
        assert judge_sft({"optim": name}, deepspeed=OFFLOADING, **known) == replaced
        # on the CPU there is no DeepSpeed
        assert judge_sft({"optim": name, "bf16": False}, gpus=0, deepspeed=OFFLOADING) == []
    left = [
        ({"optim": "adamw_torch"}, OFFLOADING),
        ({"optim": "paged_adamw_32bit"}, OFFLOADING),
        ({}, OFFLOADING),
        ({"optim": "adamw_bnb_8bit"}, SHIPPED["zero2"]),
        ({"optim": "adamw_bnb_8bit"}, {**OFFLOADING, "zero_force_ds_cpu_optimizer": False}),
    ]
    for args, file in left:
        assert judge_dpo(args, deepspeed=file, **known) == []
    # a config with an optimizer decides
    unread = ["optim-unread warning optim"]
    for name, file in (
        ("adamw_8bit", {**AUTO, "optimizer": {"type": "Lamb"}}),
        ("sgd", OFFLOADING),
    ):
        whole = {**file, "optimizer": {"type": "AdamW"}}
        assert judge_sft({"optim": name}, deepspeed=whole, **known) == unread


def test_compiled_lengths_and_a_reference_computed_beforehand() -> None:
    for args in (
        {"torch_compile": True},
        {"torch_compile_mode": "max-autotune"},
        {"torch_compile": True, "pad_to_multiple_of": "auto"},
    ):
        key = next(iter(args))
        warned = [f"compile-lengths warning {key}"]
        assert judge_sft(args, gpus=8) == warned
    assert judge_sft({"torch_compile": True, "pad_to_multiple_of": 512}, gpus=8) == []
    # the price of a reference computed beforehand
    for args, words in (({"use_peft": True}, "63 % more memory"), ({}, "saves its weights")):
        (noted,) = judge_run("trl-dpo", {"precompute_ref_log_probs": True, **args}, gpus=1)
        assert summarise([noted]) == ["reference-price note precompute_ref_log_probs"]
        assert words in noted.message


def test_a_precomputed_reference_is_rounded_under_deepspeed() -> None:
    asked = {"precompute_ref_log_probs": True}
    price = "reference-price note precompute_ref_log_probs"
    rounded = "reference-rounded warning precompute_ref_log_probs"
    for name in ("zero1", "zero2", "zero3"):
        assert judge_dpo(asked, gpus=2, deepspeed=SHIPPED[name]) == [price, rounded]
    assert judge_dpo({**asked, "bf16": False, "fp16": True}, gpus=2, deepspeed=AUTO) == [
        price,
        rounded,
    ]
    # exact in float32, without DeepSpeed, and on the CPU, where DeepSpeed is not used
    assert judge_dpo({**asked, "bf16": False}, gpus=2, deepspeed=AUTO) == [price]
    assert judge_dpo(asked, gpus=2) == [price]
    assert judge_dpo({**asked, "bf16": False}, gpus=0, deepspeed=AUTO) == [price]
    assert judge_dpo({}, gpus=2, deepspeed=AUTO) == []


def test_compiling_needs_a_compiler(tmp_path: Path) -> None:
    args = {"torch_compile": True, "pad_to_multiple_of": 64}
    bare = {"PATH": str(tmp_path)}
    missing = ["no-compiler error torch_compile"]
    assert judge_sft(args, gpus=8, machine=THIS_MACHINE, environ=bare) == missing
    assert judge_sft({**args, "bf16": False}, gpus=0, machine=THIS_MACHINE, environ=bare) == missing
    assert judge_sft(args, gpus=8, environ=bare) == []
    eager = {**args, "torch_compile_backend": "eager"}
    assert judge_sft(eager, gpus=8, machine=THIS_MACHINE, environ=bare) == []
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert judge_sft(args, gpus=8, machine=THIS_MACHINE, environ=bare) == []
    named = {**bare, "CC": "no-such-compiler"}
    assert judge_sft(args, gpus=8, machine=THIS_MACHINE, environ=named) == missing
