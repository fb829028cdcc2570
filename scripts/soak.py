"""Interrupt training at random moments, repeat the command, compare with an undisturbed run.

usage: python scripts/soak.py [trl|sft|dpo ...] [--kills N] [--seed S] [--work DIR]
                              [--out FILE.json]

Each kind is trained once undisturbed. Then it is trained again, and interrupted at a random step or
moment: in turn, every process of the run is killed (SIGKILL) or the run is asked to save and end
(TERM or USR1). A run that ends before that is compared, and the next one begins, until there were
N interruptions. Every run must end with exit code 0, hold each optimizer step once in
metrics.jsonl, and have the losses and final weights of the undisturbed run; the same command once
more must answer that the run is finished. Exit code 1 otherwise.

`trl` is TRL's SFT, `sft` and `dpo` are the pinned open-instruct; all on the CPU with a tiny model.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher import files
from launcher.machine import process
from launcher.report import overview
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder
from launcher.upstream import open_instruct
from launcher.verdict import evidence

PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "deepspeed")
ROOT = Path(__file__).resolve().parent.parent
NOISE = 1e-4
"""How far losses may be apart: they are printed and kept with about that many digits."""
LONGEST_S = 240.0
NOTICES = (signal.SIGTERM, signal.SIGUSR1)
STEPS = 30
MOST_FAILURES = 8

COMMON = """
deepspeed: none
batch: {{global: 4, per_device: 2}}
expect: {{loss: finite, liger: off, data: any}}  # short rows train fast, and are cut
args:
  model_name_or_path: {assets}/model
  output_dir: {output}
  logging_steps: 1
"""
PINNED = """
  chat_template_name: tulu
  max_seq_length: 64
  do_not_randomize_output_dir: true
  warmup_ratio: 0.1
  checkpointing_steps: 3
  push_to_hub: false
  try_launch_beaker_eval_jobs: false
"""
TRL = """
  dataset_name: {data}
  max_length: 64
  num_train_epochs: 2
  learning_rate: 5.0e-3
  lr_scheduler_type: cosine
  warmup_steps: 2
  bf16: false
  gradient_checkpointing: false
  save_strategy: steps
  save_steps: 3
  save_total_limit: 3
"""
SFT = """
  dataset_mixer_list: [{data}/train.jsonl, "1.0"]
  num_train_epochs: 2
  learning_rate: 5.0e-3
"""
DPO = """
  mixer_list: [{data}/train.jsonl, "1.0"]
  num_epochs: 1
  learning_rate: 5.0e-4
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A training: its stage, its stage file below that, the rows that it reads, its title."""

    stage: str
    config: str
    rows: int
    title: str


_COMMIT = f"open-instruct {open_instruct.PIN[:12]}"
KINDS = {
    "trl": Kind(stage="sft", config=f"backend: trl{COMMON}{TRL}", rows=60, title="TRL, SFT"),
    "sft": Kind(
        stage="sft",
        config=f"backend: open_instruct{COMMON}{PINNED}{SFT}",
        rows=60,
        title=f"{_COMMIT}, SFT",
    ),
    "dpo": Kind(
        stage="dpo",
        config=f"backend: open_instruct{COMMON}{PINNED}{DPO}",
        rows=120,
        title=f"{_COMMIT}, DPO",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The last step that was recorded before it, and the seconds since the start."""

    at_step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command answered: its exit code and its JSON."""

    code: int
    content: dict[str, Any]

    @property
    def already_finished(self) -> bool:
        for finding in self.content.get("findings") or []:
            if finding.get("code") == "already-finished":
                return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The undisturbed run: its loss at each step, its model."""

    losses: Mapping[int, float | None]
    output: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """An interrupted run, as the JSON lists it."""

    run: str
    kills: Sequence[Interruption]
    attempts: int
    resumed: Sequence[int]
    faults: Sequence[str]
    finished_before_the_last_command: bool
    largest_loss_difference: float
    final_loss: float | None
    largest_weight_difference: float


@dataclass(slots=True)
class KindResult:
    """What was done with a kind of training so far, as the JSON lists it."""

    kind: str
    ok: bool = True
    kills: int = 0
    steps: int = STEPS
    preemptions: int = 0
    final_loss_undisturbed: float | None = None
    resumes: int = 0
    runs: list[RunResult] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Soak:
    """The runs of one kind of training in the folder `work`."""

    name: str
    work: Path
    luck: random.Random
    result: KindResult

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def write_stage_file(self, run: str) -> Path:
        path = self.work / f"{run}.yaml"
        text = f"stage: {self.kind.stage}\n{self.kind.config}".format(
            assets=self.work / "assets",
            data=self.work / f"data-{self.name}",
            output=self.work / "out" / run,
        )
        path.write_text(text, encoding="utf-8")
        return path

    def write_data(self) -> None:
        """The first rows of the demo's data, in a folder of their own: TRL takes a folder."""
        source = self.work / "assets" / "data" / self.kind.stage / "train.jsonl"
        target = self.work / f"data-{self.name}" / "train.jsonl"
        target.parent.mkdir(exist_ok=True)
        lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
        target.write_text("".join(lines[: self.kind.rows]), encoding="utf-8")

    def start(self, config: Path) -> subprocess.Popen[str]:
        """Start launch without a network, on one thread, with state and caches below `work`."""
        environment = {
            **os.environ,
            "LAUNCH_RUNS": str(self.work / "runs"),
            "XDG_STATE_HOME": str(self.work / "state"),
            "XDG_CACHE_HOME": str(self.work / "cache"),
            "HF_DATASETS_CACHE": str(self.work / "hf"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        words = [self.kind.stage, str(config), "--gpus", "0", "--format", "json"]
        return subprocess.Popen(
            [sys.executable, "-m", "launcher", *words],
            cwd=self.work,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def finish(self, config: Path) -> Answer:
        """Run the command to its end."""
        launcher = self.start(config)
        out, err = launcher.communicate(timeout=LONGEST_S)
        try:
            content = json.loads(out)
        except ValueError:
            content = {"error": (out + err)[-2000:]}
        return Answer(code=launcher.returncode, content=content)

    def fail(self, text: str) -> None:
        self.result.failures.append(text)
        self.result.ok = False
        print(f"  FAULT: {text}", flush=True)

    def list_runs(self) -> set[str]:
        root = self.work / "runs"
        root.mkdir(exist_ok=True)
        return {path.name for path in root.iterdir()}

    def newest_run(self, earlier: set[str]) -> Path | None:
        """The newest run folder that is not one of the earlier ones."""
        name = max(self.list_runs() - earlier, default=None)
        if name is None:
            return None
        return self.work / "runs" / name

    def interrupt(
        self, config: Path, earlier: set[str], notice: signal.Signals | None
    ) -> Interruption | None:
        """Start the run and interrupt it at a random moment; None if it ended before."""
        launcher = self.start(config)
        began = time.time()
        run = self.wait_for_moment(launcher, earlier, began)
        if launcher.poll() is not None:
            launcher.communicate()
            return None
        if notice is None:
            kill_everything(launcher.pid, run)
            launcher.communicate()
        elif not self.notify(launcher, notice, run):
            return None
        step = max(read_steps(run, began), default=0)
        return Interruption(at_step=step, seconds=round(time.time() - began, 2))

    def wait_for_moment(
        self, launcher: subprocess.Popen[str], earlier: set[str], began: float
    ) -> Path | None:
        """Wait for a random step (4 of 5 times) or second; returns the run folder, if any."""
        wanted = None
        if self.luck.random() < 0.8:
            wanted = self.luck.randint(1, 9)
        jitter = self.luck.random() * 0.15
        moment = began + self.luck.uniform(0.5, 14.0)
        run = None
        while launcher.poll() is None and time.time() < began + LONGEST_S:
            run = run or self.newest_run(earlier)
            if wanted is None:
                is_due = time.time() > moment
            else:
                is_due = len(read_steps(run, began)) >= wanted
            if is_due:
                time.sleep(jitter)
                break
            time.sleep(0.004)
        return run or self.newest_run(earlier)

    def notify(
        self, launcher: subprocess.Popen[str], notice: signal.Signals, run: Path | None
    ) -> bool:
        """Ask the run to save and end; returns whether that interrupted it.

        If it should have saved a checkpoint and did not, that is a failure.
        """
        launcher.send_signal(notice)
        out, _ = launcher.communicate(timeout=LONGEST_S)
        if launcher.returncode == 0:
            # the notice came after the last step
            return False
        state = None
        if run is not None:
            state = overview.read_end_state(RunFolder(run))
        # before the first step, the training cannot save
        missed = bool(read_steps(run, 0.0)) and state != "preempted"
        if launcher.returncode != 130 or missed:
            self.fail(f"notice {notice}: exit code {launcher.returncode}, {state}: {out[-500:]}")
        if state == "preempted":
            self.result.preemptions += 1
        return True

    def soak_run(self, name: str, kills: int, baseline: Baseline) -> None:
        """Interrupt a run until it ends, `kills` times at most; then finish and compare it."""
        config = self.write_stage_file(name)
        earlier = self.list_runs()
        interruptions: list[Interruption] = []
        while len(interruptions) < kills:
            notice = None
            # kills and notices take turns
            if self.result.kills % 2:
                notice = self.luck.choice(NOTICES)
            interruption = self.interrupt(config, earlier, notice)
            if interruption is None:
                break
            interruptions.append(interruption)
            self.result.kills += 1
            cause = "kill" if notice is None else notice.name
            place = f"at step {interruption.at_step}"
            print(f"  {name}: {len(interruptions)}: {cause} {place}", flush=True)
        answer = self.finish(config)
        run = self.newest_run(earlier)
        if run is None:
            self.fail(f"{name}: no run folder: {answer.content}")
            return
        result = self.compare(name, run, config, answer, baseline, interruptions)
        self.result.runs.append(result)
        self.result.resumes += len(result.resumed)
        outcome = "; ".join(result.faults) or "as undisturbed"
        counts = f"{len(interruptions)} interruptions, {result.attempts} attempts"
        print(f"  {name}: {counts}: {outcome}", flush=True)

    def compare(
        self,
        name: str,
        run: Path,
        config: Path,
        answer: Answer,
        baseline: Baseline,
        interruptions: Sequence[Interruption],
    ) -> RunResult:
        """Compare a run that has ended with the undisturbed one."""
        faults: list[str] = []
        if answer.code != 0:
            faults.append(f"exit code {answer.code}: {json.dumps(answer.content)[:600]}")
        rows = files.read_lines(run / "metrics.jsonl")
        steps = [row["step"] for row in rows]
        if steps != list(range(1, STEPS + 1)):
            faults.append(f"metrics.jsonl holds the steps {steps}")
        losses = losses_by_step(rows)
        loss_difference = largest_difference(losses, baseline.losses)
        if not loss_difference <= NOISE:
            faults.append(f"a loss is {loss_difference} away")
        weight_difference = compare_weights(self.work / "out" / name, baseline.output)
        if weight_difference != 0.0:
            faults.append(f"the final weights are {weight_difference} away")
        again = self.finish(config)
        if again.code != 0 or not again.already_finished:
            content = json.dumps(again.content)[:300]
            faults.append(f"run again: exit code {again.code}, {content}")
        for fault in faults:
            self.fail(f"{name}: {fault}")
        return RunResult(
            run=name,
            kills=interruptions,
            attempts=RunFolder(run).attempts(),
            resumed=read_resumed_steps(run),
            faults=faults,
            finished_before_the_last_command=answer.already_finished,
            largest_loss_difference=loss_difference,
            final_loss=losses.get(STEPS),
            largest_weight_difference=weight_difference,
        )

    def soak(self, kills: int) -> None:
        """The undisturbed run, then interrupted ones until there were `kills` interruptions."""
        self.write_data()
        name = f"{self.name}-alone"
        config = self.write_stage_file(name)
        earlier = self.list_runs()
        began = time.monotonic()
        answer = self.finish(config)
        run = self.newest_run(earlier)
        if answer.code != 0 or run is None:
            content = json.dumps(answer.content)[:1500]
            self.fail(f"undisturbed: exit code {answer.code}: {content}")
            return
        losses = losses_by_step(files.read_lines(run / "metrics.jsonl"))
        self.result.final_loss_undisturbed = losses.get(STEPS)
        baseline = Baseline(losses=losses, output=self.work / "out" / name)
        print(f"{self.name}: undisturbed {time.monotonic() - began:.0f} s", flush=True)
        for number in range(1, 3 * kills + 1):
            rest = kills - self.result.kills
            if rest <= 0 or len(self.result.failures) >= MOST_FAILURES:
                break
            self.soak_run(f"{self.name}-{number}", rest, baseline)


def read_steps(run: Path | None, began: float) -> list[int]:
    """The steps that rank 0 of the newest attempt recorded; none in a file older than `began`."""
    if run is None:
        return []
    path = run / "probe" / "rank-0.jsonl"
    try:
        if path.stat().st_mtime < began:
            return []
        content = path.read_bytes()
    except OSError:
        return []
    attempt = content.rpartition(b'"event": "start"')[2]
    steps = []
    for line in attempt.split(b"\n"):
        if b'"event": "step"' in line:
            # a line may be half written
            event = rundir.parse_line(line)
            if "step" in event:
                steps.append(int(event["step"]))
    return steps


def kill_everything(launcher: int, run: Path | None) -> None:
    """SIGKILL to the launcher, to all that it started, and to all that has the run's mark."""
    tree = process.ProcessTree(process.identify(launcher), str(run or ""))
    process.signal_all({launcher, *tree.living()}, signal.SIGKILL)
    if run is None:
        return
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        rest = process.ProcessTree(None, str(run)).living() | find_supervisors(run)
        if not rest:
            return
        process.signal_all(rest, signal.SIGKILL)
        time.sleep(0.05)


def find_supervisors(run: Path) -> set[int]:
    """launch's own processes that supervise the run, detached from the command."""
    pids = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_launcher = any(word.startswith(b"launcher.") for word in words)
        if is_launcher and os.fsencode(run) in words:
            pids.add(int(entry.name))
    return pids


def losses_by_step(rows: Sequence[Mapping[str, Any]]) -> dict[int, float | None]:
    return {row["step"]: row.get("loss") for row in rows}


def largest_difference(
    losses: Mapping[int, float | None], others: Mapping[int, float | None]
) -> float:
    """Over the steps where both have a loss; NaN without one."""
    differences = []
    for step, loss in losses.items():
        other = others.get(step)
        if loss is not None and other is not None:
            differences.append(abs(loss - other))
    return max(differences, default=math.nan)


def read_resumed_steps(run: Path) -> list[int]:
    """The step that each attempt resumed from; 0 for a fresh start that reached the training."""
    steps = []
    for attempt in range(1, RunFolder(run).attempts() + 1):
        probe = evidence.read_run(run, attempt=attempt).probe
        if probe is None or 0 not in probe.ranks:
            continue
        event = probe.ranks[0].last("resumed")
        if event is not None:
            steps.append(int(event.number("step") or 0))
    return steps


def compare_weights(folder: Path, other: Path) -> float:
    """The largest difference of two weights, infinite if the models have different tensors."""
    weights = load_weights(folder)
    expected = load_weights(other)
    if not weights or weights.keys() != expected.keys():
        return math.inf
    differences = [(weights[name].float() - expected[name].float()).abs().max() for name in weights]
    return float(max(differences))


def load_weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    weights: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        weights.update(load_file(path))
    return weights


def render_page(result: Mapping[str, Any], kinds: Sequence[KindResult]) -> str:
    """The result as Markdown."""
    versions = [f"{name} {version}" for name, version in result["versions"].items()]
    lines = [
        "# Kill, preempt and resume test",
        "",
        "`make soak` trains a tiny model on the CPU. At random moments it kills every process of "
        "the run (SIGKILL) or, every second time, asks the run to save and end (TERM or USR1). "
        "Then it runs the same command again. The table compares the result with a run that was "
        "not interrupted.",
        "",
        f"{result['date']}, seed {result['seed']}, {result['system']}, "
        f"Python {result['python']}, {', '.join(versions)}.",
        "",
        "| training | interruptions | of them preemptions | resumes | runs "
        "| steps missing or twice | largest difference of a loss | of a final weight "
        "| final loss, alone | ok |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [render_row(kind) for kind in kinds]
    lines += [
        "",
        f"A loss may differ by {NOISE:g}, a weight not at all. Each run trains {STEPS} steps with "
        "a checkpoint every 3 steps; after a kill before the first checkpoint it starts over. DPO "
        "trains one epoch. With more, the script of open-instruct can only be resumed from the "
        "end of an epoch or inside the last one, and `launch` goes back to such a checkpoint.",
        "",
    ]
    return "\n".join(lines)


def render_row(result: KindResult) -> str:
    losses = [run.largest_loss_difference for run in result.runs]
    weights = [run.largest_weight_difference for run in result.runs]
    wrong_steps = 0
    for run in result.runs:
        for fault in run.faults:
            if "metrics.jsonl" in fault:
                wrong_steps += 1
    cells = [
        KINDS[result.kind].title,
        result.kills,
        result.preemptions,
        result.resumes,
        len(result.runs),
        wrong_steps,
        f"{max(losses, default=math.nan):g}",
        f"{max(weights, default=math.nan):g}",
        result.final_loss_undisturbed,
        "yes" if result.ok else "NO",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="trl, sft, dpo")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, help="a folder to keep; default: a temporary one")
    parser.add_argument("--out", type=Path, help="write the result there, and a page beside it")
    options = parser.parse_args()
    options.kinds = options.kinds or list(KINDS)
    if not set(options.kinds) <= KINDS.keys():
        parser.error(f"KIND is one of {', '.join(KINDS)}")
    return options


def main() -> int:
    options = parse_arguments()
    work = (options.work or Path(tempfile.mkdtemp(prefix="soak-"))).absolute()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "assets" / "model").is_dir():
        maker = [sys.executable, str(ROOT / "scripts" / "make_demo_assets.py")]
        subprocess.run([*maker, str(work / "assets")], check=True, stdout=sys.stderr)
    began = time.monotonic()
    kinds: list[KindResult] = []
    for name in options.kinds:
        seed = hashlib.sha256(f"{options.seed} {name}".encode()).hexdigest()
        kind = KindResult(name)
        Soak(name, work, random.Random(seed), kind).soak(options.kills)
        kinds.append(kind)
    ok = all(kind.ok for kind in kinds)
    seconds = round(time.monotonic() - began)
    result = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seed": options.seed,
        "kills": options.kills,
        "noise": NOISE,
        "seconds": seconds,
        "system": platform.system(),
        "python": platform.python_version(),
        "kinds": [asdict(kind) for kind in kinds],
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "ok": ok,
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        page = render_page(result, kinds)
        options.out.with_suffix(".md").write_text(page, encoding="utf-8")
    if options.work is None:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({"ok": ok, "seconds": seconds}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
