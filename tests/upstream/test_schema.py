"""Fields, words and flags: what upstream's argparse would make of them."""

from typing import Any

import pytest

from launcher.upstream.schema import (
    Field,
    OptionString,
    Schema,
    Values,
    field_as_json,
    field_from_json,
    json_fault,
    text,
)


def schema_of(*fields: Field, splits: frozenset[str] = frozenset()) -> Schema:
    return Schema(
        backend="open_instruct", stage="sft", script="open_instruct/finetune.py", source="snapshot",
        version="pin", fields={known.name: known for known in fields}, splits=splits,
    )  # fmt: skip


COUNT = Field(name="max_steps", type="int | None", kind="int")
RATE = Field(name="rate", type="float", kind="float", default=1.0)
NAME = Field(name="run_name", type="str", kind="str", default="x")
PUSH = Field(name="push_to_hub", type="bool", kind="bool", default=True)
PACK = Field(name="packing", type="bool", kind="bool", default=False)
MAYBE = Field(name="maybe", type="bool | None", kind="bool")
SETS = Field(name="mixer_list", type="list[str]", kind="str", many=True)
MODE = Field(name="mode", type="Literal", kind="choice", choices=("hf", "local"), default="local")
SCHED = Field(name="sched", type="str", kind="str", choices=("linear", "cosine"), default="linear")
MIXER = Field(name="mixer", type="dict | None", kind="dict")
NUMBERS = Field(name="numbers", type="list[int]", kind="int", many=True)
ALL = (COUNT, RATE, NAME, PUSH, PACK, MAYBE, SETS, MODE, SCHED, MIXER, NUMBERS)


@pytest.mark.parametrize(
    ("known", "words", "part"),
    [
        (COUNT, ["8"], None),
        (COUNT, ["-8"], None),
        (COUNT, ["8.0"], "whole number"),
        (COUNT, ["none"], "whole number"),
        (COUNT, [], "at least one value"),
        (COUNT, ["1", "2"], "takes one value, got 2"),
        (RATE, ["1e-5"], None),
        (RATE, ["-1e-05"], "read as a flag"),
        (RATE, ["x"], "a number, got `x`"),
        (NAME, ["-x"], "read as a flag"),
        (NAME, ["-h y"], "read as a flag"),
        (NAME, ["--rate"], "read as a flag"),
        (NAME, ["--rate=1 x"], "read as a flag"),
        (PUSH, ["maybe"], "true or false"),
        (PUSH, [], None),
        (MAYBE, [], "at least one value"),
        (SETS, ["a", "1.0"], None),
        (SETS, ["a", "-1"], None),
        (MODE, ["s3"], "not one of hf, local"),
        (SCHED, ["square"], "not one of linear, cosine"),
        (MIXER, [""], None),
        (MIXER, ["{}"], "every value"),
    ],
)
def test_refusal(known: Field, words: list[str], part: str | None) -> None:
    reason = schema_of(*ALL).refusal(known.name, words)
    assert reason is None if part is None else part in (reason or "")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (5e-6, ["5e-06"]),
        ("a b", ["a b"]),
        (["a", 1.0, False], ["a", "1.0", "False"]),
        ({"a": [1, None]}, ['{"a": [1, null]}']),
    ],
)
def test_words(value: Any, words: list[str]) -> None:
    assert schema_of().words("x", value) == words


def test_words_of_one_text_and_nullable_fields() -> None:
    schema = schema_of(SETS, NAME, splits=frozenset({"mixer_list"}))
    assert schema.words("mixer_list", "allenai/a 0.25\n b 10 ") == ["allenai/a", "0.25", "b", "10"]
    assert schema.words("run_name", "a b") == ["a b"]
    assert text({"ü": 1}) == '{"\\u00fc": 1}'
    # nullable fields take the word none
    known = Field(name="n", type="int | None", kind="int", default=3, nullable=True)
    schema = schema_of(known)
    assert schema.refusal("n", ["None"]) is None
    assert Values(schema, {"n": "null"})["n"] is None


def test_flags_in_the_parsers_order() -> None:
    assert schema_of(PUSH, RATE).flags() == {
        "-h": None,
        "--help": None,
        "--push_to_hub": OptionString("push_to_hub"),
        "--push-to-hub": OptionString("push_to_hub"),
        "--no_push_to_hub": OptionString("push_to_hub", negated=True),
        "--no-push-to-hub": OptionString("push_to_hub", negated=True),
        "--rate": OptionString("rate"),
    }


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("rate", OptionString("rate")),
        ("rat", OptionString("rate")),
        ("run-name", OptionString("run_name")),
        ("run", None),  # both spellings of one field: ambiguous
        ("run_", OptionString("run_name")),
        ("no_push_to_hub", OptionString("push_to_hub", negated=True)),
        ("help", None),
    ],
)
def test_what_argparse_takes_a_key_for(key: str, flag: OptionString | None) -> None:
    assert schema_of(*ALL).taken_as(key) == flag


def test_values_are_typed_and_fall_back_to_defaults() -> None:
    values = Values(
        schema_of(*ALL),
        {"max_steps": "8", "rate": "x", "push_to_hub": "no", "mode": "hf", "mixer_list": ["a", 1.0],
         "packing": [], "mixer": "", "unknown": 1, "maybe": None},
    )  # fmt: skip
    assert (values["max_steps"], values["rate"], values["push_to_hub"]) == (8, 1.0, False)
    assert (values["mode"], values["mixer_list"], values["mixer"]) == ("hf", ["a", "1.0"], {})
    assert values["packing"] is True
    assert values.given("max_steps") and not values.given("rate") and not values.given("maybe")
    assert values.get("unknown", 5) == 5
    assert len(values) == len(ALL) and set(values) == {known.name for known in ALL}


@pytest.mark.parametrize("known", [COUNT, PUSH, SETS, MODE, SCHED, MIXER])
def test_fields_survive_json(known: Field) -> None:
    assert field_from_json(field_as_json(known)) == known
    assert "many" not in field_as_json(COUNT)


@pytest.mark.parametrize(
    ("value", "faulty"),
    [
        ("{}", False),
        ('{"a": {"b": "1.5", "c": "true"}}', False),
        ("path.json", False),
        (None, False),
        ("{", True),
        ('{"a": "²"}', True),
        ('{"a": {"b": "1.²"}}', True),
        ("{" + '"a": {' * 100_000, True),
    ],
)
def test_json_as_upstream_reads_it(value: Any, faulty: bool) -> None:
    assert (json_fault(value) is not None) is faulty
