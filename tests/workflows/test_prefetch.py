"""`launch prepare`: what it fills is what the later run takes, and it says so where it is not."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, REPOSITORY, STAND_INS
from fake_world import wait_until
from parsed_answers import parse_answer
from real_training import CONFIGS, needs_open_instruct, needs_packages

from launcher.cache import entries, folders, hub
from launcher.cli.main import main
from launcher.errors import Exit
from launcher.plan import plan
from launcher.plan.plan import Plan
from launcher.planning import collect
from launcher.planning.collect import Scope
from launcher.planning.request import Request

COMMIT = "a" * 40
SFT = "sft_open_instruct.yaml"
DPO = "dpo_open_instruct.yaml"
CHATS = "dataset_mixer_list=[build/demo/data/sft/train.jsonl, '1.0']"
EXITS = {
    "": Exit.OK,
    "would-miss": Exit.VERDICT,
    "not-fetched": Exit.NOT_READY,
    "incomplete-model": Exit.NOT_READY,
}
PAIRS = "mixer_list=[build/demo/data/dpo/train.jsonl, '1.0']"


@pytest.fixture
def project(demo_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: the demo's model, 40 rows of each of its data sets, no network."""
    folder = tmp_path / "project"
    shutil.copytree(demo_assets, folder / "build" / "demo")
    for path in folder.glob("build/demo/data/*/train.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:40]))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("LAUNCH_CACHE", str(tmp_path / "launch-cache"))
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{STAND_INS}")
    return folder


def write_to_hub(project: Path, name: str) -> Path:
    """The demo's model as the hub's cache would hold it."""
    repository = Path(os.environ["HF_HOME"]) / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(project / "build/demo/model", snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@dataclass(frozen=True)
class Prepare:
    """`launch prepare`: the data of its answer."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, config: str, *words: str, gpus: int = 0, error: str = "") -> Any:
        """`error` is the code of the only one that is expected."""
        self.capsys.readouterr()
        options = ["--gpus", str(gpus), "--format", "json"]
        code = main(["prepare", str(CONFIGS / config), *words, *options])
        answer = parse_answer(self.capsys.readouterr().out)
        errors = [finding for finding in answer.findings if finding.severity == "error"]
        assert code == EXITS[error]
        assert [finding.code for finding in errors] == [error] * bool(error)
        return answer.data


@pytest.fixture
def prepare(project: Path, checkout: Path, capsys: pytest.CaptureFixture[str]) -> Prepare:
    return Prepare(capsys)


def train(stage: str, config: str, *words: str) -> dict[str, str]:
    """Train one step; the points of the verdict and their states."""
    command = [sys.executable, "-m", "launcher", stage, str(CONFIGS / config), *words]
    short = ["max_train_steps=1", "expect.trend=any", "--gpus", "0", "--format", "json"]
    done = subprocess.run([*command, *short], capture_output=True, text=True)
    answer = parse_answer(done.stdout)
    assert answer.data is not None, done.stderr
    states = {point.name: point.state for point in answer.data.points}
    assert states["finish"] == "completed", answer
    return states


@pytest.mark.slow
@pytest.mark.training
@needs_packages
@needs_open_instruct
def test_sft_of_a_model_on_the_hub_finds_what_was_prepared(prepare: Prepare, project: Path) -> None:
    write_to_hub(project, "acme/tiny")
    # 40 rows of at most 60 tokens: some are longer
    words = [CHATS, "model_name_or_path=acme/tiny", "max_seq_length=60"]

    first = prepare(SFT, *words)

    assert not first.already_there
    dataset = first.dataset
    assert dataset.state == "filled"
    assert dataset.rows == 40
    assert dataset.longest == 60
    assert dataset.mean * 40 == pytest.approx(dataset.tokens)
    # nothing is left where the model will go
    assert not (project / "build/demo/sft_open_instruct").exists()

    # another number of GPUs, another learning rate: the same set
    again = prepare(SFT, *words, "batch.per_device=4", "learning_rate=1e-4", gpus=2)

    assert again.already_there
    assert again.log is None
    assert again.dataset.places == dataset.places
    assert again.dataset.tokens == dataset.tokens

    states = train("sft", SFT, *words, "expect.dataset_cache=hit")

    assert states["dataset_cache"] == "hit"


@pytest.mark.slow
@pytest.mark.training
@needs_packages
@needs_open_instruct
def test_dpo_leaves_the_reference_to_the_run_and_stops_clean(
    prepare: Prepare, project: Path
) -> None:
    words = ["model_name_or_path=build/demo/model", PAIRS]
    command = [sys.executable, "-m", "launcher", "prepare", str(CONFIGS / DPO), "--gpus", "0"]
    logs = Path(os.environ["LAUNCH_RUNS"])

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    # Ctrl-C in the middle of it
    stopped = start()
    wait_until(lambda: list(logs.glob("*/console.log")))
    stopped.send_signal(signal.SIGINT)
    stopped.communicate(timeout=PATIENCE_S)
    assert stopped.returncode == Exit.INTERRUPTED
    assert not list(project.glob("build/demo/cache/dataset-*/*/state.json"))

    # two at once: one tokenises, the other waits and finds it
    both = [start(), start()]
    for process in both:
        process.communicate(timeout=PATIENCE_S)
    assert [process.returncode for process in both] == [0, 0]
    # the one that was stopped, and one more
    assert len(list(logs.glob("*-prepare-*/console.log"))) == 2

    again = prepare(DPO, *words)
    assert again.already_there
    assert again.dataset.rows == 40
    assert any("one pass of the model" in text for text in again.left)

    states = train("dpo", DPO, *words)
    assert states["dataset_cache"] == "hit"
    assert states["reference_cache"] == "miss"


@pytest.mark.slow
@needs_packages
def test_trl_gets_its_model_and_data_and_tokenises_itself(prepare: Prepare, project: Path) -> None:
    write_to_hub(project, "acme/tiny")

    model = "model_name_or_path=acme/tiny"

    done = prepare("sft.yaml", model)

    assert done.log is None
    assert {part.kind: part.state for part in done.parts} == {"model": "there", "data": "there"}
    assert done.dataset.state == "left"
    assert done.left[0].startswith("tokenising: TRL")
    # a set on the hub that is not here, and no network
    prepare("sft.yaml", model, "dataset_name=acme/chats", error="not-fetched")


@pytest.mark.parametrize("word", ["dataset_skip_cache=true", "dataset_config_hash=0123456789"])
def test_what_no_preparation_helps_with_is_refused(
    word: str, prepare: Prepare, project: Path
) -> None:
    # begun and never finished: upstream would take it, and crash
    (project / "build/demo/cache/0123456789").mkdir(parents=True)

    assert prepare(SFT, word, error="would-miss").dataset.state == "missed"


@pytest.mark.parametrize(
    ("words", "code", "finding"),
    [
        (["use_liger_kernal=true", "--gpus", "0"], Exit.CONFIG, "unknown-key"),
        (["--gpus", "3"], Exit.CONFIG, "impossible-batch"),
        ([], Exit.USAGE, "no-gpus"),
    ],
)
@pytest.mark.usefixtures("project", "checkout")
def test_the_config_is_judged_first(
    words: list[str], code: Exit, finding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", str(CONFIGS / SFT), *words]) == code
    assert finding in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_is_not_here_is_named(prepare: Prepare, project: Path) -> None:
    # a download that was broken off: a link without its blob
    weights = write_to_hub(project, "acme/half") / "model.safetensors"
    weights.unlink()
    weights.symlink_to("blob")

    for model, error in (
        ("acme/absent", "not-fetched"),
        ("./nowhere", "incomplete-model"),
        ("acme/half", "incomplete-model"),
    ):
        prepare(SFT, CHATS, f"model_name_or_path={model}", error=error)


def plan_of(config: str, *words: str) -> Plan:
    request = Request(stage=None, config=CONFIGS / config, overrides=words, gpus=0)
    return plan.make(collect.collect(request, Scope.FILE).stage, gpus=0)


def write_entry(folder: Path, key: entries.EntryKey) -> Path:
    """A set of upstream's as far as its own record of it goes."""
    entry = folder / "0123456789"
    entry.mkdir(parents=True)
    config = {"tokenizer_config": key.tokenizer, "dataset_configs": key.data}
    (entry / "config.json").write_text(json.dumps(config))
    (entry / "state.json").write_text("{}")
    (entry / "dataset_info.json").write_text("{}")
    return entry


@pytest.fixture
def cache(project: Path, checkout: Path) -> Path:
    """An empty cache folder of launch's own."""
    digest = "b" * 64
    path = project / f"dataset-{digest[:16]}"
    path.mkdir()
    record = {"launch_cache": 1, "kind": "dataset", "digest": digest}
    (path / folders.RECORD).write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(
    "word",
    [
        "max_seq_length=257",
        "dataset_mixer_list=[build/demo/data/sft/train.jsonl, '100']",
        "dataset_transform_fn=[sft_tulu_tokenize_and_truncate_v1, sft_filter_v1]",
        "tokenizer_name_or_path=build/demo/tokenizer",
    ],
)
def test_a_set_made_otherwise_is_no_hit(word: str, cache: Path, project: Path) -> None:
    shutil.copytree(project / "build/demo/model", project / "build/demo/tokenizer")
    plan = plan_of(SFT)
    entry = write_entry(cache, entries.compute_key(plan))

    assert entries.find_hit(cache, plan) == entry
    # what upstream's key does not hold changes nothing
    assert entries.find_hit(cache, plan_of(SFT, "learning_rate=1e-6", "seed=7")) == entry
    assert entries.find_hit(cache, plan_of(SFT, word)) is None


def test_a_set_made_before_the_download_is_no_hit(cache: Path, project: Path) -> None:
    """Upstream's key holds the tokenizer's files as the hub's cache has them, and the data's."""
    words = ("model_name_or_path=acme/tiny", "dataset_mixer_list=[acme/chats, '1.0']")
    before = entries.compute_key(plan_of(SFT, *words))
    assert before.tokenizer["tokenizer_files_hash"][1] == "tokenizer.json not found"
    assert before.data[0]["dataset_commit_hash"] is None
    write_entry(cache, before)
    assert entries.find_hit(cache, plan_of(SFT, *words)) is not None

    snapshot = write_to_hub(project, "acme/tiny")
    after = plan_of(SFT, *words)
    content = (snapshot / "tokenizer.json").read_bytes()
    hashes = entries.compute_key(after).tokenizer["tokenizer_files_hash"]
    assert hashes[1] == hashlib.sha256(content).hexdigest()
    assert entries.find_hit(cache, after) is None


def test_a_set_on_the_hub_is_known_by_its_commit_once_its_card_is_here(
    project: Path, checkout: Path
) -> None:
    def commit() -> str | None:
        key = entries.compute_key(plan_of(SFT, "dataset_mixer_list=[acme/chats, '1.0']"))
        hash: str | None = key.data[0]["dataset_commit_hash"]
        return hash

    data = Path(os.environ["HF_HOME"]) / "hub" / "datasets--acme--chats"
    (data / "refs").mkdir(parents=True)
    (data / "refs" / "main").write_text(COMMIT)
    assert commit() is None
    snapshot = data / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").write_text("")
    assert commit() == COMMIT


def test_what_a_plan_reads(project: Path) -> None:
    parts = hub.list_required_parts(plan_of(SFT, "tokenizer_name_or_path=acme/words"))
    assert [(part.role, part.name) for part in parts] == [
        ("whole", "build/demo/model"),
        ("tokenizer", "acme/words"),
        ("card", "build/demo/data/sft/train.jsonl"),
    ]
    parts = hub.list_required_parts(plan_of("sft.yaml", "model_revision=v2"))
    assert [(part.role, part.revision) for part in parts] == [("model", "v2"), ("data", None)]
