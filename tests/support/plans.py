"""Stages and plans for tests, from files or from text, whatever is installed on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.config import load
from launcher.errors import Finding
from launcher.machine.python import Trainer
from launcher.plan import command, plan
from launcher.plan.plan import Plan
from launcher.planning import check
from launcher.planning.collect import Facts, StageFile
from launcher.planning.request import Request
from launcher.runs.attempt import Command
from launcher.stage import stage as stages
from launcher.stage.stage import Stage
from launcher.upstream.locate import Locator

CONFIGS = Path(__file__).parents[2] / "configs"
SOURCE = Path("/source")
PYTHON = Path("/env/bin/python")

SFT = """
stage: sft
batch: {{global: 16, per_device: 2}}
args:
  model_name_or_path: model
  dataset_mixer_list: [set, "64"]
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
  {more}
  learning_rate: 1e-4
"""
TRL = """
stage: sft
backend: trl
args:
  model_name_or_path: model
  dataset_name: {data}
  {more}
"""


def load_stage(path: Path, overrides: Sequence[str] = ()) -> Stage:
    judged = stages.judge_stage_file(load.load(path, overrides), locator=Locator(search=()))
    stage = stages.validate(judged)
    return replace(stage, upstream=replace(stage.upstream, root=SOURCE))


def from_text(folder: Path, text: str, *overrides: str) -> Stage:
    return load_stage(_write_stage(folder, text), overrides)


def _write_stage(folder: Path, text: str) -> Path:
    path = folder / "stage.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def judge_text(folder: Path, text: str) -> dict[tuple[str, str], Finding]:
    """The findings of a stage file, by code and key."""
    path = folder / "stage.yaml"
    path.write_text(text, encoding="utf-8")
    judged = stages.judge_stage_file(load.load(path), locator=Locator(search=()))
    return {(finding.code, finding.key or ""): finding for finding in judged.findings}


def make_plan(stage: Stage, gpus: int = 0, nodes: int = 1) -> Plan:
    return plan.make(stage, gpus=gpus, nodes=nodes, output=Path("/run/model"))


def check_plan(folder: Path, text: str, gpus: int = 0) -> Plan:
    """A plan with the findings of all rules, as a dry run makes it."""
    path = _write_stage(folder, text)
    file = StageFile(
        request=Request(stage=None, config=path, gpus=gpus),
        config=load.load(path),
        locator=Locator(search=()),
        trainer=trainer(),
    )
    checked = file.read()
    facts = Facts(file=file, checked=checked, stage=stages.validate(checked), gpus=gpus)
    return check.plan_with_findings(facts, output=Path("/run/model"))


def build_command(
    made: Plan,
    environ: Mapping[str, str] | None = None,
    python: Path = PYTHON,
    folder: Path = Path("/run"),
) -> Command:
    return command.build(made, trainer(python=python), folder, environ=environ or {})


def trainer(
    *packages: str, python: Path = PYTHON, version: tuple[int, ...] = (3, 12, 1)
) -> Trainer:
    installed = dict.fromkeys(packages, "1.0")
    return Trainer(python=python, source="a test", version=version, packages=installed)
