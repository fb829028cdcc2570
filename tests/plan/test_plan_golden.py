"""What `launch plan` says of the stage files that ship: a change of the planner is a diff to read.

`LAUNCH_GOLDEN=write` rewrites the files. Row lengths and counts are stated here, not looked up: the files
are the same on every machine.
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
# the demos are for the CPU, whose memory is not planned
CONFIGS = [path for path in STAGE_FILES if path.parent.name != "demo"]
NAMES = [str(path.relative_to(REPOSITORY)) for path in CONFIGS]
CARD = ("--gpu", "H100", "--gpu-memory", "80", "--price", "2.5", "--fit")
# MEAN:MAX tokens a row and rows, by data set
DATA = {
    "allenai/tulu-3-sft-mixture": ("665:4096", 939_000),
    "allenai/tulu-3-sft-olmo-2-mixture": ("665:4096", 939_000),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": ("600:2048", 272_000),
    "allenai/olmo-2-1124-7b-preference-mix": ("900:4096", 366_000),
    "trl-lib/Capybara": ("700:4096", 200),
    "trl-lib/ultrafeedback_binarized": ("500:2048", 1_000),
}


def commands(name: str) -> list[list[str]]:
    """The commands of a file's header, each as the words of a plan without the counts of GPUs."""
    found = []
    for line in (REPOSITORY / name).read_text(encoding="utf-8").split("\nstage:")[0].splitlines():
        words = shlex.split(line.lstrip("# ")) if line.lstrip("# ").startswith("launch ") else []
        if words[1:2] in (["sft"], ["dpo"]) and words[2] == name:
            found.append(words[2 : words.index("--gpus")])
    return found


def terms(name: str) -> list[str]:
    """How long and how many the rows of a file's data are, and how large a model that is not here yet."""
    args = load.load(REPOSITORY / name).args
    listed = args.get("dataset_mixer_list") or args.get("mixer_list") or [args["dataset_name"], 1.0]
    tokens, rows = DATA[str(listed[0])]
    words = ["--row-tokens", tokens]
    if isinstance(listed[1], float):
        words += ["--rows", str(int(rows * listed[1]))]
    model = str(args["model_name_or_path"])
    if model.startswith("output/"):
        words += ["--shape", "Qwen/Qwen2.5-7B" if "tulu" in model else "meta-llama/Llama-3.1-8B"]
    return words


def told(words: list[str]) -> str:
    full = [*words, "--gpus", "1,2,8", *terms(words[0]), *CARD]
    run = CliRunner().invoke(
        app, ["plan", str(REPOSITORY / words[0]), *full[1:]], catch_exceptions=False
    )
    assert run.exit_code == 0, run.output
    said = "\n\n".join(part.strip() for part in (run.stdout, run.stderr) if part.strip())
    lines = [line.rstrip() for line in said.replace(f"{REPOSITORY}/", "").splitlines()]
    return "\n".join([f"$ launch plan {shlex.join(full)}", "", *lines, ""])


@pytest.fixture(autouse=True)
def nothing_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPUs, no models, no caches, no earlier runs; of the pinned source its committed snapshot."""
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
    made = "\n\n".join(told(words) for words in commands(name))
    # nothing of the machine stands in it
    assert not re.search(r"(?<![\w.-])/(home|root|tmp|work|Users|private)/", made)
    golden = GOLDEN / f"{name.removeprefix('configs/').removesuffix('.yaml').replace('/', '-')}.txt"
    if os.environ.get("LAUNCH_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(made, encoding="utf-8")
    assert made == golden.read_text(encoding="utf-8")


def test_every_golden_plan_has_its_file() -> None:
    wanted = {
        name.removeprefix("configs/").removesuffix(".yaml").replace("/", "-") for name in NAMES
    }
    assert {path.stem for path in GOLDEN.glob("*.txt")} == wanted
    assert all(commands(name) for name in NAMES)
