"""Rules whose meaning changed upstream: the same stage, at a commit of each kind.

No checkout is needed: tests/agreement/test_meaning_agreement.py asks the sources themselves.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.rules import premises, registry
from launcher.rules.context import Context
from launcher.rules.open_instruct import gradient
from launcher.upstream import behaviour, facts, locate
from launcher.upstream.schema import Field, Kind, Schema, Values
from launcher.upstream.trainers import BACKENDS

DPO, OLMO_CORE = "dpo", "dpo_olmo_core"
PLAIN: Mapping[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "max_seq_length": 1024,
    "push_to_hub": False,
}
TWO_SETS = ["a", "1.0", "b", "0.5"]
ZERO2 = {"zero_optimization": {"stage": 2}}


@dataclass(frozen=True, slots=True)
class Case:
    """A stage, and the code said of it where upstream behaves as at the commit that rules were
    written for (`before`), and where it does not (`after`).
    """

    script: str
    behaviour: str
    args: dict[str, Any]
    before: str = ""
    after: str = ""
    context: dict[str, Any] = field(default_factory=dict)


CASES = {
    "two splits for two sets": Case(
        "sft",
        behaviour.ONE_SPLIT_A_SET,
        {"dataset_mixer_list": TWO_SETS, "dataset_mixer_list_splits": ["train", "test"]},
        before="mixer-splits",
    ),
    "four splits for two sets": Case(
        "sft",
        behaviour.ONE_SPLIT_A_SET,
        {
            "dataset_mixer_list": TWO_SETS,
            "dataset_mixer_list_splits": ["train", "train", "test", "test"],
        },
        after="mixer-splits",
    ),
    "one split": Case(
        "sft",
        behaviour.ONE_SPLIT_A_SET,
        {"dataset_mixer_list": TWO_SETS, "dataset_mixer_list_splits": ["train"]},
    ),
    "a negative limit": Case(
        DPO, behaviour.GUARDS_NEGATIVE_CLIPPING, {"max_grad_norm": -1}, after="reversed-gradient"
    ),
    "a negative limit that is no -1": Case(
        DPO,
        behaviour.GUARDS_NEGATIVE_CLIPPING,
        {"max_grad_norm": -0.5},
        before="out-of-range",
        after="reversed-gradient",
    ),
    "a negative limit with DeepSpeed": Case(
        DPO, behaviour.GUARDS_NEGATIVE_CLIPPING, {"max_grad_norm": -1}, context={"deepspeed": ZERO2}
    ),
    "no limit": Case(DPO, behaviour.GUARDS_NEGATIVE_CLIPPING, {"max_grad_norm": 0}),
    "a negative limit for OLMo-core": Case(
        OLMO_CORE,
        behaviour.GUARDS_NEGATIVE_CLIPPING,
        {"max_grad_norm": -1},
        after="reversed-gradient",
    ),
    "a limit of nothing for OLMo-core": Case(
        OLMO_CORE,
        behaviour.GUARDS_NEGATIVE_CLIPPING,
        {"max_grad_norm": 0},
        after="reversed-gradient",
    ),
    "packed samples": Case(
        OLMO_CORE,
        behaviour.MIXES_PACKED_SAMPLES,
        {"packing": True, "attn_implementation": "flash_2"},
        before="packing-leaks",
    ),
    "packed by torch's attention": Case(
        OLMO_CORE,
        behaviour.PACKS_WITH_FLASH_ALONE,
        {"packing": True, "attn_implementation": "torch"},
        after="packing-refused",
    ),
    "packed without flash-attn": Case(
        OLMO_CORE,
        behaviour.PACKS_WITH_FLASH_ALONE,
        {"packing": True},
        after="packing-refused",
        context={"packages": {}},
    ),
    "packed by flash-attn": Case(
        OLMO_CORE,
        behaviour.PACKS_WITH_FLASH_ALONE,
        {"packing": True, "attn_implementation": "flash_2"},
    ),
    "a model of Qwen's": Case(OLMO_CORE, behaviour.EXPORTS_OLMO_ALONE, {}, before="no-hf-export"),
    "a mixture of experts": Case(
        OLMO_CORE, behaviour.VERIFIES_EXPORT, {"config_name": "olmoe_1B_7B"}, after="no-hf-export"
    ),
    "a schedule that dpo.py does not have": Case(
        OLMO_CORE,
        behaviour.REPLACES_SCHEDULES,
        {"lr_scheduler_type": "polynomial"},
        before="scheduler-replaced",
        after="scheduler-type",
    ),
    "constant with a warm-up": Case(
        OLMO_CORE,
        behaviour.REPLACES_SCHEDULES,
        {"lr_scheduler_type": "constant_with_warmup"},
        after="scheduler-type",
    ),
    "no checkpoint kept": Case(
        OLMO_CORE,
        behaviour.LIMITS_CHECKPOINTS,
        {"keep_last_n_checkpoints": 0},
        after="out-of-range",
    ),
    "no temporary checkpoints": Case(
        OLMO_CORE,
        behaviour.SKIPS_NO_INTERVAL,
        {"ephemeral_save_interval": 0},
        before="checkpoint-steps",
    ),
    "a budget beside modules that are recomputed by name": Case(
        OLMO_CORE,
        behaviour.RECOMPUTES_MODULES,
        {"activation_checkpointing_mode": "selected_modules", "activation_memory_budget": 0.5},
        after="conditional-key",
    ),
    "modules beside a budget": Case(
        OLMO_CORE,
        behaviour.RECOMPUTES_MODULES,
        {"activation_checkpointing_modules": ["blocks.*.attention"]},
        after="conditional-key",
    ),
    "a scaled rotary embedding": Case(
        OLMO_CORE, behaviour.SCALES_ROPE, {"rope_scaling_factor": 4.0}, after="rope-scaling"
    ),
    "no scaling": Case(OLMO_CORE, behaviour.SCALES_ROPE, {"rope_scaling_factor": None}),
    "a loss of OLMo-core's": Case(
        OLMO_CORE,
        behaviour.CHOOSES_LOSS,
        {"loss_implementation": "fused_linear"},
        after="unread-key",
    ),
    "the usual loss": Case(OLMO_CORE, behaviour.CHOOSES_LOSS, {"loss_implementation": "default"}),
    "a mixture of experts with a shared one": Case(
        OLMO_CORE,
        behaviour.VERIFIES_EXPORT,
        {"config_name": "smallmoe"},
        before="no-hf-export",
        after="no-hf-export",
    ),
    "no model": Case(
        OLMO_CORE, behaviour.ASKS_FOR_MODEL, {"model_name_or_path": ""}, before="no-model"
    ),
    "a tokenizer called OLMo's": Case(
        "sft",
        behaviour.OLMO_BY_NAME,
        {"model_name_or_path": "demo/olmo2", "chat_template_name": "tulu"},
        after="olmo-tokenizer",
    ),
    "one called so, with what its template needs": Case(
        "sft",
        behaviour.OLMO_BY_NAME,
        {"model_name_or_path": "demo/olmo2", "chat_template_name": "tulu", "add_bos": True},
    ),
}


def baseline(script: str) -> Schema:
    """A script at the commit that rules were written for."""
    backend = BACKENDS["open_instruct"]
    known = locate.load_known_facts("open_instruct", backend.BASELINE)
    return facts.build_schema(known, backend, script, "snapshot", backend.BASELINE)


def with_fields(schema: Schema, args: Mapping[str, Any]) -> Schema:
    """The same with arguments that later commits have."""
    fields = dict(schema.fields)
    for name, value in args.items():
        kind: Kind = "str"
        if isinstance(value, int | float):
            kind = "float" if isinstance(value, float) else "int"
        fields.setdefault(
            name, Field(name=name, type=kind, kind=kind, many=isinstance(value, list))
        )
    return replace(schema, fields=fields)


def with_behaviour(schema: Schema, name: str, does: bool) -> Schema:
    return replace(schema, behaviours={**schema.behaviours, name: does})


def codes_of(schema: Schema, case: Case) -> set[str]:
    schema = with_fields(schema, case.args)
    values = Values(schema, {**PLAIN, **case.args})
    if case.args.get("model_name_or_path") == "":
        values = Values(
            schema, {name: value for name, value in PLAIN.items() if name != "model_name_or_path"}
        )
    context = Context(values=values, **case.context)
    return {finding.code for finding in (*registry.apply(values), *registry.apply_in(context))}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_stage_at_a_commit_of_each_kind(case: Case) -> None:
    schema = baseline(case.script)
    was = schema.does(case.behaviour)
    assert was is not None
    other = with_behaviour(schema, case.behaviour, not was)
    before = codes_of(schema, case)
    after = codes_of(other, case)
    if case.before or case.after:
        codes = {case.before, case.after}
        assert before & codes == {case.before} - {""}
        assert after & codes == {case.after} - {""}
    else:
        assert before == after


@pytest.mark.parametrize(
    ("mode", "codes"), [("budget", {"out-of-range"}), ("selected_modules", set())]
)
def test_a_budget_has_a_range_where_it_is_read(mode: str, codes: set[str]) -> None:
    args = {"activation_checkpointing_mode": mode, "activation_memory_budget": -0.5}
    case = Case(OLMO_CORE, behaviour.RECOMPUTES_MODULES, args)
    newer = with_behaviour(baseline(OLMO_CORE), case.behaviour, True)
    assert codes_of(newer, case) & {"out-of-range"} == codes


@pytest.mark.parametrize(
    ("length", "factor", "codes"),
    [
        (40_000, None, {"beyond-positions"}),
        (40_000, 8.0, set()),
        (70_000, 8.0, {"beyond-positions"}),
        (40_000, 2.0, set()),
    ],
)
def test_a_scaled_rotary_embedding_reaches_further(
    tmp_path: Path, length: int, factor: float | None, codes: set[str]
) -> None:
    """It does not reach less far than the model was made for: 40,960 in the last case."""
    positions = 40_960 if factor == 2.0 else 32_768
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "max_position_embeddings": positions})
    )
    args = {
        "model_name_or_path": str(tmp_path),
        "max_seq_length": length,
        "rope_scaling_factor": factor,
        "rope_scaling_old_context_len": 8192,
    }
    assert codes_of(baseline(OLMO_CORE), Case(OLMO_CORE, "", args)) & {"beyond-positions"} == codes


@pytest.mark.parametrize(("verifies", "random"), [(False, True), (True, False)])
def test_missing_layers_are_refused_where_the_export_is_verified(
    tmp_path: Path, verifies: bool, random: bool
) -> None:
    shape = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 20}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    schema = baseline(OLMO_CORE)
    schema = with_behaviour(schema, behaviour.VERIFIES_EXPORT, verifies)
    args = {**PLAIN, "model_name_or_path": str(tmp_path), "config_name": "qwen3_0_6B"}
    context = Context(values=Values(schema, args))
    findings = registry.apply_in(context)
    (finding,) = [finding for finding in findings if finding.code == "other-shape"]
    assert ("random weights" in finding.message) == random


def test_a_hybrid_model_is_loaded_from_the_cache() -> None:
    """Since #1822 transformers loads it, of which OLMo-core asks the hub nothing."""
    schema = replace(
        baseline(OLMO_CORE), models={"org/hybrid": "olmo3_hybrid_7B", "org/plain": "olmo3_7B"}
    )
    environ = {"HF_HUB_OFFLINE": "1"}

    def codes(name: str) -> set[str]:
        context = Context(
            values=Values(schema, {**PLAIN, "model_name_or_path": name}), environ=environ
        )
        return {finding.code for finding in registry.apply_in(context)}

    assert "offline-hub-model" in codes("org/plain")
    assert "offline-hub-model" not in codes("org/hybrid")


BAD_TOOLS = ["no", '["x"]', '[{"name": "x"}, 1]', "3", ["x"]]
GOOD_TOOLS = ['[{"name": "x"}]', '{"name": "x"}', "[]", "null", "", None]


@pytest.mark.parametrize(
    ("tools", "codes"),
    [(bad, {"data-types"}) for bad in BAD_TOOLS] + [(good, set()) for good in GOOD_TOOLS],
)
def test_tools_that_upstream_cannot_read(tmp_path: Path, tools: Any, codes: set[str]) -> None:
    """dataset_transformation.py::_normalize_tools_for_chat_template, since #1746."""
    messages = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "an answer"},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"messages": messages, "tools": tools}) + "\n")
    case = Case("sft", behaviour.GIVES_TOOLS, {"dataset_mixer_list": [str(data), "1.0"]})
    schema = baseline("sft")
    newer = with_behaviour(schema, case.behaviour, True)
    assert codes_of(newer, case) & {"data-types"} == codes


@pytest.mark.parametrize(("biased", "codes"), [(True, {"lora-biases"}), (False, set())])
def test_frozen_biases_crash_where_their_group_is_kept(
    tmp_path: Path, biased: bool, codes: set[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "attention_bias": biased})
    )
    args = {"model_name_or_path": str(tmp_path), "use_lora": True}
    case = Case("sft", behaviour.KEEPS_EMPTY_GROUPS, args, context={"deepspeed": ZERO2, "gpus": 2})
    schema = baseline("sft")
    mended = with_behaviour(schema, case.behaviour, False)
    assert codes_of(schema, case) & {"lora-biases"} == codes
    assert "lora-biases" not in codes_of(mended, case)


@pytest.mark.parametrize(
    ("config", "torch", "refused"),
    [
        ({"model_type": "llama"}, "2.11.0", True),
        ({"model_type": "llama"}, None, True),
        ({"model_type": "llama"}, "2.9.1", False),
        ({"model_type": "llama", "attention_bias": True}, "2.11.0", False),
        ({"model_type": "qwen2"}, "2.11.0", False),
    ],
)
def test_models_without_biases_where_empty_groups_are_kept(
    tmp_path: Path, config: dict[str, Any], torch: str | None, refused: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = {"model_name_or_path": str(tmp_path)}
    packages = {} if torch is None else {"packages": {"torch": torch}}
    context = {"deepspeed": ZERO2, "gpus": 2, **packages}
    codes = {"empty-group"} if refused else set()
    case = Case("sft", behaviour.KEEPS_EMPTY_GROUPS, args, context=context)
    schema = baseline("sft")
    mended = with_behaviour(schema, case.behaviour, False)
    assert codes_of(schema, case) & {"empty-group"} == codes
    assert "empty-group" not in codes_of(mended, case)


def test_where_nothing_tells_a_new_rule_is_silent_and_an_old_one_speaks() -> None:
    schema = replace(baseline(OLMO_CORE), behaviours={})
    assert not premises.applies(gradient.scaled_by_limit, schema)
    packed = Case(OLMO_CORE, "", {"packing": True, "max_grad_norm": -1})
    assert "packing-leaks" in codes_of(schema, packed)
    assert "reversed-gradient" not in codes_of(schema, packed)


def test_every_premise_is_a_behaviour_that_launch_knows_of_that_script() -> None:
    for key, entry in BACKENDS["open_instruct"].STAGES.items():
        names = {each.name for each in behaviour.list_behaviours(entry.behaves_as or key)}
        for rule in (
            *registry.of_script("open_instruct", key),
            *registry.of_stage("open_instruct", key),
        ):
            assert {premise.behaviour for premise in premises.premises_of(rule)} <= names, (
                rule.__qualname__
            )
