"""A file that is read once, and other settings of it."""

from pathlib import Path

import pytest
from conftest import Write
from plans import TRL, check_plan

from launcher.config import load
from launcher.errors import InvalidConfig, launch_finding, select_errors, set_subject
from launcher.planning import collect
from launcher.planning.collect import Scope
from launcher.planning.request import Request

STAGE = """
stage: sft
backend: trl
name: ${oc.env:NOBODY,one}
args:
  model_name_or_path: model
  dataset_name: data
  output_dir: out/${name}
  learning_rate: 1e-5
"""
OVERRIDES = (
    ("batch.global=8", "batch.per_device=2"),
    ("name=two", "name=three"),
    ("lora_target_modules=[q_proj, v_proj]", "lora_target_modules[1]=k_proj"),
    ('output_dir="a b"', "expect.loss=any"),
)


@pytest.mark.parametrize("overrides", OVERRIDES, ids=" ".join)
def test_further_overrides_are_as_those_of_the_command_line(
    write: Write, overrides: tuple[str, ...]
) -> None:
    path = write("stage.yaml", STAGE)
    whole = load.load(path, ("seed=7", *overrides))
    kept = load.load(path, ("seed=7",))
    path.unlink()
    assert kept.with_overrides(overrides) == whole
    # what it was made of stays as it is
    assert kept.with_overrides(()) == kept


def test_a_wrong_override_is_refused_as_ever(write: Write) -> None:
    config = load.load(write("stage.yaml", STAGE))
    with pytest.raises(InvalidConfig) as refused:
        config.with_overrides(("learning_rate",))
    (finding,) = refused.value.findings
    assert finding.code == "bad-override"


def test_other_settings_of_facts_need_no_file(write: Write) -> None:
    path = write("stage.yaml", STAGE)
    facts = collect.collect(Request(stage="sft", config=path, gpus=2), Scope.FILE)
    path.unlink()
    other = facts.with_overrides("learning_rate=3e-5", gpus=1, fresh=True)
    assert other.gpus == 1
    assert other.stage.args["learning_rate"] == 3e-5
    assert other.request.fresh
    assert other.request.overrides == ("learning_rate=3e-5",)
    assert facts.gpus == 2
    assert facts.stage.args["learning_rate"] == 1e-5
    assert not facts.request.fresh
    again = facts.with_request(fresh=True)
    assert again.request.fresh
    assert again.checked is facts.checked


def test_strict_leaves_warnings_about_the_machine_alone() -> None:
    warning = launch_finding("warning", "little-space", "nearly full")
    assert select_errors([warning], strict=True) == (warning,)
    assert select_errors(set_subject("machine", [warning]), strict=True) == ()
    (error,) = set_subject("machine", [launch_finding("error", "too-little-space", "full")])
    assert select_errors([error]) == (error,)


def test_the_batch_and_the_rules_are_judged_at_once(tmp_path: Path) -> None:
    text = TRL.format(data="some/set", more="optim: galore_adamw")
    text += "batch: {global: 6, per_device: 2}\n"
    with pytest.raises(InvalidConfig) as refused:
        check_plan(tmp_path, text, gpus=2)
    codes = {finding.code for finding in refused.value.findings}
    assert {"impossible-batch", "optim-targets"} <= codes
