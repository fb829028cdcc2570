"""Saying a command again: what is continued, from where, what is refused, and what is finished."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_runs
import pytest
import saved
from answers import Answer, Ask
from answers import ask as ask  # a fixture
from plans import build_command
from repeated import DPO, OLMO_CORE, SFT, TRL, Make, Run, codes, rows_of
from repeated import run as run  # a fixture

from launcher import files
from launcher.cache import inputs, keys
from launcher.errors import UsageError
from launcher.lifecycle import manifest
from launcher.plan import plan
from launcher.planning.resume import decision as resume
from launcher.planning.resume.decision import Decision
from launcher.runs import lease, rundir
from launcher.runs.rundir import RunFolder
from launcher.verdict import check, judge, metrics
from launcher.verdict.evidence import Evidence, read_run

FINISHED = "finished: note already-finished"
CHANGED = "finished: error finished-changed"
EARLIER = "note resumes: note set-aside: warning resume-earlier"


def save(run: Run, *steps: int, **how: Any) -> None:
    """Leave a checkpoint of each step in the output, as the trainer of the stage writes it."""
    for step in steps:
        if run.text == TRL:
            saved.trl(run.output, step, **how)
        elif run.text == DPO:
            saved.engine(run.output, f"step_{step}", ranks=1)
        else:
            saved.pinned(run.output, f"step_{step}", **how)


def summarise(decision: Decision) -> str:
    """The kind, the checkpoint, what is set aside, and the gravest severity of each code."""
    summary: str = decision.kind
    if decision.checkpoint is not None:
        summary += f" {decision.checkpoint.name}"
    if decision.aside:
        names = [path.name for path in decision.aside]
        summary += f" without {', '.join(names)}"
    for code, severity in codes(decision).items():
        summary += f": {severity} {code}"
    return summary


def errors(decision: Decision) -> str:
    """The messages and helps of all errors."""
    lines = []
    for finding in decision.findings:
        if finding.severity == "error":
            lines += [finding.message, finding.help or ""]
    return "\n".join(lines)


def warning(decision: Decision, code: str) -> str:
    """The message and the help of the first warning of that code."""
    for finding in decision.findings:
        if (finding.severity, finding.code) == ("warning", code):
            return f"{finding.message}\n{finding.help}"
    raise AssertionError(f"no warning {code}")


def changes(decision: Decision) -> str:
    """The severity and the name of each change."""
    return ", ".join(f"{change.severity} {change.what}" for change in decision.changes)


def with_settings(act: Callable[..., Decision], settings: str, **how: Any) -> Decision:
    """Start or decide with overrides, of which `batch` and `gpus` are those of the plan."""
    overrides = []
    for word in settings.split():
        name, _, value = word.partition("=")
        if name in ("batch", "gpus"):
            how[name] = int(value)
        else:
            overrides.append(word)
    return act(*overrides, **how)


def test_the_same_command_goes_on_from_the_last_complete_checkpoint(run: Make) -> None:
    sft = run()
    sft.start()
    save(sft, 2, 4)
    save(sft, 6, completed=False)

    # the next save writes over what was begun
    decision = sft.decide()
    assert summarise(decision) == "resume step_4: note resumes"
    assert "8 of 12 steps are left" in decision.findings[0].message


def test_trl_gets_the_checkpoint_as_an_argument(run: Make) -> None:
    trl = run(TRL)
    trl.start()
    save(trl, 2, 4)
    (trl.output / "checkpoint-4" / "trainer_state.json").unlink()

    decision = trl.decide()
    assert decision.kind == "resume"
    assert list(decision.derived) == ["resume_from_checkpoint"]
    arguments = plan.complete_plan(trl.plan(), decision.derived).arguments()
    assert arguments["resume_from_checkpoint"] == [str(trl.output / "checkpoint-2")]


def test_without_a_complete_checkpoint_it_begins_anew(run: Make) -> None:
    sft = run(every=2)
    sft.start()
    save(sft, 2, completed=False)
    assert summarise(sft.decide()) == "new: note nothing-to-resume"
    # one that this run would not write next would be marked as complete instead of what it saves
    save(sft, 8, completed=False)
    assert summarise(sft.decide()) == "new without step_8: note nothing-to-resume: note set-aside"


def test_the_second_dpo_script_goes_on_by_itself_or_is_finished(run: Make) -> None:
    dpo = run(OLMO_CORE)
    (dpo.place / "model" / "generation_config.json").write_text("{}")
    dpo.start(gpus=1)
    # of a run that saved nothing it is true
    (dpo.output / "step0").mkdir(parents=True)
    assert summarise(dpo.decide(gpus=1)) == "new: note nothing-to-resume"
    (dpo.output / "step4").mkdir()
    assert summarise(dpo.decide(gpus=1)) == "new"
    dpo.ended()
    saved.model(dpo.output / "hf_model")
    assert summarise(dpo.decide(gpus=1)) == FINISHED


@pytest.mark.parametrize("record", ["exit", "probe"])
def test_a_run_that_ended_is_finished_once_its_model_is_saved(run: Make, record: str) -> None:
    sft = run()
    sft.start()
    if record == "exit":
        sft.ended()
    else:
        # the supervisor did not live to write how it ended
        sft.folder.probe.mkdir()
        append_events(
            sft.folder.probe / "rank-0.jsonl",
            {"event": "start", "rank": 0, "attempt": 1},
            {"event": "end", "exit": 0},
        )
    assert sft.decide().kind == "new"
    saved.model(sft.output)
    assert summarise(sft.decide()) == FINISHED
    # not even when checkpoints were left, as DPO does: it would train the rest again
    save(sft, 10)
    assert sft.decide().kind == "finished"


def test_a_run_that_was_killed_while_it_saved_the_model_is_not_finished(run: Make) -> None:
    sft = run()
    sft.start()
    save(sft, 12)
    saved.model(sft.output)
    sft.ended(137)
    assert sft.decide().kind == "resume"
    sft.ended(0)
    saved.cut(sft.output / "model.safetensors")
    assert sft.decide().kind == "resume"


def test_it_goes_back_to_where_a_resume_is_exact(run: Make) -> None:
    """44 rows by 4 are 11 micro-batches: with 2 a step only the first epoch's checkpoints are."""
    sft = run(rows=44)
    assert summarise(sft.decide()) == "new: warning resume-inexact"
    sft.start()
    save(sft, 2, 4, 6, 8)

    decision = sft.decide()
    assert summarise(decision) == f"resume step_4 without step_6, step_8: {EARLIER}"
    assert decision.kept == ("step_2", "step_4")

    moved = resume.set_aside(decision, 2)
    assert [path.name for path in moved] == ["step_6.attempt-2", "step_8.attempt-2"]
    for path in moved:
        assert (path / "COMPLETED").is_file()
    assert sorted(path.name for path in sft.output.iterdir()) == ["step_2", "step_4"]


def test_without_an_exact_checkpoint_a_resume_is_refused_until_allowed(run: Make) -> None:
    sft = run(rows=44)
    sft.start()
    save(sft, 8)
    refused = sft.decide()
    assert codes(refused)["resume-inexact"] == "error"
    assert "--allow-changed-resume position" in errors(refused)
    allowed = sft.decide(allow=("position",))
    assert not errors(allowed)
    assert allowed.step == 8


def test_rows_are_counted_as_they_were_left_by_filtering(run: Make) -> None:
    sft = run(rows=48)
    sft.start()
    save(sft, 8)
    assert not errors(sft.decide())
    sft.folder.console(1).write_text("***** Running training *****\nINFO   Num examples = 44\n")
    assert "rows into epoch" in errors(sft.decide())


def test_epochs_are_always_exact_and_a_half_written_step_does_not_hide_them(run: Make) -> None:
    sft = run(rows=44, every="epoch")
    assert summarise(sft.decide()) == "new"
    sft.start()
    saved.pinned(sft.output, "epoch_0")
    save(sft, 8, completed=False)
    decision = sft.decide()
    assert summarise(decision) == "resume epoch_0 without step_8: note resumes: note set-aside"
    assert decision.step == 6
    assert decision.place == resume.DataPosition(1, 0)


def test_dpo_inside_an_epoch_skips_in_each_later_one(run: Make) -> None:
    dpo = run(DPO)
    assert "`checkpointing_steps: 6` is exact" in warning(dpo.decide(gpus=1), "resume-inexact")
    dpo.start(gpus=1)
    save(dpo, 2, 4)
    assert "skipped again in each later epoch" in errors(dpo.decide(gpus=1))
    # the last epoch has no later one
    save(dpo, 6, 8)
    assert dpo.decide(gpus=1).step == 8


def test_an_accelerate_that_forgets_the_epoch(run: Make, tmp_path: Path) -> None:
    sft = run()
    loader = tmp_path / "site" / "accelerate" / "data_loader.py"
    loader.parent.mkdir(parents=True)
    sft.trainer = replace(sft.trainer, path=(tmp_path / "site",))
    loader.write_text("DataLoaderShard(dataset, **kwargs)")
    assert "order of the first epoch" in warning(sft.decide(), "resume-inexact")
    sft.start()
    save(sft, 4, 8)
    assert sft.decide().step == 4
    loader.write_text("Shard(dataset, iteration=dataloader.iteration, **kwargs)")
    assert sft.decide().step == 8


def test_the_last_step_inside_an_epoch_would_be_followed_by_another(run: Make) -> None:
    trl = run(TRL)
    trl.start("max_steps=8")
    save(trl, 6, epoch=1.0)
    save(trl, 8, epoch=8 / 6)
    decision = trl.decide("max_steps=8")
    assert summarise(decision) == f"resume checkpoint-6 without checkpoint-8: {EARLIER}"


def test_data_that_are_not_skipped_begin_again(run: Make) -> None:
    trl = run(TRL)
    trl.start()
    save(trl, 2)
    ignoring = "ignore_data_skip=true"
    # the stage file asks for it
    decision = trl.decide(ignoring)
    assert summarise(decision) == "resume checkpoint-2: note resumes: warning resume-inexact"
    assert "first rows" in warning(decision, "resume-inexact")
    # at the end of an epoch nothing is skipped
    save(trl, 6, epoch=1.0)
    assert summarise(trl.decide(ignoring)) == "resume checkpoint-6: note resumes"
    # what an attempt saves that began an epoch again is not where its number says
    save(trl, 8, epoch=8 / 6)
    trl.start(ignoring)
    save(trl, 10, epoch=10 / 6)
    back = trl.decide()
    assert back.step == 8
    assert "rows that it never reached would be skipped" in warning(back, "resume-earlier")


STAGES = {"sft": SFT, "dpo": DPO, "trl": TRL}
# the stage, the settings of the attempt that saved the checkpoint, those of now, what they change
CHANGES = [
    ("sft", "", "batch=16", "error accumulation"),
    ("sft", "", "gpus=2", "error gpus, note accumulation"),
    ("sft", "", "max_seq_length=32", "error max_seq_length"),
    ("sft", "", "use_lora=true", "error use_lora"),
    # the value of the checkpoint is taken
    ("sft", "", "learning_rate=1e-3", "warning learning_rate"),
    # how often it is saved and logged is no change
    ("sft", "", "checkpointing_steps=4 logging_steps=2", ""),
    # the same rows make a step, split in another way
    ("trl", "", "batch.per_device=2", "note per_device, note accumulation"),
    ("trl", "", "batch=16", "error accumulation"),
    ("trl", "", "optim=sgd", "error optim"),
    ("trl", "optim=adamw_torch", "optim=adamw_bnb_8bit", "error optim"),
    # torch.optim.AdamW takes the state of either, and whether it is fused with it
    ("trl", "", "optim=adamw_torch", "warning optim"),
    ("trl", "gpus=1", "gpus=1 deepspeed=zero3", "error deepspeed"),
    ("sft", "", "fused_optimizer=false", "warning fused_optimizer"),
    # without QLoRA nothing reads it (finetune.py::main[optimizer = torch.optim.AdamW])
    ("sft", "", "use_8bit_optimizer=true", "note use_8bit_optimizer"),
    ("dpo", "gpus=1", "gpus=1 dpo_use_paged_optimizer=true", "error dpo_use_paged_optimizer"),
]


@pytest.mark.parametrize("stage, before, after, expected", CHANGES)
def test_a_change_that_would_train_wrongly_is_refused_until_it_is_named(
    run: Make, stage: str, before: str, after: str, expected: str
) -> None:
    changed = run(STAGES[stage], every=4 if stage == "trl" else 6)
    with_settings(changed.start, before)
    save(changed, changed.every)
    refused = with_settings(changed.decide, after)
    assert changes(refused) == expected

    wrong = re.findall(r"error (\w+)", expected)
    assert re.findall(r"--allow-changed-resume (\w+)", errors(refused)) == wrong
    allowed = with_settings(changed.decide, after, allow=tuple(wrong))
    assert not errors(allowed)
    assert allowed.kind == "resume"


@pytest.mark.parametrize(
    "before, after, changed",
    [
        ("", "learning_rate=1e-3", "learning_rate"),
        # how much is printed is no reason
        ("", "logging_steps=5 keep_last_n_checkpoints=1", None),
        ("gpus=1 deepspeed=zero2", "gpus=1 deepspeed=none", "deepspeed"),
        ("gpus=1 mixed_precision=bf16", "gpus=1 mixed_precision=no", "mixed_precision"),
    ],
)
def test_a_finished_run_with_other_settings_is_no_answer(
    run: Make, before: str, after: str, changed: str | None
) -> None:
    sft = run()
    with_settings(sft.start, before)
    sft.ended()
    saved.model(sft.output)
    assert summarise(with_settings(sft.decide, before)) == FINISHED

    decision = with_settings(sft.decide, after)
    if changed is None:
        assert summarise(decision) == FINISHED
    else:
        assert summarise(decision) == CHANGED
        assert f"`{changed}`" in errors(decision)


def test_what_comes_out_of_the_checkpoint_is_what_the_record_says(run: Make) -> None:
    trl = run(TRL)
    trl.start("learning_rate=0.005")
    save(trl, 4)
    decision = trl.start("learning_rate=0.004")
    assert decision.derived["learning_rate"].value == 0.005
    recorded = rundir.read_manifest(trl.folder)["args"]["learning_rate"]
    assert recorded["value"] == 0.005
    assert "checkpoint-4, not 0.004" in recorded["origin"]
    # asked for once more, it is said once more
    assert trl.decide("learning_rate=0.004").derived["learning_rate"].value == 0.005
    assert not trl.decide("learning_rate=0.005").changes
    saved.model(trl.output)
    trl.ended()
    for value in ("0.005", "0.004"):
        assert summarise(trl.decide(f"learning_rate={value}")) == FINISHED
    assert summarise(trl.decide("learning_rate=0.003")) == CHANGED


def forget_run_folder(run: Run, code: int | None = None) -> None:
    """Start the run and remove its run folder; the output alone tells of it."""
    run.start()
    granted = lease.acquire(run.output, run.folder.path)
    lease.keep_manifest(granted, rundir.read_manifest(run.folder))
    state = "failed" if code is None else "finished"
    replace(granted, state=state, code=code).write()
    shutil.rmtree(run.folder.path)


def test_without_its_run_folder_a_run_goes_on_and_is_compared(run: Make) -> None:
    trl = run(TRL)
    forget_run_folder(trl)
    save(trl, 2, 4)
    assert summarise(trl.decide()) == "resume checkpoint-4: note resumes"
    assert trl.decide("learning_rate=0.5").derived["learning_rate"].value != 0.5
    assert codes(trl.decide("seed=7"))["resume-changed"] == "error"


def test_a_finished_run_without_its_run_folder_is_not_trained_over(run: Make) -> None:
    trl = run(TRL)
    forget_run_folder(trl, code=0)
    saved.model(trl.output)
    assert summarise(trl.decide()) == "finished: error already-finished"


def test_checkpoints_without_any_record_are_not_trained_over(run: Make) -> None:
    trl = run(TRL)
    save(trl, 4)
    assert summarise(trl.decide()) == "new: error not-resumed"
    named = trl.decide(f"resume_from_checkpoint={trl.output / 'checkpoint-4'}")
    assert summarise(named) == "resume checkpoint-4"
    saved.cut(trl.output / "checkpoint-4" / "optimizer.pt")
    assert not errors(trl.decide())


def test_edited_data_and_another_model_under_the_same_name(run: Make) -> None:
    sft = run()
    sft.start()
    save(sft, 4)
    sft.data.write_text(rows_of(sft.text, "b", 48))
    saved.tensors(sft.place / "model" / "model.safetensors", 128)
    # the weights come out of the checkpoint, unless they are an adapter's
    assert changes(sft.decide()) == "error data, warning model"
    assert not errors(sft.decide(allow=("data",)))


def test_another_commit_and_other_packages(run: Make) -> None:
    sft = run()
    sft.start()
    save(sft, 4)
    record = rundir.read_manifest(sft.folder)
    record["upstream"]["version"] = "another"
    record["trainer"]["packages"]["torch"] = "0.1"
    files.write_json(sft.folder.manifest, record)
    assert changes(sft.decide()) == "error pin, warning packages"


def test_a_checkpoint_is_compared_with_the_attempt_that_saved_it(run: Make) -> None:
    sft = run()
    sft.start()
    save(sft, 4)
    # started with other rows, allowed, and killed before it saved anything
    shorter = "max_seq_length=32"
    sft.start(shorter, allow=("max_seq_length",))
    assert changes(sft.decide(shorter)) == "error max_seq_length"
    assert changes(sft.decide()) == ""
    # what it does save is its own
    save(sft, 6)
    assert changes(sft.decide(shorter)) == ""
    assert changes(sft.decide()) == "error max_seq_length"


def test_upstreams_count_goes_on_from_where_an_attempt_began(run: Make) -> None:
    sft = run(rows=44)
    sft.start()
    save(sft, 8)
    assert sft.start(allow=("position",)).place == resume.DataPosition(1, 5)
    # the second attempt's checkpoints are exact
    save(sft, 10)
    assert sft.decide().step == 10


def test_an_unknown_name_cannot_be_allowed(run: Make) -> None:
    with pytest.raises(UsageError, match="foo"):
        run().decide(allow=("foo",))


def test_a_checkpoint_that_lacks_a_rank_is_set_aside(run: Make) -> None:
    sft = run()
    sft.start(gpus=2)
    save(sft, 2, ranks=2)
    save(sft, 4, ranks=1)
    assert (
        summarise(sft.decide(gpus=2))
        == "resume step_2 without step_4: note resumes: note set-aside"
    )


def test_a_reference_that_is_gone_is_never_made_of_a_half_trained_model(run: Make) -> None:
    dpo = run(DPO)

    def derive_caches(*overrides: str) -> list[keys.Cache]:
        return keys.derive(dpo.plan(*overrides, gpus=1), dpo.trainer.packages, lenient=True)

    def decide(*overrides: str, is_known: bool = True) -> Decision:
        planned = dpo.plan(*overrides, gpus=1)
        judge = resume.ResumeJudge(
            plan=planned,
            output=dpo.output,
            history=dpo.history() if is_known else [],
            folder=dpo.folder if is_known else None,
            trainer=dpo.trainer,
            caches=derive_caches(*overrides),
            now=inputs.record_inputs(planned),
        )
        return judge.decide()

    # of checkpoints that nobody here has made, before the first start
    save(dpo, 6)
    assert "reference-gone" in codes(decide(is_known=False))
    shutil.rmtree(dpo.output)

    dpo.start(gpus=1)
    save(dpo, 6)
    caches = derive_caches()
    record = rundir.read_manifest(dpo.folder)
    record["caches"] = [cache.as_json() for cache in caches]
    files.write_json(dpo.folder.manifest, record)
    (reference,) = [cache.path for cache in caches if cache.kind == "reference"]
    file = reference / "0123456789abcdef.pt"
    dpo.folder.console(1).write_text(f"INFO Saving reference logprobs cache to {file}\n")
    assert "reference-gone" in codes(decide())
    reference.mkdir(parents=True)
    (reference / "another.pt").write_text("of other settings")
    assert "reference-gone" in codes(decide())
    file.write_text("")
    assert not errors(decide())
    # upstream keys the file by settings too
    assert "reference" in errors(decide("packing=true"))


def test_fresh_takes_a_folder_beside_and_the_same_command_then_goes_on_there(run: Make) -> None:
    sft = run()
    stage = sft.plan().stage

    def choose(*history: RunFolder, fresh: bool = False) -> resume.OutputChoice:
        return resume.choose_output(stage, sft.output, history, fresh=fresh)

    assert resume.choose_output(stage, None, [], fresh=True).output is None
    assert choose().output == sft.output
    assert choose(fresh=True).output == sft.output
    assert not choose(fresh=True).derived

    save(sft, 2)
    (sft.place / "out-2").mkdir()
    beside = sft.place / "out-3"
    placed = choose(fresh=True)
    assert placed.output == beside
    planned = plan.complete_plan(sft.plan(), placed.derived)
    assert planned.arguments()["output_dir"] == [str(beside)]
    assert (sft.output / "step_2").is_dir()

    now = rundir.format_utc_now()
    record = manifest.build_manifest(1, now, planned, build_command(planned), sft.trainer, beside)
    content = replace(record, asked_output=str(sft.output)).as_json()
    # the output folder tells of it without the run folder
    lease.keep_manifest(lease.acquire(beside, sft.folder.path), content)
    assert choose().output == beside
    files.write_json(sft.folder.manifest, content)
    again = choose(sft.folder)
    assert again.output == beside
    assert again.derived["output_dir"].value == str(beside)


def test_a_dry_run_names_an_earlier_run_and_keeps_out_of_its_record(run: Make, ask: Ask) -> None:
    trl = run(TRL)
    trl.plan()

    def dry_run(*words: str) -> Answer:
        answer = ask("sft", str(trl.place / "stage.yaml"), "--gpus", "0", "--dry-run", *words)
        assert answer.code == 0
        probe = json.loads(answer.data["env"]["LAUNCH_PROBE"])
        folder = Path(answer.data["run"])
        assert folder != trl.folder.path
        assert Path(probe["out"]).parent == folder
        return answer

    assert "earlier-run" not in dry_run().codes
    trl.start()
    save(trl, 4)
    answer = dry_run()
    (finding,) = answer.with_code("earlier-run")
    assert "may overwrite it" in finding["message"]
    assert "--resume_from_checkpoint" not in answer.data["argv"]
    assert "earlier-run" not in dry_run("--fresh").codes
    # the run was looked at, not touched
    assert sorted(path.name for path in trl.folder.path.iterdir()) == ["console.log", "run.json"]
    assert list(trl.folder.path.parent.iterdir()) == [trl.folder.path]


def test_checkpoints_of_somebody_else(run: Make) -> None:
    sft = run()
    save(sft, 4)
    assert summarise(sft.decide()) == "resume step_4"
    saved.cut(sft.output / "step_4" / "optimizer.bin")
    assert summarise(sft.decide()) == "resume step_4: error broken-checkpoint"


def test_a_name_that_upstream_would_take_for_a_checkpoint(run: Make) -> None:
    sft = run()
    (sft.output / "step_4_old").mkdir(parents=True)
    assert summarise(sft.decide()) == "new: error checkpoint-name"


def test_a_checkpoint_that_the_stage_file_names_counts_once(run: Make) -> None:
    trl = run(TRL)
    trl.start()
    save(trl, 2, 4)
    named = f"resume_from_checkpoint={trl.output / 'checkpoint-2'}"
    decision = trl.start(named)
    assert summarise(decision) == "resume checkpoint-2 without checkpoint-4: note set-aside"
    assert not decision.derived
    # it was killed later: the same command continues from what it saved since
    save(trl, 4)
    assert trl.decide(named).step == 4


@pytest.mark.parametrize(
    "text, setting",
    [(TRL, "save_strategy='no'"), (TRL, "save_only_model=true"), (SFT, "checkpointing_steps=null")],
)
def test_a_run_that_could_not_be_resumed_is_noted_beforehand(
    run: Make, text: str, setting: str
) -> None:
    first = run(text)
    assert summarise(first.decide()) == "new"
    assert summarise(first.decide(setting)) == "new: note no-checkpoints"


def read_whole_run(path: Path) -> Evidence:
    return judge.merge_attempts(judge.read_attempts(RunFolder(path)))


def append_events(path: Path, *events: dict[str, object]) -> None:
    with path.open("a") as file:
        for event in events:
            file.write(json.dumps(event) + "\n")


def test_every_step_is_told_once_and_by_the_attempt_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "run"
    # killed at 40 of more, gone on from 30, killed before it took a step, gone on from 30 again
    made_runs.write_run(path, attempt=1, steps=40, ended=False)
    made_runs.write_run(path, attempt=2, first=31, steps=35, scale=2, ended=False)
    made_runs.write_run(path, attempt=3, first=31, steps=30, ended=False)
    made_runs.write_run(path, attempt=4, first=31, steps=50, scale=3)
    attempts = [read_run(path, attempt=number) for number in (1, 2, 3, 4)]

    rows = judge.merge_rows(attempts)
    assert [row["step"] for row in rows] == list(range(1, 51))
    for row in rows[:30]:
        assert row["seconds"] == 0.5
    for row in rows[30:]:
        assert row["seconds"] == 1.5


def test_without_an_attempt_there_are_no_steps() -> None:
    assert judge.merge_rows([]) == []


def test_a_resumed_run_is_judged_as_one_run(tmp_path: Path) -> None:
    path = made_runs.write_run(tmp_path / "run", steps=40, ended=False)
    first = [row["loss"] for row in read_run(path).rows]
    made_runs.write_run(path, attempt=2, first=38, steps=40)
    whole = read_whole_run(path)
    # what the first attempt did from step 38 on is not in the weights
    assert metrics.list_earlier_values(whole, "loss") == first[:37]
    assert len(metrics.list_losses_of_run(whole)) == 40
    assert metrics.compute_metrics(whole)["first_loss"] == first[0]
    verdict = check.judge_evidence("sft", {"trend": "any"}, whole)
    (trend,) = [point for point in verdict.points if point.name == "trend"]
    assert trend.detail["losses"] == 40


def test_an_attempt_with_nothing_left_is_judged_by_the_steps_before(tmp_path: Path) -> None:
    path = made_runs.write_run(tmp_path / "run", steps=40, ended=False)
    made_runs.write_run(path, attempt=2, first=41, steps=40)
    assert read_whole_run(path).probe is not None
    append_events(
        path / "probe" / "rank-0.jsonl",
        {"event": "start", "rank": 0, "world": 1, "attempt": 3},
        {"event": "resumed", "path": "out/checkpoint-40", "step": 40},
        {"event": "end", "exit": 0},
    )
    (path / "console.3.log").write_text("💾 Model saved to out/a.\n")
    whole = read_whole_run(path)
    assert whole.probe is not None
    assert whole.probe.last_step == 40
    assert whole.exit is None
    assert whole.log is not None
    assert whole.log.path.name == "console.3.log"


def test_the_largest_gradient_norm_is_that_of_the_whole_run(tmp_path: Path) -> None:
    path = made_runs.write_run(tmp_path / "run", steps=40, ended=False)
    made_runs.write_run(path, attempt=2, first=31, steps=40)
    record = path / "probe" / "rank-0.jsonl"
    # what the first attempt did at step 38 is not in the weights
    norms = {(1, 3): 9.0, (1, 38): 99.0, (2, 33): 2.0}
    events = []
    attempt = 0
    for line in record.read_text().splitlines():
        event = json.loads(line)
        attempt = event.get("attempt", attempt)
        if event["event"] == "step":
            event["grad_norm"] = norms.get((attempt, event["step"]), 1.0)
        events.append(event)
    record.write_text("")
    append_events(record, *events)
    whole = metrics.compute_metrics(read_whole_run(path))
    assert whole["max_grad_norm"] == 9.0
    assert whole["last_grad_norm"] == 1.0
    assert metrics.compute_metrics(read_run(path))["max_grad_norm"] == 2.0
