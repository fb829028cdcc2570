"""What a start prints before the training begins."""

from pathlib import Path

import pytest
from plans import CONFIGS, load_stage, make_plan

from launcher.errors import launch_finding
from launcher.report import console

LOG = Path("/srv/runs/20260101T000000Z-sft-qwen/console.log")


@pytest.mark.parametrize(
    ("config", "gpus"),
    [("tulu/sft_qwen7b.yaml", 8), ("tulu/dpo_qwen7b.yaml", 8), ("lora/sft_qwen7b.yaml", 1)],
)
def test_a_start_says_each_thing_once_in_a_few_lines(
    config: str, gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(load_stage(CONFIGS / config), gpus)
    console.print_plan(plan, LOG)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 8
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    assert str(LOG) in text
    # the batch is a line of its own
    assert "per_device_train_batch_size" not in text
    for name, derived in plan.derived.items():
        assert text.count(f"{name}={derived.value}") <= 1


def test_what_launch_sets_is_no_note_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_findings([launch_finding("note", "derived", "`use_cpu: True` is set by launch")])
    assert not capsys.readouterr().err
