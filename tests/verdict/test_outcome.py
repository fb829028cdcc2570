"""Verdicts against what lies on the disk: weights, saved models, inputs, checkpoints, resumes."""

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
from judged_runs import END, Event, Run, advice, brief, sft, step, steps
from judged_runs import run as run  # a fixture
from recorded_events import read_events
from repeated import TRL, Make, codes

from launcher import files
from launcher.artifacts.fingerprint import fingerprint_data, fingerprint_model
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

EXPECTED = {
    "loss": "finite", "memory": "ok", "finish": "completed", "liger": "off", "packing": "off",
}  # fmt: skip
stages = repeated.run  # a fixture


def judged(folder: Path, **expected: str) -> Verdict:
    return judge.judge_run(RunFolder(folder), {**EXPECTED, **expected}).verdict


def point_or_none(run: Run, name: str) -> Point | None:
    """A point of the verdict; None where it says nothing of it."""
    for point in judged(run.folder).points:
        if point.name == name:
            return point
    return None


def identify_process(run: Run, **changes: str) -> None:
    """Record that this process on this machine, but for `changes`, was the run."""
    own = machine_process.identify(os.getpid()).as_json()
    files.write_json(run.folder / "process.json", {**own, **changes})


def rotary(state: str) -> list[Event]:
    return [{"event": "rotary", "state": state, "largest_error": 0.004}]


@pytest.mark.parametrize(
    ("ranks", "state", "ok"),
    [
        ([rotary("exact"), rotary("exact")], "exact", True),
        ([rotary("restored"), rotary("restored")], "restored", True),
        ([rotary("exact"), rotary("rounded")], "rounded", False),
    ],
)
def test_positions_are_those_of_the_config(
    run: Run, ranks: list[list[Event]], state: str, ok: bool
) -> None:
    run.ranks(*ranks)
    assert brief(judged(run.folder).point("positions")) == (state, ok)


def test_of_positions_that_no_rank_reported_there_is_no_point(run: Run) -> None:
    run.ranks([])
    assert point_or_none(run, "positions") is None


def weights(moved: int, steps: int = 10) -> list[Event]:
    event = {"event": "weights", "steps": steps, "step": steps, "sampled": 10_000, "moved": moved}
    return [event]


def weighed(share: float, elements: float) -> list[Event]:
    """A record whose sample stands for so many weights; most of its elements moved."""
    (event,) = weights(9_000)
    return [{**event, "share": share, "elements": elements}]


NOT_FOUND = [{"event": "weights", "reason": "the optimizer's weights were not found"}]


@pytest.mark.parametrize(
    ("ranks", "state", "ok"),
    [
        ([weights(9_000)], "moved", True),
        ([weights(0)], "still", False),
        ([weights(200)], "few", None),
        # in bfloat16 alone, 12 steps of 5e-6 moved so many
        ([weights(1_756)], "few", None),
        # a rank whose part did not move is no fault where most did
        ([weights(9_000), weights(9_000), weights(0)], "moved", True),
        ([weights(9_000), []], "moved", None),
        # most of the sample may be of small tensors
        ([weighed(0.2, 1e9)], "few", None),
        ([weighed(0.2, 1e6), weighed(0.9, 1e9)], "moved", True),
    ],
)
def test_weights_that_do_not_move_are_no_pass(
    run: Run, ranks: list[list[Event]], state: str, ok: bool | None
) -> None:
    run.ranks(*ranks)
    expected = judged(run.folder, weights="moved").point("weights")
    assert brief(expected) == (state, ok)
    if state != "moved":
        point = judged(run.folder).point("weights")
        assert point.ok is ok
        assert "moved" in advice(point)


@pytest.mark.parametrize("events", [weights(0, steps=1), NOT_FOUND, []])
def test_of_weights_that_nobody_could_compare_there_is_no_point(
    run: Run, events: list[Event]
) -> None:
    run.ranks(events)
    assert point_or_none(run, "weights") is None


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
    # what is 0 moves at every rate
    torch.nn.init.zeros_(layer.bias)
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

    (event,) = read_events(tmp_path / "own" / "probe", "weights")
    assert least <= event["moved"] / event["sampled"] <= most
    assert (event["steps"], event["tensors"]) == (5, 2)


def tensors(path: Path, values: bytes) -> None:
    """A safetensors file with one tensor of these bytes."""
    size = len(values)
    tensor = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"w": tensor}).encode()
    header_size = len(header).to_bytes(8, "little")
    path.write_bytes(header_size + header + values)


SIZE = 1 << 16


def noise(seed: int) -> bytes:
    return numpy.random.default_rng(seed).bytes(SIZE)


def saved_at(output: Path) -> Event:
    return {"event": "saved", "path": str(output)}


def finish_run(run: Run, *saves: Event) -> None:
    """Five steps, then these saves and a good end."""
    run.log(sft(5)).exit(0).rank(0, *steps(5), *saves, END)


def trained(run: Run, place: Path, name: str = "model.safetensors") -> Path:
    """A run that saved a model, fingerprinted by the probe's own function; its output folder."""
    output = place / "out"
    output.mkdir(parents=True)
    tensors(output / name, noise(1))
    (output / "config.json").write_text("{}")
    note_saved(EventLog(str(place / "scratch"), 0), output)
    fingerprints = read_events(place / "scratch", "saved_model")

    finish_run(run, saved_at(output), *fingerprints)
    identify_process(run)
    return output


def remove_weights(output: Path) -> None:
    (output / "model.safetensors").unlink()


def fill_with_zeros(output: Path) -> None:
    tensors(output / "model.safetensors", bytes(SIZE))


def replace_weights(output: Path) -> None:
    tensors(output / "model.safetensors", noise(2))


def add_weights(output: Path) -> None:
    tensors(output / "model-1.safetensors", noise(2))


@pytest.mark.parametrize(
    ("spoil", "state", "words"),
    [
        pytest.param(shutil.rmtree, "missing", "is gone", id="no folder"),
        pytest.param(remove_weights, "missing", "is gone", id="no weights"),
        pytest.param(fill_with_zeros, "changed", "is 0", id="zeros"),
        pytest.param(replace_weights, "changed", "changed after", id="other weights"),
        pytest.param(add_weights, "changed", "did not save", id="more weights"),
    ],
)
def test_a_model_that_is_not_the_saved_one_is_no_pass(
    run: Run, tmp_path: Path, spoil: Callable[[Path], object], state: str, words: str
) -> None:
    output = trained(run, tmp_path)
    before = judged(run.folder)
    assert before.point("model").state == "saved"

    spoil(output)

    after = judged(run.folder)
    model = after.point("model")
    assert after.status == "fail"
    assert brief(model) == (state, False)
    assert words in advice(model)
    for point in before.points:
        assert point.name == "model" or after.point(point.name).ok == point.ok
    assert judged(run.folder, model="any").point("model").ok


def test_an_older_record_says_nothing_of_what_is_on_the_disk(run: Run, tmp_path: Path) -> None:
    finish_run(run, saved_at(tmp_path / "nowhere"))
    names = {point.name for point in judged(run.folder).points}
    assert names.isdisjoint({"weights", "model", "inputs", "resume"})


def test_a_save_that_left_nothing_is_missing(run: Run, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    nothing: Event = {"event": "saved_model", "path": str(nowhere), "files": []}
    finish_run(run, saved_at(nowhere), nothing)
    identify_process(run)
    assert judged(run.folder).point("model").state == "missing"


def trained_elsewhere(run: Run, tmp_path: Path) -> Path:
    """A trained run whose record names its output folder."""
    output = trained(run, tmp_path / "models")
    run.manifest({"output": str(output)})
    return output


def test_a_rung_may_remove_the_folder_of_its_models(run: Run, tmp_path: Path) -> None:
    output = trained_elsewhere(run, tmp_path)
    shutil.rmtree(output.parent)
    assert point_or_none(run, "model") is None


def test_of_a_model_on_another_machine_nothing_is_known(run: Run, tmp_path: Path) -> None:
    shutil.rmtree(trained_elsewhere(run, tmp_path))
    assert judged(run.folder).point("model").state == "missing"

    identify_process(run, host="another")
    assert point_or_none(run, "model") is None
    assert judged(run.folder, model="saved").point("model").ok is None


class Inputs:
    """The data and the model that a run began with."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.data = folder / "rows.jsonl"
        self.model = folder / "model"
        self.data.write_text("one\n")
        saved.model(self.model)
        self.digest = self.digest_of_data()
        model = fingerprint_model(str(self.model))
        self.before: list[dict[str, Any]] = [
            {
                "role": "data", "name": str(self.data), "digest": self.digest,
                "files": {self.data.name: self.digest},
            },
            {
                "role": "model", "name": str(self.model), "digest": model.digest,
                "files": {file.name: file.digest for file in model.files},
            },
        ]  # fmt: skip
        run.log(sft(5)).rank(0, *steps(5), END)

    def digest_of_data(self) -> str:
        return fingerprint_data(str(self.data)).digest

    def point(self) -> Point:
        """Compare again, and judge."""
        changed = inputs.compare_inputs(self.before, self.folder)
        files.write_json(RunFolder(self.run.folder).inputs(1), {"changed": changed})
        return judged(self.run.folder).point("inputs")


def test_inputs_that_did_not_change_are_the_same(run: Run, tmp_path: Path) -> None:
    begun = Inputs(run, tmp_path)
    assert point_or_none(run, "inputs") is None
    assert begun.point().state == "same"


def test_data_that_changed_fail_with_file_and_fingerprints(run: Run, tmp_path: Path) -> None:
    begun = Inputs(run, tmp_path)
    was = begun.data.stat()
    begun.data.write_text("two\n")
    os.utime(begun.data, ns=(was.st_atime_ns, was.st_mtime_ns))

    point = begun.point()

    assert brief(point) == ("changed", False)
    assert point.detail["file"] == begun.data.name
    assert point.detail["before"] == begun.digest
    assert point.detail["after"] == begun.digest_of_data()


def test_a_model_that_changed_names_its_file(run: Run, tmp_path: Path) -> None:
    begun = Inputs(run, tmp_path)
    (begun.model / "config.json").write_text('{"other": 1}')
    assert begun.point().detail["file"] == "config.json"


def test_data_that_are_gone_prove_nothing(run: Run, tmp_path: Path) -> None:
    begun = Inputs(run, tmp_path)
    begun.data.unlink()
    assert brief(begun.point()) == ("gone", None)


def test_a_run_that_waited_is_planned_anew_where_its_data_changed(
    stages: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stages(TRL)
    stage.start()
    stage.folder.console(1).unlink()
    waiting = Attempt(
        number=1,
        argv=("true",),
        cwd=str(stage.place),
        request={"stage": "sft"},
        env={},
        environ={},
        stage="sft",
        backend="trl",
        title="waiting",
    )
    waiting.write(stage.folder)
    monkeypatch.chdir(stage.place)

    def prepare(request: Any, _scope: Any) -> Any:
        raise RuntimeError(f"planned {request.folder.path} anew")

    monkeypatch.setattr(start, "prepare_start", prepare)
    assert start.prepare_again(stage.folder).number == 1

    stage.data.write_text(stage.data.read_text().replace("a", "b"))
    with pytest.raises(RuntimeError, match=f"planned {stage.folder.path} anew"):
        start.prepare_again(stage.folder)


def flip_byte(path: Path) -> None:
    """Overwrite one byte and put the time back."""
    was = path.stat()
    content = bytearray(path.read_bytes())
    content[100] ^= 0xFF
    path.write_bytes(content)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def save_checkpoint(stage: repeated.Run, number: int) -> Path:
    """With weights, and an optimizer as torch.save writes it: the bytes of tensors as they are."""
    folder = saved.trl(stage.output, number)
    tensors(folder / "model.safetensors", noise(number))
    with zipfile.ZipFile(folder / "optimizer.pt", "w") as file:
        file.writestr("archive/data/0", noise(5))
    return folder


def take_checksums(stage: repeated.Run) -> None:
    watch = checksums.ChecksumThread(stage.folder, "trl", stage.output, 1)
    watch.start()
    watch.end(resumable=True)


def flip_optimizer(checkpoint: Path) -> None:
    flip_byte(checkpoint / "optimizer.pt")


def flip_schedule(checkpoint: Path) -> None:
    flip_byte(checkpoint / "scheduler.pt")


def remove_arguments(checkpoint: Path) -> None:
    (checkpoint / "training_args.bin").unlink()


@pytest.mark.parametrize(
    ("has_checksums", "damage"),
    [
        # only CRCs and zeros tell
        (False, flip_optimizer),
        (False, fill_with_zeros),
        (True, flip_schedule),
        (True, remove_arguments),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_an_older_one(
    stages: Make, has_checksums: bool, damage: Callable[[Path], None]
) -> None:
    stage = stages(TRL)
    stage.start()
    older = save_checkpoint(stage, 2)
    newer = save_checkpoint(stage, 4)
    if has_checksums:
        take_checksums(stage)
        assert set(checksums.read_checksums(stage.folder)) == {older.name, newer.name}
    assert stage.decide().step == 4

    damage(newer)
    decision = stage.decide()
    assert (decision.kind, decision.step) == ("resume", 2)
    assert codes(decision)["damaged-checkpoint"] == "warning"

    damage(older)
    decision = stage.decide()
    assert decision.kind == "new"
    assert codes(decision)["nothing-to-resume"] == "note"


def resumed_message(decision: Decision) -> str:
    assert (decision.kind, decision.step) == ("resume", 2)
    for finding in decision.findings:
        if finding.code == "resumes":
            return finding.message
    raise AssertionError(decision.findings)


def leased_checkpoint(stage: repeated.Run) -> Path:
    """A run of TRL, with its lease in the output folder, and checksums of its checkpoint-2."""
    stage.start()
    held = lease.acquire(stage.output, stage.folder.path)
    lease.keep_manifest(held, rundir.read_manifest(stage.folder))
    folder = save_checkpoint(stage, 2)
    take_checksums(stage)
    return folder


@pytest.mark.parametrize("has_run_folder", [True, False])
def test_a_flipped_byte_of_the_weights_is_noticed(stages: Make, has_run_folder: bool) -> None:
    stage = stages(TRL)
    folder = leased_checkpoint(stage)
    if not has_run_folder:
        shutil.rmtree(stage.folder.path)
    assert "not verified" not in resumed_message(stage.decide())

    flip_byte(folder / "model.safetensors")

    decision = stage.decide()
    assert decision.kind == "new"
    assert codes(decision)["damaged-checkpoint"] == "warning"


def test_a_checkpoint_without_checksums_is_not_called_whole(stages: Make) -> None:
    stage = stages(TRL)
    folder = leased_checkpoint(stage)
    stage.folder.checksums.unlink()
    (stage.output / lease.FOLDER / "checksums.json").unlink()
    flip_byte(folder / "model.safetensors")
    assert "not verified: no checksums" in resumed_message(stage.decide())


def test_checksums_are_taken_beside_the_training(
    stages: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "EVERY_S", 0.05)
    stage = stages(TRL)
    stage.start()
    watch = checksums.ChecksumThread(stage.folder, "trl", stage.output, 1)
    watch.start()
    folder = saved.trl(stage.output, 2)
    end = time.monotonic() + 30
    while not checksums.read_checksums(stage.folder) and time.monotonic() < end:
        time.sleep(0.05)
    watch.end(resumable=False)

    recorded = checksums.read_checksums(stage.folder)["checkpoint-2"]
    assert set(recorded) == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("after", "state", "ok"),
    [(1.95, "continuous", True), (6.9, "jump", None), (1.2, "continuous", True)],
)
def test_losses_that_jump_after_a_resume_are_no_pass(
    run: Run, after: float, state: str, ok: bool | None
) -> None:
    first_steps = [step(number, 2.0 + 0.05 * math.sin(number * 7)) for number in range(1, 11)]
    start = {"event": "start", "rank": 0, "world": 1, "attempt": 2}
    resumed = {"event": "resumed", "path": "checkpoint-8", "step": 8}
    second_steps = [step(number, after) for number in range(9, 13)]
    run.log(sft(10)).rank(0, *first_steps, start, resumed, *second_steps, END)
    (run.folder / "console.2.log").write_text("")
    files.write_json(run.folder / "exit.2.json", {"returncode": 0, "attempt": 2})

    point = judged(run.folder).point("resume")

    assert brief(point) == (state, ok)
    assert ok or "before the resume" in advice(point)


def test_losses_are_those_of_the_probes_steps_where_there_are_any(tmp_path: Path) -> None:
    """The log holds four means of five steps each; the page keeps the two apart."""
    manifest = made_runs.manifest(stage="sft")
    folder = made_runs.write_run(tmp_path / "run", steps=20, record=manifest)
    trend = judged(folder, trend="falling").point("trend")
    assert brief(trend) == ("falling", True)
    assert trend.detail["losses"] == 20

    columns = series.load_run(folder).series.columns
    losses = [made_runs.loss(number, 20) for number in range(1, 21)]
    logged = columns["logged_loss"]
    assert columns["loss"] == pytest.approx(losses)
    assert len(logged) - logged.count(None) == 4


def test_an_adapter_is_fingerprinted(run: Run, tmp_path: Path) -> None:
    output = trained(run, tmp_path, "adapter_model.safetensors")
    assert judged(run.folder).point("model").state == "saved"
    tensors(output / "adapter_model.safetensors", noise(3))
    assert judged(run.folder).point("model").state == "changed"


def test_a_checkpoint_is_not_fingerprinted(tmp_path: Path) -> None:
    saved.trl(tmp_path / "out", 5)
    note_saved(EventLog(str(tmp_path / "probe"), 0), tmp_path / "out" / "checkpoint-5")
    assert not (tmp_path / "probe" / "rank-0.jsonl").read_text()


def test_without_a_probe_the_output_folder_must_be_there(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "nowhere"
    run.log(sft(5) + "Model weights saved in out/model.safetensors\n").exit(0)
    run.manifest({"output": str(output)})
    identify_process(run)
    shutil.rmtree(run.folder / "probe")

    verdict = judged(run.folder)
    assert verdict.point("finish").state == "completed"
    assert verdict.point("model").state == "missing"

    output.mkdir()
    assert point_or_none(run, "model") is None
