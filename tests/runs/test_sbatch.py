"""A run as a batch script: golden, nothing of a config becomes shell, faulty options are findings."""

import itertools
import os
import subprocess
from collections.abc import Sequence
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
    "it's \"x\" -n", "$(touch pwned)`touch pwned`; touch pwned", "a\\b * ~ $HOME",
    "100 %j ü\U0001f600\n#SBATCH --uid=0",
]  # fmt: skip


def complain(code: str, key: str, message: str, help: str | None) -> Finding:
    return Finding(severity="error", layer="launch", code=code, key=key, message=message, help=help)


def made(folder: Path = RUN, launch: Sequence[str] = LAUNCH, **changed: Any) -> str:
    given = {"nodes": 2, "gpus": 8, "options": {}, **changed}
    return slurm.batch_script(folder, [*launch, "exec", str(folder)], **given)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("gpu", {"options": {"partition": "gpu", "time": "1-00:00:00", "comment": 'a "b" $(c)'}}),
        ("cpu", {"gpus": 0, "nodes": 1, "options": {"exclusive": None}}),
        ("stays", {"options": {"no-requeue": None, "gpus-per-node": "h100:8"}}),
        ("odd_folder", {"folder": Path("/runs/a\\b 'c'\nd")}),
    ],
)
def test_golden(name: str, changed: dict[str, Any]) -> None:
    text = made(**changed)
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("value", NASTY)
def test_a_folder_is_never_shell(value: str, tmp_path: Path) -> None:
    """The script is run, with an `srun` that only starts what it is told to."""
    folder = tmp_path / value.replace("/", "-")
    folder.mkdir()
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "srun").write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    (bin / "launch").write_text('#!/bin/sh\nprintf "%s\\0" "$@" >>"$OUT"\n')
    for tool in ("srun", "launch"):
        (bin / tool).chmod(0o755)
    out = tmp_path / "out"
    script = tmp_path / "script.sh"
    script.write_bytes(os.fsencode(made(folder, launch=[str(bin / "launch"), value])))
    environ = {"PATH": f"{bin}:{os.environ['PATH']}", "OUT": str(out)}
    for shell in ("sh", "bash"):
        subprocess.run(
            [shell, str(script)], env=environ, check=True, cwd=tmp_path, timeout=PATIENCE_S
        )
    words = [value, "exec", str(folder)]
    expected = [*words, "--prepare", *words] * 2
    assert out.read_bytes().decode().split("\0")[:-1] == expected
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("value", NASTY)
def test_what_sbatch_reads_is_ours(value: str) -> None:
    """No folder and no name adds a line that sbatch would take for an option."""

    def read(text: str) -> list[str]:
        # up to the first command
        head = itertools.takewhile(lambda line: line[:1] in ("#", ""), text.split("\n"))
        return [line for line in head if line.startswith("#SBATCH")]

    told = read(made(Path("/runs") / value.replace("/", "-")))
    names = [line.partition("=")[0] for line in told]
    assert names == [line.partition("=")[0] for line in read(made())]
    name = told[0].partition("=")[2]
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def test_the_end_of_a_step_is_the_end_of_the_job(tmp_path: Path) -> None:
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, text in {"srun": "exit 7", "launch": 'exit "${PREPARED:-0}"'}.items():
        (bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin / name).chmod(0o755)
    environ = {"PATH": f"{bin}:{os.environ['PATH']}"}
    argv = ["sh", "-c", made(tmp_path, launch=["launch"])]
    assert subprocess.run(argv, env=environ, timeout=PATIENCE_S).returncode == 7
    # a run that cannot be prepared does not begin
    environ["PREPARED"] = "5"
    assert subprocess.run(argv, env=environ, timeout=PATIENCE_S).returncode == 5


def test_options() -> None:
    given = {
        "partition": "gpu", "cpus_per_task": 16, "time": "12:00:00", "exclusive": True,
        "mem": None, "hold": False, "account": "it's $(x)", "requeue": True,
    }  # fmt: skip
    assert slurm.read_options(given, complain) == (
        {
            "partition": "gpu",
            "cpus-per-task": "16",
            "time": "12:00:00",
            "exclusive": None,
            "account": "it's $(x)",
        },
        [],
    )
    assert slurm.read_options({"requeue": False}, complain) == ({"no-requeue": None}, [])


@pytest.mark.parametrize(
    ("given", "code", "help"),
    [
        ({"time limit": 3}, "bad-slurm-option", "sbatch --help"),
        ({"nodes": 2}, "reserved-slurm-option", "--nodes"),
        ({"no_requeue": True}, "reserved-slurm-option", "requeue: false"),
        ({"comment": "a\nb"}, "bad-slurm-option", None),
        ({"requeue": "yes"}, "bad-slurm-option", None),
        ("gpu", "bad-slurm", "slurm: {"),
    ],
)
def test_options_that_cannot_be(given: Any, code: str, help: str | None) -> None:
    options, findings = slurm.read_options(given, complain)
    assert options == {}
    assert [finding.code for finding in findings] == [code]
    assert help is None or help in (findings[0].help or "")
    assert "\n" not in findings[0].message


def test_a_single_core_is_said() -> None:
    assert "cpus_per_task: 64" in str(slurm.single_cpu_help({}, 8))
    assert slurm.single_cpu_help({"exclusive": None}, 8) is None
    assert slurm.single_cpu_help({"cpus-per-task": "4"}, 0) is None
