"""Rules written about the pin, on a source that is not the pin."""

import json
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from conftest import NO_PACKAGES, Write

from launcher.config import load
from launcher.errors import Finding
from launcher.pin import snapshot
from launcher.rules.rule import cites, say
from launcher.stage import stage
from launcher.upstream import citations, locate
from launcher.upstream.locate import Locator
from launcher.upstream.source.packages import Folder

OLD = """LIMIT = 5

class Data:
    limit: int = 3

    def load(self):
        if self.limit > LIMIT:
            raise ValueError("too many")

def load(one):
    return one.load()
"""


def package(place: Path, text: str, name: str = "open_instruct") -> dict[str, Folder]:
    (place / name).mkdir(parents=True, exist_ok=True)
    (place / name / "data.py").write_text(text)
    return {name: Folder(place / name)}


def test_citations_and_their_weights() -> None:
    text = "data.py:3,7-9 and trl/trainer/a.py:12; b.py:4 beside it, hf_argparser.py:1\nutils.py:2 alone"
    assert list(citations.citations(text)) == [
        "open_instruct/data.py:3", "open_instruct/data.py:7", "trl/trainer/a.py:12",
        "trl/trainer/b.py:4", "trl/trainer/hf_argparser.py:1", "open_instruct/utils.py:2",
    ]  # fmt: skip

    # the weights
    @cites("a.py:1", "b.py:2")
    def rule(_: object) -> Iterator[Finding]:
        yield from ()

    severities = {"error": "warning", "warning": "note", "note": "note"}
    for given, less in severities.items():
        one = say(given, "x", "y", "z")  # type: ignore[arg-type]
        told = citations.downgrade(one, citations.of_rule(rule))
        assert (told.severity, told.message) == (
            less, "z (of the pin: what it has at a.py:1, b.py:2 is not in this source)",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        (("LIMIT = 5", "import os\n\nLIMIT  =  5"), set()),
        (("self.limit > LIMIT", "self.limit >= LIMIT"), {7}),
        (("LIMIT = 5", "LIMIT = 6"), {1}),
        # a class of another name has its methods still; the same words elsewhere are not the same place
        (("class Data", "class Other"), {4}),
        (("    def load(self)", "    def read(self)"), {7}),
        (("    return one.load()", "    if one.limit > LIMIT:\n        one.load()"), {11}),
        ((OLD, "def broken("), {1, 4, 7, 11}),
    ],
)
def test_a_line_stands_where_its_function_holds_it(tmp_path: Path, change: tuple[str, str], gone: set[int]) -> None:
    lines = [f"open_instruct/data.py:{number}" for number in (1, 4, 7, 11)]
    known = citations.table(package(tmp_path / "pin", OLD), [*lines, "torch/a.py:1"])
    assert list(known) == [f"open_instruct/data.py:{number}" for number in sorted((1, 4, 7, 11), key=str)]
    stands = citations.CitationCheck(known, package(tmp_path / "other", OLD.replace(*change)))
    assert {int(line.rpartition(":")[2]) for line in lines if not stands(line)} == gone
    assert stands("torch/a.py:1") and stands("open_instruct/never.py:1")
    elsewhere = citations.CitationCheck(known, {}, frozenset({"open_instruct/data.py"}))
    assert all(map(elsewhere, lines)) and not any(map(citations.CitationCheck(known, {}), lines))


def judged(checkout: Path, write: Write, more: str, data: str = "[a/b, 1.0]") -> dict[str, Finding]:
    """The findings of an SFT file on a checkout, by code."""
    text = (
        "stage: sft\ndeepspeed: none\nbatch: {global: 8, per_device: 1}\nargs:\n"
        f"  model_name_or_path: m\n  dataset_mixer_list: {data}\n{more}"
    )
    locator = Locator(checkout=checkout, allow_unpinned=True)
    found = stage.judge(load.load(write("a.yaml", text)), locator=locator).findings
    return {one.code: one for one in found}


def test_a_rule_weighs_less_where_what_it_cites_is_gone(checkout: Path, tmp_path: Path, write: Write) -> None:
    copy = tmp_path / "oi" / "open_instruct"
    shutil.copytree(checkout / "open_instruct", copy)
    hub, data = "  get_tokenizer_fn: nosuch\n", copy / "dataset_transformation.py"
    lines = data.read_text().splitlines(keepends=True)
    # another commit, that changes nothing of what is cited, and moves all of it
    data.write_text("import os\n" + "".join(lines))
    found = judged(copy.parent, write, hub)
    assert "unpinned-checkout" in found and found["unknown-function"].severity == "error"
    assert "GET_TOKENIZER_FN[" in lines[919]
    lines[919] = lines[919].replace("GET_TOKENIZER_FN[", "dict(GET_TOKENIZER_FN)[")
    data.write_text("".join(lines))
    weaker = judged(copy.parent, write, hub)["unknown-function"]
    assert weaker.severity == "warning"
    assert weaker.message == found["unknown-function"].message + (
        " (of the pin: what it has at dataset_transformation.py:920 is not in this source)"
    )
    assert judged(checkout, write, hub)["unknown-function"] == found["unknown-function"]
    # rules about other lines, and of launch's own, count as before
    odd = judged(copy.parent, write, "", data="[a/b, x]")
    assert odd["mixer-amount"].severity == "error"
    # what only another script's file has is no matter here, nor what defines its arguments
    (copy / "dpo_tune_cache.py").write_text("args = None\n")
    (copy / "dpo_utils.py").write_text("args = None\n")
    lora = "  use_lora: true\n  use_qlora: false\n  lora_rank: 0\n"
    found = judged(copy.parent, write, lora)
    assert found["out-of-range"].severity == "error"
    assert found["push-by-default"].severity == "warning"


def committed(backend: str) -> object:
    return json.loads(files("launcher.upstream.snapshots").joinpath("cited.json").read_text())[backend]


def test_the_tables_are_those_of_the_pinned_sources(checkout: Path) -> None:
    packages = locate.packages_below("open_instruct", checkout)
    assert snapshot.cited_of("open_instruct", packages) == committed("open_instruct"), "make snapshot"
    # at the pin nothing is asked
    for source in (locate.locate("open_instruct", checkout=checkout), locate.locate("trl")):
        if source.pinned:
            assert locate.load_schema(source, "sft").stands is None


def test_the_table_is_that_of_the_pinned_packages() -> None:
    source = locate.locate("trl")
    if source.root is None or not source.pinned:
        pytest.skip(f"{NO_PACKAGES}: {source.pin}")
    packages = {n: tree for n, tree in source.packages.items() if isinstance(tree, Folder)}
    assert snapshot.cited_of("trl", packages) == committed("trl"), "make snapshot"
