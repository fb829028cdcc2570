"""TRL on a machine: the rules that know devices, DeepSpeed, packages and checkpoints.

Where the training packages are, their own code is asked the same questions about DeepSpeed files.
"""

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES, PATIENCE_S, SUPPORT, Write
from rule_findings import THIS_MACHINE, codes_of_run, judge_run, summarise, summarise_run, values_of

from launcher.config.keys import DEEPSPEED
from launcher.machine.python import find_trainer
from launcher.rules import deepspeed
from launcher.rules.context import Context, Split
from launcher.stage.options import find_deepspeed_file
from launcher.upstream.schema import Values

SCRIPTS = ("trl-sft", "trl-dpo")
AUTO = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
SHIPPED = {name: json.loads(find_deepspeed_file(name).read_text("utf-8")) for name in DEEPSPEED}
ON_CPU = {"gpus": 0, "machine": THIS_MACHINE, "split": Split(processes=1, devices=1)}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # folders of these tests are named relative to their own
    monkeypatch.chdir(tmp_path)


def judge_sft(args: dict[str, Any], **facts: Any) -> list[str]:
    return summarise_run("trl-sft", args, **facts)


def judge_dpo(args: dict[str, Any], **facts: Any) -> list[str]:
    return summarise_run("trl-dpo", args, **facts)


def without(name: str) -> dict[str, Any]:
    """A DeepSpeed file that leaves this setting out."""
    return {key: value for key, value in AUTO.items() if key != name}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "args", [{}, {"bf16": False}, {"fp16": True}, {"max_grad_norm": 0.5}], ids=str
)
@pytest.mark.parametrize("deepspeed", [None, *SHIPPED])
def test_shipped_deepspeed_files_fit_any_arguments(
    script: str, args: Any, deepspeed: str | None
) -> None:
    facts = {
        "deepspeed": SHIPPED.get(deepspeed),
        "packages": {},
        "per_device": 4,
        "accumulation": 4,
        "machine": THIS_MACHINE,
    }
    assert summarise_run(script, args, **facts) == []
    # what a start fills in for `mixed_precision:`, which TRL's own arguments decide
    facts["mixed_precision"] = "bf16"
    assert summarise_run(script, args, **facts, gpus=1) == []
    assert summarise_run(script, args, **facts, gpus=8) == []


NO_BF16 = {"bf16": False}
QUANTISED = {"load_in_4bit": True, "use_peft": True}
WITH_BITSANDBYTES = {"packages": {"bitsandbytes": "0.50.2"}}


# each of these was run
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("args", "facts"),
    [
        ({**QUANTISED, **NO_BF16}, {**ON_CPU, **WITH_BITSANDBYTES}),
        (QUANTISED, {"gpus": 8, "deepspeed": SHIPPED["zero3"], **WITH_BITSANDBYTES}),
        ({"optim": "paged_adamw_32bit", **NO_BF16}, {**ON_CPU, **WITH_BITSANDBYTES}),
        ({"ddp_backend": "gloo"}, {"gpus": 1, "deepspeed": AUTO}),
        ({"ddp_backend": "nccl"}, {"gpus": 8}),
        ({"fsdp": "full_shard"}, {"gpus": 8}),
        ({"attn_implementation": "flash_attention_2"}, {"gpus": 8}),
    ],
)
def test_what_works_is_left_alone(script: str, args: Any, facts: Any) -> None:
    assert summarise_run(script, args, **facts) == []


FLASH = {"attn_implementation": "flash_attention_2"}
FLEX = {"attn_implementation": "flex_attention"}


@pytest.mark.parametrize(
    ("args", "code", "key"),
    [
        ({}, "bf16-on-cpu", "bf16"),
        ({"bf16": True}, "bf16-on-cpu", "bf16"),
        ({**NO_BF16, "bf16_full_eval": True}, "bf16-on-cpu", "bf16_full_eval"),
        ({**NO_BF16, **FLASH}, "attention-missing", "attn_implementation"),
        ({**NO_BF16, **FLEX}, "attention-missing", "attn_implementation"),
        ({**NO_BF16, "model_init_kwargs": FLASH}, "attention-missing", "model_init_kwargs"),
    ],
)
def test_what_the_cpu_cannot_do(args: Any, code: str, key: str) -> None:
    assert judge_sft(args, **ON_CPU, packages={}) == [f"{code} error {key}"]
    packages = {"flash-attn": "2.8.3"}
    assert judge_sft(args, gpus=8, packages=packages, mixed_precision="bf16") == []


def test_bf16_on_the_cpu_says_whether_it_is_the_default() -> None:
    (by_default,) = judge_run("trl-sft", {}, **ON_CPU)
    assert "default" in by_default.message
    assert "use_cpu: true" in str(by_default.help)
    (asked_for,) = judge_run("trl-sft", {"bf16": True}, **ON_CPU)
    assert "default" not in asked_for.message


def test_ways_to_train_on_the_cpu() -> None:
    in_bf16 = {"use_cpu": True, "bf16": True, "bf16_full_eval": True}
    assert judge_sft(in_bf16, **ON_CPU, packages={}) == []
    assert judge_sft(NO_BF16, **ON_CPU, packages={}) == []
    assert judge_dpo({"use_cpu": True}, gpus=1) == ["cpu-beside-gpus error use_cpu"]


@pytest.mark.parametrize(
    ("args", "mixed_precision", "is_unread"),
    [
        ({}, "no", True),
        ({}, "fp16", True),
        ({}, "bf16", False),
        ({}, None, False),
        (NO_BF16, "bf16", False),
        (NO_BF16, "no", False),
        ({"fp16": True}, "bf16", True),
        ({"fp16": True}, "fp16", False),
    ],
)
def test_mixed_precision_is_for_accelerate(
    args: Any, mixed_precision: str | None, is_unread: bool
) -> None:
    expected = ["mixed-precision-unread warning mixed_precision"] if is_unread else []
    assert judge_sft(args, mixed_precision=mixed_precision) == expected
    # a start fills in a default of its own
    assert judge_sft(args, mixed_precision=mixed_precision, gpus=8) == []


AUTO_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
OTHER_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3}}
ONE_STEP_IS_64 = {"gpus": 8, "per_device": 4, "accumulation": 2}


@pytest.mark.parametrize(
    ("file", "facts"),
    [
        ({**AUTO, "gradient_clipping": 0.5}, {}),
        ({**AUTO, "train_micro_batch_size_per_gpu": 2}, {"per_device": 4}),
        ({**AUTO, "gradient_accumulation_steps": 2}, {"accumulation": 4}),
        ({**AUTO, "train_batch_size": 128}, ONE_STEP_IS_64),
        ({**AUTO, "optimizer": OTHER_OPTIMIZER}, {}),
        ({**AUTO, "scheduler": {"params": {"warmup_num_steps": 5}}}, {}),
        (without("gradient_accumulation_steps"), {"accumulation": 4}),
        ({**AUTO, "fp16": {"enabled": True}}, {}),
        ({**AUTO, "bf16": {"enabled": False}}, {}),
    ],
)
def test_a_deepspeed_file_that_contradicts_the_arguments(file: Any, facts: Any) -> None:
    assert judge_sft({}, deepspeed=file, **facts) == ["deepspeed-mismatch error deepspeed"]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ({"zero_optimization": {"stage": 2}}, "deepspeed-no-batch error deepspeed"),
        ({**AUTO, "gradient_clipping": 0.5}, "deepspeed-mismatch error deepspeed"),
        ({**AUTO, "zero_optimization": {"stage": 3}}, "zero3-unsaved warning deepspeed"),
    ],
)
def test_on_the_cpu_no_deepspeed_file_is_read(file: Any, line: str) -> None:
    assert judge_sft({}, deepspeed=file) == [line]
    assert judge_sft(NO_BF16, deepspeed=file, gpus=0) == []


@pytest.mark.parametrize(
    ("file", "args", "facts"),
    [
        (AUTO, {}, {"gpus": 8, "per_device": 4, "accumulation": 4}),
        (without("gradient_accumulation_steps"), {}, {"accumulation": 1}),
        (without("train_micro_batch_size_per_gpu"), {}, {}),
        ({**AUTO, "bf16": {"enabled": False}}, NO_BF16, {}),
        ({**AUTO, "fp16": {"enabled": True}}, {"fp16": True}, {}),
        ({**AUTO, "optimizer": AUTO_OPTIMIZER}, {}, {}),
        ({**AUTO, "zero_optimization": {"stage": 3}}, {"use_peft": True}, {}),
        ({**AUTO, "train_batch_size": 64}, {}, ONE_STEP_IS_64),
    ],
)
def test_a_deepspeed_file_that_fits(file: Any, args: Any, facts: Any) -> None:
    assert judge_sft(args, deepspeed=file, **facts) == []


def test_a_mismatch_names_both_values() -> None:
    file = {**AUTO, "gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 2}
    (finding,) = judge_run("trl-sft", {}, deepspeed=file, per_device=8)
    assert "gradient_clipping: 0.5" in finding.message
    assert "per_device_train_batch_size: 8" in finding.message


def test_clipping_that_a_deepspeed_file_leaves_out() -> None:
    file = without("gradient_clipping")
    expected = "clipping-unread warning max_grad_norm"
    assert judge_sft({"max_grad_norm": 0.5}, deepspeed=file) == [expected]
    assert judge_sft({"max_grad_norm": 0.0}, deepspeed=file) == []


@dataclass(frozen=True, slots=True)
class Case:
    """A DeepSpeed file beside arguments, on some devices."""

    file: dict[str, Any]
    args: dict[str, Any]
    accumulation: int
    gpus: int

    @property
    def values(self) -> Values:
        return values_of("trl-sft", self.args)


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


SWITCHES = [{}, {"enabled": "auto"}, {"enabled": True}, {"enabled": False}]
SETTINGS = {
    "train_batch_size": [8, 64],
    "train_micro_batch_size_per_gpu": [4, 8],
    "gradient_accumulation_steps": [1, 2],
    "gradient_clipping": [1.0, 0.5],
    "bf16": SWITCHES,
    "fp16": SWITCHES,
    "optimizer": [
        {"type": "AdamW"},
        {"params": {"lr": 1e-4}},
        {"params": {"lr": "auto"}},
        {"params": {"betas": [0.9, 0.999]}},
        {"params": {"eps": 1e-8}},
        {"params": {"weight_decay": 0.1}},
    ],
    "scheduler": [{"params": {"warmup_max_lr": 1e-4}}, {"params": {"warmup_min_lr": "auto"}}],
}
"""What a file may say of these settings, in agreement with the arguments or not."""
MAY_BE_LEFT_OUT = ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping", "bf16")
PRECISIONS = [{}, {}, {"bf16": False}, {"fp16": True}, {"bf16": True}]
RATES = [{}, {"max_grad_norm": 0.5}, {"learning_rate": 1e-4}]


def draw_case(rng: random.Random) -> Case:
    """A case with few faults."""
    file = dict(AUTO)
    for name in rng.sample(list(SETTINGS), rng.choice([0, 1, 1, 2])):
        file[name] = rng.choice(SETTINGS[name])
    for name in rng.sample(MAY_BE_LEFT_OUT, rng.choice([0, 0, 1])):
        file.pop(name, None)
    args = {**rng.choice(PRECISIONS), **rng.choice(RATES)}
    return Case(file, args, accumulation=rng.choice([1, 2]), gpus=rng.choice([1, 8]))


COMPARED = (
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
"""The arguments that transformers looks at, beside those of precision and batch."""


def precision_of(values: Values) -> str:
    if values["fp16"]:
        return "fp16"
    if values["bf16"] in (None, True):
        return "bf16"
    return "no"


def question_of(case: Case) -> dict[str, Any]:
    """A case as the packages are asked about it."""
    precision = precision_of(case.values)
    arguments = {name: case.values[name] for name in COMPARED}
    arguments["fp16"] = precision == "fp16"
    arguments["bf16"] = precision == "bf16"
    arguments["world_size"] = case.gpus
    arguments["per_device_train_batch_size"] = 4
    arguments["gradient_accumulation_steps"] = case.accumulation
    return {"file": case.file, "arguments": arguments, "running": precision}


def is_refused(case: Case) -> bool:
    context = Context(
        values=case.values,
        deepspeed=case.file,
        gpus=case.gpus,
        per_device=4,
        accumulation=case.accumulation,
    )
    return bool(list(deepspeed.mismatches(context)))


def test_the_rules_agree_with_transformers() -> None:
    rng = random.Random(7)
    cases = [draw_case(rng) for _ in range(1500)]
    questions = [json.dumps(question_of(case)) for case in cases]
    answers = [json.loads(line) for line in ask_transformers("\n".join(questions)).splitlines()]
    assert len(answers) == len(cases)
    for case, answer in zip(cases, answers, strict=True):
        assert is_refused(case) == answer, case
    assert 0.2 < sum(answers) / len(answers) < 0.8


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor", "rmsprop"])
def test_optimizers_of_torch_need_no_package(optim: str) -> None:
    assert judge_sft({"optim": optim}, packages={}) == []


@pytest.mark.parametrize(
    ("optim", "package"),
    [
        ("paged_adamw_32bit", "bitsandbytes"),
        ("lion_8bit", "bitsandbytes"),
        ("adamw_torch_4bit", "torchao"),
        ("adamw_torch_8bit", "torchao"),
        ("lomo", "lomo-optim"),
        ("adalomo", "lomo-optim"),
        ("grokadamw", "grokadamw"),
        ("schedule_free_adamw", "schedulefree"),
        ("stable_adamw", "torch-optimi"),
        ("adamw_anyprecision", "torchdistx"),
    ],
)
def test_an_optimizer_whose_package_is_not_installed(optim: str, package: str) -> None:
    args = {"optim": optim}
    assert judge_sft(args, packages={}) == ["optim-missing error optim"]
    assert judge_sft(args, packages={package: "1"}) == []
    assert judge_sft(args) == []


@pytest.mark.parametrize(
    ("optim", "package"),
    [("galore_adamw", "galore-torch"), ("apollo_adamw_layerwise", "apollo-torch")],
)
def test_optimizers_that_need_targets(optim: str, package: str) -> None:
    targets = {"optim": optim, "optim_target_modules": "all-linear"}
    assert judge_sft(targets, packages={}) == ["optim-missing error optim"]
    assert judge_sft(targets, packages={package: "1"}) == []
    assert judge_sft({"optim": optim}, packages={package: "1"}) == ["optim-targets error optim"]


def test_quantisation_without_its_package() -> None:
    assert judge_sft(QUANTISED, packages={}) == ["quantiser-missing error load_in_4bit"]


@pytest.mark.parametrize(
    ("report_to", "is_missing"),
    [
        ("trackio", True),
        ("comet_ml", True),
        ("dagshub", True),
        ("flyte", True),
        ("none", False),
        (["none"], False),
        (["all"], False),
    ],
)
def test_trackers_that_are_not_installed(report_to: str | list[str], is_missing: bool) -> None:
    expected = ["report-missing error report_to"] if is_missing else []
    assert judge_dpo({"report_to": report_to}, packages={}) == expected
    assert judge_dpo({"report_to": report_to}) == []


@pytest.mark.parametrize("package", ["tensorboard", "tensorboardx"])
def test_either_package_of_tensorboard_will_do(package: str) -> None:
    assert judge_sft({"report_to": "tensorboard"}, packages={package: "2"}) == []


@pytest.mark.parametrize("report_to", ["nosuch", ["nosuch"]])
def test_trackers_that_do_not_exist(report_to: str | list[str]) -> None:
    assert judge_dpo({"report_to": report_to}) == ["report-unknown error report_to"]


def test_kubeflow_needs_its_server() -> None:
    args = {"report_to": "kubeflow"}
    url = {"HOME": "/nonexistent", "KUBEFLOW_TRAINER_SERVER_URL": "https://x"}
    assert judge_sft(args) == ["report-missing warning report_to"]
    assert judge_sft(args, environ=url) == []


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
    assert len(optimizers) > 30
    assert len(trackers) > 10
    packages = find_trainer(Path(sys.executable), None).packages
    for optim, absent in optimizers.items():
        codes = codes_of_run("trl-sft", {"optim": optim}, packages=packages)
        assert ("optim-missing" in codes) == absent, optim
    environ = {"HOME": "/nonexistent", "WANDB_MODE": "offline"}
    for name, absent in trackers.items():
        codes = codes_of_run("trl-sft", {"report_to": name}, packages=packages, environ=environ)
        assert ("report-missing" in codes) == absent, name


NO_KEY = ["no-wandb-key warning report_to"]


@pytest.mark.parametrize(
    ("report_to", "environ", "packages", "expected"),
    [
        ("wandb", {}, None, NO_KEY),
        ("wandb", {"WANDB_API_KEY": "k"}, None, []),
        ("wandb", {"WANDB_MODE": "offline"}, None, []),
        ("all", {}, {"wandb": "0.31"}, NO_KEY),
        ("all", {}, {}, []),
        ("none", {}, None, []),
    ],
)
def test_wandb_needs_a_key(
    tmp_path: Path, report_to: str, environ: dict[str, str], packages: Any, expected: list[str]
) -> None:
    environ = {"HOME": str(tmp_path), **environ}
    assert judge_sft({"report_to": report_to}, environ=environ, packages=packages) == expected


def test_a_start_without_a_key_of_wandb_is_refused(tmp_path: Path) -> None:
    facts = {"environ": {"HOME": str(tmp_path)}, "machine": THIS_MACHINE}
    assert judge_sft({"report_to": ["wandb"]}, **facts) == ["no-wandb-key error report_to"]
    assert judge_sft({}, **facts) == []


def test_pushing_needs_a_token() -> None:
    """More of it is in test_stage_rules.py."""
    assert judge_sft({"push_to_hub": True}) == ["no-hub-token warning push_to_hub"]
    assert judge_sft({"push_to_hub": True, "hub_token": "t"}) == []


STATE = {"global_step": 20, "epoch": 0.5, "train_batch_size": 4, "max_steps": 40}
WEIGHTS = {"model.safetensors": "w"}
SHARDED_WEIGHTS = {"model.safetensors.index.json": "{}", "model-00001-of-00002.safetensors": "w"}


def write_checkpoint(write: Write, name: str, weights: dict[str, str]) -> None:
    """A folder as transformers writes one."""
    files = {
        "trainer_state.json": json.dumps(STATE),
        "config.json": json.dumps({"model_type": "qwen2", "hidden_size": 64}),
        "optimizer.pt": "o",
        **weights,
    }
    for file, content in files.items():
        write(f"{name}/{file}", content)


CHECKPOINT = "out/checkpoint-20"


def resume(script: str, name: str = CHECKPOINT, **args: Any) -> list[str]:
    args["resume_from_checkpoint"] = name
    return summarise_run(script, args, gpus=1, machine=THIS_MACHINE)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("weights", [WEIGHTS, SHARDED_WEIGHTS])
def test_a_good_checkpoint_is_quiet(write: Write, script: str, weights: dict[str, str]) -> None:
    write_checkpoint(write, CHECKPOINT, weights)
    assert resume(script) == []
    args = {"resume_from_checkpoint": CHECKPOINT, "max_steps": 40}
    for facts in ({"gpus": None}, {"per_device": 8}, {"output": Path("out").absolute()}):
        assert summarise_run(script, args, machine=THIS_MACHINE, **{"gpus": 1, **facts}) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_checkpoint_after_which_nothing_is_left_to_train(write: Write, script: str) -> None:
    write_checkpoint(write, CHECKPOINT, WEIGHTS)
    finished = ["resume-finished error resume_from_checkpoint"]
    assert resume(script, max_steps=20) == finished
    assert resume(script, num_train_epochs=0.5) == finished
    assert resume(script, max_steps=21) == []


RESUME_MISSING = "resume-missing error resume_from_checkpoint"


@pytest.mark.parametrize("name", [CHECKPOINT, "x" * 5000, "a\0b", "."])
def test_what_is_no_checkpoint(name: str) -> None:
    assert resume("trl-sft", name) == [RESUME_MISSING]


def test_a_checkpoint_that_an_earlier_stage_may_still_write() -> None:
    assert judge_sft({"resume_from_checkpoint": CHECKPOINT}, gpus=1) == []


def test_the_folder_of_a_checkpoint_names_it(write: Write) -> None:
    write_checkpoint(write, "out/checkpoint-5", WEIGHTS)
    (finding,) = judge_run("trl-sft", {"resume_from_checkpoint": "out"}, gpus=1)
    assert summarise([finding]) == [RESUME_MISSING]
    assert finding.help == "write `resume_from_checkpoint: out/checkpoint-5`"


def test_a_checkpoint_without_weights(write: Write) -> None:
    write_checkpoint(write, CHECKPOINT, {})
    assert resume("trl-sft")[0] == RESUME_MISSING


OFFLOADING = SHIPPED["zero3_offload"]
EIGHT_GPUS = {"gpus": 8, **WITH_BITSANDBYTES}


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "adafactor", "sgd"])
def test_an_offloaded_optimizer_is_deepspeeds(optim: str) -> None:
    args = {"optim": optim}
    replaced = ["optim-replaced warning optim"]
    assert judge_sft(args, deepspeed=OFFLOADING, **EIGHT_GPUS) == replaced
    # on the CPU there is no DeepSpeed
    assert judge_sft({**args, **NO_BF16}, deepspeed=OFFLOADING, gpus=0) == []


@pytest.mark.parametrize(
    ("args", "file"),
    [
        ({"optim": "adamw_torch"}, OFFLOADING),
        ({"optim": "paged_adamw_32bit"}, OFFLOADING),
        ({}, OFFLOADING),
        ({"optim": "adamw_bnb_8bit"}, SHIPPED["zero2"]),
        ({"optim": "adamw_bnb_8bit"}, {**OFFLOADING, "zero_force_ds_cpu_optimizer": False}),
    ],
)
def test_optimizers_that_deepspeed_leaves_alone(args: Any, file: Any) -> None:
    assert judge_dpo(args, deepspeed=file, **EIGHT_GPUS) == []


@pytest.mark.parametrize(
    ("optim", "file"), [("adamw_8bit", AUTO), ("sgd", OFFLOADING), ("adamw_torch_4bit", AUTO)]
)
def test_the_optimizer_of_a_deepspeed_file_decides(optim: str, file: Any) -> None:
    file = {**file, "optimizer": AUTO_OPTIMIZER}
    expected = ["optim-unread warning optim"]
    assert judge_sft({"optim": optim}, deepspeed=file, gpus=8, packages={}) == expected


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"torch_compile_mode": "max-autotune"}, "torch_compile_mode"),
        ({"torch_compile": True, "pad_to_multiple_of": "auto"}, "torch_compile"),
    ],
)
def test_compiled_lengths(args: Any, key: str) -> None:
    assert judge_sft(args, gpus=8) == [f"compile-lengths warning {key}"]
    padded = {**args, "pad_to_multiple_of": 512}
    assert judge_sft(padded, gpus=8) == []


@pytest.mark.parametrize(
    ("args", "words"), [({"use_peft": True}, "63 % more memory"), ({}, "saves its weights")]
)
def test_the_price_of_a_precomputed_reference(args: Any, words: str) -> None:
    (finding,) = judge_run("trl-dpo", {"precompute_ref_log_probs": True, **args}, gpus=1)
    assert summarise([finding]) == ["reference-price note precompute_ref_log_probs"]
    assert words in finding.message


@pytest.mark.parametrize(
    ("args", "facts", "is_rounded"),
    [
        ({}, {"gpus": 2, "deepspeed": SHIPPED["zero1"]}, True),
        ({}, {"gpus": 2, "deepspeed": SHIPPED["zero2"]}, True),
        ({}, {"gpus": 2, "deepspeed": SHIPPED["zero3"]}, True),
        ({"bf16": False, "fp16": True}, {"gpus": 2, "deepspeed": AUTO}, True),
        # exact in float32, without DeepSpeed, and on the CPU, where DeepSpeed is not used
        (NO_BF16, {"gpus": 2, "deepspeed": AUTO}, False),
        ({}, {"gpus": 2}, False),
        (NO_BF16, {"gpus": 0, "deepspeed": AUTO}, False),
    ],
)
def test_a_precomputed_reference_is_rounded_under_deepspeed(
    args: Any, facts: Any, is_rounded: bool
) -> None:
    expected = ["reference-price note precompute_ref_log_probs"]
    if is_rounded:
        expected.append("reference-rounded warning precompute_ref_log_probs")
    assert judge_dpo({"precompute_ref_log_probs": True, **args}, **facts) == expected


def test_without_a_precomputed_reference_nothing_is_rounded() -> None:
    assert judge_dpo({}, gpus=2, deepspeed=AUTO) == []


@pytest.mark.parametrize(
    ("args", "facts", "is_missing"),
    [
        ({}, {"gpus": 8, "machine": THIS_MACHINE}, True),
        (NO_BF16, {"gpus": 0, "machine": THIS_MACHINE}, True),
        # another machine may have one
        ({}, {"gpus": 8}, False),
        ({"torch_compile_backend": "eager"}, {"gpus": 8, "machine": THIS_MACHINE}, False),
    ],
)
def test_compiling_needs_a_compiler(
    tmp_path: Path, args: Any, facts: Any, is_missing: bool
) -> None:
    expected = ["no-compiler error torch_compile"] if is_missing else []
    args = {"torch_compile": True, "pad_to_multiple_of": 64, **args}
    assert judge_sft(args, environ={"PATH": str(tmp_path)}, **facts) == expected


def test_the_compiler_that_is_named_decides(tmp_path: Path) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    args = {"torch_compile": True, "pad_to_multiple_of": 64}
    environ = {"PATH": str(tmp_path)}
    facts = {"gpus": 8, "machine": THIS_MACHINE}
    assert judge_sft(args, environ=environ, **facts) == []
    environ["CC"] = "no-such-compiler"
    assert judge_sft(args, environ=environ, **facts) == ["no-compiler error torch_compile"]
