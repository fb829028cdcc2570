"""Real trainings that are killed at a random moment and started again, on the CPU.

scripts/soak.py does this for longer (`make soak`). Here it kills a run of each kind once, both
kinds at the same time.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, REPOSITORY, STAND_INS
from real_training import needs_open_instruct, needs_training, open_instruct_reason

pytestmark = [pytest.mark.slow, *needs_training]


@dataclass(frozen=True, slots=True)
class Soak:
    """A soak of one kind of training in a folder."""

    process: "subprocess.Popen[str]"
    work: Path

    def result(self) -> Any:
        text, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, text
        return json.loads((self.work / "soak.json").read_text())["kinds"][0]


def start_soak(kind: str, work: Path) -> Soak:
    script = REPOSITORY / "scripts" / "soak.py"
    words = [kind, "--kills", "1", "--work", str(work), "--out", str(work / "soak.json")]
    path = os.pathsep.join([STAND_INS, *sys.path])
    process = subprocess.Popen(
        [sys.executable, str(script), *words],
        cwd=work,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Soak(process, work)


@pytest.fixture(scope="module")
def soaks(tmp_path_factory: pytest.TempPathFactory, demo_assets: Path) -> Iterator[dict[str, Soak]]:
    """A soak of each kind that can run here, already running."""
    place = tmp_path_factory.mktemp("soak")
    kinds = ["trl"]
    if open_instruct_reason() is None:
        kinds.append("sft")
    started = {}
    for kind in kinds:
        shutil.copytree(demo_assets, place / kind / "assets")
        started[kind] = start_soak(kind, place / kind)
    yield started
    for soak in started.values():
        soak.process.kill()
        soak.process.wait()


@pytest.mark.parametrize("kind", ["trl", pytest.param("sft", marks=needs_open_instruct)])
def test_a_killed_run_ends_as_one_that_was_left_alone(soaks: dict[str, Soak], kind: str) -> None:
    result = soaks[kind].result()
    assert result["failures"] == []
    assert result["kills"] == 1
    (run,) = result["runs"]
    # each step once, with the losses and the weights of the undisturbed run
    assert run["faults"] == []
    assert run["largest_loss_difference"] <= 1e-4
    assert run["largest_weight_difference"] == 0.0
    assert run["final_loss"] == pytest.approx(result["final_loss_undisturbed"], abs=1e-4)
