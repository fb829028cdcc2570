"""What TRL's own parser makes of the flags and the config file that launch hands over, against what launch says."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES, SUPPORT
from verdicts import refused_by_launch, schema_of

from launcher.dataset import mixture, slices
from launcher.plan.command import config_file
from launcher.upstream import locate
from launcher.upstream.schema import Values

KEYS = ("datasets", "streaming", "test_split_size", "report_to")
PLAIN = {"path": "x"}
FULL = {
    "path": "json", "name": "default", "data_dir": "d", "data_files": {"train": ["a.jsonl", "b.jsonl"]},
    "split": "train[:10%]", "columns": ["messages"], "fraction": 1e-5,
}  # fmt: skip

CASES: list[dict[str, Any]] = [
    {"datasets": [PLAIN]},
    {"datasets": [PLAIN, FULL]},
    {"datasets": ["a", "b"]},
    {"datasets": ["a"], "streaming": True},
    {"datasets": [PLAIN], "test_split_size": 20},
    {"datasets": [PLAIN], "test_split_size": 0.1},
    {"datasets": [PLAIN], "test_split_size": "20"},
    {"datasets": [PLAIN], "test_split_size": "x"},
    {"datasets": [PLAIN], "test_split_size": None},
    {"datasets": [{**PLAIN, "split": "no", "name": "1e-5"}]},
    {"datasets": [{**PLAIN, "name": "ä \U0001f600 'x' \"y\" # z: [", "data_dir": "\ttab\nline"}]},
    {"datasets": [{**PLAIN, "split": None, "fraction": None}]},
    {"datasets": [{**PLAIN, "fraction": "half"}]},
    {"datasets": [{**PLAIN, "splitt": "train"}]},
    {"datasets": [{**PLAIN, "weight": 1}, PLAIN]},
    {"datasets": [{"name": "x"}]},
    {"datasets": [{}]},
    {"report_to": ["wandb", "tensorboard"]},
    {"report_to": ["tensorboard"]},
    {"report_to": []},
    {"report_to": "none"},
    {"report_to": ["tensorboard", "mlflow"], "datasets": [PLAIN], "test_split_size": 1},
]  # fmt: skip


def request(stage: str, arguments: dict[str, Any]) -> dict[str, Any]:
    schema = schema_of("trl", stage)
    given = {name: value for name, value in arguments.items() if value is not None}
    words: list[str] = []
    in_file = {}
    for name, value in given.items():
        if schema.in_file(name, value):
            in_file[name] = value
        else:
            words += [f"--{name}", *schema.words(name, value)]
    return {"stage": stage, "words": words, "file": config_file(in_file)}


@cache
def answers(stage: str) -> list[dict[str, Any]]:
    """What the installed TRL makes of each case; skips without the pinned packages."""
    installed = locate.locate("trl")
    if installed.root is None or not installed.pinned:
        pytest.skip(f"{NO_PACKAGES}: {installed.pin} is not installed")
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "real_trl_config.py")],
        input="".join(f"{json.dumps(request(stage, case))}\n" for case in CASES),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 3:
        pytest.skip(f"{NO_PACKAGES}: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # no argument names a file that is there
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_what_the_parser_refuses_launch_says_it_refuses(stage: str) -> None:
    said = refused_by_launch("trl", stage, CASES)
    for case, ours, theirs in zip(CASES, said, answers(stage), strict=True):
        assert bool(ours) == bool(theirs["refusal"]), (case, ours, theirs["refusal"])


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_what_the_parser_takes_comes_to_the_values_that_launch_plans_with(stage: str) -> None:
    schema = schema_of("trl", stage)
    for case, theirs in zip(CASES, answers(stage), strict=True):
        if theirs["refusal"]:
            continue
        ours = Values(schema, case)
        for key in ("streaming", "test_split_size"):
            found = theirs["values"][key]
            assert (ours[key], type(ours[key])) == (found, type(found)), case
        assert _sets(ours["datasets"]) == theirs["values"]["datasets"], case
        assert _reporters(ours["report_to"]) == theirs["values"]["report_to"], case


def _sets(listed: list[Any]) -> list[dict[str, Any]]:
    whole: dict[str, Any] = {
        "path": None, "name": None, "data_dir": None, "data_files": None, "split": "train", "columns": None,
        "fraction": None,
    }  # fmt: skip
    return [{**whole, **({"path": item} if isinstance(item, str) else item)} for item in listed]


def _reporters(given: Any) -> list[str]:
    if isinstance(given, list):
        return given
    return [] if given == "none" else [given]


def test_the_keys_of_an_entry_are_those_of_the_installed_dataclass() -> None:
    utils = pytest.importorskip("trl.scripts.utils")
    assert [field.name for field in dataclasses.fields(utils.DatasetConfig)] == [*mixture.KEYS]


@pytest.mark.parametrize("rows", [3, 40, 99, 100, 101, 250, 1999])
@pytest.mark.parametrize(
    "split",
    [
        "train", "train[:10]", "train[10:]", "train[-5:]", "train[:-5]", "train[5:2]", "train[:10%]", "train[33%:66%]",
        "train[-10%:]", "train[:1_0]", "train[:50%]+train[50%:]", "train + train[:3]", "train[:5000]",
        "train[:10%](pct1_dropremainder)", "train[:10%](closest)", "train[1:2", "train[:101%]", "train[:2](closest)",
        "train[::2]", "train[:10%]+train[:10%](pct1_dropremainder)", "", "tr ain", "train[:5%:]", "train.a[:2]",
    ],
)  # fmt: skip
def test_a_slice_is_the_rows_that_datasets_reads(split: str, rows: int) -> None:
    reader = pytest.importorskip("datasets.arrow_reader")
    try:
        parts = reader.ReadInstruction.from_spec(split).to_absolute(
            {"train": rows, "train.a": rows}
        )
        theirs: list[range] | None = [range(part.from_, max(part.from_, part.to)) for part in parts]
    except (ValueError, AssertionError):
        theirs = None
    try:
        ours: list[range] | None = [part.rows(rows) for part in slices.parse_slices(split)]
    except slices.BadSplit:
        ours = None
    assert ours == theirs
