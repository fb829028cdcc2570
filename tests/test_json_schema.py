"""The JSON Schema of stage files says what launch says, as far as JSON Schema can."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from argument_sets import ODD, generate
from conftest import REPOSITORY

from launcher import document, json_schema, keys, options, stage, upstream
from launcher.backends import BACKENDS
from launcher.config import Config
from launcher.errors import Finding, errors
from launcher.schema import Field, Schema

jsonschema = pytest.importorskip("jsonschema")

ENTRIES = [(backend, name) for backend in BACKENDS for name in BACKENDS[backend].STAGES]
CONFIGS = [
    path
    for path in sorted((REPOSITORY / "configs").rglob("*.yaml"))
    if not path.name.startswith("pipeline")
]
SETS = 400
MORE: tuple[Any, ...] = (
    "True", "false", "y", "1", 2, "2", -3, "+3", "-3 ", "x-y", "1_0", "1__0", "_1", "1e5", "1.", ".5",
    "1_0.5e1_0", "+inf", "-nan", " nan ", "Infinity", "infinit", 1e-4, -1e-4, 0.0, "NULL", "nil",
    "no ne", ["none"], ["8"], [8], [8, 9], [True], [0.5], ["x"], ["nf4"], ["hf", "local"], "hf", "linear",
    "Linear", ["linear"], "tpu_metrics_debug", ["tpu_metrics_debug"], ["steps", ""], "a 0.5", "a -1",
    "a -x", " a", "a ", "--", "-- x", "- x", "-5.", "-.5e", "-h", "-H", ["-5"], [-0.5], [-1e-6], -5e-5, -5e-4,
    [{}], [["a"], "b"], {"": 1},
)  # fmt: skip


def schema_of(backend: str, name: str) -> Schema:
    pinned = upstream.Upstream(
        backend=backend, root=None, source="snapshot", asked=False, pin="", version=""
    )
    return upstream.load_schema(pinned, name)


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
    return {
        str(f.key).removeprefix("args.")
        for f in found
        if f.code == "bad-value" or f.code.endswith("-key")
    }


def underlined(backend: str, name: str, args: dict[str, Any]) -> set[str]:
    """The arguments of this schema's that an editor would underline."""
    return {str(e.absolute_path[0]) for e in args_validator(backend, name).iter_errors(args)}


def invisible(known: Field, value: Any) -> bool:
    """What no JSON Schema can tell: 4.0 is a whole number to it, and a quoted `on` a plain one."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, float) and (item.is_integer() or item <= -1e16):
            return True
        if known.kind == "bool" and item in ("on", "off"):
            return True
    return False


# --- it is one ------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [None, *ENTRIES])
def test_it_is_a_draft_07_schema_in_plain_json(entry: tuple[str, str] | None) -> None:
    schema = whole() if entry is None else made(*entry)
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(schema)
    assert json.loads(json.dumps(schema, allow_nan=False)) == schema


def test_each_has_an_id_of_its_own() -> None:
    ids = [whole()["$id"], *(made(*entry)["$id"] for entry in ENTRIES)]
    assert len(set(ids)) == len(ids)


def patterns(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (v for k, v in node.items() if k == "pattern" and isinstance(v, str))
        for value in node.values():
            yield from patterns(value)
    elif isinstance(node, list):
        for value in node:
            yield from patterns(value)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_its_patterns_mean_the_same_to_an_editor() -> None:
    import re

    texts = [v for v in (*ODD, *MORE) if isinstance(v, str) and v.isascii()]
    known = sorted(set(patterns(whole())))
    script = (
        "const [ps, ts] = JSON.parse(require('fs').readFileSync(0));"
        "console.log(JSON.stringify(ps.map(p => ts.map(t => new RegExp(p, 'u').test(t)))))"
    )
    done = subprocess.run(
        ["node", "-e", script], input=json.dumps([known, texts]), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    ours = [[re.search(pattern, text) is not None for text in texts] for pattern in known]
    assert json.loads(done.stdout) == ours


# --- whole files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_file_that_ships_is_valid(path: Path) -> None:
    ours = document.read_yaml(path).value
    theirs = yaml.safe_load(path.read_text(encoding="utf-8"))
    own = ours["backend"], ours.get("script", ours["stage"])
    for value in (ours, theirs):
        for entry in (None, own):
            checked = validator(*(entry or (None, None)))
            assert [e.message for e in checked.iter_errors(value)] == []
    for other in ENTRIES:
        assert other == own or not validator(*other).is_valid(ours)


def test_stage_and_backend_choose_the_arguments() -> None:
    def valid(**keys: Any) -> bool:
        return bool(validator().is_valid(keys))

    assert valid(stage="sft", args={"dataset_mixer_list": ["a", 1.0]})
    assert valid(stage="sft", backend=None, args={"dataset_mixer_list": ["a", 1.0]})
    assert not valid(stage="dpo", args={"dataset_mixer_list": ["a", 1.0]})
    assert not valid(stage="sft", backend="trl", args={"dataset_mixer_list": ["a", 1.0]})
    assert valid(stage="sft", backend="trl", args={"dataset_name": "a"})
    assert not valid(stage="sft", args={"dataset_name": "a"})
    assert not valid(args={"dataset_mixer_list": ["a", 1.0]})


def test_what_the_extended_file_says_is_left_open() -> None:
    def valid(**keys: Any) -> bool:
        return bool(validator().is_valid({"extends": "base.yaml", **keys}))

    assert valid()
    assert valid(args={"mixer_list": ["a", 1.0]})
    assert valid(stage="dpo", args={"dataset_name": "a"})
    assert not valid(stage="sft", args={"mixer_list": ["a", 1.0]})
    assert not valid(stage="dpo", backend="open_instruct", args={"dataset_name": "a"})
    assert not valid(args={"nothing_has_this": 1})


@pytest.mark.parametrize("key", ["stage", "backend", "name"])
def test_interpolated_options_are_taken(key: str) -> None:
    stage_file = {"stage": "sft", "args": {"learning_rate": "${oc.env:LR}"}}
    assert validator().is_valid({**stage_file, key: "${oc.env:THIS}"})


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 16, -1, 2.5, "", "x", "no", "off", "on", "none", "16", "0", "0016",
    "9999999999", 10**9, "fp16", "bf16", "fp32", "sft", "dpo", "trl", "open_instruct", "zero2", [], [1],
    {}, {"global": 128}, {"global": "128", "per_device": 16}, {"global": None}, {"global": 0},
    {"global": True}, {"global": 1.5}, {"global": "128\n"}, {"per_devise": 1}, {"liger": "engaged"},
    {"liger": None}, {"liger": False}, {"liger": True}, {"packing": True}, {"packing": "on"},
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


def test_words_that_yaml_1_1_reads_as_a_bool_are_taken_as_text_too() -> None:
    def valid(**keys: Any) -> bool:
        return bool(validator().is_valid({"stage": "sft", "args": {}, **keys}))

    assert valid(mixed_precision="off") and valid(mixed_precision="No")
    assert not valid(mixed_precision="on")
    assert valid(expect={"liger": "no", "packing": "Yes"})
    assert not valid(expect={"liger": "yes"})
    assert not valid(expect={"loss": "no"})
    assert valid(args={"use_lora": "off", "packing": "ON"})


def test_options_that_launch_does_not_have() -> None:
    assert not validator().is_valid({"stage": "sft", "learning_rate": 1e-5})
    assert not validator().is_valid({"stage": "sft", "args": {}, "num_gpus": 8})
    assert validator().is_valid({"stage": "sft", "args": None})


# --- arguments ------------------------------------------------------------------------------------


def signature(known: Field) -> tuple[Any, ...]:
    return (known.kind, known.many, known.choices, known.nullable, "dict" in known.type, known.bare)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), ENTRIES)
def test_every_kind_of_field_takes_what_launch_takes(backend: str, name: str) -> None:
    schema, entry = schema_of(backend, name), BACKENDS[backend].STAGES[name]
    kinds = {
        (signature(field), field.name in schema.splits): field
        for field in schema.fields.values()
        if field.name not in entry.hints
    }
    wrong = []
    for value in (*ODD, *MORE):
        args = {field.name: value for field in kinds.values()}
        ours, theirs = underlined(backend, name, args), refused(wrong_with(backend, name, args))
        wrong += [(key, value, "underlined, and taken") for key in ours - theirs]
        wrong += [
            (key, value, "refused, and not underlined")
            for key in theirs - ours
            if not invisible(schema.fields[key], value)
        ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), ENTRIES)
def test_generated_arguments_are_judged_as_launch_does(backend: str, name: str) -> None:
    schema, checked = schema_of(backend, name), args_validator(backend, name)
    accepted = rejected = 0
    for args in generate(schema, SETS, seed=9):
        found = wrong_with(backend, name, args)
        faults = refused(found)
        seen = [
            k for k in faults if k not in schema.fields or not invisible(schema.fields[k], args[k])
        ]
        if not faults and not any(f.layer == "parser" for f in found):
            accepted += 1
            assert checked.is_valid(args), args
        elif seen:
            rejected += 1
            assert not checked.is_valid(args), args
    assert accepted > SETS / 8
    assert rejected > SETS / 8


@pytest.mark.parametrize(("backend", "name"), ENTRIES)
def test_defaults_are_valid_values(backend: str, name: str) -> None:
    fields = schema_of(backend, name).fields
    properties = made(backend, name)["definitions"][f"{backend}-{name}"]["properties"]
    told = {key: properties[key]["default"] for key in fields if "default" in properties[key]}
    assert told == {key: fields[key].default for key in told}
    assert len(told) > len(fields) / 3
    assert underlined(backend, name, told) == refused(wrong_with(backend, name, told)) == set()


def test_what_is_no_field_is_refused() -> None:
    checked = args_validator("open_instruct", "sft")
    for key in ("use_liger_kernal", "learning-rate", "no_use_lora", "learn", "stage"):
        assert not checked.is_valid({key: True})
        assert not checked.is_valid({key: None})


# --- what an editor shows -------------------------------------------------------------------------


def property_of(backend: str, name: str, key: str) -> dict[str, Any]:
    found = made(backend, name)["definitions"][f"{backend}-{name}"]["properties"][key]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("backend", "name"), ENTRIES)
def test_a_field_tells_its_type_default_and_place(backend: str, name: str) -> None:
    for key, known in schema_of(backend, name).fields.items():
        told = property_of(backend, name, key)
        for text in (told["description"], told["markdownDescription"]):
            assert known.type in text
            assert known.where in text
            if known.default is not None:
                assert json.dumps(known.default).replace("`", "") in text


def test_what_is_told_besides() -> None:
    notes = {"seed": ["read in 3 places", "since `abc`"]}
    built = json_schema.combined(
        [schema_of("open_instruct", "sft")], notes={("open_instruct", "sft"): notes}
    )
    told = built["definitions"]["open_instruct-sft"]["properties"]
    assert told["seed"]["markdownDescription"].endswith("\n\nread in 3 places\n\nsince `abc`")
    assert told["seed"]["description"].endswith("\nread in 3 places\nsince abc")
    # launch's own default, with its reason
    assert "launch sets" in told["logging_steps"]["description"]


def test_a_default_that_is_no_json_is_told_and_not_offered() -> None:
    schema = schema_of("open_instruct", "sft")
    odd = {"seed": {1}, "exp_name": float("nan"), "learning_rate": None, "timeout": ()}
    fields = {k: replace(f, default=odd.get(k, f.default)) for k, f in schema.fields.items()}
    fields["learning_rate"] = replace(fields["learning_rate"], default_text="computed()")
    built = json_schema.combined([replace(schema, fields=fields)])
    told = built["definitions"]["open_instruct-sft"]["properties"]
    assert not any("default" in told[key] for key in odd)
    assert "computed()" in told["learning_rate"]["description"]
    json.dumps(built, allow_nan=False)


@pytest.mark.parametrize(("backend", "name"), ENTRIES)
def test_moved_keys_are_refused_with_the_reason(backend: str, name: str) -> None:
    entry, checked = BACKENDS[backend].STAGES[name], args_validator(backend, name)
    for key, moved in entry.moved.items():
        if key in schema_of(backend, name).fields:
            continue
        told = property_of(backend, name, key)
        assert moved.why in told["errorMessage"]
        assert moved.to is None or f"`{moved.to}`" in told["errorMessage"]
        assert told["doNotSuggest"] is True
        for value in (None, True, 1, "x", "", [], ["x"], {}):
            assert len(list(checked.iter_errors({key: value}))) == 1


def test_a_key_that_is_always_refused_says_what_to_write_instead() -> None:
    told = property_of("open_instruct", "dpo", "dataset_name")
    assert "`mixer_list:" in told["errorMessage"]
    checked = args_validator("open_instruct", "dpo")
    assert not checked.is_valid({"dataset_name": "x"})
    assert checked.is_valid({"dataset_name": None})
    # a hint alone refuses nothing
    assert checked.is_valid({"checkpointing_steps": 500})


def test_the_names_of_deepspeed_configs_are_explained() -> None:
    named = whole()["properties"]["deepspeed"]["anyOf"][0]
    told = dict(zip(named["enum"], named["enumDescriptions"], strict=True))
    assert told["zero2"] == "ZeRO stage 2"
    assert "offloaded" in told["zero3_offload"]
    assert set(told) == {*keys.DEEPSPEED, "none"}


def test_a_subset_of_stages_and_backends() -> None:
    only = jsonschema.Draft7Validator(json_schema.combined([schema_of("trl", "dpo")]))
    assert only.is_valid({"stage": "dpo", "backend": "trl", "args": {"dataset_name": "a"}})
    # without a backend launch would take the other one
    assert not only.is_valid({"stage": "dpo", "args": {}})
    assert not only.is_valid({"stage": "sft", "backend": "trl", "args": {}})
