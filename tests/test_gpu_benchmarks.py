"""The cases of docs/benchmarks.md: what they make, how results are merged, one end to end."""

import importlib.util
import json
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

from launcher.config import load
from launcher.errors import select_errors
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


def test_the_page_says_what_the_rows_say() -> None:
    """MFU is a verdict's: near 6 x parameters x tokens/s over 989 TFLOP/s, the peak of H100 and
    H200.
    """
    page = PAGE.read_text(encoding="utf-8")
    assert script.renewed(page, ROWS) == page, "scripts/gpu_benchmarks.py renews the table"
    for row in ROWS:
        flops = 6 * row["parameters"] * row[SPEED]["median"]
        assert row["command"]
        if row["mfu"] is not None:
            assert row["mfu"] == pytest.approx(flops / 989e12, rel=0.08)


def test_upstream_takes_every_setting_of_a_case(tmp_path: Path) -> None:
    assert len({case.name for case in script.CASES}) == len(script.CASES)
    for case in script.CASES:
        words = script.command_of(case, tmp_path)
        if case.needs:
            continue
        axis = [[b for a, b in pairwise(words) if a == "--variant"]]
        values = {b for a, b in pairwise(words) if a[0] == "-"}
        overrides = [word for word in words[3:] if "=" in word and word not in values]
        for one in variants.combine_variants([], *axis):
            asked = load.load(REPOSITORY / words[2], [*overrides, *one.overrides])
            assert not select_errors(stage.validate(stage.judge_stage_file(asked)).findings), (
                case.name,
                one.name,
            )


def test_the_commands_can_be_pasted() -> None:
    words = [sys.executable, str(SCRIPT), "--only", "prob"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and "no case prob; there are sft-7b-hand" in done.stderr
    words = [sys.executable, str(SCRIPT), "--list", "--only", "sft-7b-hand", "--repeats", "9"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    command = shlex.split(done.stdout.splitlines()[1])
    assert (
        command[:3] == ["launch", "bench", "configs/bench/hand_recipe.yaml"] and command[-1] == "9"
    )
