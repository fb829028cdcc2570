"""What a run is said to be: by all its ranks, all its steps, all its attempts; the same for whoever asks."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import made_runs
import pytest
import saved
from test_check import Run, brief, liger, sft, step, verdict_of_log
from test_check import run as run  # a fixture

from launcher import files
from launcher.lifecycle import conclude
from launcher.report import series
from launcher.runs import rundir
from launcher.runs.rundir import RunFolder
from launcher.verdict import evidence, judge
from launcher.verdict.check import Point
from launcher.verdict.logs.scan import Log

SAVED = {"event": "saved", "path": "out"}
END = {"event": "end", "exit": 0}
ON = {"event": "packing", "state": "on", "detail": "9 samples in one row"}
OFF = {"event": "packing", "state": "off", "detail": "1 samples in 1 row(s)"}
ISOLATED = {"event": "packing_isolation", "state": "isolated", "reason": None}
LEAKING = {"event": "packing_isolation", "state": "leaking", "reason": None}
UNTESTED = {"event": "packing_isolation", "state": "untested", "reason": "ValueError: x"}


def model(attention: str) -> dict[str, Any]:
    return {"event": "model", "class": "M", "attention": attention}


def said(point: Point) -> str:
    return f"{point.detail.get('reason')} {point.detail.get('help')}"


def patch(**kwargs: bool) -> dict[str, Any]:
    return {"event": "liger_patch", "function": "f", "kwargs": kwargs}


FUSED = patch(fused_linear_cross_entropy=True)
STALE = {"event": "reference_cache", "state": "stale", "path": "p"}
HIT = {"event": "dataset_cache", "state": "hit", "path": "p"}
MISS = {"event": "dataset_cache", "state": "miss", "path": "p"}
OOM = {"event": "error", "type": "OutOfMemoryError", "message": "m"}
CALLED = (step(1), liger(rope=4))


@pytest.mark.parametrize(
    ("name", "want", "answer", "words", "ranks"),
    [
        ("liger", "off", ("off", True), "", ((step(1),),)),
        ("liger", "off", ("engaged", False), "were called: rope", (CALLED,)),
        ("liger", "any", ("engaged", True), "", (CALLED,)),
        ("liger", "engaged", ("applied", None), "only the probe", ((patch(),),)),
        ("liger", "off", ("off", None), "rank 1", ((step(1),), None)),
        ("liger", "engaged", ("engaged", None), "rank 1", (CALLED, None)),
        (
            "liger",
            "engaged",
            ("engaged", None),
            "rank 1",
            (CALLED, ()),
        ),  # it began, and finished no step
        # the fused loss that was patched in has to run
        ("liger", "engaged", ("not_engaged", False), "called", ((FUSED, *CALLED),)),
        (
            "liger",
            "engaged",
            ("engaged", True),
            "",
            ((FUSED, step(1), liger(fused_linear_cross_entropy=4)),),
        ),
        (
            "liger",
            "engaged",
            ("engaged", True),
            "",
            ((patch(fused_linear_cross_entropy=False), *CALLED),),
        ),
        ("packing", "isolated", ("unknown", None), "", ((),)),
        ("packing", "isolated", ("on", None), "", ((ON,),)),
        ("packing", "on", ("on", True), "", ((ON,),)),
        ("packing", "on", ("isolated", True), "", ((ON, ISOLATED),)),
        ("packing", "isolated", ("isolated", True), "", ((ON, ISOLATED), (ON, ISOLATED))),
        ("packing", "isolated", ("on", None), "ValueError: x", ((ON, ISOLATED), (ON, UNTESTED))),
        ("packing", "isolated", ("leaking", False), "attention", ((ON, ISOLATED), (ON, LEAKING))),
        ("packing", "isolated", ("off", False), "of rank 1", ((ON, ISOLATED), (OFF,))),
        ("packing", "off", ("on", False), "", ((ON,), (OFF,))),
        ("packing", "isolated", ("isolated", None), "rank 1", ((ON, ISOLATED), None)),
        ("packing", "isolated", ("off", False), "", ((OFF,), None)),
        ("attention", "sdpa", ("sdpa", True), "", ((model("sdpa"),), (model("sdpa"),))),
        ("attention", "sdpa", ("eager", False), "rank 1", ((model("sdpa"),), (model("eager"),))),
        ("attention", "sdpa", ("sdpa", None), "rank 1", ((model("sdpa"),), None)),
        ("attention", "flash_2", ("flash_attention_2", True), "", ((model("flash_attention_2"),),)),
        # who left no record may have filled the cache
        ("dataset_cache", "hit", ("hit", None), "rank 0", (None, (HIT,))),
        ("dataset_cache", "hit", ("hit", True), "", ((HIT,), (HIT,))),
        ("dataset_cache", "hit", ("miss", False), "", ((MISS,), (HIT,))),
        ("reference_cache", "hit", ("stale", False), "", ((STALE,),)),
        (
            "reference_cache",
            None,
            ("stale", False),
            "",
            ((STALE,),),
        ),  # never good unless that is said
        ("memory", "ok", ("oom", False), "", ((OOM, {"event": "end", "exit": 1}),)),
    ],
)
def test_a_point_is_what_every_rank_saw(
    run: Run,
    name: str,
    want: str | None,
    answer: tuple[str, bool | None],
    words: str,
    ranks: tuple[Any, ...],
) -> None:
    """A rank that is None left no record; the words are in the reason or the help."""
    for number, events in enumerate(ranks):
        if events is not None:
            run.rank(number, *events, world=len(ranks))
    point = run.judge("dpo", **{name: want}).point(name)
    assert brief(point) == answer
    assert words in said(point)
    assert answer[1] is True or "None None" not in said(point)


def whole(run: Run, steps: range, lost: tuple[int, ...] = (), **more: Any) -> Run:
    events = [{**step(n), **more} for n in steps if n not in lost]
    return run.rank(0, *events, SAVED, END).exit(0)


def test_what_was_not_seen_is_not_called_good(run: Run) -> None:
    assert brief(whole(run, range(1, 10)).judge().point("loss")) == ("finite", True)
    point = whole(run, range(1, 10), (4, 5)).judge().point("loss")
    assert brief(point) == ("finite", None)
    assert "step 4, 5" in said(point)
    # the log tells of them
    run.log(sft(9))
    assert brief(run.judge().point("loss")) == ("finite", True)


def test_a_loss_of_exactly_nothing_is_no_good_loss(run: Run) -> None:
    point = whole(run, range(1, 4), loss=0.0).judge().point("loss")
    assert brief(point) == ("zero", False) and "label" in said(point)
    assert run.judge(loss="any").point("loss").ok is True


@pytest.mark.parametrize("name", ["grad_norm", "learning_rate"])
def test_where_no_weight_moves_nothing_passes(run: Run, name: str) -> None:
    verdict = whole(run, range(1, 4), **{name: 0.0}).judge()
    assert brief(verdict.point("trend")) == ("still", False)
    assert verdict.status == "fail"
    assert run.judge(trend="any").point("trend").ok is True
    # a warm-up begins at 0
    trend = whole(run, range(1, 2), **{name: 0.0}).judge().point("trend")
    assert brief(trend) == ("too_short", True)


def trl(loss: str, norm: str, rate: str, steps: int = 9) -> str:
    return "".join(
        f"{{'loss': '{loss}', 'grad_norm': '{norm}', 'learning_rate': '{rate}', 'epoch': '{n}'}}\n"
        for n in range(1, steps + 1)
    )


@pytest.mark.parametrize(
    ("log", "loss", "trend"),
    [
        (sft(9, losses=["0.0"] * 9), ("zero", False), None),
        (trl("0", "0", "1e-05"), ("zero", False), "still"),
        # rounded
        (trl("0", "0.02", "1e-05"), ("finite", True), None),
        (sft(9).replace("LR: 1e-05", "LR: 0.0"), ("finite", True), "still"),
        (sft(9).replace("LR: 1e-05", "LR: 0.0", 8), ("finite", True), None),
        # the end of a schedule
        (
            sft(9).replace("LR: 1e-05", "LR: 0.0").replace("Step: ", "Step: 10"),
            ("finite", True),
            None,
        ),
        (trl("2", "1", "0"), ("finite", True), "still"),
    ],
)
def test_a_log_alone_shows_that_nothing_was_learned(
    tmp_path: Path, log: str, loss: tuple[str, bool], trend: str | None
) -> None:
    verdict = verdict_of_log(tmp_path, log)
    assert brief(verdict.point("loss")) == loss
    assert (verdict.point("trend").state == "still") is (trend == "still")
    assert (verdict.status == "fail") is (not loss[1] or trend == "still")


def test_a_good_exit_without_a_step_is_no_finish(run: Run) -> None:
    finish = run.rank(0, SAVED, END).exit(0).judge().point("finish")
    assert (finish.state, finish.ok, finish.detail["reason"]) == ("stopped", None, "no_steps")


def test_fewer_steps_than_planned_are_no_finish_where_no_log_says_how_many(run: Run) -> None:
    (run.folder / "run.json").write_text('{"plan": {"steps": 9}}')
    finish = whole(run, range(1, 5)).judge().point("finish")
    assert (finish.state, finish.ok, finish.detail["reason"]) == ("stopped", None, "fewer_steps")
    # rows may have been filtered since: what the log announces counts
    finish = run.log(sft(4)).judge().point("finish")
    assert brief(finish) == ("completed", True)
    (run.folder / "console.log").unlink()
    assert brief(whole(run, range(1, 10)).judge().point("finish")) == ("completed", True)


def test_a_script_that_failed_did_not_end_well_whatever_its_starter_says(run: Run) -> None:
    error = {"event": "error", "type": "ValueError", "message": "m"}
    run.rank(0, step(1), SAVED, error, {"event": "end", "exit": 1}).exit(0).log(sft(1))
    finish = run.judge().point("finish")
    assert brief(finish) == ("crashed", False)
    assert finish.detail["error"] == {"type": "ValueError", "message": "m", "rank": "0"}


def test_what_is_not_as_expected_says_what_was_seen(run: Run) -> None:
    miss = {"event": "dataset_cache", "state": "miss", "path": "p"}
    run.rank(0, model("sdpa"), OFF, miss, step(1), step(2, None, False)).exit(3)
    asked = {"liger": "engaged", "packing": "isolated", "attention": "flash_attention_2"}
    verdict = run.judge(**asked, dataset_cache="hit", trend="falling")
    wrong = [point for point in verdict.points if point.ok is not True]
    assert len(wrong) == 7
    for point in wrong:
        assert point.detail.get("reason") or point.detail.get("help"), point
    assert "step 2, rank 0; last finite: 2 at step 1" in said(verdict.point("loss"))
    assert "sdpa" in said(verdict.point("attention"))


FOUR = {
    "gpus": 2,
    "nodes": 1,
    "per_device": 2,
    "accumulation": 2,
    "global": 8,
    "rows": 96,
    "steps": 12,
}


def write_plan(run: Run, **changes: Any) -> Run:
    manifest = made_runs.manifest(stage="sft", plan={**FOUR, **changes})
    for name in ("packing", "sequence_parallel_size"):
        manifest["args"][name] = {"value": changes.get(name, False), "origin": ""}
    (run.folder / "run.json").write_text(json.dumps({**manifest, **changes.get("more", {})}))
    return run


def sized(*rows: int, each: int = 2) -> list[dict[str, Any]]:
    """Steps of so many rows, in micro-batches of `each` at most."""
    sizes = enumerate(rows, start=1)
    return [{**step(n), "rows": size, "micro_batches": -(-size // each)} for n, size in sizes]


@pytest.mark.parametrize(
    ("world", "ranks", "answer"),
    [(2, 2, ("planned", True)), (2, 1, ("planned", None)), (1, 1, ("different", False))],
)
def test_as_many_processes_as_were_planned_have_to_train(
    run: Run, world: int, ranks: int, answer: tuple[str, bool | None]
) -> None:
    for rank in range(ranks):
        write_plan(run, steps=3).rank(rank, *sized(4, 4, 4), SAVED, END, world=world)
    verdict = run.exit(0).judge(batch="planned")
    assert brief(verdict.point("batch")) == answer
    assert (verdict.status == "pass") is (answer[1] is True)
    assert answer[1] is True or "1" in said(verdict.point("batch"))
    # what an older launch started was asked for nothing of the kind
    old = run.judge()
    assert (old.status == "fail") is (answer[1] is False)
    assert brief(run.judge(batch="any").point("batch")) == (answer[0], True)


@pytest.mark.parametrize(
    ("rows", "changes", "answer"),
    [
        ((4, 4, 4, 4), {}, ("planned", True)),
        ((2, 2, 2, 2), {}, ("different", False)),  # accumulated once
        ((4, 4, 2, 2), {}, ("different", False)),  # less from somewhere on
        ((4, 3, 4, 1), {}, ("planned", True)),  # ends of epochs
        ((), {"steps": 0}, ("planned", True)),
        ((3, 3, 3), {"rows": 6}, ("planned", True)),  # data of less than one step
        ((5, 5, 5), {"rows": 6}, ("different", False)),
        ((8, 8, 8), {"more": {"stage": "dpo"}}, ("planned", True)),  # a pair is two
        ((2, 2, 2), {"packing": True}, ("different", False)),
        ((2, 2, 2), {"packing": True, "more": {"backend": "open_instruct"}}, ("different", False)),
        (
            (2, 2, 2),
            {"packing": True, "more": {"backend": "open_instruct", "stage": "dpo"}},
            ("planned", True),
        ),
        ((2, 2, 2), {"sequence_parallel_size": 2}, ("planned", True)),  # ranks take turns with rows
    ],
)
def test_a_step_has_to_be_as_large_as_planned(
    run: Run, rows: tuple[int, ...], changes: dict[str, Any], answer: tuple[str, bool | None]
) -> None:
    each = 4 if "stage" in changes.get("more", {}) and not changes.get("packing") else 2
    for rank in range(2):
        write_plan(run, **changes).rank(rank, *sized(*rows, each=each), world=2)
    point = run.judge(batch="planned").point("batch")
    assert brief(point) == answer
    if answer[1] is False:
        late = 4 if rows[0] == 4 and len(rows) == 4 else 2
        assert f"step {late} of rank 0: micro-batches {-(-rows[late - 1] // each)}, rows" in said(
            point
        )


def attempts(folder: Path, first: dict[str, Any], second: dict[str, Any], bad: int = 0) -> Path:
    """Steps 1 to 30, then 21 to 40 again in a second attempt; each with an event of its own."""
    manifest = made_runs.manifest(expect={"packing": "isolated", "liger": "off"})
    path = made_runs.made(folder, told=manifest, ended=False, bad=(bad,) * bool(bad), steps=30)
    record = path / "probe" / "rank-0.jsonl"
    lines = record.read_text().splitlines()
    record.write_text("\n".join([lines[0], json.dumps(first), *lines[1:-1], ""]))
    path = made_runs.made(path, told=manifest, attempt=2, first=21)
    lines = record.read_text().splitlines()
    begun = max(n for n, line in enumerate(lines) if '"start"' in line)
    resumed = json.dumps({"event": "resumed", "path": "checkpoint-20", "step": 20})
    record.write_text(
        "\n".join([*lines[: begun + 1], json.dumps(second), resumed, *lines[begun + 1 :], ""])
    )
    return path


@pytest.mark.parametrize(
    ("first", "second", "answer"),
    [
        (ISOLATED, ISOLATED, ("isolated", True)),
        (LEAKING, ISOLATED, ("leaking", False)),
        (ON, ISOLATED, ("on", None)),
        (ISOLATED, ON, ("on", None)),
    ],
)
def test_a_resumed_run_is_proved_where_each_attempt_is(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], answer: tuple[str, bool | None]
) -> None:
    path = attempts(tmp_path / "run", first, second)
    verdict = conclude.finish(RunFolder(path))
    point = verdict.point("packing")
    assert brief(point) == answer
    if second is ISOLATED and answer[1] is not True:
        assert "in attempt 1, which made steps 1 to 20" in said(point)
        assert verdict.status != "pass"


def test_an_attempt_is_held_to_what_was_asked_of_it(tmp_path: Path) -> None:
    path = attempts(tmp_path / "run", OFF, ISOLATED)
    assert brief(conclude.finish(RunFolder(path)).point("packing")) == ("off", False)
    asked = made_runs.manifest(expect={"packing": "off", "liger": "off"})
    asked["plan"] |= {"gpus": 8, "accumulation": 4}
    (path / "run.1.json").write_text(json.dumps(asked))
    verdict = conclude.finish(RunFolder(path))
    assert brief(verdict.point("packing")) == ("isolated", True)
    assert brief(verdict.point("batch")) == ("different", False)
    assert "in attempt 1, which made steps 1 to 20: the world size was 1, 8 was planned" in said(
        verdict.point("batch")
    )


@pytest.mark.parametrize(("bad", "answer"), [(5, ("nonfinite", False)), (25, ("finite", True))])
def test_a_bad_step_counts_as_long_as_the_weights_have_been_through_it(
    tmp_path: Path, bad: int, answer: tuple[str, bool]
) -> None:
    path = attempts(tmp_path / "run", ISOLATED, ISOLATED, bad)
    point = conclude.finish(RunFolder(path)).point("loss")
    assert brief(point) == answer
    assert answer[1] or f"step {bad}" in said(point)


@pytest.mark.parametrize("what", ["resumed", "no expectations", "no manifest", "one attempt"])
def test_a_report_says_what_a_check_says(tmp_path: Path, what: str) -> None:
    path = attempts(tmp_path / "run", LEAKING, ISOLATED, 5)
    if what == "one attempt":
        path = made_runs.made(tmp_path / "other")
    manifest = {} if what == "no manifest" else rundir.read_json(path / "run.json")
    if what == "no expectations":
        manifest["expect"] = None
    (path / "run.json").write_text(json.dumps(manifest))
    reported = series.load_run(path).verdict
    assert reported == json.loads(json.dumps(conclude.finish(RunFolder(path)).as_json()))


@pytest.mark.parametrize("below", ["", "hf_model"])
def test_a_saved_model_that_is_not_whole_is_none(tmp_path: Path, below: str) -> None:
    output = tmp_path / "out"
    path = made_runs.made(tmp_path / "run", told=made_runs.manifest(output=str(output)))
    verdict = conclude.finish(RunFolder(path))
    assert verdict.status == "pass", "a model that was moved since is nothing against its run"
    saved.model(output / below)
    assert conclude.finish(RunFolder(path)).status == "pass"
    saved.cut(output / below / "model.safetensors")
    verdict = conclude.finish(RunFolder(path))
    assert (verdict.status, *brief(verdict.point("finish"))) == ("unproven", "completed", None)
    assert f"model.safetensors is cut off {output / below} " in said(verdict.point("finish"))


def test_each_log_is_read_once_for_verdict_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = attempts(tmp_path / "run", OFF, ISOLATED)
    scan, scanned = evidence.scan, list[str]()

    def counted(log: Path, *more: Any) -> Log:
        scanned.append(log.name)
        return scan(log, *more)

    monkeypatch.setattr(evidence, "scan", counted)
    for report in (lambda: conclude.finish(RunFolder(path)), lambda: series.load_run(path)):
        scanned.clear()
        report()
        assert sorted(scanned) == ["console.2.log", "console.log"]
    assert (path / "report.html").is_file()


def test_a_judgement_reads_every_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made_runs.made(tmp_path / "run", steps=20, told=made_runs.manifest(resume={"step": 0}))
    files.write_json(folder / "run.1.json", made_runs.manifest())
    made_runs.made(folder, attempt=2, first=11, told=made_runs.manifest(attempt=2))
    read_bytes, open_regular, rows = files.read_bytes, files.open_regular, evidence._step_rows
    reads: Counter[str] = Counter()

    def counted_bytes(path: Path, *arguments: Any, **named: Any) -> bytes:
        reads[path.name] += 1
        return read_bytes(path, *arguments, **named)

    def counted_open(path: Path, *arguments: Any, **named: Any) -> Any:
        reads[f"opened {path.name}"] += 1
        return open_regular(path, *arguments, **named)

    def counted_rows(*arguments: Any) -> Any:
        reads["rows"] += 1
        return rows(*arguments)

    monkeypatch.setattr(files, "read_bytes", counted_bytes)
    monkeypatch.setattr(files, "open_regular", counted_open)
    monkeypatch.setattr(evidence, "_step_rows", counted_rows)
    judged = judge.judge_run(RunFolder(folder))
    series.run_from_judgement(folder, judged)
    assert reads["run.json"] == reads["run.1.json"] == reads["process.json"] == 1
    assert reads["rows"] == 2
