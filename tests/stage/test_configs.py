"""The stage files that ship: valid anywhere, self-contained, and saying how they are started."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import REPOSITORY, STAGE_FILES

from launcher.config import load
from launcher.errors import select_errors
from launcher.stage import stage
from launcher.stage.stage import Stage

# data of files that a step of the demo makes first; a model that is only measured
EXPECTED_WARNINGS = {"demo": {"missing-data"}, "olmo_core": {"no-hf-export"}}
SHIPPED = pytest.mark.parametrize("path", STAGE_FILES, ids=lambda path: path.name)


def validate(path: Path) -> Stage:
    return stage.validate(stage.judge_stage_file(load.load(path)))


def test_stage_files_ship() -> None:
    assert len(STAGE_FILES) >= 9


@SHIPPED
def test_it_validates_without_a_warning_and_alone_in_another_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = {finding.code for finding in select_errors(validate(path).findings, strict=True)}
    assert codes <= EXPECTED_WARNINGS.get(path.parent.name, set())
    monkeypatch.chdir(tmp_path)
    deepspeed = validate(Path(shutil.copy(path, tmp_path))).options.deepspeed
    assert deepspeed is None or deepspeed.is_file()


@SHIPPED
def test_its_header_holds_a_command_that_fits(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    shipped = validate(path)
    options = shipped.options
    command = rf"^# +launch {options.stage} {re.escape(str(path.relative_to(REPOSITORY)))}"
    if options.backend == "open_instruct":
        command += r" .*--gpus \d"
    assert re.search(command, text, re.M)

    counts = re.findall(r"--gpus (\d+)", text) or ["1"]
    gpus = max(1, int(counts[0]))
    batch = options.batch
    assert batch is not None
    assert batch.total is not None
    assert batch.per_device is not None
    assert batch.total % (batch.per_device * gpus) == 0
    # nothing leaves the machine unasked
    for key in ("push_to_hub", "try_launch_beaker_eval_jobs", "with_tracking"):
        assert not shipped.values.get(key)


@pytest.mark.parametrize("folder", ["tulu", "llama", "demo"])
def test_dpo_starts_from_the_sft_file_beside_it(folder: str) -> None:
    shipped = [validate(path) for path in STAGE_FILES if path.parent.name == folder]
    written = [file.values["output_dir"] for file in shipped if file.options.stage == "sft"]
    for file in shipped:
        if file.options.stage == "dpo":
            assert file.values["model_name_or_path"] in written
            assert file.values["output_dir"] not in written
