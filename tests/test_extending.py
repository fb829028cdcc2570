"""What docs/internals.md says of adding something: a piece of code, and at most one row of a table."""

import ast
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


class Extended:
    """A copy of launch to which one thing is added: in one file, and in one row of one table."""

    def __init__(self, place: Path) -> None:
        self.place = place
        shutil.copytree(
            REPOSITORY / "launcher",
            place / "launcher",
            ignore=shutil.ignore_patterns("__pycache__"),
        )

    def add(self, path: str, table: str, row: str, code: str = "") -> None:
        """Write `row` as the first of the table of this name, and `code` before that table."""
        module = self.place / "launcher" / path
        text = module.read_text()
        (node,) = (
            one
            for one in ast.parse(text).body
            if isinstance(one, ast.Assign | ast.AnnAssign)
            and table in ast.unparse(one).partition("=")[0].partition(":")[0]
        )
        assert isinstance(node.value, ast.Tuple | ast.Dict)
        lines = text.splitlines(keepends=True)
        at, opens = node.value.lineno - 1, node.value.col_offset + 1
        lines[at] = f"{lines[at][:opens]}{row}, {lines[at][opens:]}"
        lines.insert(node.lineno - 1, f"{code}\n\n")
        module.write_text("".join(lines))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.place, env={**os.environ, "PYTHONPATH": str(self.place)},
            capture_output=True, text=True,
        )  # fmt: skip

    def launch(self, *words: str, code: int = 0) -> Any:
        """The answer of a command, as JSON; `code` is the exit code that it must have."""
        done = self.run("-m", "launcher", *words, "--format", "json")
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    def python(self, code: str) -> str:
        """What a program prints that imports this launch."""
        done = self.run("-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def findings(self, *words: str, code: int = 0) -> list[Any]:
        """The findings of a command; that the demo's data are not here is none of them."""
        return [
            one
            for one in self.launch(*words, code=code)["findings"]
            if one["code"] != "missing-data"
        ]


@pytest.fixture
def extended(tmp_path: Path) -> Extended:
    return Extended(tmp_path)


DEMO = REPOSITORY / "configs" / "demo" / "sft.yaml"


def test_a_rule_is_a_generator_and_its_name(extended: Extended) -> None:
    rule = """
        def made_up_seed(values: Values) -> Iterator[Finding]:
            if values["seed"] == 13:
                yield say("error", "made-up-seed", "seed", "`seed` is 13", layer="launch")
    """
    extended.add("rules/trl/arguments.py", "_SHARED", "made_up_seed", dedent(rule))
    stage = extended.place / "sft.yaml"
    stage.write_text(DEMO.read_text() + "  seed: 13\n")
    (found,) = extended.findings("validate-config", str(stage), code=3)
    assert (found["code"], found["key"]) == ("made-up-seed", "args.seed")
    assert extended.findings("validate-config", str(DEMO)) == []


def test_a_command_is_a_function(extended: Extended) -> None:
    command = """
        @app.command(epilog="Example: launch made-up configs/demo/sft.yaml")
        @takes("format")
        def made_up(shared: Shared) -> Exit:
            \"\"\"Answer, and no more.\"\"\"
            return answer("made-up", shared.format, {"made": "up"}, ["made up"], (), Exit.OK)
    """
    with (extended.place / "launcher/cli/commands/planning.py").open("a") as module:
        module.write(dedent(command))
    assert extended.launch("made-up")["data"] == {"made": "up"}


def test_a_point_of_the_verdict_is_a_module_and_its_row(extended: Extended) -> None:
    module = """
        from launcher.verdict.evidence import Evidence
        from launcher.verdict.points import Observation


        def observe_made_up(evidence: Evidence, _expected: str | None) -> Observation:
            last = evidence.last_step or 0
            return Observation("long" if last > 1 else "short", unwanted=last > 1, detail={"last": last})
    """
    row = """PointType(
        name="made_up", states=("short", ANY), observed_in="made_up", enforced=True, label="made up",
        events=("made_up",), sentence=lambda state, detail: f"{state} with {detail['last']} steps",
    )"""
    log = str(DATA / "logs" / "trl_sft.log")
    before = extended.launch("check", log)
    (extended.place / "launcher/verdict/made_up.py").write_text(dedent(module))
    extended.add("config/points.py", "POINTS", row)

    # it is judged, its sentence stands on the page, and the live panel takes its event
    answer = extended.launch("check", log, code=1)
    (point,) = (one for one in answer["data"]["points"] if one["name"] == "made_up")
    assert (point["state"], point["ok"]) == ("long", False)
    assert (before["data"]["status"], answer["data"]["status"]) == ("pass", "fail")
    page = extended.place / "page.html"
    extended.launch("report", log, "--output", str(page))
    assert "long with 150 steps" in page.read_text()
    panel = (
        "from launcher.report.progress import Progress; panel = Progress(None);"
        "panel.add_event({'event': 'made_up', 'state': 'short'}); print(panel.shown)"
    )
    assert extended.python(panel) == "{'made up': 'short'}"

    # `expect:` takes its states and no others, and the probe is told to enforce it
    stage = extended.place / "sft.yaml"
    stage.write_text(f"extends: {DEMO}\nexpect: {{made_up: long}}\n")
    (finding,) = extended.findings("validate-config", str(stage), code=3)
    assert finding["message"] == "invalid value `long` for `expect.made_up`"
    stage.write_text(f"extends: {DEMO}\nexpect: {{made_up: short}}\n")
    assert extended.findings("validate-config", str(stage)) == []
    planned = extended.launch("sft", str(stage), "--gpus", "0", "--dry-run")
    assert json.loads(planned["data"]["env"]["LAUNCH_PROBE"])["expect"]["made_up"] == "short"


def is_judged_and_planned(extended: Extended, text: str) -> None:
    stage = extended.place / "stage.yaml"
    stage.write_text(f"{text}  sed: 1\n")
    (found,) = extended.findings("validate-config", str(stage), code=3)
    assert (found["code"], found["key"]) == ("unknown-key", "args.sed")
    stage.write_text(text)
    answer = extended.launch("sft", str(stage), "--gpus", "0", "--dry-run")
    assert "--use_cpu" in answer["data"]["argv"]


def test_an_entry_script_is_a_file_and_its_row(extended: Extended) -> None:
    """Its description says what it takes; the probe is told which of its modules to watch, and with what."""
    pytest.importorskip("trl")
    described = """
        from dataclasses import replace

        from launcher.upstream.scripts import trl_sft

        SCRIPT = replace(
            trl_sft.SCRIPT,
            stage="sft",
            watchers={"made_up.trainer": "watch_preparation"},
            stand_ins={"made_up.cuda": "supply_cuda_counters"},
        )
    """
    (extended.place / "launcher/upstream/scripts/trl_twin.py").write_text(dedent(described))
    row = '"sft_twin": trl_twin.SCRIPT'
    extended.add("upstream/trl.py", "STAGES", row, "from launcher.upstream.scripts import trl_twin")
    text = f"script: sft_twin\n{DEMO.read_text()}"
    is_judged_and_planned(extended, text)
    answer = extended.launch("sft", str(extended.place / "stage.yaml"), "--gpus", "0", "--dry-run")
    settings = json.loads(answer["data"]["env"]["LAUNCH_PROBE"])
    assert settings["watchers"] == {"made_up.trainer": "watch_preparation"}
    assert settings["stand_ins"] == {"made_up.cuda": "supply_cuda_counters"}


def test_a_trainer_is_a_module_and_its_names(extended: Extended) -> None:
    pytest.importorskip("trl")
    code = "from launcher.upstream.trl import *  # noqa: F403\n\nNAME = 'made_up'\n"
    (extended.place / "launcher/upstream/made_up.py").write_text(code)
    extended.add(
        "upstream/trainers.py",
        "BACKENDS",
        '"made_up": made_up',
        "from launcher.upstream import made_up",
    )
    extended.add("config/keys.py", "TRAINERS", '"made_up"')
    is_judged_and_planned(extended, DEMO.read_text().replace("backend: trl", "backend: made_up"))
