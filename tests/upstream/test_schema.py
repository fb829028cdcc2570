"""Fields, words and flags: what upstream's argparse would make of them.

tests/agreement/ compares refusals with the real parsers on thousands of argument sets; here are the
reasons that a user reads.
"""

from typing import Any

import pytest

from launcher.upstream.schema import (
    Field,
    OptionString,
    Schema,
    Values,
    find_json_fault,
    parse_field,
    render_field,
    spell_flag,
)

FIELDS = (
    Field(name="max_steps", type="int | None", kind="int"),
    Field(name="rate", type="float", kind="float", default=1.0),
    Field(name="run_name", type="str", kind="str", default="x"),
    Field(name="push_to_hub", type="bool", kind="bool", default=True),
    Field(name="packing", type="bool", kind="bool", default=False),
    Field(name="maybe", type="bool | None", kind="bool"),
    Field(name="mixer_list", type="list[str]", kind="str", many=True),
    Field(name="mode", type="Literal", kind="choice", choices=("hf", "local"), default="local"),
    Field(name="sched", type="str", kind="str", choices=("linear", "cosine"), default="linear"),
    Field(name="mixer", type="dict | None", kind="dict"),
)


def schema_of(*fields: Field, splits: frozenset[str] = frozenset()) -> Schema:
    return Schema(
        backend="open_instruct",
        stage="sft",
        script="open_instruct/finetune.py",
        source="snapshot",
        version="pin",
        fields={field.name: field for field in fields},
        splits=splits,
    )


SCHEMA = schema_of(*FIELDS, splits=frozenset({"mixer_list"}))


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("max_steps", ["8.0"], "whole number"),
        ("max_steps", [], "at least one value"),
        ("max_steps", ["1", "2"], "takes one value, got 2"),
        ("rate", ["-1e-05"], "read as a flag"),
        ("rate", ["x"], "a number, got `x`"),
        ("run_name", ["-x"], "read as a flag"),
        ("run_name", ["-h y"], "read as a flag"),
        ("run_name", ["--rate=1 x"], "read as a flag"),
        ("push_to_hub", ["maybe"], "true or false"),
        ("maybe", [], "at least one value"),
        ("mode", ["s3"], "not one of hf, local"),
        ("sched", ["square"], "not one of linear, cosine"),
        ("mixer", ["{}"], "every value"),
    ],
)
def test_a_refusal_says_why(name: str, words: list[str], reason: str) -> None:
    assert reason in (SCHEMA.refusal(name, words) or "")


@pytest.mark.parametrize(
    ("name", "words"),
    [("max_steps", ["-8"]), ("rate", ["1e-5"]), ("push_to_hub", []), ("mixer_list", ["a", "-1"])],
)
def test_words_that_are_taken(name: str, words: list[str]) -> None:
    assert SCHEMA.refusal(name, words) is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rate", 5e-6, ["5e-06"]),
        ("run_name", "a b", ["a b"]),
        ("mixer_list", ["a", 1.0, False], ["a", "1.0", "False"]),
        ("mixer_list", "allenai/a 0.25\n b 10 ", ["allenai/a", "0.25", "b", "10"]),
        ("mixer", {"a": [1, None]}, ['{"a": [1, null]}']),
    ],
)
def test_the_words_of_a_value(name: str, value: Any, words: list[str]) -> None:
    assert SCHEMA.words(name, value) == words


def test_text_is_ascii() -> None:
    assert spell_flag({"ü": 1}) == '{"\\u00fc": 1}'


def test_a_nullable_field_takes_the_word_none() -> None:
    schema = schema_of(Field(name="n", type="int | None", kind="int", default=3, nullable=True))
    assert schema.refusal("n", ["None"]) is None
    assert Values(schema, {"n": "null"})["n"] is None


def test_flags_stand_in_the_parsers_order() -> None:
    push = OptionString("push_to_hub")
    no_push = OptionString("push_to_hub", negated=True)
    flags = schema_of(FIELDS[3], FIELDS[1]).flags()
    assert list(flags.items()) == [
        ("-h", None),
        ("--help", None),
        ("--push_to_hub", push),
        ("--push-to-hub", push),
        ("--no_push_to_hub", no_push),
        ("--no-push-to-hub", no_push),
        ("--rate", OptionString("rate")),
    ]


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("rat", OptionString("rate")),
        ("run-name", OptionString("run_name")),
        ("run_", OptionString("run_name")),
        # both spellings of one field: ambiguous
        ("run", None),
        ("no_push_to_hub", OptionString("push_to_hub", negated=True)),
        ("help", None),
    ],
)
def test_the_flag_that_argparse_takes_a_key_for(key: str, flag: OptionString | None) -> None:
    assert SCHEMA.taken_as(key) == flag


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("max_steps", "8", 8),
        ("rate", "x", 1.0),
        ("push_to_hub", "no", False),
        ("packing", [], True),
        ("mixer_list", ["a", 1.0], ["a", "1.0"]),
        ("mixer", "", {}),
    ],
)
def test_a_value_is_typed_or_else_the_default(name: str, word: Any, value: Any) -> None:
    assert Values(SCHEMA, {name: word})[name] == value


def test_values_know_which_of_them_were_given() -> None:
    values = Values(SCHEMA, {"max_steps": "8", "rate": "x", "unknown": 1, "maybe": None})
    assert [name for name in values if values.given(name)] == ["max_steps"]
    assert values.get("unknown", 5) == 5
    assert set(values) == {field.name for field in FIELDS}


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_field_survives_json(field: Field) -> None:
    assert parse_field(render_field(field)) == field


@pytest.mark.parametrize("value", ["{}", '{"a": {"b": "1.5", "c": "true"}}', "path.json", None])
def test_json_that_upstream_reads(value: str | None) -> None:
    assert find_json_fault(value) is None


@pytest.mark.parametrize(
    "value", ["{", '{"a": "²"}', '{"a": {"b": "1.²"}}', "{" + '"a": {' * 100_000]
)
def test_json_that_upstream_cannot_read(value: str) -> None:
    assert find_json_fault(value) is not None
