"""A run that is started again and again, and what is decided of its attempts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import saved
from plans import build_command, from_text, make_plan, trainer

from launcher import files
from launcher.cache import inputs
from launcher.lifecycle import manifest
from launcher.plan import plan
from launcher.plan.plan import Plan
from launcher.planning.resume import decision as resume
from launcher.planning.resume.decision import Decision
from launcher.runs import rundir
from launcher.runs.record import Manifest
from launcher.runs.rundir import RunFolder

SFT = """
stage: sft
batch: {{global: {batch}, per_device: 4}}
args:
  model_name_or_path: {model}
  dataset_mixer_list: [{data}, "1.0"]
  max_seq_length: 64
  output_dir: {output}
  do_not_randomize_output_dir: true
  num_train_epochs: 2
  checkpointing_steps: {every}
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
"""
DPO = """
stage: dpo
deepspeed: zero2
batch: {{global: {batch}, per_device: 4}}
args:
  model_name_or_path: {model}
  mixer_list: [{data}, "1.0"]
  output_dir: {output}
  do_not_randomize_output_dir: true
  num_epochs: 2
  checkpointing_steps: {every}
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
"""
OLMO_CORE = DPO.replace("deepspeed: zero2", "script: dpo_olmo_core").replace(
    "  num_epochs: 2\n", "  num_epochs: 2\n  config_name: olmo2_7B\n  max_seq_length: 2048\n"
)
TRL = """
stage: sft
backend: trl
batch: {{global: {batch}, per_device: 4}}
args:
  model_name_or_path: {model}
  dataset_name: {folder}
  output_dir: {output}
  num_train_epochs: 2
  save_steps: {every}
"""


def rows_of(stage_text: str, word: str, count: int) -> str:
    """Lines of data for the stage of a stage file, no two of them alike."""
    lines = []
    for number in range(count):
        question = {"role": "user", "content": f"{word} {number}"}
        better = [question, {"role": "assistant", "content": f"yes {number}"}]
        worse = [question, {"role": "assistant", "content": f"no {number}"}]
        row = {"messages": better}
        if "stage: dpo" in stage_text:
            row = {"chosen": better, "rejected": worse}
        lines.append(f"{json.dumps(row)}\n")
    return "".join(lines)


class Run:
    """A run as it is said again and again: its stage file, its output, its attempts."""

    def __init__(self, place: Path, text: str, *, rows: int = 48, every: object = 2) -> None:
        self.place = place
        self.text = text
        self.every = every
        self.output = place / "out"
        self.folder = RunFolder(place / "runs" / "one")
        self.folder.path.mkdir(parents=True)
        self.data = place / "data" / "train.jsonl"
        self.data.parent.mkdir()
        self.data.write_text(rows_of(text, "a", rows))
        saved.model(place / "model")
        self.allowed: tuple[str, ...] = ()
        self.trainer = trainer("torch", "accelerate")

    def plan(self, *overrides: str, batch: int = 8, gpus: int = 0) -> Plan:
        text = self.text.format(
            batch=batch,
            data=self.data,
            folder=self.data.parent,
            output=self.output,
            every=self.every,
            model=self.place / "model",
        )
        return make_plan(from_text(self.place, text, *overrides), gpus=gpus)

    def decide(self, *overrides: str, allow: tuple[str, ...] = (), **how: Any) -> Decision:
        self.planned = self.plan(*overrides, **how)
        has_begun = bool(rundir.read_manifest(self.folder))
        judge = resume.ResumeJudge(
            plan=self.planned,
            output=self.output,
            folder=self.folder if has_begun else None,
            history=self.history(),
            trainer=self.trainer,
            now=inputs.record_inputs(self.planned),
            allowed=allow,
        )
        return judge.decide()

    def history(self) -> list[Manifest]:
        return resume.list_manifests(self.planned.stage.options.stage, self.folder, self.output)

    def start(self, *overrides: str, allow: tuple[str, ...] = (), **how: Any) -> Decision:
        """Begin an attempt, as far as what it leaves in the run folder."""
        decision = self.decide(*overrides, allow=allow, **how)
        attempt = self.folder.attempts() + 1
        resume.set_aside(decision, attempt)
        rundir.keep_manifest(self.folder)
        completed = plan.complete_plan(self.planned, decision.derived)
        command = build_command(completed)
        record = manifest.build_manifest(
            attempt, rundir.format_utc_now(), completed, command, self.trainer, self.output
        )
        contents = inputs.record_inputs(completed)
        record = replace(record, resume=decision.as_json(), contents=contents)
        files.write_json(self.folder.manifest, record.as_json())
        self.folder.console(attempt).write_text("")
        return decision

    def ended(self, code: int = 0) -> None:
        files.write_json(self.folder.exit(self.folder.attempts()), {"returncode": code})


Make = Callable[..., Run]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("LAUNCH_CACHE", str(tmp_path / "fingerprints"))

    def make(text: str = SFT, **how: Any) -> Run:
        return Run(tmp_path, text, **how)

    return make


def codes(decision: Decision) -> dict[str, str]:
    """The gravest severity of each code."""
    gravities = ("note", "warning", "error")
    findings = sorted(decision.findings, key=lambda finding: gravities.index(finding.severity))
    return {finding.code: finding.severity for finding in findings}
