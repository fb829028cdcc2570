"""What `launch plan` says of the stage files that ship: a change of the planner is a diff to read.

`LAUNCH_GOLDEN=write` rewrites the files. Row lengths and counts are stated here, not looked up: the
files are the same on every machine.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
from conftest import DATA, REPOSITORY, STAGE_FILES
from typer.testing import CliRunner

from launcher.cli.commands import app
from launcher.config import load
from launcher.upstream import locate

GOLDEN = DATA / "plans"
CARD = ("--gpu", "H100", "--gpu-memory", "80", "--price", "2.5", "--fit")
# MEAN:MAX tokens a row and rows, by data set
ROWS = {
    "allenai/tulu-3-sft-mixture": ("665:4096", 939_000),
    "allenai/tulu-3-sft-olmo-2-mixture": ("665:4096", 939_000),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": ("600:2048", 272_000),
    "allenai/olmo-2-1124-7b-preference-mix": ("900:4096", 366_000),
    "trl-lib/Capybara": ("700:4096", 200),
    "trl-lib/ultrafeedback_binarized": ("500:2048", 1_000),
}


def planned_files() -> list[str]:
    """The demos are for the CPU, whose memory is not planned."""
    paths = [path for path in STAGE_FILES if path.parent.name != "demo"]
    return [str(path.relative_to(REPOSITORY)) for path in paths]


NAMES = planned_files()


def golden_file(name: str) -> Path:
    stem = name.removeprefix("configs/").removesuffix(".yaml").replace("/", "-")
    return GOLDEN / f"{stem}.txt"


def header_overrides(name: str) -> list[list[str]]:
    """Of each command in a file's header the words between the file and its counts of GPUs."""
    header, _, _ = (REPOSITORY / name).read_text(encoding="utf-8").partition("\nstage:")
    overrides = []
    for line in header.splitlines():
        command = line.lstrip("# ")
        if command.startswith((f"launch sft {name}", f"launch dpo {name}")):
            words = shlex.split(command)
            overrides.append(words[3 : words.index("--gpus")])
    return overrides


def stated_terms(name: str) -> list[str]:
    """How long and how many the rows are, and how large a model is that is not here yet."""
    args = load.load(REPOSITORY / name).args
    mixer = args.get("dataset_mixer_list") or args.get("mixer_list") or [args["dataset_name"], 1.0]
    dataset, share, *_ = mixer
    tokens, rows = ROWS[str(dataset)]
    terms = ["--row-tokens", tokens]
    if isinstance(share, float):
        terms += ["--rows", str(int(rows * share))]
    model = str(args["model_name_or_path"])
    if model.startswith("output/tulu"):
        terms += ["--shape", "Qwen/Qwen2.5-7B"]
    elif model.startswith("output/"):
        terms += ["--shape", "meta-llama/Llama-3.1-8B"]
    return terms


def plan_text(name: str, overrides: list[str]) -> str:
    """The command and what it prints, without what differs between machines."""
    options = [*overrides, "--gpus", "1,2,8", *stated_terms(name), *CARD]
    command = ["plan", str(REPOSITORY / name), *options]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    streams = [text.strip() for text in (result.stdout, result.stderr) if text.strip()]
    output = "\n\n".join(streams).replace(f"{REPOSITORY}/", "")
    lines = [line.rstrip() for line in output.splitlines()]
    shown = shlex.join([name, *options])
    return "\n".join([f"$ launch plan {shown}", "", *lines, ""])


@pytest.fixture(autouse=True)
def _empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPUs, models, caches or earlier runs; of the pinned source its committed snapshot."""
    for name in ("LAUNCH_CACHE", "HF_HOME", "LAUNCH_RUNS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LAUNCH_OPEN_INSTRUCT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(locate, "SUBMODULE", tmp_path / "none")
    monkeypatch.setattr(locate, "FOUND_IN", ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_golden_plan(name: str) -> None:
    plans = [plan_text(name, overrides) for overrides in header_overrides(name)]
    text = "\n\n".join(plans)

    # nothing of the machine stands in it
    assert not re.search(r"(?<![\w.-])/(home|root|tmp|work|Users|private)/", text)
    golden = golden_file(name)
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_every_file_has_its_golden_plan() -> None:
    assert set(GOLDEN.glob("*.txt")) == {golden_file(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_header_of_a_file_has_a_command(name: str) -> None:
    assert header_overrides(name)
