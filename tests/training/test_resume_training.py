"""Real training, killed at random moments and said again: TRL and the pinned SFT, on the CPU.

scripts/soak.py does the same for longer (`make soak`); here it makes two kills of each kind, both kinds
at the same time. Skipped, with the reason, where the training packages or the pinned checkout are missing.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, REPOSITORY, STAND_INS
from real_training import needs_open_instruct, needs_training, open_instruct_reason

pytestmark = [pytest.mark.slow, *needs_training]

KILLS = 2
Soaks = dict[str, tuple["subprocess.Popen[str]", Path]]


@pytest.fixture(scope="module")
def soaks(tmp_path_factory: pytest.TempPathFactory, demo_assets: Path) -> Iterator[Soaks]:
    """A soak of each kind that can run here, already running."""
    place = tmp_path_factory.mktemp("soak")
    started: Soaks = {}
    for kind in ("trl", "sft") if open_instruct_reason() is None else ("trl",):
        work = place / kind
        shutil.copytree(demo_assets, work / "assets")
        argv = [
            sys.executable,
            str(REPOSITORY / "scripts" / "soak.py"),
            kind,
            "--kills",
            str(KILLS),
        ]
        argv += ["--work", str(work), "--out", str(work / "soak.json")]
        path = os.pathsep.join(filter(None, (STAND_INS, *sys.path)))
        environment = {**os.environ, "PYTHONPATH": path}
        started[kind] = (
            subprocess.Popen(
                argv, cwd=work, env=environment, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            ),
            work,
        )  # fmt: skip
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


def result(soaks: Soaks, kind: str) -> dict[str, Any]:
    process, work = soaks[kind]
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert (work / "soak.json").is_file(), said
    told: dict[str, Any] = json.loads((work / "soak.json").read_text())["kinds"][0]
    assert process.returncode == 0, said
    return told


@pytest.mark.parametrize("kind", ["trl", pytest.param("sft", marks=needs_open_instruct)])
def test_killed_at_random_moments_it_ends_as_if_left_alone(soaks: Soaks, kind: str) -> None:
    told = result(soaks, kind)
    assert told["failures"] == []
    assert told["kills"] == KILLS
    for run in told["runs"]:
        # every step once, the losses and the weights of the undisturbed run: see the soak's own checks
        assert run["faults"] == []
        assert run["largest_loss_difference"] <= 1e-4
        assert run["largest_weight_difference"] == 0.0
        assert run["final_loss"] == pytest.approx(told["final_loss_undisturbed"], abs=1e-4)
