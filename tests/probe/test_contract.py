"""What is expected of a run and is not so ends it, from inside the training process."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S
from fake_world import wait_until
from probed_scripts import PROBE, Training
from probed_scripts import training as training  # a fixture
from real_training import CONFIGS, launch, needs_open_instruct, needs_packages, states
from real_training import place as place  # a fixture

from launcher.cli.main import main
from launcher.verdict.check import judge_evidence
from launcher.verdict.evidence import read_run

VIOLATION = 79


TRAIN = """
    from accelerate import Accelerator
    import torch
    from model import AdamW, Model

    accelerator, model = Accelerator(), Model()
    accelerator.prepare(model, AdamW())
    for step in range(1, 6):
        model.forward(input_ids=torch.Ids(2, 8))
        LIGER
        accelerator.backward(torch.Scalar(LOSS))
    print("trained")
"""
CALLED = "import liger_kernel.ops.swiglu as m; m.LigerSiLUMulFunction.apply(1)"


def script(loss: str = "2.5", liger: str = "pass") -> str:
    return textwrap.dedent(TRAIN.replace("LOSS", loss).replace("LIGER", liger))


def stopped_at(training: Training) -> list[int | None]:
    """The steps of the violations."""
    return training.values("violation", "step")


def test_what_is_not_proved_within_the_first_steps_stops_the_run(training: Training) -> None:
    done = training.run(script(), expect={"liger": "engaged"}, on_violation="stop")
    message = "launch: stopped: liger expected engaged, seen not_engaged (step 3, rank 0)"
    assert (done.returncode, done.stdout) == (VIOLATION, "")
    assert done.stderr.strip() == message

    (violation,) = training.events("violation")
    expected = {
        "point": "liger",
        "expected": "engaged",
        "seen": "not_engaged",
        "step": 3,
        "rank": 0,
        "stopped": True,
        "last": {"step": 3, "loss": 2.5, "grad_norm": None},
    }
    assert violation.items() >= expected.items()
    assert training.values("step", "step") == [1, 2, 3]
    end = training.events()[-1]
    assert (end["event"], end["exit"]) == ("end", VIOLATION)


def test_a_warning_goes_on(training: Training) -> None:
    done = training.run(script(), expect={"liger": "engaged"}, on_violation="warn", within=4)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("launch: warning: liger expected engaged, seen not_engaged") == 1
    assert stopped_at(training) == [4]
    assert training.values("violation", "stopped") == [False]


def test_what_is_proved_goes_on(training: Training) -> None:
    expect = {"liger": "engaged", "packing": "off", "attention": "sdpa", "loss": "finite"}
    done = training.run(script(liger=CALLED), expect=expect, on_violation="stop")
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert training.events("violation") == []


def test_what_may_be_anything_goes_on(training: Training) -> None:
    expect = dict.fromkeys(("loss", "liger", "packing", "attention"), "any")
    done = training.run(script(loss="float('nan')"), expect=expect, on_violation="stop")
    assert done.stdout == "trained\n"
    assert len(training.events("nonfinite")) == 5


def patched(fused: bool) -> str:
    """A training whose model has Liger's kernels, the one of the loss if `fused`."""
    patch = (
        "from liger_kernel.transformers import monkey_patch\n"
        f"monkey_patch.apply_liger_kernel_to_gemma(fused_linear_cross_entropy={fused})\n"
    )
    return patch + script(liger=CALLED)


def test_the_fused_loss_that_was_patched_in_is_waited_for(training: Training) -> None:
    done = training.run(patched(fused=True), expect={"liger": "engaged"}, on_violation="stop")
    assert done.returncode == VIOLATION
    assert training.values("violation", "seen") == ["not_engaged"]


def test_without_the_fused_loss_any_kernel_will_do(training: Training) -> None:
    done = training.run(patched(fused=False), expect={"liger": "engaged"}, on_violation="stop")
    assert done.returncode == 0
    assert training.events("violation") == []


@pytest.mark.parametrize(
    ("point", "expected", "liger", "seen", "step"),
    [
        # any call is one too many
        ("liger", "off", CALLED, "engaged", 1),
        ("packing", "isolated", "pass", "off", 3),
        ("packing", "on", "pass", "off", 3),
        ("attention", "flash_attention_2", "pass", "sdpa", None),
        ("dataset_cache", "hit", "pass", "unknown", 3),
    ],
)
def test_what_is_disproved_does_not_wait(
    training: Training, point: str, expected: str, liger: str, seen: str, step: int | None
) -> None:
    done = training.run(script(liger=liger), expect={point: expected}, on_violation="stop")
    assert done.returncode == VIOLATION
    assert training.values("violation", "seen") == [seen]
    assert stopped_at(training) == [step]
    assert ("before the first step" in done.stderr) == (step is None)


LOAD_CACHE = """
    from open_instruct.dataset_transformation import LocalDatasetTransformationCache as Cache
    print(Cache().load_or_transform_dataset([], None))
"""


@pytest.mark.parametrize(
    ("state", "local_rank", "code"), [("hit", "0", VIOLATION), ("miss", "0", 0), ("hit", "1", 0)]
)
def test_a_cache_is_judged_before_hours_are_spent_on_it(
    training: Training, state: str, local_rank: str, code: int
) -> None:
    """The first rank of a machine fills a cache, the others find it."""
    training.environ["LOCAL_RANK"] = local_rank
    done = training.run(LOAD_CACHE, expect={"dataset_cache": state}, on_violation="stop")
    assert (done.returncode, done.stdout) == (code, "" if code else "the set\n")


def test_a_loss_that_is_not_finite_names_the_last_one_that_was(training: Training) -> None:
    training.environ["RANK"] = "3"
    loss = "float('-inf') if step == 3 else 2.5 - step"
    done = training.run(script(loss=loss), on_violation="stop")
    assert done.returncode == VIOLATION
    message = "launch: stopped: loss is -inf (step 3, rank 3); last finite: loss 0.5 at step 2"
    assert done.stderr.strip() == message
    (violation,) = training.events("violation", rank=3)
    assert violation["last"] == {"step": 2, "loss": 0.5, "grad_norm": None}


SAVE = """
from transformers.modeling_utils import PreTrainedModel
print(PreTrainedModel().save_pretrained('out'))
"""


def test_the_last_step_is_judged_before_it_is_saved(training: Training) -> None:
    train = script(loss="float('nan') if step == 5 else 1.0")
    train_and_save = train.replace('print("trained")', SAVE)
    done = training.run(train_and_save, on_violation="stop")
    assert (done.returncode, done.stdout) == (VIOLATION, "")
    assert training.events("saved") == []


START_WORKER = """
import multiprocessing, time
fork = multiprocessing.get_context("fork")
child = fork.Process(target=time.sleep, args=(600,), daemon=True)
child.start()
print(child.pid, flush=True)
"""


def test_data_workers_do_not_outlive_it(training: Training) -> None:
    done = training.run(START_WORKER + script(loss="float('nan')"), on_violation="stop")
    assert done.returncode == VIOLATION
    wait_until(lambda: not is_alive(int(done.stdout)))


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return status not in "ZX"


def test_it_has_an_ending_of_its_own(training: Training, tmp_path: Path) -> None:
    """What torchrun and the other ranks print when they are ended is not why the run ended."""
    training.out = tmp_path / "probe"
    training.run(script(), expect={"liger": "engaged"}, on_violation="stop")
    log = "Traceback (most recent call last):\nRuntimeError: gloo\n"
    (tmp_path / "console.log").write_text(log)
    (tmp_path / "exit.json").write_text('{"returncode": 1, "signal": null}')

    verdict = judge_evidence("sft", {"liger": "engaged"}, read_run(tmp_path))

    assert verdict.status == "fail"
    assert verdict.stopped == "liger expected engaged, seen not_engaged (step 3, rank 0)"
    assert verdict.point("liger").state == "not_engaged"
    finish = verdict.point("finish")
    assert (finish.state, finish.detail["reason"]) == ("stopped", "violation")
    assert finish.evidence[0].source == "probe"


BUILD_REFERENCE = """
from pathlib import Path
import open_instruct.dpo_utils
open_instruct.dpo_utils.build_reference_logprobs_cache(cache_path=Path("nothing"))
"""


def run_dpo(training: Training, first_loss: str, before: str = "") -> int:
    """Train DPO with this first loss; returns the exit code."""
    fake = "def build_reference_logprobs_cache(**_): pass\n"
    training.write_package("open_instruct/dpo_utils.py", fake)
    train = script(loss=f"{first_loss} if step == 1 else 0.5")
    train = train.replace("for", f"{before}\nfor", 1)
    done = training.run(BUILD_REFERENCE + train, first_loss=0.693147, on_violation="stop")
    return done.returncode


@pytest.mark.parametrize("first_loss", ["0.7126", "0.66"])
def test_a_first_loss_that_is_not_ln_2_stops_the_run(training: Training, first_loss: str) -> None:
    assert run_dpo(training, first_loss) == VIOLATION
    assert training.values("reference_cache", "state") == ["miss", "stale"]


@pytest.mark.parametrize(
    ("first_loss", "before"),
    [("0.6931", ""), ("0.6949", ""), ("0.7126", "accelerator.load_state()")],
)
def test_a_first_loss_near_ln_2_or_after_a_resume_goes_on(
    training: Training, first_loss: str, before: str
) -> None:
    assert run_dpo(training, first_loss, before) == 0
    assert training.values("reference_cache", "state") == ["miss"]


TINY = """
    import torch
    from accelerate import Accelerator
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def tiny(**more):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(Qwen2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, **more)).train()

    def packed(*lengths, boundaries=False, mask=False, labels=True):
        ids = torch.randint(3, 60, (1, sum(lengths)))
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        batch = {"input_ids": ids, "position_ids": positions}
        if boundaries:
            ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        if mask:
            batch["attention_mask"] = torch.ones_like(ids)
        return {**batch, "labels": ids} if labels else batch
"""


def run_real(training: Training, text: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a script over the packages that are installed, on the CPU."""
    training.packages = training.folder / "no packages"
    script = textwrap.dedent(TINY) + textwrap.dedent(text)
    return training.run(script, python=sys.executable, options=(), cpu=True, **settings)


MATRIX = """
    import json
    from launch_probe import packing

    def stays_apart(model, batch, more):
        call = packing.Call((model,), {**batch, **more})
        pair = packing.cut_two_samples(call, packing.read_batch(batch["input_ids"], batch))
        before, after = packing.measure_leak(model, pair)
        assert model.training and all(p.grad is None for p in model.parameters())
        return before == after

    apart = {}
    no_cache = {"use_cache": False}
    for attention in ("sdpa", "eager"):
        model = tiny(attn_implementation=attention)
        apart[attention] = {
            "positions": stays_apart(model, packed(10, 8, 6), no_cache),
            "boundaries": stays_apart(model, packed(10, 8, 6, boundaries=True), no_cache),
            "no labels": stays_apart(model, packed(300, 290, labels=False), no_cache),
            "a mask": stays_apart(model, packed(10, 8, 6, mask=True), no_cache),
            "a cache": stays_apart(model, packed(10, 8, 6), {}),
        }
        model.gradient_checkpointing_enable()
        apart[attention]["a cache and checkpointing"] = stays_apart(model, packed(10, 8, 6), {})
    print(json.dumps(apart))
"""


@pytest.mark.slow
@needs_packages
def test_which_attention_keeps_packed_samples_apart(training: Training) -> None:
    """transformers masks by position, but not beside a padding mask, and not beside a cache."""
    done = run_real(training, MATRIX)
    assert done.returncode == 0, done.stderr
    apart = {
        "positions": True,
        "boundaries": True,
        "no labels": True,
        "a mask": False,
        "a cache": False,
        "a cache and checkpointing": True,
    }
    assert json.loads(done.stdout.splitlines()[-1]) == {"sdpa": apart, "eager": apart}


SEEDED = """
    from contextlib import nullcontext
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = tiny(attention_dropout=0.1)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(4):
        # as transformers' Trainer does it: one cast of the weights for all that is inside
        with accelerator.autocast():
            loss = model(**packed(10, 8, 6, boundaries=True), use_cache=False).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(float(loss).hex(), float(norm).hex())
"""


@pytest.mark.slow
@needs_packages
def test_the_test_leaves_nothing_behind(training: Training) -> None:
    """Dropout, bfloat16 and checkpointing: the same bits with and without it."""
    without = run_real(training, SEEDED, isolation=False)
    assert training.events("packing_isolation") == []

    tested = run_real(training, SEEDED)

    (isolation,) = training.events("packing_isolation")
    assert (isolation["state"], isolation["attention"]) == ("isolated", "sdpa")
    assert isolation["samples"] == [10, 8]
    assert tested.returncode == without.returncode == 0, tested.stderr
    assert tested.stdout == without.stdout
    assert len(set(without.stdout.split())) == 8
    # its forward passes are not among those that are counted
    assert training.values("step", "tokens") == [24] * 8
    assert training.values("step", "rows") == [3] * 8
    assert training.values("step", "wasted") == [0] * 8
    assert training.notes() == []


UNCLIPPED = """
    accelerator = Accelerator(cpu=True)
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    for step in range(2):
        # zero, and its slope there is not a number
        root = (model.model.norm.weight * 0).sum().sqrt()
        accelerator.backward(model(**packed(8)).loss + root)
        optimizer.step()
"""


@pytest.mark.slow
@needs_packages
def test_a_gradient_that_nobody_clips_is_checked(training: Training) -> None:
    done = run_real(training, UNCLIPPED, on_violation="stop")
    assert done.returncode == VIOLATION
    assert "gradient is nan (step 1, rank 0)" in done.stderr
    assert training.events("step")[0]["loss"] > 0


HANGS = """
    import time
    accelerator = Accelerator(cpu=True)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())

    def collate(rows):
        if rows[0] == 3:
            time.sleep(600)
        return packed(8)

    loader = torch.utils.data.DataLoader(range(9), collate_fn=collate)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@needs_packages
def test_a_hang_is_shown_where_it_hangs_and_ended(training: Training) -> None:
    # no step takes that long, however busy the machine is
    done = run_real(training, HANGS, on_hang="stop", hang_seconds=4, hang_factor=2)
    assert done.returncode == VIOLATION
    (hang,) = training.events("hang")
    assert (hang["step"], hang["stopped"]) == (3, True)
    assert hang["waited"] >= hang["limit"] >= 4
    # how long is measured: where it hangs and on which rank is not
    waited = r"launch: stopped: nothing moved for \d+ s after step 3 \(limit \d+ s\)"
    assert re.match(rf"{waited}, rank 0; stacks in ", done.stderr.strip()), done.stderr
    stacks = Path(hang["stacks"]).read_text()
    assert "in collate" in stacks and "most recent call first" in stacks


RANKS = """
    import os, sys, time
    rank = int(os.environ["RANK"])
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    open(f"pid-{rank}", "w").write(str(os.getpid()))
    for step in range(1, 50):
        loss = model(**packed(8, 5), use_cache=False).loss
        if rank == 1 and step == 4:
            loss = loss * float("nan")
            # the other rank waits for this one's gradients when it ends
            time.sleep(0.2)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def torchrun(training: Training, text: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Two processes over gloo, as torchrun starts them; the launcher is not there."""
    target = training.folder / "train.py"
    target.write_text(textwrap.dedent(TINY) + textwrap.dedent(text))
    defaults = {"target": str(target), "out": str(training.out), "cpu": True}
    environ = {
        **os.environ,
        "LAUNCH_PROBE": json.dumps({**defaults, **settings}),
        "ACCELERATE_USE_CPU": "true",
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROBE)]
    return subprocess.run(
        [sys.executable, *command], env=environ, cwd=training.folder, capture_output=True,
        text=True, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.mark.slow
@needs_packages
def test_one_rank_ends_all(training: Training) -> None:
    expect = {"packing": "isolated"}
    done = torchrun(training, RANKS, packed=True, expect=expect, on_violation="stop")
    assert done.returncode == 1
    assert "ChildFailedError" not in done.stderr[: done.stderr.index("launch: stopped: ")]

    violations = []
    for rank in (0, 1):
        pid = int((training.folder / f"pid-{rank}").read_text())
        assert not is_alive(pid)
        for violation in training.events("violation", rank):
            violations.append((violation["rank"], violation["point"], violation["step"]))
        # both were asked whether samples are kept apart, at the same pass
        (isolation,) = training.events("packing_isolation", rank)
        assert isolation["state"] == "isolated"
    # the rank whose loss it was, and with it perhaps the one that got its gradient
    assert (1, "loss", 4) in violations, done.stderr


@pytest.mark.slow
@needs_packages
@pytest.mark.training
def test_rows_cut_without_boundaries_leak(place: Path) -> None:
    code, answer = launch(
        place, "sft", str(CONFIGS / "sft.yaml"), "max_steps=2", "packing=true", "max_length=256",
        "packing_strategy=wrapped", "output_dir=build/demo/wrapped", "--gpus", "0",
    )  # fmt: skip
    assert code == 1
    assert states(answer)["packing"] == "leaking"
    assert states(answer)["finish"] == "stopped"


def test_without_the_probe_the_trainer_is_started_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ["model_name_or_path=Qwen/Qwen2.5-0.5B", "dataset_name=trl-lib/Capybara"]
    options = ["--no-probe", "--gpus", "0", "--dry-run", "--format", "json"]

    assert main(["sft", str(CONFIGS / "sft.yaml"), *data, *options]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert str(PROBE) not in answer["data"]["argv"]
    codes = [finding["code"] for finding in answer["findings"] if finding["key"] == "probe"]
    assert codes == ["no-probe"]


@pytest.mark.slow
@needs_open_instruct
@needs_packages
@pytest.mark.training
def test_packed_dpo_with_checkpointing_is_isolated_and_its_reference_pass_leaks(
    place: Path,
) -> None:
    """Checkpointing does without the cache that makes samples leak, but in training only."""
    code, answer = launch(
        place, "dpo", str(CONFIGS / "dpo_open_instruct.yaml"), "packing=true",
        "model_name_or_path=build/demo/model", "max_train_steps=3", "expect.trend=any",
        "activation_memory_budget=0.5", "output_dir=build/demo/apart", "--gpus", "0",
    )  # fmt: skip
    assert code == 1
    assert states(answer)["packing"] == "isolated"
    assert states(answer)["finish"] == "stopped"
    assert states(answer)["reference_cache"] == "stale"
