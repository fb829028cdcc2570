"""The commands that build a trainer's environment: argv lists, for any Python, never a shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from packaging.requirements import Requirement

from launcher import install
from launcher.errors import NotReady
from launcher.install import Step
from launcher.machine import Trainer

WITH_PIP = Trainer(
    python=Path("/env/my bin/python"), source="a test", version=(3, 12, 1), packages={"pip": "26"}
)


@pytest.fixture(autouse=True)
def no_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def names(steps: tuple[Step, ...]) -> list[list[str]]:
    """The packages of each step, without pip's own words."""
    found = []
    for step in steps:
        words = [w for w in step.argv[step.argv.index("install") + 1 :] if not w.startswith("--no")]
        words = words[2:] if words[0] == "-c" else words
        found.append([Requirement(word).name for word in words])
    return found


def test_everything_of_the_extras_is_installed() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = extras["optional-dependencies"]
    for extra in ("trl", "open-instruct"):
        told = {name for step in names(install.steps(WITH_PIP, extra, gpus=True)) for name in step}
        asked = {Requirement(text).name for text in (*wanted[extra], *wanted["gpu"])}
        assert asked <= told
    assert install.wanted("gpu") == tuple(wanted["gpu"])


def test_what_imports_torch_while_it_is_built_comes_after_it() -> None:
    steps = install.steps(WITH_PIP, "open-instruct", gpus=True)
    order = names(steps)
    assert "torch" in order[0] and "deepspeed" not in order[0]
    assert {"setuptools", "wheel", "ninja", "hjson"} <= set(order[1])
    assert order[2:] == [["deepspeed"], ["flash-attn"]]
    assert steps[2].env == {"DS_BUILD_OPS": "0"}
    assert all("--no-build-isolation" in step.argv for step in steps[2:])
    assert "flash-attn" not in str(names(install.steps(WITH_PIP, "open-instruct", gpus=False)))


def test_it_is_what_the_makefile_does() -> None:
    """Its commands install the same packages, by the names of launch's extras."""
    recipe = (REPOSITORY / "Makefile").read_text().partition("$(VENV)/open-instruct:")[2]
    first, second, third = recipe.strip().splitlines()[1:4]
    steps = install.steps(WITH_PIP, "open-instruct", gpus=False)
    for tool in first.partition("constraints.txt ")[2].split():
        assert tool in names(steps)[1]
    assert "DS_BUILD_OPS=0" in second and "--no-build-isolation deepspeed" in second
    assert "'.[open-instruct]'" in third
    versions = f"-c {REPOSITORY / 'constraints.txt'}"
    assert all(versions in " ".join(step.argv) for step in steps)


def test_single_packages() -> None:
    (step,) = install.packages(WITH_PIP, ["ray>=2", "wandb"])
    assert step.argv[:4] == ("/env/my bin/python", "-m", "pip", "install")
    assert step.argv[-2:] == ("ray>=2", "wandb")
    assert step.shell().startswith("'/env/my bin/python' -m pip install")
    # the build finds no torch where none is there
    assert ["torch"] in names(install.packages(WITH_PIP, ["flash-attn"]))
    ready = replace(
        WITH_PIP, packages={"pip": "1", "torch": "2", **dict.fromkeys(install.BUILD, "1")}
    )
    assert names(install.packages(ready, ["flash-attn"])) == [["flash-attn"]]


def test_what_launch_was_not_tested_with_comes_last_and_under_no_constraints() -> None:
    here = {"pip": "1", "torch": "2.10", "numpy": "2.4"}
    kept = replace(WITH_PIP, packages=here)
    ours, other = install.packages(kept, ["vllm>=0.19", "ray>=2"])
    assert "-c" in ours.argv and ours.argv[-1] == "ray>=2"
    # numpy may change for it, what trains may not
    assert other.argv[-3:] == ("install", "vllm>=0.19", "torch==2.10")
    (alone,) = install.packages(kept, ["vllm"], held=False)
    assert alone.argv[-2:] == ("install", "vllm")
    *_, last = install.steps(
        WITH_PIP, "open-instruct", gpus=True, more=["vllm", "ray", "deepspeed"]
    )
    assert last.argv[4] == "vllm" and "torch==2.13.0" in last.argv
    assert "ray" not in last.argv and "deepspeed" not in str(last.argv)
    trl = names(install.steps(WITH_PIP, "trl", gpus=False, more=["deepspeed==0.19.8"]))
    assert trl[-1] == ["deepspeed"]


def test_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(WITH_PIP, packages={})
    first, second = install.packages(bare, ["ray"])
    assert first.argv == ("/env/my bin/python", "-m", "ensurepip", "--upgrade")
    assert second.argv[1:3] == ("-m", "pip")
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (only,) = install.packages(bare, ["ray"])
    assert only.argv[:5] == (str(uv), "pip", "install", "--python", "/env/my bin/python")


def test_steps_are_done_in_order_and_never_by_a_shell(tmp_path: Path) -> None:
    write = "import os, sys; open(sys.argv[1], 'a').write(os.environ.get('SAID', '') + sys.argv[2])"
    place = str(tmp_path / "done")
    steps = [
        Step(
            argv=(sys.executable, "-c", write, place, "$(id); `id`\n"), why="one", env={"SAID": "<"}
        ),
        Step(argv=(sys.executable, "-c", write, place, "second"), why="two"),
    ]
    told = tmp_path / "told"
    with told.open("w") as out:
        install.run(steps, os.environ, out)
    assert Path(place).read_text() == "<$(id); `id`\nsecond"
    assert told.read_text().startswith("+ SAID=")


def test_a_step_that_fails_ends_it(tmp_path: Path) -> None:
    place = tmp_path / "touched"
    steps = [Step(argv=("false",), why="ray"), Step(argv=("touch", str(place)), why="more")]
    with (tmp_path / "out").open("w") as out, pytest.raises(NotReady) as caught:
        install.run(steps, os.environ, out)
    (finding,) = caught.value.findings
    assert finding.code == "install-failed"
    assert finding.message.startswith("installing ray failed: ")
    assert f"then touch {place}" in (finding.help or "")
    assert not place.exists()


# --- from a source tree, nothing of it installed -----------------------------------------------------


def uninstalled(folder: Path, project: str | None, *words: str) -> Any:
    """What a command answers from a copy of the package, beside which this pyproject.toml lies.

    Its dependencies are there, the metadata of launch are not.
    """
    tree, site = folder / "tree", folder / "site"
    shutil.copytree(
        REPOSITORY / "launcher", tree / "launcher", ignore=shutil.ignore_patterns("__pycache__")
    )
    if project is not None:
        (tree / "pyproject.toml").write_text(project, encoding="utf-8")
    site.mkdir()
    names = ("omegaconf", "packaging", "rich", "typer", "yaml")
    for place in {Path(import_module(name).__file__ or "").parents[1] for name in names}:
        for entry in place.iterdir():
            if "launcher" not in entry.name and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    # -S: what is installed for this interpreter is not found, but for what was linked
    done = subprocess.run(
        [sys.executable, "-S", "-c", "from launcher.cli import main; main()", *words],
        env={**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{site}"}, cwd=folder,
        capture_output=True, text=True,
    )  # fmt: skip
    assert "bug in launch" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def test_a_file_is_judged_without_metadata(tmp_path: Path) -> None:
    (tmp_path / "stage.yaml").write_text("stage: sft\n", encoding="utf-8")
    words = ("validate-config", "stage.yaml", "--format", "json")
    found = uninstalled(tmp_path, None, *words)["findings"]
    assert "no-model" in {finding["code"] for finding in found}


def test_no_plan_is_made_of_packages_that_nobody_names(tmp_path: Path) -> None:
    told = uninstalled(tmp_path, None, "doctor", "--install", "--format", "json")
    assert not told["ok"]
    assert [finding["code"] for finding in told["findings"]] == ["packages-unknown"]
