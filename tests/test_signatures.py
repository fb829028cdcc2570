"""Which of the log lines that a verdict looks for a source still prints."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from launcher import signatures
from launcher.backends import BACKENDS
from launcher.signatures import PATTERNS
from launcher.sources import Folder, Sources

LIGER = "Attempting to apply liger-kernel. fused_linear_cross_entropy=True"


def said(text: str, backend: str = "open_instruct") -> list[str]:
    return signatures.said(backend, [ast.parse(text)])


def test_a_text_that_is_printed_is_known() -> None:
    (known,) = said(f"logger.info({LIGER!r})")
    assert LIGER.split(".")[0][:20] in known or "iger" in known


@pytest.mark.parametrize(
    "text", ["", "x = 1", "logger.info('liger kernels are on')", "x = f'{a}{b}'"]
)
def test_other_texts_are_not(text: str) -> None:
    assert said(text) == []


def test_a_reworded_line_is_missed() -> None:
    assert said(f"logger.info({LIGER.replace('apply', 'use')!r})") == []


@pytest.mark.parametrize(
    "text",
    [
        f"logger.info({LIGER!r})",
        f"logger.info(f'{LIGER}')",
        f"print('''{LIGER}''')",
        f"TEXT = {LIGER!r}\nlogger.info(TEXT)",
        f"def f():\n    class C:\n        x = [{LIGER!r}]",
    ],
)
def test_wherever_it_stands(text: str) -> None:
    assert said(text)


def test_every_pattern_has_a_key_of_its_own() -> None:
    for patterns in PATTERNS.values():
        assert len({signatures.key(known) for known in patterns}) == len(patterns)


def test_the_pinned_source_says_what_the_snapshot_has(checkout: Path) -> None:
    from launcher import upstream

    told = upstream.snapshot("open_instruct")["said"]
    for stage, entry in BACKENDS["open_instruct"].STAGES.items():
        sources = Sources({"open_instruct": Folder(checkout / "open_instruct")})
        for label in upstream.snapshot("open_instruct")["files"]:
            sources.module(label.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        assert entry.script
        assert set(told[stage]) <= set(signatures.said("open_instruct", sources.parsed()))
