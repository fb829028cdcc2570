"""The JSON Schema of stage files says what launch says, as far as JSON Schema can."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from argument_sets import ODD, generate
from conftest import STAGE_FILES

from launcher.config import document, keys
from launcher.config.load import Config
from launcher.errors import Finding, errors
from launcher.stage import json_schema, options, stage
from launcher.upstream import locate
from launcher.upstream.schema import Field, Schema
from launcher.upstream.trainers import BACKENDS

jsonschema = pytest.importorskip("jsonschema")

ENTRIES = [(backend, name) for backend in BACKENDS for name in BACKENDS[backend].STAGES]
SETS = 100
MORE: tuple[Any, ...] = (
    "True", "y", "1", 2, -3, "+3", "x-y", "1_0", "1e5", ".5", "+inf", " nan ", "Infinity", 1e-4, "NULL",
    ["none"], ["8"], [8], [True], [0.5], ["x"], ["nf4"], ["hf", "local"], "hf", "linear", ["linear"],
    "a 0.5", " a", "--", [-0.5],
)  # fmt: skip


def schema_of(backend: str, name: str) -> Schema:
    pinned = locate.Upstream(
        backend=backend, root=None, source="snapshot", is_named=False, pin="", version=""
    )
    return locate.load_schema(pinned, name)


@cache
def made(backend: str, name: str) -> dict[str, Any]:
    return json_schema.combined([schema_of(backend, name)])


@cache
def whole() -> dict[str, Any]:
    return json_schema.combined(schema_of(*entry) for entry in ENTRIES)


@cache
def validator(backend: str | None = None, name: str | None = None) -> Any:
    return jsonschema.Draft7Validator(whole() if backend is None else made(backend, str(name)))


@cache
def args_validator(backend: str, name: str) -> Any:
    """For `args` alone."""
    schema = {
        "definitions": made(backend, name)["definitions"],
        "$ref": f"#/definitions/{backend}-{name}",
    }
    return jsonschema.Draft7Validator(schema)


def config_of(backend: str, name: str, **args: Any) -> Config:
    stage = BACKENDS[backend].STAGES[name].stage
    given = {"backend": backend, "stage": stage or name, **({"script": name} if stage else {})}
    return Config(path=Path("made.yaml"), shape="stage", options=given, args=args)


def wrong_with(backend: str, name: str, args: dict[str, Any]) -> list[Finding]:
    return list(errors(stage.judge(config_of(backend, name, **args)).findings))


def refused(found: Iterable[Finding]) -> set[str]:
    """The arguments that launch refuses by themselves: their name, or their value."""
    wrong = [f for f in found if f.code in ("bad-value", "bad-dataset") or f.code.endswith("-key")]
    return {str(f.key).removeprefix("args.").partition("[")[0] for f in wrong}


def underlined(backend: str, name: str, args: dict[str, Any]) -> set[str]:
    """The arguments of this schema's that an editor would underline."""
    found = args_validator(backend, name).iter_errors(args)
    return {str(e.absolute_path[0]) for e in found if e.absolute_path}


def test_it_is_a_draft_07_schema_in_plain_json() -> None:
    for schema in (whole(), made("trl", "sft")):
        assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
        jsonschema.Draft7Validator.check_schema(schema)
        assert json.loads(json.dumps(schema, allow_nan=False)) == schema


def test_every_file_that_ships_is_valid() -> None:
    for path in STAGE_FILES:
        ours = document.read_yaml(path).value
        theirs = yaml.safe_load(path.read_text(encoding="utf-8"))
        own = ours["backend"], ours.get("script", ours["stage"])
        for value in (ours, theirs):
            for checked in (validator(), validator(*own)):
                assert [e.message for e in checked.iter_errors(value)] == [], path
        for other in ENTRIES:
            assert other == own or not validator(*other).is_valid(ours), path


SFT, DPO = {"dataset_mixer_list": ["a", 1.0]}, {"mixer_list": ["a", 1.0]}
TRL = {"dataset_name": "a"}
FILES: tuple[tuple[dict[str, Any], bool], ...] = (
    ({"stage": "sft", "args": SFT}, True),
    ({"stage": "sft", "backend": None, "args": SFT}, True),
    ({"stage": "dpo", "args": SFT}, False),
    ({"stage": "sft", "backend": "trl", "args": SFT}, False),
    ({"stage": "sft", "backend": "trl", "args": TRL}, True),
    ({"stage": "sft", "args": TRL}, False),
    ({"args": SFT}, False),
    # what an extended file says is left open
    ({"extends": "base.yaml"}, True),
    ({"extends": "base.yaml", "args": DPO}, True),
    ({"extends": "base.yaml", "stage": "dpo", "args": TRL}, True),
    ({"extends": "base.yaml", "stage": "sft", "args": DPO}, True),
    ({"extends": "base.yaml", "stage": "dpo", "backend": "open_instruct", "args": TRL}, False),
    ({"extends": "base.yaml", "args": {"nothing_has_this": 1}}, False),
    # what is interpolated
    ({**dict.fromkeys(("stage", "backend", "name"), "${a}"), "args": {"learning_rate": "${a}"}}, True),
    # options that launch does not have
    ({"stage": "sft", "learning_rate": 1e-5}, False),
    ({"stage": "sft", "args": {}, "num_gpus": 8}, False),
    ({"stage": "sft", "args": None}, True),
)  # fmt: skip


def test_stage_and_backend_choose_the_arguments() -> None:
    for keys_of_file, valid in FILES:
        assert validator().is_valid(keys_of_file) == valid, keys_of_file
    only = validator("trl", "dpo")
    assert only.is_valid({"stage": "dpo", "backend": "trl", "args": TRL})
    # without a backend launch would take the other one
    assert not only.is_valid({"stage": "dpo", "args": {}})
    assert not only.is_valid({"stage": "sft", "backend": "trl", "args": {}})


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 16, -1, 2.5, "", "x", "no", "off", "on", "none", "16", "0", "0016", "9999999999", 10**9,
    "fp16", "fp32", "sft", "dpo", "trl", "open_instruct", "zero2", [], [1], {}, {"global": 128}, {"global": None},
    {"global": "128", "per_device": 16}, {"global": 0}, {"global": True}, {"global": 1.5}, {"per_devise": 1},
    {"liger": "engaged"}, {"liger": None}, {"liger": False}, {"liger": True}, {"packing": True}, {"packing": "on"},
    {"loss": "finite", "trend": "falling"}, {"trend": "rising"}, {"loss": False}, {"speed": "any"},
    {"attention": "sdpa"}, {"attention": []},
)  # fmt: skip


@pytest.mark.parametrize("key", keys.KEYS)
def test_launchs_own_options_are_judged_as_launch_does(key: str) -> None:
    own = jsonschema.Draft7Validator(whole()["properties"][key])
    wrong = []
    for value in VALUES:
        given = {"stage": "sft", "backend": "trl", key: value}
        config = Config(path=Path("made.yaml"), shape="stage", options=given, args={})
        found = {f.key for f in options.read(config, "sft")[1]}
        found |= {fault.key} if (fault := options.stage_fault(config)) else set()
        faulty = any(str(k).partition(".")[0] == key for k in found)
        if key == "args":
            faulty = not isinstance(value, dict | None)
        elif key == "extends":
            faulty = value is not None and (not isinstance(value, str) or not value.strip())
        elif key == "deepspeed" and isinstance(value, str):
            faulty = False  # a path, for all that a schema knows
        elif key == "script" and value == "dpo":
            faulty = False  # of another stage: the whole schema refuses it
        elif key in {"mixed_precision", "expect"} and value in ("no", "off"):
            faulty = key == "expect"  # text only to YAML 1.2, a bool to launch
        if own.is_valid(value) == faulty:
            wrong.append((value, "launch refuses it" if faulty else "launch takes it"))
    assert wrong == []


def signature(known: Field) -> tuple[Any, ...]:
    return (known.kind, known.many, known.choices, known.nullable, "dict" in known.type, known.bare)


@pytest.mark.parametrize(("backend", "name"), [("open_instruct", "dpo"), ("trl", "sft")])
def test_what_launch_takes_is_never_underlined(backend: str, name: str) -> None:
    schema, entry = schema_of(backend, name), BACKENDS[backend].STAGES[name]
    kinds = {
        (signature(field), field.name in schema.splits): field.name
        for field in schema.fields.values()
        if field.name not in entry.hints
    }
    alike = [dict.fromkeys(kinds.values(), value) for value in (*ODD, *MORE)]
    for args in (*alike, *generate(schema, SETS, seed=9)):
        wrong = refused(wrong_with(backend, name, args)) | entry.hints.keys()
        assert underlined(backend, name, args) <= wrong, args


def test_names_and_kinds_that_are_wrong_are_underlined() -> None:
    checked = args_validator("open_instruct", "sft")
    for key, value in (
        ("seed", "x"), ("seed", 1.5), ("seed", [1, 2]), ("learning_rate", "lots"), ("packing", "perhaps"),
        ("packing", 2), ("dataset_cache_mode", "both"), ("model_name_or_path", {"a": 1}),
        ("dataset_mixer_list", []), ("dataset_mixer_list", [["a"]]), ("dataset_name", "a"),
        ("use_liger_kernal", True), ("learning-rate", 1), ("use_flash_attn", None),
    ):  # fmt: skip
        assert not checked.is_valid({key: value}), (key, value)


def property_of(backend: str, name: str, key: str) -> dict[str, Any]:
    found = made(backend, name)["definitions"][f"{backend}-{name}"]["properties"][key]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("backend", "name"), [("open_instruct", "sft"), ("trl", "dpo")])
def test_a_field_tells_its_type_default_and_place(backend: str, name: str) -> None:
    fields, defaults = schema_of(backend, name).fields, {}
    for key, known in fields.items():
        told = property_of(backend, name, key)
        text = told["description"]
        assert known.type in text and known.where in text
        assert known.default is None or json.dumps(known.default).replace("`", "") in text
        if "default" in told:
            defaults[key] = told["default"]
    assert defaults == {key: fields[key].default for key in defaults}
    assert len(defaults) > len(fields) / 3
    assert (
        underlined(backend, name, defaults) == refused(wrong_with(backend, name, defaults)) == set()
    )


@pytest.mark.parametrize(("backend", "name"), [("open_instruct", "sft"), ("trl", "dpo")])
def test_moved_keys_are_refused_with_the_reason(backend: str, name: str) -> None:
    entry, checked = BACKENDS[backend].STAGES[name], args_validator(backend, name)
    for key, moved in entry.moved.items():
        if key in schema_of(backend, name).fields:
            continue
        told = property_of(backend, name, key)
        assert moved.why in told["errorMessage"] and told["doNotSuggest"] is True
        assert moved.to is None or f"`{moved.to}`" in told["errorMessage"]
        for value in (None, True, 1, "x", [], ["x"], {}):
            assert len(list(checked.iter_errors({key: value}))) == 1


def test_a_key_that_is_always_refused_says_what_to_write_instead() -> None:
    told = property_of("open_instruct", "dpo", "dataset_name")
    assert "`mixer_list:" in told["errorMessage"]
    checked = args_validator("open_instruct", "dpo")
    assert not checked.is_valid({"dataset_name": "x"})
    assert checked.is_valid({"dataset_name": None})
    # a hint alone refuses nothing
    assert checked.is_valid({"checkpointing_steps": 500})
