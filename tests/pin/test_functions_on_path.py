"""What changed in the functions that a script reaches, though no argument did."""

import json
from dataclasses import dataclass
from pathlib import Path

import checkouts
import pytest
from repositories import UTILS, commit, script, transformation

from launcher.cli.main import main
from launcher.errors import Exit
from launcher.pin import difference, pin
from launcher.pin.difference import CommitDifference
from launcher.pin.functions import FunctionDifference
from launcher.upstream.open_instruct import BASELINE
from launcher.upstream.trainers import BACKENDS

PIN = BACKENDS["open_instruct"].PIN

HELPERS = """
import logging
logger = logging.getLogger(__name__)
TEMPLATES = {{"tulu": "{template}"}}

class Trainer(External):
    def train_batch(self, batch):
        return {loss}

class Unused:
    def train_batch(self, batch):
        return batch * {unused}

def render(row):
    {log}
    return TEMPLATES["tulu"] + row

def scale(norm):
    return {scale}

def never(row):
    return {unused}
"""
FILE = "helpers.py"
READS = """
for row in rows:
    use(render(row))
scale(args.max_seq_length)
External2(Trainer())
"""


@dataclass(frozen=True)
class Case:
    """What of the helpers is otherwise at the newer commit, and which symbols then stand in the answer."""

    change: dict[str, str]
    symbols: set[str]


OLD = {
    "template": "A",
    "loss": "batch",
    "unused": "1",
    "log": "logger.info('a')",
    "scale": "norm if norm > 0 else 1",
}
CASES = {
    "a guard is gone": Case({"scale": "norm"}, {f"{FILE}::scale"}),
    "a method that only the trainer calls": Case(
        {"loss": "batch * 2"}, {f"{FILE}::Trainer.train_batch"}
    ),
    "a table": Case({"template": "B"}, {f"{FILE}::TEMPLATES"}),
    "a log line": Case({"log": "logger.info('b')"}, set()),
    "what nothing reaches": Case({"unused": "2"}, set()),
}


def sources(values: dict[str, str]) -> dict[str, str | None]:
    imports = "from open_instruct.helpers import Trainer, render, scale"
    return {
        "__init__.py": "", "utils.py": UTILS, "helpers.py": HELPERS.format(**values),
        "finetune.py": script(imports=imports, reads=READS),
        "dpo_tune_cache.py": script(exp_name="dpo"),
        "dataset_transformation.py": transformation(),
    }  # fmt: skip


def between(repository: Path, old: str, new: str, *configs: Path) -> CommitDifference:
    return difference.between(pin.find_commits((old, new), repository, {}), configs)


def of_sft(told: CommitDifference) -> dict[str, FunctionDifference]:
    return {one.symbol.removeprefix("open_instruct/"): one for one in told.stages["sft"].functions}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_function_on_the_path_that_changed(tmp_path: Path, case: Case) -> None:
    root = tmp_path / "open-instruct"
    old = commit(root, sources(OLD), "one")
    new = commit(root, sources({**OLD, **case.change}), "two")
    told = between(root, old, new)
    assert set(of_sft(told)) == case.symbols
    assert not told.stages["dpo"].functions
    for one in of_sft(told).values():
        assert (one.what, one.before != one.after) == ("changed", True)
        assert any(line.startswith("+") for line in one.diff)
        assert one.new is not None and one.new.startswith("open_instruct/helpers.py:")
    # no argument changed, and nothing else is said of the stage
    assert not told.stages["sft"].changes
    last = difference.lines(told)[-1]
    assert ("is for you to read" in last) == bool(case.symbols)
    assert ("every function on the path is the same" in last) == (not case.symbols)


def test_the_section_for_people_and_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "open-instruct"
    old = commit(root, sources(OLD), "one")
    new = commit(root, sources({**OLD, "scale": "norm"}), "two")
    words = ["pin", "diff", old, new, "--open-instruct", str(root)]
    assert main(words) == Exit.OK
    shown = capsys.readouterr().out
    assert "functions on the path that changed" in shown
    assert f"open_instruct/{FILE}::scale  (sft; line " in shown
    assert "-    return norm if norm > 0 else 1" in shown
    assert "nothing got worse" not in shown
    assert main([*words, "--format", "json"]) == Exit.OK
    (function,) = json.loads(capsys.readouterr().out)["data"]["stages"]["sft"]["functions"]
    assert function["symbol"] == f"open_instruct/{FILE}::scale"
    assert (function["before"], function["after"]) == (
        "def scale(norm):\n    return norm if norm > 0 else 1", "def scale(norm):\n    return norm",
    )  # fmt: skip


def test_what_the_newest_commit_does_otherwise() -> None:
    root = checkouts.require(checkouts.NEWEST)
    told = between(root, BASELINE, checkouts.NEWEST)
    by_stage = {
        name: {one.symbol for one in stage.functions} for name, stage in told.stages.items()
    }
    shared = "open_instruct/dataset_transformation.py::load_dataset_configs"
    assert all(shared in symbols for symbols in by_stage.values())
    assert (
        "open_instruct/dpo_utils.py::concatenated_forward_olmo"
        in by_stage["dpo_olmo_core"] - by_stage["dpo"]
    )
    assert "open_instruct/dpo_tune_cache.py::main" in by_stage["dpo"]
    # GRPO shares files with these scripts, and is not on their path
    assert not [
        symbol
        for symbols in by_stage.values()
        for symbol in symbols
        if "GRPO" in symbol or "Actor" in symbol
    ]
    names = {one.name: (one.old, one.new) for one in told.stages["dpo"].behaviours}
    assert names["guards-negative-clipping"] == (True, False)
    text = "\n".join(difference.lines(told))
    assert "guards-negative-clipping: yes -> no" in text
    assert "nothing got worse" not in text
