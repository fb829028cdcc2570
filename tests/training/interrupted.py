"""Real trainings that are disturbed, with a supervisor for each rank as on several machines."""

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
from recorded_events import read_lines
from slurm_cluster import free_ports

from launcher.machine import process as processes
from launcher.runs import rundir, runner
from launcher.runs.rundir import RunFolder

STEPS = 14
ROWS = 60
INTERRUPTED = 130

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
SLOW_METHOD = """\
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
"""A sitecustomize that delays one method of a trainer, and leaves a file when the method begins."""


@dataclass
class Training:
    """One run, with a supervisor for each rank."""

    place: Path
    kind: str
    name: str
    ranks: int = 1
    words: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    started: list["subprocess.Popen[str]"] = field(default_factory=list)
    output_text: list[str] = field(default_factory=list)

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
        checkout = Path("~/open-instruct").expanduser()
        return {
            "LAUNCH_OPEN_INSTRUCT": str(checkout),
            **os.environ,
            "LAUNCH_RUNS": str(self.place / "runs"),
            "XDG_STATE_HOME": str(self.place / "state"),
            "XDG_CACHE_HOME": str(self.place / "cache"),
            "HF_DATASETS_CACHE": str(self.place / "hf"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": STAND_INS,
            "HOME": str(self.place),
            **self.variables,
        }

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "launcher", *words, "--format", "json"]

    def start(self) -> None:
        """Start every rank, the first one first: the others train in its run folder."""
        path = self.place / f"{self.name}.yaml"
        path.write_text(STAGES[self.kind].format(output=self.output), encoding="utf-8")
        stage = "dpo" if self.kind == "dpo" else "sft"
        words = [stage, str(path), *self.words, "--gpus", "0"]
        if self.ranks > 1:
            (port,) = free_ports(1)
            words += ["--nodes", str(self.ranks), "--main-address", f"127.0.0.1:{port}"]
        self.started = []
        earlier_attempts = self.attempts()
        for rank in range(self.ranks):
            node = []
            if self.ranks > 1:
                node = ["--node-rank", str(rank)]
            process = subprocess.Popen(
                self.command(*words, *node), cwd=self.place, env=self.environment(), text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self.started.append(process)
            self.wait_until(lambda: self.attempts() > earlier_attempts)

    def end(self) -> list[int]:
        """The exit codes of the ranks' supervisors, once all have ended."""
        self.output_text = [process.communicate(timeout=PATIENCE_S)[0] for process in self.started]
        return [process.returncode for process in self.started]

    def finish(self) -> list[int]:
        self.start()
        return self.end()

    def launch(self, *words: str) -> Any:
        done = subprocess.run(
            self.command(*words), cwd=self.place, env=self.environment(), capture_output=True,
            text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            for process in self.started:
                assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def wait_for_steps(self, count: int) -> None:
        self.wait_until(lambda: len(self.events("step")) >= count)

    def events(self, name: str, rank: int = 0) -> list[Any]:
        """The events of a rank in the attempt that began last."""
        if self.run is None:
            return []
        path = self.run / "probe" / f"rank-{rank}.jsonl"
        if not path.exists():
            return []
        last = path.read_bytes().rpartition(b'"event": "start"')[2]
        lines = [rundir.parse_line(line) for line in last.split(b"\n")]
        return [line for line in lines if line.get("event") == name]

    def delay(self, method: str, seconds: float = 2) -> None:
        """Make a method, given as module:class:method, take longer."""
        folder = self.place / "slow" / self.name
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(SLOW_METHOD)
        self.variables["SLOW"] = f"{method}:{folder / 'began'}:{seconds}"
        self.variables["PYTHONPATH"] = f"{folder}{os.pathsep}{STAND_INS}"

    def wait_for_delay(self) -> None:
        self.wait_until((self.place / "slow" / self.name / "began").exists)

    def notify(self, number: int = signal.SIGTERM, rank: int = 0) -> None:
        self.started[rank].send_signal(number)

    def losses(self) -> dict[int, float]:
        losses = {}
        for row in read_lines(self.folder / "metrics.jsonl"):
            losses[row["step"]] = row["loss"]
        return losses

    def weights(self) -> bytes:
        return (self.output / "model.safetensors").read_bytes()

    def listed(self) -> Any:
        """The row of `launch runs` about this run."""
        rows = self.launch("runs")["data"]
        return next(row for row in rows if row["path"] == str(self.folder))

    def kill(self) -> None:
        """End whatever a test that failed has left."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if self.run is None:
            return
        for folder in RunFolder(self.run).nodes():
            runner.kill_supervisor(folder)
            process_tree = processes.ProcessTree(None, str(folder.path))
            processes.signal_all(process_tree.living(), signal.SIGKILL)


Begin = Callable[..., Training]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, demo_assets: Path) -> Path:
    """A folder to train in, with few rows of the demo's data."""
    folder = tmp_path_factory.mktemp("interrupted")
    shutil.copytree(demo_assets, folder / "build" / "demo")
    for kind in ("sft", "dpo"):
        data = folder / "build" / "demo" / "data" / kind / "train.jsonl"
        rows = data.read_text().splitlines(keepends=True)
        data.write_text("".join(rows[:ROWS]))
    return folder


@pytest.fixture
def training(place: Path) -> Iterator[Begin]:
    """Prepare a training: its kind, its ranks, more words of the command line."""
    trainings: list[Training] = []

    def prepare(kind: str, ranks: int = 1, *words: str) -> Training:
        name = f"{kind}-{ranks}-{len(list(place.glob('*.yaml')))}"
        trainings.append(Training(place, kind, name, ranks, words))
        return trainings[-1]

    yield prepare
    for run in trainings:
        run.kill()
