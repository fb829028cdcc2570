"""What each test of real training processes starts with: packages, assets, the command line.

One set of tiny assets for all; every run is a few steps. Skipped, with the reason, where the
training packages are missing.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkouts
import pytest
from conftest import NO_PACKAGES, PATIENCE_S, REPOSITORY, STAND_INS

from launcher.upstream.locate import locate

CONFIGS = REPOSITORY / "configs" / "demo"
TRAINING = ("torch", "transformers", "accelerate", "datasets", "trl")
OPEN_INSTRUCT = ("deepspeed", "olmo_core", "peft", "ray", "beaker")


def missing(names: tuple[str, ...]) -> list[str]:
    """The packages that are not installed here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


needs_packages = pytest.mark.skipif(
    bool(missing(TRAINING)), reason=f"{NO_PACKAGES}: {', '.join(missing(TRAINING))}"
)
needs_training = [pytest.mark.training, needs_packages]


def open_instruct_reason() -> str | None:
    """Why the pinned scripts cannot run here; None where they can."""
    source = locate("open_instruct")
    if source.root is None:
        return "no open-instruct checkout"
    if not source.pinned:
        return f"the checkout at {source.root} is not the pin"
    lacking = missing(OPEN_INSTRUCT)
    return f"no packages for open-instruct: {', '.join(lacking)}" if lacking else None


@pytest.fixture(
    scope="module", params=checkouts.COMMITS, ids=[commit[:8] for commit in checkouts.COMMITS]
)
def known_commit(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each known commit in turn, whose checkout all that is launched then uses; skips where it is
    not here.
    """
    commit: str = request.param
    root = checkouts.require(commit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCH_OPEN_INSTRUCT", str(root))
        yield commit


needs_trl = pytest.mark.skipif(bool(missing(("trl",))), reason="no training packages: trl")
needs_open_instruct = pytest.mark.skipif(
    open_instruct_reason() is not None, reason=str(open_instruct_reason())
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, demo_assets: Path) -> Path:
    """A folder to launch from, with the demo's assets in it."""
    folder = tmp_path_factory.mktemp("training")
    shutil.copytree(demo_assets, folder / "build" / "demo")
    return folder


def launch(place: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the command line in `place` with JSON answers; the exit code and the envelope."""
    environment = {
        **os.environ,
        "LAUNCH_RUNS": str(place / "runs"),
        "XDG_STATE_HOME": str(place / "state"),
        "XDG_CACHE_HOME": str(place / "cache"),
        "HF_DATASETS_CACHE": str(place / "hf"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": STAND_INS,
    }
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *words, "--format", "json"],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


def states(answer: dict[str, Any]) -> dict[str, str]:
    """Point -> state."""
    return {point["name"]: point["state"] for point in answer["data"]["points"]}
