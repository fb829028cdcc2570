"""Verdicts over generated argument sets: how two judges are compared, and how verdicts are kept."""

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from argument_sets import Arguments
from conftest import DATA, NO_PACKAGES

from launcher.config.load import Config
from launcher.stage import stage
from launcher.upstream import locate
from launcher.upstream.locate import Locator, Upstream
from launcher.upstream.schema import Schema
from launcher.upstream.trainers import BACKENDS

GOLDEN = DATA / "agreement"


@functools.cache
def schema_of(backend: str, stage_name: str, release: str = "") -> Schema:
    """The committed schema, of the pin or of another known release, whatever is installed or
    checked out.
    """
    return locate.load_schema(snapshot_of(backend, release), stage_name)


@functools.cache
def snapshot_of(backend: str, release: str = "") -> Upstream:
    return Upstream(
        backend=backend,
        root=None,
        source="snapshot",
        is_named=False,
        pin="",
        version="",
        release=release,
    )


@dataclass(slots=True)
class Snapshot(Locator):
    """Finds nothing but the committed snapshots."""

    release: str = ""

    def find(self, backend: str) -> Upstream:
        return (
            locate.locate(backend, search=())
            if backend == "trl"
            else snapshot_of(backend, self.release)
        )


def words_of(schema: Schema, arguments: Arguments) -> list[str]:
    """The command line that launch would hand to upstream."""
    words = []
    for key, value in arguments.items():
        if value is not None:
            words += [f"--{key}", *schema.words(key, value)]
    return words


def refused_by_launch(
    backend: str, stage_name: str, sets: Sequence[Arguments], release: str = ""
) -> list[list[str]]:
    """For each set, what launch says that upstream's parser would refuse; `stage_name` may be a
    further script's.
    """
    own = BACKENDS[backend].STAGES[stage_name].stage
    options = {
        "backend": backend,
        "stage": own or stage_name,
        **({"script": stage_name} if own else {}),
    }
    locator = Snapshot(release=release)
    told = []
    for arguments in sets:
        config = Config(path=Path("made.yaml"), shape="stage", options=options, args=arguments)
        found = stage.judge_stage_file(config, locator=locator).findings
        told.append(
            [
                f"{f.code}: {f.message}"
                for f in found
                if (f.severity, f.layer) == ("error", "parser")
            ]
        )
    return told


def differences(
    sets: Sequence[Arguments],
    ours: Sequence[list[str]],
    theirs: Sequence[Any],
    left_out: Sequence[bool],
) -> list[str]:
    """The sets of which launch and upstream say different things, with what each says."""
    found = []
    for arguments, mine, other, out in zip(sets, ours, theirs, left_out, strict=True):
        if not out and bool(mine) != bool(other):
            found.append(f"{arguments}: launch says {mine or 'fine'}, upstream {other or 'fine'}")
    return found


def bits(flags: Sequence[bool]) -> str:
    """One hexadecimal digit for four sets, the first set in its highest bit."""
    text = "".join("01"[flag] for flag in flags)
    return f"{int(text, 2):0{-(-len(flags) // 4)}x}"


def flags(text: str, count: int) -> list[bool]:
    """The inverse of `bits`."""
    return [digit == "1" for digit in f"{int(text, 16):0{count}b}"]


def digest(words: Any) -> str:
    """Tells whether the generated sets are still those that were judged."""
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def ask(backend: str, root: Path | None, requests: list[dict[str, Any]]) -> list[Any]:
    """One answer to each request, after the description of the parsers; skips without packages."""
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    environ |= {
        "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "no",
    }  # fmt: skip
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
