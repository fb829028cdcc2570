"""What a search makes of its runs: its judgement, its proposal, and the command line."""

import functools
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tuned
import yaml
from conftest import PATIENCE_S, REPOSITORY, Write
from experiment import Here, shaped, started
from fake_smi import Smi
from fake_world import World, needs_trl

from launcher.config import load
from launcher.config.load import Config
from launcher.errors import select_errors
from launcher.planning.collect import Facts
from launcher.planning.request import Request
from launcher.stage import stage
from launcher.workflows.bench import measure
from launcher.workflows.bench.comparison import SPEED, CurveStep, Sample
from launcher.workflows.bench.variants import Variant
from launcher.workflows.tune import space, tune
from launcher.workflows.tune.search import Trial
from launcher.workflows.tune.space import Space

pytestmark = needs_trl

HAND = "bench/hand_recipe.yaml"


@functools.cache
def hand() -> Space:
    return tuned.outlook(HAND)


@functools.cache
def small() -> Space:
    """A stage file of which few settings can be made."""
    words = "model_name_or_path=Qwen/Qwen2.5-0.5B deepspeed=none batch.global=32".split()
    return tuned.outlook(HAND, *words, gpus=1)


def sample(
    speed: float | None = 100.0, loss: float = 2.0, *, variant: str = "x", **parts: Any
) -> Sample:
    figures = {SPEED: speed, "seconds_per_step": 1.0, "peak_allocated_gib": 5.0}
    step = CurveStep(100.0, 100.0, loss)
    return Sample(variant=variant, metrics=figures, curve=(step, step), **parts)


LEAKING = ("packing is leaking",)
OUT_OF_MEMORY = sample(cause="oom", reason="CUDA out of memory")


@pytest.mark.parametrize(
    ("run", "status", "blamed"),
    [
        (sample(loss=2.05), "ok", ()),
        (sample(loss=2.2), "loss changed", ()),
        (sample(loss=1.8), "loss changed", ()),
        (sample(speed=None), "no speed", ()),
        (replace(sample(), curve=()), "no speed", ()),
        (OUT_OF_MEMORY, "oom", ()),
        (sample(unproved=("packing",)), "unproven", ("packing",)),
        (sample(gradients="unknown"), "unproven", ()),
        (sample(flaws=("liger is not_engaged",)), "contract", ("liger",)),
        (sample(cause="contract", flaws=LEAKING), "contract", ("packing",)),
    ],
)
def test_a_setting_counts_only_if_everything_was_proved(
    run: Sample, status: str, blamed: tuple[str, ...]
) -> None:
    trial = judge([run], [sample(variant="first")])
    assert trial.status == status
    assert trial.blamed == blamed


def judge(runs: Sequence[Sample], first: Sequence[Sample]) -> Trial:
    """The judgement of a setting by its runs, beside those of the file as written."""
    return tune.judge_candidate(hand().candidate(hand().base), runs, first)


def test_without_runs_of_the_file_no_loss_changes() -> None:
    assert judge([sample()], []).loss_change == 0


def test_losses_are_compared_by_the_medians_of_all_runs() -> None:
    first = [sample(variant="first", loss=loss) for loss in (2.0, 2.4, 2.0)]
    assert judge([sample(loss=2.2)], first).status == "loss changed"
    trial = judge([sample(), sample(), sample(loss=2.2)], first)
    assert trial.status == "ok"
    assert trial.loss_change == 0


def test_what_the_last_run_did_not_prove_no_other_run_proves() -> None:
    first = [sample(variant="first")]
    assert judge([sample(), sample(), sample()], first).status == "ok"
    trial = judge([sample(), sample(), sample(flaws=LEAKING)], first)
    assert trial.status == "contract"
    assert trial.blamed == ("packing",)


@dataclass(frozen=True, slots=True)
class Ran:
    """A run of the file as written (0 rows), or packed with so many rows a device."""

    rows: int
    speed: float
    loss: float = 2.0
    cause: str = "ok"


def tune_after(runs: Sequence[Ran]) -> tune.Tuning:
    resolved: Any = SimpleNamespace(request=Request(stage="sft", config=Path("x")))
    tuning = tune.Tuning(resolved=resolved, space=small(), key="")
    for run in runs:
        settings = {}
        if run.rows:
            settings = {"packing": True, "per_device": run.rows}
        candidate = tuned.candidate_with(tuning.search, **settings)
        measured = sample(
            run.speed,
            run.loss,
            variant=str(run.rows),
            repeat=len(tuning.search.runs_of(candidate)),
            cause=run.cause,
        )
        tuning.search.learn(tune.judge_candidate(candidate, [measured], []))
    return tuning


FILE = Ran(0, 100)


@pytest.mark.parametrize(
    ("runs", "chosen"),
    [
        pytest.param([FILE, Ran(16, 104)], 16, id="faster"),
        pytest.param([FILE, Ran(16, 120), Ran(32, 110), Ran(16, 0, cause="oom")], 32, id="oom"),
        pytest.param(
            [FILE, Ran(0, 105), Ran(16, 120), Ran(16, 104), Ran(32, 110), Ran(32, 111)],
            32,
            id="the best by medians overlaps with the file",
        ),
        pytest.param([FILE, Ran(16, 120), Ran(16, 0, cause="timeout")], 16, id="timeout"),
    ],
)
def test_what_is_proposed_is_faster_by_all_runs(runs: list[Ran], chosen: int) -> None:
    tuning = tune_after(runs)
    assert proposed_rows(tuning) == chosen
    assert [row.variant for row in tuning.bench().rows if row.recommended] == [str(chosen)]


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([FILE, Ran(16, 102)], id="too little"),
        pytest.param(
            [FILE, Ran(0, 100, loss=2.2), Ran(0, 100, loss=2.2), Ran(16, 120)],
            id="the loss of the file differs by its later runs",
        ),
    ],
)
def test_the_file_is_proposed_where_nothing_is_faster(runs: list[Ran]) -> None:
    tuning = tune_after(runs)
    assert proposed_rows(tuning) == 0
    assert not any(row.recommended for row in tuning.bench().rows)


def proposed_rows(tuning: tune.Tuning) -> int:
    """The rows a device of what is proposed."""
    assert tuning.chosen is not None
    assert tuning.as_json()["best"]["speed_ratio"] is not None
    return int(tuning.chosen.runs[0].sample.variant)


def options_of(config: Config) -> dict[str, object]:
    """Those that must be as the overrides say; the others are named otherwise in other shapes."""
    others = "name stage backend script deepspeed deepspeed_config num_gpus".split()
    return {name: value for name, value in config.options.items() if name not in others}


def propose(world: Space, place: Path, overrides: Sequence[str] = (), **settings: Any) -> str:
    """The text of a proposal, which must have the values of the same overrides."""
    whole = {**world.base, **settings}
    head = ["x on 2 x H200\nb: c", "y\u2028z"]
    space.write(place, world, whole, head=head, requested=tuple(overrides))

    overridden = load.load(world.plan.stage.config.path, (*overrides, *world.overrides(whole)))
    proposal = load.load(place)
    assert proposal.args == overridden.args
    assert options_of(proposal) == options_of(overridden)
    judged = stage.judge_stage_file(proposal)
    assert not select_errors(judged.findings)
    assert judged.options is not None
    deepspeed = world.planned(whole).stage.options.deepspeed_name
    assert judged.options.deepspeed_name.endswith(deepspeed)
    return place.read_text()


def test_the_proposal_has_the_values_of_the_overrides(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "tuned.yaml"
    text = propose(hand(), place, packing=True, per_device=64, deepspeed="zero2")
    head = "# Tuned by launch: x on 2 x H200 b: c\n# y z\nname: hand_recipe-tuned\n"
    assert text.startswith(head)
    for part in ("extends: ", "per_device: 64", "packing: isolated"):
        assert part in text

    words = ("learning_rate=1e-5", "batch.global=256", "chat_template_name='a: b # c'")
    assert "a: b # c" in propose(tuned.outlook(HAND, *words), place, words, packing=True)


def test_a_deepspeed_file_beside_the_old_file_is_found_from_the_new_one(
    write: Write, tmp_path: Path
) -> None:
    write("configs/own.json", (REPOSITORY / "launcher/plan/deepspeed/zero2.json").read_text())
    text = (REPOSITORY / "configs" / HAND).read_text().replace("zero2_fp32_comm", "own.json")
    world = tuned.outlook(write("configs/own.yaml", text))
    assert "../configs/own.json" in propose(world, tmp_path / "away" / "tuned.yaml", packing=True)


@pytest.mark.parametrize("shape", ["wrapped", "flat"])
def test_files_of_other_shapes_become_stage_files(write: Write, tmp_path: Path, shape: str) -> None:
    content = yaml.safe_load((REPOSITORY / "configs" / HAND).read_text())["args"]
    content |= {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}
    settings = {"packing": True, "per_device": 32}
    if shape == "wrapped":
        script = {"script": "open_instruct/finetune.py", "deepspeed_config": "zero2_fp32_comm"}
        content = {"num_gpus": 2, "open_instruct": {**script, "args": content}}
        settings["deepspeed"] = "zero2"
    world = tuned.outlook(write(f"{shape}.yaml", yaml.safe_dump(content)))
    propose(world, tmp_path / "tuned.yaml", **settings)

    proposal = load.load(tmp_path / "tuned.yaml")
    assert proposal.shape == "stage"
    assert proposal.args["gradient_accumulation_steps"] == 2


class Trials(Here):
    """Trials without a process.

    `scene` has what happens: `crash`, `refused`, `timeout` and `moves` name the settings that end
    so or have another loss, `room` the GiB of the card, `first` a function to call before a trial.
    """

    def measure(
        self, facts: Facts, variant: Variant, *, steps: int, repeat: int, **_: Any
    ) -> Sample:
        words = (*facts.request.overrides, *variant.overrides)
        values = dict(word.split("=", 1) for word in words)
        rows = int(values.get("batch.per_device", 2))
        checkpointing = values.get("args.gradient_checkpointing") != "false"
        settings = f"rows={rows},checkpointing={checkpointing}"
        self.started.append(settings)
        if "first" in self.scene:
            self.scene["first"]()

        run = Sample(variant=variant.name, repeat=repeat, gradients="true", seconds=4.0)
        for cause in ("crash", "refused", "timeout"):
            if self.scene.get(cause, "no") in settings:
                return replace(run, cause=cause, reason="this setting does not work")  # type: ignore[arg-type]
        gib_of_row = 6.0
        seconds = 0.05 / rows + 0.02
        if checkpointing:
            gib_of_row = 2.0
            seconds *= 1.3
        peak = 5.0 + rows * gib_of_row
        if peak > self.scene.get("room", 60.0):
            return replace(run, cause="oom", reason="CUDA out of memory")
        figures = {
            SPEED: 100 / seconds,
            "seconds_per_step": 4 * seconds,
            "peak_allocated_gib": peak,
            "tokens_per_step": 100.0 * int(values.get("batch.global", 8)),
        }
        loss = 2.0
        if self.scene.get("moves", "no") in settings:
            loss = 3.0
        step = CurveStep(400.0, 400.0, loss)
        return replace(run, metrics=figures, curve=(step,) * steps)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trials:
    trials = Trials(capsys)
    monkeypatch.setattr(measure, "measure", trials.measure)
    return trials


def command(world: World, *words: str, batch: int = 8) -> list[str]:
    path = world.config(
        model_name_or_path=shaped(world), max_length=1024, gradient_checkpointing=True, bf16=True
    )
    content = yaml.safe_load(path.read_text())
    content["batch"] = {"global": batch, "per_device": batch // 4 or 1}
    path.write_text(yaml.safe_dump(content))
    python = str(world.root / "python")
    options = "--gpus 2 --steps 3 --row-tokens 100:900".split()
    return ["tune", str(path), "--python", python, *options, *words]


def read_record(world: World) -> Any:
    """The record of the newest search."""
    paths = sorted(world.runs.glob(f"*-tune-*/{tune.FILE}"))
    return json.loads(paths[-1].read_text())


def statuses(record: Any) -> list[str]:
    return [trial["status"] for trial in record["trials"]]


@pytest.mark.slow
def test_a_search_with_real_processes_is_interrupted_and_goes_on(world: World) -> None:
    words = command(world, batch=2)
    running = world.started(*words, env={"SCENES": json.dumps({"": {"sleep": 600}})})
    world.pid("trainer")
    # the same command finds what is under way before anything is measured
    record = read_record(world)
    assert record["state"] == "running"
    assert record["trials"] == []
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert b"the same command continues" in out
    assert world.quiet()
    assert read_record(world)["state"] == "interrupted"

    done = world.launch(
        *words, env={"SCENES": json.dumps({"checkpointing=False": {"speed": 2000}})}
    )
    assert done.returncode == 0, done.stderr
    assert "tuned: launch sft" in done.stdout
    assert "tokens/s per GPU" in done.stdout
    record = read_record(world)
    assert len(list(world.runs.iterdir())) == 1
    assert record["state"] == "finished"
    assert (Path(record["folder"]) / "bench.html").is_file()
    first = record["trials"][0]
    assert first["status"] == "ok"
    assert first["purpose"] == "baseline"
    best = record["best"]
    assert best["speed_ratio"] > 1.5
    assert best["settings"]["checkpointing"] is False

    # the file and the best were repeated
    chosen, *_ = [trial for trial in record["trials"] if trial["settings"] == best["settings"]]
    rows = {row["variant"]: row for row in record["bench"]}
    assert rows[first["name"]][SPEED]["n"] == 3
    assert rows[chosen["name"]][SPEED]["n"] == 3
    assert [name for name, row in rows.items() if row["recommended"]] == [chosen["name"]]

    proposal = ("sft", record["proposal"], "--python", str(world.root / "python"), "--gpus", "2")
    assert world.launch(*proposal).returncode in (0, 1)
    assert started(world, "checkpointing")[-1] == "False"
    assert world.quiet()


def test_the_same_command_repeats_no_trial(world: World, trials: Trials) -> None:
    words = command(world)
    scene = {"room": 20.0, "moves": "rows=4,checkpointing=True"}
    code, out, _ = trials.launch(*words, "--format", "json", **scene)
    record = read_record(world)
    assert code == 0
    assert json.loads(out)["data"]["trials"] == record["trials"]
    # each of these ends its own trial alone
    assert {"oom", "loss changed"} <= set(statuses(record))
    assert record["best"]["peak_allocated_gib"] <= 20.0

    count = len(trials.started)
    code, _, err = trials.launch(*words, **scene)
    assert code == 0
    assert "--fresh" in err
    assert len(trials.started) == count
    assert read_record(world)["trials"] == record["trials"]

    trials.launch(*words, "--fresh", crash="rows=2,")
    assert read_record(world)["folder"] != record["folder"]


def test_a_damaged_record_is_replaced(world: World, trials: Trials) -> None:
    words = command(world)
    trials.launch(*words)
    count = len(trials.started)
    record = read_record(world)
    path = Path(record["folder"]) / tune.FILE
    path.write_text(json.dumps({**record, "trials": [{"status": "ok"}]}))
    trials.launch(*words)
    assert len(trials.started) == 2 * count
    assert len(list(world.runs.iterdir())) == 1


def test_what_tells_nothing_about_a_setting_is_tried_again(world: World, trials: Trials) -> None:
    code, out, _ = trials.launch(*command(world, "--budget", "17s"), timeout="rows=2,")
    assert code == 4
    assert "nothing to propose" in out
    assert statuses(read_record(world)) == ["timeout"]

    words = command(world, "--budget", "3m")
    code, out, _ = trials.launch(*words, refused="rows")
    assert code == 5
    assert "nothing can be compared with the file as written (refused)" in out
    assert statuses(read_record(world)) == ["refused"]

    assert trials.launch(*words)[0] == 0
    assert len(list(world.runs.iterdir())) == 1
    first = read_record(world)["trials"][0]
    assert first["purpose"] == "baseline"
    assert first["status"] == "ok"


def test_gpus_that_another_process_took_are_not_the_settings_fault(
    world: World, trials: Trials
) -> None:
    def take_gpu_from_the_second_trial() -> None:
        if len(trials.started) == 2:
            smi = Smi(world.root / "smi")
            smi.cards(0, 0)
            smi.processes((0, 4242, 90_000))
            trials.scene["refused"] = "rows"

    code, _, err = trials.launch(*command(world), first=take_gpu_from_the_second_trial)
    assert code == 5
    assert "gpus-taken" in err
    assert statuses(read_record(world)) == ["ok"]


def test_a_proposal_that_cannot_be_written_loses_no_trial(world: World, trials: Trials) -> None:
    place = world.root / "results" / "tuned.yaml"

    def block_the_folder() -> None:
        if not place.parent.exists():
            place.parent.write_text("in the way")

    code, out, err = trials.launch(*command(world, "-o", str(place)), first=block_the_folder)
    assert code == 5
    assert "unwritable-file" in err
    assert "another -o" in out
    record = read_record(world)
    assert record["state"] == "finished"
    assert record["proposal"] is None

    # another name needs no trial
    count = len(trials.started)
    assert trials.launch(*command(world, "-o", str(world.root / "tuned.yaml")))[0] == 0
    assert len(trials.started) == count
    assert Path(read_record(world)["proposal"]).is_file()


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("--cpu",), 2, "useless-option"),
        (("--budget", "soon"), 2, "not a duration"),
        (("--budget", "9s"), 2, "not even one trial"),
        (("model_name_or_path=gone/model",), 3, "unknown-shape"),
        (("-o", "stage.yaml"), 2, "was not written by `launch tune`"),
        (("--gpus", "3"), 5, "3 GPU(s)"),
        (("batch.global=5",), 3, "5"),
    ],
)
def test_a_search_that_cannot_begin_is_refused(
    world: World, trials: Trials, words: tuple[str, ...], code: int, reason: str
) -> None:
    exit_code, _, err = trials.launch(*command(world, *words))
    assert exit_code == code
    assert reason in err
    assert not trials.started
    assert not list(world.root.glob("runs/*tune*"))
