"""What TRL's parser makes of the flags and the config file that launch hands over."""

import dataclasses
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES
from real_process import ask_process
from verdicts import refused_by_launch, schema_of

from launcher.dataset import mixture, slices
from launcher.plan.command import render_config_file
from launcher.upstream import locate
from launcher.upstream.schema import Values

STAGES = ("sft", "dpo")

Arguments = dict[str, Any]
Answer = dict[str, Any]


def dataset(**keys: Any) -> Arguments:
    """A mixture of one data set, with these keys beside its path."""
    return {"datasets": [{"path": "x", **keys}]}


PLAIN = {"path": "x"}
FULL = {
    "path": "json",
    "name": "default",
    "data_dir": "d",
    "data_files": {"train": ["a.jsonl", "b.jsonl"]},
    "split": "train[:10%]",
    "columns": ["messages"],
    "fraction": 1e-5,
}

CASES: list[Arguments] = [
    dataset(),
    {"datasets": [PLAIN, FULL]},
    {"datasets": ["a", "b"]},
    {"datasets": ["a"], "streaming": True},
    {"datasets": [PLAIN], "test_split_size": 20},
    {"datasets": [PLAIN], "test_split_size": 0.1},
    {"datasets": [PLAIN], "test_split_size": "20"},
    {"datasets": [PLAIN], "test_split_size": "x"},
    {"datasets": [PLAIN], "test_split_size": None},
    dataset(split="no", name="1e-5"),
    dataset(name="ä \U0001f600 'x' \"y\" # z: [", data_dir="\ttab\nline"),
    dataset(split=None, fraction=None),
    dataset(fraction="half"),
    dataset(splitt="train"),
    {"datasets": [{"path": "x", "weight": 1}, PLAIN]},
    {"datasets": [{"name": "x"}]},
    {"datasets": [{}]},
    {"report_to": ["wandb", "tensorboard"]},
    {"report_to": ["tensorboard"]},
    {"report_to": []},
    {"report_to": "none"},
    {"report_to": ["tensorboard", "mlflow"], "datasets": [PLAIN], "test_split_size": 1},
]


def request(stage: str, arguments: Arguments) -> dict[str, Any]:
    """The words and the text of the config file that launch would hand over."""
    schema = schema_of("trl", stage)
    words: list[str] = []
    in_file = {}
    for name, value in arguments.items():
        if value is None:
            continue
        if schema.in_file(name, value):
            in_file[name] = value
        else:
            words += [f"--{name}", *schema.words(name, value)]
    return {"stage": stage, "words": words, "file": render_config_file(in_file)}


@cache
def answers() -> dict[str, list[Answer]]:
    """What the installed TRL makes of each case of each stage, in one process."""
    installed = locate.locate("trl")
    if installed.root is None or not installed.pinned:
        pytest.skip(f"{NO_PACKAGES}: {installed.pin} is not installed")
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    requests = [request(stage, case) for stage in STAGES for case in CASES]
    in_order = ask_process("real_trl_config.py", requests=requests, environ=environ)
    return {"sft": in_order[: len(CASES)], "dpo": in_order[len(CASES) :]}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No argument names a file that is there."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_launch_refuses_what_the_parser_refuses(stage: str) -> None:
    refusals = refused_by_launch("trl", stage, CASES)
    for case, refusal, answer in zip(CASES, refusals, answers()[stage], strict=True):
        assert bool(refusal) == bool(answer["refusal"]), (case, refusal, answer["refusal"])


def with_defaults(entry: str | Arguments) -> Arguments:
    """An entry of `datasets` as TRL's dataclass holds it."""
    if isinstance(entry, str):
        entry = {"path": entry}
    keys = dict.fromkeys(("path", "name", "data_dir", "data_files", "columns", "fraction"))
    return {**keys, "split": "train", **entry}


def as_list(report_to: Any) -> list[str]:
    if isinstance(report_to, list):
        return report_to
    if report_to == "none":
        return []
    return [report_to]


@pytest.mark.parametrize("stage", STAGES)
def test_the_parser_comes_to_the_values_that_launch_plans_with(stage: str) -> None:
    for case, answer in zip(CASES, answers()[stage], strict=True):
        if answer["refusal"]:
            continue
        by_trl = answer["values"]
        values = Values(schema_of("trl", stage), case)
        for key in ("streaming", "test_split_size"):
            assert values[key] == by_trl[key], case
            assert type(values[key]) is type(by_trl[key]), case
        assert list(map(with_defaults, values["datasets"])) == by_trl["datasets"], case
        assert as_list(values["report_to"]) == by_trl["report_to"], case


def test_the_keys_of_an_entry_are_those_of_the_installed_dataclass() -> None:
    utils = pytest.importorskip("trl.scripts.utils")
    fields = dataclasses.fields(utils.DatasetConfig)
    assert [field.name for field in fields] == list(mixture.KEYS)


Rows = list[range] | None


def rows_by_datasets(split: str, total: int) -> Rows:
    """The rows that `datasets` reads of a split of so many rows; None where it refuses."""
    reader = pytest.importorskip("datasets.arrow_reader")
    try:
        instruction = reader.ReadInstruction.from_spec(split)
        parts = instruction.to_absolute({"train": total, "train.a": total})
    except (ValueError, AssertionError):
        return None
    return [range(part.from_, max(part.from_, part.to)) for part in parts]


def rows_by_launch(split: str, total: int) -> Rows:
    try:
        return [part.rows(total) for part in slices.parse_slices(split)]
    except slices.BadSplit:
        return None


@pytest.mark.parametrize(
    "split",
    [
        "train", "train[:10]", "train[10:]", "train[-5:]", "train[:-5]", "train[5:2]",
        "train[:10%]", "train[33%:66%]", "train[-10%:]", "train[:1_0]", "train[:5000]",
        "train[:50%]+train[50%:]", "train + train[:3]", "train.a[:2]",
        "train[:10%](pct1_dropremainder)", "train[:10%](closest)", "train[:2](closest)",
        "train[:10%]+train[:10%](pct1_dropremainder)",
        "train[1:2", "train[:101%]", "train[::2]", "train[:5%:]", "", "tr ain",
    ],
)  # fmt: skip
def test_a_slice_is_the_rows_that_datasets_reads(split: str) -> None:
    for total in (3, 40, 99, 100, 101, 250, 1999):
        assert rows_by_launch(split, total) == rows_by_datasets(split, total), total
