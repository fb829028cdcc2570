"""The stage files that ship: valid anywhere, self-contained, and saying how they are started."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import REPOSITORY, STAGE_FILES

from launcher.config import load
from launcher.errors import errors
from launcher.stage import stage
from launcher.stage.stage import Stage

# data of files that a step of the demo makes first; a model that is only measured
EXPECTED_WARNINGS = {"demo": {"missing-data"}, "olmo_core": {"no-hf-export"}}


def validated(path: Path) -> Stage:
    return stage.validate(stage.judge(load.load(path)))


def test_each_validates_without_a_warning_and_alone_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(STAGE_FILES) >= 9
    for path in STAGE_FILES:
        found = {f.code for f in errors(validated(path).findings, strict=True)}
        assert found <= EXPECTED_WARNINGS.get(path.parent.name, set()), path
    monkeypatch.chdir(tmp_path)
    for path in STAGE_FILES:
        alone = Path(shutil.copy(path, tmp_path / path.name))
        made = validated(alone)
        assert made.options.deepspeed is None or made.options.deepspeed.is_file()


@pytest.mark.parametrize("path", STAGE_FILES, ids=lambda path: path.name)
def test_its_header_holds_a_command_that_fits(path: Path) -> None:
    text, made = path.read_text(encoding="utf-8"), validated(path)
    name = re.escape(str(path.relative_to(REPOSITORY)))
    gpus_option = r".*--gpus \d" if made.options.backend == "open_instruct" else ""
    assert re.search(rf"^# +launch {made.options.stage} {name} ?{gpus_option}", text, re.M), name
    found = re.search(r"--gpus (\d+)", text)
    gpus = max(1, int(found.group(1))) if found else 1
    batch = made.options.batch
    assert batch is not None and batch.total is not None and batch.per_device is not None
    assert batch.total % (batch.per_device * gpus) == 0
    # nothing leaves the machine unasked
    leaving = ("push_to_hub", "try_launch_beaker_eval_jobs", "with_tracking")
    assert not any(made.values.get(key) for key in leaving)


@pytest.mark.parametrize("folder", ["tulu", "llama", "demo"])
def test_dpo_starts_from_the_sft_file_beside_it(folder: str) -> None:
    made = [validated(path) for path in STAGE_FILES if path.parent.name == folder]
    written = {str(s.values["output_dir"]) for s in made if s.options.stage == "sft"}
    for one in made:
        if one.options.stage == "dpo":
            assert one.values["model_name_or_path"] in written
            assert str(one.values["output_dir"]) not in written
