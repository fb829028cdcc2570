"""All that code, tests and pages cite of upstream is there, and nothing is cited by number."""

import re
from collections.abc import Iterator
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
COMMITTED = citations.load_committed()
TABLES = COMMITTED.tables
AT_PIN = f"open_instruct {PIN}"
OTHER_RELEASES = sorted(name for name in TABLES if not name.startswith("open_instruct "))
DISTRIBUTIONS = {"olmo_core": "ai2-olmo-core"}


def test_what_is_cited_is_in_the_checkout_and_listed_as_it_is_there(checkout: Path) -> None:
    """No golden file can make this green: upstream's own text is searched."""
    packages = locate.find_packages("open_instruct", checkout)
    table = citations.build_table(packages, cited.select_package(CITING, "open_instruct"))
    tables = [table, *COMMITTED.at_pin_or_later()[1:]]
    stale = [
        f"{citing.where}: {citing.citation}" for citing in cited.find_stale(CITING, tables, PIN)
    ]
    assert stale == [], "cited, and not in the checkout: mend the citation"
    assert table == TABLES[AT_PIN], "make snapshot"


def test_every_rule_is_confirmed_at_the_pin() -> None:
    """After a move somebody compares the old and the new text, and adds `reviewed` to the rule."""
    confirmed = citations.load_commits("open_instruct", BACKENDS["open_instruct"].BASELINE)
    standing = citations.RuleStanding("", confirmed, TABLES[AT_PIN].get)
    waiting = []
    for rule in cited.list_rules("open_instruct"):
        if standing.changed(rule):
            waiting.append(getattr(rule, "about", rule.__name__))
    assert waiting == [], f"launch pin move {PIN[:12]} lists them with their texts"


@pytest.mark.parametrize("release", OTHER_RELEASES)
def test_what_is_cited_of_a_package_is_in_its_release(release: str) -> None:
    package, _, number = release.partition(" ")
    installed = find_package(package)
    if installed is None:
        pytest.skip(f"{NO_PACKAGES}: {package} is not installed")
    if version(DISTRIBUTIONS.get(package, package)).partition("+")[0] != number:
        pytest.skip(f"{NO_PACKAGES}: {release} is not installed")

    names = cited.select_package(CITING, package)
    table = citations.build_table({package: cited.find_installed(CITING)[release]}, names)

    missing = set(names) - set(table)
    assert [citing.where for citing in CITING if citing.citation in missing] == []
    assert table == TABLES[release], "make snapshot"


def test_every_cited_package_has_a_table() -> None:
    packages = {citing.citation.partition("/")[0] for citing in CITING}
    assert packages == {release.partition(" ")[0] for release in TABLES}


FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def texts() -> Iterator[tuple[str, str]]:
    """The name and the text of each module and each page; a page's fences show what was printed."""
    modules = sorted((REPOSITORY / "launcher").rglob("*.py"))
    for path in modules:
        yield path.name, path.read_text(encoding="utf-8")
    docs = REPOSITORY / "docs"
    for path in [*REPOSITORY.glob("*.md"), *docs.glob("*.md")]:
        if path.name not in {"CHANGELOG.md", "cited.md"}:
            text = path.read_text(encoding="utf-8")
            yield path.name, FENCE.sub("", text)


def test_no_rule_page_or_comment_cites_by_number() -> None:
    numbered = []
    for name, text in texts():
        for citation in re.findall(r"(?:\w+/)*\w+\.py:\d+", text):
            numbered.append(f"{name}: {citation}")
    assert numbered == []


def test_a_table_is_read_as_it_is_written() -> None:
    text = files("launcher.upstream.snapshots").joinpath("cited.json").read_text(encoding="utf-8")
    assert cited.Tables(COMMITTED).text() == text
    assert COMMITTED.pin == PIN
