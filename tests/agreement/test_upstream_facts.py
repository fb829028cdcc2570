"""Everything that our code, tests and pages cite of upstream is there, and nothing cites it by number."""

import re
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest
from conftest import NO_PACKAGES, REPOSITORY

from launcher.pin import cited
from launcher.upstream import citations, locate
from launcher.upstream.open_instruct import PIN
from launcher.upstream.source.packages import find_package
from launcher.upstream.trainers import BACKENDS

CITING = cited.find_citations(REPOSITORY)
COMMITTED = citations.committed()
TABLES = COMMITTED.tables
DISTRIBUTIONS = {"olmo_core": "ai2-olmo-core"}
OTHERS = sorted(release for release in TABLES if not release.startswith("open_instruct "))
NUMBER = re.compile(r"(?:\w+/)*\w+\.py:\d+")


def test_what_is_cited_is_found_in_the_checkout_and_listed_as_it_is_there(checkout: Path) -> None:
    """No golden file can make this green: what is cited is looked for in upstream's own text."""
    packages = locate.packages_below("open_instruct", checkout)
    table = citations.table(packages, cited.in_package(CITING, "open_instruct"))
    stale = [
        f"{citing.where}: {citing.citation}"
        for citing in cited.stale(CITING, [table, *COMMITTED.at_pin_or_later()[1:]], PIN)
    ]
    assert stale == [], "cited, and not in the checkout: mend the citation"
    assert table == TABLES[f"open_instruct {PIN}"], "make snapshot"


def test_every_rule_is_confirmed_at_the_pin() -> None:
    """After a move somebody compares the old and the new text, and writes `reviewed` beside the rule."""
    backend = BACKENDS["open_instruct"]
    confirmed = citations.commits("open_instruct", backend.BASELINE)
    standing = citations.RuleStanding("", confirmed, TABLES[f"open_instruct {PIN}"].get)
    waiting = {}
    for rule in cited.rules_of("open_instruct"):
        changed = standing.changed(rule)
        if changed:
            waiting[getattr(rule, "about", rule.__name__)] = changed
    assert waiting == {}, f"launch pin move {PIN[:12]} lists them with their texts"


@pytest.mark.parametrize("release", OTHERS)
def test_what_is_cited_of_a_package_is_found_in_its_release(release: str) -> None:
    package, _, number = release.partition(" ")
    folder = find_package(package)
    if folder is None or version(DISTRIBUTIONS.get(package, package)).partition("+")[0] != number:
        pytest.skip(f"{NO_PACKAGES}: {release} is not installed")
    trees = {tree: found for tree, found in cited.installed(CITING).items() if tree == release}
    named = cited.in_package(CITING, package)
    table = citations.table({package: trees[release]}, named)
    missing = [
        f"{citing.where}: {citing.citation}"
        for citing in CITING
        if citing.citation in {*named} - {*table}
    ]
    assert missing == []
    assert table == TABLES[release], "make snapshot"


def test_every_cited_package_has_a_table() -> None:
    packages = {citing.citation.partition("/")[0] for citing in CITING}
    assert packages == {release.partition(" ")[0] for release in TABLES}


def test_no_rule_page_or_comment_cites_by_number() -> None:
    """Strings of tests are logs, and pages show in fences what a command printed."""
    numbered = []
    for path in sorted((REPOSITORY / "launcher").rglob("*.py")):
        numbered += [
            f"{path.name}: {text}" for text in NUMBER.findall(path.read_text(encoding="utf-8"))
        ]
    for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]:
        if path.name in {"CHANGELOG.md", "cited.md"}:
            continue
        prose = re.sub(
            r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        )
        numbered += [f"{path.name}: {text}" for text in NUMBER.findall(prose)]
    assert numbered == []


def test_a_table_is_read_as_it_is_written() -> None:
    text = files("launcher.upstream.snapshots").joinpath("cited.json").read_text(encoding="utf-8")
    assert cited.Tables(COMMITTED).text() == text
    assert COMMITTED.pin == PIN
