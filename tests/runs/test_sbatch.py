"""A run as a batch script: nothing of a config becomes shell, faulty options are findings."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, PATIENCE_S

from launcher.errors import Finding
from launcher.runs import slurm

GOLDEN = DATA / "sbatch"
LAUNCH = ["env", "PYTHONPATH=/opt/launch", "/env/bin/python", "-m", "launcher"]
RUN = Path("/runs/20260101T000000Z-sft-demo")
NASTY = [
    'it\'s "x" -n',
    "$(touch pwned)`touch pwned`; touch pwned",
    "a\\b * ~ $HOME",
    "100 %j ü\U0001f600\n#SBATCH --uid=0",
]


def complain(code: str, key: str, message: str, help: str | None) -> Finding:
    return Finding(severity="error", layer="launch", code=code, key=key, message=message, help=help)


def batch_script(folder: Path = RUN, launch: list[str] = LAUNCH, **changes: Any) -> str:
    settings = {"nodes": 2, "gpus": 8, "options": {}, **changes}
    return slurm.render_batch_script(folder, [*launch, "exec", str(folder)], **settings)


def write_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def run_script(shell: str, script: Path, programs: Path, **environ: str) -> int:
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(
        [shell, str(script)], env={"PATH": path, **environ}, cwd=script.parent, timeout=PATIENCE_S
    )
    return done.returncode


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpu", {"options": {"partition": "gpu", "time": "1-00:00:00", "comment": 'a "b" $(c)'}}),
        ("cpu", {"gpus": 0, "nodes": 1, "options": {"exclusive": None}}),
        ("stays", {"options": {"no-requeue": None, "gpus-per-node": "h100:8"}}),
        ("odd_folder", {"folder": Path("/runs/a\\b 'c'\nd")}),
    ],
)
def test_golden(name: str, changes: dict[str, Any]) -> None:
    text = batch_script(**changes)
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_folder_is_never_shell(value: str, shell: str, tmp_path: Path) -> None:
    """The script is run, with an `srun` that only starts its command."""
    folder = tmp_path / value.replace("/", "-")
    folder.mkdir()
    programs = tmp_path / "bin"
    skip_options = 'while [ "${1#--}" != "$1" ]; do shift; done'
    write_program(programs, "srun", f'{skip_options}\nexec "$@"')
    write_program(programs, "launch", 'printf "%s\\0" "$@" >>"$OUT"')
    script = tmp_path / "script.sh"
    script.write_bytes(os.fsencode(batch_script(folder, [str(programs / "launch"), value])))
    out = tmp_path / "out"

    assert run_script(shell, script, programs, OUT=str(out)) == 0

    words = [value, "exec", str(folder)]
    assert out.read_bytes().decode().split("\0") == [*words, "--prepare", *words, ""]
    assert not list(tmp_path.rglob("pwned"))
    assert "#SBATCH --uid=0" not in script.read_text().splitlines()


@pytest.mark.parametrize(
    ("prepared", "code"),
    [pytest.param("0", 7, id="the step's"), pytest.param("5", 5, id="it could not be prepared")],
)
def test_the_exit_code_of_the_job(tmp_path: Path, prepared: str, code: int) -> None:
    programs = tmp_path / "bin"
    write_program(programs, "srun", "exit 7")
    write_program(programs, "launch", f"exit {prepared}")
    script = tmp_path / "script.sh"
    script.write_text(batch_script(tmp_path, ["launch"]))
    assert run_script("sh", script, programs) == code


def test_options_are_read_as_those_of_sbatch() -> None:
    options = {
        "partition": "gpu",
        "cpus_per_task": 16,
        "exclusive": True,
        "mem": None,
        "hold": False,
        "account": "it's $(x)",
        "requeue": True,
    }
    expected = {
        "partition": "gpu",
        "cpus-per-task": "16",
        "exclusive": None,
        "account": "it's $(x)",
    }
    assert slurm.read_options(options, complain) == (expected, [])
    assert slurm.read_options({"requeue": False}, complain) == ({"no-requeue": None}, [])


@pytest.mark.parametrize(
    ("options", "code", "help"),
    [
        ({"time limit": 3}, "bad-slurm-option", "sbatch --help"),
        ({"nodes": 2}, "reserved-slurm-option", "--nodes"),
        ({"no_requeue": True}, "reserved-slurm-option", "requeue: false"),
        ({"comment": "a\nb"}, "bad-slurm-option", ""),
        ({"requeue": "yes"}, "bad-slurm-option", ""),
        ("gpu", "bad-slurm", "slurm: {"),
    ],
)
def test_options_that_cannot_be(options: Any, code: str, help: str) -> None:
    read, (finding,) = slurm.read_options(options, complain)
    assert read == {}
    assert finding.code == code
    assert help in (finding.help or "")
    assert "\n" not in finding.message


@pytest.mark.parametrize(
    ("options", "gpus", "advised"),
    [({}, 8, True), ({"exclusive": None}, 8, False), ({"cpus-per-task": "4"}, 0, False)],
)
def test_more_than_a_single_core_is_advised(
    options: dict[str, str | None], gpus: int, advised: bool
) -> None:
    help = slurm.warn_of_single_cpu(options, gpus)
    assert ("cpus_per_task: 64" in str(help)) == advised
