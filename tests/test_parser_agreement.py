"""The findings of layer `parser` against upstream's own parser, on generated argument sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from argument_sets import Arguments, generate
from conftest import NO_PACKAGES

from launcher import stage, upstream
from launcher.config import Config
from launcher.schema import Field, Schema

SETS = 500  # for each stage and backend
SEED = 20260407
STAGES = ("sft", "dpo")

# What only a running process can tell.
COMPUTED_DEFAULTS = {"optim"}
# A list of an enum's members: argparse knows no choices, the enum itself refuses the others.
ENUM_LISTS = {"debug": "DebugOption"}
# A class of TRL's that is called with each word.
CLASSES = {"datasets": "DatasetConfig", "parallelism_config": "ParallelismConfig"}


def schema_of(backend: str, stage_name: str) -> Schema:
    pinned = upstream.Upstream(
        backend=backend, root=None, source="snapshot", asked=False, pin="", version=""
    )
    return upstream.load_schema(pinned, stage_name)


def ask(backend: str, root: Path | None, requests: list[dict[str, Any]]) -> list[Any]:
    """One answer to each request, after the description of the parsers; skips without packages."""
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "no",
    }
    if root is not None:
        environ["PYTHONPATH"] = str(root)
    script = Path(__file__).with_name("real_parser.py")
    done = subprocess.run(
        [sys.executable, str(script), backend],
        input="".join(f"{json.dumps(request)}\n" for request in requests),
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 3:
        pytest.skip(f"{NO_PACKAGES}: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def words_of(schema: Schema, arguments: Arguments) -> list[str]:
    """The command line that launch would hand to upstream."""
    words = []
    for key, value in arguments.items():
        if value is not None:
            words += [f"--{key}", *schema.words(key, value)]
    return words


def refused_by_launch(backend: str, stage_name: str, arguments: Arguments) -> list[str]:
    """What launch says that upstream's parser would refuse."""
    options = {"backend": backend, "stage": stage_name}
    config = Config(path=Path("made.yaml"), shape="stage", options=options, args=arguments)
    found = [
        f
        for f in stage.judge(config).findings
        if (f.severity, f.layer) == ("error", "parser")
        # TRL's __post_init__ reads the machine too: its parser alone is compared
        and (backend != "trl" or f.code == "bad-value" or f.code.endswith("-key"))
    ]
    return [f"{f.code}: {f.message}" for f in found]


@cache
def sets_of(backend: str, stage_name: str) -> tuple[Arguments, ...]:
    return tuple(generate(schema_of(backend, stage_name), SETS, SEED))


def requests(backend: str) -> list[dict[str, Any]]:
    return [
        {"stage": name, "words": words_of(schema_of(backend, name), arguments)}
        for name in STAGES
        for arguments in sets_of(backend, name)
    ]


@pytest.fixture(scope="session")
def open_instruct_answers(checkout: Path) -> list[Any]:
    return ask("open_instruct", checkout, requests("open_instruct"))


@pytest.fixture(scope="session")
def trl_answers() -> list[Any]:
    installed = upstream.locate("trl")
    if installed.root is None or not installed.pinned:
        pytest.skip(f"{NO_PACKAGES}: {installed.pin} is not installed")
    return ask("trl", None, requests("trl"))


def assert_agreement(backend: str, stage_name: str, answers: list[Any]) -> None:
    start = 1 + STAGES.index(stage_name) * SETS
    accepted_wrongly, refused_wrongly = [], []
    for arguments, theirs in zip(
        sets_of(backend, stage_name), answers[start : start + SETS], strict=True
    ):
        ours = refused_by_launch(backend, stage_name, arguments)
        if theirs is not None and not ours:
            accepted_wrongly.append(f"{arguments}: {theirs}")
        if theirs is None and ours:
            refused_wrongly.append(f"{arguments}: {ours}")
    assert not accepted_wrongly, "\n".join(accepted_wrongly)
    assert not refused_wrongly, "\n".join(refused_wrongly)


@pytest.mark.parametrize("stage_name", STAGES)
def test_open_instruct_refuses_exactly_what_launch_says(
    open_instruct_answers: list[Any], stage_name: str
) -> None:
    assert_agreement("open_instruct", stage_name, open_instruct_answers)


@pytest.mark.parametrize("stage_name", STAGES)
def test_trl_refuses_exactly_what_launch_says(trl_answers: list[Any], stage_name: str) -> None:
    assert_agreement("trl", stage_name, trl_answers)


@pytest.mark.parametrize("stage_name", STAGES)
def test_the_generated_sets_are_a_fair_mixture(stage_name: str) -> None:
    refused = sum(
        bool(refused_by_launch("open_instruct", stage_name, arguments))
        for arguments in sets_of("open_instruct", stage_name)
    )
    assert 0.3 < refused / SETS < 0.8


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


def differences(schema: Schema, theirs: dict[str, Any]) -> list[str]:
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
    open_instruct_answers: list[Any], stage_name: str
) -> None:
    schema, theirs = schema_of("open_instruct", stage_name), open_instruct_answers[0][stage_name]
    assert list(schema.fields) == list(theirs)
    assert differences(schema, theirs) == []


@pytest.mark.parametrize("stage_name", STAGES)
def test_the_snapshot_is_the_real_trl_parser(trl_answers: list[Any], stage_name: str) -> None:
    schema, theirs = schema_of("trl", stage_name), trl_answers[0][stage_name]
    assert list(schema.fields) == list(theirs)
    assert differences(schema, theirs) == []
