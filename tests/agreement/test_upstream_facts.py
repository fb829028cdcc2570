"""Every `file:line` of upstream that our code cites still holds what is claimed of it."""

import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import NO_PACKAGES, REPOSITORY

from launcher.upstream.citations import citations
from launcher.upstream.source.packages import find_package

CONSTANT = re.compile(r'^(_[A-Z]+) = "(.*)"$', re.MULTILINE)


def cited_in(path: Path) -> Iterator[str]:
    """Each `folder/file.py:line` that one of our files names, in words or in code."""
    text = path.read_text(encoding="utf-8")
    for name, value in CONSTANT.findall(text):
        text = text.replace(f"{{{name}}}", value)
    return citations(text)


def all_cited() -> set[str]:
    return {citation for path in (REPOSITORY / "launcher").rglob("*.py") for citation in cited_in(path)}


def line_of(root: Path, citation: str) -> str:
    name, _, number = citation.rpartition(":")
    lines = (root / name).read_text(encoding="utf-8").splitlines()
    return lines[int(number) - 1] if int(number) <= len(lines) else ""


# What each cited line holds: `citation<TAB>its first characters`, sorted. LAUNCH_GOLDEN=write renews it:
# whoever does so looks at what has changed.
FACTS_FILE = REPOSITORY / "tests" / "data" / "cited_lines.txt"
HELD = 60


def facts() -> dict[str, str]:
    lines = FACTS_FILE.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t", 1) for line in lines)


# The releases whose lines are cited, by the package's folder: (distribution, version).
RELEASES = {
    "accelerate": ("accelerate", "1.15.0"), "datasets": ("datasets", "5.2.0"),
    "deepspeed": ("deepspeed", "0.19.8"), "huggingface_hub": ("huggingface-hub", "1.33.0"),
    "liger_kernel": ("liger-kernel", "0.7.0"), "olmo_core": ("ai2-olmo-core", "2.6.0"),
    "pandas": ("pandas", "3.1.1"), "peft": ("peft", "0.21.2"), "torch": ("torch", "2.13.0"), "trl": ("trl", "1.16.0"),
    "transformers": ("transformers", "5.17.0"), "wandb": ("wandb", "0.31.0"),
}  # fmt: skip


def folder_of(package: str, checkout: Path) -> Path | None:
    """What the paths of a package's citations are relative to; None where that release is not installed."""
    if package == "open_instruct":
        return checkout
    distribution, release = RELEASES[package]
    folder = find_package(package)
    if folder is None or version(distribution).partition("+")[0] != release:
        return None
    return folder.parent


def held(root: Path, citation: str) -> str:
    return line_of(root, citation).strip()[:HELD]


def test_every_cited_line_is_listed_with_what_it_holds(checkout: Path) -> None:
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        old, lines = facts(), []
        for citation in sorted(all_cited()):
            root = folder_of(citation.partition("/")[0], checkout)
            text = old.get(citation, "") if root is None else held(root, citation)
            lines.append(f"{citation}\t{text}\n")
        FACTS_FILE.write_text("".join(lines), encoding="utf-8")
    listed = facts().keys()
    assert all_cited() - listed == set(), "cited in launcher/, not listed: LAUNCH_GOLDEN=write"
    assert listed - all_cited() == set(), "listed, no longer cited in launcher/"


@pytest.mark.parametrize("package", ["open_instruct", *RELEASES])
def test_the_lines_hold_what_we_say(package: str, checkout: Path) -> None:
    root = folder_of(package, checkout)
    if root is None:
        pytest.skip(f"{NO_PACKAGES}: {' '.join(RELEASES[package])} is not installed")
    own = {name: text for name, text in facts().items() if name.startswith(f"{package}/")}
    wrong = {name: (text, held(root, name)) for name, text in own.items() if not text or held(root, name) != text}
    assert not wrong
