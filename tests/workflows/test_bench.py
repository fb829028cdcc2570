"""Settings side by side: what is asked for, how it is compared, and comparisons from the command line."""

import itertools
import json
import shlex
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, REPOSITORY
from experiment import Here, started
from fake_world import World, needs_trl, until

from launcher.config import durations
from launcher.errors import InvalidConfig, NotReady, UsageError
from launcher.planning.collect import Facts, Scope
from launcher.planning.request import Request
from launcher.runs import rundir
from launcher.workflows.bench import bench, measure, variants
from launcher.workflows.bench.comparison import SPEED, CurveStep, Sample, compare
from launcher.workflows.bench.variants import Variant


def overrides(*vary: str, variant: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    return {one.name: one.overrides for one in variants.combinations(vary, variant)}


def test_combinations() -> None:
    assert overrides("packing=false,true") == {
        "packing=false": ("packing=false",),
        "packing=true": ("packing=true",),
    }
    assert list(overrides("a=1,2", "b=x,y")) == ["a=1, b=x", "a=1, b=y", "a=2, b=x", "a=2, b=y"]
    # the variants are one axis beside the others
    both = overrides("a=1,2", variant=("x:", "y:b=2,c.d=3"))
    assert list(both) == ["x, a=1", "x, a=2", "y, a=1", "y, a=2"]
    assert both["y, a=2"] == ("b=2", "c.d=3", "a=2")
    # one alone is held against the file as it is
    assert overrides("packing=true") == {"as written": (), "packing=true": ("packing=true",)}
    assert overrides() == {"as written": ()}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=[a,b],[c]", ["k=[a,b]", "k=[c]"]),
        ("k={a: 1, b: 2},null", ["k={a: 1, b: 2}", "k=null"]),
        ("k='a,b',c", ["k='a,b'", "k=c"]),
        ('k="x]",y', ['k="x]"', "k=y"]),
        ("k=it's,1e-5", ["k=it's", "k=1e-5"]),
        ("k=a=b,c", ["k=a=b", "k=c"]),
    ],
)
def test_commas_in_brackets_and_quotes_are_part_of_the_value(text: str, values: list[str]) -> None:
    assert [one.overrides[0] for one in variants.combinations([text], [])] == values


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
def test_what_makes_no_sense_is_refused(vary: list[str], variant: list[str], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        variants.combinations(vary, variant)
    assert words in str(refused.value)


def test_times() -> None:
    read = [durations.seconds(text) for text in ("90", "90s", "10m", "1h30m", "0.5")]
    assert read == [90, 90, 600, 5400, 0.5]
    # no timer takes a longer one
    for text in ("", "0", "ten", "1d", "-5", "99999999999"):
        with pytest.raises(UsageError):
            durations.seconds(text)


def sample(
    name: str,
    speed: float | None = 100.0,
    loss: float = 2.0,
    steps: int = 10,
    tokens: float = 50.0,
    **more: Any,
) -> Sample:
    curve = tuple(CurveStep(tokens, tokens, loss) for _ in range(steps))
    figures = {SPEED: speed, "peak_allocated_gib": 10.0, "mfu": 0.4}
    return Sample(variant=name, curve=curve, metrics=figures, **more)


def standings(*samples: Sample) -> list[str]:
    return [row.standing for row in compare(samples)]


def test_the_fastest_that_trains_the_same_is_recommended() -> None:
    rows = compare([sample("a"), sample("a", 102), sample("b", 150), sample("b", 148)])
    assert [row.standing for row in rows] == ["baseline", "faster"]
    assert rows[1].speed_ratio == pytest.approx(149 / 101) and rows[1].recommended
    rows = compare([sample("a"), sample("b", 300, loss=2.2), sample("c", 150)])
    assert [row.standing for row in rows] == ["baseline", "loss changed", "faster"]
    assert [row.recommended for row in rows] == [False, False, True]
    assert "+10.0%" in rows[1].why and rows[1].loss_change == pytest.approx(0.1)
    # a better loss is another loss
    assert standings(sample("a"), sample("b", 300, loss=1.5))[1] == "loss changed"


@pytest.mark.parametrize(
    ("base", "speeds", "standing", "why"),
    [
        ((100, 101), (50, 51), "slower", "-49.8% by 2 of 3 runs"),
        ((100, 120), (118, 130), "no difference", ""),
        ((100,), (102,), "no difference", "+2.0% by 1 of 3 runs"),
        ((100,), (104,), "faster", "+4.0% by 1 of 3 runs"),
        # of two each, ranges are apart by chance too often
        ((100, 100.1), (102, 102.1), "no difference", ""),
        ((100, 100.1, 100.2), (102, 102.1, 102.2), "faster", ""),
        ((100, 101, 102), (101.5, 120, 121), "no difference", "chance alone does in 10% of cases"),
    ],
)
def test_faster_is_what_chance_rarely_does(
    base: tuple[float, ...], speeds: tuple[float, ...], standing: str, why: str
) -> None:
    rows = compare([*(sample("a", one) for one in base), *(sample("b", one) for one in speeds)])
    assert rows[1].standing == standing and why in rows[1].why


def test_losses_that_can_be_compared() -> None:
    rows = compare([sample("a"), sample("b", 300, tokens=600), sample("c", 150)])
    assert [row.standing for row in rows] == ["baseline", "unproven", "faster"]
    assert "first step of b" in rows[1].why and "--steps" in rows[1].why and rows[2].recommended
    # another loss is the graver thing
    assert standings(sample("a"), sample("b", 300, loss=3, tokens=600))[1] == "loss changed"
    # losses are compared over the same tokens
    falling = tuple(CurveStep(10, 10, loss) for loss in (4, 3, 2, 1))
    large = (CurveStep(40, 40, 4.0), CurveStep(40, 40, 2.0))
    rows = compare([replace(sample("a"), curve=falling), replace(sample("b"), curve=large)])
    assert [row.median("loss_per_token") for row in rows] == pytest.approx([2.5, 4.0])
    assert [row.steps_within for row in rows] == [4, 1]
    assert "1 steps against 4" in rows[1].why


def test_what_failed_or_is_not_proved_is_never_recommended() -> None:
    rows = compare(
        [
            sample("a", unproved=("packing",)), sample("a", cause="crash", reason="bang"),
            sample("b", 500, cause="oom", reason="CUDA out of memory"),
            sample("c", 500, flaws=("packing is leaking",)),
            sample("d", 500), sample("d", None, cause="crash", reason="bang"),
            sample("e", 500, unproved=("packing",)),
        ]
    )  # fmt: skip
    assert [row.standing for row in rows] == ["baseline", "failed", "flawed", "flawed", "unproven"]
    assert "packing" in rows[0].why and "1 of its runs failed: crash: bang" in rows[0].why
    assert rows[1].why == "oom: CUDA out of memory" and "leaking" in rows[2].why
    assert not any(row.recommended for row in rows)
    # nothing is left to hold others to
    assert standings(sample("a", cause="oom", reason="full"), sample("b")) == ["failed", "unknown"]


class Trials(Here):
    """Trials by their learning rate, as `scene` has it: a sample's parts by the rate."""

    def measure(
        self, facts: Facts, variant: Variant, *, repeat: int, timeout_s: float, **_: Any
    ) -> Sample:
        given = dict(text.split("=", 1) for text in facts.request.overrides)
        rate = given.get("learning_rate", "0.1")
        self.started.append(rate)
        more = self.scene.get(f"at_{rate.replace('.', '_')}", {})
        if more == "stopped":
            raise KeyboardInterrupt
        taken = min(60.0, timeout_s) if more.get("cause") == "timeout" else 5.0
        return sample(variant.name, **{"repeat": repeat, "seconds": taken, **more})


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trials:
    made = Trials(capsys)
    monkeypatch.setattr(measure, "measure", made.measure)
    return made


def words_for(world: World, *words: str) -> list[str]:
    path = world.root / "stage.yaml"
    path = path if path.exists() else world.config(learning_rate=0.1)
    return ["bench", str(path), "--python", str(world.root / "python"), "--gpus", "1", *words]


VARY = ("--vary", "learning_rate=0.1,0.2", "--steps", "10", "--format", "json")
ONCE = ("--repeats", "1")
pytestmark = needs_trl


def test_runs_take_turns_and_the_order_alternates(world: World, trials: Trials) -> None:
    code, out, _ = trials.launch(*words_for(world, *VARY), at_0_2={"speed": 200, "loss": 2.02})
    assert code == 0 and trials.started == ["0.1", "0.2", "0.2", "0.1", "0.1", "0.2"]
    data = json.loads(out)["data"]
    first, second = data["rows"]
    assert second["standing"] == "faster" and second["recommended"] and data["complete"]
    assert first[SPEED] == {"median": 100, "min": 100, "max": 100, "n": 3}
    assert data["compared"]["tokens"] == 500
    folder = Path(data["folder"])
    written = json.loads((folder / "bench.json").read_text())
    assert written["rows"] == data["rows"]
    code, out, _ = trials.launch(*words_for(world, *VARY[:-2]))
    assert code == 0 and "learning_rate=0.2: faster, recommended" in out and "2.00x" in out


def test_a_damaged_trial_costs_all_trials(world: World, trials: Trials) -> None:
    words = words_for(world, *VARY, *ONCE)
    trials.launch(*words)
    (file,) = world.runs.rglob("bench.json")
    written = json.loads(file.read_text())
    file.write_text(
        json.dumps({**written, "samples": [{**written["samples"][0], "seconds": "long"}]})
    )
    trials.launch(*words)
    assert len(trials.started) == 4


def test_the_same_command_again_measures_nothing_twice(world: World, trials: Trials) -> None:
    words = words_for(world, *VARY)
    for repeats, count in (("1", 2), ("1", 2), ("2", 4), ("1", 4), ("2", 4)):
        code, out, _ = trials.launch(*words, "--repeats", repeats)
        assert (code, len(trials.started)) == (0, count)
    assert len(json.loads(out)["data"]["samples"]) == 4 and len(list(world.runs.iterdir())) == 1
    trials.launch(*words, *ONCE, "--fresh")
    # another length is another comparison
    trials.launch(*words_for(world, *VARY, "--steps", "11"), *ONCE)
    assert len(trials.started) == 8 and len(list(world.runs.iterdir())) == 3


def test_a_trial_that_fails_ends_alone_and_only_time_may_mend_it(
    world: World, trials: Trials
) -> None:
    words = words_for(world, "--vary", "learning_rate=0.1,0.2,0.3,0.4", *VARY[2:])
    scene = {
        "at_0_2": {"cause": "oom", "reason": "CUDA out of memory"},
        "at_0_3": {"cause": "timeout", "reason": "its time was up"},
        "at_0_4": {"cause": "refused", "reason": "no space left"},
    }
    code, out, _ = trials.launch(*words, "--timeout", "15s", **scene)
    assert code == 0 and trials.started == ["0.1", "0.2", "0.3", "0.4", "0.1", "0.1"]
    rows = json.loads(out)["data"]["rows"]
    assert [row["standing"] for row in rows] == ["baseline", *["failed"] * 3]
    assert [row["failures"] for row in rows[1:]] == [
        ["oom: CUDA out of memory"], ["timeout: its time was up"], ["refused: no space left"],
    ]  # fmt: skip
    # with as much time only what could not be started, with more what was ended too
    trials.launch(*words, "--timeout", "15s", **scene)
    assert trials.started[6:] == ["0.4"]
    trials.launch(*words, *ONCE, "--timeout", "30s")
    assert sorted(trials.started[7:]) == ["0.3", "0.4"]


@pytest.mark.parametrize(("cause", "code"), [("crash", 4), ("refused", 5)])
def test_nothing_measured_is_a_failure(world: World, trials: Trials, cause: str, code: int) -> None:
    found, out, _ = trials.launch(
        *words_for(world, *VARY[2:]), at_0_1={"cause": cause, "reason": "x"}
    )
    assert found == code and json.loads(out)["data"]["rows"][0]["why"] == f"{cause}: x"


def test_ctrl_c_says_what_is_known_and_the_same_command_goes_on(
    world: World, trials: Trials
) -> None:
    words = words_for(world, *VARY[:4])
    code, out, _ = trials.launch(*words, at_0_2="stopped")
    assert code == 130 and "the same command continues here, 1 of 6 runs are done" in out
    assert trials.launch(*words)[0] == 0
    assert trials.started == ["0.1", "0.2", "0.2", "0.2", "0.1", "0.1", "0.2"]


def test_a_secret_is_neither_shown_nor_kept(world: World, trials: Trials) -> None:
    token = "hf_" + "aB3" * 11
    words = words_for(
        world, "hub_token=a-plain-password", f"run_name={token}", "--variant", "plain:",
        "--variant", f"{token}:learning_rate=0.2", *ONCE,
    )  # fmt: skip
    shown = "".join(trials.launch(*words)[1:]) + "".join(trials.launch(*words, *VARY[-2:])[1:])
    (kept,) = world.root.rglob("bench.json")
    shown += kept.read_text()
    assert "<redacted>" in shown
    assert token not in shown and "a-plain-password" not in shown


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
    words = words_for(world, "--vary", "learning_rate=0.1,0.2,0.3", "batch.global=4", *ONCE)
    code, out, _ = Here(capsys).launch(*words, "--gpus", "2", *VARY[2:])
    data = json.loads(out)["data"]
    assert code == 0 and started(world, "rate") == ["0.1", "0.2", "0.3"]
    one, *failed = data["samples"]
    assert [each["cause"] for each in failed] == ["oom", "diverged"]
    figures = one["metrics"]
    # the first steps do not count, nor do the last two, which followed a record of kernels
    assert (figures["steps"], figures["steady_steps"]) == (10, 6)
    assert figures[SPEED] == pytest.approx(5) and one["pace"] == pytest.approx([1 / 10] * 6)
    assert figures["tokens_per_step"] == 1000
    assert figures["loss_per_token"] == 2 and figures["wasted_share"] == pytest.approx(1 / 6)
    # weights are not what a comparison leaves behind
    assert not list(Path(data["folder"]).rglob("model.safetensors")) and world.quiet()


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_stopped_leaves_nothing_running(
    world: World, trials: Trials, end: signal.Signals
) -> None:
    words = words_for(world, *VARY, *ONCE)
    running = world.started(*words, env={"SCENES": json.dumps({"rate=0.2": {"sleep": 600}})})
    until(lambda: len(started(world, "rate")) == 2)
    running.send_signal(end)
    out, _ = running.communicate(timeout=PATIENCE_S)
    if end == signal.SIGINT:
        assert running.returncode == 130 and not json.loads(out)["data"]["complete"]
        assert world.quiet()
    # what a killed one left is ended before the next begins, and what it measured is kept
    code, again, _ = trials.launch(*words)
    assert code == 0 and trials.started == ["0.2"] and world.quiet()
    assert len(json.loads(again)["data"]["samples"]) == 2


def test_a_full_disk_is_no_fault_of_a_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_words: Any, **_more: Any) -> Any:
        raise rundir.not_writable(tmp_path, "No space left on device")

    monkeypatch.setattr(measure, "short", full)
    facts: Any = None
    with pytest.raises(NotReady):
        measure.measure(facts, Variant("one"), steps=5, root=tmp_path, timeout_s=None)


def planned(
    world: World, *variant: str, vary: tuple[str, ...] = (), more: str = "", gpus: int = 0,
    running: bool = False, **args: Any,
) -> bench.Bench:  # fmt: skip
    """What is to be compared, by a file with `more` in it."""
    path = world.config(**{"learning_rate": 0.1, **args})
    path.write_text(path.read_text() + more)
    request = Request(stage=None, config=path, gpus=gpus, python=world.root / "python")
    return of(request, vary, variant, running=running)


def of(
    request: Request, vary: Iterable[str], variant: Iterable[str], *, running: bool = False
) -> bench.Bench:
    asked = tuple(variants.combinations(list(vary), list(variant)))
    return bench.plan(
        bench.Bench(request=request, variants=asked, steps=5, repeats=1),
        Scope.START if running else Scope.PLAN,
    )


def test_every_variant_is_judged_before_the_first_starts(world: World) -> None:
    with pytest.raises(InvalidConfig) as refused:
        planned(world, "good:", "typo:learning_rat=1", "batch:batch.per_device=3")
    messages = str(refused.value)
    assert "[typo]" in messages and "[batch]" in messages and "[good]" not in messages
    named = ("model_name_or_path=/nowhere/a,nobody/tiny,/nowhere/b",)
    with pytest.raises(InvalidConfig) as refused:
        planned(world, vary=named, running=True)
    assert {one.code for one in refused.value.findings} == {"missing-model"}
    assert "=/nowhere/a]" in str(refused.value) and "tiny]" not in str(refused.value)


def test_a_machine_that_no_variant_can_start_on(world: World) -> None:
    needs = "use_peft=true,load_in_4bit=true"
    with pytest.raises(NotReady) as refused:
        planned(world, f"a:{needs}", f"b:{needs},learning_rate=0.2", gpus=1, running=True)
    assert "missing-packages" in {one.code for one in refused.value.findings}
    assert not list(world.runs.glob("*"))
    # beside one that it is ready for, the other is a row
    assert len(planned(world, "plain:", f"four:{needs}", gpus=1, running=True).variants) == 2


def test_the_global_batch_stays_as_the_file_has_it(world: World) -> None:
    path = world.config(
        learning_rate=0.1, per_device_train_batch_size=2, gradient_accumulation_steps=4
    )
    path.write_text(path.read_text().replace("batch:\n  global: 2\n  per_device: 2\n", ""))
    request = Request(stage=None, config=path, gpus=0, python=Path(sys.executable))
    made = of(request, ["per_device_train_batch_size=1,2,8"], [])
    assert [one.overrides[1:] for one in made.variants] == [
        ("gradient_accumulation_steps=8",), ("gradient_accumulation_steps=4",),
        ("gradient_accumulation_steps=1",),
    ]  # fmt: skip
    assert made.batch == 8


@pytest.mark.parametrize(
    ("expected", "override", "follows"),
    [
        ("packing: isolated", "packing=true", ()),
        ("packing: off", "args.packing=true", ("expect.packing=isolated",)),
        ("packing: off", "expect.packing=any,packing=true", ()),
        ("packing: off", "padding_free=true,max_length='none'", ("expect.packing=isolated",)),
        # one row is packed with none
        ("packing: isolated", "packing=true,batch.per_device=1", ("expect.packing=off",)),
        ("attention: sdpa", "attn_implementation=eager", ("expect.attention=eager",)),
        ("attention: any", "attn_implementation=eager", ()),
    ],
)
def test_what_is_expected_follows_whichever_key_turns_it(
    world: World, expected: str, override: str, follows: tuple[str, ...]
) -> None:
    if "per_device=1" in override:
        override = "padding_free=true,max_length='none',batch.per_device=1"
    # as it is written, some of these could not hold
    more = f"expect: {{{expected}}}\non_violation: warn\n"
    made = planned(world, f"one:{override}", more=more)
    assert made.variants[1].overrides == (*override.split(","), *follows)


def test_without_a_gpu_it_is_refused_and_says_how_to_try_it(
    world: World, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    code, _, err = trials.launch(*words_for(world))
    assert code == 5 and "--cpu" in err
    code, _, err = trials.launch(*words_for(world, "--cpu"))
    assert code == 2 and "useless-option" in err
    assert not trials.started


def documented() -> list[str]:
    text = (REPOSITORY / "docs" / "comparing.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("launch bench ")]


@pytest.mark.parametrize("command", documented())
def test_the_commands_of_the_page_are_valid(
    command: str, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    words = shlex.split(command)[2:]
    given: dict[str, list[str]] = {}
    for name, value in itertools.pairwise(words):
        if name.startswith("--"):
            given.setdefault(name, []).append(value)
    monkeypatch.chdir(REPOSITORY)
    gpus = int(given.get("--gpus", ["0"])[0])
    request = Request(stage=None, config=Path(words[0]), gpus=gpus, python=Path(sys.executable))
    assert len(of(request, given.get("--vary", []), given.get("--variant", [])).variants) > 1
