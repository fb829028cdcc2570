"""The stage files that ship: valid anywhere, self-contained, and saying how they are started."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

from launcher import config, stage
from launcher.errors import errors
from launcher.stage import Stage

CONFIGS = [
    path
    for path in sorted((REPOSITORY / "configs").rglob("*.y*ml"))
    if not path.name.startswith("pipeline")
]
# data of files that a step of the demo makes first; a model that is only measured
EXPECTED_WARNINGS = {"demo": {"missing-data"}, "olmo_core": {"no-hf-export"}}


def validated(path: Path) -> Stage:
    return stage.validate(stage.judge(config.load(path)))


def by_name(name: str) -> Stage:
    return validated(REPOSITORY / "configs" / name)


def test_each_validates_without_a_warning_and_alone_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(CONFIGS) >= 9
    for path in CONFIGS:
        found = {f.code for f in errors(validated(path).findings, strict=True)}
        assert found <= EXPECTED_WARNINGS.get(path.parent.name, set()), path
    monkeypatch.chdir(tmp_path)
    for path in CONFIGS:
        alone = Path(shutil.copy(path, tmp_path / path.name))
        made = validated(alone)
        assert made.options.deepspeed is None or made.options.deepspeed.is_file()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_its_header_holds_a_command_that_fits(path: Path) -> None:
    text, made = path.read_text(encoding="utf-8"), validated(path)
    header = text.split("\nstage:")[0].splitlines()
    assert all(line.startswith("#") for line in header)
    name = str(path.relative_to(REPOSITORY))
    commands = [line.lstrip("# ") for line in header if line.lstrip("# ").startswith("launch ")]
    own = [command for command in commands if name in command]
    assert own, f"no command for {name}"
    pattern = rf"launch {made.options.stage} {re.escape(name)}( --gpus [08])?\b"
    assert all(re.match(pattern, command) for command in own), own
    if made.options.backend == "open_instruct":
        assert all("--gpus" in command for command in own)
    found = re.search(r"--gpus (\d+)", text)
    gpus = max(1, int(found.group(1))) if found else 1
    batch = made.options.batch
    assert batch is not None and batch.total is not None and batch.per_device is not None
    assert batch.total % (batch.per_device * gpus) == 0
    # nothing leaves the machine unasked
    leaving = ("push_to_hub", "try_launch_beaker_eval_jobs", "with_tracking")
    assert not any(made.values.get(key) for key in leaving)


# --- the numbers that people ask for ----------------------------------------------------------------

BOTH: dict[str, Any] = {
    "chat_template_name": "tulu", "use_liger_kernel": True, "packing": True,
    "keep_last_n_checkpoints": 3, "lr_scheduler_type": "linear", "weight_decay": 0.0,
    "logging_steps": 1,
}  # fmt: skip
SFT = {
    "num_train_epochs": 2, "learning_rate": 5e-6, "warmup_ratio": 0.03, "max_seq_length": 4096,
    "checkpointing_steps": "epoch", "clean_checkpoints_at_end": False,
}  # fmt: skip
DPO = {
    "num_epochs": 1, "learning_rate": 5e-7, "warmup_ratio": 0.1, "loss_type": "dpo_norm",
    "beta": 5.0, "max_seq_length": 2048, "checkpointing_steps": 1000,
}  # fmt: skip
SFT_SET, DPO_SET = "allenai/tulu-3-sft-mixture", "allenai/llama-3.1-tulu-3-8b-preference-mixture"
LISTED: dict[str, tuple[str, list[str], str, str, dict[str, Any]]] = {
    "tulu/sft_qwen7b.yaml": (
        "Qwen/Qwen2.5-7B", [SFT_SET, "1.0"], "zero2_fp32_comm", "dataset_mixer_list", SFT
    ),
    "tulu/sft_qwen7b_25pct.yaml": (
        "Qwen/Qwen2.5-7B", [SFT_SET, "0.25"], "zero2_fp32_comm", "dataset_mixer_list", SFT
    ),
    "tulu/dpo_qwen7b.yaml": (
        "output/tulu/sft_qwen7b", [DPO_SET, "1.0"], "zero2_fp32_comm", "mixer_list", DPO
    ),
    "llama/llama31_8b_sft_10pct.yaml": (
        "meta-llama/Llama-3.1-8B", [SFT_SET, "0.1"], "zero3", "dataset_mixer_list", SFT
    ),
    "llama/llama31_8b_dpo_10pct.yaml": (
        "output/llama/sft_10pct", [DPO_SET, "0.1"], "zero3", "mixer_list", DPO
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_the_numbers_of_the_recipes(name: str) -> None:
    model, mixer, deepspeed, listed, numbers = LISTED[name]
    made = by_name(name)
    assert made.values["model_name_or_path"] == model
    assert made.values[listed] == mixer
    assert made.options.deepspeed_name == deepspeed
    assert made.options.batch is not None and made.options.batch.total == 128
    assert made.options.expect["liger"] == "engaged"
    assert made.options.expect["packing"] == "isolated"
    for key, value in {**BOTH, **numbers}.items():
        # written in the file, not left to upstream's default
        assert made.values.given(key), key
        assert made.values[key] == value, key


@pytest.mark.parametrize("folder", ["tulu", "llama", "demo"])
def test_dpo_starts_from_the_sft_file_beside_it(folder: str) -> None:
    made = [validated(path) for path in CONFIGS if path.parent.name == folder]
    written = {str(s.values["output_dir"]) for s in made if s.options.stage == "sft"}
    for one in made:
        if one.options.stage == "dpo":
            assert one.values["model_name_or_path"] in written
            assert str(one.values["output_dir"]) not in written
