"""Run the cases of docs/benchmarks.md on this machine; merge the results into docs/benchmarks.json.

usage: python scripts/gpu_benchmarks.py [--list] [--only CASE,...] [--minutes M] [--repeats N]
                                        [--assets DIR]

Missing models and data are made first (make_bench_assets.py). A case is one command, run from the
repository's root. A row of the results is identified by its case, which names the GPUs, and its
setting: a new row replaces the old one, all others stay, and the page's table is written anew.
`--minutes` runs cases in their order as long as the next one is expected to fit. Exit code 1 if a
case measured nothing, 2 for an unknown case, 130 if interrupted.
"""

import argparse
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks.json"
PAGE = RESULTS.with_suffix(".md")
MAKER = ROOT / "scripts" / "make_bench_assets.py"
TABLE_START = "<!-- every row, by scripts/gpu_benchmarks.py -->\n"
TABLE_END = "<!-- end of the rows -->\n"
SPEED = "tokens_per_second_per_gpu"
TABLE_HEAD = (
    "case", "tool", "setting", "tokens/s per GPU (n)", "MFU, 6N", "MFU, verdict's",
    "loss per token", "peak GiB", "gradient norms",
)  # fmt: skip
H100_FLOPS = 989e12
"""Dense bf16 operations a second of an H100 or H200 (SXM), by NVIDIA's data sheet."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command whose results become rows.

    `case` is that of the rows, without the GPUs; `minutes` are expected on H200. `launch bench`
    gives a row for each variant; `launch tune` gives `hand_recipe`, its first trial, and `tuned`,
    the best. `needs`: a file that an earlier case makes.
    """

    name: str
    case: str
    command: str
    minutes: float
    gpus: int = 2
    needs: str = ""


_CHATS = "[{assets}/sft/train.jsonl,1.0]"
_PAIRS = "[{assets}/dpo/train.jsonl,1.0]"
_SFT = f"configs/bench/hand_recipe.yaml --gpus 2 'dataset_mixer_list={_CHATS}'"
_DPO = f"configs/bench/hand_recipe_dpo.yaml --gpus 2 'mixer_list={_PAIRS}'"
_SMALL = f"{_SFT.replace('--gpus 2', '--gpus 1')} model_name_or_path=Qwen/Qwen2.5-0.5B"
_PACKED = "packing=true,expect.packing=isolated"


def _sweep(gpus: int, *, packing: bool, compiled: bool) -> Case:
    """dpo.py with 2 to 32 pairs a row."""
    kind = "packed" if packing else "padded"
    if compiled:
        kind += "_compiled"
    command = (
        f"launch bench configs/olmo_core/dpo_qwen3_0_6b.yaml --gpus {gpus} 'mixer_list={_PAIRS}' "
        f"model_name_or_path={{assets}}/hub/models--Qwen--Qwen3-0.6B/snapshots/{0:040x} "
        f"config_name=qwen3_0_6B packing={str(packing).lower()} "
        f"expect.packing={'on' if packing else 'off'} compile_model={str(compiled).lower()} "
    )
    for pairs in (2, 8, 16, 32):
        batch = f"batch.per_device={pairs},batch.global={pairs * gpus}"
        command += f"--variant {kind}_{pairs}:{batch} "
    command += "--steps 12 --repeats 1"
    name = f"dpo-olmo-core-{gpus}-{kind}"
    return Case(name=name, case="dpo-qwen3-0.6b", minutes=6, gpus=gpus, command=command)


def _zero3(case: str, recipe: str, tokens: str, steps: int) -> list[Case]:
    """The hand recipe and its search under ZeRO-3: two GPUs of 80 GB need it for a model of 7B."""
    name = f"{case}-zero3"
    arguments = f"{recipe} deepspeed=zero3 --steps {steps}"
    hand = f"launch bench {arguments} --variant hand_recipe: --repeats 3"
    search = f"launch tune {arguments} --row-tokens {tokens} --budget 10m "
    search += f"-o {{assets}}/tuned_{name}.yaml"
    return [
        Case(name=f"{name}-hand", case=name, minutes=5, command=hand),
        Case(name=f"{name}-tune", case=name, minutes=12, command=search),
    ]


_SFT_WITHOUT = f"no_checkpointing:{_PACKED},gradient_checkpointing=false"
_DPO_WITHOUT = f"no_checkpointing:{_PACKED},activation_memory_budget=1.0,batch.per_device=8"
CASES = (
    Case(
        name="sft-7b-hand", case="sft-7b", minutes=4,
        command=f"launch bench {_SFT} --variant hand_recipe: --steps 5 --repeats 3",
    ),
    Case(
        name="sft-7b-tune", case="sft-7b", minutes=7,
        command=f"launch tune {_SFT} --steps 6 --budget 6m -o {{assets}}/tuned_sft.yaml",
    ),
    Case(
        name="sft-7b-tuned", case="sft-7b", minutes=4, needs="{assets}/tuned_sft.yaml",
        command="launch bench {assets}/tuned_sft.yaml --gpus 2 "
        "--variant tuned: --steps 8 --repeats 3",
    ),
    Case(
        name="sft-7b-zero", case="sft-7b", minutes=10,
        command=f"launch bench {_SFT} "
        f"--variant packing_16_zero2_{_SFT_WITHOUT},batch.per_device=16,deepspeed=zero2 "
        f"--variant packing_32_zero3_{_SFT_WITHOUT},batch.per_device=32,deepspeed=zero3 "
        f"--variant packing_32_zero1_{_SFT_WITHOUT},batch.per_device=32,deepspeed=zero1 "
        f"--variant packing_32_zero1_fp32_comm_{_SFT_WITHOUT},batch.per_device=32,"
        "deepspeed=zero1_fp32_comm --steps 7 --repeats 2",
    ),
    Case(
        name="sft-7b-trl", case="sft-7b", minutes=6,
        command="launch bench configs/bench/hand_recipe_trl.yaml --gpus 2 "
        "dataset_name={assets}/sft "
        "--variant trl: --steps 6 --repeats 2",
    ),
    Case(
        name="sft-7b-tulu", case="sft-7b", minutes=4,
        command=f"launch bench configs/tulu/sft_qwen7b.yaml --gpus 2 'dataset_mixer_list={_CHATS}' "
        "--variant tulu: --steps 6 --repeats 2",
    ),
    Case(
        name="dpo-7b-hand", case="dpo-7b", minutes=7,
        command=f"launch bench {_DPO} --variant hand_recipe: --steps 4 --repeats 3",
    ),
    Case(
        name="dpo-7b-tune", case="dpo-7b", minutes=7,
        command=f"launch tune {_DPO} --steps 4 --budget 6m -o {{assets}}/tuned_dpo.yaml",
    ),
    Case(
        name="dpo-7b-tuned", case="dpo-7b", minutes=6, needs="{assets}/tuned_dpo.yaml",
        command="launch bench {assets}/tuned_dpo.yaml --gpus 2 "
        "--variant tuned: --steps 6 --repeats 3",
    ),
    Case(
        name="dpo-7b-zero", case="dpo-7b", minutes=6,
        command=f"launch bench {_DPO} --variant packing_8_zero2_{_DPO_WITHOUT},deepspeed=zero2 "
        f"--variant packing_8_zero1_{_DPO_WITHOUT},deepspeed=zero1 --steps 5 --repeats 2",
    ),
    Case(
        name="dpo-7b-tulu", case="dpo-7b", minutes=4,
        command=f"launch bench configs/tulu/dpo_qwen7b.yaml --gpus 2 'mixer_list={_PAIRS}' "
        "model_name_or_path=Qwen/Qwen2.5-7B --variant tulu: --steps 4 --repeats 2",
    ),
    *_zero3("sft-7b", _SFT, "303:1114", steps=6),
    *_zero3("dpo-7b", _DPO, "308:1114", steps=4),
    Case(
        name="sft-0.5b-hand", case="sft-0.5b", minutes=3, gpus=1,
        command=f"launch bench {_SMALL} --variant hand_recipe: --steps 6 --repeats 3",
    ),
    Case(
        name="sft-0.5b-tune", case="sft-0.5b", minutes=4, gpus=1,
        command=f"launch tune {_SMALL} --steps 6 --budget 3m -o {{assets}}/tuned_sft_small.yaml",
    ),
    *(
        _sweep(gpus, packing=packing, compiled=compiled)
        for gpus in (1, 2)
        for packing in (False, True)
        for compiled in (False, True)
    ),
)  # fmt: skip


def slug(name: str) -> str:
    """A name as a setting: `batch_2_packing_true`."""
    return re.sub(r"[^\w.]+", "_", name.lower()).strip("_")


def command_of(case: Case, assets: Path, repeats: int | None = None) -> list[str]:
    """The words of a case's command, with `repeats` in place of its own."""
    if assets.is_relative_to(ROOT):
        assets = assets.relative_to(ROOT)
    words = shlex.split(case.command.format(assets=assets))
    if repeats and "--repeats" in words:
        words[words.index("--repeats") + 1] = str(repeats)
    return words


def gpu_names() -> list[str]:
    """The names of this machine's GPUs; none without a driver."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return []
    return re.findall(r"^GPU \d+: (.+) \(UUID", listed.stdout, re.MULTILINE)


def has_flash_attn(python: str) -> bool:
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('flash_attn') is None)"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def reason_not_to_run(case: Case, gpus: int, python: str) -> str:
    """Why a case cannot run on this machine; empty if it can."""
    if gpus < case.gpus:
        return f"needs {case.gpus} GPUs, {gpus} here"
    if not has_flash_attn(python):
        return f"{python} lacks flash-attn: LAUNCH_PYTHON names another"
    return ""


def run_command(words: Sequence[str], assets: Path) -> tuple[int, str]:
    """Run a case with the made models for the hub; returns its exit code and output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", *words[1:], "--format", "json"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(assets / "hub")},
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate()
    except KeyboardInterrupt:
        # launch ends what it started, which frees the GPUs
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    return process.returncode, out


def measure(name: str, words: Sequence[str], assets: Path) -> tuple[list[Row], list[str]]:
    """Run a case; returns its rows, and what was not measured."""
    code, out = run_command(words, assets)
    try:
        envelope = json.loads(out)
    except ValueError:
        return [], [f"exit code {code}"]
    data = envelope.get("data")
    if data is None:
        findings = envelope["findings"]
        return [], [f["message"] for f in findings if f["severity"] == "error"]
    rows = []
    missing = []
    for measurement in list_measurements(data):
        line = measurement.line
        standing = f"{line['standing']}: {line['why']}"
        failed = line["standing"] in ("failed", "flawed") or line.get(SPEED) is None
        if failed or measurement.run is None:
            missing.append(f"{line['variant']}: {standing}")
            continue
        row = row_of(name, measurement.setting, shlex.join(words), line, measurement.run)
        if line["standing"] in ("loss changed", "unproven", "unknown"):
            row["note"] = standing
        rows.append(row)
    return rows, missing


@dataclass(frozen=True, slots=True)
class Measurement:
    """A setting, its line of the answer, and the folder of its first successful run."""

    setting: str
    line: Row
    run: Path | None


def list_measurements(data: Row) -> list[Measurement]:
    """The variants of a comparison, or the first and best trial of a search."""
    trials = data.get("trials")
    chosen = []
    if not trials:
        for line in data["rows"]:
            run = find_successful_run(data["samples"], line)
            chosen.append(Measurement(slug(line["variant"]), line, run))
        return chosen
    samples = [trial["sample"] for trial in trials]
    hand_recipe = data["bench"][0]
    run = find_successful_run(samples, hand_recipe)
    chosen.append(Measurement("hand_recipe", hand_recipe, run))
    settings = {trial["name"]: trial["settings"] for trial in trials}
    best = (data.get("best") or {}).get("settings")
    for line in data["bench"][1:]:
        if settings[line["variant"]] == best:
            chosen.append(Measurement("tuned", line, find_successful_run(samples, line)))
    return chosen


def find_successful_run(samples: Iterable[Row], line: Row) -> Path | None:
    for sample in samples:
        if sample["variant"] == line["variant"] and sample["cause"] == "ok":
            return Path(sample["run"])
    return None


def row_of(case: str, setting: str, command: str, line: Row, run: Path) -> Row:
    loss = line["loss_per_token"]
    peak = line["peak_allocated_gib"]
    return {
        "case": case,
        "setting": setting,
        SPEED: {key: round(value) for key, value in line[SPEED].items()},
        "loss_per_token": loss and round(loss["median"], 4),
        "peak_gib": peak and round(peak["max"], 2),
        "command": command,
        **figures_of(run),
    }


def figures_of(run: Path) -> Row:
    """What a run's records say: MFU, parameters, flash-attn, gradients."""
    verdict = json.loads((run / "verdict.json").read_text("utf-8"))
    manifest = json.loads((run / "run.json").read_text("utf-8"))
    parameters = None
    gradients = "unknown"
    norms: list[float | None] = []
    for event in read_events(run):
        if event["event"] == "model" and parameters is None:
            parameters = event.get("parameters")
        elif event["event"] == "gradients":
            gradients = event["state"]
        elif event["event"] == "step" and len(norms) < 6:
            norm = event.get("grad_norm")
            if norm is not None:
                norm = float(f"{norm:.4g}")
            norms.append(norm)
    return {
        "mfu": verdict["metrics"].get("mfu"),
        "parameters": parameters,
        "flash_attn": "flash-attn" in manifest["trainer"]["packages"],
        "gradients": gradients,
        "gradient_norms": norms,
    }


def read_events(run: Path) -> list[Row]:
    """What the probe recorded in the first rank."""
    path = min(run.glob("probe/rank-*.jsonl"), default=None)
    if path is None:
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def merge(rows: list[Row], new: Iterable[Row]) -> None:
    """Put new rows in place of those with their case and setting, or behind their case."""
    for row in new:
        place = len(rows)
        for number, old in enumerate(rows):
            if old["case"] == row["case"]:
                place = number + 1
                if old["setting"] == row["setting"]:
                    rows[number] = row
                    break
        else:
            rows.insert(place, row)


def table(rows: Iterable[Row]) -> str:
    """The rows in Markdown."""
    lines = [f"| {' | '.join(TABLE_HEAD)} |", f"|{'---|' * len(TABLE_HEAD)}"]
    for row in rows:
        lines.append(f"| {' | '.join(cells_of(row))} |")
    return "\n".join(lines) + "\n"


def cells_of(row: Row) -> list[str]:
    speed = row[SPEED]
    spread = ""
    if speed["n"] > 1:
        spread = f", {speed['min']:,} – {speed['max']:,}"
    mfu = 6 * row["parameters"] * speed["median"] / H100_FLOPS
    norms = [f"{norm:.3g}" for norm in row.get("gradient_norms", ()) if norm]
    cells = [
        row["case"],
        row.get("tool", "launch"),
        row["setting"],
        f"{speed['median']:,}{spread} ({speed['n']})",
        f"{100 * mfu:.1f} %",
        row["mfu"] and f"{100 * row['mfu']:.1f} %",
        row["loss_per_token"],
        row["peak_gib"],
        " ".join(norms) or None,
    ]
    return ["–" if cell is None else str(cell) for cell in cells]


def renewed(page: str, rows: Iterable[Row]) -> str:
    """The page with the table between its marks written anew."""
    head, _, rest = page.partition(TABLE_START)
    tail = rest.partition(TABLE_END)[2]
    return f"{head}{TABLE_START}\n{table(rows)}\n{TABLE_END}{tail}"


def save(new: Sequence[Row]) -> None:
    """Merge the rows into docs/benchmarks.json and renew the page's table."""
    rows = json.loads(RESULTS.read_text("utf-8"))
    merge(rows, new)
    RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(renewed(PAGE.read_text("utf-8"), rows), encoding="utf-8")


def make_assets(python: str, assets: Path) -> int:
    """Make the models and data unless they exist; returns the maker's exit code."""
    if (assets / "assets.json").is_file():
        return 0
    environ = dict(os.environ)
    environ["PYTHONPATH"] = str(ROOT)
    if os.environ.get("PYTHONPATH"):
        environ["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    maker = [python, str(MAKER), "--out", str(assets)]
    return subprocess.run(maker, env=environ).returncode


def main(options: argparse.Namespace) -> int:
    """List the cases, or run those that this machine can; returns the exit code."""
    assets: Path = options.assets.absolute()
    names = [case.name for case in CASES]
    wanted = names
    if options.only:
        wanted = options.only.split(",")
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        listed = ", ".join(names)
        print(f"error: no case {', '.join(unknown)}; there are {listed}", file=sys.stderr)
        return 2
    gpus = gpu_names()
    python = os.environ.get("LAUNCH_PYTHON") or sys.executable
    cases = []
    for case in CASES:
        if case.name not in wanted:
            continue
        reason = reason_not_to_run(case, len(gpus), python)
        if options.list:
            state = reason or "can run here"
            print(f"{case.name}: {case.gpus} GPU, {case.minutes:g} min, {state}")
            print(f"  {shlex.join(command_of(case, assets, options.repeats))}")
        elif reason:
            print(f"left out: {case.name}: {reason}", flush=True)
        else:
            cases.append(case)
    if options.list:
        return 0
    if not cases:
        return 1
    # making the models counts too
    end = time.monotonic() + 60 * options.minutes
    code = make_assets(python, assets)
    if code:
        return code
    for case in cases:
        left = (end - time.monotonic()) / 60
        needed = case.needs.format(assets=assets)
        if left < case.minutes:
            expected = f"{case.minutes:g} minutes expected, {left:.0f} left"
            print(f"left out: {case.name}: {expected}")
        elif needed and not Path(needed).is_file():
            print(f"left out: {case.name}: {needed} is missing, which an earlier case makes")
        elif not run_case(case, gpus[0], assets, options.repeats):
            code = 1
    return code


def run_case(case: Case, gpu: str, assets: Path, repeats: int | None) -> bool:
    """Run a case, save its rows and print them; whether it has any."""
    card = slug(gpu)
    match = re.search(r"[A-Z]+\d+\w*", gpu)
    if match is not None:
        card = slug(match[0])
    words = command_of(case, assets, repeats)
    print(f"{case.name}: {shlex.join(words)}", flush=True)
    rows, missing = measure(f"{case.case}-{case.gpus}x{card}", words, assets)
    save(rows)
    print(table(rows), end="")
    for line in missing:
        print(f"not measured: {line}")
    print(flush=True)
    return bool(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--list", action="store_true", help="every case, and whether it can run here"
    )
    parser.add_argument("--only", metavar="CASE,...", help="these, in the order of the list")
    parser.add_argument(
        "--minutes", type=float, metavar="M", default=math.inf, help="what is expected to fit"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="of each bench, not its own")
    parser.add_argument("--assets", type=Path, metavar="DIR", default=ROOT / "build" / "bench")
    # what was started must not outlive this
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit(130)
