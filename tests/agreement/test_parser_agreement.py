"""The findings of layer `parser` against open-instruct's own parser, on generated argument sets.

The verdicts of the pin lie in data/agreement/open_instruct.json, so that ours are compared with them
also where no checkout or no packages are. LAUNCH_GOLDEN=write asks the real parser and writes them
anew. TRL's is in test_trl_agreement.py.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from argument_sets import Arguments, generate
from conftest import NO_PACKAGES
from verdicts import GOLDEN, ask, bits, differences, digest, flags, refused_by_launch, schema_of, words_of

from launcher.upstream import locate, open_instruct
from launcher.upstream.schema import Field, Schema

SETS = 2500  # for each stage
SEED = 20260407
STAGES = ("sft", "dpo")
VERDICTS = GOLDEN / "open_instruct.json"

# What only a running process can tell.
COMPUTED_DEFAULTS = {"optim"}
# A list of an enum's members: argparse knows no choices, the enum itself refuses the others.
ENUM_LISTS = {"debug": "DebugOption"}
# A class of TRL's that is called with each word.
CLASSES = {"datasets": "DatasetConfig", "parallelism_config": "ParallelismConfig"}


@cache
def sets_of(stage_name: str) -> tuple[Arguments, ...]:
    return tuple(generate(schema_of("open_instruct", stage_name), SETS, SEED))


@cache
def words() -> dict[str, list[list[str]]]:
    return {name: [words_of(schema_of("open_instruct", name), one) for one in sets_of(name)] for name in STAGES}


@cache
def ours(stage_name: str) -> list[list[str]]:
    return refused_by_launch("open_instruct", stage_name, sets_of(stage_name))


@pytest.fixture(scope="session")
def open_instruct_answers(checkout: Path) -> list[Any]:
    requests = [{"stage": name, "words": one} for name in STAGES for one in words()[name]]
    return ask("open_instruct", checkout, requests)


@pytest.fixture(scope="session")
def theirs(open_instruct_answers: list[Any]) -> dict[str, list[str | None]]:
    """Why the real parser and `__post_init__` refuse each set, None where they take it."""
    return {name: open_instruct_answers[1 + i * SETS : 1 + (i + 1) * SETS] for i, name in enumerate(STAGES)}


@pytest.fixture(scope="session")
def trl_description() -> dict[str, Any]:
    installed = locate.locate("trl")
    if installed.root is None or not installed.pinned:
        pytest.skip(f"{NO_PACKAGES}: {installed.pin} is not installed")
    described: dict[str, Any] = ask("trl", None, [])[0]
    return described


def test_the_kept_verdicts_are_those_of_the_real_parser(theirs: dict[str, list[str | None]]) -> None:
    made = {
        "commit": open_instruct.PIN,
        "seed": SEED,
        "count": SETS,
        "words": digest(words()),
        "refused": {name: bits([a is not None for a in theirs[name]]) for name in STAGES},
    }
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        VERDICTS.write_text(json.dumps(made, indent=1) + "\n")
    assert json.loads(VERDICTS.read_text()) == made, "make golden"


@pytest.mark.parametrize("stage_name", STAGES)
def test_launch_says_what_the_kept_verdicts_say(stage_name: str) -> None:
    kept = json.loads(VERDICTS.read_text())
    assert kept["words"] == digest(words()), "other sets were generated: make golden"
    refused = flags(kept["refused"][stage_name], SETS)
    found = differences(sets_of(stage_name), ours(stage_name), refused, [False] * SETS)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("stage_name", STAGES)
def test_the_generated_sets_are_a_fair_mixture(stage_name: str) -> None:
    assert 0.3 < sum(map(bool, ours(stage_name))) / SETS < 0.8


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
def test_the_snapshot_is_the_real_open_instruct_parser(open_instruct_answers: list[Any], stage_name: str) -> None:
    schema, theirs = schema_of("open_instruct", stage_name), open_instruct_answers[0][stage_name]
    assert list(schema.fields) == list(theirs)
    assert unlike(schema, theirs) == []


@pytest.mark.parametrize("stage_name", STAGES)
def test_the_snapshot_is_the_real_trl_parser(trl_description: dict[str, Any], stage_name: str) -> None:
    schema, theirs = schema_of("trl", stage_name), trl_description[stage_name]
    assert list(schema.fields) == list(theirs)
    assert unlike(schema, theirs) == []
