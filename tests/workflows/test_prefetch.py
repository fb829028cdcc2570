"""`launch prepare`: what it fills is what the later run takes, and it says so where it is not."""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import NO_PACKAGES, PATIENCE_S, REPOSITORY, STAND_INS
from fake_world import until
from saved import UNKNOWN, tensors

from launcher.cache import entries, folders, hub
from launcher.cli.main import main
from launcher.plan import plan
from launcher.plan.plan import Plan
from launcher.planning import collect
from launcher.planning.collect import Scope
from launcher.planning.request import Request

CONFIGS = REPOSITORY / "configs" / "demo"
COMMIT = "a" * 40
TRAINING = ("torch", "transformers", "accelerate", "datasets", "trl")
OPEN_INSTRUCT = (*TRAINING, "deepspeed", "olmo_core", "peft", "ray", "beaker")


def needs(names: Sequence[str]) -> pytest.MarkDecorator:
    gone = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(gone), reason=f"{NO_PACKAGES}: {', '.join(gone)}")


@pytest.fixture
def place(demo_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the demo's model and 40 rows of each of its data sets, the working directory in it,
    and no network."""
    folder = tmp_path / "project"
    shutil.copytree(demo_assets, folder / "build" / "demo")
    for path in folder.glob("build/demo/data/*/train.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:40]))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("LAUNCH_CACHE", str(tmp_path / "launch-cache"))
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{STAND_INS}")
    return folder


def on_the_hub(place: Path, name: str) -> Path:
    """The demo's model as the hub's cache would hold it."""
    repository = Path(os.environ["HF_HOME"]) / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(place / "build/demo/model", snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def prepare(
    capsys: pytest.CaptureFixture[str], config: str, *words: str
) -> tuple[int, dict[str, Any], list[str]]:
    """`launch prepare` as a user would start it: exit code, data, codes of the errors."""
    capsys.readouterr()
    code = main(["prepare", str(CONFIGS / config), *words, "--format", "json"])
    told = json.loads(capsys.readouterr().out)
    wrong = [one["code"] for one in told["findings"] if one["severity"] == "error"]
    return code, told["data"] or {}, wrong


def run(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *words, "--format", "json"],
        capture_output=True, text=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert told["data"] is not None, done.stderr
    points = {one["name"]: one["state"] for one in told["data"]["points"]}
    assert points["finish"] == "completed", told
    return points


SFT = (
    "sft_open_instruct.yaml",
    "--gpus",
    "0",
    "dataset_mixer_list=[build/demo/data/sft/train.jsonl, '1.0']",
)
DPO = (
    "dpo_open_instruct.yaml", "model_name_or_path=build/demo/model",
    "mixer_list=[build/demo/data/dpo/train.jsonl, '1.0']",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.training
@needs(OPEN_INSTRUCT)
def test_sft_of_a_model_on_the_hub_finds_what_was_prepared(
    place: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_the_hub(place, "acme/tiny")
    words = [*SFT, "model_name_or_path=acme/tiny"]
    # 40 rows of at most 60 tokens: some are longer
    words.append("max_seq_length=60")
    code, data, found = prepare(capsys, *words)
    assert (code, found) == (0, [])
    made = data["dataset"]
    assert made["state"] == "filled" and not data["already_there"]
    assert (made["rows"], made["longest"]) == (40, 60)
    assert made["mean"] * 40 == pytest.approx(made["tokens"])
    # nothing is left where the model will go
    assert not (place / "build/demo/sft_open_instruct").exists()

    # another number of GPUs, another learning rate: the same set
    again = [*words[:1], "--gpus", "2", *words[3:], "batch.per_device=4", "learning_rate=1e-4"]
    code, data, found = prepare(capsys, *again)
    assert (code, found, data["already_there"], data["log"]) == (0, [], True, None)
    assert data["dataset"]["places"] == made["places"]
    assert data["dataset"]["tokens"] == made["tokens"]

    points = run(
        "sft", str(CONFIGS / words[0]), *words[1:], "max_train_steps=1", "expect.dataset_cache=hit",
        "expect.trend=any",
    )  # fmt: skip
    assert points["dataset_cache"] == "hit"


@pytest.mark.slow
@pytest.mark.training
@needs(OPEN_INSTRUCT)
def test_dpo_leaves_the_reference_to_the_run_and_stops_clean(
    place: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ctrl-C in the middle of it
    words = [
        sys.executable,
        "-m",
        "launcher",
        "prepare",
        str(CONFIGS / DPO[0]),
        *DPO[1:],
        "--gpus",
        "0",
    ]
    started = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    cache = place / "build/demo/cache"
    logs = Path(os.environ["LAUNCH_RUNS"])
    until(lambda: list(logs.glob("*/console.log")))
    started.send_signal(signal.SIGINT)
    started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 130
    assert not list(cache.glob("dataset-*/*/state.json"))

    # two at once: one tokenises, the other waits and finds it
    codes: list[int] = []
    both = [
        threading.Thread(target=lambda: codes.append(subprocess.run(words).returncode))
        for _ in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert codes == [0, 0]
    # the one that was stopped, and one more
    assert len(list(logs.glob("*-prepare-*/console.log"))) == 2

    code, data, _ = prepare(capsys, *DPO, "--gpus", "0")
    assert code == 0 and data["already_there"] and data["dataset"]["rows"] == 40
    assert any("one pass of the model" in one for one in data["left"])
    points = run(
        "dpo", str(CONFIGS / DPO[0]), *DPO[1:], "--gpus", "0", "max_train_steps=1", "expect.trend=any",
    )  # fmt: skip
    assert points["dataset_cache"] == "hit" and points["reference_cache"] == "miss"


@pytest.mark.slow
@needs(TRAINING)
def test_trl_gets_its_model_and_data_and_tokenises_itself(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_the_hub(place, "acme/tiny")
    words = ("sft.yaml", "model_name_or_path=acme/tiny", "--gpus", "0")
    code, data, found = prepare(capsys, *words)
    assert (code, found, data["log"]) == (0, [], None)
    assert {one["kind"]: one["state"] for one in data["parts"]} == {
        "model": "there",
        "data": "there",
    }
    assert data["dataset"]["state"] == "left" and data["left"][0].startswith("tokenising: TRL")
    # a set on the hub that is not here, and no network
    code, _, found = prepare(capsys, *words, "dataset_name=acme/chats")
    assert (code, found) == (5, ["not-fetched"])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("dataset_skip_cache=true", "tokenises all over"),
        ("dataset_config_hash=0123456789", "by its name"),
    ],
)
def test_what_no_preparation_helps_with_is_refused(
    place: Path, checkout: Path, capsys: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    # begun and never finished: upstream would take it, and crash
    (place / "build/demo/cache/0123456789").mkdir(parents=True)
    capsys.readouterr()
    config = str(CONFIGS / "sft_open_instruct.yaml")
    assert main(["prepare", config, word, "--gpus", "0", "--format", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    wrong = [one for one in told["findings"] if one["severity"] == "error"]
    assert [one["code"] for one in wrong] == ["would-miss"] and said in wrong[0]["message"]
    assert told["data"]["dataset"]["state"] == "missed"


def test_the_config_is_judged_first(
    place: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS / "sft_open_instruct.yaml"
    assert main(["prepare", str(config), "use_liger_kernal=true", "--gpus", "0"]) == 3
    assert "unknown-key" in capsys.readouterr().err
    assert main(["prepare", str(config), "--gpus", "3"]) == 3
    assert "impossible-batch" in capsys.readouterr().err
    assert main(["prepare", str(config)]) == 2
    assert "no-gpus" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_is_not_here_is_named(
    place: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, found = prepare(capsys, *SFT, "model_name_or_path=acme/absent")
    assert (code, found) == (5, ["not-fetched"])
    code, _, found = prepare(capsys, *SFT, "model_name_or_path=./nowhere")
    assert (code, found) == (5, ["incomplete-model"])
    # a download that was broken off
    snapshot = on_the_hub(place, "acme/half")
    (snapshot / "model.safetensors").unlink()
    code, _, found = prepare(capsys, *SFT, "model_name_or_path=acme/half")
    assert (code, found) == (5, ["incomplete-model"])


def test_a_folder_lacks_what_its_index_names(tmp_path: Path) -> None:
    assert hub.lacking(tmp_path / "gone", "model") is not None
    assert "config.json" in str(hub.lacking(tmp_path, "model"))
    (tmp_path / "config.json").write_text(UNKNOWN)
    assert "no weights" in str(hub.lacking(tmp_path, "model"))
    names = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    index = {"metadata": {}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors(tmp_path / "model-1-of-2.safetensors")
    assert "model-2-of-2.safetensors is missing" in str(hub.lacking(tmp_path, "model"))
    # a link whose blob was removed is no file
    (tmp_path / "model-2-of-2.safetensors").symlink_to(tmp_path / "blob")
    assert hub.lacking(tmp_path, "model") is not None
    tensors(tmp_path / "blob")
    assert hub.lacking(tmp_path, "model") is None
    assert "no tokenizer" in str(hub.lacking(tmp_path, "tokenizer"))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert hub.lacking(tmp_path, "tokenizer") is None


def planned(config: str, *words: str) -> Plan:
    asked = collect.collect(
        Request(stage=None, config=CONFIGS / config, overrides=words, gpus=0), Scope.FILE
    )
    return plan.make(asked.stage, gpus=0)


def saved(folder: Path, name: str, key: dict[str, Any]) -> Path:
    """A set of upstream's as far as its own record of it goes."""
    entry = folder / name
    entry.mkdir(parents=True)
    for file in ("state.json", "dataset_info.json"):
        (entry / file).write_text("{}")
    told = {"tokenizer_config": key["tokenizer"], "dataset_configs": key["data"]}
    (entry / "config.json").write_text(json.dumps(told))
    return entry


@pytest.fixture
def folder(place: Path, checkout: Path) -> Iterator[Path]:
    """An empty cache folder of launch's own."""
    digest = "b" * 64
    path = place / f"dataset-{digest[:16]}"
    path.mkdir()
    record = {"launch_cache": 1, "kind": "dataset", "digest": digest}
    (path / folders.RECORD).write_text(json.dumps(record))
    yield path


@pytest.mark.parametrize(
    "word",
    [
        "max_seq_length=257",
        "dataset_mixer_list=[build/demo/data/sft/train.jsonl, '100']",
        "dataset_transform_fn=[sft_tulu_tokenize_and_truncate_v1, sft_filter_v1]",
        "tokenizer_name_or_path=build/demo/tokenizer",
    ],
)
def test_a_set_made_otherwise_is_no_hit(folder: Path, place: Path, word: str) -> None:
    shutil.copytree(place / "build/demo/model", place / "build/demo/tokenizer")
    mine = planned("sft_open_instruct.yaml")
    entry = saved(folder, "0123456789", entries.key(mine))
    assert entries.hit(folder, mine) == entry
    # what upstream's key does not hold changes nothing
    other = planned("sft_open_instruct.yaml", "learning_rate=1e-6", "seed=7")
    assert entries.hit(folder, other) == entry
    assert entries.hit(folder, planned("sft_open_instruct.yaml", word)) is None


def test_a_set_made_before_the_download_is_no_hit(folder: Path, place: Path) -> None:
    """Upstream's key holds the tokenizer's files as the hub's cache has them, and those of a data set."""
    words = ("model_name_or_path=acme/tiny", "dataset_mixer_list=[acme/chats, '1.0']")
    before = entries.key(planned("sft_open_instruct.yaml", *words))
    assert before["tokenizer"]["tokenizer_files_hash"][1] == "tokenizer.json not found"
    assert before["data"][0]["dataset_commit_hash"] is None
    saved(folder, "0123456789", before)
    assert entries.hit(folder, planned("sft_open_instruct.yaml", *words)) is not None

    snapshot = on_the_hub(place, "acme/tiny")
    after = planned("sft_open_instruct.yaml", *words)
    raw = (snapshot / "tokenizer.json").read_bytes()
    hashed = entries.key(after)["tokenizer"]["tokenizer_files_hash"]
    assert hashed[1] == hashlib.sha256(raw).hexdigest()
    assert entries.hit(folder, after) is None

    data = Path(os.environ["HF_HOME"]) / "hub" / "datasets--acme--chats"
    (data / "refs").mkdir(parents=True)
    (data / "refs" / "main").write_text(COMMIT)
    assert entries.key(after)["data"][0]["dataset_commit_hash"] is None
    (data / "snapshots" / COMMIT).mkdir(parents=True)
    (data / "snapshots" / COMMIT / "README.md").write_text("")
    assert entries.key(after)["data"][0]["dataset_commit_hash"] == COMMIT


def test_what_a_plan_reads(place: Path) -> None:
    read = hub.required_parts(
        planned("sft_open_instruct.yaml", "tokenizer_name_or_path=acme/words")
    )
    assert [(one.role, one.name) for one in read] == [
        ("whole", "build/demo/model"),
        ("tokenizer", "acme/words"),
        ("card", "build/demo/data/sft/train.jsonl"),
    ]
    read = hub.required_parts(planned("sft.yaml", "model_revision=v2"))
    assert [(one.role, one.revision) for one in read] == [("model", "v2"), ("data", None)]
