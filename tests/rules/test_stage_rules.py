"""Rules that know DeepSpeed, the machine, the model and the folder: where they speak, where not."""

import ast
import itertools
import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from argument_sets import generate
from conftest import NO_PACKAGES, Write
from saved import loadable
from test_rules import BASES, HERE, values_of

from launcher.artifacts import model_config
from launcher.config.keys import DEEPSPEED
from launcher.errors import Finding
from launcher.rules import model as model_rules
from launcher.rules import registry
from launcher.rules.context import Context, Machine, Split
from launcher.stage.options import deepspeed_file
from launcher.upstream import citations
from launcher.upstream.schema import Values
from launcher.upstream.trainers import BACKENDS

ZERO2 = json.loads(deepspeed_file("zero2").read_text(encoding="utf-8"))
ZERO3 = json.loads(deepspeed_file("zero3").read_text(encoding="utf-8"))
BARE = {
    "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
}  # fmt: skip
TRAINER = {"accelerate": "1.12.0", "flash-attn": "2.8.3", "liger-kernel": "0.7.0"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the models and files of these tests are named relative to their own folder
    monkeypatch.chdir(tmp_path)


def context(script: str, args: dict[str, Any], **known: Any) -> Context:
    known.setdefault("environ", {"HOME": str(Path.cwd() / "home")})
    if "gpus" not in known:
        # once the GPUs are known, it may be a default that was filled in
        known.setdefault("named_precision", known.get("mixed_precision"))
    return Context(values=values_of(script, args), **known)


def found(script: str, args: dict[str, Any], **known: Any) -> list[Finding]:
    # what a release of DeepSpeed does to gradients: tests/probe/test_gradients.py
    told = registry.apply_in(context(script, args, **known))
    # that data on the hub were not looked at is said of every set of arguments
    return [finding for finding in told if finding.code not in ("overlap-corrupts", "unseen-data")]


def one(script: str, args: dict[str, Any], **known: Any) -> tuple[str, str, str]:
    """The code, severity and key of the only finding."""
    (finding,) = found(script, args, **known)
    assert finding.layer == "run"
    assert finding.message
    return finding.code, finding.severity, finding.key or ""


def model(write: Write, **config: Any) -> str:
    """A local model folder with this config; its name."""
    write("model/config.json", json.dumps(config))
    return "model"


@pytest.mark.parametrize("script", ["sft", "dpo", "trl-sft", "trl-dpo"])
def test_what_ships_is_quiet(script: str) -> None:
    for name, gpus in itertools.product((None, *DEEPSPEED), (None, 0, 1, 8)):
        file: Any = None if name is None else json.loads(deepspeed_file(name).read_text())
        known: dict[str, Any] = {"deepspeed": file, "gpus": gpus, "packages": TRAINER, "machine": HERE}
        known |= {"per_device": 4, "accumulation": 4, "mixed_precision": "bf16"}
        assert found(script, {}, **known) == []


SILENT_ON_PASSES = {k: v for k, v in BARE.items() if k != "gradient_accumulation_steps"}
FILES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({**BARE, "optimizer": {"type": "AdamW"}}, {}, "deepspeed-optimizer error"),
    ({**BARE, "scheduler": {"type": "WarmupLR"}}, {}, "deepspeed-optimizer error"),
    ({**BARE, "zero_optimization": {"stage": 3}}, {}, "zero3-unsaved error"),
    ({"train_micro_batch_size_per_gpu": 1}, {}, "deepspeed-no-zero error"),
    ({"zero_optimization": {"stage": 2}}, {}, "deepspeed-no-batch error"),
    ({"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}, {}, "deepspeed-no-batch error"),
    ({**BARE, "gradient_accumulation_steps": 2}, {"accumulation": 4}, "deepspeed-accumulation warning"),
    (SILENT_ON_PASSES, {"accumulation": 4}, "deepspeed-accumulation warning"),
    ({**BARE, "train_batch_size": 128}, {"gpus": 8, "per_device": 4, "accumulation": 2},
     "deepspeed-batch error"),
    ({**BARE, "fp16": {"enabled": True}}, {"mixed_precision": "bf16"}, "deepspeed-precision error"),
]  # fmt: skip
GOOD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (BARE, {"accumulation": 4, "gpus": 8, "per_device": 4}),
    ({**BARE, "gradient_accumulation_steps": 4}, {"accumulation": 4}),
    ({**BARE, "train_batch_size": 64}, {"gpus": 8, "per_device": 4, "accumulation": 2}),
    ({**BARE, "fp16": {"enabled": True}}, {"mixed_precision": "no"}),
    ({"zero_optimization": {"stage": 2}, "train_batch_size": 64}, {}),
    # on the CPU no file is read
    ({}, {"gpus": 0}),
]


@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_deepspeed_files(script: str) -> None:
    for file, known, expected in FILES:
        told = one(script, {}, deepspeed=file, **known)
        assert (" ".join(told[:2]), told[2]) == (expected, "deepspeed")
    for file, known in GOOD:
        assert found(script, {}, deepspeed=file, **known) == []


@pytest.mark.parametrize("odd", [None, [], "x", 1e999])
def test_odd_files_and_configs_are_no_crash(write: Write, odd: Any) -> None:
    known: dict[str, Any] = {"gpus": 8, "per_device": 1, "accumulation": 2, "mixed_precision": "bf16"}
    nested = {"zero_optimization": {"stage": odd}, "optimizer": {"params": odd}}
    keys = (*BARE, "gradient_clipping", "fp16", "bf16", "optimizer", "scheduler", "checkpoint")
    for key, (script, clips) in itertools.product(keys, (("sft", "clip_grad_norm"), ("trl-sft", "max_grad_norm"))):
        for file in ({**BARE, key: odd}, {**BARE, **nested}, {key: odd}):
            assert isinstance(found(script, {clips: 0.5}, deepspeed=file, **known), list)
    args = {"model_name_or_path": "model", "use_lora": True, "use_liger_kernel": True, "max_seq_length": 8}
    whole = {"model_type": "qwen2", "max_position_embeddings": 4, "rope_scaling": {"factor": odd}}
    for key in (*whole, "attention_bias", "num_attention_heads", "rope_parameters", "text_config"):
        write("model/config.json", json.dumps({**whole, key: odd}))
        assert isinstance(found("sft", args, deepspeed=BARE, **known), list)


@pytest.mark.parametrize(("script", "key"), [("sft", "clip_grad_norm"), ("dpo", "max_grad_norm")])
def test_clipping_is_deepspeeds(script: str, key: str) -> None:
    expected = ("clipping-unread", "warning", f"args.{key}")
    assert one(script, {key: 0.5}, deepspeed=ZERO2) == expected
    assert one(script, {key: 0.5}, deepspeed=BARE) == expected
    assert found(script, {key: 1.0}, deepspeed=ZERO2) == []
    assert found(script, {key: 0.5}, deepspeed={**BARE, "gradient_clipping": 0.5}) == []
    assert found(script, {key: 0.5}) == []
    assert found(script, {key: 0.5}, deepspeed=ZERO2, gpus=0) == []
    assert found(script, {}, deepspeed=BARE) == []
    # what is not above 0 asks for none
    for none in (-1, 0):
        assert one(script, {key: none}, deepspeed=ZERO2) == expected
        assert found(script, {key: none}, deepspeed={**ZERO2, "gradient_clipping": None}) == []
    if script == "dpo":
        assert one(script, {"zero_stage": 3, key: -1}) == expected


def test_zero_stage_and_precision_beside_a_file() -> None:
    expected = ("two-zero-stages", "warning", "args.zero_stage")
    assert one("dpo", {"zero_stage": 3}, deepspeed=ZERO2) == expected
    assert one("dpo", {"zero_stage": 2}, deepspeed=ZERO2) == expected
    (differs,) = found("dpo", {"zero_stage": 3}, deepspeed=ZERO2)
    (agrees,) = found("dpo", {"zero_stage": 2}, deepspeed=ZERO2)
    assert "stage 2 is not 3" in differs.message
    assert "is not" not in agrees.message
    assert found("dpo", {"zero_stage": 3}) == []
    # nothing of the file matters then
    assert one("dpo", {"zero_stage": 2}, deepspeed={}) == expected
    # upstream loads bfloat16
    told = one("sft", {}, mixed_precision="fp16", deepspeed=ZERO2)
    assert told == ("fp16-over-bf16", "warning", "mixed_precision")


@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_quantised_models_and_deepspeed(script: str) -> None:
    args = {"use_qlora": True, "use_lora": True}
    assert one(script, args, deepspeed=ZERO3) == ("qlora-deepspeed", "error", "args.use_qlora")
    assert one(script, args, deepspeed=ZERO2) == ("qlora-deepspeed", "warning", "args.use_qlora")
    assert found(script, args, gpus=1) == []
    assert found(script, {"use_lora": True}, deepspeed=ZERO3) == []


@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_lora_and_frozen_biases(write: Write, script: str) -> None:
    """The pin leaves a group without a trained parameter out; what crashed before is in test_behaviour_rules.py."""
    for kind, biased in (("qwen2", None), ("llama", True), ("qwen3", None)):
        name = model(write, model_type=kind, attention_bias=biased)
        args = {"use_lora": True, "model_name_or_path": name}
        for deepspeed in (ZERO2, ZERO3, None):
            assert found(script, args, deepspeed=deepspeed) == []


def test_lora_is_not_checkpointed_under_zero_3() -> None:
    # seen with DeepSpeed 0.18.9 and PEFT 0.21 on two processes: CheckpointError; full training is
    # fine
    args = {"use_lora": True, "gradient_checkpointing": True}
    told = ("lora-zero3-checkpointing", "error", "args.gradient_checkpointing")
    assert one("sft", args, deepspeed=ZERO3) == told
    assert found("sft", {**args, "gradient_checkpointing": False}, deepspeed=ZERO3) == []
    assert found("sft", {**args, "use_lora": False}, deepspeed=ZERO3) == []
    assert found("sft", args, deepspeed=ZERO2) == []
    # dpo_tune_cache.py::main[if args.use_lora] checkpoints no LoRA
    assert found("dpo", {"use_lora": True, "activation_memory_budget": 0.5}, deepspeed=ZERO3) == []


LIGER = {"use_liger_kernel": True}


@pytest.mark.parametrize("script", ["sft", "dpo", "trl-sft", "trl-dpo"])
def test_liger_and_models_that_it_does_not_know(write: Write, script: str) -> None:
    args = {**LIGER, "model_name_or_path": model(write, model_type="gpt2")}
    crashes = not script.startswith("trl")
    expected = ("liger-unknown-model", "warning", "args.use_liger_kernel")
    assert one(script, args) == expected
    # a later release may know it
    assert one(script, args, packages={"liger-kernel": "0.9.0"}) == expected
    told = one(script, args, packages={"liger-kernel": "0.7.0"})
    assert told[1] == ("error" if crashes else "warning")
    model(write, model_type="qwen2")
    assert found(script, args, packages=TRAINER) == []


@pytest.mark.parametrize("script", ["sft", "dpo", "trl-sft", "trl-dpo"])
def test_liger_needs_a_gpu(script: str) -> None:
    assert one(script, LIGER, gpus=0) == ("liger-on-cpu", "error", "args.use_liger_kernel")
    assert found(script, LIGER, gpus=0, environ={"TRITON_INTERPRET": "1"}) == []


def test_the_models_that_liger_knows() -> None:
    try:
        installed = distribution("liger-kernel")
    except PackageNotFoundError:
        pytest.skip(f"{NO_PACKAGES}: liger-kernel is not installed")
    if not installed.version.startswith("0.7."):
        pytest.skip(f"{NO_PACKAGES}: liger-kernel {installed.version} is not 0.7")
    source = installed.locate_file("liger_kernel/transformers/monkey_patch.py")
    tree = ast.parse(Path(str(source)).read_text(encoding="utf-8"))
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_TYPE_TO_APPLY_LIGER_FN"
    )
    assert isinstance(table, ast.Dict)
    assert {ast.literal_eval(key) for key in table.keys if key} == model_rules.LIGER_MODELS


@pytest.mark.parametrize("setting", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_a_model_in_the_hubs_cache(write: Write, tmp_path: Path, setting: str) -> None:
    below = {
        "HF_HOME": "hub/", "XDG_CACHE_HOME": "huggingface/hub/", "HOME": ".cache/huggingface/hub/",
    }  # fmt: skip
    folder = f"place/{below.get(setting, '')}models--org--name"
    write(f"{folder}/refs/main", "abc123\n")
    write(f"{folder}/snapshots/abc123/config.json", '{"model_type": "gpt2"}')
    args = {**LIGER, "model_name_or_path": "org/name"}
    environ = {setting: str(tmp_path / "place")}
    assert one("sft", args, environ=environ)[0] == "liger-unknown-model"
    assert found("sft", args, environ={"HOME": str(tmp_path / "nobody")}) == []
    # another revision is another model
    assert found("sft", {**args, "model_revision": "v2"}, environ=environ) == []
    assert one("sft", {**args, "model_revision": "abc123"}, environ=environ)[0] == "liger-unknown-model"


def test_broken_configs_are_nothing(write: Write) -> None:
    texts: tuple[str | bytes, ...] = ("", "[]", "[" * 5000, b"\xff\xfe", '{"model_type": 5}')
    for text in texts:
        write("model/config.json", text)
        assert found("sft", {**LIGER, "model_name_or_path": "model"}) == []
    for name in ("", "x" * 5000, "a\0b"):
        assert model_config.read(name, {}) == {}


def test_positions() -> None:
    original = "original_max_position_embeddings"
    for config, reach in (
        ({"max_position_embeddings": 2048, "rope_scaling": None}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": "many"}, None),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        # the original stands in the config: stretched four times
        ({"max_position_embeddings": 32768, "rope_scaling": {"factor": 4.0, original: 32768}}, 131072),
        # the stretched length stands there already
        ({"max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, original: 8192}}, 131072),
    ):
        assert model_rules.positions(config) == reach


@pytest.mark.parametrize(
    ("script", "key"), [("sft", "max_seq_length"), ("dpo", "max_seq_length"), ("trl-sft", "max_length")]
)
def test_rows_longer_than_the_model(write: Write, script: str, key: str) -> None:
    args = {"model_name_or_path": model(write, model_type="llama", max_position_embeddings=2048)}
    told = one(script, {**args, key: 4096})
    assert told == ("beyond-positions", "warning", f"args.{key}")
    assert found(script, {**args, key: 2048}) == []
    assert found(script, args) == []


SLOW, ALONE = "packing-without-flash", "packing-of-one"
PACKING: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("sft", {}, {"packages": {}}, SLOW), ("dpo", {}, {"packages": {}}, SLOW),
    ("dpo", {"attn_implementation": "torch"}, {}, SLOW), ("sft", {}, {"packages": TRAINER}, None),
    ("sft", {}, {"packages": {"flash-attn-3": "3.0.0"}}, None), ("sft", {}, {}, None),
    ("sft", {}, {"packages": {}, "gpus": 0}, None),
    ("dpo", {"attn_implementation": "flash_2"}, {"packages": TRAINER}, None),
    ("sft", {}, {"per_device": 1}, ALONE), ("sft", {}, {"per_device": 1, "gpus": 0}, ALONE),
    ("sft", {"packing": False}, {"per_device": 1}, None), ("sft", {}, {"per_device": 2}, None),
    # of DPO one row is a pair
    ("dpo", {}, {"per_device": 1}, None),
]  # fmt: skip


def test_packing() -> None:
    for script, args, known, code in PACKING:
        told = [(f.code, f.severity, f.key) for f in found(script, {"packing": True, **args}, **known)]
        assert told == ([(code, "warning", "args.packing")] if code else []), (args, known)


@pytest.mark.parametrize("script", ["sft", "dpo", "trl-sft"])
def test_a_model_that_is_not_here(write: Write, script: str) -> None:
    expected = ("missing-model", "error", "args.model_name_or_path")
    for name in ("build/demo/model", "/no/such/model", "./model", "~/model"):
        assert one(script, {"model_name_or_path": name}, machine=HERE) == expected
        # an earlier stage may still make it
        assert found(script, {"model_name_or_path": name}) == []
    assert found(script, {"model_name_or_path": "org/name"}, machine=HERE) == []
    told = one(script, {"model_name_or_path": "org/name"}, machine=HERE, environ={"HF_HUB_OFFLINE": "1"})
    assert told == expected
    model(write, model_type="llama")
    loadable(Path("model"))
    assert found(script, {"model_name_or_path": "./model"}, machine=HERE) == []
    # one of its files
    assert one(script, {"model_name_or_path": "model/config.json"}, machine=HERE) == expected
    for key in ("config_name", "tokenizer_name_or_path") if script != "trl-sft" else ():
        args = {"model_name_or_path": "./model", key: "./model"}
        assert found(script, args, machine=HERE) == []
        told = one(script, {**args, key: "./other"}, machine=HERE)
        assert told == ("missing-model", "error", f"args.{key}")


WANDB = {"with_tracking": True, "report_to": "wandb"}
LOGIN = "machine api.wandb.ai login user password secret\n"
# what ~/.netrc and ~/mine hold, the environment, and whether a key is missed
KEYS: list[tuple[str, dict[str, str], bool]] = [
    ("", {}, True), ("", {"WANDB_API_KEY": "k"}, False), (LOGIN.replace("api.wandb.ai", "example.org"), {}, True),
    (LOGIN, {}, False), (LOGIN, {"WANDB_BASE_URL": "https://wandb.example.org"}, True), ("machine {\n", {}, True),
    ("", {"NETRC": "mine"}, False), ("", {"WANDB_MODE": "offline"}, True), ("", {"WANDB_MODE": "disabled"}, True),
]  # fmt: skip


@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_tracking_needs_a_key(write: Write, tmp_path: Path, script: str) -> None:
    write("mine", LOGIN)
    for netrc, more, missed in KEYS:
        write(".netrc", netrc)
        environ = {"HOME": str(tmp_path), **more}
        told = [(f.code, f.severity, f.key) for f in found(script, WANDB, environ=environ)]
        assert told == [("no-wandb-key", "warning", "args.with_tracking")] * missed
        assert found(script, {}, environ=environ) == []
    # offline it is still asked who is logged in
    assert found(script, {**WANDB, "wandb_entity": "me"}, environ=environ) == []
    assert one(script, WANDB, environ={"HOME": str(tmp_path)}, machine=HERE)[1] == "error"


@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_pushing_needs_a_token(write: Write, tmp_path: Path, script: str) -> None:
    args, home = {"push_to_hub": True}, {"HOME": str(tmp_path)}
    expected = ("no-hub-token", "warning", "args.push_to_hub")
    assert one(script, args, environ=home) == expected
    assert one(script, args, environ=home, machine=HERE)[1] == "error"
    assert one(script, args, environ={**home, "HF_TOKEN": "t", "HF_HUB_OFFLINE": "1"}) == expected
    assert found(script, args, environ={**home, "HF_TOKEN": "t"}) == []
    # the default, until it comes to a run
    assert found(script, {"push_to_hub": None}, environ=home) == []
    assert one(script, {"push_to_hub": None}, environ=home, machine=HERE)[1] == "error"
    write(".cache/huggingface/token", "t")
    assert found(script, args, environ=home) == []
    (asked,) = found(script, args, environ={})
    (saved,) = found(script, {**args, "hf_entity": "me"}, environ={})
    assert "before anything is trained" in asked.message
    assert "once the model is trained" in saved.message


def outcome(folder: Path, script: str = "sft", **args: Any) -> list[str]:
    """What is said of an output folder."""
    told = found(script, args, output=folder, machine=HERE)
    assert all((f.severity, f.key) == ("warning", "args.output_dir") for f in told)
    return [f"{f.code}: {f.message}" for f in told]


@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_checkpoints_that_launch_did_not_write(write: Write, tmp_path: Path, script: str) -> None:
    output = tmp_path / "out"
    for name in ("out/notes/x", "out/step_notes.txt", "out/step_500/x"):
        write(name, "")
    assert [outcome(path, script) for path in (output, output / "missing", Path("a\0b"))] == [[], [], []]
    write("out/step_250/COMPLETED", "COMPLETED")
    (told,) = outcome(output, script)
    assert told.startswith("foreign-checkpoints") and "step_250" in told
    assert outcome(output, script, cache_dataset_only=True) == []


@pytest.mark.parametrize("script", ["sft", "dpo"])
@pytest.mark.parametrize("names", [["config.json", "model.safetensors"], ["adapter_config.json", "adapter_model.bin"]])
def test_a_folder_with_a_finished_model(write: Write, tmp_path: Path, script: str, names: list[str]) -> None:
    write(f"out/{names[0]}", "{}")
    assert outcome(tmp_path / "out", script) == []
    write(f"out/{names[1]}", "x")
    (told,) = outcome(tmp_path / "out", script)
    assert told.startswith("finished-output") and "from zero" in told
    write("out/step_5/COMPLETED", "COMPLETED")
    assert "step_5" in outcome(tmp_path / "out", script)[-1]


def test_every_rule_says_where_upstream_says_so() -> None:
    for backend, stage in itertools.product(BACKENDS, ("sft", "dpo")):
        for rule in (*registry.of_stage(backend, stage), *registry.of_script(backend, stage)):
            is_measured = "Measured" in " ".join((rule.__doc__ or "", *getattr(rule, "cites", ())))
            assert citations.of_rule(rule) or is_measured, rule.__name__


@pytest.mark.parametrize("script", BASES)
def test_no_rule_breaks_whatever_is_given_or_known(script: str, tmp_path: Path) -> None:
    whole = values_of(script, {}).schema
    unknown = {k: replace(f, default=None, default_text="f()") for k, f in whole.fields.items()}
    lacking = [{k: v for k, v in whole.fields.items() if k != name} for name in whole.fields]
    given = [{}] * len(lacking) + list(generate(whole, 300, seed=3)) * 2
    fields = [*lacking, *[whole.fields] * 300, *[unknown] * 300]
    known: dict[str, Any] = {"deepspeed": ZERO3, "packages": {}, "environ": {}, "machine": HERE, "output": tmp_path}
    for number, (one, arguments) in enumerate(zip(fields, given, strict=True)):
        values = Values(replace(whole, fields=one), {k: v for k, v in arguments.items() if k in one})
        assert isinstance(list(registry.apply(values)), list)
        for gpus in (None, 0, 8) if number % 2 else (1,):
            list(registry.apply_in(Context(values=values, gpus=gpus, per_device=2, accumulation=2, **known)))


def test_tokenising_that_outlasts_the_timeout() -> None:
    args = {"dataset_mixer_list": ["a", 20_000_000]}
    expected = ("tokenising-outlasts", "warning", "args.timeout")
    assert one("sft", args, gpus=8, machine=Machine(cpus=16)) == expected
    assert one("sft", args) == expected
    assert one("dpo", {"mixer_list": ["a", 20_000_000]}, gpus=8, machine=Machine(cpus=16)) == expected
    assert found("sft", args, gpus=1, machine=Machine(cpus=16)) == []
    assert found("sft", {**args, "timeout": 36000}, gpus=8, machine=Machine(cpus=16)) == []
    assert found("sft", {**args, "cache_dataset_only": True}, gpus=8, machine=Machine(cpus=16)) == []
    assert found("sft", {"dataset_mixer_list": ["a", "1.0"]}, gpus=8, machine=Machine(cpus=1)) == []
    # sets whose sizes are known
    tulu = {"dataset_mixer_list": ["allenai/tulu-3-sft-mixture", "1.0", "b", "0.5"]}
    assert found("sft", tulu, gpus=8, machine=Machine(cpus=64)) == []
    assert one("sft", {**tulu, "timeout": 60}, gpus=8, machine=Machine(cpus=64))[0] == "tokenising-outlasts"


@pytest.mark.parametrize(
    ("script", "args", "processes", "expected"),
    [
        ("sft", {"sequence_parallel_size": 3}, 8, [("sequence-split", "args.sequence_parallel_size")]),
        ("sft", {"sequence_parallel_size": 2}, 1, [("sequence-split", "args.sequence_parallel_size")]),
        ("sft", {"sequence_parallel_size": 4}, 8, []),
        ("sft", {"sequence_parallel_size": 3, "cache_dataset_only": True}, 8, []),
        ("sft", {}, 1, []),
        ("dpo", {}, 1, []),
        ("trl-sft", {"fsdp": "full_shard"}, 1, [("fsdp-alone", "args.fsdp")]),
        ("trl-dpo", {"fsdp": "full_shard"}, 1, [("fsdp-alone", "args.fsdp")]),
        ("trl-sft", {"fsdp": "full_shard"}, 2, []),
        ("trl-sft", {"fsdp": "full_shard", "fsdp_config": {"xla": True}}, 1, []),
        ("trl-sft", {}, 1, []),
    ],
)
def test_rules_that_know_the_number_of_processes(
    script: str, args: dict[str, Any], processes: int, expected: list[tuple[str, str]]
) -> None:
    split = Split(processes=processes, devices=processes)
    findings = found(script, args, gpus=processes, split=split)
    told = [(finding.code, finding.key) for finding in findings]
    assert [one for one in told if one[0] in ("sequence-split", "fsdp-alone")] == expected


def test_trackers_and_optimizers_of_open_instruct() -> None:
    tracked = {"with_tracking": True, "wandb_entity": "me", "report_to": ["wandb", "nosuch"]}
    environ = {"HOME": "/nonexistent", "WANDB_API_KEY": "k"}
    assert one("sft", tracked, environ=environ) == ("report-unknown", "error", "args.report_to")
    assert found("sft", {**tracked, "with_tracking": False}, environ=environ) == []
    # one that is not installed is left out, and nothing says so
    tracked["report_to"] = ["wandb", "mlflow"]
    installed = {"wandb": "1"}
    told = one("sft", tracked, environ=environ, packages=installed)
    assert told == ("report-missing", "warning", "args.report_to")
    assert found("sft", tracked, environ=environ, packages={**installed, "mlflow": "3"}) == []
    assert found("sft", {**tracked, "report_to": ["all"]}, environ=environ, packages={}) == []
    for script, args in (("sft", {"use_qlora": True}), ("dpo", {"dpo_use_paged_optimizer": True})):
        assert "optim-missing" in {finding.code for finding in found(script, args, packages={})}
        assert "optim-missing" not in {finding.code for finding in found(script, args, packages={"bitsandbytes": "1"})}
        assert "optim-missing" not in {finding.code for finding in found(script, args)}
