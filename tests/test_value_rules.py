"""Single values of open-instruct's that parse, and then crash, do nothing, or do what nobody asked for."""

from __future__ import annotations

import ast
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES, Write
from test_rules import BASES, values_of

from launcher import config, rules
from launcher import stage as stages
from launcher.backends import stage_rules, value_rules
from launcher.backends.context import Context
from launcher.errors import Finding
from launcher.options import deepspeed_file
from launcher.sources import find_package

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
    for name in ("nosuch", "Linear", *value_rules.SCHEDULES_WITH_SETTINGS):
        wrong = [("scheduler-type", "error", "lr_scheduler_type")]
        assert said("dpo", lr_scheduler_type=name) == wrong
        # no schedule is made where the run ends with the data
        assert said("dpo", lr_scheduler_type=name, cache_dataset_only=True) == []
    for name in value_rules.SCHEDULES:
        assert said("dpo", lr_scheduler_type=name) == []


def transformers_folder() -> Path:
    folder = find_package("transformers")
    if folder is None or version("transformers") != "5.17.0":
        pytest.skip(f"{NO_PACKAGES}: transformers 5.17.0 is not installed")
    return folder


def test_the_schedules_are_those_of_transformers() -> None:
    tree = ast.parse((transformers_folder() / "trainer_utils.py").read_text(encoding="utf-8"))
    (kinds,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "SchedulerType"
    )
    names = {ast.literal_eval(node.value) for node in kinds.body if isinstance(node, ast.Assign)}
    assert names == {*value_rules.SCHEDULES, *value_rules.SCHEDULES_WITH_SETTINGS}


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


def test_trackers_that_accelerate_does_not_know() -> None:
    tracked = {"with_tracking": True}
    expected = ("unknown-report", "error", "report_to")
    assert said("sft", **tracked, report_to=["wandb", "nosuch"]) == [expected]
    assert said("sft", **tracked, report_to=["wandb", "WandB", "nosuch"]) == [expected] * 2
    # every other word is passed over beside `all`
    assert said("sft", **tracked, report_to=["all", "nosuch"]) == []
    assert said("sft", report_to=["wandb", "nosuch"]) == []
    assert said("dpo", **tracked, report_to=["wandb", "nosuch"]) == []


def test_the_trackers_are_those_of_accelerate() -> None:
    folder = find_package("accelerate")
    if folder is None or version("accelerate") != "1.15.0":
        pytest.skip(f"{NO_PACKAGES}: accelerate 1.15.0 is not installed")
    tree = ast.parse((folder / "utils" / "dataclasses.py").read_text(encoding="utf-8"))
    (kinds,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LoggerType"
    )
    names = {ast.literal_eval(node.value) for node in kinds.body if isinstance(node, ast.Assign)}
    assert names == set(value_rules.TRACKERS)


@BOTH
def test_the_models_revision_is_the_tokenizers_too(script: str, write: Write) -> None:
    args = {"model_revision": "v2", "tokenizer_name_or_path": "other/tokenizer"}
    expected = [("tokenizer-revision", "warning", "model_revision")]
    assert said(script, **args) == expected
    assert said(script, **args, tokenizer_revision="main") == []
    assert said(script, **{**args, "tokenizer_name_or_path": "m"}) == []
    assert said(script, **{**args, "model_revision": "main"}) == []
    assert said(script, model_revision="v2") == []
    # a folder has no revisions
    write("here/tokenizer_config.json", "{}")
    for folder in ("here", "./nowhere"):
        assert said(script, **{**args, "tokenizer_name_or_path": folder}) == []


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


# --- Beaker
# ----------------------------------------------------------------------------------------


@BOTH
def test_what_only_a_job_of_beakers_does(script: str) -> None:
    environ = {"HF_TOKEN": "hf_" + "x" * 34}
    pushed = {"push_to_hub": True, "hf_entity": "me"}
    asked = {**pushed, "try_launch_beaker_eval_jobs": True}
    expected = [("not-on-beaker", "warning", "try_launch_beaker_eval_jobs")]
    assert situated(script, asked, environ=environ) == expected
    assert situated(script, asked, environ=environ, running=True) == expected
    assert situated(script, {**asked, "cache_dataset_only": True}, environ=environ) == []
    assert situated(script, asked, environ={**environ, "BEAKER_JOB_ID": "1"}) == []
    # on by default, where the model is pushed
    tasks = {**pushed, "try_launch_beaker_eval_jobs": None, "oe_eval_tasks": ["gsm8k"]}
    assert situated(script, tasks, environ=environ) == [
        ("not-on-beaker", "warning", "oe_eval_tasks")
    ]
    off = {**tasks, "try_launch_beaker_eval_jobs": False}
    assert situated(script, off, environ=environ) == []
    # the parser refuses it without a push
    assert situated(script, {**tasks, "push_to_hub": False}, environ=environ) == []
    kept = {"try_auto_save_to_beaker": True}
    assert situated(script, kept) == [("not-on-beaker", "warning", "try_auto_save_to_beaker")]


def test_one_finding_names_all_that_beaker_would_read() -> None:
    args = {"push_to_hub": True, "hf_entity": "me", "try_launch_beaker_eval_jobs": True}
    values = values_of("dpo", {**args, "oe_eval_max_length": 512, "eval_workspace": "ai2/x"})
    (found,) = (
        f for f in stage_rules.apply(Context(values=values)) if f.code == "not-on-beaker"
    )  # fmt: skip
    for key in ("try_launch_beaker_eval_jobs", "oe_eval_max_length", "eval_workspace"):
        assert f"`{key}`" in found.message
