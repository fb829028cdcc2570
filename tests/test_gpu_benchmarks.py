"""The cases of docs/benchmarks.md: what they make, how results are merged, and some of them end to end."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import saved
from conftest import PATIENCE_S, REPOSITORY
from fake_smi import Smi
from fake_world import World, made, needs_trl, until

from launcher import config, stage, variants
from launcher.errors import errors

SCRIPT = REPOSITORY / "scripts" / "gpu_benchmarks.py"
PAGE = REPOSITORY / "docs" / "benchmarks.md"
ROWS: list[dict[str, Any]] = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))
SPEED = "tokens_per_second_per_gpu"
ROW = json.dumps(
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
)


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_benchmarks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules["gpu_benchmarks"] = module
    spec.loader.exec_module(module)
    return module


script = _script()
LAUNCHED = [case for case in script.CASES if case.command.startswith("launch ")]


def row(case: str, setting: str, speed: int = 100, **more: Any) -> dict[str, Any]:
    spread = {"median": speed, "min": speed, "max": speed, "n": 1}
    told = {"case": case, "setting": setting, SPEED: spread, "mfu": 0.5, "loss_per_token": 2.0}
    return {**told, "peak_gib": None, "command": "launch bench x", **more}


# --- the cases and the page -----------------------------------------------------------------------


@pytest.mark.parametrize("one", ROWS, ids=lambda one: f"{one['case']}-{one['setting']}")
def test_every_row_has_a_case_that_makes_it(one: dict[str, Any]) -> None:
    assert any(case.makes(one) for case in script.CASES)
    assert not any(case.makes({**one, "setting": "another"}) for case in script.CASES)


def test_the_page_says_what_the_rows_say() -> None:
    """MFU is a verdict's: near 6 x parameters x tokens/s of a card over 989 TFLOP/s, H100's and H200's peak.

    Less where an untied embedding table is only looked up, more by attention.
    """
    page = PAGE.read_text(encoding="utf-8")
    assert script.renewed(page, ROWS) == page, "scripts/gpu_benchmarks.py renews the table"
    for one in (one for one in ROWS if "probe" not in one):
        speed = one[SPEED]
        assert one["command"]
        assert speed["min"] <= speed["median"] <= speed["max"] and speed["n"] >= 1
        assert f"| {one['case']} | {one['setting']} | {speed['median']:,}" in page
        if one["case"].endswith(("xh100", "xh200")):
            flops = 6 * one["parameters"] * speed["median"]
            assert one["mfu"] == pytest.approx(flops / 989e12, rel=0.08)


@pytest.mark.parametrize("case", LAUNCHED, ids=lambda case: case.name)
@pytest.mark.parametrize("cpu", [False, True])
def test_upstream_takes_every_setting_of_a_case(case: Any, cpu: bool, tmp_path: Path) -> None:
    if case.needs.endswith(".yaml") or (cpu and not case.cpu):
        return
    text = f"{case.command} {case.cpu if cpu else ''}".format(assets=tmp_path)
    words = shlex.split(text)
    axes = [[b for a, b in pairwise(words) if a == name] for name in ("--vary", "--variant")]
    values = {b for a, b in pairwise(words) if a[0] == "-"}
    given = [word for word in words[3:] if "=" in word and word not in values]
    for one in variants.combinations(*axes):
        asked = config.load(REPOSITORY / words[2], [*given, *one.overrides])
        assert not errors(stage.validate(stage.judge(asked)).findings), one.name


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in script.CASES]
    assert len(set(names)) == len(names)
    assert all(case.settings() for case in script.CASES)


# --- merging --------------------------------------------------------------------------------------


def test_what_was_measured_again_is_replaced_and_all_else_stays() -> None:
    old = [row("a-2xh200", "x"), row("a-2xh200", "y"), row("b-2xh200", "x")]
    new = [row("a-2xh200", "y", 200), row("a-2xh200", "z"), row("a-2xh100", "y")]
    told = script.merged(old, new)
    assert told == [old[0], new[0], new[1], old[2], new[2]]
    assert old[1] == row("a-2xh200", "y") and script.merged(told, []) == told


def test_the_page_is_renewed_where_it_has_marks(tmp_path: Path) -> None:
    results, page = tmp_path / "benchmarks.json", tmp_path / "benchmarks.md"
    page.write_text(f"before\n{script.MARKS[0]}old\n{script.MARKS[1]}after\n")
    shares = {"matmul": 0.6, "communication": 0.25}
    kernels = [{"step": 4, "shares": shares, "exposed_communication": 0.1, "idle": 0.04}]
    cost = {"step_ms": 210.5, "watched_ms": 210.7, "alone_us": 44.0}
    script.save(results, [row("a-2xh200", "x", 12_345, kernels=kernels)])
    script.save(results, [{"case": "probe-1xh200", "setting": "y", "probe": cost, "command": "z"}])
    assert [one["setting"] for one in json.loads(results.read_text())] == ["x", "y"]
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| a-2xh200 | x | 12,345 (1) | 50.0 % | 2.0 | – |" in text
    assert "step 4, rank 0: matmul 60 %, communication 25 %, of it alone 10 %, nothing 4 %" in text
    assert "- probe-1xh200, y: a step takes 210.5 ms" in text
    assert script.renewed("no marks", ROWS) == "no marks"


# --- without launch -------------------------------------------------------------------------------


def timed(tmp_path: Path, text: str, steps: int, ends: float = PATIENCE_S) -> Any:
    words = [sys.executable, "-uc", text]
    return script.timed(words, os.environ, steps, time.monotonic() + ends, tmp_path / "output")


def test_lines_of_steps_are_timed_and_what_logged_them_is_ended(tmp_path: Path) -> None:
    trainer = """
import os, sys, time
open(sys.argv[1] if sys.argv[1:] else "/dev/null")
print("Step: 1, LR: 1e-6, Loss: 12.5, TPS: 3.0")
print(" 50%|#####     | 1/2 [00:01<00:01] {'loss': '11.5', 'epoch': '0.1'}")
time.sleep(600)
"""
    (tmp_path / "output").mkdir()
    (first, one), (second, two) = timed(tmp_path, trainer, 2)
    assert (one, two) == (12.5, 11.5) and first <= second
    assert not (tmp_path / "output").exists(), "a run that is there would be gone on from"
    with pytest.raises(script.Failed, match="ended after 2 of 3 steps"):
        timed(tmp_path, trainer.replace("time.sleep(600)", ""), 3)
    # the time is up
    with pytest.raises(script.Failed, match="ended after 0 of 1 steps"):
        timed(tmp_path, "import time; time.sleep(600)", 1, ends=0)
    assert not script.RUNNING


def test_the_speed_is_that_of_steady_steps() -> None:
    lines = [(at, 2.0) for at in (60.0, 70.0, 71.0, 72.0, 73.0, 74.0, 75.0, 76.0, 77.0, 78.0)]
    assert script.speed_of(lines, [9000.0, 9000.0] + [100.0] * 8) == 100.0


def test_flash_attention_on_the_path_is_hidden_from_what_is_measured_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "flash_attn").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}/other")
    here = script.Here(
        assets=tmp_path, cpu=False, gpus=("0",), card="NVIDIA H100 80GB HBM3", python=Path("python")
    )
    case = {case.name: case for case in script.CASES}
    assert here.environ(case["sft-7b-hand"], ["0"])["PYTHONPATH"] == "/other"
    assert "site" in here.environ(case["sft-7b-tune"], ["0"])["PYTHONPATH"]
    assert here.name(case["sft-0.5b-hand"]) == "sft-0.5b-1xh100"
    assert here.lacks(case["sft-7b-hand"]) == "wants 2 GPUs, 1 here"


# --- on cards that are made up --------------------------------------------------------------------

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


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Two cards, a trainer whose runs are made up, a `trl` beside it, and a model's shape."""
    with made(tmp_path / "world") as one:
        smi = Smi(one.root / "smi")
        smi.cards(0, 0)
        one.cuda_torch()
        (one.root / "begin.py").write_text(TRAINER)
        for name in ("flash_attn", "liger_kernel"):
            (one.root / "site" / name).mkdir()
            about = one.root / "site" / f"{name}-2.8.3.dist-info" / "METADATA"
            about.parent.mkdir()
            about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.8.3\n")
            (one.root / "site" / name / "__init__.py").touch()
        trl = one.root / "trl"
        trl.write_text("#!/bin/sh\nwhile :; do echo \"{'loss': '2.5'}\"; sleep 0.05; done\n")
        trl.chmod(0o755)
        model = one.root / "assets" / "hub" / "models--Qwen--Qwen2.5-7B"
        (model / "snapshots" / "1").mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("1")
        shape = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 512}
        (model / "snapshots" / "1" / "config.json").write_text(json.dumps(shape))
        saved.loadable(model / "snapshots" / "1")
        (one.root / "assets" / "sft").mkdir()
        (one.root / "assets" / "sft" / "train.jsonl").write_text(f"{ROW}\n" * 2_000)
        (one.root / "assets" / "assets.json").write_text("{}")
        one.environ["PATH"] = f"{smi.path.parent}:{os.environ['PATH']}"
        one.environ["LAUNCH_PYTHON"] = str(one.root / "python")
        yield one


def benchmarks(*words: str, environ: dict[str, str] | None = None) -> Any:
    """The script, to its end; it never ends in a traceback."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], env=environ or os.environ, capture_output=True,
        text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done


def on_cards(world: World, *words: str) -> tuple[Any, list[dict[str, Any]]]:
    place, results = world.root / "assets", world.root / "results.json"
    done = benchmarks(
        *words, "--assets", str(place), "--results", str(results), environ=world.environ
    )
    return done, json.loads(results.read_text()) if results.is_file() else []


@needs_trl
def test_a_case_is_run_through_launch_and_by_hand(world: World) -> None:
    done, rows = on_cards(world, "--only", "sft-7b-trl,sft-7b-axolotl,sft-7b-hand")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: sft-7b-axolotl" in done.stdout and "lacks axolotl" in done.stdout
    assert "left out: sft-7b-hand" in done.stdout and "has flash-attn" in done.stdout
    launched, by_hand = rows
    assert (launched["case"], launched["setting"]) == ("sft-7b-2xh200", "trl")
    assert launched[SPEED] == {"median": 19_000, "min": 19_000, "max": 19_000, "n": 2}
    assert launched["mfu"] == pytest.approx(6e9 * 19_000 / 989e12, abs=1e-4)
    assert (launched["parameters"], launched["peak_gib"], launched["flash_attn"]) == (
        10**9,
        90,
        True,
    )
    assert launched["command"].startswith(
        "launch bench configs/bench/hand_recipe_trl.yaml --gpus 2 "
    )
    assert (by_hand["setting"], by_hand["loss_per_token"], by_hand["peak_gib"]) == (
        "trl_by_hand",
        2.5,
        None,
    )
    # the words are those of launch's own command
    assert by_hand["command"].startswith("trl sft --model_name_or_path Qwen/Qwen2.5-7B ")
    assert "--max_steps 6" in by_hand["command"] and "--num_processes 2" in by_hand["command"]
    assert "launcher/probe.py" not in by_hand["command"] and by_hand["note"].startswith(
        "not through"
    )
    assert world.quiet()


@needs_trl
def test_nothing_is_left_of_what_was_interrupted(world: World) -> None:
    trl = world.root / "trl"
    trl.write_text(f"#!/bin/sh\ntouch {world.root / 'begun'}\nsleep 600\n")
    words = [
        sys.executable,
        str(SCRIPT),
        "--only",
        "sft-7b-trl",
        "--assets",
        str(world.root / "assets"),
    ]
    results = world.root / "results.json"
    running = subprocess.Popen(
        [*words, "--results", str(results)], env=world.environ, stdout=subprocess.PIPE
    )
    until(lambda: (world.root / "begun").exists())
    running.send_signal(signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 130
    # what was measured until then counts
    assert [one["setting"] for one in json.loads(results.read_text())] == ["trl"]
    assert world.quiet()


def test_too_little_time_and_no_such_case(tmp_path: Path) -> None:
    (tmp_path / "assets.json").write_text("{}")
    words = ("--cpu", "--assets", str(tmp_path))
    done = benchmarks(*words, "--only", "probe", "--minutes", "0.5")
    assert done.returncode == 0 and "left out: probe: 4 minutes expected, 0 left" in done.stdout
    done = benchmarks(*words, "--only", "prob")
    assert done.returncode == 2 and "no case prob; there are sft-7b-hand" in done.stderr


# --- real models and training ---------------------------------------------------------------------

training = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "trl")),
    reason="no training packages",
)


def make_assets(out: Path) -> str:
    maker = [
        sys.executable,
        str(SCRIPT.with_name("make_bench_assets.py")),
        "--tiny",
        "--out",
        str(out),
    ]
    done = subprocess.run(maker, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "assets"
    make_assets(out)
    return out


LOADS = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
for name in sys.argv[1:]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ba be"}], tokenize=False)
    print(json.dumps([name, model.num_parameters(), str(model.dtype), text, len(tokenizer(text).input_ids)]))
"""


@pytest.mark.training
@training
def test_the_made_models_are_found_without_a_hub(assets: Path, tmp_path: Path) -> None:
    told = json.loads((assets / "assets.json").read_text())
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(assets / "hub")}
    words = [sys.executable, "-c", LOADS, *told["models"]]
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert [one[0] for one in found] == [
        "Qwen/Qwen2.5-7B",
        "Qwen/Qwen2.5-0.5B",
        "Qwen/Qwen3-0.6B",
    ], done.stderr
    for name, parameters, dtype, text, length in found:
        assert told["models"][name]["parameters"] == parameters and dtype == "torch.bfloat16"
        assert text == "<|im_start|>user\nba be<|im_end|>\n" and length < len(text) / 2
    # OLMo-core asserts it of a folder
    assert len(list(assets.glob("hub/*/snapshots/*/generation_config.json"))) == 3
    assert told["chats"]["rows"] == 200 and told["pairs"]["rows"] == 50
    assert told["chats"]["mean"] < told["chats"]["most"] < 150
    # the same text again, and no model twice
    before = {path: path.read_bytes() for path in assets.glob("*/train.jsonl")}
    models = {path: path.stat().st_mtime_ns for path in assets.rglob("*.safetensors")}
    assert "Qwen/Qwen3-0.6B" in make_assets(assets)
    assert before == {path: path.read_bytes() for path in before}
    assert models == {path: path.stat().st_mtime_ns for path in models}


@pytest.mark.training
@training
def test_cases_on_the_cpu_end_to_end(assets: Path, tmp_path: Path) -> None:
    copy = tmp_path / "assets"
    shutil.copytree(assets, copy)
    done = benchmarks("--cpu", "--only", "probe,sft-7b-trl,dpo-7b-hand", "--assets", str(copy))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: dpo-7b-hand: needs a GPU" in done.stdout
    launched, by_hand, probe = json.loads((copy / "benchmarks.json").read_text())
    assert [one["case"] for one in (launched, by_hand, probe)] == [
        "sft-7b-cpu",
        "sft-7b-cpu",
        "probe-cpu",
    ]
    assert (
        launched[SPEED]["median"] > 0 and by_hand[SPEED]["median"] > 0 and launched["mfu"] is None
    )
    # the same rows with the same weights: by hand it is the same run
    assert by_hand["loss_per_token"] == pytest.approx(launched["loss_per_token"], abs=2e-3)
    assert probe["probe"]["step_ms"] > 0
