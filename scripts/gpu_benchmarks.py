"""Run the cases of docs/benchmarks.md on this machine; merge what they measure into docs/benchmarks.json.

usage: python scripts/gpu_benchmarks.py [--list] [--only CASE,...] [--minutes M] [--repeats N]
                                        [--side-by-side] [--cpu] [--assets DIR] [--results FILE.json]

Models and data are made first, where they are missing (make_bench_assets.py). A case is one command,
started from the repository's root. A row of the results is known by its case, which names the GPUs, and
its setting: what is measured again is replaced, all else stays, and the table of the page beside the
results is written anew. `--minutes` takes cases in their order as long as one is expected to fit, and
ends what still runs when the time is up: what it has measured counts. `--cpu` tries the mechanics on tiny
shapes, into a file among the assets. Exit code 1 where a case measured nothing, 130 where interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import attempt, devices, evidence, machine, measures, rundir, upstream, variants
from launcher.comparison import SPEED, Spread
from launcher.rundir import RunFolder

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks.json"
MAKER = ROOT / "scripts" / "make_bench_assets.py"
MARKS = ("<!-- every row, by scripts/gpu_benchmarks.py -->\n", "<!-- end of the rows -->\n")
SNAPSHOT = f"{{assets}}/hub/models--Qwen--Qwen3-0.6B/snapshots/{0:040x}"
# a search names its trials by what they set; variants below are named alike
FOUND = re.compile(r"(packing|padded)_\d+\w*")

Row = dict[str, Any]
Environ = Mapping[str, str]
Lines = list[tuple[float, float]]
"""Of each step the time of its line in a log, in seconds, and its loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command, and the rows that come of it.

    `case` is that of the rows, without the GPUs; `minutes` are expected on H200. `launch bench` gives a
    row for each variant; a search gives `first`, its first trial, `tuned`, the best, and others by what they
    set. `beside` is the setting of what runs without launch: the same run once more, or all there is.
    `flash`: whether flash-attn has to be installed, or must not be. `needs`: a package, or a file that an
    earlier case makes. `cpu`: words that make it small; without them it is none for a CPU.
    """

    name: str
    case: str
    command: str
    minutes: float
    gpus: int = 2
    first: str = ""
    beside: str = ""
    flash: bool | None = None
    needs: str = ""
    cpu: str = ""

    def settings(self) -> set[str]:
        """The settings of its rows, but for those that a search names itself."""
        words, told = shlex.split(self.command), {self.beside} - {""}
        if words[:2] == ["launch", "tune"]:
            return {self.first, "tuned"}
        if words[:2] == ["launch", "bench"]:
            given = list(itertools.pairwise(words))
            axes = [[b for a, b in given if a == option] for option in ("--vary", "--variant")]
            told |= {slug(one.name) for one in variants.combinations(*axes)}
        return told

    def makes(self, row: Row) -> bool:
        """Whether a row of the results is one of this case's, on whatever GPUs."""
        where = re.fullmatch(rf"{re.escape(self.case)}-({self.gpus}x\w+|cpu)", row["case"])
        found = self.first and FOUND.fullmatch(row["setting"])
        return bool(where and (row["setting"] in self.settings() or found))


def slug(name: str) -> str:
    """A name as a setting: `batch_2_packing_true`."""
    return re.sub(r"[^\w.]+", "_", name.lower()).strip("_")


def _sweep(gpus: int, *, packing: bool, compiled: bool) -> Case:
    """dpo.py with 2 to 32 pairs a row."""
    kind = f"{'packed' if packing else 'padded'}{'_compiled' if compiled else ''}"
    sizes = (f"{kind}_{n}:batch.per_device={n},batch.global={n * gpus}" for n in (2, 8, 16, 32))
    return Case(
        name=f"dpo-olmo-core-{gpus}-{kind}", case="dpo-qwen3-0.6b", minutes=6, gpus=gpus, needs="vllm",
        command=f"launch bench configs/olmo_core/dpo_qwen3_0_6b.yaml --gpus {gpus} 'mixer_list={_PAIRS}' "
        f"model_name_or_path={SNAPSHOT} config_name=qwen3_0_6B packing={str(packing).lower()} "
        f"expect.packing={'on' if packing else 'off'} compile_model={str(compiled).lower()} "
        f"{' '.join(f'--variant {size}' for size in sizes)} --steps 12 --repeats 1",
    )  # fmt: skip


_CHATS, _PAIRS = "[{assets}/sft/train.jsonl,1.0]", "[{assets}/dpo/train.jsonl,1.0]"
_SFT = f"configs/bench/hand_recipe.yaml --gpus 2 'dataset_mixer_list={_CHATS}'"
_DPO = f"configs/bench/hand_recipe_dpo.yaml --gpus 2 'mixer_list={_PAIRS}'"
_SMALL = f"{_SFT.replace('--gpus 2', '--gpus 1')} model_name_or_path=Qwen/Qwen2.5-0.5B"
_PACKED = "packing=true,expect.packing=isolated"
_SFT_WITHOUT = f"no_checkpointing:{_PACKED},gradient_checkpointing=false"
_DPO_WITHOUT = f"no_checkpointing:{_PACKED},activation_memory_budget=1.0,batch.per_device=8"
_ON_CPU = (
    "--cpu --gpus 0 deepspeed=none use_liger_kernel=false expect.liger=off gradient_checkpointing=false "
    "batch.global=8 batch.per_device=4"
)
CASES = (
    Case(
        name="sft-7b-hand", case="sft-7b", minutes=4, flash=False,
        command=f"launch bench {_SFT} --variant hand_recipe: --steps 5 --repeats 3",
    ),
    Case(
        name="sft-7b-tune", case="sft-7b", minutes=7, flash=True, first="hand_recipe_flash_attn",
        command=f"launch tune {_SFT} --steps 6 --budget 6m -o {{assets}}/tuned_sft.yaml",
    ),
    Case(
        name="sft-7b-tuned", case="sft-7b", minutes=4, flash=True, needs="{assets}/tuned_sft.yaml",
        command="launch bench {assets}/tuned_sft.yaml --gpus 2 --variant tuned: --steps 8 --repeats 3",
    ),
    Case(
        name="sft-7b-profile", case="sft-7b", minutes=2, flash=True, needs="{assets}/tuned_sft.yaml",
        command="launch bench {assets}/tuned_sft.yaml --gpus 2 probe.profile=4 --variant tuned_profile: "
        "--steps 8 --repeats 1",
    ),
    Case(
        name="sft-7b-zero", case="sft-7b", minutes=10, flash=True,
        command=f"launch bench {_SFT} "
        f"--variant packing_16_zero2_{_SFT_WITHOUT},batch.per_device=16,deepspeed=zero2 "
        f"--variant packing_32_zero3_{_SFT_WITHOUT},batch.per_device=32,deepspeed=zero3 "
        f"--variant packing_32_zero1_{_SFT_WITHOUT},batch.per_device=32,deepspeed=zero1 "
        f"--variant packing_32_zero1_fp32_comm_{_SFT_WITHOUT},batch.per_device=32,deepspeed=zero1_fp32_comm "
        "--steps 7 --repeats 2",
    ),
    Case(
        name="sft-7b-by-hand", case="sft-7b", minutes=6, flash=True, beside="open_instruct_by_hand",
        command=f"launch bench {_SFT} --variant hand_recipe_flash_attn: --steps 6 --repeats 2",
    ),
    Case(
        name="sft-7b-trl", case="sft-7b", minutes=6, flash=True, beside="trl_by_hand",
        command="launch bench configs/bench/hand_recipe_trl.yaml --gpus 2 dataset_name={assets}/sft "
        "--variant trl: --steps 6 --repeats 2",
        cpu=f"{_ON_CPU} bf16=false dtype=float32 --steps 4 --repeats 1",
    ),
    Case(
        name="sft-7b-axolotl", case="sft-7b", minutes=5, flash=True, needs="axolotl", beside="axolotl",
        command="axolotl train {assets}/axolotl.yaml --launcher accelerate -- --num_processes=2",
    ),
    Case(
        name="sft-7b-tulu", case="sft-7b", minutes=4, flash=True,
        command=f"launch bench configs/tulu/sft_qwen7b.yaml --gpus 2 'dataset_mixer_list={_CHATS}' "
        "--variant tulu: --steps 6 --repeats 2",
    ),
    Case(
        name="dpo-7b-hand", case="dpo-7b", minutes=7, flash=False,
        command=f"launch bench {_DPO} --variant hand_recipe: --steps 4 --repeats 3",
    ),
    Case(
        name="dpo-7b-tune", case="dpo-7b", minutes=7, flash=True, first="hand_recipe_flash_attn",
        command=f"launch tune {_DPO} --steps 4 --budget 6m -o {{assets}}/tuned_dpo.yaml",
    ),
    Case(
        name="dpo-7b-tuned", case="dpo-7b", minutes=6, flash=True, needs="{assets}/tuned_dpo.yaml",
        command="launch bench {assets}/tuned_dpo.yaml --gpus 2 --variant tuned: --steps 6 --repeats 3",
    ),
    Case(
        name="dpo-7b-zero", case="dpo-7b", minutes=6, flash=True,
        command=f"launch bench {_DPO} --variant packing_8_zero2_{_DPO_WITHOUT},deepspeed=zero2 "
        f"--variant packing_8_zero1_{_DPO_WITHOUT},deepspeed=zero1 --steps 5 --repeats 2",
    ),
    Case(
        name="dpo-7b-tulu", case="dpo-7b", minutes=4, flash=True,
        command=f"launch bench configs/tulu/dpo_qwen7b.yaml --gpus 2 'mixer_list={_PAIRS}' "
        "model_name_or_path=Qwen/Qwen2.5-7B --variant tulu: --steps 4 --repeats 2",
    ),
    Case(
        name="sft-0.5b-hand", case="sft-0.5b", minutes=3, gpus=1, flash=False,
        command=f"launch bench {_SMALL} --variant hand_recipe: --steps 6 --repeats 3",
        cpu=f"{_ON_CPU} --steps 4 --repeats 1",
    ),
    Case(
        name="sft-0.5b-tune", case="sft-0.5b", minutes=4, gpus=1, flash=True,
        first="hand_recipe_flash_attn", cpu=f"{_ON_CPU} --steps 3 --budget 90s",
        command=f"launch tune {_SMALL} --steps 6 --budget 3m -o {{assets}}/tuned_sft_small.yaml",
    ),
    *(
        _sweep(gpus, packing=packing, compiled=compiled)
        for gpus in (1, 2) for packing in (False, True) for compiled in (False, True)
    ),
    Case(
        name="probe", case="probe", minutes=4, gpus=1, beside="steps_of_8192_tokens",
        command="python -m benchmarks.probe --device cuda --hidden 2048 --layers 24 --tokens 8192 "
        "--vocab 32000",
        cpu="--device cpu --hidden 64 --layers 2 --tokens 128 --vocab 1000 --blocks 4",
    ),
)  # fmt: skip


# --- where it runs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """This machine: `gpus` as CUDA_VISIBLE_DEVICES spells them, the name of one, the trainer's Python.

    `repeats`, where given, in place of the cases' own.
    """

    assets: Path
    cpu: bool
    gpus: tuple[str, ...]
    card: str
    python: Path
    repeats: int | None = None

    def environ(self, case: Case, gpus: Sequence[str]) -> dict[str, str]:
        """Of whatever a case starts: its GPUs, and the made models in place of the hub."""
        hub = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(self.assets / "hub")}
        told = {**os.environ, **hub}
        if not self.cpu:
            told |= {devices.VARIABLE: ",".join(gpus), devices.ORDER[0]: devices.ORDER[1]}
        if case.flash is False:
            listed = told.get("PYTHONPATH", "").split(os.pathsep)
            kept = (place for place in listed if not Path(place, "flash_attn").is_dir())
            told["PYTHONPATH"] = os.pathsep.join(kept)
        return told

    def name(self, case: Case) -> str:
        """The case of its rows: `sft-7b-2xh200`."""
        found = re.search(r"[A-Z]+\d+\w*", self.card)
        short = slug(found[0] if found else self.card)
        return f"{case.case}-cpu" if self.cpu else f"{case.case}-{case.gpus}x{short}"

    def words(self, case: Case) -> list[str]:
        """The command; on a CPU with what makes it small."""
        place = self.assets
        shown = place.relative_to(ROOT) if place.is_relative_to(ROOT) else place
        words = shlex.split(f"{case.command} {case.cpu if self.cpu else ''}".format(assets=shown))
        if self.repeats and "--repeats" in words:
            words[words.index("--repeats") + 1] = str(self.repeats)
        return words

    def lacks(self, case: Case) -> str:
        """Why a case cannot run here; empty where it can."""
        if self.cpu:
            return "" if case.cpu else "needs a GPU"
        if len(self.gpus) < case.gpus:
            return f"wants {case.gpus} GPUs, {len(self.gpus)} here"
        if case.flash is not None and case.flash is not self._has("flash_attn", case):
            told = "lacks flash-attn" if case.flash else "has flash-attn, this is without"
            return f"{self.python} {told}: LAUNCH_PYTHON names another"
        missing = case.needs and "/" not in case.needs and not self._has(case.needs, case)
        return f"{self.python} lacks {case.needs}" if missing else ""

    def _has(self, module: str, case: Case) -> bool:
        ask = "import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)"
        words, environ = [str(self.python), "-c", ask, module], self.environ(case, ())
        return subprocess.run(words, env=environ, capture_output=True).returncode == 0


def look(assets: Path, *, cpu: bool, repeats: int | None = None) -> Here:
    """Ask the driver and the trainer's Python; raises LaunchError where that one does not run."""
    seen = () if cpu else devices.look(os.environ).visible
    python = machine.find_trainer(None, upstream.locate("open_instruct").root).python
    card = seen[0].gpu.name if seen else "CPU"
    names = tuple(one.name for one in seen)
    return Here(assets=assets, cpu=cpu, gpus=names, card=card, python=python, repeats=repeats)


# --- one case -------------------------------------------------------------------------------------


class Failed(Exception):
    """Nothing was measured; says why."""


RUNNING: set[subprocess.Popen[bytes]] = set()
INTERRUPTED = threading.Event()
_LOGGED = re.compile(rb"Step: \d+, LR: .*?Loss: ([^\s,]+)|\{'loss': '?([^\s,']+)")
"""A step in the log of open-instruct, and of transformers' Trainer."""


@contextlib.contextmanager
def started(words: Sequence[str], environ: Environ, until: float, **more: Any) -> Iterator[Any]:
    """A command, interrupted when the time is up; after the block its session is gone. Raises Failed."""
    if INTERRUPTED.is_set():
        raise Failed("interrupted")
    try:
        process = subprocess.Popen(
            words, env=environ, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            start_new_session=True, **more,
        )  # fmt: skip
    except OSError as error:
        raise Failed(f"{words[0]}: {error.strerror}") from None
    left = min(1e6, max(0.0, until - time.monotonic()))
    timer = threading.Timer(left, signalled, [process, signal.SIGTERM])
    timer.daemon = True
    timer.start()
    RUNNING.add(process)
    try:
        yield process
    finally:
        timer.cancel()
        RUNNING.discard(process)
        # whatever comes next needs the GPUs
        for number, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
            end = time.monotonic() + patience
            signalled(process, number)
            while signalled(process, 0) and time.monotonic() < end:
                process.poll()
                time.sleep(0.1)
        process.wait()


def signalled(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to a command and what it started in its session; whether anything of it was there."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def answer(words: Sequence[str], environ: Environ, until: float) -> dict[str, Any]:
    """What a command says in JSON; raises Failed where it says nothing."""
    with started(words, environ, until) as process:
        out, _ = process.communicate()
    try:
        told = json.loads(out)
    except ValueError:
        raise Failed(f"exit code {process.returncode}") from None
    if "findings" in told and told["data"] is None:
        raise Failed("; ".join(f["message"] for f in told["findings"] if f["severity"] == "error"))
    return dict(told.get("data") or told)


def measure(
    case: Case, here: Here, gpus: Sequence[str], until: float, told: list[str]
) -> list[Row]:
    """The rows of a case; what of it could not be measured is said in `told`. Raises Failed."""
    words, environ = here.words(case), here.environ(case, gpus)
    if words[0] == "axolotl":
        return [axolotl(case, here, words, environ, until)]
    if words[0] == "python":
        about = {"case": here.name(case), "setting": case.beside, "command": shlex.join(words)}
        cost = answer([str(here.python), *words[1:], "--json"], environ, until)
        return [{**about, "probe": cost}]
    launch = [sys.executable, "-m", "launcher.cli", *words[1:], "--format", "json"]
    data = answer(launch, environ, until)
    rows = list(of_trials(case, here, data, shlex.join(words), told))
    if case.beside and rows:
        try:
            rows.append(by_hand(case, here, data["samples"], environ, until))
        except Failed as error:
            told.append(f"{case.beside}: {error}")
    return rows


def of_trials(
    case: Case, here: Here, data: Mapping[str, Any], command: str, told: list[str]
) -> Iterator[Row]:
    """A row for each variant of a comparison, or trial of a search, that did as it says and has a speed."""
    trials = {trial["name"]: trial for trial in data.get("trials", ())}
    searched = "trials" in data
    samples = [trial["sample"] for trial in data["trials"]] if searched else data["samples"]
    best = (data.get("best") or {}).get("settings")
    for nth, one in enumerate(data["bench" if searched else "rows"]):
        trial, standing = trials.get(one["variant"]), f"{one['standing']}: {one['why']}"
        runs = [s["run"] for s in samples if s["variant"] == one["variant"] and s["cause"] == "ok"]
        bad = one["standing"] in ("failed", "flawed") or (trial and trial["status"] != "ok")
        if bad or not runs or one.get(SPEED) is None:
            told.append(f"{one['variant']}: {trial['reason'] if trial else standing}")
            continue
        setting, note = slug(one["variant"]), ""
        if one["standing"] in ("loss changed", "unproven", "unknown"):
            note = standing
        if trial:
            named = "tuned" if trial["settings"] == best else of_settings(trial["settings"])
            setting, note = (named if nth else case.first), f"trial {one['variant'].split(':')[0]}"
        loss, peak = one["loss_per_token"], one["peak_allocated_gib"]
        yield row(
            case, here, setting, Spread(**one[SPEED]), run=Path(runs[0]), command=command, note=note,
            loss=loss and loss["median"], peak=peak and peak["max"],
        )  # fmt: skip


def of_settings(settings: Mapping[str, Any]) -> str:
    """What a trial of a search is called: `packing_32_zero3_no_checkpointing`."""
    words = ["packing" if settings.get("packing") else "padded", str(settings["per_device"])]
    words += [str(settings["deepspeed"])] if settings.get("deepspeed") else []
    words += [f"no_{name}" for name in ("checkpointing", "liger") if settings.get(name) is False]
    return "_".join(words)


def row(
    case: Case, here: Here, setting: str, speed: Spread, *, run: Path | None, command: str, note: str = "",
    loss: float | None, peak: float | None = None, parameters: int | None = None,
) -> Row:  # fmt: skip
    """A row of the results. MFU is the verdict's: None where no probe saw the run."""
    seen = evidence.read_run(run) if run else None
    figures = measures.metrics(seen) if seen else {}
    found = seen.probe if seen else None
    ranks = list(found.ranks.values()) if found else []
    model = ranks[0].first("model") if ranks else None
    size = parameters or int((model and model.number("parameters")) or 0)
    packages = rundir.read_manifest(RunFolder(run))["trainer"]["packages"] if run else {}
    state = ranks[0].last("gradients") if ranks else None
    spread = {key: round(value) for key, value in speed.as_json().items()}
    told: Row = {
        "case": here.name(case), "setting": setting, SPEED: spread,
        "mfu": _mfu(figures, spread["median"], len(ranks)),
        "loss_per_token": None if loss is None else round(loss, 4),
        "peak_gib": None if peak is None else round(peak, 2), "command": command,
        "parameters": size or None, "flash_attn": "flash-attn" in packages if run else case.flash,
    }  # fmt: skip
    if ranks:
        told["gradients"] = state.text("state") if state else "unknown"
        norms = [step.grad_norm for step in ranks[0].steps[:6]]
        told["gradient_norms"] = [None if n is None else float(f"{n:.4g}") for n in norms]
    kept = ("step", "seconds", "shares", "exposed_communication", "idle")
    if kernels := [event.fields for rank in ranks for event in rank.all("kernels")]:
        told["kernels"] = [{key: one[key] for key in kept} for one in kernels]
    return {**told, "note": note} if note else told


# --- without launch -------------------------------------------------------------------------------


def by_hand(case: Case, here: Here, samples: Sequence[Row], environ: Environ, until: float) -> Row:
    """The run that launch made, as often, by `trl`, or by accelerate with upstream's script; or Failed."""
    run = Path(samples[0]["run"])
    twin = attempt.read(RunFolder(run))
    at = next(n for n, word in enumerate(twin.argv) if word.endswith("launcher/probe.py"))
    starter, given = list(twin.argv[3:at]), list(twin.argv[at + 1 :])
    output = here.assets / "by_hand"
    given[given.index("--output_dir") + 1] = str(output)
    if twin.backend == "trl":
        options = [word.replace("--config_file", "--accelerate_config") for word in starter]
        words, shown = [str(here.python.with_name("trl"))], ["trl"]
        rest = [twin.stage, *given, *options]
    else:
        words, shown = list(twin.argv[:3]), ["accelerate", "launch"]
        rest = [*starter, json.loads(twin.env["LAUNCH_PROBE"])["target"], *given]
    more = {name: value for name, value in twin.env.items() if not name.startswith("LAUNCH_")}
    curve = samples[0]["curve"]
    each = max(1, case.gpus * (not here.cpu))
    environ = {**environ, **more}
    runs = [timed([*words, *rest], environ, len(curve), until, output) for _ in samples]
    speed = Spread.of(speed_of(lines, [step[0] / each for step in curve]) for lines in runs)
    weighed = [(step[1], loss) for step, (_, loss) in zip(curve, runs[0], strict=True)]
    assert speed is not None
    return row(
        case, here, case.beside, speed, run=run, command=shlex.join([*shown, *rest]),
        loss=math.fsum(w * x for w, x in weighed) / math.fsum(w for w, _ in weighed),
        note="not through launch: seconds between the log's lines of steady steps, tokens as the probe "
        "counted them in the same steps of the run through launch; no memory",
    )  # fmt: skip


def timed(
    words: Sequence[str], environ: Mapping[str, str], steps: int, until: float, output: Path
) -> Lines:
    """The lines of its steps; what ran is ended after the last one. Raises Failed where one is missing."""
    lines: Lines = []
    last = b""
    # a model of another run would be gone on from
    shutil.rmtree(output, ignore_errors=True)
    with started(words, environ, until, stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            last = line.strip() or last
            if found := _LOGGED.search(line):
                lines.append((time.monotonic(), float(found[1] or found[2])))
            if len(lines) == steps:
                return lines
    end = last[-300:].decode(errors="replace")
    raise Failed(f"ended after {len(lines)} of {steps} steps: {end}")


def speed_of(lines: Lines, tokens: Sequence[float]) -> float:
    """Tokens a second over the steps that a verdict calls steady; `tokens` are those of each step."""
    warm = min(20, max(1, len(lines) // 5))
    return math.fsum(tokens[warm:]) / (lines[-1][0] - lines[warm - 1][0])


def axolotl(case: Case, here: Here, words: Sequence[str], environ: Environ, until: float) -> Row:
    """The hand recipe as Axolotl spells it; raises Failed."""
    made = json.loads((here.assets / "assets.json").read_text(encoding="utf-8"))
    steps, rows, times, name = 6, 16, 4, "Qwen/Qwen2.5-7B"
    data = {"ds_type": "json", "type": "chat_template", "field_messages": "messages"}
    config = {
        "base_model": name, "chat_template": "tokenizer_default", "sequence_len": 2048,
        "datasets": [{"path": str(here.assets / "sft" / "train.jsonl"), **data}], "sample_packing": False,
        "micro_batch_size": rows, "gradient_accumulation_steps": times, "max_steps": steps,
        "num_epochs": 1, "learning_rate": 5e-6, "lr_scheduler": "linear", "warmup_ratio": 0.03,
        "weight_decay": 0.0, "optimizer": "adamw_torch", "bf16": True,
        "attn_implementation": "flash_attention_2",
        "gradient_checkpointing": True, "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        "liger_rope": True, "liger_rms_norm": True, "liger_glu_activation": True,
        "liger_fused_linear_cross_entropy": True, "logging_steps": 1, "seed": 8,
        "deepspeed": str(ROOT / "launcher" / "deepspeed" / "zero2_fp32_comm.json"),
        "output_dir": str(here.assets / "by_hand"), "dataset_prepared_path": str(here.assets / "axolotl"),
    }  # fmt: skip
    # JSON is YAML, too
    (here.assets / "axolotl.yaml").write_text(json.dumps(config, indent=1), encoding="utf-8")
    words = [str(here.python.with_name("axolotl")), *words[1:]]
    lines = timed(words, environ, steps, until, here.assets / "by_hand")
    speed = Spread.of([speed_of(lines, [rows * times * made["chats"]["mean"]] * steps)])
    assert speed is not None
    return row(
        case, here, case.beside, speed, run=None, command=shlex.join(["axolotl", *words[1:]]),
        loss=math.fsum(loss for _, loss in lines) / steps, parameters=made["models"][name]["parameters"],
        note="not through launch: seconds between the log's lines of steady steps, tokens by the mean of "
        "the data; no memory",
    )  # fmt: skip


# --- all of them ----------------------------------------------------------------------------------


def merged(old: Sequence[Row], new: Iterable[Row]) -> list[Row]:
    """What is new takes the place of the row with its case and setting, or comes after its case."""
    rows = list(old)
    for one in new:
        same = [n for n, other in enumerate(rows) if other["case"] == one["case"]]
        at = next((n for n in same if rows[n]["setting"] == one["setting"]), None)
        if at is None:
            rows.insert(same[-1] + 1 if same else len(rows), one)
        else:
            rows[at] = one
    return rows


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Every row with a speed as a line; what else was measured below."""
    more = []
    yield (
        "| case | setting | tokens/s per GPU (n) | MFU | loss per token | peak GiB | gradient norms |\n"
        f"|{'---|' * 7}\n"
    )
    for one in rows:
        name = f"{one['case']}, {one['setting']}"
        if "probe" in one:
            said = "a step takes {step_ms} ms, with the probe {watched_ms} ms, its calls alone {alone_us} us"
            more.append(f"- {name}: {said.format(**one['probe'])}\n")
            continue
        speed, mfu = one[SPEED], one["mfu"]
        spread = f", {speed['min']:,} – {speed['max']:,}" if speed["n"] > 1 else ""
        cells = [one["case"], one["setting"], f"{speed['median']:,}{spread} ({speed['n']})"]
        figures = [mfu and f"{100 * mfu:.1f} %", one["loss_per_token"], one["peak_gib"]]
        figures.append(
            " ".join(f"{norm:.3g}" for norm in one.get("gradient_norms", ()) if norm) or None
        )
        cells += ["–" if figure is None else str(figure) for figure in figures]
        yield f"| {' | '.join(cells)} |\n"
        for rank, told in enumerate(one.get("kernels", ())):
            alone = {"of it alone": told["exposed_communication"], "nothing": told["idle"]}
            shares = {**told["shares"], **alone}.items()
            listed = ", ".join(f"{what} {100 * share:.0f} %" for what, share in shares)
            more.append(f"- {name}, step {told['step']}, rank {rank}: {listed}\n")
    yield from ["\n", *more] if more else []


def _mfu(figures: Mapping[str, float | None], speed: float, processes: int) -> float | None:
    """That of one run's verdict, at the median speed of all runs."""
    mfu, own = figures.get("mfu"), figures.get("tokens_per_second")
    return round(mfu * speed * processes / own, 4) if mfu and own else None


def renewed(page: str, rows: Iterable[Row]) -> str:
    """The page with the table between its marks written anew; one without marks stays."""
    head, mark, rest = page.partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    return f"{head}{mark}\n{''.join(table(rows))}\n{end}{tail}" if end else page


def save(results: Path, new: Sequence[Row]) -> None:
    """Merge into the file, and into the page beside it where there is one."""
    rows = merged(json.loads(results.read_text("utf-8")) if results.is_file() else [], new)
    results.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = results.with_suffix(".md")
    if page.is_file():
        page.write_text(renewed(page.read_text("utf-8"), rows), encoding="utf-8")


def run(cases: Sequence[Case], here: Here, results: Path, until: float, *, many: bool) -> int:
    """One after the other, or as `many` at a time as there are GPUs for; returns the exit code."""
    waiting, free, code, shared = list(cases), list(here.gpus), 0, set[str]()
    busy: dict[futures.Future[list[Row]], tuple[Case, list[str], list[str]]] = {}
    with futures.ThreadPoolExecutor() as pool:
        while waiting or busy:
            try:
                for case in list(waiting):
                    taken = [] if here.cpu else free[: case.gpus]
                    if busy and (not many or here.cpu or len(taken) < case.gpus):
                        continue
                    waiting.remove(case)
                    if left_out := _no_start(case, here, until):
                        print(f"left out: {case.name}: {left_out}", flush=True)
                        continue
                    print(f"{case.name}: {shlex.join(here.words(case))}", flush=True)
                    told: list[str] = []
                    shared |= (
                        {case.name, *(other.name for other, _, _ in busy.values())}
                        if busy
                        else set()
                    )
                    busy[pool.submit(measure, case, here, taken, until, told)] = (case, taken, told)
                    free = free[len(taken) :]
                done, _ = futures.wait(busy, return_when=futures.FIRST_COMPLETED)
            except KeyboardInterrupt:
                waiting, code, done = [], 130, set()
                INTERRUPTED.set()
                for process in list(RUNNING):
                    signalled(process, signal.SIGTERM)
            for going in done:
                case, taken, told = busy.pop(going)
                free, rows = free + taken, []
                try:
                    rows = going.result()
                except Failed as error:
                    told.append(str(error))
                except Exception:
                    # the other cases are worth their hours
                    told.append(traceback.format_exc())
                if case.name in shared:
                    words = "beside other cases on other GPUs"
                    rows = [
                        {**one, "note": "; ".join(filter(None, (one.get("note"), words)))}
                        for one in rows
                    ]
                save(results, rows)
                code = code or (0 if rows else 1)
                lines = [*table(rows), *(f"not measured: {line}\n" for line in told)]
                print("".join(lines), flush=True)
    return code


def _no_start(case: Case, here: Here, until: float) -> str:
    """Why a case that could run here is not begun now; empty where it is."""
    left, file = (until - time.monotonic()) / 60, case.needs.format(assets=here.assets)
    if left < (1 if here.cpu else case.minutes):
        return f"{case.minutes:g} minutes expected, {max(0.0, left):.0f} left"
    missing = "/" in file and not Path(file).is_file()
    return f"{file} is missing, which an earlier case makes" if missing else ""


def main(given: argparse.Namespace) -> int:
    """Choose the cases that can run here, make what they need, and run them; returns the exit code."""
    made = ROOT / "build" / ("bench-tiny" if given.cpu else "bench")
    folder = (given.assets or made).absolute()
    here = look(folder, cpu=given.cpu, repeats=given.repeats)
    names = [case.name for case in CASES]
    wanted = given.only.split(",") if given.only else names
    if unknown := sorted(set(wanted) - set(names)):
        print(f"error: no case {', '.join(unknown)}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    chosen = [(case, here.lacks(case)) for case in CASES if case.name in wanted]
    for case, lacking in chosen:
        if given.list:
            wants = f"{case.gpus} GPU, {case.minutes:g} min"
            print(f"{case.name}: {wants}, {lacking or 'can run here'}")
            print(f"  {', '.join(sorted(case.settings()))}\n  {shlex.join(here.words(case))}")
        elif lacking:
            print(f"left out: {case.name}: {lacking}", flush=True)
    cases = [case for case, lacking in chosen if not lacking]
    if given.list or not cases:
        return 0 if given.list else 1
    until = time.monotonic() + (60 * given.minutes if given.minutes else math.inf)
    if not (folder / "assets.json").is_file():
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        words = [str(here.python), str(MAKER), "--out", str(folder)]
        words += ["--tiny"] if given.cpu else []
        if code := subprocess.run(words, env={**os.environ, "PYTHONPATH": path}).returncode:
            return code
    results = given.results or (folder / "benchmarks.json" if given.cpu else RESULTS)
    # what was started must not outlive this
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run(cases, here, results, until, many=given.side_by_side)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, told in (
        ("list", "every case, and whether it can run here"),
        ("side-by-side", "several cases at a time, on other GPUs"),
        ("cpu", "only to try it: tiny shapes, no GPU"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=told)
    parser.add_argument("--only", metavar="CASE,...", help="these, in the order of the list")
    parser.add_argument("--minutes", type=float, metavar="M", help="what is expected to fit")
    parser.add_argument("--repeats", type=int, metavar="N", help="of each bench, not its own")
    parser.add_argument("--assets", type=Path, metavar="DIR", help="default: build/bench")
    parser.add_argument("--results", type=Path, metavar="FILE", help="docs/benchmarks.json")
    sys.exit(main(parser.parse_args()))
