"""Expected + evidence -> verdict, point by point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA

from launcher.lifecycle import conclude
from launcher.machine import process
from launcher.runs.rundir import RunFolder
from launcher.verdict.check import Point, Verdict, expected_by_log, judge_evidence, judge_log
from launcher.verdict.evidence import read_log, read_run

LOGS = DATA / "logs"
STAMP = "2026-11-20 15:41:37 - INFO - "
MISS = "Cache not found or invalid, transforming datasets...\n"
SAVED = "🚀 Saved transformed dataset to cache/0927\n"
FOUND = "✅ Found cached dataset at cache/0927\n"
SKIPPED = "dataset_skip_cache is True, so we will not load the dataset from cache\n"
WEIGHTS = "[transformers] Model weights saved in out/model.safetensors\n"
ATTEMPT = f"{STAMP}finetune.py:575 - [RANK 0] Attempting to apply liger-kernel.\n"
OOM = (
    '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/x/finetune.py", line 9\n'
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.25 GiB. GPU 1 has a "
    "total capacity of 79.25 GiB of which 3.19 GiB is free.\n"
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
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)"
CANCELLED = "slurmstepd: error: *** {} ON n1 CANCELLED AT 2026-11-20T1 DUE TO {} ***\n"


def total(steps: int) -> str:
    return f"{STAMP}finetune.py:745 - [RANK 0]   Total optimization steps = {steps}\n"


def sft(steps: int, losses: Sequence[float | str] = (), until: int | None = None) -> str:
    """The log of an SFT run as far as its last loss line."""
    values = losses or [2.5] * steps
    tail = "TPS: 12.5\n"
    lines = [
        f"\r 10%|█ | {n}/{steps} [00:01<00:09,  1.00s/it]{STAMP}finetune.py:956 - [RANK 0]   "
        f"Step: {n}, LR: 1e-05, Loss: {loss}, {tail}"
        for n, loss in enumerate(values[:until], start=1)
    ]
    return total(steps) + "".join(lines)


GOING = sft(9, until=4)


def dump(block: str = "FlatArguments", **values: object) -> str:
    lines = "".join(f"│   │   {key}={value!r},\n" for key, value in values.items())
    return f"[\n│   {block}(\n{lines}│   )\n]\n"


DPO = dump("DPOExperimentConfig", packing=False)


def verdict_of_log(
    folder: Path, content: str, expected: Mapping[str, str | None] | None = None
) -> Verdict:
    path = folder / "some.log"
    path.write_text(content)
    evidence = read_log(path)
    return judge_evidence(
        None, expected_by_log(evidence) if expected is None else expected, evidence
    )


class Run:
    """A run folder in the making."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "probe").mkdir()

    def log(self, content: str) -> Run:
        (self.folder / "console.log").write_text(content)
        return self

    def rank(self, number: int, *events: dict[str, Any], world: int = 1) -> Run:
        begin = {"event": "start", "rank": number, "world": world, "attempt": 1}
        text = "".join(json.dumps(event) + "\n" for event in (begin, *events))
        (self.folder / "probe" / f"rank-{number}.jsonl").write_text(text)
        return self

    def exit(self, code: int, number: int | None = None, stopped: int | None = None) -> Run:
        values = {"returncode": code, "signal": number, "stopped": stopped, "attempt": 1}
        (self.folder / "exit.json").write_text(json.dumps(values))
        return self

    def judge(self, stage: str = "sft", **expected: str | None) -> Verdict:
        return judge_evidence(stage, expected, read_run(self.folder))  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def step(number: int, loss: float | None = 2.0, finite: bool = True) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": loss, "finite": finite}


def liger(**calls: int) -> dict[str, Any]:
    return {"event": "liger", "calls": calls}


def hf_loss(norm: str, epoch: int) -> str:
    return f"{{'loss': '2.0', 'grad_norm': '{norm}', 'epoch': '{epoch}.0'}}\n"


def by_log(folder: Path, content: str, name: str, want: str | None = None) -> Point:
    return verdict_of_log(folder, content, {name: want} if want else {}).point(name)


def brief(point: Point) -> tuple[str, bool | None]:
    return point.state, point.ok


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
def test_without_the_record_of_what_was_asked_for_nothing_passes(
    tmp_path: Path, record: str | None
) -> None:
    folder = RunFolder(tmp_path)
    folder.console(1).write_bytes((LOGS / "sft_cpu_hit.log").read_bytes())
    folder.manifest.write_text('{"stage": "sft", "expect": {}}')
    assert conclude.finish(folder).status == "pass"
    folder.manifest.unlink() if record is None else folder.manifest.write_text(record)
    assert conclude.finish(folder).status == "unproven"


def test_a_run_of_which_nothing_is_left_does_not_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.console(1).write_text(sft(9, until=4))
    folder.manifest.write_text('{"stage": "sft", "expect": {}}')
    here = process.identify(os.getpid()).as_json()

    def finish(**changed: object) -> Point:
        folder.process.write_text(json.dumps({**here, "mark": str(tmp_path), **changed}))
        return conclude.finish(folder).point("finish")

    assert (finish().state, finish().ok) == ("running", None)
    # of another machine nobody here knows
    assert finish(host="elsewhere").state == "unknown"
    lost = finish(began=1)
    assert (lost.state, lost.ok, lost.detail["reason"]) == ("killed", False, "lost")
    assert conclude.finish(folder).status == "fail"


def test_liger_is_engaged_where_every_rank_counted_calls(run: Run) -> None:
    for rank in range(2):
        run.rank(rank, step(1), liger(rms_norm=4), step(2), liger(rms_norm=8, rope=2), world=2)
    point = run.judge(liger="engaged").point("liger")
    assert brief(point) == ("engaged", True)
    assert point.detail["rms_norm"] == {"0": 8, "1": 8}
    assert {cite.source for cite in point.evidence} == {"probe"}
    # on some ranks only
    run.rank(0, step(1), liger(rope=4), world=2).rank(1, step(1), world=2)
    point = run.judge(liger="engaged").point("liger")
    assert (brief(point), point.detail["idle_ranks"]) == (("not_engaged", False), [1])


HIT = f"{STAMP}dpo_utils.py:439 - Loading reference logprobs cache from ref/b5.pt\n"
ASKED = dump(use_liger_kernel=True)
DETECTED = f"{STAMP}model_utils.py:93 - Auto-detected attention implementation: flash_2\n"


@pytest.mark.parametrize(
    ("name", "content", "want", "answer"),
    [
        ("liger", ATTEMPT, "engaged", ("attempted", None)),
        ("liger", ATTEMPT, "off", ("attempted", False)),
        ("liger", ATTEMPT + "There are currently no Liger kernels supported for model type: gpt2.\n",
         "engaged", ("not_engaged", False)),
        # a message may be another where the commit is not known; these two cannot be
        ("liger", ASKED + total(3), "engaged", ("unknown", None)),
        ("liger", dump(use_liger_kernel=True, use_qlora=True) + total(3), "engaged", ("off", False)),
        ("liger", ASKED + "[step=1/3,epoch=1]\n", "engaged", ("off", False)),
        ("liger", dump(use_liger_kernel=False), "off", ("off", True)),
        ("attention", DETECTED, "sdpa", ("flash_attention_2", False)),
        ("attention", DETECTED, "flash_2", ("flash_attention_2", None)),
        # what DPO was told wins over what was detected
        ("attention", DETECTED + dump("DPOExperimentConfig", attn_implementation="torch"), "sdpa", ("sdpa", None)),
        ("dataset_cache", FOUND * 8, "hit", ("hit", True)),
        ("dataset_cache", MISS + SAVED + FOUND * 8, "hit", ("miss", False)),
        ("dataset_cache", FOUND + SKIPPED, "hit", ("miss", False)),
        ("reference_cache", DPO + HIT, "hit", ("hit", True)),
        ("reference_cache", DPO + f"{STAMP}dpo.py:332 - Caching reference logprobs...\n", "hit", ("unknown", None)),
        ("reference_cache", DPO + "\rCaching reference logprobs:   0%|   | 0/13 [00:00<?, ?it/s]\n",
         "hit", ("miss", False)),
        # TRL hides a NaN loss behind zero; of the last gradient nothing shows what it left
        ("loss", "{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '1e-05', 'epoch': '0.1'}\n",
         None, ("nonfinite", False)),
        ("loss", hf_loss("1.0", 1) + hf_loss("nan", 2), None, ("finite", None)),
        ("loss", hf_loss("inf", 1) + hf_loss("1.0", 2), None, ("finite", True)),
    ],
)  # fmt: skip
def test_a_point_by_the_log(
    tmp_path: Path, name: str, content: str, want: str | None, answer: tuple[str, bool | None]
) -> None:
    assert brief(by_log(tmp_path, content, name, want)) == answer


LOADING = "Loading weights:   0%|          | 0/38 [00:00<?, ?it/s]\r"


def trained(train: str = "1.9", evaluated: str = "2.1") -> str:
    return (
        LOADING + "{'loss': '2.0', 'grad_norm': '1', 'epoch': '0.5'}\n"
        f"{{'eval_loss': {evaluated}, 'eval_samples_per_second': '2', 'epoch': '0.5'}}\n"
        "{'loss': '1.9', 'grad_norm': '1', 'epoch': '1'}\n"
        "{'train_runtime': '1.6', 'train_samples_per_second': '2', 'train_steps_per_second': '1.25', "
        f"'train_loss': {train}, 'epoch': '1'}}\n💾 Model saved to out.\n"
    )


@pytest.mark.parametrize("value", ["'nan'", "nan", "'inf'"])
def test_a_mean_that_is_not_finite_is_that_of_a_step_or_of_an_evaluation(
    tmp_path: Path, value: str
) -> None:
    assert verdict_of_log(tmp_path, trained()).status == "pass"
    verdict = verdict_of_log(tmp_path, trained(train=value))
    point = verdict.point("loss")
    assert (verdict.status, brief(point)) == ("fail", ("nonfinite", False))
    assert point.evidence[0].line == 4 and point.detail["first_step"] is None
    assert str(point.detail["reason"]).startswith("the log says that train_loss is ")
    verdict = verdict_of_log(tmp_path, trained(evaluated=value))
    point = verdict.point("loss")
    assert (verdict.status, brief(point)) == ("unproven", ("finite", None))
    assert point.evidence[0].line == 2
    assert "eval_loss is " in str(point.detail["reason"]) and point.detail["help"]


@pytest.mark.parametrize("how", ["-", "pipe"])
def test_a_log_may_come_through_a_pipe(tmp_path: Path, how: str) -> None:
    reader, writer = os.pipe()
    os.write(writer, trained().encode())
    os.close(writer)
    target = f"/dev/fd/{reader}" if how == "pipe" else how
    command = [sys.executable, "-m", "launcher", "check", target, "--format", "json"]
    done = subprocess.run(
        command, stdin=reader, pass_fds=[reader], capture_output=True, cwd=tmp_path
    )
    os.close(reader)
    assert done.returncode == 0, done.stderr
    (loss,) = (p for p in json.loads(done.stdout)["data"]["points"] if p["name"] == "loss")
    assert {entry["file"] for entry in loss["evidence"]} == {"/dev/stdin" if how == "-" else target}


@pytest.mark.parametrize(
    ("losses", "state", "ok"),
    [
        ([2.5 - n / 20 for n in range(20)], "falling", True),
        ([2.5 + n / 20 for n in range(20)], "rising", False),
        ([2.5 + (-1) ** n / 20 for n in range(20)], "flat", False),
        ([2.5 - n / 1e5 for n in range(20)], "flat", False),
        ([2.5 - n / 20 for n in range(7)], "too_short", None),
        ([2.5 - n / 20 + 90 * (n == 11) for n in range(20)], "falling", True),
    ],
)
def test_trend(tmp_path: Path, losses: list[float], state: str, ok: bool | None) -> None:
    content = sft(len(losses), losses)
    assert brief(by_log(tmp_path, content, "trend", "falling")) == (state, ok)
    assert by_log(tmp_path, content, "trend").ok is True


def test_out_of_memory_says_what_to_change(tmp_path: Path) -> None:
    asked = dump(packing=True, per_device_train_batch_size=16)
    verdict = verdict_of_log(tmp_path, asked + sft(9, until=3) + OOM + ELASTIC.format(code=1))
    memory, finish = verdict.point("memory"), verdict.point("finish")
    assert brief(memory) == ("oom", False)
    for word in ("per_device", "checkpointing", "packing"):
        assert word in str(memory.detail["help"])
    assert memory.detail["asked"] == {"per_device_train_batch_size": "16", "packing": "True"}
    assert (memory.detail["tried"], memory.detail["gpu"]) == ("12.25 GiB", "1")
    assert brief(finish) == ("crashed", False)
    assert finish.detail["reason"] == "oom"
    error = finish.detail["error"]
    assert isinstance(error, dict) and error["type"] == "torch.OutOfMemoryError"
    assert (verdict.status, verdict.steps) == ("fail", 3)


def hf(steps: int, end: str) -> str:
    """A run of HF Trainer's, and what its script says behind it."""
    bars = "".join(
        f"\r {100 * n // steps}%|█ | {n}/{steps} [00:01<00:09,  1.00s/it]"
        f"{ {'loss': 2.5 - n / 100, 'grad_norm': 1.0, 'epoch': n / steps} }\n"
        for n in range(1, steps + 1)
    )
    return (
        f"\r  0%|  | 0/{steps} [00:00<?, ?it/s]{bars}{{'train_runtime': 9.9, 'epoch': 1.0}}\n{end}"
    )


SAVING = "[INFO|trainer.py:3410] 2024-06-02 20:48:34,558 >> Saving model checkpoint to {}\n"
TOKENIZER = "[INFO|x.py:25] 2024-06-02 >> tokenizer config file saved in {}/tokenizer_config.json\n"


@pytest.mark.parametrize(
    ("content", "state", "reason"),
    [
        (sft(9) + WEIGHTS, "completed", None),
        (sft(9) + WEIGHTS.replace("out/", "out/step_9/"), "running", None),
        (sft(9) + f"{STAMP}utils.py:835 - Remaining files:['adapter_model.safetensors']\n", "completed", None),
        (GOING + ELASTIC.format(code=-9), "killed", "killed"),
        (GOING + ELASTIC.format(code=-15), "stopped", None),
        (GOING + "[rank1]:[E1120 16:00 ProcessGroupNCCL.cpp:632] [Rank 1] " + WATCHDOG + " ran for 1800058 ms\n"
         "[rank1]:[E1120 16:00 ProcessGroupNCCL.cpp:1896] [PG ID 0] Process group watchdog thread terminated with "
         "exception: [Rank 1] " + WATCHDOG, "crashed", "nccl_timeout"),
        (GOING + CANCELLED.format("STEP 1.0", "TIME LIMIT"), "killed", "time_limit"),
        (CANCELLED.format("JOB 2", "PREEMPTION") + sft(9, until=4), "running", None),
        (RAISED + "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
         "[rank0]:[E1120] " + WATCHDOG, "crashed", "gpu_fault"),
        (RAISED + "torch.distributed.DistBackendError: NCCL error in: /x.cpp:3356, unhandled cuda error\n"
         "Last error:\nCuda failure 2 'out of memory'\n", "crashed", "oom"),
        (hf(9, SAVING.format("out") + TOKENIZER.format("out")), "completed", None),
        (hf(9, SAVING.format("out") + TOKENIZER.format("other")), "running", None),
    ],
)  # fmt: skip
def test_finish_by_the_log(tmp_path: Path, content: str, state: str, reason: str | None) -> None:
    point = by_log(tmp_path, content, "finish")
    ok = {"completed": True, "running": None}.get(state, False)
    assert (*brief(point), point.detail.get("reason")) == (state, ok, reason)
    assert ("help" in point.detail) == (reason is not None)


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
    point = run.log(sft(9) + WEIGHTS).exit(code, number).judge().point("finish")
    assert brief(point) == (state, state == "completed")
    assert point.detail["returncode"] == code
    assert point.evidence[-1].source == "exit"


@pytest.mark.parametrize(
    ("content", "answer", "reason"),
    [
        (sft(9, until=4), ("stopped", False), "ended_early"),
        (sft(9), ("stopped", None), "no_save"),
        (dump(cache_dataset_only=True) + MISS, ("completed", True), None),
    ],
)
def test_a_clean_exit_is_not_yet_a_finish(
    run: Run, content: str, answer: tuple[str, bool | None], reason: str | None
) -> None:
    point = run.log(content).exit(0).judge().point("finish")
    assert (brief(point), point.detail.get("reason")) == (answer, reason)


def test_the_probe_tells_the_finish_where_the_log_is_silent(run: Run) -> None:
    for path, answer in (("out", ("completed", True)), ("out/checkpoint-2", ("stopped", None))):
        run.log("").rank(
            0, step(1), step(2), {"event": "saved", "path": path}, {"event": "end", "exit": 0}
        ).exit(0)
        assert brief(run.judge().point("finish")) == answer


@pytest.mark.parametrize(
    ("name", "want", "content", "pinned", "answer"),
    [
        ("liger", "engaged", ASKED + total(3), True, ("off", False)),
        ("dataset_cache", "hit", FOUND, True, ("hit", True)),
        ("dataset_cache", "hit", FOUND, False, ("unknown", None)),
    ],
)
def test_what_another_source_does_not_print_proves_nothing_by_its_absence(
    run: Run, name: str, want: str, content: str, pinned: bool, answer: tuple[str, bool | None]
) -> None:
    (run.folder / "run.json").write_text(json.dumps({"upstream": {"pinned": pinned}}))
    assert brief(run.log(content).judge(**{name: want}).point(name)) == answer


def test_the_log_tells_why_a_run_was_stopped(tmp_path: Path) -> None:
    why = "loss is nan (step 2, rank 1); last finite: loss 6.9 at step 1"
    end = f"\nlaunch: stopped: {why}\n" + ELASTIC.format(code=79)
    verdict = verdict_of_log(tmp_path, sft(4, until=1) + end)
    finish, loss = verdict.point("finish"), verdict.point("loss")
    assert (*brief(finish), finish.detail["reason"]) == ("stopped", False, "violation")
    assert finish.detail["error"] == {"type": "violation", "message": why}
    assert (*brief(loss), loss.detail["first_step"], loss.detail["rank"]) == (
        "nonfinite",
        False,
        2,
        1,
    )
    assert verdict.stopped == why
    hang = "\nlaunch: stopped: nothing moved for 301 s after step 1 (limit 300 s), rank 0\n"
    finish = by_log(tmp_path, sft(4, until=1) + hang, "finish")
    assert (finish.state, finish.detail["reason"]) == ("stopped", "hang")


DPO_STEP = STAMP + "dpo_tune_cache.py:682 -   Step: {}, LR: 5e-07, Loss: {}\n"


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
    asked = dump("DPOExperimentConfig", loss_type=loss_type, load_balancing_loss=False)
    content = asked + HIT + total(2) + DPO_STEP.format(1, first) + DPO_STEP.format(2, 0.6)
    verdict = verdict_of_log(tmp_path, content)
    assert brief(verdict.point("reference_cache")) == (state, ok)
    missed = content.replace(
        HIT, f"{STAMP}dpo_utils.py:517 - Saving reference logprobs cache to r\n"
    )
    assert brief(verdict_of_log(tmp_path, missed).point("reference_cache")) == ("miss", True)


def test_a_loss_before_training_is_announced_proves_nothing(tmp_path: Path) -> None:
    bad = sft(4, losses=["nan"])
    asked, line = dump(packing=False), bad.removeprefix(total(4))
    assert brief(verdict_of_log(tmp_path, asked + line).point("loss")) == ("nonfinite", None)
    assert brief(verdict_of_log(tmp_path, asked + bad).point("loss")) == ("nonfinite", False)
    assert brief(verdict_of_log(tmp_path, line).point("loss")) == ("nonfinite", False)


def test_what_a_log_without_its_head_was_asked_for_is_not_known(tmp_path: Path) -> None:
    """open-instruct shows its arguments before it trains: where they are missing, more may be."""
    content = FOUND + sft(4) + WEIGHTS
    verdict = verdict_of_log(tmp_path, content)
    assert verdict.status == "unproven"
    for name in ("liger", "packing"):
        assert (verdict.point(name).expected, verdict.point(name).ok) == ("unknown", None)
    assert verdict.point("dataset_cache").state == "unknown"
    whole = dump(use_liger_kernel=False, packing=False) + content
    assert verdict_of_log(tmp_path, whole).point("dataset_cache").state == "hit"


def error_of(folder: Path, content: str) -> tuple[str, str, str | None]:
    error = verdict_of_log(folder, content).point("finish").detail["error"]
    assert isinstance(error, dict)
    return error["type"], error["message"], error.get("rank")


def test_a_rank_that_lost_the_others_is_not_the_cause(tmp_path: Path) -> None:
    raised = '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "a.py", line 1\n'
    lost = (
        raised.format(0)
        + "[rank0]: RuntimeError: [pair.cc:534] Connection closed by peer [::1]:9\n"
    )
    cause = raised.format(1) + "[rank1]: KeyError: 'x'\n"
    content = sft(9, until=4) + "\n"
    assert error_of(tmp_path, content + lost + cause) == ("KeyError", "'x'", "1")
    assert error_of(tmp_path, content + lost)[2] == "0"
