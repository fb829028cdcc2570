"""The findings of layer `parser` against open-instruct's own parser, on generated argument sets.

The verdicts of each known commit lie in data/agreement/, so that ours are compared with them also where no
checkout or no packages are. LAUNCH_GOLDEN=write asks the real parsers of the checkouts that are here and writes
theirs anew. TRL's is in test_trl_agreement.py.
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

SETS = 2500  # for each stage
SEED = 20260407
STAGES = ("sft", "dpo")

# What only a running process can tell.
COMPUTED_DEFAULTS = {"optim"}
# A list of an enum's members: argparse knows no choices, the enum itself refuses the others.
ENUM_LISTS = {"debug": "DebugOption"}
# A class of TRL's that is called with each word.
CLASSES = {"datasets": "DatasetConfig", "parallelism_config": "ParallelismConfig"}


@cache
def sets_of(commit: str, stage_name: str) -> tuple[Arguments, ...]:
    return tuple(generate(schema_of("open_instruct", stage_name, commit), SETS, SEED))


@cache
def words(commit: str) -> dict[str, list[list[str]]]:
    by_stage = {}
    for name in STAGES:
        schema = schema_of("open_instruct", name, commit)
        by_stage[name] = [words_of(schema, one) for one in sets_of(commit, name)]
    return by_stage


@cache
def ours(commit: str, stage_name: str) -> list[list[str]]:
    return refused_by_launch("open_instruct", stage_name, sets_of(commit, stage_name), commit)


def verdicts_of(commit: str) -> Path:
    """Where the verdicts of a known commit lie."""
    return GOLDEN / f"open_instruct_{commit[:12]}.json"


@pytest.fixture(
    scope="session", params=checkouts.COMMITS, ids=[commit[:8] for commit in checkouts.COMMITS]
)
def commit(request: pytest.FixtureRequest) -> str:
    known: str = request.param
    return known


@pytest.fixture(scope="session")
def open_instruct_answers(commit: str) -> list[Any]:
    requests = [{"stage": name, "words": one} for name in STAGES for one in words(commit)[name]]
    return ask("open_instruct", checkouts.require(commit), requests)


@pytest.fixture(scope="session")
def theirs(open_instruct_answers: list[Any]) -> dict[str, list[str | None]]:
    """Why the real parser and `__post_init__` refuse each set, None where they take it."""
    return {
        name: open_instruct_answers[1 + i * SETS : 1 + (i + 1) * SETS]
        for i, name in enumerate(STAGES)
    }


@pytest.fixture(scope="session")
def trl_description() -> dict[str, Any]:
    installed = locate.locate("trl")
    if installed.root is None or not installed.pinned:
        pytest.skip(f"{NO_PACKAGES}: {installed.pin} is not installed")
    described: dict[str, Any] = ask("trl", None, [])[0]
    return described


def test_the_kept_verdicts_are_those_of_the_real_parser(
    commit: str, theirs: dict[str, list[str | None]]
) -> None:
    made = {
        "commit": commit,
        "seed": SEED,
        "count": SETS,
        "words": digest(words(commit)),
        "refused": {name: bits([a is not None for a in theirs[name]]) for name in STAGES},
    }
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        verdicts_of(commit).write_text(json.dumps(made, indent=1) + "\n")
    assert json.loads(verdicts_of(commit).read_text()) == made, "make golden"


def test_verdicts_are_kept_of_the_known_commits_alone() -> None:
    known = {verdicts_of(commit) for commit in checkouts.COMMITS}
    for path in set(GOLDEN.glob("open_instruct_*.json")) - known:
        if os.environ.get("LAUNCH_GOLDEN") == "write":
            path.unlink()
    assert set(GOLDEN.glob("open_instruct_*.json")) == known, "make golden"


@pytest.mark.parametrize("stage_name", STAGES)
def test_launch_says_what_the_kept_verdicts_say(commit: str, stage_name: str) -> None:
    kept = json.loads(verdicts_of(commit).read_text())
    assert kept["words"] == digest(words(commit)), "other sets were generated: make golden"
    refused = flags(kept["refused"][stage_name], SETS)
    found = differences(
        sets_of(commit, stage_name), ours(commit, stage_name), refused, [False] * SETS
    )
    assert not found, "\n".join(found)


@pytest.mark.parametrize("stage_name", STAGES)
def test_the_generated_sets_are_a_fair_mixture(commit: str, stage_name: str) -> None:
    assert 0.3 < sum(map(bool, ours(commit, stage_name))) / SETS < 0.8


def described(known: Field) -> dict[str, Any]:
    """A field of the snapshot, said the way `real_parser.describe` says an argparse action."""
    flags = [f"--{known.name}"]
    if "_" in known.name:
        flags.append(f"--{known.name.replace('_', '-')}")
    if known.kind == "bool" and known.default is True:
        flags += [f"--no_{known.name}", f"--no-{known.name.replace('_', '-')}"]
    return {
        "flags": flags,
        "nargs": "+" if known.many else "?" if known.bare else None,
        "choices": list(known.choices),
        "default": known.default,
        "type": {"bool": "string_to_bool", "choice": "<lambda>"}.get(known.kind, known.kind),
    }


def unlike(schema: Schema, theirs: dict[str, Any]) -> list[str]:
    found = []
    for name, known in schema.fields.items():
        ours = described(known)
        if name in COMPUTED_DEFAULTS:
            ours["default"] = theirs[name]["default"]
        if name in ENUM_LISTS:
            ours |= {"type": ENUM_LISTS[name], "choices": []}
        ours["type"] = CLASSES.get(name, ours["type"])
        for what, value in theirs[name].items():
            if ours[what] != value:
                found.append(f"{name}: {what} is {value!r}, the snapshot says {ours[what]!r}")
    return found


@pytest.mark.parametrize("stage_name", STAGES)
def test_the_snapshot_is_the_real_open_instruct_parser(
    commit: str, open_instruct_answers: list[Any], stage_name: str
) -> None:
    schema = schema_of("open_instruct", stage_name, commit)
    theirs = open_instruct_answers[0][stage_name]
    assert list(schema.fields) == list(theirs)
    assert unlike(schema, theirs) == []


@pytest.mark.parametrize("stage_name", STAGES)
def test_the_snapshot_is_the_real_trl_parser(
    trl_description: dict[str, Any], stage_name: str
) -> None:
    schema, theirs = schema_of("trl", stage_name), trl_description[stage_name]
    assert list(schema.fields) == list(theirs)
    assert unlike(schema, theirs) == []
