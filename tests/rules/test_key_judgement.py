"""Keys that do not fit each other, the model or the data: what `launch validate-config` says."""

import importlib.util
import json
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import NO_PACKAGES
from rule_findings import QWEN2
from saved import tensors

from launcher.cli.main import main
from launcher.errors import Exit

MODEL = {**QWEN2, "dtype": "float32"}
TOKENS = MODEL["vocab_size"]
Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A stage and the only finding about it, as `code severity key`; none if empty."""

    args: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    said: str = ""
    stage: str = "sft"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # models and data are named relative to the folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    make_data()


def make_model(
    folder: str = "model",
    *,
    added: str = "",
    eos_token: str = "<eos>",
    pad_token: str = "<pad>",
    chat_template: str = "{{ messages }}",
    **config: Any,
) -> None:
    """A tied model of 100 rows, whose tokenizer has as many tokens and perhaps an added one."""
    path = Path(folder)
    path.mkdir()
    tokenizer = {"eos_token": eos_token, "pad_token": pad_token}
    (path / "config.json").write_text(json.dumps({**MODEL, **config}))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_of(added)))
    (path / "chat_template.jinja").write_text(chat_template)
    weight = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({"model.embed_tokens.weight": weight}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def tokenizer_of(added: str) -> dict[str, Any]:
    words = ["<pad>", "<eos>"]
    for index in range(TOKENS - len(words)):
        words.append(f"word{index}")
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer: dict[str, Any] = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    tokenizer["added_tokens"] = []
    if added:
        tokenizer["added_tokens"].append({"id": TOKENS, "content": added})
    return tokenizer


def make_data(name: str = "data/train.jsonl") -> None:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    question = {"role": "user", "content": "a?"}
    chosen = [question, {"role": "assistant", "content": "b"}]
    rejected = [question, {"role": "assistant", "content": "c"}]
    row = {"messages": chosen, "chosen": chosen, "rejected": rejected}
    path.write_text(json.dumps(row) + "\n")


def summarise(capsys: Capture, stage: Mapping[str, Any], codes: tuple[str, ...]) -> str:
    """The findings with these codes, each as `code severity key`."""
    Path("stage.yaml").write_text(yaml.safe_dump(dict(stage)))
    main(["validate-config", "stage.yaml", "--format", "json"])
    lines = []
    for finding in json.loads(capsys.readouterr().out)["findings"]:
        key = (finding["key"] or "").removeprefix("args.")
        if finding["code"] in codes:
            lines.append(f"{finding['code']} {finding['severity']} {key}")
    return ", ".join(lines)


def printed(capsys: Capture, stage: Mapping[str, Any]) -> str:
    Path("stage.yaml").write_text(yaml.safe_dump(dict(stage)))
    main(["validate-config", "stage.yaml"])
    return capsys.readouterr().err


def trl(case: Case, *, stage: str = "", **args: Any) -> dict[str, Any]:
    """The case's stage for TRL; `args` are those that all cases of a table share."""
    args |= {"model_name_or_path": "model", "dataset_name": "data", "output_dir": "out"}
    return {
        "stage": stage or case.stage,
        "backend": "trl",
        "deepspeed": "none",
        "batch": {"global": 8, "per_device": 2},
        **case.options,
        "args": {**args, **case.args},
    }


def open_instruct(case: Case, *, stage: str = "", **args: Any) -> dict[str, Any]:
    stage = stage or case.stage
    data = "mixer_list" if stage == "dpo" else "dataset_mixer_list"
    args |= {
        "model_name_or_path": "model",
        data: ["data/train.jsonl", "1.0"],
        "output_dir": "out",
        "push_to_hub": False,
        "try_launch_beaker_eval_jobs": False,
        "checkpointing_steps": "100",
    }
    return {
        "stage": stage,
        "deepspeed": "zero2",
        "batch": {"global": 8, "per_device": 2},
        **case.options,
        "args": {**args, **case.args},
    }


FP16 = ("fp16-weights",)
FP16_REFUSED = "fp16-weights error fp16"


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize(
    "case",
    [
        Case(args={"dtype": "float16"}, said=FP16_REFUSED),
        Case(args={"dtype": "bfloat16"}, said=FP16_REFUSED),
        Case(args={"model_init_kwargs": {"dtype": "bfloat16"}}, said=FP16_REFUSED),
        Case(args={"dtype": "auto", "model_name_or_path": "half"}, said=FP16_REFUSED),
        Case(args={"dtype": "auto", "model_name_or_path": "unsaid"}, said=FP16_REFUSED),
        # `modules_to_save` keep the model's format; adapters of quantised models have bfloat16
        Case(
            args={"dtype": "float16", "use_peft": True, "lora_modules_to_save": ["norm"]},
            said=FP16_REFUSED,
        ),
        Case(args={"use_peft": True, "load_in_4bit": True}, said=FP16_REFUSED),
        # float32 is the default
        Case(),
        Case(args={"dtype": "auto"}),
        Case(args={"model_init_kwargs": {"dtype": "float32"}, "dtype": "float16"}),
        Case(args={"dtype": "float16", "use_peft": True}),
        Case(args={"fp16": False, "dtype": "bfloat16"}),
        Case(args={"fp16": False, "bf16": True, "use_peft": True, "load_in_4bit": True}),
        # these engines keep copies in float32, and scale by themselves
        Case(args={"dtype": "float16"}, options={"deepspeed": "zero2"}),
        Case(args={"dtype": "float16", "fsdp": "full_shard"}),
    ],
)
def test_fp16_trains_weights_of_32_bits(capsys: Capture, case: Case, stage: str) -> None:
    make_model()
    make_model("half", dtype="float16")
    make_model("unsaid", dtype=None)
    assert summarise(capsys, trl(case, stage=stage, fp16=True), FP16) == case.said


OVER_BF16 = ("fp16-over-bf16",)


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize(
    "case",
    [
        Case(options={"deepspeed": "none"}, said="fp16-over-bf16 error mixed_precision"),
        # DeepSpeed casts the model, and adapters are in float32
        Case(said="fp16-over-bf16 warning mixed_precision"),
        Case(
            options={"deepspeed": "none"},
            args={"use_lora": True},
            said="fp16-over-bf16 warning mixed_precision",
        ),
        Case(options={"deepspeed": "none", "mixed_precision": "bf16"}),
    ],
)
def test_open_instruct_loads_bfloat16(capsys: Capture, case: Case, stage: str) -> None:
    make_model()
    content = open_instruct(case, stage=stage)
    content.setdefault("mixed_precision", "fp16")
    assert summarise(capsys, content, OVER_BF16) == case.said


ROUNDED = ("steps-rounded",)
BF16 = {"dtype": "bfloat16"}
SMALL = {**BF16, "learning_rate": 5e-7}


@pytest.mark.parametrize(
    "case",
    [
        Case(args=SMALL, said="steps-rounded warning dtype"),
        Case(args=BF16, stage="dpo", said="steps-rounded warning dtype"),  # its default is 1e-6
        Case(
            args={"dtype": "auto", "model_name_or_path": "own", "learning_rate": 5e-7},
            said="steps-rounded warning dtype",
        ),
        Case(
            args={"model_init_kwargs": BF16, "learning_rate": 5e-7},
            said="steps-rounded warning model_init_kwargs",
        ),
        Case(
            args={**SMALL, "use_peft": True, "lora_modules_to_save": ["norm"]},
            said="steps-rounded warning dtype",
        ),
        Case(args=BF16, said="steps-rounded warning dtype"),  # 2e-5
        Case(args={**BF16, "learning_rate": 5e-5}),
        Case(args={"learning_rate": 5e-7}),
        Case(args={**SMALL, "use_peft": True}),
        Case(args=SMALL, options={"deepspeed": "zero2"}),
        Case(args={**SMALL, "fsdp": "full_shard"}),
        # it keeps what was rounded
        Case(args={**SMALL, "optim": "stable_adamw"}),
    ],
)
def test_steps_that_bfloat16_rounds_away(capsys: Capture, case: Case) -> None:
    make_model()
    make_model("own", dtype="bfloat16")
    assert summarise(capsys, trl(case), ROUNDED) == case.said


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize(
    "case",
    [
        Case(options={"deepspeed": "none"}, said="steps-rounded warning learning_rate"),
        Case(),
        Case(options={"deepspeed": "none"}, args={"use_lora": True}),
        Case(
            options={"deepspeed": "none"},
            args={"learning_rate": 5e-6},
            said="steps-rounded warning learning_rate",
        ),
        Case(options={"deepspeed": "none"}, args={"learning_rate": 5e-5}),
        Case(options={"deepspeed": "none", "num_gpus": 0}),
    ],
)
def test_steps_that_open_instruct_rounds_away(capsys: Capture, case: Case, stage: str) -> None:
    make_model()
    small_steps = open_instruct(case, stage=stage, learning_rate=5e-7)
    assert summarise(capsys, small_steps, ROUNDED) == case.said


def test_the_numbers_are_said(capsys: Capture) -> None:
    make_model()
    message = printed(capsys, trl(Case(args=SMALL)))
    assert "5e-07" in message
    assert "0.00026" in message
    assert "1.0%" in message


ADAPTED = ("lora-on-tied", "lora-targets")
REFUSED_HEAD = "lora-targets error lora_target_modules"
TIED_TARGET = "lora-on-tied warning lora_target_modules"
TIED_COPY = "lora-on-tied warning lora_modules_to_save"


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize(
    "case",
    [
        Case(args={"lora_target_modules": ["q_proj", "lm_head"]}, said=REFUSED_HEAD),
        Case(args={"lora_target_modules": "lm_head"}, said=REFUSED_HEAD),
        Case(
            args={"lora_target_modules": ["q_proj", "lm_head"], "model_name_or_path": "untied"},
            said=REFUSED_HEAD,
        ),
        Case(args={"lora_target_modules": ["q_proj", "embed_tokens"]}, said=TIED_TARGET),
        Case(args={"lora_target_modules": ".*(q_proj|embed_tokens)"}, said=TIED_TARGET),
        Case(args={"lora_modules_to_save": ["lm_head"]}, said=TIED_COPY),
        Case(args={"lora_modules_to_save": ["model.embed_tokens"]}, said=TIED_COPY),
        Case(args={"lora_target_modules": ["q_proj", "v_proj"]}),
        Case(args={"lora_target_modules": "all-linear"}),
        Case(args={"lora_modules_to_save": ["norm"]}),
        Case(
            args={"lora_target_modules": ["q_proj", "embed_tokens"], "model_name_or_path": "untied"}
        ),
        Case(args={"lora_modules_to_save": ["lm_head"], "model_name_or_path": "untied"}),
        # without `use_peft` none of them is read
        Case(args={"use_peft": False, "lora_target_modules": ["q_proj", "lm_head"]}),
    ],
)
def test_lora_on_embedding_and_output_layer(capsys: Capture, case: Case, stage: str) -> None:
    make_model()
    make_model("untied", tie_word_embeddings=False)
    assert summarise(capsys, trl(case, stage=stage, use_peft=True), ADAPTED) == case.said


SPLITS = ("mixer-splits",)
TWO_SETS = ["org/a", "1.0", "org/b", "1.0"]


@pytest.mark.parametrize(
    ("sets", "splits", "said"),
    [
        # one for each set, not one for each entry of the list
        (TWO_SETS, ["train", "train"], ""),
        (TWO_SETS, ["train", "test"], ""),
        (TWO_SETS, ["train", "test", "train"], "mixer-splits error {key}"),
        (TWO_SETS, ["train", "test", "test", "test"], "mixer-splits error {key}"),
        (["org/a", "1.0"], ["train", "test"], "mixer-splits error {key}"),
        (["data/train.jsonl", "1.0"], ["test"], "mixer-splits error {key}[0]"),
        (TWO_SETS, ["train"], ""),
        (["org/a", "1.0"], ["test"], ""),
    ],
)
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_splits_of_open_instruct(
    capsys: Capture, sets: list[str], splits: list[str], said: str, stage: str
) -> None:
    make_model()
    data = "mixer_list" if stage == "dpo" else "dataset_mixer_list"
    case = Case(args={data: sets, f"{data}_splits": splits}, stage=stage)
    assert summarise(capsys, open_instruct(case), SPLITS) == said.format(key=f"{data}_splits")


CLIPPED = ("out-of-range",)


@pytest.mark.parametrize(
    ("stage", "key", "value", "is_said"),
    [
        # DPO's negative limits reverse the gradient: another rule (test_behaviour_rules.py)
        ("sft", "clip_grad_norm", -0.5, True),
        ("dpo", "max_grad_norm", -2, False),
        ("sft", "clip_grad_norm", -1, False),
        ("sft", "clip_grad_norm", 0, False),
        ("dpo", "max_grad_norm", -1, False),
        ("dpo", "max_grad_norm", 1.0, False),
    ],
)
def test_only_minus_one_is_off(
    capsys: Capture, stage: str, key: str, value: float, is_said: bool
) -> None:
    make_model()
    case = Case(args={key: value}, options={"deepspeed": "none"}, stage=stage)
    said = f"out-of-range warning {key}" if is_said else ""
    assert summarise(capsys, open_instruct(case), CLIPPED) == said


EVALUATED = ("eval-without-data", "no-such-split", "conditional-key")


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize(
    "case",
    [
        Case(
            args={"eval_strategy": "steps", "eval_steps": 5},
            said="no-such-split error eval_strategy",
        ),
        Case(
            args={"eval_strategy": "epoch", "dataset_test_split": "validation"},
            said="no-such-split error dataset_test_split",
        ),
        Case(args={"eval_strategy": "epoch", "dataset_test_split": "train"}),
        Case(args={"eval_strategy": "epoch", "dataset_name": "both"}),
        # what the hub has is not known here
        Case(args={"eval_strategy": "epoch", "dataset_name": "org/name"}),
        Case(args={"eval_on_start": True}, said="eval-without-data error eval_on_start"),
        Case(args={"eval_on_start": True, "eval_strategy": "epoch", "dataset_name": "both"}),
        Case(args={"eval_steps": 5}, said="conditional-key warning eval_steps"),
        Case(),
    ],
)
def test_evaluation_needs_a_split(capsys: Capture, case: Case, stage: str) -> None:
    make_model()
    make_data("both/train.jsonl")
    make_data("both/test.jsonl")
    assert summarise(capsys, trl(case, stage=stage), EVALUATED) == case.said


BATCHED = ("impossible-batch",)


@pytest.mark.parametrize(
    ("batch", "args", "is_said"),
    [
        ({"global": 7, "per_device": 2}, {}, True),
        ({"global": 2, "per_device": 4}, {}, True),
        ({"global": 12}, {"per_device_train_batch_size": 8}, True),
        ({"global": 7, "per_device": 7}, {}, False),
        ({"global": 7, "per_device": 1}, {}, False),
        ({"global": 12}, {"per_device_train_batch_size": 4}, False),
        ({"per_device": 3}, {}, False),
    ],
)
@pytest.mark.parametrize("trainer", [trl, open_instruct])
def test_a_batch_that_no_gpus_can_split(
    capsys: Capture, trainer: Any, batch: dict[str, int], args: dict[str, int], is_said: bool
) -> None:
    make_model()
    case = Case(options={"batch": batch}, args=args)
    said = "impossible-batch error batch.global" if is_said else ""
    assert summarise(capsys, trainer(case), BATCHED) == said


BEYOND = ("tokens-beyond-embedding", "embedding-resized")
WARNED = "tokens-beyond-embedding warning model_name_or_path"
REFUSED = "tokens-beyond-embedding error model_name_or_path"


ADDED = {"added": "<new>"}
ADDED_PAD = {"added": "<new>", "pad_token": "<new>"}
ADDED_END = {
    "added": "<end>",
    "eos_token": "<end>",
    "chat_template": "{{ messages }}{{ eos_token }}",
}
UNKNOWN_PAD = {"pad_token": "[PAD]"}
PAD_ID_BEYOND = {"pad_token_id": TOKENS}
# as many models have it: more rows than tokens
MORE_ROWS = {"added": "<new>", "vocab_size": TOKENS + 28}
ROWS_ALONE = {"batch": {"global": 8, "per_device": 1}}


@pytest.mark.parametrize(
    ("model", "case", "said"),
    [
        (ADDED, Case(), WARNED),
        (ADDED_PAD, Case(), REFUSED),
        (UNKNOWN_PAD, Case(), REFUSED),
        (UNKNOWN_PAD, Case(stage="dpo", options=ROWS_ALONE), REFUSED),
        (ADDED_END, Case(), REFUSED),
        (PAD_ID_BEYOND, Case(), REFUSED),
        # no row is padded, or with another token
        (ADDED_PAD, Case(options=ROWS_ALONE), WARNED),
        (ADDED_PAD, Case(args={"pad_token": "<pad>"}), WARNED),
        # tokens of another tokenizer's template get rows
        (ADDED_PAD, Case(args={"chat_template_path": "org/other"}), ""),
        ({}, Case(), ""),
        (MORE_ROWS, Case(), ""),
    ],
)
def test_tokens_without_a_row(capsys: Capture, model: Any, case: Case, said: str) -> None:
    make_model(**model)
    assert summarise(capsys, trl(case), BEYOND) == said


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize(
    ("model", "args", "said"),
    [
        (ADDED, {}, "embedding-resized note model_name_or_path"),
        (ADDED, {"use_lora": True}, "embedding-resized warning model_name_or_path"),
        (PAD_ID_BEYOND, {}, REFUSED),
        ({}, {}, ""),
        (MORE_ROWS, {"use_lora": True}, ""),
    ],
)
def test_open_instruct_adds_rows(
    capsys: Capture, model: Any, args: dict[str, Any], said: str, stage: str
) -> None:
    make_model(**model)
    assert summarise(capsys, open_instruct(Case(args=args, stage=stage)), BEYOND) == said


@pytest.mark.parametrize("trainer", [trl, open_instruct])
def test_both_sizes_are_named(capsys: Capture, trainer: Any) -> None:
    make_model(**ADDED)
    message = printed(capsys, trainer(Case()))
    assert "101 tokens" in message
    assert "100 rows" in message
    assert "`<new>`" in message


ADAPTER = ("adapter-alone", "incomplete-model", "incomplete-tokenizer", "missing-model")


def make_adapter(folder: str = "adapter") -> None:
    path = Path(folder)
    path.mkdir()
    config = {"base_model_name_or_path": "org/base", "peft_type": "LORA"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors(path / "adapter_model.safetensors")


@pytest.mark.parametrize("trainer", [trl, open_instruct])
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_an_adapter_is_merged_first(capsys: Capture, trainer: Any, stage: str) -> None:
    make_adapter()
    case = Case(args={"model_name_or_path": "adapter"}, stage=stage)
    warned = "adapter-alone warning model_name_or_path"
    assert summarise(capsys, trainer(case), ADAPTER) == warned
    # a config.json that was copied beside it makes no model of it
    make_model()
    shutil.copy("model/config.json", "adapter/config.json")
    assert summarise(capsys, trainer(case), ADAPTER) == warned
    message = printed(capsys, trainer(case))
    assert "org/base" in message
    assert "merge_and_unload" in message
    assert '"adapter-merged"' in message


def test_an_adapter_starts_no_training(capsys: Capture) -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip(NO_PACKAGES)
    make_adapter()
    case = Case(args={"model_name_or_path": "adapter", "bf16": False}, stage="dpo")
    Path("stage.yaml").write_text(yaml.safe_dump(trl(case)))
    assert main(["dpo", "stage.yaml", "--gpus", "0"]) == Exit.CONFIG
    assert "error[adapter-alone]" in capsys.readouterr().err


def test_an_adapter_in_the_cache_of_the_hub(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    kept = Path("hub/models--org--adapter")
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text("abc")
    (kept / "snapshots").mkdir()
    make_adapter(str(kept / "snapshots/abc"))
    case = Case(args={"model_name_or_path": "org/adapter"}, stage="dpo")
    assert summarise(capsys, trl(case), ADAPTER) == "adapter-alone warning model_name_or_path"
