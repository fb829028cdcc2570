"""Rules written about the pin, on a source that is not the pin."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Write

from launcher.config import load
from launcher.errors import Finding, Severity
from launcher.rules.rule import cites, say
from launcher.stage import stage
from launcher.upstream import citations, locate
from launcher.upstream.citations import CitedPlace
from launcher.upstream.locate import Locator
from launcher.upstream.source.packages import Folder
from launcher.upstream.trainers import BACKENDS

OLD = """LIMIT = 5

class Data:
    limit: int = 3

    def load(self):
        if self.limit > LIMIT:
            raise ValueError("too many")

def load(one):
    return one.load()
"""


def write_package(place: Path, text: str) -> dict[str, Folder]:
    """open-instruct with one module."""
    folder = place / "open_instruct"
    folder.mkdir(parents=True)
    (folder / "data.py").write_text(text)
    return {folder.name: Folder(folder)}


DATA = "open_instruct/data.py"
LIMIT = f"{DATA}::[LIMIT = 5]"
FIELD = f"{DATA}::Data[limit: int]"
TEST = f"{DATA}::Data.load[if self.limit]"
CALL = f"{DATA}::load[one.load()]"


@pytest.mark.parametrize(
    ("text", "cited"),
    [
        ("data.py::load[one.load()]", [CALL]),
        (
            "(data.py::load, trl/trainer/a.py::A.__init__[x = y], and b.py::[LIMIT = 5]): why",
            [
                "open_instruct/data.py::load",
                "trl/trainer/a.py::A.__init__[x = y]",
                "open_instruct/b.py::[LIMIT = 5]",
            ],
        ),
        ("`utils.py::load[x #2]`.", ["open_instruct/utils.py::load[x #2]"]),
        ("tests/test_a.py::test_b, test_a.py::test_b and data.py:12, data.py", []),
    ],
)
def test_citations_of_a_text(text: str, cited: list[str]) -> None:
    assert list(citations.find_citations(text)) == cited
    for name in cited:
        assert str(citations.parse(name)) == name


PLACES = {LIMIT, FIELD, TEST, CALL}
GUARDED_CALL = "    if one.limit > LIMIT:\n        return one.load()"


@pytest.mark.parametrize(
    ("line", "replacement", "lost", "differing"),
    [
        ("LIMIT = 5", "import os\n\nLIMIT  =  5  ", set(), set()),
        ("self.limit > LIMIT", "self.limit >= LIMIT", set(), {TEST}),
        ("LIMIT = 5", "LIMIT = 6", {LIMIT}, {LIMIT}),
        # a class of another name has its methods still
        ("class Data", "class Other", {FIELD}, {FIELD}),
        ("    def load(self)", "    def read(self)", {TEST}, {TEST}),
        # the line survives inside a new `if`: it is located, and no longer always true
        ("    return one.load()", GUARDED_CALL, set(), {CALL}),
        ("    return one.load()", "    print(one)\n    return one.load()", set(), set()),
        ("            raise", "            self.limit = 0\n            raise", set(), {TEST}),
        ("one.load()", "one.load()\n    one.load()", {CALL}, {CALL}),
        (OLD, "def broken(", PLACES, PLACES),
    ],
)
def test_a_line_is_as_it_was_where_its_function_is(
    tmp_path: Path, line: str, replacement: str, lost: set[str], differing: set[str]
) -> None:
    table = citations.build_table(write_package(tmp_path / "pin", OLD), [*PLACES, "torch/a.py::f"])
    assert set(table) == PLACES
    other = write_package(tmp_path / "other", OLD.replace(line, replacement))
    source = citations.SourceFiles(other)
    assert {name for name in PLACES if source.place(name) is None} == lost

    def find_changed(place: Callable[[str], CitedPlace | None], **options: Any) -> set[str]:
        standing = citations.RuleStanding("aaaaaaaaaaaa", {"a 1": table}, place, **options)
        assert not standing.changed(rule_about("torch/a.py::f"))
        return {name for name in PLACES if standing.changed(rule_about(name))}

    assert find_changed(source.place) == differing
    # of a release that is merely installed the line alone counts
    assert find_changed(source.place, by_line=True) <= differing
    assert find_changed(source.place, others=frozenset({DATA})) == set()
    assert find_changed(lambda name: None) == PLACES


def rule_about(
    *places: str, reviewed: tuple[str, ...] = ()
) -> Callable[[object], Iterator[Finding]]:
    @cites(*places, reviewed=reviewed)
    def rule(_: object) -> Iterator[Finding]:
        yield from ()

    return rule


def test_a_rule_counts_in_full_once_it_is_confirmed(tmp_path: Path) -> None:
    guarded = OLD.replace("    return one.load()", GUARDED_CALL)
    old = citations.build_table(write_package(tmp_path / "old", OLD), [CALL])
    new = citations.build_table(write_package(tmp_path / "new", guarded), [CALL])
    commits = {"open_instruct aaa111": old, "open_instruct bbb222": new}
    at_old = citations.RuleStanding("aaaaaaaaaaaa", commits, old.get)
    at_new = citations.RuleStanding("aaaaaaaaaaaa", commits, new.get)

    finding = say("error", "x", "y", "z")
    for rule in (rule_about(CALL), rule_about(CALL, reviewed=("ccc",))):
        assert at_new.weighed(finding, at_new.changed(rule)).severity == "note"
    confirmed = rule_about(CALL, reviewed=("bbb",))
    assert at_new.changed(confirmed) == []
    assert at_old.changed(confirmed) == []


@pytest.mark.parametrize(
    ("by_line", "severity", "weaker"),
    [
        (True, "error", "warning"),
        (True, "warning", "note"),
        (True, "note", "note"),
        (False, "error", "note"),
        (False, "warning", "note"),
        (False, "note", "note"),
    ],
)
def test_a_finding_says_what_its_rule_was_written_for(
    by_line: bool, severity: Severity, weaker: Severity
) -> None:
    commits = {"open_instruct " + 40 * "a": {CALL: CitedPlace(7, "a", "b")}}
    standing = citations.RuleStanding("aaaaaaaaaaaa", commits, lambda _: None, by_line=by_line)
    original = say(severity, "x", "y", "z")
    finding = standing.weighed(original, standing.changed(rule_about(CALL)))
    assert finding.severity == weaker
    assert finding.message == "z (written for aaaaaaaaaaaa: this source differs at data.py:7)"


def test_numbers_are_rendered() -> None:
    lines = {CALL: 12}
    text = f"`data.py::load[one.load()]` and ({CALL}), data.py::gone"
    rendered = citations.render_citations(text, lines.get)
    assert rendered == "`data.py:12` and (open_instruct/data.py:12), data.py"

    rendered = citations.render_citations("finetune.py::main[snapshot_download] asks")
    assert re.fullmatch(r"finetune\.py:\d+ asks", rendered)


def judge(checkout: Path, write: Write, more: str, data: str = "[a/b, 1.0]") -> dict[str, Finding]:
    """The findings of an SFT file on a checkout, by code."""
    text = (
        "stage: sft\ndeepspeed: none\nbatch: {global: 8, per_device: 1}\nargs:\n"
        f"  model_name_or_path: m\n  dataset_mixer_list: {data}\n{more}"
    )
    locator = Locator(checkout=checkout, allow_unpinned=True)
    judged = stage.judge_stage_file(load.load(write("a.yaml", text)), locator=locator)
    return {finding.code: finding for finding in judged.findings}


def test_a_rule_weighs_less_where_what_it_cites_is_gone(
    checkout: Path, tmp_path: Path, write: Write
) -> None:
    copy = tmp_path / "oi" / "open_instruct"
    shutil.copytree(checkout / "open_instruct", copy)
    hub = "  get_tokenizer_fn: nosuch\n"
    data = copy / "dataset_transformation.py"
    lines = data.read_text().splitlines(keepends=True)
    # another commit, that changes nothing of what is cited, and moves all of it
    data.write_text("import os\n" + "".join(lines))
    moved = judge(copy.parent, write, hub)
    assert "unpinned-checkout" in moved
    assert moved["unknown-function"].severity == "error"

    cited = next(number for number, line in enumerate(lines) if "GET_TOKENIZER_FN[" in line)
    lines[cited] = lines[cited].replace("GET_TOKENIZER_FN[", "dict(GET_TOKENIZER_FN)[")
    data.write_text("".join(lines))
    weaker = judge(copy.parent, write, hub)["unknown-function"]
    assert weaker.severity == "note"
    reason = "written for 45901fd00593: this source differs at dataset_transformation.py:920"
    assert weaker.message == f"{moved['unknown-function'].message} ({reason})"
    assert judge(checkout, write, hub)["unknown-function"] == moved["unknown-function"]

    # rules about other lines, and of launch's own, count as before
    odd = judge(copy.parent, write, "", data="[a/b, x]")
    assert odd["mixer-amount"].severity == "error"
    # what only another script's file has is no matter here, nor what defines its arguments
    (copy / "dpo_tune_cache.py").write_text("args = None\n")
    (copy / "dpo_utils.py").write_text("args = None\n")
    lora = "  use_lora: true\n  use_qlora: false\n  lora_rank: 0\n"
    other_script = judge(copy.parent, write, lora)
    assert other_script["out-of-range"].severity == "error"
    assert other_script["push-by-default"].severity == "warning"


def test_at_the_commit_that_all_rules_were_written_for_nothing_is_asked(checkout: Path) -> None:
    for source in (locate.locate("open_instruct", checkout=checkout), locate.locate("trl")):
        backend = BACKENDS[source.backend]
        if source.pinned and backend.PIN == backend.BASELINE:
            assert locate.load_schema(source, "sft").standing is None
