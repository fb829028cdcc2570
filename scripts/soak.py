"""Kill training at random moments, say the same command again, and compare with a run left alone.

usage: python scripts/soak.py [trl|sft|dpo ...] [--kills N] [--seed S] [--work DIR] [--out FILE.json]

Each kind is trained once undisturbed, and then again with every process of the run killed (SIGKILL, at a
random step or at a random moment), or told to save and end (TERM or USR1, every second time), until so many
interruptions were made; a run that gets to its end in between is
checked and the next one begun. Every run must end with exit code 0, hold each optimizer step once in
metrics.jsonl, and have the losses and the final weights of the undisturbed one. Said once more, it must say
that it is finished. Exit code 1 where any of that is not so.

`trl` is TRL's SFT, `sft` and `dpo` are the pinned open-instruct; all on the CPU with a tiny model.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

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
STAGE = {"trl": "sft", "sft": "sft", "dpo": "dpo"}

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
CONFIGS = {
    "trl": f"stage: sft\nbackend: trl{COMMON}{TRL}",
    "sft": f"stage: sft\nbackend: open_instruct{COMMON}{PINNED}{SFT}",
    "dpo": f"stage: dpo\nbackend: open_instruct{COMMON}{PINNED}{DPO}",
}
ROWS = {"trl": 60, "sft": 60, "dpo": 120}
STEPS = 30


@dataclass
class Soak:
    """One kind of training, where it happens, and what came of it."""

    kind: str
    work: Path
    luck: random.Random
    kills: int = 0
    preemptions: int = 0
    failures: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def stage_file(self, name: str) -> Path:
        """The stage file of one run."""
        data = self.work / f"data-{self.kind}"
        path = self.work / f"{name}.yaml"
        text = CONFIGS[self.kind].format(
            assets=self.work / "assets", data=data, output=self.work / "out" / name
        )  # fmt: skip
        path.write_text(text, encoding="utf-8")
        return path

    def environment(self) -> dict[str, str]:
        """No network, one thread, and folders of its own."""
        here = {
            "LAUNCH_RUNS": self.work / "runs", "XDG_STATE_HOME": self.work / "state",
            "XDG_CACHE_HOME": self.work / "cache", "HF_DATASETS_CACHE": self.work / "hf",
        }  # fmt: skip
        told = {name: str(path) for name, path in here.items()}
        return {**os.environ, **told, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def begin(self, config: Path) -> subprocess.Popen[str]:
        """The real command line, with its answer as JSON."""
        words = [STAGE[self.kind], str(config), "--gpus", "0", "--format", "json"]
        return subprocess.Popen(
            [sys.executable, "-m", "launcher", *words], cwd=self.work, text=True,
            env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def finish(self, config: Path) -> tuple[int, dict[str, Any]]:
        """Run to the end."""
        started = self.begin(config)
        out, err = started.communicate(timeout=LONGEST_S)
        try:
            answer = json.loads(out)
        except ValueError:
            answer = {"error": (out + err)[-2000:]}
        return started.returncode, answer

    def fault(self, text: str) -> None:
        """Something that must not be."""
        self.failures.append(text)
        print(f"  FAULT: {text}", flush=True)

    # -- killing

    def interrupted(self, config: Path, seen: set[str], notice: int | None) -> dict[str, Any] | None:
        """Start, and at a random moment kill everything, or send a notice; None where it was over before."""
        started, begun = self.begin(config), time.monotonic()
        wanted = self.luck.randint(1, 9) if self.luck.random() < 0.8 else None
        jitter, moment = self.luck.random() * 0.15, self.luck.uniform(0.5, 14.0)
        run = None
        while started.poll() is None and time.monotonic() - begun < LONGEST_S:
            run = run or self.newest(seen)
            own = len(_own_steps(run, begun)) if run is not None else 0
            late = time.monotonic() - begun > moment if wanted is None else own >= wanted
            if late:
                time.sleep(jitter)
                break
            time.sleep(0.004)
        if started.poll() is not None:
            started.communicate()
            return None
        run = run or self.newest(seen)
        if notice is None:
            _kill_everything(started.pid, run)
            started.communicate()
        elif not self.noticed(started, notice, run):
            return None
        steps = _own_steps(run, begun) if run is not None else []
        return {"at_step": max(steps, default=0), "seconds": round(time.monotonic() - begun, 2)}

    def noticed(self, started: "subprocess.Popen[str]", notice: int, run: Path | None) -> bool:
        """Send the notice; returns whether the run was interrupted by it, and notes a save that is not there."""
        started.send_signal(notice)
        said, _ = started.communicate(timeout=LONGEST_S)
        if started.returncode == 0:
            # it came behind the last step
            return False
        state = None if run is None else overview.read_end_state(RunFolder(run))
        # before the training is there to hear, nothing is saved
        heard = run is not None and _own_steps(run, 0.0)
        if started.returncode != 130 or (heard and state != "preempted"):
            self.fault(f"notice {notice}: exit code {started.returncode}, {state}: {said[-500:]}")
        self.preemptions += state == "preempted"
        return True

    def newest(self, seen: set[str]) -> Path | None:
        """The run folder that this run of the soak made."""
        root = self.work / "runs"
        found = sorted(p for p in root.iterdir() if p.name not in seen) if root.is_dir() else []
        return found[-1] if found else None

    def one_run(self, name: str, kills: int, base: dict[str, Any]) -> None:
        """A run that is killed until it ends, or until there were enough kills."""
        config = self.stage_file(name)
        root = self.work / "runs"
        seen = {p.name for p in root.iterdir()}
        made: list[dict[str, Any]] = []
        while len(made) < kills:
            # kills and notices take turns
            notice = self.luck.choice(NOTICES) if (self.kills + len(made)) % 2 else None
            one = self.interrupted(config, seen, notice)
            if one is None:
                break
            made.append(one)
            what = "kill" if notice is None else signal.Signals(notice).name
            print(f"  {name}: {len(made)}: {what} at step {one['at_step']}", flush=True)
        self.kills += len(made)
        code, answer = self.finish(config)
        run = self.newest(seen)
        if run is None:
            self.fault(f"{name}: no run folder: {answer}")
            return
        ended = self.compare(name, run, config, code, answer, base)
        self.runs.append({"run": name, "kills": made, **ended})
        ok = "as undisturbed" if not ended["faults"] else "; ".join(ended["faults"])
        print(f"  {name}: {len(made)} interruptions, {ended['attempts']} attempts: {ok}", flush=True)

    def compare(
        self, name: str, run: Path, config: Path, code: int, answer: dict[str, Any],
        base: dict[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        """Whether a run ended as the undisturbed one did."""
        faults: list[str] = []
        finished = _state(answer) == "finished"
        if code != 0:
            faults.append(f"exit code {code}: {json.dumps(answer)[:600]}")
        rows = _rows(run)
        steps = [row["step"] for row in rows]
        if steps != list(range(1, STEPS + 1)):
            faults.append(f"metrics.jsonl holds the steps {steps}")
        losses = {row["step"]: row.get("loss") for row in rows}
        apart = [
            abs(loss - base["losses"][step])
            for step, loss in losses.items()
            if loss is not None and base["losses"].get(step) is not None
        ]
        worst = max(apart, default=float("nan"))
        if not worst <= NOISE:
            faults.append(f"a loss is {worst} away")
        weights = _difference(self.work / "out" / name, base["output"])
        if weights != 0.0:
            faults.append(f"the final weights are {weights} away")
        again, told = self.finish(config)
        if again != 0 or _state(told) != "finished":
            faults.append(f"said again: exit code {again}, {json.dumps(told)[:300]}")
        for fault in faults:
            self.fault(f"{name}: {fault}")
        return {
            "attempts": RunFolder(run).attempts(), "resumed": _resumed(run), "faults": faults,
            "finished_before_the_last_command": finished, "largest_loss_difference": worst,
            "final_loss": losses.get(STEPS), "largest_weight_difference": weights,
        }  # fmt: skip

    def soak(self, kills: int) -> dict[str, Any]:
        """Everything for one kind."""
        _data(self.work, self.kind)
        config = self.stage_file(f"{self.kind}-alone")
        (self.work / "runs").mkdir(exist_ok=True)
        seen = {p.name for p in (self.work / "runs").iterdir()}
        begun = time.monotonic()
        code, answer = self.finish(config)
        run = self.newest(seen)
        if code != 0 or run is None:
            self.fault(f"undisturbed: exit code {code}: {json.dumps(answer)[:1500]}")
            return self.result(None)
        losses = {row["step"]: row.get("loss") for row in _rows(run)}
        base = {"losses": losses, "output": self.work / "out" / f"{self.kind}-alone"}
        print(f"{self.kind}: undisturbed {time.monotonic() - begun:.0f} s", flush=True)
        number = 0
        while self.kills < kills and number < 3 * kills and len(self.failures) < 8:
            number += 1
            self.one_run(f"{self.kind}-{number}", kills - self.kills, base)
        return self.result(losses.get(STEPS))

    def result(self, loss: float | None) -> dict[str, Any]:
        """For the JSON."""
        resumed = [one for run in self.runs for one in run["resumed"]]
        return {
            "kind": self.kind, "ok": not self.failures, "kills": self.kills, "steps": STEPS,
            "preemptions": self.preemptions,
            "final_loss_undisturbed": loss, "resumes": len(resumed), "runs": self.runs,
            "failures": self.failures,
        }  # fmt: skip


def _state(answer: dict[str, Any]) -> str | None:
    """`finished` where the command answered that there was nothing to do."""
    codes = {finding.get("code") for finding in answer.get("findings") or []}
    return "finished" if "already-finished" in codes else None


def _data(work: Path, kind: str) -> None:
    """The first rows of the demo's data; TRL takes a folder."""
    source = work / "assets" / "data" / ("dpo" if kind == "dpo" else "sft") / "train.jsonl"
    target = work / f"data-{kind}" / "train.jsonl"
    target.parent.mkdir(exist_ok=True)
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)[: ROWS[kind]]
    target.write_text("".join(lines), encoding="utf-8")


def _own_steps(run: Path, since: float) -> list[int]:
    """The steps that rank 0 of this attempt wrote down."""
    path = run / "probe" / "rank-0.jsonl"
    try:
        if time.time() - path.stat().st_mtime > time.monotonic() - since:
            return []
        last = path.read_bytes().rpartition(b'"event": "start"')[2]
    except OSError:
        return []
    events = [rundir.parse_line(line) for line in last.split(b"\n") if b'"event": "step"' in line]
    return [int(event["step"]) for event in events if "step" in event]


def _kill_everything(launcher: int, run: Path | None) -> None:
    """SIGKILL to the launcher, to whatever it started, and to whatever bears the run's mark."""
    family = {launcher, *process.ProcessTree(process.identify(launcher), str(run) if run is not None else "").living()}
    process.signal_all(family, signal.SIGKILL)
    until = time.monotonic() + 20
    while run is not None and time.monotonic() < until:
        left = set(process.ProcessTree(None, str(run)).living()) | _keepers(run)
        if not left:
            return
        process.signal_all(left, signal.SIGKILL)
        time.sleep(0.05)


def _keepers(run: Path) -> set[int]:
    """Processes of launch itself that watch over the run from a session of their own."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(run) in words and any(word.startswith(b"launcher.") for word in words):
            found.add(int(entry.name))
    return found


def _rows(run: Path) -> list[dict[str, Any]]:
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def _resumed(run: Path) -> list[int]:
    """The step that each attempt went on from, 0 for one that began anew and came to train."""
    steps = []
    for attempt in range(1, RunFolder(run).attempts() + 1):
        probe = evidence.read_run(run, attempt=attempt).probe
        record = probe.ranks.get(0) if probe is not None else None
        event = record.last("resumed") if record is not None else None
        if event is not None:
            steps.append(int(event.number("step") or 0))
    return steps


def _difference(folder: Path, other: Path) -> float:
    """The largest difference of two weights, infinite where the models have other tensors."""
    from safetensors.torch import load_file

    models = []
    for place in (folder, other):
        files = sorted(place.glob("*.safetensors"))
        models.append({name: t for file in files for name, t in load_file(file).items()})
    one, two = models
    if not one or one.keys() != two.keys():
        return float("inf")
    return max(float((one[name].float() - two[name].float()).abs().max()) for name in one)


def _page(told: dict[str, Any]) -> str:
    """The same for people."""
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    lines = [
        "# Kill, preempt and resume test", "",
        "`make soak` trains a tiny model on the CPU. At random moments it kills every process of the run (SIGKILL) "
        "or, every second time, asks the run to save and end (TERM or USR1). Then it runs the same command again. The "
        "table compares the result with a run that was not interrupted.", "",
        f"{told['date']}, seed {told['seed']}, {told['system']}, Python {told['python']}, {versions}.", "",
        "| training | interruptions | of them preemptions | resumes | runs | steps missing or twice | "
        "largest difference of a loss | of a final weight | final loss, alone | ok |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    commit = f"open-instruct {open_instruct.PIN[:12]}"
    names = {"trl": "TRL, SFT", "sft": f"{commit}, SFT", "dpo": f"{commit}, DPO"}
    for one in told["kinds"]:
        runs = one["runs"]
        losses = max((run["largest_loss_difference"] for run in runs), default=float("nan"))
        weights = max((run["largest_weight_difference"] for run in runs), default=float("nan"))
        steps = sum("metrics.jsonl" in fault for run in runs for fault in run["faults"])
        lines.append(
            f"| {names[one['kind']]} | {one['kills']} | {one['preemptions']} | {one['resumes']} | "
            f"{len(runs)} | {steps} | "
            f"{losses:g} | {weights:g} | {one['final_loss_undisturbed']} | {'yes' if one['ok'] else 'NO'} |"
        )
    lines += [
        "", f"A loss may differ by {told['noise']:g}, a weight not at all. Each run trains {STEPS} steps with a "
        "checkpoint every 3 steps; after a kill before the first checkpoint it starts over. DPO trains one epoch. "
        "With more, the script of open-instruct can only be resumed from the end of an epoch or inside the last "
        "one, and `launch` goes back to such a checkpoint.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="*", default=[], metavar="KIND", help="trl, sft, dpo")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, help="a folder to keep; a temporary one otherwise")
    parser.add_argument("--out", type=Path, help="where to write the result, a page beside it")
    asked = parser.parse_args()
    kinds = asked.kinds or list(CONFIGS)
    if set(kinds) - set(CONFIGS):
        parser.error(f"one of {', '.join(CONFIGS)}")
    work = (asked.work or Path(tempfile.mkdtemp(prefix="soak-"))).absolute()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "assets" / "model").is_dir():
        maker = ROOT / "scripts" / "make_demo_assets.py"
        subprocess.run([sys.executable, str(maker), str(work / "assets")], check=True, stdout=sys.stderr)
    begun = time.monotonic()
    seeds = {kind: hashlib.sha256(f"{asked.seed} {kind}".encode()).hexdigest() for kind in kinds}
    results = [Soak(kind, work, random.Random(seeds[kind])).soak(asked.kills) for kind in kinds]
    told = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "seed": asked.seed, "kills": asked.kills,
        "noise": NOISE, "seconds": round(time.monotonic() - begun), "system": platform.system(),
        "python": platform.python_version(), "kinds": results,
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "ok": all(one["ok"] for one in results),
    }  # fmt: skip
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        asked.out.with_suffix(".md").write_text(_page(told), encoding="utf-8")
    if asked.work is None:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({k: told[k] for k in ("ok", "seconds")}))
    return 0 if told["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
