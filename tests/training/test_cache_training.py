"""Real hits and misses: the pinned DPO script meets edited data and a retrained model.

Every start is a step or less of a tiny model on the CPU. Skipped, with the reason, where the training
packages or the pinned checkout are missing.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, STAND_INS
from real_training import known_commit as known_commit  # a fixture
from real_training import needs_open_instruct, needs_training

from launcher.cache import diagnosis, folders, keys
from launcher.cache.keys import Cache
from launcher.config import load
from launcher.machine import python as machine
from launcher.plan import command, plan
from launcher.runs import rundir, runner
from launcher.runs.rundir import RunFolder
from launcher.stage import stage as stages
from launcher.upstream.locate import Locator

STAGE_FILE = REPOSITORY / "configs" / "demo" / "dpo_open_instruct.yaml"


pytestmark = [pytest.mark.slow, *needs_training]


@pytest.fixture
def place(demo_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the demo's model and eight of its pairs, and the working directory in it."""
    folder = tmp_path / "project"
    shutil.copytree(demo_assets, folder / "build" / "demo")
    data = folder / "build/demo/data/dpo/train.jsonl"
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:8]))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", STAND_INS)
    return folder


def edit(path: Path) -> None:
    """Another word in the first row's chosen answer: same rows, same size, same time of last write."""
    raw, was = bytearray(path.read_bytes()), path.stat()
    answer = raw.index(b'"assistant"', raw.index(b'"chosen"'))
    at = raw.index(b'"content": "', answer) + 12
    raw[at : at + 6] = b"zzzzzz"
    path.write_bytes(raw)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def retrain(path: Path) -> None:
    """Other weights under the same name, of the same size and time."""
    raw, was = bytearray(path.read_bytes()), path.stat()
    raw[-4096:] = bytes(4096)
    path.write_bytes(raw)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def dpo(name: str, *overrides: str) -> tuple[dict[str, str], dict[str, Cache], RunFolder]:
    """Start the pinned DPO script: what the probe saw of each cache, the folders, the run."""
    words = (
        "model_name_or_path=build/demo/model", f"output_dir=out/{name}", "max_train_steps=1",
        "mixer_list=[build/demo/data/dpo/train.jsonl, '1.0']", "local_cache_dir=cache",
        "batch.global=8", "batch.per_device=8", *overrides,
    )  # fmt: skip
    trainer = machine.find_trainer(Path(sys.executable), None)
    locator = Locator(checkout=Path(os.environ["LAUNCH_OPEN_INSTRUCT"]), search=trainer.path)
    stage = stages.validate(stages.judge_stage_file(load.load(STAGE_FILE, words), locator=locator))
    made = plan.make(stage, gpus=0)
    found = keys.derive(made, trainer.packages)
    run = RunFolder(rundir.runs_root() / name)
    run.path.mkdir(parents=True)
    built = command.build(
        plan.completed(made, keys.derived(found)), trainer, run.path, environ=os.environ
    )
    built = replace(built, env={**built.env, **keys.environment(found)})
    with folders.lock(found, run, 1) as locks:
        ended = runner.run(built, run, 1, pass_fds=locks)
    assert ended.returncode == 0, run.console(1).read_text(errors="replace")[-3000:]
    return states(run), {one.kind: one for one in found}, run


def states(run: RunFolder) -> dict[str, str]:
    lines = (run.probe / "rank-0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return {
        event["event"].removesuffix("_cache"): event["state"]
        for event in events
        if event["event"].endswith("_cache")
    }


@needs_open_instruct
@pytest.mark.usefixtures("known_commit")
def test_dpo_never_meets_a_stale_cache(place: Path) -> None:
    data = place / "build/demo/data/dpo/train.jsonl"
    model = place / "build/demo/model/model.safetensors"
    seen, first, _ = dpo("first")
    assert seen == {"dataset": "miss", "reference": "miss"}

    # written back unchanged is not changed
    for path in (data, model):
        path.write_bytes(path.read_bytes())
    seen, second, run = dpo("second")
    assert seen == {"dataset": "hit", "reference": "hit"}
    assert {kind: one.path for kind, one in second.items()} == {
        kind: one.path for kind, one in first.items()
    }
    assert all("the same content" in one.text for one in diagnosis.why(run))

    retrain(model)
    seen, third, run = dpo("third")
    assert seen == {"dataset": "hit", "reference": "miss"}
    told = {one.kind: one for one in diagnosis.why(run)}
    assert [one.what for one in told["reference"].differences] == [
        "build/demo/model/model.safetensors"
    ]
    # upstream itself cannot tell the two apart: the entries bear the same name
    names = [sorted(p.name for p in one["reference"].path.glob("*.pt")) for one in (first, third)]
    assert names[0] == names[1] and len(names[0]) == 1

    edit(data)
    seen, fourth, run = dpo("fourth", "cache_dataset_only=true")
    assert seen == {"dataset": "miss"}
    before, now = (tokens(one["dataset"]) for one in (third, fourth))
    assert before[0][1:] == now[0][1:] and before[0][0] != now[0][0], "the new row, and only that"
    assert before[1] == now[1], "and again the same key of upstream's"


def tokens(cache: Cache) -> tuple[list[Any], list[str]]:
    """The tokenised rows of a folder, in the order of the data, and upstream's name for them."""
    entries = [p for p in cache.path.iterdir() if (p / "state.json").is_file()]
    code = (
        "import json, sys; from datasets import load_from_disk;"
        "print(json.dumps(load_from_disk(sys.argv[1]).sort('index')['chosen_input_ids'][:]))"
    )
    done = subprocess.check_output([sys.executable, "-c", code, str(entries[0])], text=True)
    return json.loads(done.strip().splitlines()[-1]), [path.name for path in entries]
