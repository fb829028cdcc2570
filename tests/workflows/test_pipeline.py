"""Pipelines: judged whole before the first stage, and nothing trained twice."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import saved
import yaml
from chained import EXPECT, Chained, answer_of
from chained import finished as finished  # a fixture
from chained import finished_copy as finished_copy  # a fixture
from chained import world as world  # a fixture
from conftest import PATIENCE_S
from fake_world import needs_trl, wait_until
from loads import counted
from parsed_answers import parse_answer

from launcher.cli import main
from launcher.config import pipeline
from launcher.errors import Exit, Finding, InvalidConfig
from launcher.planning.collect import Scope
from launcher.planning.request import Request
from launcher.runs import lease, rundir
from launcher.runs.rundir import RunFolder
from launcher.workflows.pipeline import plan
from launcher.workflows.pipeline.plan import PipelineRequest

pytestmark = [pytest.mark.slow, needs_trl]


def plan_file(path: Path, gpus: int = 0, **common: Any) -> plan.PipelinePlan:
    request = Request(stage=None, config=path, gpus=gpus, **common)
    order = PipelineRequest(chain=pipeline.load(path), common=request)
    return plan.plan_stages(order, Scope.PLAN)


def refusals(path: Path, **common: Any) -> dict[str, Finding]:
    """The errors about a pipeline by their codes, with the names of files instead of paths."""
    with pytest.raises(InvalidConfig) as caught:
        plan_file(path, **common)
    errors = {}
    for finding in caught.value.findings:
        if finding.severity == "error":
            errors[finding.code] = replace(finding, file=Path(finding.file or "").name)
    return errors


def model_of(planned: plan.PipelinePlan, stage: str) -> object:
    return planned.steps[stage].plan.stage.args["model_name_or_path"]


def test_a_stage_is_given_the_model_and_the_tokenizer_of_the_one_before(world: Chained) -> None:
    world.open_instruct("oi", "dpo", "mixer_list")

    planned = plan_file(world.pipeline("first.yaml", "second.yaml", "oi.yaml"))

    assert list(planned.steps) == ["first", "second", "oi"]
    output = world.root / "o"
    assert model_of(planned, "first") == "model"
    assert model_of(planned, "second") == str(output / "first")
    assert model_of(planned, "oi") == str(output / "second")
    args = planned.steps["oi"].plan.stage.args
    assert args["tokenizer_name_or_path"] == str(output / "second")
    assert {step.root for step in planned.steps.values()} == {"model"}


def test_every_stage_is_judged_before_the_first(world: Chained) -> None:
    world.stage("first", model_name_or_path="model", no_such=1)
    world.stage("second", output_dir=None)
    third = {"config": "third.yaml", "with": {"bogus": 1}}
    world.pipeline("first.yaml", "second.yaml", third)

    answer = world.run()

    assert answer.exit == Exit.CONFIG
    assert world.trained() == ""
    assert not world.runs.exists()
    places = set()
    for finding in answer.content.findings:
        if finding.code in ("unknown-key", "pipeline-output"):
            places.add((Path(finding.file).name, finding.key))
    # what `with:` says stands in the pipeline file
    keys = {("first.yaml", "args.no_such"), ("second.yaml", "args"), ("p.yaml", "args.bogus")}
    assert places == keys


def test_an_override_is_named_as_it_was_written(world: Chained) -> None:
    third = {"config": "third.yaml", "with": {"bogus": 1}}
    world.pipeline("first.yaml", "second.yaml", third)

    answer = world.run("third.bogus=2", "second.no_such=3")

    overrides = set()
    for finding in answer.content.findings:
        if finding.code == "unknown-key":
            overrides.add((Path(finding.file).name, finding.override))
    assert overrides == {("third.yaml", "third.bogus=2"), ("second.yaml", "second.no_such=3")}


def test_facts_of_a_model_that_is_not_there_yet_come_from_the_first(world: Chained) -> None:
    world.stage("third", "dpo", max_length=128)
    config = world.root / "model" / "config.json"
    config.write_text('{"model_type": "qwen2", "max_position_embeddings": 64}')

    findings = plan_file(world.file).findings

    (finding,) = [f for f in findings if f.code == "beyond-positions"]
    assert Path(finding.file or "").name == "third.yaml"


def test_a_stage_that_names_another_model_must_say_which_is_meant(world: Chained) -> None:
    world.stage("second", model_name_or_path="some/other")
    assert refusals(world.file)["pipeline-model"].file == "second.yaml"

    from_first = {"config": "second.yaml", "from": "first"}
    planned = plan_file(world.pipeline("first.yaml", from_first))
    assert model_of(planned, "second") == str(world.root / "o" / "first")
    from_none = {"config": "second.yaml", "from": "none"}
    planned = plan_file(world.pipeline("first.yaml", from_none))
    assert model_of(planned, "second") == "some/other"

    # said twice, and not the same
    twice = {**from_first, "with": {"model_name_or_path": "a/b"}}
    path = world.pipeline("first.yaml", twice)
    finding = refusals(path)["pipeline-model"]
    assert finding.file == "p.yaml"
    assert path.read_text().splitlines()[(finding.line or 0) - 1].endswith("_path: a/b")

    # the output of the stage before, by whatever way to it
    world.stage("second", model_name_or_path="./o/../o/first")
    assert plan_file(world.pipeline("first.yaml", "second.yaml")).links


def test_a_stage_cannot_begin_from_an_adapter_or_write_over_another(world: Chained) -> None:
    world.stage("first", model_name_or_path="model", use_peft=True)
    assert "adapter" in refusals(world.file)["pipeline-adapter"].message
    world.stage("first", model_name_or_path="model")
    world.stage("second", output_dir="o/third")
    assert "both write into" in refusals(world.file)["pipeline-output"].message


def two_of_open_instruct(world: Chained, sft: dict[str, Any], dpo: dict[str, Any]) -> Path:
    world.open_instruct("a", "sft", "dataset_mixer_list", model_name_or_path="model", **sft)
    world.open_instruct("b", "dpo", "mixer_list", **dpo)
    return world.pipeline("a.yaml", "b.yaml")


TULU = {"chat_template_name": "tulu"}
ZEPHYR = {"chat_template_name": "zephyr"}


@pytest.mark.parametrize(
    ("dpo", "codes"),
    [
        pytest.param(TULU, [], id="the same"),
        pytest.param({}, [], id="that of the saved tokenizer"),
        pytest.param(ZEPHYR, ["pipeline-template"], id="another"),
    ],
)
def test_stages_share_a_template(dpo: dict[str, Any], codes: list[str], world: Chained) -> None:
    findings = plan_file(two_of_open_instruct(world, TULU, dpo)).findings

    assert [f.code for f in findings if f.code.startswith("pipeline-")] == codes


def test_what_open_instruct_cannot_begin_from(world: Chained) -> None:
    bos = {"add_bos": True}
    path = two_of_open_instruct(world, bos, bos)
    assert "begins with the token" in refusals(path)["pipeline-template"].message
    two_of_open_instruct(world, {}, {})
    path = world.pipeline("first.yaml", "a.yaml")
    assert refusals(path, probe=False, gpus=1).keys() >= {"pipeline-model", "pipeline-probe"}


def test_stages_run_in_turn_and_leave_a_record_and_a_page(
    world: Chained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = counted(monkeypatch)

    answer = world.run()

    assert answer.exit == 0, answer
    assert answer.statuses == "passed, passed, passed"
    assert world.trained() == "first, second, third"
    assert answer.stages[1].model == answer.stages[0].output
    assert all(Path(stage.run).is_dir() for stage in answer.stages)
    data = answer.content.data
    folder = Path(data.pipeline)
    assert folder.parent == world.runs
    assert "-pipeline-p" in folder.name
    assert data.state == "finished"
    assert parse_answer((folder / "pipeline.json").read_text()) == data
    page = (folder / "report.html").read_text()
    assert "<h1>pipeline p " in page
    assert ">finished</span>" in page
    assert main.main(["report", folder.name]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert set(loads.files.values()) == {1}
    assert "planned" not in loads.repeated
    # when the pipeline begins, and when the stage's turn comes
    assert max(loads.judged.values()) <= 2


def test_a_finished_pipeline_is_skipped_as_long_as_contents_are_the_same(finished: Chained) -> None:
    for path in (finished.root / "o" / "first").iterdir():
        os.utime(path, (1, 1))
    os.utime(finished.root / "data" / "train.jsonl")

    answer = finished.run()

    assert answer.exit == 0
    assert answer.statuses == "skipped, skipped, skipped"
    assert finished.trained() == ""
    assert all(stage.skipped for stage in answer.stages)


def test_a_changed_stage_and_what_was_made_of_it_are_trained_again(finished: Chained) -> None:
    answer = finished.run("second.learning_rate=0.25")

    assert answer.exit == 0, answer
    assert answer.statuses == "skipped, passed, passed"
    assert finished.trained() == "second-2, third-2"
    assert finished.weights("third") != finished.weights("third-2")
    assert answer.stages[2].model == str(finished.root / "o" / "second-2")
    assert "learning_rate" in answer.stages[1].reason
    # and that stands
    again = finished.run("second.learning_rate=0.25")
    assert again.statuses == "skipped, skipped, skipped"
    assert finished.trained() == ""
    assert finished.quiet()


def test_a_stage_with_another_model_before_it_is_trained_again(finished: Chained) -> None:
    (finished.root / "o" / "first" / "weights.bin").write_bytes(b"other")

    answer = finished.run("--until", "second")

    assert answer.statuses == "skipped, passed"
    assert finished.trained() == "second-2"
    assert "model" in answer.stages[1].reason


def test_a_model_that_no_known_run_has_made_is_not_written_over(finished: Chained) -> None:
    shutil.rmtree(finished.runs)
    before = finished.weights("first")

    answer = finished.run("--until", "first")

    assert answer.exit == 0
    assert answer.statuses == "passed"
    assert finished.trained() == "first-2"
    assert "no run is known" in answer.stages[0].reason
    assert finished.weights("first") == before
    # from now on one is known
    assert finished.run("--until", "first", "--strict").statuses == "skipped"


def only_record(world: Chained) -> Path:
    """The record of the only pipeline that was begun."""
    (path,) = world.runs.glob("*-pipeline-*/pipeline.json")
    return path


def recorded(world: Chained) -> str:
    """The state and the statuses of the only pipeline that was begun."""
    record = parse_answer(only_record(world).read_text())
    return ", ".join([record.state, *[stage.status for stage in record.stages]])


def test_it_stops_at_a_failure_and_goes_on_from_there(
    world: Chained, capsys: pytest.CaptureFixture[str]
) -> None:
    world.do(second=["raise=no such thing"])

    assert main.main([*world.words()]) == Exit.TRAINING

    shown = capsys.readouterr().out
    assert "stopped at second: " in shown
    assert "no such thing" in shown
    assert "the same command continues with second" in shown
    assert world.trained() == "first, second"
    assert recorded(world) == "stopped, passed, failed, pending"

    world.do()
    answer = world.run()

    assert answer.exit == 0
    assert answer.statuses == "skipped, passed, passed"
    assert world.trained() == "second, third"
    # the same pipeline went on: one record
    assert answer.content.data.pipeline == str(only_record(world).parent)


def test_what_was_begun_goes_on_unless_it_would_become_something_else(world: Chained) -> None:
    world.stage("second", save_steps=2, save_strategy="steps")
    world.do(second=["raise=the lights went out"])
    assert world.run().exit == Exit.TRAINING
    output = world.root / "o" / "second"
    saved.trl(output, 2)
    world.do()
    world.trained()

    assert world.run("--until", "second").exit == Exit.OK

    assert world.trained() == "second"
    assert "checkpoint-2" in (world.root / "argv.second").read_text()

    # half trained on other data: that is left as it is, and begun again beside
    shutil.rmtree(output)
    saved.trl(output, 2)
    world.write_row("b")

    answer = world.run("--from", "second", "--until", "second")

    assert answer.exit == 0, answer
    assert world.trained() == "second-2"
    assert "data" in answer.stages[0].reason
    assert "checkpoint-2" not in (world.root / "argv.second-2").read_text()
    assert (output / "checkpoint-2").is_dir()


def test_a_stage_that_was_refused_has_no_run_and_no_report(
    world: Chained, capsys: pytest.CaptureFixture[str]
) -> None:
    lease.acquire(world.root / "o" / "first", world.root / "by the test")

    assert main.main([*world.words()]) == Exit.NOT_READY

    out, err = capsys.readouterr()
    assert "run-is-live" in err
    assert "\nreport: " not in out
    assert "first: refused" in out
    first = parse_answer(only_record(world).read_text()).stages[0]
    assert first.status == "refused"
    assert first.run is None


def test_a_finished_stage_is_judged_by_what_is_expected_now(finished: Chained) -> None:
    path = finished.root / "second.yaml"
    before = path.read_text()
    content = yaml.safe_load(before)
    expect = {**EXPECT, "packing": "isolated"}
    finished.write("second.yaml", {**content, "expect": expect, "on_violation": "warn"})
    # it is not passed over by saying it again
    for _ in range(2):
        answer = finished.run()
        assert answer.exit == 1
        assert answer.statuses == "skipped, failed, pending"
        assert "packing" in answer.stages[1].reason

    path.write_text(before)
    assert finished.run().statuses == "skipped, skipped, skipped"
    assert finished.trained() == ""


def test_from_needs_the_model_of_the_stage_before(world: Chained) -> None:
    answer = world.run("--from", "last")

    assert answer.exit == Exit.NOT_READY
    assert "the model of second" in answer.finding("pipeline-needs").message


def test_only_the_stages_from_and_until_run(finished: Chained) -> None:
    # a broken file of a stage that is not asked for is none of its business
    (finished.root / "first.yaml").write_text("stage: sft\nnonsense: [\n")

    answer = finished.run("--from", "last", "--fresh")

    assert answer.exit == 0
    assert answer.statuses == "passed"
    assert finished.trained() == "third-2"
    # the last is that of a variable that is not set
    for wrong in (("last", "first"), ("lst", "last"), ("", "last")):
        words = finished.words("--from", wrong[0], "--until", wrong[1])
        assert main.main([*words]) == Exit.USAGE


def test_ctrl_c_stops_the_stage_and_the_pipeline(world: Chained) -> None:
    world.do(second=["pid=leader", "sleep=600"])
    running = world.started(*world.words("--format", "json"), start_new_session=True)
    world.pid("leader")

    def recorded_processes() -> list[RunFolder]:
        return [run for run in rundir.list_newest_first(world.runs) if run.process.exists()]

    # of the stage that is over, and of this one
    wait_until(lambda: len(recorded_processes()) == 2)

    os.kill(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=PATIENCE_S)

    assert running.returncode == Exit.INTERRUPTED, err
    answer = answer_of(running.returncode, out.decode())
    assert answer.content.data.state == "interrupted"
    assert answer.statuses == "passed, interrupted, pending"
    assert world.quiet()


def test_a_stage_that_outlived_its_pipeline_is_waited_for(world: Chained) -> None:
    go = world.root / "go"
    world.do(second=["pid=leader", f"wait={go}"])
    running = world.started(*world.words(), start_new_session=True)
    world.pid("leader")
    again = world.launch(*world.words())
    assert again.returncode == Exit.NOT_READY
    assert "running already" in again.stderr
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()

    second = world.started(*world.words(), bufsize=0)
    output = second.stdout
    assert output is not None
    wait_until(lambda: b"second is being trained" in output.readline())
    go.write_text("")
    _, err = second.communicate(timeout=PATIENCE_S)

    assert second.returncode == 0, err
    assert recorded(world) == "finished, skipped, passed, passed"
    assert world.trained() == "first, second, third"
    assert world.quiet()


TELL = """#!/bin/sh
echo "$LAUNCH_FINISHED $LAUNCH_FINISHED_CODE $LAUNCH_FINISHED_STATUS" >>"$FAKE_WORLD/told"
"""


def test_it_goes_on_without_the_terminal(finished: Chained) -> None:
    programs = finished.root / "bin"
    programs.mkdir()
    for name, text in {"tell": TELL, "tmux": "#!/bin/sh\nexit 1\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    finished.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
    shutil.rmtree(finished.root / "o" / "third")

    done = finished.launch(*finished.words("--detach", "--on-finish", "tell", "--format", "json"))

    data = answer_of(done.returncode, done.stdout).content.data
    assert done.returncode == 0
    assert data.session is None
    note = finished.root / "told"
    wait_until(lambda: note.exists() and note.read_text() != "")
    assert note.read_text() == "pipeline 0 pass\n"
    assert "pipeline: " in Path(data.log).read_text()
    assert finished.trained() == "third"


def test_what_is_wrong_is_said_before_it_leaves_the_terminal(world: Chained) -> None:
    world.stage("first", model_name_or_path="model", no_such=1)

    answer = world.run("--detach")

    assert answer.exit == Exit.CONFIG
    assert "unknown-key" in answer.codes
    assert world.run("--detach", "--slurm").exit == Exit.USAGE
    assert world.run("--on-finish-limit", "1m").exit == Exit.USAGE
    assert not world.runs.exists()


def test_a_dry_run_says_what_would_be_started(
    world: Chained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*world.words("--dry-run")]) == Exit.OK
    shown = capsys.readouterr().out
    answer = world.run("--dry-run")

    assert not world.runs.exists()
    commands = [line for line in shown.splitlines() if "accelerate.commands.launch" in line]
    assert len(commands) == 3
    assert f"--model_name_or_path {world.root}/o/second" in commands[2]
    assert answer.exit == Exit.OK
    assert [stage.name for stage in answer.stages] == ["first", "second", "last"]
    assert all(stage.argv for stage in answer.stages)


def test_a_dry_run_of_a_finished_pipeline_warns(finished: Chained) -> None:
    over = finished.run("--dry-run")
    beside = finished.run("--dry-run", "--fresh", "--from", "second")

    assert over.codes.count("earlier-run") == 3
    assert "earlier-run" not in beside.codes
    assert "--output_dir o/second-2" in " ".join(beside.stages[0].argv)


def test_what_a_later_stage_needs_of_this_machine_is_missing_before_the_first(
    world: Chained,
) -> None:
    world.stage("third", "dpo", dataset_name="gone/a/b")

    answer = world.run()

    assert answer.exit in (Exit.CONFIG, Exit.NOT_READY)
    assert "gone/a/b" in str(answer.content.findings)
    assert world.trained() == ""
