"""Single values of open-instruct's that parse, and then crash, do nothing, or do what nobody asked for."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES, Write
from test_rules import BASES, values_of

from launcher import config, rehearsal, rules
from launcher import stage as stages
from launcher.backends import stage_rules, value_rules
from launcher.backends.context import Context
from launcher.errors import Finding
from launcher.keys import DEEPSPEED
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


# --- schedules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nosuch", "Linear", *value_rules.SCHEDULES_WITH_SETTINGS])
def test_schedules_that_dpo_cannot_make(name: str) -> None:
    assert said("dpo", lr_scheduler_type=name) == [("scheduler-type", "error", "lr_scheduler_type")]
    # no schedule is made where the run ends with the data
    assert said("dpo", lr_scheduler_type=name, cache_dataset_only=True) == []


@pytest.mark.parametrize("name", value_rules.SCHEDULES)
def test_schedules_that_dpo_can_make(name: str) -> None:
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


# made and stepped as dpo_tune_cache.py:460 does, in a process whose environment torch may change
MADE = """
import json, sys, torch
from transformers.optimization import get_scheduler

made = []
for name in json.loads(sys.argv[1]):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1e-3)
    try:
        scheduler = get_scheduler(
            name=name, optimizer=optimizer, num_training_steps=8, num_warmup_steps=2
        )
        optimizer.step()
        scheduler.step()
    except (TypeError, ValueError):
        continue
    made.append(name)
print(json.dumps(made))
"""


def test_what_transformers_itself_says_of_the_schedules() -> None:
    transformers_folder()
    if find_package("torch") is None:
        pytest.skip(f"{NO_PACKAGES}: torch is not installed")
    names = [*value_rules.SCHEDULES, *value_rules.SCHEDULES_WITH_SETTINGS, "nosuch"]
    words = [sys.executable, "-c", MADE, json.dumps(names)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == list(value_rules.SCHEDULES)


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


# --- steps -----------------------------------------------------------------------------------------


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


# --- clipping and time -----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("none", [-1, 0])
@pytest.mark.parametrize("name", DEEPSPEED)
def test_no_clipping_is_deepspeeds_to_decide(script: str, none: float, name: str) -> None:
    file = json.loads(deepspeed_file(name).read_text(encoding="utf-8"))
    assert file["gradient_clipping"] == "auto"
    key = CLIPPING[script]
    assert situated(script, {key: none}, deepspeed=file) == [("clipping-unread", "warning", key)]
    for same in (0, 0.0, -1, None):
        assert situated(script, {key: none}, deepspeed={**file, "gradient_clipping": same}) == []
    assert situated(script, {key: none}, deepspeed={**file, "gradient_clipping": 0.5}) != []
    assert situated(script, {key: none}) == []
    assert situated(script, {key: none}, deepspeed=file, gpus=0) == []


def test_no_clipping_beside_the_own_zero_stage() -> None:
    expected = ("clipping-unread", "warning", "max_grad_norm")
    assert situated("dpo", {"zero_stage": 3, "max_grad_norm": -1}) == [expected]


@BOTH
@pytest.mark.parametrize("seconds", [0, -5])
def test_no_time_to_find_each_other(script: str, seconds: int) -> None:
    file = json.loads(deepspeed_file("zero2").read_text(encoding="utf-8"))
    args = {"timeout": seconds}
    error, warning = ([("no-timeout", kind, "timeout")] for kind in ("error", "warning"))
    assert situated(script, args, gpus=8) == error
    assert situated(script, args, gpus=1, deepspeed=file) == error
    assert situated(script, args) == warning
    # a single process looks for nobody
    for gpus in (0, 1):
        assert situated(script, args, gpus=gpus) == []
    assert situated(script, {"timeout": 60}, gpus=8) == []


# --- names and paths -------------------------------------------------------------------------------


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


@BOTH
def test_an_output_folder_without_a_name(script: str) -> None:
    as_it_is = {"do_not_randomize_output_dir": True}
    expected = [("empty-output", "error", "output_dir")]
    assert said(script, output_dir="", **as_it_is) == expected
    assert said(script, output_dir="", exp_name="") == expected
    # upstream puts the name of the experiment below it
    assert said(script, output_dir="") == []
    assert said(script, output_dir="out", **as_it_is) == []


PATHS = [
    ("~/x", "./~/x"), ("$HOME/x", "./$HOME/x"), ("/data/$USER/x", "/data/$USER/x"),
    ("/data/${USER}/x", "/data/${USER}/x"), ("/data/x~", None), ("out/$", None), ("out", None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "folder"), PATHS)
def test_paths_are_taken_as_they_are(path: str, folder: str | None) -> None:
    caches = {"sft": "dataset_local_cache_dir", "dpo": "local_cache_dir"}
    for script, cache in caches.items():
        for key in ("output_dir", cache):
            found = told(script, **{key: path})
            expected = [] if folder is None else [("unexpanded-path", "warning", key)]
            assert [_short(one) for one in found] == expected
            assert all(f"make a folder {folder}:" in one.message for one in found)


@BOTH
def test_lora_that_adds_nothing(script: str) -> None:
    expected = [("out-of-range", "warning", "lora_alpha")]
    assert said(script, use_lora=True, lora_alpha=0) == expected
    assert said(script, lora_alpha=0) == []
    assert said(script, use_lora=True, lora_alpha=8) == []


# --- Beaker ----------------------------------------------------------------------------------------


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
