"""The cases of docs/benchmarks.md: what they make, how results are merged, one of them end to end."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import saved
from conftest import PATIENCE_S, REPOSITORY
from fake_smi import Smi
from fake_world import made, needs_trl

from launcher.config import load
from launcher.errors import errors
from launcher.stage import stage
from launcher.workflows.bench import variants

SCRIPT = REPOSITORY / "scripts" / "gpu_benchmarks.py"
PAGE = REPOSITORY / "docs" / "benchmarks.md"
ROWS: list[dict[str, Any]] = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))
SPEED = "tokens_per_second_per_gpu"


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_benchmarks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules["gpu_benchmarks"] = module
    spec.loader.exec_module(module)
    return module


script = _script()


def row(case: str, setting: str, speed: int = 100, **more: Any) -> dict[str, Any]:
    spread = {"median": speed, "min": speed, "max": speed, "n": 1}
    figures = {"mfu": 0.5, "loss_per_token": 2.0, "peak_gib": None}
    return {"case": case, "setting": setting, SPEED: spread, **figures, "command": "x", **more}


def test_the_page_says_what_the_rows_say() -> None:
    """MFU is a verdict's: near 6 x parameters x tokens/s over 989 TFLOP/s, the peak of H100 and H200."""
    page = PAGE.read_text(encoding="utf-8")
    assert script.renewed(page, ROWS) == page, "scripts/gpu_benchmarks.py renews the table"
    for one in ROWS:
        flops = 6 * one["parameters"] * one[SPEED]["median"]
        assert one["command"] and one["mfu"] == pytest.approx(flops / 989e12, rel=0.08)


def test_upstream_takes_every_setting_of_a_case(tmp_path: Path) -> None:
    assert len({case.name for case in script.CASES}) == len(script.CASES)
    for case in script.CASES:
        words = script.command_of(case, tmp_path)
        if case.needs:
            continue
        axis = [[b for a, b in pairwise(words) if a == "--variant"]]
        values = {b for a, b in pairwise(words) if a[0] == "-"}
        overrides = [word for word in words[3:] if "=" in word and word not in values]
        for one in variants.combinations([], *axis):
            asked = load.load(REPOSITORY / words[2], [*overrides, *one.overrides])
            assert not errors(stage.validate(stage.judge(asked)).findings), (case.name, one.name)


def test_what_was_measured_again_is_replaced_and_all_else_stays(tmp_path: Path) -> None:
    old = [row("a-2xh200", "x"), row("a-2xh200", "y"), row("b-2xh200", "x")]
    new = [row("a-2xh200", "y", 200), row("a-2xh200", "z"), row("a-2xh100", "y")]
    assert script.merged(old, new) == [old[0], new[0], new[1], old[2], new[2]]
    results, page = tmp_path / "benchmarks.json", tmp_path / "benchmarks.md"
    page.write_text(f"before\n{script.MARKS[0]}old\n{script.MARKS[1]}after\n")
    script.save(results, [row("a-2xh200", "x", 12_345)])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| a-2xh200 | x | 12,345 (1) | 50.0 % | 2.0 | – |" in text


def test_the_first_and_the_best_trial_of_a_search_are_its_rows(tmp_path: Path) -> None:
    (tmp_path / "probe").mkdir()
    (tmp_path / "verdict.json").write_text('{"metrics": {"mfu": 0.4}}')
    (tmp_path / "run.json").write_text('{"trainer": {"packages": {"flash-attn": "2.8"}}}')
    events = [{"event": "model", "parameters": 7}, {"event": "step", "grad_norm": 1.23456}]
    events.append({"event": "gradients", "state": "true"})
    text = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "probe" / "rank-0.jsonl").write_text(text)
    names, run = ["1", "2", "3"], {"run": str(tmp_path)}
    spread = {"median": 10.4, "min": 10, "max": 11, "n": 1}
    measured = {"loss_per_token": spread, "peak_allocated_gib": spread, SPEED: spread}
    data = {
        "trials": [
            {"name": n, "settings": {"rows": n}, "sample": {"variant": n, "cause": "ok", **run}} for n in names
        ],
        "best": {"settings": {"rows": "3"}},
        "bench": [{"variant": n, "standing": "faster", "why": "", **measured} for n in names],
    }
    case = next(case for case in script.CASES if case.name == "sft-7b-tune")
    rows, missing = script.rows_of(case, "sft-7b-2xh200", data, "launch tune")
    assert [row["setting"] for row in rows] == ["hand_recipe", "tuned"] and not missing
    assert rows[0]["mfu"] == 0.4 and rows[0]["parameters"] == 7 and rows[0]["flash_attn"]
    assert (rows[0]["gradients"], rows[0]["gradient_norms"]) == ("true", [1.235])


TRAINER = """
import json, os, sys, time
from pathlib import Path

given = dict(zip(sys.argv, sys.argv[1:]))
folder = Path(os.environ["LAUNCH_RUN"], "probe")
folder.mkdir(exist_ok=True)
model = {"class": "M", "parameters": 10**9, "trainable": 10**9, "attention": "flash_attention_2"}
patch = {"function": "apply_liger_kernel_to_qwen2", "kwargs": {}, "patched": {"a": "b"}}
for rank in range(2):
    told = [
        {"event": "start", "rank": rank, "world": 2, "attempt": 1}, {"event": "model", **model},
        {"event": "device", "name": "NVIDIA H200", "total_gib": 140.0},
        {"event": "liger_patch", **patch}, {"event": "liger", "calls": {"rms_norm": 9, "rope": 9}},
        {"event": "packing", "state": "off", "detail": "padded"},
    ]
    told += [
        {"event": "step", "step": n, "loss": 2.0, "finite": True, "micro_batches": 4, "rows": 64,
         "tokens": 19_000, "positions": 20_000, "wasted": 1_000, "elapsed": n, "seconds": 1.0,
         "interrupted": False, "allocated_gib": 90.0}
        for n in range(1, int(given["--max_steps"]) + 1)
    ]
    told += [{"event": "saved", "path": "out"}, {"event": "end", "exit": 0}]
    text = "".join(json.dumps({"t": time.time(), **one}) + "\\n" for one in told)
    (folder / f"rank-{rank}.jsonl").write_text(text)
"""


@needs_trl
def test_a_case_on_two_cards_that_are_made_up(tmp_path: Path) -> None:
    with made(tmp_path / "world") as world:
        smi = Smi(world.root / "smi")
        smi.cards(0, 0)
        world.cuda_torch()
        (world.root / "begin.py").write_text(TRAINER)
        for name in ("flash_attn", "liger_kernel"):
            (world.root / "site" / name).mkdir()
            (world.root / "site" / name / "__init__.py").touch()
            about = world.root / "site" / f"{name}-2.8.3.dist-info" / "METADATA"
            about.parent.mkdir()
            about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.8.3\n")
        assets = world.root / "assets"
        model = assets / "hub" / "models--Qwen--Qwen2.5-7B"
        (model / "snapshots" / "1").mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("1")
        shape = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 512}
        (model / "snapshots" / "1" / "config.json").write_text(json.dumps(shape))
        saved.loadable(model / "snapshots" / "1")
        (assets / "sft").mkdir()
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        line = json.dumps({"messages": messages})
        (assets / "sft" / "train.jsonl").write_text(f"{line}\n" * 2_000)
        (assets / "assets.json").write_text("{}")
        environ = {**world.environ, "PATH": f"{smi.path.parent}:{os.environ['PATH']}"}
        environ["LAUNCH_PYTHON"] = str(world.root / "python")
        results = world.root / "results.json"
        words = [sys.executable, str(SCRIPT), "--only", "sft-7b-trl,sft-7b-tuned"]
        done = subprocess.run(
            [*words, "--assets", str(assets), "--results", str(results)], env=environ,
            capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "tuned_sft.yaml is missing" in done.stdout
        (only,) = json.loads(results.read_text())
        assert (only["case"], only["setting"]) == ("sft-7b-2xh200", "trl")
        assert only[SPEED] == {"median": 19_000, "min": 19_000, "max": 19_000, "n": 2}
        assert only["mfu"] == pytest.approx(6e9 * 19_000 / 989e12, abs=1e-4)
        assert (only["parameters"], only["peak_gib"], only["flash_attn"]) == (10**9, 90, True)
        begin = "launch bench configs/bench/hand_recipe_trl.yaml --gpus 2 "
        assert only["command"].startswith(begin) and world.quiet()


def test_the_commands_can_be_pasted() -> None:
    words = [sys.executable, str(SCRIPT), "--only", "prob"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and "no case prob; there are sft-7b-hand" in done.stderr
    words = [sys.executable, str(SCRIPT), "--list", "--only", "sft-7b-hand", "--repeats", "9"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    command = shlex.split(done.stdout.splitlines()[1])
    assert command[:3] == ["launch", "bench", "configs/bench/hand_recipe.yaml"] and command[-1] == "9"
