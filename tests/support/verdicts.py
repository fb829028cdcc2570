"""Verdicts over generated argument sets: how two judges are compared, and how verdicts are kept."""

import functools
import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argument_sets import Arguments
from conftest import DATA
from real_process import ask_process

from launcher.config.load import Config
from launcher.errors import Finding
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
        if backend == "trl":
            return locate.locate(backend, search=())
        return snapshot_of(backend, self.release)


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
    options = {"backend": backend, "stage": stage_name}
    stage_of_script = BACKENDS[backend].STAGES[stage_name].stage
    if stage_of_script:
        options = {"backend": backend, "stage": stage_of_script, "script": stage_name}
    locator = Snapshot(release=release)
    refusals = []
    for arguments in sets:
        config = Config(path=Path("made.yaml"), shape="stage", options=options, args=arguments)
        refusals.append(_parser_errors(stage.judge_stage_file(config, locator=locator).findings))
    return refusals


def _parser_errors(findings: Iterable[Finding]) -> list[str]:
    errors = []
    for finding in findings:
        if finding.severity == "error" and finding.layer == "parser":
            errors.append(f"{finding.code}: {finding.message}")
    return errors


def differences(
    sets: Sequence[Arguments],
    by_launch: Sequence[list[str]],
    by_upstream: Sequence[Any],
    left_out: Sequence[bool],
) -> list[str]:
    """The sets that either launch or upstream refuses, with what each says."""
    differences = []
    for arguments, launch, upstream, is_left_out in zip(
        sets, by_launch, by_upstream, left_out, strict=True
    ):
        if bool(launch) != bool(upstream) and not is_left_out:
            differences.append(
                f"{arguments}: launch says {launch or 'fine'}, upstream {upstream or 'fine'}"
            )
    return differences


def bits(flags: Sequence[bool]) -> str:
    """One hexadecimal digit for four sets, the first set in its highest bit."""
    text = "".join("1" if flag else "0" for flag in flags)
    digits = math.ceil(len(flags) / 4)
    return f"{int(text, 2):0{digits}x}"


def flags(text: str, count: int) -> list[bool]:
    """The inverse of `bits`."""
    digits = f"{int(text, 16):0{count}b}"
    return [digit == "1" for digit in digits]


def digest(words: Any) -> str:
    """Tells whether the generated sets are still those that were judged."""
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def ask(backend: str, root: Path | None, requests: list[dict[str, Any]]) -> list[Any]:
    """The description of the parsers, then an answer to each request; skips without packages."""
    environ = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "no",
    }
    if root is not None:
        environ["PYTHONPATH"] = str(root)
    asked = ["describe", *requests]
    return ask_process("real_parser.py", backend, requests=asked, environ=environ)
