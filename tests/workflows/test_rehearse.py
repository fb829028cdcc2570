"""`launch rehearse` and other commands that rehearse: when they do, and what follows from it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parsed_answers import parse_answer
from real_training import needs_trl
from small_stages import copy_server, use_own_folders, write_stage
from typer.testing import CliRunner

from launcher.cli.commands import app
from launcher.cli.main import main
from launcher.errors import Exit, InvalidConfig, NotReady, launch_finding, not_ready
from launcher.planning.collect import Scope, collect, judge_request
from launcher.planning.request import Request
from launcher.stage.stage import Judged
from launcher.workflows.rehearse import ask, memory, rehearsal
from launcher.workflows.rehearse.inside.records import PreparedRows
from launcher.workflows.rehearse.result import Rehearsal

pytestmark = needs_trl


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


@pytest.fixture
def stage_file(tmp_path: Path, demo_assets: Path) -> Path:
    """A stage of the demo's model and data, for TRL; its arguments come last."""
    model = str(demo_assets / "model")
    data = str(demo_assets / "data" / "sft")
    args = {"model_name_or_path": model, "dataset_name": data}
    return write_stage(tmp_path / "sft.yaml", "sft", "trl", args)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def rehearse_before_start(
    path: Path, *overrides: str, by_itself: bool, rehearse: bool | None = None
) -> list[str]:
    """Codes of the findings with which a start of the stage would go on."""
    request = Request(stage=None, config=path, overrides=overrides, gpus=0, rehearse=rehearse)
    stages = {"": collect(request, Scope.PLAN)}
    findings = rehearsal.require(stages, print, by_itself=by_itself)
    return [finding.code for finding in findings]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch's own code of a rehearsal fails."""
    folder = tmp_path / "broken"
    copy_server(folder)
    stage = "def load(script):\n    pass\ndef run(request, response):\n    min(None, 256)\n"
    (folder / "inside" / "trl_stage.py").write_text(stage)
    (folder / "inside" / "shrink.py").write_text("from .trl_stage import run as run\n")
    monkeypatch.setattr(ask, "SERVER", folder / "server.py")


@pytest.mark.usefixtures("broken")
def test_a_failure_of_launchs_own_is_no_rehearsal(
    stage_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["rehearse", str(stage_file), "--format", "json"]
    assert main(command) == Exit.BUG
    capsys.readouterr()
    # it is tried again
    assert main([*command, "--strict"]) == Exit.BUG
    answer = parse_answer(capsys.readouterr().out)

    data = answer.data
    assert data.rows == SimpleNamespace()
    assert data.losses == []
    assert data.remembered is False
    (failed,) = [f for f in answer.findings if f.code == "rehearsal-failed"]
    assert failed.severity == "note"
    assert failed.key is None
    assert "launch could not rehearse this: TypeError" in failed.message
    assert "inside/trl_stage.py:4" in failed.message
    assert "error" not in {finding.severity for finding in answer.findings}


@pytest.mark.usefixtures("broken")
def test_a_failure_of_launchs_own_refuses_nothing(
    stage_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["validate-config", "--deep", "--strict", str(stage_file), "--format", "json"]
    assert main(command) == Exit.OK
    (file,) = parse_answer(capsys.readouterr().out).data.files
    assert file.valid

    monkeypatch.delenv(rehearsal.VARIABLE)
    for rehearse in (None, True):
        codes = rehearse_before_start(stage_file, by_itself=True, rehearse=rehearse)
        assert codes == ["rehearsal-failed"]


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were rehearsed; the trainer refuses a learning rate of 7."""
    names: list[str] = []

    def rehearse(judged: Judged, *_: object, **__: object) -> Rehearsal:
        names.append(judged.config.path.name)
        finding = launch_finding("warning", "cut-rows", "half of the rows are cut", None)
        if judged.config.args.get("learning_rate") == 7:
            finding = launch_finding("error", "trainer-refuses", "no", None)
        return Rehearsal(findings=(finding,), seconds=1)

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    monkeypatch.delenv(rehearsal.VARIABLE)
    return names


@pytest.mark.parametrize(
    ("in_file", "by_itself", "option", "rehearses"),
    [
        pytest.param("", True, None, True, id="by itself"),
        pytest.param("", False, None, False, id="not by itself"),
        pytest.param("", False, True, True, id="option"),
        pytest.param("", True, False, False, id="option off"),
        pytest.param("rehearse: true", False, None, True, id="file"),
        pytest.param("rehearse: off", True, None, False, id="file off"),
        pytest.param("rehearse: off", True, True, True, id="option before file"),
    ],
)
def test_the_option_the_file_and_the_command_decide_in_turn(
    in_file: str, by_itself: bool, option: bool | None, rehearses: bool, stage_file: Path,
    rehearsed: list[str],
) -> None:  # fmt: skip
    append(stage_file, f"{in_file}\n")

    codes = rehearse_before_start(stage_file, by_itself=by_itself, rehearse=option)

    assert codes == ["cut-rows"] * rehearses
    assert len(rehearsed) == rehearses


def test_a_variable_switches_off_what_nobody_asked_for(
    stage_file: Path, rehearsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rehearsal.VARIABLE, "0")
    assert rehearse_before_start(stage_file, by_itself=True) == []
    assert rehearse_before_start(stage_file, by_itself=True, rehearse=True) == ["cut-rows"]


def test_what_the_trainer_refuses_does_not_start(stage_file: Path, rehearsed: list[str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        rehearse_before_start(stage_file, "learning_rate=7", by_itself=True)
    assert [finding.code for finding in caught.value.findings] == ["trainer-refuses"]
    # what rules refuse is not rehearsed
    with pytest.raises(InvalidConfig, match="lr_scheduler_type"):
        rehearse_before_start(stage_file, "lr_scheduler_type=none", by_itself=True)
    assert rehearsed == ["sft.yaml"]


def test_a_python_that_cannot_rehearse_stops_only_who_asked(
    stage_file: Path, rehearsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rehearse(*_: object, **__: object) -> Rehearsal:
        raise not_ready("rehearsal-imports", "no trl")

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)

    assert rehearse_before_start(stage_file, by_itself=True) == ["not-rehearsed"]
    with pytest.raises(NotReady):
        rehearse_before_start(stage_file, by_itself=True, rehearse=True)


@pytest.mark.parametrize(
    ("learning_rate", "command"),
    [
        (7, "sft FILE --gpus 0 --rehearse"),
        (7, "ladder FILE --gpus 0 --steps 5"),
        (1e-4, "bench FILE --cpu --vary learning_rate=7,1e-3 --steps 2"),
        (7, "tune FILE --cpu --row-tokens 80:200 --budget 60s"),
    ],
)
@pytest.mark.usefixtures("rehearsed")
def test_commands_that_start_something_long_rehearse_first(
    learning_rate: float, command: str, stage_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    append(stage_file, f"  learning_rate: {learning_rate}\n  output_dir: {output}\n")

    done = CliRunner().invoke(app, command.replace("FILE", str(stage_file)))

    assert isinstance(done.exception, InvalidConfig), done.output
    errors = [finding for finding in done.exception.findings if finding.severity == "error"]
    assert [finding.code for finding in errors] == ["trainer-refuses"]
    assert not output.exists()


def test_a_plan_takes_the_length_of_rows_from_an_earlier_rehearsal(
    stage_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["plan", str(stage_file), "--gpus", "1", "--gpu", "H100"]
    source = "rows: the first rows, as a rehearsal saw them"
    assert source not in CliRunner().invoke(app, command).stdout

    rows = PreparedRows(rows=64, tokens=64 * 79, longest=159)
    earlier = Rehearsal(findings=(), seconds=1, rows=rows)
    monkeypatch.setattr(memory, "recall", lambda *_: earlier)
    assert source in CliRunner().invoke(app, command).stdout


def test_what_is_only_parsed_is_remembered_by_its_value_too(stage_file: Path) -> None:
    def judge_with(override: str) -> Any:
        return judge_request(Request(stage=None, config=stage_file, overrides=(override,)))

    memory.keep(*judge_with("fsdp=full_shard"), Rehearsal(findings=(), seconds=1))

    assert memory.recall(*judge_with("fsdp=full_shard")) is not None
    assert memory.recall(*judge_with("fsdp=nonsense")) is None
