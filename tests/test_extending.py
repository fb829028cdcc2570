"""What CONTRIBUTING.md says of extensions: each adds one thing through its registration."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from conftest import DATA, REPOSITORY

DEMO = REPOSITORY / "configs" / "demo" / "sft.yaml"
LOG = DATA / "logs" / "trl_sft.log"


class Extension:
    """The module `house`, and launch as it is with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, code: str) -> None:
        (self.folder / "house.py").write_text(dedent(code))

    def stage_file(self, text: str) -> str:
        path = self.folder / "stage.yaml"
        path.write_text(text)
        return str(path)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environ = {
            **os.environ,
            "LAUNCH_EXTENSIONS": "house",
            "PYTHONPATH": f"{self.folder}{os.pathsep}{REPOSITORY}",
        }
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True)

    def launch(self, *words: str, code: int = 0) -> Any:
        """The JSON answer of a command; `code` is the exit code that it must have."""
        process = self.run("-m", "launcher", *words, "--format", "json")
        assert process.returncode == code, process.stdout + process.stderr
        return json.loads(process.stdout)

    def finding(self, stage_file: str) -> tuple[str, str, str]:
        """The code, key and message of the one finding that makes a stage file invalid."""
        answer = self.launch("validate-config", stage_file, code=3)
        (error,) = [each for each in answer["findings"] if each["severity"] == "error"]
        return error["code"], error["key"], error["message"]

    def plan(self, stage_file: str) -> Any:
        return self.launch("sft", stage_file, "--gpus", "0", "--dry-run")["data"]


@pytest.fixture
def extension(tmp_path: Path) -> Extension:
    return Extension(tmp_path)


@pytest.fixture
def example(extension: Extension) -> Extension:
    """The extension that CONTRIBUTING.md shows."""
    shutil.copy(DATA / "extension" / "house.py", extension.folder)
    return extension


def test_a_rule_judges_stage_files(example: Extension) -> None:
    unlucky = example.stage_file(f"{DEMO.read_text()}  seed: 13\n")
    assert example.finding(unlucky) == ("unlucky-seed", "args.seed", "`seed` is 13")

    lucky = example.stage_file(f"{DEMO.read_text()}  seed: 14\n")
    example.launch("validate-config", lucky)


def test_a_command_is_called_and_listed(example: Extension) -> None:
    assert example.launch("house")["data"] == {"name": "Hilbert"}

    help_page = example.run("-m", "launcher", "--help").stdout
    assert "Name the laboratory." in help_page


POINT = """
    from launcher.config.keys import register_point
    from launcher.config.points import ANY, PointType
    from launcher.verdict.evidence import Evidence
    from launcher.verdict.points import Observation


    def observe_duration(evidence: Evidence, _expected: str | None) -> Observation:
        is_long = evidence.last_step > 1
        state = "long" if is_long else "short"
        return Observation(state, unwanted=is_long, detail={"last": evidence.last_step})


    def describe(state: str, detail: dict) -> str:
        return f"{state} with {detail['last']} steps"


    register_point(
        PointType(
            name="duration",
            states=("short", ANY),
            observed_in=__name__,
            enforced=True,
            label="how long",
            events=("duration",),
            sentence=describe,
        )
    )
"""


def test_a_point_is_judged_and_shown(extension: Extension) -> None:
    extension.write(POINT)

    answer = extension.launch("check", str(LOG), code=1)
    point = answer["data"]["points"][-1]
    assert (point["name"], point["state"], point["ok"]) == ("duration", "long", False)
    assert answer["data"]["status"] == "fail"

    page = extension.folder / "page.html"
    extension.launch("report", str(LOG), "--output", str(page))
    assert "long with 150 steps" in page.read_text()


def test_the_live_panel_shows_the_state_of_a_point(extension: Extension) -> None:
    extension.write(POINT)
    code = """
        from launcher.machine import extensions
        from launcher.report.progress import Progress

        extensions.load()
        panel = Progress(None)
        panel.add_event({"event": "duration", "state": "short"})
        print(panel.shown)
    """
    assert extension.run("-c", dedent(code)).stdout == "{'how long': 'short'}\n"


def test_a_stage_file_expects_a_state_of_a_point(extension: Extension) -> None:
    extension.write(POINT)

    unknown = extension.stage_file(f"extends: {DEMO}\nexpect: {{duration: long}}\n")
    assert extension.finding(unknown) == (
        "bad-expect",
        "expect.duration",
        "invalid value `long` for `expect.duration`",
    )

    expecting = extension.stage_file(f"extends: {DEMO}\nexpect: {{duration: short}}\n")
    probe = json.loads(extension.plan(expecting)["env"]["LAUNCH_PROBE"])
    assert probe["expect"]["duration"] == "short"


@pytest.mark.slow
def test_a_script_is_planned_with_what_the_probe_watches(extension: Extension) -> None:
    pytest.importorskip("trl")
    extension.write("""
        from dataclasses import replace

        from launcher.upstream.scripts import trl_sft
        from launcher.upstream.trainers import register_script

        entry = replace(
            trl_sft.SCRIPT,
            stage="sft",
            watchers={"house.trainer": "watch_preparation"},
            stand_ins={"house.cuda": "supply_cuda_counters"},
        )
        register_script("trl", "sft_twin", entry)
    """)
    stage_file = extension.stage_file(f"script: sft_twin\n{DEMO.read_text()}")
    plan = extension.plan(stage_file)
    probe = json.loads(plan["env"]["LAUNCH_PROBE"])
    assert "--use_cpu" in plan["argv"]
    assert probe["watchers"] == {"house.trainer": "watch_preparation"}
    assert probe["stand_ins"] == {"house.cuda": "supply_cuda_counters"}


def test_a_trainer_is_judged_and_planned(extension: Extension) -> None:
    pytest.importorskip("trl")
    extension.write("""
        import sys

        from launcher.upstream.trainers import register_trainer
        from launcher.upstream.trl import *  # noqa: F403

        NAME = "house"
        register_trainer(sys.modules[__name__])
    """)
    text = DEMO.read_text().replace("backend: trl", "backend: house")
    misspelt = extension.stage_file(f"{text}  sed: 1\n")
    code, key, _ = extension.finding(misspelt)
    assert (code, key) == ("unknown-key", "args.sed")

    plan = extension.plan(extension.stage_file(text))
    assert "--use_cpu" in plan["argv"]


def test_an_extension_with_a_mistake_is_named_with_its_line(extension: Extension) -> None:
    extension.write("\nimport launcher\nlauncher.rules\n")
    (error,) = extension.launch("runs", code=5)["findings"]
    assert (error["code"], error["file"], error["line"]) == (
        "bad-extension",
        str(extension.folder / "house.py"),
        3,
    )


def test_a_missing_extension_is_named(extension: Extension) -> None:
    (error,) = extension.launch("runs", code=5)["findings"]
    assert error["message"] == (
        "LAUNCH_EXTENSIONS names `house`, whose import fails: "
        "ModuleNotFoundError: No module named 'house'"
    )
    assert error["file"] is None
