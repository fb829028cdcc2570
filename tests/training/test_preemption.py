"""Real training that is told to save and end before its machine is taken, at whatever moment, by whichever way.

The continued run must come to the weights of one that was left alone, bit for bit. One rank, and two that meet over
gloo, each under a supervisor of its own as on two machines.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, STAND_INS
from real_training import needs_open_instruct, needs_training
from slurm_cluster import free_ports

from launcher.machine import process as processes
from launcher.runs import rundir, runner
from launcher.runs.rundir import RunFolder

pytestmark = [pytest.mark.slow, *needs_training]

STEPS = 14
ROWS = 60
Moment = Callable[["Training"], None]

COMMON = """
deepspeed: none
batch: {{global: 4, per_device: 2}}
expect: {{loss: finite, trend: any, liger: off, data: any}}
args:
  model_name_or_path: build/demo/model
  output_dir: {output}
  logging_steps: 1
"""
PINNED = """
  chat_template_name: tulu
  max_seq_length: 64
  do_not_randomize_output_dir: true
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
  learning_rate: 1.0e-3
  max_train_steps: 14
"""
TRL = """
  dataset_name: build/demo/data/sft
  max_length: 64
  max_steps: 14
  learning_rate: 1.0e-3
  bf16: false
  gradient_checkpointing: false
  save_strategy: "no"
"""
SFT = """
  dataset_mixer_list: [build/demo/data/sft/train.jsonl, "1.0"]
"""
DPO = """
  mixer_list: [build/demo/data/dpo/train.jsonl, "1.0"]
"""
STAGES = {
    "trl": f"stage: sft\nbackend: trl{COMMON}{TRL}",
    "sft": f"stage: sft\nbackend: open_instruct{COMMON}{PINNED}{SFT}",
    "dpo": f"stage: dpo\nbackend: open_instruct{COMMON}{PINNED}{DPO}",
}
SLOW = """\
import importlib.util, os, sys, time
MODULE, CLASS, METHOD, MARK, SECONDS = os.environ["SLOW"].split(":")
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            owner = getattr(module, CLASS)
            original = getattr(owner, METHOD)
            def slow(*args, **kwargs):
                open(MARK, "w").close()
                time.sleep(float(SECONDS))
                return original(*args, **kwargs)
            setattr(owner, METHOD, slow)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Slow())
"""
"""A sitecustomize that makes one method of a trainer take its time, and leaves a file when it begins."""


@dataclass
class Training:
    """One run of a kind, each rank of it under a supervisor of its own."""

    place: Path
    kind: str
    name: str
    ranks: int = 1
    words: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def output(self) -> Path:
        return self.place / "out" / self.name

    @property
    def run(self) -> Path | None:
        """The folder of the run, once there is one."""
        for manifest in sorted((self.place / "runs").glob("*/run.json")):
            if rundir.read_manifest(RunFolder(manifest.parent)).output == self.output:
                return manifest.parent
        return None

    @property
    def folder(self) -> Path:
        assert self.run is not None
        return self.run

    def attempts(self) -> int:
        return 0 if self.run is None else RunFolder(self.run).attempts()

    def environment(self) -> dict[str, str]:
        folders = {
            "LAUNCH_RUNS": "runs",
            "XDG_STATE_HOME": "state",
            "XDG_CACHE_HOME": "cache",
            "HF_DATASETS_CACHE": "hf",
        }
        paths = {name: str(self.place / folder) for name, folder in folders.items()}
        fixed = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": STAND_INS,
            "HOME": str(self.place),
        }
        checkout = Path("~/open-instruct").expanduser()
        if checkout.is_dir():
            fixed.setdefault(
                "LAUNCH_OPEN_INSTRUCT", os.environ.get("LAUNCH_OPEN_INSTRUCT", str(checkout))
            )
        return {**os.environ, **paths, **fixed, **self.variables}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "launcher", *words, "--format", "json"]

    def start(self) -> None:
        """Start every rank, the first one first: the others train in its run folder."""
        path = self.place / f"{self.name}.yaml"
        path.write_text(STAGES[self.kind].format(output=self.output), encoding="utf-8")
        stage = "dpo" if self.kind == "dpo" else "sft"
        words = [stage, str(path), *self.words, "--gpus", "0"]
        self.started = []
        port = free_ports(1)[0]
        begun = self.attempts()
        for rank in range(self.ranks):
            more: list[str] = []
            if self.ranks > 1:
                address = f"127.0.0.1:{port}"
                more = [
                    "--nodes",
                    str(self.ranks),
                    "--node-rank",
                    str(rank),
                    "--main-address",
                    address,
                ]
            process = subprocess.Popen(
                self.command(*words, *more), cwd=self.place, env=self.environment(), text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self.started.append(process)
            self.until(lambda: self.attempts() > begun)

    def end(self) -> list[int]:
        """The exit codes of the ranks' supervisors, once all have ended."""
        self.said = [process.communicate(timeout=PATIENCE_S)[0] for process in self.started]
        return [process.returncode for process in self.started]

    def finish(self) -> list[int]:
        self.start()
        return self.end()

    def launch(self, *words: str) -> dict[str, Any]:
        done = subprocess.run(
            self.command(*words), cwd=self.place, env=self.environment(), capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.stdout, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            over = [process for process in self.started if process.poll() is not None]
            assert not over, over[0].communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def events(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank's record tells of the attempt that began last."""
        path = None if self.run is None else self.run / "probe" / f"rank-{rank}.jsonl"
        if path is None or not path.exists():
            return []
        last = path.read_bytes().rpartition(b'"event": "start"')[2]
        lines = [rundir.parse_line(line) for line in last.split(b"\n")]
        return [line for line in lines if line.get("event") == name]

    def slowed(self, method: str, seconds: float = 2) -> None:
        """Have a method, given as module:class:method, take its time."""
        folder = self.place / "slow" / self.name
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(SLOW)
        self.variables["SLOW"] = f"{method}:{folder / 'began'}:{seconds}"
        self.variables["PYTHONPATH"] = f"{folder}{os.pathsep}{STAND_INS}"

    def until_slow(self) -> None:
        self.until((self.place / "slow" / self.name / "began").exists)

    def notify(self, number: int = signal.SIGTERM, rank: int = 0) -> None:
        self.started[rank].send_signal(number)

    def losses(self) -> dict[int, float]:
        rows = [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]
        return {row["step"]: row["loss"] for row in rows}

    def weights(self) -> bytes:
        return (self.output / "model.safetensors").read_bytes()

    def state(self) -> str:
        rows = self.launch("runs")["data"]
        return next(str(row["state"]) for row in rows if row["path"] == str(self.folder))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, demo_assets: Path) -> Path:
    folder = tmp_path_factory.mktemp("preemption")
    shutil.copytree(demo_assets, folder / "build" / "demo")
    for kind in ("sft", "dpo"):
        rows = folder / "build" / "demo" / "data" / kind / "train.jsonl"
        rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:ROWS]))
    return folder


Alone = Callable[[str, int], Training]


@pytest.fixture(scope="module")
def alone(place: Path) -> Alone:
    """A run of a kind that nobody disturbs, trained once."""
    trained: dict[tuple[str, int], Training] = {}

    def train(kind: str, ranks: int) -> Training:
        if (kind, ranks) not in trained:
            run = Training(place, kind, f"{kind}-{ranks}-alone", ranks)
            codes = run.finish()
            assert codes == [0] * ranks, run.said
            trained[kind, ranks] = run
        return trained[kind, ranks]

    return train


@pytest.fixture
def training(place: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Training]]:
    begun: list[Training] = []

    def make(kind: str, ranks: int = 1, *words: str, **variables: str) -> Training:
        name = f"{kind}-{ranks}-{len(list(place.glob('*.yaml')))}"
        begun.append(Training(place, kind, name, ranks, words, variables))
        return begun[-1]

    yield make
    for run in begun:
        for process in run.started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if run.run is not None:
            # of a test that failed
            for folder in RunFolder(run.run).nodes():
                runner.kill_supervisor(folder)
                process_tree = processes.ProcessTree(None, str(folder.path))
                processes.signal_all(process_tree.living(), signal.SIGKILL)


def after_steps(count: int) -> Moment:
    return lambda run: run.until(lambda: len(run.events("step")) >= count)


def before_the_first_step(run: Training) -> None:
    run.until(lambda: run.run is not None and (run.run / "probe" / "listens.json").exists())


def twice(run: Training) -> None:
    after_steps(3)(run)
    run.notify()
    time.sleep(0.1)


def preempted(run: Training, moment: Moment, number: int = signal.SIGTERM, rank: int = 0) -> int:
    """Start, send the notice at a moment, and return the step that was saved."""
    if not run.variables:
        # so that the last step is not over before the notice is heard
        run.slowed("accelerate.optimizer:AcceleratedOptimizer:step", 0.3)
    run.start()
    moment(run)
    run.notify(number, rank)
    codes = run.end()
    assert codes[0] == 130, run.said
    assert run.state() == "preempted"
    saved = [run.events("preempted", rank)[0] for rank in range(run.ranks)]
    assert len({event["step"] for event in saved}) == 1
    step = int(saved[0]["step"])
    assert 0 < step < STEPS
    return step


def require_same(run: Training, other: Training) -> None:
    """The command again ends the run as if it had never been disturbed."""
    run.variables.clear()
    codes = run.finish()
    assert codes == [0] * run.ranks, run.said
    assert run.events("resumed")
    assert sorted(run.losses()) == list(range(1, STEPS + 1))
    assert run.losses() == pytest.approx(other.losses(), abs=1e-6)
    assert run.weights() == other.weights()


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        pytest.param("trl", after_steps(4), id="trl"),
        pytest.param("sft", after_steps(4), id="sft", marks=needs_open_instruct),
        pytest.param("dpo", after_steps(4), id="dpo", marks=needs_open_instruct),
        pytest.param("trl", before_the_first_step, id="trl before the first step"),
        pytest.param(
            "sft", before_the_first_step, id="sft before the first step", marks=needs_open_instruct
        ),
        pytest.param("trl", twice, id="trl twice"),
    ],
)
def test_a_notice_saves_at_a_step_and_the_same_command_continues_there(
    training: Callable[..., Training], alone: Alone, kind: str, moment: Moment
) -> None:
    run = training(kind)
    step = preempted(run, moment)
    verdict = json.loads((run.folder / "verdict.json").read_text())
    finish = next(point for point in verdict["points"] if point["name"] == "finish")
    assert finish["state"] == "preempted"
    assert Path(finish["detail"]["checkpoint"]).name.endswith(str(step))
    require_same(run, alone(kind, 1))
    assert run.events("resumed")[0]["step"] == step


@pytest.mark.parametrize(
    ("kind", "method", "words"),
    [
        pytest.param(
            "trl",
            "transformers.trainer:Trainer:_save_optimizer_and_scheduler",
            ("save_strategy=steps", "save_steps=3"),
            id="save of TRL",
        ),
        pytest.param(
            "sft",
            "accelerate.accelerator:Accelerator:save_state",
            ("checkpointing_steps=3",),
            id="save of open-instruct",
            marks=needs_open_instruct,
        ),
        pytest.param(
            "trl",
            "transformers.trainer:Trainer:evaluation_loop",
            ("eval_strategy=steps", "eval_steps=3", "dataset_test_split=train"),
            id="evaluation",
        ),
    ],
)
def test_a_notice_that_comes_while_something_else_is_done_saves_the_step_after(
    training: Callable[..., Training], alone: Alone, kind: str, method: str, words: tuple[str, ...]
) -> None:
    run = training(kind, 1, *words)
    run.slowed(method)
    assert preempted(run, Training.until_slow) == 4
    require_same(run, alone(kind, 1))


@pytest.mark.parametrize(
    ("kind", "number", "rank"),
    [
        ("trl", signal.SIGTERM, 0),
        ("trl", signal.SIGUSR1, 1),
        pytest.param("sft", signal.SIGTERM, 0, marks=needs_open_instruct),
        pytest.param("dpo", signal.SIGUSR1, 1, marks=needs_open_instruct),
    ],
)
def test_two_ranks_save_the_same_step_whichever_of_them_is_told(
    training: Callable[..., Training], alone: Alone, kind: str, number: int, rank: int
) -> None:
    run = training(kind, 2)
    preempted(run, after_steps(4), number, rank)
    require_same(run, alone(kind, 2))
