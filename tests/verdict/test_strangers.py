"""`launch check LOG` of trainers that launch did not start: what went wrong is named, healthy logs are left alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from strangers_logs import OOM, axolotl, hf_step, llama_factory, summary, traceback, watchdog
from typer.testing import CliRunner

from launcher.cli.main import app


def checked(folder: Path, content: str) -> dict[str, Any]:
    """The verdict that the command prints."""
    path = folder / "some.log"
    path.write_text(content, encoding="utf-8")
    result = CliRunner().invoke(app, ["check", str(path), "--format", "json"])
    data: dict[str, Any] = json.loads(result.stdout)["data"]
    return data


def point(verdict: dict[str, Any], name: str) -> dict[str, Any]:
    found = [one for one in verdict["points"] if one["name"] == name]
    return found[0] if found else {"state": None, "ok": True, "detail": {}}


def falling(steps: int) -> list[str]:
    return [
        hf_step(round(2.5 - n / steps, 4), 1e-5 * (1 - n / steps), round((n + 1) / steps, 4))
        for n in range(steps)
    ]


def with_rates(rates: list[float]) -> list[str]:
    return [
        hf_step(round(2.5 - 0.01 * n, 4), rate, round((n + 1) / len(rates), 4))
        for n, rate in enumerate(rates)
    ]


def dpo(
    loss: float, margin: float = 0.0, accuracy: float = 0.5, chosen: float = 0.0, **more: float
) -> str:
    rewards = {
        "rewards/chosen": chosen,
        "rewards/rejected": chosen - margin,
        "rewards/accuracies": accuracy,
    }
    return hf_step(loss, 5e-7, 0.1, **rewards, **{"rewards/margins": margin}, **more)


COSINE = [1e-5 * (1 + math.cos(math.pi * n / 40)) / 2 for n in range(40)]
CYCLES = [1e-5 * (1 + math.cos(math.pi * n / 10)) / 2 for n in range(40)]
WARM_UP = [1e-6 * n for n in range(10)] + [1e-5] * 30
RESTARTS = [1e-5 * (1 + math.cos(math.pi * (n % 10) / 10)) / 2 for n in range(40)]
ENDS_EARLY = [1e-5 * (1 - n / 10) for n in range(10)] + [0.0] * 30


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        (COSINE, None),
        (WARM_UP, None),
        # a schedule that restarts jumps up at once
        (RESTARTS, None),
        (CYCLES, "rises again after it has decayed"),
        (ENDS_EARLY, "was 0 in 30 of 40"),
    ],
)
@pytest.mark.parametrize("writer", [llama_factory, axolotl])
def test_learning_rates_that_cannot_be_meant_are_suspect(
    tmp_path: Path, rates: list[float], words: str | None, writer: Any
) -> None:
    found = point(checked(tmp_path, writer(40, with_rates(rates)) + summary(40)), "data")
    assert (found["state"], found["ok"]) == (("suspect", None) if words else (None, True))
    assert (words or "") in found["detail"].get("reason", "")


@pytest.mark.parametrize(
    ("lines", "state", "ok", "words"),
    [
        ([dpo(0.6931), dpo(0.69, 0.01), dpo(0.6, 0.3, 0.8)], None, True, ""),
        # another loss than the sigmoid's: its rewards are 0 all the same
        ([dpo(1.0), dpo(0.97, 0.01), dpo(0.9, 0.3, 0.8)], None, True, ""),
        # SimPO and its like have no reference, and say so by a term of their own
        (
            [dpo(1.4, -0.2, 0.4, -3.0, nll_loss=1.2), dpo(1.3, -0.1, 0.4, -3.0, nll_loss=1.2)],
            None,
            True,
            "",
        ),
        (
            [dpo(2.318, -2.04, 0.21, -3.19), dpo(2.2, -1.9, 0.22, -3.1)],
            "suspect",
            None,
            "-3.19 and -1.15",
        ),
        ([dpo(0.6931, 0.0, 0.0)] * 6, "suspect", False, "all 6 logged steps"),
        # the first steps of a warm-up look alike
        ([dpo(0.6931, 0.0, 0.0), dpo(0.6931, 0.0, 0.0), dpo(0.69, 0.02, 0.6)], None, True, ""),
    ],
)
def test_dpo_begins_at_ln_2_and_leaves_it(
    tmp_path: Path, lines: list[str], state: str | None, ok: bool | None, words: str
) -> None:
    found = point(checked(tmp_path, axolotl(len(lines), lines)), "data")
    assert (found["state"], found["ok"]) == (state, ok)
    assert words in found["detail"].get("reason", "")


TRAIN = ("train", "_inner_training_loop", "training_step")
SAVE = ("train", "_maybe_log_save_evaluate", "_save_checkpoint", "save_model")
EVALUATE = ("train", "_maybe_log_save_evaluate", "_evaluate", "evaluation_loop", "nested_concat")


@pytest.mark.parametrize(
    ("frames", "during", "words"),
    [
        (TRAIN, None, "lower the micro-batch"),
        (EVALUATE, "evaluation", "per_device_eval_batch_size"),
        (SAVE, "saving", "save sharded"),
        (
            ("__init__", "_precompute_ref_logps", "forward"),
            "reference",
            "precompute_ref_batch_size",
        ),
        (("main", "from_pretrained"), "loading", "before any batch"),
    ],
)
@pytest.mark.parametrize("writer", [llama_factory, axolotl])
@pytest.mark.parametrize("rank", [None, 1])
def test_memory_that_ran_out_is_blamed_on_what_needed_it(
    tmp_path: Path,
    frames: tuple[str, ...],
    during: str | None,
    words: str,
    writer: Any,
    rank: int | None,
) -> None:
    before = falling(10)[:4] if frames[0] == "train" else []
    content = writer(10, before) + "\n" + traceback(*frames, error=OOM, rank=rank)
    found = point(checked(tmp_path, content), "memory")
    assert (found["state"], found["ok"], found["detail"].get("during")) == ("oom", False, during)
    assert words in found["detail"]["help"]


SAVING = (
    "[INFO|trainer.py:4102] 2026-11-20 15:50:01,001 >> Saving model checkpoint to out/checkpoint-4\n",
    "[2026-11-20 15:50:01,001] [INFO] [axolotl.train.save:201] [PID:201] Saving trained model to ./out.\n",
    "[2026-11-20 15:50:01,001] [INFO] [torch_checkpoint_engine.py:21:save] [Torch] Saving out/step4/zero.pt...\n",
)


@pytest.mark.parametrize("words", SAVING)
def test_a_hang_while_saving_is_called_that(tmp_path: Path, words: str) -> None:
    content = llama_factory(10, falling(10)[:4]) + words + watchdog(6075, "_ALLGATHER_BASE")
    found = point(checked(tmp_path, content), "finish")
    assert (found["state"], found["detail"]["reason"], found["detail"]["during"]) == (
        "crashed",
        "hang_saving",
        "saving",
    )


def test_a_hang_in_training_and_one_in_the_evaluation_are_none_in_a_save(tmp_path: Path) -> None:
    running = llama_factory(10, falling(10)[:4])
    found = point(checked(tmp_path, running + watchdog(6075, "ALLREDUCE")), "finish")
    assert found["detail"]["reason"] == "nccl_timeout"
    evaluating = (
        "[INFO|trainer.py:4300] 2026-11-20 15:50:01,001 >> ***** Running Evaluation *****\n"
    )
    found = point(checked(tmp_path, running + evaluating + watchdog(6075, "ALLREDUCE")), "finish")
    assert found["detail"]["reason"] == "hang_evaluation"


MEETING = ("main", "init_process_group", "_create_c10d_store")


@pytest.mark.parametrize(
    "end",
    [
        traceback(*MEETING, error="torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. "
                  "1/2 clients joined."),
        traceback(*MEETING, error="torch.distributed.DistNetworkError: The client socket has timed out after 300000ms "
                  "while trying to connect to (node-0, 29500)."),
        traceback(*MEETING, error="torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection "
                  "to the C10d store has failed. See inner exception for details."),
        traceback(*MEETING, error="torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"),
        traceback("main", "barrier", rank=1, error="torch.distributed.DistBackendError: [1] is setting up NCCL "
                  "communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
                  "store->get('0') got error: Socket Timeout"),
        "[E1120 18:22:45.1 socket.cpp:793] [c10d] The client socket has timed out after 60s while trying to connect "
        "to (node-0, 2222).\n" + traceback(*MEETING, error="RuntimeError: no store"),
        watchdog(1, "ALLREDUCE"),
    ],
)  # fmt: skip
def test_processes_that_do_not_come_together_are_a_rendezvous(tmp_path: Path, end: str) -> None:
    head = "W1120 18:21:45.100 torch/distributed/run.py:757] Setting OMP_NUM_THREADS environment variable\n"
    found = point(checked(tmp_path, head + end), "finish")
    assert (found["state"], found["detail"].get("reason")) == ("crashed", "rendezvous")


def test_a_rank_that_is_gone_later_is_no_rendezvous(tmp_path: Path) -> None:
    error = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store"
    content = llama_factory(10, falling(10)[:4]) + traceback(*MEETING, error=error)
    assert point(checked(tmp_path, content), "finish")["detail"].get("reason") != "rendezvous"


@pytest.mark.parametrize("quoted", [False, True])
def test_a_loss_of_0_beside_a_gradient_that_is_nan_was_nan(tmp_path: Path, quoted: bool) -> None:
    lines = [hf_step(0.0, 1e-5, n / 10, "nan", quoted=quoted) for n in range(1, 7)]
    found = point(checked(tmp_path, llama_factory(10, lines)), "loss")
    assert (found["state"], found["ok"]) == ("nonfinite", False)
    assert "without any label" in found["detail"]["help"]
    later = [hf_step(2.0, 1e-5, 0.1, quoted=quoted), *lines[1:]]
    found = point(checked(tmp_path, axolotl(10, later)), "loss")
    assert found["detail"]["first_step"] == 2
    assert "lower the learning rate" in found["detail"]["help"]


@pytest.mark.parametrize("writer", [llama_factory, axolotl])
@pytest.mark.parametrize("every", [1, 5])
def test_a_log_that_is_summed_up_is_over(tmp_path: Path, writer: Any, every: int) -> None:
    lines = falling(20)[every - 1 :: every] if writer is llama_factory else falling(20)
    whole = writer(20, lines) + "\n" + summary(20)
    found = point(checked(tmp_path, whole + "***** train metrics *****\n  epoch = 1.0\n"), "finish")
    assert (found["state"], found["ok"]) == ("completed", True)
    # what is cut short is not
    cut = point(checked(tmp_path, writer(20, lines[:-2])), "finish")
    assert cut["state"] == "running"


def test_a_run_that_never_ends_its_last_save_is_not_over(tmp_path: Path) -> None:
    whole = llama_factory(20, falling(20)) + summary(20)
    found = point(checked(tmp_path, whole + SAVING[0]), "finish")
    assert found["state"] == "running"
