"""What a run is judged to be: by all its ranks, steps and attempts; the same for whoever asks."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import made_runs
import pytest
import saved
from judged_runs import (
    END,
    SAVED,
    Event,
    Run,
    advice,
    brief,
    liger,
    sft,
    step,
    steps,
    verdict_of_log,
)
from judged_runs import run as run  # a fixture
from recorded_events import read_events

from launcher import files
from launcher.lifecycle import conclude
from launcher.report import series
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder
from launcher.verdict import evidence, judge
from launcher.verdict.check import Point, Verdict

Ranks = Sequence[Sequence[Event] | None]

ON: Event = {"event": "packing", "state": "on", "detail": "9 samples in one row"}
OFF: Event = {"event": "packing", "state": "off", "detail": "1 samples in 1 row(s)"}
ISOLATED: Event = {"event": "packing_isolation", "state": "isolated", "reason": None}
LEAKING: Event = {"event": "packing_isolation", "state": "leaking", "reason": None}
UNTESTED: Event = {"event": "packing_isolation", "state": "untested", "reason": "ValueError: x"}
STALE: Event = {"event": "reference_cache", "state": "stale", "path": "p"}
HIT: Event = {"event": "dataset_cache", "state": "hit", "path": "p"}
MISS: Event = {"event": "dataset_cache", "state": "miss", "path": "p"}
OOM: Event = {"event": "error", "type": "OutOfMemoryError", "message": "m"}
CALLED = (step(1), liger(rope=4))


def model(attention: str) -> Event:
    return {"event": "model", "class": "M", "attention": attention}


def patch(**kwargs: bool) -> Event:
    return {"event": "liger_patch", "function": "f", "kwargs": kwargs}


FUSED = patch(fused_linear_cross_entropy=True)
UNFUSED = patch(fused_linear_cross_entropy=False)
FUSED_CALLED = (FUSED, step(1), liger(fused_linear_cross_entropy=4))


def judge_finished(path: Path) -> Verdict:
    return conclude.finish(RunFolder(path))


def assert_point(
    run: Run, ranks: Ranks, name: str, want: str, state: str, ok: bool | None, words: str
) -> None:
    """The words are in the reason or the help, which what is not good has."""
    point = run.ranks(*ranks).judge("dpo", **{name: want}).point(name)
    assert brief(point) == (state, ok)
    assert words in advice(point)
    assert ok or "None None" not in advice(point)


@pytest.mark.parametrize(
    ("want", "ranks", "state", "ok", "words"),
    [
        ("off", [[step(1)]], "off", True, ""),
        ("off", [CALLED], "engaged", False, "were called: rope"),
        ("off", [[step(1)], None], "off", None, "rank 1"),
        ("any", [CALLED], "engaged", True, ""),
        ("engaged", [[patch()]], "applied", None, "only the probe"),
        ("engaged", [CALLED, None], "engaged", None, "rank 1"),
        # a rank that began and finished no step
        ("engaged", [CALLED, []], "engaged", None, "rank 1"),
        # the fused loss that was patched in has to run
        ("engaged", [(FUSED, *CALLED)], "not_engaged", False, "called"),
        ("engaged", [FUSED_CALLED], "engaged", True, ""),
        ("engaged", [(UNFUSED, *CALLED)], "engaged", True, ""),
    ],
)
def test_liger_is_what_every_rank_saw(
    run: Run, want: str, ranks: Ranks, state: str, ok: bool | None, words: str
) -> None:
    assert_point(run, ranks, "liger", want, state, ok, words)


@pytest.mark.parametrize(
    ("want", "ranks", "state", "ok", "words"),
    [
        ("isolated", [[]], "unknown", None, ""),
        ("isolated", [[ON]], "on", None, ""),
        ("on", [[ON]], "on", True, ""),
        ("on", [[ON, ISOLATED]], "isolated", True, ""),
        ("isolated", [[ON, ISOLATED], [ON, ISOLATED]], "isolated", True, ""),
        ("isolated", [[ON, ISOLATED], [ON, UNTESTED]], "on", None, "ValueError: x"),
        ("isolated", [[ON, ISOLATED], [ON, LEAKING]], "leaking", False, "attention"),
        ("isolated", [[ON, ISOLATED], [OFF]], "off", False, "of rank 1"),
        ("isolated", [[ON, ISOLATED], None], "isolated", None, "rank 1"),
        ("isolated", [[OFF], None], "off", False, ""),
        ("off", [[ON], [OFF]], "on", False, ""),
    ],
)
def test_packing_is_what_every_rank_saw(
    run: Run, want: str, ranks: Ranks, state: str, ok: bool | None, words: str
) -> None:
    assert_point(run, ranks, "packing", want, state, ok, words)


@pytest.mark.parametrize(
    ("name", "want", "ranks", "state", "ok", "words"),
    [
        ("attention", "sdpa", [[model("sdpa")], [model("sdpa")]], "sdpa", True, ""),
        ("attention", "sdpa", [[model("sdpa")], [model("eager")]], "eager", False, "rank 1"),
        ("attention", "sdpa", [[model("sdpa")], None], "sdpa", None, "rank 1"),
        ("attention", "flash_2", [[model("flash_attention_2")]], "flash_attention_2", True, ""),
        # who left no record may have filled the cache
        ("dataset_cache", "hit", [None, [HIT]], "hit", None, "rank 0"),
        ("dataset_cache", "hit", [[HIT], [HIT]], "hit", True, ""),
        ("dataset_cache", "hit", [[MISS], [HIT]], "miss", False, ""),
        ("reference_cache", "hit", [[STALE]], "stale", False, ""),
        ("memory", "ok", [[OOM, {"event": "end", "exit": 1}]], "oom", False, ""),
    ],
)
def test_a_point_is_what_every_rank_saw(
    run: Run, name: str, want: str, ranks: Ranks, state: str, ok: bool | None, words: str
) -> None:
    assert_point(run, ranks, name, want, state, ok, words)


def test_a_stale_reference_is_good_only_where_that_is_expected(run: Run) -> None:
    point = run.ranks([STALE]).judge("dpo").point("reference_cache")
    assert brief(point) == ("stale", False)


def finished(run: Run, last: int, **fields: Any) -> Run:
    """A run of one rank that made these steps, saved and ended well."""
    events = [{**event, **fields} for event in steps(last)]
    return run.rank(0, *events, SAVED, END).exit(0)


def test_a_step_that_no_record_has_is_not_called_good(run: Run) -> None:
    run.rank(0, *steps(3), *steps(9, first=6), SAVED, END).exit(0)
    point = run.point("loss")
    assert brief(point) == ("finite", None)
    assert "step 4, 5" in advice(point)

    run.log(sft(9))
    assert brief(run.point("loss")) == ("finite", True)


def test_a_loss_of_0_is_no_good_loss(run: Run) -> None:
    finished(run, 3, loss=0.0)
    point = run.point("loss")
    assert brief(point) == ("zero", False)
    assert "label" in advice(point)
    assert run.point("loss", "any").ok is True


@pytest.mark.parametrize("name", ["grad_norm", "learning_rate"])
def test_where_no_weight_moves_nothing_passes(run: Run, name: str) -> None:
    verdict = finished(run, 3, **{name: 0.0}).judge()
    assert brief(verdict.point("trend")) == ("still", False)
    assert verdict.status == "fail"
    assert run.point("trend", "any").ok is True


@pytest.mark.parametrize("name", ["grad_norm", "learning_rate"])
def test_a_warmup_may_begin_at_0(run: Run, name: str) -> None:
    point = finished(run, 1, **{name: 0.0}).point("trend")
    assert brief(point) == ("too_short", True)


def trl(loss: str, norm: str, rate: str) -> str:
    values = f"'loss': '{loss}', 'grad_norm': '{norm}', 'learning_rate': '{rate}'"
    lines = [f"{{{values}, 'epoch': '{number}'}}\n" for number in range(1, 10)]
    return "".join(lines)


NO_RATE = sft(9).replace("LR: 1e-05", "LR: 0.0")


@pytest.mark.parametrize(
    ("log", "loss"),
    [
        (sft(9, losses=["0.0"] * 9), "zero"),
        # rounded
        (trl("0", "0.02", "1e-05"), "finite"),
        (sft(9).replace("LR: 1e-05", "LR: 0.0", 8), "finite"),
        # the end of a schedule
        (NO_RATE.replace("Step: ", "Step: 10"), "finite"),
    ],
)
def test_a_log_alone_shows_a_loss_of_0(tmp_path: Path, log: str, loss: str) -> None:
    verdict = verdict_of_log(tmp_path, log)
    is_finite = loss == "finite"
    assert brief(verdict.point("loss")) == (loss, is_finite)
    assert verdict.point("trend").state != "still"
    has_failed = verdict.status == "fail"
    assert has_failed is not is_finite


@pytest.mark.parametrize("log", [trl("0", "0", "1e-05"), NO_RATE, trl("2", "1", "0")])
def test_a_log_alone_shows_that_no_weight_moved(tmp_path: Path, log: str) -> None:
    verdict = verdict_of_log(tmp_path, log)
    assert verdict.point("trend").state == "still"
    assert verdict.status == "fail"


def finish_reason(point: Point) -> tuple[str, bool | None, object]:
    return point.state, point.ok, point.detail.get("reason")


def test_a_good_exit_without_a_step_is_no_finish(run: Run) -> None:
    run.rank(0, SAVED, END).exit(0)
    assert finish_reason(run.point("finish")) == ("stopped", None, "no_steps")


def test_fewer_steps_than_planned_are_no_finish(run: Run) -> None:
    run.manifest({"plan": {"steps": 9}})
    finished(run, 4)
    assert finish_reason(run.point("finish")) == ("stopped", None, "fewer_steps")

    finished(run, 9)
    assert brief(run.point("finish")) == ("completed", True)


def test_rows_may_be_filtered_so_the_steps_that_the_log_announces_count(run: Run) -> None:
    run.manifest({"plan": {"steps": 9}}).log(sft(4))
    assert brief(finished(run, 4).point("finish")) == ("completed", True)


def test_a_script_that_failed_did_not_end_well_whatever_its_launcher_exits_with(run: Run) -> None:
    error = {"event": "error", "type": "ValueError", "message": "m"}
    end = {"event": "end", "exit": 1}
    run.rank(0, step(1), SAVED, error, end).exit(0).log(sft(1))
    finish = run.point("finish")
    assert brief(finish) == ("crashed", False)
    assert finish.detail["error"] == {"type": "ValueError", "message": "m", "rank": "0"}


def test_what_is_not_as_expected_names_what_was_seen(run: Run) -> None:
    run.rank(0, model("sdpa"), OFF, MISS, step(1), step(2, None, False)).exit(3)
    verdict = run.judge(
        liger="engaged",
        packing="isolated",
        attention="flash_attention_2",
        dataset_cache="hit",
        trend="falling",
    )
    wrong = [point for point in verdict.points if point.ok is not True]
    assert len(wrong) == 7
    for point in wrong:
        assert point.detail.get("reason") or point.detail.get("help"), point
    assert "step 2, rank 0; last finite: 2 at step 1" in advice(verdict.point("loss"))
    assert "sdpa" in advice(verdict.point("attention"))


def planned_batch(
    stage: str = "sft",
    backend: str = "trl",
    packing: bool = False,
    shared: bool | int = False,
    rows: int = 96,
    steps: int = 12,
) -> dict[str, Any]:
    """The record of a run on two GPUs with a batch of 8, in micro-batches of 2."""
    plan = {
        "gpus": 2, "nodes": 1, "per_device": 2, "accumulation": 2, "global": 8,
        "rows": rows, "steps": steps,
    }  # fmt: skip
    record = made_runs.manifest(stage=stage, backend=backend, plan=plan)
    record["args"]["packing"] = {"value": packing, "origin": ""}
    record["args"]["sequence_parallel_size"] = {"value": shared, "origin": ""}
    return record


def sized_steps(*rows: int, micro_batch: int = 2) -> list[Event]:
    """Steps of so many rows, in micro-batches of `micro_batch` at most."""
    events = []
    for number, size in enumerate(rows, start=1):
        count = -(-size // micro_batch)
        events.append({**step(number), "rows": size, "micro_batches": count})
    return events


@pytest.mark.parametrize(
    ("world", "ranks", "state", "ok"),
    [(2, 2, "planned", True), (2, 1, "planned", None), (1, 1, "different", False)],
)
def test_as_many_processes_as_were_planned_have_to_train(
    run: Run, world: int, ranks: int, state: str, ok: bool | None
) -> None:
    run.manifest(planned_batch(steps=3)).exit(0)
    for rank in range(ranks):
        run.rank(rank, *sized_steps(4, 4, 4), SAVED, END, world=world)
    verdict = run.judge(batch="planned")
    point = verdict.point("batch")
    assert brief(point) == (state, ok)
    assert ok or "1" in advice(point)
    has_passed = verdict.status == "pass"
    assert has_passed is bool(ok)
    assert brief(run.point("batch", "any")) == (state, True)
    # an older launch recorded no such expectation
    has_failed = run.judge().status == "fail"
    assert has_failed is (ok is False)


def batch_point(run: Run, record: dict[str, Any], events: list[Event]) -> Point:
    return run.manifest(record).ranks(events, events).point("batch", "planned")


@pytest.mark.parametrize(
    ("rows", "record"),
    [
        pytest.param((4, 4, 4, 4), planned_batch(), id="as planned"),
        pytest.param((4, 3, 4, 1), planned_batch(), id="ends of epochs"),
        pytest.param((), planned_batch(steps=0), id="no step"),
        pytest.param((3, 3, 3), planned_batch(rows=6), id="data of less than one step"),
        pytest.param((2, 2, 2), planned_batch(shared=2), id="ranks take turns with rows"),
        pytest.param(
            (2, 2, 2), planned_batch("dpo", "open_instruct", packing=True), id="packed pairs"
        ),
    ],
)
def test_a_step_is_as_large_as_planned(
    run: Run, rows: tuple[int, ...], record: dict[str, Any]
) -> None:
    assert brief(batch_point(run, record, sized_steps(*rows))) == ("planned", True)


def test_a_pair_is_two_rows(run: Run) -> None:
    events = sized_steps(8, 8, 8, micro_batch=4)
    assert brief(batch_point(run, planned_batch("dpo"), events)) == ("planned", True)


@pytest.mark.parametrize(
    ("rows", "record", "words"),
    [
        pytest.param((2, 2, 2, 2), planned_batch(), "step 2 of rank 0: micro-batches 1", id="once"),
        pytest.param((4, 4, 2, 2), planned_batch(), "step 4 of rank 0: micro-batches 1", id="late"),
        pytest.param(
            (5, 5, 5), planned_batch(rows=6), "step 2 of rank 0: micro-batches 3", id="more"
        ),
        pytest.param(
            (2, 2, 2), planned_batch("sft", "open_instruct", packing=True), "step 2", id="packed"
        ),
    ],
)
def test_a_step_of_another_size_is_not_as_planned(
    run: Run, rows: tuple[int, ...], record: dict[str, Any], words: str
) -> None:
    point = batch_point(run, record, sized_steps(*rows))
    assert brief(point) == ("different", False)
    assert words in advice(point)


def resumed_run(folder: Path, first: Event, second: Event, bad: Sequence[int] = ()) -> Path:
    """Steps 1 to 30, then 21 to 40 again in a second attempt; each with an event of its own."""
    manifest = made_runs.manifest(expect={"packing": "isolated", "liger": "off"})
    probe = folder / "probe"
    made_runs.write_run(folder, record=manifest, ended=False, bad=bad, steps=30)
    # it came to no end
    start, *steps, _end = read_events(probe)
    events = [start, first, *steps]

    record = probe / "rank-0.jsonl"
    record.unlink()
    made_runs.write_run(folder, record=manifest, attempt=2, first=21)
    start, *steps = read_events(probe)
    resumed = {"event": "resumed", "path": "checkpoint-20", "step": 20}
    events += [start, second, resumed, *steps]
    record.write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


@pytest.mark.parametrize(
    ("first", "second", "state", "ok"),
    [
        (ISOLATED, ISOLATED, "isolated", True),
        (LEAKING, ISOLATED, "leaking", False),
        (ON, ISOLATED, "on", None),
        (ISOLATED, ON, "on", None),
    ],
)
def test_a_resumed_run_is_proved_where_each_attempt_is(
    tmp_path: Path, first: Event, second: Event, state: str, ok: bool | None
) -> None:
    verdict = judge_finished(resumed_run(tmp_path / "run", first, second))
    point = verdict.point("packing")
    assert brief(point) == (state, ok)
    if first is not ISOLATED:
        assert "in attempt 1, which made steps 1 to 20" in advice(point)
        assert verdict.status != "pass"


def test_an_attempt_is_held_to_its_own_manifest(tmp_path: Path) -> None:
    path = resumed_run(tmp_path / "run", OFF, ISOLATED)
    assert brief(judge_finished(path).point("packing")) == ("off", False)

    manifest = made_runs.manifest(expect={"packing": "off", "liger": "off"})
    manifest["plan"] |= {"gpus": 8, "accumulation": 4}
    (path / "run.1.json").write_text(json.dumps(manifest))
    verdict = judge_finished(path)
    assert brief(verdict.point("packing")) == ("isolated", True)
    batch = verdict.point("batch")
    assert brief(batch) == ("different", False)
    reason = "in attempt 1, which made steps 1 to 20: the world size was 1, 8 was planned"
    assert reason in advice(batch)


def test_a_bad_step_counts_while_the_weights_have_been_through_it(tmp_path: Path) -> None:
    """The second attempt continued step 20."""
    replaced = resumed_run(tmp_path / "replaced", ISOLATED, ISOLATED, bad=(25,))
    loss = judge_finished(replaced).point("loss")
    assert brief(loss) == ("finite", True)

    kept = resumed_run(tmp_path / "kept", ISOLATED, ISOLATED, bad=(5,))
    loss = judge_finished(kept).point("loss")
    assert brief(loss) == ("nonfinite", False)
    assert "step 5" in advice(loss)


def without_expectations(path: Path) -> None:
    manifest = rundir.read_json(path / "run.json")
    (path / "run.json").write_text(json.dumps({**manifest, "expect": None}))


def without_manifest(path: Path) -> None:
    (path / "run.json").write_text("{}")


@pytest.mark.parametrize("change", [None, without_expectations, without_manifest])
def test_a_report_has_the_verdict_of_a_check(
    tmp_path: Path, change: Callable[[Path], None] | None
) -> None:
    path = resumed_run(tmp_path / "run", LEAKING, ISOLATED, bad=(5,))
    if change is not None:
        change(path)
    reported = series.load_run(path).verdict
    assert reported == json.loads(json.dumps(judge_finished(path).as_json()))


@pytest.mark.parametrize("below", ["", "hf_model"])
def test_a_saved_model_with_a_cut_file_does_not_count(tmp_path: Path, below: str) -> None:
    model_folder = tmp_path / "out" / below
    manifest = made_runs.manifest(output=str(tmp_path / "out"))
    path = made_runs.write_run(tmp_path / "run", record=manifest)
    assert judge_finished(path).status == "pass", "the model may have been moved since"

    saved.model(model_folder)
    assert judge_finished(path).status == "pass"

    saved.cut(model_folder / "model.safetensors")
    verdict = judge_finished(path)
    finish = verdict.point("finish")
    assert verdict.status == "unproven"
    assert brief(finish) == ("completed", None)
    assert f"model.safetensors is cut off {model_folder} " in advice(finish)


def count_calls(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, key: Callable[..., str]
) -> Counter[str]:
    """Counts the calls of a function by `key` of its arguments."""
    original = getattr(owner, name)
    calls: Counter[str] = Counter()

    def counted(*arguments: Any, **named: Any) -> Any:
        calls[key(*arguments)] += 1
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("read", [judge_finished, series.load_run])
def test_each_log_is_read_once_for_verdict_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    path = resumed_run(tmp_path / "run", OFF, ISOLATED)
    scans = count_calls(monkeypatch, evidence, "scan", lambda log, *_: log.name)
    read(path)
    assert scans == {"console.log": 1, "console.2.log": 1}


def test_a_judgement_reads_every_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = made_runs.manifest()
    folder = made_runs.write_run(tmp_path / "run", steps=20, record=begun)
    files.write_json(folder / "run.1.json", begun)
    continued = made_runs.manifest(attempt=2)
    made_runs.write_run(folder, attempt=2, first=11, record=continued)
    reads = count_calls(monkeypatch, files, "read_bytes", lambda path, *_: path.name)
    rows = count_calls(monkeypatch, evidence, "_build_step_rows", lambda *_: "rows")

    judged = judge.judge_run(RunFolder(folder))
    series.run_from_judgement(folder, judged)

    assert reads["run.json"] == reads["run.1.json"] == reads["process.json"] == 1
    assert rows["rows"] == 2
