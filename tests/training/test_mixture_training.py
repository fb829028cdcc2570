"""A mixture of data sets with TRL: rehearsed, trained, evaluated, interrupted and started again."""

import json
from pathlib import Path

import pytest
import row_files
import yaml
from fake_world import open_world
from real_answers import Answer, find_point, launch, succeed
from real_training import needs_training
from real_training import place as place  # a fixture
from row_files import Row

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
SELECTED = 60 + 40  # of 1200 and 50 rows
TRAINED = SELECTED - 12
STEPS = 11
TRAIN = ("sft", "mixture.yaml", "--gpus", "0")


def demo_rows(place: Path) -> list[Row]:
    lines = (place / "build/demo/data/sft/train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def mixture(place: Path) -> Path:
    """The folder to launch from, with the stage file and its second data set, of two files."""
    rows = [{**row, "source": "extra"} for row in demo_rows(place)[:50]]
    folder = place / "extra"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(row_files.lines(rows[:20]))
    (folder / "b.jsonl").write_bytes(row_files.lines(rows[20:]))
    (place / "mixture.yaml").write_text(STAGE)
    return place


@pytest.fixture(scope="module")
def trained(mixture: Path) -> Answer:
    return launch(mixture, *TRAIN)


def test_it_trains_on_the_planned_rows_and_evaluates_on_the_others(trained: Answer) -> None:
    assert trained.outcome == (0, "pass"), trained
    data = find_point(trained.data, "data")
    assert data["state"] == "as_planned"
    assert data["detail"]["planned_rows"] == TRAINED
    assert data["detail"]["given"] == TRAINED
    assert trained.data["steps"] == STEPS
    assert (trained.run / "console.log").read_text().count("'eval_loss'") >= 2


def test_the_run_keeps_its_own_file_and_the_digests_of_what_it_read(
    mixture: Path, trained: Answer
) -> None:
    datasets = load(mixture / "mixture.yaml").args["datasets"]
    config = yaml.safe_load((trained.run / "trainer.yaml").read_text())
    assert config == {"datasets": datasets, "test_split_size": 12}
    assert load(trained.run / "stage.yaml").args["datasets"] == datasets

    names = set()
    for content in json.loads((trained.run / "run.json").read_text())["contents"]:
        if content["role"] == "data":
            names |= {Path(file).name for file in content["files"]}
    assert names == {"train.jsonl", "a.jsonl", "b.jsonl"}


def test_another_mixture_is_another_run(mixture: Path, trained: Answer) -> None:
    again = succeed(mixture, *TRAIN)
    assert again.finding("already-finished")
    other = launch(mixture, *TRAIN, "datasets[0].split=train[:10%]")
    assert other.code == 3
    assert "datasets" in json.dumps(other.findings)


def test_its_rehearsal_reads_the_rows_of_every_set(mixture: Path) -> None:
    rehearsal = succeed(mixture, "rehearse", "mixture.yaml").data
    assert rehearsal["rows"]["read"] == SELECTED
    assert rehearsal["rows"]["total"] == SELECTED
    assert rehearsal["losses"]


def test_a_rehearsal_shows_what_the_trainer_refuses_of_a_set(mixture: Path) -> None:
    answer = launch(mixture, "rehearse", "mixture.yaml", "datasets[1].columns=[source]")
    assert answer.code == 3
    assert "args.datasets" in json.dumps(answer.findings)


def test_each_attempt_has_a_file_of_its_own(tmp_path: Path) -> None:
    with open_world(tmp_path / "world") as world:
        config = world.config(dataset_name=None, datasets=[{"path": "data"}], test_split_size=12)
        for _ in range(2):
            world.trained(str(config), steps=("exit=3",))
        argv = json.loads((world.root / "argv.json").read_text())
        (run,) = world.runs.iterdir()
        first = run / "trainer.yaml"
        second = run / "trainer.2.yaml"
        assert second.read_text() == first.read_text()
        place = argv.index("--config")
        assert argv[place + 1] == str(second)


def test_a_preview_numbers_the_rows_of_all_sets(mixture: Path) -> None:
    preview = succeed(mixture, "preview", "mixture.yaml", "--row", "61").data
    assert preview["counts"]["total"] == SELECTED
    (row,) = preview["rows"]
    assert row["row"] == 61
    # the first row of the second set, which has the last 40 of 50 rows
    question = demo_rows(mixture)[10]["messages"][0]["content"]
    text = ""
    for section in row["sections"]:
        for piece in section["pieces"]:
            text += piece["text"]
    assert question.splitlines()[0] in text
