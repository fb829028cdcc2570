"""Rules that know DeepSpeed, the machine, the model and the folder: where they speak, where not."""

import ast
import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from argument_sets import generate
from conftest import NO_PACKAGES, Write
from rule_findings import (
    BASES,
    THIS_MACHINE,
    codes_of_run,
    judge_run,
    summarise,
    summarise_run,
    values_of,
)
from saved import loadable

from launcher.artifacts import model_config
from launcher.config.keys import DEEPSPEED
from launcher.errors import Finding
from launcher.rules import model as model_rules
from launcher.rules import registry
from launcher.rules.context import Context, Machine, Split
from launcher.stage.options import find_deepspeed_file
from launcher.upstream import citations
from launcher.upstream.schema import Values
from launcher.upstream.trainers import BACKENDS

OPEN_INSTRUCT = ("sft", "dpo")


def read_shipped(name: str) -> dict[str, Any]:
    """A DeepSpeed file that ships with launch."""
    return json.loads(find_deepspeed_file(name).read_text(encoding="utf-8"))


ZERO2 = read_shipped("zero2")
ZERO3 = read_shipped("zero3")
BARE = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
}
TRAINER = {"accelerate": "1.12.0", "flash-attn": "2.8.3", "liger-kernel": "0.7.0"}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the models and files of these tests are named relative to their own folder
    monkeypatch.chdir(tmp_path)


def write_model(write: Write, **config: Any) -> str:
    """A local model folder with this config; its name."""
    write("model/config.json", json.dumps(config))
    return "model"


@pytest.mark.parametrize("script", BASES)
@pytest.mark.parametrize("gpus", [None, 0, 1, 8])
@pytest.mark.parametrize("deepspeed", [None, *map(read_shipped, DEEPSPEED)])
def test_what_ships_is_quiet(script: str, gpus: int | None, deepspeed: Any) -> None:
    findings = judge_run(
        script,
        {},
        deepspeed=deepspeed,
        gpus=gpus,
        packages=TRAINER,
        machine=THIS_MACHINE,
        per_device=4,
        accumulation=4,
        mixed_precision="bf16",
    )
    assert findings == []


WITHOUT_ACCUMULATION = dict(BARE)
del WITHOUT_ACCUMULATION["gradient_accumulation_steps"]
FP16 = {**BARE, "fp16": {"enabled": True}}
ONE_STEP_IS_64 = {"gpus": 8, "per_device": 4, "accumulation": 2}


@pytest.mark.parametrize("script", OPEN_INSTRUCT)
@pytest.mark.parametrize(
    ("file", "facts", "expected"),
    [
        (BARE, ONE_STEP_IS_64, None),
        ({**BARE, "optimizer": {"type": "AdamW"}}, {}, "deepspeed-optimizer error"),
        ({**BARE, "scheduler": {"type": "WarmupLR"}}, {}, "deepspeed-optimizer error"),
        ({**BARE, "zero_optimization": {"stage": 3}}, {}, "zero3-unsaved error"),
        ({"train_micro_batch_size_per_gpu": 1}, {}, "deepspeed-no-zero error"),
        ({"zero_optimization": {"stage": 2}}, {}, "deepspeed-no-batch error"),
        (
            {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"},
            {},
            "deepspeed-no-batch error",
        ),
        ({"zero_optimization": {"stage": 2}, "train_batch_size": 64}, {}, None),
        (WITHOUT_ACCUMULATION, {"accumulation": 4}, "deepspeed-accumulation warning"),
        (
            {**BARE, "gradient_accumulation_steps": 2},
            {"accumulation": 4},
            "deepspeed-accumulation warning",
        ),
        ({**BARE, "gradient_accumulation_steps": 4}, {"accumulation": 4}, None),
        ({**BARE, "train_batch_size": 128}, ONE_STEP_IS_64, "deepspeed-batch error"),
        ({**BARE, "train_batch_size": 64}, ONE_STEP_IS_64, None),
        (FP16, {"mixed_precision": "bf16"}, "deepspeed-precision error"),
        (FP16, {"mixed_precision": "no"}, None),
        # on the CPU no file is read
        ({}, {"gpus": 0}, None),
    ],
)
def test_deepspeed_files(script: str, file: Any, facts: Any, expected: str | None) -> None:
    lines = summarise_run(script, {}, deepspeed=file, **facts)
    assert lines == ([f"{expected} deepspeed"] if expected else [])


ODD = pytest.mark.parametrize("odd", [None, [], "x", 1e999])
FACTS = {"gpus": 8, "per_device": 1, "accumulation": 2, "mixed_precision": "bf16"}


@ODD
@pytest.mark.parametrize(
    ("script", "clips"), [("sft", "clip_grad_norm"), ("trl-sft", "max_grad_norm")]
)
def test_an_odd_deepspeed_file_is_no_crash(odd: Any, script: str, clips: str) -> None:
    nested = {"zero_optimization": {"stage": odd}, "optimizer": {"params": odd}}
    files = [{**BARE, **nested}]
    for key in (*BARE, "gradient_clipping", "fp16", "bf16", "optimizer", "scheduler", "checkpoint"):
        files += [{key: odd}, {**BARE, key: odd}]
    for file in files:
        assert isinstance(judge_run(script, {clips: 0.5}, deepspeed=file, **FACTS), list)


@ODD
def test_an_odd_config_of_a_model_is_no_crash(write: Write, odd: Any) -> None:
    args = {
        "model_name_or_path": "model",
        "use_lora": True,
        "use_liger_kernel": True,
        "max_seq_length": 8,
    }
    whole = {"model_type": "qwen2", "max_position_embeddings": 4, "rope_scaling": {"factor": odd}}
    for key in (*whole, "attention_bias", "num_attention_heads", "rope_parameters", "text_config"):
        write_model(write, **{**whole, key: odd})
        assert isinstance(judge_run("sft", args, deepspeed=BARE, **FACTS), list)


@pytest.mark.parametrize(("script", "key"), [("sft", "clip_grad_norm"), ("dpo", "max_grad_norm")])
@pytest.mark.parametrize(
    ("norm", "facts", "is_unread"),
    [
        (0.5, {"deepspeed": ZERO2}, True),
        (0.5, {"deepspeed": BARE}, True),
        (1.0, {"deepspeed": ZERO2}, False),
        (1.0, {"deepspeed": BARE}, True),
        (0.5, {"deepspeed": {**BARE, "gradient_clipping": 0.5}}, False),
        (0.5, {}, False),
        (0.5, {"deepspeed": ZERO2, "gpus": 0}, False),
        # no clipping
        (0, {"deepspeed": ZERO2}, True),
        (-1, {"deepspeed": ZERO2}, True),
        (0, {"deepspeed": {**ZERO2, "gradient_clipping": None}}, False),
        (-1, {"deepspeed": {**ZERO2, "gradient_clipping": None}}, False),
    ],
)
def test_clipping_is_deepspeeds(
    script: str, key: str, norm: float, facts: Any, is_unread: bool
) -> None:
    expected = [f"clipping-unread warning {key}"] if is_unread else []
    assert summarise_run(script, {key: norm}, **facts) == expected
    assert judge_run(script, {}, deepspeed=BARE) == []


def test_zero_stage_of_dpo_clips_too() -> None:
    expected = ["clipping-unread warning max_grad_norm"]
    assert summarise_run("dpo", {"zero_stage": 3, "max_grad_norm": -1}) == expected


def test_zero_stage_beside_a_file() -> None:
    expected = ["two-zero-stages warning zero_stage"]
    differs = judge_run("dpo", {"zero_stage": 3}, deepspeed=ZERO2)
    assert summarise(differs) == expected
    assert "stage 2 is not 3" in differs[0].message
    agrees = judge_run("dpo", {"zero_stage": 2}, deepspeed=ZERO2)
    assert summarise(agrees) == expected
    assert "is not" not in agrees[0].message
    assert judge_run("dpo", {"zero_stage": 3}) == []
    # nothing of the file matters then
    assert summarise_run("dpo", {"zero_stage": 2}, deepspeed={}) == expected


@pytest.mark.parametrize("script", OPEN_INSTRUCT)
def test_quantised_models_and_deepspeed(script: str) -> None:
    args = {"use_qlora": True, "use_lora": True}
    assert summarise_run(script, args, deepspeed=ZERO3) == ["qlora-deepspeed error use_qlora"]
    assert summarise_run(script, args, deepspeed=ZERO2) == ["qlora-deepspeed warning use_qlora"]
    assert judge_run(script, args, gpus=1) == []
    assert judge_run(script, {"use_lora": True}, deepspeed=ZERO3) == []


@pytest.mark.parametrize("script", OPEN_INSTRUCT)
@pytest.mark.parametrize("deepspeed", [ZERO2, ZERO3, None])
@pytest.mark.parametrize(
    ("model_type", "attention_bias"), [("qwen2", None), ("llama", True), ("qwen3", None)]
)
def test_lora_and_frozen_biases(
    write: Write, script: str, deepspeed: Any, model_type: str, attention_bias: bool | None
) -> None:
    """The pin leaves an empty group out; the crash of before is in test_behaviour_rules.py."""
    name = write_model(write, model_type=model_type, attention_bias=attention_bias)
    args = {"use_lora": True, "model_name_or_path": name}
    assert judge_run(script, args, deepspeed=deepspeed) == []


def test_lora_is_not_checkpointed_under_zero_3() -> None:
    # seen with DeepSpeed 0.18.9 and PEFT 0.21 on two processes: CheckpointError; full training is
    # fine
    lora = {"use_lora": True}
    checkpointed = {"gradient_checkpointing": True}
    both = {**lora, **checkpointed}
    refused = ["lora-zero3-checkpointing error gradient_checkpointing"]
    assert summarise_run("sft", both, deepspeed=ZERO3) == refused
    assert judge_run("sft", lora, deepspeed=ZERO3) == []
    assert judge_run("sft", checkpointed, deepspeed=ZERO3) == []
    assert judge_run("sft", both, deepspeed=ZERO2) == []
    # dpo_tune_cache.py::main[if args.use_lora] checkpoints no LoRA
    recomputed = {"use_lora": True, "activation_memory_budget": 0.5}
    assert judge_run("dpo", recomputed, deepspeed=ZERO3) == []


LIGER = {"use_liger_kernel": True}


@pytest.mark.parametrize(
    ("script", "severity"),
    [("sft", "error"), ("dpo", "error"), ("trl-sft", "warning"), ("trl-dpo", "warning")],
)
def test_liger_and_models_that_it_does_not_know(write: Write, script: str, severity: str) -> None:
    args = {**LIGER, "model_name_or_path": write_model(write, model_type="gpt2")}
    known_release = summarise_run(script, args, packages={"liger-kernel": "0.7.0"})
    assert known_release == [f"liger-unknown-model {severity} use_liger_kernel"]
    # a later release may know it
    warned = ["liger-unknown-model warning use_liger_kernel"]
    assert summarise_run(script, args) == warned
    assert summarise_run(script, args, packages={"liger-kernel": "0.9.0"}) == warned

    write_model(write, model_type="qwen2")
    assert judge_run(script, args, packages=TRAINER) == []


@pytest.mark.parametrize("script", BASES)
def test_liger_needs_a_gpu(script: str) -> None:
    assert summarise_run(script, LIGER, gpus=0) == ["liger-on-cpu error use_liger_kernel"]
    assert judge_run(script, LIGER, gpus=0, environ={"TRITON_INTERPRET": "1"}) == []


def test_the_models_that_liger_knows() -> None:
    try:
        installed = distribution("liger-kernel")
    except PackageNotFoundError:
        pytest.skip(f"{NO_PACKAGES}: liger-kernel is not installed")
    if not installed.version.startswith("0.7."):
        pytest.skip(f"{NO_PACKAGES}: liger-kernel {installed.version} is not 0.7")
    source = installed.locate_file("liger_kernel/transformers/monkey_patch.py")
    tree = ast.parse(Path(str(source)).read_text(encoding="utf-8"))
    for node in tree.body:
        if ast.unparse(node).startswith("MODEL_TYPE_TO_APPLY_LIGER_FN ="):
            table = node.value
    assert isinstance(table, ast.Dict)
    assert {ast.literal_eval(key) for key in table.keys if key} == model_rules.LIGER_MODELS


@pytest.mark.parametrize(
    ("setting", "below"),
    [
        ("HF_HOME", "hub/"),
        ("HF_HUB_CACHE", ""),
        ("XDG_CACHE_HOME", "huggingface/hub/"),
        ("HOME", ".cache/huggingface/hub/"),
    ],
)
def test_a_model_in_the_hubs_cache(write: Write, tmp_path: Path, setting: str, below: str) -> None:
    folder = f"place/{below}models--org--name"
    write(f"{folder}/refs/main", "abc123\n")
    write(f"{folder}/snapshots/abc123/config.json", '{"model_type": "gpt2"}')
    cached = {setting: str(tmp_path / "place")}
    main = {**LIGER, "model_name_or_path": "org/name"}
    same = {**main, "model_revision": "abc123"}
    other = {**main, "model_revision": "v2"}

    assert codes_of_run("sft", main, environ=cached) == {"liger-unknown-model"}
    assert codes_of_run("sft", same, environ=cached) == {"liger-unknown-model"}
    assert judge_run("sft", other, environ=cached) == []
    assert judge_run("sft", main, environ={"HOME": str(tmp_path / "nobody")}) == []


@pytest.mark.parametrize("text", ["", "[]", "[" * 5000, b"\xff\xfe", '{"model_type": 5}'])
def test_broken_configs_are_nothing(write: Write, text: str | bytes) -> None:
    write("model/config.json", text)
    assert judge_run("sft", {**LIGER, "model_name_or_path": "model"}) == []


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b"])
def test_a_name_of_no_file_has_no_config(name: str) -> None:
    assert model_config.read_model_config(name, {}) == {}


FOURFOLD = {"factor": 4.0, "original_max_position_embeddings": 32768}
EIGHTFOLD = {"factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "reach"),
    [
        ({"max_position_embeddings": 2048, "rope_scaling": None}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": "many"}, None),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        # the original stands in the config: stretched four times
        ({"max_position_embeddings": 32768, "rope_scaling": FOURFOLD}, 131072),
        # the stretched length stands there already
        ({"max_position_embeddings": 131072, "rope_scaling": EIGHTFOLD}, 131072),
    ],
)
def test_positions(config: dict[str, Any], reach: int | None) -> None:
    assert model_rules.positions(config) == reach


@pytest.mark.parametrize(
    ("script", "key"),
    [("sft", "max_seq_length"), ("dpo", "max_seq_length"), ("trl-sft", "max_length")],
)
def test_rows_longer_than_the_model(write: Write, script: str, key: str) -> None:
    name = write_model(write, model_type="llama", max_position_embeddings=2048)
    args = {"model_name_or_path": name}
    assert summarise_run(script, {**args, key: 4096}) == [f"beyond-positions warning {key}"]
    assert judge_run(script, {**args, key: 2048}) == []
    assert judge_run(script, args) == []


SLOW = ["packing-without-flash warning packing"]
OF_ONE = ["packing-of-one warning packing"]


@pytest.mark.parametrize(
    ("script", "args", "facts", "expected"),
    [
        ("sft", {}, {"packages": {}}, SLOW),
        ("dpo", {}, {"packages": {}}, SLOW),
        ("dpo", {"attn_implementation": "torch"}, {}, SLOW),
        ("sft", {}, {"packages": TRAINER}, []),
        ("sft", {}, {"packages": {"flash-attn-3": "3.0.0"}}, []),
        ("sft", {}, {}, []),
        ("sft", {}, {"packages": {}, "gpus": 0}, []),
        ("dpo", {"attn_implementation": "flash_2"}, {"packages": TRAINER}, []),
        ("sft", {}, {"per_device": 1}, OF_ONE),
        ("sft", {}, {"per_device": 1, "gpus": 0}, OF_ONE),
        ("sft", {"packing": False}, {"per_device": 1}, []),
        ("sft", {}, {"per_device": 2}, []),
        # of DPO one row is a pair
        ("dpo", {}, {"per_device": 1}, []),
    ],
)
def test_packing(script: str, args: Any, facts: Any, expected: list[str]) -> None:
    assert summarise_run(script, {"packing": True, **args}, **facts) == expected


OFFLINE = {"environ": {"HF_HUB_OFFLINE": "1"}}


@pytest.mark.parametrize("script", ["sft", "dpo", "trl-sft"])
@pytest.mark.parametrize(
    ("name", "facts", "is_missing"),
    [
        ("build/demo/model", {}, True),
        ("/no/such/model", {}, True),
        ("~/model", {}, True),
        ("./model", {}, True),
        ("./whole", {}, False),
        # one of its files
        ("whole/config.json", {}, True),
        ("org/name", {}, False),
        ("org/name", OFFLINE, True),
    ],
)
def test_a_model_that_is_not_here(
    write: Write, script: str, name: str, facts: Any, is_missing: bool
) -> None:
    write("whole/config.json", '{"model_type": "llama"}')
    loadable(Path("whole"))
    args = {"model_name_or_path": name}
    expected = ["missing-model error model_name_or_path"] if is_missing else []
    assert summarise_run(script, args, machine=THIS_MACHINE, **facts) == expected


@pytest.mark.parametrize("script", ["sft", "dpo", "trl-sft"])
@pytest.mark.parametrize("name", ["build/demo/model", "/no/such/model", "./model", "~/model"])
def test_a_model_that_an_earlier_stage_may_still_make(script: str, name: str) -> None:
    assert judge_run(script, {"model_name_or_path": name}) == []


@pytest.mark.parametrize("script", OPEN_INSTRUCT)
@pytest.mark.parametrize("key", ["config_name", "tokenizer_name_or_path"])
def test_a_part_of_the_model_that_is_not_here(write: Write, script: str, key: str) -> None:
    model = {"model_name_or_path": write_model(write, model_type="llama")}
    loadable(Path("model"))
    whole = {**model, key: "./model"}
    partial = {**model, key: "./other"}
    missing = [f"missing-model error {key}"]
    assert judge_run(script, whole, machine=THIS_MACHINE) == []
    assert summarise_run(script, partial, machine=THIS_MACHINE) == missing


WANDB = {"with_tracking": True, "report_to": "wandb"}
LOGIN = "machine api.wandb.ai login user password secret\n"
ELSEWHERE = LOGIN.replace("api.wandb.ai", "example.org")


@pytest.mark.parametrize("script", OPEN_INSTRUCT)
@pytest.mark.parametrize(
    ("netrc", "environ", "is_missed"),
    [
        ("", {}, True),
        ("", {"WANDB_API_KEY": "k"}, False),
        (ELSEWHERE, {}, True),
        (LOGIN, {}, False),
        (LOGIN, {"WANDB_BASE_URL": "https://wandb.example.org"}, True),
        ("machine {\n", {}, True),
        # ~/mine holds a login
        ("", {"NETRC": "mine"}, False),
        ("", {"WANDB_MODE": "offline"}, True),
        ("", {"WANDB_MODE": "disabled"}, True),
    ],
)
def test_tracking_needs_a_key(
    write: Write, tmp_path: Path, script: str, netrc: str, environ: dict[str, str], is_missed: bool
) -> None:
    write("mine", LOGIN)
    write(".netrc", netrc)
    environ = {"HOME": str(tmp_path), **environ}
    expected = ["no-wandb-key warning with_tracking"] if is_missed else []
    assert summarise_run(script, WANDB, environ=environ) == expected
    assert judge_run(script, {}, environ=environ) == []


@pytest.mark.parametrize("script", OPEN_INSTRUCT)
def test_tracking_offline_and_on_this_machine(tmp_path: Path, script: str) -> None:
    home = {"HOME": str(tmp_path)}
    # offline it is still asked who is logged in
    offline = {**home, "WANDB_MODE": "disabled"}
    assert judge_run(script, {**WANDB, "wandb_entity": "me"}, environ=offline) == []
    refused = ["no-wandb-key error with_tracking"]
    assert summarise_run(script, WANDB, environ=home, machine=THIS_MACHINE) == refused


WARNED = ["no-hub-token warning push_to_hub"]
REFUSED = ["no-hub-token error push_to_hub"]
TOKEN = {"HF_TOKEN": "t"}


@pytest.mark.parametrize("script", OPEN_INSTRUCT)
@pytest.mark.parametrize(
    ("push", "environ", "machine", "expected"),
    [
        (True, {}, None, WARNED),
        (True, {}, THIS_MACHINE, REFUSED),
        (True, TOKEN, None, []),
        (True, {**TOKEN, "HF_HUB_OFFLINE": "1"}, None, WARNED),
        # the default, until it comes to a run
        (None, {}, None, []),
        (None, {}, THIS_MACHINE, REFUSED),
    ],
)
def test_pushing_needs_a_token(
    script: str,
    push: bool | None,
    environ: dict[str, str],
    machine: Machine | None,
    expected: list[str],
) -> None:
    args = {"push_to_hub": push}
    environ = {"HOME": "home", **environ}
    assert summarise_run(script, args, environ=environ, machine=machine) == expected


@pytest.mark.parametrize("script", OPEN_INSTRUCT)
def test_a_token_in_the_home_folder_is_enough_to_push(
    write: Write, tmp_path: Path, script: str
) -> None:
    write(".cache/huggingface/token", "t")
    assert judge_run(script, {"push_to_hub": True}, environ={"HOME": str(tmp_path)}) == []


@pytest.mark.parametrize("script", OPEN_INSTRUCT)
@pytest.mark.parametrize(
    ("args", "time"),
    [({}, "before anything is trained"), ({"hf_entity": "me"}, "once the model is trained")],
)
def test_when_a_push_without_a_token_fails(script: str, args: Any, time: str) -> None:
    (finding,) = judge_run(script, {"push_to_hub": True, **args}, environ={})
    assert time in finding.message


def judge_output(folder: Path, script: str, **args: Any) -> list[Finding]:
    """The findings about an output folder."""
    findings = judge_run(script, args, output=folder, machine=THIS_MACHINE)
    for finding in findings:
        assert finding.severity == "warning"
        assert finding.key == "args.output_dir"
    return findings


@pytest.mark.parametrize("script", OPEN_INSTRUCT)
def test_checkpoints_that_launch_did_not_write(write: Write, tmp_path: Path, script: str) -> None:
    output = tmp_path / "out"
    for name in ("out/notes/x", "out/step_notes.txt", "out/step_500/x"):
        write(name, "")
    for folder in (output, output / "missing", Path("a\0b")):
        assert judge_output(folder, script) == []

    write("out/step_250/COMPLETED", "COMPLETED")
    (finding,) = judge_output(output, script)
    assert finding.code == "foreign-checkpoints"
    assert "step_250" in finding.message
    assert judge_output(output, script, cache_dataset_only=True) == []


@pytest.mark.parametrize("script", BASES)
@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ("config.json", "model.safetensors"),
        ("adapter_config.json", "adapter_model.bin"),
        ("adapter_config.json", "adapter_model.safetensors"),
    ],
)
def test_a_folder_with_a_finished_model(
    write: Write, tmp_path: Path, script: str, config: str, weights: str
) -> None:
    output = tmp_path / "out"
    write(f"out/{config}", "{}")
    assert judge_output(output, script) == []

    write(f"out/{weights}", "x")
    (finding,) = judge_output(output, script)
    assert finding.code == "finished-output"
    assert "from zero" in finding.message


@pytest.mark.parametrize("script", OPEN_INSTRUCT)
def test_a_finished_model_beside_a_checkpoint(write: Write, tmp_path: Path, script: str) -> None:
    for name in ("config.json", "model.safetensors", "step_5/COMPLETED"):
        write(f"out/{name}", "{}")
    _, finished = judge_output(tmp_path / "out", script)
    assert finished.code == "finished-output"
    assert "step_5" in finished.message


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_every_rule_says_where_upstream_says_so(backend: str, stage: str) -> None:
    for rule in (*registry.of_stage(backend, stage), *registry.of_script(backend, stage)):
        texts = (rule.__doc__ or "", *getattr(rule, "cites", ()))
        is_measured = "Measured" in " ".join(texts)
        assert citations.list_of_rule(rule) or is_measured, rule.__name__


def apply_every_rule(values: Values, gpus: int | None, output: Path) -> None:
    list(registry.apply(values))
    context = Context(
        values=values,
        deepspeed=ZERO3,
        gpus=gpus,
        per_device=2,
        accumulation=2,
        packages={},
        machine=THIS_MACHINE,
        output=output,
    )
    list(registry.apply_in(context))


@pytest.mark.parametrize("script", BASES)
def test_no_rule_needs_a_field_that_another_release_may_lack(script: str, tmp_path: Path) -> None:
    schema = values_of(script, {}).schema
    for name in schema.fields:
        fields = dict(schema.fields)
        del fields[name]
        values = Values(replace(schema, fields=fields), {})
        for gpus in (None, 0, 1, 8):
            apply_every_rule(values, gpus, tmp_path)


@pytest.mark.parametrize("script", BASES)
@pytest.mark.parametrize("gpus", [None, 0, 1, 8])
def test_no_rule_breaks_whatever_is_written(script: str, gpus: int | None, tmp_path: Path) -> None:
    schema = values_of(script, {}).schema
    fields = {}
    for name, field in schema.fields.items():
        fields[name] = replace(field, default=None, default_text="f()")
    unknown_defaults = replace(schema, fields=fields)

    for arguments in generate(schema, 100, seed=3):
        apply_every_rule(Values(schema, arguments), gpus, tmp_path)
        apply_every_rule(Values(unknown_defaults, arguments), gpus, tmp_path)


LARGE = ["a", 20_000_000]
SFT_LARGE = {"dataset_mixer_list": LARGE}
# sets whose sizes are known
TULU = {"dataset_mixer_list": ["allenai/tulu-3-sft-mixture", "1.0", "b", "0.5"]}
OUTLASTS = ["tokenising-outlasts warning timeout"]


@pytest.mark.parametrize(
    ("script", "args", "gpus", "cpus", "expected"),
    [
        ("sft", SFT_LARGE, 8, 16, OUTLASTS),
        ("dpo", {"mixer_list": LARGE}, 8, 16, OUTLASTS),
        ("sft", {**TULU, "timeout": 60}, 8, 64, OUTLASTS),
        # a single process waits for nobody
        ("sft", SFT_LARGE, 1, 16, []),
        ("sft", {**SFT_LARGE, "timeout": 36000}, 8, 16, []),
        ("sft", {**SFT_LARGE, "cache_dataset_only": True}, 8, 16, []),
        ("sft", {"dataset_mixer_list": ["a", "1.0"]}, 8, 1, []),
        ("sft", TULU, 8, 64, []),
    ],
)
def test_tokenising_that_outlasts_the_timeout(
    script: str, args: dict[str, Any], gpus: int, cpus: int, expected: list[str]
) -> None:
    assert summarise_run(script, args, gpus=gpus, machine=Machine(cpus=cpus)) == expected


def test_tokenising_on_a_machine_that_is_not_known() -> None:
    assert summarise_run("sft", SFT_LARGE) == OUTLASTS


FULL_SHARD = {"fsdp": "full_shard"}


@pytest.mark.parametrize(
    ("script", "args", "processes", "expected"),
    [
        ("sft", {"sequence_parallel_size": 3}, 8, ["sequence-split error sequence_parallel_size"]),
        ("sft", {"sequence_parallel_size": 2}, 1, ["sequence-split error sequence_parallel_size"]),
        ("sft", {"sequence_parallel_size": 4}, 8, []),
        ("sft", {"sequence_parallel_size": 3, "cache_dataset_only": True}, 8, []),
        ("sft", {}, 1, []),
        ("dpo", {}, 1, []),
        ("trl-sft", FULL_SHARD, 1, ["fsdp-alone error fsdp"]),
        ("trl-dpo", FULL_SHARD, 1, ["fsdp-alone error fsdp"]),
        ("trl-sft", FULL_SHARD, 2, []),
        ("trl-sft", {**FULL_SHARD, "fsdp_config": {"xla": True}}, 1, []),
        ("trl-sft", {}, 1, []),
    ],
)
def test_rules_that_know_the_number_of_processes(
    script: str, args: dict[str, Any], processes: int, expected: list[str]
) -> None:
    split = Split(processes=processes, devices=processes)
    lines = summarise_run(script, args, gpus=processes, split=split)
    codes = ("sequence-split", "fsdp-alone")
    assert [line for line in lines if line.startswith(codes)] == expected


@pytest.mark.parametrize(
    ("tracks", "trackers", "packages", "expected"),
    [
        (True, ["wandb", "nosuch"], None, ["report-unknown error report_to"]),
        (False, ["wandb", "nosuch"], None, []),
        (True, ["wandb", "mlflow"], {"wandb": "1", "mlflow": "3"}, []),
        # one that is not installed is left out, and nothing says so
        (True, ["wandb", "mlflow"], {"wandb": "1"}, ["report-missing warning report_to"]),
        (True, ["all"], {}, []),
    ],
)
def test_trackers_of_open_instruct(
    tracks: bool, trackers: list[str], packages: Any, expected: list[str]
) -> None:
    args = {"with_tracking": tracks, "wandb_entity": "me", "report_to": trackers}
    environ = {"HOME": "/nonexistent", "WANDB_API_KEY": "k"}
    assert summarise_run("sft", args, environ=environ, packages=packages) == expected


@pytest.mark.parametrize(
    ("script", "key"), [("sft", "use_qlora"), ("dpo", "dpo_use_paged_optimizer")]
)
def test_optimizers_of_open_instruct_need_bitsandbytes(script: str, key: str) -> None:
    args = {key: True}
    assert "optim-missing" in codes_of_run(script, args, packages={})
    assert "optim-missing" not in codes_of_run(script, args, packages={"bitsandbytes": "1"})
    assert "optim-missing" not in codes_of_run(script, args)
