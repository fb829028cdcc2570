"""A mixture of data sets on TRL with real processes: rehearsed, trained, evaluated, judged, and started again."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_world import until
from real_training import launch, needs_training
from real_training import place as place  # a fixture

from launcher.config.load import load

pytestmark = [*needs_training, pytest.mark.slow]

STAGE = """\
stage: sft
backend: trl
expect: {trend: any}
args:
  model_name_or_path: build/demo/model
  output_dir: out
  datasets:
  - path: build/demo/data/sft
    split: train[:5%]
  - path: json
    data_files: extra/*.jsonl
    split: train[-40:]
    columns: [messages]
  test_split_size: 12
  eval_strategy: steps
  eval_steps: 4
  max_length: 128
  per_device_train_batch_size: 8
  num_train_epochs: 1
  learning_rate: 1e-3
  logging_steps: 1
  save_strategy: "no"
"""
TRAINED = 60 + 40 - 12  # of 1200 and 50 rows


@pytest.fixture
def stage(place: Path) -> str:
    lines = (place / "build/demo/data/sft/train.jsonl").read_text().splitlines()[:50]
    rows = [{**json.loads(line), "source": "extra"} for line in lines]
    (place / "extra").mkdir(exist_ok=True)
    (place / "extra" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:20]))
    (place / "extra" / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[20:]))
    (place / "mixture.yaml").write_text(STAGE)
    return "mixture.yaml"


def point(answer: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in answer["data"]["points"] if one["name"] == name]
    return dict(found)


def test_it_trains_on_the_planned_rows_and_evaluates_on_the_others(place: Path, stage: str) -> None:
    words = ("sft", stage, "--gpus", "0")
    code, answer = launch(place, *words)
    assert (code, answer["data"]["status"]) == (0, "pass"), answer
    data = point(answer, "data")
    assert (data["state"], data["detail"]["planned_rows"], data["detail"]["given"]) == (
        "as_planned",
        TRAINED,
        TRAINED,
    )
    assert answer["data"]["steps"] == -(-TRAINED // 8)
    (run,) = (place / "runs").iterdir()
    assert (run / "console.log").read_text().count("'eval_loss'") >= 2
    # the run keeps its own file, and the digest of every file that it read
    config = yaml.safe_load((run / "trainer.yaml").read_text())
    args = load(place / stage).args
    assert config == {"datasets": args["datasets"], "test_split_size": 12}
    record = json.loads((run / "run.json").read_text())
    read = {file for one in record["contents"] if one["role"] == "data" for file in one["files"]}
    assert {Path(name).name for name in read} == {"train.jsonl", "a.jsonl", "b.jsonl"}
    assert load(run / "stage.yaml").args["datasets"] == args["datasets"]

    # the same command finds it finished; another mixture is another run
    code, answer = launch(place, *words)
    assert code == 0 and "already-finished" in {one["code"] for one in answer["findings"]}
    code, answer = launch(place, *words, "datasets[0].split=train[:10%]")
    assert code == 3 and "datasets" in json.dumps(answer["findings"])


def test_its_rehearsal_reads_the_rows_of_every_set(place: Path, stage: str) -> None:
    code, answer = launch(place, "rehearse", stage)
    assert code == 0, answer["findings"]
    assert (answer["data"]["rows"]["read"], answer["data"]["rows"]["total"]) == (60 + 40, 60 + 40)
    assert answer["data"]["losses"]


def test_a_rehearsal_says_what_the_trainer_refuses_of_a_set(place: Path, stage: str) -> None:
    code, answer = launch(place, "rehearse", stage, "datasets[1].columns=[source]")
    assert code == 3
    assert "args.datasets" in json.dumps(answer["findings"])


def test_each_attempt_has_a_file_of_its_own(place: Path, stage: str) -> None:
    words = (
        "sft", stage, "--gpus", "0", "num_train_epochs=6", "save_strategy=steps", "save_steps=3",
        "output_dir=resumed",
    )  # fmt: skip
    code, answer = launch(place, *words, "--detach")
    assert code == 0, answer["findings"]
    run = max((place / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    until(lambda: (place / "resumed" / "checkpoint-3" / "trainer_state.json").exists())
    launch(place, "stop", run.name)
    code, answer = launch(place, *words)
    assert code == 0, answer
    assert (run / "trainer.2.yaml").read_text() == (run / "trainer.yaml").read_text()
    argv = json.loads((run / "run.json").read_text())["argv"]
    assert argv[argv.index("--config") + 1] == str(run / "trainer.2.yaml")


def test_a_preview_numbers_the_rows_of_all_sets(place: Path, stage: str) -> None:
    code, answer = launch(place, "preview", stage, "--row", "61")
    assert code == 0, answer["findings"]
    assert answer["data"]["counts"]["total"] == 60 + 40
    ((row,),) = [answer["data"]["rows"]]
    # the first row of the second set: of 50 rows the last 40
    lines = (place / "build/demo/data/sft/train.jsonl").read_text().splitlines()
    question = json.loads(lines[10])["messages"][0]["content"]
    text = "".join(piece["text"] for section in row["sections"] for piece in section["pieces"])
    assert row["row"] == 61 and question.splitlines()[0] in text
