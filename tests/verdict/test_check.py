"""Expected + evidence -> verdict, point by point."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DATA
from judged_runs import (
    END,
    SAVED,
    STAMP,
    Run,
    brief,
    dump,
    liger,
    point_of_log,
    sft,
    step,
    total,
    verdict_of_log,
)
from judged_runs import run as run  # a fixture

from launcher.lifecycle import conclude
from launcher.machine import process
from launcher.runs.rundir import RunFolder
from launcher.verdict.check import judge_log

LOGS = DATA / "logs"
MISS = "Cache not found or invalid, transforming datasets...\n"
CACHED = "🚀 Saved transformed dataset to cache/0927\n"
FOUND = "✅ Found cached dataset at cache/0927\n"
SKIPPED = "dataset_skip_cache is True, so we will not load the dataset from cache\n"
WEIGHTS = "[transformers] Model weights saved in out/model.safetensors\n"
ATTEMPT = f"{STAMP}finetune.py:575 - [RANK 0] Attempting to apply liger-kernel.\n"
UNSUPPORTED = "There are currently no Liger kernels supported for model type: gpt2.\n"
OOM = (
    '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/x/finetune.py", line 9\n'
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.25 GiB. GPU 1 has "
    "a total capacity of 79.25 GiB of which 3.19 GiB is free.\n"
)
ELASTIC = (
    "E1120 15:52:26.888000 687 torch/distributed/elastic/multiprocessing/api.py:986] "
    "failed (exitcode: {code}) local_rank: 1 (pid: 688) of binary: /usr/bin/python3\n"
    "Traceback (most recent call last):\n"
    '  File "/usr/bin/accelerate", line 8, in <module>\n'
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "============================================================\n"
    "Root Cause (first observed failure):\n[0]:\n  exitcode  : {code} (pid: 688)\n"
)
RAISED = 'Traceback (most recent call last):\n  File "a.py", line 1\n'
GPU_FAULT = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
NCCL_MEMORY = (
    "torch.distributed.DistBackendError: NCCL error in: /x.cpp:3356, unhandled cuda error\n"
    "Last error:\nCuda failure 2 'out of memory'\n"
)
TIMEOUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)"
WATCHDOG = (
    f"[rank1]:[E1120 16:00 ProcessGroupNCCL.cpp:632] [Rank 1] {TIMEOUT} ran for 1800058 ms\n"
    "[rank1]:[E1120 16:00 ProcessGroupNCCL.cpp:1896] [PG ID 0] Process group watchdog thread "
    f"terminated with exception: [Rank 1] {TIMEOUT}"
)
CANCELLED = "slurmstepd: error: *** {} ON n1 CANCELLED AT 2026-11-20T1 DUE TO {} ***\n"
UNFINISHED = sft(9, until=4)
DPO = dump("DPOExperimentConfig", packing=False)


def hf_loss(norm: str, epoch: int) -> str:
    return f"{{'loss': '2.0', 'grad_norm': '{norm}', 'epoch': '{epoch}.0'}}\n"


def test_the_json_is_the_contract() -> None:
    verdict = judge_log(LOGS / "dpo_liger_pack.log").as_json()
    assert list(verdict) == ["status", "stage", "steps", "points", "metrics"]
    points = verdict["points"]
    assert isinstance(points, list)
    assert [p["name"] for p in points] == [
        *("liger", "packing", "attention", "dataset_cache", "reference_cache"),
        *("loss", "gradients", "trend", "memory", "finish"),
    ]
    for point in points:
        assert list(point) == ["name", "state", "expected", "ok", "evidence", "detail"]
        for cite in point["evidence"]:
            assert list(cite) == ["source", "file", "line", "text"]
    json.dumps(verdict, allow_nan=False)


@pytest.mark.parametrize("record", [None, "{", '{"stage": "sft", "expect": null}'])
def test_without_the_record_of_its_expectations_nothing_passes(
    tmp_path: Path, record: str | None
) -> None:
    folder = RunFolder(tmp_path)
    folder.console(1).write_bytes((LOGS / "sft_cpu_hit.log").read_bytes())
    folder.manifest.write_text('{"stage": "sft", "expect": {}}')
    assert conclude.finish(folder).status == "pass"

    folder.manifest.unlink()
    if record is not None:
        folder.manifest.write_text(record)
    assert conclude.finish(folder).status == "unproven"


def unfinished_run(folder: Path, **identity: object) -> RunFolder:
    """A run whose process is this one, but for what `identity` says otherwise."""
    run = RunFolder(folder)
    run.console(1).write_text(UNFINISHED)
    run.manifest.write_text('{"stage": "sft", "expect": {}}')
    own = process.identify(os.getpid()).as_json()
    record = {**own, "mark": str(folder), **identity}
    run.process.write_text(json.dumps(record))
    return run


def test_a_run_whose_process_lives_is_running(tmp_path: Path) -> None:
    finish = conclude.finish(unfinished_run(tmp_path)).point("finish")
    assert brief(finish) == ("running", None)


def test_of_a_process_on_another_machine_nothing_is_known(tmp_path: Path) -> None:
    finish = conclude.finish(unfinished_run(tmp_path, host="elsewhere")).point("finish")
    assert finish.state == "unknown"


def test_a_run_of_which_no_process_is_left_was_lost(tmp_path: Path) -> None:
    verdict = conclude.finish(unfinished_run(tmp_path, began=1))
    finish = verdict.point("finish")
    assert brief(finish) == ("killed", False)
    assert finish.detail["reason"] == "lost"
    assert verdict.status == "fail"


def test_liger_is_engaged_where_every_rank_counted_calls(run: Run) -> None:
    events = [step(1), liger(rms_norm=4), step(2), liger(rms_norm=8, rope=2)]
    point = run.ranks(events, events).point("liger", "engaged")
    assert brief(point) == ("engaged", True)
    assert point.detail["rms_norm"] == {"0": 8, "1": 8}
    assert {citation.source for citation in point.evidence} == {"probe"}


def test_liger_is_not_engaged_where_a_rank_counted_no_call(run: Run) -> None:
    point = run.ranks([step(1), liger(rope=4)], [step(1)]).point("liger", "engaged")
    assert brief(point) == ("not_engaged", False)
    assert point.detail["idle_ranks"] == [1]


HIT = f"{STAMP}dpo_utils.py:439 - Loading reference logprobs cache from ref/b5.pt\n"
CACHING = f"{STAMP}dpo.py:332 - Caching reference logprobs...\n"
CACHING_BAR = "\rCaching reference logprobs:   0%|   | 0/13 [00:00<?, ?it/s]\n"
WITH_LIGER = dump(use_liger_kernel=True)
DETECTED = f"{STAMP}model_utils.py:93 - Auto-detected attention implementation: flash_2\n"
DPO_SDPA = dump("DPOExperimentConfig", attn_implementation="torch")
NAN_BEHIND_0 = "{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '1e-05', 'epoch': '0.1'}\n"


@pytest.mark.parametrize(
    ("name", "want", "content", "state", "ok"),
    [
        ("liger", "engaged", ATTEMPT, "attempted", None),
        ("liger", "off", ATTEMPT, "attempted", False),
        ("liger", "engaged", ATTEMPT + UNSUPPORTED, "not_engaged", False),
        # a message may be another where the commit is not known; these two cannot be
        ("liger", "engaged", WITH_LIGER + total(3), "unknown", None),
        ("liger", "engaged", WITH_LIGER + "[step=1/3,epoch=1]\n", "off", False),
        ("liger", "off", dump(use_liger_kernel=False), "off", True),
        ("attention", "sdpa", DETECTED, "flash_attention_2", False),
        ("attention", "flash_2", DETECTED, "flash_attention_2", None),
        # the argument of DPO wins over what was detected
        ("attention", "sdpa", DETECTED + DPO_SDPA, "sdpa", None),
        ("dataset_cache", "hit", FOUND * 8, "hit", True),
        ("dataset_cache", "hit", MISS + CACHED + FOUND * 8, "miss", False),
        ("dataset_cache", "hit", FOUND + SKIPPED, "miss", False),
        ("reference_cache", "hit", DPO + HIT, "hit", True),
        ("reference_cache", "hit", DPO + CACHING, "unknown", None),
        ("reference_cache", "hit", DPO + CACHING_BAR, "miss", False),
        # TRL hides a NaN loss behind zero; what the last gradient left is not shown
        ("loss", None, NAN_BEHIND_0, "nonfinite", False),
        ("loss", None, hf_loss("1.0", 1) + hf_loss("nan", 2), "finite", None),
        ("loss", None, hf_loss("inf", 1) + hf_loss("1.0", 2), "finite", True),
    ],
)
def test_a_point_by_the_log(
    tmp_path: Path, name: str, want: str | None, content: str, state: str, ok: bool | None
) -> None:
    assert brief(point_of_log(tmp_path, content, name, want)) == (state, ok)


def test_liger_is_off_for_a_quantised_model(tmp_path: Path) -> None:
    content = dump(use_liger_kernel=True, use_qlora=True) + total(3)
    assert brief(point_of_log(tmp_path, content, "liger", "engaged")) == ("off", False)


LOADING = "Loading weights:   0%|          | 0/38 [00:00<?, ?it/s]\r"


def trained(train: str = "1.9", evaluated: str = "2.1") -> str:
    return (
        LOADING + "{'loss': '2.0', 'grad_norm': '1', 'epoch': '0.5'}\n"
        f"{{'eval_loss': {evaluated}, 'eval_samples_per_second': '2', 'epoch': '0.5'}}\n"
        "{'loss': '1.9', 'grad_norm': '1', 'epoch': '1'}\n"
        "{'train_runtime': '1.6', 'train_samples_per_second': '2', "
        "'train_steps_per_second': '1.25', "
        f"'train_loss': {train}, 'epoch': '1'}}\n💾 Model saved to out.\n"
    )


def test_finite_means_pass(tmp_path: Path) -> None:
    assert verdict_of_log(tmp_path, trained()).status == "pass"


@pytest.mark.parametrize("value", ["'nan'", "nan", "'inf'"])
def test_a_mean_that_is_not_finite_is_that_of_a_step(tmp_path: Path, value: str) -> None:
    verdict = verdict_of_log(tmp_path, trained(train=value))
    loss = verdict.point("loss")
    assert verdict.status == "fail"
    assert brief(loss) == ("nonfinite", False)
    assert loss.evidence[0].line == 4
    assert loss.detail["first_step"] is None
    assert str(loss.detail["reason"]).startswith("the log says that train_loss is ")


@pytest.mark.parametrize("value", ["'nan'", "nan"])
def test_the_loss_of_an_evaluation_that_is_not_finite_proves_nothing(
    tmp_path: Path, value: str
) -> None:
    verdict = verdict_of_log(tmp_path, trained(evaluated=value))
    loss = verdict.point("loss")
    assert verdict.status == "unproven"
    assert brief(loss) == ("finite", None)
    assert loss.evidence[0].line == 2
    assert "eval_loss is " in str(loss.detail["reason"]) and loss.detail["help"]


@pytest.mark.parametrize("is_named", [True, False])
def test_a_log_may_come_through_a_pipe(tmp_path: Path, is_named: bool) -> None:
    reader, writer = os.pipe()
    os.write(writer, trained().encode())
    os.close(writer)
    target = f"/dev/fd/{reader}" if is_named else "-"
    command = [sys.executable, "-m", "launcher", "check", target, "--format", "json"]
    result = subprocess.run(
        command, stdin=reader, pass_fds=[reader], capture_output=True, cwd=tmp_path
    )
    os.close(reader)

    assert result.returncode == 0, result.stderr
    files = set()
    for point in json.loads(result.stdout)["data"]["points"]:
        if point["name"] == "loss":
            files = {citation["file"] for citation in point["evidence"]}
    assert files == {target if is_named else "/dev/stdin"}


FALLING = [2.5 - n / 20 for n in range(20)]
WITH_A_SPIKE = [*FALLING[:11], 92.0, *FALLING[12:]]


@pytest.mark.parametrize(
    ("losses", "state", "ok"),
    [
        (FALLING, "falling", True),
        (FALLING[::-1], "rising", False),
        ([2.55, 2.45] * 10, "flat", False),
        ([2.5 - n / 1e5 for n in range(20)], "flat", False),
        (FALLING[:7], "too_short", None),
        (WITH_A_SPIKE, "falling", True),
    ],
)
def test_trend(tmp_path: Path, losses: list[float], state: str, ok: bool | None) -> None:
    content = sft(len(losses), losses)
    assert brief(point_of_log(tmp_path, content, "trend", "falling")) == (state, ok)
    assert point_of_log(tmp_path, content, "trend").ok is True


def test_out_of_memory_names_what_to_change(tmp_path: Path) -> None:
    arguments = dump(packing=True, per_device_train_batch_size=16)
    content = arguments + sft(9, until=3) + OOM + ELASTIC.format(code=1)
    verdict = verdict_of_log(tmp_path, content)
    assert (verdict.status, verdict.steps) == ("fail", 3)

    memory = verdict.point("memory")
    assert brief(memory) == ("oom", False)
    for word in ("per_device", "checkpointing", "packing"):
        assert word in str(memory.detail["help"])
    assert memory.detail["asked"] == {"per_device_train_batch_size": "16", "packing": "True"}
    assert (memory.detail["tried"], memory.detail["gpu"]) == ("12.25 GiB", "1")

    finish = verdict.point("finish")
    assert brief(finish) == ("crashed", False)
    assert finish.detail["reason"] == "oom"
    error = finish.detail["error"]
    assert isinstance(error, dict) and error["type"] == "torch.OutOfMemoryError"


def hf(steps: int, end: str) -> str:
    """A run of HF Trainer's, and what its script says behind it."""
    lines = [f"\r  0%|  | 0/{steps} [00:00<?, ?it/s]"]
    for number in range(1, steps + 1):
        values = {"loss": 2.5 - number / 100, "grad_norm": 1.0, "epoch": number / steps}
        bar = f"\r {100 * number // steps}%|█ | {number}/{steps} [00:01<00:09,  1.00s/it]"
        lines.append(f"{bar}{values}\n")
    lines.append(f"{{'train_runtime': 9.9, 'epoch': 1.0}}\n{end}")
    return "".join(lines)


ADAPTER = f"{STAMP}utils.py:835 - Remaining files:['adapter_model.safetensors']\n"
SAVING = "[INFO|trainer.py:3410] 2024-06-02 20:48:34,558 >> Saving model checkpoint to out\n"
TOKENIZER = "[INFO|x.py:25] 2024-06-02 >> tokenizer config file saved in {}/tokenizer_config.json\n"


@pytest.mark.parametrize(
    ("content", "state", "reason"),
    [
        (sft(9) + WEIGHTS, "completed", None),
        (sft(9) + WEIGHTS.replace("out/", "out/step_9/"), "running", None),
        (sft(9) + ADAPTER, "completed", None),
        (UNFINISHED + ELASTIC.format(code=-9), "killed", "killed"),
        (UNFINISHED + ELASTIC.format(code=-15), "stopped", None),
        (UNFINISHED + WATCHDOG, "crashed", "nccl_timeout"),
        (UNFINISHED + CANCELLED.format("STEP 1.0", "TIME LIMIT"), "killed", "time_limit"),
        (CANCELLED.format("JOB 2", "PREEMPTION") + UNFINISHED, "running", None),
        (RAISED + GPU_FAULT + "[rank0]:[E1120] " + TIMEOUT, "crashed", "gpu_fault"),
        (RAISED + NCCL_MEMORY, "crashed", "oom"),
        (hf(9, SAVING + TOKENIZER.format("out")), "completed", None),
        (hf(9, SAVING + TOKENIZER.format("other")), "running", None),
    ],
)
def test_finish_by_the_log(tmp_path: Path, content: str, state: str, reason: str | None) -> None:
    point = point_of_log(tmp_path, content, "finish")
    ok = {"completed": True, "running": None}.get(state, False)
    assert brief(point) == (state, ok)
    assert point.detail.get("reason") == reason
    has_help = "help" in point.detail
    assert has_help is (reason is not None)


@pytest.mark.parametrize(
    ("code", "number", "state"),
    [
        (0, None, "completed"),
        (1, None, "crashed"),
        (-9, signal.SIGKILL, "killed"),
        (1, signal.SIGINT, "stopped"),
        (-11, signal.SIGSEGV, "crashed"),
    ],
)
def test_finish_by_the_exit(run: Run, code: int, number: int | None, state: str) -> None:
    point = run.log(sft(9) + WEIGHTS).exit(code, number).point("finish")
    assert brief(point) == (state, state == "completed")
    assert point.detail["returncode"] == code
    assert point.evidence[-1].source == "exit"


@pytest.mark.parametrize(
    ("content", "state", "ok", "reason"),
    [
        (UNFINISHED, "stopped", False, "ended_early"),
        (sft(9), "stopped", None, "no_save"),
        (dump(cache_dataset_only=True) + MISS, "completed", True, None),
    ],
)
def test_a_clean_exit_is_not_yet_a_finish(
    run: Run, content: str, state: str, ok: bool | None, reason: str | None
) -> None:
    point = run.log(content).exit(0).point("finish")
    assert brief(point) == (state, ok)
    assert point.detail.get("reason") == reason


def test_a_saved_model_finishes_a_run_whose_log_is_silent(run: Run) -> None:
    run.log("").rank(0, step(1), step(2), SAVED, END).exit(0)
    assert brief(run.point("finish")) == ("completed", True)


def test_a_saved_checkpoint_finishes_no_run(run: Run) -> None:
    checkpoint = {"event": "saved", "path": "out/checkpoint-2"}
    run.log("").rank(0, step(1), step(2), checkpoint, END).exit(0)
    assert brief(run.point("finish")) == ("stopped", None)


@pytest.mark.parametrize(
    ("name", "want", "content", "pinned", "state", "ok"),
    [
        ("liger", "engaged", WITH_LIGER + total(3), True, "off", False),
        ("dataset_cache", "hit", FOUND, True, "hit", True),
        ("dataset_cache", "hit", FOUND, False, "unknown", None),
    ],
)
def test_what_another_source_does_not_print_proves_nothing_by_its_absence(
    run: Run, name: str, want: str, content: str, pinned: bool, state: str, ok: bool | None
) -> None:
    run.manifest({"upstream": {"pinned": pinned}}).log(content)
    assert brief(run.point(name, want)) == (state, ok)


def test_the_log_tells_which_violation_stopped_a_run(tmp_path: Path) -> None:
    reason = "loss is nan (step 2, rank 1); last finite: loss 6.9 at step 1"
    end = f"\nlaunch: stopped: {reason}\n" + ELASTIC.format(code=79)
    verdict = verdict_of_log(tmp_path, sft(4, until=1) + end)
    assert verdict.stopped == reason

    finish = verdict.point("finish")
    assert brief(finish) == ("stopped", False)
    assert finish.detail["reason"] == "violation"
    assert finish.detail["error"] == {"type": "violation", "message": reason}

    loss = verdict.point("loss")
    assert brief(loss) == ("nonfinite", False)
    assert (loss.detail["first_step"], loss.detail["rank"]) == (2, 1)


def test_the_log_tells_that_a_hang_stopped_a_run(tmp_path: Path) -> None:
    hang = "launch: stopped: nothing moved for 301 s after step 1 (limit 300 s), rank 0"
    finish = point_of_log(tmp_path, f"{sft(4, until=1)}\n{hang}\n", "finish")
    assert (finish.state, finish.detail["reason"]) == ("stopped", "hang")


def dpo_log(cache: str, loss_type: str, first: float) -> str:
    """Two steps of DPO, the first with this loss."""
    arguments = dump("DPOExperimentConfig", loss_type=loss_type, load_balancing_loss=False)
    lines = []
    for number, loss in enumerate((first, 0.6), start=1):
        values = f"Step: {number}, LR: 5e-07, Loss: {loss}"
        lines.append(f"{STAMP}dpo_tune_cache.py:682 -   {values}\n")
    return arguments + cache + total(2) + "".join(lines)


@pytest.mark.parametrize(
    ("loss_type", "first", "state", "ok"),
    [
        ("dpo_norm", 0.6931471824645996, "hit", True),
        ("dpo", 0.6931, "hit", True),
        ("dpo_norm", 0.8, "stale", None),
        ("dpo", 0.5, "stale", None),
        ("simpo", 0.8, "hit", True),
    ],
)
def test_a_first_loss_that_is_not_ln_2_throws_doubt_on_the_reference_cache(
    tmp_path: Path, loss_type: str, first: float, state: str, ok: bool | None
) -> None:
    verdict = verdict_of_log(tmp_path, dpo_log(HIT, loss_type, first))
    assert brief(verdict.point("reference_cache")) == (state, ok)


def test_a_reference_cache_that_this_run_wrote_is_not_doubted(tmp_path: Path) -> None:
    saving = f"{STAMP}dpo_utils.py:517 - Saving reference logprobs cache to r\n"
    verdict = verdict_of_log(tmp_path, dpo_log(saving, "dpo", 0.8))
    assert brief(verdict.point("reference_cache")) == ("miss", True)


def loss_of(folder: Path, content: str) -> tuple[str, bool | None]:
    return brief(verdict_of_log(folder, content).point("loss"))


def test_a_loss_before_training_is_announced_proves_nothing(tmp_path: Path) -> None:
    announced = sft(4, losses=["nan"])
    line = announced.removeprefix(total(4))
    arguments = dump(packing=False)
    assert loss_of(tmp_path, arguments + line) == ("nonfinite", None)
    assert loss_of(tmp_path, arguments + announced) == ("nonfinite", False)
    assert loss_of(tmp_path, line) == ("nonfinite", False)


def test_the_arguments_of_a_log_without_its_head_are_not_known(tmp_path: Path) -> None:
    """open-instruct shows its arguments before it trains: where they are missing, more may be."""
    content = FOUND + sft(4) + WEIGHTS
    verdict = verdict_of_log(tmp_path, content)
    assert verdict.status == "unproven"
    for name in ("liger", "packing"):
        point = verdict.point(name)
        assert (point.expected, point.ok) == ("unknown", None)
    assert verdict.point("dataset_cache").state == "unknown"

    whole = dump(use_liger_kernel=False, packing=False) + content
    assert verdict_of_log(tmp_path, whole).point("dataset_cache").state == "hit"


RANK_RAISED = '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "a.py", line 1\n'
LOST = RANK_RAISED.format(0)
LOST += "[rank0]: RuntimeError: [pair.cc:534] Connection closed by peer [::1]:9\n"
CAUSE = RANK_RAISED.format(1) + "[rank1]: KeyError: 'x'\n"


@pytest.mark.parametrize(
    ("end", "kind", "rank"), [(LOST + CAUSE, "KeyError", "1"), (LOST, "RuntimeError", "0")]
)
def test_a_rank_that_lost_the_others_is_not_the_cause(
    tmp_path: Path, end: str, kind: str, rank: str
) -> None:
    finish = point_of_log(tmp_path, f"{UNFINISHED}\n{end}", "finish")
    error = finish.detail["error"]
    assert isinstance(error, dict)
    assert (error["type"], error["rank"]) == (kind, rank)
