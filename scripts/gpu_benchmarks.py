"""Run the cases of docs/benchmarks.md on this machine; merge what they measure into docs/benchmarks.json.

usage: python scripts/gpu_benchmarks.py [--list] [--only CASE,...] [--minutes M] [--repeats N]
                                        [--assets DIR] [--results FILE.json]

Models and data are made first where they are missing (make_bench_assets.py). A case is one command, run
from the repository's root. A row of the results is identified by its case, which names the GPUs, and its
setting: what is measured again is replaced, everything else stays, and the table of the page beside the
results is written anew. `--minutes` takes cases in their order as long as one is expected to fit.
Exit code 1 where a case measured nothing, 2 for an unknown case, 130 where interrupted.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks.json"
MAKER = ROOT / "scripts" / "make_bench_assets.py"
MARKS = ("<!-- every row, by scripts/gpu_benchmarks.py -->\n", "<!-- end of the rows -->\n")
SPEED = "tokens_per_second_per_gpu"
H100_FLOPS = 989e12
"""Dense bf16 operations a second of an H100 or H200 (SXM), by NVIDIA's data sheet."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command, and the rows that come of it.

    `case` is that of the rows, without the GPUs; `minutes` are expected on H200. `launch bench` gives a row
    for each variant; `launch tune` gives `hand_recipe`, its first trial, and `tuned`, the best. `needs`: a
    file that an earlier case makes.
    """

    name: str
    case: str
    command: str
    minutes: float
    gpus: int = 2
    needs: str = ""


def _sweep(gpus: int, *, packing: bool, compiled: bool) -> Case:
    """dpo.py with 2 to 32 pairs a row."""
    kind = f"{'packed' if packing else 'padded'}{'_compiled' if compiled else ''}"
    model = f"{{assets}}/hub/models--Qwen--Qwen3-0.6B/snapshots/{0:040x}"
    variants = (f"{kind}_{n}:batch.per_device={n},batch.global={n * gpus}" for n in (2, 8, 16, 32))
    return Case(
        name=f"dpo-olmo-core-{gpus}-{kind}", case="dpo-qwen3-0.6b", minutes=6, gpus=gpus,
        command=f"launch bench configs/olmo_core/dpo_qwen3_0_6b.yaml --gpus {gpus} 'mixer_list={_PAIRS}' "
        f"model_name_or_path={model} config_name=qwen3_0_6B packing={str(packing).lower()} "
        f"expect.packing={'on' if packing else 'off'} compile_model={str(compiled).lower()} "
        f"{' '.join(f'--variant {variant}' for variant in variants)} --steps 12 --repeats 1",
    )  # fmt: skip


_CHATS, _PAIRS = "[{assets}/sft/train.jsonl,1.0]", "[{assets}/dpo/train.jsonl,1.0]"
_SFT = f"configs/bench/hand_recipe.yaml --gpus 2 'dataset_mixer_list={_CHATS}'"
_DPO = f"configs/bench/hand_recipe_dpo.yaml --gpus 2 'mixer_list={_PAIRS}'"
_SMALL = f"{_SFT.replace('--gpus 2', '--gpus 1')} model_name_or_path=Qwen/Qwen2.5-0.5B"
_PACKED = "packing=true,expect.packing=isolated"


def _zero3(case: str, recipe: str, tokens: str, steps: int) -> tuple[Case, Case]:
    """The hand recipe and its search under ZeRO-3, which two GPUs of 80 GB need for a model of 7B."""
    name, bench = f"{case}-zero3", f"{recipe} deepspeed=zero3 --steps {steps}"
    hand = f"launch bench {bench} --variant hand_recipe: --repeats 3"
    search = f"launch tune {bench} --row-tokens {tokens} --budget 10m -o {{assets}}/tuned_{name}.yaml"
    return (
        Case(name=f"{name}-hand", case=name, minutes=5, command=hand),
        Case(name=f"{name}-tune", case=name, minutes=12, command=search),
    )


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
        command="launch bench {assets}/tuned_sft.yaml --gpus 2 --variant tuned: --steps 8 --repeats 3",
    ),
    Case(
        name="sft-7b-zero", case="sft-7b", minutes=10,
        command=f"launch bench {_SFT} "
        f"--variant packing_16_zero2_{_SFT_WITHOUT},batch.per_device=16,deepspeed=zero2 "
        f"--variant packing_32_zero3_{_SFT_WITHOUT},batch.per_device=32,deepspeed=zero3 "
        f"--variant packing_32_zero1_{_SFT_WITHOUT},batch.per_device=32,deepspeed=zero1 "
        f"--variant packing_32_zero1_fp32_comm_{_SFT_WITHOUT},batch.per_device=32,deepspeed=zero1_fp32_comm "
        "--steps 7 --repeats 2",
    ),
    Case(
        name="sft-7b-trl", case="sft-7b", minutes=6,
        command="launch bench configs/bench/hand_recipe_trl.yaml --gpus 2 dataset_name={assets}/sft "
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
        command="launch bench {assets}/tuned_dpo.yaml --gpus 2 --variant tuned: --steps 6 --repeats 3",
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
        for gpus in (1, 2) for packing in (False, True) for compiled in (False, True)
    ),
)  # fmt: skip


def slug(name: str) -> str:
    """A name as a setting: `batch_2_packing_true`."""
    return re.sub(r"[^\w.]+", "_", name.lower()).strip("_")


def command_of(case: Case, assets: Path, repeats: int | None = None) -> list[str]:
    """The words of a case's command, with `repeats` in place of its own."""
    shown = assets.relative_to(ROOT) if assets.is_relative_to(ROOT) else assets
    words = shlex.split(case.command.format(assets=shown))
    if repeats and "--repeats" in words:
        words[words.index("--repeats") + 1] = str(repeats)
    return words


def environ_of(assets: Path) -> dict[str, str]:
    """The made models in place of the hub."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(assets / "hub")}


def gpu_names() -> list[str]:
    """The names of this machine's GPUs; none where there is no driver."""
    try:
        out = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return []
    return re.findall(r"^GPU \d+: (.+) \(UUID", out, re.MULTILINE)


def reason_not_to_run(case: Case, gpus: int, python: str) -> str:
    """Why a case cannot run here; empty where it can."""
    if gpus < case.gpus:
        return f"needs {case.gpus} GPUs, {gpus} here"
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('flash_attn') is None)"
    if subprocess.run([python, "-c", code], capture_output=True).returncode:
        return f"{python} lacks flash-attn: LAUNCH_PYTHON names another"
    return ""


def measure(case: Case, name: str, words: Sequence[str], assets: Path) -> tuple[list[Row], list[str]]:
    """The rows of a case, and what of it was not measured."""
    command = [sys.executable, "-m", "launcher", *words[1:], "--format", "json"]
    process = subprocess.Popen(
        command, env=environ_of(assets), cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate()
    except KeyboardInterrupt:
        # launch ends what it started, and its GPUs are free after it
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    try:
        envelope = json.loads(out)
    except ValueError:
        return [], [f"exit code {process.returncode}"]
    data = envelope.get("data")
    if data is None:
        return [], [f["message"] for f in envelope["findings"] if f["severity"] == "error"]
    return rows_of(case, name, data, shlex.join(words))


def rows_of(case: Case, name: str, data: Mapping[str, Any], command: str) -> tuple[list[Row], list[str]]:
    """A row for each variant of a comparison, or for the first and best trial of a search."""
    trials = data.get("trials", [])
    samples = [trial["sample"] for trial in trials] if trials else data["samples"]
    settings = {trial["name"]: trial["settings"] for trial in trials}
    best = (data.get("best") or {}).get("settings")
    rows, missing = [], []
    for nth, line in enumerate(data["bench" if trials else "rows"]):
        variant, standing = line["variant"], f"{line['standing']}: {line['why']}"
        if trials and nth and settings[variant] != best:
            continue
        runs = [s["run"] for s in samples if s["variant"] == variant and s["cause"] == "ok"]
        if line["standing"] in ("failed", "flawed") or not runs or line.get(SPEED) is None:
            missing.append(f"{variant}: {standing}")
            continue
        setting = slug(variant) if not trials else "tuned" if nth else "hand_recipe"
        loss, peak = line["loss_per_token"], line["peak_allocated_gib"]
        row = {
            "case": name, "setting": setting,
            SPEED: {key: round(value) for key, value in line[SPEED].items()},
            "loss_per_token": loss and round(loss["median"], 4),
            "peak_gib": peak and round(peak["max"], 2), "command": command,
            **figures_of(Path(runs[0])),
        }  # fmt: skip
        if line["standing"] in ("loss changed", "unproven", "unknown"):
            row["note"] = standing
        rows.append(row)
    return rows, missing


def figures_of(run: Path) -> Row:
    """What a run's records say of it: MFU, parameters, flash-attn, gradients."""
    verdict = json.loads((run / "verdict.json").read_text("utf-8"))
    packages = json.loads((run / "run.json").read_text("utf-8"))["trainer"]["packages"]
    ranks = []
    for path in sorted(run.glob("probe/rank-*.jsonl")):
        ranks.append([json.loads(line) for line in path.read_text("utf-8").splitlines()])
    events = ranks[0] if ranks else []
    model: Row = next((event for event in events if event["event"] == "model"), {})
    states = [event["state"] for event in events if event["event"] == "gradients"]
    norms = [event.get("grad_norm") for event in events if event["event"] == "step"][:6]
    return {
        "mfu": verdict["metrics"].get("mfu"), "parameters": model.get("parameters"),
        "flash_attn": "flash-attn" in packages, "gradients": states[-1] if states else "unknown",
        "gradient_norms": [None if norm is None else float(f"{norm:.4g}") for norm in norms],
    }  # fmt: skip


def merged(old: Sequence[Row], new: Iterable[Row]) -> list[Row]:
    """What is new takes the place of the row with its case and setting, or comes after its case."""
    rows = list(old)
    for row in new:
        same = [n for n, other in enumerate(rows) if other["case"] == row["case"]]
        place = next((n for n in same if rows[n]["setting"] == row["setting"]), None)
        if place is None:
            rows.insert(same[-1] + 1 if same else len(rows), row)
        else:
            rows[place] = row
    return rows


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Every row as a line."""
    head = ["case", "tool", "setting", "tokens/s per GPU (n)", "MFU, 6N", "MFU, verdict's"]
    head += ["loss per token", "peak GiB", "gradient norms"]
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    for row in rows:
        speed, mfu = row[SPEED], row["mfu"]
        of_all = 6 * row["parameters"] * speed["median"] / H100_FLOPS
        spread = f", {speed['min']:,} – {speed['max']:,}" if speed["n"] > 1 else ""
        norms = " ".join(f"{norm:.3g}" for norm in row.get("gradient_norms", ()) if norm)
        figures = [mfu and f"{100 * mfu:.1f} %", row["loss_per_token"], row["peak_gib"], norms or None]
        cells = [row["case"], row.get("tool", "launch"), row["setting"]]
        cells += [f"{speed['median']:,}{spread} ({speed['n']})", f"{100 * of_all:.1f} %"]
        cells += ["–" if figure is None else str(figure) for figure in figures]
        yield f"| {' | '.join(cells)} |\n"


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


def main(options: argparse.Namespace) -> int:
    """Choose the cases that can run here, make what they need, and run them; returns the exit code."""
    assets: Path = options.assets.absolute()
    names, cards = [case.name for case in CASES], gpu_names()
    wanted = options.only.split(",") if options.only else names
    if unknown := sorted(set(wanted) - set(names)):
        print(f"error: no case {', '.join(unknown)}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    python = os.environ.get("LAUNCH_PYTHON") or sys.executable
    cases = []
    for case in (case for case in CASES if case.name in wanted):
        reason = reason_not_to_run(case, len(cards), python)
        if options.list:
            print(f"{case.name}: {case.gpus} GPU, {case.minutes:g} min, {reason or 'can run here'}")
            print(f"  {shlex.join(command_of(case, assets, options.repeats))}")
        elif reason:
            print(f"left out: {case.name}: {reason}", flush=True)
        else:
            cases.append(case)
    if options.list or not cases:
        return 0 if options.list else 1
    end = time.monotonic() + (60 * options.minutes if options.minutes else math.inf)
    if not (assets / "assets.json").is_file():
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        maker = [python, str(MAKER), "--out", str(assets)]
        if code := subprocess.run(maker, env={**os.environ, "PYTHONPATH": path}).returncode:
            return code
    match = re.search(r"[A-Z]+\d+\w*", cards[0])
    card, code = slug(match[0] if match else cards[0]), 0
    for case in cases:
        left, needed = (end - time.monotonic()) / 60, case.needs.format(assets=assets)
        if left < case.minutes:
            print(f"left out: {case.name}: {case.minutes:g} minutes expected, {left:.0f} left")
            continue
        if needed and not Path(needed).is_file():
            print(f"left out: {case.name}: {needed} is missing, which an earlier case makes")
            continue
        words = command_of(case, assets, options.repeats)
        print(f"{case.name}: {shlex.join(words)}", flush=True)
        rows, missing = measure(case, f"{case.case}-{case.gpus}x{card}", words, assets)
        save(options.results, rows)
        code = code or (0 if rows else 1)
        print("".join([*table(rows), *(f"not measured: {line}\n" for line in missing)]), flush=True)
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="every case, and whether it can run here")
    parser.add_argument("--only", metavar="CASE,...", help="these, in the order of the list")
    parser.add_argument("--minutes", type=float, metavar="M", help="what is expected to fit")
    parser.add_argument("--repeats", type=int, metavar="N", help="of each bench, not its own")
    default = ROOT / "build" / "bench"
    parser.add_argument("--assets", type=Path, metavar="DIR", default=default)
    parser.add_argument("--results", type=Path, metavar="FILE", default=RESULTS)
    # what was started must not outlive this
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit(130)
