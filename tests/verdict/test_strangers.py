"""`launch check LOG` of trainers that launch did not start: what went wrong is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from strangers_logs import OOM, axolotl, hf_step, llama_factory, summary, traceback, watchdog
from typer.testing import CliRunner

from launcher.cli.commands import app

Writer = Callable[[int, Iterable[str]], str]
BOTH = pytest.mark.parametrize("writer", [llama_factory, axolotl])


def checked_points(folder: Path, content: str) -> dict[str, Any]:
    """The points of the verdict that the command prints, by name."""
    path = folder / "some.log"
    path.write_text(content, encoding="utf-8")
    result = CliRunner().invoke(app, ["check", str(path), "--format", "json"])
    points = json.loads(result.stdout)["data"]["points"]
    return {point["name"]: point for point in points}


def answer(point: Any) -> tuple[str, bool | None]:
    return point["state"], point["ok"]


def falling(steps: int) -> list[str]:
    lines = []
    for number in range(steps):
        done = number / steps
        epoch = round((number + 1) / steps, 4)
        lines.append(hf_step(round(2.5 - done, 4), 1e-5 * (1 - done), epoch))
    return lines


def with_rates(rates: list[float]) -> list[str]:
    lines = []
    for number, rate in enumerate(rates):
        loss = round(2.5 - 0.01 * number, 4)
        epoch = round((number + 1) / len(rates), 4)
        lines.append(hf_step(loss, rate, epoch))
    return lines


def dpo(
    loss: float, margin: float = 0.0, accuracy: float = 0.5, chosen: float = 0.0, **more: float
) -> str:
    rewards = {
        "rewards/chosen": chosen,
        "rewards/rejected": chosen - margin,
        "rewards/accuracies": accuracy,
        "rewards/margins": margin,
    }
    return hf_step(loss, 5e-7, 0.1, **rewards, **more)


def cosine(steps: int, period: int) -> list[float]:
    return [1e-5 * (1 + math.cos(math.pi * n / period)) / 2 for n in range(steps)]


COSINE = cosine(40, period=40)
CYCLES = cosine(40, period=10)
RESTARTS = cosine(10, period=10) * 4
WARM_UP = [1e-6 * n for n in range(10)] + [1e-5] * 30
ENDS_EARLY = [1e-5 * (1 - n / 10) for n in range(10)] + [0.0] * 30


# a schedule that restarts jumps up at once
@pytest.mark.parametrize("rates", [COSINE, WARM_UP, RESTARTS])
@BOTH
def test_learning_rates_of_a_schedule_are_not_mentioned(
    tmp_path: Path, rates: list[float], writer: Writer
) -> None:
    content = writer(40, with_rates(rates)) + summary(40)
    assert "data" not in checked_points(tmp_path, content)


@pytest.mark.parametrize(
    ("rates", "words"),
    [(CYCLES, "rises again after it has decayed"), (ENDS_EARLY, "was 0 in 30 of 40")],
)
@BOTH
def test_learning_rates_that_cannot_be_meant_are_suspect(
    tmp_path: Path, rates: list[float], words: str, writer: Writer
) -> None:
    content = writer(40, with_rates(rates)) + summary(40)
    point = checked_points(tmp_path, content)["data"]
    assert answer(point) == ("suspect", None)
    assert words in point["detail"]["reason"]


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([dpo(0.6931), dpo(0.69, 0.01), dpo(0.6, 0.3, 0.8)], id="sigmoid"),
        # its rewards are 0 all the same
        pytest.param([dpo(1.0), dpo(0.97, 0.01), dpo(0.9, 0.3, 0.8)], id="another loss"),
        # SimPO and its like have no reference, and a term of their own
        pytest.param([dpo(1.4, -0.2, 0.4, -3.0, nll_loss=1.2)] * 2, id="no reference"),
        # the first steps of a warm-up look alike
        pytest.param([dpo(0.6931), dpo(0.6931), dpo(0.69, 0.02, 0.6)], id="warm-up"),
    ],
)
def test_a_dpo_that_begins_at_its_first_loss_is_not_mentioned(
    tmp_path: Path, lines: list[str]
) -> None:
    assert "data" not in checked_points(tmp_path, axolotl(len(lines), lines))


@pytest.mark.parametrize(
    ("lines", "ok", "words"),
    [
        ([dpo(2.318, -2.04, 0.21, -3.19), dpo(2.2, -1.9, 0.22, -3.1)], None, "-3.19 and -1.15"),
        ([dpo(0.6931, 0.0, 0.0)] * 6, False, "all 6 logged steps"),
    ],
)
def test_a_dpo_that_does_not_begin_at_ln_2_or_stays_there_is_suspect(
    tmp_path: Path, lines: list[str], ok: bool | None, words: str
) -> None:
    point = checked_points(tmp_path, axolotl(len(lines), lines))["data"]
    assert answer(point) == ("suspect", ok)
    assert words in point["detail"]["reason"]


TRAIN = ("train", "_inner_training_loop", "training_step")
SAVE = ("train", "_maybe_log_save_evaluate", "_save_checkpoint", "save_model")
EVALUATE = ("train", "_maybe_log_save_evaluate", "_evaluate", "evaluation_loop", "nested_concat")
REFERENCE = ("__init__", "_precompute_ref_logps", "forward")


@pytest.mark.parametrize(
    ("frames", "during", "words"),
    [
        (TRAIN, None, "lower the micro-batch"),
        (EVALUATE, "evaluation", "per_device_eval_batch_size"),
        (SAVE, "saving", "save sharded"),
        (REFERENCE, "reference", "precompute_ref_batch_size"),
        (("main", "from_pretrained"), "loading", "before any batch"),
    ],
)
@BOTH
@pytest.mark.parametrize("rank", [None, 1])
def test_memory_that_ran_out_is_blamed_on_what_needed_it(
    tmp_path: Path,
    frames: tuple[str, ...],
    during: str | None,
    words: str,
    writer: Writer,
    rank: int | None,
) -> None:
    before = falling(10)[:4] if frames[0] == "train" else []
    content = writer(10, before) + "\n" + traceback(*frames, error=OOM, rank=rank)
    point = checked_points(tmp_path, content)["memory"]
    assert answer(point) == ("oom", False)
    assert point["detail"].get("during") == during
    assert words in point["detail"]["help"]


TIME = "2026-11-20 15:50:01,001"
SAVING = (
    f"[INFO|trainer.py:4102] {TIME} >> Saving model checkpoint to out/checkpoint-4\n",
    f"[{TIME}] [INFO] [axolotl.train.save:201] [PID:201] Saving trained model to ./out.\n",
    f"[{TIME}] [INFO] [torch_checkpoint_engine.py:21:save] [Torch] Saving out/step4/zero.pt...\n",
)
EVALUATING = f"[INFO|trainer.py:4300] {TIME} >> ***** Running Evaluation *****\n"
STARTED = llama_factory(10, falling(10)[:4])


def finish_of(folder: Path, content: str) -> Any:
    return checked_points(folder, content)["finish"]


@pytest.mark.parametrize("words", SAVING)
def test_a_hang_while_saving_is_called_that(tmp_path: Path, words: str) -> None:
    finish = finish_of(tmp_path, STARTED + words + watchdog(6075, "_ALLGATHER_BASE"))
    assert finish["state"] == "crashed"
    assert finish["detail"]["reason"] == "hang_saving"
    assert finish["detail"]["during"] == "saving"


@pytest.mark.parametrize(
    ("words", "reason"), [("", "nccl_timeout"), (EVALUATING, "hang_evaluation")]
)
def test_a_hang_elsewhere_is_none_in_a_save(tmp_path: Path, words: str, reason: str) -> None:
    finish = finish_of(tmp_path, STARTED + words + watchdog(6075, "ALLREDUCE"))
    assert finish["detail"]["reason"] == reason


MEETING = ("main", "init_process_group", "_create_c10d_store")
RENDEZVOUS = "torch.distributed.elastic.rendezvous.api.Rendezvous"
LOST_STORE = f"{RENDEZVOUS}ConnectionError: The connection to the C10d store has failed."
SETTING_UP = (
    "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving "
    "ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: "
    "Socket Timeout"
)
CONNECTING = (
    "[E1120 18:22:45.1 socket.cpp:793] [c10d] The client socket has timed out after 60s while "
    "trying to connect to (node-0, 2222).\n"
)


def meeting_failed(error: str) -> str:
    return traceback(*MEETING, error=error)


@pytest.mark.parametrize(
    "end",
    [
        meeting_failed("torch.distributed.DistStoreError: Timed out after 61 seconds waiting"),
        meeting_failed("torch.distributed.DistNetworkError: The client socket has timed out"),
        meeting_failed(LOST_STORE),
        meeting_failed(f"{RENDEZVOUS}TimeoutError"),
        traceback("main", "barrier", rank=1, error=SETTING_UP),
        CONNECTING + meeting_failed("RuntimeError: no store"),
        watchdog(1, "ALLREDUCE"),
    ],
)
def test_processes_that_do_not_come_together_are_a_rendezvous(tmp_path: Path, end: str) -> None:
    head = "W1120 18:21:45.100 torch/distributed/run.py:757] Setting OMP_NUM_THREADS\n"
    finish = finish_of(tmp_path, head + end)
    assert finish["state"] == "crashed"
    assert finish["detail"].get("reason") == "rendezvous"


def test_a_rank_that_is_gone_later_is_no_rendezvous(tmp_path: Path) -> None:
    finish = finish_of(tmp_path, STARTED + meeting_failed(LOST_STORE))
    assert finish["detail"].get("reason") != "rendezvous"


def nan_steps(*, quoted: bool) -> list[str]:
    """Transformers logs a loss of 0 for one that is NaN."""
    steps = []
    for number in range(1, 7):
        steps.append(hf_step(0.0, 1e-5, number / 10, "nan", quoted=quoted))
    return steps


@pytest.mark.parametrize("quoted", [False, True])
def test_a_loss_of_0_beside_a_gradient_that_is_nan_was_nan(tmp_path: Path, quoted: bool) -> None:
    loss = checked_points(tmp_path, llama_factory(10, nan_steps(quoted=quoted)))["loss"]
    assert answer(loss) == ("nonfinite", False)
    assert "without any label" in loss["detail"]["help"]


@pytest.mark.parametrize("quoted", [False, True])
def test_a_loss_that_becomes_nan_names_its_step(tmp_path: Path, quoted: bool) -> None:
    first = hf_step(2.0, 1e-5, 0.1, quoted=quoted)
    lines = [first, *nan_steps(quoted=quoted)[1:]]
    loss = checked_points(tmp_path, axolotl(10, lines))["loss"]
    assert loss["detail"]["first_step"] == 2
    assert "lower the learning rate" in loss["detail"]["help"]


WRITTEN = [
    pytest.param(axolotl, falling(20), id="axolotl"),
    pytest.param(llama_factory, falling(20), id="llama_factory"),
    pytest.param(llama_factory, falling(20)[4::5], id="every 5 steps"),
]


@pytest.mark.parametrize(("writer", "lines"), WRITTEN)
def test_a_log_with_a_summary_is_over(tmp_path: Path, writer: Writer, lines: list[str]) -> None:
    content = writer(20, lines) + "\n" + summary(20) + "***** train metrics *****\n  epoch = 1.0\n"
    assert answer(finish_of(tmp_path, content)) == ("completed", True)


@pytest.mark.parametrize(("writer", "lines"), WRITTEN)
def test_a_log_that_is_cut_short_is_not_over(
    tmp_path: Path, writer: Writer, lines: list[str]
) -> None:
    assert finish_of(tmp_path, writer(20, lines[:-2]))["state"] == "running"


def test_a_run_that_never_ends_its_last_save_is_not_over(tmp_path: Path) -> None:
    content = llama_factory(20, falling(20)) + summary(20) + SAVING[0]
    assert finish_of(tmp_path, content)["state"] == "running"
