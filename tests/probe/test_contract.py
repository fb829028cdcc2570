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
from fake_world import until
from real_training import CONFIGS, launch, needs_open_instruct, needs_packages, states
from real_training import place as place  # a fixture
from test_probe import PROBE, Training

from launcher.verdict.check import judge_evidence
from launcher.verdict.evidence import read_run

VIOLATION = 79


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


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
    return TRAIN.replace("LOSS", loss).replace("LIGER", liger)


def violations(training: Training, rank: int = 0) -> list[dict[str, Any]]:
    return training.events("violation", rank)


def test_what_is_not_proved_within_the_first_steps_stops_the_run(training: Training) -> None:
    done = training.run(script(), expect={"liger": "engaged"}, on_violation="stop")
    line = "launch: stopped: liger expected engaged, seen not_engaged (step 3, rank 0)"
    assert (done.returncode, done.stdout) == (VIOLATION, "")
    assert done.stderr.strip() == line
    (told,) = violations(training)
    assert (told["point"], told["expected"], told["seen"]) == ("liger", "engaged", "not_engaged")
    assert (told["step"], told["rank"], told["stopped"]) == (3, 0, True)
    assert told["last"] == {"step": 3, "loss": 2.5, "grad_norm": None}
    assert [s["step"] for s in training.events("step")] == [1, 2, 3]
    assert (training.events()[-1]["event"], training.events()[-1]["exit"]) == ("end", VIOLATION)


def test_a_warning_goes_on(training: Training) -> None:
    # after so many steps
    done = training.run(script(), expect={"liger": "engaged"}, on_violation="warn", within=4)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("launch: warning: liger expected engaged, seen not_engaged") == 1
    assert [(v["step"], v["stopped"]) for v in violations(training)] == [(4, False)]


def test_what_is_proved_or_only_warned_of_goes_on(training: Training) -> None:
    expect = {"liger": "engaged", "packing": "off", "attention": "sdpa", "loss": "finite"}
    done = training.run(script(liger=CALLED), expect=expect, on_violation="stop")
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert violations(training) == []
    # of what nothing is expected it may be anything
    expect = dict.fromkeys(("loss", "liger", "packing", "attention"), "any")
    done = training.run(script(loss="float('nan')"), expect=expect, on_violation="stop")
    assert done.stdout == "trained\n"
    assert len(training.events("nonfinite")) == 5


@pytest.mark.parametrize(("fused", "code"), [(True, VIOLATION), (False, 0)])
def test_the_fused_loss_that_was_asked_for_is_waited_for(
    training: Training, fused: bool, code: int
) -> None:
    patch = (
        "from liger_kernel.transformers import monkey_patch\n"
        f"monkey_patch.apply_liger_kernel_to_gemma(fused_linear_cross_entropy={fused})\n"
    )
    whole = patch + textwrap.dedent(script(liger=CALLED))
    done = training.run(whole, expect={"liger": "engaged"}, on_violation="stop")
    assert done.returncode == code
    assert [told["seen"] for told in violations(training)] == ["not_engaged"] * bool(code)
    # where Liger is to be off, any call is one too many
    training.run(whole, expect={"liger": "off"}, on_violation="stop")
    assert violations(training)[-1]["seen"] == "engaged"


@pytest.mark.parametrize(
    ("expect", "liger", "seen", "step"),
    [
        ({"liger": "off"}, CALLED, "engaged", 1),
        ({"packing": "isolated"}, "pass", "off", 3),
        ({"packing": "on"}, "pass", "off", 3),
        ({"attention": "flash_attention_2"}, "pass", "sdpa", None),
        ({"dataset_cache": "hit"}, "pass", "unknown", 3),
    ],
)
def test_what_is_disproved_does_not_wait(
    training: Training, expect: dict[str, str], liger: str, seen: str, step: int | None
) -> None:
    done = training.run(script(liger=liger), expect=expect, on_violation="stop")
    assert done.returncode == VIOLATION
    (told,) = violations(training)
    assert (told["seen"], told["step"]) == (seen, step)
    assert ("before the first step" in done.stderr) == (step is None)


CACHE = """
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
    done = training.run(CACHE, expect={"dataset_cache": state}, on_violation="stop")
    assert (done.returncode, done.stdout) == (code, "" if code else "the set\n")


def test_a_loss_that_is_not_finite_names_the_last_one_that_was(training: Training) -> None:
    training.environ["RANK"] = "3"
    done = training.run(
        script(loss="float('-inf') if step == 3 else 2.5 - step"), on_violation="stop"
    )
    assert done.returncode == VIOLATION
    line = "launch: stopped: loss is -inf (step 3, rank 3); last finite: loss 0.5 at step 2"
    assert done.stderr.strip() == line
    (told,) = violations(training, rank=3)
    assert told["last"] == {"step": 2, "loss": 0.5, "grad_norm": None}


def test_the_last_step_is_judged_before_it_is_saved(training: Training) -> None:
    saved = script(loss="float('nan') if step == 5 else 1.0").replace(
        'print("trained")',
        "from transformers.modeling_utils import PreTrainedModel as M; print(M().save_pretrained('out'))",
    )
    done = training.run(saved, on_violation="stop")
    assert (done.returncode, done.stdout) == (VIOLATION, "")
    assert training.events("saved") == []


def test_data_workers_do_not_outlive_it(training: Training) -> None:
    done = training.run(
        "import multiprocessing, time\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,), daemon=True)\n"
        "child.start(); print(child.pid, flush=True)\n"
        + textwrap.dedent(script(loss="float('nan')")),
        on_violation="stop",
    )
    assert done.returncode == VIOLATION
    until(lambda: not alive(int(done.stdout)))


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return status not in "ZX"


def test_it_has_an_ending_of_its_own(training: Training, tmp_path: Path) -> None:
    """What torchrun and the other ranks say when they are ended is not why the run ended."""
    training.out = tmp_path / "probe"
    training.run(script(), expect={"liger": "engaged"}, on_violation="stop")
    (tmp_path / "console.log").write_text(
        "Traceback (most recent call last):\nRuntimeError: gloo\n"
    )
    (tmp_path / "exit.json").write_text('{"returncode": 1, "signal": null}')
    verdict = judge_evidence("sft", {"liger": "engaged"}, read_run(tmp_path))
    finish = verdict.point("finish")
    assert (verdict.status, finish.state, finish.detail["reason"]) == (
        "fail",
        "stopped",
        "violation",
    )
    assert verdict.stopped == "liger expected engaged, seen not_engaged (step 3, rank 0)"
    assert finish.evidence[0].source == "probe"
    assert verdict.point("liger").state == "not_engaged"


DPO = """
    from pathlib import Path
    import open_instruct.dpo_utils as d
    d.build_reference_logprobs_cache(cache_path=Path("nothing"))
"""


@pytest.mark.parametrize(
    ("loss", "before", "stale"),
    [("0.6931", "", False), ("0.6949", "", False), ("0.7126", "", True), ("0.66", "", True),
     ("0.7126", "accelerator.load_state()", False)],
)  # fmt: skip
def test_a_first_loss_that_is_not_ln_2(
    training: Training, loss: str, before: str, stale: bool
) -> None:
    fake = training.folder / "packages" / "open_instruct" / "dpo_utils.py"
    fake.write_text("def build_reference_logprobs_cache(**_): pass\n")
    told = script(loss=f"{loss} if step == 1 else 0.5").replace(
        "for step", f"{before}\n    for step"
    )
    done = training.run(
        textwrap.dedent(DPO) + textwrap.dedent(told), first_loss=0.693147, on_violation="stop"
    )
    assert done.returncode == (VIOLATION if stale else 0), done.stderr
    seen = [e["state"] for e in training.events("reference_cache")]
    assert seen == ["miss", "stale"] if stale else ["miss"]


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
        batch = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
        if boundaries:
            ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        if mask:
            batch["attention_mask"] = torch.ones_like(ids)
        return {**batch, "labels": ids} if labels else batch
"""


def real(training: Training, text: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    folder = training.folder / "packages"
    if folder.is_dir():
        folder.rename(training.folder / "fakes")
    return training.run(
        textwrap.dedent(TINY) + textwrap.dedent(text),
        python=sys.executable,
        cpu=True,
        options=(),
        **settings,
    )


MATRIX = """
    import json
    from launch_probe import packing
    found = {}
    for attention in ("sdpa", "eager"):
        for name, batch, more in (
            ("positions", packed(10, 8, 6), {"use_cache": False}),
            ("boundaries", packed(10, 8, 6, boundaries=True), {"use_cache": False}),
            ("no labels", packed(300, 290, labels=False), {"use_cache": False}),
            ("a mask", packed(10, 8, 6, mask=True), {"use_cache": False}),
            ("a cache", packed(10, 8, 6), {}),
        ):
            model = tiny(attn_implementation=attention)
            pair = packing.two_samples(model, (), {**batch, **more}, packing.batch_of(batch["input_ids"], batch))
            before, after = packing.leak(model, pair)
            found[f"{attention}, {name}"] = before == after
            assert model.training and all(p.grad is None for p in model.parameters())
        model.gradient_checkpointing_enable()
        pair = packing.two_samples(model, (), batch, packing.batch_of(batch["input_ids"], batch))
        before, after = packing.leak(model, pair)
        found[f"{attention}, a cache and checkpointing"] = before == after
    print(json.dumps(found))
"""


@pytest.mark.slow
@needs_packages
def test_which_attention_keeps_packed_samples_apart(training: Training) -> None:
    """transformers masks by position, but not beside a padding mask, and not beside a cache."""
    done = real(training, MATRIX)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    apart = ("positions", "boundaries", "no labels", "a cache and checkpointing")
    assert found == {
        f"{attention}, {name}": name in apart
        for attention in ("sdpa", "eager")
        for name in (*apart, "a mask", "a cache")
    }


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
    without = real(training, SEEDED, isolation=False)
    assert training.events("packing_isolation") == []
    with_it = real(training, SEEDED)
    (told,) = training.events("packing_isolation")
    assert (told["state"], told["attention"], told["samples"]) == ("isolated", "sdpa", [10, 8])
    assert with_it.returncode == without.returncode == 0, with_it.stderr
    assert with_it.stdout == without.stdout
    assert len(set(without.stdout.split())) == 8
    # its forward passes are not among those that are counted
    counted = [(s["tokens"], s["rows"], s["wasted"]) for s in training.events("step")]
    assert counted == [(24, 3, 0)] * 8
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
def test_a_gradient_that_nobody_clips(training: Training) -> None:
    done = real(training, UNCLIPPED, on_violation="stop")
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
    done = real(training, HANGS, on_hang="stop", hang_seconds=4, hang_factor=2)
    assert done.returncode == VIOLATION
    (told,) = training.events("hang")
    assert (told["step"], told["stopped"]) == (3, True)
    assert told["waited"] >= told["limit"] >= 4
    # how long is measured: where it hangs and on which rank is not
    line = (
        r"launch: stopped: nothing moved for \d+ s after step 3 \(limit \d+ s\), rank 0; stacks in "
    )
    assert re.match(line, done.stderr.strip()), done.stderr
    stacks = Path(told["stacks"]).read_text()
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


@pytest.mark.slow
@needs_packages
def test_one_rank_ends_all(training: Training) -> None:
    """Two processes over gloo, as torchrun starts them; the launcher is not there."""
    target = training.folder / "train.py"
    target.write_text(textwrap.dedent(TINY) + textwrap.dedent(RANKS))
    settings = {
        "target": str(target), "out": str(training.out), "cpu": True, "packed": True,
        "expect": {"packing": "isolated"}, "on_violation": "stop",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(PROBE)],
        env={**os.environ, "LAUNCH_PROBE": json.dumps(settings), "ACCELERATE_USE_CPU": "true"},
        cwd=training.folder, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 1
    pids = [int((training.folder / f"pid-{rank}").read_text()) for rank in (0, 1)]
    assert not any(map(alive, pids))
    told = [v for rank in (0, 1) for v in violations(training, rank)]
    # the rank whose loss it was, and with it perhaps the one that got its gradient
    assert any((v["rank"], v["point"], v["step"]) == (1, "loss", 4) for v in told), done.stderr
    # both were asked whether samples are kept apart, at the same pass
    for rank in (0, 1):
        (isolation,) = training.events("packing_isolation", rank)
        assert isolation["state"] == "isolated"
    first = done.stderr.index("launch: stopped: ")
    assert "ChildFailedError" not in done.stderr[:first]


@pytest.mark.slow
@needs_packages
@pytest.mark.training
def test_rows_cut_without_boundaries_leak(place: Path) -> None:
    code, answer = launch(
        place, "sft", str(CONFIGS / "sft.yaml"), "max_steps=2", "packing=true", "max_length=256",
        "packing_strategy=wrapped", "output_dir=build/demo/wrapped", "--gpus", "0",
    )  # fmt: skip
    assert (code, states(answer)["packing"], states(answer)["finish"]) == (1, "leaking", "stopped")


@pytest.mark.slow
@needs_packages
@pytest.mark.training
def test_without_the_probe_there_is_the_log_alone(place: Path) -> None:
    code, answer = launch(
        place, "sft", str(CONFIGS / "sft.yaml"), "max_steps=2", "logging_steps=1",
        "output_dir=build/demo/bare", "expect={packing: isolated, liger: any}",
        "on_violation=warn", "--no-probe", "--gpus", "0",
    )  # fmt: skip
    run = Path(answer["data"]["run"])
    assert not (run / "probe").exists()
    assert json.loads((run / "run.json").read_text())["argv"].count(str(PROBE)) == 0
    assert [f["code"] for f in answer["findings"] if f["key"] == "probe"] == ["no-probe"]
    assert (code, answer["data"]["status"]) == (1, "unproven")


@pytest.mark.slow
@needs_open_instruct
@needs_packages
@pytest.mark.training
def test_packed_dpo_leaks_beside_a_cache_and_so_does_its_reference_pass(place: Path) -> None:
    words = (
        "dpo", str(CONFIGS / "dpo_open_instruct.yaml"), "model_name_or_path=build/demo/model",
        "max_train_steps=3", "packing=true", "expect.trend=any", "--gpus", "0",
    )  # fmt: skip
    code, answer = launch(
        place, *words, "on_violation=warn", "expect.liger=engaged", "output_dir=build/demo/leaks"
    )
    seen = states(answer)
    assert (code, seen["packing"], seen["finish"]) == (1, "leaking", "completed")
    record = Path(answer["data"]["run"]) / "probe" / "rank-0.jsonl"
    told = [
        e for e in map(json.loads, record.read_text().splitlines()) if e["event"] == "violation"
    ]
    assert [(v["point"], v["step"], v["stopped"]) for v in told] == [
        ("packing", 1, False),
        ("liger", 3, False),
    ]

    code, answer = launch(
        place, *words, "activation_memory_budget=0.5", "output_dir=build/demo/apart"
    )
    seen = states(answer)
    assert (code, seen["packing"], seen["finish"]) == (1, "isolated", "stopped")
    # checkpointing does without the cache, but in training only: the reference pass leaks as before
    assert seen["reference_cache"] == "stale"
