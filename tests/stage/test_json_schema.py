"""The JSON Schema of stage files says what launch says, as far as JSON Schema can."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from argument_sets import ODD, Arguments, generate
from conftest import STAGE_FILES
from verdicts import schema_of

from launcher.config import document, keys
from launcher.config.load import Config
from launcher.errors import Finding, select_errors
from launcher.stage import json_schema, options, stage
from launcher.upstream.schema import Field, Schema
from launcher.upstream.trainers import BACKENDS

jsonschema = pytest.importorskip("jsonschema")

ENTRIES = [(backend, name) for backend in BACKENDS for name in BACKENDS[backend].STAGES]
SETS = 40
BOTH = pytest.mark.parametrize(
    "backend, name", [("open_instruct", "sft"), ("trl", "dpo")], ids=["open_instruct", "trl"]
)


@cache
def json_schema_of(*entries: tuple[str, str]) -> dict[str, Any]:
    """The JSON Schema of stage files for these scripts; for all of them where none is named."""
    return json_schema.combine_schemas(schema_of(*entry) for entry in entries or ENTRIES)


@cache
def validator(*entries: tuple[str, str]) -> Any:
    return jsonschema.Draft7Validator(json_schema_of(*entries))


@cache
def args_validator(backend: str, name: str) -> Any:
    """For `args` alone."""
    definitions = json_schema_of((backend, name))["definitions"]
    schema = {"definitions": definitions, "$ref": f"#/definitions/{backend}-{name}"}
    return jsonschema.Draft7Validator(schema)


def config_of(options: Arguments, args: Arguments) -> Config:
    return Config(path=Path("stage.yaml"), shape="stage", options=options, args=args)


def judge_args(backend: str, name: str, args: Arguments) -> tuple[Finding, ...]:
    """The errors of launch about the arguments of a script."""
    options = {"backend": backend, "stage": BACKENDS[backend].STAGES[name].stage or name}
    return select_errors(stage.judge_stage_file(config_of(options, args)).findings)


def refused(findings: Iterable[Finding]) -> set[str]:
    """The arguments that launch refuses by themselves: their name, or their value."""
    names = set()
    for finding in findings:
        if finding.code in ("bad-value", "bad-dataset") or finding.code.endswith("-key"):
            names.add(str(finding.key).removeprefix("args.").partition("[")[0])
    return names


def underlined(backend: str, name: str, args: Arguments) -> set[str]:
    """The arguments of this schema's that an editor would underline."""
    names = set()
    for error in args_validator(backend, name).iter_errors(args):
        if error.absolute_path:
            names.add(str(error.absolute_path[0]))
    return names


@pytest.mark.parametrize("entries", [(), (("trl", "sft"),)], ids=["all", "trl sft"])
def test_it_is_a_draft_07_schema_in_plain_json(entries: tuple[tuple[str, str], ...]) -> None:
    schema = json_schema_of(*entries)
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(schema)
    assert json.loads(json.dumps(schema, allow_nan=False)) == schema


def id_of(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("path", STAGE_FILES, ids=id_of)
def test_a_file_that_ships_is_valid_for_its_script_alone(path: Path) -> None:
    content = document.read_yaml(path).value
    as_yaml_1_1 = yaml.safe_load(path.read_text(encoding="utf-8"))
    entry = (content["backend"], content.get("script", content["stage"]))
    for schema in (validator(), validator(entry)):
        schema.validate(content)
        schema.validate(as_yaml_1_1)
    for other in set(ENTRIES) - {entry}:
        assert not validator(other).is_valid(content), other


SFT = {"dataset_mixer_list": ["a", 1.0]}
DPO = {"mixer_list": ["a", 1.0]}
TRL = {"dataset_name": "a"}
VALID_FILES: list[Arguments] = [
    {"stage": "sft", "args": SFT},
    {"stage": "sft", "backend": None, "args": SFT},
    {"stage": "sft", "backend": "trl", "args": TRL},
    {"stage": "sft", "args": None},
    # what an extended file says is left open
    {"extends": "base.yaml"},
    {"extends": "base.yaml", "args": DPO},
    {"extends": "base.yaml", "stage": "dpo", "args": TRL},
    {"extends": "base.yaml", "stage": "sft", "args": DPO},
    # what is interpolated
    {"stage": "${a}", "backend": "${a}", "name": "${a}", "args": {"learning_rate": "${a}"}},
]
WRONG_FILES: list[Arguments] = [
    {"stage": "dpo", "args": SFT},
    {"stage": "sft", "backend": "trl", "args": SFT},
    {"stage": "sft", "args": TRL},
    {"args": SFT},
    {"extends": "base.yaml", "stage": "dpo", "backend": "open_instruct", "args": TRL},
    {"extends": "base.yaml", "args": {"nothing_has_this": 1}},
    # options that launch does not have
    {"stage": "sft", "learning_rate": 1e-5},
    {"stage": "sft", "args": {}, "num_gpus": 8},
]


@pytest.mark.parametrize("content", VALID_FILES, ids=str)
def test_a_file_whose_stage_and_backend_have_its_arguments_is_valid(content: Arguments) -> None:
    assert validator().is_valid(content)


@pytest.mark.parametrize("content", WRONG_FILES, ids=str)
def test_a_file_with_arguments_of_another_script_is_not_valid(content: Arguments) -> None:
    assert not validator().is_valid(content)


def test_the_schema_of_one_script_takes_no_other() -> None:
    trl_dpo = validator(("trl", "dpo"))
    assert trl_dpo.is_valid({"stage": "dpo", "backend": "trl", "args": TRL})
    assert not trl_dpo.is_valid({"stage": "sft", "backend": "trl", "args": {}})
    # without a backend launch would take the other one
    assert not trl_dpo.is_valid({"stage": "dpo", "args": {}})


TEXTS = """
    x no off on none 16 0 0016 9999999999 fp16 fp32 sft dpo trl open_instruct zero2
""".split()
NUMBERS = [0, 1, 16, -1, 2.5, 10**9]
BATCHES = [
    {"global": 128},
    {"global": None},
    {"global": "128", "per_device": 16},
    {"global": 0},
    {"global": True},
    {"global": 1.5},
    {"per_devise": 1},
]
EXPECTATIONS = [
    {"liger": "engaged"},
    {"liger": None},
    {"liger": False},
    {"liger": True},
    {"packing": True},
    {"packing": "on"},
    {"loss": "finite", "trend": "falling"},
    {"trend": "rising"},
    {"loss": False},
    {"speed": "any"},
    {"attention": "sdpa"},
    {"attention": []},
]
VALUES = [None, True, False, "", [], [1], {}, *TEXTS, *NUMBERS, *BATCHES, *EXPECTATIONS]


def is_refused_by_launch(key: str, value: Any) -> bool:
    """Whether launch refuses a value of its own key, as far as a schema can know."""
    if key == "args":
        return not isinstance(value, dict | None)
    if key == "extends":
        return value is not None and (not isinstance(value, str) or not value.strip())
    if key == "deepspeed" and isinstance(value, str):
        # a path
        return False
    if key == "script" and value == "dpo":
        # of another stage: the whole schema refuses it
        return False
    if key in ("mixed_precision", "expect") and value in ("no", "off"):
        # text only to YAML 1.2, a bool to launch
        return key == "expect"
    config = config_of({"stage": "sft", "backend": "trl", key: value}, {})
    _, findings = options.read_stage_options(config, "sft")
    stage_fault = options.find_stage_fault(config)
    if stage_fault is not None:
        findings.append(stage_fault)
    return any(str(finding.key).partition(".")[0] == key for finding in findings)


@pytest.mark.parametrize("key", keys.KEYS)
def test_launchs_own_options_are_judged_as_launch_does(key: str) -> None:
    schema = jsonschema.Draft7Validator(json_schema_of()["properties"][key])
    for value in VALUES:
        assert schema.is_valid(value) is not is_refused_by_launch(key, value), value


WORDS = """
    True y 1 +3 x-y 1_0 1e5 .5 +inf Infinity NULL hf linear --
""".split()
LISTS = [["none"], ["8"], [8], [True], [0.5], ["x"], ["nf4"], ["hf", "local"], ["linear"], [-0.5]]
MORE = [*ODD, *WORDS, *LISTS, 2, -3, 1e-4, " nan ", "a 0.5", " a"]


def kind_of(field: Field, schema: Schema) -> tuple[Any, ...]:
    """What a field has in common with those that take the same values."""
    return (
        field.kind,
        field.many,
        field.choices,
        field.nullable,
        field.bare,
        "dict" in field.type,
        field.name in schema.splits,
    )


@pytest.mark.parametrize(("backend", "name"), [("open_instruct", "dpo"), ("trl", "sft")])
def test_what_launch_takes_is_never_underlined(backend: str, name: str) -> None:
    schema = schema_of(backend, name)
    hints = BACKENDS[backend].STAGES[name].hints.keys()
    one_of_each_kind = {}
    for field in schema.fields.values():
        if field.name not in hints:
            one_of_each_kind[kind_of(field, schema)] = field.name
    alike = [dict.fromkeys(one_of_each_kind.values(), value) for value in MORE]
    for args in (*alike, *generate(schema, SETS, seed=9)):
        wrong = refused(judge_args(backend, name, args)) | hints
        assert underlined(backend, name, args) <= wrong, args


@pytest.mark.parametrize(
    "key, value",
    [
        ("seed", "x"),
        ("seed", 1.5),
        ("packing", 2),
        ("dataset_cache_mode", "both"),
        ("model_name_or_path", {"a": 1}),
        ("dataset_mixer_list", [["a"]]),
        ("dataset_name", "a"),
        ("use_liger_kernal", True),
        ("learning-rate", 1),
    ],
)
def test_names_and_kinds_that_are_wrong_are_underlined(key: str, value: Any) -> None:
    assert not args_validator("open_instruct", "sft").is_valid({key: value})


def property_of(backend: str, name: str, key: str) -> dict[str, Any]:
    definitions = json_schema_of((backend, name))["definitions"]
    schema: dict[str, Any] = definitions[f"{backend}-{name}"]["properties"][key]
    return schema


@BOTH
def test_a_field_tells_its_type_default_and_place(backend: str, name: str) -> None:
    fields = schema_of(backend, name).fields
    defaults = {}
    for key, field in fields.items():
        schema = property_of(backend, name, key)
        text = schema["description"]
        assert field.type in text
        assert field.where in text
        if field.default is not None:
            assert json.dumps(field.default).replace("`", "") in text
        if "default" in schema:
            assert schema["default"] == field.default
            defaults[key] = field.default
    assert len(defaults) > len(fields) / 3
    assert underlined(backend, name, defaults) == set()
    assert refused(judge_args(backend, name, defaults)) == set()


@BOTH
def test_moved_keys_are_refused_with_the_reason(backend: str, name: str) -> None:
    fields = schema_of(backend, name).fields
    for key, moved in BACKENDS[backend].STAGES[name].moved.items():
        if key in fields:
            continue
        schema = property_of(backend, name, key)
        assert schema["doNotSuggest"] is True
        assert moved.why in schema["errorMessage"]
        if moved.to is not None:
            assert f"`{moved.to}`" in schema["errorMessage"]
        for value in (None, True, 1, "x", ["x"], {}):
            (error,) = args_validator(backend, name).iter_errors({key: value})
            assert error.absolute_path[0] == key


def test_a_key_that_is_always_refused_says_what_to_write_instead() -> None:
    message = property_of("open_instruct", "dpo", "dataset_name")["errorMessage"]
    assert "`mixer_list:" in message
    args = args_validator("open_instruct", "dpo")
    assert not args.is_valid({"dataset_name": "x"})
    assert args.is_valid({"dataset_name": None})
    # a hint alone refuses nothing
    assert args.is_valid({"checkpointing_steps": 500})
