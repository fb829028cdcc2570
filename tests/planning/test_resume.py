"""Saying a command again: what is continued, from where, what is refused, and what says it is finished."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_runs
import pytest
import saved
from plans import built
from repeated import DPO, OLMO_CORE, SFT, TRL, Make, Run, codes, rows_of
from repeated import run as run  # a fixture

from launcher import files
from launcher.cache import inputs
from launcher.cli.main import main
from launcher.errors import UsageError
from launcher.lifecycle import manifest
from launcher.plan import plan
from launcher.planning.resume import decision as resume
from launcher.planning.resume.decision import Decision
from launcher.runs import lease, rundir
from launcher.runs.rundir import RunFolder
from launcher.verdict import check, judge, metrics
from launcher.verdict.evidence import read_run


def errors(decision: Decision) -> list[str]:
    return [one.message for one in decision.findings if one.severity == "error"]


def test_the_same_command_goes_on_from_the_last_complete_checkpoint(run: Make) -> None:
    one = run()
    one.start()
    for step in (2, 4):
        saved.pinned(one.output, f"step_{step}")
    saved.pinned(one.output, "step_6", completed=False)
    decision = one.decide()
    assert (decision.kind, decision.step) == ("resume", 4)
    assert decision.checkpoint is not None and decision.checkpoint.name == "step_4"
    # the next save writes over what was begun
    assert decision.aside == ()
    assert codes(decision) == {"resumes": "note"}
    assert "8 of 12 steps are left" in decision.findings[0].message


def test_trl_is_told_where_to_go_on(run: Make) -> None:
    one = run(TRL)
    one.start()
    saved.trl(one.output, 2)
    (saved.trl(one.output, 4) / "trainer_state.json").unlink()
    decision = one.decide()
    assert decision.kind == "resume"
    assert {name: d.value for name, d in decision.derived.items()} == {
        "resume_from_checkpoint": str(one.output / "checkpoint-2")
    }
    made = plan.completed(one.made, decision.derived)
    assert made.arguments()["resume_from_checkpoint"] == [str(one.output / "checkpoint-2")]


def test_without_a_complete_checkpoint_it_begins_anew(run: Make) -> None:
    one = run(every=2)
    one.start()
    saved.pinned(one.output, "step_2", completed=False)
    decision = one.decide()
    assert (decision.kind, decision.aside) == ("new", ())
    assert codes(decision)["nothing-to-resume"] == "note"
    # one that this run would not write next would be marked as complete instead of what it saves
    saved.pinned(one.output, "step_8", completed=False)
    assert [path.name for path in one.decide().aside] == ["step_8"]


def test_the_second_dpo_script_goes_on_by_itself_or_is_finished(run: Make) -> None:
    one = run(OLMO_CORE)
    (one.place / "model" / "generation_config.json").write_text("{}")
    one.start(gpus=1)
    # of a run that saved nothing it is true
    (one.output / "step0").mkdir(parents=True)
    assert codes(one.decide(gpus=1))["nothing-to-resume"] == "note"
    (one.output / "step4").mkdir()
    decision = one.decide(gpus=1)
    assert (decision.kind, "nothing-to-resume" in codes(decision)) == ("new", False)
    one.ended()
    saved.model(one.output / "hf_model")
    decision = one.decide(gpus=1)
    assert (decision.kind, codes(decision)) == ("finished", {"already-finished": "note"})


@pytest.mark.parametrize("record", ["exit", "probe"])
def test_a_finished_run_says_so(run: Make, record: str) -> None:
    one = run()
    one.start()
    if record == "exit":
        one.ended()
    else:
        # whoever watched did not live to write how it ended
        one.folder.probe.mkdir()
        events = [{"event": "start", "rank": 0, "attempt": 1}, {"event": "end", "exit": 0}]
        text = "".join(json.dumps(event) + "\n" for event in events)
        (one.folder.probe / "rank-0.jsonl").write_text(text)
    assert one.decide().kind == "new"
    saved.model(one.output)
    decision = one.decide()
    assert (decision.kind, codes(decision)) == ("finished", {"already-finished": "note"})
    # not even when checkpoints were left, as DPO does: it would train the rest again
    saved.pinned(one.output, "step_10")
    assert one.decide().kind == "finished"


def test_a_run_that_was_killed_while_it_saved_the_model_is_not_finished(run: Make) -> None:
    one = run()
    one.start()
    saved.pinned(one.output, "step_12")
    saved.model(one.output)
    one.ended(137)
    assert one.decide().kind == "resume"
    one.ended(0)
    saved.cut(one.output / "model.safetensors")
    assert one.decide().kind == "resume"


def test_it_goes_back_to_where_a_resume_is_exact(run: Make) -> None:
    """44 rows of 4 are 11 micro-batches: with two a step only the first epoch's checkpoints are exact."""
    one = run(rows=44)
    assert codes(one.decide()) == {"resume-inexact": "warning"}
    one.start()
    for step in (2, 4, 6, 8):
        saved.pinned(one.output, f"step_{step}")
    decision = one.decide()
    assert (decision.step, codes(decision)["resume-earlier"]) == (4, "warning")
    assert [path.name for path in decision.aside] == ["step_6", "step_8"]
    assert decision.kept == ("step_2", "step_4")
    assert not errors(decision)
    moved = resume.set_aside(decision, 2)
    assert [path.name for path in moved] == ["step_6.attempt-2", "step_8.attempt-2"]
    assert all((path / "COMPLETED").is_file() for path in moved)
    assert {path.name for path in one.output.iterdir()} == {"step_2", "step_4"}


def test_where_no_checkpoint_is_exact_it_is_refused_until_allowed(run: Make) -> None:
    one = run(rows=44)
    one.start()
    saved.pinned(one.output, "step_8")
    refused = one.decide()
    assert codes(refused)["resume-inexact"] == "error"
    assert "--allow-changed-resume position" in str(
        next(f.help for f in refused.findings if f.severity == "error")
    )
    allowed = one.decide(allow=("position",))
    assert not errors(allowed) and (allowed.kind, allowed.step) == ("resume", 8)


def test_it_counts_the_rows_that_were_left_after_filtering(run: Make) -> None:
    one = run(rows=48)
    one.start()
    saved.pinned(one.output, "step_8")
    assert not errors(one.decide())
    log = "***** Running training *****\nINFO   Num examples = 44\n"
    one.folder.console(1).write_text(log)
    assert "rows into epoch" in errors(one.decide())[0]


def test_epochs_are_always_exact_and_a_half_written_step_does_not_hide_them(run: Make) -> None:
    one = run(rows=44, every="epoch")
    assert codes(one.decide()) == {}
    one.start()
    saved.pinned(one.output, "epoch_0")
    saved.pinned(one.output, "step_8", completed=False)
    decision = one.decide()
    assert (decision.step, decision.place) == (6, resume.DataPosition(1, 0))
    assert [path.name for path in decision.aside] == ["step_8"]


def test_dpo_inside_an_epoch_skips_in_each_later_one(run: Make) -> None:
    one = run(DPO)
    first = next(f for f in one.decide(gpus=1).findings if f.code == "resume-inexact")
    assert "`checkpointing_steps: 6` is exact" in str(first.help)
    one.start(gpus=1)
    for step in (2, 4):
        saved.engine(one.output, f"step_{step}", ranks=1)
    assert "skipped again in each later epoch" in errors(one.decide(gpus=1))[0]
    for step in (6, 8):
        saved.engine(one.output, f"step_{step}", ranks=1)
    # the last epoch has no later one
    assert one.decide(gpus=1).step == 8


def test_an_accelerate_that_forgets_the_epoch(run: Make, tmp_path: Path) -> None:
    one = run()
    place = tmp_path / "site" / "accelerate"
    place.mkdir(parents=True)
    one.trainer = replace(one.trainer, path=(tmp_path / "site",))
    (place / "data_loader.py").write_text("DataLoaderShard(dataset, **kwargs)")
    warned = next(f for f in one.decide().findings if f.code == "resume-inexact")
    assert "order of the first epoch" in warned.message
    one.start()
    for step in (4, 8):
        saved.pinned(one.output, f"step_{step}")
    assert one.decide().step == 4
    (place / "data_loader.py").write_text(
        "Shard(dataset, iteration=dataloader.iteration, **kwargs)"
    )
    assert one.decide().step == 8


def test_the_last_step_inside_an_epoch_would_be_followed_by_another(run: Make) -> None:
    one = run(TRL)
    one.start("max_steps=8")
    saved.trl(one.output, 6, epoch=1.0)
    saved.trl(one.output, 8, epoch=8 / 6)
    decision = one.decide("max_steps=8")
    assert (decision.step, codes(decision)["resume-earlier"]) == (6, "warning")
    assert [path.name for path in decision.aside] == ["checkpoint-8"]


def test_data_that_are_not_skipped_begin_again(run: Make) -> None:
    one = run(TRL)
    one.start()
    saved.trl(one.output, 2)
    ignoring = "ignore_data_skip=true"
    # the stage file asks for it
    decision = one.decide(ignoring)
    assert codes(decision) == {"resumes": "note", "resume-inexact": "warning"}
    assert any("first rows" in finding.message for finding in decision.findings)
    # at the end of an epoch nothing is skipped
    saved.trl(one.output, 6, epoch=1.0)
    assert codes(one.decide(ignoring)) == {"resumes": "note"}
    # what an attempt saves that began an epoch again is not where its number says
    saved.trl(one.output, 8, epoch=8 / 6)
    one.start(ignoring)
    saved.trl(one.output, 10, epoch=10 / 6)
    back = one.decide()
    assert (back.step, codes(back)["resume-earlier"]) == (8, "warning")
    assert any("rows that it never reached would be skipped" in f.message for f in back.findings)


@pytest.mark.parametrize(
    ("text", "before", "after", "expected"),
    [
        (SFT, {}, {"batch": 16}, {"accumulation": "error"}),
        (SFT, {}, {"gpus": 2}, {"gpus": "error", "accumulation": "note"}),
        (SFT, {}, {"max_seq_length": 32}, {"max_seq_length": "error"}),
        (SFT, {}, {"use_lora": "true"}, {"use_lora": "error"}),
        # the value of the checkpoint is taken; how often it is saved and logged is no change
        (SFT, {}, {"learning_rate": 1e-3, "checkpointing_steps": 4, "logging_steps": 2},
         {"learning_rate": "warning"}),
        # the same rows make a step, split in another way
        (TRL, {}, {"batch.per_device": 2}, {"per_device": "note", "accumulation": "note"}),
        (TRL, {}, {"batch": 16}, {"accumulation": "error"}),
        (TRL, {}, {"optim": "sgd"}, {"optim": "error"}),
        (TRL, {"optim": "adamw_torch"}, {"optim": "adamw_bnb_8bit"}, {"optim": "error"}),
        # torch.optim.AdamW takes the state of either, and whether it is fused with it
        (TRL, {}, {"optim": "adamw_torch"}, {"optim": "warning"}),
        (TRL, {}, {"optim": "adamw_torch_fused"}, {"optim": "warning"}),
        (TRL, {"gpus": 1}, {"gpus": 1, "deepspeed": "zero3"}, {"deepspeed": "error"}),
        (SFT, {}, {"fused_optimizer": "false"}, {"fused_optimizer": "warning"}),
        # without QLoRA nothing reads it (finetune.py::main[optimizer = torch.optim.AdamW])
        (SFT, {}, {"use_8bit_optimizer": "true"}, {"use_8bit_optimizer": "note"}),
        (DPO, {"gpus": 1}, {"gpus": 1, "dpo_use_paged_optimizer": "true"},
         {"dpo_use_paged_optimizer": "error"}),
    ],
)  # fmt: skip
def test_what_would_go_on_wrongly_is_refused_until_it_is_named(
    run: Make, text: str, before: dict[str, Any], after: dict[str, Any], expected: dict[str, str]
) -> None:
    one = run(text)
    one.start(*words(before), **machine(before))
    saved.trl(one.output, 4) if text == TRL else saved.pinned(one.output, "step_6")
    decision = one.decide(*words(after), **machine(after))
    assert {change.what: change.severity for change in decision.changes} == expected
    wrong = [f for f in decision.findings if f.severity == "error"]
    names = [name for name, severity in expected.items() if severity == "error"]
    assert [str(f.help).rpartition(" ")[2] for f in wrong] == names
    allowed = one.decide(*words(after), allow=tuple(names), **machine(after))
    assert not errors(allowed) and allowed.kind == "resume"


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ({}, {"learning_rate": 1e-3}, "learning_rate"),
        # how much is printed is no reason
        ({}, {"logging_steps": 5, "keep_last_n_checkpoints": 1}, None),
        ({"gpus": 1, "deepspeed": "zero2"}, {"gpus": 1, "deepspeed": "none"}, "deepspeed"),
        ({"gpus": 1, "mixed_precision": "bf16"}, {"gpus": 1, "mixed_precision": "no"}, "mixed_precision"),
    ],
)  # fmt: skip
def test_a_finished_run_with_other_settings_is_no_answer(
    run: Make, before: dict[str, Any], after: dict[str, Any], what: str | None
) -> None:
    one = run()
    one.start(*words(before), **machine(before))
    one.ended()
    saved.model(one.output)
    assert codes(one.decide(*words(before), **machine(before))) == {"already-finished": "note"}
    decision = one.decide(*words(after), **machine(after))
    if what is None:
        assert codes(decision) == {"already-finished": "note"}
    else:
        assert codes(decision) == {"finished-changed": "error"}
        assert f"`{what}`" in errors(decision)[0]


def words(settings: dict[str, Any]) -> list[str]:
    return [f"{k}={v}" for k, v in settings.items() if k not in ("batch", "gpus")]


def machine(settings: dict[str, Any]) -> dict[str, int]:
    return {k: v for k, v in settings.items() if k in ("batch", "gpus")}


def test_what_comes_out_of_the_checkpoint_is_what_the_record_says(run: Make) -> None:
    one = run(TRL)
    one.start("learning_rate=0.005")
    saved.trl(one.output, 4)
    decision = one.start("learning_rate=0.004")
    assert decision.derived["learning_rate"].value == 0.005
    told = rundir.read_manifest(one.folder)["args"]["learning_rate"]
    assert told["value"] == 0.005 and "checkpoint-4, not 0.004" in told["origin"]
    # asked for once more, it is said once more
    assert one.decide("learning_rate=0.004").derived["learning_rate"].value == 0.005
    assert not one.decide("learning_rate=0.005").changes
    saved.model(one.output)
    one.ended()
    for value in ("0.005", "0.004"):
        decision = one.decide(f"learning_rate={value}")
        assert (decision.kind, codes(decision)) == ("finished", {"already-finished": "note"})
    assert codes(one.decide("learning_rate=0.003")) == {"finished-changed": "error"}


def forgotten(one: Run, *steps: int, code: int | None = None) -> None:
    """The run with its checkpoints, as an output folder tells of it whose run folder is gone."""
    one.start()
    granted = lease.acquire(one.output, one.folder.path)
    lease.keep_manifest(granted, rundir.read_manifest(one.folder))
    replace(granted, state="failed" if code is None else "finished", code=code).write()
    for step in steps:
        saved.trl(one.output, step)
    shutil.rmtree(one.folder.path)


def test_without_its_run_folder_a_run_goes_on_and_is_compared(run: Make) -> None:
    one = run(TRL)
    forgotten(one, 2, 4)
    decision = one.decide()
    assert (decision.kind, decision.step) == ("resume", 4)
    assert "resumes" in codes(decision) and not errors(decision)
    assert one.decide("learning_rate=0.5").derived["learning_rate"].value != 0.5
    assert codes(one.decide("seed=7"))["resume-changed"] == "error"


def test_a_finished_run_without_its_run_folder_is_not_trained_over(run: Make) -> None:
    one = run(TRL)
    forgotten(one, code=0)
    saved.model(one.output)
    decision = one.decide()
    assert (decision.kind, codes(decision)) == ("finished", {"already-finished": "error"})


def test_fresh_is_continued_without_its_run_folder(run: Make) -> None:
    one = run(TRL)
    saved.trl(one.output, 2)
    stage = one.plan().stage
    placed = resume.choose_output(stage, one.output, [], fresh=True)
    assert placed.output is not None
    made = plan.completed(one.plan(), placed.derived)
    record = manifest.build_manifest(
        1, rundir.utc_now(), made, built(made), one.trainer, placed.output
    )
    told = replace(record, asked_output=str(one.output)).as_json()
    granted = lease.acquire(placed.output, one.folder.path)
    lease.keep_manifest(granted, told)
    assert resume.choose_output(stage, one.output, [], fresh=False).output == placed.output


def test_checkpoints_without_any_record_are_not_trained_over(run: Make) -> None:
    one = run(TRL)
    saved.trl(one.output, 4)
    assert codes(one.decide())["not-resumed"] == "error"
    named = one.decide(f"resume_from_checkpoint={one.output / 'checkpoint-4'}")
    assert (named.kind, named.step, errors(named)) == ("resume", 4, [])
    saved.cut(one.output / "checkpoint-4" / "optimizer.pt")
    assert not errors(one.decide())


def test_edited_data_and_another_model_under_the_same_name(run: Make) -> None:
    one = run()
    one.start()
    saved.pinned(one.output, "step_4")
    one.data.write_text(rows_of(one.text, "b", 48))
    saved.tensors(one.place / "model" / "model.safetensors", 128)
    told = {change.what: change.severity for change in one.decide().changes}
    # the weights come out of the checkpoint, unless they are an adapter's
    assert told == {"data": "error", "model": "warning"}
    assert not errors(one.decide(allow=("data",)))


def test_another_commit_and_other_packages(run: Make) -> None:
    one = run()
    one.start()
    saved.pinned(one.output, "step_4")
    told = rundir.read_manifest(one.folder)
    told["upstream"]["version"] = "another"
    told["trainer"]["packages"]["torch"] = "0.1"
    files.write_json(one.folder.manifest, told)
    assert {c.what: c.severity for c in one.decide().changes} == {
        "pin": "error", "packages": "warning",
    }  # fmt: skip


def test_a_checkpoint_is_compared_with_the_attempt_that_saved_it(run: Make) -> None:
    one = run()
    one.start()
    saved.pinned(one.output, "step_4")
    # started with other rows, allowed, and killed before it saved anything
    one.start("max_seq_length=32", allow=("max_seq_length",))
    assert [c.what for c in one.decide("max_seq_length=32").changes] == ["max_seq_length"]
    assert one.decide().changes == ()
    # what it does save is its own
    saved.pinned(one.output, "step_6")
    assert one.decide("max_seq_length=32").changes == ()
    assert [c.what for c in one.decide().changes] == ["max_seq_length"]


def test_the_place_of_an_attempt_that_began_elsewhere(run: Make) -> None:
    one = run(rows=44)
    one.start()
    saved.pinned(one.output, "step_8")
    begun = one.start(allow=("position",))
    assert begun.place == resume.DataPosition(1, 5)
    saved.pinned(one.output, "step_10")
    # upstream's own count continues from where it began: the second attempt's checkpoints are exact
    assert one.decide().step == 10


def test_a_name_that_nothing_has(run: Make) -> None:
    with pytest.raises(UsageError, match="foo"):
        run().decide(allow=("foo",))


def test_ranks_that_left_nothing(run: Make) -> None:
    one = run()
    one.start(gpus=2)
    saved.pinned(one.output, "step_2", ranks=2)
    saved.pinned(one.output, "step_4", ranks=1)
    decision = one.decide(gpus=2)
    assert (decision.step, [path.name for path in decision.aside]) == (2, ["step_4"])


def test_a_reference_that_is_gone_is_never_made_of_a_half_trained_model(run: Make) -> None:
    from launcher.cache import keys

    one = run(DPO)
    held: list[keys.Cache] = []

    def again(*overrides: str) -> Decision:
        made = one.plan(*overrides, gpus=1)
        held[:] = keys.derive(made, one.trainer.packages, lenient=True)
        judge = resume.ResumeJudge(
            plan=made, output=one.output, history=one.history(), folder=one.folder, trainer=one.trainer,
            caches=held, now=inputs.of_plan(made),
        )  # fmt: skip
        return judge.decide()

    # of checkpoints that nobody here has made, before the first start
    saved.engine(one.output, "step_6", ranks=1)
    made = one.plan(gpus=1)
    foreign = resume.ResumeJudge(
        plan=made, output=one.output, history=[], folder=None, trainer=one.trainer,
        caches=keys.derive(made, one.trainer.packages, lenient=True),
    )  # fmt: skip
    assert "reference-gone" in codes(foreign.decide())
    shutil.rmtree(one.output)
    one.start(gpus=1)
    saved.engine(one.output, "step_6", ranks=1)
    again()
    cache = next(c for c in held if c.kind == "reference")
    told = rundir.read_manifest(one.folder)
    files.write_json(one.folder.manifest, {**told, "caches": [c.as_json() for c in held]})
    file = cache.path / "0123456789abcdef.pt"
    one.folder.console(1).write_text(f"INFO Saving reference logprobs cache to {file}\n")
    assert "reference-gone" in codes(again())
    cache.path.mkdir(parents=True)
    (cache.path / "another.pt").write_text("of other settings")
    assert "reference-gone" in codes(again())
    file.write_text("")
    assert not errors(again())
    # upstream keys the file by settings too
    assert any("reference" in message for message in errors(again("packing=true")))


def test_fresh_takes_a_folder_beside_and_the_same_command_then_goes_on_there(run: Make) -> None:
    one = run()
    stage = one.plan().stage
    assert resume.choose_output(stage, None, [], fresh=True).output is None
    for fresh in (False, True):
        placed = resume.choose_output(stage, one.output, [], fresh=fresh)
        assert (placed.output, dict(placed.derived)) == (one.output, {})
    saved.pinned(one.output, "step_2")
    (one.place / "out-2").mkdir()
    placed = resume.choose_output(stage, one.output, [], fresh=True)
    assert placed.output == one.place / "out-3"
    assert placed.derived["output_dir"].value == str(one.place / "out-3")
    made = plan.completed(one.plan(), placed.derived)
    assert made.arguments()["output_dir"] == [str(one.place / "out-3")]
    assert (one.output / "step_2").is_dir()

    record = manifest.build_manifest(
        1, rundir.utc_now(), made, built(made), one.trainer, placed.output
    )
    told = replace(record, asked_output=str(one.output)).as_json()
    files.write_json(one.folder.manifest, told)
    again = resume.choose_output(stage, one.output, [one.folder], fresh=False)
    assert again.output == one.place / "out-3"
    assert again.derived["output_dir"].value == str(one.place / "out-3")


def dry(one: Run, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, list[str]]:
    """What a dry run of the stage file answers, and what it says of an earlier run."""
    path = str(one.place / "stage.yaml")
    assert main(["sft", path, "--gpus", "0", "--dry-run", "--format", "json", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    said = [f["message"] for f in told["findings"] if f["code"] == "earlier-run"]
    probe = json.loads(told["data"]["env"]["LAUNCH_PROBE"])
    assert Path(probe["out"]).parent == Path(told["data"]["run"]) != one.folder.path
    return told["data"], said


def test_a_dry_run_says_what_a_start_would_go_on_from_and_keeps_out_of_its_record(
    run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = run(TRL)
    one.plan()
    assert dry(one, capsys)[1] == []
    one.start()
    saved.trl(one.output, 4)
    told, said = dry(one, capsys)
    assert len(said) == 1 and "may overwrite it" in said[0]
    assert "--resume_from_checkpoint" not in told["argv"]
    assert dry(one, capsys, "--fresh")[1] == []
    # what a dry run says of has been looked at, not touched
    assert sorted(path.name for path in one.folder.path.iterdir()) == ["console.log", "run.json"]
    assert [path.name for path in one.folder.path.parent.iterdir()] == ["one"]


def test_checkpoints_of_somebody_else(run: Make) -> None:
    one = run()
    saved.pinned(one.output, "step_4")
    decision = one.decide()
    assert (decision.kind, decision.step) == ("resume", 4)
    saved.cut(one.output / "step_4" / "optimizer.bin")
    assert codes(one.decide())["broken-checkpoint"] == "error"


def test_a_name_that_upstream_would_take_for_a_checkpoint(run: Make) -> None:
    one = run()
    (one.output / "step_4_old").mkdir(parents=True)
    assert codes(one.decide()) == {"checkpoint-name": "error"}


def test_a_checkpoint_that_the_stage_file_names_counts_once(run: Make) -> None:
    one = run(TRL)
    one.start()
    for step in (2, 4):
        saved.trl(one.output, step)
    named = f"resume_from_checkpoint={one.output / 'checkpoint-2'}"
    begun = one.start(named)
    assert (begun.step, dict(begun.derived)) == (2, {})
    assert [path.name for path in begun.aside] == ["checkpoint-4"]
    # it was killed later: the same command continues from what it saved since
    saved.trl(one.output, 4)
    assert one.decide(named).step == 4


def test_what_is_said_beforehand(run: Make) -> None:
    one = run(TRL)
    assert codes(one.decide()) == {}
    for setting in ("save_strategy='no'", "save_only_model=true"):
        assert codes(one.decide(setting)) == {"no-checkpoints": "note"}
    one.text, none = SFT, {"no-checkpoints": "note"}
    assert (codes(one.decide()), codes(one.decide("checkpointing_steps=null"))) == ({}, none)


def test_every_step_is_told_once_and_by_the_attempt_that_counts(tmp_path: Path) -> None:
    path = made_runs.made(tmp_path / "run", steps=40, ended=False)
    # killed at 40 of more, gone on from 30, killed before it took a step, gone on from 30 again
    made_runs.made(path, attempt=2, first=31, steps=35, scale=2, ended=False)
    made_runs.made(path, attempt=3, first=31, steps=30, ended=False)
    made_runs.made(path, attempt=4, first=31, steps=50, scale=3)
    rows = judge.merge_rows([read_run(path, attempt=n) for n in range(1, 5)])
    assert [row["step"] for row in rows] == list(range(1, 51))
    assert [row["seconds"] for row in rows] == [0.5] * 30 + [1.5] * 20
    assert judge.merge_rows([]) == []


def test_a_resumed_run_is_judged_as_one_run(tmp_path: Path) -> None:
    path = made_runs.made(tmp_path / "run", steps=40, ended=False)
    first = [row["loss"] for row in read_run(path).rows]
    made_runs.made(path, attempt=2, first=38, steps=40)
    found = judge.merge_attempts(judge.read_attempts(RunFolder(path)))
    # what the first attempt did from step 38 on is not in the weights
    assert (
        metrics.earlier_values(found, "loss") == first[:37]
        and len(metrics.losses_of_run(found)) == 40
    )
    assert metrics.compute_metrics(found)["first_loss"] == first[0]
    (trend,) = (
        p for p in check.judge_evidence("sft", {"trend": "any"}, found).points if p.name == "trend"
    )
    assert trend.detail["losses"] == 40


def test_an_attempt_with_nothing_left_is_judged_by_the_steps_before(tmp_path: Path) -> None:
    path = made_runs.made(tmp_path / "run", steps=40, ended=False)
    made_runs.made(path, attempt=2, first=41, steps=40)
    folder = RunFolder(path)
    assert judge.merge_attempts(judge.read_attempts(folder)).probe is not None
    with (path / "probe" / "rank-0.jsonl").open("a") as file:
        for event in (
            {"event": "start", "rank": 0, "world": 1, "attempt": 3},
            {"event": "resumed", "path": "out/checkpoint-40", "step": 40},
            {"event": "end", "exit": 0},
        ):
            file.write(json.dumps(event) + "\n")
    (path / "console.3.log").write_text("💾 Model saved to out/a.\n")
    found = judge.merge_attempts(judge.read_attempts(folder))
    assert found.probe is not None and found.probe.last_step == 40
    assert found.exit is None and found.log is not None and found.log.path.name == "console.3.log"


def test_the_largest_gradient_norm_is_that_of_the_whole_run(tmp_path: Path) -> None:
    path = made_runs.made(tmp_path / "run", steps=40, ended=False)
    made_runs.made(path, attempt=2, first=31, steps=40)
    record = path / "probe" / "rank-0.jsonl"
    norms = {3: 9.0, 33: 2.0}
    lines, attempt = [], 0
    for event in map(json.loads, record.read_text().splitlines()):
        if event["event"] == "start":
            attempt = event["attempt"]
        elif event["event"] == "step":
            # what the first attempt did at step 38 is not in the weights
            gone = attempt == 1 and event["step"] == 38
            event["grad_norm"] = 99.0 if gone else norms.get(event["step"], 1.0)
        lines.append(json.dumps(event) + "\n")
    record.write_text("".join(lines))
    found = metrics.compute_metrics(judge.merge_attempts(judge.read_attempts(RunFolder(path))))
    assert (found["max_grad_norm"], found["last_grad_norm"]) == (9.0, 1.0)
    assert metrics.compute_metrics(read_run(path))["max_grad_norm"] == 2.0
