"""Single values of open-instruct's that parse, and then crash, do nothing, or do what nobody asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from test_rules import BASES, values_of

from launcher import config, rehearsal, rules
from launcher import stage as stages
from launcher.backends import open_instruct_rules, stage_rules
from launcher.backends.context import Context
from launcher.errors import Finding
from launcher.options import deepspeed_file

EPOCHS = {"sft": "num_train_epochs", "dpo": "num_epochs"}
CLIPPING = {"sft": "clip_grad_norm", "dpo": "max_grad_norm"}
BOTH = pytest.mark.parametrize("script", ["sft", "dpo"])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def told(script: str, **changes: Any) -> list[Finding]:
    return list(rules.apply(values_of(script, changes)))


def said(script: str, **changes: Any) -> list[tuple[str, str, str]]:
    """Code, severity and key of what the arguments alone tell."""
    return [_short(finding) for finding in told(script, **changes)]


def situated(script: str, args: dict[str, Any], **known: Any) -> list[tuple[str, str, str]]:
    """The same of what needs DeepSpeed's file, the machine or the environment."""
    context = Context(values=values_of(script, args), **known)
    return [_short(finding) for finding in stage_rules.apply(context)]


def _short(finding: Finding) -> tuple[str, str, str]:
    assert finding.layer == "run"
    return finding.code, finding.severity, (finding.key or "").removeprefix("args.")


# --- schedules
# -------------------------------------------------------------------------------------


def test_the_schedules_that_dpo_can_make() -> None:
    for name in ("nosuch", "Linear", "cosine_with_min_lr"):
        wrong = [("scheduler-type", "error", "lr_scheduler_type")]
        assert said("dpo", lr_scheduler_type=name) == wrong
        # no schedule is made where the run ends with the data
        assert said("dpo", lr_scheduler_type=name, cache_dataset_only=True) == []
    for name in open_instruct_rules.SCHEDULES:
        assert said("dpo", lr_scheduler_type=name) == []


@BOTH
def test_a_constant_rate_has_no_warm_up(script: str) -> None:
    constant = {"lr_scheduler_type": "constant"}
    assert said(script, **constant, warmup_ratio=0.1) == [
        ("warmup-unread", "warning", "warmup_ratio")
    ]
    # upstream's default is nobody's wish
    assert said(script, **constant) == []
    assert said(script, **constant, warmup_ratio=0) == []
    assert said(script, lr_scheduler_type="constant_with_warmup", warmup_ratio=0.1) == []


# --- steps
# -----------------------------------------------------------------------------------------


@BOTH
def test_epochs_beside_steps(script: str) -> None:
    key = EPOCHS[script]
    assert said(script, **{key: 3}, max_train_steps=300) == [("conditional-key", "warning", key)]
    assert said(script, **{key: 3}) == []
    assert said(script, max_train_steps=300) == []


def test_a_rehearsal_leaves_the_epochs_out(write: Write) -> None:
    args = {**BASES["sft"][2], "num_train_epochs": 3}
    path = write("sft.yaml", json.dumps({"stage": "sft", "args": args}))
    full = stages.validate(stages.judge(config.load(path)))
    words = rehearsal.overrides(full, steps=20, output=Path("out"), batch=8)
    short = stages.validate(stages.judge(config.load(path, words)))
    assert not short.values.given("num_train_epochs")
    assert "conditional-key" not in {finding.code for finding in short.findings}


@BOTH
def test_the_sign_of_checkpoints_makes_no_difference(script: str) -> None:
    expected = ("checkpoint-sign", "warning", "checkpointing_steps")
    assert said(script, checkpointing_steps=-1) == [expected]
    (often,) = told(script, checkpointing_steps=-250)
    assert "every 250 steps" in often.message
    assert said(script, checkpointing_steps=250) == []


def test_a_bool_is_no_number_of_steps(write: Write) -> None:
    args = {**BASES["sft"][2], "checkpointing_steps": True}
    path = write("sft.yaml", json.dumps({"stage": "sft", "args": args}))
    found = stages.judge(config.load(path)).findings
    assert {f.code: f.severity for f in found if f.key == "args.checkpointing_steps"} == {
        "bool-as-text": "warning", "checkpoint-steps": "error",
    }  # fmt: skip


# --- clipping and time
# -----------------------------------------------------------------------------


@BOTH
def test_no_clipping_is_deepspeeds_to_decide(script: str) -> None:
    file = json.loads(deepspeed_file("zero2").read_text(encoding="utf-8"))
    assert file["gradient_clipping"] == "auto"
    key = CLIPPING[script]
    for none in (-1, 0):
        assert situated(script, {key: none}, deepspeed=file) == [
            ("clipping-unread", "warning", key)
        ]
        for same in (0, -1, None):
            assert (
                situated(script, {key: none}, deepspeed={**file, "gradient_clipping": same}) == []
            )
        assert situated(script, {key: none}, deepspeed={**file, "gradient_clipping": 0.5}) != []
        assert situated(script, {key: none}) == []
        assert situated(script, {key: none}, deepspeed=file, gpus=0) == []


def test_no_clipping_beside_the_own_zero_stage() -> None:
    expected = ("clipping-unread", "warning", "max_grad_norm")
    assert situated("dpo", {"zero_stage": 3, "max_grad_norm": -1}) == [expected]


# --- names and paths
# -------------------------------------------------------------------------------


PATHS = {
    "~/x": "./~/x", "/data/${USER}/x": "/data/${USER}/x", "/data/x~": None, "out/$": None, "out": None,
}  # fmt: skip


def test_paths_are_taken_as_they_are() -> None:
    for path, folder in PATHS.items():
        for script, key in (("sft", "output_dir"), ("dpo", "local_cache_dir")):
            found = told(script, **{key: path})
            expected = [] if folder is None else [("unexpanded-path", "warning", key)]
            assert [_short(one) for one in found] == expected
            assert all(f"make a folder {folder}:" in one.message for one in found)
