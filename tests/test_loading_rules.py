"""What a model is loaded with beside its name, under both backends."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from test_trl_adapters import QWEN2
from test_trl_machine_rules import found

from launcher import shapes
from launcher.backends import loading_rules

TRL = ("trl-dpo", "model_init_kwargs")
OPEN_INSTRUCT = ("sft", "additional_model_arguments")


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    # folders of these tests are named relative to their own
    monkeypatch.chdir(tmp_path)
    write("model/config.json", json.dumps(QWEN2))


def told(
    where: tuple[str, str], given: dict[str, Any], model: str = "model"
) -> list[tuple[str, str]]:
    script, key = where
    args = {"model_name_or_path": model, key: json.dumps(given)}
    findings = found(script, args)
    assert all(finding.key == f"args.{key}" for finding in findings)
    return [(finding.code, finding.severity) for finding in findings]


REFUSED = [("model-arguments", "error")]


@pytest.mark.parametrize(
    "given",
    [
        {"foo": 1},
        {"attn_implementaton": "eager"},
        {"load_in_4bit": True},
        {"gradient_checkpointing": True},
        # a name of other models
        {"attention_bias": True},
        {"rope_theta": 5.0},
        {"dtype": "float64"},
        {"dtype": "bf16"},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        # weights that do not fit
        {"hidden_size": 32},
        {"vocab_size": 50},
        # what cannot be saved when it is trained
        {"output_attentions": True},
        {"output_hidden_states": True},
    ],
)  # fmt: skip
def test_what_trl_cannot_load_or_save_is_refused(given: dict[str, Any]) -> None:
    """Each was seen to end the real trainer."""
    assert told(TRL, given) == REFUSED


@pytest.mark.parametrize(
    "given",
    [
        {"use_cache": False},
        {"attention_dropout": 0.1},
        {"low_cpu_mem_usage": True},
        {"num_labels": 3},
        {"use_kernels": False},
        {"device_map": "cpu"},
        {"dtype": "auto"},
        {"dtype": None},
        {"max_position_embeddings": 64},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"hidden_size": 32, "ignore_mismatched_sizes": True},
    ],
)  # fmt: skip
def test_what_trl_loads_is_left_alone(given: dict[str, Any]) -> None:
    assert told(TRL, given) == []


def test_a_list_of_layers_is_as_long_as_the_model(write: Write) -> None:
    config = {**QWEN2, "layer_types": ["full_attention"] * 2}
    write("model/config.json", json.dumps(config))
    assert told(TRL, {"num_hidden_layers": 1}) == REFUSED
    assert told(TRL, {"num_hidden_layers": 1, "layer_types": ["full_attention"]}) == []
    # configs of older releases have no such list: it is made
    write("model/config.json", json.dumps(QWEN2))
    assert told(TRL, {"num_hidden_layers": 1}) == []


def test_open_instruct_drops_what_the_config_does_not_have() -> None:
    assert told(OPEN_INSTRUCT, {"foo": 1}) == [("model-arguments-unread", "warning")]
    assert told(OPEN_INSTRUCT, {"device_map": "cpu"}) == [("model-arguments-unread", "warning")]
    assert told(OPEN_INSTRUCT, {"use_cache": False, "attention_dropout": 0.1}) == []
    assert told(OPEN_INSTRUCT, {"vocab_size": 50}) == REFUSED


@pytest.mark.parametrize(
    "named", [None, [], ["Qwen2ForSequenceClassification"], ["Qwen2Model"], ["Qwen2ForCausalLM"]]
)
def test_trl_makes_the_class_that_the_config_names(write: Write, named: list[str] | None) -> None:
    write("model/config.json", json.dumps({**QWEN2, "architectures": named}))
    codes = [f.code for f in found("trl-dpo", {"model_name_or_path": "model"})]
    assert codes == ([] if named == ["Qwen2ForCausalLM"] else ["model-arguments"])
    assert found("sft", {"model_name_or_path": "model"}) == []


def test_the_near_name_is_told() -> None:
    (finding,) = found(
        "trl-sft",
        {"model_name_or_path": "model", "model_init_kwargs": '{"attn_implementaton": "eager"}'},
    )
    assert finding.help == "did you mean `attn_implementation`?"


@pytest.mark.parametrize("config", [{"model_type": "falcon_h1"}, {}, None])
def test_of_models_that_are_not_described_nothing_is_said(
    write: Write, config: dict[str, Any] | None
) -> None:
    if config is not None:
        write("other/config.json", json.dumps(config))
    assert told(TRL, {"foo": 1, "hidden_size": 3}, model="other") == []


def test_a_dense_model_has_no_experts_to_balance(write: Write) -> None:
    model = {"model_name_or_path": "model"}
    weighed = {**model, "router_aux_loss_coef": 0.1}
    best = {**model, "metric_for_best_model": "aux_loss", "eval_strategy": "steps", "eval_steps": 5}
    told = [[(f.code, f.severity) for f in found("trl-sft", args)] for args in (weighed, best)]
    assert told == [[("balancing-dense", "error")], [("unknown-metric", "error")]]
    assert found("trl-sft", {**model, "router_aux_loss_coef": 0.0}) == []
    write("model/config.json", json.dumps({"model_type": "olmoe"}))
    assert found("trl-sft", weighed) == found("trl-sft", best) == []


def test_every_described_model_has_its_names() -> None:
    assert loading_rules.CONFIGS.keys() == shapes.FAMILIES.keys()


@pytest.mark.parametrize("kind", sorted(loading_rules.CONFIGS))
def test_the_names_are_those_of_the_installed_release(kind: str) -> None:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    folder = kind.removesuffix("_text")
    path = Path(spec.origin).parent / "models" / folder / f"configuration_{folder}.py"
    classes = {
        node.name: node
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    (own,) = (node for node in classes.values() if _model_type(node) == kind)
    fields = {
        item.target.id
        for item in own.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    assert fields - {"default_theta"} <= loading_rules.CONFIGS[kind] | loading_rules._EVERY_CONFIG


def _model_type(node: ast.ClassDef) -> str | None:
    for item in node.body:
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "model_type":
            return str(ast.literal_eval(item.value))
    return None
