"""Settings side by side: what is compared and how, and comparisons from the command line."""

import itertools
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, REPOSITORY
from experiment import Here, started
from fake_world import World, needs_trl, wait_until

from launcher.config import durations
from launcher.errors import InvalidConfig, NotReady, UsageError
from launcher.planning.collect import Facts, Scope
from launcher.planning.request import Request
from launcher.runs import rundir
from launcher.workflows.bench import bench, measure, variants
from launcher.workflows.bench.comparison import SPEED, CurveStep, Sample, VariantSummary, compare
from launcher.workflows.bench.variants import Variant

pytestmark = needs_trl


def combine(*vary: str, variant: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """The overrides of each variant, by its name."""
    combinations = variants.combine_variants(vary, variant)
    return {each.name: each.overrides for each in combinations}


def test_every_value_is_combined_with_every_other() -> None:
    names = list(combine("a=1,2", "b=x,y"))
    assert names == ["a=1, b=x", "a=1, b=y", "a=2, b=x", "a=2, b=y"]


def test_variants_are_an_axis_beside_the_varied_keys() -> None:
    combined = combine("a=1,2", variant=("x:", "y:b=2,c.d=3"))
    assert list(combined) == ["x, a=1", "x, a=2", "y, a=1", "y, a=2"]
    assert combined["y, a=2"] == ("b=2", "c.d=3", "a=2")


def test_one_value_alone_is_compared_with_the_file_as_written() -> None:
    assert combine("packing=true") == {"as written": (), "packing=true": ("packing=true",)}
    assert combine() == {"as written": ()}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=[a,b],[c]", ["k=[a,b]", "k=[c]"]),
        ("k={a: 1, b: 2},null", ["k={a: 1, b: 2}", "k=null"]),
        ("k='a,b',c", ["k='a,b'", "k=c"]),
        ('k="x]",y', ['k="x]"', "k=y"]),
        ("k=it's,1e-5", ["k=it's", "k=1e-5"]),
    ],
)
def test_commas_in_brackets_and_quotes_are_part_of_the_value(text: str, values: list[str]) -> None:
    assert [overrides[0] for overrides in combine(text).values()] == values


@pytest.mark.parametrize(
    ("vary", "variant", "words"),
    [
        (["packing"], [], "key=a,b"),
        (["a=1,"], [], "empty"),
        (["a=1,1"], [], "twice"),
        (["a=[1,2"], [], "bracket"),
        (["a='1,2"], [], "quote"),
        (["a=1,2", "open_instruct.args.a=3,4"], [], "varied twice"),
        (["a=1,2"], ["x:a=1", "y:a=2"], "varied twice"),
        ([], ["packing=true"], "needs a name"),
        ([], ["x:a=q_proj,v_proj"], "`v_proj`"),
        ([], ["x:a=1", "x:a=2"], "two variants"),
        ([f"k{n}=1,2" for n in range(7)], [], "128 variants"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(
    vary: list[str], variant: list[str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        variants.combine_variants(vary, variant)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("0.5", 0.5)]
)
def test_a_duration(text: str, seconds: float) -> None:
    assert durations.parse_seconds(text) == seconds


# no timer takes the last one
@pytest.mark.parametrize("text", ["", "0", "ten", "1d", "-5", "99999999999"])
def test_a_text_that_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError):
        durations.parse_seconds(text)


def sample(
    variant: str, speed: float | None = 100.0, loss: float = 2.0, tokens: float = 50.0, **more: Any
) -> Sample:
    """A run of ten steps of so many tokens."""
    step = CurveStep(tokens, tokens, loss)
    figures = {SPEED: speed, "peak_allocated_gib": 10.0, "mfu": 0.4}
    return Sample(variant=variant, curve=(step,) * 10, metrics=figures, **more)


def standings(rows: Sequence[VariantSummary]) -> list[str]:
    return [row.standing for row in rows]


def recommended(rows: Sequence[VariantSummary]) -> list[str]:
    return [row.variant for row in rows if row.recommended]


def test_the_faster_by_the_medians_is_recommended() -> None:
    rows = compare([sample("a", 100), sample("a", 102), sample("b", 150), sample("b", 148)])
    assert standings(rows) == ["baseline", "faster"]
    assert rows[1].speed_ratio == pytest.approx(149 / 101)
    assert recommended(rows) == ["b"]


def test_the_fastest_that_trains_the_same_is_recommended() -> None:
    rows = compare([sample("a"), sample("b", 300, loss=2.2), sample("c", 150)])
    assert standings(rows) == ["baseline", "loss changed", "faster"]
    assert rows[1].loss_change == pytest.approx(0.1)
    assert "+10.0%" in rows[1].why
    assert recommended(rows) == ["c"]


def test_a_better_loss_is_another_loss() -> None:
    rows = compare([sample("a"), sample("b", 300, loss=1.5)])
    assert standings(rows) == ["baseline", "loss changed"]


@pytest.mark.parametrize(
    ("base", "speeds", "standing", "why"),
    [
        ((100, 101), (50, 51), "slower", "-49.8% by 2 of 3 runs"),
        ((100, 120), (118, 130), "no difference", ""),
        ((100,), (102,), "no difference", "+2.0% by 1 of 3 runs"),
        ((100,), (104,), "faster", "+4.0% by 1 of 3 runs"),
        # two runs each are apart by chance too often
        ((100, 100.1), (102, 102.1), "no difference", ""),
        ((100, 100.1, 100.2), (102, 102.1, 102.2), "faster", ""),
        ((100, 101, 102), (101.5, 120, 121), "no difference", "chance alone does in 10% of cases"),
    ],
)
def test_faster_is_what_chance_rarely_does(
    base: Sequence[float], speeds: Sequence[float], standing: str, why: str
) -> None:
    samples = [sample("a", speed) for speed in base]
    samples += [sample("b", speed) for speed in speeds]
    row = compare(samples)[1]
    assert row.standing == standing
    assert why in row.why


def test_losses_of_too_few_tokens_prove_nothing() -> None:
    rows = compare([sample("a"), sample("b", 300, tokens=600), sample("c", 150)])
    assert standings(rows) == ["baseline", "unproven", "faster"]
    assert "first step of b" in rows[1].why
    assert "--steps" in rows[1].why
    assert recommended(rows) == ["c"]


def test_another_loss_of_too_few_tokens_is_another_loss() -> None:
    rows = compare([sample("a"), sample("b", 300, loss=3, tokens=600)])
    assert standings(rows) == ["baseline", "loss changed"]


def test_losses_are_compared_over_the_same_tokens() -> None:
    small_steps = tuple(CurveStep(10, 10, loss) for loss in (4, 3, 2, 1))
    large_steps = tuple(CurveStep(40, 40, loss) for loss in (4, 2))
    base = replace(sample("a"), curve=small_steps)
    other = replace(sample("b"), curve=large_steps)

    by_small, by_large = compare([base, other])
    assert by_small.steps_within == 4
    assert by_small.median("loss_per_token") == pytest.approx(2.5)
    assert by_large.steps_within == 1
    assert by_large.median("loss_per_token") == pytest.approx(4.0)
    assert "1 steps against 4" in by_large.why


def test_what_failed_or_is_not_proved_is_never_recommended() -> None:
    rows = compare(
        [
            sample("a", unproved=("packing",)),
            sample("a", cause="crash", reason="bang"),
            sample("b", 500, cause="oom", reason="CUDA out of memory"),
            sample("c", 500, flaws=("packing is leaking",)),
            sample("d", 500),
            sample("d", None, cause="crash", reason="bang"),
            sample("e", 500, unproved=("packing",)),
        ]
    )
    assert standings(rows) == ["baseline", "failed", "flawed", "flawed", "unproven"]
    assert "packing" in rows[0].why
    assert "1 of its runs failed: crash: bang" in rows[0].why
    assert rows[1].why == "oom: CUDA out of memory"
    assert "leaking" in rows[2].why
    assert recommended(rows) == []


def test_without_a_baseline_nothing_is_compared() -> None:
    rows = compare([sample("a", cause="oom", reason="full"), sample("b")])
    assert standings(rows) == ["failed", "unknown"]


class Trials(Here):
    """Trials without a process; `scene` has the parts of a sample under its rate, as `at_0_2`."""

    def measure(
        self, facts: Facts, variant: Variant, *, repeat: int, timeout_s: float, **_: Any
    ) -> Sample:
        overrides = dict(text.split("=", 1) for text in facts.request.overrides)
        rate = overrides.get("learning_rate", "0.1")
        self.started.append(rate)
        parts = self.scene.get(f"at_{rate.replace('.', '_')}", {})
        if parts == "stopped":
            raise KeyboardInterrupt
        seconds = min(60.0, timeout_s) if parts.get("cause") == "timeout" else 5.0
        return sample(variant.name, **{"repeat": repeat, "seconds": seconds, **parts})


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trials:
    trials = Trials(capsys)
    monkeypatch.setattr(measure, "measure", trials.measure)
    return trials


def command(world: World, *words: str) -> list[str]:
    path = world.root / "stage.yaml"
    if not path.exists():
        world.config(learning_rate=0.1)
    return ["bench", str(path), "--python", str(world.root / "python"), "--gpus", "1", *words]


STEPS = ("--steps", "10")
JSON = ("--format", "json")
RATES = ("--vary", "learning_rate=0.1,0.2", *STEPS)
ONCE = ("--repeats", "1")


def test_runs_take_turns_and_the_order_alternates(world: World, trials: Trials) -> None:
    fast = {"speed": 200, "loss": 2.02}
    code, out, _ = trials.launch(*command(world, *RATES, *JSON), at_0_2=fast)
    assert code == 0
    assert trials.started == ["0.1", "0.2", "0.2", "0.1", "0.1", "0.2"]
    data = json.loads(out)["data"]
    assert data["complete"]
    assert data["compared"]["tokens"] == 500
    first, second = data["rows"]
    assert first[SPEED] == {"median": 100, "min": 100, "max": 100, "n": 3}
    assert second["standing"] == "faster"
    assert second["recommended"]
    record = json.loads((Path(data["folder"]) / "bench.json").read_text())
    assert record["rows"] == data["rows"]

    code, out, _ = trials.launch(*command(world, *RATES))
    assert code == 0
    assert "learning_rate=0.2: faster, recommended" in out
    assert "2.00x" in out


def test_a_damaged_trial_costs_all_trials(world: World, trials: Trials) -> None:
    words = command(world, *RATES, *ONCE)
    trials.launch(*words)
    (path,) = world.runs.rglob("bench.json")
    record = json.loads(path.read_text())
    record["samples"] = [{**record["samples"][0], "seconds": "long"}]
    path.write_text(json.dumps(record))
    trials.launch(*words)
    assert len(trials.started) == 4


def test_the_same_command_again_measures_nothing_twice(world: World, trials: Trials) -> None:
    words = command(world, *RATES)
    trials.launch(*words, "--repeats", "1")
    assert len(trials.started) == 2
    trials.launch(*words, "--repeats", "2")
    assert len(trials.started) == 4
    code, _, _ = trials.launch(*words, "--repeats", "1")
    assert code == 0
    assert len(trials.started) == 4
    assert len(list(world.runs.iterdir())) == 1


@pytest.mark.parametrize("word", ["--fresh", "--steps=11"])
def test_a_fresh_or_another_comparison_has_its_own_folder(
    world: World, trials: Trials, word: str
) -> None:
    trials.launch(*command(world, *RATES, *ONCE))
    trials.launch(*command(world, *RATES, *ONCE, word))
    assert len(trials.started) == 4
    assert len(list(world.runs.iterdir())) == 2


def test_a_trial_that_fails_ends_alone_and_is_repeated_only_if_that_may_help(
    world: World, trials: Trials
) -> None:
    words = command(world, "--vary", "learning_rate=0.1,0.2,0.3,0.4", *STEPS, *JSON)
    scene = {
        "at_0_2": {"cause": "oom", "reason": "CUDA out of memory"},
        "at_0_3": {"cause": "timeout", "reason": "its time was up"},
        "at_0_4": {"cause": "refused", "reason": "no space left"},
    }
    code, out, _ = trials.launch(*words, "--timeout", "15s", **scene)
    assert code == 0
    assert trials.started == ["0.1", "0.2", "0.3", "0.4", "0.1", "0.1"]
    baseline, *failed = json.loads(out)["data"]["rows"]
    assert baseline["standing"] == "baseline"
    assert [row["standing"] for row in failed] == ["failed"] * 3
    assert failed[0]["failures"] == ["oom: CUDA out of memory"]
    assert failed[1]["failures"] == ["timeout: its time was up"]
    assert failed[2]["failures"] == ["refused: no space left"]

    # with as much time only what could not be started, with more what was ended too
    trials.launch(*words, "--timeout", "15s", **scene)
    assert trials.started[6:] == ["0.4"]
    trials.launch(*words, *ONCE, "--timeout", "30s")
    assert sorted(trials.started[7:]) == ["0.3", "0.4"]


@pytest.mark.parametrize(("cause", "code"), [("crash", 4), ("refused", 5)])
def test_nothing_measured_is_a_failure(world: World, trials: Trials, cause: str, code: int) -> None:
    words = command(world, *STEPS, *JSON)
    exit_code, out, _ = trials.launch(*words, at_0_1={"cause": cause, "reason": "x"})
    assert exit_code == code
    (row,) = json.loads(out)["data"]["rows"]
    assert row["why"] == f"{cause}: x"


def test_ctrl_c_tells_what_is_done_and_the_same_command_goes_on(
    world: World, trials: Trials
) -> None:
    words = command(world, *RATES)
    code, out, _ = trials.launch(*words, at_0_2="stopped")
    assert code == 130
    assert "the same command continues here, 1 of 6 runs are done" in out
    assert trials.launch(*words)[0] == 0
    assert trials.started == ["0.1", "0.2", "0.2", "0.2", "0.1", "0.1", "0.2"]


def test_a_secret_is_neither_shown_nor_kept(world: World, trials: Trials) -> None:
    token = "hf_" + "aB3" * 11
    secrets = ("hub_token=a-plain-password", f"run_name={token}")
    named = ("--variant", "plain:", "--variant", f"{token}:learning_rate=0.2")
    words = command(world, *secrets, *named, *ONCE)
    _, text, messages = trials.launch(*words)
    _, answer, notes = trials.launch(*words, *JSON)
    (record,) = world.root.rglob("bench.json")
    for output in (text, messages, answer, notes, record.read_text()):
        assert token not in output
        assert "a-plain-password" not in output
    assert "<redacted>" in text
    assert "<redacted>" in record.read_text()


@pytest.mark.slow
def test_a_trial_is_a_real_run_and_is_measured(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenes = {
        "rate=0.1": {"speed": 5, "first": 0.1, "rested": [9, 10]},
        "rate=0.2": {"says": "CUDA out of memory. Tried to allocate 12.25 GiB."},
        # by the steps before it would be faster and the same
        "rate=0.3": {"speed": 2000, "nan": 4},
    }
    monkeypatch.setenv("SCENES", json.dumps(scenes))
    path = world.config(learning_rate=0.1)
    path.write_text(path.read_text() + "expect: {loss: any}\n")
    words = command(world, "--vary", "learning_rate=0.1,0.2,0.3", "batch.global=4", *ONCE)
    code, out, _ = Here(capsys).launch(*words, "--gpus", "2", *STEPS, *JSON)
    assert code == 0
    assert started(world, "rate") == ["0.1", "0.2", "0.3"]
    data = json.loads(out)["data"]
    good, *failed = data["samples"]
    assert [sample["cause"] for sample in failed] == ["oom", "diverged"]
    # the first steps do not count, nor do the last two, which followed a record of kernels
    assert good["pace"] == pytest.approx([1 / 10] * 6)
    expected = {
        "steps": 10,
        "steady_steps": 6,
        SPEED: 5,
        "tokens_per_step": 1000,
        "loss_per_token": 2,
        "wasted_share": 1 / 6,
    }
    assert {name: good["metrics"][name] for name in expected} == pytest.approx(expected)
    # a comparison leaves no weights behind
    assert not list(Path(data["folder"]).rglob("model.safetensors"))
    assert world.quiet()


@pytest.mark.slow
def test_what_a_killed_command_left_is_ended_and_what_it_measured_is_kept(
    world: World, trials: Trials
) -> None:
    words = command(world, *RATES, *ONCE, *JSON)
    running = world.started(*words, env={"SCENES": json.dumps({"rate=0.2": {"sleep": 600}})})
    wait_until(lambda: len(started(world, "rate")) == 2)
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=PATIENCE_S)

    code, out, _ = trials.launch(*words)
    assert code == 0
    assert trials.started == ["0.2"]
    assert world.quiet()
    assert len(json.loads(out)["data"]["samples"]) == 2


def test_a_full_disk_is_not_the_settings_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fill_the_disk(*_words: Any, **_more: Any) -> Any:
        raise rundir.make_not_writable(tmp_path, "No space left on device")

    monkeypatch.setattr(measure, "shorten_run", fill_the_disk)
    facts: Any = None
    with pytest.raises(NotReady):
        measure.measure(facts, Variant("a"), steps=5, root=tmp_path, timeout_s=None)


def plan(
    request: Request,
    *,
    vary: Sequence[str] = (),
    variant: Sequence[str] = (),
    scope: Scope = Scope.PLAN,
) -> bench.Bench:
    compared = tuple(variants.combine_variants(vary, variant))
    unplanned = bench.Bench(request=request, variants=compared, steps=5, repeats=1)
    return bench.plan(unplanned, scope)


def request_of(world: World, expect: str = "") -> Request:
    path = world.config(learning_rate=0.1)
    path.write_text(path.read_text() + expect)
    return Request(stage=None, config=path, gpus=0, python=world.root / "python")


def test_every_variant_is_judged_before_the_first_starts(world: World) -> None:
    named = ["good:", "typo:learning_rat=1", "batch:batch.per_device=3"]
    with pytest.raises(InvalidConfig) as refused:
        plan(request_of(world), variant=named)
    message = str(refused.value)
    assert "[typo]" in message
    assert "[batch]" in message
    assert "[good]" not in message


def test_a_model_that_is_not_here_is_named_with_its_variant(world: World) -> None:
    models = ["model_name_or_path=/nowhere/a,nobody/tiny,/nowhere/b"]
    with pytest.raises(InvalidConfig) as refused:
        plan(request_of(world), vary=models, scope=Scope.START)
    for finding in refused.value.findings:
        assert finding.code == "missing-model"
    message = str(refused.value)
    assert "=/nowhere/a]" in message
    assert "tiny]" not in message


def test_a_machine_that_no_variant_can_start_on(world: World) -> None:
    request = replace(request_of(world), gpus=1)
    needs = "use_peft=true,load_in_4bit=true"
    unready = (f"a:{needs}", f"b:{needs},learning_rate=0.2")
    with pytest.raises(NotReady) as refused:
        plan(request, variant=unready, scope=Scope.START)
    assert "missing-packages" in {finding.code for finding in refused.value.findings}
    assert not list(world.runs.glob("*"))
    # beside one that can start, the other is a row
    planned = plan(request, variant=("plain:", f"four:{needs}"), scope=Scope.START)
    assert len(planned.variants) == 2


def test_the_global_batch_stays_as_the_file_has_it(world: World) -> None:
    path = world.config(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    path.write_text(path.read_text().replace("batch:\n  global: 2\n  per_device: 2\n", ""))
    request = Request(stage=None, config=path, gpus=0, python=Path(sys.executable))
    planned = plan(request, vary=["per_device_train_batch_size=1,2,8"])
    assert planned.batch == 8
    assert [variant.overrides[-1] for variant in planned.variants] == [
        "gradient_accumulation_steps=8",
        "gradient_accumulation_steps=4",
        "gradient_accumulation_steps=1",
    ]


FREE = "padding_free=true,max_length='none'"


@pytest.mark.parametrize(
    ("expected", "override", "follows"),
    [
        ("packing: isolated", "packing=true", ()),
        ("packing: off", "args.packing=true", ("expect.packing=isolated",)),
        ("packing: off", "expect.packing=any,packing=true", ()),
        ("packing: off", FREE, ("expect.packing=isolated",)),
        # one row is packed with no other
        ("packing: isolated", f"{FREE},batch.per_device=1", ("expect.packing=off",)),
        ("attention: sdpa", "attn_implementation=eager", ("expect.attention=eager",)),
        ("attention: any", "attn_implementation=eager", ()),
    ],
)
def test_the_expectation_follows_whichever_key_turns_it(
    world: World, expected: str, override: str, follows: tuple[str, ...]
) -> None:
    # some of these could not hold as they are written
    request = request_of(world, f"expect: {{{expected}}}\non_violation: warn\n")
    _, changed = plan(request, variant=[f"changed:{override}"]).variants
    assert changed.overrides == (*override.split(","), *follows)


def test_without_a_gpu_it_is_refused_with_the_way_to_try_it(
    world: World, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    code, _, err = trials.launch(*command(world))
    assert code == 5
    assert "--cpu" in err
    code, _, err = trials.launch(*command(world, "--cpu"))
    assert code == 2
    assert "useless-option" in err
    assert not trials.started


def documented_commands() -> list[str]:
    text = (REPOSITORY / "docs" / "comparing.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("launch bench ")]


@pytest.mark.parametrize("line", documented_commands())
def test_the_commands_of_the_page_are_valid(
    line: str, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    config, *words = shlex.split(line)[2:]
    options: dict[str, list[str]] = {"--vary": [], "--variant": [], "--gpus": ["0"]}
    for name, value in itertools.pairwise(words):
        if name.startswith("--"):
            options.setdefault(name, []).append(value)
    monkeypatch.chdir(REPOSITORY)
    gpus = int(options["--gpus"][-1])
    request = Request(stage=None, config=Path(config), gpus=gpus, python=Path(sys.executable))
    planned = plan(request, vary=options["--vary"], variant=options["--variant"])
    assert len(planned.variants) > 1
