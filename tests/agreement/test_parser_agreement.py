"""The findings of layer `parser` against open-instruct's own parser, on generated argument sets.

The verdicts of each known commit lie in data/agreement/, so that launch's are compared with them
also where no checkout or no packages are. LAUNCH_GOLDEN=write asks the real parsers of the
checkouts that are here and writes theirs anew. TRL's is in test_trl_agreement.py.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import checkouts
import pytest
from argument_sets import Arguments, generate
from conftest import NO_PACKAGES
from verdicts import (
    GOLDEN,
    ask,
    bits,
    differences,
    digest,
    flags,
    refused_by_launch,
    schema_of,
    words_of,
)

from launcher.upstream import locate
from launcher.upstream.schema import Field, Schema

SETS = 2500
"""Argument sets for each stage."""
SEED = 20260407
STAGES = ("sft", "dpo")

Description = dict[str, Any]
"""Every argument of a parser by its name: flags, number of words, choices, default and type."""


@cache
def sets_of(commit: str, stage: str) -> tuple[Arguments, ...]:
    return tuple(generate(schema_of("open_instruct", stage, commit), SETS, SEED))


@cache
def words_by_stage(commit: str) -> dict[str, list[list[str]]]:
    by_stage = {}
    for stage in STAGES:
        schema = schema_of("open_instruct", stage, commit)
        by_stage[stage] = [words_of(schema, arguments) for arguments in sets_of(commit, stage)]
    return by_stage


def verdicts_file(commit: str) -> Path:
    return GOLDEN / f"open_instruct_{commit[:12]}.json"


@pytest.fixture(scope="session", params=checkouts.COMMITS, ids=lambda commit: commit[:8])
def commit(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def open_instruct_answers(commit: str) -> list[Any]:
    """A description of the real parsers, then why they refuse each set, None where they do not."""
    requests = []
    for stage in STAGES:
        for words in words_by_stage(commit)[stage]:
            requests.append({"stage": stage, "words": words})
    return ask("open_instruct", checkouts.require(commit), requests)


@pytest.fixture(scope="session")
def trl_description() -> dict[str, Description]:
    installed = locate.locate("trl")
    if installed.root is None or not installed.pinned:
        pytest.skip(f"{NO_PACKAGES}: {installed.pin} is not installed")
    description: dict[str, Description] = ask("trl", None, [])[0]
    return description


def test_the_kept_verdicts_are_those_of_the_real_parser(
    commit: str, open_instruct_answers: list[Any]
) -> None:
    is_refused = [answer is not None for answer in open_instruct_answers[1:]]
    verdicts = {
        "commit": commit,
        "seed": SEED,
        "count": SETS,
        "words": digest(words_by_stage(commit)),
        "refused": {"sft": bits(is_refused[:SETS]), "dpo": bits(is_refused[SETS:])},
    }
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        verdicts_file(commit).write_text(json.dumps(verdicts, indent=1) + "\n")
    assert json.loads(verdicts_file(commit).read_text()) == verdicts, "make golden"


def test_verdicts_are_kept_of_the_known_commits_alone() -> None:
    known = {verdicts_file(commit) for commit in checkouts.COMMITS}
    for path in set(GOLDEN.glob("open_instruct_*.json")) - known:
        if os.environ.get("LAUNCH_GOLDEN") == "write":
            path.unlink()
    assert set(GOLDEN.glob("open_instruct_*.json")) == known, "make golden"


@pytest.mark.parametrize("stage", STAGES)
def test_launch_says_what_the_kept_verdicts_say(commit: str, stage: str) -> None:
    kept = json.loads(verdicts_file(commit).read_text())
    assert kept["words"] == digest(words_by_stage(commit)), "other sets were generated: make golden"
    sets = sets_of(commit, stage)
    refused = flags(kept["refused"][stage], SETS)
    by_launch = refused_by_launch("open_instruct", stage, sets, commit)
    different = differences(sets, by_launch, refused, [False] * SETS)
    assert not different, "\n".join(different)


COMPUTED_DEFAULTS = {"optim"}
"""What only a running process can tell."""
ENUM_LISTS = {"debug": "DebugOption"}
"""A list of an enum's members: argparse knows no choices, the enum itself refuses the others."""
TYPES = {
    "bool": "string_to_bool",
    "choice": "<lambda>",
    # classes of TRL's that are called with each word
    "datasets": "DatasetConfig",
    "parallelism_config": "ParallelismConfig",
}


def described(field: Field) -> Description:
    """A field of the snapshot, as `real_parser.describe` describes an argparse action."""
    dashed = field.name.replace("_", "-")
    flags = [f"--{field.name}"]
    if dashed != field.name:
        flags.append(f"--{dashed}")
    if field.kind == "bool" and field.default is True:
        flags += [f"--no_{field.name}", f"--no-{dashed}"]
    nargs = None
    if field.many:
        nargs = "+"
    elif field.bare:
        nargs = "?"
    description = {
        "flags": flags,
        "nargs": nargs,
        "choices": list(field.choices),
        "default": field.default,
        "type": TYPES.get(field.name) or TYPES.get(field.kind, field.kind),
    }
    if field.name in ENUM_LISTS:
        description |= {"type": ENUM_LISTS[field.name], "choices": []}
    return description


def assert_is_parser(schema: Schema, description: Description) -> None:
    assert list(schema.fields) == list(description)
    for name, field in schema.fields.items():
        by_snapshot = described(field)
        if name in COMPUTED_DEFAULTS:
            by_snapshot["default"] = description[name]["default"]
        for aspect, value in description[name].items():
            assert by_snapshot[aspect] == value, (name, aspect)


@pytest.mark.parametrize("stage", STAGES)
def test_the_snapshot_is_the_real_open_instruct_parser(
    commit: str, open_instruct_answers: list[Any], stage: str
) -> None:
    schema = schema_of("open_instruct", stage, commit)
    assert_is_parser(schema, open_instruct_answers[0][stage])


@pytest.mark.parametrize("stage", STAGES)
def test_the_snapshot_is_the_real_trl_parser(
    trl_description: dict[str, Description], stage: str
) -> None:
    assert_is_parser(schema_of("trl", stage), trl_description[stage])
