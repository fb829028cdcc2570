"""Verdicts against what lies on the disk: weights that moved, saved models, inputs, checkpoints, resumes."""

import json
import math
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_runs
import numpy
import pytest
import repeated
import saved
from repeated import TRL, Make, codes
from test_check import Run, brief, sft, step

from launcher import files
from launcher.artifacts.fingerprint import of_data, of_model
from launcher.cache import inputs
from launcher.lifecycle import start
from launcher.machine import process as machine_process
from launcher.planning import checksums
from launcher.planning.resume.decision import Decision
from launcher.probe.watching.optimizer import Movement, Optimizer
from launcher.probe.watching.process import EventLog, Process, Settings
from launcher.probe.watching.trainers import note_saved
from launcher.report import series
from launcher.runs import lease, rundir
from launcher.runs.attempt import Attempt
from launcher.runs.rundir import RunFolder
from launcher.verdict import judge
from launcher.verdict.check import Point, Verdict

DONE = {"event": "end", "exit": 0}
ASKED = {"loss": "finite", "memory": "ok", "finish": "completed", "liger": "off", "packing": "off"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run folder in the making, apart from what the run leaves elsewhere."""
    (tmp_path / "run").mkdir()
    return Run(tmp_path / "run")


stages = repeated.run  # a fixture


def judged(folder: Path, **asked: str) -> Verdict:
    return judge.judge_run(RunFolder(folder), {**ASKED, **asked}).verdict


def point(verdict: Verdict, name: str) -> Point | None:
    return next((point for point in verdict.points if point.name == name), None)


def reason(verdict: Verdict, name: str) -> str:
    finding = point(verdict, name)
    assert finding is not None
    return str(finding.detail.get("reason"))


def weights(moved: int, sampled: int = 10_000, steps: int = 10, **more: Any) -> dict[str, Any]:
    told = {"event": "weights", "steps": steps, "step": steps, "sampled": sampled, "moved": moved}
    return {**told, **more}


@pytest.mark.parametrize(
    ("reports", "state", "ok"),
    [
        (["exact", "exact"], "exact", True),
        (["restored", "restored"], "restored", True),
        (["exact", "rounded"], "rounded", False),
        ([], None, None),
    ],
)
def test_positions_are_those_of_the_config(
    run: Run, reports: list[str], state: str | None, ok: bool | None
) -> None:
    for rank, reported in enumerate(reports or [""]):
        event = {"event": "rotary", "state": reported, "largest_error": 0.004}
        run.rank(rank, *([event] if reported else []), world=max(1, len(reports)))
    found = point(judged(run.folder), "positions")
    assert (found and found.state) == state
    assert (found and found.ok) == ok


@pytest.mark.parametrize(
    ("reports", "state", "ok"),
    [
        ([weights(9_000)], "moved", True),
        ([weights(0)], "still", False),
        ([weights(200)], "few", None),
        # a rank whose part did not move is no rank's fault where most did
        ([weights(9_000), weights(0)], "moved", True),
        ([weights(9_000), None], "moved", None),
        ([weights(0, steps=1)], None, None),
        ([{"event": "weights", "reason": "the optimizer's weights were not found"}], None, None),
        ([], None, None),
    ],
)
def test_weights_that_do_not_move_are_no_pass(
    run: Run, reports: list[dict[str, Any] | None], state: str | None, ok: bool | None
) -> None:
    for rank, one in enumerate(reports or [None]):
        run.rank(rank, *([one] if one else []), world=max(1, len(reports)))
    found = point(judged(run.folder), "weights")
    assert (found and found.state) == state
    if found is not None:
        wanted = judged(run.folder, weights="moved").point("weights")
        assert wanted.ok is ok
        if state in ("still", "few"):
            assert found.ok is ok and "moved" in str(found.detail["reason"])


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(Settings("sft.py", str(tmp_path / "own" / "probe")))


@pytest.mark.parametrize(
    ("dtype", "rate", "least", "most"),
    [
        ("float32", 1e-3, 0.99, 1.0),
        ("float32", 1e-30, 0.0, 0.0),
        ("bfloat16", 1e-6, 0.001, 0.05),
        ("bfloat16", 1e-2, 0.9, 1.0),
    ],
)
def test_the_share_that_moved_is_counted_in_the_weights_that_are_stepped(
    process: Process, tmp_path: Path, dtype: str, rate: float, least: float, most: float
) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    layer = torch.nn.Linear(256, 256, dtype=kind)
    torch.nn.init.normal_(layer.weight, std=0.02)
    torch.nn.init.zeros_(layer.bias)  # what is 0 moves at every rate
    frozen = torch.nn.Parameter(torch.ones(9), requires_grad=False)
    trained = list(layer.parameters())
    optimizer = Optimizer(process, None)  # type: ignore[arg-type]
    optimizer.inner = SimpleNamespace(param_groups=[{"params": [*trained, frozen]}])
    movement = Movement(process, optimizer)
    for _ in range(5):
        layer(torch.randn(8, 256, dtype=kind)).square().sum().backward()
        movement.begin()
        with torch.no_grad():
            for parameter in trained:
                # as Adam moves a weight: by about the learning rate, whatever the gradient
                parameter.sub_(rate * parameter.grad.sign())
                parameter.grad = None
        process.step += 1
    movement.report()
    (told,) = [e for e in events(tmp_path) if e["event"] == "weights"]
    assert least <= told["moved"] / told["sampled"] <= most
    assert (told["steps"], told["tensors"]) == (5, 2)


def events(place: Path) -> list[dict[str, Any]]:
    path = place / "own" / "probe" / "rank-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def tensors(path: Path, values: bytes, dtype: str = "F32") -> None:
    """A safetensors file with one tensor of these bytes."""
    shape = [len(values) // 4]
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(values)]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + values)


def noise(seed: int, size: int = 1 << 16) -> bytes:
    return numpy.random.default_rng(seed).bytes(size)


def trained(run: Run, place: Path, name: str = "model.safetensors") -> Path:
    """A run that saved a model, fingerprinted by the probe's own function."""
    output = place / "out"
    output.mkdir()
    tensors(output / name, noise(1))
    (output / "config.json").write_text("{}")
    record = EventLog(str(place / "scratch"), 0)
    note_saved(record, output)
    (told,) = (place / "scratch" / "rank-0.jsonl").read_text().splitlines()
    run.log(sft(5))
    run.exit(0)
    run.rank(
        0,
        *(step(n) for n in range(1, 6)),
        {"event": "saved", "path": str(output)},
        json.loads(told),
        DONE,
    )
    files.write_json(run.folder / "process.json", dict(_identity()))
    return output


def _identity() -> dict[str, Any]:
    return machine_process.identify(os.getpid()).as_json()


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no folder": (shutil.rmtree, "missing", "is gone"),
    "no weights": (lambda out: (out / "model.safetensors").unlink(), "missing", "is gone"),
    "zeros": (lambda out: tensors(out / "model.safetensors", bytes(1 << 16)), "changed", "is 0"),
    "base model": (
        lambda out: tensors(out / "model.safetensors", noise(2)),
        "changed",
        "changed after",
    ),
    "another": (
        lambda out: tensors(out / "model-1.safetensors", noise(2)),
        "changed",
        "did not save",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_is_not_the_one_that_was_saved_is_no_pass(
    run: Run, tmp_path: Path, fault: str
) -> None:
    spoil, state, words = FAULTS[fault]
    output = trained(run, tmp_path)
    before = judged(run.folder)
    assert before.point("model").state == "saved"
    was_ok = {one.name for one in before.points if one.ok}
    spoil(output)
    after = judged(run.folder)
    assert (after.status, *brief(after.point("model"))) == ("fail", state, False)
    assert words in reason(after, "model")
    assert {one.name for one in after.points if one.ok} == was_ok - {"model"}
    assert point(judged(run.folder, model="any"), "model").ok  # type: ignore[union-attr]


def test_a_save_that_left_nothing_is_no_pass_and_an_old_record_says_nothing(
    run: Run, tmp_path: Path
) -> None:
    run.log(sft(5))
    run.exit(0)
    nowhere = str(tmp_path / "nowhere")
    lines = [*(step(n) for n in range(1, 6)), {"event": "saved", "path": nowhere}]
    run.rank(0, *lines, DONE)
    names = {one.name for one in judged(run.folder).points}
    assert names.isdisjoint({"weights", "model", "inputs", "resume"})
    run.rank(0, *lines, {"event": "saved_model", "path": nowhere, "files": []}, DONE)
    files.write_json(run.folder / "process.json", dict(_identity()))
    assert judged(run.folder).point("model").state == "missing"


def test_the_weights_of_a_rung_may_be_removed_and_of_another_machine_nothing_is_known(
    run: Run,
) -> None:
    place = run.folder.parent / "models"
    place.mkdir()
    output = trained(run, place)
    files.write_json(run.folder / "run.json", {"output": str(output)})
    assert judged(run.folder).point("model").state == "saved"
    shutil.rmtree(output)
    assert judged(run.folder).point("model").state == "missing"
    files.write_json(run.folder / "process.json", {**_identity(), "host": "another"})
    assert point(judged(run.folder), "model") is None
    assert judged(run.folder, model="saved").point("model").ok is None
    files.write_json(run.folder / "process.json", _identity())
    shutil.rmtree(place)
    assert point(judged(run.folder), "model") is None


def test_what_changed_since_the_start_fails_with_file_and_fingerprints(
    run: Run, tmp_path: Path
) -> None:
    data, model = tmp_path / "rows.jsonl", tmp_path / "model"

    def digest() -> str:
        return of_data(str(data)).digest

    def now() -> Point:
        files.write_json(
            RunFolder(run.folder).inputs(1), {"changed": inputs.changed(before, tmp_path)}
        )
        return judged(run.folder).point("inputs")

    data.write_text("one\n")
    saved.model(model)
    was, old, whole = data.stat(), digest(), of_model(str(model))
    known = {one.name: one.digest for one in whole.files}
    before: list[dict[str, Any]] = [
        {"role": "data", "name": str(data), "digest": old, "files": {data.name: old}},
        {"role": "model", "name": str(model), "digest": whole.digest, "files": known},
    ]
    run.log(sft(5)).rank(0, *(step(n) for n in range(1, 6)), DONE)
    assert point(judged(run.folder), "inputs") is None
    assert now().state == "same"
    data.write_text("two\n")
    os.utime(data, ns=(was.st_atime_ns, was.st_mtime_ns))
    found = now()
    assert (found.state, found.ok) == ("changed", False)
    assert [found.detail[key] for key in ("file", "before", "after")] == [data.name, old, digest()]
    data.write_text("one\n")
    (model / "config.json").write_text('{"other": 1}')
    assert now().detail["file"] == "config.json"
    data.unlink()
    saved.model(model)
    gone = now()
    assert (gone.state, gone.ok) == ("gone", None)


def test_a_run_that_waited_takes_the_data_as_they_are_when_it_begins(
    stages: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stages(TRL)
    one.start()
    one.folder.console(1).unlink()
    given: Any = {"env": {}, "environ": {}, "stage": "sft", "backend": "trl", "title": "waiting"}
    waiting = Attempt(
        number=1, argv=("true",), cwd=str(one.place), request={"stage": "sft"}, **given
    )
    waiting.write(one.folder)
    monkeypatch.chdir(one.place)
    planned: list[str] = []

    def prepare(request: Any, _scope: Any) -> Any:
        planned.append(str(request.folder.path))
        raise RuntimeError("planned anew")

    monkeypatch.setattr(start, "prepare", prepare)
    assert start.prepare_again(one.folder).number == 1
    one.data.write_text(one.data.read_text().replace("a", "b"))
    with pytest.raises(RuntimeError, match="planned anew"):
        start.prepare_again(one.folder)
    assert planned == [str(one.folder.path)]


def flip(path: Path) -> None:
    """Overwrite one byte and put the time back."""
    was, raw = path.stat(), bytearray(path.read_bytes())
    raw[100] ^= 0xFF
    path.write_bytes(raw)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def archive(path: Path) -> None:
    """As torch.save writes it; the bytes of the tensors are stored as they are."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data/0", noise(5))


DAMAGE: dict[str, tuple[bool, Callable[[Path], object]]] = {
    "optimizer": (False, lambda one: flip(one / "optimizer.pt")),
    "weights": (False, lambda one: tensors(one / "model.safetensors", bytes(1 << 16))),
    "schedule": (True, lambda one: flip(one / "scheduler.pt")),
    "removed": (True, lambda one: (one / "training_args.bin").unlink()),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_checkpoint_with_other_bytes_gives_way_to_an_older_one(stages: Make, what: str) -> None:
    """Without checksums only CRCs and zeros tell."""
    one, (watched, damage) = stages(TRL), DAMAGE[what]
    one.start()
    for number in (2, 4):
        folder = saved.trl(one.output, number)
        tensors(folder / "model.safetensors", noise(number))
        archive(folder / "optimizer.pt")
    if watched:
        watch = checksums.ChecksumThread(one.folder, "trl", one.output, 1)
        watch.start()
        watch.end(resumable=True)
        assert set(checksums.read(one.folder)) == {"checkpoint-2", "checkpoint-4"}
    assert one.decide().step == 4
    damage(one.output / "checkpoint-4")
    decision = one.decide()
    assert (decision.kind, decision.step) == ("resume", 2)
    assert codes(decision)["damaged-checkpoint"] == "warning"
    damage(one.output / "checkpoint-2")
    decision = one.decide()
    assert (decision.kind, codes(decision)["nothing-to-resume"]) == ("new", "note")


def said(decision: Decision, code: str) -> str:
    return next(finding.message for finding in decision.findings if finding.code == code)


def watched_checkpoint(one: repeated.Run) -> Path:
    """A run of TRL, with its lease in the output folder, and checksums of its checkpoint-2."""
    one.start()
    lease.keep_manifest(
        lease.acquire(one.output, one.folder.path), rundir.read_manifest(one.folder)
    )
    folder = saved.trl(one.output, 2)
    tensors(folder / "model.safetensors", noise(2))
    watch = checksums.ChecksumThread(one.folder, "trl", one.output, 1)
    watch.start()
    watch.end(resumable=True)
    return folder


@pytest.mark.parametrize("gone", [False, True])
def test_a_flipped_byte_of_the_weights_is_found_where_the_run_folder_is_gone(
    stages: Make, gone: bool
) -> None:
    one = stages(TRL)
    folder = watched_checkpoint(one)
    if gone:
        shutil.rmtree(one.folder.path)
    decision = one.decide()
    assert (decision.kind, decision.step) == ("resume", 2)
    assert "not verified" not in said(decision, "resumes")
    flip(folder / "model.safetensors")
    decision = one.decide()
    assert decision.kind == "new"
    assert codes(decision)["damaged-checkpoint"] == "warning"


def test_what_no_checksum_was_recorded_of_is_not_called_whole(stages: Make) -> None:
    one = stages(TRL)
    folder = watched_checkpoint(one)
    one.folder.checksums.unlink()
    (one.output / lease.FOLDER / "checksums.json").unlink()
    flip(folder / "model.safetensors")
    decision = one.decide()
    assert (decision.kind, decision.step) == ("resume", 2)
    assert "not verified: no checksums" in said(decision, "resumes")


def test_the_watch_takes_checksums_beside_the_training(
    stages: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "EVERY_S", 0.05)
    one = stages(TRL)
    one.start()
    watch = checksums.ChecksumThread(one.folder, "trl", one.output, 1)
    watch.start()
    folder = saved.trl(one.output, 2)
    until = time.monotonic() + 30
    while not checksums.read(one.folder) and time.monotonic() < until:
        time.sleep(0.05)
    watch.end(resumable=False)
    told = checksums.read(one.folder)["checkpoint-2"]
    assert set(told) == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("after", "state", "ok"),
    [(1.95, "continuous", True), (6.9, "jump", None), (1.2, "continuous", True)],
)
def test_losses_that_jump_after_a_resume_are_no_pass(
    run: Run, after: float, state: str, ok: bool | None
) -> None:
    noisy = [2.0 + 0.05 * math.sin(n * 7) for n in range(1, 11)]
    run.log(sft(10))
    run.rank(0, *(step(n, noisy[n - 1]) for n in range(1, 11)))
    first = (run.folder / "probe" / "rank-0.jsonl").read_text()
    (run.folder / "console.2.log").write_text("")
    files.write_json(run.folder / "exit.2.json", {"returncode": 0, "attempt": 2})
    more = [
        {"event": "start", "rank": 0, "world": 1, "attempt": 2},
        {"event": "resumed", "path": "checkpoint-8", "step": 8},
        *(step(n, after) for n in range(9, 13)), DONE,
    ]  # fmt: skip
    text = "".join(json.dumps(one) + "\n" for one in more)
    (run.folder / "probe" / "rank-0.jsonl").write_text(first + text)
    found = judged(run.folder).point("resume")
    assert (found.state, found.ok) == (state, ok)
    if ok is None:
        assert "before the resume" in str(found.detail["reason"])


def test_losses_are_those_of_the_probes_steps_where_there_are_any(tmp_path: Path) -> None:
    # its log holds four means of five steps each
    folder = made_runs.made(tmp_path / "run", steps=20, told=made_runs.manifest(stage="sft"))
    verdict = judged(folder, trend="falling")
    assert brief(verdict.point("trend")) == ("falling", True)
    assert verdict.point("trend").detail["losses"] == 20
    # the page draws the same numbers, and keeps the means apart
    columns = series.load_run(folder).series.columns
    assert columns["loss"] == pytest.approx([made_runs.loss(number, 20) for number in range(1, 21)])
    assert sum(mean is not None for mean in columns["logged_loss"]) == 4


def test_an_adapter_is_fingerprinted_and_a_checkpoint_is_not(run: Run, tmp_path: Path) -> None:
    output = trained(run, tmp_path, "adapter_model.safetensors")
    assert judged(run.folder).point("model").state == "saved"
    tensors(output / "adapter_model.safetensors", noise(3))
    assert judged(run.folder).point("model").state == "changed"
    record = EventLog(str(tmp_path / "other"), 0)
    note_saved(record, tmp_path / "out" / "checkpoint-5")
    assert not (tmp_path / "other" / "rank-0.jsonl").read_text()


def test_without_a_probe_the_output_folder_must_be_there(run: Run, tmp_path: Path) -> None:
    run.log(sft(5) + "Model weights saved in out/model.safetensors\n")
    run.exit(0)
    shutil.rmtree(run.folder / "probe")
    files.write_json(run.folder / "process.json", dict(_identity()))
    files.write_json(run.folder / "run.json", {"output": str(tmp_path / "nowhere")})
    verdict = judged(run.folder)
    assert verdict.point("finish").state == "completed"
    assert verdict.point("model").state == "missing"
    (tmp_path / "nowhere").mkdir()
    assert point(judged(run.folder), "model") is None
