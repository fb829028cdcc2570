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

HELPERS = """
import logging
logger = logging.getLogger(__name__)
TEMPLATES = {"tulu": "A"}

class Trainer(External):
    def train_batch(self, batch):
        return batch

class Unused:
    def train_batch(self, batch):
        return batch * 10

def render(row):
    logger.info('a')
    return TEMPLATES["tulu"] + row

def scale(norm):
    return norm if norm > 0 else 1

def never(row):
    return 10
"""
READS = """
for row in rows:
    use(render(row))
scale(args.max_seq_length)
External2(Trainer())
"""
FILES = {
    "__init__.py": "",
    "utils.py": UTILS,
    "helpers.py": HELPERS,
    "finetune.py": script(
        imports="from open_instruct.helpers import Trainer, render, scale", reads=READS
    ),
    "dpo_tune_cache.py": script(exp_name="dpo"),
    "dataset_transformation.py": transformation(),
}


@dataclass(frozen=True)
class Repo:
    """A repository with two commits."""

    root: Path
    old: str
    new: str

    def diff(self) -> CommitDifference:
        commits = pin.find_commits((self.old, self.new), self.root, {})
        return difference.compare_commits(commits, ())


def repo_with(folder: Path, words: str, others: str) -> Repo:
    """A repository whose newer commit replaces words of the helpers."""
    assert words in HELPERS
    root = folder / "open-instruct"
    old = commit(root, FILES, "one")
    new = commit(root, {"helpers.py": HELPERS.replace(words, others)}, "two")
    return Repo(root, old, new)


def functions_of(diff: CommitDifference, stage: str) -> dict[str, FunctionDifference]:
    return {function.symbol: function for function in diff.stages[stage].functions}


FILE = "open_instruct/helpers.py"
GUARD = "norm if norm > 0 else 1"


@pytest.mark.parametrize(
    ("words", "others", "symbol"),
    [
        pytest.param(GUARD, "norm", "scale", id="a guard"),
        pytest.param("return batch\n", "return -batch\n", "Trainer.train_batch", id="a method"),
        pytest.param('"tulu": "A"', '"tulu": "B"', "TEMPLATES", id="a table"),
    ],
)
def test_a_changed_function_on_the_path_is_shown(
    words: str, others: str, symbol: str, tmp_path: Path
) -> None:
    diff = repo_with(tmp_path, words, others).diff()

    ((name, function),) = functions_of(diff, "sft").items()
    assert name == f"{FILE}::{symbol}"
    assert function.what == "changed"
    assert function.before != function.after
    assert any(line.startswith("+") for line in function.diff)
    assert (function.new or "").startswith(f"{FILE}:")
    assert not diff.stages["dpo"].functions
    assert not diff.stages["sft"].changes
    assert "is for you to read" in difference.render_difference(diff)[-1]


@pytest.mark.parametrize(
    ("words", "others"),
    [pytest.param("'a'", "'b'", id="a log line"), pytest.param("10", "20", id="unreached")],
)
def test_what_does_not_act_or_is_not_reached_is_not_shown(
    words: str, others: str, tmp_path: Path
) -> None:
    diff = repo_with(tmp_path, words, others).diff()
    assert not functions_of(diff, "sft")
    assert "every function on the path is the same" in difference.render_difference(diff)[-1]


def test_changed_functions_stand_in_the_text_and_in_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = repo_with(tmp_path, GUARD, "norm")
    words = ["pin", "diff", repo.old, repo.new, "--open-instruct", str(repo.root)]

    assert main(words) == Exit.OK
    text = capsys.readouterr().out
    assert "functions on the path that changed" in text
    assert f"{FILE}::scale  (sft; line " in text
    assert f"-    return {GUARD}" in text
    assert "nothing got worse" not in text

    assert main([*words, "--format", "json"]) == Exit.OK
    (function,) = json.loads(capsys.readouterr().out)["data"]["stages"]["sft"]["functions"]
    assert function["symbol"] == f"{FILE}::scale"
    assert function["before"] == f"def scale(norm):\n    return {GUARD}"
    assert function["after"] == "def scale(norm):\n    return norm"


def test_what_the_newest_known_commit_does_otherwise() -> None:
    root = checkouts.require(checkouts.NEWEST)
    diff = Repo(root, BASELINE, checkouts.NEWEST).diff()

    for stage in diff.stages:
        symbols = functions_of(diff, stage)
        assert "open_instruct/dataset_transformation.py::load_dataset_configs" in symbols
        # GRPO shares files with these scripts, and is not on their path
        assert "GRPO" not in str(list(symbols))
        assert "Actor" not in str(list(symbols))
    dpo = functions_of(diff, "dpo")
    olmo_core = functions_of(diff, "dpo_olmo_core")
    forward = "open_instruct/dpo_utils.py::concatenated_forward_olmo"
    assert forward in olmo_core
    assert forward not in dpo
    assert "open_instruct/dpo_tune_cache.py::main" in dpo

    behaviours = {known.name: known for known in diff.stages["dpo"].behaviours}
    guard = behaviours["guards-negative-clipping"]
    assert (guard.old, guard.new) == (True, False)
    text = "\n".join(difference.render_difference(diff))
    assert "guards-negative-clipping: yes -> no" in text
    assert "nothing got worse" not in text
