"""Pipeline files: what they say, and everything that is wrong with them."""

import json
from pathlib import Path

import pytest
from chained import CHOSEN, REJECTED
from conftest import REPOSITORY, Write

from launcher.config import pipeline
from launcher.errors import InvalidConfig, UsageError
from launcher.planning.collect import Scope
from launcher.planning.request import Request
from launcher.workflows.pipeline.plan import PipelineRequest, plan_stages

FIVE_STAGES = """\
name: five
gpus: 2
stages:
  - sft.yaml
  - {config: dpo.yaml, gpus: 0}
  - {name: 2, config: dpo.yaml, from: sft}
  - {name: c, config: dpo.yaml, from: 2}
  - {name: d, config: dpo.yaml, from: no}
"""


def test_a_stage_comes_after_the_one_above_it_unless_it_says_otherwise(write: Write) -> None:
    write("sft.yaml", "stage: sft\n")
    write("dpo.yaml", "stage: dpo\n")

    chain = pipeline.load(write("p.yaml", FIVE_STAGES))

    assert chain.name == "five"
    links = [(link.name, link.source, link.gpus) for link in chain.links]
    assert links == [
        ("sft", None, 2),
        ("dpo", "sft", 0),
        ("2", "sft", 2),
        ("c", "2", 2),
        ("d", None, 2),
    ]
    assert [link.name for link in chain.between("dpo", "2")] == ["dpo", "2"]
    with pytest.raises(UsageError, match="comes after"):
        chain.between("c", "dpo")
    with pytest.raises(UsageError, match="no stage `dop`"):
        chain.between("dop", None)


WRONG = """\
nme: x
stages:
  - sft.yaml
  - {name: a.b, config: sft.yaml, gpu: 3}
  - {name: c, config: gone.yaml, from: q}
  - {config: sft.yaml, gpus: -1, with: [a]}
  - 7
"""
FAULTS = [
    (1, "`nme` is not a key"),
    (4, "`gpu` is not a key"),
    (4, "`a.b` cannot be"),
    (5, "gone.yaml"),
    (5, "`from: q`"),
    (6, "`gpus` is a number"),
    (6, "`with` is a mapping"),
    (6, "two stages are called `sft`"),
    (7, "a stage is a mapping"),
]


def test_everything_that_is_wrong_with_the_file_is_said_at_once(write: Write) -> None:
    write("sft.yaml", "stage: sft\n")
    path = write("p.yaml", WRONG)

    with pytest.raises(InvalidConfig) as caught:
        pipeline.load(path)

    findings = caught.value.findings
    assert {(finding.file, finding.code) for finding in findings} == {(str(path), "bad-pipeline")}
    for line, words in FAULTS:
        messages = [finding.message for finding in findings if finding.line == line]
        assert any(words in message for message in messages), (line, words)


def test_a_stage_file_is_no_pipeline(write: Write) -> None:
    path = write("s.yaml", "stage: sft\nbackend: trl\nargs: {seed: 1}\n")

    with pytest.raises(InvalidConfig) as caught:
        pipeline.load(path)

    (finding,) = caught.value.findings
    assert "a stage file" in finding.message
    assert f"launch sft {path}" in str(finding.help)


def test_the_command_line_comes_after_with(write: Write) -> None:
    write("sft.yaml", "stage: sft\nbatch: {global: 8, per_device: 2}\nargs: {}\n")
    given = "{learning_rate: 1e-5, batch: {per_device: 4}}"
    path = write("p.yaml", f"stages:\n  - {{config: sft.yaml, with: {given}}}\n")

    (link,) = pipeline.load(path, ["sft.learning_rate=2e-5"]).links

    assert link.texts() == ["learning_rate=1e-05", "batch.per_device=4", "learning_rate=2e-5"]
    for wrong in ("learning_rate=1", "x.a=1", "nothing"):
        with pytest.raises(UsageError):
            pipeline.load(path, [wrong])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("demo/pipeline", 0),
        ("demo/pipeline_open_instruct", 0),
        ("tulu/pipeline_qwen7b", 8),
        ("tulu/pipeline_qwen7b_eval", 8),
        ("llama/pipeline_llama31_8b_10pct", 8),
    ],
)
def test_the_committed_pipelines_hold_together(
    name: str, gpus: int, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "build/demo/model").mkdir(parents=True)
    write("build/demo/data/sft/train.jsonl", json.dumps({"messages": CHOSEN}))
    pair = {"chosen": CHOSEN, "rejected": REJECTED}
    write("build/demo/data/dpo/train.jsonl", json.dumps(pair))
    monkeypatch.chdir(tmp_path)

    path = REPOSITORY / "configs" / f"{name}.yaml"
    common = Request(stage=None, config=path, gpus=gpus)
    order = PipelineRequest(chain=pipeline.load(path), common=common)
    planned = plan_stages(order, Scope.PLAN)

    assert "error" not in {finding.severity for finding in planned.findings}
    assert [step.link.source for step in planned.steps.values()] == [None, "sft"]
