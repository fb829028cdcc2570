"""What `launch plan` says of rows that the trainer will drop: what a rehearsal saw, or that it is not known."""

import json
from pathlib import Path

import pytest
from real_training import launch, needs_training
from real_training import place as place  # a fixture

pytestmark = [*needs_training, pytest.mark.slow]

STAGE = """\
stage: sft
backend: trl
args:
  model_name_or_path: build/demo/model
  dataset_name: half
  output_dir: out
  assistant_only_loss: true
  max_length: 64
"""


def dropped(place: Path) -> list[tuple[str, str]]:
    """Severity and message of what a plan says of dropped rows."""
    _, answer = launch(place, "plan", "half.yaml", "--gpus", "0", "--row-tokens", "50:64")
    return [
        (one["severity"], one["message"])
        for one in answer["findings"]
        if one["code"] == "rows-dropped"
    ]


def test_a_plan_says_which_rows_are_dropped(place: Path) -> None:
    rows = []
    for number in range(200):
        words = "word " * (200 if number % 2 else 2)
        turns = [{"role": "user", "content": words}, {"role": "assistant", "content": "yes"}]
        rows.append({"messages": turns})
    (place / "half").mkdir()
    (place / "half" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "half.yaml").write_text(STAGE)
    ((severity, message),) = dropped(place)
    assert severity == "note" and "`max_length: 64`" in message
    launch(place, "rehearse", "half.yaml")
    ((severity, message),) = dropped(place)
    assert severity == "warning" and message.startswith("32 of the first 64 rows are dropped")
